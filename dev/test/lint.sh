#!/usr/bin/env bash
# lint.sh -- compiles what the builds of run.sh do not: headers without an implementation alone as
# C11, and all headers as C++17, without warnings; checks the format of C sources, their comments and
# rooms, and that shell scripts parse.
#
#     make lint                   by make test: half of the rooms' headers (TEST_HALF)
#     dev/test/lint.sh quick      of the compilers' work only the GPU trainer; rooms, formatting, scripts
#
# One line for each problem; the last line counts them. Missing tools are reported and skipped.
set -u
cd "$(dirname "$0")/../.." || exit 1
shopt -s extglob

warnings=(-I. -Wall -Wextra -Werror -Wno-unused-function -D_GNU_SOURCE -fsyntax-only)
name=lint
source dev/test/lib/check.sh
source dev/cusim/cuda_home.sh

# lint WHAT COMMAND...: counts; on failure says WHAT and the first line of the complaint that tells
# most.
lint() {
    local what=$1 output
    shift
    checks=$((checks + 1))
    if ! output=$("$@" 2>&1); then
        failures=$((failures + 1))
        echo "lint: FAILED: $what: $(grep -m 1 -E 'error|warning|line' <<<"$output" || head -n 1 <<<"$output")"
    fi
}

# as_unit DIRECTORY PATTERN: arguments of a compiler that reads its headers one after the other.
as_unit() { printf -- '-include %s ' "$1"$2; echo -x c++ /dev/null; }

# Compiles each header alone as C, by gcc with OpenMP, or its implementation by clang: the plain
# build compiles that alone, too. Then the headers of a room as one unit of C++, without
# implementations, by clang without OpenMP: both languages, both compilers, both sides of #ifdef
# _OPENMP.
lint_headers() {
    local header room number=0
    for header in llmc/*.h llmc/*/*.h; do
        if ! grep -q '_IMPLEMENTATION$' "$header"; then
            lint "$header as C, gcc" gcc -std=gnu11 -fopenmp "${warnings[@]}" -x c "$header"
        elif [ $clang = yes ] && has_case $((number++)); then
            lint "$header as C, clang" clang -std=gnu11 "${warnings[@]}" -Wno-unknown-pragmas \
                -D"$(basename "${header^^}" .H)_IMPLEMENTATION" -x c "$header"
        fi
    done
    # shellcheck disable=SC2046 # names without blanks
    for room in llmc/ llmc/*/; do
        has_case $((number++)) || continue
        if [ $clang = yes ]; then
            lint "$room as C++, clang" clang++ -std=gnu++17 "${warnings[@]}" -Wno-unknown-pragmas $(as_unit "$room" '*.h')
        elif [ $gxx = yes ]; then
            lint "$room as C++, g++" g++ -std=gnu++17 -fopenmp "${warnings[@]}" $(as_unit "$room" '*.h')
        fi
    done
}

# Versions 14, 16, 18 and 20 agree on these sources; before 14 some options do not exist.
lint_format() {
    local version
    version=$(clang-format --version | sed -E 's/.*version ([0-9]+).*/\1/')
    if [ "$version" -lt 14 ]; then
        echo "skipped: format: clang-format $version, wanted 14 or later"
        return
    fi
    lint "make format" clang-format --dry-run -Werror ./*.c ./*.cu llmc/{,*/}*.h llmc/*/*.cuh dev/test/*/*.[ch] dev/test/*/*.cu \
        dev/bench/*.c dev/bench/*.cu dev/data/*.[ch]
}

cuda_compiler() {
    g++ -std=gnu++17 "${warnings[@]}" -Wno-unknown-pragmas -fno-strict-aliasing -DPRECISION_BF16 -Idev/cusim/include \
        -isystem "$CUDA_HOME/include" -isystem "$CUDA_HOME/include/cccl" -x c++ "$@"
}

lint_gpu_trainer() { ! has_cuda_headers train_gpt2.cu || lint train_gpt2.cu cuda_compiler train_gpt2.cu; }

# A room's as one unit, with the CPU device's CUDA, after floatx.cuh, which comes before model.h;
# that each includes what it uses, lint_rooms.py looks at.
lint_cuda_headers() {
    local room number=0
    has_cuda_headers ".cuh headers" || return
    for room in $(dirname llmc/*/*.cuh | sort -u); do
        has_case $((number++)) || continue
        # shellcheck disable=SC2046 # names without blanks
        lint "$room/*.cuh, g++" cuda_compiler -include llmc/gpu/floatx.cuh $(as_unit "$room/" '!(*_cudnn).cuh') # cuDNN is for nvcc.sh
    done
}

# nvcc's front end must not see the processor's intrinsics (llmc/base/intrinsics.h). Read as it
# reads them, CUDA sources include none, for the newest processors of both kinds. Needs no CUDA:
# headers that are missing count as empty (-MG).
intrinsics_of() { # FLAGS -- SOURCE...
    local flags=()
    while [ "$1" != -- ]; do flags+=("$1") && shift; done
    printf '#include "%s"\n' "${@:2}" |
        g++ -std=gnu++17 -x c++ -M -MG -D__CUDACC__ -DPRECISION_BF16 -DHAVE_NCCL -DUSE_CUDNN -D_GNU_SOURCE -I. "${flags[@]}" - |
        grep -o -m 1 -E '[^ ]*(intrin|arm_[a-z0-9]+)\.h'
}
includes_no_intrinsics() { # FLAGS...
    local found source sources=(*.cu dev/test/*/*.cu dev/bench/*.cu)
    found=$(intrinsics_of "$@" -- "${sources[@]}") || return 0
    for source in "${sources[@]}"; do
        [ -z "$(intrinsics_of "$@" -- "$source")" ] || break
    done
    echo "error: $source includes $found, which nvcc does not compile; wanted llmc/base/intrinsics.h"
    return 1
}

lint_intrinsics() {
    [ "$(uname -m)" != x86_64 ] || lint "CUDA sources for x86-64" includes_no_intrinsics -march=sapphirerapids
    lint "CUDA sources for ARM" includes_no_intrinsics -U__x86_64__ -D__aarch64__ -D__ARM_FEATURE_DOTPROD
}

# By the shell that the first line names.
lint_scripts() {
    local script shellcheck=no
    is_here shellcheck "scripts for clusters, shellcheck" && shellcheck=yes
    for script in scripts/multi_node/*.sh scripts/multi_node/*.sbatch; do
        [ $shellcheck = no ] || lint "$script, shellcheck" shellcheck "$script"
    done
    for script in .ci/* scripts/* scripts/multi_node/* dev/*/*.sh dev/*/*/*.sh; do
        case $(head -n 1 "$script" 2>/dev/null) in
        '#!'*bash) lint "$script" bash -n "$script" ;;
        '#!'*sh) lint "$script" sh -n "$script" ;;
        esac
    done
}

# Includes point down, and each is used; private names stay at home. Comments are narrow, and whole
# sentences. Pages name options, files and messages that exist.
lint_python() { # SCRIPT
    local problem
    is_here python3 "$1" || return
    checks=$((checks + 1))
    while read -r problem; do
        failures=$((failures + 1))
        echo "lint: FAILED: $problem"
    done < <("dev/test/$1" 2>&1)
}

lint_python lint_rooms.py
lint_python lint_trainers.py
lint_python lint_comments.py
lint_python lint_pages.py
if [ "${1:-}" = quick ]; then
    ! is_here g++ train_gpt2.cu || lint_gpu_trainer
else
    gxx=no
    clang=no
    is_here g++ "headers as C++, g++" && gxx=yes
    is_here clang "headers, clang" && clang=yes
    lint_headers
    [ $gxx = yes ] && lint_cuda_headers
    [ $gxx = yes ] && lint_intrinsics
fi
is_here clang-format "format" && lint_format
lint_scripts
check_done
