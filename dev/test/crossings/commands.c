// commands.c -- see crossings.h: the values that each option can get in a draw, and commands.
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "dev/test/crossings/crossings.h"
#include "llmc/setup/options_values.h"

// Options that are not drawn, and why.
static const struct {
    const char *name, *reason;
} NOT_DRAWN[] = {
    {"out", "each run has its own"},
    {"resume", "set by the relation cut"},
    {"override", "set by the relation cut"},
    {"config", "set by the relation config"},
    {"print-config", "set by the relation config"},
    {"plan", "set by the relation plan"},
    {"plan-gpu", "for plans only"},
    {"find-lr", "keeps nothing that it trains"},
    {"adapter", "set by the relation back"},
    {"report", "trains nothing"},
    {"out-html", "goes with --report"},
    {"compare", "trains nothing"},
    {"follow", "waits for a run"},
    {"stop-run", "waits for a run"},
    {"help", "trains nothing"},
    {"version", "trains nothing"},
    {"num-processes", "the launcher sets it"},
    {"rank", "the launcher sets it"},
    {"gpus-per-node", "the launcher sets it"},
    {"init", "the launcher sets it"},
    {"server", "the launcher sets it"},
    {"fs-path", "the launcher sets it"},
    {"tensor-parallel", "set by the relation ranks"},
    {"context-parallel", "set by the relation ranks"},
    {"expert-parallel", "set by the relation ranks"},
    {"pipeline-parallel", "set by the relation ranks"},
    {"pipeline-layers", "set by the relation ranks"},
    {"shard-ranks", "for several GPUs"},
    {"hellaswag", "needs a file that a script downloads"},
    {"device", "depends on the machine's GPUs"},
    {"max-hours", "counts hours"},
};

// Values of options that take text, and of sizes, which must be small; x2 means 2 * --seq-len.
static const struct {
    const char *name, *values;
} OWN_VALUES[] = {
    {"train-data", " in/text.txt in/docs.jsonl in/chats.jsonl in/pairs.jsonl in/books in/shard_train_*.bin "
                   "a=in/text.txt:0.7,b=in/docs.jsonl:0.3"},
    {"data-schedule", "in/schedule.txt"},
    {"val-data", "in/val.txt in/docs.jsonl web=in/val.txt,docs=in/docs.jsonl"},
    {"tokenizer", "bpe:280 in/model"},
    {"text-field", "other"},
    {"chat-date", "2024-02-29"},
    {"separator", "ABC"},
    {"seed", "1 7"},
    {"model", "in/model d1"},
    {"layers", "1 2 3 4"},
    {"channels", "16 32"},
    {"heads", "2 4"},
    {"kv-heads", "1 2"},
    {"head-size", "8 16"},
    {"hidden", "24 64"},
    {"experts", "2 4 5"},
    {"experts-used", "1 2"},
    {"dense-layers", "1 2"},
    {"expert-hidden", "16 32"},
    {"router-bias-rate", "0.01"},
    {"shared-hidden", "0 24"},
    {"context", "64 128"},
    {"vocab-size", "400"},
    {"window", "0 5 200"},
    {"window-pattern", "SL"},
    {"window-schedule", "0:3,1:9 0:16"},
    {"layer-types", "conv,full 2xdelta,full full"},
    {"share-layers", "all pairs loop:1"},
    {"batch", "1 2 4"},
    {"seq-len", "16 32 64"},
    {"seq-len-schedule", "0:x0.5,1:x1"},
    {"total-batch", "x4 x8"},
    {"batch-schedule", "0:x4,2:x8"},
    {"steps", "2 3 5"},
    {"epochs", "0.1 1"},
    {"teacher", "in/model"},
    {"lora-rank", "3 8"},
    {"lora-alpha", "1 16"},
    {"lora-targets", "attention mlp q_proj,down_proj"},
    {"freeze", "embeddings attention norms [0] wte,attproj?,blocks[0] embeddings,blocks[0],mlp[1]"},
    {"lr", "0.001 0.01"},
    {"warmup", "0 2"},
    {"decay-steps", "0 2"},
    {"mup", "16:1"},
    {"soap-every", "1 2"},
    {"soap-max-side", "0 16"},
    {"average", "ema:0.5 ema:0.99"},
    {"samples", "0 1"},
    {"sample-tokens", "1 9"},
    {"prompt", "the"},
    {"top-k", "2 5"},            // with 1, --temperature and --top-p have no effect
    {"top-p", "0.5 0.9"},        // with less, --temperature may have none
    {"matmul", "fp32 bf16 fp8"}, // auto: what a measurement finds faster
    {"tasks", "in/tasks.jsonl"},
    {"perplexity", "in/val.txt in/docs.jsonl"},
    {"stride", "4"},
    {"tasks-max", "2"},
    {"out-scores", "scores.jsonl"},
    {"model-file-gb", "0.00001"},
    {"export-llmc", "model.bin"},
    {"export-gguf", "model.gguf"},
    {"offload-path", "disk"},
    {"threads", "1 3"},
    {"timeout", "100"},
    {"eval-batches", "1 3"},
    {"fit", "1"},
    {"save-minutes", "0 1"},
    {"gpu-report", "1"},
    {"logits-chunk", "8 32"},
    {"dropout", "0.1 0.5"},
    {"attention-dropout", "0.2 0.5"},
    {"adafactor-beta1", "0 0.9"},
    {"sgd-momentum", "0 0.5"},
    {"embedding-lr-scale", "0 0.3"},
    {"vector-lr-scale", "0 0.3"},
    {"rope-base", "100 500000"},
    {"grad-clip", "0 0.1 100"},
    {"qk-clip", "0.001 0.1 100"},
};

// Options that every command has: they make the run tiny.
static const char* const CORE[] = {"arch",  "layers",      "channels", "heads",      "context",     "seq-len",
                                   "batch", "total-batch", "steps",    "train-data", "eval-batches"};

int random_below(Random* r, int n) {
    uint64_t z = (r->state += 0x9E3779B97F4A7C15u); // splitmix64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (int)((z ^ z >> 31) % (uint64_t)n);
}

int word_is_in(const char* word, const char* words) {
    const size_t length = strlen(word);
    for (const char* at = strstr(words, word); at; at = strstr(at + 1, word)) {
        if ((at == words || at[-1] == ' ') && (at[length] == ' ' || !at[length])) {
            return 1;
        }
    }
    return 0;
}

int row_of(const char* name) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        if (strcmp(OPTION_TABLE[i].name, name) == 0) {
            return i;
        }
    }
    fprintf(stderr, "crossings: no option --%s\n", name);
    exit(2);
}

const char* row_is_not_drawn(int row) {
    for (size_t i = 0; i < sizeof(NOT_DRAWN) / sizeof(NOT_DRAWN[0]); i++) {
        if (row_of(NOT_DRAWN[i].name) == row) {
            return NOT_DRAWN[i].reason;
        }
    }
    return OPTION_TABLE[row].flags & OPTION_TEXTS ? "generates text" : NULL;
}

int row_is_core(int row) {
    for (size_t i = 0; i < sizeof(CORE) / sizeof(CORE[0]); i++) {
        if (strcmp(CORE[i], OPTION_TABLE[row].name) == 0) {
            return 1;
        }
    }
    return 0;
}

// ---- values ----

static void values_add(Values* values, int row, const char* text, size_t length) {
    const OptionRow* r = &OPTION_TABLE[row];
    static Options parsed; // only to check the value
    Value* value = &values->value[values->count];
    snprintf(value->text, sizeof(value->text), "%.*s", (int)length, text);
    value->row = row;
    if (values->count + 1 < VALUES_MAX && (strchr(value->text, 'x') || option_set(&parsed, r, value->text))) {
        values->count += strcmp(value->text, r->fallback) != 0 || row_is_core(row);
    }
}

static void values_add_words(Values* values, int row, const char* words, char between) {
    for (const char* at = words; at; at = strchr(at, between) ? strchr(at, between) + 1 : NULL) {
        const char* end = strchr(at, between);
        values_add(values, row, at, end ? (size_t)(end - at) : strlen(at));
    }
}

// Adds small numbers; values_add skips those that the row does not allow.
static void values_add_numbers(Values* values, int row) {
    const OptionRow* r = &OPTION_TABLE[row];
    const char* words = option_is_whole(r) ? "0 1 2 5" : r->max > 1 ? "0 0.1 1 2" : "0 0.0001 0.1 0.5 1";
    values_add_words(values, row, words, ' ');
}

static const char* own_values(int row) {
    for (size_t i = 0; i < sizeof(OWN_VALUES) / sizeof(OWN_VALUES[0]); i++) {
        if (row_of(OWN_VALUES[i].name) == row) {
            return OWN_VALUES[i].values;
        }
    }
    return NULL;
}

static void values_add_row(Values* values, int row) {
    const OptionRow* r = &OPTION_TABLE[row];
    const char* own = own_values(row);
    if (own) {
        values_add_words(values, row, own, ' ');
    } else if (r->type == OPTION_SWITCH || r->type == OPTION_CHOICE) {
        values_add_words(values, row, r->unit, '|');
    } else if (r->type == OPTION_INT || r->type == OPTION_COUNT || r->type == OPTION_FLOAT) {
        values_add_numbers(values, row);
    }
}

int values_open(Values* values, int is_gpu) {
    const int of_other = is_gpu ? OPTION_CPU : OPTION_GPU;
    int missing = 0;
    for (int row = 0; row < OPTION_ROWS; row++) {
        values->first[row] = values->count;
        if (!row_is_not_drawn(row) && !(OPTION_TABLE[row].flags & of_other)) {
            values_add_row(values, row);
            if (values->count == values->first[row]) {
                printf("crossings: FAILED: --%s has no values and no reason in commands.c\n",
                       OPTION_TABLE[row].name);
                missing++;
            }
        }
    }
    values->first[OPTION_ROWS] = values->count;
    return missing;
}

// ---- commands ----

static Setting* command_find(const Command* command, int row) {
    for (int i = 0; i < command->count; i++) {
        if (command->setting[i].row == row) {
            return (Setting*)&command->setting[i];
        }
    }
    return NULL;
}

int command_gives(const Command* command, const char* name) {
    return command_find(command, row_of(name)) != NULL;
}

const char* command_get(const Command* command, const char* name) {
    const Setting* setting = command_find(command, row_of(name));
    return setting ? setting->text : OPTION_TABLE[row_of(name)].fallback;
}

double command_number(const Command* command, const char* name) {
    const Setting* setting = command_find(command, row_of(name));
    char text[VALUE_BYTES] = "0";
    if (setting) {
        command_text(command, setting, text);
    }
    return atof(text);
}

void command_set(Command* command, const char* name, const char* text) {
    const int row = row_of(name);
    Setting* setting = command_find(command, row);
    if (!setting && command->count < SETTINGS_MAX) {
        setting = &command->setting[command->count++];
    }
    if (setting) {
        setting->row = row;
        setting->value = -1;
        snprintf(setting->text, sizeof(setting->text), "%s", text);
    }
}

void command_set_value(Command* command, const Values* values, int value) {
    const int row = values->value[value].row;
    command_set(command, OPTION_TABLE[row].name, values->value[value].text);
    command_find(command, row)->value = value;
}

void command_drop(Command* command, const char* name) {
    Setting* setting = command_find(command, row_of(name));
    if (setting) {
        memmove(setting, setting + 1,
                (size_t)(&command->setting[--command->count] - setting) * sizeof(*setting));
    }
}

void command_drop_all(Command* command, const char* names) {
    for (int i = command->count - 1; i >= 0; i--) {
        const char* name = OPTION_TABLE[command->setting[i].row].name;
        if (word_is_in(name, names)) {
            command_drop(command, name);
        }
    }
}

void command_text(const Command* command, const Setting* setting, char text[VALUE_BYTES]) {
    const int is_length = strcmp(OPTION_TABLE[setting->row].group, "batch") == 0;
    const double length = is_length && strchr(setting->text, 'x') ? command_number(command, "seq-len") : 0;
    size_t used = 0;
    for (const char* at = setting->text; *at && used + 24 < VALUE_BYTES;) {
        char* end = (char*)at + 1;
        if (length > 0 && *at == 'x') {
            used += (size_t)snprintf(text + used, 24, "%.0f", strtod(at + 1, &end) * length);
        } else {
            text[used++] = *at;
        }
        at = end;
    }
    text[used] = '\0';
}
