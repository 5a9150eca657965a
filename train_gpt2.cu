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
#include "llmc/ops/gradient_norm.cuh"
#include "llmc/gpu/floatx.cuh"

#include "llmc/ops/attention.cuh"
#include "llmc/gpu/batch_queue.cuh"
#include "llmc/ops/checksum.cuh"
#include "llmc/ops/cross_entropy.cuh"
#include "llmc/comm/comm.h"
#include "llmc/ops/embedding.cuh"
#include "llmc/gpu/forward_clock.cuh"
#include "llmc/model/freeze.h"
#include "llmc/model/map.h"
#include "llmc/model/model.h"
#include "llmc/ops/norm.cuh"
#include "llmc/ops/rope.cuh"
#include "llmc/layers/attention_config.h"
#include "llmc/layers/linear.cuh"
#include "llmc/layers/teaching.cuh"
#include "llmc/layers/mlp.cuh"
#include "llmc/layers/pass.cuh"
#include "llmc/layers/self_attention.cuh"
#include "llmc/ops/matmul_plans.cuh"
#include "llmc/optim/offload.cuh"
#include "llmc/optim/optimizer.cuh"
#include "llmc/layers/q8_weights.h"
#include "llmc/model/share_layers.h"
#include "llmc/gpu/graph.cuh"
#include "llmc/gpu/results.cuh"
#include "llmc/layers/decode.cuh"
#include "llmc/checkpoint/transfer.cuh"
#include "llmc/parallel/grid.h"
#include "llmc/parallel/groups.cuh"
#include "llmc/parallel/micro_steps.h"
#include "llmc/parallel/pipeline.cuh"
#include "llmc/parallel/pipeline.h"
#include "llmc/parallel/tensor_parallel.cuh"
#include "llmc/parallel/zero.cuh"
#include "llmc/base/processor.h"
#include "llmc/data/dataloader.h"
#include "llmc/plan/gpu_report.cuh"
#include "llmc/plan/gpu_setup.cuh"
#include "llmc/optim/update_groups.cuh"
#include "llmc/optim/update_in_backward.cuh"
#include "llmc/optim/update_in_backward.h"
#include "llmc/plan/memory_limit.cuh"
#include "llmc/plan/plan_gpu.cuh"
#include "llmc/setup/options.h"
#include "llmc/setup/resolve.h"
#include "llmc/plan/plan.h"
#include "llmc/run/generate.h"
#include "llmc/run/run.h"
#include "llmc/run/start.h"
#include "llmc/optim/schedule.h"
#include "llmc/checkpoint/run_state.h"
#include "llmc/run/trainer.h"

// -------------------------------------------------------------------------------------------------
// The model

struct Model {
    ModelConfig whole_cfg; // of the whole model
    ModelConfig cfg;       // of the part that this process has
    // micro-batches up to B sequences of up to T tokens; N of these tokens are this process's
    int B, T, N;
    ModelUse use;
    RecomputeLevel recompute; // which activations the backward pass computes again
    Freeze freeze;            // which parameters stay as they are
    Freeze whole_freeze;
    int chunk;        // tokens whose logits are in memory at a time, of a batch of any size
    int autotune;     // time algorithms of matmuls
    int use_graph;    // replay micro-steps
    DType grad_dtype; // of the parameters' gradients
    Gpu gpu;
    TensorRow parameter_rows[MODEL_PARAMETER_ROWS], activation_rows[MODEL_ACTIVATION_ROWS];
    // where a backward pass leaves gradients, of grad_dtype
    TensorRow gradient_rows[MODEL_PARAMETER_ROWS];
    OptimizerState state; // on the GPU, or offloaded
    size_t parameter_bytes, gradient_bytes, activation_bytes;
    Comm* comm;
    GridGroupsGpu groups;     // of processes that this one is in
    PipelineGpu pipeline;     // messages between stages
    TensorParts parts;        // of gradients, added up over the tensor group
    ExpertTrafficGpu experts; // rows of divided experts that travel
    ZeroGpu zero;             // ZeRO: the shard that this rank updates, and its communication

    Memory memory; // a ledger of all that the model takes
    // One block each, cut up by the rows.
    void *params_memory, *grads_memory, *acts_memory;
    Offload offload;
    OffloadResiduals residuals;
    ModelParameters params;
    ModelActivations acts;
    DecoderGpu decoder; // generation: its activations are in the same memory

    BatchQueue batches;
    MatmulGpu matmul;
    LinearGpu linear; // with it
    AttentionGpu attention;
    ModelRopes ropes;
    ContextParallelGpu<floatX> context;
    // (B, T) first token that attention sees, in layers with a window; NULL without any
    int* window_starts;
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
    int* is_top;       // (N) of the targets of a task, on the GPU
    Map map;           // where each element is
    Transfer transfer; // weights and state between the host and the GPU
    GpuReport report;  // and the sensors for the log

    PipelineStage stage;  // turns of this stage of the model
    Model* teacher;       // --teacher, a model that only evaluates; NULL: none
    TeachingGpu teaching; // its part in the gradient
};

// Returns the micro-steps of an update on one rank.
static double update_micro_steps(const Settled* s) {
    return ceil((double)s->micro_batches / s->ranks.grid.shape.data);
}

// Opens the parameters.
static void open_parameters(Model* model, const Settled* s) {
    TensorRow* rows = model->parameter_rows;
    const int is_quantized = s->options.texts.quantize;
    zero_parameter_rows(rows, &s->zero, model->cfg, sizeof(floatX));
    model->parameter_bytes = is_quantized
                                 ? quantized_parameter_rows(rows, model->cfg, sizeof(floatX))
                                 : zero_params_elements(&s->zero, ZERO_LAYERS_IN_MEMORY) * sizeof(floatX);
    model->params_memory = memory_take(&model->memory, is_quantized ? "parameters in 8 bits" : "parameters",
                                       MEMORY_DEVICE, model->parameter_bytes);
    tensor_rows_bind(&model->params, rows, MODEL_PARAMETER_ROWS, model->params_memory);
}

// Opens rotary positions and windows of attention, if the model has any.
static void open_positions(Model* model, const Settled* s) {
    attention_config_open_ropes(&model->ropes, &model->memory, model->cfg, model->T, rope_gpu_open);
    if (model->cfg.window > 0) {
        model->window_starts =
            (int*)memory_take(&model->memory, "starts of windows", MEMORY_DEVICE,
                              settled_pass_tokens(s) * (size_t)s->ranks.grid.shape.context * sizeof(int));
    }
}

// Opens the gradients, if there are any, and what divides the model among ranks.
static void open_gradients(Model* model, const Settled* s) {
    const size_t element_bytes = dtype_bytes(model->grad_dtype);
    zero_gradient_rows(model->gradient_rows, &s->zero, model->cfg, element_bytes);
    if (s->use == USE_TRAIN) {
        model->gradient_bytes = zero_grads_elements(&s->zero, ZERO_LAYERS_IN_MEMORY) * element_bytes;
        model->grads_memory = memory_take(&model->memory, "gradients", MEMORY_DEVICE, model->gradient_bytes);
    }
    const Gradient grads = {model->grads_memory, model->grad_dtype};
    if (s->use == USE_TRAIN) {
        tensor_parts_open(&model->parts, &model->memory, model->cfg, &s->zero, model->gradient_rows);
    }
    zero_open(&model->zero, &model->memory, s->zero,
              s->options.memory.offload_params ? ZERO_SHARDS_ON_HOST : ZERO_SHARDS_ON_GPU,
              update_micro_steps(s), model->params_memory, DTYPE_OF(floatX), grads, &model->groups,
              &model->gpu);
}

// Opens the optimizer's state and master weights, all zero: on the GPU or offloaded.
static void open_state(Model* model, const Settled* s) {
    const Options* o = &s->options;
    if (o->memory.offload_optimizer) {
        offload_open(&model->offload, &model->memory, &model->state, &s->zero,
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

// Returns the numbers of the statistics of routers, which the losses of sources follow.
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
    norm_open(&model->norm_scratch, memory, (int)N, cfg.C);
    embedding_open(&model->encoder, memory, (int)N, s->cfg.Vp, cfg.C);
    optimizer_open<floatX>(&model->optimizer, memory, &s->zero, &model->state);
    if (s->options.optimizer.freeze && s->options.optimizer.freeze[0]) {
        optimizer_freeze(&model->optimizer, memory, &model->freeze);
    }
    gradient_norm_open(&model->norm, memory, zero_count(&s->zero, ZERO_SHARDS));
    model->sources = s->sources;
    step_results_open(&model->results, memory, update > validation ? update : validation,
                      model_statistics(model) + (size_t)s->sources, &model->gpu);
    model->is_top = (int*)memory_take(memory, "scratch: most likely targets", MEMORY_DEVICE, N * sizeof(int));
}

// Opens the matmuls, and counts the memory of libraries.
static void open_linear(Model* model, const Settled* s) {
    Memory* memory = &model->memory;
    memory_count(memory, "NCCL", MEMORY_DEVICE, memory_nccl_bytes(s));
    matmul_gpu_open(&model->matmul, memory, &model->gpu, gpu_setup_matmul(s));
    linear_gpu_open(&model->linear, memory, model->cfg, s->options.texts.quantize, &model->matmul,
                    &model->gpu);
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
    transfer_open(&model->transfer, model->parameter_rows, s->options.texts.quantize, &model->zero,
                  &model->state, &model->offload, model->acts_memory, model->activation_bytes);
}

// Opens updates after and during the backward pass.
static void open_update(Model* model, const Settled* s) {
    model->update =
        optimizer_update_open<floatX>(&model->optimizer, &model->zero, &model->matmul, s->options.data.seed);
    in_backward_gpu_open(&model->in_backward, &model->memory, &model->update, &model->norm, &model->results,
                         s->options.memory.update_in_backward);
}

// Opens the parts that need a GPU and take no memory of it.
static void open_device(Model* model, const Options* o) {
    if (attention_note(&model->attention)[0]) {
        printf("attention: %s\n", attention_note(&model->attention));
    }
    forward_clock_open(&model->clock);
    if (o->memory.autotune && model->comm->rank == 0) {
        matmul_gpu_open_cache(&model->matmul);
    }
    if (o->memory.autotune && model->comm->size > 1) {
        matmul_gpu_share_plans(&model->matmul, model->comm);
    }
    gpu_report_open(&model->report, o->memory.device, o->memory.gpu_report != 0);
}

static void set_sizes(Model* model, const Settled* s) {
    const Options* o = &s->options;
    model->whole_cfg = s->cfg;
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
    model->whole_freeze = s->freeze;
    model->chunk = memory_chunk(s);
    model->autotune = o->memory.autotune;
    model->use_graph = gpu_setup_graph(s);
    model->grad_dtype = gpu_setup_gradients(s);
}

// Opens all parts of a model whose GPU and groups are open; from a dry ledger they need not be.
static void open_parts(Model* model, const Settled* s, Memory memory, Comm* comm) {
    set_sizes(model, s);
    model->memory = memory;
    model->comm = comm;
    const MapOf map = settled_map(s, ZERO_LAYERS_IN_MEMORY);
    map_open(&model->map, &model->memory, MEMORY_HOST, &map, grid_rank(&s->ranks.grid));
    optimizer_state_open(&model->state, s->optimizer, &s->zero, s->part);
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
        open_device(model, &s->options);
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
// would take: then it needs neither a GPU nor `comm`.
static void model_open(Model* model, const Settled* s, Memory memory, Comm* comm) {
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
}

static void close_training(Model* model) {
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

// Closes all parts but the GPU and the groups.
static void close_parts(Model* model) {
    // test_ranks.sh: one process gathers nothing
    zero_wait_for_parameters(&model->zero);
    CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream)); // cudaFree waits, too, but undocumented
    if (model->use != USE_GENERATE) {
        close_training(model);
    }
    decoder_close(&model->decoder);
    matmul_gpu_close(&model->matmul);
    expert_traffic_close(&model->experts);
    pipeline_close(&model->pipeline);
    zero_close(&model->zero);
    memory_close(&model->memory);
}

static void model_close(Model* model) {
    if (model->teacher) {
        close_parts(model->teacher);
        free(model->teacher);
    }
    close_parts(model);
    grid_groups_gpu_close(&model->groups);
    gpu_close(&model->gpu);
}

// All parameters, seen from layer l: .qkvw is its.
static ModelParameters parameters_at_layer(const Model* model, int l) {
    return model_parameters_in_block(model->params, model->parameter_rows, l,
                                     zero_parameter_block(&model->zero.plan, model_copy(model->cfg, l)));
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
    batch_queue_push(&model->batches,
                     BatchArrays{batch.inputs, batch.targets, batch.starts, batch.lengths, batch.sources,
                                 &targets_per_token},
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

// Returns the number of rows of the residual stream, R, that this rank has in a pass.
static int stream_rows(Model* model, const Pass* pass) {
    return tensor_rows(tensor_of(model, pass).cut).count;
}

// Returns the bytes of a tensor of the residual stream in a pass.
static size_t stream_bytes(Model* model, const Pass* pass) {
    return (size_t)stream_rows(model, pass) * model->cfg.C * sizeof(floatX);
}

// Copies the residual stream after block l to the host, if it is offloaded.
static void offload_residual(Model* model, int l, const Pass* pass) {
    if (!pass->cached) {
        offload_residual_out(&model->residuals, l, stream_into(model, l + 1, pass), stream_bytes(model, pass),
                             &model->gpu);
    }
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
    const floatX* inp; // (R, C) the residual stream that enters it
    floatX* out;       // (R, C) the residual stream after it
    NormGpu<floatX> norm1, norm2;
    SelfAttentionGpu attention;
    MlpGpu mlp;
} Block;

static NormGpu<floatX> norm_of(ModelConfig cfg, const floatX* weight, const floatX* bias, float* mean,
                               float* rstd, int rows) {
    return NormGpu<floatX>{model_norm(cfg), model_norm_eps(cfg), weight, bias, mean, rstd, rows, cfg.C, {}};
}

// Returns the first token that attention sees in layer l (N); NULL: the first of the sequence.
static const int* starts_of(const Model* model, int l, const Pass* pass) {
    return model_window(model->cfg, l) > 0 ? model->window_starts : pass->starts;
}

static Block block_at(Model* model, int l, const Pass* pass) {
    const ModelConfig cfg = model->cfg;
    const int R = stream_rows(model, pass);
    const ModelParameters p = parameters_at_layer(model, l);
    const ModelActivations a = model_activations_at_layer(*pass->acts, pass->activation_rows, l);
    LayerWeights w = linear_weights(cfg, &p);
    linear_bind_codes(&w, &model->linear, model_copy(cfg, l));
    const LayerPassGpu layer = {cfg, l, pass, p, a, w, tensor_of(model, pass), &model->linear};
    return Block{model,
                 pass,
                 l,
                 a,
                 w,
                 stream_into(model, l, pass),
                 stream_into(model, l + 1, pass),
                 norm_of(cfg, p.ln1w, p.ln1b, a.ln1_mean, a.ln1_rstd, R),
                 norm_of(cfg, p.ln2w, p.ln2b, a.ln2_mean, a.ln2_rstd, R),
                 self_attention_of(&layer, starts_of(model, l, pass), &model->ropes, &model->attention,
                                   &model->context),
                 mlp_of(&layer, &model->groups.experts, &model->experts)};
}

// Runs the block up to the hidden layer of the MLP.
static void block_hidden(const Block* b) {
    const ModelActivations a = b->a;
    LinearGpu* linear = &b->model->linear;
    const int N = pass_tokens(b->pass);
    // ln1 (R, C); residual2 (R, C) = inp + attention; ln2 (R, C); fch, fch_act (N, F)
    linear_norm_forward(a.ln1, b->inp, &b->norm1, &b->weights.qkv, N, linear);
    self_attention_forward_residual(a.residual2, b->inp, &b->attention, a.ln1);
    linear_norm_forward(a.ln2, a.residual2, &b->norm2, &b->weights.fc, N, linear);
    mlp_hidden(&b->mlp, a.ln2);
}

static void block_forward(Block* b) {
    Model* model = b->model;
    linear_renew(&b->weights, &model->linear);
    block_hidden(b);
    offload_residual_wait(&model->residuals, b->l - OFFLOAD_RESIDUALS, &model->gpu); // its memory
    mlp_forward_residual(b->out, b->a.residual2, &b->mlp); // out (R, C) = residual2 + MLP of ln2
    offload_residual(model, b->l, b->pass);
}

static NormGpu<floatX> last_norm(Model* model, const Pass* pass) {
    const ModelActivations* a = pass->acts;
    return norm_of(model->cfg, model->params.lnfw, model->params.lnfb, a->lnf_mean, a->lnf_rstd,
                   stream_rows(model, pass));
}

// Sets the residual stream that enters the first block, (R, C).
static void embeddings_forward(Model* model, const Pass* pass) {
    const ModelConfig cfg = model->cfg;
    const TensorParallelGpu tensor = tensor_of(model, pass);
    const ModelActivations* a = pass->acts;
    const LayerWeights w = linear_weights(cfg, &model->params);
    linear_embedding(a->encoded, pass, &w.wte, model->params.wpe, &tensor, &model->linear);
    if (a->encoded_rstd) {
        norm_unit_forward(a->encoded, a->encoded_rstd, stream_rows(model, pass), cfg.C, model_norm_eps(cfg),
                          &model->gpu);
    }
}

// Sets where attention starts in layers with a window, for a pass over a batch.
static void set_windows(Model* model, const Pass* pass) {
    if (model->window_starts && !pass_is_step(pass)) {
        pass_window_starts(model->window_starts, pass, model->cfg.window, &model->gpu);
    }
}

// Forward in a rank without tokens: computes those of others that take its experts, and does its
// part of the communication.
static void others_forward(Model* model, const Pass* pass) {
    if (!model_divides_experts(model->cfg)) {
        zero_idle_forward(&model->zero);
        return;
    }
    zero_begin_forward(&model->zero);
    for (int l = 0; l < model->cfg.L; l++) {
        zero_parameters(&model->zero, l, 1);
        const Block block = block_at(model, l, pass);
        mlp_hidden(&block.mlp, NULL);
        mlp_forward_residual(NULL, NULL, &block.mlp);
    }
}

// Runs this stage of the model: in the last one up to the last hidden state, lnf (R, C). In other
// stages than the first, encoded has the residual stream that enters. The inputs are on the GPU. A
// pass may have no tokens.
static void forward_pass(Model* model, const Pass* pass) {
    const ModelConfig cfg = model->cfg;
    if (pass_tokens(pass) == 0) {
        others_forward(model, pass);
        return;
    }
    // Only the matmuls of full micro-batches are worth timing. Decoding has the same bits in each
    // run.
    model->matmul.settings.autotune = model->autotune && !pass->cached && pass_tokens(pass) == model->N;
    zero_begin_forward(&model->zero);
    set_windows(model, pass);
    if (model_has_first(cfg)) {
        embeddings_forward(model, pass);
    }
    for (int l = 0; l < cfg.L; l++) {
        zero_parameters(&model->zero, model_copy(cfg, l), 1);
        Block block = block_at(model, l, pass);
        block_forward(&block);
    }
    if (model_has_last(cfg)) {
        const NormGpu<floatX> norm = last_norm(model, pass);
        norm_forward(pass->acts->lnf, (const floatX*)stream_into(model, cfg.L, pass), &norm, &model->gpu);
    }
}

// Returns the pass over a batch of model_push. Positions count from the first token of each
// sequence.
static Pass batch_pass(const Model* model, Batch batch) {
    Pass pass = {};
    assert(batch.B * batch.T <= model->N && batch_length(batch) <= model->T);
    pass.inputs = batch.inputs;
    pass.targets = batch.targets;
    pass.starts = batch.starts;
    pass.lengths = batch.lengths;
    pass.targets_per_token = model->batches.batch.targets_per_token;
    pass.B = batch.B;
    pass.T = batch.T;
    pass.positions.chunks = batch.chunks;
    pass.acts = &model->acts;
    pass.activation_rows = model->activation_rows;
    return pass;
}

static void model_forward(Model* model, Batch batch) {
    const Pass pass = batch_pass(model, batch);
    forward_pass(model, &pass);
}

// Returns the head of the model on lnf, after forward_pass. Gathers lnf (N, C).
static LmHeadGpu lm_head(Model* model, const Pass* pass) {
    const TensorParallelGpu tensor = tensor_of(model, pass);
    const ModelActivations* a = pass->acts;
    return LmHeadGpu{tensor_gather(&tensor, 0, a->lnf),
                     linear_weights(model->cfg, &model->params).head,
                     pass->targets,
                     a->logits,
                     pass_tokens(pass),
                     model->cfg.V,
                     model->chunk,
                     model->cfg.softcap,
                     model->z_loss,
                     &model->linear,
                     tensor,
                     a->word_rows,
                     a->all_logits};
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

// Adds the losses of a batch of a mixture to the sum of each source, on the GPU.
static void batch_source_losses(Model* model, Batch batch) {
    if (batch.sources) {
        sum_source_losses(model->results.statistics + model_statistics(model), model->sources,
                          model->acts.losses, batch.sources, batch.B, batch.T, &model->gpu);
    }
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
        return;
    }
    if (level >= RECOMPUTE_NORMS) {
        norm_forward(b->a.ln1, b->inp, &b->norm1, &b->model->gpu);
        norm_forward(b->a.ln2, (const floatX*)b->a.residual2, &b->norm2, &b->model->gpu);
    }
    if (level == RECOMPUTE_MLP) {
        mlp_hidden(&b->mlp, b->a.ln2);
    } else if (level >= RECOMPUTE_ACTIVATION) {
        mlp_activation(&b->mlp);
    }
}

static ModelGradients gradients_at_layer(const Model* model, int l) {
    return zero_gradients_at_layer(&model->zero, model->gradient_rows, model->cfg, &model->freeze, l);
}

// Returns the gradient of the bias of the projection into the stream that enters block l; none for
// the first block of this stage.
static Gradient bias_grad_into(const Model* model, int l) {
    Gradient bias = gradients_at_layer(model, l > 0 ? l - 1 : 0).fcprojb;
    bias.data = l > 0 ? bias.data : NULL;
    return bias;
}

// Returns room for the codes of dresidual, the gradient of the stream after block l, which the MLP
// of that block reads next: unless matmuls are computed again before, or the pass ends here.
static E4m3Rows stream_codes(Model* model, int l, const Pass* pass) {
    const int is_next = l >= model->freeze.first_block && model->recompute <= RECOMPUTE_NORMS;
    const E4m3Rows none = {NULL, NULL};
    if (!is_next) {
        return none;
    }
    const Block b = block_at(model, l, pass);
    return linear_codes_below(b.a.dresidual, b.norm1.N, &b.mlp.proj, pass_tokens(pass), &model->linear);
}

// Returns the gradients of a block's MLP; those of its parameters are in `d`.
static MlpGradientsGpu mlp_gradients_at(const Block* b, const ModelGradients* d, GradientMode mode) {
    Model* model = b->model;
    return mlp_gradients_of(d, &b->a, mode, zero_neighbor_elements(&model->zero.plan), model->router_losses,
                            router_statistics_of(model->results.statistics, b->l, model->cfg.E));
}

// The MLP of a block: turns dresidual (R, C), the gradient of the stream after it, into that before
// it. dfch (N, F).
static void mlp_backward_at(const Block* b, const ModelGradients* d, GradientMode mode) {
    Model* model = b->model;
    const ModelActivations a = b->a;
    const MlpGradientsGpu dmlp = mlp_gradients_at(b, d, mode);
    mlp_backward(&b->mlp, &dmlp, a.dresidual, a.ln2); // branch (R, C), the gradient of ln2
    // dresidual, and its column sums: the gradient of attprojb (C)
    const NormGradients dnorm2 = {d->ln2w, d->ln2b, mode, d->attprojb, mode, {}};
    norm_backward(a.dresidual, GRADIENT_ADD, &dnorm2, (const floatX*)a.branch, (const floatX*)a.residual2,
                  &b->norm2, &model->norm_scratch, &model->gpu);
}

// The attention of a block, likewise. dqkv (N, QKV).
static void attention_backward_at(const Block* b, const ModelGradients* d, GradientMode mode,
                                  GradientMode below) {
    Model* model = b->model;
    const ModelActivations a = b->a;
    const SelfAttentionGradientsGpu dattention = self_attention_gradients_of(d, &a, mode);
    self_attention_backward(&b->attention, &dattention, a.dresidual, a.ln1); // branch, of ln1
    // dresidual, and the gradient of fcprojb (C) of the block before
    if (b->l > 0) {
        wait_for_buffer(model, b->l - 1);
    }
    const NormGradients dnorm1 = {
        d->ln1w, d->ln1b, mode, bias_grad_into(model, b->l), below, stream_codes(model, b->l - 1, b->pass)};
    norm_backward(a.dresidual, GRADIENT_ADD, &dnorm1, (const floatX*)a.branch, b->inp, &b->norm1,
                  &model->norm_scratch, &model->gpu);
}

// Turns dresidual (R, C), the gradient of the residual stream after block l, into that before it,
// in place.
static void block_backward(Model* model, int l, const Pass* pass, GradientMode mode) {
    const Block b = block_at(model, l, pass);
    const ModelGradients d = gradients_at_layer(model, l);
    const GradientMode own = share_gradient_mode(model->cfg, l, mode),
                       below = l > 0 ? share_gradient_mode(model->cfg, l - 1, mode) : own;
    block_recompute(&b, model->recompute);
    zero_clear_frozen(&model->zero, model->gradient_rows, model->cfg, &model->freeze, l);
    mlp_backward_at(&b, &d, own);
    attention_backward_at(&b, &d, own, below);
}

// Sets or adds to the gradients of the embeddings, from dresidual (R, C), that of encoded.
static void embeddings_backward(Model* model, const Pass* pass, GradientMode mode) {
    const ModelConfig cfg = model->cfg;
    const TensorParallelGpu tensor = tensor_of(model, pass);
    const ModelActivations* a = pass->acts;
    const ModelGradients d = gradients_at_layer(model, 0);
    const Gradient apart = zero_embedding_gradient(&model->zero); // without data: joined
    const EmbeddingSizes sizes = {
        pass->B, pass->T, cfg.C, cfg.Vp, cfg.max_T, pass->positions.chunks, tensor.cut.rank * cfg.Vp};
    const int is_trained = d.wte.data || apart.data;
    if (a->encoded_rstd && is_trained) {
        norm_unit_backward(a->dresidual, (const floatX*)a->encoded, a->encoded_rstd, stream_rows(model, pass),
                           cfg.C, &model->gpu);
    }
    const floatX* dencoded = tensor_gather(&tensor, 0, a->dresidual); // (N, C)
    if (is_trained) {
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
    const ModelGradients d = gradients_at_layer(model, 0);
    const LmHeadGpu head = lm_head(model, pass);
    const Gradient dweight = cfg.has_head ? d.head : d.wte;
    const NormGpu<floatX> norm = last_norm(model, pass);
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
                  (const floatX*)pass->acts->dresidual, stream_rows(model, pass), cfg.C, &model->norm_scratch,
                  &model->gpu);
}

// Forward and backward in a rank without tokens: its experts' gradients on those of others, and its
// part of the reductions, up to group 0.
static void others_backward(Model* model, GradientMode mode, MicroStep step) {
    Pass pass = {};
    pass.acts = &model->acts;
    pass.activation_rows = model->activation_rows;
    if (!model_divides_experts(model->cfg)) {
        zero_idle<floatX>(&model->zero, step);
        return;
    }
    zero_begin(&model->zero, step);
    others_forward(model, &pass);
    for (int l = model->cfg.L - 1; l >= 0; l--) {
        zero_parameters(&model->zero, l, -1);
        wait_for_buffer(model, l);
        const Block block = block_at(model, l, &pass);
        const ModelGradients d = gradients_at_layer(model, l);
        const MlpGradientsGpu dmlp = mlp_gradients_at(&block, &d, mode);
        mlp_backward(&block.mlp, &dmlp, NULL, NULL);
        zero_group_done<floatX>(&model->zero, model_group(model->cfg, l), step);
    }
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
    set_windows(model, &pass);
    zero_wait_for_buffer(&model->zero, -1);
    if (model_has_last(cfg)) {
        head_backward(model, &pass, dloss, mode);
        batch_loss(model, batch);
        batch_source_losses(model, batch);
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
    next.tokens = stream_rows(model, &pass);
    stage_enter(&model->stage, &model->pipeline, &model->acts, next);
}

static void stage_end(Model* model) { stage_leave(&model->stage, &model->pipeline, &model->acts); }

// -------------------------------------------------------------------------------------------------
// Micro-steps

// True if the forward pass waits for no other rank, so that its time tells how fast this one is.
static int micro_step_is_timed(const Model* model, MicroStep step) {
    return model->comm->size > 1 && !grid_forward_waits(&model->groups.grid) &&
           !zero_forward_waits(&model->zero.plan, step);
}

// Starts a micro-step with its forward pass.
static void micro_step_begin(Model* model, Batch batch, MicroStep step) {
    const int is_timed = micro_step_is_timed(model, step);
    zero_begin(&model->zero, step);
    model->linear.renews = step.number == 0;
    if (is_timed) {
        forward_clock_begin(&model->clock, &model->gpu);
    }
    model_forward(model, batch);
    teacher_forward(model, batch);
    if (is_timed) {
        forward_clock_end(&model->clock, &model->gpu);
    }
}

// Backward, and without stages forward before it, up to the gradient of group 0: what a graph
// repeats.
static void micro_step_work(Model* model, Batch batch, float dloss, GradientMode mode, MicroStep step,
                            InBackward* hook) {
    if (!model_is_stage(model->cfg)) {
        micro_step_begin(model, batch, step);
    }
    model_backward(model, batch, dloss, mode, step, hook);
    zero_join(&model->zero, step);
}

// Forward on the batch of a micro-step, which may be empty. Without stages micro_step_backward does
// it: the two passes can be one graph.
static void micro_step_forward(Model* model, Batch batch, MicroStep step) {
    if (model_is_stage(model->cfg) && batch.B > 0) {
        micro_step_begin(model, batch, step);
    }
}

// Backward on the batch of a micro-step, and this rank's part of the others': the batch may be
// empty. Appends the loss to the results. Micro-steps of one variant, with full micro-batches in
// all ranks (is_full), repeat as a graph.
static void micro_step_backward(Model* model, Batch batch, float dloss, MicroStep step, InBackward* hook,
                                int is_full) {
    StepGraph* graph = &model->graphs[zero_variant(&model->zero.plan, step)];
    const int adds = step.number > 0 && model->zero.plan.stage < 2;
    const GradientMode mode = adds ? GRADIENT_ADD : GRADIENT_SET;
    const auto work = [&] { micro_step_work(model, batch, dloss, mode, step, hook); };
    if (batch.B == 0) {
        others_backward(model, mode, step);
    } else if (model->use_graph && is_full && step_graph_is_due(graph, batch.T, batch.starts)) {
        step_graph_launch(graph, dloss, batch.starts, work, &model->gpu);
        zero_replayed(&model->zero);
    } else {
        work();
    }
    if (micro_step_is_timed(model, step) && batch.B > 0) {
        model->clock.tokens = batch.B * batch.T; // a graph does not set it
    }
    zero_group_done<floatX>(&model->zero, model->zero.plan.groups, step); // an embedding's apart
    group_done(model, 0, step, hook);
}

// Waits for the GPU before a message: redundant, but it keeps the others' wait for the message
// short (--timeout).
static void wait_for_gpu(Model* model) { CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream)); }

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
    MicroSteps steps = zero_micro_steps(&model->zero.plan, (int64_t)count * ranks * model->B, model->B);
    linear_trains(&model->linear);
    for (MicroStep step; micro_steps_next(&steps, &step);) {
        step_results_clear(&model->results);
        micro_step_backward(model, model_push(model, batch), 1.0f / (float)N, step, NULL, 0);
    }
    linear_trained(&model->linear);
    optimizer_choose_matmuls<floatX>(&model->optimizer, &model->matmul);
    zero_wait_for_gradient(&model->zero); // redundant: the first update waits by itself
    wait_for_gpu(model);
    model->matmul.has_chosen = 1;
    free(tokens);
}

// Completes the gradient of a step, and sets the square sum of this rank's part of it in the
// results, on the GPU.
static void model_square_sum(Model* model) {
    ZeroSpan spans[ZERO_SPANS];
    const int count = zero_counted_spans(&model->zero.plan, model->gradient_rows, model->cfg, spans);
    zero_wait_for_gradient(&model->zero);
    tensor_parts_sum<floatX>(&model->parts, &model->zero, &model->groups.tensor, &model->gpu);
    zero_square_sum<floatX>(&model->results.on_gpu->square_sum, &model->zero, spans, count, &model->norm);
}

// Sets the statistics of the routers of this part of the model, and the losses of sources.
static void statistics_end(const Model* model, RankReport* report) {
    const double* from = model->results.statistics_on_host;
    const size_t routers = model_statistics(model);
    if (routers > 0) {
        memcpy(
            router_statistics_of(rank_report_statistics(report), model->cfg.part.first_layer, model->cfg.E),
            from, routers * sizeof(double));
    }
    if (report->sources > 0) {
        memcpy(rank_report_sources(report), from + routers, report->sources * sizeof(double));
    }
}

// Ends the gradient of an update in which this rank had `batches`: sets its losses and its
// square sum, and the time for a token.
static void gradients_end(Model* model, InBackward* hook, int64_t batches, RankReport* report) {
    double* losses = rank_report_losses(report);
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
    statistics_end(model, report);
    report->pace_s = forward_clock_pace_s(&model->clock);
    matmul_gpu_keep_cache(&model->matmul);
    grid_groups_gpu_check(&model->groups);
}

// Computes the gradient of an update, one micro-batch after another: forward and backward on the
// next batch_tokens. The loss of each token counts loss_scale / batch_tokens. Sets the losses
// of the report, one for each micro-step, its square sum, work and pace. The hook, unless
// NULL, makes the update in the backward pass.
static void model_gradients(Model* model, Dataloader* train, int64_t batch_tokens, float loss_scale,
                            InBackward* hook, RankReport* report) {
    const float dloss = (float)(loss_scale / (double)batch_tokens);
    const Group pipe = {model->groups.pipe.rank, model->groups.pipe.size, NULL, NULL};
    MicroSteps forward = zero_micro_steps(&model->zero.plan, batch_tokens / train->T, model->B),
               backward = forward;
    const int64_t M = micro_steps_count(&forward);
    PipelineAction now;
    int64_t last = -1; // micro-step whose batch is on the GPU
    Batch batch = {};
    int64_t ahead = 0; // forward passes whose backward pass is still to come
    int64_t batches = 0;
    model->clock.tokens = 0;
    step_results_clear(&model->results);
    linear_trains(&model->linear);
    for (int64_t i = 0; pipeline_action(pipe.size, pipe.rank, M, i, &now); last = now.micro_step, i++) {
        const int is_forward = now.pass == PIPELINE_FORWARD;
        MicroStep step;
        if (is_forward) {
            batch = model_push(model, dataloader_next(train));
        } else if (last != now.micro_step) { // else it is there
            batch = model_push(model, dataloader_earlier(train, ahead - 1));
        }
        stage_begin(model, now, batch);
        micro_steps_next(is_forward ? &forward : &backward, &step);
        if (is_forward) {
            in_backward_batch(hook, batch.counted, dataloader_error(train) != NULL);
            micro_step_forward(model, batch, step);
        } else {
            micro_step_backward(model, batch, dloss, step, hook, train->is_full);
            rank_report_add(report, model->whole_cfg, &model->whole_freeze, batch);
            batches += batch.B > 0 && model_has_last(model->cfg);
        }
        ahead += is_forward ? 1 : -1;
        comm_alive(model->comm);
    }
    stage_end(model);
    linear_trained(&model->linear);
    stage_join_embedding<floatX>(&model->zero, &model->pipeline);
    gpu_report_sense(&model->report);
    gradients_end(model, hook, batches, report);
}

// -------------------------------------------------------------------------------------------------
// Update

static void model_update(Model* model, Update update) {
    update_groups(model->update, update, &model->offload, &model->gpu);
    stage_share_embedding(model->params.wte, &model->zero, &model->pipeline);
}

// Sets the parameters to the average of the weights, and sets the weights again.
static void model_show_average(Model* model) {
    update_groups_show_average(model->update, &model->offload, &model->gpu);
    stage_share_embedding(model->params.wte, &model->zero, &model->pipeline);
}

static void model_hide_average(Model* model) {
    update_groups_hide_average(model->update, &model->gpu);
    stage_share_embedding(model->params.wte, &model->zero, &model->pipeline);
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
        wait_for_gpu(model);
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
// start of each document. With an empty batch this rank only takes its part in what the others do.
static void model_token_losses(Model* model, Batch batch, float* losses, int* is_top) {
    const AttentionSizes sizes = attention_config_chunks(model->cfg, batch.B, batch.T, batch.chunks);
    const PipelineAction forward = {PIPELINE_FORWARD, 0, 0};
    const Batch pushed = model_push(model, batch);
    Pass pass = batch_pass(model, pushed);
    pass.positions.starts = pushed.starts;
    stage_begin(model, forward, batch);
    forward_pass(model, &pass);
    if (batch.B > 0 && model_has_last(model->cfg)) {
        model_losses(model, pushed, is_top ? model->is_top : NULL);
        context_gather_tokens(losses, &model->context, model->acts.losses, sizes, &model->gpu);
    }
    if (batch.B > 0 && is_top && model_has_last(model->cfg)) {
        context_gather_tokens(is_top, &model->context, model->is_top, sizes, &model->gpu);
    }
    stage_end(model);
    wait_for_gpu(model);
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
    const ZeroPiece piece = zero_piece(&model->zero.plan, g, ZERO_TRAINED);
    if (zero_is_divided(&model->zero.plan) && piece.count > 0) {
        zero_wait_for_parameters(&model->zero);
        zero_collect(&model->zero, group, g, ZERO_TRAINED,
                     group + (piece.full - zero_group_begin(&model->zero.plan, g)), DTYPE_FP32);
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

static uint64_t model_checksum(Model* model, ParameterBytes of) {
    const size_t all = model->linear.is_quantized
                           ? model->parameter_bytes
                           : zero_count(&model->zero.plan, ZERO_REPLICATED) * sizeof(floatX),
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
}

// Designated initializers are C++20's.
static Trainer trainer_open(void) {
    Trainer t;
    memset((void*)&t, 0, sizeof(t));
    t.name = "GPU " PRECISION_NAME;
    t.program_name = "train_gpt2cu";
    t.program = OptionsProgram{OPTION_GPU, LLMC_VERSION};
    t.dtype = gpu_setup_dtype();
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
        model_gradients(model, run->train, run_batch(run), run->state.loss_scale.scale, run_hook(run),
                        run->report);
        if (run_accepts(run, &update)) {
            model_update(model, update);
        }
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

// One run of the program: trains a model, or generates text with it. Returns the exit status.
static int pretrain(int argc, char** argv) {
    Run* run = run_open(argc, argv, &trainer);
    if (run->trains || run->generate) {
        Model* model = (Model*)check_alloc(1, sizeof(Model), "model");
        model_open(model, run->settled, memory_on_gpu(), &run->comm);
        memory_check(&model->memory, &run->plan.model.memory);
        if (run->generate) {
            generate_texts(run, model);
        } else {
            run_begin(run, model);
            train(model, run);
            run_end(run);
        }
        model_close(model);
        free(model);
    }
    return run_close(run);
}

#ifndef TRAIN_GPT2_NO_MAIN
PROCESSOR_CHECK

int main(int argc, char** argv) {
    run_open_process();
    gpu_open_process();
    return pretrain(argc, argv);
}
#endif
