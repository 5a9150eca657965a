// cusim_rt.cpp - the CPU "device": fibers, block/warp scheduler, streams, memory. Always compiled
// WITHOUT sanitizer instrumentation; talks to ASan/TSan/MSan through weak symbols.
#include <cusim.h>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <string>
#include <vector>
#include <algorithm>
#include <dlfcn.h>
#include <pthread.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#ifdef CUSIM_OMP
#include <omp.h>
#endif

#define WEAK __attribute__((weak))
extern "C" {
WEAK void __sanitizer_start_switch_fiber(void** fake, const void* bottom, size_t size);
WEAK void __sanitizer_finish_switch_fiber(void* fake, const void** bottom, size_t* size);
WEAK void __asan_poison_memory_region(void const volatile*, size_t);
WEAK void __asan_init(void);
WEAK void __tsan_init(void);
WEAK void* __tsan_get_current_fiber(void);
WEAK void* __tsan_create_fiber(unsigned);
WEAK void __tsan_switch_to_fiber(void*, unsigned);
WEAK void __tsan_set_fiber_name(void*, const char*);
WEAK void __tsan_acquire(void*);
WEAK void __tsan_release(void*);
WEAK void __tsan_write_range(void*, unsigned long);
WEAK void __msan_init(void);
WEAK void __msan_unpoison(const volatile void*, size_t);
WEAK void __msan_poison(const volatile void*, size_t);
WEAK void __msan_check_mem_is_initialized(const volatile void*, size_t);
WEAK void __sanitizer_print_stack_trace(void);
}
static inline void tsan_acq(void* p) { if (__tsan_acquire) __tsan_acquire(p); }
static inline void tsan_rel(void* p) { if (__tsan_release) __tsan_release(p); }

// ---- configuration (environment) -------------------------------------------------------------
enum { ORD_UP, ORD_DOWN, ORD_RANDOM, ORD_GREEDY };   // greedy: run one warp as far as it goes
enum { ST_EAGER, ST_LAZY, ST_RANDOM };
static struct Cfg {
    int order = ORD_UP, streams = ST_EAGER, protect = 0, stats = 0, wave = 1;
    uint64_t seed = 1;
    Cfg() {
        auto g = [](const char* n) { const char* v = getenv(n); return std::string(v ? v : ""); };
        std::string o = g("CUSIM_ORDER"), s = g("CUSIM_STREAMS");
        if (o == "down") order = ORD_DOWN; else if (o == "random") order = ORD_RANDOM; else if (o == "greedy") order = ORD_GREEDY;
        if (s == "lazy") streams = ST_LAZY; else if (s == "random") streams = ST_RANDOM;
        if (!g("CUSIM_SEED").empty()) seed = strtoull(g("CUSIM_SEED").c_str(), 0, 10) + 1;
        protect = g("CUSIM_PROTECT") == "1" && !__asan_init && !__tsan_init && !__msan_init;
        stats = g("CUSIM_STATS") == "1";
        if (!g("CUSIM_WAVE").empty()) wave = atoi(g("CUSIM_WAVE").c_str());
    }
} cfg;
static CUSIM_TLS uint64_t rng_s;
static uint32_t rnd(uint32_t n) {
    if (!rng_s) rng_s = cfg.seed * 0x9E3779B97F4A7C15ull;
    rng_s ^= rng_s << 13; rng_s ^= rng_s >> 7; rng_s ^= rng_s << 17;
    return (uint32_t)((rng_s >> 32) * n >> 32);
}
static double now() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
struct KStat { const void* fn; unsigned long n; double s; };
static struct Stats { unsigned long launches = 0, blocks = 0, threads = 0, switches = 0; double kernel_s = 0; std::vector<KStat> k; } st;
static const char* fname(const void* fn) {
    Dl_info i; return dladdr(fn, &i) && i.dli_sname ? i.dli_sname : "kernel";
}

// ---- fibers ------------------------------------------------------------------------------------
struct Thread; struct Block; struct Warp;
struct Fiber { void* sp = nullptr; char* lo = nullptr; size_t size = 0; void* fake = nullptr; Thread* t = nullptr; };
struct Rv { unsigned mask, arrived; int op, line; const char* file; int par; char sync[2][8]; Thread* wait[32]; alignas(16) unsigned char buf[2][512]; };
enum { NRV = 8 };
struct Warp { unsigned present, exited; Rv rv[NRV]; };
struct Bar { unsigned arrived, expect; int par, line, acc; int res[2]; const char* file; char sync[2][8]; std::vector<Thread*> wait; };
struct CpA { char* dst; const char* src; int n, sn, group; };
struct Def { void (*fn)(void*, uint64_t, uint64_t); void* d; uint64_t a, b; int group; };
enum { TS_NEW, TS_RUN, TS_BLOCKED, TS_READY, TS_DONE };
struct Thread { uint3 tid; unsigned lin, lane; Warp* w; Block* b; Fiber *f, *own = nullptr; int state; const char *why, *file; int line; void* tsan; int cpg; std::vector<CpA> cp; int wgg; std::vector<Def> wg; };
struct Bulk { char* dst; const char* src; unsigned n; uint64_t* bar; };
struct Smem { void* key; char* p; size_t n; };
struct Block { uint3 idx; unsigned n; Bar bar[16]; std::vector<Warp> warps; char* dyn; size_t dyn_n; std::vector<Smem> st; std::vector<Bulk> bulk; };
struct Ring {                                            // no allocation while fibers run (TSan intercepts malloc)
    std::vector<Thread*> a; unsigned h = 0, t = 0;
    void reset(unsigned n) { unsigned c = 1; while (c < n + 1) c *= 2; if (a.size() < c) a.resize(c); h = t = 0; }
    bool empty() const { return h == t; }
    unsigned size() const { return t - h; }
    Thread*& at(unsigned i) { return a[(h + i) & (a.size() - 1)]; }
    void push_back(Thread* x) { a[t++ & (a.size() - 1)] = x; }
    Thread* pop(unsigned i) { std::swap(at(0), at(i)); return a[h++ & (a.size() - 1)]; }
};
struct Ctx {
    Fiber main; Thread* cur = nullptr; Warp* lastw = nullptr; std::vector<Fiber*> idle; unsigned nfib = 0;
    std::vector<Thread> th; std::vector<unsigned> order; unsigned next_un = 0, n = 0, live = 0;
    Ring ready; std::vector<Block> blocks; Bar grid; bool coop = false;
    const std::function<void()>* thunk = nullptr; const void* fn = nullptr; void *tsan_main = nullptr, *tsan_async = nullptr; std::vector<void*> tsan; std::vector<Fiber*> own; unsigned tsan_rot = 0;
    char ksync[8], esync[8]; unsigned long spins = 0; std::vector<Smem> cache; std::vector<char*> trash; size_t trash_n = 0; char* dyncache = nullptr; size_t dyncache_n = 0;
};
static CUSIM_TLS Ctx* C;
CUSIM_TLS uint3 threadIdx, blockIdx; CUSIM_TLS dim3 blockDim, gridDim;

extern "C" void cusim_swap(void** save, void* load);
__asm__(".text\n.globl cusim_swap\n.type cusim_swap,@function\ncusim_swap:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n.size cusim_swap,.-cusim_swap\n");

extern "C" void cusim_die(const char* fmt, ...) {
    fflush(stdout);
    va_list a; va_start(a, fmt); fprintf(stderr, "CUSIM ERROR: "); vfprintf(stderr, fmt, a); va_end(a);
    if (C && C->cur && C->thunk) { Thread* t = C->cur; fprintf(stderr, "\n  in kernel %s block (%u,%u,%u) thread (%u,%u,%u)", fname(C->fn), t->b->idx.x, t->b->idx.y, t->b->idx.z, t->tid.x, t->tid.y, t->tid.z); }
    fprintf(stderr, "\n");
    if (__sanitizer_print_stack_trace) __sanitizer_print_stack_trace();
    abort();
}

static inline __attribute__((always_inline)) void fiber_switch(Fiber* from, Fiber* to, Thread* t) {
    st.switches++;
    C->cur = t;
    if (t) { threadIdx = t->tid; blockIdx = t->b->idx; }
    if (__tsan_switch_to_fiber) { void* f = t ? t->tsan : to == &C->main ? C->tsan_main : nullptr; if (f) __tsan_switch_to_fiber(f, 1); }
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&from->fake, to->lo, to->size);
    cusim_swap(&from->sp, to->sp);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(from->fake, nullptr, nullptr);
}
struct HostScope {                                       // runtime work that may allocate is done as the host
    void* f;
    explicit HostScope(void* as = nullptr) : f(C->cur && __tsan_switch_to_fiber ? C->cur->tsan : nullptr) { if (f) __tsan_switch_to_fiber(as ? as : C->tsan_main, 1); }
    ~HostScope() { if (f) __tsan_switch_to_fiber(f, 1); }
};
static void deadlock() {
    unsigned done = 0; for (unsigned i = 0; i < C->n; i++) done += C->th[i].state == TS_DONE;
    fprintf(stderr, "CUSIM ERROR: deadlock in kernel %s: %u thread(s) exited", fname(C->fn), done);
    for (unsigned i = 0; i < C->n; i++) {
        Thread& t = C->th[i]; if (t.state == TS_DONE || !t.why) continue; unsigned k = 0;
        for (unsigned j = i; j < C->n; j++) { Thread& u = C->th[j]; if (u.state != TS_DONE && u.why == t.why && u.line == t.line && u.b == t.b) { k++; if (j > i) u.why = nullptr; } }
        fprintf(stderr, "\n  %u thread(s) of block (%u,%u,%u) wait in %s at %s:%d", k, t.b->idx.x, t.b->idx.y, t.b->idx.z, t.why, t.file ? t.file : "?", t.line);
    }
    fprintf(stderr, "\n"); abort();
}
static inline __attribute__((always_inline)) Thread* pop_ready() {
    if (C->ready.empty()) return nullptr;
    unsigned i = 0;
    if (cfg.order == ORD_RANDOM) i = rnd(C->ready.size());
    else if (cfg.order == ORD_GREEDY) { i = rnd(C->ready.size()); for (unsigned k = 0; k < C->ready.size(); k++) if (C->ready.at(k)->w == C->lastw) { i = k; break; } }
    Thread* t = C->ready.pop(i); C->lastw = t->w; t->state = TS_RUN; return t;
}
static Fiber* new_fiber();
static void set_cur(Thread* t, Fiber* f) { t->state = TS_RUN; t->f = f; C->cur = t; threadIdx = t->tid; blockIdx = t->b->idx; }
static Fiber* get_fiber(Thread* t) {                     // under TSan every CUDA thread has its own stack
    if (t->own) return t->own;
    if (C->idle.empty()) return new_fiber();
    Fiber* f = C->idle.back(); C->idle.pop_back(); return f;
}
static inline __attribute__((always_inline)) void switch_away() {                              // current thread cannot go on
    Thread* me = C->cur; Fiber* mf = me->f;
    bool un = C->next_un < C->n, rd = !C->ready.empty();
    if (un && (!rd || cfg.order < ORD_RANDOM || (cfg.order == ORD_RANDOM && rnd(4)))) {
        Thread* t = &C->th[C->order[C->next_un++]]; Fiber* f = get_fiber(t); set_cur(t, f); fiber_switch(mf, f, t);
    } else if (rd) { Thread* t = pop_ready(); if (t != me) fiber_switch(mf, t->f, t); }
    else deadlock();
}
static inline __attribute__((always_inline)) void block_on(const char* why, const char* f, int l) {
    Thread* t = C->cur; t->state = TS_BLOCKED; t->why = why; t->file = f; t->line = l; switch_away();
}
static void wake(Thread* t) { t->state = TS_READY; C->ready.push_back(t); C->spins = 0; }
extern "C" void cusim_fiber_entry(Fiber* self) {
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
    for (;;) {
        for (;;) {                                       // a fiber that never blocks runs thread after thread without a switch
            Thread* t = C->cur;
            tsan_acq(C->ksync);
            (*C->thunk)();
            if (!t->cp.empty() || !t->wg.empty()) cusim_die("thread exits with asynchronous copies or wgmma it never waited for");
            tsan_rel(C->esync);
            t->state = TS_DONE; t->w->exited |= 1u << t->lane; C->live--; C->spins = 0;
            if (t->own || C->next_un >= C->n || (cfg.order == ORD_RANDOM && !C->ready.empty() && rnd(2))) break;
            set_cur(&C->th[C->order[C->next_un++]], self);
        }
        if (!C->cur->own) C->idle.push_back(self);
        if (C->cur->own && C->next_un < C->n) { Thread* t = &C->th[C->order[C->next_un++]]; set_cur(t, t->own); fiber_switch(self, t->own, t); }
        else if (!C->ready.empty()) { Thread* t = pop_ready(); fiber_switch(self, t->f, t); }
        else if (C->live == 0) fiber_switch(self, &C->main, nullptr);
        else deadlock();
    }
}
extern "C" void cusim_tramp();
__asm__(".text\n.globl cusim_tramp\n.type cusim_tramp,@function\ncusim_tramp:\nmovq %rbx,%rdi\ncall cusim_fiber_entry\nud2\n.size cusim_tramp,.-cusim_tramp\n");
static Fiber* new_fiber() {
    HostScope hs;
    Fiber* f = new Fiber; f->size = __asan_init || __tsan_init || __msan_init ? 512 << 10 : 128 << 10;
    char* p = (char*)mmap(nullptr, f->size + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) cusim_die("no memory for fiber stacks");
    mprotect(p, 4096, PROT_NONE); f->lo = p + 4096;
    void** s = (void**)(f->lo + f->size - 64 - (C->nfib * 5 % 61) * 64);   // spread the stack tops over the cache sets
    *--s = nullptr; *--s = nullptr; *--s = (void*)cusim_tramp; *--s = nullptr /*rbp*/; *--s = f /*rbx*/; for (int i = 0; i < 4; i++) *--s = nullptr;
    f->sp = s; C->nfib++; return f;
}

// ---- block and warp primitives ----------------------------------------------------------------
static void bar_arrive_wait(Bar& b, unsigned expect, bool wait, int kind, int pred, int* out, const char* why, const char* f, int l) {
    Thread* t = C->cur;
    if (b.arrived == 0) { b.expect = expect; b.file = f; b.line = l; b.acc = kind == 3; }
    else if (b.expect != expect || (kind >= 0 && (b.line != l || (b.file != f && strcmp(b.file, f))))) cusim_die("%s:%d: divergent barrier: other threads of the block wait in %s at %s:%d", f, l, why, b.file, b.line);
    if (kind == 1) b.acc += pred != 0; else if (kind == 2) b.acc |= pred != 0; else if (kind == 3) b.acc &= pred != 0;
    int par = b.par; tsan_rel(b.sync[par]);
    if (++b.arrived == b.expect) {
        b.res[par] = b.acc; b.arrived = 0; b.par ^= 1;
        auto& w = b.wait;                                  // (random order: pop_ready picks at random)
        if (cfg.order == ORD_DOWN) for (size_t i = w.size(); i; i--) wake(w[i - 1]); else for (Thread* x : w) wake(x);
        w.clear();
        if (wait && cfg.order == ORD_RANDOM && rnd(2)) { t->state = TS_READY; C->ready.push_back(t); switch_away(); }
    } else if (wait) { b.wait.push_back(t); block_on(why, f, l); }
    if (wait) tsan_acq(b.sync[par]);
    if (out) *out = b.res[par];
}
extern "C" void cusim_syncthreads(int kind, int pred, int* out, const char* f, int l) { Block* b = C->cur->b; bar_arrive_wait(b->bar[0], b->n, true, kind, pred, out, "__syncthreads", f, l); }
extern "C" void cusim_bar_sync(int id, int n, const char* f, int l) { bar_arrive_wait(C->cur->b->bar[id], (unsigned)n, true, -1, 0, nullptr, "bar.sync", f, l); }
extern "C" void cusim_bar_arrive(int id, int n, const char* f, int l) { bar_arrive_wait(C->cur->b->bar[id], (unsigned)n, false, -1, 0, nullptr, "bar.arrive", f, l); }
extern "C" void cusim_grid_sync(const char* f, int l) {
    if (!C->coop) cusim_die("%s:%d: grid sync in a kernel not launched cooperatively", f, l);
    bar_arrive_wait(C->grid, C->n, true, 0, 0, nullptr, "grid.sync", f, l);
}
extern "C" unsigned cusim_lane(void) { return C->cur->lane; }
extern "C" unsigned cusim_activemask(void) { return C->cur->w->present & ~C->cur->w->exited; }
extern "C" void cusim_yield(void) {
    if (++C->spins > 20000000ul) deadlock();
    Thread* t = C->cur; t->state = TS_READY; t->why = "spin"; C->ready.push_back(t); C->lastw = nullptr; switch_away();
}
extern "C" const unsigned char* cusim_warp_exchange(int op, unsigned mask, const void* v, unsigned n, const char* f, int l) {
    Thread* t = C->cur; Warp* w = t->w; unsigned bit = 1u << t->lane;
    if (!(mask & bit)) cusim_die("%s:%d: lane %u calls a warp primitive with mask %08x that does not name it", f, l, t->lane, mask);
    if (mask & (~w->present | w->exited)) cusim_die("%s:%d: warp mask %08x names lanes that do not exist or have exited (present %08x, exited %08x)", f, l, mask, w->present, w->exited);
    Rv *r = nullptr, *fr = nullptr;
    for (Rv& x : w->rv) { if (x.mask == mask) { r = &x; break; } if (!fr && !x.arrived) fr = &x; }
    if (!r) { if (!fr) cusim_die("%s:%d: too many warp masks in flight", f, l); r = fr; r->mask = mask; }
    if (!r->arrived) { r->op = op; r->file = f; r->line = l; }
    else if (r->op != op || r->line != l || (r->file != f && strcmp(r->file, f))) cusim_die("%s:%d: divergent warp primitive: lanes %08x wait at %s:%d", f, l, r->arrived, r->file, r->line);
    int par = r->par; unsigned char* d = r->buf[par] + 16 * t->lane;
    for (unsigned i = 0; i < n; i++) d[i] = ((const unsigned char*)v)[i];
    if (op == CUSIM_SYNCWARP) tsan_rel(r->sync[par]);
    r->arrived |= bit; r->wait[t->lane] = t;
    if (r->arrived == mask) {
        r->arrived = 0; r->par ^= 1;
        for (int i = 0; i < 32; i++) { int j = cfg.order == ORD_DOWN ? 31 - i : i; if (mask >> j & 1 && r->wait[j] != t) wake(r->wait[j]); }
        if (cfg.order == ORD_RANDOM && rnd(2)) { t->state = TS_READY; C->ready.push_back(t); switch_away(); }
    } else block_on(op == CUSIM_SYNCWARP ? "__syncwarp" : "a warp primitive", f, l);
    if (op == CUSIM_SYNCWARP) tsan_acq(r->sync[par]);
    if (__msan_unpoison) __msan_unpoison(r->buf[par], 512);
    return r->buf[par];
}

// ---- shared memory ------------------------------------------------------------------------------
static bool fresh_smem() { return __asan_init || __tsan_init || __msan_init; }
static char* smem_get(size_t n) {
    char* p = nullptr; size_t a = n ? n : 1;
    if (posix_memalign((void**)&p, 1024, a)) cusim_die("out of memory");
    if (__msan_poison) __msan_poison(p, a); else memset(p, 0xff, a);   // NaN / -1 garbage
    return p;
}
extern "C" void* cusim_smem_dynamic(void) { return C->cur->b->dyn; }
extern "C" unsigned cusim_smem_dynamic_size(void) { return (unsigned)C->cur->b->dyn_n; }
extern "C" void* cusim_smem_static(void* key, size_t size) {
    Block* b = C->cur->b; size_t tot = size;
    for (Smem& s : b->st) { if (s.key == key) { tsan_acq(s.p); return s.p; } tot += s.n; }
    if (tot > 48 << 10) cusim_die("static shared memory of a block exceeds 48 KiB (%zu)", tot);
    Smem s{key, nullptr, size};
    {   HostScope hs;                                   // a fresh object per block: no races with the last block
        if (!fresh_smem() && cfg.wave == 1 && !C->coop) {
            Smem* c = nullptr; for (Smem& x : C->cache) if (x.key == key && x.n == size) c = &x;
            if (!c) { C->cache.push_back({key, smem_get(size), size}); c = &C->cache.back(); } else memset(c->p, 0xff, size);
            s.p = c->p;
        } else s.p = smem_get(size);
        b->st.push_back(s); tsan_rel(s.p);
    }
    tsan_acq(s.p);
    return s.p;
}

// ---- async copies (deferred as late as the program allows) ---------------------------------------
extern "C" void cusim_cp_async(void* dst, const void* src, int bytes, int sn) {
    if (((uintptr_t)dst | (uintptr_t)src) % (unsigned)bytes) cusim_die("cp.async: misaligned address");
    if (__tsan_write_range) __tsan_write_range(dst, (unsigned long)bytes);      // a race from issue to wait is a race
    if (cfg.order >= ORD_RANDOM && rnd(2)) { memcpy(dst, src, (size_t)sn); if (sn < bytes) memset((char*)dst + sn, 0, (size_t)(bytes - sn)); return; }
    HostScope hs; C->cur->cp.push_back({(char*)dst, (const char*)src, bytes, sn, C->cur->cpg});
}
extern "C" void cusim_cp_async_commit(void) { C->cur->cpg++; }
extern "C" void cusim_cp_async_wait(int keep) {
    Thread* t = C->cur; size_t i = 0;
    for (; i < t->cp.size() && t->cp[i].group < t->cpg - keep; i++) { CpA& c = t->cp[i]; memcpy(c.dst, c.src, (size_t)c.sn); if (c.sn < c.n) memset(c.dst + c.sn, 0, (size_t)(c.n - c.sn)); }
    HostScope hs; t->cp.erase(t->cp.begin(), t->cp.begin() + (long)i);
}
extern "C" void cusim_defer(void (*fn)(void*, uint64_t, uint64_t), void* d, uint64_t a, uint64_t b) { HostScope hs; C->cur->wg.push_back({fn, d, a, b, C->cur->wgg}); }
extern "C" void cusim_defer_commit(void) { C->cur->wgg++; }
extern "C" void cusim_defer_wait(int keep) {
    Thread* t = C->cur; size_t i = 0;
    for (; i < t->wg.size() && t->wg[i].group < t->wgg - keep; i++) t->wg[i].fn(t->wg[i].d, t->wg[i].a, t->wg[i].b);
    HostScope hs; t->wg.erase(t->wg.begin(), t->wg.begin() + (long)i);
}
struct MB { int32_t tx; uint16_t pending; uint16_t count_phase; };          // 8 bytes, lives in shared memory
static MB* mb(uint64_t* b) { return (MB*)b; }
static void mb_try(uint64_t* b) { MB* m = mb(b); if (m->pending == 0 && m->tx == 0) { m->count_phase ^= 0x8000; m->pending = m->count_phase & 0x7fff; C->spins = 0; } }
extern "C" void cusim_mbar_init(uint64_t* b, unsigned c) { MB m{0, (uint16_t)c, (uint16_t)c}; memcpy(b, &m, 8); }
extern "C" void cusim_mbar_arrive(uint64_t* b, unsigned tx, const char* f, int l) { MB* m = mb(b); if (!m->pending) cusim_die("%s:%d: mbarrier over-arrived", f, l); m->tx += (int)tx; m->pending--; tsan_rel(b); mb_try(b); }
extern "C" void cusim_bulk_g2s(void* dst, const void* src, unsigned n, uint64_t* bar) {
    if (((uintptr_t)dst | (uintptr_t)src | n) % 16) cusim_die("cp.async.bulk: addresses and size must be multiples of 16");
    tsan_rel(&C->cur->b->bulk); HostScope hs; C->cur->b->bulk.push_back({(char*)dst, (const char*)src, n, bar});
}
extern "C" void cusim_mbar_wait(uint64_t* b, unsigned parity, const char* f, int l) {
    Thread* t = C->cur; t->file = f; t->line = l;
    while ((unsigned)(mb(b)->count_phase >> 15) == parity) {
        auto& q = t->b->bulk; bool did = false;
        for (size_t i = 0; i < q.size(); i++) if (q[i].bar == b) { Bulk k = q[i]; { HostScope hs; q.erase(q.begin() + (long)i); } HostScope hs(C->tsan_async); tsan_acq(&q); memcpy(k.dst, k.src, k.n); tsan_rel(b); mb(b)->tx -= (int)k.n; mb_try(b); did = true; break; }
        if (!did) cusim_yield();
    }
    tsan_acq(b);
}

// ---- kernel execution ----------------------------------------------------------------------------
static void init_bar(Bar& b, unsigned n) { b.arrived = 0; b.par = 0; b.wait.clear(); b.wait.reserve(n); }
static void run_wave(const dim3& g, const dim3& bd, unsigned long b0, unsigned nb, size_t dyn) {
    unsigned n = bd.x * bd.y * bd.z, nw = (n + 31) / 32;
    if (C->blocks.size() < nb) C->blocks.resize(nb);
    if (C->th.size() < (size_t)n * nb) { C->th.resize((size_t)n * nb); C->order.resize((size_t)n * nb); }
    C->n = n * nb; C->next_un = 0; C->live = C->n; C->spins = 0; C->ready.reset(C->n); C->idle.reserve(C->n + 1); init_bar(C->grid, C->n);
    for (unsigned k = 0; k < nb; k++) {
        Block& b = C->blocks[k]; unsigned long bi = b0 + k;
        b.idx = make_uint3((unsigned)(bi % g.x), (unsigned)(bi / g.x % g.y), (unsigned)(bi / ((unsigned long)g.x * g.y)));
        b.n = n; for (Bar& x : b.bar) init_bar(x, n);
        if (b.warps.size() < nw) b.warps.resize(nw);
        for (unsigned w = 0; w < nw; w++) { Warp& x = b.warps[w]; unsigned m = std::min(32u, n - 32 * w); x.present = m == 32 ? ~0u : (1u << m) - 1; x.exited = 0; for (Rv& r : x.rv) { r.mask = r.arrived = 0; r.par = 0; } }
        b.st.clear(); b.bulk.clear(); b.dyn_n = dyn;
        if (fresh_smem() || nb > 1) b.dyn = smem_get(dyn);
        else { if (C->dyncache_n < dyn) { free(C->dyncache); C->dyncache = smem_get(dyn); C->dyncache_n = dyn; } else if (dyn) memset(C->dyncache, 0xff, dyn); b.dyn = C->dyncache; }
        for (unsigned i = 0; i < n; i++) {
            Thread& t = C->th[k * n + i];
            t.tid = make_uint3(i % bd.x, i / bd.x % bd.y, i / (bd.x * bd.y)); t.lin = i; t.lane = i & 31; t.w = &b.warps[i / 32]; t.b = &b; t.state = TS_NEW; t.why = nullptr; t.cpg = t.wgg = 0;
            C->order[k * n + i] = k * n + i;
        }
    }
    if (__tsan_create_fiber) {
        if (!C->tsan_async) C->tsan_async = __tsan_create_fiber(0);                // the copy engine
        while (C->tsan.size() < C->n + 7) { C->tsan.push_back(__tsan_create_fiber(0)); C->own.push_back(new_fiber()); }
        for (unsigned i = 0; i < C->n; i++) { size_t k = (i + C->tsan_rot) % C->tsan.size(); C->th[i].tsan = C->tsan[k]; C->th[i].own = C->own[k]; }
        C->tsan_rot = (C->tsan_rot + 5) % 4096; C->tsan_main = __tsan_get_current_fiber(); tsan_rel(C->ksync);
    }
    auto o = C->order.begin();
    if (cfg.order == ORD_DOWN) std::reverse(o, o + C->n);
    if (cfg.order == ORD_RANDOM) for (unsigned i = C->n; i > 1; i--) std::swap(o[i - 1], o[rnd(i)]);
    { Thread* t = &C->th[C->order[C->next_un++]]; Fiber* f = get_fiber(t); set_cur(t, f); fiber_switch(&C->main, f, t); }
    C->cur = nullptr;
    for (unsigned k = 0; k < nb; k++) { Block& b = C->blocks[k]; if (fresh_smem() || nb > 1) { C->trash.push_back(b.dyn); C->trash_n += dyn; } if (fresh_smem() || cfg.wave > 1 || C->coop) for (Smem& s : b.st) { C->trash.push_back(s.p); C->trash_n += s.n; } if (!b.bulk.empty()) cusim_die("block ended with a bulk copy in flight (kernel %s)", fname(C->fn)); }
    if (!__tsan_init || C->trash_n > 256 << 20) { tsan_acq(C->esync); for (char* p : C->trash) free(p); C->trash.clear(); C->trash_n = 0; tsan_rel(C->ksync); }
    st.blocks += nb; st.threads += C->n;
}
static void ctx_init() {
    if (C) return;
    C = new Ctx;
    if (__sanitizer_start_switch_fiber) { // learn the host stack's bounds
        const void* b = nullptr; size_t n = 0;
        pthread_attr_t a; void* lo; pthread_getattr_np(pthread_self(), &a); pthread_attr_getstack(&a, &lo, &n); pthread_attr_destroy(&a); b = lo;
        C->main.lo = (char*)b; C->main.size = n;
    }
}
static void run_kernel(const void* fn, dim3 g, dim3 b, size_t dyn, bool coop, const std::function<void()>& thunk) {
    unsigned long nblk = (unsigned long)g.x * g.y * g.z; double t0 = cfg.stats ? now() : 0;
    st.launches++;
#ifdef CUSIM_OMP
#pragma omp parallel
#endif
    {
        ctx_init(); C->thunk = &thunk; C->fn = fn; tsan_rel(C->ksync); C->coop = coop; gridDim = g; blockDim = b;
        unsigned wave = coop ? (unsigned)nblk : (unsigned)cfg.wave;
#ifdef CUSIM_OMP
#pragma omp for schedule(dynamic)
        for (long i = 0; i < (long)((nblk + wave - 1) / wave); i++) { unsigned long b0 = (unsigned long)i * wave; run_wave(g, b, b0, (unsigned)std::min<unsigned long>(wave, nblk - b0), dyn); }
#else
        unsigned long nwv = (nblk + wave - 1) / wave;
        unsigned long mul = 1, add = 0; if (cfg.order >= ORD_RANDOM && nwv > 1) { add = rnd((uint32_t)nwv); do mul = 1 + rnd((uint32_t)nwv); while (std::__gcd(mul, nwv) != 1); }
        for (unsigned long i = 0; i < nwv; i++) { unsigned long b0 = (cfg.order == ORD_DOWN ? nwv - 1 - i : (i * mul + add) % nwv) * wave; run_wave(g, b, b0, (unsigned)std::min<unsigned long>(wave, nblk - b0), dyn); }
#endif
        C->thunk = nullptr; tsan_acq(C->esync); for (char* p : C->trash) free(p); C->trash.clear(); C->trash_n = 0;
    }
    if (cfg.stats) { double d = now() - t0; st.kernel_s += d; for (auto& e : st.k) if (e.fn == fn) { e.n++; e.s += d; return; } st.k.push_back({fn, 1, d}); }
}
__attribute__((destructor)) static void stats_out() {
    if (!cfg.stats) return;
    fprintf(stderr, "EMU: %lu launches, %lu blocks, %lu threads, %lu fiber switches, %.3f s in kernels, %u fibers\n", st.launches, st.blocks, st.threads, st.switches, st.kernel_s, C ? C->nfib : 0);
    for (auto& e : st.k) fprintf(stderr, "  %-60.60s %6lu x %9.1f us\n", fname(e.fn), e.n, 1e6 * e.s / (double)e.n);
}

// ---- device memory ---------------------------------------------------------------------------------
struct Mem { char* p; size_t n; int kind; };                     // kind: cudaMemoryTypeDevice / Host
static std::vector<Mem>& mems() { static auto* m = new std::vector<Mem>; return *m; }   // sorted by address
static void mem_add(char* p, size_t n, int kind) { auto& m = mems(); m.insert(std::upper_bound(m.begin(), m.end(), p, [](char* a, const Mem& b) { return a < b.p; }), Mem{p, n, kind}); }
static char *arena = nullptr, *arena_end = nullptr; static size_t arena_used = 0; static int dev_depth = 0;
static size_t mem_used = 0; static const size_t mem_total = (size_t)4 << 30;
static void dev_enter() { if (cfg.protect && arena && dev_depth++ == 0) mprotect(arena, arena_used, PROT_READ | PROT_WRITE); }
static void dev_leave() { if (cfg.protect && arena && --dev_depth == 0) mprotect(arena, arena_used, PROT_NONE); }
static Mem* find_mem(const void* p) {                    // the allocation p points into
    auto& m = mems(); auto i = std::upper_bound(m.begin(), m.end(), (char*)p, [](char* a, const Mem& b) { return a < b.p; });
    if (i == m.begin()) return nullptr;
    --i; return (char*)p < i->p + i->n || (char*)p == i->p ? &*i : nullptr;
}
static void segv(int, siginfo_t* si, void*) {
    char* a = (char*)si->si_addr;
    if (arena && a >= arena && a < arena_end) fprintf(stderr, "CUSIM ERROR: host code touched device memory at %p\n", (void*)a);
    else fprintf(stderr, "CUSIM ERROR: segmentation fault at %p%s\n", (void*)a, C && C->thunk ? " inside a kernel" : "");
    void* bt[24]; int n = backtrace(bt, 24); backtrace_symbols_fd(bt, n, 2); _exit(139);
}
static cudaError_t g_last = cudaSuccess;
static cudaError_t ret(cudaError_t e) { if (e != cudaSuccess) g_last = e; return e; }
extern "C" {
cudaError_t CUDARTAPI cudaMalloc(void** p, size_t n) {
    if (!p) return ret(cudaErrorInvalidValue);
    if (mem_used + n > mem_total) return ret(cudaErrorMemoryAllocation);
    char* q = nullptr; size_t r = (n + 511) & ~(size_t)511;
    if (cfg.protect) {
        if (!arena) { size_t z = (size_t)16 << 30; arena = (char*)mmap(nullptr, z, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0); arena_end = arena + z; struct sigaction sa {}; sa.sa_sigaction = segv; sa.sa_flags = SA_SIGINFO; sigaction(SIGSEGV, &sa, nullptr); }
        size_t pg = ((n + 4095) & ~(size_t)4095) + 4096;     // end-aligned to 256, one dead page between allocations
        q = arena + arena_used; arena_used += pg; mprotect(q, pg, PROT_READ | PROT_WRITE);
        memset(q, 0xff, pg - 4096); if (!dev_depth) mprotect(q, pg, PROT_NONE);
    } else { if (posix_memalign((void**)&q, 512, n ? n : 1)) return ret(cudaErrorMemoryAllocation); if (!__msan_init) memset(q, 0xff, n); (void)r; }
    mem_add(q, n, cudaMemoryTypeDevice); mem_used += n; *p = q; return cudaSuccess;
}
cudaError_t CUDARTAPI cudaFree(void* p) {
    if (!p) return cudaSuccess;
    cudaDeviceSynchronize();
    Mem* i = find_mem(p); if (!i || i->p != p || i->kind != cudaMemoryTypeDevice) return ret(cudaErrorInvalidValue);
    mem_used -= i->n; mems().erase(mems().begin() + (i - mems().data())); if (!cfg.protect) free(p); return cudaSuccess;
}
cudaError_t CUDARTAPI cudaHostAlloc(void** p, size_t n, unsigned) { char* q; if (posix_memalign((void**)&q, 4096, n ? n : 1)) return ret(cudaErrorMemoryAllocation); mem_add(q, n, cudaMemoryTypeHost); *p = q; return cudaSuccess; }
cudaError_t CUDARTAPI cudaMallocHost(void** p, size_t n) { return cudaHostAlloc(p, n, 0); }
cudaError_t CUDARTAPI cudaFreeHost(void* p) { if (!p) return cudaSuccess; cudaDeviceSynchronize(); Mem* i = find_mem(p); if (!i || i->p != p || i->kind != cudaMemoryTypeHost) return ret(cudaErrorInvalidValue); mems().erase(mems().begin() + (i - mems().data())); free(p); return cudaSuccess; }
cudaError_t CUDARTAPI cudaMemGetInfo(size_t* f, size_t* t) { *f = mem_total - mem_used; *t = mem_total; return cudaSuccess; }
void cusim_check_kernel_pointer(const void* p, int i, const void* fn) {
    if (p && !find_mem(p)) cusim_die("argument %d of kernel %s is %p, which is not device or pinned memory", i, fname(fn), p);
}
}

// ---- streams, events, graphs --------------------------------------------------------------------
struct Op { std::function<void()> fn; bool dev; };
struct CUgraph_st { std::vector<Op> ops; };
struct CUgraphExec_st { std::vector<Op> ops; };
struct CUstream_st { std::deque<Op> q; unsigned long pushed = 0, done = 0; bool nonblocking = false, busy = false; CUgraph_st* cap = nullptr; };
struct CUevent_st { CUstream_st* s = nullptr; unsigned long at = 0; double t = 0; bool recorded = false; };
static CUstream_st& s0() { static auto* s = new CUstream_st; return *s; }
static std::vector<CUstream_st*>& all() { static auto* v = new std::vector<CUstream_st*>{&s0()}; return *v; }
static CUstream_st* S(cudaStream_t s) { return s == nullptr || s == cudaStreamLegacy ? &s0() : s; }
static void exec(Op& o) { if (o.dev) dev_enter(); o.fn(); if (o.dev) dev_leave(); }
static void run_to(CUstream_st* s, unsigned long at) {
    while (s->done < at) { if (s->q.empty() || s->busy) cusim_die("stream order cycle"); Op o = std::move(s->q.front()); s->q.pop_front(); s->busy = true; exec(o); s->busy = false; s->done++; }
}
static void drain(CUstream_st* s) { run_to(s, s->pushed); }
void cusim_enqueue(cudaStream_t st_, bool dev, std::function<void()> fn) {
    CUstream_st* s = S(st_);
    if (s->cap) { s->cap->ops.push_back({std::move(fn), dev}); return; }
    auto push = [&](CUstream_st* d, std::function<void()> f, bool dv) { d->q.push_back({std::move(f), dv}); d->pushed++; };
    if (s == &s0()) { for (CUstream_st* o : all()) if (o != s && !o->nonblocking && o->done < o->pushed) { unsigned long at = o->pushed; push(s, [o, at] { run_to(o, at); }, false); } }
    else if (!s->nonblocking && s0().done < s0().pushed) { unsigned long at = s0().pushed; push(s, [at] { run_to(&s0(), at); }, false); }
    push(s, std::move(fn), dev);
    if (cfg.streams == ST_EAGER) drain(s);
    else if (cfg.streams == ST_RANDOM) while (rnd(2)) { CUstream_st* r = all()[rnd((uint32_t)all().size())]; if (r->done < r->pushed && !r->busy) run_to(r, r->done + 1); }
}
static size_t cusim_smem_limit(const void* fn, int set) {
    static auto* m = new std::vector<std::pair<const void*, int>>;
    for (auto& e : *m) if (e.first == fn) { if (set) e.second = set; return (size_t)e.second; }
    if (set) m->push_back({fn, set});
    return 48 << 10;
}
extern "C" cudaError_t cusim_launch(const cudaLaunchConfig_t* c, const void* fn, std::function<void()>* thunk) {
    dim3 g = c->gridDim, b = c->blockDim; size_t n = (size_t)b.x * b.y * b.z, dyn = c->dynamicSmemBytes; bool coop = false;
    if (!g.x || !g.y || !g.z || !n || n > 1024 || b.z > 64 || g.y > 65535 || g.z > 65535) return ret(cudaErrorInvalidConfiguration);
    if (dyn > cusim_smem_limit(fn, 0)) return ret(cudaErrorInvalidValue);
    for (unsigned i = 0; i < c->numAttrs; i++) if (c->attrs[i].id == cudaLaunchAttributeCooperative) coop = c->attrs[i].val.cooperative != 0;
    cusim_enqueue(c->stream, true, [=, t = std::move(*thunk)] { run_kernel(fn, g, b, dyn, coop, t); });
    return cudaSuccess;
}
static void check_range(const void* p, size_t n, int want, const char* what) {
    Mem* i = find_mem(p); bool dev = i && i->kind == cudaMemoryTypeDevice;
    if (i && (char*)p + n > i->p + i->n) cusim_die("%s: %zu bytes at %p run past the end of a %zu-byte allocation", what, n, p, i->n);
    if (want == 1 && !dev) cusim_die("%s: %p is not device memory", what, p);
    if (want == 0 && dev) cusim_die("%s: %p is device memory, host expected", what, p);
}
static bool pinned(const void* p) { return find_mem(p) != nullptr; }
extern "C" {
cudaError_t CUDARTAPI cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind k, cudaStream_t st_) {
    if (n == 0) return cudaSuccess;
    if (k != cudaMemcpyDefault) { check_range(d, n, k == cudaMemcpyHostToDevice || k == cudaMemcpyDeviceToDevice, "cudaMemcpy dst"); check_range(s, n, k == cudaMemcpyDeviceToHost || k == cudaMemcpyDeviceToDevice, "cudaMemcpy src"); }
    if (!pinned(s)) { std::vector<char> v((const char*)s, (const char*)s + n); cusim_enqueue(st_, true, [d, n, v = std::move(v)] { memcpy(d, v.data(), n); }); }
    else cusim_enqueue(st_, true, [=] { if (k == cudaMemcpyDeviceToHost && __msan_check_mem_is_initialized) __msan_check_mem_is_initialized(s, n); memcpy(d, s, n); });
    if (!pinned(d) && !S(st_)->cap) drain(S(st_));      // pageable destination: returns when the copy is done
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind k) { cudaError_t e = cudaMemcpyAsync(d, s, n, k, nullptr); drain(&s0()); return e; }
cudaError_t CUDARTAPI cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t st_) { if (n) { check_range(p, n, 1, "cudaMemset"); cusim_enqueue(st_, true, [=] { memset(p, v, n); }); } return cudaSuccess; }
cudaError_t CUDARTAPI cudaMemset(void* p, int v, size_t n) { return cudaMemsetAsync(p, v, n, nullptr); }
cudaError_t CUDARTAPI cudaStreamCreateWithFlags(cudaStream_t* s, unsigned f) { *s = new CUstream_st; (*s)->nonblocking = f & cudaStreamNonBlocking; all().push_back(*s); return cudaSuccess; }
cudaError_t CUDARTAPI cudaStreamCreateWithPriority(cudaStream_t* s, unsigned f, int) { return cudaStreamCreateWithFlags(s, f); }
cudaError_t CUDARTAPI cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithFlags(s, 0); }
cudaError_t CUDARTAPI cudaStreamDestroy(cudaStream_t s) { drain(S(s)); auto& a = all(); a.erase(std::find(a.begin(), a.end(), s)); delete s; return cudaSuccess; }
cudaError_t CUDARTAPI cudaStreamSynchronize(cudaStream_t s) { if (S(s)->cap) return ret(cudaErrorStreamCaptureUnsupported); drain(S(s)); return cudaSuccess; }
cudaError_t CUDARTAPI cudaStreamQuery(cudaStream_t s) { return S(s)->done == S(s)->pushed ? cudaSuccess : cudaErrorNotReady; }
cudaError_t CUDARTAPI cudaDeviceSynchronize(void) { for (size_t i = 0; i < all().size(); i++) drain(all()[i]); return cudaSuccess; }
cudaError_t CUDARTAPI cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { *e = new CUevent_st; return cudaSuccess; }
cudaError_t CUDARTAPI cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t CUDARTAPI cudaEventDestroy(cudaEvent_t e) { cudaDeviceSynchronize(); delete e; return cudaSuccess; }
cudaError_t CUDARTAPI cudaEventRecord(cudaEvent_t e, cudaStream_t s) { CUstream_st* x = S(s); e->s = x; e->recorded = true; cusim_enqueue(s, false, [e] { e->t = now(); }); e->at = x->pushed; return cudaSuccess; }
cudaError_t CUDARTAPI cudaEventSynchronize(cudaEvent_t e) { if (e->recorded) run_to(e->s, e->at); return cudaSuccess; }
cudaError_t CUDARTAPI cudaEventQuery(cudaEvent_t e) { return !e->recorded || e->s->done >= e->at ? cudaSuccess : cudaErrorNotReady; }
cudaError_t CUDARTAPI cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) { if (!a->recorded || !b->recorded) return ret(cudaErrorInvalidResourceHandle); if (cudaEventQuery(a) || cudaEventQuery(b)) return ret(cudaErrorNotReady); *ms = (float)((b->t - a->t) * 1e3); return cudaSuccess; }
cudaError_t CUDARTAPI cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) { if (!e->recorded || e->s == S(s)) return cudaSuccess; CUstream_st* x = e->s; unsigned long at = e->at; cusim_enqueue(s, false, [x, at] { run_to(x, at); }); return cudaSuccess; }
cudaError_t CUDARTAPI cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void* u) { cusim_enqueue(s, false, [=] { fn(u); }); return cudaSuccess; }
cudaError_t CUDARTAPI cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) { if (!s) return ret(cudaErrorStreamCaptureUnsupported); s->cap = new CUgraph_st; return cudaSuccess; }
cudaError_t CUDARTAPI cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) { *g = s->cap; s->cap = nullptr; return cudaSuccess; }
cudaError_t CUDARTAPI cudaGraphInstantiate(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long) { *e = new CUgraphExec_st{g->ops}; return cudaSuccess; }
cudaError_t CUDARTAPI cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) { for (Op& o : e->ops) { auto f = o.fn; cusim_enqueue(s, o.dev, f); } return cudaSuccess; }
cudaError_t CUDARTAPI cudaGraphDestroy(cudaGraph_t g) { delete g; return cudaSuccess; }
cudaError_t CUDARTAPI cudaGraphExecDestroy(cudaGraphExec_t e) { delete e; return cudaSuccess; }
// ---- device queries, errors ----------------------------------------------------------------------
cudaError_t CUDARTAPI cudaGetDeviceCount(int* n) { const char* e = getenv("CUSIM_DEVICES"); *n = e ? atoi(e) : 8; return cudaSuccess; }
static int g_dev = 0;
cudaError_t CUDARTAPI cudaSetDevice(int d) { int n; cudaGetDeviceCount(&n); if (d < 0 || d >= n) return ret(cudaErrorInvalidDevice); g_dev = d; return cudaSuccess; }
cudaError_t CUDARTAPI cudaGetDevice(int* d) { *d = g_dev; return cudaSuccess; }
cudaError_t CUDARTAPI cudaGetDeviceProperties(cudaDeviceProp* p, int) { memset((void*)p, 0, sizeof *p); strcpy(p->name, "CPU CUDA device"); p->major = 9; p->minor = 0; p->multiProcessorCount = 4; p->maxThreadsPerBlock = 1024; p->maxThreadsPerMultiProcessor = 2048; p->warpSize = 32; p->totalGlobalMem = mem_total; p->sharedMemPerBlock = 48 << 10; p->sharedMemPerBlockOptin = 227 << 10; p->sharedMemPerMultiprocessor = 228 << 10; p->l2CacheSize = 50 << 20; return cudaSuccess; }
cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
    switch (a) { case cudaDevAttrMultiProcessorCount: *v = 4; break; case cudaDevAttrComputeCapabilityMajor: *v = 9; break; case cudaDevAttrComputeCapabilityMinor: *v = 0; break; case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = 227 << 10; break; case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break; case cudaDevAttrWarpSize: *v = 32; break; default: return ret(cudaErrorNotSupported); }
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaFuncSetAttribute(const void* f, cudaFuncAttribute a, int v) { if (a == cudaFuncAttributeMaxDynamicSharedMemorySize) { if (v > 227 << 10) return ret(cudaErrorInvalidValue); cusim_smem_limit(f, v); } return cudaSuccess; }
cudaError_t CUDARTAPI cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int bs, size_t sm) { int a = 2048 / bs, b = sm ? (int)((228u << 10) / (sm + 1024)) : 32; *n = std::min(std::min(a, b), 32); return cudaSuccess; }
cudaError_t CUDARTAPI cudaGetLastError(void) { cudaError_t e = g_last; g_last = cudaSuccess; return e; }
cudaError_t CUDARTAPI cudaPeekAtLastError(void) { return g_last; }
const char* CUDARTAPI cudaGetErrorString(cudaError_t e) { switch (e) { case cudaSuccess: return "no error"; case cudaErrorInvalidValue: return "invalid argument"; case cudaErrorMemoryAllocation: return "out of memory"; case cudaErrorInvalidConfiguration: return "invalid configuration argument"; default: return "cuda error"; } }
const char* CUDARTAPI cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }
cudaError_t CUDARTAPI cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t CUDARTAPI cudaProfilerStop(void) { return cudaSuccess; }
cudaError_t CUDARTAPI cudaDeviceReset(void) { return cudaDeviceSynchronize(); }
cudaError_t CUDARTAPI cudaDriverGetVersion(int* v) { *v = 13000; return cudaSuccess; }
cudaError_t CUDARTAPI cudaRuntimeGetVersion(int* v) { *v = 13000; return cudaSuccess; }
}
