/*
bpe_model.h -- reads SentencePiece's tokenizer.model: a BPE whose merges are ranked by the scores
of the pieces they make.

The file is a message of Protocol Buffers (https://protobuf.dev/programming-guides/encoding): fields
of a number, a wire type and a value. Fields that are not known are skipped.

    1 pieces              1 text, 2 score, 3 type
    2 training settings   3 model type, 24 blanks after words, 41 to 43 ids of roles
    3 normalization       1 name, 2 table, 3 blank before a text, 4 single blanks, 5 U+2581

Two pieces are joined if their union is a piece, the one with the highest score first, leftmost
first. Pieces that users defined are cut out of the normalized text instead (bpe_words.h).
*/
#ifndef LLMC_BPE_MODEL_H
#define LLMC_BPE_MODEL_H

#include "llmc/tokenizer/bpe.h"
#include "llmc/tokenizer/bpe_spelling.h"

#ifdef __cplusplus
extern "C" {
#endif

// True if a file seems to be such a model.
int bpe_model_is(const BpeFile* file);

// Opens such a file, whose bytes the vocabulary takes over.
void bpe_model_open(Bpe* bpe, const BpeFile* file);

// Does the same with the facts of other files than those beside it; takes over their texts.
void bpe_model_open_with(Bpe* bpe, const BpeFile* file, CardFiles* files);

// Types of pieces.
enum { SPM_NORMAL = 1, SPM_UNKNOWN, SPM_CONTROL, SPM_USER, SPM_UNUSED, SPM_BYTE };

#ifdef __cplusplus
}
#endif

#ifdef BPE_MODEL_IMPLEMENTATION

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/tokenizer/bpe_parts.h"
#include "llmc/tokenizer/bpe_sentence.h"

// ---- Protocol Buffers ----

typedef struct {
    const char* path;
    BpeSpan left;
} SpmReader_;

typedef struct {
    uint64_t number;
    BpeSpan bytes;  // of wire type 2
    uint64_t value; // an integer, the bits of a number, or how many bytes
} SpmField_;

// Reads an integer of 7 bits per byte, the lowest first.
static uint64_t spm_varint_(SpmReader_* r) {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
        CHECK(r->left.length > 0, "%s: it ends too early, wanted a whole tokenizer.model", r->path);
        const unsigned char byte = *r->left.text++;
        r->left.length--;
        value |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) {
            return value;
        }
    }
    CHECK(0, "%s: a number of more than 64 bits, wanted a tokenizer.model", r->path);
    return 0;
}

// Reads the next field. Returns 0 at the end.
static int spm_next_(SpmReader_* r, SpmField_* field) {
    if (r->left.length == 0) {
        return 0;
    }
    const uint64_t key = spm_varint_(r);
    const int type = (int)(key & 7);
    CHECK(type == 0 || type == 1 || type == 2 || type == 5,
          "%s: a field of wire type %d, wanted a tokenizer.model", r->path, type);
    const uint64_t value = type == 0 || type == 2 ? spm_varint_(r) : 0, bytes = type == 0   ? 0
                                                                                : type == 2 ? value
                                                                                : type == 1 ? 8
                                                                                            : 4;
    CHECK(bytes <= r->left.length, "%s: it ends too early, wanted a whole tokenizer.model", r->path);
    *field = (SpmField_){key >> 3, {r->left.text, (size_t)bytes}, value};
    if (type == 1 || type == 5) {
        memcpy(&field->value, r->left.text, (size_t)bytes);
    }
    r->left.text += bytes;
    r->left.length -= (size_t)bytes;
    return 1;
}

// ---- the parts of the file ----

enum { SPM_BPE_ = 2, SPM_FIELDS_ = 44 };

typedef struct {
    BpeSpan text;
    float score;
    int type, id;
} SpmPiece_;

typedef struct {
    const char* path;
    SpmPiece_* pieces;
    size_t count;
    int model_type, has_suffix, bos, eos, pad;
    int has_table, leads, is_single, escapes;
    BpeSpan rule; // name of the normalization
} Spm_;

static void spm_read_piece_(Spm_* s, SpmReader_ r) {
    SpmPiece_ piece = {{NULL, 0}, 0, SPM_NORMAL, (int)s->count};
    SpmField_ field;
    while (spm_next_(&r, &field)) {
        if (field.number == 1) {
            piece.text = field.bytes;
        } else if (field.number == 2) {
            memcpy(&piece.score, &field.value, sizeof(float));
        } else if (field.number == 3) {
            piece.type = (int)field.value;
        }
    }
    CHECK(piece.text.length > 0, "%s: piece %zu is empty", s->path, s->count);
    CHECK(!memchr(piece.text.text, ' ', piece.text.length), "%s: piece %zu has a blank, wanted U+2581",
          s->path, s->count);
    CHECK(SPM_NORMAL <= piece.type && piece.type <= SPM_BYTE && piece.type != SPM_UNUSED,
          "%s: piece %zu, %s, is of type %d, wanted normal, unknown, control, user-defined or byte", s->path,
          s->count, bpe_excerpt(piece.text).text, piece.type);
    CHECK(isfinite(piece.score), "%s: the score of piece %zu is not finite", s->path, s->count);
    s->pieces = (SpmPiece_*)check_grow(s->pieces, s->count, sizeof(SpmPiece_), "vocabulary");
    s->pieces[s->count++] = piece;
}

// Reads the numbers of a message, those that have a place, and its first field's text.
static void spm_read_numbers_(SpmReader_ r, int* const places[SPM_FIELDS_], BpeSpan* text) {
    SpmField_ field;
    while (spm_next_(&r, &field)) {
        if (field.number < SPM_FIELDS_ && places[field.number]) {
            *places[field.number] = (int)(int64_t)field.value;
        }
        *text = field.number == 1 ? field.bytes : *text;
    }
}

static Spm_ spm_read_(const BpeFile* file) {
    Spm_ s = {file->path, NULL, 0, 1, 0, 1, 2, -1, 0, 1, 1, 1, {NULL, 0}}; // the format's defaults
    int *training[SPM_FIELDS_] = {NULL}, *normalization[SPM_FIELDS_] = {NULL};
    SpmReader_ r = {file->path, {file->data, file->bytes}};
    BpeSpan unused = {NULL, 0};
    SpmField_ field;
    training[3] = &s.model_type;
    training[24] = &s.has_suffix;
    training[41] = &s.bos;
    training[42] = &s.eos;
    training[43] = &s.pad;
    normalization[2] = &s.has_table;
    normalization[3] = &s.leads;
    normalization[4] = &s.is_single;
    normalization[5] = &s.escapes;
    while (spm_next_(&r, &field)) {
        const SpmReader_ inside = {file->path, field.bytes};
        if (field.number == 1) {
            spm_read_piece_(&s, inside);
        } else if (field.number == 2) {
            spm_read_numbers_(inside, training, &unused);
        } else if (field.number == 3) {
            spm_read_numbers_(inside, normalization, &s.rule);
        }
    }
    return s;
}

// True if a piece has this role.
static int spm_has_(const Spm_* s, int id) { return 0 <= id && (size_t)id < s->count; }

static void spm_check_(const Spm_* s, int start) {
    static const char* const types[] = {"unigram", "BPE", "word", "char"};
    CHECK(s->model_type == SPM_BPE_, "%s: a model of type %s, wanted BPE", s->path,
          1 <= s->model_type && s->model_type <= 4 ? types[s->model_type - 1] : "that is not known");
    CHECK(!s->has_table, "%s: normalization by %s, wanted identity", s->path,
          s->rule.length ? bpe_excerpt(s->rule).text : "a table");
    CHECK(!s->is_single, "%s: remove_extra_whitespaces is on, wanted it off", s->path);
    CHECK(!s->has_suffix, "%s: treat_whitespace_as_suffix, wanted blanks before words", s->path);
    CHECK(s->escapes, "%s: escape_whitespaces is off, wanted blanks as U+2581", s->path);
    CHECK(spm_has_(s, start) && s->pieces[start].type == SPM_CONTROL,
          "%s: no control piece starts or ends a text, wanted a bos_id or eos_id", s->path);
}

// ---- tokens and merges ----

static void spm_set_token_(Bpe* bpe, const Spm_* s, SpmPiece_ piece) {
    BpeSpan text = piece.text;
    if (piece.type == SPM_BYTE) {
        CHECK(bpe_set_byte(bpe, piece.id, text), "%s: piece %d is a byte, but not of the form <0x0A>",
              s->path, piece.id);
        return;
    }
    if (piece.type == SPM_NORMAL || piece.type == SPM_USER) {
        text.length = bpe_unspell_blanks(text.text, text.length);
    }
    if (piece.type == SPM_NORMAL) {
        CHECK(bpe_set_token_(bpe, piece.id, text.text, text.length), "%s: piece %d is piece %d again",
              s->path, piece.id, bpe_find(bpe, (const char*)text.text, text.length));
        return;
    }
    bpe_name_token_(bpe, piece.id, text.text, text.length);
    if (piece.type == SPM_USER) {
        const BpeWord word = {text.text, (uint32_t)text.length, piece.id, BPE_NORMAL_WORDS, 0};
        bpe->tokens[piece.id].kind = BPE_WORD;
        bpe_add_word(bpe, word, s->path);
    }
}

// Checks that each character of a piece is a token, or is cut out of texts: merging starts from
// these.
static void spm_check_characters_(const Bpe* bpe, const Spm_* s, int id) {
    const BpeToken_ piece = bpe->tokens[id];
    uint32_t c;
    for (size_t i = 0, n; i < piece.length; i += n) {
        const unsigned char* at = piece.text + i;
        n = (size_t)utf8_decode(at, piece.length - i, &c);
        CHECK(bpe_find(bpe, (const char*)at, n) >= 0 || bpe_word_at(&bpe->words, BPE_NORMAL_WORDS, at, n),
              "%s: piece %d has a character that is no piece", s->path, id);
    }
}

static int spm_by_score_(const void* a, const void* b) {
    const float one = ((const SpmPiece_*)a)->score, other = ((const SpmPiece_*)b)->score;
    return one > other ? -1 : one < other;
}

// Finds the merges of all pieces, the highest scores first. Sorts the pieces.
static void spm_set_merges_(Bpe* bpe, Spm_* s) {
    const SpmPiece_* last = NULL;
    BpeListed_* list = NULL;
    size_t count = 0, room = 0;
    char error[ERROR_BYTES];
    int rank = 0;
    qsort(s->pieces, s->count, sizeof(SpmPiece_), spm_by_score_);
    for (size_t i = 0; i < s->count; i++) {
        const SpmPiece_* piece = &s->pieces[i];
        if (piece->type != SPM_NORMAL) {
            continue;
        }
        spm_check_characters_(bpe, s, piece->id);
        list = (BpeListed_*)check_reserve(list, &room, count + bpe->tokens[piece->id].length,
                                          sizeof(BpeListed_), "merges");
        const size_t ways = bpe_ways(bpe, piece->id, rank, list + count);
        if (ways > 0) {
            CHECK(!last || last->score != piece->score,
                  "%s: pieces %d and %d have the same score, wanted an order of merges", s->path, last->id,
                  piece->id);
            last = piece;
            rank++;
            count += ways;
        }
    }
    CHECK(count <= BPE_MAX_VOCAB, "%s: %zu merges, wanted at most %d", s->path, count, BPE_MAX_VOCAB);
    CHECK(bpe_finish_ranks_(bpe, s->path, list, (int)count, error), "%s", error);
    free(list);
}

// ---- the vocabulary ----

int bpe_model_is(const BpeFile* file) {
    const unsigned char* d = file->data; // the first piece: its length, its text's length, its text
    return file->bytes > 5 && d[0] == 0x0A && d[2] == 0x0A && d[3] + 2 <= d[1] && d[4] > ' ' && d[4] != '{';
}

// Sets the card. Files beside the model may name other roles.
static void spm_set_card_(Bpe* bpe, const Spm_* s, CardFiles* files) {
    char** const names[] = {&files->bos, &files->eos, &files->pad_name};
    const int ids[] = {s->bos, s->eos, s->pad};
    for (int i = 0; i < 3; i++) {
        *names[i] = *names[i] || !spm_has_(s, ids[i]) ? *names[i] : bpe_name_of(bpe, ids[i]);
    }
    files->has_names = 1;
    bpe->has_template = spm_has_(s, s->bos);
    bpe_set_card(bpe, files);
    card_files_close(files);
}

void bpe_model_open_with(Bpe* bpe, const BpeFile* file, CardFiles* files) {
    const BpeKept copy = bpe_keep("tokenizer.model", file->data, file->bytes);
    Spm_ s = spm_read_(file);
    const int start = spm_has_(&s, s.bos) ? s.bos : s.eos;
    const BpePattern pattern = {BPE_SENTENCE, s.leads ? BPE_BLANK_BEFORE : 0, 0, 0, 1};
    spm_check_(&s, start);
    bpe_open_ids_(bpe, file->path, file->data, s.count, (size_t)start);
    bpe_rules_close(&bpe->rules);
    bpe_rules_open(&bpe->rules, pattern);
    for (size_t i = 0; i < s.count; i++) {
        spm_set_token_(bpe, &s, s.pieces[i]);
    }
    bpe_words_finish(&bpe->words);
    spm_set_merges_(bpe, &s);
    bpe_find_cuts(bpe);
    bpe->kept[bpe->num_kept++] = copy;
    spm_set_card_(bpe, &s, files);
    free(s.pieces);
}

void bpe_model_open(Bpe* bpe, const BpeFile* file) {
    char directory[PATH_MAX];
    CardFiles files;
    file_directory_of(directory, file->path);
    card_files_read(&files, directory);
    bpe_model_open_with(bpe, file, &files);
}

#endif // BPE_MODEL_IMPLEMENTATION

#endif
