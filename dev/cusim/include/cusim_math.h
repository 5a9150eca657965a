/*
cusim_math.h -- intrinsics that the toolkit declares only under nvcc. Fast approximations (__expf
and others) are exact here: a test must not depend on their last bits.
*/
#ifndef CUSIM_MATH_H
#define CUSIM_MATH_H

// ---- fp32 ----

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __fdividef(float a, float b) { return a / b; }
// 0 for NaN, as on the device
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return (float)(1.0 / sqrt((double)x)); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline int __float2int_rn(float x) { return (int)rintf(x); }
inline int __float2int_rz(float x) { return (int)x; }
inline int __float2int_rd(float x) { return (int)floorf(x); }
inline unsigned __float2uint_rn(float x) { return (unsigned)rintf(x); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }

// ---- bits and integers ----

template <class To, class From> inline To cusim_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "sizes");
    To to;
    __builtin_memcpy((void*)&to, &from, sizeof(to));
    return to;
}
inline unsigned __float_as_uint(float x) { return cusim_bits<unsigned>(x); }
inline int __float_as_int(float x) { return cusim_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return cusim_bits<float>(x); }
inline float __int_as_float(int x) { return cusim_bits<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((unsigned long long)high << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}
// Returns bytes of high:low: byte i is byte (selector >> 4i) & 7.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)high << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    }
    return result;
}

#define CUSIM_MIN_MAX(T)                                                                                     \
    inline T min(T a, T b) { return b < a ? b : a; }                                                         \
    inline T max(T a, T b) { return a < b ? b : a; }
CUSIM_MIN_MAX(int)
CUSIM_MIN_MAX(unsigned)
CUSIM_MIN_MAX(long)
CUSIM_MIN_MAX(unsigned long)
CUSIM_MIN_MAX(long long)
CUSIM_MIN_MAX(unsigned long long)
CUSIM_MIN_MAX(float)
CUSIM_MIN_MAX(double)
#undef CUSIM_MIN_MAX

inline long long clock64() { return (long long)__builtin_ia32_rdtsc(); }

// ---- 16-bit floating point ----

// The toolkit's headers have __hadd, __hmul, __hmax and conversions for the host, too.

inline __half __hfma(__half a, __half b, __half c) {
    return __float2half(fmaf(__half2float(a), __half2float(b), __half2float(c)));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return __halves2half2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
    return __float2bfloat16(fmaf(__bfloat162float(a), __bfloat162float(b), __bfloat162float(c)));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    return __halves2bfloat162(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}

#endif
