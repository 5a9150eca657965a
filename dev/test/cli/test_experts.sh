#!/usr/bin/env bash
# test_experts.sh -- experts divided among processes: the same bits for any number of processes that
# share them, and checkpoints that any number continues; which tokens count in an update, against
# PyTorch.
#
#     dev/test/cli/test_experts.sh build/plain/train_gpt2 [--part K/N] [NAME...]
#     dev/test/cli/test_experts.sh build/sim/BF16/train_gpt2cu ...    # on the simulated GPU
set -u
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
source dev/test/lib/ranks.sh
source dev/test/lib/cases.sh
cases_begin "$@"
trainer=$program
ranks_begin experts

# The updates have 1, 2 and 10 micro-batches. The matrix of an expert has whole blocks of the norm
# (gradient_norm.h).
run=(--layers 2 --heads 4 --experts 4 --seq-len 32 --batch 2 --total-batch 640
    --batch-schedule 0:64,1:128,2:640 --steps 4 --save-every 2 --eval-every 4 --eval-batches 5 --samples 1 --sample-tokens 4
    --sample-every 4)

# The same without norms.
losses() { logged "$1" | sed 's/"norm".*//'; }

# 2 and 4 processes that share experts have the same bits; so has one that has all experts, if the
# norm of the gradient changes nothing. The first word is the stage of ZeRO.
test_divided() {
    local zero=$1 what="${*:2}"
    shift
    trains 4 e2 "${run[@]}" --expert-parallel 2 --zero "$zero" "$@"
    trains 4 e4 "${run[@]}" --expert-parallel 4 --zero "$zero" "$@"
    same "$what, 2 and 4" e2 e4
    trains 4 e1 "${run[@]}" --grad-clip 0 --zero "$zero" "$@"
    trains 4 e4 "${run[@]}" --grad-clip 0 --expert-parallel 4 --zero "$zero" "$@"
    same_weights "$what, 1 and 4" e1 e4
    check "$what, 1 and 4: the same losses" [ -n "$(losses e1)" -a "$(losses e1)" = "$(losses e4)" ]
}

# Biases of an expert are no whole blocks of the norm, so the norm must change nothing.
test_biased() {
    local arguments=(--arch gptoss --channels 64 --hidden 64 --window 9 --grad-clip 0 "$@")
    trains 4 b1 "${run[@]}" "${arguments[@]}"
    for e in 2 4; do
        trains 4 b$e "${run[@]}" "${arguments[@]}" --expert-parallel $e
        same_weights "biases $*, 1 and $e" b1 b$e
        check "biases $*, 1 and $e: the same losses" [ -n "$(losses b1)" -a "$(losses b1)" = "$(losses b$e)" ]
    done
}

# Any number of processes, and of those that share experts, continues what another has saved.
test_elastic() {
    local clip=(--arch mixtral --channels 64 --hidden 64 --grad-clip 0)
    by_mpi_trains 4 all "${run[@]}" "${clip[@]}" --zero 2 --expert-parallel 2
    trains 4 more --resume all/step_00000002 --expert-parallel 4
    same_weights "2, then 4" all more
    trains 3 none --resume all/step_00000002 --expert-parallel 1
    same_weights "2, then 3 processes that have all experts" all none
    trains 2 again --resume none/step_00000004 --expert-parallel 2 --steps 6
    trains 4 zero "${run[@]}" "${clip[@]}" --zero 0 --expert-parallel 2
    trains 2 one --resume zero/step_00000002 --zero 2 --expert-parallel 2
    check "--zero 0, then 2" [ -f one/step_00000004/model.safetensors ]
}

# The biases of routers balance experts without a loss; any number of processes and rows of a micro-batch
# moves them alike, and so does a run that continues.
test_biases() {
    local run=(--arch glm4moe --layers 3 --dense-layers 1 --heads 4 --channels 64 --hidden 96 --expert-hidden 64 --shared-hidden 64 --experts 8
        --seq-len 64 --total-batch 512 --steps 40 --save-every 20 --eval-every 0 --samples 0 --router-balance 0 --router-z 0 --matmul fp32
        --grad-clip 0)
    trains 1 still "${run[@]}" --batch 8
    trains 1 moved "${run[@]}" --batch 8 --router-bias-rate 0.01
    check "a hot expert cools: $(values train expert_load still/log.jsonl | tail -n 1), then $(values train expert_load moved/log.jsonl | tail -n 1)" \
        awk -v a="$(values train expert_load still/log.jsonl | tail -n 1)" -v b="$(values train expert_load moved/log.jsonl | tail -n 1)" \
        'BEGIN { exit !(b > 0 && b < 0.8 * a) }'
    run+=(--batch 2 --router-bias-rate 0.01)
    trains 1 one "${run[@]}"
    trains 2 stages "${run[@]}" --pipeline-parallel 2
    check "2 stages" near_numbers 'loss":' one/log.jsonl stages/log.jsonl
    trains 1 more --resume one/step_00000020
    same_weights "continued" one more
    trains 1 one "${run[@]}" --zero 2
    trains 2 two "${run[@]}" --zero 2
    same_weights "1 and 2 processes that move biases" one two
    trains 2 two "${run[@]}" --zero 2 --expert-parallel 2
    same_weights "2 processes that share experts" one two
    bad 2 "--router-bias-rate" --plan --arch mixtral --layers 2 --heads 4 --channels 64 --router-bias-rate 0.01
}

test_tasks() {
    local models=$root/dev/ref/fixtures/models
    local tasks=(--steps 0 --model "$models/mixtral" --batch 4 --perplexity "$models/tokens.bin")
    trains 1 tasks_1 "${tasks[@]}"
    trains 2 tasks_2 "${tasks[@]}" --expert-parallel 2
    check "the same scores" cmp <(grep '"kind":"task"' tasks_1/log.jsonl) <(grep '"kind":"task"' tasks_2/log.jsonl)
}

# Packing, rows of a micro-batch, processes, and options.
ways=('pad 15 1' 'pad 4 1' 'pad 1 1' 'dynamic 4 1' 'uniform 2 1' 'bestfit 8 1' 'bestfit 3 1' 'pad 4 2' 'dynamic 3 2' 'dynamic 4 3'
    'uniform 2 3' 'bestfit 2 3' 'pad 3 2 --expert-parallel 2' 'pad 2 2 --pipeline-parallel 2')

statistics=(loss norm expert_load router_entropy)

# counted LINE WAY: an update with all documents of fixtures/counted has the loss, norm, load and
# entropy that the line expects, within `precision`.
counted() {
    local fixtures=$root/dev/ref/fixtures line way pieces rows key
    read -ra line <<<"$1"
    read -ra way <<<"$2"
    read -r pieces rows < <(sed -n "s/^# ${line[0]}: pieces \(.*\) rows /\1 /p" "$fixtures/counted/expected.txt")
    [ "${way[0]}" = bestfit ] || rows=$pieces
    trains "${way[2]}" counted --model "$fixtures/models/${line[1]}" --train-data "$fixtures/counted/${line[0]}" --eval-every 0 --samples 0 \
        --val-data "$fixtures/counted/${line[0]}" --seq-len 16 --total-batch $((16 * rows)) --steps 1 --grad-clip 0 --doc-mask on \
        --router-balance "${line[2]}" --router-z "${line[3]}" --z-loss "${line[4]}" --pack "${way[0]}" --batch "${way[1]}" "${way[@]:3}" "${exact[@]}"
    for key in "${statistics[@]}"; do
        check "$1, $2: $key $(values train $key counted/log.jsonl)" awk -v got="$(values train $key counted/log.jsonl)" -v want="${line[5]}" \
            -v most="$precision" 'BEGIN { exit !(got > 0 && (got / want - 1) ^ 2 <= most ^ 2) }'
        line=("${line[@]:0:5}" "${line[@]:6}")
    done
}

# Every line in one way, and one line in all ways.
test_counted() {
    local lines i way
    mapfile -t lines < <(grep -v '^#' "$root/dev/ref/fixtures/counted/expected.txt")
    check "${#lines[@]} updates" [ ${#lines[@]} = 32 ]
    for i in "${!lines[@]}"; do counted "${lines[i]}" "${ways[i % ${#ways[@]}]}"; done
    for way in "${ways[@]}"; do counted "${lines[19]}" "$way"; done
    for way in 'pad 4 2' 'bestfit 3 4'; do counted "${lines[18]}" "$way --context-parallel 2"; done # without a balance
}

# Each source of a mixture has the same loss whoever has its sequences; so has each expert its load, within
# a token. In updates of 1, 3 and 9 micro-batches.
test_sources() {
    local way key
    for i in {1..300}; do echo "$i bottles of beer on the wall"; done >beer.txt
    for i in {1..200}; do echo "the cat named $i"; done >cat.txt
    local run=(--arch mixtral --layers 2 --heads 4 --experts 4 --channels 64 --hidden 64 --train-data 'beer=beer.txt:2,cat=cat.txt:1'
        --seq-len 32 --batch 2 --total-batch 576 --batch-schedule 0:64,1:192,2:576 --steps 3 --router-balance 0 --eval-every 0 --samples 0)
    trains 1 sources_1 "${run[@]}"
    for way in "$@"; do
        read -ra way <<<"${way//,/ }"
        trains "${way[0]}" sources "${run[@]}" "${way[@]:1}"
        for key in 'beer"' 'cat"' 'load":\[\[' ; do
            check "${way[*]}: $key" near_numbers "$key" sources_1/log.jsonl sources/log.jsonl
        done
    done
}

# Both logs have the same three or more numbers after a key, within `precision`, loads within 2 %.
near_numbers() {
    local key=$1
    paste <(sed -n "s/.*\"$key[:]*\([0-9.]*\).*/\1/p" "$2") <(sed -n "s/.*\"$key[:]*\([0-9.]*\).*/\1/p" "$3") |
        awk -v most="$([[ $key = load* ]] && echo 0.02 || echo "$precision")" \
            '{ n++; bad += !($1 > 0 && ($2 / $1 - 1) ^ 2 <= most ^ 2) } END { exit !(n >= 2 && bad == 0) }'
}

test_refusals() {
    local small=(--arch mixtral --layers 1 --channels 64 --heads 4 --experts 6 --steps 1 --expert-parallel)
    bad 2 "--expert-parallel 4, 2 processes; wanted 2" --num-processes 2 --plan "${small[@]}" 4
    bad 2 "--expert-parallel 4, 6 experts; wanted 2" --num-processes 4 --plan "${small[@]}" 4
    bad 2 "--expert-parallel 2, a model without experts; wanted 1" --num-processes 2 --plan --layers 1 --steps 1 --expert-parallel 2
    bad 2 "--expert-parallel 2, --optimizer adafactor, which updates all experts of a layer together; wanted another" --num-processes 2 --plan \
        "${small[@]}" 2 --optimizer adafactor
    bad 2 "--expert-parallel 2, --freeze wte; wanted --expert-parallel 1" --num-processes 2 --plan "${small[@]}" 2 --freeze wte
    bad 2 "--expert-parallel 2, --context-parallel 2; wanted --expert-parallel 1" --num-processes 4 --plan "${small[@]}" 2 --context-parallel 2 \
        --router-balance 0
}

# ---- GPUs ----

# In bf16. A graph is launched in updates with other shares of answers, too.
test_gpu_counted() {
    local fixtures=$root/dev/ref/fixtures lines i
    local run=(--model "$fixtures/models/mixtral" --train-data "$fixtures/counted/answers.bin" --val-data "$fixtures/counted/answers.bin"
        --seq-len 16 --pack pad --batch 1 --total-batch 80 --steps 4 --save-every 3 --eval-every 0 --samples 0)
    trains 1 graphs "${run[@]}"
    trains 1 launches "${run[@]}" --graph off
    same "graphs" graphs launches
    trains 1 resumed --resume graphs/step_00000003
    for i in expert_load router_entropy; do
        check "$i is that of its update: $(values train $i graphs/log.jsonl | tail -n 1), resumed $(values train $i resumed/log.jsonl)" \
            [ "$(values train $i graphs/log.jsonl | tail -n 1)" = "$(values train $i resumed/log.jsonl)" ]
    done
    mapfile -t lines < <(grep -v '^#' "$root/dev/ref/fixtures/counted/expected.txt")
    for i in "${!lines[@]}"; do [ $((i % 5)) != 0 ] || counted "${lines[i]}" "${ways[i % 7]}"; done
    for i in 10 25; do counted "${lines[i]}" "${ways[i / 10 + 9]}"; done
}

# Of four ranks one has a micro-batch in the first update, two in the second, and two in the last
# micro-step of the third.
gpu_run=(--arch mixtral --layers 2 --heads 4 --experts 4 --experts-used 2 --channels 64 --hidden 64 --seq-len 16 --batch 2
    --total-batch 192 --batch-schedule 0:32,1:64,2:192 --steps 3 --save-every 2 --eval-every 3 --eval-batches 3 --samples 1
    --sample-tokens 2 --sample-every 3)

# near WHAT A B: the norms of their last gradients differ by less than bf16 rounds one number.
near() {
    local a b
    a=$(values train norm "$2/log.jsonl" | tail -n 1)
    b=$(values train norm "$3/log.jsonl" | tail -n 1)
    check "$1: $a, $b" awk -v a="$a" -v b="$b" 'BEGIN { exit !(a > 0 && (a / b - 1) ^ 2 < 1e-6) }'
}

test_gpu_same_bits() {
    local run
    CUSIM_STREAMS=random once trains 4 e2 "${gpu_run[@]}" --zero 2 --expert-parallel 2
    check "its first validation: $(values val loss e2/log.jsonl | head -n 1)" [ "$(values val loss e2/log.jsonl | head -n 1 | cut -d . -f 1)" -gt 3 ]
    CUSIM_NCCL_SERIAL=2 CUSIM_NCCL_TIMEOUT=20 CUSIM_STREAMS=lazy trains 4 e4 "${gpu_run[@]}" --zero 2 --expert-parallel 4
    same "--zero 2, 2 and 4" e2 e4
    in_any_order 4 any "${gpu_run[@]}" --zero 2 --expert-parallel 2
    for run in 1 2 3; do same "one operation at a time, run $run" e2 any_$run; done
    CUSIM_STREAMS=random CUSIM_ORDER=random trains 4 z1 "${gpu_run[@]}" --zero 1 --expert-parallel 2
    CUSIM_STREAMS=lazy trains 4 z0 "${gpu_run[@]}" --zero 0 --expert-parallel 4 --recompute 3
    near "--zero 2, 1" e2 z1
    near "--zero 2, 0" e2 z0
}

test_gpu_undivided() {
    trains 4 one "${gpu_run[@]}" --zero 2 --grad-clip 0
    trains 4 free "${gpu_run[@]}" --zero 2 --grad-clip 0 --expert-parallel 2
    same_weights "e = 2, 1" one free
}

test_gpu_elastic() {
    CUSIM_STREAMS=random once trains 4 e2 "${gpu_run[@]}" --zero 2 --expert-parallel 2
    trains 2 other --resume e2/step_00000002 --expert-parallel 2 --zero 1
    near "4 GPUs, 2" e2 other
    trains 1 none --resume e2/step_00000002 --expert-parallel 1
    near "divided, then not" e2 none
}

# biases RUN: prints the words of the biases of routers in its last checkpoint.
biases() {
    local file header from to
    file=$(printf '%s\n' "$1"/step_*/model.safetensors | tail -n 1)
    header=$(od -An -tu8 -N8 "$file" | tr -d ' ')
    head -c "$((header + 8))" "$file" | grep -ao 'e_score_correction_bias":{[^}]*' | sed 's/.*\[\([0-9]*\), *\([0-9]*\)\].*/\1 \2/' |
        while read -r from to; do tail -c +"$((header + 9 + from))" "$file" | head -c "$((to - from))" | od -An -tx4; done
}
same_biases() { check "$1: $(biases "$3" | head -n 1)" [ "$(biases "$2")" -a "$(biases "$2")" = "$(biases "$3")" ]; }

# Biases of routers are fp32 beside weights in bf16: two moves of 0.001 make 0.002, which bf16 cannot
# hold. Weights hardly move here, so all runs choose the same experts.
test_gpu_biases() {
    local run=(--arch glm4moe --layers 3 --dense-layers 1 --heads 4 --channels 64 --hidden 96 --expert-hidden 64 --shared-hidden 64 --experts 4
        --seq-len 16 --batch 2 --total-batch 128 --steps 4 --save-every 2 --eval-every 0 --samples 0 --lr 1e-30 --warmup 0 --weight-decay 0
        --router-bias-rate 0.001)
    trains 1 one "${run[@]}" --steps 2
    check "0.002 in fp32: $(biases one)" grep -q '3b03126f' <(biases one)
    trains 1 one "${run[@]}"
    trains 1 more --resume one/step_00000002
    same_weights "biases, continued" one more
    trains 2 two "${run[@]}" --zero 3
    same_biases "biases, 2 GPUs" one two
    trains 2 two "${run[@]}" --zero 2 --expert-parallel 2
    same_biases "biases, 2 GPUs that share experts" one two
    trains 2 two "${run[@]}" --pipeline-parallel 2
    same_biases "biases, 2 stages" one two
    trains 1 still "${run[@]}" --freeze router
    check "frozen biases stay: $(biases still)" [ -z "$(biases still | tr -d ' 0\n')" ]
    trains 1 narrow "${run[@]}" --master-weights off
    check "biases in 16 bits move: $(biases narrow)" [ "$(biases narrow | tr -d ' 0\n')" ]
    trains 1 more --resume narrow/step_00000002
    same_weights "biases in 16 bits, continued" narrow more
}

test_gpu_refusals() {
    local small=(--arch mixtral --layers 1 --channels 64 --heads 4 --experts 4 --steps 1 --expert-parallel 2)
    bad 2 "--expert-parallel 2, --zero 3, which would gather the experts in every micro-step; wanted --zero 2" --num-processes 2 --plan \
        "${small[@]}" --zero 3
    bad 2 "--expert-parallel 2, --graph on; wanted auto: the host waits for the number of rows in each layer" --num-processes 2 --plan \
        "${small[@]}" --graph on
    bad 2 "--expert-parallel 2, --offload-optimizer host; wanted --expert-parallel 1" --num-processes 2 --plan "${small[@]}" --offload-optimizer host
    train --plan --layers 1 --channels 64 --heads 4 --steps 1 --tf32 off
    check "--tf32 in 16 bits: $(grep '^note' stdout)" grep -q '^note: --tf32 off has no effect without a trainer that was built with PRECISION=FP32' stdout
    bad 2 "--expert-parallel 2, --shard-ranks 1; wanted auto: all processes" --num-processes 2 --plan "${small[@]}" --shard-ranks 1
}

if [ $is_gpu ]; then
    export XDG_CACHE_HOME=$work/cache
    exact=() precision=0.02
    cases <<'END'
gpu_counted
sources 1,--graph,off 2 2,--pipeline-parallel,2
gpu_same_bits
gpu_undivided
gpu_elastic
gpu_biases
gpu_refusals
END
else
    exact=(--matmul fp32) precision=5e-6
    cases <<'END'
counted
divided 2 --arch mixtral --channels 64 --hidden 64 --experts-used 2 --recompute 3
divided 1 --arch qwen3moe --channels 64 --hidden 64 --kv-heads 2 --matmul bf16
divided 0 --arch olmoe --experts-used 1 --channels 128 --hidden 128 --optimizer adamw8bit
divided 2 --arch glm4moe --channels 64 --hidden 64 --shared-hidden 128 --matmul bf16 --recompute 1
biased --zero 2 --matmul bf16
biased --zero 1 --matmul fp32 --recompute mlp
divided 2 --arch glm4moe --channels 64 --hidden 96 --dense-layers 1 --expert-hidden 64 --shared-hidden 64
biases
elastic
sources 3 2,--expert-parallel,2 2,--pipeline-parallel,2 4,--context-parallel,2 1,--batch,9
tasks
refusals
END
fi
check_done
