// test_embedding.cu -- token and position embeddings on the GPU against reference.h: every type,
// rare and frequent tokens, the sort, gradients set and added, the same bits again; slices of the
// words give the bits of the whole.
#include "llmc/ops/embedding.cuh"
#include "llmc/reference.h"
#include "dev/test/lib/gpu_ops.h"

typedef struct {
    int B, T, maxT, V, C;
} Size;

// One rounding to X, and a few of FLT_EPSILON of the terms, in whatever order they meet.
template <class X>
static void compare(const float* got, const double* want, const double* magnitude, size_t n, const char* what,
                    const Size* s) {
    for (size_t i = 0; i < n; i++) {
        const double tolerance =
            roundoff<X>() * fabs(want[i]) + 8 * FLT_EPSILON * fabs(magnitude[i]) + 0x1p-25;
        EXPECT_NEAR(got[i], want[i], tolerance, "%s, B %d T %d V %d C %d, element %zu, %s", what, s->B, s->T,
                    s->V, s->C, i, dtype_name(DTYPE_OF(X)));
    }
}

template <class X>
static void test_forward(const Size* s, const int* tokens, int first, size_t shift, const Gpu* gpu) {
    const size_t N = (size_t)s->B * s->T, nc = N * s->C;
    const size_t te_n = (size_t)s->V * s->C, pe_n = (size_t)s->maxT * s->C;
    float *wte = ops_normal(te_n, 1), *wpe = ops_normal(pe_n, 1);
    double* want = ops_doubles(nc);
    X *te = upload<X>(wte, te_n, shift, gpu), *pe = upload<X>(wpe, pe_n, shift, gpu);
    X* out = upload<X>(ops_floats(nc), nc, shift, gpu);
    int* ids = upload_ints(tokens, N, gpu);
    int* places = (int*)check_alloc(N, sizeof(int), "positions");
    for (size_t n = 0; n < N; n++) {
        places[n] = first + (int)(n % s->T);
    }
    int* positions = upload_ints(places, N, gpu);
    embedding_forward(out, ids, te, pe,
                      embedding_batch(s->B, s->T, s->C, EmbeddingPositions{first ? positions : NULL, NULL}),
                      gpu);
    free(places);
    ref_embedding_forward(want, tokens, ops_widen(wte, te_n), ops_widen(wpe, pe_n) + (size_t)first * s->C,
                          s->B, s->T, s->C);
    const float* got = download(out, nc, gpu);
    for (size_t i = 0; i < nc; i++) { // one sum, rounded once: exact
        EXPECT(got[i] == to_float(from_float<X>((float)want[i])), "out %zu: %g, wanted %g, %s", i, got[i],
               want[i], dtype_name(DTYPE_OF(X)));
    }
    gpu_free(positions);
    gpu_free(ids);
    gpu_free(out - shift);
    gpu_free(pe - shift);
    gpu_free(te - shift);
}

// Positions by token, those of a token in their order.
static void check_order(const EmbeddingGpu* scratch, const int* tokens, int N, const Gpu* gpu) {
    int* order = (int*)check_alloc(N, sizeof(int), "order");
    char* seen = (char*)check_alloc(N, 1, "seen");
    CUDA_CHECK(cudaMemcpyAsync(order, scratch->order[0], (size_t)N * sizeof(int), cudaMemcpyDeviceToHost,
                               gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    for (int i = 0; i < N; i++) {
        EXPECT(order[i] >= 0 && order[i] < N && !seen[order[i]], "entry %d of %d is %d", i, N, order[i]);
        seen[order[i]] = 1;
        if (i > 0) {
            const int a = order[i - 1], b = order[i];
            EXPECT(tokens[a] < tokens[b] || (tokens[a] == tokens[b] && a < b), "entries %d and %d of %d",
                   i - 1, i, N);
        }
    }
    free(seen);
    free(order);
}

// G is the type of the gradients.
template <class X, class G>
static void test_backward(const Size* s, const int* tokens, GradientMode mode, size_t shift, const Gpu* gpu) {
    const size_t N = (size_t)s->B * s->T, te = (size_t)s->V * s->C, pe = (size_t)s->maxT * s->C;
    float *dwte = ops_normal(te, 1), *dwpe = ops_normal(pe, 1), *dout = ops_normal(N * s->C, 1);
    float *te_got[2], *pe_got[2], *nothing = ops_floats(pe);
    X* d = upload<X>(dout, N * s->C, shift, gpu);
    int* ids = upload_ints(tokens, N, gpu);
    EmbeddingGpu scratch;
    Memory memory = memory_on_gpu();
    // more than needed: nothing may depend on it
    embedding_open(&scratch, &memory, (int)N + 5, s->V, s->C);
    embedding_sort(&scratch, ids, (int)N, gpu);
    for (int run = 0; run < 2; run++) {
        G* to_te = upload<G>(dwte, te, 0, gpu);
        G* to_pe = upload<G>(mode == GRADIENT_ADD ? dwpe : nothing, pe, 0, gpu);
        const Gradient gradient_te = {to_te, DTYPE_OF(G)}, gradient_pe = {to_pe, DTYPE_OF(G)};
        embedding_backward(gradient_te, gradient_pe, d, ids, {s->B, s->T, s->C, s->V, s->maxT, {}, 0},
                           GRADIENT_ADD, mode, &scratch, gpu);
        te_got[run] = download(to_te, te, gpu);
        pe_got[run] = download(to_pe, pe, gpu);
        gpu_free(to_pe);
        gpu_free(to_te);
    }
    check_order(&scratch, tokens, (int)N, gpu);
    EXPECT(ops_same_bits(te_got[0], te_got[1], te), "dwte again, %zu positions", N);
    EXPECT(ops_same_bits(pe_got[0], pe_got[1], pe), "dwpe again, %zu positions", N);
    const double* wide = ops_widen(dout, N * s->C);
    double *te_want = ops_widen(dwte, te), *te_size = ops_absolute(te_want, te);
    double* pe_want = mode == GRADIENT_ADD ? ops_widen(dwpe, pe) : ops_doubles(pe);
    double* pe_size = ops_absolute(pe_want, pe);
    ref_embedding_backward(te_want, pe_want, wide, tokens, s->B, s->T, s->C);
    ref_embedding_backward(te_size, pe_size, ops_absolute(wide, N * s->C), tokens, s->B, s->T, s->C);
    compare<G>(te_got[0], te_want, te_size, te, "dwte", s);
    compare<G>(pe_got[0], pe_want, pe_size, pe, mode == GRADIENT_ADD ? "dwpe added" : "dwpe", s);
    memory_close(&memory);
    gpu_free(ids);
    gpu_free(d - shift);
}

// A rank's chunks: the rows and the gradients of the positions that whole sequences have there.
template <class X> static void test_chunks(const Gpu* gpu) {
    enum { B = 2, T = 6, RANKS = 2, W = RANKS * T, MAX_T = W + 1, C = 16, V = 4 };
    const size_t te_n = V * C, pe_n = MAX_T * C;
    X *te = upload<X>(ops_normal(te_n, 1), te_n, 0, gpu), *pe = upload<X>(ops_normal(pe_n, 1), pe_n, 0, gpu);
    float *dout = ops_normal(B * W * C, 1), *out[1 + RANKS], *dwpe[1 + RANKS];
    const int* tokens = ops_below(B * W, V);
    EmbeddingGpu scratch;
    Memory memory = memory_on_gpu();
    embedding_open(&scratch, &memory, B * W, V, C);
    for (int i = 0; i <= RANKS; i++) {
        const TokenChunks chunks = {i > 0 ? RANKS - 1 : 0, i > 0 ? i - 1 : 0};
        const int own = i > 0 ? T : W;
        float* rows = ops_floats(B * own * C);
        int* ids = ops_below(B * own, 1);
        for (int n = 0; n < B * own; n++) {
            const int from = n / own * W + token_chunks_position(chunks, n % own, own);
            ids[n] = tokens[from];
            memcpy(rows + n * C, dout + from * C, C * sizeof(float));
        }
        X *d = upload<X>(rows, B * own * C, 0, gpu),
          *to = upload<X>(ops_floats(B * own * C), B * own * C, 0, gpu),
          *to_pe = upload<X>(ops_floats(pe_n), pe_n, 0, gpu);
        int* on_gpu = upload_ints(ids, B * own, gpu);
        const Gradient none = {NULL, DTYPE_OF(X)}, gradient = {to_pe, DTYPE_OF(X)};
        embedding_forward(to, on_gpu, te, pe,
                          embedding_batch(B, own, C, EmbeddingPositions{NULL, NULL, chunks}), gpu);
        embedding_backward(none, gradient, d, on_gpu, {B, own, C, V, MAX_T, chunks}, GRADIENT_SET,
                           GRADIENT_SET, &scratch, gpu);
        out[i] = download(to, B * own * C, gpu);
        dwpe[i] = download(to_pe, pe_n, gpu);
        gpu_free(on_gpu);
        gpu_free(to_pe);
        gpu_free(to);
        gpu_free(d);
        for (int n = 0; n < B * own; n++) {
            const int at = token_chunks_position(chunks, n % own, own);
            EXPECT(ops_same_bits(out[i] + n * C, out[0] + (n / own * W + at) * C, C), "token %d", n);
            EXPECT(ops_same_bits(dwpe[i] + at * C, dwpe[0] + at * C, C), "position %d", at);
        }
        int others = 0;
        for (size_t k = 0; k < pe_n; k++) {
            others += dwpe[i][k] != 0;
        }
        EXPECT(others == own * C, "%d gradients of positions, wanted %d", others, own * C);
    }
    memory_close(&memory);
    gpu_free(pe);
    gpu_free(te);
    ops_close("chunks");
}

// Without positions: the rows of the tokens, and their sums, set over NaN.
template <class X, class G>
static void test_tokens(const Size* s, const int* tokens, size_t shift, const Gpu* gpu) {
    const size_t N = (size_t)s->B * s->T, n = N * s->C, te = (size_t)s->V * s->C;
    float *wte = ops_normal(te, 1), *dout = ops_normal(n, 1);
    X *from = upload<X>(wte, te, shift, gpu), *out = upload<X>(ops_floats(n), n, shift, gpu),
      *d = upload<X>(dout, n, shift, gpu);
    G* dwte = upload<G>(ops_floats(te), te, 0, gpu);
    int* ids = upload_ints(tokens, N, gpu);
    EmbeddingGpu scratch;
    Memory memory = memory_on_gpu();
    embedding_open(&scratch, &memory, (int)N, s->V, s->C);
    embedding_forward(out, ids, from, (const X*)NULL, embedding_batch(s->B, s->T, s->C, EmbeddingPositions{}),
                      gpu);
    const float* got = download(out, n, gpu);
    for (size_t i = 0; i < n; i++) {
        EXPECT(got[i] == wte[(size_t)tokens[i / s->C] * s->C + i % s->C], "token row, element %zu", i);
    }
    embedding_sort(&scratch, ids, (int)N, gpu);
    embedding_backward({dwte, DTYPE_OF(G)}, {NULL, DTYPE_OF(G)}, d, ids,
                       {s->B, s->T, s->C, s->V, s->maxT, {}, 0}, GRADIENT_SET, GRADIENT_SET, &scratch, gpu);
    double *want = ops_doubles(te), *size = ops_doubles(te);
    ref_embedding_backward(want, NULL, ops_widen(dout, n), tokens, s->B, s->T, s->C);
    ref_embedding_backward(size, NULL, ops_absolute(ops_widen(dout, n), n), tokens, s->B, s->T, s->C);
    compare<G>(download(dwte, te, gpu), want, size, te, "dwte set", s);
    memory_close(&memory);
    gpu_free(ids);
    gpu_free(dwte);
    gpu_free(d - shift);
    gpu_free(out - shift);
    gpu_free(from - shift);
}

// Half of the tokens are number V/2 in a batch that is `skewed`.
template <class X> static void test_size(Size s, int skewed, size_t shift, const Gpu* gpu) {
    int* tokens = ops_below((size_t)s.B * s.T, s.V);
    for (int n = 0; n < s.B * s.T && skewed; n += 2) {
        tokens[n] = s.V / 2;
    }
    test_forward<X>(&s, tokens, s.maxT - s.T, shift, gpu);
    test_backward<X, float>(&s, tokens, GRADIENT_SET, shift, gpu);
    test_backward<X, X>(&s, tokens, GRADIENT_ADD, shift, gpu);
    test_tokens<X, float>(&s, tokens, shift, gpu);
    test_tokens<X, X>(&s, tokens, shift, gpu);
    ops_close("sizes");
}

template <class X> static void test_type(const Gpu* gpu) {
    const Size sizes[] = {{1, 1, 1, 1, 8},      {3, 31, 33, 33, 31}, {2, 33, 40, 50, 33},
                          {2, 31, 31, 40, 768}, {3, 700, 700, 5, 8}, // three tiles of the sort
                          {1, 128, 128, 1, 8},  {2, 64, 65, 2, 8},   {1, 129, 129, 1, 40}}; // full
    for (const Size& size : sizes) {
        test_size<X>(size, 0, 0, gpu);
        if (size.B * size.T > 100) {
            test_size<X>(size, 1, 0, gpu);
        }
    }
    test_size<X>({2, 40, 64, 20, 64}, 0, 1, gpu); // no pack can be read here
    test_chunks<X>(gpu);
}

// More than 32 tiles in the sort, and tokens up to its last digit.
static void test_large(const Gpu* gpu) {
    const Size many = {33, 1000, 1000, 3000, 1}, wide = {2, 700, 700, 1 << 20, 1};
    int* tokens = ops_below((size_t)many.B * many.T, many.V);
    test_backward<float, float>(&many, tokens, GRADIENT_SET, 0, gpu);
    ops_close("many positions");
    // the last that one pass sorts, the first that takes two
    for (int V = 1 << 10; V <= (1 << 10) + 1; V++) {
        const Size edge = {1, 50, 50, V, 1};
        tokens = ops_below((size_t)edge.T, V);
        tokens[7] = V - 1;
        test_backward<float, float>(&edge, tokens, GRADIENT_SET, 0, gpu);
        ops_close("digits of 10 bits, and of 6");
    }
    tokens = ops_below((size_t)wide.B * wide.T, wide.V);
    tokens[3] = wide.V - 1;
    test_backward<bf16, float>(&wide, tokens, GRADIENT_ADD, 0, gpu);
    ops_close("many tokens");
}

static void open_too_many(const void* arg) {
    EmbeddingGpu scratch;
    (void)arg;
    Memory memory = memory_on_gpu();
    embedding_open(&scratch, &memory, 1, (1 << 20) + 1, 1);
}

TEST(embedding) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_type<float>(&gpu);
    test_type<bf16>(&gpu);
    UNSANITIZED(test_type<fp16>(&gpu));
    test_large(&gpu);
    EXPECT(test_dies(open_too_many, NULL, EXIT_FAILURE, "1048577|1048576"), "vocabulary");
    gpu_close(&gpu);
}

// ---- slices of the words ----

// The sum of the embeddings of slices, and positions added to it, have the bits of a model with one
// slice; so have the gradients of the slices, one after the other.
template <class X, class G>
static void test_slices(const Size* s, const int* tokens, int slices, size_t shift, const Gpu* gpu) {
    const size_t N = (size_t)s->B * s->T, n = N * s->C, te = (size_t)s->V * s->C, pe = (size_t)s->maxT * s->C;
    const int words = (s->V + slices - 1) / slices, C = s->C;
    float *wte = ops_normal(te, 1), *wpe = ops_normal(pe, 1), *dout = ops_normal(n, 1), *sum = ops_floats(n);
    X *from = upload<X>(wte, te, shift, gpu), *position = upload<X>(wpe, pe, shift, gpu),
      *d = upload<X>(dout, n, shift, gpu), *want = unset<X>(n, gpu), *out = unset<X>(n, gpu);
    G *dwant = unset<G>(te, gpu), *dwte = unset<G>(te, gpu);
    int* ids = upload_ints(tokens, N, gpu);
    EmbeddingGpu scratch;
    Memory memory = memory_on_gpu();
    const Gradient none = {NULL, DTYPE_OF(G)};
    embedding_open(&scratch, &memory, (int)N, s->V, C);
    embedding_forward(want, ids, from, position, embedding_batch(s->B, s->T, C, EmbeddingPositions{}), gpu);
    embedding_sort(&scratch, ids, (int)N, gpu); // once for all slices
    embedding_backward({dwant, DTYPE_OF(G)}, none, d, ids, {s->B, s->T, C, s->V, s->maxT, {}, 0},
                       GRADIENT_SET, GRADIENT_SET, &scratch, gpu);
    for (int first = 0; first < s->V; first += words) {
        const EmbeddingWords slice = {first, first + words < s->V ? words : s->V - first};
        embedding_forward(out, ids, from + (size_t)first * C, (const X*)NULL,
                          embedding_slice((int)N, C, slice), gpu);
        const float* part = download(out, n, gpu);
        for (size_t i = 0; i < n; i++) {
            const int is_own = first <= tokens[i / C] && tokens[i / C] < first + slice.count;
            EXPECT(is_own || part[i] == 0, "word %d of another slice: %g", tokens[i / C], part[i]);
            sum[i] = (first > 0 ? sum[i] : 0) + part[i];
        }
        embedding_backward({dwte + (size_t)first * C, DTYPE_OF(G)}, none, d, ids,
                           {s->B, s->T, C, slice.count, s->maxT, {}, first}, GRADIENT_SET, GRADIENT_SET,
                           &scratch, gpu);
    }
    const int half = (int)N / 2; // two processes, each with some of the rows
    X* rows = upload<X>(sum, n, shift, gpu);
    embedding_positions(rows, position, 0, half, s->T, EmbeddingPositions{}, C, gpu);
    embedding_positions(rows + (size_t)half * C, position, half, (int)N - half, s->T, EmbeddingPositions{}, C,
                        gpu);
    EXPECT(ops_same_bits(download(rows, n, gpu), download(want, n, gpu), n), "%d slices: embedding", slices);
    EXPECT(ops_same_bits(download(dwte, te, gpu), download(dwant, te, gpu), te), "%d slices: gradient",
           slices);
    memory_close(&memory);
    for (void* array : {(void*)(rows - shift), (void*)ids, (void*)dwte, (void*)dwant, (void*)out, (void*)want,
                        (void*)(d - shift), (void*)(position - shift), (void*)(from - shift)}) {
        gpu_free(array);
    }
}

template <class X> static void test_slices_of(const Gpu* gpu) {
    const Size sizes[] = {{1, 1, 1, 1, 8}, {3, 31, 33, 33, 31}, {2, 31, 31, 40, 768}, {3, 700, 700, 5, 8}};
    for (const Size& s : sizes) {
        const int* tokens = ops_below((size_t)s.B * s.T, s.V);
        test_slices<X, float>(&s, tokens, 2, 0, gpu);
        test_slices<X, X>(&s, tokens, 4, 0, gpu);
        ops_close("slices");
    }
    const Size odd = {2, 40, 64, 20, 64};
    test_slices<X, X>(&odd, ops_below(80, 20), 2, 1, gpu); // no pack can be read here
    ops_close("slices");
}

TEST(embedding_slices) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_slices_of<float>(&gpu);
    test_slices_of<bf16>(&gpu);
    UNSANITIZED(test_slices_of<fp16>(&gpu));
    gpu_close(&gpu);
}
