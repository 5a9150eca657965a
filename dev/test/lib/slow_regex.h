/*
slow_regex.h -- splits a text by a regular expression, by its definition: what bpe_split.h is tested
against.

An expression is alternatives of items: a character, \r \n \s \S \p{L} \p{N} \p{M}, \p{Lu} with
\p{Lt}, \p{Ll}, \p{Lo} with \p{Lm}, or a set [...] of these, each with ? * + or {1,n}; (?i) at the
start of an alternative ignores case; (?!\S) at its end looks ahead. A match is leftmost, with the
first alternative that matches, and greedy with backtracking.
*/
#ifndef DEV_TEST_SLOW_REGEX_H
#define DEV_TEST_SLOW_REGEX_H

#include "llmc/tokenizer/bpe_rules.h"

typedef struct {
    size_t length;  // bytes; 0 at the end of the text
    char class_;    // 'L', 'N', 'S' or 'O'
    char kind;      // of a letter: 'u', 'l' or 'o'; 'M': a mark
    uint32_t value; // the character; UINT32_MAX if it is not valid
} SlowCharacter;

static inline int slow_in_ranges(uint32_t c, const uint32_t (*ranges)[2], int rows) {
    int row = 0;
    while (row < rows && ranges[row][1] < c) {
        row++;
    }
    return row < rows && ranges[row][0] <= c;
}

static inline SlowCharacter slow_character(const char* text, size_t bytes, size_t at) {
    SlowCharacter c = {at < bytes, 'O', 0, UINT32_MAX};
    const unsigned char* s = (const unsigned char*)text + at;
    const size_t left = bytes - at;
    if (c.length == 0) {
        return c;
    }
    uint32_t value = UINT32_MAX, least = 0;
    size_t n = 1;
    if (s[0] < 0x80) {
        value = s[0];
    } else if (s[0] >> 5 == 6) {
        n = 2, value = s[0] & 31, least = 0x80;
    } else if (s[0] >> 4 == 14) {
        n = 3, value = s[0] & 15, least = 0x800;
    } else if (s[0] >> 3 == 30) {
        n = 4, value = s[0] & 7, least = 0x10000;
    }
    for (size_t i = 1; i < n; i++) {
        if (i >= left || s[i] >> 6 != 2) {
            return c;
        }
        value = value << 6 | (s[i] & 63);
    }
    if (value < least || value > 0x10FFFF || value >> 11 == 27) {
        return c;
    }
    c.length = n;
    c.value = value;
    c.class_ = slow_in_ranges(value, unicode_letters, UNICODE_LETTERS)   ? 'L'
               : slow_in_ranges(value, unicode_numbers, UNICODE_NUMBERS) ? 'N'
               : slow_in_ranges(value, unicode_blanks, UNICODE_BLANKS)   ? 'S'
                                                                         : 'O';
    c.kind = slow_in_ranges(value, unicode_capitals, UNICODE_CAPITALS)       ? 'u'
             : slow_in_ranges(value, unicode_minuscules, UNICODE_MINUSCULES) ? 'l'
             : slow_in_ranges(value, unicode_marks, UNICODE_MARKS)           ? 'M'
             : c.class_ == 'L'                                               ? 'o'
                                                                             : 0;
    return c;
}

typedef struct {
    const char* text;
    size_t bytes;
    int ignores_case;
} SlowText;

// True if the character is the one at *item, which moves past it. U+017F is a lower case of S,
// U+212A of K.
static inline int slow_is_one(const char** item, SlowCharacter c, int ignores_case) {
    const char* at = *item;
    if (at[0] != '\\') {
        const uint32_t wanted = (unsigned char)at[0];
        *item += 1;
        const int is_letter = 'a' <= (wanted | 32) && (wanted | 32) <= 'z';
        return c.value == wanted || (ignores_case && is_letter && c.value == (wanted ^ 32)) ||
               (ignores_case && (wanted | 32) == 's' && c.value == 0x17F);
    }
    *item += at[1] == 'p' ? 5 + (at[4] != '}') : 2;
    return at[1] == 'p'   ? at[3] == 'M'   ? c.kind == 'M'
                            : at[4] == '}' ? c.class_ == at[3]
                                           : c.kind == at[4]
             : at[1] == 's' ? c.class_ == 'S'
           : at[1] == 'S' ? c.class_ != 'S'
                          : c.value == (at[1] == 'r' ? '\r' : '\n');
}

// True if the character matches the item at *item, which moves past it.
static inline int slow_is_item(const char** item, SlowCharacter c, int ignores_case) {
    if (**item != '[') {
        return slow_is_one(item, c, ignores_case);
    }
    const int is_not = *++*item == '^';
    *item += is_not;
    int found = 0;
    while (**item != ']') {
        found |= slow_is_one(item, c, ignores_case);
    }
    ++*item;
    return found != is_not;
}

// Returns the end of the match of items from text[at] on, or SIZE_MAX.
static inline size_t slow_match(const char* items, const SlowText* t, size_t at) {
    if (*items == '\0' || *items == '|') {
        return at;
    }
    if (strncmp(items, "(?!\\S)", 6) == 0) {
        const SlowCharacter c = slow_character(t->text, t->bytes, at);
        return c.length == 0 || c.class_ == 'S' ? slow_match(items + 6, t, at) : SIZE_MAX;
    }
    const char* rest = items;
    const SlowCharacter none = {0, 'O', 0, UINT32_MAX};
    slow_is_item(&rest, none, 0); // moves past it
    size_t least = 1, most = 1;
    if (*rest == '?' || *rest == '*' || *rest == '+') {
        least = *rest == '+';
        most = *rest++ == '?' ? 1 : SIZE_MAX;
    } else if (*rest == '{') {
        most = (size_t)(rest[3] - '0');
        rest += 5;
    }
    size_t ends[4096], n = 0;
    for (ends[0] = at; n < most && n + 1 < sizeof(ends) / sizeof(ends[0]); n++) {
        const char* item = items;
        const SlowCharacter c = slow_character(t->text, t->bytes, ends[n]);
        if (c.length == 0 || !slow_is_item(&item, c, t->ignores_case)) {
            break;
        }
        ends[n + 1] = ends[n] + c.length;
    }
    for (size_t end = SIZE_MAX; n + 1 > least; n--) {
        if ((end = slow_match(rest, t, ends[n])) != SIZE_MAX) {
            return end;
        }
        if (n == 0) {
            break;
        }
    }
    return SIZE_MAX;
}

// Returns the end of the piece at text[at], at < bytes.
static inline size_t slow_piece_end(const char* expression, const char* text, size_t bytes, size_t at) {
    for (const char* items = expression; items; items = strchr(items, '|')) {
        items += *items == '|';
        SlowText t = {text, bytes, strncmp(items, "(?i)", 4) == 0};
        const size_t end = slow_match(items + (t.ignores_case ? 4 : 0), &t, at);
        if (end != SIZE_MAX && end > at) {
            return end;
        }
    }
    return SIZE_MAX;
}

// The expressions of patterns.
#define SLOW_GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define SLOW_CL100K(digits)                                                                                  \
    "(?i)'s|(?i)'t|(?i)'re|(?i)'ve|(?i)'m|(?i)'ll|(?i)'d|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits              \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

// A contraction is at the end of an alternative, which ignores case: it changes nothing else there.
#define SLOW_U "[\\p{Lu}\\p{Lo}\\p{M}]"
#define SLOW_L "[\\p{Ll}\\p{Lo}\\p{M}]"
#define SLOW_CONTRACTED(word)                                                                                \
    "(?i)" word "'s|(?i)" word "'t|(?i)" word "'re|(?i)" word "'ve|(?i)" word "'m|(?i)" word "'ll|(?i)" word \
    "'d|" word "|"
#define SLOW_O200K(digits)                                                                                   \
    SLOW_CONTRACTED("[^\\r\\n\\p{L}\\p{N}]?" SLOW_U "*" SLOW_L "+")                                          \
    SLOW_CONTRACTED("[^\\r\\n\\p{L}\\p{N}]?" SLOW_U "+" SLOW_L "*")                                          \
    digits "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

typedef struct {
    BpePattern pattern;
    const char* expression;
} SlowPattern;

static const SlowPattern slow_patterns[] = {
    {{BPE_GPT2, 0, 0, 0, 0}, SLOW_GPT2},
    {{BPE_GPT2, 1, 1, 0, 0}, SLOW_GPT2},
    {{BPE_GPT2, 0, 1, 0, 0}, SLOW_GPT2},
    {{BPE_CL100K, 0, 0, 0, 0}, SLOW_CL100K("\\p{N}+")},
    {{BPE_CL100K, 1, 0, 0, 0}, SLOW_CL100K("\\p{N}")},
    {{BPE_CL100K, 2, 0, 0, 0}, SLOW_CL100K("\\p{N}{1,2}")},
    {{BPE_CL100K, 3, 0, 0, 0}, SLOW_CL100K("\\p{N}{1,3}")},
    {{BPE_O200K, 3, 0, 0, 0}, SLOW_O200K("\\p{N}{1,3}")},
};
enum { SLOW_PATTERNS = sizeof(slow_patterns) / sizeof(slow_patterns[0]) };

// Returns the end of the piece at text[at], at < bytes, where numbers may have been cut off first.
static inline size_t slow_end(const SlowPattern* p, const char* text, size_t bytes, size_t at) {
    if (!p->pattern.digits_first) {
        return slow_piece_end(p->expression, text, bytes, at);
    }
    const int is_number = slow_character(text, bytes, at).class_ == 'N';
    size_t end = at, n = 0;
    while (end < bytes && (slow_character(text, bytes, end).class_ == 'N') == is_number &&
           !(is_number && p->pattern.digits && n == (size_t)p->pattern.digits)) {
        end += slow_character(text, bytes, end).length;
        n++;
    }
    return is_number ? end : slow_piece_end(p->expression, text, end, at);
}

#endif
