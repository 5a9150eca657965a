/*
matmul_plans.cuh -- matmuls by cublasLt: their plans, and how autotune finds the fastest algorithms.

The first matmul of a shape makes a plan: the descriptors and an algorithm, which is the
first choice of cublasLt's heuristic or, with `autotune`, the fastest one measured. Later matmuls
reuse it. If the table of plans is full, the least recently used untuned one is dropped. Tuning is
slow, waits for the GPU and may allocate memory: run each matmul once before it is captured in a
graph.

The same plan gives the same bits on the same kind of GPU. The heuristic always picks the same plan;
measurements may not. So measured choices are kept in files (matmul_algorithms.h) and looked up
before anything is measured: first the choices of this run, which matmul_gpu_load_plans reads from
its checkpoint and matmul_gpu_save_plans writes, then the machine's cache. A matmul has separate
plans with and without `autotune`, so the order of matmuls does not matter. With GELU_RACE the race
is not only between algorithms but also between ways of an operation, in one matmul or in steps;
attention has such a race as well (attention_race.cuh). The bits of the ways differ, so the files
also keep the way. If a sum is split, its parts are added in fp32 in a separate step, never in place
or in 16 bits.

With several ranks, rank 0 chooses for all (matmul_gpu_open_plans): other algorithms would give
other bits, and the others would wait for the slowest. A matmul that is tuned for the first time is
then a collective call: all ranks make it, in the same order.

MatmulGpu has one workspace: its matmuls must be on one stream.
*/
#ifndef LLMC_MATMUL_PLANS_CUH
#define LLMC_MATMUL_PLANS_CUH

#include <assert.h>
#include <cublasLt.h>

#include "llmc/base/file.h"
#include "llmc/ops/matmul.h"
#include "llmc/base/xxh64.h"
#include "llmc/comm/comm.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/column_sums.cuh"
#include "llmc/ops/matmul_algorithms.h"

// a model needs about 20, and as many again for each batch size of generation
#define MATMUL_PLANS 256
// Algorithms that autotune measures: the library's guesses, and its first ones with clusters of two
// blocks, which share their loads.
#define MATMUL_GUESSES 32
#define MATMUL_CLUSTERED 2
#define MATMUL_CANDIDATES (MATMUL_GUESSES + 2 * MATMUL_CLUSTERED)
// The first race starts when the leader has run for so long, or so often: a cold GPU has other
// clocks than one in the middle of a step.
#define MATMUL_WARM_MS 300.0f
#define MATMUL_WARM_RUNS 256
// Rounds of measurements after one that loads the kernels; the shortest time counts.
#define MATMUL_ROUNDS 4
// decisions on the ways of operations: a model needs two per batch size, and four for attention
#define MATMUL_DECISIONS 64
#define MATMUL_WAYS 5         // most ways of an operation
#define MATMUL_HOPELESS 1.25f // times the best time so far: too slow to measure again
#define MATMUL_ALIGNMENT 16   // bytes: no algorithm needs more
// An algorithm replaces the heuristic's choice if its time is less than this fraction of it.
#define MATMUL_WORTHWHILE 0.98f

// GELUs that cublasLt applies while it stores a matmul's result: a sum of flags. The faster way
// depends on GPU and type. With a race, autotune measures each way of doing the operation, and the
// FUSED flags only apply without autotune.
typedef enum {
    GELU_SEPARATE = 0,
    GELU_FUSED_FORWARD = 1,
    GELU_FUSED_BACKWARD = 2,
    GELU_FUSED = GELU_FUSED_FORWARD | GELU_FUSED_BACKWARD,
    GELU_RACE_FORWARD = 4,
    GELU_RACE_BACKWARD = 8,
    GELU_RACE = GELU_RACE_FORWARD | GELU_RACE_BACKWARD
} GeluFusion;

// Ways of an operation with GELU: how much of it one matmul does.
typedef enum { GELU_WITH_BIAS_GRADIENT_, GELU_IN_MATMUL_, GELU_IN_STEPS_, GELU_WAYS_ } GeluWay_;

typedef struct {
    int tf32; // fp32 matmuls on tensor cores, with factors rounded to 10 bits
    GeluFusion gelu_fusion;
    // set where GELU is fused backward: the matmul may also sum the gradient of the bias before
    // GELU
    int bias_fusion;
    int autotune;
    // size of cublasLt's workspace (matmul_workspace_bytes); 0: the largest that helps any model
    size_t workspace_bytes;
} MatmulSettings;

typedef struct {
    void* out;
    const void *add, *left, *right;
    const void* bias;    // input of BIAS, output of DGELU_BGRAD
    void* aux;           // values before GELU: output of GELU_AUX, input of DGELU and DGELU_BGRAD
    const float* scales; // factors of the matmul, and of the matrix that is added; NULL: both are 1
    const float *left_scales, *right_scales; // of E4M3: of the rows and columns of the result
} MatmulOperands;

typedef struct {
    MatmulKey key;
    int tuned;   // made with autotune
    int refused; // cublasLt has no algorithm, and the members below are not set
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t left, right, out;
    cublasLtMatmulAlgo_t algorithm;
    int chosen, candidates; // index and count in the order of the heuristic
    float ms;               // measured by autotune, else 0
    int kept;               // measured in an earlier run
    uint64_t last_use;
} MatmulPlan_;

// Ways first ... end - 1 of an operation, in words; the standard one loses only to a clearly faster
// one. `name` names the operation; empty: its matmul's name.
typedef struct {
    int first, end, standard;
    const char* const* words;
    char name[64];
} MatmulWays;

// The way of an operation that won a race, and the times of all ways.
typedef struct {
    MatmulKey key; // the matmul with most of the operation's work, without an alignment
    MatmulWays ways;
    int way;
    float ms[MATMUL_WAYS]; // 0: not measured in this run
} MatmulDecision;

typedef struct {
    const Gpu* gpu;
    MatmulSettings settings;
    cublasLtHandle_t handle;
    cublasLtMatmulPreference_t preference;
    void* workspace; // of cublasLt, and for the partial sums of bias gradients
    size_t workspace_bytes;
    // (COLUMN_SUMS_FLOATS) sums of DGELU_BGRAD that are then added
    float* bias_sums;
    // for autotune: before, between and after the candidates
    cudaEvent_t events[MATMUL_CANDIDATES + 1];
    int is_warm;    // a race has run
    int has_chosen; // with several ranks: no more races, as not all ranks would take part
    // everything that an algorithm depends on besides the matmul, in words
    char machine[512];
    MatmulChoices chosen, cached; // choices of this run, and of the cache
    char cache[PATH_MAX];         // the cache's file; empty: none
    int cache_is_old;             // `cached` has entries that the file lacks
    // rank 0 of it chooses for all; NULL: every process chooses for itself
    Comm* comm;
    int plans_count;
    uint64_t uses; // counter for the last_use of plans
    MatmulPlan_ plans[MATMUL_PLANS];
    int decisions_count;
    MatmulDecision decisions[MATMUL_DECISIONS];
} MatmulGpu;

// ---- errors ----

// Checks a call; `what` is a string that names the matmul, or the step.
#define CUBLAS_CHECK(call, what)                                                                             \
    do {                                                                                                     \
        const cublasStatus_t status_ = (call);                                                               \
        CHECK_CALL(status_ == CUBLAS_STATUS_SUCCESS, "cublasLt: %s: %s: %s", what, #call,                    \
                   cublasLtGetStatusString(status_));                                                        \
    } while (0)

static inline const char* matmul_epilogue_name_(int epilogue) {
    switch (epilogue) {
    case CUBLASLT_EPILOGUE_DEFAULT:
        return "nothing";
    case CUBLASLT_EPILOGUE_BIAS:
        return "bias";
    case CUBLASLT_EPILOGUE_GELU_AUX:
        return "gelu";
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
        return "bias and gelu";
    case CUBLASLT_EPILOGUE_DGELU_BGRAD:
        return "gelu's derivative and gradient of the bias";
    default:
        return "gelu's derivative";
    }
}

typedef struct {
    char text[176];
} MatmulName;

static inline MatmulName matmul_name(const MatmulKey* key) {
    MatmulName name;
    snprintf(name.text, sizeof(name.text), "(%d, %d) %s (%d, %d)%s (%d, %d)%s, %s to %s, then %s", key->rows,
             key->cols, key->adds ? "+=" : "=", key->left_transposed ? key->depth : key->rows,
             key->left_transposed ? key->rows : key->depth, key->left_transposed ? "^T" : "",
             key->right_transposed ? key->cols : key->depth, key->right_transposed ? key->depth : key->cols,
             key->right_transposed ? "^T" : "", dtype_name((DType)key->type),
             dtype_name((DType)key->out_type), matmul_epilogue_name_(key->epilogue));
    if (key->batch > 1) {
        const size_t length = strlen(name.text);
        snprintf(name.text + length, sizeof(name.text) - length, ", %d times", key->batch);
    }
    return name;
}

// ---- open and close ----

// Returns the largest useful workspace. NVIDIA advises 32 MiB for Hopper, whose kernels split more.
// But one part's sums of fc's weight gradient are 9 MiB for GPT-2 124M, so 32 MiB would rule out
// splits by 4 and more.
static inline size_t matmul_most_workspace_(int major) { return (size_t)(major >= 9 ? 128 : 8) << 20; }

// Returns the major compute capability of a device; an H100's if there is none.
static inline int matmul_major(int device) {
    int major = 9;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) {
        cudaGetLastError(); // clears the error
        major = 9;
    }
    return major;
}

// Returns 1 if cublasLt's epilogues with GELU are faster than separate kernels. According to
// others' measurements they are on Hopper and on Blackwell's data center cards, but slower on RTX
// 4090 and 5090 (llm.c's pull request 591, sglang's issue 34350).
static inline int matmul_gelu_pays(int device) {
    const int major = matmul_major(device);
    return major == 9 || major == 10;
}

// Returns the size of cublasLt's workspace for micro-batches of N tokens and a model of C channels.
// The workspace holds sums of the parts that a matmul is split into, and parts with a depth below
// 256 are not worth their sums. So each of a block's largest matmuls, of N, C and 4 C, has at most
// N C C / 64 sums. Rounded up to a power of two: choices of algorithms are kept per size.
static inline size_t matmul_workspace_bytes(int device, size_t N, size_t C) {
    const size_t most = matmul_most_workspace_(matmul_major(device)), wanted = N * C * C / 64 * sizeof(float);
    size_t bytes = (size_t)8 << 20;
    while (bytes < wanted && bytes < most) {
        bytes *= 2;
    }
    return bytes;
}

static inline void matmul_gpu_open(MatmulGpu* ctx, Memory* memory, const Gpu* gpu, MatmulSettings settings) {
    const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    memset((void*)ctx, 0, sizeof(*ctx));
    ctx->gpu = gpu;
    ctx->settings = settings;
    ctx->workspace_bytes =
        settings.workspace_bytes ? settings.workspace_bytes : matmul_most_workspace_(gpu->major);
    ctx->workspace =
        memory_take(memory, "cuBLASLt workspace: of matmuls", MEMORY_DEVICE, ctx->workspace_bytes);
    if (settings.bias_fusion) {
        ctx->bias_sums = (float*)memory_take(memory, "cuBLASLt workspace: bias gradients", MEMORY_DEVICE,
                                             COLUMN_SUMS_FLOATS * sizeof(float));
    }
    if (memory_is_dry(memory)) {
        return;
    }
    CUBLAS_CHECK(cublasLtCreate(&ctx->handle), "open");
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&ctx->preference), "open");
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(ctx->preference,
                                                      CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                      &ctx->workspace_bytes, sizeof(ctx->workspace_bytes)),
                 "open");
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(ctx->preference,
                                                      CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions,
                                                      sizeof(reductions)),
                 "open");
    for (int i = 0; i <= MATMUL_CANDIDATES; i++) {
        CUDA_CHECK(cudaEventCreate(&ctx->events[i]));
    }
    snprintf(ctx->machine, sizeof(ctx->machine), "%s, sm_%d%d, cublasLt %zu, workspace %zu, tf32 %s",
             gpu->name, gpu->major, gpu->minor, cublasLtGetVersion(), ctx->workspace_bytes,
             settings.tf32 ? "on" : "off");
    matmul_choices_open(&ctx->chosen);
    matmul_choices_open(&ctx->cached);
}

static inline void matmul_plan_close_(MatmulPlan_* plan) {
    if (plan->operation) {
        CUBLAS_CHECK(cublasLtMatmulDescDestroy(plan->operation), "close");
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->left), "close");
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->right), "close");
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->out), "close");
        plan->operation = NULL;
    }
}

// Opens this machine's cache: from now on, tuned matmuls are looked up there before they are
// measured, and added to it.
static inline void matmul_gpu_open_cache(MatmulGpu* ctx) {
    char error[ERROR_BYTES];
    if (!matmul_cache_path(ctx->cache, ctx->machine)) {
        ctx->cache[0] = '\0';
    } else if (!matmul_choices_try_read(&ctx->cached, ctx->machine, ctx->cache, error)) {
        fprintf(stderr, "warning: %s; timing the matmuls again\n", error);
    }
}

// Writes the cache, if it exists and has changed.
static inline void matmul_gpu_keep_cache(MatmulGpu* ctx) {
    char error[ERROR_BYTES];
    if (ctx->cache[0] && ctx->cache_is_old &&
        !matmul_cache_try_write(&ctx->cached, ctx->machine, ctx->cache, error)) {
        fprintf(stderr, "warning: %s; the next run will time the matmuls again\n", error);
        ctx->cache[0] = '\0';
    }
    ctx->cache_is_old = 0;
}

// Lets rank 0, with its machine's cache, choose tuned algorithms for all ranks from now on.
// Collective: all must have the same GPU and library.
static inline void matmul_gpu_open_plans(MatmulGpu* ctx, Comm* comm) {
    if (comm->rank == 0) {
        matmul_gpu_open_cache(ctx);
    }
    if (comm->size > 1) {
        comm_agree(comm, "what algorithms of matmuls depend on (--autotune off: each has its own)",
                   xxh64(ctx->machine, strlen(ctx->machine)), ctx->machine);
        ctx->comm = comm;
    }
}

// Adopts the choices of a checkpoint's run; call it before the first matmul. Returns 0 with the
// reason in `error` if they do not apply here.
static inline int matmul_gpu_load_plans(MatmulGpu* ctx, const char* directory, char* error) {
    char path[PATH_MAX];
    file_join(path, directory, MATMUL_PLANS_FILE);
    return matmul_choices_try_read(&ctx->chosen, ctx->machine, path, error);
}

// Writes the choices of this run, if any, into a directory. Any thread may call it while another
// one computes matmuls.
static inline void matmul_gpu_save_plans(const void* matmul, const char* directory) {
    const MatmulGpu* ctx = (const MatmulGpu*)matmul;
    char path[PATH_MAX];
    file_join(path, directory, MATMUL_PLANS_FILE);
    if (matmul_choices_count(&ctx->chosen)) {
        matmul_choices_write(&ctx->chosen, ctx->machine, path);
    }
}

static inline void matmul_gpu_close(MatmulGpu* ctx) {
    matmul_gpu_keep_cache(ctx);
    matmul_choices_close(&ctx->cached);
    matmul_choices_close(&ctx->chosen);
    for (int i = 0; i < ctx->plans_count; i++) {
        matmul_plan_close_(&ctx->plans[i]);
    }
    for (int i = 0; i <= MATMUL_CANDIDATES; i++) {
        CUDA_CHECK(cudaEventDestroy(ctx->events[i]));
    }
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(ctx->preference), "close");
    CUBLAS_CHECK(cublasLtDestroy(ctx->handle), "close");
}

// Prints the ways of an operation on a line, and the chosen one.
static inline void matmul_report_decision_(FILE* file, const MatmulDecision* d) {
    const char* const* words = d->ways.words;
    if (d->ways.name[0]) {
        fprintf(file, "%s: done %s", d->ways.name, words[d->way]);
    } else {
        fprintf(file, "matmul %s: done %s", matmul_name(&d->key).text, words[d->way]);
    }
    for (int way = 0; way < d->ways.end; way++) {
        if (d->ms[way] > 0) {
            fprintf(file, ", %s %.3f ms", words[way], d->ms[way]);
        }
    }
    fprintf(file, "\n");
}

// Prints a line for each plan, and for each operation whose ways have raced.
static inline void matmul_gpu_report(FILE* file, const MatmulGpu* ctx) {
    for (int i = 0; i < ctx->decisions_count; i++) {
        matmul_report_decision_(file, &ctx->decisions[i]);
    }
    for (int i = 0; i < ctx->plans_count; i++) {
        const MatmulPlan_* plan = &ctx->plans[i];
        fprintf(file, "matmul %s: ", matmul_name(&plan->key).text);
        if (plan->refused) {
            fprintf(file, "not supported by cublasLt, done in separate steps\n");
        } else if (plan->ms > 0) {
            const double flops =
                plan->key.batch * matmul_flops(plan->key.rows, plan->key.depth, plan->key.cols);
            fprintf(file, "algorithm %d of %d, %.3f ms, %.1f TFLOP/s%s\n", plan->chosen + 1, plan->candidates,
                    plan->ms, flops / plan->ms * 1e-9, plan->kept ? ", measured in an earlier run" : "");
        } else {
            fprintf(file, "algorithm %d of %d, not measured\n", plan->chosen + 1, plan->candidates);
        }
    }
}

// ---- plans ----
//
// cublasLt's matrices are column-major. Read that way, a row-major (r, c) matrix is its transpose,
// (c, r). So we ask for out^T (cols, rows) = right^T (cols, depth) left^T (depth, rows): the right
// factor comes first, and no matrix is transposed in memory. The bias has one number per column of
// out, that is per row of out^T, as cublasLt's epilogues want it.

static inline cudaDataType_t matmul_data_type_(int type) {
    return type == DTYPE_FP32   ? CUDA_R_32F
           : type == DTYPE_BF16 ? CUDA_R_16BF
           : type == DTYPE_FP16 ? CUDA_R_16F
                                : CUDA_R_8F_E4M3;
}

static inline cublasLtMatrixLayout_t matmul_layout_(int type, int rows, int cols, int batch,
                                                    const char* name) {
    const int64_t stride = (int64_t)rows * cols;
    const int32_t count = batch;
    cublasLtMatrixLayout_t layout;
    CUBLAS_CHECK(
        cublasLtMatrixLayoutCreate(&layout, matmul_data_type_(type), (uint64_t)cols, (uint64_t)rows, cols),
        name);
    if (batch > 1) {
        CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                                      sizeof(count)),
                     name);
        CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                      &stride, sizeof(stride)),
                     name);
    }
    return layout;
}

static inline void matmul_describe_(MatmulPlan_* plan, cublasLtMatmulDescAttributes_t attribute,
                                    const void* value, size_t bytes) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(plan->operation, attribute, value, bytes),
                 matmul_name(&plan->key).text);
}

// Sets the part of the description that changes from matmul to matmul.
static inline void matmul_point_(MatmulPlan_* plan, MatmulOperands x) {
    if (x.bias) {
        matmul_describe_(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &x.bias, sizeof(x.bias));
    }
    if (x.aux) {
        matmul_describe_(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &x.aux, sizeof(x.aux));
    }
    if (x.left_scales) {
        matmul_describe_(plan, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &x.right_scales, sizeof(x.right_scales));
        matmul_describe_(plan, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &x.left_scales, sizeof(x.left_scales));
    }
}

// Says that rows of both factors have scales.
static inline void matmul_scale_(MatmulPlan_* plan) {
#if CUBLAS_VERSION >= 120900
    const int32_t by_row = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    matmul_describe_(plan, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &by_row, sizeof(by_row));
    matmul_describe_(plan, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &by_row, sizeof(by_row));
#else
    CHECK(0, "matmul %s: built with cublasLt %d; --matmul fp8 wanted 12.9 or newer",
          matmul_name(&plan->key).text, CUBLAS_VERSION);
#endif
}

// Makes the descriptors. The heuristic looks at the pointers' alignment, so they are set first.
static inline void matmul_plan_open_(MatmulPlan_* plan, MatmulOperands x, const MatmulGpu* ctx) {
    const MatmulKey* key = &plan->key;
    const MatmulName name = matmul_name(key);
    const int32_t first_transposed = key->right_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int32_t second_transposed = key->left_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    // of a bias, and of its gradient
    const int32_t bias_type = matmul_data_type_(key->out_type);
    const uint32_t epilogue = (uint32_t)key->epilogue;
    const int64_t aux_stride = key->cols;
    const cublasComputeType_t compute =
        key->type == DTYPE_FP32 && ctx->settings.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;

    CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan->operation, compute, CUDA_R_32F), name.text);
    matmul_describe_(plan, CUBLASLT_MATMUL_DESC_TRANSA, &first_transposed, sizeof(first_transposed));
    matmul_describe_(plan, CUBLASLT_MATMUL_DESC_TRANSB, &second_transposed, sizeof(second_transposed));
    matmul_describe_(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue));
    if (x.bias) {
        matmul_describe_(plan, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias_type, sizeof(bias_type));
    }
    if (x.aux) {
        matmul_describe_(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &aux_stride, sizeof(aux_stride));
    }
    if (x.left_scales) {
        matmul_scale_(plan);
    }
    matmul_point_(plan, x);
    plan->left = key->left_transposed
                     ? matmul_layout_(key->type, key->depth, key->rows, key->batch, name.text)
                     : matmul_layout_(key->type, key->rows, key->depth, key->batch, name.text);
    plan->right = key->right_transposed
                      ? matmul_layout_(key->type, key->cols, key->depth, key->batch, name.text)
                      : matmul_layout_(key->type, key->depth, key->cols, key->batch, name.text);
    plan->out = matmul_layout_(key->out_type, key->rows, key->cols, key->batch, name.text);
}

// Returns 1 if cublasLt does not support this epilogue, or E4M3. It supports every other matmul.
static inline int matmul_refusal_(const MatmulKey* key, cublasStatus_t status) {
    return (key->epilogue != CUBLASLT_EPILOGUE_DEFAULT || key->type == DTYPE_E4M3) &&
           (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
            status == CUBLAS_STATUS_ARCH_MISMATCH);
}

// Fills in up to `most` algorithms, best guess first; returns their number, 0 if cublasLt refuses.
static inline int matmul_candidates_(cublasLtMatmulHeuristicResult_t* results, int most,
                                     const MatmulPlan_* plan, const MatmulGpu* ctx) {
    const cublasLtMatmulPreferenceAttributes_t alignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    const MatmulName name = matmul_name(&plan->key);
    const uint32_t alignment = (uint32_t)plan->key.alignment;
    int found = 0, usable = 0;
    for (int i = 0; i < 4; i++) {
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(ctx->preference, alignments[i], &alignment,
                                                          sizeof(alignment)),
                     name.text);
    }
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(ctx->handle, plan->operation, plan->right, plan->left, plan->out,
                                       plan->out, ctx->preference, most, results, &found);
    if (matmul_refusal_(&plan->key, status)) {
        return 0;
    }
    CUBLAS_CHECK(status, name.text);
    for (int i = 0; i < found; i++) {
        if (results[i].state == CUBLAS_STATUS_SUCCESS) {
            results[usable++] = results[i];
        }
    }
    return usable;
}

// Adds the first algorithms with clusters of two blocks along the rows, or the columns, if cublasLt
// accepts them and has not offered them. Returns the new number of algorithms.
static inline int matmul_clustered_(cublasLtMatmulHeuristicResult_t* results, int count,
                                    const MatmulPlan_* plan, const MatmulGpu* ctx) {
    static const uint16_t shapes[] = {CUBLASLT_CLUSTER_SHAPE_2x1x1, CUBLASLT_CLUSTER_SHAPE_1x2x1};
    const int guesses = count;
    for (int i = 0; i < 2 * (guesses < MATMUL_CLUSTERED ? guesses : MATMUL_CLUSTERED); i++) {
        cublasLtMatmulHeuristicResult_t* to = &results[count];
        cublasLtMatmulAlgo_t algorithm = results[i / 2].algo;
        int is_new = cublasLtMatmulAlgoConfigSetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID,
                                                          &shapes[i % 2],
                                                          sizeof(shapes[0])) == CUBLAS_STATUS_SUCCESS &&
                     cublasLtMatmulAlgoCheck(ctx->handle, plan->operation, plan->right, plan->left, plan->out,
                                             plan->out, &algorithm, to) == CUBLAS_STATUS_SUCCESS &&
                     to->workspaceSize <= ctx->workspace_bytes;
        for (int j = 0; j < count; j++) {
            is_new &= memcmp((const void*)&results[j].algo, (const void*)&algorithm, sizeof(algorithm)) != 0;
        }
        to->algo = algorithm;
        count += is_new;
    }
    return count;
}

static inline cublasStatus_t matmul_launch_(const MatmulPlan_* plan, const cublasLtMatmulAlgo_t* algorithm,
                                            MatmulOperands x, const MatmulGpu* ctx) {
    const float alpha = x.scales ? x.scales[0] : 1.0f;
    const float beta = !plan->key.adds ? 0.0f : x.scales ? x.scales[1] : 1.0f;
    return cublasLtMatmul(ctx->handle, plan->operation, &alpha, x.right, plan->right, x.left, plan->left,
                          &beta, plan->key.adds ? x.add : x.out, plan->out, x.out, plan->out, algorithm,
                          ctx->workspace, ctx->workspace_bytes, ctx->gpu->stream);
}

// ---- autotune ----

// A candidate's shortest time so far, and whether it has left the race.
typedef struct {
    float ms;
    int is_out;
} MatmulRunner_;

// Runs an algorithm until the GPU is warm, or once if it fails.
static inline void matmul_warm_(const MatmulPlan_* plan, const cublasLtMatmulAlgo_t* algorithm,
                                MatmulOperands x, MatmulGpu* ctx) {
    float ms = 0;
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    CUDA_CHECK(cudaEventRecord(ctx->events[0], ctx->gpu->stream));
    for (int runs = 0; ms < MATMUL_WARM_MS && runs < MATMUL_WARM_RUNS && status == CUBLAS_STATUS_SUCCESS;
         runs++) {
        status = matmul_launch_(plan, algorithm, x, ctx);
        if (runs % 16 == 15) { // the GPU waits for the host a few times only
            CUDA_CHECK(cudaEventRecord(ctx->events[1], ctx->gpu->stream));
            CUDA_CHECK(cudaEventSynchronize(ctx->events[1]));
            CUDA_CHECK(cudaEventElapsedTime(&ms, ctx->events[0], ctx->events[1]));
        }
    }
    ctx->is_warm = 1;
}

// Runs each candidate once, back to back: the GPU is never idle in between, so all run at the same
// clocks. An extra run of the leader comes first; it only hides launch latency. A candidate that
// fails to run is out.
static inline void matmul_round_(MatmulRunner_* runners, int leader, const MatmulPlan_* plan,
                                 const cublasLtMatmulHeuristicResult_t* candidates, int count,
                                 MatmulOperands x, const MatmulGpu* ctx) {
    float ms;
    matmul_launch_(plan, &candidates[leader].algo, x, ctx);
    CUDA_CHECK(cudaEventRecord(ctx->events[0], ctx->gpu->stream));
    for (int i = 0; i < count; i++) {
        if (!runners[i].is_out) {
            runners[i].is_out = matmul_launch_(plan, &candidates[i].algo, x, ctx) != CUBLAS_STATUS_SUCCESS;
        }
        CUDA_CHECK(cudaEventRecord(ctx->events[i + 1], ctx->gpu->stream));
    }
    CUDA_CHECK(cudaEventSynchronize(ctx->events[count]));
    for (int i = 0; i < count; i++) {
        CUDA_CHECK(cudaEventElapsedTime(&ms, ctx->events[i], ctx->events[i + 1]));
        if (!runners[i].is_out && ms < runners[i].ms) {
            runners[i].ms = ms;
        }
    }
}

// Measures all candidates and returns the fastest; -1 if none runs. The heuristic's first choice
// wins unless another one is clearly faster.
static inline int matmul_race_(MatmulPlan_* plan, const cublasLtMatmulHeuristicResult_t* candidates,
                               int count, MatmulOperands x, MatmulGpu* ctx) {
    MatmulRunner_ runners[MATMUL_CANDIDATES];
    int best = 0;
    if (!ctx->is_warm) {
        matmul_warm_(plan, &candidates[0].algo, x, ctx);
    }
    for (int i = 0; i < count; i++) {
        const MatmulRunner_ runner = {INFINITY, 0};
        runners[i] = runner;
    }
    for (int round = 0; round <= MATMUL_ROUNDS; round++) {
        matmul_round_(runners, best, plan, candidates, count, x, ctx);
        best = 0;
        for (int i = 0; i < count; i++) {
            // the first round loaded the kernels
            runners[i].ms = round == 0 ? INFINITY : runners[i].ms;
            best = runners[i].ms < runners[best].ms ? i : best;
        }
        for (int i = 0; i < count; i++) {
            runners[i].is_out |= round > 0 && runners[i].ms > MATMUL_HOPELESS * runners[best].ms;
        }
    }
    best = runners[best].ms < MATMUL_WORTHWHILE * runners[0].ms ? best : 0;
    plan->ms = runners[best].ms;
    return isfinite(plan->ms) ? best : -1;
}

// Returns the fastest candidate, or -1. Measurements write into the matmul's output, since the real
// matmul then sets all of it. If results are added to the output, they write elsewhere; without
// enough memory for that, returns the first candidate unmeasured.
static inline int matmul_fastest_(MatmulPlan_* plan, const cublasLtMatmulHeuristicResult_t* candidates,
                                  int count, MatmulOperands x, MatmulGpu* ctx) {
    const MatmulKey* key = &plan->key;
    const size_t out_bytes = (size_t)key->batch * key->rows * key->cols * dtype_bytes((DType)key->out_type);
    size_t free_bytes = 0, total_bytes = 0;
    if (x.out != x.add) {
        return matmul_race_(plan, candidates, count, x, ctx);
    }
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    if (out_bytes > free_bytes / 2) {
        return 0;
    }
    x.out = gpu_alloc(out_bytes, 1, "matmul: output while tuning");
    const int best = matmul_race_(plan, candidates, count, x, ctx);
    gpu_free(x.out);
    return best;
}

// Adopts an earlier choice, if cublasLt still accepts it; returns 0 if not.
static inline int matmul_take_(MatmulPlan_* plan, const MatmulChoice* choice, const MatmulGpu* ctx) {
    cublasLtMatmulHeuristicResult_t result;
    static_assert(sizeof(plan->algorithm) == sizeof(choice->algorithm), "an algorithm is kept whole");
    if (!choice) {
        return 0;
    }
    memcpy((void*)&plan->algorithm, choice->algorithm, sizeof(plan->algorithm));
    const cublasStatus_t status =
        cublasLtMatmulAlgoCheck(ctx->handle, plan->operation, plan->right, plan->left, plan->out, plan->out,
                                &plan->algorithm, &result);
    if (status != CUBLAS_STATUS_SUCCESS || result.workspaceSize > ctx->workspace_bytes) {
        return 0;
    }
    plan->chosen = choice->chosen;
    plan->candidates = choice->candidates;
    plan->ms = choice->ms;
    plan->kept = 1;
    return 1;
}

static inline MatmulChoice matmul_choice_of_(const MatmulPlan_* plan) {
    MatmulChoice choice = {plan->key, plan->chosen, plan->candidates, plan->ms, {0}};
    memcpy(choice.algorithm, (const void*)&plan->algorithm, sizeof(choice.algorithm));
    return choice;
}

// Remembers the choice for a matmul, for this run and for others.
static inline void matmul_remember_(const MatmulPlan_* plan, MatmulGpu* ctx) {
    const MatmulChoice choice = matmul_choice_of_(plan);
    matmul_choices_add(&ctx->chosen, &choice);
    ctx->cache_is_old |= matmul_choices_add(&ctx->cached, &choice);
}

// ---- matmuls ----

// Returns a number that a power of two divides only if it divides the distances between all
// matrices of a batch; 0 without a batch.
static inline uintptr_t matmul_strides_(const MatmulKey* key) {
    const size_t rows = (size_t)key->rows, cols = (size_t)key->cols, depth = (size_t)key->depth;
    const size_t factors = (rows * depth | depth * cols) * dtype_bytes((DType)key->type);
    return key->batch == 1 ? 0 : factors | rows * cols * dtype_bytes((DType)key->out_type);
}

// Returns the largest power of two up to MATMUL_ALIGNMENT that divides all addresses.
static inline int matmul_alignment_(const MatmulKey* key, MatmulOperands x) {
    const uintptr_t all = (uintptr_t)x.out | (uintptr_t)x.add | (uintptr_t)x.left | (uintptr_t)x.right |
                          (uintptr_t)x.bias | (uintptr_t)x.aux | matmul_strides_(key) | MATMUL_ALIGNMENT;
    return (int)(all & (~all + 1));
}

// Asks cublasLt for an algorithm, or measures.
static inline void matmul_plan_choose_(MatmulPlan_* plan, MatmulOperands x, MatmulGpu* ctx) {
    cublasLtMatmulHeuristicResult_t candidates[MATMUL_CANDIDATES];
    plan->candidates = matmul_candidates_(candidates, MATMUL_GUESSES, plan, ctx);
    if (plan->tuned) {
        plan->candidates = matmul_clustered_(candidates, plan->candidates, plan, ctx);
    }
    plan->chosen = plan->candidates == 0 ? -1
                   : plan->tuned         ? matmul_fastest_(plan, candidates, plan->candidates, x, ctx)
                                         : 0;
    plan->refused = plan->chosen < 0;
    if (plan->refused) {
        matmul_plan_close_(plan);
    } else {
        plan->algorithm = candidates[plan->chosen].algo;
    }
}

// Adopts an earlier choice, or chooses.
static inline void matmul_plan_find_(MatmulPlan_* plan, MatmulOperands x, MatmulGpu* ctx) {
    if (!matmul_take_(plan, matmul_choices_find(&ctx->chosen, &plan->key), ctx) &&
        !matmul_take_(plan, matmul_choices_find(&ctx->cached, &plan->key), ctx)) {
        matmul_plan_choose_(plan, x, ctx);
    }
}

// Adopts rank 0's choice on the other ranks.
static inline void matmul_plan_follow_(MatmulPlan_* plan, const MatmulChoice* choice, const MatmulGpu* ctx) {
    const MatmulName name = matmul_name(&plan->key);
    CHECK(memcmp(&choice->key, &plan->key, sizeof(plan->key)) == 0,
          "matmul %s: rank 0 times %s; wanted the same product on all ranks", name.text,
          matmul_name(&choice->key).text);
    plan->refused = choice->chosen < 0;
    if (plan->refused) {
        matmul_plan_close_(plan);
    } else {
        CHECK(matmul_take_(plan, choice, ctx), "matmul %s: cublasLt refuses rank 0's algorithm", name.text);
    }
}

// Adopts the choice of rank 0 on all ranks. Its GPU may be waiting for the other GPUs, so the other
// ranks first finish what they have started.
static inline void matmul_plan_share_(MatmulPlan_* plan, MatmulOperands x, MatmulGpu* ctx) {
    CUDA_CHECK(cudaDeviceSynchronize()); // redundant: its test has one process
    if (ctx->comm->rank == 0) {
        matmul_plan_find_(plan, x, ctx);
    }
    MatmulChoice choice = matmul_choice_of_(plan);
    comm_broadcast(ctx->comm, &choice, sizeof(choice));
    if (ctx->comm->rank > 0) {
        matmul_plan_follow_(plan, &choice, ctx);
    }
}

static inline void matmul_plan_make_(MatmulPlan_* plan, MatmulOperands x, MatmulGpu* ctx) {
    matmul_plan_open_(plan, x, ctx);
    if (!plan->tuned) {
        matmul_plan_choose_(plan, x, ctx);
        return;
    }
    (ctx->comm ? matmul_plan_share_ : matmul_plan_find_)(plan, x, ctx);
    if (!plan->refused) {
        matmul_remember_(plan, ctx);
    }
}

// Returns a free plan; drops one if necessary.
static inline MatmulPlan_* matmul_plan_new_(const MatmulKey* key, MatmulGpu* ctx) {
    if (ctx->plans_count < MATMUL_PLANS) {
        return &ctx->plans[ctx->plans_count++];
    }
    MatmulPlan_* oldest = NULL;
    for (int i = 0; i < MATMUL_PLANS; i++) {
        MatmulPlan_* plan = &ctx->plans[i];
        if (!plan->tuned && (!oldest || plan->last_use < oldest->last_use)) {
            oldest = plan;
        }
    }
    CHECK(oldest, "matmul %s: already %d tuned plans, which is the maximum", matmul_name(key).text,
          MATMUL_PLANS);
    matmul_plan_close_(oldest);
    memset((void*)oldest, 0, sizeof(*oldest));
    return oldest;
}

// Returns the plan for this matmul, made now if it is the first of its kind.
static inline MatmulPlan_* matmul_plan_(const MatmulKey* key, MatmulOperands x, MatmulGpu* ctx) {
    for (int i = 0; i < ctx->plans_count; i++) {
        MatmulPlan_* plan = &ctx->plans[i];
        if (plan->tuned == ctx->settings.autotune && memcmp(&plan->key, key, sizeof(*key)) == 0) {
            plan->last_use = ++ctx->uses;
            return plan;
        }
    }
    MatmulPlan_* plan = matmul_plan_new_(key, ctx);
    plan->key = *key;
    plan->tuned = ctx->settings.autotune;
    plan->last_use = ++ctx->uses;
    matmul_plan_make_(plan, x, ctx);
    return plan;
}

// Runs the matmul; returns 0 if cublasLt refuses.
static inline int matmul_try(MatmulKey key, MatmulOperands x, MatmulGpu* ctx) {
    assert(key.rows > 0 && key.cols > 0 && key.depth > 0);
    key.alignment = matmul_alignment_(&key, x);
    MatmulPlan_* plan = matmul_plan_(&key, x, ctx);
    if (plan->refused) {
        return 0;
    }
    matmul_point_(plan, x);
    const cublasStatus_t status = matmul_launch_(plan, &plan->algorithm, x, ctx);
    if (matmul_refusal_(&key, status)) {
        plan->refused = 1;
        return 0;
    }
    CUBLAS_CHECK(status, matmul_name(&key).text);
    return 1;
}

static inline void matmul_product(MatmulKey key, MatmulOperands x, MatmulGpu* ctx) {
    CHECK(matmul_try(key, x, ctx), "matmul %s: cublasLt has no algorithm", matmul_name(&key).text);
}

#endif
