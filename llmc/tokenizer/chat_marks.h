/*
chat_marks.h -- the tokens of a chat: its messages between marks, and which tokens are learned.

The format (chat_format.h) is the one of the model's template. Without a template it is the first
format whose marks are tokens of the vocabulary; with none of them, ChatML whose marks are plain
text.

    ids = what apply_chat_template of transformers gives, after the start token of the document

But contents are data: the characters of a mark in a message are text. Text between two marks is
encoded as one, as transformers does, so a token may have the end of a header and the start of a
content; it is learned if any of its bytes is.

A prompt and its completion have no marks: their tokens follow each other.

The assistant's messages are learned, with the marks that end them, and completions, with the
end-of-text after them; so is the last answer of a format whose answers end where a turn opens. A
token has TOKEN_NO_TARGET unless the token after it is to be learned.
*/
#ifndef LLMC_CHAT_MARKS_H
#define LLMC_CHAT_MARKS_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/tokenizer/bpe_encode.h"
#include "llmc/tokenizer/chat_format.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { TOKEN_NO_TARGET = 1 << 30 }; // added to an id: the token after this one is not to be learned

typedef struct {
    const char* text;
    size_t bytes;
    int id;      // -1: plain text
    int is_word; // may also occur in a text
} ChatMark;

typedef struct {
    ChatFormat format; // borrows the template's texts
    ChatMark marks[CHAT_MARKS];
    int num_marks;
    int bos, eos;       // ids; -1: none
    int is_text;        // no mark is a token
    int turn_end;       // token that ends an answer; -1: it is plain text
    const char* ending; // that text
} ChatMarks;

// Finds the marks of a vocabulary.
void chat_marks_open(ChatMarks* marks, const Bpe* bpe);

// Returns a format as it is written for a vocabulary without a template: with the start token.
ChatFormat chat_format_written(ChatWord word);

// True if chats have a date.
int chat_has_date(const Bpe* bpe);

// Returns 0 with the reason in `error` if chats cannot be encoded for the vocabulary's template.
// `option` says how to ask for another format.
int chat_check(const Bpe* bpe, const char* option, char* error);

// Chooses a format for a vocabulary. Returns 1 if its template is another one, which is to be
// replaced.
int chat_choose(Bpe* bpe, ChatWord word);

// Returns the template of a format that a run learns, for a vocabulary; the caller frees it.
char* chat_new_template(const ChatMarks* marks, const Bpe* bpe);

// Returns a checksum of everything that the tokens of chats depend on besides the vocabulary.
uint64_t chat_signature(const ChatMarks* marks);

// Returns an upper bound of the ids of messages with `bytes` bytes in all.
size_t chat_most_ids(const ChatMarks* marks, const Bpe* bpe, size_t bytes, size_t messages);

// Adds a chat, or a prompt with its completion, to a document of one id, the start token. Returns
// the number of ids.
size_t chat_encode(const ChatMarks* marks, BpeEncoder* encoder, const ChatMessage* messages, size_t count,
                   ChatEnd end, int* ids);

// Removes what a generated answer has before its content, if the format has marks there: thoughts,
// and the mark itself.
void chat_take_answer(const ChatMarks* marks, const char** text, size_t* bytes);

#ifdef __cplusplus
}
#endif

#ifdef CHAT_MARKS_IMPLEMENTATION

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/text_buffer.h"
#include "llmc/base/xxh64.h"
#include "llmc/tokenizer/jinja.h"
#include "llmc/tokenizer/nfc.h"

enum { CHAT_LAYOUT_BYTES_ = 160 }; // most bytes of a layout around a message, and before a chat

// ---- the format of a vocabulary ----

static int chat_has_marks_(const Bpe* bpe, const ChatLayout* layout) {
    int has_all = 1;
    for (int i = 0; i < CHAT_MARKS && layout->marks[i]; i++) {
        has_all &= bpe_find_added(bpe, layout->marks[i]) >= 0;
    }
    return has_all;
}

ChatFormat chat_format_written(ChatWord word) {
    ChatFormat format = chat_format_of(word);
    format.has_bos = format.layout->header[CHAT_USER][0] != CHAT_BOS[0];
    return format;
}

// Returns the format whose marks a vocabulary has; formats with more marks are tried first. A
// byte-level vocabulary of Mistral's is Tekken.
static ChatFormat chat_of_vocabulary_(const Bpe* bpe) {
    static const ChatWord order[] = {
        CHAT_HARMONY,         CHAT_PHI4,     CHAT_CHATML, CHAT_LLAMA3, CHAT_MISTRAL7_TEKKEN,
        CHAT_MISTRAL3_TEKKEN, CHAT_GEMMA,    CHAT_GLM4,   CHAT_PHI3,   CHAT_GRANITE,
        CHAT_EXAONE,          CHAT_DEEPSEEK, CHAT_ZEPHYR};
    for (size_t i = 0; i < sizeof(order) / sizeof(order[0]); i++) {
        const ChatFormat format = chat_format_written(order[i]);
        if (chat_has_marks_(bpe, format.layout)) {
            return format;
        }
    }
    return chat_format_written(CHAT_CHATML);
}

// Finds the token that ends an answer.
static void chat_find_end_(ChatMarks* marks) {
    marks->ending = chat_format_end(&marks->format);
    marks->turn_end = marks->ending[0] == CHAT_EOS[0] ? marks->eos : -1;
    for (int i = 0; i < marks->num_marks; i++) {
        const ChatMark* mark = &marks->marks[i];
        marks->turn_end = strcmp(marks->ending, mark->text) == 0 ? mark->id : marks->turn_end;
    }
}

void chat_marks_open(ChatMarks* marks, const Bpe* bpe) {
    const ModelCard* card = &bpe->card;
    memset(marks, 0, sizeof(*marks));
    marks->format = card->chat.layout ? card->chat : chat_of_vocabulary_(bpe);
    if (card->chat.date[0]) {
        memcpy(marks->format.date, card->chat.date, DATE_BYTES);
    }
    const int is_read = card->chat.layout && !card->is_chosen; // from a template, with its roles
    marks->bos = is_read ? card->bos : card->start;
    marks->eos = is_read || card->eos >= 0 ? card->eos : card->ends[0];
    marks->is_text = 1;
    for (int i = 0; i < CHAT_MARKS && marks->format.layout->marks[i]; i++) {
        const char* name = marks->format.layout->marks[i];
        const int id = bpe_find_added(bpe, name);
        marks->marks[marks->num_marks++] =
            (ChatMark){name, strlen(name), id, id >= 0 && !bpe_is_name(bpe, id)};
        marks->is_text &= id < 0;
    }
    chat_find_end_(marks);
}

int chat_has_date(const Bpe* bpe) {
    const ChatFormat* own = &bpe->card.chat;
    return own->layout ? own->has_date : !bpe->card.chat_template && chat_of_vocabulary_(bpe).has_date;
}

int chat_check(const Bpe* bpe, const char* option, char* error) {
    return !bpe->card.chat_template || bpe->card.chat_known == CHAT_KNOWN ||
           error_set(error, "chats",
                     "the model's chat_template %s; wanted %s, which replaces it: a format of chat_format.h",
                     bpe->card.chat_known == CHAT_KNOWN_PROMPTS
                         ? "writes answers in another way than the formats that are known"
                         : "has a format that is not known",
                     option);
}

int chat_choose(Bpe* bpe, ChatWord word) {
    ModelCard* card = &bpe->card;
    const int is_same =
        card->chat.layout && card->chat_known == CHAT_KNOWN && chat_format_word(&card->chat) == word;
    if (is_same) {
        return 0;
    }
    ChatFormat old = card->chat;
    card->chat = chat_format_written(word);
    if (old.date[0]) {
        memcpy(card->chat.date, old.date, DATE_BYTES);
    }
    chat_format_close(&old);
    card->chat_known = CHAT_KNOWN;
    card->is_chosen = 1;
    return card->chat_template != NULL;
}

// Returns the name of a token, which the caller frees.
static char* chat_token_name_(const Bpe* bpe, int id) {
    int length;
    const char* name = bpe_token(bpe, id, &length);
    char* copy = strndup(name, (size_t)length);
    CHECK(copy, "a template: no memory");
    return copy;
}

char* chat_new_template(const ChatMarks* marks, const Bpe* bpe) {
    TextBuffer text;
    char *bos = chat_token_name_(bpe, marks->bos), *eos = chat_token_name_(bpe, marks->eos);
    text_buffer_open(&text, "a template");
    chat_print_template(&marks->format, bpe->card.bos == marks->bos ? NULL : bos,
                        bpe->card.eos == marks->eos ? NULL : eos, text.file);
    free(bos);
    free(eos);
    return text_buffer_close(&text);
}

uint64_t chat_signature(const ChatMarks* marks) {
    const ChatFormat* f = &marks->format;
    const int facts[] = {1,         (int)chat_format_word(f), f->has_bos, f->has_tail, f->trims, marks->bos,
                         marks->eos};
    const char* system = f->default_system ? f->default_system : "";
    Xxh64 hash;
    xxh64_open(&hash);
    xxh64_add(&hash, facts, sizeof(facts));
    xxh64_add(&hash, system, strlen(system));
    for (int i = 0; i < 2 && f->system_around[i]; i++) {
        xxh64_add(&hash, f->system_around[i], strlen(f->system_around[i]) + 1);
    }
    if (f->layout->opening[0]) {
        const char* opening = f->opening ? f->opening : f->date;
        xxh64_add(&hash, opening, strlen(opening) + 1);
    }
    return xxh64_value(&hash);
}

size_t chat_most_ids(const ChatMarks* marks, const Bpe* bpe, size_t bytes, size_t messages) {
    const ChatFormat* f = &marks->format;
    const char* const texts[] = {f->default_system, f->system_around[0],   f->system_around[1],
                                 f->opening,        f->layout->opening[0], f->layout->opening[1]};
    for (int i = 0; i < 6; i++) {
        bytes += texts[i] ? strlen(texts[i]) : 0;
    }
    // with Mistral's layouts, messages of the system are moved, not copied
    return bpe_most_ids(bpe, bytes + (messages + 1) * CHAT_LAYOUT_BYTES_);
}

// ---- encoding ----

// Ids of a document, and the text after the last mark that is not encoded yet.
typedef struct {
    const ChatMarks* marks;
    BpeEncoder* encoder;
    int* ids;
    size_t count;
    char *text, *is_learned; // (bytes) of text, and whether each is learned
    size_t bytes, room, learned_room;
    NfcText normal;
} ChatWriter_;

// Adds an id, as learned or not.
static void chat_put_id_(ChatWriter_* w, int id, int is_learned) {
    w->ids[w->count] = id | TOKEN_NO_TARGET;
    w->ids[w->count - 1] &= is_learned ? ~TOKEN_NO_TARGET : -1;
    w->count++;
}

// Returns 1 if encoding put a blank before the text so far, else 0.
static size_t chat_put_blank_(const Bpe* bpe, const ChatWriter_* w, const int* ids, size_t count) {
    size_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        bytes += bpe->tokens[ids[i]].length;
    }
    return bpe_puts_blank(bpe) && bytes > w->bytes;
}

// Encodes the text so far.
static void chat_flush_(ChatWriter_* w) {
    const Bpe* bpe = w->encoder->bpe;
    int* ids = w->ids + w->count;
    // a format without a start token starts where its document does
    const BpePlace place = w->count == 1 && !w->marks->format.has_bos ? BPE_DOCUMENT : BPE_AFTER_TOKEN;
    const size_t count = bpe_encode_at(w->encoder, place, w->text, w->bytes, ids);
    size_t put = chat_put_blank_(bpe, w, ids, count); // bytes that are not in the text
    for (size_t i = 0, at = 0; i < count; i++) {
        const size_t left = w->bytes - at, length = bpe->tokens[ids[i]].length - put,
                     n = length < left ? length : left;
        put = 0;
        const int is_learned = n > 0 && memchr(w->is_learned + at, 1, n) != NULL;
        chat_put_id_(w, ids[i], is_learned);
        at += n;
    }
    w->bytes = 0;
}

static void chat_put_text_(ChatWriter_* w, const char* text, size_t bytes, int is_learned) {
    w->text = (char*)check_reserve(w->text, &w->room, w->bytes + bytes + 1, 1, "a chat");
    w->is_learned = (char*)check_reserve(w->is_learned, &w->learned_room, w->bytes + bytes + 1, 1, "a chat");
    memcpy(w->text + w->bytes, text, bytes);
    memset(w->is_learned + w->bytes, is_learned, bytes);
    w->bytes += bytes;
}

// Adds a mark. The start token of a template is the one that the document has.
static void chat_put_mark_(ChatWriter_* w, int id, int is_learned) {
    const int is_start = w->count == 1 && w->bytes == 0 && id == (w->ids[0] & ~TOKEN_NO_TARGET);
    if (id >= 0 && !is_start) {
        chat_flush_(w);
        chat_put_id_(w, id, is_learned);
    }
}

// Returns the mark that is a token and stands at the start of a text; NULL: none.
static const ChatMark* chat_mark_at_(const ChatMarks* marks, const char* text, size_t left) {
    for (int i = 0; i < marks->num_marks; i++) {
        const ChatMark* mark = &marks->marks[i];
        if (mark->id >= 0 && mark->bytes <= left && memcmp(mark->text, text, mark->bytes) == 0) {
            return mark;
        }
    }
    return NULL;
}

static void chat_put_layout_(void* context, const char* text, int is_learned) {
    ChatWriter_* w = (ChatWriter_*)context;
    for (size_t left = strlen(text), n; left > 0; left -= n, text += n) {
        const ChatMark* mark = chat_mark_at_(w->marks, text, left);
        n = mark ? mark->bytes : 1;
        if (*text == CHAT_BOS[0] || *text == CHAT_EOS[0]) {
            chat_put_mark_(w, *text == CHAT_BOS[0] ? w->marks->bos : w->marks->eos, is_learned);
        } else if (mark) {
            chat_put_mark_(w, mark->id, is_learned);
        } else {
            chat_put_text_(w, text, 1, is_learned);
        }
    }
}

// Adds a content. A mark in it that texts could have is encoded in two parts.
static void chat_put_content_(void* context, const char* text, size_t bytes, int is_learned) {
    ChatWriter_* w = (ChatWriter_*)context;
    const BpeRules* rules = &w->encoder->bpe->rules;
    size_t begin = 0;
    if ((rules->pattern.normalizes &&
         nfc_apply(&rules->nfc, (const unsigned char*)text, bytes, &w->normal)) ||
        (rules->pattern.style == BPE_SENTENCE &&
         bpe_blanks_apply(0, BPE_REST, (const unsigned char*)text, bytes, &w->normal))) {
        text = (const char*)w->normal.text;
        bytes = w->normal.bytes;
    }
    for (size_t at = 0; at < bytes && rules->pattern.cuts_words; at++) {
        const ChatMark* mark = chat_mark_at_(w->marks, text + at, bytes - at);
        if (mark && mark->is_word) {
            chat_put_text_(w, text + begin, at + 1 - begin, is_learned);
            chat_flush_(w);
            begin = at + 1;
        }
    }
    chat_put_text_(w, text + begin, bytes - begin, is_learned);
}

static void chat_trim_(void* context) {
    ChatWriter_* w = (ChatWriter_*)context;
    const char* text = w->text;
    size_t bytes = w->bytes;
    jinja_strip(&text, &bytes);
    w->bytes = bytes > 0 ? (size_t)(text - w->text) + bytes : 0;
}

size_t chat_encode(const ChatMarks* marks, BpeEncoder* encoder, const ChatMessage* messages, size_t count,
                   ChatEnd end, int* ids) {
    ChatWriter_ w = {.marks = marks, .encoder = encoder, .ids = ids, .count = 1};
    const ChatSink sink = {chat_put_layout_, chat_put_content_, chat_trim_, &w};
    ids[0] |= TOKEN_NO_TARGET;
    if (count > 0 && messages[0].role < (ChatRole)CHAT_ROLES) {
        chat_walk(&marks->format, messages, count, end, sink);
        chat_flush_(&w);
        const int is_open =
            marks->format.layout->opener && end == CHAT_WHOLE && messages[count - 1].role == CHAT_ASSISTANT;
        ids[w.count - 1] &= is_open ? ~TOKEN_NO_TARGET : -1; // end-of-text ends the last answer
    }
    for (size_t i = 0; i < count && messages[0].role >= (ChatRole)CHAT_ROLES; i++) {
        const int is_learned = messages[i].role == CHAT_COMPLETION;
        const size_t begin = w.count, added = bpe_encode_at(encoder, i > 0 ? BPE_REST : BPE_DOCUMENT,
                                                            messages[i].text, messages[i].bytes, ids + begin);
        for (size_t k = 0; k < added; k++) {
            chat_put_id_(&w, ids[begin + k], is_learned);
        }
        ids[w.count - 1] &= is_learned ? ~TOKEN_NO_TARGET : -1; // end-of-text follows
    }
    free(w.text);
    free(w.is_learned);
    nfc_text_close(&w.normal);
    return w.count;
}

void chat_take_answer(const ChatMarks* marks, const char** text, size_t* bytes) {
    const char *lead = marks->format.layout->lead, *found;
    const size_t length = strlen(lead);
    while (length > 1 && (found = (const char*)memmem(*text, *bytes, lead, length)) != NULL) {
        *bytes -= (size_t)(found - *text) + length;
        *text = found + length;
    }
}

#endif // CHAT_MARKS_IMPLEMENTATION

#endif
