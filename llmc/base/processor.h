/*
processor.h -- refuses a processor that lacks the instructions the program was built for, with a
message instead of an illegal instruction.

    PROCESSOR_CHECK    in the file with main: notes which instructions the compiler may use there.
                       Code compiled for every x86-64 (Makefile) checks for them before main

Other architectures are not checked.
*/
#ifndef LLMC_PROCESSOR_H
#define LLMC_PROCESSOR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Instructions that compilers use on their own: the compiler's macro, which is 1 if it may use
// them; the name; the word of cpuid (processor_read_) and its bit; the registers that the system
// must save (XCR0); and the lowest of the levels x86-64-v2, v3, v4 that includes them.
// clang-format off
#define PROCESSOR_FEATURES(X) \
    X(__SSE3__,       "sse3",       0,  0, 0,    2) \
    X(__SSSE3__,      "ssse3",      0,  9, 0,    2) \
    X(__SSE4_1__,     "sse4.1",     0, 19, 0,    2) \
    X(__SSE4_2__,     "sse4.2",     0, 20, 0,    2) \
    X(__POPCNT__,     "popcnt",     0, 23, 0,    2) \
    X(__AVX__,        "avx",        0, 28, 0x06, 3) \
    X(__F16C__,       "f16c",       0, 29, 0x06, 3) \
    X(__FMA__,        "fma",        0, 12, 0x06, 3) \
    X(__MOVBE__,      "movbe",      0, 22, 0,    3) \
    X(__BMI__,        "bmi",        1,  3, 0,    3) \
    X(__AVX2__,       "avx2",       1,  5, 0x06, 3) \
    X(__BMI2__,       "bmi2",       1,  8, 0,    3) \
    X(__LZCNT__,      "lzcnt",      5,  5, 0,    3) \
    X(__AVX512F__,    "avx512f",    1, 16, 0xe6, 4) \
    X(__AVX512DQ__,   "avx512dq",   1, 17, 0xe6, 4) \
    X(__AVX512CD__,   "avx512cd",   1, 28, 0xe6, 4) \
    X(__AVX512BW__,   "avx512bw",   1, 30, 0xe6, 4) \
    X(__AVX512VL__,   "avx512vl",   1, 31, 0xe6, 4) \
    X(__AVX512IFMA__, "avx512ifma", 1, 21, 0xe6, 5) \
    X(__AVX512VBMI__, "avx512vbmi", 2,  1, 0xe6, 5) \
    X(__AVX512VBMI2__, "avx512vbmi2", 2, 6, 0xe6, 5) \
    X(__AVX512VNNI__, "avx512vnni", 2, 11, 0xe6, 5) \
    X(__AVX512BITALG__, "avx512bitalg", 2, 12, 0xe6, 5) \
    X(__AVX512VPOPCNTDQ__, "avx512vpopcntdq", 2, 14, 0xe6, 5) \
    X(__AVX512FP16__, "avx512fp16", 3, 23, 0xe6, 5) \
    X(__AVXVNNI__,    "avxvnni",    4,  4, 0x06, 5) \
    X(__AVX512BF16__, "avx512bf16", 4,  5, 0xe6, 5)
// clang-format on
enum { PROCESSOR_WORDS_ = 6 };

#define PROCESSOR_ONE_(macro, name, word, bit, registers, level) +1
enum { PROCESSOR_COUNT = 0 PROCESSOR_FEATURES(PROCESSOR_ONE_) };

// Needs of a program: "1" for each feature that its compiler may use. Only data, so that no
// instruction of the wide build runs before the check.
typedef void ProcessorCheck_(void);
typedef struct {
    ProcessorCheck_* check; // links the code that checks into the program
    const char* used[PROCESSOR_COUNT];
} ProcessorNeeds;

extern const ProcessorNeeds processor_needs;

// Ends the program with one line if the processor lacks something it needs. Runs before main.
void processor_check(void);

// True if a processor with these words of cpuid, on a system that saves these registers, has
// everything needed; else 0, with a line that says why not.
int processor_judge(const ProcessorNeeds* needs, const uint32_t words[PROCESSOR_WORDS_], uint64_t registers,
                    char* line, size_t room);

#define PROCESSOR_TEXT_OF_(value) #value
#define PROCESSOR_TEXT_(macro, name, word, bit, registers, level) PROCESSOR_TEXT_OF_(macro),
#define PROCESSOR_CHECK                                                                                      \
    const ProcessorNeeds processor_needs = {processor_check, {PROCESSOR_FEATURES(PROCESSOR_TEXT_)}};

#ifdef __cplusplus
}
#endif

#ifdef PROCESSOR_IMPLEMENTATION

#if defined(__AVX__) && defined(__x86_64__)
#error "processor.h: compiled for more than every x86-64 has; the Makefile has its flags"
#endif

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/intrinsics.h"

typedef struct {
    const char* name;
    int word, bit;
    uint64_t registers;
    int level;
} ProcessorFeature_;

int processor_judge(const ProcessorNeeds* needs, const uint32_t words[PROCESSOR_WORDS_], uint64_t registers,
                    char* line, size_t room) {
#define PROCESSOR_ROW_(macro, name, word, bit, registers, level) {name, word, bit, registers, level},
    static const ProcessorFeature_ features[PROCESSOR_COUNT] = {PROCESSOR_FEATURES(PROCESSOR_ROW_)};
    char missing[512] = "";
    int level = 4;
    for (int i = 0; i < PROCESSOR_COUNT; i++) {
        const ProcessorFeature_* f = &features[i];
        const int is_here = (words[f->word] >> f->bit & 1) && (registers & f->registers) == f->registers;
        if (!is_here) {
            level = f->level <= level ? f->level - 1 : level;
        }
        if (!is_here && strcmp(needs->used[i], "1") == 0) {
            snprintf(missing + strlen(missing), sizeof(missing) - strlen(missing), " %s", f->name);
        }
    }
    char march[32] = "";
    if (level > 1) {
        snprintf(march, sizeof(march), "-v%d", level);
    }
    snprintf(line, room,
             "error: this program was built for a newer processor, with%s; wanted one built on this machine, "
             "or by "
             "make MARCH=-march=x86-64%s\n",
             missing, march);
    return !*missing;
}

#ifdef X86_INTRINSICS
// Reads leaf 1 ecx; leaf 7 ebx, ecx, edx; leaf 7.1 eax; leaf 0x80000001 ecx.
static void processor_read_(uint32_t words[PROCESSOR_WORDS_], uint64_t* registers) {
    uint32_t a, b, c, d, low = 0, high = 0;
    memset(words, 0, PROCESSOR_WORDS_ * sizeof(words[0]));
    if (__get_cpuid(1, &a, &b, &c, &d)) {
        words[0] = c;
    }
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        words[1] = b;
        words[2] = c;
        words[3] = d;
        words[4] = a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) ? a : 0;
    }
    if (__get_cpuid(0x80000001, &a, &b, &c, &d)) {
        words[5] = c;
    }
    // XGETBV exists
    if (words[0] >> 27 & 1) {
        __asm__ volatile(".byte 0x0f, 0x01, 0xd0" : "=a"(low), "=d"(high) : "c"(0)); // of XCR0
    }
    *registers = (uint64_t)high << 32 | low;
}

__attribute__((constructor(101))) void processor_check(void) {
    uint32_t words[PROCESSOR_WORDS_];
    uint64_t registers;
    char line[1024];
    processor_read_(words, &registers);
    if (!processor_judge(&processor_needs, words, registers, line, sizeof(line))) {
        const ssize_t written = write(STDERR_FILENO, line, strlen(line));
        _exit(written < 0 ? 2 : 1);
    }
}
#else
void processor_check(void) {}
#endif

#endif // PROCESSOR_IMPLEMENTATION

#endif
