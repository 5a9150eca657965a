#!/usr/bin/env bash
# install_deps.sh -- installs, on Debian and Ubuntu, the packages that the tests and benchmarks
# need. The CPU trainer itself needs only a C compiler and make. Runs as root or with sudo; asks
# nothing; prints its actions; a second run does nothing. Packages from PyPI are pinned by version
# and checksum (dev/ref/requirements_*.txt).
set -euo pipefail
top=$(cd "$(dirname "$0")/.." && pwd)
source "$top/dev/cusim/cuda_home.sh"

usage() {
    cat <<'END'
usage: scripts/install_deps.sh [--test] [--python] [--mpi] [--report] [--llama] [--headers] [--cudnn] [--soak] [--dry-run]
    (always)   compilers gcc and clang with OpenMP and sanitizers, clang-format, clang-tidy, zlib, ISA-L, zstd, snappy
    --test     all that `make test` can use, but nvcc: --mpi, --report, --llama, tools that tests call, and
               --headers where there is no CUDA toolkit
    --python   also Python, and build/venv with PyTorch (dev/ref/setup.sh; 2 GB to download, 4 GB on disk)
    --mpi      also OpenMPI, for runs of several processes under mpirun
    --report   also a browser, and build/venv-report with TensorBoard (dev/ref/setup.sh report): they test --report and
               --tensorboard
    --llama    also build/llama with llama.cpp (dev/ref/setup.sh llama): it opens exported models
    --headers  also CUDA's headers, from PyPI with pip (600 MB to download, 23 on disk), into build/cuda-headers: the
               simulated GPU needs no more of a toolkit
    --cudnn    also the headers of cudnn-frontend, from PyPI with pip, into build/cudnn-frontend: for `make
               USE_CUDNN=1`; cuDNN itself is cudnn9-cuda-12 or cudnn9-cuda-13 in NVIDIA's package repository
    --soak     also what `make soak` can use besides: a compiler for aarch64, qemu, debootstrap, strace
    --dry-run  only say what would be installed
END
}

packages=(gcc g++ make clang clang-format clang-tidy libomp-dev zlib1g-dev libisal-dev libzstd-dev libsnappy-dev)
python=off
report=off
llama=off
headers=off
cudnn=off
dry_run=off
add_mpi() { packages+=(libopenmpi-dev openmpi-bin); }
add_report() { report=on packages+=(chromium fonts-dejavu-core python3 python3-venv); }
add_llama() { llama=on packages+=(python3 python3-venv); }
add_headers() { headers=on packages+=(python3 python3-pip); }
add_tools() { packages+=(git curl wget zstd shellcheck python3 python3-yaml); }
for option in "$@"; do
    case $option in
    --test)
        add_tools && add_mpi && add_report && add_llama
        [ "$CUDA_HOME" != "$top/build/cuda-headers" ] && has_cuda_headers headers >/dev/null || add_headers
        ;;
    --python) python=on packages+=(python3 python3-venv python3-dev libjemalloc2) ;; # torch.compile: Python.h
    --mpi) add_mpi ;;
    --report) add_report ;;
    --llama) add_llama ;;
    --headers) add_headers ;;
    --cudnn) cudnn=on packages+=(python3 python3-pip) ;;
    --soak) packages+=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user qemu-user-static debootstrap strace) ;;
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
    as_user=(sudo -u "$SUDO_USER") # build/venv belongs to the user who called sudo
fi
apt_get() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq "$@" >/dev/null; }
is_installed() { dpkg-query --show --showformat '${db:Status-Status}' "$1" 2>/dev/null | grep -qx installed; }

# Fills `missing` with the arguments that are not installed.
find_missing() {
    missing=()
    for package in $(printf '%s\n' "$@" | sort -u); do
        is_installed "$package" || missing+=("$package")
    done
}

# get_headers DIRECTORY REQUIREMENTS: fills DIRECTORY/include from the wheels that a file of
# requirements names by version and checksum. Their Python code is not used, so wheels for any
# Python and any processor will do.
get_headers() {
    local to=$top/build/$1 want=$top/dev/ref/$2
    local have=$to/installed-requirements.txt # written last, so an interrupted installation starts again
    if cmp -s "$want" "$have"; then
        echo "build/$1: up to date"
        return
    fi
    echo "pip download $(grep -o '^nvidia[^ ]*' "$want" | tr '\n' ' ')"
    [ $dry_run = off ] || return 0
    rm -rf "$to"
    "${as_user[@]}" mkdir -p "$to/wheels"
    "${as_user[@]}" python3 -m pip --quiet --disable-pip-version-check download --no-deps --require-hashes --only-binary :all: \
        --python-version 3.11 --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_18_x86_64 \
        --platform manylinux2014_x86_64 --dest "$to/wheels" --requirement "$want"
    "${as_user[@]}" python3 - "$to" <<'END'
import pathlib, sys, zipfile

to = pathlib.Path(sys.argv[1])
for wheel in map(zipfile.ZipFile, to.glob("wheels/*.whl")):
    for name in wheel.namelist():
        header = name.partition("include/")[2]
        if header and not header.endswith("/"):
            file = to / "include" / header
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(wheel.read(name))
END
    rm -rf "$to/wheels"
    "${as_user[@]}" cp "$want" "$have"
}

# clang's sanitizers are a separate package if the release has one of this name, else part of clang.
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
# set_up [ENVIRONMENT]
set_up() {
    echo "dev/ref/setup.sh $*"
    [ $dry_run = on ] || "${as_user[@]}" "$top/dev/ref/setup.sh" "$@"
}

[ $python = off ] || set_up
[ $report = off ] || set_up report
[ $llama = off ] || set_up llama
[ $headers = off ] || get_headers cuda-headers requirements_cuda.txt
[ $cudnn = off ] || get_headers cudnn-frontend requirements_cudnn.txt
