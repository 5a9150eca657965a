/*
word_files.h -- writes and reads the tokenizer.json of a vocabulary of words (tokenizer.h), in the
format of Hugging Face's tokenizers.

The longest word at each position of the text is the next token. Words include the blank before
them; the first of a text also matches without it. tokenizers does the same with this description,
where W is all words as one regular expression, "longest|...|shortest":

    normalizer       puts a blank before the text, and removes it if the text starts with a word
    pre_tokenizer    Split: cuts out what W matches
    model            WordLevel: the words by their ids, <|endoftext|> last; all else is an error
    decoder          Fuse: concatenates the words

Only exactly this is read, with any JSON whitespace and escapes: a different file would encode text
differently.
*/
#ifndef LLMC_WORD_FILES_H
#define LLMC_WORD_FILES_H

#include "llmc/tokenizer/model_card.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const char* text; // UTF-8, no terminating zero
    int length;       // at least 1
} TokenText;

typedef struct {
    TokenText* words; // (count), by id; end-of-text, which is not among them, has the id `count`
    int count;
    char* buffer; // text of all words
} WordList;

void word_list_close(WordList* list);

// ---- writing ----

// Writes the tokenizer of a model with a context of max_T for transformers into a directory.
void word_list_write_hf(const TokenText* words, int count, const ModelCard* card, const char* directory,
                        int max_T);

// ---- reading ----

// Reads the words of a tokenizer.json. Returns 0 if it is not a list of words; ends the program if
// it is one that would encode text differently.
int word_list_read(WordList* list, const char* path);

#ifdef __cplusplus
}
#endif

#ifdef WORD_FILES_IMPLEMENTATION

#include <ctype.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/byte_order_mark.h"
#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/text_buffer.h"
#include "llmc/tokenizer/bpe.h"
#include "llmc/tokenizer/bpe_files.h"

#define WORD_FILE_MAX_ ((size_t)16 << 20) // a larger tokenizer.json is not a list of words

void word_list_close(WordList* list) {
    free(list->words);
    free(list->buffer);
    memset(list, 0, sizeof(*list));
}

// ---- writing ----

// longest first; equal lengths keep their order
static int word_by_length_(const void* a, const void* b) {
    const TokenText *x = *(const TokenText*const*)a, *y = *(const TokenText*const*)b;
    return x->length != y->length ? (x->length < y->length) - (x->length > y->length) : (x > y) - (x < y);
}

// Returns all words as one terminated regular expression; the caller frees it.
static char* word_pattern_(const TokenText* words, int count) {
    size_t bytes = 1;
    const TokenText** order = (const TokenText**)check_alloc((size_t)count, sizeof(*order), "words");
    for (int i = 0; i < count; i++) {
        order[i] = &words[i];
        bytes += 2 * (size_t)words[i].length + 1;
    }
    qsort(order, (size_t)count, sizeof(*order), word_by_length_);
    char *pattern = (char*)check_alloc(bytes, 1, "words"), *at = pattern;
    for (int i = 0; i < count; i++) {
        if (i > 0) {
            *at++ = '|';
        }
        for (int k = 0; k < order[i]->length; k++) {
            const unsigned char c = (unsigned char)order[i]->text[k];
            if (ispunct(c) && c < 0x80) {
                *at++ = '\\';
            }
            *at++ = (char)c;
        }
    }
    free(order);
    return pattern;
}

// Prints JSON that is written here with ' for ".
static void word_file_print_(const char* text, FILE* file) {
    for (; *text; text++) {
        fputc(*text == '\'' ? '"' : *text, file);
    }
}

// Writes the whole file. Keys are in the order of tokenizers, which writes the same file; the
// post_processor adds nothing, but transformers inserts it when it saves the file again.
static void word_file_put_(const TokenText* words, int count, FILE* file) {
    char* pattern = word_pattern_(words, count);
    const size_t length = strlen(pattern) + 16;
    char* at_start = (char*)check_alloc(length, 1, "words");
    snprintf(at_start, length, "\\A (?=%s)", pattern);
    word_file_print_("{\n'version': '1.0',\n'truncation': null,\n'padding': null,\n", file);
    fprintf(file, "\"added_tokens\": [{\"id\": %d, " BPE_HF_EOT "}],\n", count);
    word_file_print_(
        "'normalizer': {'type': 'Sequence', 'normalizers': [{'type': 'Prepend', 'prepend': ' '}, "
        "{'type': 'Replace', 'pattern': {'Regex': ",
        file);
    json_print_string(file, at_start, strlen(at_start));
    word_file_print_("}, 'content': ''}]},\n'pre_tokenizer': {'type': 'Split', 'pattern': {'Regex': ", file);
    json_print_string(file, pattern, strlen(pattern));
    word_file_print_(
        "}, 'behavior': 'Isolated', 'invert': false},\n'post_processor': {'type': 'TemplateProcessing', "
        "'single': [{'Sequence': {'id': 'A', 'type_id': 0}}], 'pair': [{'Sequence': {'id': 'A', "
        "'type_id': 0}}, {'Sequence': {'id': 'B', 'type_id': 1}}], 'special_tokens': {}},\n"
        "'decoder': {'type': 'Fuse'},\n'model': {'type': 'WordLevel', 'vocab': {",
        file);
    for (int id = 0; id < count; id++) {
        json_print_string(file, words[id].text, (size_t)words[id].length);
        fprintf(file, ": %d, ", id);
    }
    fprintf(file, "\"" BPE_EOT_TEXT "\": %d}, \"unk_token\": \"<unk>\"}\n}\n", count);
    free(at_start);
    free(pattern);
}

void word_list_write_hf(const TokenText* words, int count, const ModelCard* card, const char* directory,
                        int max_T) {
    FileWriter writer;
    char path[PATH_MAX];
    file_join(path, directory, "tokenizer.json");
    file_open(&writer, path);
    word_file_put_(words, count, writer.file);
    file_commit(&writer);
    bpe_write_hf_config(directory, "PreTrainedTokenizerFast", card, NULL, max_T);
}

// ---- reading ----

// File being read.
typedef struct {
    JsonReader json;
    WordList* list;
    int is_words, has_end; // its model is a WordLevel; <|endoftext|> has been read
} WordFile_;

// Reads one "word": id, after its key. Ids ascend, end-of-text is last.
static int word_file_word_(WordFile_* f, const char* text, size_t length) {
    size_t id;
    WordList* list = f->list;
    if (!json_natural(&f->json, &id)) {
        return 0;
    }
    if (id != (size_t)list->count || f->has_end || length == 0 || memchr(text, '\0', length)) {
        return error_set(f->json.error, f->json.path,
                         "token %d has the id %zu, wanted words of ascending ids and " BPE_EOT_TEXT " last",
                         list->count, id);
    }
    if (length == strlen(BPE_EOT_TEXT) && memcmp(text, BPE_EOT_TEXT, length) == 0) {
        f->has_end = 1;
        return 1;
    }
    list->words =
        (TokenText*)check_grow(list->words, (size_t)list->count, sizeof(*list->words), "vocabulary");
    const TokenText word = {text, (int)length};
    list->words[list->count++] = word;
    return 1;
}

static int word_file_vocab_(WordFile_* f) {
    const char* text;
    size_t length;
    JsonWalk walk = json_walk(&f->json, '{');
    while (json_text_step(&walk, &text, &length)) {
        walk.ok = word_file_word_(f, text, length);
    }
    return walk.ok;
}

// Reads the model. Its type comes before its vocabulary; skips vocabularies of other types.
static int word_file_model_(WordFile_* f) {
    const char *key, *type;
    JsonWalk walk = json_walk(&f->json, '{');
    while (json_step(&walk, &key)) {
        if (strcmp(key, "type") == 0) {
            walk.ok = json_name(&f->json, &type);
            f->is_words = walk.ok && strcmp(type, "WordLevel") == 0;
        } else {
            walk.ok = f->is_words && strcmp(key, "vocab") == 0 ? word_file_vocab_(f) : json_skip(&f->json);
        }
    }
    return walk.ok;
}

// Reads the words of the file, wherever they are.
static int word_file_words_(WordFile_* f) {
    const char* key;
    size_t length;
    JsonWalk walk = json_walk(&f->json, '{');
    while (json_text_step(&walk, &key, &length)) {
        walk.ok = strcmp(key, "model") == 0 ? word_file_model_(f) : json_skip(&f->json);
    }
    return walk.ok && json_end(&f->json) &&
           (f->has_end || error_set(f->json.error, f->json.path, "no token " BPE_EOT_TEXT));
}

// True if two texts are the same JSON, with keys in the same order; `wanted` is ours.
static int word_file_same_(JsonReader* found, JsonReader* wanted) {
    static const char what[] =
        "another character: only a tokenizer.json that this program wrote for these words";
    for (int c; (c = json_peek(wanted)) >= 0;) {
        const char *text, *other;
        size_t length, other_length;
        if (json_peek(found) != c) {
            return json_unexpected(found, what);
        }
        if (c != '"') {
            found->at++;
            wanted->at++;
            continue;
        }
        const size_t begin = found->at;
        if (!json_text(found, &text, &length) || !json_text(wanted, &other, &other_length)) {
            return 0;
        }
        if (length != other_length || memcmp(text, other, length) != 0) {
            found->at = begin;
            return json_unexpected(found, what);
        }
    }
    return json_end(found);
}

// Checks that everything in the file besides its words is what we would write for them.
static void word_file_check_(const char* path, char* text, size_t bytes, const WordList* list) {
    char error[ERROR_BYTES];
    TextBuffer buffer;
    text_buffer_open(&buffer, path);
    word_file_put_(list->words, list->count, buffer.file);
    char* ours = text_buffer_close(&buffer);
    JsonReader found = json_reader(path, text, bytes, error);
    JsonReader wanted = json_reader(path, ours, buffer.bytes, error);
    CHECK(word_file_same_(&found, &wanted), "%s", error);
    free(ours);
}

int word_list_read(WordList* list, const char* path) {
    char error[ERROR_BYTES];
    size_t bytes;
    memset(list, 0, sizeof(*list));
    if (!byte_order_text(path, WORD_FILE_MAX_, &list->buffer, &bytes, error)) {
        return 0;
    }
    char* copy = (char*)check_alloc(bytes + 1, 1, path); // strings are decoded in place
    memcpy(copy, list->buffer, bytes);
    WordFile_ f = {json_reader(path, list->buffer, bytes, error), list, 0, 0};
    const int ok = word_file_words_(&f);
    if (f.is_words) {
        CHECK(ok, "%s", error);
        word_file_check_(path, copy, bytes, list);
    } else {
        word_list_close(list);
    }
    free(copy);
    return f.is_words;
}

#endif // WORD_FILES_IMPLEMENTATION

#endif
