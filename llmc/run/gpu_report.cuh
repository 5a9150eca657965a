/*
gpu_report.cuh -- what the GPU can do at most, what it has, and how it is.

The peak is the dense matrix-product rate of the tensor cores (CUDA cores for fp32 without TF32). For cards
with a published figure that figure is taken, so that shares compare with what others report; for any other,
it is computed from the card's own clock and number of multiprocessors:

    peak = multiprocessors * clock * 2 * multiply-adds per clock and multiprocessor

defines: gpu_peak_flops_per_s, gpu_peak_or_default, gpu_beside_mib, GpuReport, gpu_report_open, gpu_report_close,
         gpu_report_print
*/
#ifndef LLMC_GPU_REPORT_CUH
#define LLMC_GPU_REPORT_CUH

#include <ctype.h>

#include "llmc/gpu.cuh"
#include "llmc/matmul.cuh"
#include "llmc/run/nvml.h"

// Dense 16-bit TFLOP/s with fp32 sums, from the makers' data sheets. TF32 is half of it.
typedef struct {
    const char* name; // a word of the device's name
    double tflops;
} GpuPublished_;

static inline double gpu_published_tflops_(const char* device_name) {
    static const GpuPublished_ cards[] = {
        {"H100 PCIe", 756},    {"H100 NVL", 835.5}, {"H100", 989.4}, {"H200", 989.4}, {"GH200", 989.4},
        {"H800", 989.4},       {"A100", 312},       {"A800", 312},   {"A30", 165},    {"A40", 149.7},
        {"RTX 6000 Ada", 364}, {"L40S", 362},       {"L40", 181},    {"L4", 121},     {"RTX 4090", 165.2},
        {"RTX 3090", 71},      {"B200", 2250},      {"GB200", 2500},
    };
    double tflops = 0; // the longest name wins: "L40S" is also an "L40" and an "L4"
    size_t longest = 0;
    for (size_t i = 0; i < sizeof(cards) / sizeof(cards[0]); i++) {
        const size_t length = strlen(cards[i].name);
        if (length > longest && strstr(device_name, cards[i].name)) {
            longest = length;
            tflops = cards[i].tflops;
        }
    }
    return tflops;
}

// 16-bit multiply-adds with fp32 sums, per clock and multiprocessor (CUDA C Programming Guide and the
// architectures' white papers). TF32 is half of it.
static inline double gpu_tensor_rate_(int major, int minor) {
    if (major == 10) {
        return 4096;
    }
    if (major == 9) {
        return 2048;
    }
    return major == 8 && minor == 0 ? 1024 : major == 8 && minor == 6 ? 256 : 512;
}

static inline double gpu_cuda_core_rate_(int major, int minor) { // fp32 multiply-adds
    return major == 8 && minor == 0 ? 64 : 128;
}

// FLOP/s for factors of this type; 0 if the device does not say its clock.
static inline double gpu_peak_flops_per_s(const Gpu* gpu, DType dtype, int tf32) {
    int kilohertz = 0;
    if (cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, gpu->device) != cudaSuccess) {
        kilohertz = 0;
        cudaGetLastError(); // clears the error: the figure is only for display
    }
    const double clocks = 2e3 * kilohertz * gpu->multiprocessors;
    if (dtype == DTYPE_FP32 && !tf32) {
        return clocks * gpu_cuda_core_rate_(gpu->major, gpu->minor);
    }
    const double published = gpu_published_tflops_(gpu->name) * 1e12;
    const double dense = published > 0 ? published : clocks * gpu_tensor_rate_(gpu->major, gpu->minor);
    return dtype == DTYPE_FP32 ? dense / 2 : dense;
}

// The same for device number `device`, or for an H100 if this machine has no such GPU; `name` becomes the
// words for it.
static inline double gpu_peak_or_default(char* name, size_t name_bytes, int device, DType dtype, int tf32) {
    int count = 0;
    cudaDeviceProp properties;
    Gpu gpu;
    memset(&gpu, 0, sizeof(gpu));
    if (cudaGetDeviceCount(&count) != cudaSuccess || device >= count) {
        cudaGetLastError();
        snprintf(name, name_bytes, "an H100 SXM (no GPU found)");
        snprintf(gpu.name, sizeof(gpu.name), "H100");
        gpu.major = 9;
        return gpu_peak_flops_per_s(&gpu, dtype, 1);
    }
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    snprintf(gpu.name, sizeof(gpu.name), "%s", properties.name);
    snprintf(name, name_bytes, "%s", properties.name);
    gpu.device = device;
    gpu.major = properties.major;
    gpu.minor = properties.minor;
    gpu.multiprocessors = properties.multiProcessorCount;
    return gpu_peak_flops_per_s(&gpu, dtype, tf32);
}

// What this process and others have taken of the GPU beside gpu_alloc: CUDA's context, kernels, cublasLt.
static inline double gpu_beside_mib(void) {
    size_t free_bytes = 0, total_bytes = 0;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    return ((double)total_bytes - (double)free_bytes - (double)gpu_now_bytes()) / (1 << 20);
}

// ---- --gpu-report ----

typedef struct {
    Nvml nvml; // also for the log
    int has_nvml, has_listed_products;
} GpuReport;

// Opens the management library for this GPU, if it is there; where a report is wanted, says why it is not.
static inline void gpu_report_open(GpuReport* r, int device, int is_wanted) {
    char bus_id[32];
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), device));
    r->has_nvml = nvml_open(&r->nvml, bus_id);
    if (!r->has_nvml && is_wanted) {
        printf("no GPU report: %s\n", r->nvml.reason);
    }
}

static inline void gpu_report_close(GpuReport* r) {
    if (r->has_nvml) {
        nvml_close(&r->nvml);
    }
}

// The algorithms of the products, the first time, and a line on the GPU.
static inline void gpu_report_print(GpuReport* r, const MatmulGpu* matmul) {
    char line[256];
    if (!r->has_listed_products) {
        r->has_listed_products = 1;
        matmul_gpu_report(stdout, matmul);
    }
    if (r->has_nvml && nvml_line(&r->nvml, line, sizeof(line))) {
        printf("%s\n", line);
    }
}

#endif
