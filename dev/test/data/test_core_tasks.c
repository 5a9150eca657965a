// test_core_tasks.c -- core_bundle.h, core_tasks.h: reads a bundle, and refuses a bad one by file
// and line; prompts and scored tokens by hand. task_oracle.h has the losses.
#include <unistd.h>

#include "llmc/base/file.h"
#include "llmc/data/core_bundle.h"
#include "llmc/data/core_tasks.h"
#include "dev/test/lib/test.h"

#define FIXTURES "dev/ref/fixtures/core"

static Tokenizer bytes;

static void write_file(const char* name, const char* text) {
    char path[PATH_MAX], error[ERROR_BYTES];
    snprintf(path, sizeof(path), "%s", test_path(name));
    CHECK(file_try_write_text(path, text, strlen(text), error), "%s", error);
}

static const char* const YAML = "# tasks\nicl_tasks:\n- label: 'it''s'  \n  dataset_uri: a.jsonl # here\n"
                                "  num_fewshot: [1]\n  icl_task_type: multiple_choice\n";
static const char* const CSV = "Random baseline,Eval Task\r\n50,\"it's\"\r\n";
static const char* const LINES = "{\"query\": \"q\", \"choices\": [\"ab\", \"ac\"], \"gold\": 1}\n"
                                 "{\"query\": \"r\", \"choices\": [\"x\", \"x y\"], \"gold\": 0}\n";

// Writes a bundle; a NULL leaves a file as it is written by default.
static void write_bundle(const char* yaml, const char* csv, const char* lines) {
    file_make_directory(test_path("core/eval_data"));
    write_file("core/core.yaml", yaml ? yaml : YAML);
    write_file("core/eval_meta_data.csv", csv ? csv : CSV);
    write_file("core/eval_data/a.jsonl", lines ? lines : LINES);
}

static void open_task(Task* task, int T) {
    CoreBundle bundle;
    char directory[PATH_MAX];
    const TaskSettings settings = {&bytes, bytes.vocab_size, bytes.eot, T, 0};
    snprintf(directory, sizeof(directory), "%s", test_path("core"));
    core_bundle_open(&bundle, directory);
    core_task_open(task, &bundle.tasks[0], directory, settings);
    core_bundle_close(&bundle);
}

// The document is end-of-text and this text, of whose bytes the last ones are scored.
static void check_document(const Task* task, size_t d, const char* text, int scored) {
    const TaskDocument* document = &task->documents[d];
    const int* tokens = task->tokens + document->first;
    int is_same = document->length == 1 + (int)strlen(text) && tokens[0] == bytes.eot;
    for (int i = 1; is_same && i < document->length; i++) {
        is_same = tokens[i] == (unsigned char)text[i - 1];
    }
    EXPECT(is_same, "document %zu has %d tokens, wanted \"%s\"", d, document->length, text);
    EXPECT(document->scored == scored, "%d of document %zu scored, wanted %d", document->scored, d, scored);
}

TEST(core_bundle_fixture) {
    CoreBundle bundle;
    tokenizer_open_bytes(&bytes);
    core_bundle_open(&bundle, FIXTURES);
    EXPECT(bundle.count == 6, "%d tasks", bundle.count);
    const CoreTask* task = &bundle.tasks[1];
    EXPECT(strcmp(task->label, "choices_two") == 0 && strcmp(task->file, "a/choices.jsonl") == 0, "names");
    EXPECT(strcmp(task->delimiter, "\nA: ") == 0 && task->shots == 2 && task->form == TASK_QUERIES, "how");
    EXPECT_NEAR(task->baseline, 0.333, 1e-12, "baseline");
    EXPECT(strcmp(bundle.tasks[0].delimiter, " ") == 0, "a blank by default");
    core_bundle_close(&bundle);
}

// Choices that share their start, one of which is the start of the other; few enough examples that
// each is before the other.
TEST(core_task_choices) {
    Task task;
    tokenizer_open_bytes(&bytes);
    write_bundle(NULL, NULL, NULL);
    open_task(&task, 32);
    const int first = task.examples[0].gold == 1 ? 0 : 2; // the order is Python's
    EXPECT(strcmp(task.name, "core/it's") == 0 && task.num_examples == 2 && task.baseline == 0.5, "the task");
    check_document(&task, (size_t)first, "r x\n\nq ab", 1);
    check_document(&task, (size_t)first + 1, "r x\n\nq ac", 1);
    check_document(&task, 2 - (size_t)first, "q ac\n\nr x", 0);
    check_document(&task, 3 - (size_t)first, "q ac\n\nr x y", 2);
    task_close(&task);
}

// An ending without tokens of its own is chosen only as the first; others by their mean.
TEST(core_task_empty_ending) {
    Task task;
    const TaskResult results[4] = {{9, 0}, {8, 0}, {9, 0}, {8, 0}};
    tokenizer_open_bytes(&bytes);
    for (int swapped = 0; swapped < 2; swapped++) {
        write_bundle(NULL, NULL,
                     swapped ? "{\"query\": \"r\", \"choices\": [\"x y\", \"x\"], \"gold\": 0}\n"
                               "{\"query\": \"s\", \"choices\": [\"z y\", \"z\"], \"gold\": 0}\n"
                             : "{\"query\": \"r\", \"choices\": [\"x\", \"x y\"], \"gold\": 0}\n"
                               "{\"query\": \"s\", \"choices\": [\"z\", \"z y\"], \"gold\": 0}\n");
        open_task(&task, 32);
        const TaskScore score = task_score(&task, results);
        EXPECT(score.acc_norm.value == 1 && score.centered == 1, "%g right", score.acc_norm.value);
        task_close(&task);
    }
}

// Prompts of more tokens than a row keep the last ones.
TEST(core_task_cut) {
    Task task;
    tokenizer_open_bytes(&bytes);
    write_bundle(NULL, NULL, NULL);
    open_task(&task, 8);
    EXPECT(task.num_cut == 4 && task.documents[0].length == 8, "%zu cut", task.num_cut);
    const int* tokens = task.tokens + task.documents[0].first;
    EXPECT(tokens[0] != bytes.eot && (tokens[7] == 'b' || tokens[7] == 'x'), "the last tokens");
    task_close(&task);
}

// Blanks around a context, of Unicode too, and before the ending.
TEST(core_task_continuations) {
    Task task;
    tokenizer_open_bytes(&bytes);
    write_bundle("icl_tasks:\n-\n    label: l\n    dataset_uri: \"a.jsonl\"\n    num_fewshot: [ 0 ]\n"
                 "    icl_task_type: language_modeling\n    continuation_delimiter: ' '\n",
                 "Eval Task,x,Random baseline\n\"l\",\"a \"\"b\"\",\n\",0\n\n",
                 "{\"context\": \"\\u00a0 a\\u3000\\n\", \"continuation\": \"b c\"}\n");
    open_task(&task, 32);
    check_document(&task, 0, "a b c", 4); // with the blank
    EXPECT(task.kind == TASK_CONTINUATION && task.baseline == 0, "the task");
    task_close(&task);
}

typedef struct {
    const char *yaml, *csv, *lines, *wanted;
} Bad;

static void open_bad(const void* bad_) {
    const Bad* bad = (const Bad*)bad_;
    Task task;
    write_bundle(bad->yaml, bad->csv, bad->lines);
    open_task(&task, 16);
}

TEST(core_bad_bundles) {
    static const Bad bad[] = {
        {"tasks:\n", NULL, NULL, "core.yaml:1: found \"tasks:\", wanted \"icl_tasks:\""},
        {"icl_tasks:\n", NULL, NULL, "core.yaml: no tasks"},
        {"icl_tasks:\n  label: x\n", NULL, NULL, "core.yaml:2: found \"  label: x\", wanted a task"},
        {"icl_tasks:\n- label: x\n   dataset_uri: y\n", NULL, NULL, "core.yaml:3: 3 blanks|wanted 2"},
        {"icl_tasks:\n- label: x\n  names: y\n", NULL, NULL,
         "core.yaml:3: found the key \"names\", wanted label"},
        {"icl_tasks:\n- label: x\n  label: y\n", NULL, NULL, "core.yaml:3: label for the second time"},
        {"icl_tasks:\n- label: {x}\n", NULL, NULL, "core.yaml:2: found \"{x}\", wanted a text"},
        {"icl_tasks:\n- label: \"x\n", NULL, NULL, "core.yaml:2: a text without its closing \""},
        {"icl_tasks:\n- label: \"\\x\"\n", NULL, NULL, "core.yaml:2: found \\x, wanted \\n"},
        {"icl_tasks:\n- label: 'x' y\n", NULL, NULL, "core.yaml:2: found \" y\" after a text"},
        {"icl_tasks:\n- num_fewshot: 3\n", NULL, NULL,
         "core.yaml:2: num_fewshot is \"3\", wanted one number"},
        {"icl_tasks:\n- num_fewshot: [101]\n", NULL, NULL, "core.yaml:2: num_fewshot is \"[101]\"|up to 100"},
        {"icl_tasks:\n- icl_task_type: question_answering\n", NULL, NULL,
         "core.yaml:2: icl_task_type is \"question_answering\", wanted multiple_choice"},
        {"icl_tasks:\n\n- label: x\n  num_fewshot: [1]\n", NULL, NULL,
         "core.yaml:3: a task without dataset_uri"},
        {NULL, "Eval Task,Percent\n", NULL, "eval_meta_data.csv:1: no column \"Random baseline\""},
        {NULL, "Eval Task,Random baseline\nother,3\n", NULL, "eval_meta_data.csv: no line about it's"},
        {NULL, "Eval Task,Random baseline\nit's\n", NULL, "eval_meta_data.csv:2: 1 fields, wanted 2"},
        {NULL, "Eval Task,Random baseline\n\"a\nb\",1\nit's,100\n", NULL,
         "eval_meta_data.csv:4: the random baseline of it's is \"100\""},
        {NULL, NULL, "{\"context\": \"a\", \"continuation\": \"b\"}\n",
         "a.jsonl:1: fields of language_modeling, wanted those of multiple_choice"},
        {NULL, NULL, "\n{\"query\": \"q\", \"choices\": [\"a\"], \"gold\": 0}\n",
         "a.jsonl:2: 1 to choose from"},
        {NULL, NULL, "{\"query\": \"q\", \"choices\": [\"a\", \"b\"], \"gold\": 2}\n",
         "a.jsonl:1: the right one is"},
        {NULL, NULL, "{\"query\": \"q\", \"choices\": [\"a\", \"b\"], \"gold\": 0}\n",
         "a.jsonl: 1 example, wanted more than the 1 before each question"},
        {NULL, NULL,
         "{\"query\": \"q\", \"choices\": [\"a\", \"01234567890123456\"], \"gold\": 0}\n"
         "{\"query\": \"q\", \"choices\": [\"a\", \"b\"], \"gold\": 0}\n",
         "a.jsonl:1: an ending of 17 tokens, wanted fewer than --seq-len 16"},
        {NULL, NULL, "", "a.jsonl: 0 examples"},
    };
    tokenizer_open_bytes(&bytes);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        EXPECT(test_dies(open_bad, &bad[i], EXIT_FAILURE, bad[i].wanted), "%s", bad[i].wanted);
    }
}
