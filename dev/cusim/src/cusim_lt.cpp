/*
cusim_lt.cpp -- cublasLt on the CPU device, as far as a GPT trainer uses it: one matmul of
column-major matrices of fp32, bf16 or fp16 with bias, GELU, and its derivative, also with the
gradient of the bias before it, as epilogues; without epilogue also a batch of matrices at fixed
distances. Factors may be E4M3 with a scale for each row (OUTER_VEC_32F), both with their rows along
the depth, of sizes that are multiples of 16, and without GELU.

It refuses what cublasLt is documented to refuse, and checks what cublasLt assumes: that the
pointers are device memory as long as the layouts require, as aligned as the heuristic was told, and
that the workspace exists (it is overwritten). It offers LT_ALGORITHMS algorithms, which sum in
different orders, so their bits differ. The first accepts clusters of two blocks, as numbers
LT_ALGORITHMS (2 x 1) and LT_ALGORITHMS + 1.

Environment, read at every call, so that a test can change it:
    CUSIM_LT_REFUSE=gelu_aux_bias,dgelu   epilogues for which no algorithm is found
    CUSIM_LT_FAST=i                       all algorithms but number i take LT_SLOW_S longer, by the
                                          device's clock
    CUSIM_LT_REFUSE_FP8=1                 no algorithm is found for E4M3
    CUSIM_LT_FAST_FP8=1                   all matmuls but those of E4M3 take LT_SLOW_S longer
    CUSIM_LT_FAST_FP8=0                   matmuls of E4M3 do
    CUSIM_LT_BROKEN=i                     algorithm i is offered, but running it is refused
    CUSIM_LT_SLOW=gelu_aux_bias,dgelu     matmuls with these epilogues take LT_SLOW_S longer

needs:   cusim.h cublasLt.h, and of the runtime cusim_enqueue, cusim_pass_time,
         cusim_check_kernel_pointer, trace_line
*/
#include <cusim.h>
#include <cublasLt.h>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

void cusim_enqueue(cudaStream_t stream, bool on_device, std::function<void()> work);
void cusim_pass_time(double seconds);
void trace_line(const char* format, ...);
bool cusim_is_dry();

namespace {

enum { LT_ALGORITHMS = 4, LT_CLUSTERS = 2, LT_SLOW_S = 1, LT_WORKSPACE_BYTES = 64 << 10 };
const double LT_PRODUCT_S = 90e-6; // longer than any other operation

// Objects behind the opaque handles.
struct Layout {
    cudaDataType_t type;
    long rows, cols, stride; // stride: elements from a column to the next
    int32_t batch;           // number of matrices
    int64_t batch_stride;    // elements from a matrix to the next
};
struct Operation {
    cublasComputeType_t compute;
    cudaDataType_t scale;
    int32_t transpose_a, transpose_b, pointer_mode, bias_type, aux_type;
    uint32_t epilogue;
    void* bias; // output of DGELU_BGRAD
    void* aux;
    int64_t aux_stride;
    int32_t scale_mode_a, scale_mode_b;
    const float *scale_a, *scale_b;
};
struct Preference {
    uint64_t workspace_bytes;
    uint32_t reductions, align_a, align_b, align_c, align_d;
};
// Contents of cublasLtMatmulAlgo_t.
struct Algorithm {
    int number;
    // no padding: programs keep all bytes in files
    uint32_t align_a, align_b, align_c, align_d, zero;
    uint64_t workspace_bytes;
};
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t), "does not fit into the opaque type");

// A matmul: d (M, N) = alpha op(a) op(b) + beta c, and the epilogue.
struct Product {
    Operation op;
    Layout a, b, c, d;
    long M, N, K;
};

int environment_number(const char* name) {
    const char* text = getenv(name);
    return text ? atoi(text) : -1;
}

// ---- elements ----

size_t element_bytes(int type) {
    return type == CUDA_R_32F                          ? 4
           : type == CUDA_R_16BF || type == CUDA_R_16F ? 2
           : type == CUDA_R_8F_E4M3                    ? 1
                                                       : 0;
}

// Returns the value of a code: sign, 4 bits of exponent, 3 of mantissa.
float of_e4m3(unsigned code) {
    const int exponent = (int)(code >> 3 & 15), mantissa = (int)(code & 7);
    const float magnitude = (code & 0x7F) == 0x7F ? NAN
                            : exponent > 0        ? ldexpf((float)(8 + mantissa), exponent - 10)
                                                  : ldexpf((float)mantissa, -9);
    return code & 0x80 ? -magnitude : magnitude;
}

float load(const void* from, size_t i, int type) {
    switch (type) {
    case CUDA_R_32F:
        return ((const float*)from)[i];
    case CUDA_R_16BF:
        return __bfloat162float(((const __nv_bfloat16*)from)[i]);
    case CUDA_R_8F_E4M3:
        return of_e4m3(((const uint8_t*)from)[i]);
    default:
        return __half2float(((const __half*)from)[i]);
    }
}

void store(void* to, size_t i, int type, float x) {
    switch (type) {
    case CUDA_R_32F:
        ((float*)to)[i] = x;
        break;
    case CUDA_R_16BF:
        ((__nv_bfloat16*)to)[i] = __float2bfloat16_rn(x);
        break;
    default:
        ((__half*)to)[i] = __float2half_rn(x);
    }
}

// Rounds to 10 bits after the binary point, as tensor cores read fp32.
float round_tf32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (bits + 0x1000u) & ~0x1fffu;
    memcpy(&x, &bits, 4);
    return x;
}

const float GELU_SCALE = 0.7978845608f, GELU_CUBIC = 0.044715f;

float gelu(float x) { return 0.5f * x * (1.0f + tanhf(GELU_SCALE * (x + GELU_CUBIC * x * x * x))); }

float gelu_derivative(float x) {
    const float t = tanhf(GELU_SCALE * (x + GELU_CUBIC * x * x * x));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * GELU_SCALE * (1 + 3 * GELU_CUBIC * x * x);
}

// ---- refusals ----

bool epilogue_has(const Operation& op, uint32_t bits) { return (op.epilogue & bits) == bits; }
const uint32_t AUX = 128;

const char* epilogue_name(uint32_t epilogue) {
    switch (epilogue) {
    case CUBLASLT_EPILOGUE_DEFAULT:
        return "default";
    case CUBLASLT_EPILOGUE_BIAS:
        return "bias";
    case CUBLASLT_EPILOGUE_GELU_AUX:
        return "gelu_aux";
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
        return "gelu_aux_bias";
    case CUBLASLT_EPILOGUE_DGELU:
        return "dgelu";
    case CUBLASLT_EPILOGUE_DGELU_BGRAD:
        return "dgelu_bgrad";
    default:
        return NULL;
    }
}

// Returns true if a variable of the environment names the epilogue.
bool environment_names(const char* variable, uint32_t epilogue) {
    char list[256], name[64]; // both between commas, so that no name is found in a longer one
    const char* text = getenv(variable);
    snprintf(list, sizeof(list), ",%s,", text ? text : "");
    snprintf(name, sizeof(name), ",%s,", epilogue_name(epilogue));
    return strstr(list, name) != NULL;
}

bool shapes_fit(const Product& p) {
    const long depth_b = p.op.transpose_b ? p.b.cols : p.b.rows;
    for (const Layout* x : {&p.a, &p.b, &p.c, &p.d}) {
        if (x->rows < 1 || x->cols < 1 || x->stride < x->rows) {
            return false;
        }
    }
    const bool same_batch = p.a.batch == p.b.batch && p.a.batch == p.c.batch && p.a.batch == p.d.batch;
    return same_batch && p.a.batch > 0 && p.K == depth_b && p.d.rows == p.M && p.d.cols == p.N && p.c.rows == p.M && p.c.cols == p.N;
}

bool is_fp8(const Product& p) { return p.a.type == CUDA_R_8F_E4M3; }

// Only what rows along the depth have: both factors' columns in memory, of whole 16 bytes.
bool fp8_supported(const Product& p) {
    const bool by_row = p.op.scale_mode_a == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F &&
                        p.op.scale_mode_b == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    const bool plain = p.op.epilogue == CUBLASLT_EPILOGUE_DEFAULT || p.op.epilogue == CUBLASLT_EPILOGUE_BIAS;
    const int bias = p.op.bias_type >= 0 ? p.op.bias_type : (int)p.d.type;
    const bool bias_fits = p.op.epilogue == CUBLASLT_EPILOGUE_DEFAULT || bias != CUDA_R_32F;
    return by_row && plain && bias_fits && p.b.type == CUDA_R_8F_E4M3 && p.c.type == p.d.type && element_bytes(p.d.type) > 1 &&
           p.op.compute == CUBLAS_COMPUTE_32F && p.op.scale == CUDA_R_32F && p.op.transpose_a && !p.op.transpose_b &&
           p.a.batch == 1 && p.M % 16 == 0 && p.K % 16 == 0 && !getenv("CUSIM_LT_REFUSE_FP8");
}

bool types_supported(const Product& p) {
    if (is_fp8(p)) {
        return fp8_supported(p);
    }
    const bool compute = p.op.compute == CUBLAS_COMPUTE_32F ||
                         (p.op.compute == CUBLAS_COMPUTE_32F_FAST_TF32 && p.a.type == CUDA_R_32F);
    return compute && p.op.scale == CUDA_R_32F && element_bytes(p.a.type) && p.a.type == p.b.type &&
           p.c.type == p.d.type && (p.d.type == p.a.type || p.d.type == CUDA_R_32F);
}

cublasStatus_t product_open(Product* p, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a,
                            cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d) {
    p->op = *(Operation*)op, p->a = *(Layout*)a, p->b = *(Layout*)b, p->c = *(Layout*)c, p->d = *(Layout*)d;
    p->M = p->op.transpose_a ? p->a.cols : p->a.rows;
    p->K = p->op.transpose_a ? p->a.rows : p->a.cols;
    p->N = p->op.transpose_b ? p->b.rows : p->b.cols;
    if (!shapes_fit(*p)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    const bool batch_supported = p->a.batch == 1 || p->op.epilogue == CUBLASLT_EPILOGUE_DEFAULT;
    if (!types_supported(*p) || !epilogue_name(p->op.epilogue) || !batch_supported) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    // The auxiliary matrix of GELU: leading dimension a multiple of 8.
    const bool has_aux = epilogue_has(p->op, AUX);
    const bool aux_fits = p->op.aux && p->op.aux_stride >= p->M && p->op.aux_stride % 8 == 0;
    const bool has_gradient = epilogue_has(p->op, CUBLASLT_EPILOGUE_DGELU_BGRAD);
    const bool has_bias = epilogue_has(p->op, CUBLASLT_EPILOGUE_BIAS) || has_gradient;
    if ((has_aux && !aux_fits) || (has_bias && !p->op.bias)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    // The gradient has the type of the result.
    return has_gradient && p->op.bias_type >= 0 && p->op.bias_type != (int)p->d.type
               ? CUBLAS_STATUS_NOT_SUPPORTED
               : CUBLAS_STATUS_SUCCESS;
}

// ---- the matmul ----

typedef float Vec16 __attribute__((vector_size(64), aligned(4)));

// Sets c[n][m] = sum_k a[k][m] b[n][k]; M is a multiple of 16. Computes six columns at a time,
// whose sums stay in registers.
__attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4"),
               optimize("O3", "fp-contract=fast"))) void
multiply(float* c, const float* a, const float* b, long M, long N, long K) {
    for (long m = 0; m < M; m += 16) {
        long n = 0;
        for (; n + 6 <= N; n += 6) {
            Vec16 sum[6] = {};
            for (long k = 0; k < K; k++) {
                const Vec16 factor = *(const Vec16*)(a + k * M + m);
#pragma GCC unroll 6
                for (int i = 0; i < 6; i++) {
                    sum[i] += factor * b[(n + i) * K + k];
                }
            }
            for (int i = 0; i < 6; i++) {
                *(Vec16*)(c + (n + i) * M + m) = sum[i];
            }
        }
        for (; n < N; n++) {
            Vec16 sum = {};
            for (long k = 0; k < K; k++) {
                sum += *(const Vec16*)(a + k * M + m) * b[n * K + k];
            }
            *(Vec16*)(c + n * M + m) = sum;
        }
    }
}

float element(const void* data, const Layout& x, long row, long col, bool tf32) {
    const float value = load(data, (size_t)(col * x.stride + row), x.type);
    return tf32 ? round_tf32(value) : value;
}

struct Packed {
    std::vector<float> a, b, c; // (K, padded), (N, K), (N, padded)
    std::vector<float> sums;    // (M) sums of the rows of the result
    long padded;                // M as a multiple of 16
};

// Packs the factors. Algorithm i starts its sums at a different k.
void pack(Packed* packed, const Product& p, const void* a, const void* b, int algorithm) {
    const bool tf32 = p.op.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    const long first = p.K * algorithm / LT_ALGORITHMS;
    packed->padded = (p.M + 15) / 16 * 16;
    packed->a.assign((size_t)(p.K * packed->padded), 0.0f);
    packed->b.resize((size_t)(p.N * p.K));
    packed->c.resize((size_t)(p.N * packed->padded));
    for (long i = 0; i < p.K; i++) {
        const long k = (first + i) % p.K;
        for (long m = 0; m < p.M; m++) {
            packed->a[i * packed->padded + m] =
                p.op.transpose_a ? element(a, p.a, k, m, tf32) : element(a, p.a, m, k, tf32);
        }
        for (long n = 0; n < p.N; n++) {
            packed->b[n * p.K + i] =
                p.op.transpose_b ? element(b, p.b, n, k, tf32) : element(b, p.b, k, n, tf32);
        }
    }
}

// Returns the value of one element of d, from its alpha op(a) op(b) + beta c.
float epilogue(const Product& p, float x, long m, long n) {
    const Operation& op = p.op;
    const size_t aux = (size_t)(n * op.aux_stride + m);
    const int bias_type = op.bias_type >= 0 ? op.bias_type : p.d.type;
    const int aux_type = op.aux_type >= 0 ? op.aux_type : p.d.type;
    if (epilogue_has(op, CUBLASLT_EPILOGUE_BIAS)) {
        x += load(op.bias, (size_t)m, bias_type);
    }
    if (epilogue_has(op, CUBLASLT_EPILOGUE_GELU_AUX)) {
        store(op.aux, aux, aux_type, x);
        return gelu(x);
    }
    return epilogue_has(op, CUBLASLT_EPILOGUE_DGELU) ? x * gelu_derivative(load(op.aux, aux, aux_type)) : x;
}

// Returns the bytes of a matmul if every matrix is read or written once.
double product_bytes(const Product& p, float beta) {
    const double d_bytes = (double)p.M * p.N * element_bytes(p.d.type);
    // passes over matrices like d
    const double passes = 1 + (beta != 0) + (epilogue_has(p.op, AUX) ? 1 : 0);
    const double factors = (double)p.K * (p.M + p.N) * element_bytes(p.a.type);
    const int has_bias = epilogue_has(p.op, CUBLASLT_EPILOGUE_BIAS) ||
                         epilogue_has(p.op, CUBLASLT_EPILOGUE_DGELU_BGRAD);
    const long bias = has_bias ? p.M : 0;
    return p.d.batch * (factors + passes * d_bytes + (double)bias * element_bytes(p.d.type));
}

// Traces in rows: d^T (N, M) = op(b)^T (N, K) op(a)^T (K, M).
void trace(const Product& p, float beta) {
    trace_line(
        "{\"matmul\":[%ld,%ld,%ld],\"batch\":%d,\"order\":\"%c%c\",\"bits\":[%zu,%zu],\"epilogue\":\"%s\",\"adds\":%d,"
        "\"flop\":%.0f,\"bytes\":%.0f}",
        p.N, p.K, p.M, p.d.batch, p.op.transpose_a ? 't' : 'n', p.op.transpose_b ? 't' : 'n',
        8 * element_bytes(p.a.type), 8 * element_bytes(p.d.type), epilogue_name(p.op.epilogue), beta != 0,
        2.0 * p.d.batch * p.M * p.N * p.K, product_bytes(p, beta));
}

// Runs one matmul of a batch.
void run_one(const Product& p, const void* a, const void* b, const void* c, void* d, float alpha, float beta,
             const Algorithm& algorithm) {
    static Packed packed; // kept between calls: allocating is slow under sanitizers
    pack(&packed, p, a, b, algorithm.number);
    multiply(packed.c.data(), packed.a.data(), packed.b.data(), packed.padded, p.N, p.K);
    packed.sums.assign((size_t)p.M, 0.0f);
    for (long n = 0; n < p.N; n++) {
        for (long m = 0; m < p.M; m++) {
            float x = alpha * packed.c[n * packed.padded + m];
            if (is_fp8(p)) {
                x *= p.op.scale_a[m] * p.op.scale_b[n];
            }
            if (beta != 0) { // else c may hold anything, even NaN
                x += beta * load(c, (size_t)(n * p.c.stride + m), p.c.type);
            }
            x = epilogue(p, x, m, n);
            packed.sums[m] += x;
            store(d, (size_t)(n * p.d.stride + m), p.d.type, x);
        }
    }
    for (long m = 0; m < p.M && epilogue_has(p.op, CUBLASLT_EPILOGUE_DGELU_BGRAD); m++) {
        store(p.op.bias, (size_t)m, p.d.type, packed.sums[m]);
    }
}

// Returns element `i` of matrix number `index` of a batch.
const char* place(const void* data, const Layout& x, int index, size_t i) {
    return (const char*)data + ((size_t)(index * x.batch_stride) + i) * element_bytes(x.type);
}

void run(const Product& p, const void* a, const void* b, const void* c, void* d, float alpha, float beta,
         const Algorithm& algorithm, void* workspace) {
    const int fast = environment_number("CUSIM_LT_FAST"), fast_fp8 = environment_number("CUSIM_LT_FAST_FP8");
    trace(p, beta);
    if (cusim_is_dry()) {
        return;
    }
    cusim_pass_time(LT_PRODUCT_S);
    if ((fast >= 0 && fast != algorithm.number) || environment_names("CUSIM_LT_SLOW", p.op.epilogue) ||
        (fast_fp8 >= 0 && fast_fp8 != (int)is_fp8(p))) {
        cusim_pass_time(LT_SLOW_S);
    }
    if (algorithm.workspace_bytes) {
        memset(workspace, 0xFF, algorithm.workspace_bytes);
    }
    for (int i = 0; i < p.d.batch; i++) {
        run_one(p, place(a, p.a, i, 0), place(b, p.b, i, 0), place(c, p.c, i, 0), (void*)place(d, p.d, i, 0), alpha,
                beta, algorithm);
    }
}

// ---- checks of what cublasLt assumes ----

bool aligned(const void* p, uint32_t bytes) { return (uintptr_t)p % (bytes ? bytes : 1) == 0; }

const char* last_element(const void* data, const Layout& x) {
    return place(data, x, x.batch - 1, (size_t)((x.cols - 1) * x.stride + x.rows - 1));
}

// Ends the program unless the first and the last element are device memory.
void check_extent(const void* data, const Layout& x) {
    cusim_check_kernel_pointer(data, -1, (const void*)&cublasLtMatmul);
    cusim_check_kernel_pointer(last_element(data, x), -1, (const void*)&cublasLtMatmul);
}

// Returns true if two matrices overlap. The result may lie in c, nowhere else.
bool overlap(const void* x, const Layout& layout_x, const void* y, const Layout& layout_y) {
    return (const char*)x <= last_element(y, layout_y) && (const char*)y <= last_element(x, layout_x);
}

// Copies an attribute; an error if its size is wrong.
template <class T> cublasStatus_t set(T* attribute, const void* value, size_t bytes) {
    if (bytes != sizeof(T)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    memcpy((void*)attribute, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

} // namespace

// ---- entry points ----

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    *handle = (cublasLtHandle_t)malloc(8);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
const char* cublasLtGetStatusString(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_INVALID_VALUE:
        return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
        return "cublasLt error";
    }
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* op, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    Operation* created = (Operation*)calloc(1, sizeof(Operation));
    created->compute = compute;
    created->scale = scale;
    created->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    created->bias_type = created->aux_type = -1;
    *op = (cublasLtMatmulDesc_t)created;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t op) {
    free(op);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              size_t bytes) {
    Operation* op = (Operation*)desc;
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
        return set(&op->transpose_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
        return set(&op->transpose_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
        return set(&op->pointer_mode, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        return set(&op->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        return set(&op->bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
        return set(&op->bias_type, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
        return set(&op->aux, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
        return set(&op->aux_stride, value, bytes);
    case CUBLASLT_MATMUL_DESC_A_SCALE_MODE:
        return set(&op->scale_mode_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_B_SCALE_MODE:
        return set(&op->scale_mode_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER:
        return set(&op->scale_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER:
        return set(&op->scale_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE:
        return set(&op->aux_type, value, bytes);
    default:
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                          uint64_t cols, int64_t stride) {
    Layout* created = (Layout*)malloc(sizeof(Layout));
    *created = {type, (long)rows, (long)cols, (long)stride, 1, 0};
    *layout = (cublasLtMatrixLayout_t)created;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    free(layout);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t handle,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                size_t bytes) {
    Layout* layout = (Layout*)handle;
    switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
        return set(&layout->batch, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
        return set(&layout->batch_stride, value, bytes);
    default:
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
    Preference* created = (Preference*)malloc(sizeof(Preference));
    *created = {0, CUBLASLT_REDUCTION_SCHEME_MASK, 256, 256, 256, 256};
    *preference = (cublasLtMatmulPreference_t)created;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    free(preference);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t handle,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
    Preference* preference = (Preference*)handle;
    switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
        return set(&preference->workspace_bytes, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        return set(&preference->reductions, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
        return set(&preference->align_a, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
        return set(&preference->align_b, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
        return set(&preference->align_c, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
        return set(&preference->align_d, value, bytes);
    default:
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t op,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int* found) {
    Product product;
    const Preference& p = *(Preference*)preference;
    const cublasStatus_t status = product_open(&product, op, a, b, c, d);
    *found = 0;
    if (status != CUBLAS_STATUS_SUCCESS || wanted < 1) {
        return status != CUBLAS_STATUS_SUCCESS ? status : CUBLAS_STATUS_INVALID_VALUE;
    }
    if (environment_names("CUSIM_LT_REFUSE", product.op.epilogue)) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    for (; *found < wanted && *found < LT_ALGORITHMS; ++*found) {
        const uint64_t bytes = p.workspace_bytes < LT_WORKSPACE_BYTES ? 0 : LT_WORKSPACE_BYTES;
        const Algorithm algorithm = {*found, p.align_a, p.align_b, p.align_c, p.align_d, 0, bytes};
        memset((void*)&results[*found], 0, sizeof(results[0]));
        memcpy((void*)&results[*found].algo, &algorithm, sizeof(algorithm));
        results[*found].workspaceSize = bytes;
        results[*found].wavesCount = 1;
    }
    return CUBLAS_STATUS_SUCCESS;
}

// The only attribute is the shape of clusters, of the first algorithm.
cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(cublasLtMatmulAlgo_t* algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                    const void* value, size_t bytes) {
    Algorithm algorithm;
    uint16_t shape = 0;
    memcpy(&algorithm, algo, sizeof(algorithm));
    if (attribute != CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID ||
        set(&shape, value, bytes) != CUBLAS_STATUS_SUCCESS || algorithm.number != 0 ||
        (shape != CUBLASLT_CLUSTER_SHAPE_2x1x1 && shape != CUBLASLT_CLUSTER_SHAPE_1x2x1)) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    algorithm.number = LT_ALGORITHMS + (shape == CUBLASLT_CLUSTER_SHAPE_1x2x1);
    memcpy((void*)algo, &algorithm, sizeof(algorithm));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                       cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t* algo,
                                       cublasLtMatmulHeuristicResult_t* result) {
    Product product;
    Algorithm algorithm;
    const cublasStatus_t status = product_open(&product, op, a, b, c, d);
    memcpy(&algorithm, algo, sizeof(algorithm));
    if (status != CUBLAS_STATUS_SUCCESS) {
        return status;
    }
    const bool is_ours = algorithm.number >= 0 && algorithm.number < LT_ALGORITHMS + LT_CLUSTERS &&
                         (!algorithm.workspace_bytes || algorithm.workspace_bytes == LT_WORKSPACE_BYTES);
    if (!is_ours || environment_names("CUSIM_LT_REFUSE", product.op.epilogue)) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    memset((void*)result, 0, sizeof(*result));
    result->algo = *algo;
    result->workspaceSize = algorithm.workspace_bytes;
    result->wavesCount = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t op, const void* alpha_pointer,
                              const void* a, cublasLtMatrixLayout_t layout_a, const void* b,
                              cublasLtMatrixLayout_t layout_b, const void* beta_pointer, const void* c,
                              cublasLtMatrixLayout_t layout_c, void* d, cublasLtMatrixLayout_t layout_d,
                              const cublasLtMatmulAlgo_t* algo, void* workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
    Product p;
    Algorithm algorithm = {};
    const cublasStatus_t status = product_open(&p, op, layout_a, layout_b, layout_c, layout_d);
    if (status != CUBLAS_STATUS_SUCCESS) {
        return status;
    }
    if (algo) {
        memcpy(&algorithm, algo, sizeof(algorithm));
    }
    if (p.op.pointer_mode != CUBLASLT_POINTER_MODE_HOST ||
        algorithm.number == environment_number("CUSIM_LT_BROKEN")) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    const float alpha = *(const float*)alpha_pointer, beta = *(const float*)beta_pointer;
    if (!aligned(a, algorithm.align_a) || !aligned(b, algorithm.align_b) || !aligned(d, algorithm.align_d) ||
        (beta != 0 && !aligned(c, algorithm.align_c)) || workspace_bytes < algorithm.workspace_bytes) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    check_extent(a, p.a);
    check_extent(b, p.b);
    check_extent(d, p.d);
    if (beta != 0) {
        check_extent(c, p.c);
    }
    if (overlap(d, p.d, a, p.a) || overlap(d, p.d, b, p.b)) {
        cusim_die("cublasLtMatmul: the result lies in a factor");
    }
    if (is_fp8(p)) {
        check_extent(p.op.scale_a, {CUDA_R_32F, p.M, 1, p.M, 1, 0});
        check_extent(p.op.scale_b, {CUDA_R_32F, p.N, 1, p.N, 1, 0});
    }
    if (epilogue_has(p.op, AUX)) {
        check_extent(p.op.aux, {p.d.type, p.M, p.N, (long)p.op.aux_stride, 1, 0});
    }
    if (epilogue_has(p.op, CUBLASLT_EPILOGUE_BIAS) || epilogue_has(p.op, CUBLASLT_EPILOGUE_DGELU_BGRAD)) {
        check_extent(p.op.bias, {p.d.type, p.M, 1, p.M, 1, 0});
    }
    if (algorithm.workspace_bytes) {
        check_extent(workspace,
                     {CUDA_R_32F, (long)algorithm.workspace_bytes / 4, 1, (long)algorithm.workspace_bytes, 1, 0});
    }
    cusim_enqueue(stream, true, [=] { run(p, a, b, c, d, alpha, beta, algorithm, workspace); });
    return CUBLAS_STATUS_SUCCESS;
}

} // extern "C"
