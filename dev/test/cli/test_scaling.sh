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
check_done
