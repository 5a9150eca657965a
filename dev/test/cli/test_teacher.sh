#!/usr/bin/env bash
# test_teacher.sh -- training with a teacher: PyTorch's numbers, the same bits for any division of
# the work, resumed runs, the plan, and teachers that are refused.
#
#     dev/test/cli/test_teacher.sh build/plain/train_gpt2
set -u
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

trainer=$(realpath "${1:?usage: test_teacher.sh TRAINER}")
fixtures=$(realpath dev/ref/fixtures/models)
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
trainer_begin test_teacher

# near WHAT FOUND WANTED TOLERANCE: the tolerance is relative.
near() {
    check "$1 is $2, wanted $3" awk -v a="$2" -v b="$3" -v e="$4" 'BEGIN { exit !(a > b * (1 - e) && a < b * (1 + e)) }'
}

# The numbers of each update that do not depend on the time.
numbers() { grep -oE '"(loss|kl|norm)":[^,}]*' "$1/log.jsonl"; }

# same DIRECTORY OTHER: the same numbers and weights.
same() {
    check "$1 and $2: numbers" cmp <(numbers "$1") <(numbers "$2")
    check "$1 and $2: weights" cmp "$1"/step_*8/model.safetensors "$2"/step_*8/model.safetensors
}

# ---- PyTorch's numbers ----

data=(--train-data "$fixtures/tokens.bin" --val-data "$fixtures/tokens.bin" --seq-len 13 --total-batch 26)

# update STUDENT LOSS KL NORM TOLERANCE OPTIONS...
update() {
    local student=$1 loss=$2 kl=$3 norm=$4 tolerance=$5
    shift 5
    rm -rf out
    runs "$student $*" --model "$fixtures/$student" "${data[@]}" --steps 1 --samples 0 --eval-every 0 --out out "$@"
    near "$student $*: loss" "$(values train loss out/log.jsonl)" "$loss" "$tolerance"
    near "$student $*: kl" "$(values train kl out/log.jsonl)" "$kl" "$tolerance"
    near "$student $*: norm" "$(values train norm out/log.jsonl)" "$norm" "$tolerance"
}

# fp32 has 24 bits, and sums of a few hundred numbers; bf16 has 8 bits in every matmul's input.
while read -r student teacher weight temperature loss kl norm; do
    how=(--teacher "$fixtures/$teacher" --distill-weight "$weight" --distill-temperature "$temperature")
    update "$student" "$loss" "$kl" "$norm" 2e-6 --matmul fp32 --batch 2 "${how[@]}"
    update "$student" "$loss" "$kl" "$norm" 2e-6 --matmul fp32 --recompute 3 --batch 1 "${how[@]}"
    update "$student" "$loss" "$kl" "$norm" 3e-2 --matmul bf16 --batch 2 "${how[@]}"
done < <(grep -v '^#' "$fixtures/teachers.txt")

# ---- the same bits ----

tiny=(--layers 2 --channels 64 --heads 2 --total-batch 256 --eval-every 4 --eval-batches 2 --samples 0)
small=("${tiny[@]}" --seq-len 32 --batch 4 --steps 8)
good "a teacher" --layers 2 --channels 96 --heads 2 --seq-len 32 --batch 4 --steps 30 --samples 0 --eval-every 0 --out big
how=(--teacher big --distill-weight 0.6 --distill-temperature 2)
taught=("${small[@]}" "${how[@]}")
good "a student" "${taught[@]}" --out plain
check "kl on the screen" grep -q 'step 8/8 | loss .* | kl [0-9.]* | norm' stdout
check "the memory of the teacher" grep -q '^memory:.* + teacher [0-9.]* ' <(tr '\n' ' ' <stdout | sed 's/memory:/\n&/')
check "eight of them" [ "$(values train kl plain/log.jsonl | wc -l)" = 8 ]
good "recomputation" "${taught[@]}" --recompute 3 --out recomputed
same plain recomputed
good "two threads" "${taught[@]}" --threads 2 --out threads
same plain threads
good "the first half" "${taught[@]}" --save-every 4 --out whole
cp -r whole resumed && rm -r resumed/step_00000008
good "the other half" --out resumed --resume on
same plain resumed
check "the teacher of a resumed run" grep -q '^teacher: big/step_00000030' stdout
good "its matrices in 8 bits" "${taught[@]}" --teacher-quantize q8_0 --out quantized
near "kl of 8 bits" "$(values train kl quantized/log.jsonl | tail -n 1)" "$(values train kl plain/log.jsonl | tail -n 1)" 0.02
good "updates in the backward pass" "${tiny[@]}" "${how[@]}" --seq-len 32 --batch 8 --steps 8 --update-in-backward on --out in_backward
near "kl there" "$(values train kl in_backward/log.jsonl | head -n 1)" "$(values train kl plain/log.jsonl | head -n 1)" 1e-5
good "documents and a frozen part" "${taught[@]}" --doc-mask on --pack bestfit --freeze 'embeddings,h.0'
good "8 bits for Adam, a z-loss, ZeRO" "${taught[@]}" --optimizer adamw8bit --z-loss 1e-4 --zero 2

# ranks N OPTIONS...: runs it in N processes.
ranks() {
    local n=$1
    shift
    timeout 120 mpirun --oversubscribe --bind-to none -n "$n" "$trainer" "$@" >stdout 2>stderr </dev/null
    status=$?
    check "$n ranks, $*: exit status $status, $(head -n 1 stderr)" [ $status = 0 ]
}

# close_to DIRECTORY OTHER: the first divergence and the last loss.
close_to() {
    near "$1 and $2: kl" "$(values train kl "$1/log.jsonl" | head -n 1)" "$(values train kl "$2/log.jsonl" | head -n 1)" 1e-5
    near "$1 and $2: loss" "$(values train loss "$1/log.jsonl" | tail -n 1)" "$(values train loss "$2/log.jsonl" | tail -n 1)" 1e-5
}

if command -v mpirun >/dev/null; then
    ranks 3 "${taught[@]}" --zero 2 --out ranks
    check "3 ranks: kl" cmp <(values train kl plain/log.jsonl | head -n 1) <(values train kl ranks/log.jsonl | head -n 1)
    ranks 2 "${taught[@]}" --zero 2 --tensor-parallel 2 --out tensor
    close_to tensor plain
    ranks 4 "${taught[@]}" --zero 2 --context-parallel 2 --pipeline-parallel 2 --out divided
    close_to divided plain
fi

# ---- the plan ----

train "${taught[@]}" --plan
cp stdout with
train "${small[@]}" --plan
planned() { sed -n 's/^memory: \([0-9.]*\) MiB.*/\1/p' "$1"; }
check "a teacher takes memory: $(planned with), without $(planned stdout)" awk -v a="$(planned with)" -v b="$(planned stdout)" 'BEGIN { exit !(a > b + 0.2) }'
good "a run that fits" "${tiny[@]}" "${how[@]}" --seq-len 32 --steps 1 --fit 1

# ---- what is refused ----

# 2: the command line
bad 1 "none: cannot read the teacher: No such file" "${small[@]}" --teacher none
bad 2 "--distill-weight 0.1 needs --teacher" "${small[@]}" --distill-weight 0.1
bad 2 "--distill-temperature 3 needs --teacher" "${small[@]}" --distill-temperature 3
bad 2 "--teacher-quantize q8_0 needs --teacher" "${small[@]}" --teacher-quantize q8_0
bad 2 "--distill-temperature 0: wanted a number above 0" "${small[@]}" --teacher big --distill-temperature 0
bad 2 "--distill-weight 1.5: wanted 0 to 1" "${small[@]}" --teacher big --distill-weight 1.5
bad 2 "--seq-len is 64; wanted at most the context of --teacher big, 32 tokens" "${tiny[@]}" "${how[@]}" --steps 1 --seq-len 64
bad 2 "--teacher $fixtures/llama has a vocabulary of 61; wanted at least the model's" "${small[@]}" --teacher "$fixtures/llama"
bad 2 "--teacher-quantize q8_0: a matrix of the teacher has 24 columns" --model "$fixtures/llama" "${data[@]}" --steps 1 --teacher "$fixtures/llama" --teacher-quantize q8_0
printf 'Once upon a time there was a teacher. %.0s' {1..200} >text.txt
bad 2 "--teacher big has other tokens than the run: |; wanted the same tokenizer: --tokenizer big/step_00000030" \
    "${taught[@]}" --train-data text.txt
bad 2 "--teacher big: --tensor-parallel 4, 2 heads; wanted 2" --layers 2 --channels 64 --heads 4 "${taught[@]:6}" --plan \
    --num-processes 4 --tensor-parallel 4
bad 2 "--teacher big is for training" --model big --teacher big --steps 0 --perplexity text.txt
bad 2 "error: --teacher-logits was removed: use --teacher, " "${small[@]}" --teacher-logits file
bad 2 "error: --write-logits was removed: " --model big --write-logits 32

# Another teacher is another run; the weights tell, not only the path.
good "more training of the teacher" --layers 2 --channels 96 --heads 2 --seq-len 32 --batch 4 --steps 31 --samples 0 --eval-every 0 --out big2
rm -r resumed/step_00000008
mv big kept && mv big2 big
bad 2 "the checksum of the teacher is |--override resumes anyway" --out resumed --resume on
good "another teacher" --out resumed --resume on --override
check "is printed" grep -q '^resume: the checksum of the teacher is [0-9a-f]*, was [0-9a-f]*$' stdout
bad 2 "--teacher is |--override resumes anyway" --out whole --resume 4 --teacher kept

check_done
