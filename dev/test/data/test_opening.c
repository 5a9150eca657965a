// test_opening.c -- opening.h: the first words of a stream, and openings of the built-in stories.
#include "dev/test/lib/test.h"

#include "llmc/base/check.h"
#include "llmc/data/opening.h"

#include <string.h>

// Expects the opening of a text of bytes, of which each 0x01 stands for end-of-text.
static void expect_opening(const Tokenizer* tokenizer, const char* text, const char* wanted) {
    uint16_t tokens[512];
    char found[OPENING_BYTES];
    TokenStream stream;
    const size_t count = strlen(text);
    for (size_t i = 0; i < count; i++) {
        tokens[i] = text[i] == 1 ? TOKENIZER_BYTES_EOT : (unsigned char)text[i];
    }
    tokens_open_memory(&stream, tokens, count, TOKENIZER_BYTES_EOT + 1, "test");
    opening_of(found, &stream, tokenizer);
    EXPECT(strcmp(found, wanted) == 0, "\"%s\": found \"%s\", wanted \"%s\"", text, found, wanted);
    tokens_close(&stream);
}

TEST(first_words) {
    Tokenizer bytes;
    tokenizer_open_bytes(&bytes);
    expect_opening(&bytes, "First Citizen:\nBefore we proceed", "First Citizen:");
    expect_opening(&bytes, "\1\n  It was the best of times", "It was the best");
    expect_opening(&bytes, "\1one\1two", "one");
    expect_opening(&bytes, "one two  \n", "one two");
    expect_opening(&bytes, "\1\1one two", "one two");
    expect_opening(&bytes, "Grüße, Welt", "Grüße, Welt");
    expect_opening(&bytes, "a\xff", "a");
    expect_opening(&bytes, "\n\xff\1", "");
    expect_opening(&bytes, "word abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz", "word");
    expect_opening(&bytes, "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz",
                   "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstu");
    tokenizer_close(&bytes);
}

TEST(known_openings) {
    static const char* const words[] = {"One", " sunny", " day", "It", " was", "<|endoftext|>"};
    char error[ERROR_BYTES] = "no word";
    Tokenizer tokenizer;
    tokenizer_open_words(&tokenizer, words, 6);
    opening_add_known(error, &tokenizer);
    EXPECT(strcmp(error, "no word; it has the words of, for example, \"One sunny day\"") == 0, "%s", error);
    tokenizer_close(&tokenizer);
}
