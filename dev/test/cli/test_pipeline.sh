#!/usr/bin/env bash
# test_pipeline.sh -- stages of layers: the same bits for every number of stages above one,
# losses near one process, and the end of all when one rank ends.
#
#     dev/test/cli/test_pipeline.sh build/plain/train_gpt2 [--part K/N] [NAME...]
#     dev/test/cli/test_pipeline.sh build/sim/BF16/train_gpt2cu ...    # on the simulated GPU
set -u
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
source dev/test/lib/ranks.sh
source dev/test/lib/cases.sh
cases_begin "$@"
trainer=$program
cpu_trainer=$PWD/build/plain/train_gpt2
ranks_begin pipeline

# 10 micro-batches of 2 sequences an update.
run=(--layers 4 --channels 64 --heads 4 --seq-len 32 --batch 2 --total-batch 640 --steps 6 --save-every 2 --eval-every 3
    --eval-batches 5 --samples 1 --sample-tokens 4 --sample-every 6)

small=(--layers 4 --channels 64 --heads 4 --seq-len 32 --batch 2 --total-batch 320 --steps 4 --eval-every 2 --eval-batches 2
    --samples 1 --sample-tokens 4 --sample-every 4)

# One process adds up two things in another order: the norm of the gradient, and the two gradients
# of a token embedding that is also the output layer. Without them it has the bits of any stages.
exact=(--grad-clip 0)
llama=(--arch llama --kv-heads 2 --own-head on "${exact[@]}")

losses() { logged "$1" | sed 's/^\(train [0-9]* [^ ]*\) .*/\1/'; } # without the norm

last_loss() { logged "$1" | sed -n 's/^val [0-9]* \([0-9.]*\) *$/\1/p' | tail -n 1; }

# near WHAT A B TOLERANCE: relative.
near() { check "$1: $2 and $3" awk -v a="$2" -v b="$3" -v t="$4" 'BEGIN { d = a > b ? a - b : b - a; exit !(a > 0 && d <= t * a) }'; }

# stages WHAT OPTIONS...: 2 stages have the bits of one process.
stages() {
    local what=$1
    shift
    trains 1 one "$@" "${exact[@]}"
    trains 2 two "$@" "${exact[@]}" --pipeline-parallel 2
    same_weights "$what" one two
    check "$what: the same losses and samples" [ -n "$(losses one)" -a "$(losses one)" = "$(losses two)" ]
}

test_same_bits() {
    trains 1 p1 "${run[@]}"
    by_mpi_trains 2 p2 "${run[@]}" --pipeline-parallel 2
    near "2 stages" "$(last_loss p1)" "$(last_loss p2)" 1e-6
    trains 4 p4 "${run[@]}" --pipeline-parallel 4
    same "4 stages" p2 p4
    trains 3 cut "${run[@]}" --pipeline-parallel 3 --pipeline-layers 1,2,1
    same "stages of 1, 2 and 1 layers" p2 cut
}

# Data groups beside stages: micro-batches for some of the ranks only.
test_data() {
    trains 3 d3 "${run[@]}" "${llama[@]}" --zero "$1"
    trains 6 d3p2 "${run[@]}" "${llama[@]}" --zero "$1" --pipeline-parallel 2
    same_weights "--zero $1, 3 x 2 ranks" d3 d3p2
}

# Fewer micro-batches than stages.
test_few_batches() {
    trains 2 two_batches "${run[@]}" --zero 2 --pipeline-parallel 2 --batch-schedule 0:64,2:128,4:640
    trains 6 few_batches "${run[@]}" --zero 2 --pipeline-parallel 3 --batch-schedule 0:64,2:128,4:640
    same "--batch-schedule, 2 x 3 ranks" two_batches few_batches
}

# Tensor ranks and stages: each process has parts of some layers.
test_tensor() {
    trains 2 t2 "${run[@]}" "${llama[@]}" --zero 1 --tensor-parallel 2
    trains 4 t2p2 "${run[@]}" "${llama[@]}" --zero 1 --pipeline-parallel 2 --tensor-parallel 2
    same_weights "2 tensor ranks x 2 stages" t2 t2p2
}

# Any grid continues what another has saved.
test_elastic() {
    trains 1 p1_2 "${run[@]}" "${llama[@]}" --zero 2
    trains 4 e4 "${run[@]}" "${llama[@]}" --zero 2 --pipeline-parallel 2
    same_weights "--zero 2, 2 x 2 ranks" p1_2 e4
    trains 3 e3 --resume e4/step_00000002 --zero 2 --pipeline-parallel 3
    same_weights "2 x 2 ranks, then 3 stages" p1_2 e3
    trains 1 e1 --resume e3/step_00000004 --zero 2 --pipeline-parallel 1
    same_weights "then one process" p1_2 e1
}

test_model() { stages "$*" "${small[@]}" "$@"; }

test_tasks() {
    local fixtures=$root/dev/ref/fixtures/tasks
    local tasks=(--steps 0 --model "$fixtures/model.bin" --tokenizer "$fixtures/tokenizer.json" --batch 4
        --tasks "$fixtures/hellaswag.jsonl")
    trains 1 tasks_1 "${tasks[@]}"
    trains 2 tasks_2 "${tasks[@]}" --pipeline-parallel 2
    check "the same scores: $(grep -c '"kind":"task"' tasks_1/log.jsonl)" \
        cmp <(grep '"kind":"task"' tasks_1/log.jsonl) <(grep '"kind":"task"' tasks_2/log.jsonl)
}

# in_stages: starts 2 stages, which train until one ends; sets `job`, and `stage`, the process of
# the second.
in_stages() {
    rm -rf long
    timeout 120 mpirun --oversubscribe --bind-to none -n 2 "$trainer" --layers 4 --channels 64 --heads 4 --seq-len 32 --batch 2 \
        --total-batch 6400 --steps 3000 --samples 0 --eval-every 0 --pipeline-parallel 2 --out long --timeout 3 \
        >stdout 2>stderr </dev/null &
    job=$!
    for _ in {1..600}; do
        grep -q '"step":3' long/log.jsonl 2>/dev/null && break
        sleep 0.1
    done
    stage=$(pgrep -P "$(pgrep -P $job)" -f "$trainer" | tail -n 1)
    begin=$SECONDS
}

# all_end WHAT STATUS: the job ends so, soon, and leaves no process.
all_end() {
    wait $job
    status=$?
    check "$1: exit status $status, wanted $2" [ $status = "$2" ]
    for _ in {1..100}; do [ -d "/proc/$stage" ] && sleep 0.1; done
    check "$1: took $((SECONDS - begin)) s" [ $((SECONDS - begin)) -le 30 ]
    check "$1: $stage is left" [ ! -d "/proc/$stage" ]
}

test_end() {
    in_stages
    kill -9 "$stage"
    all_end "kill -9 of a stage" 137
    in_stages
    kill -STOP "$stage"
    all_end "a stopped stage" 1
    check "a stopped stage: $(grep -m 1 '^error: ' stderr)" \
        grep -qE '^error: rank 0 of 2 \(.*; stage 0\) has waited [0-9]+ s in step [0-9]+, (micro-batch [0-9]+ from stage 1|the update)' \
        stderr # it may have stopped between two updates
    in_stages
    kill -TERM "$stage"
    all_end "SIGTERM of a stage" 75
    check "SIGTERM of a stage: its weights are saved" [ -n "$(compgen -G 'long/step_*/model.safetensors')" ]
}

# 5 micro-batches an update: uneven for 2 and 3 data ranks, and fewer than 8 passes ahead.
gpu_run=(--layers 4 --channels 32 --heads 2 --seq-len 16 --batch 2 --total-batch 160 --steps 6 --save-every 2 --eval-every 3
    --eval-batches 5 --samples 1 --sample-tokens 4 --sample-every 6 --tf32 off --autotune off)

# Streams are found out of order only where one stage waits for another, so their order is random.
test_gpu() {
    once trains 1 g1 "${gpu_run[@]}"
    CUSIM_STREAMS=random once by_mpi_trains 2 g2 "${gpu_run[@]}" --pipeline-parallel 2
    near "2 GPUs" "$(last_loss g1)" "$(last_loss g2)" 1e-3
    check "graphs are off: $(grep '^graph:' g2.txt)" grep -qx 'graph: off, in a pipeline' g2.txt
    CUSIM_STREAMS=lazy CUSIM_NCCL_SERIAL=2 trains 4 g4 "${gpu_run[@]}" --pipeline-parallel 4
    same "4 GPUs" g2 g4
    trains 2 recomputed "${gpu_run[@]}" --pipeline-parallel 2 --recompute 3 --pipeline-layers 3,1
    same "--recompute 3" g2 recomputed
}

test_gpu_data() {
    trains 2 g2_2 "${gpu_run[@]}" --zero 2 --pipeline-parallel 2
    CUSIM_STREAMS=random CUSIM_NCCL_SERIAL=2 trains 4 g4_2 "${gpu_run[@]}" --zero 2 --pipeline-parallel 2
    same "--zero 2, 2 x 2 GPUs" g2_2 g4_2
}

test_gpu_tensor() {
    local run
    trains 2 g_tensor "${gpu_run[@]}" "${llama[@]}" --zero 1 --tensor-parallel 2
    in_any_order 4 g_t2 "${gpu_run[@]}" "${llama[@]}" --zero 1 --pipeline-parallel 2 --tensor-parallel 2
    for run in 1 2 3; do same_weights "2 tensor ranks x 2 GPUs, run $run" g_tensor g_t2_$run; done
}

# A checkpoint of two stages, continued by four, by one GPU, and by the CPU trainer.
test_gpu_elastic() {
    once trains 1 g1 "${gpu_run[@]}"
    once trains 2 g2 "${gpu_run[@]}" --pipeline-parallel 2
    trains 4 g_four --resume g2/step_00000002 --pipeline-parallel 4
    same_weights "2 GPUs, then 4" g2 g_four
    trains 1 g_one --resume g2/step_00000002 --pipeline-parallel 1
    near "2 GPUs, then one" "$(last_loss g2)" "$(last_loss g_one)" 1e-3
    "$cpu_trainer" --resume g2/step_00000004 --override --pipeline-parallel 1 --out g_cpu >stdout 2>stderr
    check "2 GPUs, then a CPU: exit status $?, $(head -n 1 stderr)" [ -f g_cpu/step_00000006/model.safetensors ]
    near "2 GPUs, then a CPU" "$(last_loss g1)" "$(last_loss g_cpu)" 1e-3
}

test_gpu_model() {
    stages "$*" --layers 4 --channels 32 --heads 2 --seq-len 16 --batch 2 --total-batch 96 --steps 4 --eval-every 0 --samples 0 \
        --tf32 off --autotune off "$@"
}

test_gpu_misuse() {
    bad 2 "--pipeline-parallel 2, --graph on; wanted auto" --num-processes 2 --plan --pipeline-parallel 2 --graph on
    bad 2 "--pipeline-parallel 2, --zero 3|wanted --zero 1" --num-processes 2 --plan --pipeline-parallel 2 --zero 3
}

if [ $is_gpu ]; then
    cases <<'END'
gpu
gpu_data
gpu_tensor
gpu_elastic
gpu_model --arch nanochat --own-head on
gpu_model --arch qwen3 --own-head on --window 8 --window-pattern SL
gpu_model --arch mixtral --own-head on --experts 4 --experts-used 2 --optimizer muon
gpu_model --share-layers pairs --freeze wte,wpe,mlp[2-3] --zero 2 --gradients fp32 --pack dynamic
gpu_misuse
END
else
    cases <<'END'
same_bits
data 0
data 1
data 2
few_batches
tensor
elastic
model --arch llama --kv-heads 2 --own-head on
model --freeze wte,wpe,blocks[1],mlp[3]
model --freeze wte
model --arch llama --own-head on --matmul bf16
model --arch llama --own-head on --optimizer adamw8bit
tasks
end
END
fi
check_done
