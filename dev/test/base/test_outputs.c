// test_outputs.c -- outputs.h: which files may be written, and the messages for all others.
#include <sys/stat.h>

#include "llmc/base/check.h"
#include "llmc/base/outputs.h"

#include "dev/test/lib/test.h"

// One command line: what the run reads and writes itself, another output, and the one that is
// looked at.
typedef struct {
    const char *reads, *keeps, *other, *output;
} Case;

static void check_case(const void* context) {
    const Case* c = (const Case*)context;
    Outputs o;
    outputs_open(&o);
    if (c->reads) {
        outputs_read(&o, c->reads);
    }
    if (c->keeps) {
        outputs_keep(&o, c->keeps);
    }
    outputs_add(&o, "other", c->other ? c->other : "");
    outputs_add(&o, "out", c->output);
    outputs_check(&o);
    outputs_close(&o);
}

static int passes(Case c) { return test_dies(check_case, &c, 0, ""); }
static int is_refused(Case c, int status, const char* words) {
    return test_dies(check_case, &c, status, words);
}

static Case only(const char* output) {
    const Case c = {NULL, NULL, NULL, output};
    return c;
}

TEST(what_it_is) {
    test_write("old", "mine", 4);
    mkfifo(test_path("fifo"), 0600);
    symlink("old", test_path("link"));
    symlink("nowhere", test_path("dangling"));
    EXPECT(passes(only("")), "none");
    EXPECT(passes(only(test_path("new"))), "a new file");
    EXPECT(passes(only(test_path("old"))), "a regular file");
    EXPECT(is_refused(only(test_path("fifo")), 1,
                      "--out |fifo: not a regular file, wanted a file or a new name"),
           "");
    EXPECT(is_refused(only("/dev/null"), 1, "--out /dev/null: not a regular file"), "");
    EXPECT(is_refused(only(test_path("link")), 1, "link: a symbolic link"), "");
    EXPECT(is_refused(only(test_path("dangling")), 1, "dangling: a symbolic link"), "");
    EXPECT(is_refused(only(test_tmpdir()), 1, ": a directory"), "");
    EXPECT(is_refused(only(test_path("no/x")), 1, "cannot write into |/no: No such file"), "");
    EXPECT(is_refused(only(test_path("old/x")), 1, "cannot write into"), "");
}

TEST(what_is_read) {
    char run[PATH_MAX], deep[PATH_MAX], page[PATH_MAX], linked[PATH_MAX];
    snprintf(run, sizeof(run), "%s", test_path("run"));
    mkdir(run, 0700);
    mkdir(test_path("run/step"), 0700);
    snprintf(deep, sizeof(deep), "%s", test_write("run/step/weights", "w", 1));
    snprintf(page, sizeof(page), "%s", test_write("run/page.html", "h", 1));
    snprintf(linked, sizeof(linked), "%s", test_write("blob", "b", 1));
    symlink("../blob", test_path("run/model"));
    const Case same = {deep, NULL, NULL, deep}, inside = {run, NULL, NULL, deep},
               again = {run, NULL, NULL, page}, itself = {page, NULL, NULL, page},
               target = {run, NULL, NULL, linked}, beside = {run, NULL, NULL, test_path("run/new")},
               nothing = {test_path("gone"), NULL, NULL, deep};
    EXPECT(is_refused(same, 2, "--out |weights: the run reads this file"), "");
    EXPECT(is_refused(inside, 2, "weights: a file of |run, which the run reads"), "");
    EXPECT(is_refused(target, 2, "blob: a file of |run, which the run reads"), "");
    EXPECT(is_refused(itself, 2, "page.html: the run reads this file"), "");
    EXPECT(passes(again), "a page beside a log may be written again");
    const Case texts = {run, NULL, NULL, test_write("run/texts.jsonl", "t", 1)},
               log = {run, NULL, NULL, test_write("run/log.jsonl", "l", 1)};
    EXPECT(passes(texts), "so may texts");
    EXPECT(is_refused(log, 2, "log.jsonl: a file of |run, which the run reads"), "");
    EXPECT(passes(beside), "a new file beside a model");
    EXPECT(passes(nothing), "what is not there is not read");
}

TEST(twice) {
    char directory[PATH_MAX];
    mkdir(test_path("twice"), 0700);
    snprintf(directory, sizeof(directory), "%s", test_path("twice/../twice/x"));
    const Case same = {NULL, NULL, directory, test_path("twice/x")},
               different = {NULL, NULL, directory, test_path("twice/y")},
               own = {NULL, directory, NULL, test_path("twice/x")},
               unborn = {NULL, test_path("unborn/log"), NULL, test_path("twice/log")};
    EXPECT(is_refused(same, 2, "twice/x: the same file as --other "), "");
    EXPECT(is_refused(own, 2, "twice/x: the run writes this file itself"), "");
    EXPECT(passes(different), "two names");
    EXPECT(passes(unborn), "a directory that is not there yet");
}
