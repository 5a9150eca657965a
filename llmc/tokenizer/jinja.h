/*
jinja.h -- renders the chat templates that models bring, to find out which format they write.

    JinjaChat chat = {messages, 2, "<s>", "</s>", 1};
    char* text = jinja_render(template_text, &chat, error); // NULL: with the reason in `error`

The part of Jinja that such templates use, set up as transformers does (trim_blocks, lstrip_blocks):
text, {{ }}, {# #}; if, for, set, macro, generation; names, literals, operators, slices, the usual
filters, tests and methods of strings, namespace(), raise_exception(), and strftime_now() of a date.
What is not rendered may have anything else, like tools; where it is rendered, that is an error, as
is the time of day.
*/
#ifndef LLMC_JINJA_H
#define LLMC_JINJA_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const char *role, *content;
} JinjaMessage;

typedef struct {
    const JinjaMessage* messages;
    int count;
    const char *bos_token, *eos_token; // NULL: undefined
    int add_generation_prompt;
    const char* date; // YYYY-MM-DD, of strftime_now(); NULL: that is undefined
    int* has_date;    // set to 1 if the text has the date; may be NULL
} JinjaChat;

// Returns the text of a chat, which the caller frees; NULL with the reason in `error` (of
// ERROR_BYTES).
char* jinja_render(const char* text, const JinjaChat* chat, char* error);

// Removes blanks from both ends, as Python's strip() does.
void jinja_strip(const char** text, size_t* length);

#ifdef __cplusplus
}
#endif

#ifdef JINJA_IMPLEMENTATION

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/text_buffer.h"
#include "llmc/tokenizer/jinja_values.h"

void jinja_strip(const char** text, size_t* length) {
    jinja_strip_left_(text, length);
    jinja_strip_right_(*text, length);
}

// ---- the text of a tag ----

static int jinja_is_name_(char c) { return isalnum((unsigned char)c) || c == '_'; }

// Returns the next character that is not a blank; 0 at the end.
static char jinja_peek_(Jinja_* j) {
    while (j->at < j->bytes && isspace((unsigned char)j->text[j->at])) {
        j->at++;
    }
    return j->at < j->bytes ? j->text[j->at] : 0;
}

// True if a tag ends here: -%}, %}, -}} or }}.
static int jinja_ends_(Jinja_* j) {
    const char first = jinja_peek_(j), *at = j->text + j->at + (first == '-' && j->at + 1 < j->bytes);
    return strncmp(at, "%}", 2) == 0 || (first == '-' && strncmp(at, "}}", 2) == 0);
}

// Steps over a word or an operator if it comes next.
static int jinja_take_(Jinja_* j, const char* word) {
    const size_t n = strlen(word);
    jinja_peek_(j);
    if (j->failed || j->bytes - j->at < n || memcmp(j->text + j->at, word, n) != 0 ||
        (jinja_is_name_(word[0]) && jinja_is_name_(j->text[j->at + n]))) {
        return 0;
    }
    j->at += n;
    return 1;
}

static void jinja_expect_(Jinja_* j, const char* word) {
    char what[64];
    if (!jinja_take_(j, word)) {
        snprintf(what, sizeof(what), "wanted %s", word);
        jinja_fail_(j, what);
    }
}

// Reads a name; "" if there is none.
static JinjaName_ jinja_name_(Jinja_* j) {
    JinjaName_ name = {""};
    size_t n = 0;
    jinja_peek_(j);
    while (j->at < j->bytes && jinja_is_name_(j->text[j->at])) {
        if (n + 1 < sizeof(name.text)) {
            name.text[n++] = j->text[j->at];
        }
        j->at++;
    }
    return name;
}

// Reads the character after a backslash into `to`. Returns its bytes.
static size_t jinja_escape_(Jinja_* j, char* to) {
    const char c = j->text[j->at++], *plain = "nrtbf0", *means = "\n\r\t\b\f";
    const char* found = c ? strchr(plain, c) : NULL;
    if (c == 'u' || c == 'x') {
        char hex[5] = "";
        const size_t n = c == 'u' ? 4 : 2;
        snprintf(hex, sizeof(hex), "%.*s", (int)n, j->text + j->at);
        const unsigned long code = strtoul(hex, NULL, 16);
        j->at += strlen(hex) < n ? strlen(hex) : n;
        if (code >= 0x800) {
            to[0] = (char)(0xE0 | code >> 12);
            to[1] = (char)(0x80 | (code >> 6 & 63));
            to[2] = (char)(0x80 | (code & 63));
            return 3;
        }
        to[0] = (char)(code < 0x80 ? code : 0xC0 | code >> 6);
        to[1] = (char)(0x80 | (code & 63));
        return code < 0x80 ? 1 : 2;
    }
    to[0] = found ? means[found - plain] : c;
    return 1;
}

static JinjaValue_ jinja_literal_(Jinja_* j) {
    const char quote = j->text[j->at++];
    const char* end = j->text + j->bytes;
    char* text = (char*)jinja_alloc_(j, (size_t)(end - (j->text + j->at)));
    size_t n = 0;
    while (!j->failed && j->at < j->bytes && j->text[j->at] != quote) {
        if (j->text[j->at] == '\\' && j->at + 1 < j->bytes) {
            j->at++;
            n += jinja_escape_(j, text + n);
        } else {
            text[n++] = j->text[j->at++];
        }
    }
    if (j->at++ >= j->bytes) {
        jinja_fail_(j, "a string has no end");
    }
    return jinja_text_(text, n);
}

// ---- functions, filters, tests ----

static JinjaValue_ jinja_expression_(Jinja_* j);

// Reads the arguments of a call, after its parenthesis.
static JinjaArgs_ jinja_args_(Jinja_* j) {
    JinjaArgs_ args;
    memset(&args, 0, sizeof(args));
    while (jinja_step_(j) && !jinja_take_(j, ")")) {
        const size_t begin = j->at;
        JinjaName_ name = jinja_name_(j);
        if (!name.text[0] || jinja_peek_(j) != '=' || j->text[j->at + 1] == '=') {
            j->at = begin;
            name.text[0] = '\0';
        } else {
            j->at++;
        }
        const JinjaValue_ value = jinja_expression_(j);
        if (args.count < JINJA_ARGS_) {
            args.names[args.count] = name;
            args.values[args.count++] = value;
        }
        if (jinja_peek_(j) != ')') {
            jinja_expect_(j, ",");
        }
    }
    return args;
}

static JinjaValue_ jinja_split_(Jinja_* j, JinjaValue_ text, JinjaValue_ by) {
    const JinjaValue_ list = jinja_items_(j, JINJA_LIST_);
    const char *at = text.text, *end = text.text + text.length;
    for (const char* found; !j->failed; at = found + by.length) {
        found = by.length ? (const char*)memmem(at, (size_t)(end - at), by.text, by.length) : NULL;
        jinja_add_(j, list.items, NULL, jinja_text_(at, (size_t)((found ? found : end) - at)));
        if (!found) {
            break;
        }
    }
    return list;
}

static JinjaValue_ jinja_cased_(Jinja_* j, JinjaValue_ v, int (*of)(int)) {
    char* text = (char*)jinja_alloc_(j, v.length);
    for (size_t i = 0; i < v.length && !j->failed; i++) {
        text[i] = (unsigned char)v.text[i] < 0x80 ? (char)of(v.text[i]) : v.text[i];
    }
    return jinja_text_(text, v.length);
}

static void jinja_close_(Jinja_* j, const char* end);
static void jinja_body_(Jinja_* j, const char* ends, JinjaName_* stop);

// Sets the parameters of a macro, which come next.
static void jinja_parameters_(Jinja_* j, const JinjaArgs_* args) {
    jinja_expect_(j, "(");
    for (int i = 0; jinja_step_(j) && !jinja_take_(j, ")"); i++) {
        const JinjaName_ name = jinja_name_(j);
        JinjaValue_ value = jinja_take_(j, "=") ? jinja_expression_(j) : jinja_undefined_;
        for (int k = 0; k < args->count; k++) {
            const char* given = args->names[k].text;
            value = given[0] ? (strcmp(given, name.text) == 0 ? args->values[k] : value)
                    : k == i ? args->values[k]
                             : value;
        }
        jinja_set_(j, &j->scope, name.text, value);
        if (jinja_peek_(j) != ')') {
            jinja_expect_(j, ",");
        }
    }
}

// Returns the text of a macro.
static JinjaValue_ jinja_macro_(Jinja_* j, size_t parameters, const JinjaArgs_* args) {
    const size_t at = j->at, known = j->scope.count;
    const int starts_line = j->starts_line;
    FILE* out = j->out;
    TextBuffer own;
    JinjaName_ stop;
    text_buffer_open(&own, "a macro");
    j->out = own.file;
    j->at = parameters;
    jinja_parameters_(j, args);
    jinja_close_(j, "%}");
    jinja_body_(j, " endmacro ", &stop);
    char* text = text_buffer_close(&own);
    const JinjaValue_ made = jinja_text_(jinja_copy_(j, text, own.bytes), own.bytes);
    free(text);
    j->out = out;
    j->at = at;
    j->starts_line = starts_line;
    j->scope.count = known;
    return j->failed ? jinja_undefined_ : made;
}

// Calls a function, or a macro.
static JinjaValue_ jinja_call_(Jinja_* j, const char* name, const JinjaArgs_* args) {
    if (j->skip) {
        return jinja_undefined_;
    }
    const JinjaValue_* macro = jinja_find_(&j->scope, name, strlen(name));
    if (macro && macro->kind == JINJA_MACRO_) {
        return jinja_macro_(j, (size_t)macro->number, args);
    }
    if (strcmp(name, "namespace") == 0 || strcmp(name, "dict") == 0) {
        const JinjaValue_ map = jinja_items_(j, JINJA_MAP_);
        for (int i = 0; i < args->count; i++) {
            jinja_set_(j, map.items, args->names[i].text, args->values[i]);
        }
        return map;
    }
    if (strcmp(name, "strftime_now") == 0 && j->date) {
        return jinja_date_(j, args);
    }
    jinja_fail_(j, strcmp(name, "raise_exception") == 0 ? "refuses the chat"
                                                        : "calls a function that is not known");
    return jinja_undefined_;
}

static int jinja_is_one_of_(const char* name, const char* one, const char* other) {
    return strcmp(name, one) == 0 || strcmp(name, other) == 0;
}

// Applies a method or a filter to a text, and sets *v to the result. Returns 0 if none has this
// name.
static int jinja_text_changed_(Jinja_* j, JinjaValue_* v, const char* name, const JinjaArgs_* args) {
    const JinjaValue_ text = *v, first = args->count > 0 ? args->values[0] : jinja_undefined_;
    const int has_text = first.kind == JINJA_TEXT_, is_short = first.length <= text.length;
    const int side = jinja_is_one_of_(name, "strip", "trim") ? 3
                     : strcmp(name, "lstrip") == 0           ? 1
                     : strcmp(name, "rstrip") == 0           ? 2
                                                             : 0;
    if (side) {
        *v = jinja_stripped_(text, args, side);
    } else if (jinja_is_one_of_(name, "upper", "lower")) {
        *v = jinja_cased_(j, text, name[0] == 'u' ? toupper : tolower);
    } else if (strcmp(name, "startswith") == 0) {
        *v = jinja_bool_(has_text && is_short && memcmp(text.text, first.text, first.length) == 0);
    } else if (strcmp(name, "endswith") == 0 && has_text) {
        *v = jinja_bool_(is_short &&
                         memcmp(text.text + text.length - first.length, first.text, first.length) == 0);
    } else if (strcmp(name, "split") == 0 && has_text) {
        *v = jinja_split_(j, text, first);
    } else {
        return 0;
    }
    return 1;
}

// Calls a method of a string or a map.
static JinjaValue_ jinja_method_(Jinja_* j, JinjaValue_ v, const char* name, const JinjaArgs_* args) {
    const JinjaValue_ first = args->count > 0 ? args->values[0] : jinja_undefined_;
    if (j->skip) {
        return jinja_undefined_;
    }
    if (v.kind == JINJA_MAP_ && strcmp(name, "get") == 0 && first.kind == JINJA_TEXT_) {
        const JinjaValue_* found = jinja_find_(v.items, first.text, first.length);
        return found ? *found : args->count > 1 ? args->values[1] : jinja_number_(JINJA_NONE_, 0);
    }
    if (v.kind != JINJA_TEXT_ || !jinja_text_changed_(j, &v, name, args)) {
        jinja_fail_(j, "calls a method that is not known");
    }
    return v;
}

static JinjaValue_ jinja_filter_(Jinja_* j, JinjaValue_ v, const char* name, const JinjaArgs_* args) {
    const int is_items = v.kind == JINJA_LIST_ || v.kind == JINJA_MAP_;
    if (j->skip) {
        return jinja_undefined_;
    }
    if (jinja_is_one_of_(name, "default", "d")) {
        const int is_empty = args->count > 1 && jinja_is_true_(args->values[1]) && !jinja_is_true_(v);
        return (v.kind == JINJA_UNDEFINED_ || is_empty) && args->count > 0 ? args->values[0] : v;
    }
    if (jinja_is_one_of_(name, "length", "count") && (is_items || v.kind == JINJA_TEXT_)) {
        long characters = 0;
        for (size_t i = 0; i < v.length; i++) {
            characters += ((unsigned char)v.text[i] & 0xC0) != 0x80;
        }
        return jinja_number_(JINJA_NUMBER_, is_items ? (long)v.items->count : characters);
    }
    if (jinja_is_one_of_(name, "first", "last") && v.kind == JINJA_LIST_) {
        return v.items->count == 0 ? jinja_undefined_
                                   : v.items->values[name[0] == 'f' ? 0 : v.items->count - 1];
    }
    if ((strcmp(name, "list") == 0 && v.kind == JINJA_LIST_) || strcmp(name, "safe") == 0) {
        return v;
    }
    if (jinja_is_one_of_(name, "string", "trim") && !(is_items && name[0] == 't')) {
        v = jinja_printed_(j, v);
    }
    if (strcmp(name, "string") != 0 && (v.kind != JINJA_TEXT_ || !jinja_text_changed_(j, &v, name, args))) {
        jinja_fail_(j, "uses a filter that is not known");
    }
    return v;
}

static int jinja_test_(Jinja_* j, JinjaValue_ v, const char* name) {
    if (strcmp(name, "equalto") == 0) {
        return jinja_is_equal_(v, jinja_expression_(j));
    }
    return strcmp(name, "defined") == 0     ? v.kind != JINJA_UNDEFINED_
           : strcmp(name, "undefined") == 0 ? v.kind == JINJA_UNDEFINED_
           : strcmp(name, "none") == 0      ? v.kind == JINJA_NONE_
           : strcmp(name, "string") == 0    ? v.kind == JINJA_TEXT_
           : strcmp(name, "mapping") == 0   ? v.kind == JINJA_MAP_
           : strcmp(name, "number") == 0    ? v.kind == JINJA_NUMBER_
           : strcmp(name, "boolean") == 0   ? v.kind == JINJA_BOOL_
           : strcmp(name, "true") == 0      ? v.kind == JINJA_BOOL_ && v.number
           : strcmp(name, "false") == 0     ? v.kind == JINJA_BOOL_ && !v.number
           : strcmp(name, "iterable") == 0 || strcmp(name, "sequence") == 0 ? v.kind >= JINJA_TEXT_
           : strcmp(name, "odd") == 0                                       ? v.number % 2 != 0
           : strcmp(name, "even") == 0                                      ? v.number % 2 == 0
                                       : (jinja_fail_(j, "uses a test that is not known"), 0);
}

// ---- expressions, from the tightest to the loosest ----

static JinjaValue_ jinja_primary_(Jinja_* j) {
    static const struct {
        const char *lower, *upper;
        JinjaKind_ kind;
        long number;
    } words[] = {{"true", "True", JINJA_BOOL_, 1},
                 {"false", "False", JINJA_BOOL_, 0},
                 {"none", "None", JINJA_NONE_, 0}};
    const char c = jinja_peek_(j);
    if (c == '"' || c == '\'') {
        JinjaValue_ text = jinja_literal_(j);
        while (jinja_step_(j) && (jinja_peek_(j) == '"' || jinja_peek_(j) == '\'')) {
            text = jinja_join_(j, text, jinja_literal_(j));
        }
        return text;
    }
    if (isdigit((unsigned char)c)) {
        char* end;
        const long number = strtol(j->text + j->at, &end, 10);
        j->at = (size_t)(end - j->text);
        return jinja_number_(JINJA_NUMBER_, number);
    }
    if (jinja_take_(j, "(")) {
        const JinjaValue_ value = jinja_expression_(j);
        jinja_expect_(j, ")");
        return value;
    }
    if (c == '[' || c == '{') {
        const JinjaValue_ items = jinja_items_(j, c == '[' ? JINJA_LIST_ : JINJA_MAP_);
        const char* close = c == '[' ? "]" : "}";
        for (j->at++; jinja_step_(j) && !jinja_take_(j, close);) {
            JinjaValue_ key = jinja_undefined_, value = jinja_expression_(j);
            if (c == '{') {
                jinja_expect_(j, ":");
                key = value;
                value = jinja_expression_(j);
            }
            jinja_add_(j, items.items, key.kind == JINJA_TEXT_ ? jinja_copy_(j, key.text, key.length) : NULL,
                       value);
            if (jinja_peek_(j) != close[0]) {
                jinja_expect_(j, ",");
            }
        }
        return items;
    }
    for (int i = 0; i < 3; i++) {
        if (jinja_take_(j, words[i].lower) || jinja_take_(j, words[i].upper)) {
            return jinja_number_(words[i].kind, words[i].number);
        }
    }
    const JinjaName_ name = jinja_name_(j);
    if (!name.text[0]) {
        jinja_fail_(j, "wanted a value");
    }
    if (jinja_take_(j, "(")) {
        const JinjaArgs_ args = jinja_args_(j);
        return jinja_call_(j, name.text, &args);
    }
    const JinjaValue_* found = jinja_find_(&j->scope, name.text, strlen(name.text));
    return found ? *found : jinja_undefined_;
}

// Returns part of a list: from..to, forward or backward.
static JinjaValue_ jinja_slice_(Jinja_* j, JinjaValue_ v, JinjaValue_ from, JinjaValue_ to, long step) {
    if (v.kind != JINJA_LIST_ || (step != 1 && step != -1) || (step < 0 && (from.kind || to.kind))) {
        if (!j->skip) {
            jinja_fail_(j, "cuts something that is no list");
        }
        return jinja_undefined_;
    }
    const JinjaValue_ list = jinja_items_(j, JINJA_LIST_);
    const long n = (long)v.items->count;
    long begin = from.kind == JINJA_NUMBER_ ? from.number : 0, end = to.kind == JINJA_NUMBER_ ? to.number : n;
    begin = begin < 0 ? (begin + n > 0 ? begin + n : 0) : begin;
    end = end < 0 ? end + n : end < n ? end : n;
    for (long i = begin; i < end; i++) {
        jinja_add_(j, list.items, NULL, v.items->values[step > 0 ? i : n - 1 - i]);
    }
    return list;
}

// Reads what is between brackets, after the first: an index, a key or a slice.
static JinjaValue_ jinja_index_(Jinja_* j, JinjaValue_ v) {
    JinjaValue_ parts[3] = {jinja_undefined_, jinja_undefined_, jinja_undefined_};
    int colons = 0;
    while (jinja_step_(j) && !jinja_take_(j, "]")) {
        if (jinja_take_(j, ":")) {
            colons += colons < 2;
        } else {
            parts[colons] = jinja_expression_(j);
        }
    }
    if (colons) {
        return jinja_slice_(j, v, parts[0], parts[1], parts[2].kind == JINJA_NUMBER_ ? parts[2].number : 1);
    }
    if (v.kind == JINJA_MAP_ && parts[0].kind == JINJA_TEXT_) {
        const JinjaValue_* found = jinja_find_(v.items, parts[0].text, parts[0].length);
        return found ? *found : jinja_undefined_;
    }
    if (v.kind == JINJA_LIST_ && parts[0].kind == JINJA_NUMBER_) {
        const long n = (long)v.items->count, i = parts[0].number < 0 ? parts[0].number + n : parts[0].number;
        return 0 <= i && i < n ? v.items->values[i] : jinja_undefined_;
    }
    if (!j->skip && v.kind != JINJA_UNDEFINED_) {
        jinja_fail_(j, "indexes something that is no list");
    }
    return jinja_undefined_;
}

// Reads a filter or a test with its arguments.
static JinjaValue_ jinja_changed_(Jinja_* j, JinjaValue_ v, int is_test) {
    const int is_not = is_test && jinja_take_(j, "not");
    const JinjaName_ name = jinja_name_(j);
    if (is_test) {
        const int is_true = jinja_test_(j, v, name.text);
        return jinja_bool_(is_true != is_not);
    }
    JinjaArgs_ args;
    memset(&args, 0, sizeof(args));
    if (jinja_take_(j, "(")) {
        args = jinja_args_(j);
    }
    return jinja_filter_(j, v, name.text, &args);
}

static JinjaValue_ jinja_postfix_(Jinja_* j) {
    JinjaValue_ v = jinja_primary_(j);
    while (jinja_step_(j)) {
        if (jinja_peek_(j) == '.' && jinja_take_(j, ".")) {
            const JinjaName_ name = jinja_name_(j);
            if (jinja_take_(j, "(")) {
                const JinjaArgs_ args = jinja_args_(j);
                v = jinja_method_(j, v, name.text, &args);
            } else {
                const JinjaValue_* found =
                    v.kind == JINJA_MAP_ ? jinja_find_(v.items, name.text, strlen(name.text)) : NULL;
                v = found ? *found : jinja_undefined_;
            }
        } else if (jinja_take_(j, "[")) {
            v = jinja_index_(j, v);
        } else if (jinja_take_(j, "|")) {
            v = jinja_changed_(j, v, 0);
        } else if (jinja_take_(j, "is")) {
            v = jinja_changed_(j, v, 1);
        } else {
            break;
        }
    }
    return v;
}

static JinjaValue_ jinja_unary_(Jinja_* j) {
    if (!jinja_ends_(j) && jinja_take_(j, "-")) {
        const JinjaValue_ v = jinja_postfix_(j);
        return jinja_number_(JINJA_NUMBER_, -v.number);
    }
    return jinja_postfix_(j);
}

static JinjaValue_ jinja_product_(Jinja_* j) {
    JinjaValue_ left = jinja_unary_(j);
    while (jinja_step_(j) && !jinja_ends_(j)) {
        const char op = jinja_take_(j, "*")    ? '*'
                        : jinja_take_(j, "//") ? '/'
                        : jinja_take_(j, "%")  ? '%'
                                               : 0;
        if (!op) {
            break;
        }
        const JinjaValue_ right = jinja_unary_(j);
        if (!j->skip && (left.kind != JINJA_NUMBER_ || right.kind != JINJA_NUMBER_ || right.number <= 0)) {
            jinja_fail_(j, "computes with something that is no positive number");
            break;
        }
        const long n = right.number > 0 ? right.number : 1;
        left = jinja_number_(JINJA_NUMBER_, op == '*'   ? left.number * n
                                            : op == '/' ? left.number / n
                                                        : left.number % n);
    }
    return left;
}

static JinjaValue_ jinja_sum_(Jinja_* j) {
    JinjaValue_ left = jinja_product_(j);
    while (jinja_step_(j) && !jinja_ends_(j)) {
        const char op = jinja_take_(j, "+") ? '+' : jinja_take_(j, "~") ? '~' : jinja_take_(j, "-") ? '-' : 0;
        if (!op) {
            break;
        }
        const JinjaValue_ right = jinja_product_(j);
        const int are_texts = left.kind == JINJA_TEXT_ && right.kind == JINJA_TEXT_,
                  are_numbers = left.kind == JINJA_NUMBER_ && right.kind == JINJA_NUMBER_;
        if (j->skip) {
            left = jinja_undefined_;
        } else if (op == '~' || (op == '+' && are_texts)) {
            left = jinja_join_(j, left, right);
        } else if (are_numbers) {
            left.number += op == '+' ? right.number : -right.number;
        } else {
            jinja_fail_(j, "adds a text to something else");
        }
    }
    return left;
}

// True if a list or a map has a value, or a text another one.
static int jinja_is_in_(Jinja_* j, JinjaValue_ v, JinjaValue_ all) {
    if (all.kind == JINJA_TEXT_ && v.kind == JINJA_TEXT_) {
        return v.length == 0 || memmem(all.text, all.length, v.text, v.length) != NULL;
    }
    if (all.kind == JINJA_MAP_) {
        return v.kind == JINJA_TEXT_ && jinja_find_(all.items, v.text, v.length) != NULL;
    }
    if (all.kind != JINJA_LIST_ && !j->skip) {
        jinja_fail_(j, "looks into something that is no list");
    }
    for (size_t i = 0; all.kind == JINJA_LIST_ && i < all.items->count; i++) {
        if (jinja_is_equal_(all.items->values[i], v)) {
            return 1;
        }
    }
    return 0;
}

static JinjaValue_ jinja_compared_(Jinja_* j) {
    static const char* const ops[] = {"==", "!=", "<=", ">=", "<", ">", "in", "not in"};
    JinjaValue_ left = jinja_sum_(j);
    while (jinja_step_(j)) {
        int op = 0;
        while (op < 8 && !jinja_take_(j, ops[op])) {
            op++;
        }
        if (op == 8) {
            break;
        }
        const JinjaValue_ right = jinja_sum_(j);
        const long a = left.number, b = right.number;
        left = jinja_bool_(op == 0   ? jinja_is_equal_(left, right)
                           : op == 1 ? !jinja_is_equal_(left, right)
                           : op == 2 ? a <= b
                           : op == 3 ? a >= b
                           : op == 4 ? a < b
                           : op == 5 ? a > b
                                     : jinja_is_in_(j, left, right) == (op == 6));
    }
    return left;
}

static JinjaValue_ jinja_not_(Jinja_* j) {
    int count = 0;
    while (jinja_step_(j) && jinja_take_(j, "not")) {
        count++;
    }
    const JinjaValue_ value = jinja_compared_(j);
    return count ? jinja_bool_(jinja_is_true_(value) != count % 2) : value;
}

// Reads operands of `and` or `or`; one that no longer counts has no effect.
static JinjaValue_ jinja_either_(Jinja_* j, int is_or) {
    JinjaValue_ left = is_or ? jinja_either_(j, 0) : jinja_not_(j);
    while (jinja_step_(j) && jinja_take_(j, is_or ? "or" : "and")) {
        const int is_decided = jinja_is_true_(left) == is_or;
        j->skip += is_decided;
        const JinjaValue_ right = is_or ? jinja_either_(j, 0) : jinja_not_(j);
        j->skip -= is_decided;
        left = is_decided ? left : right;
    }
    return left;
}

static JinjaValue_ jinja_expression_(Jinja_* j) {
    if (!jinja_step_(j) || j->depth++ > JINJA_MAX_DEPTH_) {
        jinja_fail_(j, "is nested too deeply");
        return jinja_undefined_;
    }
    JinjaValue_ value = jinja_either_(j, 1);
    if (jinja_take_(j, "if")) {
        const int is_it = jinja_is_true_(jinja_either_(j, 1));
        JinjaValue_ other = jinja_undefined_;
        if (jinja_take_(j, "else")) {
            j->skip += is_it;
            other = jinja_expression_(j);
            j->skip -= is_it;
        }
        value = is_it ? value : other;
    }
    j->depth--;
    return value;
}

// ---- blocks ----

// Steps over the end of a tag, and the blanks or the line end that belong to it.
static void jinja_close_(Jinja_* j, const char* end) {
    const int strips = jinja_peek_(j) == '-';
    j->at += (size_t)strips;
    jinja_expect_(j, end);
    j->starts_line = 0;
    if (strips) {
        jinja_peek_(j);
    } else if (end[0] != '}' && j->at < j->bytes && j->text[j->at] == '\n') {
        j->at++;
        j->starts_line = 1;
    }
}

// Moves to the end of a tag whose contents do not matter.
static void jinja_pass_(Jinja_* j, const char* end) {
    char quote = 0;
    for (; j->at < j->bytes; j->at++) {
        const char c = j->text[j->at];
        if (quote) {
            j->at += c == '\\' && j->at + 1 < j->bytes;
            quote = c == quote ? 0 : quote;
        } else if (end[0] != '#' && (c == '"' || c == '\'')) {
            quote = c;
        } else if (strncmp(j->text + j->at, end, 2) == 0) {
            j->at -= j->at > 0 && j->text[j->at - 1] == '-';
            return;
        }
    }
    jinja_fail_(j, "a tag has no end");
}

// Prints the text before the next tag, and moves behind the start of that tag. Returns its second
// character; 0 at the end.
static char jinja_print_text_(Jinja_* j) {
    const char *begin = j->text + j->at, *end = begin, *stop = j->text + j->bytes;
    while (end < stop && !(end[0] == '{' && end + 1 < stop && strchr("{%#", end[1]))) {
        end++;
    }
    const char kind = end < stop ? end[1] : 0;
    const int strips = kind && end + 2 < stop && end[2] == '-';
    j->at = (size_t)(end - j->text) + (kind ? 2 + (size_t)strips : 0);
    const char* text_end = end;
    if (strips) {
        while (text_end > begin && isspace((unsigned char)text_end[-1])) {
            text_end--;
        }
    } else if (kind == '%' || kind == '#') {
        const char* line = end;
        while (line > begin && (line[-1] == ' ' || line[-1] == '\t')) {
            line--;
        }
        text_end = line > begin ? (line[-1] == '\n' ? line : end) : j->starts_line ? line : end;
    } else if (!kind && text_end > begin && text_end[-1] == '\n') {
        text_end--; // the last line end of a template
    }
    if (!j->skip) {
        fwrite(begin, 1, (size_t)(text_end - begin), j->out);
    }
    j->starts_line = 0;
    return kind;
}

static void jinja_if_(Jinja_* j) {
    JinjaName_ stop = {"if"};
    int is_done = j->skip > 0;
    while (!j->failed && strcmp(stop.text, "endif") != 0) {
        int is_it = 0;
        if (strcmp(stop.text, "else") == 0) {
            is_it = !is_done;
        } else if (is_done) {
            jinja_pass_(j, "%}");
        } else {
            is_it = jinja_is_true_(jinja_expression_(j));
        }
        jinja_close_(j, "%}");
        j->skip += !is_it;
        jinja_body_(j, " elif else endif ", &stop);
        j->skip -= !is_it;
        is_done |= is_it;
    }
    jinja_close_(j, "%}");
}

// Returns the variable `loop` of item i.
static JinjaValue_ jinja_loop_(Jinja_* j, const JinjaItems_* items, size_t i) {
    const JinjaValue_ loop = jinja_items_(j, JINJA_MAP_);
    const size_t n = items->count;
    jinja_add_(j, loop.items, "index", jinja_number_(JINJA_NUMBER_, (long)i + 1));
    jinja_add_(j, loop.items, "index0", jinja_number_(JINJA_NUMBER_, (long)i));
    jinja_add_(j, loop.items, "revindex", jinja_number_(JINJA_NUMBER_, (long)(n - i)));
    jinja_add_(j, loop.items, "length", jinja_number_(JINJA_NUMBER_, (long)n));
    jinja_add_(j, loop.items, "first", jinja_bool_(i == 0));
    jinja_add_(j, loop.items, "last", jinja_bool_(i + 1 == n));
    if (i > 0) {
        jinja_add_(j, loop.items, "previtem", items->values[i - 1]);
    }
    if (i + 1 < n) {
        jinja_add_(j, loop.items, "nextitem", items->values[i + 1]);
    }
    return loop;
}

static void jinja_for_(Jinja_* j) {
    JinjaName_ name = {""}, stop = {""};
    JinjaValue_ list = jinja_undefined_;
    if (j->skip) {
        jinja_pass_(j, "%}");
    } else {
        name = jinja_name_(j);
        jinja_expect_(j, "in");
        list = jinja_either_(j, 1);
        if (list.kind != JINJA_LIST_) {
            jinja_fail_(j, "loops over something that is no list");
        }
    }
    jinja_close_(j, "%}");
    const size_t begin = j->at, known = j->scope.count,
                 count = list.kind == JINJA_LIST_ ? list.items->count : 0;
    const int starts_line = j->starts_line;
    for (size_t i = 0; i < count && !j->failed; i++) {
        jinja_set_(j, &j->scope, name.text, list.items->values[i]);
        jinja_add_(j, &j->scope, "loop", jinja_loop_(j, list.items, i));
        j->at = begin;
        j->starts_line = starts_line;
        jinja_body_(j, " endfor ", &stop);
        j->scope.count = known;
    }
    if (count == 0) {
        j->skip++;
        jinja_body_(j, " endfor ", &stop);
        j->skip--;
    }
    jinja_close_(j, "%}");
}

static void jinja_assign_(Jinja_* j) {
    const JinjaName_ name = jinja_name_(j);
    JinjaName_ member = {""};
    if (jinja_take_(j, ".")) {
        member = jinja_name_(j);
    }
    jinja_expect_(j, "=");
    const JinjaValue_ value = jinja_expression_(j);
    if (!member.text[0]) {
        jinja_set_(j, &j->scope, name.text, value);
        return;
    }
    const JinjaValue_* map = jinja_find_(&j->scope, name.text, strlen(name.text));
    if (map && map->kind == JINJA_MAP_) {
        jinja_set_(j, map->items, member.text, value);
    } else {
        jinja_fail_(j, "sets a member of something that has none");
    }
}

// Handles a statement, after its name.
static void jinja_statement_(Jinja_* j, const char* name) {
    JinjaName_ stop;
    if (strcmp(name, "if") == 0) {
        jinja_if_(j);
    } else if (strcmp(name, "for") == 0) {
        jinja_for_(j);
    } else if (strcmp(name, "macro") == 0) {
        const JinjaName_ macro = jinja_name_(j);
        if (!j->skip) {
            jinja_set_(j, &j->scope, macro.text, jinja_number_(JINJA_MACRO_, (long)j->at));
        }
        jinja_pass_(j, "%}");
        jinja_close_(j, "%}");
        j->skip++;
        jinja_body_(j, " endmacro ", &stop);
        j->skip--;
        jinja_close_(j, "%}");
    } else if (j->skip) {
        jinja_pass_(j, "%}");
        jinja_close_(j, "%}");
    } else if (strcmp(name, "set") == 0) {
        jinja_assign_(j);
        jinja_close_(j, "%}");
    } else if (strcmp(name, "generation") == 0 || strcmp(name, "endgeneration") == 0) {
        jinja_close_(j, "%}");
    } else {
        jinja_fail_(j, "has a statement that is not known");
    }
}

// Renders up to a statement of `ends`, whose name it sets, or to the end of the template.
static void jinja_body_(Jinja_* j, const char* ends, JinjaName_* stop) {
    char word[JINJA_NAME_ + 2];
    if (j->depth++ > JINJA_MAX_DEPTH_) {
        jinja_fail_(j, "is nested too deeply");
    }
    while (jinja_step_(j)) {
        const char kind = jinja_print_text_(j);
        if (!kind) {
            if (ends[0]) {
                jinja_fail_(j, "a block has no end");
            }
            break;
        }
        if (kind == '#') {
            jinja_pass_(j, "#}");
            jinja_close_(j, "#}");
        } else if (kind == '{' && j->skip) {
            jinja_pass_(j, "}}");
            jinja_close_(j, "}}");
        } else if (kind == '{') {
            const JinjaValue_ text = jinja_printed_(j, jinja_expression_(j));
            if (!j->failed) {
                fwrite(text.text, 1, text.length, j->out);
            }
            jinja_close_(j, "}}");
        } else {
            const JinjaName_ name = jinja_name_(j);
            snprintf(word, sizeof(word), " %s ", name.text);
            if (strstr(ends, word)) {
                *stop = name;
                break;
            }
            jinja_statement_(j, name.text);
        }
    }
    j->depth--;
}

// ---- the whole ----

static void jinja_set_chat_(Jinja_* j, const JinjaChat* chat) {
    const JinjaValue_ list = jinja_items_(j, JINJA_LIST_), none = jinja_number_(JINJA_NONE_, 0);
    for (int i = 0; i < chat->count; i++) {
        const JinjaMessage* m = &chat->messages[i];
        const JinjaValue_ message = jinja_items_(j, JINJA_MAP_);
        jinja_add_(j, message.items, "role", jinja_text_(m->role, strlen(m->role)));
        jinja_add_(j, message.items, "content", jinja_text_(m->content, strlen(m->content)));
        jinja_add_(j, list.items, NULL, message);
    }
    jinja_add_(j, &j->scope, "messages", list);
    jinja_add_(j, &j->scope, "tools", none);
    jinja_add_(j, &j->scope, "documents", none);
    jinja_add_(j, &j->scope, "add_generation_prompt", jinja_bool_(chat->add_generation_prompt));
    if (chat->date) {
        jinja_add_(j, &j->scope, "strftime_now", jinja_bool_(1)); // is defined
    }
    if (chat->bos_token) {
        jinja_add_(j, &j->scope, "bos_token", jinja_text_(chat->bos_token, strlen(chat->bos_token)));
    }
    if (chat->eos_token) {
        jinja_add_(j, &j->scope, "eos_token", jinja_text_(chat->eos_token, strlen(chat->eos_token)));
    }
}

char* jinja_render(const char* text, const JinjaChat* chat, char* error) {
    Jinja_ j;
    JinjaName_ stop;
    memset(&j, 0, sizeof(j));
    j.text = text;
    j.bytes = strlen(text);
    j.error = error;
    j.starts_line = 1;
    j.date = chat->date;
    if (j.bytes > JINJA_MAX_BYTES_) {
        jinja_fail_(&j, "is too long");
    }
    TextBuffer out;
    text_buffer_open(&out, "a chat");
    j.out = out.file;
    jinja_set_chat_(&j, chat);
    jinja_body_(&j, "", &stop);
    for (size_t i = 0; i < j.num_memory; i++) {
        free(j.memory[i]);
    }
    free(j.memory);
    char* rendered = text_buffer_close(&out);
    if (chat->has_date) {
        *chat->has_date |= j.has_date;
    }
    if (j.failed) {
        free(rendered);
        return NULL;
    }
    return rendered;
}

#endif // JINJA_IMPLEMENTATION

#endif
