// test_bpe_train.c -- bpe_train.h: the same merges as a slow trainer that follows the definition,
// for any number of threads, any order of the texts and any division of them.
//
//     test_tokenizer --bpe_merges FILE VOCAB_SIZE    prints merges of a text: lines "id left right"
#include "llmc/tokenizer/bpe_encode.h"
#include "llmc/tokenizer/bpe_train.h"
#include "llmc/base/rand.h"
#include "llmc/base/threads.h"
#include "dev/test/lib/test.h"
#include "dev/test/lib/texts.h"

// `units` units of all kinds, some several times in a row.
static Text random_units(uint64_t seed, uint32_t units) {
    static const char* kinds[] = {"a",
                                  "b",
                                  "ab",
                                  "aa",
                                  "the",
                                  "then",
                                  " ",
                                  " ",
                                  " a",
                                  " the",
                                  "\n",
                                  "\t",
                                  "\r\n",
                                  "'",
                                  "'s",
                                  "'ll",
                                  "'v",
                                  "1",
                                  "12",
                                  "!",
                                  "...",
                                  "\xC3\xA9",
                                  "\xC2\xA0",
                                  "\xE3\x80\x80",
                                  "\xE6\xBC\xA2",
                                  "\xF0\x9F\x98\x80",
                                  "\xC2\x85",
                                  "\xC3",
                                  "\x80",
                                  "\xE3\x80",
                                  "\xF0\x9F\x98",
                                  "\xFF",
                                  "abcabcabcabcabcabcabcabc"};
    Rand rng = rand_open(seed, rand_stream("text"));
    Text text = {(char*)malloc(24 * 9 * (size_t)units + 1), 0};
    for (uint32_t i = 0; i < units; i++) {
        const char* unit = kinds[rand_below(&rng, sizeof(kinds) / sizeof(kinds[0]))];
        for (uint32_t times = rand_below(&rng, 8) ? 1 : 1 + rand_below(&rng, 9); times > 0; times--) {
            memcpy(text.bytes + text.length, unit, strlen(unit));
            text.length += strlen(unit);
        }
    }
    const Text exact = text_of(text.bytes, text.length);
    free(text.bytes);
    return exact;
}

// ---- the reference: counts all pairs of the whole text anew for each merge ----

typedef struct {
    int (*merges)[2];
    int count;
} Merges;

// The text as ids, with -1 between pieces. What cuts it is the encoder with a vocabulary of bytes
// only, piece by piece: bpe.h has its own tests.
static int* reference_ids(Text text, size_t* count) {
    Bpe bytes;
    bpe_open_merges(&bytes, NULL, 0, "bytes");
    int* ids = (int*)malloc((2 * text.length + 1) * sizeof(int));
    uint16_t cuts[BPE_CUTS];
    BpeSplitter splitter = bpe_splitter(&bytes.rules, (const unsigned char*)text.bytes, 0, text.length);
    size_t at = 0, n = 0;
    while (splitter.at < text.length) {
        const size_t base = splitter.at, found = bpe_split(&splitter, cuts);
        for (size_t i = 0; i < found; i++) {
            for (; at < base + cuts[i]; at++) {
                ids[n++] = bytes.byte_ids[(unsigned char)text.bytes[at]];
            }
            ids[n++] = -1;
        }
    }
    for (; at < text.length; at++) {
        ids[n++] = bytes.byte_ids[(unsigned char)text.bytes[at]];
    }
    bpe_close(&bytes);
    *count = n;
    return ids;
}

static Merges reference_train(Text text, int max) {
    Merges out = {(int(*)[2])malloc(((size_t)max + 1) * sizeof(int[2])), 0};
    const size_t V = 256 + (size_t)max;
    size_t n;
    int *ids = reference_ids(text, &n), *counts = (int*)malloc(V * V * sizeof(int));
    for (; out.count < max; out.count++) {
        memset(counts, 0, V * V * sizeof(int));
        int best = 0;
        size_t best_pair = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            if (ids[i] >= 0 && ids[i + 1] >= 0) {
                const size_t pair = (size_t)ids[i] * V + (size_t)ids[i + 1];
                const int count = ++counts[pair];
                if (count > best || (count == best && pair < best_pair)) {
                    best = count;
                    best_pair = pair;
                }
            }
        }
        if (best == 0) {
            break;
        }
        const int left = (int)(best_pair / V), right = (int)(best_pair % V);
        size_t kept = 0;
        for (size_t i = 0; i < n; i++) {
            const int joins = ids[i] == left && i + 1 < n && ids[i + 1] == right;
            ids[kept++] = joins ? 256 + out.count : ids[i];
            i += (size_t)joins;
        }
        n = kept;
        out.merges[out.count][0] = left;
        out.merges[out.count][1] = right;
    }
    free(counts);
    free(ids);
    return out;
}

// ---- against it ----

static int same_merges(const Bpe* bpe, Merges want, int count) {
    int same = bpe->vocab_size == 257 + count;
    for (int i = 0; same && i < count; i++) {
        same = bpe_pair_(&bpe->pairs, want.merges[i][0], want.merges[i][1]) == 256 + i;
    }
    return same;
}

// The text comes in parts of 1 to `max` bytes, as from a pipe, and is counted up to the last cut,
// by any thread.
static void add_in_parts(BpeTrainer* trainer, Text text, uint32_t max, Rand* rng) {
    for (size_t begin = 0, end = 0; begin < text.length;) {
        end += 1 + rand_below(rng, max);
        end = end < text.length ? end : text.length;
        const Text part = text_of(text.bytes + begin, end - begin);
        const size_t bytes =
            end < text.length ? bpe_last_cut(&trainer->rules, part.bytes, part.length) : part.length;
        bpe_trainer_add(trainer, (int)rand_below(rng, (uint32_t)trainer->threads), part.bytes, bytes);
        begin += bytes;
        free(part.bytes);
    }
}

static void test_text(Text text, int max) {
    const Merges want = reference_train(text, max);
    Rand rng = rand_open(text.length, 1);
    for (int threads = 1; threads <= 8; threads += threads < 3 ? 1 : 5) {
        Bpe bpe;
        BpeTrainer trainer;
        bpe_trainer_open(&trainer, threads);
        add_in_parts(&trainer, text, threads == 1 ? 3 : 300, &rng);
        // the trainer can run again
        for (int count = want.count; count >= 0; count -= 1 + want.count / 2) {
            bpe_trainer_run(&trainer, 257 + count, NULL, NULL, &bpe);
            EXPECT(same_merges(&bpe, want, count), "%zu bytes, %d threads, %d merges", text.length, threads,
                   count);
            bpe_close(&bpe);
        }
        bpe_trainer_close(&trainer);
    }
    free(want.merges);
    free(text.bytes);
}

TEST(against_reference) {
    static const char* texts[] = {"",
                                  "a",
                                  "ab",
                                  "aaa",
                                  "ab ab ab",
                                  "aaaa aaaaa aaaaaa",
                                  "abababa abab",
                                  "aab aab aab aaab baaa",
                                  "abc bcd cab abcd dabc",
                                  "the theme then them there they",
                                  "\n\n\n\n \n\n \t  \n  x",
                                  "don't we've I'll 'tis 'sx",
                                  "\xC3\xA9t\xC3\xA9 \xC3\xA9t\xC3\xA9s \xC3\xC3\xC3\xA9\xA9\xA9"};
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        test_text(text_of(texts[i], strlen(texts[i])), 40);
    }
    test_text(text_repeat("a", 1, 1000), 40);
    test_text(text_repeat("aab", 3, 300), 40);
    test_text(text_repeat(" ab\xE6\xBC\xA2\n", 7, 200), 40);
    for (uint64_t seed = 0; seed < 12; seed++) {
        test_text(random_units(seed, 20 << (seed % 6)), 90);
    }
}

// ---- on all threads ----

TEST(threads) {
    Text texts[2] = {random_units(1, 120000), random_units(2, 60000)};
    Bpe want;
    for (int run = 0; run < 4; run++) {
        static const int threads[] = {1, 2, 5, 8};
        Bpe bpe;
        BpeTrainer trainer;
        bpe_trainer_open(&trainer, threads[run]);
#pragma omp parallel for num_threads(threads[run] > 1 ? 2 : 1)
        for (int i = 0; i < 2; i++) { // in either order, at the same time if there are two threads
            const Text text = texts[(i + run) % 2];
            bpe_trainer_add(&trainer, i % threads[run], text.bytes, text.length);
        }
        bpe_trainer_run(&trainer, 1500, NULL, NULL, run == 0 ? &want : &bpe);
        bpe_trainer_close(&trainer);
        for (int id = 256; run > 0 && id < want.eot; id++) {
            int length, want_length;
            const char *token = bpe_token(&bpe, id, &length),
                       *want_token = bpe_token(&want, id, &want_length);
            EXPECT(length == want_length && memcmp(token, want_token, (size_t)length) == 0,
                   "%d threads: token %d", threads[run], id);
        }
        if (run > 0) {
            bpe_close(&bpe);
        }
    }
    // and what it encodes comes back
    BpeEncoder encoder;
    bpe_encoder_open(&encoder, &want);
    int* ids = (int*)malloc(texts[0].length * sizeof(int));
    size_t at = 0;
    const size_t n = bpe_encode(&encoder, texts[0].bytes, texts[0].length, ids);
    for (size_t i = 0; i < n; i++) {
        int length;
        const char* token = bpe_token(&want, ids[i], &length);
        EXPECT(memcmp(token, texts[0].bytes + at, (size_t)length) == 0, "id %zu", i);
        at += (size_t)length;
    }
    EXPECT(at == texts[0].length && n < at / 2, "%zu ids for %zu bytes", n, at);
    free(ids);
    bpe_encoder_close(&encoder);
    bpe_close(&want);
    free(texts[0].bytes);
    free(texts[1].bytes);
}

// Long pieces cost no more than short ones: a megabyte of one letter, and one of letters at random.
TEST(long_pieces) {
    Rand rng = rand_open(3, 3);
    Text text = text_repeat("a", 1, 1 << 20);
    Bpe bpe;
    BpeTrainer trainer;
    bpe_trainer_open(&trainer, 2);
    bpe_trainer_add(&trainer, 0, text.bytes, text.length);
    bpe_trainer_run(&trainer, 257 + 20, NULL, NULL, &bpe);
    int length;
    bpe_token(&bpe, 256 + 19, &length);
    EXPECT(length == 1 << 20, "%d", length);
    bpe_close(&bpe);
    for (size_t i = 0; i < text.length; i++) {
        text.bytes[i] = (char)('a' + rand_below(&rng, 26));
    }
    bpe_trainer_add(&trainer, 0, text.bytes, text.length);
    bpe_trainer_run(&trainer, 257 + 4000, NULL, NULL, &bpe);
    bpe_close(&bpe);
    bpe_trainer_close(&trainer);
    free(text.bytes);
}

static void count_call(void* context, int merges, int wanted) {
    int* calls = (int*)context;
    ++*calls;
    EXPECT(merges == *calls && wanted == 3, "%d of %d", merges, wanted);
}

TEST(progress) {
    int calls = 0;
    Bpe bpe;
    BpeTrainer trainer;
    bpe_trainer_open(&trainer, 1);
    bpe_trainer_add(&trainer, 0, "abcd", 4);
    bpe_trainer_run(&trainer, 260, count_call, &calls, &bpe);
    EXPECT(calls == 3, "%d", calls);
    bpe_close(&bpe);
    bpe_trainer_close(&trainer);
}

static void train_abc(const void* vocab_size) {
    Bpe bpe;
    BpeTrainer trainer;
    bpe_trainer_open(&trainer, 1);
    bpe_trainer_add(&trainer, 0, "abc abc", 7);
    bpe_trainer_run(&trainer, *(const int*)vocab_size, NULL, NULL, &bpe);
}

TEST(errors) {
    const int few = 256, many = 300, huge = BPE_MAX_VOCAB + 1;
    EXPECT(test_dies(train_abc, &few, EXIT_FAILURE, "error: |256 ids, wanted 257 to"), "");
    EXPECT(test_dies(train_abc, &huge, EXIT_FAILURE, "error: |ids, wanted 257 to"), "");
    EXPECT(test_dies(train_abc, &many, EXIT_FAILURE, "error: |300 ids|43 |allows only 3|at most 260 ids"),
           "");
}

// Prints merges for dev/ref/check_bpe_training.py.
COMMAND(bpe_merges) { // FILE VOCAB_SIZE
    CHECK(argc == 2, "%d arguments; wanted FILE VOCAB_SIZE", argc);
    const char* path = argv[0];
    const int vocab_size = atoi(argv[1]);
    FILE* file = fopen(path, "rb");
    CHECK(file, "%s: cannot open", path);
    const size_t max = (size_t)1 << 20;
    Text text = {(char*)malloc(max), 0};
    BpeTrainer trainer;
    bpe_trainer_open(&trainer, 1);
    for (size_t got = 1; got > 0 || text.length > 0;) { // 1 MiB at a time
        got = fread(text.bytes + text.length, 1, max - text.length, file);
        text.length += got;
        const size_t used = got ? bpe_last_cut(&trainer.rules, text.bytes, text.length) : text.length;
        bpe_trainer_add(&trainer, 0, text.bytes, used);
        CHECK(used > 0 || text.length < max, "%s: a piece of more than 1 MiB", path);
        text.length -= used;
        memmove(text.bytes, text.bytes + used, text.length);
    }
    fclose(file);
    Bpe bpe;
    bpe_trainer_run(&trainer, vocab_size, NULL, NULL, &bpe);
    bpe_trainer_close(&trainer);
    for (size_t i = 0; i < (size_t)1 << bpe.pairs.bits; i++) {
        const uint64_t entry = bpe.pairs.entries[i];
        if (entry) {
            const BpeMerge_ merge = bpe_merge_of_(entry);
            printf("%d %d %d\n", merge.id, merge.left, merge.right);
        }
    }
    bpe_close(&bpe);
    free(text.bytes);
    return 0;
}
