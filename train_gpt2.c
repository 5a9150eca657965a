/*
train_gpt2.c -- pretrains GPT-2 and GPT-3 class models on the CPU in fp32: usable by itself, and the reference
that the GPU trainer is checked against. Top to bottom: the model, forward, backward, update, evaluation,
sampling, the training loop, main. The operations and everything that is not the model are modules in llmc/.

    make train_gpt2 && ./train_gpt2            trains on built-in stories; ./train_gpt2 --help lists the rest
*/
#include "llmc/adamw.h"
#include "llmc/attention.h"
#include "llmc/classifier.h"
#include "llmc/encoder.h"
#include "llmc/gelu.h"
#include "llmc/gpt2.h"
#include "llmc/layernorm.h"
#include "llmc/matmul.h"
#include "llmc/base/threads.h"
#include "llmc/run/checkpoint.h"
#include "llmc/run/generator.h"
#include "llmc/run/guard.h"
#include "llmc/run/log.h"
#include "llmc/run/options.h"
#include "llmc/run/peak.h"
#include "llmc/run/plan.h"
#include "llmc/run/run.h"
#include "llmc/run/session.h"
#include "llmc/run/setup.h"

// ---------------------------------------------------------------------------------------------------------------------
// The model

typedef struct {
    GPT2Config cfg;
    int B, T;      // micro-batches up to B sequences of up to T tokens
    int recompute; // level, 0 to 3: which activations the backward pass computes again
    TensorRow parameter_rows[GPT2_PARAMETER_ROWS], activation_rows[GPT2_ACTIVATION_ROWS];
    size_t parameter_bytes, activation_bytes;

    void *params_memory, *grads_memory, *m_memory, *v_memory,
        *acts_memory; // one allocation each, cut up by the rows
    GPT2Parameters params, grads;
    GPT2Activations acts;

    MatmulScratch matmul;
    AttentionScratch attention;
    double* norm_partial; // sums of squares of blocks of the gradient
} GPT2;

// Memory for the model; all parameters are zero. Nothing is allocated after this.
static void gpt2_open(GPT2* model, GPT2Config cfg, int B, int T, int recompute) {
    memset(model, 0, sizeof(*model));
    model->cfg = cfg;
    model->B = B;
    model->T = T;
    model->recompute = recompute;
    model->parameter_bytes = gpt2_parameter_rows(model->parameter_rows, cfg);
    model->activation_bytes = gpt2_activation_rows(model->activation_rows, cfg, B, T, recompute,
                                                   gpt2_classifier_chunk(cfg, (size_t)B * (size_t)T));
    model->params_memory = check_alloc(model->parameter_bytes, 1, "parameters");
    model->grads_memory = check_alloc(model->parameter_bytes, 1, "gradients");
    model->m_memory = check_alloc(model->parameter_bytes, 1, "optimizer state m");
    model->v_memory = check_alloc(model->parameter_bytes, 1, "optimizer state v");
    model->acts_memory = check_alloc(model->activation_bytes, 1, "activations");
    tensor_rows_bind(&model->params, model->parameter_rows, GPT2_PARAMETER_ROWS, model->params_memory);
    tensor_rows_bind(&model->grads, model->parameter_rows, GPT2_PARAMETER_ROWS, model->grads_memory);
    tensor_rows_bind(&model->acts, model->activation_rows, GPT2_ACTIVATION_ROWS, model->acts_memory);
    matmul_open(&model->matmul);
    attention_open(&model->attention, T, cfg.C / cfg.NH);
    model->norm_partial =
        (double*)check_alloc(model->parameter_bytes / GRADIENT_BLOCK + 1, sizeof(double), "gradient norm");
}

static void gpt2_close(GPT2* model) {
    free(model->norm_partial);
    attention_close(&model->attention);
    matmul_close(&model->matmul);
    free(model->acts_memory);
    free(model->v_memory);
    free(model->m_memory);
    free(model->grads_memory);
    free(model->params_memory);
}

static float* row_tensor(const TensorRow* row, void* memory) {
    return (float*)((char*)memory + row->offset_bytes);
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// The residual stream that enters block l.
static float* residual_into(const GPT2* model, int l) {
    return l == 0 ? model->acts.encoded
                  : gpt2_activations_at_layer(model->acts, model->activation_rows, l - 1).residual3;
}

// Block l up to the MLP's hidden layer, for the tokens first ... T-1 of B sequences (first > 0 only with B =
// 1: the queries, keys and values of earlier tokens are then still there). `starts` is as in attention.h.
static void block_hidden(GPT2* model, int l, const int* starts, int B, int T, int first) {
    const int C = model->cfg.C, N = B * (T - first);
    const GPT2Parameters p = gpt2_parameters_at_layer(model->params, model->parameter_rows, l);
    const GPT2Activations all = gpt2_activations_at_layer(model->acts, model->activation_rows, l);
    const GPT2Activations a = gpt2_activations_at_token(all, model->activation_rows, first);
    const float* residual = residual_into(model, l) + (size_t)first * C;
    layernorm_forward_cpu(a.ln1, a.ln1_mean, a.ln1_rstd, residual, p.ln1w, p.ln1b, N, C);
    matmul_forward_cpu(a.qkv, a.ln1, p.qkvw, p.qkvb, N, C, 3 * C, &model->matmul);
    attention_forward_cpu(all.atty, all.att_lse, all.qkv, starts, B, T, first, C, model->cfg.NH,
                          &model->attention);
    matmul_forward_cpu(a.branch, a.atty, p.attprojw, p.attprojb, N, C, C, &model->matmul);
    residual_layernorm_forward_cpu(a.residual2, a.ln2, a.ln2_mean, a.ln2_rstd, residual, a.branch, p.ln2w,
                                   p.ln2b, N, C);
    matmul_forward_cpu(a.fch, a.ln2, p.fcw, p.fcb, N, C, 4 * C, &model->matmul);
    gelu_forward_cpu(a.fch_gelu, a.fch, (size_t)N * 4 * C);
}

// Sets the last hidden state, lnf, of the tokens first ... T-1.
static void gpt2_forward(GPT2* model, const int* tokens, const int* starts, int B, int T, int first) {
    const GPT2Config cfg = model->cfg;
    const int C = cfg.C, N = B * (T - first);
    assert(B <= model->B && T <= model->T && (first == 0 || B == 1));
    const GPT2Activations a = gpt2_activations_at_token(model->acts, model->activation_rows, first);
    encoder_forward_cpu(a.encoded, tokens + first, model->params.wte, model->params.wpe, B, T - first, first,
                        C);
    for (int l = 0; l < cfg.L; l++) {
        const GPT2Parameters p = gpt2_parameters_at_layer(model->params, model->parameter_rows, l);
        const GPT2Activations layer = gpt2_activations_at_layer(a, model->activation_rows, l);
        block_hidden(model, l, starts, B, T, first);
        matmul_forward_cpu(a.branch, layer.fch_gelu, p.fcprojw, p.fcprojb, N, 4 * C, C, &model->matmul);
        residual_forward_cpu(layer.residual3, layer.residual2, a.branch, (size_t)N * C);
    }
    const float* residual = residual_into(model, cfg.L) + (size_t)first * C;
    layernorm_forward_cpu(a.lnf, a.lnf_mean, a.lnf_rstd, residual, model->params.lnfw, model->params.lnfb, N,
                          C);
}

// Sets the logits of `count` tokens, at most a chunk, from the hidden state of those that begin at token
// `first` of the batch.
static void gpt2_logits(GPT2* model, int first, int count) {
    const int C = model->cfg.C;
    matmul_forward_cpu(model->acts.logits, model->acts.lnf + (size_t)first * C, model->params.wte, NULL,
                       count, C, model->cfg.Vp, &model->matmul);
}

// The tokens of a classifier's chunk, of the largest batch: a smaller one need not have smaller chunks of its
// own.
static int classifier_chunk(const GPT2* model) {
    return (int)gpt2_classifier_chunk(model->cfg, (size_t)model->B * (size_t)model->T);
}

// The sum of the losses of a batch, in order, over the tokens of a full micro-batch: the mean, if it is one
// and all of its targets count.
static double mean_loss(const GPT2* model, Batch batch) {
    double sum = 0;
    for (int n = 0; n < batch.B * batch.T; n++) {
        sum += model->acts.losses[n];
    }
    return sum / (model->B * model->T);
}

// After gpt2_forward on the same batch: mean_loss, without gradients.
static double gpt2_loss(GPT2* model, Batch batch) {
    const int N = batch.B * batch.T, chunk = classifier_chunk(model);
    for (int n = 0; n < N; n += chunk) {
        const int count = n + chunk < N ? chunk : N - n;
        gpt2_logits(model, n, count);
        classifier_loss_cpu(model->acts.losses + n, model->acts.logits, batch.targets + n, count,
                            model->cfg.V, model->cfg.Vp);
    }
    return mean_loss(model, batch);
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// What the forward pass did not keep of block l, computed again: the same operations on the same inputs, so
// the same bits.
static void block_recompute(GPT2* model, int l, const int* starts, int B, int T) {
    const int C = model->cfg.C, N = B * T;
    const GPT2Parameters p = gpt2_parameters_at_layer(model->params, model->parameter_rows, l);
    const GPT2Activations a = gpt2_activations_at_layer(model->acts, model->activation_rows, l);
    if (model->recompute == 3) {
        block_hidden(model, l, starts, B, T, 0);
        return;
    }
    if (model->recompute == 2) {
        layernorm_forward_cpu(a.ln1, a.ln1_mean, a.ln1_rstd, residual_into(model, l), p.ln1w, p.ln1b, N, C);
        layernorm_forward_cpu(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w, p.ln2b, N, C);
    }
    if (model->recompute >= 1) {
        gelu_forward_cpu(a.fch_gelu, a.fch, (size_t)N * 4 * C);
    }
}

// A linear layer, all three gradients: dinp is set; dweight and dbias (NULL: no bias) are set or added to.
static void linear_backward(GPT2* model, float* dinp, float* dweight, float* dbias, const float* dout,
                            const float* inp, const float* weight, int N, int C, int OC, GradientMode mode) {
    matmul_backward_weight_cpu(dweight, dout, inp, N, C, OC, mode, &model->matmul);
    if (dbias) {
        matmul_backward_bias_cpu(dbias, dout, N, OC, mode);
    }
    matmul_backward_input_cpu(dinp, dout, weight, N, C, OC, &model->matmul);
}

// From the gradient of the stream after block l, in dresidual, to that of the stream before it, in place.
static void block_backward(GPT2* model, int l, const int* starts, int B, int T, GradientMode mode) {
    const int C = model->cfg.C, N = B * T;
    const GPT2Parameters p = gpt2_parameters_at_layer(model->params, model->parameter_rows, l);
    const GPT2Parameters d = gpt2_parameters_at_layer(model->grads, model->parameter_rows, l);
    const GPT2Activations a = gpt2_activations_at_layer(model->acts, model->activation_rows, l);
    block_recompute(model, l, starts, B, T);

    linear_backward(model, a.dfch, d.fcprojw, d.fcprojb, a.dresidual, a.fch_gelu, p.fcprojw, N, 4 * C, C,
                    mode);
    gelu_backward_cpu(a.dfch, a.dfch, a.fch, (size_t)N * 4 * C);
    linear_backward(model, a.branch, d.fcw, d.fcb, a.dfch, a.ln2, p.fcw, N, C, 4 * C, mode);
    layernorm_backward_cpu(a.dresidual, d.ln2w, d.ln2b, a.branch, a.residual2, p.ln2w, a.ln2_mean, a.ln2_rstd,
                           N, C, GRADIENT_ADD, mode);

    linear_backward(model, a.branch, d.attprojw, d.attprojb, a.dresidual, a.atty, p.attprojw, N, C, C, mode);
    attention_backward_cpu(a.dqkv, a.branch, a.qkv, a.atty, a.att_lse, starts, B, T, C, model->cfg.NH,
                           &model->attention);
    linear_backward(model, a.branch, d.qkvw, d.qkvb, a.dqkv, a.ln1, p.qkvw, N, C, 3 * C, mode);
    layernorm_backward_cpu(a.dresidual, d.ln1w, d.ln1b, a.branch, residual_into(model, l), p.ln1w, a.ln1_mean,
                           a.ln1_rstd, N, C, GRADIENT_ADD, mode);
}

// The classifier and its gradients, chunk by chunk: sets the losses and, in `branch`, the gradient of lnf.
static void classifier_backward(GPT2* model, Batch batch, double loss_tokens, GradientMode mode) {
    const GPT2Activations a = model->acts;
    const int C = model->cfg.C, V = model->cfg.V, Vp = model->cfg.Vp;
    const int N = batch.B * batch.T, chunk = classifier_chunk(model);
    for (int n = 0; n < N; n += chunk) {
        const int count = n + chunk < N ? chunk : N - n;
        const size_t at = (size_t)n * C;
        gpt2_logits(model, n, count);
        classifier_backward_cpu(a.losses + n, a.logits, batch.targets + n, (float)(1 / loss_tokens), count, V,
                                Vp);
        linear_backward(model, a.branch + at, model->grads.wte, NULL, a.logits, a.lnf + at, model->params.wte,
                        count, C, Vp, n == 0 ? mode : GRADIENT_ADD);
    }
}

// After gpt2_forward on the same batch: sets the losses and sets or adds to all gradients, as `mode` says.
// The loss counts 1 / loss_tokens for each token.
static void gpt2_backward(GPT2* model, Batch batch, double loss_tokens, GradientMode mode) {
    const GPT2Config cfg = model->cfg;
    const int B = batch.B, T = batch.T, C = cfg.C, N = B * T;
    const GPT2Activations a = model->acts;
    classifier_backward(model, batch, loss_tokens, mode);
    layernorm_backward_cpu(a.dresidual, model->grads.lnfw, model->grads.lnfb, a.branch,
                           residual_into(model, cfg.L), model->params.lnfw, a.lnf_mean, a.lnf_rstd, N, C,
                           GRADIENT_SET, mode);
    for (int l = cfg.L - 1; l >= 0; l--) {
        block_backward(model, l, batch.starts, B, T, mode);
    }
    encoder_backward_cpu(model->grads.wte, model->grads.wpe, a.dresidual, batch.inputs, B, T, cfg.max_T, C,
                         mode);
}

// ---------------------------------------------------------------------------------------------------------------------
// Update

// The norm of the whole gradient.
static double gpt2_gradient_norm(GPT2* model) {
    double sum = 0;
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model->parameter_rows[i];
        sum += gradient_square_sum_cpu(row_tensor(row, model->grads_memory), tensor_elements(row),
                                       model->norm_partial);
    }
    return sqrt(sum);
}

// One AdamW update of every tensor; `adamw.weight_decay` applies to those that decay.
static void gpt2_update(GPT2* model, AdamW adamw) {
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model->parameter_rows[i];
        AdamW opt = adamw;
        opt.weight_decay = row->decay ? adamw.weight_decay : 0.0f;
        adamw_update_cpu(row_tensor(row, model->params_memory), row_tensor(row, model->grads_memory),
                         row_tensor(row, model->m_memory), row_tensor(row, model->v_memory),
                         tensor_elements(row), opt);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Sampling

// The logits of the next token, for the generator; level 3 of --recompute keeps no keys and values.
static const float* next_logits(void* model_, const int* ids, int known, int seen) {
    GPT2* model = (GPT2*)model_;
    gpt2_forward(model, ids, NULL, 1, known, model->recompute == 3 ? 0 : seen);
    gpt2_logits(model, known - 1, 1);
    return model->acts.logits;
}

// ---------------------------------------------------------------------------------------------------------------------
// The training loop

// What the micro-batches of an update give together.
typedef struct {
    double loss;  // mean over the targets that count
    double norm;  // of its gradient,
    double scale; // which is what is in memory times this
    double flops; // of the tokens that were computed
} BatchGradient;

// One micro-batch after another: sets the gradients of the whole batch.
static BatchGradient accumulate_gradients(GPT2* model, Dataloader* train, const Options* o) {
    const int64_t micro_steps = o->total_batch / ((int64_t)train->B * train->T);
    BatchGradient gradient = {0, 0, 0, 0};
    double counted = 0;
    for (int64_t micro = 0; micro < micro_steps; micro++) {
        const Batch batch = dataloader_next(train);
        gpt2_forward(model, batch.inputs, batch.starts, batch.B, batch.T, 0);
        gpt2_backward(model, batch, (double)o->total_batch, micro == 0 ? GRADIENT_SET : GRADIENT_ADD);
        gradient.loss += mean_loss(model, batch) / (double)micro_steps;
        gradient.flops += gpt2_flops_per_token(model->cfg, batch.T) * batch.B * batch.T;
        counted += batch.counted;
    }
    gradient.scale = targets_factor((double)o->total_batch, counted);
    gradient.loss *= gradient.scale;
    gradient.norm = gpt2_gradient_norm(model) * gradient.scale;
    return gradient;
}

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
} Run;

// Whether steps follow a save, as they do while a thread writes a copy. A run that saves only at its end does
// without that memory, and what it saves at a signal is waited for.
static int saves_copies(const Options* o) { return o->save_every > 0 && o->save_every < o->steps; }

// Copies all that the run is, and starts to save the copy; or saves the model itself.
static void save(Run* run) {
    const GPT2* model = run->model;
    Checkpoints* copy = &run->session->checkpoints;
    const int copies = saves_copies(run->options);
    session_wait(run->session, run->log);
    if (copies) {
        memcpy(copy->params, model->params_memory, copy->params_bytes);
        memcpy(copy->m, model->m_memory, copy->state_bytes);
        memcpy(copy->v, model->v_memory, copy->state_bytes);
    } else {
        copy->params = model->params_memory;
        copy->m = (float*)model->m_memory;
        copy->v = (float*)model->v_memory;
    }
    run->state.sequence = run->train ? (int64_t)run->train->next : 0;
    run->state.samples_at = (int64_t)run->generator->rng.at;
    log_sync(run->log);
    checkpoint_start(copy, &run->state);
    if (!copies) {
        session_wait(run->session, run->log);
    }
}

// Puts the run where it was when the checkpoint was made.
static void restore(Run* run, const char* path, const SavedState* saved) {
    GPT2* model = run->model;
    checkpoint_read(saved, path, model->cfg, model->parameter_rows, model->params_memory,
                    (float*)model->m_memory, (float*)model->v_memory);
    run_state_restore(&run->state, &saved->run);
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
    const UpdateVerdict verdict = guard_check(&state->guard, loss, norm);
    AdamW adamw = setup_adamw(o, state->step, state->updates + 1, norm);
    adamw.grad_scale *= (float)gradient.scale;
    if (verdict == UPDATE_DO) {
        gpt2_update(run->model, adamw);
        state->updates++;
    }
    state->step++;
    state->stage = STAGE_UPDATED;
    state->tokens += o->total_batch;
    run->step_s = time_now_s() - start_s;
    run->peak = fmax(run->peak, gradient.flops / run->step_s); // it was measured on a busy machine
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

// Sets *loss to the mean over the first micro-batches of the validation data, in order. Returns 0 if a signal
// stopped it.
static int evaluate(Run* run, double* loss) {
    GPT2* model = run->model;
    const int64_t batches = setup_eval_batches(run->options, run->val);
    double sum = 0, counted = 0;
    dataloader_seek(run->val, 0);
    for (int64_t i = 0; i < batches; i++) {
        if (signals_stop()) {
            return 0;
        }
        log_progress(run->log, run->state.step, "validating", i, batches);
        const Batch batch = dataloader_next(run->val);
        gpt2_forward(model, batch.inputs, batch.starts, batch.B, batch.T, 0);
        sum += gpt2_loss(model, batch);
        counted += batch.counted;
    }
    if (dataloader_error(run->val)) {
        end_by_bad_data(run, dataloader_error(run->val));
    }
    *loss = sum / (double)batches * targets_factor((double)batches * model->B * model->T, counted);
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
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// main

static size_t planned_activations(TensorRow* rows, GPT2Config cfg, const Options* o) {
    const size_t chunk = gpt2_classifier_chunk(cfg, (size_t)o->batch * (size_t)o->seq_len);
    return gpt2_activation_rows(rows, cfg, o->batch, o->seq_len, o->recompute, chunk);
}

// What the run takes, by kind; the list ends with a name of NULL.
static void memory_plan(PlanMemory plan[PLAN_KINDS], GPT2Config cfg, const Options* o) {
    TensorRow rows[GPT2_PARAMETER_ROWS], activations[GPT2_ACTIVATION_ROWS];
    const size_t params = gpt2_parameter_rows(rows, cfg);
    const PlanMemory kinds[PLAN_KINDS] = {
        {"parameters", params, 0},
        {"gradients", params, 0},
        {"AdamW m", params, 0},
        {"v", params, 0},
        {"activations", planned_activations(activations, cfg, o), 0},
        {"copy to save", saves_copies(o) ? checkpoints_bytes(cfg, SAFETENSORS_F32) : 0, 0},
        {NULL, 0, 0}};
    memcpy(plan, kinds, sizeof(kinds));
}

static void describe_device(char* text, size_t room) {
    snprintf(text, room, "%d threads, %s", threads_max(), VEC_ISA);
}

// --plan: what the run would take, without taking it.
static void print_plan(GPT2Config cfg, const Options* options) {
    TensorRow parameters[GPT2_PARAMETER_ROWS], activations[GPT2_ACTIVATION_ROWS];
    PlanMemory memory[PLAN_KINDS];
    char threads[64], device[128];
    gpt2_parameter_rows(parameters, cfg);
    planned_activations(activations, cfg, options);
    memory_plan(memory, cfg, options);
    describe_device(threads, sizeof(threads));
    snprintf(device, sizeof(device), "this machine (%s)", threads);
    plan_print(stdout, cfg, options, parameters, activations, memory, peak_flops_per_s(), device);
}

// What the run is about: memory, data, and what can be reached.
static void print_facts(GPT2Config cfg, const Options* options, const RunData* data, double peak,
                        double floor) {
    PlanMemory memory[PLAN_KINDS];
    memory_plan(memory, cfg, options);
    plan_print_memory(stdout, cfg, memory);
    char device[64];
    describe_device(device, sizeof(device));
    setup_print_data(stdout, data);
    printf("%s, peak %.0f GFLOP/s\n", device, peak * 1e-9);
    if (isfinite(floor)) {
        printf(
            "floor: the entropy of the validation stories is %.4f nats per token; no model can do better\n",
            floor);
    }
    fflush(stdout); // the first step may take long
}

#define TRAINER_NAME "CPU FP32"

// The run itself. Returns its exit status.
static int run_training(RunStart* start) {
    const Options* options = &start->options;
    const GPT2Config cfg = start->cfg;
    const double peak = peak_flops_per_s();
    char program[128], device[64];
    RunLog log;
    GPT2 model;
    Dataloader train_loader, val_loader;
    Generator generator;
    Session session;
    const int has_data = setup_has_data(&start->data);
    if (has_data) {
        setup_loaders(&train_loader, &val_loader, &start->data, options);
    }
    gpt2_open(&model, cfg, options->batch, options->seq_len, options->recompute);
    generator_open(&generator, next_logits, &model, cfg.V, options->seq_len, &start->data, options);
    void* copy = saves_copies(options)
                     ? check_alloc(checkpoints_bytes(cfg, SAFETENSORS_F32), 1, "copy to save")
                     : NULL;
    const CheckpointRun checkpoint_run = {TRAINER_NAME,
                                          cfg,
                                          SAFETENSORS_F32,
                                          generator.eot,
                                          setup_saved_tokenizer(&start->data),
                                          start->data.train.tokens,
                                          start->data.train.fingerprint,
                                          NULL,
                                          NULL};
    session_open(&session, options, &start->resume, checkpoint_run, copy, start->start_s);
    const int64_t eval_batches = has_data ? setup_eval_batches(options, &val_loader) : 0;
    const double floor = setup_floor(&start->data, options, eval_batches);
    print_facts(cfg, options, &start->data, peak, floor);

    Run run = {
        .model = &model,
        .options = options,
        .train = has_data ? &train_loader : NULL,
        .val = has_data ? &val_loader : NULL,
        .generator = &generator,
        .log = &log,
        .session = &session,
        .state = run_state_open(guard_open(options->skip_loss_z, options->skip_grad_z), loss_scale_off()),
        .validates_first =
            setup_validates_first(options, gpt2_flops_per_token(cfg, options->seq_len), eval_batches),
        .peak = peak,
    };
    if (start->resume.is_active) {
        restore(&run, start->resume.path, &start->resume.saved);
    } else {
        setup_weights(model.params_memory, cfg, model.parameter_rows, start->model_path, options->seed);
    }
    describe_device(device, sizeof(device));
    options_version(program, sizeof(program), options, "train_gpt2");
    const LogIdentity who = {program, TRAINER_NAME, device};
    session_begin(&session, &start->resume, &run.state, &log, who);
    const int is_done = train(&run);
    if (is_done) {
        setup_export(cfg, model.parameter_rows, model.params_memory, options, &start->data);
        log_summary(&log, options->steps, run.state.val_loss, floor, log_peak_mb());
    } else {
        session_stopped(&session, &log, &run.state);
    }
    const int is_saved = session.can_save;

    session_close(&session);
    free(copy);
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
    vec_flush_denormals(); // before the first parallel region: its threads inherit it
    return start_run(argc, argv, options_program(OPTION_CPU), TRAINER_NAME, print_plan, run_training);
}

#ifndef TRAIN_GPT2_NO_MAIN
int main(int argc, char** argv) {
    file_open_standard();
    threads_wait_briefly(argv);
    signals_open();
    return trainer(argc, argv);
}
#endif
