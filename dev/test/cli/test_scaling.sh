#!/usr/bin/env bash
# test_scaling.sh -- dev/bench/scaling.py counts the memory that the GPU trainer plans, and its
# speeds are plausible.
#
#     dev/test/cli/test_scaling.sh build/sim/BF16/train_gpt2cu
set -u
trainer=$(realpath "${1:?usage: test_scaling.sh TRAINER}")
name=scaling
source dev/test/lib/check.sh
scaling=$PWD/dev/bench/scaling.py
work=$(mktemp -d /tmp/llmc_scaling_XXXXXX)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

# planned MODEL PROCESSES STAGE: GiB of parameters, gradients and state, which come before
# activations.
planned() {
    "$trainer" --plan --model "$1" --vocab-size 50257 --batch 1 --num-processes "$2" --zero "$3" |
        sed -n 's/^memory per GPU: [0-9.]* MiB = \(.*\) + activations .*/\1/p' |
        awk -F ' [+] ' '{ for (i = 1; i <= NF; i++) { sub(".* ", "", $i); sum += $i } print sum / 1024 }'
}

# counted MODEL PROCESSES STAGE: the same by scaling.py.
counted() { python3 "$scaling" memory --world "$2" | awk -v model="$1" -v column=$((4 + $3)) '$1 == model { print $column }'; }

for processes in 2 8; do
    for stage in 1 2 3; do
        for model in d12=124M d48=1558M gpt3:c4096=6.7B; do
            ours=$(planned "${model%=*}" $processes $stage) paper=$(counted "${model#*=}" $processes $stage)
            check "${model%=*}, $processes GPUs, stage $stage: $ours GiB planned, $paper counted" \
                awk -v a="$ours" -v b="$paper" 'BEGIN { exit !(a > 0 && (a - b) ^ 2 < (0.006 + 0.002 * b) ^ 2) }'
        done
    done
done
check "speed falls with the number of GPUs" awk '{ exit !($2 >= $5 && $5 >= $8 && $8 >= $11) }' \
    <<<"$(python3 "$scaling" speed | sed -n '/^124M/s/%//gp')"
check "offloading is written down for every model" [ "$(python3 "$scaling" offload | grep -c GPU:)" = 10 ]

# chosen MODEL GPUS TOKENS SEQ_LEN OPTION...: the line of the grid that `parallel` chooses.
chosen() { python3 "$scaling" parallel --models "$1" --gpus "$2" --total-batch "$3" --seq-len "$4" "${@:5}" | grep -e '<-$'; }

# grid WANTED SECONDS CHOSEN...: the chosen grid starts so, and takes this long within 10 %.
grid() {
    local line
    line=$(chosen "${@:3}")
    check "$3 on $4 GPUs, $5 tokens an update: $1 in $2 s, got $line" \
        awk -v wanted="$1" -v seconds="$2" -F ': ' '{ split($2, x, " "); exit !(index($3, wanted) == 1 && (x[1] - seconds) ^ 2 < (0.1 * seconds) ^ 2) }' <<<"$line"
}
# ZeRO alone while there are sequences enough; tensor groups for few sequences and wide models;
# context groups for long sequences; pipelines where the network is slow.
grid '--zero 2' 42.1 6.7B 8 4194304 4096
grid '--zero' 5.23 6.7B 64 4194304 4096
grid '--zero' 0.633 13B 1024 4194304 4096
grid '--tensor-parallel 2 --zero' 12.1 65B 256 4194304 4096 --hardware hidden_tp=0.7
grid '--tensor-parallel 4 --zero' 0.102 6.7B 512 524288 4096 --hardware hidden_tp=0.7
grid '--tensor-parallel 8 --context-parallel 4 --zero' 1.9 6.7B 1024 4194304 131072 --hardware hidden_tp=0.7
grid '--tensor-parallel 2 --pipeline-parallel 4' 68 65B 64 4194304 4096 --hardware net_gbps=1.3
# grids_of FILE: "t c P seconds" of each line with a grid, the chosen one first.
grids_of() {
    sed -n -e 's/ <-$/ --fit auto/' -e 's/^fit: \(--.*\): .* MiB, \([0-9.e-]*\) s/\2 \1/p' -e 's/^.* GPUs: \([0-9.e-]*\) s, .* GiB: /\1 /p' "$1" |
        awk '{ t = c = P = 1; for (i = 2; i < NF; i++) { if ($i == "--tensor-parallel") t = $(i + 1); if ($i == "--context-parallel") c = $(i + 1)
            if ($i == "--pipeline-parallel") P = $(i + 1) } print (/--fit auto/ ? 0 : 1), t, c, P, $1 }' | sort -n -s -k 1,1 | cut -d ' ' -f 2-
}

# The trainer and scaling.py search alike: with the trainer's rates they choose the same grid, and
# the times of each grid that the trainer prints agree within 10 %.
agree() { # MODEL NAME GPUS TOKENS SEQ_LEN
    CUSIM_DEVICES=0 "$trainer" --plan --model "$1" --vocab-size 50257 --seq-len "$5" --batch 8 --total-batch "$4" --num-processes "$3" \
        --gpus-per-node 8 >plan.txt
    python3 "$scaling" parallel --models "$2" --gpus "$3" --total-batch "$4" --seq-len "$5" --batch 8 --show 1000 \
        --hardware gemm=643.1,attention=197.9,memory_gbps=2680 >paper.txt
    grids_of plan.txt >plan.grids
    grids_of paper.txt >paper.grids
    local ours paper
    ours=$(head -n 1 plan.grids) paper=$(head -n 1 paper.grids)
    check "$1 on $3 GPUs: both choose $ours, $paper" [ "$(wc -l <plan.grids) ${ours% *}" = "5 ${paper% *}" ]
    check "$1 on $3 GPUs: times agree" awk 'NR == FNR { paper[$1 " " $2 " " $3] = $4; next }
        { x = paper[$1 " " $2 " " $3]; bad += !(x > 0 && (x - $4) ^ 2 < (0.1 * x) ^ 2) } END { exit bad > 0 }' paper.grids plan.grids
}
agree gpt2:d48 1558M 64 1048576 1024
agree gpt3:c4096 6.7B 256 4194304 2048
agree gpt3:c5120 13B 1024 1048576 2048

python3 "$scaling" parallel --published >published.txt
check "published figures, but those of contexts above 65k tokens, are met within 25 %" \
    [ "$(grep -c '[0-9] %$' published.txt) $(sed -n 's/ %$//p' published.txt | grep '[0-9]$' | awk '$NF > 25 || $NF < -25' | grep -vc 'T 131k\|T 262k')" = "15 0" ]
check "--published names its sources" [ "$(grep -c '^\[[1-4]\] .*\(MFU\|GPU\)' published.txt)" = 4 ]
check_done
