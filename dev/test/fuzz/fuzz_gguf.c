// fuzz_gguf.c -- reads random GGUF files: no crash, no read out of bounds. All values and tensors of
// an accepted file can be read, and its keys give a configuration or a reason why not. Run by
// dev/test/fuzz/fuzz.sh.
#include "fuzz.h"

#define GGUF_FILE_IMPLEMENTATION
#define GGUF_MODEL_IMPLEMENTATION

#include "llmc/base/gguf_file.h"
#include "llmc/formats/gguf_model.h"

static void read_config(void* file) {
    const GgufFile* f = (const GgufFile*)file;
    const ModelConfig cfg = gguf_config_(f);
    char error[ERROR_BYTES];
    if (!model_check_config(cfg, "fuzz", error)) {
        abort();
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
}

// In exactly its bytes of memory, so that every step beyond them is seen.
int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes);
int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes) {
    static char path[] = "fuzz";
    GgufFile f;
    memset(&f, 0, sizeof(f));
    f.path = path;
    f.map = (unsigned char*)malloc(bytes ? bytes : 1);
    memcpy(f.map, data, bytes);
    f.map_bytes = bytes;
    const int ok = gguf_parse_(&f);
    if (!ok && strncmp(f.error, "fuzz: ", 6) != 0) {
        abort();
    }
    for (size_t i = 0; ok && i < f.num_pairs; i++) {
        read_pair(&f.pairs[i]);
    }
    for (size_t i = 0; ok && i < f.num_tensors; i++) {
        const GgufTensor* t = &f.tensors[i];
        float* out = (float*)malloc(t->elements * sizeof(float));
        gguf_read(t, 0, t->elements, out);
        free(out);
        if (gguf_tensor(&f, t->name) != t) {
            abort();
        }
    }
    if (ok) {
        fuzz_survives(read_config, &f);
    }
    free(f.map);
    free(f.pairs);
    free(f.tensors);
    return 0;
}
