#!/usr/bin/env bash
# same_bits.sh -- prints checksums of runs of every kind: a change that only moves code must not
# change them.
#
#     dev/test/same_bits.sh ./train_gpt2 > before         build/sim/BF16/train_gpt2cu is a trainer, too
#     ... change, build ...
#     dev/test/same_bits.sh ./train_gpt2 | diff before -
#
# A line for each run: its name, and checksums of the losses and norms of 20 steps, of weights and
# optimizer state, and of generated text. Takes some minutes, in the simulator ten.
set -u
trainer=$(realpath "${1:?usage: same_bits.sh TRAINER}")
dir=$(mktemp -d /tmp/same_bits_XXXXXX)
trap 'rm -rf "$dir"' EXIT
cd "$dir" || exit 1
export OMP_WAIT_POLICY=passive LC_ALL=C OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 XDG_CACHE_HOME=$dir
is_gpu=
steps=20
case $trainer in *cu)
    is_gpu=1
    steps=6 # the simulator is slow
    ;;
esac
model=(--channels 64 --heads 2 --batch 3 --seq-len 64 --steps $steps --save-every $((steps / 2)) --eval-batches 2 --eval-every 5 --samples 1)
layers=3
total_batch=384

sum() { cat -- "$@" | sha256sum | cut -c 1-12; }

# run NAME OPTION...: trains, and prints the checksums. LAUNCH goes in front of the trainer.
run() {
    local name=$1
    shift
    if ! ${LAUNCH-} "$trainer" "${model[@]}" --layers $layers --total-batch $total_batch "$@" --out "$name" >"$name.stdout" 2>"$name.stderr" </dev/null; then
        echo "$name: $(grep -m 1 -a '^error' "$name.stderr" "$name.stdout")"
        return
    fi
    grep -oE '"(loss|norm)":[^,}]*' "$name/log.jsonl" >"$name.losses"
    echo "$name: losses $(sum "$name.losses") weights $(sum "$name"/step_*/model*.safetensors) state $(sum "$name"/step_*/optimizer*) samples $(grep -o "\"text\":.*\"" "$name/log.jsonl" | sum)"
}

run plain
half=step_$(printf %08d $((steps / 2)))
run resumed --resume "plain/$half" --override
for level in 0 2 mlp 3; do run "recompute_$level" --recompute $level; done
for rule in adamw8bit adafactor muon soap lion sgd; do run "$rule" --optimizer $rule; done
run adafactor_all --optimizer adafactor --adafactor-beta1 0.9 --adafactor-scale on
run norMuon --optimizer muon --muon-rows on --cautious-decay on
layers=4
for share in all pairs loop:2; do run "share_$share" --share-layers $share; done
[ $is_gpu ] || run bf16_share --matmul bf16 --share-layers pairs
layers=3
run frozen --freeze 'embeddings,h.0'
run frozen_attention --freeze attention --recompute 3
run frozen_blocks --freeze '*[0-1],wpe'
total_batch=192
for rule in adamw adafactor muon; do run "in_backward_$rule" --update-in-backward on --optimizer $rule; done
[ $is_gpu ] || run bf16_in_backward --matmul bf16 --update-in-backward on
total_batch=384
run experts --arch mixtral --experts 4 --hidden 64
run packed --pack bestfit --doc-mask on
run packed_uniform --pack uniform
if [ $is_gpu ]; then
    run fp32_gradients --gradients fp32
    run no_master --master-weights off
    run master_24 --master-weights 24
    run offload_host --offload-optimizer host
    run offload_disk --offload-optimizer disk --offload-path "$dir"
    run offload_residuals --offload-residuals on
    run chunks --logits-chunk 50
    run no_graph --graph off
else
    run bf16 --matmul bf16
    for level in 0 1 2 mlp 3; do run "bf16_recompute_$level" --matmul bf16 --recompute $level; done
    for rule in adamw8bit adafactor muon lion sgd; do run "bf16_$rule" --matmul bf16 --optimizer $rule; done
    run bf16_mask --matmul bf16 --pack bestfit --doc-mask on
    run bf16_frozen --matmul bf16 --freeze 'embeddings,h.0'
fi
# ranks N: the following runs have N processes.
ranks() { LAUNCH="mpirun --oversubscribe --bind-to none -n $1"; }
if command -v mpirun >/dev/null; then
    ranks 3
    for zero in 0 1 2 $([ $is_gpu ] && echo 3); do run "ranks_zero_$zero" --zero $zero; done
    for rule in adamw8bit muon soap; do run "ranks_$rule" --zero 2 --optimizer $rule; done
    run ranks_adafactor --zero 2 --optimizer adafactor --recompute 3
    run ranks_adafactor_all --zero 2 --optimizer adafactor --adafactor-beta1 0.9 --adafactor-scale on
    run ranks_frozen --zero 2 --freeze '*[0-1],wpe'
    run ranks_resumed --resume "plain/$half" --zero 2 --override
    if [ $is_gpu ]; then
        run ranks_params --zero 3 --offload-params on
        run ranks_offload --zero 2 --offload-optimizer host
    else
        run ranks_bf16 --zero 2 --matmul bf16
    fi
    ranks 2
    run experts_divided --arch mixtral --experts 4 --hidden 64 --expert-parallel 2 --zero 2
    run tensor --tensor-parallel 2
    run pipeline --pipeline-parallel 2
    [ $is_gpu ] || run context --context-parallel 2 # whole tiles of GPUs are long
    ranks 4
    run grid --tensor-parallel 2 --zero 2
    run grid_muon --tensor-parallel 2 --zero 2 --optimizer muon
    [ ! $is_gpu ] || run two_levels --zero 3 --shard-ranks 2
    LAUNCH=
    run one_resumed --resume "ranks_zero_2/$half" --override
    run one_resumed_muon --resume "ranks_muon/$half" --override
fi

# generate NAME OPTION...
generate() {
    local name=$1
    shift
    "$trainer" --model plain "$@" >"$name.text" 2>"$name.stderr" </dev/null || cat "$name.stderr"
    [ ! -e texts.jsonl ] || mv texts.jsonl "$name.text"
    echo "$name: $(sum "$name.text")"
}
printf '{"prompt": "One day"}\n{"prompt": "The cat"}\n{"prompt": "A"}\n' >prompts.jsonl
generate generated --prompt "One day" --tokens 50
generate prompts --prompts prompts.jsonl --out-texts texts.jsonl --tokens 40 --temperature 0.8 --top-k 20
generate greedy --prompt "Tom" --temperature 0 --tokens 40
generate generated_int8 --prompt "One day" --tokens 50 --quantize q8_0
[ $is_gpu ] || generate generated_bf16 --prompt "One day" --tokens 50 --matmul bf16
