// test_text_wrap.c -- text_wrap.h: words stay whole, lines fit, text in pieces gives the same
// output as at once, and no text can control a terminal.
#define TEXT_WRAP_IMPLEMENTATION

#include "llmc/base/rand.h"
#include "llmc/log/text_wrap.h"

#include "dev/test/lib/test.h"

// The text in pieces of at most `piece` bytes, whole characters, on a screen of `columns`.
static char* wrapped(const char* text, size_t piece, size_t columns, const char* indent) {
    char* out = NULL;
    size_t bytes;
    FILE* file = open_memstream(&out, &bytes);
    TextWrap wrap;
    text_wrap_begin(&wrap, file, columns, indent);
    for (size_t at = 0, end; text[at]; at = end) {
        for (end = at + 1; text[end] && (end - at < piece || (text[end] & 0xC0) == 0x80); end++) {
        }
        text_wrap_put(&wrap, text + at, end - at);
    }
    text_wrap_end(&wrap);
    fclose(file);
    return out;
}

static void expect_wrapped(const char* text, size_t columns, const char* indent, const char* wanted) {
    for (size_t piece = 1; piece < 60; piece++) {
        char* found = wrapped(text, piece, columns, indent);
        EXPECT(strcmp(found, wanted) == 0, "in pieces of %zu:\n%s\nwanted:\n%s", piece, found, wanted);
        free(found);
    }
}

TEST(words) {
    expect_wrapped("once upon a time", 10, "", "once upon\na time");
    expect_wrapped("once upon a time", 9, "  ", "once upon\n  a time");
    expect_wrapped("once  upon", 6, "", "once\n upon");
    expect_wrapped("a\n\nb c", 80, "  ", "a\n  \n  b c");
    expect_wrapped("a incomprehensibilities b", 10, "", "a\nincomprehensibilities\nb");
    expect_wrapped("\xC3\xA9\xC3\xA9\xC3\xA9 \xC3\xA9\xC3\xA9\xC3\xA9", 7, "",
                   "\xC3\xA9\xC3\xA9\xC3\xA9 \xC3\xA9\xC3\xA9\xC3\xA9");
    expect_wrapped("a\x1B[2J\tb\x07", 80, "", "a?[2J\tb?");
    expect_wrapped("as \x1B it  is\n", 0, "  ", "as \x1B it  is\n");
    expect_wrapped("", 10, "  ", "");
}

// Random texts: no line is wider than the screen unless it is one word, and only ends of lines
// differ.
TEST(random) {
    Rand rng = rand_open(3, 0);
    for (int trial = 0; trial < 200; trial++) {
        char text[400], *found;
        const size_t bytes = 1 + rand_below(&rng, sizeof(text) - 2), columns = 5 + rand_below(&rng, 30);
        for (size_t i = 0; i < bytes; i++) {
            text[i] = rand_below(&rng, 4) ? 'x' : ' ';
        }
        text[bytes] = '\0';
        found = wrapped(text, 1 + rand_below(&rng, 9), columns, "");
        EXPECT(strlen(found) == bytes, "each break is a blank");
        for (size_t i = 0; i < bytes; i++) {
            EXPECT(found[i] == text[i] || (found[i] == '\n' && text[i] == ' '), "byte %zu", i);
        }
        for (const char* line = found; *line;
             line += strcspn(line, "\n") + (line[strcspn(line, "\n")] == '\n')) {
            const size_t width = strcspn(line, "\n"), blanks = strspn(line, " ");
            EXPECT(width <= columns || strcspn(line + blanks, " \n") + blanks == width, "%.*s in %zu",
                   (int)width, line, columns);
        }
        free(found);
    }
}
