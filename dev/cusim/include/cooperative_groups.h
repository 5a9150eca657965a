// cooperative_groups for the CPU device: thread_block, thread_block_tile<N>, grid_group, reduce
#pragma once
#include <cusim.h>
namespace cooperative_groups {
struct thread_block {
    void sync(CUSIM_LOC) const { __syncthreads(CUSIM_L); }
    unsigned thread_rank() const { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
    unsigned size() const { return blockDim.x * blockDim.y * blockDim.z; }
    unsigned num_threads() const { return size(); }
    dim3 group_index() const { return dim3(blockIdx.x, blockIdx.y, blockIdx.z); }
};
inline thread_block this_thread_block() { return {}; }
struct grid_group {
    void sync(CUSIM_LOC) const { cusim_grid_sync(CUSIM_L); }
    unsigned long long thread_rank() const { return (blockIdx.x + (unsigned long long)gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)) * this_thread_block().size() + this_thread_block().thread_rank(); }
    unsigned long long size() const { return (unsigned long long)gridDim.x * gridDim.y * gridDim.z * this_thread_block().size(); }
};
inline grid_group this_grid() { return {}; }
template <unsigned N> struct thread_block_tile {
    static_assert(N <= 32 && (N & (N - 1)) == 0, "tile size");
    unsigned rank_, meta_;
    unsigned mask() const { return N == 32 ? 0xffffffffu : ((1u << (N & 31)) - 1) << (cusim_lane() & ~(N - 1)); }
    unsigned thread_rank() const { return rank_; }
    static constexpr unsigned size() { return N; }
    static constexpr unsigned num_threads() { return N; }
    unsigned meta_group_rank() const { return meta_; }
    unsigned meta_group_size() const { return this_thread_block().size() / N; }
    void sync(CUSIM_LOC) const { __syncwarp(mask(), CUSIM_L); }
    template <class T> T shfl(T v, int s, CUSIM_LOC) const { return __shfl_sync(mask(), v, s, (int)N, CUSIM_L); }
    template <class T> T shfl_down(T v, unsigned d, CUSIM_LOC) const { return __shfl_down_sync(mask(), v, d, (int)N, CUSIM_L); }
    template <class T> T shfl_up(T v, unsigned d, CUSIM_LOC) const { return __shfl_up_sync(mask(), v, d, (int)N, CUSIM_L); }
    template <class T> T shfl_xor(T v, int x, CUSIM_LOC) const { return __shfl_xor_sync(mask(), v, x, (int)N, CUSIM_L); }
    int any(int p, CUSIM_LOC) const { return __any_sync(mask(), p, CUSIM_L); }
    int all(int p, CUSIM_LOC) const { return __all_sync(mask(), p, CUSIM_L); }
    unsigned ballot(int p, CUSIM_LOC) const { return __ballot_sync(mask(), p, CUSIM_L) >> (cusim_lane() & ~(N - 1)); }
};
template <unsigned N> inline thread_block_tile<N> tiled_partition(const thread_block& b) { return {b.thread_rank() % N, b.thread_rank() / N}; }
template <class T> struct plus { T operator()(T a, T b) const { return a + b; } };
template <class T> struct greater { T operator()(T a, T b) const { return a > b ? a : b; } };
template <class T> struct less { T operator()(T a, T b) const { return a < b ? a : b; } };
template <unsigned N, class T, class F> inline T reduce(const thread_block_tile<N>& t, T v, F fn, CUSIM_LOC) {
    return cusim_reduce(t.mask(), v, fn, CUSIM_L);
}
}  // namespace cooperative_groups
