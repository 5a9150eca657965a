/*
links.h -- how long the collectives of a run take, planned from their bytes.

    gather      each of n processes ends with all `bytes`, an n-th from each
    exchange    each has `bytes`, and sends an n-th to each (all-to-all, sums of parts)
    send        each sends `bytes` to one other

    seconds = the larger of bytes (n - 1) / n / rate in a machine
                         and bytes (n - k) / n / rate of the cards        + the start of a message
    of a send: bytes / rate + the start

A process has a link in its machine and a card to other machines, which work at the same time; k of
the n processes are in its machine. In a gather over machines each byte enters a machine once,
through any of the k cards: k times the rate of a card. In an exchange each process gets bytes of
its own, through its own card.

The rates are assumptions for large messages until they are measured (dev/bench/multi_gpu.sh prints
them) and given by --node-gbps and --net-gbps. dev/bench/hardware.py has the same ones.
*/
#ifndef LLMC_LINKS_H
#define LLMC_LINKS_H

#include <math.h>

// Bytes/s of a process, each way, in its machine and to others: GPUs with NVLink 4 and a card of
// 400 Gb/s each; on CPUs shared memory, and a network of 25 Gb/s.
#define LINKS_GPU_NODE_PER_S 300e9
#define LINKS_GPU_NET_PER_S 42e9
#define LINKS_CPU_NODE_PER_S 10e9
#define LINKS_CPU_NET_PER_S 2.5e9

typedef struct {
    double node_per_s, net_per_s; // bytes/s in a machine and between machines
    int node_ranks;               // processes of a machine
} Links;

// Processes that communicate.
typedef struct {
    int size, near; // all of them; those in one machine
} LinksGroup;

// Returns the group of `size` processes whose ranks are `stride` apart.
static inline LinksGroup links_group(const Links* links, int size, int stride) {
    const int fit = links->node_ranks > stride ? links->node_ranks / stride : 1;
    const LinksGroup group = {size, fit < size ? fit : size};
    return group;
}

static inline double links_machines(LinksGroup group) { return ceil((double)group.size / group.near); }

// Returns the time until a message arrives, without its bytes.
static inline double links_start_s(LinksGroup group) {
    return group.near == group.size ? 25e-6 : 30e-6 + 2e-6 * links_machines(group);
}

// Returns the bytes that a process sends of an array of `bytes`, and receives.
static inline double links_moved(LinksGroup group, double bytes) {
    return bytes * (group.size - 1) / group.size;
}

// Returns the seconds of a collective in which a process gets its bytes through `cards` cards.
static inline double links_seconds_(const Links* links, LinksGroup group, double bytes, int cards) {
    // bytes from other machines
    const double others = bytes * (group.size - group.near) / group.size;
    return group.size > 1
               ? fmax(links_moved(group, bytes) / links->node_per_s, others / (cards * links->net_per_s)) +
                     links_start_s(group)
               : 0;
}

static inline double links_gather_s(const Links* links, LinksGroup group, double bytes) {
    return links_seconds_(links, group, bytes, group.near);
}

static inline double links_exchange_s(const Links* links, LinksGroup group, double bytes) {
    return links_seconds_(links, group, bytes, 1);
}

static inline double links_send_s(const Links* links, LinksGroup group, double bytes) {
    const double per_s = group.near == group.size ? links->node_per_s : links->net_per_s;
    return group.size > 1 ? bytes / per_s + links_start_s(group) : 0;
}

#endif
