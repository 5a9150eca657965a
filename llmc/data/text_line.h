/*
text_line.h -- a document that is a line of JSON: the string `field` of an object.

A line without that string may have "prompt" and "completion", two strings, or "messages", a list of
{"role": "system", "user" or "assistant", "content": a string}. With the field "messages", a list
under this name is also taken. The parts of such a document are its messages.
*/
#ifndef LLMC_TEXT_LINE_H
#define LLMC_TEXT_LINE_H

#include <stddef.h>

#include "llmc/base/json.h"
#include "llmc/tokenizer/chat_format.h"

#ifdef __cplusplus
extern "C" {
#endif

// Message, prompt or completion of a line, in its text.
typedef struct {
    ChatRole role;
    const char* text;
    size_t bytes;
} TextMessage;

typedef struct {
    const char* field;     // borrowed
    const char* text;      // in the line
    size_t bytes;          // with messages: of all, with a line feed between two
    TextMessage* messages; // (num_messages)
    size_t num_messages, messages_room;
} TextLine;

// Reads the object of a line, which is decoded in place, for the field. Returns 0 with the error.
int text_line_read(TextLine* line, JsonReader* reader);

void text_line_close(TextLine* line);

#ifdef __cplusplus
}
#endif

#ifdef TEXT_LINE_IMPLEMENTATION

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"

enum { TEXT_NAMES_BYTES_ = 160 };

// Appends a key to a list of keys for an error, as far as it fits. Keys may be any strings.
static void text_add_name_(char names[TEXT_NAMES_BYTES_], const char* key, size_t bytes) {
    size_t used = strlen(names);
    used += (size_t)snprintf(names + used, TEXT_NAMES_BYTES_ - used, "%s\"", used ? ", " : "");
    for (size_t i = 0; i < bytes && used + 2 < TEXT_NAMES_BYTES_; i++, used++) {
        names[used] = (unsigned char)key[i] < ' ' || key[i] == 0x7F ? '?' : key[i];
    }
    if (used + 2 <= TEXT_NAMES_BYTES_) {
        memcpy(names + used, "\"", 2);
    }
}

// Sets the document to the string of --field; it stays empty if that is null.
static int text_take_text_(TextLine* line, JsonReader* reader) {
    return json_peek(reader) == 'n' ? json_skip(reader) : json_text(reader, &line->text, &line->bytes);
}

// ---- a line with an answer ----

// A string of a line.
typedef struct {
    const char* text; // NULL: absent
    size_t bytes;
} TextString_;

// Parts of a line that may have an answer. Its errors count only if --field is missing.
typedef struct {
    TextString_ prompt, completion;
    int has_prompt, has_completion, has_messages;
    char bad[192]; // what is wrong with the messages; "": nothing
} TextAnswers_;

static int text_is_key_(const char* key, size_t bytes, const char* name) {
    return strlen(name) == bytes && memcmp(key, name, bytes) == 0;
}

// Notes what is wrong with the last message, unless an earlier one was wrong.
static void text_note_(const TextLine* line, TextAnswers_* answers, const char* wanted) {
    if (!answers->bad[0]) {
        snprintf(answers->bad, sizeof(answers->bad), "message %zu: %s", line->num_messages + 1, wanted);
    }
}

// Reads a string of a message; another value is noted and skipped.
static int text_message_string_(const TextLine* line, JsonReader* reader, TextAnswers_* answers,
                                TextString_* value, const char* wanted) {
    if (json_peek(reader) != '"' || value->text) {
        text_note_(line, answers, wanted);
        return json_skip(reader);
    }
    return json_text(reader, &value->text, &value->bytes);
}

// Adds a message, a prompt or a completion to the record.
static void text_add_message_(TextLine* line, ChatRole role, TextString_ text) {
    line->messages = (TextMessage*)check_reserve(line->messages, &line->messages_room, line->num_messages + 1,
                                                 sizeof(TextMessage), "messages");
    line->messages[line->num_messages++] = (TextMessage){role, text.text, text.bytes};
}

// Adds the message of an object that has been read, if it is one.
static void text_end_message_(TextLine* line, TextAnswers_* answers, TextString_ role, TextString_ content) {
    const int is_whole = role.text && content.text;
    const int known = is_whole ? chat_role(role.text, role.bytes) : -1;
    char wanted[160];
    if (!is_whole) {
        text_note_(line, answers, "wanted {\"role\": \"...\", \"content\": \"...\"}");
        return;
    }
    if (known < 0) {
        snprintf(wanted, sizeof(wanted), "role \"%.*s\", wanted \"system\", \"user\" or \"assistant\"",
                 role.bytes < 64 ? (int)role.bytes : 64, role.text);
        text_note_(line, answers, wanted);
    } else if (known == CHAT_ASSISTANT && content.bytes == 0) {
        text_note_(line, answers, "the assistant's content is empty, wanted an answer");
    }
    text_add_message_(line, known < 0 ? CHAT_USER : (ChatRole)known, content);
}

// Reads an element of "messages".
static int text_message_(TextLine* line, JsonReader* reader, TextAnswers_* answers) {
    TextString_ role = {NULL, 0}, content = role;
    const char* key;
    size_t n;
    if (json_peek(reader) != '{') {
        text_note_(line, answers, "wanted {\"role\": \"...\", \"content\": \"...\"}");
        return json_skip(reader);
    }
    JsonWalk walk = json_walk(reader, '{');
    while (json_text_step(&walk, &key, &n)) {
        walk.ok = text_is_key_(key, n, "role")
                      ? text_message_string_(line, reader, answers, &role, "\"role\": wanted one string")
                  : text_is_key_(key, n, "content") ? text_message_string_(line, reader, answers, &content,
                                                                           "\"content\": wanted one string")
                                                    : json_skip(reader);
    }
    if (walk.ok) {
        text_end_message_(line, answers, role, content);
    }
    return walk.ok;
}

static int text_messages_(TextLine* line, JsonReader* reader, TextAnswers_* answers) {
    JsonWalk walk = json_walk(reader, '[');
    if (answers->has_messages++) {
        text_note_(line, answers, "the field \"messages\" appears twice");
    }
    while (json_step(&walk, NULL)) {
        walk.ok = text_message_(line, reader, answers);
    }
    return walk.ok;
}

// Reads the value of a key other than --field, which may be a part of an answered document.
static int text_other_(TextLine* line, JsonReader* reader, TextAnswers_* answers, const char* key, size_t n) {
    const int is_prompt = text_is_key_(key, n, "prompt");
    if (text_is_key_(key, n, "messages") && json_peek(reader) != 'n') { // null: absent
        if (json_peek(reader) == '[') {
            return text_messages_(line, reader, answers);
        }
        answers->has_messages++;
        snprintf(answers->bad, sizeof(answers->bad), "\"messages\": wanted a list of messages");
    }
    if (!is_prompt && !text_is_key_(key, n, "completion")) {
        return json_skip(reader);
    }
    *(is_prompt ? &answers->has_prompt : &answers->has_completion) += 1;
    TextString_* kept = is_prompt ? &answers->prompt : &answers->completion;
    return json_peek(reader) == '"' ? json_text(reader, &kept->text, &kept->bytes) : json_skip(reader);
}

// Adds the prompt and its completion to the record.
static int text_take_prompt_(TextLine* line, JsonReader* reader, const TextAnswers_* answers) {
    if (answers->has_prompt != 1 || answers->has_completion != 1 || !answers->prompt.text ||
        !answers->completion.text) {
        return error_set(reader->error, reader->path,
                         "no prompt with its completion, wanted one string each: {\"prompt\": \"...\", "
                         "\"completion\": \"...\"}");
    }
    if (answers->completion.bytes == 0) {
        return error_set(reader->error, reader->path, "the completion is empty, wanted an answer");
    }
    text_add_message_(line, CHAT_PROMPT, answers->prompt);
    text_add_message_(line, CHAT_COMPLETION, answers->completion);
    return 1;
}

// Makes the document of the parts of a line, which has no --field.
static int text_answered_(TextLine* line, JsonReader* reader, const TextAnswers_* answers) {
    int has_answer = 0;
    if (answers->bad[0]) {
        return error_set(reader->error, reader->path, "%s", answers->bad);
    }
    if (!answers->has_messages && !text_take_prompt_(line, reader, answers)) {
        return 0;
    }
    for (size_t i = 0; i < line->num_messages; i++) {
        const TextMessage* message = &line->messages[i];
        has_answer |= message->role == CHAT_ASSISTANT || message->role == CHAT_COMPLETION;
        line->bytes += message->bytes + (i > 0);
    }
    return has_answer ||
           error_set(reader->error, reader->path, "no message of the assistant, wanted an answer to learn");
}

int text_line_read(TextLine* line, JsonReader* reader) {
    const char *field = line->field, *key;
    char names[TEXT_NAMES_BYTES_] = "";
    TextAnswers_ answers;
    size_t n;
    int found = 0;
    JsonWalk walk = json_walk(reader, '{');
    memset(&answers, 0, sizeof(answers));
    line->text = "";
    line->bytes = 0;
    while (json_text_step(&walk, &key, &n)) {
        const int is_list = text_is_key_(key, n, "messages") && json_peek(reader) == '[';
        if (!text_is_key_(key, n, field) || is_list) {
            text_add_name_(names, key, n);
            walk.ok = text_other_(line, reader, &answers, key, n);
        } else if (found++) {
            walk.ok = error_set(reader->error, reader->path, "the field \"%s\" appears twice", field);
        } else {
            walk.ok = text_take_text_(line, reader);
        }
    }
    const int is_answered = !found && (answers.has_messages || answers.has_prompt || answers.has_completion);
    if (walk.ok && !found && !is_answered) {
        return error_set(reader->error, reader->path, "no field \"%s\", found %s", field,
                         *names ? names : "none at all");
    }
    line->num_messages = is_answered ? line->num_messages : 0;
    return walk.ok && json_end(reader) && (!is_answered || text_answered_(line, reader, &answers));
}

void text_line_close(TextLine* line) {
    free(line->messages);
    memset(line, 0, sizeof(*line));
}

#endif // TEXT_LINE_IMPLEMENTATION

#endif
