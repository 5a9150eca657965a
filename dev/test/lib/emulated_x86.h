/*
emulated_x86.h -- AVX-512, AVX-VNNI and AMX in C, as Intel's manual describes them, so that code for
these instructions is tested on every x86-64 processor with AVX2: the variant avx512 of run.sh.

    EMULATED=znver4 build/avx512/test_bf16    a processor with fewer instructions; not set: all

intrinsics.h includes it after the compiler's header. It tells the preprocessor, and code that asks
when it runs, that the instructions exist, and voids the attribute `target`. It is strict: whatever
faults on a processor ends the test with a line that says why, as aligned accesses to other
addresses, tiles without a fitting shape, and instructions that the emulated processor lacks.

Results have the bits of hardware, but for the error of rcp14, which is as large as is allowed.
*/
#ifndef DEV_EMULATED_X86_H
#define DEV_EMULATED_X86_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EMULATED static inline __attribute__((unused))
#define EMULATED_CHECK(ok, ...)                                                                              \
    ((ok) ? (void)0 : (fprintf(stderr, "emulated x86: " __VA_ARGS__), fputc('\n', stderr), abort()))

// ---- processors ----

enum { EMULATED_VNNI = 1, EMULATED_BF16 = 2, EMULATED_AVX_VNNI = 4, EMULATED_AMX = 8, EMULATED_READ = 16 };
__attribute__((weak)) int emulated_features_ = 0; // the same of all files; 0: not read yet

EMULATED int emulated_read_features(void) {
    static const struct {
        const char* name;
        int features;
    } known[] = {{"sapphirerapids", EMULATED_VNNI | EMULATED_BF16 | EMULATED_AVX_VNNI | EMULATED_AMX},
                 {"znver4", EMULATED_VNNI | EMULATED_BF16},
                 {"icelake", EMULATED_VNNI}};
    const char* name = getenv("EMULATED");
    int i = 0;
    while (i < 3 && name && strcmp(name, known[i].name) != 0) {
        i++;
    }
    EMULATED_CHECK(i < 3, "EMULATED=%s, wanted sapphirerapids, znver4 or icelake", name);
    return EMULATED_READ | known[i].features;
}
EMULATED int emulated_has(int feature) {
    emulated_features_ = emulated_features_ ? emulated_features_ : emulated_read_features();
    return (emulated_features_ & feature) != 0;
}
EMULATED void emulated_needs(int feature, const char* name) {
    EMULATED_CHECK(emulated_has(feature), "%s: this processor has no such instruction", name);
}

// All of them have these. The value is not 1, so processor.h does not ask the machine for them.
#define __AVX512F__ 2
#define __AVX512BW__ 2
#define __AVX512DQ__ 2
#define __AVX512VL__ 2
#define __AVX512VBMI2__ 2
#define target(...) unused

#define __builtin_cpu_supports(name) (strcmp(name, "avx512vnni") != 0 || emulated_has(EMULATED_VNNI))
#define amx_runs(feature) emulated_has(EMULATED_AMX)
EMULATED int emulated_cpuid(unsigned leaf, unsigned subleaf, unsigned* a, unsigned* b, unsigned* c,
                            unsigned* d) {
    const int is_found = __get_cpuid_count(leaf, subleaf, a, b, c, d);
    if (leaf != 7 || subleaf != 1) {
        return is_found;
    }
    *a = (unsigned)emulated_has(EMULATED_AVX_VNNI) << 4 | (unsigned)emulated_has(EMULATED_BF16) << 5;
    return 1;
}
#define __get_cpuid_count emulated_cpuid

// ---- registers, loads and stores ----

typedef union {
    __m512 ps;
    __m512i si;
    __m512bh bh;
    __m256 half[2];
    __m256i half_si[2];
    float f32[16];
    int32_t i32[16];
    uint32_t u32[16];
    uint16_t u16[32];
    uint8_t u8[64];
    uint64_t u64[8];
} Emulated;
typedef uint32_t EmulatedU32_ __attribute__((vector_size(64)));
typedef uint16_t EmulatedU16_ __attribute__((vector_size(64)));
typedef uint64_t EmulatedU64_ __attribute__((vector_size(64)));
typedef uint8_t EmulatedBytes_ __attribute__((vector_size(32)));

EMULATED Emulated emulated_of(__m512i x) { return (Emulated){.si = x}; }
EMULATED Emulated emulated_load(const void* p, size_t align, const char* name) {
    Emulated x;
    EMULATED_CHECK((uintptr_t)p % align == 0, "%s from %p, wanted a multiple of %zu", name, p, align);
    memcpy(&x, p, sizeof(x));
    return x;
}
EMULATED void emulated_store(void* p, __m512i x, size_t align, const char* name) {
    EMULATED_CHECK((uintptr_t)p % align == 0, "%s to %p, wanted a multiple of %zu", name, p, align);
    memcpy(p, &x, sizeof(x));
}
#define _mm512_loadu_ps(p) emulated_load(p, 1, "").ps
#define _mm512_load_ps(p) emulated_load(p, 64, "_mm512_load_ps").ps
#define _mm512_load_si512(p) emulated_load(p, 64, "_mm512_load_si512").si
#define _mm512_storeu_ps(p, x) emulated_store(p, (__m512i)(x), 1, "")
#define _mm512_storeu_si512(p, x) emulated_store(p, x, 1, "")
#define _mm512_store_ps(p, x) emulated_store(p, (__m512i)(x), 64, "_mm512_store_ps")
#define _mm512_store_si512(p, x) emulated_store(p, x, 64, "_mm512_store_si512")
#define _mm512_stream_si512(p, x) emulated_store(p, x, 64, "_mm512_stream_si512")
#define __builtin_ia32_movntps512(p, x) emulated_store(p, (__m512i)(x), 64, "movntps")
// clang's
#define __builtin_nontemporal_store(x, p) emulated_store(p, (__m512i)(x), sizeof(x), "movntps")

// Does not read what the mask leaves out.
EMULATED __m512i emulated_maskz_loadu_epi32(__mmask16 mask, const int32_t* p) {
    Emulated x = {0};
    for (int i = 0; i < 16; i++) {
        x.i32[i] = mask >> i & 1 ? p[i] : 0;
    }
    return x.si;
}
#define _mm512_maskz_loadu_epi32 emulated_maskz_loadu_epi32

// ---- constants and parts ----

EMULATED __m512i emulated_set1(uint64_t x) { return (__m512i)((EmulatedU64_){0} + x); }
EMULATED __m512i emulated_set1_32(uint32_t x) { return (__m512i)((EmulatedU32_){0} + x); }
EMULATED __m512i emulated_set1_16(uint16_t x) { return (__m512i)((EmulatedU16_){0} + x); }
EMULATED __m512 emulated_set1_ps(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(x));
    return (__m512)emulated_set1_32(bits);
}
#define _mm512_set1_epi64(x) emulated_set1((uint64_t)(x))
#define _mm512_set1_epi32(x) emulated_set1_32((uint32_t)(x))
#define _mm512_set1_epi16(x) emulated_set1_16((uint16_t)(x))
#define _mm512_set1_ps emulated_set1_ps
#define _mm512_setzero_ps() ((__m512){0})
typedef int32_t EmulatedI32_ __attribute__((vector_size(64)));
#undef _mm512_setr_epi32
#define _mm512_setr_epi32(...) ((__m512i)(EmulatedI32_){__VA_ARGS__})
#define _mm512_set_epi32(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)                                     \
    _mm512_setr_epi32(p, o, n, m, l, k, j, i, h, g, f, e, d, c, b, a)
EMULATED __m512i emulated_set_epi8(const uint8_t from_highest[64]) {
    Emulated x;
    for (int i = 0; i < 64; i++) {
        x.u8[i] = from_highest[63 - i];
    }
    return x.si;
}
#define _mm512_set_epi8(...) emulated_set_epi8((const uint8_t[64]){__VA_ARGS__})
#define _mm512_castsi512_si256(x) (emulated_of(x).half_si[0])
#define _mm512_castsi512_si128(x) _mm256_castsi256_si128(_mm512_castsi512_si256(x))
#undef _mm512_extracti64x4_epi64
#define _mm512_extracti64x4_epi64(x, i) (emulated_of(x).half_si[i])

// ---- integers ----

#define _mm512_add_epi16(a, b) ((__m512i)((EmulatedU16_)(a) + (EmulatedU16_)(b)))
#define _mm512_add_epi32(a, b) ((__m512i)((EmulatedU32_)(a) + (EmulatedU32_)(b)))
#define _mm512_or_si512(a, b) ((a) | (b))
#define _mm512_slli_epi32(a, bits) ((__m512i)((EmulatedU32_)(a) << (bits)))
#define _mm512_srli_epi64(a, bits) ((__m512i)((EmulatedU64_)(a) >> (bits)))
#define _mm512_cvtepu8_epi16(x) ((__m512i) __builtin_convertvector((EmulatedBytes_)(x), EmulatedU16_))

EMULATED __mmask64 emulated_movepi8_mask(__m512i a) {
    const Emulated x = emulated_of(a);
    return (uint32_t)_mm256_movemask_epi8(x.half_si[0]) |
           (uint64_t)(uint32_t)_mm256_movemask_epi8(x.half_si[1]) << 32;
}
EMULATED __mmask8 emulated_cmpeq_epi64_mask(__m512i a, __m512i b) {
    const Emulated x = emulated_of(a), y = emulated_of(b);
    unsigned mask = 0;
    for (int i = 0; i < 8; i++) {
        mask |= (unsigned)(x.u64[i] == y.u64[i]) << i;
    }
    return (__mmask8)mask;
}
EMULATED int emulated_mask_reduce_min_epi32(__mmask16 mask, __m512i a) {
    const Emulated x = emulated_of(a);
    int min = INT32_MAX;
    for (int i = 0; i < 16; i++) {
        min = mask >> i & 1 && x.i32[i] < min ? x.i32[i] : min;
    }
    return min;
}
EMULATED __m512i emulated_maskz_compress_epi64(__mmask8 mask, __m512i a) {
    const Emulated x = emulated_of(a);
    Emulated y = {0};
    for (int i = 0, n = 0; i < 8; i++) {
        y.u64[n] = mask >> i & 1 ? x.u64[i] : y.u64[n];
        n += mask >> i & 1;
    }
    return y.si;
}
EMULATED __m512i emulated_maskz_compress_epi8(__mmask64 mask, __m512i a) {
    const Emulated x = emulated_of(a);
    Emulated y = {0};
    for (int n = 0; mask; mask &= mask - 1) {
        y.u8[n++] = x.u8[__builtin_ctzll(mask)];
    }
    return y.si;
}
EMULATED __m512i emulated_permutexvar_epi16(__m512i index, __m512i a) {
    const Emulated x = emulated_of(a), at = emulated_of(index);
    Emulated y;
    for (int i = 0; i < 32; i++) {
        y.u16[i] = x.u16[at.u16[i] & 31];
    }
    return y.si;
}
EMULATED __m512i emulated_permutex2var_epi32(__m512i a, __m512i index, __m512i b) {
    const Emulated both[2] = {emulated_of(a), emulated_of(b)}, at = emulated_of(index);
    Emulated y;
    for (int i = 0; i < 16; i++) {
        y.u32[i] = both[at.u32[i] >> 4 & 1].u32[at.u32[i] & 15];
    }
    return y.si;
}
#undef _mm512_cmpeq_epi64_mask
#define _mm512_movepi8_mask emulated_movepi8_mask
#define _mm512_cmpeq_epi64_mask emulated_cmpeq_epi64_mask
#define _mm512_mask_reduce_min_epi32 emulated_mask_reduce_min_epi32
#define _mm512_maskz_compress_epi64 emulated_maskz_compress_epi64
#define _mm512_maskz_compress_epi8 emulated_maskz_compress_epi8
#define _mm512_permutexvar_epi16 emulated_permutexvar_epi16
#define _mm512_permutex2var_epi32 emulated_permutex2var_epi32
#define _mm512_permutexvar_ps(index, a)                                                                      \
    ((__m512)emulated_permutex2var_epi32((__m512i)(a), index, (__m512i)(a)))

// Adds to each of 8 sums four products of unsigned and signed bytes.
EMULATED __m256i emulated_dpbusd(__m256i sum, __m256i a, __m256i b, int feature, const char* name) {
    const __m256i ones = _mm256_set1_epi16(1), odd = _mm256_set1_epi16((short)0xff00), even = ~odd;
    emulated_needs(feature, name);
    for (int half = 0; half < 2; half++) { // of pairs: maddubs would saturate their sum
        const __m256i products = _mm256_maddubs_epi16(a & (half ? odd : even), b);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(products, ones));
    }
    return sum;
}
#undef _mm256_dpbusd_epi32
#undef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_epi32(s, a, b) emulated_dpbusd(s, a, b, EMULATED_VNNI, "AVX-512 VNNI's vpdpbusd")
#define _mm256_dpbusd_avx_epi32(s, a, b) emulated_dpbusd(s, a, b, EMULATED_AVX_VNNI, "AVX-VNNI's vpdpbusd")

// ---- fp32 ----

#define EMULATED_HALVES(name, operation)                                                                     \
    EMULATED __m512 name(__m512 a, __m512 b) {                                                               \
        const Emulated x = {.ps = a}, y = {.ps = b};                                                         \
        const Emulated z = {.half = {operation(x.half[0], y.half[0]), operation(x.half[1], y.half[1])}};     \
        return z.ps;                                                                                         \
    }
EMULATED_HALVES(emulated_max_ps, _mm256_max_ps)
EMULATED_HALVES(emulated_min_ps, _mm256_min_ps)
#define _mm512_max_ps emulated_max_ps
#define _mm512_min_ps emulated_min_ps
EMULATED_HALVES(emulated_mul_ps, _mm256_mul_ps)
#define _mm512_mul_ps emulated_mul_ps
EMULATED __m512 emulated_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    Emulated x = {.ps = a}, y = {.ps = b}, z = {.ps = c};
    for (int i = 0; i < 2; i++) {
        z.half[i] = _mm256_fmadd_ps(x.half[i], y.half[i], z.half[i]);
    }
    return z.ps;
}
#define _mm512_fmadd_ps emulated_fmadd_ps
#define _mm512_cvtepi32_ps(x) __builtin_convertvector((EmulatedI32_)(x), __m512)

// Cuts 1 / x to 14 bits of fraction: wrong by up to 2^-14, always to the same side.
EMULATED __m512 emulated_rcp14_ps(__m512 x) { return (__m512)((EmulatedU32_)(1.0f / x) & ~(uint32_t)0 << 9); }
#define _mm512_rcp14_ps emulated_rcp14_ps
EMULATED __m512 emulated_reduce_ps(__m512 a) {
    Emulated x = {.ps = a};
    for (int i = 0; i < 16; i++) {
        x.f32[i] = isinf(x.f32[i]) ? 0 : x.f32[i] - floorf(x.f32[i]);
    }
    return x.ps;
}
#undef _mm512_reduce_ps
#define _mm512_reduce_ps(a, mode)                                                                            \
    (EMULATED_CHECK((mode) == (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC), "reduce, mode %d", mode),         \
     emulated_reduce_ps(a))
// Returns a 2^floor(b), exact in double, and rounded once. In fp32 any a 2^-400 is 0, and 2^400 is
// infinite.
EMULATED __m512 emulated_scalef_ps(__m512 a, __m512 b) {
    Emulated x = {.ps = a}, y = {.ps = b};
    for (int i = 0; i < 16; i++) {
        const double n = fmin(fmax(floor((double)y.f32[i]), -400), 400);
        x.f32[i] = isnan(y.f32[i]) ? y.f32[i] : (float)(x.f32[i] * ldexp(1, (int)n));
    }
    return x.ps;
}
#define _mm512_scalef_ps emulated_scalef_ps

// ---- bf16 ----

// Operands and results that are denormal are zeros. Each product is fused with its sum.

EMULATED __m256 emulated_flush(__m256 x) {
    const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
    const __m256 is_small = _mm256_cmp_ps(size, _mm256_set1_ps(0x1p-126f), _CMP_LT_OQ);
    return _mm256_andnot_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), is_small), x);
}
// Adds the products of the odd, or of the even, halves of pairs.
EMULATED __m256 emulated_dot_halves(__m256 sum, __m256i a, __m256i b, int odd) {
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    const __m256 x = (__m256)(odd ? _mm256_and_si256(a, upper) : _mm256_slli_epi32(a, 16)),
                 y = (__m256)(odd ? _mm256_and_si256(b, upper) : _mm256_slli_epi32(b, 16));
    return emulated_flush(_mm256_fmadd_ps(emulated_flush(x), emulated_flush(y), emulated_flush(sum)));
}
EMULATED __m512 emulated_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    Emulated s = {.ps = sum}, x = {.bh = a}, y = {.bh = b};
    emulated_needs(EMULATED_BF16, "vdpbf16ps");
    for (int i = 0; i < 4; i++) {
        s.half[i / 2] = emulated_dot_halves(s.half[i / 2], x.half_si[i / 2], y.half_si[i / 2], i % 2 == 0);
    }
    return s.ps;
}
#define _mm512_dpbf16_ps emulated_dpbf16_ps

// Rounds to nearest, ties to even; NaN becomes quiet. `high` goes into the upper lanes.
EMULATED __m512bh emulated_cvtne2ps_pbh(__m512 high, __m512 low) {
    const Emulated from[2] = {{.ps = low}, {.ps = high}};
    Emulated to;
    emulated_needs(EMULATED_BF16, "vcvtne2ps2bf16");
    for (int i = 0; i < 32; i++) {
        const uint32_t bits = from[i / 16].u32[i % 16], size = bits & 0x7fffffff;
        const uint32_t rounded = size > 0x7f800000   ? bits | 0x400000
                                 : size < 0x00800000 ? bits & 0x80000000
                                                     : bits + 0x7fff + (bits >> 16 & 1);
        to.u16[i] = (uint16_t)(rounded >> 16);
    }
    return to.bh;
}
#define _mm512_cvtne2ps_pbh emulated_cvtne2ps_pbh

// ---- AMX ----

typedef struct { // operand of ldtilecfg
    uint8_t palette, start_row, zeros[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} EmulatedShapes;
typedef struct {
    EmulatedShapes shapes; // palette 0: none are set
    uint32_t row[8][16][16];
} EmulatedTiles;
__attribute__((weak)) _Thread_local EmulatedTiles emulated_tiles_;
__attribute__((weak)) int emulated_straddles_ = 0; // loaded rows on two cache lines: slow

EMULATED void emulated_tile_loadconfig(const void* operand) {
    const EmulatedShapes* shapes = (const EmulatedShapes*)operand;
    emulated_needs(EMULATED_AMX, "ldtilecfg");
    EMULATED_CHECK(shapes->palette == 1 && shapes->start_row == 0, "ldtilecfg: palette %d, start row %d",
                   shapes->palette, shapes->start_row);
    for (int i = 0; i < 14; i++) {
        EMULATED_CHECK(shapes->zeros[i] == 0, "ldtilecfg: reserved byte %d is %d", i, shapes->zeros[i]);
    }
    for (int t = 0; t < 16; t++) {
        const int rows = shapes->rows[t], bytes = shapes->row_bytes[t];
        EMULATED_CHECK(rows <= (t < 8 ? 16 : 0) && bytes <= (t < 8 ? 64 : 0) && (rows == 0) == (bytes == 0),
                       "ldtilecfg: tile %d has %d rows of %d bytes", t, rows, bytes);
    }
    memset(&emulated_tiles_, 0, sizeof(emulated_tiles_));
    emulated_tiles_.shapes = *shapes;
}
EMULATED void emulated_tile_release(void) {
    emulated_needs(EMULATED_AMX, "tilerelease");
    memset(&emulated_tiles_, 0, sizeof(emulated_tiles_));
}

EMULATED uint32_t (*emulated_tile(int t))[16] {
    EMULATED_CHECK(emulated_tiles_.shapes.palette == 1, "tile %d is used, but this thread has set no shapes",
                   t);
    EMULATED_CHECK(0 <= t && t < 8 && emulated_tiles_.shapes.rows[t] > 0, "tile %d is used without a shape",
                   t);
    return emulated_tiles_.row[t];
}
EMULATED void emulated_tile_zero(int t) { memset(emulated_tile(t), 0, sizeof(emulated_tiles_.row[t])); }
EMULATED void emulated_tile_load(int t, const void* base, size_t stride) {
    emulated_tile_zero(t);
    const size_t bytes = emulated_tiles_.shapes.row_bytes[t];
    for (int r = 0; r < emulated_tiles_.shapes.rows[t]; r++) {
        const char* from = (const char*)base + r * stride;
        if ((uintptr_t)from % 64 + bytes > 64) {
            __atomic_add_fetch(&emulated_straddles_, 1, __ATOMIC_RELAXED);
        }
        memcpy(emulated_tiles_.row[t][r], from, bytes);
    }
}
EMULATED void emulated_tile_store(int t, void* to, size_t stride) {
    uint32_t(*row)[16] = emulated_tile(t);
    for (int r = 0; r < emulated_tiles_.shapes.rows[t]; r++) {
        memcpy((char*)to + r * stride, row[r], emulated_tiles_.shapes.row_bytes[t]);
    }
}
// Checks the shapes of a product: to (M, N) += left (M, K) right (K, N), in elements of 4 bytes.
EMULATED void emulated_tile_check(int to, int left, int right) {
    const EmulatedShapes* s = &emulated_tiles_.shapes;
    EMULATED_CHECK(to != left && to != right && left != right && s->rows[to] == s->rows[left] &&
                       s->row_bytes[left] == 4 * s->rows[right] && s->row_bytes[to] == s->row_bytes[right] &&
                       s->row_bytes[to] % 4 == 0,
                   "tiles %d, %d and %d do not fit", to, left, right);
}
// Sums even and odd products apart along a row, and adds both to the result.
EMULATED void emulated_tile_dpbf16ps(int to, int left, int right) {
    uint32_t(*sums)[16] = emulated_tile(to), (*a)[16] = emulated_tile(left), (*b)[16] = emulated_tile(right);
    emulated_tile_check(to, left, right);
    for (int m = 0; m < emulated_tiles_.shapes.rows[to]; m++) {
        for (int half = 0; half < 2; half++) {
            __m256 even = _mm256_setzero_ps(), odd = even;
            for (int k = 0; k < emulated_tiles_.shapes.rows[right]; k++) {
                const __m256i x = _mm256_set1_epi32((int)a[m][k]), y = *(const __m256i_u*)&b[k][8 * half];
                even = emulated_dot_halves(even, x, y, 0);
                odd = emulated_dot_halves(odd, x, y, 1);
            }
            float* sum = (float*)(void*)&sums[m][8 * half];
            const __m256 product = emulated_flush(_mm256_add_ps(even, odd)),
                         old = emulated_flush(_mm256_loadu_ps(sum));
            _mm256_storeu_ps(sum, emulated_flush(_mm256_add_ps(old, product)));
        }
    }
}
// Adds four products of signed bytes, in 32 bits.
EMULATED void emulated_tile_dpbssd(int to, int left, int right) {
    uint32_t(*sums)[16] = emulated_tile(to), (*a)[16] = emulated_tile(left), (*b)[16] = emulated_tile(right);
    emulated_tile_check(to, left, right);
    for (int m = 0; m < emulated_tiles_.shapes.rows[to]; m++) {
        for (int k = 0; k < emulated_tiles_.shapes.rows[right]; k++) {
            const int8_t* x = (const int8_t*)&a[m][k];
            for (int n = 0; n < emulated_tiles_.shapes.row_bytes[to] / 4; n++) {
                const int8_t* y = (const int8_t*)&b[k][n];
                sums[m][n] += (uint32_t)(x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3]);
            }
        }
    }
}
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig emulated_tile_loadconfig
#define _tile_release emulated_tile_release
#define _tile_zero emulated_tile_zero
#define _tile_loadd emulated_tile_load
#define _tile_stream_loadd emulated_tile_load
#define _tile_stored emulated_tile_store
#define _tile_dpbf16ps emulated_tile_dpbf16ps
#define _tile_dpbssd emulated_tile_dpbssd

#endif
