// fuzz_shard.c -- random bytes as a shard of tokens: what its header says is refused, or all of its tokens
// can be read. Run by dev/test/fuzz.sh.
#include "fuzz.h"

#include "llmc/dataloader.h"

static void read_header(void* span) { tokens_read_header_((TokenSpan*)span, "fuzz"); }

int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes);
int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes) {
    TokenSpan span;
    memset(&span, 0, sizeof(span));
    span.map = malloc(bytes ? bytes : 1); // exactly: every step beyond it is seen
    span.map_bytes = bytes;
    memcpy(span.map, data, bytes);
    if (fuzz_survives(read_header, &span)) {
        const uint32_t max = tokens_max_(&span, 0, span.count);
        if (span.count == 0 || max > (span.width == 2 ? UINT16_MAX : UINT32_MAX)) {
            abort();
        }
    }
    free(span.map);
    return 0;
}
