#!/usr/bin/env bash
# defects.sh -- tries every fault that was ever found again, from the outside: each must stay fixed.
#
#     dev/test/defects.sh [TRAINER [TOKENIZE [SIM]]]     ./train_gpt2, ./tokenize, and the simulated GPU's trainer in FP32
#     DEFECTS='log|resume' dev/test/defects.sh           only those whose names match
#
# Each function defect_NAME of dev/test/defects/*.sh runs alone: only its own file is sourced, in a
# process that may take five minutes, and `work`, the current directory, is new and empty. check.sh
# and trainer.sh are sourced, and these variables are set: trainer, tokenize, sim (empty without a
# simulated GPU), root (of the repository), work. It must check something, or print why not, in a
# line "skipped: ..." (is_here). OMP_NUM_THREADS is 1.
#
# One line for each check that fails; the last line counts them.
set -u
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 LC_ALL=C
root=$(cd "$(dirname "$0")/../.." && pwd)
trainer=$(realpath "${1:-$root/train_gpt2}")
tokenize=$(realpath "${2:-$root/tokenize}")
sim=${3-$root/build/sim/FP32/train_gpt2cu}
if [ -x "$sim" ]; then sim=$(realpath "$sim"); else sim=; fi
source "$root/dev/test/lib/check.sh"
source "$root/dev/test/lib/trainer.sh"

# try_one FUNCTION FILE: in the current directory, by a process of its own.
try_one() {
    name=$1
    # shellcheck disable=SC2034
    work=$PWD
    # shellcheck source=/dev/null
    source "$2"
    "$1"
    check_done
}

# try_all: each in turn, and adds up what they count.
try_all() {
    local file function counts
    for file in "$root"/dev/test/defects/*.sh; do
        while read -r function; do
            tried=$((tried + 1))
            mkdir "$top/$function"
            (cd "$top/$function" && TRY_ONE=$function TRY_FILE=$file timeout -k 10 300 \
                "$root/dev/test/defects.sh" "$trainer" "$tokenize" "$sim") </dev/null >"$top/out" 2>&1 # mpirun reads its input
            counts=$(tail -n 1 "$top/out" | sed -n "s/^$function: \([0-9]*\) checks, \([0-9]*\) failed\$/\1 \2/p")
            add_up "$function" "$counts"
            rm -rf "${top:?}/$function"
        done < <(grep -o '^defect_[a-z0-9_]*' "$file" | grep -E "${DEFECTS:-.}")
    done
}

# add_up FUNCTION "CHECKS FAILURES": shows its lines but the last. It fails if it came to no end, or
# checked nothing in silence.
add_up() {
    local checked failed
    read -r checked failed <<<"$2"
    if [ -z "$checked" ]; then
        tail -n 20 "$top/out"
        failures=$((failures + 1))
        echo "$name: FAILED: $1 did not come to its end"
        return
    fi
    head -n -1 "$top/out"
    checks=$((checks + checked))
    failures=$((failures + failed))
    if [ "$checked" = 0 ] && ! grep -q '^skipped: ' "$top/out"; then
        failures=$((failures + 1))
        echo "$name: FAILED: $1 checks nothing"
    fi
}

if [ -n "${TRY_ONE:-}" ]; then
    try_one "$TRY_ONE" "$TRY_FILE"
    exit
fi
for program in "$trainer" "$tokenize"; do
    [ -x "$program" ] || { echo "error: $program: no program; make train_gpt2 tokenize" >&2 && exit 2; }
done
name=defects
top=$(mktemp -d /tmp/llmc_defects_XXXXXX)
trap 'rm -rf "$top"' EXIT
tried=0
try_all
[ $tried -gt 0 ] || { echo "error: DEFECTS=${DEFECTS:-}: no function has a name like it" >&2 && exit 2; }
[ -n "$sim" ] || echo "skipped: $name on the simulated GPU: its trainer is missing (make sim PRECISION=FP32)"
check_done
