/*
train_gpt2.cu -- pretrains GPT-2 and GPT-3 class models on a GPU. Top to bottom: the model, forward, backward,
update, evaluation, the training loop, main; the same order and names as train_gpt2.c, its reference. The
operations and everything that is not the model are modules in llmc/.

    make train_gpt2cu PRECISION=BF16|FP16|FP32 && ./train_gpt2cu         ./train_gpt2cu --help lists the rest

Weights, activations and their gradients are floatX: bf16, fp16 or fp32. Norms, softmax, losses, sums and the
optimizer's state are fp32.
*/
#include "llmc/precision.cuh"

#include "llmc/adamw.cuh"
#include "llmc/attention.cuh"
#include "llmc/batch_queue.cuh"
#include "llmc/classifier.cuh"
#include "llmc/encoder.cuh"
#include "llmc/gelu.cuh"
#include "llmc/gpt2.h"
#include "llmc/layernorm.cuh"
#include "llmc/matmul.cuh"
#include "llmc/data/dataloader.h"
#include "llmc/run/checkpoint.h"
#include "llmc/run/generator.h"
#include "llmc/run/gpu_report.cuh"
#include "llmc/run/guard.h"
#include "llmc/run/log.h"
#include "llmc/run/loss_scale.h"
#include "llmc/run/nvml.h"
#include "llmc/run/options.h"
#include "llmc/run/plan.h"
#include "llmc/run/run.h"
#include "llmc/run/schedule.h"
#include "llmc/run/session.h"
#include "llmc/run/setup.h"

// ---------------------------------------------------------------------------------------------------------------------
// The model

// What is read back after an update: pinned on the host, and on the GPU.
typedef struct {
    double square_sum; // of the gradient
    float loss;        // mean
} StepResult;

// A micro-step as one CUDA graph, made from the second time on that it is done: the first one chooses
// algorithms and loads kernels.
typedef struct {
    int times[2];      // that it was done: without documents, with them
    float dloss;       // the scale of the losses' gradient, for which it was made
    const int* starts; // and whether it stays inside of documents
    cudaGraphExec_t graph;
} MicroStepGraph;

typedef struct {
    GPT2Config cfg;
    int B, T;         // micro-batches up to B sequences of up to T tokens
    int recompute;    // level, 0 to 3: which activations the backward pass computes again
    int chunk;        // tokens of any batch whose logits are in memory at a time
    int autotune;     // time algorithms of products
    int use_graph;    // replay micro-steps
    DType grad_dtype; // of the parameters' gradients
    uint64_t seed;    // of stochastic rounding
    Gpu gpu;
    TensorRow parameter_rows[GPT2_PARAMETER_ROWS], activation_rows[GPT2_ACTIVATION_ROWS];
    size_t parameter_bytes, activation_bytes;
    size_t elements; // of all parameters, with alignment: grads, master, m and v have as many

    void *params_memory, *grads_memory, *acts_memory; // one allocation each, cut up by the rows
    float *master, *m, *v;                            // master is NULL without master weights
    GPT2Parameters params;
    GPT2Activations acts;

    AdamWSegments segments; // the parameter rows as ranges of elements
    BatchQueue batches;
    MatmulGpu matmul;
    AttentionGpu attention;
    LayernormGpu layernorm;
    EncoderGpu encoder;
    GradientNorm norm;
    LossScale loss_scale;
    MicroStepGraph graphs[2]; // of GRADIENT_SET, of GRADIENT_ADD
    StepResult *result, *result_host;
    floatX* logits_pinned; // (Vp) of one token, and the same as fp32
    float* logits_host;
    void* save_copy; // what a checkpoint is written from: NULL before the first
    int is_pinned;
} GPT2;

static AdamWSegments parameter_segments(const TensorRow* rows) {
    AdamWSegments segments;
    memset(&segments, 0, sizeof(segments));
    segments.count = GPT2_PARAMETER_ROWS;
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        segments.start[i] = rows[i].offset_bytes / rows[i].element_bytes;
        segments.end[i] = segments.start[i] + tensor_elements(&rows[i]);
        segments.decay[i] = rows[i].decay;
    }
    return segments;
}

// The type of the weights that a checkpoint holds: master weights where there are some.
static SafeTensorsDtype checkpoint_dtype(const Options* o) {
    const int is_fp32 = DTYPE_OF(floatX) == DTYPE_FP32 || o->master_weights;
    return is_fp32 ? SAFETENSORS_F32 : DTYPE_OF(floatX) == DTYPE_FP16 ? SAFETENSORS_F16 : SAFETENSORS_BF16;
}

// The tokens of a classifier's chunk: a batch smaller than a micro-batch need not have smaller ones.
static int planned_chunk(const Options* o) {
    const int64_t N = (int64_t)o->batch * o->seq_len;
    return (int)(o->logits_chunk < N ? o->logits_chunk : N);
}

static size_t planned_activations(TensorRow* rows, GPT2Config cfg, const Options* o) {
    return gpt2_activation_rows(rows, cfg, o->batch, o->seq_len, o->recompute, (size_t)planned_chunk(o));
}

// The large allocations, before any is made; the list ends with a name of NULL.
static void memory_plan(PlanMemory plan[PLAN_KINDS], GPT2Config cfg, const Options* o) {
    TensorRow rows[GPT2_PARAMETER_ROWS], activations[GPT2_ACTIVATION_ROWS];
    const size_t params = gpt2_parameter_rows(rows, cfg), fp32 = params / sizeof(floatX) * sizeof(float);
    const PlanMemory kinds[PLAN_KINDS] = {
        {"parameters", params, 0},
        {"gradients", o->gradients ? fp32 : params, 0},
        {"master weights", sizeof(floatX) < 4 && o->master_weights ? fp32 : 0, 0},
        {"AdamW m", fp32, 0},
        {"v", fp32, 0},
        {"activations", planned_activations(activations, cfg, o), 0},
        {"cuBLASLt workspace", matmul_planned_bytes(o->device), 0},
        {"attention", attention_planned_bytes(o->batch, o->seq_len, cfg.NH, DTYPE_OF(floatX)), 0},
        {"pinned copy to save", o->out[0] ? checkpoints_bytes(cfg, checkpoint_dtype(o)) : 0, 1},
        {NULL, 0, 0}};
    memcpy(plan, kinds, sizeof(kinds));
}

// GELU inside a forward product takes values that were not yet rounded; what is computed again starts from
// rounded ones. So levels 1 and 2, which compute GELU again alone, keep it out of the forward products. Its
// derivative is always taken at rounded values.
static GeluFusion gelu_fusion(const Options* o) {
    const int gelu_again = o->recompute == 1 || o->recompute == 2;
    const int forward = o->gelu_fusion >= 1 && !gelu_again, backward = o->gelu_fusion >= 2;
    return (GeluFusion)((forward ? GELU_FUSED_FORWARD : 0) | (backward ? GELU_FUSED_BACKWARD : 0));
}

// Memory for the model; all parameters are zero. Nothing is allocated after this but what is tuned and saved
// for the first time.
static void gpt2_open(GPT2* model, GPT2Config cfg, const Options* o) {
    const size_t N = (size_t)o->batch * o->seq_len;
    memset((void*)model, 0, sizeof(*model));
    model->cfg = cfg;
    model->B = o->batch;
    model->T = o->seq_len;
    model->recompute = o->recompute;
    model->chunk = planned_chunk(o);
    model->autotune = o->autotune;
    model->use_graph = o->graph;
    model->seed = o->seed;
    model->grad_dtype = o->gradients ? DTYPE_FP32 : DTYPE_OF(floatX);
    gpu_open(&model->gpu, o->device);
    model->parameter_bytes = gpt2_parameter_rows(model->parameter_rows, cfg);
    model->activation_bytes = planned_activations(model->activation_rows, cfg, o);
    model->elements = model->parameter_bytes / sizeof(floatX);
    model->params_memory = gpu_alloc(model->parameter_bytes, 1, "parameters");
    model->grads_memory = gpu_alloc(model->elements, dtype_bytes(model->grad_dtype), "gradients");
    model->m = (float*)gpu_alloc(model->elements, sizeof(float), "optimizer state m");
    model->v = (float*)gpu_alloc(model->elements, sizeof(float), "optimizer state v");
    if (sizeof(floatX) < sizeof(float) && o->master_weights) {
        model->master = (float*)gpu_alloc(model->elements, sizeof(float), "master weights");
    }
    model->acts_memory = gpu_alloc(model->activation_bytes, 1, "activations");
    tensor_rows_bind(&model->params, model->parameter_rows, GPT2_PARAMETER_ROWS, model->params_memory);
    tensor_rows_bind(&model->acts, model->activation_rows, GPT2_ACTIVATION_ROWS, model->acts_memory);
    model->segments = parameter_segments(model->parameter_rows);

    const MatmulSettings settings = {o->tf32, gelu_fusion(o), o->bias_fusion, o->autotune};
    batch_queue_open(&model->batches, N, &model->gpu);
    matmul_gpu_open(&model->matmul, &model->gpu, settings);
    if (o->autotune) {
        matmul_gpu_open_cache(&model->matmul);
    }
    attention_gpu_open<floatX>(&model->attention, model->B, model->T, cfg.C, cfg.NH);
    layernorm_open(&model->layernorm, (int)N, cfg.C);
    encoder_open(&model->encoder, (int)N, cfg.Vp, cfg.C);
    gradient_norm_open(&model->norm, model->segments);
    model->loss_scale = DTYPE_OF(floatX) == DTYPE_FP16 ? loss_scale_open() : loss_scale_off();
    model->result = (StepResult*)gpu_alloc(1, sizeof(StepResult), "results");
    CUDA_CHECK(cudaMallocHost((void**)&model->result_host, sizeof(StepResult)));
    CUDA_CHECK(cudaMallocHost((void**)&model->logits_pinned, (size_t)cfg.Vp * sizeof(floatX)));
    model->logits_host = (float*)check_alloc((size_t)cfg.Vp, sizeof(float), "logits of a token");
}

// At the first save: memory for its copy, pinned, for a copy at the speed of the bus; or pageable, where a
// machine or its limits do not allow so much.
static void open_save_copy(GPT2* model, Checkpoints* copy) {
    const size_t bytes = copy->params_bytes + 2 * copy->state_bytes;
    model->is_pinned = cudaMallocHost(&model->save_copy, bytes) == cudaSuccess;
    if (!model->is_pinned) {
        cudaGetLastError(); // forgotten
        printf("note: cannot pin %.1f MiB for the copy to save: copies are slower\n",
               (double)bytes / (1 << 20));
        model->save_copy = check_alloc(bytes, 1, "copy to save");
    }
    copy->params = model->save_copy;
    copy->m = (float*)((char*)model->save_copy + copy->params_bytes);
    copy->v = (float*)((char*)copy->m + copy->state_bytes);
}

static void close_save_copy(GPT2* model) {
    if (model->is_pinned) {
        CUDA_CHECK(cudaFreeHost(model->save_copy));
    } else {
        free(model->save_copy);
    }
}

static void gpt2_close(GPT2* model) {
    CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream)); // redundant: cudaFree waits, unpromised
    for (int mode = 0; mode < 2; mode++) {
        if (model->graphs[mode].graph) {
            CUDA_CHECK(cudaGraphExecDestroy(model->graphs[mode].graph));
        }
    }
    close_save_copy(model);
    free(model->logits_host);
    CUDA_CHECK(cudaFreeHost(model->logits_pinned));
    CUDA_CHECK(cudaFreeHost(model->result_host));
    gpu_free(model->result);
    gradient_norm_close(&model->norm);
    encoder_close(&model->encoder);
    layernorm_close(&model->layernorm);
    attention_gpu_close(&model->attention);
    matmul_gpu_close(&model->matmul);
    batch_queue_close(&model->batches);
    gpu_free(model->acts_memory);
    gpu_free(model->master);
    gpu_free(model->v);
    gpu_free(model->m);
    gpu_free(model->grads_memory);
    gpu_free(model->params_memory);
    gpu_close(&model->gpu);
}

// The gradient of a parameter.
static Gradient grad_of(const GPT2* model, const floatX* parameter) {
    const size_t element = (size_t)(parameter - (const floatX*)model->params_memory);
    const Gradient gradient = {(char*)model->grads_memory + element * dtype_bytes(model->grad_dtype),
                               model->grad_dtype};
    return gradient;
}

// Sets the parameters, and the master weights, from fp32 values on the host that lie as in the parameter
// rows.
static void gpt2_upload(GPT2* model, const float* values) {
    float* fp32 = model->master ? model->master : model->m; // m is still zero: borrowed, and cleared again
    const size_t bytes = model->elements * sizeof(float);
    CUDA_CHECK(cudaMemcpyAsync(fp32, values, bytes, cudaMemcpyHostToDevice, model->gpu.stream));
    params_from_master((floatX*)model->params_memory, fp32, model->segments, &model->gpu);
    if (fp32 == model->m) {
        CUDA_CHECK(cudaMemsetAsync(model->m, 0, bytes, model->gpu.stream));
    }
    CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream));
}

// The parameters as fp32 on the host, as in the parameter rows: the master weights if there are some. Free
// it.
static float* gpt2_download(const GPT2* model) {
    float* values = (float*)check_alloc(model->elements, sizeof(float), "copy of the parameters");
    if (model->master) {
        CUDA_CHECK(cudaMemcpyAsync(values, model->master, model->elements * sizeof(float),
                                   cudaMemcpyDeviceToHost, model->gpu.stream));
        CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream));
        return values;
    }
    floatX* narrow = (floatX*)check_alloc(model->elements, sizeof(floatX), "copy of the parameters");
    CUDA_CHECK(cudaMemcpyAsync(narrow, model->params_memory, model->elements * sizeof(floatX),
                               cudaMemcpyDeviceToHost, model->gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream));
    for (size_t i = 0; i < model->elements; i++) {
        values[i] = to_float(narrow[i]);
    }
    free(narrow);
    return values;
}

// Copies weights and optimizer state to the host, which need not wait for anything else.
static void gpt2_copy_out(GPT2* model, Checkpoints* copy) {
    if (!copy->params) {
        open_save_copy(model, copy);
    }
    const void* params = model->master ? (const void*)model->master : model->params_memory;
    const cudaStream_t stream = model->gpu.stream;
    CUDA_CHECK(cudaMemcpyAsync(copy->params, params, copy->params_bytes, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaMemcpyAsync(copy->m, model->m, copy->state_bytes, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaMemcpyAsync(copy->v, model->v, copy->state_bytes, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

// Sets weights and optimizer state from a checkpoint.
static void gpt2_read_checkpoint(GPT2* model, const char* path, const SavedState* saved) {
    TensorRow rows[GPT2_PARAMETER_ROWS];
    gpt2_parameter_rows_of(rows, model->cfg, sizeof(float));
    const size_t n = model->elements, bytes = n * sizeof(float);
    float* values = (float*)check_alloc(3 * n, sizeof(float), "copy of the checkpoint");
    char error[ERROR_BYTES];
    checkpoint_read(saved, path, model->cfg, rows, values, values + n, values + 2 * n);
    if (model->autotune && !matmul_gpu_load_plans(&model->matmul, path, error)) {
        printf("note: %s; products are measured anew\n", error);
    }
    gpt2_upload(model, values); // first: it borrows m
    CUDA_CHECK(cudaMemcpyAsync(model->m, values + n, bytes, cudaMemcpyHostToDevice, model->gpu.stream));
    CUDA_CHECK(cudaMemcpyAsync(model->v, values + 2 * n, bytes, cudaMemcpyHostToDevice, model->gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream));
    free(values);
}

// First weights: from the file, or random.
static void gpt2_first_weights(GPT2* model, const char* path, uint64_t seed) {
    TensorRow rows[GPT2_PARAMETER_ROWS];
    gpt2_parameter_rows_of(rows, model->cfg, sizeof(float));
    float* values = (float*)check_alloc(model->elements, sizeof(float), "copy of the parameters");
    setup_weights(values, model->cfg, rows, path, seed);
    gpt2_upload(model, values);
    free(values);
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// The residual stream that enters block l.
static floatX* residual_into(const GPT2* model, int l) {
    return l == 0 ? model->acts.encoded
                  : gpt2_activations_at_layer(model->acts, model->activation_rows, l - 1).residual3;
}

// Block l up to the MLP's hidden layer, for the tokens first ... T-1 of B sequences (first > 0 only with B =
// 1: the queries, keys and values of earlier tokens are then still there).
static void block_hidden(GPT2* model, int l, int B, int T, int first) {
    const Gpu* gpu = &model->gpu;
    const int C = model->cfg.C, N = B * (T - first);
    const GPT2Parameters p = gpt2_parameters_at_layer(model->params, model->parameter_rows, l);
    const GPT2Activations all = gpt2_activations_at_layer(model->acts, model->activation_rows, l);
    const GPT2Activations a = gpt2_activations_at_token(all, model->activation_rows, first);
    const floatX* residual = residual_into(model, l) + (size_t)first * C;
    layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, residual, p.ln1w, p.ln1b, N, C, gpu);
    matmul_forward(a.qkv, a.ln1, p.qkvw, p.qkvb, N, C, 3 * C, &model->matmul);
    attention_forward(all.atty, all.att_lse, all.qkv, model->batches.starts, B, T, first, C, model->cfg.NH,
                      &model->attention, gpu);
    matmul_forward_residual(a.residual2, residual, a.atty, p.attprojw, p.attprojb, N, C, C, &model->matmul);
    layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w, p.ln2b, N, C, gpu);
    matmul_forward_gelu(a.fch_gelu, a.fch, a.ln2, p.fcw, p.fcb, N, C, 4 * C, &model->matmul);
}

// Sets the last hidden state, lnf, of the tokens first ... T-1 of those in the batch queue.
static void gpt2_forward(GPT2* model, int B, int T, int first) {
    const GPT2Config cfg = model->cfg;
    const int C = cfg.C, N = B * (T - first);
    assert(B <= model->B && T <= model->T && (first == 0 || B == 1));
    // Only the products of full micro-batches are worth timing.
    model->matmul.settings.autotune = model->autotune && B == model->B && T == model->T && first == 0;
    const GPT2Activations a = gpt2_activations_at_token(model->acts, model->activation_rows, first);
    encoder_forward(a.encoded, model->batches.tokens + first, model->params.wte, model->params.wpe, B,
                    T - first, first, C, &model->gpu);
    for (int l = 0; l < cfg.L; l++) {
        const GPT2Parameters p = gpt2_parameters_at_layer(model->params, model->parameter_rows, l);
        const GPT2Activations layer = gpt2_activations_at_layer(a, model->activation_rows, l);
        block_hidden(model, l, B, T, first);
        matmul_forward_residual(layer.residual3, layer.residual2, layer.fch_gelu, p.fcprojw, p.fcprojb, N,
                                4 * C, C, &model->matmul);
    }
    const floatX* residual = residual_into(model, cfg.L) + (size_t)first * C;
    layernorm_forward(a.lnf, a.lnf_mean, a.lnf_rstd, residual, model->params.lnfw, model->params.lnfb, N, C,
                      &model->gpu);
}

// Sets the logits of `count` tokens, at most a chunk, from the hidden state of those that begin at token
// `first` of the batch.
static void gpt2_logits(GPT2* model, int first, int count) {
    const int C = model->cfg.C;
    matmul_forward(model->acts.logits, model->acts.lnf + (size_t)first * C, model->params.wte,
                   (const floatX*)NULL, count, C, model->cfg.Vp, &model->matmul);
}

// Sets, or adds, on the GPU, the sum of the losses of N tokens over the tokens of a full micro-batch: the
// mean, if they are one and all of its targets count.
static void batch_loss(GPT2* model, int N, GradientMode mode) {
    mean_loss(&model->result->loss, model->acts.losses, N, model->B * model->T, mode, &model->gpu);
}

// After gpt2_forward on the same batch: batch_loss, without gradients.
static void gpt2_loss(GPT2* model, int B, int T, GradientMode mode) {
    const int N = B * T, chunk = model->chunk;
    for (int n = 0; n < N; n += chunk) {
        const int count = n + chunk < N ? chunk : N - n;
        gpt2_logits(model, n, count);
        classifier_loss(model->acts.losses + n, model->acts.logits, model->batches.targets + n, count,
                        model->cfg.V, model->cfg.Vp, &model->gpu);
    }
    batch_loss(model, N, mode);
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// What the forward pass did not keep of block l, computed again: the same operations on the same inputs, so
// the same bits.
static void block_recompute(GPT2* model, int l, int B, int T) {
    const Gpu* gpu = &model->gpu;
    const int C = model->cfg.C, N = B * T;
    const GPT2Parameters p = gpt2_parameters_at_layer(model->params, model->parameter_rows, l);
    const GPT2Activations a = gpt2_activations_at_layer(model->acts, model->activation_rows, l);
    if (model->recompute == 3) {
        block_hidden(model, l, B, T, 0);
        return;
    }
    if (model->recompute == 2) {
        layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, residual_into(model, l), p.ln1w, p.ln1b, N, C, gpu);
        layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w, p.ln2b, N, C, gpu);
    }
    if (model->recompute >= 1) {
        gelu_forward(a.fch_gelu, a.fch, (size_t)N * 4 * C, gpu);
    }
}

// Of the bias of the projection into the stream that enters block l, which the embedding does not have. The
// gradient of a bias is made where that of its layer's result is: this one with dresidual.
static Gradient bias_grad_into(const GPT2* model, int l) {
    const Gradient none = {NULL, model->grad_dtype};
    return l == 0 ? none
                  : grad_of(model,
                            gpt2_parameters_at_layer(model->params, model->parameter_rows, l - 1).fcprojb);
}

// From the gradient of the stream after block l, in dresidual, to that of the stream before it, in place.
static void block_backward(GPT2* model, int l, int B, int T, GradientMode mode) {
    const Gpu* gpu = &model->gpu;
    const int C = model->cfg.C, N = B * T;
    const GPT2Parameters p = gpt2_parameters_at_layer(model->params, model->parameter_rows, l);
    const GPT2Activations a = gpt2_activations_at_layer(model->acts, model->activation_rows, l);
    block_recompute(model, l, B, T);

    matmul_backward_weight(grad_of(model, p.fcprojw), a.dresidual, a.fch_gelu, N, 4 * C, C, mode,
                           &model->matmul);
    matmul_backward_input_gelu(a.dfch, grad_of(model, p.fcb), a.dresidual, p.fcprojw, a.fch, N, 4 * C, C,
                               mode, &model->matmul);
    matmul_backward_weight(grad_of(model, p.fcw), a.dfch, a.ln2, N, C, 4 * C, mode, &model->matmul);
    matmul_backward_input(a.branch, a.dfch, p.fcw, N, C, 4 * C, &model->matmul);
    layernorm_backward(a.dresidual, grad_of(model, p.ln2w), grad_of(model, p.ln2b),
                       grad_of(model, p.attprojb), a.branch, a.residual2, p.ln2w, a.ln2_mean, a.ln2_rstd, N,
                       C, GRADIENT_ADD, mode, &model->layernorm, gpu);

    matmul_backward_weight(grad_of(model, p.attprojw), a.dresidual, a.atty, N, C, C, mode, &model->matmul);
    matmul_backward_input(a.branch, a.dresidual, p.attprojw, N, C, C, &model->matmul);
    attention_backward(a.dqkv, grad_of(model, p.qkvb), a.branch, a.qkv, a.atty, a.att_lse,
                       model->batches.starts, B, T, C, model->cfg.NH, mode, &model->attention, gpu);
    matmul_backward_weight(grad_of(model, p.qkvw), a.dqkv, a.ln1, N, C, 3 * C, mode, &model->matmul);
    matmul_backward_input(a.branch, a.dqkv, p.qkvw, N, C, 3 * C, &model->matmul);
    layernorm_backward(a.dresidual, grad_of(model, p.ln1w), grad_of(model, p.ln1b), bias_grad_into(model, l),
                       a.branch, residual_into(model, l), p.ln1w, a.ln1_mean, a.ln1_rstd, N, C, GRADIENT_ADD,
                       mode, &model->layernorm, gpu);
}

// The classifier and its gradients, chunk by chunk: sets the losses and, in `branch`, the gradient of lnf.
static void classifier_gradients(GPT2* model, int N, float dloss, GradientMode mode) {
    const GPT2Activations a = model->acts;
    const int C = model->cfg.C, V = model->cfg.V, Vp = model->cfg.Vp, chunk = model->chunk;
    for (int n = 0; n < N; n += chunk) {
        const int count = n + chunk < N ? chunk : N - n;
        const size_t at = (size_t)n * C;
        gpt2_logits(model, n, count);
        classifier_backward(a.losses + n, a.logits, model->batches.targets + n, dloss, count, V, Vp,
                            &model->gpu);
        matmul_backward_weight(grad_of(model, model->params.wte), a.logits, a.lnf + at, count, C, Vp,
                               n == 0 ? mode : GRADIENT_ADD, &model->matmul);
        matmul_backward_input(a.branch + at, a.logits, model->params.wte, count, C, Vp, &model->matmul);
    }
}

// After gpt2_forward on the same batch: sets the losses and sets or adds to all gradients, as `mode` says.
// The gradient of each token's loss is dloss.
static void gpt2_backward(GPT2* model, int B, int T, float dloss, GradientMode mode) {
    const GPT2Config cfg = model->cfg;
    const int C = cfg.C, N = B * T;
    const GPT2Activations a = model->acts;
    const GPT2Parameters p = model->params;
    classifier_gradients(model, N, dloss, mode);
    layernorm_backward(a.dresidual, grad_of(model, p.lnfw), grad_of(model, p.lnfb),
                       bias_grad_into(model, cfg.L), a.branch, residual_into(model, cfg.L), p.lnfw,
                       a.lnf_mean, a.lnf_rstd, N, C, GRADIENT_SET, mode, &model->layernorm, &model->gpu);
    for (int l = cfg.L - 1; l >= 0; l--) {
        block_backward(model, l, B, T, mode);
    }
    encoder_backward(grad_of(model, p.wte), grad_of(model, p.wpe), a.dresidual, model->batches.tokens, B, T,
                     cfg.max_T, C, mode, &model->encoder, &model->gpu);
}

// ---------------------------------------------------------------------------------------------------------------------
// A micro-step

static void micro_step_work(GPT2* model, int B, int T, float dloss, GradientMode mode) {
    gpt2_forward(model, B, T, 0);
    gpt2_backward(model, B, T, dloss, mode);
    batch_loss(model, B * T, mode);
}

// Captures the work as a graph instead of doing it.
static cudaGraphExec_t micro_step_capture(GPT2* model, int B, int T, float dloss, GradientMode mode) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CUDA_CHECK(cudaStreamBeginCapture(model->gpu.stream, cudaStreamCaptureModeThreadLocal));
    micro_step_work(model, B, T, dloss, mode);
    CUDA_CHECK(cudaStreamEndCapture(model->gpu.stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    return executable;
}

// Forward and backward on the batch in the queue: sets the gradients and the loss, or adds to them.
static void gpt2_micro_step(GPT2* model, int B, int T, float dloss, GradientMode mode) {
    MicroStepGraph* step = &model->graphs[mode];
    const int is_full = B == model->B && T == model->T; // only those come again and again, and have a graph
    int* times = &step->times[model->batches.starts != NULL];
    if (!model->use_graph || !is_full || (*times)++ == 0) {
        micro_step_work(model, B, T, dloss, mode);
        return;
    }
    if (step->graph && (step->dloss != dloss || step->starts != model->batches.starts)) {
        CUDA_CHECK(cudaGraphExecDestroy(step->graph));
        step->graph = NULL;
    }
    if (!step->graph) {
        step->graph = micro_step_capture(model, B, T, dloss, mode);
        step->dloss = dloss;
        step->starts = model->batches.starts;
    }
    CUDA_CHECK(cudaGraphLaunch(step->graph, model->gpu.stream));
}

// ---------------------------------------------------------------------------------------------------------------------
// Update

// The only wait of a step: for its loss, and for the square sum of the gradient.
static StepResult gpt2_read_result(GPT2* model) {
    CUDA_CHECK(cudaMemcpyAsync(model->result_host, model->result, sizeof(StepResult), cudaMemcpyDeviceToHost,
                               model->gpu.stream));
    CUDA_CHECK(cudaStreamSynchronize(model->gpu.stream));
    return *model->result_host;
}

static Gradient all_gradients(const GPT2* model) {
    return grad_of(model, (const floatX*)model->params_memory);
}

// One AdamW update of every tensor; `adamw.grad_scale` applies to gradients as they are in memory.
static void gpt2_update(GPT2* model, AdamW adamw) {
    adamw_update((floatX*)model->params_memory, model->master, all_gradients(model), model->m, model->v,
                 model->segments, adamw, model->seed, &model->gpu);
}

// ---------------------------------------------------------------------------------------------------------------------
// Batches and sampling

// The next batch, on its way to the GPU.
static Batch push_batch(GPT2* model, Dataloader* loader) {
    const Batch batch = dataloader_next(loader);
    batch_queue_push(&model->batches, batch.inputs, batch.targets, batch.starts, (size_t)batch.B * batch.T);
    return batch;
}

// The logits of the next token, for the generator; level 3 of --recompute keeps no keys and values.
static const float* next_logits(void* model_, const int* ids, int known, int seen) {
    GPT2* model = (GPT2*)model_;
    const int Vp = model->cfg.Vp;
    batch_queue_push(&model->batches, ids, NULL, NULL, (size_t)known);
    gpt2_forward(model, 1, known, model->recompute == 3 ? 0 : seen);
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
// The training loop

typedef struct {
    GPT2* model;
    const Options* options;
    Dataloader *train, *val; // NULL where there is no data
    Generator* generator;
    RunLog* log;
    Session* session;
    RunState state;
    int validates_first; // before the first update, too
    double step_s;       // what the last step took
    double peak;         // FLOP/s
    Nvml nvml;
    int has_nvml;
    int has_listed; // which algorithms the products have
} Run;

// What the micro-batches of an update give together.
typedef struct {
    double loss;  // mean over the targets that count
    double norm;  // of its gradient,
    double scale; // which is what is in memory times this
    double flops; // of the tokens that were computed
} BatchGradient;

// One micro-batch after another: sets the gradients of the whole batch, times the loss scale, and their
// square sum.
static BatchGradient accumulate_gradients(GPT2* model, Dataloader* train, const Options* o) {
    const int64_t micro_steps = o->total_batch / ((int64_t)train->B * train->T);
    const float dloss = (float)(model->loss_scale.scale / (double)o->total_batch);
    double counted = 0, flops = 0;
    for (int64_t micro = 0; micro < micro_steps; micro++) {
        const Batch batch = push_batch(model, train);
        gpt2_micro_step(model, batch.B, batch.T, dloss, micro == 0 ? GRADIENT_SET : GRADIENT_ADD);
        flops += gpt2_flops_per_token(model->cfg, batch.T) * batch.B * batch.T;
        counted += batch.counted;
    }
    gradient_square_sum<floatX>(&model->result->square_sum, all_gradients(model), model->segments,
                                &model->norm, &model->gpu);
    const StepResult result = gpt2_read_result(model);
    matmul_gpu_keep_cache(&model->matmul);
    const double factor = targets_factor((double)o->total_batch, counted),
                 scale = factor / model->loss_scale.scale;
    const BatchGradient gradient = {result.loss / (double)micro_steps * factor,
                                    sqrt(result.square_sum) * scale, scale, flops};
    return gradient;
}

// Copies all that the run is, and starts to save the copy.
static void save(Run* run) {
    Checkpoints* copy = &run->session->checkpoints;
    session_wait(run->session, run->log);
    gpt2_copy_out(run->model, copy);
    run->state.sequence = run->train ? (int64_t)run->train->next : 0;
    run->state.samples_at = (int64_t)run->generator->rng.at;
    run->state.loss_scale = run->model->loss_scale;
    log_sync(run->log);
    checkpoint_start(copy, &run->state);
}

// Puts the run where it was when the checkpoint was made.
static void restore(Run* run, const char* path, const SavedState* saved) {
    gpt2_read_checkpoint(run->model, path, saved);
    run_state_restore(&run->state, &saved->run);
    run->model->loss_scale = run->state.loss_scale;
    if (run->train) {
        dataloader_seek(run->train, (uint64_t)saved->run.sequence);
    }
    rand_seek(&run->generator->rng, (uint64_t)saved->run.samples_at);
}

// Back to the last good checkpoint, and on with the data that comes after the bad batches.
static void go_back(Run* run, const char* reason) {
    SavedState saved;
    char path[PATH_MAX];
    const uint64_t next = run->train->next;
    const int64_t from = run->state.step;
    session_go_back(run->session, reason, path, &saved);
    restore(run, path, &saved);
    state_close(&saved);
    dataloader_seek(run->train, next);
    log_rollback(run->log, from, run->state.step, reason);
}

// Halves the loss scale if the gradient overflowed, which is no fault of the run as long as it can; returns
// whether that explains it.
static int overflowed(Run* run, int64_t step, double loss, double norm) {
    LossScale* scale = &run->model->loss_scale;
    const float before = scale->scale;
    loss_scale_update(scale, isfinite(norm));
    if (isfinite(norm) || !isfinite(loss) || scale->scale == before) {
        return 0;
    }
    char reason[64];
    snprintf(reason, sizeof(reason), "gradient overflow: loss scale %g, was %g", scale->scale, before);
    log_skip(run->log, step, reason);
    return 1;
}

// Ends the program because a file of the data has changed under the run, after saving what it was before.
static void end_by_bad_data(Run* run, const char* error) {
    if (session_is_unsaved(run->session, &run->state)) {
        save(run);
    }
    session_wait(run->session, run->log);
    CHECK(0, "%s", error);
}

// One update, or none if the loss or the norm forbids it.
static void run_step(Run* run) {
    const Options* o = run->options;
    RunState* state = &run->state;
    const double start_s = time_now_s();
    char reason[256];
    if (o->overfit) {
        dataloader_seek(run->train, 0);
    }
    const uint64_t first = run->train->next;
    const BatchGradient gradient = accumulate_gradients(run->model, run->train, o);
    if (dataloader_error(run->train)) {
        dataloader_seek(run->train, first);
        end_by_bad_data(run, dataloader_error(run->train));
    }
    const double loss = gradient.loss, norm = gradient.norm;
    AdamW adamw = setup_adamw(o, state->step, state->updates + 1, norm);
    adamw.grad_scale *= (float)gradient.scale;
    const int overflow = overflowed(run, state->step + 1, loss, norm); // which is no matter for the guard
    const UpdateVerdict verdict = overflow ? UPDATE_DO : guard_check(&state->guard, loss, norm);
    if (verdict == UPDATE_DO && !overflow) {
        gpt2_update(run->model, adamw);
        state->updates++;
    }
    state->step++;
    state->stage = STAGE_UPDATED;
    state->tokens += o->total_batch;
    run->step_s = time_now_s() - start_s;
    log_data_wait(run->log, run->train->wait_s);
    log_train(run->log, state->step, loss, guard_shown_z(&state->guard, state->guard.loss_z), norm,
              guard_shown_z(&state->guard, state->guard.norm_z), adamw.lr, run->step_s * 1e3,
              gradient.flops / run->step_s / run->peak);
    if (verdict != UPDATE_DO) {
        log_skip(run->log, state->step, guard_reason(verdict));
    }
    if (session_diverged(run->session, run->log, state, reason)) {
        go_back(run, reason);
    }
}

// --gpu-report: opens the management library for the GPU of the run, or says why there will be no report.
static void open_gpu_report(Run* run) {
    char bus_id[32];
    if (run->options->gpu_report == 0) {
        return;
    }
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), run->options->device));
    run->has_nvml = nvml_open(&run->nvml, bus_id);
    if (!run->has_nvml) {
        printf("no GPU report: %s\n", run->nvml.reason);
    }
}

static void report_gpu(Run* run, int64_t step) {
    char line[256];
    if (!schedule_due(run->options->gpu_report, step, run->options->steps)) {
        return;
    }
    if (!run->has_listed) {
        run->has_listed = 1;
        matmul_gpu_report(stdout, &run->model->matmul);
    }
    if (run->has_nvml && nvml_line(&run->nvml, line, sizeof(line))) {
        printf("%s\n", line);
    }
}

// Sets *loss to the mean over the first micro-batches of the validation data, in order. Returns 0 if a signal
// stopped it.
static int evaluate(Run* run, double* loss) {
    GPT2* model = run->model;
    const int64_t batches = setup_eval_batches(run->options, run->val);
    double counted = 0;
    dataloader_seek(run->val, 0);
    for (int64_t i = 0; i < batches; i++) {
        if (signals_stop()) {
            return 0;
        }
        log_progress(run->log, run->state.step, "validating", i, batches);
        const Batch batch = push_batch(model, run->val);
        counted += batch.counted;
        gpt2_forward(model, batch.B, batch.T, 0);
        gpt2_loss(model, batch.B, batch.T, i == 0 ? GRADIENT_SET : GRADIENT_ADD);
    }
    if (dataloader_error(run->val)) {
        end_by_bad_data(run, dataloader_error(run->val));
    }
    *loss = gpt2_read_result(model).loss / (double)batches *
            targets_factor((double)batches * model->B * model->T, counted);
    return 1;
}

// What is due between two updates, besides saving. Ends early when a signal asks the run to stop.
static void evaluate_and_sample(Run* run) {
    RunState* state = &run->state;
    if (run->val && session_validation_is_due(run->session, state, run->validates_first)) {
        if (!evaluate(run, &state->val_loss)) {
            return;
        }
        log_val(run->log, state->step, state->val_loss);
    }
    state->stage = state->stage == STAGE_UPDATED ? (int64_t)STAGE_VALIDATED : state->stage;
    if (session_samples_are_due(run->session, state) &&
        !generator_log(run->generator, run->log, state->step)) {
        return;
    }
    state->stage = STAGE_SAMPLED;
}

// The run, to its end or until it has to stop; returns whether it is at its end.
static int train(Run* run) {
    for (;;) {
        evaluate_and_sample(run);
        const int next = session_next(run->session, &run->state, run->step_s);
        session_report(run->session, run->log);
        if (next & SESSION_SAVE) {
            save(run);
        }
        if (next & SESSION_STOP || run->state.step >= run->options->steps) {
            session_wait(run->session, run->log);
            return !(next & SESSION_STOP);
        }
        run_step(run);
        report_gpu(run, run->state.step);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// main

static size_t planned_bytes(GPT2Config cfg, const Options* options) {
    PlanMemory memory[PLAN_KINDS];
    memory_plan(memory, cfg, options);
    return plan_bytes(memory) + plan_bytes(memory) / 50; // modules' working memory
}

static size_t free_memory(int device) {
    size_t free_bytes = 0, total_bytes = 0;
    CUDA_CHECK(cudaSetDevice(device));
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    return free_bytes;
}

// What a run on the GPU can take; without such a GPU there is no limit.
static size_t memory_limit(int device) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || device >= count) {
        cudaGetLastError(); // forgotten: a plan needs no GPU
        return SIZE_MAX;
    }
    return free_memory(device);
}

// Decides --recompute auto, and says why: the lowest level with which the run fits into the GPU's memory.
static void choose_recompute(GPT2Config cfg, Options* options, size_t limit) {
    options->recompute = 0;
    while (options->recompute < 3 && planned_bytes(cfg, options) > limit) {
        options->recompute++;
    }
    if (limit == SIZE_MAX) {
        printf("recompute: level 0, as long as it fits: there is no such GPU here to ask\n");
    } else {
        printf("recompute: level %d, the lowest that fits into %.1f MiB of free GPU memory\n",
               options->recompute, (double)limit / (1 << 20));
    }
}

// The least that --logits-chunk auto takes: smaller chunks save little memory.
static int least_chunk(GPT2Config cfg, const Options* o) {
    return (int)gpt2_classifier_chunk(cfg, (size_t)o->batch * (size_t)o->seq_len);
}

// Decides --logits-chunk auto, and says so: all tokens of a micro-batch, half of them, a quarter ... In fewer
// chunks, fewer products read and write the gradient of the embedding, and round it.
static void choose_chunk(GPT2Config cfg, Options* options, size_t limit) {
    const int least = least_chunk(cfg, options);
    options->logits_chunk = INT_MAX;
    const int N = planned_chunk(options);
    options->logits_chunk = N;
    for (int parts = 2; options->logits_chunk > least && planned_bytes(cfg, options) > limit; parts *= 2) {
        options->logits_chunk = ceil_div(N, parts) > least ? ceil_div(N, parts) : least;
    }
    printf("logits: of %d tokens at a time, %s\n", options->logits_chunk,
           options->logits_chunk == N ? "a whole micro-batch"
                                      : "the largest part of a micro-batch that fits");
}

// Decides what is auto because it depends on the GPU's memory: recomputation first, which costs more than
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

// --plan: what the run would take, without taking it, on a machine that need not have a GPU.
static void print_plan(GPT2Config cfg, const Options* asked) {
    Options chosen = *asked;
    const Options* options = &chosen;
    choose_memory(cfg, &chosen);
    TensorRow parameters[GPT2_PARAMETER_ROWS], activations[GPT2_ACTIVATION_ROWS];
    PlanMemory memory[PLAN_KINDS];
    char device[256];
    gpt2_parameter_rows(parameters, cfg);
    planned_activations(activations, cfg, options);
    memory_plan(memory, cfg, options);
    const double peak =
        gpu_peak_or_default(device, sizeof(device), options->device, DTYPE_OF(floatX), options->tf32);
    plan_print(stdout, cfg, options, parameters, activations, memory, peak, device);
}

// Ends the program if the run does not fit into the GPU's memory, with the largest micro-batch that does, and
// the lowest level of recomputation that allows it.
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
        for (smaller.recompute = 0; smaller.recompute <= 3; smaller.recompute++) {
            CHECK(planned_bytes(cfg, &smaller) > free_bytes,
                  "the run takes %.1f MiB of GPU memory, %.1f are free; --batch %d --recompute %d%s fits",
                  (double)wanted / (1 << 20), (double)free_bytes / (1 << 20), smaller.batch,
                  smaller.recompute, has_more ? " --logits-chunk auto" : "");
        }
    }
    CHECK(0,
          "the run takes %.1f MiB of GPU memory, %.1f are free: too little even with --batch 1 --recompute 3",
          (double)wanted / (1 << 20), (double)free_bytes / (1 << 20));
}

// What the run is about: data, GPU, and what can be reached.
static void print_facts(const GPT2* model, const RunData* data, double peak, double floor) {
    const Gpu* gpu = &model->gpu;
    setup_print_data(stdout, data);
    printf("%s (sm_%d%d), %s, peak %.0f TFLOP/s\n", gpu->name, gpu->major, gpu->minor,
           dtype_name(DTYPE_OF(floatX)), peak * 1e-12);
    if (attention_note(&model->attention)[0]) {
        printf("attention: %s\n", attention_note(&model->attention));
    }
    if (isfinite(floor)) {
        printf(
            "floor: the entropy of the validation stories is %.4f nats per token; no model can do better\n",
            floor);
    }
    fflush(stdout); // the first step may take long
}

static void export_model(const GPT2* model, const Options* options, const RunData* data) {
    if (options->export_llmc[0] || options->export_gguf[0]) {
        TensorRow rows[GPT2_PARAMETER_ROWS];
        gpt2_parameter_rows_of(rows, model->cfg, sizeof(float));
        float* values = gpt2_download(model);
        setup_export(model->cfg, rows, values, options, data);
        free(values);
    }
}

#define TRAINER_NAME "GPU " PRECISION_NAME

// The run itself. Returns its exit status.
static int run_training(RunStart* start) {
    const Options* options = &start->options;
    const GPT2Config cfg = start->cfg;
    char program[128];
    RunLog log;
    GPT2 model;
    PlanMemory memory[PLAN_KINDS];
    Dataloader train_loader, val_loader;
    Generator generator;
    Session session;
    const int has_data = setup_has_data(&start->data);
    choose_memory(cfg, &start->options);
    memory_plan(memory, cfg, options);
    plan_print_memory(stdout, cfg, memory);
    require_memory(cfg, options);
    if (has_data) {
        setup_loaders(&train_loader, &val_loader, &start->data, options);
    }
    gpt2_open(&model, cfg, options);
    generator_open(&generator, next_logits, &model, cfg.V, options->seq_len, &start->data, options);
    const SafeTensorsDtype dtype = checkpoint_dtype(options);
    const CheckpointRun checkpoint_run = {TRAINER_NAME,
                                          cfg,
                                          dtype,
                                          generator.eot,
                                          setup_saved_tokenizer(&start->data),
                                          start->data.train.tokens,
                                          start->data.train.fingerprint,
                                          matmul_gpu_save_plans,
                                          &model.matmul};
    session_open(&session, options, &start->resume, checkpoint_run, NULL, start->start_s);
    const int64_t eval_batches = has_data ? setup_eval_batches(options, &val_loader) : 0;
    const double floor = setup_floor(&start->data, options, eval_batches);
    const double peak = gpu_peak_flops_per_s(&model.gpu, DTYPE_OF(floatX), options->tf32);
    print_facts(&model, &start->data, peak, floor);

    Run run;
    memset((void*)&run, 0, sizeof(run));
    run.model = &model;
    run.options = options;
    run.train = has_data ? &train_loader : NULL;
    run.val = has_data ? &val_loader : NULL;
    run.generator = &generator;
    run.log = &log;
    run.session = &session;
    run.state = run_state_open(guard_open(options->skip_loss_z, options->skip_grad_z), model.loss_scale);
    run.validates_first = 1;
    run.peak = peak;
    open_gpu_report(&run);
    if (start->resume.is_active) {
        restore(&run, start->resume.path, &start->resume.saved);
    } else {
        gpt2_first_weights(&model, start->model_path, options->seed);
    }
    options_version(program, sizeof(program), options, "train_gpt2cu");
    const LogIdentity who = {program, TRAINER_NAME, model.gpu.name};
    session_begin(&session, &start->resume, &run.state, &log, who);
    const int is_done = train(&run);
    if (is_done) {
        export_model(&model, options, &start->data);
        log_summary(&log, options->steps, run.state.val_loss, floor, gpu_peak_mib());
    } else {
        session_stopped(&session, &log, &run.state);
    }
    const int is_saved = session.can_save;

    if (run.has_nvml) {
        nvml_close(&run.nvml);
    }
    session_close(&session);
    generator_close(&generator);
    gpt2_close(&model);
    if (has_data) {
        dataloader_close(&val_loader);
        dataloader_close(&train_loader);
    }
    log_close(&log);
    if (!is_done && !is_saved) {
        signals_end_now();
    }
    return is_done ? EXIT_SUCCESS : EXIT_INTERRUPTED;
}

// The program. Returns its exit status.
static int trainer(int argc, char** argv) {
    return start_run(argc, argv, options_program(OPTION_GPU), TRAINER_NAME, print_plan, run_training);
}

#ifndef TRAIN_GPT2_NO_MAIN
int main(int argc, char** argv) {
    file_open_standard();
    signals_open();
    return trainer(argc, argv);
}
#endif
