/*
sentencepiece.h -- reads SentencePiece's tokenizer.model: a BPE whose merges are ranked by the scores
of the pieces they make.

The file is a message of Protocol Buffers (https://protobuf.dev/programming-guides/encoding): fields
of a number, a wire type and a value. Fields that are not known are skipped.

    1 pieces              1 text, 2 score, 3 type
    2 training settings   3 model type, 24 blanks after words, 35 byte fallback, 40 to 43 ids of roles
    3 normalization       1 name, 2 table, 3 blank before a text, 4 single blanks, 5 blanks as U+2581

Two pieces are joined if their union is a piece, the one with the highest score first, leftmost
first. Pieces that users defined are cut out of the normalized text instead (bpe_words.h).
*/
#ifndef LLMC_SENTENCEPIECE_H
#define LLMC_SENTENCEPIECE_H

#include "llmc/tokenizer/bpe.h"
#include "llmc/tokenizer/bpe_spelling.h"

#ifdef __cplusplus
extern "C" {
#endif

// True if a file seems to be such a model.
int sentencepiece_is(const BpeFile* file);

// Opens such a file, whose bytes the vocabulary takes over.
void sentencepiece_open(Bpe* bpe, const BpeFile* file);

#ifdef __cplusplus
}
#endif

#ifdef SENTENCEPIECE_IMPLEMENTATION

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/tokenizer/bpe_json.h"
#include "llmc/tokenizer/bpe_sentence.h"

// ---- Protocol Buffers ----

typedef struct {
    const char* path;
    unsigned char* at;
    size_t left;
} SpmReader_;

typedef struct {
    int number;
    BpeSpan bytes;  // of wire type 2
    uint64_t value; // of all others: an integer, or the bits of a number
} SpmField_;

// Reads an integer of 7 bits per byte, the lowest first.
static uint64_t spm_varint_(SpmReader_* r) {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
        CHECK(r->left > 0, "%s: it ends too early, wanted a whole tokenizer.model", r->path);
        const unsigned char byte = *r->at++;
        r->left--;
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
    if (r->left == 0) {
        return 0;
    }
    const uint64_t key = spm_varint_(r);
    const int type = (int)(key & 7);
    memset(field, 0, sizeof(*field));
    field->number = key >> 3 <= INT_MAX ? (int)(key >> 3) : 0;
    if (type == 0) {
        field->value = spm_varint_(r);
        return 1;
    }
    CHECK(type == 1 || type == 2 || type == 5, "%s: a field of wire type %d, wanted a tokenizer.model",
          r->path, type);
    const uint64_t bytes = type == 2 ? spm_varint_(r) : type == 1 ? 8 : 4;
    CHECK(bytes <= r->left, "%s: it ends too early, wanted a whole tokenizer.model", r->path);
    if (type == 2) {
        field->bytes = (BpeSpan){r->at, (size_t)bytes};
    } else {
        memcpy(&field->value, r->at, (size_t)bytes);
    }
    r->at += bytes;
    r->left -= (size_t)bytes;
    return 1;
}

static SpmReader_ spm_inside_(const SpmReader_* r, BpeSpan bytes) {
    return (SpmReader_){r->path, bytes.text, bytes.length};
}

// ---- the parts of the file ----

typedef enum { SPM_NORMAL = 1, SPM_UNKNOWN, SPM_CONTROL, SPM_USER, SPM_UNUSED, SPM_BYTE } SpmType_;

typedef struct {
    BpeSpan text;
    float score;
    int type;
    int id;
} SpmPiece_;

typedef struct {
    const char* path;
    SpmPiece_* pieces;
    size_t count;
    int model_type, has_suffix, falls_back, unknown, bos, eos, pad;
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
          "%s: piece %zu, %s, is of type %s, wanted normal, unknown, control, user-defined or byte", s->path,
          s->count, bpe_excerpt(piece.text).text, piece.type == SPM_UNUSED ? "unused" : "that is not known");
    CHECK(isfinite(piece.score), "%s: the score of piece %zu is not finite", s->path, s->count);
    s->pieces = (SpmPiece_*)check_grow(s->pieces, s->count, sizeof(SpmPiece_), "vocabulary");
    s->pieces[s->count++] = piece;
}

static void spm_read_training_(Spm_* s, SpmReader_ r) {
    SpmField_ field;
    while (spm_next_(&r, &field)) {
        const int value = (int)(int64_t)field.value;
        switch (field.number) {
        case 3:
            s->model_type = value;
            break;
        case 24:
            s->has_suffix = value;
            break;
        case 35:
            s->falls_back = value;
            break;
        case 40:
            s->unknown = value;
            break;
        case 41:
            s->bos = value;
            break;
        case 42:
            s->eos = value;
            break;
        case 43:
            s->pad = value;
            break;
        default:
            break;
        }
    }
}

static void spm_read_normalization_(Spm_* s, SpmReader_ r) {
    SpmField_ field;
    while (spm_next_(&r, &field)) {
        switch (field.number) {
        case 1:
            s->rule = field.bytes;
            break;
        case 2:
            s->has_table = field.bytes.length > 0;
            break;
        case 3:
            s->leads = field.value != 0;
            break;
        case 4:
            s->is_single = field.value != 0;
            break;
        case 5:
            s->escapes = field.value != 0;
            break;
        default:
            break;
        }
    }
}

static Spm_ spm_read_(const BpeFile* file) {
    Spm_ s = {file->path, NULL, 0, 1, 0, 0, 0, 1, 2, -1, 0, 1, 1, 1, {NULL, 0}}; // the format's defaults
    SpmReader_ r = {file->path, file->data, file->bytes};
    SpmField_ field;
    while (spm_next_(&r, &field)) {
        const SpmReader_ inside = spm_inside_(&r, field.bytes);
        if (field.number == 1) {
            spm_read_piece_(&s, inside);
        } else if (field.number == 2) {
            spm_read_training_(&s, inside);
        } else if (field.number == 3) {
            spm_read_normalization_(&s, inside);
        }
    }
    return s;
}

static void spm_check_(const Spm_* s) {
    static const char* const types[] = {"unigram", "BPE", "word", "char"};
    CHECK(s->count > 0, "%s: no pieces, wanted a tokenizer.model", s->path);
    CHECK(s->model_type == 2, "%s: a model of type %s, wanted BPE", s->path,
          1 <= s->model_type && s->model_type <= 4 ? types[s->model_type - 1] : "that is not known");
    CHECK(!s->has_table, "%s: normalization by %s, wanted identity", s->path,
          s->rule.length ? bpe_excerpt(s->rule).text : "a table");
    CHECK(!s->has_suffix, "%s: treat_whitespace_as_suffix, wanted blanks before words", s->path);
    CHECK(s->escapes, "%s: escape_whitespaces is off, wanted blanks as U+2581", s->path);
}

// ---- tokens and merges ----

// Returns the id of a role; -1: there is none.
static int spm_role_(const Spm_* s, int id) { return 0 <= id && (size_t)id < s->count ? id : -1; }

static void spm_set_tokens_(Bpe* bpe, const Spm_* s) {
    for (size_t i = 0; i < s->count; i++) {
        SpmPiece_ piece = s->pieces[i];
        BpeSpan* text = &piece.text;
        const int byte = piece.type == SPM_BYTE ? bpe_byte_of(text->text, text->length) : -1;
        if (piece.type == SPM_UNKNOWN || piece.type == SPM_CONTROL) {
            bpe_name_token_(bpe, piece.id, text->text, text->length);
            bpe->unknown = piece.type == SPM_UNKNOWN && !s->falls_back ? piece.id : bpe->unknown;
        } else if (piece.type == SPM_BYTE) {
            CHECK(byte >= 0, "%s: piece %zu is a byte, but not of the form <0x0A>", s->path, i);
            bpe_set_byte_(bpe, piece.id, byte, text->text);
        } else {
            text->length = bpe_unspell_blanks(text->text, text->length);
            CHECK(piece.type == SPM_USER || bpe_set_token_(bpe, piece.id, text->text, text->length),
                  "%s: piece %zu is piece %d again", s->path, i,
                  bpe_find(bpe, (const char*)text->text, text->length));
        }
        if (piece.type == SPM_USER) {
            const BpeWord word = {text->text, (uint32_t)text->length, piece.id, BPE_NORMAL_WORDS, 0};
            bpe_name_token_(bpe, piece.id, text->text, text->length);
            bpe->tokens[piece.id].kind = BPE_WORD;
            bpe_add_word(bpe, word, s->path);
        }
    }
    bpe_words_finish(&bpe->words);
}

// Checks that each character of a piece is a token, or is cut out of texts: merging starts from these.
static void spm_check_characters_(const Bpe* bpe, const Spm_* s, BpeToken_ piece) {
    uint32_t c;
    for (size_t i = 0, n; i < piece.length; i += n) {
        const unsigned char* at = piece.text + i;
        n = *at < 0x80 ? 1 : (size_t)utf8_decode(at, piece.length - i, &c);
        CHECK(bpe_find(bpe, (const char*)at, n) >= 0 || bpe_word_at_(&bpe->words, BPE_NORMAL_WORDS, at, n),
              "%s: piece %d has a character that is no piece", s->path,
              bpe_find(bpe, (const char*)piece.text, piece.length));
    }
}

static int spm_by_score_(const void* a, const void* b) {
    const float one = ((const SpmPiece_*)a)->score, other = ((const SpmPiece_*)b)->score;
    return one > other ? -1 : one < other;
}

// Merges of all pieces.
typedef struct {
    BpeListed_* list;
    size_t count, room;
    int rank;
} SpmMerges_;

static void spm_add_merge_(void* context, BpeListed_ merge) {
    SpmMerges_* merges = (SpmMerges_*)context;
    merges->list = (BpeListed_*)check_reserve(merges->list, &merges->room, merges->count + 1,
                                              sizeof(BpeListed_), "merges");
    merge.rank = merges->rank;
    merges->list[merges->count++] = merge;
}

// Finds the merges of all pieces, the highest scores first. Sorts the pieces.
static SpmMerges_ spm_merges_(const Bpe* bpe, Spm_* s) {
    SpmMerges_ merges = {NULL, 0, 0, 0};
    const BpeWays_ ways = {bpe, spm_add_merge_, &merges};
    const SpmPiece_* last = NULL;
    qsort(s->pieces, s->count, sizeof(SpmPiece_), spm_by_score_);
    for (size_t i = 0; i < s->count; i++) {
        const SpmPiece_* piece = &s->pieces[i];
        const size_t before = merges.count;
        if (piece->type != SPM_NORMAL) {
            continue;
        }
        spm_check_characters_(bpe, s, bpe->tokens[piece->id]);
        bpe_each_way_(&ways, piece->id);
        if (merges.count > before) {
            CHECK(!last || last->score != piece->score,
                  "%s: pieces %d and %d have the same score, wanted an order of merges", s->path, last->id,
                  piece->id);
            last = piece;
            merges.rank++;
        }
    }
    return merges;
}

// ---- the vocabulary ----

int sentencepiece_is(const BpeFile* file) {
    const unsigned char* d = file->data; // the first piece: its length, its text's length, its text
    return file->bytes > 5 && d[0] == 0x0A && d[2] == 0x0A && d[3] + 2 <= d[1] && d[4] > ' ' && d[4] != '{';
}

// Copies the name of a role for the card, unless a file beside the model has it.
static void spm_name_role_(const Bpe* bpe, char** name, int id) {
    if (!*name && id >= 0) {
        *name = strndup((const char*)bpe->tokens[id].text, bpe->tokens[id].length);
        CHECK(*name, "the files of a model: no memory");
    }
}

static void spm_set_card_(Bpe* bpe, const Spm_* s) {
    CardFiles files;
    char directory[PATH_MAX];
    file_directory_of(directory, s->path);
    card_files_read(&files, directory);
    spm_name_role_(bpe, &files.bos, spm_role_(s, s->bos));
    spm_name_role_(bpe, &files.eos, spm_role_(s, s->eos));
    spm_name_role_(bpe, &files.pad_name, spm_role_(s, s->pad));
    files.has_names = 1;
    bpe->has_template = spm_role_(s, s->bos) >= 0;
    bpe_set_card(bpe, &files);
    card_files_close(&files);
}

void sentencepiece_open(Bpe* bpe, const BpeFile* file) {
    char error[ERROR_BYTES];
    const BpeKept copy = bpe_keep("tokenizer.model", file->data, file->bytes);
    Spm_ s = spm_read_(file);
    spm_check_(&s);
    const int start = spm_role_(&s, s.bos) >= 0 ? s.bos : spm_role_(&s, s.eos);
    CHECK(start >= 0 && s.pieces[start].type == SPM_CONTROL,
          "%s: no control piece starts or ends a text, wanted a bos_id or eos_id", file->path);
    const BpePattern pattern = {
        BPE_SENTENCE, (s.leads ? BPE_BLANK_BEFORE : 0) | (s.is_single ? BPE_BLANK_SINGLE : 0), 0, 0, 1};
    bpe_open_ids_(bpe, file->path, file->data, s.count, (size_t)start);
    bpe_rules_close(&bpe->rules);
    bpe_rules_open(&bpe->rules, pattern);
    spm_set_tokens_(bpe, &s);
    bpe->fuses_unknown = bpe->unknown >= 0;
    bpe->dropped_blanks = s.is_single ? INT_MAX : s.leads;
    SpmMerges_ merges = spm_merges_(bpe, &s);
    CHECK(merges.count <= BPE_MAX_VOCAB, "%s: %zu merges, wanted at most %d", file->path, merges.count,
          BPE_MAX_VOCAB);
    CHECK(bpe_finish_fallback_(bpe, file->path, error) &&
              bpe_finish_ranks_(bpe, file->path, merges.list, (int)merges.count, error),
          "%s", error);
    bpe_find_cuts_(bpe, 0);
    bpe->kept[bpe->num_kept++] = copy;
    spm_set_card_(bpe, &s);
    free(merges.list);
    free(s.pieces);
}

#endif // SENTENCEPIECE_IMPLEMENTATION

#endif
