#!/usr/bin/env bash
# test_families.sh -- models that transformers saved (dev/ref/make_model_fixtures.py): a trainer has
# its loss and the norm of its gradient, and saves a checkpoint that it opens again.
#
#     dev/test/cli/test_families.sh build/plain/train_gpt2
set -u

trainer=$(realpath "${1:?usage: test_families.sh TRAINER}")
fixtures=$(realpath dev/ref/fixtures/models)
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
trainer_begin test_families

data=(--train-data "$fixtures/tokens.bin" --val-data "$fixtures/tokens.bin" --seq-len 13 --batch 2 --total-batch 26)

# value KIND KEY: the last of these values in the log of the run.
value() { values "$1" "$2" out/log.jsonl | tail -n 1; }

# near WHAT FOUND WANTED TOLERANCE: the tolerance is relative.
near() {
    check "$1 is $2, wanted $3" awk -v a="$2" -v b="$3" -v e="$4" 'BEGIN { exit !(a > b * (1 - e) && a < b * (1 + e)) }'
}

# numbers MODEL LOSS NORM TOLERANCE OPTIONS...: the first update of a model, without the losses that
# only change gradients of routers.
numbers() {
    local model=$1 loss=$2 norm=$3 tolerance=$4
    shift 4
    local routers=()
    case $model in mixtral | qwen3moe | olmoe | glm4moe*) routers=(--router-balance 0 --router-z 0) ;; esac
    rm -rf out
    runs "$model $*" --model "$fixtures/$model" "${data[@]}" --steps 1 --samples 0 "${routers[@]}" --out out "$@"
    near "$model $*: loss" "$(value train loss)" "$loss" "$tolerance"
    near "$model $*: norm" "$(value train norm)" "$norm" "$tolerance"
}

# fp32 has 24 bits, and sums of a few hundred numbers; bf16 has 8 bits in every matmul's input.
while read -r model loss norm; do
    numbers "$model" "$loss" "$norm" 2e-6 --matmul fp32
    numbers "$model" "$loss" "$norm" 2e-6 --matmul fp32 --recompute 3
    trained=$(value val loss)
    mv out saved
    runs "$model: its checkpoint" --model saved "${data[@]}" --steps 0 --samples 0 --matmul fp32 --save-every 0 --out out
    check "$model: the checkpoint has the loss of the run, $trained" [ "$(value val loss)" = "$trained" ]
    rm -rf saved
    numbers "$model" "$loss" "$norm" 2e-2 --matmul bf16
done < <(grep -v '^#' "$fixtures/losses.txt")

# A dense model with --experts starts with its loss, and saves a model of experts.
while read -r model arch; do
    rm -rf out saved
    dense=$(sed -n "s/^$model \([^ ]*\).*/\1/p" "$fixtures/losses.txt")
    runs "$model: upcycled" --model "$fixtures/$model" --experts 4 --experts-used 2 "${data[@]}" --steps 1 --samples 0 \
        --matmul fp32 --out out
    near "$model: loss of the upcycled model" "$(value train loss)" "$dense" 2e-6
    check "$model becomes a $arch" grep -q "\"model_type\": \"$arch\"" out/step_00000001/config.json
    trained=$(value val loss)
    mv out saved
    runs "$model: the upcycled checkpoint" --model saved "${data[@]}" --steps 0 --samples 0 --matmul fp32 --save-every 0 \
        --out out
    check "$model: the saved model has the run's loss, $trained" [ "$(value val loss)" = "$trained" ]
done <<'EOF'
llama mixtral
qwen3_tied qwen3_moe
EOF
bad 2 "layers 0 and 1 of the model have different windows" --model "$fixtures/qwen3" --experts 4 "${data[@]}" --out out
bad 2 "--experts has no meaning with --arch qwen2" --model "$fixtures/qwen2" --experts 4 "${data[@]}" --out out
bad 2 "--experts is 8, but the model in" --model "$fixtures/mixtral" --experts 8 "${data[@]}" --out out

check_done
