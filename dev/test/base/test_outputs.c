// test_outputs.c -- outputs.h: which files may be written, and the messages for all others.
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/outputs.h"

#include "dev/test/lib/test.h"

// One command line: what the run reads, a file or a directory, and writes itself, another output,
// and the one that is looked at.
typedef struct {
    const char *reads, *keeps, *other, *output;
} Case;

static void check_case(const void* context) {
    const Case* c = (const Case*)context;
    Outputs o;
    outputs_open(&o);
    if (c->reads) {
        (file_is_directory(c->reads) ? file_list_add_directory : file_list_add)(&o.reads, "data", c->reads);
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

static void link_to(const char* file, const char* name) { EXPECT(link(file, test_path(name)) == 0, ""); }

TEST(what_is_read) {
    char run[PATH_MAX], deep[PATH_MAX], page[PATH_MAX], linked[PATH_MAX], alias[PATH_MAX], missing[PATH_MAX];
    snprintf(run, sizeof(run), "%s", test_path("run"));
    mkdir(run, 0700);
    mkdir(test_path("run/step"), 0700);
    mkdir(test_path("run/step/part"), 0700);
    snprintf(deep, sizeof(deep), "%s", test_write("run/step/part/weights", "w", 1));
    snprintf(page, sizeof(page), "%s", test_write("run/page.html", "h", 1));
    snprintf(linked, sizeof(linked), "%s", test_write("blob", "b", 1));
    snprintf(alias, sizeof(alias), "%s", test_path("run/model"));
    snprintf(missing, sizeof(missing), "%s", test_path("run/mask"));
    symlink("../blob", alias);
    link_to(deep, "again");
    const Case same = {deep, NULL, NULL, deep}, inside = {run, NULL, NULL, deep},
               again = {run, NULL, NULL, page}, itself = {page, NULL, NULL, page},
               target = {alias, NULL, NULL, linked}, beside = {run, NULL, NULL, test_path("run/new")},
               nothing = {test_path("gone"), NULL, NULL, deep}, looked = {missing, NULL, NULL, missing},
               other_way = {missing, NULL, NULL, test_path("run/step/../mask")},
               hard_link = {deep, NULL, NULL, test_path("again")},
               neighbor = {run, NULL, NULL, test_write("running", "x", 1)};
    EXPECT(is_refused(same, 2, "--out |weights: the run reads this file"), "");
    EXPECT(is_refused(inside, 2, "weights: a file of |run, which the run reads"), "");
    EXPECT(is_refused(target, 2, "blob: the run reads this file"), "the target of a link");
    EXPECT(is_refused(hard_link, 2, "again: the run reads this file"), "");
    EXPECT(is_refused(looked, 2, "mask: the run looks for a file of this name"), "");
    EXPECT(is_refused(other_way, 2, "mask: the run looks for a file of this name"), "");
    EXPECT(passes(neighbor), "a name that starts as the directory's");
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
