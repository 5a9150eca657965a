/*
cusim_warp.h -- the primitives of blocks and warps. Those that take CUSIM_LOC tell the runtime where
they are called, so that threads which meet at different places are reported.
*/
#ifndef CUSIM_WARP_H
#define CUSIM_WARP_H

// ---- blocks ----

inline void __syncthreads(CUSIM_LOC) { cusim_syncthreads(CUSIM_BARRIER_PLAIN, 0, nullptr, CUSIM_L); }

inline int cusim_syncthreads_result(int kind, int predicate, const char* file, int line) {
    int result;
    cusim_syncthreads(kind, predicate, &result, file, line);
    return result;
}
inline int __syncthreads_count(int p, CUSIM_LOC) {
    return cusim_syncthreads_result(CUSIM_BARRIER_COUNT, p, CUSIM_L);
}
inline int __syncthreads_or(int p, CUSIM_LOC) {
    return cusim_syncthreads_result(CUSIM_BARRIER_OR, p, CUSIM_L);
}
inline int __syncthreads_and(int p, CUSIM_LOC) {
    return cusim_syncthreads_result(CUSIM_BARRIER_AND, p, CUSIM_L);
}

inline void __threadfence() { cusim_fence(CUSIM_FENCE_DEVICE); }
inline void __threadfence_block() { cusim_fence(CUSIM_FENCE_BLOCK); }
inline void __threadfence_system() { cusim_fence(CUSIM_FENCE_DEVICE); }

inline void __nanosleep(unsigned) { cusim_yield(); }
inline void __trap(CUSIM_LOC) { cusim_die("%s:%d: __trap()", CUSIM_L); }

// ---- warps ----

inline void __syncwarp(unsigned mask = 0xffffffffu, CUSIM_LOC) {
    cusim_warp_exchange(CUSIM_SYNCWARP, mask, nullptr, 0, CUSIM_L);
}
inline unsigned __activemask() { return cusim_activemask(); }

// Returns the lane that `lane` reads from, by the rules of the PTX instruction shfl: segments of
// `width` lanes; a lane whose source lies outside its segment reads itself.
inline int cusim_shfl_source(int op, int lane, int operand, int width) {
    const int segment = lane & ~(width - 1), index = lane & (width - 1);
    switch (op) {
    case CUSIM_SHFL:
        return segment + (operand & (width - 1));
    case CUSIM_UP:
        return index - operand < 0 ? lane : lane - operand;
    case CUSIM_DOWN:
        return index + operand >= width ? lane : lane + operand;
    default:
        return (index ^ operand) >= width ? lane : segment + (index ^ operand);
    }
}

template <class T>
inline T cusim_shfl(int op, unsigned mask, T value, int operand, int width, const char* file, int line) {
    static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= 16, "shuffle type");
    const unsigned char* values = cusim_warp_exchange(op, mask, &value, sizeof(T), file, line);
    const int source = cusim_shfl_source(op, (int)cusim_lane(), operand, width);
    if (source < 0 || source > 31 || !(mask >> source & 1)) {
        cusim_die("%s:%d: shuffle reads lane %d, not in mask %08x", file, line, source, mask);
    }
    T result;
    __builtin_memcpy((void*)&result, values + 16 * source, sizeof(T));
    return result;
}
template <class T> inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUSIM_LOC) {
    return cusim_shfl(CUSIM_SHFL, mask, value, source, width, CUSIM_L);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CUSIM_LOC) {
    return cusim_shfl(CUSIM_UP, mask, value, (int)delta, width, CUSIM_L);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CUSIM_LOC) {
    return cusim_shfl(CUSIM_DOWN, mask, value, (int)delta, width, CUSIM_L);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, CUSIM_LOC) {
    return cusim_shfl(CUSIM_XOR, mask, value, lanes, width, CUSIM_L);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, CUSIM_LOC) {
    const unsigned char mine = predicate != 0;
    const unsigned char* values = cusim_warp_exchange(CUSIM_VOTE, mask, &mine, 1, CUSIM_L);
    unsigned ballot = 0;
    for (int i = 0; i < 32; i++) {
        ballot |= mask >> i & 1 ? (unsigned)values[16 * i] << i : 0;
    }
    return ballot;
}
inline int __any_sync(unsigned mask, int predicate, CUSIM_LOC) {
    return __ballot_sync(mask, predicate, CUSIM_L) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CUSIM_LOC) {
    return __ballot_sync(mask, predicate, CUSIM_L) == mask;
}

// Returns the lanes whose value has the same bits as this lane's.
template <class T> inline unsigned __match_any_sync(unsigned mask, T value, CUSIM_LOC) {
    const unsigned char* values = cusim_warp_exchange(CUSIM_MATCH, mask, &value, sizeof(T), CUSIM_L);
    unsigned same = 0;
    for (int i = 0; i < 32; i++) {
        same |= (mask >> i & 1) && memcmp(values + 16 * i, &value, sizeof(T)) == 0 ? 1u << i : 0;
    }
    return same;
}

// Returns combine(...combine(combine(lane 0, lane 1), lane 2)...), over the lanes of `mask`.
template <class T, class F> inline T cusim_reduce(unsigned mask, T value, F combine, CUSIM_LOC) {
    const unsigned char* values = cusim_warp_exchange(CUSIM_REDUCE, mask, &value, sizeof(T), CUSIM_L);
    T result{};
    bool first = true;
    for (int i = 0; i < 32; i++) {
        if (mask >> i & 1) {
            T x;
            __builtin_memcpy((void*)&x, values + 16 * i, sizeof(T));
            result = first ? x : combine(result, x);
            first = false;
        }
    }
    return result;
}

// The device has these for int and unsigned; the bitwise ones for unsigned only.
#define CUSIM_REDUCE_SYNC(name, T, expression)                                                               \
    inline T name(unsigned mask, T value, CUSIM_LOC) {                                                       \
        return cusim_reduce(                                                                                 \
            mask, value, [](T a, T b) -> T { return expression; }, CUSIM_L);                                 \
    }
CUSIM_REDUCE_SYNC(__reduce_add_sync, unsigned, a + b)
CUSIM_REDUCE_SYNC(__reduce_add_sync, int, (int)((unsigned)a + (unsigned)b))
CUSIM_REDUCE_SYNC(__reduce_min_sync, unsigned, a < b ? a : b)
CUSIM_REDUCE_SYNC(__reduce_min_sync, int, a < b ? a : b)
CUSIM_REDUCE_SYNC(__reduce_max_sync, unsigned, a > b ? a : b)
CUSIM_REDUCE_SYNC(__reduce_max_sync, int, a > b ? a : b)
CUSIM_REDUCE_SYNC(__reduce_and_sync, unsigned, (a) & (b))
CUSIM_REDUCE_SYNC(__reduce_or_sync, unsigned, a | b)
CUSIM_REDUCE_SYNC(__reduce_xor_sync, unsigned, a ^ b)
#undef CUSIM_REDUCE_SYNC

#endif
