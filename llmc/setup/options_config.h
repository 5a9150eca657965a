/*
options_config.h -- a file of settings, for --config, in the form that --print-config prints:

    # a comment
    batch = 8                          # also here
    train-data = books
    prompt = "Once upon a time, "      in quotes: blanks at an end, a #, and \" \\ \n \r \t \x1b

A value without quotes has no blanks at its ends, and ends before a # that follows a blank.
*/
#ifndef LLMC_OPTIONS_CONFIG_H
#define LLMC_OPTIONS_CONFIG_H

#include <limits.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    char* text; // contents of the file, which names and values point into; the caller frees it
    char* next; // start of the next line
    int line;
    char place[PATH_MAX + 32]; // place of the last setting, for errors: "FILE:LINE: "
    const char *name, *value;  // the last setting
    const char* path;
} ConfigFile;

// Reads a file, or ends the program. The path must outlive `config`.
void config_open(ConfigFile* config, const char* path);

// Goes to the next setting. Returns 0 at the end. A line that is no setting ends the program.
int config_next(ConfigFile* config);

// Prints a line that config_next reads as this setting.
void config_print(FILE* file, const char* name, const char* value);

#ifdef __cplusplus
}
#endif

#ifdef OPTIONS_CONFIG_IMPLEMENTATION

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/byte_order_mark.h"
#include "llmc/base/check.h"
#include "llmc/base/printable.h"

#define CONFIG_MAX_BYTES_ ((size_t)1 << 20)
#define CONFIG_BLANKS_ " \t\r"
#define CONFIG_ESCAPED_ "\"\\\n\r\t" // characters that follow a backslash in quotes,
#define CONFIG_ESCAPES_ "\"\\nrt"    // and the letters that stand for them

void config_open(ConfigFile* config, const char* path) {
    char error[ERROR_BYTES];
    size_t bytes;
    memset(config, 0, sizeof(*config));
    config->path = path;
    CHECK(byte_order_text(path, CONFIG_MAX_BYTES_, &config->text, &bytes, error), "%s", error);
    CHECK(strlen(config->text) == bytes, "%s: a zero byte at byte %zu; wanted text, lines of name = value",
          path, strlen(config->text));
    config->next = config->text;
}

// Cuts blanks off the end of text[0 .. length).
static void config_trim_(char* text, size_t length) {
    while (length > 0 && strchr(CONFIG_BLANKS_, text[length - 1])) {
        length--;
    }
    text[length] = '\0';
}

// Ends a value without quotes before its comment.
static void config_end_plain_(char* value) {
    size_t end = 0;
    while (value[end] && !(value[end] == '#' && (end == 0 || strchr(CONFIG_BLANKS_, value[end - 1])))) {
        end++;
    }
    config_trim_(value, end);
}

// Sets *byte to the byte that an escape sequence means. Returns the length of the sequence.
static size_t config_unescape_(const ConfigFile* config, const char* text, char* byte) {
    const char* letter = text[1] ? strchr(CONFIG_ESCAPES_, text[1]) : NULL;
    char digits[3] = "";
    if (letter) {
        *byte = CONFIG_ESCAPED_[letter - CONFIG_ESCAPES_];
        return 2;
    }
    snprintf(digits, sizeof(digits), "%s", text[1] == 'x' ? text + 2 : "");
    *byte = (char)strtol(digits, NULL, 16);
    if (strspn(digits, "0123456789abcdefABCDEF") < 2 || !*byte) {
        die_usage("%s\\%.1s in a value; wanted \\\" \\\\ \\n \\r \\t, or \\x01 to \\xff", config->place,
                  text + 1);
    }
    return 4;
}

// Unescapes a value that starts after its opening quote, in place.
static void config_unquote_(const ConfigFile* config, char* value) {
    char* to = value;
    const char* from = value;
    while (*from && *from != '"') {
        size_t length = 1;
        *to = *from;
        if (*from == '\\') {
            length = config_unescape_(config, from, to);
        }
        from += length;
        to++;
    }
    if (*from != '"') {
        die_usage("%sa value without its closing quote", config->place);
    }
    from += 1 + strspn(from + 1, CONFIG_BLANKS_);
    if (*from && *from != '#') {
        die_usage("%s%s stands behind the closing quote; wanted the end of the line", config->place, from);
    }
    *to = '\0';
}

// Splits a line into name and value.
static void config_split_(ConfigFile* config, char* line) {
    const size_t length = strcspn(line, "=");
    if (line[length] != '=' || length == 0) {
        config_trim_(line, strlen(line));
        die_usage("%s%s is not a setting; wanted name = value", config->place, line);
    }
    char* value = line + length + 1;
    value += strspn(value, CONFIG_BLANKS_);
    if (*value == '"') {
        config_unquote_(config, ++value);
    } else {
        config_end_plain_(value);
    }
    config_trim_(line, length);
    config->name = line;
    config->value = value;
}

int config_next(ConfigFile* config) {
    while (*config->next) {
        char* line = config->next + strspn(config->next, CONFIG_BLANKS_);
        const size_t length = strcspn(line, "\n");
        config->next = line + length + (line[length] == '\n');
        line[length] = '\0';
        config->line++;
        if (*line && *line != '#') {
            snprintf(config->place, sizeof(config->place), "%s:%d: ", config->path, config->line);
            config_split_(config, line);
            return 1;
        }
    }
    return 0;
}

// Returns true if a value needs no quotes and all its characters are printable.
static int config_is_plain_(const char* value) {
    const size_t bytes = strlen(value);
    size_t at = 0, length = 1;
    while (at < bytes && (length = printable_length(value + at, bytes - at)) > 0) {
        at += length;
    }
    return bytes > 0 && length > 0 && !strpbrk(value, CONFIG_ESCAPED_ "#") && value[0] != ' ' &&
           value[bytes - 1] != ' ';
}

// Prints a value in quotes. A byte that could start a terminal control sequence becomes \xNN.
static void config_print_quoted_(FILE* file, const char* value) {
    const size_t bytes = strlen(value);
    fputc('"', file);
    for (size_t at = 0; at < bytes;) {
        const char* escaped = strchr(CONFIG_ESCAPED_, value[at]);
        const size_t length = printable_length(value + at, bytes - at);
        if (escaped) {
            fprintf(file, "\\%c", CONFIG_ESCAPES_[escaped - CONFIG_ESCAPED_]);
        } else if (length) {
            fwrite(value + at, 1, length, file);
        } else {
            fprintf(file, "\\x%02x", (unsigned char)value[at]);
        }
        at += escaped || !length ? 1 : length;
    }
    fputc('"', file);
}

void config_print(FILE* file, const char* name, const char* value) {
    fprintf(file, "%s = ", name);
    if (config_is_plain_(value)) {
        fputs(value, file);
    } else {
        config_print_quoted_(file, value);
    }
    fputc('\n', file);
}

#endif // OPTIONS_CONFIG_IMPLEMENTATION

#endif
