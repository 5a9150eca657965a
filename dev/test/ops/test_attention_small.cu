// test_attention_small.cu -- runs test_attention.cu with the tiles for 100 KiB of shared memory:
// RTX 4090, L40S and similar GPUs.
#undef GPU_SM // of the machine
#define GPU_SM 89
#include "test_attention.cu"
