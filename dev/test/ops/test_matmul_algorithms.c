// test_matmul_algorithms.c -- files of matmul algorithms: written ones read back; damaged ones,
// foreign ones and those of another machine do not; the cache, and several programs that write it
// at the same time.
#include "llmc/base/file.h"
#include "llmc/base/xxh64.h"
#include "llmc/base/check.h"
#include "llmc/ops/matmul_algorithms.h"
#include "dev/test/lib/test.h"

#define MACHINE "a card \"X\", sm_90, library 1"

// Choice number i: any numbers, all members different.
static MatmulChoice choice_of(int i) {
    MatmulChoice choice;
    memset(&choice, 0, sizeof(choice));
    const MatmulKey key = {1000 + i, 2, 3, 0, 1, 1, 0, 164, 1, 16, 1 + i % 2}; // some of one matrix
    choice.key = key;
    choice.chosen = i % 16;
    choice.candidates = 16;
    choice.ms = 0.125f * (float)i;
    for (int j = 0; j < MATMUL_ALGORITHM_BYTES; j++) {
        choice.algorithm[j] = (unsigned char)(7 * i + 5 * j);
    }
    return choice;
}

static void add(MatmulChoices* choices, int first, int count) {
    for (int i = first; i < first + count; i++) {
        const MatmulChoice choice = choice_of(i);
        matmul_choices_add(choices, &choice);
    }
}

// Returns true if choice number i is found unchanged.
static int has(const MatmulChoices* choices, int i) {
    const MatmulChoice wanted = choice_of(i), *found = matmul_choices_find(choices, &wanted.key);
    return found && memcmp(found, &wanted, sizeof(wanted)) == 0;
}

TEST(list) {
    MatmulChoices choices;
    matmul_choices_open(&choices);
    add(&choices, 0, MATMUL_CHOICES);
    MatmulChoice again = choice_of(3);
    again.chosen = 9;
    EXPECT(choices.count == MATMUL_CHOICES && !matmul_choices_add(&choices, &again) && has(&choices, 3),
           "the first choice for a product stays");
    again.key.rows = 1;
    EXPECT(!matmul_choices_add(&choices, &again) && !matmul_choices_find(&choices, &again.key),
           "a full list takes no more");
    matmul_choices_close(&choices);
}

TEST(file) {
    MatmulChoices written, read;
    char error[ERROR_BYTES] = "";
    const char* path = test_path("matmul.json");
    matmul_choices_open(&written);
    matmul_choices_open(&read);
    EXPECT(matmul_choices_try_read(&read, MACHINE, path, error) && read.count == 0, "no file: %s", error);
    matmul_choices_write(&written, MACHINE, path);
    EXPECT(matmul_choices_try_read(&read, MACHINE, path, error) && read.count == 0, "an empty list: %s",
           error);
    add(&written, 0, 3);
    matmul_choices_write(&written, MACHINE, path);
    EXPECT(matmul_choices_try_read(&read, MACHINE, path, error) && read.count == 3, "a list: %s", error);
    EXPECT(has(&read, 0) && has(&read, 1) && has(&read, 2), "other choices");
    EXPECT(!matmul_choices_try_read(&read, "a card Y", path, error) &&
               strstr(error, "matmul.json: of " MACHINE "; this is a card Y"),
           "another machine: %s", error);
    matmul_choices_close(&read);
    matmul_choices_close(&written);
}

// Expects that a text is refused, with these words, and adds nothing.
static void expect_refused(const char* text, size_t bytes, const char* words) {
    MatmulChoices read;
    char error[ERROR_BYTES] = "";
    const char* path = test_write("refused.json", text, bytes);
    matmul_choices_open(&read);
    EXPECT(!matmul_choices_try_read(&read, MACHINE, path, error) && read.count == 0 &&
               strstr(error, "refused.json: ") && strstr(error, words),
           "%.60s: %s, wanted %s", text, error, words);
    matmul_choices_close(&read);
}

// Expects a file of another program to be refused although its checksum is right.
static void expect_foreign(const char* text, const char* words) {
    char file[4096];
    const int length = snprintf(file, sizeof(file), "%s,\"xxh64\":\"", text);
    const int end = snprintf(file + length, sizeof(file) - (size_t)length, "%016" PRIx64 "\"}\n",
                             xxh64(file, (size_t)length));
    expect_refused(file, (size_t)(length + end), words);
}

TEST(damage) {
    MatmulChoices written;
    char *text, error[ERROR_BYTES];
    size_t bytes;
    matmul_choices_open(&written);
    add(&written, 0, 1);
    matmul_choices_write(&written, MACHINE, test_path("whole.json"));
    EXPECT(file_try_read(test_path("whole.json"), 1 << 20, &text, &bytes, error), "%s", error);
    for (size_t i = 0; i < bytes; i += 7) {
        text[i] ^= 1;
        expect_refused(text, bytes, "checksum");
        text[i] ^= 1;
        expect_refused(text, i, "checksum");
    }
    free(text);
    matmul_choices_close(&written);

    const char* head =
        "{\"format\":\"pretrain.c matmuls\",\"version\":1,\"machine\":\"a card \\\"X\\\", sm_90, "
        "library 1\"";
    char line[2048];
    expect_foreign("{\"format\":\"another\"", "of another; this is pretrain.c matmuls");
    expect_foreign("{\"format\":\"pretrain.c matmuls\",\"version\":2", "version 2, wanted 1");
    expect_foreign(head, "five members");
    static const char* const lists[][2] = {
        {"7", "'['"},
        {"[{}]", "five members"},
        {"[{\"key\":[1,2,3]}]", "10 or 11 numbers"},
        {"[{\"key\":[1,2,3,4,5,6,7,8,9,3000000000]}]", "below 2^31"},
        {"[{\"key\":[-1]}]", "a whole number"},
        {"[{\"algorithm\":\"00\"}]", "128 hexadecimal digits"},
        {"[{\"other\":1}]", "a member of a product"},
    };
    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        snprintf(line, sizeof(line), "%s,\"matmuls\":%s", head, lists[i][0]);
        expect_foreign(line, lists[i][1]);
    }
}

TEST(path_of_cache) {
    char path[PATH_MAX];
    setenv("XDG_CACHE_HOME", "/a/b", 1);
    setenv("HOME", "/home", 1);
    EXPECT(matmul_cache_path(path, "x") && strncmp(path, "/a/b/pretrain.c/matmul-", 23) == 0, "%s", path);
    setenv("XDG_CACHE_HOME", "relative", 1);
    EXPECT(matmul_cache_path(path, "x") && strncmp(path, "/home/.cache/pretrain.c/matmul-", 31) == 0, "%s",
           path);
    unsetenv("XDG_CACHE_HOME");
    unsetenv("HOME");
    EXPECT(!matmul_cache_path(path, "x"), "without a home: %s", path);
}

// Adds choice number i to the cache, as a program of its own.
static void add_to_cache(int i, const char* path) {
    MatmulChoices choices;
    char error[ERROR_BYTES] = "";
    matmul_choices_open(&choices);
    add(&choices, i, 1);
    EXPECT(matmul_cache_try_write(&choices, MACHINE, path, error), "%s", error);
    matmul_choices_close(&choices);
}

TEST(cache) {
    enum { WRITERS = 12 };
    char path[PATH_MAX], part[PATH_MAX + 16], error[ERROR_BYTES] = "";
    MatmulChoices read;
    setenv("XDG_CACHE_HOME", test_path("cache"), 1);
    EXPECT(matmul_cache_path(path, MACHINE), "no path");
    fflush(stdout);
    for (int i = 0; i < WRITERS; i++) {
        if (fork() == 0) {
            add_to_cache(i, path);
            _exit(test_failures_ ? EXIT_FAILURE : EXIT_SUCCESS);
        }
    }
    for (int i = 0, status; i < WRITERS; i++) {
        EXPECT(wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS, "a writer");
    }
    matmul_choices_open(&read);
    EXPECT(matmul_choices_try_read(&read, MACHINE, path, error) && read.count == WRITERS,
           "%d choices of %d writers: %s", read.count, WRITERS, error);
    for (int i = 0; i < WRITERS; i++) {
        EXPECT(has(&read, i), "choice %d", i);
    }
    snprintf(part, sizeof(part), "%s.123.part", path); // a killed program's
    FILE* file = fopen(part, "wb");
    EXPECT(file && fclose(file) == 0, "%s", part);
    EXPECT(truncate(path, 10) == 0, "truncate");
    add_to_cache(5, path);
    read.count = 0;
    EXPECT(matmul_choices_try_read(&read, MACHINE, path, error) && read.count == 1 && has(&read, 5),
           "a damaged cache is written anew: %s", error);
    EXPECT(access(part, F_OK) != 0, "%s is still there", part);

    add(&read, 1000, MATMUL_CHOICES); // more than there is room for: the oldest goes
    EXPECT(matmul_cache_try_write(&read, MACHINE, path, error), "%s", error);
    add_to_cache(7777, path);
    read.count = 0;
    EXPECT(matmul_choices_try_read(&read, MACHINE, path, error) && read.count == MATMUL_CHOICES &&
               has(&read, 7777) && !has(&read, 5) && has(&read, 1000),
           "a full cache: %d choices %s", read.count, error);

    test_write("file", "x", 1);
    setenv("XDG_CACHE_HOME", test_path("file"), 1);
    EXPECT(matmul_cache_path(path, MACHINE) && !matmul_cache_try_write(&read, MACHINE, path, error) &&
               strstr(error, "file/pretrain.c: cannot open"),
           "no directory: %s", error);
    matmul_choices_close(&read);
}
