// test_expert_matmul.cu -- matmuls of experts against plain loops in double: experts without rows,
// with all of them, with a few; sizes beside those of tiles; every type, results set and added to;
// by each instruction that the GPU has.
#include "llmc/ops/expert_matmul.cuh"
#include "dev/test/lib/gpu_ops.h"

enum { MOST_EXPERTS = 40 };

#ifdef CUSIM
static const int simulated = 1;
#else
static const int simulated = 0;
#endif

typedef struct {
    int E, C, OC;
    int counts[MOST_EXPERTS]; // rows of each expert
    int is_one;               // one matrix for all rows, without `first`
} Case;

static int first_of(const Case* c, int e) { return e == 0 ? 0 : first_of(c, e - 1) + c->counts[e - 1]; }

// One matmul: element (i, j) of expert e is the sum over k of left (i, k) right (k, j).
typedef struct {
    const char* name;
    int width, K;                         // columns of the results
    const float *left, *right;            // of expert e
    int left_i, left_k, right_k, right_j; // distances of elements
} Product;

static void expect_product(const float* got, const Product* p, int rows, float before, double out_roundoff,
                           const char* type) {
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < p->width; j++) {
            double sum = before, size = fabs((double)before);
            for (int k = 0; k < p->K; k++) {
                const double term = (double)p->left[(size_t)i * p->left_i + (size_t)k * p->left_k] *
                                    p->right[(size_t)k * p->right_k + (size_t)j * p->right_j];
                sum += term;
                size += fabs(term);
            }
            // the roundings of K + 1 sums in fp32, and of the result; below 2^-14, fp16 has steps
            // of 2^-24
            const double tolerance = (p->K + 1) * 0x1p-24 * size + out_roundoff * fmax(fabs(sum), 0x1p-14);
            EXPECT_NEAR(got[(size_t)i * p->width + j], sum, tolerance, "%s, %s, K %d, (%d, %d) of %d x %d",
                        p->name, type, p->K, i, j, rows, p->width);
        }
    }
}

// Rounded inputs, and the same on the GPU; M rows have a token, more are there.
template <class X> struct Arrays {
    int M, all, padded;
    float *inp, *dout, *weight;
    X *inp_gpu, *dout_gpu, *weight_gpu;
    int* first;
};

enum { AFTER = 5 }; // rows after the last one, which must be neither read nor written

template <class X> static Arrays<X> arrays_of(const Case* c, const Gpu* gpu) {
    Arrays<X> a;
    int first[MOST_EXPERTS + 1];
    for (int e = 0; e <= c->E; e++) {
        first[e] = first_of(c, e);
    }
    a.M = first[c->E];
    a.all = a.M + (c->is_one ? 0 : AFTER);
    a.padded = expert_padded(c->OC);
    a.inp = normal<X>((size_t)a.all * c->C, 1);
    a.dout = normal<X>((size_t)a.all * a.padded, 1);
    a.weight = normal<X>((size_t)c->E * c->OC * c->C, 1);
    for (int i = 0; i < a.all * a.padded; i++) {
        a.dout[i] = i % a.padded < c->OC ? a.dout[i] : 0.0f;
    }
    for (int i = a.M * c->C; i < a.all * c->C; i++) {
        a.inp[i] = NAN;
    }
    a.inp_gpu = upload_rounded<X>(a.inp, (size_t)a.all * c->C, 0, gpu);
    a.dout_gpu = upload_rounded<X>(a.dout, (size_t)a.all * a.padded, 0, gpu);
    a.weight_gpu = upload_rounded<X>(a.weight, (size_t)c->E * c->OC * c->C, 0, gpu);
    a.first = upload_ints(first, (size_t)c->E + 1, gpu);
    return a;
}

// Returns the rows that the host knows of. Multiples of 32 may be padded: then up to 31 rows of an
// expert are not among them.
template <class X> static ExpertRows rows_of(const Case* c, const Arrays<X>* a, ExpertInstructions by) {
    int rows = 0;
    for (int e = 0; e < c->E; e++) {
        rows += c->counts[e] - (c->counts[e] > 0 && c->counts[e] % 32 == 0 ? 31 : 0);
    }
    return c->is_one ? ExpertRows{NULL, 1, a->M, a->all, by} : ExpertRows{a->first, c->E, rows, a->all, by};
}

static void expect_untouched(const float* x, size_t begin, size_t end) {
    for (size_t i = begin; i < end; i++) {
        EXPECT(isnan(x[i]), "element %zu after the last row of an expert was set", i);
    }
}

template <class X, class OUT>
static void check_forward(const Case* c, const Arrays<X>* a, ExpertInstructions by, const Gpu* gpu) {
    const ExpertRows rows = rows_of(c, a, by);
    const size_t n = (size_t)a->all * c->OC;
    OUT* out = unset<OUT>(n, gpu);
    expert_matmul_forward(out, a->inp_gpu, a->weight_gpu, &rows, {c->C, c->OC}, gpu);
    const float* got = take_back(out, n, gpu);
    for (int e = 0; e < c->E; e++) {
        const size_t first = (size_t)first_of(c, e);
        const Product p = {
            "forward", c->OC, c->C, a->inp + first * c->C, a->weight + (size_t)e * c->OC * c->C, c->C,
            1,         1,     c->C};
        expect_product(got + first * c->OC, &p, c->counts[e], 0, roundoff<OUT>(), dtype_name(DTYPE_OF(X)));
    }
    expect_untouched(got, (size_t)a->M * c->OC, n);
}

static const float BEFORE = 3;

template <class X> static float* filled(size_t n, const Gpu* gpu, X** memory) {
    float* x = ops_floats(n);
    for (size_t i = 0; i < n; i++) {
        x[i] = BEFORE;
    }
    *memory = upload_rounded<X>(x, n, 0, gpu);
    return x;
}

template <class X>
static void check_input(const Case* c, const Arrays<X>* a, GradientMode mode, ExpertInstructions by,
                        const Gpu* gpu) {
    const ExpertRows rows = rows_of(c, a, by);
    const size_t n = (size_t)a->M * c->C;
    const float before = mode == GRADIENT_ADD ? BEFORE : 0;
    X* dinp;
    filled(n, gpu, &dinp);
    expert_matmul_backward_input(dinp, a->dout_gpu, a->weight_gpu, &rows, {c->C, c->OC}, mode, gpu);
    const float* got = take_back(dinp, n, gpu);
    for (int e = 0; e < c->E; e++) {
        const size_t first = (size_t)first_of(c, e);
        const Product p = {"input",
                           c->C,
                           c->OC,
                           a->dout + first * a->padded,
                           a->weight + (size_t)e * c->OC * c->C,
                           a->padded,
                           1,
                           c->C,
                           1};
        expect_product(got + first * c->C, &p, c->counts[e], before, roundoff<X>(), dtype_name(DTYPE_OF(X)));
    }
}

template <class X, class G>
static void check_weight(const Case* c, const Arrays<X>* a, GradientMode mode, ExpertInstructions by,
                         const Gpu* gpu) {
    const ExpertRows rows = rows_of(c, a, by);
    const size_t matrix = (size_t)c->OC * c->C, n = c->E * matrix;
    const float before = mode == GRADIENT_ADD ? BEFORE : 0;
    G* dweight;
    filled(n, gpu, &dweight);
    expert_matmul_backward_weight({dweight, DTYPE_OF(G)}, a->dout_gpu, a->inp_gpu, &rows, {c->C, c->OC}, mode,
                                  gpu);
    const float* got = take_back(dweight, n, gpu);
    for (int e = 0; e < c->E; e++) {
        const size_t first = (size_t)first_of(c, e);
        const Product p = {
            "weight", c->C, c->counts[e], a->dout + first * a->padded, a->inp + first * c->C, 1, a->padded,
            c->C,     1};
        expect_product(got + e * matrix, &p, c->OC, before, roundoff<G>(), dtype_name(DTYPE_OF(X)));
    }
}

template <class X>
static void check_all(const Case* c, const Arrays<X>* a, ExpertInstructions by, const Gpu* gpu) {
    if (c->is_one) {
        check_forward<X, float>(c, a, by, gpu);
        check_weight<X, X>(c, a, GRADIENT_ADD, by, gpu);
    } else {
        check_forward<X, X>(c, a, by, gpu);
        check_weight<X, float>(c, a, GRADIENT_ADD, by, gpu);
    }
    check_input<X>(c, a, GRADIENT_SET, by, gpu);
    check_input<X>(c, a, GRADIENT_ADD, by, gpu);
    check_weight<X, X>(c, a, GRADIENT_SET, by, gpu);
}

template <class X> static void check(const Case* c, const Gpu* gpu) {
    const Arrays<X> a = arrays_of<X>(c, gpu);
    const ExpertRows rows = rows_of(c, &a, EXPERT_BY_WGMMA);
    check_all(c, &a, EXPERT_BY_MMA, gpu);
    if (expert_can_wgmma<X>(&rows)) {
        check_all(c, &a, EXPERT_BY_WGMMA, gpu);
    }
    gpu_free(a.inp_gpu);
    gpu_free(a.dout_gpu);
    gpu_free(a.weight_gpu);
    gpu_free(a.first);
    ops_close("matmul of experts");
}

template <class X> static void test_type(const Gpu* gpu) {
    const Case cases[] = {
        {4, 40, 72, {0, 31, 33, 1}, 0},
        {3, 136, 8, {0, 300, 0}, 0}, // all rows take one expert
        {2, 16, 264, {160, 128}, 0},
        {1, 72, 7, {131}, 1}, // a router's matrix: no multiple of a pack
        {1, 8, 1, {1}, 1},
        {2, 328, 72, {150, 1}, 0},               // more steps than stages
        {5, 264, 8, {129, 130, 1, 140, 129}, 0}, // the same, in more tiles than multiprocessors
    };
    const Case large[] = {
        {3, 64, 512, {128, 0, 256}, 0}, // only full tiles
        {2, 520, 328, {150, 1}, 0},
        {2, 296, 130, {500, 300}, 0}, // no multiple of a pack
        {1, 8, 8, {64}, 0},
    };
    Case many = {MOST_EXPERTS, 8, 8, {0}, 0}; // more than a warp looks at at a time
    for (int e = 0; e < MOST_EXPERTS; e++) {
        many.counts[e] = e % 3 == 0 ? 0 : e == 37 ? 140 : e % 5;
    }
    for (const Case& c : cases) {
        check<X>(&c, gpu);
    }
    check<X>(&many, gpu);
    if (PTX_HAS_WGMMA && !simulated) { // more tiles than multiprocessors; slow on the simulated GPU
        for (const Case& c : large) {
            check<X>(&c, gpu);
        }
        many.C = 72;
        many.OC = 2056;
        check<X>(&many, gpu);
    }
}

// Each element has a place of its own, and packs of eight stay together.
TEST(expert_places) {
    int seen[16 * 64] = {0};
    for (int row = 0; row < 16; row++) {
        for (int col = 0; col < 64; col++) {
            const int place = expert_place(row, col);
            EXPECT(place >= 0 && place < 16 * 64 && !seen[place], "(%d, %d): %d", row, col, place);
            EXPECT(place == expert_place(row, col / 8 * 8) + col % 8, "(%d, %d): %d", row, col, place);
            seen[place] = 1;
        }
    }
}

TEST_TYPES(expert_matmul)
