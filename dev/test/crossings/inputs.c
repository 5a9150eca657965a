// inputs.c -- see crossings.h: small files of every form that the trainer reads.
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "dev/test/crossings/crossings.h"

static const char* const WORDS[] = {"the", "cat", "sat", "on",  "a",  "mat", "and", "ran", "home", "soon",
                                    "dog", "saw", "no",  "sun", "so", "it",  "was", "red", "big",  "old"};

static void put_words(FILE* file, Random* r, int least, int most) {
    for (int n = least + random_below(r, most - least + 1); n > 0; n--) {
        fprintf(file, "%s%s", WORDS[random_below(r, 20)], n > 1 ? " " : "");
    }
}

static FILE* open_input(const char* path) {
    FILE* file = fopen(path, "w");
    if (!file) {
        perror(path);
        exit(2);
    }
    return file;
}

// Lines of JSON, or plain text; each document has at most 60 bytes.
static void put_lines(const char* path, const char* kind, int lines, uint64_t seed) {
    Random r = {seed};
    FILE* file = open_input(path);
    for (int i = 0; i < lines; i++) {
        const int is_chat = strcmp(kind, "chat") == 0, is_pair = strcmp(kind, "pair") == 0,
                  is_text = strcmp(kind, "text") == 0;
        fputs(is_chat   ? "{\"messages\":[{\"role\":\"user\",\"content\":\""
              : is_pair ? "{\"prompt\":\""
              : is_text ? ""
                        : "{\"other\":\"no\",\"text\":\"",
              file);
        put_words(file, &r, 1, is_chat || is_pair ? 3 : 10);
        if (is_chat || is_pair) {
            fputs(is_chat ? "\"},{\"role\":\"assistant\",\"content\":\"" : "\",\"completion\":\" ", file);
            put_words(file, &r, 1, 4);
        }
        fputs(is_chat ? "\"}]}\n" : is_text ? ".\n" : "\"}\n", file);
    }
    fclose(file);
}

static void put_text(const char* path, const char* text) {
    FILE* file = open_input(path);
    fputs(text, file);
    fclose(file);
}

static void must(World* world, char* const* words) {
    if (run_words(world, words) != 0) {
        fprintf(stderr, "crossings: %s did not make the inputs; see %s/other.err\n", words[0], world->work);
        exit(2);
    }
}

// A model with experts' dense form, its tokenizer, and shards with masks.
static void make_by_programs(World* world) {
    char* trainer = (char*)world->trainer;
    char* const model[] = {trainer,
                           "--arch=llama",
                           "--layers=1",
                           "--channels=16",
                           "--heads=2",
                           "--seq-len=32",
                           "--context=64",
                           "--batch=2",
                           "--steps=2",
                           "--train-data=in/text.txt",
                           "--tokenizer=bpe:280",
                           "--samples=0",
                           "--eval-every=0",
                           "--out=first",
                           NULL};
    must(world, model);
    if (system("mkdir in/model && cp first/step_00000002/*.json first/step_00000002/model.safetensors "
               "in/model && "
               "rm -f in/model/state.json in/model/matmul.json") != 0) { // nothing reads it
        exit(2);
    }
    if (world->tokenize) {
        char* const shards[] = {(char*)world->tokenize,
                                "--tokenizer=in/model",
                                "--out=in/shard",
                                "--shard-tokens=300",
                                "--val-tokens=200",
                                "in/pairs.jsonl",
                                NULL};
        must(world, shards);
    }
}

void inputs_restore(void) {
    if (system("rm -rf in && cp -a kept in") != 0) {
        exit(2);
    }
}

void inputs_make(World* world) {
    mkdir("in", 0700);
    mkdir("in/books", 0700);
    put_lines("in/text.txt", "text", 120, 1);
    put_lines("in/val.txt", "text", 20, 2);
    put_lines("in/docs.jsonl", "docs", 80, 3);
    put_lines("in/chats.jsonl", "chat", 60, 4);
    put_lines("in/pairs.jsonl", "pair", 60, 5);
    put_lines("in/few_docs.jsonl", "docs", 12, 8);
    put_lines("in/few_pairs.jsonl", "pair", 12, 9);
    put_lines("in/books/one.txt", "text", 60, 6);
    put_lines("in/books/two.txt", "text", 40, 7);
    put_text("in/schedule.txt", "0 a 1 b 1\n2 a 1 b 3\n");
    put_text(
        "in/tasks.jsonl",
        "{\"ind\": 0, \"ctx\": \"the cat sat\", \"endings\": [\"on\", \"a mat\", \"so\", \"it\"], \"label\": "
        "1}\n"
        "{\"ind\": 1, \"ctx\": \"a dog\", \"endings\": [\"ran\", \"was\", \"red\", \"saw\"], \"label\": 0}\n"
        "{\"ind\": 2, \"ctx\": \"the sun was\", \"endings\": [\"big\", \"no\", \"home\", \"red\"], "
        "\"label\": 3}\n");
    make_by_programs(world);
    if (system("rm -rf kept && cp -a in kept") != 0) {
        exit(2);
    }
    world->inputs = hash_tree("in");
}
