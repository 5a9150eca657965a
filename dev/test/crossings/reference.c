// reference.c -- see crossings.h: an update against the plain loops of llmc/reference.h.
//
// A run saves a model. Another one starts from it, and its first update has all documents of a few
// lines, each in a row of its own. Here the reference computes the same in fp64, from the shards
// that ./tokenize has made, with rows and counts of its own: so nothing depends on the order of
// documents or on code that packs, pads and divides them.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "dev/test/crossings/crossings.h"
#include "dev/test/lib/whole_model.h"
#include "llmc/formats/hf_config.h"
#include "llmc/reference_model.h"

enum { LINES = 12, WIDTH = 64 }; // documents of in/few_*.jsonl; room for the tokens of one

// Documents in rows: tokens, targets (LINES, WIDTH).
typedef struct {
    int tokens[LINES * WIDTH], targets[LINES * WIDTH], lengths[LINES];
    int rows, all; // documents with a target; their tokens
} Documents;

// Numbers of an update.
typedef struct {
    double loss, norm, load, entropy;
} Numbers;

// ---- documents ----

// Reads a shard (llmc/data/token_files.h) and its mask, if any (target_mask.h). A document starts
// at each end-of-text token. Returns false if the shard is not as expected.
static int documents_read(Documents* d, const char* path) {
    enum { HEADER = 1024, MASK_HEADER = 32 };
    char mask_path[600];
    size_t bytes, mask_bytes;
    snprintf(mask_path, sizeof(mask_path), "%s.mask", path);
    unsigned char *shard = (unsigned char*)read_file(path, &bytes),
                  *mask = (unsigned char*)read_file(mask_path, &mask_bytes);
    const size_t count = bytes > HEADER ? (bytes - HEADER) / sizeof(uint16_t) : 0;
    const uint16_t* id = count ? (const uint16_t*)(const void*)(shard + HEADER) : NULL;
    int length = 0, learned = 0, fits = count > 0;
    memset(d, 0, sizeof(*d));
    for (size_t i = 0; i < count && fits; i++) {
        // at the end of the file, the end-of-text token of the first document follows
        const int next = i + 1 < count ? id[i + 1] : id[0], is_last = i + 1 == count || next == id[0],
                  is_hidden = mask && (mask[MASK_HEADER + i / 8] >> i % 8 & 1),
                  at = d->rows * WIDTH + length++;
        fits = d->rows < LINES && length < WIDTH;
        if (fits) {
            d->tokens[at] = id[i];
            d->targets[at] = is_hidden ? NO_TARGET : next;
            learned += !is_hidden;
        }
        if (is_last && fits) {
            d->lengths[d->rows] = length;
            d->all += learned ? length : 0;
            d->rows += learned > 0;
            length = learned = 0;
        }
    }
    for (int row = 0; row < d->rows; row++) {
        for (int t = d->lengths[row]; t < WIDTH; t++) {
            d->tokens[row * WIDTH + t] = id[0];
            d->targets[row * WIDTH + t] = NO_TARGET;
        }
    }
    free(shard);
    free(mask);
    return fits && d->rows > 1;
}

// ---- the reference ----

static void reference_open(RefModel* m, const char* path, const Command* c, int rows) {
    const ModelConfig cfg = hf_config_read(path);
    TensorRow of_file[MODEL_PARAMETER_ROWS];
    float* weights = (float*)calloc(model_parameter_rows_of(of_file, cfg, sizeof(float)), 1);
    whole_model_read(path, cfg, of_file, weights);
    ref_model_open(m, cfg, (size_t)rows, WIDTH);
    m->z_loss = command_number(c, "z-loss");
    m->router_balance = command_number(c, "router-balance");
    m->router_z = command_number(c, "router-z");
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int l = 0; l < of_file[i].layers; l++) {
            const float* from = (const float*)tensor_at_layer(&of_file[i], weights, l);
            Real* to = (Real*)tensor_at_layer(&m->rows[i], m->params, l);
            for (size_t k = 0; k < tensor_layer_elements(&of_file[i]); k++) {
                to[k] = from[k];
            }
        }
    }
    free(weights);
}

// Returns the norm of all gradients.
static double reference_norm(const RefModel* m) {
    double squares = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int l = 0; l < m->rows[i].layers; l++) {
            const Real* grad = (const Real*)tensor_at_layer(&m->rows[i], m->grads, l);
            for (size_t k = 0; k < tensor_layer_elements(&m->rows[i]); k++) {
                squares += grad[k] * grad[k];
            }
        }
    }
    return sqrt(squares);
}

// Adds the tokens of each expert in layer l to taken (E); returns the sum of their entropies.
static double reference_routing(const RefModel* m, const Documents* d, int l, double* taken) {
    const RefActivations a = ref_activations_(m, m->acts, l);
    const int E = m->cfg.E, is_sigmoid = m->sizes.kinds->router == ROUTER_SIGMOID;
    double entropy = 0;
    for (int n = 0; n < d->rows * WIDTH; n++) {
        double sum = 0;
        for (int e = 0; e < E && n % WIDTH < d->lengths[n / WIDTH]; e++) {
            const double x = a.router_logits[n * E + e];
            taken[e] += a.expert_weights[n * E + e] > 0;
            sum += is_sigmoid ? 1 / (1 + exp(-x)) : exp(x);
        }
        for (int e = 0; e < E && sum > 0; e++) {
            const double x = a.router_logits[n * E + e], q = (is_sigmoid ? 1 / (1 + exp(-x)) : exp(x)) / sum;
            entropy -= q * log(q);
        }
    }
    return entropy;
}

static Numbers reference_update(const char* path, const Command* c, const Documents* d) {
    RefModel m;
    Numbers n = {0, 0, 0, 0};
    reference_open(&m, path, c, d->rows);
    m.lengths = d->lengths;
    n.loss = ref_model_forward(&m, d->tokens, d->targets, NULL);
    ref_model_backward(&m, d->tokens, d->targets, NULL);
    n.norm = reference_norm(&m);
    const int routers = model_layers_of(m.cfg, LAYERS_EXPERTS);
    for (int l = 0; l < m.cfg.L && m.cfg.E > 0; l++) {
        double taken[ROUTER_MAX_EXPERTS] = {0}, all = 0;
        if (!model_layer_has(m.cfg, LAYERS_EXPERTS, l)) {
            continue;
        }
        n.entropy += reference_routing(&m, d, l, taken) / (d->all * routers);
        for (int e = 0; e < m.cfg.E; e++) {
            all += taken[e];
        }
        for (int e = 0; e < m.cfg.E; e++) {
            n.load = fmax(n.load, taken[e] * m.cfg.E / all);
        }
    }
    ref_model_close(&m);
    return n;
}

// ---- the relation ----

// Options of the run that saves the model: data and rates that every architecture learns a little
// of, and nothing that ends it early.
static Command command_of_model(const Command* drawn) {
    Command a = *drawn;
    command_drop_all(
        &a, "separator text-field data-schedule data-format model vocab-size fit epochs teacher "
            "teacher-quantize distill-weight distill-temperature seq-len-schedule window-schedule "
            "start-token batch-schedule patience beta2 save-every keep keep-best average model-file-gb "
            "weights chat lora-rank lora-alpha lora-targets");
    command_set(&a, "train-data", "in/docs.jsonl");
    command_set(&a, "tokenizer", "in/model");
    command_set(&a, "context", "64");
    command_set(&a, "seq-len", "32");
    command_set(&a, "eval-every", "0");
    return a;
}

// One update with all rows from the model in `path`.
static Command command_of_update(World* w, const Command* a, const char* path, int rows) {
    Command b = {.ranks = w->stand_in && random_one_of(&w->random, 3) ? 2 + random_below(&w->random, 2) : 1};
    char tokens[32];
    snprintf(tokens, sizeof(tokens), "%d", rows * WIDTH);
    command_set(&b, "model", path);
    command_set(&b, "train-data", "shards_train_*.bin");
    command_set(&b, "val-data", "shards_train_*.bin"); // otherwise some rows are set aside
    command_set(&b, "eval-every", "0");
    command_set(&b, "samples", "0");
    command_set(&b, "doc-mask", "on");
    command_set(&b, "pack", PICK(&w->random, "pad", "dynamic", "uniform"));
    command_set(&b, "seq-len", "64");
    command_set(&b, "batch", PICK(&w->random, "1", "2", "3", "5", "12"));
    command_set(&b, "total-batch", tokens);
    command_set(&b, "steps", "1");
    command_set(&b, "z-loss", PICK(&w->random, "0", "0.1"));
    if (word_is_in(command_get(a, "arch"), ARCHS_WITH_EXPERTS)) {
        command_set(&b, "router-balance", PICK(&w->random, "0", "0.5"));
        command_set(&b, "router-z", PICK(&w->random, "0", "0.1"));
    }
    return b;
}

static Verdict expect_number(World* w, const char* line, const char* key, double wanted, double tolerance) {
    double got;
    return !line_number(line, key, &got) || fabs(got - wanted) <= tolerance * fmax(fabs(wanted), 1e-3)
               ? HELD
               : failed(w, "%s %.9g of the first update, %.9g of the reference", key, got, wanted);
}

// Compares the first update of a run with the reference. bf16: an expert may be another one.
static Verdict expect_numbers(World* w, const Run* y, const Numbers* n) {
    const char* line = NULL;
    for (int i = 0; i < y->count && !line; i++) {
        line = strcmp(y->row[i].kind, "train") == 0 ? y->row[i].line : NULL;
    }
    if (!line) {
        return failed(w, "no update in the log");
    }
    const double loose = w->is_gpu ? 5e-2 : w->rounding;
    Verdict verdict = expect_number(w, line, "loss", n->loss, w->rounding);
    verdict = verdict == HELD ? expect_number(w, line, "norm", n->norm, loose) : verdict;
    verdict = verdict == HELD ? expect_number(w, line, "router_entropy", n->entropy, loose) : verdict;
    return verdict == HELD && !w->is_gpu ? expect_number(w, line, "expert_load", n->load, loose) : verdict;
}

Verdict check_reference(World* w, const Command* drawn) {
    Command a = command_of_model(drawn);
    Verdict verdict;
    Documents d;
    char path[512];
    const char* data = PICK(&w->random, "in/few_docs.jsonl", "in/few_pairs.jsonl");
    verdict = make_shards(w, data, "shards");
    if (verdict != HELD) {
        return verdict;
    }
    if (!documents_read(&d, "shards_train_000000.bin")) {
        return failed(w, "%s: no shard as expected", data);
    }
    if (!run(w, &a, "a", &verdict)) {
        return verdict;
    }
    if (!last_checkpoint("a", path)) {
        return UNFIT;
    }
    const Command b = command_of_update(w, &a, path, d.rows);
    const Run* y = run(w, &b, "b", &verdict);
    if (!y) {
        return verdict;
    }
    const Numbers n = reference_update(path, &b, &d);
    return expect_numbers(w, y, &n);
}
