#!/usr/bin/env bash
# nvcc.sh -- compiles the GPU trainer with nvcc: no warnings, no wgmma that ptxas makes wait for the
# one before, and no kernel spills registers, unless the comment above it has the word "spills" and
# the reason.
#
#     dev/test/nvcc.sh            in BF16 for sm_90a
#     dev/test/nvcc.sh all        for every supported architecture and in every precision, each once;
#                                 and BF16, in which GPUs train, also for the newest; FP16 has the
#                                 registers of BF16
#     dev/test/nvcc.sh cudnn      with cuDNN's attention, if its headers are installed: no warnings,
#                                 and it links
set -u
cd "$(dirname "$0")/../.." || exit 1
output=$(mktemp)
trap 'rm -f "$output" "$output.program"' EXIT
failures=0

fail() {
    echo "nvcc: FAILED: $*"
    failures=$((failures + 1))
}

# Names of the kernels that spill although no comment in the module says so.
unexplained_spills() {
    grep 'Registers are spilled' "$output" | sed -E "s/.*'_Z[0-9]+([a-z_]*kernel_?).*/\1/" | sort -u |
        while read -r kernel; do
            grep -h -B 20 -E "$kernel\(" llmc/*/*.cuh | grep -q -i '^//.*spill' || echo "$kernel"
        done
}

nccl=() # its calls are compiled, too, where its header is
[ -z "$(make -s print-HAVE_NCCL)" ] || nccl=(-DHAVE_NCCL)

# Kernels as ever; -O0 is for the host's code, which only the compiler of the host reads.
compile() { # PRECISION ARCHITECTURE... (the first says what kernels are made for)
    local precision=$1 code=() kernels
    shift
    for arch in "$@"; do
        code+=(-gencode "arch=compute_${arch#sm_},code=$arch")
    done
    nvcc -std=c++17 -O0 --threads 2 "${code[@]}" "${nccl[@]}" -DPRECISION_"$precision" -D_GNU_SOURCE -diag-suppress 1675 \
        -DGPU_SM="$(tr -dc 0-9 <<<"$1")" -Xptxas -warn-spills -Xcompiler -fopenmp,-Wall,-Wno-unknown-pragmas -I. -c train_gpt2.cu -o /dev/null \
        >"$output" 2>&1 || fail "$precision for $*: $(grep -m 1 error "$output")"
    grep 'warning' "$output" | grep -q -v 'Registers are spilled' &&
        fail "$precision for $*: $(grep 'warning' "$output" | grep -m 1 -v 'Registers are spilled')"
    # ptxas only informs, by C7510 to C7514, each for another reason
    ! grep -q 'wgmma.* are serialized' "$output" || fail "$precision for $*: $(grep -m 1 'wgmma.* are serialized' "$output")"
    kernels=$(unexplained_spills)
    [ -z "$kernels" ] || fail "$precision for $*: registers spill without a word in the comment: $kernels"
}

skip_cudnn() {
    echo "skipped: cuDNN's attention: $*"
    echo "nvcc: cuDNN's attention is not compiled"
    exit 0
}

# Only to PTX: the kernels are the same.
compile_with_cudnn() {
    local frontend=${CUDNN_FRONTEND:-build/cudnn-frontend/include}
    [ -e "$frontend/cudnn_frontend.h" ] ||
        skip_cudnn "no cudnn_frontend.h in $frontend (scripts/install_deps.sh --cudnn)"
    nvcc -E -x cu - <<<'#include <cudnn.h>' >/dev/null 2>&1 ||
        skip_cudnn "no cudnn.h (cudnn9-cuda-13 in NVIDIA's package repository)"
    make -s build/plain/libllmc.a || fail "libllmc.a"
    nvcc -std=c++17 -O0 -gencode arch=compute_90a,code=compute_90a -DPRECISION_BF16 -DUSE_CUDNN -isystem "$frontend" \
        -D_GNU_SOURCE -diag-suppress 1675 -Xcompiler -fopenmp,-Wall,-Wno-unknown-pragmas -I. train_gpt2.cu build/plain/libllmc.a \
        -o "$output.program" -lcublasLt -lcudnn -lnvrtc >"$output" 2>&1 ||
        fail "with cuDNN: $(grep -m 1 -E 'error|undefined' "$output")"
    grep -q warning "$output" && fail "with cuDNN: $(grep -m 1 warning "$output")"
}

if [ "${1:-}" = cudnn ]; then
    compile_with_cudnn
    [ $failures = 0 ] && echo "nvcc: the GPU trainer with cuDNN's attention: no warnings, links"
    exit $((failures > 0))
fi
if [ "${1:-}" = all ]; then
    for_what="sm_80, sm_90a, sm_100, sm_120"
    compile BF16 sm_90a
    compile BF16 sm_120
    compile FP16 sm_80
    compile FP32 sm_100
else
    for_what=sm_90a
    compile BF16 sm_90a
fi
[ $failures = 0 ] && echo "nvcc: the GPU trainer for $for_what: no warnings, no unexplained spills"
exit $((failures > 0))
