#!/usr/bin/env bash
# build.sh SOURCE MODE [OUTPUT] -- compiles a CUDA source for the CPU device. MODE: plain asan tsan msan.
# CUSIM_FLAGS: more flags of the compiler.
set -e
cd "$(dirname "$0")/../.."
source=$1 mode=$2 name=$(basename "${1%.*}")
out=${3:-build/sim/$mode/$name}
include="-Idev/cusim/include -isystem ${CUDA_HOME:-/usr/local/cuda}/include -I."
common="${CUSIM_FLAGS:-} -std=c++17 -g -Wall -Wextra -Wno-unknown-pragmas -Wno-unused-function -fno-strict-aliasing -ffp-contract=fast -D_GNU_SOURCE"
cxx=g++ flags="-O2 -march=native" runtime=st runtime_flags=-O2
case $mode in
plain) ;;
asan) flags="-O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer" ;;
tsan) cxx=clang++ flags="-O1 -fsanitize=thread" ;;
msan) cxx=clang++ flags="-O1 -fsanitize=memory -fsanitize-memory-track-origins -fno-omit-frame-pointer"
    runtime=msan runtime_flags="-O1 -fsanitize=memory -fno-omit-frame-pointer -Wno-unknown-attributes -Wno-attributes" ;;
*) echo "build.sh: unknown mode $mode" >&2; exit 2 ;;
esac
runtime_cxx=g++
[ $runtime = msan ] && runtime_cxx=clang++
mkdir -p "build/sim/runtime-$runtime" "$(dirname "$out")"
objects=()
for f in rt lt nccl; do
    object=build/sim/runtime-$runtime/cusim_$f.o
    if [ ! "$object" -nt dev/cusim/src/cusim_$f.cpp ] || [ ! "$object" -nt dev/cusim/include/cusim.h ]; then
        $runtime_cxx -std=c++17 $runtime_flags -g -Wall -fno-strict-aliasing $include -c dev/cusim/src/cusim_$f.cpp -o "$object"
    fi
    objects+=("$object")
done
$cxx -x c++ $common $flags $include -c "$source" -o "$out.o"
$cxx $flags "$out.o" "${objects[@]}" -o "$out" -lpthread -ldl -lrt -rdynamic
