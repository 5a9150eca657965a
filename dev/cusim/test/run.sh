#!/usr/bin/env bash
# run.sh -- the CPU device's own tests: correct programs pass in every mode, and planted bugs do
# not.
#
#     dev/cusim/test/run.sh [SANITIZER...]      asan, tsan, msan; by default all
#
# Prints one line for each check. For a planted bug it lists the modes that noticed it; the check
# fails if none did, or if the mode that the bug's row names did not. The last line is `cusim: N
# passed, N failed`; the exit status is 1 if anything failed.
set -u
cd "$(dirname "$0")/../../.." || exit 1
export TSAN_OPTIONS=atexit_sleep_ms=0:exitcode=66
export CUSIM_NCCL_TIMEOUT=1

passed=0
failed=0
output=$(mktemp)
trap 'rm -f "$output"' EXIT

# A mode is a build and its environment.
[ $# != 0 ] || set -- asan tsan msan
modes=(up down random greedy lazy shuffled protect "$@")
asan=$(printf '%s\n' "$@" | grep -x asan)
build_of() {
    case $1 in
    asan | tsan | msan) echo "$1" ;;
    *) echo plain ;;
    esac
}
environment_of() {
    case $1 in
    down | random | greedy) echo CUSIM_ORDER="$1" ;;
    lazy) echo CUSIM_STREAMS=lazy ;;
    shuffled) echo CUSIM_STREAMS=random ;;
    protect) echo CUSIM_PROTECT=1 ;;
    *) echo CUSIM_ORDER=up ;;
    esac
}

pass() {
    passed=$((passed + 1))
    echo "$1: ok${2:+ ($2)}"
}
fail() {
    failed=$((failed + 1))
    echo "$1: FAILED: $2"
    head -n 20 "$output"
}

build() {
    local source=$1 build
    shift
    for build in "$@"; do
        if ! dev/cusim/build.sh "dev/cusim/test/$source.cu" "$build" >"$output" 2>&1; then
            fail "$source" "the $build build"
        fi
    done
}

# run_in MODE PROGRAM [ARGUMENT...]
run_in() {
    local mode=$1 program=$2
    shift 2
    { # the braces keep the shell from printing "Aborted"
        env "$(environment_of "$mode")" timeout 60 "build/sim/$(build_of "$mode")/$program" "$@" >"$output" 2>&1
    } 2>/dev/null
}

# expect_ok PROGRAM ARGUMENT MODE...: runs the correct program in each of the modes.
expect_ok() {
    local program=$1 argument=$2 mode
    shift 2
    for mode in "$@"; do
        if ! run_in "$mode" "$program" $argument; then # without an argument: no word
            fail "$program${argument:+ $argument}" "in mode $mode"
            return
        fi
    done
    pass "$program${argument:+ $argument}" "$*"
}

# expect_noticed PROGRAM BUG WANTED MESSAGE MODE...
expect_noticed() {
    local program=$1 bug=$2 wanted=$3 message=$4 mode noticed=
    shift 4
    for mode in "$@"; do
        ASAN_OPTIONS=detect_leaks=0 run_in "$mode" "$program" "$bug" && continue
        noticed="$noticed $mode"
        grep -qE "$message" "$output" || { fail "$bug" "in mode $mode, the output lacks '$message'"; return; }
    done
    noticed=${noticed# }
    case " $noticed " in
    *" $wanted "*) pass "$bug" "noticed by: $noticed" ;;
    *) fail "$bug" "$wanted did not notice it; noticed by: ${noticed:-nobody}" ;;
    esac
}

# expect_all_noticed PROGRAM MODE...: tries every bug of a program's list in these modes. A line of
# the list has the bug, the mode that must notice it, and perhaps a regular expression of its
# message.
expect_all_noticed() {
    local program=$1 bug wanted message
    shift
    while read -r bug wanted message; do
        [[ " $* " = *" $wanted "* ]] || continue # a sanitizer of another run
        expect_noticed "$program" "$bug" "$wanted" "$message" "$@"
    done < <("build/sim/plain/$program" list)
}

build primitives plain "$@"
expect_ok primitives "" "${modes[@]}"
build host_api plain $asan
expect_ok host_api "" up lazy shuffled protect $asan
build bugs plain "$@"
expect_ok bugs fixed "${modes[@]}"
expect_all_noticed bugs "${modes[@]}"
source dev/cusim/cuda_home.sh
if [ -e "$CUDA_HOME/include/nccl.h" ] || [ -e /usr/include/nccl.h ]; then
    build nccl plain $asan
    expect_ok nccl "" up lazy shuffled $asan
    expect_all_noticed nccl up $asan
else
    echo "nccl: skipped, nccl.h is missing"
fi
echo "cusim: $passed passed, $failed failed"
[ $failed = 0 ]
