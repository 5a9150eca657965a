# cuda_home.sh -- for `source`: sets CUDA_HOME, unless it is set, to the place of CUDA's headers: a
# toolkit, or build/cuda-headers, which scripts/install_deps.sh --headers fills.
# shellcheck shell=bash
if [ -z "${CUDA_HOME:-}" ]; then
    CUDA_HOME=/usr/local/cuda
    [ -e $CUDA_HOME/include/cublasLt.h ] || CUDA_HOME=$(realpath -m "${BASH_SOURCE[0]}/../../../build/cuda-headers")
fi

# has_cuda_headers WHAT: succeeds if CUDA's headers exist; else prints that WHAT is skipped.
has_cuda_headers() {
    [ -e "$CUDA_HOME/include/cublasLt.h" ] && return
    echo "skipped: $1: no CUDA headers in $CUDA_HOME (CUDA_HOME, or scripts/install_deps.sh --headers)"
    return 1
}

# has_simulated_gpu WHAT: succeeds if CUDA's headers and clang's sanitizers exist; else prints that
# WHAT is skipped.
has_simulated_gpu() {
    has_cuda_headers "$1" || return
    command -v clang++ >/dev/null && return
    echo "skipped: $1: clang++ is missing (scripts/install_deps.sh)"
    return 1
}
