// cusim_lt.cpp - the cuBLASLt entry points a GPT trainer uses, on the CPU device. Column-major only.
// Refuses what real cuBLASLt refuses where that is documented (alignment, epilogue/aux rules).
#include <cusim.h>
#include <cublasLt.h>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <vector>
void cusim_enqueue(cudaStream_t st, bool dev, std::function<void()> fn);
namespace {
struct Lay { cudaDataType_t type; int64_t rows, cols, ld; int32_t batch = 1, order = CUBLASLT_ORDER_COL; int64_t stride = 0; };
struct Desc {
    cublasComputeType_t comp; cudaDataType_t scale; int32_t ta = 0, tb = 0, pm = 0; uint32_t epi = CUBLASLT_EPILOGUE_DEFAULT;
    const void* bias = nullptr; void* aux = nullptr; int64_t aux_ld = 0; int32_t bias_t = -1, aux_t = -1; const float *as = nullptr, *bs = nullptr; int8_t fast = 0; int32_t sm = 0;
};
Lay* L(cublasLtMatrixLayout_t x) { return *(Lay**)x; }
Desc* D(cublasLtMatmulDesc_t x) { return *(Desc**)x; }
size_t esz(int t) { switch (t) { case CUDA_R_32F: return 4; case CUDA_R_16BF: case CUDA_R_16F: return 2; case CUDA_R_8F_E4M3: case CUDA_R_8F_E5M2: return 1; default: return 0; } }
float ld(const void* p, size_t i, int t) {
    switch (t) { case CUDA_R_32F: return ((const float*)p)[i]; case CUDA_R_16BF: return __bfloat162float(((const __nv_bfloat16*)p)[i]); default: return __half2float(((const __half*)p)[i]); }
}
void stv(void* p, size_t i, int t, float v) {
    switch (t) { case CUDA_R_32F: ((float*)p)[i] = v; break; case CUDA_R_16BF: ((__nv_bfloat16*)p)[i] = __float2bfloat16_rn(v); break; default: ((__half*)p)[i] = __float2half_rn(v); }
}
typedef float v16 __attribute__((vector_size(64), aligned(4)));
// C[n][m] = sum_k A[k][m] * B[n][k];  Mp multiple of 16
__attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4"), optimize("O3", "fp-contract=fast")))
void gemm(float* c, const float* a, const float* b, long Mp, long N, long K) {
    for (long m = 0; m < Mp; m += 16) {
        long n = 0;
        for (; n + 6 <= N; n += 6) {
            v16 x0{}, x1{}, x2{}, x3{}, x4{}, x5{}; const float* bp = b + n * K;
            for (long k = 0; k < K; k++) { v16 av = *(const v16*)(a + k * Mp + m); x0 += av * bp[k]; x1 += av * bp[K + k]; x2 += av * bp[2 * K + k]; x3 += av * bp[3 * K + k]; x4 += av * bp[4 * K + k]; x5 += av * bp[5 * K + k]; }
            *(v16*)(c + (n + 0) * Mp + m) = x0; *(v16*)(c + (n + 1) * Mp + m) = x1; *(v16*)(c + (n + 2) * Mp + m) = x2;
            *(v16*)(c + (n + 3) * Mp + m) = x3; *(v16*)(c + (n + 4) * Mp + m) = x4; *(v16*)(c + (n + 5) * Mp + m) = x5;
        }
        for (; n < N; n++) { v16 x{}; for (long k = 0; k < K; k++) x += *(const v16*)(a + k * Mp + m) * b[n * K + k]; *(v16*)(c + n * Mp + m) = x; }
    }
}
float gelu(float x) { return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))); }
float dgelu(float x) { float c = 0.7978845608f, t = tanhf(c * (x + 0.044715f * x * x * x)); return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * c * (1 + 3 * 0.044715f * x * x); }
cublasStatus_t check(const Desc& d, const Lay& a, const Lay& b, const Lay& c, const Lay& o, long& M, long& N, long& K) {
    M = d.ta ? a.cols : a.rows; K = d.ta ? a.rows : a.cols; N = d.tb ? b.rows : b.cols; long K2 = d.tb ? b.cols : b.rows;
    if (K != K2 || o.rows != M || o.cols != N || c.rows != M || c.cols != N) return CUBLAS_STATUS_INVALID_VALUE;
    if (a.ld < a.rows || b.ld < b.rows || c.ld < c.rows || o.ld < o.rows) return CUBLAS_STATUS_INVALID_VALUE;
    for (const Lay* l : {&a, &b, &c, &o}) { if (l->order != CUBLASLT_ORDER_COL || !esz(l->type) || esz(l->type) == 1) return CUBLAS_STATUS_NOT_SUPPORTED; if (l->batch != o.batch) return CUBLAS_STATUS_INVALID_VALUE; }
    if (a.type != b.type || c.type != o.type || d.scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (a.type == CUDA_R_32F && o.type != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    unsigned e = d.epi;
    if (e & (CUBLASLT_EPILOGUE_RELU | 8)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if ((e & 128) && (!d.aux_ld || d.aux_ld % 8 || d.aux_ld < M)) return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}
}  // namespace
extern "C" {
cublasStatus_t cublasLtCreate(cublasLtHandle_t* h) { *h = (cublasLtHandle_t)malloc(8); return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t h) { free(h); return CUBLAS_STATUS_SUCCESS; }
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
const char* cublasLtGetStatusString(cublasStatus_t s) { return s ? "cublasLt error" : "success"; }
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t c, cudaDataType_t s) { Desc** p = (Desc**)malloc(sizeof *p); *p = new Desc; (*p)->comp = c; (*p)->scale = s; *d = (cublasLtMatmulDesc_t)p; return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { delete D(d); free(d); return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a, const void* v, size_t n) {
    Desc& x = *D(d);
#define AT(id, f) case id: if (n != sizeof x.f) return CUBLAS_STATUS_INVALID_VALUE; memcpy((void*)&x.f, v, n); return CUBLAS_STATUS_SUCCESS
    switch (a) {
        AT(CUBLASLT_MATMUL_DESC_TRANSA, ta); AT(CUBLASLT_MATMUL_DESC_TRANSB, tb); AT(CUBLASLT_MATMUL_DESC_POINTER_MODE, pm); AT(CUBLASLT_MATMUL_DESC_EPILOGUE, epi);
        AT(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias); AT(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, bias_t); AT(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux); AT(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, aux_ld);
        AT(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, aux_t); AT(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, as); AT(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, bs); AT(CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast); AT(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, sm);
    default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* l, cudaDataType t, uint64_t r, uint64_t c, int64_t ldm) { Lay** p = (Lay**)malloc(sizeof *p); *p = new Lay; **p = {t, (int64_t)r, (int64_t)c, ldm}; *l = (cublasLtMatrixLayout_t)p; return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { delete L(l); free(l); return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t a, const void* v, size_t n) {
    Lay& x = *L(l);
    switch (a) { AT(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, batch); AT(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride); AT(CUBLASLT_MATRIX_LAYOUT_ORDER, order); AT(CUBLASLT_MATRIX_LAYOUT_LD, ld); default: return CUBLAS_STATUS_NOT_SUPPORTED; }
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) { *p = (cublasLtMatmulPreference_t)calloc(1, 64); return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) { free(p); return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void*, size_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t o, cublasLtMatmulPreference_t, int n, cublasLtMatmulHeuristicResult_t r[], int* got) {
    long M, N, K; cublasStatus_t s = check(*D(d), *L(a), *L(b), *L(c), *L(o), M, N, K);
    *got = 0; if (s) return s; if (n < 1) return CUBLAS_STATUS_INVALID_VALUE;
    memset(r, 0, sizeof *r); r->state = CUBLAS_STATUS_SUCCESS; r->wavesCount = 1; *got = 1; return s;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t dd, const void* al, const void* A, cublasLtMatrixLayout_t la, const void* B, cublasLtMatrixLayout_t lb, const void* be, const void* Cm, cublasLtMatrixLayout_t lc, void* Dm, cublasLtMatrixLayout_t lo, const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream) {
    Desc d = *D(dd); Lay a = *L(la), b = *L(lb), c = *L(lc), o = *L(lo); long M, N, K;
    cublasStatus_t s = check(d, a, b, c, o, M, N, K); if (s) return s;
    if (d.pm != CUBLASLT_POINTER_MODE_HOST) return CUBLAS_STATUS_NOT_SUPPORTED;
    float alpha = *(const float*)al, beta = *(const float*)be;
    if (((uintptr_t)A % esz(a.type)) || ((uintptr_t)B % esz(b.type)) || ((uintptr_t)Dm % esz(o.type))) return CUBLAS_STATUS_INVALID_VALUE;
    for (const void* p : {A, B, (const void*)Dm}) cusim_check_kernel_pointer(p, -1, (const void*)&cublasLtMatmul);
    cusim_enqueue(stream, true, [=] {
        long Mp = (M + 15) & ~15l; static std::vector<float> fa, fb, fc;      // single-threaded runtime
        fa.resize((size_t)(K * Mp)); fb.resize((size_t)(N * K)); fc.resize((size_t)(N * Mp));
        for (int z = 0; z < o.batch; z++) {
            size_t oa = (size_t)z * a.stride, ob = (size_t)z * b.stride, oc = (size_t)z * c.stride, od = (size_t)z * o.stride;
            for (long k = 0; k < K; k++) { for (long m = 0; m < M; m++) fa[k * Mp + m] = ld(A, oa + (size_t)(d.ta ? m * a.ld + k : k * a.ld + m), a.type); for (long m = M; m < Mp; m++) fa[k * Mp + m] = 0; }
            for (long n = 0; n < N; n++) for (long k = 0; k < K; k++) fb[n * K + k] = ld(B, ob + (size_t)(d.tb ? k * b.ld + n : n * b.ld + k), b.type);
            gemm(fc.data(), fa.data(), fb.data(), Mp, N, K);
            unsigned e = d.epi; int bt = d.bias_t >= 0 ? d.bias_t : o.type, at = d.aux_t >= 0 ? d.aux_t : o.type;
            std::vector<double> bg; if ((e & 16)) bg.assign((size_t)M, 0.0);
            for (long n = 0; n < N; n++) for (long m = 0; m < M; m++) {
                float v = alpha * fc[n * Mp + m]; if (beta != 0) v += beta * ld(Cm, oc + (size_t)(n * c.ld + m), c.type);
                if (e & CUBLASLT_EPILOGUE_BIAS) v += ld(d.bias, (size_t)m, bt);
                if (e & 32) { if (e & 128) stv(d.aux, (size_t)(n * d.aux_ld + m), at, v); v = gelu(v); }
                else if (e & 64) v *= dgelu(ld(d.aux, (size_t)(n * d.aux_ld + m), at));
                if (e & 16) bg[(size_t)m] += v;
                stv(Dm, od + (size_t)(n * o.ld + m), o.type, v);
            }
            if (e & 16) for (long m = 0; m < M; m++) stv((void*)d.bias, (size_t)m, bt, (float)bg[(size_t)m]);
            if (e & CUBLASLT_EPILOGUE_BGRADA) for (long m = 0; m < M; m++) { float t = 0; for (long k = 0; k < K; k++) t += fa[k * Mp + m]; stv((void*)d.bias, (size_t)m, bt, t); }
            if (e & CUBLASLT_EPILOGUE_BGRADB) for (long n = 0; n < N; n++) { float t = 0; for (long k = 0; k < K; k++) t += fb[n * K + k]; stv((void*)d.bias, (size_t)n, bt, t); }
        }
    });
    return CUBLAS_STATUS_SUCCESS;
}
}
