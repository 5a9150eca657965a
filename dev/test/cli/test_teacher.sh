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
while read -r student teacher weight temperature kept loss kl norm; do
    if [ "$kept" != 0 ]; then # fp16 makes a probability wrong by 1.8e-4 at most
        file="kept_$student"
        runs "predictions of $teacher" --model "$fixtures/$teacher" --write-logits "$kept" --teacher-logits "$file" \
            --distill-temperature "$temperature" "${data[@]}" --batch 2
        how=(--teacher-logits "$file" --distill-weight "$weight" --distill-temperature "$temperature")
        update "$student" "$loss" "$kl" "$norm" 1e-3 --batch 1 "${how[@]}"
        continue
    fi
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

good "slices" "${taught[@]}" --zero 2 --tensor-slices 2 --out slices
close_to slices plain
if command -v mpirun >/dev/null; then
    ranks 3 "${taught[@]}" --zero 2 --out ranks
    check "3 ranks: kl" cmp <(values train kl plain/log.jsonl | head -n 1) <(values train kl ranks/log.jsonl | head -n 1)
    ranks 2 "${taught[@]}" --zero 2 --tensor-parallel 2 --out tensor
    same slices tensor
    ranks 4 "${taught[@]}" --zero 2 --context-parallel 2 --pipeline-parallel 2 --out divided
    close_to divided plain
fi

# ---- predictions in a file ----

for i in {1..300}; do echo "Number $i is $((i * i % 97)), and a teacher says so."; done >numbers.txt
bytes=(--train-data numbers.txt --seq-len 32)
good "a teacher of bytes" --layers 2 --channels 96 --heads 2 "${bytes[@]}" --batch 4 --steps 30 --samples 0 --eval-every 0 --out speller
keep=(--model speller --teacher-logits file --distill-temperature 2 "${bytes[@]}")
good "its predictions" "${keep[@]}" --write-logits 256 --batch 3
check "are counted" grep -q '^wrote file: [0-9]* sequences, 256 tokens each$' stdout
bytes+=(--tokenizer speller/step_00000030)
reads=("${tiny[@]}" "${bytes[@]}" --batch 4 --steps 8 --distill-weight 0.6 --distill-temperature 2)
good "a student of the teacher" "${reads[@]}" --teacher speller --out of_teacher
good "a student of the file" "${reads[@]}" --teacher-logits file --save-every 4 --out of_file
near "kl of all tokens" "$(values train kl of_file/log.jsonl | tail -n 1)" "$(values train kl of_teacher/log.jsonl | tail -n 1)" 0.01
cp -r of_file again && rm -r again/step_00000008
good "the other half, by the file" --out again --resume on
same of_file again
if command -v mpirun >/dev/null; then
    ranks 4 --model speller --teacher-logits in_parts "${keep[@]:4}" --write-logits 256 --batch 3 --tensor-parallel 2 --context-parallel 2
    others=$(cmp -l file in_parts | wc -l) # rounded to fp16
    check "predictions of slices: $others bytes are others" [ "$others" -lt $(($(wc -c <file) / 100)) ]
    ranks 4 "${reads[@]}" --teacher-logits file --tensor-parallel 2 --context-parallel 2 --out file_divided
    close_to file_divided of_file
    ranks 2 "${reads[@]}" --teacher-logits file --out file_ranks
    check "2 ranks: kl" cmp <(values train kl of_file/log.jsonl | head -n 1) <(values train kl file_ranks/log.jsonl | head -n 1)
fi
bad 2 "--teacher-logits file was made for --distill-temperature 2; this run has 1" "${tiny[@]}" "${bytes[@]}" --batch 4 --steps 1 --teacher-logits file
bad 2 "--teacher-logits file: --seq-len is 32, and 16 in this run" "${tiny[@]}" --tokenizer speller/step_00000030 --train-data numbers.txt --seq-len 16 --steps 1 --teacher-logits file --distill-temperature 2
head -n 200 numbers.txt >fewer.txt
bad 2 "--teacher-logits file: its data have the checksum" "${tiny[@]}" --tokenizer speller/step_00000030 --train-data fewer.txt --seq-len 32 --steps 1 --teacher-logits file --distill-temperature 2
bad 2 "--teacher big, --teacher-logits file; wanted only one of them" "${taught[@]}" --teacher-logits file
bad 2 "needs --train-data of one source; this run has the built-in stories" "${small[@]}" --teacher-logits file
bad 2 "--write-logits 5 needs a trained model" "${bytes[@]}" --write-logits 5
bad 2 "--write-logits 300: wanted 0 to 256" "${keep[@]}" --write-logits 300
bad 1 "none: " "${reads[@]}" --teacher-logits none
bad 1 "numbers.txt: exists; --write-logits overwrites nothing" --model speller --teacher-logits numbers.txt "${bytes[@]}" --write-logits 8
head -c 1000 file >short
bad 1 "short: 1000 bytes, wanted " "${reads[@]}" --teacher-logits short
good "other predictions" --model of_teacher --teacher-logits other --distill-temperature 2 "${bytes[@]}" --write-logits 8
rm -r again/step_00000008
mv other file
bad 2 "the checksum of the teacher is |--override resumes anyway" --out again --resume on

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
bad 2 "--distill-weight needs a teacher: --teacher PATH" "${small[@]}" --distill-weight 0.1
bad 2 "--distill-temperature needs a teacher" "${small[@]}" --distill-temperature 3
bad 2 "--teacher-quantize needs a teacher" "${small[@]}" --teacher-quantize q8_0
bad 2 "--distill-temperature 0: wanted above 0" "${small[@]}" --teacher big --distill-temperature 0
bad 2 "--distill-weight 1.5: wanted 0 to 1" "${small[@]}" --teacher big --distill-weight 1.5
bad 2 "--seq-len is 64; wanted at most the context of --teacher big, 32 tokens" "${tiny[@]}" "${how[@]}" --steps 1 --seq-len 64
bad 2 "--teacher $fixtures/llama has a vocabulary of 61; wanted at least the model's" "${small[@]}" --teacher "$fixtures/llama"
bad 2 "--teacher-quantize q8_0: a matrix of the teacher has 24 columns" --model "$fixtures/llama" "${data[@]}" --steps 1 --teacher "$fixtures/llama" --teacher-quantize q8_0
printf 'Once upon a time there was a teacher. %.0s' {1..200} >text.txt
bad 2 "--teacher big has other tokens than the run: |; wanted the same tokenizer: --tokenizer big/step_00000030" \
    "${taught[@]}" --train-data text.txt
bad 2 "--teacher big: --tensor-slices 4, 2 heads; wanted 2" --layers 2 --channels 64 --heads 4 "${taught[@]:6}" --tensor-slices 4
bad 2 "--teacher big is for training" --model big --teacher big --steps 0 --perplexity text.txt

# Another teacher is another run; the weights tell, not only the path.
good "more training of the teacher" --layers 2 --channels 96 --heads 2 --seq-len 32 --batch 4 --steps 31 --samples 0 --eval-every 0 --out big2
rm -r resumed/step_00000008
mv big kept && mv big2 big
bad 2 "the checksum of the teacher is |--override resumes anyway" --out resumed --resume on
good "another teacher" --out resumed --resume on --override
check "is printed" grep -q '^resume: the checksum of the teacher is [0-9a-f]*, was [0-9a-f]*$' stdout
bad 2 "--teacher is |--override resumes anyway" --out whole --resume 4 --teacher kept

check_done
