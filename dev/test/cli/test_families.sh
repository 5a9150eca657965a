#!/usr/bin/env bash
# test_families.sh -- models that transformers saved (dev/ref/make_model_fixtures.py): a trainer has
# the losses and gradient norms of twelve updates by PyTorch (make_update_fixtures.py), and saves a
# checkpoint that it opens again. llama.cpp opens what is exported of them, and has the logits of
# transformers.
#
#     dev/test/cli/test_families.sh build/plain/train_gpt2
#     dev/test/cli/test_families.sh build/sim/FP32/train_gpt2cu    # the updates, of half of the models
set -u

trainer=$(realpath "${1:?usage: test_families.sh TRAINER}")
root=$PWD
fixtures=$root/dev/ref/fixtures/models
page=$root/dev/doc/architectures.md
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
trainer_begin test_families

data=(--train-data "$fixtures/tokens.bin" --val-data "$fixtures/tokens.bin" --seq-len 13 --batch 2 --total-batch 26)
read -ra adamw <<<"$(sed -n 's/^# --/--/p' "$fixtures/losses.txt")"

# value KIND KEY: the last of these values in the log of the run.
value() { values "$1" "$2" out/log.jsonl | tail -n 1; }

# near WHAT FOUND WANTED TOLERANCE: the tolerance is relative.
near() {
    check "$1 is $2, wanted $3" awk -v a="$2" -v b="$3" -v e="$4" 'BEGIN { exit !(a > b * (1 - e) && a < b * (1 + e)) }'
}

has_experts() { case $1 in mixtral | qwen3moe | olmoe | glm4moe* | gptoss* | deepseek3*) ;; *) false ;; esac }

# updates MODEL LOSS FIRST_NORM NORM OPTIONS...: the trainer has them, without the losses that only
# change gradients of routers.
updates() {
    local model=$1 tolerances=("${@:2:3}") routers=()
    shift 4
    ! has_experts "$model" || routers=(--router-balance 0 --router-z 0)
    rm -rf out
    runs "$model $*" --model "$fixtures/$model" "${data[@]}" "${adamw[@]}" --samples 0 "${routers[@]}" --out out "$@"
    check "$model $*: losses and norms" near_updates "$fixtures/losses.txt" 12 "$model" "${tolerances[@]}"
}

# fp32 has 24 bits, and sums of a few hundred numbers. Errors of weights and gradients add up, and
# some models enlarge them: if each weight is wrong by at most 2^-24 in every update, transformers'
# norms in float64 change by up to 7e-6 (longrope), their losses by 1.3e-7.
fp32=(2e-6 2e-6 2e-5)

# bf16 has 8 bits in every matmul's input. An update of 0.0005 is a quarter of the distance between
# two weights of 0.3, so their copies in bf16 are up to two updates behind or ahead of them, those of
# smaller weights less. An update changes the loss by up to 5.5 %. After the first, norms say little:
# 2^16 times the error in fp32 is up to half of them.
# A token whose scores of two experts are nearly equal may take the other one: that changes loss and
# norms by some percent more.
bf16=(4e-2 3e-2 1)
bf16_experts=(8e-2 15e-2 1)
in_bf16() { # MODEL OPTIONS...
    if has_experts "$1"; then updates "$1" "${bf16_experts[@]}" "${@:2}"; else updates "$1" "${bf16[@]}" "${@:2}"; fi
}

models=$(awk '/^#/ { next } !seen[$1]++ { print $1 }' "$fixtures/losses.txt")

case $trainer in
*/train_gpt2cu)
    number=0
    for model in $models; do
        has_case $((number++)) || continue
        case $trainer in
        */FP32/*) updates "$model" "${fp32[@]}" --tf32 off ;;
        *) in_bf16 "$model" ;;
        esac
    done
    check_done
    exit
    ;;
esac

for model in $models; do
    updates "$model" "${fp32[@]}" --matmul fp32
    updates "$model" "${fp32[@]}" --matmul fp32 --recompute 3 --batch 1
    trained=$(value val loss)
    mv out saved
    runs "$model: its checkpoint" --model saved "${data[@]}" --batch 1 --steps 0 --samples 0 --matmul fp32 --save-every 0 --out out
    check "$model: the checkpoint has the loss of the run, $trained" [ "$(value val loss)" = "$trained" ]
    rm -rf saved
    in_bf16 "$model" --matmul bf16
done

# A dense model with --experts starts with its loss, and saves a model of experts.
while read -r model arch; do
    rm -rf out saved
    dense=$(sed -n "s/^$model 1 \([^ ]*\).*/\1/p" "$fixtures/losses.txt")
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

# family ARCH KEY: a cell of the table of families: model_type, GGUF.
family() {
    awk -F ' *[|] *' -v arch="$1" -v key="$2" '
        /^[|] `--arch` [|] `model_type`/ { for (i = 2; i < NF; i++) if ($i ~ key) column = i }
        column && $2 == arch { gsub(/`|,.*/, "", $column); print $column; exit }' "$page"
}

# export_gguf ARCH: writes model.gguf of the first model of the family that llama.cpp can have: a
# saved one, or a new one; some must have their own output layer, windows, or 64 layers; new ones of
# gemma2 have no cap of scores, so it is a named model, of other sizes.
export_gguf() {
    local config options tiny=(--layers 2 --channels 64 --heads 4 --seq-len 16 --total-batch 32 --steps 1 --samples 0)
    rm -f model.gguf
    for config in $(grep -lE "\"model_type\": \"$(family "$1" model_type)\"" "$fixtures"/*/config.json); do
        train --model "${config%/*}" --steps 0 --export-gguf model.gguf
        [ $status != 0 ] || return
    done
    for options in "--arch $1" "--arch $1 --own-head on" "--arch $1 --window 9" "--arch $1 --window 9 --layers 64" "--model $1:2b --head-size 16"; do
        # shellcheck disable=SC2086
        train "${tiny[@]}" $options --export-gguf model.gguf
        [ $status != 0 ] || return
    done
}

# The column about GGUF is what the trainer writes and reads.
for arch in $(awk -F ' *[|] *' '/^[|] `--arch` [|] `model_type`/ { on = 1 } /^$/ { on = 0 } on && $2 !~ /-/ { print $2 }' "$page"); do
    export_gguf "$arch"
    written='' read=''
    if [ $status = 0 ]; then # after the key: a type and a length of 8 bytes
        written=$(grep -aoE 'general[.]architecture.{12}[a-z0-9-]+' model.gguf | tr -d '\0' | sed 's/.*[^a-z0-9-]//')
        train --model model.gguf "${data[@]}" --seq-len 4 --total-batch 8 --steps 0 --samples 0 # a context may be a window
        [ $status != 0 ] || read=$written
    fi
    check "$page: $arch in GGUF, written: wanted \"$written\"" [ "$(family "$arch" GGUF)" = "$written" ]
    check "$page: $arch in GGUF, read: wanted \"$read\"" [ "$(family "$arch" GGUF)" = "$read" ]
done

llama=$root/build/llama/bin/python
if [ -x "$llama" ]; then
    check "in llama.cpp" "$llama" "$root/dev/ref/llama_cpp.py" --program "$trainer" --text "$root/README.md" \
        --check fixtures tokenizers chats
else
    echo "skipped: test_families, llama.cpp: build/llama is missing (scripts/install_deps.sh --test)"
fi
check_done
