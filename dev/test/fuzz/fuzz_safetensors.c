// fuzz_safetensors.c -- reads random safetensors files: no crash, no read out of bounds, and
// accepted tensors can be read. The first bit of the input selects a file or the index of a model
// in several files. Run by dev/test/fuzz/fuzz.sh.
#define SAFETENSORS_IMPLEMENTATION

#include "llmc/formats/safetensors.h"

// In exactly its bytes of memory, so that every step beyond them is seen.
static void fuzz_file(const unsigned char* data, size_t bytes) {
    SafeTensors st;
    memset(&st, 0, sizeof(st));
    st.path = safetensors_copy_("fuzz");
    st.map = (unsigned char*)malloc(bytes ? bytes : 1);
    memcpy(st.map, data, bytes);
    st.map_bytes = bytes;
    const int ok = safetensors_parse_(&st);
    for (size_t i = 0; ok && i < st.num_tensors; i++) {
        const SafeTensorsView* view = &st.tensors[i];
        volatile uint64_t sum = xxh64(view->data, view->bytes); // all bytes are read
        (void)sum;
        if (view->dtype <= SAFETENSORS_BF16) {
            float* out = (float*)malloc(view->elements * 4 + 1);
            safetensors_read_f32(view, out);
            free(out);
        }
        if (safetensors_find(&st, view->name) != view) {
            abort();
        }
    }
    if (!ok && strncmp(st.error, "fuzz: ", 6) != 0) {
        abort();
    }
    free(st.map);
    st.map = NULL;
    safetensors_close(&st);
}

static void fuzz_index(const unsigned char* data, size_t bytes) {
    static char error[ERROR_BYTES];
    SafeTensorsPair* pairs = NULL;
    size_t count = 0;
    unsigned char* copy = (unsigned char*)malloc(bytes ? bytes : 1);
    memcpy(copy, data, bytes);
    error[0] = '\0';
    JsonReader text = {"fuzz", error, copy, bytes, 0, 0};
    if (!safetensors_index_(&text, &pairs, &count) != (strncmp(error, "fuzz: ", 6) == 0)) {
        abort();
    }
    for (size_t i = 0; i < count; i++) {
        if (strlen(pairs[i].key) + strlen(pairs[i].value) > bytes) {
            abort();
        }
    }
    free(pairs);
    free(copy);
}

int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes);
int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes) {
    if (bytes) {
        (data[0] & 1 ? fuzz_index : fuzz_file)(data + 1, bytes - 1);
    }
    return 0;
}
