/*
bpe_gguf.h -- a tokenizer in a GGUF file, as text of another format: tokenizer.json (bpe_json.h) or
SentencePiece's tokenizer.model (bpe_model.h). Both are kept, and so written with the model.

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
#include "llmc/base/json.h"
#include "llmc/base/text_buffer.h"
#include "llmc/tokenizer/bpe_files.h"
#include "llmc/tokenizer/bpe_json.h"
#include "llmc/tokenizer/bpe_model.h"
#include "llmc/tokenizer/bpe_sentence.h"

// ---- how text is split ----

// A way to split, and whether a piece that is a token is not merged.
typedef struct {
    const char* name;
    BpePattern pattern;
    int finds_pieces;
} BpeGgufPre_;

// The first of a pattern is written. Qwen normalizes text, although llama.cpp does not.
// clang-format off
static const BpeGgufPre_ bpe_gguf_pres_[] = {
    {.name = "gpt-2"},
    {.name = "olmo", .pattern = {.normalizes = 1}},
    {.name = "smollm", .pattern = {.digits = 1, .digits_first = 1}},
    {.name = "starcoder", .pattern = {.digits = 1, .digits_first = 1}},
    {.name = "refact", .pattern = {.digits = 1, .digits_first = 1}},
    {.name = "qwen2", .pattern = {BPE_CL100K, .digits = 1, .normalizes = 1}},
    {.name = "deepseek-r1-qwen", .pattern = {BPE_CL100K, .digits = 1, .normalizes = 1}},
    {.name = "llama-bpe", .pattern = {BPE_CL100K, .digits = 3}, .finds_pieces = 1},
    {.name = "llama3", .pattern = {BPE_CL100K, .digits = 3}, .finds_pieces = 1},
    {.name = "llama-v3", .pattern = {BPE_CL100K, .digits = 3}, .finds_pieces = 1},
    {.name = "dbrx", .pattern = {BPE_CL100K, .digits = 3}},
    {.name = "smaug-bpe", .pattern = {BPE_CL100K, .digits = 3}},
    {.name = "chatglm-bpe", .pattern = {BPE_CL100K, .digits = 3}},
    {.name = "glm4", .pattern = {BPE_CL100K, .digits = 3}}};
// clang-format on
enum { BPE_GGUF_PRES_ = sizeof(bpe_gguf_pres_) / sizeof(bpe_gguf_pres_[0]) };

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
        if (is_same && (p.style != BPE_GPT2 || p.digits_first || pre->pattern.normalizes == p.normalizes) &&
            (p.digits != 3 || pre->finds_pieces == bpe->finds_pieces)) {
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

static GgufText bpe_gguf_token_(const BpeGguf_* g, size_t id) {
    GgufText token = {"", 0};
    size_t at = 0;
    for (size_t i = 0; i <= id; i++) {
        token = gguf_text(g->tokens, &at);
    }
    return token;
}

// Returns a copy of a text; NULL: it is empty.
static char* bpe_gguf_copy_(GgufText text) {
    char* copy = text.length > 0 ? strndup(text.text, text.length) : NULL;
    CHECK(copy || text.length == 0, "a text in a GGUF file: no memory");
    return copy;
}

static CardFiles bpe_gguf_card_(const BpeGguf_* g) {
    static const char* const ends[] = {"eos", "eot", "eom"};
    size_t at = 0;
    CardFiles files;
    memset((void*)&files, 0, sizeof(files));
    files.start = bpe_gguf_id_(g, "bos");
    files.pad = bpe_gguf_id_(g, "padding");
    files.has_names = 1;
    files.bos = files.start != SIZE_MAX ? bpe_gguf_copy_(bpe_gguf_token_(g, files.start)) : NULL;
    for (int i = 0; i < 3; i++) {
        const size_t id = bpe_gguf_id_(g, ends[i]);
        files.eos = id != SIZE_MAX && i == 0 ? bpe_gguf_copy_(bpe_gguf_token_(g, id)) : files.eos;
        files.ends[files.num_ends] = id;
        files.num_ends += id != SIZE_MAX;
    }
    files.chat_template = bpe_gguf_copy_(gguf_text(gguf_pair(g->f, "tokenizer.chat_template"), &at));
    return files;
}

// ---- byte-level BPE: the text of a tokenizer.json ----

// True for a word that is spelled as it is: merges may make it.
static int bpe_gguf_is_visible_(GgufText word) {
    size_t visible = 0;
    while (visible < word.length && '!' <= word.text[visible] && word.text[visible] <= '~') {
        visible++;
    }
    return visible == word.length;
}

// Writes the vocabulary, tokens and words that merges may make; or names and words.
static void bpe_gguf_put_tokens_(const BpeGguf_* g, int is_added, FILE* file) {
    const char* comma = "";
    size_t at = 0;
    for (size_t id = 0; id < g->count; id++) {
        const GgufText token = gguf_text(g->tokens, &at);
        const int type = bpe_gguf_type_(g, id);
        if (is_added ? type == SPM_NORMAL
                     : type != SPM_NORMAL && !(type == SPM_USER && bpe_gguf_is_visible_(token))) {
            continue;
        }
        fprintf(file, is_added ? "%s{\"id\": %zu, \"content\": " : "%s", comma, id);
        json_print_string(file, token.text, token.length);
        if (is_added) {
            fprintf(file, BPE_HF_NOT_TRIMMED_ ", \"normalized\": false, \"special\": %s}",
                    type == SPM_USER ? "false" : "true");
        } else {
            fprintf(file, ": %zu", id);
        }
        comma = ", ";
    }
}

static void bpe_gguf_put_merges_(const BpeGguf_* g, FILE* file) {
    const GgufPair* merges = bpe_gguf_list_(g->f, "tokenizer.ggml.merges", 1);
    size_t at = 0;
    for (size_t i = 0; merges && i < merges->count; i++) {
        const GgufText merge = gguf_text(merges, &at);
        fputs(i ? ", " : "", file);
        json_print_string(file, merge.text, merge.length);
    }
}

// Writes the token that is put before each text. Not one that also ends texts: GGUF has it for
// models that saw it before each document, and other programs do not.
static void bpe_gguf_put_template_(const BpeGguf_* g, const CardFiles* card, int adds_start, FILE* file) {
    if (card->bos && bpe_gguf_is_on_(g, "tokenizer.ggml.add_bos_token", adds_start) &&
        card->start != bpe_gguf_id_(g, "eos")) {
        bpe_put_template(card->bos, strlen(card->bos), (int)card->start, file);
    } else {
        fputs("null", file);
    }
}

static void bpe_gguf_put_json_(const BpeGguf_* g, const CardFiles* card, FILE* file) {
    const BpeGgufPre_* pre = bpe_gguf_find_pre_(g->f);
    fputs("{\n\"version\": \"1.0\",\n\"truncation\": null,\n\"padding\": null,\n\"added_tokens\": [", file);
    bpe_gguf_put_tokens_(g, 1, file);
    fprintf(file, "],\n\"normalizer\": %s,\n\"pre_tokenizer\": ",
            pre->pattern.normalizes ? "{\"type\": \"NFC\"}" : "null");
    bpe_put_pattern(pre->pattern, file);
    fputs(",\n\"post_processor\": ", file);
    bpe_gguf_put_template_(g, card, pre->finds_pieces, file);
    fprintf(file,
            ",\n\"decoder\": {\"type\": \"ByteLevel\"},\n"
            "\"model\": {\"type\": \"BPE\", \"ignore_merges\": %s,\n\"vocab\": {",
            pre->finds_pieces ? "true" : "false");
    bpe_gguf_put_tokens_(g, 0, file);
    fputs("},\n\"merges\": [", file);
    bpe_gguf_put_merges_(g, file);
    fputs("]}\n}\n", file);
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

static void bpe_gguf_put_model_(const BpeGguf_* g, FILE* file) {
    static const char* const roles[] = {"bos", "eos", "padding"};
    const GgufPair* scores = bpe_gguf_list_(g->f, "tokenizer.ggml.scores", 0);
    TextBuffer training, normalization;
    size_t at = 0;
    CHECK(g->types && scores && scores->count == g->tokens->count,
          "%s: no tokenizer.ggml.token_type and tokenizer.ggml.scores of all tokens", g->f->path);
    CHECK(!bpe_gguf_is_on_(g, "tokenizer.ggml.remove_extra_whitespaces", 0),
          "%s: tokenizer.ggml.remove_extra_whitespaces is on, wanted it off", g->f->path);
    for (size_t id = 0; id < g->count; id++) {
        spm_put_piece_(g, id, gguf_text(g->tokens, &at), gguf_number(scores, id), file);
    }
    text_buffer_open(&training, g->f->path);
    spm_put_number_(3, 2, training.file); // BPE
    for (int i = 0; i < 3; i++) {
        spm_put_number_(41 + i, (uint64_t)(int64_t)bpe_gguf_id_(g, roles[i]), training.file); // -1: none
    }
    spm_put_message_(2, &training, file);
    text_buffer_open(&normalization, g->f->path);
    spm_put_bytes_(1, "identity", strlen("identity"), normalization.file);
    spm_put_number_(3, (uint64_t)bpe_gguf_is_on_(g, "tokenizer.ggml.add_space_prefix", 1),
                    normalization.file);
    spm_put_number_(4, 0, normalization.file);
    spm_put_message_(3, &normalization, file);
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
    TextBuffer text;
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
    text_buffer_open(&text, path);
    if (is_sentence) {
        bpe_gguf_put_model_(&parts, text.file);
    } else {
        bpe_gguf_put_json_(&parts, &card, text.file);
    }
    char* bytes = text_buffer_close(&text);
    gguf_file_close(&f);
    const BpeFile file = {path, (unsigned char*)bytes, text.bytes};
    if (is_sentence) {
        bpe_model_open_with(bpe, &file, &card);
    } else {
        bpe_open_json_with(bpe, &file, &card);
    }
}

#endif // BPE_GGUF_IMPLEMENTATION

#endif
