/*
enum_words.h -- words in messages: the user's choices, each an enum and its words from one list; and
plurals.

    #define PACKING_WORDS(X) X(PACK_STREAM, "stream") X(PACK_PAD, "pad")

    typedef enum { PACKING_WORDS(WORDS_VALUE) } Packing;
    static const char* const names[] = {PACKING_WORDS(WORDS_NAME)};    indexed by the enum
    WORDS_CHOICE(PACKING_WORDS)                     "stream|pad", for a table of options

    printf("%d thread%s", n, words_s(n))            "1 thread", "2 threads"
*/
#ifndef LLMC_ENUM_WORDS_H
#define LLMC_ENUM_WORDS_H

// A list may have more columns than the value and its word.
#define WORDS_VALUE(value, word, ...) value,
#define WORDS_NAME(value, word, ...) word,
#define WORDS_BAR_(value, word, ...) "|" word
#define WORDS_CHOICE(words) (&(words(WORDS_BAR_))[1]) // without the first bar

// Returns the plural's ending after this number.
static inline const char* words_s(double number) { return number == 1 ? "" : "s"; }

#endif
