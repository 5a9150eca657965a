// cusim_memory.cpp -- device and pinned memory, lookup of pointers, and copies. Each device
// allocation is a separate one of ordinary memory, so that AddressSanitizer sees its ends; it
// starts full of garbage.
#include "cusim_internal.h"

#include <algorithm>
#include <csignal>
#include <execinfo.h>
#include <sys/mman.h>
#include <unistd.h>

// Returns the list of allocations, sorted by address.
static std::vector<Allocation>& allocations() {
    static auto* list = new std::vector<Allocation>;
    return *list;
}

// A driver hands out device memory in units of 2 MiB; allocations of less than half a unit share
// some.
static const size_t UNIT_BYTES = (size_t)2 << 20;
// bytes in units with one allocation; in shared units
static size_t whole_bytes = 0, shared_bytes = 0;

static size_t in_units(size_t bytes) { return (bytes + UNIT_BYTES - 1) / UNIT_BYTES * UNIT_BYTES; }
static size_t device_bytes_used() { return whole_bytes + in_units(shared_bytes); }

// Read at every call, so that a test can change it.
size_t device_memory_bytes() { return environment_number("CUSIM_MEMORY_MIB", 4096, 0, 1ul << 30) << 20; }

void device_memory_give(size_t bytes) {
    const bool shares = bytes < UNIT_BYTES / 2;
    (shares ? shared_bytes : whole_bytes) -= shares ? bytes : in_units(bytes);
}

bool device_memory_take(size_t bytes) {
    const bool shares = bytes < UNIT_BYTES / 2;
    if (bytes > device_memory_bytes()) {
        return false;
    }
    (shares ? shared_bytes : whole_bytes) += shares ? bytes : in_units(bytes);
    if (device_bytes_used() > device_memory_bytes()) {
        device_memory_give(bytes);
        return false;
    }
    return true;
}

// Returns the largest block that can be pinned.
static size_t pinned_memory_bytes() {
    return environment_number("CUSIM_PINNED_MIB", 1ul << 30, 0, 1ul << 30) << 20;
}

static std::vector<Allocation>::iterator first_after(const void* pointer) {
    return std::upper_bound(allocations().begin(), allocations().end(), (char*)pointer,
                            [](char* address, const Allocation& a) { return address < a.data; });
}

static void allocation_add(char* data, size_t bytes, MemoryKind kind) {
    allocations().insert(first_after(data), Allocation{data, bytes, kind});
}

Allocation* allocation_of(const void* pointer) {
    auto after = first_after(pointer);
    if (after == allocations().begin()) {
        return nullptr;
    }
    Allocation* found = &*(after - 1);
    const char* p = (const char*)pointer;
    return p < found->data + found->bytes || p == found->data ? found : nullptr;
}

// Removes the allocation of this kind that starts at `pointer` from the list; false if none does.
static bool allocation_remove(void* pointer, MemoryKind kind) {
    Allocation* found = allocation_of(pointer);
    if (!found || found->data != pointer || found->kind != kind) {
        return false;
    }
    if (kind == MEMORY_DEVICE) {
        device_memory_give(found->bytes);
    }
    allocations().erase(allocations().begin() + (found - allocations().data()));
    return true;
}

extern "C" void cusim_check_kernel_pointer(const void* pointer, int argument, const void* kernel) {
    if (pointer && !allocation_of(pointer)) {
        cusim_die("argument %d of kernel %s is %p, which is not device or pinned memory", argument,
                  kernel_name(kernel), pointer);
    }
}

// ---- CUSIM_PROTECT ----

// Device memory comes from one range of addresses that faults except while work of a stream runs.
// Freed memory is never reused.

static const size_t ARENA_BYTES = (size_t)16 << 30;
enum { PAGE_BYTES = 4096, ALIGNED_BYTES = 256 };
static char* arena = nullptr;
static size_t arena_used = 0;
static int device_depth = 0; // graphs nest

static void on_fault(int, siginfo_t* info, void*) {
    const char* address = (const char*)info->si_addr;
    if (address >= arena && address < arena + ARENA_BYTES) {
        fprintf(stderr, "CUSIM ERROR: host code touched device memory at %p\n", (const void*)address);
    } else {
        fprintf(stderr, "CUSIM ERROR: segmentation fault at %p%s\n", (const void*)address,
                engine.body ? " inside a kernel" : "");
    }
    void* frames[24];
    backtrace_symbols_fd(frames, backtrace(frames, 24), STDERR_FILENO);
    _exit(139);
}

static void arena_open() {
    arena = (char*)mmap(nullptr, ARENA_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena == MAP_FAILED) {
        cusim_die("no address space for CUSIM_PROTECT");
    }
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
}

static void arena_set_rights(int rights) {
    if (mprotect(arena, arena_used, rights)) {
        cusim_die("mprotect failed");
    }
}

static char* arena_alloc(size_t bytes) {
    if (!arena) {
        arena_open();
    }
    const size_t pages = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    char* data = arena + arena_used;
    arena_used += pages + PAGE_BYTES; // with an unused page between allocations
    if (arena_used > ARENA_BYTES) {
        cusim_die("more than %zu MiB of device memory were allocated with CUSIM_PROTECT", ARENA_BYTES >> 20);
    }
    mprotect(data, pages, PROT_READ | PROT_WRITE);
    memset(data, 0xff, pages);
    if (!device_depth) {
        mprotect(data, pages, PROT_NONE);
    }
    return data;
}

void device_memory_open() {
    if (config.protect && arena && device_depth++ == 0) {
        arena_set_rights(PROT_READ | PROT_WRITE);
    }
}
void device_memory_close() {
    if (config.protect && arena && --device_depth == 0) {
        arena_set_rights(PROT_NONE);
    }
}

// ---- allocation ----

// Returns memory for a dry run, which touches none of it: as much as a GPU has, more than this
// machine. Never freed.
static char* address_space(size_t bytes) {
    void* data = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return data == MAP_FAILED ? nullptr : (char*)data;
}

// Returns memory at a multiple of 256 bytes, and of no more: nothing else is promised. The
// allocation ends where the memory does.
static char* barely_aligned(size_t bytes) {
    void* data = nullptr;
    return posix_memalign(&data, 2 * ALIGNED_BYTES, ALIGNED_BYTES + bytes) ? nullptr
                                                                           : (char*)data + ALIGNED_BYTES;
}
static void free_barely_aligned(void* data) { free((char*)data - ALIGNED_BYTES); }

// Allocates the exact size, so that the first byte after it is in AddressSanitizer's red zone.
static char* device_alloc(size_t bytes) {
    if (config.protect) {
        return arena_alloc(bytes);
    }
    if (config.dry) {
        return address_space(bytes);
    }
    char* data = barely_aligned(bytes);
    if (data && !__msan_init) {
        memset(data, 0xff, bytes); // NaN, or -1; MemorySanitizer knows that it is not initialized
    }
    return data;
}

extern "C" {

cudaError_t CUDARTAPI cudaMalloc(void** out, size_t bytes) {
    if (!out) {
        return failed(cudaErrorInvalidValue);
    }
    const cudaError_t error = synchronizing_call();
    if (error != cudaSuccess) {
        return error;
    }
    if (!device_memory_take(bytes)) {
        return failed(cudaErrorMemoryAllocation);
    }
    char* data = device_alloc(bytes);
    if (!data) {
        device_memory_give(bytes);
        return failed(cudaErrorMemoryAllocation);
    }
    allocation_add(data, bytes, MEMORY_DEVICE);
    *out = data;
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaFree(void* data) {
    if (!data) {
        return cudaSuccess;
    }
    expect_idle("cudaFree", nullptr);
    const cudaError_t error = cudaDeviceSynchronize();
    if (error != cudaSuccess) {
        return error;
    }
    if (!allocation_remove(data, MEMORY_DEVICE)) {
        return failed(cudaErrorInvalidValue);
    }
    if (!config.protect && !config.dry) {
        free_barely_aligned(data);
    }
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaHostAlloc(void** out, size_t bytes, unsigned) {
    const cudaError_t error = synchronizing_call();
    if (error != cudaSuccess) {
        return error;
    }
    char* data = bytes > pinned_memory_bytes() ? nullptr : barely_aligned(bytes);
    if (!data) {
        return failed(cudaErrorMemoryAllocation);
    }
    allocation_add(data, bytes, MEMORY_HOST);
    *out = data;
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMallocHost(void** out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }

cudaError_t CUDARTAPI cudaFreeHost(void* data) {
    if (!data) {
        return cudaSuccess;
    }
    expect_idle("cudaFreeHost", nullptr);
    const cudaError_t error = cudaDeviceSynchronize();
    if (error != cudaSuccess) {
        return error;
    }
    if (!allocation_remove(data, MEMORY_HOST)) {
        return failed(cudaErrorInvalidValue);
    }
    free_barely_aligned(data);
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaHostRegister(void* data, size_t bytes, unsigned) {
    if (!data || !bytes) {
        return failed(cudaErrorInvalidValue);
    }
    if (allocation_of(data)) {
        return failed(cudaErrorHostMemoryAlreadyRegistered);
    }
    if (bytes > pinned_memory_bytes()) {
        return failed(cudaErrorMemoryAllocation);
    }
    allocation_add((char*)data, bytes, MEMORY_REGISTERED);
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaHostUnregister(void* data) {
    cudaDeviceSynchronize();
    return allocation_remove(data, MEMORY_REGISTERED) ? cudaSuccess
                                                      : failed(cudaErrorHostMemoryNotRegistered);
}

cudaError_t CUDARTAPI cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    *total_bytes = device_memory_bytes();
    *free_bytes = *total_bytes > device_bytes_used() ? *total_bytes - device_bytes_used() : 0;
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    const Allocation* found = allocation_of(pointer);
    const bool on_device = found && found->kind == MEMORY_DEVICE;
    memset((void*)attributes, 0, sizeof(*attributes));
    attributes->type = !found      ? cudaMemoryTypeUnregistered
                       : on_device ? cudaMemoryTypeDevice
                                   : cudaMemoryTypeHost;
    attributes->device = found ? 0 : -2; // cudaInvalidDeviceId
    attributes->devicePointer = found ? (void*)pointer : nullptr;
    attributes->hostPointer = on_device ? nullptr : (void*)pointer;
    return cudaSuccess;
}
}

// ---- copies ----

typedef enum { WANT_ANY, WANT_HOST, WANT_DEVICE } Want;

static void check_range(const void* pointer, size_t bytes, Want want, const char* what) {
    const Allocation* found = allocation_of(pointer);
    const bool on_device = found && found->kind == MEMORY_DEVICE;
    if (found && (const char*)pointer + bytes > found->data + found->bytes) {
        cusim_die("%s: %zu bytes at %p run past the end of a %zu-byte allocation", what, bytes, pointer,
                  found->bytes);
    }
    if (want == WANT_DEVICE && !on_device) {
        cusim_die("%s: %p is not device memory", what, pointer);
    }
    if (want == WANT_HOST && on_device) {
        cusim_die("%s: %p is device memory, host expected", what, pointer);
    }
}

typedef struct {
    char* to;
    const char* from;
    size_t to_pitch, from_pitch, width, height; // bytes; rows
    cudaMemcpyKind kind;
} Copy;

static void copy_check(const Copy& c) {
    const bool to_device = c.kind == cudaMemcpyHostToDevice || c.kind == cudaMemcpyDeviceToDevice;
    const bool from_device = c.kind == cudaMemcpyDeviceToHost || c.kind == cudaMemcpyDeviceToDevice;
    const bool any = c.kind == cudaMemcpyDefault;
    check_range(c.to, (c.height - 1) * c.to_pitch + c.width,
                any         ? WANT_ANY
                : to_device ? WANT_DEVICE
                            : WANT_HOST,
                "cudaMemcpy dst");
    check_range(c.from, (c.height - 1) * c.from_pitch + c.width,
                any           ? WANT_ANY
                : from_device ? WANT_DEVICE
                              : WANT_HOST,
                "cudaMemcpy src");
}

static const char* copy_name(cudaMemcpyKind kind) {
    return kind == cudaMemcpyHostToDevice     ? "to the device"
           : kind == cudaMemcpyDeviceToHost   ? "to the host"
           : kind == cudaMemcpyDeviceToDevice ? "on the device"
                                              : "anywhere";
}

// Copies, in a dry run, only what the host will read: zeros.
static void copy_run_dry(const Copy& c) {
    const Allocation* to = allocation_of(c.to);
    for (size_t row = 0; row < c.height && !(to && to->kind == MEMORY_DEVICE); row++) {
        memset(c.to + row * c.to_pitch, 0, c.width);
    }
}

static void copy_run(const Copy& c) {
    trace_line("{\"copy\":\"%s\",\"bytes\":%zu}", copy_name(c.kind), c.width * c.height);
    if (config.dry) {
        copy_run_dry(c);
        return;
    }
    for (size_t row = 0; row < c.height; row++) {
        const char* from = c.from + row * c.from_pitch;
        if (c.kind == cudaMemcpyDeviceToHost && __msan_check_mem_is_initialized) {
            __msan_check_mem_is_initialized(from, c.width);
        }
        memcpy(c.to + row * c.to_pitch, from, c.width);
    }
}

// Queues a copy. Pageable memory, too, is read and written at some later time: the toolkit says
// that such a copy "might be synchronous".
static cudaError_t copy_enqueue(Copy c, cudaStream_t stream) {
    if (c.width == 0 || c.height == 0) {
        return cudaSuccess;
    }
    if (c.to_pitch < c.width || c.from_pitch < c.width) {
        return failed(cudaErrorInvalidPitchValue);
    }
    const cudaError_t error = stream_accepts(stream);
    if (error != cudaSuccess) {
        return error;
    }
    copy_check(c);
    cusim_enqueue(stream, true, [c] { copy_run(c); });
    return cudaSuccess;
}

// Copies and waits, in the forms without a stream.
static cudaError_t copy_now(Copy c) {
    const cudaError_t error = synchronizing_call();
    if (error != cudaSuccess) {
        return error;
    }
    const cudaError_t result = copy_enqueue(c, nullptr);
    stream_drain(nullptr);
    return result;
}

extern "C" {

cudaError_t CUDARTAPI cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                      cudaStream_t stream) {
    return copy_enqueue({(char*)to, (const char*)from, bytes, bytes, bytes, 1, kind}, stream);
}
cudaError_t CUDARTAPI cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    return copy_now({(char*)to, (const char*)from, bytes, bytes, bytes, 1, kind});
}
cudaError_t CUDARTAPI cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                        size_t width, size_t height, cudaMemcpyKind kind,
                                        cudaStream_t stream) {
    return copy_enqueue({(char*)to, (const char*)from, to_pitch, from_pitch, width, height, kind}, stream);
}
cudaError_t CUDARTAPI cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                   size_t width, size_t height, cudaMemcpyKind kind) {
    return copy_now({(char*)to, (const char*)from, to_pitch, from_pitch, width, height, kind});
}

cudaError_t CUDARTAPI cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    const cudaError_t error = stream_accepts(stream);
    if (error != cudaSuccess || bytes == 0) {
        return error;
    }
    check_range(to, bytes, WANT_DEVICE, "cudaMemset");
    cusim_enqueue(stream, true, [=] {
        trace_line("{\"memset\":%zu}", bytes);
        if (!config.dry) {
            memset(to, value, bytes);
        }
    });
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemset(void* to, int value, size_t bytes) {
    return cudaMemsetAsync(to, value, bytes, nullptr);
}
}
