#!/usr/bin/env bash
# test_allocations.sh -- a run allocates nothing that its plan does not have, but for a MiB: not in training,
# validations, saves, exports, samples or loading. A model whose smallest group of weights has more.
#
#     dev/test/cli/test_allocations.sh build/plain/train_allocations [short]     # allocations.c
set -u
root=$PWD
trainer=$(realpath "${1:?usage: test_allocations.sh TRAINER [short]}")
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
trainer_begin test_allocations
export ALLOCATIONS_REPORT=1

# ends WHAT OPTIONS...: the run ends well, and has counted what it allocates.
ends() {
    runs "$@"
    check "$1: $(grep -m 1 '^error' stderr)" grep -q '^allocations: at most [0-9]* bytes' stderr
}

for i in {1..300}; do echo "$i bottles of beer on the wall, $i bottles of beer."; done >text.txt
run=(--layers 2 --channels 256 --heads 4 --seq-len 32 --batch 1 --total-batch 64 --train-data text.txt --steps 4 --save-every 2
    --eval-every 2 --eval-batches 2 --sample-every 2 --sample-tokens 4)

test_short() {
    ends "training" "${run[@]}" --out one --average ema:0.9 --export-gguf one.gguf
    ends "8 bits" --model one --quantize q8_0 --prompt "1 bottles" --tokens 4
}

test_all() {
    ends "resumed" "${run[@]}" --steps 6 --resume on --out one
    ends "other experts, packing" "${run[@]}" --arch mixtral --experts 2 --experts-used 1 --router-balance 0 --arch olmoe --pack bestfit --doc-mask on --out two
    for optimizer in adamw8bit muon soap adafactor sgd; do
        ends "$optimizer" "${run[@]}" --optimizer $optimizer --average ema:0.9 --out "$optimizer"
        ends "$optimizer, resumed" "${run[@]}" --optimizer $optimizer --steps 5 --resume on --out "$optimizer"
    done
    ends "muon in 8 bits" "${run[@]}" --optimizer muon --muon-momentum 8bit --out muon8
    ends "bf16" "${run[@]}" --matmul bf16 --recompute 3 --out bf16
    ends "update in the backward pass" "${run[@]}" --total-batch 32 --update-in-backward on --out backward
    ends "a vocabulary" "${run[@]}" --tokenizer bpe:300 --out vocabulary --keep-best on --tensorboard on
    ends "another file" --model vocabulary --steps 0 --samples 0 --export-gguf q8.gguf --export-gguf-dtype q8_0
    ends "llm.c's file" --model one --steps 0 --samples 0 --export-llmc model.bin
    ends "the average" "${run[@]}" --model one --weights average --out average
    ends "a teacher" "${run[@]}" --teacher one --out taught
    ends "a teacher in 8 bits" "${run[@]}" --teacher one --teacher-quantize q8_0 --out taught8
    ends "small model files" "${run[@]}" --model-file-gb 0.004 --out files
    ends "text" --model one --prompt "1 bottles" --tokens 40
    ends "losses" --model one --train-data text.txt --steps 0 --eval-every 1
}

test_short
[ "${2:-}" = short ] || test_all
check_done
