/*
comm.h -- who the processes of a run are, small messages between them, bulk data on the CPU, and one end for all.

Everything but comm_expect, comm_progress and comm_fail is collective: all ranks call it, in the same order. MPI
carries it, on a communicator of its own, where the program was built with it (HAVE_MPI). With one process everything
returns at once: no MPI, no thread, no socket.

An error in any rank ends all of them: from comm_expect on, CHECK and die_usage end in comm_fail. A rank that waits
longer than it should is ended by its watchdog, a thread that only looks at what comm_progress stored.

Only rank 0 prints: stdout of the others is /dev/null after comm_open. stderr stays.

defines: Comm, CommPlace, CommPhase, comm_expect, comm_open, comm_close, comm_barrier, comm_broadcast,
         comm_all_gather, comm_agree, comm_progress, comm_fail, Group, group_open, group_close,
         group_all_to_all_cpu, group_all_gather_cpu
*/
#ifndef LLMC_COMM_H
#define LLMC_COMM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// What the launcher says. -1: it does not say (local rank and size).
typedef struct {
    int rank, size, local_rank, local_size;
} CommPlace;

typedef struct {
    int rank, size, local_rank, local_size, node, nodes;
    char host[64];    // this process's machine
    char library[64]; // "Open MPI 4.1.4"; empty with one process
    void* state;      // private; NULL with one process
} Comm;

// What a rank is doing: it decides how long a rank may do that without progress. `timeout` or 5 times the longest
// step, whichever is longer; ten times that in the first step, the setup and saves; COMM_FIRST has no limit: one rank
// does what may take hours, like encoding text, and the others wait for it.
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

// Before anything can fail, from the environment alone: of an error that all ranks find, a wrong option for example,
// rank 0 tells, and the others only if nothing has ended them soon after. Does nothing where size is 1. comm_open
// follows with the same Comm.
void comm_expect(Comm* c, CommPlace place);

// Joins the others, and starts the watchdog.
void comm_open(Comm* c, CommPlace place, double timeout_s);

// Waits for all. After it, the program ends as one process does; without it, exit() ends all ranks.
void comm_close(Comm* c);

void comm_barrier(Comm* c);

// All ranks get rank 0's data.
void comm_broadcast(Comm* c, void* data, size_t bytes);

// all (size, bytes), mine (bytes). They do not overlap.
void comm_all_gather(Comm* c, void* all, const void* mine, size_t bytes);

// Ends all ranks unless they have the same hash: "the ranks disagree about `what`: `words` of rank 0 on ranks 0 2 3,
// ...". Words longer than 95 bytes are cut; "": not printed.
void comm_agree(Comm* c, const char* what, uint64_t hash, const char* words);

// For the watchdog: this rank is at something else than before. Cheap. `what` is a constant, "reduce of block 7".
void comm_progress(Comm* c, CommPhase phase, int64_t step, const char* what);

// Ends all ranks with this status. The message, whole lines, is printed once, with the rank. In any thread.
__attribute__((noreturn)) void comm_fail(Comm* c, int status, const char* message);

// ---- bulk data on the CPU ----

// An ordered set of ranks.
typedef struct {
    int rank, size;
    void* communicator; // private
    Comm* comm;
} Group;

// The ranks with the same color, in the order of their keys; color < 0: a rank in no group, size 0.
void group_open(Group* g, Comm* c, int color, int key);

void group_close(Group* g);

// Piece j of send goes to rank j; piece i of recv is from rank i. Both (size, count); they do not overlap.
void group_all_to_all_cpu(float* recv, const float* send, size_t count, Group* g);

// recv (size, count), send (count). In place: send = recv + rank * count.
void group_all_gather_cpu(float* recv, const float* send, size_t count, Group* g);

#ifdef __cplusplus
}
#endif

#endif
