/*
options_config.h -- a file of settings, for --config, in the form that --print-config prints:

    # a comment
    batch = 8                          # also here
    train-data = books
    prompt = "Once upon a time, "      in quotes: blanks at an end, a #, and \" \\ \n \r \t

A value without quotes reaches from its first to its last character that is no blank, or up to a #
behind a blank.

defines: ConfigFile, config_open, config_next, config_print
*/
#ifndef LLMC_OPTIONS_CONFIG_H
#define LLMC_OPTIONS_CONFIG_H

#include <limits.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    char* text; // of the file, where names and values stay; who opened it frees it
    char* next; // line
    int line;
    char place[PATH_MAX + 32]; // of the last setting, for errors: "FILE:LINE: "
    const char *name, *value;  // of it
    const char* path;
} ConfigFile;

// Reads a file, or ends the program. The path must stay.
void config_open(ConfigFile* config, const char* path);

// Goes to the next setting; 0: there is none. A line that is no setting ends the program.
int config_next(ConfigFile* config);

// Prints a line that config_next reads as this setting.
void config_print(FILE* file, const char* name, const char* value);

#ifdef __cplusplus
}
#endif

#ifdef OPTIONS_CONFIG_IMPLEMENTATION

#include <stddef.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"

#define CONFIG_MAX_BYTES_ ((size_t)1 << 20)
#define CONFIG_BLANKS_ " \t\r"
#define CONFIG_ESCAPED_ "\"\\\n\r\t" // characters that stand behind a backslash in quotes,
#define CONFIG_ESCAPES_ "\"\\nrt"    // and the letters that they have there

void config_open(ConfigFile* config, const char* path) {
    char error[ERROR_BYTES];
    size_t bytes;
    memset(config, 0, sizeof(*config));
    config->path = path;
    CHECK(file_try_read(path, CONFIG_MAX_BYTES_, &config->text, &bytes, error), "%s", error);
    CHECK(strlen(config->text) == bytes, "%s: a zero byte at byte %zu; wanted text, lines of name = value",
          path, strlen(config->text));
    config->next = config->text + (strncmp(config->text, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0);
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

// Replaces a value in quotes, behind the first one, by what it stands for.
static void config_unquote_(const ConfigFile* config, char* value) {
    char* to = value;
    const char* from = value;
    for (; *from && *from != '"'; from++) {
        const char* escape = *from == '\\' && from[1] ? strchr(CONFIG_ESCAPES_, from[1]) : NULL;
        if (*from == '\\' && !escape) {
            die_usage("%s\\%.1s in a value; wanted \\\" \\\\ \\n \\r \\t", config->place, from + 1);
        }
        *to++ = escape ? CONFIG_ESCAPED_[escape - CONFIG_ESCAPES_] : *from;
        from += escape != NULL;
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

void config_print(FILE* file, const char* name, const char* value) {
    const size_t length = strlen(value);
    const int is_plain =
        length > 0 && !strpbrk(value, CONFIG_ESCAPED_ "#") && value[0] != ' ' && value[length - 1] != ' ';
    fprintf(file, "%s = ", name);
    if (is_plain) {
        fprintf(file, "%s\n", value);
        return;
    }
    fputc('"', file);
    for (; *value; value++) {
        const char* escaped = strchr(CONFIG_ESCAPED_, *value);
        escaped ? fprintf(file, "\\%c", CONFIG_ESCAPES_[escaped - CONFIG_ESCAPED_]) : fputc(*value, file);
    }
    fputs("\"\n", file);
}

#endif // OPTIONS_CONFIG_IMPLEMENTATION

#endif
