#!/usr/bin/env bash
# test_examples.sh -- the scripts in scripts/examples, in miniature, one after the other: each uses
# what the one before it has made.
#
#     dev/test/cli/test_examples.sh build/plain/train_gpt2
set -u

trainer=$(realpath "${1:?usage: test_examples.sh TRAINER}")
examples=$PWD/scripts/examples
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
trainer_begin test_examples
export TRAINER=$trainer

small=(--layers 1 --channels 32 --heads 2 --seq-len 128 --batch 4 --steps 4 --eval-batches 2 --samples 0)
for i in {1..300}; do echo "Line $i: the ship sails on, and $((i % 7)) birds follow it."; done >text.txt
for i in {1..30}; do
    echo '{"messages": [{"role": "user", "content": "'"$i"'?"}, {"role": "assistant", "content": "No."}]}'
done >chats.jsonl

# example WORDS NAME ARGUMENTS...: runs a script, which must succeed and print the words.
example() {
    local words=$1 script=$2
    shift 2
    "$examples/$script" "$@" >stdout 2>stderr </dev/null
    check "$script: exit status $?, $(tail -n 1 stderr)" grep -q -- "$words" stdout stderr
}

example "text: .* tok/s" own_text.sh text.txt out "${small[@]}" --tokenizer bpe:300
example "resume: from out/step_00000004" own_text.sh text.txt out "${small[@]}" --tokenizer bpe:300 --steps 5
echo "7?" >message
"$examples/chat.sh" out chats.jsonl chat --epochs 1 --samples 0 <message >stdout 2>stderr
check "chat.sh: $(tail -n 1 stderr)" grep -q "^chat: " stderr
check "a line is answered" grep -q "^prompt: .* tok/s" stderr
example "step 0/0 | text.txt | loss .* bpb" continue_hf.sh out text.txt text.txt more --seq-len 32 --batch 4 --epochs 0.1 --samples 0
example "wrote model.gguf" export.sh out model
check "a directory for transformers" [ -s model/model.safetensors ] && [ -s model/tokenizer.json ]
if is_here mpirun "two_processes.sh"; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
    example "resume: from two/step_00000004" two_processes.sh text.txt two "${small[@]}"
fi
check_done
