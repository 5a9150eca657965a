#!/usr/bin/env bash
# test_qk_clip.sh -- --qk-clip: scores of transformers in float64, the same clip for any division of
# the work and on a GPU, resumed runs, and what is refused.
#
#     dev/test/cli/test_qk_clip.sh build/plain/train_gpt2
#     dev/test/cli/test_qk_clip.sh build/sim/FP32/train_gpt2cu    # or in BF16
set -u
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

trainer=$(realpath "${1:?usage: test_qk_clip.sh TRAINER}")
root=$PWD
fixtures=$(realpath dev/ref/fixtures/models)
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
trainer_begin test_qk_clip
is_gpu='' exact=()
rounding=5e-5 # of fp32, after six updates with a high rate
case $trainer in
*/BF16/train_gpt2cu) is_gpu=1 rounding=0.06 ;;
*/train_gpt2cu) is_gpu=1 exact=(--tf32 off) ;;
esac

# ---- transformers ----

# Biases and groups; a latent of the queries, and none; sinks and windows.
python=$root/build/venv/bin/python
if [ $rounding = 0.06 ]; then
    echo "scores of transformers: only in fp32"
elif [ -x "$python" ] && "$python" -c 'import torch, transformers' 2>/dev/null; then
    for model in qwen2 deepseek3 deepseek3_plain gptoss; do
        "$python" "$root/dev/ref/check_qk_clip.py" "$trainer" "$fixtures/$model" "$model" --optimizer muon "${exact[@]}" >found 2>&1
        status=$?
        check "$model: $(tail -n 1 found)" [ $status = 0 ]
    done
else
    echo "skipped: scores of transformers: build/venv is missing (dev/ref/setup.sh)"
fi

# ---- any division of the work ----

for i in {1..300}; do echo "$i bottles of beer on the wall, $i bottles of beer."; done >text.txt
common=(--layers 2 --channels 64 --heads 4 --seq-len 32 --batch 4 --total-batch 256 --steps 6 --eval-every 0 --samples 0
    --zero 2 --train-data text.txt --optimizer muon --matrix-lr 0.1 --qk-clip 1)
tiny=("${common[@]}" "${exact[@]}")

# The loss, score and norm of each update.
numbers() { sed -n 's/^{"kind":"train".*"loss":\([^,]*\),"score":\([^,]*\),"norm":\([^,]*\).*/\1 \2 \3/p' "$1/log.jsonl"; }

# near DIRECTORY TOLERANCE [WHOLE]: the same losses, scores and norms as in `whole`.
near() {
    local whole=${3:-whole}
    check "$1: $(numbers "$1" | tail -n 1), wanted $(numbers "$whole" | tail -n 1)" awk -v e="$2" '
        NR == FNR { for (i = 1; i <= 3; i++) { wanted[FNR, i] = $i }; count++; next }
        { for (i = 1; i <= 3; i++) { d = $i / wanted[FNR, i] - 1; bad += d > e || d < -e } }
        END { exit bad > 0 || count != 6 || FNR != 6 }' <(numbers "$whole") <(numbers "$1")
}

good "the whole" "${tiny[@]}" --save-every 3 --out whole
good "without" "${tiny[@]}" --qk-clip 0 --out off
check "it clips" [ "$(numbers whole | tail -n 1)" != "$(sed 's/"norm/"score":0,&/' off/log.jsonl >off/with && numbers off | tail -n 1)" ]
check "the score on the screen" grep -q ' | score [0-9.]* | lr' <(train "${tiny[@]}" --log-every 1; cat stdout)
good "larger micro-batches" "${tiny[@]}" --batch 8 --out batches
near batches $rounding
good "recomputed" "${tiny[@]}" --recompute 3 --out recomputed
near recomputed 0.000000001
if [ -n "$is_gpu" ]; then
    gpu=$trainer trainer=$root/build/plain/train_gpt2
    good "the CPU" "${common[@]}" --out cpu
    trainer=$gpu
    near cpu $rounding
    good "a graph" "${tiny[@]}" --zero 1 --graph on --out graph
    near graph $rounding
    [ $rounding != 0.06 ] || for kind in off 24; do
        good "master weights $kind" "${tiny[@]}" --master-weights $kind --out "master_$kind"
        near "master_$kind" $rounding
    done
    good "shards in memory of the host" "${tiny[@]}" --zero 3 --offload-params on --out host
    near host 0.000000001
else
    good "three threads" "${tiny[@]}" --threads 3 --out threads
    near threads 0.000000001
    good "bf16" "${tiny[@]}" --matmul bf16 --out bf16
    near bf16 0.06
fi
good "resumed" "${tiny[@]}" --resume whole/step_00000003 --out resumed
check "resumed: other weights" cmp whole/step_00000006/model.safetensors resumed/step_00000006/model.safetensors

# ranks NAME OPTIONS...
ranks() {
    timeout 120 mpirun --oversubscribe -n 2 "$trainer" "${tiny[@]}" "${@:2}" --out "$1" >stdout 2>stderr </dev/null
    status=$?
    check "$*: $(grep error stderr | head -n 1)" [ $status = 0 ]
    near "$1" $rounding "$([ "$1" = context ] && [ -n "$is_gpu" ] && echo long)"
}
if command -v mpirun >/dev/null; then
    ranks shards
    check "two data ranks: other weights" cmp whole/step_00000006/model.safetensors shards/step_00000006/model.safetensors
    ranks data --zero 0
    ranks tensor --tensor-parallel 2
    if [ -n "$is_gpu" ]; then # whose chunks are multiples of 128 tokens
        good "long sequences" "${tiny[@]}" --seq-len 512 --batch 1 --total-batch 512 --out long
        ranks context --context-parallel 2 --seq-len 512 --batch 1 --total-batch 512
        ranks slices --zero 3
    else
        ranks context --context-parallel 2
    fi
    ranks stages --pipeline-parallel 2
else
    echo "skipped: ranks: mpirun is missing"
fi

# ---- refused ----

bad 2 '--qk-clip 1, but queries and keys have norms|qwen3' "${tiny[@]}" --arch qwen3
bad 2 '--qk-clip 1, but --freeze has queries or keys' "${tiny[@]}" --freeze 'attention[1]' --optimizer adamw --matrix-lr 0.02
bad 2 '--qk-clip 1, but --average' "${tiny[@]}" --average ema:0.9
bad 2 '--qk-clip 1|adapter' "${tiny[@]}" --model whole --lora-rank 4
bad 2 '--qk-clip 1, but its scores have a cap' --model "$fixtures/gemma2" --train-data "$fixtures/tokens.bin" --val-data "$fixtures/tokens.bin" --seq-len 13 --steps 1 --qk-clip 1

[ -z "$is_gpu" ] || bad 2 '--qk-clip 1, but --offload-optimizer' "${tiny[@]}" --offload-optimizer host

check_done
