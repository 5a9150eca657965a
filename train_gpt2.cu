/*
train_gpt2.cu -- pretrains GPT-2 and GPT-3 class models on a GPU. Top to bottom: the model, forward, backward,
update, evaluation, weights, the trainer: in the order and with the names of train_gpt2.c, its reference. The
operations are modules in llmc/; the training loop and everything else that both trainers share is
llmc/run/run.h.

    make train_gpt2cu PRECISION=BF16|FP16|FP32 && ./train_gpt2cu         ./train_gpt2cu --help lists the rest

Weights, activations and their gradients are floatX: bf16, fp16 or fp32. Norms, softmax, losses, sums and the
optimizer's state are fp32. Comments give the shapes of tensors: B sequences of T tokens, N = B*T tokens, C
channels, F hidden units of the MLP, QKV = 3C, Vp tokens of the padded vocabulary.
*/
#include "llmc/precision.cuh"

#include "llmc/adamw.cuh"
#include "llmc/attention.cuh"
#include "llmc/batch_queue.cuh"
#include "llmc/classifier.cuh"
#include "llmc/comm.h"
#include "llmc/encoder.cuh"
#include "llmc/gelu.cuh"
#include "llmc/gpt2.h"
#include "llmc/layernorm.cuh"
#include "llmc/matmul.cuh"
#include "llmc/offload.cuh"
#include "llmc/zero.cuh"
#include "llmc/data/dataloader.h"
#include "llmc/run/checkpoint.h"
#include "llmc/run/gpu_report.cuh"
#include "llmc/run/loss_scale.h"
#include "llmc/run/nvml.h"
#include "llmc/run/options.h"
#include "llmc/run/plan.h"
#include "llmc/run/run.h"
#include "llmc/run/schedule.h"
#include "llmc/run/setup.h"
#include "llmc/run/state.h"

// ---------------------------------------------------------------------------------------------------------------------
// The model

// What the host reads back of an update or a validation's batch, on the GPU and in pinned memory.
typedef struct {
    WideSum square_sum; // of the gradient
    int64_t count;      // of losses
    double losses[];    // sum of each micro-step
} StepResult;

// A micro-step as one CUDA graph. It is captured when the micro-step is done for the second time: the first
// time chooses algorithms and loads kernels.
typedef struct {
    int times[2];      // that the micro-step was done: without documents, with them
    float dloss;       // the graph was captured for this gradient of the losses,
    const int* starts; // and with or without documents
    cudaGraphExec_t graph;
} MicroStepGraph;

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
    int chunk;                // tokens whose logits are in memory at a time, of a batch of any size
    int autotune;             // time algorithms of products
    int use_graph;            // replay micro-steps
    DType grad_dtype;         // of the parameters' gradients
    uint64_t seed;            // of stochastic rounding
    Gpu gpu;
    TensorRow parameter_rows[GPT2_PARAMETER_ROWS], activation_rows[GPT2_ACTIVATION_ROWS];
    TensorRow gradient_rows[GPT2_PARAMETER_ROWS]; // the parameters', with elements of grad_dtype
    StateRow state_rows[GPT2_STATE_ROWS];
    size_t parameter_bytes, gradient_bytes, state_bytes, activation_bytes;
    size_t elements; // of all parameters, with padding
    Comm* comm;
    ZeroGpu zero; // what of it this process updates, and what moves between processes

    // One allocation each, cut up by the rows.
    void *params_memory, *grads_memory, *state_memory, *acts_memory;
    int has_master; // weights,
    float* master;  // on the GPU; NULL if there are none, and, like the state, if they are offloaded
    Offload offload;
    OffloadResiduals residuals;
    GPT2Parameters params;
    GPT2OptimizerState state;
    GPT2Activations acts;

    BatchQueue batches;
    MatmulGpu matmul;
    AttentionGpu attention;
    LayernormGpu layernorm;
    EncoderGpu encoder;
    AdamWPlan adamw;
    GradientNorm norm;
    MicroStepGraph graphs[ZERO_VARIANTS];
    StepResult *result, *result_host;
    int64_t max_losses;    // micro-steps of an update
    floatX* logits_pinned; // (Vp) of one token,
    float* logits_host;    // and the same as fp32
    void* save_copy;       // what a checkpoint is written from: NULL before the first
    int is_pinned;         // the copy
    Nvml nvml;             // for --gpu-report
    int has_nvml, has_listed_products;
    int has_products; // gpt2_choose_products is done
};

// The type of the weights in a checkpoint: of master weights if there are any.
static SafeTensorsDtype saved_dtype(const Options* o) {
    const int is_fp32 = DTYPE_OF(floatX) == DTYPE_FP32 || o->master_weights;
    return is_fp32 ? SAFETENSORS_F32 : DTYPE_OF(floatX) == DTYPE_FP16 ? SAFETENSORS_F16 : SAFETENSORS_BF16;
}

// The tokens of a classifier's chunk: also of a batch that is smaller than a micro-batch.
static int planned_chunk(const Options* o) {
    const int64_t N = (int64_t)o->batch * o->seq_len;
    return (int)(o->logits_chunk < N ? o->logits_chunk : N);
}

static size_t planned_activations(TensorRow* rows, GPT2Config cfg, const Options* o) {
    const int residuals = cfg.L - (o->offload_residuals ? offload_residual_layers(cfg.L) : 0);
    return gpt2_activation_rows(rows, cfg, o->batch, o->seq_len, o->recompute, residuals,
                                (size_t)planned_chunk(o));
}

static int has_master(const Options* o) { return sizeof(floatX) < sizeof(float) && o->master_weights; }

static DType planned_gradients(const Options* o) { return o->gradients ? DTYPE_FP32 : DTYPE_OF(floatX); }

// The optimizer's state and master weights, where they are kept, and what chunks of them pass through.
static void plan_add_optimizer(PlanMemory plan[PLAN_KINDS], GPT2Config cfg, const ZeroPlan* zero,
                               const Options* o) {
    const PlanPlace place = o->offload_optimizer == OFFLOAD_DISK   ? PLAN_DISK
                            : o->offload_optimizer == OFFLOAD_HOST ? PLAN_HOST
                                                                   : PLAN_DEVICE;
    const double moves = place != PLAN_DEVICE;
    const PlanMemory master = {
        "master weights", has_master(o) ? zero_owned_elements(zero) * sizeof(float) : 0, place, moves, moves};
    plan_add_at(plan, master);
    plan_add_state(plan, cfg, zero, place);
    if (place == PLAN_DISK) {
        const PlanMemory places = {"pinned chunks of state", offload_places_bytes(has_master(o)), PLAN_HOST,
                                   0, 0};
        plan_add_at(plan, places);
    }
    plan_add(plan, "chunks of state", moves > 0 ? offload_planned_bytes(has_master(o)) : 0);
}

// Of the residual stream after a block.
static size_t residual_bytes(GPT2Config cfg, const Options* o) {
    return (size_t)o->batch * (size_t)o->seq_len * (size_t)cfg.C * sizeof(floatX);
}

// Micro-batches of an update.
static int64_t micro_batches(const Options* o) {
    return (o->total_batch / o->seq_len + o->batch - 1) / o->batch;
}

// And of one process.
static double micro_steps(const Options* o) { return ceil((double)micro_batches(o) / o->processes); }

// What --offload-residuals keeps on the host.
static void plan_add_residuals(PlanMemory plan[PLAN_KINDS], GPT2Config cfg, const Options* o) {
    const size_t layers = o->offload_residuals ? (size_t)offload_residual_layers(cfg.L) : 0;
    const PlanMemory kind = {"residual stream", layers * residual_bytes(cfg, o), PLAN_HOST, micro_steps(o),
                             micro_steps(o)};
    plan_add_at(plan, kind);
}

// Sets the list of the large allocations; it ends with a name of NULL.
static void memory_plan(PlanMemory plan[PLAN_KINDS], GPT2Config cfg, const Options* o) {
    TensorRow activations[GPT2_ACTIVATION_ROWS];
    const ZeroPlan zero = zero_plan(cfg, o->zero, o->process, o->processes);
    plan->name = NULL;
    const size_t params_shard = zero_parameter_shard_bytes(&zero, DTYPE_OF(floatX)),
                 grads_shard = zero_gradient_shard_bytes(&zero);
    plan_add(plan, "parameters",
             zero_parameter_bytes(&zero, DTYPE_OF(floatX)) + (o->offload_params ? 0 : params_shard));
    plan_add(plan, "gradients",
             zero_gradient_bytes(&zero, planned_gradients(o)) + (o->offload_params ? 0 : grads_shard));
    if (o->offload_params) { // both passes read parameters; the norm and the update read gradients, too
        const double m = micro_steps(o);
        const PlanMemory params = {"shard of the parameters", params_shard, PLAN_HOST, 2 * m, 1},
                         grads = {"shard of the gradients", grads_shard, PLAN_HOST, m + 1, m};
        plan_add_at(plan, params);
        plan_add_at(plan, grads);
    }
    plan_add_optimizer(plan, cfg, &zero, o);
    plan_add_residuals(plan, cfg, o);
    plan_add(plan, "activations", planned_activations(activations, cfg, o));
    plan_add(plan, "cuBLASLt workspace", matmul_planned_bytes(o->device));
    plan_add(plan, "attention", attention_planned_bytes(o->batch, o->seq_len, cfg.NH, DTYPE_OF(floatX)));
    const PlanMemory copy = {"pinned copy to save",
                             o->out[0] ? checkpoints_bytes(cfg, &zero, saved_dtype(o)) : 0, PLAN_HOST, 0, 0};
    plan_add_at(plan, copy);
}

// Of the GPU, with some room for what is not planned.
static size_t planned_bytes(GPT2Config cfg, const Options* options) {
    PlanMemory memory[PLAN_KINDS];
    memory_plan(memory, cfg, options);
    return plan_bytes(memory) + plan_bytes(memory) / 50;
}

static size_t free_memory(int device) {
    size_t free_bytes = 0, total_bytes = 0;
    CUDA_CHECK(cudaSetDevice(device));
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    return free_bytes;
}

// The least that --logits-chunk auto chooses: smaller chunks save little memory.
static int least_chunk(GPT2Config cfg, const Options* o) {
    return (int)gpt2_classifier_chunk(cfg, (size_t)o->batch * (size_t)o->seq_len);
}

static int least_recompute(const Options* o) {
    return o->offload_residuals ? RECOMPUTE_BLOCK : RECOMPUTE_NONE;
}

// Ends the program if the run does not fit into the memory of the GPU. The error names the largest micro-batch
// that fits, with the lowest level of recomputation that it needs.
static void require_memory(GPT2Config cfg, const Options* options) {
    const size_t free_bytes = free_memory(options->device), wanted = planned_bytes(cfg, options);
    if (wanted <= free_bytes) {
        return;
    }
    Options smaller = *options;
    for (; smaller.batch > 0; smaller.batch /= 2) {
        const int least = least_chunk(cfg, &smaller);
        smaller.logits_chunk = options->logits_chunk;
        const int has_more = planned_chunk(&smaller) > least;
        smaller.logits_chunk = has_more ? least : options->logits_chunk;
        for (smaller.recompute = least_recompute(options); smaller.recompute <= RECOMPUTE_BLOCK;
             smaller.recompute++) {
            CHECK(planned_bytes(cfg, &smaller) > free_bytes,
                  "the run needs %.1f MiB of GPU memory, %.1f are free; --batch %d --recompute %d%s fits",
                  (double)wanted / (1 << 20), (double)free_bytes / (1 << 20), smaller.batch,
                  smaller.recompute, has_more ? " --logits-chunk auto" : "");
        }
    }
    CHECK(0,
          "the run needs %.1f MiB of GPU memory, %.1f are free: too little even for --batch 1 --recompute 3",
          (double)wanted / (1 << 20), (double)free_bytes / (1 << 20));
}

// GELU inside a forward product takes values before they are rounded; computed again, it takes rounded ones.
// So the levels that compute GELU alone again keep it out of the forward products. Its derivative is always
// taken at rounded values.
static GeluFusion gelu_fusion(const Options* o) {
    const int gelu_again = o->recompute == RECOMPUTE_GELU || o->recompute == RECOMPUTE_NORMS;
    const int forward = o->gelu_fusion >= 1 && !gelu_again, backward = o->gelu_fusion >= 2;
    return (GeluFusion)((forward ? GELU_FUSED_FORWARD : 0) | (backward ? GELU_FUSED_BACKWARD : 0));
}

// --gpu-report: opens the management library for the GPU of the run, or prints why there will be no report.
static void open_gpu_report(GPT2* model, const Options* options) {
    char bus_id[32];
    if (options->gpu_report == 0) {
        return;
    }
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), options->device));
    model->has_nvml = nvml_open(&model->nvml, bus_id);
    if (!model->has_nvml) {
        printf("no GPU report: %s\n", model->nvml.reason);
    }
}

// The places of tensors in memory, and the bytes it takes.
static void place_tensors(GPT2* model, const ZeroPlan* zero, const Options* o) {
    const size_t element_bytes = dtype_bytes(model->grad_dtype);
    gpt2_sharded_rows_of(model->parameter_rows, model->cfg, sizeof(floatX), zero->size);
    model->parameter_bytes = zero_params_elements(zero, ZERO_BLOCKS_IN_MEMORY) * sizeof(floatX);
    gpt2_sharded_rows_of(model->gradient_rows, model->cfg, element_bytes, zero->size);
    model->gradient_bytes = zero_grads_elements(zero, ZERO_BLOCKS_IN_MEMORY) * element_bytes;
    model->state_bytes = zero_state_rows(model->state_rows, zero, model->cfg);
    model->activation_bytes = planned_activations(model->activation_rows, model->cfg, o);
    model->elements = zero_full_elements(zero);
}

// The optimizer's state and master weights, all zero: on the GPU or offloaded.
static void open_state(GPT2* model, const ZeroPlan* zero, const Options* o) {
    const size_t owned = zero_owned_elements(zero);
    model->has_master = has_master(o);
    if (o->offload_optimizer) {
        const char* directory = o->offload_optimizer == OFFLOAD_DISK ? o->offload_path : NULL;
        offload_open(&model->offload, owned, model->has_master, directory);
        if (directory && !scratch_is_direct(model->offload.disk)) {
            printf("note: %s takes no direct I/O: the optimizer's state passes through the page cache\n",
                   directory);
        }
        return;
    }
    model->state_memory = gpu_alloc(model->state_bytes, 1, "optimizer state");
    gpt2_state_bind(&model->state, model->state_rows, model->state_memory);
    if (model->has_master) {
        model->master = (float*)gpu_alloc(owned, sizeof(float), "master weights");
    }
}

// One allocation for each kind of tensor.
static void open_tensors(GPT2* model, const ZeroPlan* zero, const Options* o) {
    place_tensors(model, zero, o);
    model->params_memory = gpu_alloc(model->parameter_bytes, 1, "parameters");
    model->grads_memory = gpu_alloc(model->gradient_bytes, 1, "gradients");
    open_state(model, zero, o);
    if (o->offload_residuals) {
        offload_residuals_open(&model->residuals, model->cfg.L, residual_bytes(model->cfg, o));
    }
    model->acts_memory = gpu_alloc(model->activation_bytes, 1, "activations");
    tensor_rows_bind(&model->params, model->parameter_rows, GPT2_PARAMETER_ROWS, model->params_memory);
    tensor_rows_bind(&model->acts, model->activation_rows, GPT2_ACTIVATION_ROWS, model->acts_memory);
}

static size_t result_bytes(int64_t losses) { return sizeof(StepResult) + (size_t)losses * sizeof(double); }

// Room for what an update tells the host.
static void open_results(GPT2* model, const Options* o) {
    model->max_losses = micro_batches(o) > 1 ? micro_batches(o) : 1; // a validation has one, too
    model->result = (StepResult*)gpu_alloc(1, result_bytes(model->max_losses), "results");
    CUDA_CHECK(cudaMallocHost((void**)&model->result_host, result_bytes(model->max_losses)));
}

// Memory for the model; all parameters are zero. After this only the first save and the timing of algorithms
// allocate memory.
static void gpt2_open(GPT2* model, GPT2Config cfg, const Options* o, Comm* comm) {
    const size_t N = (size_t)o->batch * o->seq_len;
    const ZeroPlan zero = zero_plan(cfg, o->zero, comm->rank, comm->size);
    require_memory(cfg, o);
    memset((void*)model, 0, sizeof(*model));
    model->cfg = cfg;
    model->B = o->batch;
    model->T = o->seq_len;
    model->recompute = (RecomputeLevel)o->recompute;
    model->chunk = planned_chunk(o);
    model->autotune = o->autotune;
    model->use_graph = o->graph;
    model->seed = o->seed;
    model->grad_dtype = planned_gradients(o);
    model->comm = comm;
    gpu_open(&model->gpu, o->device);
    open_tensors(model, &zero, o);
    const Gradient grads = {model->grads_memory, model->grad_dtype};
    zero_open(&model->zero, zero, o->offload_params ? ZERO_SHARDS_ON_HOST : ZERO_SHARDS_ON_GPU,
              model->params_memory, DTYPE_OF(floatX), grads, comm, &model->gpu);

    const MatmulSettings settings = {o->tf32, gelu_fusion(o), o->bias_fusion, o->autotune};
    batch_queue_open(&model->batches, N, &model->gpu);
    matmul_gpu_open(&model->matmul, &model->gpu, settings);
    if (o->autotune && comm->rank == 0) {
        matmul_gpu_open_cache(&model->matmul);
    }
    if (o->autotune && comm->size > 1) {
        matmul_gpu_share_plans(&model->matmul, comm);
    }
    attention_gpu_open<floatX>(&model->attention, model->B, model->T, cfg.C, cfg.NH);
    layernorm_open(&model->layernorm, (int)N, cfg.C);
    encoder_open(&model->encoder, (int)N, cfg.Vp, cfg.C);
    adamw_open(&model->adamw, &zero, model->parameter_rows);
    gradient_norm_open(&model->norm, zero_sharded_elements(&zero));
    open_results(model, o);
    CUDA_CHECK(cudaMallocHost((void**)&model->logits_pinned, (size_t)cfg.Vp * sizeof(floatX)));
    model->logits_host = (float*)check_alloc((size_t)cfg.Vp, sizeof(float), "logits of a token");
    open_gpu_report(model, o);
}

static void close_save_copy(GPT2* model) {
    if (model->is_pinned) {
        CUDA_CHECK(cudaFreeHost(model->save_copy));
    } else {
        free(model->save_copy);
    }
}

static void gpt2_close(GPT2* model) {
    zero_wait_for_parameters(&model->zero);
    CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream)); // cudaFree waits, too, but undocumented
    for (int variant = 0; variant < ZERO_VARIANTS; variant++) {
        if (model->graphs[variant].graph) {
            CUDA_CHECK(cudaGraphExecDestroy(model->graphs[variant].graph));
        }
    }
    if (model->has_nvml) {
        nvml_close(&model->nvml);
    }
    close_save_copy(model);
    free(model->logits_host);
    CUDA_CHECK(cudaFreeHost(model->logits_pinned));
    CUDA_CHECK(cudaFreeHost(model->result_host));
    gpu_free(model->result);
    gradient_norm_close(&model->norm);
    adamw_close(&model->adamw);
    encoder_close(&model->encoder);
    layernorm_close(&model->layernorm);
    attention_gpu_close(&model->attention);
    matmul_gpu_close(&model->matmul);
    batch_queue_close(&model->batches);
    zero_close(&model->zero);
    gpu_free(model->acts_memory);
    offload_residuals_close(&model->residuals);
    if (model->offload.slots) {
        offload_close(&model->offload);
    }
    gpu_free(model->master);
    gpu_free(model->state_memory);
    gpu_free(model->grads_memory);
    gpu_free(model->params_memory);
    gpu_close(&model->gpu);
}

// All parameters, seen from layer l: .qkvw is layer l's.
static GPT2Parameters parameters_at_layer(const GPT2* model, int l) {
    return gpt2_parameters_at_layer(model->params, model->parameter_rows,
                                    zero_parameter_layer(&model->zero.plan, l));
}

// All gradients, seen from layer l: .qkvw is layer l's.
static GPT2Gradients gradients_at_layer(const GPT2* model, int l) {
    const TensorRow* row = model->gradient_rows;
    GPT2Gradients grads;
    const int at = zero_gradient_layer(&model->zero.plan, l);
#define GRADIENT_SET_MEMBER(name, ...)                                                                       \
    grads.name.data = tensor_at_layer(row++, model->grads_memory, at);                                       \
    grads.name.dtype = model->grad_dtype;
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

// The residual stream that enters block l, (N, C).
static floatX* residual_into(const GPT2* model, int l) {
    return l == 0 ? model->acts.encoded
                  : gpt2_activations_at_layer(model->acts, model->activation_rows, l - 1).residual3;
}

// Block l up to the hidden layer of the MLP, for the tokens first ... T-1 of each sequence; N of them. With
// first > 0 (only if B = 1) the queries, keys and values of earlier tokens are still in memory. The batch, here
// and below, is one of gpt2_push.
static void block_hidden(GPT2* model, int l, Batch batch, int first) {
    const Gpu* gpu = &model->gpu;
    const int B = batch.B, T = batch.T, C = model->cfg.C, N = B * (T - first);
    const int F = gpt2_hidden(model->cfg), QKV = gpt2_qkv_size(model->cfg);
    const GPT2Parameters p = parameters_at_layer(model, l);
    const GPT2Activations all = gpt2_activations_at_layer(model->acts, model->activation_rows, l);
    const GPT2Activations a = gpt2_activations_at_token(all, model->activation_rows, first);
    const floatX* residual = residual_into(model, l) + (size_t)first * C; // (N, C)
    // ln1 (N, C), its mean and rstd (N)
    layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, residual, p.ln1w, p.ln1b, N, C, gpu);
    // qkv (N, QKV) = ln1 qkvw^T + qkvb, with qkvw (QKV, C)
    matmul_forward(a.qkv, a.ln1, p.qkvw, p.qkvb, N, C, QKV, &model->matmul);
    // atty (B, T, C), att_lse (B, NH, T)
    attention_forward(all.atty, all.att_lse, all.qkv, batch.starts, B, T, first, C, model->cfg.NH,
                      &model->attention, gpu);
    // residual2 (N, C) = residual + atty attprojw^T + attprojb, with attprojw (C, C)
    matmul_forward_residual(a.residual2, residual, a.atty, p.attprojw, p.attprojb, N, C, C, &model->matmul);
    // ln2 (N, C)
    layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w, p.ln2b, N, C, gpu);
    // fch (N, F) = ln2 fcw^T + fcb, with fcw (F, C); fch_gelu (N, F)
    matmul_forward_gelu(a.fch_gelu, a.fch, a.ln2, p.fcw, p.fcb, N, C, F, &model->matmul);
}

// Sets the last hidden state, lnf, of the tokens first ... T-1 of each sequence; N of them.
static void gpt2_forward(GPT2* model, Batch batch, int first) {
    const GPT2Config cfg = model->cfg;
    const int B = batch.B, T = batch.T, C = cfg.C, F = gpt2_hidden(cfg), N = B * (T - first);
    assert(B <= model->B && T <= model->T && (first == 0 || B == 1));
    // Only the products of full micro-batches are worth timing.
    model->matmul.settings.autotune = model->autotune && B == model->B && T == model->T && first == 0;
    const GPT2Activations a = gpt2_activations_at_token(model->acts, model->activation_rows, first);
    zero_begin_forward(&model->zero);
    // encoded (N, C)
    encoder_forward(a.encoded, batch.inputs + first, model->params.wte, model->params.wpe, B, T - first,
                    first, C, &model->gpu);
    for (int l = 0; l < cfg.L; l++) {
        zero_parameters(&model->zero, l, 1);
        const GPT2Parameters p = parameters_at_layer(model, l);
        const GPT2Activations layer = gpt2_activations_at_layer(a, model->activation_rows, l);
        block_hidden(model, l, batch, first);
        // residual3 (N, C) = residual2 + fch_gelu fcprojw^T + fcprojb, with fcprojw (C, F)
        offload_residual_wait(&model->residuals, l - OFFLOAD_RESIDUALS, &model->gpu);
        matmul_forward_residual(layer.residual3, layer.residual2, layer.fch_gelu, p.fcprojw, p.fcprojb, N, F,
                                C, &model->matmul);
        offload_residual_out(&model->residuals, l, layer.residual3, (size_t)N * C * sizeof(floatX),
                             &model->gpu);
    }
    const floatX* residual = residual_into(model, cfg.L) + (size_t)first * C; // (N, C)
    layernorm_forward(a.lnf, a.lnf_mean, a.lnf_rstd, residual, model->params.lnfw, model->params.lnfb, N, C,
                      &model->gpu);
}

// Sets the logits (count, Vp) of `count` tokens, at most a chunk, from their hidden state: the tokens `first`,
// first + 1, ... of the batch.
static void gpt2_logits(GPT2* model, int first, int count) {
    const int C = model->cfg.C;
    matmul_forward(model->acts.logits, model->acts.lnf + (size_t)first * C, model->params.wte,
                   (const floatX*)NULL, count, C, model->cfg.Vp, &model->matmul);
}

// Sets the losses (N), chunk by chunk, without gradients. After gpt2_forward on the same batch.
static void classifier_losses(GPT2* model, Batch batch) {
    const int N = batch.B * batch.T, chunk = model->chunk;
    for (int n = 0; n < N; n += chunk) {
        const int count = n + chunk < N ? chunk : N - n;
        gpt2_logits(model, n, count);
        classifier_loss(model->acts.losses + n, model->acts.logits, batch.targets + n, count, model->cfg.V,
                        model->cfg.Vp, &model->gpu);
    }
}

// Appends the sum of the losses of a batch to the results, on the GPU.
static void batch_loss(GPT2* model, Batch batch) {
    sum_losses(model->result->losses, &model->result->count, model->acts.losses, batch.B * batch.T,
               &model->gpu);
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// Computes again what the forward pass did not keep of block l: the same operations on the same inputs give
// the same bits.
static void block_recompute(GPT2* model, int l, Batch batch) {
    const Gpu* gpu = &model->gpu;
    const int C = model->cfg.C, F = gpt2_hidden(model->cfg), N = batch.B * batch.T;
    const GPT2Parameters p = parameters_at_layer(model, l);
    const GPT2Activations a = gpt2_activations_at_layer(model->acts, model->activation_rows, l);
    if (model->recompute == RECOMPUTE_BLOCK) {
        block_hidden(model, l, batch, 0);
        return;
    }
    if (model->recompute == RECOMPUTE_NORMS) {
        layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, residual_into(model, l), p.ln1w, p.ln1b, N, C, gpu);
        layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w, p.ln2b, N, C, gpu);
    }
    if (model->recompute >= RECOMPUTE_GELU) {
        gelu_forward(a.fch_gelu, a.fch, (size_t)N * F, gpu);
    }
}

// A linear layer without its bias: dinp (N, C) is set; dweight (OC, C) is set or added to. dout is (N, OC),
// inp (N, C), weight (OC, C). The gradient of a bias is summed where dout is made.
static void linear_backward(GPT2* model, floatX* dinp, Gradient dweight, const floatX* dout,
                            const floatX* inp, const floatX* weight, int N, int C, int OC,
                            GradientMode mode) {
    matmul_backward_weight(dweight, dout, inp, N, C, OC, mode, &model->matmul);
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
    block_recompute(model, l, batch);

    // the MLP: dfch (N, F), and the gradient of fcb (F)
    matmul_backward_weight(d.fcprojw, dresidual, a.fch_gelu, N, F, C, mode, &model->matmul);
    matmul_backward_input_gelu(a.dfch, d.fcb, dresidual, p.fcprojw, a.fch, N, F, C, mode, &model->matmul);
    linear_backward(model, dln2, d.fcw, a.dfch, a.ln2, p.fcw, N, C, F, mode);
    // dresidual, and its column sums: the gradient of attprojb (C)
    layernorm_backward(dresidual, d.ln2w, d.ln2b, d.attprojb, dln2, a.residual2, p.ln2w, a.ln2_mean,
                       a.ln2_rstd, N, C, GRADIENT_ADD, mode, &model->layernorm, gpu);

    // attention: dqkv (N, QKV), and the gradient of qkvb (QKV)
    linear_backward(model, datty, d.attprojw, dresidual, a.atty, p.attprojw, N, C, C, mode);
    attention_backward(a.dqkv, d.qkvb, datty, a.qkv, a.atty, a.att_lse, batch.starts, B, T, C, model->cfg.NH,
                       mode, &model->attention, gpu);
    linear_backward(model, dln1, d.qkvw, a.dqkv, a.ln1, p.qkvw, N, C, QKV, mode);
    // dresidual, and the gradient of fcprojb (C) of the block before
    if (l > 0) {
        zero_wait_for_buffer(&model->zero, l - 1);
    }
    layernorm_backward(dresidual, d.ln1w, d.ln1b, bias_grad_into(model, l), dln1, residual_into(model, l),
                       p.ln1w, a.ln1_mean, a.ln1_rstd, N, C, GRADIENT_ADD, mode, &model->layernorm, gpu);
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
// dloss is the gradient of the loss of each token. The gradients of a block are reduced as soon as they are there.
static void gpt2_backward(GPT2* model, Batch batch, float dloss, GradientMode mode, ZeroStep step) {
    const GPT2Config cfg = model->cfg;
    const int B = batch.B, T = batch.T, C = cfg.C, N = B * T;
    const GPT2Activations a = model->acts;
    const GPT2Parameters p = model->params;
    const GPT2Gradients d = gradients_at_layer(model, 0);
    floatX* dlnf = a.branch; // (N, C)
    classifier_gradients(model, dlnf, batch, dloss, mode);
    layernorm_backward(a.dresidual, d.lnfw, d.lnfb, bias_grad_into(model, cfg.L), dlnf,
                       residual_into(model, cfg.L), p.lnfw, a.lnf_mean, a.lnf_rstd, N, C, GRADIENT_SET, mode,
                       &model->layernorm, &model->gpu);
    fetch_residual(model, cfg.L, batch);
    for (int l = cfg.L - 1; l >= 0; l--) {
        zero_parameters(&model->zero, l, -1);
        offload_residual_wait(&model->residuals, l - 1, &model->gpu);
        block_backward(model, l, batch, mode);
        fetch_residual(model, l, batch);
        zero_group_done<floatX>(&model->zero, 1 + l, step);
    }
    encoder_backward(d.wte, d.wpe, a.dresidual, batch.inputs, B, T, cfg.max_T, C, mode, &model->encoder,
                     &model->gpu);
}

// ---- a micro-step

// Before the first micro-step of an update, and before a batch of a validation.
static void gpt2_clear_result(GPT2* model) {
    CUDA_CHECK(cudaMemsetAsync(&model->result->count, 0, sizeof(model->result->count), model->gpu.stream));
}

static void micro_step_work(GPT2* model, Batch batch, float dloss, ZeroStep step) {
    const int adds = step.micro_step > 0 && model->zero.plan.stage < 2;
    zero_begin(&model->zero, step);
    gpt2_forward(model, batch, 0);
    gpt2_backward(model, batch, dloss, adds ? GRADIENT_ADD : GRADIENT_SET, step);
    batch_loss(model, batch);
    zero_join(&model->zero, step);
}

// Captures the work as a graph instead of doing it.
static cudaGraphExec_t micro_step_capture(GPT2* model, Batch batch, float dloss, ZeroStep step) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CUDA_CHECK(cudaStreamBeginCapture(model->gpu.stream, cudaStreamCaptureModeThreadLocal));
    micro_step_work(model, batch, dloss, step);
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
        micro_step_work(model, batch, dloss, step);
    } else {
        micro_step_replay(model, batch, dloss, step);
    }
    zero_group_done<floatX>(&model->zero, 0, step);
}

// Chooses the algorithms of all products of a full micro-batch, with any tokens. Several processes choose
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
    zero_wait_for_gradient(&model->zero);
    CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream)); // as in gpt2_evaluate
    model->has_products = 1;
    free(tokens);
}

// ---- the gradient of an update

// Waits for the GPU, once a step: for the losses of the micro-steps and the square sum of the gradient.
static const StepResult* gpt2_read_result(GPT2* model, int64_t losses) {
    assert(losses <= model->max_losses);
    CUDA_CHECK(cudaMemcpyAsync(model->result_host, model->result, result_bytes(losses),
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
    BatchGradient gradient = {{0, 0}, 0, 0};
    int64_t batches = 0; // of this process
    gpt2_clear_result(model);
    for (ZeroStep step = zero_step(sequences, model->B, model->comm->size, 0); step.active > 0;
         step = zero_step(sequences, model->B, model->comm->size, step.micro_step + 1)) {
        const Batch next = dataloader_next(train), batch = next.B > 0 ? gpt2_push(model, next) : next;
        losses[step.micro_step] = 0;
        batches += batch.B > 0;
        gpt2_micro_step(model, batch, dloss, step, train->is_full);
        batch_gradient_add(&gradient, model->cfg, batch);
        comm_alive(model->comm);
    }
    gpt2_square_sum(model);
    const StepResult* result = gpt2_read_result(model, batches);
    matmul_gpu_keep_cache(&model->matmul);
    group_gpu_check(&model->zero.group);
    memcpy(losses, result->losses, (size_t)batches * sizeof(double));
    gradient.square_sum = result->square_sum;
    return gradient;
}

// ---------------------------------------------------------------------------------------------------------------------
// Update

// One update of what this process updates; `adamw.weight_decay` applies to tensors that decay.
static void gpt2_update(GPT2* model, AdamW adamw) {
    const AdamWUpdate<floatX> update = {(floatX*)zero_update_parameters(&model->zero),
                                        model->master,
                                        zero_update_gradient(&model->zero),
                                        model->state.m,
                                        model->state.v,
                                        &model->adamw,
                                        adamw,
                                        model->seed};
    if (model->offload.slots) {
        offload_adamw_update(&model->offload, update, &model->gpu);
    } else {
        adamw_update(update, &model->gpu);
    }
    zero_gather_parameters(&model->zero);
}

// ---------------------------------------------------------------------------------------------------------------------
// Evaluation and sampling

// Forward: returns the sum of the losses; of an empty batch, too: then only its part of what others do.
static double gpt2_evaluate(GPT2* model, Batch batch) {
    if (batch.B == 0) {
        zero_idle_forward(&model->zero);
        CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream)); // as the others wait: the next message is MPI's
        return 0;
    }
    batch = gpt2_push(model, batch);
    gpt2_clear_result(model);
    gpt2_forward(model, batch, 0);
    classifier_losses(model, batch);
    batch_loss(model, batch);
    return gpt2_read_result(model, 1)->losses[0];
}

// The logits (Vp) of the next token, for the generator. A model that recomputes whole blocks keeps no keys and
// values, and reads all tokens again.
static const float* gpt2_next_logits(void* model_, const int* ids, int known, int seen) {
    GPT2* model = (GPT2*)model_;
    const int Vp = model->cfg.Vp;
    const Batch batch = {ids, NULL, NULL, 1, known, 0};
    gpt2_forward(model, gpt2_push(model, batch), model->recompute == RECOMPUTE_BLOCK ? 0 : seen);
    gpt2_logits(model, known - 1, 1);
    CUDA_CHECK(cudaMemcpyAsync(model->logits_pinned, model->acts.logits, (size_t)Vp * sizeof(floatX),
                               cudaMemcpyDeviceToHost, model->gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream));
    for (int v = 0; v < Vp; v++) {
        model->logits_host[v] = to_float(model->logits_pinned[v]);
    }
    return model->logits_host;
}

// ---------------------------------------------------------------------------------------------------------------------
// Weights and checkpoints

// Copies from the host to the GPU, or to pinned memory, and waits.
static void upload(const GPT2* model, void* to, const void* from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, model->gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream));
}

// Copies from the GPU to the host, and waits.
static void download(const GPT2* model, void* to, const void* from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, model->gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream));
}

// Sets the optimizer's state from the host, where the state rows lay it out.
static void upload_state(GPT2* model, const void* state) {
    if (model->offload.slots) {
        offload_write(&model->offload, state, 0, model->state_bytes);
    } else {
        upload(model, model->state_memory, state, model->state_bytes);
    }
}

// The first `bytes` of it: all of it, or nothing.
static void download_state(GPT2* model, void* state, size_t bytes) {
    if (model->offload.slots) {
        offload_read(&model->offload, state, 0, bytes);
    } else {
        download(model, state, model->state_memory, bytes);
    }
}

// Sets the master weights, if there are any, to `own`: what this process updates.
static void upload_master(GPT2* model, const float* own, size_t bytes) {
    if (model->has_master && model->offload.slots) {
        offload_write(&model->offload, own, offload_state_bytes(&model->offload), bytes);
    } else if (model->has_master) {
        upload(model, model->master, own, bytes);
    }
}

// Sets the parameters, and the master weights, from fp32 values on the host, laid out by the parameter rows.
static void gpt2_upload(GPT2* model, const float* values) {
    const ZeroPlan* zero = &model->zero.plan;
    const size_t owned = zero_owned_elements(zero), count = zero->stage < 3 ? model->elements : owned;
    float* own = (float*)check_alloc(owned, sizeof(float), "copy of the parameters");
    floatX* narrow = (floatX*)check_alloc(count, sizeof(floatX), "copy of the parameters");
    zero_copy_owned(zero, own, values, DTYPE_FP32);
    for (size_t i = 0; i < count; i++) {
        narrow[i] = from_float<floatX>(zero->stage < 3 ? values[i] : own[i]);
    }
    zero_wait_for_parameters(&model->zero);
    upload_master(model, own, owned * sizeof(float));
    upload(model, zero_update_parameters(&model->zero), narrow, count * sizeof(floatX));
    zero_gather_parameters(&model->zero);
    free(narrow);
    free(own);
}

// Copies the weights that are saved, master weights if there are any, to the host: to `full`, laid out by the parameter
// rows, of rank 0. Collective. `room` is for what this process updates of them, as fp32; NULL if that goes nowhere.
static void download_weights(GPT2* model, void* full, float* room) {
    zero_wait_for_parameters(&model->zero);
    if (model->has_master) {
        float* owned = !model->offload.slots ? model->master
                       : room                ? offload_master(&model->offload, room)
                                             : NULL;
        zero_collect(&model->zero, full, owned, DTYPE_FP32);
    } else if (model->zero.params_shard) {
        zero_collect(&model->zero, full, model->zero.params_shard, DTYPE_OF(floatX));
    } else if (full) {
        download(model, full, model->params_memory, model->parameter_bytes);
    }
}

// The parameters as fp32 on the host of rank 0, laid out by the parameter rows. The caller frees them. NULL in other
// processes.
static float* gpt2_download(GPT2* model) {
    float* values = NULL;
    if (model->comm->rank == 0) {
        values = (float*)check_alloc(model->elements, sizeof(float), "copy of the parameters");
    }
    if (model->has_master) {
        float* room = (float*)check_alloc(zero_owned_elements(&model->zero.plan), sizeof(float),
                                          "copy of the parameters");
        download_weights(model, values, room);
        free(room);
        return values;
    }
    floatX* narrow = (floatX*)check_alloc(model->elements, sizeof(floatX), "copy of the parameters");
    download_weights(model, values ? narrow : NULL, NULL);
    for (size_t i = 0; values && i < model->elements; i++) {
        values[i] = to_float(narrow[i]);
    }
    free(narrow);
    return values;
}

// From the file, or random.
static void gpt2_first_weights(GPT2* model, const char* path, uint64_t seed) {
    TensorRow rows[GPT2_PARAMETER_ROWS];
    gpt2_sharded_rows_of(rows, model->cfg, sizeof(float), model->comm->size);
    float* values = (float*)check_alloc(model->elements, sizeof(float), "copy of the parameters");
    setup_weights(values, model->cfg, rows, path, seed);
    gpt2_upload(model, values);
    gpt2_choose_products(model);
    free(values);
}

// Sets weights and optimizer state from a checkpoint.
static void gpt2_read_checkpoint(GPT2* model, const char* path, const SavedState* saved) {
    TensorRow rows[GPT2_PARAMETER_ROWS];
    gpt2_sharded_rows_of(rows, model->cfg, sizeof(float), model->comm->size);
    float* values = (float*)check_alloc(model->elements, sizeof(float), "copy of the parameters");
    void* state = check_alloc(model->state_bytes, 1, "copy of the optimizer state");
    char error[ERROR_BYTES];
    checkpoint_read(saved, path, model->cfg, rows, values, &model->zero.plan, state);
    if (model->autotune && !matmul_gpu_load_plans(&model->matmul, path, error)) {
        printf("note: %s; timing the matrix products again\n", error);
    }
    gpt2_upload(model, values);
    gpt2_choose_products(model);
    upload_state(model, state);
    free(state);
    free(values);
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

// Copies what this process saves to the host: the optimizer's state; the weights to that of rank 0.
static int gpt2_copy_out(GPT2* model, Checkpoints* copy) {
    const size_t bytes = copy->params_bytes + copy->optimizer_bytes;
    if (!model->save_copy && bytes > 0) {
        open_save_copy(model, bytes);
    }
    checkpoint_copy_at(copy, model->save_copy);
    float* room = copy->optimizer_bytes > 0 ? (float*)copy->optimizer : NULL; // the state comes later
    download_weights(model, copy->params_bytes > 0 ? copy->params : NULL, room);
    download_state(model, copy->optimizer, copy->optimizer_bytes);
    return 1;
}

// The algorithms of the products, so that a resumed run has the same ones.
static void save_products(const void* model, const char* directory) {
    matmul_gpu_save_plans(&((const GPT2*)model)->matmul, directory);
}

// Collective; rank 0 writes.
static void gpt2_export(GPT2* model, const Options* options, const RunData* data) {
    if (options->export_llmc[0] || options->export_gguf[0]) {
        TensorRow rows[GPT2_PARAMETER_ROWS];
        gpt2_sharded_rows_of(rows, model->cfg, sizeof(float), model->comm->size);
        float* values = gpt2_download(model);
        if (values) {
            setup_export(model->cfg, rows, values, options, data);
        }
        free(values);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The trainer

// What a run on the GPU can take; without such a GPU there is no limit.
static size_t memory_limit(int device) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || device >= count) {
        cudaGetLastError(); // clears the error: a plan needs no GPU
        return SIZE_MAX;
    }
    return free_memory(device);
}

// Decides --recompute auto and prints why: the lowest level that fits into the GPU's memory.
static void choose_recompute(GPT2Config cfg, Options* options, size_t limit) {
    options->recompute = least_recompute(options);
    if (options->recompute == RECOMPUTE_BLOCK) {
        printf("recompute: level %d, for --offload-residuals\n", options->recompute);
        return;
    }
    while (options->recompute < RECOMPUTE_BLOCK && planned_bytes(cfg, options) > limit) {
        options->recompute++;
    }
    if (limit == SIZE_MAX) {
        printf("recompute: level 0, assuming that it fits: no GPU to check\n");
    } else {
        printf("recompute: level %d, the lowest that fits into %.1f MiB of free GPU memory\n",
               options->recompute, (double)limit / (1 << 20));
    }
}

// Decides --logits-chunk auto and prints it: all tokens of a micro-batch, half of them, a quarter ... With
// fewer chunks, fewer products read and write the gradient of the embedding, and round it.
static void choose_chunk(GPT2Config cfg, Options* options, size_t limit) {
    const int least = least_chunk(cfg, options);
    options->logits_chunk = INT_MAX;
    const int N = planned_chunk(options);
    options->logits_chunk = N;
    for (int parts = 2; options->logits_chunk > least && planned_bytes(cfg, options) > limit; parts *= 2) {
        options->logits_chunk = ceil_div(N, parts) > least ? ceil_div(N, parts) : least;
    }
    printf("logits: %d tokens at a time, %s\n", options->logits_chunk,
           options->logits_chunk == N ? "the whole micro-batch"
                                      : "the largest chunk that fits into GPU memory");
}

// Decides what is auto because it depends on the GPU's memory: recomputation first, since it costs more than
// chunks do.
static void choose_memory(GPT2Config cfg, Options* options) {
    const int recompute_is_auto = options->recompute == OPTION_AUTO,
              chunk_is_auto = options->logits_chunk == OPTION_AUTO;
    if (!recompute_is_auto && !chunk_is_auto) {
        return;
    }
    const size_t limit = memory_limit(options->device);
    options->logits_chunk = chunk_is_auto ? least_chunk(cfg, options) : options->logits_chunk;
    if (recompute_is_auto) {
        choose_recompute(cfg, options, limit);
    }
    if (chunk_is_auto) {
        choose_chunk(cfg, options, limit);
    }
}

// Decides --device auto.
static void choose_device(Options* options, const Comm* comm) {
    if (comm->size > 1 && options->device != OPTION_AUTO) {
        die_usage("--device %d is for one process; %d take one GPU each", options->device, comm->size);
    }
    if (options->device == OPTION_AUTO) {
        options->device = comm->size > 1 ? gpu_device_of_rank(comm, OPTION_AUTO) : 0;
    }
}

static void make_plan(TrainerPlan* plan, GPT2Config cfg, Options* o, const Comm* comm) {
    choose_device(o, comm);
    choose_memory(cfg, o);
    gpt2_parameter_rows(plan->parameters, cfg);
    planned_activations(plan->activations, cfg, o);
    memory_plan(plan->memory, cfg, o);
    plan->peak =
        gpu_peak_or_default(plan->device, sizeof(plan->device), o->device, DTYPE_OF(floatX), o->tf32);
}

static void print_device(const GPT2* model, double peak) {
    const Gpu* gpu = &model->gpu;
    printf("%s (sm_%d%d), %s, peak %.0f TFLOP/s\n", gpu->name, gpu->major, gpu->minor,
           dtype_name(DTYPE_OF(floatX)), peak * 1e-12);
    if (attention_note(&model->attention)[0]) {
        printf("attention: %s\n", attention_note(&model->attention));
    }
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

// Only fp16 needs a loss scale.
static LossScale first_loss_scale(void) {
    return DTYPE_OF(floatX) == DTYPE_FP16 ? loss_scale_open() : loss_scale_off();
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
    first_loss_scale,           // loss_scale
    gpt2_gradients,             // gradients
    gpt2_update,                // update
    report_gpu,                 // report
    NULL,                       // validates_first
    gpt2_evaluate,              // evaluate
    gpt2_next_logits,           // next_logits
    gpt2_first_weights,         // first_weights
    gpt2_read_checkpoint,       // read_checkpoint
    saved_dtype,                // saved_dtype
    gpt2_copy_out,              // copy_out
    save_products,              // save_extra
};

#ifndef TRAIN_GPT2_NO_MAIN
int main(int argc, char** argv) { return run_main(argc, argv, &trainer); }
#endif
