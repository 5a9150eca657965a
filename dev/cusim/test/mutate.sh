#!/usr/bin/env bash
# mutate.sh -- would the tests notice a forgotten wait? Takes every wait out of the sources, one at a time: barriers,
# waits for asynchronous copies and mbarriers, fences, waits for events and streams. Builds the module's test without it
# and runs it as `make test` does, until something is noticed.
#
#     dev/cusim/test/mutate.sh                                all files that have waits
#     dev/cusim/test/mutate.sh llmc/attention.cuh             with dev/test/test_attention.cu
#     dev/cusim/test/mutate.sh llmc/encoder.cuh:296,304       only the waits of these lines
#     dev/cusim/test/mutate.sh llmc/gpu.cuh=test_gpt2.cu      with another test
#     dev/cusim/test/mutate.sh --list                         the waits
#
# A line for each mutant: where, what was taken out, and who noticed (wrong: the test failed; cusim: the device
# complained; tsan; hang). At the end the survivors; the exit status is 1 if there are any but those whose line says
# `// redundant: why`, or if one of these is noticed after all. A survivor is a wait that no test needs, or one that is
# not needed: look at it. A mutant takes a build and a run or two of the test, a survivor two builds and five runs.
# MUTATE_MODES names the modes to use. The sources here are not touched: all of it happens in a copy.
set -u
cd "$(dirname "$0")/../../.." || exit 1
export TSAN_OPTIONS=atexit_sleep_ms=0:exitcode=66

modes=(${MUTATE_MODES:-up down random greedy streams tsan})
waits='__syncthreads|__syncwarp|__threadfence|__threadfence_block|[a-z_0-9]+_wait_'
waits+='|[a-z_0-9]*(barrier|mbar|bar|copy|async|group|wgmma)[a-z_0-9]*_(wait|sync)[a-z_0-9]*'
waits+='|scratch_wait|cudaStreamWaitEvent|cudaStreamSynchronize|cudaEventSynchronize|cudaDeviceSynchronize'

# mutants FILE: for each wait a line with its line number, column, length and text. Statements that end on their line;
# not in comments or macros.
mutants() {
    awk -v waits="^(CUDA_CHECK\\\\()?($waits)(<[^>]*>)?\\\\([^;{]*;" '
        /^[ \t]*(\/\/|\*|#)/ { next }
        {
            line = $0
            sub(/\/\/.*/, "", line)
            for (i = 1; i <= length(line); i++) {
                if (i > 1 && substr(line, i - 1, 1) ~ /[A-Za-z0-9_(]/) { continue }
                if (match(substr(line, i), waits)) {
                    print NR, i, RLENGTH, substr(line, i, RLENGTH)
                    i += RLENGTH - 1
                }
            }
        }' "$1"
}

# without FILE LINE COLUMN LENGTH: the file with an empty statement there.
without() {
    awk -v number="$2" -v column="$3" -v count="$4" '
        NR == number { $0 = substr($0, 1, column - 1) ";" substr($0, column + count) }
        { print }' "$1"
}

# test_of FILE: its test, a path or nothing.
test_of() {
    local name=${1##*/}
    name=${name%.*}
    [ "$name" != zero ] || name=gpt2 # what moves between two streams shows in the whole model
    ls "dev/test/test_$name.cu" "test_${name#train_}.cu" 2>/dev/null | head -n 1
}

environment_of() {
    case $1 in
    down | random | greedy) echo CUSIM_ORDER="$1" CUSIM_STREAMS=lazy ;;
    streams) echo CUSIM_STREAMS=random ;;
    *) echo CUSIM_ORDER=up ;;
    esac
}

# verdict_of STATUS: how the run in $copy/output ended; nothing if well.
verdict_of() {
    if grep -q 'CUSIM ERROR' "$copy/output"; then
        echo cusim
    elif grep -q 'ThreadSanitizer' "$copy/output"; then
        echo tsan
    elif [ "$1" = 124 ]; then
        echo hang
    elif [ "$1" != 0 ]; then
        echo wrong
    fi
}

# build TEST KIND: $copy/test of the kind plain or tsan.
build() {
    local c_sources=()
    grep -q '"dev/test/cpu_trainer.h"' "$1" && c_sources=(dev/test/cpu_trainer.c)
    CUSIM_FLAGS=${CUSIM_FLAGS:--DPRECISION_BF16} "$copy/dev/cusim/build.sh" "$1" "$2" test "${c_sources[@]}" >"$copy/output" 2>&1
}

# noticed_by TEST: who is the first to notice that something is wrong in the copy.
noticed_by() {
    local mode kind verdict built=
    for mode in "${modes[@]}"; do
        kind=plain
        [ "$mode" = tsan ] && kind=tsan
        if [ "$built" != $kind ]; then
            build "$1" $kind || { echo "does not compile"; return; }
            built=$kind
        fi
        { # the braces keep the shell from saying "Aborted"
            # shellcheck disable=SC2046 # two variables
            (cd "$copy" && exec env $(environment_of "$mode") timeout 300 ./test) >"$copy/output" 2>&1
        } 2>/dev/null
        verdict=$(verdict_of $?)
        [ -z "$verdict" ] || { echo "$mode=$verdict"; return; }
    done
}

is_redundant() { sed -n "$2p" "$1" | grep -q '// redundant: '; }

# is_wanted LINE LINES: whether the line is one of those given, or none are.
is_wanted() { [ -z "$2" ] || [[ ,$2, = *,$1,* ]]; }

[ $# -gt 0 ] || set -- llmc/*.cuh llmc/*/*.cuh train_*.cu
if [ "$1" = --help ]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' "$0"
    exit 0
fi
if [ "$1" = --list ]; then
    for file in llmc/*.cuh llmc/*/*.cuh train_*.cu; do
        mutants "$file" | while read -r line _ _ text; do echo "$file:$line: $text"; done
    done
    exit 0
fi

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -aL llmc dev Makefile ./*.c ./*.cu "$copy" # -L: through a link in the copy the original would be written
mkdir -p "$copy/build/sim"
cp -a build/sim/runtime-st build/sim/llmc-plain "$copy/build/sim" 2>/dev/null # as old as they are, and used if not too old

count=0
bad=0
survivors=()
for argument in "$@"; do
    file=${argument%%[:=]*}
    lines=
    [[ $argument = *:* ]] && lines=${argument#*:} lines=${lines%%=*}
    [ -f "$file" ] || { echo "mutate: $file is missing" >&2; exit 2; }
    [ -n "$(mutants "$file")" ] || continue
    test=$(test_of "$file")
    [[ $argument = *=* ]] && test=${argument#*=}
    [ -f "$test" ] || { echo "mutate: $file has waits and no test '$test'" >&2; exit 2; }
    unharmed=$(noticed_by "$test")
    if [ -n "$unharmed" ]; then
        echo "mutate: $test fails without any change: $unharmed" >&2
        exit 2
    fi
    while read -r line column length text; do
        is_wanted "$line" "$lines" || continue
        without "$file" "$line" "$column" "$length" >"$copy/$file"
        verdict=$(noticed_by "$test")
        count=$((count + 1))
        if is_redundant "$file" "$line"; then
            echo "$file:$line: $text: ${verdict:-survives}, said to be redundant"
            [ -z "$verdict" ] || bad=$((bad + 1))
        else
            echo "$file:$line: $text: ${verdict:-SURVIVES}"
            [ "$verdict" != "does not compile" ] || bad=$((bad + 1))
            [ -n "$verdict" ] || survivors+=("$file:$line: $text")
        fi
    done < <(mutants "$file")
    cp -a "$file" "$copy/$file"
done
echo "mutate: $count mutants, ${#survivors[@]} survive"
[ ${#survivors[@]} = 0 ] || printf '    %s\n' "${survivors[@]}"
[ ${#survivors[@]} = 0 ] && [ $bad = 0 ]
