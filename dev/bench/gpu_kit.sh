#!/usr/bin/env bash
# gpu_kit.sh -- `make gpu-kit`: everything that dev/bench/gpu_report.sh --kit measures with, in
# build/gpu_kit.tar.xz.
#
# The machine with the GPU then needs a driver, cublasLt, and for several GPUs NCCL, which is part of
# PyTorch; but no compiler, no MPI, and of this machine's libraries only libc: GPU code is for ARCH (sm_90a), host code for MARCH (-march=x86-64-v3). KIT
# lists the contents: BF16, FP16, FP32, BF16-cudnn (trainer and whole-model test), BF16-nccl (what
# dev/bench/multi_gpu.sh needs), test_<room>, bench_gpu, gpu_answers; by default all. TOY=1 packs the programs of the simulated GPU under the
# same names into build/gpu_kit_toy.tar.xz. KIT_TEXT is a text for the loss curve; it is encoded
# with GPT2_VOCAB.
set -u
cd "$(dirname "$0")/../.." || exit 1
unset MAKEFLAGS MFLAGS MAKELEVEL # the builds get only the settings below
most_bytes=$((48 << 20))

read -r -a modules <<<"$(make -s print-GPU_TESTS)"
read -r -a kit <<<"${KIT:-BF16 FP16 FP32 BF16-cudnn BF16-nccl bench_gpu gpu_answers ${modules[*]}}"
toy=${TOY:+_toy}
builds=build/kit tree=build/kit/tree$toy/gpu_kit archive=build/gpu_kit$toy.tar.xz

die() {
    echo "error: gpu-kit: $*" >&2
    exit 1
}
for item in "${kit[@]}"; do
    case " BF16 FP16 FP32 BF16-cudnn BF16-nccl bench_gpu gpu_answers ${modules[*]} " in *" $item "*) ;;
    *) die "KIT: $item: wanted BF16, FP16, FP32, BF16-cudnn, BF16-nccl, bench_gpu, gpu_answers, ${modules[*]}" ;;
    esac
done

# build VARIANT TARGET...: builds for the GPU, into build/kit/VARIANT. GCC's own libraries are
# linked statically: the first folder has only libgomp.a, so the linker uses that. In tests, kernels
# that wait for ever end after some seconds.
build() {
    local variant=$1 flags=${NVCCFLAGS:-} libraries="-L$builds/static -lcublasLt -Xcompiler -static-libgcc,-static-libstdc++" cudnn='' nccl=''
    [ "$variant" = BF16-cudnn ] && cudnn=1 libraries+=" -lcudnn -lnvrtc"
    [ "$variant" = BF16-nccl ] && nccl=-lnccl libraries+=" -lnccl"
    [ "$variant" = BF16-tests ] && flags+=" -DPTX_WAIT_LIMIT"
    make -s -j"$(nproc)" "${@:2}" GPU_BUILD="$builds/$variant" PRECISION="${variant%-*}" USE_CUDNN=$cudnn NCCL=$nccl NVCCFLAGS="$flags" \
        ARCH="${ARCH:-sm_90a}" MARCH="${MARCH:--march=x86-64-v3}" COMPRESSION_FLAGS= COMPRESSION_LIBS= MPI= GPU_LIBS="$libraries"
}

# simulated VARIANT TARGET...: builds for the simulated GPU; targets have the names of build/kit.
simulated() {
    local variant=$1 target
    for target in "${@:2}"; do
        case $target in
        */train_gpt2) target=build/sim/${variant%-*}/train_gpt2cu ;;
        */test_gpt2) target=build/sim/$variant-plain/test_gpt2 ;;
        */bench_gpu | */gpu_answers)
            target=${target##*/}
            CUSIM_FLAGS=-DPRECISION_$variant dev/cusim/build.sh "dev/bench/$target.cu" plain "$builds/toy-$target" || return 1
            continue
            ;;
        */bench_group) target=build/sim/bench_group ;;
        *) target=build/sim/plain/${target##*/} ;;
        esac
        make -s "$target" || return 1
    done
}

# built VARIANT PROGRAM: prints the place of a program that was built
built() {
    case $toy$2 in
    _toytrain_gpt2) echo "build/sim/${1%-*}/train_gpt2cu" ;;
    _toybench_group) echo "build/sim/bench_group" ;;
    _toytest_gpt2) echo "build/sim/$1-plain/test_gpt2" ;;
    _toybench_gpu | _toygpu_answers) echo "$builds/toy-$2" ;;
    _toy*) echo "build/sim/plain/$2" ;;
    *) echo "$builds/$1/$2" ;;
    esac
}

# take VARIANT NAME_IN_THE_KIT PROGRAM: copies a program into the kit
take() {
    mkdir -p "$(dirname "$tree/bin/$2")"
    strip -o "$tree/bin/$2" "$(built "$1" "$3")" || die "cannot take $3"
}

has_cudnn() {
    local frontend=${CUDNN_FRONTEND:-build/cudnn-frontend/include}
    [ -z "$toy" ] && [ -e "$frontend/cudnn_frontend.h" ] && "${NVCC:-nvcc}" -E -x cu - <<<'#include <cudnn.h>' >/dev/null 2>&1
}

# Makes a library of empty functions to link with; fails if nvcc has no nccl.h. The machine with the
# GPUs has the real library, which is too large for the kit.
stub_nccl() {
    local functions
    [ -z "$toy" ] || return 0
    functions=$("${NVCC:-nvcc}" -E -x cu - <<<'#include <nccl.h>' 2>/dev/null | grep -oE '\bnccl[A-Z][A-Za-z0-9]*\(' | sort -u)
    [ -n "$functions" ] || return 1
    sed 's/(/(void) {}/; s/^/void /' <<<"$functions" | gcc -shared -x c - -Wl,-soname,libnccl.so.2 -o $builds/static/libnccl.so
}

text=${KIT_TEXT:-}
[ -z "$text" ] || [ -e "${GPT2_VOCAB:-}" ] || die "KIT_TEXT: GPT2_VOCAB is missing; wanted the vocabulary for its tokens"

rm -rf "$tree" "$archive"
mkdir -p "$tree/bin" "$tree/dev/bench" "$tree/dev/ref/fixtures" $builds/static || exit 1
ln -sf "$(gcc -print-file-name=libgomp.a)" $builds/static/libgomp.a
make_programs=build
[ -n "$toy" ] && make_programs=simulated
tests=() others=() # modules, and benches: in one precision
for item in "${kit[@]}"; do
    case $item in
    BF16-cudnn) has_cudnn || { echo "gpu-kit: BF16-cudnn is left out: no cudnn.h or no cudnn_frontend.h"; continue; } ;;&
    BF16-nccl) stub_nccl || { echo "gpu-kit: BF16-nccl is left out: no nccl.h"; continue; } ;;&
    BF16-nccl)
        programs=(train_gpt2 bench_group test_collectives)
        $make_programs "$item" "${programs[@]/#/$builds/$item/}" || die "$item does not build"
        take "$item" "$item/train_gpt2cu" train_gpt2
        for program in "${programs[@]:1}"; do take "$item" "$item/$program" "$program"; done
        ;;
    BF16 | FP16 | FP32 | BF16-cudnn)
        $make_programs "$item" "$builds/$item/train_gpt2" "$builds/$item/test_gpt2" || die "$item does not build"
        take "$item" "$item/train_gpt2cu" train_gpt2
        take "$item" "$item/test_gpt2" test_gpt2
        ;;
    test_*) tests+=("$item") ;;
    bench_gpu | gpu_answers) others+=("$item") ;;
    esac
done
if [ ${#tests[@]} != 0 ]; then
    $make_programs BF16-tests "${tests[@]/#/$builds/BF16-tests/}" || die "${tests[*]} do not build"
    for item in "${tests[@]}"; do take BF16-tests "$item" "$item"; done
fi
if [ ${#others[@]} != 0 ]; then
    $make_programs BF16 "${others[@]/#/$builds/BF16/}" || die "${others[*]} do not build"
    for item in "${others[@]}"; do take BF16 "$item" "$item"; done
fi

# The simulated GPU's answers, for comparison.
case " ${kit[*]} " in *" gpu_answers "*)
    [ -n "$toy" ] || simulated BF16 "$builds/BF16/gpu_answers" || die "gpu_answers does not build for the simulated GPU"
    $builds/toy-gpu_answers >"$tree/answers_simulated.txt" || die "gpu_answers fails on the simulated GPU"
    ;;
esac

# Text for the loss curve.
if [ -n "$text" ]; then
    make -s BUILD=$builds/host $builds/host/tokenize || die "tokenize does not build"
    $builds/host/tokenize --restart --out $builds/text --val-tokens 0 --tokenizer "$GPT2_VOCAB" "$text" >/dev/null || die "$text: cannot make tokens of it"
    mv $builds/text_train_000000.bin "$tree/text.bin" || exit 1
fi
cp -r dev/ref/fixtures/tasks "$tree/dev/ref/fixtures/" || exit 1 # test_gpt2 reads them
cp dev/bench/{gpu_report.sh,libraries.sh,multi_gpu.sh,pytorch_gpt2.py,torch_model.py,ncu_table.py,memory_table.sh} "$tree/dev/bench/" || exit 1
{
    echo "commit $(git --git-dir=.git describe --always --dirty 2>/dev/null || echo unknown)"
    if [ -n "$toy" ]; then
        echo "programs of the simulated GPU"
    else
        echo "$("${NVCC:-nvcc}" --version | sed -n 's/.*release \([^,]*\).*/CUDA \1/p'), ${ARCH:-sm_90a}, ${MARCH:--march=x86-64-v3}"
    fi
    find "$tree/bin" -type f -exec objdump -T {} + | grep -o 'GLIBC_[0-9.]*' | sort -V | tail -n 1
} >"$tree/kit.txt"
XZ_OPT="-2 -T0" tar -C "$(dirname "$tree")" -cJf "$archive" gpu_kit || exit 1
bytes=$(stat -c %s "$archive")
[ "$bytes" -le $most_bytes ] || die "$archive has $bytes bytes, wanted at most $most_bytes: take something out (KIT)"
echo "$archive: $((bytes >> 10)) KiB, $(paste -s -d ',' "$tree/kit.txt" | sed 's/,\([^ ]\)/, \1/g')"
