#!/usr/bin/env bash
# run.sh -- what is tested without a GPU: `make test` from the top of the repository.
#
#     lint      headers, formatting, scripts (lint.sh)
#     plain     all tests as `make` builds them for this machine
#     asan      the same with gcc's address and undefined-behavior sanitizers
#     tsan      what has threads of its own, with gcc's race detector (OpenMP's it does not understand)
#     avx2      what uses vectors with 256 bits, where the plain build has 512
#     serial    the trainer without OpenMP
#     build     what the Makefile builds again, and installs (test_build.sh)
#     get_data  downloads, from a server on this machine (test_get_data.sh)
#     scripts   those for several machines, with launchers that only say how they were called (test_multi_node.sh), and the one
#               that starts a run again (test_run_until_done.sh); what goes to Weights & Biases (test_wandb.sh)
#     cli       the trainer from the outside, plain and with sanitizers (test_cli.sh), its data (test_data.sh), generating
#               texts (test_generate.sh), misused
#               (test_misuse.sh), killed 20 times (test_kill.sh), and ./tokenize (test_tokenize.sh)
#     report    pages, comparisons and TensorBoard's files (test_report.sh)
#     ranks     several processes under mpirun (test_ranks.sh)
#     sim       the GPU trainer and its modules on the simulated GPU (dev/cusim), plainly in every order of threads and
#               with lazy streams, and with the address, thread (a race detector for CUDA threads) and memory sanitizers
#     nvcc      the GPU trainer compiled in BF16 for Hopper, and with cuDNN where that is installed
#
# `run.sh rest`, a part of `make soak`, has slow tests that seldom find what the others miss:
#
#     clang     all tests by another compiler, without OpenMP where its runtime is missing
#     narrow    what uses vectors, for the oldest machine of this kind: 128 bits, no fused multiply-add on x86-64
#     sim       the GPU trainer's modules with the memory sanitizer; the whole model in FP16; the kit for a machine with a GPU
#               (test_kit.sh), and what measures GPUs
#     nvcc      the GPU trainer in every precision and for every supported architecture
#
# `make check` is `run.sh check [TEST]`: the plain variant alone, or one test of it.
#
# At the end it lists the CPU seconds of each variant and what took most of them, builds among it; then the last lines of each
# test that failed, so that the end of a log says why. The last line is `N passed, N failed, N skipped`; the exit status is 1 if
# anything failed. Environment:
# GPT2_VOCAB and TINY_TEXT name files for the tests that want them.
set -u
cd "$(dirname "$0")/../.." || exit 1
source dev/cusim/cuda_home.sh
unset MAKEFLAGS MFLAGS MAKELEVEL  # `make test` is no part of the builds below
export OMP_WAIT_POLICY=passive    # threads that spin would starve each other
export UBSAN_OPTIONS=print_stacktrace=1

read -ra vector_tests <<<"$(make -s print-VECTOR_TESTS)"
passed=0
failed=0
skipped=0
tests=(dev/test/*/test_*.c)
tests=("${tests[@]##*/}")
tests=("${tests[@]%.c}")
tests_dir=$(mktemp -d)
begun=0    # tests,
reported=0 # and those whose end is printed
trap 'rm -rf "$tests_dir"' EXIT

skip() {
    echo "skipped: $*"
    skipped=$((skipped + 1))
}

# cpu_seconds FILE: of a command, from what `times` said after it; they do not depend on what the machine does beside it.
cpu_seconds() {
    awk 'NR == 2 { gsub(/[ms]/, " "); printf "%.0f\n", $1 * 60 + $2 + $3 * 60 + $4 }' "$1"
}

# fail FILE MESSAGE: counts a test that failed and shows its output, with the message below; print_failures shows the last lines of
# both again.
fail() {
    failed=$((failed + 1))
    { cat "$1" && echo "$2"; } >"$tests_dir/failed"
    cat "$tests_dir/failed"
    tail -n 20 "$tests_dir/failed" | sed 's/^/again: /' >>"$tests_dir/failures"
}

print_failures() { [ ! -e "$tests_dir/failures" ] || cat "$tests_dir/failures"; }

# report VARIANT STATUS SECONDS OUTPUT COMMAND...: counts a test; shows the last line if it passed, all of it if not, and
# the time if it took long.
report() {
    local variant=$1 status=$2 seconds=$3 file=$4 time=
    shift 4
    [ "$seconds" -lt 5 ] || time=" ($seconds s)"
    echo "$(cpu_seconds "${file%.out}.cpu") $variant: $*" >>"$tests_dir/times"
    skipped=$((skipped + $(grep -c '^skipped: ' "$file")))
    if [ "$status" = 0 ]; then
        passed=$((passed + 1))
        { grep '^skipped: ' "$file" || true; tail -n 1 "$file" | sed "s/\$/$time/"; } | sed "s/^/$variant: /"
    else
        sed "s/^/$variant: /" "$file" >"$tests_dir/output"
        fail "$tests_dir/output" "$variant: FAILED: $* (exit status $status, after $seconds s)"
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

# Two jobs at a time, tests and compilers alike: each takes a token from a pipe, which is also make's job server. The
# shell opens it separately, because make turns its own end into one that does not wait.
mkfifo "$tests_dir/tokens"
exec 8<>"$tests_dir/tokens" 9<>"$tests_dir/tokens"
printf '++' >&8
take_token() { read -r -N 1 -u 8; }
return_token() { printf '+' >&8; }
job_server="-j2 --jobserver-auth=9,9"
MAKEFLAGS=$job_server make -s print-CC >/dev/null 2>&1 || job_server= # GNU make before 4.2: one compiler at a time

# begin AFTER VARIANT COMMAND...: starts a test; AFTER is a command to run when it has ended.
begin() {
    local after=$1 file=$tests_dir/$((++begun))
    shift
    print_reports
    printf '%s\n' "$@" >"$file.command"
    {
        local begin=$SECONDS
        timeout 600 "${@:2}" >"$file.out" 2>&1
        echo "$? $((SECONDS - begin))" >"$file.ended"
        times >"$file.cpu"
        mv "$file.ended" "$file.status"
        $after
    } &
}

# run VARIANT COMMAND...: a test, beside one other job.
run() {
    take_token
    begin return_token "$@"
}

# run_beside VARIANT COMMAND...: a test that mostly waits, for processes or for time to pass, beside two other jobs.
run_beside() { begin true "$@"; }

# finish: waits for all tests that have begun.
finish() {
    wait
    print_reports
}

# print_cpu_seconds: of each variant, and of what took most of them.
print_cpu_seconds() {
    sed -E 's/^([0-9]+) ([^:]*):.*/\1 \2/' "$tests_dir/times" |
        awk '{ seconds = $1; $1 = ""; sum[$0] += seconds; all += seconds }
             END { for (name in sum) if (sum[name] >= 60) printf "%5d s%s\n", sum[name], name; printf "%5d s in all\n", all }' |
        sort -rn | sed 's/^/by variant: /'
    sort -rn "$tests_dir/times" | head -n 20 | awk '{ seconds = $1; $1 = ""; printf "most CPU: %4d s %s\n", seconds, $0 }'
}

# build VARIANT TARGETS [NAME=value...]: with warnings as errors, beside the tests of what is built already.
build() {
    local log=$tests_dir/build-$1
    take_token
    printf '%s ' "${@:2}" >"$log.command"
    {
        local begin=$SECONDS
        MAKEFLAGS=$job_server make -s -k BUILD="build/$1" WERROR=-Werror "${@:2}" >"$log.out" 2>&1
        echo "$? $((SECONDS - begin))" >"$log.ended"
        times >"$log.cpu"
        mv "$log.ended" "$log.status"
        return_token
    } &
}

# built VARIANT: waits for a build; what does not compile is a failed test.
built() {
    local log=$tests_dir/build-$1 status seconds
    while [ ! -e "$log.status" ]; do wait -n; done
    read -r status seconds <"$log.status"
    if [ "$status" != 0 ]; then
        head -n 40 "$log.out" >"$tests_dir/output"
        fail "$tests_dir/output" "$1: FAILED: the build (make BUILD=build/$1 WERROR=-Werror $(cat "$log.command"))"
    fi
    echo "$1: built in $seconds s"
    echo "$(cpu_seconds "$log.cpu") $1: the build" >>"$tests_dir/times"
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

quick_modules=MODULES_OPT=-O0 # where the tests are of something else: half the time to compile them
sanitizers="-Og -g1 -fsanitize=address,undefined -fno-sanitize-recover=all"
quick_run=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 2)

# ---- `make check` ----

check() {
    [ $# = 0 ] || tests=("$@")
    tests=("${tests[@]/#test_/}")
    tests=("${tests[@]/#/test_}")
    make -s -j2 WERROR=-Werror "${tests[@]/#/build/plain/}" || exit 1
    run_tests plain
}

# ---- the CPU trainer: while the tests of one variant run, the next is built ----

test_cpu() {
    local cc march has_avx512=
    make -s -k -j2 WERROR=-Werror tests build/plain/train_gpt2 build/plain/tokenize >/dev/null 2>&1 # `build` says what fails
    build plain tests build/plain/train_gpt2 build/plain/tokenize
    built plain
    build asan tests build/asan/train_gpt2 build/asan/tokenize OPT="$sanitizers"
    run lint dev/test/lint.sh
    run plain dev/test/cli/test_cli.sh build/plain/train_gpt2
    run plain dev/test/cli/test_generate.sh build/plain/train_gpt2
    run plain dev/test/cli/test_data.sh build/plain/train_gpt2
    run_beside plain dev/test/cli/test_misuse.sh build/plain/train_gpt2
    run plain dev/test/cli/test_kill.sh build/plain/train_gpt2
    run plain dev/test/cli/test_report.sh build/plain/train_gpt2
    run plain dev/test/cli/test_tokenize.sh build/plain/tokenize
    run_beside plain dev/test/cli/test_ranks.sh build/plain/train_gpt2
    run_tests plain
    run get_data dev/test/cli/test_get_data.sh
    run scripts dev/test/cli/test_multi_node.sh
    run_beside scripts dev/test/cli/test_run_until_done.sh
    run_beside scripts dev/test/cli/test_wandb.sh
    run build dev/test/cli/test_build.sh

    built asan
    build tsan build/tsan/test_dataloader build/tsan/test_comm_tcp OPENMP= OPT="-O1 -g1 -fsanitize=thread" $quick_modules
    run asan dev/test/cli/test_cli.sh build/asan/train_gpt2
    run asan env LEARNER=build/plain/train_gpt2 dev/test/cli/test_generate.sh build/asan/train_gpt2
    run asan dev/test/cli/test_data.sh build/asan/train_gpt2
    run asan dev/test/cli/test_report.sh build/asan/train_gpt2
    run asan dev/test/cli/test_tokenize.sh build/asan/tokenize
    run_tests asan

    built tsan
    run tsan build/tsan/test_dataloader
    run tsan build/tsan/test_comm_tcp
    read -r cc <<<"$(make -s print-CC)"
    read -r march <<<"$(make -s print-MARCH)"
    # shellcheck disable=SC2086 # no option, or one
    $cc $march -dM -E -x c /dev/null | grep -qw __AVX512F__ && has_avx512=1
    if [ $has_avx512 ]; then
        build avx2 "${vector_tests[@]/#/build/avx2/}" MARCH=-march=haswell OPT=-O2 $quick_modules
    fi
    build serial build/serial/train_gpt2 OPENMP= OPT=-O1 $quick_modules
    if [ $has_avx512 ]; then
        built avx2
        run_tests avx2 "${vector_tests[@]}"
    elif has_cpu avx2 && has_cpu fma; then
        echo "avx2: the plain tests had these vectors"
    else
        skip "avx2: this machine has no AVX2"
    fi
    built serial
    run serial build/serial/train_gpt2 "${quick_run[@]}"
}

# ---- the GPU trainer ----

export TSAN_OPTIONS=atexit_sleep_ms=0:exitcode=66

# run_sim MODE PROGRAM: plainly in the orders that show most, of the whole model each in one precision or two; with sanitizers
# in the regular order. ThreadSanitizer remembers four accesses of each 8 bytes; in a regular order it would overwrite the
# same ones every time, and miss the same races.
run_sim() {
    local mode=$1 program=$2 order streams orders="down random greedy"
    case $mode:$program in
    plain:*/BF16-*/*) orders="random greedy" ;;
    plain:*/FP16-*/* | plain:*/FP32-*/*) orders=down ;;
    plain:*) ;;
    tsan:*) orders= && run "sim $mode" env CUSIM_ORDER=random "$program" ;;
    *) orders= && run "sim $mode" "$program" ;;
    esac
    for order in $orders; do
        streams=lazy
        [ "$order" != random ] || streams=random # some forgotten waits between streams show only here
        run "sim $order, $streams streams" env CUSIM_ORDER="$order" CUSIM_STREAMS="$streams" "$program"
    done
}

# run_sims MODE PROGRAM...: those of them that are there.
run_sims() {
    local mode=$1 program
    for program in "${@:2}"; do
        case $program in *.o | *'*'*) ;; *) run_sim "$mode" "$program" ;; esac
    done
}

has_sim() {
    local why
    why=$(has_simulated_gpu sim) || { skip "${why#skipped: }" && false; }
}

has_nvcc() {
    command -v nvcc >/dev/null || { skip "nvcc is missing: the GPU trainer is not compiled for any GPU" && false; }
}

# The whole model before the modules: it takes longest.
test_gpu() {
    local sim=''
    has_sim && sim=1 && build sim-plain sim-plain build/sim/FP32/train_gpt2cu build/sim/BF16/train_gpt2cu
    has_nvcc && run nvcc dev/test/nvcc.sh && run nvcc dev/test/nvcc.sh cudnn
    [ $sim ] || return
    built sim-plain
    build sim-msan build/sim/BF16-msan/test_gpt2
    run sim dev/test/cli/test_sim.sh
    run sim dev/test/cli/test_generate.sh build/plain/train_gpt2 build/sim/FP32/train_gpt2cu
    run_beside sim dev/test/cli/test_ranks.sh build/sim/BF16/train_gpt2cu
    run_sims plain build/sim/*-plain/test_gpt2 build/sim/plain/test_*
    built sim-msan # now all that programs of the simulated GPU have in common is built
    build sim-asan sim-asan
    run_sims msan build/sim/BF16-msan/test_gpt2
    built sim-asan
    build sim-tsan sim-tsan
    run_beside cusim dev/cusim/test/run.sh
    run_sims asan build/sim/BF16-asan/test_gpt2 build/sim/asan/test_*
    built sim-tsan
    run_sims tsan build/sim/BF16-tsan/test_gpt2 build/sim/tsan/test_*
}

# ---- `make soak` ----

test_rest() {
    local openmp=-fopenmp clang='' sim=''
    if command -v clang >/dev/null; then
        clang=1
        links clang -fopenmp || { openmp= && skip "clang with OpenMP: libomp-dev is missing (scripts/install_deps.sh)"; }
        build clang tests build/clang/train_gpt2 CC=clang OPENMP=$openmp OPT=-O1 $quick_modules
    else
        skip "clang is missing (scripts/install_deps.sh)"
    fi
    has_nvcc && run nvcc dev/test/nvcc.sh all
    [ ! $clang ] || built clang
    build narrow "${vector_tests[@]/#/build/narrow/}" MARCH= OPT=-O2 $quick_modules
    if [ $clang ]; then
        run_tests clang
        run clang build/clang/train_gpt2 "${quick_run[@]}"
    fi
    built narrow
    has_sim && sim=1 && build sim-plain sim-plain build/sim/FP16-plain/test_gpt2 build/sim/FP32/train_gpt2cu build/sim/BF16/train_gpt2cu
    run_tests narrow "${vector_tests[@]}"
    [ $sim ] || return
    built sim-plain
    build sim-msan sim-msan
    run_sims plain build/sim/FP16-plain/test_gpt2
    run sim dev/test/cli/test_kit.sh
    run sim dev/test/cli/test_multi_gpu.sh
    if command -v python3 >/dev/null; then
        run sim dev/test/cli/test_roofline.sh
        run sim dev/test/cli/test_scaling.sh build/sim/BF16/train_gpt2cu
    else
        skip "roofline and scaling: python3 is missing"
    fi
    built sim-msan
    run_sims msan build/sim/msan/test_*
}

case ${1:-} in
'')
    test_cpu
    test_gpu
    ;;
check) check "${@:2}" ;;
rest) test_rest ;;
*)
    echo "error: run.sh: $1: wanted check, rest, or nothing" >&2
    exit 2
    ;;
esac
finish
[ "${1:-}" = check ] || print_cpu_seconds
print_failures
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
