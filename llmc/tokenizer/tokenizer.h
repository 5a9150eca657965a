/*
tokenizer.h -- from text to token ids and back.

    kind     V                 ids                                   encodes
    bytes    257               0 .. 255 the bytes                    each byte
    words    n + 1             0 .. n-1 the words of a list          the longest match first
    gpt2     from the file     the file's own (bpe_files.h)          byte-pair encoding

The end-of-text token separates documents: it is the last id of bytes and words, 50256 of GPT-2, the
token that stands before each text in Llama 3. No text encodes to it, not even the characters
"<|endoftext|>". Other tokens may also end a text (tokenizer_is_end).

Bytes are a vocabulary like GPT-2's without merges, and are written as one: read from a file, their
kind is gpt2, with the same ids. Words have a tokenizer.json of their own (word_files.h).
*/
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/tokenizer/bpe.h"
#include "llmc/tokenizer/bpe_encode.h"
#include "llmc/tokenizer/model_card.h"
#include "llmc/tokenizer/word_files.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { TOKENIZER_BYTES_EOT = 256 }; // end-of-text id where tokens are bytes

typedef struct {
    const char* kind; // "bytes", "words" or "gpt2"
    int vocab_size;   // V
    int eot;          // end-of-text id, below V
    // words:
    WordList list;
    // bytes and gpt2:
    Bpe* bpe; // a pointer: the encoder refers to it, and a tokenizer may be moved
    // gpt2:
    BpeEncoder* encoder;
} Tokenizer;

// Start of a text, for a message: one line, terminated.
typedef struct {
    char text[36];
} TokenizerExcerpt;

void tokenizer_close(Tokenizer* tokenizer);

void tokenizer_open_bytes(Tokenizer* tokenizer);

// Copies the words; none may be empty.
void tokenizer_open_words(Tokenizer* tokenizer, const char* const* words, int n);

// Opens a file of bpe_files.h or word_files.h, or a directory: a Hugging Face model.
void tokenizer_open_file(Tokenizer* tokenizer, const char* path);

// ---- other formats ----

// Returns the byte-pair vocabulary; NULL for a list of words.
const Bpe* tokenizer_bpe(const Tokenizer* tokenizer);

// Writes the tokenizer of a model with a context of max_T for Hugging Face's transformers into a
// directory.
void tokenizer_write_hf(const Tokenizer* tokenizer, const ModelCard* card, const char* directory, int max_T);

// True if a directory has files of a tokenizer, or a GGUF file has one.
int tokenizer_is_in(const char* path);

// ---- use ----

// Returns the bytes of a token, without a terminating zero; valid until the tokenizer is closed.
const char* tokenizer_decode(const Tokenizer* tokenizer, int id, int* length);

// Returns the bytes of the first token of a text: without a blank that encoding put before it.
const char* tokenizer_decode_first(const Tokenizer* tokenizer, int id, int* length);

// Returns the number of bytes that a token stands for: 0 for end-of-text and other names, and for
// ids beyond the vocabulary, which a model may have.
int tokenizer_bytes(const Tokenizer* tokenizer, int id);

// Returns the smallest vocabulary that a model of these tokens needs: all but special tokens after
// the others.
int tokenizer_least_vocab(const Tokenizer* tokenizer);

// True if a text ends with this token: end-of-text, or another that the files of the model name.
int tokenizer_is_end(const Tokenizer* tokenizer, int id);

// Returns the id of an added token, special or cut out of texts; -1 if there is none of this name.
int tokenizer_find_added(const Tokenizer* tokenizer, const char* name);

// Returns the model card from the tokenizer's files; it borrows their texts.
ModelCard tokenizer_card(const Tokenizer* tokenizer);

// Returns an upper bound of the ids of a text of `bytes` bytes.
size_t tokenizer_most_ids(const Tokenizer* tokenizer, size_t bytes);

// True if two tokenizers have the same tokens under the same ids.
int tokenizer_is_same(const Tokenizer* a, const Tokenizer* b);

// Returns a checksum of all tokens in the order of their ids.
uint64_t tokenizer_checksum(const Tokenizer* tokenizer);

// True if the ids that both have are the same tokens.
int tokenizer_starts_like(const Tokenizer* a, const Tokenizer* b);

// Returns the first id with another token, or the start token if that differs.
int tokenizer_first_other(const Tokenizer* a, const Tokenizer* b);

// Prints a token for a message: in quotes, or the end of the vocabulary.
void tokenizer_describe(const Tokenizer* tokenizer, int id, char* text, size_t room);

// True if a tokenizer has all tokens of `old`, under the same ids, and more after them, and `old`
// can encode text. Both were read from files.
int tokenizer_extends(const Tokenizer* tokenizer, const Tokenizer* old);

// Copies from the card of the tokenizer that this one extends whatever a tokenizer.json alone does
// not say: ends of texts, padding, template and defaults.
void tokenizer_take_roles(Tokenizer* tokenizer, const Tokenizer* old);

// Returns the length of the longest token.
int tokenizer_longest(const Tokenizer* tokenizer);

// Sets ids (room for tokenizer_most_ids of them) and *count. Returns 0 with the reason in `error`
// if the words cannot express the text, or the tokens can only be decoded.
int tokenizer_try_encode(const Tokenizer* tokenizer, const char* text, size_t bytes, int* ids, size_t* count,
                         char* error);

// Encodes a text of the command line: text that cannot be encoded is a usage error. Returns the
// count.
size_t tokenizer_encode(const Tokenizer* tokenizer, const char* text, size_t bytes, int* ids);

// Encodes the rest of a text whose start is encoded already, in the same way.
size_t tokenizer_encode_rest(const Tokenizer* tokenizer, const char* text, size_t bytes, int* ids);

#ifdef __cplusplus
}
#endif

#ifdef TOKENIZER_IMPLEMENTATION

#include <assert.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/xxh64.h"
#include "llmc/tokenizer/bpe_files.h"
#include "llmc/tokenizer/bpe_gguf.h"

static TokenizerExcerpt tokenizer_excerpt_(const char* text, size_t bytes) {
    const size_t limit = 32, n = bytes < limit ? bytes : limit;
    TokenizerExcerpt excerpt;
    for (size_t i = 0; i < n; i++) {
        excerpt.text[i] = (unsigned char)text[i] < ' ' ? '?' : text[i];
    }
    strcpy(excerpt.text + n, n < bytes ? "..." : "");
    return excerpt;
}

static int tokenizer_is_(const Tokenizer* tokenizer, const char* kind) {
    return strcmp(tokenizer->kind, kind) == 0;
}

void tokenizer_close(Tokenizer* tokenizer) {
    word_list_close(&tokenizer->list);
    if (tokenizer->encoder) {
        bpe_encoder_close(tokenizer->encoder);
    }
    free(tokenizer->encoder);
    if (tokenizer->bpe) {
        bpe_close(tokenizer->bpe);
    }
    free(tokenizer->bpe);
    memset(tokenizer, 0, sizeof(*tokenizer));
}

static void tokenizer_open_(Tokenizer* tokenizer, const char* kind, int V, int eot) {
    tokenizer->kind = kind;
    tokenizer->vocab_size = V;
    tokenizer->eot = eot;
}

static Bpe* tokenizer_new_bpe_(void) { return (Bpe*)check_alloc(1, sizeof(Bpe), "tokenizer"); }

void tokenizer_open_bytes(Tokenizer* tokenizer) {
    memset(tokenizer, 0, sizeof(*tokenizer));
    tokenizer->bpe = tokenizer_new_bpe_();
    bpe_open_bytes(tokenizer->bpe);
    tokenizer_open_(tokenizer, "bytes", TOKENIZER_BYTES_EOT + 1, TOKENIZER_BYTES_EOT);
}

void tokenizer_open_words(Tokenizer* tokenizer, const char* const* words, int n) {
    size_t bytes = 0;
    for (int id = 0; id < n; id++) {
        bytes += strlen(words[id]);
    }
    memset(tokenizer, 0, sizeof(*tokenizer));
    tokenizer_open_(tokenizer, "words", n + 1, n);
    WordList* list = &tokenizer->list;
    list->count = n;
    list->words = (TokenText*)check_alloc((size_t)n, sizeof(TokenText), "vocabulary");
    list->buffer = (char*)check_alloc(bytes, 1, "vocabulary");
    char* at = list->buffer;
    for (int id = 0; id < n; id++) {
        const size_t length = strlen(words[id]);
        assert(0 < length && length <= INT_MAX);
        memcpy(at, words[id], length);
        const TokenText word = {at, (int)length};
        list->words[id] = word;
        at += length;
    }
}

// Reads the words of a tokenizer.json, or of the one in a directory. Returns 0 if it has none.
static int tokenizer_open_word_file_(Tokenizer* tokenizer, const char* path) {
    char file[PATH_MAX];
    const int is_directory = file_is_directory(path);
    if (is_directory) {
        file_join(file, path, "tokenizer.json");
    }
    if (!word_list_read(&tokenizer->list, is_directory ? file : path)) {
        return 0;
    }
    tokenizer_open_(tokenizer, "words", tokenizer->list.count + 1, tokenizer->list.count);
    return 1;
}

void tokenizer_open_file(Tokenizer* tokenizer, const char* path) {
    memset(tokenizer, 0, sizeof(*tokenizer));
    if (tokenizer_open_word_file_(tokenizer, path)) {
        return;
    }
    tokenizer->bpe = tokenizer_new_bpe_();
    bpe_open(tokenizer->bpe, path);
    tokenizer->encoder = (BpeEncoder*)check_alloc(1, sizeof(BpeEncoder), "tokenizer");
    bpe_encoder_open(tokenizer->encoder, tokenizer->bpe);
    tokenizer_open_(tokenizer, "gpt2", tokenizer->bpe->vocab_size, tokenizer->bpe->eot);
}

// ---- other formats ----

const Bpe* tokenizer_bpe(const Tokenizer* tokenizer) {
    return tokenizer_is_(tokenizer, "words") ? NULL : tokenizer->bpe;
}

void tokenizer_write_hf(const Tokenizer* tokenizer, const ModelCard* card, const char* directory, int max_T) {
    if (tokenizer_is_(tokenizer, "words")) {
        word_list_write_hf(tokenizer->list.words, tokenizer->list.count, card, directory, max_T);
    } else if (tokenizer_bpe(tokenizer)) {
        bpe_write_hf(tokenizer_bpe(tokenizer), card, directory, max_T);
    }
}

int tokenizer_is_in(const char* path) {
    char file[PATH_MAX];
    return file_is_directory(path)
               ? bpe_path(file, path, "tokenizer.json") || bpe_path(file, path, "tokenizer.model") ||
                     bpe_path(file, path, "merges.txt")
               : bpe_gguf_is_in(path);
}

// ---- use ----

const char* tokenizer_decode(const Tokenizer* tokenizer, int id, int* length) {
    if (!tokenizer_is_(tokenizer, "words")) {
        return bpe_token(tokenizer->bpe, id, length);
    }
    CHECK(0 <= id && id < tokenizer->vocab_size, "token id %d, wanted 0 to %d", id,
          tokenizer->vocab_size - 1);
    const TokenText end = {BPE_EOT_TEXT, (int)strlen(BPE_EOT_TEXT)};
    const TokenText token = id == tokenizer->eot ? end : tokenizer->list.words[id];
    *length = token.length;
    return token.text;
}

const char* tokenizer_decode_first(const Tokenizer* tokenizer, int id, int* length) {
    return tokenizer_is_(tokenizer, "gpt2") ? bpe_first_token(tokenizer->bpe, id, length)
                                            : tokenizer_decode(tokenizer, id, length);
}

// True if it was added to the vocabulary as a special token. The stand-in vocabulary has fewer
// tokens than it claims.
static int tokenizer_is_name_(const Tokenizer* tokenizer, int id) {
    return tokenizer->bpe && id < tokenizer->bpe->vocab_size && bpe_is_name(tokenizer->bpe, id);
}

int tokenizer_least_vocab(const Tokenizer* tokenizer) {
    const int has_names = tokenizer->bpe && tokenizer->bpe->vocab_size == tokenizer->vocab_size;
    return has_names ? bpe_least_vocab(tokenizer->bpe) : tokenizer->vocab_size;
}

int tokenizer_bytes(const Tokenizer* tokenizer, int id) {
    int length = 0;
    if (id != tokenizer->eot && id < tokenizer->vocab_size && !tokenizer_is_name_(tokenizer, id)) {
        tokenizer_decode(tokenizer, id, &length);
    }
    return length;
}

int tokenizer_is_end(const Tokenizer* tokenizer, int id) {
    return id == tokenizer->eot || (tokenizer->bpe && bpe_is_end(tokenizer->bpe, id));
}

int tokenizer_find_added(const Tokenizer* tokenizer, const char* name) {
    return tokenizer->bpe ? bpe_find_added(tokenizer->bpe, name) : -1;
}

ModelCard tokenizer_card(const Tokenizer* tokenizer) {
    return tokenizer_is_(tokenizer, "gpt2") ? tokenizer->bpe->card : model_card_of(tokenizer->eot);
}

size_t tokenizer_most_ids(const Tokenizer* tokenizer, size_t bytes) {
    return tokenizer->bpe ? bpe_most_ids(tokenizer->bpe, bytes) : bytes;
}

// True if an id has the same bytes in two vocabularies.
static int tokenizer_is_same_text_(const Tokenizer* a, const Tokenizer* b, int id) {
    int length_a, length_b;
    const char *text_a = tokenizer_decode(a, id, &length_a), *text_b = tokenizer_decode(b, id, &length_b);
    return length_a == length_b && memcmp(text_a, text_b, (size_t)length_a) == 0;
}

// True if the first ids have the same tokens, and end-of-text is the same id.
static int tokenizer_is_same_to_(const Tokenizer* a, const Tokenizer* b, int ids) {
    int same = a->eot == b->eot;
    for (int id = 0; same && id < ids; id++) {
        same = tokenizer_is_same_text_(a, b, id);
    }
    return same;
}

uint64_t tokenizer_checksum(const Tokenizer* tokenizer) {
    uint64_t sums[2] = {0, 0};
    for (int id = 0; id < tokenizer->vocab_size; id++) {
        int length;
        const char* bytes = tokenizer_decode(tokenizer, id, &length);
        sums[1] = xxh64(bytes, (size_t)length);
        sums[0] = xxh64(sums, sizeof(sums));
    }
    return sums[0];
}

int tokenizer_is_same(const Tokenizer* a, const Tokenizer* b) {
    return a->vocab_size == b->vocab_size && tokenizer_is_same_to_(a, b, a->vocab_size);
}

int tokenizer_starts_like(const Tokenizer* a, const Tokenizer* b) {
    return tokenizer_is_same_to_(a, b, a->vocab_size < b->vocab_size ? a->vocab_size : b->vocab_size);
}

int tokenizer_first_other(const Tokenizer* a, const Tokenizer* b) {
    const int ids = a->vocab_size < b->vocab_size ? a->vocab_size : b->vocab_size;
    int same = 0;
    while (same < ids && tokenizer_is_same_text_(a, b, same)) {
        same++;
    }
    return same < ids ? same : a->eot;
}

void tokenizer_describe(const Tokenizer* tokenizer, int id, char* text, size_t room) {
    int length = 0;
    const char* token = id < tokenizer->vocab_size ? tokenizer_decode(tokenizer, id, &length) : "";
    const TokenizerExcerpt excerpt = tokenizer_excerpt_(token, (size_t)length);
    snprintf(text, room, "\"%s\"%s", excerpt.text, id == tokenizer->eot ? " before each document" : "");
}

int tokenizer_extends(const Tokenizer* tokenizer, const Tokenizer* old) {
    return old->encoder && tokenizer->encoder && old->vocab_size < tokenizer->vocab_size &&
           tokenizer_is_same_to_(old, tokenizer, old->vocab_size);
}

// Returns a text, or else a copy of another's.
static const char* tokenizer_take_text_(const char* text, const char* other) {
    const char* taken = text || !other ? text : strdup(other);
    CHECK(taken || !other, "the files of a model: no memory");
    return taken;
}

void tokenizer_take_roles(Tokenizer* tokenizer, const Tokenizer* old) {
    if (!tokenizer->bpe || !old->bpe) {
        return; // words have no roles
    }
    ModelCard* card = &tokenizer->bpe->card;
    const ModelCard *own = &old->bpe->card, was = *card;
    const int is_bare = was.num_ends == 1 && was.ends[0] == was.start;
    *card = is_bare ? *own : was;
    card->pad = was.pad < 0 ? own->pad : was.pad;
    card->chat_template = tokenizer_take_text_(was.chat_template, own->chat_template);
    card->generation = tokenizer_take_text_(was.generation, own->generation);
    card->chat = was.chat_template ? was.chat : own->chat;
    card->chat_known = was.chat_template ? was.chat_known : own->chat_known;
    card->turn_end = was.chat_template ? was.turn_end : own->turn_end;
    if (!was.chat_template) {
        chat_format_keep(&card->chat);
    }
}

int tokenizer_longest(const Tokenizer* tokenizer) {
    int longest = 0;
    for (int id = 0; id < tokenizer->vocab_size; id++) {
        int length;
        tokenizer_decode(tokenizer, id, &length);
        longest = length > longest ? length : longest;
    }
    return longest;
}

// Returns the longest word that is a prefix of `lead` followed by the text, and longer than `lead`;
// -1 if none. Tries every word: texts are prompts, vocabularies hundreds of words.
static int tokenizer_longest_word_(const Tokenizer* tokenizer, const char* lead, const char* text,
                                   size_t bytes) {
    const int lead_length = (int)strlen(lead);
    int best = -1, best_length = lead_length;
    for (int id = 0; id < tokenizer->eot; id++) {
        const TokenText word = tokenizer->list.words[id];
        const size_t rest = (size_t)(word.length - lead_length);
        if (word.length > best_length && rest <= bytes && memcmp(word.text, lead, (size_t)lead_length) == 0 &&
            memcmp(word.text + lead_length, text, rest) == 0) {
            best = id;
            best_length = word.length;
        }
    }
    return best;
}

// Encodes as words. They include the blank before them; the first word of a text also matches
// without it.
static int tokenizer_try_encode_words_(const Tokenizer* tokenizer, const char* text, size_t bytes, int* ids,
                                       size_t* count, char* error) {
    *count = 0;
    for (size_t at = 0; at < bytes;) {
        int added = 0, id = tokenizer_longest_word_(tokenizer, "", text + at, bytes - at);
        if (id < 0 && at == 0) {
            id = tokenizer_longest_word_(tokenizer, " ", text, bytes);
            added = 1;
        }
        if (id < 0) {
            const TokenizerExcerpt found = tokenizer_excerpt_(text + at, bytes - at);
            return error_set(error, "prompt", "no word of the vocabulary at \"%s\" (byte %zu of %zu)",
                             found.text, at, bytes);
        }
        ids[(*count)++] = id;
        at += (size_t)(tokenizer->list.words[id].length - added);
    }
    return 1;
}

int tokenizer_try_encode(const Tokenizer* tokenizer, const char* text, size_t bytes, int* ids, size_t* count,
                         char* error) {
    if (tokenizer_is_(tokenizer, "words")) {
        return tokenizer_try_encode_words_(tokenizer, text, bytes, ids, count, error);
    }
    if (tokenizer_is_(tokenizer, "gpt2")) {
        *count = bpe_encode(tokenizer->encoder, text, bytes, ids);
        return 1;
    }
    for (size_t i = 0; i < bytes; i++) {
        ids[i] = (unsigned char)text[i];
    }
    *count = bytes;
    return 1;
}

size_t tokenizer_encode(const Tokenizer* tokenizer, const char* text, size_t bytes, int* ids) {
    char error[ERROR_BYTES];
    size_t count;
    const int ok = tokenizer_try_encode(tokenizer, text, bytes, ids, &count, error);
    if (!ok) {
        die_usage("%s", error);
    }
    return count;
}

size_t tokenizer_encode_rest(const Tokenizer* tokenizer, const char* text, size_t bytes, int* ids) {
    return tokenizer_is_(tokenizer, "gpt2") ? bpe_encode_at(tokenizer->encoder, BPE_REST, text, bytes, ids)
                                            : tokenizer_encode(tokenizer, text, bytes, ids);
}

#endif // TOKENIZER_IMPLEMENTATION

#endif
