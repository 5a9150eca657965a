// test_model_card.c -- what a model says of itself: the files of a directory are read in the order
// of transformers, and all of them are written with the end of an answer that a run has taught.
#include <sys/stat.h>

#include "llmc/base/file.h"
#include "llmc/tokenizer/bpe_files.h"
#include "llmc/tokenizer/model_card.h"
#include "dev/test/lib/test.h"

#define LLAMA3 "dev/ref/fixtures/tokenizers/llama3.json"

static void write_to(const char* directory, const char* name, const char* text) {
    char path[128];
    snprintf(path, sizeof(path), "%.60s/%.60s", directory, name);
    test_write(path, text, strlen(text));
}

// Opens a directory with the tokenizer of Llama 3 and these files; NULL: none.
static void open_beside(Bpe* bpe, const char* name, const char* generation, const char* config,
                        const char* names) {
    char* text = test_read_text(LLAMA3);
    mkdir(test_path(name), 0777);
    write_to(name, "tokenizer.json", text);
    free(text);
    if (generation) {
        write_to(name, "generation_config.json", generation);
    }
    if (config) {
        write_to(name, "config.json", config);
    }
    if (names) {
        write_to(name, "tokenizer_config.json", names);
    }
    bpe_open(bpe, test_path(name));
}

// Facts come from generation_config.json, then config.json; a value of another kind says nothing.
TEST(order_of_files) {
    static const struct {
        const char *generation, *config;
        int ends[3], num_ends, pad;
    } cases[] = {
        {"{\"eos_token_id\": [641, 642]}", "{\"eos_token_id\": 3, \"pad_token_id\": 7}", {641, 642}, 2, 7},
        {NULL,
         "{\"x\": {\"eos_token_id\": 9}, \"eos_token_id\": [641, 642], \"pad_token_id\": -1}",
         {641, 642},
         2,
         -1},
        {"{\"eos_token_id\": null, \"pad_token_id\": 8}",
         "{\"eos_token_id\": 641, \"pad_token_id\": 7}",
         {641},
         1,
         8},
        {"{\"eos_token_id\": [642, 999999, 642]}", NULL, {642}, 1, -1},
        {"[1, 2", "{\"eos_token_id\": 642}", {642}, 1, -1},
        {NULL, NULL, {645}, 1, -1},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Bpe bpe;
        char name[32];
        snprintf(name, sizeof(name), "order%zu", i);
        open_beside(&bpe, name, cases[i].generation, cases[i].config, NULL);
        const ModelCard* card = &bpe.card;
        EXPECT(card->start == bpe.eot && card->pad == cases[i].pad && card->turn_end == -1,
               "case %zu: pad %d", i, card->pad);
        EXPECT(card->num_ends == cases[i].num_ends &&
                   memcmp(card->ends, cases[i].ends, (size_t)card->num_ends * sizeof(int)) == 0,
               "case %zu: %d ends, first %d", i, card->num_ends, card->ends[0]);
        bpe_close(&bpe);
    }
}

// A tokenizer whose start token has another name than usual is read if a file beside it names that.
TEST(start_by_name) {
    static const char* const files[][2] = {
        {"tokenizer_config.json", "{\"bos_token\": {\"content\": \"<bos>\"}, \"eos_token\": \"<|eot_id|>\"}"},
        {"generation_config.json", "{\"bos_token_id\": 645}"},
        {"config.json", "{\"bos_token_id\": 645, \"eos_token_id\": 642}"}};
    char *text = test_read_text(LLAMA3), *at;
    while ((at = strstr(text, "<|begin_of_text|>"))) { // in its post_processor, too, which goes
        memmove(at + 5, at + 17, strlen(at + 17) + 1);
        memcpy(at, "<bos>", 5);
    }
    char *post = strstr(text, "\"post_processor\""), *next = strstr(post, "\"decoder\"");
    memmove(post, next, strlen(next) + 1);
    for (int i = 0; i < 3; i++) {
        Bpe bpe;
        char name[32];
        snprintf(name, sizeof(name), "start%d", i);
        mkdir(test_path(name), 0777);
        write_to(name, "tokenizer.json", text);
        write_to(name, files[i][0], files[i][1]);
        bpe_open(&bpe, test_path(name));
        EXPECT(bpe.eot == 645 && bpe.card.start == 645 && bpe_is_name(&bpe, 645), "%s: %d", files[i][0],
               bpe.eot);
        bpe_close(&bpe);
    }
    free(text);
}

TEST(set_member) {
    static const char* const cases[][3] = {
        {"{\"a\": 1,\n \"e\": {\"x\": \"}\"} , \"b\": 2}\n", "{\"a\": 1,\n \"e\": 5 , \"b\": 2}\n", ""},
        {"{\"a\": \"\\u00e9\"}", "{\n  \"e\": 5,\"a\": \"\\u00e9\"}", ""},
        {"{\n}\n", "{\n  \"e\": 5\n}\n", ""},
        {"{\"e\": 1, ", "{\"e\": 1, ", "is no object"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char* text = card_set_member(cases[i][0], "e", "5");
        EXPECT(strcmp(text, cases[i][1]) == 0, "%s %s: %s", cases[i][0], cases[i][2], text);
        free(text);
    }
}

// The end of an answer joins the ends of all files, and the rest of them stays.
TEST(learned_end) {
    static const char generation[] = "{\"temperature\": 0.6, \"eos_token_id\": 641}";
    static const char names[] =
        "{\"tokenizer_class\": \"X\", \"eos_token\": {\"content\": \"<|end_of_text|>\"}, \"x\": [1]}";
    Bpe bpe;
    open_beside(&bpe, "learned", generation, NULL, names);
    const int end = bpe_find_added(&bpe, "<|eot_id|>");
    ModelCard card = bpe.card;
    mkdir(test_path("same"), 0777);
    bpe_write_hf(&bpe, &card, test_path("same"), 64);
    card_write_generation(&card, test_path("same"));
    char *text = test_read_text(test_path("same/tokenizer_config.json")),
         *same = test_read_text(test_path("same/generation_config.json"));
    EXPECT(strcmp(text, names) == 0 && strcmp(same, generation) == 0, "nothing was learned: %s %s", text,
           same);
    free(text);
    free(same);

    model_card_learn_chat(&card, end);
    EXPECT(card.ends[0] == end && card.turn_end == end && card.eos == end && model_card_is_end(&card, 641),
           "");
    bpe_write_hf(&bpe, &card, test_path("same"), 64);
    card_write_generation(&card, test_path("same"));
    text = test_read_text(test_path("same/tokenizer_config.json"));
    EXPECT(strcmp(text, "{\"tokenizer_class\": \"X\", \"eos_token\": \"<|eot_id|>\", \"x\": [1]}") == 0, "%s",
           text);
    free(text);
    char wanted[128];
    snprintf(wanted, sizeof(wanted), "{\"temperature\": 0.6, \"eos_token_id\": [%d, 641, 646]}", end);
    text = test_read_text(test_path("same/generation_config.json"));
    EXPECT(strcmp(text, wanted) == 0, "%s", text);
    free(text);
    const int count = card.num_ends;
    model_card_learn_chat(&card, end);
    EXPECT(card.num_ends == count, "once");
    bpe_close(&bpe);
}

// A template in tokenizer_config.json counts, alone or as the first of a list; chat_template.jinja
// comes before it.
TEST(template_files) {
    static const char* const names[] = {"{\"chat_template\": \"one\"}",
                                        "{\"chat_template\": [{\"name\": \"default\", \"template\": \"one\"},"
                                        " {\"name\": \"tool_use\", \"template\": \"two\"}]}"};
    for (int i = 0; i < 3; i++) {
        Bpe bpe;
        char name[32];
        snprintf(name, sizeof(name), "template%d", i);
        mkdir(test_path(name), 0777);
        if (i == 2) {
            write_to(name, "chat_template.jinja", "three");
        }
        open_beside(&bpe, name, NULL, NULL, names[i % 2]);
        EXPECT(bpe.card.chat_template && strcmp(bpe.card.chat_template, i == 2 ? "three" : "one") == 0, "%d",
               i);
        bpe_close(&bpe);
    }
}
