// test_text_stream.c -- text_stream.h: whole characters, stop strings across tokens, and pending
// bytes.
#include "llmc/generate/text_stream.h"
#include "dev/test/lib/test.h"

static TextStream stream;

// Returns the text that is printed after each of the tokens (separated by |), followed by |; at the
// end the rest.
static const char* shown(const OptionList* stop, const char* tokens) {
    static char text[512];
    FILE* file = fmemopen(text, sizeof(text), "w");
    TextWrap wrap;
    text_wrap_begin(&wrap, file, 0, "");
    text_stream_open(&stream, stop);
    for (const char* token = tokens; *token && !stream.is_stopped; token += strspn(token, "|")) {
        const size_t length = strcspn(token, "|");
        text_stream_add(&stream, token, length);
        text_stream_print(&stream, &wrap, stream.is_stopped ? TEXT_ENDS : TEXT_GOES_ON);
        fputc('|', file);
        token += length;
    }
    text_stream_print(&stream, &wrap, TEXT_ENDS);
    fclose(file);
    text_stream_close(&stream);
    return text;
}

static void expect(const OptionList* stop, const char* tokens, const char* want) {
    const char* got = shown(stop, tokens);
    EXPECT(strcmp(got, want) == 0, "%s came out as %s, wanted %s", tokens, got, want);
}

TEST(characters) {
    expect(NULL, "Hi| you", "Hi| you|");
    expect(NULL, "a\xC3|\xA9z", "a|\xC3\xA9z|");                   // e acute
    expect(NULL, "\xF0|\x9F|\x98|\x80!", "|||\xF0\x9F\x98\x80!|"); // a face in four tokens
    expect(NULL, "\xE2\x82|x", "|\xEF\xBF\xBD\xEF\xBF\xBDx|");     // never completed
    expect(NULL, "a\xE2\x82", "a|\xEF\xBF\xBD\xEF\xBF\xBD");       // nor at the end
    expect(NULL, "\x80|a", "\xEF\xBF\xBD|a|");                     // belongs to nothing
    expect(NULL, "\xE0\x80|a", "\xEF\xBF\xBD\xEF\xBF\xBD|a|");     // no character starts so
    expect(NULL, "\xED\xA0|a", "\xEF\xBF\xBD\xEF\xBF\xBD|a|");     // a surrogate
    expect(NULL, "\xF4\x8F|\xBF\xBF", "|\xF4\x8F\xBF\xBF|");       // the last character
}

TEST(stops) {
    const OptionList one = {1, {"\n\n"}}, two = {2, {"END", "NDx"}}, accent = {1, {"\xC3\xA9"}};
    expect(&one, "a\n|b\n|\nc", "a|\nb||");
    expect(&one, "a\n|b", "a|\nb|");
    expect(&one, "a\n", "a|\n");
    expect(&one, "x\n\ny|z", "x|");
    EXPECT(stream.is_stopped, "the stop string");
    expect(&two, "aE|N|b", "a||ENb|");
    expect(&two, "aE|N|D", "a|||");
    expect(&two, "aN|Dx", "a||");
    expect(&two, "aE|ND", "a||");
    expect(&two, "aEND.NDx", "a|");
    expect(&accent, "a\xC3|\xA9z", "a||");
    expect(&accent, "a\xC3|\xA8z", "a|\xC3\xA8z|");
}

// The earliest one ends the text, in whatever order they are given.
TEST(earliest) {
    const OptionList stop = {2, {"cd", "bcd"}};
    expect(&stop, "abcd", "a|");
    expect(&stop, "a|b|c|d", "a||||");
}
