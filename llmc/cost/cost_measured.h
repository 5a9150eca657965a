/*
cost_measured.h -- measures the rates of the operations on this CPU, for the planned time of a step
(cost.h).

Each operation runs for at least 0.05 s with the functions of the trainer, on arrays of about the
sizes of the run. Other work on the machine lowers the rates.
*/
#ifndef LLMC_COST_MEASURED_H
#define LLMC_COST_MEASURED_H

#include <stdio.h>
#include <stdlib.h>

#include "llmc/base/memory.h"
#include "llmc/optim/adamw.h"
#include "llmc/ops/attention.h"
#include "llmc/layers/self_attention.h"
#include "llmc/bf16/tile_kernels.h"
#include "llmc/ops/cross_entropy.h"
#include "llmc/ops/activation.h"
#include "llmc/model/model.h"
#include "llmc/ops/gradient.h"
#include "llmc/ops/norm.h"
#include "llmc/ops/matmul.h"
#include "llmc/bf16/matmul_bf16.h"
#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/threads.h"
#include "llmc/base/enum_words.h"
#include "llmc/setup/options.h"
#include "llmc/cost/cost.h"

enum { RATES_ELEMENTS_ = 1 << 22 };

// Activation and sizes of the run, and the arrays and sizes of an operation.
typedef struct {
    ActivationKind activation;
    int C, F, NH, HS, T, Vp, is_bf16;
    size_t N, params;
    float *a, *b, *c, *d; // RATES_ELEMENTS_ each; the first n are set
    size_t n;
    int rows, cols;
    MatmulScratch matmul;
    MatmulBf16Scratch bf16;
    uint32_t *forward, *backward; // packed weight, for each direction
    Attention attention;
} Rates_;

typedef void (*RatesRun_)(Rates_* r);

// Returns the mean time of a run in seconds, over at least 3 runs and 0.05 s after one to warm up.
// The arrays have up to n elements, all set to a small number.
static inline double rates_time_s_(RatesRun_ run, Rates_* r, size_t n) {
    int count = 0;
    double s = 0;
    r->n = n < RATES_ELEMENTS_ ? n : (size_t)RATES_ELEMENTS_;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < r->n; i++) {
        r->a[i] = r->b[i] = r->c[i] = r->d[i] = 1e-4f;
    }
    run(r);
    const double begin_s = time_now_s();
    while (count < 3 || s < 0.05) {
        run(r);
        count++;
        s = time_now_s() - begin_s;
    }
    return s / count;
}

// Sets rows and cols: N rows of `cols` elements, or as many as fit into an array. Returns the
// number of elements.
static inline size_t rates_set_rows_(Rates_* r, size_t N, int cols) {
    const size_t room = RATES_ELEMENTS_ / (size_t)cols;
    r->rows = (int)(N < room ? N : room);
    r->cols = cols;
    return (size_t)r->rows * (size_t)cols;
}

// ---- operations and their rates ----

// Runs the three matmuls of a linear layer, forward and backward, from C to `cols` channels.
static inline void rates_matmuls_(Rates_* r) {
    const int N = r->rows, C = r->C, OC = r->cols;
    if (r->is_bf16) {
        matmul_bf16_forward_cpu(r->a, r->b, r->forward, NULL, (MatmulSizes){N, C, OC}, &r->bf16);
        matmul_bf16_backward_input_cpu(r->b, r->a, r->backward, (MatmulSizes){N, C, OC}, &r->bf16);
        matmul_bf16_backward_weight_cpu(r->d, NULL, r->a, r->b, (MatmulSizes){N, C, OC}, GRADIENT_SET,
                                        &r->bf16);
    } else {
        matmul_forward_cpu(r->a, r->b, r->c, NULL, (MatmulSizes){N, C, OC}, &r->matmul);
        matmul_backward_input_cpu(r->b, r->a, r->c, (MatmulSizes){N, C, OC}, &r->matmul);
        matmul_backward_weight_cpu(r->d, r->a, r->b, (MatmulSizes){N, C, OC}, GRADIENT_SET, &r->matmul);
    }
}

static inline uint32_t* rates_packed_(Matrix weight, int K, int N) {
    uint32_t* packed =
        (uint32_t*)check_alloc(matmul_bf16_pairs(N, K), sizeof(uint32_t), "rates: packed weight");
    matmul_bf16_pack(bf16_kernel().pack, packed, weight, K, N);
    return packed;
}

static inline double rates_of_matmuls_(Rates_* r) {
    const int C = r->C;
    double flops;
    rates_set_rows_(r, r->N < 256 ? r->N : 256, C);
    const int most = RATES_ELEMENTS_ / (C > r->rows ? C : r->rows);
    r->cols = r->F < most ? r->F : most;
    Memory memory = memory_on_host();
    matmul_open(&r->matmul, &memory);
    if (r->is_bf16) {
        matmul_bf16_open(&r->bf16, &memory, bf16_kernel());
        r->forward = rates_packed_(matmul_bf16_forward_weight(r->c, C), C, r->cols);
        r->backward = rates_packed_(matmul_bf16_backward_weight(r->c, C), r->cols, C);
    }
    flops = 3 * matmul_flops(r->rows, C, r->cols) / rates_time_s_(rates_matmuls_, r, RATES_ELEMENTS_);
    if (r->is_bf16) {
        free(r->forward);
        free(r->backward);
    }
    memory_close(&memory);
    return flops;
}

// Returns the sizes of one sequence with a head for each thread, or fewer if the model has fewer or
// they do not fit into the arrays.
static inline AttentionSizes rates_attention_sizes_(const Rates_* r) {
    const int room = (int)(RATES_ELEMENTS_ / (3 * (size_t)r->rows * (size_t)r->HS));
    const int heads = threads_max() < r->NH ? threads_max() : r->NH;
    const int NH = heads < room ? heads : room;
    return attention_sizes(1, r->rows, NH, NH, r->HS);
}

static inline void rates_attention_(Rates_* r) {
    const AttentionSizes sizes = rates_attention_sizes_(r);
    const AttentionPass pass = {sizes, NULL, r->a, NULL, r->d, r->c, NULL, NULL};
    const AttentionGradients d = {r->d, r->b, NULL};
    attention_either_forward_cpu(&pass, &r->attention);
    attention_either_backward_cpu(&d, &pass, &r->attention);
}

static inline double rates_of_attention_(Rates_* r) {
    enum { MOST = 4096 };
    rates_set_rows_(r, (size_t)(r->T < MOST ? r->T : MOST), 3 * r->HS);
    const AttentionSizes sizes = rates_attention_sizes_(r);
    Memory memory = memory_on_host();
    attention_either_open(&r->attention, &memory, r->is_bf16, r->rows, r->HS);
    const double s = rates_time_s_(rates_attention_, r, RATES_ELEMENTS_);
    memory_close(&memory);
    return (attention_forward_flops(sizes) + attention_backward_flops(sizes)) / s;
}

static inline void rates_norms_(Rates_* r) {
    const int N = r->rows, C = r->C;
    float *weight = r->d, *bias = weight + C;
    const Norm norm = {NORM_LAYER, NORM_EPS, 1, weight, bias, r->c, r->c + N, N, C};
    norm_forward_cpu(r->b, r->a, &norm);
    norm_backward_cpu(r->b, weight, bias, r->a, r->a, &norm, GRADIENT_ADD, GRADIENT_SET);
}

static inline double rates_of_norms_(Rates_* r) {
    const size_t n = rates_set_rows_(r, r->N, r->C);
    const double N = r->rows, C = r->C, size = sizeof(float);
    return (norm_forward_bytes(N, C, size) + norm_backward_bytes(N, C, size, 0)) /
           rates_time_s_(rates_norms_, r, n);
}

static inline void rates_activation_(Rates_* r) {
    const size_t N = (size_t)r->rows, F = (size_t)r->F;
    activation_forward_cpu(r->b, r->a, N, F, r->activation);
    activation_backward_cpu(r->c, r->b, r->a, N, F, r->activation);
}

static inline double rates_of_activation_(Rates_* r) {
    const size_t n = rates_set_rows_(r, r->N, activation_gates(r->activation) * r->F);
    const double elements = (double)r->rows * r->F, size = sizeof(float);
    return (activation_forward_bytes(elements, size, r->activation) +
            activation_backward_bytes(elements, size, r->activation)) /
           rates_time_s_(rates_activation_, r, n);
}

static inline void rates_classifier_(Rates_* r) {
    const int* targets = (const int*)(const void*)r->d; // 0
    memset(r->d, 0, (size_t)r->rows * sizeof(int));
    cross_entropy_backward_cpu(r->b, r->a, targets, 1, (CrossEntropy){r->rows, r->cols, r->cols, 0, 0});
}

static inline double rates_of_classifier_(Rates_* r) {
    const size_t n = rates_set_rows_(r, r->N, r->Vp);
    const double bytes = cross_entropy_backward_bytes(r->rows, r->Vp, sizeof(float));
    return bytes / rates_time_s_(rates_classifier_, r, n);
}

static inline void rates_memory_(Rates_* r) { residual_forward_cpu(r->a, r->b, r->c, r->n); }

static inline double rates_of_memory_(Rates_* r) {
    const double s = rates_time_s_(rates_memory_, r, r->N * (size_t)r->C);
    return 3.0 * sizeof(float) * (double)r->n / s;
}

static inline void rates_update_(Rates_* r) {
    const AdamW opt = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 1, DECAY_ALL};
    adamw_update_cpu(r->a, r->b, r->c, r->d, r->n, opt);
}

static inline double rates_of_update_(Rates_* r) {
    const double s = rates_time_s_(rates_update_, r, r->params);
    return adamw_bytes((double)r->n) / s;
}

static inline void rates_launch_(Rates_* r) { residual_forward_cpu(r->a, r->b, r->c, LANES); }

// ---- all ----

#define RATES_TOLD_S_ 2.0 // time after which a line names each further measurement

// Measures all rates at the sizes of a run.
static inline void rates_measure(CostRates* rates, const Settled* s) {
    static const struct {
        CostKind kind;
        double (*measure)(Rates_* r);
        const char* name;
    } kinds[] = {
        {COST_MATMULS, rates_of_matmuls_, "matmuls"},
        {COST_ATTENTION, rates_of_attention_, "attention"},
        {COST_NORMS, rates_of_norms_, "norms"},
        {COST_ACTIVATION, rates_of_activation_, "activations"},
        {COST_CLASSIFIER, rates_of_classifier_, "losses"},
        {COST_MEMORY, rates_of_memory_, "other passes over memory"},
        {COST_UPDATE, rates_of_update_, "update"},
    };
    const ModelConfig cfg = s->cfg;
    const Options* o = &s->options;
    Rates_ r;
    memset(&r, 0, sizeof(r));
    r.activation = model_activation(cfg);
    r.C = cfg.C;
    r.F = model_most_hidden(cfg);
    r.NH = cfg.NH;
    r.HS = model_head_size(cfg);
    r.T = o->batch.seq_len;
    r.Vp = cfg.Vp;
    r.is_bf16 = (MatmulPrecision)o->memory.matmul == MATMUL_BF16;
    r.N = (size_t)o->batch.size * (size_t)o->batch.seq_len;
    r.params = (size_t)model_count_stored(cfg);
    float** const arrays[] = {&r.a, &r.b, &r.c, &r.d};
    for (int i = 0; i < 4; i++) {
        *arrays[i] = (float*)check_alloc_unset(RATES_ELEMENTS_, sizeof(float), "rates");
    }
    const double begin_s = time_now_s();
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (time_now_s() - begin_s > RATES_TOLD_S_) {
            printf("measuring rates for the plan: %s\n", kinds[i].name);
            fflush(stdout);
        }
        rates->per_s[kinds[i].kind] = kinds[i].measure(&r);
    }
    rates->launch_s = rates_time_s_(rates_launch_, &r, LANES);
    snprintf(rates->basis, sizeof(rates->basis), "measured on %d thread%s", threads_max(),
             words_s(threads_max()));
    for (int i = 0; i < 4; i++) {
        free(*arrays[i]);
    }
}

// Returns the rates of this CPU, measured for --plan and --fit; else zeros.
static inline CostRates rates_cpu(const Settled* s) {
    CostRates rates = {{0}, 0, "", 0};
    if ((s->options.plan || s->options.memory.fit != 0) && s->use != USE_EVALUATE) {
        rates_measure(&rates, s);
    }
    return rates;
}

#endif
