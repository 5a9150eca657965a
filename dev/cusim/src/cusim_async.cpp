// cusim_async.cpp -- work that the hardware does on its own and kernels wait for later: cp.async,
// wgmma, mbarriers and cp.async.bulk. All of it happens as late as the program allows, when a
// thread waits for it, so that a forgotten wait reads garbage. llmc/gpu/ptx.cuh wraps the
// instructions and calls these functions.
#include "cusim_internal.h"

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

// ---- wgmma ----

extern "C" void cusim_defer(void (*run)(void*, uint64_t, uint64_t), void* data, uint64_t a, uint64_t b) {
    HostScope as_host;
    DeviceThread* thread = engine.current;
    thread->deferred.push_back({run, data, a, b, thread->deferred_group});
}

extern "C" void cusim_defer_commit(void) { engine.current->deferred_group++; }

extern "C" void cusim_defer_wait(int groups_left) {
    DeviceThread* thread = engine.current;
    std::vector<DeferredCall>& deferred = thread->deferred;
    size_t done = 0;
    while (done < deferred.size() && deferred[done].group < thread->deferred_group - groups_left) {
        const DeferredCall& call = deferred[done++];
        call.run(call.data, call.a, call.b);
    }
    HostScope as_host;
    deferred.erase(deferred.begin(), deferred.begin() + (long)done);
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

extern "C" void cusim_mbar_init(uint64_t* address, unsigned count) {
    const Mbarrier barrier = {0, (uint16_t)count, (uint16_t)count};
    memcpy(address, &barrier, sizeof(barrier));
}

extern "C" void cusim_mbar_arrive(uint64_t* address, unsigned expected_bytes, const char* file, int line) {
    Mbarrier* barrier = mbarrier_at(address);
    if (!barrier->pending) {
        cusim_die("%s:%d: mbarrier over-arrived", file, line);
    }
    barrier->bytes_to_come += (int)expected_bytes;
    barrier->pending--;
    tsan_release(address);
    mbarrier_perhaps_flip(address);
}

// ---- cp.async.bulk ----

extern "C" void cusim_bulk_g2s(void* to, const void* from, unsigned bytes, uint64_t* barrier) {
    if (((uintptr_t)to | (uintptr_t)from | bytes) % 16) {
        cusim_die("cp.async.bulk: addresses and size must be multiples of 16");
    }
    std::vector<BulkCopy>& copies = engine.current->block->bulk_copies;
    tsan_release(&copies);
    HostScope as_host;
    copies.push_back({(char*)to, (const char*)from, bytes, barrier});
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
        memcpy(copy.to, copy.from, copy.bytes);
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
    while ((mbarrier_at(address)->count_and_phase & PHASE_BIT ? 1u : 0u) == parity) {
        if (!do_bulk_copy(address)) {
            cusim_yield();
        }
    }
    tsan_acquire(address);
}
