/*
bpe_rules.h -- rules by which a vocabulary splits text into pieces: a pattern, and the classes of
characters that it speaks of.

A pattern matches leftmost first, its alternatives in order. The styles are GPT-2's; OpenAI's
cl100k's, which Llama 3, Qwen, GLM and nanochat share except for the number n of digits; and its
o200k's, of gpt-oss and Phi 4 mini, where capitals start a word:

    GPT2      '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
    CL100K    '(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,n}
              | ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
    O200K     [^\r\n\p{L}\p{N}]?U*L+C?|[^\r\n\p{L}\p{N}]?U+L*C?|\p{N}{1,n}
              | ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+
              with U = [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}], L = [\p{Ll}\p{Lm}\p{Lo}\p{M}] and
              C = (?i:'s|'t|'re|'ve|'m|'ll|'d)

Numbers may be cut off before the pattern is matched, as SmolLM2's are: each text between them is
then matched alone.

SENTENCE has no pattern: a vocabulary of SentencePiece's kind (bpe_sentence.h) merges a text as a
whole. It is cut between two bytes that no token has side by side, which no merge crosses.

Any bytes are text: a byte that belongs to no valid UTF-8 character counts as one character that is
neither letter, number nor blank.

    bpe_rules_open      read-only afterwards: threads may share them
    bpe_pattern_read    the pattern of a regular expression in Hugging Face's files
*/
#ifndef LLMC_BPE_RULES_H
#define LLMC_BPE_RULES_H

#include "llmc/base/check.h"
#include "llmc/base/utf8.h"
#include "llmc/tokenizer/nfc.h"
#include "llmc/tokenizer/unicode_tables.h"

// ---- patterns ----

typedef enum { BPE_GPT2, BPE_CL100K, BPE_O200K, BPE_SENTENCE } BpeStyle;

// Facts about blanks of a vocabulary of SentencePiece's kind, as bits.
enum {
    BPE_BLANK_BEFORE = 1,  // a blank is put before each text between words ...
    BPE_BLANK_ONCE = 2,    // ... only at the start of a document
    BPE_BLANK_MISSING = 4, // ... unless one stands there
    BPE_BLANK_CUTS = 8,    // no token has a blank after a character that is none
    BPE_LINE_CUTS = 16,    // no token has \n after a character that is no blank
    BPE_WORD_CHANGES = 32, // words change the text after them: blanks are removed, or one is put
    BPE_NO_CUTS = 64,      // such a word ends in a letter or digit, or no ASCII
};

// All 0 is GPT-2's.
typedef struct {
    BpeStyle style;
    int digits;       // most characters of a number's piece; 0: any number. SENTENCE: bits above
    int digits_first; // 1: numbers are cut off before the pattern is matched
    int normalizes;   // 1: text is normalized first (nfc.h)
    int cuts_words;   // 1: words are cut out of the text first (bpe_words.h)
} BpePattern;

// Moves past a text if it stands at `at`.
static inline int bpe_pattern_take_(const char** at, const char* text) {
    const int found = strncmp(*at, text, strlen(text)) == 0;
    *at += found ? strlen(text) : 0;
    return found;
}

// Reads the numbers of a pattern: \p{N}, \p{N}+ or \p{N}{1,n}.
static inline int bpe_pattern_digits_(const char** at, int* digits) {
    if (!bpe_pattern_take_(at, "|\\p{N}")) {
        return 0;
    }
    *digits = bpe_pattern_take_(at, "+") ? 0 : 1;
    if (*digits == 1 && bpe_pattern_take_(at, "{1,")) {
        *digits = **at - '0';
        *at += 1 <= *digits && *digits <= 9;
        return 1 <= *digits && *digits <= 9 && bpe_pattern_take_(at, "}");
    }
    return 1;
}

#define BPE_WORD_START_ "[^\\r\\n\\p{L}\\p{N}]?"
#define BPE_CONTRACTION_ "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define BPE_UPPER_ "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define BPE_LOWER_ "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define BPE_O200K_WORDS_                                                                                     \
    BPE_WORD_START_ BPE_UPPER_ "*" BPE_LOWER_ "+" BPE_CONTRACTION_ "?|" BPE_WORD_START_ BPE_UPPER_           \
                               "+" BPE_LOWER_ "*" BPE_CONTRACTION_ "?"
#define BPE_O200K_REST_ "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

// Sets the pattern of a regular expression. Returns 0 if it is not one of the above. A second +
// keeps a match from being shortened, which never happens to these.
static inline int bpe_pattern_read(const char* at, BpePattern* pattern) {
    memset(pattern, 0, sizeof(*pattern));
    if (bpe_pattern_take_(&at, "'s|'t|'re|'ve|'m|'ll|'d|") ||
        bpe_pattern_take_(&at, "'(?:[sdmt]|ll|ve|re)|")) {
        return strcmp(at, " ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+") == 0;
    }
    if (bpe_pattern_take_(&at, BPE_O200K_WORDS_)) {
        pattern->style = BPE_O200K;
        return bpe_pattern_digits_(&at, &pattern->digits) && strcmp(at, BPE_O200K_REST_) == 0;
    }
    pattern->style = BPE_CL100K;
    int ok = (bpe_pattern_take_(&at, "(?i:'s|'t|'re|'ve|'m|'ll|'d)|") ||
              bpe_pattern_take_(&at, "'(?i:[sdmt]|ll|ve|re)|")) &&
             bpe_pattern_take_(&at, "[^\\r\\n\\p{L}\\p{N}]?");
    bpe_pattern_take_(&at, "+");
    ok = ok && bpe_pattern_take_(&at, "\\p{L}+");
    bpe_pattern_take_(&at, "+");
    ok = ok && bpe_pattern_digits_(&at, &pattern->digits) && bpe_pattern_take_(&at, "| ?[^\\s\\p{L}\\p{N}]+");
    bpe_pattern_take_(&at, "+");
    ok = ok && bpe_pattern_take_(&at, "[\\r\\n]*");
    bpe_pattern_take_(&at, "+");
    ok = ok && bpe_pattern_take_(&at, "|\\s*[\\r\\n]");
    bpe_pattern_take_(&at, "+");
    return ok && strcmp(at, "|\\s+(?!\\S)|\\s+") == 0;
}

enum { BPE_EXPRESSION_BYTES = 512 }; // room for a regular expression

// Writes the regular expression of a pattern.
static inline void bpe_pattern_print(BpePattern pattern, char expression[BPE_EXPRESSION_BYTES]) {
    char digits[16] = "\\p{N}+";
    if (pattern.digits > 0) {
        snprintf(digits, sizeof(digits), pattern.digits > 1 ? "\\p{N}{1,%d}" : "\\p{N}", pattern.digits);
    }
    if (pattern.style == BPE_O200K) {
        snprintf(expression, BPE_EXPRESSION_BYTES, BPE_O200K_WORDS_ "|%s" BPE_O200K_REST_, digits);
        return;
    }
    snprintf(expression, BPE_EXPRESSION_BYTES, "%s%s%s",
             pattern.style == BPE_GPT2 ? "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?"
                                       : "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|",
             digits,
             pattern.style == BPE_GPT2 ? "| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
                                       : "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+");
}

// ---- classes of characters ----

enum { BPE_OTHER, BPE_LETTER, BPE_NUMBER, BPE_BLANK };

// Cases, as bits: a character of U, of L, of both. Other letters are of both, without a case here.
enum { BPE_CAPITAL = 1, BPE_MINUSCULE = 2, BPE_MARK = 3 };

typedef struct {
    BpePattern pattern;
    unsigned char* of;    // class of each character below `end`, 2 bits each
    unsigned char* cases; // so are BPE_CAPITAL, ...; NULL unless the style is O200K
    uint32_t end;         // all others are BPE_OTHER, without a case
    Nfc nfc;              // if pattern.normalizes
    // SENTENCE: (256 * 256) bits: tokens have the first byte before the second; NULL: no vocabulary
    uint64_t* joins;
} BpeRules;

static inline void bpe_set_class_(unsigned char* of, const uint32_t (*ranges)[2], int rows, int class_) {
    for (int row = 0; row < rows; row++) {
        for (uint32_t c = ranges[row][0]; c <= ranges[row][1]; c++) {
            of[c / 4] |= (unsigned char)(class_ << 2 * (c % 4));
        }
    }
}

static inline void bpe_open_cases_(BpeRules* rules) {
    rules->cases = (unsigned char*)check_alloc(rules->end / 4 + 1, 1, "cases of characters");
    bpe_set_class_(rules->cases, unicode_capitals, UNICODE_CAPITALS, BPE_CAPITAL);
    bpe_set_class_(rules->cases, unicode_minuscules, UNICODE_MINUSCULES, BPE_MINUSCULE);
    bpe_set_class_(rules->cases, unicode_marks, UNICODE_MARKS, BPE_MARK);
}

static inline void bpe_rules_open(BpeRules* rules, BpePattern pattern) {
    rules->pattern = pattern;
    const uint32_t letters_end = unicode_letters[UNICODE_LETTERS - 1][1] + 1;
    const uint32_t numbers_end = unicode_numbers[UNICODE_NUMBERS - 1][1] + 1;
    const uint32_t marks_end = unicode_marks[UNICODE_MARKS - 1][1] + 1;
    rules->end = letters_end > numbers_end ? letters_end : numbers_end; // blanks are far below
    rules->end = pattern.style == BPE_O200K && marks_end > rules->end ? marks_end : rules->end;
    rules->of = (unsigned char*)check_alloc(rules->end / 4 + 1, 1, "classes of characters");
    bpe_set_class_(rules->of, unicode_letters, UNICODE_LETTERS, BPE_LETTER);
    bpe_set_class_(rules->of, unicode_numbers, UNICODE_NUMBERS, BPE_NUMBER);
    bpe_set_class_(rules->of, unicode_blanks, UNICODE_BLANKS, BPE_BLANK);
    memset(&rules->nfc, 0, sizeof(rules->nfc));
    rules->joins = NULL;
    rules->cases = NULL;
    if (pattern.style == BPE_O200K) {
        bpe_open_cases_(rules);
    }
    if (pattern.normalizes) {
        nfc_open(&rules->nfc);
    }
}

static inline void bpe_rules_close(BpeRules* rules) {
    free(rules->of);
    free(rules->cases);
    free(rules->joins);
    nfc_close(&rules->nfc);
    memset(rules, 0, sizeof(*rules));
}

// Returns the length, and sets the class, of the non-ASCII character at the start of text[0 ..
// left); one byte of no class if it is invalid.
static inline int bpe_character(const BpeRules* rules, const unsigned char* text, size_t left, int* class_) {
    uint32_t c;
    const int length = utf8_decode(text, left, &c);
    *class_ = c < rules->end ? rules->of[c / 4] >> 2 * (c % 4) & 3 : BPE_OTHER;
    return length;
}

// Returns the length, and sets the class, of the character at the start of text[0 .. left), left >
// 0.
static inline int bpe_class_at(const BpeRules* rules, const unsigned char* text, size_t left, int* class_) {
    if (text[0] >= 0x80) {
        return bpe_character(rules, text, left, class_);
    }
    *class_ = rules->of[text[0] / 4] >> 2 * (text[0] % 4) & 3;
    return 1;
}

// Sets a character at the start of text[0 .. left), left > 0: its class, and its case, with all
// letters that have none as BPE_MARK. Returns its length.
static inline int bpe_case_at(const BpeRules* rules, const unsigned char* text, size_t left, int* class_,
                              int* case_) {
    uint32_t c = text[0];
    const int length = text[0] >= 0x80 ? utf8_decode(text, left, &c) : 1, is_known = c < rules->end;
    *class_ = is_known ? rules->of[c / 4] >> 2 * (c % 4) & 3 : BPE_OTHER;
    *case_ = is_known ? rules->cases[c / 4] >> 2 * (c % 4) & 3 : 0;
    *case_ = *case_ == 0 && *class_ == BPE_LETTER ? (int)BPE_MARK : *case_;
    return length;
}

static inline int bpe_is_line_end(unsigned char c) { return c == '\r' || c == '\n'; }

#endif
