#!/usr/bin/env bash
# test_sim.sh -- the GPU trainer from the outside, on the simulated GPU: its command line, and the
# loss curve of the CPU trainer. Run it from the top of the repository, after
# build/sim/FP32/train_gpt2cu and build/plain/train_gpt2 are built.
set -u
gpu=$PWD/build/sim/FP32/train_gpt2cu
cpu=$PWD/build/plain/train_gpt2
name=sim
source dev/test/lib/check.sh
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
top=$PWD
cd "$dir" || exit 1
export XDG_CACHE_HOME=$dir/curve # where the algorithms of matmuls are kept

losses() { sed -n 's/^{"kind":"\(train\|val\)","step":\([0-9]*\),"loss":\([^,}]*\).*/\1 \2 \3/p' "$1/log.jsonl"; }

# Are the losses of both runs, line by line, within 1e-4 of each other?
same_curve() {
    paste -d ' ' <(losses gpu) <(losses cpu) |
        awk '{ d = $3 / $6 - 1; n++; if ($1 != $4 || $2 != $5 || d > 1e-4 || d < -1e-4) { print; bad = 1 } }
             END { exit bad || n < 22 }'
}

# 4 sequences in micro-batches of 3
run=(--layers 2 --channels 64 --heads 2 --seq-len 32 --batch 3 --total-batch 128 --steps 20 --eval-every 10
    --eval-batches 4 --samples 1 --sample-tokens 40 --temperature 0)
check "the CPU trainer runs" "$cpu" "${run[@]}" --out cpu
check "the GPU trainer runs" "$gpu" "${run[@]}" --tf32 off --out gpu
check "the same loss curve on the built-in stories" same_curve
check "the same sample" diff <(grep '"sample"' cpu/log.jsonl) <(grep '"sample"' gpu/log.jsonl)
check "the GPU trainer's model continues in the CPU trainer" \
    "$cpu" --model gpu/step_00000020 --steps 0 --batch 3 --eval-batches 4 --samples 0 --out again
check "with the loss it had" \
    diff <(losses gpu | tail -n 1 | cut -d ' ' -f 3 | cut -c 1-6) <(losses again | tail -n 1 | cut -d ' ' -f 3 | cut -c 1-6)

# In fp8 as the CPU trainer in fp8: numbers near the middle of two codes may fall on its other side.
eight=(--layers 2 --channels 64 --heads 2 --seq-len 32 --batch 3 --total-batch 96 --steps 6 --eval-every 6 --eval-batches 4
    --samples 0 --save-every 3 --matmul fp8)
check "fp8 on the CPU" "$cpu" "${eight[@]}" --out cpu_eight
check "fp8 on the GPU" "$gpu" "${eight[@]}" --tf32 off --autotune off --out gpu_eight
losses cpu_eight >cpu_eight.txt
losses gpu_eight >gpu_eight.txt
check "has its losses: $(losses gpu_eight | wc -l)" awk 'BEGIN { while ((getline a < "cpu_eight.txt") > 0) { getline b < "gpu_eight.txt"
    split(a, x); split(b, y); d = x[3] / y[3] - 1; n++; if (x[2] != y[2] || d > 2e-3 || d < -2e-3) exit 1 } exit n < 8 }'
check "a second run on the GPU" "$gpu" --resume gpu_eight/step_00000003 --out gpu_eight_again
check "resumed, has the same bits" cmp {gpu_eight,gpu_eight_again}/step_00000006/model.safetensors

# Shares of 20 examples: the same, since the losses are nearly those of the CPU trainer
# (test_gpt2.cu).
fixtures=$top/dev/ref/fixtures/tasks
tasks=(--steps 0 --model "$fixtures/model.bin" --tokenizer "$fixtures/tokenizer.json" --tasks "$fixtures/hellaswag.jsonl")
scores() { grep '^{"kind":"task"' "$1/log.jsonl"; }
check "tasks on the CPU" "$cpu" "${tasks[@]}" --out cpu_tasks
check "tasks on the GPU" "$gpu" "${tasks[@]}" --tf32 off --out gpu_tasks
check "the same scores" [ -n "$(scores cpu_tasks)" -a "$(scores cpu_tasks)" = "$(scores gpu_tasks)" ]

# Validation sets, each with its loss.
for set in web books; do printf "$set have %s pages\n" {1..300} >$set.txt; done
sets=(--layers 1 --channels 16 --heads 2 --seq-len 32 --batch 2 --steps 1 --eval-every 1 --eval-batches 4 --samples 0
    --train-data web.txt --val-data "web=web.txt,books=books.txt")
sets_of() { sed -nE 's/^\{"kind":"set",(.*"loss":[0-9.]{5}).*/\1/p' "$1/log.jsonl"; }
check "two sets on the CPU" "$cpu" "${sets[@]}" --out cpu_sets
check "two sets on the GPU" "$gpu" "${sets[@]}" --tf32 off --out gpu_sets
check "have the same losses: $(sets_of gpu_sets | wc -l)" [ -n "$(sets_of cpu_sets)" -a "$(sets_of cpu_sets)" = "$(sets_of gpu_sets)" ]

# Prompts and chats, of which only answers count.
chats=$top/dev/ref/fixtures/chats
answers=(--model "$chats/model" --train-data "$chats/documents.jsonl" --val-data "$chats/documents.jsonl" --seq-len 96
    --batch 5 --total-batch 1152 --steps 1 --eval-batches 12 --samples 0)
check "answers on the CPU" "$cpu" "${answers[@]}" --out cpu_answers
check "answers on the GPU" "$gpu" "${answers[@]}" --tf32 off --out gpu_answers
check "have the same losses: $(losses gpu_answers | wc -l)" \
    [ -n "$(losses cpu_answers)" -a "$(losses cpu_answers | cut -c 1-13)" = "$(losses gpu_answers | cut -c 1-13)" ]

# Adapters, beside a base in fp32 and in 8 bits: sums of at most 128 numbers in another order.
check "a base" "$cpu" --arch llama --layers 2 --channels 64 --heads 4 --kv-heads 2 --hidden 128 --context 64 --seq-len 32 \
    --batch 4 --steps 20 --samples 0 --eval-every 0 --out base
near_losses() {
    paste -d ' ' <(losses "$1") <(losses "$2") |
        awk '{ d = $3 / $6 - 1; n++; if ($1 != $4 || $2 != $5 || d > 1e-5 || d < -1e-5) { print; bad = 1 } } END { exit bad || n < 6 }'
}
adapter=(--model base --lora-rank 4 --seq-len 32 --batch 3 --total-batch 128 --steps 4 --eval-every 2 --eval-batches 2
    --samples 0 --lr 0.02 --save-every 2)
for quantize in off q8_0; do
    rm -rf cpu_lora gpu_lora gpu_again
    check "an adapter on the CPU, $quantize" "$cpu" "${adapter[@]}" --quantize $quantize --out cpu_lora
    check "an adapter on the GPU, $quantize" "$gpu" "${adapter[@]}" --quantize $quantize --tf32 off --autotune off --out gpu_lora
    check "has its losses, $quantize" near_losses cpu_lora gpu_lora
    check "resumed, $quantize" "$gpu" --resume gpu_lora/step_00000002 --out gpu_again
    check "has the same bits, $quantize" cmp {gpu_lora,gpu_again}/step_00000004/adapter_model.safetensors
    for trainer in cpu gpu; do
        "${!trainer}" --model base --adapter gpu_lora --quantize $quantize --prompt A --tokens 8 --temperature 0 >$trainer.txt 2>err.txt
    done
    check "continues a prompt as on the CPU, $quantize" cmp cpu.txt gpu.txt
done

"$gpu" --threads 2 >out.txt 2>err.txt
check "an option of the CPU trainer is refused" [ $? = 2 ]
check "by name" grep -q 'threads is an option of the CPU trainer' err.txt
CUSIM_MEMORY_MIB=90 "$gpu" --layers 2 --channels 64 --heads 2 --seq-len 32 --batch 64 >out.txt 2>err.txt
check "what does not fit is refused" [ $? = 1 ]
check "with what would" grep -q -e '--batch [0-9]* --recompute [0-9] fits' err.txt
LLMC_NVML_LIBRARY=none.so "$gpu" --layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 1 --eval-batches 2 -lg 1 >out.txt
check "without NVML a run continues" [ $? = 0 ]
check "and says why there is no report" grep -q 'no GPU report: .*none.so' out.txt
CUSIM_DEVICES=0 "$gpu" --plan --model d12 --out plan >plan.txt
check "a plan needs no GPU" [ $? = 0 ]
check "and chooses a level for an H100" grep -q '^recompute: level 0, the lowest that fits into 79[0-9.]* MiB' plan.txt
check "and speaks of memory" grep -q '^memory: .* = parameters .*; on the host: [0-9.]* MiB = scratch .* + staging .* + pinned copy to save [0-9]' plan.txt

"$gpu" --plan --model d48 --vocab-size 50257 --recompute 0 --offload-optimizer host >plan.txt
check "a plan adds up what is on the host" grep -q '; on the host: 11886.2 MiB = scratch 0.2 + m 5942.8 + v 5942.8 + staging 0.5$' plan.txt
check "and the chunks of the classifier: $(grep '^classifier' plan.txt)" grep -q '^classifier: 1024 of 1024 tokens at a time, in 196.5 MiB of the activations$' plan.txt
check "and says what it costs" grep -q '^offload: 11.6 GiB on the host; an update moves 11.6 GiB to the GPU and 11.6 GiB back: 0.249 s at 50 GB/s' plan.txt
"$gpu" --plan --model d48 --vocab-size 50257 --offload-optimizer disk --offload-path nowhere --offload-residuals on >plan.txt
check "and on a disk" grep -q '; on disk: 11885.6 MiB = m 5942.8 + v 5942.8$' plan.txt
check "which nobody touches" [ ! -e nowhere ]
check "and chooses the level that --offload-residuals needs" grep -q '^recompute: level 3, for --offload-residuals$' plan.txt

# refused WORDS OPTIONS...: with status 2, and one line that ends in these words.
refused() {
    local words=$1
    shift
    "$gpu" --layers 1 --channels 16 --heads 2 "$@" >out.txt 2>err.txt
    check "refused: $*: status $?, $(cat err.txt)" [ "$(wc -l <err.txt) $(grep -c "^error: .*$words" err.txt)" = "1 1" ]
}
refused 'needs a directory: --offload-path$' --offload-optimizer disk
refused 'needs --offload-optimizer disk$' --offload-path nowhere
refused '--channels 20: the convolution of lfm2 has 20 channels; on a GPU wanted a multiple of 8$' --arch lfm2 --channels 20 --heads 2
refused 'the delta rule of qwen35 has keys of 256 channels, .* bytes of shared memory with PRECISION=FP32, and this GPU has 232448; wanted 16 bits, or shorter keys$' \
    --arch qwen35 --layers 4 --channels 64 --heads 1 --head-size 256
refused '--recompute 2; wanted --recompute 3, which stores nothing else of a block$' --offload-residuals on --recompute 2
refused 'offload-optimizer; wanted only one of them$' --update-in-backward on --offload-optimizer host
refused 'wanted --graph off$' --update-in-backward on --graph on
refused '--hidden 20: .* on a GPU wanted a multiple of 8$' --arch mixtral --hidden 20
refused '--master-weights 24 with PRECISION=FP32; wanted PRECISION=BF16, or on$' --master-weights 24
refused '--zero 2; wanted --zero 3, which divides the parameters$' --offload-params on --zero 2
refused '--matmul: on a GPU wanted fp8, or none: .*$' --matmul bf16
"$gpu" --layers 1 --channels 16 --heads 2 --print-config >settings.txt 2>err.txt
"$gpu" --config settings.txt --plan >out.txt 2>err.txt
check "what --print-config prints is accepted: status $?, $(cat err.txt)" [ -s out.txt -a ! -s err.txt ]
refused '--matmul fp8: a matrix has 40 rows or columns; on a GPU wanted a multiple of 16$' --arch llama --hidden 40 --matmul fp8
refused '--matmul fp8: the matrices of experts .*$' --arch mixtral --matmul fp8
(ulimit -f 12 && "$gpu" --layers 1 --channels 16 --heads 2 --offload-optimizer disk --offload-path full) >out.txt 2>err.txt
check "no room on the disk: status $?, $(cat err.txt)" \
    [ "$(wc -l <err.txt) $(grep -c "^error: full: no room for .* of the optimizer's state, .* are free: File too large$" err.txt)" = "1 1" ]

# ---- the same bits, whatever autotune measures: CUSIM_LT_FAST says which algorithm is the fastest

small=(--layers 1 --heads 2 --seq-len 16 --batch 2 --total-batch 64 --eval-every 0 --samples 0 --steps 4)
saved=("${small[@]}" --channels 32 --save-every 2)
same_model() { cmp "$1/step_00000004/model.safetensors" "$2/step_00000004/model.safetensors"; }
other_model() { ! same_model "$@"; }
matmuls() { grep -c '"key"' "$@"; } # in a file
export XDG_CACHE_HOME=$dir/cache CUSIM_LT_FAST=1
check "a run with default options" "$gpu" "${saved[@]}" --out one
check "its checkpoint has its algorithms" grep -q '"matmul.json"' one/step_00000002/state.json
check "and so has the cache" cmp one/step_00000004/matmul.json cache/pretrain.c/matmul-*.json
export CUSIM_LT_FAST=2
check "a second run" "$gpu" "${saved[@]}" --out two
check "has the same bits" same_model one two
export XDG_CACHE_HOME=$dir/empty
check "a run on a machine of its own" "$gpu" "${saved[@]}" --out apart
check "may have other bits" other_model one apart
check "resuming a run there" "$gpu" --resume one/step_00000002 --out three
check "has the bits of the run" same_model one three
"$gpu" --resume one/step_00000002 --out four --tf32 off --override >out.txt
check "a resumed run that needs other matmuls" [ $? = 0 ]
check "says so in one line" [ "$(grep -c '^note: .*tf32 on; this is .*tf32 off; timing the matmuls again' out.txt)" = 1 ]
check "a run on its own matmuls again" "$gpu" --resume four/step_00000004 --steps 5 --override --out five
check "a run with logits of 7 tokens at a time" "$gpu" "${saved[@]}" --logits-chunk 7 --out chunks
check "has other bits" other_model chunks apart
check "resumed" "$gpu" --resume chunks/step_00000002 --out chunks_again
check "it has the same" same_model chunks chunks_again
check "all tokens at a time is the default" grep -q '"logits-chunk":32' apart/step_00000002/state.json
for level in 0 1 2 mlp 3; do
    check "--recompute $level" "$gpu" "${saved[@]}" --recompute $level --out level_$level
    check "--recompute $level has the same bits" same_model apart level_$level
done

export XDG_CACHE_HOME=$dir/shared
"$gpu" "${small[@]}" --channels 32 >/dev/null & one=$!
"$gpu" "${small[@]}" --channels 48 >/dev/null & other=$!
wait $one
check "one of two runs at a time" [ $? = 0 ]
wait $other
check "the other one" [ $? = 0 ]
check "the cache has the matmuls of both" \
    [ "$(matmuls shared/pretrain.c/matmul-*.json)" = $((2 * $(matmuls one/step_00000004/matmul.json))) ]
for file in shared/pretrain.c/matmul-*.json; do echo '{}' >"$file"; done
"$gpu" "${saved[@]}" --out damaged >out.txt 2>err.txt
check "a damaged cache does not stop a run" [ $? = 0 ]
check "one line says so" [ "$(grep -c '^warning: .*timing the matmuls again$' err.txt) $(wc -l <err.txt)" = "1 1" ]
check "it is written again" cmp damaged/step_00000004/matmul.json shared/pretrain.c/matmul-*.json
XDG_CACHE_HOME=/dev/null "$gpu" "${small[@]}" --channels 32 >out.txt 2>err.txt
check "a cache that cannot be written does not stop a run" [ $? = 0 ]
check "one line says so, too" [ "$(grep -c '^warning: /dev/null/pretrain.c: cannot open' err.txt) $(wc -l <err.txt)" = "1 1" ]
env -u HOME -u XDG_CACHE_HOME "$gpu" "${small[@]}" --channels 32 --gpu-report 4 >out.txt 2>err.txt
check "nor does it take a home" [ "$? $(wc -l <err.txt)" = "0 0" ]
check "--gpu-report lists the matmuls" [ "$(grep -c '^matmul (.*: algorithm 3 of 6, .* TFLOP/s$' out.txt)" -ge 10 ]
check "a run without autotune" "$gpu" "${saved[@]}" --autotune off --out off
check "keeps no algorithms" [ ! -e off/step_00000004/matmul.json ]
unset CUSIM_LT_FAST

# ---- memory

# Prints the level that --plan chooses with this much memory, in MiB.
level() {
    CUSIM_MEMORY_MIB=$1 "$gpu" --plan --layers 4 --channels 64 --heads 2 --seq-len 64 --batch 16 |
        sed -n "s/^recompute: level \(.\), the lowest that fits into [0-9.]* MiB .*/\1/p"
}
check "more memory, a lower level" [ "$(level 500)$(level 96)$(level 94)$(level 88)$(level 80)" = 01233 ]
CUSIM_MEMORY_MIB=96 "$gpu" --plan --layers 4 --channels 64 --heads 2 --seq-len 64 --batch 16 --fit auto >plan.txt
check "--fit says what does not fit" grep -q '^fit: --batch 16 --recompute 0: 32.1 MiB, .* s: too much$' plan.txt
check "and takes what does" [ "$(tail -n +2 plan.txt | grep '^fit: .*: fits$' | sed 's/:.*MiB.*//' | sed 's/^.*--batch/--batch/' | wc -l)" = 1 ]
CUSIM_DEVICES=0 "$gpu" --plan --fit auto >out.txt
check "without a GPU it plans for an H100" [ "$? $(grep -c '^fit: into 79[0-9.]* MiB;' out.txt)" = "0 1" ]
"$gpu" --plan --fit auto --plan-gpu 'RTX 4090' >out.txt
check "and for a card with a name" [ "$? $(grep -c '^fit: into 23[0-9.]* MiB;' out.txt)$(grep -c 'RTX 4090' out.txt)" = "0 12" ]
"$gpu" --plan --plan-gpu B3000 2>err.txt
check "which it must know" [ "$? $(grep -c '^error: --plan-gpu B3000; wanted one of these: H100 PCIe, .*GB200' err.txt)" = "2 1" ]
"$gpu" --steps 1 --plan-gpu H200 2>err.txt
check "--plan-gpu needs --plan" [ "$? $(grep -c '^error: --plan-gpu H200 is for a plan' err.txt)" = "2 1" ]
check "a run that chooses" env CUSIM_MEMORY_MIB=96 "$gpu" --layers 4 --channels 64 --heads 2 --seq-len 64 --batch 16 \
    --steps 1 --eval-every 0 --samples 0 --out chosen
check "keeps what it chose" grep -q '"recompute":1' chosen/step_00000001/state.json

# How many tokens' logits --plan chooses for rows of as many tokens, with options. Built-in stories
# for such batches take seconds to write.
full_size=(--model d12 --vocab-size 50257 --batch 64 --train-data "$top/dev/doc/*.md")
chunk() {
    CUSIM_MEMORY_MIB=$1 "$gpu" --plan "${full_size[@]}" --seq-len "$2" "${@:3}" |
        sed -n 's/^logits: \([0-9]*\) tokens at a time, .*/\1/p'
}
check "more memory, more logits at a time" [ "$(chunk 80000 1024) $(chunk 50000 1024) $(chunk 45000 1024)" = "65536 32768 16384" ]
check "of a micro-batch that is no power of 2" [ "$(chunk 50000 1023)" = 32736 ]
check "never fewer than that" [ "$(chunk 84 1024 --recompute 3)" = 16384 ]
check "a lower level comes first" [ "$(chunk 45000 1024 --recompute 1)" = 65536 ]
check "a number is taken as it is" [ -z "$(chunk 45000 1024 --logits-chunk 1000)" ]
CUSIM_MEMORY_MIB=45000 "$gpu" "${full_size[@]}" --seq-len 1024 --recompute 0 --logits-chunk 65536 >out.txt 2>err.txt
check "too many do not fit" [ $? = 1 ]
check "and what does is said" grep -q -e '--batch 64 --recompute 0 --logits-chunk auto fits' err.txt

CUSIM_PINNED_MIB=1 "$gpu" "${small[@]}" --channels 128 --save-every 0 --out unsaved >out.txt 2>&1
check "a run that saves nothing pins nothing" [ "$? $(grep -c 'cannot pin' out.txt)" = "0 0" ]
CUSIM_PINNED_MIB=1 "$gpu" "${small[@]}" --channels 128 --out pageable >out.txt 2>&1
check "a copy that cannot be pinned is pageable" [ "$? $(grep -c '^note: cannot pin' out.txt)" = "0 1" ]
check "with pinned memory" "$gpu" "${small[@]}" --channels 128 --out pinned
check "the checkpoint is the same" same_model pageable pinned

# ---- every architecture: the CPU trainer's losses, and the same bits however memory is saved

# near A B: the losses of both runs, line by line, are within 1e-4 of each other
near() {
    paste -d ' ' <(losses "$1") <(losses "$2") |
        awk '{ d = $3 / $6 - 1; n++; if (d > 1e-4 || d < -1e-4) bad = 1 } END { exit bad || n < 4 }'
}
# saves_memory RUN OPTION...: has the losses and weights of RUN
saves_memory() {
    local of=$1
    rm -rf other
    check "$arch: ${*:2}" "$gpu" "${model[@]}" "${@:2}" --out other
    check "$arch: the losses with ${*:2}" diff <(losses "$of") <(losses other)
    check "$arch: the weights with ${*:2}" cmp "$of/step_00000004/model.safetensors" other/step_00000004/model.safetensors
}
architecture() {
    arch=$1 model=(--arch "$1" "${@:2}" --layers 3 --channels 64 --seq-len 32 --batch 2 --total-batch 128 --steps 4 --eval-every 0
        --samples 0 --schedule constant --warmup 0 --autotune off)
    rm -rf cpu gpu split
    check "$arch: the CPU trainer runs" "$cpu" "${model[@]:0:${#model[@]}-2}" --out cpu
    check "$arch: the GPU trainer runs" "$gpu" "${model[@]}" --tf32 off --out gpu
    check "$arch: the same loss curve" near gpu cpu
    saves_memory gpu --tf32 off --graph off --recompute 3
    check "$arch: --zero 2" "$gpu" "${model[@]}" --tf32 off --zero 2 --out split
    saves_memory split --tf32 off --zero 3 --offload-params on --offload-optimizer host
    check "$arch: generates" "$gpu" --model gpu --prompt 'One day' --tokens 8 --quantize q8_0
}
architecture llama --heads 4 --kv-heads 2 --hidden 160 --optimizer muon
architecture mistral --heads 4 --kv-heads 2 --window 8 --hidden 160
architecture qwen2 --heads 6 --kv-heads 2 --head-size 16 --hidden 96
architecture qwen3 --heads 4 --kv-heads 1 --head-size 32 --hidden 160 --window 8 --window-pattern SL --own-head on
architecture arcee --heads 4 --kv-heads 4 --hidden 160
architecture nanochat --heads 2
architecture qwen35 --heads 3 --head-size 32 --kv-heads 1 --hidden 96
architecture lfm2 --heads 4 --kv-heads 2 --hidden 96
# the biases of routers are moved alike
architecture glm4moe --heads 4 --kv-heads 2 --hidden 64 --shared-hidden 64 --experts 4 --router-bias-rate 0.01

# ---- the sensors are read while the GPU has the work of a step: lazy streams then have done none of it

gcc -shared -fPIC -DFAKE_TRACE "$top/dev/test/lib/fake_nvml.c" -o libnvidia-ml.so.1
check "a run with sensors" env LD_LIBRARY_PATH="$dir" CUSIM_DEVICES=32 CUSIM_STREAMS=lazy CUSIM_TRACE="$dir/trace" "$gpu" --layers 1 --channels 16 \
    --heads 2 --seq-len 16 --batch 2 --steps 1 --samples 0 --eval-every 0 --autotune off --device 22 --out sensed
check "logs what they tell" grep -q '"kind":"train".*"power_w":71.499,"clock_mhz":210' sensed/log.jsonl
check "which was read before the forward pass was done" grep -q 'kernel.*attention_forward' <(sed -n '/sensors/,$p' trace)

# ---- the precision is one that is known

precision() { make -s -n -C "$top" train_gpt2cu PRECISION="$1" 2>&1; }
check "the precision in small letters" grep -q -e '-DPRECISION_FP32 ' <(precision fp32)
check "an unknown precision is refused" grep -q 'PRECISION=FP8: wanted BF16, FP16 or FP32' <(precision fp8)

check "planned memory is what is allocated, in every row of the table" \
    "$top/dev/bench/memory_table.sh" --on sim --model d6 --batch 4 --seq-len 64

check_done
