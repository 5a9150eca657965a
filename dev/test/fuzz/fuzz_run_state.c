// fuzz_run_state.c -- reads random text as state.json or config.json: no crash, no read out of
// bounds, no illegal value accepted. The first bit of the input selects the file. Run by
// dev/test/fuzz/fuzz.sh.
#define HF_CONFIG_IMPLEMENTATION

#include "llmc/base/json.h"
#include "llmc/formats/hf_config.h"
#include "llmc/checkpoint/run_state.h"

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
    HfConfig_ config;
    memset(&config, 0, sizeof(config));
    JsonReader reader = json_reader("fuzz", text, bytes, error);
    if (hf_config_parse_(&reader, &config)) {
        const ModelConfig cfg = config.cfg;
        fuzz_expect(cfg.L > 0 && cfg.NH > 0 && cfg.C % cfg.NH == 0 && cfg.V <= cfg.Vp);
    } else {
        fuzz_expect(strncmp(error, "fuzz: ", 6) == 0);
    }
    free(config.keys);
    free(text);
}

int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes);
int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes) {
    if (bytes) {
        (data[0] & 1 ? fuzz_config : fuzz_state)(data + 1, bytes - 1);
    }
    return 0;
}
