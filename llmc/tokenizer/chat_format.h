/*
chat_format.h -- formats of chats: what stands around the contents of messages.

    chatml            <|im_start|> role \n content <|im_end|> \n
    llama2            bos [INST] <<SYS>>\n system \n<</SYS>>\n\n user [/INST] answer eos
    llama3            bos <|start_header_id|> role <|end_header_id|> \n\n content <|eot_id|>
    mistral3          bos [INST] user [/INST] answer eos; the system's message in the last [INST]
    mistral7          bos [SYSTEM_PROMPT] system [/SYSTEM_PROMPT] [INST] user [/INST] answer eos
    mistral*-tekken   the same without blanks
    gemma             bos <start_of_turn> role \n content <end_of_turn> \n; the system's message
                      opens the user's turn, the assistant is called model
    phi3              <|role|> \n content <|end|> \n
    phi4-mini         <|role|> content <|end|>
    phi4              <|im_start|> role <|im_sep|> content <|im_end|>
    zephyr            <|role|> \n content eos \n
    granite           <|start_of_role|> role <|end_of_role|> content <|end_of_text|> \n
    exaone            [|role|] \n content [|endofturn|] \n
    glm4              [gMASK]<sop> <|role|> \n content: the mark of the next turn ends an answer
    deepseek          bos system <User> user <Assistant> answer eos, in its own brackets
    harmony           <|start|> role <|message|> content <|end|>, first a turn of the system with
                      the date; the system's message is the developer's turn; an answer is
                      <|start|> assistant <|channel|> final <|message|> content <|return|>, and ends
                      with <|end|> if messages follow

A model's template is recognized by what it renders (jinja.h): a few chats with odd contents must
look as a format makes them. Beyond the table above it may differ in whether it starts with the
start token, trims contents, ends a chat with the end-of-text token, has a message for chats without
one of the system, starts with another turn than harmony's, and puts a text around the first message
of the system if it opens the chat. Such texts may have a date (Granite 3, Llama 3.2, gpt-oss):
today's when the vocabulary is opened, unless bpe_date_chats says another, as a run does whose
tokens must stay the same.

chat_print_template writes a format as a template, with the marks of transformers around what is
learned, and with the start token, which training puts before each document.
*/
#ifndef LLMC_CHAT_FORMAT_H
#define LLMC_CHAT_FORMAT_H

#include <stddef.h>
#include <stdio.h>

#include "llmc/base/enum_words.h"
#include "llmc/tokenizer/date.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { CHAT_SYSTEM, CHAT_USER, CHAT_ASSISTANT, CHAT_PROMPT, CHAT_COMPLETION } ChatRole;

enum { CHAT_ROLES = 3 }; // the first ones are roles of messages

typedef struct {
    ChatRole role;
    const char* text;
    size_t bytes;
} ChatMessage;

// --chat
// clang-format off
#define CHAT_WORDS(X) \
    X(CHAT_OFF, "off") \
    X(CHAT_ON, "on") \
    X(CHAT_CHATML, "chatml") \
    X(CHAT_LLAMA2, "llama2") \
    X(CHAT_LLAMA3, "llama3") \
    X(CHAT_MISTRAL3, "mistral3") \
    X(CHAT_MISTRAL3_TEKKEN, "mistral3-tekken") \
    X(CHAT_MISTRAL7, "mistral7") \
    X(CHAT_MISTRAL7_TEKKEN, "mistral7-tekken") \
    X(CHAT_GEMMA, "gemma") \
    X(CHAT_PHI3, "phi3") \
    X(CHAT_PHI4_MINI, "phi4-mini") \
    X(CHAT_PHI4, "phi4") \
    X(CHAT_ZEPHYR, "zephyr") \
    X(CHAT_GRANITE, "granite") \
    X(CHAT_EXAONE, "exaone") \
    X(CHAT_GLM4, "glm4") \
    X(CHAT_DEEPSEEK, "deepseek") \
    X(CHAT_HARMONY, "harmony")
// clang-format on
typedef enum { CHAT_WORDS(WORDS_VALUE) CHAT_WORDS_END } ChatWord;

enum {
    CHAT_FORMATS = CHAT_WORDS_END - CHAT_CHATML,
    CHAT_MARKS = 6, // most marks of a format
};

// Tokens that a template names, in the texts below.
#define CHAT_BOS "\1"
#define CHAT_EOS "\2"

typedef enum {
    SYSTEM_OWN_TURN, // a turn like others
    SYSTEM_OPENS,    // the start of the user's turn that follows
    SYSTEM_LAST,     // before the content of the last user's turn
} SystemPlace;

// How blanks at the ends of contents are removed: bits of roles, or with what stands around it.
enum {
    TRIM_NOTHING = 0,
    TRIM_ALL = 1 << CHAT_SYSTEM | 1 << CHAT_USER | 1 << CHAT_ASSISTANT,
    TRIM_TURNS = 1 << CHAT_USER | 1 << CHAT_ASSISTANT,
    TRIM_ANSWERS = 1 << CHAT_ASSISTANT,
    TRIM_WHOLE_TURN = 1 << CHAT_ROLES, // a user's, with what the system says in it
};

typedef struct {
    const char* name;               // in words
    const char* marks[CHAT_MARKS];  // that are tokens if the vocabulary has them
    const char* header[CHAT_ROLES]; // before the content
    const char* end[CHAT_ROLES];    // after it; learned for answers
    const char *lead, *after;       // learned before an answer; after the end of a turn
    const char* joint;              // between the system's message and the user's in one turn
    int has_bos;                    // the chat starts with the start token
    SystemPlace system;
    int trims;
    const char* start;      // of a chat; NULL: none
    const char* opener;     // mark of a user's turn that ends the answer before it; NULL: none
    const char* opening[2]; // turn of its own that starts a chat, around the date; NULL: none
    const char* past_end;   // end of an answer before other messages, not learned; NULL: the same
} ChatLayout;

// A format as a template has it.
typedef struct {
    const ChatLayout* layout; // NULL: unknown
    int has_bos, has_tail;    // a chat starts with bos; one without a prompt ends with eos
    int trims;
    const char* default_system;   // message of the system for chats without one; NULL: none
    const char* system_around[2]; // before and after the first message of the system; NULL: nothing
    const char* opening;          // turn that starts a chat; NULL: the layout's
    int has_date;                 // one of these texts has the date
    char date[DATE_BYTES];        // of the layout's
} ChatFormat;

// Frees the texts of a format, or makes them copies of its own.
void chat_format_close(ChatFormat* format);
void chat_format_keep(ChatFormat* format);

// Returns the role of a message; -1: none has this name.
int chat_role(const char* name, size_t bytes);

// Returns the word of --chat for one of its values.
const char* chat_word(int value);

// Returns a format of the table, as --chat names it.
ChatFormat chat_format_of(ChatWord word);

// Returns the word of a format.
ChatWord chat_format_word(const ChatFormat* format);

// Returns the text that ends an answer, a mark or CHAT_EOS.
const char* chat_format_end(const ChatFormat* format);

// Receives the parts of a chat in their order: text of the layout, with CHAT_BOS and CHAT_EOS, or
// of a message.
typedef struct {
    void (*on_layout)(void* context, const char* text, int is_learned);
    void (*on_content)(void* context, const char* text, size_t bytes, int is_learned);
    // removes blanks from the end of what came last
    void (*on_trim)(void* context);
    void* context;
} ChatSink;

typedef enum { CHAT_WHOLE, CHAT_FOR_ANSWER } ChatEnd; // as it is, or with the header of an answer

void chat_walk(const ChatFormat* format, const ChatMessage* messages, size_t count, ChatEnd end,
               ChatSink sink);

// How far a template is known: not at all, for prompts, or for chats with answers.
typedef enum { CHAT_UNKNOWN, CHAT_KNOWN_PROMPTS, CHAT_KNOWN } ChatKnown;

// Finds the format of a template, whose tokens have these names (NULL: none), on a date. The caller
// closes the format.
ChatKnown chat_recognize(ChatFormat* format, const char* text, const char* bos, const char* eos,
                         const char* date);

// Writes a format as a template. A token without a role in transformers has its name there; NULL:
// bos_token or eos_token.
void chat_print_template(const ChatFormat* format, const char* bos, const char* eos, FILE* file);

#ifdef __cplusplus
}
#endif

#ifdef CHAT_FORMAT_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/tokenizer/jinja.h"

// clang-format off
static const ChatLayout chat_layouts_[CHAT_FORMATS] = {
    [CHAT_CHATML - CHAT_CHATML] = {.name = "ChatML",
        .marks = {"<|im_start|>", "<|im_end|>"},
        .header = {"<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n"},
        .end = {"<|im_end|>", "<|im_end|>", "<|im_end|>"}, .lead = "", .after = "\n", .joint = "",
        .system = SYSTEM_OWN_TURN, .trims = TRIM_NOTHING},
    [CHAT_LLAMA2 - CHAT_CHATML] = {.name = "Llama 2",
        .marks = {"[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"},
        .header = {CHAT_BOS "[INST] <<SYS>>\n", CHAT_BOS "[INST] ", ""},
        .end = {"\n<</SYS>>", " [/INST]", " " CHAT_EOS}, .lead = " ", .after = "", .joint = "\n\n",
        .system = SYSTEM_OPENS, .trims = TRIM_WHOLE_TURN | TRIM_ANSWERS},
    [CHAT_LLAMA3 - CHAT_CHATML] = {.name = "Llama 3",
        .marks = {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
        .header = {"<|start_header_id|>system<|end_header_id|>\n\n", "<|start_header_id|>user<|end_header_id|>\n\n",
                   "<|start_header_id|>assistant<|end_header_id|>\n\n"},
        .end = {"<|eot_id|>", "<|eot_id|>", "<|eot_id|>"}, .lead = "", .after = "", .joint = "", .has_bos = 1,
        .system = SYSTEM_OWN_TURN, .trims = TRIM_ALL},
    [CHAT_MISTRAL3 - CHAT_CHATML] = {.name = "Mistral v3",
        .marks = {"[INST]", "[/INST]"}, .header = {"[INST] ", "[INST] ", ""}, .end = {"[/INST]", "[/INST]", CHAT_EOS},
        .lead = " ", .after = "", .joint = "\n\n", .has_bos = 1, .system = SYSTEM_LAST, .trims = TRIM_ANSWERS},
    [CHAT_MISTRAL3_TEKKEN - CHAT_CHATML] = {.name = "Mistral v3 Tekken",
        .marks = {"[INST]", "[/INST]"}, .header = {"[INST]", "[INST]", ""}, .end = {"[/INST]", "[/INST]", CHAT_EOS},
        .lead = "", .after = "", .joint = "\n\n", .has_bos = 1, .system = SYSTEM_LAST, .trims = TRIM_NOTHING},
    [CHAT_MISTRAL7 - CHAT_CHATML] = {.name = "Mistral v7",
        .marks = {"[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"},
        .header = {"[SYSTEM_PROMPT] ", "[INST] ", ""}, .end = {"[/SYSTEM_PROMPT]", "[/INST]", CHAT_EOS}, .lead = " ",
        .after = "", .joint = "", .has_bos = 1, .system = SYSTEM_OWN_TURN, .trims = TRIM_NOTHING},
    [CHAT_MISTRAL7_TEKKEN - CHAT_CHATML] = {.name = "Mistral v7 Tekken",
        .marks = {"[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"},
        .header = {"[SYSTEM_PROMPT]", "[INST]", ""}, .end = {"[/SYSTEM_PROMPT]", "[/INST]", CHAT_EOS}, .lead = "",
        .after = "", .joint = "", .has_bos = 1, .system = SYSTEM_OWN_TURN, .trims = TRIM_NOTHING},
    [CHAT_GEMMA - CHAT_CHATML] = {.name = "Gemma",
        .marks = {"<start_of_turn>", "<end_of_turn>"},
        .header = {"<start_of_turn>user\n", "<start_of_turn>user\n", "<start_of_turn>model\n"},
        .end = {"", "<end_of_turn>", "<end_of_turn>"}, .lead = "", .after = "\n", .joint = "\n\n", .has_bos = 1,
        .system = SYSTEM_OPENS, .trims = TRIM_TURNS},
    [CHAT_PHI3 - CHAT_CHATML] = {.name = "Phi 3",
        .marks = {"<|system|>", "<|user|>", "<|assistant|>", "<|end|>"},
        .header = {"<|system|>\n", "<|user|>\n", "<|assistant|>\n"}, .end = {"<|end|>", "<|end|>", "<|end|>"},
        .lead = "", .after = "\n", .joint = "", .system = SYSTEM_OWN_TURN, .trims = TRIM_NOTHING},
    [CHAT_PHI4_MINI - CHAT_CHATML] = {.name = "Phi 4 mini",
        .marks = {"<|system|>", "<|user|>", "<|assistant|>", "<|end|>"},
        .header = {"<|system|>", "<|user|>", "<|assistant|>"}, .end = {"<|end|>", "<|end|>", "<|end|>"}, .lead = "",
        .after = "", .joint = "", .system = SYSTEM_OWN_TURN, .trims = TRIM_NOTHING},
    [CHAT_PHI4 - CHAT_CHATML] = {.name = "Phi 4",
        .marks = {"<|im_start|>", "<|im_sep|>", "<|im_end|>"},
        .header = {"<|im_start|>system<|im_sep|>", "<|im_start|>user<|im_sep|>", "<|im_start|>assistant<|im_sep|>"},
        .end = {"<|im_end|>", "<|im_end|>", "<|im_end|>"}, .lead = "", .after = "", .joint = "",
        .system = SYSTEM_OWN_TURN, .trims = TRIM_NOTHING},
    [CHAT_ZEPHYR - CHAT_CHATML] = {.name = "Zephyr",
        .marks = {"<|system|>", "<|user|>", "<|assistant|>"},
        .header = {"<|system|>\n", "<|user|>\n", "<|assistant|>\n"}, .end = {CHAT_EOS, CHAT_EOS, CHAT_EOS},
        .lead = "", .after = "\n", .joint = "", .system = SYSTEM_OWN_TURN, .trims = TRIM_NOTHING},
    [CHAT_GRANITE - CHAT_CHATML] = {.name = "Granite",
        .marks = {"<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"},
        .header = {"<|start_of_role|>system<|end_of_role|>", "<|start_of_role|>user<|end_of_role|>",
                   "<|start_of_role|>assistant<|end_of_role|>"},
        .end = {"<|end_of_text|>", "<|end_of_text|>", "<|end_of_text|>"}, .lead = "", .after = "\n", .joint = "",
        .system = SYSTEM_OWN_TURN, .trims = TRIM_NOTHING},
    [CHAT_EXAONE - CHAT_CHATML] = {.name = "EXAONE",
        .marks = {"[|system|]", "[|user|]", "[|assistant|]", "[|endofturn|]"},
        .header = {"[|system|]\n", "[|user|]\n", "[|assistant|]\n"},
        .end = {"[|endofturn|]", "[|endofturn|]", "[|endofturn|]"}, .lead = "", .after = "\n", .joint = "",
        .system = SYSTEM_OWN_TURN, .trims = TRIM_NOTHING},
    [CHAT_GLM4 - CHAT_CHATML] = {.name = "GLM 4",
        .marks = {"[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"},
        .header = {"<|system|>\n", "<|user|>\n", "<|assistant|>\n"}, .end = {"", "", ""}, .lead = "", .after = "",
        .joint = "", .system = SYSTEM_OWN_TURN, .trims = TRIM_NOTHING, .start = "[gMASK]<sop>", .opener = "<|user|>"},
    [CHAT_DEEPSEEK - CHAT_CHATML] = {.name = "DeepSeek",
        .marks = {"<\uFF5CUser\uFF5C>", "<\uFF5CAssistant\uFF5C>", "<\uFF5Cend\u2581of\u2581sentence\uFF5C>"},
        .header = {"", "<\uFF5CUser\uFF5C>", "<\uFF5CAssistant\uFF5C>"},
        .end = {"", "", "<\uFF5Cend\u2581of\u2581sentence\uFF5C>"}, .lead = "", .after = "", .joint = "",
        .has_bos = 1, .system = SYSTEM_OWN_TURN, .trims = TRIM_NOTHING},
    [CHAT_HARMONY - CHAT_CHATML] = {.name = "Harmony",
        .marks = {"<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"},
        .header = {"<|start|>developer<|message|># Instructions\n\n", "<|start|>user<|message|>", "<|start|>assistant"},
        .end = {"<|end|>", "<|end|>", "<|return|>"}, .lead = "<|channel|>final<|message|>", .after = "", .joint = "",
        .system = SYSTEM_OWN_TURN, .trims = TRIM_NOTHING,
        .opening = {"<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
                    "Knowledge cutoff: 2024-06\nCurrent date: ",
                    "\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. "
                    "Channel must be included for every message.<|end|>"},
        .past_end = "<|end|>"},
};
// clang-format on

static const char* const chat_roles_[CHAT_ROLES] = {"system", "user", "assistant"};

int chat_role(const char* name, size_t bytes) {
    for (int role = 0; role < CHAT_ROLES; role++) {
        if (strlen(chat_roles_[role]) == bytes && memcmp(chat_roles_[role], name, bytes) == 0) {
            return role;
        }
    }
    return -1;
}

const char* chat_word(int value) {
    static const char* const words[] = {CHAT_WORDS(WORDS_NAME)};
    return words[value];
}

ChatFormat chat_format_of(ChatWord word) {
    const ChatLayout* layout = &chat_layouts_[word - CHAT_CHATML];
    ChatFormat format = {.layout = layout, .has_bos = layout->has_bos, .trims = layout->trims};
    format.has_date = layout->opening[0] != NULL;
    date_today(format.date);
    return format;
}

void chat_format_close(ChatFormat* f) {
    free((void*)f->default_system);
    free((void*)f->system_around[0]);
    free((void*)f->system_around[1]);
    free((void*)f->opening);
    memset(f, 0, sizeof(*f));
}

static const char* chat_copy_(const char* text) {
    const char* copy = text ? strdup(text) : NULL;
    CHECK(copy || !text, "the format of a chat: no memory");
    return copy;
}

void chat_format_keep(ChatFormat* f) {
    f->default_system = chat_copy_(f->default_system);
    f->system_around[0] = chat_copy_(f->system_around[0]);
    f->system_around[1] = chat_copy_(f->system_around[1]);
    f->opening = chat_copy_(f->opening);
}

ChatWord chat_format_word(const ChatFormat* format) {
    return (ChatWord)(CHAT_CHATML + (format->layout - chat_layouts_));
}

const char* chat_format_end(const ChatFormat* format) {
    const ChatLayout* layout = format->layout;
    const char* end = layout->opener ? layout->opener : layout->end[CHAT_ASSISTANT];
    return end + (end[0] == ' ');
}

// ---- a chat ----

// A message of the system comes before message i.
static int chat_follows_system_(const ChatFormat* f, const ChatMessage* m, size_t i) {
    return i > 0 ? m[i - 1].role == CHAT_SYSTEM : f->default_system != NULL;
}

static void chat_walk_content_(const ChatFormat* f, ChatRole role, const char* text, size_t bytes,
                               ChatSink sink) {
    if (f->trims >> role & 1 || (role == CHAT_USER && f->trims & TRIM_WHOLE_TURN)) {
        jinja_strip(&text, &bytes);
    }
    sink.on_content(sink.context, text, bytes, role == CHAT_ASSISTANT);
}

// Visits message i of the system, or with m = NULL that of the template; `opens`: a user's turn
// follows.
static void chat_walk_system_(const ChatFormat* f, const ChatMessage* m, size_t i, int opens, ChatSink sink) {
    const ChatLayout* layout = f->layout;
    const char* const* around = f->system_around;
    const int is_first = m && i == 0;
    sink.on_layout(sink.context, layout->header[CHAT_SYSTEM], 0);
    sink.on_layout(sink.context, is_first && around[0] ? around[0] : "", 0);
    if (m) {
        chat_walk_content_(f, CHAT_SYSTEM, m[i].text, m[i].bytes, sink);
    } else {
        sink.on_content(sink.context, f->default_system, strlen(f->default_system), 0);
    }
    sink.on_layout(sink.context, is_first && around[1] ? around[1] : "", 0);
    sink.on_layout(sink.context, layout->end[CHAT_SYSTEM], 0);
    if (layout->system != SYSTEM_OPENS) {
        sink.on_layout(sink.context, layout->after, 0);
    } else if (!opens) {
        sink.on_layout(sink.context, layout->joint, 0);
    }
}

// Visits the content of a user's turn that a message of the system has opened.
static void chat_walk_opened_(const ChatFormat* f, const ChatMessage* m, ChatSink sink) {
    sink.on_layout(sink.context, f->layout->joint, 0);
    if (f->trims & TRIM_WHOLE_TURN) {
        sink.on_content(sink.context, m->text, m->bytes, 0);
        sink.on_trim(sink.context);
    } else {
        chat_walk_content_(f, CHAT_USER, m->text, m->bytes, sink);
    }
}

// Visits the messages of the system before message `last`, which come with its content.
static void chat_walk_late_(const ChatFormat* f, const ChatMessage* m, size_t last, ChatSink sink) {
    for (size_t i = 0; i < last; i++) {
        if (m[i].role == CHAT_SYSTEM) {
            chat_walk_content_(f, CHAT_SYSTEM, m[i].text, m[i].bytes, sink);
            sink.on_layout(sink.context, f->layout->joint, 0);
        }
    }
}

// The header of message i ends an answer.
static int chat_ends_answer_(const ChatFormat* f, const ChatMessage* m, size_t i) {
    return f->layout->opener && i > 0 && m[i].role == CHAT_USER && m[i - 1].role == CHAT_ASSISTANT;
}

// Visits the turn that a chat starts with.
static void chat_walk_opening_(const ChatFormat* f, ChatSink sink) {
    if (f->opening || !f->layout->opening[0]) {
        sink.on_layout(sink.context, f->opening ? f->opening : "", 0);
        return;
    }
    sink.on_layout(sink.context, f->layout->opening[0], 0);
    sink.on_layout(sink.context, f->date, 0);
    sink.on_layout(sink.context, f->layout->opening[1], 0);
}

// `is_past`: something follows message i.
static void chat_walk_turn_(const ChatFormat* f, const ChatMessage* m, size_t i, size_t last, int is_past,
                            ChatSink sink) {
    const ChatLayout* layout = f->layout;
    const ChatRole role = m[i].role;
    const int is_answer = role == CHAT_ASSISTANT;
    if (role == CHAT_USER && layout->system == SYSTEM_OPENS && chat_follows_system_(f, m, i)) {
        chat_walk_opened_(f, &m[i], sink);
    } else {
        sink.on_layout(sink.context, layout->header[role], chat_ends_answer_(f, m, i));
        sink.on_layout(sink.context, is_answer ? layout->lead : "", 1);
        if (i == last && layout->system == SYSTEM_LAST) {
            chat_walk_late_(f, m, last, sink);
        }
        chat_walk_content_(f, role, m[i].text, m[i].bytes, sink);
    }
    const int ends_past = is_answer && is_past && layout->past_end;
    sink.on_layout(sink.context, ends_past ? layout->past_end : layout->end[role], is_answer && !ends_past);
    sink.on_layout(sink.context, layout->after, 0);
}

void chat_walk(const ChatFormat* f, const ChatMessage* m, size_t count, ChatEnd end, ChatSink sink) {
    size_t last = count; // message of the user
    for (size_t i = 0; i < count; i++) {
        last = m[i].role == CHAT_USER ? i : last;
    }
    sink.on_layout(sink.context, f->has_bos ? CHAT_BOS : "", 0);
    sink.on_layout(sink.context, f->layout->start ? f->layout->start : "", 0);
    chat_walk_opening_(f, sink);
    if (f->default_system && (count == 0 || m[0].role != CHAT_SYSTEM)) {
        chat_walk_system_(f, NULL, 0, count > 0 && m[0].role == CHAT_USER, sink);
    }
    for (size_t i = 0; i < count; i++) {
        const int is_late = f->layout->system == SYSTEM_LAST && last < count && i < last;
        if (m[i].role != CHAT_SYSTEM) {
            chat_walk_turn_(f, m, i, last, i + 1 < count || end == CHAT_FOR_ANSWER, sink);
        } else if (!is_late) {
            chat_walk_system_(f, m, i, i + 1 < count && m[i + 1].role == CHAT_USER, sink);
        }
    }
    sink.on_layout(sink.context,
                   end == CHAT_FOR_ANSWER ? f->layout->header[CHAT_ASSISTANT]
                   : f->has_tail          ? CHAT_EOS
                                          : "",
                   0);
}

// ---- recognition ----

// Text of a chat, where tokens have these names.
typedef struct {
    char* text;
    size_t bytes, room;
    const char *bos, *eos;
} ChatText_;

static void chat_text_content_(void* context, const char* text, size_t bytes, int is_learned) {
    ChatText_* t = (ChatText_*)context;
    (void)is_learned;
    t->text = (char*)check_reserve(t->text, &t->room, t->bytes + bytes + 1, 1, "a chat");
    memcpy(t->text + t->bytes, text, bytes);
    t->bytes += bytes;
    t->text[t->bytes] = '\0';
}

static void chat_text_layout_(void* context, const char* text, int is_learned) {
    const ChatText_* t = (const ChatText_*)context;
    for (; *text; text++) {
        const char* name = *text == CHAT_BOS[0] ? t->bos : *text == CHAT_EOS[0] ? t->eos : NULL;
        if (*text == CHAT_BOS[0] || *text == CHAT_EOS[0]) {
            chat_text_content_(context, name ? name : "", name ? strlen(name) : 0, is_learned);
        } else {
            chat_text_content_(context, text, 1, is_learned);
        }
    }
}

static void chat_text_trim_(void* context) {
    ChatText_* t = (ChatText_*)context;
    const char* text = t->text;
    size_t bytes = t->bytes;
    jinja_strip(&text, &bytes);
    t->bytes = (size_t)(text - t->text) + bytes; // the start of a chat is no blank
}

// Returns the text of a chat, which the caller frees.
static char* chat_text_(const ChatFormat* format, const JinjaChat* chat) {
    enum { MOST = 8 };
    ChatText_ text = {NULL, 0, 0, chat->bos_token, chat->eos_token};
    ChatMessage messages[MOST];
    for (int i = 0; i < chat->count && i < MOST; i++) {
        const char *content = chat->messages[i].content, *role = chat->messages[i].role;
        messages[i] = (ChatMessage){(ChatRole)chat_role(role, strlen(role)), content, strlen(content)};
    }
    const ChatSink sink = {chat_text_layout_, chat_text_content_, chat_text_trim_, &text};
    chat_text_content_(&text, "", 0, 0);
    chat_walk(format, messages, (size_t)chat->count,
              chat->add_generation_prompt ? CHAT_FOR_ANSWER : CHAT_WHOLE, sink);
    text.text[text.bytes] = '\0';
    return text.text;
}

// Chats that tell formats apart: contents with blanks, empty ones, with and without a system.
typedef struct {
    JinjaMessage messages[6];
    int count, is_prompt;
} ChatProbe_;

// clang-format off
static const ChatProbe_ chat_probes_[] = {
    {{{"user", "Hi"}}, 1, 1},
    {{{"system", "S1"}, {"user", "u1"}, {"assistant", "a1"}, {"user", " u2 \n"}}, 4, 1},
    {{{"user", "<u1>"}, {"assistant", "a\n1"}, {"user", "u2"}}, 3, 1},
    {{{"user", "Hi"}, {"assistant", "Hello"}}, 2, 0},
    {{{"system", " S\n"}, {"user", "\n u1 "}, {"assistant", " a1\t"}, {"user", "u2\n"}, {"assistant", "\n\na2 "}}, 5, 0},
    {{{"user", ""}, {"assistant", ""}, {"user", " "}, {"assistant", "\n"}}, 4, 0},
    {{{"user", "u1"}, {"assistant", "<think>a1</think>"}, {"user", "u2"}}, 3, 0},
};
// clang-format on
enum { CHAT_PROBES_ = sizeof(chat_probes_) / sizeof(chat_probes_[0]) };

// Shows where the system's content is.
static const ChatProbe_ chat_marked_ = {{{"system", "\3"}, {"user", "Hi"}}, 2, 1};

// Texts that a template makes of the probes; NULL: it refuses the chat.
typedef struct {
    char *texts[CHAT_PROBES_], *marked;
    const char *bos, *eos, *date;
    int has_date;
} ChatRendered_;

static JinjaChat chat_asked_(ChatRendered_* r, const ChatProbe_* p) {
    return (JinjaChat){p->messages, p->count, r->bos, r->eos, p->is_prompt, r->date, &r->has_date};
}

// Renders all probes. Returns the number of those that could be: a template may refuse chats with
// a system.
static int chat_render_(ChatRendered_* r, const char* text) {
    char error[ERROR_BYTES];
    int count = 0;
    for (int i = 0; i < CHAT_PROBES_; i++) {
        const JinjaChat chat = chat_asked_(r, &chat_probes_[i]);
        r->texts[i] = jinja_render(text, &chat, error);
        count += r->texts[i] != NULL;
    }
    const JinjaChat marked = chat_asked_(r, &chat_marked_);
    r->marked = jinja_render(text, &marked, error);
    return count;
}

// Returns a copy of the text between two ends, which the caller frees; NULL if the text has other
// ends, or nothing between them.
static char* chat_between_(const char* text, const char* before, size_t before_bytes, const char* after) {
    const size_t bytes = text ? strlen(text) : 0, after_bytes = strlen(after);
    const int has_both = bytes > before_bytes + after_bytes && memcmp(text, before, before_bytes) == 0 &&
                         strcmp(text + bytes - after_bytes, after) == 0;
    return has_both ? strndup(text + before_bytes, bytes - before_bytes - after_bytes) : NULL;
}

// Finds the turn that the template starts a chat with, if the format has any.
static void chat_find_opening_(ChatFormat* format, ChatRendered_* r) {
    const JinjaChat chat = chat_asked_(r, &chat_probes_[0]);
    if (!format->layout->opening[0]) {
        return;
    }
    format->opening = ""; // not the layout's
    char* plain = chat_text_(format, &chat);
    const size_t start = format->has_bos && r->bos ? strlen(r->bos) : 0;
    const char* opening = chat_between_(r->texts[0], plain, start, plain + start);
    format->opening = opening ? opening : strdup("");
    free(plain);
}

// Finds what the template has where the format would have a message of the system: its own message
// for a chat without one, and the texts around the chat's.
static void chat_find_system_(ChatFormat* format, ChatRendered_* r) {
    const JinjaChat chat = chat_asked_(r, &chat_marked_);
    char *with = chat_text_(format, &chat), *mark = strchr(with, 3);
    char* around = mark ? chat_between_(r->marked, with, (size_t)(mark - with), mark + 1) : NULL;
    const char* inside = around ? strchr(around, 3) : NULL;
    format->default_system = mark ? chat_between_(r->texts[0], with, (size_t)(mark - with), mark + 1) : NULL;
    if (inside && strlen(around) > 1 && format->layout->system == SYSTEM_OWN_TURN) {
        format->system_around[0] = strndup(around, (size_t)(inside - around));
        format->system_around[1] = strdup(inside + 1);
    }
    free(around);
    free(with);
}

// Returns how far a format makes the same texts.
static ChatKnown chat_compare_(const ChatFormat* format, ChatRendered_* r) {
    ChatKnown known = CHAT_KNOWN;
    for (int i = 0; i < CHAT_PROBES_; i++) {
        const JinjaChat chat = chat_asked_(r, &chat_probes_[i]);
        if (r->texts[i]) {
            char* text = chat_text_(format, &chat);
            const int is_same = strcmp(text, r->texts[i]) == 0;
            free(text);
            known = is_same                      ? known
                    : chat_probes_[i].is_prompt  ? CHAT_UNKNOWN
                    : known < CHAT_KNOWN_PROMPTS ? known
                                                 : CHAT_KNOWN_PROMPTS;
        }
    }
    return known;
}

// Compares a layout, with what templates may change of it.
static ChatKnown chat_try_layout_(ChatFormat* best, ChatKnown known, ChatWord word, ChatRendered_* r) {
    for (int variant = 0; variant < 12 && known < CHAT_KNOWN; variant++) {
        ChatFormat format = chat_format_of(word);
        const int trims[] = {format.trims, TRIM_NOTHING, TRIM_ALL};
        format.has_bos ^= variant & 1;
        format.has_tail = variant >> 1 & 1;
        format.trims = trims[variant >> 2];
        format.has_date = r->has_date;
        chat_find_opening_(&format, r);
        chat_find_system_(&format, r);
        const ChatKnown found = chat_compare_(&format, r);
        ChatFormat other = found > known ? *best : format;
        if (found > known) {
            *best = format;
            known = found;
        }
        chat_format_close(&other);
    }
    return known;
}

ChatKnown chat_recognize(ChatFormat* format, const char* text, const char* bos, const char* eos,
                         const char* date) {
    ChatRendered_ rendered = {{NULL}, NULL, bos, eos, date, 0};
    ChatKnown known = CHAT_UNKNOWN;
    memset(format, 0, sizeof(*format));
    const int count = chat_render_(&rendered, text), has_plain = rendered.texts[0] && rendered.texts[3];
    for (int word = CHAT_CHATML; count > 0 && has_plain && word < CHAT_WORDS_END; word++) {
        known = chat_try_layout_(format, known, (ChatWord)word, &rendered);
    }
    for (int i = 0; i < CHAT_PROBES_; i++) {
        free(rendered.texts[i]);
    }
    free(rendered.marked);
    return known;
}

// ---- templates ----

// Template that is being written.
typedef struct {
    const ChatFormat* format;
    const char *bos, *eos; // names of tokens; NULL: variables
    FILE* file;
} ChatPrinter_;

static void chat_print_string_(FILE* file, const char* text, size_t bytes) {
    fputc('\'', file);
    for (size_t i = 0; i < bytes; i++) {
        const char c = text[i];
        fputs(c == '\'' || c == '\\' ? "\\" : "", file);
        c == '\n' ? fputs("\\n", file) : fputc(c, file);
    }
    fputc('\'', file);
}

// Writes a text of the layout as an expression.
static void chat_print_text_(const ChatPrinter_* p, const char* text) {
    for (size_t n, at = 0; text[at]; at += n) {
        const int is_bos = text[at] == CHAT_BOS[0], is_token = is_bos || text[at] == CHAT_EOS[0];
        const char* name = is_bos ? p->bos : p->eos;
        n = is_token ? 1 : strcspn(text + at, CHAT_BOS CHAT_EOS);
        fputs(at ? " + " : "", p->file);
        if (is_token && !name) {
            fputs(is_bos ? "bos_token" : "eos_token", p->file);
        } else {
            chat_print_string_(p->file, is_token ? name : text + at, is_token ? strlen(name) : n);
        }
    }
}

// Writes {{ text }}, unless it is empty.
static void chat_print_layout_(const ChatPrinter_* p, const char* text) {
    if (text[0]) {
        fputs("{{ ", p->file);
        chat_print_text_(p, text);
        fputs(" }}", p->file);
    }
}

static void chat_print_content_(const ChatPrinter_* p, ChatRole role) {
    const ChatFormat* f = p->format;
    const int trims = f->trims >> role & 1 || (role == CHAT_USER && f->trims & TRIM_WHOLE_TURN);
    fprintf(p->file, "{{ m['content']%s }}", trims ? " | trim" : "");
}

static void chat_print_system_(const ChatPrinter_* p) {
    const ChatFormat* f = p->format;
    FILE* file = p->file;
    const ChatLayout* layout = f->layout;
    chat_print_layout_(p, layout->header[CHAT_SYSTEM]);
    chat_print_content_(p, CHAT_SYSTEM);
    chat_print_layout_(p, layout->end[CHAT_SYSTEM]);
    if (layout->system != SYSTEM_OPENS) {
        chat_print_layout_(p, layout->after);
        return;
    }
    fputs("{% if loop.last or loop.nextitem['role'] != 'user' %}", file);
    chat_print_layout_(p, layout->joint);
    fputs("{% endif %}", file);
}

static void chat_print_user_(const ChatPrinter_* p) {
    const ChatFormat* f = p->format;
    FILE* file = p->file;
    const ChatLayout* layout = f->layout;
    if (layout->system == SYSTEM_OPENS) {
        fputs("{% if not loop.first and loop.previtem['role'] == 'system' %}{{ ", file);
        fputs(f->trims & TRIM_WHOLE_TURN ? "(" : "", file);
        chat_print_text_(p, layout->joint);
        fputs(f->trims & TRIM_WHOLE_TURN ? " + m['content']).rstrip() }}{% else %}" : " }}", file);
        if (!(f->trims & TRIM_WHOLE_TURN)) {
            chat_print_content_(p, CHAT_USER);
            fputs("{% else %}", file);
        }
    }
    if (layout->opener) {
        fputs("{% if not loop.first and loop.previtem['role'] == 'assistant' %}{% generation %}", file);
        chat_print_layout_(p, layout->header[CHAT_USER]);
        fputs("{% endgeneration %}{% else %}", file);
    }
    chat_print_layout_(p, layout->header[CHAT_USER]);
    fputs(layout->opener ? "{% endif %}" : "", file);
    if (layout->system == SYSTEM_LAST) {
        fputs("{% if loop.index0 == ns.last %}{{ ns.system }}{% endif %}", file);
    }
    chat_print_content_(p, CHAT_USER);
    fputs(layout->system == SYSTEM_OPENS ? "{% endif %}" : "", file);
    chat_print_layout_(p, layout->end[CHAT_USER]);
    chat_print_layout_(p, layout->after);
}

static void chat_print_answer_(const ChatPrinter_* p) {
    const ChatFormat* f = p->format;
    FILE* file = p->file;
    const ChatLayout* layout = f->layout;
    chat_print_layout_(p, layout->header[CHAT_ASSISTANT]);
    fputs("{% generation %}", file);
    chat_print_layout_(p, layout->lead);
    chat_print_content_(p, CHAT_ASSISTANT);
    fputs(layout->past_end ? "{% if loop.last and not add_generation_prompt %}" : "", file);
    chat_print_layout_(p, layout->end[CHAT_ASSISTANT]);
    fputs(layout->past_end ? "{% endif %}" : "", file);
    fputs("{% endgeneration %}", file);
    if (layout->past_end) {
        fputs("{% if not loop.last or add_generation_prompt %}", file);
        chat_print_layout_(p, layout->past_end);
        fputs("{% endif %}", file);
    }
    chat_print_layout_(p, layout->after);
}

// Writes the turn that a chat starts with, on the day when the template is rendered.
static void chat_print_opening_(const ChatPrinter_* p) {
    const ChatFormat* f = p->format;
    if (f->opening || !f->layout->opening[0]) {
        chat_print_layout_(p, f->opening ? f->opening : "");
        return;
    }
    chat_print_layout_(p, f->layout->opening[0]);
    fputs("{{ strftime_now('%Y-%m-%d') }}", p->file);
    chat_print_layout_(p, f->layout->opening[1]);
}

// Writes what finds the last message of the user, and the system's messages before it.
static void chat_print_late_(const ChatPrinter_* p) {
    const ChatFormat* f = p->format;
    FILE* file = p->file;
    fputs("{% set ns = namespace(last=-1, system='') %}{% for m in messages %}{% if m['role'] == 'user' %}"
          "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
          "{% if m['role'] == 'system' and loop.index0 < ns.last %}{% set ns.system = ns.system + "
          "m['content'] + ",
          file);
    chat_print_text_(p, f->layout->joint);
    fputs(" %}{% endif %}{% endfor %}", file);
}

void chat_print_template(const ChatFormat* f, const char* bos, const char* eos, FILE* file) {
    const ChatPrinter_ p = {f, bos, eos, file};
    const int is_late = f->layout->system == SYSTEM_LAST;
    if (is_late) {
        chat_print_late_(&p);
    }
    chat_print_layout_(&p, f->has_bos ? CHAT_BOS : "");
    chat_print_layout_(&p, f->layout->start ? f->layout->start : "");
    chat_print_opening_(&p);
    fputs("{% for m in messages %}{% if m['role'] == 'system' %}", file);
    fputs(is_late ? "{% if loop.index0 > ns.last %}" : "", file);
    chat_print_system_(&p);
    fputs(is_late ? "{% endif %}" : "", file);
    fputs("{% elif m['role'] == 'assistant' %}", file);
    chat_print_answer_(&p);
    fputs("{% else %}", file);
    chat_print_user_(&p);
    fputs("{% endif %}{% endfor %}{% if add_generation_prompt %}", file);
    chat_print_layout_(&p, f->layout->header[CHAT_ASSISTANT]);
    fputs("{% endif %}", file);
}

#endif // CHAT_FORMAT_IMPLEMENTATION

#endif
