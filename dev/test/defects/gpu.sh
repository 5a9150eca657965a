# gpu.sh -- faults that a GPU would refuse, tried on the simulated one, which is as strict; for
# dev/test/defects.sh.
# shellcheck shell=bash disable=SC2154

gpu_run=(--layers 1 --channels 16 --heads 2 --seq-len 8 --batch 1 --steps 2 --samples 0 --eval-every 0 --autotune off)

# Succeeds if a simulated GPU is built.
has_sim() { [ -n "$sim" ] || { echo "skipped: $name: no simulated GPU (make sim PRECISION=FP32)"; return 1; }; }

# A row of logits takes exactly the shared memory that a block gets without asking, and static
# arrays come on top.
defect_row_of_logits_as_large_as_shared_memory() {
    has_sim || return 0
    check "a vocabulary of 12,170 tokens" "$sim" "${gpu_run[@]}" --vocab-size 12170
}

# Pinned memory begins at a multiple of 256 bytes, and a disk's of 4096.
defect_pinned_memory_that_is_no_page() {
    has_sim || return 0
    check "state on a disk" "$sim" "${gpu_run[@]}" --offload-optimizer disk --offload-path disk --out disk
    check "state on the GPU" "$sim" "${gpu_run[@]}" --out gpu
    check "the same bits" cmp disk/step_00000002/model.safetensors gpu/step_00000002/model.safetensors
}

# NCCL takes memory at its first operations, after the plan gave all away: the run ended in an
# allocation.
defect_memory_of_nccl_in_no_plan() {
    has_sim || return 0
    is_here mpirun || return 0
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    local full=(--layers 4 --channels 64 --heads 2 --seq-len 64 --batch 16 --steps 1 --samples 0 --eval-every 0 --autotune off)
    if ! grep -q ncclCommInitRankConfig "$sim"; then
        echo "skipped: $name: the build has no NCCL"
        return 0
    fi
    # This fits next to NCCL's 64 MiB, and no more does: a plan without NCCL would choose level 0.
    CUSIM_MEMORY_MIB=155 mpirun --oversubscribe --bind-to none -n 2 "$sim" "${full[@]}" >stdout 2>stderr </dev/null
    check "two processes in little memory: exit status $?, $(grep -m 1 '^error' stderr)" grep -q 'NCCL 64.0' stdout
    check "a level that fits: $(grep '^recompute' stdout)" grep -q '^recompute: level mlp' stdout
}

# A plan for two machines holds no operation of two communicators in one graph.
defect_graphs_with_replicas() {
    has_sim || return 0
    CUSIM_DEVICES=0 "$sim" "${gpu_run[@]}" --plan --num-processes 4 --gpus-per-node 2 >plan.txt 2>&1
    check "no graphs with replicas: $(grep -m 1 'graph\|error' plan.txt)" grep -q '^graph: off, with replicas of the model' plan.txt
}
