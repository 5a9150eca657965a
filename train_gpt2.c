/*
train_gpt2.c -- pretrains language models on the CPU in fp32, if you like with matmuls in bf16 or
fp8: usable by itself, and the reference that the GPU trainer is checked against. Top to bottom: the
model, forward, backward, micro-steps, update, evaluation, tensors in and out, the table of
functions, the training loop. The operations are modules in llmc/; what the loop asks and tells is
llmc/run/run.h.

    make train_gpt2 && ./train_gpt2            trains on built-in stories; --help lists the rest

Comments give the shapes of tensors: B sequences of T tokens, N = B*T tokens, C channels, F hidden
units of the MLP, QKV columns of queries, keys and values, Vp tokens of the padded vocabulary.
*/
// room after room, from the ground up; each brings what it is made of
#include "llmc/base/processor.h"
#include "llmc/ops/checksum.h"
#include "llmc/model/share_layers.h"
#include "llmc/layers/branch.h"
#include "llmc/layers/decode.h"
#include "llmc/layers/mlp.h"
#include "llmc/layers/mixer.h"
#include "llmc/layers/self_attention.h"
#include "llmc/layers/stream.h"
#include "llmc/layers/teaching.h"
#include "llmc/parallel/groups.h"
#include "llmc/parallel/pipeline.h"
#include "llmc/parallel/zero.h"
#include "llmc/optim/qk_clip.h"
#include "llmc/optim/router_bias.h"
#include "llmc/optim/update_groups.h"
#include "llmc/setup/resolve.h"
#include "llmc/plan/plan_cpu.h"
#include "llmc/run/run.h"
#include "llmc/run/start.h"

// -------------------------------------------------------------------------------------------------
// The model

struct Model {
    ModelConfig cfg; // of the part that this process has
    // micro-batches up to B sequences of up to T tokens; N of these tokens are this process's
    int B, T, N;
    int chunk;                  // tokens that have logits in memory
    float z_loss;               // --z-loss
    RouterLosses router_losses; // --router-balance, --router-z; dloss is that of the pass
    float targets_per_token;    // of the pass's update (counted.h)
    DropoutBatch random;        // of the pass, in training
    RecomputeLevel recompute;   // which activations the backward pass computes again
    Freeze freeze;              // which parameters training leaves unchanged
    TensorRow parameter_rows[MODEL_PARAMETER_ROWS], activation_rows[MODEL_ACTIVATION_ROWS];
    Map map; // of the elements of all tensors
    // (L) of each layer, with those outside of the blocks; gradients: NULL where nothing is trained
    ModelParameters *layers, *gradients;
    OptimizerState state;
    size_t parameter_bytes, gradient_bytes, activation_bytes;

    Memory memory; // a ledger of all that the model takes
    // One block each, cut up by the rows.
    void *params_memory, *grads_memory, *acts_memory;
    ModelParameters params;
    ModelActivations acts;
    Decoder decoder; // generation: its activations are in the same memory
    // (B, T) first token that attention sees, in layers with a window; NULL without any
    int* window_starts;
    int window; // tokens that a token attends to there, in this step
    // (L, E + 1) statistics that backward passes add to (router.h); NULL: none do
    double* router_statistics;

    Comm* comm;
    GridGroups groups; // of processes that this one is in
    TensorParts parts; // of gradients, added up over the tensor group
    Zero zero;         // ZeRO: the shard that this rank updates, and its communication
    Linear linear;
    Attention attention;
    DeltaScratch delta;
    CrossEntropyBf16Scratch classifier; // if matmuls are in bf16
    UpdateGroups update;                // everything that updates need, beside their settings

    PipelineStage stage; // turns of this stage of the model
    Model* base;         // the frozen model of an adapter: only parameters; NULL: no adapter
    Model* teacher;      // --teacher, a model that only evaluates; NULL: none
    Teaching teaching;   // its part in the gradient
};

static const char* parameters_kind(const Settled* s) {
    return settled_has_blocks(s)        ? "parameters in 8 bits"
           : model_has_adapter(s->part) ? "parameters of the adapter"
                                        : "parameters";
}

// Opens the parameters; those of an adapter's base are open.
static void open_parameters(Model* model, const Settled* s) {
    const ModelConfig cfg = model->cfg;
    TensorRow* rows = model->parameter_rows;
    Memory* memory = &model->memory;
    model->parameter_bytes = settled_has_blocks(s) ? quantized_parameter_rows(rows, cfg, sizeof(float))
                                                   : map_parameter_rows(&model->map, rows, sizeof(float));
    model->params_memory = memory_take(memory, parameters_kind(s), MEMORY_DEVICE, model->parameter_bytes);
    tensor_rows_bind(&model->params, rows, MODEL_PARAMETER_ROWS, model->params_memory);
    model->layers = (ModelParameters*)memory_take(memory, "scratch: pointers", MEMORY_DEVICE,
                                                  (size_t)cfg.L * sizeof(ModelParameters));
    for (int l = 0; l < cfg.L && model->layers; l++) {
        model->layers[l] = model_parameters_at_layer(model->params, rows, l);
        if (model->base) {
            model_join_parameters(&model->layers[l], &model->base->layers[l]);
        }
    }
}

// Opens the operations on the parameters.
static void open_matmuls(Model* model, const Settled* s) {
    const Options* o = &s->options;
    const Model* of = model->base ? model->base : model; // it has the matrices
    const ModelConfig cfg = model->cfg;
    const size_t N = settled_pass_tokens(s);
    Memory* memory = &model->memory;
    linear_open(&model->linear, memory, o->texts.quantize, N, (size_t)model_widest(cfg));
    linear_open_adapter(&model->linear, memory, cfg, N);
    if (o->memory.matmul == MATMUL_BF16) {
        linear_open_bf16(&model->linear, memory, of->parameter_rows, of->params_memory,
                         s->use == USE_TRAIN ? PACKED_KINDS : 1);
    }
    if (o->memory.matmul == MATMUL_FP8) {
        linear_open_fp8(&model->linear, memory, cfg, N);
    }
}

// Opens attention, with rotary positions and windows if the model has any.
static void open_positions(Model* model, const Settled* s) {
    const AttentionSizes sizes =
        attention_config_chunks(model->cfg, model->B, settled_rank_length(s), grid_chunks(&s->ranks.grid));
    self_attention_open(&model->attention, &model->memory, model->linear.is_bf16, model->cfg, sizes,
                        &model->groups.context);
    mixer_open(&model->delta, &model->memory, model->cfg, model->B,
               s->use == USE_TRAIN ? settled_rank_length(s) : 0);
    model->window = model->cfg.window;
    if (model->cfg.window > 0) {
        model->window_starts =
            (int*)memory_take(&model->memory, "starts of windows", MEMORY_DEVICE,
                              settled_pass_tokens(s) * (size_t)s->ranks.grid.shape.context * sizeof(int));
    }
}

// Opens the gradients, if there are any, and what divides them among processes.
static void open_gradients(Model* model, const Settled* s) {
    Memory* memory = &model->memory;
    if (s->use == USE_TRAIN) {
        model->gradient_bytes = model->map.totals.elements[MAP_GRADIENTS] * sizeof(float);
        model->grads_memory = memory_take(memory, "gradients", MEMORY_DEVICE, model->gradient_bytes);
        model->gradients = (ModelParameters*)memory_take(memory, "scratch: pointers", MEMORY_DEVICE,
                                                         (size_t)model->cfg.L * sizeof(ModelParameters));
        tensor_parts_open(&model->parts, memory, MEMORY_DEVICE, &model->map);
    }
    for (int l = 0; l < model->cfg.L && model->gradients; l++) {
        model->gradients[l] = map_bind(&model->map, MAP_GRADIENTS, model->grads_memory, sizeof(float), l);
    }
    zero_open_cpu(&model->zero, memory, &model->map, s->zero, (float*)model->params_memory,
                  (float*)model->grads_memory, &model->groups.data, &model->groups.same_experts);
}

// Opens the activations, and the classifier that works in them.
static void open_activations(Model* model, const Settled* s) {
    const ModelConfig cfg = model->cfg;
    const int B = model->B, T = model->T, N = model->N, is_bf16 = model->linear.is_bf16,
              generates = s->use == USE_GENERATE, chunk = (int)model_classifier_chunk(cfg, (size_t)N);
    // exponentials in bf16 take half the memory
    const int tokens = int_min(is_bf16 ? 2 * chunk : chunk, N);
    model->chunk = is_bf16 ? (int)cross_entropy_bf16_rows(tokens, cfg.Vp) : tokens;
    const size_t trained = model_activation_rows(model->activation_rows, cfg, B, N / B, model->recompute,
                                                 cfg.L, model->freeze.first_block, (size_t)model->chunk);
    model->activation_bytes =
        decoder_count_activations(&model->memory, cfg, s->decode_batch, T, generates ? 0 : trained);
    model->acts_memory = memory_allocate_unset(&model->memory, "activations", MEMORY_DEVICE,
                                               // a short text touches little
                                               model->activation_bytes);
    tensor_rows_bind(&model->acts, model->activation_rows, MODEL_ACTIVATION_ROWS,
                     generates ? NULL : model->acts_memory);
    model->stage = (PipelineStage){cfg, model->freeze.first_block, model->activation_rows, model->acts_memory,
                                   pipeline_rest()};
    if (is_bf16 && !generates && model_has_last(cfg)) {
        cross_entropy_bf16_open(&model->classifier, &model->memory, model->acts.logits, tokens, N, cfg.C,
                                cfg.Vp, model_tensor_ranks(cfg));
    }
}

// Returns the level that a run recomputes at. With an MLP in bf16 GELU is always computed again
// (mlp_bf16.h).
static RecomputeLevel recompute_level(const Settled* s) {
    const Options* o = &s->options;
    const size_t N = settled_pass_tokens(s);
    const int drops_gelu =
        o->memory.matmul == MATMUL_BF16 && (mlp_bf16_fits(N, (size_t)model_hidden(s->part)) ||
                                            mlp_bf16_fits(N, (size_t)model_expert_hidden(s->part)));
    return o->memory.recompute == RECOMPUTE_NONE && drops_gelu ? RECOMPUTE_ACTIVATION
                                                               : (RecomputeLevel)o->memory.recompute;
}

// Opens the frozen base of an adapter: its parameters, in a ledger that is one kind of memory in
// the model's.
static void open_base(Model* model, const Settled* s) {
    const Settled of_base = setup_base(s);
    const MapOf of = settled_map(&of_base, 1);
    Model* base = (Model*)check_alloc(1, sizeof(Model), "the base of an adapter");
    base->cfg = of_base.part;
    base->memory = memory_of(model->memory.allocators);
    base->comm = model->comm;
    map_open(&base->map, &base->memory, MEMORY_DEVICE, &of, grid_rank(&of_base.ranks.grid));
    optimizer_state_open(&base->state, of_base.optimizer, &base->map);
    open_parameters(base, &of_base);
    base->linear.is_quantized = of_base.options.texts.quantize;
    memory_count_all(&model->memory, base->linear.is_quantized ? "base in 8 bits" : "base", MEMORY_DEVICE,
                     &base->memory);
    model->base = base;
}

// Opens all of a model but its groups, which are open, and its teacher.
static void open_parts(Model* model, const Settled* s, Memory memory, Comm* comm) {
    const MapOf of = settled_map(s, 1);
    model->cfg = s->part;
    model->B = s->options.batch.size;
    model->T = s->options.batch.seq_len;
    model->N = model->B * settled_rank_length(s);
    model->z_loss = s->options.optimizer.z_loss;
    model->router_losses =
        (RouterLosses){s->options.optimizer.router_balance, s->options.optimizer.router_z, 0};
    model->recompute = recompute_level(s);
    model->freeze = settled_own_freeze(s);
    model->memory = memory;
    model->comm = comm;
    model->zero.plan = s->zero;
    memory_count(&model->memory, parameters_kind(s), MEMORY_DEVICE, 0); // first in the report
    map_open(&model->map, &model->memory, MEMORY_DEVICE, &of, grid_rank(&s->ranks.grid));
    optimizer_state_open(&model->state, s->optimizer, &model->map);
    if (model_has_adapter(s->cfg)) {
        open_base(model, s);
    }
    open_parameters(model, s);
    open_matmuls(model, s);
    open_positions(model, s);
    if (s->use != USE_GENERATE) {
        open_gradients(model, s);
    }
    if (s->use == USE_TRAIN) {
        update_groups_open(&model->update, &model->memory, &model->state, &model->zero, &model->linear,
                           &model->groups.tensor);
    }
    open_activations(model, s);
    decoder_bind(&model->decoder, s->part, s->decode_batch, model->T, model->acts_memory);
}

// Opens the teacher, whose own ledger is one kind of memory in the model's, in the model's groups.
static void open_teacher(Model* model, const Settled* s) {
    const Settled of_teacher = setup_teacher(s);
    Model* teacher = (Model*)check_alloc(1, sizeof(Model), "the teacher");
    teacher->groups = model->groups;
    teacher->groups.experts = group_alone(model->comm); // it has all experts
    open_parts(teacher, &of_teacher, memory_of(model->memory.allocators), model->comm);
    memory_count_all(&model->memory, "teacher", MEMORY_DEVICE, &teacher->memory);
    if (memory_is_dry(&model->memory)) {
        free(teacher);
    } else {
        model->teacher = teacher;
    }
}

// Opens the model with all parameters zero. Nothing is allocated after this, and nothing at all
// from a dry ledger, which then tells what the model would take: it needs no `comm`. Returns the
// ledger.
static const Memory* model_open(Model* model, const Settled* s, Memory memory, Comm* comm) {
    memset(model, 0, sizeof(*model));
    grid_groups_open(&model->groups, s->ranks.grid, comm);
    open_parts(model, s, memory, comm);
    if (settled_has_teacher(s) && model_has_last(s->part)) {
        teaching_open(&model->teaching, &model->memory, settled_distill(s), model->cfg, (size_t)model->N,
                      (size_t)model->chunk);
        open_teacher(model, s);
    }
    return &model->memory;
}

static void model_close(Model* model) {
    if (model->base) {
        memory_close(&model->base->memory);
        free(model->base);
    }
    if (model->teacher) {
        memory_close(&model->teacher->memory);
        free(model->teacher);
    }
    memory_close(&model->memory);
    grid_groups_close(&model->groups);
}

// -------------------------------------------------------------------------------------------------
// Forward

// Returns the residual stream that enters block l, (R, C).
static float* stream_into(const Model* model, int l, const Pass* pass) {
    return model_stream_into(pass->acts, pass->activation_rows, model->freeze.first_block, l);
}

// Returns a pass in the tensor group. With a cache the stream is not cut.
static TensorParallel tensor_of(Model* model, const Pass* pass) {
    Group* group = &model->groups.tensor;
    const ModelActivations* a = pass->acts;
    const TensorCut cut = {group->rank, group->size, pass_tokens(pass), model->cfg.C, !pass->cached};
    return (TensorParallel){cut, group, a->gathered, a->parts, a->arrived};
}

// Returns layer l in a pass; each layer also has the parameters outside of the blocks.
static LayerPass layer_at(Model* model, int l, const Pass* pass) {
    const ModelParameters p = model->layers[l];
    return (LayerPass){.cfg = model->cfg,
                       .l = l,
                       .pass = pass,
                       .p = p,
                       .a = model_activations_at_layer(*pass->acts, pass->activation_rows, l),
                       .weights = linear_weights(&model->linear, model->cfg, &p, l),
                       .tensor = tensor_of(model, pass),
                       .linear = &model->linear};
}

// A block in a pass: R rows of the residual stream, and the layers, which see all N tokens.
typedef struct {
    Model* model;
    int l;
    ModelActivations a;
    Stream stream;           // of the block before it, with scales if the model has them
    Branch branch1, branch2; // attention and the MLP, from the residual stream and back
    SelfAttention attention; // or, in layers of a hybrid, a mixer
    Mixer mixer;
    Mlp mlp;
} Block;

// Returns block l in a pass; `d`: gradients of its parameters, which a backward pass sets or adds
// to as `mode` says, or NULL.
static Block block_at(Model* model, int l, const Pass* pass, const ModelParameters* d, GradientMode mode) {
    LayerPass layer = layer_at(model, l, pass);
    const Stream stream = stream_of(&layer, stream_into(model, l, pass));
    if (d) {
        linear_adapter_gradients(&layer.weights, d, mode);
    }
    return (Block){
        .model = model,
        .l = l,
        .a = layer.a,
        .stream = stream,
        .branch1 = branch_of_attention(&layer, stream.out),
        .branch2 = branch_of_mlp(&layer, stream_into(model, l + 1, pass)),
        .attention = self_attention_of(&layer, model->window_starts, &model->attention),
        .mixer = mixer_of(&layer, &model->delta),
        .mlp = mlp_of(&layer, &model->groups.experts),
    };
}

// Runs the block up to the hidden layer of the MLP.
static void block_hidden(const Block* b) {
    // ln1 (R, C); residual2 (R, C) = stream + attention; ln2 (R, C); fch, fch_act (N, F)
    stream_enter_cpu(&b->stream);
    branch_enter_cpu(&b->branch1);
    if (b->mixer.kind != MIXER_NONE) {
        mixer_forward_cpu(b->branch1.out, &b->mixer, b->branch1.in);
    } else {
        self_attention_forward_cpu(b->branch1.out, &b->attention, b->branch1.in);
    }
    branch_leave_cpu(&b->branch1, &b->branch2);
    mlp_hidden_cpu(&b->mlp, b->branch2.in);
}

static void block_forward(const Block* b) {
    block_hidden(b);
    mlp_forward_cpu(b->branch2.out, &b->mlp);
    branch_leave_cpu(&b->branch2, NULL); // the stream after the block (R, C)
}

// Runs this stage of the model: in the last one up to the last hidden state, lnf (R, C). In other
// stages than the first, encoded has the residual stream that enters. A pass may have no tokens: it
// takes its part in what ranks compute together.
static void forward_pass(Model* model, const Pass* pass) {
    const ModelConfig cfg = model->cfg;
    model->linear.few = pass_is_step(pass);
    pass_window_starts_cpu(model->window_starts, pass, pass->cached ? cfg.window : model->window);
    if (model_has_first(cfg)) {
        const LayerPass first = layer_at(model, 0, pass);
        linear_embedding_cpu(&first);
    }
    for (int l = 0; l < cfg.L; l++) {
        const Block block = block_at(model, l, pass, NULL, GRADIENT_SET);
        block_forward(&block);
    }
    if (model_has_last(cfg)) {
        const LayerPass last = layer_at(model, cfg.L - 1, pass);
        const Norm norm = layer_last_norm(&last);
        norm_forward_cpu(pass->acts->lnf, stream_into(model, cfg.L, pass), &norm);
    }
}

static Pass batch_pass(const Model* model, Batch batch) {
    assert(batch.B * batch.T <= model->N && batch_length(batch) <= model->T);
    return pass_of_batch(batch, &model->acts, model->activation_rows, &model->targets_per_token,
                         batch.random ? &model->random : NULL);
}

static void model_forward(Model* model, Batch batch) {
    const Pass pass = batch_pass(model, batch);
    forward_pass(model, &pass);
}

// Returns the head of the model, after forward_pass. Collective.
static LmHead lm_head(Model* model, const Pass* pass) {
    const LayerPass last = layer_at(model, model->cfg.L - 1, pass);
    return lm_head_of(&last, model->chunk, model->z_loss, &model->classifier);
}

// Sets the losses (N), without gradients; and is_top (N), unless NULL: whether each target was the
// most likely token.
static void model_losses(Model* model, Batch batch, int* is_top) {
    const Pass pass = batch_pass(model, batch);
    const LmHead head = lm_head(model, &pass);
    lm_head_losses_cpu(model->acts.losses, is_top, &head);
}

// Runs the teacher, if any, on the batch of a micro-step.
static void teacher_forward(Model* model, Batch batch) {
    if (model->teacher) {
        const Pass pass = batch_pass(model->teacher, batch);
        forward_pass(model->teacher, &pass);
        model->teaching.teacher = lm_head(model->teacher, &pass);
    }
}

// Returns the sum of the losses of a batch, in order.
static double batch_loss(const Model* model, Batch batch) {
    double sum = 0;
    for (int n = 0; n < batch.B * batch.T; n++) {
        sum += model->acts.losses[n];
    }
    return sum;
}

// -------------------------------------------------------------------------------------------------
// Backward

// Computes again what the forward pass did not keep of the block: the same operations on the same
// inputs give the same bits.
static void block_recompute(const Block* b, RecomputeLevel level) {
    if (level == RECOMPUTE_BLOCK) {
        block_hidden(b);
        if (branch_keeps_out(&b->branch2)) {
            mlp_forward_cpu(b->branch2.out, &b->mlp);
        }
        return;
    }
    stream_enter_cpu(&b->stream);
    if (level >= RECOMPUTE_NORMS) {
        branch_enter_cpu(&b->branch1);
        branch_enter_cpu(&b->branch2);
    }
    if (level == RECOMPUTE_MLP) {
        mlp_hidden_cpu(&b->mlp, b->branch2.in);
    } else if (level >= RECOMPUTE_ACTIVATION) {
        mlp_activation_cpu(&b->mlp);
    }
}

// Sets branch (R, C), the gradient of the input of attention or the mixer, given that of its
// output, and the gradients of its parameters.
static void branch1_backward(const Block* b, const ModelParameters* d, GradientMode mode, const float* dout) {
    if (b->mixer.kind != MIXER_NONE) {
        mixer_backward_cpu(&b->mixer, d, mode, dout, b->branch1.in);
    } else {
        const SelfAttentionGradients dattention = self_attention_gradients_of(d, &b->a, mode);
        self_attention_backward_cpu(&b->attention, &dattention, dout, b->branch1.in);
    }
}

// Turns dresidual (R, C), the gradient of the residual stream after block l, into that before it,
// in place. branch (R, C) has the gradient of ln2, then of ln1; dfch (N, F) and dqkv (N, QKV) are
// scratch of the other layer.
static void block_backward(Model* model, int l, const Pass* pass, GradientMode mode) {
    const ModelParameters d = model->gradients[l];
    const GradientMode own = share_gradient_mode(model->cfg, l, mode);
    const Block b = block_at(model, l, pass, &d, own);
    const ModelActivations a = b.a;
    const MlpLayerGradients dmlp =
        mlp_gradients_of(&d, &a, own, zero_neighbor_elements(&model->map, l), model->router_losses,
                         router_statistics_of(model->router_statistics, l, model->cfg.E));
    const BranchGradients d1 = branch_gradients_of_attention(&d, &a, own),
                          d2 = branch_gradients_of_mlp(&d, &a, own);
    block_recompute(&b, model->recompute);
    zero_clear_unset_cpu(&model->zero, l);
    mlp_backward_cpu(&b.mlp, &dmlp, branch_leave_backward_cpu(&b.branch2, &d2, a.dresidual), b.branch2.in);
    branch_enter_backward_cpu(a.dresidual, &b.branch2, &d2, a.branch);
    branch1_backward(&b, &d, own, branch_leave_backward_cpu(&b.branch1, &d1, a.dresidual));
    branch_enter_backward_cpu(a.dresidual, &b.branch1, &d1, a.branch);
    stream_enter_backward_cpu(&b.stream, d.scales, &a, l == model->cfg.L - 1, own);
}

// Sets or adds to the gradients of the embeddings, from dresidual (R, C), that of encoded.
static void embeddings_backward(Model* model, const Pass* pass, GradientMode mode) {
    const ModelConfig cfg = model->cfg;
    const TensorParallel tensor = tensor_of(model, pass);
    const ModelActivations* a = pass->acts;
    const ModelParameters d = model->gradients[0];
    float* apart = zero_embedding_gradient_cpu(&model->zero); // NULL: joined
    const EmbeddingSizes sizes = {
        pass->B, pass->T, cfg.C, cfg.Vp, cfg.max_T, pass->positions.chunks, tensor.cut.rank * cfg.Vp};
    if (d.wte || d.wpe || apart) {
        const LayerPass first = layer_at(model, 0, pass);
        stream_leave_backward_cpu(a, (size_t)tensor_rows(tensor.cut).count * (size_t)cfg.C);
        linear_embedding_backward_cpu(a->dresidual, &first);
    }
    const float* dencoded = tensor_gather_cpu(&tensor, 0, a->dresidual); // (N, C)
    // without a matrix of its own, the head has set or added to d.wte
    embedding_backward_cpu(apart ? apart : d.wte, d.wpe, dencoded, pass->inputs, sizes,
                           cfg.has_head || apart ? mode : GRADIENT_ADD, mode);
}

// Called when the gradient of group g is complete: reduces it over the ranks, or updates the group
// if the hook does so.
static void group_done(Model* model, int g, MicroStep step, InBackward* hook) {
    zero_group_done_cpu(&model->zero, g, step);
    update_group_in_backward_cpu(&model->update, g, hook);
}

// Sets the losses and dresidual (R, C), the gradient of the residual stream after the last block,
// and sets or adds to the gradients of the classifier.
static void head_backward(Model* model, const Pass* pass, float dloss, GradientMode mode) {
    const ModelConfig cfg = model->cfg;
    const ModelActivations* a = pass->acts;
    const ModelParameters d = model->gradients[0];
    const LayerPass last = layer_at(model, cfg.L - 1, pass);
    const LmHead head = lm_head(model, pass);
    const Norm norm = layer_last_norm(&last);
    float *dlnf = a->branch, *dweight = cfg.has_head ? d.head : d.wte; // (R, C), (Vp, C)
    if (model->teacher) {
        teaching_gradients_cpu(a->losses, dlnf, dweight, &model->teaching, head, dloss, mode);
    } else {
        lm_head_gradients_cpu(a->losses, dlnf, dweight, &head, dloss, mode);
    }
    norm_backward_cpu(a->dresidual, d.lnfw, d.lnfb, dlnf, stream_into(model, cfg.L, pass), &norm,
                      GRADIENT_SET, mode);
}

// After model_forward on the same batch: sets the losses and sets or adds to all gradients, as
// `mode` says. dloss is the gradient of the loss of each token. Each group of gradients is reduced,
// or its parameters are updated, as soon as it is complete. The pass ends where everything below is
// frozen. In other stages than the last, dresidual has the gradient of the stream that leaves.
static void model_backward(Model* model, Batch batch, float dloss, GradientMode mode, MicroStep step,
                           InBackward* hook) {
    const ModelConfig cfg = model->cfg;
    const Pass pass = batch_pass(model, batch);
    model->router_losses.dloss = dloss;
    model->targets_per_token = batch_targets_per_token(&batch);
    model->random = pass_random(batch);
    pass_window_starts_cpu(model->window_starts, &pass, model->window);
    if (model_has_last(cfg)) {
        head_backward(model, &pass, dloss, mode);
        if (hook) { // it decides on the update by the losses
            in_backward_losses(hook, batch_loss(model, batch));
        }
    }
    for (int l = cfg.L - 1; l >= model->freeze.first_block; l--) {
        const int g = model_group(cfg, l);
        block_backward(model, l, &pass, mode);
        if (model_group_layer(cfg, g) == l) { // no layer below adds to these gradients
            group_done(model, g, step, hook);
        }
    }
    if (model_has_first(cfg)) {
        embeddings_backward(model, &pass, mode);
    }
    group_done(model, 0, step, hook);
    zero_group_done_cpu(&model->zero, model_groups(model->cfg), step); // an embedding's apart
}

// -------------------------------------------------------------------------------------------------
// Stages

// Starts this stage's next action, on a batch: sends what the last one has made, and receives what
// this one needs.
static void stage_begin(Model* model, PipelineAction next, Batch batch) {
    const Pass pass = batch_pass(model, batch);
    next.tokens = tensor_rows(tensor_of(model, &pass).cut).count;
    stage_enter_cpu(&model->stage, &model->groups.pipe, &model->acts, next);
}

static void stage_end(Model* model) { stage_leave_cpu(&model->stage, &model->groups.pipe, &model->acts); }

// -------------------------------------------------------------------------------------------------
// Micro-steps

// Forward on the batch of a micro-step. Adds the time and the largest scores to the report.
static void micro_step_forward(Model* model, Batch batch, RankReport* report) {
    const double start_s = time_now_s();
    model->random = pass_random(batch);
    model->attention.scores = rank_report_scores(report);
    model_forward(model, batch);
    model->attention.scores = NULL; // of training alone
    teacher_forward(model, batch);
    report->pace_s += time_now_s() - start_s;
}

// Backward on the batch of a micro-step. Sets the loss of the report.
static void micro_step_backward(Model* model, Batch batch, float dloss, MicroStep step, InBackward* hook,
                                RankReport* report) {
    const int adds = step.number > 0 && model->map.of.stage < 2;
    const GradientMode mode = adds ? GRADIENT_ADD : GRADIENT_SET;
    model_backward(model, batch, dloss, mode, step, hook);
    if (model_has_last(model->cfg)) {
        rank_report_losses(report)[step.number] = batch_loss(model, batch);
        for (int n = 0; n < batch.B * batch.T && batch.sources; n++) { // of a mixture
            rank_report_sources(report)[batch.sources[n / batch.T]] += model->acts.losses[n];
        }
        teaching_add_cpu(&report->divergence, &model->teaching, batch.B * batch.T);
    }
}

// Ends the gradient of an update in which this rank had `tokens`: sets its square sum, and the time
// for a token.
static void gradients_end(Model* model, InBackward* hook, double tokens, RankReport* report) {
    if (hook) {
        report->square_sum = hook->square_sum;
    } else {
        tensor_parts_sum_cpu(&model->parts, &model->zero, &model->groups.tensor);
        zero_square_sum_cpu(&model->zero, &report->square_sum, model->update.partial);
    }
    report->pace_s = tokens > 0 && !grid_forward_waits(&model->groups.grid) ? report->pace_s / tokens : 0;
}

// Moves the biases of this process's routers, unless they are frozen, given the statistics of all
// routers of the model; NULL: not at all. All processes that have a bias move it alike.
static void model_move_biases(Model* model, const double* statistics, Update update) {
    for (int l = 0; l < model->cfg.L && statistics; l++) {
        if (router_bias_moves(model->cfg, &model->freeze, l)) {
            router_bias_move(model->layers[l].routerb, model->cfg, l, statistics, update.router_bias_rate);
        }
    }
}

// Clips the heads of this process whose scores in the update were above the limit, given the
// largest scores of all heads of the model; NULL: none. All processes that have a weight clip it
// alike.
static void model_clip_heads(Model* model, const double* scores, Update update) {
    int clips = 0;
    for (int l = 0; l < model->cfg.L && scores; l++) {
        clips |= qk_clip_layer_cpu(&model->layers[l], model->cfg, l, scores, update.qk_clip);
    }
    if (clips) {
        linear_pack(&model->linear);
    }
}

// Computes the gradient of an update, one micro-batch after another. Sets the losses of the report,
// one for each micro-step, its square sum, work and pace. With --update-in-backward it also makes
// the update.
static void model_gradients(Model* model, Run* run) {
    InBackward* hook = run_hook(run);
    RankReport* report = run->report;
    double tokens = 0;
    model->router_statistics =
        router_statistics_of(rank_report_statistics(report), model->cfg.part.first_layer, model->cfg.E);
    linear_trains(&model->linear);
    for (const RunTurn* turn; (turn = run_turn(run, hook)) != NULL;) {
        const Batch batch = turn->batch;
        stage_begin(model, turn->now, batch);
        if (turn->now.pass == PIPELINE_FORWARD) {
            micro_step_forward(model, batch, report);
            tokens += (double)batch.B * batch.T;
        } else {
            micro_step_backward(model, batch, turn->dloss, turn->step, hook, report);
        }
    }
    stage_end(model);
    linear_trained(&model->linear);
    stage_join_embedding_cpu(&model->zero, &model->groups.pipe);
    gradients_end(model, hook, tokens, report);
}

// -------------------------------------------------------------------------------------------------
// Update

static void model_update(Model* model, Update update) {
    update_groups_cpu(&model->update, update);
    stage_share_embedding_cpu(model->params.wte, &model->zero, &model->groups.pipe);
}

// Sets the parameters to the average of the weights, and sets the weights again.
static void model_show_average(Model* model) {
    update_groups_show_average_cpu(&model->update);
    stage_share_embedding_cpu(model->params.wte, &model->zero, &model->groups.pipe);
}

static void model_hide_average(Model* model) {
    update_groups_hide_average_cpu(&model->update);
    stage_share_embedding_cpu(model->params.wte, &model->zero, &model->groups.pipe);
}

// -------------------------------------------------------------------------------------------------
// Evaluate and decode

// Forward on a batch of a validation, which may be empty: sets the sum of its losses, in the last
// stage.
static void evaluate_batch(Model* model, Batch batch, double* loss) {
    model_forward(model, batch);
    if (batch.B > 0 && model_has_last(model->cfg)) { // else `loss` is no micro-batch's
        model_losses(model, batch, NULL);
        *loss = batch_loss(model, batch);
    }
}

// Forward on all batches of a validation: sets the losses of the report.
static void model_evaluate(Model* model, Run* run) {
    const PipelineAction forward = {PIPELINE_FORWARD, 0, 0};
    Batch batch;
    for (int64_t i = 0; run_validation_batch(run, i, &batch); i++) {
        stage_begin(model, forward, batch);
        evaluate_batch(model, batch, rank_report_losses(run->report) + (i - model->groups.pipe.rank));
    }
    model->stage.last = pipeline_rest(); // of the last one, which all stages have left
}

// Forward, for tasks: sets the loss of each token of whole sequences; positions count from the
// start of each document.
static void model_token_losses(Model* model, Batch batch, float* losses, int* is_top) {
    const ContextParallel* context = &model->attention.context;
    const AttentionSizes sizes = attention_config_chunks(model->cfg, batch.B, batch.T, batch.chunks);
    const PipelineAction forward = {PIPELINE_FORWARD, 0, 0};
    Pass pass = batch_pass(model, batch);
    pass.positions.starts = batch.starts;
    stage_begin(model, forward, batch);
    forward_pass(model, &pass);
    if (model_has_last(model->cfg)) {
        model_losses(model, batch, is_top);
        context_gather_tokens_cpu(losses, context, model->acts.losses, sizes);
    }
    if (is_top && model_has_last(model->cfg)) {
        context_gather_tokens_cpu(is_top, context, is_top, sizes);
    }
    stage_end(model);
}

// Runs a pass of decoding; returns the logits (count, Vp) that follow its last `count` rows.
static const float* decode_forward(Model* model, const Pass* pass, int count) {
    const PipelineAction now = {PIPELINE_FORWARD, 0, pass_tokens(pass)};
    const PipelineStream stream = {stream_into(model, model->cfg.L, pass), NULL, pass->acts->encoded, NULL,
                                   (size_t)model->cfg.C * sizeof(float)};
    Group* pipe = &model->groups.pipe;
    const int words = model->cfg.Vp * model_tensor_ranks(model->cfg);
    float* logits = model_is_cut(model->cfg) ? pass->acts->all_logits : pass->acts->logits;
    pipeline_exchange_cpu(pipe, pipeline_rest(), now, stream);
    forward_pass(model, pass);
    pipeline_exchange_cpu(pipe, now, pipeline_rest(), stream);
    if (model_has_last(model->cfg)) {
        const LmHead head = lm_head(model, pass);
        model->linear.few = 1;
        logits = (float*)lm_head_all_logits_cpu(&head, head.N - count, count);
    }
    pipeline_tell_cpu(pipe, logits, (size_t)count * (size_t)words * sizeof(float));
    return logits;
}

// Reads the first tokens of a sequence; see generator.h.
static const float* model_prefill(Model* model, int sequence, const int* ids, int count) {
    const Pass pass = decoder_prefill_pass(&model->decoder, sequence, ids, count);
    return decode_forward(model, &pass, 1);
}

static const float* model_decode(Model* model, const int* ids, const int* positions, int sequences) {
    const Pass pass = decoder_step_pass(&model->decoder, ids, positions, sequences);
    return decode_forward(model, &pass, sequences);
}

// -------------------------------------------------------------------------------------------------
// Tensors in and out: ModelAccess (load_save.h)

static void* model_get_group(Model* model, int g, void* group) {
    void* place = (char*)model->params_memory + tensor_group_offset_bytes(model->parameter_rows, g);
    return group ? memcpy(group, place, map_group_elements(&model->map, g) * sizeof(float)) : place;
}

// Without 8 bits the group was set in its place.
static void model_set_group(Model* model, int g, const float* group) {
    if (model->linear.is_quantized && !model->base) {
        quantized_set_group_cpu(model->parameter_rows, model->params_memory, model->cfg, g, group);
    }
}

static void* model_get_state(Model* model, int slot, size_t at, void* state, size_t bytes) {
    void* place = (char*)model->state.memory + model->state.slots[slot].offset_bytes + at;
    return state ? memcpy(state, place, bytes) : place;
}

// It was set in its place.
static void model_set_state(Model* model, int slot, size_t at, const void* state, size_t bytes) {
    assert(state == model_get_state(model, slot, at, NULL, bytes));
}

static void model_loaded(Model* model, const char* checkpoint) {
    (void)checkpoint;
    linear_pack(&model->linear);
}

static void model_gather(Model* model, int g, float* group) {
    if (map_is_divided(&model->map) && map_trained(&model->map, g)) {
        zero_gather_group_cpu(&model->zero, group, g);
    }
}

static void model_move(Model* model, GridGroup group, GroupMove move) {
    Group* with = group == GRID_TENSOR    ? &model->groups.tensor
                  : group == GRID_EXPERTS ? &model->groups.experts
                                          : &model->groups.pipe;
    group_exchange_cpu(with, &move, 1);
}

static const Map* model_map(const Model* model) { return &model->map; }

static const OptimizerState* model_state(const Model* model) { return &model->state; }

static Model* model_teacher(Model* model) { return model->teacher; }

static Model* model_base(Model* model) { return model->base; }

static uint64_t model_checksum(Model* model, ParameterBytes of) {
    const size_t bytes = of.count > 0 ? of.count : model->parameter_bytes;
    const void* begin = (const char*)model->params_memory + of.begin;
    return checksum_words_cpu((const uint64_t*)begin, bytes / sizeof(uint64_t), of.number);
}

// -------------------------------------------------------------------------------------------------
// The table

// Opens the model with a dry ledger, which counts all that it takes.
static void plan_of_model(ModelPlan* plan, const Settled* s) {
    Model model;
    model_open(&model, s, memory_dry(), NULL);
    plan->memory = model.memory;
    plan->chunk = model.linear.is_bf16 ? model.classifier.lent : model.chunk;
    plan->logits_bytes = model_logits_bytes(model.activation_rows);
    free(model.base); // of a dry ledger, it has no memory
}

static const Trainer trainer = {
    .name = "CPU FP32",
    .program_name = "train_gpt2",
    .program = {OPTION_CPU, LLMC_VERSION},
    .dtype = SAFETENSORS_F32,
    .model_bytes = sizeof(Model),
    .ledger = memory_on_host,
    .open = model_open,
    .close = model_close,
    .model = plan_of_model,
    .plan = plan_on_cpu,
    .memory = memory_used_on_cpu,
    .token_losses = model_token_losses,
    .prefill = model_prefill,
    .decode = model_decode,
    .access = {model_get_group, model_set_group, model_get_state, model_set_state, model_loaded, model_gather,
               model_move, model_map, model_state},
    .show_average = model_show_average,
    .hide_average = model_hide_average,
    .teacher = model_teacher,
    .base = model_base,
    .checksum = model_checksum,
};

// -------------------------------------------------------------------------------------------------
// The loop

// Trains until the last step, or until a signal or --max-hours stops the run. The last lap only
// evaluates and saves.
static void train(Model* model, Run* run) {
    Update update;
    for (;;) {
        model->window = run_window(run);
        for (int part = 0; run_validates(run, part); part++) {
            model_evaluate(model, run);
            run_log_validation(run);
        }
        if (run_evaluates_tasks(run)) {
            run_log_tasks(run);
        }
        run_reaches(run, STAGE_VALIDATED);
        if (run_samples(run)) {
            run_log_samples(run);
        }
        run_reaches(run, STAGE_SAMPLED);
        run_agree(run); // all ranks save, and stop, at the same step
        if (run_saves(run)) {
            run_save(run);
        }
        if (run_ends(run)) {
            break;
        }
        run_begin_step(run);
        model_gradients(model, run);
        if (run_accepts(run, &update)) {
            model_update(model, update);
        }
        model_move_biases(model, run_moves_biases(run), update);
        model_clip_heads(model, run_clips_heads(run), update);
        run_end_step(run);
        if (run_diverges(run)) {
            run_roll_back(run);
        }
    }
}

#ifndef TRAIN_GPT2_NO_MAIN
PROCESSOR_CHECK

int main(int argc, char** argv) {
    threads_wait_briefly(
        argv); // executes this program a second time, with OpenMP's waiting time in its environment
    vec_flush_denormals(); // before the first parallel region: its threads inherit it
    run_open_process();
    return run_program(argc, argv, &trainer, train);
}
#endif
