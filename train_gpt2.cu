/*
train_gpt2.cu -- pretrains GPT-2 and GPT-3 class models on a GPU. Top to bottom: the model, forward, backward,
update, evaluation, weights, the trainer: in the order and with the names of train_gpt2.c, its reference. The
operations are modules in llmc/; the training loop and everything else that both trainers share is
llmc/run/run.h.

    make train_gpt2cu PRECISION=BF16|FP16|FP32 && ./train_gpt2cu         ./train_gpt2cu --help lists the rest

FirstWeights, activations and their gradients are floatX: bf16, fp16 or fp32. Norms, softmax, losses, sums and the
optimizer's state are fp32. Comments give the shapes of tensors: B sequences of T tokens, N = B*T tokens, C
channels, F hidden units of the MLP, QKV = 3C, Vp tokens of the padded vocabulary.
*/
#include "llmc/precision.cuh"

#include "llmc/adamw.cuh"
#include "llmc/attention.cuh"
#include "llmc/batch_queue.cuh"
#include "llmc/checksum.cuh"
#include "llmc/classifier.cuh"
#include "llmc/comm.h"
#include "llmc/encoder.cuh"
#include "llmc/freeze.h"
#include "llmc/gelu.cuh"
#include "llmc/gpt2.h"
#include "llmc/layernorm.cuh"
#include "llmc/linear.cuh"
#include "llmc/matmul.cuh"
#include "llmc/offload.cuh"
#include "llmc/optimizer.cuh"
#include "llmc/quantized.cuh"
#include "llmc/quantized_model.h"
#include "llmc/share.h"
#include "llmc/step_result.cuh"
#include "llmc/text_model.cuh"
#include "llmc/zero.cuh"
#include "llmc/data/dataloader.h"
#include "llmc/run/checkpoint.h"
#include "llmc/run/checkpoint_parts.h"
#include "llmc/run/gpu_report.cuh"
#include "llmc/run/in_backward.h"
#include "llmc/run/loss_scale.h"
#include "llmc/run/memory_plan.cuh"
#include "llmc/run/nvml.h"
#include "llmc/run/options.h"
#include "llmc/run/run.h"
#include "llmc/run/schedule.h"
#include "llmc/run/setup.h"
#include "llmc/run/state.h"
#include "llmc/run/weights.h"

// ---------------------------------------------------------------------------------------------------------------------
// The model

// A micro-step as one CUDA graph. It is captured when the micro-step is done for the second time: the first
// time chooses algorithms and loads kernels.
typedef struct {
    int times[2];      // that the micro-step was done: without documents, with them
    float dloss;       // the graph was captured for this gradient of the losses,
    const int* starts; // and with or without documents
    cudaGraphExec_t graph;
} MicroStepGraph;

// The update that the backward pass makes.
typedef struct {
    InBackward* decides; // NULL: it makes none
    int group;           // whose gradient was summed up last, and which is not yet updated; -1: none
    cudaEvent_t summed;  // the host has its square sum, and the losses
} UpdateNow;

// The gradients of the parameters: the same members, all of one type.
#define GRADIENT_MEMBER(name, ...) Gradient name;
typedef struct {
    GPT2_PARAMETERS(GRADIENT_MEMBER)
} GPT2Gradients;
#undef GRADIENT_MEMBER

struct GPT2 {
    GPT2Config cfg;
    int B, T;                 // micro-batches up to B sequences of up to T tokens
    RecomputeLevel recompute; // which activations the backward pass computes again
    Freeze freeze;            // which parameters stay as they are
    int chunk;                // tokens whose logits are in memory at a time, of a batch of any size
    int autotune;             // time algorithms of products
    int use_graph;            // replay micro-steps
    DType grad_dtype;         // of the parameters' gradients
    uint64_t seed;            // of stochastic rounding
    Gpu gpu;
    TensorRow parameter_rows[GPT2_PARAMETER_ROWS], activation_rows[GPT2_ACTIVATION_ROWS];
    TensorRow gradient_rows[GPT2_PARAMETER_ROWS]; // the parameters', with elements of grad_dtype
    OptimizerState state;                         // where it lies in state_memory, or how it is offloaded
    size_t parameter_bytes, gradient_bytes, state_bytes, activation_bytes;
    size_t elements; // of all parameters, with padding
    Comm* comm;
    ZeroGpu zero; // what of it this process updates, and what moves between processes

    // One allocation each, cut up by the rows.
    void *params_memory, *grads_memory, *state_memory, *acts_memory;
    Offload offload;
    OffloadResiduals residuals;
    GPT2Parameters params;
    GPT2Activations acts;
    TextModelGpu texts; // generation: its activations are in the same memory

    BatchQueue batches;
    MatmulGpu matmul;
    LinearGpu linear; // with it
    AttentionGpu attention;
    LayernormGpu layernorm;
    EncoderGpu encoder;
    OptimizerPlan optimizer;
    GradientNorm norm;
    UpdateNow now;
    cudaEvent_t
        forward[2]; // of several processes: the begin and the end of the last forward pass that waited for
    int forward_tokens; // no other one, and how many tokens it had; 0: none in this update
    MicroStepGraph graphs[ZERO_VARIANTS];
    StepResult *result, *result_host;
    int64_t max_losses; // that the results have room for
    int64_t validating; // batches of a validation whose losses are only on the GPU
    int* is_top;        // (N) of the targets of a task, on the GPU
    void* save_copy;    // what a checkpoint is written from: NULL before the first
    int is_pinned;      // the copy
    Nvml nvml;          // for the log and --gpu-report
    int has_nvml, has_listed_products;
    int has_products; // gpt2_choose_products is done
};

// GELU inside a forward product takes values before they are rounded; computed again, it takes rounded ones.
// So the levels that compute GELU alone again keep it out of the forward products. Its derivative is always
// taken at rounded values.
static GeluFusion gelu_fusion(const Options* o) {
    const int gelu_again = o->recompute == RECOMPUTE_GELU || o->recompute == RECOMPUTE_NORMS;
    const int forward = o->gelu_fusion >= 1 && !gelu_again, backward = o->gelu_fusion >= 2;
    return (GeluFusion)((forward ? GELU_FUSED_FORWARD : 0) | (backward ? GELU_FUSED_BACKWARD : 0));
}

// Opens the management library for the GPU of the run, if it is there. --gpu-report wants to know why it is not.
static void open_sensors(GPT2* model, const Options* options) {
    char bus_id[32];
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), options->device));
    model->has_nvml = nvml_open(&model->nvml, bus_id);
    if (!model->has_nvml && options->gpu_report) {
        printf("no GPU report: %s\n", model->nvml.reason);
    }
}

// The places of tensors in memory, and the bytes it takes.
static void place_tensors(GPT2* model, const ZeroPlan* zero, const Options* o) {
    const size_t element_bytes = dtype_bytes(model->grad_dtype);
    gpt2_sharded_rows_of(model->parameter_rows, model->cfg, sizeof(floatX), zero->size);
    model->parameter_bytes = o->quantize
                                 ? quantized_parameter_rows(model->parameter_rows, model->cfg, sizeof(floatX))
                                 : zero_params_elements(zero, ZERO_BLOCKS_IN_MEMORY) * sizeof(floatX);
    gpt2_sharded_rows_of(model->gradient_rows, model->cfg, element_bytes, zero->size);
    model->gradient_bytes = zero_grads_elements(zero, ZERO_BLOCKS_IN_MEMORY) * element_bytes;
    planned_state(&model->state, model->cfg, zero, o);
    model->state_bytes = model->state.bytes;
    if (options_only_evaluates(o)) {
        model->gradient_bytes = model->state_bytes = 0;
    }
    model->activation_bytes = planned_activations(model->activation_rows, model->cfg, o);
    model->elements = zero_full_elements(zero);
}

// The optimizer's state and master weights, all zero: on the GPU or offloaded.
static void open_state(GPT2* model, const ZeroPlan* zero, const Options* o) {
    const char* directory = o->offload_optimizer == OFFLOAD_DISK ? o->offload_path : NULL;
    if (!o->offload_optimizer) {
        model->state_memory = gpu_alloc(model->state_bytes, 1, "optimizer state");
        return;
    }
    CHECK(model->state_bytes > 0, "--offload-optimizer: --optimizer %s has no state here; wanted off",
          optimizer_word(model->state.optimizer.name));
    offload_open(&model->offload, &model->state, zero, directory);
    if (directory && !scratch_is_direct(model->offload.disk)) {
        printf("note: %s takes no direct I/O: the optimizer's state passes through the page cache\n",
               directory);
    }
}

// One allocation for each kind of tensor that generation needs.
static void open_tensors(GPT2* model, const ZeroPlan* zero, const Options* o) {
    place_tensors(model, zero, o);
    model->params_memory = gpu_alloc(model->parameter_bytes, 1, "parameters");
    model->acts_memory = gpu_alloc(model->activation_bytes, 1, "activations");
    tensor_rows_bind(&model->params, model->parameter_rows, GPT2_PARAMETER_ROWS, model->params_memory);
}

// And for training.
static void open_training_tensors(GPT2* model, const ZeroPlan* zero, const Options* o) {
    model->grads_memory = gpu_alloc(model->gradient_bytes, 1, "gradients");
    open_state(model, zero, o);
    if (o->offload_residuals) {
        offload_residuals_open(&model->residuals, model->cfg.L, planned_residual_bytes(model->cfg, o));
    }
    tensor_rows_bind(&model->acts, model->activation_rows, GPT2_ACTIVATION_ROWS, model->acts_memory);
}

// Room for what an update tells the host.
static void open_results(GPT2* model, const Options* o) {
    model->max_losses = planned_losses(o);
    model->result = (StepResult*)gpu_alloc(1, step_result_bytes(model->max_losses), "results");
    model->result_host = (StepResult*)gpu_alloc_pinned(1, step_result_bytes(model->max_losses), "results");
}

// A run that trains samples too little for a graph.
static void open_texts(GPT2* model, const Options* o) {
    TextModelGpu* texts = &model->texts;
    texts->cfg = model->cfg;
    texts->texts = planned_texts(o);
    texts->T = model->T;
    texts->use_graph = model->use_graph && model->recompute == RECOMPUTE_NEVER;
    texts->params = model->params;
    texts->parameter_rows = model->parameter_rows;
    texts->zero = &model->zero;
    texts->linear = &model->linear;
    texts->attention = &model->attention;
    texts->gpu = &model->gpu;
    text_model_open(texts, model->acts_memory);
}

// What training needs besides.
static void open_training(GPT2* model, const ZeroPlan* zero, const Options* o) {
    const GPT2Config cfg = model->cfg;
    const size_t N = (size_t)o->batch * o->seq_len;
    batch_queue_open(&model->batches, N, &model->gpu);
    attention_gpu_open<floatX>(&model->attention, model->B, model->T, cfg.C, cfg.NH);
    layernorm_open(&model->layernorm, (int)N, cfg.C);
    encoder_open(&model->encoder, (int)N, cfg.Vp, cfg.C);
    optimizer_open<floatX>(&model->optimizer, zero, &model->state);
    if (o->freeze && o->freeze[0]) {
        optimizer_freeze(&model->optimizer, &model->freeze);
    }
    gradient_norm_open(&model->norm, zero_sharded_elements(zero));
    open_results(model, o);
    for (int i = 0; i < 2; i++) {
        CUDA_CHECK(cudaEventCreate(&model->forward[i]));
    }
    CUDA_CHECK(cudaEventCreateWithFlags(&model->now.summed, cudaEventDisableTiming));
    model->now.group = -1;
    model->is_top = (int*)gpu_alloc(N, sizeof(int), "most likely targets");
    if (o->autotune && model->comm->rank == 0) {
        matmul_gpu_open_cache(&model->matmul);
    }
    if (o->autotune && model->comm->size > 1) {
        matmul_gpu_share_plans(&model->matmul, model->comm);
    }
    open_sensors(model, o);
}

// Memory for the model; all parameters are zero. After this only the first save and the timing of algorithms
// allocate memory.
static void gpt2_open(GPT2* model, GPT2Config cfg, const Options* o, Comm* comm) {
    const ZeroPlan zero = planned_zero(cfg, o);
    const MatmulSettings settings = {o->tf32, gelu_fusion(o), o->bias_fusion, o->autotune};
    memory_require(cfg, o);
    memset((void*)model, 0, sizeof(*model));
    model->cfg = cfg;
    model->B = o->batch;
    model->T = o->seq_len;
    model->recompute = (RecomputeLevel)o->recompute;
    model->freeze = freeze_of(cfg.L, o->freeze);
    model->chunk = planned_chunk(o);
    model->autotune = o->autotune;
    model->use_graph = o->graph;
    model->seed = o->seed;
    model->grad_dtype = planned_gradient_dtype(o);
    model->comm = comm;
    gpu_open(&model->gpu, o->device);
    open_tensors(model, &zero, o);
    if (model->recompute != RECOMPUTE_NEVER) {
        open_training_tensors(model, &zero, o);
    }
    const Gradient grads = {model->grads_memory, model->grad_dtype};
    zero_open(&model->zero, zero, o->offload_params ? ZERO_SHARDS_ON_HOST : ZERO_SHARDS_ON_GPU,
              model->params_memory, DTYPE_OF(floatX), grads, comm, &model->gpu);
    matmul_gpu_open(&model->matmul, &model->gpu, settings);
    linear_gpu_open(&model->linear, cfg, o->quantize, &model->matmul, &model->gpu);
    open_texts(model, o);
    if (model->recompute != RECOMPUTE_NEVER) {
        open_training(model, &zero, o);
    }
}

static void close_save_copy(GPT2* model) {
    if (model->is_pinned) {
        CUDA_CHECK(cudaFreeHost(model->save_copy));
    } else {
        free(model->save_copy);
    }
}

static void close_training(GPT2* model) {
    for (int variant = 0; variant < ZERO_VARIANTS; variant++) {
        if (model->graphs[variant].graph) {
            CUDA_CHECK(cudaGraphExecDestroy(model->graphs[variant].graph));
        }
    }
    for (int i = 0; i < 2; i++) {
        CUDA_CHECK(cudaEventDestroy(model->forward[i]));
    }
    CUDA_CHECK(cudaEventDestroy(model->now.summed));
    if (model->has_nvml) {
        nvml_close(&model->nvml);
    }
    close_save_copy(model);
    gpu_free(model->is_top);
    gpu_free_pinned(model->result_host);
    gpu_free(model->result);
    gradient_norm_close(&model->norm);
    optimizer_close(&model->optimizer);
    encoder_close(&model->encoder);
    layernorm_close(&model->layernorm);
    attention_gpu_close(&model->attention);
    batch_queue_close(&model->batches);
    offload_residuals_close(&model->residuals);
    if (model->offload.slots) {
        offload_close(&model->offload);
    }
    gpu_free(model->state_memory);
    gpu_free(model->grads_memory);
}

static void gpt2_close(GPT2* model) {
    zero_wait_for_parameters(&model->zero);
    CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream)); // cudaFree waits, too, but undocumented
    if (model->recompute != RECOMPUTE_NEVER) {
        close_training(model);
    }
    text_model_close(&model->texts);
    linear_gpu_close(&model->linear);
    matmul_gpu_close(&model->matmul);
    zero_close(&model->zero);
    gpu_free(model->acts_memory);
    gpu_free(model->params_memory);
    gpu_close(&model->gpu);
}

// All parameters, seen from layer l: .qkvw is layer l's.
static GPT2Parameters parameters_at_layer(const GPT2* model, int l) {
    return gpt2_parameters_at_copy(model->params, model->parameter_rows,
                                   zero_parameter_block(&model->zero.plan, gpt2_copy(model->cfg, l)));
}

// Where the gradients of layer l lie.
static int gradient_block(const GPT2* model, int l) {
    return zero_gradient_block(&model->zero.plan, gpt2_copy(model->cfg, l));
}

// The gradient of row i in layer l; no data if the parameter is frozen.
static Gradient gradient_at_layer(const GPT2* model, int i, int l) {
    const int is_frozen = freeze_has(&model->freeze, i, l), at = gradient_block(model, l);
    void* data = is_frozen ? NULL : tensor_at_layer(&model->gradient_rows[i], model->grads_memory, at);
    return Gradient{data, model->grad_dtype};
}

// All gradients, seen from layer l: .qkvw is layer l's.
static GPT2Gradients gradients_at_layer(const GPT2* model, int l) {
    GPT2Gradients grads;
    int row = 0;
#define GRADIENT_SET_MEMBER(name, ...) grads.name = gradient_at_layer(model, row++, l);
    GPT2_PARAMETERS(GRADIENT_SET_MEMBER)
#undef GRADIENT_SET_MEMBER
    return grads;
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// The batch on its way to the GPU: the result points to memory there, valid until the next one.
static Batch gpt2_push(GPT2* model, Batch batch) {
    batch_queue_push(&model->batches, batch.inputs, batch.targets, batch.starts, (size_t)batch.B * batch.T);
    batch.inputs = model->batches.tokens;
    batch.targets = model->batches.targets;
    batch.starts = model->batches.starts;
    return batch;
}

// The residual stream that enters block l, (N, C). The blocks that the backward pass does not come to keep none: all of them
// leave it where they found it.
static floatX* residual_into(const GPT2* model, int l) {
    return l <= model->freeze.first_block
               ? model->acts.encoded
               : gpt2_activations_at_layer(model->acts, model->activation_rows, l - 1).residual3;
}

// Block l up to the hidden layer of the MLP. The batch, here and below, is one of gpt2_push.
static void block_hidden(GPT2* model, int l, Batch batch) {
    const Gpu* gpu = &model->gpu;
    const int B = batch.B, T = batch.T, C = model->cfg.C, N = B * T;
    const int F = gpt2_hidden(model->cfg), QKV = gpt2_qkv_size(model->cfg);
    const GPT2Parameters p = parameters_at_layer(model, l);
    const GPT2Activations a = gpt2_activations_at_layer(model->acts, model->activation_rows, l);
    const floatX* residual = residual_into(model, l); // (N, C)
    // ln1 (N, C), its mean and rstd (N)
    layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, residual, p.ln1w, p.ln1b, N, C, gpu);
    // qkv (N, QKV) = ln1 qkvw^T + qkvb, with qkvw (QKV, C)
    linear_forward(a.qkv, a.ln1, p.qkvw, p.qkvb, N, C, QKV, &model->linear);
    // atty (B, T, C), att_lse (B, NH, T)
    attention_forward(a.atty, a.att_lse, a.qkv, batch.starts, B, T, C, model->cfg.NH, &model->attention, gpu);
    // residual2 (N, C) = residual + atty attprojw^T + attprojb, with attprojw (C, C)
    linear_forward_residual(a.residual2, residual, a.atty, p.attprojw, p.attprojb, N, C, C, &model->linear);
    // ln2 (N, C)
    layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w, p.ln2b, N, C, gpu);
    // fch (N, F) = ln2 fcw^T + fcb, with fcw (F, C); fch_gelu (N, F)
    linear_forward_gelu(a.fch_gelu, a.fch, a.ln2, p.fcw, p.fcb, N, C, F, &model->linear);
}

// Sets the last hidden state, lnf (N, C).
static void forward_at(GPT2* model, Batch batch, EncoderPositions positions) {
    const GPT2Config cfg = model->cfg;
    const int B = batch.B, T = batch.T, C = cfg.C, F = gpt2_hidden(cfg), N = B * T;
    const GPT2Activations a = model->acts;
    assert(B <= model->B && T <= model->T);
    // Only the products of full micro-batches are worth timing.
    model->matmul.settings.autotune = model->autotune && B == model->B && T == model->T;
    zero_begin_forward(&model->zero);
    // encoded (N, C)
    linear_encoder(a.encoded, batch.inputs, model->params, B, T, positions, &model->linear);
    for (int l = 0; l < cfg.L; l++) {
        zero_parameters(&model->zero, gpt2_copy(cfg, l), 1);
        const GPT2Parameters p = parameters_at_layer(model, l);
        const GPT2Activations layer = gpt2_activations_at_layer(a, model->activation_rows, l);
        floatX* residual = residual_into(model, l + 1);
        block_hidden(model, l, batch);
        // residual3 (N, C) = residual2 + fch_gelu fcprojw^T + fcprojb, with fcprojw (C, F)
        offload_residual_wait(&model->residuals, l - OFFLOAD_RESIDUALS, &model->gpu);
        linear_forward_residual(residual, layer.residual2, layer.fch_gelu, p.fcprojw, p.fcprojb, N, F, C,
                                &model->linear);
        offload_residual_out(&model->residuals, l, residual, (size_t)N * C * sizeof(floatX), &model->gpu);
    }
    const floatX* residual = residual_into(model, cfg.L); // (N, C)
    layernorm_forward(a.lnf, a.lnf_mean, a.lnf_rstd, residual, model->params.lnfw, model->params.lnfb, N, C,
                      &model->gpu);
}

// The same; positions count from the start of each sequence.
static void gpt2_forward(GPT2* model, Batch batch) {
    const EncoderPositions positions = {NULL, NULL};
    forward_at(model, batch, positions);
}

// Sets the logits (count, Vp) of `count` tokens, at most a chunk, from their hidden state: the tokens `first`,
// first + 1, ... of the batch.
static void gpt2_logits(GPT2* model, int first, int count) {
    linear_logits(model->acts.logits, model->acts.lnf + (size_t)first * model->cfg.C, model->params.wte,
                  count, &model->linear);
}

// Sets the losses (N), chunk by chunk, without gradients; and is_top (N), unless NULL: whether each target was the most
// likely token. After gpt2_forward on the same batch.
static void classifier_losses(GPT2* model, Batch batch, int* is_top) {
    const int N = batch.B * batch.T, chunk = model->chunk;
    for (int n = 0; n < N; n += chunk) {
        const int count = n + chunk < N ? chunk : N - n;
        gpt2_logits(model, n, count);
        classifier_loss(model->acts.losses + n, model->acts.logits, batch.targets + n, count, model->cfg.V,
                        model->cfg.Vp, &model->gpu);
        if (is_top) {
            classifier_top(is_top + n, model->acts.logits, batch.targets + n, count, model->cfg.V,
                           model->cfg.Vp, &model->gpu);
        }
    }
}

// Appends the sum of the losses of a batch to the results, on the GPU.
static void batch_loss(GPT2* model, Batch batch) {
    sum_losses(model->result->losses, &model->result->count, model->acts.losses, batch.B * batch.T,
               &model->gpu);
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// ---- the update of a group during the backward pass

// The array of a slot on the GPU; NULL if nothing has it.
static void* state_slot(const GPT2* model, int slot) {
    const StateSlot* s = &model->state.slots[slot];
    return s->bytes && model->state_memory ? (char*)model->state_memory + s->offset_bytes : NULL;
}

// All that an update takes, with these gradients.
static OptimizerUpdate<floatX> update_with(GPT2* model, Gradient grads, Update update) {
    OptimizerUpdate<floatX> u = {(floatX*)zero_update_parameters(&model->zero),
                                 grads,
                                 {NULL},
                                 &model->optimizer,
                                 update,
                                 model->seed,
                                 &model->matmul,
                                 &model->zero};
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        u.slots[slot] = state_slot(model, slot);
    }
    return u;
}

// When the gradient of group g is there: queues its square sum, beside what follows, for the host.
static void update_sum(GPT2* model, int g) {
    const Gpu* beside = zero_begin_update(&model->zero);
    gradient_square_sum_of<floatX>(&model->result->square_sum, zero_group_gradient(&model->zero, g),
                                   zero_group_elements(&model->zero.plan, g), &model->norm, beside);
    CUDA_CHECK(cudaMemcpyAsync(model->result_host, model->result, step_result_bytes(1),
                               cudaMemcpyDeviceToHost, beside->stream));
    CUDA_CHECK(cudaEventRecord(model->now.summed, beside->stream));
    model->now.group = g;
}

// Waits for that sum, and queues the update of its group if it is to be made. The GPU has work meanwhile: this comes when
// most of the next block's backward pass is queued.
static void update_group(GPT2* model) {
    InBackward* decides = model->now.decides;
    const ZeroPlan* plan = &model->zero.plan;
    const int g = model->now.group, last = plan->groups - 1;
    const int is_first = g == last || plan->first_block == last; // all blocks are frozen
    const ZeroPiece piece = zero_piece(plan, g);
    Update update;
    CUDA_CHECK(cudaEventSynchronize(model->now.summed));
    if (is_first) {
        in_backward_losses(decides, model->result_host->losses[0]);
    }
    if (in_backward_group(decides, g, model->result_host->square_sum, &update)) {
        const Gradient grads = zero_gradient_at_group(&model->zero, g);
        optimizer_update_part(update_with(model, grads, update), piece.owned, piece.count, &model->zero.comm);
    }
    zero_end_update(&model->zero, g);
    model->now.group = -1;
}

static void update_rest(GPT2* model) {
    if (model->now.group >= 0) {
        update_group(model);
    }
}

// Before the first kernel that writes to the gradients of block l.
static void wait_for_buffer(GPT2* model, int l) {
    update_rest(model);
    zero_wait_for_buffer(&model->zero, gpt2_copy(model->cfg, l));
}

// After the backward pass has left the gradients of group g.
static void group_done(GPT2* model, int g, ZeroStep step) {
    if (!model->now.decides) {
        zero_group_done<floatX>(&model->zero, g, step);
        return;
    }
    update_rest(model);
    update_sum(model, g);
}

// ---- the pass

// Computes again what the forward pass did not keep of block l: the same operations on the same inputs give
// the same bits.
static void block_recompute(GPT2* model, int l, Batch batch) {
    const Gpu* gpu = &model->gpu;
    const int C = model->cfg.C, F = gpt2_hidden(model->cfg), N = batch.B * batch.T;
    const GPT2Parameters p = parameters_at_layer(model, l);
    const GPT2Activations a = gpt2_activations_at_layer(model->acts, model->activation_rows, l);
    if (model->recompute == RECOMPUTE_BLOCK) {
        block_hidden(model, l, batch);
        return;
    }
    if (model->recompute >= RECOMPUTE_NORMS) {
        layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, residual_into(model, l), p.ln1w, p.ln1b, N, C, gpu);
        layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w, p.ln2b, N, C, gpu);
    }
    if (model->recompute == RECOMPUTE_MLP) {
        matmul_forward_gelu(a.fch_gelu, a.fch, a.ln2, p.fcw, p.fcb, N, C, F, &model->matmul);
    } else if (model->recompute >= RECOMPUTE_GELU) {
        gelu_forward(a.fch_gelu, a.fch, (size_t)N * F, gpu);
    }
}

// Where blocks take turns a block's gradients are left where those of another one were, of which this one may have frozen some.
static void clear_frozen_gradients(GPT2* model, int l) {
    const int at = gradient_block(model, l);
    for (int i = 0; i < GPT2_PARAMETER_ROWS && model->zero.plan.takes_turns; i++) {
        const TensorRow* row = &model->gradient_rows[i];
        if (row->place == PLACE_BLOCK && freeze_has(&model->freeze, i, l)) {
            CUDA_CHECK(cudaMemsetAsync(tensor_at_layer(row, model->grads_memory, at), 0,
                                       tensor_layer_elements(row) * row->element_bytes, model->gpu.stream));
        }
    }
}

// Sets or adds to dweight (OC, C), unless it has no data. dout is (N, OC), inp (N, C).
static void weight_backward(GPT2* model, Gradient dweight, const floatX* dout, const floatX* inp, int N,
                            int C, int OC, GradientMode mode) {
    if (dweight.data) {
        matmul_backward_weight(dweight, dout, inp, N, C, OC, mode, &model->matmul);
    }
}

// A linear layer without its bias: dinp (N, C) is set; dweight (OC, C) is set or added to. dout is (N, OC),
// inp (N, C), weight (OC, C). The gradient of a bias is summed where dout is made.
static void linear_backward(GPT2* model, floatX* dinp, Gradient dweight, const floatX* dout,
                            const floatX* inp, const floatX* weight, int N, int C, int OC,
                            GradientMode mode) {
    weight_backward(model, dweight, dout, inp, N, C, OC, mode);
    matmul_backward_input(dinp, dout, weight, N, C, OC, &model->matmul);
}

// The gradient of the bias of the projection into the stream that enters block l; none for the embedding.
static Gradient bias_grad_into(const GPT2* model, int l) {
    const Gradient none = {NULL, model->grad_dtype};
    return l == 0 ? none : gradients_at_layer(model, l - 1).fcprojb;
}

// Turns dresidual (N, C), the gradient of the residual stream after block l, into that before it, in place.
static void block_backward(GPT2* model, int l, Batch batch, GradientMode mode) {
    const Gpu* gpu = &model->gpu;
    const int B = batch.B, T = batch.T, C = model->cfg.C, N = B * T;
    const int F = gpt2_hidden(model->cfg), QKV = gpt2_qkv_size(model->cfg);
    const GPT2Parameters p = parameters_at_layer(model, l);
    const GPT2Gradients d = gradients_at_layer(model, l);
    const GPT2Activations a = gpt2_activations_at_layer(model->acts, model->activation_rows, l);
    floatX *dln2 = a.branch, *datty = a.branch, *dln1 = a.branch; // (N, C) each, one after the other
    floatX* dresidual = a.dresidual;                              // (N, C)
    const GradientMode mlp = share_gradient_mode(model->cfg, PART_MLP, l, mode),
                       attention = share_gradient_mode(model->cfg, PART_ATTENTION, l, mode),
                       below = l > 0 ? share_gradient_mode(model->cfg, PART_MLP, l - 1, mode) : attention;
    block_recompute(model, l, batch);
    clear_frozen_gradients(model, l);

    // the MLP: dfch (N, F), and the gradient of fcb (F)
    weight_backward(model, d.fcprojw, dresidual, a.fch_gelu, N, F, C, mlp);
    matmul_backward_input_gelu(a.dfch, d.fcb, dresidual, p.fcprojw, a.fch, N, F, C, mlp, &model->matmul);
    linear_backward(model, dln2, d.fcw, a.dfch, a.ln2, p.fcw, N, C, F, mlp);
    // dresidual, and its column sums: the gradient of attprojb (C)
    layernorm_backward(dresidual, d.ln2w, d.ln2b, d.attprojb, dln2, a.residual2, p.ln2w, a.ln2_mean,
                       a.ln2_rstd, N, C, GRADIENT_ADD, mlp, attention, &model->layernorm, gpu);

    // attention: dqkv (N, QKV), and the gradient of qkvb (QKV)
    linear_backward(model, datty, d.attprojw, dresidual, a.atty, p.attprojw, N, C, C, attention);
    attention_backward(a.dqkv, d.qkvb, datty, a.qkv, a.atty, a.att_lse, batch.starts, B, T, C, model->cfg.NH,
                       attention, &model->attention, gpu);
    linear_backward(model, dln1, d.qkvw, a.dqkv, a.ln1, p.qkvw, N, C, QKV, attention);
    // dresidual, and the gradient of fcprojb (C) of the block before
    if (l > 0) {
        wait_for_buffer(model, l - 1);
    }
    layernorm_backward(dresidual, d.ln1w, d.ln1b, bias_grad_into(model, l), dln1, residual_into(model, l),
                       p.ln1w, a.ln1_mean, a.ln1_rstd, N, C, GRADIENT_ADD, attention, below,
                       &model->layernorm, gpu);
}

// The classifier, chunk by chunk: sets the losses (N) and dlnf (N, C), and sets or adds to the gradient of wte.
static void classifier_gradients(GPT2* model, floatX* dlnf, Batch batch, float dloss, GradientMode mode) {
    const GPT2Activations a = model->acts;
    const int C = model->cfg.C, V = model->cfg.V, Vp = model->cfg.Vp;
    const int N = batch.B * batch.T, chunk = model->chunk;
    const Gradient dwte = gradients_at_layer(model, 0).wte;
    zero_wait_for_buffer(&model->zero, -1);
    for (int n = 0; n < N; n += chunk) {
        const int count = n + chunk < N ? chunk : N - n;
        const size_t at = (size_t)n * C;
        gpt2_logits(model, n, count);
        floatX* dlogits = a.logits; // (count, Vp), in place
        classifier_backward(a.losses + n, dlogits, batch.targets + n, dloss, count, V, Vp, &model->gpu);
        linear_backward(model, dlnf + at, dwte, dlogits, a.lnf + at, model->params.wte, count, C, Vp,
                        n == 0 ? mode : GRADIENT_ADD);
    }
}

// When the backward pass has used the stream that enters block l: fetches what the block after the next one needs into the
// same memory.
static void fetch_residual(GPT2* model, int l, Batch batch) {
    const size_t bytes = (size_t)batch.B * batch.T * model->cfg.C * sizeof(floatX);
    if (l > OFFLOAD_RESIDUALS) {
        offload_residual_in(&model->residuals, l - 1 - OFFLOAD_RESIDUALS,
                            residual_into(model, l - OFFLOAD_RESIDUALS), bytes, &model->gpu);
    }
}

// After gpt2_forward on the same batch: sets the losses and sets or adds to all gradients, as `mode` says.
// dloss is the gradient of the loss of each token. The gradients of a block are reduced, or its parameters are updated, as
// soon as they are there; those of group 0 are left to the caller. The pass ends where everything below is frozen. Appends the sum of the losses to the results.
static void gpt2_backward(GPT2* model, Batch batch, float dloss, GradientMode mode, ZeroStep step) {
    const GPT2Config cfg = model->cfg;
    const int B = batch.B, T = batch.T, C = cfg.C, N = B * T;
    const GPT2Activations a = model->acts;
    const GPT2Parameters p = model->params;
    const GPT2Gradients d = gradients_at_layer(model, 0);
    floatX* dlnf = a.branch; // (N, C)
    classifier_gradients(model, dlnf, batch, dloss, mode);
    batch_loss(model, batch);
    layernorm_backward(a.dresidual, d.lnfw, d.lnfb, bias_grad_into(model, cfg.L), dlnf,
                       residual_into(model, cfg.L), p.lnfw, a.lnf_mean, a.lnf_rstd, N, C, GRADIENT_SET, mode,
                       mode, &model->layernorm, &model->gpu);
    fetch_residual(model, cfg.L, batch);
    for (int l = cfg.L - 1; l >= model->freeze.first_block; l--) {
        const int k = gpt2_copy(cfg, l);
        zero_parameters(&model->zero, k, -1);
        offload_residual_wait(&model->residuals, l - 1, &model->gpu);
        block_backward(model, l, batch, mode);
        fetch_residual(model, l, batch);
        if (gpt2_group_layer(cfg, 1 + k) == l) { // no layer below adds to these gradients
            group_done(model, 1 + k, step);
        }
    }
    encoder_backward(d.wte, d.wpe, a.dresidual, batch.inputs, B, T, cfg.max_T, C, mode, &model->encoder,
                     &model->gpu);
}

// ---- a micro-step

// Before the first micro-step of an update, and before the first batch of a validation.
static void gpt2_clear_result(GPT2* model) {
    CUDA_CHECK(cudaMemsetAsync(&model->result->count, 0, sizeof(model->result->count), model->gpu.stream));
}

// Whether the time of its forward pass tells how fast this process is: it waits for no other one.
static int micro_step_is_timed(const GPT2* model, ZeroStep step) {
    return model->comm->size > 1 && !zero_forward_waits(&model->zero.plan, step);
}

// Takes the time. `record` is External in a graph, which so sets the event each time it is launched.
static void micro_step_mark(GPT2* model, int i, ZeroStep step, unsigned record) {
    if (micro_step_is_timed(model, step)) {
        CUDA_CHECK(cudaEventRecordWithFlags(model->forward[i], model->gpu.stream, record));
    }
}

// The time for a token, of the last forward pass that was timed; 0: unknown. After the GPU was waited for.
static double micro_step_pace_s(GPT2* model) {
    float ms = 0;
    if (model->forward_tokens == 0) {
        return 0;
    }
    if (cudaEventElapsedTime(&ms, model->forward[0], model->forward[1]) != cudaSuccess) {
        cudaGetLastError(); // clears the error: it is no reason to end a run
    }
    return ms / 1e3 / model->forward_tokens;
}

static void micro_step_work(GPT2* model, Batch batch, float dloss, ZeroStep step, unsigned record) {
    const int adds = step.micro_step > 0 && model->zero.plan.stage < 2;
    zero_begin(&model->zero, step);
    micro_step_mark(model, 0, step, record);
    gpt2_forward(model, batch);
    micro_step_mark(model, 1, step, record);
    gpt2_backward(model, batch, dloss, adds ? GRADIENT_ADD : GRADIENT_SET, step);
    zero_join(&model->zero, step);
}

// Captures the work as a graph instead of doing it.
static cudaGraphExec_t micro_step_capture(GPT2* model, Batch batch, float dloss, ZeroStep step) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CUDA_CHECK(cudaStreamBeginCapture(model->gpu.stream, cudaStreamCaptureModeThreadLocal));
    micro_step_work(model, batch, dloss, step, cudaEventRecordExternal);
    CUDA_CHECK(cudaStreamEndCapture(model->gpu.stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    return executable;
}

// The same as a graph, captured now if there is none for this dloss, or for a batch like this.
static void micro_step_replay(GPT2* model, Batch batch, float dloss, ZeroStep step) {
    MicroStepGraph* of = &model->graphs[zero_variant(&model->zero.plan, step)];
    if (of->graph && (of->dloss != dloss || of->starts != batch.starts)) {
        CUDA_CHECK(cudaGraphExecDestroy(of->graph));
        of->graph = NULL;
    }
    if (!of->graph) {
        of->graph = micro_step_capture(model, batch, dloss, step);
        of->dloss = dloss;
        of->starts = batch.starts;
    }
    CUDA_CHECK(cudaGraphLaunch(of->graph, model->gpu.stream));
    zero_replayed(&model->zero);
}

// Forward and backward on the batch of a micro-step, and the part of other processes: a process may have no batch.
// Appends the sum of its losses to the results. Only what repeats has a graph: micro-steps of one variant with full
// micro-batches in all processes (is_full).
static void gpt2_micro_step(GPT2* model, Batch batch, float dloss, ZeroStep step, int is_full) {
    int* times = &model->graphs[zero_variant(&model->zero.plan, step)].times[batch.starts != NULL];
    if (batch.B == 0) {
        zero_idle<floatX>(&model->zero, step);
    } else if (!model->use_graph || !is_full || (*times)++ == 0) {
        micro_step_work(model, batch, dloss, step, cudaEventRecordDefault);
    } else {
        micro_step_replay(model, batch, dloss, step);
    }
    if (micro_step_is_timed(model, step) && batch.B > 0) {
        model->forward_tokens = batch.B * batch.T;
    }
    zero_group_done<floatX>(&model->zero, 0, step);
}

// Chooses the algorithms of all products of a full micro-batch, with any tokens, and of an update. Several processes choose
// together: later some have no full micro-batch, or none at all, when others have one.
static void gpt2_choose_products(GPT2* model) {
    const int N = model->B * model->T, size = model->comm->size;
    const int micro_steps = model->zero.plan.stage < 2 ? 2 : 1; // the later ones add to the gradients
    if (!model->autotune || size == 1 || model->has_products) {
        return;
    }
    int* tokens = (int*)check_alloc((size_t)N, sizeof(int), "tokens");
    for (int i = 0; i < N; i++) {
        tokens[i] = i % model->cfg.V;
    }
    const Batch batch = {tokens, tokens, NULL, model->B, model->T, N};
    for (int micro = 0; micro < micro_steps; micro++) {
        const ZeroStep step = {micro, size, size, micro == micro_steps - 1};
        gpt2_clear_result(model);
        gpt2_micro_step(model, gpt2_push(model, batch), 1.0f / (float)N, step, 0);
    }
    optimizer_choose_products<floatX>(&model->optimizer, &model->matmul);
    zero_wait_for_gradient(&model->zero);
    CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream)); // as in gpt2_evaluate
    model->has_products = 1;
    free(tokens);
}

// ---- the gradient of an update

// Waits for the GPU, once a step: for the losses of the micro-steps and the square sum of the gradient.
static const StepResult* gpt2_read_result(GPT2* model, int64_t losses) {
    assert(losses <= model->max_losses);
    CUDA_CHECK(cudaMemcpyAsync(model->result_host, model->result, step_result_bytes(losses),
                               cudaMemcpyDeviceToHost, model->gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream));
    return model->result_host;
}

// Sets the square sum of this process's part of the gradient in the result, on the GPU.
static void gpt2_square_sum(GPT2* model) {
    zero_wait_for_gradient(&model->zero);
    gradient_square_sum<floatX>(&model->result->square_sum, zero_gradient(&model->zero), &model->norm,
                                &model->gpu);
}

// The gradient of an update, one micro-batch after another; as run.h says.
static BatchGradient gpt2_gradients(GPT2* model, Dataloader* train, int64_t total_batch, float loss_scale,
                                    double* losses) {
    const int64_t sequences = total_batch / train->T;
    const float dloss = (float)(loss_scale / (double)total_batch);
    BatchGradient gradient = {{0, 0}, 0, 0, 0};
    int64_t batches = 0; // of this process
    model->forward_tokens = 0;
    gpt2_clear_result(model);
    for (ZeroStep step = zero_step(sequences, model->B, model->comm->size, 0); step.active > 0;
         step = zero_step(sequences, model->B, model->comm->size, step.micro_step + 1)) {
        const Batch next = dataloader_next(train), batch = next.B > 0 ? gpt2_push(model, next) : next;
        losses[step.micro_step] = 0;
        batches += batch.B > 0;
        gpt2_micro_step(model, batch, dloss, step, train->is_full);
        batch_gradient_add(&gradient, model->cfg, &model->freeze, batch);
        comm_alive(model->comm);
    }
    gpt2_square_sum(model);
    const StepResult* result = gpt2_read_result(model, batches);
    matmul_gpu_keep_cache(&model->matmul);
    zero_check(&model->zero);
    memcpy(losses, result->losses, (size_t)batches * sizeof(double));
    gradient.square_sum = result->square_sum;
    gradient.pace_s = micro_step_pace_s(model);
    return gradient;
}

// ---------------------------------------------------------------------------------------------------------------------
// Update

// One update of what this process updates.
static void gpt2_update(GPT2* model, Update update) {
    const OptimizerUpdate<floatX> u = update_with(model, zero_update_gradient(&model->zero), update);
    if (model->offload.slots) {
        offload_update(&model->offload, u, &model->gpu);
    } else {
        optimizer_update(u, &model->gpu);
    }
    zero_gather_parameters(&model->zero);
}

// As run.h says.
static BatchGradient gpt2_update_in_backward(GPT2* model, Batch next, InBackward* decides) {
    const ZeroStep step = {0, 1, 1, 1};
    const Batch batch = gpt2_push(model, next);
    BatchGradient gradient = {{0, 0}, 0, 0, 0};
    model->now.decides = decides;
    gpt2_clear_result(model);
    micro_step_work(model, batch, (float)(1 / decides->total_batch), step, cudaEventRecordDefault);
    group_done(model, 0, step);
    update_rest(model);
    zero_join_updates(&model->zero);
    model->now.decides = NULL;
    matmul_gpu_keep_cache(&model->matmul);
    batch_gradient_add(&gradient, model->cfg, &model->freeze, batch);
    gradient.square_sum = decides->square_sum;
    return gradient;
}

// ---------------------------------------------------------------------------------------------------------------------
// Evaluation

// Waits for the losses of the last batches before batch `end` that the host does not have yet.
static void gpt2_validated(GPT2* model, int64_t end, double* losses) {
    const int64_t count = model->validating;
    if (count > 0) {
        memcpy(losses + end - count, gpt2_read_result(model, count)->losses, (size_t)count * sizeof(double));
        gpt2_clear_result(model);
        model->validating = 0;
    }
}

// Forward, as run.h says; of an empty batch only its part of what others do. One process lets the GPU run ahead until
// there is no more room for losses. Several exchange a message before each batch, and wait: that message is MPI's.
static void gpt2_evaluate(GPT2* model, Batch batch, int64_t i, double* losses) {
    if (i == 0) { // also after a validation that a signal has stopped
        gpt2_clear_result(model);
        model->validating = 0;
    }
    if (batch.B == 0) {
        gpt2_validated(model, i, losses);
        losses[i] = 0;
        zero_idle_forward(&model->zero);
        CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream));
        return;
    }
    batch = gpt2_push(model, batch);
    gpt2_forward(model, batch);
    classifier_losses(model, batch, NULL);
    batch_loss(model, batch);
    model->validating++;
    if (model->comm->size > 1 || model->validating == model->max_losses) {
        gpt2_validated(model, i + 1, losses);
    }
}

// Copies from the GPU to the host, and waits.
static void download(const GPT2* model, void* to, const void* from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, model->gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream));
}

// Forward, for tasks: sets the loss of each token; positions count from the start of each document. Of an empty batch
// only its part of what others do.
static void gpt2_token_losses(void* model_, Batch batch, float* losses, int* is_top) {
    GPT2* model = (GPT2*)model_;
    const size_t N = (size_t)batch.B * batch.T;
    if (N == 0) {
        zero_idle_forward(&model->zero);
    } else {
        const Batch pushed = gpt2_push(model, batch);
        const EncoderPositions positions = {NULL, pushed.starts};
        forward_at(model, pushed, positions);
        classifier_losses(model, pushed, is_top ? model->is_top : NULL);
        download(model, losses, model->acts.losses, N * sizeof(float));
    }
    if (N > 0 && is_top) {
        download(model, is_top, model->is_top, N * sizeof(int));
    }
    CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream)); // as the others wait: the next message is MPI's
}

// ---------------------------------------------------------------------------------------------------------------------
// Generation

// As generator.h says.
static const float* gpt2_read_text(GPT2* model, int text, const int* ids, int count) {
    return text_model_read(&model->texts, text, ids, count);
}

static const float* gpt2_next_tokens(GPT2* model, const int* ids, const int* positions, int texts) {
    return text_model_next(&model->texts, ids, positions, texts);
}

// ---------------------------------------------------------------------------------------------------------------------
// Weights and checkpoints

// Copies from the host to the GPU, or to pinned memory, and waits.
static void upload(const GPT2* model, void* to, const void* from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, model->gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream));
}

// Sets `bytes` of the array of a slot from byte `at` on.
static void upload_state(GPT2* model, int slot, size_t at, const void* state, size_t bytes) {
    if (model->offload.slots) {
        offload_write(&model->offload, state, slot, at, bytes);
    } else if (bytes > 0) {
        upload(model, (char*)state_slot(model, slot) + at, state, bytes);
    }
}

// The slots that are saved.
static void download_state(GPT2* model, char* state) {
    for (int i = 0; i < STATE_SLOTS; i++) {
        const StateSlot* slot = &model->state.slots[i];
        if (slot->name && slot->bytes > 0 && model->offload.slots) {
            offload_read(&model->offload, state + slot->offset_bytes, i, 0, slot->bytes);
        } else if (slot->name && slot->bytes > 0) {
            download(model, state + slot->offset_bytes, state_slot(model, i), slot->bytes);
        }
    }
}

// What is kept beside the weights; generation keeps nothing.
static MasterWeights master_of(const GPT2* model) {
    return model->state_memory || model->offload.slots ? model->state.optimizer.master : MASTER_NONE;
}

// Sets weights from fp32 values on the host.
static void upload_narrow(const GPT2* model, floatX* to, const float* from, size_t count) {
    floatX* narrow = (floatX*)check_alloc(count, sizeof(floatX), "copy of a group of parameters");
    for (size_t i = 0; i < count; i++) {
        narrow[i] = from_float<floatX>(from[i]);
    }
    upload(model, to, narrow, count * sizeof(floatX));
    free(narrow);
}

// Sets a matrix that is in 8 bits.
static void upload_blocks(const void* model, void* to, const float* from, size_t elements) {
    const Gpu* gpu = &((const GPT2*)model)->gpu;
    const size_t blocks = elements / QUANTIZED_BLOCK, bytes = quantized_gpu_bytes(elements);
    QuantizedBlock* matrix = (QuantizedBlock*)check_alloc(blocks, sizeof(QuantizedBlock), "matrix in 8 bits");
    void* staging = check_alloc(bytes, 1, "matrix in 8 bits");
    quantized_encode_matrix(matrix, from, elements);
    quantized_upload(to, staging, matrix, elements, gpu);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    free(staging);
    free(matrix);
}

static void upload_floats(const void* model, void* to, const float* from, size_t elements) {
    upload_narrow((const GPT2*)model, (floatX*)to, from, elements);
}

// Sets the parameters of group g with --quantize; `rows` are those of `group`, as in upload_group.
static void upload_quantized_group(GPT2* model, int g, const TensorRow* rows, const float* group) {
    const QuantizedParameters to = {model, model->parameter_rows, model->params_memory, upload_blocks,
                                    upload_floats};
    quantized_set_group(to, g, rows, group);
}

// The same with split master weights, which begin with element `at` of this process's; their lower part is of type L.
template <class L>
static void upload_split(GPT2* model, floatX* to, size_t at, const float* from, size_t count) {
    uint16_t* upper = (uint16_t*)check_alloc(count, sizeof(uint16_t), "copy of a group of parameters");
    L* lower = (L*)check_alloc(count, sizeof(L), "copy of a group of parameters");
    for (size_t i = 0; i < count; i++) {
        const SplitFloat<L> split = split_float<L>(from[i]);
        memcpy(upper + i, &split.upper, sizeof(uint16_t));
        lower[i] = split.lower;
    }
    upload(model, to, upper, count * sizeof(uint16_t));
    upload_state(model, state_master_slot(master_of(model)), at * sizeof(L), lower, count * sizeof(L));
    free(lower);
    free(upper);
}

// Sets what this process updates of group g, and the master weights of it, from fp32 values on the host that have this
// group alone, laid out by the parameter rows.
static void upload_group(GPT2* model, int g, const float* group) {
    const ZeroPlan* zero = &model->zero.plan;
    const ZeroPiece piece = zero_piece(zero, g);
    const float* from = group + (piece.full - zero_group_begin(zero, g));
    floatX* to = (floatX*)zero_update_parameters(&model->zero) + piece.kept;
    if (master_of(model) == MASTER_SPLIT) {
        upload_split<uint16_t>(model, to, piece.owned, from, piece.count);
        return;
    }
    if (master_of(model) == MASTER_24) {
        upload_split<int8_t>(model, to, piece.owned, from, piece.count);
        return;
    }
    if (master_of(model) == MASTER_FP32) {
        upload_state(model, STATE_MASTER, piece.owned * sizeof(float), from, piece.count * sizeof(float));
    }
    upload_narrow(model, to, from, piece.count);
}

// After all groups: sets all parameters that this process keeps.
static void upload_end(GPT2* model) { zero_gather_parameters(&model->zero); }

// Copies group g of the master weights, of elements as large as `type`, to `group` on the host; NULL: not in this process.
// Collective.
static void download_master(GPT2* model, int g, void* group, DType type) {
    const int slot = state_master_slot(master_of(model));
    const ZeroPiece piece = zero_piece(&model->zero.plan, g);
    const int is_divided = zero_is_divided(&model->zero.plan);
    const size_t bytes = dtype_bytes(type);
    Offload* offload = &model->offload;
    if (!offload->slots) {
        zero_collect(&model->zero, group, g, (char*)state_slot(model, slot) + piece.owned * bytes, type);
        return;
    }
    void* room = is_divided ? check_alloc(piece.count, bytes, "copy of master weights") : NULL;
    void* mine = is_divided ? room : group;
    if (mine) {
        offload_read(offload, mine, slot, piece.owned * bytes, piece.count * bytes);
    }
    if (is_divided) {
        zero_collect(&model->zero, group, g, mine, type);
    }
    free(room);
}

// The weights as the passes read them.
static void download_narrow(GPT2* model, int g, void* group) {
    const ZeroPlan* zero = &model->zero.plan;
    if (model->zero.params_slices) {
        zero_collect(&model->zero, group, g, (floatX*)model->zero.params_slices + zero_piece(zero, g).kept,
                     DTYPE_OF(floatX));
    } else if (group) {
        download(model, group, (floatX*)model->params_memory + zero_group_begin(zero, g),
                 zero_group_elements(zero, g) * sizeof(floatX));
    }
}

// Both parts of split master weights, as fp32; the lower one is of type L, which is as large as `type`.
template <class L> static void download_split(GPT2* model, int g, float* group, DType type) {
    const size_t count = zero_group_elements(&model->zero.plan, g);
    floatX* upper = (floatX*)check_alloc(count, sizeof(floatX), "copy of a group of parameters");
    L* lower = (L*)check_alloc(count, sizeof(L), "copy of a group of parameters");
    download_narrow(model, g, group ? upper : NULL);
    download_master(model, g, group ? lower : NULL, type);
    for (size_t i = 0; group && i < count; i++) {
        bf16 half;
        memcpy((void*)&half, upper + i, sizeof(half));
        group[i] = split_join(half, lower[i]);
    }
    free(lower);
    free(upper);
}

// Copies the weights of group g that are saved, master weights if there are any, to `group` on the host; NULL: not in this
// process. Collective.
static void download_group(GPT2* model, int g, void* group) {
    zero_wait_for_parameters(&model->zero);
    if (master_of(model) == MASTER_FP32) {
        download_master(model, g, group, DTYPE_FP32);
    } else if (master_of(model) == MASTER_SPLIT) {
        download_split<uint16_t>(model, g, (float*)group, DTYPE_BF16);
    } else if (master_of(model) == MASTER_24) {
        download_split<int8_t>(model, g, (float*)group, DTYPE_BYTE);
    } else {
        download_narrow(model, g, group);
    }
}

// Of the groups first ... end - 1, laid out by the parameter rows; of none in this process if first = end.
static void download_groups(GPT2* model, void* groups, int first, int end) {
    const ZeroPlan* zero = &model->zero.plan;
    const size_t begin = zero_group_begin(zero, first),
                 element_bytes = master_of(model) != MASTER_NONE ? sizeof(float) : sizeof(floatX);
    for (int g = 0; g < zero->groups; g++) {
        const int is_wanted = first <= g && g < end;
        char* group = is_wanted ? (char*)groups + (zero_group_begin(zero, g) - begin) * element_bytes : NULL;
        download_group(model, g, group);
    }
}

// The same of one group as fp32.
static void gpt2_download(GPT2* model, int g, float* group) {
    if (master_of(model) != MASTER_NONE) {
        download_group(model, g, group);
        return;
    }
    const size_t count = zero_group_elements(&model->zero.plan, g);
    floatX* room = (floatX*)check_alloc(count, sizeof(floatX), "copy of a group of parameters");
    download_group(model, g, group ? room : NULL);
    for (size_t i = 0; group && i < count; i++) {
        group[i] = to_float(room[i]);
    }
    free(room);
}

// From the file, or random; a group at a time, of which a process reads little more than it updates.
static void set_weights(GPT2* model, const char* path, uint64_t seed) {
    const ZeroPlan* zero = &model->zero.plan;
    TensorRow rows[GPT2_PARAMETER_ROWS];
    FirstWeights weights;
    gpt2_sharded_rows_of(rows, model->cfg, sizeof(float), zero->size);
    float* group = (float*)check_alloc(zero_largest_group(zero), sizeof(float), "a group of parameters");
    weights_open(&weights, model->cfg, path, seed);
    for (int g = 0; g < zero->groups; g++) {
        memset(group, 0, zero_group_elements(zero, g) * sizeof(float)); // also between the tensors
        const ZeroPiece piece = zero_piece(zero, g);
        const size_t first = piece.full - zero_group_begin(zero, g);
        weights_read_part(&weights, rows, g, first, first + piece.count, group);
        if (model->linear.is_quantized) {
            upload_quantized_group(model, g, rows, group);
        } else {
            upload_group(model, g, group);
        }
    }
    weights_close(&weights);
    free(group);
    upload_end(model);
}

static void gpt2_first_weights(GPT2* model, const char* path, uint64_t seed) {
    set_weights(model, path, seed);
    gpt2_choose_products(model);
}

// Sets the optimizer's state of this process, a group of a slot at a time.
static void read_state(GPT2* model, const char* path, const SavedState* saved) {
    const ZeroPlan* zero = &model->zero.plan;
    CheckpointParts parts;
    void* group = check_alloc(zero_largest_group(zero), sizeof(float), "a group of the optimizer's state");
    checkpoint_parts_open(&parts, saved, path, model->state.optimizer, model->cfg, zero);
    for (int i = 0; i < STATE_SLOTS; i++) {
        const StateSlot* slot = &model->state.slots[i];
        for (int g = 0; g < zero->groups && slot->name; g++) {
            checkpoint_parts_read(&parts, i, g, group);
            upload_state(model, i, state_group_begin(slot, g) * slot->element_bytes, group,
                         state_group_elements(slot, g) * slot->element_bytes);
        }
    }
    checkpoint_parts_close(&parts);
    free(group);
}

// Sets weights and optimizer state from a checkpoint.
static void gpt2_read_checkpoint(GPT2* model, const char* path, const SavedState* saved) {
    char error[ERROR_BYTES];
    set_weights(model, path, 0);
    read_state(model, path, saved);
    if (model->autotune && !matmul_gpu_load_plans(&model->matmul, path, error)) {
        printf("note: %s; timing the matrix products again\n", error);
    }
    gpt2_choose_products(model);
}

// At the first save: memory for its copy; pinned, so that the copy has the speed of the bus, or pageable if the
// machine or its limits do not allow to pin it.
static void open_save_copy(GPT2* model, size_t bytes) {
    model->is_pinned = cudaMallocHost(&model->save_copy, bytes) == cudaSuccess;
    if (!model->is_pinned) {
        cudaGetLastError(); // clears the error
        printf(
            "note: cannot pin %.1f MiB of host memory for checkpoints: copying them from the GPU is slower\n",
            (double)bytes / (1 << 20));
        model->save_copy = check_alloc(bytes, 1, "copy to save");
    }
}

// Copies what this process saves to the host: its part of the optimizer's state, and its files' groups of the weights.
static int gpt2_copy_out(GPT2* model, Checkpoints* copy) {
    const size_t bytes = copy->params_bytes + copy->optimizer_bytes;
    if (!model->save_copy && bytes > 0) {
        open_save_copy(model, bytes);
    }
    checkpoint_copy_at(copy, model->save_copy);
    download_groups(model, copy->params, copy->model.groups.first, copy->model.groups.end);
    if (copy->optimizer_bytes > 0) {
        download_state(model, (char*)copy->optimizer);
    }
    return 1;
}

static uint64_t gpt2_checksum(GPT2* model) {
    const size_t bytes = zero_replicated_elements(&model->zero.plan) * sizeof(floatX);
    zero_wait_for_parameters(&model->zero);
    checksum_words(&model->result->checksum, model->params_memory, bytes / sizeof(uint64_t), &model->gpu);
    return gpt2_read_result(model, 0)->checksum;
}

// The algorithms of the products, so that a resumed run has the same ones.
static void save_products(const void* model, const char* directory) {
    matmul_gpu_save_plans(&((const GPT2*)model)->matmul, directory);
}

// Collective; rank 0 writes, a group at a time.
static void gpt2_export(GPT2* model, const Options* options, const RunData* data) {
    const ZeroPlan* zero = &model->zero.plan;
    TensorRow rows[GPT2_PARAMETER_ROWS];
    SetupExport files;
    if (!setup_exports(options)) {
        return;
    }
    gpt2_sharded_rows_of(rows, model->cfg, sizeof(float), zero->size);
    const int is_first = model->comm->rank == 0;
    float* group = is_first
                       ? (float*)check_alloc(zero_largest_group(zero), sizeof(float), "a group of parameters")
                       : NULL;
    if (is_first) {
        setup_export_open(&files, model->cfg, options, data);
    }
    for (int g = 0; g < zero->groups; g++) {
        gpt2_download(model, g, group);
        if (is_first) {
            setup_export_group(&files, rows, g, group);
        }
    }
    if (is_first) {
        setup_export_close(&files);
    }
    free(group);
}

// ---------------------------------------------------------------------------------------------------------------------
// The trainer

// Decides --device auto. Processes that only evaluate have nothing in common: each would choose products of its own.
static void choose_device(Options* options, const Comm* comm) {
    if (comm->size > 1 && options->device != OPTION_AUTO) {
        die_usage("--device %d is for one process; %d take one GPU each", options->device, comm->size);
    }
    if (comm->size > 1 && options->autotune && options_only_evaluates(options)) {
        printf("autotune: off, with several processes that only evaluate\n");
        options->autotune = 0;
    }
    if (options->device == OPTION_AUTO) {
        options->device = comm->size > 1 ? gpu_device_of_rank(comm, OPTION_AUTO) : 0;
    }
}

// Only fp16 needs a loss scale.
static LossScale first_loss_scale(void) {
    return DTYPE_OF(floatX) == DTYPE_FP16 ? loss_scale_open() : loss_scale_off();
}

static void make_plan(TrainerPlan* plan, GPT2Config cfg, Options* o, Comm* comm) {
    if (o->update_in_backward && first_loss_scale().scale != 1) {
        die_usage(
            "--update-in-backward on with PRECISION=FP16, whose loss scale needs the whole gradient first; "
            "wanted PRECISION=BF16 or FP32, or off");
    }
    if (o->update_in_backward && o->optimizer == OPTIMIZER_MUON) {
        die_usage(
            "--update-in-backward on, --optimizer muon, which on a GPU updates all blocks at once; wanted "
            "adamw8bit or another one, or off");
    }
    if (o->master_weights == MASTER_WEIGHTS_24 && DTYPE_OF(floatX) != DTYPE_BF16) {
        die_usage("--master-weights 24 with PRECISION=" PRECISION_NAME "; wanted PRECISION=BF16, or on");
    }
    choose_device(o, comm);
    plan->peak =
        gpu_peak_or_default(plan->device, sizeof(plan->device), o->device, DTYPE_OF(floatX), o->tf32);
    memory_choose(cfg, o, comm, plan->peak);
    if (o->quantize) {
        quantized_parameter_rows(plan->parameters, cfg, sizeof(floatX));
    } else {
        gpt2_parameter_rows(plan->parameters, cfg);
    }
    planned_activations(plan->activations, cfg, o);
    memory_plan(plan->memory, cfg, o);
    plan->gradient_bytes = dtype_bytes(planned_gradient_dtype(o));
    plan->parameter_bytes = sizeof(floatX);
}

static void print_device(const GPT2* model, double peak) {
    const Gpu* gpu = &model->gpu;
    printf("%s (sm_%d%d), %s, peak %.0f TFLOP/s\n", gpu->name, gpu->major, gpu->minor,
           dtype_name(DTYPE_OF(floatX)), peak * 1e-12);
    if (attention_note(&model->attention)[0]) {
        printf("attention: %s\n", attention_note(&model->attention));
    }
}

// What this process and others have taken of the GPU beside what was allocated: CUDA's context, kernels, cublasLt.
static double beside_mib(const GPT2* model) {
    size_t free_bytes = 0, total_bytes = 0;
    (void)model;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    return ((double)total_bytes - (double)free_bytes - (double)gpu_now_bytes()) / (1 << 20);
}

// --gpu-report: once the algorithms of the products, and then a line on the GPU.
static void report_gpu(GPT2* model, const Options* options, int64_t step) {
    char line[256];
    if (!schedule_due(options->gpu_report, step, options->steps)) {
        return;
    }
    if (!model->has_listed_products) {
        model->has_listed_products = 1;
        matmul_gpu_report(stdout, &model->matmul);
    }
    if (model->has_nvml && nvml_line(&model->nvml, line, sizeof(line))) {
        printf("%s\n", line);
    }
}

static void read_sensors(const GPT2* model, double* power_w, double* clock_mhz) {
    nvml_sensors(&model->nvml, power_w, clock_mhz);
}

// C++17 has no names here: the order is that of run.h.
static const Trainer trainer = {
    "GPU " PRECISION_NAME,      // name
    "train_gpt2cu",             // program_name
    {OPTION_GPU, LLMC_VERSION}, // program
    sizeof(GPT2),               // model_bytes
    0,                          // peak_is_measured
    make_plan,                  // plan
    gpt2_open,                  // open
    gpt2_close,                 // close
    print_device,               // print_device
    gpt2_export,                // export_model
    gpu_peak_mib,               // peak_mib
    beside_mib,                 // beside_mib
    first_loss_scale,           // loss_scale
    gpt2_gradients,             // gradients
    gpt2_update_in_backward,    // update_in_backward
    gpt2_update,                // update
    report_gpu,                 // report
    read_sensors,               // sensors
    NULL,                       // validates_first
    gpt2_evaluate,              // evaluate
    gpt2_validated,             // validated
    gpt2_token_losses,          // token_losses
    gpt2_read_text,             // read_text
    gpt2_next_tokens,           // next_tokens
    gpt2_first_weights,         // first_weights
    gpt2_read_checkpoint,       // read_checkpoint
    planned_saved_dtype,        // saved_dtype
    gpt2_copy_out,              // copy_out
    gpt2_checksum,              // checksum
    save_products,              // save_extra
};

#ifndef TRAIN_GPT2_NO_MAIN
int main(int argc, char** argv) { return run_main(argc, argv, &trainer); }
#endif
