// test_packing.c -- packing.h: every kind of packing keeps its promises, on streams of random
// documents.
#include "dev/test/lib/shards.h"
#define PACKING_IMPLEMENTATION

#include "llmc/base/rand.h"
#include "llmc/data/packing.h"

enum { EOT = 9999, V = 10000, MOST = 200000 };

// A stream of documents whose tokens tell where they stand: token p of the stream is p % 9973, or
// EOT.
typedef struct {
    uint16_t* tokens;
    size_t count;
    TokenStream stream;
} Text;

// Documents of up to `longest` tokens, with the end-of-text token first; the first document may
// lack it.
static Text text_open(uint64_t seed, size_t documents, uint32_t longest, int starts_inside) {
    Text text;
    Rand rng = rand_open(seed, 1);
    memset(&text, 0, sizeof(text));
    text.tokens = (uint16_t*)check_alloc(MOST, sizeof(uint16_t), "text");
    for (size_t d = 0; d < documents; d++) {
        const uint32_t length =
            1 + rand_below(&rng, rand_below(&rng, longest) + 1); // short ones are frequent
        for (uint32_t i = 0; i < length; i++) {
            const size_t at = text.count++;
            text.tokens[at] = i == 0 && (d > 0 || !starts_inside) ? EOT : (uint16_t)(at % 9973);
        }
    }
    tokens_open_memory(&text.stream, text.tokens, text.count, V, "text");
    return text;
}

static void text_close(Text* text) {
    tokens_close(&text->stream);
    free(text->tokens);
}

// One row, with what surrounds it untouched.
typedef struct {
    int inputs[258], targets[258], starts[258];
    int counted, length;
} Row;

static Row row_of(const Rows* rows, uint64_t k, int T) {
    Row row;
    memset(&row, 77, sizeof(row));
    row.counted = rows_fill(rows, k, 0, T, row.inputs + 1, row.targets + 1, row.starts + 1);
    row.length = rows_length(rows, k);
    RowCounts counts = {10, 100};
    rows_add_counts(rows, k, &counts);
    EXPECT(counts.tokens == 10 + row.length && counts.targets == 100 + row.counted, "row %d: %d, %d", (int)k,
           (int)counts.tokens, (int)counts.targets);
    const int untouched = row.starts[258 - 1];
    EXPECT(row.inputs[0] == untouched && row.targets[0] == untouched && row.starts[0] == untouched, "before");
    EXPECT(row.inputs[T + 1] == untouched && row.targets[T + 1] == untouched &&
               row.starts[T + 1] == untouched,
           "row %d wrote past its end", (int)k);
    memmove(row.inputs, row.inputs + 1, (size_t)T * sizeof(int));
    memmove(row.targets, row.targets + 1, (size_t)T * sizeof(int));
    memmove(row.starts, row.starts + 1, (size_t)T * sizeof(int));
    return row;
}

// Returns the target of the text's last token: its document ends, if it started with end-of-text.
static int last_target(const Text* text) {
    size_t at = text->count - 1;
    while (at > 0 && text->tokens[at] != EOT) {
        at--;
    }
    return text->tokens[at] == EOT && at + 1 < text->count ? EOT : -1;
}

// Where a piece of the row, [from, from + n), stands in the text: all that fit are tried.
static size_t find_piece(const Text* text, const Row* row, int from, int n, const uint8_t* used) {
    for (size_t at = 0; at + (size_t)n <= text->count; at++) {
        int i = 0;
        while (i < n && text->tokens[at + (size_t)i] == row->inputs[from + i]) {
            i++;
        }
        const int ends = at + (size_t)n == text->count || text->tokens[at + (size_t)n] == EOT;
        const int target = row->targets[from + n - 1];
        const int next = at + (size_t)n < text->count ? text->tokens[at + (size_t)n] : last_target(text);
        const int fits = target == next;
        if (i == n && !used[at] && fits && (ends || target != EOT)) {
            return at;
        }
    }
    return SIZE_MAX;
}

// Takes the row apart at `starts`: every piece is tokens of the text in their order, of one
// document, with their successors as targets, and no token is used twice. Returns the tokens that
// it used.
static size_t take_row(const Text* text, const Row* row, uint8_t* used) {
    size_t taken = 0;
    for (int from = 0; from < row->length;) {
        int end = from;
        EXPECT(row->starts[from] == from, "a piece starts at %d, starts says %d", from, row->starts[from]);
        while (end < row->length && row->starts[end] == from) {
            end++;
        }
        const size_t at = find_piece(text, row, from, end - from, used);
        EXPECT(at != SIZE_MAX, "piece of %d tokens from %d", end - from, row->inputs[from]);
        for (int i = from; at != SIZE_MAX && i < end; i++) {
            const size_t p = at + (size_t)(i - from);
            EXPECT(!used[p]++, "token %zu twice", p);
            EXPECT(i == from || text->tokens[p] != EOT, "a document starts inside a piece");
            EXPECT(i == end - 1 || row->targets[i] == text->tokens[p + 1], "target");
        }
        taken += (size_t)(end - from);
        from = end;
        if (at == SIZE_MAX || end == 0) {
            break;
        }
    }
    return taken;
}

static void expect_padding(const Row* row, int T) {
    int counted = 0;
    for (int t = 0; t < T; t++) {
        counted += row->targets[t] >= 0;
        if (t >= row->length) {
            EXPECT(row->inputs[t] == EOT && row->targets[t] == -1 && row->starts[t] == t, "padding at %d", t);
        }
    }
    EXPECT(counted == row->counted, "%d targets, counted %d", counted, row->counted);
    EXPECT(row->counted > 0, "a row without targets");
}

// bestfit, pad, dynamic, uniform: every token of the text once; in all but bestfit, one piece in a
// row.
static void test_whole(const Text* text, Packing pack, int T) {
    Rows rows;
    size_t taken = 0;
    int shorter = 0;
    uint8_t* used = (uint8_t*)check_alloc(text->count + 1, 1, "used");
    rows_open(&rows, &text->stream, pack, T, EOT, DOCUMENT_MASK_ON, NULL);
    for (uint64_t k = 0; k < rows.count; k++) {
        const Row row = row_of(&rows, k, T);
        expect_padding(&row, T);
        taken += take_row(text, &row, used);
        EXPECT(pack == PACK_BESTFIT || row.starts[row.length - 1] == 0, "one document in a row");
        EXPECT(pack != PACK_UNIFORM || row.length >= shorter, "row %d is shorter", (int)k);
        shorter = row.length;
    }
    const size_t left =
        text->count - taken; // the very last token, if it is a piece by itself: without a target
    EXPECT(left == 0 || (left == 1 && !used[text->count - 1]), "%zu tokens left over", left);
    EXPECT(rows.tokens == taken, "%zu tokens taken", taken);
    rows_close(&rows);
    free(used);
}

// Best fit leaves little room: of random documents, less than 3 %.
static void test_bestfit_fits(const Text* text, int T) {
    Rows rows;
    rows_open(&rows, &text->stream, PACK_BESTFIT, T, EOT, DOCUMENT_MASK_OFF, NULL);
    const double padding = 1 - (double)rows.tokens / ((double)rows.count * T);
    EXPECT(padding >= 0 && padding < 0.03, "%g padding", padding);
    rows_close(&rows);
}

// In a window the longest go first, each where it leaves the least; then rows stand as their
// longest documents do.
TEST(bestfit_example) {
    const int lengths[] = {3, 7, 4, 2, 10, 5, 23, 6}; // 23 = 10 + 10 + 3
    const int wanted[][4] = {{7, 3}, {10}, {5, 3, 2}, {10}, {10}, {6, 4}};
    uint16_t tokens[64];
    TokenStream stream;
    Rows rows;
    size_t n = 0;
    for (int d = 0; d < 8; d++) {
        for (int i = 0; i < lengths[d]; i++) {
            tokens[n++] = i ? 1 : EOT;
        }
    }
    tokens_open_memory(&stream, tokens, n, V, "example");
    rows_open(&rows, &stream, PACK_BESTFIT, 10, EOT, DOCUMENT_MASK_OFF, NULL);
    EXPECT(rows.count == 6, "%d rows", (int)rows.count);
    EXPECT(rows_count_cut(&rows) == 1, "%d documents are cut", (int)rows_count_cut(&rows));
    for (uint64_t k = 0; k < rows.count && k < 6; k++) {
        uint64_t piece, end;
        rows_pieces_(&rows, k, &piece, &end);
        for (int i = 0; i < 4; i++) {
            const int length = piece < end ? piece_length_(rows.pieces.at[piece++]) : 0;
            EXPECT(length == wanted[k][i], "row %d, piece %d: %d", (int)k, i, length);
        }
    }
    rows_close(&rows);
    tokens_close(&stream);
}

// The first token of the document that holds token p.
static size_t document_of(const Text* text, size_t p) {
    while (p > 0 && text->tokens[p] != EOT) {
        p--;
    }
    return p;
}

static size_t document_after(const Text* text, size_t p) {
    for (p++; p < text->count && text->tokens[p] != EOT; p++) {
    }
    return p;
}

// Every row: T tokens of the text; where it starts follows from where the one before ended.
static void test_aligned(const Text* text, int T) {
    Rows rows;
    size_t start = 0;
    rows_open(&rows, &text->stream, PACK_ALIGNED, T, EOT, DOCUMENT_MASK_ON, NULL);
    for (uint64_t k = 0; k < rows.count; k++) {
        const Row row = row_of(&rows, k, T);
        EXPECT(row.counted == T && row.length == T, "no padding");
        for (int t = 0; t < T; t++) {
            const size_t p = start + (size_t)t, first = document_of(text, p);
            EXPECT(row.inputs[t] == text->tokens[p] && row.targets[t] == text->tokens[p + 1], "row %d",
                   (int)k);
            EXPECT(row.starts[t] == (first > start ? (int)(first - start) : 0), "start of %d", t);
        }
        const size_t next = start + (size_t)T, first = next < text->count ? document_of(text, next) : next;
        const size_t end = document_after(text, first);
        start = first == next || end - first > (size_t)T ? next : end;
    }
    EXPECT(start + (size_t)T >= text->count, "a row more fits: %zu of %zu", start, text->count);
    rows_close(&rows);
}

static void test_stream(const Text* text, int T) {
    Rows rows;
    rows_open(&rows, &text->stream, PACK_STREAM, T, EOT, DOCUMENT_MASK_ON, NULL);
    EXPECT(rows.count == (text->count - 1) / (size_t)T, "%d rows", (int)rows.count);
    for (uint64_t k = 0; k < rows.count; k++) {
        const Row row = row_of(&rows, k, T);
        for (int t = 0; t < T; t++) {
            const size_t p = (size_t)k * (size_t)T + (size_t)t, first = document_of(text, p);
            const size_t start = (size_t)k * (size_t)T;
            EXPECT(row.inputs[t] == text->tokens[p] && row.targets[t] == text->tokens[p + 1], "row %d",
                   (int)k);
            EXPECT(row.starts[t] == (first > start ? (int)(first - start) : 0), "start of %d", t);
        }
    }
    rows_close(&rows);
}

SERIAL_TEST(random_texts) {
    const int lengths[] = {1, 2, 7, 64, 256};
    for (uint64_t seed = 0; seed < 8; seed++) {
        Text text = text_open(seed, 60, seed % 2 ? 100 : 15, (int)(seed / 2 % 2));
        for (int i = 0; i < 5; i++) {
            const int T = lengths[i];
            for (int pack = PACK_BESTFIT; pack <= PACK_UNIFORM; pack++) {
                test_whole(&text, (Packing)pack, T);
            }
            if (text.count > (size_t)T) {
                test_aligned(&text, T);
                test_stream(&text, T);
            }
        }
        text_close(&text);
    }
    Text large = text_open(9, 3000, 100, 0);
    test_bestfit_fits(&large, 256);
    text_close(&large);
}

// Three windows of documents: none is lost between them.
TEST(windows) {
    enum { DOCUMENTS = 2 * BESTFIT_WINDOW + 5 };
    uint16_t* tokens = (uint16_t*)check_alloc(2 * DOCUMENTS, sizeof(uint16_t), "documents");
    TokenStream stream;
    Rows rows;
    for (size_t i = 0; i < DOCUMENTS; i++) {
        tokens[2 * i] = EOT;
        tokens[2 * i + 1] = 5;
    }
    tokens_open_memory(&stream, tokens, 2 * DOCUMENTS, V, "documents");
    rows_open(&rows, &stream, PACK_BESTFIT, 7, EOT, DOCUMENT_MASK_OFF, NULL);
    EXPECT(rows.documents.count == DOCUMENTS && rows.tokens == 2 * DOCUMENTS, "%zu", rows.documents.count);
    // three in a row
    EXPECT(rows.count == 2 * ((BESTFIT_WINDOW + 2) / 3) + 2, "%d rows", (int)rows.count);
    rows_close(&rows);
    tokens_close(&stream);
    free(tokens);
}

// ---- documents of files ----

// Documents continue from one shard into the next.
TEST(shards) {
    const int32_t header_0[256] = {MAGIC_U16, 1, 5}, header_1[256] = {MAGIC_U32, 7, 5};
    const int tokens[10] = {EOT, 1, 2, EOT, 3, 4, 5, EOT, 6, EOT};
    const uint64_t wanted[4] = {0, 3, 7, 9};
    TokenStream stream;
    Rows rows;
    write_tokens("s0.bin", header_0, 1024, 2, tokens, 5);
    write_tokens("s1.bin", header_1, 1024, 4, tokens + 5, 5);
    const char* pattern = test_path("s?.bin");
    tokens_open_files(&stream, pattern, TOKENS_AUTO, V);
    rows_open(&rows, &stream, PACK_PAD, 8, EOT, DOCUMENT_MASK_OFF, NULL);
    EXPECT(rows.documents.count == 4 && memcmp(rows.documents.at, wanted, sizeof(wanted)) == 0, "documents");
    EXPECT(rows.count == 3 && rows.tokens == 9, "the last end of text has no target: %d rows",
           (int)rows.count);
    rows_close(&rows);
    tokens_close(&stream);
}

// More than a round of the parallel scan, with marks at the borders of its blocks.
TEST(scan) {
    enum { BLOCK = 1 << 18, COUNT = 70 * BLOCK + 3 };
    uint16_t* tokens = (uint16_t*)check_alloc(COUNT, sizeof(uint16_t), "tokens");
    const uint64_t marks[] = {0,          1,        511, 512, BLOCK - 1, BLOCK, 5 * BLOCK, 64 * BLOCK - 1,
                              64 * BLOCK, COUNT - 1};
    TokenStream stream;
    Rows rows;
    for (int i = 0; i < 10; i++) {
        tokens[marks[i]] = EOT;
    }
    tokens_open_memory(&stream, tokens, COUNT, V, "tokens");
    rows_open(&rows, &stream, PACK_STREAM, 8, EOT, DOCUMENT_MASK_ON, NULL);
    EXPECT(rows.documents.count == 10 && memcmp(rows.documents.at, marks, sizeof(marks)) == 0,
           "%zu documents", rows.documents.count);
    rows_close(&rows);
    tokens_close(&stream);
    free(tokens);
}

// ---- errors ----

typedef struct {
    Packing pack;
    int T;
    size_t count;
    uint16_t tokens[4];
} Bad;

static void open_bad(const void* arg) {
    const Bad* bad = (const Bad*)arg;
    TokenStream stream;
    Rows rows;
    tokens_open_memory(&stream, bad->tokens, bad->count, V, "some");
    rows_open(&rows, &stream, bad->pack, bad->T, EOT, DOCUMENT_MASK_OFF, NULL);
}

// The end of a document is one, if the files have a mark elsewhere; if they have none, there are no
// documents.
TEST(part) {
    const uint16_t tokens[8] = {EOT, 1, 2, 3, 4, 5, 6, 7};
    TokenStream stream, tail;
    Rows rows;
    tokens_open_memory(&stream, tokens, 8, V, "text");
    tail = stream;
    tail.is_view = 1;
    tail.begin = 4;
    tail.count = 4;
    rows_open(&rows, &tail, PACK_PAD, 4, EOT, DOCUMENT_MASK_ON, NULL);
    EXPECT(rows.documents.count == 1 && rows.count == 1 && rows_length(&rows, 0) == 4, "%d rows",
           (int)rows.count);
    rows_close(&rows);
    tokens_close(&stream);
}

// The last document of files has an end to learn, if documents start with end-of-text; that of a
// part has one if it ends there. Else the last token has no target.
TEST(last_end) {
    static const struct {
        uint16_t tokens[6];
        int count, target; // of the stream, of its last token
    } cases[] = {
        {{EOT, 1, 2, EOT, 4, 5}, 6, EOT}, {{EOT, 1, 2, EOT, 4, 5}, 3, EOT}, {{EOT, 1, 2, EOT, 4, 5}, 5, -1},
        {{1, 2, EOT, 3, 4, EOT}, 6, -1},  {{EOT, 1, 2, 3, 4, EOT}, 6, -1},  {{1, 2, 3, EOT, 4, 5}, 2, -1},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const int count = cases[i].count;
        int targets = 0, last = 0;
        TokenStream stream;
        Rows rows;
        tokens_open_memory(&stream, cases[i].tokens, 6, V, "text");
        stream.count = (size_t)count;
        rows_open(&rows, &stream, PACK_PAD, 6, EOT, DOCUMENT_MASK_ON, NULL);
        for (uint64_t k = 0; k < rows.count; k++) {
            const Row row = row_of(&rows, k, 6);
            targets += row.counted;
            last = row.targets[row.length - 1];
        }
        const int is_dropped = cases[i].tokens[count - 1] == EOT; // an empty document
        EXPECT(targets == count - (cases[i].target < 0), "text %zu: %d targets", i, targets);
        EXPECT(is_dropped || last == cases[i].target, "text %zu: the last target is %d", i, last);
        rows_close(&rows);
        tokens_close(&stream);
    }
}

TEST(errors) {
    const Bad few = {PACK_STREAM, 4, 4, {1, 2, 3, 4}}, aligned = {PACK_ALIGNED, 4, 4, {EOT, 2, 3, 4}};
    const Bad unmarked = {PACK_BESTFIT, 4, 4, {1, 2, 3, 4}}, empty = {PACK_PAD, 4, 1, {EOT}};
    EXPECT(test_dies(open_bad, &few, EXIT_FAILURE, "some: 4 tokens, wanted 5 for a sequence of 4"), "");
    EXPECT(test_dies(open_bad, &aligned, EXIT_FAILURE, "some: 4 tokens, wanted 5 for a sequence of 4"), "");
    EXPECT(test_dies(open_bad, &unmarked, EXIT_FAILURE, "some: no token 9999 (end of text)|--pack stream"),
           "");
    EXPECT(test_dies(open_bad, &empty, EXIT_FAILURE, "some: no row of 4 tokens"), "");
}
