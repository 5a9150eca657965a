// test_shell_word.c -- shell_word.h: bash reads every word back.
#define SHELL_WORD_IMPLEMENTATION

#include "llmc/base/shell_word.h"
#include "dev/test/lib/test.h"

static const char* const words[] = {
    "plain",     "a b",   "it's",     "$HOME `x` \"y\" \\", "",      "--lr=0.1", "A=b", "*?[a]~{1,2}",
    "tab\there", "end\n", "\033[31m", "\xff\xfe 'x' \\",    "~root", "!",        "#",   "\xC3\xA9t\xC3\xA9"};
enum { WORDS_ = sizeof(words) / sizeof(words[0]) };

// bash prints each word as it was, with a zero after it.
TEST(bash) {
    char command[PATH_MAX], *all[WORDS_ + 1];
    FILE* script = fopen(test_path("script"), "w");
    fputs("printf '%s\\0' ", script);
    for (int i = 0; i < WORDS_; i++) {
        all[i] = (char*)words[i];
    }
    all[WORDS_] = NULL;
    shell_print_command(script, all);
    fclose(script);
    snprintf(command, sizeof(command), "bash %s", test_path("script"));
    FILE* out = popen(command, "r");
    for (int i = 0; i < WORDS_; i++) {
        char word[64];
        size_t n = 0;
        for (int c; n < sizeof(word) - 1 && (c = fgetc(out)) > 0;) {
            word[n++] = (char)c;
        }
        word[n] = '\0';
        EXPECT(strcmp(word, words[i]) == 0, "word %d: %s", i, word);
    }
    pclose(out);
}

TEST(text) {
    EXPECT(strcmp(shell_word("--lr=0.1").text, "--lr=0.1") == 0, "");
    EXPECT(strcmp(shell_word("A=b").text, "'A=b'") == 0, "a setting of the shell's");
    EXPECT(strcmp(shell_word("a b's").text, "'a b'\\''s'") == 0, "%s", shell_word("a b's").text);
    EXPECT(strcmp(shell_word("\033x").text, "$'\\033x'") == 0, "%s", shell_word("\033x").text);
}
