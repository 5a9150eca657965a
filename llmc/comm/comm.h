/*
comm.h -- the ranks of a run, small messages between them, and a common shutdown.

Everything but comm_expect, comm_progress, comm_alive and comm_fail is collective: all ranks call
it, in the same order. With one rank everything returns at once: no MPI, no thread, no socket.
Messages go by MPI if it started the ranks (comm_mpi.h), else by TCP (comm_tcp.h).

An error in any rank ends all of them: from comm_expect on, CHECK and die_usage end in comm_fail. A
rank that waits longer than it should is ended by its watchdog, a thread that only looks at what
comm_progress stored.

Only rank 0 prints: stdout of the others is /dev/null after comm_open. stderr stays.
*/
#ifndef LLMC_COMM_H
#define LLMC_COMM_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Place of a rank according to the launcher. -1: the launcher does not say (local rank and size).
typedef struct {
    int rank, size, local_rank, local_size;
} CommPlace;

// Address at which rank 0 waits for the others. Without host and file, MPI joins them.
typedef struct {
    char host[256]; // host name as the others reach it, and
    int port;
    char file[PATH_MAX]; // file on a shared file system, into which rank 0 writes its address
    // the launcher's name of the job; ranks of another job are refused. "": it has none
    char job[96];
} CommMeeting;

typedef struct CommEngine CommEngine;

typedef struct {
    int rank, size, local_rank, local_size, node, nodes;
    char host[64];            // this rank's machine
    char library[64];         // "Open MPI 4.1.4"; empty with one rank
    const CommEngine* engine; // private, like the next; NULL with one rank
    void *state, *communicator;
    void* gpus; // groups of GPUs that wait for the model (zero_connect); NULL: none
} Comm;

// Activities of a rank, which decide how long it may go without progress: `timeout` or 5 times the
// longest step, whichever is longer; ten times that in the first step, the setup and saves;
// COMM_FIRST has no limit: one rank may work for hours, encoding text for example, while the others
// wait.
typedef enum {
    COMM_FIRST,
    COMM_SETUP,
    COMM_DATA,
    COMM_FORWARD,
    COMM_BACKWARD,
    COMM_UPDATE,
    COMM_EVALUATE,
    COMM_SAVE
} CommPhase;

// Prepares for errors before the ranks are joined, from the environment alone: if all ranks find
// the same error, a wrong option for example, rank 0 prints it, and the others do only if nothing
// has ended them soon after. Does nothing if size is 1. comm_open follows with the same Comm.
void comm_expect(Comm* c, CommPlace place);

// Joins the other ranks, and starts the watchdog.
void comm_open(Comm* c, CommPlace place, const CommMeeting* meeting, double timeout_s);

// Waits for all ranks. After this, the program ends like a single process; without this call,
// exit() ends all ranks.
void comm_close(Comm* c);

// ---- messages ----

// Returns when all ranks have called it.
void comm_barrier(Comm* c);

// Copies rank 0's data to all ranks.
void comm_broadcast(Comm* c, void* data, size_t bytes);

// Gathers all (size, bytes) from each rank's mine (bytes). They must not overlap.
void comm_all_gather(Comm* c, void* all, const void* mine, size_t bytes);

// Returns the bits that any rank has set in `mine`.
int comm_any(Comm* c, int mine);

// Return the sum over all ranks, in their order; the largest; the smallest.
double comm_sum(Comm* c, double mine);
double comm_max(Comm* c, double mine);
size_t comm_min(Comm* c, size_t mine);

// Returns the value of the first rank that has one; 0 if none has.
int comm_first(Comm* c, int mine);

// Ends all ranks unless all of a color have the same hash: "the ranks disagree about
// `what`: `words` of rank 0 on ranks 0 2 3, ...", with their places, if they have some. Words
// longer than 95 bytes are cut; "" is not printed.
void comm_agree_in(Comm* c, int color, const char* what, uint64_t hash, const char* words);

// Does the same for all ranks.
static inline void comm_agree(Comm* c, const char* what, uint64_t hash, const char* words) {
    comm_agree_in(c, 0, what, hash, words);
}

// ---- the watchdog and the end ----

enum { COMM_PLACE_BYTES = 64 };

// Sets the texts that messages add to the name of each rank, (size): "tensor 1, stage 2", or "".
// comm_close frees the array.
void comm_set_places(Comm* c, char (*places)[COMM_PLACE_BYTES]);

// Tells the watchdog that this rank has started something new. Cheap. `what` is a constant, "reduce
// of block 7".
void comm_progress(Comm* c, CommPhase phase, int64_t step, const char* what);

// Tells the watchdog which messages this rank waits for or sends, until the next comm_progress:
// "micro-batch %lld from stage %lld", a constant for these numbers. Cheap.
void comm_exchanges(Comm* c, const char* what, int64_t first, int64_t second);

// Tells the watchdog that this rank is making progress. Cheap.
void comm_alive(Comm* c);

// Notes for messages about an end that a checkpoint of this step is complete in this directory. The
// name must stay valid.
void comm_saved(Comm* c, int64_t step, const char* directory);

// Ends all ranks with this status. Prints the message, whole lines, once, with the rank. May be
// called in any thread.
__attribute__((noreturn)) void comm_fail(Comm* c, int status, const char* message);

// ---- for comm_mpi.h and comm_tcp.h ----

// Rank that has ended; status -1 (and 0, which no rank sends): without a message.
typedef struct {
    int rank, status, pid;
    char host[64];
} CommEnded;

// Transport of messages between ranks.
struct CommEngine {
    void (*broadcast)(Comm* c, void* data, size_t bytes);
    void (*all_gather)(Comm* c, void* all, const void* mine, size_t bytes);
    int (*any)(Comm* c, int mine);
    // Returns 1 and sets *other if another rank has ended; called by the watchdog. NULL: the
    // launcher handles it.
    int (*ended)(const Comm* c, CommEnded* other);
    void (*abort)(const Comm* c, int status); // tells all others to end; in any thread
    void (*close)(Comm* c);                   // called after a barrier
};

// Sets the engine, as the last step of joining.
void comm_set_engine(Comm* c, const CommEngine* engine);

#ifdef __cplusplus
}
#endif

#ifdef COMM_IMPLEMENTATION

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/sizes.h"
#include "llmc/base/printable.h"
#include "llmc/base/enum_words.h"
#include "llmc/comm/comm_mpi.h"
#include "llmc/comm/comm_tcp.h"

enum {
    COMM_PATIENCE_ = 10, // factor on the usual limit, in the setup and the like
    COMM_HOLD_S_ = 2,    // time for which ranks above 0 withhold an error: rank 0 may have the same
    COMM_END_S_ = 5,     // time that exit() may take before the watchdog ends the process
    COMM_NOTE_S_ = 10,   // time after which ranks 0 and 1 report that they wait for others to join
    COMM_TICK_MS_ = 250, // interval of the watchdog
    COMM_WORDS_ = 96,    // text of comm_agree, with the zero
    COMM_LIST_ = 8       // most ranks or values that a message names
};

// Progress, stored by the main thread and read by the watchdog, each member on its own: they need
// not be consistent.
typedef struct {
    int phase;
    int64_t step; // -1: before the first
    const char* what;
    const char* messages; // of comm_exchanges; NULL: none
    int64_t first, second;
    uint64_t count; // calls of comm_progress
} CommNow_;

typedef struct {
    pid_t pid; // a forked child that calls exit() ends no ranks
    int failing, status;
    int has_told; // an error has been printed
    int closing;  // the other ranks may also end
    CommNow_ now;
    int64_t saved_step; // step of the last checkpoint; -1: none
    const char* saved_in;
    char (*places)[COMM_PLACE_BYTES]; // (size) of comm_set_places; NULL: none
    double timeout_s;
    int watch_end; // the run is closed: the watchdog returns
    int watch_begin;
    pthread_t watchdog;
} CommState_;

static inline CommState_* comm_state_(const Comm* c) { return (CommState_*)c->state; }

#define COMM_STORE_(to, value) __atomic_store_n(&(to), value, __ATOMIC_RELAXED)
#define COMM_LOAD_(from) __atomic_load_n(&(from), __ATOMIC_RELAXED)

// Returns the engine, complete; NULL before the ranks have joined.
static const CommEngine* comm_engine_(const Comm* c) { return __atomic_load_n(&c->engine, __ATOMIC_ACQUIRE); }

void comm_set_engine(Comm* c, const CommEngine* engine) {
    __atomic_store_n(&c->engine, engine, __ATOMIC_RELEASE);
}

// ---- the end ----

void comm_set_places(Comm* c, char (*places)[COMM_PLACE_BYTES]) {
    if (c->state) {
        __atomic_store_n(&comm_state_(c)->places, places, __ATOMIC_RELEASE);
    } else {
        free(places);
    }
}

enum { COMM_NAME_ = 192 }; // bytes of a name

// Returns the place of a rank, "tensor 1, stage 2", or "".
static const char* comm_place_(const Comm* c, int rank) {
    char(*places)[COMM_PLACE_BYTES] = __atomic_load_n(&comm_state_(c)->places, __ATOMIC_ACQUIRE);
    return places ? places[rank] : "";
}

// Sets text to "rank 3 of 8 (node2, pid 4711; tensor 1, stage 2)".
static void comm_name_of_(char text[COMM_NAME_], const Comm* c, int rank, const char* host, int pid) {
    const char* place = comm_place_(c, rank);
    snprintf(text, COMM_NAME_, "rank %d of %d (%s, pid %d%s%s)", rank, c->size, host, pid, *place ? "; " : "",
             place);
}

static void comm_name_(char text[COMM_NAME_], const Comm* c) {
    comm_name_of_(text, c, c->rank, c->host, (int)getpid());
}

// Prints in one write, so that lines of several ranks do not mix.
static void comm_tell_(const char* text) {
    const ssize_t written = write(STDERR_FILENO, text, strlen(text));
    (void)written; // nowhere else to report it
}

// Ends the others and this process, in any thread except main, which calls exit() for that.
__attribute__((noreturn)) static void comm_abort_(const Comm* c, int status) {
    const CommEngine* engine = comm_engine_(c);
    if (engine) {
        engine->abort(c, status);
    }
    _exit(status);
}

// Ends all ranks; called by exit(). It runs after handlers registered since comm_open, which may
// remove temporary files, and before MPI's, which would wait for the others. MPI_Abort ends all
// ranks sooner than the exit of one does, and with fewer lines from the launcher. Without an error
// of ours, MPI itself may have called exit().
static void comm_at_exit_(void) {
    const Comm* c = (const Comm*)check_end.context;
    const CommState_* s = c ? comm_state_(c) : NULL;
    if (s && s->pid == getpid()) {
        fflush(NULL);
        if (s->failing && c->engine) {
            c->engine->abort(c, s->status);
        }
        _exit(s->failing ? s->status : EXIT_FAILURE);
    }
}

// Ends all ranks. Ranks with the same error wait until rank 0's end ends them, usually by the
// launcher's SIGTERM.
__attribute__((noreturn)) static void comm_end_(Comm* c, int status, const char* message, const char* rank) {
    CommState_* s = comm_state_(c);
    if (__atomic_exchange_n(&s->failing, 1,
                            // another thread, or a handler of exit(), is ending them
                            __ATOMIC_SEQ_CST)) {
        sleep(COMM_END_S_);
        _exit(status);
    }
    COMM_STORE_(s->status, status);
    if (c->rank > 0) {
        signal(SIGTERM, SIG_DFL);
        sleep(COMM_HOLD_S_);
    }
    const size_t room = strlen(message) + strlen(rank) + 1;
    char* text = (char*)malloc(room);
    if (text) {
        snprintf(text, room, "%s%s", message, rank);
    }
    COMM_STORE_(s->has_told, 1);
    comm_tell_(text ? text : message);
    if (check_is_main_thread()) {
        exit(status);
    }
    fflush(NULL);
    comm_abort_(c, status);
}

void comm_fail(Comm* c, int status, const char* message) {
    char name[COMM_NAME_], rank[COMM_NAME_ + 16] = "";
    if (!c->state) {
        fputs(message, stderr);
        exit(status);
    }
    if (c->rank > 0 || comm_engine_(c)) { // before joining, rank 0 probably has the same error
        comm_name_(name, c);
        snprintf(rank, sizeof(rank), "    on %s\n", name);
    }
    comm_end_(c, status, message, rank);
}

static void comm_check_failed_(void* context, int status, const char* message) {
    comm_fail((Comm*)context, status, message);
}

// ---- the watchdog ----

typedef struct {
    uint64_t count;
    int64_t step;
    double waited_s, step_s, longest_s; // without progress; in this step; in the longest one
} CommWatch_;

// Returns how long this rank may go without progress.
static double comm_limit_s_(const CommState_* s, const CommWatch_* watch, int phase) {
    const double usual = 5 * watch->longest_s > s->timeout_s ? 5 * watch->longest_s : s->timeout_s;
    return phase == COMM_SETUP || phase == COMM_SAVE || watch->longest_s == 0 ? COMM_PATIENCE_ * usual
                                                                              : usual;
}

// Checks once. Time is counted in ticks: a process that was stopped as a whole has not waited.
static void comm_look_(CommWatch_* watch, const CommState_* s) {
    const double tick_s = COMM_TICK_MS_ / 1e3;
    const int phase = COMM_LOAD_(s->now.phase);
    const int64_t step = COMM_LOAD_(s->now.step);
    const uint64_t count = COMM_LOAD_(s->now.count);
    watch->waited_s = count == watch->count && phase != COMM_FIRST ? watch->waited_s + tick_s : 0;
    watch->count = count;
    if (step != watch->step) {
        watch->longest_s = watch->step_s > watch->longest_s ? watch->step_s : watch->longest_s;
        watch->step_s = 0;
        watch->step = step;
    }
    watch->step_s += phase >= COMM_DATA && phase <= COMM_UPDATE ? tick_s : 0;
}

// Sets text to "step 12, reduce of block 7".
static void comm_where_(char* text, size_t room, const CommState_* s) {
    const int64_t step = COMM_LOAD_(s->now.step);
    const char *what = COMM_LOAD_(s->now.what), *messages = COMM_LOAD_(s->now.messages);
    if (step >= 0 && messages) {
        const int at = snprintf(text, room, "step %lld, ", (long long)step);
        snprintf(text + at, room - (size_t)at, messages, (long long)COMM_LOAD_(s->now.first),
                 (long long)COMM_LOAD_(s->now.second));
    } else if (step >= 0) {
        snprintf(text, room, "step %lld, %s", (long long)step, what);
    } else {
        snprintf(text, room, "the setup, %s", what);
    }
}

// Sets text to "; out/books has a checkpoint of step 12: --resume on continues", or to "".
static void comm_where_saved_(char* text, size_t room, const CommState_* s) {
    const int64_t step = COMM_LOAD_(s->saved_step);
    *text = '\0';
    if (step >= 0) {
        snprintf(text, room, "; %.300s has a checkpoint of step %lld: --resume on continues",
                 COMM_LOAD_(s->saved_in), (long long)step);
    }
}

// Ends a rank without progress, after giving the others time to report the same: a rank that
// reports nothing is the one that is stuck.
__attribute__((noreturn)) static void comm_stuck_(const Comm* c, double waited_s) {
    char name[COMM_NAME_], where[192], saved[512], text[1024];
    comm_name_(name, c);
    comm_where_(where, sizeof(where), comm_state_(c));
    comm_where_saved_(saved, sizeof(saved), comm_state_(c));
    snprintf(text, sizeof(text), "error: %s has waited %.0f s in %s%s\n", name, waited_s, where, saved);
    comm_tell_(text);
    sleep(COMM_HOLD_S_);
    comm_abort_(c, EXIT_FAILURE);
}

// Reports early that others have not joined: a rank that has exited with status 0, after --version
// for example, never will.
static void comm_note_waiting_(const Comm* c, const CommWatch_* watch) {
    const double tick_s = COMM_TICK_MS_ / 1e3;
    const int is_now = watch->waited_s >= COMM_NOTE_S_ && watch->waited_s < COMM_NOTE_S_ + tick_s;
    char name[COMM_NAME_], text[384];
    if (is_now && !comm_engine_(c) && c->rank <= 1) {
        comm_name_(name, c);
        snprintf(text, sizeof(text),
                 "note: %s has waited %d s for the others to join; did one end, or not start?\n", name,
                 (int)COMM_NOTE_S_);
        comm_tell_(text);
    }
}

// Ends as another rank has ended, which has printed why; for a killed rank, whoever notices prints
// it. No rank ends with status 0 in the middle of a run, nor does this one, whatever status it is
// told.
__attribute__((noreturn)) static void comm_follow_(const Comm* c, const CommEnded* other) {
    char name[COMM_NAME_], where[192], saved[512], text[1024];
    if (other->status > 0) {
        comm_abort_(c, other->status);
    }
    comm_where_(where, sizeof(where), comm_state_(c));
    comm_where_saved_(saved, sizeof(saved), comm_state_(c));
    comm_name_of_(name, c, other->rank, other->host, other->pid);
    snprintf(text, sizeof(text), "error: %s has ended; rank %d was in %s%s\n", name, c->rank, where, saved);
    comm_tell_(text);
    comm_abort_(c, EXIT_FAILURE);
}

// Looks for ranks that have ended. A rank that has printed its own error ends on its own.
static void comm_look_for_ends_(const Comm* c) {
    const CommEngine* engine = comm_engine_(c);
    const CommState_* s = comm_state_(c);
    CommEnded other;
    if (engine && engine->ended && !COMM_LOAD_(s->has_told) && engine->ended(c, &other) &&
        (other.status > 0 || !COMM_LOAD_(s->closing))) {
        comm_follow_(c, &other);
    }
}

static void* comm_watch_(void* context) {
    const Comm* c = (const Comm*)context;
    const CommState_* s = comm_state_(c);
    CommWatch_ watch = {0, -1, 0, 0, 0};
    struct pollfd end = {s->watch_end, POLLIN, 0};
    double ending_s = 0;
    while (poll(&end, 1, COMM_TICK_MS_) == 0) {
        comm_look_(&watch, s);
        comm_note_waiting_(c, &watch);
        comm_look_for_ends_(c);
        ending_s += COMM_LOAD_(s->failing) ? COMM_TICK_MS_ / 1e3 : 0;
        if (ending_s > COMM_HOLD_S_ + COMM_END_S_) {
            comm_abort_(c, COMM_LOAD_(s->status));
        }
        if (watch.waited_s > comm_limit_s_(s, &watch, COMM_LOAD_(s->now.phase)) && !COMM_LOAD_(s->failing)) {
            comm_stuck_(c, watch.waited_s);
        }
    }
    return NULL;
}

// Starts the watchdog with all signals blocked: they are main's.
static void comm_watch_open_(Comm* c, double timeout_s) {
    CommState_* s = comm_state_(c);
    sigset_t all, before;
    int ends[2];
    CHECK(pipe(ends) == 0, "no pipe for the watchdog");
    s->watch_end = ends[0];
    s->watch_begin = ends[1];
    s->timeout_s = timeout_s;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    CHECK(pthread_create(&s->watchdog, NULL, comm_watch_, c) == 0, "no thread for the watchdog");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void comm_watch_close_(Comm* c) {
    CommState_* s = comm_state_(c);
    close(s->watch_begin);
    pthread_join(s->watchdog, NULL);
    close(s->watch_end);
}

void comm_progress(Comm* c, CommPhase phase, int64_t step, const char* what) {
    CommState_* s = comm_state_(c);
    if (s) {
        COMM_STORE_(s->now.messages, (const char*)NULL);
        COMM_STORE_(s->now.what, what);
        COMM_STORE_(s->now.step, step);
        COMM_STORE_(s->now.phase, (int)phase);
        comm_alive(c);
    }
}

void comm_exchanges(Comm* c, const char* what, int64_t first, int64_t second) {
    CommState_* s = comm_state_(c);
    if (s) {
        COMM_STORE_(s->now.first, first);
        COMM_STORE_(s->now.second, second);
        COMM_STORE_(s->now.messages, what);
    }
}

void comm_alive(Comm* c) {
    CommState_* s = comm_state_(c);
    if (s) {
        COMM_STORE_(s->now.count, s->now.count + 1);
    }
}

void comm_saved(Comm* c, int64_t step, const char* directory) {
    CommState_* s = comm_state_(c);
    if (s) {
        COMM_STORE_(s->saved_in, directory);
        __atomic_store_n(&s->saved_step, step, __ATOMIC_RELEASE);
    }
}

// ---- who is where ----

// Returns the n of LLMC_NODES=n, which simulates n machines, with the ranks dealt to them in
// blocks; 0 if it is not set.
static int comm_pretended_nodes_(const Comm* c) {
    const char* text = getenv("LLMC_NODES");
    const int nodes = text ? atoi(text) : 0;
    if (text && (nodes < 1 || nodes > c->size)) {
        die_usage("LLMC_NODES=%s; wanted 1 to %d, the number of processes", text, c->size);
    }
    return nodes;
}

// Returns the machine of a rank. Machines are numbered in the order of their first ranks. hosts
// (size, sizeof(c->host))
static int comm_node_of_(const Comm* c, int rank, const char* hosts, int pretended) {
    if (pretended) {
        return rank / int_ceil_div(c->size, pretended);
    }
    int node = 0, first;
    for (int r = 0; r <= rank; r++) { // machines up to this rank's
        const char* host = hosts + (size_t)r * sizeof(c->host);
        for (first = 0; strcmp(hosts + (size_t)first * sizeof(c->host), host) != 0; first++) {
        }
        if (strcmp(host, hosts + (size_t)rank * sizeof(c->host)) == 0) {
            return node;
        }
        node += first == r;
    }
    return node;
}

// Sets node, nodes, and the local rank and size unless the launcher has.
static void comm_find_nodes_(Comm* c, CommPlace place) {
    const int pretended = comm_pretended_nodes_(c);
    char* hosts = (char*)check_alloc((size_t)c->size, sizeof(c->host), "host names");
    comm_all_gather(c, hosts, c->host, sizeof(c->host));
    int local_rank = 0, local_size = 0;
    c->node = comm_node_of_(c, c->rank, hosts, pretended);
    c->nodes = 0;
    for (int r = 0; r < c->size; r++) {
        const int node = comm_node_of_(c, r, hosts, pretended);
        c->nodes = node >= c->nodes ? node + 1 : c->nodes;
        local_rank += node == c->node && r < c->rank;
        local_size += node == c->node;
    }
    c->local_rank = pretended || place.local_rank < 0 ? local_rank : place.local_rank;
    c->local_size = pretended || place.local_size < 0 ? local_size : place.local_size;
    free(hosts);
}

// ---- opening and closing ----

void comm_expect(Comm* c, CommPlace place) {
    const CheckEnd alone = {NULL, NULL}, together = {comm_check_failed_, c};
    memset(c, 0, sizeof(*c));
    c->rank = place.rank;
    c->size = place.size;
    c->local_size = c->nodes = 1;
    gethostname(c->host, sizeof(c->host) - 1);
    check_end = alone;
    if (c->size > 1) {
        CommState_* s = (CommState_*)check_alloc(1, sizeof(CommState_), "processes");
        s->pid = getpid();
        s->now.phase = COMM_SETUP;
        s->now.step = s->saved_step = -1;
        s->now.what = "joining the others";
        c->state = s;
        check_end = together;
    }
}

void comm_open(Comm* c, CommPlace place, const CommMeeting* meeting, double timeout_s) {
    free(c->state); // from comm_expect
    comm_expect(c, place);
    if (c->size == 1) {
        return;
    }
    comm_watch_open_(c, timeout_s); // MPI_Init may be what hangs
    if (*meeting->host || *meeting->file) {
        // joining has a time limit of its own
        comm_progress(c, COMM_FIRST, -1, "joining the others");
        comm_tcp_open(c, meeting, COMM_PATIENCE_ * timeout_s);
        comm_progress(c, COMM_SETUP, -1, "joining the others");
    } else {
        comm_mpi_open(c);
    }
    atexit(comm_at_exit_);
    comm_find_nodes_(c, place);
    if (c->rank > 0) {
        CHECK(freopen("/dev/null", "w", stdout), "/dev/null: cannot be opened");
    }
}

void comm_close(Comm* c) {
    const CheckEnd alone = {NULL, NULL};
    if (c->state) {
        COMM_STORE_(comm_state_(c)->closing, 1);
        comm_barrier(c);
        comm_watch_close_(c);
        c->engine->close(c);
        c->engine = NULL;
        check_end = alone;
        free(comm_state_(c)->places);
        free(c->state);
        c->state = NULL;
    }
}

// ---- messages ----

void comm_barrier(Comm* c) { comm_any(c, 0); }

void comm_broadcast(Comm* c, void* data, size_t bytes) {
    if (c->size > 1) {
        c->engine->broadcast(c, data, bytes);
    }
}

void comm_all_gather(Comm* c, void* all, const void* mine, size_t bytes) {
    if (c->size > 1) {
        c->engine->all_gather(c, all, mine, bytes);
    } else {
        memcpy(all, mine, bytes);
    }
}

int comm_any(Comm* c, int mine) { return c->size > 1 ? c->engine->any(c, mine) : mine; }

// Returns `bytes` of each rank, (size, bytes); the caller frees them.
static void* comm_gathered_(Comm* c, const void* mine, size_t bytes) {
    void* all = check_alloc((size_t)c->size, bytes, "numbers of all ranks");
    comm_all_gather(c, all, mine, bytes);
    return all;
}

double comm_sum(Comm* c, double mine) {
    double *all = (double*)comm_gathered_(c, &mine, sizeof(mine)), sum = 0;
    for (int r = 0; r < c->size; r++) {
        sum += all[r];
    }
    free(all);
    return sum;
}

double comm_max(Comm* c, double mine) {
    double* all = (double*)comm_gathered_(c, &mine, sizeof(mine));
    for (int r = 0; r < c->size; r++) {
        mine = all[r] > mine ? all[r] : mine;
    }
    free(all);
    return mine;
}

size_t comm_min(Comm* c, size_t mine) {
    size_t* all = (size_t*)comm_gathered_(c, &mine, sizeof(mine));
    for (int r = 0; r < c->size; r++) {
        mine = all[r] < mine ? all[r] : mine;
    }
    free(all);
    return mine;
}

int comm_first(Comm* c, int mine) {
    int *all = (int*)comm_gathered_(c, &mine, sizeof(mine)), first = 0;
    for (int r = c->size - 1; r >= 0; r--) {
        first = all[r] ? all[r] : first;
    }
    free(all);
    return first;
}

// ---- agreement ----

typedef struct {
    uint64_t hash;
    int color;
    char words[COMM_WORDS_];
} CommOpinion_;

static int comm_is_same_(const CommOpinion_* a, const CommOpinion_* b) {
    return a->color == b->color && a->hash == b->hash;
}

// Appends " 3 (tensor 1, stage 2)".
static void comm_print_rank_(FILE* file, const Comm* c, int rank) {
    const char* place = comm_place_(c, rank);
    fprintf(file, " %d%s%s%s", rank, *place ? " (" : "", place, *place ? ")" : "");
}

// Appends "42 on ranks 0 2 3": all ranks that agree with rank `first`.
static void comm_print_opinion_(FILE* file, const Comm* c, const CommOpinion_* all, int first) {
    int ranks = 0;
    for (int r = first; r < c->size; r++) {
        ranks += comm_is_same_(&all[r], &all[first]);
    }
    if (*all[first].words) {
        char words[COMM_WORDS_];
        fprintf(file, "%s on rank%s", printable_copy(words, sizeof(words), all[first].words), words_s(ranks));
    } else {
        fprintf(file, "%016llx on rank%s", (unsigned long long)all[first].hash, words_s(ranks));
    }
    for (int r = first, named = 0; r < c->size; r++) {
        if (comm_is_same_(&all[r], &all[first]) && named++ < COMM_LIST_) {
            comm_print_rank_(file, c, r);
        }
    }
    fprintf(file, "%s", ranks > COMM_LIST_ ? " ..." : "");
}

// Ends with a message about the ranks of a color. It does not name this rank, and is the same on
// all.
__attribute__((noreturn)) static void comm_disagree_(Comm* c, const char* what, const CommOpinion_* all,
                                                     int color) {
    char text[4096] = "";
    FILE* file = fmemopen(text, sizeof(text) - 1, "w");
    CHECK(file, "the ranks disagree about %s", what);
    fprintf(file, "error: the ranks disagree about %s: ", what);
    for (int r = 0, values = 0; r < c->size && values < COMM_LIST_; r++) {
        int first = 0;
        while (!comm_is_same_(&all[first], &all[r])) {
            first++;
        }
        if (first == r && all[r].color == color) {
            fprintf(file, "%s", values++ ? ", " : "");
            comm_print_opinion_(file, c, all, r);
        }
    }
    fprintf(file, "\n");
    fclose(file);
    comm_end_(c, EXIT_FAILURE, text, "");
}

void comm_agree_in(Comm* c, int color, const char* what, uint64_t hash, const char* words) {
    if (c->size == 1) {
        return;
    }
    CommOpinion_ mine;
    memset(&mine, 0, sizeof(mine));
    mine.hash = hash;
    mine.color = color;
    snprintf(mine.words, sizeof(mine.words), "%s", words);
    CommOpinion_* all = (CommOpinion_*)comm_gathered_(c, &mine, sizeof(mine));
    for (int r = 1; r < c->size; r++) {
        for (int other = 0; other < r; other++) {
            if (all[r].color == all[other].color && all[r].hash != all[other].hash) {
                comm_disagree_(c, what, all, all[r].color);
            }
        }
    }
    free(all);
}

#endif // COMM_IMPLEMENTATION

#endif
