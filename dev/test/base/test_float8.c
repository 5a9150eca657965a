// test_float8.c -- E4M3 and the scales of its rows, bit for bit as PyTorch's float8_e4m3fn has
// them.
#include "llmc/base/check.h"
#include "llmc/base/float8.h"
#include "dev/test/lib/test.h"

#define FIXTURES "dev/ref/fixtures/fp8/"

static void read_some(FILE* file, void* to, size_t bytes) {
    CHECK(file && fread(to, 1, bytes, file) == bytes, FIXTURES ": too short");
}

TEST(float8_codes) {
    static float values[256], between[4096];
    static uint8_t of_bf16[65536], codes[4096];
    int count;
    FILE* file = fopen(FIXTURES "codes.bin", "rb");
    read_some(file, values, sizeof(values));
    read_some(file, of_bf16, sizeof(of_bf16));
    read_some(file, &count, sizeof(count));
    CHECK(count > 700 && count <= 4096, FIXTURES "codes.bin: %d numbers", count);
    read_some(file, between, (size_t)count * sizeof(float));
    read_some(file, codes, (size_t)count);
    EXPECT(fgetc(file) == EOF, "too long");
    fclose(file);
    for (int i = 0; i < 256; i++) {
        const float value = e4m3_to_float((uint8_t)i);
        EXPECT(isnan(values[i]) ? isnan(value) : float_bits(value) == float_bits(values[i]),
               "code %02x is %a, wanted %a", i, (double)value, (double)values[i]);
        EXPECT(e4m3_from_float(values[i]) == (isnan(values[i]) ? 0x7F : i), "code %02x does not come back",
               i);
    }
    for (int i = 0; i < 65536; i++) {
        const uint8_t code = e4m3_from_float(bf16_to_float((uint16_t)i));
        EXPECT(code == of_bf16[i], "bf16 %04x became %02x, wanted %02x", i, code, of_bf16[i]);
    }
    for (int i = 0; i < count; i++) {
        EXPECT(e4m3_from_float(between[i]) == codes[i], "%a became %02x, wanted %02x", (double)between[i],
               e4m3_from_float(between[i]), codes[i]);
    }
}

TEST(float8_rows) {
    enum { ROWS = 40, COLS = 33 };
    static float x[ROWS][COLS];
    static uint8_t codes[ROWS][COLS];
    int sizes[2], exponents[ROWS];
    FILE* file = fopen(FIXTURES "rows.bin", "rb");
    read_some(file, sizes, sizeof(sizes));
    CHECK(sizes[0] == ROWS && sizes[1] == COLS, FIXTURES "rows.bin: %d x %d", sizes[0], sizes[1]);
    read_some(file, x, sizeof(x));
    read_some(file, exponents, sizeof(exponents));
    read_some(file, codes, sizeof(codes));
    EXPECT(fgetc(file) == EOF, "too long");
    fclose(file);
    for (int r = 0; r < ROWS; r++) {
        uint32_t largest = 0;
        for (int c = 0; c < COLS; c++) {
            const uint32_t magnitude = e4m3_magnitude(x[r][c]);
            largest = magnitude > largest ? magnitude : largest;
        }
        const int exponent = e4m3_exponent(largest);
        EXPECT(exponent == exponents[r], "row %d: exponent %d, wanted %d", r, exponent, exponents[r]);
        EXPECT(exponent == 128 || e4m3_power(exponent) == ldexpf(1, exponent), "power %d", exponent);
        for (int c = 0; c < COLS; c++) {
            const uint8_t code = e4m3_from_float(x[r][c] * e4m3_power(-exponent));
            EXPECT(code == codes[r][c], "row %d, column %d: %a became %02x, wanted %02x", r, c,
                   (double)x[r][c], code, codes[r][c]);
        }
    }
    EXPECT(isnan(e4m3_power(128)) && isnan(e4m3_power(-128)), "scale of a row with NaN");
}

// Products of all pairs of values: 4 bits times 4 bits.
TEST(float8_products_are_exact) {
    for (int i = 0; i < 0x7F; i++) {
        for (int j = i; j < 0x7F; j++) {
            const double exact = (double)e4m3_to_float((uint8_t)i) * (double)e4m3_to_float((uint8_t)j);
            EXPECT((double)bf16_to_float(bf16_from_float((float)exact)) == exact, "%02x times %02x", i, j);
        }
    }
}
