# options.sh -- faults of command lines, typed carelessly or by users of other programs; for
# dev/test/defects.sh.
# shellcheck shell=bash disable=SC2154

options_text() { for i in {1..200}; do echo "$i bottles of beer on the wall --- $i bottles of beer."; done >text.txt; }

# A value that starts with a dash was taken for an option.
defect_values_that_start_with_a_dash() {
    local value
    options_text
    for value in '---' '- '; do
        "$tokenize" --tokenizer "$PWD/merges.txt" --separator "$value" --out tokens text.txt >stdout 2>stderr
        check "--separator '$value' is a value: $(cat stderr)" grep -q 'merges.txt' stderr # the only thing that is missing
    done
    bad 2 "--separator=--lr if --lr is the value" --separator --lr 3
}

# Names of other programs were answered with the name of something else.
defect_names_of_other_programs() {
    bad 2 "--block_size|use --seq-len" --block_size 256
    bad 2 "--learning_rate|use --lr" --learning_rate 3e-4
    bad 2 "--max_iters|use --steps" --max_iters 100
    bad 2 "--gradient_accumulation_steps|use --total-batch" --gradient_accumulation_steps 4
    bad 2 "--eval_only|use --steps 0" --eval_only
    bad 2 "--init_from|use --model" --init_from gpt2
    bad 2 "--wandb_log|scripts/wandb_follow.py" --wandb_log
    bad 2 "--resid_pdrop|use --dropout" --resid_pdrop 0.1
    bad 2 "--bias|gpt2 has biases" --bias
    bad 2 "--compile|not needed" --compile
}

# A run could not be described by a file.
defect_no_file_of_options() {
    local model=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 2 --eval-batches 1 --samples 0)
    options_text
    train "${model[@]}" --train-data text.txt --out by_options --print-config
    cp stdout run.conf
    good "the options" "${model[@]}" --train-data text.txt --out by_options
    good "the file" --config run.conf --out by_file # the command line wins
    check "the same losses" [ -n "$(values train loss by_file/log.jsonl)" ]
    check "to the last digit" [ "$(values train loss by_file/log.jsonl)" = "$(values train loss by_options/log.jsonl)" ]
    good "a resumed run" --config run.conf --out by_file --resume on --steps 3 --override
}

# A variable of the shell that was not set started a default run.
defect_empty_values_start_a_run() {
    bad 2 "--report is empty" --report "${options_unset:-}"
    bad 2 "--compare is empty" --compare "${options_unset:-}"
    bad 2 "--out is empty" --out "${options_unset:-}"
    bad 2 "--train-data is empty" --train-data "${options_unset:-}"
}

# A prompt whose model was forgotten, or is only a size, trained for an hour.
defect_prompt_without_a_model_trains() {
    bad 2 "--prompt needs a trained model" --prompt "One day"
    bad 2 "gpt2 is a size, not a trained model|scripts/get_data.sh gpt2" --model gpt2 --prompt hello
}

# Nothing said whether weights were random or read, and a size hid the directory of its name.
defect_weights_from_nowhere() {
    local model=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2)
    good "a run" "${model[@]}" --steps 2 --out d6
    check "random weights are called so" grep -q '^weights: random, from --seed 42$' stdout
    good "a model whose name is also a size" --model d6 --steps 1 --batch 2
    check "is the directory" grep -q '^weights: read from d6/step_00000002$' stdout
    good "the run's own directory" --model d6 --vocab-size 383 --seq-len 16 --batch 1 --plan --out d6
    check "is not what a run starts from" grep -q '^model: 6 layers' stdout
}

# Tensors could not be frozen by the names that they have in the files.
defect_freeze_by_the_names_in_files() {
    local model=(--layers 2 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 1)
    good "names of Hugging Face" "${model[@]}" --freeze transformer.wte.weight,h.0.attn.c_attn
    check "freeze" grep -q '^freeze: 0.01M of .* parameters are frozen, including the output layer (tied to wte)$' stdout
}
