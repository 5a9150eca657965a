/*
nvml.h -- the state of one GPU in one line, from NVIDIA's management library (NVML, part of the
driver).

    GPU: 67 C, 612 of 700 W, SM 1755 of 1980 MHz, memory clock 3201 MHz, 71342 of 143771 MiB,
    utilization 99 %, throttled: power

The line omits what a card does not report: many have no fan, laptops no power limit, shared cards
(MIG) no utilization. NVIDIA averages power over the last second; utilization is the share of time
with a kernel running; memory counts all processes and the driver. "throttled" lists all reasons
that hold the clocks down.

The library is opened at run time and never linked, so the program also runs without it. Then
nvml_open returns 0, `reason` has one line for the caller to print once, and nvml_line returns 0.
Nothing here ends the program or prints.

The GPU is identified by its PCI bus id, from cudaDeviceGetPCIBusId: CUDA's device numbers depend on
CUDA_VISIBLE_DEVICES and the cards' speed, NVML's do not.

    LLMC_NVML_LIBRARY   environment: the library's name or path, instead of libnvidia-ml.so.1

dlopen is in libc, but before glibc 2.34 in libdl: nvcc links that on its own, make with LDLIBS=-ldl
in the environment.

The few types and constants are declared here as in NVIDIA's NVML API Reference Guide; the test
compares them with the toolkit's own header if it is installed.
*/
#ifndef LLMC_NVML_H
#define LLMC_NVML_H

#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- NVIDIA's declarations ----

typedef struct nvmlDevice_st NvmlDevice_; // NVIDIA's
typedef unsigned int NvmlResult_;         // 0: success; otherwise the other results are not set
enum { NVML_GPU_SENSOR_ = 0, NVML_SM_CLOCK_ = 1, NVML_MEMORY_CLOCK_ = 2 };

typedef struct {
    unsigned long long total, free, used; // bytes
} NvmlMemory_;

typedef struct {
    unsigned int gpu, memory; // percent of the time
} NvmlUtilization_;

typedef NvmlResult_ (*NvmlAction_)(void);
typedef const char* (*NvmlErrorText_)(NvmlResult_);
typedef NvmlResult_ (*NvmlFind_)(const char* pci_bus_id, NvmlDevice_**);
typedef NvmlResult_ (*NvmlGet_)(NvmlDevice_*, unsigned int*);
typedef NvmlResult_ (*NvmlGetOf_)(NvmlDevice_*, unsigned int which, unsigned int*);
typedef NvmlResult_ (*NvmlGetBits_)(NvmlDevice_*, unsigned long long*);
typedef NvmlResult_ (*NvmlGetMemory_)(NvmlDevice_*, NvmlMemory_*);
typedef NvmlResult_ (*NvmlGetUtilization_)(NvmlDevice_*, NvmlUtilization_*);

// Reasons that hold the clocks down. Left out: an idle GPU (0x001), and bits added since.
typedef struct {
    unsigned int bit;
    const char* name;
} NvmlThrottle_;

enum { NVML_HARDWARE_ = 0x008, NVML_HARDWARE_WHY_ = 0x040 | 0x080 };

static const NvmlThrottle_ nvml_throttles_[] = {
    {0x002, "clock setting"}, // nvidia-smi --applications-clocks
    {0x004, "power"},
    {NVML_HARDWARE_, "hardware"}, // half the clock or less
    {0x010, "sync boost"},        // the slowest GPU of a group
    {0x020, "temperature"},
    {0x040, "temperature (hardware)"},
    {0x080, "power brake (hardware)"}, // demanded by the power supply
    {0x100, "display clock setting"},
    {0x200, "board limit"},
};

// ---- opening ----

// One GPU. Functions that the library lacks are NULL.
typedef struct {
    void* library;        // NULL: closed
    NvmlAction_ shutdown; // NULL: not started
    NvmlDevice_* device;  // owned by the library
    NvmlGetOf_ temperature, clock, max_clock;
    NvmlGet_ fan, power, power_limit;
    NvmlGetMemory_ memory;
    NvmlGetUtilization_ utilization;
    NvmlGetBits_ throttle;
    char reason[512]; // why nvml_open failed, one line; stays after nvml_close
} Nvml;

static inline void nvml_close(Nvml* nvml) {
    if (nvml->shutdown) {
        nvml->shutdown();
    }
    if (nvml->library) {
        dlclose(nvml->library);
    }
    nvml->shutdown = NULL;
    nvml->library = NULL;
    nvml->device = NULL;
}

// Keeps the reason, closes, and returns 0.
__attribute__((format(printf, 2, 3))) static inline int nvml_fail_(Nvml* nvml, const char* format, ...) {
    va_list args;
    va_start(args, format); // before closing: the words belong to the library
    vsnprintf(nvml->reason, sizeof(nvml->reason), format, args);
    va_end(args);
    nvml_close(nvml);
    return 0;
}

static inline int nvml_fail_call_(Nvml* nvml, const char* call, NvmlResult_ result) {
    const NvmlErrorText_ error_text = (NvmlErrorText_)dlsym(nvml->library, "nvmlErrorString");
    const char* words = error_text ? error_text(result) : NULL;
    return nvml_fail_(nvml, "NVML: %s: %s (error %u)", call, words ? words : "failed", result);
}

static inline void nvml_load_(Nvml* nvml) {
    void* library = nvml->library;
    nvml->temperature = (NvmlGetOf_)dlsym(library, "nvmlDeviceGetTemperature");
    nvml->clock = (NvmlGetOf_)dlsym(library, "nvmlDeviceGetClockInfo");
    nvml->max_clock = (NvmlGetOf_)dlsym(library, "nvmlDeviceGetMaxClockInfo");
    nvml->fan = (NvmlGet_)dlsym(library, "nvmlDeviceGetFanSpeed");
    nvml->power = (NvmlGet_)dlsym(library, "nvmlDeviceGetPowerUsage");
    nvml->power_limit = (NvmlGet_)dlsym(library, "nvmlDeviceGetEnforcedPowerLimit");
    nvml->memory = (NvmlGetMemory_)dlsym(library, "nvmlDeviceGetMemoryInfo");
    nvml->utilization = (NvmlGetUtilization_)dlsym(library, "nvmlDeviceGetUtilizationRates");
    nvml->throttle = (NvmlGetBits_)dlsym(library, "nvmlDeviceGetCurrentClocksEventReasons");
    if (!nvml->throttle) { // its name before CUDA 12.2
        nvml->throttle = (NvmlGetBits_)dlsym(library, "nvmlDeviceGetCurrentClocksThrottleReasons");
    }
}

// Finds the GPU with this bus id ("0000:17:00.0"). Returns 0 with the reason in nvml->reason, and
// everything closed, if nvml_line will not work.
static inline int nvml_open(Nvml* nvml, const char* pci_bus_id) {
    const char* chosen = getenv("LLMC_NVML_LIBRARY");
    const char* name = chosen && chosen[0] ? chosen : "libnvidia-ml.so.1";
    memset(nvml, 0, sizeof(*nvml));
    nvml->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!nvml->library) {
        const char* words = dlerror(); // names the library
        return nvml_fail_(nvml, "NVML: %s", words ? words : name);
    }
    const NvmlAction_ init = (NvmlAction_)dlsym(nvml->library, "nvmlInit_v2");
    const NvmlAction_ shutdown = (NvmlAction_)dlsym(nvml->library, "nvmlShutdown");
    const NvmlFind_ find = (NvmlFind_)dlsym(nvml->library, "nvmlDeviceGetHandleByPciBusId_v2");
    if (!init || !shutdown || !find) {
        const char* missing = !init       ? "nvmlInit_v2"
                              : !shutdown ? "nvmlShutdown"
                                          : "nvmlDeviceGetHandleByPciBusId_v2";
        return nvml_fail_(nvml, "NVML: %s has no function %s", name, missing);
    }
    NvmlResult_ result = init();
    if (result != 0) {
        return nvml_fail_call_(nvml, "nvmlInit_v2", result);
    }
    nvml->shutdown = shutdown;
    result = find(pci_bus_id, &nvml->device);
    if (result != 0) {
        char call[64];
        snprintf(call, sizeof(call), "GPU %s", pci_bus_id);
        return nvml_fail_call_(nvml, call, result);
    }
    nvml_load_(nvml);
    return 1;
}

// ---- the line ----

typedef struct {
    char* text;
    size_t bytes, used; // used < bytes
} NvmlText_;

// Advances after printf, which was given the room left and wanted n bytes.
static inline void nvml_advance_(NvmlText_* line, int wanted) {
    const size_t length = wanted > 0 ? (size_t)wanted : 0, room = line->bytes - line->used;
    line->used += length < room ? length : room - 1;
}

// Adds one part; cuts off what does not fit.
__attribute__((format(printf, 2, 3))) static inline void nvml_put_(NvmlText_* line, const char* format, ...) {
    const char* before = line->used == 0 ? "GPU: " : ", ";
    nvml_advance_(line, snprintf(line->text + line->used, line->bytes - line->used, "%s", before));
    va_list args;
    va_start(args, format);
    nvml_advance_(line, vsnprintf(line->text + line->used, line->bytes - line->used, format, args));
    va_end(args);
}

// Adds "VALUE of LIMIT UNIT", without the limit if it is unknown.
static inline void nvml_put_share_(NvmlText_* line, const char* name, unsigned int value, int has_limit,
                                   unsigned int limit, const char* unit) {
    if (has_limit) {
        nvml_put_(line, "%s%u of %u %s", name, value, limit, unit);
    } else {
        nvml_put_(line, "%s%u %s", name, value, unit);
    }
}

static inline void nvml_put_power_(NvmlText_* line, const Nvml* nvml) {
    unsigned int power_mw = 0, limit_mw = 0;
    if (nvml->power && nvml->power(nvml->device, &power_mw) == 0) {
        const int has_limit = nvml->power_limit && nvml->power_limit(nvml->device, &limit_mw) == 0;
        nvml_put_share_(line, "", (power_mw + 500) / 1000, has_limit, (limit_mw + 500) / 1000, "W");
    }
}

static inline void nvml_put_clocks_(NvmlText_* line, const Nvml* nvml) {
    unsigned int mhz = 0, max_mhz = 0;
    if (nvml->clock && nvml->clock(nvml->device, NVML_SM_CLOCK_, &mhz) == 0) {
        const int has_max = nvml->max_clock && nvml->max_clock(nvml->device, NVML_SM_CLOCK_, &max_mhz) == 0;
        nvml_put_share_(line, "SM ", mhz, has_max, max_mhz, "MHz");
    }
    if (nvml->clock && nvml->clock(nvml->device, NVML_MEMORY_CLOCK_, &mhz) == 0) {
        nvml_put_(line, "memory clock %u MHz", mhz);
    }
}

static inline void nvml_put_throttle_(NvmlText_* line, const Nvml* nvml) {
    unsigned long long bits = 0;
    if (!nvml->throttle || nvml->throttle(nvml->device, &bits) != 0) {
        return;
    }
    if (bits & NVML_HARDWARE_WHY_) { // the general bit is set as well, and says less
        bits &= ~(unsigned long long)NVML_HARDWARE_;
    }
    const char* before = "throttled: ";
    for (size_t i = 0; i < sizeof(nvml_throttles_) / sizeof(nvml_throttles_[0]); i++) {
        if (bits & nvml_throttles_[i].bit) {
            nvml_put_(line, "%s%s", before, nvml_throttles_[i].name);
            before = "";
        }
    }
}

// Sets text[0 .. bytes) to the line, without a newline; cuts it if it is too long (256 bytes are
// enough). Returns 0 if `nvml` is closed or the GPU reports nothing.
static inline int nvml_line(const Nvml* nvml, char* text, size_t bytes) {
    NvmlText_ line = {text, bytes, 0};
    NvmlMemory_ memory = {0, 0, 0};
    NvmlUtilization_ utilization = {0, 0};
    unsigned int value = 0;
    if (bytes == 0) {
        return 0;
    }
    text[0] = '\0';
    if (!nvml->library) {
        return 0;
    }
    if (nvml->temperature && nvml->temperature(nvml->device, NVML_GPU_SENSOR_, &value) == 0) {
        nvml_put_(&line, "%u C", value);
    }
    if (nvml->fan && nvml->fan(nvml->device, &value) == 0) {
        nvml_put_(&line, "fan %u %%", value);
    }
    nvml_put_power_(&line, nvml);
    nvml_put_clocks_(&line, nvml);
    if (nvml->memory && nvml->memory(nvml->device, &memory) == 0) {
        nvml_put_(&line, "%llu of %llu MiB", memory.used >> 20, memory.total >> 20);
    }
    if (nvml->utilization && nvml->utilization(nvml->device, &utilization) == 0) {
        nvml_put_(&line, "utilization %u %%", utilization.gpu);
    }
    nvml_put_throttle_(&line, nvml);
    return line.used > 0;
}

// Sets the current power, and clock of the multiprocessors; NAN if closed, or if the GPU does not
// report them.
static inline void nvml_sensors(const Nvml* nvml, double* power_w, double* clock_mhz) {
    unsigned int power_mw = 0, mhz = 0;
    const int is_open = nvml->library != NULL;
    const int has_power = is_open && nvml->power && nvml->power(nvml->device, &power_mw) == 0;
    const int has_clock = is_open && nvml->clock && nvml->clock(nvml->device, NVML_SM_CLOCK_, &mhz) == 0;
    *power_w = has_power ? 1e-3 * power_mw : NAN;
    *clock_mhz = has_clock ? mhz : NAN;
}

#endif
