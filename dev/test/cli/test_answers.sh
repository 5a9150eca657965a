#!/usr/bin/env bash
# test_answers.sh -- prompts and chats as users see them: the loss of the answers is that of
# transformers (dev/ref/make_chat_fixtures.py), whatever the packing, the micro-batch and the ranks;
# shards of ./tokenize give the same; talking to a model in turns.
#
#     dev/test/cli/test_answers.sh build/plain/train_gpt2
#
# One line for each check that fails; the last line counts them.
set -u

trainer=$(realpath "${1:?usage: test_answers.sh TRAINER}")
tokenize=$(dirname "$trainer")/tokenize
fixtures=$(realpath dev/ref/fixtures/chats)
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
trainer_begin test_answers
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 TMPDIR=$work

read -r wanted_loss wanted_norm _ < <(grep -v '^#' "$fixtures/loss.txt")
chats=$fixtures/documents.jsonl

# A run whose only update has all twelve documents, each in a row of its own.
update=(--model "$fixtures/model" --matmul fp32 --seq-len 96 --total-batch $((96 * 12)) --steps 1 --sample-every 0)
all=(--val-data "$chats" --eval-batches 12)
precision=1e-5 # of sums of some hundred fp32 numbers

says() { check "$1: \"$2\" is not said" grep -qF -- "$2" stdout; }

# near WHAT GOT WANTED
near() {
    check "$1: $2, wanted $3" awk -v a="$2" -v b="$3" -v e=$precision 'BEGIN { exit !(a != "" && a - b < e && b - a < e) }'
}

# is_true WHAT OUT: the losses and the norm of the first update are those of transformers.
is_true() {
    near "$1: loss" "$(values train loss "$2/log.jsonl")" "$wanted_loss"
    near "$1: norm" "$(values train norm "$2/log.jsonl")" "$wanted_norm"
    near "$1: validation" "$(values val loss "$2/log.jsonl" | head -n 1)" "$wanted_loss"
}

test_losses() {
    local pack batch
    for pack in pad dynamic uniform; do
        for batch in 1 2 4; do
            [ $pack = pad ] || [ $batch = 2 ] || continue
            runs "$pack $batch" "${update[@]}" "${all[@]}" --train-data "$chats" --pack $pack --batch $batch --out one
            is_true "$pack, --batch $batch" one
        done
    done
    runs "bestfit" "${update[@]}" "${all[@]}" --train-data "$chats" --out fit # some documents twice in the update
    near "bestfit, by itself: validation" "$(values val loss fit/log.jsonl | head -n 1)" "$wanted_loss"
    says "the default packing" "--pack bestfit --doc-mask on"
    says "the marks" "chats are ChatML, whose marks are special tokens of the tokenizer"
    says "the share" "(28.9 % count in the loss)"
    check "the template of the chats is saved" grep -q "'<|im_start|>user" fit/step_00000001/chat_template.jinja
}

test_ranks() {
    local n
    if ! command -v mpirun >/dev/null || ! grep -q MPI_Init_thread "$trainer"; then
        echo "skipped: test_answers, ranks: mpirun is missing, or the build has no MPI (scripts/install_deps.sh --test)"
        return
    fi
    for n in 2 3; do
        timeout 120 mpirun --oversubscribe --bind-to none -n $n "$trainer" "${update[@]}" "${all[@]}" --train-data "$chats" \
            --pack pad --batch 2 --out ranks$n >stdout 2>stderr </dev/null
        check "$n ranks: exit status $?, $(head -n 1 stderr)" [ -s ranks$n/log.jsonl ]
        is_true "$n ranks" ranks$n
    done
}

# Shards with masks, whatever their size; a damaged mask is refused.
test_shards() {
    "$tokenize" --tokenizer "$fixtures/model" --out some --val-tokens 0 --shard-tokens 100 "$chats" >stdout 2>stderr
    check "tokenize: $(head -n 1 stderr)" [ -f some_train_000003.bin.mask ]
    runs "shards" "${update[@]}" --train-data 'some_*.bin' --val-data 'some_*.bin' --eval-batches 12 --pack pad --batch 4 --out shards
    is_true "shards" shards
    "$tokenize" --tokenizer "$fixtures/model" --out some --val-tokens 0 --shard-tokens 100 "$chats" >stdout 2>stderr
    says "the same command" "already finished"
    cp some_train_000001.bin.mask before
    bad 2 "--export-gguf some_train_000001.bin.mask: the run reads this file" "${update[@]}" --train-data 'some_*.bin' --export-gguf some_train_000001.bin.mask
    check "the mask is there" cmp before some_train_000001.bin.mask
    printf '\77' | dd of=some_train_000001.bin.mask bs=1 seek=17 conv=notrunc status=none
    bad 1 "some_train_000001.bin.mask: its bits hide|its header says" "${update[@]}" --train-data 'some_*.bin'
    cp before some_train_000001.bin.mask
    printf '\1' | dd of=some_train_000001.bin.mask bs=1 seek=33 conv=notrunc status=none
    bad 1 "some_train_000001.bin.mask: its bits have another checksum" "${update[@]}" --train-data 'some_*.bin'
    "$tokenize" --tokenizer "$fixtures/model" --out some --val-tokens 0 --shard-tokens 100 "$chats" >stdout 2>stderr
    check "tokenize does not see a damaged mask" grep -q "its checksum is" stderr
    "$tokenize" --tokenizer "$fixtures/model" --out some --val-tokens 0 --restart "$chats" >stdout 2>stderr
    check "old masks stay" [ "$(echo some_*.mask)" = some_train_000000.bin.mask ]
}

# Answers are whole after a resumed run, and a mask that is lost is made again.
test_kept() {
    runs "kept" "${update[@]}" "${all[@]}" --train-data "$chats" --pack pad --batch 4 --out kept
    printf '\1' | dd of="$(echo kept/tokens/*.mask)" bs=1 seek=33 conv=notrunc status=none
    runs "a damaged mask" "${update[@]}" "${all[@]}" --train-data "$chats" --pack pad --batch 4 --out kept --resume off
    says "a damaged mask" "is encoded again"
    check "a damaged mask: two files and a record" [ "$(find kept/tokens -type f | wc -l)" = 3 ]
    is_true "a damaged mask" kept
}

test_bad() {
    printf '{"prompt":"a","completion":"b"}\n{"messages":[{"role":"tool","content":"x"}]}\n' >bad.jsonl
    bad 1 'bad.jsonl:2: message 1: role "tool", wanted "system", "user" or "assistant"' "${update[@]}" --train-data bad.jsonl
    head -n 1 bad.jsonl >one.jsonl
    bad 2 "--fim-rate 0.5, but --train-data one.jsonl has prompts or chats" "${update[@]}" --train-data one.jsonl --fim-rate 0.5
    bad 1 "one.jsonl: one document, wanted another for validation" "${update[@]}" --train-data one.jsonl
}

not() { ! "$@"; }

# talk LINES OPTIONS...
talk() {
    local lines=$1
    shift
    printf '%b' "$lines" | "$trainer" --interactive --temperature 0 --tokens 8 "$@" >stdout 2>stderr
    status=$?
    check "talking: exit status $status, $(head -n 1 stderr)" [ $status = 0 ]
}

# A model learns two answers by heart, the second one after the first, and gives them in turns.
test_talking() {
    local turn='{"role":"user","content":"2 + 3?"},{"role":"assistant","content":"5."}'
    printf '{"messages":[%s,{"role":"user","content":"Sure?"},{"role":"assistant","content":"Yes!"}]}\n' "$turn" >learn.jsonl
    runs "learning" --model "$fixtures/model" --train-data learn.jsonl --val-data learn.jsonl --seq-len 64 --batch 1 --lr 0.02 \
        --steps 60 --eval-every 60 --sample-every 0 --out learned
    says "learning" "talk to it:"
    for file in config.json generation_config.json; do
        check "$file: the end of an answer" grep -q "\"eos_token_id\": \[642, 640\]" learned/step_00000060/$file
    done
    check "tokenizer_config.json: the end of an answer" grep -q '"eos_token": "<|im_end|>"' learned/step_00000060/tokenizer_config.json
    talk '2 + 3?\nSure?\n/reset\n2 + 3?\n\nSure?' --model learned
    check "answers in turns: $(tr '\n' ' ' <stdout)" [ "$(tr '\n' ' ' <stdout)" = "5. Yes! 5. Yes! " ]
    check "the format is said" grep -q "^chat: ChatML; /reset" stderr
    check "a new chat is said" grep -q "note: a new chat" stderr
    check "a new chat has the first prompt: $(grep ^prompt stderr)" awk '/^prompt/ { n[++i] = $2 }
        END { exit !(i == 4 && n[1] < n[2] && n[3] == n[1] && n[4] == n[2]) }' stderr
    talk '2 + 3?' --model learned --chat off
    check "--chat off: no marks" not grep -q "^chat:" stderr
    talk '2 + 3?' --model "$fixtures/model"
    check "a model that has learned no chats: no marks" not grep -q "^chat:" stderr
    talk '2 + 3?' --model "$fixtures/model" --chat on --system "Be short."
    check "--chat on: marks" grep -q "^chat: ChatML" stderr
    talk "$(printf '%0200d' 0)\n2 + 3?" --model learned --seq-len 64
    check "a message that is too long" grep -q "note: the message is too long for the context of 64 tokens" stderr
    check "the next one is answered" [ "$(cat stdout)" = "5." ]
    talk '2 + 3?\nSure?\n2 + 3?\n2 + 3?\n' --model learned --seq-len 48
    check "the oldest turns go: $(grep note stderr)" grep -q "the context of 48 tokens is full: forgot the oldest 1 turn" stderr
    bad 2 "--chat on is for --interactive" --model learned --prompt a --chat on
    bad 2 "--system is for --interactive" --model learned --prompt a --system b
    bad 2 "--system is for chats" --model learned --interactive --system b --chat off
    bad 2 "--system is for chats|has no chat_template.jinja" --model "$fixtures/model" --interactive --system b
    bad 2 "--chat maybe: wanted off" --model learned --interactive --chat maybe
}

# A template that is another format stays, or is refused by name; --chat replaces it.
test_templates() {
    local more=(--train-data learn.jsonl --val-data learn.jsonl --seq-len 64 --batch 1 --steps 1 --sample-every 0 --eval-every 0)
    cp -r learned/step_00000060 foreign
    printf '{%% for m in messages %%}[INST] {{ m.content }} [/INST]{%% endfor %%}' >foreign/chat_template.jinja
    bad 2 "learn.jsonl has chats: the model's chat_template has a format that is not known|--chat chatml" --model foreign "${more[@]}"
    runs "--chat" --model foreign "${more[@]}" --chat chatml --out chosen --export-gguf chosen.gguf
    says "--chat" "chats: --chat chatml replaces the model's own chat_template"
    check "--chat: its template" grep -q "'<|im_start|>user" chosen/step_00000001/chat_template.jinja
    check "--chat: the GGUF" grep -qa "tokenizer.ggml.eot_token_id" chosen.gguf
    check "--chat: the template in the GGUF" grep -qa "tokenizer.chat_template" chosen.gguf
    talk '2 + 3?' --model foreign
    check "a note of the template" grep -q "chat_template whose format is not known" stderr
    printf "{{ bos_token }}{%% for m in messages %%}{{ '<|im_start|>' + m.role + '\\n' + (m.content | trim) + '<|im_end|>\\n' }}{%% endfor %%}{%% if add_generation_prompt %%}{{ '<|im_start|>assistant\\n' }}{%% endif %%}" >foreign/chat_template.jinja
    runs "its own" --model foreign "${more[@]}" --out own
    check "its own template stays" cmp -s foreign/chat_template.jinja own/step_00000001/chat_template.jinja
    bad 2 "--chat on is for --interactive" --model foreign "${more[@]}" --chat on
    printf 'text\n' >plain.txt
    bad 2 "--chat chatml, but --train-data plain.txt has no chats" --model learned --train-data plain.txt --chat chatml
}

test_losses
test_ranks
test_shards
test_kept
test_bad
test_talking
test_templates
check_done
