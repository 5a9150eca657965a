// cusim_async.cpp -- copies that the hardware does on its own and kernels wait for later: cp.async,
// cp.async.bulk and TMA, with mbarriers. They happen as late as the program allows, when a thread
// waits for them, so that a forgotten wait reads garbage. llmc/gpu/ptx.cuh wraps the instructions
// and calls these functions.
#include "cusim_internal.h"

#include <cuda.h>
#include <cudaTypedefs.h>

// ---- cp.async ----

static void copy_with_zeros(char* to, const char* from, int bytes, int source_bytes) {
    memcpy(to, from, (size_t)source_bytes);
    memset(to + source_bytes, 0, (size_t)(bytes - source_bytes));
}

// Random and greedy orders do some copies at once: data that arrives early must do no harm either.
extern "C" void cusim_cp_async(void* to, const void* from, int bytes, int source_bytes) {
    if (((uintptr_t)to | (uintptr_t)from) % (unsigned)bytes) {
        cusim_die("cp.async: misaligned address");
    }
    if (__tsan_write_range) {
        // any access between now and the wait is a race
        __tsan_write_range(to, (unsigned long)bytes);
    }
    if (order_is_random() && random_below(2)) {
        copy_with_zeros((char*)to, (const char*)from, bytes, source_bytes);
        return;
    }
    HostScope as_host;
    DeviceThread* thread = engine.current;
    thread->copies.push_back({(char*)to, (const char*)from, bytes, source_bytes, thread->copy_group});
}

extern "C" void cusim_cp_async_commit(void) { engine.current->copy_group++; }

extern "C" void cusim_cp_async_wait(int groups_left) {
    DeviceThread* thread = engine.current;
    std::vector<AsyncCopy>& copies = thread->copies;
    size_t done = 0;
    while (done < copies.size() && copies[done].group < thread->copy_group - groups_left) {
        const AsyncCopy& copy = copies[done++];
        copy_with_zeros(copy.to, copy.from, copy.bytes, copy.source_bytes);
    }
    HostScope as_host;
    copies.erase(copies.begin(), copies.begin() + (long)done);
}

// ---- proxies ----

// Bytes that a thread stores for TMA or wgmma are marked until that thread has fenced them, and
// then reached a barrier. A store without the wrapper is not noticed.

static void marks_set(Block* block, unsigned mark, unsigned value) {
    block->marked += !!value;
    block->marked -= !!block->marks[mark];
    block->marks[mark] = value;
}

static unsigned thread_mark() { return (unsigned)(engine.current - engine.threads.data()) + 1; }

extern "C" void cusim_store_for_async(const void* to, unsigned bytes, const char* file, int line) {
    HostScope as_host;
    DeviceThread* thread = engine.current;
    Block* block = thread->block;
    const unsigned first = cusim_shared_address(to, file, line) - SHARED_DYNAMIC_AT;
    block->marks.resize(block->dynamic_bytes / 16 + 1);
    for (unsigned mark = first / 16; mark <= (first + bytes - 1) / 16; mark++) {
        marks_set(block, mark, thread_mark());
        thread->stored.push_back(mark);
    }
}

extern "C" void cusim_fence_async(void) {
    HostScope as_host;
    DeviceThread* thread = engine.current;
    thread->fenced.insert(thread->fenced.end(), thread->stored.begin(), thread->stored.end());
    thread->stored.clear();
}

void marks_publish(DeviceThread* thread) {
    for (unsigned mark : thread->fenced) {
        if (thread->block->marks[mark] == thread_mark()) {
            marks_set(thread->block, mark, 0);
        }
    }
    for (unsigned mark : thread->stored) { // stored again, without a fence
        marks_set(thread->block, mark, thread_mark());
    }
    thread->fenced.clear();
}

bool shared_is_marked(const char* from, size_t bytes) {
    const Block* block = engine.current->block;
    if (block->marked == 0) {
        return false;
    }
    const size_t first = (size_t)(from - block->dynamic_shared);
    for (size_t mark = first / 16; mark <= (first + bytes - 1) / 16; mark++) {
        if (block->marks[mark]) {
            return true;
        }
    }
    return false;
}

// ---- mbarrier ----

// A barrier in 8 bytes of shared memory. A phase ends when all threads and all expected bytes have
// arrived.

struct Mbarrier {
    int32_t bytes_to_come;
    uint16_t pending;
    uint16_t count_and_phase; // the highest bit is the phase
};
static_assert(sizeof(Mbarrier) == sizeof(uint64_t), "size of an mbarrier");
enum { PHASE_BIT = 0x8000 };

static Mbarrier* mbarrier_at(uint64_t* address) { return (Mbarrier*)address; }

static void mbarrier_perhaps_flip(uint64_t* address) {
    Mbarrier* barrier = mbarrier_at(address);
    if (barrier->pending == 0 && barrier->bytes_to_come == 0) {
        barrier->count_and_phase ^= PHASE_BIT;
        barrier->pending = barrier->count_and_phase & (PHASE_BIT - 1);
        engine.spins = 0;
    }
}

// Returns the entry of a barrier of the running block, or NULL.
static BarrierInMemory* mbarrier_find(const uint64_t* address) {
    for (BarrierInMemory& barrier : engine.current->block->mbarriers) {
        if (barrier.address == address) {
            return &barrier;
        }
    }
    return nullptr;
}

static void mbarrier_check(const uint64_t* address, const char* file, int line) {
    if (!mbarrier_find(address)) {
        cusim_die("%s:%d: no mbarrier was set up at this address", file, line);
    }
}

extern "C" void cusim_mbar_init(uint64_t* address, unsigned count) {
    const Mbarrier barrier = {0, (uint16_t)count, (uint16_t)count};
    memcpy(address, &barrier, sizeof(barrier));
    HostScope as_host;
    if (!mbarrier_find(address)) {
        engine.current->block->mbarriers.push_back({address, false});
    }
}

extern "C" void cusim_mbar_publish(void) {
    for (BarrierInMemory& barrier : engine.current->block->mbarriers) {
        barrier.is_published = true;
    }
}

extern "C" void cusim_mbar_arrive(uint64_t* address, unsigned expected_bytes, const char* file, int line) {
    Mbarrier* barrier = mbarrier_at(address);
    mbarrier_check(address, file, line);
    barrier_orders_proxies();
    if (!barrier->pending) {
        cusim_die("%s:%d: mbarrier over-arrived", file, line);
    }
    barrier->bytes_to_come += (int)expected_bytes;
    barrier->pending--;
    tsan_release(address);
    mbarrier_perhaps_flip(address);
}

// ---- cp.async.bulk, and TMA ----

static bool do_bulk_copy(uint64_t* barrier);

static void copy_begin(const BulkCopy& copy) {
    std::vector<BulkCopy>& copies = engine.current->block->bulk_copies;
    tsan_release(&copies);
    HostScope as_host;
    copies.push_back(copy);
}

extern "C" void cusim_bulk_g2s(void* to, const void* from, unsigned bytes, uint64_t* barrier) {
    if (((uintptr_t)to | (uintptr_t)from | bytes) % 16) {
        cusim_die("cp.async.bulk: addresses and size must be multiples of 16");
    }
    copy_begin({(char*)to, (const char*)from, bytes, barrier, {}, {}});
    if (order_is_random() && random_below(2)) {
        do_bulk_copy(barrier);
    }
}

static TensorMap tensor_map_of(const void* map) {
    TensorMap tensor;
    memcpy(&tensor, map, sizeof(tensor));
    return tensor;
}

static unsigned box_bytes(const TensorMap& map) {
    unsigned bytes = map.element_bytes;
    for (int i = 0; i < map.rank; i++) {
        bytes *= map.box[i];
    }
    return bytes;
}

extern "C" void cusim_check_tensor_map(const void* map, int argument, const void* kernel) {
    const TensorMap tensor = tensor_map_of(map);
    if (tensor.magic != TENSOR_MAGIC || !allocation_of(tensor.data)) {
        cusim_die("argument %d of kernel %s is no map of a tensor in device memory", argument,
                  kernel_name(kernel));
    }
}

extern "C" void cusim_tma_load(void* to, const void* map, int rank, const int* at, uint64_t* barrier,
                               const char* file, int line) {
    const TensorMap tensor = tensor_map_of(map);
    const BarrierInMemory* known = mbarrier_find(barrier);
    if (tensor.magic != TENSOR_MAGIC || tensor.rank != rank || (uintptr_t)map % alignof(CUtensorMap)) {
        cusim_die("%s:%d: TMA: no map of a tensor of %d dimensions, or a misaligned one", file, line, rank);
    }
    if (!known || !known->is_published) {
        cusim_die("%s:%d: TMA: its mbarrier was not set up and published", file, line);
    }
    const unsigned address = cusim_shared_address(to, file, line);
    if (address % 1024) {
        cusim_die("%s:%d: TMA: to shared address %#x; wanted a multiple of 1024", file, line, address);
    }
    shared_at(address, box_bytes(tensor), file, line);
    BulkCopy copy = {(char*)to, nullptr, box_bytes(tensor), barrier, tensor, {}};
    for (int i = 0; i < rank; i++) {
        copy.at[i] = at[i];
    }
    copy_begin(copy);
    if (order_is_random() && random_below(2)) {
        do_bulk_copy(barrier);
    }
}

// Returns the row of a box in the tensor, at column 0; NULL if it is outside.
static const char* box_row(const BulkCopy& copy, unsigned row) {
    const TensorMap& map = copy.map;
    const char* from = map.data;
    for (int i = 1; i < map.rank; i++) {
        const long at = copy.at[i] + (long)(row % map.box[i]);
        row /= map.box[i];
        if (at < 0 || (uint64_t)at >= map.sizes[i]) {
            return nullptr;
        }
        from += (uint64_t)at * map.strides[i - 1];
    }
    return from;
}

// Copies 16 bytes of a row of the tensor, from `column` on; zeros outside.
static void copy_piece(char* to, const char* row, const TensorMap& map, long column) {
    for (unsigned i = 0; i < 16u / map.element_bytes; i++) {
        const long at = column + (long)i;
        const bool is_inside = row && at >= 0 && (uint64_t)at < map.sizes[0];
        const char* from = is_inside ? row + at * map.element_bytes : nullptr;
        for (unsigned byte = 0; byte < map.element_bytes; byte++) {
            *to++ = is_inside ? from[byte] : 0;
        }
    }
}

// Copies a box. Bits 4 to 6 of the address of each 16 bytes are swizzled by bits 7 to 9.
static void copy_box(const BulkCopy& copy) {
    const unsigned start = (unsigned)(copy.to - engine.current->block->dynamic_shared) + SHARED_DYNAMIC_AT,
                   row_bytes = (unsigned)copy.map.box[0] * copy.map.element_bytes;
    if (!allocation_of(copy.map.data)) {
        cusim_die("TMA: the tensor at %p was freed", (const void*)copy.map.data);
    }
    if (shared_is_marked(copy.to, copy.bytes)) {
        cusim_die("TMA writes where a thread stored; wanted a fence_async and a barrier before");
    }
    if (__tsan_write_range) {
        __tsan_write_range(copy.to, copy.bytes);
    }
    for (unsigned i = 0; i < copy.bytes; i += 16) {
        const unsigned address = start + i;
        char piece[16];
        copy_piece(piece, box_row(copy, i / row_bytes), copy.map,
                   copy.at[0] + (long)(i % row_bytes / copy.map.element_bytes));
        memcpy(shared_at(address ^ (address >> 7 & 7) << 4, 16, __FILE__, __LINE__), piece, 16);
    }
}

// Does one copy that completes on this barrier, by the copy engine: for ThreadSanitizer it comes
// after the issue, and before whoever waits on the barrier.
static bool do_bulk_copy(uint64_t* barrier) {
    std::vector<BulkCopy>& copies = engine.current->block->bulk_copies;
    for (size_t i = 0; i < copies.size(); i++) {
        if (copies[i].barrier != barrier) {
            continue;
        }
        const BulkCopy copy = copies[i];
        {
            HostScope as_host;
            copies.erase(copies.begin() + (long)i);
        }
        HostScope as_copy_engine(engine.tsan_copy_engine);
        tsan_acquire(&copies);
        if (copy.from) {
            memcpy(copy.to, copy.from, copy.bytes);
        } else {
            copy_box(copy);
        }
        tsan_release(barrier);
        mbarrier_at(barrier)->bytes_to_come -= (int)copy.bytes;
        mbarrier_perhaps_flip(barrier);
        return true;
    }
    return false;
}

extern "C" void cusim_mbar_wait(uint64_t* address, unsigned parity, const char* file, int line) {
    engine.current->file = file;
    engine.current->line = line;
    mbarrier_check(address, file, line);
    while ((mbarrier_at(address)->count_and_phase & PHASE_BIT ? 1u : 0u) == parity) {
        if (!do_bulk_copy(address)) {
            cusim_yield();
        }
    }
    tsan_acquire(address);
}

// ---- maps of tensors ----

// Returns whether the driver's manual allows the map.
static bool map_is_valid(const TensorMap& map, const cuuint32_t* box, const cuuint32_t* steps) {
    bool ok = map.rank >= 1 && map.rank <= TENSOR_RANK_MAX && (uintptr_t)map.data % 16 == 0 &&
              box[0] * map.element_bytes % 16 == 0 && box[0] * map.element_bytes <= 128;
    for (int i = 0; ok && i < map.rank; i++) {
        ok = map.sizes[i] >= 1 && map.sizes[i] <= (uint64_t)1 << 32 && box[i] >= 1 && box[i] <= 256 &&
             steps[i] >= 1 && steps[i] <= 8;
    }
    for (int i = 0; ok && i < map.rank - 1; i++) {
        const uint64_t before = i == 0 ? map.element_bytes : map.strides[i - 1];
        ok = map.strides[i] % 16 == 0 && map.strides[i] < (uint64_t)1 << 40 &&
             map.strides[i] >= before * map.sizes[i] && map.strides[i] % before == 0;
    }
    return ok;
}

// Returns the bytes from the first to the last element.
static size_t map_bytes(const TensorMap& map) {
    size_t bytes = map.sizes[0] * map.element_bytes;
    for (int i = 1; i < map.rank; i++) {
        bytes += (map.sizes[i] - 1) * map.strides[i - 1];
    }
    return bytes;
}

static CUresult CUDAAPI encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                                     const cuuint64_t* sizes, const cuuint64_t* strides,
                                     const cuuint32_t* box, const cuuint32_t* steps,
                                     CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                     CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    TensorMap tensor = {TENSOR_MAGIC, (uint8_t)rank, 2, {}, (const char*)data, {}, {}};
    if (rank < 1 || rank > TENSOR_RANK_MAX) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if ((type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 && type != CU_TENSOR_MAP_DATA_TYPE_FLOAT16) ||
        interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || swizzle != CU_TENSOR_MAP_SWIZZLE_128B ||
        fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || steps[0] != 1 || box[0] * 2 != 128) {
        cusim_die("cuTensorMapEncodeTiled: only boxes of 128 bytes of 16-bit elements are known here, with a "
                  "swizzle of 128 bytes and zeros outside");
    }
    for (cuuint32_t i = 0; i < rank; i++) {
        tensor.box[i] = (uint16_t)box[i];
        tensor.sizes[i] = sizes[i];
        if (i + 1 < rank) {
            tensor.strides[i] = strides[i];
        }
    }
    if (!map_is_valid(tensor, box, steps)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const Allocation* memory = allocation_of(data);
    if (!memory || (const char*)data + map_bytes(tensor) > memory->data + memory->bytes) {
        cusim_die("cuTensorMapEncodeTiled: a tensor of %zu bytes at %p is not in device memory",
                  map_bytes(tensor), data);
    }
    memset((void*)map, 0, sizeof(*map));
    memcpy((void*)map, &tensor, sizeof(tensor));
    return CUDA_SUCCESS;
}

extern "C" cudaError_t CUDARTAPI cudaGetDriverEntryPointByVersion(const char* symbol, void** function,
                                                                  unsigned, unsigned long long,
                                                                  cudaDriverEntryPointQueryResult* result) {
    const bool is_known = strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
    const PFN_cuTensorMapEncodeTiled_v12000 encode = encode_tiled;
    *function = is_known ? (void*)encode : nullptr;
    *result = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
