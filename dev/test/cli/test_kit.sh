#!/usr/bin/env bash
# test_kit.sh -- `make gpu-kit` and dev/bench/gpu_report.sh --kit, on the simulated GPU: the kit is
# made here, unpacked in an empty folder, and run without this machine's environment. Run it from
# the top of the repository, after build/sim/FP32/train_gpt2cu, build/sim/FP32-plain/test_gpt2,
# build/sim/BF16/train_gpt2cu, build/sim/bench_group and build/sim/plain/test_{gpu,collectives} are
# built.
set -u
name=kit
source dev/test/lib/check.sh
top=$PWD
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

make -s gpu-kit TOY=1 KIT="FP64" >"$dir/refused.txt" 2>&1
refused=$?
KIT_TEXT=README.md GPT2_VOCAB='' make -s gpu-kit TOY=1 KIT=test_gpu >"$dir/no_vocabulary.txt" 2>&1
KIT_TEXT=${GPT2_VOCAB:+README.md} make -s gpu-kit TOY=1 KIT="FP32 BF16-nccl test_gpu gpu_answers" >"$dir/made.txt" 2>&1
made=$?
cd "$dir" || exit 1
check "the kit is made" [ $made = 0 ]
check "an unknown part of it is refused" [ "$refused $(grep -c '^error: gpu-kit: KIT: FP64: wanted BF16' refused.txt)" = "2 1" ]
check "a text without a vocabulary is refused" grep -q '^error: gpu-kit: KIT_TEXT: GPT2_VOCAB is missing' no_vocabulary.txt
check "it unpacks" tar -xJf "$top/build/gpu_kit_toy.tar.xz"
cd gpu_kit || exit 1
[ -z "${GPT2_VOCAB:-}" ] || check "with a text for the curve" [ -s text.bin ]
check "with the files that the whole model's test reads" bin/FP32/test_gpt2 composition_tasks

# report OPTION...: with the bare environment of the machine with the GPU
report() {
    env -i PATH=/usr/bin:/bin HOME="$dir/home" OUT="$dir/results" CUDA_HOME="$dir/cuda" dev/bench/gpu_report.sh --kit --toy "$@" \
        >"$dir/out.txt" 2>"$dir/err.txt"
}
mkdir "$dir/no_mpi"
for tool in /usr/bin/*; do
    case ${tool##*/} in mpi* | orte* | prte* | gcc* | cc | make) ;; *) ln -s "$tool" "$dir/no_mpi/" ;; esac
done
has() { grep -q -e "$1" "$dir/out.txt"; }
packed() { tar -xzOf "$dir/results/toy-$(date +%Y-%m-%d)-$1.tar.gz" --wildcards "*/$2"; }

report --part A --only first,speed,step
check "part A runs" [ $? = 0 ]
check "without a word of complaint" [ ! -s "$dir/err.txt" ]
check "the commit is the kit's" has "$(head -n 1 kit.txt)"
check "a test that is there passes" has '^| test_gpu | passed |'
check "one that is not is skipped" has '^| test_ops-matmul | skipped | 0 | no test_ops here |'
check "a profiler that is not there is no failure" has '^| step-kernels | skipped | 0 | no ncu here |'
check "there are speeds" [ "$(grep -c '^| toy | ours FP32 --recompute [01] | 64 | [1-9]' "$dir/out.txt")" = 3 ]
check "each as a share of the peak, too" [ "$(grep -c '^| toy | ours .* | [0-9]* | [0-9.]* % | ' "$dir/out.txt")" = "$(grep -c '^| toy | ours ' "$dir/out.txt")" ]
check "all results are in one archive" grep -q '^| speed-toy-again | passed' <(packed A results.txt)
check "with the summary" grep -q ' passed, 0 failed, ' <(packed A summary.md)
check "and the algorithms of the matmuls" grep -q '^matmul ' <(packed A speed-toy-recompute-0.matmuls)

report --part D --only wgmma,ways
check "part D runs" [ $? = 0 ]
check "without tests of wgmma, only mma is measured" has '^- only mma is measured: the tests of wgmma have not passed'
check "and what autotune finds" [ "$(grep -c '^| toy | ours FP32 --recompute 0 --attention \(mma\|race\|race --matmul fp8\) | 32 | [1-9]' "$dir/out.txt")" = 3 ]
check "also in fp8" has '^- matmul .* e4m3 to .*: done \(in\|without\) fp8, '

# several GPUs, on a machine with neither compiler nor MPI's launcher
env -i PATH="$dir/no_mpi" TOY=1 OUT="$dir/multi" dev/bench/multi_gpu.sh >"$dir/out.txt" 2>"$dir/err.txt"
status=$?
check "several GPUs: $(head -n 1 "$dir/err.txt")" [ $status = 0 ]
check "started without MPI" has '^- ranks are started by script'
check "have the same bits" [ "$(grep -c '^| [23] | same | same |$' "$dir/out.txt")" = 2 ]

# cublasLt's answers: here the simulator's, and then the simulator's kept ones are changed
report --part C --only answers
check "the forms of matmul are asked for" has '^- forms of matmul that cublasLt supports: \([0-9]* of [0-9]*\); the simulator: \1$'
check "and are a table" has "^| bf16 to bf16, then gelu's derivative | 3 | 4 | 0\.[0-9]* | 0\.[0-9]* |"
check "no answer is another than the simulator's" eval '! has "; the simulator: \(yes\|no\)$"'
sed -i '0,/then bias,/s/\(then bias, .*: \)yes/\1no/' answers_simulated.txt
report --part C --only answers
check "one that is, is shown" has '^- (128, 256) = .* bf16 to bf16, then bias, aligned to 16: yes (off by .*); the simulator: no$'

report --part C --only fp8
check "fp8 is measured beside none" has '^| toy | ours FP32 --matmul fp8 | [0-9]* | [0-9]'

# a library that only CUDA_HOME has, one that only a wheel of Python has, one that nobody has, and a
# test that fails
wheel=$dir/home/.local/lib/python3.12/site-packages/nvidia/cu13/lib
mkdir -p "$dir/cuda/lib64" "$wheel" "$dir/gone"
cat >"$dir/main.c" <<'END'
#include <stdlib.h>
int main(void) { return system("tar -tzf \"$OUT\"/toy-*-A.tar.gz | grep test_gpu.log") != 0; }
END
gcc -shared -x c /dev/null -o "$dir/cuda/lib64/libkit_fake.so"
gcc -shared -x c /dev/null -o "$wheel/libkit_wheel.so"
gcc -shared -x c /dev/null -o "$dir/gone/libkit_gone.so"
gcc "$dir/main.c" -o bin/test_ops -Wl,--no-as-needed -L"$dir/cuda/lib64" -lkit_fake -L"$wheel" -lkit_wheel
gcc "$dir/main.c" -o bin/test_none -Wl,--no-as-needed -L"$dir/gone" -lkit_gone && rm "$dir/gone/libkit_gone.so"
printf '#!/bin/sh\necho "error: planted"\nexit 3\n' >bin/test_gpu
rm "$dir"/results/*
report --part A --only first
check "a failing test fails the report" [ $? = 1 ]
check "a library is found" has "^- libkit_fake.so: $dir/cuda/lib64"
check "one of a wheel is, too" has "^- libkit_wheel.so: $wheel"
check "their program still runs, and the results so far are in the archive" has '^| test_ops-matmul | passed |'
check "what is nowhere is said" has '^- libkit_gone.so is nowhere on this machine'
check "a failing test has its error" has '^| test_gpu | FAILED | [0-9]* | exit status 3: error: planted |'
report --part A --only first --minutes 0
check "no time is no failure" [ $? = 0 ]
check "and is said" has '^| test_gpu | skipped | 0 | .* s are left |'
report --part E
check "an unknown part is refused" [ "$? $(head -n 1 "$dir/err.txt")" = "2 error: --part E: wanted A, B, C or D" ]

# a profiler that writes what ncu does, of two steps
cat >"$dir/cuda/ncu" <<'END'
#!/bin/bash
while [ "$1" != --log-file ]; do shift; done
{
    echo '==PROF== Connected to process 1'
    echo '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    for id in 0 1; do
        echo '"'$id'","void first<8>(int, float *)","gpu__time_duration.sum","ns","3,000"'
        echo '"'$id'","void first<8>(int, float *)","dram__bytes.sum","byte","6,000,000"'
    done
    echo '"2","second","gpu__time_duration.sum","ns","2000"'
} >"$2"
END
mkdir -p "$dir/cuda/bin" && mv "$dir/cuda/ncu" "$dir/cuda/bin/ncu" && chmod +x "$dir/cuda/bin/ncu"
report --part A --only step
check "the kernels of a step" has '^| first<8> | 1 | 3.0 | 6.0 | 2000 | 0.003 | 75.0 % |'
check "the others after it" has '^| second | 0.5 | 2.0 | 0.0 | 0 | 0.001 | 25.0 % |'
rm kit.txt
report --part A
check "without a kit" grep -q '^error: --kit: .*kit.txt: no such file' "$dir/err.txt"
check_done
