// fuzz_state.c -- random texts against the readers of state.json and config.json, and random files against
// that of llm.c's models: no crash, no read out of bounds, nothing believed that is not so. Built and run by
// hand:
//
//     clang -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -D_GNU_SOURCE -I. \
//         dev/test/fuzz_state.c -o build/fuzz_state -lm
//     build/fuzz_state -max_total_time=60 -detect_leaks=0 -rss_limit_mb=4096 -close_fd_mask=2 CORPUS    (a
//     directory with a state.json, a config.json and a model .bin, each with a first byte of 0, 1, 2 before
//     it)
//
// The model's reader ends the program where it finds an error; here that is a jump back, which loses memory.
#include <setjmp.h>
#include <stdlib.h>

static jmp_buf fuzz_back;
static void fuzz_exit(int status) __attribute__((noreturn));
static void fuzz_exit(int status) {
    (void)status;
    longjmp(fuzz_back, 1);
}
#define exit fuzz_exit
#include "llmc/checkpoint.h"
#include "llmc/model_file.h"

static void fuzz_expect(int ok) {
    if (!ok) {
        abort();
    }
}

// In exactly its bytes of memory, so that every step beyond them is seen.
static char* fuzz_copy(const unsigned char* data, size_t bytes) {
    char* copy = (char*)malloc(bytes ? bytes : 1);
    memcpy(copy, data, bytes);
    return copy;
}

static void fuzz_state(const unsigned char* data, size_t bytes) {
    static char error[ERROR_BYTES];
    SavedState state;
    if (!state_try_parse(&state, "fuzz", fuzz_copy(data, bytes), bytes, error)) {
        fuzz_expect(strncmp(error, "fuzz: ", 6) == 0);
        return;
    }
    fuzz_expect(state.run.step >= 0 && state.run.guard.losses.count >= 0 && strlen(state.trainer) > 0);
    for (int i = 0; i < state.num_files; i++) {
        fuzz_expect(!strchr(state.files[i].name, '/') && state.files[i].bytes >= 0);
    }
    for (int i = 0; i < state.num_options; i++) {
        fuzz_expect(strlen(state.options[i].name) + strlen(state.options[i].value) < bytes);
        fuzz_expect(state_option(&state, state.options[i].name) != NULL);
    }
    state_close(&state);
}

static void fuzz_config(const unsigned char* data, size_t bytes) {
    static char error[ERROR_BYTES];
    char* text = fuzz_copy(data, bytes);
    GPT2Config cfg;
    JsonReader reader = json_reader("fuzz", text, bytes, error);
    if (hf_config_parse_(&reader, &cfg)) {
        fuzz_expect(cfg.L > 0 && cfg.NH > 0 && cfg.C % cfg.NH == 0 && cfg.V <= cfg.Vp);
    } else {
        fuzz_expect(strncmp(error, "fuzz: ", 6) == 0);
    }
    free(text);
}

// A small file is read as a whole; its length says how large the model can be.
static void fuzz_model(const unsigned char* data, size_t bytes) {
    static char path[64] = "";
    static int fd = -1;
    TensorRow rows[GPT2_PARAMETER_ROWS];
    if (fd < 0) {
        fd = memfd_create("model", 0);
        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    }
    fuzz_expect(ftruncate(fd, 0) == 0 && pwrite(fd, data, bytes, 0) == (ssize_t)bytes);
    if (setjmp(fuzz_back) == 0) {
        const GPT2Config cfg = model_file_read_config(path);
        const size_t needed = gpt2_parameter_rows(rows, cfg);
        fuzz_expect(needed <= 3 * bytes + (1 << 20)); // bf16, widened; the padding of tensors
        void* memory = malloc(needed);
        model_file_read(path, rows, memory);
        free(memory);
    }
    close_range((unsigned)fd + 1, ~0u, 0); // what the error left open
}

int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes);
int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes) {
    if (bytes) {
        const int which = data[0] % 3;
        (which == 0 ? fuzz_state : which == 1 ? fuzz_config : fuzz_model)(data + 1, bytes - 1);
    }
    return 0;
}
