/*
dialog.h -- the messages of a chat so far, as the prompt of the next answer.

    Dialog dialog;
    dialog_open(&dialog, encoder, "Answer briefly.");
    dialog_add(&dialog, CHAT_USER, line, bytes);
    count = dialog_prompt(&dialog, ids, room, &forgotten);
    ... an answer is generated ...
    dialog_add(&dialog, CHAT_ASSISTANT, answer, bytes);

The tokens are the ones that a run learns (chat_marks.h): the messages between their marks, and then
the header of an answer. When they do not fit into the room, the oldest turns are forgotten, each a
message of the user with its answer; the system's message stays.
*/
#ifndef LLMC_DIALOG_H
#define LLMC_DIALOG_H

#include <stddef.h>

#include "llmc/tokenizer/bpe_encode.h"
#include "llmc/tokenizer/chat_format.h"
#include "llmc/tokenizer/chat_marks.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    ChatMarks marks;
    BpeEncoder* encoder;   // borrowed
    ChatMessage* messages; // with texts of their own
    size_t count;
    size_t fixed; // messages that are never forgotten
    int* ids;     // the prompt, after the start token
    size_t room;
} Dialog;

// Starts a chat, with a system's message unless it is "".
void dialog_open(Dialog* dialog, BpeEncoder* encoder, const char* system);

void dialog_close(Dialog* dialog);

// Drops all messages except the system's.
void dialog_reset(Dialog* dialog);

void dialog_add(Dialog* dialog, ChatRole role, const char* text, size_t bytes);

// Takes the last message back.
void dialog_take_back(Dialog* dialog);

// Sets ids (max) to the messages and the header of an answer, without the start token. Forgets the
// oldest turns if there are too many tokens, and sets *forgotten to their number. Returns the
// number of tokens; 0 if the last message alone has too many.
int dialog_prompt(Dialog* dialog, int* ids, int max, int* forgotten);

#ifdef __cplusplus
}
#endif

#ifdef DIALOG_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"

void dialog_open(Dialog* dialog, BpeEncoder* encoder, const char* system) {
    memset(dialog, 0, sizeof(*dialog));
    dialog->encoder = encoder;
    chat_marks_open(&dialog->marks, encoder->bpe);
    if (system[0]) {
        dialog_add(dialog, CHAT_SYSTEM, system, strlen(system));
    }
    dialog->fixed = dialog->count;
}

// Removes the messages from `begin` to `end`.
static void dialog_remove_(Dialog* dialog, size_t begin, size_t end) {
    for (size_t i = begin; i < end; i++) {
        free((void*)dialog->messages[i].text);
    }
    if (begin < end) {
        memmove(dialog->messages + begin, dialog->messages + end,
                (dialog->count - end) * sizeof(ChatMessage));
    }
    dialog->count -= end - begin;
}

void dialog_close(Dialog* dialog) {
    dialog_remove_(dialog, 0, dialog->count);
    free(dialog->messages);
    free(dialog->ids);
    memset(dialog, 0, sizeof(*dialog));
}

void dialog_reset(Dialog* dialog) { dialog_remove_(dialog, dialog->fixed, dialog->count); }

void dialog_add(Dialog* dialog, ChatRole role, const char* text, size_t bytes) {
    if (role == CHAT_ASSISTANT) { // as it was generated
        chat_take_answer(&dialog->marks, &text, &bytes);
    }
    char* copy = (char*)check_alloc(bytes + 1, 1, "message");
    memcpy(copy, text, bytes);
    dialog->messages =
        (ChatMessage*)check_grow(dialog->messages, dialog->count, sizeof(ChatMessage), "messages");
    dialog->messages[dialog->count++] = (ChatMessage){role, copy, bytes};
}

void dialog_take_back(Dialog* dialog) { dialog_remove_(dialog, dialog->count - 1, dialog->count); }

// Encodes the prompt. Returns the number of its tokens.
static size_t dialog_encode_(Dialog* dialog) {
    const Bpe* bpe = dialog->encoder->bpe;
    size_t bytes = 0;
    for (size_t i = 0; i < dialog->count; i++) {
        bytes += dialog->messages[i].bytes;
    }
    const size_t room = 1 + chat_most_ids(&dialog->marks, bpe, bytes, dialog->count);
    dialog->ids = (int*)check_reserve(dialog->ids, &dialog->room, room, sizeof(int), "a chat");
    dialog->ids[0] = bpe->eot;
    return chat_encode(&dialog->marks, dialog->encoder, dialog->messages, dialog->count, CHAT_FOR_ANSWER,
                       dialog->ids) -
           1;
}

// Drops the oldest turn, but never the last message. Returns 0 if no other is left.
static int dialog_forget_(Dialog* dialog) {
    size_t end = dialog->fixed + 1;
    while (end < dialog->count && dialog->messages[end].role != CHAT_USER) {
        end++;
    }
    if (end >= dialog->count) {
        return 0;
    }
    dialog_remove_(dialog, dialog->fixed, end);
    return 1;
}

int dialog_prompt(Dialog* dialog, int* ids, int max, int* forgotten) {
    size_t count;
    for (*forgotten = 0; (count = dialog_encode_(dialog)) > (size_t)max; ++*forgotten) {
        if (!dialog_forget_(dialog)) {
            return 0;
        }
    }
    for (size_t i = 0; i < count; i++) {
        ids[i] = dialog->ids[1 + i] & ~TOKEN_NO_TARGET;
    }
    return (int)count;
}

#endif // DIALOG_IMPLEMENTATION

#endif
