// test_text_files.c -- byte_order_mark.h: whatever text an option names, a byte order mark before
// it changes nothing.
#include <stdlib.h>
#include <sys/stat.h>

#include "llmc/base/byte_order_mark.h"
#include "llmc/base/check.h"
#include "llmc/data/data_schedule.h"
#include "llmc/data/eval_task_files.h"
#include "llmc/formats/hf_config.h"
#include "llmc/tokenizer/tokenizer.h"

#include "dev/test/lib/test.h"

#define MARK "\xEF\xBB\xBF"

// Writes a copy of a file behind a mark, and returns its path.
static const char* marked(const char* from, const char* name) {
    TestFile file = test_read(from);
    char* text = (char*)malloc(file.bytes + 3);
    memcpy(text, MARK, 3);
    memcpy(text + 3, file.data, file.bytes);
    const char* path = test_write(name, text, file.bytes + 3);
    free(text);
    free(file.data);
    return path;
}

TEST(text) {
    char *text, error[ERROR_BYTES];
    size_t bytes;
    EXPECT(byte_order_text(test_write("a", MARK "x" MARK, 7), 9, &text, &bytes, error) && bytes == 4 &&
               strcmp(text, "x" MARK) == 0,
           "only the first");
    free(text);
    EXPECT(byte_order_text(test_write("a", MARK, 3), 9, &text, &bytes, error) && bytes == 0 && !text[0],
           "nothing else");
    free(text);
    EXPECT(!byte_order_text(test_write("a", "\xFF\xFE.", 3), 9, &text, &bytes, error) &&
               strstr(error, "UTF-16, by its byte-order mark"),
           "%s", error);
    EXPECT(!byte_order_text(test_path("none"), 9, &text, &bytes, error) && strstr(error, "No such file"),
           "%s", error);
}

TEST(schedule) {
    static const char* const names[] = {"a", "b"};
    static const char text[] = MARK "0 a 1 b 3\n";
    DataSchedule schedule;
    data_schedule_read(&schedule, test_write("weights", text, strlen(text)), names, 2);
    EXPECT(schedule.count == 1 && schedule.line[0].weights[1] == 3, "%d lines", schedule.count);
    data_schedule_close(&schedule);
}

TEST(tasks) {
    Task task;
    Tokenizer bytes;
    tokenizer_open_bytes(&bytes);
    const TaskSettings settings = {&bytes, bytes.vocab_size, bytes.eot, 64};
    task_files_open(&task, marked("dev/ref/fixtures/tasks/hellaswag.jsonl", "t.jsonl"), settings);
    EXPECT(task.num_examples == 20, "%zu", task.num_examples);
    task_close(&task);
    tokenizer_close(&bytes);
}

// Opens a tokenizer and a copy of it behind a mark.
static void expect_same_tokenizer(const char* path, const char* name) {
    Tokenizer one, other;
    tokenizer_open_file(&one, path);
    tokenizer_open_file(&other, marked(path, name));
    EXPECT(tokenizer_is_same(&one, &other), "%s", name);
    tokenizer_close(&one);
    tokenizer_close(&other);
}

TEST(tokenizers) {
    static const char merges[] = "#version: 0.2\na b\n";
    expect_same_tokenizer(test_write("merges.txt", merges, strlen(merges)), "marked.txt");
}

TEST(model) {
    static const char config[] =
        MARK "{\"model_type\": \"gpt2\", \"n_layer\": 3, \"n_head\": 2, \"n_embd\": 8, "
             "\"n_positions\": 16, \"vocab_size\": 300}";
    mkdir(test_path("model"), 0700);
    test_write("model/config.json", config, strlen(config));
    EXPECT(hf_config_read(test_path("model")).L == 3, "layers");
}
