/*
chat_marks.h -- the tokens of a chat: its messages between marks, and which tokens are learned.

    format    a message
    ChatML    <|im_start|> role \n content <|im_end|> \n
    Llama 3   <|start_header_id|> role <|end_header_id|> \n\n content <|eot_id|>

The first format whose marks are special tokens of the vocabulary is used. With none of them, it is
ChatML whose marks are plain text. The header, the content, the end and the text after it are
encoded one by one, so a header has the same tokens whatever follows, and no content becomes a mark.

A prompt and its completion have no marks: their tokens follow each other.

The assistant's messages are learned, with the marks that end them, and completions, with the
end-of-text after them. A token has TOKEN_NO_TARGET unless the token after it is to be learned.
*/
#ifndef LLMC_CHAT_MARKS_H
#define LLMC_CHAT_MARKS_H

#include <stddef.h>

#include "llmc/tokenizer/bpe_encode.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { CHAT_SYSTEM, CHAT_USER, CHAT_ASSISTANT, CHAT_PROMPT, CHAT_COMPLETION } ChatRole;

enum {
    CHAT_ROLES = 3,            // those of messages come first
    CHAT_MARK_IDS = 128,       // most tokens of a mark
    TOKEN_NO_TARGET = 1 << 30, // added to an id: the token after this one is not to be learned
};

typedef struct {
    int ids[CHAT_MARK_IDS], count;
} ChatMark;

typedef struct {
    const char* format; // "ChatML" or "Llama 3"
    int is_text;        // the marks are plain text, not special tokens
    const char* ending; // text of the mark that ends a message
    ChatMark header[CHAT_ROLES], end, after;
} ChatMarks;

// Finds the marks of a vocabulary.
void chat_marks_open(ChatMarks* marks, BpeEncoder* encoder);

// Returns the role of a message; -1: none has this name.
int chat_role(const char* name, size_t bytes);

// Returns an upper bound of the ids that chat_encode adds for a text of this length.
size_t chat_most_ids(const Bpe* bpe, size_t bytes);

// Adds a message, a prompt or a completion to a document of `count` ids, which starts with
// end-of-text. Returns the new count.
size_t chat_encode(const ChatMarks* marks, BpeEncoder* encoder, ChatRole role, const char* text, size_t bytes,
                   int* ids, size_t count);

// Returns the template of the format for transformers, in Jinja.
const char* chat_template(const ChatMarks* marks);

// True if the directory of a model has a template, and its chats can be encoded: the vocabulary has
// the marks, or the template is that of plain text.
int chat_is_in(const ChatMarks* marks, const char* directory);

#ifdef __cplusplus
}
#endif

#ifdef CHAT_MARKS_IMPLEMENTATION

#include <assert.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"

typedef struct {
    const char* name;
    const char* start;
    const char* middle; // after the role; NULL: no mark
    const char* gap;    // plain text before the content
    const char* end;
    const char* after; // plain text
    const char* jinja;
} ChatFormat_;

// clang-format off
static const ChatFormat_ chat_formats_[] = {
    {"ChatML", "<|im_start|>", NULL, "\n", "<|im_end|>", "\n",
     "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
     "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"},
    {"Llama 3", "<|start_header_id|>", "<|end_header_id|>", "\n\n", "<|eot_id|>", "",
     "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + "
     "message['content'] + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
     "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"},
};
// clang-format on
enum { CHAT_FORMATS_ = sizeof(chat_formats_) / sizeof(chat_formats_[0]) };

static const char* const chat_roles_[CHAT_ROLES] = {"system", "user", "assistant"};

// Returns the id of a special token; -1: none is called so.
static int chat_special_(const Bpe* bpe, const char* name) {
    const int id = bpe_find_added(bpe, name);
    return id >= 0 && bpe_is_name(bpe, id) ? id : -1;
}

static int chat_has_marks_(const Bpe* bpe, const ChatFormat_* format) {
    return chat_special_(bpe, format->start) >= 0 && chat_special_(bpe, format->end) >= 0 &&
           (!format->middle || chat_special_(bpe, format->middle) >= 0);
}

// Appends plain text to a mark.
static void chat_add_text_(ChatMark* mark, BpeEncoder* encoder, const char* text) {
    const size_t bytes = strlen(text);
    assert((size_t)mark->count + bpe_most_ids(encoder->bpe, bytes) <= CHAT_MARK_IDS);
    mark->count += (int)bpe_encode(encoder, text, bytes, mark->ids + mark->count);
}

// Appends a special token, or its name as plain text.
static void chat_add_mark_(ChatMark* mark, const ChatMarks* marks, BpeEncoder* encoder, const char* name) {
    if (marks->is_text) {
        chat_add_text_(mark, encoder, name);
    } else {
        mark->ids[mark->count++] = chat_special_(encoder->bpe, name);
    }
}

// Sets the header of a role. Text that no mark divides is encoded as one.
static void chat_set_header_(ChatMarks* marks, BpeEncoder* encoder, const ChatFormat_* format, int role) {
    ChatMark* header = &marks->header[role];
    char text[64];
    snprintf(text, sizeof(text), "%s%s%s", marks->is_text ? format->start : "", chat_roles_[role],
             format->middle ? "" : format->gap);
    if (!marks->is_text) {
        chat_add_mark_(header, marks, encoder, format->start);
    }
    chat_add_text_(header, encoder, text);
    if (format->middle) {
        chat_add_mark_(header, marks, encoder, format->middle);
        chat_add_text_(header, encoder, format->gap);
    }
}

void chat_marks_open(ChatMarks* marks, BpeEncoder* encoder) {
    int f = 0;
    while (f < CHAT_FORMATS_ && !chat_has_marks_(encoder->bpe, &chat_formats_[f])) {
        f++;
    }
    const ChatFormat_* format = &chat_formats_[f < CHAT_FORMATS_ ? f : 0];
    memset(marks, 0, sizeof(*marks));
    marks->format = format->name;
    marks->is_text = f == CHAT_FORMATS_;
    marks->ending = format->end;
    for (int role = 0; role < CHAT_ROLES; role++) {
        chat_set_header_(marks, encoder, format, role);
    }
    chat_add_mark_(&marks->end, marks, encoder, format->end);
    chat_add_text_(&marks->after, encoder, format->after);
}

int chat_role(const char* name, size_t bytes) {
    for (int role = 0; role < CHAT_ROLES; role++) {
        if (strlen(chat_roles_[role]) == bytes && memcmp(chat_roles_[role], name, bytes) == 0) {
            return role;
        }
    }
    return -1;
}

size_t chat_most_ids(const Bpe* bpe, size_t bytes) { return bpe_most_ids(bpe, bytes) + 3 * CHAT_MARK_IDS; }

// Marks `more` ids after the first `count`: as learned, or not. Returns the new count.
static size_t chat_mark_(int* ids, size_t count, size_t more, int is_learned) {
    for (size_t i = count; i < count + more; i++) {
        ids[i] |= TOKEN_NO_TARGET;
        ids[i - 1] &= is_learned ? ~TOKEN_NO_TARGET : -1;
    }
    return count + more;
}

static size_t chat_put_(const ChatMark* mark, int* ids, size_t count, int is_learned) {
    memcpy(ids + count, mark->ids, (size_t)mark->count * sizeof(int));
    return chat_mark_(ids, count, (size_t)mark->count, is_learned);
}

size_t chat_encode(const ChatMarks* marks, BpeEncoder* encoder, ChatRole role, const char* text, size_t bytes,
                   int* ids, size_t count) {
    const int is_message = role < (int)CHAT_ROLES,
              is_learned = role == CHAT_ASSISTANT || role == CHAT_COMPLETION;
    assert(count > 0);
    ids[count - 1] |= count == 1 ? TOKEN_NO_TARGET : 0;
    if (is_message) {
        count = chat_put_(&marks->header[role], ids, count, 0);
    }
    count = chat_mark_(ids, count, bpe_encode(encoder, text, bytes, ids + count), is_learned);
    if (is_message) {
        count = chat_put_(&marks->end, ids, count, is_learned);
        count = chat_put_(&marks->after, ids, count, 0);
    } else if (is_learned) {
        ids[count - 1] &= ~TOKEN_NO_TARGET; // end-of-text follows
    }
    return count;
}

const char* chat_template(const ChatMarks* marks) {
    for (int f = 0; f < CHAT_FORMATS_; f++) {
        if (strcmp(chat_formats_[f].name, marks->format) == 0) {
            return chat_formats_[f].jinja;
        }
    }
    return NULL;
}

// ---- the files of a model ----

enum { CHAT_MAX_TEMPLATE_ = 1 << 24 }; // bytes of a file with a template

// True if a file of the directory exists and contains the text.
static int chat_file_has_(const char* directory, const char* name, const char* wanted) {
    char path[PATH_MAX], error[ERROR_BYTES], *text;
    size_t bytes;
    file_join(path, directory, name);
    if (!file_exists(path)) {
        return 0;
    }
    CHECK(file_try_read(path, CHAT_MAX_TEMPLATE_, &text, &bytes, error), "%s", error);
    const int found = strstr(text, wanted) != NULL;
    free(text);
    return found;
}

int chat_is_in(const ChatMarks* marks, const char* directory) {
    const char* wanted = marks->is_text ? chat_template(marks) : "";
    return chat_file_has_(directory, "chat_template.jinja", wanted) ||
           (!marks->is_text && chat_file_has_(directory, "tokenizer_config.json", "\"chat_template\""));
}

#endif // CHAT_MARKS_IMPLEMENTATION

#endif
