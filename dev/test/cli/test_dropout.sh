#!/usr/bin/env bash
# test_dropout.sh -- training with dropout: PyTorch's numbers with the same masks, the same numbers
# however the work is divided, resumed runs, evaluation without it, and where it is refused.
#
#     dev/test/cli/test_dropout.sh build/plain/train_gpt2
#     dev/test/cli/test_dropout.sh build/sim/FP32/train_gpt2cu    # not of attention's weights
set -u

trainer=$(realpath "${1:?usage: test_dropout.sh TRAINER}")
fixtures=$(realpath dev/ref/fixtures)
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
source dev/test/lib/ranks.sh
is_gpu='' exact=(--matmul fp32)
case $trainer in */train_gpt2cu) is_gpu=1 exact=(--tf32 off) ;; esac

# updates MODEL P LOSS FIRST_NORM NORM OPTIONS...
updates() {
    local path=$fixtures/models/$1 how=() tolerances=("${@:3:3}") model=$1 p=$2
    shift 5
    [ "$model" != gpt2 ] || path=$fixtures/dropout/gpt2
    case $model in mixtral | gptoss | deepseek3) how=(--router-balance 0 --router-z 0) ;; esac
    [ "$p" = 0 ] || how+=(--attention-dropout "$p")
    rm -rf out
    runs "$model $p $*" --model "$path" --train-data "$fixtures/models/tokens.bin" --val-data "$fixtures/models/tokens.bin" --seq-len 13 \
        --total-batch 26 --eval-every 0 --samples 0 "${options[@]}" "${how[@]}" --out out "$@"
    check "$model, attention $p, $*: losses and norms" near_updates "$fixtures/dropout/losses.txt" 3 "$model $p" "${tolerances[@]}"
}

# The tolerances of test_families.sh. The first norm also has that of later ones: masks remove most
# of some gradients, but not their errors.
test_numbers() {
    local model options
    read -ra options <<<"$(sed -n 's/^# --/--/p' "$fixtures/dropout/losses.txt")"
    for model in $(awk '/^#/ { next } !seen[$1]++ { print $1 }' "$fixtures/dropout/losses.txt"); do
        updates "$model" 0 2e-6 2e-5 2e-5 "${exact[@]}" --batch 2
        [ -z "$is_gpu" ] || continue
        updates "$model" 0.3 2e-6 2e-5 2e-5 "${exact[@]}" --batch 2
        updates "$model" 0.3 2e-6 2e-5 2e-5 "${exact[@]}" --batch 1 --recompute 3
    done
    [ -n "$is_gpu" ] || updates llama 0.3 4e-2 3e-2 1 --matmul bf16 --batch 2
}

run=(--layers 2 --channels 32 --heads 4 --seq-len 16 --total-batch 256 --steps 4 --eval-every 4 --eval-batches 4 --samples 0
    "${exact[@]}" --dropout 0.2)
[ -n "$is_gpu" ] || run+=(--attention-dropout 0.1)

# numbers OUT: the losses and norms of all updates, rounded.
numbers() { paste -d ' ' <(values train loss "$1/log.jsonl") <(values train norm "$1/log.jsonl") | awk '{ printf "%.4f %.4f\n", $1, $2 }'; }

same_numbers() { check "$2 is like $1" [ -n "$(numbers "$1")" -a "$(numbers "$1")" = "$(numbers "$2")" ]; }
differ() { check "$2 is not like $1" [ "$(numbers "$1")" != "$(numbers "$2")" ]; }

test_divided() {
    local n
    trains 1 one "${run[@]}" --batch 2 --zero 2
    trains 1 none "${run[@]}" --batch 2 --zero 2 --dropout 0
    differ one none
    for n in 1 4 8; do
        trains 1 "batch_$n" "${run[@]}" --batch "$n"
        same_numbers one "batch_$n"
    done
    for n in 1 2 mlp 3; do
        trains 1 "recompute_$n" "${run[@]}" --batch 2 --zero 2 --recompute "$n"
        same "recomputation $n" one "recompute_$n"
    done
    trains 1 in_backward "${run[@]}" --batch 16 --update-in-backward on
    check "updates in the backward pass" [ "$(numbers one | head -n 1 | cut -d ' ' -f 1)" = "$(numbers in_backward | head -n 1 | cut -d ' ' -f 1)" ]
    trains 1 lengths "${run[@]}" --batch 4 --seq-len-schedule 0:8,2:16
    trains 1 lengths_2 "${run[@]}" --batch 2 --seq-len-schedule 0:8,2:16
    same_numbers lengths lengths_2
    trains 1 shared "${run[@]}" --batch 2 --share-layers all --recompute 3
    trains 1 shared_2 "${run[@]}" --batch 4 --share-layers all
    same_numbers shared shared_2
}

# A GPU divides sequences of 512 tokens and more.
test_ranks() {
    local way ways=(tensor pipeline)
    [ -n "$is_gpu" ] || ways+=(context)
    trains 2 ranks "${run[@]}" --batch 2 --zero 2
    same "2 ranks" one ranks
    for way in "${ways[@]}"; do
        trains 2 "$way" "${run[@]}" --batch 2 "--$way-parallel" 2
        same_numbers one "$way"
    done
}

test_resumed() {
    trains 1 whole "${run[@]}" --batch 2 --zero 2 --save-every 2
    same "a run that saves" one whole
    rm -r whole/step_00000004
    ranks 1 "$trainer" --out whole --resume on --zero 2
    same "a resumed run" one whole
    rm -r whole/step_00000004
    bad 2 "--dropout" --out whole --resume on --dropout 0.3
}

# Validations have no dropout: evaluating a checkpoint gives the same loss as the run did.
test_evaluation() {
    trains 1 saved --model one --seq-len 16 --batch 2 --eval-batches 4 --steps 0 --samples 0 --save-every 0 "${exact[@]}"
    check "evaluation: $(values val loss one/log.jsonl | tail -n 1)" \
        [ "$(values val loss saved/log.jsonl | tail -n 1)" = "$(values val loss one/log.jsonl | tail -n 1)" ]
}

# The frozen base of an adapter has dropout in training; a teacher has none: with the weights of its
# student and no update yet, they only differ by dropout.
test_other_models() {
    local from=(--model one --seq-len 16 --total-batch 256 --steps 2 --eval-every 0 --samples 0 "${exact[@]}" --dropout 0.2)
    trains 1 adapter "${from[@]}" --lora-rank 2 --batch 2
    trains 1 adapter_4 "${from[@]}" --lora-rank 2 --batch 4 --recompute 3
    same_numbers adapter adapter_4
    trains 1 taught "${from[@]}" --teacher one --batch 2
    trains 1 taught_4 "${from[@]}" --teacher one --batch 4
    same_numbers taught taught_4
    trains 1 alike "${from[@]}" --teacher one --batch 2 --dropout 0
    check "without dropout a student is its teacher: $(values train kl alike/log.jsonl)" \
        awk -v same="$(values train kl alike/log.jsonl | head -n 1)" -v other="$(values train kl taught/log.jsonl | head -n 1)" \
        'BEGIN { exit !(same < 1e-6 && other > 1e-3) }'
}

# A model's config.json turns nothing on; a note says so.
test_note() {
    local from=(--model "$fixtures/dropout/gpt2" --train-data "$fixtures/models/tokens.bin" --val-data "$fixtures/models/tokens.bin" --seq-len 13
        --batch 2 --total-batch 26 --steps 1 --eval-every 0 --samples 0 "${exact[@]}")
    trains 1 without "${from[@]}"
    check "a note on dropout" grep -q 'config.json sets dropout to 0.1, which training takes from --dropout only' without.txt
    trains 1 zero "${from[@]}" --dropout 0
    same_numbers without zero
    trains 1 with "${from[@]}" --dropout 0.1
    check "no note on dropout" [ "$(grep -c 'sets dropout' with.txt)" = 0 ]
}

test_refused() {
    bad 2 "--dropout 1: wanted" "${run[@]}" --dropout 1
    bad 2 "--dropout -0.1: wanted" "${run[@]}" --dropout -0.1
    bad 2 "use --attention-dropout" "${run[@]}" --attn-pdrop 0.1
    bad 2 "use --dropout" "${run[@]}" --resid-pdrop 0.1
    [ -n "$is_gpu" ] || bad 2 "no layer with attention" --arch lfm2 --layer-types conv --layers 2 --channels 32 --heads 2 --attention-dropout 0.1 --plan
    [ -z "$is_gpu" ] || bad 2 "--attention-dropout" "${run[@]}" --attention-dropout 0.1
}

ranks_begin test_dropout
test_numbers
test_divided
test_ranks
test_resumed
test_evaluation
test_other_models
test_note
test_refused
check_done
