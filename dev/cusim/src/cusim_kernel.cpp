// cusim_kernel.cpp -- launches: blocks in waves, their threads, their shared memory.
#include "cusim_internal.h"

#include <algorithm>

enum { SHARED_DEFAULT_BYTES = 48 << 10, SHARED_OPTIN_BYTES = 227 << 10 };

// ---- shared memory ----

// Under a sanitizer, and where blocks run together, each block gets its own allocations; otherwise
// all blocks reuse one, filled with garbage each time.

static const size_t GARBAGE_MAX_BYTES = (size_t)256 << 20;

static bool shared_is_fresh() { return sanitized() || engine.cooperative || config.wave > 1; }

static void fill_with_garbage(char* data, size_t bytes) {
    if (__msan_poison) {
        __msan_poison(data, bytes);
    } else {
        memset(data, 0xff, bytes); // NaN, or -1
    }
}

// Allocates memory aligned as the swizzled layouts of wgmma require.
static char* shared_new(size_t bytes) {
    void* data = nullptr;
    if (posix_memalign(&data, 1024, bytes ? bytes : 1)) {
        cusim_die("no memory for shared memory");
    }
    fill_with_garbage((char*)data, bytes ? bytes : 1);
    return (char*)data;
}

static char* array_from_cache(void* identity, size_t bytes) {
    for (SharedArray& cached : engine.array_cache) {
        if (cached.identity == identity && cached.bytes == bytes) {
            fill_with_garbage(cached.data, bytes);
            return cached.data;
        }
    }
    char* data = shared_new(bytes);
    engine.array_cache.push_back({identity, data, bytes});
    return data;
}

static char* dynamic_from_cache(size_t bytes) {
    if (engine.dynamic_cache_bytes < bytes) {
        free(engine.dynamic_cache);
        engine.dynamic_cache = shared_new(bytes);
        engine.dynamic_cache_bytes = bytes;
    } else if (bytes) {
        fill_with_garbage(engine.dynamic_cache, bytes);
    }
    return engine.dynamic_cache;
}

extern "C" void* cusim_smem_dynamic(void) { return engine.current->block->dynamic_shared; }

extern "C" unsigned cusim_shared_address(const void* pointer, const char* file, int line) {
    const Block* block = engine.current->block;
    const size_t offset = (size_t)((const char*)pointer - block->dynamic_shared);
    if (offset > block->dynamic_bytes) {
        cusim_die("%s:%d: %p is not in dynamic shared memory", file, line, pointer);
    }
    return (unsigned)offset + SHARED_DYNAMIC_AT;
}

char* shared_at(unsigned address, size_t bytes, const char* file, int line) {
    const Block* block = engine.current->block;
    const size_t offset = (size_t)address - SHARED_DYNAMIC_AT;
    if (address < SHARED_DYNAMIC_AT || offset + bytes > block->dynamic_bytes) {
        cusim_die("%s:%d: %zu bytes at shared address %#x: dynamic memory has %#x to %#zx", file, line, bytes,
                  address, (unsigned)SHARED_DYNAMIC_AT, SHARED_DYNAMIC_AT + block->dynamic_bytes);
    }
    return block->dynamic_shared + offset;
}

extern "C" unsigned cusim_smem_dynamic_size(void) { return (unsigned)engine.current->block->dynamic_bytes; }

struct DynamicLimit {
    const void* kernel;
    size_t bytes;
};
static std::vector<DynamicLimit>& dynamic_limits() {
    static auto* limits = new std::vector<DynamicLimit>;
    return *limits;
}

static DynamicLimit* dynamic_limit_of(const void* kernel) {
    for (DynamicLimit& limit : dynamic_limits()) {
        if (limit.kernel == kernel) {
            return &limit;
        }
    }
    return nullptr;
}

// Returns the bytes that cudaFuncSetAttribute allowed, or the 48 KiB that need no permission.
size_t kernel_dynamic_limit(const void* kernel) {
    const DynamicLimit* limit = dynamic_limit_of(kernel);
    return limit ? limit->bytes : SHARED_DEFAULT_BYTES;
}

// Returns the limit of static and dynamic memory together.
static size_t shared_limit(const void* kernel) {
    return dynamic_limit_of(kernel) ? SHARED_OPTIN_BYTES : SHARED_DEFAULT_BYTES;
}

// Checks that a block may have this much static memory beside its dynamic memory.
static void check_static_bytes(const Block* block, size_t bytes) {
    const size_t total = bytes + block->dynamic_bytes, most = shared_limit(engine.kernel);
    if (bytes > SHARED_DEFAULT_BYTES) {
        cusim_die("static shared memory of a block exceeds 48 KiB (%zu)", bytes);
    }
    if (total > most) {
        cusim_die("a block has %zu bytes of shared memory, %zu of them static; at most %zu were allowed",
                  total, bytes, most);
    }
}

// Returns the array of a declaration. The first thread to reach it allocates; for ThreadSanitizer
// this comes before the others' accesses to the array.
extern "C" void* cusim_smem_static(void* identity, size_t bytes) {
    Block* block = engine.current->block;
    size_t total = bytes;
    for (const SharedArray& array : block->arrays) {
        if (array.identity == identity) {
            tsan_acquire(array.data);
            return array.data;
        }
        total += array.bytes;
    }
    check_static_bytes(block, total);
    char* data;
    {
        HostScope as_host;
        data = shared_is_fresh() ? shared_new(bytes) : array_from_cache(identity, bytes);
        block->arrays.push_back({identity, data, bytes});
        tsan_release(data);
    }
    tsan_acquire(data);
    return data;
}

static void throw_away(char* data, size_t bytes) {
    engine.garbage.push_back(data);
    engine.garbage_bytes += bytes;
}

static void free_garbage() {
    tsan_acquire(engine.kernel_end);
    for (char* data : engine.garbage) {
        free(data);
    }
    engine.garbage.clear();
    engine.garbage_bytes = 0;
}

// ---- a wave: the blocks that run at the same time ----

static void warp_reset(Warp* warp, unsigned lanes) {
    warp->present = lanes >= 32 ? ~0u : (1u << lanes) - 1;
    warp->exited = 0;
    for (Rendezvous& meeting : warp->meeting) {
        meeting.mask = meeting.arrived = 0;
        meeting.parity = 0;
    }
}

static void block_reset(Block* block, unsigned long number, dim3 grid, unsigned threads,
                        size_t dynamic_bytes) {
    block->index = {(unsigned)(number % grid.x), (unsigned)(number / grid.x % grid.y),
                    (unsigned)(number / ((unsigned long)grid.x * grid.y))};
    block->threads = threads;
    for (Barrier& barrier : block->barriers) {
        barrier_reset(&barrier, threads);
    }
    const unsigned warps = (threads + 31) / 32;
    if (block->warps.size() < warps) {
        block->warps.resize(warps);
    }
    for (unsigned w = 0; w < warps; w++) {
        warp_reset(&block->warps[w], threads - 32 * w);
    }
    block->arrays.clear();
    block->bulk_copies.clear();
    block->mbarriers.clear();
    std::fill(block->marks.begin(), block->marks.end(), 0u);
    block->marked = block->registers = block->registers_set = 0;
    block->dynamic_bytes = dynamic_bytes;
    block->dynamic_shared = shared_is_fresh() ? shared_new(dynamic_bytes) : dynamic_from_cache(dynamic_bytes);
}

static void thread_reset(DeviceThread* thread, Block* block, unsigned i, dim3 shape) {
    thread->index = {i % shape.x, i / shape.x % shape.y, i / (shape.x * shape.y)};
    thread->lane = i % 32;
    thread->warp = &block->warps[i / 32];
    thread->block = block;
    thread->state = THREAD_NEW;
    thread->why = nullptr;
    thread->copy_group = 0;
    thread->stored.clear();
    thread->fenced.clear();
}

// Under ThreadSanitizer thread i of the next block must not run on the fiber of thread i of the
// last one, or the two would seem ordered, and a race between blocks would be missed. So fibers
// outnumber threads, and rotate.
static void give_tsan_fibers() {
    if (!__tsan_create_fiber) {
        return;
    }
    if (!engine.tsan_copy_engine) {
        engine.tsan_copy_engine = __tsan_create_fiber(0);
    }
    while (engine.tsan_fibers.size() < engine.count + 7) {
        engine.tsan_fibers.push_back(__tsan_create_fiber(0));
        engine.tsan_stacks.push_back(fiber_new());
    }
    for (unsigned i = 0; i < engine.count; i++) {
        const size_t k = (i + engine.tsan_rotation) % engine.tsan_fibers.size();
        engine.threads[i].tsan_fiber = engine.tsan_fibers[k];
        engine.threads[i].own_fiber = engine.tsan_stacks[k];
    }
    engine.tsan_rotation = (engine.tsan_rotation + 5) % 4096;
    engine.tsan_host = __tsan_get_current_fiber();
    tsan_release(engine.kernel_start);
}

// Reserves everything that device threads will need: they must not allocate.
static void reserve_for_wave(unsigned blocks, unsigned threads) {
    engine.count = engine.alive = blocks * threads;
    engine.started = 0;
    engine.spins = 0;
    if (engine.blocks.size() < blocks) {
        engine.blocks.resize(blocks);
    }
    if (engine.threads.size() < engine.count) {
        engine.threads.resize(engine.count);
        engine.order.resize(engine.count);
    }
    engine.ready.reset(engine.count);
    engine.idle_fibers.reserve(engine.count + 1);
    barrier_reset(&engine.grid, engine.count);
}

static void choose_order() {
    const auto first = engine.order.begin();
    for (unsigned i = 0; i < engine.count; i++) {
        first[i] = i;
    }
    if (config.order == ORDER_DOWN) {
        std::reverse(first, first + engine.count);
    }
    for (unsigned i = engine.count; config.order == ORDER_RANDOM && i > 1; i--) {
        std::swap(first[i - 1], first[random_below(i)]);
    }
}

static void block_end(Block* block) {
    wgmma_end(block);
    if (shared_is_fresh()) {
        throw_away(block->dynamic_shared, block->dynamic_bytes);
        for (const SharedArray& array : block->arrays) {
            throw_away(array.data, array.bytes);
        }
    }
    if (!block->bulk_copies.empty()) {
        cusim_die("block ended with a bulk copy in flight (kernel %s)", kernel_name(engine.kernel));
    }
}

static void run_wave(unsigned long first_block, unsigned blocks, dim3 grid, dim3 shape,
                     size_t dynamic_bytes) {
    const unsigned threads = shape.x * shape.y * shape.z;
    reserve_for_wave(blocks, threads);
    for (unsigned b = 0; b < blocks; b++) {
        block_reset(&engine.blocks[b], first_block + b, grid, threads, dynamic_bytes);
        for (unsigned i = 0; i < threads; i++) {
            thread_reset(&engine.threads[b * threads + i], &engine.blocks[b], i, shape);
        }
    }
    give_tsan_fibers();
    choose_order();
    DeviceThread* thread = thread_take_new();
    Fiber* fiber = thread_stack(thread);
    thread_begin(thread, fiber);
    fiber_switch(&engine.host, fiber, thread); // returns when all have ended
    engine.current = nullptr;
    for (unsigned b = 0; b < blocks; b++) {
        block_end(&engine.blocks[b]);
    }
    // Under ThreadSanitizer an address that the next block reuses would order the two: keep it for
    // later.
    if (!__tsan_init || engine.garbage_bytes > GARBAGE_MAX_BYTES) {
        free_garbage();
        tsan_release(engine.kernel_start);
    }
    engine.total_blocks += blocks;
    engine.total_threads += engine.count;
}

// ---- a kernel ----

// Order of the waves: which one runs as the i-th. In random order i -> i * factor + offset, a
// permutation if factor and the number of waves have no common divisor.
typedef struct {
    unsigned long count, factor, offset;
} WaveOrder;

static WaveOrder wave_order(unsigned long count) {
    WaveOrder order = {count, 1, 0};
    if (order_is_random() && count > 1) {
        order.offset = random_below((uint32_t)count);
        do {
            order.factor = 1 + random_below((uint32_t)count);
        } while (std::__gcd(order.factor, count) != 1);
    }
    return order;
}

static unsigned long wave_at(WaveOrder order, unsigned long i) {
    return config.order == ORDER_DOWN ? order.count - 1 - i : (i * order.factor + order.offset) % order.count;
}

struct KernelTime {
    const void* kernel;
    unsigned long launches;
    double s;
};
static std::vector<KernelTime>& kernel_times() {
    static auto* times = new std::vector<KernelTime>;
    return *times;
}
static void add_kernel_time(const void* kernel, double s) {
    for (KernelTime& time : kernel_times()) {
        if (time.kernel == kernel) {
            time.launches++;
            time.s += s;
            return;
        }
    }
    kernel_times().push_back({kernel, 1, s});
}

void kernel_run(const void* kernel, dim3 grid, dim3 block, size_t dynamic_bytes, bool cooperative,
                const std::function<void()>& body) {
    const unsigned long blocks = (unsigned long)grid.x * grid.y * grid.z;
    const unsigned long wave = cooperative ? blocks : (unsigned long)config.wave;
    const WaveOrder order = wave_order((blocks + wave - 1) / wave);
    const double start_s = config.stats ? now_s() : 0;
    fiber_learn_host_stack();
    engine.kernel = kernel;
    engine.body = &body;
    engine.cooperative = cooperative;
    gridDim = grid;
    blockDim = block;
    engine.total_launches++;
    trace_kernel(kernel, grid, block, dynamic_bytes);
    tsan_release(engine.kernel_start);
    for (unsigned long i = 0; i < order.count && !config.dry; i++) {
        const unsigned long first = wave_at(order, i) * wave;
        run_wave(first, (unsigned)std::min(wave, blocks - first), grid, block, dynamic_bytes);
    }
    engine.body = nullptr;
    free_garbage();
    if (config.stats) {
        add_kernel_time(kernel, now_s() - start_s);
    }
}

__attribute__((destructor)) static void print_stats() {
    if (!config.stats) {
        return;
    }
    fprintf(stderr, "cusim: %lu launches, %lu blocks, %lu threads, %lu switches, %u stacks\n",
            engine.total_launches, engine.total_blocks, engine.total_threads, engine.total_switches,
            engine.fibers);
    for (const KernelTime& time : kernel_times()) {
        fprintf(stderr, "  %-60.60s %6lu x %9.1f us\n", kernel_name(time.kernel), time.launches,
                1e6 * time.s / (double)time.launches);
    }
}

// ---- launching ----

extern "C" cudaError_t CUDARTAPI cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute,
                                                      int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) {
        return cudaSuccess; // hints
    }
    if (value < 0 || value > SHARED_OPTIN_BYTES) {
        return failed(cudaErrorInvalidValue);
    }
    DynamicLimit* limit = dynamic_limit_of(kernel);
    if (limit) {
        limit->bytes = (size_t)value;
    } else {
        dynamic_limits().push_back({kernel, (size_t)value});
    }
    return cudaSuccess;
}

static bool is_cooperative(const cudaLaunchConfig_t* launch) {
    for (unsigned i = 0; i < launch->numAttrs; i++) {
        if (launch->attrs[i].id == cudaLaunchAttributeCooperative && launch->attrs[i].val.cooperative) {
            return true;
        }
    }
    return false;
}

static bool is_possible(dim3 grid, dim3 block) {
    const size_t threads = (size_t)block.x * block.y * block.z;
    return grid.x && grid.y && grid.z && grid.x <= 0x7fffffffu && grid.y <= 65535 && grid.z <= 65535 &&
           threads && threads <= 1024 && block.z <= 64;
}

extern "C" cudaError_t cusim_launch(const cudaLaunchConfig_t* launch, const void* kernel,
                                    std::function<void()>* body) {
    const dim3 grid = launch->gridDim, block = launch->blockDim;
    const size_t dynamic_bytes = launch->dynamicSmemBytes;
    const bool cooperative = is_cooperative(launch);
    if (!is_possible(grid, block)) {
        return failed(cudaErrorInvalidConfiguration);
    }
    if (dynamic_bytes > kernel_dynamic_limit(kernel)) {
        return failed(cudaErrorInvalidValue);
    }
    const cudaError_t error = stream_accepts(launch->stream);
    if (error != cudaSuccess) {
        return error;
    }
    const char* slow = getenv("CUSIM_SLOW_KERNELS");
    const double more_s = slow && strstr(kernel_name(kernel), slow) ? 1 : 0;
    cusim_enqueue(launch->stream, true, [=, body = std::move(*body)] {
        kernel_run(kernel, grid, block, dynamic_bytes, cooperative, body);
        cusim_pass_time(more_s);
    });
    return cudaSuccess;
}
