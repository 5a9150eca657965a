// fuzz_gguf.c -- reads random GGUF files: no crash, no read out of bounds. All values and tensors
// of an accepted file can be read, and its keys give a configuration or a reason why not. Run by
// dev/test/fuzz/fuzz.sh.
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

// Memory of one input, which an error leaves behind.
static void* kept[16];
static size_t num_kept = 0;

static int fuzz_memalign(void** memory, size_t alignment, size_t bytes) {
    const int failed = posix_memalign(memory, alignment, bytes);
    if (num_kept == sizeof(kept) / sizeof(kept[0])) {
        abort();
    }
    kept[num_kept++] = failed ? NULL : *memory;
    return failed;
}

#define posix_memalign fuzz_memalign
#define free(memory) ((void)(memory)) // with the input
#define strdup(text) ((char*)(text))
#define munmap(map, bytes) ((void)(map), (void)(bytes))
#define GGUF_FILE_IMPLEMENTATION
#define GGUF_TENSORS_IMPLEMENTATION
#define GGUF_CONFIG_IMPLEMENTATION
#define SAFETENSORS_IMPLEMENTATION
#include "llmc/base/gguf_file.h"
#include "llmc/formats/gguf_config.h"
#include "llmc/formats/gguf_tensors.h"
#undef free

static void parse(void* file) { gguf_parse_((GgufFile*)file); }

static void read_config(void* file) {
    GgufFile f = *(const GgufFile*)file;
    char error[ERROR_BYTES];
    if (!model_check_config(gguf_config_(&f), "fuzz", error)) {
        abort();
    }
}

static void read_tensors(void* file) {
    GgufFile f = *(const GgufFile*)file;
    const SafeTensors st = gguf_tensors(&f);
    for (size_t i = 0; i < st.num_tensors; i++) {
        const SafeTensorsView* view = &st.tensors[i];
        float* out = (float*)malloc(view->elements * sizeof(float) + 1);
        safetensors_decode(out, view->data, view->dtype, 0, view->elements);
        free(out);
        if (safetensors_find(&st, view->name) != view) {
            abort();
        }
    }
}

static void read_pair(const GgufPair* pair) {
    volatile double sum = 0;
    size_t at = 0;
    for (size_t i = 0; i < pair->count; i++) {
        const double number = gguf_number(pair, i);
        const GgufText text = gguf_text(pair, &at);
        sum += isnan(number) ? 0 : number;
        for (size_t k = 0; k < text.length; k++) {
            sum += text.text[k];
        }
    }
    (void)sum;
}

// In exactly its bytes of memory, so that every step beyond them is seen.
int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes);
int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes) {
    GgufFile f;
    memset(&f, 0, sizeof(f));
    f.path = "fuzz";
    f.map = (unsigned char*)malloc(bytes ? bytes : 1);
    memcpy(f.map, data, bytes);
    f.bytes = bytes;
    if (fuzz_survives(parse, &f)) {
        for (size_t i = 0; i < f.num_pairs; i++) {
            read_pair(&f.pairs[i]);
        }
        fuzz_survives(read_tensors, &f);
        fuzz_survives(read_config, &f);
    }
    free(f.map);
    while (num_kept > 0) {
        free(kept[--num_kept]);
    }
    return 0;
}
