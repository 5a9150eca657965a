/*
cusim_memory.h -- loads and stores with cache hints, which have no effect here, and atomics.

Atomics are relaxed, like the device's: they do not order other accesses, and ThreadSanitizer treats
them so.
*/
#ifndef CUSIM_MEMORY_H
#define CUSIM_MEMORY_H

template <class T> inline T __ldg(const T* from) { return *from; }
template <class T> inline T __ldca(const T* from) { return *from; }
template <class T> inline T __ldcg(const T* from) { return *from; }
template <class T> inline T __ldcs(const T* from) { return *from; }
template <class T> inline T __ldcv(const T* from) { return *from; }
template <class T> inline T __ldlu(const T* from) { return *from; }

// Type of the value; not deduced, so that the value is converted as for the device's overloads.
template <class T> using cusim_same = typename std::common_type<T>::type;
template <class T> inline void __stwb(T* to, cusim_same<T> value) { *to = value; }
template <class T> inline void __stcg(T* to, cusim_same<T> value) { *to = value; }
template <class T> inline void __stcs(T* to, cusim_same<T> value) { *to = value; }
template <class T> inline void __stwt(T* to, cusim_same<T> value) { *to = value; }

// Sets *address = update(*address) atomically; returns the old value.
template <class T, class F> inline T cusim_atomic(T* address, F update) {
    using Bits =
        std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
    static_assert(sizeof(Bits) == sizeof(T), "atomic size");
    Bits* bits = (Bits*)address;
    Bits before = __atomic_load_n(bits, __ATOMIC_RELAXED), after;
    T old;
    do {
        __builtin_memcpy((void*)&old, &before, sizeof(T));
        const T updated = update(old);
        __builtin_memcpy(&after, (const void*)&updated, sizeof(T));
    } while (!__atomic_compare_exchange_n(bits, &before, after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}

#define CUSIM_ATOMIC_ADD(T)                                                                                  \
    inline T atomicAdd(T* address, T value) {                                                                \
        return cusim_atomic(address, [value](T old) -> T { return old + value; });                           \
    }
CUSIM_ATOMIC_ADD(unsigned)
CUSIM_ATOMIC_ADD(unsigned long long)
CUSIM_ATOMIC_ADD(float)
CUSIM_ATOMIC_ADD(double)
CUSIM_ATOMIC_ADD(__half)
CUSIM_ATOMIC_ADD(__half2)
CUSIM_ATOMIC_ADD(__nv_bfloat16)
CUSIM_ATOMIC_ADD(__nv_bfloat162)
#undef CUSIM_ATOMIC_ADD
// wraps around on the device; in C++ only unsigned does
inline int atomicAdd(int* address, int value) {
    return (int)atomicAdd((unsigned*)address, (unsigned)value);
}
inline unsigned atomicSub(unsigned* address, unsigned value) { return atomicAdd(address, 0u - value); }
inline int atomicSub(int* address, int value) {
    return (int)atomicAdd((unsigned*)address, 0u - (unsigned)value);
}

template <class T> inline T atomicExch(T* address, cusim_same<T> value) {
    return cusim_atomic(address, [value](T) { return value; });
}
template <class T> inline T atomicMin(T* address, cusim_same<T> value) {
    return cusim_atomic(address, [value](T old) { return value < old ? value : old; });
}
template <class T> inline T atomicMax(T* address, cusim_same<T> value) {
    return cusim_atomic(address, [value](T old) { return value > old ? value : old; });
}
template <class T> inline T atomicAnd(T* address, cusim_same<T> value) {
    return cusim_atomic(address, [value](T old) -> T { return old & value; });
}
template <class T> inline T atomicOr(T* address, cusim_same<T> value) {
    return cusim_atomic(address, [value](T old) -> T { return old | value; });
}
template <class T> inline T atomicXor(T* address, cusim_same<T> value) {
    return cusim_atomic(address, [value](T old) -> T { return old ^ value; });
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
    return cusim_atomic(address, [last](unsigned old) { return old >= last ? 0u : old + 1; });
}
inline unsigned atomicDec(unsigned* address, unsigned last) {
    return cusim_atomic(address, [last](unsigned old) { return old == 0 || old > last ? last : old - 1; });
}
template <class T> inline T atomicCAS(T* address, cusim_same<T> expected, cusim_same<T> value) {
    return cusim_atomic(address, [expected, value](T old) { return old == expected ? value : old; });
}

#endif
