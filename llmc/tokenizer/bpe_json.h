/*
bpe_json.h -- reads Hugging Face's tokenizer.json: a BPE with its vocabulary, merges, and how
text is split; and vocab.json, {"token": id, ...}.

A file of SentencePiece's kind replaces blanks by U+2581, in its normalizer or by Metaspace; all
others are byte-level.

A tokenizer.json that splits text differently, normalizes it first, or has tokens that its merges do
not make is an error that names the difference. Its added special tokens become names (bpe.h), and
the files beside it say which of them start and end a text (model_card.h).
*/
#ifndef LLMC_BPE_JSON_H
#define LLMC_BPE_JSON_H

#include <stddef.h>

#include "llmc/base/json.h"
#include "llmc/tokenizer/bpe.h"
#include "llmc/tokenizer/bpe_parts.h"
#include "llmc/tokenizer/bpe_sentence.h"
#include "llmc/tokenizer/bpe_spelling.h"
#include "llmc/tokenizer/model_card.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    BpeSpan text; // as spelled in the file
    size_t id;
} BpeNamed;

// Added token.
typedef struct {
    BpeSpan text;
    size_t id;
    int is_special, is_raw; // raw: matches the text before it is normalized
    // supported only for special tokens, which are never looked for
    int single_word, lstrip, rstrip;
} BpeAdded;

// Contents of such a file, in the memory of its bytes; not a vocabulary yet.
typedef struct {
    JsonReader json;
    BpeSpelling spelling;
    BpeNamed* tokens; // vocabulary
    BpeAdded* added;  // special tokens, words, end-of-text; the vocabulary may also have them
    BpeSpan (*merges)[2];
    size_t num_tokens, num_added, num_merges;
    int has_model, is_bytes; // parts that were found, and are as required
    BpePattern pattern;
    int has_pattern;
    int finds_pieces;                           // ignore_merges
    int falls_back;                             // byte_fallback
    int has_replace, has_metaspace, has_blanks; // parts that replace blanks; that split at them
    int blanks;                                 // BPE_BLANK_BEFORE ...
    const char* start; // the only token that its post_processor puts before a text; NULL: none
    int num_starts;    // tokens that it puts before a text
    int is_after_text; // while a template is read
} BpeJson;

// Opens what a file has, with the facts of the files beside it. Takes over the memory of all.
void bpe_json_open_parts(Bpe* bpe, BpeJson* v, const BpeFile* file, CardFiles* files);

// Opens such a file, whose bytes the vocabulary takes over.
void bpe_open_json(Bpe* bpe, const BpeFile* file);

#ifdef __cplusplus
}
#endif

#ifdef BPE_JSON_IMPLEMENTATION

#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/printable.h"

// ---- reading vocab.json and tokenizer.json ----

static int bpe_json_refuse_(BpeJson* v, const char* found, const char* what, const char* wanted) {
    const BpeSpan span = {(unsigned char*)what, strlen(what)};
    return error_set(v->json.error, v->json.path, "%s %s, wanted %s", found, bpe_excerpt(span).text, wanted);
}

// Reads an array, each element with `read`.
static int bpe_json_each_(BpeJson* v, int (*read)(BpeJson* v)) {
    JsonWalk walk = json_walk(&v->json, '[');
    while (json_step(&walk, NULL)) {
        walk.ok = read(v);
    }
    return walk.ok;
}

// Reads one "token": id, after its key.
static int bpe_json_token_(BpeJson* v, const char* text, size_t length) {
    BpeNamed token = {{(unsigned char*)text, length}, 0};
    if (!json_natural(&v->json, &token.id)) {
        return 0;
    }
    v->tokens = (BpeNamed*)check_grow(v->tokens, v->num_tokens, sizeof(*v->tokens), "vocabulary");
    v->tokens[v->num_tokens++] = token;
    return 1;
}

static int bpe_json_vocab_(BpeJson* v) {
    const char* text;
    size_t length;
    JsonWalk walk = json_walk(&v->json, '{');
    while (json_text_step(&walk, &text, &length)) {
        walk.ok = bpe_json_token_(v, text, length);
    }
    return walk.ok;
}

// Reads one side of a merge.
static int bpe_json_side_(BpeJson* v, BpeSpan* side) {
    const char* text;
    size_t length;
    if (!json_text(&v->json, &text, &length)) {
        return 0;
    }
    side->text = (unsigned char*)text;
    side->length = length;
    return 1;
}

// Reads "A B", or ["A", "B"] of newer files.
static int bpe_json_sides_(BpeJson* v, BpeSpan sides[2]) {
    if (json_peek(&v->json) == '[') {
        return json_take(&v->json, '[') && bpe_json_side_(v, &sides[0]) && json_take(&v->json, ',') &&
               bpe_json_side_(v, &sides[1]) && json_take(&v->json, ']');
    }
    BpeSpan both;
    if (!bpe_json_side_(v, &both)) {
        return 0;
    }
    sides[0] = bpe_until(both.text, both.length, ' ');
    sides[1] = bpe_after_blank(both);
    return 1;
}

// Reads one element of merges.
static int bpe_json_merge_(BpeJson* v) {
    BpeSpan sides[2];
    if (!bpe_json_sides_(v, sides)) {
        return 0;
    }
    v->merges = (BpeSpan(*)[2])check_grow(v->merges, v->num_merges, sizeof(*v->merges), "vocabulary");
    memcpy(v->merges[v->num_merges++], sides, sizeof(sides));
    return 1;
}

// Reads a value that must be null or an empty string.
static int bpe_json_nothing_(BpeJson* v, const char* key) {
    const char* text = key;
    const int c = json_peek(&v->json);
    if (c == 'n') {
        return json_skip(&v->json);
    }
    if (c == '"' && !json_string(&v->json, &text)) {
        return 0;
    }
    return text[0] == '\0' || error_set(v->json.error, v->json.path, "the model has a %s, wanted null", key);
}

static int bpe_json_model_member_(BpeJson* v, const char* key) {
    const char* type;
    if (strcmp(key, "type") == 0) {
        return json_name(&v->json, &type) &&
               (strcmp(type, "BPE") == 0 || bpe_json_refuse_(v, "a model of type", type, "BPE"));
    }
    if (strcmp(key, "dropout") == 0 || strcmp(key, "continuing_subword_prefix") == 0 ||
        strcmp(key, "end_of_word_suffix") == 0) {
        return bpe_json_nothing_(v, key);
    }
    return strcmp(key, "vocab") == 0           ? bpe_json_vocab_(v)
           : strcmp(key, "byte_fallback") == 0 ? json_bool(&v->json, &v->falls_back)
           : strcmp(key, "merges") == 0        ? bpe_json_each_(v, bpe_json_merge_)
           : strcmp(key, "ignore_merges") == 0 ? json_bool(&v->json, &v->finds_pieces)
                                               : json_skip(&v->json);
}

// Reads the model. Files of 2019 have no type.
static int bpe_json_model_(BpeJson* v) {
    const char* key;
    JsonWalk walk = json_walk(&v->json, '{');
    while (json_step(&walk, &key)) {
        walk.ok = bpe_json_model_member_(v, key);
    }
    v->has_model = 1;
    return walk.ok;
}

static int bpe_json_add_(BpeJson* v, BpeAdded token) {
    if (token.text.length == 0) {
        return error_set(v->json.error, v->json.path, "the added token %zu is empty", token.id);
    }
    v->added = (BpeAdded*)check_grow(v->added, v->num_added, sizeof(*v->added), "vocabulary");
    v->added[v->num_added++] = token;
    return 1;
}

// Reads one object of added_tokens.
static int bpe_json_added_token_(BpeJson* v) {
    const char *key, *content = "";
    size_t length = 0;
    BpeAdded token = {{NULL, 0}, SIZE_MAX, 0, 0, 0, 0, 0};
    int is_normalized = 0;
    JsonWalk walk = json_walk(&v->json, '{');
    while (json_step(&walk, &key)) {
        walk.ok = strcmp(key, "id") == 0            ? json_natural(&v->json, &token.id)
                  : strcmp(key, "content") == 0     ? json_text(&v->json, &content, &length)
                  : strcmp(key, "special") == 0     ? json_bool(&v->json, &token.is_special)
                  : strcmp(key, "normalized") == 0  ? json_bool(&v->json, &is_normalized)
                  : strcmp(key, "single_word") == 0 ? json_bool(&v->json, &token.single_word)
                  : strcmp(key, "lstrip") == 0      ? json_bool(&v->json, &token.lstrip)
                  : strcmp(key, "rstrip") == 0      ? json_bool(&v->json, &token.rstrip)
                                                    : json_skip(&v->json);
    }
    if (!walk.ok) {
        return 0; // the content may have no end
    }
    token.text.text = (unsigned char*)content;
    token.text.length = length;
    token.is_raw = !is_normalized;
    return bpe_json_add_(v, token);
}

// Normalizer or pre_tokenizer: an object, or null.
typedef struct {
    const char *type, *pattern, *behavior;
    int add_prefix_space, use_regex, individual_digits, invert;
    int is_literal; // the pattern is a text, not an expression
    int split;
    const char *blank, *scheme; // what a Prepend, Replace or Metaspace puts there
} BpeJsonStep_;

// Reads {"Regex": "..."}, or {"String": "..."}.
static int bpe_json_regex_(BpeJson* v, BpeJsonStep_* step) {
    const char* kind;
    if (!json_take(&v->json, '{') || json_member(&v->json, JSON_FIRST, &kind) <= 0) {
        return 0;
    }
    step->is_literal = strcmp(kind, "String") == 0;
    return (step->is_literal || strcmp(kind, "Regex") == 0 ||
            bpe_json_refuse_(v, "a pattern of kind", kind, "Regex or String")) &&
           json_name(&v->json, &step->pattern) && json_take(&v->json, '}');
}

// Reads a step. `each` reads a step of a sequence.
static int bpe_json_step_(BpeJson* v, BpeJsonStep_* step, int (*each)(BpeJson* v)) {
    static const BpeJsonStep_ defaults = {"without a type", "", "", 1, 1, 0, 0, 0, 1, "", ""};
    const char* key;
    *step = defaults;
    if (json_peek(&v->json) == 'n') {
        step->type = "null";
        return json_skip(&v->json);
    }
    JsonWalk walk = json_walk(&v->json, '{');
    while (json_step(&walk, &key)) {
        const int is_list = strcmp(key, "normalizers") == 0 || strcmp(key, "pretokenizers") == 0;
        const int is_blank =
            strcmp(key, "content") == 0 || strcmp(key, "prepend") == 0 || strcmp(key, "replacement") == 0;
        walk.ok = is_list                                 ? bpe_json_each_(v, each)
                  : strcmp(key, "type") == 0              ? json_name(&v->json, &step->type)
                  : strcmp(key, "pattern") == 0           ? bpe_json_regex_(v, step)
                  : strcmp(key, "behavior") == 0          ? json_name(&v->json, &step->behavior)
                  : strcmp(key, "add_prefix_space") == 0  ? json_bool(&v->json, &step->add_prefix_space)
                  : strcmp(key, "use_regex") == 0         ? json_bool(&v->json, &step->use_regex)
                  : strcmp(key, "individual_digits") == 0 ? json_bool(&v->json, &step->individual_digits)
                  : strcmp(key, "invert") == 0            ? json_bool(&v->json, &step->invert)
                  : strcmp(key, "split") == 0             ? json_bool(&v->json, &step->split)
                  : is_blank                              ? json_name(&v->json, &step->blank)
                  : strcmp(key, "prepend_scheme") == 0    ? json_name(&v->json, &step->scheme)
                                                          : json_skip(&v->json);
    }
    return walk.ok;
}

static int bpe_json_normalizer_(BpeJson* v) {
    BpeJsonStep_ step;
    if (!bpe_json_step_(v, &step, bpe_json_normalizer_)) {
        return 0;
    }
    const int prepends = strcmp(step.type, "Prepend") == 0, replaces = strcmp(step.type, "Replace") == 0;
    v->pattern.normalizes |= strcmp(step.type, "NFC") == 0;
    v->has_replace |= replaces;
    v->blanks |= prepends ? BPE_BLANK_BEFORE : 0;
    if ((prepends || replaces) && (strcmp(step.blank, BPE_BLANK_SPELLED) != 0 ||
                                   (replaces && !(step.is_literal && strcmp(step.pattern, " ") == 0)))) {
        return bpe_json_refuse_(v, "normalization by", step.type, "U+2581, for a blank");
    }
    return prepends || replaces || strcmp(step.type, "null") == 0 || strcmp(step.type, "NFC") == 0 ||
           strcmp(step.type, "Sequence") == 0 ||
           bpe_json_refuse_(v, "normalization by", step.type, "none, NFC, Prepend or Replace");
}

static int bpe_json_digits_(BpeJson* v, const BpeJsonStep_* step) {
    v->pattern.digits_first = 1;
    v->pattern.digits = step->individual_digits;
    return !v->has_pattern || bpe_json_refuse_(v, "the pre_tokenizer", "Digits", "it before the others");
}

// Reads a Split by a regular expression, whose matches are the pieces.
static int bpe_json_split_(BpeJson* v, const BpeJsonStep_* step) {
    BpePattern pattern;
    if (step->is_literal && strcmp(step->pattern, " ") == 0 && !v->has_pattern) {
        v->has_blanks = 1; // none are left once they are replaced
        return 1;
    }
    const int is_isolated = strcmp(step->behavior, "Isolated") == 0 && !step->invert;
    const int is_removed = strcmp(step->behavior, "Removed") == 0 && step->invert;
    if (!is_isolated && !is_removed) {
        return error_set(
            v->json.error, v->json.path,
            "the pre_tokenizer Split with the behavior %.24s and invert %s, wanted Isolated and false, or "
            "Removed and true",
            step->behavior, step->invert ? "true" : "false");
    }
    if (step->is_literal) {
        return error_set(v->json.error, v->json.path,
                         "the pre_tokenizer splits text at the literal string %.40s, wanted {\"Regex\": ...}",
                         step->pattern);
    }
    if (!bpe_pattern_read(step->pattern, &pattern)) {
        return error_set(v->json.error, v->json.path,
                         "the pre_tokenizer splits text by %s; wanted the pattern of GPT-2, Llama 3, Qwen, "
                         "GLM, nanochat or gpt-oss",
                         step->pattern);
    }
    if (v->has_pattern || (v->pattern.digits_first && pattern.style != BPE_GPT2)) {
        return bpe_json_refuse_(v, "the pre_tokenizer", "Split", "one pattern only");
    }
    v->has_pattern = 1;
    v->pattern.style = pattern.style;
    v->pattern.digits = v->pattern.digits_first ? v->pattern.digits : pattern.digits;
    return 1;
}

static int bpe_json_bytes_(BpeJson* v, const BpeJsonStep_* step) {
    if (step->add_prefix_space) {
        return bpe_json_refuse_(v, "the pre_tokenizer", step->type, "it with add_prefix_space false");
    }
    if (step->use_regex == v->has_pattern) {
        return bpe_json_refuse_(v, "the pre_tokenizer", step->type,
                                v->has_pattern ? "it with use_regex false after a Split"
                                               : "it with use_regex true");
    }
    v->is_bytes = v->has_pattern = 1;
    return 1;
}

// Reads a Metaspace, which replaces blanks.
static int bpe_json_metaspace_(BpeJson* v, const BpeJsonStep_* step) {
    const int is_first = strcmp(step->scheme, "first") == 0, is_never = strcmp(step->scheme, "never") == 0;
    if (step->split || strcmp(step->blank, BPE_BLANK_SPELLED) != 0 ||
        !(is_first || is_never || strcmp(step->scheme, "always") == 0)) {
        return bpe_json_refuse_(v, "the pre_tokenizer Metaspace with the scheme", step->scheme,
                                "U+2581, the schemes first, always or never, and split false");
    }
    v->has_metaspace = 1;
    v->blanks |= is_never ? 0 : BPE_BLANK_BEFORE | BPE_BLANK_MISSING | (is_first ? BPE_BLANK_ONCE : 0);
    return 1;
}

static int bpe_json_pre_tokenizer_(BpeJson* v) {
    BpeJsonStep_ step;
    if (!bpe_json_step_(v, &step, bpe_json_pre_tokenizer_)) {
        return 0;
    }
    if (v->is_bytes && strcmp(step.type, "Sequence") != 0) {
        return bpe_json_refuse_(v, "the pre_tokenizer", step.type, "nothing after ByteLevel");
    }
    return strcmp(step.type, "Sequence") == 0 || strcmp(step.type, "null") == 0 ? 1
           : strcmp(step.type, "Digits") == 0                                   ? bpe_json_digits_(v, &step)
           : strcmp(step.type, "Split") == 0                                    ? bpe_json_split_(v, &step)
           : strcmp(step.type, "ByteLevel") == 0                                ? bpe_json_bytes_(v, &step)
           : strcmp(step.type, "Metaspace") == 0
               ? bpe_json_metaspace_(v, &step)
               : bpe_json_refuse_(v, "the pre_tokenizer", step.type, "ByteLevel, Split, Digits or Metaspace");
}

// Reads {"id": "<s>", ...} of a template.
static int bpe_json_special_(BpeJson* v) {
    const char *key, *name;
    JsonWalk walk = json_walk(&v->json, '{');
    while (json_step(&walk, &key)) {
        if (strcmp(key, "id") != 0) {
            walk.ok = json_skip(&v->json);
        } else if ((walk.ok = json_name(&v->json, &name)) != 0) {
            v->start = v->is_after_text || v->num_starts++ > 0 ? v->start : name;
        }
    }
    return walk.ok;
}

// Reads one element of a template: {"SpecialToken": {...}} or {"Sequence": {...}}.
static int bpe_json_template_(BpeJson* v) {
    const char* key;
    if (!json_take(&v->json, '{') || json_member(&v->json, JSON_FIRST, &key) <= 0 ||
        !(strcmp(key, "SpecialToken") == 0 ? bpe_json_special_(v)
          : strcmp(key, "Sequence") == 0
              ? json_skip(&v->json)
              : bpe_json_refuse_(v, "the post_processor has a", key, "SpecialToken or Sequence")) ||
        !json_take(&v->json, '}')) {
        return 0;
    }
    v->is_after_text |= strcmp(key, "Sequence") == 0;
    return 1;
}

// Reads a post_processor, or one of a sequence, for the token it puts beside a text. "cls" is
// RoBERTa's.
static int bpe_json_processor_(BpeJson* v) {
    const char* key;
    JsonWalk walk = json_walk(&v->json, '{');
    while (json_step(&walk, &key)) {
        if (strcmp(key, "cls") == 0) {
            v->start = "its own token";
            v->num_starts++;
        }
        walk.ok = strcmp(key, "single") == 0       ? bpe_json_each_(v, bpe_json_template_)
                  : strcmp(key, "processors") == 0 ? bpe_json_each_(v, bpe_json_processor_)
                                                   : json_skip(&v->json);
    }
    return walk.ok;
}

static int bpe_json_post_processor_(BpeJson* v) {
    return json_peek(&v->json) == 'n' ? json_skip(&v->json) : bpe_json_processor_(v);
}

// Reads the whole file: in a tokenizer.json no value is a number, in a vocab.json all are.
static int bpe_json_file_(BpeJson* v) {
    const char* key;
    size_t length;
    JsonWalk walk = json_walk(&v->json, '{');
    while (json_text_step(&walk, &key, &length)) {
        const int c = json_peek(&v->json);
        walk.ok = '0' <= c && c <= '9'                 ? bpe_json_token_(v, key, length)
                  : strcmp(key, "model") == 0          ? bpe_json_model_(v)
                  : strcmp(key, "added_tokens") == 0   ? bpe_json_each_(v, bpe_json_added_token_)
                  : strcmp(key, "normalizer") == 0     ? bpe_json_normalizer_(v)
                  : strcmp(key, "pre_tokenizer") == 0  ? bpe_json_pre_tokenizer_(v)
                  : strcmp(key, "post_processor") == 0 ? bpe_json_post_processor_(v)
                                                       : json_skip(&v->json);
    }
    return walk.ok && json_end(&v->json);
}

// Returns the added token with this text; NULL: none.
static const BpeAdded* bpe_json_find_added_(const BpeJson* v, const char* text) {
    for (size_t i = 0; i < v->num_added; i++) {
        if (bpe_span_is(v->added[i].text, text)) {
            return &v->added[i];
        }
    }
    return NULL;
}

// Makes end-of-text in the vocabulary an added token, as tokenizer.json has it.
static void bpe_add_json_eot_(BpeJson* v) {
    for (size_t i = 0; i < v->num_tokens; i++) {
        const BpeNamed token = v->tokens[i];
        if (!bpe_span_is(token.text, BPE_EOT_TEXT)) {
            continue;
        }
        const BpeAdded eot = {token.text, token.id, 1, 0, 0, 0, 0},
                       *listed = bpe_json_find_added_(v, BPE_EOT_TEXT);
        CHECK(!listed || listed->id == token.id, "%s: %s is token %zu, and token %zu", v->json.path,
              BPE_EOT_TEXT, listed->id, token.id);
        if (!listed) {
            bpe_json_add_(v, eot);
        }
    }
}

// Counts the ids: tokens, and added ones that the vocabulary lacks.
static size_t bpe_json_size_(const BpeJson* v, const char* path) {
    const size_t most = v->num_tokens + v->num_added;
    char* is_taken = (char*)check_alloc(most + 1, 1, "vocabulary");
    size_t V = v->num_tokens;
    for (size_t i = 0; i < v->num_tokens; i++) {
        is_taken[v->tokens[i].id < most ? v->tokens[i].id : most] = 1;
    }
    is_taken[most] = 0;
    for (size_t i = 0; i < v->num_added; i++) {
        char* taken = &is_taken[v->added[i].id < most ? v->added[i].id : most];
        V += !*taken;
        *taken = 1;
    }
    free(is_taken);
    for (size_t i = 0; i < v->num_added; i++) {
        CHECK(v->added[i].id < V, "%s: the added token %s has the id %zu, wanted at most %zu", path,
              bpe_excerpt(v->added[i].text).text, v->added[i].id, V - 1);
    }
    return V;
}

// Returns the added token with this id; NULL: none.
static const BpeAdded* bpe_json_added_(const BpeJson* v, size_t id) {
    for (size_t i = 0; i < v->num_added; i++) {
        if (v->added[i].id == id) {
            return &v->added[i];
        }
    }
    return NULL;
}

// Returns the token that stands before each document: the one that the post_processor puts there,
// or else the first of the usual ones, or the one that the files beside it name.
static const BpeAdded* bpe_json_start_(const BpeJson* v, const CardFiles* files, const char* path) {
    static const char* const usual[] = {BPE_EOT_TEXT, "<|begin_of_text|>", "<|bos|>", "<s>", "<bos>"};
    const BpeAdded* start = v->start && v->num_starts == 1 ? bpe_json_find_added_(v, v->start) : NULL;
    for (size_t i = 0; !start && i < sizeof(usual) / sizeof(usual[0]); i++) {
        start = bpe_json_find_added_(v, usual[i]);
    }
    start = start || !files->bos ? start : bpe_json_find_added_(v, files->bos);
    start = start ? start : bpe_json_added_(v, files->start);
    CHECK(start,
          "%s: no token " BPE_EOT_TEXT ", nor another that usually stands before a document; wanted one, or "
          "a bos_token in tokenizer_config.json beside it",
          path);
    return start;
}

// Checks that a file of SentencePiece's kind has nothing else.
static void bpe_check_json_sentence_(const BpeJson* v, const char* path) {
    CHECK(v->has_replace + v->has_metaspace == 1 && !v->pattern.normalizes,
          "%s: blanks are replaced by U+2581, and text by another step, wanted only one of them", path);
    CHECK(!v->has_pattern && !v->pattern.digits_first && (!v->has_blanks || v->has_replace),
          "%s: blanks are U+2581, but the pre_tokenizer has a pattern, wanted null or Metaspace", path);
    CHECK(!v->finds_pieces, "%s: ignore_merges, and U+2581 for blanks; wanted only one of them", path);
}

// Checks that the parts of the file exist and their sizes fit.
static void bpe_check_json_(const BpeJson* v, const char* path) {
    const int is_sentence = v->pattern.style == BPE_SENTENCE;
    if (is_sentence) {
        bpe_check_json_sentence_(v, path);
    }
    CHECK(v->has_model || v->num_tokens > 0,
          "%s: neither a model nor tokens, wanted a tokenizer.json or vocab.json", path);
    CHECK(v->falls_back == is_sentence && (is_sentence || !v->blanks),
          "%s: byte_fallback is %s, wanted it where blanks are U+2581, and only there", path,
          v->falls_back ? "on" : "off");
    CHECK(!v->has_model || v->is_bytes || is_sentence, "%s: no pre_tokenizer, wanted ByteLevel", path);
    CHECK(v->num_merges <= BPE_MAX_VOCAB, "%s: %zu merges, wanted at most %d", path, v->num_merges,
          BPE_MAX_VOCAB);
}

// Adds a word, which is looked for in the text, or in the normalized one.
static void bpe_add_json_word_(Bpe* bpe, const BpeJson* v, BpeAdded token, const char* path) {
    const int is_sentence = v->pattern.style == BPE_SENTENCE, is_raw = token.is_raw || v->has_metaspace;
    const BpeWord word = {token.text.text, (uint32_t)token.text.length, (int)token.id,
                          is_raw ? BPE_RAW_WORDS : BPE_NORMAL_WORDS, token.rstrip};
    CHECK(!token.single_word && !token.lstrip && (!token.rstrip || is_sentence),
          "%s: the added token %s has single_word, lstrip or rstrip, wanted it only where it is special",
          path, bpe_excerpt(token.text).text);
    CHECK(!is_sentence || is_raw ||
              !(v->blanks || memmem(word.text, word.length, BPE_BLANK_SPELLED, BPE_BLANK_BYTES)),
          "%s: the added token %s is normalized, with its blanks; wanted it only where it is special", path,
          bpe_excerpt(token.text).text);
    bpe->tokens[token.id].kind = BPE_WORD;
    bpe_add_word(bpe, word, path);
}

static void bpe_name_json_tokens_(Bpe* bpe, const BpeJson* v, const char* path) {
    for (size_t i = 0; i < v->num_added; i++) {
        const BpeAdded token = v->added[i];
        size_t controls = 0;
        CHECK(token.id < (size_t)bpe->vocab_size && bpe->tokens[token.id].length == 0,
              "%s: id %zu appears twice", path, token.id);
        for (size_t k = 0; k < token.text.length; k++) {
            controls += token.text.text[k] < ' ' || token.text.text[k] == 0x7F;
        }
        CHECK(controls == 0 || (v->pattern.style == BPE_SENTENCE && !token.is_special),
              "%s: the added token %zu has control characters, wanted a name without control characters",
              path, token.id);
        bpe_name_token_(bpe, (int)token.id, token.text.text, token.text.length);
        if (!token.is_special) {
            bpe_add_json_word_(bpe, v, token, path);
        }
    }
    bpe_words_finish(&bpe->words);
}

// Turns a token of the file into bytes, in place. Returns 0 if it is none.
static int bpe_json_unspell_(const BpeJson* v, BpeSpan* text) {
    text->length = v->pattern.style == BPE_SENTENCE ? bpe_unspell_blanks(text->text, text->length)
                                                    : bpe_unspell(*text, &v->spelling);
    return text->length > 0;
}

// True if merges may make a token of the vocabulary: it is not an added token, or it is a word with
// the same bytes in both spellings. SentencePiece's kind has one spelling.
static int bpe_is_spelled_(Bpe* bpe, BpeNamed token, const BpeSpelling* spelling) {
    BpeToken_* named = &bpe->tokens[token.id];
    if (named->kind == BPE_TOKEN || named->length != token.text.length ||
        memcmp(named->text, token.text.text, named->length) != 0) {
        return 1;
    }
    int is_spelled = named->kind == BPE_WORD;
    for (uint32_t i = 0; i < named->length && bpe->rules.pattern.style != BPE_SENTENCE; i++) {
        is_spelled &= named->text[i] < 0x80 && spelling->byte_of[named->text[i]] == named->text[i];
    }
    named->length = is_spelled ? 0 : named->length;
    return is_spelled;
}

static void bpe_set_json_tokens_(Bpe* bpe, const BpeJson* v, const char* path) {
    for (size_t i = 0; i < v->num_tokens; i++) {
        BpeSpan text = v->tokens[i].text;
        const size_t id = v->tokens[i].id;
        CHECK(id < (size_t)bpe->vocab_size, "%s: token id %zu, wanted 0 to %d in a vocabulary of %d", path,
              id, bpe->vocab_size - 1, bpe->vocab_size);
        if (!bpe_is_spelled_(bpe, v->tokens[i], &v->spelling)) {
            continue;
        }
        CHECK(bpe->tokens[id].length == 0, "%s: id %zu appears twice", path, id);
        if (v->falls_back && bpe_set_byte(bpe, (int)id, text)) {
            continue;
        }
        CHECK(bpe_json_unspell_(v, &text), "%s: token %zu is not in the spelling of GPT-2", path, id);
        CHECK(bpe_set_token_(bpe, (int)id, text.text, text.length), "%s: token %zu is token %d again", path,
              id, bpe_find(bpe, (const char*)text.text, text.length));
    }
}

// Returns the merges as tokens, which the caller frees.
static BpeListed_* bpe_list_json_merges_(const Bpe* bpe, const BpeJson* v, const char* path) {
    BpeListed_* list = (BpeListed_*)check_alloc(v->num_merges, sizeof(BpeListed_), "merges");
    char* both = NULL;
    size_t room = 0;
    for (size_t i = 0; i < v->num_merges; i++) {
        BpeSpan left = v->merges[i][0], right = v->merges[i][1];
        CHECK(bpe_json_unspell_(v, &left) && bpe_json_unspell_(v, &right),
              "%s: merges[%zu] is not two tokens in the spelling of GPT-2", path, i);
        both = (char*)check_reserve(both, &room, left.length + right.length, 1, "merges");
        memcpy(both, left.text, left.length);
        memcpy(both + left.length, right.text, right.length);
        list[i].rank = (int)i;
        list[i].left = bpe_find(bpe, both, left.length);
        list[i].right = bpe_find(bpe, both + left.length, right.length);
        list[i].made = bpe_find(bpe, both, left.length + right.length);
        CHECK(list[i].left >= 0, "%s: the left side of merges[%zu] is no token", path, i);
        CHECK(list[i].right >= 0, "%s: the right side of merges[%zu] is no token", path, i);
        CHECK(list[i].made >= 0, "%s: merges[%zu] makes no token of %d and %d", path, i, list[i].left,
              list[i].right);
    }
    free(both);
    return list;
}

// Checks that merges make all tokens, unless the file looks for whole pieces first. Returns the
// number of tokens that they should make.
static size_t bpe_check_made_(const Bpe* bpe, const BpeJson* v, const BpeListed_* list, const char* path) {
    char* is_made = (char*)check_alloc((size_t)bpe->vocab_size, 1, "vocabulary");
    size_t wanted = 0, made = 0;
    for (size_t i = 0; i < v->num_merges; i++) {
        is_made[list[i].made] = 1;
    }
    for (int id = 0; id < bpe->vocab_size; id++) {
        const int is_long = bpe->tokens[id].kind == BPE_TOKEN && bpe->tokens[id].length > 1;
        wanted += (size_t)is_long;
        made += (size_t)(is_long && is_made[id]);
    }
    free(is_made);
    CHECK(made == wanted || v->finds_pieces,
          "%s: %zu merges make %zu of the %zu tokens that are longer than a byte, wanted all without "
          "ignore_merges",
          path, v->num_merges, made, wanted);
    return wanted;
}

// True if the merges are those that the vocabulary implies, in the order of the ids they make: the
// ranks are the ids then.
static int bpe_merges_are_implied_(const Bpe* bpe, const BpeListed_* list, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (bpe_pair_(&bpe->pairs, list[i].left, list[i].right) != list[i].made ||
            (i > 0 && list[i].made <= list[i - 1].made)) {
            return 0;
        }
    }
    return 1;
}

// Completes the vocabulary with the merges of the file.
static void bpe_finish_json_(Bpe* bpe, const BpeJson* v, const char* path) {
    char error[ERROR_BYTES];
    if (!v->has_model) {
        CHECK(bpe_finish_(bpe, path, error), "%s", error);
        return;
    }
    BpeListed_* list = bpe_list_json_merges_(bpe, v, path);
    const int is_sentence = v->pattern.style == BPE_SENTENCE;
    const size_t wanted = is_sentence ? 0 : bpe_check_made_(bpe, v, list, path);
    bpe->finds_pieces = v->finds_pieces;
    if (is_sentence || wanted != v->num_merges || !bpe_finish_(bpe, path, error) ||
        !bpe_merges_are_implied_(bpe, list, v->num_merges)) {
        CHECK(bpe_finish_ranks_(bpe, path, list, (int)v->num_merges, error), "%s", error);
    }
    if (is_sentence) {
        bpe_find_cuts(bpe);
    }
    free(list);
}

// ---- the vocabulary ----

void bpe_json_open_parts(Bpe* bpe, BpeJson* v, const BpeFile* file, CardFiles* files) {
    bpe_check_json_(v, file->path);
    bpe_add_json_eot_(v);
    const size_t V = bpe_json_size_(v, file->path);
    const BpeAdded* start = bpe_json_start_(v, files, file->path);
    bpe_open_ids_(bpe, file->path, file->data, V, start->id);
    for (size_t i = 0; i < v->num_added; i++) {
        v->pattern.cuts_words |= !v->added[i].is_special;
    }
    bpe_rules_close(&bpe->rules);
    bpe_rules_open(&bpe->rules, v->pattern);
    bpe->tokens[start->id].length = 0; // named with the others
    bpe_name_json_tokens_(bpe, v, file->path);
    bpe_set_json_tokens_(bpe, v, file->path);
    bpe_finish_json_(bpe, v, file->path);
    bpe->has_template = v->start && bpe_span_is(start->text, v->start);
    if (v->start && !bpe->has_template) {
        printable_line(stderr,
                       "note: %s: its post_processor puts %s beside each text; here only %s stands before it",
                       file->path, v->start, bpe_excerpt(start->text).text);
    }
    if (v->has_model) {
        bpe_set_card(bpe, files);
    }
    card_files_close(files);
    free(v->tokens);
    free(v->added);
    free(v->merges);
}

void bpe_open_json(Bpe* bpe, const BpeFile* file) {
    char error[ERROR_BYTES], directory[PATH_MAX];
    BpeJson v;
    CardFiles files;
    memset(&v, 0, sizeof(v));
    file_directory_of(directory, file->path);
    card_files_read(&files, directory);
    BpeKept copy = bpe_keep("tokenizer.json", file->data, file->bytes);
    v.json = json_reader(file->path, (char*)file->data, file->bytes, error);
    v.spelling = bpe_spelling();
    CHECK(bpe_json_file_(&v), "%s", error);
    if (v.has_replace || v.has_metaspace) {
        v.pattern.style = BPE_SENTENCE;
        v.pattern.digits = v.blanks;
    }
    bpe_json_open_parts(bpe, &v, file, &files);
    if (v.has_model) {
        bpe->kept[bpe->num_kept++] = copy;
    } else {
        free(copy.bytes);
    }
}

#endif // BPE_JSON_IMPLEMENTATION

#endif
