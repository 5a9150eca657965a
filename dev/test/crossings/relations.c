// relations.c -- see crossings.h: what must hold between two runs, without an expected value.
//
// A relation sets the options it needs in the drawn command, changes one thing, runs both commands
// and compares them. Where sums have another order, the runs drift apart: then the first update is
// compared up to rounding, and later ones up to DRIFT.
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dev/test/crossings/crossings.h"

#define DRIFT 1e-2 // relative difference after a few updates

#define OF_ADAPTERS "lora-rank lora-alpha lora-targets" // of --model

// Runs both commands. Sets x and y to the runs, or to NULL.
static Verdict run_both(World* w, const Command* a, const Command* b, const Run** x, const Run** y) {
    Verdict verdict;
    *y = NULL;
    *x = run(w, a, "a", &verdict);
    if (*x) {
        *y = run(w, b, "b", &verdict);
    }
    return verdict;
}

static int has_experts(const Command* c) { return word_is_in(command_get(c, "arch"), ARCHS_WITH_EXPERTS); }

// True if a small difference can become a large one: another expert, sign or code.
static int drifts(const Command* c) {
    return has_experts(c) || (command_gives(c, "beta2") && command_number(c, "beta2") < 0.9) ||
           word_is_in(command_get(c, "optimizer"), "muon soap lion adamw8bit");
}

// Compares runs that add up the same numbers in another order.
static Verdict agree_up_to_rounding(World* w, const Command* c, const Run* x, const Run* y) {
    const Verdict first = runs_agree(w, x, y, w->rounding, TRAIN_ROWS | VAL_ROWS | FIRST_ROWS);
    return first != HELD || drifts(c) ? first : runs_agree(w, x, y, DRIFT, TRAIN_ROWS | VAL_ROWS);
}

// Compares runs that promise the same bits.
static Verdict agree_to_the_bit(World* w, const Run* x, const Run* y) {
    const Verdict verdict = runs_agree(w, x, y, 0, TRAIN_ROWS | VAL_ROWS);
    return verdict == HELD ? runs_have_the_same_weights(w, x, y) : verdict;
}

// ---- no effect: options that do not define the run leave its bits alone ----

// Options without OPTION_CHANGES_RUN that do change bits, and why.
static const char CHANGES_BITS[] =
    "batch gelu-fusion " // another order of sums
    "autotune logits-chunk "
    "zero "                                           // 2 adds up micro-batches one by one
    "fit "                                            // chooses the batch
    "val-data "                                       // without it, training data are set aside
    "weights "                                        // reads others
    "on-divergence max-loss-rise max-skips patience"; // may end or change the run

static Verdict check_no_effect(World* w, const Command* drawn) {
    Command a = *drawn, b;
    const Run *x, *y;
    int changes = 1 + random_below(&w->random, 3);
    command_drop_all(&a, "patience fit");
    b = a;
    for (int tries = 0; tries < 200 && changes > 0; tries++) {
        const int value = random_below(&w->random, w->values.count);
        const OptionRow* row = &OPTION_TABLE[w->values.value[value].row];
        if (!(row->flags & OPTION_CHANGES_RUN) && !word_is_in(row->name, CHANGES_BITS)) {
            if (command_gives(&b, row->name)) {
                command_drop(&b, row->name);
            } else {
                command_set_value(&b, &w->values, value);
            }
            changes--;
        }
    }
    Verdict verdict = run_both(w, &a, &b, &x, &y);
    if (verdict == HELD) { // validations of the same sequences are compared, too
        const int same_val = strcmp(command_get(&a, "eval-batches"), command_get(&b, "eval-batches")) == 0;
        verdict = runs_agree(w, x, y, 0, TRAIN_ROWS | (same_val ? VAL_ROWS : 0));
        verdict = verdict == HELD ? runs_have_the_same_weights(w, x, y) : verdict;
    }
    return verdict;
}

// ---- padding: does not count ----

// Options that cut or count by tokens of a row, or need another kind of data.
static const char OF_LENGTHS[] =
    "seq-len-schedule batch-schedule fim-rate epochs model teacher "
    "teacher-quantize distill-weight distill-temperature data-schedule separator "
    "text-field data-format matmul fit update-in-backward eval-batches " OF_ADAPTERS;

static Verdict check_padding(World* w, const Command* drawn) {
    Command a = *drawn, b;
    const Run *x, *y;
    command_drop_all(&a, OF_LENGTHS);
    command_set(&a, "train-data", PICK(&w->random, "in/docs.jsonl", "in/pairs.jsonl", "in/chats.jsonl"));
    command_set(&a, "pack", PICK(&w->random, "pad", "dynamic", "uniform"));
    if (word_is_in(command_get(&a, "chat"), "harmony")) {
        command_drop(&a, "chat"); // its turn of the system is long
    }
    command_set(&a, "seq-len", "192"); // no document is longer
    command_set(&a, "context", "256");
    command_set(&a, "total-batch", "x4");
    command_set(&a, "val-data", "in/docs.jsonl"); // otherwise some sequences are set aside
    command_set(&a, "eval-batches", "0");         // all of it: a limit would count tokens
    command_set(&a, "lr", "0.001");               // auto depends on tokens, as does beta2
    command_set(&a, "beta2", "0.99");
    if (word_is_in(command_get(&a, "optimizer"), "sgd adafactor")) {
        command_drop(&a, "beta2");
    }
    b = a;
    if (strcmp(command_get(&a, "pack"), "uniform") != 0 && random_one_of(&w->random, 2)) {
        command_set(&b, "pack", strcmp(command_get(&a, "pack"), "pad") == 0 ? "dynamic" : "pad");
    } else {
        command_set(&b, "seq-len", "256");
    }
    const Verdict verdict = run_both(w, &a, &b, &x, &y);
    return verdict == HELD ? agree_up_to_rounding(w, &a, x, y) : verdict;
}

// ---- batch and ranks: the same update, divided differently ----

// Options that set the batch themselves, or need it in another place; bf16 rounds parts of sums.
static const char ONE_BATCH[] = "update-in-backward fit eval-batches matmul";

static Verdict check_batch(World* w, const Command* drawn) {
    Command a = *drawn, b;
    const Run *x, *y;
    command_drop_all(&a, ONE_BATCH);
    command_set(&a, "eval-every", "0"); // its sequences depend on the batch
    b = a;
    const char* batch = PICK(&w->random, "1", "2", "4");
    if (strcmp(batch, command_get(&a, "batch")) == 0) {
        batch = strcmp(batch, "1") == 0 ? "4" : "1";
    }
    command_set(&b, "batch", batch);
    const Verdict verdict = run_both(w, &a, &b, &x, &y);
    return verdict == HELD ? agree_up_to_rounding(w, &a, x, y) : verdict;
}

// Draws a number of ranks, and how they divide the work. Returns true if the result has the bits of
// one rank with --zero 2.
static int draw_grid(World* w, Command* c) {
    static const char* const ways[] = {"tensor-parallel", "context-parallel", "expert-parallel",
                                       "pipeline-parallel"};
    c->ranks = 2 + random_below(&w->random, 3);
    int way = random_below(&w->random, 6);
    if (way == 2 && !has_experts(c)) {
        way = 0;
    }
    const int divides_model = way < 4 && (c->ranks != 3 || way == 3);
    if (divides_model) {
        const int all = c->ranks == 3 || random_one_of(&w->random, 2);
        command_set(c, ways[way], all && c->ranks == 4 ? "4" : all && c->ranks == 3 ? "3" : "2");
    }
    if (random_one_of(&w->random, 2)) {
        command_set(c, "zero", PICK(&w->random, "0", "1", "2", "3"));
    }
    return !divides_model && !word_is_in(command_get(c, "zero"), "0 1");
}

static Verdict check_ranks(World* w, const Command* drawn) {
    Command a = *drawn, b;
    const Run *x, *y;
    if (!w->stand_in) {
        return UNFIT;
    }
    command_drop_all(&a, ONE_BATCH);
    command_set(&a, "eval-every", "0"); // its sequences depend on the batch
    command_drop_all(&a, "zero");
    command_set(&a, "batch", PICK(&w->random, "1", "2"));
    command_set(&a, "total-batch", "x24");
    b = a;
    const int same_bits = draw_grid(w, &b);
    if (same_bits) {
        command_set(&a, "zero", "2");
    }
    const Verdict verdict = run_both(w, &a, &b, &x, &y);
    return verdict != HELD ? verdict
           : same_bits     ? agree_to_the_bit(w, x, y)
                           : agree_up_to_rounding(w, &a, x, y);
}

// ---- cut: a run that was stopped and resumed logs what an undisturbed one does ----

static Verdict check_cut(World* w, const Command* drawn) {
    Command a = *drawn, b;
    Verdict verdict;
    const int other_grid = w->stand_in && random_one_of(&w->random, 3);
    const int signal = random_one_of(&w->random, 2) ? SIGTERM : SIGKILL;
    command_drop_all(&a, "epochs fit keep-best max-loss-rise");
    command_set(&a, "steps", "6");
    command_set(&a, "save-every", PICK(&w->random, "1", "2"));
    command_set(&a, "batch", PICK(&w->random, "1", "2"));
    if (other_grid) {
        command_set(&a, "zero", "2");       // the same bits on any number of ranks
        command_set(&a, "eval-every", "0"); // its sequences depend on them
    }
    b = a;
    const Run* x = run(w, &a, "a", &verdict);
    if (!x) {
        return verdict;
    }
    const int status = run_and_stop(w, &b, "b", signal, 1 + random_below(&w->random, 5));
    if (signal == SIGTERM && status != 0 && status != 75) { // 75: saved, to be resumed
        return failed(w, "status %d after SIGTERM", status);
    }
    command_set(&b, "resume", "auto");
    b.ranks = other_grid ? 2 : 1;
    const Run* y = run(w, &b, "b", &verdict);
    return y ? agree_to_the_bit(w, x, y) : verdict;
}

// ---- there and back: a saved model is read, and saved again with the same bytes ----

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

// Returns a command that validates `model`, saved by `a`, and saves it again.
static Command command_back(const Command* a, const char* model) {
    static const char* const precisions[] = {"matmul", "master-weights"};
    Command b = *a;
    for (int i = b.count - 1; i >= 0; i--) {
        const OptionRow* row = &OPTION_TABLE[b.setting[i].row];
        if (!word_is_in(row->group, "data batch evaluation")) {
            command_drop(&b, row->name);
        }
    }
    command_drop_all(&b, "epochs seq-len-schedule batch-schedule tokenizer data-schedule fim-rate patience "
                         "eval-every");
    for (size_t i = 0; i < sizeof(precisions) / sizeof(precisions[0]); i++) {
        if (command_gives(a, precisions[i])) {
            command_set(&b, precisions[i], command_get(a, precisions[i]));
        }
    }
    command_set(&b, "eval-every", "1");
    command_set(&b, "steps", "0");
    command_set(&b, "model", model);
    if (command_number(a, "lora-rank") > 0) {
        command_set(&b, "model", command_get(a, "model"));
        command_set(&b, "adapter", model); // merged, as a does not train
    }
    return b;
}

// Returns the loss of the last validation or of the first one; NAN if there is none.
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

// Returns in how many bytes two files differ; bytes that only one of them has count.
static size_t differing_bytes(const char* path, const char* other) {
    size_t m, n, count;
    char *x = read_file(path, &m), *y = read_file(other, &n);
    count = m > n ? m - n : n - m;
    for (size_t i = 0; i < m && i < n; i++) {
        count += x[i] != y[i];
    }
    free(x);
    free(y);
    return count;
}

static Verdict check_back(World* w, const Command* drawn) {
    Command a = *drawn;
    Verdict verdict;
    char of_a[512], of_b[512];
    command_drop_all(&a, "save-every keep patience model-file-gb fit export-gguf export-gguf-dtype average");
    command_set(&a, "eval-every", "1");
    // a run that trains an adapter exports none
    const int has_gguf = random_one_of(&w->random, 2) && !command_gives(&a, "lora-rank");
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
    const int merges = command_gives(&b, "adapter");
    const double before = val_loss(x, 1), after = val_loss(y, 0), tolerance = merges ? w->rounding : 1e-6;
    if (!(fabs(before - after) <= tolerance * fabs(before)) && isfinite(before) && isfinite(after)) {
        return failed(w, "validation loss %.9g, and %.9g of the model that was saved", before, after);
    }
    verdict = merges ? HELD : saved_the_same(w, from, to);
    // a GGUF file has the name of --out, a or b
    const size_t differ = has_gguf && verdict == HELD ? differing_bytes("model.gguf", "back.gguf") : 0;
    return differ > 1 ? failed(w, "model.gguf and back.gguf differ in %zu bytes", differ) : verdict;
}

// ---- the same run described in another way ----

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
        return failed(w, "--print-config prints nothing");
    }
    command_set(&b, "config", "settings.txt");
    verdict = run_both(w, &a, &b, &x, &y);
    if (verdict == REFUSED && x) {
        return failed(w, "what --print-config prints is refused: %.900s",
                      x ? w->runs[w->num_runs - 1].error : "");
    }
    return verdict == HELD ? agree_to_the_bit(w, x, y) : verdict;
}

Verdict make_shards(World* w, const char* data, const char* out) {
    char to[64];
    snprintf(to, sizeof(to), "--out=%s", out);
    char* const words[] = {
        (char*)w->tokenize, "--tokenizer=in/model", to, "--val-tokens=0", (char*)data, NULL};
    const int status = w->tokenize ? run_words(w, words) : 0;
    return !w->tokenize ? UNFIT : status != 0 ? failed(w, "./tokenize %s: status %d", data, status) : HELD;
}

static Verdict check_shards(World* w, const Command* drawn) {
    Command a = *drawn, b;
    const Run *x, *y;
    const char* data = PICK(&w->random, "in/docs.jsonl", "in/pairs.jsonl", "in/chats.jsonl", "in/text.txt");
    Verdict verdict = make_shards(w, data, "shards");
    verdict = verdict == HELD ? make_shards(w, "in/val.txt", "more") : verdict;
    if (verdict != HELD) {
        return verdict;
    }
    command_drop_all(&a,
                     "separator text-field data-schedule data-format model vocab-size fit chat " OF_ADAPTERS);
    command_set(&a, "train-data", data);
    command_set(&a, "val-data", "in/val.txt");
    command_set(&a, "tokenizer", "in/model");
    b = a;
    command_set(&b, "train-data", "shards_train_*.bin");
    command_set(&b, "val-data", "more_train_*.bin");
    verdict = run_both(w, &a, &b, &x, &y);
    if (verdict == REFUSED && x) {
        return failed(w, "shards are refused where their text is not: %.900s", w->what);
    }
    return verdict == HELD ? agree_to_the_bit(w, x, y) : verdict;
}

// ---- inputs stay as they are, whatever names the outputs get ----

// Lists the input files of a command. Returns their number.
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
        command_drop_all(&a, "tasks-every");
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

// Returns the number behind the first `mark` after the first `word` in a text; 0 without them.
static double number_behind(const char* text, const char* word, const char* mark) {
    const char* at = text ? strstr(text, word) : NULL;
    at = at ? strstr(at, mark) : NULL;
    return at ? atof(at + strlen(mark)) : 0;
}

// Returns the MiB of the checkpoints in a directory, as the disk has them.
static double checkpoints_mb(const char* out) {
    char shell[128];
    size_t bytes;
    snprintf(shell, sizeof(shell),
             "du -sk %s/step_* 2>/dev/null | awk '{ s += $1 } END { print s / 1024 }' >du", out);
    char* text = system(shell) == 0 ? read_file("du", &bytes) : NULL;
    const double mb = text ? atof(text) : 0;
    free(text);
    return mb;
}

// Plans a run and starts it. Sets how many MiB of memory, and of checkpoints, it uses beyond the
// plan.
static Verdict beyond_plan(World* w, const Command* c, const char* out, double* memory, double* disk) {
    Verdict verdict;
    Command plan = *c;
    char screen[32];
    size_t bytes;
    command_set(&plan, "plan", "on");
    if (!run(w, &plan, out, &verdict)) {
        return verdict;
    }
    snprintf(screen, sizeof(screen), "%s.txt", out);
    char* text = read_file(screen, &bytes);
    const double planned = number_behind(text, "memory: ", ": "),
                 on_disk = number_behind(text, "\ndisk:", "=");
    free(text);
    if (planned == 0) {
        return failed(w, "--plan without memory");
    }
    const Run* r = run(w, c, out, &verdict);
    if (r) {
        *memory = r->peak_mb - planned;
        *disk = on_disk > 0 ? checkpoints_mb(out) - on_disk : 0;
    }
    return verdict;
}

static Verdict check_plan(World* w, const Command* drawn) {
    Command small = *drawn, large;
    double before, beyond, disk;
    if (w->is_gpu) {
        return UNFIT; // the memory of a simulated GPU is the process's
    }
    command_drop_all(
        &small,
        "model teacher teacher-quantize distill-weight distill-temperature fit tokenizer " OF_ADAPTERS);
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

// ---- effect or word: a given option changes something, or the run says that it does not ----

// Options whose effect takes more than a tiny run in which all goes well.
static const char RARELY_SEEN[] =
    // all goes well
    "max-skips max-loss-rise on-divergence skip-loss-z skip-grad-z patience grad-clip "
    // it is short
    "timeout threads save-minutes keep keep-major log-every node-gbps net-gbps "
    "sample-every save-every tasks-every decay-steps stride tasks-max eval-batches "
    // the same bits
    "fit recompute zero graph autotune logits-chunk offload-path device "
    // they need other data, documents that share a row for example, or a model that learned more
    "doc-mask context start-token chat soap-max-side weights";

// Hashes what a run shows after it has printed its command: lines without digits and the name of
// --out, and the names of files. It leaves out lines of steps: how many there are depends on time.
static uint64_t hash_shown(const char* out) {
    char shell[384];
    snprintf(shell, sizeof(shell),
             "{ sed -n '/^model:/,$p' %s.txt | grep -v '^step' | sed 's|%s/step|OUT/step|; s|--model "
             "%s|--model OUT|' "
             "| tr -d '0-9.'; cat %s.err; find %s | sed 's|^%s||' | sort; } >shown",
             out, out, out, out, out, out);
    return system(shell) == 0 ? hash_file("shown") : 0;
}

// True if the logs of both runs have the same value of an option: it repeats the default.
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
    if (row_is_core(setting->row) || word_is_in(row->name, RARELY_SEEN)) {
        return UNFIT;
    }
    command_drop(&a, row->name);
    if (strcmp(row->name, "quiet") != 0) { // it silences notes
        command_drop(&a, "quiet");
        command_drop(&b, "quiet");
    }
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

// Sets a random byte of a file, half of the time one of the first 300. `change` gets its place and
// value. Returns false if the file is empty.
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
    if (w->tokenize && random_one_of(&w->random, 2)) {
        command_drop_all(&a, "data-schedule separator text-field val-data model vocab-size " OF_ADAPTERS);
        command_set(&a, "train-data", "in/shard_train_*.bin"); // which have masks
        command_set(&a, "tokenizer", "in/model");
    }
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
    const int has_checksum = w->inputs != before && strstr(target, ".mask");
    run(w, &a, "a", &verdict);
    w->inputs = before;
    inputs_restore();
    if (verdict == HELD && has_checksum) {
        return failed(w, "%s: is accepted", change);
    }
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
    {"reference", check_reference, 8}, // one draw of five
};
const int NUM_RELATIONS = sizeof(RELATIONS) / sizeof(RELATIONS[0]);
