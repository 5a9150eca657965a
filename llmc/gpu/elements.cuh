/*
elements.cuh -- loads and stores W elements of an array at a time.
*/
#ifndef LLMC_ELEMENTS_CUH
#define LLMC_ELEMENTS_CUH

#include <stddef.h>

#include "llmc/gpu/gpu.cuh"

template <size_t BYTES> struct Word_;
template <> struct Word_<1> { typedef unsigned char Type; };
template <> struct Word_<2> { typedef unsigned short Type; };
template <> struct Word_<4> { typedef int Type; };
template <> struct Word_<8> { typedef int2 Type; };
template <> struct Word_<16> { typedef int4 Type; };

// Elements in registers, and the type of one access to them.
template <class X, int W> struct alignas(W * sizeof(X)) Elements {
    X element[W];
    typedef typename Word_<W * sizeof(X)>::Type Word;
    __device__ X& operator[](int i) { return element[i]; }
    __device__ const X& operator[](int i) const { return element[i]; }
};

// Loads elements; the address is a multiple of their size. Bypasses the caches: the data passes
// once per step.
template <int W, class X> __device__ inline Elements<X, W> elements_load(const X* from) {
    typedef typename Elements<X, W>::Word Word;
    Elements<X, W> elements;
    *reinterpret_cast<Word*>(&elements) = __ldcs(reinterpret_cast<const Word*>(from));
    return elements;
}

// Load and store elements that the caches may keep.
template <int W, class X> __device__ inline Elements<X, W> elements_load_kept(const X* from) {
    typedef typename Elements<X, W>::Word Word;
    Elements<X, W> elements;
    *reinterpret_cast<Word*>(&elements) = *reinterpret_cast<const Word*>(from);
    return elements;
}
template <class X, int W> __device__ inline void elements_store_kept(X* to, const Elements<X, W>& elements) {
    typedef typename Elements<X, W>::Word Word;
    *reinterpret_cast<Word*>(to) = *reinterpret_cast<const Word*>(&elements);
}

template <class X, int W> __device__ inline void elements_store(X* to, const Elements<X, W>& elements) {
    typedef typename Elements<X, W>::Word Word;
    __stcs(reinterpret_cast<Word*>(to), *reinterpret_cast<const Word*>(&elements));
}

// Converts elements to fp32.
template <class X, int W> __device__ inline void elements_unpack(float* to, const Elements<X, W>& from) {
    if constexpr (sizeof(from) == 16) {
        unpack<X>(to, *reinterpret_cast<const int4*>(&from)); // word by word
    } else {
#pragma unroll
        for (int k = 0; k < W; k++) {
            to[k] = to_float(from[k]);
        }
    }
}

template <class To, class From, int W>
__device__ inline Elements<To, W> elements_convert(const Elements<From, W>& from) {
    Elements<To, W> to;
#pragma unroll
    for (int k = 0; k < W; k++) {
        to[k] = from_float<To>(to_float(from[k]));
    }
    return to;
}

// Load and store WIDTH adjacent elements, one or a whole number of packs, as floats.
template <int WIDTH, class X> __device__ inline void load_floats(float* to, const X* from) {
    if constexpr (WIDTH == 1) {
        to[0] = to_float(from[0]);
    } else {
        constexpr int SIZE = Pack<X>::SIZE; // WIDTH, or half of it for fp32
#pragma unroll
        for (int first = 0; first < WIDTH; first += SIZE) {
            const Pack<X> pack = load_pack(from + first);
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                to[first + i] = to_float(pack[i]);
            }
        }
    }
}

template <int WIDTH, class X> __device__ inline void store_floats(X* to, const float* from) {
    if constexpr (WIDTH == 1) {
        to[0] = from_float<X>(from[0]);
    } else {
        constexpr int SIZE = Pack<X>::SIZE;
#pragma unroll
        for (int first = 0; first < WIDTH; first += SIZE) {
            Pack<X> pack;
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                pack[i] = from_float<X>(from[first + i]);
            }
            store_pack(to + first, pack);
        }
    }
}

#endif
