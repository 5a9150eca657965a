// cusim_barrier.cpp -- meetings of device threads: __syncthreads, named barriers, the grid's
// barrier, and the exchanges that all primitives of warps are made of.
#include "cusim_internal.h"

void barrier_reset(Barrier* barrier, unsigned threads) {
    barrier->arrived = 0;
    barrier->parity = 0;
    barrier->waiting.clear();
    barrier->waiting.reserve(threads);
}

static bool is_same_place(const char* file_a, int line_a, const char* file_b, int line_b) {
    return line_a == line_b && (file_a == file_b || strcmp(file_a, file_b) == 0);
}

// ---- blocks and grids ----

typedef enum { BARRIER_WAIT, BARRIER_ARRIVE } BarrierUse;
typedef struct {
    const char *name, *file;
    int line;
    // __syncthreads and grid.sync: all must come from the same line. bar.sync: from anywhere
    bool one_place;
} BarrierCall;

// Checks that all threads agree on the barrier. On the device __syncthreads in different branches
// happens to work on some architectures and to hang on others.
static void barrier_join(Barrier* barrier, unsigned expected, int kind, const BarrierCall* call) {
    if (barrier->arrived == 0) {
        barrier->expected = expected;
        barrier->file = call->file;
        barrier->line = call->line;
        barrier->accumulator = kind == CUSIM_BARRIER_AND;
    } else if (barrier->expected != expected ||
               (call->one_place && !is_same_place(barrier->file, barrier->line, call->file, call->line))) {
        cusim_die("%s:%d: divergent barrier: other threads of the block wait in %s at %s:%d", call->file,
                  call->line, call->name, barrier->file, barrier->line);
    }
}

static int combine(int kind, int accumulator, bool predicate) {
    switch (kind) {
    case CUSIM_BARRIER_COUNT:
        return accumulator + predicate;
    case CUSIM_BARRIER_OR:
        return accumulator | predicate;
    case CUSIM_BARRIER_AND:
        return accumulator & predicate;
    default:
        return accumulator;
    }
}

// Lets the others continue, as the last thread has arrived.
static void barrier_open(Barrier* barrier) {
    barrier->result[barrier->parity] = barrier->accumulator;
    barrier->arrived = 0;
    barrier->parity ^= 1;
    const size_t count = barrier->waiting.size();
    for (size_t i = 0; i < count; i++) {
        thread_wake(barrier->waiting[config.order == ORDER_DOWN ? count - 1 - i : i]);
    }
    barrier->waiting.clear();
}

// Returns the combined predicate, if it waits.
static int barrier_use(Barrier* barrier, unsigned expected, BarrierUse use, int kind, int predicate,
                       const BarrierCall& call) {
    barrier_join(barrier, expected, kind, &call);
    barrier_orders_proxies();
    barrier->accumulator = combine(kind, barrier->accumulator, predicate != 0);
    const int parity = barrier->parity;
    tsan_release(barrier->sync[parity]);
    if (++barrier->arrived == barrier->expected) {
        barrier_open(barrier);
        if (use == BARRIER_WAIT) {
            thread_perhaps_let_others_go();
        }
    } else if (use == BARRIER_WAIT) {
        barrier->waiting.push_back(engine.current);
        thread_wait(call.name, call.file, call.line);
    }
    if (use == BARRIER_WAIT) {
        tsan_acquire(barrier->sync[parity]);
    }
    return barrier->result[parity];
}

extern "C" void cusim_syncthreads(int kind, int predicate, int* result, const char* file, int line) {
    Block* block = engine.current->block;
    const int combined = barrier_use(&block->barriers[0], block->threads, BARRIER_WAIT, kind, predicate,
                                     {"__syncthreads", file, line, true});
    if (result) {
        *result = combined;
    }
}

static Barrier* named_barrier(int id, int threads, const char* file, int line) {
    if (id < 0 || id > 15 || threads <= 0 || threads % 32) {
        cusim_die("%s:%d: barrier %d for %d threads; wanted an id from 0 to 15 and a multiple of 32", file,
                  line, id, threads);
    }
    return &engine.current->block->barriers[id];
}

extern "C" void cusim_bar_sync(int id, int threads, const char* file, int line) {
    barrier_use(named_barrier(id, threads, file, line), (unsigned)threads, BARRIER_WAIT, CUSIM_BARRIER_PLAIN,
                0, {"bar.sync", file, line, false});
}

extern "C" void cusim_bar_arrive(int id, int threads, const char* file, int line) {
    barrier_use(named_barrier(id, threads, file, line), (unsigned)threads, BARRIER_ARRIVE,
                CUSIM_BARRIER_PLAIN, 0, {"bar.arrive", file, line, false});
}

extern "C" void cusim_grid_sync(const char* file, int line) {
    if (!engine.cooperative) {
        cusim_die("%s:%d: grid sync in a kernel not launched cooperatively", file, line);
    }
    barrier_use(&engine.grid, engine.count, BARRIER_WAIT, CUSIM_BARRIER_PLAIN, 0,
                {"grid.sync", file, line, true});
}

// For ThreadSanitizer, a fence comes after all earlier fences. That is more order than the device
// promises, where an atomic must carry it from one thread to another; but a program with too few
// fences is detected.
extern "C" void cusim_fence(int scope) {
    static char device[8];
    void* sync = scope == CUSIM_FENCE_DEVICE ? (void*)device : (void*)&engine.current->block->fence;
    tsan_acquire(sync);
    tsan_release(sync);
}

// ---- warps ----

extern "C" unsigned cusim_lane(void) { return engine.current->lane; }

extern "C" unsigned cusim_activemask(void) {
    const Warp* warp = engine.current->warp;
    return warp->present & ~warp->exited;
}

// A thread that spins this long waits for something that will not happen.
extern "C" void cusim_yield(void) {
    if (++engine.spins > 20000000ul) {
        die_of_deadlock();
    }
    engine.current->why = "spin";
    engine.last_warp = nullptr; // or greedy order would return to it at once
    thread_make_ready(engine.current);
    thread_switch_away();
}

static void check_mask(unsigned mask, const char* file, int line) {
    const Warp* warp = engine.current->warp;
    const unsigned lane = engine.current->lane;
    if (!(mask >> lane & 1)) {
        cusim_die("%s:%d: lane %u calls a warp primitive with mask %08x that does not name it", file, line,
                  lane, mask);
    }
    if (mask & (~warp->present | warp->exited)) {
        cusim_die(
            "%s:%d: warp mask %08x names lanes that do not exist or have exited (present %08x, exited %08x)",
            file, line, mask, warp->present, warp->exited);
    }
}

// Returns the meeting of this mask, or a free one.
static Rendezvous* find_meeting(Warp* warp, unsigned mask, const char* file, int line) {
    Rendezvous* unused = nullptr;
    for (Rendezvous& meeting : warp->meeting) {
        if (meeting.mask == mask) {
            return &meeting;
        }
        if (!unused && !meeting.arrived) {
            unused = &meeting;
        }
    }
    if (!unused) {
        cusim_die("%s:%d: too many warp masks in flight", file, line);
    }
    unused->mask = mask;
    return unused;
}

static void meeting_join(Rendezvous* meeting, int op, const char* file, int line) {
    if (!meeting->arrived) {
        meeting->op = op;
        meeting->file = file;
        meeting->line = line;
    } else if (meeting->op != op || !is_same_place(meeting->file, meeting->line, file, line)) {
        cusim_die("%s:%d: divergent warp primitive: lanes %08x wait at %s:%d", file, line, meeting->arrived,
                  meeting->file, meeting->line);
    }
}

static void meeting_end(Rendezvous* meeting) {
    const unsigned mask = meeting->mask;
    meeting->arrived = 0;
    meeting->parity ^= 1;
    for (int i = 0; i < 32; i++) {
        const int lane =
            config.order == ORDER_DOWN ? i : 31 - i; // the last one woken is the first to continue
        if (mask >> lane & 1 && meeting->waiting[lane] != engine.current) {
            thread_wake_in_warp(meeting->waiting[lane]);
        }
    }
    thread_perhaps_let_others_go();
}

// Stores a lane's value. Not by memcpy with an unknown size: it would take longer than all the
// rest, and ThreadSanitizer would see it as an access of the lane.
static void put_value(unsigned char slot[16], const void* value, unsigned bytes) {
    if (__msan_unpoison) { // the bytes after shorter values, which are copied along with them
        __msan_unpoison(slot, 16);
    }
    switch (bytes) {
    case 4:
        memcpy(slot, value, 4);
        break;
    case 8:
        memcpy(slot, value, 8);
        break;
    case 16:
        memcpy(slot, value, 16);
        break;
    default:
        for (unsigned i = 0; i < bytes; i++) {
            slot[i] = ((const unsigned char*)value)[i];
        }
    }
}

// Joins the running lane to the meeting of this mask, with a value.
static Rendezvous* meeting_begin(int op, unsigned mask, const void* value, unsigned bytes, const char* file, int line) {
    DeviceThread* thread = engine.current;
    check_mask(mask, file, line);
    Rendezvous* meeting = find_meeting(thread->warp, mask, file, line);
    meeting_join(meeting, op, file, line);
    put_value(meeting->values[meeting->parity] + 16 * thread->lane, value, bytes);
    meeting->arrived |= 1u << thread->lane;
    meeting->waiting[thread->lane] = thread;
    return meeting;
}

// Only __syncwarp orders memory. Shuffles and votes do not, and a kernel that relies on them for it
// has a race.
extern "C" const unsigned char* cusim_warp_exchange(int op, unsigned mask, const void* value, unsigned bytes,
                                                    const char* file, int line) {
    Rendezvous* meeting = meeting_begin(op, mask, value, bytes, file, line);
    const int parity = meeting->parity;
    if (op == CUSIM_SYNCWARP) {
        tsan_release(meeting->sync[parity]);
        barrier_orders_proxies();
    }
    if (meeting->arrived == mask) {
        meeting_end(meeting);
    } else {
        thread_wait(op == CUSIM_SYNCWARP ? "__syncwarp" : "a warp primitive", file, line);
    }
    if (op == CUSIM_SYNCWARP) {
        tsan_acquire(meeting->sync[parity]);
    }
    return meeting->values[parity];
}

extern "C" void cusim_warp_together(int op, void* mine, void (*together)(void* const lanes[32]), const char* file,
                                    int line) {
    Rendezvous* meeting = meeting_begin(op, 0xffffffffu, &mine, sizeof(mine), file, line);
    if (meeting->arrived != meeting->mask) {
        thread_wait("a warp primitive", file, line);
        return;
    }
    void* lanes[32];
    for (int lane = 0; lane < 32; lane++) {
        memcpy(&lanes[lane], meeting->values[meeting->parity] + 16 * lane, sizeof(void*));
    }
    together(lanes);
    meeting_end(meeting);
}
