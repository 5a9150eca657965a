#!/usr/bin/env bash
# mutate.sh -- would the tests notice a forgotten wait? Takes every wait out of the sources, one at a time: barriers,
# waits for asynchronous copies and mbarriers, fences, waits for events and streams. Builds the module's test without it
# and runs it in every mode that looks for such mistakes.
#
#     dev/cusim/test/mutate.sh llmc/layernorm.cuh llmc/attention.cuh     each with dev/test/test_<name>.cu
#     dev/cusim/test/mutate.sh train_gpt2.cu=dev/test/test_train.cu      with another test
#
# A line for each mutant: where, what was taken out, and who noticed (wrong: the test failed; cusim: the device
# complained; tsan; hang). At the end the survivors; the exit status is 1 if there are any. A survivor is a wait that no
# test needs, or one that is not needed: look at it. Each mutant takes two builds and seven runs of the test.
# MUTATE_MODES names the modes to use. The sources here are not touched: all of it happens in a copy.
set -u
cd "$(dirname "$0")/../../.." || exit 1
export TSAN_OPTIONS=atexit_sleep_ms=0:exitcode=66
[ $# -gt 0 ] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' "$0"; exit 2; }

modes=(${MUTATE_MODES:-up down random greedy lazy shuffled tsan})
waits='__syncthreads|__syncwarp|__threadfence|__threadfence_block'
waits+='|[a-z_0-9]*(barrier|mbar|bar|copy|async|group|wgmma)[a-z_0-9]*_(wait|sync)[a-z_0-9]*'
waits+='|cudaStreamWaitEvent|cudaStreamSynchronize|cudaEventSynchronize|cudaDeviceSynchronize'

root=$PWD
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -aL llmc dev ./*.c "$copy" # -L: through a link in the copy the original would be written
cp -aL ./*.cu "$copy" 2>/dev/null
mkdir -p "$copy/build/sim"
cp -a build/sim/runtime-st "$copy/build/sim" 2>/dev/null # as old as it is, and used if not too old

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

environment_of() {
    case $1 in
    down | random | greedy) echo CUSIM_ORDER="$1" ;;
    lazy) echo CUSIM_STREAMS=lazy ;;
    shuffled) echo CUSIM_STREAMS=random ;;
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

# noticed_by TEST: who notices that something is wrong in the copy, in one line.
noticed_by() {
    local mode kind name verdict built=
    name=$(basename "${1%.*}")
    for mode in "${modes[@]}"; do
        kind=plain
        [ "$mode" = tsan ] && kind=tsan
        case " $built " in
        *" $kind "*) ;;
        *)
            "$copy/dev/cusim/build.sh" "$1" $kind >"$copy/output" 2>&1 || { echo "does not compile"; return; }
            built="$built $kind"
            ;;
        esac
        { # the braces keep the shell from saying "Aborted"
            (cd "$copy" && exec env "$(environment_of "$mode")" timeout 120 "build/sim/$kind/$name") \
                >"$copy/output" 2>&1
        } 2>/dev/null
        verdict=$(verdict_of $?)
        [ -n "$verdict" ] && printf '%s=%s ' "$mode" "$verdict"
    done
}

count=0
broken=0
survivors=()
for argument in "$@"; do
    file=${argument%%=*}
    test=dev/test/test_$(basename "${file%.*}").cu
    [ "$file" = "$argument" ] || test=${argument#*=}
    if [ ! -f "$file" ] || [ ! -f "$test" ]; then
        echo "mutate: $file or its test $test is missing" >&2
        exit 2
    fi
    if [ "$file" -ef "$copy/$file" ]; then
        echo "mutate: the copy of $file is the file itself" >&2
        exit 2
    fi
    unharmed=$(noticed_by "$test")
    if [ -n "$unharmed" ]; then
        echo "mutate: $test fails without any change: $unharmed" >&2
        exit 2
    fi
    while read -r line column length text; do
        without "$root/$file" "$line" "$column" "$length" >"$copy/$file"
        verdicts=$(noticed_by "$test")
        count=$((count + 1))
        echo "$file:$line: $text: ${verdicts:-SURVIVES}"
        [ -n "$verdicts" ] || survivors+=("$file:$line: $text")
        [ "$verdicts" != "does not compile" ] || broken=$((broken + 1))
    done < <(mutants "$file")
    cp -a "$root/$file" "$copy/$file"
done
echo "mutate: $count mutants, ${#survivors[@]} survive, $broken do not compile"
[ ${#survivors[@]} = 0 ] || printf '    %s\n' "${survivors[@]}"
[ ${#survivors[@]} = 0 ] && [ $broken = 0 ]
