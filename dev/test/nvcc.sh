#!/usr/bin/env bash
# nvcc.sh -- compiles the GPU trainer for every supported architecture, in every precision: no warnings, and no kernel
# that spills registers, unless the comment above it has the word "spills" and the reason.
set -u
cd "$(dirname "$0")/../.." || exit 1
output=$(mktemp)
trap 'rm -f "$output"' EXIT
failures=0

fail() {
    echo "nvcc: FAILED: $*"
    failures=$((failures + 1))
}

# The kernels that spill, by name, of which no comment in the module says so.
unexplained_spills() {
    grep 'Registers are spilled' "$output" | sed -E "s/.*'_Z[0-9]+([a-z_]*kernel_?).*/\1/" | sort -u |
        while read -r kernel; do
            grep -h -B 20 -E "$kernel\(" llmc/*.cuh | grep -q -i '^//.*spill' || echo "$kernel"
        done
}

compile() { # PRECISION ARCHITECTURE...
    local precision=$1 code=() kernels
    shift
    for arch in "$@"; do
        code+=(-gencode "arch=compute_${arch#sm_},code=$arch")
    done
    nvcc -std=c++17 -O3 --threads 2 "${code[@]}" -DPRECISION_"$precision" -D_GNU_SOURCE -diag-suppress 1675 \
        -Xptxas -warn-spills -Xcompiler -fopenmp,-Wall,-Wno-unknown-pragmas -I. -c train_gpt2.cu -o /dev/null \
        >"$output" 2>&1 || fail "$precision for $*: $(grep -m 1 error "$output")"
    grep 'warning' "$output" | grep -q -v 'Registers are spilled' &&
        fail "$precision for $*: $(grep 'warning' "$output" | grep -m 1 -v 'Registers are spilled')"
    kernels=$(unexplained_spills)
    [ -z "$kernels" ] || fail "$precision for $*: registers spill without a word in the comment: $kernels"
}

compile BF16 sm_80 sm_90a sm_100 sm_120
compile FP16 sm_90a
compile FP32 sm_90a
[ $failures = 0 ] && echo "nvcc: the GPU trainer for sm_80, sm_90a, sm_100, sm_120: no warnings, no unexplained spills"
exit $((failures > 0))
