#!/usr/bin/env bash
# memory_table.sh -- savings and costs of each memory technique, as a table: a row is a command
# line.
#
#     dev/bench/memory_table.sh [--on gpu|sim|cpu] [--model d24] [--batch 4] [--seq-len 512]
#                               [--steps 50] [--bin DIR] [--data SHARD]
#
# Every row makes updates of the same sequences. Columns: the memory according to --plan, the
# measured peak, how many times smaller this is than the first row, tok/s (the median of the steps
# after the first), how many times as fast as the first row, and the training loss of the last step.
# A row whose options the trainer does not have is left out.
#
#     gpu     measured on a GPU: memory that the trainer allocated. Needs FP32 and BF16 programs
#     cpu     measured: the peak of the process (RSS), including the program and the data. fp32 only
#     sim     bytes only: the plan of the model, and beside it the plan and the peak of a toy on the
#             simulated GPU
#
# DIR has FP32/train_gpt2cu and BF16/train_gpt2cu (default: build/kit/tree/gpu_kit/bin, or
# build/sim), or train_gpt2 (default: build/plain). Without SHARD it trains on the built-in stories,
# with as many rows of the vocabulary as GPT-2 has. A model named toy is a tiny one.
set -u
cd "$(dirname "$0")/../.." || exit 1

on=cpu model=d24 batch=4 seq_len=512 steps=50 bin='' data=''
while [ $# -gt 0 ]; do
    case $1 in
    --on | --model | --batch | --seq-len | --steps | --bin | --data)
        [ $# -gt 1 ] || { echo "error: $1 needs a value" >&2; exit 2; }
        name=${1#--}
        printf -v "${name//-/_}" %s "$2"
        shift
        ;;
    *) sed -n '2,20s/^# \{0,1\}//p' "$0" && exit 2 ;;
    esac
    shift
done
case $on in
gpu) bin=${bin:-build/kit/tree/gpu_kit/bin} ;;
sim) bin=${bin:-build/sim} ;;
cpu) bin=${bin:-build/plain} ;;
*) echo "error: --on $on: wanted gpu, sim or cpu" >&2 && exit 2 ;;
esac
quarter=$((batch > 4 ? batch / 4 : 1))
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

trainer() { if [ $on = cpu ]; then echo "$bin/train_gpt2"; else echo "$bin/$1/train_gpt2cu"; fi; }

# name | precision | options. The last --batch counts.
rows="fp32 AdamW (baseline) | FP32 | --recompute 0
micro-batch / 4 | FP32 | --recompute 0 --batch $quarter
recompute 1 | FP32 | --recompute 1
recompute 2 | FP32 | --recompute 2
recompute mlp | FP32 | --recompute mlp
recompute 3 | FP32 | --recompute 3
Lion | FP32 | --recompute 0 --optimizer lion
SGD | FP32 | --recompute 0 --optimizer sgd
SGD, no momentum | FP32 | --recompute 0 --optimizer sgd --sgd-momentum 0
Adafactor | FP32 | --recompute 0 --optimizer adafactor
AdamW, 8 bits | FP32 | --recompute 0 --optimizer adamw8bit
Muon | FP32 | --recompute 0 --optimizer muon
embeddings frozen | FP32 | --recompute 0 --freeze embeddings
recompute 3, micro-batch / 4 | FP32 | --recompute 3 --batch $quarter
the same, Lion | FP32 | --recompute 3 --batch $quarter --optimizer lion
the same, 8 bits | FP32 | --recompute 3 --batch $quarter --optimizer adamw8bit
the same, Adafactor | FP32 | --recompute 3 --batch $quarter --optimizer adafactor
optimizer on the host | FP32 | --recompute 0 --offload-optimizer host
bf16, master weights | BF16 | --recompute 0
bf16, stochastic rounding | BF16 | --recompute 0 --master-weights off
the same, Lion | BF16 | --recompute 0 --master-weights off --optimizer lion
the same, 8 bits | BF16 | --recompute 0 --master-weights off --optimizer adamw8bit
bf16, master weights, 8 bits, recompute 2 | BF16 | --recompute 2 --optimizer adamw8bit
bf16, 24 bits, 8 bits, recompute 2 | BF16 | --recompute 2 --master-weights 24 --optimizer adamw8bit
bf16, 24 bits, 8 bits, recompute 2, micro-batch / 4 | BF16 | --recompute 2 --master-weights 24 --batch $quarter --optimizer adamw8bit
bf16, 24 bits, 8 bits, recompute 3 | BF16 | --recompute 3 --master-weights 24 --optimizer adamw8bit
bf16, recompute 3, optimizer on the host | BF16 | --recompute 3 --offload-optimizer host
bf16, stochastic rounding, recompute 3, micro-batch / 4 | BF16 | --recompute 3 --master-weights off --batch $quarter
the same, 8 bits | BF16 | --recompute 3 --master-weights off --batch $quarter --optimizer adamw8bit
the same, Adafactor | BF16 | --recompute 3 --master-weights off --batch $quarter --optimizer adafactor
bf16, 24 bits, 8 bits, recompute 2, in backward | BF16 | --recompute 2 --master-weights 24 --optimizer adamw8bit --update-in-backward on
bf16, stochastic rounding, Adafactor, recompute 3, in backward | BF16 | --recompute 3 --master-weights off --optimizer adafactor --update-in-backward on
all on the host | BF16 | --recompute 3 --offload-optimizer host --offload-residuals on --batch $quarter"

# run PRECISION SIZE BATCH T OPTION...: prints the trainer's output, for updates of BATCH sequences.
run() {
    local precision=$1 size=$2 sequences=$3 T=$4 option own=no
    shift 4
    for option; do [ "$option" != --batch ] || own=yes; done
    [ $own = yes ] || set -- "$@" --batch "$sequences"
    # shellcheck disable=SC2086
    "$(trainer "$precision")" $size ${data:+--train-data "$data"} --seq-len "$T" --total-batch $((sequences * T)) \
        --schedule constant --warmup 0 --eval-every 0 --samples 0 --save-every 0 "$@" </dev/null 2>&1
}
planned() { sed -n 's/^memory: \([0-9.]*\) MiB.*/\1/p' | head -n 1; }
value() { sed -n "s/^{\"kind\":\"$1\".*\"$2\":\([-0-9.e+]*\).*/\1/p" "$work/run/log.jsonl"; }

# Succeeds if the trainer accepts every option of a row; --plan checks that without any work.
knows() {
    local precision=$1
    shift
    run "$precision" "--layers 1 --channels 64 --heads 2" "$batch" 16 --steps 1 "$@" --plan >"$work/knows" && return
    grep -qE '^error: (unknown option|--[a-z-]* is (an option of|[^;]*; wanted))' "$work/knows" && return 1
    grep -a -m 1 error "$work/knows" >&2
    failed=1
    return 1
}

# Runs the steps of a row; sets peak, speed and loss.
measure() {
    local precision=$1 size=$2 T=$3
    shift 3
    rm -rf "$work/run"
    if ! run "$precision" "$size" "$batch" "$T" "$@" --steps "$steps" --out "$work/run" >"$work/log"; then
        grep -a -m 1 error "$work/log" >&2
        return 1
    fi
    peak=$(value summary peak_mb)
    speed=$(value train tok_per_s | tail -n +2 | sort -n | awk '{ x[NR] = $1 } END { print x[int((NR + 1) / 2)] }')
    loss=$(value train loss | tail -n 1)
}
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.2f", b ? a / b : 0 }'; }
round() { awk -v x="$1" -v digits="$2" 'BEGIN { printf "%." digits "f", x }'; }

failed=0 first_peak='' first_speed='' plan='' peak='' speed='' loss=''
toy="--layers 2 --channels 64 --heads 2 --context 1024"
size="--model $model"
[ -n "$data" ] || size+=" --vocab-size 50257"
[ "$model" != toy ] || size=$toy
echo "$model, $batch x $seq_len tokens an update, $steps steps, on $on"
echo
if [ $on = sim ]; then
    echo "| technique | options | planned MiB | times smaller | toy: planned MiB | toy: allocated MiB |"
    echo "|---|---|---:|---:|---:|---:|"
else
    echo "| technique | options | planned MiB | measured MiB | times smaller | tok/s | times the speed | loss |"
    echo "|---|---|---:|---:|---:|---:|---:|---:|"
fi
while IFS='|' read -r name precision options; do
    read -r precision <<<"$precision"
    read -ra words <<<"$options"
    { [ $on != cpu ] || [ "$precision" = FP32 ]; } && [ -x "$(trainer "$precision")" ] || continue
    knows "$precision" "${words[@]}" || continue
    plan=$(run "$precision" "$size" "$batch" "$seq_len" --steps "$steps" "${words[@]}" --plan | planned)
    row="| ${name% } | $([ $on = cpu ] || echo "$precision ")\`${words[*]}\` | $(round "$plan" 1) |"
    if [ $on = sim ]; then
        small=$(run "$precision" "$toy" "$batch" 16 --steps 2 "${words[@]}" --autotune off --plan | planned)
        steps=2 measure "$precision" "$toy" 16 "${words[@]}" --autotune off || { failed=1 && continue; }
        first_peak=${first_peak:-$plan}
        echo "$row $(ratio "$first_peak" "$plan") | $small | $(round "$peak" 1) |"
        [ "$small" = "$(round "$peak" 1)" ] || { echo "error: $name: the toy's plan is not its memory" >&2 && failed=1; }
    else
        measure "$precision" "$size" "$seq_len" "${words[@]}" || { failed=1 && continue; }
        first_peak=${first_peak:-$peak} first_speed=${first_speed:-$speed}
        echo "$row $(round "$peak" 1) | $(ratio "$first_peak" "$peak") | $(round "$speed" 0) |" \
            "$(ratio "$speed" "$first_speed") | $(round "$loss" 4) |"
    fi
done <<<"$rows"
exit $failed
