/*
train_gpt2.cu -- pretrains language models on a GPU. The twin of train_gpt2.c, its reference: the
same functions, names and order. Top to bottom: the model, forward, backward, micro-steps, update,
evaluation, tensors in and out, the table of functions, the training loop. The operations are
modules in llmc/; what the loop asks and tells is llmc/run/run.h.

    make train_gpt2cu PRECISION=BF16|FP16|FP32 && ./train_gpt2cu      --help lists the rest

Weights, activations and their gradients are floatX: bf16, fp16 or fp32. Norms, softmax, losses,
sums and the optimizer's state are fp32. Comments give the shapes of tensors: B sequences of T
tokens, N = B*T tokens, C channels, F hidden units of the MLP, QKV columns of queries, keys and
values, Vp tokens of the padded vocabulary.
*/
// room after room, from the ground up; each brings what it is made of
#include "llmc/base/processor.h"
#include "llmc/gpu/floatx.cuh" // first: the type of weights
#include "llmc/gpu/batch_queue.cuh"
#include "llmc/gpu/forward_clock.cuh"
#include "llmc/gpu/graph.cuh"
#include "llmc/gpu/results.cuh"
#include "llmc/ops/checksum.cuh"
#include "llmc/ops/rope.cuh"
#include "llmc/model/share_layers.h"
#include "llmc/layers/branch.cuh"
#include "llmc/layers/decode.cuh"
#include "llmc/layers/mixer.cuh"
#include "llmc/layers/mlp.cuh"
#include "llmc/layers/pass.cuh"
#include "llmc/layers/self_attention.cuh"
#include "llmc/layers/stream.cuh"
#include "llmc/layers/teaching.cuh"
#include "llmc/parallel/pipeline.cuh"
#include "llmc/parallel/zero.cuh"
#include "llmc/optim/qk_clip.cuh"
#include "llmc/optim/update_groups.cuh"
#include "llmc/optim/update_in_backward.cuh"
#include "llmc/setup/resolve.h"
#include "llmc/checkpoint/transfer.cuh"
#include "llmc/plan/plan_gpu.cuh"
#include "llmc/run/run.h"
#include "llmc/run/start.h"

// -------------------------------------------------------------------------------------------------
// The model

struct Model {
    ModelConfig cfg; // of the part that this process has
    // micro-batches up to B sequences of up to T tokens; N of these tokens are this process's
    int B, T, N;
    ModelUse use;
    RecomputeLevel recompute; // which activations the backward pass computes again
    Freeze freeze;            // which parameters stay as they are
    int chunk;                // tokens whose logits are in memory at a time, of a batch of any size
    int autotune;             // time algorithms of matmuls
    int use_graph;            // replay micro-steps
    DType grad_dtype;         // of the parameters' gradients
    Gpu gpu;
    TensorRow parameter_rows[MODEL_PARAMETER_ROWS]; // of parameters in 8 bits
    TensorRow activation_rows[MODEL_ACTIVATION_ROWS];
    Map map; // of the elements of all tensors
    // (L) of each layer, with those outside of the blocks; gradients: no data where nothing is
    // trained
    ModelParameters* layers;
    ModelGradients* gradients;
    OptimizerState state; // on the GPU, or offloaded
    size_t parameter_bytes, gradient_bytes, activation_bytes;
    Comm* comm;
    GridGroupsGpu groups;     // of processes that this one is in
    PipelineGpu pipeline;     // messages between stages
    TensorParts parts;        // of gradients, added up over the tensor group
    RouterBiasesGpu biases;   // of routers
    ExpertTrafficGpu experts; // rows of divided experts that travel
    ZeroGpu zero;             // ZeRO: the shard that this rank updates, and its communication

    Memory memory; // a ledger of all that the model takes
    // One block each, cut up by the rows.
    void *params_memory, *grads_memory, *acts_memory;
    Offload offload;
    OffloadResiduals residuals;
    ModelActivations acts;
    DecoderGpu decoder; // generation: its activations are in the same memory

    BatchQueue batches;
    MatmulGpu matmul;
    LinearGpu linear; // with it
    AttentionGpu attention;
    double* wanted_scores; // largest ones of the model (qk_clip.h), while they are wanted; or NULL
    MixerScratchGpu mixer;
    ModelRopes ropes;
    ContextParallelGpu<floatX> context;
    // (B, T) first token that attention sees, in layers with a window; NULL without any
    int* window_starts;
    int window;                 // tokens that a token attends to there, in this step
    float z_loss;               // --z-loss
    RouterLosses router_losses; // --router-balance, --router-z; dloss is that of the pass
    NormScratch norm_scratch;
    EmbeddingGpu encoder;
    OptimizerPlan optimizer;
    GradientNorm norm;
    // everything that updates need, beside the gradient and the settings
    OptimizerUpdate<floatX> update;
    InBackwardGpu in_backward;       // updates beside the backward pass
    ForwardClock clock;              // of several processes
    StepGraph graphs[ZERO_VARIANTS]; // of micro-steps
    StepResults results;
    int sources;       // of a mixture, whose losses are in the results; else 0
    size_t scores;     // largest ones of all heads of the model, which follow; 0: not wanted
    QkClipGpu clip;    // of heads (qk_clip.h)
    int* is_top;       // (N) of the targets of a task, on the GPU
    Transfer transfer; // weights and state between the host and the GPU
    GpuReport report;  // and the sensors for the log

    PipelineStage stage;  // turns of this stage of the model
    Model* base;          // the frozen model of an adapter: only parameters; NULL: no adapter
    Model* teacher;       // --teacher, a model that only evaluates; NULL: none
    TeachingGpu teaching; // its part in the gradient
};

// Returns the micro-steps of an update on one rank.
static double update_micro_steps(const Settled* s) {
    return ceil((double)s->micro_batches / s->ranks.grid.shape.data);
}

// Returns the parameters of layer l, and those outside of the blocks.
static ModelParameters parameters_at_layer(const Model* model, int is_quantized, int l) {
    ModelParameters all;
    if (!is_quantized) {
        return map_bind(&model->map, MAP_PARAMETERS, model->params_memory, sizeof(floatX), l);
    }
    tensor_rows_bind(&all, model->parameter_rows, MODEL_PARAMETER_ROWS, model->params_memory);
    return model_parameters_at_layer(all, model->parameter_rows, l);
}

// Opens the parameters; those of an adapter's base are open.
static void open_parameters(Model* model, const Settled* s) {
    const ModelConfig cfg = model->cfg;
    const int is_quantized = settled_has_blocks(s);
    const char* kind = is_quantized             ? "parameters in 8 bits"
                       : model_has_adapter(cfg) ? "parameters of the adapter"
                                                : "parameters";
    model->parameter_bytes = is_quantized
                                 ? quantized_parameter_rows(model->parameter_rows, cfg, sizeof(floatX))
                                 : model->map.totals.elements[MAP_PARAMETERS] * sizeof(floatX);
    model->params_memory = memory_take(&model->memory, kind, MEMORY_DEVICE, model->parameter_bytes);
    router_biases_open(&model->biases, &model->memory, &model->map,
                       s->use == USE_TRAIN && s->optimizer.master == MASTER_NONE, s->options.data.seed);
    model->layers = (ModelParameters*)memory_take(&model->memory, "scratch: pointers", MEMORY_HOST,
                                                  (size_t)cfg.L * sizeof(ModelParameters));
    for (int l = 0; l < cfg.L && model->layers; l++) {
        model->layers[l] = parameters_at_layer(model, is_quantized, l);
        if (model->base) {
            model_join_parameters(&model->layers[l], &model->base->layers[l]);
        }
    }
}

// Opens rotary positions and windows of attention, and mixers, if the model has any.
static void open_positions(Model* model, const Settled* s) {
    const int sequences = s->use == USE_GENERATE ? 1 : model->B;
    attention_config_open_ropes(&model->ropes, &model->memory, model->cfg, model->T, rope_gpu_open);
    mixer_gpu_open(&model->mixer, &model->memory, model->cfg, sequences, model->T, s->use == USE_TRAIN);
    model->window = model->cfg.window;
    if (model->cfg.window > 0) {
        model->window_starts =
            (int*)memory_take(&model->memory, "starts of windows", MEMORY_DEVICE,
                              settled_pass_tokens(s) * (size_t)s->ranks.grid.shape.context * sizeof(int));
    }
}

// Opens the gradients, if there are any, and what divides the model among ranks.
static void open_gradients(Model* model, const Settled* s) {
    const ModelConfig cfg = model->cfg;
    if (s->use == USE_TRAIN) {
        model->gradient_bytes = model->map.totals.elements[MAP_GRADIENTS] * dtype_bytes(model->grad_dtype);
        model->grads_memory = memory_take(&model->memory, "gradients", MEMORY_DEVICE, model->gradient_bytes);
        model->gradients = (ModelGradients*)memory_take(&model->memory, "scratch: pointers", MEMORY_HOST,
                                                        (size_t)cfg.L * sizeof(ModelGradients));
        tensor_parts_open(&model->parts, &model->memory, MEMORY_PINNED, &model->map);
    }
    const Gradient grads = {model->grads_memory, model->grad_dtype};
    zero_open(&model->zero, &model->memory, s->zero, &model->map,
              s->options.memory.offload_params ? ZERO_SHARDS_ON_HOST : ZERO_SHARDS_ON_GPU,
              update_micro_steps(s), model->params_memory, DTYPE_OF(floatX), grads, &model->groups,
              &model->gpu);
    for (int l = 0; l < cfg.L && model->gradients; l++) {
        model->gradients[l] = zero_bind_gradients(&model->zero, l);
    }
}

// Opens the optimizer's state and master weights, all zero: on the GPU or offloaded.
static void open_state(Model* model, const Settled* s) {
    const Options* o = &s->options;
    if (o->memory.offload_optimizer) {
        offload_open(&model->offload, &model->memory, &model->state,
                     o->memory.offload_optimizer == OFFLOAD_DISK ? o->memory.offload_path : NULL);
    } else {
        optimizer_state_take(&model->state, &model->memory);
    }
}

// Opens the activations. A run that trains uses the same memory for training, generation and saves,
// in turns.
static void open_activations(Model* model, const Settled* s) {
    const ModelConfig cfg = model->cfg;
    const int B = model->B, T = model->T, N = model->N, is_offloaded = s->options.memory.offload_residuals,
              generates = s->use == USE_GENERATE;
    const int residuals = cfg.L - (is_offloaded ? offload_residual_layers(cfg.L) : 0);
    const size_t least = transfer_scratch_least(s->ranks.grid),
                 bytes = model_activation_rows(model->activation_rows, cfg, B, N / B, model->recompute,
                                               residuals, model->freeze.first_block, (size_t)model->chunk),
                 trained = bytes > least ? bytes : least;
    if (is_offloaded) {
        offload_residuals_open(&model->residuals, &model->memory, cfg.L,
                               model_stream_rows(cfg, (size_t)N) * cfg.C * sizeof(floatX),
                               update_micro_steps(s));
    }
    model->activation_bytes =
        decoder_count_activations(&model->memory, cfg, s->decode_batch, T, generates ? 0 : trained);
    model->acts_memory =
        memory_allocate(&model->memory, "activations", MEMORY_DEVICE, model->activation_bytes);
    tensor_rows_bind(&model->acts, model->activation_rows, MODEL_ACTIVATION_ROWS,
                     generates ? NULL : model->acts_memory);
    model->stage = PipelineStage{cfg, model->freeze.first_block, model->activation_rows, model->acts_memory,
                                 pipeline_rest()};
    expert_traffic_open(&model->experts, &model->memory, cfg, model->activation_rows, generates);
}

// Returns the numbers of the statistics of routers, which the losses of sources follow, then the
// largest scores.
static size_t model_statistics(const Model* model) {
    return (size_t)model->cfg.L * (size_t)router_statistics(model->cfg.E);
}

// Opens the operations of training and evaluation, and room for batches and results.
static void open_operations(Model* model, const Settled* s) {
    const ModelConfig cfg = model->cfg;
    const size_t N = (size_t)model->N;
    const int ranks = s->ranks.grid.shape.context;
    const AttentionSizes sizes =
        attention_config_chunks(cfg, model->B, settled_rank_length(s), grid_chunks(&s->ranks.grid));
    const Stages lengths = settled_lengths(&s->options);
    const int64_t update = s->micro_batches,
                  validation = 256; // batches that the GPU may be behind the host
    Memory* memory = &model->memory;
    batch_queue_open(&model->batches, memory, N, ranks, &model->gpu);
    attention_gpu_open<floatX>(&model->attention, memory, sizes, (int)stages_first(&lengths) / ranks);
    attention_gpu_by(&model->attention, (AttentionInstructions)s->options.memory.attention);
    context_open(&model->context, memory, sizes, &model->groups.context);
    norm_open(&model->norm_scratch, memory, (int)N, model_widest_norm(cfg));
    embedding_open(&model->encoder, memory, (int)N, s->cfg.Vp, model_widest_embedding(cfg));
    optimizer_open<floatX>(&model->optimizer, memory, &model->state);
    const size_t* elements = model->map.totals.elements;
    gradient_norm_open(&model->norm, memory,
                       elements[elements[MAP_REDUCED] > 0 ? MAP_REDUCED : MAP_GRADIENTS]);
    model->sources = s->sources;
    model->scores = rank_report_all_scores(s);
    step_results_open(&model->results, memory, update > validation ? update : validation,
                      model_statistics(model) + (size_t)s->sources + model->scores, &model->gpu);
    model->is_top = (int*)memory_take(memory, "scratch: most likely targets", MEMORY_DEVICE, N * sizeof(int));
}

// Opens the matmuls, and counts the memory of libraries.
static void open_linear(Model* model, const Settled* s) {
    Memory* memory = &model->memory;
    memory_count(memory, "NCCL", MEMORY_DEVICE, memory_nccl_bytes(s));
    matmul_gpu_open(&model->matmul, memory, &model->gpu, gpu_setup_matmul(s));
    linear_gpu_open(&model->linear, memory, model->cfg, s->options.texts.quantize, &model->matmul,
                    &model->gpu);
    linear_gpu_open_adapter(&model->linear, memory, model->cfg, settled_pass_tokens(s), model->grad_dtype);
    if (s->options.memory.matmul == MATMUL_FP8) {
        const int keeps_weights =
            s->zero.stage < 3 && !s->options.memory.offload_params && update_micro_steps(s) > 1;
        linear_gpu_open_fp8(&model->linear, memory, model->cfg, settled_pass_tokens(s), keeps_weights);
    }
}

// Opens generation, and the copies of weights and state between host and GPU. A run that trains
// samples too little for a graph.
static void open_decoder(Model* model, const Settled* s) {
    decoder_open(&model->decoder, &model->memory, s->part, s->decode_batch, model->T, model->acts_memory,
                 model->use_graph && s->use == USE_GENERATE, &model->gpu);
    transfer_open(&model->transfer, model->parameter_rows, settled_has_blocks(s), &model->zero, &model->state,
                  &model->offload, &model->biases, model->acts_memory, model->activation_bytes);
}

// Opens updates after and during the backward pass.
static void open_update(Model* model, const Settled* s) {
    model->update =
        optimizer_update_open<floatX>(&model->optimizer, &model->zero, &model->matmul, s->options.data.seed);
    in_backward_gpu_open(&model->in_backward, &model->memory, &model->update, &model->norm, &model->results,
                         s->options.memory.update_in_backward);
    if (s->use == USE_TRAIN) {
        qk_clip_open(&model->clip, &model->memory, &model->map, s->options.optimizer.qk_clip);
    }
}

// Opens the parts that need a GPU and take no memory of it.
static void open_device(Model* model, const Options* o) {
    if (attention_note(&model->attention)[0]) {
        printf("attention: %s\n", attention_note(&model->attention));
    }
    forward_clock_open(&model->clock);
    if (o->memory.autotune) {
        matmul_gpu_open_plans(&model->matmul, model->comm);
    }
    gpu_report_open(&model->report, o->memory.device, o->memory.gpu_report != 0);
}

// Opens the frozen base of an adapter, on the stream and in the groups of the model: its
// parameters, in a ledger that is one kind of memory in the model's.
static void open_base(Model* model, const Settled* s) {
    const Settled of_base = setup_base(s);
    const MapOf map = settled_map(&of_base, ZERO_LAYERS_IN_MEMORY);
    const char* kind = of_base.options.texts.quantize ? "base in 8 bits" : "base";
    Model* base = (Model*)check_alloc(1, sizeof(Model), "the base of an adapter");
    base->gpu = model->gpu;
    base->groups = model->groups;
    base->cfg = of_base.part;
    base->use = of_base.use;
    base->memory = memory_of(model->memory.allocators);
    base->comm = model->comm;
    map_open(&base->map, &base->memory, MEMORY_HOST, &map, grid_rank(&of_base.ranks.grid));
    optimizer_state_open(&base->state, of_base.optimizer, &base->map);
    open_parameters(base, &of_base);
    open_gradients(base, &of_base);
    transfer_open(&base->transfer, base->parameter_rows, settled_has_blocks(&of_base), &base->zero,
                  &base->state, &base->offload, &base->biases, NULL, 0);
    memory_count_all(&model->memory, kind, MEMORY_DEVICE, &base->memory);
    memory_count_all(&model->memory, kind, MEMORY_HOST, &base->memory);
    model->base = base;
}

// Opens all parts of a model whose GPU and groups are open; from a dry ledger they need not be.
static void open_parts(Model* model, const Settled* s, Memory memory, Comm* comm) {
    const Options* o = &s->options;
    model->cfg = s->part;
    model->B = o->batch.size;
    model->T = o->batch.seq_len;
    model->N = model->B * settled_rank_length(s);
    model->use = s->use;
    model->z_loss = s->options.optimizer.z_loss;
    model->router_losses =
        RouterLosses{s->options.optimizer.router_balance, s->options.optimizer.router_z, 0};
    model->recompute = (RecomputeLevel)o->memory.recompute;
    model->freeze = settled_own_freeze(s);
    model->chunk = memory_chunk(s);
    model->autotune = o->memory.autotune;
    model->use_graph = gpu_setup_graph(s);
    model->grad_dtype = gpu_setup_gradients(s);
    model->memory = memory;
    model->comm = comm;
    const MapOf map = settled_map(s, ZERO_LAYERS_IN_MEMORY);
    map_open(&model->map, &model->memory, MEMORY_HOST, &map, grid_rank(&s->ranks.grid));
    optimizer_state_open(&model->state, s->optimizer, &model->map);
    if (model_has_adapter(s->cfg)) {
        open_base(model, s);
    }
    open_parameters(model, s);
    open_positions(model, s);
    open_gradients(model, s);
    if (!memory_is_dry(&memory)) {
        pipeline_open(&model->pipeline, &model->groups.pipe, &model->zero.main, &model->zero.comm);
    }
    if (s->use == USE_TRAIN) {
        open_state(model, s);
    }
    open_activations(model, s);
    if (s->use != USE_GENERATE) {
        open_operations(model, s);
    }
    open_linear(model, s);
    open_decoder(model, s);
    if (s->use != USE_GENERATE) {
        open_update(model, s);
    }
    if (s->use != USE_GENERATE && !memory_is_dry(&memory)) {
        open_device(model, o);
    }
    if (model->base) {
        model->base->results = model->results; // for its checksum
    }
}

// Opens the teacher, on the stream and in the groups of the model, whose ledger has the teacher's
// as one kind.
static void open_teacher(Model* model, const Settled* s) {
    const Settled of_teacher = setup_teacher(s);
    Model* teacher = (Model*)check_alloc(1, sizeof(Model), "the teacher");
    teacher->gpu = model->gpu;
    teacher->groups = model->groups;
    teacher->groups.experts = group_gpu_alone(model->comm); // it has all experts
    open_parts(teacher, &of_teacher, memory_of(model->memory.allocators), model->comm);
    memory_count_all(&model->memory, "teacher", MEMORY_DEVICE, &teacher->memory);
    memory_count_all(&model->memory, "teacher", MEMORY_HOST, &teacher->memory);
    if (memory_is_dry(&model->memory)) {
        free(teacher);
    } else {
        model->teacher = teacher;
    }
}

// Opens the model with all parameters zero. After this only the first save and the timing of
// algorithms allocate memory. From a dry ledger it allocates nothing, but tells what the model
// would take: then it needs neither a GPU nor `comm`. Returns the ledger.
static const Memory* model_open(Model* model, const Settled* s, Memory memory, Comm* comm) {
    memset((void*)model, 0, sizeof(*model));
    if (!memory_is_dry(&memory)) {
        gpu_open(&model->gpu, s->options.memory.device);
    }
    grid_groups_gpu_take(&model->groups, s->ranks.grid, &s->zero, comm);
    gpu_setup_check_order(s, &model->groups.all);
    open_parts(model, s, memory, comm);
    if (settled_has_teacher(s)) {
        teaching_open(&model->teaching, &model->memory, settled_distill(s), model->cfg, (size_t)model->N,
                      (size_t)model->chunk);
        open_teacher(model, s);
    }
    return &model->memory;
}

// Closes all parts but the GPU and the groups.
static void close_parts(Model* model) {
    // test_ranks.sh: one process gathers nothing
    zero_wait_for_parameters(&model->zero);
    gpu_wait(&model->gpu); // cudaFree waits, too, but undocumented
    if (model->use != USE_GENERATE) {
        for (int variant = 0; variant < ZERO_VARIANTS; variant++) {
            step_graph_close(&model->graphs[variant]);
        }
        in_backward_gpu_close(&model->in_backward);
        forward_clock_close(&model->clock);
        gpu_report_close(&model->report);
        attention_gpu_close(&model->attention);
        batch_queue_close(&model->batches);
        offload_residuals_close(&model->residuals);
        offload_close(&model->offload);
    }
    decoder_close(&model->decoder);
    matmul_gpu_close(&model->matmul);
    expert_traffic_close(&model->experts);
    pipeline_close(&model->pipeline);
    zero_close(&model->zero);
    memory_close(&model->memory);
}

static void model_close(Model* model) {
    if (model->base) {
        gpu_wait(&model->gpu);
        zero_close(&model->base->zero);
        memory_close(&model->base->memory);
        free(model->base);
    }
    if (model->teacher) {
        close_parts(model->teacher);
        free(model->teacher);
    }
    close_parts(model);
    grid_groups_gpu_close(&model->groups);
    gpu_close(&model->gpu);
}

// -------------------------------------------------------------------------------------------------
// Forward

// Sends a batch to the GPU, unless it is empty: the result points to memory there, valid until the
// next one.
static Batch model_push(Model* model, Batch batch) {
    if (batch.B == 0) {
        return batch;
    }
    const float targets_per_token = batch_targets_per_token(&batch);
    const DropoutBatch random = pass_random(batch);
    static_assert(sizeof(random) == BATCH_RANDOM * sizeof(int), "its room in the queue");
    batch_queue_push(&model->batches,
                     BatchArrays{batch.inputs, batch.targets, batch.starts, batch.lengths, batch.sources,
                                 &targets_per_token, batch.random ? &random : NULL},
                     (size_t)batch.B * batch.T, (size_t)batch.B);
    const BatchArrays* pushed = &model->batches.batch;
    batch.inputs = pushed->tokens;
    batch.targets = pushed->targets;
    batch.starts = pushed->starts;
    batch.lengths = pushed->lengths;
    batch.sources = pushed->sources;
    return batch;
}

// Returns the residual stream that enters block l, (R, C).
static floatX* stream_into(const Model* model, int l, const Pass* pass) {
    return model_stream_into(pass->acts, pass->activation_rows, model->freeze.first_block, l);
}

// Returns a pass in the tensor group. With a cache the stream is not cut.
static TensorParallelGpu tensor_of(Model* model, const Pass* pass) {
    const GroupGpu* group = &model->groups.tensor;
    const ModelActivations* a = pass->acts;
    const TensorCut cut = {group->rank, group->size, pass_tokens(pass), model->cfg.C, !pass->cached};
    return TensorParallelGpu{cut, group, a->gathered, a->parts, a->arrived, &model->gpu};
}

// Returns the bytes of a tensor of the residual stream in a pass.
static size_t stream_bytes(Model* model, const Pass* pass) {
    return (size_t)tensor_rows(tensor_of(model, pass).cut).count * model->cfg.C * sizeof(floatX);
}

// Returns layer l in a pass; each layer also has the parameters outside of the blocks.
static LayerPassGpu layer_at(Model* model, int l, const Pass* pass) {
    const ModelParameters p = model->layers[l];
    const ModelActivations a = model_activations_at_layer(*pass->acts, pass->activation_rows, l);
    LayerWeights w = linear_weights(model->cfg, &p, l);
    linear_bind_codes(&w, &model->linear, model_copy(model->cfg, l));
    return LayerPassGpu{model->cfg, l, pass, p, a, w, tensor_of(model, pass), &model->linear};
}

// Fetches the residual stream that the block after the next one needs, after the backward pass has
// used the one into block l: into the same memory.
static void fetch_residual(Model* model, int l, const Pass* pass) {
    if (l > OFFLOAD_RESIDUALS) {
        offload_residual_in(&model->residuals, l - 1 - OFFLOAD_RESIDUALS,
                            stream_into(model, l - OFFLOAD_RESIDUALS, pass), stream_bytes(model, pass),
                            &model->gpu);
    }
}

// A block in a pass: R rows of the residual stream, and the layers, which see all N tokens.
typedef struct {
    Model* model;
    const Pass* pass;
    int l;
    ModelActivations a;
    LayerWeights weights;
    StreamGpu stream;           // of the block before it, with scales if the model has them
    BranchGpu branch1, branch2; // attention and the MLP, from the residual stream and back
    SelfAttentionGpu attention; // or, in layers of a hybrid, a mixer
    MixerGpu mixer;
    MlpGpu mlp;
} Block;

// Returns block l in a pass; `d`: gradients of its parameters, which a backward pass sets or adds
// to as `mode` says, or NULL.
static Block block_at(Model* model, int l, const Pass* pass, const ModelGradients* d, GradientMode mode) {
    LayerPassGpu layer = layer_at(model, l, pass);
    const StreamGpu stream = stream_of(&layer, stream_into(model, l, pass));
    if (d) {
        linear_adapter_gradients(&layer.weights, d, mode);
    }
    return Block{model,
                 pass,
                 l,
                 layer.a,
                 layer.weights,
                 stream,
                 branch_of_attention(&layer, stream.out),
                 branch_of_mlp(&layer, stream_into(model, l + 1, pass)),
                 self_attention_of(&layer, model->window_starts, &model->ropes, &model->attention,
                                   &model->context, model->wanted_scores),
                 mixer_of(&layer, &model->mixer),
                 mlp_of(&layer, &model->groups.experts, &model->experts,
                        router_biases_at(&model->biases, model->cfg, l))};
}

// Runs the block up to the hidden layer of the MLP.
static void block_hidden(const Block* b) {
    const BranchGpu *branch1 = &b->branch1, *branch2 = &b->branch2;
    const int N = pass_tokens(b->pass), is_mixed = b->mixer.kind != MIXER_NONE;
    // ln1 (R, C); residual2 (R, C) = stream + attention; ln2 (R, C); fch, fch_act (N, F)
    stream_enter(&b->stream);
    branch_enter(branch1, is_mixed ? &b->weights.mix : &b->weights.qkv, N);
    if (is_mixed) {
        mixer_forward_residual(branch_to(branch1), branch_residual(branch1), &b->mixer, branch1->in);
    } else {
        self_attention_forward_residual(branch_to(branch1), branch_residual(branch1), &b->attention,
                                        branch1->in);
    }
    branch_leave(branch1);
    branch_enter(branch2, &b->weights.fc, N);
    mlp_hidden(&b->mlp, branch2->in);
}

static void block_forward(Block* b) {
    Model* model = b->model;
    linear_renew(&b->weights, &model->linear);
    block_hidden(b);
    offload_residual_wait(&model->residuals, b->l - OFFLOAD_RESIDUALS, &model->gpu); // its memory
    mlp_forward_residual(branch_to(&b->branch2), branch_residual(&b->branch2), &b->mlp);
    branch_leave(&b->branch2); // the stream after the block (R, C) = residual2 + MLP of ln2
    if (!b->pass->cached) {    // to the host, if it is offloaded
        offload_residual_out(&model->residuals, b->l, b->branch2.sum, stream_bytes(model, b->pass),
                             &model->gpu);
    }
}

// Runs this stage of the model: in the last one up to the last hidden state, lnf (R, C). In other
// stages than the first, encoded has the residual stream that enters. The inputs are on the GPU. A
// pass may have no tokens: it takes its part in what ranks compute together.
static void forward_pass(Model* model, const Pass* pass) {
    const ModelConfig cfg = model->cfg;
    // Only the matmuls of full micro-batches are worth timing. Decoding has the same bits in each
    // run.
    model->matmul.settings.autotune = model->autotune && !pass->cached && pass_tokens(pass) == model->N;
    zero_begin_forward(&model->zero);
    pass_window_starts(model->window_starts, pass, pass->cached ? cfg.window : model->window, &model->gpu);
    if (model_has_first(cfg)) {
        const LayerPassGpu first = layer_at(model, 0, pass);
        linear_embedding(&first);
    }
    for (int l = 0; l < cfg.L; l++) {
        zero_parameters(&model->zero, model_copy(cfg, l), 1);
        Block block = block_at(model, l, pass, NULL, GRADIENT_SET);
        block_forward(&block);
    }
    if (model_has_last(cfg)) {
        const LayerPassGpu last = layer_at(model, cfg.L - 1, pass);
        const NormGpu<floatX> norm = layer_last_norm(&last);
        norm_forward(pass->acts->lnf, (const floatX*)stream_into(model, cfg.L, pass), &norm, &model->gpu);
    }
}

// Returns the pass over a batch of model_push.
static Pass batch_pass(const Model* model, Batch batch) {
    assert(batch.B * batch.T <= model->N && batch_length(batch) <= model->T);
    const BatchArrays* pushed = &model->batches.batch;
    return pass_of_batch(batch, &model->acts, model->activation_rows, pushed->targets_per_token,
                         (const DropoutBatch*)pushed->random);
}

static void model_forward(Model* model, Batch batch) {
    const Pass pass = batch_pass(model, batch);
    forward_pass(model, &pass);
}

// Returns the head of the model, after forward_pass. Collective.
static LmHeadGpu lm_head(Model* model, const Pass* pass) {
    const LayerPassGpu last = layer_at(model, model->cfg.L - 1, pass);
    return lm_head_of(&last, model->chunk, model->z_loss);
}

// Sets the losses (N), without gradients; and is_top (N), unless NULL: whether each target was the
// most likely token.
static void model_losses(Model* model, Batch batch, int* is_top) {
    const Pass pass = batch_pass(model, batch);
    const LmHeadGpu head = lm_head(model, &pass);
    lm_head_losses(model->acts.losses, is_top, &head);
}

// Runs the teacher, if any, on the batch of a micro-step.
static void teacher_forward(Model* model, Batch batch) {
    if (model->teacher) {
        const Pass pass = batch_pass(model->teacher, batch);
        forward_pass(model->teacher, &pass);
        model->teaching.teacher = lm_head(model->teacher, &pass);
    }
}

// Appends the sum of the losses of a batch to the results, on the GPU.
static void batch_loss(Model* model, Batch batch) {
    StepResult* result = model->results.on_gpu;
    sum_losses(result->losses, &result->count, model->acts.losses, batch.B * batch.T, &model->gpu);
}

// -------------------------------------------------------------------------------------------------
// Backward

// Before the first kernel that writes to the gradients of block l.
static void wait_for_buffer(Model* model, int l) {
    update_pending_group(&model->in_backward);
    zero_wait_for_buffer(&model->zero, model_copy(model->cfg, l));
}

// Computes again what the forward pass did not keep of the block: the same operations on the same
// inputs give the same bits.
static void block_recompute(const Block* b, RecomputeLevel level) {
    if (level == RECOMPUTE_BLOCK) {
        block_hidden(b);
        if (branch_keeps_out(&b->branch2)) {
            mlp_forward_residual(b->branch2.out, NULL, &b->mlp);
        }
        return;
    }
    stream_enter(&b->stream);
    if (level >= RECOMPUTE_NORMS) {
        branch_enter_again(&b->branch1);
        branch_enter_again(&b->branch2);
    }
    if (level == RECOMPUTE_MLP) {
        mlp_hidden(&b->mlp, b->branch2.in);
    } else if (level >= RECOMPUTE_ACTIVATION) {
        mlp_activation(&b->mlp);
    }
}

// Returns the gradient of the bias of the projection into the stream that enters block l: column
// sums of the stream's gradient; none for the first block of this stage, and with dropout: then the
// sums are the branch's own. Experts have theirs in mlp.cuh.
static Gradient bias_grad_into(const Model* model, int l) {
    Gradient bias = model->gradients[l > 0 ? l - 1 : 0].fcprojb;
    bias.data = l > 0 && model->cfg.E == 0 && model->cfg.dropout == 0 ? bias.data : NULL;
    return bias;
}

// Returns room for the codes of dresidual, the gradient of the stream after block l, which the MLP
// of that block reads next: unless matmuls are computed again before, scales change it, or the pass
// ends here.
static E4m3Rows stream_codes(Model* model, int l, const Pass* pass) {
    const int is_scaled = model->cfg.has_scales && l < model->cfg.L - 1,
              is_next = l >= model->freeze.first_block && model->recompute <= RECOMPUTE_NORMS && !is_scaled;
    const E4m3Rows none = {NULL, NULL};
    if (!is_next) {
        return none;
    }
    const Block b = block_at(model, l, pass, NULL, GRADIENT_SET);
    return branch_is_plain(&b.branch2) ? linear_codes_below(b.a.dresidual, b.branch2.before.N, &b.mlp.proj,
                                                            pass_tokens(pass), &model->linear)
                                       : none;
}

// Sets branch (R, C), the gradient of the input of attention or the mixer, given that of its
// output, and the gradients of its parameters.
static void branch1_backward(const Block* b, const ModelGradients* d, GradientMode mode, const floatX* dout) {
    if (b->mixer.kind != MIXER_NONE) {
        mixer_backward(&b->mixer, d, mode, dout, b->branch1.in);
    } else {
        const SelfAttentionGradientsGpu dattention =
            self_attention_gradients_of(d, &b->a, mode, &b->model->norm_scratch, &b->model->encoder);
        self_attention_backward(&b->attention, &dattention, dout, b->branch1.in);
    }
}

// Turns dresidual (R, C), the gradient of the residual stream after block l, into that before it,
// in place. branch (R, C) has the gradient of ln2, then of ln1; dfch (N, F), dqkv (N, QKV).
static void block_backward(Model* model, int l, const Pass* pass, GradientMode mode) {
    const ModelGradients d = model->gradients[l];
    const GradientMode own = share_gradient_mode(model->cfg, l, mode),
                       below = l > 0 ? share_gradient_mode(model->cfg, l - 1, mode) : own;
    const Block b = block_at(model, l, pass, &d, own);
    const ModelActivations a = b.a;
    const MlpGradientsGpu dmlp =
        mlp_gradients_of(&d, &a, own, zero_neighbor_elements(&model->map, l), model->router_losses,
                         router_statistics_of(model->results.statistics, l, model->cfg.E));
    // dresidual, and its column sums (C): gradients of attprojb, and of fcprojb of the block before
    const int drops = model->cfg.dropout > 0;
    const BranchGradientsGpu d2 = {{d.ln2w, d.ln2b, own, branch_bias_if(!drops, d.attprojb), own, {}},
                                   d.ln2postw,
                                   branch_bias_if(drops && model->cfg.E == 0, d.fcprojb),
                                   own,
                                   a.dbranch,
                                   a.branch,
                                   &model->norm_scratch};
    BranchGradientsGpu d1 = {{d.ln1w, d.ln1b, own, bias_grad_into(model, l), below, {}},
                             d.ln1postw,
                             branch_bias_if(drops, d.attprojb),
                             own,
                             a.dbranch,
                             a.branch,
                             &model->norm_scratch};
    block_recompute(&b, model->recompute);
    zero_clear_unset(&model->zero, l);
    mlp_backward(&b.mlp, &dmlp, branch_leave_backward(&b.branch2, &d2, a.dresidual), b.branch2.in);
    branch_enter_backward(a.dresidual, &b.branch2, &d2, a.branch);
    branch1_backward(&b, &d, own, branch_leave_backward(&b.branch1, &d1, a.dresidual));
    if (l > 0) {
        wait_for_buffer(model, l - 1);
    }
    d1.before.codes = stream_codes(model, l - 1, pass);
    branch_enter_backward(a.dresidual, &b.branch1, &d1, a.branch);
    stream_enter_backward(&b.stream, d.scales, &a, l == model->cfg.L - 1, own);
}

// Sets or adds to the gradients of the embeddings, from dresidual (R, C), that of encoded.
static void embeddings_backward(Model* model, const Pass* pass, GradientMode mode) {
    const ModelConfig cfg = model->cfg;
    const TensorParallelGpu tensor = tensor_of(model, pass);
    const ModelActivations* a = pass->acts;
    const ModelGradients d = model->gradients[0];
    const Gradient apart = zero_embedding_gradient(&model->zero); // without data: joined
    const EmbeddingSizes sizes = {
        pass->B, pass->T, cfg.C, cfg.Vp, cfg.max_T, pass->positions.chunks, tensor.cut.rank * cfg.Vp};
    const int is_trained = d.wte.data || apart.data;
    if (is_trained || d.wpe.data) {
        const LayerPassGpu first = layer_at(model, 0, pass);
        stream_leave_backward(a, (size_t)tensor_rows(tensor.cut).count * cfg.C, &model->gpu);
        linear_embedding_backward(a->dresidual, &first);
    }
    const floatX* dencoded = tensor_gather(&tensor, 0, a->dresidual); // (N, C)
    // value embeddings needed them in order before
    if (is_trained && !cfg.has_values) {
        embedding_sort(&model->encoder, pass->inputs, pass_tokens(pass), &model->gpu);
    }
    // without a matrix of its own, the head has set or added to d.wte
    embedding_backward(apart.data ? apart : d.wte, d.wpe, dencoded, pass->inputs, sizes,
                       cfg.has_head || apart.data ? mode : GRADIENT_ADD, mode, &model->encoder, &model->gpu);
}

// Called when the gradient of group g is complete: reduces it over the ranks, or updates the group
// if the hook does so.
static void group_done(Model* model, int g, MicroStep step, InBackward* hook) {
    zero_group_done<floatX>(&model->zero, g, step);
    update_group_in_backward(&model->in_backward, g, hook);
}

// Sets the losses and dresidual (R, C), the gradient of the residual stream after the last block,
// and sets or adds to the gradients of the classifier.
static void head_backward(Model* model, const Pass* pass, float dloss, GradientMode mode) {
    const ModelConfig cfg = model->cfg;
    const ModelActivations* a = pass->acts;
    const ModelGradients d = model->gradients[0];
    const LayerPassGpu last = layer_at(model, cfg.L - 1, pass);
    const LmHeadGpu head = lm_head(model, pass);
    const Gradient dweight = cfg.has_head ? d.head : d.wte;
    const NormGpu<floatX> norm = layer_last_norm(&last);
    const NormGradients dnorm = {
        d.lnfw, d.lnfb, mode, bias_grad_into(model, cfg.L), mode, stream_codes(model, cfg.L - 1, pass)};
    floatX* dlnf = a->branch; // (R, C)
    if (model->teacher) {
        teaching_gradients(a->losses, dlnf, dweight, &model->teaching, head, dloss, mode);
    } else {
        lm_head_gradients(a->losses, dlnf, dweight, &head, dloss, mode);
    }
    norm_backward(a->dresidual, GRADIENT_SET, &dnorm, (const floatX*)dlnf,
                  (const floatX*)stream_into(model, cfg.L, pass), &norm, &model->norm_scratch, &model->gpu);
}

// Sets or adds to the gradient of the bias that is added last to the stream that leaves a stage,
// from dresidual (R, C).
static void last_bias_backward(Model* model, const Pass* pass, GradientMode mode) {
    const ModelConfig cfg = model->cfg;
    norm_dinp_sum(bias_grad_into(model, cfg.L), share_gradient_mode(cfg, cfg.L - 1, mode),
                  (const floatX*)pass->acts->dresidual, tensor_rows(tensor_of(model, pass).cut).count, cfg.C,
                  &model->norm_scratch, &model->gpu);
}

// After model_forward on the same batch: sets the losses and sets or adds to all gradients, as
// `mode` says. dloss is the gradient of the loss of each token. The gradients of a block are
// reduced, or its parameters are updated, as soon as they are there; those of group 0 are left to
// the caller. The pass ends where everything below is frozen. Appends the sum of the losses to the
// results. In other stages than the last, dresidual has the gradient of the stream that leaves.
static void model_backward(Model* model, Batch batch, float dloss, GradientMode mode, MicroStep step,
                           InBackward* hook) {
    const ModelConfig cfg = model->cfg;
    const Pass pass = batch_pass(model, batch);
    model->router_losses.dloss = dloss;
    pass_window_starts(model->window_starts, &pass, model->window, &model->gpu);
    zero_wait_for_buffer(&model->zero, -1);
    if (cfg.has_values) {
        embedding_sort(&model->encoder, pass.inputs, pass_tokens(&pass), &model->gpu);
    }
    if (model_has_last(cfg)) {
        head_backward(model, &pass, dloss, mode);
        batch_loss(model, batch);
        if (batch.sources && batch.B > 0) { // of a mixture
            sum_source_losses(model->results.statistics + model_statistics(model), model->sources,
                              model->acts.losses, batch.sources, batch.B, batch.T, &model->gpu);
        }
        teaching_add(&model->results.on_gpu->divergence, &model->teaching, batch.B * batch.T);
    } else {
        last_bias_backward(model, &pass, mode);
    }
    fetch_residual(model, cfg.L, &pass);
    for (int l = cfg.L - 1; l >= model->freeze.first_block; l--) {
        zero_parameters(&model->zero, model_copy(cfg, l), -1);
        offload_residual_wait(&model->residuals, l - 1, &model->gpu);
        block_backward(model, l, &pass, mode);
        fetch_residual(model, l, &pass);
        const int g = model_group(cfg, l);
        if (model_group_layer(cfg, g) == l) { // no layer below adds to these gradients
            group_done(model, g, step, hook);
        }
    }
    if (model_has_first(cfg)) {
        embeddings_backward(model, &pass, mode);
    }
}

// -------------------------------------------------------------------------------------------------
// Stages

// Starts this stage's next action, on a batch: sends what the last one has made, and receives what
// this one needs.
static void stage_begin(Model* model, PipelineAction next, Batch batch) {
    const Pass pass = batch_pass(model, batch);
    next.tokens = tensor_rows(tensor_of(model, &pass).cut).count;
    stage_enter(&model->stage, &model->pipeline, &model->acts, next);
}

static void stage_end(Model* model) { stage_leave(&model->stage, &model->pipeline, &model->acts); }

// -------------------------------------------------------------------------------------------------
// Micro-steps

// Starts a micro-step with its forward pass.
static void micro_step_begin(Model* model, Batch batch, MicroStep step) {
    zero_begin(&model->zero, step);
    model->linear.renews = step.number == 0;
    forward_clock_begin(&model->clock, &model->gpu);
    model->wanted_scores =
        model->scores > 0 ? model->results.statistics + model_statistics(model) + model->sources : NULL;
    model_forward(model, batch);
    model->wanted_scores = NULL; // of training alone
    teacher_forward(model, batch);
    forward_clock_end(&model->clock, &model->gpu);
}

// Forward on the batch of a micro-step. Without stages micro_step_backward does it: the two passes
// can be one graph. A pass that waits for no other rank is timed: it tells how fast this one is.
static void micro_step_forward(Model* model, Batch batch, MicroStep step) {
    const int waits = model->comm->size == 1 || grid_forward_waits(&model->groups.grid) ||
                      zero_forward_waits(&model->zero, step);
    forward_clock_next(&model->clock, waits ? 0 : batch.B * batch.T);
    if (model_is_stage(model->cfg)) {
        micro_step_begin(model, batch, step);
    }
}

// Backward on the batch of a micro-step. Appends the loss to the results. Micro-steps of one
// variant, with full micro-batches in all ranks (is_full), repeat as a graph, up to the gradient of
// group 0.
static void micro_step_backward(Model* model, Batch batch, float dloss, MicroStep step, InBackward* hook,
                                int is_full) {
    StepGraph* graph = &model->graphs[zero_variant(&model->zero.plan, step)];
    const int adds = step.number > 0 && model->zero.plan.stage < 2;
    const auto work = [&] {
        if (!model_is_stage(model->cfg)) {
            micro_step_begin(model, batch, step);
        }
        model_backward(model, batch, dloss, adds ? GRADIENT_ADD : GRADIENT_SET, step, hook);
        zero_join(&model->zero, step);
    };
    if (step_graph_run(graph, model->use_graph && is_full, batch.T, model->window, batch.starts, dloss, work,
                       &model->gpu)) {
        zero_replayed(&model->zero);
    }
    zero_group_done<floatX>(&model->zero, model_groups(model->cfg), step); // an embedding's apart
    group_done(model, 0, step, hook);
}

// Chooses the algorithms of all matmuls of a full micro-batch, with any tokens, and of an update.
// All ranks choose together: later some have no full micro-batch, or none at all, when others have
// one.
static void choose_matmuls(Model* model) {
    const int N = model->N, ranks = model->groups.grid.shape.data;
    // the second micro-step adds to the gradients
    const int count = model->zero.plan.stage < 2 ? 2 : 1;
    if (!model->autotune || model->use == USE_GENERATE || model->comm->size == 1 ||
        model->matmul.has_chosen) {
        return;
    }
    int* tokens = (int*)check_alloc((size_t)N, sizeof(int), "tokens");
    for (int i = 0; i < N; i++) {
        tokens[i] = i % model->cfg.V;
    }
    Batch batch = {};
    batch.inputs = batch.targets = tokens;
    batch.B = model->B;
    batch.T = N / model->B;
    batch.chunks = grid_chunks(&model->groups.grid);
    batch.counted = N;
    batch.pieces = 1;
    batch.random = 1; // dropout, if the run has any
    MicroSteps steps = zero_micro_steps(&model->zero.plan, (int64_t)count * ranks * model->B, model->B);
    linear_trains(&model->linear);
    for (MicroStep step; micro_steps_next(&steps, &step);) {
        step_results_clear(&model->results);
        micro_step_backward(model, model_push(model, batch), 1.0f / (float)N, step, NULL, 0);
    }
    linear_trained(&model->linear);
    optimizer_choose_matmuls<floatX>(&model->optimizer, &model->matmul);
    zero_wait_for_gradient(&model->zero); // redundant: the first update waits by itself
    gpu_wait(&model->gpu);
    model->matmul.has_chosen = 1;
    free(tokens);
}

// Completes the gradient of a step, and sets the square sum of this rank's part of it in the
// results, on the GPU.
static void model_square_sum(Model* model) {
    zero_wait_for_gradient(&model->zero);
    tensor_parts_sum<floatX>(&model->parts, &model->zero, &model->groups.tensor, &model->gpu);
    zero_square_sum<floatX>(&model->results.on_gpu->square_sum, &model->zero, &model->norm);
}

// Ends the gradient of an update in which this rank had `batches`: sets its losses and its square
// sum, the statistics of its routers, the losses of sources, and the time for a token.
static void gradients_end(Model* model, InBackward* hook, int64_t batches, RankReport* report) {
    double *losses = rank_report_losses(report), *all = rank_report_statistics(report);
    const double* from = model->results.statistics_on_host;
    const size_t routers = model_statistics(model);
    if (hook) {
        in_backward_gpu_end(&model->in_backward);
        losses[0] = hook->losses;
        report->square_sum = hook->square_sum;
        report->divergence = model->results.on_host->divergence;
    } else {
        model_square_sum(model);
        const StepResult* result =
            step_results_read(&model->results, batches); // waits for the GPU, once a step
        memcpy(losses, result->losses, (size_t)batches * sizeof(double));
        report->square_sum = result->square_sum;
        report->divergence = result->divergence;
    }
    if (routers > 0) {
        memcpy(router_statistics_of(all, model->cfg.part.first_layer, model->cfg.E), from,
               routers * sizeof(double));
    }
    if (report->sources > 0) {
        memcpy(rank_report_sources(report), from + routers, report->sources * sizeof(double));
    }
    if (report->scores > 0) {
        memcpy(rank_report_scores(report), from + routers + report->sources, report->scores * sizeof(double));
    }
    report->pace_s = forward_clock_pace_s(&model->clock);
    matmul_gpu_keep_cache(&model->matmul);
    grid_groups_gpu_check(&model->groups);
}

// Moves the biases of this process's routers, unless they are frozen, given the statistics of all
// routers of the model; NULL: not at all. All processes that have a bias move it alike.
static void model_move_biases(Model* model, const double* statistics, Update update) {
    if (statistics) {
        router_biases_move(&model->biases, model->cfg, &model->freeze, statistics, update, &model->gpu);
    }
}

// Clips the heads of this process whose scores in the update were above the limit, given the
// largest scores of all heads of the model; NULL: none. All processes that have a weight clip it
// alike.
static void model_clip_heads(Model* model, const double* scores, Update update) {
    if (scores) {
        qk_clip(&model->clip, model->update, update, scores, &model->gpu);
    }
}

// Computes the gradient of an update, one micro-batch after another. Sets the losses of the report,
// one for each micro-step, its square sum, work and pace. With --update-in-backward it also makes
// the update.
static void model_gradients(Model* model, Run* run) {
    InBackward* hook = run_hook(run);
    Batch batch = {}; // on the GPU
    int64_t batches = 0;
    model->clock.tokens = 0;
    step_results_clear(&model->results);
    linear_trains(&model->linear);
    for (const RunTurn* turn; (turn = run_turn(run, hook)) != NULL;) {
        batch = turn->is_other ? model_push(model, turn->batch) : batch;
        stage_begin(model, turn->now, batch);
        if (turn->now.pass == PIPELINE_FORWARD) {
            micro_step_forward(model, batch, turn->step);
        } else {
            micro_step_backward(model, batch, turn->dloss, turn->step, hook, run->train->is_full);
            batches += model_has_last(model->cfg);
        }
    }
    stage_end(model);
    linear_trained(&model->linear);
    stage_join_embedding<floatX>(&model->zero, &model->pipeline);
    gpu_report_sense(&model->report);
    gradients_end(model, hook, batches, run->report);
}

// -------------------------------------------------------------------------------------------------
// Update

static void model_update(Model* model, Update update) {
    update_groups(model->update, update, &model->offload, &model->gpu);
    stage_share_embedding(model->layers[0].wte, &model->zero, &model->pipeline);
}

// Sets the parameters to the average of the weights, and sets the weights again.
static void model_show_average(Model* model) {
    update_groups_show_average(model->update, &model->offload, &model->gpu);
    stage_share_embedding(model->layers[0].wte, &model->zero, &model->pipeline);
}

static void model_hide_average(Model* model) {
    update_groups_hide_average(model->update, &model->gpu);
    stage_share_embedding(model->layers[0].wte, &model->zero, &model->pipeline);
}

// -------------------------------------------------------------------------------------------------
// Evaluate and decode

// Forward on a batch of a validation, which may be empty: sets the sum of its losses, in the last
// stage, once step_results_collect has returned. A single process lets the GPU run ahead until the
// results have no more room. Several exchange a message before each batch, and wait: that message
// is MPI's. For an empty batch a process does only its part of what others do.
static void evaluate_batch(Model* model, Batch batch, double* loss) {
    const Batch pushed = model_push(model, batch);
    model_forward(model, pushed);
    if (batch.B > 0 && model_has_last(model->cfg)) {
        model_losses(model, pushed, NULL);
        batch_loss(model, pushed);
        step_results_expect(&model->results);
    }
    if (model->comm->size > 1 || step_results_are_full(&model->results)) {
        step_results_collect(&model->results, loss + 1);
        gpu_wait(&model->gpu);
    }
}

// Forward on all batches of a validation: sets the losses of the report.
static void model_evaluate(Model* model, Run* run) {
    const PipelineAction forward = {PIPELINE_FORWARD, 0, 0};
    Batch batch;
    int64_t i = 0;
    step_results_clear(&model->results); // also after a validation that a signal has stopped
    for (; run_validation_batch(run, i, &batch); i++) {
        stage_begin(model, forward, batch);
        evaluate_batch(model, batch, rank_report_losses(run->report) + (i - model->groups.pipe.rank));
    }
    model->stage.last = pipeline_rest(); // of the last one, which all stages have left
    step_results_collect(&model->results, rank_report_losses(run->report) + i);
}

// Forward, for tasks: sets the loss of each token of whole sequences; positions count from the
// start of each document.
static void model_token_losses(Model* model, Batch batch, float* losses, int* is_top) {
    const AttentionSizes sizes = attention_config_chunks(model->cfg, batch.B, batch.T, batch.chunks);
    const PipelineAction forward = {PIPELINE_FORWARD, 0, 0};
    const Batch pushed = model_push(model, batch);
    Pass pass = batch_pass(model, pushed);
    pass.positions.starts = pushed.starts;
    stage_begin(model, forward, batch);
    forward_pass(model, &pass);
    if (model_has_last(model->cfg)) {
        model_losses(model, pushed, is_top ? model->is_top : NULL);
        context_gather_tokens(losses, &model->context, model->acts.losses, sizes, &model->gpu);
    }
    if (is_top && model_has_last(model->cfg)) {
        context_gather_tokens(is_top, &model->context, model->is_top, sizes, &model->gpu);
    }
    stage_end(model);
    gpu_wait(&model->gpu); // before a message: it keeps the others' wait for it short (--timeout)
}

// Runs a pass of decoding; returns the logits (count, Vp) that follow its last `count` rows.
static const floatX* decode_forward(Model* model, const Pass* pass, int count) {
    const PipelineAction now = {PIPELINE_FORWARD, 0, pass_tokens(pass)};
    const PipelineStream stream = {stream_into(model, model->cfg.L, pass), NULL, pass->acts->encoded, NULL,
                                   (size_t)model->cfg.C * sizeof(floatX)};
    const PipelineGpu* pipeline = &model->pipeline;
    const int words = model->cfg.Vp * model_tensor_ranks(model->cfg);
    floatX* logits = model_is_cut(model->cfg) ? pass->acts->all_logits : pass->acts->logits;
    pipeline_exchange(pipeline, pipeline_rest(), now, stream);
    forward_pass(model, pass);
    pipeline_exchange(pipeline, now, pipeline_rest(), stream);
    if (model_has_last(model->cfg)) {
        const LmHeadGpu head = lm_head(model, pass);
        logits = (floatX*)lm_head_all_logits(&head, head.N - count, count);
    }
    pipeline_tell(pipeline, logits, (size_t)count * words * sizeof(floatX));
    return logits;
}

// Reads the first tokens of a sequence; see generator.h.
static const float* model_prefill(Model* model, int sequence, const int* ids, int count) {
    const auto forward = [&](const Pass* pass, int last) { return decode_forward(model, pass, last); };
    return decoder_prefill(&model->decoder, sequence, ids, count, forward);
}

static const float* model_decode(Model* model, const int* ids, const int* positions, int sequences) {
    const auto forward = [&](const Pass* pass, int last) { return decode_forward(model, pass, last); };
    return decoder_step(&model->decoder, ids, positions, sequences, forward);
}

// -------------------------------------------------------------------------------------------------
// Tensors in and out: ModelAccess (load_save.h)

static void* model_get_group(Model* model, int g, void* group) {
    transfer_download_group(&model->transfer, g, group);
    return group;
}

static void model_set_group(Model* model, int g, const float* group) {
    transfer_upload_group(&model->transfer, g, group);
}

static void* model_get_state(Model* model, int slot, size_t at, void* state, size_t bytes) {
    transfer_download_state(&model->transfer, slot, at, state, bytes);
    return state;
}

static void model_set_state(Model* model, int slot, size_t at, const void* state, size_t bytes) {
    transfer_upload_state(&model->transfer, slot, at, state, bytes);
}

// A resumed run has the algorithms of its checkpoint, if their machine was like this one.
static void model_loaded(Model* model, const char* checkpoint) {
    char error[ERROR_BYTES];
    zero_gather_all_parameters(&model->zero);
    if (checkpoint && model->autotune && !matmul_gpu_load_plans(&model->matmul, checkpoint, error)) {
        printf("note: %s; timing the matmuls again\n", error);
    }
    choose_matmuls(model);
}

static void model_gather(Model* model, int g, float* group) {
    const Bucket* b = map_trained(&model->map, g);
    if (b && map_is_divided(&model->map)) {
        zero_wait_for_parameters(&model->zero);
        zero_collect(&model->zero, b, group, group + b->in[MAP_OWNED].from, DTYPE_FP32);
    }
}

static void model_move(Model* model, GridGroup group, GroupMove move) {
    const GroupGpu* with = group == GRID_TENSOR    ? &model->groups.tensor
                           : group == GRID_EXPERTS ? &model->groups.experts
                                                   : &model->groups.pipe;
    transfer_move(&model->transfer, with, move);
}

static const Map* model_map(const Model* model) { return &model->map; }

static const OptimizerState* model_state(const Model* model) { return &model->state; }

static Model* model_teacher(Model* model) { return model->teacher; }

static Model* model_base(Model* model) { return model->base; }

static uint64_t model_checksum(Model* model, ParameterBytes of) {
    // the first of the parameters: those whose layers do not take turns in memory
    const size_t all = model->map.of.ring_parameters > 0 ? model->map.buckets[0].elements * sizeof(floatX)
                                                         : model->parameter_bytes,
                 bytes = of.count > 0 ? of.count : all;
    zero_wait_for_parameters(&model->zero); // test_ranks.sh: one process gathers nothing
    checksum_words(&model->results.on_gpu->checksum, (const char*)model->params_memory + of.begin,
                   bytes / sizeof(uint64_t), of.number, &model->gpu);
    return step_results_read(&model->results, 0)->checksum;
}

// The algorithms of the matmuls, so that a resumed run has the same ones.
static void save_matmuls(const void* model, const char* directory) {
    matmul_gpu_save_plans(&((const Model*)model)->matmul, directory);
}

// -------------------------------------------------------------------------------------------------
// The table

// Opens the model with a dry ledger, which counts all that it takes.
static void plan_of_model(ModelPlan* plan, const Settled* s) {
    Model model;
    model_open(&model, s, memory_dry(), NULL);
    plan->memory = model.memory;
    plan->chunk = model.chunk;
    plan->logits_bytes = model_logits_bytes(model.activation_rows);
    free(model.base); // of a dry ledger, it has no memory
}

// Designated initializers are C++20's.
static Trainer trainer_open(void) {
    Trainer t;
    memset((void*)&t, 0, sizeof(t));
    t.name = "GPU " PRECISION_NAME;
    t.program_name = "train_gpt2cu";
    t.program = OptionsProgram{OPTION_GPU, LLMC_VERSION};
    t.dtype = gpu_setup_dtype();
    t.model_bytes = sizeof(Model);
    t.ledger = memory_on_gpu;
    t.open = model_open;
    t.close = model_close;
    t.model = plan_of_model;
    t.plan = plan_on_gpu;
    t.memory = memory_used_on_gpu;
    t.token_losses = model_token_losses;
    t.prefill = model_prefill;
    t.decode = model_decode;
    t.access.get_group = model_get_group;
    t.access.set_group = model_set_group;
    t.access.get_state = model_get_state;
    t.access.set_state = model_set_state;
    t.access.loaded = model_loaded;
    t.access.gather = model_gather;
    t.access.move = model_move;
    t.access.map = model_map;
    t.access.state = model_state;
    t.show_average = model_show_average;
    t.hide_average = model_hide_average;
    t.teacher = model_teacher;
    t.base = model_base;
    t.checksum = model_checksum;
    t.save_extra = save_matmuls;
    return t;
}

static const Trainer trainer = trainer_open();

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
        gpu_report_tell(&model->report, &run->log);
        run_end_step(run);
        if (schedule_due(run->settled->options.memory.gpu_report, run->state.step,
                         run->settled->options.batch.steps)) {
            gpu_report_print(&model->report, &model->matmul);
        }
        if (run_diverges(run)) {
            run_roll_back(run);
        }
    }
}

#ifndef TRAIN_GPT2_NO_MAIN
PROCESSOR_CHECK

int main(int argc, char** argv) {
    run_open_process();
    gpu_open_process();
    return run_program(argc, argv, &trainer, train);
}
#endif
