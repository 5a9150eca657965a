#!/usr/bin/env bash
# test_multi_gpu.sh -- dev/bench/multi_gpu.sh in toy size. From the top of the repository, with build/sim/BF16/train_gpt2cu
# built.
set -u
export OMP_WAIT_POLICY=passive LC_ALL=C OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
name=multi_gpu
source dev/test/check.sh
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

if ! command -v mpirun >/dev/null || ! grep -q ncclCommInitRankConfig build/sim/BF16/train_gpt2cu; then
    echo "skipped: $name: mpirun or NCCL is missing (scripts/install_deps.sh --mpi)"
    check_done
    exit
fi

# toy [NAME=value...]: sets `status`, the files out.txt and err.txt in $dir, and `table`.
toy() {
    env TOY=1 OUT="$dir/out" "$@" dev/bench/multi_gpu.sh >"$dir/out.txt" 2>"$dir/err.txt"
    status=$?
    table=$dir/out/multi_gpu.md
}
lines() { grep -c -e "$1" "$table"; }

toy
check "it runs: exit status $status, $(head -n 1 "$dir/err.txt")" [ $status = 0 -a ! -s "$dir/err.txt" ]
check "the table is what it says" diff -q "$table" "$dir/out.txt"
check "bandwidth of three operations in two sizes" [ "$(lines '^| \(all-to-all\|all-gather\|reduce-scatter\) | 0.0[0-9]* | [0-9.]* | [0-9.]* |$')" = 6 ]
check "speed in four stages" [ "$(lines '^| [0-3] | [1-9][0-9]* ([0-9]* %) | [1-9][0-9]* ([0-9]* %) |$')" = 4 ]
check "the same bits" [ "$(lines '^| [23] | same | same |$')" = 2 ]
check "all is said to be well" [ "$(tail -n 1 "$table" | sed 's/.*; //')" = "0 failed" ]
toy GPUS=1
check "one GPU is refused: $(cat "$dir/err.txt")" [ $status = 1 -a "$(cut -c 1-21 "$dir/err.txt")" = "error: 1 GPUs; wanted" ]
toy MINUTES=0
check "without time there is nothing" [ $status = 0 -a "$(lines 'no time')" = 6 ]
CUSIM_NCCL_FAULT=1:1:error toy
check "failures are counted: exit status $status" [ $status = 1 -a "$(grep -c '^error: bits_[23]_2: ' "$dir/err.txt")" = 2 ]
check "and stand in the table" [ "$(lines '^| [23] | same | failed |$')" = 2 ]
check_done
