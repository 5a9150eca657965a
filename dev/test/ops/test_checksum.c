// test_checksum.c -- the checksum against its formula, word by word, and that it notices every kind
// of damage.
#include "llmc/base/check.h"
#include "llmc/base/rand.h"
#include "llmc/ops/checksum.h"

#include "dev/test/lib/test.h"

enum { COUNT = 10007 };

static void fill(uint64_t* words) {
    Rand rng = rand_open(1, 0);
    for (size_t i = 0; i < COUNT; i++) {
        words[i] = (uint64_t)rand_u32(&rng) << 32 | rand_u32(&rng);
    }
}

TEST(checksum) {
    uint64_t* words = (uint64_t*)check_alloc(COUNT, sizeof(uint64_t), "words");
    fill(words);
    uint64_t sum = 0;
    for (size_t i = COUNT; i-- > 0;) {
        sum += checksum_word(words[i], i);
    }
    EXPECT(checksum_words_cpu(words, COUNT, 0) == sum, "in another order");
    EXPECT(checksum_words_cpu(words, 0, 0) == 0);
    EXPECT(checksum_words_cpu(words, 100, 0) + checksum_words_cpu(words + 100, COUNT - 100, 100) == sum,
           "two parts");
    for (int bit = 0; bit < 64; bit++) {
        words[bit * 100] ^= UINT64_C(1) << bit;
        EXPECT(checksum_words_cpu(words, COUNT, 0) != sum, "bit %d of word %d", bit, bit * 100);
        words[bit * 100] ^= UINT64_C(1) << bit;
    }
    const uint64_t first = words[0];
    words[0] = words[1];
    words[1] = first;
    EXPECT(checksum_words_cpu(words, COUNT, 0) != sum, "two words have changed places");
    memset(words, 0, COUNT * sizeof(uint64_t));
    EXPECT(checksum_words_cpu(words, COUNT, 0) != checksum_words_cpu(words, COUNT - 1, 0), "zeros count");
    free(words);
}
