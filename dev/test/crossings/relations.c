// relations.c -- see crossings.h: what must hold between two runs, without an expected value.
//
// Each relation takes a drawn command, fixes what it needs, changes one thing, and compares. Losses
// after the first update may drift apart where sums have another order, so relations that only
// promise values up to rounding compare the first update closely, and the rest loosely.
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dev/test/crossings/crossings.h"

#define DRIFT 1e-2 // relative, after some updates

static int is_one_of(const char* name, const char* words) {
    const char* at = strstr(words, name);
    const size_t length = strlen(name);
    for (; at; at = strstr(at + 1, name)) {
        if ((at == words || at[-1] == ' ') && (at[length] == ' ' || !at[length])) {
            return 1;
        }
    }
    return 0;
}

static void drop_all(Command* command, const char* words) {
    for (int i = command->count - 1; i >= 0; i--) {
        const char* name = OPTION_TABLE[command->setting[i].row].name;
        if (is_one_of(name, words)) {
            command_drop(command, name);
        }
    }
}

static const char* pick(Random* r, const char* const* texts, int count) {
    return texts[random_below(r, count)];
}
#define PICK(r, ...)                                                                                         \
    pick(r, (const char* const[]){__VA_ARGS__}, (int)(sizeof((const char*[]){__VA_ARGS__}) / sizeof(char*)))

// Runs both commands; sets x and y.
static Verdict run_both(World* w, const Command* a, const Command* b, const Run** x, const Run** y) {
    Verdict verdict;
    *y = NULL;
    *x = run(w, a, "a", &verdict);
    if (*x) {
        *y = run(w, b, "b", &verdict);
    }
    return verdict;
}

// Compares runs that do the same work in another order.
static Verdict agree_up_to_rounding(World* w, const Run* x, const Run* y, int drifts) {
    const Verdict first = runs_agree(w, x, y, w->rounding, TRAIN_ROWS | VAL_ROWS | FIRST_ROWS);
    return first != HELD || drifts ? first : runs_agree(w, x, y, DRIFT, TRAIN_ROWS);
}

// ---- no effect: what does not define the run changes no bits of it ----

// Options without OPTION_CHANGES_RUN that do change bits.
static const char CHANGES_BITS[] =
    "batch tensor-slices gelu-fusion " // sums in another order
    "bias-fusion autotune logits-chunk "
    "fit "                                            // sets the batch
    "val-data "                                       // else a part of --train-data
    "weights "                                        // others are read
    "on-divergence max-loss-rise max-skips patience"; // end the run, or change it

static Verdict check_no_effect(World* w, const Command* drawn) {
    Command a = *drawn, b;
    const Run *x, *y;
    int changes = 1 + random_below(&w->random, 3);
    drop_all(&a, "patience fit");
    b = a;
    for (int tries = 0; tries < 200 && changes > 0; tries++) {
        const int value = random_below(&w->random, w->values.count);
        const OptionRow* row = &OPTION_TABLE[w->values.value[value].row];
        if (!(row->flags & OPTION_CHANGES_RUN) && !is_one_of(row->name, CHANGES_BITS)) {
            if (command_gives(&b, row->name)) {
                command_drop(&b, row->name);
            } else {
                command_set_value(&b, &w->values, value);
            }
            changes--;
        }
    }
    Verdict verdict = run_both(w, &a, &b, &x, &y);
    if (verdict == HELD) {
        const int same_val = strcmp(command_get(&a, "eval-batches"), command_get(&b, "eval-batches")) == 0;
        verdict = runs_agree(w, x, y, 0, TRAIN_ROWS | (same_val ? VAL_ROWS : 0));
        verdict = verdict == HELD ? runs_have_the_same_weights(w, x, y) : verdict;
    }
    return verdict;
}

// ---- padding counts for nothing ----

static const char OF_LENGTHS[] =
    "seq-len-schedule batch-schedule fim-rate fim-spm-rate epochs model teacher "
    "teacher-quantize distill-weight distill-temperature data-schedule separator "
    "text-field data-format matmul fit update-in-backward eval-batches tensor-slices";

static Verdict check_padding(World* w, const Command* drawn) {
    Command a = *drawn, b;
    const Run *x, *y;
    drop_all(&a, OF_LENGTHS);
    command_set(&a, "train-data", PICK(&w->random, "in/docs.jsonl", "in/pairs.jsonl", "in/chats.jsonl"));
    command_set(&a, "pack", PICK(&w->random, "pad", "dynamic", "uniform"));
    command_set(&a, "seq-len", "128");
    command_set(&a, "context", "256");
    command_set(&a, "total-batch", "x4");
    command_set(&a, "val-data", "in/docs.jsonl"); // else a share of the sequences
    command_set(&a, "eval-batches", "0");         // all: a part would be counted in tokens
    command_set(&a, "lr", "0.001");               // auto and these depend on tokens
    command_set(&a, "beta2", "0.99");
    if (strcmp(command_get(&a, "optimizer"), "sgd") == 0 ||
        strcmp(command_get(&a, "optimizer"), "adafactor") == 0) {
        command_drop(&a, "beta2");
    }
    b = a;
    if (strcmp(command_get(&a, "pack"), "uniform") != 0 && random_one_of(&w->random, 2)) {
        command_set(&b, "pack", strcmp(command_get(&a, "pack"), "pad") == 0 ? "dynamic" : "pad");
    } else {
        command_set(&b, "seq-len", "256");
    }
    const Verdict verdict = run_both(w, &a, &b, &x, &y);
    return verdict == HELD ? runs_agree(w, x, y, w->rounding, TRAIN_ROWS | VAL_ROWS | FIRST_ROWS) : verdict;
}

// ---- batch and ranks: the same update, divided otherwise ----

static const char ONE_BATCH[] = "update-in-backward fit eval-batches matmul";

static int has_experts(const Command* c) {
    return is_one_of(command_get(c, "arch"), "mixtral qwen3moe olmoe glm4moe");
}

// Experts are chosen: after an update, rounding may choose others.
static int drifts(const Command* c) {
    return has_experts(c) || is_one_of(command_get(c, "optimizer"), "muon soap lion adamw8bit");
}

static Verdict check_batch(World* w, const Command* drawn) {
    Command a = *drawn, b;
    const Run *x, *y;
    drop_all(&a, ONE_BATCH);
    command_set(&a, "eval-every", "0"); // whose sequences depend on the batch
    b = a;
    const char* batch = PICK(&w->random, "1", "2", "4");
    if (strcmp(batch, command_get(&a, "batch")) == 0) {
        batch = strcmp(batch, "1") == 0 ? "4" : "1";
    }
    command_set(&b, "batch", batch);
    const Verdict verdict = run_both(w, &a, &b, &x, &y);
    return verdict == HELD ? agree_up_to_rounding(w, x, y, drifts(&a)) : verdict;
}

// Draws ranks, and what divides the work among them.
static void draw_grid(World* w, Command* c) {
    static const char* const ways[] = {"tensor-parallel", "context-parallel", "expert-parallel",
                                       "pipeline-parallel"};
    c->ranks = 2 + random_below(&w->random, 3);
    int way = random_below(&w->random, 6);
    if (way == 2 && !has_experts(c)) {
        way = 0;
    }
    if (way < 4 && (c->ranks != 3 || way == 3)) {
        const int all = c->ranks == 3 || random_one_of(&w->random, 2);
        command_set(c, ways[way], all && c->ranks == 4 ? "4" : all && c->ranks == 3 ? "3" : "2");
    }
    if (random_one_of(&w->random, 2)) {
        command_set(c, "zero", PICK(&w->random, "0", "1", "2", "3"));
    }
}

static Verdict check_ranks(World* w, const Command* drawn) {
    Command a = *drawn, b;
    const Run *x, *y;
    if (!w->stand_in) {
        return UNFIT;
    }
    drop_all(&a, ONE_BATCH);
    command_set(&a, "eval-every", "0"); // whose sequences depend on the batch
    drop_all(&a, "zero tensor-slices");
    command_set(&a, "batch", PICK(&w->random, "1", "2"));
    command_set(&a, "total-batch", "x24");
    b = a;
    draw_grid(w, &b);
    const Verdict verdict = run_both(w, &a, &b, &x, &y);
    return verdict == HELD ? agree_up_to_rounding(w, x, y, drifts(&a)) : verdict;
}

// ---- cut: a run that is stopped and resumed has the rows of one that is not ----

static Verdict check_cut(World* w, const Command* drawn) {
    Command a = *drawn, b;
    Verdict verdict;
    drop_all(&a, "epochs fit keep-best max-loss-rise");
    command_set(&a, "steps", "6");
    command_set(&a, "save-every", PICK(&w->random, "1", "2"));
    command_set(&a, "batch", PICK(&w->random, "1", "2"));
    b = a;
    const int signal = random_one_of(&w->random, 2) ? SIGTERM : SIGKILL;
    const Run* x = run(w, &a, "a", &verdict);
    if (!x) {
        return verdict;
    }
    const int status = run_and_stop(w, &b, "b", signal, 1 + random_below(&w->random, 5));
    if (signal == SIGTERM && status != 0 && status != 75) { // 75: saved, to be resumed
        return failed(w, "status %d after SIGTERM", status);
    }
    command_set(&b, "resume", "auto");
    const int other_grid = w->stand_in && random_one_of(&w->random, 3);
    if (other_grid) {
        b.ranks = 2;
        command_set(&b, "zero", PICK(&w->random, "1", "2"));
    }
    const Run* y = run(w, &b, "b", &verdict);
    if (!y) {
        return verdict;
    }
    if (other_grid) {
        return drifts(&b) ? HELD : runs_agree(w, x, y, DRIFT, TRAIN_ROWS | VAL_ROWS);
    }
    verdict = runs_agree(w, x, y, 0, TRAIN_ROWS | VAL_ROWS);
    return verdict == HELD ? runs_have_the_same_weights(w, x, y) : verdict;
}

// ---- there and back: what was saved is read, and saved again byte for byte ----

static Verdict saved_the_same(World* w, const char* from, const char* to) {
    static const char* const files[] = {
        "model.safetensors",   "config.json",           "generation_config.json", "tokenizer.json",
        "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"};
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        char a[640], b[640];
        snprintf(a, sizeof(a), "%s/%s", from, files[i]);
        snprintf(b, sizeof(b), "%s/%s", to, files[i]);
        if (hash_file(a) != hash_file(b)) {
            return failed(w, "%s and %s differ", a, b);
        }
    }
    return HELD;
}

// The command that reads the model of `a`, and does what does not train.
static Command command_back(const Command* a, const char* model) {
    Command b = *a;
    for (int i = b.count - 1; i >= 0; i--) {
        const OptionRow* row = &OPTION_TABLE[b.setting[i].row];
        if (!is_one_of(row->group, "data batch evaluation")) {
            command_drop(&b, row->name);
        }
    }
    drop_all(&b,
             "epochs seq-len-schedule batch-schedule tokenizer data-schedule fim-rate fim-spm-rate patience "
             "eval-every");
    if (command_gives(a, "matmul")) {
        command_set(&b, "matmul", command_get(a, "matmul"));
    }
    command_set(&b, "eval-every", "1");
    command_set(&b, "steps", "0");
    command_set(&b, "model", model);
    return b;
}

// Returns the loss of the last validation, or of the first one; NAN if there is none.
static double val_loss(const Run* r, int last) {
    double loss = NAN;
    for (int i = 0; i < r->count; i++) {
        if (strcmp(r->row[i].kind, "val") == 0) {
            line_number(r->row[i].line, "loss", &loss);
            if (!last) {
                break;
            }
        }
    }
    return loss;
}

// Returns how many bytes of two files differ, those of the longer one's rest among them.
static long differing_bytes(const char* path, const char* other) {
    FILE *a = fopen(path, "rb"), *b = fopen(other, "rb");
    long count = !a != !b;
    for (int x = 0, y = 0; a && b && (x != EOF || y != EOF);) {
        x = fgetc(a);
        y = fgetc(b);
        count += x != y;
    }
    if (a) {
        fclose(a);
    }
    if (b) {
        fclose(b);
    }
    return count;
}

static Verdict check_back(World* w, const Command* drawn) {
    Command a = *drawn;
    Verdict verdict;
    char of_a[512], of_b[512];
    drop_all(&a, "save-every keep patience model-file-gb fit export-gguf export-gguf-dtype average");
    command_set(&a, "eval-every", "1");
    const int has_gguf = random_one_of(&w->random, 2);
    if (has_gguf) {
        command_set(&a, "export-gguf", "model.gguf");
    }
    const Run* x = run(w, &a, "a", &verdict);
    if (!x) {
        return verdict;
    }
    const char* from = last_checkpoint("a", of_a);
    if (!from) {
        return UNFIT;
    }
    Command b = command_back(&a, from);
    if (has_gguf) {
        command_set(&b, "export-gguf", "back.gguf");
    }
    const Run* y = run(w, &b, "b", &verdict);
    const char* to = last_checkpoint("b", of_b);
    if (!y || !to) {
        return y ? failed(w, "b has no checkpoint") : verdict;
    }
    const double before = val_loss(x, 1), after = val_loss(y, 0);
    if (!(fabs(before - after) <= 1e-6 * fabs(before)) && isfinite(before) && isfinite(after)) {
        return failed(w, "validation loss %.9g, and %.9g of the model that was saved", before, after);
    }
    verdict = saved_the_same(w, from, to);
    // the model's name in the file is that of --out: a or b
    const long differ = has_gguf && verdict == HELD ? differing_bytes("model.gguf", "back.gguf") : 0;
    return differ > 1 ? failed(w, "model.gguf and back.gguf differ in %ld bytes", differ) : verdict;
}

// ---- the same by another way ----

static Verdict check_config(World* w, const Command* drawn) {
    Command a = *drawn, b = {.ranks = 1}, print;
    const Run *x, *y;
    Verdict verdict;
    print = a;
    command_set(&print, "print-config", "on");
    if (!run(w, &print, "a", &verdict)) {
        return verdict;
    }
    if (rename("a.txt", "settings.txt") != 0) {
        return failed(w, "--print-config has printed nothing");
    }
    command_set(&b, "config", "settings.txt");
    verdict = run_both(w, &a, &b, &x, &y);
    if (verdict == REFUSED && x) {
        return failed(w, "what --print-config prints is refused: %.900s",
                      x ? w->runs[w->num_runs - 1].error : "");
    }
    verdict = verdict == HELD ? runs_agree(w, x, y, 0, TRAIN_ROWS | VAL_ROWS) : verdict;
    return verdict == HELD ? runs_have_the_same_weights(w, x, y) : verdict;
}

static Verdict check_shards(World* w, const Command* drawn) {
    Command a = *drawn, b;
    const Run *x, *y;
    if (!w->tokenize) {
        return UNFIT;
    }
    const char* data = PICK(&w->random, "in/docs.jsonl", "in/pairs.jsonl", "in/chats.jsonl", "in/text.txt");
    char* const words[] = {
        (char*)w->tokenize, "--tokenizer=in/model", "--out=shards", "--val-tokens=0", (char*)data, NULL};
    drop_all(&a, "separator text-field data-schedule data-format model vocab-size fit");
    command_set(&a, "train-data", data);
    command_set(&a, "val-data", "in/docs.jsonl");
    command_set(&a, "tokenizer", "in/model");
    b = a;
    command_set(&b, "train-data", "shards_train_*.bin");
    const int status = run_words(w, words);
    if (status != 0) {
        return status > 2 || status < 0 ? failed(w, "./tokenize %s: status %d", data, status) : UNFIT;
    }
    Verdict verdict = run_both(w, &a, &b, &x, &y);
    verdict = verdict == HELD ? runs_agree(w, x, y, 0, TRAIN_ROWS | VAL_ROWS) : verdict;
    return verdict == HELD ? runs_have_the_same_weights(w, x, y) : verdict;
}

// ---- inputs stay as they are, whatever the outputs are named ----

// Lists the files that a command reads; returns their number.
static int inputs_of(const Command* c, char files[64][256]) {
    char line[1024], shell[1024];
    int count = 0;
    for (int i = 0; i < c->count; i++) {
        for (const char* at = strstr(c->setting[i].text, "in/"); at; at = strstr(at + 1, "in/")) {
            snprintf(shell, sizeof(shell), "find %.*s* -type f 2>/dev/null", (int)strcspn(at, ":,*"), at);
            FILE* found = popen(shell, "r");
            while (found && count < 64 && fgets(line, sizeof(line), found)) {
                snprintf(files[count++], 256, "%.*s", (int)strcspn(line, "\n"), line);
            }
            if (found) {
                pclose(found);
            }
        }
    }
    return count;
}

static Verdict check_inputs(World* w, const Command* drawn) {
    Command a = *drawn;
    Verdict verdict;
    char files[64][256], name[300];
    if (random_one_of(&w->random, 2)) {
        command_set(&a, "tasks", "in/tasks.jsonl");
        drop_all(&a, "tasks-every");
    }
    const int count = inputs_of(&a, files);
    if (count == 0) {
        return UNFIT;
    }
    int row = random_below(&w->random, OPTION_ROWS);
    while (!(OPTION_TABLE[row].flags & OPTION_WRITES) || row_is_not_drawn(row)) {
        row = (row + 1) % OPTION_ROWS;
    }
    const char* writer = OPTION_TABLE[row].name;
    const char* target = files[random_below(&w->random, count)];
    switch (random_below(&w->random, 3)) {
    case 0:
        snprintf(name, sizeof(name), "%s", target);
        break;
    case 1:
        snprintf(name, sizeof(name), "./in/../%s", target);
        break;
    default:
        snprintf(name, sizeof(name), "link");
        if (symlink(target, "link") != 0) {
            return UNFIT;
        }
    }
    command_set(&a, writer, name);
    run(w, &a, "a", &verdict);
    return verdict == REFUSED && strstr(w->what, writer) ? HELD : verdict;
}

// ---- plan ----

// Sets *value to the number after `word` in a file of text. Returns false if it is not there.
static int number_after(const char* path, const char* word, double* value) {
    char line[2048];
    FILE* file = fopen(path, "r");
    int found = 0;
    while (file && !found && fgets(line, sizeof(line), file)) {
        const char* at = strstr(line, word);
        found = at && sscanf(at + strlen(word), "%lf", value) == 1;
    }
    if (file) {
        fclose(file);
    }
    return found;
}

// Returns MiB beyond the plan, of a run; sets *disk to those of its files.
static Verdict beyond_plan(World* w, const Command* c, const char* out, double* beyond, double* disk_beyond) {
    Verdict verdict;
    Command plan = *c;
    double planned = 0, disk = 0, used = 0;
    char shell[128], screen[32];
    command_set(&plan, "plan", "on");
    const Run* p = run(w, &plan, out, &verdict);
    snprintf(screen, sizeof(screen), "%s.txt", out);
    if (!p || !number_after(screen, "memory: ", &planned)) {
        return p ? failed(w, "--plan without memory") : verdict;
    }
    FILE* text = fopen(screen, "r");
    char line[1024];
    while (text && fgets(line, sizeof(line), text)) {
        const char* at = strncmp(line, "disk:", 5) == 0 ? strchr(line, '=') : NULL;
        disk = at ? atof(at + 1) : disk;
    }
    if (text) {
        fclose(text);
    }
    const Run* r = run(w, c, out, &verdict);
    if (!r) {
        return verdict;
    }
    snprintf(shell, sizeof(shell),
             "du -sk %s/step_* 2>/dev/null | awk '{ s += $1 } END { print s / 1024 }' >du", out);
    if (system(shell) == 0) {
        number_after("du", "", &used);
    }
    *beyond = r->peak_mb - planned;
    *disk_beyond = disk > 0 ? used - disk : 0;
    return HELD;
}

static Verdict check_plan(World* w, const Command* drawn) {
    Command small = *drawn, large;
    double before, beyond, disk;
    drop_all(&small, "model teacher teacher-quantize distill-weight distill-temperature fit tokenizer");
    command_set(&small, "train-data", "");
    command_set(&small, "save-every", "1");
    command_set(&small, "steps", "2");
    command_set(&small, "vocab-size", "400");
    command_set(&small, "layers", "1");
    if (random_one_of(&w->random, 2)) {
        command_set(&small, "average", "ema:0.9");
    }
    large = small;
    command_set(&large, "vocab-size", "40000");
    command_set(&large, "channels", "128");
    Verdict verdict = beyond_plan(w, &small, "a", &before, &disk);
    verdict = verdict == HELD ? beyond_plan(w, &large, "b", &beyond, &disk) : verdict;
    if (verdict == HELD && beyond > before + 16) {
        return failed(w, "%.0f MiB more than planned; of a small model, %.0f", beyond, before);
    }
    return verdict == HELD && disk > 1 ? failed(w, "%.1f MiB of checkpoints more than planned", disk)
                                       : verdict;
}

// ---- effect or word ----

// Options whose effect needs more than a tiny run that goes well.
static const char RARELY_SEEN[] =
    "max-skips max-loss-rise on-divergence skip-loss-z skip-grad-z patience timeout threads save-minutes "
    "keep "
    "keep-major node-gbps net-gbps log-every warmup decay-steps window eps data-format start-token matmul "
    "quiet zero tensor-slices fit grad-clip recompute logits-chunk graph autotune offload-path device "
    "weights "
    "epochs shuffle separator text-field context doc-mask soap-max-side seed eval-every eval-batches "
    "sample-every "
    "tasks-every stride tasks-max vocab-size softcap";

// Hashes what a run shows after its own command: lines without digits, and the names of its files.
static uint64_t hash_shown(const char* out) {
    char shell[256];
    snprintf(shell, sizeof(shell),
             "{ sed -n '/^model:/,$p' %s.txt | tr -d '0-9.'; find %s | sed 's|^%s||' | sort; } >shown", out,
             out, out);
    return system(shell) == 0 ? hash_file("shown") : 0;
}

// True if both runs decided on the same value, as their logs have it.
static int decided_the_same(const char* option) {
    char shell[512];
    snprintf(shell, sizeof(shell),
             "value() { sed -n '1s/.*\\(\"%s\":[^,}]*\\).*/\\1/p' $1/log.jsonl; }; [ \"$(value a)\" = "
             "\"$(value b)\" ]",
             option);
    return system(shell) == 0;
}

static Verdict check_effect(World* w, const Command* drawn) {
    Command a = *drawn, b = *drawn;
    const Run *x, *y;
    const Setting* setting = &a.setting[random_below(&w->random, a.count)];
    for (int tries = 0; tries < 50 && row_is_core(setting->row); tries++) {
        setting = &a.setting[random_below(&w->random, a.count)];
    }
    const OptionRow* row = &OPTION_TABLE[setting->row];
    char said[128], noted[256];
    if (row_is_core(setting->row) || is_one_of(row->name, RARELY_SEEN)) {
        return UNFIT;
    }
    command_drop(&a, row->name);
    const Verdict verdict = run_both(w, &a, &b, &x, &y);
    if (verdict != HELD) {
        return verdict;
    }
    snprintf(said, sizeof(said), "note: --%s", row->name);
    snprintf(noted, sizeof(noted), "grep -qsF -e '%s' b.txt b.err", said);
    if (runs_agree(w, x, y, 0, TRAIN_ROWS | VAL_ROWS) != HELD ||
        runs_have_the_same_weights(w, x, y) != HELD || x->count != y->count ||
        hash_shown("a") != hash_shown("b") || system(noted) == 0 || decided_the_same(row->name)) {
        return HELD;
    }
    return failed(w, "--%s %s changes nothing, without a word", row->name, command_get(&b, row->name));
}

// ---- damaged inputs ----

// Sets a byte of a file, in half of the cases one of the first 300; `change` says which. Returns
// false if the file is empty.
static int damage(World* w, const char* path, char change[400]) {
    FILE* file = fopen(path, "r+b");
    if (!file || fseek(file, 0, SEEK_END) != 0 || ftell(file) <= 0) {
        return 0;
    }
    const long bytes = ftell(file), first = bytes < 300 || random_one_of(&w->random, 2) ? bytes : 300;
    const int at = random_below(&w->random, (int)first), byte = random_below(&w->random, 256);
    snprintf(change, 400, "byte %d of %s set to %d", at, path, byte);
    fseek(file, at, SEEK_SET);
    fputc(byte, file);
    return fclose(file) == 0;
}

static Verdict check_damaged(World* w, const Command* drawn) {
    Command a = *drawn;
    Verdict verdict;
    char files[64][256];
    const int count = inputs_of(&a, files);
    if (count == 0) {
        return UNFIT;
    }
    const char* target = files[random_below(&w->random, count)];
    char change[400], what[512];
    const uint64_t before = w->inputs;
    if (!damage(w, target, change)) {
        return UNFIT;
    }
    w->inputs = hash_tree("in");
    run(w, &a, "a", &verdict);
    w->inputs = before;
    inputs_restore();
    snprintf(what, sizeof(what), "%.500s", w->what);
    if (verdict == FAILED || (verdict == REFUSED && !strstr(what, "in/") && !strstr(what, "--"))) {
        return failed(w, "%s: %s", change, what);
    }
    return verdict == REFUSED ? HELD : verdict;
}

const Relation RELATIONS[] = {
    {"no_effect", check_no_effect, 5}, {"padding", check_padding, 4}, {"batch", check_batch, 3},
    {"ranks", check_ranks, 3},         {"cut", check_cut, 3},         {"back", check_back, 3},
    {"config", check_config, 2},       {"shards", check_shards, 2},   {"inputs", check_inputs, 2},
    {"plan", check_plan, 1},           {"effect", check_effect, 3},   {"damaged", check_damaged, 3},
};
const int NUM_RELATIONS = sizeof(RELATIONS) / sizeof(RELATIONS[0]);
