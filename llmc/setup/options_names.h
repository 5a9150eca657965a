/*
options_names.h -- suggests an option for an unknown name.

    --block_size    nanoGPT's name: option_synonym says what to type instead
    --products      a name of an earlier version: option_removed_named has the advice
    --bacth         a typo: option_distance is 1 to --batch, one swap of letters

Comparisons ignore case and treat _ as -.
*/
#ifndef LLMC_OPTIONS_NAMES_H
#define LLMC_OPTIONS_NAMES_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OPTION_NAME_BYTES 32 // length of the longest name, with its zero

// Names that other programs use, separated by blanks, and the advice that they share.
typedef struct {
    const char *names, *advice; // "n-positions n-ctx", "use --context"
} OptionSynonym;

// An option that earlier versions had, and its advice.
typedef struct {
    const char* name;
    const char* unused; // its values that changed nothing, such as "off" or "auto|1"
    int flags;          // 0, or OPTION_NOT_SAVED
    const char* advice; // "use --matmul"
} RemovedOption;

// Returns the advice for a name of `length` bytes, without leading dashes; NULL: unknown. The table
// ends with a row of NULL.
const char* option_synonym(const OptionSynonym* table, const char* name, size_t length);

// Returns the row of a removed option; NULL if the table has none. The table ends with a row of
// NULL.
const RemovedOption* option_removed_named(const RemovedOption* table, const char* name, size_t length);

// Returns true if a value of a removed option changed nothing.
int option_removed_is_unused(const RemovedOption* row, const char* value);

// Returns the number of insertions, deletions, changes and swaps of neighboring letters that turn
// `text` into `name`.
int option_distance(const char* text, size_t length, const char* name);

#ifdef __cplusplus
}
#endif

#ifdef OPTIONS_NAMES_IMPLEMENTATION

#include <assert.h>
#include <ctype.h>
#include <string.h>

static int option_letter_(char c) { return c == '_' ? '-' : tolower((unsigned char)c); }

static int option_is_same_(const char* a, const char* b, size_t length) {
    size_t i = 0;
    while (i < length && option_letter_(a[i]) == option_letter_(b[i])) {
        i++;
    }
    return i == length;
}

const char* option_synonym(const OptionSynonym* table, const char* name, size_t length) {
    for (; table->names; table++) {
        for (const char* at = table->names; *at; at += strspn(at, " ")) {
            const size_t bytes = strcspn(at, " ");
            if (bytes == length && option_is_same_(name, at, length)) {
                return table->advice;
            }
            at += bytes;
        }
    }
    return NULL;
}

const RemovedOption* option_removed_named(const RemovedOption* table, const char* name, size_t length) {
    while (table->name && !(strlen(table->name) == length && option_is_same_(name, table->name, length))) {
        table++;
    }
    return table->name ? table : NULL;
}

int option_removed_is_unused(const RemovedOption* row, const char* value) {
    int is_unused = 0;
    for (const char* at = row->unused; at && !is_unused; at = strchr(at, '|')) {
        at += *at == '|';
        const size_t length = strcspn(at, "|");
        is_unused = strlen(value) == length && memcmp(value, at, length) == 0;
    }
    return is_unused;
}

static int option_least_(int a, int b) { return a < b ? a : b; }

// Row i has the distances from text[0 .. i) to each prefix of the name. A swap needs row i - 2.
int option_distance(const char* text, size_t length, const char* name) {
    int rows[3][OPTION_NAME_BYTES];
    const int name_length = (int)strlen(name);
    assert(name_length < OPTION_NAME_BYTES);
    for (int j = 0; j <= name_length; j++) {
        rows[0][j] = j;
    }
    for (size_t i = 1; i <= length; i++) {
        const int *two = rows[(i + 1) % 3], *one = rows[(i + 2) % 3];
        int* row = rows[i % 3];
        row[0] = (int)i;
        for (int j = 1; j <= name_length; j++) {
            const int letter = option_letter_(text[i - 1]), wanted = name[j - 1];
            const int is_swap =
                i > 1 && j > 1 && letter == name[j - 2] && option_letter_(text[i - 2]) == wanted;
            row[j] = option_least_(one[j - 1] + (letter != wanted), 1 + option_least_(one[j], row[j - 1]));
            row[j] = is_swap ? option_least_(row[j], two[j - 2] + 1) : row[j];
        }
    }
    return rows[length % 3][name_length];
}

#endif // OPTIONS_NAMES_IMPLEMENTATION

#endif
