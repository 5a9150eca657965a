#!/usr/bin/env bash
# test_architectures.sh -- runs of every architecture from the outside: training, resuming, ranks,
# optimizers, frozen and shared layers, generating, quantizing, exporting.
#
#     dev/test/cli/test_architectures.sh build/plain/train_gpt2
set -u
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

trainer=$(realpath "${1:?usage: test_architectures.sh TRAINER}")
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
trainer_begin test_architectures
export TMPDIR=$work # mpirun's files

tiny=(--layers 2 --channels 64 --heads 4 --hidden 128 --seq-len 32 --total-batch 64 --steps 6 --eval-every 0 --sample-every 0 --seed 3)
weights=step_00000006/model.safetensors

# same_weights WHAT A B: two runs ended with the same bits.
same_weights() { check "$1" cmp "$2/$weights" "$3/$weights"; }

test_run() {
    good "$arch" "${model[@]}" --out whole --save-every 3
    check "$arch: the summary names it" grep -q "^architecture: $arch, heads of" stdout
    mkdir resumed && cp -r whole/step_00000003 resumed
    runs "$arch: resume" "${model[@]}" --out resumed --save-every 3 --resume on
    same_weights "$arch: a resumed run" whole resumed
    runs "$arch: continue" --model whole --steps 2
    bad 2 "--kv-heads is 3|has" --model whole --kv-heads 3 --steps 2
    runs "$arch: update in the backward pass" "${model[@]}" --grad-clip 0 --update-in-backward on --out inside
    runs "$arch: without" "${model[@]}" --grad-clip 0 --out outside
    same_weights "$arch: updates in the backward pass" inside outside
}

test_texts() {
    runs "$arch: a prompt" --model whole --prompt 'One day' --tokens 8 --temperature 0
    check "$arch: the text starts with it" grep -q '^One day' stdout
    runs "$arch: a prompt in 8 bits" --model whole --prompt 'One day' --tokens 8 --quantize q8_0
    runs "$arch: a prompt in bf16" --model whole --prompt 'One day' --tokens 8 --matmul bf16
}

test_export() {
    if [[ " nanochat gemma2 exaone4 " = *" $arch "* ]]; then # no such layers
        bad 2 "--export-gguf|$arch" --model whole --steps 0 --export-gguf model.gguf
    elif [ "$arch" = olmoe ]; then # llama.cpp's loader of it wants an output layer of its own
        bad 2 "--export-gguf|olmoe|--own-head on" --model whole --steps 0 --export-gguf model.gguf
    else
        runs "$arch: GGUF" --model whole --steps 0 --export-gguf model.gguf
        check "$arch: GGUF names it" grep -qa "general.architecture" model.gguf
    fi
}

test_options() {
    local line
    for line in '--optimizer adamw8bit' '--optimizer adafactor' '--optimizer muon --muon-rows on' '--optimizer soap' '--optimizer lion' \
        '--optimizer sgd --lr 0.1' '--matmul bf16' '--freeze embeddings,blocks[0]' '--freeze attention,mlp[1]' \
        '--share-layers all' '--share-layers loop:1' '--doc-mask on --z-loss 1e-4' '--recompute 3' '--plan'; do
        if [[ "$arch $line" = @(qwen35|lfm2)' --share-layers'* ]]; then # one of two layers has attention
            # shellcheck disable=SC2086
            bad 2 "--share-layers|only layer 1 has attention" "${model[@]}" $line
            continue
        fi
        # shellcheck disable=SC2086
        runs "$arch $line" "${model[@]}" $line
        check "$arch $line: finite" sh -c '! grep -qiwE "nan|inf" stdout'
    done
}

# Ranks that divide the optimizer's state have the bits of ranks that do not.
test_ranks() {
    local stage
    for stage in 0 1; do
        timeout 120 mpirun --oversubscribe --bind-to none -n 2 "$trainer" "${model[@]}" --optimizer muon \
            --zero $stage --out ranks_$stage >stdout 2>stderr </dev/null
        status=$?
        check "$arch: 2 ranks, --zero $stage: $(head -n 1 stderr)" [ $status = 0 ]
    done
    same_weights "$arch: --zero 1" ranks_0 ranks_1
}

lines=('llama --kv-heads 2 --own-head on' 'mistral --window 9' 'qwen2 --kv-heads 1'
    'qwen3 --head-size 32 --kv-heads 2 --window 7 --window-pattern SL' 'arcee' 'nanochat --kv-heads 2'
    'mixtral --experts 4 --window 9' 'qwen3moe --experts 3 --kv-heads 2' 'olmoe --experts 6 --experts-used 3'
    'glm4moe --experts 4 --shared-hidden 256 --own-head on'
    'olmo2 --kv-heads 2' 'gemma2 --kv-heads 2 --window 9 --window-pattern SL' 'granite --kv-heads 1'
    'smollm3 --kv-heads 2' 'olmo3 --kv-heads 2 --window 9' 'exaone4 --kv-heads 2 --window 9 --window-pattern SL'
    'granite4 --kv-heads 1' 'gemma3 --kv-heads 2 --window 9' 'phi3 --window 9' 'glm4 --kv-heads 2'
    'gptoss --experts 4 --kv-heads 2 --window 9' 'qwen35 --kv-heads 2 --layer-types delta,full'
    'lfm2 --kv-heads 2 --layer-types conv,full' 'deepseek3 --experts 4')
for i in "${!lines[@]}"; do
    has_case "$i" || continue
    line=${lines[i]}
    arch=${line%% *}
    # shellcheck disable=SC2206
    model=(--arch $line "${tiny[@]}")
    test_run
    test_texts
    test_export
    test_options
    if command -v mpirun >/dev/null && grep -q MPI_Init_thread "$trainer"; then
        test_ranks
    fi
    rm -rf whole resumed inside outside ranks_*
done
check_done
