// fuzz_bpe.c -- reads random vocabulary files: no crash, no read out of bounds. An accepted
// vocabulary reads back the same after it is written, and decodes what it encodes. Run by
// dev/test/fuzz/fuzz.sh. More files to start from, of a vocabulary with few merges:
// build/plain/test_tokenizer --write_bpe SMALL.bpe dev/test/fuzz/corpus/bpe
//
// A reader ends the program if a file is not a vocabulary. Here it returns to the fuzzer instead,
// which frees the memory allocated so far.
#define BPE_FILES_IMPLEMENTATION
#define NFC_IMPLEMENTATION

#include <malloc.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static struct {
    jmp_buf back;
    void* pointers[4096];
    size_t count;
} fuzz;

static void fuzz_keep(void* memory) {
    if (fuzz.count == sizeof(fuzz.pointers) / sizeof(fuzz.pointers[0])) {
        abort();
    }
    fuzz.pointers[fuzz.count++] = memory;
}

static void fuzz_free(void* memory) {
    for (size_t i = 0; memory && i < fuzz.count; i++) {
        if (fuzz.pointers[i] == memory) {
            fuzz.pointers[i] = fuzz.pointers[--fuzz.count];
            break;
        }
    }
    free(memory);
}

static void* fuzz_malloc(size_t bytes) {
    void* memory = malloc(bytes);
    fuzz_keep(memory);
    return memory;
}

static void* fuzz_realloc(void* old, size_t bytes) {
    void* memory = fuzz_malloc(bytes);
    if (old) {
        const size_t old_bytes = malloc_usable_size(old);
        memcpy(memory, old, old_bytes < bytes ? old_bytes : bytes);
        fuzz_free(old);
    }
    return memory;
}

static int fuzz_posix_memalign(void** memory, size_t alignment, size_t bytes) {
    const int failed = posix_memalign(memory, alignment, bytes);
    if (!failed) {
        fuzz_keep(*memory);
    }
    return failed;
}

#define exit(status) longjmp(fuzz.back, 1)
#define free fuzz_free
#define malloc fuzz_malloc
#define realloc fuzz_realloc
#define posix_memalign fuzz_posix_memalign
#include "llmc/tokenizer/bpe_files.h"
#undef exit
#undef free
#undef malloc
#undef realloc
#undef posix_memalign

// In exactly its bytes of memory, so that every step beyond them is seen.
static void fuzz_open(Bpe* bpe, const char* name, const void* data, size_t bytes) {
    BpeFile file = {name, (unsigned char*)fuzz_malloc(bytes), bytes};
    memcpy(file.data, data, bytes);
    bpe_open_data_(bpe, &file);
}

static void fuzz_expect(int ok) {
    if (!ok) {
        abort();
    }
}

static void fuzz_formats(Bpe* bpe) {
    const int num_kept = bpe->num_kept;
    static void (*const put[])(const Bpe*, FILE*) = {bpe_put_tokenizer_json_, bpe_put_vocab_};
    const int formats = bpe_is_like_gpt2(bpe) ? 2 : 1;
    bpe->num_kept = 0; // tokenizer.json is made again, instead of kept
    for (int i = 0; i < formats; i++) {
        char* text = NULL;
        size_t bytes;
        Bpe again;
        FILE* file = open_memstream(&text, &bytes);
        put[i](bpe, file);
        fclose(file);
        fuzz_keep(text);
        fuzz_open(&again, "again", text, bytes);
        fuzz_expect(again.vocab_size == bpe->vocab_size && again.eot == bpe->eot &&
                    memcmp(again.pairs.entries, bpe->pairs.entries, sizeof(uint64_t) << bpe->pairs.bits) ==
                        0);
        bpe_close(&again);
        fuzz_free(text);
    }
    bpe->num_kept = num_kept;
}

// The file itself is a text like any other.
static void fuzz_encode(const Bpe* bpe, const unsigned char* text, size_t bytes) {
    BpeMerger_ merger;
    int* ids = (int*)fuzz_malloc(bytes * sizeof(int));
    size_t at = 0;
    bpe_merger_open_(&merger, bpe->num_ranks);
    const size_t count = bpe_merge_(bpe, &merger, text, bytes, ids);
    for (size_t i = 0; i < count; i++) {
        int length;
        const char* token = bpe_token(bpe, ids[i], &length);
        fuzz_expect((size_t)length <= bytes - at && memcmp(token, text + at, (size_t)length) == 0);
        at += (size_t)length;
    }
    fuzz_expect(at == bytes);
    bpe_merger_close_(&merger);
    fuzz_free(ids);
}

int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes);
int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes) {
    if (bytes > 0 && setjmp(fuzz.back) == 0) {
        Bpe bpe;
        fuzz_open(&bpe, "fuzz", data, bytes);
        fuzz_encode(&bpe, data, bytes);
        fuzz_formats(&bpe);
        bpe_close(&bpe);
        fuzz_expect(fuzz.count == 0); // nothing is lost
    }
    while (fuzz.count > 0) {
        free(fuzz.pointers[--fuzz.count]);
    }
    return 0;
}
