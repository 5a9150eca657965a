// test_processor.c -- processor.h: the error of a program that was built for another processor.
#include "llmc/base/processor.h"

#include "dev/test/lib/test.h"

PROCESSOR_CHECK // this program runs here

    // A program built for the features of these levels of x86-64.
    static ProcessorNeeds
    needs_of(int level) {
    static const int levels[] = {
#define LEVEL(macro, name, word, bit, registers, level) level,
        PROCESSOR_FEATURES(LEVEL)};
    ProcessorNeeds needs = processor_needs;
    for (int i = 0; i < PROCESSOR_COUNT; i++) {
        needs.used[i] = levels[i] <= level ? "1" : "__NAME__";
    }
    return needs;
}

// On a processor without the bits of one word, or with only some registers saved. Returns whether
// the line has the words.
static int says(int level, int word, uint32_t without, uint64_t registers, const char* words) {
    uint32_t has[6];
    char line[1024];
    const ProcessorNeeds needs = needs_of(level);
    memset(has, 0xff, sizeof(has));
    has[word] &= ~without;
    const int fits = processor_judge(&needs, has, registers, line, sizeof(line));
    const int ok = *words ? !fits && strstr(line, words) != NULL : fits;
    if (!ok) {
        printf("fits: %d, %s", fits, line);
    }
    return ok;
}

TEST(processor) {
    EXPECT(says(5, 0, 0, 0xff, ""), "a processor that has everything");
    EXPECT(says(1, 0, 0xffffffff, 0, ""), "a program for every x86-64");
    EXPECT(says(
        4, 1, 1u << 16, 0xff,
        "processor, with avx512f; wanted one built on this machine, or by make MARCH=-march=x86-64-v3\n"));
    EXPECT(says(4, 1, 1u << 16 | 1u << 5, 0xff,
                "with avx2 avx512f; wanted one built on this machine, or by make MARCH=-march=x86-64-v2\n"));
    EXPECT(says(3, 0, 1u << 20, 0xff,
                "with sse4.2; wanted one built on this machine, or by make MARCH=-march=x86-64\n"));
    EXPECT(says(3, 1, 1u << 16, 0xff, ""), "what it does not use may be missing");
    EXPECT(says(5, 4, 1u << 5, 0xff,
                "with avx512bf16; wanted one built on this machine, or by make MARCH=-march=x86-64-v4\n"));
    EXPECT(says(4, 0, 0, 0x06, "with avx512f avx512dq avx512cd avx512bw avx512vl;"),
           "the system does not save their registers");
    EXPECT(says(3, 0, 0, 0, "with avx f16c fma avx2;"), "nor those of 32 bytes");
#ifdef __x86_64__
    EXPECT(strcmp(processor_needs.used[0], "1") == 0 || strcmp(processor_needs.used[0], "__SSE3__") == 0);
    int used = 0;
    for (int i = 0; i < PROCESSOR_COUNT; i++) {
        used += strcmp(processor_needs.used[i], "1") == 0;
    }
#ifdef __AVX2__
    EXPECT(used > 8, "%d features are used", used);
#endif
#endif
}
