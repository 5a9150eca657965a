#!/usr/bin/env bash
# soak.sh -- the long tests: does the trainer learn what can be learned? does it survive being
# killed? do the readers of files withstand any file? are vectors right on another processor? do the
# tests of the GPU code notice a forgotten wait?
#
#     make soak                          all parts, some hours on two cores
#     dev/test/soak.sh [PART...]         some of them
#
#     drawn      `make test` with all of what it draws: every sanitizer, order and precision, both
#                halves of the ranks' matrix
#     rest       what `make test` leaves out to be short: all rooms without a sanitizer, another
#                compiler, more precisions and architectures (run.sh rest)
#     fresh      a new Debian with what the README asks for: `make test`, before and after install_deps.sh --test (fresh.sh)
#     container  the steps of the recipe for a container in a new Debian, and the README's commands
#                there (container.sh)
#     kills      a run that is killed 200 times at random moments ends with the bits of one that is not; so does one of
#                1 to 4 ranks, another number after each kill
#     learning   the built-in stories have a known entropy: the default run ends within 15 % of it, ten times the steps
#                within 3 %, and neither below it by more than the sampling error of 20,000 tokens; with matmuls in
#                bf16 and fp8 a run ends where fp32 does; each optimizer learns as much as it once did; experts share
#                the tokens
#     mup        with --mup, updates move activations and logits as much in any width from 64 to
#                512 and depth from 2 to 16
#     texts      what a trained model writes is about as likely to it as what it was trained on, in 8 bits, too; and the
#                report on its run
#     llama      llama.cpp computes what exported models of each architecture compute here (dev/ref/llama_cpp.py)
#     fuzz       every fuzz target for a minute (fuzz.sh)
#     aarch64    what uses vectors, compiled for aarch64 and run by qemu (scripts/install_deps.sh --soak)
#     defects    what was found wrong once, tried again from the outside (defects.sh, reported.sh)
#     ranks      several processes, on CPUs and on the simulated GPU in fp32 (test_ranks.sh)
#     offload    two GPUs with all offloaded, in 20 random orders of their work: the same bits
#     crossings  relations between drawn runs for half an hour, a tenth of them on the simulated GPU (crossings/), and the
#                faults that they must find (crossings/planted.sh)
#     planted    ten planted faults of different kinds are noticed by `make test` (planted.sh)
#     waits      each wait in the GPU trainer and its kernels, left out, makes a test fail (dev/cusim/test/mutate.sh)
#     plan       the planned speed of a small and a middle model is within a factor of 1.5 of the measured one
#     toy        the whole report on a GPU, of the simulated one (gpu_report.sh)
set -eu
cd "$(dirname "$0")/../.."
source dev/cusim/cuda_home.sh
export OMP_WAIT_POLICY=passive OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
took=()

fail() {
    echo "soak: FAILED: $*"
    failed=1
}

# quietly COMMAND...: its output is shown if it fails.
quietly() { "$@" >"$work/log" 2>&1 || { tail -n 40 "$work/log" && fail "$*"; }; }

has_sim() { has_simulated_gpu "soak: $1"; }

part_drawn() { DRAW=all dev/test/run.sh test || fail drawn; }

part_rest() { dev/test/run.sh rest || fail rest; }

# makes_debian PART: fails if this machine cannot make a new Debian, and says that the part is
# skipped.
makes_debian() {
    [ "$(id -u)" = 0 ] && command -v debootstrap >/dev/null && command -v unshare >/dev/null && return
    echo "skipped: soak: $1: wants root and debootstrap (scripts/install_deps.sh --soak)"
    return 1
}

part_fresh() { ! makes_debian fresh || dev/test/fresh.sh || fail fresh; }

part_container() { ! makes_debian container || dev/test/container.sh || fail container; }

part_kills() {
    dev/test/cli/test_kill.sh ./train_gpt2 200 || fail kills
    ! command -v mpirun >/dev/null || dev/test/cli/test_kill.sh ./train_gpt2 40 "$RANDOM" 4 || fail "kills of ranks"
}

# number KEY FILE: of the last line that has it.
number() { sed -n "s/.*\"$1\":\([-0-9.e]*\).*/\1/p" "$2" | tail -n 1; }

# expect_ratio WHAT A B LOW HIGH: A / B is from LOW to HIGH.
expect_ratio() {
    awk -v what="$1" -v a="$2" -v b="$3" -v low="$4" -v high="$5" 'BEGIN {
        printf "soak: %s: %.4f and %.4f, ratio %.4f, wanted %s to %s\n", what, a, b, a / b, low, high
        exit !(a / b >= low && a / b <= high) }' || fail "$1"
}

# expect_same_learning OPTION...: in a run with these options, bf16 and fp8 end within half a percent
# of fp32's validation loss.
expect_same_learning() {
    local kind
    for kind in fp32 bf16 fp8; do
        quietly ./train_gpt2 --matmul $kind "$@" --samples 0 --out "$work/learning_$kind"
    done
    for kind in bf16 fp8; do
        expect_ratio "$*, validation loss in $kind and in fp32" "$(number val_loss "$work/learning_$kind/log.jsonl")" \
            "$(number val_loss "$work/learning_fp32/log.jsonl")" 0.995 1.005
    done
    rm -rf "$work"/learning_*
}

# The other optimizers, at most 2 % above the loss that was measured when they were written (lion
# and muon: two seeds).
learn_by_optimizers() {
    local most options
    while read -r most options; do
        # shellcheck disable=SC2086
        quietly ./train_gpt2 --steps 1200 --samples 0 --eval-every 1200 $options --out "$work/optimizer"
        expect_ratio "$options, validation loss and the most it may be" "$(number val_loss "$work/optimizer/log.jsonl")" \
            "$most" 0.8 1
        rm -rf "$work/optimizer"
    done <<<'1.121 --optimizer adamw8bit
1.121 --optimizer adafactor
1.098 --optimizer muon
1.099 --optimizer lion --lr 0.001
1.105 --optimizer sgd'
}

# After 500 updates of the stories the busiest expert gets at most a quarter more than its share of
# 32,768 tokens (measured: 11 %), and the model has learned.
learn_with_experts() {
    local out=$work/experts
    quietly ./train_gpt2 --arch mixtral --steps 500 --samples 0 --eval-every 500 --out "$out"
    expect_ratio "experts, validation loss and floor" "$(number val_loss "$out/log.jsonl")" "$(number floor "$out/log.jsonl")" 1 1.45
    quietly ./train_gpt2 --model "$out" --steps 1 --total-batch 32768 --batch 8 --eval-every 0 --samples 0 --out "$work/load"
    expect_ratio "load of the busiest expert" "$(number expert_load "$work/load/log.jsonl")" 1 1 1.25
}

part_learning() {
    local steps limit
    learn_by_optimizers
    learn_with_experts
    while read -r steps limit; do
        quietly ./train_gpt2 --steps "$steps" --samples 0 --out "$work/$steps"
        expect_ratio "$steps steps, validation loss and floor" "$(number val_loss "$work/$steps/log.jsonl")" \
            "$(number floor "$work/$steps/log.jsonl")" 0.99 "$limit"
    done <<<'3600 1.15
36000 1.03'
    expect_same_learning --steps 300
    if [ -n "${TINY_TEXT:-}" ] && [ -n "${GPT2_VOCAB:-}" ]; then
        expect_same_learning --train-data "$TINY_TEXT" --tokenizer "$GPT2_VOCAB" --layers 4 --channels 128 --heads 4 \
            --seq-len 64 --batch 8 --steps 280
    else
        echo "soak: skipped: bf16 on a text: TINY_TEXT or GPT2_VOCAB is not set"
    fi
}

# loss_of MODEL TEXT OPTIONS...: prints the loss of a model on a file of texts.
loss_of() {
    ./train_gpt2 --model "$1" --steps 0 --perplexity "$2" "${@:3}" | sed -n 's/.* | loss \([0-9.]*\) | perplexity .*/\1/p'
}

# A model of this repository's pages gives its own text about the same loss as these pages: a wrong
# generator or sampler shows as several nats. The same weights in 8 bits lose nothing.
part_texts() {
    local model=$work/pages pages=$work/pages.txt quantize texts loss
    cat README.md dev/doc/*.md >"$pages"
    quietly ./train_gpt2 --train-data "$pages" --layers 2 --channels 64 --heads 2 --seq-len 128 --batch 8 --lr 0.005 --steps 400 \
        --tensorboard on --out "$model"
    loss=$(loss_of "$model" "$pages")
    for _ in {1..60}; do echo '{"prompt":""}'; done >"$work/prompts.jsonl"
    for quantize in off q8_0; do
        texts=$work/texts_$quantize.jsonl
        quietly ./train_gpt2 --model "$model" --prompts "$work/prompts.jsonl" --out-texts "$texts" --tokens 400 --quantize $quantize
        expect_ratio "texts with --quantize $quantize, their loss and that of the pages" "$(loss_of "$model" "$texts")" "$loss" 0.8 1.3
    done
    expect_ratio "loss in 8 bits and in 32" "$(loss_of "$model" "$pages" --quantize q8_0)" "$loss" 0.999 1.001
    quietly ./train_gpt2 --report "$model" --out-html "$work/report.html"
    [ "$(stat -c %s "$work/report.html")" -lt 512000 ] || fail "the report has $(stat -c %s "$work/report.html") bytes"
    ! command -v python3 >/dev/null || quietly dev/test/lib/check_report.py "$work/report.html" "$model"
    [ ! -x build/venv-report/bin/python ] || quietly build/venv-report/bin/python dev/test/lib/check_tensorboard.py "$model"
}

part_llama() {
    if [ ! -x build/llama/bin/python ]; then
        echo "soak: skipped: llama: build/llama is missing (dev/ref/setup.sh llama)"
        return
    fi
    quietly build/llama/bin/python dev/ref/llama_cpp.py --check fixtures tokenizers chats families
}

part_fuzz() { dev/test/fuzz/fuzz.sh 60 || fail fuzz; }

# run_aarch64 PROGRAM...: shows its last line, or all of it if it failed.
run_aarch64() {
    quietly qemu-aarch64-static -L /usr/aarch64-linux-gnu "$@"
    tail -n 1 "$work/log" | sed 's/^/soak: aarch64: /'
}

part_aarch64() {
    local test vector_tests
    if [ "$(uname -m)" = aarch64 ]; then
        echo "soak: skipped: aarch64: this machine is one"
        return
    fi
    if ! command -v aarch64-linux-gnu-gcc >/dev/null || ! command -v qemu-aarch64-static >/dev/null; then
        echo "soak: skipped: aarch64: its compiler or qemu is missing (scripts/install_deps.sh --soak)"
        return
    fi
    read -ra vector_tests <<<"$(make -s print-VECTOR_TESTS)"
    make -s BUILD=build/aarch64 CC=aarch64-linux-gnu-gcc MARCH= MPI= HAVE_ZLIB= HAVE_ISAL= HAVE_ZSTD= HAVE_SNAPPY= \
        "${vector_tests[@]/#/build/aarch64/}" build/aarch64/train_gpt2
    run_aarch64 build/aarch64/test_base vec
    run_aarch64 build/aarch64/test_tokenizer bpe_encode
    for test in test_ops test_bf16 test_optim test_run; do
        run_aarch64 "build/aarch64/$test"
    done
    run_aarch64 build/aarch64/train_gpt2 --layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 2
}

part_defects() {
    local sim=
    make -s tokenize build/plain/test_optim
    has_sim "defects of the GPU trainer" && sim=build/sim/FP32/train_gpt2cu && make -s $sim
    dev/test/defects.sh ./train_gpt2 ./tokenize "$sim" || fail defects
    dev/test/reported.sh ./train_gpt2 ./tokenize || fail "reported defects"
}

part_ranks() {
    make -s build/plain/train_gpt2 build/plain/test_collectives
    dev/test/cli/test_ranks.sh build/plain/train_gpt2 || fail ranks
    has_sim ranks || return 0
    make -s build/sim/FP32/train_gpt2cu build/sim/plain/test_collectives
    dev/test/cli/test_ranks.sh build/sim/FP32/train_gpt2cu || fail "ranks of GPUs"
}

part_offload() {
    local seed run=(--layers 4 --channels 32 --heads 2 --seq-len 16 --batch 2 --total-batch 160 --steps 6 --samples 0 --eval-batches 3
        --eval-every 3 --save-every 3 --tf32 off --autotune off --zero 3)
    local all=(--offload-params on --offload-residuals on --recompute 3 --offload-optimizer disk --offload-path "$work/disk")
    has_sim offload && command -v mpirun >/dev/null || return 0
    make -s build/sim/FP32/train_gpt2cu
    quietly build/sim/FP32/train_gpt2cu "${run[@]}" --out "$work/offload"
    for seed in {1..20}; do
        quietly env CUSIM_STREAMS=random CUSIM_ORDER=random CUSIM_SEED="$seed" timeout 300 \
            mpirun --oversubscribe --bind-to none -n 2 build/sim/FP32/train_gpt2cu "${run[@]}" "${all[@]}" --out "$work/offload_$seed"
        quietly cmp "$work/offload/step_00000006/model.safetensors" "$work/offload_$seed/step_00000006/model.safetensors"
        rm -r "$work/offload_$seed"
    done
    echo "soak: all offloaded, $seed random orders"
}

part_crossings() {
    local gpu=()
    make -s build/plain/crossings build/plain/train_gpt2 build/plain/tokenize
    ! has_sim crossings || { make -s build/sim/BF16/train_gpt2cu && gpu=(--gpu build/sim/BF16/train_gpt2cu); }
    build/plain/crossings --trainer build/plain/train_gpt2 --tokenize build/plain/tokenize --seconds 1800 --seed "$RANDOM" \
        "${gpu[@]}" || fail crossings
    dev/test/crossings/planted.sh || fail "planted faults of crossings"
}

part_planted() { ! has_sim planted || dev/test/planted.sh || fail planted; }

part_waits() { ! has_sim waits || dev/cusim/test/mutate.sh || fail waits; }

# expect_planned STEPS OPTION...: what --plan says before and after a run, the mean of both, and the
# median of its steps.
expect_planned() {
    local steps=$1 plans=()
    shift
    local run=(./train_gpt2 "$@" --steps "$steps" --eval-every 0 --samples 0 --save-every 0)
    planned() { "${run[@]}" --plan | sed -n 's/^speed: \([0-9]*\) tok.s planned.*/\1/p'; }
    plans+=("$(planned)")
    rm -rf "$work/plan"
    quietly "${run[@]}" --out "$work/plan"
    plans+=("$(planned)")
    measured=$(sed -n 's/.*"kind":"train".*"tok_per_s":\([0-9.]*\).*/\1/p' "$work/plan/log.jsonl" | tail -n +2 | sort -n |
        awk '{ x[NR] = $1 } END { print x[int((NR + 1) / 2)] }')
    expect_ratio "planned speed of train_gpt2 $*" "$(awk "BEGIN { print (${plans[0]} + ${plans[1]}) / 2 }")" "$measured" 0.667 1.5
}

part_plan() {
    expect_planned 100
    expect_planned 100 --recompute 3 --optimizer adamw8bit
    expect_planned 10 --model d6 --vocab-size 50257 --batch 4 --seq-len 256 --total-batch 1024
    expect_planned 10 --model d6 --vocab-size 50257 --batch 4 --seq-len 256 --total-batch 1024 --matmul bf16
    expect_planned 5 --model d12 --vocab-size 50257 --batch 4 --seq-len 64 --total-batch 256 --recompute 2
}

part_mup() {
    make -s build/plain/test_run
    build/plain/test_run --check_mup_coordinates || fail "coordinates of --mup"
}

part_toy() { ! has_sim toy || quietly dev/bench/gpu_report.sh --toy --minutes 30 --out "$work/toy"; }

parts=(drawn rest fresh container kills learning mup texts llama fuzz aarch64 defects ranks offload crossings planted waits plan toy)
[ $# -gt 0 ] || set -- "${parts[@]}"
for part in "$@"; do
    [[ " ${parts[*]} " = *" $part "* ]] || { echo "error: no part $part; wanted some of: ${parts[*]}" >&2; exit 2; }
done
make -s train_gpt2
for part in "$@"; do
    begin=$SECONDS
    "part_$part"
    took+=("soak: $part: $((SECONDS - begin)) s")
    echo "${took[-1]}"
done
echo "soak: ${#took[@]} parts, $SECONDS s"
printf '%s\n' "${took[@]}"
exit $failed
