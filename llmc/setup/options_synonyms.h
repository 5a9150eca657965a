/*
options_synonyms.h -- option names of nanoGPT, llm.c and Hugging Face, and what to type here.

They are not accepted as aliases, because few of them mean exactly the same in the same unit.
*/
#ifndef LLMC_OPTIONS_SYNONYMS_H
#define LLMC_OPTIONS_SYNONYMS_H

#include <stddef.h>

#include "llmc/setup/options_names.h"

// clang-format off
__attribute__((unused)) static const OptionSynonym OPTION_TRAINER_SYNONYMS[] = {
    // data
    {"dataset data data-dir train-file train-files input-bin", "use --train-data, a file, a directory or a pattern"},
    {"dataset-name", "use --train-data with files; scripts/get_data.sh fetches some"},
    {"validation-file val-file eval-file input-val-bin", "use --val-data"},
    {"tokenizer-name tokenizer-file", "use --tokenizer"},
    {"text-column", "use --text-field"},
    {"completion-only-loss assistant-only-loss train-on-inputs mask-prompt", "of prompts and chats only answers are learned (dev/doc/data.md)"},
    {"chat-template", "the format of chats follows the model's chat_template, or --chat (dev/doc/data.md)"},
    {"system-prompt system-message", "use --system, with --interactive"},
    {"fim fill-in-middle fill-in-the-middle infill", "use --fim-rate to train; --prompt and --suffix to generate"},

    // model
    {"init-from model-name-or-path model-name pretrained checkpoint", "use --model, a size (random weights) or a path (its weights)"},
    {"block-size max-seq-length max-seq-len sequence-length sequence-len", "use --seq-len, the length of a training sequence; --context is the model's limit"},
    {"n-positions n-ctx max-position-embeddings", "use --context"},
    {"n-layer n-layers num-layers num-hidden-layers depth", "use --layers"},
    {"n-embd d-model hidden-size embed-dim", "use --channels"},
    {"n-head n-heads num-heads num-attention-heads", "use --heads"},
    {"attn-pdrop attention-probs-dropout-prob", "use --attention-dropout"},
    {"n-inner intermediate-size ffn-hidden-size", "use --hidden, the hidden units of the MLP"},
    {"num-experts num-local-experts n-experts n-routed-experts", "use --experts"},
    {"num-experts-per-tok experts-per-token moe-top-k top-k-experts num-experts-per-token", "use --experts-used"},
    {"moe-intermediate-size", "use --hidden, the hidden units of an expert"},
    {"shared-expert-intermediate-size n-shared-experts", "use --shared-hidden, the hidden units of the shared expert"},
    {"router-aux-loss-coef aux-loss-coef moe-aux-loss-coeff load-balance-loss", "use --router-balance"},
    {"router-z-loss-coef moe-z-loss-coeff", "use --router-z"},
    {"n-kv-head n-kv-heads num-kv-heads num-key-value-heads", "use --kv-heads"},
    {"head-dim", "use --head-size"},
    {"rope-theta", "use --rope-base"},
    {"sliding-window window-size", "use --window, the tokens that a token attends to"},
    {"tie-word-embeddings tied-embeddings", "use --own-head off"},
    {"logits-softcap final-logit-softcapping", "use --softcap"},
    {"model-type architecture", "use --arch"},
    {"bias", "it comes with --arch: gpt2 has biases, llama none"},

    // batch
    {"batch-size micro-batch-size train-batch-size per-device-train-batch-size device-batch-size", "use --batch, sequences per micro-batch"},
    {"eval-batch-size per-device-eval-batch-size", "validation has the micro-batches of --batch"},
    {"gradient-accumulation-steps grad-accum-steps accumulate-grad-batches global-batch-size total-batch-size",
        "use --total-batch, the tokens of one update: batch x seq-len x micro-batches"},
    {"max-iters max-steps num-iterations num-steps iterations train-iters", "use --steps"},
    {"num-train-epochs num-epochs", "use --epochs"},
    {"eval-only", "use --steps 0"},

    // optimizer
    {"resid-pdrop embd-pdrop hidden-dropout residual-dropout", "use --dropout, of the embeddings and of both branches"},
    {"learning-rate max-lr", "use --lr"},
    {"min-lr learning-rate-decay-frac min-lr-ratio", "use --final-lr-frac, a fraction of --lr"},
    {"warmup-iters warmup-steps num-warmup-steps", "use --warmup, in steps"},
    {"warmup-ratio", "use --warmup, in steps"},
    {"decay-lr", "use --schedule; constant does not decay"},
    {"lr-decay-iters", "the rate decays until --steps"},
    {"num-decay-steps warmdown-iters cooldown-steps", "use --schedule wsd --decay-steps"},
    {"lr-scheduler-type lr-scheduler lr-schedule", "use --schedule"},
    {"optim", "use --optimizer"},
    {"adam-beta1", "use --beta1"},
    {"adam-beta2", "use --beta2"},
    {"adam-epsilon adam-eps epsilon", "use --eps"},
    {"momentum", "use --sgd-momentum"},
    {"max-grad-norm clip-grad gradient-clip-val", "use --grad-clip"},

    // evaluation and samples
    {"eval-interval eval-steps val-every val-loss-every", "use --eval-every, in steps"},
    {"eval-iters val-max-steps", "use --eval-batches, micro-batches per validation"},
    {"num-samples", "use --samples"},
    {"start", "use --prompt"},
    {"max-new-tokens", "use --tokens, for generated texts, or --sample-tokens, for samples of a run"},
    {"do-sample", "use --temperature; 0 takes the most likely token"},
    {"num-beams", "beam search is not supported"},

    // output
    {"out-dir output-dir", "use --out"},
    {"log-interval logging-steps", "use --log-every, in steps"},
    {"save-steps save-interval checkpoint-every always-save-checkpoint", "use --save-every, in steps"},
    {"save-total-limit", "use --keep"},
    {"resume-from-checkpoint resume-from", "use --resume"},
    {"wandb-log wandb-project wandb-run-name wandb report-to",
        "scripts/wandb_follow.py sends a run's log.jsonl to Weights & Biases; --tensorboard on writes for TensorBoard"},
    {"silent", "use --quiet on"},
    {"daemon background nohup", "start it with nohup or in tmux (dev/doc/report.md)"},
    {"watch attach monitor tail", "use --follow, the --out of a run"},
    {"verbose debug", "log.jsonl in --out has every number of every step"},

    // memory, speed
    {"gradient-checkpointing activation-checkpointing", "use --recompute"},
    {"dtype precision mixed-precision bf16 fp16", "a GPU trainer has the precision that it is built with (make train_gpt2cu PRECISION=BF16); the CPU trainer has "
        "--matmul bf16"},
    {"compile torch-compile", "not needed: the program is compiled"},
    {"flash flash-attn attn-implementation", "attention is always computed without a matrix of scores; make USE_CUDNN=1 has cuDNN's"},
    {"num-workers dataloader-num-workers", "one thread reads the data; --threads is for computing"},
    {"num-threads", "use --threads"},

    // processes
    {"world-size nproc-per-node num-gpus n-gpu", "use --num-processes, or a launcher (dev/doc/processes.md)"},
    {"local-rank node-rank", "use --rank, or a launcher, which sets it"},
    {"backend", "use --init"},
    {"fsdp deepspeed zero-stage", "use --zero"},
    {NULL, NULL},
};
// clang-format on

#endif
