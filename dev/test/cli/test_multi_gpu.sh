#!/usr/bin/env bash
# test_multi_gpu.sh -- dev/bench/multi_gpu.sh in toy size. Run it from the top of the repository,
# after build/sim/BF16/train_gpt2cu is built.
set -u
export OMP_WAIT_POLICY=passive LC_ALL=C OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
name=multi_gpu
source dev/test/lib/check.sh
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

if ! command -v mpirun >/dev/null || ! grep -q ncclCommInitRankConfig build/sim/BF16/train_gpt2cu; then
    echo "skipped: $name: mpirun or NCCL is missing (scripts/install_deps.sh --mpi)"
    check_done
    exit
fi

top=$PWD
cd "$dir" || exit 1

# toy [NAME=value...]: sets `status`, the files out.txt and err.txt, and `table`.
toy() {
    env TOY=1 OUT="$dir/out" "$@" "$top/dev/bench/multi_gpu.sh" >out.txt 2>err.txt
    status=$?
    table=out/multi_gpu.md
}
lines() { grep -c -e "$1" "$table"; }

toy
check "it runs: exit status $status, $(head -n 1 err.txt)" [ $status = 0 ]
check "nothing fails: $(head -n 1 err.txt)" [ ! -s err.txt ]
check "the table is what it says" diff -q "$table" out.txt
check "bandwidth of six operations in two sizes" \
    [ "$(lines '^| \(all-to-all\|all-gather\|reduce-scatter\|tensor-gather\|tensor-sum\|stage-exchange\) | 0.0[0-9]* | [0-9.]* | [0-9.]* |$')" = 12 ]
check "and beside matmuls, by channels" [ "$(lines '^\(8\|16\|32\) channels$') $(lines '^| [a-z-]* | 0.0156 | [0-9.]* | [0-9.]* | [0-9.]* | [0-9.]* |$')" = "3 18" ]
check "speed in four stages" [ "$(lines '^| [0-3] | [1-9][0-9]* ([0-9]* %) | [1-9][0-9]* ([0-9]* %) |$')" = 4 ]
check "the same bits" [ "$(lines '^| [23] | same | same |$')" = 2 ]
splits=$(($(lines '^| --.* | 1 | [1-9][0-9]* ([0-9]* %) |  |$') + $(lines '^| --.* | 2 | [1-9][0-9]* ([0-9]* %) | yes |$')))
check "$splits splits" [ $splits = 6 ]
check "all is said to be well" [ "$(tail -n 1 "$table" | sed 's/.*; //')" = "0 failed" ]
check "ranks are started by MPI" [ "$(lines '^- ranks are started by mpirun; /dev/shm: [0-9]')" = 1 ]
toy LAUNCH=script
check "without MPI it starts them: exit status $status, $(head -n 1 err.txt)" [ $status = 0 -a ! -s err.txt ]
check "and they share the work" [ "$(lines '^- ranks are started by script')$(lines '^| [23] | same | same |$')$(lines '^| --.* | 2 | .* | yes |$')" = 123 ]
toy GPUS=4 LAUNCH=script
check "four GPUs: exit status $status, $(head -n 1 err.txt)" [ $status = 0 -a ! -s err.txt ]
check "train in grids, by both orders" [ "$(lines '^| --[a-z]*-parallel 2 | \(NCCL\|events\) | \(on\|off\|auto\) | [1-9][0-9]* |$')" = 8 ]
toy GPUS=1
check "one GPU is refused: $(cat err.txt)" [ $status = 1 -a "$(cut -c 1-21 err.txt)" = "error: 1 GPUs; wanted" ]
toy MINUTES=0
check "without time there is nothing" [ $status = 0 -a "$(lines 'no time')" = 12 ]

# Other processes than the trainer's: all fail, or leave weights that differ.
mkdir bin
printf '#!/bin/sh\necho "error: no luck"\nexit 1\n' >bin/mpirun
chmod +x bin/mpirun
toy PATH="$dir/bin:$PATH"
check "failures are counted: exit status $status" [ $status = 1 -a "$(grep -c '^failed: .*: error: no luck$' err.txt)" = 23 ]
check "and stand in the table" [ "$(lines '^| [0-3] | failed | failed |$') $(lines '^| --.* | failed |  |$')" = "6 6" -a "$(tail -n 1 "$table" | sed 's/.*; //')" = "23 failed" ]
printf '#!/bin/sh\necho "error: no such grid"\nexit 2\n' >bin/mpirun
toy PATH="$dir/bin:$PATH"
check "what is refused is no failure: exit status $status" [ $status = 0 -a "$(grep -c '^refused: .*: error: no such grid$' err.txt)" = 23 ]
check "and stands in the table" [ "$(lines '^| --.* | refused |  |$')" = 6 ]
cat >bin/mpirun <<'END'
#!/bin/sh
for out; do :; done # the last argument: of the trainer, --out
[ -z "${NCCL_DEBUG_FILE:-}" ] || printf 'Channel 00/0 : 0[0] -> 1[1] via %s\n' P2P/CUMEM P2P/CUMEM SHM/direct/direct >"${NCCL_DEBUG_FILE%\%p}7"
case $out in /*) ;; *) exit 0 ;; esac
mkdir -p "$out/step_1"
echo "$out" >"$out/step_1/model.safetensors"
echo '{"kind":"train","tok_per_s":100}' >"$out/log.jsonl"
END
toy PATH="$dir/bin:$PATH"
check "other bits are no success: exit status $status" [ $status = 1 ]
check "the ways between GPUs are counted" [ "$(lines '^- channels of NCCL: 2 via P2P, 1 via SHM$')" = 1 ]
check "the table says so" [ "$(lines '^| 2 | same | DIFFERENT |$')$(lines '^| 3 | DIFFERENT | DIFFERENT |$')" = 11 ]
check "and of splits" [ "$(lines '^| --.* | 2 | 100 (50 %) | NO |$')" = 3 ]
check_done
