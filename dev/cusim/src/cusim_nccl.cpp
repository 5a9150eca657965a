// cusim_nccl.cpp - NCCL collectives between processes of one machine over POSIX shared memory.
// Unlike NCCL it checks that all ranks call the same collective with the same arguments, and it
// reports who is missing instead of hanging for ever.
#include <cusim.h>
#include <nccl.h>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <vector>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
void cusim_enqueue(cudaStream_t st, bool dev, std::function<void()> fn);
namespace {
enum { MAXR = 32, CH = 1 << 20 };
struct Call { int op, dt, red, root; size_t n; unsigned long seq; };
struct Shm { std::atomic<unsigned> joined, left, arrived, gen, dead; std::atomic<unsigned> at[MAXR]; Call call[MAXR]; alignas(64) unsigned char data[1]; };
}
struct ncclComm { int rank, n; Shm* s; size_t len; unsigned long seq; char name[64]; };
namespace {
const char* opname[] = {"AllReduce", "ReduceScatter", "AllGather", "Broadcast", "Reduce"};
void fut_wait(std::atomic<unsigned>* a, unsigned v) { timespec t{0, 100000000}; syscall(SYS_futex, a, FUTEX_WAIT, v, &t, nullptr, 0); }
void fut_wake(std::atomic<unsigned>* a) { syscall(SYS_futex, a, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0); }
void barrier(ncclComm* c) {
    Shm* s = c->s; unsigned g = s->gen.load(); s->at[c->rank]++;
    if (s->arrived.fetch_add(1) + 1 == (unsigned)c->n) { s->arrived = 0; s->gen++; fut_wake(&s->gen); return; }
    static int lim = getenv("CUSIM_NCCL_TIMEOUT") ? atoi(getenv("CUSIM_NCCL_TIMEOUT")) : 60;
    time_t t0 = time(nullptr);
    while (s->gen.load() == g) {
        fut_wait(&s->gen, g);
        if (s->dead) { fprintf(stderr, "CUSIM ERROR: rank %d: another rank aborted\n", c->rank); _exit(3); }
        if (time(nullptr) - t0 > lim) {
            s->dead = 1; fprintf(stderr, "CUSIM ERROR: NCCL %s #%lu on rank %d: timed out; ranks not in it:", opname[s->call[c->rank].op], c->seq, c->rank);
            for (int r = 0; r < c->n; r++) if (s->at[r] != s->at[c->rank]) fprintf(stderr, " %d", r);
            fprintf(stderr, "\n"); _exit(3);
        }
    }
}
size_t esz(ncclDataType_t t) { switch (t) { case ncclFloat32: case ncclInt32: case ncclUint32: return 4; case ncclBfloat16: case ncclFloat16: return 2; case ncclInt8: case ncclUint8: return 1; default: return 8; } }
void reduce(void* out, const unsigned char* base, int n, size_t stride, size_t cnt, ncclDataType_t t, ncclRedOp_t op) {
    for (size_t i = 0; i < cnt; i++) {
        double a = 0;
        for (int r = 0; r < n; r++) {
            const unsigned char* p = base + r * stride; double v;
            switch (t) { case ncclFloat32: v = ((const float*)p)[i]; break; case ncclBfloat16: v = __bfloat162float(((const __nv_bfloat16*)p)[i]); break; case ncclFloat16: v = __half2float(((const __half*)p)[i]); break; case ncclInt32: v = ((const int*)p)[i]; break; case ncclFloat64: v = ((const double*)p)[i]; break; default: cusim_die("ncclRedOp on this type"); }
            a = r == 0 ? v : op == ncclMax ? (v > a ? v : a) : op == ncclMin ? (v < a ? v : a) : op == ncclProd ? a * v : a + v;
        }
        if (op == ncclAvg) a /= n;
        switch (t) { case ncclFloat32: ((float*)out)[i] = (float)a; break; case ncclBfloat16: ((__nv_bfloat16*)out)[i] = __float2bfloat16_rn((float)a); break; case ncclFloat16: ((__half*)out)[i] = __float2half_rn((float)a); break; case ncclInt32: ((int*)out)[i] = (int)a; break; default: ((double*)out)[i] = a; }
    }
}
void run(ncclComm* c, int op, const void* sb, void* rb, size_t n, ncclDataType_t t, ncclRedOp_t red, int root) {
    Shm* s = c->s; size_t e = esz(t); c->seq++;
    s->call[c->rank] = {op, (int)t, (int)red, root, n, c->seq};
    barrier(c);
    for (int r = 0; r < c->n; r++) { Call &x = s->call[r], &y = s->call[c->rank]; if (x.op != y.op || x.dt != y.dt || x.red != y.red || x.root != y.root || x.n != y.n) { s->dead = 1; cusim_die("NCCL call #%lu differs: rank %d %s count %zu type %d, rank %d %s count %zu type %d", c->seq, c->rank, opname[y.op], y.n, y.dt, r, opname[x.op], x.n, x.dt); } }
    size_t total = op == 1 ? n * (size_t)c->n : n, per = CH / e;        // elements each rank contributes
    for (size_t o = 0; o < total; o += per) {
        size_t k = std::min(per, total - o);
        if (op != 3 || c->rank == root) memcpy(s->data + (size_t)c->rank * CH, (const char*)sb + o * e, k * e);
        barrier(c);
        if (op == 0 || (op == 4 && c->rank == root)) reduce((char*)rb + o * e, s->data, c->n, CH, k, t, red);
        else if (op == 1) { size_t lo = std::max(o, n * (size_t)c->rank), hi = std::min(o + k, n * (size_t)(c->rank + 1)); if (lo < hi) reduce((char*)rb + (lo - n * (size_t)c->rank) * e, s->data + (lo - o) * e, c->n, CH, hi - lo, t, red); }
        else if (op == 2) for (int r = 0; r < c->n; r++) memcpy((char*)rb + ((size_t)r * n + o) * e, s->data + (size_t)r * CH, k * e);
        else if (op == 3) memcpy((char*)rb + o * e, s->data + (size_t)root * CH, k * e);
        barrier(c);
    }
}
int depth = 0; struct Pend { cudaStream_t st; std::function<void()> f; }; std::vector<Pend> pend;
ncclResult_t go(ncclComm* c, int op, const void* sb, void* rb, size_t n, ncclDataType_t t, ncclRedOp_t red, int root, cudaStream_t st) {
    if (n == 0) return ncclSuccess;
    cusim_check_kernel_pointer(sb, 0, (const void*)&ncclAllReduce); cusim_check_kernel_pointer(rb, 1, (const void*)&ncclAllReduce);
    auto f = [=] { run(c, op, sb, rb, n, t, red, root); };
    if (depth) pend.push_back({st, f}); else cusim_enqueue(st, true, f);
    return ncclSuccess;
}
}  // namespace
extern "C" {
ncclResult_t ncclGetVersion(int* v) { *v = NCCL_VERSION_CODE; return ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t r) { return r ? "nccl error" : "no error"; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) { memset(id, 0, sizeof *id); timespec t; clock_gettime(CLOCK_REALTIME, &t); snprintf(id->internal, sizeof id->internal, "/emunccl-%d-%lx", (int)getpid(), (unsigned long)t.tv_nsec + (unsigned long)t.tv_sec * 1000000000ul); return ncclSuccess; }
ncclResult_t ncclCommInitRank(ncclComm_t* out, int n, ncclUniqueId id, int rank) {
    if (n < 1 || n > MAXR || rank < 0 || rank >= n) return ncclInvalidArgument;
    ncclComm* c = new ncclComm; c->rank = rank; c->n = n; c->seq = 0; c->len = sizeof(Shm) + (size_t)n * CH; memcpy(c->name, id.internal, sizeof c->name - 1); c->name[63] = 0;
    int fd = shm_open(c->name, O_RDWR | O_CREAT, 0600); if (fd < 0 || ftruncate(fd, (off_t)c->len)) return ncclSystemError;
    c->s = (Shm*)mmap(nullptr, c->len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0); close(fd); if (c->s == MAP_FAILED) return ncclSystemError;
    c->s->joined++; time_t t0 = time(nullptr);
    while (c->s->joined.load() < (unsigned)n) { usleep(1000); if (time(nullptr) - t0 > 60) return ncclSystemError; }
    barrier(c); if (rank == 0) shm_unlink(c->name);
    *out = c; return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t c) { cudaDeviceSynchronize(); munmap(c->s, c->len); delete c; return ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t c, int* n) { *n = c->n; return ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t c, int* r) { *r = c->rank; return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* e) { *e = ncclSuccess; return ncclSuccess; }
ncclResult_t ncclGroupStart(void) { depth++; return ncclSuccess; }
ncclResult_t ncclGroupEnd(void) { if (--depth == 0) { for (auto& p : pend) cusim_enqueue(p.st, true, p.f); pend.clear(); } return ncclSuccess; }
ncclResult_t ncclAllReduce(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t o, ncclComm_t c, cudaStream_t st) { return go(c, 0, s, r, n, t, o, 0, st); }
ncclResult_t ncclReduceScatter(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t o, ncclComm_t c, cudaStream_t st) { return go(c, 1, s, r, n, t, o, 0, st); }
ncclResult_t ncclAllGather(const void* s, void* r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t st) { return go(c, 2, s, r, n, t, ncclSum, 0, st); }
ncclResult_t ncclBroadcast(const void* s, void* r, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t st) { return go(c, 3, s, r, n, t, ncclSum, root, st); }
ncclResult_t ncclReduce(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t o, int root, ncclComm_t c, cudaStream_t st) { return go(c, 4, s, r, n, t, o, root, st); }
}
