// test_wgmma.cu -- where wgmma looks for an operand by its descriptor, and where TMA has put it:
// both by the rules of the PTX ISA manual, element by element.
#include "llmc/gpu/wgmma.cuh"
#include "dev/test/lib/test.h"

// Returns the place of an element of a panel, as TMA swizzles.
static unsigned tma_bytes(int row, int col) {
    return (unsigned)(row * 128 + (col / 8 ^ row % 8) * 16 + col % 8 * 2);
}

// Returns the address of element i of a side in step k, by TMA, of a tile at `base`.
static unsigned tma_address(unsigned base, int i, int k, int is_across) {
    return base + (is_across ? i / 64 * (64 * 128) + tma_bytes(k, i % 64) : tma_bytes(i, k));
}

// Returns it in a matmul of 16 steps, by a descriptor: rows of 128 bytes, eight of which lie as bit
// 32 says from the next eight; if sums cross rows, 64 elements lie as bit 16 says from the next 64.
// In the address, bits 4 to 6 change by bits 7 to 9.
static unsigned wgmma_address(uint64_t descriptor, int i, int k, int is_across) {
    const unsigned start = (unsigned)(descriptor & 0x3fff) << 4,
                   panel = (unsigned)(descriptor >> 16 & 0x3fff) << 4,
                   eight = (unsigned)(descriptor >> 32 & 0x3fff) << 4;
    const int row = is_across ? k : i, col = is_across ? i % 64 : k;
    const unsigned address =
        start + (is_across ? i / 64 * panel : 0) + row / 8 * eight + (unsigned)(row % 8 * 128 + col * 2);
    return address ^ (address >> 7 & 7) << 4;
}

TEST(wgmma_descriptors) {
    const unsigned bases[] = {1024, 16 << 10, 215 << 10};
    for (int is_across = 0; is_across < 2; is_across++) {
        for (const unsigned base : bases) {
            for (int k = 0; k < WGMMA_DEPTH; k++) {
                const uint64_t descriptor =
                    wgmma_descriptor(base, is_across) + k / 16 * wgmma_step(is_across);
                EXPECT(descriptor >> 62 == 1 && (descriptor >> 46 & 0xffff) == 0, "swizzle and offset");
                for (int i = 0; i < 256; i++) {
                    const unsigned got = wgmma_address(descriptor, i, k % 16, is_across),
                                   want = tma_address(base, i, k, is_across);
                    EXPECT(got == want, "element %d, step %d of a tile at %u, %s: address %u, wanted %u", i,
                           k, base, is_across ? "across" : "along", got, want);
                }
            }
        }
    }
}
