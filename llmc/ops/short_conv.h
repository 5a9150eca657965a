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
#include "llmc/base/vec.h"
#include "llmc/ops/activation.h"

// Channels that a thread computes at a time: taps and rows of a strip stay in the L1 cache.
enum { SHORT_CONV_STRIP_ = 256, SHORT_CONV_ROWS_ = 128 }; // and rows, in the forward pass

// A row of a strip; channels past the last are 0.
typedef struct {
    float at[SHORT_CONV_STRIP_];
} ConvRow_;

// Channels c0 ... c0+cols-1, with their taps and biases, and the last inputs: those of token n at
// u[n % SHORT_CONV_MOST], in the memory of `rows` or in inp itself.
typedef struct {
    const ShortConv* conv;
    int c0, cols;
    ConvRow_ tap[SHORT_CONV_MOST], bias, rows[SHORT_CONV_MOST], zero;
    const float* u[SHORT_CONV_MOST];
} ConvStrip_;

static void conv_strip_open_(ConvStrip_* s, const ShortConv* conv, int c0) {
    const int W = conv->W;
    assert(2 <= W && W <= SHORT_CONV_MOST);
    memset(s, 0, sizeof(*s));
    s->conv = conv;
    s->c0 = c0;
    s->cols = int_min(SHORT_CONV_STRIP_, conv->C - c0);
    for (int c = 0; c < s->cols; c++) {
        for (int j = 0; j < W; j++) {
            s->tap[j].at[c] = conv->weight[(size_t)(c0 + c) * W + j];
        }
        s->bias.at[c] = conv->bias ? conv->bias[c0 + c] : 0;
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

// Load and store columns c ... c+LANES-1 of a row of `cols`; those past the last are 0.
ALWAYS_INLINE Vec conv_load_(const float* row, int c, int cols) {
    return c + LANES <= cols ? vec_load(row + c) : conv_load_last_(row + c, cols - c);
}
ALWAYS_INLINE void conv_store_(float* row, Vec x, int c, int cols) {
    if (c + LANES <= cols) {
        vec_store(row + c, x);
    } else {
        conv_store_last_(row + c, x, cols - c);
    }
}

// Returns the strip's part of row n of inp, or of dinp.
static const float* conv_inp_(const ConvStrip_* s, const float* inp, size_t n) {
    return inp + n * (size_t)short_conv_columns(s->conv->kind) * s->conv->C + s->c0;
}

// Gets the inputs u of token n of all.
static void conv_read_(ConvStrip_* s, const float* inp, int n) {
    const int C = s->conv->C, cols = s->cols;
    const float* row = conv_inp_(s, inp, (size_t)n);
    float* u = s->rows[n % SHORT_CONV_MOST].at;
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
        for (int c = 0; c < cols; c += LANES) {
            vec_store(u + c, conv_load_(row, c, cols) * conv_load_(row + 2 * C, c, cols));
        }
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
        u[W - 1 - i] = i <= past ? s->u[(n - i) % SHORT_CONV_MOST] : s->zero.at;
    }
}

// Returns conv of columns c ... c+LANES-1.
ALWAYS_INLINE Vec conv_at_(const ConvStrip_* s, const float* const* u, int c, const int W) {
    Vec sum = vec_load(s->bias.at + c);
    for (int j = 0; j < W; j++) {
        sum += vec_load(s->tap[j].at + c) * vec_load(u[j] + c);
    }
    return sum;
}

// Sets out of a token; row: its row of inp.
ALWAYS_INLINE void conv_row_of_(float* out, const ConvStrip_* s, const float* const* u, const float* row,
                                const ShortConvKind kind, const int W) {
    const int cols = s->cols, C = s->conv->C;
    for (int c = 0; c < cols; c += LANES) {
        const Vec conv = conv_at_(s, u, c, W);
        const Vec y = kind == SHORT_CONV_GATED ? conv_load_(row + C, c, cols) * conv : silu_vec(conv).out;
        conv_store_(out, y, c, cols);
    }
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
    const int N = conv->B * conv->T, C = conv->C, strips = int_ceil_div(C, SHORT_CONV_STRIP_);
#pragma omp parallel for schedule(static)
    for (int i = 0; i < int_ceil_div(N, SHORT_CONV_ROWS_) * strips; i++) {
        const int first = i / strips * SHORT_CONV_ROWS_, end = int_min(first + SHORT_CONV_ROWS_, N);
        const float* u[SHORT_CONV_MOST];
        ConvStrip_ s;
        conv_strip_open_(&s, conv, i % strips * SHORT_CONV_STRIP_);
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
    ConvRow_ tap[SHORT_CONV_MOST], bias, conv[SHORT_CONV_MOST];
} ConvStripGradients_;

// A token: its inputs by tap, dconv of itself and of the tokens after it that have a tap for it
// (else zeros), and its rows.
typedef struct {
    const float *u[SHORT_CONV_MOST], *later[SHORT_CONV_MOST], *row, *dout;
    float *dconv, *drow;
} ConvToken_;

// Sets a token's gradients of inp, and adds to those of taps and biases.
ALWAYS_INLINE void conv_token_backward_(ConvStripGradients_* d, const ConvStrip_* s, const ConvToken_* x,
                                        const ShortConvKind kind, const int W) {
    const int cols = s->cols, C = s->conv->C;
    for (int c = 0; c < cols; c += LANES) {
        const Vec conv = conv_at_(s, x->u, c, W), dy = conv_load_(x->dout, c, cols);
        const Vec dconv =
            dy * (kind == SHORT_CONV_GATED ? conv_load_(x->row + C, c, cols) : silu_vec(conv).derivative);
        Vec du = vec_load(s->tap[W - 1].at + c) * dconv;
        vec_store(x->dconv + c, dconv);
        vec_store(d->bias.at + c, vec_load(d->bias.at + c) + dconv);
        for (int j = 0; j < W; j++) {
            float* to = d->tap[j].at + c;
            vec_store(to, vec_load(to) + dconv * vec_load(x->u[j] + c));
        }
        for (int i = 1; i < W; i++) {
            du += vec_load(s->tap[W - 1 - i].at + c) * vec_load(x->later[i] + c);
        }
        if (kind == SHORT_CONV_GATED) {
            conv_store_(x->drow, du * conv_load_(x->row + 2 * C, c, cols), c, cols);
            conv_store_(x->drow + C, dy * conv, c, cols);
            conv_store_(x->drow + 2 * C, du * conv_load_(x->row, c, cols), c, cols);
        } else {
            conv_store_(x->drow, du, c, cols);
        }
    }
}

// Sets or adds to the gradients of taps and biases.
static void conv_strip_finish_(float* dweight, float* dbias, const ConvStripGradients_* d,
                               const ConvStrip_* s, GradientMode mode) {
    const int W = s->conv->W, adds = mode == GRADIENT_ADD;
    for (int c = 0; c < s->cols; c++) {
        for (int j = 0; j < W && dweight; j++) {
            float* to = dweight + (size_t)(s->c0 + c) * W + j;
            *to = (adds ? *to : 0) + d->tap[j].at[c];
        }
        if (dbias) {
            dbias[s->c0 + c] = (adds ? dbias[s->c0 + c] : 0) + d->bias.at[c];
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
    memset(&d, 0, sizeof(d));
    for (int n = N - 1; n >= 0; n--) {
        ConvToken_ x = {.row = conv_inp_(s, inp, (size_t)n),
                        .dout = dout + (size_t)n * conv->C + s->c0,
                        .dconv = d.conv[n % SHORT_CONV_MOST].at};
        x.drow = dinp + (x.row - inp);
        // the inputs of tokens n-W+2 ... n are there already, except at the end
        for (int i = n == N - 1 ? 0 : W - 1; i < W && i <= n; i++) {
            conv_read_(s, inp, n - i);
        }
        conv_window_(x.u, s, n);
        for (int i = 1; i < W; i++) {
            const int reaches = n + i < N && conv_past_(conv, n + i) >= i;
            x.later[i] = reaches ? d.conv[(n + i) % SHORT_CONV_MOST].at : s->zero.at;
        }
        CONV_CALL_(conv_token_backward_, conv, &d, s, &x);
    }
    conv_strip_finish_(dweight, dbias, &d, s, mode);
}

void short_conv_backward_cpu(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                             const ShortConv* conv, GradientMode mode) {
#pragma omp parallel for schedule(dynamic)
    for (int c = 0; c < conv->C; c += SHORT_CONV_STRIP_) {
        ConvStrip_ s;
        conv_strip_open_(&s, conv, c);
        conv_strip_backward_(dinp, dweight, dbias, dout, inp, &s, mode);
    }
}

// ---- generation ----

void short_conv_store_cpu(float* state, const float* inp, const ShortConv* conv) {
    const int past = conv->W - 1, C = conv->C, strips = int_ceil_div(C, SHORT_CONV_STRIP_);
    for (int i = 0; i < conv->B * past * strips; i++) {
        const int b = i / strips / past, ago = past - 1 - i / strips % past, last = (b + 1) * conv->T - 1;
        ConvStrip_ s;
        conv_strip_open_(&s, conv, i % strips * SHORT_CONV_STRIP_);
        const float* u = s.zero.at;
        if (ago <= conv_past_(conv, last)) {
            conv_read_(&s, inp, last - ago);
            u = s.u[(last - ago) % SHORT_CONV_MOST];
        }
        memcpy(state + (size_t)(i / strips) * C + s.c0, u, (size_t)s.cols * sizeof(float));
    }
}

void short_conv_step_cpu(float* out, float* state, const float* inp, const ShortConv* conv) {
    const int past = conv->W - 1, C = conv->C, strips = int_ceil_div(C, SHORT_CONV_STRIP_);
#pragma omp parallel for schedule(static)
    for (int i = 0; i < conv->B * strips; i++) {
        const int b = i / strips;
        const float* u[SHORT_CONV_MOST];
        ConvStrip_ s;
        conv_strip_open_(&s, conv, i % strips * SHORT_CONV_STRIP_);
        float* of = state + (size_t)b * past * C + s.c0;
        for (int j = 0; j < past; j++) { // not where conv_read_ writes
            u[j] = memcpy(s.rows[(b + 1 + j) % SHORT_CONV_MOST].at, of + (size_t)j * C,
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
