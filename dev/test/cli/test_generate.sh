#!/usr/bin/env bash
# test_generate.sh -- tests the generation of text from the outside: --prompt, --interactive and
# --prompts.
#
#     dev/test/cli/test_generate.sh build/plain/train_gpt2 [build/sim/FP32/train_gpt2cu]
#
# A second trainer, the GPU's in FP32, must write the same greedy texts, with and without graphs.
# LEARNER in the environment is a faster build of the trainer, for a model that must learn
# something.
set -u

root=$PWD
trainer=$(realpath "${1:?usage: test_generate.sh TRAINER [GPU_TRAINER]}")
learner=$(realpath "${LEARNER:-$trainer}")
gpu_trainer=${2:+$(realpath "$2")}
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
trainer_begin test_generate

tiny=(--layers 2 --channels 32 --heads 2 --seq-len 32 --batch 2 --eval-every 0)
first_line() { head -n 1 "$1"; }

# A run on the stories, with its tokenizer; one on bytes; and a file of prompts.
make_files() {
    runs "a run" "${tiny[@]}" --steps 30 --out run
    tail -n 1 stdout >last_line
    for i in {1..60}; do
        echo "Grüße, $i bottles of beer — on the wall."
    done >text.txt
    runs "a run on bytes" "${tiny[@]}" --train-data text.txt --steps 30 --out bytes --export-llmc bytes.bin
    for prompt in 'One day' '' 'On a sunny evening' 'The dog' 'Mia'; do
        echo "{\"id\": 7, \"prompt\": \"$prompt\"}"
    done >prompts.jsonl
}

test_prompt() {
    check "the last line: $(cat last_line)" grep -q "^generate text: .* --model run --prompt '[A-Z][A-Za-z ,]*'\$" last_line
    good_text "a prompt" --model run --prompt 'One day' --tokens 12
    check "the text starts with the prompt" grep -q '^One day' stdout
    check "speed goes to standard error" grep -q 'text: [0-9]* tokens, [0-9.]* tok/s' stderr
    cp stdout newest
    good_text "the checkpoint itself" --model run/step_00000030 --prompt 'One day' --tokens 12
    check "the same text" cmp newest stdout
    good_text "another seed" --model run --prompt 'One day' --tokens 12 --seed 7
    check "another text" different newest stdout
    good_text "llm.c's file" --model bytes.bin --tokenizer bytes/step_00000030 --prompt 'Gr' --tokens 40
    cp stdout bin
    good_text "a directory" --model bytes --prompt 'Gr' --tokens 40
    check "the same model in both forms" cmp bin stdout
    check "whole characters" iconv -f utf-8 -t utf-8 stdout
    good_text "longer than the context" --model bytes --prompt 'Gr' --tokens 90
    good_text "no prompt" --model run --prompt '' --tokens 5
}

different() { ! cmp -s "$1" "$2"; }

# Standard error has facts, and no complaints.
good_text() {
    runs "$@"
    check "$1: complaint: $(grep -m 1 -E '^(error|warning)' stderr)" [ "$(grep -cE '^(error|warning)' stderr)" = 0 ]
}

test_interactive() {
    printf 'One day\nxyzzy\n\nMia' | "$trainer" --model run --interactive --tokens 6 >stdout 2>stderr
    status=$?
    check "exit status $status" [ $status = 0 ]
    check "three answers" [ "$(wc -l <stdout)" = 3 ]
    check "an unknown word is said, and ends nothing" grep -q '^note: prompt: no word .*xyzzy' stderr
    printf ':temperature 0\nMia\nMia\n:tokens 2\n:temperature hot\n:tempo 3\n:\nMia\nexit\nMia\n' |
        "$trainer" --model run --interactive --tokens 6 >stdout 2>stderr
    check "exit: exit status $?" [ $? = 0 ]
    check "three answers before exit" [ "$(wc -l <stdout)" = 3 ]
    check "at temperature 0 two texts are the same" [ "$(sed -n 1p stdout)" = "$(sed -n 2p stdout)" ]
    check "shorter, the same start" grep -q "^$(sed -n 3p stdout)" <(sed -n 1p stdout)
    check "and no more" [ "$(sed -n 3p stdout | wc -c)" -lt "$(sed -n 1p stdout | wc -c)" ]
    check "a bad value is said" grep -q "^note: :temperature is 'hot'; wanted 0 to 100" stderr
    check "the settings are shown" [ "$(grep -c '^:temperature 0  :top-k 0  :top-p 1  :tokens 2  exit$' stderr)" = 4 ]
    printf 'quit' | "$trainer" --model run --interactive >stdout 2>stderr
    check "quit: nothing on standard output" [ ! -s stdout ]
}

# Texts do not depend on each other.
test_prompts() {
    local batch
    good_text "prompts" --model run --prompts prompts.jsonl --out-texts texts --tokens 60 --stop Mia --stop dog
    check "nothing on standard output" [ ! -s stdout ]
    check "a line each" [ "$(grep -cE '^\{"prompt":".*","text":".*","tokens":[0-9]+,"stop":"(end|string|tokens)"\}$' texts)" = 5 ]
    check "in order" grep -q '"prompt":"Mia"' <(tail -n 1 texts)
    check "stop strings are cut off" [ "$(grep -cE '"text":"[^"]*(Mia|dog)' texts)" = 0 ]
    for batch in 1 3 7; do
        good_text "batch $batch" --model run --prompts prompts.jsonl --tokens 60 --stop Mia --stop dog --batch $batch
        check "the same texts, $batch at a time" cmp texts stdout
    done
    head -n 1 prompts.jsonl >one.jsonl
    good_text "a prompt alone" --model run --prompts one.jsonl --tokens 60 --stop Mia --stop dog
    check "the same text alone" [ "$(cat stdout)" = "$(first_line texts)" ]
    good_text "one thread" --model run --prompts prompts.jsonl --tokens 60 --stop Mia --stop dog --threads 1
    check "the same texts with one thread" cmp texts stdout
}

# End-of-text before a prompt and before a text that is evaluated, or not.
test_start_token() {
    local off=(--start-token off) with without
    good_text "a prompt" --model bytes --prompt 'Gr' --tokens 4
    check "starts with end-of-text" grep -q '^prompt: 3 tokens' stderr
    good_text "a prompt alone" --model bytes --prompt 'Gr' --tokens 4 "${off[@]}"
    check "does not: $(grep '^prompt' stderr)" grep -q '^prompt: 2 tokens' stderr
    good_text "prompts of a file alone" --model run --prompts prompts.jsonl --tokens 4 "${off[@]}"
    check "the empty one has a text, too" [ "$(wc -l <stdout)" = 5 ]
    runs "a text" --model bytes --steps 0 --perplexity text.txt
    with=$(grep '^step.*perplexity' stdout | grep -o '[0-9]* tokens$')
    runs "a text alone" --model bytes --steps 0 --perplexity text.txt "${off[@]}"
    without=$(grep '^step.*perplexity' stdout | grep -o '[0-9]* tokens$')
    check "its first byte is scored: ${with% tokens}" [ "${with% tokens}" = "$(wc -c <text.txt)" ]
    check "without end-of-text it is not: ${without% tokens}" [ "${without% tokens}" = $(($(wc -c <text.txt) - 1)) ]
}

# Prompts from Windows: the byte-order mark is no text.
test_byte_order_marks() {
    { printf '\xEF\xBB\xBF' && cat prompts.jsonl; } >marked.jsonl
    good_text "prompts" --model run --prompts prompts.jsonl --tokens 5
    cp stdout unmarked
    good_text "prompts behind a byte-order mark" --model run --prompts marked.jsonl --tokens 5
    check "the same texts" cmp unmarked stdout
    printf '\xEF\xBB\xBFOne day\n' | "$trainer" --model run --interactive --tokens 5 >stdout 2>stderr
    check "a line behind a byte-order mark" grep -q . stdout
    printf '\xFF\xFE{\0' >wide.jsonl
    bad 1 "wide.jsonl: UTF-16, by its byte-order mark" --model run --prompts wide.jsonl
}

test_misuse() {
    local model=(--model run --prompt x)
    echo '{"text": "a"}' >none.jsonl
    echo '{"prompt": 3}' >number.jsonl
    printf '\n{"prompt": "One day"}\n{"prompt": "xyzzy"}\n' >word.jsonl
    : >empty.jsonl
    bad 2 "--lr is for training" "${model[@]}" --lr 1
    bad 2 "--sample-tokens is for training" "${model[@]}" --sample-tokens 3
    bad 2 "--tokens is for generating text|--model" --tokens 3
    bad 2 "--stop is for generating text" "${tiny[@]}" --steps 1 --stop x
    bad 2 "only one of them" "${model[@]}" --interactive
    bad 2 "--interactive needs a trained model|--model DIR" --interactive
    bad 2 "--model d12 is a size|wanted a directory" --interactive --model d12
    bad 2 "--out-texts|--prompts" "${model[@]}" --out-texts texts
    bad 2 "the run reads this file" --model run --prompts prompts.jsonl --out-texts ./prompts.jsonl
    bad 2 "bytes.bin has no tokenizer|--tokenizer" --model bytes.bin --prompt x
    bad 2 "no word of the vocabulary|xyzzy|it has the words of, for example, \"One sunny day\", \"Once" --model run --prompt xyzzy
    bad 2 "40 tokens|at most 31" --model bytes --prompt 1234567890123456789012345678901234567890
    bad 2 "at most the model's context" --model run --prompt Mia --seq-len 64
    bad 2 "--tokens 0: wanted 1 to" --model run --prompt Mia --tokens 0
    bad 1 "none.jsonl:1|no prompt" --model run --prompts none.jsonl
    bad 1 "number.jsonl:1" --model run --prompts number.jsonl
    bad 1 "word.jsonl:3|xyzzy" --model run --prompts word.jsonl
    bad 1 "empty.jsonl|no prompts" --model run --prompts empty.jsonl
    bad 1 "gone.jsonl|No such file" --model run --prompts gone.jsonl
    bad 1 "no/texts|cannot write" --model run --prompts prompts.jsonl --out-texts no/texts
    bad 1 "gone/run|No such file" --model gone/run --prompt x
    cp -r run/step_00000030 relu && rm relu/state.json && sed -i 's/gelu_new/relu/' relu/config.json
    echo '{}' >relu/tokenizer.json
    bad 1 "relu/config.json: activation_function is relu, wanted gelu_new" --model relu --prompt x
    bad 1 "relu/config.json: activation_function is relu, wanted gelu_new" --model relu --train-data text.txt --steps 1
    mkdir nothing
    bad 1 "nothing/config.json" --model nothing --prompt x --tokenizer run/step_00000030
}

test_gpu() {
    local graph greedy=(--model run --prompts prompts.jsonl --tokens 60 --temperature 0 --batch 3)
    good_text "greedy texts" "${greedy[@]}"
    cp stdout greedy.jsonl
    for graph in off on; do
        "$gpu_trainer" "${greedy[@]}" --graph $graph >stdout 2>stderr
        check "the GPU's greedy texts, --graph $graph: $(grep -m 1 error stderr)" cmp greedy.jsonl stdout
    done
    test_gpu_quantized
}

# The CPU rounds inputs of matmuls, too, so a text may change where two tokens are almost as likely.
# 9 texts at a time are more than a kernel of few rows takes.
test_gpu_quantized() {
    local batch greedy=(--model run --prompts prompts.jsonl --tokens 12 --temperature 0 --quantize q8_0)
    good_text "greedy texts in 8 bits" "${greedy[@]}"
    cp stdout greedy.jsonl
    for batch in 1 9; do
        "$gpu_trainer" "${greedy[@]}" --batch $batch >stdout 2>stderr
        check "the GPU's memory in 8 bits: $(head -n 1 stderr)" grep -q 'parameters in 8 bits .* + expanded matrix' stderr
        check "the GPU's greedy texts in 8 bits, $batch at a time" \
            [ "$(grep -cxFf greedy.jsonl stdout)" -ge 4 ]
    done
    head -n 15 text.txt >short.txt
    runs "tasks in 8 bits" --model bytes --steps 0 --perplexity short.txt --quantize q8_0
    same_loss "$(loss_of)"
}

# The GPU's loss in 8 bits: the CPU rounds inputs of matmuls, too.
same_loss() {
    "$gpu_trainer" --model bytes --steps 0 --perplexity short.txt --quantize q8_0 >stdout 2>stderr
    check "tasks on a GPU in 8 bits: $(grep -m 1 error stderr)" grep -q 'parameters in 8 bits .* + expanded matrix' stdout
    check "loss $(loss_of) on a GPU in 8 bits, $1 on a CPU" \
        awk "BEGIN { d = $(loss_of) / $1 - 1; exit !(d < 0.001 && d > -0.001) }"
}

# The loss that is printed for a text.
loss_of() { sed -n 's/.* | loss \([0-9.]*\) | perplexity .*/\1/p' stdout; }

# Matrices in 8 bits: hardly another loss, less memory, and texts that depend on nothing else
# either.
test_quantized() {
    local q=(--quantize q8_0) loss prompts=(--model run --prompts prompts.jsonl --tokens 60) batch
    trainer=$learner runs "a model that has learned" --layers 2 --channels 64 --heads 2 --seq-len 64 --batch 8 --eval-every 0 --samples 0 \
        --train-data "$root/README.md" --steps 150 --lr 0.005 --out learned
    runs "its loss" --model learned --steps 0 --perplexity "$root/README.md" --plan
    check "memory in fp32" grep -q '= parameters 0\.5 + scratch [0-9.]* + activations' stdout
    runs "its loss" --model learned --steps 0 --perplexity "$root/README.md"
    loss=$(loss_of)
    check "loss $loss after learning" awk "BEGIN { exit !($loss > 0.5 && $loss < 3) }"
    runs "in 8 bits" --model learned --steps 0 --perplexity "$root/README.md" "${q[@]}"
    check "memory in 8 bits: $(grep memory: stdout)" grep -q '= parameters in 8 bits 0\.2 + scratch [0-9.]* + activations' stdout
    check "loss $(loss_of) in 8 bits, $loss in fp32" \
        awk "BEGIN { d = $(loss_of) / $loss - 1; exit !(d < 0.001 && d > -0.001) }"
    good_text "texts in 8 bits" "${prompts[@]}" "${q[@]}"
    cp stdout quantized
    for batch in 1 3 7; do
        good_text "batch $batch in 8 bits" "${prompts[@]}" "${q[@]}" --batch $batch --threads $((batch / 2 + 1))
        check "the same texts in 8 bits, $batch at a time" cmp quantized stdout
    done
    good_text "llm.c's file in 8 bits" --model bytes.bin --tokenizer bytes/step_00000030 --prompt 'Gr' --tokens 40 "${q[@]}"
    cp stdout bin
    good_text "a directory in 8 bits" --model bytes --prompt 'Gr' --tokens 40 "${q[@]}"
    check "the same model in both forms, in 8 bits" cmp bin stdout
}

test_quantized_misuse() {
    local q=(--quantize q8_0)
    runs "48 channels" --layers 1 --channels 48 --heads 2 --seq-len 32 --batch 2 --eval-every 0 --steps 1 --out odd
    bad 2 "48 columns|multiple of 32|--quantize off works" --model odd --prompt x "${q[@]}"
    bad 2 "training needs --quantize off" "${tiny[@]}" --steps 1 "${q[@]}"
    bad 2 "training needs --quantize off" --model run --steps 0 "${q[@]}"
    bad 2 "no weights to export" --model bytes --steps 0 --perplexity text.txt --export-llmc x.bin "${q[@]}"
    bad 2 "--matmul bf16|--quantize q8_0|one of the two" --model run --prompt x --matmul bf16 "${q[@]}"
    bad 2 "--quantize q4: wanted off" --model run --prompt x --quantize q4
}

make_files
test_prompt
test_interactive
test_prompts
test_start_token
test_byte_order_marks
test_misuse
test_quantized
test_quantized_misuse
[ -z "$gpu_trainer" ] || test_gpu
check_done
