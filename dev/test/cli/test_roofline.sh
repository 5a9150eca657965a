#!/usr/bin/env bash
# test_roofline.sh -- dev/bench/roofline.py at a quick size: its sums follow the formulas, it has
# every launch of the step, an unknown launch ends it, and measured times go to the right rows. Run
# it from the top of the repository, after build/sim/FP32/train_gpt2cu is built.
set -u
name=roofline
source dev/test/lib/check.sh
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
top=$PWD
cd "$dir" || exit 1

B=2 T=64 L=6 C=384 Vp=50304 # d6
roofline() {
    python3 "$top/dev/bench/roofline.py" --precision FP32 --model d6 --batch $B --seq-len $T --card h200 --traces "$dir/traces" "$@" \
        >"$dir/table.md" 2>"$dir/err.txt"
}
sums() { sed -n "s/^| $1 | //p" "$dir/table.md" | tail -n 1; } # launches | GB | TFLOP | ms | share |
column() { cut -d '|' -f "$1" | tr -d ' '; }
row() { grep "^| $1 |" "$dir/table.md"; }
tera() { awk "BEGIN { printf \"%.6f\", ($1) * 1e-12 }"; }

check "it runs" roofline
check "the matmuls' work is 6 per weight and token" \
    [ "$(sums matmul | column 3)" = "$(tera "6 * ($L * 12 * $C ^ 2 + $Vp * $C) * $B * $T")" ]
check "attention's is 7 matmuls of half of T * T" \
    [ "$(sums attention | column 3)" = "$(tera "7 * $L * $B * $C * $T ^ 2")" ]
check "AdamW moves 28 bytes a parameter" \
    [ "$(row AdamW | column 5)" = "$(awk "BEGIN { printf \"%.1f\", 28e-6 * (($Vp + 1024) * $C + $L * (12 * $C ^ 2 + 13 * $C) + 2 * $C) }")" ]
# the step behind the first AdamW
step=$dir/step.jsonl
awk '/update_kernel_/ && !n++ { next } n' "$dir/traces/run.jsonl" | grep -v 'to the \(device\|host\)' |
    sed '/update_kernel_/q' >"$step"
check "every launch is in a row" [ "$(sums all | column 1)" = "$(wc -l <"$step")" ]
check "every block has its layernorms" [ "$(row 'layernorm forward' | column 4)" = $((2 * L + 1)) ]

# measured: 3 us each, matmuls in two kernels of which one sums the parts of a split
{
    echo '==PROF== Connected'
    echo '"ID","Kernel Name","Metric Name","Metric Value"'
    sed -n 's/.*"kernel":"\([^"]*\)".*/"0","\1","gpu__time_duration.sum","3,000"/p
        s/.*"matmul".*/"0","nvjet_tst","gpu__time_duration.sum","2,000"\n"0","splitKreduce_kernel","gpu__time_duration.sum","1,000"/p' \
        "$step"
} >"$dir/ncu.csv"
check "measured times are read" roofline --measured "$dir/ncu.csv"
check "and are those of a matmul" grep -q '^| fc dinp | .* | 3.0 | 0.018 | ' "$dir/table.md"
check "and of an operation of three kernels" grep -q '^| attention backward | .* | 9.0 | 0.054 | ' "$dir/table.md"
sed -i '0,/attention_forward/{/attention_forward/d}' "$dir/ncu.csv"
roofline --measured "$dir/ncu.csv"
check "another step than the simulated one is refused" grep -q "^error: ncu's kernel [0-9]* is " "$dir/err.txt"

sed -i.good 's/norm_forward_kernel/new_kernel/' "$dir/traces/run.jsonl"
roofline
check "an unknown kernel is refused" grep -q '^error: bench_gpu --list has no operation with this kernel: .*new_kernel' "$dir/err.txt"
sed '/"kernel":"void column_sums_finish_kernel.*"grid":\[12,3,1\]/d' "$dir/traces/run.jsonl.good" >"$dir/traces/run.jsonl"
roofline
check "so is an operation without all of its kernels" grep -q '^error: layernorm backward: ' "$dir/err.txt"

# A dry run launches what a run launches.
for dry in 0 1; do
    CUSIM_DRY=$dry CUSIM_TRACE=$dir/dry$dry.jsonl XDG_CACHE_HOME=$dir "$top/build/sim/FP32/train_gpt2cu" --layers 1 --channels 32 \
        --heads 2 --batch 2 --seq-len 16 --total-batch 64 --steps 2 --eval-every 0 --sample-every 0 --autotune off \
        >"$dir/run.txt" 2>&1
    check "a run with CUSIM_DRY=$dry" [ $? = 0 ]
done
check "launches as much" cmp "$dir/dry0.jsonl" "$dir/dry1.jsonl"
check_done
