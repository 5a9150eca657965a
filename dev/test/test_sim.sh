#!/usr/bin/env bash
# test_sim.sh -- the GPU trainer from the outside, on the simulated GPU: the loss curve of the CPU trainer, and its
# command line. From the top of the repository, with build/sim/FP32/train_gpt2cu and build/plain/train_gpt2 built.
set -u
gpu=$PWD/build/sim/FP32/train_gpt2cu
cpu=$PWD/build/plain/train_gpt2
name=sim
source dev/test/check.sh
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir" || exit 1

losses() { sed -n 's/^{"kind":"\(train\|val\)","step":\([0-9]*\),"loss":\([^,}]*\).*/\1 \2 \3/p' "$1/log.jsonl"; }

# Are the losses of both runs, line by line, within 1e-4 of each other?
same_curve() {
    paste -d ' ' <(losses gpu) <(losses cpu) |
        awk '{ d = $3 / $6 - 1; n++; if ($1 != $4 || $2 != $5 || d > 1e-4 || d < -1e-4) { print; bad = 1 } }
             END { exit bad || n < 22 }'
}

run=(--layers 2 --channels 64 --heads 2 --seq-len 32 --batch 2 --total-batch 128 --steps 20 --eval-every 10
    --eval-batches 4 --samples 1 --sample-tokens 40 --temperature 0)
check "the CPU trainer runs" "$cpu" "${run[@]}" --out cpu
check "the GPU trainer runs" "$gpu" "${run[@]}" --tf32 off --out gpu
check "the same loss curve on the built-in stories" same_curve
check "the same sample" diff <(grep '"sample"' cpu/log.jsonl) <(grep '"sample"' gpu/log.jsonl)
check "the GPU trainer's model goes on in the CPU trainer" \
    "$cpu" --model gpu/step_00000020 --steps 0 --batch 2 --eval-batches 4 --samples 0 --out again
check "with the loss it had" \
    diff <(losses gpu | tail -n 1 | cut -d ' ' -f 3 | cut -c 1-6) <(losses again | tail -n 1 | cut -d ' ' -f 3 | cut -c 1-6)

"$gpu" --threads 2 >out.txt 2>err.txt
check "an option of the CPU trainer is refused" [ $? = 2 ]
check "by name" grep -q 'threads is an option of the CPU trainer' err.txt
CUSIM_MEMORY_MIB=45 "$gpu" --layers 2 --channels 64 --heads 2 --seq-len 32 --batch 64 >out.txt 2>err.txt
check "what does not fit is refused" [ $? = 1 ]
check "with what would" grep -q -e '--batch [0-9]* --recompute [0-9] fits' err.txt
LLMC_NVML_LIBRARY=none.so "$gpu" --layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 1 -lg 1 >out.txt
check "without NVML a run goes on" [ $? = 0 ]
check "and says why there is no report" grep -q 'no GPU report: .*none.so' out.txt
CUSIM_DEVICES=0 "$gpu" --plan --model d12 --out plan >plan.txt
check "a plan needs no GPU" [ $? = 0 ]
check "and speaks of memory" grep -q '^memory: .* = parameters .*; on the host: pinned copy to save [0-9]' plan.txt

check_done
