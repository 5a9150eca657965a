// runner.c -- runs the tests that are linked with it (TEST and COMMAND of test.h).
//
//     test_ROOM                        all, each in a process of its own
//     test_ROOM WORD...                those whose names contain one of the words; a single one in
//                                      this process, for a debugger
//     test_ROOM -WORD...               those whose names contain none of them
//     test_ROOM --list                 prints the names
//     test_ROOM --COMMAND ARGUMENT...  one of the commands that scripts use
//
// One line for each test that fails; the last line counts.
#include "llmc/base/threads.h"

#include "dev/test/lib/test.h"

static Test* tests_ = NULL; // in the order in which they are linked

void test_register(Test* test) {
    Test** end = &tests_;
    while (*end) {
        end = &(*end)->next;
    }
    *end = test;
}

// Writes "module.name" into `text`, or "module" where both are the same.
static void test_name_(const Test* test, char text[256]) {
    const char* slash = strrchr(test->file, '/');
    const char* module = slash ? slash + 1 : test->file;
    module += strncmp(module, "test_", 5) == 0 ? 5 : 0;
    const size_t length = strcspn(module, ".");
    const int is_whole = strlen(test->name) == length && strncmp(module, test->name, length) == 0;
    snprintf(text, 256, "%.*s%s%s", (int)length, module, is_whole ? "" : ".", is_whole ? "" : test->name);
}

static int test_is_wanted_(const Test* test, char** words) {
    char name[256];
    test_name_(test, name);
    int is_wanted = !*words || **words == '-', is_left_out = 0;
    for (; *words; words++) {
        const int leaves_out = **words == '-';
        *(leaves_out ? &is_left_out : &is_wanted) |= strstr(name, *words + leaves_out) != NULL;
    }
    return is_wanted && !is_left_out && test->run;
}

// Runs a test in a child process. Returns 1 if it ends well.
static int test_run_(const Test* test) {
    char name[256];
    int status = -1;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        test->run();
        exit(*test->failures > 0);
    }
    if (child > 0 && waitpid(child, &status, 0) == child && status == 0) {
        return 1;
    }
    test_name_(test, name);
    printf("FAILED: %s", name);
    printf(WIFSIGNALED(status) ? ", by signal %d\n" : "\n", WTERMSIG(status));
    return 0;
}

// Runs a single test in this process. Returns 1 if it ends well.
static int test_run_here_(const Test* test) {
    test->run();
    return *test->failures == 0;
}

static int test_command_(const char* name, int argc, char** argv) {
    char text[256];
    for (const Test* test = tests_; test; test = test->next) {
        if (test->command && strcmp(name, test->name) == 0) {
            return test->command(argc, argv);
        }
        if (test->run && strcmp(name, "list") == 0) {
            test_name_(test, text);
            puts(text);
        }
    }
    return strcmp(name, "list") != 0;
}

int main(int argc, char** argv) {
    const char* slash = strrchr(argv[0], '/');
    int wanted = 0, failed = 0;
    threads_wait_briefly(argv);
    if (argc > 1 && strncmp(argv[1], "--", 2) == 0) {
        return test_command_(argv[1] + 2, argc - 2, argv + 2);
    }
    for (const Test* test = tests_; test; test = test->next) {
        wanted += test_is_wanted_(test, argv + 1);
    }
    for (const Test* test = tests_; test; test = test->next) {
        if (test_is_wanted_(test, argv + 1)) {
            failed += !(wanted == 1 ? test_run_here_ : test_run_)(test);
        }
    }
    printf("%s: %d tests, %d failed\n", slash ? slash + 1 : argv[0], wanted, failed);
    return wanted == 0 || failed > 0;
}
