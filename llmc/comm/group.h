/*
group.h -- groups of ranks, and bulk data between the ranks of one on the CPU, over MPI.

Everything is collective: all ranks, of the Comm or of the Group, call it in the same order; in
group_exchange_cpu only the two ranks of a move. A group of one opens nothing and copies.

Elements are fp32; their number may exceed an int.
*/
#ifndef LLMC_GROUP_H
#define LLMC_GROUP_H

#include <stddef.h>

#include "llmc/comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

// Ordered set of ranks.
typedef struct {
    int rank, size;
    void* links; // private
    Comm* comm;
} Group;

// Opens the group of ranks with the same color, in the order of their keys; color < 0: this rank is
// in no group, and its size is 0.
void group_open(Group* g, Comm* c, int color, int key);

void group_close(Group* g);

// Returns the group of this rank alone, which has nothing to close.
static inline Group group_alone(Comm* c) {
    const Group one = {0, 1, NULL, c};
    return one;
}

// A message to the peer if it `sends`, or from it.
typedef struct {
    int peer; // rank of the group
    void* data;
    size_t bytes;
    int sends;
} GroupMove;

// Starts all sends and receives together, and waits for them. Move number k from a rank to another
// meets the other's number k from it, and both have the same size; a rank may be its own peer.
// Nothing that is received may overlap.
void group_exchange_cpu(Group* g, const GroupMove* moves, int count);

// Sends chunk j of send to rank j; chunk i of recv is from rank i. Both (size, count); they must
// not overlap.
void group_all_to_all_cpu(float* recv, const float* send, size_t count, Group* g);

// Gathers recv (size, count) from each rank's send (count). In place: send = recv + rank * count.
void group_all_gather_cpu(float* recv, const float* send, size_t count, Group* g);

#ifdef __cplusplus
}
#endif

#ifdef GROUP_IMPLEMENTATION

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/comm/comm_mpi.h"

#ifdef HAVE_MPI

// Communicator of a group, and memory for transfers under way: a step allocates nothing.
typedef struct {
    MPI_Comm all;
    GroupMove* moves;      // (2, size)
    MPI_Request* requests; // (room)
    size_t room;
} GroupLinks_;

static GroupLinks_* group_links_(const Group* g) { return (GroupLinks_*)g->links; }

void group_open(Group* g, Comm* c, int color, int key) {
    *g = group_alone(c);
    g->size = color < 0 ? 0 : 1;
    if (c->size > 1) {
        MPI_Comm split;
        MPI_CHECK(MPI_Comm_split(comm_mpi_all(c), color < 0 ? MPI_UNDEFINED : color, key, &split));
        if (color >= 0) {
            MPI_Comm_rank(split, &g->rank);
            MPI_Comm_size(split, &g->size);
            g->links = check_alloc(1, sizeof(GroupLinks_), "links of a group");
            group_links_(g)->all = split;
            group_links_(g)->moves =
                (GroupMove*)check_alloc(2 * (size_t)g->size, sizeof(GroupMove), "moves of a group");
        }
    }
}

void group_close(Group* g) {
    GroupLinks_* links = group_links_(g);
    if (links) {
        MPI_Comm_free(&links->all);
        free(links->requests);
        free(links->moves);
        free(links);
        g->links = NULL;
    }
}

static GroupMove* group_moves_(Group* g) { return group_links_(g)->moves; }

enum { GROUP_MESSAGE_ = 16 << 20 }; // most bytes of a message: MPI counts in int

static size_t group_messages_(const Group* g, const GroupMove* move) {
    return move->peer == g->rank ? 0 : (move->bytes + GROUP_MESSAGE_ - 1) / GROUP_MESSAGE_;
}

// Starts the messages of a move.
static void group_start_(Group* g, const GroupMove* move, MPI_Request* requests) {
    MPI_Comm all = group_links_(g)->all;
    const size_t messages = group_messages_(g, move);
    for (size_t m = 0; m < messages; m++) {
        const size_t begin = m * GROUP_MESSAGE_, left = move->bytes - begin;
        const int bytes = (int)(left < GROUP_MESSAGE_ ? left : GROUP_MESSAGE_);
        char* data = (char*)move->data + begin;
        if (move->sends) {
            MPI_CHECK(MPI_Isend(data, bytes, MPI_BYTE, move->peer, 0, all, &requests[m]));
        } else {
            MPI_CHECK(MPI_Irecv(data, bytes, MPI_BYTE, move->peer, 0, all, &requests[m]));
        }
    }
}

// Returns memory for the requests of these messages, which the group keeps.
static MPI_Request* group_requests_(Group* g, size_t messages) {
    GroupLinks_* links = group_links_(g);
    if (messages > links->room) {
        free(links->requests);
        links->requests = (MPI_Request*)check_alloc(messages, sizeof(MPI_Request), "requests of MPI");
        links->room = messages;
    }
    return links->requests;
}

// Moves between different ranks.
static void group_exchange_others_(Group* g, const GroupMove* moves, int count) {
    size_t messages = 0, started = 0;
    for (int i = 0; i < count; i++) {
        messages += group_messages_(g, &moves[i]);
    }
    if (messages == 0) {
        return;
    }
    MPI_Request* requests = group_requests_(g, messages);
    for (int i = 0; i < count; i++) {
        group_start_(g, &moves[i], requests + started);
        started += group_messages_(g, &moves[i]);
    }
    for (size_t m = 0; m < messages; m++) {
        MPI_CHECK(MPI_Wait(&requests[m], MPI_STATUS_IGNORE));
    }
}

#else

void group_open(Group* g, Comm* c, int color, int key) {
    *g = group_alone(c);
    g->size = color < 0 ? 0 : 1;
    (void)key;
}

void group_close(Group* g) { (void)g; }

static GroupMove* group_moves_(Group* g) {
    (void)g;
    return NULL;
}

static void group_exchange_others_(Group* g, const GroupMove* moves, int count) {
    (void)g, (void)moves, (void)count;
}

#endif

// Copies the data that a rank sends to itself.
static void group_exchange_own_(const Group* g, const GroupMove* moves, int count) {
    int from = 0; // first move that has not been looked at for a send
    for (int i = 0; i < count; i++) {
        if (moves[i].peer == g->rank && !moves[i].sends) {
            while (from < count && (moves[from].peer != g->rank || !moves[from].sends)) {
                from++;
            }
            assert(from < count && moves[from].bytes == moves[i].bytes);
            if (moves[i].data != moves[from].data) {
                memcpy(moves[i].data, moves[from].data, moves[i].bytes);
            }
            from++;
        }
    }
}

void group_exchange_cpu(Group* g, const GroupMove* moves, int count) {
    group_exchange_own_(g, moves, count);
    group_exchange_others_(g, moves, count);
}

// Exchanges chunks: rank j gets (count) from send + j * stride. Each rank starts with a different
// peer, so that no rank gets all messages at once.
static void group_exchange_chunks_(float* recv, const float* send, size_t stride, size_t count, Group* g) {
    GroupMove own[2], *moves = g->size == 1 ? own : group_moves_(g);
    for (int k = 0; k < g->size; k++) {
        const int from = (g->rank + g->size - k) % g->size, to = (g->rank + k) % g->size;
        const GroupMove receive = {from, recv + from * count, count * sizeof(float), 0},
                        sends = {to, (void*)(send + to * stride), count * sizeof(float), 1};
        moves[k] = receive;
        moves[g->size + k] = sends;
    }
    group_exchange_cpu(g, moves, 2 * g->size);
}

void group_all_to_all_cpu(float* recv, const float* send, size_t count, Group* g) {
    group_exchange_chunks_(recv, send, count, count, g);
}

void group_all_gather_cpu(float* recv, const float* send, size_t count, Group* g) {
    group_exchange_chunks_(recv, send, 0, count, g);
}

#endif // GROUP_IMPLEMENTATION

#endif
