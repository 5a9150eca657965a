// test_soap.cu -- SOAP on the GPU against soap.h: both sides, one side and none, of several layers
// and parts, all kinds of master weights, cautious decay, parts of a tensor; scratch memory.
#include "llmc/optim/soap.cuh"
#include "dev/test/lib/gpu_ops.h"
#include "dev/test/lib/rule_test.h"

enum { UPDATES = 5, EVERY = 2, LAYERS = 2 };

static const AdamW defaults = {0.02f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.37f, 1, DECAY_ALL};

// A tensor whose layers lie apart in all arrays, with something else between them.
typedef struct {
    SoapTensor t;
    size_t n, moments, left, right; // elements of the arrays
} Case;

static Case case_of(int parts, int rows, int cols, int has_left, int has_right) {
    const size_t n = rule_padded((size_t)parts * rows * cols), l = (size_t)parts * rows * rows,
                 r = (size_t)parts * cols * cols;
    const MuonPlace in_weights = {128, n + 256}, in_moments = {4, n + 4}, none = {0, 0};
    const MuonTensor matrices = {in_weights, in_weights, in_weights, none,      none, LAYERS, parts,
                                 rows,       cols,       2,          {2048, 0}, 7,    1,      0};
    const SoapTensor t = {matrices,
                          {in_moments, in_moments},
                          {8, rule_padded(l) + 8},
                          {4, rule_padded(r) + 4},
                          has_left,
                          has_right,
                          0};
    const Case c = {t, 128 + (n + 256) * LAYERS, 4 + (n + 4) * LAYERS, 8 + (rule_padded(l) + 8) * LAYERS,
                    4 + (rule_padded(r) + 4) * LAYERS};
    return c;
}

// All state, in host or device memory.
typedef struct {
    float *param, *m, *v;
    SoapSide left, right;
} State;

static State state_zero(const Case* c) {
    const State s = {ops_normal(c->n, 0.1f),
                     ops_normal(c->moments, 0),
                     ops_normal(c->moments, 0),
                     {ops_normal(c->left, 0), ops_normal(c->left, 0)},
                     {ops_normal(c->right, 0), ops_normal(c->right, 0)}};
    return s;
}

// Returns gradients far from singular: noise, and a diagonal of different sizes in each matrix.
static float* gradient_of(const Case* c) {
    float* grad = ops_normal(c->n, 0.05f);
    const MuonTensor* t = &c->t.matrices;
    for (int l = 0; l < t->layers; l++) {
        for (int i = 0; i < t->parts * t->rows; i++) {
            if (i % t->rows < t->cols) {
                grad[muon_at_(t->grads, (size_t)l) + (size_t)i * t->cols + i % t->rows] +=
                    1 + (float)(i % t->rows) / 16;
            }
        }
    }
    return grad;
}

static SoapSide side_of(SoapSide side, MuonPlace place, int layer, int is_turned, int before) {
    const size_t at = muon_at_(place, (size_t)layer) + (size_t)before;
    const SoapSide none = {NULL, NULL}, of_layer = {side.mean + at, side.basis + at};
    return is_turned ? of_layer : none;
}

static void update_on_cpu(const Case* c, const State* s, const float* grad, AdamW opt) {
    const MuonTensor* t = &c->t.matrices;
    MatmulScratch matmul;
    Memory memory = memory_on_host();
    void* scratch = check_alloc(soap_scratch_bytes((size_t)t->rows, (size_t)t->cols), 1, "scratch");
    matmul_open(&matmul, &memory);
    opt.weight_decay *= (float)t->decay;
    for (int k = 0; k < t->layers * t->parts; k++) {
        const int l = k / t->parts, part = k % t->parts;
        const size_t in_layer = (size_t)part * t->rows * t->cols,
                     at = muon_at_(t->params, (size_t)l) + in_layer,
                     moments = muon_at_(c->t.moments[0], (size_t)l) + in_layer;
        const SoapMatrix x = {s->param + at,
                              grad + muon_at_(t->grads, (size_t)l) + in_layer,
                              s->m + moments,
                              s->v + moments,
                              side_of(s->left, c->t.left, l, c->t.has_left, part * t->rows * t->rows),
                              side_of(s->right, c->t.right, l, c->t.has_right, part * t->cols * t->cols),
                              (size_t)t->rows,
                              (size_t)t->cols};
        soap_update_cpu(x, Soap{opt, EVERY}, scratch, &matmul);
    }
    free(scratch);
    memory_close(&memory);
}

static State state_upload(const Case* c, State s, const Gpu* gpu) {
    const State on_gpu = {
        NULL,
        upload<float>(s.m, c->moments, 0, gpu),
        upload<float>(s.v, c->moments, 0, gpu),
        {upload<float>(s.left.mean, c->left, 0, gpu), upload<float>(s.left.basis, c->left, 0, gpu)},
        {upload<float>(s.right.mean, c->right, 0, gpu), upload<float>(s.right.basis, c->right, 0, gpu)}};
    return on_gpu;
}

static void state_free(State on_gpu) {
    gpu_free(on_gpu.right.basis), gpu_free(on_gpu.right.mean);
    gpu_free(on_gpu.left.basis), gpu_free(on_gpu.left.mean);
    gpu_free(on_gpu.v), gpu_free(on_gpu.m);
}

// Returns the state after all updates on the GPU.
template <class T, class G>
static State updated(const Case* c, State s, float* const grads[UPDATES], AdamW opt, MasterWeights kind,
                     MatmulGpu* matmul) {
    const Gpu* gpu = matmul->gpu;
    SoapGpu soap;
    Memory memory = memory_on_gpu();
    soap_open(&soap, &memory, &c->t, 1);
    RuleWeights<T> weights = rule_weights_open<T>(s.param, c->n, kind, gpu);
    const State x = state_upload(c, s, gpu);
    soap_choose_matmuls(&soap, &c->t, matmul);
    for (opt.t = 1; opt.t <= UPDATES; opt.t++) {
        G* grad = upload<G>(grads[opt.t - 1], c->n, 0, gpu);
        const SoapUpdate<T> u = {weights.weights, {grad, DTYPE_OF(G)}, x.m, x.v,   x.left, x.right,
                                 &soap,           {opt, EVERY},        7,   matmul};
        soap_update(&c->t, u, 0, LAYERS, gpu);
        CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
        gpu_free(grad);
    }
    const State got = {rule_weights_close(&weights, gpu),
                       download(x.m, c->moments, gpu),
                       download(x.v, c->moments, gpu),
                       {download(x.left.mean, c->left, gpu), download(x.left.basis, c->left, gpu)},
                       {download(x.right.mean, c->right, gpu), download(x.right.basis, c->right, gpu)}};
    state_free(x);
    memory_close(&memory);
    return got;
}

// Compares with the CPU, which computes in fp32, too. Eigenvalues lie apart, so roundings stay
// small: some hundred units of the largest change, and what T with its master weights cannot hold.
template <class T, class G> static void test_case(Case c, AdamW opt, MasterWeights kind, MatmulGpu* matmul) {
    State start = state_zero(&c);
    float* grads[UPDATES];
    rule_prepare<T>(start.param, c.n, kind);
    for (int i = 0; i < UPDATES; i++) {
        grads[i] = rule_round<G>(gradient_of(&c), c.n);
    }
    const State got = updated<T, G>(&c, start, grads, opt, kind, matmul);
    const float* before = ops_copy(start.param, c.n);
    for (opt.t = 1; opt.t <= UPDATES; opt.t++) {
        update_on_cpu(&c, &start, grads[opt.t - 1], opt);
    }
    const double held = rule_is_exact(kind) || DTYPE_OF(T) == DTYPE_FP32 ? 0
                        : kind == MASTER_24                              ? 0x1p-15
                                                                         : 2 * roundoff<T>();
    double most = 0, off = 0;
    for (size_t i = 0; i < c.n; i++) {
        most = fmax(most, fabs((double)start.param[i] - before[i]));
        EXPECT(start.param[i] != before[i] || got.param[i] == before[i], "%zu moves on the GPU only", i);
    }
    for (size_t i = 0; i < c.n; i++) {
        const double difference = fabs((double)got.param[i] - start.param[i]) - UPDATES * held;
        off = isnan(difference) ? INFINITY : fmax(off, difference);
    }
    EXPECT(most > 0 && off <= 1e-4 * most, "%d of %d x %d, %s: off by %g of %g", c.t.matrices.parts,
           c.t.matrices.rows, c.t.matrices.cols, dtype_name(DTYPE_OF(T)), off, most);
    ops_close("SOAP");
}

template <class T, class G> static void test_types(const Gpu* gpu) {
    const MatmulSettings settings = {0, (GeluFusion)0, 0, 0, 0};
    MatmulGpu matmul;
    Memory memory = memory_on_gpu();
    matmul_gpu_open(&matmul, &memory, gpu, settings);
    AdamW cautious = defaults;
    cautious.decay = DECAY_CAUTIOUS;
    test_case<T, G>(case_of(1, 32, 32, 1, 1), defaults, MASTER_FP32, &matmul);
    test_case<T, G>(case_of(3, 9, 9, 1, 1), defaults, MASTER_NONE, &matmul);
    test_case<T, G>(case_of(2, 12, 40, 1, 0), cautious, MASTER_FP32, &matmul);
    test_case<T, G>(case_of(1, 33, 7, 0, 1), defaults, MASTER_FP32, &matmul);
    test_case<T, G>(case_of(1, 5, 8, 0, 0), cautious, MASTER_FP32, &matmul);
    test_case<T, G>(case_of(1, 1, 1, 1, 1), defaults, MASTER_FP32, &matmul);
    Case without_decay = case_of(3, 16, 16, 1, 1);
    without_decay.t.matrices.decay = 0;
    test_case<T, G>(without_decay, defaults, MASTER_FP32, &matmul);
    if (DTYPE_OF(T) == DTYPE_BF16) {
        test_case<T, G>(case_of(1, 16, 16, 1, 1), cautious, MASTER_SPLIT, &matmul);
        test_case<T, G>(case_of(1, 16, 16, 1, 1), defaults, MASTER_24, &matmul);
    }
    matmul_gpu_close(&matmul);
    memory_close(&memory);
}

// Memory is planned and allocated for the largest of the tensors.
static void test_memory(void) {
    const SoapTensor tensors[2] = {case_of(3, 32, 96, 1, 1).t, case_of(1, 200, 4, 0, 1).t};
    const size_t want = 4 * (4 * 3 * 32 * 96 + 2 * 200 * 200 + 3 * 96);
    SoapGpu soap;
    const size_t before = gpu_memory_()->now_bytes;
    Memory planned = memory_dry(), memory = memory_on_gpu();
    soap_open(&soap, &planned, tensors, 2);
    soap_open(&soap, &memory, tensors, 2);
    const size_t bytes = memory_bytes(&planned, MEMORY_DEVICE);
    EXPECT(bytes == want && gpu_memory_()->now_bytes - before == want,
           "planned %zu bytes, allocated %zu, wanted %zu", bytes, gpu_memory_()->now_bytes - before, want);
    memory_close(&memory);
}

TEST(soap) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_types<float, float>(&gpu);
    test_types<bf16, float>(&gpu);
    test_types<bf16, bf16>(&gpu);
    UNSANITIZED((test_types<fp16, fp16>(&gpu)));
    test_memory();
    gpu_close(&gpu);
}
