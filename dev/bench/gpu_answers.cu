/*
gpu_answers.cu -- cublasLt's answer to each form of matmul that the trainer may ask for: a line for
each.

    build/cuda/<arch>-BF16/gpu_answers > answers.txt

A line ends with `yes` or `no`, then in brackets the reason for no, or how far the result is from
the exact one, in units of the last place of its type, and whether a second run gave the same bits.
The program for the simulated GPU gives the simulator's answers: where `no` and `yes` differ,
dev/cusim/src/cusim_lt.cpp is wrong about this card (gpu_report.sh, item `answers`).
*/
#include "llmc/ops/matmul.cuh"
#include "llmc/base/float8.h"
#include "llmc/base/rand.h"

typedef struct {
    DType type, out_type;
    int left_transposed, right_transposed, epilogue, adds;
    int rows, cols, depth;
    int shift; // elements between every matrix and an address that is aligned to 256 bytes
} Question;

// Matrices of a question, also as floats on the host.
// Rows of E4M3 have scales.
enum { OUT, LEFT, RIGHT, BIAS, AUX, LEFT_SCALES, RIGHT_SCALES, MATRICES };
typedef struct {
    size_t n[MATRICES];
    float* host[MATRICES];
    void *memory[MATRICES], *device[MATRICES];
} Matrices;

static int has_gelu_gradient(const Question* q) {
    return q->epilogue == CUBLASLT_EPILOGUE_DGELU || q->epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD;
}
// Returns 1 for a bias, as a summand or as sums of columns.
static int has_bias(const Question* q) {
    return q->epilogue == CUBLASLT_EPILOGUE_BIAS || q->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS ||
           q->epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD;
}
static int has_aux(const Question* q) {
    return q->epilogue == CUBLASLT_EPILOGUE_GELU_AUX || q->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS ||
           has_gelu_gradient(q);
}

static void narrow(void* to, const float* from, size_t n, DType type) {
    for (size_t i = 0; i < n; i++) {
        if (type == DTYPE_FP32) {
            ((float*)to)[i] = from[i];
        } else if (type == DTYPE_BF16) {
            ((bf16*)to)[i] = from_float<bf16>(from[i]);
        } else if (type == DTYPE_E4M3) {
            ((uint8_t*)to)[i] = e4m3_from_float(from[i]);
        } else {
            ((fp16*)to)[i] = from_float<fp16>(from[i]);
        }
    }
}

static void widen(float* to, const void* from, size_t n, DType type) {
    for (size_t i = 0; i < n; i++) {
        to[i] = type == DTYPE_FP32   ? ((const float*)from)[i]
                : type == DTYPE_BF16 ? to_float(((const bf16*)from)[i])
                : type == DTYPE_E4M3 ? e4m3_to_float(((const uint8_t*)from)[i])
                                     : to_float(((const fp16*)from)[i]);
    }
}

static DType type_of(const Question* q, int matrix) {
    return matrix == LEFT || matrix == RIGHT ? q->type : matrix >= LEFT_SCALES ? DTYPE_FP32 : q->out_type;
}

static void upload(const Matrices* x, int matrix, DType type, const Gpu* gpu) {
    const size_t bytes = x->n[matrix] * dtype_bytes(type);
    void* host = check_alloc(bytes, 1, "matrix");
    narrow(host, x->host[matrix], x->n[matrix], type);
    CUDA_CHECK(cudaMemcpyAsync(x->device[matrix], host, bytes, cudaMemcpyHostToDevice, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    widen(x->host[matrix], host, x->n[matrix], type); // the values on the device, after rounding
    free(host);
}

static void download(float* values, const Matrices* x, int matrix, DType type, const Gpu* gpu) {
    const size_t bytes = x->n[matrix] * dtype_bytes(type);
    void* host = check_alloc(bytes, 1, "matrix");
    CUDA_CHECK(cudaMemcpyAsync(host, x->device[matrix], bytes, cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    widen(values, host, x->n[matrix], type);
    free(host);
}

static Matrices matrices_open(const Question* q, const Gpu* gpu) {
    Matrices x = {{(size_t)q->rows * q->cols, (size_t)q->rows * q->depth, (size_t)q->depth * q->cols,
                   (size_t)q->cols, (size_t)q->rows * q->cols, (size_t)q->rows, (size_t)q->cols},
                  {0},
                  {0},
                  {0}};
    for (int i = 0; i < MATRICES; i++) {
        const size_t size = dtype_bytes(type_of(q, i));
        x.memory[i] = gpu_alloc(x.n[i] + (size_t)q->shift, size, "matrix");
        x.device[i] = (char*)x.memory[i] + (size_t)q->shift * size;
        x.host[i] = (float*)check_alloc(x.n[i], sizeof(float), "matrix");
        for (size_t k = 0; k < x.n[i]; k++) {
            x.host[i][k] = i >= LEFT_SCALES ? ldexpf(1, (int)(k % 5) - 2)
                                            : rand_normal(1, (uint64_t)i, k) * (i == RIGHT ? 0.1f : 1);
        }
        upload(&x, i, type_of(q, i), gpu);
    }
    return x;
}

static void matrices_close(Matrices* x) {
    for (int i = 0; i < MATRICES; i++) {
        gpu_free(x->memory[i]);
        free(x->host[i]);
    }
}

// Returns the exact value of element (r, c) of the matmul.
static double exact(const Question* q, const Matrices* x, int r, int c) {
    const size_t at = (size_t)r * q->cols + c;
    double sum = q->adds ? x->host[OUT][at] : 0;
    const double scale =
        q->type == DTYPE_E4M3 ? (double)x->host[LEFT_SCALES][r] * x->host[RIGHT_SCALES][c] : 1;
    for (int k = 0; k < q->depth; k++) {
        const size_t left = q->left_transposed ? (size_t)k * q->rows + r : (size_t)r * q->depth + k;
        const size_t right = q->right_transposed ? (size_t)c * q->depth + k : (size_t)k * q->cols + c;
        sum += scale * x->host[LEFT][left] * x->host[RIGHT][right];
    }
    if (has_bias(q) && !has_gelu_gradient(q)) {
        sum += x->host[BIAS][c];
    }
    const double z = has_gelu_gradient(q) ? x->host[AUX][at] : sum, a = 0.79788456080286536, b = 0.044715,
                 t = tanh(a * (z + b * z * z * z));
    switch (q->epilogue) {
    case CUBLASLT_EPILOGUE_GELU_AUX:
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
        return 0.5 * z * (1 + t);
    case CUBLASLT_EPILOGUE_DGELU:
    case CUBLASLT_EPILOGUE_DGELU_BGRAD:
        return sum * (0.5 * (1 + t) + 0.5 * z * (1 - t * t) * a * (1 + 3 * b * z * z));
    default:
        return sum;
    }
}

// Returns the largest error of a result, as a share of the largest value, in units of the last
// place of its type.
static double error_of(const Question* q, const Matrices* x, const float* got) {
    const double unit = q->out_type == DTYPE_FP32 ? 0x1p-23 : q->out_type == DTYPE_BF16 ? 0x1p-7 : 0x1p-10;
    double worst = 0, most = 0;
    for (int r = 0; r < q->rows; r++) {
        for (int c = 0; c < q->cols; c++) {
            const double want = exact(q, x, r, c), error = fabs(got[(size_t)r * q->cols + c] - want);
            worst = error <= worst ? worst : error; // keeps NaN
            most = fmax(most, fabs(want));
        }
    }
    return worst / (most * unit);
}

static MatmulKey key_of(const Question* q) {
    const MatmulKey key = {q->rows,
                           q->cols,
                           q->depth,
                           q->left_transposed,
                           q->right_transposed,
                           q->type,
                           (int)q->out_type,
                           q->epilogue,
                           q->adds,
                           0,
                           1};
    return key;
}

static void print_question(const Question* q, const MatmulGpu* ctx) {
    const MatmulKey key = key_of(q);
    printf("%s, aligned to %d%s: ", matmul_name(&key).text, q->shift ? (int)dtype_bytes(q->type) : 16,
           ctx->settings.tf32 ? ", tf32" : "");
}

// Sets *best to cublasLt's first choice; sets *found to 0 if it has none.
static cublasStatus_t best_algorithm(cublasLtMatmulHeuristicResult_t* best, int* found,
                                     const MatmulPlan_* plan, const MatmulGpu* ctx) {
    const uint32_t alignment = (uint32_t)plan->key.alignment;
    for (int i = CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES; i <= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES;
         i++) {
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(ctx->preference,
                                                          (cublasLtMatmulPreferenceAttributes_t)i, &alignment,
                                                          sizeof(alignment)),
                     "alignment");
    }
    *found = 0;
    return cublasLtMatmulAlgoGetHeuristic(ctx->handle, plan->operation, plan->right, plan->left, plan->out,
                                          plan->out, ctx->preference, 1, best, found);
}

// Runs the matmul twice. Returns its status.
static cublasStatus_t run(const Question* q, Matrices* x, float* results[2], int* found,
                          const MatmulGpu* ctx) {
    MatmulPlan_ plan;
    cublasLtMatmulHeuristicResult_t best;
    const int is_fp8 = q->type == DTYPE_E4M3;
    const MatmulOperands operands = {x->device[OUT],
                                      x->device[OUT],
                                      x->device[LEFT],
                                      x->device[RIGHT],
                                      has_bias(q) ? x->device[BIAS] : NULL,
                                      has_aux(q) ? x->device[AUX] : NULL,
                                      NULL,
                                      is_fp8 ? (const float*)x->device[LEFT_SCALES] : NULL,
                                      is_fp8 ? (const float*)x->device[RIGHT_SCALES] : NULL};
    memset((void*)&plan, 0, sizeof(plan));
    plan.key = key_of(q);
    plan.key.alignment = matmul_alignment_(&plan.key, operands);
    matmul_plan_open_(&plan, operands, ctx);
    cublasStatus_t status = best_algorithm(&best, found, &plan, ctx);
    for (int i = 0; i < 2 && status == CUBLAS_STATUS_SUCCESS && *found; i++) {
        upload(x, OUT, q->out_type, ctx->gpu);
        status = matmul_launch_(&plan, &best.algo, operands, ctx);
        if (status == CUBLAS_STATUS_SUCCESS) {
            download(results[i], x, OUT, q->out_type, ctx->gpu);
        }
    }
    matmul_plan_close_(&plan);
    return status;
}

static void ask(Question q, const MatmulGpu* ctx) {
    Matrices x = matrices_open(&q, ctx->gpu);
    float* results[2];
    int found = 0;
    for (int i = 0; i < 2; i++) {
        results[i] = (float*)check_alloc(x.n[OUT], sizeof(float), "result");
    }
    print_question(&q, ctx);
    const cublasStatus_t status = run(&q, &x, results, &found, ctx);
    if (status != CUBLAS_STATUS_SUCCESS || !found) {
        printf("no (%s)\n",
               status == CUBLAS_STATUS_SUCCESS ? "no algorithm" : cublasLtGetStatusString(status));
    } else {
        const int same = memcmp(results[0], results[1], x.n[OUT] * sizeof(float)) == 0;
        printf("yes (off by %.2f, %s)\n", error_of(&q, &x, results[0]), same ? "repeats" : "DOES NOT REPEAT");
    }
    fflush(stdout);
    free(results[0]);
    free(results[1]);
    matrices_close(&x);
}

// Asks about the matmuls of a linear layer of N tokens from C to OC channels.
static void ask_layer(DType type, DType gradient, int N, int C, int OC, int shift, const MatmulGpu* ctx) {
    const Question forward = {type, type, 0, 1, CUBLASLT_EPILOGUE_DEFAULT, 0, N, OC, C, shift};
    const Question input = {type, type, 0, 0, CUBLASLT_EPILOGUE_DEFAULT, 0, N, C, OC, shift};
    const Question weight = {type, gradient, 1, 0, CUBLASLT_EPILOGUE_DEFAULT, 0, OC, C, N, shift};
    const int after_forward[] = {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS,
                                 CUBLASLT_EPILOGUE_GELU_AUX, CUBLASLT_EPILOGUE_GELU_AUX_BIAS};
    for (int adds = 0; adds < 2; adds++) {
        for (int i = 0; i < 4 && type == gradient; i++) {
            Question q = forward;
            q.epilogue = after_forward[i], q.adds = adds;
            if (!adds || i < 2) { // GELU never follows an added result
                ask(q, ctx);
            }
        }
        Question q = weight;
        q.adds = adds;
        ask(q, ctx);
    }
    const int after_input[] = {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_DGELU,
                               CUBLASLT_EPILOGUE_DGELU_BGRAD};
    for (int i = 0; i < 3 && type == gradient; i++) {
        Question q = input;
        q.epilogue = after_input[i];
        ask(q, ctx);
    }
}

// Asks about matmuls of rows of E4M3, with what may follow them.
static void ask_fp8(DType out_type, int N, int C, int OC, const MatmulGpu* ctx) {
    const int after[] = {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU_AUX,
                         CUBLASLT_EPILOGUE_GELU_AUX_BIAS};
    for (int i = 0; i < 4; i++) {
        ask(Question{DTYPE_E4M3, out_type, 0, 1, after[i], 0, N, OC, C, 0}, ctx);
    }
    ask(Question{DTYPE_E4M3, out_type, 0, 1, CUBLASLT_EPILOGUE_DEFAULT, 1, N, OC, C, 0}, ctx);
    ask(Question{DTYPE_E4M3, out_type, 0, 1, CUBLASLT_EPILOGUE_BIAS, 1, N, OC, C, 0}, ctx);
}

static void ask_all(int tf32, const Gpu* gpu) {
    MatmulGpu ctx;
    const MatmulSettings settings = {tf32, GELU_SEPARATE, 0, 0, 0};
    Memory memory = memory_on_gpu();
    matmul_gpu_open(&ctx, &memory, gpu, settings);
    for (DType type : {DTYPE_BF16, DTYPE_FP16, DTYPE_FP32}) {
        if (tf32 && type != DTYPE_FP32) {
            continue;
        }
        ask_layer(type, type, 128, 64, 256, 0, &ctx);
        ask_layer(type, type, 31, 24, 40, 0, &ctx);
        ask_layer(type, type, 31, 33, 1, 0, &ctx);
        ask_layer(type, type, 128, 64, 256, 1, &ctx);
        if (type != DTYPE_FP32) {
            ask_layer(type, DTYPE_FP32, 128, 64, 256, 0, &ctx);
        }
        if (!tf32) {
            ask_fp8(type, 128, 64, 256, &ctx);
            ask_fp8(type, 31, 48, 80, &ctx);
        }
    }
    matmul_gpu_close(&ctx);
    memory_close(&memory);
}

int main(void) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    printf("%s, cublasLt %zu\n", gpu.name, cublasLtGetVersion());
    ask_all(0, &gpu);
    ask_all(1, &gpu);
    gpu_close(&gpu);
    return EXIT_SUCCESS;
}
