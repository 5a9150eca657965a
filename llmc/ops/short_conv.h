/*
short_conv.h -- a short causal convolution of each channel by itself: the contract, and the CPU
version.

    SHORT_CONV_SILU    out = silu(conv(x))        inp is x
    SHORT_CONV_GATED   out = c conv(b x)          inp is b, c, x

    conv(u)[t] = bias + sum_j weight[j] u[t - (W-1) + j]      j < W: the last tap is of token t

Before the first token of a document, u is 0.

    inp, dinp         (N, C), or (N, 3C): b in the first C columns, then c, then x
    out, dout         (N, C)    N = B*T
    weight, dweight   (C, W)    2 <= W <= SHORT_CONV_MOST
    bias, dbias       (C)       may be NULL
    starts            (B, T)    int32, position in the row where the document of token t starts;
                                NULL: the row is one document
    state             (B, W-1, C)   u of the last W-1 tokens of each sequence, the oldest first

short_conv_forward sets out. short_conv_backward sets dinp, and sets or adds to dweight and dbias,
unless they are NULL, according to `mode`; it computes conv again. Each gradient is one sum over
the tokens in the same order for any number of threads.

Generation: short_conv_store sets `state` after a pass over the start of each sequence, and
short_conv_step, with T = 1, reads one more token of each.

SILU: Qwen3-Next and Mamba (Gu and Dao, 2023); GATED: LFM 2 (Liquid AI, 2025).
*/
#ifndef LLMC_SHORT_CONV_H
#define LLMC_SHORT_CONV_H

#include "llmc/ops/gradient.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SHORT_CONV_MOST = 8 }; // taps
enum { SHORT_CONV_PACK = 8 }; // on the GPU, C is a multiple of it

// X(kind, columns of inp in units of C)
#define SHORT_CONV_KINDS(X) X(SHORT_CONV_SILU, 1) X(SHORT_CONV_GATED, 3)

#define SHORT_CONV_VALUE_(kind, columns) kind,
typedef enum { SHORT_CONV_KINDS(SHORT_CONV_VALUE_) } ShortConvKind;
#undef SHORT_CONV_VALUE_

static inline int short_conv_columns(ShortConvKind kind) {
#define SHORT_CONV_COLUMNS_(kind, columns) columns,
    static const int rows[] = {SHORT_CONV_KINDS(SHORT_CONV_COLUMNS_)};
#undef SHORT_CONV_COLUMNS_
    return rows[kind];
}

typedef struct {
    ShortConvKind kind;
    int B, T, C, W;
    const int* starts;
    const float *weight, *bias;
} ShortConv;

// Return the bytes that a pass over N tokens must move.
static inline double short_conv_forward_bytes(double N, double C, double element_bytes, ShortConvKind kind) {
    return (short_conv_columns(kind) + 1) * N * C * element_bytes;
}
static inline double short_conv_backward_bytes(double N, double C, double element_bytes, ShortConvKind kind) {
    return (2 * short_conv_columns(kind) + 1) * N * C * element_bytes;
}

void short_conv_forward_cpu(float* out, const float* inp, const ShortConv* conv);

void short_conv_backward_cpu(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                             const ShortConv* conv, GradientMode mode);

void short_conv_store_cpu(float* state, const float* inp, const ShortConv* conv);

void short_conv_step_cpu(float* out, float* state, const float* inp, const ShortConv* conv);

#ifdef __cplusplus
}
#endif

#ifdef SHORT_CONV_IMPLEMENTATION

#include <assert.h>
#include <string.h>

#include "llmc/base/sizes.h"
#include "llmc/base/threads.h"
#include "llmc/base/vec.h"
#include "llmc/ops/activation.h"

// Channels that a thread computes at a time, and rows, in the forward pass. Strips are wide: memory
// is fastest where a row goes on for pages.
enum { CONV_LEAST_ = 128, CONV_WIDEST_ = 2048, CONV_ROWS_ = 128 };
enum { CONV_ROOM_ = CONV_WIDEST_ + LANES };

// Returns the channels of a strip, of each of `parts` of the tokens: so that all threads have one.
static int conv_width_(int C, int parts) {
    const int strips = int_ceil_div(threads_max(), int_max(parts, 1)),
              width = int_round_up(int_ceil_div(C, strips), CONV_LEAST_);
    return int_min(width, CONV_WIDEST_);
}

// Rows of taps and biases, or of their gradients. Loops copy the pointers: as far as the compiler
// knows, a store of a vector may change those in memory.
typedef struct {
    float *tap[SHORT_CONV_MOST], *bias;
} ConvTaps_;

// Channels c0 ... c0+cols-1, with their taps and biases, and the last inputs: those of token n at
// u[n % SHORT_CONV_MOST], in the memory of `rows` or in inp itself. Channels past the last are 0.
// Rows of memory are one vector longer than the strip: in caches, they do not all have one place.
typedef struct {
    const ShortConv* conv;
    int c0, cols;
    ConvTaps_ taps;
    float *rows[SHORT_CONV_MOST], *zero;
    const float* u[SHORT_CONV_MOST];
    float memory[(2 * SHORT_CONV_MOST + 2) * CONV_ROOM_];
} ConvStrip_;

// Cuts off the memory of a row, all 0.
static float* conv_cut_(float** memory, int cols) {
    const size_t room = (size_t)int_ceil_div(cols, LANES) * LANES + LANES;
    float* row = (float*)memset(*memory, 0, room * sizeof(float));
    *memory += room;
    return row;
}

static void conv_strip_open_(ConvStrip_* s, const ShortConv* conv, int c0, int width) {
    const int W = conv->W, cols = int_min(width, conv->C - c0);
    float* memory = s->memory;
    assert(2 <= W && W <= SHORT_CONV_MOST && cols <= CONV_WIDEST_);
    s->conv = conv;
    s->c0 = c0;
    s->cols = cols;
    s->taps.bias = conv_cut_(&memory, cols), s->zero = conv_cut_(&memory, cols);
    for (int j = 0; j < SHORT_CONV_MOST; j++) {
        s->taps.tap[j] = conv_cut_(&memory, j < W ? cols : 0), s->rows[j] = conv_cut_(&memory, cols);
    }
    for (int c = 0; c < cols; c++) {
        for (int j = 0; j < W; j++) {
            s->taps.tap[j][c] = conv->weight[(size_t)(c0 + c) * W + j];
        }
        s->taps.bias[c] = conv->bias ? conv->bias[c0 + c] : 0;
    }
}

// Load and store the last n channels of a row. Not inlined: a vector in memory would cost each
// other one two instructions.
__attribute__((noinline)) static Vec conv_load_last_(const float* row, int n) {
    float last[LANES] = {0};
    memcpy(last, row, (size_t)n * sizeof(float));
    return vec_load(last);
}
__attribute__((noinline)) static void conv_store_last_(float* row, Vec x, int n) {
    memcpy(row, &x, (size_t)n * sizeof(float));
}

// Load and store n columns at `row`; the others of a vector are 0.
ALWAYS_INLINE Vec conv_load_(const float* row, int n) {
    return n == LANES ? vec_load(row) : conv_load_last_(row, n);
}
ALWAYS_INLINE void conv_store_(float* row, Vec x, int n) {
    if (n == LANES) {
        vec_store(row, x);
    } else {
        conv_store_last_(row, x, n);
    }
}

// Calls f(c, n, ...) for each vector of a strip, from column c on, of which n exist: whole ones
// with a constant n.
#define CONV_VECTORS_(f, cols, ...)                                                                          \
    do {                                                                                                     \
        int c_ = 0;                                                                                          \
        for (; c_ + LANES <= (cols); c_ += LANES) {                                                          \
            f(c_, LANES, __VA_ARGS__);                                                                       \
        }                                                                                                    \
        if (c_ < (cols)) {                                                                                   \
            f(c_, (cols)-c_, __VA_ARGS__);                                                                   \
        }                                                                                                    \
    } while (0)

// Returns the strip's part of row n of inp, or of dinp.
static const float* conv_inp_(const ConvStrip_* s, const float* inp, size_t n) {
    return inp + n * (size_t)short_conv_columns(s->conv->kind) * s->conv->C + s->c0;
}

ALWAYS_INLINE void conv_multiply_(int c, int n, float* u, const float* row, int C) {
    vec_store(u + c, conv_load_(row + c, n) * conv_load_(row + 2 * C + c, n));
}

// Gets the inputs u of token n of all.
static void conv_read_(ConvStrip_* s, const float* inp, int n) {
    const int C = s->conv->C, cols = s->cols;
    const float* row = conv_inp_(s, inp, (size_t)n);
    float* u = s->rows[n % SHORT_CONV_MOST];
    s->u[n % SHORT_CONV_MOST] = u;
    switch (s->conv->kind) {
    case SHORT_CONV_SILU:
        if (cols % LANES == 0) {
            s->u[n % SHORT_CONV_MOST] = row;
        } else {
            memcpy(u, row, (size_t)cols * sizeof(float));
        }
        break;
    case SHORT_CONV_GATED:
        CONV_VECTORS_(conv_multiply_, cols, u, row, C);
        break;
    }
}

// Returns the number of tokens before token n that are of its document and have a tap.
static int conv_past_(const ShortConv* conv, int n) {
    const int t = n % conv->T, start = conv->starts ? conv->starts[n] : 0;
    return int_min(conv->W - 1, t - start);
}

// Sets u[j] to the inputs of token n that tap j multiplies.
static void conv_window_(const float* u[SHORT_CONV_MOST], const ConvStrip_* s, int n) {
    const int W = s->conv->W, past = conv_past_(s->conv, n);
    for (int i = 0; i < W; i++) {
        u[W - 1 - i] = i <= past ? s->u[(n - i) % SHORT_CONV_MOST] : s->zero;
    }
}

// Returns conv of columns c ... c+LANES-1.
ALWAYS_INLINE Vec conv_at_(const ConvTaps_* taps, const float* const* u, int c, const int W) {
    Vec sum = vec_load(taps->bias + c);
    for (int j = 0; j < W; j++) {
        sum += vec_load(taps->tap[j] + c) * vec_load(u[j] + c);
    }
    return sum;
}

ALWAYS_INLINE void conv_vector_(int c, int n, float* out, const ConvTaps_* taps, const float* const* u,
                                const float* gate, const ShortConvKind kind, const int W) {
    const Vec conv = conv_at_(taps, u, c, W);
    conv_store_(out + c, kind == SHORT_CONV_GATED ? conv_load_(gate + c, n) * conv : silu_vec(conv).out, n);
}

// Sets out of a token; row: its row of inp.
ALWAYS_INLINE void conv_row_of_(float* out, const ConvStrip_* s, const float* const* u, const float* row,
                                const ShortConvKind kind, const int W) {
    const ConvTaps_ taps = s->taps;
    const float *gate = row + s->conv->C, *own[SHORT_CONV_MOST];
    for (int j = 0; j < W; j++) {
        own[j] = u[j];
    }
    CONV_VECTORS_(conv_vector_, s->cols, out, &taps, own, gate, kind, W);
}

// Calls f with kind and W, as constants for the models that exist: so the loop over taps is
// unrolled.
#define CONV_CALL_(f, conv, ...)                                                                             \
    ((conv)->kind == SHORT_CONV_SILU && (conv)->W == 4    ? f(__VA_ARGS__, SHORT_CONV_SILU, 4)               \
     : (conv)->kind == SHORT_CONV_GATED && (conv)->W == 3 ? f(__VA_ARGS__, SHORT_CONV_GATED, 3)              \
                                                          : f(__VA_ARGS__, (conv)->kind, (conv)->W))

static void conv_row_(float* out, const ConvStrip_* s, const float* const* u, const float* row) {
    CONV_CALL_(conv_row_of_, s->conv, out, s, u, row);
}

void short_conv_forward_cpu(float* out, const float* inp, const ShortConv* conv) {
    const int N = conv->B * conv->T, C = conv->C, parts = int_ceil_div(N, CONV_ROWS_),
              width = conv_width_(C, parts), strips = int_ceil_div(C, width);
#pragma omp parallel for schedule(static)
    for (int i = 0; i < parts * strips; i++) {
        const int first = i / strips * CONV_ROWS_, end = int_min(first + CONV_ROWS_, N);
        const float* u[SHORT_CONV_MOST];
        ConvStrip_ s;
        conv_strip_open_(&s, conv, i % strips * width, width);
        for (int n = int_max(0, first - conv->W + 1); n < first; n++) {
            conv_read_(&s, inp, n);
        }
        for (int n = first; n < end; n++) {
            conv_read_(&s, inp, n);
            conv_window_(u, &s, n);
            conv_row_(out + (size_t)n * C + s.c0, &s, u, conv_inp_(&s, inp, (size_t)n));
        }
    }
}

// ---- backward ----

// Gradients of a strip: of taps and biases, summed so far, and of conv, of token n in row
// n % SHORT_CONV_MOST.
typedef struct {
    ConvTaps_ taps;
    float* conv[SHORT_CONV_MOST];
    float memory[(2 * SHORT_CONV_MOST + 1) * CONV_ROOM_];
} ConvStripGradients_;

static void conv_gradients_open_(ConvStripGradients_* d, int cols) {
    float* memory = d->memory;
    d->taps.bias = conv_cut_(&memory, cols);
    for (int j = 0; j < SHORT_CONV_MOST; j++) {
        d->taps.tap[j] = conv_cut_(&memory, cols), d->conv[j] = conv_cut_(&memory, cols);
    }
}

// A token: its inputs by tap, dconv of itself and of the tokens after it that have a tap for it
// (else zeros), and its rows.
typedef struct {
    const float *u[SHORT_CONV_MOST], *later[SHORT_CONV_MOST], *row, *dout;
    float *dconv, *drow;
} ConvToken_;

// Sets dconv, with gates the gradient of c, and adds to the gradients of taps.
ALWAYS_INLINE void conv_vector_taps_(int c, int n, const ConvTaps_* d, const ConvTaps_* taps,
                                     const ConvToken_* x, int C, const ShortConvKind kind, const int W) {
    const Vec conv = conv_at_(taps, x->u, c, W), dy = conv_load_(x->dout + c, n);
    const Vec dconv =
        dy * (kind == SHORT_CONV_GATED ? conv_load_(x->row + C + c, n) : silu_vec(conv).derivative);
    vec_store(x->dconv + c, dconv);
    vec_store(d->bias + c, vec_load(d->bias + c) + dconv);
    for (int j = 0; j < W; j++) {
        float* to = d->tap[j] + c;
        vec_store(to, vec_load(to) + dconv * vec_load(x->u[j] + c));
    }
    if (kind == SHORT_CONV_GATED) {
        conv_store_(x->drow + C + c, dy * conv, n);
    }
}

// Sets the other gradients of inp.
ALWAYS_INLINE void conv_vector_inputs_(int c, int n, const ConvTaps_* taps, const ConvToken_* x, int C,
                                       const ShortConvKind kind, const int W) {
    Vec du = vec_load(taps->tap[W - 1] + c) * vec_load(x->dconv + c);
    for (int i = 1; i < W; i++) {
        du += vec_load(taps->tap[W - 1 - i] + c) * vec_load(x->later[i] + c);
    }
    if (kind == SHORT_CONV_GATED) {
        conv_store_(x->drow + 2 * C + c, du * conv_load_(x->row + c, n), n);
        du *= conv_load_(x->row + 2 * C + c, n);
    }
    conv_store_(x->drow + c, du, n);
}

// Sets a token's gradients of inp, and adds to those of taps and biases: in two loops, since one
// would need more registers for pointers than there are.
ALWAYS_INLINE void conv_token_backward_(ConvStripGradients_* d, const ConvStrip_* s, const ConvToken_* x,
                                        const ShortConvKind kind, const int W) {
    const ConvToken_ own = *x;
    const ConvTaps_ taps = s->taps, dtaps = d->taps;
    const int C = s->conv->C;
    CONV_VECTORS_(conv_vector_taps_, s->cols, &dtaps, &taps, &own, C, kind, W);
    CONV_VECTORS_(conv_vector_inputs_, s->cols, &taps, &own, C, kind, W);
}

// Sets or adds to the gradients of taps and biases.
static void conv_strip_finish_(float* dweight, float* dbias, const ConvStripGradients_* d,
                               const ConvStrip_* s, GradientMode mode) {
    const int W = s->conv->W, adds = mode == GRADIENT_ADD;
    for (int c = 0; c < s->cols; c++) {
        for (int j = 0; j < W && dweight; j++) {
            float* to = dweight + (size_t)(s->c0 + c) * W + j;
            *to = (adds ? *to : 0) + d->taps.tap[j][c];
        }
        if (dbias) {
            dbias[s->c0 + c] = (adds ? dbias[s->c0 + c] : 0) + d->taps.bias[c];
        }
    }
}

// A thread processes all tokens of a strip, from the last to the first: dconv of later tokens is
// known then.
static void conv_strip_backward_(float* dinp, float* dweight, float* dbias, const float* dout,
                                 const float* inp, ConvStrip_* s, GradientMode mode) {
    const ShortConv* conv = s->conv;
    const int N = conv->B * conv->T, W = conv->W;
    ConvStripGradients_ d;
    conv_gradients_open_(&d, s->cols);
    for (int n = N - 1; n >= 0; n--) {
        ConvToken_ x = {.row = conv_inp_(s, inp, (size_t)n),
                        .dout = dout + (size_t)n * conv->C + s->c0,
                        .dconv = d.conv[n % SHORT_CONV_MOST]};
        x.drow = dinp + (x.row - inp);
        // the inputs of tokens n-W+2 ... n are there already, except at the end
        for (int i = n == N - 1 ? 0 : W - 1; i < W && i <= n; i++) {
            conv_read_(s, inp, n - i);
        }
        conv_window_(x.u, s, n);
        for (int i = 1; i < W; i++) {
            const int reaches = n + i < N && conv_past_(conv, n + i) >= i;
            x.later[i] = reaches ? d.conv[(n + i) % SHORT_CONV_MOST] : s->zero;
        }
        CONV_CALL_(conv_token_backward_, conv, &d, s, &x);
    }
    conv_strip_finish_(dweight, dbias, &d, s, mode);
}

void short_conv_backward_cpu(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                             const ShortConv* conv, GradientMode mode) {
    const int width = conv_width_(conv->C, 1);
#pragma omp parallel for schedule(dynamic)
    for (int c = 0; c < conv->C; c += width) {
        ConvStrip_ s;
        conv_strip_open_(&s, conv, c, width);
        conv_strip_backward_(dinp, dweight, dbias, dout, inp, &s, mode);
    }
}

// ---- generation ----

void short_conv_store_cpu(float* state, const float* inp, const ShortConv* conv) {
    const int past = conv->W - 1, C = conv->C, width = conv_width_(C, 1), strips = int_ceil_div(C, width);
    for (int i = 0; i < conv->B * past * strips; i++) {
        const int b = i / strips / past, ago = past - 1 - i / strips % past, last = (b + 1) * conv->T - 1;
        ConvStrip_ s;
        conv_strip_open_(&s, conv, i % strips * width, width);
        const float* u = s.zero;
        if (ago <= conv_past_(conv, last)) {
            conv_read_(&s, inp, last - ago);
            u = s.u[(last - ago) % SHORT_CONV_MOST];
        }
        memcpy(state + (size_t)(i / strips) * C + s.c0, u, (size_t)s.cols * sizeof(float));
    }
}

void short_conv_step_cpu(float* out, float* state, const float* inp, const ShortConv* conv) {
    const int past = conv->W - 1, C = conv->C, width = conv_width_(C, conv->B),
              strips = int_ceil_div(C, width);
#pragma omp parallel for schedule(static)
    for (int i = 0; i < conv->B * strips; i++) {
        const int b = i / strips;
        const float* u[SHORT_CONV_MOST];
        ConvStrip_ s;
        conv_strip_open_(&s, conv, i % strips * width, width);
        float* of = state + (size_t)b * past * C + s.c0;
        for (int j = 0; j < past; j++) { // not where conv_read_ writes
            u[j] = memcpy(s.rows[(b + 1 + j) % SHORT_CONV_MOST], of + (size_t)j * C,
                          (size_t)s.cols * sizeof(float));
        }
        conv_read_(&s, inp, b);
        u[past] = s.u[b % SHORT_CONV_MOST];
        conv_row_(out + (size_t)b * C + s.c0, &s, u, conv_inp_(&s, inp, (size_t)b));
        for (int j = 0; j < past; j++) {
            memcpy(of + (size_t)j * C, u[j + 1], (size_t)s.cols * sizeof(float));
        }
    }
}

#endif // SHORT_CONV_IMPLEMENTATION

#endif
