// test_attention_small.cu -- test_attention.cu with the tiles for 100 KiB of shared memory: of RTX
// 4090, L40S and the like.
#undef GPU_SM // of the machine
#define GPU_SM 89
#include "test_attention.cu"
