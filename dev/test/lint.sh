#!/usr/bin/env bash
# lint.sh -- compiles every header alone, as C11 and as C++17, without warnings; checks the format
# of C sources, their comments and rooms, and that shell scripts parse.
#
#     make lint
#     dev/test/lint.sh quick      without the compilers: rooms, formatting, scripts
#
# One line for each problem; the last line counts them. Missing tools are reported and skipped.
set -u
cd "$(dirname "$0")/../.." || exit 1

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

# Compiles each header as C with OpenMP by gcc, with its implementation, and as C++ without either
# by clang: both languages, both compilers, both sides of #ifdef _OPENMP. The builds of run.sh have
# the other pairs.
lint_headers() {
    local header implementation
    for header in llmc/*.h llmc/*/*.h; do
        implementation=$(grep -o '[A-Z0-9_]*_IMPLEMENTATION$' "$header" | head -n 1)
        lint "$header as C, gcc" gcc -std=gnu11 -fopenmp "${warnings[@]}" ${implementation:+"-D$implementation"} -x c "$header"
        if [ $clang = yes ]; then
            lint "$header as C++, clang" clang++ -std=gnu++17 "${warnings[@]}" -Wno-unknown-pragmas -x c++ "$header"
        elif [ $gxx = yes ]; then
            lint "$header as C++, g++" g++ -std=gnu++17 -fopenmp "${warnings[@]}" -x c++ "$header"
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

# Each alone, with the CPU device's CUDA.
lint_cuda_headers() {
    local header
    has_cuda_headers ".cuh headers" || return
    for header in llmc/*/*.cuh; do
        [ "$header" = llmc/ops/attention_cudnn.cuh ] && continue # wants cuDNN: nvcc.sh
        lint "$header, g++" g++ -std=gnu++17 "${warnings[@]}" -Wno-unknown-pragmas -fno-strict-aliasing \
            -DPRECISION_BF16 -Idev/cusim/include -isystem "$CUDA_HOME/include" -isystem "$CUDA_HOME/include/cccl" -x c++ "$header"
    done
}

# nvcc's front end must not see the processor's intrinsics (llmc/base/intrinsics.h). Read as it
# reads them, CUDA sources include none, for the newest processors of both kinds. Needs no CUDA:
# headers that are missing count as empty (-MG).
includes_no_intrinsics() { # SOURCE FLAGS...
    local found
    found=$(g++ -std=gnu++17 -x c++ -M -MG -D__CUDACC__ -DPRECISION_BF16 -DHAVE_NCCL -DUSE_CUDNN -D_GNU_SOURCE -I. "${@:2}" "$1") || return
    found=$(grep -o -m 1 -E '[^ ]*(intrin|arm_[a-z0-9]+)\.h' <<<"$found") || return 0
    echo "error: $found is included, which nvcc does not compile; wanted llmc/base/intrinsics.h"
    return 1
}

lint_intrinsics() {
    local source
    for source in *.cu dev/test/*/*.cu dev/bench/*.cu; do
        [ "$(uname -m)" != x86_64 ] || lint "$source for x86-64" includes_no_intrinsics "$source" -march=sapphirerapids
        lint "$source for ARM" includes_no_intrinsics "$source" -U__x86_64__ -D__aarch64__ -D__ARM_FEATURE_DOTPROD
    done
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
# sentences.
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
if [ "${1:-}" != quick ]; then
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
