// cusim.h - CPU "device" for CUDA C++ sources compiled by plain g++/clang++ (test only).
// Types and prototypes come from the real CUDA headers; this file adds what those headers
// declare only under __CUDACC__ (built-in variables, warp/block primitives, intrinsics, launch).
#pragma once
// the real header's launch template is type-erased (void** args): hide it, define a typed one below
#define cudaLaunchKernelEx cusim_hidden_cudaLaunchKernelEx
#include_next <cuda_runtime.h>
#undef cudaLaunchKernelEx
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#define CUSIM 1
#ifdef CUSIM_OMP                       // blocks run in parallel on OS threads
#define CUSIM_TLS thread_local
#else
#define CUSIM_TLS
#endif
#ifndef __launch_bounds__
#define __launch_bounds__(...)
#endif
#undef __shared__
#ifdef CUSIM_OMP
#define __shared__ static thread_local
#else
#define __shared__ static            // ASan gives it red zones; see SMEM_ARRAY for the full treatment
#endif
#undef __constant__
#define __constant__
#define __nanosleep(ns) cusim_yield()

// ---- shared-memory declarations usable with nvcc and here ---------------------------------
// each array gets its own red-zoned, garbage-filled allocation per block
#define SMEM_ARRAY(T, name, ...) \
    auto& name = *(T(*) __VA_ARGS__)cusim_smem_static([] { static char k; return (void*)&k; }(), sizeof(T __VA_ARGS__))
#define SMEM_DYNAMIC(T, name) T* name = (T*)cusim_smem_dynamic()

#define CUSIM_LOC const char *cusim_f = __builtin_FILE(), int cusim_l = __builtin_LINE()
#define CUSIM_L cusim_f, cusim_l

enum { warpSize = 32 };
extern CUSIM_TLS uint3 threadIdx, blockIdx;
extern CUSIM_TLS dim3 blockDim, gridDim;

extern "C" {
void cusim_syncthreads(int kind, int pred, int* out, const char* f, int l);
void cusim_bar_sync(int id, int n, const char* f, int l);
void cusim_bar_arrive(int id, int n, const char* f, int l);
// every lane of `mask` deposits n<=16 bytes; on return all[lane] (stride 16) holds the values
const unsigned char* cusim_warp_exchange(int op, unsigned mask, const void* v, unsigned n, const char* f, int l);
void cusim_grid_sync(const char* f, int l);
void cusim_yield(void);
unsigned cusim_lane(void);
unsigned cusim_activemask(void);
void* cusim_smem_dynamic(void);
unsigned cusim_smem_dynamic_size(void);
void* cusim_smem_static(void* key, size_t size);
void cusim_die(const char* fmt, ...) __attribute__((noreturn, format(printf, 1, 2)));
void cusim_check_kernel_pointer(const void* p, int argno, const void* fn);
cudaError_t cusim_launch(const cudaLaunchConfig_t* c, const void* fn, std::function<void()>* thunk);
void cusim_cp_async(void* dst, const void* src, int bytes, int src_bytes);
void cusim_cp_async_commit(void);
void cusim_cp_async_wait(int keep);
void cusim_defer(void (*fn)(void*, uint64_t, uint64_t), void* d, uint64_t a, uint64_t b);
void cusim_defer_commit(void);
void cusim_defer_wait(int keep);
void cusim_mbar_init(uint64_t* b, unsigned count);
void cusim_mbar_arrive(uint64_t* b, unsigned tx, const char* f, int l);
void cusim_mbar_wait(uint64_t* b, unsigned parity, const char* f, int l);
void cusim_bulk_g2s(void* dst, const void* src, unsigned bytes, uint64_t* bar);
}

// ---- block ---------------------------------------------------------------------------------
inline void __syncthreads(CUSIM_LOC) { cusim_syncthreads(0, 0, nullptr, CUSIM_L); }
inline int __syncthreads_count(int p, CUSIM_LOC) { int r; cusim_syncthreads(1, p, &r, CUSIM_L); return r; }
inline int __syncthreads_or(int p, CUSIM_LOC) { int r; cusim_syncthreads(2, p, &r, CUSIM_L); return r; }
inline int __syncthreads_and(int p, CUSIM_LOC) { int r; cusim_syncthreads(3, p, &r, CUSIM_L); return r; }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() {}
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// ---- warp ----------------------------------------------------------------------------------
enum { CUSIM_SHFL = 1, CUSIM_UP, CUSIM_DOWN, CUSIM_XOR, CUSIM_VOTE, CUSIM_SYNCWARP, CUSIM_MATCH, CUSIM_REDUCE, CUSIM_MMA, CUSIM_LDM };
inline void __syncwarp(unsigned m = 0xffffffffu, CUSIM_LOC) { cusim_warp_exchange(CUSIM_SYNCWARP, m, nullptr, 0, CUSIM_L); }
inline unsigned __activemask() { return cusim_activemask(); }
template <class T>
inline T cusim_shfl(int op, unsigned mask, T v, int a, int width, const char* f, int l) {
    static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= 16, "shuffle type");
    const unsigned char* all = cusim_warp_exchange(op, mask, &v, sizeof(T), f, l);
    int lane = (int)cusim_lane(), seg = lane & ~(width - 1), idx = lane & (width - 1), src;
    switch (op) {
    case CUSIM_SHFL: src = seg + (a & (width - 1)); break;
    case CUSIM_UP: src = idx - a < 0 ? lane : lane - a; break;
    case CUSIM_DOWN: src = idx + a >= width ? lane : lane + a; break;
    default: src = (idx ^ a) >= width ? lane : seg + (idx ^ a); break;
    }
    if (src < 0 || src > 31 || !(mask >> src & 1)) cusim_die("%s:%d: shuffle reads lane %d outside mask %08x", f, l, src, mask);
    T r; __builtin_memcpy(&r, all + 16 * src, sizeof(T));
    return r;
}
template <class T> inline T __shfl_sync(unsigned m, T v, int s, int w = 32, CUSIM_LOC) { return cusim_shfl(CUSIM_SHFL, m, v, s, w, CUSIM_L); }
template <class T> inline T __shfl_up_sync(unsigned m, T v, unsigned d, int w = 32, CUSIM_LOC) { return cusim_shfl(CUSIM_UP, m, v, (int)d, w, CUSIM_L); }
template <class T> inline T __shfl_down_sync(unsigned m, T v, unsigned d, int w = 32, CUSIM_LOC) { return cusim_shfl(CUSIM_DOWN, m, v, (int)d, w, CUSIM_L); }
template <class T> inline T __shfl_xor_sync(unsigned m, T v, int x, int w = 32, CUSIM_LOC) { return cusim_shfl(CUSIM_XOR, m, v, x, w, CUSIM_L); }
inline unsigned __ballot_sync(unsigned m, int p, CUSIM_LOC) {
    unsigned char b = p != 0; const unsigned char* all = cusim_warp_exchange(CUSIM_VOTE, m, &b, 1, CUSIM_L);
    unsigned r = 0; for (int i = 0; i < 32; i++) if (m >> i & 1) r |= (unsigned)all[16 * i] << i;
    return r;
}
inline int __any_sync(unsigned m, int p, CUSIM_LOC) { return __ballot_sync(m, p, CUSIM_L) != 0; }
inline int __all_sync(unsigned m, int p, CUSIM_LOC) { return __ballot_sync(m, p, CUSIM_L) == m; }
template <class T, class F> inline T cusim_reduce(unsigned m, T v, F fn, CUSIM_LOC) {
    const unsigned char* all = cusim_warp_exchange(CUSIM_REDUCE, m, &v, sizeof(T), CUSIM_L);
    T r{}; bool first = true;
    for (int i = 0; i < 32; i++) if (m >> i & 1) { T x; __builtin_memcpy(&x, all + 16 * i, sizeof(T)); r = first ? x : fn(r, x); first = false; }
    return r;
}
inline unsigned __reduce_add_sync(unsigned m, unsigned v, CUSIM_LOC) { return cusim_reduce(m, v, [](unsigned a, unsigned b) { return a + b; }, CUSIM_L); }
inline int __reduce_max_sync(unsigned m, int v, CUSIM_LOC) { return cusim_reduce(m, v, [](int a, int b) { return a > b ? a : b; }, CUSIM_L); }

// ---- memory --------------------------------------------------------------------------------
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T __ldca(const T* p) { return *p; }
template <class T> inline void __stcs(T* p, T v) { *p = v; }
template <class T> inline void __stcg(T* p, T v) { *p = v; }
template <class T> inline void __stwt(T* p, T v) { *p = v; }

template <class T, class F> inline T cusim_rmw(T* p, F fn) {
    using U = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
    static_assert(sizeof(U) == sizeof(T), "atomic size");
    U* q = (U*)p; U o = __atomic_load_n(q, __ATOMIC_RELAXED), n;
    T ov;
    do { __builtin_memcpy((void*)&ov, &o, sizeof(T)); T nv = fn(ov); __builtin_memcpy(&n, &nv, sizeof(T)); }
    while (!__atomic_compare_exchange_n(q, &o, n, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return ov;
}
inline int atomicAdd(int* p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline unsigned atomicAdd(unsigned* p, unsigned v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline float atomicAdd(float* p, float v) { return cusim_rmw(p, [v](float o) { return o + v; }); }
inline double atomicAdd(double* p, double v) { return cusim_rmw(p, [v](double o) { return o + v; }); }
inline __nv_bfloat16 atomicAdd(__nv_bfloat16* p, __nv_bfloat16 v) { return cusim_rmw(p, [v](__nv_bfloat16 o) { return o + v; }); }
inline __nv_bfloat162 atomicAdd(__nv_bfloat162* p, __nv_bfloat162 v) { return cusim_rmw(p, [v](__nv_bfloat162 o) { return o + v; }); }
inline __half atomicAdd(__half* p, __half v) { return cusim_rmw(p, [v](__half o) { return o + v; }); }
template <class T> inline T atomicExch(T* p, T v) { return cusim_rmw(p, [v](T) { return v; }); }
template <class T> inline T atomicMax(T* p, T v) { return cusim_rmw(p, [v](T o) { return o > v ? o : v; }); }
template <class T> inline T atomicMin(T* p, T v) { return cusim_rmw(p, [v](T o) { return o < v ? o : v; }); }
template <class T> inline T atomicCAS(T* p, T c, T v) { return cusim_rmw(p, [c, v](T o) { return o == c ? v : o; }); }

// ---- math intrinsics missing on the host side ----------------------------------------------
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float x) { return x < 0 ? 0 : x > 1 ? 1 : x; }
template <class D, class S> inline D cusim_bits(S s) { static_assert(sizeof(D) == sizeof(S), ""); D d; __builtin_memcpy((void*)&d, &s, sizeof d); return d; }
inline unsigned __float_as_uint(float x) { return cusim_bits<unsigned>(x); }
inline int __float_as_int(float x) { return cusim_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return cusim_bits<float>(x); }
inline float __int_as_float(int x) { return cusim_bits<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) { return __float2bfloat16(fmaf(__bfloat162float(a), __bfloat162float(b), __bfloat162float(c))); }
inline __half __hfma(__half a, __half b, __half c) { return __float2half(fmaf(__half2float(a), __half2float(b), __half2float(c))); }
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) { return __halves2bfloat162(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)); }
#define CUSIM_MM(T) inline T min(T a, T b) { return b < a ? b : a; } inline T max(T a, T b) { return a < b ? b : a; }
CUSIM_MM(int) CUSIM_MM(unsigned) CUSIM_MM(long) CUSIM_MM(unsigned long) CUSIM_MM(long long) CUSIM_MM(unsigned long long) CUSIM_MM(float) CUSIM_MM(double)
#undef CUSIM_MM
inline long long clock64() { return (long long)__builtin_ia32_rdtsc(); }

// ---- launch: same template signatures as the real cuda_runtime.h gives to nvcc -------------
template <class T> inline void cusim_check_arg(const T& v, int i, const void* fn) {
    if constexpr (std::is_pointer<T>::value && !std::is_function<std::remove_pointer_t<T>>::value)
        cusim_check_kernel_pointer((const void*)v, i, fn);
}
template <typename... P, typename... A>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* c, void (*k)(P...), A&&... a) {
    static_assert(sizeof...(P) == sizeof...(A), "kernel argument count");
    std::tuple<std::decay_t<P>...> args(std::forward<A>(a)...);
    int i = 0;
    std::apply([&](auto&... v) { (cusim_check_arg(v, i++, (const void*)k), ...); (void)i; }, args);
    std::function<void()> thunk = [k, args]() { std::apply(k, args); };
    return cusim_launch(c, (const void*)k, &thunk);
}
template <class T> inline cudaError_t cudaFuncSetAttribute(T* k, cudaFuncAttribute at, int v) { return ::cudaFuncSetAttribute((const void*)k, at, v); }
// target of the optional <<<>>> rewriting step (tools/cu2cpp.pl)
template <class K> struct CusimLaunch {
    K k; cudaLaunchConfig_t c{};
    CusimLaunch(K kk, dim3 g, dim3 b, size_t s = 0, cudaStream_t st = 0) : k(kk) { c.gridDim = g; c.blockDim = b; c.dynamicSmemBytes = s; c.stream = st; }
    template <class... A> void operator()(A&&... a) { cudaLaunchKernelEx(&c, k, std::forward<A>(a)...); }
};
#define CUSIM_KLAUNCH(k, ...) CusimLaunch<decltype(&k)>(&k, __VA_ARGS__)
struct cusim_kl {
    cudaLaunchConfig_t c{};
    cusim_kl(dim3 g, dim3 b, size_t s = 0, cudaStream_t st = 0) { c.gridDim = g; c.blockDim = b; c.dynamicSmemBytes = s; c.stream = st; }
    template <class F, class... A> void operator()(F f, A... a) {
        int i = 0; (cusim_check_arg(a, i++, nullptr), ...); (void)i;
        std::function<void()> t = [f, args = std::make_tuple(a...)]() { std::apply(f, args); };
        cusim_launch(&c, nullptr, &t);
    }
};
