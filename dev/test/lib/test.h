/*
test.h -- the macros and functions of every test.

    TEST(numbers) { EXPECT(1 + 1 == 2, "one and one"); }

The files test_*.c of a room become one program (test_main.c), which runs each TEST in a process of
its own: a test may change limits, close files or crash. The program's exit status is the verdict.
*/
#ifndef DEV_TEST_H
#define DEV_TEST_H

#include <dirent.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int test_failures_ = 0; // of this file's tests; globals are fine here

typedef struct Test {
    const char *file, *name;
    void (*run)(void);
    int (*command)(int argc, char** argv); // NULL: a test
    const int* failures;
    struct Test* next;
} Test;

#ifdef __cplusplus
extern "C"
#endif
    void
    test_register(Test* test);

// Defines a test.
#define TEST(name_)                                                                                          \
    static void name_##_test_(void);                                                                         \
    TEST_REGISTER_(name_, name_##_test_, NULL)                                                               \
    static void name_##_test_(void)

// Defines a test of code without threads. ThreadSanitizer, to which it could show nothing and which
// slows it down tenfold, does not run it.
#ifdef __SANITIZE_THREAD__
#define SERIAL_TEST(name_) __attribute__((unused)) static void name_##_test_(void)
#else
#define SERIAL_TEST(name_) TEST(name_)
#endif

// Defines what the test program does when it is started as `test_ROOM --name ARGUMENTS...`.
#define COMMAND(name_)                                                                                       \
    static int name_##_command_(int argc, char** argv);                                                      \
    TEST_REGISTER_(name_, NULL, name_##_command_)                                                            \
    static int name_##_command_(int argc, char** argv)

#define TEST_REGISTER_(name_, run_, command_)                                                                \
    __attribute__((constructor)) static void name_##_register_(void) {                                       \
        static Test test = {__FILE__, #name_, run_, command_, &test_failures_, NULL};                        \
        test_register(&test);                                                                                \
    }

// True if case `number` of a long test is to run: all of them, or with TEST_HALF=1 or 2 in the
// environment (dev/test/run.sh draws it) every second.
static inline int test_has_case(int number) {
    const char* half = getenv("TEST_HALF");
    return !half || number % 2 == atoi(half) % 2;
}

// Counts a failure and says which; the test continues, so that one run shows all that is wrong.
#define EXPECT(ok, ...)                                                                                      \
    do {                                                                                                     \
        if (!(ok)) {                                                                                         \
            test_failures_++;                                                                                \
            printf("%s:%d: FAILED: %s:", __FILE__, __LINE__, #ok);                                           \
            printf(" " __VA_ARGS__);                                                                         \
            printf("\n");                                                                                    \
        }                                                                                                    \
    } while (0)

// |got - want| <= tolerance; NaN fails.
#define EXPECT_NEAR(got, want, tolerance, ...)                                                               \
    do {                                                                                                     \
        const double got_ = (got), want_ = (want), tolerance_ = (tolerance);                                 \
        if (!(fabs(got_ - want_) <= tolerance_)) {                                                           \
            test_failures_++;                                                                                \
            printf("%s:%d: FAILED: %s is %.9g, wanted %.9g +- %.3g:", __FILE__, __LINE__, #got, got_, want_, \
                   tolerance_);                                                                              \
            printf(" " __VA_ARGS__);                                                                         \
            printf("\n");                                                                                    \
        }                                                                                                    \
    } while (0)

// Runs a statement only in the plain build of the simulated GPU: sanitizers check memory accesses,
// which fp16 and bf16 share.
#ifdef SANITIZED
#define UNSANITIZED(statement) ((void)0)
#else
#define UNSANITIZED(statement) (statement)
#endif

// Runs a statement, but not where instructions are emulated: sizes that take long there, and reach
// nothing more of them.
#ifdef EMULATED_X86
#define LARGE(statement) ((void)0)
#else
#define LARGE(statement) (statement)
#endif

// Returns the exit status of a test with a main() of its own, after its one line.
static inline int test_done(const char* name) {
    printf("%s: %s\n", name, test_failures_ ? "FAILED" : "ok");
    return test_failures_ ? EXIT_FAILURE : EXIT_SUCCESS;
}

static inline const char* test_tmpdir_path_(void) {
    static char path[64];
    return path;
}

static pid_t test_owner_ = 0; // a forked child that exits must not remove its parent's files

static inline void test_remove_tmpdir_(void) {
    char command[128];
    if (getpid() != test_owner_) {
        return;
    }
    snprintf(command, sizeof(command), "rm -rf '%s'", test_tmpdir_path_());
    if (system(command) != 0) {
        perror(command);
    }
}

// A fresh directory in TMPDIR or /tmp, the same one at every call, removed at exit.
static inline const char* test_tmpdir(void) {
    char* path = (char*)test_tmpdir_path_();
    if (!path[0]) {
        const char* parent = getenv("TMPDIR");
        const int is_short = parent && *parent && strlen(parent) < 32;
        snprintf(path, 64, "%s/llmc_test_XXXXXX", is_short ? parent : "/tmp");
        if (!mkdtemp(path)) {
            perror(path);
            exit(EXIT_FAILURE);
        }
        test_owner_ = getpid();
        atexit(test_remove_tmpdir_);
    }
    return path;
}

// The path of `name` in the temporary directory; valid for the next 15 calls.
static inline const char* test_path(const char* name) {
    static char paths[16][256];
    static int next = 0;
    char* path = paths[next++ % 16];
    snprintf(path, sizeof(paths[0]), "%s/%s", test_tmpdir(), name);
    return path;
}

// Writes a file into the temporary directory and returns its path.
static inline const char* test_write(const char* name, const void* data, size_t bytes) {
    const char* path = test_path(name);
    FILE* file = fopen(path, "wb");
    if (!file || fwrite(data, 1, bytes, file) != bytes || fclose(file) != 0) {
        perror(path);
        exit(EXIT_FAILURE);
    }
    return path;
}

// A file in memory; the caller frees .data, which has room for one byte more.
typedef struct {
    unsigned char* data;
    size_t bytes;
} TestFile;

static inline TestFile test_read(const char* path) {
    FILE* file = fopen(path, "rb");
    const long bytes = file && fseek(file, 0, SEEK_END) == 0 ? ftell(file) : -1;
    TestFile whole = {(unsigned char*)malloc((size_t)bytes + 1), (size_t)bytes};
    if (bytes < 0 || !whole.data || fseek(file, 0, SEEK_SET) != 0 ||
        fread(whole.data, 1, whole.bytes, file) != whole.bytes) {
        perror(path);
        exit(EXIT_FAILURE);
    }
    fclose(file);
    return whole;
}

// Returns a file as terminated text, which the caller frees.
static inline char* test_read_text(const char* path) {
    const TestFile file = test_read(path);
    file.data[file.bytes] = '\0';
    return (char*)file.data;
}

// Runs body(arg) in a child process. True if it ends with `status` and its stderr contains every
// one of the words in `wanted` (separated by '|'); otherwise prints what happened.
static inline int test_dies(void (*body)(const void*), const void* arg, int status, const char* wanted) {
    int pipe_fd[2];
    fflush(stdout);
    if (pipe(pipe_fd) != 0) {
        perror("pipe");
        exit(EXIT_FAILURE);
    }
    const pid_t child = fork();
    if (child == 0) {
        dup2(pipe_fd[1], STDERR_FILENO);
        close(pipe_fd[0]);
        close(pipe_fd[1]);
        body(arg);
        fflush(stderr);
        _exit(0);
    }
    close(pipe_fd[1]);
    char text[4096];
    size_t used = 0;
    for (ssize_t n;
         used < sizeof(text) - 1 && (n = read(pipe_fd[0], text + used, sizeof(text) - 1 - used)) > 0;) {
        used += (size_t)n;
    }
    text[used] = '\0';
    close(pipe_fd[0]);
    int result = 0;
    waitpid(child, &result, 0);
    int ok = WIFEXITED(result) && WEXITSTATUS(result) == status;
    char words[1024];
    snprintf(words, sizeof(words), "%s", wanted);
    for (char *save = NULL, *word = strtok_r(words, "|", &save); word; word = strtok_r(NULL, "|", &save)) {
        ok = ok && strstr(text, word);
    }
    if (!ok) {
        printf("wanted status %d and \"%s\"; got status %d and: %s\n", status, wanted,
               WIFEXITED(result) ? WEXITSTATUS(result) : -1, text);
    }
    return ok;
}

#endif
