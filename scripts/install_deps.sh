#!/usr/bin/env bash
# Installs, on Debian and Ubuntu, what the tests and benchmarks want. The CPU trainer itself needs only a C
# compiler and make. As root or with sudo; asks nothing; says what it does; a second run does nothing.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/install_deps.sh [--python] [--mpi] [--report] [--cudnn] [--soak] [--dry-run]
    (always)   compilers gcc and clang with OpenMP and sanitizers, clang-format, clang-tidy, zlib, ISA-L, zstd, snappy
    --python   also Python, and build/venv with PyTorch (dev/ref/setup.sh; 2 GB to download, 4 GB on disk)
    --mpi      also OpenMPI, for runs of several processes under mpirun
    --report   also a browser, and build/venv-report with TensorBoard (dev/ref/setup_report.sh): they test --report and
               --tensorboard
    --cudnn    also the headers of cudnn-frontend, from PyPI with pip, into build/cudnn-frontend: for `make
               USE_CUDNN=1`; cuDNN itself is cudnn9-cuda-12 or cudnn9-cuda-13 in NVIDIA's package repository
    --soak     also a compiler for aarch64 and qemu, for `make soak` on another processor
    --dry-run  only say what would be installed
END
}

packages=(gcc g++ make clang clang-format clang-tidy libomp-dev zlib1g-dev libisal-dev libzstd-dev libsnappy-dev)
python=off
report=off
cudnn=off
dry_run=off
for option in "$@"; do
    case $option in
    --python) python=on packages+=(python3 python3-venv python3-dev libjemalloc2) ;; # torch.compile: Python.h
    --mpi) packages+=(libopenmpi-dev openmpi-bin) ;;
    --report) report=on packages+=(chromium fonts-dejavu-core python3 python3-venv) ;;
    --cudnn) cudnn=on packages+=(python3 python3-pip) ;;
    --soak) packages+=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static) ;;
    --dry-run) dry_run=on ;;
    --help) usage && exit 0 ;;
    *) echo "error: unknown option $option" >&2 && usage >&2 && exit 2 ;;
    esac
done
command -v apt-get >/dev/null || {
    echo "error: no apt-get: this script knows Debian and Ubuntu; wanted here: ${packages[*]}" >&2
    exit 1
}

as_root=() as_user=()
if [ "$(id -u)" != 0 ]; then
    as_root=(sudo)
elif [ -n "${SUDO_USER:-}" ]; then
    as_user=(sudo -u "$SUDO_USER") # build/venv belongs to who called sudo
fi
apt_get() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq "$@" >/dev/null; }
is_installed() { dpkg-query --show --showformat '${db:Status-Status}' "$1" 2>/dev/null | grep -qx installed; }

# Fills `missing` with those of the arguments that are not installed.
find_missing() {
    missing=()
    for package in "$@"; do
        is_installed "$package" || missing+=("$package")
    done
}

# The headers are part of a wheel; none of its Python is used, so any Python's wheel will do.
cudnn_frontend=1.32.0
get_cudnn_frontend() {
    local to
    to=$(dirname "$0")/../build/cudnn-frontend
    [ ! -e "$to/$cudnn_frontend" ] || { echo "cudnn-frontend: installed" && return; }
    echo "pip download nvidia-cudnn-frontend==$cudnn_frontend"
    [ $dry_run = off ] || return 0
    rm -rf "$to"
    "${as_user[@]}" mkdir -p "$to"
    "${as_user[@]}" python3 -m pip --quiet --disable-pip-version-check download --no-deps --only-binary :all: \
        --python-version 3.11 --platform "manylinux_2_28_$(uname -m)" --dest "$to" \
        nvidia-cudnn-frontend==$cudnn_frontend
    "${as_user[@]}" python3 -m zipfile -e "$to"/*.whl "$to/wheel"
    mv "$to/wheel/include" "$to"
    rm -rf "$to/wheel" "$to"/*.whl
    "${as_user[@]}" touch "$to/$cudnn_frontend" # last, so that an interrupted installation starts again
}

# clang's sanitizers are a package of their own where the release has one by this name, else part of clang.
sanitizers=libclang-rt-dev
find_missing "${packages[@]}" "$sanitizers"
if [ ${#missing[@]} -gt 0 ]; then
    [ $dry_run = on ] || { echo "apt-get update" && apt_get update; }
    apt-cache show "$sanitizers" >/dev/null 2>&1 && packages+=("$sanitizers")
    find_missing "${packages[@]}"
fi
if [ ${#missing[@]} = 0 ]; then
    echo "packages: all installed"
else
    echo "apt-get install ${missing[*]}"
    [ $dry_run = on ] || apt_get install --yes --no-install-recommends "${missing[@]}"
fi
if [ $python = on ]; then
    echo "dev/ref/setup.sh"
    [ $dry_run = on ] || "${as_user[@]}" "$(dirname "$0")/../dev/ref/setup.sh"
fi
if [ $report = on ]; then
    echo "dev/ref/setup_report.sh"
    [ $dry_run = on ] || "${as_user[@]}" "$(dirname "$0")/../dev/ref/setup_report.sh"
fi
[ $cudnn = off ] || get_cudnn_frontend
