/*
bpe_gguf.h -- a tokenizer in a GGUF file, as the contents of another: of a tokenizer.json
(bpe_json.h), or of SentencePiece's tokenizer.model (bpe_model.h), which is kept.

    tokenizer.ggml.model        "gpt2": byte-level BPE; "llama": SentencePiece's BPE
    tokenizer.ggml.pre          how text is split, of byte-level BPE
    tokenizer.ggml.tokens       tokens as the other format spells them
    tokenizer.ggml.token_type   1 token, 2 unknown, 3 name, 4 word, 5 unused, 6 byte
    tokenizer.ggml.merges       "A B"
    tokenizer.ggml.scores       of SentencePiece's pieces: the highest is joined first
    tokenizer.ggml.*_token_id, tokenizer.chat_template: the model card

Unused tokens after all others fill up the model's vocabulary: the tokenizer does not have them.
*/
#ifndef LLMC_BPE_GGUF_H
#define LLMC_BPE_GGUF_H

#include "llmc/tokenizer/bpe.h"

#ifdef __cplusplus
extern "C" {
#endif

// Returns the name that GGUF has for how text is split and merged ("tokenizer.ggml.pre"); NULL:
// none.
const char* bpe_gguf_pre(const Bpe* bpe);

// Sets the scores (V) of tokens of SentencePiece's kind, by which GGUF ranks merges: the highest is
// first. Returns 0 if the merges have no such order.
int bpe_gguf_scores(const Bpe* bpe, float* scores);

// True if a file is a GGUF with a tokenizer.
int bpe_gguf_is_in(const char* path);

void bpe_open_gguf(Bpe* bpe, const char* path);

#ifdef __cplusplus
}
#endif

#ifdef BPE_GGUF_IMPLEMENTATION

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/gguf_file.h"
#include "llmc/base/text_buffer.h"
#include "llmc/tokenizer/bpe_json.h"
#include "llmc/tokenizer/bpe_model.h"
#include "llmc/tokenizer/bpe_sentence.h"

// ---- how text is split ----

// A way to split, and whether a piece that is a token is not merged. 1: texts start with a token,
// unless a file says otherwise.
typedef struct {
    const char* name;
    BpePattern pattern;
    int finds_pieces, starts;
} BpeGgufPre_;

// The first of a pattern is written. Qwen normalizes text, although llama.cpp does not; and
// llama.cpp merges all pieces of gpt-4o, which gives the same ids.
// clang-format off
static const BpeGgufPre_ bpe_gguf_pres_[] = {
    {.name = "gpt-2"},
    {.name = "olmo", .pattern = {.normalizes = 1}},
    {.name = "smollm", .pattern = {.digits = 1, .digits_first = 1}},
    {.name = "starcoder", .pattern = {.digits = 1, .digits_first = 1}},
    {.name = "refact", .pattern = {.digits = 1, .digits_first = 1}},
    {.name = "qwen2", .pattern = {BPE_CL100K, .digits = 1, .normalizes = 1}},
    {.name = "deepseek-r1-qwen", .pattern = {BPE_CL100K, .digits = 1, .normalizes = 1}},
    {.name = "llama-bpe", .pattern = {BPE_CL100K, .digits = 3}, .finds_pieces = 1, .starts = 1},
    {.name = "llama3", .pattern = {BPE_CL100K, .digits = 3}, .finds_pieces = 1, .starts = 1},
    {.name = "llama-v3", .pattern = {BPE_CL100K, .digits = 3}, .finds_pieces = 1, .starts = 1},
    {.name = "dbrx", .pattern = {BPE_CL100K, .digits = 3}},
    {.name = "smaug-bpe", .pattern = {BPE_CL100K, .digits = 3}},
    {.name = "chatglm-bpe", .pattern = {BPE_CL100K, .digits = 3}},
    {.name = "glm4", .pattern = {BPE_CL100K, .digits = 3}},
    {.name = "gpt-4o", .pattern = {BPE_O200K, .digits = 3}, .finds_pieces = 1}};
// clang-format on
enum { BPE_GGUF_PRES_ = sizeof(bpe_gguf_pres_) / sizeof(bpe_gguf_pres_[0]) };

// True if merging makes each token from its bytes: then it does not matter whether a piece that is
// a token is merged.
static int bpe_gguf_makes_tokens_(const Bpe* bpe) {
    Bpe merging = *bpe;
    BpeMerger_ merger;
    int* ids = NULL;
    size_t room = 0;
    int ok = 1;
    merging.finds_pieces = 0;
    bpe_merger_open_(&merger, bpe->num_ranks);
    for (int id = 0; id < bpe->vocab_size && ok; id++) {
        const BpeToken_ token = bpe->tokens[id];
        ids = (int*)check_reserve(ids, &room, token.length, sizeof(int), "ids");
        ok = token.kind != BPE_TOKEN ||
             (bpe_merge_(&merging, &merger, token.text, token.length, ids) == 1 && ids[0] == id);
    }
    free(ids);
    bpe_merger_close_(&merger);
    return ok;
}

const char* bpe_gguf_pre(const Bpe* bpe) {
    const BpePattern p = bpe->rules.pattern;
    if (p.style == BPE_SENTENCE) {
        float* scores = (float*)check_alloc((size_t)bpe->vocab_size, sizeof(float), "scores");
        const int ok = bpe_gguf_scores(bpe, scores);
        free(scores);
        return ok ? "default" : NULL;
    }
    for (const BpeGgufPre_* pre = bpe_gguf_pres_; pre < bpe_gguf_pres_ + BPE_GGUF_PRES_; pre++) {
        const int is_same = pre->pattern.style == p.style && pre->pattern.digits == p.digits &&
                            pre->pattern.digits_first == p.digits_first;
        const int has_pieces =
            p.style == BPE_O200K ? bpe_gguf_makes_tokens_(bpe) : pre->finds_pieces == bpe->finds_pieces;
        if (is_same && (p.style != BPE_GPT2 || p.digits_first || pre->pattern.normalizes == p.normalizes) &&
            (p.digits != 3 || has_pieces)) {
            return pre->name;
        }
    }
    return NULL;
}

// GGUF joins any two tokens whose union is one, so each such pair must be a merge, and all merges
// of a token stand together. Words are cut out first.
int bpe_gguf_scores(const Bpe* bpe, float* scores) {
    const int* made = bpe->pairs.made;
    BpeListed_* ways = NULL;
    size_t room = 0;
    int score = 0, ok = 1;
    memset(scores, 0, (size_t)bpe->vocab_size * sizeof(float));
    for (int rank = 0; rank < bpe->num_ranks; rank++) {
        if (bpe->tokens[made[rank]].kind == BPE_TOKEN && (rank == 0 || made[rank] != made[rank - 1])) {
            ok &= scores[made[rank]] == 0;
            scores[made[rank]] = (float)--score;
        }
    }
    for (int id = 0; id < bpe->vocab_size && ok; id++) {
        const BpeToken_ token = bpe->tokens[id];
        ways = (BpeListed_*)check_reserve(ways, &room, token.length, sizeof(BpeListed_), "merges");
        const size_t count = token.kind == BPE_TOKEN ? bpe_ways(bpe, id, 0, ways) : 0;
        for (size_t i = 0; i < count; i++) {
            const int rank = bpe_pair_(&bpe->pairs, ways[i].left, ways[i].right);
            ok &= rank != BPE_NONE_ && made[rank] == id;
        }
        if (token.kind == BPE_TOKEN && scores[id] == 0) { // a character
            scores[id] = (float)(score - 1);
        }
    }
    free(ways);
    return ok;
}

static const BpeGgufPre_* bpe_gguf_find_pre_(const GgufFile* f) {
    const GgufPair* pair = gguf_pair(f, "tokenizer.ggml.pre");
    char known[256] = "";
    size_t at = 0;
    for (int i = 0; i < BPE_GGUF_PRES_; i++) {
        const size_t used = strlen(known);
        if (gguf_pair_is(pair, bpe_gguf_pres_[i].name)) {
            return &bpe_gguf_pres_[i];
        }
        snprintf(known + used, sizeof(known) - used, "%s%s", i ? ", " : "", bpe_gguf_pres_[i].name);
    }
    const GgufText found = gguf_text(pair, &at);
    CHECK(0, "%s: tokenizer.ggml.pre is %.*s, wanted one of %s", f->path,
          found.length < 64 ? (int)found.length : 64, found.text, known);
    return NULL;
}

// ---- the parts of a file ----

typedef struct {
    const GgufFile* f;
    const GgufPair *tokens, *types; // types may be NULL
    size_t count;                   // tokens, but for unused ones after the others
} BpeGguf_;

static int bpe_gguf_type_(const BpeGguf_* g, size_t id) {
    return g->types ? (int)gguf_number(g->types, id) : SPM_NORMAL;
}

// Returns the list of a key; `is_text`: of strings.
static const GgufPair* bpe_gguf_list_(const GgufFile* f, const char* key, int is_text) {
    const GgufPair* pair = gguf_pair(f, key);
    CHECK(!pair || (pair->is_list && (pair->type == GGUF_STRING) == is_text), "%s: %s is not a list of %s",
          f->path, key, is_text ? "strings" : "numbers");
    return pair;
}

static BpeGguf_ bpe_gguf_parts_(const GgufFile* f) {
    BpeGguf_ g = {f, bpe_gguf_list_(f, "tokenizer.ggml.tokens", 1),
                  bpe_gguf_list_(f, "tokenizer.ggml.token_type", 0), 0};
    CHECK(g.tokens && 0 < g.tokens->count && g.tokens->count < BPE_MAX_VOCAB,
          "%s: no tokenizer.ggml.tokens of 1 to %d strings", f->path, BPE_MAX_VOCAB - 1);
    g.count = g.tokens->count;
    for (size_t id = 0; id < g.count && g.types; id++) {
        const double type = gguf_number(g.types, id);
        CHECK(type >= SPM_NORMAL && type <= SPM_BYTE,
              "%s: tokenizer.ggml.token_type of token %zu is %g, wanted 1 to 6", f->path, id, type);
    }
    while (g.count > 1 && bpe_gguf_type_(&g, g.count - 1) == SPM_UNUSED) {
        g.count--;
    }
    return g;
}

// Returns the id that a key names; SIZE_MAX: none.
static size_t bpe_gguf_id_(const BpeGguf_* g, const char* role) {
    char key[64];
    snprintf(key, sizeof(key), "tokenizer.ggml.%s_token_id", role);
    const double id = gguf_number(gguf_pair(g->f, key), 0);
    return id >= 0 && id < (double)g->count ? (size_t)id : SIZE_MAX;
}

static int bpe_gguf_is_on_(const BpeGguf_* g, const char* key, int missing) {
    const GgufPair* pair = gguf_pair(g->f, key);
    return pair ? gguf_number(pair, 0) != 0 : missing;
}

// Returns the text of a token, which the caller frees; NULL: it does not exist.
static char* bpe_gguf_name_(const BpeGguf_* g, size_t id) {
    GgufText token = {"", 0};
    size_t at = 0;
    for (size_t i = 0; id < g->count && i <= id; i++) {
        token = gguf_text(g->tokens, &at);
    }
    return token.length > 0 ? strndup(token.text, token.length) : NULL;
}

static CardFiles bpe_gguf_card_(const BpeGguf_* g) {
    static const char* const ends[] = {"eos", "eot", "eom"};
    size_t at = 0;
    CardFiles files;
    memset((void*)&files, 0, sizeof(files));
    files.start = bpe_gguf_id_(g, "bos");
    files.pad = bpe_gguf_id_(g, "padding");
    files.has_names = 1;
    files.bos = bpe_gguf_name_(g, files.start);
    files.eos = bpe_gguf_name_(g, bpe_gguf_id_(g, ends[0]));
    for (int i = 0; i < 3; i++) {
        files.ends[files.num_ends] = bpe_gguf_id_(g, ends[i]);
        files.num_ends += files.ends[files.num_ends] != SIZE_MAX;
    }
    const GgufText chat = gguf_text(gguf_pair(g->f, "tokenizer.chat_template"), &at);
    files.chat_template = chat.length > 0 ? strndup(chat.text, chat.length) : NULL;
    return files;
}

// ---- byte-level BPE ----

// Copies a text to the end of a buffer.
static BpeSpan bpe_gguf_take_(GgufText text, unsigned char** end) {
    const BpeSpan span = {(unsigned char*)memcpy(*end, text.text, text.length), text.length};
    *end += text.length;
    return span;
}

// Sets tokens, names and words. A word is also among the tokens: merges may make it, if both
// spellings are the same.
static void bpe_gguf_set_tokens_(const BpeGguf_* g, BpeJson* v, unsigned char** end) {
    size_t at = 0;
    v->tokens = (BpeNamed*)check_alloc(g->count, sizeof(BpeNamed), g->f->path);
    v->added = (BpeAdded*)check_alloc(g->count, sizeof(BpeAdded), g->f->path);
    for (size_t id = 0; id < g->count; id++) {
        const BpeNamed token = {bpe_gguf_take_(gguf_text(g->tokens, &at), end), id};
        const int type = bpe_gguf_type_(g, id), is_word = type == SPM_USER;
        const BpeAdded added = {token.text, id, !is_word, 1, 0, 0, 0};
        CHECK(token.text.length > 0, "%s: token %zu is empty", g->f->path, id);
        if (type != SPM_NORMAL) {
            v->added[v->num_added++] = added;
        }
        if (type == SPM_NORMAL || is_word) {
            v->tokens[v->num_tokens++] = token;
        }
    }
}

static void bpe_gguf_set_merges_(const GgufPair* merges, BpeJson* v, unsigned char** end) {
    size_t at = 0;
    v->merges = (BpeSpan(*)[2])check_alloc(merges->count + 1, sizeof(*v->merges), "merges");
    for (; v->num_merges < merges->count; v->num_merges++) {
        const BpeSpan both = bpe_gguf_take_(gguf_text(merges, &at), end);
        v->merges[v->num_merges][0] = bpe_until(both.text, both.length, ' ');
        v->merges[v->num_merges][1] = bpe_after_blank(both);
    }
}

// Opens it as bpe_json.h does. A token that starts texts is put before each, unless it also ends
// them: GGUF has it for models that saw it before each document, and other programs do not.
static void bpe_gguf_open_bytes_(Bpe* bpe, const BpeGguf_* g, CardFiles* card) {
    const BpeGgufPre_* pre = bpe_gguf_find_pre_(g->f);
    const GgufPair* merges = bpe_gguf_list_(g->f, "tokenizer.ggml.merges", 1);
    BpeJson v;
    memset(&v, 0, sizeof(v));
    CHECK(merges, "%s: no tokenizer.ggml.merges", g->f->path);
    const BpeFile file = {g->f->path, (unsigned char*)check_alloc(g->f->at, 1, g->f->path), g->f->at};
    unsigned char* end = file.data;
    v.spelling = bpe_spelling();
    v.has_model = v.is_bytes = v.has_pattern = 1;
    v.pattern = pre->pattern;
    v.finds_pieces = pre->finds_pieces;
    bpe_gguf_set_tokens_(g, &v, &end);
    bpe_gguf_set_merges_(merges, &v, &end);
    if (bpe_gguf_is_on_(g, "tokenizer.ggml.add_bos_token", pre->starts) &&
        card->start != bpe_gguf_id_(g, "eos")) {
        v.start = card->bos;
        v.num_starts = card->bos != NULL;
    }
    bpe_json_open_parts(bpe, &v, &file, card);
}

// ---- SentencePiece: the fields of a tokenizer.model (bpe_model.h) ----

static void spm_put_varint_(uint64_t value, FILE* file) {
    for (; value >= 0x80; value >>= 7) {
        fputc((int)(value % 128) + 128, file);
    }
    fputc((int)value, file);
}

static void spm_put_number_(int field, uint64_t value, FILE* file) {
    spm_put_varint_((uint64_t)field << 3, file);
    spm_put_varint_(value, file);
}

static void spm_put_bytes_(int field, const char* bytes, size_t count, FILE* file) {
    spm_put_varint_((uint64_t)field << 3 | 2, file);
    spm_put_varint_(count, file);
    fwrite(bytes, 1, count, file);
}

// Writes a message as a field, and frees its text.
static void spm_put_message_(int field, TextBuffer* message, FILE* file) {
    char* text = text_buffer_close(message);
    spm_put_bytes_(field, text, message->bytes, file);
    free(text);
}

// Writes a piece. GGUF has the blanks of words as they are.
static void spm_put_piece_(const BpeGguf_* g, size_t id, GgufText token, double score, FILE* file) {
    const int type = bpe_gguf_type_(g, id);
    const float single = (float)score;
    TextBuffer piece, text;
    text_buffer_open(&text, g->f->path);
    for (size_t i = 0; i < token.length; i++) {
        fputs(token.text[i] == ' ' ? BPE_BLANK_SPELLED : "", text.file);
        fwrite(token.text + i, 1, token.text[i] != ' ', text.file);
    }
    text_buffer_open(&piece, g->f->path);
    spm_put_message_(1, &text, piece.file);
    fputc(2 << 3 | 5, piece.file);
    fwrite(&single, sizeof(single), 1, piece.file);
    spm_put_number_(3, (uint64_t)(type == SPM_UNUSED ? SPM_CONTROL : type), piece.file);
    spm_put_message_(1, &piece, file);
}

// Opens it as bpe_model.h does.
static void bpe_gguf_open_pieces_(Bpe* bpe, const BpeGguf_* g, CardFiles* card) {
    static const char* const roles[] = {"bos", "eos", "padding"};
    const GgufPair* scores = bpe_gguf_list_(g->f, "tokenizer.ggml.scores", 0);
    // 1 the name "identity", 3 a blank before a text, 4 single blanks: off
    char normalization[] = "\x0A\x08identity\x18\0\x20";
    TextBuffer model, training;
    size_t at = 0;
    CHECK(g->types && scores && scores->count == g->tokens->count,
          "%s: no tokenizer.ggml.token_type and tokenizer.ggml.scores of all tokens", g->f->path);
    CHECK(!bpe_gguf_is_on_(g, "tokenizer.ggml.remove_extra_whitespaces", 0),
          "%s: tokenizer.ggml.remove_extra_whitespaces is on, wanted it off", g->f->path);
    text_buffer_open(&model, g->f->path);
    for (size_t id = 0; id < g->count; id++) {
        spm_put_piece_(g, id, gguf_text(g->tokens, &at), gguf_number(scores, id), model.file);
    }
    text_buffer_open(&training, g->f->path);
    spm_put_number_(3, 2, training.file); // BPE
    for (int i = 0; i < 3; i++) {
        spm_put_number_(41 + i, bpe_gguf_id_(g, roles[i]), training.file); // SIZE_MAX is -1
    }
    spm_put_message_(2, &training, model.file);
    normalization[11] = (char)bpe_gguf_is_on_(g, "tokenizer.ggml.add_space_prefix", 1);
    spm_put_bytes_(3, normalization, sizeof(normalization), model.file);
    char* text = text_buffer_close(&model);
    const BpeFile file = {g->f->path, (unsigned char*)text, model.bytes};
    bpe_model_open_with(bpe, &file, card);
}

// ---- any file ----

int bpe_gguf_is_in(const char* path) {
    GgufFile f;
    if (!gguf_is_file(path)) {
        return 0;
    }
    gguf_file_open(&f, path);
    const GgufPair* model = gguf_pair(&f, "tokenizer.ggml.model");
    const int is_in = model && !gguf_pair_is(model, "no_vocab");
    gguf_file_close(&f);
    return is_in;
}

void bpe_open_gguf(Bpe* bpe, const char* path) {
    GgufFile f;
    size_t at = 0;
    gguf_file_open(&f, path);
    const GgufPair* model = gguf_pair(&f, "tokenizer.ggml.model");
    const GgufText name = gguf_text(model, &at);
    const int is_sentence = gguf_pair_is(model, "llama");
    CHECK(is_sentence || gguf_pair_is(model, "gpt2"),
          "%s: tokenizer.ggml.model is %.*s, wanted gpt2, byte-level BPE, or llama, SentencePiece's BPE",
          path, name.length < 64 ? (int)name.length : 64, name.text);
    const BpeGguf_ parts = bpe_gguf_parts_(&f);
    CardFiles card = bpe_gguf_card_(&parts);
    if (is_sentence) {
        bpe_gguf_open_pieces_(bpe, &parts, &card);
    } else {
        bpe_gguf_open_bytes_(bpe, &parts, &card);
    }
    gguf_file_close(&f);
}

#endif // BPE_GGUF_IMPLEMENTATION

#endif
