// wgmma_kernels.cu -- attention's kernels by wgmma, for dev/test/sass.sh: one of each tiling.
#include "llmc/ops/attention_wgmma_backward.cuh"

#define FORWARD(Tiles, MASK)                                                                                 \
    template __global__ void attention_forward_wgmma_kernel<bf16, Tiles, MASK>(                              \
        const __grid_constant__ CUtensorMap, const __grid_constant__ CUtensorMap, bf16*, float*, const int*, \
        unsigned*, unsigned, AttentionSize);
FORWARD(AttentionForward64, ATTENTION_CAUSAL)
FORWARD(AttentionForward64, ATTENTION_DOCUMENTS)
FORWARD(AttentionForward64, ATTENTION_GENERAL)
FORWARD(AttentionForward64Long, ATTENTION_GENERAL)
FORWARD(AttentionForward64Longer, ATTENTION_CAUSAL)
FORWARD(AttentionForward64Longer, ATTENTION_DOCUMENTS)
FORWARD(AttentionForward64Three, ATTENTION_CAUSAL)
FORWARD(AttentionForward128, ATTENTION_CAUSAL)
FORWARD(AttentionForward128, ATTENTION_DOCUMENTS)
FORWARD(AttentionForward128, ATTENTION_GENERAL)
FORWARD(AttentionForward128Apart, ATTENTION_CAUSAL)
FORWARD(AttentionForward64, ATTENTION_CAPPED)
FORWARD(AttentionForward128, ATTENTION_CAPPED)
FORWARD(AttentionForward256, ATTENTION_GENERAL)
FORWARD(AttentionForward256, ATTENTION_CAPPED)

#define QUERIES(Tiles, MASK)                                                                                 \
    template __global__ void attention_query_grad_wgmma_kernel<bf16, Tiles, MASK>(                           \
        const __grid_constant__ CUtensorMap, const __grid_constant__ CUtensorMap,                            \
        const __grid_constant__ CUtensorMap, bf16*, float2*, float*, const bf16*, const float*, const int*,  \
        unsigned*, unsigned, AttentionSize, int);
QUERIES(AttentionQueries64, ATTENTION_CAUSAL)
QUERIES(AttentionQueries64, ATTENTION_DOCUMENTS)
QUERIES(AttentionQueries64, ATTENTION_GENERAL)
QUERIES(AttentionQueries128, ATTENTION_CAUSAL)
QUERIES(AttentionQueries128, ATTENTION_DOCUMENTS)
QUERIES(AttentionQueries128, ATTENTION_GENERAL)
QUERIES(AttentionQueries64, ATTENTION_CAPPED)
QUERIES(AttentionQueries128, ATTENTION_CAPPED)

#define KEYS(Tiles, MASK)                                                                                    \
    template __global__ void attention_key_grads_wgmma_kernel<bf16, Tiles, MASK>(                            \
        const __grid_constant__ CUtensorMap, const __grid_constant__ CUtensorMap,                            \
        const __grid_constant__ CUtensorMap, bf16*, bf16*, float*, const float2*, const int*, unsigned*,     \
        unsigned, AttentionSize, int);
KEYS(AttentionKeys64, ATTENTION_CAUSAL)
KEYS(AttentionKeys64, ATTENTION_DOCUMENTS)
KEYS(AttentionKeys64Apart, ATTENTION_CAUSAL)
KEYS(AttentionKeys128, ATTENTION_CAUSAL)
KEYS(AttentionKeys128Masked, ATTENTION_DOCUMENTS)
KEYS(AttentionKeys128Masked, ATTENTION_GENERAL)
KEYS(AttentionKeys64, ATTENTION_GENERAL)
KEYS(AttentionKeys64Apart, ATTENTION_CAPPED)
KEYS(AttentionKeys128Masked, ATTENTION_CAPPED)
