#!/usr/bin/env bash
# run.sh -- everything that can be tested without a GPU: `make test` from the top of the repository.
#
#     lint      headers, formatting, scripts (lint.sh)
#     plain     all tests as `make` builds them for this machine
#     asan      the same with gcc's address and undefined-behavior sanitizers
#     tsan      what has threads of its own, with gcc's race detector (OpenMP's it does not understand)
#     narrow    what uses vectors, for the oldest machine of this kind: 128 bits, no fused multiply-add on x86-64
#     avx2      the same with 256 bits
#     clang     another compiler, without OpenMP where its runtime is missing
#     serial    the trainer without OpenMP
#     build     what the Makefile builds again, and installs (test_build.sh)
#     get_data  downloads, from a server on this machine (test_get_data.sh)
#     fuzz      readers of files against random ones (fuzz.sh), 5 s each
#     cli       the trainer from the outside, plain and with sanitizers (test_cli.sh), its data (test_data.sh), misused
#               (test_misuse.sh), killed 20 times (test_kill.sh), and ./tokenize (test_tokenize.sh)
#     sim       the GPU trainer and its modules on the simulated GPU (dev/cusim), plainly in every order of threads and
#               with lazy streams, and with the address, thread (a race detector for CUDA threads) and memory sanitizers; and the kit for a
#               machine with a GPU (test_kit.sh)
#     nvcc      the GPU trainer compiled for every supported architecture, and with cuDNN where that is installed
#
# The last line is `N passed, N failed, N skipped`; the exit status is 1 if anything failed. Environment:
# GPT2_VOCAB and TINY_TEXT name files for the tests that want them.
set -u
cd "$(dirname "$0")/../.." || exit 1
unset MAKEFLAGS MFLAGS MAKELEVEL  # `make test` is no part of the builds below
export OMP_WAIT_POLICY=passive    # threads that spin would starve each other
export UBSAN_OPTIONS=print_stacktrace=1

source dev/test/vector_tests.sh
passed=0
failed=0
skipped=0
tests=(dev/test/test_*.c test_gpt2.c)
tests=("${tests[@]##*/}")
tests=("${tests[@]%.c}")
output=$(mktemp)
tests_dir=$(mktemp -d)
begun=0    # tests,
reported=0 # and those whose end is printed
trap 'rm -rf "$output" "$tests_dir"' EXIT

skip() {
    echo "skipped: $*"
    skipped=$((skipped + 1))
}

# report VARIANT STATUS SECONDS OUTPUT COMMAND...: counts a test; shows the last line if it passed, all of it if not, and
# the time if it took long.
report() {
    local variant=$1 status=$2 seconds=$3 file=$4 time=
    shift 4
    [ "$seconds" -lt 5 ] || time=" ($seconds s)"
    skipped=$((skipped + $(grep -c '^skipped: ' "$file")))
    if [ "$status" = 0 ]; then
        passed=$((passed + 1))
        { grep '^skipped: ' "$file" || true; tail -n 1 "$file" | sed "s/\$/$time/"; } | sed "s/^/$variant: /"
    else
        failed=$((failed + 1))
        sed "s/^/$variant: /" "$file"
        echo "$variant: FAILED: $* (exit status $status, after $seconds s)"
    fi
}

# print_reports: of the tests that have ended, in the order in which they were begun.
print_reports() {
    local command status seconds
    while [ -e "$tests_dir/$((reported + 1)).status" ]; do
        reported=$((reported + 1))
        mapfile -t command <"$tests_dir/$reported.command"
        read -r status seconds <"$tests_dir/$reported.status"
        report "${command[0]}" "$status" "$seconds" "$tests_dir/$reported.out" "${command[@]:1}"
    done
}

# run VARIANT COMMAND...: a test, beside one other.
run() {
    local file=$tests_dir/$((++begun))
    while [ "$(jobs -rp | wc -l)" -ge 2 ]; do wait -n; done
    print_reports
    printf '%s\n' "$@" >"$file.command"
    {
        local begin=$SECONDS
        timeout 600 "${@:2}" >"$file.out" 2>&1
        echo "$? $((SECONDS - begin))" >"$file.ended"
        mv "$file.ended" "$file.status"
    } &
}

# finish: waits for all tests that have begun.
finish() {
    wait
    print_reports
}

# build VARIANT TARGETS [NAME=value...]: with warnings as errors; what does not compile is a failed test.
build() {
    local variant=$1 begin=$SECONDS
    shift
    if ! make -s -k -j2 BUILD="build/$variant" WERROR=-Werror "$@" >"$output" 2>&1; then
        failed=$((failed + 1))
        head -n 40 "$output"
        echo "$variant: FAILED: the build (make BUILD=build/$variant WERROR=-Werror $*)"
    fi
    echo "$variant: built in $((SECONDS - begin)) s"
}

# run_tests VARIANT [TEST...]: those named, or all.
run_tests() {
    local variant=$1 test
    shift
    for test in "${@:-${tests[@]}}"; do
        run "$variant" "build/$variant/$test"
    done
}

has_cpu() { grep -qw "$1" /proc/cpuinfo 2>/dev/null; }
links() { "$@" -x c -o /dev/null - 2>/dev/null <<<'#include <omp.h>
int main(void) { return omp_get_max_threads() == 0; }'; }

sanitizers="-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all"
quick_run=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 2)

# ---- the CPU trainer: everything is built, then the tests run, long ones first ----

build plain tests build/plain/train_gpt2 build/plain/tokenize
build asan tests build/asan/train_gpt2 build/asan/tokenize OPT="$sanitizers"
build tsan build/tsan/test_dataloader OPENMP= OPT="-O1 -g1 -fsanitize=thread"
build narrow "${vector_tests[@]/#/build/narrow/}" MARCH=
if has_cpu avx2 && has_cpu fma; then
    build avx2 "${vector_tests[@]/#/build/avx2/}" MARCH=-march=haswell
fi
openmp=-fopenmp
if command -v clang >/dev/null; then
    links clang -fopenmp || { openmp= && skip "clang with OpenMP: libomp-dev is missing (scripts/install_deps.sh)"; }
    build clang tests build/clang/train_gpt2 CC=clang OPENMP=$openmp
fi
build serial build/serial/train_gpt2 OPENMP=

run lint dev/test/lint.sh
run asan dev/test/test_cli.sh build/asan/train_gpt2
run fuzz dev/test/fuzz.sh
run plain dev/test/test_cli.sh build/plain/train_gpt2
run asan dev/test/test_data.sh build/asan/train_gpt2
run plain dev/test/test_data.sh build/plain/train_gpt2
run plain dev/test/test_misuse.sh build/plain/train_gpt2
run plain dev/test/test_kill.sh build/plain/train_gpt2
run asan dev/test/test_tokenize.sh build/asan/tokenize
run plain dev/test/test_tokenize.sh build/plain/tokenize
run get_data dev/test/test_get_data.sh
run build dev/test/test_build.sh
run_tests asan
run tsan build/tsan/test_dataloader
run_tests plain
run_tests narrow "${vector_tests[@]}"
if has_cpu avx2 && has_cpu fma; then
    run_tests avx2 "${vector_tests[@]}"
else
    skip "avx2: this machine has no AVX2"
fi
if command -v clang >/dev/null; then
    run_tests clang
    run clang build/clang/train_gpt2 "${quick_run[@]}"
else
    skip "clang is missing (scripts/install_deps.sh)"
fi
run serial build/serial/train_gpt2 "${quick_run[@]}"
finish

# ---- the GPU trainer ----

cuda=${CUDA_HOME:-/usr/local/cuda}
export TSAN_OPTIONS=atexit_sleep_ms=0:exitcode=66

# run_sim MODE PROGRAM: in the orders that show most in this mode; the whole model in all of them once, in BF16.
run_sim() {
    local mode=$1 program=$2 order orders="down random greedy"
    case $program in */FP16-*/* | */FP32-*/*) orders=down ;; esac
    run "sim $mode" "$program"
    [ "$mode" = plain ] || return
    for order in $orders; do
        run "sim $order, lazy streams" env CUSIM_ORDER="$order" CUSIM_STREAMS=lazy "$program"
    done
}

if command -v nvcc >/dev/null; then
    run nvcc dev/test/nvcc.sh
    run nvcc dev/test/nvcc.sh cudnn
else
    skip "nvcc is missing: the GPU trainer is not compiled for any GPU"
fi
if [ ! -e "$cuda/include/cublasLt.h" ]; then
    skip "sim: no CUDA toolkit in $cuda (CUDA_HOME)"
elif ! command -v clang++ >/dev/null; then
    skip "sim: clang++ is missing (scripts/install_deps.sh)"
else
    build sim sim-tests build/sim/FP32/train_gpt2cu
    for program in build/sim/*-{tsan,msan,asan,plain}/test_gpt2 build/sim/{tsan,msan,asan,plain}/test_*; do
        case $program in
        *.o) continue ;;
        *-*/test_gpt2) mode=${program%/*} mode=${mode##*-} ;;
        *) mode=${program%/*} mode=${mode##*/} ;;
        esac
        run_sim "$mode" "$program"
    done
    run sim dev/test/test_sim.sh
    run sim dev/test/test_kit.sh
    run cusim dev/cusim/test/run.sh
fi
finish

echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
