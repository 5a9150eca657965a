/*
gpu_report.cuh -- the peaks of the GPU, the assumed rates of operations, and --gpu-report.

The peak is the rate of dense matmuls on tensor cores, or on CUDA cores for fp32 without TF32. Cards
with a published 16-bit rate take it from a table, so that MFU compares with what others report. All
other peaks are computed from the card's clock and number of multiprocessors:

    peak = multiprocessors * clock * 2 * multiply-adds per clock and multiprocessor

The memory bandwidth is the published one, or is computed from the memory's clock and bus width.
*/
#ifndef LLMC_GPU_REPORT_CUH
#define LLMC_GPU_REPORT_CUH

#include <ctype.h>

#include "llmc/base/clock.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/log/log.h"
#include "llmc/ops/matmul_plans.cuh"
#include "llmc/gpu/nvml.h"
#include "llmc/layers/layer_cost.h"
#include "llmc/setup/options_table.h"

// Dense 16-bit TFLOP/s with fp32 sums, memory bandwidth in TB/s, and memory in GB of 2^30 bytes,
// from the makers' data sheets. TF32 has half the FLOP/s.
typedef struct {
    const char* name; // words of the device's name
    double tflops, tb_per_s, memory_gb;
    int major; // of the compute capability
} GpuPublished_;

// Returns the cards with published figures, and their number.
static inline const GpuPublished_* gpu_published_cards_(int* count) {
    static const GpuPublished_ cards[] = {
        {"H100 PCIe", 756, 2, 80, 9},
        {"H100 NVL", 835.5, 3.9, 94, 9},
        {"H100", 989.4, 3.35, 80, 9},
        {"H200", 989.4, 4.8, 141, 9},
        {"GH200", 989.4, 4, 96, 9},
        {"H800", 989.4, 3.35, 80, 9},
        {"A100", 312, 2.039, 80, 8},
        {"A800", 312, 2.039, 80, 8},
        {"A30", 165, 0.933, 24, 8},
        {"A40", 149.7, 0.696, 48, 8},
        {"L40S", 362, 0.864, 48, 8},
        {"L40", 181, 0.864, 48, 8},
        {"RTX 6000 Ada", 364, 0.96, 48, 8},
        {"L4", 121, 0.3, 24, 8},
        {"RTX 4090", 165.2, 1.008, 24, 8},
        {"RTX 3090", 71, 0.936, 24, 8},
        {"B200", 2250, 8, 180, 10},
        {"GB200", 2500, 8, 186, 10},
        {"RTX 5090", 209.5, 1.792, 32, 12},
        {"H20", 148, 4, 96, 9},
        {"H200 NVL", 835.5, 4.8, 141, 9},
        {"A10", 125, 0.6, 24, 8},
        {"A10G", 70, 0.6, 24, 8},
        {"RTX A6000", 154.8, 0.768, 48, 8},
        {"A100-SXM4-40GB", 312, 1.555, 40, 8},
        {"A100-PCIE-40GB", 312, 1.555, 40, 8},
    };
    *count = sizeof(cards) / sizeof(cards[0]);
    return cards;
}

// Returns 1 if the text contains these whole words: an RTX A4000 is no A40.
static inline int gpu_has_words_(const char* text, const char* words) {
    const size_t length = strlen(words);
    for (const char* at = text; (at = strstr(at, words)) != NULL; at++) {
        if ((at == text || !isalnum((unsigned char)at[-1])) && !isalnum((unsigned char)at[length])) {
            return 1;
        }
    }
    return 0;
}

// Returns the published figures of a card; zeros if it is not in the table.
static inline GpuPublished_ gpu_published_(const char* device_name) {
    int count;
    const GpuPublished_* cards = gpu_published_cards_(&count);
    GpuPublished_ found = {"", 0, 0, 0, 0}; // the longest name wins: "H100 PCIe" is also an "H100"
    size_t longest = 0;
    for (int i = 0; i < count; i++) {
        const size_t length = strlen(cards[i].name);
        if (length > longest && gpu_has_words_(device_name, cards[i].name)) {
            longest = length;
            found = cards[i];
        }
    }
    return found;
}

// Returns the 16-bit multiply-adds with fp32 sums per clock and multiprocessor (CUDA C Programming
// Guide and white papers of the architectures). GeForce cards reach half the rate of workstation
// cards with the same chip. TF32 has half the rate.
static inline double gpu_tensor_rate_(const Gpu* gpu) {
    if (gpu->major == 10) {
        return 4096;
    }
    if (gpu->major == 9) {
        return 2048;
    }
    return gpu->major == 8 && gpu->minor == 0 ? 1024 : strstr(gpu->name, "GeForce") ? 256 : 512;
}

static inline double gpu_cuda_core_rate_(int major, int minor) { // fp32 multiply-adds
    return major == 8 && minor == 0 ? 64 : 128;
}

// Returns an attribute of the device; 0 if unknown.
static inline double gpu_attribute_(const Gpu* gpu, cudaDeviceAttr which) {
    int value = 0;
    if (cudaDeviceGetAttribute(&value, which, gpu->device) != cudaSuccess) {
        value = 0;
        cudaGetLastError(); // clears the error: the figure is only for display
    }
    return value;
}

// Returns the peak in FLOP/s for matmuls of this type; 0 if unknown.
static inline double gpu_peak_flops_per_s(const Gpu* gpu, DType dtype, int tf32) {
    const double clocks = 2e3 * gpu_attribute_(gpu, cudaDevAttrClockRate) * gpu->multiprocessors;
    if (dtype == DTYPE_FP32 && !tf32 && clocks > 0) {
        return clocks * gpu_cuda_core_rate_(gpu->major, gpu->minor);
    }
    const double published = gpu_published_(gpu->name).tflops * 1e12;
    const double dense = published > 0 ? published : clocks * gpu_tensor_rate_(gpu);
    return dtype == DTYPE_FP32 ? dense / 2 : dense;
}

// Returns the memory bandwidth in bytes/s. Memory transfers twice a clock.
static inline double gpu_bandwidth_per_s(const Gpu* gpu) {
    const double published = gpu_published_(gpu->name).tb_per_s * 1e12;
    return published > 0 ? published
                         : 2e3 * gpu_attribute_(gpu, cudaDevAttrMemoryClockRate) *
                               gpu_attribute_(gpu, cudaDevAttrGlobalMemoryBusWidth) / 8;
}

// Returns GPU number `device` of this machine; one without a name if this machine has no such GPU.
// Only the fields that the functions above use are set.
static inline Gpu gpu_found_(int device) {
    int count = 0;
    cudaDeviceProp properties;
    Gpu gpu;
    memset(&gpu, 0, sizeof(gpu));
    if (cudaGetDeviceCount(&count) != cudaSuccess || device >= count) {
        cudaGetLastError(); // clears the error: a plan needs no GPU
        return gpu;
    }
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    snprintf(gpu.name, sizeof(gpu.name), "%s", properties.name);
    gpu.device = device;
    gpu.major = properties.major;
    gpu.minor = properties.minor;
    gpu.multiprocessors = properties.multiProcessorCount;
    return gpu;
}

// Returns the card with this name, which the table has; else ends the program.
static inline Gpu gpu_named_(const char* name) {
    int count;
    const GpuPublished_ *cards = gpu_published_cards_(&count), card = gpu_published_(name);
    Gpu gpu;
    memset(&gpu, 0, sizeof(gpu));
    if (!*card.name) {
        char known[512] = "";
        for (int i = 0; i < count; i++) {
            const size_t used = strlen(known);
            snprintf(known + used, sizeof(known) - used, "%s%s", i ? ", " : "", cards[i].name);
        }
        die_usage("--plan-gpu %s; wanted one of these: %s", name, known);
    }
    snprintf(gpu.name, sizeof(gpu.name), "%s", card.name);
    gpu.major = card.major;
    return gpu;
}

// Returns the GPU that a run is planned for, and sets `words` to its name: --plan-gpu, else GPU
// number --device of this machine, else an H100.
static inline Gpu gpu_of_plan(char* words, size_t words_bytes, const Options* o) {
    Gpu gpu = *o->plan_gpu ? gpu_named_(o->plan_gpu) : gpu_found_(o->memory.device);
    const int is_assumed = !*gpu.name;
    if (is_assumed) {
        gpu = gpu_named_("H100");
    }
    snprintf(words, words_bytes, "%s", is_assumed ? "an H100 SXM (no GPU found)" : gpu.name);
    return gpu;
}

// Returns the memory of the card that a run is planned for, in bytes, if it is not in this machine:
// the published one, less 512 MiB for CUDA; else 0.
static inline size_t gpu_planned_memory(const Options* o) {
    char words[256];
    const Gpu gpu = gpu_of_plan(words, sizeof(words), o);
    const int is_here = !*o->plan_gpu && *gpu_found_(o->memory.device).name;
    return is_here ? 0
                   : (size_t)(gpu_published_(gpu.name).memory_gb * (double)(1 << 30)) - ((size_t)512 << 20);
}

// Returns the rates for the planned time of an update, with matmuls in fp8 or without. The shares
// of the peaks and the time of a launch are assumptions, not measured with this program. In fp8 the
// peak is twice that of 16 bits, and a smaller share of it is reached.
static inline CostRates gpu_rates(const Gpu* gpu, double peak, int in_fp8) {
    const double matmuls = 0.65, attention = 0.2, memory = 0.8, fp8 = 0.55,
                 bandwidth = gpu_bandwidth_per_s(gpu);
    CostRates rates;
    for (int kind = 0; kind < COST_RATES; kind++) {
        rates.per_s[kind] = kind == COST_MATMULS     ? matmuls * peak
                            : kind == COST_ATTENTION ? attention * peak
                                                     : memory * bandwidth;
    }
    rates.launch_s = 2e-6;
    rates.fp8_per_s = in_fp8 ? fp8 * 2 * gpu_peak_flops_per_s(gpu, DTYPE_BF16, 0) : 0;
    const int length = snprintf(rates.basis, sizeof(rates.basis),
                                "computed, not measured: %.0f and %.0f %% of the peak, %.0f %% of %.3g TB/s",
                                100 * matmuls, 100 * attention, 100 * memory, bandwidth * 1e-12);
    if (in_fp8) {
        snprintf(rates.basis + length, sizeof(rates.basis) - (size_t)length, ", in fp8 %.0f %% of its peak",
                 100 * fp8);
    }
    return rates;
}

// Returns the GPU memory in use that gpu_now_bytes does not count, in MiB: the CUDA context,
// kernels and cublasLt, and the memory of other programs.
static inline double gpu_beside_mib(void) {
    size_t free_bytes = 0, total_bytes = 0;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    return ((double)total_bytes - (double)free_bytes - (double)gpu_now_bytes()) / (1 << 20);
}

// ---- --gpu-report ----

typedef struct {
    Nvml nvml; // used for the log, too
    int has_nvml, has_listed_matmuls;
    double sensed_s;           // time of the last sensor reading
    double power_w, clock_mhz; // it, until the log has it; NAN: none
} GpuReport;

// Opens NVML for this GPU. If that fails and a report is wanted, prints why.
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

// Reads the power and clock of the GPU, at most once a second. That may take as long as a step of a
// small model, so call it when the GPU has enough to do.
static inline void gpu_report_sense(GpuReport* r) {
    const double now_s = time_now_s();
    if (now_s - r->sensed_s >= 1) {
        r->sensed_s = now_s;
        nvml_sensors(&r->nvml, &r->power_w, &r->clock_mhz);
    }
}

// Passes a new reading to the log.
static inline void gpu_report_tell(GpuReport* r, RunLog* log) {
    log_sensors(log, r->power_w, r->clock_mhz);
    r->power_w = r->clock_mhz = NAN;
}

// Prints the algorithms of the matmuls, only at the first call, and a line on the GPU.
static inline void gpu_report_print(GpuReport* r, const MatmulGpu* matmul) {
    char line[256];
    if (!r->has_listed_matmuls) {
        r->has_listed_matmuls = 1;
        matmul_gpu_report(stdout, matmul);
    }
    if (r->has_nvml && nvml_line(&r->nvml, line, sizeof(line))) {
        printf("%s\n", line);
    }
}

#endif
