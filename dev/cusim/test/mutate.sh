#!/usr/bin/env bash
# mutate.sh -- would the tests notice a forgotten wait? Leaves out every wait, one at a time:
# barriers, waits for asynchronous copies and mbarriers, arrivals, fences, events, waits for events
# and streams. Runs the module's test without it, as `make test` does, until something is noticed.
#
#     dev/cusim/test/mutate.sh                                  all files that have waits
#     dev/cusim/test/mutate.sh llmc/ops/attention_mma.cuh       with dev/test/ops/test_attention.cu;
#                                                               files without a test: test_gpt2.cu
#     dev/cusim/test/mutate.sh llmc/ops/embedding.cuh:296,304   only the waits on these lines
#     dev/cusim/test/mutate.sh llmc/gpu/gpu.cuh=test_gpt2.cu    with another test
#     dev/cusim/test/mutate.sh --list                           the waits
#
# Prints a line for each mutant: the place, the wait that was left out, and how that was noticed
# (wrong: the test failed; cusim: the device complained; tsan; hang). At the end come the survivors;
# the exit status is 1 if any survives, except those whose line says `// redundant: why`, or `//
# test_ranks.sh: why` if only several ranks need it, or if one of these is noticed after all. A
# survivor is a wait that no test needs, or one that is not needed: look at it.
#
# All mutants of a file are one program, which leaves out the wait whose number is in MUTANT. So a
# file needs one build, and one with tsan if a mutant gets that far. Two mutants run at a time.
# MUTATE_MODES names the modes to use. The sources here are not touched: all of it happens in a
# copy.
set -u
cd "$(dirname "$0")/../../.." || exit 1
export TSAN_OPTIONS=atexit_sleep_ms=0:exitcode=66

modes=(${MUTATE_MODES:-up down random greedy streams tsan})
waits='__syncthreads|__syncwarp|__threadfence|__threadfence_block'
waits+='|[a-z_0-9]*(barrier|mbar|bar|copy|async|group|wgmma)[a-z_0-9]*_(wait|sync)[a-z_0-9]*|[a-z_0-9]+_(wait|fork)(_[a-z_0-9]*)?|zero_join'
waits+='|mbarrier_(arrive|arrive_expect|publish)|barrier_of|fence_async|wgmma_fence'
waits+='|cudaEventRecord|cudaStreamWaitEvent|cudaStreamSynchronize|cudaEventSynchronize|cudaDeviceSynchronize'

# scan FILE 1: prints a line for each wait, with its line number and text. Waits are statements that
# end on their line, not in comments or macros. scan FILE 0: prints the file, in which wait N is
# left out if mutant_ is N.
scan() {
    awk -v lists="$2" -v waits="^(CUDA_CHECK\\\\()?($waits)(<[^>]*>)?\\\\([^;{]*;" '
        /^[ \t]*(\/\/|\*|#)/ { if (!lists) { print } next }
        {
            code = $0
            made = ""
            sub(/\/\/.*/, "", code)
            for (i = 1; i <= length(code); i++) {
                starts = substr(code, 1, i - 1) ~ /(^|[{};):]|else)[ \t]*$/
                if (starts && match(substr(code, i), waits)) {
                    text = substr(code, i, RLENGTH)
                    made = made "{ if (mutant_ != " ++count ") { " text " } }"
                    i += RLENGTH - 1
                    if (lists) { print NR, text }
                } else {
                    made = made substr(code, i, 1)
                }
            }
            if (!lists) { print made substr($0, length(code) + 1) }
        }' "$1"
}

# test_of FILE: prints the test of the same name, or of what the file is a part of, or else
# test_gpt2.cu.
test_of() {
    local name=${1##*/}
    case $name in
    attention_mma.cuh | attention_wgmma*) name=attention.cuh ;;
    matmul_plans.cuh | matmul_race.cuh) name=matmul.cuh ;;
    expert_wgmma.cuh) name=expert_matmul.cuh ;;
    esac
    ls dev/test/*/"test_${name%.*}.cu" test_gpt2.cu 2>/dev/null | head -n 1
}

environment_of() {
    case $1 in
    down | random | greedy) echo CUSIM_ORDER="$1" CUSIM_STREAMS=lazy ;;
    streams) echo CUSIM_STREAMS=random ;;
    tsan) echo CUSIM_ORDER=random ;; # as run.sh does
    *) echo CUSIM_ORDER=up ;;
    esac
}

# verdict_of STATUS OUTPUT: prints how a run ended; nothing if well.
verdict_of() {
    if grep -q 'CUSIM ERROR' "$2"; then
        echo cusim
    elif grep -q 'ThreadSanitizer' "$2"; then
        echo tsan
    elif [ "$1" = 124 ]; then
        echo hang
    elif [ "$1" != 0 ]; then
        echo wrong
    fi
}

# build KIND: $copy/$test as the program $copy/KIND, plain or tsan, unless it is there. One at a
# time.
build() {
    (
        flock 9
        [ -e "$copy/$1" ] && exit
        c_sources=()
        grep -q '"dev/test/lib/cpu_trainer.h"' "$test" && c_sources=(dev/test/lib/cpu_trainer.c)
        grep -q '^int main(' "$test" || c_sources+=(dev/test/lib/runner.c)
        CUSIM_FLAGS="${CUSIM_FLAGS:--DPRECISION_BF16} -include mutant.h" \
            "$copy/dev/cusim/build.sh" "$test" "$1" "$1" "${c_sources[@]}" >"$copy/build.log" 2>&1
    ) 9>"$copy/lock"
}

# noticed_by NUMBER: prints the first mode that notices that this wait is left out.
noticed_by() {
    local mode kind verdict output=$copy/output.$1
    for mode in "${modes[@]}"; do
        kind=plain
        [ "$mode" = tsan ] && kind=tsan
        build $kind || { echo "does not compile: $(grep -m 1 error "$copy/build.log")"; return; }
        { # the braces keep the shell from printing "Aborted"
            # shellcheck disable=SC2046 # two variables
            (cd "$copy" && exec env MUTANT="$1" $(environment_of "$mode") timeout "$limit" ./$kind) >"$output" 2>&1
        } 2>/dev/null
        verdict=$(verdict_of $? "$output")
        [ -z "$verdict" ] || { echo "$mode=$verdict"; return; }
    done
}

# excuse FILE LINE: prints `redundant` or `test_ranks.sh` if the line says why its own test notices
# nothing.
excuse() { sed -n "$2s,.*// \(redundant\|test_ranks.sh\): .*,\1,p" "$1"; }

# is_wanted LINE LINES: succeeds if the line is one of the given ones, or none are given.
is_wanted() { [ -z "$2" ] || [[ ,$2, = *,$1,* ]]; }

# run_mutants FILE LINES: writes the verdict on wait N to $copy/verdict.N.
run_mutants() {
    local number=0 line
    while read -r line _; do
        number=$((number + 1))
        is_wanted "$line" "$2" || continue
        while [ "$(jobs -rp | wc -l)" -ge 2 ]; do wait -n; done
        noticed_by $number >"$copy/verdict.$number" &
    done < <(scan "$1" 1)
    wait
}

# report_mutants FILE LINES: prints a line for each, and counts them.
report_mutants() {
    local number=0 line text verdict
    while read -r line text; do
        number=$((number + 1))
        is_wanted "$line" "$2" || continue
        verdict=$(cat "$copy/verdict.$number")
        count=$((count + 1))
        if [ -n "$(excuse "$1" "$line")" ]; then
            echo "$1:$line: $text: ${verdict:-survives}, its line says: $(excuse "$1" "$line")"
            [ -z "$verdict" ] || bad=$((bad + 1))
        else
            echo "$1:$line: $text: ${verdict:-SURVIVES}"
            [ -n "$verdict" ] || survivors+=("$1:$line: $text")
        fi
    done < <(scan "$1" 1)
}

# mutate FILE LINES: runs and reports the mutants with the test $test.
mutate() {
    local begin unharmed
    rm -f "$copy/plain" "$copy/tsan"
    scan "$1" 0 >"$copy/$1"
    build plain
    if [ -z "${limits[$test]:-}" ]; then
        limit=600
        begin=$SECONDS
        unharmed=$(noticed_by 0)
        if [ -n "$unharmed" ]; then
            echo "mutate: $test fails without any change: $unharmed" >&2
            exit 2
        fi
        limits[$test]=$((10 + 2 * (SECONDS - begin))) # time of all modes, more than enough for one
    fi
    limit=${limits[$test]}
    run_mutants "$1" "$2"
    report_mutants "$1" "$2"
    cp -a "$1" "$copy/$1"
}

[ $# -gt 0 ] || set -- llmc/*/*.cuh train_*.cu
if [ "$1" = --help ]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' "$0"
    exit 0
fi
if [ "$1" = --list ]; then
    for file in llmc/*/*.cuh train_*.cu; do
        scan "$file" 1 | while read -r line text; do echo "$file:$line: $text"; done
    done
    exit 0
fi

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -aL llmc dev Makefile ./*.c ./*.cu "$copy" # -L: a link in the copy would lead to the original
mkdir -p "$copy/build/sim"
cp -a build/sim/runtime-st "$copy/build/sim" 2>/dev/null # with their times
cp -a build/serial "$copy/build" 2>/dev/null
cat >"$copy/mutant.h" <<'END'
#include <stdlib.h>
static const int mutant_ = getenv("MUTANT") ? atoi(getenv("MUTANT")) : 0;
END

count=0
bad=0
declare -A limits # seconds allowed for a mutant, for each test that has passed unchanged
survivors=()
for argument in "$@"; do
    file=${argument%%[:=]*}
    lines=
    [[ $argument = *:* ]] && lines=${argument#*:} lines=${lines%%=*}
    [ -f "$file" ] || { echo "mutate: $file is missing" >&2; exit 2; }
    [ -n "$(scan "$file" 1)" ] || continue
    test=$(test_of "$file")
    [[ $argument = *=* ]] && test=${argument#*=}
    [ -f "$test" ] || { echo "mutate: no test '$test'" >&2; exit 2; }
    mutate "$file" "$lines"
done
echo "mutate: $count mutants, ${#survivors[@]} survive"
[ ${#survivors[@]} = 0 ] || printf '    %s\n' "${survivors[@]}"
[ ${#survivors[@]} = 0 ] && [ $bad = 0 ]
