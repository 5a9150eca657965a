// cusim_wgmma.cpp -- matmuls by a warpgroup: operands from descriptors of shared memory or from
// registers, sums in registers.
//
// A matmul runs when its warp waits for it; in random orders sometimes at once. From its start to
// the wait the sums are NaN. Operands in registers must still have their values at the wait.
#include "cusim_internal.h"

enum { WARPS = 4, ROWS = 16, DEPTH = 16, WIDEST = 256 };
static const float IN_FLIGHT = __builtin_nanf("0x1dea");

// One matmul of a warp.
struct WgmmaCall {
    CusimWgmma of_lane[32];
    unsigned a[32][4]; // the left operand in registers, at the start
    int sums, group;
    bool is_done;
    const char* file;
    int line;
};

// Sums that are in flight: those of each lane, and their values as 16 x N.
struct WgmmaSums {
    float* of_lane[32];
    int N, calls; // calls that have not been waited for
    std::vector<float> values;
};

struct WgmmaWarp {
    std::vector<WgmmaCall> calls;
    std::vector<WgmmaSums> sums;
    int group;      // the group being filled
    bool is_fenced; // since the last wait
    unsigned long started;
    char sync[8]; // an address for ThreadSanitizer: reads before a wait come before what follows it
};

// Matmuls that the warps of a warpgroup have started: all must start the same ones. Entries that
// every warp has passed are dropped.
struct WgmmaGroup {
    std::vector<CusimWgmma> log;
    unsigned long dropped;
};

struct WgmmaState {
    std::vector<WgmmaWarp> warps;
    std::vector<WgmmaGroup> groups;
};

// Accesses to the registers of other lanes, which wait, are none for ThreadSanitizer.
struct RegisterScope {
    RegisterScope() {
        if (AnnotateIgnoreReadsBegin) {
            AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
            AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
        }
    }
    ~RegisterScope() {
        if (AnnotateIgnoreReadsBegin) {
            AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
            AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
        }
    }
};

static unsigned warp_number() {
    const DeviceThread* thread = engine.current;
    return (unsigned)(thread->warp - thread->block->warps.data());
}

static WgmmaState* state_of(Block* block) {
    if (!block->wgmma) {
        HostScope as_host;
        block->wgmma = new WgmmaState();
        block->wgmma->warps.resize(block->warps.size());
        block->wgmma->groups.resize(block->warps.size() / WARPS + 1);
    }
    return block->wgmma;
}

static WgmmaWarp* warp_state() { return &state_of(engine.current->block)->warps[warp_number()]; }

// ---- operands ----

// Converts eight elements. The exponent of fp16 is 112 less; infinity and NaN keep their largest
// one.
static void unpack_eight(float* to, const char* from, bool is_fp16) {
    uint16_t x[8];
    uint32_t bits[8];
    memcpy(x, from, sizeof(x));
    for (int i = 0; i < 8; i++) {
        bits[i] = (uint32_t)x[i] << 16;
    }
    for (int i = 0; i < 8 && is_fp16; i++) {
        const uint32_t magnitude = (bits[i] & 0x7fff0000u) >> 3;
        float y;
        memcpy(&y, &magnitude, sizeof(y));
        y *= 0x1p112f;
        memcpy(&bits[i], &y, sizeof(y));
        bits[i] |= (uint32_t)(x[i] & 0x8000) << 16 | (magnitude < 0x0f800000u ? 0u : magnitude | 0x7f800000u);
    }
    memcpy(to, bits, sizeof(bits));
}

struct Descriptor {
    unsigned start, panel_bytes, eight_rows_bytes;
};

// Reads the fields of a descriptor; only the swizzle of 128 bytes is known here.
static Descriptor descriptor_of(uint64_t bits, const WgmmaCall* call) {
    const Descriptor d = {(unsigned)(bits & 0x3fff) << 4, (unsigned)(bits >> 16 & 0x3fff) << 4,
                          (unsigned)(bits >> 32 & 0x3fff) << 4};
    if (bits >> 62 != 1 || bits & 0x3ffec000c000c000ull) {
        cusim_die("%s:%d: wgmma: descriptor %016llx; wanted the swizzle of 128 bytes, and no other bits",
                  call->file, call->line, (unsigned long long)bits);
    }
    if (d.start & 0x380) {
        cusim_die("%s:%d: wgmma: an operand at shared address %#x; wanted a start in the first row of 1024 "
                  "bytes",
                  call->file, call->line, d.start);
    }
    return d;
}

// Tell ThreadSanitizer that an operand is read, or both: whole rows.
static void tell_of_read(uint64_t bits, int side, bool is_across, const WgmmaCall* call) {
    const Descriptor d = descriptor_of(bits, call);
    for (int i = 0; i < (is_across ? side : 64); i += 64) {
        const unsigned bytes = (is_across ? DEPTH : side) * 128u,
                       start = (d.start & ~127u) + (is_across ? i / 64 * d.panel_bytes : 0);
        __tsan_read_range(shared_at(start, bytes, call->file, call->line), bytes);
    }
}
static void tell_of_reads(const WgmmaCall* call) {
    const CusimWgmma* op = call->of_lane;
    if (__tsan_read_range) {
        tell_of_read(op->b, op->N, op->is_b_across, call);
    }
    if (__tsan_read_range && !op->a_registers) {
        tell_of_read(op->a, 64, op->is_a_across, call);
    }
}

// Returns the address of eight elements before swizzling: from element i of a row on.
static unsigned address_of(const Descriptor& d, int row, int i, bool is_across) {
    return d.start + (is_across ? (unsigned)(i / 64) * d.panel_bytes : 0u) +
           (unsigned)(row / 8) * d.eight_rows_bytes + (unsigned)(row % 8) * 128 + (unsigned)(i % 64) * 2;
}

// Sets x (side, 16), or (16, side) if `is_across`; `stride` elements from row to row.
static void read_operand(float* x, int stride, uint64_t bits, int side, bool is_across,
                         const WgmmaCall* call) {
    const Descriptor d = descriptor_of(bits, call);
    const int rows = is_across ? DEPTH : side, columns = is_across ? side : DEPTH;
    const unsigned first = d.start & ~127u, end = (address_of(d, rows - 1, columns - 8, is_across) | 127) + 1;
    const char* window = shared_at(first, end - first, call->file, call->line) - first;
    const bool checks_marks = engine.current->block->marked > 0;
    for (int row = 0; row < rows; row++) {
        for (int i = 0; i < columns; i += 8) {
            const unsigned address = address_of(d, row, i, is_across);
            const char* from = window + (address ^ (address >> 7 & 7) << 4);
            if (checks_marks && shared_is_marked(from, 16)) {
                cusim_die(
                    "%s:%d: wgmma reads what a thread stored; wanted a fence_async and a barrier before",
                    call->file, call->line);
            }
            unpack_eight(x + row * stride + i, from, call->of_lane[0].is_fp16);
        }
    }
}

// Sets a (16, 16), the rows of this warp.
static void read_left(float a[ROWS][DEPTH], const WgmmaCall* call) {
    const CusimWgmma* op = call->of_lane;
    if (op->a_registers) {
        for (int lane = 0; lane < 32; lane++) {
            float mine[8];
            unpack_eight(mine, (const char*)call->a[lane], op->is_fp16);
            for (int i = 0; i < 8; i++) {
                a[lane / 4 + 8 * (i / 2 % 2)][lane % 4 * 2 + 8 * (i / 4) + i % 2] = mine[i];
            }
        }
        return;
    }
    static float all[4 * ROWS * DEPTH]; // (64, 16), or (16, 64)
    const int first = (int)(warp_number() % WARPS) * ROWS;
    read_operand(all, op->is_a_across ? 64 : DEPTH, op->a, 64, op->is_a_across, call);
    for (int i = 0; i < ROWS * DEPTH; i++) {
        const int row = i / DEPTH, k = i % DEPTH;
        a[row][k] = op->is_a_across ? all[k * 64 + first + row] : all[(first + row) * DEPTH + k];
    }
}

// Sets b (16, N).
static void read_right(float b[DEPTH][WIDEST], const WgmmaCall* call) {
    const CusimWgmma* op = call->of_lane;
    if (op->is_b_across) {
        read_operand(b[0], WIDEST, op->b, op->N, true, call);
        return;
    }
    static float rows[WIDEST * DEPTH]; // (N, 16)
    read_operand(rows, DEPTH, op->b, op->N, false, call);
    for (int i = 0; i < op->N * DEPTH; i++) {
        b[i % DEPTH][i / DEPTH] = rows[i];
    }
}

// ---- the matmul ----

typedef float Eight __attribute__((vector_size(32)));

#ifdef __clang__
#define FOR_THIS_PROCESSOR
#else
#define FOR_THIS_PROCESSOR __attribute__((target_clones("arch=haswell", "default")))
#endif
FOR_THIS_PROCESSOR static void multiply(float* sums, const float (*a)[DEPTH], const float (*b)[WIDEST],
                                        int N) {
    for (int n = 0; n < N; n += 8) {
        Eight column[DEPTH];
        for (int k = 0; k < DEPTH; k++) {
            memcpy(&column[k], b[k] + n, sizeof(Eight));
        }
        for (int row = 0; row < ROWS; row++) {
            Eight sum;
            memcpy(&sum, sums + row * N + n, sizeof(sum));
            for (int k = 0; k < DEPTH; k++) {
                sum += a[row][k] * column[k];
            }
            memcpy(sums + row * N + n, &sum, sizeof(sum));
        }
    }
}

static void call_run(WgmmaWarp* warp, WgmmaCall* call) {
    static float a[ROWS][DEPTH], b[DEPTH][WIDEST];
    tell_of_reads(call);
    RegisterScope own_memory;
    std::vector<float>& values = warp->sums[(size_t)call->sums].values;
    read_left(a, call);
    read_right(b, call);
    for (size_t i = 0; i < values.size() && !call->of_lane[0].adds; i++) {
        values[i] = 0;
    }
    multiply(values.data(), a, b, call->of_lane[0].N);
    call->is_done = true;
    tsan_release(warp->sync);
}

// Returns element i of a lane's sums among the values.
static float* value_at(WgmmaSums* sums, int lane, int i) {
    const int row = lane / 4 + 8 * (i % 4 / 2), column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    return &sums->values[(size_t)(row * sums->N + column)];
}

// Takes the values of sums that no matmul in flight has. Returns their number.
static int sums_open(WgmmaWarp* warp, const CusimWgmma* const lanes[32]) {
    size_t at = 0;
    while (at < warp->sums.size() && warp->sums[at].calls > 0) {
        at++;
    }
    if (at == warp->sums.size()) {
        warp->sums.emplace_back();
    }
    WgmmaSums* sums = &warp->sums[at];
    sums->N = lanes[0]->N;
    sums->values.resize((size_t)(ROWS * sums->N));
    for (int lane = 0; lane < 32; lane++) {
        sums->of_lane[lane] = lanes[lane]->d;
        for (int i = 0; i < sums->N / 2; i++) {
            *value_at(sums, lane, i) = lanes[lane]->d[i];
            lanes[lane]->d[i] = IN_FLIGHT;
        }
    }
    return (int)at;
}

// Gives the values back to the lanes.
static void sums_close(WgmmaSums* sums, const WgmmaCall* call) {
    for (int lane = 0; lane < 32; lane++) {
        for (int i = 0; i < sums->N / 2; i++) {
            float* to = sums->of_lane[lane] + i;
            if (memcmp(to, &IN_FLIGHT, sizeof(*to)) != 0) {
                cusim_die("%s:%d: sums of a wgmma changed before a wait", call->file, call->line);
            }
            *to = *value_at(sums, lane, i);
        }
    }
}

// ---- starting ----

static bool is_same(const CusimWgmma& x, const CusimWgmma& y) {
    return x.a == y.a && x.b == y.b && !x.a_registers == !y.a_registers && x.N == y.N && x.adds == y.adds &&
           x.is_fp16 == y.is_fp16 && x.is_a_across == y.is_a_across && x.is_b_across == y.is_b_across;
}

static void check_lanes(const CusimWgmma* const lanes[32], const char* file, int line) {
    for (int lane = 1; lane < 32; lane++) {
        if (!is_same(*lanes[0], *lanes[lane])) {
            cusim_die("%s:%d: wgmma: lanes 0 and %d have different operands", file, line, lane);
        }
    }
}

// Checks that the other warps of the warpgroup start the same matmul.
static void check_group(WgmmaState* state, const CusimWgmma& mine, const char* file, int line) {
    const unsigned warp = warp_number();
    WgmmaGroup* group = &state->groups[warp / WARPS];
    const size_t at = state->warps[warp].started++ - group->dropped;
    if (at == group->log.size()) {
        group->log.push_back(mine);
    } else if (!is_same(group->log[at], mine)) {
        cusim_die("%s:%d: wgmma: the warps of a warpgroup have different operands", file, line);
    }
    unsigned long passed = state->warps[warp].started;
    for (unsigned i = warp / WARPS * WARPS; i < warp / WARPS * WARPS + WARPS; i++) {
        passed =
            i < state->warps.size() && state->warps[i].started < passed ? state->warps[i].started : passed;
    }
    group->log.erase(group->log.begin(), group->log.begin() + (long)(passed - group->dropped));
    group->dropped = passed;
}

// Returns the sums that are in flight for these lanes, or -1.
static int sums_in_flight(const WgmmaWarp* warp, const float* d) {
    for (size_t i = 0; i < warp->sums.size(); i++) {
        if (warp->sums[i].calls > 0 && warp->sums[i].of_lane[0] == d) {
            return (int)i;
        }
    }
    return -1;
}

struct Start {
    CusimWgmma op;
    const char* file;
    int line;
};

static void start_together(void* const lanes[32]) {
    HostScope as_host;
    RegisterScope of_others;
    const CusimWgmma* ops[32];
    const Start* first = (const Start*)lanes[0];
    for (int lane = 0; lane < 32; lane++) {
        ops[lane] = &((const Start*)lanes[lane])->op;
    }
    WgmmaState* state = state_of(engine.current->block);
    WgmmaWarp* warp = &state->warps[warp_number()];
    check_lanes(ops, first->file, first->line);
    check_group(state, first->op, first->file, first->line);
    int sums = sums_in_flight(warp, ops[0]->d);
    if (!warp->is_fenced && (sums < 0 || first->op.a_registers)) {
        cusim_die("%s:%d: wgmma without a wgmma_fence since the last wait", first->file, first->line);
    }
    sums = sums < 0 ? sums_open(warp, ops) : sums;
    warp->sums[(size_t)sums].calls++;
    warp->calls.emplace_back();
    WgmmaCall* call = &warp->calls.back();
    call->sums = sums;
    call->group = warp->group;
    call->is_done = false;
    call->file = first->file;
    call->line = first->line;
    for (int lane = 0; lane < 32; lane++) {
        call->of_lane[lane] = *ops[lane];
        for (int i = 0; i < 4 && ops[lane]->a_registers; i++) {
            call->a[lane][i] = ops[lane]->a_registers[i];
        }
    }
}

// Runs the last matmul at once, if all before it have run: operands that are read early must do no
// harm either.
static void perhaps_run_now(void* const*) {
    WgmmaWarp* warp = warp_state();
    const size_t count = warp->calls.size();
    if (order_is_random() && random_below(2) && (count == 1 || warp->calls[count - 2].is_done)) {
        call_run(warp, &warp->calls.back());
    }
}

static void start(void* const lanes[32]) {
    start_together(lanes);
    perhaps_run_now(lanes);
}

extern "C" void cusim_wgmma(const CusimWgmma* op, const char* file, int line) {
    if (op->N % 8 || op->N < 8 || op->N > WIDEST) {
        cusim_die("%s:%d: wgmma of %d columns; wanted a multiple of 8 up to 256", file, line, op->N);
    }
    Start mine = {*op, file, line};
    cusim_warp_together(CUSIM_WGMMA, &mine, start, file, line);
}

// ---- fences, groups, waits ----

extern "C" void cusim_wgmma_fence(const char* file, int line) {
    cusim_warp_together(
        CUSIM_WGMMA, nullptr, [](void* const*) { warp_state()->is_fenced = true; }, file, line);
}

extern "C" void cusim_wgmma_commit(const char* file, int line) {
    cusim_warp_together(
        CUSIM_WGMMA, nullptr, [](void* const*) { warp_state()->group++; }, file, line);
}

static void check_registers(const WgmmaCall* call) {
    for (int lane = 0; lane < 32; lane++) {
        const unsigned* now = call->of_lane[lane].a_registers;
        for (int i = 0; i < 4 && now; i++) {
            if (now[i] != call->a[lane][i]) {
                cusim_die("%s:%d: the left operand of a wgmma changed before a wait", call->file, call->line);
            }
        }
    }
}

// Ends the calls of all groups but the last ones.
static void wait_together(void* const lanes[32]) {
    const int groups_left = *(const int*)lanes[0];
    WgmmaWarp* warp = warp_state();
    size_t done = 0;
    for (; done < warp->calls.size() && warp->calls[done].group < warp->group - groups_left; done++) {
        if (!warp->calls[done].is_done) {
            call_run(warp, &warp->calls[done]);
        }
    }
    HostScope as_host;
    RegisterScope of_others;
    for (size_t i = 0; i < done; i++) {
        const WgmmaCall* call = &warp->calls[i];
        WgmmaSums* sums = &warp->sums[(size_t)call->sums];
        check_registers(call);
        if (--sums->calls == 0) {
            sums_close(sums, call);
        }
    }
    warp->calls.erase(warp->calls.begin(), warp->calls.begin() + (long)done);
    warp->is_fenced = false;
}

extern "C" void cusim_wgmma_wait(int groups_left, const char* file, int line) {
    cusim_warp_together(CUSIM_WGMMA, &groups_left, wait_together, file, line);
    tsan_acquire(warp_state()->sync);
}

// ---- the end of threads and blocks ----

bool wgmma_is_in_flight() {
    const WgmmaState* state = engine.current->block->wgmma;
    return state && !state->warps[warp_number()].calls.empty();
}

void wgmma_end(Block* block) {
    const WgmmaState* state = block->wgmma;
    for (size_t i = 0; state && i < state->warps.size(); i++) {
        if (state->warps[i].started != state->warps[i / WARPS * WARPS].started) {
            cusim_die("the warps of a warpgroup have started %lu and %lu wgmmas (kernel %s)",
                      state->warps[i / WARPS * WARPS].started, state->warps[i].started,
                      kernel_name(engine.kernel));
        }
    }
    delete state;
    block->wgmma = nullptr;
    if (block->registers_set && block->registers_set != block->threads) {
        cusim_die("setmaxnreg by %u of %u threads of a block (kernel %s)", block->registers_set,
                  block->threads, kernel_name(engine.kernel));
    }
}

// ---- setmaxnreg ----

enum { REGISTERS = 64 << 10 };

extern "C" void cusim_setmaxnreg(int count, const char* file, int line) {
    Block* block = engine.current->block;
    if (count % 8 || count < 24 || count > 256) {
        cusim_die("%s:%d: setmaxnreg %d; wanted a multiple of 8 from 24 to 256", file, line, count);
    }
    if (block->threads % 128) {
        cusim_die("%s:%d: setmaxnreg in a block of %u threads; wanted whole warpgroups", file, line,
                  block->threads);
    }
    block->registers += (unsigned)count;
    if (block->registers > REGISTERS) {
        cusim_die("%s:%d: setmaxnreg: the block has %u registers; a multiprocessor has %d", file, line,
                  block->registers, (int)REGISTERS);
    }
    block->registers_set++;
}
