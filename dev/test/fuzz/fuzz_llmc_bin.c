// fuzz_llmc_bin.c -- reads random bytes as the header of an llm.c model: it is refused, or gives
// the sizes of a model that is as long as the file. Run by dev/test/fuzz/fuzz.sh.
#include "fuzz.h"

#define LLMC_BIN_IMPLEMENTATION

#include "llmc/formats/llmc_bin.h"

typedef struct {
    int32_t header[LLMC_BIN_HEADER_];
    double file_bytes;
} Input;

static void check_header(void* input_) {
    const Input* input = (const Input*)input_;
    llmc_bin_check_header_("fuzz", input->header, input->file_bytes);
}

// Half of the files have the length that their header asks for: the code behind that check is
// reached, too.
int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes);
int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes) {
    Input input;
    memset(&input, 0, sizeof(input));
    memcpy(input.header, data, bytes < sizeof(input.header) ? bytes : sizeof(input.header));
    char error[ERROR_BYTES];
    const ModelConfig cfg = llmc_bin_config_(input.header);
    const int is_model = model_check_config(cfg, "fuzz", error);
    const ModelDtype dtype = input.header[1] == 5 ? MODEL_BF16 : MODEL_FP32;
    input.file_bytes = is_model && bytes % 2 ? llmc_bin_bytes_(cfg, dtype) : (double)bytes;
    if (fuzz_survives(check_header, &input)) {
        if (!is_model || cfg.C % cfg.NH || input.file_bytes != llmc_bin_bytes_(cfg, dtype)) {
            abort();
        }
    }
    return 0;
}
