/*
cost_transfers.h -- the time in which the processes of a grid wait for each other's data, planned
from the bytes.

    kind       transfers of a process                                 hidden by computation
    tensor     10 of N C elements a block: 4 forward, 6 backward      no
               (12 with --recompute 3), and 4 outside of the blocks
    context    K and V of whole sequences, in the forward pass and    no
               again in the backward pass, and their gradients
    experts    2 of k N C elements a block forward, 3 backward, for   no
               the k experts of a token
    pipeline   N C / t elements forward and backward                  no
    data       ZeRO's gathers and reductions (zero.h)                 up to the time of the pass
                                                                      that they run beside; not
                                                                      those outside of the blocks

N tokens of a micro-batch are in a process of a context group, B T / c. The stream is cut by tokens
among the t processes of a tensor group. A transfer puts all N together, or adds up their parts.

Other plans look faster where they assume what the trainers do not do. Gradients of keys and values
travel through a process's own card, because their owner adds them up in the order of ranks: 7B in
contexts of 32 GPUs, 131k tokens, waits 1.2 s of 3.1 s for them; with a sum in each machine first it
would be 0.2 s. In a step of 65B with t 8, P 8 at 100 Gb/s for a machine of 8, messages of stages
take 13 s, and messages of the tensor group 20 s; another schedule hides two thirds of these.
*/
#ifndef LLMC_COST_TRANSFERS_H
#define LLMC_COST_TRANSFERS_H

#include <math.h>
#include <stddef.h>

#include "llmc/model/model.h"
#include "llmc/parallel/grid.h"
#include "llmc/parallel/zero.h"
#include "llmc/cost/links.h"
#include "llmc/setup/settled.h"

typedef enum { COST_FORWARD, COST_BACKWARD, COST_PASSES } CostPass;

// A micro-batch in one process of a grid.
typedef struct {
    Links links;
    GridShape shape;
    ModelConfig cfg;  // the process's part of the model
    double N, tokens; // tokens of the micro-batch in this process, and in its context group
    double size;      // bytes of an element
    int recompute;
} CostTransfers;

// Returns the links between the processes of a run: --node-gbps and --net-gbps, or assumed speeds.
static inline Links cost_links(const Settled* s) {
    const Options* o = &s->options;
    const int is_gpu = o->program.trainer == OPTION_GPU;
    const double node = is_gpu ? LINKS_GPU_NODE_PER_S : LINKS_CPU_NODE_PER_S,
                 net = is_gpu ? LINKS_GPU_NET_PER_S : LINKS_CPU_NET_PER_S;
    const Links links = {o->ranks.node_gbps > 0 ? 1e9 * o->ranks.node_gbps : node,
                         o->ranks.net_gbps > 0 ? 1e9 * o->ranks.net_gbps : net, s->ranks.node_ranks};
    return links;
}

// Return the groups of a process.
static inline LinksGroup cost_tensor_group_(const CostTransfers* x) {
    return links_group(&x->links, x->shape.tensor, 1);
}
static inline LinksGroup cost_context_group_(const CostTransfers* x) {
    return links_group(&x->links, x->shape.context, x->shape.tensor);
}

static inline LinksGroup cost_expert_group_(const CostTransfers* x) {
    return links_group(&x->links, grid_experts(x->shape), 1);
}

// Gathers and exchanges in a pass, all of the same bytes.
typedef struct {
    double gathers, exchanges, bytes;
} CostCalls_;

static inline double cost_calls_s_(const CostTransfers* x, LinksGroup group, CostCalls_ calls) {
    return calls.gathers * links_gather_s(&x->links, group, calls.bytes) +
           calls.exchanges * links_exchange_s(&x->links, group, calls.bytes);
}

// Returns the calls of the tensor group in a pass. A recomputed block gathers ln1 and adds up the
// parts of attention again.
static inline CostCalls_ cost_tensor_calls_(const CostTransfers* x, CostPass pass) {
    const double L = x->cfg.L, again = pass == COST_BACKWARD && x->recompute == RECOMPUTE_BLOCK;
    const CostCalls_ calls = {L * ((pass == COST_FORWARD ? 2 : 4) + again) + 1, L * (2 + again) + 1,
                              x->N * x->cfg.C * x->size};
    return calls;
}

// Returns the calls that gather the sums of norms of all heads together (heads.h) in a pass.
static inline CostCalls_ cost_norm_calls_(const CostTransfers* x, CostPass pass) {
    const int is_together = heads_parts(model_architecture(x->cfg.arch)->heads).is_together,
              again = pass == COST_BACKWARD && x->recompute == RECOMPUTE_BLOCK;
    const CostCalls_ calls = {(double)x->cfg.L * is_together * (1 + again), 0,
                              x->N * x->shape.tensor * (double)sizeof(HeadsSums)};
    return calls;
}

// Returns the calls of the context group in a pass.
static inline CostCalls_ cost_context_calls_(const CostTransfers* x, CostPass pass) {
    const double L = x->cfg.L, columns = 2.0 * model_keys(x->cfg);
    const CostCalls_ calls = {L, pass == COST_BACKWARD ? L : 0, x->tokens * columns * x->size};
    return calls;
}

// Returns the calls of the expert group in a pass, if routers choose all experts equally often.
static inline CostCalls_ cost_expert_calls_(const CostTransfers* x, CostPass pass) {
    const double L = model_layers_of(x->cfg, LAYERS_EXPERTS), rows = x->N * x->cfg.E_used;
    const CostCalls_ calls = {0, L * (pass == COST_FORWARD ? 2 : 3), rows * x->cfg.C * x->size};
    return calls;
}

// Return the seconds of the transfers of the tensor group, of the context group, and of the expert
// group, in a pass. An exchange between experts is made in rounds.
static inline double cost_tensor_s(const CostTransfers* x, CostPass pass) {
    const LinksGroup group = cost_tensor_group_(x);
    return cost_calls_s_(x, group, cost_tensor_calls_(x, pass)) +
           cost_calls_s_(x, group, cost_norm_calls_(x, pass));
}
static inline double cost_context_s(const CostTransfers* x, CostPass pass) {
    return cost_calls_s_(x, cost_context_group_(x), cost_context_calls_(x, pass));
}

static inline double cost_expert_s(const CostTransfers* x, CostPass pass) {
    const LinksGroup group = cost_expert_group_(x);
    const CostCalls_ calls = cost_expert_calls_(x, pass);
    return cost_calls_s_(x, group, calls) +
           (group.size > 2 ? (group.size - 2) * calls.exchanges * links_start_s(group) : 0);
}

static inline double cost_send_bytes_(const CostTransfers* x) {
    return x->N / x->shape.tensor * x->cfg.C * x->size;
}

// Returns the seconds in which a stage gets the stream of a micro-batch, or its gradient.
static inline double cost_send_s(const CostTransfers* x) {
    const GridShape shape = x->shape;
    const LinksGroup group =
        links_group(&x->links, shape.pipeline, shape.tensor * shape.context * shape.data);
    return links_send_s(&x->links, group, cost_send_bytes_(x));
}

// Bytes that a process sends per step to its tensor group, its context group, its expert group,
// and, if it is in a middle stage, to the next stage and the one before.
typedef struct {
    double tensor, context, experts, pipeline;
} CostTraffic;

static inline double cost_calls_bytes_(LinksGroup group, CostCalls_ calls) {
    return (calls.gathers + calls.exchanges) * links_moved(group, calls.bytes);
}

// Returns the traffic of `times` micro-batches.
static inline CostTraffic cost_traffic_of(const CostTransfers* x, double times) {
    const int neighbors = x->shape.pipeline > 2 ? 2 : x->shape.pipeline - 1;
    CostTraffic traffic = {0, 0, 0, times * neighbors * cost_send_bytes_(x)};
    for (int pass = 0; pass < COST_PASSES; pass++) {
        const CostCalls_ tensor = cost_tensor_calls_(x, (CostPass)pass),
                         norms = cost_norm_calls_(x, (CostPass)pass),
                         context = cost_context_calls_(x, (CostPass)pass),
                         experts = cost_expert_calls_(x, (CostPass)pass);
        traffic.experts += times * cost_calls_bytes_(cost_expert_group_(x), experts);
        traffic.tensor += times * (cost_calls_bytes_(cost_tensor_group_(x), tensor) +
                                   cost_calls_bytes_(cost_tensor_group_(x), norms));
        traffic.context += times * cost_calls_bytes_(cost_context_group_(x), context);
    }
    return traffic;
}

// ---- ZeRO ----

// Seconds of ZeRO's transfers in one direction: in a replica, and between replicas, which use other
// links. Blocks travel one by one; parameters outside of blocks are counted apart.
typedef struct {
    double within, between, outside;
} CostMoves_;

// Returns the seconds of a gather of parameters, or of a reduction of gradients, of these sizes.
// Sums between replicas are fp32, or in the type that is gathered.
static inline CostMoves_ cost_moves_(const CostTransfers* x, const MapOf* of, double blocks_bytes,
                                     double outside_bytes, double between_per_byte,
                                     double (*seconds)(const Links*, LinksGroup, double)) {
    const int t = x->shape.tensor, shards = of->replica, blocks = model_groups(x->cfg) - 1;
    const LinksGroup within = links_group(&x->links, shards, t),
                     of_blocks = links_group(&x->links, shards / of->experts, t * of->experts),
                     between = links_group(&x->links, of->data / shards, t * shards);
    const double other = between_per_byte / shards;
    const CostMoves_ moves = {seconds(&x->links, of_blocks, blocks_bytes) +
                                  (of_blocks.size > 1 ? (blocks - 1) * links_start_s(of_blocks) : 0),
                              seconds(&x->links, between, blocks_bytes * other) +
                                  (between.size > 1 ? (blocks - 1) * links_start_s(between) : 0),
                              seconds(&x->links, within, outside_bytes) +
                                  seconds(&x->links, between, outside_bytes * other)};
    return moves;
}

static inline double cost_beyond_(double transfer, double pass) { return fmax(transfer - pass, 0); }

// Returns the seconds of ZeRO's transfers, in a step of `times` micro-batches, that passes of these
// lengths do not hide.
static inline double cost_data_s(const CostTransfers* x, const MapOf* of, int rank, double gradient_bytes,
                                 double times, const double pass_s[COST_PASSES]) {
    if (of->data == 1) {
        return 0;
    }
    const ZeroSizes sizes = zero_sizes(of, rank);
    const double trained = sizes.trained_blocks + sizes.embedding,
                 shared = of->stage == 0 ? gradient_bytes : x->size; // bytes per gathered element
    const int has_all = of->stage < 3;
    const CostMoves_ gather =
                         cost_moves_(x, of, (has_all ? trained : sizes.blocks) * shared,
                                     (has_all ? sizes.trained_once : sizes.once) * shared, 1, links_gather_s),
                     reduce = cost_moves_(x, of, of->experts * trained * gradient_bytes,
                                          sizes.trained_once * gradient_bytes, sizeof(float) / gradient_bytes,
                                          links_exchange_s);
    const double again = has_all ? 0 : gather.within, each = of->stage >= 2 ? reduce.within : 0;
    // in each micro-step, except for the first forward pass and the last backward pass
    const double steady = cost_beyond_(again, pass_s[COST_FORWARD]) +
                          cost_beyond_(again + each, pass_s[COST_BACKWARD]),
                 first = cost_beyond_(fmax(gather.within, gather.between), pass_s[COST_FORWARD]),
                 last = cost_beyond_(fmax(again + reduce.within, reduce.between), pass_s[COST_BACKWARD]);
    return (times - 1) * steady + first + last + gather.outside + reduce.outside;
}

#endif
