/*
fake_nvml.c -- stands for libnvidia-ml.so.1: test_nvml.c compiles it into a shared library and loads
that.

Four GPUs, known by their bus ids; each reports what its row says. Declared from NVIDIA's API
reference, and not from llmc/gpu/nvml.h: so both have to agree.

    -DFAKE_OLD        a driver before CUDA 12.2: the old name of the function for throttle reasons
    -DFAKE_BARE       only what every NVML has had: to start, to find a GPU, to stop
    -DFAKE_NO_FIND    the function that finds a GPU has another name
    -DFAKE_TRACE      a line in the file CUSIM_TRACE says when the power was read
*/
#include <stdio.h>
#include <stdlib.h>

#define SUCCESS 0
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6

#define NONE (~0u) // not supported by this card

typedef struct {
    unsigned int bus, temperature, fan, power_mw, limit_mw, sm_mhz, sm_max_mhz, memory_mhz;
    unsigned int used_mib, total_mib, utilization;
    int throttle; // whether it tells reasons
} Device;

// clang-format off
static Device devices[] = {
    // bus    C   fan   power   limit    SM   max  memory used   total   busy
    {0x17,   31, NONE,  71499, 300500,  210, 1980, 2619,     5,  81559,    0, 1}, // not what was asked for
    {0xca,   67, NONE, 611500, 700000, 1755, 1980, 3201, 71342, 143771,   99, 1}, // a server's
    {0x65,   80,   45, 250499,   NONE, 1410, NONE,  405,  8000,  24564, NONE, 0}, // a desktop's, with a fan
    {0xb3, NONE, NONE,   NONE, 700000, NONE, 1980, NONE,  NONE,   NONE, NONE, 0}, // reports nothing
};
// clang-format on

// The test sets and reads these.
unsigned long long fake_nvml_throttle = 0;
unsigned int fake_nvml_init_result = SUCCESS;
int fake_nvml_users = 0; // inits less shutdowns

unsigned int nvmlInit_v2(void) {
    fake_nvml_users += fake_nvml_init_result == SUCCESS;
    return fake_nvml_init_result;
}

unsigned int nvmlShutdown(void) {
    fake_nvml_users--;
    return SUCCESS;
}

#ifdef FAKE_NO_FIND
#define FIND nvmlDeviceGetHandleByPciBusId
#else
#define FIND nvmlDeviceGetHandleByPciBusId_v2
#endif
unsigned int FIND(const char* pci_bus_id, Device** device) {
    unsigned int domain, bus, slot, function;
    if (sscanf(pci_bus_id, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4) {
        return INVALID_ARGUMENT;
    }
    for (unsigned int i = 0; i < sizeof(devices) / sizeof(devices[0]); i++) {
        if (domain == 0 && bus == devices[i].bus && slot == 0 && function == 0) {
            *device = &devices[i];
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

#ifndef FAKE_BARE
static unsigned int report(unsigned int value, unsigned int* result) {
    if (value == NONE) {
        return NOT_SUPPORTED;
    }
    *result = value;
    return SUCCESS;
}

const char* nvmlErrorString(unsigned int result) {
    return result == NOT_FOUND ? "Not Found" : result == 9 ? "Driver Not Loaded" : "Other";
}

unsigned int nvmlDeviceGetTemperature(Device* device, unsigned int sensor, unsigned int* celsius) {
    return sensor == 0 ? report(device->temperature, celsius) : INVALID_ARGUMENT;
}

unsigned int nvmlDeviceGetFanSpeed(Device* device, unsigned int* percent) {
    return report(device->fan, percent);
}

unsigned int nvmlDeviceGetPowerUsage(Device* device, unsigned int* milliwatts) {
#ifdef FAKE_TRACE
    FILE* trace = fopen(getenv("CUSIM_TRACE"), "a");
    fputs("{\"sensors\":1}\n", trace);
    fclose(trace);
#endif
    return report(device->power_mw, milliwatts);
}

unsigned int nvmlDeviceGetEnforcedPowerLimit(Device* device, unsigned int* milliwatts) {
    return report(device->limit_mw, milliwatts);
}

// Clocks: 0 graphics, 1 SM, 2 memory, 3 video.
unsigned int nvmlDeviceGetClockInfo(Device* device, unsigned int clock, unsigned int* mhz) {
    return clock == 1   ? report(device->sm_mhz, mhz)
           : clock == 2 ? report(device->memory_mhz, mhz)
                        : INVALID_ARGUMENT;
}

unsigned int nvmlDeviceGetMaxClockInfo(Device* device, unsigned int clock, unsigned int* mhz) {
    return clock == 1 ? report(device->sm_max_mhz, mhz) : INVALID_ARGUMENT;
}

unsigned int nvmlDeviceGetMemoryInfo(Device* device, unsigned long long total_free_used[3]) {
    if (device->total_mib == NONE) {
        return NOT_SUPPORTED;
    }
    total_free_used[0] = (unsigned long long)device->total_mib << 20;
    total_free_used[1] = (unsigned long long)(device->total_mib - device->used_mib) << 20;
    total_free_used[2] = (unsigned long long)device->used_mib << 20;
    return SUCCESS;
}

unsigned int nvmlDeviceGetUtilizationRates(Device* device, unsigned int gpu_memory[2]) {
    if (device->utilization == NONE) {
        return NOT_SUPPORTED;
    }
    gpu_memory[0] = device->utilization;
    gpu_memory[1] = 12;
    return SUCCESS;
}

#ifdef FAKE_OLD
#define THROTTLE_REASONS nvmlDeviceGetCurrentClocksThrottleReasons
#else
#define THROTTLE_REASONS nvmlDeviceGetCurrentClocksEventReasons
#endif
unsigned int THROTTLE_REASONS(Device* device, unsigned long long* bits) {
    *bits = fake_nvml_throttle;
    return device->throttle ? SUCCESS : NOT_SUPPORTED;
}
#endif
