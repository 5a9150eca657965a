#!/usr/bin/env bash
# test_ranks.sh -- runs of several ranks: messages between them, the same bits for any number, and
# all end together.
#
#     dev/test/cli/test_ranks.sh build/plain/train_gpt2 [--part K/N] [NAME...]
#     dev/test/cli/test_ranks.sh build/sim/FP32/train_gpt2cu ...    # on the simulated GPU
#
# One line for each check that fails; the last line counts them. Uses test_collectives and the
# library of the same build; for the simulated GPU build/sim/plain/test_collectives. What is about
# MPI, its launcher and its signals, runs under mpirun; the rest without it (ranks.sh).
set -u
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
source dev/test/lib/ranks.sh
source dev/test/lib/cases.sh
cases_begin "$@"
trainer=$program
build=$(dirname "$trainer")
collectives=$build/test_collectives
case $trainer in */train_gpt2cu) collectives=$PWD/build/sim/plain/test_collectives ;; esac
ranks_begin ranks
[ ! $is_gpu ] || name="ranks of GPUs"

if [ $is_gpu ] && ! grep -q ncclCommInitRankConfig "$collectives"; then
    echo "skipped: $name: the build has no NCCL (libnccl-dev of NVIDIA's package repository)"
    check_done
    exit
fi

# Programs of its own: a process that is left cannot be one of another test.
built=$trainer # its path has the precision of a simulated GPU
mkdir programs && cp "$trainer" "$collectives" programs || exit 1
trainer=$work/programs/${trainer##*/}
collectives=$work/programs/${collectives##*/}

end_s=30 # in which a job ends: 60 are promised, and the machine may be busy

# ends_all WHAT STATUS LINE ON COMMAND...: 3 ranks end soon, with one error, whose lines are LINE
# and "    on ON" (empty: no such line). By mpirun with launch=by_mpi.
ends_all() {
    local what=$1 wanted=$2 line=$3 on=$4
    shift 4
    ${launch:-ranks} 3 "$@"
    check "$what: exit status $status, wanted $wanted" [ $status = "$wanted" ]
    check "$what: took $seconds s" [ $seconds -le $end_s ]
    check "$what: said $(grep -c '^error: ' stderr) times" [ "$(grep -c '^error: ' stderr)" = 1 ]
    check "$what: $(grep -m 1 '^error: ' stderr)" grep -q "^error: $line\$" stderr
    if [ -n "$on" ]; then
        check "$what: $(grep -m 1 '^    on ' stderr)" grep -q "^    on $on" stderr
    else
        check "$what: $(grep -m 1 '^    on ' stderr)" [ "$(grep -c '^    on ' stderr)" = 0 ]
    fi
    check "$what: processes are left" none_left "$collectives"
}

test_messages() {
    local n
    for n in 1 2 3; do
        ranks $n "$collectives"
        check "$n ranks: exit status $status, $(head -n 1 stderr)" [ $status = 0 ]
        check "$n ranks: $(cat stdout)" [ "$(cat stdout)" = "test_collectives: ok" ]
    done
    by_mpi 4 "$collectives"
    check "4 ranks: exit status $status, $(head -n 1 stderr)" [ $status = 0 ]
    check "4 ranks: $(cat stdout)" [ "$(cat stdout)" = "test_collectives: ok" ]
}

test_machines() {
    local LLMC_NODES=2
    export LLMC_NODES
    by_mpi 3 "$collectives"
    check "3 ranks on two machines that are one: exit status $status, $(cat stdout)" [ $status = 0 ]
    ranks 4 "$collectives"
    check "4 ranks on two machines that are one: exit status $status, $(cat stdout)" [ $status = 0 ]
    LLMC_NODES=5
    ends_all "too many machines" 2 "LLMC_NODES=5; wanted 1 to 3, the number of processes" "rank 0 of 3" "$collectives"
}

test_errors() {
    ends_all "an error of rank 0" 1 "disk full" "rank 0 of 3" "$collectives" first
    ends_all "an error of all ranks" 1 "disk full" "rank 0 of 3" "$collectives" all
    ends_all "a wrong option" 2 "unknown option --bacth; did you mean --batch?.*" "" "$collectives" fail --bacth 3
    ends_all "ranks that disagree" 1 "the ranks disagree about --seed: 42 on ranks 0 2, 43 on rank 1" "" "$collectives" agree
}

test_errors_by_mpi() {
    local launch=by_mpi
    ends_all "an error of one rank" 1 "disk full" "rank 2 of 3 ($(uname -n), pid [0-9]*)" "$collectives" fail
    ends_all "an error in a thread" 1 "disk full" "rank 2 of 3" "$collectives" thread
    ends_all "the wrong number of processes" 2 "rank 0 of 4 by .*, rank 0 of 3 by MPI; wanted the mpirun of .*" "" \
        bash -c 'exec "$0" fail -pn 4 -pr $OMPI_COMM_WORLD_RANK' "$collectives"
    ends_all "an error with files" 1 ".*llmc_test_.*: is lost" "rank 2 of 3" "$collectives" files
    check "which are removed" [ -z "$(compgen -G "$work/llmc_test_*")" ]
    by_mpi 3 "$collectives" exit
    check "exit() of one rank: exit status $status" [ $status = 1 ]
    by_mpi 3 "$collectives" kill
    check "kill -9 of one rank: exit status $status" [ $status = 137 ]
}

# Who waits says where; who is stopped says nothing.
test_watchdog() {
    local line="has waited [0-9]* s in step 12"
    ranks 3 "$collectives" stuck --timeout 2
    check "a stopped rank: exit status $status, after $seconds s" [ $status = 1 -a $seconds -le $end_s ]
    check "a stopped rank: the others" [ "$(grep -c "^error: rank [01] of 3 (.*) $line, reduce of block 7" stderr)" = 2 ]
    check "a stopped rank: itself" [ "$(grep -c '^error: ' stderr)" = 2 ]
    check "a stopped rank: processes are left" none_left "$collectives"
    ranks 3 "$collectives" slow --timeout 2
    check "a slow rank: exit status $status, after $seconds s" [ $status = 1 -a $seconds -le $end_s ]
    check "a slow rank: itself" grep -q "^error: rank 2 of 3 (.*) $line, loading data" stderr
    ranks 3 "$collectives" alive --timeout 2
    check "ranks that get on: exit status $status, $(head -n 1 stderr)" [ $status = 0 ]
}

test_signal() {
    by_mpi 3 "$collectives" signal
    check "SIGUSR2 to mpirun: exit status $status" [ $status = 75 ]
}

# In a build without MPI, one process runs, and several say what is missing.
test_without_mpi() {
    check "without MPI it compiles" "${CC:-cc}" -std=gnu11 -D_GNU_SOURCE -fopenmp -I"$root" -DCOMM_MPI_IMPLEMENTATION -DGROUP_IMPLEMENTATION \
        -include "$root/llmc/comm/comm_mpi.h" -include "$root/llmc/comm/group.h" "$root/dev/test/comm/test_collectives.c" "$build/libllmc.a" -o without_mpi -lm -lpthread
    ranks 1 ./without_mpi
    check "without MPI, one process: $(cat stdout)" [ "$(cat stdout)" = "test_collectives: ok" ]
    ends_all "without MPI" 2 "3 processes, but this program was built without MPI: scripts/install_deps.sh --mpi.*" "" \
        ./without_mpi
}

# torchrun's environment, but MPI has not started them.
test_without_launcher() {
    RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29400 "$trainer" >stdout 2>stderr
    status=$?
    check "torchrun on CPUs: exit status $status, $(cat stderr)" \
        [ $status = 2 -a "$(grep -c '^error: 2 processes of torchrun: CPU runs with several processes need MPI' stderr)" = 1 ]
}

# ---- training ----

# 20 sequences an update: micro-batches of 3, the last one of 2.
run=(--layers 2 --channels 32 --heads 2 --seq-len 16 --batch 3 --total-batch 320 --steps 6 --save-every 2 --eval-every 3
    --eval-batches 5 --samples 1 --sample-tokens 4 --sample-every 6)

same_model() { check "$3: the same weights" cmp -s "$1/model.safetensors" "$2/model.safetensors"; }
same_log() { check "$3: the same log" [ -n "$(logged "$1")" -a "$(logged "$1")" = "$(logged "$2")" ]; }

# last_loss OUT
last_loss() { logged "$1" | sed -n 's/^val [0-9]* \([0-9.]*\) *$/\1/p' | tail -n 1; }

# near WHAT A B TOLERANCE: relative.
near() { check "$1: $2 and $3" awk -v a="$2" -v b="$3" -v t="$4" 'BEGIN { d = a > b ? a - b : b - a; exit !(a > 0 && d <= t * a) }'; }

test_same_bits() {
    local n
    once trains 1 one "${run[@]}" --zero 2
    check "empty rows are said: $(grep batches: one.txt)" \
        grep -q '^batches: 20 sequences an update in 7 micro-batches, 4.8 % empty$' one.txt
    check "there is a sample" [ -n "$(values sample text one/log.jsonl)" ]
    for n in 2 3; do
        once trains $n of_$n "${run[@]}" --zero 2
    done
    OMP_NUM_THREADS=2 once by_mpi_trains 4 of_4 "${run[@]}" --zero 2
    for n in 2 3 4; do
        same_model one/step_00000006 of_$n/step_00000006 "$n ranks"
        same_log one of_$n "$n ranks"
        check "$n ranks: $(head -n 1 of_$n.txt)" \
            grep -q "^processes: $n on 1 machine (mpirun, .*), rank 0 on $(uname -n); zero 2, shards of $n$" of_$n.txt
        check "$n ranks: $(ls of_$n/step_00000006/optimizer.* | wc -l) parts" [ "$(ls of_$n/step_00000006/optimizer.* | wc -l)" = $n ]
    done
}

same_average() { check "$3: the same average" cmp "$1/model_average.safetensors" "$2/model_average.safetensors"; }

# An update of the first stage has a micro-batch for one rank alone. The ranks divide the average of
# the weights.
test_batches() {
    local stages=("${run[@]}" --batch-schedule 0:48,2:160,4:320 --average ema:0.9 "$@")
    trains 1 one_batches "${stages[@]}" --zero 2
    trains 2 two_batches "${stages[@]}" --zero 2
    same_model one_batches/step_00000006 two_batches/step_00000006 "--batch-schedule, 2 ranks"
    same_log one_batches two_batches "--batch-schedule, 2 ranks"
    same_average one_batches/step_00000006 two_batches/step_00000006 "--batch-schedule, 2 ranks"
    trains 3 three_batches --resume two_batches/step_00000002 --zero 2
    same_model one_batches/step_00000006 three_batches/step_00000006 "--batch-schedule, 2 ranks, then 3"
    trains 2 later_batches --resume three_batches/step_00000004 --zero 2
    same_model one_batches/step_00000006 later_batches/step_00000006 "--batch-schedule, then 2 again"
    same_average one_batches/step_00000006 later_batches/step_00000006 "--batch-schedule, then 2 again"
}

# The last micro-batches of an update are for some of the processes only.
test_lengths() {
    local stages=("${run[@]}" --seq-len-schedule 0:4,2:8,4:16 --doc-mask on "$@")
    trains 1 one_lengths "${stages[@]}" --zero 2
    trains 3 three_lengths "${stages[@]}" --zero 2
    same_model one_lengths/step_00000006 three_lengths/step_00000006 "--seq-len-schedule, 3 ranks"
    same_log one_lengths three_lengths "--seq-len-schedule, 3 ranks"
    trains 2 two_lengths --resume three_lengths/step_00000002 --zero 2
    same_model one_lengths/step_00000006 two_lengths/step_00000006 "--seq-len-schedule, 3 ranks, then 2"
}

# Codes of blocks of 64 want as many channels.
test_elements() {
    local name=$1 wide=(--layers 2 --channels 64 "${run[@]:4}" --zero 2)
    shift
    trains 1 "one_$name" "${wide[@]}" "$@"
    trains 3 "three_$name" "${wide[@]}" "$@"
    same_model "one_$name/step_00000006" "three_$name/step_00000006" "$*, 3 ranks"
    trains 2 "two_$name" --resume "three_$name/step_00000002" --zero 2
    same_model "one_$name/step_00000006" "two_$name/step_00000006" "$*, 3 ranks, then 2"
    differs_from_adamw "one_$name"
}

# Rules of whole matrices gather what the processes have of them.
test_matrices() {
    local optimizer=$1
    trains 1 "one_$optimizer" "${run[@]}" --optimizer "$@" --zero 2
    trains 4 "four_$optimizer" "${run[@]}" --optimizer "$@" --zero 2
    same_log "one_$optimizer" "four_$optimizer" "--optimizer $optimizer, 4 ranks"
    trains 2 "two_$optimizer" --resume "four_$optimizer/step_00000002" --zero 2
    same_model "one_$optimizer/step_00000006" "two_$optimizer/step_00000006" "--optimizer $optimizer, 4 ranks, then 2"
    trains 3 "three_$optimizer" --resume "two_$optimizer/step_00000004" --zero 2
    same_model "one_$optimizer/step_00000006" "three_$optimizer/step_00000006" "--optimizer $optimizer, then 3"
    differs_from_adamw "one_$optimizer"
}

differs_from_adamw() {
    once trains 1 one "${run[@]}" --zero 2
    check "$1 is no AdamW" [ "$(logged "$1")" != "$(logged one)" ]
}

test_adafactor_stages() {
    trains 3 adafactor_0 "${run[@]}" --optimizer adafactor --zero 0
    trains 3 adafactor_1 "${run[@]}" --optimizer adafactor --zero 1
    same_model adafactor_0/step_00000006 adafactor_1/step_00000006 "--optimizer adafactor, stages 0 and 1"
    check "stage 0 of adafactor has one part" [ "$(ls adafactor_0/step_00000006/optimizer.*)" = adafactor_0/step_00000006/optimizer.1of1.safetensors ]
}

# in_files CHECKPOINT COUNT: its weights are in COUNT files, with an index.
in_files() {
    check "$1: $(ls "$1" | grep -c '^model')" [ "$(ls "$1" | grep '^model')" = \
        "$(for f in $(seq "$2"); do printf 'model-%05d-of-%05d.safetensors\n' "$f" "$2"; done; echo model.safetensors.index.json)" ]
}

# Tasks and perplexity of any number of ranks, even more than there are rows for.
fixtures=$root/dev/ref/fixtures/tasks
evaluates=(--steps 0 --model "$fixtures/model.bin" --tokenizer "$fixtures/tokenizer.json")
tasks=("${evaluates[@]}" --batch 4 --tasks "$fixtures/hellaswag.jsonl" --perplexity tokens.bin --stride 40
    --data-format nanogpt)
printf '%b' "$(for n in {1..700}; do printf '\\x%02x\\x00' $((n * n % 251)); done)" >tokens.bin

test_tasks() {
    local n
    for n in 1 2 3; do
        once trains $n tasks_$n "${tasks[@]}" "$@"
    done
    for n in 2 3; do
        check "$n ranks: the same scores: $(grep -c '"kind":"task"' tasks_$n/log.jsonl)" \
            cmp <(grep '"kind":"task"' tasks_1/log.jsonl) <(grep '"kind":"task"' tasks_$n/log.jsonl)
    done
    check "there are some" [ "$(grep -c '"kind":"task"' tasks_1/log.jsonl)" = 2 ]
}

test_other_tasks() {
    mkdir -p tasks_of_{0,1} && cp "$fixtures/choices.jsonl" tasks_of_0
    sed 's/"gold": 1/"gold": 0/' "$fixtures/choices.jsonl" >tasks_of_1/choices.jsonl
    ranks 2 bash -c 'cd tasks_of_$OMPI_COMM_WORLD_RANK && exec "$@"' _ "$trainer" "${evaluates[@]}" \
        --tasks choices.jsonl "$@"
    check "other tasks: exit status $status, $(head -n 1 stderr)" [ $status = 1 ]
    check "other tasks: $(head -n 1 stderr)" grep -q '^error: the ranks disagree about the files of --tasks (checksum): ' stderr
}

# Each rank opens the tokenizer, the schedule and the prompts for itself.
test_other_files() {
    local rank what options start=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --samples 0 --eval-every 0)
    seq 1 400 >files.txt
    good "a model" "${start[@]}" --train-data files.txt --tokenizer bpe:260 --steps 2 --out files
    for rank in 0 1; do
        mkdir files_of_$rank && cp files/tokenizer.json files_of_$rank/own.json && cp files/tokenizer.json files_of_$rank
        echo "{\"prompt\":\"$rank\"}" >files_of_$rank/prompts.jsonl
        echo "0 one $((rank + 1)) other 1" >files_of_$rank/weights
    done
    echo '{"eos_token":"x"}' >files_of_1/tokenizer_config.json # beside the second one
    for what in tokenizer prompts data-schedule; do
        case $what in
            tokenizer) options="${start[*]} --train-data $work/files.txt --tokenizer own.json --steps 2 --out $work/never" ;;
            prompts) options="--model $work/files --prompts prompts.jsonl --tensor-parallel 2 --tokens 2" ;;
            data-schedule) options="${start[*]} --train-data one=$work/files.txt,other=$work/files.txt --data-schedule weights --steps 2" ;;
        esac
        ranks 2 bash -c "cd files_of_\$OMPI_COMM_WORLD_RANK && exec '$trainer' $options"
        check "other $what: exit status $status, $(head -n 1 stderr)" [ $status = 1 ]
        check "other $what: $(grep -m 1 '^error' stderr)" grep -q "^error: the ranks disagree about the files of --$what (checksum): " stderr
    done
}

# Saved by 4, continued by 2, which write three files of weights, then 3; by one process.
test_elastic() {
    local n
    once trains 1 one "${run[@]}" --zero 2
    for n in 2 3 4; do
        once trains $n of_$n "${run[@]}" --zero 2
    done
    trains 2 elastic_2 --resume of_4/step_00000002 --model-file-gb 0.00006
    in_files elastic_2/step_00000004 3
    trains 3 elastic_3 --resume elastic_2/step_00000004 --model-file-gb 5
    same_model one/step_00000006 elastic_3/step_00000006 "4 ranks, then 2, then 3"
    trains 1 elastic_1 --resume of_3/step_00000004 --zero 2
    same_model one/step_00000006 elastic_1/step_00000006 "3 ranks, then 1"
    trains 3 elastic_other --resume of_2/step_00000002 --zero 1 --batch 2
    near "another stage and micro-batch" "$(logged one | grep '^train 6' | cut -d ' ' -f 3)" \
        "$(logged elastic_other | grep '^train 6' | cut -d ' ' -f 3)" 1e-5
    trains 3 old --resume "$root/dev/ref/fixtures/checkpoint_1of1"
}

# first_loss OUT: of the validation before the first update.
first_loss() { logged "$1" | sed -n 's/^val 0 \([0-9.]*\) *$/\1/p'; }

# first_norm OUT: of the gradients of the first update.
first_norm() { logged "$1" | sed -n 's/^train 1 .*"norm":\([^,]*\),.*/\1/p'; }

# context_like ONE N C OPTIONS...: N ranks, C of them for each sequence, train like the single
# process of ONE: the forward pass has the same bits. Gradients are summed in another order: the norm
# differs by some 2^-23, and after 6 steps losses by a few roundings, as with tensor ranks.
context_like() {
    local one=$1 n=$2 c=$3 out=$1_$2_$3
    shift 3
    trains $n "$out" "$@" --context-parallel $c
    check "$out: the first validation: $(first_loss "$out")" [ -n "$(first_loss "$one")" -a "$(first_loss "$one")" = "$(first_loss "$out")" ]
    near "$out: the first norm" "$(first_norm "$one")" "$(first_norm "$out")" 1e-7
    near "$out: the last validation" "$(last_loss "$one")" "$(last_loss "$out")" 1e-6
    near "$out: the last step" "$(logged "$one" | grep '^train 6' | cut -d ' ' -f 3)" \
        "$(logged "$out" | grep '^train 6' | cut -d ' ' -f 3)" 1e-6
}

context=(--layers 2 --channels 64 --heads 4 --batch 2 --steps 6 --save-every 2 --eval-every 3 --eval-batches 5 --samples 1
    --sample-tokens 4 --sample-every 6)

# Sequences divided among ranks.
test_context() {
    local long=("${context[@]}" --seq-len 48 --total-batch 960)
    trains 1 long "${long[@]}"
    context_like long 2 2 "${long[@]}"
    check "the first line: $(head -n 1 stdout)" grep -q '; tensor 1, context 2, data 1, pipeline 1; zero 2' stdout
    check "long_2_2: a sample" grep -q '^step 6/6 | sample:$' stdout
    context_like long 4 2 "${long[@]}" --zero 1
    context_like long 4 4 "${long[@]}"
}

# With documents, rotary positions, windows, fewer heads of keys.
test_context_documents() {
    local documents=("${context[@]}" --seq-len 48 --total-batch 960 --arch qwen3 --kv-heads 2 --window 11 --doc-mask on --pack bestfit)
    trains 1 documents "${documents[@]}"
    context_like documents 2 2 "${documents[@]}"
}

test_context_bf16() {
    local tall=("${context[@]}" --seq-len 128 --total-batch 1280 --matmul bf16)
    trains 1 rounded "${tall[@]}"
    trains 2 rounded_2 "${tall[@]}" --context-parallel 2
    check "--matmul bf16: $(first_loss rounded_2)" [ -n "$(first_loss rounded)" -a "$(first_loss rounded)" = "$(first_loss rounded_2)" ]
}

# Scales are those of a token's row, so they do not depend on who has the token.
test_context_fp8() {
    trains 1 eight "${context[@]}" --seq-len 48 --total-batch 960 --matmul fp8
    trains 2 eight_2 "${context[@]}" --seq-len 48 --total-batch 960 --matmul fp8 --context-parallel 2
    check "--matmul fp8: $(first_loss eight_2)" [ -n "$(first_loss eight)" -a "$(first_loss eight)" = "$(first_loss eight_2)" ]
    near "--matmul fp8 and 2 chunks" "$(last_loss eight)" "$(last_loss eight_2)" 1e-3
}

test_context_tasks() {
    once trains 1 tasks_1 "${tasks[@]}"
    trains 2 context_tasks "${tasks[@]}" --context-parallel 2
    check "the same scores: $(grep -c '"kind":"task"' context_tasks/log.jsonl)" \
        cmp <(grep '"kind":"task"' tasks_1/log.jsonl) <(grep '"kind":"task"' context_tasks/log.jsonl)
}

# Ranks that cut the matrices of a layer add in another order, so the last bits differ: by a few
# roundings of fp32 in 6 steps. Data ranks keep the bits.
wide=(--layers 2 --channels 64 --heads 4 "${run[@]:6}")

# like_one WHAT NAME TOLERANCE OPTIONS...: one process, and two tensor ranks.
like_one() {
    local what=$1 name=$2 tolerance=$3
    shift 3
    trains 1 "$name.1" "$@"
    trains 2 "$name.2" "$@" --tensor-parallel 2
    near "$what, 2 tensor ranks: loss" "$(last_loss "$name.1")" "$(last_loss "$name.2")" "$tolerance"
    near "$what, 2 tensor ranks: norm" "$(first_norm "$name.1")" "$(first_norm "$name.2")" "$tolerance"
}

test_tensor() {
    local n
    once trains 1 whole "${wide[@]}" --zero 2
    for n in 2 4; do
        once trains $n tensor_$n "${wide[@]}" --zero 2 --tensor-parallel $n
        near "$n tensor ranks: loss" "$(last_loss whole)" "$(last_loss tensor_$n)" 1e-6
        near "$n tensor ranks: norm" "$(first_norm whole)" "$(first_norm tensor_$n)" 1e-6
    done
    check "they cut matrices" [ "$(logged whole)" != "$(logged tensor_2)" ]
}

test_tensor_in_grid() {
    once trains 1 whole "${wide[@]}" --zero 2
    once trains 2 tensor_2 "${wide[@]}" --zero 2 --tensor-parallel 2
    by_mpi_trains 4 tensor_data "${wide[@]}" --zero 2 --tensor-parallel 2
    same_model tensor_2/step_00000006 tensor_data/step_00000006 "2 tensor ranks, 2 data ranks"
    same_log tensor_2 tensor_data "2 tensor ranks, 2 data ranks"
    trains 4 tensor_context "${wide[@]}" --zero 2 --tensor-parallel 2 --context-parallel 2
    near "2 tensor ranks and 2 chunks" "$(last_loss whole)" "$(last_loss tensor_context)" 1e-6
}

test_tensor_zero() {
    trains 2 "data_$1" "${wide[@]}" --zero "$1"
    trains 4 "tensor_data_$1" "${wide[@]}" --zero "$1" --tensor-parallel 2
    near "2 of 4 ranks, --zero $1: loss" "$(last_loss "data_$1")" "$(last_loss "tensor_data_$1")" 1e-6
    near "2 of 4 ranks, --zero $1: norm" "$(first_norm "data_$1")" "$(first_norm "tensor_data_$1")" 1e-6
}

test_tensor_of() { like_one "${*:2}" tensor_of "$1" "${wide[@]}" "${@:2}"; }

# Blocks of 64 want wide parts.
test_tensor_wide() {
    like_one adamw8bit eight_bits 1e-5 --layers 1 --channels 256 --heads 4 "${run[@]:6}" --optimizer adamw8bit
}

# Matrices that ranks cut are updated as whole ones; another number of ranks continues with their
# state.
test_tensor_matrices() {
    local name=$1 base=("${wide[@]}" --zero 2 "${@:2}")
    trains 1 "${name}_1" "${base[@]}"
    trains 2 "${name}_2" "${base[@]}" --tensor-parallel 2
    trains 4 "${name}_4" "${base[@]}" --tensor-parallel 2
    same_model "${name}_2/step_00000006" "${name}_4/step_00000006" "$name, 2 tensor ranks, 2 data ranks"
    same_log "${name}_2" "${name}_4" "$name, 2 tensor ranks, 2 data ranks"
    near "$name, 2 tensor ranks" "$(last_loss "${name}_1")" "$(last_loss "${name}_2")" 1e-5
    trains 2 "${name}_on" --resume "${name}_4/step_00000002" --tensor-parallel 2 --zero 2
    same_model "${name}_2/step_00000006" "${name}_on/step_00000006" "$name, 2 of 4 ranks, then 2"
    trains 2 "${name}_to_1" --resume "${name}_4/step_00000002" --tensor-parallel 1 --zero 2
    near "$name, 2 tensor ranks, then 1" "$(last_loss "${name}_1")" "$(last_loss "${name}_to_1")" 1e-5
}

# Saved by 4 tensor ranks, continued by 3 data ranks, then by 2 tensor ranks.
test_tensor_elastic() {
    once trains 1 whole "${wide[@]}" --zero 2
    once trains 4 tensor_4 "${wide[@]}" --zero 2 --tensor-parallel 4
    trains 3 data_3 --resume tensor_4/step_00000002 --tensor-parallel 1
    check "fewer tensor ranks: $(grep '^note' stdout)" \
        grep -q '^note: --tensor-parallel 1, was 4: the last bits change from here on$' stdout
    trains 2 data_3_2 --resume data_3/step_00000004 --tensor-parallel 2 --zero 2
    near "4 tensor ranks, then 1, then 2" "$(last_loss whole)" "$(last_loss data_3_2)" 1e-6
}

# Each model file is written by another rank.
test_tensor_files() {
    once trains 1 whole "${wide[@]}" --zero 2
    trains 4 in_files --resume whole/step_00000002 --tensor-parallel 2 --model-file-gb 0.0001
    check "$(ls in_files/step_00000006 | tr '\n' ' ')" [ "$(ls in_files/step_00000006/model-*.safetensors | wc -l)" = 3 ]
    trains 2 in_files_2 --resume in_files/step_00000004 --tensor-parallel 2 --zero 2
    for file in in_files/step_00000006/model-*.safetensors; do
        check "$file" cmp -s "$file" "in_files_2/step_00000006/${file##*/}"
    done
    ranks 2 "$trainer" --model whole --steps 0 --tensor-parallel 2 --export-llmc two.bin --export-gguf two.gguf
    "$trainer" --model whole --steps 0 --export-llmc one.bin >/dev/null
    check "exported by 2 ranks: exit status $status" cmp -s one.bin two.bin
}

test_tensor_generate() {
    local options
    once trains 1 whole "${wide[@]}" --zero 2
    for options in "" "--quantize q8_0"; do
        "$trainer" --model whole --prompt One --temperature 0 --tokens 12 $options >text.1 2>/dev/null
        ranks 2 "$trainer" --model whole --prompt One --temperature 0 --tokens 12 --tensor-parallel 2 $options
        check "text of 2 ranks, $options: $(head -n 1 stdout), $(head -n 1 stderr)" \
            [ $status = 0 -a -s text.1 -a "$(tr -s ' \r\n' ' ' <stdout)" = "$(tr -s ' \r\n' ' ' <text.1)" ]
    done
    ranks 2 "$trainer" --model whole --interactive on --tensor-parallel 2
    check "--interactive: exit status $status, $(head -n 1 stderr)" [ $status = 2 ]
}

# All ranks end early at the same step, as one process does, and keep the same checkpoint.
test_early() {
    local n
    { head -c 800 /dev/zero | tr '\0' b; head -c 4000 /dev/zero | tr '\0' a; } >turn.txt
    head -c 300 /dev/zero | tr '\0' b >turned.txt
    for n in 1 2; do
        trains $n early_$n --layers 1 --channels 16 --heads 2 --seq-len 16 --batch 1 --total-batch 32 --samples 0 --zero 2 --shuffle off \
            --train-data turn.txt --val-data turned.txt --lr 0.01 --steps 100 --eval-every 5 --patience 3 --keep-best on --keep 1
    done
    check "ended early: $(grep '^stopped' stdout)" grep -q '^stopped by --patience 3 after step [1-9][05]: ' stdout
    same_log early_1 early_2 "--patience"
    check "the same checkpoints: $(cd early_1 && echo step_*), $(cd early_2 && echo step_*)" \
        [ "$(cd early_1 && echo step_*)" = "$(cd early_2 && echo step_*)" ]
    check "two" [ "$(cd early_2 && ls -d step_* | wc -l)" = 2 ]
}

# A rank that differs from the others, or another run in the same directory.
test_disagreement() {
    local only run=("${run[@]}" --out other)
    by_mpi 1 "$trainer" "${run[@]}" --seed 7 : 2 "$trainer" "${run[@]}"
    check "another seed: exit status $status" [ $status = 1 ]
    check "another seed: $(head -n 1 stderr)" grep -q '^error: the ranks disagree about --seed: 7 on rank 0, 42 on ranks 1 2$' stderr
    cp "$trainer" other_program && echo >>other_program
    ranks 2 "$trainer" "${run[@]}" : 1 ./other_program "${run[@]}"
    check "another program: exit status $status" [ $status = 1 ]
    check "another program: $(head -n 1 stderr)" grep -q '^error: the ranks disagree about the program' stderr
    ranks 2 "$trainer" "${run[@]}" : 1 "$trainer" "${run[@]}" --zero 1
    check "another stage: $(head -n 1 stderr)" grep -q '^error: the ranks disagree about --zero: auto on ranks 0 1, 1 on rank 2$' stderr
    for only in "--plan on" "--fit 1"; do
        ranks 2 "$trainer" "${run[@]}" : 1 "$trainer" "${run[@]}" ${only% on}
        check "$only on one rank: exit status $status, after $seconds s" [ $status = 1 -a $seconds -le $end_s ]
        check "$only on one rank: $(head -n 1 stderr)" \
            grep -q "^error: the ranks disagree about ${only% *}: .* on ranks 0 1, ${only#* } on rank 2\$" stderr
    done
    ranks 2 "$trainer" "${run[@]}" : 1 "$trainer" "${run[@]/other/another}"
    check "another directory: $(head -n 1 stderr)" \
        grep -q '^error: the ranks disagree about --out, a directory .*: is there on ranks 0 1, is missing on rank 2$' stderr
    check "and nothing is left there: $(ls -A other)" [ -z "$(compgen -G 'other/.probe*')" ]
    refused_by_all "--zero 3" "--zero 3 is for GPUs" "${run[@]}" --zero 3
    refused_by_all "--tensor-parallel 2" "--tensor-parallel 2, 3 processes" "${run[@]}" --tensor-parallel 2
}

# refused_by_all WHAT ERROR OPTIONS...: rank 0 of 3 prints the error, and all end by themselves, with
# its status.
refused_by_all() {
    local what=$1 error=$2 rank pids=() statuses=()
    shift 2
    for rank in 0 1 2; do
        OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_SIZE=3 \
            LLMC_RANKS_FILE=$messages LD_PRELOAD=$stand_in "$trainer" "$@" >stdout 2>stderr.$rank </dev/null &
        pids+=($!)
    done
    for rank in 0 1 2; do
        wait "${pids[rank]}"
        statuses+=($?)
    done
    rm -f "$messages"
    check "$what: exit statuses ${statuses[*]}" [ "${statuses[*]}" = "2 2 2" ]
    check "$what: $(cat stderr.[012])" [ "$(grep -c "^error: $error" stderr.0)" = 1 -a "$(cat stderr.[012] | grep -c '^error: ')" = 1 ]
}

# differs WHAT LINE VARIABLE OPTIONS...: the last of 3 ranks (of $sound + 1) has a fault (fault.c),
# and all end with LINE.
differs() {
    local what=$1 line=$2 fault=$3
    shift 3
    ranks ${sound:-2} "$trainer" "$@" : 1 env LD_PRELOAD="$PWD/fault.so:$stand_in" "$fault" "$trainer" "$@"
    check "$what: exit status $status" [ $status = 1 ]
    check "$what: $(grep -m 1 '^error' stderr)" grep -q "^error: $line" stderr
}

build_fault() { [ -e fault.so ] || "${CC:-cc}" -shared -fPIC "$root/dev/test/lib/fault.c" -o fault.so -ldl; }

# A rank that starts like the others, and goes astray.
test_drift() {
    local run=(--layers 2 --channels 32 --heads 2 --seq-len 16 --batch 3 --total-batch 320 --steps 6 --zero 0 --out drift)
    build_fault
    differs "other mathematics" "the ranks disagree about results of the mathematics library" FAULT_POW_AT=0.37 "${run[@]}" --eval-every 0
    differs "other weights at a validation" \
        "the ranks disagree about the parameters after step 4 (checksum): [0-9a-f]* on ranks 0 1, [0-9a-f]* on rank 2" \
        FAULT_POW_AT=3 "${run[@]}" --eval-every 4 --eval-batches 1
    differs "other weights at a save" "the ranks disagree about the parameters after step 6" FAULT_POW_AT=3 "${run[@]}" --eval-every 0
    check "and it is not saved" [ ! -e drift/step_00000006 ]
    differs "another learning rate" "step 5: rank 2 reached a different verdict on the previous step than rank 0" FAULT_COS_FROM=36 "${run[@]}" --eval-every 0
}

# byte_of TENSOR OUT: where the tensor begins in the model of step 1.
byte_of() {
    local file=$2/step_00000001/model.safetensors
    local header
    header=$(od -An -t u8 -N 8 "$file")
    echo $((8 + header + $(head -c $((8 + header)) "$file" | grep -ao "\"$1\":{[^}]*}" | sed 's/.*"data_offsets": *\[\([0-9]*\).*/\1/')))
}

# A rank whose copy of parameters differs from those of a tensor, a context and a pipeline group.
test_drift_in_grid() {
    local sound=1 run=(--layers 2 --channels 32 --heads 2 --seq-len 16 --batch 2 --total-batch 320 --steps 6 --zero 0 --out drift
        --eval-every 4 --eval-batches 1)
    build_fault
    differs "other weights in a tensor group" \
        "the ranks disagree about the parameters that tensor ranks do not cut after step 4 (checksum): [0-9a-f]* on rank 0 (tensor 0), [0-9a-f]* on rank 1 (tensor 1)" \
        FAULT_POW_AT=3 "${run[@]}" --tensor-parallel 2
    differs "other weights in a context group" \
        "the ranks disagree about the parameters after step 4 (checksum): [0-9a-f]* on rank 0 (context 0), [0-9a-f]* on rank 1 (context 1)" \
        FAULT_POW_AT=3 "${run[@]}" --context-parallel 2
    good "a model" "${run[@]:0:10}" --steps 1 --samples 0 --out two_layers
    export FAULT_BYTE=$(($(byte_of transformer.wte.weight two_layers) + 4))
    differs "a bit of wte in the last stage" \
        "the ranks disagree about wte of the first and the last stage after step 0 (checksum): [0-9a-f]* on rank 0 (stage 0), [0-9a-f]* on rank 1 (stage 1)" \
        FAULT_MAP=two_layers "${run[@]}" --model two_layers --pipeline-parallel 2
    unset FAULT_BYTE
}

# A rank that starts from other weights: in memory, or from another copy of the model on its disk.
test_other_weights() {
    local how rank
    build_fault
    seq 1 400 >start.txt
    for rank in 0 1; do
        good "a model" --layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --train-data start.txt --steps 2 --samples 0 --seed $rank --out start_$rank
        mkdir disk_$rank && cp -r start_$rank/step_00000002 disk_$rank/m && rm disk_$rank/m/state.json
    done
    for how in "--train-data $work/start.txt --eval-every 0 --zero 2 --steps 3 --out $work/mixture" "--steps 0 --perplexity $work/start.txt"; do
        # shellcheck disable=SC2086
        differs "other weights in memory" "the ranks disagree about the parameters after step 0 (checksum)" FAULT_MAP=model.safetensors \
            --model disk_0/m --samples 0 $how
        ranks 2 bash -c "cd disk_\$OMPI_COMM_WORLD_RANK && exec '$trainer' --model m --samples 0 $how"
        check "other files: exit status $status" [ $status = 1 ]
        check "other files: $(grep -m 1 '^error' stderr)" grep -q '^error: the ranks disagree about the files of --model (checksum)' stderr
    done
    check "nothing is saved" [ ! -e mixture/step_00000003 ]
}

# A rank that cannot write into --out, but will have to.
test_read_only() {
    local run=(--layers 2 --channels 32 --heads 2 --seq-len 16 --batch 3 --total-batch 320 --steps 1000000 --samples 0 --eval-every 0 --out read_only)
    build_fault
    ranks 2 "$trainer" "${run[@]}" : 1 env LD_PRELOAD="$PWD/fault.so:$stand_in" FAULT_PATH=.probe FAULT_AT=1 "$trainer" "${run[@]}"
    check "a rank that cannot save: exit status $status" [ $status = 1 ]
    check "it says so: $(grep -m 1 '^error' stderr)" grep -q '^error: read_only: cannot save there: No space left on device' stderr
    check "before the first step" [ "$(grep -c '"train"' read_only/log.jsonl 2>/dev/null)" = "" ]
}

# A rank whose forward passes take long.
test_slow_rank() {
    local run=(--layers 1 --channels 32 --heads 2 --seq-len 16 --batch 1 --total-batch 48 --steps 60 --samples 0 --eval-every 0)
    build_fault
    ranks 2 "$trainer" "${run[@]}" : 1 env LD_PRELOAD="$PWD/fault.so:$stand_in" FAULT_LOG_US=100 "$trainer" "${run[@]}"
    check "a slow rank: exit status $status, $(cat stderr)" [ $status = 0 ]
    check "a slow rank: $(grep note: stdout)" \
        [ "$(grep -c "^note: rank 2 ($(uname -n)) computes [0-9]* % slower than the median, and all wait for it" stdout)" = 1 ]
}

# begins OUT N COMMAND...: in the background, until its first checkpoint is there; sets `process`,
# that of mpirun.
begins() {
    local out=$1 n=$2 i
    shift 2
    set -m
    timeout 240 mpirun --oversubscribe --bind-to none -n "$n" "$@" --out "$out" >stdout 2>stderr </dev/null &
    process=$!
    set +m
    for i in $(seq 1200); do
        [ -z "$(compgen -G "$out/step_*/state.json")" ] || return 0
        sleep 0.1
    done
    check "$out: no checkpoint after 120 s" false
}

# ended WHAT STATUS: what `begins` has begun ends with this status, within end_s.
ended() {
    local begin=$SECONDS
    wait $process
    status=$?
    check "$1: exit status $status, wanted $2" [ $status = "$2" ]
    check "$1: took $((SECONDS - begin)) s" [ $((SECONDS - begin)) -le $end_s ]
    check "$1: processes are left" none_left "$trainer"
}

rank_pid() { pgrep -f "^$trainer" | sed -n "$1p"; }

long=(--layers 2 --channels 32 --heads 2 --seq-len 16 --batch 3 --total-batch 320 --steps 100000 --save-every 3 --keep 2
    --eval-every 0 --samples 0)

# continues OUT: the last checkpoint is complete, and a run with another number of ranks resumes
# from it.
continues() {
    ranks 2 "$trainer" --out "$1" --resume on --max-hours 0.0001
    check "$1 continues: exit status $status, $(grep -m 1 '^error' stderr)" [ $status = 75 ]
    check "$1 continues: $(grep '^resume: from' stdout)" grep -q "^resume: from $1/step_" stdout
}

test_signals() {
    begins term 3 "$trainer" "${long[@]}"
    kill -TERM "$(rank_pid 2)"
    ended "SIGTERM to one rank" 75
    check "SIGTERM to one rank: $(tail -n 1 stdout)" grep -q 'SIGTERM.*; the same command with --resume on continues' stdout
    continues term
    begins usr2 2 "$trainer" "${long[@]}"
    kill -USR2 "$(pgrep -P $process mpirun || echo $process)"
    ended "SIGUSR2 to mpirun" 75
    check "SIGUSR2 to mpirun: $(tail -n 1 stdout)" grep -q 'SIGUSR2.*--resume on continues' stdout
}

test_failures() {
    begins killed 3 "$trainer" "${long[@]}"
    kill -KILL "$(rank_pid 3)"
    ended "kill -9 of one rank" 137
    continues killed
    begins stopped 3 "$trainer" "${long[@]}" --timeout 1
    kill -STOP "$(rank_pid 2)"
    ended "kill -STOP of one rank" 1
    check "kill -STOP of one rank: $(grep -m 1 '^error' stderr)" grep -q '^error: rank [02] of 3 .* has waited [0-9]* s in step' stderr
    continues stopped
}

test_full_disk() {
    by_mpi 3 bash -c '[ $OMPI_COMM_WORLD_RANK != 1 ] || ulimit -f 12; exec "$0" "$@"' "$trainer" "${long[@]}" --out full
    check "no room for one rank's file: exit status $status" [ $status = 1 ]
    check "no room for one rank's file: $(grep -m 1 '^error' stderr)" grep -q '^error: full/step_00000003.part/optimizer.2of3.safetensors: .*File too large' stderr
    check "and the rank is named: $(grep -m 1 '^    on' stderr)" grep -q '^    on rank 1 of 3' stderr
    check "and no checkpoint is left" [ -z "$(compgen -G 'full/step_*/state.json')" ]
}

# ---- GPUs ----

test_gpu_messages() {
    local n streams
    for streams in eager lazy random; do
        for n in 2 3 4; do
            CUSIM_STREAMS=$streams $([ $n-$streams = 3-eager ] && echo by_mpi || echo ranks) $n "$collectives"
            check "$n GPUs, $streams: exit status $status, $(head -n 1 stderr)" [ $status = 0 ]
            check "$n GPUs, $streams: $(cat stdout)" [ "$(cat stdout)" = "test_collectives: ok" ]
        done
    done
    for streams in lazy random; do # as on a GPU that does one operation of NCCL at a time
        for n in "" NCCL_LAUNCH_ORDER_IMPLICIT=0 CUSIM_NCCL_VERSION=22501; do
            CUSIM_NCCL_SERIAL=2 CUSIM_NCCL_TIMEOUT=10 CUSIM_STREAMS=$streams ranks 4 env $n "$collectives"
            check "one operation at a time, $streams $n: exit status $status, $(head -n 1 stderr)" [ $status = 0 ]
        done
    done
}

test_gpu_errors() {
    ends_all "one GPU for all" 1 "ranks 0 and 1 have the same GPU, 0000:03:00.0 of $(uname -n); wanted one GPU for each process" \
        "rank 0 of 3" "$collectives" device 2
    CUSIM_DEVICES=2 ends_all "too few GPUs" 1 "3 processes on $(uname -n), which has 2 GPUs; wanted one GPU for each process" \
        "rank 0 of 3" "$collectives"
    CUSIM_NCCL_FAULT=1:2:error ends_all "an error of NCCL" 1 "NCCL: remote process exited or there was a network error.*" \
        "rank 1 of 3" "$collectives" check
    CUSIM_NCCL_FAULT=1:2:die by_mpi 3 "$collectives" check
    check "kill -9 in NCCL: exit status $status" [ $status = 137 ]
}

# stuck_gpus WHAT COMMAND...: all three ranks wait, and say for what.
stuck_gpus() {
    local what=$1
    shift
    by_mpi 3 "$@"
    check "$what: exit status $status, after $seconds s" [ $status = 1 -a $seconds -le $end_s ]
    check "$what: rank 0" grep -q "^error: rank 0 of 3 (.*) has waited [0-9]* s in step 12, the GPU's work" stderr
    check "$what: processes are left" none_left "$collectives"
}

test_gpu_watchdog() {
    stuck_gpus "a collective that others do not call" "$collectives" wait --timeout 2
    check "the others: $(grep -c '^error: ' stderr)" \
        [ "$(grep -c '^error: rank [12] of 3 (.*) has waited [0-9]* s in step 12, reduce of block 7' stderr)" = 2 ]
    CUSIM_NCCL_FAULT=1:1:hang stuck_gpus "a GPU that hangs" "$collectives" check --timeout 2
}

# 10 sequences an update, in 5 micro-batches: uneven for 2 and 4 GPUs. Runs with the same cache have
# the same algorithms of matmuls. Stages add in other orders: TF32 would round the last bits up to
# its own.
gpu_run=(--layers 2 --channels 32 --heads 2 --seq-len 16 --batch 2 --total-batch 160 --steps 4 --samples 1 --sample-tokens 4
    --sample-every 4 --eval-batches 3 --save-every 2 --eval-every 2 --tf32 off)

train_one() { once trains 1 one "${gpu_run[@]}" --zero 2; }

test_gpu_same_bits() {
    local n zero=$1
    train_one
    [ "$zero" = 2 ] || once by_mpi_trains 2 "z${zero}_2" "${gpu_run[@]}" --zero "$zero"
    for n in 1 2 4; do
        once trains $n "z${zero}_$n" "${gpu_run[@]}" --zero "$zero"
        same_model one/step_00000004 "z${zero}_$n/step_00000004" "--zero $zero, $n GPUs"
        same_log one "z${zero}_$n" "--zero $zero, $n GPUs"
    done
    CUSIM_STREAMS=lazy CUSIM_ORDER=random trains 2 "lazy_$zero" "${gpu_run[@]}" --zero "$zero"
    same_model one/step_00000004 "lazy_$zero/step_00000004" "--zero $zero, lazy streams"
    CUSIM_STREAMS=random trains 3 "random_$zero" "${gpu_run[@]}" --zero "$zero" --graph off
    same_model one/step_00000004 "random_$zero/step_00000004" "--zero $zero, streams in any order, no graphs"
    check "the first line: $(head -n 1 stdout)" \
        grep -q "^processes: 3 on 1 machine (mpirun, .*), rank 0 on $(uname -n); zero $zero, shards of 3$" stdout
}

# The last update is still collected when the model is closed.
test_gpu_without_files() {
    CUSIM_STREAMS=lazy ranks 2 "$trainer" --layers 2 --channels 32 --heads 2 --seq-len 16 --batch 2 --total-batch 160 --steps 2 \
        --samples 0 --eval-every 0
    check "without files: exit status $status, $(head -n 1 stderr)" [ $status = 0 ]
}

# NCCL takes 64 MiB here, at its first operations: a plan that leaves it out fills the GPU, and the
# run ends in an allocation.
test_gpu_memory() {
    local mib=155 full=(--layers 4 --channels 64 --heads 2 --seq-len 64 --batch 16 --steps 1 --samples 0 --eval-every 0 --autotune off
        --graph off) # with graphs 256 MiB more stay free
    case $built in */BF16/*) mib=149 ;; esac
    CUSIM_MEMORY_MIB=$mib ranks 2 "$trainer" "${full[@]}" --out memory
    check "memory beside NCCL: exit status $status, $(head -n 1 stderr)" [ $status = 0 ]
    check "NCCL's is said: $(grep NCCL stdout)" grep -q '^NCCL [0-9.]*: 64.0 MiB of GPU memory$' stdout
    check "and planned: $(grep '^memory' stdout)" grep -q '^memory per GPU: .* + NCCL 64.0 + ' stdout
    check "what fits is chosen: $(grep '^recompute' stdout)" grep -q '^recompute: level mlp, the lowest that fits into ' stdout
    CUSIM_MEMORY_MIB=100 ranks 2 "$trainer" "${full[@]}" --out memory
    check "what does not fit: exit status $status, $(grep -m 1 error stderr)" \
        [ $status = 1 -a "$(grep -c '^error: the run needs .* MiB of GPU memory, .* are free' stderr)" = 1 ]
    ranks 2 "$trainer" "${full[@]}" --plan
    check "a plan estimates it: $(grep -o 'NCCL [0-9.]*' stdout)" grep -q '^memory per GPU: .* + NCCL 1408.0 + ' stdout
}

# Each process finds another algorithm fastest, and none has a cache: all take rank 0's.
test_gpu_autotune() {
    local fast=(env -u XDG_CACHE_HOME -u HOME CUSIM_LT_FAST=2 "$trainer" "${gpu_run[@]}")
    local other=(env -u XDG_CACHE_HOME -u HOME CUSIM_LT_FAST=1 "$trainer" "${gpu_run[@]}")
    ranks 1 "${fast[@]}" --zero 2 --out fast
    ranks 1 "${fast[@]}" --zero 2 --out fast_3 : 2 "${other[@]}" --zero 2 --out fast_3
    check "algorithms of rank 0: exit status $status, $(head -n 1 stderr)" [ $status = 0 ]
    same_model fast/step_00000004 fast_3/step_00000004 "algorithms of rank 0"
    ranks 1 "${other[@]}" --zero 2 --out other
    check "other algorithms have other bits" [ "$(sha1sum <fast/step_00000004/model.safetensors)" != "$(sha1sum <other/step_00000004/model.safetensors)" ]
}

# Offloads state to the host or a disk, also from a checkpoint and to one.
test_gpu_offload() {
    train_one
    CUSIM_STREAMS=random trains 2 offload "${gpu_run[@]}" --zero 3 --offload-optimizer host
    same_model one/step_00000004 offload/step_00000004 "--offload-optimizer host, 2 GPUs"
    trains 1 offload_off --resume one/step_00000002 --zero 2 --offload-optimizer host
    same_model one/step_00000004 offload_off/step_00000004 "saved without --offload-optimizer host, continued with it"
}

# With four blocks, two parts of the residual stream are moved.
test_gpu_offload_all() {
    local all=(--zero 3 --offload-params on --offload-residuals on --recompute 3
        --offload-optimizer disk --offload-path nvme)
    local four=(--layers 4 "${gpu_run[@]:2}")
    local none=(--offload-params off --offload-residuals off --offload-optimizer off --offload-path '')
    trains 1 four "${four[@]}" --zero 2
    CUSIM_STREAMS=random CUSIM_ORDER=random trains 2 all "${four[@]}" "${all[@]}"
    same_model four/step_00000004 all/step_00000004 "all is offloaded, 2 GPUs"
    same_log four all "all is offloaded, 2 GPUs"
    CUSIM_STREAMS=lazy trains 1 all_on --resume four/step_00000002 "${all[@]}"
    same_model four/step_00000004 all_on/step_00000004 "continued with all offloaded"
    trains 1 all_off --resume all/step_00000002 --zero 2 "${none[@]}"
    same_model four/step_00000004 all_off/step_00000004 "saved with all offloaded, continued without"
    check "nothing is left on the disk: $(ls nvme)" [ -z "$(ls nvme)" ]
}

# Rules of whole matrices gather what the processes have of them; saved with all on the host or a
# disk by three, continued without by two.
test_gpu_matrices() {
    local optimizer=$1 none=(--offload-params off --offload-optimizer off --offload-path '')
    once trains 1 "one_$optimizer" "${gpu_run[@]}" --optimizer "$@" --zero 2
    CUSIM_STREAMS=random trains 3 "three_$optimizer" "${gpu_run[@]}" --optimizer "$@" --zero 3 \
        --offload-params on --offload-optimizer disk --offload-path "nvme_$optimizer"
    same_model "one_$optimizer/step_00000004" "three_$optimizer/step_00000004" "--optimizer $optimizer, 3 GPUs"
    CUSIM_STREAMS=lazy CUSIM_ORDER=random trains 2 "two_$optimizer" --resume "three_$optimizer/step_00000002" --zero 2 "${none[@]}"
    same_model "one_$optimizer/step_00000004" "two_$optimizer/step_00000004" "--optimizer $optimizer, 3 GPUs, then 2"
}

# Frozen blocks, and what is frozen in all of them, have neither gradients nor state on GPUs, by
# rules of elements and of matrices.
test_gpu_freeze() {
    local optimizer=$1 frozen=(--layers 3 "${gpu_run[@]:2}" --freeze 'embeddings,blocks[0-1]')
    trains 1 "frozen_$optimizer" "${frozen[@]}" --optimizer "$optimizer" --zero 2
    CUSIM_STREAMS=random trains 3 "frozen_3_$optimizer" "${frozen[@]}" --optimizer "$optimizer" --zero 2 \
        --offload-optimizer host
    same_model "frozen_$optimizer/step_00000004" "frozen_3_$optimizer/step_00000004" "frozen, --optimizer $optimizer, 3 GPUs"
    trains 2 "frozen_2_$optimizer" --resume "frozen_3_$optimizer/step_00000002" --offload-optimizer off
    same_model "frozen_$optimizer/step_00000004" "frozen_2_$optimizer/step_00000004" "frozen, --optimizer $optimizer, 3 GPUs, then 2"
}

test_gpu_freeze_parts() {
    local optimizer=$1 parts=("${gpu_run[@]}" --freeze wte,attention)
    trains 1 "parts_$optimizer" "${parts[@]}" --optimizer "$optimizer" --zero 2
    CUSIM_STREAMS=random trains 3 "parts_3_$optimizer" "${parts[@]}" --optimizer "$optimizer" --zero 2 \
        --offload-optimizer host
    same_model "parts_$optimizer/step_00000004" "parts_3_$optimizer/step_00000004" "frozen in all blocks, --optimizer $optimizer, 3 GPUs"
    if [ "$optimizer" = muon ]; then
        trains 2 parts_one "${parts[@]}" --optimizer muon --zero 3 # where groups have one part, frozen or not
        same_model parts_muon/step_00000004 parts_one/step_00000004 "frozen in all blocks, --zero 2 and 3"
    fi
}

# GPUs that cut the matrices of a layer add in another order than one, in every stage, also without
# master weights, whose rounding takes random words; data ranks keep the bits. Streams run in any
# order, and once NCCL's operations one at a time.
gpu_wide=(--layers 2 --channels 64 --heads 4 "${gpu_run[@]:6}")
gpu_near=$(case $built in */FP32/*) echo 1e-6 ;; *) echo 4e-3 ;; esac) # bf16 rounds by 2^-9

test_gpu_tensor() {
    local zero=$1 t options=()
    case $zero,$built in 3,*/BF16/*) options=(--master-weights off) ;; esac
    once trains 1 "wide_$zero" "${gpu_wide[@]}" --zero "$zero" "${options[@]}"
    for t in 2 4; do
        CUSIM_STREAMS=random once trains $t "wide_${zero}_$t" "${gpu_wide[@]}" --zero "$zero" "${options[@]}" --tensor-parallel $t
        near "$t tensor ranks, --zero $zero: loss" "$(last_loss "wide_$zero")" "$(last_loss "wide_${zero}_$t")" $gpu_near
        near "$t tensor ranks, --zero $zero: norm" "$(first_norm "wide_$zero")" "$(first_norm "wide_${zero}_$t")" $gpu_near
    done
}

# Muon makes whole matrices of parts.
test_gpu_tensor_matrices() {
    local options=(--arch qwen2 --hidden 128 --kv-heads 2 --optimizer muon --muon-rows on)
    case $built in */BF16/*) options+=(--master-weights off) ;; esac
    trains 1 muon_1 "${gpu_wide[@]}" --zero 3 "${options[@]}"
    trains 2 muon_2 "${gpu_wide[@]}" --zero 3 "${options[@]}" --tensor-parallel 2
    near "muon, 2 tensor ranks" "$(last_loss muon_1)" "$(last_loss muon_2)" $gpu_near
    CUSIM_STREAMS=random trains 4 muon_4 --resume muon_2/step_00000002 --zero 3 --tensor-parallel 2
    same_model muon_2/step_00000004 muon_4/step_00000004 "muon, 2 GPUs, then 4"
}

# Norms of all heads together, whose sums the GPUs gather.
test_gpu_tensor_norms() {
    local options=(--arch olmo2 --hidden 128 --kv-heads 2 --optimizer sgd --zero 2)
    trains 1 norms_1 "${gpu_wide[@]}" "${options[@]}"
    CUSIM_STREAMS=random trains 2 norms_2 "${gpu_wide[@]}" "${options[@]}" --tensor-parallel 2 --recompute 3
    near "norms of all heads, 2 tensor ranks: loss" "$(last_loss norms_1)" "$(last_loss norms_2)" $gpu_near
    near "norms of all heads, 2 tensor ranks: norm" "$(first_norm norms_1)" "$(first_norm norms_2)" $gpu_near
}

test_gpu_tensor_data() {
    local t
    CUSIM_STREAMS=random once trains 2 wide_2_2 "${gpu_wide[@]}" --zero 2 --tensor-parallel 2
    in_any_order 4 tensor_data "${gpu_wide[@]}" --zero 2 --tensor-parallel 2
    for t in 1 2 3; do
        same_model wide_2_2/step_00000004 tensor_data_$t/step_00000004 "2 tensor ranks, 2 data ranks, one operation at a time, run $t"
    done
    check "no graphs: $(grep '^graph' stdout)" grep -q '^graph: off, with two kinds of groups; --graph on tries it$' stdout
}

# Groups of two kinds in graphs, which wants an NCCL that keeps the order of exchanges.
test_gpu_tensor_graph() {
    local zero=$1 wide=("${gpu_wide[@]}")
    case $zero,$built in 3,*/BF16/*) wide+=(--master-weights off) ;; esac
    CUSIM_STREAMS=random once trains 2 "wide_${zero}_2" "${wide[@]}" --zero "$zero" --tensor-parallel 2
    CUSIM_STREAMS=random CUSIM_NCCL_SERIAL=2 trains 4 tensor_graph "${wide[@]}" --zero "$zero" --tensor-parallel 2 --graph on
    same_model "wide_${zero}_2/step_00000004" tensor_graph/step_00000004 "--zero $zero, 2 of 4 GPUs, in graphs"
    NCCL_LAUNCH_ORDER_IMPLICIT=0 ranks 4 "$trainer" --out no_order "${wide[@]}" --zero "$zero" --tensor-parallel 2 --graph on
    check "graphs without an order: exit status $status, $(head -n 1 stderr)" \
        [ $status = 1 -a "$(grep -c '^error: --graph on, and NCCL .* keeps no order of exchanges; wanted NCCL 2.26' stderr)" = 1 ]
}

test_gpu_tensor_taught() {
    local taught=("${gpu_wide[@]}" --zero 2 --teacher wide_2 --distill-temperature 2)
    once trains 1 wide_2 "${gpu_wide[@]}" --zero 2
    trains 1 taught_1 "${taught[@]}"
    CUSIM_STREAMS=random trains 2 taught_2 "${taught[@]}" --tensor-parallel 2
    near "a teacher in 2 parts" "$(last_loss taught_1)" "$(last_loss taught_2)" $gpu_near
}

test_gpu_tensor_text() {
    once trains 1 wide_2 "${gpu_wide[@]}" --zero 2
    "$trainer" --model wide_2 --prompt One --temperature 0 --tokens 8 >text.1 2>/dev/null
    ranks 2 "$trainer" --model wide_2 --prompt One --temperature 0 --tokens 8 --tensor-parallel 2
    check "text of 2 GPUs: $(head -n 1 stdout), $(head -n 1 stderr)" \
        [ $status = 0 -a -s text.1 -a "$(tr -s ' \r\n' ' ' <stdout)" = "$(tr -s ' \r\n' ' ' <text.1)" ]
}

# A GPU of a tensor group whose tensors that are not cut differ.
test_gpu_drift() {
    local sound=1 run=(--layers 1 --channels 64 --heads 4 "${gpu_run[@]:6:8}" --samples 0 --eval-every 3 --tensor-parallel 2 --out drift)
    build_fault
    differs "other weights in a tensor group" \
        "the ranks disagree about the parameters that tensor ranks do not cut after step 3 (checksum): [0-9a-f]* on rank 0 (tensor 0), [0-9a-f]* on rank 1 (tensor 1)" \
        FAULT_POW_AT=3 "${run[@]}"
}

test_gpu_stages() {
    local zero
    train_one
    for zero in 0 1; do
        once trains 2 z${zero}_2 "${gpu_run[@]}" --zero $zero
        near "--zero $zero and 2" "$(logged one | sed -n 's/^train 4 \([0-9.]*\).*/\1/p')" \
            "$(logged z${zero}_2 | sed -n 's/^train 4 \([0-9.]*\).*/\1/p')" "$(case $built in */FP32/*) echo 1e-6 ;; *) echo 2e-3 ;; esac)"
    done
    case $built in */FP32/*) same_model z0_2/step_00000004 z1_2/step_00000004 "--zero 0 and 1" ;; esac
}

# In fp8. Stage 2 keeps the codes of weights for all micro-steps, stage 3 does not. A rank of a
# tensor group makes codes of rows that it gathers, where one process takes the norm's.
test_gpu_fp8() {
    trains 1 fp8_kept "${run[@]}" --matmul fp8 --autotune off --zero 2
    trains 2 fp8_anew "${run[@]}" --matmul fp8 --autotune off --zero 3
    same "--matmul fp8, 2 ranks" fp8_kept fp8_anew
    like_one "--matmul fp8" fp8_tensor 0.01 "${wide[@]}" --matmul fp8 --autotune off # e4m3 rounds by 2^-4
}

# Two GPUs for each sequence, of two tiles each, train like one (context_like). Attention waits for
# keys and values on the main stream, while ZeRO reduces and gathers on another.
test_gpu_context() {
    local out near=2e-3 long=(--arch qwen2 --layers 2 --channels 32 --heads 2 --kv-heads 1 --window 300 --doc-mask on --seq-len 512
        --batch 1 --total-batch 1024 --steps 3 --samples 1 --sample-tokens 4 --sample-every 3 --eval-every 3 --eval-batches 1 --tf32 off --autotune off)
    case $built in */FP32/*) near=1e-7 ;; esac
    trains 1 long "${long[@]}"
    CUSIM_NCCL_SERIAL=2 CUSIM_NCCL_TIMEOUT=10 CUSIM_STREAMS=lazy trains 2 long_serial "${long[@]}" --context-parallel 2 --zero 3
    CUSIM_STREAMS=random trains 2 long_random "${long[@]}" --context-parallel 2 --zero 1
    in_any_order 4 long_data "${long[@]}" --context-parallel 2 --zero 2
    for out in long_serial long_random long_data_{1,2,3}; do
        check "$out: the first validation: $(first_loss $out)" [ -n "$(first_loss long)" -a "$(first_loss long)" = "$(first_loss $out)" ]
        near "$out: the first norm" "$(first_norm long)" "$(first_norm $out)" $near
        near "$out: the last validation" "$(last_loss long)" "$(last_loss $out)" $near
    done
    for out in 1 2; do
        trains $out long_task_$out --steps 0 --model long/step_00000003 --perplexity tokens.bin --data-format nanogpt --stride 100 \
            --seq-len 512 --batch 2 --tf32 off --autotune off --context-parallel $out
    done
    check "the same scores: $(grep -c '"kind":"task"' long_task_2/log.jsonl)" \
        cmp <(grep '"kind":"task"' long_task_1/log.jsonl) <(grep '"kind":"task"' long_task_2/log.jsonl)
    check "a score" [ "$(grep -c '"kind":"task"' long_task_1/log.jsonl)" = 1 ]
    ranks 2 "$trainer" --layers 1 --channels 32 --heads 2 --seq-len 256 --batch 1 --context-parallel 2
    check "half a tile: exit status $status, $(head -n 1 stderr)" [ $status = 2 -a "$(grep -c '^error: --seq-len 256, --context-parallel 2; wanted a multiple of 512: two chunks for each process, in whole tiles of 128 tokens$' stderr)" = 1 ]
}

# Layers that share parameters. In the last micro-step a GPU has no batch, and moves what the others
# move.
test_gpu_share() {
    local share=$1 four=(--layers 4 "${gpu_run[@]:2}")
    trains 1 "one_$share" "${four[@]}" --zero 2 --share-layers "$share"
    CUSIM_STREAMS=random trains 2 "two_$share" "${four[@]}" --zero 3 --share-layers "$share" --offload-params on
    same_model "one_$share/step_00000004" "two_$share/step_00000004" "--share-layers $share, --zero 3 on 2 GPUs"
    same_log "one_$share" "two_$share" "--share-layers $share, --zero 3 on 2 GPUs"
    CUSIM_STREAMS=lazy trains 3 "three_$share" --resume "two_$share/step_00000002" --zero 2 --offload-params off
    same_model "one_$share/step_00000004" "three_$share/step_00000004" "--share-layers $share, then --zero 2 on 3"
}

test_gpu_share_all() {
    local four=(--layers 4 "${gpu_run[@]:2}")
    CUSIM_STREAMS=random trains 3 three_all "${four[@]}" --zero 3 --share-layers all
    trains 1 one_all "${four[@]}" --zero 2 --share-layers all
    same_model one_all/step_00000004 three_all/step_00000004 "--share-layers all, --zero 3 on 3 GPUs"
}

test_gpu_loop() {
    local four=(--layers 4 "${gpu_run[@]:2}")
    CUSIM_STREAMS=random trains 2 two_loop "${four[@]}" --zero 1 --share-layers loop:2
    trains 1 one_loop "${four[@]}" --zero 1 --share-layers loop:2
    near "--share-layers loop:2, --zero 1" "$(last_loss one_loop)" "$(last_loss two_loop)" \
        "$(case $built in */FP32/*) echo 1e-6 ;; *) echo 2e-3 ;; esac)"
}

# Two machines with two GPUs each.
on_two_machines() { LLMC_NODES=2 CUSIM_STREAMS=${streams:-random} "$@"; }
train_levels() { [ -d "levels_$1" ] || on_two_machines trains 4 "levels_$1" "${gpu_run[@]}" --zero "$1"; }

test_gpu_levels() {
    local zero=$1
    train_one
    [ "$zero" = 3 ] || once trains 2 z0_2 "${gpu_run[@]}" --zero 0
    [ "$zero" = 3 ] || local streams=eager
    train_levels "$zero"
    near "--zero $zero, two levels" "$(last_loss "$([ "$zero" = 0 ] && echo z0_2 || echo one)")" "$(last_loss "levels_$zero")" \
        "$(case $zero-$built in 3-* | *FP32*) echo 1e-5 ;; *) echo 2e-3 ;; esac)"
    check "the first line: $(head -n 1 "levels_$zero.txt")" \
        grep -q "^processes: 4 on 2 machines (mpirun, .*), rank 0 on $(uname -n); zero $zero" "levels_$zero.txt"
}

test_gpu_levels_graph() {
    train_levels 3
    check "no graphs: $(grep '^graph' levels_3.txt)" grep -q '^graph: off, with replicas of the model; --graph on tries it$' levels_3.txt
    on_two_machines trains 4 levels_graph "${gpu_run[@]}" --zero 3 --graph on
    same_model levels_3/step_00000004 levels_graph/step_00000004 "two levels, in graphs"
}

test_gpu_levels_serial() {
    local streams
    train_levels 3
    for streams in lazy random; do # as on a GPU that does one operation of NCCL at a time
        CUSIM_NCCL_SERIAL=2 CUSIM_NCCL_TIMEOUT=10 on_two_machines trains 4 levels_serial "${gpu_run[@]}" --zero 3
        same_model levels_3/step_00000004 levels_serial/step_00000004 "two levels, one operation at a time, $streams streams"
        rm -r levels_serial
    done
}

test_gpu_levels_adafactor() {
    local adafactor=(--optimizer adafactor --adafactor-beta1 0.9 --adafactor-scale on)
    once trains 1 one_adafactor "${gpu_run[@]}" "${adafactor[@]}" --zero 2
    on_two_machines trains 4 levels_adafactor "${gpu_run[@]}" --zero 3 "${adafactor[@]}"
    near "--optimizer adafactor, two levels" "$(last_loss one_adafactor)" "$(last_loss levels_adafactor)" 1e-5
    check "the first line: $(head -n 1 stdout)" \
        grep -q "^processes: 4 on 2 machines (mpirun, .*), rank 0 on $(uname -n); zero 3, shards of 2, 2 replicas$" stdout
    check "the traffic: $(grep '^each update' stdout)" \
        grep -q '^each update: every GPU sends [0-9.]* MiB within its 2, and [0-9.]* MiB to the other replicas$' stdout
}

test_gpu_levels_elastic() {
    train_one
    train_levels 3
    streams=eager on_two_machines trains 4 levels_again --resume levels_3/step_00000002 --zero 2
    same_model levels_3/step_00000004 levels_again/step_00000004 "two levels, from a checkpoint of another stage"
    trains 2 levels_2 --resume levels_3/step_00000002 --zero 3
    near "two levels, then one" "$(last_loss one)" "$(last_loss levels_2)" 1e-5
}

test_gpu_levels_offload() {
    train_levels 3
    streams=lazy on_two_machines trains 4 levels_off "${gpu_run[@]}" --zero 3 --offload-params on --offload-optimizer disk --offload-path nvme
    same_model levels_3/step_00000004 levels_off/step_00000004 "two levels, offloaded"
}

test_gpu_shard_ranks() {
    train_one
    streams=eager on_two_machines trains 4 levels_4 "${gpu_run[@]}" --zero 3 --shard-ranks 4
    same_model one/step_00000004 levels_4/step_00000004 "--shard-ranks 4"
    check "a note on --shard-ranks 4" grep -q '^note: --shard-ranks 4 exchanges every gradient between machines; auto, 2,' levels_4.txt
    on_two_machines ends_all "--shard-ranks 2 of 3" 2 "--shard-ranks 2, 3 processes; wanted a number that divides these" "rank 0 of 3" \
        "$trainer" "${gpu_run[@]}" --shard-ranks 2 --out refused
}

# Saved by 4 GPUs in stage 3, continued by 2 in stage 2; saved by one, continued by 3; saved by 2 in
# stage 3, continued by one.
test_gpu_elastic() {
    train_one
    once trains 4 z3_4 "${gpu_run[@]}" --zero 3
    trains 2 then_2 --resume z3_4/step_00000002 --zero 2
    same_model one/step_00000004 then_2/step_00000004 "4 GPUs in stage 3, then 2 in stage 2"
    trains 3 then_3 --resume one/step_00000002 --zero 3
    same_model one/step_00000004 then_3/step_00000004 "one GPU, then 3 in stage 3"
    CUSIM_STREAMS=lazy trains 2 exported "${gpu_run[@]}" --zero 3 --export-llmc exported.bin --model-file-gb 0.00006
    in_files exported/step_00000002 3
    trains 1 then_1 --resume exported/step_00000002 --zero 2 --model-file-gb 5
    same_model one/step_00000004 then_1/step_00000004 "2 GPUs in stage 3 and three files, then one in stage 2"
    trains 1 export "${gpu_run[@]}" --zero 2 --export-llmc export.bin
    check "exported by 2 GPUs and by one" cmp exported.bin export.bin
}

gpu_long=(--layers 2 --channels 32 --heads 2 --seq-len 16 --batch 2 --total-batch 160 --steps 100000 --save-every 2 --keep 2
    --eval-every 0 --samples 0 --autotune off --zero 3)

# Saved right after each update, when its parameters are still on their way.
test_gpu_saves() {
    local step kind kinds=off saves=(--layers 2 --channels 32 --heads 2 --seq-len 16 --batch 2 --total-batch 160 --steps 3 --samples 0
        --eval-every 0 --save-every 1 --keep 0 --zero 2)
    case $built in */BF16/*) kinds="off 24" ;; esac
    for kind in $kinds; do
        trains 1 saves_1 "${saves[@]}" --master-weights $kind
        CUSIM_STREAMS=lazy trains 2 saves_2 "${saves[@]}" --master-weights $kind --export-llmc saves_2.bin
        trains 1 saves_on --resume saves_1/step_00000002 --zero 2 --export-llmc saves_1.bin
        for step in 1 2 3; do
            same_model saves_1/step_0000000$step saves_2/step_0000000$step "saved after update $step, --master-weights $kind"
        done
        check "exported by 2 GPUs and by one, --master-weights $kind" cmp saves_1.bin saves_2.bin
        rm -rf saves_*
    done
}

test_gpu_end() {
    begins term 2 "$trainer" "${gpu_long[@]}"
    kill -TERM "$(rank_pid 2)"
    ended "SIGTERM to one rank" 75
    begins killed 2 "$trainer" "${gpu_long[@]}" --offload-optimizer disk --offload-path killed_nvme
    check "the file has no name: $(ls killed_nvme)" [ -z "$(ls killed_nvme)" ]
    kill -KILL "$(rank_pid 2)"
    ended "kill -9 of one rank" 137
    check "kill -9 leaves nothing on the disk: $(ls killed_nvme)" [ -z "$(ls killed_nvme)" ]
    ranks 2 "$trainer" --device 1 "${gpu_long[@]}" --out device
    check "--device with several processes: exit status $status, $(head -n 1 stderr)" \
        [ $status = 2 -a "$(grep -c '^error: --device 1 is for one process' stderr)" = 1 ]
}

# ---- without MPI ----

# starts N COMMAND...: in the background, as torchrun starts ranks; sets `pids`. They write to the
# files stdout.RANK and stderr.RANK.
starts() {
    local n=$1 r
    shift
    pids=()
    for ((r = 0; r < n; r++)); do
        RANK=$r WORLD_SIZE=$n LOCAL_RANK=$r LOCAL_WORLD_SIZE=$n MASTER_ADDR=localhost MASTER_PORT=$port \
            timeout 120 "$@" >stdout.$r 2>stderr.$r </dev/null &
        pids+=($!)
    done
    port=$((port + 2))
}
# A hundred ports for this script alone, as long as it runs: below those that the system gives away.
for ((port = 20000; port < 32000; port += 100)); do
    [ -e "/tmp/pretrain_ports_$port" ] || : >"/tmp/pretrain_ports_$port"
    exec 8<"/tmp/pretrain_ports_$port" # another user's, too
    ! flock -n 8 || break
done

# all_end: sets `status` of each rank, "0 0 1".
all_end() {
    local pid
    status=
    for pid in "${pids[@]}"; do
        { wait "$pid"; } 2>/dev/null # without bash's line on a killed one
        status+="${status:+ }$?"
    done
}

test_gpu_without_mpi() {
    train_one
    starts 3 "$trainer" --out tcp "${gpu_run[@]}" --zero 3
    all_end
    check "by TCP: exit status $status, $(cat stderr.*)" [ "$status" = "0 0 0" -a ! -s stderr.0 -a ! -s stderr.2 ]
    check "by TCP: $(head -n 1 stdout.0)" grep -q "^processes: 3 on 1 machine (torchrun, TCP), rank 0 on $(uname -n); zero 3" stdout.0
    same_model one/step_00000004 tcp/step_00000004 "3 GPUs by TCP"
    same_log one tcp "3 GPUs by TCP"
    starts 2 bash -c 'unset WORLD_SIZE; exec "$0" -pn 2 -pr $RANK "$@"' "$trainer" --out fs "${gpu_run[@]}" --zero 2
    all_end
    check "by a file: exit status $status, $(cat stderr.*)" [ "$status" = "0 0" ]
    same_model one/step_00000004 fs/step_00000004 "2 GPUs by a file"
    check "the file is removed" [ ! -e fs/meeting.txt ]
}

# A rank is killed: all end by themselves.
test_kill_without_mpi() {
    local i
    starts 2 "$trainer" --out tcp_killed "${gpu_long[@]}"
    for ((i = 0; i < 300; i++)); do
        [ "$(compgen -G 'tcp_killed/step_????????/state.json' | wc -l)" -lt 2 ] || break # the first one is known to rank 0
        sleep 0.1
    done
    kill -KILL "$(pgrep -P "${pids[1]}")"
    all_end
    check "kill -9 of one rank: exit status $status" [ "$status" = "1 137" ]
    check "kill -9 of one rank: $(cat stderr.0)" grep -q "^error: rank 1 of 2 (.*) has ended; rank 0 was in step [0-9]*, .*; tcp_killed has a checkpoint of step [0-9]*: --resume on continues\$" stderr.0
    check "kill -9 of one rank: processes are left" none_left "$trainer"
}

if [ $is_gpu ]; then
    export XDG_CACHE_HOME=$work/cache
    cases <<'END'
gpu_same_bits 2
gpu_same_bits 3
gpu_without_files
gpu_tensor 1
gpu_tensor 2
gpu_tensor 3
gpu_tensor_matrices
gpu_tensor_norms
gpu_tensor_data
gpu_tensor_graph 2
gpu_tensor_graph 3
gpu_tensor_taught
gpu_tensor_text
gpu_drift
gpu_memory
gpu_autotune
gpu_without_mpi
kill_without_mpi
tasks --autotune off
other_tasks --autotune off
gpu_offload
gpu_offload_all
gpu_freeze adamw
gpu_freeze muon
gpu_freeze soap
gpu_freeze adafactor
gpu_freeze_parts adamw
gpu_freeze_parts muon
gpu_freeze_parts soap
gpu_freeze_parts adafactor
gpu_matrices muon --muon-rows on --cautious-decay on --share-layers all
gpu_matrices soap --soap-every 2 --soap-max-side 64
gpu_matrices adafactor --adafactor-beta1 0.9 --adafactor-scale on
batches --tf32 off
lengths --tf32 off
gpu_stages
gpu_context
gpu_fp8
gpu_share pairs
gpu_share all
gpu_share_all
gpu_loop
gpu_levels 0
gpu_levels 3
gpu_levels_graph
gpu_levels_serial
gpu_levels_adafactor
gpu_levels_elastic
gpu_levels_offload
gpu_shard_ranks
gpu_elastic
gpu_saves
gpu_end
gpu_messages
gpu_errors
gpu_watchdog
END
else
    cases <<'END'
messages
machines
errors
errors_by_mpi
watchdog
signal
without_mpi
without_launcher
same_bits
batches
lengths
elements adamw8bit --optimizer adamw8bit
elements muon8bit --optimizer muon --muon-momentum 8bit --muon-polynomial polar-express --muon-rows on
matrices muon --muon-rows on --cautious-decay on --grad-clip 0.5 --freeze embeddings,blocks[0],mlp[1]
matrices soap --soap-every 2 --soap-max-side 64 --cautious-decay on --freeze embeddings
matrices adafactor --adafactor-beta1 0.9 --adafactor-scale on
adafactor_stages
tasks
other_tasks
other_files
context
context_documents
context_bf16
context_fp8
context_tasks
elastic
tensor
tensor_in_grid
tensor_zero 0
tensor_zero 1
tensor_of 1e-6 --recompute 0 --zero 0
tensor_of 1e-3 --recompute mlp --matmul bf16
tensor_of 1e-2 --recompute 1 --matmul fp8
tensor_of 1e-6 --recompute 3 --arch llama --hidden 128
tensor_of 1e-6 --arch qwen3 --hidden 128 --kv-heads 2 --z-loss 0.01 --recompute 2
tensor_of 1e-6 --arch nanochat --hidden 128 --pack dynamic
tensor_of 1e-6 --arch olmo2 --hidden 128 --recompute 3 --optimizer sgd
tensor_of 1e-3 --arch olmo3 --window 8 --hidden 128 --kv-heads 2 --matmul bf16
tensor_of 1e-6 --share-layers all --freeze norms --optimizer lion
tensor_of 1e-6 --freeze h.0
tensor_of 1e-6 --arch mistral --window 8 --hidden 256 --share-layers pairs --doc-mask on --pack bestfit
tensor_wide
tensor_matrices rows --optimizer muon --muon-rows on --arch qwen2 --hidden 128 --kv-heads 2
tensor_matrices factors --optimizer adafactor --adafactor-beta1 0.9 --adafactor-scale on
tensor_elastic
tensor_files
tensor_generate
early
disagreement
drift
drift_in_grid
other_weights
read_only
slow_rank
signals
failures
full_disk
END
fi
check_done
