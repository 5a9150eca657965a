/*
cross_entropy_bf16.h -- the classifier of cross_entropy.h and its three matmuls, with factors
rounded to bf16, on the CPU: losses and gradients in one pass over the vocabulary, without logits in
memory.

    logits (N, Vp) = inp wte^T       dinp (N, C) = dlogits wte       dwte (Vp, C) = dlogits^T inp

A tile of logits is turned into exponentials while it is in a cache, and these are the factors of
the other matmuls. The sum of a token's exponentials is divided out in fp32 afterwards, as attention
does in FlashAttention (Dao et al., 2022). With e = 2^(log2(e) logit - shift), sum = sum_v e and
g = scale / sum, of a token:

    loss    = log(sum) + shift / log2(e) - logit[target]
    dlogits = g e                             but for the target:
              scale (e[target] / sum - 1)     which stays fp32, as it may nearly cancel

    dinp    = g (e wte)    + dlogits[target] wte[target]
    dwte    = e^T (g inp)  + dlogits[target] inp at the target

With a softcap (cross_entropy.h), y stands for the logits, and the factors are e dy / dlogits. With
a z-loss, 1 + 2 z_loss lse is a factor of g, and of e[target] / sum.

The shift is roughly the target's logit, so the sum is at least 1. If it is too far below the
largest logit for fp32, the largest logit is the shift.

If tensor ranks cut the vocabulary (part.h), each has a slice of it: wte, dwte and dinp, which the
caller adds up over the ranks. All have the same shifts; sums are added up in the order of the
ranks.

Until all sums are complete, e waits: either a few hundred tokens of it in memory that the caller
lends, or, if dwte is to be set and N is small, all of it in the memory of dwte, because the
gradient of a vocabulary row is larger than its exponentials.

In names, words are vocabulary rows. Results do not depend on the number of threads.
*/
#ifndef LLMC_CROSS_ENTROPY_BF16_H
#define LLMC_CROSS_ENTROPY_BF16_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/base/memory.h"
#include "llmc/base/sizes.h"
#include "llmc/comm/group.h"
#include "llmc/ops/gradient.h"
#include "llmc/bf16/matmul_bf16.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CROSS_ENTROPY_BF16_WORDS = 2048, // vocabulary rows of a chunk
    // vocabulary rows that one thread processes at a time
    CROSS_ENTROPY_BF16_GROUP = MATMUL_BF16_PART_PANELS * BF16_TILE,
    CROSS_ENTROPY_BF16_GROUPS = CROSS_ENTROPY_BF16_WORDS / CROSS_ENTROPY_BF16_GROUP
};

typedef struct {
    int tokens, words;        // tokens and vocabulary rows processed at a time, at most
    int lent;                 // tokens that the memory lent to cross_entropy_bf16_open has room for
    uint32_t *inp, *e;        // left, tokens over channels, and over the rows of a chunk
    uint32_t* inp_by_channel; // right, channels over tokens
    uint32_t* memory;
    float* scaled; // (tokens, C): g inp
    // (GROUPS, tokens, LANES) sums of e; group g of every chunk has its own, as threads share a
    // chunk
    float* sums;
    float* shift;     // (tokens)
    float* sum;       // (tokens): of e in all slices, then g
    float* target;    // (tokens): the target's logit, then its dlogits
    float* of_slices; // (ranks, tokens) parts of sum, or of one of the others
    float* targets;   // (ranks, tokens) parts of target
} CrossEntropyBf16Scratch;

// ---- memory ----

// Returns the rows of fp32 logits (rows, Vp) whose memory the caller lends for `tokens` tokens at a
// time: about half as many, as exponentials are bf16.
static inline size_t cross_entropy_bf16_rows(int tokens, int Vp) {
    return (matmul_bf16_pairs(Vp, tokens) + (size_t)Vp - 1) / (size_t)Vp;
}

// Returns the most tokens of a batch of N that are processed at a time, if the caller lends memory
// for `lent` of them.
static inline int cross_entropy_bf16_tokens(int lent, int N, int C) {
    return N <= int_min(MATMUL_BF16_IN_OUT, 2 * C) ? int_max(N, lent) : lent;
}

// Allocates scratch for batches of up to N tokens, and slices of Vp vocabulary rows in each of
// `ranks`. The caller owns `logits` (cross_entropy_bf16_rows(lent), Vp), aligned to 64 bytes like
// packed data, and may use them between passes.
void cross_entropy_bf16_open(CrossEntropyBf16Scratch* s, Memory* memory, void* logits, int lent, int N, int C,
                             int Vp, int ranks);

// ---- the classifier ----

// Inputs of the classifier: wte in fp32 and packed for both passes, the rest as in cross_entropy.h.
typedef struct {
    const float *inp, *wte; // (N, C), (Vp, C)
    const uint32_t *wte_forward, *wte_backward;
    const int* target;     // (N)
    int N, C, V, Vp;       // V rows of the whole vocabulary; Vp of this rank's slice
    float softcap, z_loss; // 0: none
    Group* group;          // ranks that cut the vocabulary
} CrossEntropyBf16;

// Sets loss (N). Collective, as the next one.
void cross_entropy_bf16_losses_cpu(float* loss, const CrossEntropyBf16* of, CrossEntropyBf16Scratch* s,
                                   MatmulBf16Scratch* matmul);

// Sets loss (N) and dinp (N, C); sets or adds to dwte (Vp, C), which may be NULL. `scale` as in
// cross_entropy.h.
void cross_entropy_bf16_gradients_cpu(float* loss, float* dinp, float* dwte, const CrossEntropyBf16* of,
                                      float scale, GradientMode mode, CrossEntropyBf16Scratch* s,
                                      MatmulBf16Scratch* matmul);

#ifdef __cplusplus
}
#endif

#ifdef CROSS_ENTROPY_BF16_IMPLEMENTATION

#include <assert.h>
#include <math.h>

#include "llmc/base/vec.h"
#include "llmc/ops/cross_entropy.h"

// Sets the pointers into `memory`; returns the total of floats and pairs.
static size_t cross_entropy_bf16_place_(CrossEntropyBf16Scratch* s, uint32_t* memory, int tokens, int C,
                                        int Vp, int ranks) {
    const size_t all = (size_t)int_round_up(tokens, BF16_TILE);
    s->tokens = (int)all;
    s->words = int_min(CROSS_ENTROPY_BF16_WORDS, int_round_up(Vp, BF16_TILE));
    s->inp = memory;
    s->inp_by_channel = s->inp + matmul_bf16_pairs(s->tokens, C);
    s->e = s->inp_by_channel + matmul_bf16_pairs(C, s->tokens);
    s->sums = (float*)(void*)(s->e + matmul_bf16_pairs(s->tokens, s->words));
    s->scaled = s->sums + all * CROSS_ENTROPY_BF16_GROUPS * LANES;
    s->shift = s->scaled + all * C;
    s->sum = s->shift + all;
    s->target = s->sum + all;
    s->of_slices = s->target + all;
    s->targets = s->of_slices + all * ranks;
    return (size_t)(s->targets + all * ranks - (float*)(void*)memory);
}

void cross_entropy_bf16_open(CrossEntropyBf16Scratch* s, Memory* memory, void* logits, int lent, int N, int C,
                             int Vp, int ranks) {
    const int tokens = cross_entropy_bf16_tokens(lent, N, C);
    uint32_t* somewhere = (uint32_t*)(void*)s;
    const size_t words = cross_entropy_bf16_place_(s, somewhere, tokens, C, Vp, ranks);
    void* scratch =
        memory_take_unset(memory, "scratch: cross-entropy", MEMORY_DEVICE, words * sizeof(uint32_t));
    if (scratch) {
        cross_entropy_bf16_place_(s, (uint32_t*)scratch, tokens, C, Vp, ranks);
    }
    s->lent = lent;
    s->memory = (uint32_t*)logits;
    assert((uintptr_t)logits % 64 == 0);
}

// Some of the tokens; a chunk of the vocabulary rows.
typedef struct {
    const CrossEntropyBf16* of;
    CrossEntropyBf16Scratch* s;
    const float* inp; // inputs of these tokens
    const int* target;
    int tokens;
    Bf16PackTile pack;   // packs e; NULL: only its sums are wanted
    uint32_t* e_by_word; // left, all vocabulary rows over tokens
    size_t word_tile;    // pairs from a tile of vocabulary rows to the next one's
    int from, V;         // first row of this rank's slice; its rows that are no padding
    int first, words;    // first vocabulary row of the chunk, in its slice; number of rows
} CrossEntropyBf16Chunk_;

// Returns the parts (tokens) of this rank.
static float* cross_entropy_bf16_part_(const CrossEntropyBf16Chunk_* chunk, float* parts) {
    return parts + (size_t)chunk->of->group->rank * chunk->tokens;
}

// Sets `all` (tokens) to the sums of all parts, rank after rank, or to the largest parts.
// Collective.
static void cross_entropy_bf16_combine_(float* all, float* parts, const CrossEntropyBf16Chunk_* chunk,
                                        int is_max) {
    Group* group = chunk->of->group;
    const size_t tokens = (size_t)chunk->tokens;
    if (group->size > 1) {
        group_all_gather_cpu(parts, cross_entropy_bf16_part_(chunk, parts), tokens, group);
    }
#pragma omp parallel for schedule(static)
    for (int t = 0; t < chunk->tokens; t++) {
        float x = parts[t];
        for (int i = 1; i < group->size; i++) {
            const float part = parts[i * tokens + t];
            x = is_max ? fmaxf(x, part) : x + part;
        }
        all[t] = x;
    }
}

// Returns the row of the target of token t in the slice; -1: it has none.
static int cross_entropy_bf16_target_(const CrossEntropyBf16Chunk_* chunk, int t) {
    const int word = chunk->target[t] - chunk->from;
    return chunk->target[t] != NO_TARGET && 0 <= word && word < chunk->V ? word : -1;
}

// Returns the number of vocabulary rows of a tile that are not padding.
static int cross_entropy_bf16_words_(const CrossEntropyBf16Chunk_* chunk, const MatmulBf16Tile* tile) {
    return int_max(0, int_min(tile->cols, chunk->V - chunk->first - tile->col));
}

// Returns the sums (LANES) of token i of a tile.
static float* cross_entropy_bf16_sums_(const CrossEntropyBf16Chunk_* chunk, const MatmulBf16Tile* tile,
                                       int i) {
    const size_t group = (size_t)tile->col / CROSS_ENTROPY_BF16_GROUP;
    return chunk->s->sums + (group * chunk->s->tokens + tile->row + i) * LANES;
}

// Turns the first `words` logits of row i of a tile into factors, and adds e to the row's sums. The
// target's factor becomes zero.
static void cross_entropy_bf16_row_(const CrossEntropyBf16Chunk_* chunk, const MatmulBf16Tile* tile, int i,
                                    int words) {
    const float softcap = chunk->of->softcap;
    float *e = tile->sums + i * BF16_TILE, *sums = cross_entropy_bf16_sums_(chunk, tile, i);
    const int token = tile->row + i, target = chunk->target[token] - chunk->from - chunk->first - tile->col;
    const Vec shift = vec_all(chunk->s->shift[token]);
    Vec sum = vec_load(sums);
    if (0 <= target && target < words) {
        cross_entropy_bf16_part_(chunk, chunk->s->targets)[token] = softcap_of(e[target], softcap);
    }
    for (int j = 0; j < BF16_TILE; j += LANES) {
        const Vec logit = vec_load(e + j), y = softcap > 0 ? softcap_vec(logit, softcap) : logit,
                  x = vec_exp2(y * LOG2_E - shift);
        vec_store(e + j, softcap > 0 ? x * (1.0f - y * y / (softcap * softcap)) : x);
        sum += words == BF16_TILE ? x : vec_select(vec_first(words - j), x, vec_all(0.0f));
    }
    vec_store(sums, sum);
    if (0 <= target && target < words) {
        e[target] = 0;
    }
    for (int j = words; j < BF16_TILE; j++) {
        e[j] = 0;
    }
}

// Packs a tile of e for both matmuls.
static void cross_entropy_bf16_pack_(const CrossEntropyBf16Chunk_* chunk, const MatmulBf16Tile* tile) {
    const size_t by_token = matmul_bf16_pairs(1, chunk->words);
    const int row = tile->row / BF16_TILE, col = tile->col / BF16_TILE, word = chunk->first / BF16_TILE + col;
    for (int i = tile->rows; i < BF16_TILE; i++) {
        memset(tile->sums + i * BF16_TILE, 0, BF16_TILE * sizeof(float));
    }
    const Bf16TilePacked to = {chunk->s->e + row * by_token + (size_t)col * BF16_STEP_PAIRS,
                               chunk->e_by_word + word * chunk->word_tile + (size_t)row * BF16_STEP_PAIRS,
                               NULL, NULL};
    chunk->pack(&to, tile->sums);
}

// Bf16Finish that computes e, packs it, and adds it to the sums. For tokens without a target, e is
// zero.
static void cross_entropy_bf16_exp_tile_(const void* of, int begin, int end) {
    const MatmulBf16Tile* tile = (const MatmulBf16Tile*)of;
    const CrossEntropyBf16Chunk_* chunk = (const CrossEntropyBf16Chunk_*)tile->context;
    const int words = cross_entropy_bf16_words_(chunk, tile);
    for (int i = begin; i < int_min(end, tile->rows); i++) {
        if (chunk->target[tile->row + i] == NO_TARGET) {
            memset(tile->sums + i * BF16_TILE, 0, BF16_TILE * sizeof(float));
        } else {
            cross_entropy_bf16_row_(chunk, tile, i, words);
        }
    }
    if (end == BF16_TILE && chunk->pack) {
        cross_entropy_bf16_pack_(chunk, tile);
    }
}

// Bf16Finish that finds the largest logits, lane by lane, and stores them in place of the sums.
static void cross_entropy_bf16_max_tile_(const void* of, int begin, int end) {
    const MatmulBf16Tile* tile = (const MatmulBf16Tile*)of;
    const CrossEntropyBf16Chunk_* chunk = (const CrossEntropyBf16Chunk_*)tile->context;
    const int words = cross_entropy_bf16_words_(chunk, tile);
    for (int i = begin; i < int_min(end, tile->rows); i++) {
        float* max = cross_entropy_bf16_sums_(chunk, tile, i);
        for (int j = 0; j < words; j++) {
            const float logit = tile->sums[i * BF16_TILE + j];
            max[j % LANES] = logit > max[j % LANES] ? logit : max[j % LANES];
        }
    }
}

// Computes the logits of a chunk (its tokens by its vocabulary rows), and passes them to `finish`.
static void cross_entropy_bf16_logits_(const CrossEntropyBf16Chunk_* chunk, Bf16Finish finish,
                                       MatmulBf16Scratch* matmul) {
    const int C = chunk->of->C;
    const uint32_t* wte = chunk->of->wte_forward + matmul_bf16_pairs(chunk->first, C);
    MatmulBf16 m = matmul_bf16_of(NULL, matmul_bf16_packed(chunk->s->inp, C), matmul_bf16_packed(wte, C),
                                  chunk->tokens, chunk->words, C);
    m.finish = finish;
    m.context = chunk;
    matmul_bf16_product_cpu(m, matmul);
}

// Sets or adds to dinp (tokens, C) e wte, of the vocabulary rows of a chunk.
static void cross_entropy_bf16_input_(float* dinp, const CrossEntropyBf16Chunk_* chunk,
                                      MatmulBf16Scratch* matmul) {
    const int C = chunk->of->C;
    MatmulBf16Factor wte = matmul_bf16_packed(chunk->of->wte_backward, chunk->of->Vp);
    wte.packed += matmul_bf16_pairs(1, chunk->first); // values of k from this row on
    MatmulBf16 m = matmul_bf16_of(dinp, matmul_bf16_packed(chunk->s->e, chunk->words), wte, chunk->tokens, C,
                                  chunk->words);
    m.mode = chunk->first == 0 ? GRADIENT_SET : GRADIENT_ADD;
    matmul_bf16_product_cpu(m, matmul);
}

// Passes all logits to `finish`, which updates s->sums, starting from `initial`. Sets dinp to e
// wte, unless it is NULL.
static void cross_entropy_bf16_pass_(float* dinp, CrossEntropyBf16Chunk_ chunk, Bf16Finish finish,
                                     float initial, MatmulBf16Scratch* matmul) {
    CrossEntropyBf16Scratch* s = chunk.s;
    for (size_t i = 0; i < (size_t)CROSS_ENTROPY_BF16_GROUPS * s->tokens * LANES; i++) {
        s->sums[i] = initial;
    }
    for (chunk.first = 0; chunk.first < chunk.of->Vp; chunk.first += s->words) {
        chunk.words = int_min(s->words, chunk.of->Vp - chunk.first);
        cross_entropy_bf16_logits_(&chunk, finish, matmul);
        if (dinp) {
            cross_entropy_bf16_input_(dinp, &chunk, matmul);
        }
    }
}

// Returns the sum of a token: groups in their order, lanes in theirs.
static float cross_entropy_bf16_total_(const CrossEntropyBf16Scratch* s, int t) {
    float sum = 0;
    for (int g = 0; g < CROSS_ENTROPY_BF16_GROUPS; g++) {
        sum += vec_hsum(vec_load(s->sums + ((size_t)g * s->tokens + t) * LANES));
    }
    return sum;
}

// Sets the shifts of tokens whose targets the slice has to about their logits.
static void cross_entropy_bf16_shift_(const CrossEntropyBf16Chunk_* chunk) {
    const int C = chunk->of->C;
    float* shift = cross_entropy_bf16_part_(chunk, chunk->s->of_slices);
#pragma omp parallel for schedule(static)
    for (int t = 0; t < chunk->tokens; t++) {
        const int target = cross_entropy_bf16_target_(chunk, t);
        const float *x = chunk->inp + (size_t)t * C, *w = chunk->of->wte + (size_t)int_max(target, 0) * C;
        shift[t] = target < 0 ? 0 : softcap_of(vec_dot(x, w, C), chunk->of->softcap) * LOG2_E;
    }
}

// Packs inp, and sets the shift of each token to about its target's logit.
static void cross_entropy_bf16_begin_(const CrossEntropyBf16Chunk_* chunk, MatmulBf16Scratch* matmul) {
    const int C = chunk->of->C;
    const Matrix inp = {chunk->inp, (size_t)C, 1};
    matmul_bf16_pack_left(matmul->kernel.pack, chunk->s->inp, inp, chunk->tokens, C);
    cross_entropy_bf16_shift_(chunk);
    cross_entropy_bf16_combine_(chunk->s->shift, chunk->s->of_slices, chunk, 0);
}

// Returns 1 if, after a pass, some token's exponentials are too large for fp32.
static int cross_entropy_bf16_overflows_(const CrossEntropyBf16Chunk_* chunk) {
    const float most = 1e30f;
    int count = 0;
#pragma omp parallel for schedule(static) reduction(+ : count)
    for (int t = 0; t < chunk->tokens; t++) {
        count += chunk->s->sum[t] > most;
    }
    return count > 0;
}

// Sets the shifts to the largest logits.
static void cross_entropy_bf16_shift_by_max_(const CrossEntropyBf16Chunk_* chunk, MatmulBf16Scratch* matmul) {
    CrossEntropyBf16Scratch* s = chunk->s;
    float* largest = cross_entropy_bf16_part_(chunk, s->of_slices);
    cross_entropy_bf16_pass_(NULL, *chunk, cross_entropy_bf16_max_tile_, -INFINITY, matmul);
#pragma omp parallel for schedule(static)
    for (int t = 0; t < chunk->tokens; t++) {
        float max = -INFINITY;
        for (int g = 0; g < CROSS_ENTROPY_BF16_GROUPS; g++) {
            max = fmaxf(max, vec_hmax(vec_load(s->sums + ((size_t)g * s->tokens + t) * LANES)));
        }
        largest[t] = max;
    }
    cross_entropy_bf16_combine_(s->shift, s->of_slices, chunk, 1);
    for (int t = 0; t < chunk->tokens; t++) {
        s->shift[t] = softcap_of(s->shift[t], chunk->of->softcap) * LOG2_E;
    }
}

// Sets s->sum, of e over the whole vocabulary, and dinp, unless NULL, to e wte.
static void cross_entropy_bf16_exp_(float* dinp, const CrossEntropyBf16Chunk_* chunk,
                                    MatmulBf16Scratch* matmul) {
    CrossEntropyBf16Scratch* s = chunk->s;
    float* sum = cross_entropy_bf16_part_(chunk, s->of_slices);
    memset(s->targets, 0, (size_t)chunk->of->group->size * chunk->tokens * sizeof(float));
    cross_entropy_bf16_pass_(dinp, *chunk, cross_entropy_bf16_exp_tile_, 0, matmul);
    for (int t = 0; t < chunk->tokens; t++) {
        sum[t] = cross_entropy_bf16_total_(s, t);
    }
    cross_entropy_bf16_combine_(s->sum, s->of_slices, chunk, 0);
}

// Sets loss (tokens), and dinp (tokens, C), unless NULL, to e wte, before the factor g.
static void cross_entropy_bf16_losses_(float* loss, float* dinp, const CrossEntropyBf16Chunk_* chunk,
                                       MatmulBf16Scratch* matmul) {
    const CrossEntropyBf16Scratch* s = chunk->s;
    cross_entropy_bf16_begin_(chunk, matmul);
    cross_entropy_bf16_exp_(dinp, chunk, matmul);
    if (cross_entropy_bf16_overflows_(chunk)) {
        cross_entropy_bf16_shift_by_max_(chunk, matmul);
        cross_entropy_bf16_exp_(dinp, chunk, matmul);
    }
    cross_entropy_bf16_combine_(s->target, s->targets, chunk, 0);
#pragma omp parallel for schedule(static)
    for (int t = 0; t < chunk->tokens; t++) {
        loss[t] = chunk->target[t] == NO_TARGET ? 0 : logf(s->sum[t]) + (s->shift[t] / LOG2_E - s->target[t]);
    }
}

// Sets s->sum to g, s->target to dlogits[target], and s->scaled to g inp; all 0 of tokens that do
// not count.
static void cross_entropy_bf16_factors_(const CrossEntropyBf16Chunk_* chunk, float scale) {
    const CrossEntropyBf16Scratch* s = chunk->s;
    const int C = chunk->of->C;
    const float softcap = chunk->of->softcap;
#pragma omp parallel for schedule(static)
    for (int t = 0; t < chunk->tokens; t++) {
        const int counts = chunk->target[t] != NO_TARGET;
        const float *x = chunk->inp + (size_t)t * C, sum = s->sum[t], shift = s->shift[t], y = s->target[t];
        const float z = 1 + 2 * chunk->of->z_loss * (logf(sum) + shift / LOG2_E),
                    slope = softcap > 0 ? 1 - y * y / (softcap * softcap) : 1, g = scale / sum * z;
        float* gx = s->scaled + (size_t)t * C;
        for (int c = 0; c < C; c++) {
            gx[c] = counts ? g * x[c] : 0;
        }
        s->sum[t] = counts ? g : 0;
        s->target[t] = counts ? scale * (exp2f(y * LOG2_E - shift) / sum * z - 1) * slope : 0;
    }
}

// Turns dinp into its gradient.
static void cross_entropy_bf16_divide_(float* dinp, const CrossEntropyBf16Chunk_* chunk) {
    const int C = chunk->of->C;
#pragma omp parallel for schedule(static)
    for (int t = 0; t < chunk->tokens; t++) {
        const int target = cross_entropy_bf16_target_(chunk, t), counts = chunk->target[t] != NO_TARGET;
        const float *w = chunk->of->wte + (size_t)int_max(target, 0) * C, g = chunk->s->sum[t],
                    d = target < 0 ? 0 : chunk->s->target[t];
        float* dx = dinp + (size_t)t * C;
        for (int c = 0; c < C; c++) {
            dx[c] = counts ? g * dx[c] + d * w[c] : 0;
        }
    }
}

// Adds to the rows of targets: each thread handles some of the columns, tokens in their order.
static void cross_entropy_bf16_add_targets_(float* dwte, const CrossEntropyBf16Chunk_* chunk) {
    enum { COLS = 64 };
    const int C = chunk->of->C;
#pragma omp parallel for schedule(static)
    for (int c0 = 0; c0 < C; c0 += COLS) {
        for (int t = 0; t < chunk->tokens; t++) {
            const int target = cross_entropy_bf16_target_(chunk, t);
            float* row = dwte + (size_t)int_max(target, 0) * C;
            const float *x = chunk->inp + (size_t)t * C, d = chunk->s->target[t];
            for (int c = c0; c < int_min(c0 + COLS, C) && target >= 0; c++) {
                row[c] += d * x[c];
            }
        }
    }
}

// Sets or adds to dwte, from g inp in s->inp_by_channel.
static void cross_entropy_bf16_weight_(float* dwte, const CrossEntropyBf16Chunk_* chunk, GradientMode mode,
                                       MatmulBf16Scratch* matmul) {
    const int C = chunk->of->C, tokens = chunk->tokens;
    const MatmulBf16Factor e = {
        {NULL, 0, 0}, chunk->e_by_word, chunk->word_tile, chunk->e_by_word == (uint32_t*)(void*)dwte};
    MatmulBf16 m = matmul_bf16_of(dwte, e, matmul_bf16_packed(chunk->s->inp_by_channel, tokens),
                                  chunk->of->Vp, C, tokens);
    m.mode = mode;
    matmul_bf16_product_cpu(m, matmul);
    cross_entropy_bf16_add_targets_(dwte, chunk);
}

// Returns the tokens from n on, up to `most` at a time, in equal parts.
static CrossEntropyBf16Chunk_ cross_entropy_bf16_from_(const CrossEntropyBf16* of, CrossEntropyBf16Scratch* s,
                                                       int n, int most) {
    const int parts = int_ceil_div(of->N, most), step = int_round_up(int_ceil_div(of->N, parts), BF16_TILE);
    const int tokens = int_min(step, of->N - n), from = of->group->rank * of->Vp;
    return (CrossEntropyBf16Chunk_){.of = of,
                                    .s = s,
                                    .inp = of->inp + (size_t)n * of->C,
                                    .target = of->target + n,
                                    .tokens = tokens,
                                    .e_by_word = s->memory,
                                    .word_tile = matmul_bf16_pairs(1, tokens),
                                    .from = from,
                                    .V = int_max(0, int_min(of->V - from, of->Vp))};
}

void cross_entropy_bf16_losses_cpu(float* loss, const CrossEntropyBf16* of, CrossEntropyBf16Scratch* s,
                                   MatmulBf16Scratch* matmul) {
    for (int n = 0; n < of->N;) {
        const CrossEntropyBf16Chunk_ chunk = cross_entropy_bf16_from_(of, s, n, s->tokens);
        cross_entropy_bf16_losses_(loss + n, NULL, &chunk, matmul);
        n += chunk.tokens;
    }
}

// Returns 1 if all of e waits in the memory of dwte, which is to be set: dwte has room, and the
// lent memory does not.
static int cross_entropy_bf16_waits_in_(const float* dwte, const CrossEntropyBf16* of, GradientMode mode,
                                        const CrossEntropyBf16Scratch* s) {
    return dwte && mode == GRADIENT_SET && s->lent < of->N && of->N <= s->tokens && of->Vp % BF16_TILE == 0 &&
           matmul_bf16_pairs(1, of->N) <= (size_t)BF16_TILE * of->C && (uintptr_t)dwte % 64 == 0;
}

// Turns the sums and exponentials that the losses have left into the gradients; dwte may be NULL.
static void cross_entropy_bf16_end_(float* dinp, float* dwte, const CrossEntropyBf16Chunk_* chunk,
                                    float scale, GradientMode mode, MatmulBf16Scratch* matmul) {
    const CrossEntropyBf16* of = chunk->of;
    const Matrix scaled = {chunk->s->scaled, (size_t)of->C, 1};
    cross_entropy_bf16_factors_(chunk, scale);
    if (dwte) {
        matmul_bf16_pack(matmul->kernel.pack, chunk->s->inp_by_channel, scaled, chunk->tokens, of->C);
    }
    cross_entropy_bf16_divide_(dinp, chunk);
    if (dwte) {
        cross_entropy_bf16_weight_(dwte, chunk, mode, matmul);
    }
}

void cross_entropy_bf16_gradients_cpu(float* loss, float* dinp, float* dwte, const CrossEntropyBf16* of,
                                      float scale, GradientMode mode, CrossEntropyBf16Scratch* s,
                                      MatmulBf16Scratch* matmul) {
    const int waits_in_dwte = cross_entropy_bf16_waits_in_(dwte, of, mode, s);
    for (int n = 0; n < of->N;) {
        CrossEntropyBf16Chunk_ chunk = cross_entropy_bf16_from_(of, s, n, waits_in_dwte ? of->N : s->lent);
        chunk.pack = matmul->kernel.pack_tile;
        if (waits_in_dwte) {
            chunk.e_by_word = (uint32_t*)(void*)dwte;
            chunk.word_tile = (size_t)BF16_TILE * of->C;
        }
        cross_entropy_bf16_losses_(loss + n, dinp + (size_t)n * of->C, &chunk, matmul);
        cross_entropy_bf16_end_(dinp + (size_t)n * of->C, dwte, &chunk, scale, n == 0 ? mode : GRADIENT_ADD,
                                matmul);
        n += chunk.tokens;
    }
}

#endif // CROSS_ENTROPY_BF16_IMPLEMENTATION

#endif
