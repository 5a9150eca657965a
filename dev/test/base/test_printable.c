// test_printable.c -- printable.h: names and words from elsewhere cannot control a terminal.
#include "llmc/base/printable.h"

#include "llmc/base/check.h"

#include "dev/test/lib/test.h"

static void expect(const char* text, const char* wanted) {
    char copy[64], small[4];
    EXPECT(strcmp(printable_copy(copy, sizeof(copy), text), wanted) == 0, "'%s' became '%s'", wanted, copy);
    EXPECT(strcmp(printable(copy), wanted) == 0, "'%s' again became '%s'", wanted, copy);
    printable_copy(small, sizeof(small), text);
    EXPECT(strlen(small) <= 3 && strncmp(small, wanted, strlen(text) < 3 ? strlen(text) : 1) == 0, "%s",
           small);
}

// A line of a screen, and what a reader says of a file.
static void test_lines(void) {
    char* text = NULL;
    char error[ERROR_BYTES];
    size_t bytes;
    FILE* file = open_memstream(&text, &bytes);
    printable_line(file, "%s: %d", "a\x1b[31m\nb", 7);
    fclose(file);
    EXPECT(strcmp(text, "a?[31m?b: 7\n") == 0, "%s", text);
    free(text);
    error_set(error, "x\x1b.bin", "tensor %s", "\x9b");
    EXPECT(strcmp(error, "x?.bin: tensor ?") == 0, "%s", error);
}

TEST(printable) {
    test_lines();
    expect("", "");
    expect("node-07.example, pid 12", "node-07.example, pid 12");
    expect("Zürich 東京 🚀", "Zürich 東京 🚀");
    expect("\x1b]0;mine\x07", "?]0;mine?");
    expect("a\tb\nc\rd\x7f", "a?b?c?d?");
    expect("\xc2\x9bm", "??m");       // U+009B is ESC [
    expect("\xc2\xa0.", "\xc2\xa0."); // the first one that is not a control character
    expect("\x9bm", "?m");            // the same to a terminal that takes bytes
    expect("\xe6\x9d", "??");         // cut in the middle
    expect("\xed\xa0\x80", "???");    // half of a surrogate
}
