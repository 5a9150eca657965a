#!/usr/bin/env bash
# build.sh -- compiles a CUDA source for the CPU device.
#
#     build.sh SOURCE MODE [OUTPUT [MORE...]]     MODE: plain asan tsan msan
#     build.sh MODE STAMP                         only what all programs of a mode link
#
# SOURCE is a .cu file, or an object of this script. OUTPUT is build/sim/MODE/NAME unless given; if
# it ends in .o, nothing is linked. MORE are objects and C sources of dev/test. STAMP is touched if
# anything that all programs link is newer.
#
# The runtime is compiled when its sources have changed. For asan and tsan it is not instrumented
# (see cusim_internal.h), nor are the modules of llmc/ and the C sources that provide expected
# results: they have their own tests. SANITIZED is defined for asan, tsan and msan: a test then skips cases that differ in values
# only. Environment: CUSIM_FLAGS are more flags of the compiler (-g for a debugger;
# -fsanitize-memory-track-origins makes msan report where memory came from); CUDA_HOME is the place
# of CUDA's headers (cuda_home.sh). SIM_LIBS are libraries to link, from a make that has built the
# modules of llmc/; without it this script asks make for both.
set -e
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
if [ $# -lt 2 ]; then
    echo "usage: build.sh SOURCE MODE [OUTPUT [MORE...]]" >&2
    exit 2
fi
source=$1
mode=$2
stamp=
case $source in plain | asan | tsan | msan) mode=$1 source='' stamp=$2 ;; esac
name=$(basename "${source%.*}")
out=${3:-build/sim/$mode/$name}

source "$here/cuda_home.sh"
include=(-I"$here/include" -isystem "$CUDA_HOME/include" -isystem "$CUDA_HOME/include/cccl" -I.) # cccl: <nv/target> of some toolkits
# Kernels read 16 bytes of any type at once (-fno-strict-aliasing), and nvcc fuses products and
# sums.
common=(-std=c++17 -g1 -Wall -Wextra -Wno-unknown-pragmas -Wno-unused-function -Wno-missing-field-initializers -Wno-psabi -fno-strict-aliasing
    -ffp-contract=fast -D_GNU_SOURCE)
# NCCL for several ranks, if its header exists, as in dev/gpu.mk.
g++ "${include[@]}" -x c++ -E - <<<'#include <nccl.h>' >/dev/null 2>&1 && common+=(-DHAVE_NCCL)
cxx=g++
runtime=st
runtime_cxx=g++
runtime_flags=(-O2)
c_build=build/serial # of the modules and C sources; for the same processor, or sums differ in last bits
case $mode in
plain) flags=(-O2 -march=native) ;;
asan) flags=(-DSANITIZED -Og -march=native -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer) ;;
tsan)
    cxx=clang++
    flags=(-DSANITIZED -O1 -march=native -fsanitize=thread)
    ;;
msan)
    cxx=clang++
    flags=(-DSANITIZED -O1 -fsanitize=memory -fno-omit-frame-pointer)
    runtime=msan
    runtime_cxx=clang++
    runtime_flags=("${flags[@]}")
    c_build=build/sim/llmc-msan
    ;;
*)
    echo "build.sh: unknown mode $mode; wanted plain, asan, tsan or msan" >&2
    exit 2
    ;;
esac

# Objects are written under another name first: two builds at the same time do the work twice, but
# neither links half an object.
objects=()
mkdir -p "build/sim/runtime-$runtime" "$(dirname "$out")"
newest_header=$(ls -t "$here"/include/*.h "$here"/src/*.h | head -n 1)
for runtime_source in "$here"/src/*.cpp; do
    object=build/sim/runtime-$runtime/$(basename "${runtime_source%.cpp}").o
    if [ ! "$object" -nt "$runtime_source" ] || [ ! "$object" -nt "$newest_header" ]; then
        $runtime_cxx -std=c++17 "${runtime_flags[@]}" -g1 -Wall -Wno-unknown-attributes -Wno-attributes \
            -fno-strict-aliasing "${include[@]}" -c "$runtime_source" -o "$object.$$"
        mv "$object.$$" "$object"
    fi
    objects+=("$object")
done
# The modules of llmc/ that are compiled once, and the C sources; the trainer's Makefile knows how.
# Sanitized modules use little of a test's time, and compile twice as fast at -O0.
make_c() { # TARGET...
    local settings=(UNITS=1 CC=clang "OPT=${flags[*]} -g1" MODULES_OPT=-O0 MARCH= OPENMP=)
    [ $mode = msan ] || read -ra settings <<<"$(MAKEFLAGS= make -s print-SERIAL)"
    make -s BUILD=$c_build "${settings[@]}" "$@"
}
library=$c_build/libllmc.a
libs=${SIM_LIBS-$(make_c "$library" print-COMPRESSION_LIBS print-MPI_LIBS)} # one call: each takes 0.3 s

if [ -n "$stamp" ]; then
    c_objects=($c_build/test/lib/{runner,cpu_trainer}.o)
    make_c "${c_objects[@]}"
    for object in "${objects[@]}" "${c_objects[@]}" "$library"; do
        [ "$stamp" -nt "$object" ] || touch "$stamp"
    done
    exit
fi

object=$source
if [[ $source = *.cu ]]; then
    object=$out
    [[ $out = *.o ]] || object=$out.o
    $cxx -x c++ "${common[@]}" "${flags[@]}" ${CUSIM_FLAGS:-} "${include[@]}" -MMD -MP -MF "${out%.o}.d" -MT "$out" -c "$source" -o "$object"
fi
[[ $out != *.o ]] || exit 0
for more in "${@:4}"; do
    if [[ $more = *.c ]]; then
        more=$c_build/${more#dev/}
        more=${more%.c}.o
        [ -n "${SIM_LIBS+set}" ] || make_c "$more"
    fi
    objects+=("$more")
done
$cxx "${flags[@]}" "$object" "${objects[@]}" "$library" -o "$out" -lpthread -ldl -lrt $libs -rdynamic
