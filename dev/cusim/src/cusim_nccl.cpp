// cusim_nccl.cpp -- NCCL between processes of one machine, over POSIX shared memory. Sums are made
// in double, in rank order, and rounded once, so all ranks get the same bits.
//
// NCCL hangs or corrupts memory when ranks disagree. Here every collective is announced first, and
// compared; a receive is compared with its send. Ranks that call different collectives are
// reported, and so are ranks that do not arrive in time, and two ranks that issue the operations of
// two communicators in different orders.
//
// As on a GPU, work that waits for other ranks holds up its own stream only. It is done in steps:
// if the awaited rank is waiting itself, other streams of this process progress.
#if __has_include(<nccl.h>) // else programs that use it do not link
#include "cusim_internal.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <ctime>
#include <deque>
#include <memory>
#include <string>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <nccl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

enum { MAX_RANKS = 32, MAX_COMMUNICATORS = 16, NAME_ROOM = 24, CHUNK_BYTES = 1 << 20, MAIL_BYTES = 1 << 16 };
typedef enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, SEND, RECEIVE } Kind;
const char* const kind_names[] = {"AllReduce", "ReduceScatter", "AllGather", "Broadcast",
                                  "Reduce",    "Send",          "Recv"};

struct Call {
    Kind kind;
    ncclDataType_t type;
    ncclRedOp_t reduction;
    int root; // the other rank of SEND and RECEIVE
    size_t count;
    bool is_captured;
};

// Operations that a rank has issued in a communicator: collectives, and messages to and from each
// rank.
struct Issued {
    size_t communicator; // the same number in all of its ranks
    char name[NAME_ROOM];
    int rank;
    unsigned collectives, sent[MAX_RANKS], received[MAX_RANKS];
};

// Operations that a rank has issued in all of its communicators before a certain one.
struct Before {
    int count;
    Issued in[MAX_COMMUNICATORS];
};

// Channel from one rank to another, which carries a piece at a time.
struct Mail {
    std::atomic<unsigned> posted, taken;
    Call call;
    Before before; // the send
    size_t bytes;
    alignas(64) unsigned char data[MAIL_BYTES];
};

// Memory that the ranks share. It is followed by the chunks of all ranks, then mail from each to
// each. The system allocates a page when it is first used.
struct Shared {
    std::atomic<unsigned> joined, dead;
    std::atomic<unsigned> changes;         // waiting ranks sleep on it
    std::atomic<unsigned> here[MAX_RANKS]; // number of meetings that each rank has reached
    std::atomic<unsigned> host[MAX_RANKS]; // the same for the host, in ncclCommSplit
    std::atomic<unsigned> waits[MAX_RANKS];
    std::atomic<unsigned> taken[MAX_RANKS]; // claimed by a process
    int color[MAX_RANKS], key[MAX_RANKS];
    int process[MAX_RANKS]; // see ncclComm
    Call call[MAX_RANKS];
    Before before[MAX_RANKS]; // the call
    alignas(64) unsigned char data[1];
};

// Time without work. A process that computes does not wait.
struct Patience {
    double start_s, last_s; // 0: not waiting
    double seen_s;          // since then, the others' flags have been `seen`
    unsigned seen[MAX_RANKS];
};

} // namespace

struct ncclComm {
    int rank, ranks;
    int process; // rank in the communicator from which all were split; messages name ranks so
    Shared* shared;
    size_t shared_bytes;
    unsigned long calls; // operations of this rank
    Issued issued;
    unsigned splits;
    size_t taken_bytes[2]; // device memory: for collectives; for sends and receives
    bool is_blocking;
    ncclResult_t error;
    char file[128]; // name of the shared memory
};

namespace {

unsigned char* chunk_of(const ncclComm* comm, int rank) {
    return comm->shared->data + (size_t)rank * CHUNK_BYTES;
}
Mail* mail_of(const ncclComm* comm, int from, int to) {
    return (Mail*)chunk_of(comm, comm->ranks) + from * comm->ranks + to;
}

// ---- ranks wait for each other ----

void wake_all(Shared* shared) {
    shared->changes++;
    syscall(SYS_futex, &shared->changes, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}
void sleep_shortly(Shared* shared, unsigned changes) { // at most 2 ms
    timespec time = {0, 2000000};
    syscall(SYS_futex, &shared->changes, FUTEX_WAIT, changes, &time, nullptr, 0);
}

double timeout_s() {
    static const double seconds = (double)environment_number("CUSIM_NCCL_TIMEOUT", 60, 1, 86400);
    return seconds;
}

void die_with_others(const ncclComm* comm) {
    if (comm->shared->dead) {
        fprintf(stderr, "CUSIM ERROR: rank %d: another rank aborted\n", comm->process);
        _exit(3);
    }
}

// Returns true if all ranks in `missing` wait, and have done so for a while, not just until this
// rank wakes them.
bool all_wait(const ncclComm* comm, uint32_t missing, Patience* p) {
    bool same = true;
    for (int r = 0; r < comm->ranks; r++) {
        const unsigned flag = comm->shared->waits[r].load();
        if (missing >> r & 1 && r != comm->rank) {
            same = same && flag % 2 && flag == p->seen[r];
        }
        p->seen[r] = flag;
    }
    p->seen_s = same ? p->seen_s : now_s();
    return now_s() > p->seen_s + 0.05;
}

// Sleeps a little unless something has changed. Returns true if the time is up.
bool wait_a_little(const ncclComm* comm, unsigned changes, Patience* p) {
    if (p->start_s == 0) {
        p->start_s = p->last_s = p->seen_s = now_s();
    }
    process_waits(true);
    sleep_shortly(comm->shared, changes);
    die_with_others(comm);
    const double now = now_s();
    p->start_s += now > p->last_s + 0.5 ? now - p->last_s : 0;
    p->last_s = now;
    return now > p->start_s + timeout_s();
}

// Waits in the host while the streams progress. Returns false if the time is up.
template <class F> bool host_waits(const ncclComm* comm, F is_reached) {
    Patience patience = {};
    for (;;) {
        const unsigned changes = comm->shared->changes.load();
        if (is_reached()) {
            process_waits(false);
            return true;
        }
        if (wait_a_little(comm, changes, &patience)) {
            return false;
        }
        if (patience.last_s > patience.start_s + 0.1) {
            streams_advance_any(nullptr);
        }
    }
}

// Returns the ranks that have reached fewer meetings than this one.
uint32_t late_ranks(const ncclComm* comm, const std::atomic<unsigned>* meetings) {
    uint32_t late = 0;
    for (int r = 0; r < comm->ranks; r++) {
        late |= (uint32_t)((int)(meetings[r].load() - meetings[comm->rank].load()) < 0) << r;
    }
    return late;
}
void come_to(const ncclComm* comm, std::atomic<unsigned>* meetings) {
    meetings[comm->rank]++;
    if (!late_ranks(comm, meetings)) {
        wake_all(comm->shared);
    }
}

std::string ranks_in(const ncclComm* comm, uint32_t set) {
    std::string text;
    for (int r = 0; r < comm->ranks; r++) {
        text += set >> r & 1 ? " " + std::to_string(comm->shared->process[r]) : "";
    }
    return text;
}

// Returns the name of a communicator after `word`, if it has one.
std::string named(const char* word, const char* name) { return name[0] ? std::string(word) + name : ""; }

// Returns words for a call of this rank: "call #7 of tensor".
std::string words_of(const ncclComm* comm, unsigned long number) {
    return "call #" + std::to_string(number) + named(" of ", comm->issued.name);
}

std::string words_of(const Call& call) {
    return std::string(kind_names[call.kind]) + " count " + std::to_string(call.count) + " type " +
           std::to_string(call.type) + (call.is_captured ? ", captured" : "");
}

// ---- reductions ----

size_t type_bytes(ncclDataType_t type) {
    switch (type) {
    case ncclInt8:
    case ncclUint8:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
        return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
        return 8;
    default:
        cusim_die("NCCL data type %d is not supported", (int)type);
    }
}

double load(const unsigned char* from, size_t i, ncclDataType_t type) {
    switch (type) {
    case ncclFloat32:
        return ((const float*)from)[i];
    case ncclFloat64:
        return ((const double*)from)[i];
    case ncclBfloat16:
        return __bfloat162float(((const __nv_bfloat16*)from)[i]);
    case ncclFloat16:
        return __half2float(((const __half*)from)[i]);
    case ncclInt32:
        return ((const int*)from)[i];
    default:
        cusim_die("reduction of NCCL data type %d is not supported", (int)type);
    }
}

void store(void* to, size_t i, ncclDataType_t type, double x) {
    switch (type) {
    case ncclFloat32:
        ((float*)to)[i] = (float)x;
        break;
    case ncclFloat64:
        ((double*)to)[i] = x;
        break;
    case ncclBfloat16:
        ((__nv_bfloat16*)to)[i] = __float2bfloat16_rn((float)x);
        break;
    case ncclFloat16:
        ((__half*)to)[i] = __float2half_rn((float)x);
        break;
    default:
        ((int*)to)[i] = (int)x;
        break;
    }
}

double combine(double a, double b, ncclRedOp_t reduction) {
    switch (reduction) {
    case ncclMax:
        return b > a ? b : a;
    case ncclMin:
        return b < a ? b : a;
    case ncclProd:
        return a * b;
    default:
        return a + b;
    }
}

// Reduces elements [first, first + count) of the ranks' chunks.
void reduce(void* to, const ncclComm* comm, size_t first, size_t count, const Call& call) {
    for (size_t i = 0; i < count; i++) {
        double x = load(chunk_of(comm, 0), first + i, call.type);
        for (int r = 1; r < comm->ranks; r++) {
            x = combine(x, load(chunk_of(comm, r), first + i, call.type), call.reduction);
        }
        store(to, i, call.type, call.reduction == ncclAvg ? x / comm->ranks : x);
    }
}

// ---- faults on request ----

// Injects the fault CUSIM_NCCL_FAULT=rank:call:die|hang|error[@name] in the call of this number,
// counted from 1 in each communicator; with a name, only in communicators with this name. Returns
// true for `error`: ncclCommGetAsyncError reports it from now on, and no data is moved.
bool fault(ncclComm* comm, unsigned long number) {
    const char* text = getenv("CUSIM_NCCL_FAULT");
    int rank = -1, end = 0;
    unsigned long call = 0;
    char what[8] = "";
    if (!text || !text[0]) {
        return false;
    }
    if (sscanf(text, "%d:%lu:%7[a-z]%n", &rank, &call, what, &end) != 3 || (text[end] && text[end] != '@') ||
        (strcmp(what, "die") != 0 && strcmp(what, "hang") != 0 && strcmp(what, "error") != 0)) {
        cusim_die("CUSIM_NCCL_FAULT=%s; wanted rank:call:die, hang or error, then perhaps @name", text);
    }
    if (rank != comm->process || call != number ||
        (text[end] && strcmp(text + end + 1, comm->issued.name) != 0)) {
        return false;
    }
    if (strcmp(what, "die") == 0) {
        raise(SIGKILL);
    }
    while (strcmp(what, "hang") == 0) {
        pause();
    }
    comm->error = ncclRemoteError;
    return true;
}

// ---- work, in steps ----

// An operation on a stream. Operations of one communicator run in the order in which they were
// issued, on whatever streams.
struct Work {
    ncclComm* comm = nullptr;
    unsigned long number = 0; // starts at 1
    CUstream_st* stream = nullptr;
    Before before = {};
    Patience patience = {};
    bool has_begun = false;

    virtual ~Work() = default;
    virtual void count(Issued* issued) const = 0; // adds itself
    virtual bool move() = 0;                      // does what can be done; false: nothing can
    virtual bool is_done() const = 0;
    virtual uint32_t missing() const = 0; // the ranks it waits for
    virtual std::string late() const = 0; // message about them when the time is up
};

std::vector<ncclComm*>& communicators() { // of this process
    static auto* list = new std::vector<ncclComm*>;
    return *list;
}
std::deque<Work*>& unfinished() { // operations of this process, in the order of their issue
    static auto* list = new std::deque<Work*>;
    return *list;
}

void issue(Work* work, ncclComm* comm, CUstream_st* stream) {
    work->comm = comm;
    work->number = ++comm->calls;
    work->stream = stream;
    for (const ncclComm* each : communicators()) {
        work->before.in[work->before.count++] = each->issued;
    }
    work->count(&comm->issued);
    unfinished().push_back(work);
}

void exit_because_late(const Work* work) {
    work->comm->shared->dead = 1;
    fprintf(stderr, "CUSIM ERROR: NCCL %s on rank %d: %s\n", words_of(work->comm, work->number).c_str(),
            work->comm->process, work->late().c_str());
    _exit(3);
}

// CUSIM_NCCL_SERIAL: how many operations of a process run at a time.
typedef enum {
    SERIAL_NOT, // any number
    SERIAL_AS_ISSUED,
    SERIAL_AS_READY // one, whichever starts first
} Serial;

// Returns the version that CUSIM_NCCL_VERSION asks for.
int version() {
    static const int number =
        (int)environment_number("CUSIM_NCCL_VERSION", NCCL_VERSION_CODE, 21800, NCCL_VERSION_CODE);
    return number;
}

// Returns true if NCCL keeps the host's order among all communicators of a process. NCCL reads its
// variables once, so a program that sets this one too late does not get it.
bool keeps_order() {
    static const bool keeps =
        version() >= 22600 && environment_number("NCCL_LAUNCH_ORDER_IMPLICIT", 0, 0, 1) != 0;
    return keeps;
}

Serial serial() {
    static const Serial mode = (Serial)environment_number("CUSIM_NCCL_SERIAL", 0, 0, 2);
    return mode == SERIAL_AS_READY && keeps_order() ? SERIAL_AS_ISSUED : mode;
}

// Returns an operation that must be done before this one starts or continues; NULL: none.
const Work* work_before(const Work* work) {
    bool is_earlier = true;
    for (const Work* other : unfinished()) {
        is_earlier = is_earlier && other != work;
        if ((is_earlier && (other->comm == work->comm || serial() == SERIAL_AS_ISSUED)) ||
            (other != work && other->has_begun && serial() == SERIAL_AS_READY)) {
            return other;
        }
    }
    return nullptr;
}

void finish(Work* work) {
    cusim_pass_time(OPERATION_S);
    unfinished().erase(std::find(unfinished().begin(), unfinished().end(), work));
}

Step step(Work* work) {
    ncclComm* comm = work->comm;
    const Work* first = work_before(work);
    if (first) {
        return first->stream == work->stream ? STEP_STUCK // the same one: another node of the graph
                                             : stream_advance(first->stream);
    }
    const unsigned changes = comm->shared->changes.load();
    device_memory_open();
    const bool is_first = !work->has_begun;
    work->has_begun = true;
    const bool moved = config.dry || (is_first && fault(comm, work->number)) || work->move();
    const bool is_done = config.dry || comm->error || work->is_done();
    device_memory_close();
    if (is_done) {
        finish(work);
    }
    if (moved || is_done) {
        process_waits(false);
        work->patience = {};
        return is_done ? STEP_DONE : STEP_MOVED;
    }
    if (wait_a_little(comm, changes, &work->patience)) {
        exit_because_late(work);
    }
    return all_wait(comm, work->missing(), &work->patience) ? STEP_STUCK : STEP_WAITING;
}

// ---- orders of two ranks ----

// Number of operations of a kind that both ranks have issued in another communicator: messages from
// a process to another one, or collectives (-1, -1).
struct Compared {
    unsigned mine, other;
    int from, to;
};

// Reports that a rank issues an operation, number `number`, before one in another communicator, and
// another rank after it.
[[noreturn]] void exit_because_of_order(const ncclComm* comm, unsigned long number, const Issued& in,
                                        int rank, const Compared& c) {
    const bool is_first = c.mine < c.other;
    const std::string route =
        c.from < 0 ? "" : " from " + std::to_string(c.from) + " to " + std::to_string(c.to);
    comm->shared->dead = 1;
    cusim_die("NCCL order: rank %d issues %s before %s #%u%s%s, rank %d after it",
              comm->shared->process[is_first ? comm->rank : rank], words_of(comm, number).c_str(),
              c.from < 0 ? "collective" : "message", std::min(c.mine, c.other) + 1,
              named(" of ", in.name).c_str(), route.c_str(),
              comm->shared->process[is_first ? rank : comm->rank]);
}

// Compares what two ranks of a communicator have issued in their other ones before operation number
// `number` of both. Numbers that differ are those of operations on different sides of it.
void compare_orders(const ncclComm* comm, unsigned long number, const Before& mine, int rank,
                    const Before& other) {
    const int here = comm->process, there = comm->shared->process[rank];
    for (const Issued* a = mine.in; a < mine.in + mine.count; a++) {
        for (const Issued* b = other.in; b < other.in + other.count; b++) {
            const Compared all[] = {{a->collectives, b->collectives, -1, -1},
                                    {a->sent[b->rank], b->received[a->rank], here, there},
                                    {a->received[b->rank], b->sent[a->rank], there, here}};
            for (const Compared& c : all) {
                if (a->communicator == b->communicator && a->communicator != comm->issued.communicator &&
                    c.mine != c.other) {
                    exit_because_of_order(comm, number, *a, rank, c);
                }
            }
        }
    }
}

// ---- collectives, chunk by chunk ----

// Every rank puts its elements into its chunk, all meet, and every rank takes its results.

// Takes the results of elements [first, first + count), which are in the chunks.
void take_results(const ncclComm* comm, char* receive, size_t first, size_t count, const Call& call) {
    const size_t bytes = type_bytes(call.type);
    switch (call.kind) {
    case ALL_REDUCE:
        reduce(receive + first * bytes, comm, 0, count, call);
        break;
    case REDUCE:
        if (comm->rank == call.root) {
            reduce(receive + first * bytes, comm, 0, count, call);
        }
        break;
    case REDUCE_SCATTER: { // the part of the chunk in this rank's share
        const size_t share = call.count * (size_t)comm->rank;
        const size_t low = std::max(first, share), high = std::min(first + count, share + call.count);
        if (low < high) {
            reduce(receive + (low - share) * bytes, comm, low - first, high - low, call);
        }
        break;
    }
    case ALL_GATHER:
        for (int r = 0; r < comm->ranks; r++) {
            memcpy(receive + ((size_t)r * call.count + first) * bytes, chunk_of(comm, r), count * bytes);
        }
        break;
    case BROADCAST:
        memcpy(receive + first * bytes, chunk_of(comm, call.root), count * bytes);
        break;
    default:
        break;
    }
}

void compare_calls(const ncclComm* comm, unsigned long number) {
    const Call& mine = comm->shared->call[comm->rank];
    for (int r = 0; r < comm->ranks; r++) {
        const Call& other = comm->shared->call[r];
        if (mine.kind != other.kind || mine.type != other.type || mine.reduction != other.reduction ||
            mine.root != other.root || mine.count != other.count || mine.is_captured != other.is_captured) {
            comm->shared->dead = 1;
            cusim_die("NCCL %s differs: rank %d %s, rank %d %s", words_of(comm, number).c_str(),
                      comm->process, words_of(mine).c_str(), comm->shared->process[r],
                      words_of(other).c_str());
        }
    }
}

struct Collective : Work {
    Call call;
    const char* send;
    char* receive;
    enum { ANNOUNCE, COMPARE, GIVE, TAKE, LEAVE, DONE } phase = ANNOUNCE;
    size_t first = 0, part = 0; // elements in the chunks

    size_t total() const {
        return call.kind == REDUCE_SCATTER ? call.count * (size_t)comm->ranks : call.count;
    }
    void count(Issued* issued) const override { issued->collectives++; }
    bool is_done() const override { return phase == DONE; }
    uint32_t missing() const override { return late_ranks(comm, comm->shared->here); }
    std::string late() const override {
        return std::string(kind_names[call.kind]) +
               " timed out; ranks not in it:" + ranks_in(comm, missing());
    }
    void compare() const {
        compare_calls(comm, number);
        for (int r = 0; r < comm->ranks; r++) {
            compare_orders(comm, number, before, r, comm->shared->before[r]);
        }
    }
    void give() {
        const size_t bytes = type_bytes(call.type);
        part = std::min(CHUNK_BYTES / bytes, total() - first);
        if (call.kind != BROADCAST || comm->rank == call.root) {
            memcpy(chunk_of(comm, comm->rank), send + first * bytes, part * bytes);
        }
    }
    bool move() override {
        Shared* shared = comm->shared;
        if (phase != ANNOUNCE && phase != GIVE && missing()) {
            return false;
        }
        switch (phase) {
        case ANNOUNCE:
            shared->call[comm->rank] = call;
            shared->before[comm->rank] = before;
            break;
        case COMPARE:
            compare();
            phase = GIVE; // no meeting in between
            give();
            break;
        case GIVE:
            give();
            break;
        case TAKE:
            take_results(comm, receive, first, part, call);
            break;
        default:
            first += part;
            phase = first < total() ? GIVE : DONE;
            return true;
        }
        phase = (decltype(phase))(phase + 1);
        come_to(comm, shared->here);
        return true;
    }
};

// ---- sends and receives ----

struct Transfer {
    Call call;
    char* data;
    size_t done; // bytes
};

// The sends and receives of one group, all in progress at the same time. Those between two ranks
// keep their order.
struct Exchange : Work {
    std::vector<Transfer> transfers;

    static size_t bytes_of(const Call& call) { return call.count * type_bytes(call.type); }
    Mail* mail(const Transfer& t) const {
        return t.call.kind == SEND ? mail_of(comm, comm->rank, t.call.root)
                                   : mail_of(comm, t.call.root, comm->rank);
    }
    // Returns true if a transfer is complete. A send ends when all its data has been taken. While
    // it waits for that, later sends to the same rank wait, too.
    bool is_finished(const Transfer& t) const {
        return t.done == bytes_of(t.call) && (t.call.kind == RECEIVE || mail(t)->posted == mail(t)->taken);
    }
    void count(Issued* issued) const override {
        for (const Transfer& t : transfers) {
            (t.call.kind == SEND ? issued->sent : issued->received)[t.call.root]++;
        }
    }
    bool is_done() const override { return transfers.empty(); }
    uint32_t missing() const override {
        uint32_t ranks = 0;
        for (const Transfer& t : transfers) {
            ranks |= 1u << t.call.root;
        }
        return ranks;
    }
    std::string late() const override {
        const Call& call = transfers[0].call;
        const bool is_send = call.kind == SEND;
        return words_of(call) + (is_send ? " to" : " from") + " rank " +
               std::to_string(comm->shared->process[call.root]) + " timed out, without its " +
               kind_names[is_send ? RECEIVE : SEND];
    }
    bool post(Transfer* t, Mail* mail) const {
        if (mail->posted != mail->taken) {
            return false;
        }
        mail->call = t->call;
        if (t->done == 0) {
            mail->before = before;
        }
        mail->bytes = std::min(bytes_of(t->call) - t->done, (size_t)MAIL_BYTES);
        memcpy(mail->data, t->data + t->done, mail->bytes);
        t->done += mail->bytes;
        mail->posted++;
        wake_all(comm->shared);
        return true;
    }
    bool take(Transfer* t, Mail* mail) const {
        if (mail->posted == mail->taken) {
            return false;
        }
        const Call &mine = t->call, &other = mail->call;
        if (mine.count != other.count || mine.type != other.type || mine.is_captured != other.is_captured) {
            comm->shared->dead = 1;
            cusim_die("NCCL %s differs: rank %d %s, rank %d %s", words_of(comm, number).c_str(),
                      comm->process, words_of(mine).c_str(), comm->shared->process[mine.root],
                      words_of(other).c_str());
        }
        if (t->done == 0) {
            compare_orders(comm, number, before, mine.root, mail->before);
        }
        memcpy(t->data + t->done, mail->data, mail->bytes);
        t->done += mail->bytes;
        mail->taken++;
        wake_all(comm->shared);
        return true;
    }
    bool move() override {
        // ranks: only the first send to each, and the first receive from it
        uint32_t tried[2] = {0, 0};
        bool moved = false;
        for (Transfer& t : transfers) {
            uint32_t* ranks = &tried[t.call.kind == SEND];
            if (!(*ranks >> t.call.root & 1) && t.done < bytes_of(t.call)) {
                moved |= t.call.kind == SEND ? post(&t, mail(t)) : take(&t, mail(t));
            }
            *ranks |= 1u << t.call.root;
        }
        const auto end = std::remove_if(transfers.begin(), transfers.end(),
                                        [this](const Transfer& t) { return is_finished(t); });
        moved |= end != transfers.end();
        transfers.erase(end, transfers.end());
        return moved;
    }
};

// ---- putting work on streams ----

bool is_captured(cudaStream_t stream) {
    cudaStreamCaptureStatus status;
    cudaStreamIsCapturing(stream, &status);
    return status == cudaStreamCaptureStatusActive;
}

// Checks that [pointer, pointer + bytes) is device memory: nothing else is promised, although
// kernels can read pinned memory.
void check_range(const void* pointer, size_t bytes, const char* what) {
    const Allocation* allocation = pointer ? allocation_of(pointer) : nullptr;
    if (!allocation || allocation->kind != MEMORY_DEVICE) {
        cusim_die("NCCL %s: %p is not device memory", what, pointer);
    }
    const size_t room = (size_t)(allocation->data + allocation->bytes - (const char*)pointer);
    if (bytes > room) {
        cusim_die("NCCL %s: %zu bytes, but only %zu are left of the allocation", what, bytes, room);
    }
}

// Checks that ranges do not overlap, except in place.
void check_overlap(const char* a, size_t a_bytes, const char* b, size_t b_bytes, const char* in_place,
                   const char* what) {
    if (a < b + b_bytes && b < a + a_bytes && in_place != a) {
        cusim_die("NCCL %s: what is sent and what is received overlap", what);
    }
}

// Call within a group, which waits for the group's end.
struct Pending {
    ncclComm* comm;
    cudaStream_t stream;
    Call call;
    const void* send;
    void* receive;
};
int group_depth = 0;
std::vector<Pending>& pending() {
    static auto* list = new std::vector<Pending>;
    return *list;
}

void enqueue_collective(const Pending& p) {
    Collective work;
    work.call = p.call;
    work.send = (const char*)p.send;
    work.receive = (char*)p.receive;
    enqueue_steps(p.stream, [work, comm = p.comm](CUstream_st* stream) {
        const auto queued = std::make_shared<Collective>(work);
        issue(queued.get(), comm, stream);
        return [queued] { return step(queued.get()); };
    });
}

// Queues the sends and receives of this communicator in the group.
void enqueue_exchange(const std::vector<Pending>& group, const Pending& first) {
    Exchange work;
    for (const Pending& p : group) {
        if (p.comm == first.comm && p.call.kind >= SEND) {
            if (p.stream != first.stream) {
                cusim_die("NCCL: a group with sends or receives of one communicator on several streams is "
                          "not supported");
            }
            work.transfers.push_back({p.call, (char*)(p.call.kind == SEND ? (void*)p.send : p.receive), 0});
        }
    }
    for (const Transfer& sent : work.transfers) {
        for (const Transfer& received : work.transfers) {
            if (sent.call.kind == SEND && received.call.kind == RECEIVE) {
                check_overlap(sent.data, Exchange::bytes_of(sent.call), received.data,
                              Exchange::bytes_of(received.call), nullptr, "Send and Recv");
            }
        }
    }
    enqueue_steps(first.stream, [work, comm = first.comm](CUstream_st* stream) {
        const auto queued = std::make_shared<Exchange>(work);
        issue(queued.get(), comm, stream);
        return [queued] { return step(queued.get()); };
    });
}

void enqueue_group() {
    std::vector<Pending> group;
    std::vector<const ncclComm*> exchanged;
    group.swap(pending());
    for (const Pending& p : group) {
        if (p.call.kind < SEND) {
            enqueue_collective(p);
        } else if (std::find(exchanged.begin(), exchanged.end(), p.comm) == exchanged.end()) {
            exchanged.push_back(p.comm);
            enqueue_exchange(group, p);
        }
    }
}

void check_buffers(const Pending& p) {
    const Call& call = p.call;
    const size_t bytes = call.count * type_bytes(call.type), all = bytes * (size_t)p.comm->ranks;
    const size_t sent = call.kind == REDUCE_SCATTER ? all : bytes,
                 received = call.kind == ALL_GATHER ? all : bytes;
    const bool is_root = p.comm->rank == call.root;
    const bool sends = call.kind != RECEIVE && (call.kind != BROADCAST || is_root);
    const bool receives = call.kind != SEND && (call.kind != REDUCE || is_root);
    const char *send = (const char*)p.send, *receive = (const char*)p.receive;
    if (sends) {
        check_range(send, sent, kind_names[call.kind]);
    }
    if (receives) {
        check_range(receive, received, kind_names[call.kind]);
    }
    if (sends && receives) {
        const size_t own = bytes * (size_t)p.comm->rank;
        const char* in_place = call.kind == ALL_GATHER       ? receive + own
                               : call.kind == REDUCE_SCATTER ? receive - own
                                                             : receive;
        check_overlap(send, sent, receive, received, in_place, kind_names[call.kind]);
    }
}

// Allocates buffers, like NCCL at the first use of a kind of operation.
bool take_memory(ncclComm* comm, Kind kind) {
    size_t* taken = &comm->taken_bytes[kind >= SEND];
    const size_t bytes = environment_number("CUSIM_NCCL_MIB", 32, 0, 1ul << 20) << 20;
    if (*taken == 0 && !device_memory_take(bytes)) {
        return false;
    }
    *taken = bytes;
    return true;
}

ncclResult_t enqueue(ncclComm* comm, const void* send, void* receive, Call call, cudaStream_t stream) {
    if (call.root < 0 || call.root >= comm->ranks) {
        return ncclInvalidArgument;
    }
    if (comm->error || comm->shared->joined.load() < (unsigned)comm->ranks) {
        return comm->error ? comm->error : ncclInvalidUsage; // not ready
    }
    if (call.count == 0) {
        return ncclSuccess;
    }
    if (stream_accepts(stream) != cudaSuccess || !take_memory(comm, call.kind)) {
        return ncclUnhandledCudaError;
    }
    call.is_captured = is_captured(stream);
    pending().push_back({comm, stream, call, send, receive});
    check_buffers(pending().back());
    if (group_depth == 0) {
        enqueue_group();
    }
    return ncclSuccess;
}

// ---- communicators ----

// Returns the name in the configuration; empty if it has none.
const char* name_in(const ncclConfig_t* config) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    if (config && config->commName != NCCL_CONFIG_UNDEF_PTR) {
        return config->commName;
    }
#endif
    (void)config;
    return "";
}

// Sets what this process knows of a communicator before it joins.
void describe(ncclComm* comm, const char* file, int ranks, int rank, int process,
              const ncclConfig_t* config) {
    comm->rank = comm->issued.rank = rank;
    comm->ranks = ranks;
    comm->process = process;
    comm->shared_bytes =
        sizeof(Shared) + (size_t)ranks * CHUNK_BYTES + (size_t)ranks * (size_t)ranks * sizeof(Mail);
    comm->issued.communicator = std::hash<std::string>()(file);
    snprintf(comm->issued.name, sizeof(comm->issued.name), "%s", name_in(config));
    snprintf(comm->file, sizeof(comm->file), "%s", file);
}

// Joins a communicator. The name of the shared memory exists until all ranks have joined.
ncclResult_t join(ncclComm_t* out, const char* name, int ranks, int rank, int process, bool is_blocking,
                  const ncclConfig_t* config) {
    ncclComm* comm = new ncclComm();
    *out = nullptr;
    keeps_order(); // reads its variable, once
    describe(comm, name, ranks, rank, process, config);
    comm->is_blocking = is_blocking;
    if (communicators().size() == MAX_COMMUNICATORS) {
        cusim_die("NCCL: more than %d communicators in a process", MAX_COMMUNICATORS);
    }
    const int file = shm_open(name, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, (off_t)comm->shared_bytes)) {
        delete comm;
        return ncclSystemError;
    }
    void* memory = mmap(nullptr, comm->shared_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) {
        delete comm;
        return ncclSystemError;
    }
    comm->shared = (Shared*)memory;
    if (comm->shared->taken[rank].exchange(1)) {
        cusim_die("NCCL: rank %d of %d joins twice", rank, ranks);
    }
    comm->shared->process[rank] = process;
    waiting_flags().push_back(&comm->shared->waits[rank]);
    communicators().push_back(comm);
    *out = comm;
    if (comm->shared->joined.fetch_add(1) + 1 == (unsigned)ranks) {
        shm_unlink(name);
        wake_all(comm->shared);
    }
    if (!is_blocking) {
        return ncclInProgress;
    }
    const bool all = host_waits(comm, [=] { return comm->shared->joined.load() == (unsigned)ranks; });
    return all ? ncclSuccess : ncclSystemError;
}

bool is_blocking(const ncclConfig_t* config, bool otherwise) {
    return !config || config->blocking == NCCL_CONFIG_UNDEF_INT ? otherwise : config->blocking != 0;
}

} // namespace

// ---- the interface ----

extern "C" {

ncclResult_t ncclGetVersion(int* number) {
    *number = version();
    return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
    static const char* const words[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return (unsigned)result < sizeof(words) / sizeof(words[0]) ? words[result] : "unknown result code";
}
const char* ncclGetLastError(ncclComm_t comm) {
    return comm && comm->error ? "asked for by CUSIM_NCCL_FAULT" : "";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    memset(id, 0, sizeof(*id));
    snprintf(id->internal, sizeof(id->internal), "/cusim-nccl-%d-%lx", (int)getpid(),
             (unsigned long)time.tv_nsec + (unsigned long)time.tv_sec * 1000000000ul);
    return ncclSuccess;
}

// Joins a communicator. The id is the name of the shared memory.
ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
    const ncclConfig_t wanted = NCCL_CONFIG_INITIALIZER;
    id.internal[sizeof(id.internal) - 1] = 0;
    if (ranks < 1 || ranks > MAX_RANKS || rank < 0 || rank >= ranks ||
        strncmp(id.internal, "/cusim-nccl-", 12) != 0 ||
        (config && (config->magic != wanted.magic || config->size != wanted.size))) {
        return ncclInvalidArgument;
    }
    return join(out, id.internal, ranks, rank, rank, is_blocking(config, true), config);
}
ncclResult_t ncclCommInitRank(ncclComm_t* out, int ranks, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(out, ranks, id, rank, nullptr);
}

// Splits a communicator: all ranks publish their color and key; then each knows its group.
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out, ncclConfig_t* config) {
    Shared* shared = comm->shared;
    auto all_are_here = [=] { return !late_ranks(comm, shared->host); };
    int rank = 0, ranks = 0;
    char name[sizeof(comm->file) + 32];
    shared->color[comm->rank] = color;
    shared->key[comm->rank] = key;
    come_to(comm, shared->host);
    if (!host_waits(comm, all_are_here)) {
        cusim_die("NCCL CommSplit on rank %d: timed out; ranks not in it:%s", comm->process,
                  ranks_in(comm, late_ranks(comm, shared->host)).c_str());
    }
    for (int r = 0; r < comm->ranks; r++) {
        if (shared->color[r] == color) {
            ranks++;
            rank += shared->key[r] < key || (shared->key[r] == key && r < comm->rank);
        }
    }
    snprintf(name, sizeof(name), "%s-%u.%d", comm->file, ++comm->splits, color);
    come_to(comm, shared->host); // before the next split overwrites the colors
    if (!host_waits(comm, all_are_here)) {
        return ncclSystemError;
    }
    *out = nullptr;
    return color == NCCL_SPLIT_NOCOLOR
               ? ncclSuccess
               : join(out, name, ranks, rank, comm->process, is_blocking(config, comm->is_blocking), config);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    std::vector<std::atomic<unsigned>*>& flags = waiting_flags();
    cudaDeviceSynchronize();
    flags.erase(std::find(flags.begin(), flags.end(), &comm->shared->waits[comm->rank]));
    communicators().erase(std::find(communicators().begin(), communicators().end(), comm));
    munmap(comm->shared, comm->shared_bytes);
    device_memory_give(comm->taken_bytes[0]);
    device_memory_give(comm->taken_bytes[1]);
    delete comm;
    return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    cudaDeviceSynchronize();
    return comm->is_blocking ? ncclSuccess : ncclInProgress; // until ncclCommGetAsyncError is asked
}
ncclResult_t ncclCommAbort(ncclComm_t comm) { // the other ranks end in their next collective
    comm->shared->dead = 1;
    return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* ranks) {
    *ranks = comm->ranks;
    return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
    *rank = comm->rank;
    return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    const bool is_ready = comm->shared->joined.load() == (unsigned)comm->ranks;
    *error = is_ready ? comm->error : ncclInProgress;
    return ncclSuccess;
}

ncclResult_t ncclGroupStart(void) {
    group_depth++;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd(void) {
    if (group_depth == 0) {
        return ncclInvalidUsage;
    }
    if (--group_depth == 0) {
        enqueue_group();
    }
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
    return enqueue(comm, send, receive, {ALL_REDUCE, type, reduction, 0, count, false}, stream);
}
ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
    return enqueue(comm, send, receive, {REDUCE_SCATTER, type, reduction, 0, count, false}, stream);
}
ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
    return enqueue(comm, send, receive, {ALL_GATHER, type, ncclSum, 0, count, false}, stream);
}
ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    return enqueue(comm, send, receive, {BROADCAST, type, ncclSum, root, count, false}, stream);
}
ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                        ncclRedOp_t reduction, int root, ncclComm_t comm, cudaStream_t stream) {
    return enqueue(comm, send, receive, {REDUCE, type, reduction, root, count, false}, stream);
}
ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return enqueue(comm, send, nullptr, {SEND, type, ncclSum, peer, count, false}, stream);
}
ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return enqueue(comm, nullptr, receive, {RECEIVE, type, ncclSum, peer, count, false}, stream);
}
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
ncclResult_t ncclAlltoAll(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
    const size_t bytes = count * type_bytes(type);
    ncclGroupStart();
    ncclResult_t result = ncclSuccess;
    for (int r = 0; r < comm->ranks && result == ncclSuccess; r++) {
        result = ncclSend((const char*)send + (size_t)r * bytes, count, type, r, comm, stream);
        if (result == ncclSuccess) {
            result = ncclRecv((char*)receive + (size_t)r * bytes, count, type, r, comm, stream);
        }
    }
    const ncclResult_t end = ncclGroupEnd();
    return result == ncclSuccess ? end : result;
}
#endif
}

#endif
