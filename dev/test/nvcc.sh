#!/usr/bin/env bash
# nvcc.sh -- compiles the GPU trainer for every supported architecture, in every precision: no warnings, and no kernel
# that spills registers, unless the comment above it has the word "spills" and the reason.
set -u
cd "$(dirname "$0")/../.." || exit 1
output=$(mktemp)
trap 'rm -f "$output"' EXIT
failures=0

compile() { # PRECISION ARCHITECTURE...
    local precision=$1 code=()
    shift
    for arch in "$@"; do
        code+=(-gencode "arch=compute_${arch#sm_},code=$arch")
    done
    if ! nvcc -std=c++17 -O3 --threads 2 "${code[@]}" -DPRECISION_"$precision" -D_GNU_SOURCE -diag-suppress 1675 -Werror all-warnings \
        -Xptxas -v,-warn-spills -Xcompiler -fopenmp,-Wall,-Wno-unknown-pragmas -I. -c train_gpt2.cu -o /dev/null \
        >"$output" 2>&1 || grep -q 'warning' "$output"; then
        echo "nvcc: FAILED: $precision for $*"
        grep -m 5 -E 'error|warning' "$output"
        failures=$((failures + 1))
    fi
}

compile BF16 sm_80 sm_90a sm_100 sm_120
compile FP16 sm_90a
compile FP32 sm_90a
[ $failures = 0 ] && echo "nvcc: the GPU trainer for sm_80, sm_90a, sm_100, sm_120: no warnings, no spills"
exit $((failures > 0))
