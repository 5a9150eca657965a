// test_option_files.c -- option_files.h and file_list.h: the files of each kind of option, those
// that belong to them, and the checksum of all.
#include <stdlib.h>
#include <sys/stat.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/file_list.h"
#include "llmc/setup/option_files.h"
#include "llmc/setup/options.h"

#include "dev/test/lib/test.h"

static const OptionRow* row_of(const char* option) {
    char name[64];
    snprintf(name, sizeof(name), "--%s", option);
    return option_find(name, strlen(name));
}

// Expects the files of an option with this value, in any order, as "a|b|c": the ends of their
// paths. A directory's end has a slash after it.
static void expect_files(const char* option, const char* value, const char* wanted) {
    FileList list = file_list_open();
    char copy[1024], *next = copy, *end;
    int count = 0;
    option_list_files(&list, row_of(option), value);
    snprintf(copy, sizeof(copy), "%s", wanted);
    while ((end = strsep(&next, "|")) != NULL && *wanted) {
        const size_t length = strlen(end), is_directory = end[length - 1] == '/';
        int found = 0;
        for (int i = 0; i < list.count; i++) {
            const ListedFile* file = &list.files[i];
            const size_t bytes = length - is_directory, all = strlen(file->path);
            found |= file->is_directory == (int)is_directory && all >= bytes &&
                     strncmp(file->path + all - bytes, end, bytes) == 0;
            EXPECT(strcmp(file->option, option) == 0, "--%s: %s", option, file->option);
        }
        EXPECT(found, "--%s %s: no %s", option, value, end);
        count++;
    }
    EXPECT(list.count == count, "--%s %s: %d files, wanted %d", option, value, list.count, count);
    file_list_close(&list);
}

TEST(data) {
    char list[1024];
    test_write("a_1.bin", "x", 1);
    test_write("a_2.bin", "x", 1);
    test_write("t,x.txt", "x", 1);
    snprintf(list, sizeof(list), "one=%s:0.5,other=%s/t\\,x.txt:0.5", test_path("a_?.bin"), test_tmpdir());
    expect_files("train-data", list, "/a_1.bin|/a_1.bin.mask|/a_2.bin|/a_2.bin.mask|/t,x.txt");
    expect_files("tasks", test_path("a_1.bin"), "/a_1.bin|/a_1.bin.mask");
    expect_files("data-schedule", "weights", "weights");
    expect_files("data-schedule", "", "");
    expect_files("out", "run", "");
    expect_files("export-gguf", "x.gguf", "");
}

TEST(models) {
    const char* directory = test_path("model");
    mkdir(directory, 0700);
    test_write("model/model-00001-of-00002.safetensors", "x", 1);
    test_write("model/model.safetensors.index.json", "x", 1);
    test_write("model/README.md", "x", 1);
    expect_files("model", directory,
                 "/model/|/config.json|/model-00001-of-00002.safetensors|/model.safetensors.index.json|"
                 "/tokenizer.json|/tokenizer.model|/tokenizer_config.json|/special_tokens_map.json|/"
                 "vocab.json|/merges.txt|"
                 "/added_tokens.json|/chat_template.jinja|/generation_config.json");
    expect_files("teacher", test_path("x.bin"), "/x.bin");
    expect_files("tokenizer", test_path("t.json"),
                 "/t.json|/tokenizer_config.json|/generation_config.json|/config.json|/chat_template.jinja");
    expect_files("tokenizer", directory,
                 "/tokenizer.json|/tokenizer.model|/tokenizer_config.json|/special_tokens_map.json|/"
                 "vocab.json|/merges.txt|"
                 "/added_tokens.json|/chat_template.jinja|/generation_config.json|/config.json");
}

static uint64_t sum_of(const char* option, const char* value) {
    FileList list = file_list_open();
    option_list_files(&list, row_of(option), value);
    const uint64_t sum = file_list_fingerprint(&list, option);
    EXPECT(sum != file_list_fingerprint(&list, "prompts"), "of no files");
    file_list_close(&list);
    return sum;
}

// A file that belongs to another counts: its contents, and that it exists.
TEST(fingerprint) {
    const char* shard = test_write("s.bin", "1234", 4);
    const uint64_t first = sum_of("tasks", shard);
    EXPECT(first == sum_of("tasks", shard), "the same");
    const char* mask = test_write("s.bin.mask", "", 0);
    const uint64_t masked = sum_of("tasks", shard);
    EXPECT(masked != first, "a mask");
    test_write("s.bin.mask", "m", 1);
    EXPECT(sum_of("tasks", shard) != masked, "another mask");
    EXPECT(unlink(mask) == 0 && sum_of("tasks", shard) == first, "no mask again");
    test_write("s.bin", "1235", 4);
    EXPECT(sum_of("tasks", shard) != first, "another shard");
    mkdir(test_path("elsewhere"), 0700);
    EXPECT(sum_of("tasks", test_write("elsewhere/s.bin", "1234", 4)) == first, "a copy in another directory");
}
