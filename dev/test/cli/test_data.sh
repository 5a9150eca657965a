#!/usr/bin/env bash
# test_data.sh -- the trainer's data as its users see it: how files are named, when encoded text is
# kept and made again, which files an interrupted run leaves, and files that change during a run.
#
#     dev/test/cli/test_data.sh build/plain/train_gpt2
#
# One line for each check that fails; the last line counts them.
set -u

trainer=$(realpath "${1:?usage: test_data.sh TRAINER}")
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
trainer_begin test_data
mkdir tmp
export TMPDIR=$work/tmp

# A run that takes a few milliseconds.
tiny=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 2 --eval-batches 2 --sample-every 0)
words=(--tokenizer merges.txt)

# says WHAT WORDS: the last run has said so.
says() { check "$1: \"$2\" is not said" grep -qF -- "$2" stdout; }
losses() { sed -n 's/^{"kind":"\(train\|val\)".*"loss":\([^,}]*\).*/\2/p' "$1/log.jsonl"; }
same_losses() { [ -n "$(losses "$1")" ] && [ "$(losses "$1")" = "$(losses "$2")" ]; }
is_empty() { [ -z "$(ls -A "$1")" ]; }
count_is() { [ "$(find "$1" -type f | wc -l)" = "$2" ]; }

make_files() {
    local i
    for i in {1..200}; do
        echo "$i bottles of beer on the wall, $i bottles of beer. Take $((i % 7)) down, pass them around."
    done >text.txt
    printf '#version: 0.2\nt h\nth e\n' >merges.txt
    mkdir books
    split -n 3 --additional-suffix .txt text.txt books/b
    sed 's/$/<|endoftext|>/' text.txt | tr -d '\n' >marked.txt
    for i in {1..4000}; do cat text.txt; done >long.txt
}

# ---- kept shards

test_kept() {
    local shard
    runs "text" "${tiny[@]}" "${words[@]}" --train-data text.txt --out first
    check "a shard and its record" count_is first/tokens 2
    cp -r first kept
    touch -d 2020-01-01 text.txt
    runs "a text that was touched" "${tiny[@]}" "${words[@]}" --train-data text.txt --out kept
    says "the tokens are taken" "text.txt: reusing tokens from an earlier run"
    check "no second copy" count_is kept/tokens 2

    shard=$(echo kept/tokens/*.bin)
    printf '\1\1' | dd of="$shard" bs=1 seek=5000 conv=notrunc status=none
    runs "a shard that was written to" "${tiny[@]}" "${words[@]}" --train-data text.txt --out kept
    says "it is named" "$shard: checksum "
    says "the text is encoded again" "text.txt is encoded again"
    check "with the same losses" same_losses kept first
    head -c 3000 "$shard" >short && cp short "$shard"
    runs "a shard that is shorter" "${tiny[@]}" "${words[@]}" --train-data text.txt --out kept
    says "it is named" "$shard: 3000 bytes, wanted "
    check "with the same losses" same_losses kept first

    cp text.txt text.bak
    tr a-z b-za <text.bak >text.txt
    touch -d 2020-01-01 text.txt
    runs "another text of the same size and time" "${tiny[@]}" "${words[@]}" --train-data text.txt --out kept
    says "it is encoded" "text.txt: "
    check "has other losses" [ "$(losses kept)" != "$(losses first)" ]
    check "what it was before is removed" count_is kept/tokens 2
    cp text.bak text.txt
    : >kept/tokens/0123456789abcdef_train_000000.bin.4711.part
    runs "after a killed run" "${tiny[@]}" "${words[@]}" --train-data text.txt --out kept
    check "its unfinished shard is removed" count_is kept/tokens 2
}

# --plan and --print-config write nothing.
test_dry() {
    local option
    for option in --plan --print-config; do
        runs "$option" "${tiny[@]}" --train-data text.txt --tokenizer bpe:300 --out never $option
        check "$option makes no vocabulary" [ ! -e never ]
        runs "$option" "${tiny[@]}" --train-data text.txt "${words[@]}" --out never $option
        check "$option makes no tokens" [ ! -e never ]
        runs "$option" "${tiny[@]}" --train-data text.txt "${words[@]}" $option
        check "$option makes no temporary files" is_empty tmp
    done
}

# ---- leftovers

# stop WHAT OPTIONS...: a run that is stopped while it works on a text that takes some seconds.
stop() {
    local what=$1 process i list=long.txt
    shift
    for i in {1..30}; do list+=,long.txt; done
    "$trainer" "${tiny[@]}" --train-data $list "$@" >stdout 2>stderr </dev/null &
    process=$!
    for ((i = 0; i < 200; i++)); do
        sleep 0.02
        [ -z "$(find tmp stopped/tokens -type f 2>/dev/null)" ] || break
        [ "$what" != "training a vocabulary" ] || [ ! -e stopped ] || break
    done
    kill -TERM $process
    wait $process
    status=$?
    check "SIGTERM while $what: exit status $status" [ $status = 143 ]
    check "is said: $(cat stderr)" grep -qx "stopped by SIGTERM while $what" stderr
    check "SIGTERM while $what: nothing is left in TMPDIR" is_empty tmp
    check "SIGTERM while $what: nothing is left in --out" [ -z "$(find stopped -type f 2>/dev/null)" ]
    rm -rf stopped
}

test_left() {
    stop "encoding text" "${words[@]}"
    stop "encoding text" "${words[@]}" --out stopped
    stop "training a vocabulary" --tokenizer bpe:2000 --out stopped
    printf '{"text":"one"}\n{"text":2}\n' >bad.jsonl
    bad 1 "bad.jsonl:2" "${tiny[@]}" "${words[@]}" --train-data bad.jsonl
    check "bad JSON leaves nothing" is_empty tmp
    echo few >few.txt
    bad 1 "few.txt: 5 tokens, wanted" "${tiny[@]}" "${words[@]}" --train-data few.txt
    check "too little text leaves nothing" is_empty tmp
    bad 1 "none.txt|No such file" "${tiny[@]}" "${words[@]}" --train-data text.txt --val-data none.txt
    check "missing validation data leave nothing" is_empty tmp
    check "they are missed before anything is encoded" [ "$(grep -c ' tokens of ' stdout)" = 0 ]
    runs "a run" "${tiny[@]}" "${words[@]}" --train-data text.txt
    check "a whole run leaves nothing" is_empty tmp
}

# ---- names

test_names() {
    mkdir 'odd [*,dir'
    cp text.txt 'a,b:5'
    cp text.txt 'odd [*,dir/w?[x.txt'
    runs "a name with a comma and a weight" "${tiny[@]}" --train-data 'a\,b\:5'
    runs "such names with weights" "${tiny[@]}" "${words[@]}" --train-data 'a\,b\:5:0.5,odd \[\*\,dir/w\?\[x.txt:0.5'
    says "they are sources" 'source a\,b\:5: '
    runs "an --out of such a name" "${tiny[@]}" "${words[@]}" --train-data text.txt --out 'odd [*,dir/out'
    TMPDIR="$work/odd [*,dir" runs "a TMPDIR of such a name" "${tiny[@]}" "${words[@]}" --train-data text.txt
    check "it is cleared" [ "$(find 'odd [*,dir' -name 'tokens-*')" = "" ]
    TMPDIR='' runs "an empty TMPDIR" "${tiny[@]}" "${words[@]}" --train-data text.txt
    TMPDIR=/nowhere bad 1 "TMPDIR /nowhere: cannot make a directory" "${tiny[@]}" "${words[@]}" --train-data text.txt

    runs "a directory" "${tiny[@]}" --train-data books --out directory
    runs "its files" "${tiny[@]}" --train-data 'books/*.txt' --out files
    check "are the same" same_losses directory files
    mkdir bare
    bad 1 "bare: contains no text files|'bare/*.bin'" "${tiny[@]}" --train-data bare
}

# ---- documents

test_documents() {
    local pack
    for pack in aligned bestfit pad dynamic uniform; do
        runs "--pack $pack of one text" "${tiny[@]}" "${words[@]}" --train-data text.txt --pack $pack --doc-mask on
        says "--pack $pack" "source text.txt: "
        runs "--pack $pack of a few" "${tiny[@]}" --train-data 'books/*.txt' --pack $pack
        says "--pack $pack" "3 documents, packed ($pack)"
    done
    runs "a mark in the text" "${tiny[@]}" "${words[@]}" --train-data marked.txt
    says "it is noticed" "warning: marked.txt contains <|endoftext|>"
    runs "a mark in bytes" "${tiny[@]}" --train-data marked.txt
    check "it is noticed once" [ "$(grep -c "separator '<|endoftext|>'" stdout)" = 1 ]
    runs "a separator" "${tiny[@]}" "${words[@]}" --train-data marked.txt --separator '<|endoftext|>' --pack pad --out marked
    check "makes documents" grep -q 'source marked.txt: .*; 19[0-9] documents' stdout
    check "and no warning" [ "$(grep -c warning stdout)" = 0 ]
    runs "a separator of bytes" "${tiny[@]}" --train-data marked.txt --separator '<|endoftext|>' --pack pad
    check "makes documents" grep -q 'source marked.txt: .*; 19[0-9] documents' stdout
    runs "another separator" "${tiny[@]}" "${words[@]}" --train-data marked.txt --separator bottles --out marked
    check "makes other tokens" [ "$(grep -c 'reusing tokens from an earlier run' stdout)" = 0 ]
    runs "a vocabulary and a separator" "${tiny[@]}" --tokenizer bpe:300 --train-data marked.txt \
        --separator '<|endoftext|>' --out own
    check "the vocabulary has no parts of it" [ "$(grep -c '"<|"' own/tokenizer.json)" = 0 ]
    bad 2 "--separator x needs --train-data" "${tiny[@]}" --separator x

    runs "--epochs" "${tiny[@]:0:10}" --train-data text.txt --epochs 0.02 --out epochs
    check "are steps" grep -q '"steps":[1-9][0-9]*,.*"epochs":0,' <(head -n 1 epochs/log.jsonl)
    runs "more epochs" "${tiny[@]:0:10}" --train-data text.txt --epochs 0.04 --out epochs --resume on
    check "replace the steps of the checkpoint" grep -qE '^resume: from .*, [0-9]+ of [0-9]+ steps done' stdout
    check "and the run is longer" awk '/^resume: from/ { exit !($4 + 0 < $6 + 0) }' stdout
    bad 2 "--epochs 1 and --steps 2" "${tiny[@]}" --train-data text.txt --epochs 1
}

# ---- bytes

# Bytes are the default for text of every kind: packed, and in fields.
test_bytes() {
    local kind
    printf '{"text":"%s"}\n' "bottles of beer" "on the wall, which is long enough for a sequence of bytes and for validation" >lines.jsonl
    for kind in {1..9}; do cat lines.jsonl; done >many.jsonl
    runs "bytes of JSON lines" "${tiny[@]}" --train-data many.jsonl --out bytes_jsonl
    check "are 257 tokens" grep -q '"vocab_size": 257' bytes_jsonl/step_00000002/config.json
    runs "their perplexity" --model bytes_jsonl --steps 0 --perplexity many.jsonl
    gzip -c text.txt >packed.txt.gz
    if "$trainer" "${tiny[@]}" --train-data packed.txt.gz 2>&1 | grep -q 'built without zlib'; then
        echo "skipped: bytes of packed text: built without zlib"
    else
        runs "bytes of packed text" "${tiny[@]}" --train-data packed.txt.gz --out bytes_packed
        runs "bytes of text" "${tiny[@]}" --train-data text.txt --out bytes_text
        check "are the same" same_losses bytes_packed bytes_text
    fi
    mkdir -p no_suffix
    cp text.txt no_suffix/GPL
    bad 1 "no_suffix: contains no text files|'no_suffix/*' for all as text" "${tiny[@]}" --train-data no_suffix
    runs "a pattern of all its files" "${tiny[@]}" --train-data 'no_suffix/*'
    bad 2 "--tokenizer bpe:300: add --out DIR: the vocabulary is kept there" "${tiny[@]}" --train-data text.txt --tokenizer bpe:300
    bad 2 "--tokenizer bpe:300 trains a vocabulary on text, and there is none|wanted --train-data" "${tiny[@]}" --tokenizer bpe:300 --out never
}

# Bare tokens below 65 with the vocabulary of GPT-2, which is the default, and with a number that is
# enough.
test_small_tokens() {
    local i
    for i in {1..400}; do printf '\x01\x00\x07\x00\x40\x00'; done >small.bin
    runs "small tokens" "${tiny[@]}" --data-format nanogpt --train-data small.bin
    says "a warning" "warning: the vocabulary is GPT-2's, of 50257 tokens, but the largest token of small.bin is 64; --vocab-size 65"
    runs "as it says" "${tiny[@]}" --data-format nanogpt --train-data small.bin --vocab-size 65
    check "no warning" [ "$(grep -c warning stdout)" = 0 ]
}

# Rows of a model that no token has are never drawn.
test_unused_ids() {
    runs "a model with more rows than tokens" "${tiny[@]}" "${words[@]}" --vocab-size 320 --train-data text.txt --out rows
    runs "text" --model rows --prompt bottles --tokens 200 --temperature 5
    check "has no numbers of tokens: $(tail -c 100 stdout)" [ "$(grep -oE '(^| )[0-9]{3,4} ' stdout | wc -l)" = 0 ]
}

# ---- special tokens

# A tokenizer with a special token more than its text makes: a model with and without a row for it
# trains, says where it is from, is saved and exported with it.
test_added_tokens() {
    local model=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 2 --eval-batches 2 --sample-every 0)
    local run=(--train-data text.txt --batch 2 --eval-batches 2 --sample-every 0)
    runs "a vocabulary" "${model[@]}" --train-data text.txt --tokenizer bpe:300 --out base
    sed 's/"special": true}\],$/"special": true}, {"id": 300, "content": "[PAD]", "special": true}],/' base/tokenizer.json >padded.json
    runs "a special token" "${model[@]}" --train-data text.txt --tokenizer padded.json --out padded --export-gguf padded.gguf
    check "the model has it" grep -q '"vocab_size": 301' padded/step_00000002/config.json
    check "the checkpoint's tokenizer has it" grep -qF '{"id": 300, "content": "[PAD]"' padded/step_00000002/tokenizer.json
    check "the exported model has it" grep -qaF '[PAD]' padded.gguf
    runs "a model with it" --model padded --train-data text.txt --steps 1 --eval-batches 2 --sample-every 0
    runs "text of a model with it" --model padded --prompt bottles --tokens 4
    runs "a model whose tokenizer it extends" "${run[@]}" --model base --tokenizer padded.json --out more --steps 1
    says "the rows that are new" "tokenizer: the first 300 of 301 tokens are the model's own"
    check "the model has them" grep -q '"vocab_size": 301' more/step_00000001/config.json
    check "its losses are numbers: $(losses more)" [ "$(losses more | grep -cE '^[0-9.]+$')" = 3 ]
    runs "it continues" "${run[@]}" --model base --tokenizer padded.json --out more --steps 2 --resume on
    check "it has only one first step" [ "$(grep -c '"kind":"train","step":1,' more/log.jsonl)" = 1 ]
    check "and a second" [ -d more/step_00000002 ]
    runs "a model of more rows than tokens" "${model[@]}" --train-data text.txt --tokenizer base/tokenizer.json --vocab-size 900 --out wide
    runs "it trains with its own tokenizer" "${run[@]}" --model wide --steps 1
    runs "a tokenizer that extends it" "${run[@]}" --model wide --tokenizer padded.json --steps 1
    says "the rows that are new" "tokenizer: the first 300 of 301 tokens are the model's own"
    bad 2 "has other tokens than the model's own in wide|: token " "${run[@]}" --model wide "${words[@]}" --steps 1
    runs "a model whose rows are padded" "${model[@]}" --train-data text.txt --tokenizer base/tokenizer.json --vocab-size 320 --out rows
    runs "a tokenizer that fits and extends it" "${run[@]}" --model rows --tokenizer padded.json --steps 1
    says "the rows that are new" "tokenizer: the first 300 of 301 tokens are the model's own"
    runs "another vocabulary" "${model[@]}" --train-data text.txt --tokenizer bpe:310 --out other
    bad 2 "has other tokens than the model's own in base|: token 299 is" "${run[@]}" --model base --tokenizer other/tokenizer.json --steps 1
    bad 2 "has other tokens than the model's own in rows|--vocab-size" "${run[@]}" --model rows --tokenizer other/tokenizer.json --steps 1
    runs "another vocabulary that fits, if told to" "${run[@]}" --model rows --tokenizer other/tokenizer.json --vocab-size 320 --steps 1
    bad 2 "the vocabulary is 300|wanted at least the 310 tokens|first ids" --model base --tokenizer other/tokenizer.json --prompt bottles
    cp padded.json base/step_00000002/tokenizer.json
    runs "a model without a row for it" --model base/step_00000002 --train-data text.txt --steps 1 --eval-batches 2 --sample-every 0 \
        --out unresized --export-gguf unresized.gguf
    check "its tokenizer is kept" grep -qF '[PAD]' unresized/step_00000001/tokenizer.json
    sed 's/"special": true}\],$/"special": true}, {"id": 300, "content": "beer", "special": false}],/' base/tokenizer.json >word.json
    runs "a word that is cut out of the text" "${model[@]}" --train-data text.txt --tokenizer word.json --out word
    check "the model has it" grep -q '"vocab_size": 301' word/step_00000002/config.json
    sed 's/"post_processor": {[^}]*}/"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}/' \
        base/tokenizer.json >start.json
    runs "another start token" "${model[@]}" --train-data text.txt --tokenizer start.json
    check "is said: $(head -n 1 stderr)" grep -qF 'note: start.json: its post_processor puts <s> beside each text' stderr
}

# A vocabulary with marks, and documents that are rearranged: the same after a resume.
test_fim() {
    local run=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 6 --save-every 3 --eval-batches 2
        --sample-every 0 --train-data text.txt --separator .)
    runs "fill in the middle" "${run[@]}" --tokenizer bpe:300 --fim-rate 0.5 --out fim
    says "what is rearranged" "packed (stream) into "
    says "how often" " pieces rearranged"
    check "the vocabulary has marks" grep -qF '{"id": 299, "content": "<|fim_middle|>"' fim/step_00000006/tokenizer.json
    runs "from the middle of the run" --resume fim/step_00000003 --out fim_on
    check "has the same losses" [ "$(losses fim | tail -n 2)" = "$(losses fim_on | tail -n 2)" ]
    runs "none rearranged" "${run[@]}" --tokenizer fim/tokenizer.json --out plain
    check "has other losses" [ "$(losses fim | tail -n 1)" != "$(losses plain | tail -n 1)" ]
    bad 2 "--fim-rate is 0.7, was 0.5|--override" --resume fim/step_00000003 --fim-rate 0.7 --out fim_on
    runs "another rate" --resume fim/step_00000003 --fim-rate 0.7 --override --out fim_other
    says "the data start over" "the training data are other sequences than before"
    bad 2 "--fim-rate 0.5 needs marks|--tokenizer merges.txt has none|<|fim_prefix|>, <|fim_suffix|> and <|fim_middle|>" \
        "${tiny[@]}" "${words[@]}" --train-data text.txt --fim-rate 0.5
    bad 2 "--fim-rate is for training" --model fim --prompt a --fim-rate 0.5
    runs "text in the middle" --model fim --prompt "9 bottles" --suffix " of beer." --tokens 4
    check "between prompt and suffix: $(cat stdout)" grep -q '^9 bottles.* of beer\.$' <(tr '\n' ' ' <stdout | sed 's/ $//')
    bad 2 "--suffix needs --prompt" --model fim --interactive --suffix b
    runs "a model without marks" "${tiny[@]}" "${words[@]}" --train-data text.txt --out unmarked
    bad 2 "--suffix needs marks|<|fim_prefix|>" --model unmarked --prompt a --suffix b
    bad 2 "--suffix: |wanted at most 16, the sequence length" --model fim --prompt a --suffix "zzzzzzzzzzzzzzzzzzzz"
}

# ---- text from Windows

# A byte-order mark is no text, whether it is read as bytes or as tokens, to train or to evaluate.
test_byte_order_marks() {
    mkdir windows unix
    local vocabulary
    for vocabulary in bytes words; do
        local tokens=()
        [ $vocabulary = bytes ] || tokens=("${words[@]}")
        cp text.txt unix/text.txt
        { printf '\xEF\xBB\xBF' && cat text.txt; } >windows/text.txt
        runs "$vocabulary" "${tiny[@]}" "${tokens[@]}" --train-data unix --out unmarked
        runs "$vocabulary behind a byte-order mark" "${tiny[@]}" "${tokens[@]}" --train-data windows --out marked_text
        check "the mark is said once, $vocabulary" [ "$(grep -c '^note: windows/text.txt starts with a byte-order mark' stderr)" = 1 ]
        check "the same losses, $vocabulary" same_losses unmarked marked_text
        runs "the perplexity" --model unmarked --steps 0 --perplexity unix/text.txt
        grep '^task' stdout | sed s/unix// >unmarked_loss
        runs "the perplexity behind a byte-order mark" --model unmarked --steps 0 --perplexity windows/text.txt
        check "the same, $vocabulary" cmp unmarked_loss <(grep '^task' stdout | sed s/windows//)
        rm -r unmarked marked_text
    done
    printf '\xFF\xFEh\0' >windows/utf16.txt
    bad 1 "windows/utf16.txt: UTF-16, by its byte-order mark" "${tiny[@]}" --train-data windows/utf16.txt
    bad 1 "windows/utf16.txt: UTF-16, by its byte-order mark" "${tiny[@]}" "${words[@]}" --train-data windows/utf16.txt
}

# ---- bad files

# A file that becomes shorter for good, or while it is written again, does not kill the run.
test_written_to() {
    local way i
    for way in shorter again; do
        cp text.txt changing.txt
        in_background "${tiny[@]:0:10}" --steps 1000000 --eval-every 0 --sample-every 0 --train-data changing.txt --out "written_$way"
        for ((i = 0; i < 200; i++)); do
            sleep 0.02
            ! grep -q '^step' stdout || break
        done
        check "a run goes" grep -q '^step' stdout
        if [ $way = shorter ]; then : >changing.txt; else head -c 5000 /dev/urandom >changing.txt; fi
        wait $process
        status=$?
        check_error "a file that changes ($way)" 1 "changing.txt|shorter"
        check "what came before is saved" [ "$(echo written_$way/step_*/state.json | wc -w)" = 1 ]
    done
}

# ---- mixtures that change

# A schedule, resumed by the same command, gives the same bits; sources come and go by name.
test_schedule() {
    local few=("${tiny[@]:0:10}" --eval-every 8 --eval-batches 2 --sample-every 0 --data-schedule mix.txt)
    local run=("${few[@]}" --train-data web=text.txt,books=books)
    tr a-z b-za <text.txt >maths.txt
    printf '0 web 3 books 1\n4 ramp web 3 books 1\n192 tokens books 1 # the end\n' >mix.txt
    bad 2 "--data-schedule mix.txt needs --steps" "${run[@]}"
    bad 2 "mix.txt:3: starts at sequence 12 of the run, line 2 at 40" "${run[@]}" --total-batch 160 --steps 8
    bad 2 "source web has no weight; wanted web=text.txt:WEIGHT" "${tiny[@]}" --train-data web=text.txt,books=books
    bad 2 "wanted sources with names and without weights" "${few[@]}" --steps 8 --train-data text.txt:1,books:1
    bad 2 "mix.txt:1: source books is not one of --train-data" "${few[@]}" --steps 8 --train-data web=text.txt
    runs "a schedule" "${run[@]}" --steps 8 --save-every 3 --out mixed
    says "its lines are shown" "mixture from step 4 on: web 75 %, books 25 %, then linearly to:"
    says "and what each source gave" "step 8/8 | web 50 %, "
    check "so does the log" grep -q '"kind":"source","step":8,"name":"web","share":0.5,"tokens":128,' mixed/log.jsonl
    cp -r mixed cut
    for step in 3 6; do
        rm -r cut/step_00000008
        runs "resumed at $step" --out cut --resume $step
        check "the same bits" cmp -s mixed/step_00000008/model.safetensors cut/step_00000008/model.safetensors
    done
    cp -r mixed batch
    printf '0 web 3 books 1\n4 ramp web 3 books 1\n6 books 1\n' >steps.txt
    runs "a larger batch" --out batch --resume 3 --data-schedule steps.txt --total-batch 64 --override
    check "lines keep their steps" grep -q '"first":18,"from_step":3,"from_tokens":96,"from_sequence":6,' batch/step_00000008/state.json
    runs "another mixture" --out cut --resume 8 --steps 10 --train-data maths=maths.txt:1,web=text.txt:1
    says "a new source" "source maths is new, with 50 %"
    says "one that left" "source books is not read any more, after 8 sequences"
    check "none is forgotten" grep -q '"name":"books",.*"number":1,"given":8,"share":0}' cut/step_00000010/state.json
    runs "it comes back" --out cut --resume 10 --steps 12 --train-data books=books:1
    check "where it was" grep -q '"name":"books",.*"number":1,"given":12,"share":1}' cut/step_00000012/state.json
    bad 2 "source books has other contents|another name for other files" --out cut --resume on --steps 13 --train-data books=text.txt:1
    bad 2 "--train-data is text.txt|sources with names, NAME=FILES, may change" --out cut --resume on --steps 13 --train-data text.txt
}

# Several validation sets have the losses that each has alone; the first is the validation.
test_sets() {
    local run=("${tiny[@]}" --eval-every 1 --train-data text.txt --val-data) sets=web=text.txt,books=books set
    runs "two sets" "${run[@]}" $sets --out sets --tensorboard on
    says "each has a line" "val books loss "
    for set in ${sets//,/ }; do
        runs "$set" "${run[@]}" "${set#*=}" --out "set_${set%=*}"
        check "${set%=*} has its loss alone" [ "$(grep "set.*\"name\":\"${set%=*}\"" sets/log.jsonl | sed 's/.*"loss"//')" = \
            "$(grep '"kind":"val"' "set_${set%=*}/log.jsonl" | sed 's/.*"loss"//')" ]
    done
    check "the first is the validation" cmp <(grep '"kind":"val"' sets/log.jsonl) <(grep '"kind":"val"' set_web/log.jsonl)
    check "TensorBoard has both" grep -rqa set/books/bpb sets/tensorboard
    cp sets/log.jsonl whole.jsonl
    runs "again" --out sets --resume on
    check "are not repeated" cmp <(grep -v -e config -e summary whole.jsonl) <(grep -v -e config -e summary sets/log.jsonl)
    check "the report has them" grep -q '<h2>Validation sets</h2>' <("$trainer" --report sets >/dev/null && cat sets/report.html)
    bad 2 "two sources are called web" "${run[@]}" web=text.txt,web=books
    bad 2 "1 of 2 items have a name" "${run[@]}" web=text.txt,books
    bad 2 "wanted both shards or both text" "${run[@]}" web=no.bin
}

make_files
test_sets
test_schedule
test_kept
test_dry
test_left
test_names
test_documents
test_bytes
test_small_tokens
test_unused_ids
test_added_tokens
test_fim
test_byte_order_marks
test_written_to
check_done
