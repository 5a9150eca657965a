// test_chat_formats.c -- templates are recognized, and the tokens of odd chats are what
// transformers makes of them (dev/ref/make_chat_format_fixtures.py); a format that is written as a
// template renders the text that is encoded.
#include <sys/stat.h>

#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/text_buffer.h"
#include "llmc/tokenizer/bpe_encode.h"
#include "llmc/tokenizer/bpe_files.h"
#include "llmc/tokenizer/bpe_parts.h"
#include "llmc/tokenizer/chat_format.h"
#include "llmc/tokenizer/chat_marks.h"
#include "llmc/tokenizer/date.h"
#include "llmc/tokenizer/jinja.h"
#include "llmc/tokenizer/model_card.h"
#include "dev/test/lib/test.h"

#define FORMATS "dev/ref/fixtures/chat_formats"
#define DATE "2024-02-09" // of the fixtures
enum { CHATS = 300, MESSAGES = 16, ROOM = 1 << 16, TEMPLATES = 32 };

typedef struct {
    ChatMessage messages[MESSAGES];
    int count;
} Chat;

// Reads {"messages": [...]}, whose texts stay in the line.
static Chat chat_of(char* line) {
    char error[ERROR_BYTES];
    const char *key, *text;
    size_t length;
    Chat chat = {.count = 0};
    JsonReader r = json_reader("chats.jsonl", line, strlen(line), error);
    CHECK(json_take(&r, '{') && json_member(&r, JSON_FIRST, &key) && json_take(&r, '['), "%s", error);
    while (json_element(&r, chat.count ? JSON_NEXT : JSON_FIRST) > 0) {
        ChatMessage* m = &chat.messages[chat.count++];
        CHECK(json_take(&r, '{') && json_member(&r, JSON_FIRST, &key) && json_text(&r, &text, &length), "%s",
              error);
        m->role = (ChatRole)chat_role(text, length);
        CHECK(json_member(&r, JSON_NEXT, &key) && json_text(&r, &m->text, &m->bytes) && json_take(&r, '}'),
              "%s", error);
    }
    return chat;
}

// All chats of the fixtures.
typedef struct {
    char* text;
    Chat chats[CHATS];
} Chats;

static Chats* chats_open(void) {
    Chats* all = (Chats*)check_alloc(1, sizeof(Chats), "chats");
    all->text = test_read_text(FORMATS "/chats.jsonl");
    char* line = all->text;
    for (int i = 0; i < CHATS; i++) {
        char* end = strchr(line, '\n');
        CHECK(end, "%d chats", i);
        *end = '\0';
        all->chats[i] = chat_of(line);
        line = end + 1;
    }
    return all;
}

static void chats_close(Chats* all) {
    free(all->text);
    free(all);
}

typedef struct {
    const char *name, *format, *text;
} Template;

// Reads the templates, whose texts stay in `json`.
static int templates_of(char* json, Template* templates) {
    char error[ERROR_BYTES];
    const char* key;
    size_t length;
    int count = 0;
    JsonReader r = json_reader("templates.json", json, strlen(json), error);
    CHECK(json_take(&r, '{'), "%s", error);
    for (; json_text_member(&r, count ? JSON_NEXT : JSON_FIRST, &templates[count].name, &length) > 0;
         count++) {
        Template* t = &templates[count];
        CHECK(count < TEMPLATES && json_take(&r, '{') && json_member(&r, JSON_FIRST, &key) &&
                  json_text(&r, &t->format, &length) && json_member(&r, JSON_NEXT, &key) &&
                  json_text(&r, &t->text, &length) && json_take(&r, '}'),
              "%s", error);
    }
    return count;
}

// Opens a vocabulary with a template; NULL: none.
static void open_with(Bpe* bpe, const char* vocabulary, const char* text) {
    char path[256], config[256];
    mkdir(test_path("model"), 0777);
    snprintf(path, sizeof(path), FORMATS "/%s.json", vocabulary);
    char* tokenizer = test_read_text(path);
    test_write("model/tokenizer.json", tokenizer, strlen(tokenizer));
    free(tokenizer);
    snprintf(config, sizeof(config), "{\"bos_token\": \"%s\", \"eos_token\": \"</s>\"}",
             strcmp(vocabulary, "llama3") == 0 ? "<|begin_of_text|>" : "<|endoftext|>");
    test_write("model/tokenizer_config.json", config, strlen(config));
    remove(test_path("model/chat_template.jinja"));
    if (text) {
        test_write("model/chat_template.jinja", text, strlen(text));
    }
    bpe_open(bpe, test_path("model"));
    bpe_date_chats(bpe, DATE);
}

// Returns the checksum of the tokens after the first one, and of which are learned.
static uint32_t checksum_of(const int* ids, size_t count) {
    uint32_t sum = 0x811C9DC5;
    for (size_t i = 1; i < count; i++) {
        const uint32_t is_learned = !(ids[i - 1] & TOKEN_NO_TARGET),
                       word = (uint32_t)(ids[i] & ~TOKEN_NO_TARGET) | is_learned << 31;
        for (int byte = 0; byte < 4; byte++) {
            sum = (sum ^ (word >> 8 * byte & 255)) * 0x01000193;
        }
    }
    return sum;
}

static size_t encode(const ChatMarks* marks, BpeEncoder* encoder, const Chat* chat, int* ids) {
    size_t bytes = 0;
    for (int i = 0; i < chat->count; i++) {
        bytes += chat->messages[i].bytes;
    }
    CHECK(1 + chat_most_ids(marks, encoder->bpe, bytes, (size_t)chat->count) <= ROOM, "a chat is too long");
    ids[0] = encoder->bpe->eot;
    const size_t count = chat_encode(marks, encoder, chat->messages, (size_t)chat->count, CHAT_WHOLE, ids);
    EXPECT(count <= 1 + chat_most_ids(marks, encoder->bpe, bytes, (size_t)chat->count), "%zu ids", count);
    return count;
}

// Compares the chats in a template with a line of checksums.
static void compare_template(const char* vocabulary, const Template* t, const Chats* all, char** sums) {
    Bpe bpe;
    BpeEncoder encoder;
    ChatMarks marks;
    int wrong = 0, first = -1, *ids = (int*)check_alloc(ROOM, sizeof(int), "ids");
    open_with(&bpe, vocabulary, t->text);
    EXPECT(bpe.card.chat_known == CHAT_KNOWN, "%s: %s is not recognized", vocabulary, t->name);
    if (bpe.card.chat.layout) {
        const char* word = chat_word(chat_format_word(&bpe.card.chat));
        EXPECT(strcmp(word, t->format) == 0, "%s: %s is taken for %s", vocabulary, t->name, word);
    }
    bpe_encoder_open(&encoder, &bpe);
    chat_marks_open(&marks, &bpe);
    for (int i = 0; i < CHATS; i++) {
        const size_t count = encode(&marks, &encoder, &all->chats[i], ids);
        if (strtoul(*sums, sums, 16) != checksum_of(ids, count)) {
            first = wrong++ ? first : i;
        }
    }
    EXPECT(wrong == 0, "%s: %s: %d chats differ, the first is number %d", vocabulary, t->name, wrong, first);
    bpe_encoder_close(&encoder);
    bpe_close(&bpe);
    free(ids);
}

TEST(tokens_of_templates) {
    static const char* const vocabularies[] = {"qwen2", "llama3", "smollm2"};
    Template templates[TEMPLATES];
    char path[256], *json = test_read_text(FORMATS "/templates.json");
    const int count = templates_of(json, templates);
    Chats* all = chats_open();
    EXPECT(count >= CHAT_FORMATS, "%d templates", count);
    for (int v = 0; v < 3; v++) {
        snprintf(path, sizeof(path), FORMATS "/expected_%s.txt", vocabularies[v]);
        char *text = test_read_text(path), *sums = text;
        for (int i = 0; i < count; i++) {
            compare_template(vocabularies[v], &templates[i], all, &sums);
        }
        free(text);
    }
    chats_close(all);
    free(json);
}

// Returns what a template makes of a chat.
static char* rendered(const char* text, const Chat* chat, const char* bos) {
    static const char* const roles[] = {"system", "user", "assistant"};
    JinjaMessage messages[MESSAGES];
    char error[ERROR_BYTES], *contents[MESSAGES];
    for (int i = 0; i < chat->count; i++) {
        contents[i] = strndup(chat->messages[i].text, chat->messages[i].bytes);
        messages[i] = (JinjaMessage){roles[chat->messages[i].role], contents[i]};
    }
    const JinjaChat all = {messages, chat->count, bos, "</s>", 0, DATE, NULL};
    char* made = jinja_render(text, &all, error);
    EXPECT(made, "%s", error);
    for (int i = 0; i < chat->count; i++) {
        free(contents[i]);
    }
    return made ? made : strdup("");
}

// Returns the text of ids, with the names of tokens.
static char* decoded(const Bpe* bpe, const int* ids, size_t count) {
    TextBuffer text;
    text_buffer_open(&text, "ids");
    for (size_t i = 0; i < count; i++) {
        int length;
        const char* token = bpe_token(bpe, ids[i] & ~TOKEN_NO_TARGET, &length);
        fwrite(token, 1, (size_t)length, text.file);
    }
    return text_buffer_close(&text);
}

// A format without a template is written as one, which renders the text of the tokens and is
// recognized; its only end of an answer is found.
TEST(written_templates) {
    Chats* all = chats_open();
    int* ids = (int*)check_alloc(ROOM, sizeof(int), "ids");
    for (int word = CHAT_CHATML; word < CHAT_WORDS_END; word++) {
        Bpe bpe;
        BpeEncoder encoder;
        ChatMarks marks;
        ChatFormat again;
        open_with(&bpe, "llama3", NULL);
        EXPECT(!chat_choose(&bpe, (ChatWord)word), "there was no template");
        bpe_encoder_open(&encoder, &bpe);
        chat_marks_open(&marks, &bpe);
        EXPECT(marks.turn_end >= 0 && !marks.is_text, "%s", chat_word(word));
        char* text = chat_new_template(&marks, &bpe);
        EXPECT(strstr(text, "{% generation %}"), "%s", text);
        int wrong = 0;
        for (int i = 0; i < CHATS; i++) {
            const size_t count = encode(&marks, &encoder, &all->chats[i], ids);
            char* wanted = rendered(text, &all->chats[i], "<|begin_of_text|>");
            const int has_start = strncmp(wanted, "<|begin_of_text|>", 17) == 0;
            char* got = decoded(&bpe, ids + !has_start, count - !has_start);
            wrong += strcmp(got, wanted) != 0;
            if (strcmp(got, wanted) != 0 && wrong == 1) {
                EXPECT(0, "%s, chat %d:\n%s\nwanted\n%s", chat_word(word), i, got, wanted);
            }
            free(got);
            free(wanted);
        }
        EXPECT(wrong == 0, "%s: %d chats", chat_word(word), wrong);
        EXPECT(chat_recognize(&again, text, "<|begin_of_text|>", "</s>", DATE) == CHAT_KNOWN &&
                   (int)chat_format_word(&again) == word && !again.default_system,
               "%s", chat_word(word));
        chat_format_close(&again);
        free(text);
        bpe_encoder_close(&encoder);
        bpe_close(&bpe);
    }
    free(ids);
    chats_close(all);
}

#define TURN "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
#define ASKS "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

// Text that a template adds to answers makes it unknown for training, not for talking; a template
// of another format, or one that cannot be rendered, is unknown.
TEST(unknown_templates) {
    static const struct {
        const char* text;
        ChatKnown known;
    } cases[] = {
        {"{% for m in messages %}" TURN "{% endfor %}" ASKS, CHAT_KNOWN},
        {"{% for m in messages %}{% if m.role == 'assistant' and loop.last %}{{ "
         "'<|im_start|>assistant\\n<think>\\n\\n"
         "</think>\\n\\n' + m.content + '<|im_end|>\\n' }}{% else %}" TURN "{% endif %}{% endfor %}" ASKS,
         CHAT_KNOWN_PROMPTS},
        {"{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}", CHAT_UNKNOWN},
        {"{{ strftime_now('%d') }}{% for m in messages %}" TURN "{% endfor %}" ASKS, CHAT_UNKNOWN},
        {"{% for m in messages %}" TURN, CHAT_UNKNOWN},
        {"", CHAT_UNKNOWN},
        {"{% if tools %}{{ tools | tojson(indent=2) }}{% macro f(a, b=1) %}{{ a }}{% endmacro %}{% endif %}"
         "{% for m in messages %}" TURN "{% endfor %}" ASKS,
         CHAT_KNOWN},
        {"{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif "
         "%}" TURN "{% endfor %}" ASKS,
         CHAT_KNOWN},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Bpe bpe;
        char error[ERROR_BYTES] = "";
        open_with(&bpe, "qwen2", cases[i].text);
        EXPECT(bpe.card.chat_known == cases[i].known, "template %zu: %d", i, (int)bpe.card.chat_known);
        const int can_train = chat_check(&bpe, "--chat chatml", error);
        EXPECT(can_train == (cases[i].known == CHAT_KNOWN), "template %zu: %s", i, error);
        EXPECT(can_train || strstr(error, "--chat chatml"), "%s", error);
        EXPECT(chat_choose(&bpe, CHAT_CHATML) == !can_train, "template %zu", i);
        EXPECT(chat_check(&bpe, "", error), "%s", error);
        bpe_close(&bpe);
    }
}

// A template's date is the one that was asked for; without a date it keeps its own text.
TEST(dates) {
    static const char dated[] = "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\n' + "
                                "strftime_now('%d %b %Y') + '<|im_end|>\\n' }}{% endif %}"
                                "{% for m in messages %}" TURN "{% endfor %}" ASKS;
    Bpe bpe;
    ChatMarks marks;
    open_with(&bpe, "qwen2", dated);
    EXPECT(bpe.card.chat_known == CHAT_KNOWN && bpe.card.chat.has_date, "%d", (int)bpe.card.chat_known);
    EXPECT(strcmp(bpe.card.chat.default_system, "09 Feb 2024") == 0, "%s", bpe.card.chat.default_system);
    chat_marks_open(&marks, &bpe);
    const uint64_t before = chat_signature(&marks);
    bpe_date_chats(&bpe, "2025-12-31");
    EXPECT(strcmp(bpe.card.chat.default_system, "31 Dec 2025") == 0, "%s", bpe.card.chat.default_system);
    chat_marks_open(&marks, &bpe);
    EXPECT(chat_signature(&marks) != before, "the tokens of two dates have one checksum");
    chat_choose(&bpe, CHAT_HARMONY);
    EXPECT(bpe.card.chat.has_date && strcmp(bpe.card.chat.date, "2025-12-31") == 0, "%s", bpe.card.chat.date);
    chat_marks_open(&marks, &bpe);
    const uint64_t last = chat_signature(&marks);
    bpe_date_chats(&bpe, DATE);
    chat_marks_open(&marks, &bpe);
    EXPECT(chat_signature(&marks) != last, "the tokens of two dates of a chosen format have one checksum");
    chat_choose(&bpe, CHAT_PHI4);
    bpe_date_chats(&bpe, "2025-12-31");
    EXPECT(chat_format_word(&bpe.card.chat) == CHAT_PHI4 && !bpe.card.chat.has_date, "a chosen format stays");
    bpe_close(&bpe);
    static const char* const none[] = {"", "2024-02-30", "2024-2-1", "2024-02-011", "today", "2024-13-01"};
    for (size_t i = 0; i < sizeof(none) / sizeof(none[0]); i++) {
        EXPECT(!date_is(none[i]), "%s is no date", none[i]);
    }
    EXPECT(date_is("2024-02-29"), "a leap year");
}

// Without a template, the marks of a vocabulary decide.
TEST(format_of_vocabulary) {
    Bpe bpe;
    ChatMarks marks;
    bpe_open(&bpe, "dev/ref/fixtures/tokenizers/olmo.json");
    chat_marks_open(&marks, &bpe);
    EXPECT(chat_format_word(&marks.format) == CHAT_CHATML && marks.is_text && marks.turn_end == -1, "");
    bpe_close(&bpe);
    open_with(&bpe, "smollm2", NULL);
    chat_marks_open(&marks, &bpe);
    EXPECT(chat_format_word(&marks.format) == CHAT_CHATML && !marks.is_text && marks.turn_end >= 0, "");
    bpe_close(&bpe);
    open_with(&bpe, "qwen2", NULL);
    chat_marks_open(&marks, &bpe);
    EXPECT(chat_format_word(&marks.format) == CHAT_HARMONY && !marks.is_text, "the most marks");
    EXPECT(chat_has_date(&bpe) && strcmp(marks.format.date, DATE) == 0, "%s", marks.format.date);
    bpe_close(&bpe);
    bpe_open(&bpe, "dev/ref/fixtures/chats/llama3.json");
    chat_marks_open(&marks, &bpe);
    EXPECT(chat_format_word(&marks.format) == CHAT_LLAMA3 &&
               marks.turn_end == bpe_find_added(&bpe, "<|eot_id|>"),
           "");
    bpe_close(&bpe);
}

// Expressions and blanks as Jinja has them in transformers.
TEST(jinja) {
    static const char* const cases[][2] = {
        {"a\n", "a"},
        {"  {% if true %}\n  x\n  {% endif %}\ny", "  x\ny"},
        {"a {%- if 1 == 1 -%} b {%- endif -%} c", "abc"},
        {"{# note #}\n{{ 'a' }}\n{{ \"b\" -}}\n c", "a\nbc"},
        {"{{ messages[0]['role'] ~ messages[-1].role ~ messages | length }}", "userassistant2"},
        {"{% for m in messages[1:] %}{{ loop.index0 }}{{ m.content }}{{ loop.last }}{% endfor %}",
         "0 b True"},
        {"{% for m in messages[::-1] %}{{ m['content'].strip() + ',' }}{% endfor %}", "b,a,"},
        {"{{ 'x' if tools is defined and tools is not none else 'y' }}", "y"},
        {"{% set ns = namespace(n=1, t='') %}{% for m in messages %}{% set ns.n = ns.n + 2 %}{% endfor %}{{ "
         "ns.n }}",
         "5"},
        {"{% set x = 1 %}{% for m in messages %}{% set x = 9 %}{% endfor %}{{ x }}", "1"},
        {"{{ 'a-b-c'.split('-')[-1] ~ ('b' in 'abc') ~ ('user' in messages[0].role) ~ (3 % 2 == 1) }}",
         "cTrueTrueTrue"},
        {"{{ not messages is undefined and (nothing | default('d')) }}", "d"},
        {"{% if a %}1{% elif messages[0].role != 'user' %}2{% else %}3{% endif %}", "3"},
        {"{{ ' \\t\\u00e9 '.strip() + '\\n' + 'xxaxx'.strip('x') + 'ab'.upper() }}", "\u00e9\naAB"},
        {"{{ (messages[0].content.startswith('a') and 'y') or 'n' }}{{ bos_token }}", "y<s>"},
        {"{% generation %}g{% endgeneration %}{{ eos_token is defined }}", "gFalse"},
        {"{{ strftime_now('%A, %d %b %Y, %-d %B %%') }}", "Thursday, 01 Feb 2024, 1 February %"},
        {"{{ strftime_now is defined }}{{ strftime_now('') }}", "True"},
        {"{{ strftime_now('%d %H') }}", NULL},
        {"{{ strftime_now('%') }}", NULL},
        {"{{ strftime_now() }}", ""},
        {"{% macro f(a, b='B', c='C') -%}\n {{ a ~ b }}{% if c %}{{ c }}{% endif %}\n{%- endmacro %}{{ "
         "f('x') }} "
         "{{ f('y', c=messages[0].role, b=f(1, 2, '')) }}{{ a }}",
         "xBC y12user"},
        {"{% macro f(n) %}{{ n }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", NULL},
        {"{% macro f(n) %}{{ n }}{{ f(1) }}", NULL},
        {"{{ 'a' + 1 }}", NULL},
        {"{{ unknown() }}", NULL},
        {"{% for m in messages %}", NULL},
        {"{{ 'a", NULL},
        {"{% include 'x' %}", NULL},
        {"{% for a in messages %}{% for b in messages %}{% for c in messages %}{{ 1 }}{% endfor %}{% endfor "
         "%}{% endfor %}",
         "11111111"},
    };
    static const JinjaMessage messages[] = {{"user", "a"}, {"assistant", " b "}};
    const JinjaChat chat = {messages, 2, "<s>", NULL, 0, "2024-02-01", NULL};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char error[ERROR_BYTES] = "", *text = jinja_render(cases[i][0], &chat, error);
        EXPECT(cases[i][1] ? text && strcmp(text, cases[i][1]) == 0 : !text && error[0], "%s: \"%s\" %s",
               cases[i][0], text ? text : "", error);
        free(text);
    }
}

// No template makes the renderer run away, whatever its bytes.
TEST(jinja_of_any_bytes) {
    static const JinjaMessage messages[] = {{"user", "a"}, {"assistant", "b"}};
    const JinjaChat chat = {messages, 2, "<s>", "</s>", 1, NULL, NULL};
    char *json = test_read_text(FORMATS "/templates.json"), error[ERROR_BYTES], nested[4096];
    Template templates[TEMPLATES];
    const int count = templates_of(json, templates);
    unsigned random = 1;
    for (int i = 0; i < 3000; i++) {
        char* text = strdup(templates[i % count].text);
        const size_t n = strlen(text);
        for (int change = 0; change < 1 + i % 4; change++) {
            random = random * 1664525 + 1013904223;
            text[(random >> 8) % n] = "{}%'\"()[]|.-+=a1 \n#\xC3"[(random >> 3) % 20];
        }
        free(jinja_render(text, &chat, error));
        text[n / 2] = '\0';
        free(jinja_render(text, &chat, error));
        free(text);
    }
    for (int i = 0; i < 2; i++) {
        memset(nested, i ? '[' : '(', sizeof(nested));
        memcpy(nested, "{{ ", 3);
        nested[sizeof(nested) - 1] = '\0';
        EXPECT(!jinja_render(nested, &chat, error), "nested");
    }
    free(json);
}
