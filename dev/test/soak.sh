#!/usr/bin/env bash
# soak.sh -- the long tests: does the trainer learn what can be learned? does it survive being killed? do the readers of
# files withstand any file? are vectors right on another processor? do the tests of the GPU code notice a forgotten wait?
#
#     make soak      the first about a quarter of an hour on two cores
#
# The built-in stories have a known entropy. The default run must end within 15 % of it, ten times the steps within 3 %, and
# neither below it by more than the sampling error of 20,000 tokens. With products in bf16 it must end where fp32 does. A run that is killed 200 times at random moments must end with
# the bits of one that is not. Then every fuzz target runs for a minute (fuzz.sh).
# What uses vectors is compiled for aarch64 and run by qemu (scripts/install_deps.sh --soak).
# Each wait in the GPU trainer and its kernels, taken out, must make a test fail (dev/cusim/test/mutate.sh).
set -eu
cd "$(dirname "$0")/../.."
make -s train_gpt2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

failed=0
dev/test/test_kill.sh ./train_gpt2 200 || failed=1
# expect_near_floor STEPS LIMIT: LIMIT is the largest allowed loss, in floors.
expect_near_floor() {
    ./train_gpt2 --steps "$1" --samples 0 --out "$work/$1" >"$work/log"
    if ! tail -n 1 "$work/$1/log.jsonl" | sed 's/[{}"]//g; s/,/\n/g' | awk -F: -v steps="$1" -v limit="$2" '
        { value[$1] = $2 }
        END {
            ratio = value["val_loss"] / value["floor"]
            printf "soak: %d steps: val loss %.4f, floor %.4f, ratio %.4f, wanted 0.99 to %.2f\n", steps,
                value["val_loss"], value["floor"], ratio, limit
            exit !(ratio >= 0.99 && ratio <= limit)
        }'; then
        failed=1
    fi
}
# expect_same_learning OPTION...: in a run with these options, bf16 ends within half a percent of fp32's validation loss.
expect_same_learning() {
    local kind
    for kind in fp32 bf16; do
        ./train_gpt2 --products $kind "$@" --samples 0 --out "$work/learning_$kind" >"$work/log"
    done
    if ! tail -qn 1 "$work"/learning_{fp32,bf16}/log.jsonl | sed -n 's/.*"val_loss":\([^,}]*\).*/\1/p' |
        awk -v run="$*" '{ loss[NR] = $1 } END {
            printf "soak: %s: val loss %.4f in fp32, %.4f in bf16\n", run, loss[1], loss[2]
            d = loss[2] / loss[1] - 1
            exit !(NR == 2 && loss[1] > 0 && d * d <= 0.005 ^ 2)
        }'; then
        failed=1
    fi
    rm -rf "$work"/learning_*
}
expect_same_learning --steps 300
if [ -n "${TINY_TEXT:-}" ] && [ -n "${GPT2_VOCAB:-}" ]; then
    expect_same_learning --train-data "$TINY_TEXT" --tokenizer "$GPT2_VOCAB" --layers 4 --channels 128 --heads 4 \
        --seq-len 64 --batch 8 --steps 280
else
    echo "soak: skipped: bf16 on a text: TINY_TEXT or GPT2_VOCAB is not set"
fi
expect_near_floor 3600 1.15
expect_near_floor 36000 1.03
dev/test/fuzz.sh 60 || failed=1

# run_aarch64 PROGRAM...: shows its last line, or all of it if it failed.
run_aarch64() {
    if qemu-aarch64-static -L /usr/aarch64-linux-gnu "$@" >"$work/log" 2>&1; then
        tail -n 1 "$work/log" | sed 's/^/soak: aarch64: /'
    else
        cat "$work/log"
        echo "soak: aarch64: FAILED: $*"
        failed=1
    fi
}
if [ "$(uname -m)" = aarch64 ]; then
    echo "soak: skipped: aarch64: this machine is one"
elif command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64-static >/dev/null; then
    read -ra vector_tests <<<"$(make -s print-VECTOR_TESTS)"
    make -s BUILD=build/aarch64 CC=aarch64-linux-gnu-gcc MARCH= MPI= HAVE_ZLIB= HAVE_ISAL= HAVE_ZSTD= HAVE_SNAPPY= \
        "${vector_tests[@]/#/build/aarch64/}" build/aarch64/train_gpt2
    for test in "${vector_tests[@]}"; do
        run_aarch64 "build/aarch64/$test"
    done
    run_aarch64 build/aarch64/train_gpt2 --layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 2
else
    echo "soak: skipped: aarch64: its compiler or qemu is missing (scripts/install_deps.sh --soak)"
fi
if [ -e "${CUDA_HOME:-/usr/local/cuda}/include/cublasLt.h" ] && command -v clang++ >/dev/null; then
    make -s build/sim/FP32/train_gpt2cu build/sim/plain/test_comm_nccl && dev/test/test_ranks.sh build/sim/FP32/train_gpt2cu || failed=1
    dev/cusim/test/mutate.sh || failed=1
    dev/bench/gpu_report.sh --toy --minutes 30 --out "$work/report" >"$work/log" 2>&1 || { failed=1 && tail -n 40 "$work/log"; }
else
    echo "soak: skipped: forgotten waits: the CUDA toolkit (CUDA_HOME) or clang++ is missing"
fi
exit $failed
