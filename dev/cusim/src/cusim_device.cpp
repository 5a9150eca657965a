// cusim_device.cpp -- the properties of the device: the limits of compute capability 9.0, on four
// multiprocessors.
#include "cusim_internal.h"

#include <algorithm>

enum {
    MULTIPROCESSORS = 4,
    THREADS_PER_MULTIPROCESSOR = 2048,
    BLOCKS_PER_MULTIPROCESSOR = 32,
    SHARED_PER_MULTIPROCESSOR = 228 << 10,
    SHARED_PER_BLOCK = 48 << 10,
    SHARED_PER_BLOCK_OPTIN = 227 << 10,
    SHARED_RESERVED_PER_BLOCK = 1 << 10,
    REGISTERS = 64 << 10,
    L2_BYTES = 50 << 20,
    CUDA_VERSION_NUMBER = 13000
};

// ---- errors ----

static cudaError_t last_error = cudaSuccess;

cudaError_t failed(cudaError_t error) {
    last_error = error;
    return error;
}

#define ERRORS(X)                                                                                            \
    X(cudaSuccess, "no error")                                                                               \
    X(cudaErrorInvalidValue, "invalid argument")                                                             \
    X(cudaErrorMemoryAllocation, "out of memory")                                                            \
    X(cudaErrorInvalidConfiguration, "invalid configuration argument")                                       \
    X(cudaErrorInvalidPitchValue, "invalid pitch argument")                                                  \
    X(cudaErrorInvalidDevice, "invalid device ordinal")                                                      \
    X(cudaErrorInvalidResourceHandle, "invalid resource handle")                                             \
    X(cudaErrorIllegalState, "the operation cannot be performed in the present state")                       \
    X(cudaErrorNotReady, "device not ready")                                                                 \
    X(cudaErrorNotSupported, "operation not supported")                                                      \
    X(cudaErrorHostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped")   \
    X(cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region")         \
    X(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing")                 \
    X(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture")          \
    X(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences")        \
    X(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began")               \
    X(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work")                                  \
    X(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream")            \
    X(cudaErrorStreamCaptureImplicit, "operation would make the legacy stream depend on a capturing stream") \
    X(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream")

extern "C" {

cudaError_t CUDARTAPI cudaGetLastError(void) {
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t CUDARTAPI cudaPeekAtLastError(void) { return last_error; }

const char* CUDARTAPI cudaGetErrorString(cudaError_t error) {
    switch (error) {
#define X(name, text)                                                                                        \
    case name:                                                                                               \
        return text;
        ERRORS(X)
#undef X
    default:
        return "unknown error";
    }
}

const char* CUDARTAPI cudaGetErrorName(cudaError_t error) {
    switch (error) {
#define X(name, text)                                                                                        \
    case name:                                                                                               \
        return #name;
        ERRORS(X)
#undef X
    default:
        return "cudaErrorUnknown";
    }
}

// ---- devices ----

static int current_device = 0;

// Read at every call, so that a test can change it.
cudaError_t CUDARTAPI cudaGetDeviceCount(int* count) {
    *count = (int)environment_number("CUSIM_DEVICES", 8, 0, 1024);
    return cudaSuccess;
}

static bool device_exists(int device) {
    int count;
    cudaGetDeviceCount(&count);
    return device >= 0 && device < count;
}

// There is nothing to wait for: the device works when the host calls it.
cudaError_t CUDARTAPI cudaSetDeviceFlags(unsigned flags) {
    return flags <= cudaDeviceScheduleMask ? cudaSuccess : failed(cudaErrorInvalidValue);
}

cudaError_t CUDARTAPI cudaSetDevice(int device) {
    if (!device_exists(device)) {
        return failed(cudaErrorInvalidDevice);
    }
    current_device = device;
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaGetDevice(int* device) {
    *device = current_device;
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceReset(void) { return cudaDeviceSynchronize(); }

cudaError_t CUDARTAPI cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
    if (!device_exists(device) || bytes < 13) {
        return failed(device_exists(device) ? cudaErrorInvalidValue : cudaErrorInvalidDevice);
    }
    snprintf(text, (size_t)bytes, "0000:%02X:00.0", (unsigned)(device + 1) & 0xffu);
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (!device_exists(device)) {
        return failed(cudaErrorInvalidDevice);
    }
    memset((void*)properties, 0, sizeof(*properties));
    strcpy(properties->name, "CPU CUDA device");
    properties->major = 9;
    properties->minor = 0;
    properties->multiProcessorCount = MULTIPROCESSORS;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = THREADS_PER_MULTIPROCESSOR;
    properties->maxBlocksPerMultiProcessor = BLOCKS_PER_MULTIPROCESSOR;
    properties->warpSize = 32;
    properties->totalGlobalMem = device_memory_bytes();
    properties->sharedMemPerBlock = SHARED_PER_BLOCK;
    properties->sharedMemPerBlockOptin = SHARED_PER_BLOCK_OPTIN;
    properties->sharedMemPerMultiprocessor = SHARED_PER_MULTIPROCESSOR;
    properties->reservedSharedMemPerBlock = SHARED_RESERVED_PER_BLOCK;
    properties->regsPerBlock = properties->regsPerMultiprocessor = REGISTERS;
    properties->l2CacheSize = L2_BYTES;
    properties->memoryBusWidth = 5120;
    properties->pciBusID = device + 1;
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    if (!device_exists(device)) {
        return failed(cudaErrorInvalidDevice);
    }
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
        *value = MULTIPROCESSORS;
        break;
    case cudaDevAttrComputeCapabilityMajor:
        *value = 9;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = 0;
        break;
    case cudaDevAttrMaxThreadsPerBlock:
        *value = 1024;
        break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        *value = THREADS_PER_MULTIPROCESSOR;
        break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
        *value = BLOCKS_PER_MULTIPROCESSOR;
        break;
    case cudaDevAttrWarpSize:
        *value = 32;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = SHARED_PER_BLOCK;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = SHARED_PER_BLOCK_OPTIN;
        break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = SHARED_PER_MULTIPROCESSOR;
        break;
    case cudaDevAttrReservedSharedMemoryPerBlock:
        *value = SHARED_RESERVED_PER_BLOCK;
        break;
    case cudaDevAttrMaxRegistersPerBlock:
        *value = REGISTERS;
        break;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
        *value = REGISTERS;
        break;
    case cudaDevAttrL2CacheSize:
        *value = L2_BYTES;
        break;
    case cudaDevAttrClockRate:
        *value = 1980000;
        break; // kHz
    case cudaDevAttrMemoryClockRate:
        *value = 2619000;
        break; // kHz
    case cudaDevAttrGlobalMemoryBusWidth:
        *value = 5120;
        break;
    case cudaDevAttrCooperativeLaunch:
        *value = 1;
        break;
    default:
        return failed(cudaErrorNotSupported);
    }
    return cudaSuccess;
}

// ---- kernels. There are no registers to count: 32 for all ----

cudaError_t CUDARTAPI cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
    memset((void*)attributes, 0, sizeof(*attributes));
    attributes->numRegs = 32;
    attributes->maxThreadsPerBlock = 1024;
    attributes->maxDynamicSharedSizeBytes = (int)kernel_dynamic_limit(kernel);
    attributes->binaryVersion = attributes->ptxVersion = 90;
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads,
                                                                    size_t dynamic_bytes) {
    if (threads < 1 || threads > 1024) {
        return failed(cudaErrorInvalidValue);
    }
    const int by_shared = dynamic_bytes
                              ? (int)(SHARED_PER_MULTIPROCESSOR / (dynamic_bytes + SHARED_RESERVED_PER_BLOCK))
                              : (int)BLOCKS_PER_MULTIPROCESSOR;
    *blocks = std::min({THREADS_PER_MULTIPROCESSOR / threads, by_shared, (int)BLOCKS_PER_MULTIPROCESSOR});
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* kernel,
                                                                             int threads,
                                                                             size_t dynamic_bytes, unsigned) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, dynamic_bytes);
}

// ---- the rest ----

cudaError_t CUDARTAPI cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t CUDARTAPI cudaProfilerStop(void) { return cudaSuccess; }
cudaError_t CUDARTAPI cudaDriverGetVersion(int* version) {
    *version = CUDA_VERSION_NUMBER;
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaRuntimeGetVersion(int* version) {
    *version = CUDA_VERSION_NUMBER;
    return cudaSuccess;
}
}
