#!/usr/bin/env bash
# run.sh -- runs all tests that need no GPU: `make check`, `make test` and a part of `make soak`.
#
#     run.sh check [WORD...]      the quick tests; WORD...: only the rooms' tests whose names contain a word
#     run.sh test                 all tests but the slow ones
#     run.sh rest                 slow tests, which seldom find a fault that the others miss
#     run.sh VARIANT...           only these of the variants below
#     run.sh goals ...            prints which tests one of these would run
#
# Of some tests that find the same faults in other ways (sanitizers, orders, halves of a matrix), a
# run has only one, which the commit's hash draws; the end of a run lists what was drawn.
# DRAW=all runs all of them, DRAW=HASH those of another commit.
#
# make does the work (dev/test.mk): a test runs again if it, its program or its inputs have changed.
# Those that took longest the last time come first. At the end: the CPU seconds of each variant, the
# tests that took most, builds among them, and the last lines of each test that failed, so that the
# end of a log says why. The last line is `N passed, N failed, N skipped`; the exit status is 1 if
# anything failed. Environment: GPT2_VOCAB and TINY_TEXT name files for the tests that want them;
# JOBS is the number of tests and compilers at a time; ONLY leaves out all tests but these
# (build/asan/test_base ...).
set -u
cd "$(dirname "$0")/../.." || exit 1
source dev/cusim/cuda_home.sh
unset MAKEFLAGS MFLAGS MAKELEVEL
export LC_ALL=C
[ ! -d /usr/lib/ccache ] || PATH=/usr/lib/ccache:$PATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
goals=() # of all variants
variants=()
budget=3000 # most CPU seconds of `make test`, for each second of `pace`: 1,065 at 0.372 were measured (Zen 5)

skip() { echo "skipped: $*" | tee -a "$work/skipped"; }

# Seven digits of the hash are those of `git log --oneline`. A tree without git draws by a fixed
# word.
draw=${DRAW:-$(git --git-dir=.git rev-parse HEAD 2>/dev/null || echo none)}
draw=${draw:0:7}
CROSSINGS_SEED=$(cksum <<<"$draw" | cut -d ' ' -f 1) # what the test crossings draws
# Half of the cases of tests that ask for it (test_has_case of test.h); DRAW=all: all.
[ "$draw" = all ] || export TEST_HALF=$((CROSSINGS_SEED % 2 + 1))
export CROSSINGS_SEED

# drawn WHAT CHOICE...: prints one of the choices, or all.
drawn() {
    local what=$1 number
    shift
    if [ "$draw" = all ]; then
        echo "$*"
    else
        number=$(($(cksum <<<"$draw $what" | cut -d ' ' -f 1) % $# + 1))
        echo "${!number}"
        [ $# = 1 ] || echo "drawn: $what: ${!number} (of $*)" >>"$work/drawn"
    fi
}

# ---- the variants ----

read -ra rooms <<<"$(make -s print-TESTS)"
read -ra vector_rooms <<<"$(make -s print-VECTOR_TESTS)"
read -ra gpu_rooms <<<"$(make -s print-GPU_TESTS)"
read -ra serial <<<"$(make -s print-SERIAL)"
quick=(UNITS=1 OPT=-O1 TEST_OPT=-O0) # a third of the time to compile it
quick_modules=MODULES_OPT=-O0 # where the tests are of something else: half the time to compile them

# variant NAME GOAL... -- NAME=value...: its tests, with these settings of make. A goal without a
# slash is in build/NAME.
variant() {
    local name=$1 build=plain goal paths=() settings=''
    shift
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        case $1 in */*) goal=$1 ;; *) goal=build/$name/$1 build=$name ;; esac
        [[ -n "${ONLY-}" && " $ONLY " != *" $goal "* ]] || paths+=("$goal.ok")
        shift
    done
    [ ${#paths[@]} != 0 ] || return 0
    [ $# -lt 2 ] || settings=$(printf " '%s'" "${@:2}")
    mapfile -t paths < <(longest_first "${paths[@]}")
    goals+=("${paths[@]}")
    variants+=("$name")
    printf '%s: programs\n\t+@$(MAKE) -s -k BUILD=build/%s WERROR=-Werror%s %s\n' \
        "$name" "$build" "$settings" "${paths[*]}" >>"$work/variants.mk"
}

# longest_first GOAL...: by the time each took when it last passed; new ones first.
longest_first() {
    local goal seconds
    for goal in "$@"; do
        seconds=$(sed -n 's/^cpu //p' "$goal" 2>/dev/null | tail -n 1)
        echo "${seconds:-999} $goal"
    done | sort -s -rn -k 1,1 | cut -d ' ' -f 2
}

# quarter GOAL: the quarter of the script's cases that is drawn.
quarter() { for part in $(drawn "quarter of ${1#build/}" {1,2,3,4}of4); do echo "$1.$part"; done; }

# every_second WHAT WORD...: prints words number 1, 3, 5 ..., or the others.
every_second() {
    local first i
    for first in $(drawn "every second of $1, from number" 1 2); do
        for ((i = first + 1; i <= $#; i += 2)); do echo "${!i}"; done
    done
}

# without LIST WORD...: prints the words that are not in the list.
without() {
    local word
    for word in "${@:2}"; do [[ " $1 " = *" $word "* ]] || echo "$word"; done
}

# Rooms with threads: a run has half of them with the thread sanitizer, too.
threaded=(test_{data,comm,checkpoint})

# Most tests of this room are processes that end with an error, and under a sanitizer each starts
# slowly.
slow_with_asan=(test_setup)

# Scripts that read files of all kinds: a run has each with the address sanitizer, or without.
reading_scripts=(cli_{cli,generate,data,report,tokenize})
# reading_with BUILD: prints those that are drawn for it.
reading_with() {
    local script build
    for script in "${reading_scripts[@]}"; do
        for build in $(drawn "build for $script" asan plain); do
            [ "$build" != "$1" ] || echo "$script"
        done
    done
}

# Rooms without vectors are tested with the address sanitizer; here only by `make check` and `rest`.
test_plain() {
    # shellcheck disable=SC2046 # names without blanks
    variant plain "${vector_rooms[@]}" "${slow_with_asan[@]}" cli_{families,architectures,dropout,misuse,teacher,adapter,qk_clip,kill,experts,watch,answers,examples,allocations.short} crossings \
        $(quarter build/plain/cli_ranks) $(quarter build/plain/cli_pipeline) $(reading_with plain)
}
variant_asan() {
    variant asan "$@" -- UNITS=1 \
        OPT="-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all" MODULES_OPT=-Og TEST_OPT="-O0 -fno-sanitize=undefined"
}
# shellcheck disable=SC2046 # names without blanks
test_asan() {
    local numeric=()
    mapfile -t numeric < <(without test_tokenizer "${vector_rooms[@]}") # its tests read any bytes
    variant_asan $(without "${slow_with_asan[*]} ${numeric[*]}" "${rooms[@]}") \
        $(every_second "rooms with vectors, with asan" "${numeric[@]}") $(reading_with asan)
}
# shellcheck disable=SC2046 # names without blanks
test_tsan() { variant tsan $(every_second "rooms with threads, with tsan" "${threaded[@]}") -- UNITS=1 OPENMP= OPT="-O1 -g1 -fsanitize=thread" $quick_modules; }
# Prints avx2 if the plain tests have wider vectors.
narrower_vectors() {
    local march
    read -r march <<<"$(make -s print-MARCH)"
    # shellcheck disable=SC2086 # no option, or one
    ! cc $march -dM -E -x c /dev/null | grep -w __AVX512F__ >/dev/null || echo avx2
}
test_avx2() { variant avx2 "${vector_rooms[@]}" -- UNITS=1 MARCH=-march=haswell OPT=-O2 $quick_modules; }
test_avx512() { # and AMX, emulated
    if ! grep -qw avx2 /proc/cpuinfo 2>/dev/null; then
        skip "avx512: emulated on x86-64 processors with AVX2"
        return
    fi
    variant avx512 test_{base,bf16,ops,tokenizer} build/avx512/test_bf16.{znver4,icelake} -- \
        TEST_FILES="$(make -s print-EMULATED_TEST_FILES)" COMPILED="$(make -s print-EMULATED_MODULES)" \
        MARCH=haswell OPT=-O1 LDLIBS=build/plain/libllmc.a \
        CFLAGS='-Wno-psabi -fexpensive-optimizations -DEMULATED_X86=\"dev/test/lib/emulated_x86.h\"'
}
test_serial() { variant serial one_run -- "${serial[@]}"; }
test_scripts() { variant scripts build/scripts/{build,get_data,multi_node,run_until_done,wandb}; }
test_lint() { variant lint build/lint; }

has_sim() {
    local why
    why=$(has_simulated_gpu sim) || { skip "${why#skipped: }" && false; }
}
# Rooms of the simulated GPU whose kernels take long, plain and with a sanitizer: a run has each in
# one of these ways. The others are quick: a run has all of them plain, and half with a sanitizer.
long_gpu_rooms=(test_{ops,optim,attention_small})
# sim_rooms SANITIZER: prints those that are drawn for it; `plain`: without one.
sim_rooms() {
    local room how
    # shellcheck disable=SC2046 # names without blanks
    for room in $([ "$1" = plain ] && without "${long_gpu_rooms[*]}" "${gpu_rooms[@]}" ||
        every_second "quick rooms with $1" $(without "${long_gpu_rooms[*]}" "${gpu_rooms[@]}")); do
        echo "build/sim/$1/$room"
    done
    for room in "${long_gpu_rooms[@]}"; do
        for how in $(drawn "way of the simulated $room" plain sanitized); do
            [ "$how" != "$([ "$1" = plain ] && echo plain || echo sanitized)" ] || echo "build/sim/$1/$room"
        done
    done
}
# The trainer, and scripts that run it.
test_sim_trainer() {
    local precision
    for precision in $(drawn "precision of the simulated trainer" BF16 FP32); do
        # shellcheck disable=SC2046 # names without blanks
        case $precision in
        BF16) printf '%s\n' build/sim/BF16/cli_{families,qk_clip} build/sim/cli_experts $(quarter build/sim/cli_ranks) $(quarter build/sim/cli_pipeline) ;;
        FP32) printf '%s\n' build/sim/FP32/cli_{families,qk_clip} build/sim/cli_{dropout,sim,generate} ;;
        esac
    done
}
test_sim() {
    local goal whole tests=() plain=() sanitizer
    has_sim || return
    # shellcheck disable=SC2207 # names without blanks
    plain=($(sim_rooms plain))
    read -ra sanitizer <<<"$(drawn "sanitizer of the simulated GPU" asan tsan msan)"
    for whole in $(drawn "way of the whole simulated model" BF16-plain FP32-plain BF16-sanitized); do
        case $whole in
        *plain) plain+=("build/sim/$whole/test_gpt2") ;;
        *) tests+=("${sanitizer[@]/%//test_gpt2}") && tests=("${tests[@]/#/build/sim/BF16-}") ;;
        esac
    done
    for goal in "${plain[@]}"; do
        # shellcheck disable=SC2046 # names without blanks
        tests+=($(printf "$goal.%s " $(drawn "order of ${goal#build/sim/}" down random greedy)))
    done
    for goal in "${sanitizer[@]}"; do
        # shellcheck disable=SC2207 # names without blanks
        tests+=($(sim_rooms "$goal"))
        [ "$(drawn "tests of the simulator itself" yes no)" = no ] || tests+=("build/sim/cusim.$goal")
    done
    # shellcheck disable=SC2046 # names without blanks
    variant sim "${tests[@]}" $(test_sim_trainer)
}
has_nvcc() { command -v nvcc >/dev/null || { skip "nvcc is missing: the GPU trainer is not compiled for any GPU" && false; }; }
# Both compile every kernel; one looks for spilled registers, the other links cuDNN's attention.
test_nvcc_quick() {
    # shellcheck disable=SC2046 # names without blanks
    has_nvcc && variant nvcc $(printf 'build/nvcc/%s ' $(drawn "work for nvcc" bf16 cudnn))
}

# ---- what `make soak` adds ----

test_clang() {
    local openmp=-fopenmp
    command -v clang >/dev/null || { skip "clang is missing (scripts/install_deps.sh)" && return; }
    clang -fopenmp -x c -o /dev/null - 2>/dev/null <<<'#include <omp.h>
int main(void) { return omp_get_max_threads() == 0; }' ||
        { openmp= && skip "clang with OpenMP: libomp-dev is missing (scripts/install_deps.sh)"; }
    variant clang "${rooms[@]}" one_run -- UNITS=1 CC=clang OPENMP=$openmp OPT=-O1 $quick_modules
}
test_narrow() { variant narrow "${vector_rooms[@]}" -- UNITS=1 MARCH= OPT=-O2 $quick_modules; }
test_nvcc_all() { has_nvcc && variant nvcc build/nvcc/all; }
test_sim_rest() {
    local measured=()
    has_sim || return
    if command -v python3 >/dev/null; then
        measured=(build/sim/cli_{roofline,scaling})
    else
        skip "roofline and scaling: python3 is missing"
    fi
    variant sim build/sim/FP16-plain/test_gpt2.down build/sim/cli_{kit,multi_gpu} "${measured[@]}"
}
test_plain_rest() {
    local room others=()
    for room in "${rooms[@]}"; do
        [[ " ${vector_rooms[*]} ${slow_with_asan[*]} " = *" $room "* ]] || others+=("$room")
    done
    variant plain "${others[@]}" cli_allocations
    variant_asan "${slow_with_asan[@]}"
}

# ---- the run and its summary ----

# run: all variants at once; they share make's job server. What several of them use comes first.
run() {
    local sync=''
    {
        echo "all: ${variants[*]}"
        echo programs:
        [[ " ${goals[*]} " != *" build/"[ps]* ]] || printf '\t+@$(MAKE) -s -k BUILD=build/plain WERROR=-Werror build/plain/train_gpt2\n'
        [[ " ${goals[*]} " != *" build/s"[ei]* ]] || printf '\t+@$(MAKE) -s -k BUILD=build/serial WERROR=-Werror %s build/serial/libllmc.a\n' "${serial[*]}"
        cat "$work/variants.mk"
    } >"$work/all.mk"
    make --help | grep -q output-sync && sync=--output-sync=target # GNU make 4
    # shellcheck disable=SC2086 # no option, or one
    make -s -k -j"${JOBS:-3}" $sync --no-print-directory -f "$work/all.mk" all 2>&1 | tee "$work/log"
}

# failures: the goals that were not made, by what make says: all, if the programs do not build.
failures() {
    if grep -q '^make.*: programs\] Error' "$work/log"; then
        printf '%s\n' "${goals[@]%.ok}"
        return
    fi
    sed -n -E "s/^make.*\*\*\* \[.*: (build\/.*)\.ok\] .*/\1/p; s/^make.*Target '(build\/.*)\.ok' not remade because of errors.*/\1/p" \
        "$work/log" | sort -u
}

# pace: prints the CPU seconds of a loop that is always the same, the least of three: how fast this
# machine is at the moment.
pace() {
    local i TIMEFORMAT=%U
    for _ in 1 2 3; do { time for ((i = 0; i < 400000; i++)); do :; done; } 2>&1; done | sort -n | head -n 1
}

summary() {
    local goal failed tests all
    failed=$(failures)
    for goal in "${goals[@]%.ok}"; do
        grep -qxF "$goal" <<<"$failed" || echo "$(sed -n 's/^cpu //p' "$goal.ok" | tail -n 1) ${goal#build/}"
    done >"$work/times"
    tests=$(awk '{ sum += $1 } END { printf "%.0f", sum }' "$work/times")
    times >"$work/cpu"
    all=$(awk 'NR == 2 { gsub(/[ms]/, " "); printf "%.0f", $1 * 60 + $2 + $3 * 60 + $4 }' "$work/cpu")
    awk '{ split($2, part, "/"); sum[part[1]] += $1 }
         END { for (name in sum) printf "CPU: %5.0f s %s\n", sum[name], name }' "$work/times" | sort -k 2,2 -rn
    echo "CPU: $all s in this run, builds among them; $tests s of all these tests when they last ran"
    awk -v budget=$budget -v pace="$(pace)" 'BEGIN { printf "CPU: make test may take %.0f s on this machine, whose pace is %s s\n", budget * pace, pace }'
    sort -rn "$work/times" | awk '$1 > 20 { printf "above 20 s of CPU: %s (%.0f s)\n", $2, $1 }'
    for goal in $failed; do
        { [ -e "$goal.failed" ] && tail -n 20 "$goal.failed" || echo "it could not be built"; } | sed "s|^|again: ${goal#build/}: |"
    done
    awk '!seen[$0]++' "$work/drawn" 2>/dev/null && echo "drawn: by $draw; DRAW=$draw draws the same again, DRAW=all runs all"
    skipped=$(cat "$work/skipped" "${goals[@]}" 2>/dev/null | grep -c '^skipped: ')
    failed=$(wc -w <<<"$failed")
    echo "$((${#goals[@]} - failed)) passed, $failed failed, $skipped skipped"
    [ "$failed" = 0 ]
}

# check_words WORD...: the rooms' tests whose names contain one of the words. Builds only the
# programs of the files that are named so, if any are.
check_words() {
    local word file program programs=() status=0
    for word in "$@"; do
        for file in dev/test/*/test_*"${word%%.*}"*.c; do
            [ -e "$file" ] || continue
            program=$(basename "$file" .c)
            [[ " ${rooms[*]} " = *" $program "* ]] || program=test_$(basename "$(dirname "$file")")
            [[ " ${programs[*]-} " = *" $program "* ]] || programs+=("$program")
        done
    done
    [ ${#programs[@]} != 0 ] || programs=("${rooms[@]}")
    make -s -j2 BUILD=build/check WERROR=-Werror "${quick[@]}" "${programs[@]/#/build/check/}" || return 1
    for program in "${programs[@]}"; do
        [ -z "$("build/check/$program" --list | grep -F "$(printf '%s\n' "$@")")" ] || "build/check/$program" "$@" || status=1
    done
    return $status
}

is_run=1
[ "${1:-}" != goals ] || { is_run= && shift; }
case ${1:-test} in
check)
    if [ $# -gt 1 ]; then
        check_words "${@:2}"
        exit
    fi
    variant check "${rooms[@]}" cli_smoke -- "${quick[@]}"
    variant lint build/lint_quick
    ;;
test)
    # shellcheck disable=SC2046 # names without blanks
    for name in plain asan sim nvcc_quick $(drawn "instructions on the CPU" avx512 $(narrower_vectors)) tsan lint scripts serial; do
        test_$name
    done
    ;;
rest) for name in plain_rest clang narrow sim_rest nvcc_all; do test_$name; done ;;
*)
    for name in "$@"; do
        declare -F "test_$name" >/dev/null || { echo "error: run.sh: $name: wanted check, test, rest, or variants" >&2 && exit 2; }
        "test_$name"
    done
    ;;
esac
if [ ! $is_run ]; then
    printf '%s\n' "${goals[@]%.ok}"
    exit
fi
run
summary
