// test_eval_tasks.c -- eval_tasks.h: reads every form, refuses malformed lines by place; rows,
// windows, and scores computed by hand.
#include "llmc/base/check.h"
#include "llmc/base/rand.h"
#include "llmc/data/eval_task_files.h"
#include "llmc/data/eval_tasks.h"
#include "dev/test/lib/test.h"

#define FIXTURES "dev/ref/fixtures/tasks/"

static Tokenizer bytes;

static TaskSettings settings_of(int T, size_t max) {
    const TaskSettings settings = {&bytes, bytes.eot, T, max};
    return settings;
}

// Adds a document of `length` tokens from `first` on.
static void add(Task* task, int first, int length, int scored) {
    int* tokens = task_begin(task, (size_t)length);
    for (int i = 0; i < length; i++) {
        tokens[i] = first + i;
    }
    task_add(task, (size_t)length, scored, &bytes);
}

// ---- rows ----

// Every document is whole in one row, in order, and its places are what they should be.
static void check_rows(const Task* task) {
    enum { T = 16 };
    int inputs[T], targets[T], starts[T];
    size_t d = 0;
    for (size_t row = 0; row < task->num_rows; row++) {
        int at = 0;
        task_fill(task, row, inputs, targets, starts);
        for (; d < task->rows[row + 1]; d++) {
            const TaskDocument* document = &task->documents[d];
            const int *tokens = task->tokens + document->first, start = at, places = document->length - 1;
            for (int i = 0; i < places; i++, at++) {
                EXPECT(at < T && inputs[at] == tokens[i] && starts[at] == start, "row %zu, place %d", row,
                       at);
                EXPECT(targets[at] == (i + document->scored < places ? -1 : tokens[i + 1]),
                       "row %zu, target %d", row, at);
            }
        }
        for (; at < T; at++) {
            EXPECT(targets[at] == -1 && starts[at] == at, "row %zu, padding at %d", row, at);
        }
    }
    EXPECT(d == task->num_documents, "%zu of %zu documents", d, task->num_documents);
}

static void test_rows(void) {
    Rand rng = rand_open(1, 1);
    for (int count = 0; count < 40; count++) {
        Task task;
        task_open(&task, "rows", TASK_CONTINUATION, 16);
        for (int i = 0; i < count; i++) {
            const int scored = 1 + (int)rand_below(&rng, 16), context = 1 + (int)rand_below(&rng, 20);
            add(&task, i, context + scored, scored);
            const TaskDocument* last = &task.documents[task.num_documents - 1];
            EXPECT(last->length <= 17 && last->scored == scored, "a document of %d tokens", last->length);
            EXPECT(task.tokens[last->first + (size_t)last->length - 1] == i + context + scored - 1,
                   "its end");
        }
        task_pack(&task);
        check_rows(&task);
        task_close(&task);
    }
}

static void test_cut(void) {
    Task task;
    task_open(&task, "cut", TASK_CONTINUATION, 4);
    add(&task, 10, 5, 2); // just fits
    add(&task, 20, 9, 4);
    EXPECT(task.num_cut == 1 && task.documents[1].length == 5, "%zu cut", task.num_cut);
    EXPECT(task.tokens[task.documents[1].first] == 24, "from the left");
    EXPECT(task.documents[0].bytes == 2 && task.documents[1].bytes == 4, "bytes");
    task_close(&task);
}

// Every token but the first is a target once, behind as much context as there can be.
static void test_windows(void) {
    for (int count = 2; count < 30; count++) {
        for (int stride = 1; stride <= 5; stride++) {
            Task task;
            int next = 1;
            task_open(&task, "windows", TASK_TEXT, 5);
            int* tokens = task_begin(&task, (size_t)count);
            for (int i = 0; i < count; i++) {
                tokens[i] = i;
            }
            task_windows(&task, (size_t)count, stride, &bytes);
            for (size_t d = 0; d < task.num_documents; d++) {
                const TaskDocument* window = &task.documents[d];
                const int end = (int)window->first + window->length;
                EXPECT(end - window->scored == next, "%d tokens, stride %d, window %zu", count, stride, d);
                EXPECT(window->length == (end < 6 ? end : 6), "%d tokens, stride %d, window %zu", count,
                       stride, d);
                EXPECT(d == 0 || window->scored <= stride, "stride %d", stride);
                next = end;
            }
            EXPECT(next == count && task.num_tokens == (size_t)count, "%d tokens, stride %d", count, stride);
            task_close(&task);
        }
    }
}

// ---- scores ----

// A document of one token of context and this text.
static void add_text(Task* task, const char* text) {
    const size_t length = strlen(text);
    int* tokens = task_begin(task, length + 1);
    tokens[0] = bytes.eot;
    for (size_t i = 0; i < length; i++) {
        tokens[i + 1] = (unsigned char)text[i];
    }
    task_add(task, length + 1, (int)length, &bytes);
}

static void test_choices(void) {
    const TaskResult results[] = {
        {6, 3}, {8, 5},   // the sums choose the first; 2 and 1.6 per token the second
        {3, 2}, {3, 3},   // equal sums: the first; 1.5 and 1 per token
        {2, 1}, {3, 3},   // the first; 2 and 1
        {5, 1}, {NAN, 1}, // what is no number is never chosen
    };
    static const char* const texts[] = {" ab", "abcde", "ab", "abc", "a", "abc", "a", "a"};
    static const int gold[] = {0, 1, 1, 1};
    Task task;
    task_open(&task, "choices", TASK_CHOICE, 9);
    for (int i = 0; i < 4; i++) {
        add_text(&task, texts[2 * i]);
        add_text(&task, texts[2 * i + 1]);
        task_example(&task, 2, gold[i]);
    }
    const TaskScore score = task_score(&task, results);
    EXPECT_NEAR(score.acc.value, 0.25, 1e-15, "acc");
    EXPECT_NEAR(score.acc.error, sqrt(3.0 / 64), 1e-15, "its error");
    EXPECT_NEAR(score.acc_norm.value, 0.5, 1e-15, "acc_norm");
    EXPECT(task.documents[0].bytes == 2 && task.documents[1].bytes == 5, "the blank before an ending");
    EXPECT(isnan(score.loss) && isnan(score.bpb) && score.tokens == 19, "%g tokens", score.tokens);
    task_close(&task);
}

// The choice depends on the divisor. Endings: 4 tokens, 3 bytes; 4 tokens, 4 bytes.
static void test_bytes_decide(void) {
    const TaskResult results[] = {{3.6, 0}, {4, 0}};
    Task task;
    task_open(&task, "bytes", TASK_CHOICE, 9);
    add_text(&task, " abc");
    add_text(&task, "abcd");
    task_example(&task, 2, 1);
    const TaskScore score = task_score(&task, results);
    EXPECT(score.acc_norm.value == 0 && score.acc_bytes.value == 1, "acc_norm %g, acc_bytes %g",
           score.acc_norm.value, score.acc_bytes.value);
    task_close(&task);
}

static void test_continuations(void) {
    const TaskResult results[] = {{1, 0}, {2, 1}, {3, 0}};
    Task task;
    task_open(&task, "continuations", TASK_CONTINUATION, 9);
    for (int i = 0; i < 3; i++) {
        add_text(&task, " a");
        task_example(&task, 1, 0);
    }
    const TaskScore score = task_score(&task, results);
    EXPECT_NEAR(score.acc.value, 2.0 / 3, 1e-15, "acc");
    EXPECT_NEAR(score.loss, 1, 1e-15, "loss");
    EXPECT_NEAR(score.bpb, 1 / log(2), 1e-15, "bits per byte");
    EXPECT(isnan(score.acc_norm.value) && isnan(score.acc_bytes.value), "no choice");
    task_close(&task);
}

static void test_collect(void) {
    const float losses[5] = {1, 2, 4, 8, 16};
    const int is_top[5] = {1, 0, 1, 0, 0};
    TaskResult results[2];
    Task task;
    task_open(&task, "collect", TASK_CONTINUATION, 5);
    add(&task, 0, 3, 1);
    add(&task, 0, 4, 2);
    task_pack(&task);
    EXPECT(task.num_rows == 1, "%zu rows", task.num_rows);
    task_collect(&task, 0, losses, is_top, results);
    EXPECT(results[0].nats == 2 && results[0].missed == 1, "first: %g, %g", results[0].nats,
           results[0].missed);
    EXPECT(results[1].nats == 24 && results[1].missed == 2, "second: %g, %g", results[1].nats,
           results[1].missed);
    task_collect(&task, 0, losses, NULL, results);
    EXPECT(results[1].missed == 0, "what is top is unknown");
    task_close(&task);
}

// ---- files ----

// Document d as text, end-of-text as '$', with | before what is scored.
static const char* document_text(const Task* task, size_t d) {
    static char text[256];
    const TaskDocument* document = &task->documents[d];
    const int* tokens = task->tokens + document->first;
    int used = 0;
    for (int i = 0; i < document->length; i++) {
        if (i == document->length - document->scored) {
            text[used++] = '|';
        }
        text[used++] = tokens[i] == bytes.eot ? '$' : (char)tokens[i];
    }
    text[used] = '\0';
    return text;
}

static void expect_documents(const char* content, TaskKind kind, const char* const* want, size_t count) {
    const char* path = test_write("a.task.jsonl", content, strlen(content));
    Task task;
    task_files_open(&task, path, settings_of(100, 0));
    EXPECT(task.kind == kind && strcmp(task.name, "a.task") == 0, "kind %d, name %s", task.kind, task.name);
    EXPECT(task.num_documents == count, "%zu documents, wanted %zu", task.num_documents, count);
    for (size_t d = 0; d < count && d < task.num_documents; d++) {
        EXPECT(strcmp(document_text(&task, d), want[d]) == 0, "\"%s\", wanted \"%s\"",
               document_text(&task, d), want[d]);
    }
    task_close(&task);
}

static void test_forms(void) {
    static const char* const hellaswag[] = {"a |  b", "a | c", "$| x", "$| y"};
    expect_documents("{\"ctx\":\"a \",\"endings\":[\" b\",\"c\"],\"label\":\"1\"}\n\r\n"
                     "{\"label\":0,\"endings\":[\"x\",\"y\"],\"ctx\":\"\",\"z\":[1,{}]}",
                     TASK_CHOICE, hellaswag, 4);
    static const char* const choices[] = {"q| a", "q| b", "q\n|a", "q\n|b", "$|a", "$|b"};
    expect_documents("{\"query\":\"q  \",\"choices\":[\"a\",\" b\"],\"gold\":1}\n"
                     "{\"query\":\"q\\n\",\"choices\":[\"a\",\" b\"],\"gold\":1}\n"
                     "{\"query\":\"\",\"choices\":[\"a\",\" b\"],\"gold\":1}\n",
                     TASK_CHOICE, choices, 6);
    static const char* const schema[] = {"x| c", "y| c"};
    expect_documents("{\"context_options\":[\"x\",\"y \"],\"continuation\":\"c\",\"gold\":0}", TASK_CHOICE,
                     schema, 2);
    static const char* const continuations[] = {"x| c"};
    expect_documents("{\"context\":\"x\",\"continuation\":\" c\"}\n", TASK_CONTINUATION, continuations, 1);
}

// An ending continues its context: no blank of SentencePiece's kind is put between them.
TEST(eval_tasks_sentence) {
    static const char line[] = "{\"context\":\"the\",\"continuation\":\"king shall\"}\n"
                               "{\"context\":\"\",\"continuation\":\"king shall\"}\n";
    static const char* const texts[] = {"the king shall", "king shall"};
    Tokenizer tokenizer;
    Task task;
    tokenizer_open_file(&tokenizer, "dev/ref/fixtures/sentencepiece/llama2.model");
    const TaskSettings settings = {&tokenizer, tokenizer.eot, 64, 0};
    task_files_open(&task, test_write("sentence.jsonl", line, strlen(line)), settings);
    for (int i = 0; i < 2; i++) {
        const TaskDocument document = task.documents[i];
        int ids[64] = {tokenizer.eot};
        const size_t count = (size_t)i + tokenizer_encode(&tokenizer, texts[i], strlen(texts[i]), ids + i);
        EXPECT((size_t)document.length == count &&
                   memcmp(task.tokens + document.first, ids, count * sizeof(int)) == 0,
               "%d tokens, wanted %zu", document.length, count);
    }
    task_close(&task);
    tokenizer_close(&tokenizer);
}

static void test_fixtures(void) {
    Task all, some;
    task_files_open(&all, FIXTURES "hellaswag.jsonl", settings_of(64, 0));
    task_files_open(&some, FIXTURES "hellaswag.jsonl", settings_of(64, 7));
    EXPECT(all.num_examples == 20 && all.num_cut > 0, "%zu examples", all.num_examples);
    EXPECT(some.num_examples == 7 && some.num_documents == 28, "%zu examples", some.num_examples);
    task_close(&all);
    task_close(&some);
}

static void open_text(const void* text) {
    Task task;
    const char* path = test_write("bad.jsonl", text, strlen((const char*)text));
    task_files_open(&task, path, settings_of(8, 0));
}

#define GOOD "{\"ctx\":\"a\",\"endings\":[\"b\",\"c\"],\"label\":1}\n"

static void test_bad_lines(void) {
    static const char* const bad[][2] = {
        {"", "bad.jsonl: no examples"},
        {"\n \n", "bad.jsonl: no examples"},
        {"{\"ctx\":\"a\",\"label\":1}",
         "bad.jsonl:1: found the fields {ctx, label}, wanted ctx, endings, label; or"},
        {GOOD "\n{\"ctx\":\"a\"}",
         "bad.jsonl:3: found the fields {ctx}, wanted ctx, endings, label, as on the lines"},
        {GOOD "{\"ctx\":\"a\",\"endings\":[\"b\",\"c\"],\"label\":2}",
         "bad.jsonl:2: the right one is number 2|0 to 1"},
        {GOOD "{\"ctx\":\"a\",\"endings\":[\"b\",\"c\"],\"label\":\"\"}",
         "bad.jsonl:2: found \"\", wanted the number"},
        {GOOD "{\"ctx\":\"a\",\"endings\":[\"b\",\"c\"],\"label\":-1}",
         "bad.jsonl:2: byte|wanted a whole number"},
        {GOOD "{\"ctx\":\"a\",\"endings\":[\"b\"],\"label\":0}",
         "bad.jsonl:2: 1 to choose from, wanted at least 2"},
        {GOOD "{\"ctx\":\"a\",\"endings\":[\"\",\"c\"],\"label\":0}", "bad.jsonl:2: an empty ending"},
        {GOOD "{\"ctx\":7,\"endings\":[\"b\",\"c\"],\"label\":0}", "bad.jsonl:2: byte 7: found '7'"},
        {GOOD "{\"ctx\":\"a\",\"endings\":[\"b\",\"c\"],\"label\":0}}",
         "bad.jsonl:2: byte|nothing but blanks"},
        {GOOD "{\"ctx\":\"a\",\"endings\":[\"b\",\"23456789\"],\"label\":0}",
         "bad.jsonl:2: an ending of 9 tokens, wanted at most --seq-len 8"},
        {GOOD "[]", "bad.jsonl:2: byte 0: found '['"},
        {"{\"context\":\"a\",\"continuation\":\" \"}", "bad.jsonl:1: an empty ending"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        EXPECT(test_dies(open_text, bad[i][0], EXIT_FAILURE, bad[i][1]), "line %zu", i);
    }
}

static void open_words(const void* nothing) {
    const char* const words[] = {"a", " b"};
    Tokenizer list;
    Task task;
    (void)nothing;
    tokenizer_open_words(&list, words, 2);
    const TaskSettings settings = {&list, 2, 8, 0};
    task_files_open(&task, FIXTURES "hellaswag.jsonl", settings);
}

static void open_without_tokenizer(const void* nothing) {
    const TaskSettings settings = {NULL, 256, 8, 0};
    Task task;
    (void)nothing;
    task_files_open(&task, FIXTURES "hellaswag.jsonl", settings);
}

static void open_bin(const void* nothing) {
    Task task;
    (void)nothing;
    task_files_open(&task, FIXTURES "model.bin", settings_of(8, 0));
}

static void test_bad_files(void) {
    EXPECT(test_dies(open_bin, NULL, EXIT_FAILURE, "model.bin: not JSON lines|hellaswag_val.jsonl"),
           "a .bin");
    EXPECT(test_dies(open_words, NULL, EXIT_FAILURE,
                     "hellaswag.jsonl: text, wanted a --tokenizer|words of its list"),
           "words");
    EXPECT(
        test_dies(open_without_tokenizer, NULL, EXIT_FAILURE, "hellaswag.jsonl: text, wanted a --tokenizer"),
        "no tokenizer");
}

TEST(eval_tasks) {
    tokenizer_open_bytes(&bytes);
    test_rows();
    test_cut();
    test_windows();
    test_choices();
    test_bytes_decide();
    test_continuations();
    test_collect();
    test_forms();
    test_fixtures();
    test_bad_lines();
    test_bad_files();
    tokenizer_close(&bytes);
}
