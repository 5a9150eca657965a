/*
model_card.h -- what a model says of itself in its files: the tokens around its texts, and how it
chats.

    read      generation_config.json, config.json, chat_template.jinja, tokenizer_config.json: the
              first that has a fact decides, as in transformers; then tokenizer.json (bpe_files.h)
    changed   by a run that learns chats (model_card_learn_chat)
    written   config.json (hf_config.h), generation_config.json (here), tokenizer_config.json and
              special_tokens_map.json (bpe_files.h), and GGUF (gguf.h), each by one function

A file that cannot be read is transformers' business: it says nothing here.
*/
#ifndef LLMC_MODEL_CARD_H
#define LLMC_MODEL_CARD_H

#include <stddef.h>
#include <string.h>

#include "llmc/tokenizer/chat_format.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CARD_MAX_ENDS = 8 }; // tokens that end a text, as files list them

typedef struct {
    int start;                   // token that stands before each document
    int ends[CARD_MAX_ENDS + 2]; // tokens that end a text, the usual one first: of files, the
    int num_ends;                // start token, and the end of an answer
    int bos, eos;                // tokens that a template calls bos_token and eos_token; -1: none
    int pad;                     // padding token for transformers; -1: none
    int turn_end;                // token that ends an answer of a chat; -1: unknown
    const char* chat_template;   // in Jinja; NULL: none
    ChatKnown chat_known;        // how far its format is known
    ChatFormat chat;             // its format, or the one of --chat; without layout: neither
    int is_chosen;               // the format is not the template's
    const char* generation;      // text of generation_config.json, with other defaults; NULL: none
} ModelCard;

// Returns the card of a vocabulary where one token starts and ends texts.
static inline ModelCard model_card_of(int eot) {
    ModelCard card;
    memset((void*)&card, 0, sizeof(card));
    card.start = card.ends[0] = card.bos = card.eos = eot;
    card.num_ends = 1;
    card.pad = card.turn_end = -1;
    return card;
}

// True if a text ends with this token.
static inline int model_card_is_end(const ModelCard* card, int id) {
    int is_end = 0;
    for (int i = 0; i < card->num_ends; i++) {
        is_end |= id == card->ends[i];
    }
    return is_end;
}

// Adds a token to the ends, unless it is one or there are too many.
void model_card_add_end(ModelCard* card, int id);

// Notes that answers end with this token: it becomes the usual end of a text.
void model_card_learn_chat(ModelCard* card, int turn_end);

// ---- reading ----

// Facts of a directory, as its files have them: ids, which may be beyond the vocabulary, and names.
typedef struct {
    size_t ends[CARD_MAX_ENDS], start, pad; // SIZE_MAX: not said
    int num_ends;
    int has_names;              // tokenizer_config.json exists
    char *bos, *eos, *pad_name; // NULL: not said
    char *chat_template, *generation;
} CardFiles;

// Returns the name of a file that only the card is read from.
enum { CARD_FILES = 3 };
const char* card_file_name(int i);

// Reads the files of a directory.
void card_files_read(CardFiles* files, const char* directory);

void card_files_close(CardFiles* files);

// ---- writing ----

// Returns the text of a JSON object with another value of a member, and the rest as it was; a copy
// if it is no object. The caller frees it.
char* card_set_member(const char* text, const char* key, const char* value);

// Sets `text` (of CARD_ENDS_BYTES) to the ends in JSON: an id, or a list.
enum { CARD_ENDS_BYTES = 16 * (CARD_MAX_ENDS + 2) };
const char* card_print_ends(const ModelCard* card, char text[CARD_ENDS_BYTES]);

// Writes generation_config.json: the text that the card has, unless the usual end is none of its
// ends.
void card_write_generation(const ModelCard* card, const char* directory);

// Writes chat_template.jinja, if the card has a template.
void card_write_template(const ModelCard* card, const char* directory);

#ifdef __cplusplus
}
#endif

#ifdef MODEL_CARD_IMPLEMENTATION

#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/byte_order_mark.h"
#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/text_buffer.h"

#define CARD_MAX_FILE_ ((size_t)16 << 20) // largest file

void model_card_add_end(ModelCard* card, int id) {
    const int has_room = card->num_ends < (int)(sizeof(card->ends) / sizeof(card->ends[0]));
    if (!model_card_is_end(card, id) && has_room) {
        card->ends[card->num_ends++] = id;
    }
}

void model_card_learn_chat(ModelCard* card, int turn_end) {
    const int uses_eos = card->chat_template && strstr(card->chat_template, "eos_token");
    card->turn_end = turn_end;
    card->eos = uses_eos ? card->eos : turn_end;
    if (!model_card_is_end(card, turn_end)) {
        card->num_ends -= card->num_ends == (int)(sizeof(card->ends) / sizeof(card->ends[0]));
        memmove(card->ends + 1, card->ends, (size_t)card->num_ends * sizeof(card->ends[0]));
        card->ends[0] = turn_end;
        card->num_ends++;
    }
}

// ---- reading ----

const char* card_file_name(int i) {
    static const char* const names[CARD_FILES] = {"generation_config.json", "config.json",
                                                  "chat_template.jinja"};
    return names[i];
}

// Reads an id. Returns 1 with SIZE_MAX for any other value.
static int card_id_(JsonReader* json, size_t* id) {
    const int c = json_peek(json);
    *id = SIZE_MAX;
    return '0' <= c && c <= '9' ? json_natural(json, id) : json_skip(json);
}

// Reads an id that another file has not given.
static int card_first_id_(JsonReader* json, size_t* id) {
    size_t found;
    const int ok = card_id_(json, &found);
    *id = *id == SIZE_MAX ? found : *id;
    return ok;
}

// Reads an id or a list of them.
static int card_ends_(JsonReader* json, CardFiles* files) {
    const int is_new = files->num_ends == 0, is_list = json_peek(json) == '[';
    int more = is_list ? json_take(json, '[') && json_element(json, JSON_FIRST) : 1;
    while (more > 0) {
        size_t id;
        if (!card_id_(json, &id)) {
            return 0;
        }
        if (is_new && id != SIZE_MAX && files->num_ends < CARD_MAX_ENDS) {
            files->ends[files->num_ends++] = id;
        }
        more = is_list ? json_element(json, JSON_NEXT) : 0;
    }
    return more == 0;
}

// Copies a string that another file has not given.
static int card_string_(JsonReader* json, char** string) {
    const char* text;
    size_t length;
    if (*string || json_peek(json) != '"') {
        return json_skip(json);
    }
    if (!json_text(json, &text, &length)) {
        return 0;
    }
    *string = (char*)check_alloc(length + 1, 1, json->path);
    memcpy(*string, text, length);
    return 1;
}

// Reads the string of a member of an object.
static int card_member_(JsonReader* json, const char* wanted, char** string) {
    const char* key;
    JsonWalk walk = json_walk(json, '{');
    while (json_step(&walk, &key)) {
        walk.ok = strcmp(key, wanted) == 0 ? card_string_(json, string) : json_skip(json);
    }
    return walk.ok;
}

// Reads a name, or an object with it as "content".
static int card_name_(JsonReader* json, char** name) {
    return json_peek(json) == '{' ? card_member_(json, "content", name) : card_string_(json, name);
}

// Reads a template, or the first of a list of them with names, which is the default.
static int card_template_(JsonReader* json, char** text) {
    if (json_peek(json) != '[') {
        return card_string_(json, text);
    }
    JsonWalk walk = json_walk(json, '[');
    while (json_step(&walk, NULL)) {
        walk.ok = json_peek(json) == '{' ? card_member_(json, "template", text) : json_skip(json);
    }
    return walk.ok;
}

// Returns the text of a file, terminated; NULL if it is missing or cannot be read.
static char* card_read_text_(const char* directory, const char* name) {
    char path[PATH_MAX], error[ERROR_BYTES], *text = NULL;
    size_t bytes;
    file_join(path, directory, name);
    return file_exists(path) && byte_order_text(path, CARD_MAX_FILE_, &text, &bytes, error) ? text : NULL;
}

// Reads the facts of one file that no file before has given. Only tokenizer_config.json has names.
static void card_read_file_(CardFiles* files, const char* text) {
    char error[ERROR_BYTES];
    const char* key;
    size_t length;
    if (!text) {
        return;
    }
    char* copy = strdup(text); // strings are decoded in place
    CHECK(copy, "the files of a model: no memory");
    JsonReader json = json_reader("the files of a model", copy, strlen(copy), error);
    JsonWalk walk = json_walk(&json, '{');
    while (json_text_step(&walk, &key, &length)) {
        walk.ok = strcmp(key, "eos_token_id") == 0    ? card_ends_(&json, files)
                  : strcmp(key, "bos_token_id") == 0  ? card_first_id_(&json, &files->start)
                  : strcmp(key, "pad_token_id") == 0  ? card_first_id_(&json, &files->pad)
                  : strcmp(key, "bos_token") == 0     ? card_name_(&json, &files->bos)
                  : strcmp(key, "eos_token") == 0     ? card_name_(&json, &files->eos)
                  : strcmp(key, "pad_token") == 0     ? card_name_(&json, &files->pad_name)
                  : strcmp(key, "chat_template") == 0 ? card_template_(&json, &files->chat_template)
                                                      : json_skip(&json);
    }
    free(copy);
}

void card_files_read(CardFiles* files, const char* directory) {
    memset(files, 0, sizeof(*files));
    files->start = files->pad = SIZE_MAX;
    files->generation = card_read_text_(directory, "generation_config.json");
    files->chat_template = card_read_text_(directory, "chat_template.jinja");
    char *config = card_read_text_(directory, "config.json"),
         *names = card_read_text_(directory, "tokenizer_config.json");
    card_read_file_(files, files->generation);
    card_read_file_(files, config);
    card_read_file_(files, names);
    files->has_names = names != NULL;
    free(config);
    free(names);
}

void card_files_close(CardFiles* files) {
    free(files->bos);
    free(files->eos);
    free(files->pad_name);
    free(files->chat_template);
    free(files->generation);
    memset(files, 0, sizeof(*files));
}

// ---- writing ----

char* card_set_member(const char* text, const char* key, const char* value) {
    char error[ERROR_BYTES], *copy = strdup(text);
    const char* name;
    TextBuffer changed;
    CHECK(copy, "%s: no memory", key);
    JsonReader json = json_reader(key, copy, strlen(copy), error);
    size_t begin = 0, end = 0, first = 0; // the value; after the opening brace
    int more = json_take(&json, '{') ? 1 : -1, count = 0;
    size_t length;
    first = json.at;
    for (; more > 0 && (more = json_text_member(&json, count ? JSON_NEXT : JSON_FIRST, &name, &length)) > 0;
         count++) {
        const int is_it = strcmp(name, key) == 0;
        json_peek(&json);
        begin = is_it ? json.at : begin;
        more = json_skip(&json) ? 1 : -1;
        end = is_it ? json.at : end;
    }
    free(copy);
    text_buffer_open(&changed, key);
    if (more < 0) {
        fputs(text, changed.file);
    } else if (end > 0) {
        fprintf(changed.file, "%.*s%s%s", (int)begin, text, value, text + end);
    } else {
        fprintf(changed.file, "%.*s\n  \"%s\": %s%s%s", (int)first, text, key, value, count ? "," : "\n",
                text + first + (count ? 0 : strspn(text + first, " \t\r\n")));
    }
    return text_buffer_close(&changed);
}

const char* card_print_ends(const ModelCard* card, char text[CARD_ENDS_BYTES]) {
    int used = snprintf(text, CARD_ENDS_BYTES, card->num_ends > 1 ? "[%d" : "%d", card->ends[0]);
    for (int i = 1; i < card->num_ends; i++) {
        used += snprintf(text + used, CARD_ENDS_BYTES - (size_t)used, ", %d%s", card->ends[i],
                         i + 1 == card->num_ends ? "]" : "");
    }
    return text;
}

// True if a generation_config.json names the usual end of a text.
static int card_knows_end_(const ModelCard* card, const char* generation) {
    CardFiles said;
    int is_known = 0;
    memset(&said, 0, sizeof(said));
    card_read_file_(&said, generation);
    for (int i = 0; i < said.num_ends; i++) {
        is_known |= said.ends[i] == (size_t)card->ends[0];
    }
    card_files_close(&said);
    return is_known;
}

void card_write_generation(const ModelCard* card, const char* directory) {
    char path[PATH_MAX], ends[CARD_ENDS_BYTES];
    FileWriter file;
    file_join(path, directory, "generation_config.json");
    file_open(&file, path);
    if (card->generation) {
        char* text = card_knows_end_(card, card->generation)
                         ? strdup(card->generation)
                         : card_set_member(card->generation, "eos_token_id", card_print_ends(card, ends));
        CHECK(text, "%s: no memory", path);
        fputs(text, file.file);
        free(text);
    } else {
        fprintf(file.file, "{\n  \"bos_token_id\": %d,\n  \"eos_token_id\": %s\n}\n", card->start,
                card_print_ends(card, ends));
    }
    file_commit(&file);
}

void card_write_template(const ModelCard* card, const char* directory) {
    char path[PATH_MAX];
    FileWriter file;
    if (card->chat_template) {
        file_join(path, directory, "chat_template.jinja");
        file_open(&file, path);
        file_put(&file, card->chat_template, strlen(card->chat_template));
        file_commit(&file);
    }
}

#endif // MODEL_CARD_IMPLEMENTATION

#endif
