#!/usr/bin/env bash
# test_kill.sh -- kills a run that saves all the time, by kill -9 at random moments: it resumes each
# time, no checkpoint is ever lost or incomplete, and at the end the run has the same bits as one
# that was not killed.
#
#     dev/test/cli/test_kill.sh build/plain/train_gpt2 [KILLS] [SEED] [RANKS]      20 kills by default
#
# With RANKS, each start has another number of ranks, at most RANKS, under mpirun, and one of them
# is killed.
set -u
export OMP_WAIT_POLICY=passive LC_ALL=C
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

trainer=$(realpath "${1:?usage: test_kill.sh TRAINER [KILLS] [SEED] [RANKS]}")
kills=${2:-20}
RANDOM=${3:-$$}
ranks=${4:-1}
seed=$RANDOM
parent=/tmp
[ -w /dev/shm ] && parent=/dev/shm # flushing a disk hundreds of times shows nothing more about kills
work=$(mktemp -d $parent/llmc_kill_XXXXXX)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
failures=0
starts=0
fail() {
    echo "test_kill: FAILED: $*"
    failures=$((failures + 1))
}

options=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --eval-every 50 --eval-batches 1 --sample-every 40
    --sample-tokens 8 --samples 1 --skip-loss-z 2 --save-every 2 --keep 2 --keep-major 50 --threads 1)
files=(model.safetensors optimizer.1of1.safetensors)
if [ "$ranks" -gt 1 ]; then
    options+=(--zero 2 --total-batch 128) # the same bits for any number of ranks
    files=(model.safetensors)
fi
newest() { sed -n 's|^resume: from .*/step_0*\([0-9]*\), .*|\1|p' "$1"; }

steps=$((40 * kills))
"$trainer" "${options[@]}" --steps $steps --out whole >whole.txt || fail "the run without kills"
RANDOM=$seed
numbers() { sed -n 's/^{"kind":"\(train\|val\|sample\)","step":\([0-9]*\),"\(loss\|text\)":\("[^"]*"\|[^,}]*\).*/\1 \2 \4/p' "$1/log.jsonl"; }

# Starts the run; sets process.
start() {
    local launcher=()
    [ "$ranks" = 1 ] || launcher=(mpirun --oversubscribe --bind-to none -n $((1 + RANDOM % ranks)))
    "${launcher[@]}" "$trainer" "${options[@]}" --steps $steps --resume auto --out killed >out.txt 2>err.txt </dev/null &
    process=$!
}

# Kills it, or one of its ranks.
kill_one() {
    local pids=("$process")
    [ "$ranks" = 1 ] || read -ra pids <<<"$(pgrep -P "$process" -f "$trainer" | tr '\n' ' ')"
    [ ${#pids[@]} -gt 0 ] && kill -9 "${pids[RANDOM % ${#pids[@]}]}" 2>/dev/null
}

# Starts the run and, while kills are left, kills it. Sets status; `last` is the step it began at.
start_and_kill() {
    local process step
    : >out.txt
    start
    if [ $killed -lt "$kills" ]; then
        if ((RANDOM % 10)); then # once in ten times at any moment of the start
            while kill -0 $process 2>/dev/null && ! grep -q '^step' out.txt; do sleep 0.002; done
        fi
        sleep "0.0$(printf '%02d' $((RANDOM % 20)))"
        kill_one && killed=$((killed + 1))
    fi
    wait $process 2>/dev/null
    status=$?
    [ $status = 0 ] || [ $status = 137 ] || fail "start $starts: exit status $status: $(head -n 1 err.txt)"
    [ $status = 137 ] && [ "$ranks" -gt 1 ] || ! grep -q . err.txt || fail "start $starts: $(head -n 1 err.txt)"
    step=$(newest out.txt)
    [ "${step:-$last}" -ge "$last" ] || fail "start $starts: from step $step, was at $last before"
    last=${step:-$last}
}

# The finished run has left what the other one has.
compare_runs() {
    local file left final
    final=step_$(printf '%08d' $steps)
    for file in "${files[@]}"; do
        cmp "whole/$final/$file" "killed/$final/$file" || fail "$file differs from the run without kills"
    done
    diff <(numbers whole) <(numbers killed) >diff.txt || fail "the logs differ: $(head -n 3 diff.txt)"
    left=$(cd killed && echo step_*)
    [ "$left" = "$(cd whole && echo step_*)" ] || fail "checkpoints that are left: $left"
}

killed=0
runs=0
while [ $killed -lt "$kills" ] && [ $((++runs)) -le "$kills" ] && [ $failures = 0 ]; do # a slow shell kills a run seldom
    rm -rf killed
    last=0 status=137
    while [ $status = 137 ] && [ $((++starts)) -le $((20 * kills)) ] && [ $failures -le 5 ]; do
        start_and_kill
    done
    [ $status = 0 ] || fail "the run never ended"
    compare_runs
done
[ $killed = "$kills" ] || fail "$killed kills of $kills"
[ $failures = 0 ] && echo "test_kill: $killed kills in $runs runs of $steps steps, seed $seed: ok"
exit $((failures > 0))
