// test_fill_in_middle.c -- fill_in_middle.h, and rows with rearranged pieces (packing.h): taken
// apart by a parser that knows only the formats, every piece is tokens of the text in their order.
#include "dev/test/lib/shards.h"
#define FILL_IN_MIDDLE_IMPLEMENTATION

#include <math.h>

#include "llmc/base/rand.h"
#include "llmc/data/dataloader.h"
#include "llmc/data/fill_in_middle.h"
#include "llmc/data/packing.h"
#include "llmc/tokenizer/bpe_files.h"
#include "llmc/tokenizer/bpe_train.h"

enum { EOT = 9999, PRE = 9996, SUF = 9997, MID = 9998, V = 10000, MOST = 9000, LONGEST = 256 };

static FillInMiddle fim_of(float rate, float spm_rate, uint64_t seed) {
    const FillInMiddle fim = {rate, spm_rate, seed, PRE, SUF, MID};
    return fim;
}

// A stream of documents, end-of-text first, whose other tokens are their own positions.
typedef struct {
    uint16_t tokens[MOST];
    size_t count;
    TokenStream stream;
} Text;

static void text_open(Text* text, uint64_t seed, uint32_t longest) {
    Rand rng = rand_open(seed, 1);
    text->count = 0;
    while (text->count + longest < 6000) {
        const uint32_t n = 1 + rand_below(&rng, rand_below(&rng, longest) + 1);
        for (uint32_t i = 0; i < n; i++, text->count++) {
            text->tokens[text->count] = i ? (uint16_t)text->count : EOT;
        }
    }
    tokens_open_memory(&text->stream, text->tokens, text->count, V, "text");
}

// ---- taking rows apart ----

// Appends the tokens from `from` to the next mark or the end. Returns where it stopped.
static int take_part(int* out, int* n, const int* in, int from, int end) {
    while (from < end && in[from] != PRE && in[from] != SUF && in[from] != MID) {
        out[(*n)++] = in[from++];
    }
    return from;
}

// Undoes the rearrangement of in (length): sets `out`. Returns its number of tokens; -1 if the
// marks are not those of PSM or SPM. A piece without marks stays as it is.
static int restore(int* out, const int* in, int length, int* is_spm) {
    int parts[3][LONGEST], n[3] = {0, 0, 0}, at = 0, count = 0;
    *is_spm = 0;
    at = take_part(out, &count, in, 0, length);
    if (at == length) {
        return count;
    }
    if (in[at] != PRE || count > 1 || (count == 1 && out[0] != EOT)) {
        return -1;
    }
    at = take_part(parts[0], &n[0], in, at + 1, length);
    if (at == length || in[at] != SUF) {
        return -1;
    }
    *is_spm = n[0] == 0;
    at = take_part(parts[1], &n[1], in, at + 1, length);
    if (at == length || in[at] != MID || take_part(parts[2], &n[2], in, at + 1, length) != length) {
        return -1;
    }
    // SPM: prefix and middle follow each other; PSM with an empty prefix reads the same
    const int order[3] = {0, 2, 1};
    for (int i = 0; i < 3; i++) {
        memcpy(out + count, parts[order[i]], (size_t)n[order[i]] * sizeof(int));
        count += n[order[i]];
    }
    return count;
}

// Tokens of the text that rows have given so far, and pieces.
typedef struct {
    const Text* text;
    uint8_t used[MOST];
    size_t taken, next; // next: position of the next piece; SIZE_MAX: any
    int pieces, rearranged;
} Seen;

// Returns the position of a restored piece; of end-of-text alone, the first document of one token
// that is not used yet.
static size_t place_of(const Seen* seen, const int* tokens, int n) {
    const Text* text = seen->text;
    if (seen->next != SIZE_MAX) {
        return seen->next;
    }
    if (tokens[0] != EOT) {
        return (size_t)tokens[0];
    }
    if (n > 1) {
        return (size_t)tokens[1] - 1;
    }
    for (size_t at = 0; at < text->count; at++) {
        const int is_one = at + 1 == text->count || text->tokens[at + 1] == EOT;
        if (text->tokens[at] == EOT && is_one && !seen->used[at]) {
            return at;
        }
    }
    return SIZE_MAX;
}

// Checks a piece of a row; `in` has its tokens, `target` is the last one's.
static void take_piece(Seen* seen, const int* in, int length, int target) {
    const Text* text = seen->text;
    int tokens[LONGEST], is_spm;
    const int n = restore(tokens, in, length, &is_spm), has_marks = n != length;
    EXPECT(n > 0 && (!has_marks || n == length - FIM_MARKS), "%d tokens of %d", n, length);
    const size_t at = n > 0 ? place_of(seen, tokens, n) : SIZE_MAX;
    EXPECT(at != SIZE_MAX, "a piece of %d tokens", n);
    for (int i = 0; at != SIZE_MAX && i < n; i++) {
        EXPECT(text->tokens[at + (size_t)i] == tokens[i], "token %d of the piece at %zu", i, at);
        EXPECT(!seen->used[at + (size_t)i]++, "token %zu twice", at + (size_t)i);
    }
    const size_t next = at + (size_t)n;
    const int follows = next < text->count ? text->tokens[next] : text->tokens[next - 1] == EOT ? -1 : EOT;
    EXPECT(target == (has_marks ? EOT : follows), "the last target is %d, the next token %d", target,
           follows);
    seen->taken += (size_t)n;
    seen->next = seen->next == SIZE_MAX ? SIZE_MAX : next;
    seen->pieces += n > 1;
    seen->rearranged += has_marks;
}

static void take_row(Seen* seen, const Rows* rows, uint64_t k, int T, uint64_t epoch) {
    int inputs[LONGEST], targets[LONGEST], starts[LONGEST], counted = 0;
    const int found = rows_fill(rows, k, epoch, T, inputs, targets, starts), length = rows_length(rows, k);
    for (int t = 0; t < T; t++) {
        const int is_last = t == length - 1 || starts[t + 1 < T ? t + 1 : t] == t + 1;
        EXPECT(is_last || t >= length || targets[t] == inputs[t + 1], "target %d", t);
        EXPECT(t < length || (inputs[t] == EOT && targets[t] == -1), "padding at %d", t);
        counted += targets[t] >= 0;
        if (is_last && t < length) {
            take_piece(seen, inputs + starts[t], t + 1 - starts[t], targets[t]);
        }
    }
    EXPECT(counted == found && counted > 0, "%d targets, counted %d", counted, found);
}

// Returns where the row after one that ended at `next` starts: aligned leaves out the rest of a
// document that fits into a row.
static size_t start_of_row(const Text* text, Packing pack, int T, size_t next) {
    size_t begin = next, end = next + 1;
    while (begin > 0 && begin < text->count && text->tokens[begin] != EOT) {
        begin--;
    }
    while (end < text->count && text->tokens[end] != EOT) {
        end++;
    }
    const int drops = pack == PACK_ALIGNED && begin < next && end - begin <= (size_t)T;
    return pack > PACK_ALIGNED ? SIZE_MAX : drops ? end : next;
}

// Every packing, at all rates: inverted, the pieces are the text, and no token is lost but those
// that the packing drops.
static void test_rows(const Text* text, Packing pack, int T, float rate) {
    const FillInMiddle fim = fim_of(rate, 0.5f, 7);
    static Seen seen;
    Rows rows;
    memset(&seen, 0, sizeof(seen));
    seen.text = text;
    seen.next = pack > PACK_ALIGNED ? SIZE_MAX : 0;
    rows_open(&rows, &text->stream, pack, T, EOT, DOCUMENT_MASK_ON, &fim);
    for (uint64_t k = 0; k < rows.count; k++) {
        take_row(&seen, &rows, k, T, 3);
        EXPECT(pack > PACK_ALIGNED || rows_length(&rows, k) == T, "row %d is not full", (int)k);
        seen.next = start_of_row(text, pack, T, seen.next);
    }
    const size_t left = text->count - seen.taken;
    EXPECT(seen.taken == rows.tokens, "%zu tokens, counted %zu", seen.taken, (size_t)rows.tokens);
    EXPECT(rows.marks == (uint64_t)seen.rearranged * FIM_MARKS, "%d marks", (int)rows.marks);
    EXPECT(pack > PACK_ALIGNED || text->count - seen.next <= (size_t)T, "a row more fits at %zu", seen.next);
    EXPECT(pack != PACK_STREAM || left <= (size_t)T, "%zu lost", left);
    EXPECT(pack < PACK_BESTFIT || left <= 1, "%zu lost", left);
    EXPECT(rate < 1 || pack <= PACK_ALIGNED || seen.rearranged == seen.pieces, "%d of %d", seen.rearranged,
           seen.pieces);
    EXPECT(rate > 0 || seen.rearranged == 0, "%d rearranged at rate 0", seen.rearranged);
    rows_close(&rows);
}

TEST(rows) {
    static const int lengths[] = {5, 6, 16, 64, 250};
    static const float rates[] = {0, 0.5f, 1};
    static Text text;
    for (uint64_t seed = 0; seed < 3; seed++) {
        text_open(&text, seed, seed ? 300 : 12);
        for (int i = 0; i < 5; i++) {
            for (int pack = PACK_STREAM; pack <= PACK_UNIFORM; pack++) {
                for (int r = 0; r < 3; r++) {
                    test_rows(&text, (Packing)pack, lengths[i], rates[r]);
                }
            }
        }
        tokens_close(&text.stream);
    }
}

// ---- shares ----

// Returns true if k of n events of probability p are within 4 standard deviations: the seeds are
// fixed, so it is always or never so.
static int is_likely(double k, double n, double p) { return fabs(k - n * p) <= 4 * sqrt(n * p * (1 - p)); }

TEST(shares) {
    enum { PIECES = 40000 };
    const FillInMiddle fim = fim_of(0.3f, 0.25f, 11);
    int chosen = 0, spm = 0, same = 0, cuts[4][4] = {{0}};
    for (uint64_t at = 0; at < PIECES; at++) {
        const FimCuts_ one = fim_cut_(&fim, 17 * at, 3, 2), other = fim_cut_(&fim, 17 * at, 3, 3);
        EXPECT(one.prefix + one.middle + one.suffix == 3, "3 tokens");
        chosen += fim_chooses(&fim, 17 * at);
        spm += one.is_spm;
        cuts[one.prefix][one.prefix + one.middle]++;
        same += one.prefix == other.prefix && one.middle == other.middle;
    }
    EXPECT(is_likely(chosen, PIECES, 0.3), "%d rearranged", chosen);
    EXPECT(is_likely(spm, PIECES, 0.25), "%d SPM", spm);
    for (int a = 0; a < 4; a++) {
        for (int b = 0; b < 4; b++) {
            const double p = a < b ? 2.0 / 16 : a == b ? 1.0 / 16 : 0;
            EXPECT(is_likely(cuts[a][b], PIECES, p), "cut at %d and %d: %d times", a, b, cuts[a][b]);
        }
    }
    // two draws from 4 outcomes of 1/16 and 6 of 2/16
    EXPECT(is_likely(same, PIECES, 28.0 / 256), "%d cuts are the same in two epochs", same);
}

// The share of documents in rows is the rate, too, and another seed rearranges others.
TEST(share_of_rows) {
    static Text text;
    text_open(&text, 5, 40);
    uint64_t marks[2];
    for (uint64_t seed = 0; seed < 2; seed++) {
        const FillInMiddle fim = fim_of(0.5f, 0.5f, seed);
        Rows rows;
        int pieces = 0;
        rows_open(&rows, &text.stream, PACK_PAD, 64, EOT, DOCUMENT_MASK_OFF, &fim);
        for (uint64_t k = 0; k < rows.count; k++) {
            pieces += rows_length(&rows, k) > 1;
        }
        EXPECT(is_likely((double)rows.marks / FIM_MARKS, pieces, 0.5), "%d marks, %d pieces", (int)rows.marks,
               pieces);
        marks[seed] = rows.marks;
        rows_close(&rows);
    }
    EXPECT(marks[0] != marks[1], "two seeds rearrange %d each", (int)marks[0]);
    tokens_close(&text.stream);
}

// ---- epochs, batches, ranks ----

// An epoch has its own cuts; twice the same one gives the same tokens.
TEST(epochs) {
    const FillInMiddle fim = fim_of(1, 0.5f, 7);
    static Text text;
    int row[3][64], targets[64], differ = 0;
    Rows rows;
    text_open(&text, 3, 40);
    rows_open(&rows, &text.stream, PACK_BESTFIT, 64, EOT, DOCUMENT_MASK_OFF, &fim);
    for (uint64_t k = 0; k < rows.count; k++) {
        const uint64_t epochs[3] = {4, 5, 4};
        for (int i = 0; i < 3; i++) {
            rows_fill(&rows, k, epochs[i], 64, row[i], targets, NULL);
        }
        EXPECT(memcmp(row[0], row[2], sizeof(row[0])) == 0, "row %d", (int)k);
        differ += memcmp(row[0], row[1], sizeof(row[0])) != 0;
    }
    EXPECT(differ > (int)rows.count * 9 / 10, "%d of %d rows differ in another epoch", differ,
           (int)rows.count);
    rows_close(&rows);
    tokens_close(&text.stream);
}

// Reads an update of 12 sequences from `first` on, by `ranks` ranks in micro-batches of B.
static void read_update(int* out, const DataSources* sources, uint64_t first, int B, int ranks) {
    for (int rank = 0; rank < ranks; rank++) {
        const DataloaderSettings settings = {
            .B = B, .sequences = 12, .shuffle = SHUFFLE_ON, .seed = 3, .rank = rank, .num_processes = ranks};
        Dataloader loader;
        dataloader_open(&loader, sources, settings);
        dataloader_seek(&loader, first);
        for (int k = rank; k * B < 12; k += ranks) {
            const Batch batch = dataloader_next(&loader);
            memcpy(out + k * B * 64, batch.inputs, (size_t)(batch.B * 64) * sizeof(int));
        }
        dataloader_close(&loader);
    }
}

// The sequences of an update depend neither on B nor on the ranks nor on where a run resumed, in
// the second epoch, too, which cuts elsewhere.
TEST(batches_and_ranks) {
    static Text text;
    static int wanted[12 * 64], found[12 * 64];
    DataSources sources;
    text_open(&text, 4, 40);
    mixture_open_memory(&sources, text.tokens, text.count, V, "text");
    sources.fim = fim_of(0.7f, 0.5f, 9);
    for (int pack = PACK_STREAM; pack <= PACK_PAD; pack++) {
        mixture_pack(&sources, (Packing)pack, 64, EOT, DOCUMENT_MASK_OFF);
        const uint64_t epoch = sources.source[0].rows.count, firsts[2] = {12, epoch + 12};
        for (int i = 0; i < 2; i++) {
            read_update(wanted, &sources, firsts[i], 1, 1);
            read_update(found, &sources, firsts[i], 4, 1);
            EXPECT(memcmp(wanted, found, sizeof(wanted)) == 0, "B 4");
            read_update(found, &sources, firsts[i], 2, 3);
            EXPECT(memcmp(wanted, found, sizeof(wanted)) == 0, "3 ranks");
        }
        rows_close(&sources.source[0].rows);
    }
    mixture_close(&sources);
    tokens_close(&text.stream);
}

// ---- marks ----

// A vocabulary has the marks that it was given, after writing and reading, and no text encodes to
// them.
TEST(marks) {
    for (size_t i = 0; i < sizeof(FIM_NAMES_) / sizeof(FIM_NAMES_[0]); i++) {
        FillInMiddle fim = {0};
        Tokenizer tokenizer;
        Bpe bpe;
        int ids[64];
        bpe_open_bytes(&bpe);
        bpe_add_names(&bpe, FIM_NAMES_[i].of, FIM_MARKS);
        const char* path = test_path("tokenizer.json");
        bpe_write(&bpe, path);
        bpe_close(&bpe);
        tokenizer_open_file(&tokenizer, path);
        EXPECT(fim_find_marks(&fim, &tokenizer), "names %zu", i);
        EXPECT(fim.prefix == 257 && fim.suffix == 258 && fim.middle == 259 && fim_largest_mark(&fim) == 259,
               "%d, %d, %d", fim.prefix, fim.suffix, fim.middle);
        const char* name = FIM_NAMES_[i].of[2];
        EXPECT(tokenizer_encode(&tokenizer, name, strlen(name), ids) == strlen(name), "%s is text", name);
        EXPECT(tokenizer_find_added(&tokenizer, "<|fim_pre") < 0, "a part of a name");
        tokenizer_close(&tokenizer);
    }
}

TEST(no_marks) {
    FillInMiddle fim = {0};
    Tokenizer tokenizer;
    tokenizer_open_bytes(&tokenizer);
    EXPECT(!fim_find_marks(&fim, &tokenizer), "bytes");
    tokenizer_close(&tokenizer);
    const char* word = "one";
    tokenizer_open_words(&tokenizer, &word, 1);
    EXPECT(!fim_find_marks(&fim, &tokenizer), "words");
    tokenizer_close(&tokenizer);
}
