#!/usr/bin/env bash
# test_cli.sh -- the trainer as its users and their scripts see it: every bad input is one clear
# error with the right exit status, and good runs write exactly what DESIGN promises.
#
#     dev/test/cli/test_cli.sh build/plain/train_gpt2
#
# One line for each check that fails; the last line counts them.
set -u

root=$PWD
trainer=$(realpath "${1:?usage: test_cli.sh TRAINER}")
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
trainer_begin test_cli

# A model and a run that take a few milliseconds.
model=(--layers 2 --channels 16 --heads 2)
batch=(--seq-len 16 --batch 2)
quiet=(--eval-every 0 --sample-every 0 --save-every 0) # only updates
tiny=("${model[@]}" "${batch[@]}" --steps 3 --eval-batches 2)

# ---- reading logs ----

kinds_of() { sed -E 's/^\{"kind":"([a-z]*)".*/\1/' "$1" | tr '\n' ' '; }
steps_of() { values "$1" step "$2" | tr '\n' ' '; }
# Prints the numbers that must have the same bits in two runs: losses and norms of the updates,
# losses of the validations.
numbers() { values train loss "$1/log.jsonl" && values train norm "$1/log.jsonl" && values val loss "$1/log.jsonl"; }
same_numbers() { [ -n "$(numbers "$1")" ] && [ "$(numbers "$1")" = "$(numbers "$2")" ]; }
samples_of() { sed -n 's/^{"kind":"sample".*"text":"\(.*\)"}$/\1/p' "$1/log.jsonl"; }
# The keys of the lines of one kind, each different list once, with V for every value.
keys() { grep "^{\"kind\":\"$1\"" "$2" | sed -E 's/:("([^"\\]|\\.)*"|[^",{}]+)/:V/g' | sort -u; }
# near A B RELATIVE: two numbers; NaN is not near anything.
near() { awk -v a="$1" -v b="$2" -v r="$3" 'BEGIN { d = a - b; exit !(d * d <= (r * b) ^ 2) }'; }
below() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a < b) }'; }
# Two columns of numbers, line by line.
all_near() {
    [ "$(wc -l <"$1")" = "$(wc -l <"$2")" ] && [ -s "$1" ] &&
        paste "$1" "$2" | awk -v r="$3" '{ d = $1 - $2; if (!(d * d <= (r * $2) ^ 2)) exit 1 }'
}

# ---- making files ----

# Little-endian integers of 4 or 2 bytes.
int32() {
    local n
    for n in "$@"; do
        printf '%b' "$(printf '\\x%02x\\x%02x\\x%02x\\x%02x' $((n & 255)) $((n >> 8 & 255)) $((n >> 16 & 255)) \
            $((n >> 24 & 255)))"
    done
}
int16() {
    local n
    for n in "$@"; do
        printf '%b' "$(printf '\\x%02x\\x%02x' $((n & 255)) $((n >> 8 & 255)))"
    done
}
# A header of 256 int32 that starts with these.
header() { int32 "$@" && head -c $((1024 - 4 * $#)) /dev/zero; }
# patch FILE OFFSET: standard input over the bytes at the offset.
patch() { dd of="$1" bs=1 seek="$2" conv=notrunc status=none; }

make_files() {
    local tokens=() i
    for i in {1..400}; do
        tokens+=($((i * i % 97)))
    done
    { header 20240520 1 400 && int16 "${tokens[@]}"; } >train_0.bin
    { header 20240520 1 100 && int16 "${tokens[@]:0:100}"; } >train_1.bin
    { header 20240801 7 400 && int32 "${tokens[@]:0:399}" 65600; } >wide.bin
    { header 20240520 1 400 && int16 "${tokens[@]:0:123}" 300 "${tokens[@]:124}"; } >high_id.bin
    { header 20240521 1 400 && int16 "${tokens[@]}"; } >magic.bin
    { header 20240520 2 400 && int16 "${tokens[@]}"; } >version.bin
    { header 20240520 1 -5 && int16 "${tokens[@]}"; } >negative.bin
    head -c 1823 train_0.bin >truncated.bin
    { cat train_0.bin && printf x; } >oversized.bin
    head -c 500 train_0.bin >headless.bin
    int16 "${tokens[@]}" >bare.bin
    cat bare.bin bare.bin >bare_2.bin
    : >empty.bin
    : >empty.txt
    for i in {1..60}; do
        echo "$i bottles of beer on the wall, $i bottles of beer."
    done >text.txt
}
shards=(--train-data 'train_*.bin' --vocab-size 100)
text=(--train-data text.txt)

# ---- the command line ----

test_command_line() {
    good "--help" --help
    "$trainer" --help basic >basic.txt
    check "--help basic: $(grep -c '^  --' basic.txt) options" [ "$(grep -c '^  --' basic.txt)" = 14 ]
    check "--help names the options" grep -q -e '--train-data.*-i' stdout
    good "--version" --version
    check "--version is one line with the name" grep -q '^train_gpt2 [0-9]' stdout
    good "short names" -b 2 -t 16 -x 1 -m 1 -v 0 -s 0 "${model[@]}"
    good "equals signs" --batch=2 --seq-len=16 --steps=1 --eval-every=0 "${model[@]}"
    good "a map of the elements" --plan map "${tiny[@]}" --num-processes 4 --zero 2
    check "of four ranks" [ "$(grep -c '^map of rank' stdout)" = 4 ]
    bad 2 "unexpected argument 'off'" "${tiny[@]}" --plan off
    good "a plan" --plan "${tiny[@]}" --out never
    check "a plan makes no files" [ ! -e never ]
    check "a plan speaks of memory" grep -q '^memory: ' stdout
    check "it ends with the summary: $(tail -n 1 stdout)" grep -q '^rates: ' <(tail -n 1 stdout)
    bad 2 "--node-gbps|0|above 0" "${tiny[@]}" --plan --num-processes 4 --node-gbps 0
    bad 2 "--net-gbps|fast" "${tiny[@]}" --plan --num-processes 4 --net-gbps fast

    # One of each kind; test_options.c has the others.
    bad 2 "--bacth|--batch" --bacth 4
    bad 2 "unexpected argument|words" words
    bad 2 "--batch|missing its value" --batch
    bad 2 "--batch|abc|1 to" --batch abc
}

test_sizes() {
    bad 2 "--seq-len is 65|64" "${model[@]}" --seq-len 65 --context 64
    bad 2 "--seq-len is 1025|1024" --model d6 --seq-len 1025
    bad 2 "--total-batch is 100|--seq-len 16" "${model[@]}" --batch 3 --seq-len 16 --total-batch 100
    bad 2 "--channels 130|--heads 4" --channels 130
    bad 2 "--model|d13" --model d13
    bad 2 "--save-every 2|--out" "${tiny[@]}" --save-every 2
    bad 2 "256|257" "${tiny[@]}" "${text[@]}" --vocab-size 256
    bad 2 "--prompt|--tokenizer" "${tiny[@]}" "${shards[@]}" --prompt x
    bad 2 "--prompt|20 tokens|15" "${tiny[@]}" "${text[@]}" --prompt 12345678901234567890
    bad 2 "--val-data|--train-data" "${tiny[@]}" --val-data train_0.bin
    bad 2 "both" "${tiny[@]}" "${shards[@]}" --val-data text.txt
    bad 2 "1 of 2 items have a weight|all or none" "${tiny[@]}" --train-data train_0.bin:0.5,train_1.bin
    bad 2 "train_1.bin:0|weight|positive" "${tiny[@]}" --train-data train_0.bin:1,train_1.bin:0
    bad 2 "uniform|one source|2 sources" "${tiny[@]}" --train-data train_0.bin:1,train_1.bin:1 --pack uniform \
        --vocab-size 100
}

# ---- bad files ----

test_bad_data() {
    local file
    bad 1 "none.bin|No such file" "${tiny[@]}" --train-data none.bin
    bad 1 "none_*.bin|No such file" "${tiny[@]}" --train-data 'none_*.bin'
    bad 1 "none.txt|No such file" "${tiny[@]}" --train-data none.txt
    bad 1 "empty.bin|empty" "${tiny[@]}" --train-data empty.bin
    bad 1 "empty.txt|empty" "${tiny[@]}" --train-data empty.txt
    bad 1 "headless.bin|500 bytes|1024" "${tiny[@]}" --train-data headless.bin
    bad 1 "truncated.bin|truncated|1823|1824" "${tiny[@]}" --train-data truncated.bin
    bad 1 "oversized.bin|too long|1825|1824" "${tiny[@]}" --train-data oversized.bin
    bad 1 "magic.bin|20240521|20240520" "${tiny[@]}" --train-data magic.bin
    bad 1 "version.bin|version 2|wanted 1" "${tiny[@]}" --train-data version.bin
    bad 1 "negative.bin|-5" "${tiny[@]}" --train-data negative.bin
    bad 1 "high_id.bin|token 123|id 300|100" "${tiny[@]}" --train-data high_id.bin --vocab-size 100
    bad 1 "wide.bin|token 399|id 65600|50257" "${tiny[@]}" --train-data wide.bin
    bad 1 "high_id.bin|token 123" "${tiny[@]}" "${shards[@]}" --val-data high_id.bin
    bad 1 "truncated.bin|1823" "${tiny[@]}" "${shards[@]}" --val-data truncated.bin
    bad 1 "train_1.bin|100 tokens" "${model[@]}" --seq-len 80 --train-data train_1.bin
    bad 1 "bare_2.bin|--data-format nanogpt" "${tiny[@]}" --train-data bare_2.bin --vocab-size 100
    bad 1 "no token 99 (end of text)|--pack stream" "${tiny[@]}" "${shards[@]}" --pack aligned
    mkdir empty
    bad 1 "empty: contains no text files" "${tiny[@]}" --train-data empty
    bad 1 "none.bin|tokenizer" "${tiny[@]}" "${shards[@]}" --tokenizer none.bin
    bad 1 "train_0.bin|wanted a tokenizer|not llm.c's .bin" "${tiny[@]}" "${shards[@]}" --tokenizer train_0.bin
}

test_bad_model() {
    local size
    good "export" "${tiny[@]}" --export-llmc good.bin
    size=$(stat -c %s good.bin)
    head -c $((size - 1)) good.bin >short_model.bin
    { cat good.bin && printf x; } >long_model.bin
    cp good.bin nan_model.bin
    printf '\0\0\300\177' | patch nan_model.bin $((1024 + 4 * (5 * 16 + 7))) # wte, row 5, column 7
    cp good.bin old_model.bin
    int32 1 | patch old_model.bin 4
    cp good.bin heads_model.bin
    int32 3 | patch heads_model.bin 20
    bad 1 "short_model.bin|$((size - 1)) bytes|$size" "${batch[@]}" --model short_model.bin
    bad 1 "long_model.bin|$((size + 1)) bytes|$size" "${batch[@]}" --model long_model.bin
    bad 1 "nan_model.bin|wte|row 5|column 7|nan" "${batch[@]}" --steps 1 --model nan_model.bin
    bad 1 "old_model.bin|version 1" "${batch[@]}" --model old_model.bin
    bad 1 "heads_model.bin|16 channels in 3 heads" "${batch[@]}" --model heads_model.bin
    bad 1 "train_0.bin|magic number 20240520" "${batch[@]}" --model ./train_0.bin
    bad 1 "none.bin|No such file" "${batch[@]}" --model none.bin
    bad 2 "--layers is 3|good.bin has 2" "${batch[@]}" --model good.bin --layers 3
    bad 2 "--seq-len is 32|16" --batch 2 --seq-len 32 --model good.bin
}

# ---- places that cannot be written ----

test_bad_output() {
    echo mine >file
    bad 1 "file/out|Not a directory" "${tiny[@]}" --out file/out
    bad 1 "file|Not a directory" "${tiny[@]}" --out file
    bad 1 "nowhere/model.bin|No such file" "${tiny[@]}" --export-llmc nowhere/model.bin
    mkdir -p taken/step_00000003.part/log
    bad 1 "taken/step_00000003.part|cannot make" "${tiny[@]}" --out taken
}

# The library fault.so, whose calls fail when they are told to (fault.c).
make_fault() { [ -e fault.so ] || "${CC:-cc}" -shared -fPIC "$root/dev/test/lib/fault.c" -o fault.so -ldl; }

# /dev/full is a disk without room; a limit on the size of files is one that fills up.
test_full_disk() {
    local file
    make_fault
    for file in log.jsonl main.log; do
        LD_PRELOAD=$PWD/fault.so ASAN_OPTIONS=verify_asan_link_order=0 FAULT_FULL=/$file \
            bad 1 "full_$file/$file|No space left" "${tiny[@]}" --out "full_$file"
    done
    "$trainer" "${tiny[@]}" >/dev/full 2>stderr
    status=$?
    check_error "a full standard output" 1 "standard output|No space left"
    good "two runs to compare" "${tiny[@]}" --out compare_1
    good "and another" "${tiny[@]}" --out compare_2
    local look
    for look in --help --version --plan --print-config '--compare compare_1,compare_2' '--report compare_1'; do
        # shellcheck disable=SC2086
        "$trainer" $look >/dev/full 2>stderr </dev/null
        status=$?
        check_error "$look on a full standard output" 1 "standard output: "
    done

    good "a run before the disk is full" "${tiny[@]}" --out fills --export-llmc fills/export.bin
    mkdir before
    cp fills/step_00000003/model.safetensors fills/export.bin before
    (ulimit -f 8 && train "${tiny[@]}" --seed 7 --out fills && exit "$status")
    status=$?
    check_error "a checkpoint on a full disk" 1 "fills/step_00000003|File too large"
    check "nothing unfinished is left" [ -z "$(compgen -G 'fills/*.part*')" ]
    check "the older checkpoint is untouched" cmp fills/step_00000003/model.safetensors before/model.safetensors
    (ulimit -f 8 && train "${tiny[@]}" --seed 7 --export-llmc fills/export.bin && exit "$status")
    status=$?
    check_error "an export on a full disk" 1 "fills/export.bin|File too large"
    check "the older export is untouched" cmp fills/export.bin before/export.bin
    check "nothing half-written is left" [ -z "$(find fills -name '*.part' -type f)" ]
}

# ---- the memory of the classifier ----

# Logits of 262,144 tokens: a micro-batch of 512 would take 512 MiB, a chunk 64. The process itself
# has 16 MiB, 64 with a sanitizer.
test_large_vocabulary() {
    local own=16
    ! ldd "$trainer" | grep -q libasan || own=64
    local run=(--layers 1 --channels 8 --heads 2 --vocab-size 262144 --batch 1 --seq-len 512 --steps 1 --eval-batches 1
        --sample-every 0)
    good "a plan of a large vocabulary" "${run[@]}" --plan
    check "its chunks: $(grep '^classifier' stdout)" grep -q '^classifier: 64 of 512 tokens at a time, in 64.0 MiB of the activations$' stdout
    good "a run" "${run[@]}" --out large
    check "the peak: $(values summary peak_mb large/log.jsonl) of planned $(values summary planned_mb large/log.jsonl) MiB" \
        below "$(values summary peak_mb large/log.jsonl)" "$(values summary planned_mb large/log.jsonl | awk -v own=$own '{ print $1 + own }')"
    rm -rf large
}

# ---- what a run writes ----

is_json() { python3 -c 'import json, sys; [json.loads(line) for line in open(sys.argv[1])]' "$1"; }

check_keys() { check "keys of $1 lines: $(keys "$1" "$2")" [ "$(keys "$1" "$2")" = "$3" ]; }

test_log() {
    local log=run/log.jsonl digits
    good "a run" "${tiny[@]}" --eval-every 1 --out run
    check "the first line is the configuration" grep -qE '^{"kind":"config","run":"[0-9a-f]{16}","options":{"train-data":""' <(head -n 1 $log)
    check "the last line is the summary" grep -q '^{"kind":"summary","steps":3,' <(tail -n 1 $log)
    check_keys train $log '{"kind":V,"step":V,"loss":V,"norm":V,"lr":V,"ms":V,"data_ms":V,"tok_per_s":V,"mfu":V,"peak":V,"tokens":V,"elapsed_s":V,"time":V}'
    check_keys val $log '{"kind":V,"step":V,"loss":V,"bpb":V,"sequences":V,"all_sequences":V}'
    check_keys sample $log '{"kind":V,"step":V,"text":V}'
    check_keys save $log '{"kind":V,"step":V,"path":V}'
    check_keys summary $log '{"kind":V,"steps":V,"val_loss":V,"best_val_loss":V,"best_step":V,"floor":V,"elapsed_s":V,"tok_per_s":V,"samples_per_s":V,"data_s":V,"planned_mb":V,"peak_mb":V}'
    check "updates count from 1" [ "$(steps_of train $log)" = "1 2 3 " ]
    check "the first validation is step 0" [ "$(steps_of val $log)" = "0 1 2 3 " ]
    check "a checkpoint at the end" [ "$(values save path $log)" = '"run/step_00000003"' ]
    check "it is there" [ -s run/step_00000003/model.safetensors ]
    check "val_loss is the last one" [ "$(values summary val_loss $log)" = "$(values val loss $log | tail -n 1)" ]
    check "the floor is below" below "$(values summary floor $log)" "$(values summary val_loss $log)"
    digits=$(values train loss $log | tr -d '.\n' | wc -c)
    check "losses have many digits" [ "$digits" -ge 24 ]
    check "main.log: updates" [ "$(grep -cE '^s:[123] trl:[0-9.]+ lr:[0-9.]+ norm:[0-9.]+$' run/main.log)" = 3 ]
    check "main.log: validations" [ "$(grep -cE '^s:[0123] tel:[0-9.]+$' run/main.log)" = 4 ]
    check "main.log: nothing else" [ "$(wc -l <run/main.log)" = 7 ]
    check "a line of a step" grep -qE '^step 3/3 \| loss [0-9.]+ \| norm .* \| lr .* \| .* ms' stdout
    if command -v python3 >/dev/null; then
        check "log.jsonl is JSON" is_json $log
    else
        echo "skipped: log.jsonl as JSON: python3 is missing (scripts/install_deps.sh --test)"
    fi
    cp -r run finished
    good "a finished run again" --out finished --resume on
    check_keys summary finished/log.jsonl '{"kind":V,"steps":V,"val_loss":V,"best_val_loss":V,"best_step":V,"floor":V,"elapsed_s":V,"data_s":V,"planned_mb":V,"peak_mb":V}' # no speed
}

test_intervals() {
    good "intervals" "${model[@]}" "${batch[@]}" --steps 5 --eval-batches 1 --out intervals \
        --eval-every 2 --sample-every 3 --save-every 2 --keep 1 --keep-major 4 --samples 1
    check "validations" [ "$(steps_of val intervals/log.jsonl)" = "0 2 4 5 " ]
    check "samples" [ "$(steps_of sample intervals/log.jsonl)" = "3 5 " ]
    check "checkpoints" [ "$(steps_of save intervals/log.jsonl)" = "2 4 5 " ]
    check "those that are kept" [ "$(cd intervals && echo step_*)" = "step_00000004 step_00000005" ]
    good "everything off" "${model[@]}" "${batch[@]}" "${quiet[@]}" --steps 2 --out off
    check "only updates" [ "$(kinds_of off/log.jsonl)" = "config train train summary " ]
    check "val_loss is null" [ "$(values summary val_loss off/log.jsonl)" = null ]
    good "no files" "${tiny[@]}"
}

test_quiet() {
    good "a quiet run" "${tiny[@]}" --quiet on --eval-every 1 --out hush
    check "says one line: $(head -n 2 stdout)" [ "$(wc -l <stdout)" = 1 ]
    check "the summary" grep -q '^3 steps | .* | val loss ' stdout
    check "its log is whole" [ "$(kinds_of hush/log.jsonl)" = "$(kinds_of run/log.jsonl)" ]
    good "a quiet plan" "${tiny[@]}" --quiet on --plan
    check "is printed" grep -q '^memory: ' stdout
    good "a model of bytes" "${tiny[@]}" "${text[@]}" --export-llmc bytes.bin
    good "a quiet evaluation" --model bytes.bin --steps 0 --perplexity train_1.bin --quiet on
    check "says its result" grep -q '| loss .* | perplexity ' stdout
    check "and nothing before it" [ "$(grep -n perplexity stdout | cut -d: -f1)" = 1 ]
    "$trainer" "${tiny[@]}" --quiet on >/dev/full 2>stderr
    status=$?
    check_error "a quiet run on a full disk" 1 "standard output|No space left"
    good "fewer lines" "${model[@]}" "${batch[@]}" --steps 7 --log-every 3 --eval-every 0 --samples 0 --out fewer
    check "lines of steps" [ "$(sed -n 's/^step \([0-9]*\).* loss .*/\1/p' stdout | tr '\n' ' ')" = "1 3 6 7 " ]
    check "in main.log, too" [ "$(sed -n 's/^s:\([0-9]*\).*/\1/p' fewer/main.log | tr '\n' ' ')" = "1 3 6 7 " ]
    check "all in log.jsonl" [ "$(steps_of train fewer/log.jsonl)" = "1 2 3 4 5 6 7 " ]
}

test_data() {
    good "text" "${tiny[@]}" "${text[@]}" --out text
    check_keys summary text/log.jsonl '{"kind":V,"steps":V,"val_loss":V,"best_val_loss":V,"best_step":V,"elapsed_s":V,"tok_per_s":V,"samples_per_s":V,"data_s":V,"planned_mb":V,"peak_mb":V}' # no floor
    check "the first loss is log 257" near "$(values val loss text/log.jsonl | head -n 1)" 5.549 0.03
    good "shards" "${tiny[@]}" "${shards[@]}" --out shards
    check "the first loss is log 100" near "$(values val loss shards/log.jsonl | head -n 1)" 4.605 0.03
    check "the last shard validates" grep -q '400 training tokens, 100 for validation' stdout
    good "validation shards" "${tiny[@]}" --train-data train_0.bin --val-data train_1.bin --vocab-size 100 \
        --out shards_2
    check "the same data, the same numbers" same_numbers shards shards_2
    good "a list of shards" "${tiny[@]}" --train-data train_1.bin,train_0.bin --vocab-size 100 --out shards_3
    check "in the order of their names" same_numbers shards shards_3
    good "wide tokens" "${tiny[@]}" --train-data wide.bin --vocab-size 65601 --samples 1 --sample-tokens 1
    good "one epoch" "${model[@]}" "${batch[@]}" --train-data train_0.bin --vocab-size 100 --out epoch
    check "is 11 updates" [ "$(steps_of train epoch/log.jsonl | wc -w)" = 11 ] # (379 - 1) / 16 sequences, 2 a batch
}

# A mixture, other formats, and documents.
test_sources() {
    good "two sources" "${tiny[@]}" --train-data train_0.bin:0.75,train_1.bin:0.25 --vocab-size 100 --out mixed
    check "are named with their weights" grep -q '^source train_1.bin: 83 tokens, weight 0.25, ' stdout
    good "the same weights, other numbers" "${tiny[@]}" --train-data train_0.bin:3,train_1.bin:1 --vocab-size 100 \
        --out mixed_2
    check "are the same run" same_numbers mixed mixed_2
    good "bare tokens" "${tiny[@]}" --train-data bare.bin --data-format nanogpt --vocab-size 100 --out bare
    good "the same in a shard" "${tiny[@]}" --train-data train_0.bin --vocab-size 100 --out headed
    check "are the same run" same_numbers bare headed
    good "documents" "${tiny[@]}" --train-data 'train_*.bin' --vocab-size 97 --out aligned --pack aligned
    check "are counted" grep -q '^source train_\*.bin: 400 tokens, .* documents, packed (aligned) into .* rows, ' stdout
}

# A validation covers the same sequences whatever the micro-batch, and says which part of the data
# they are.
test_validation() {
    local look=("${model[@]}" --seq-len 16 "${text[@]}" --steps 0 --samples 0) batch losses=()
    for batch in 1 4 64; do
        good "validated in micro-batches of $batch" "${look[@]}" --batch $batch --out val_$batch
        losses+=("$(values val loss val_$batch/log.jsonl | cut -c1-8)")
    done
    check "one loss: ${losses[*]}" [ "$(printf '%s\n' "${losses[@]}" | sort -u | wc -l)" = 1 ]
    local all
    all=$(values val all_sequences val_1/log.jsonl)
    check "all of a small set" grep -q "| val loss .* (all $all sequences)\$" stdout
    good "a part of it" "${look[@]}" --batch 3 --eval-batches 2
    check "says so" grep -q "| val loss .* (6 of $all sequences)\$" stdout
    good "a plan of a part" "${model[@]}" --seq-len 16 "${text[@]}" --batch 3 --eval-batches 2 --steps 20 --eval-every 10 --plan
    check "its validations: $(grep -o 'plus .*' stdout)" grep -q "plus 3 validations on 288 tokens in total" stdout
}

test_learning() {
    local still=(--lr 1e-30 --weight-decay 0 --steps 3) # updates that change nothing
    good "validation on the same batches" "${model[@]}" "${batch[@]}" "${shards[@]}" "${still[@]}" --eval-every 1 \
        --eval-batches 2 --val-data train_0.bin --out still
    check "gives the same loss each time" [ "$(values val loss still/log.jsonl | sort -u | wc -l)" = 1 ]
    check "updates see new batches" [ "$(values train loss still/log.jsonl | sort -u | wc -l)" = 3 ]
    good "one batch" "${model[@]}" "${batch[@]}" "${shards[@]}" "${still[@]}" --overfit on --out one_batch
    check "updates see the same batch" [ "$(values train loss one_batch/log.jsonl | sort -u | wc -l)" = 1 ]
    good "overfitting" "${model[@]}" "${batch[@]}" "${quiet[@]}" "${text[@]}" --steps 150 --lr 0.01 --overfit on \
        --out overfit
    check "the loss of one batch goes down" below "$(values train loss overfit/log.jsonl | tail -n 1)" 0.5
    good "training" "${model[@]}" --seq-len 16 --batch 16 "${text[@]}" --steps 150 --lr 0.01 --sample-every 0 \
        --save-every 0 --out learns
    check "the loss of new text goes down" below "$(values summary val_loss learns/log.jsonl)" 3
    good "no updates" "${model[@]}" "${batch[@]}" --steps 0 --eval-batches 1 --out none
    check "only a validation" [ "$(steps_of val none/log.jsonl)$(steps_of train none/log.jsonl)" = "0 " ]
}

# ---- the same numbers ----

test_same_numbers() {
    local run=(--steps 4 --eval-batches 2 --eval-every 2 --sample-tokens 20) level
    good "a run" "${model[@]}" "${batch[@]}" "${run[@]}" --threads 1 --out threads_1
    good "two threads" "${model[@]}" "${batch[@]}" "${run[@]}" --threads 2 --out threads_2
    check "1 and 2 threads" same_numbers threads_1 threads_2
    unset OMP_WAIT_POLICY OMP_NUM_THREADS # the program then chooses both itself and starts itself again
    good "all threads" "${model[@]}" "${batch[@]}" "${run[@]}" --out threads_all
    export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1
    check "1 and all threads" same_numbers threads_1 threads_all
    for level in 1 2 mlp 3; do
        good "recompute $level" "${model[@]}" "${batch[@]}" "${run[@]}" --recompute $level --out recompute_$level
        check "recompute $level" same_numbers threads_1 recompute_$level
        check "recompute $level: samples" [ "$(samples_of recompute_$level)" = "$(samples_of threads_1)" ]
    done
    good "another seed" "${model[@]}" "${batch[@]}" "${run[@]}" --seed 43 --out seed
    check "the seed changes the numbers" [ "$(numbers seed)" != "$(numbers threads_1)" ]
    check "and the samples" [ "$(samples_of seed)" != "$(samples_of threads_1)" ]
}

# A runtime that binds threads has bound the first one before the program starts itself again: the
# others have cores of their own all the same.
test_bound_threads() {
    local program i bound=0
    [ "$(nproc)" -gt 1 ] && grep -q omp_get_thread_num "$trainer" || return 0
    env -u OMP_WAIT_POLICY -u OMP_NUM_THREADS OMP_PROC_BIND=true "$trainer" "${model[@]}" "${batch[@]}" --steps 1000000 >/dev/null 2>&1 &
    program=$!
    for ((i = 0; i < 100 && bound < 2; i++)); do
        sleep 0.1
        bound=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/$program/task/*/status 2>/dev/null | sort -u | grep -c '^[0-9]*$')
    done
    { kill -KILL $program && wait $program; } 2>/dev/null
    check "OMP_PROC_BIND: threads on $bound cores of their own, of $(nproc)" [ "$bound" -ge 2 ]
}

test_accumulation() {
    local run=("${model[@]}" --seq-len 16 --total-batch 64 --steps 6 "${quiet[@]}")
    good "one micro-batch" "${run[@]}" "${text[@]}" --batch 4 --out micro_1
    good "four micro-batches" "${run[@]}" "${text[@]}" --batch 1 --out micro_4
    values train loss micro_1/log.jsonl >losses_1
    values train loss micro_4/log.jsonl >losses_4
    check "losses of 4 x 1 and 1 x 4 sequences" all_near losses_4 losses_1 1e-5
    values train norm micro_1/log.jsonl >norms_1
    values train norm micro_4/log.jsonl >norms_4
    check "norms of 4 x 1 and 1 x 4 sequences" all_near norms_4 norms_1 1e-4
}

# Documents as sequences, of the built-in stories: the same sequences, whatever the micro-batch,
# give the same losses, and padding changes none.
test_packing() {
    local run=("${model[@]}" --seq-len 64 --total-batch 512 --steps 4 --eval-every 4 --eval-batches 8 --sample-every 0
        --save-every 0) pack
    for pack in aligned bestfit pad dynamic uniform; do
        good "--pack $pack" "${run[@]}" --pack $pack --batch 8 --doc-mask on --out pack_$pack
        check "--pack $pack: padding or discarded tokens are said" \
            grep -qE "packed \($pack\) into [0-9]+ rows, .* % discarded" stdout
        check "--pack $pack: the floor is below" below "$(values summary floor pack_$pack/log.jsonl)" \
            "$(values summary val_loss pack_$pack/log.jsonl)"
        good "--pack $pack in four" "${run[@]}" --pack $pack --batch 2 --doc-mask on --out pack_4
        values train loss pack_$pack/log.jsonl >losses_1
        values train loss pack_4/log.jsonl >losses_4
        check "--pack $pack: losses of 8 x 1 and 2 x 4 sequences" all_near losses_4 losses_1 1e-5
    done
    values train loss pack_pad/log.jsonl >losses_1
    values train loss pack_dynamic/log.jsonl >losses_2
    check "losses of pad and dynamic" all_near losses_2 losses_1 1e-5
    good "without the mask" "${run[@]}" --pack aligned --batch 8 --out pack_unmasked
    check "other losses" [ "$(numbers pack_unmasked)" != "$(numbers pack_aligned)" ]
}

# The output of --print-config is a file for --config; the banner is a command line.
test_repeat() {
    local options=("${tiny[@]}" "${text[@]}" --prompt "it's a \"\$HOME\"" --lr 0.0123 --schedule wsd --out repeat)
    train "${options[@]}" --print-config
    cp stdout config
    check "--print-config: exit status $status" [ $status = 0 ]
    check "it prints every option" [ "$(grep -c '^[a-z].* = ' config)" -gt 40 ]
    [ -s config ] || return # without options, the runs below would take minutes
    train --config config --print-config
    check "--print-config reproduces itself" cmp stdout config
    check "it makes no files" [ ! -e repeat ]
    good "the run itself" "${options[@]}"
    sed -n '/\\$/p;/\\$/!{p;q;}' stdout >banner
    mv repeat first
    good "a run with all options" --config config
    check "has the same numbers" same_numbers first repeat
    rm -r repeat
    check "the pasted banner" bash banner
    check "has the same numbers, too" same_numbers first repeat
    check "and the same samples" [ "$(samples_of first)" = "$(samples_of repeat)" ]
}

# A short run validates less, and repeats that.
test_short_validations() {
    good "a short run" "${model[@]}" --seq-len 16 --batch 4 --steps 20 --samples 0
    check "says how much it validates" grep -q '^validation: every 20 updates, 3 micro-batches (12 sequences), 10 % of the work$' stdout
    check "validates so" [ "$(grep -c '| val loss .* (12 of 1280 sequences)$' stdout)" = 2 ]
    check "tells it in its command" grep -q -e '--eval-every 20 --eval-batches 3' stdout
}

# Tries rates with the settings of a run, whose files stay as they are.
test_find_lr() {
    local run=("${model[@]}" "${batch[@]}" "${text[@]}" --steps 20)
    good "a run to come" "${run[@]}" --samples 0 --out swept
    cksum $(find swept -type f | sort) >cksums_before
    good "its rates" "${run[@]}" --find-lr --out swept
    check "a rate: $(tail -n 2 stdout)" grep -qE '^find-lr: --lr [0-9.e-]+ for 20 updates; the loss was lowest at [0-9.e-]+$' stdout
    check "a plot" grep -q 'at each learning rate' stdout
    check "a picture" grep -q 'the rate to take</text>' swept/find_lr.svg
    rm -f swept/find_lr.svg
    check "nothing else" cmp cksums_before <(cksum $(find swept -type f | sort))
    cp stdout swept_first
    good "again, without a directory" "${run[@]}" --find-lr
    check "the same rate" [ "$(grep 'lowest at' stdout)" = "$(grep 'lowest at' swept_first)" ]
    good "both rates of Muon" "${run[@]}" --find-lr --optimizer muon --quiet on
    check "alone" [ "$(grep -cE '^find-lr: --lr [0-9.e-]+ --matrix-lr [0-9.e-]+ for 20 updates' stdout)" = "$(wc -l <stdout)" ]
    bad 2 "--find-lr cannot be combined with --resume" "${run[@]}" --find-lr --out swept --resume on
    bad 2 "--find-lr cannot be combined with --prompt" "${run[@]}" --find-lr --prompt a
    bad 2 "--find-lr, --steps 0" "${model[@]}" --steps 0 --find-lr
}

# ---- models ----

test_models() {
    good "training" "${tiny[@]}" --export-llmc model.bin --out models
    local last
    last=$(values summary val_loss models/log.jsonl)
    good "the exported model" "${batch[@]}" --eval-batches 2 --model model.bin --steps 0 --out reload
    check "has the same loss" [ "$(values val loss reload/log.jsonl)" = "$last" ]
    good "the checkpoint" "${batch[@]}" --eval-batches 2 --model models/step_00000003 --steps 0 --out reload_2
    check "has the same loss" [ "$(values val loss reload_2/log.jsonl)" = "$last" ]
    good "the checkpoint, exported" "${batch[@]}" --model models/step_00000003 --steps 0 --eval-every 0 --samples 0 \
        --export-llmc again.bin
    check "is the same model" cmp model.bin again.bin
    train "${batch[@]}" --model model.bin --steps 0 --eval-every 0 --samples 0 \
        --export-gguf model.gguf --export-gguf-dtype q8_0
    check "export for llama.cpp: exit status $status" [ $status = 0 ]
    check "is a GGUF file" [ "$(head -c 4 model.gguf)" = GGUF ]
    check "says that words are none of llama.cpp's" grep -q "^warning: model.gguf has no tokenizer" stderr
    good "export of bytes for llama.cpp" "${tiny[@]}" --train-data text.txt --export-gguf bytes.gguf
    check "has a tokenizer of bytes" grep -q tokenizer.ggml.merges bytes.gguf
    good "export in bf16" "${batch[@]}" --model model.bin --steps 0 --eval-every 0 --export-llmc bf16.bin --export-dtype bf16
    check "is half as long" [ $((2 * $(stat -c %s bf16.bin) - 1024)) = "$(stat -c %s model.bin)" ]
    good "the model in bf16" "${batch[@]}" --eval-batches 2 --model bf16.bin --steps 0 --out reload_3
    check "has about the same loss" near "$(values val loss reload_3/log.jsonl)" "$last" 1e-2
    good "going on from a model" "${batch[@]}" --model model.bin --steps 1 --eval-batches 1
}

# Finetuning the model of test_models with parts of it frozen.
test_freeze() {
    local tune=("${batch[@]}" --model models/step_00000003 --eval-batches 2) maxT C Vp bytes
    read -r maxT _ _ _ C Vp <<<"$(od -A n -t d4 -w24 -j 8 -N 24 model.bin)"
    bytes=$((1024 + 4 * C * (Vp + maxT))) # llm.c's format: a header, wte, wpe
    good "frozen embeddings" "${tune[@]}" --steps 3 --freeze embeddings --export-llmc tuned.bin
    check "it says where the weights are from" grep -q '^weights: read from ' stdout
    check "say so: $(grep ^freeze stdout)" grep -q \
        '^freeze: .*M of .*M parameters are frozen, including the output layer (tied to wte)$' stdout
    check "have the same bytes" cmp -n $bytes model.bin tuned.bin
    check "and nothing else has" [ "$(cmp -l -i $bytes model.bin tuned.bin | wc -l)" -gt $(((bytes - 1024) / 2)) ]
    good "frozen blocks" "${tune[@]}" --steps 4 --save-every 2 --freeze 'embeddings,blocks[0]' --out frozen
    check "end the backward pass: $(grep ^freeze stdout)" grep -q '; the backward pass ends at block 1$' stdout
    good "resumed" --resume frozen/step_00000002 --out frozen_again
    check "they have the same bits" cmp frozen/step_00000004/model.safetensors frozen_again/step_00000004/model.safetensors
    bad 2 "--freeze is wte, was embeddings,blocks[0]; --override" --resume frozen/step_00000002 --out frozen_other --freeze wte
    bad 2 "no parameter is called 'head'|wte, wpe, ln1w|embeddings, blocks, attention, mlp, norms" "${tune[@]}" --freeze head
    bad 2 "blocks[2] is not|blocks of 0 to 1" "${tune[@]}" --freeze 'blocks[2]'
    bad 2 "leaves nothing to train" "${tune[@]}" --freeze '*'
}

# The tasks of dev/ref/fixtures/tasks, whose losses transformers computed.
# Example by example, as transformers has the losses; and the shares are those of the log.
test_scores() {
    local key
    check "a line for each example, and for each window" [ "$(sed 's/.*"task":"\([^"]*\)".*/\1/; s/.*\///' scores.jsonl | uniq -c | xargs)" = \
        "20 hellaswag 20 choices 20 continuations 15 text.txt" ]
    grep -E '"task":"(hellaswag|continuations|.*text.txt)"' scores.jsonl | grep -o '{"loss":[^}]*}' | tr -c '0-9.\n' ' ' >endings
    grep -E '^(hellaswag.jsonl|continuations.jsonl|text.txt) ' "$1/losses.txt" | sort -s -k 1,1r | awk '
        { order = $1 ~ /^h/ ? 1 : $1 ~ /^c/ ? 2 : 3; print order, NR, $4, $5 }' | sort -s -n -k 1,1 >losses
    check "$(wc -l <endings) endings, each with its loss" [ "$(paste -d ' ' endings losses | awk '
        NF == 7 || NF == 6 { d = $1 - $(NF - 1); n += d < 1e-3 && d > -1e-3 && $2 == $NF } END { print n + 0 }')" = "$(wc -l <losses)" ]
    for key in acc acc_norm acc_bytes; do
        check "$key" [ "$(values task $key evaluated_1/log.jsonl | head -n 1)" = \
            "$(grep '"task":"hellaswag"' scores.jsonl | grep -c "\"correct${key#acc}\":true" | awk '{ print $1 / 20 }')" ]
    done
    check "and of continuations" [ "$(grep '"task":"continuations"' scores.jsonl | grep -c '"correct":true')" = 10 ]
}

test_tasks() {
    local fixtures=$root/dev/ref/fixtures/tasks line
    local alone=(--steps 0 --model "$fixtures/model.bin" --seq-len 64) tokens=(--tokenizer bytes/step_00000001)
    local choices=$fixtures/hellaswag.jsonl,$fixtures/choices.jsonl
    good "bytes" "${model[@]}" "${batch[@]}" "${text[@]}" --steps 1 --out bytes
    check "have as many bits as bytes" \
        near "$(values val bpb bytes/log.jsonl | tail -n 1)" "$(awk -v l="$(values val loss bytes/log.jsonl | tail -n 1)" \
            'BEGIN { print l / log(2) }')" 1e-6
    good "shards without a tokenizer" "${tiny[@]}" "${shards[@]}" --out shards
    check_keys val shards/log.jsonl '{"kind":V,"step":V,"loss":V,"sequences":V,"all_sequences":V}'

    good "an evaluation" "${alone[@]}" "${tokens[@]}" --tasks "$choices,$fixtures/continuations.jsonl" \
        --perplexity "$fixtures/text.txt" --stride 24 --out evaluated
    check "has no gradients and no optimizer" grep -q '^memory: [0-9.]* MiB = parameters [0-9.]* + scratch [0-9.]* + activations [0-9.]*$' stdout
    check "says what was cut" grep -q '^task hellaswag: 20 examples, .* too long for a row' stdout
    check "is all there is" [ "$(kinds_of evaluated/log.jsonl)" = "config task task task task summary " ]
    check "saves nothing" [ "$(find evaluated -name '*.safetensors' | wc -l)" = 0 ]
    head -n 3 evaluated/log.jsonl >choices.jsonl
    check_keys task choices.jsonl \
        '{"kind":V,"step":V,"name":V,"acc":V,"acc_err":V,"acc_norm":V,"acc_norm_err":V,"acc_bytes":V,"acc_bytes_err":V,"tokens":V}'
    awk '$1 == "hellaswag.jsonl" {
            for (k = 0; k < 2; k++) {
                loss = k ? $4 / $5 : $4
                if ($3 == 0 || loss < least[k]) { least[k] = loss; best[k] = $3 }
                right[k] += $3 == 3 && best[k] == $2 % 4
            }
        } END { printf "%g\n%g\n", right[0] / 20, right[1] / 20 }' "$fixtures/losses.txt" >wanted
    check "chooses as transformers does: $(paste -s wanted)" cmp wanted \
        <(for key in acc acc_norm; do values task $key evaluated/log.jsonl | head -n 1; done)
    check "knows what the model would say" grep -q '"name":"continuations","acc":0.5,' evaluated/log.jsonl
    check "has the loss of the text" near "$(values task loss evaluated/log.jsonl | tail -n 1)" \
        "$(awk '$1 == "text.txt" { nats += $4; n += $5 } END { print nats / n }' "$fixtures/losses.txt")" 1e-5
    good "a batch of 1" "${alone[@]}" "${tokens[@]}" --tasks "$choices,$fixtures/continuations.jsonl" \
        --perplexity "$fixtures/text.txt" --stride 24 --batch 1 --out evaluated_1 --out-scores scores.jsonl
    test_scores "$fixtures"
    check "is the same" diff <(grep task evaluated/log.jsonl | tail -n 4) <(grep task evaluated_1/log.jsonl | tail -n 4)
    good "shards without a tokenizer" "${alone[@]}" --perplexity train_0.bin
    check "have a perplexity" grep -q 'train_0.bin | loss [0-9.]* | perplexity [0-9.]* | 399 tokens$' stdout
    good "three examples" "${alone[@]}" "${tokens[@]}" --tasks "$fixtures/hellaswag.jsonl" --tasks-max 3
    check "have their endings" grep -q '^task hellaswag: 3 examples, 12 endings' stdout

    good "tasks in training" "${model[@]}" --seq-len 64 --batch 2 "${text[@]}" --steps 5 --eval-every 2 --samples 0 \
        --tasks "$fixtures/continuations.jsonl" --tasks-every 2 --out run --out-scores run/scores.jsonl
    check "are done in time" [ "$(steps_of task run/log.jsonl)" = "2 4 5 " ]
    check "the last scores are kept" [ "$(grep -c '^{"step":5,"task":"continuations",' run/scores.jsonl)" = 20 ]
    good "tasks of a finished run" "${model[@]}" --seq-len 64 --batch 2 "${text[@]}" --out run --resume on --steps 5
    check "are not repeated" [ "$(steps_of task run/log.jsonl)" = "2 4 5 " ]

    bad 2 "--tasks-max|--tasks, --hellaswag or --perplexity" "${tiny[@]}" --tasks-max 3
    bad 2 "--out-scores s.jsonl|--tasks, --hellaswag or --perplexity" "${tiny[@]}" --out-scores s.jsonl
    cp "$fixtures/choices.jsonl" .
    bad 2 "--out-scores choices.jsonl: the run reads this file" "${alone[@]}" "${tokens[@]}" --tasks choices.jsonl \
        --out-scores choices.jsonl
    check "which is as it was" cmp choices.jsonl "$fixtures/choices.jsonl"
    bad 1 "--out-scores nodir/s.jsonl" "${alone[@]}" "${tokens[@]}" --tasks choices.jsonl --out-scores nodir/s.jsonl
    bad 2 "--stride|--perplexity" "${tiny[@]}" --stride 3
    bad 2 "--stride is 65|--seq-len 64" "${alone[@]}" "${tokens[@]}" --perplexity text.txt --stride 65
    bad 2 "--save-every 1|nothing to save" "${alone[@]}" --tasks "$fixtures/choices.jsonl" --save-every 1 --out refused
    bad 2 "--resume|--model" --steps 0 --tasks "$fixtures/choices.jsonl" --out run --resume auto --override
    bad 1 "nowhere.jsonl" "${alone[@]}" "${tokens[@]}" --tasks nowhere.jsonl
    bad 1 "train_0.bin|not JSON lines" "${alone[@]}" "${tokens[@]}" --tasks train_0.bin
    bad 1 "continuations.jsonl|--tokenizer" "${alone[@]}" --tasks "$fixtures/continuations.jsonl"
    bad 1 "text.txt|--tokenizer" "${alone[@]}" --perplexity text.txt
    { cat "$fixtures/schema.jsonl" && echo '{"continuation":"x","gold":0}'; } >schema.jsonl
    line=schema.jsonl:21
    bad 1 "$line: found the fields {gold, continuation}, wanted gold, context_options, continuation" "${alone[@]}" \
        "${tokens[@]}" --tasks schema.jsonl
}

# An enormous norm weight makes every logit infinite: all updates are skipped, and the run gives up.
test_not_finite() {
    good "a model" "${tiny[@]}" --export-llmc huge.bin
    local weights
    weights=$(printf '\\x99\\x76\\x7e\\x7f%.0s' {1..16}) # 3.38e38
    printf '%b' "$weights" | patch huge.bin $(($(stat -c %s huge.bin) - 2 * 4 * 16)) # lnfw, the last but one
    bad 1 "step 4|not finite 4 times|--max-skips" "${batch[@]}" --steps 9 --eval-batches 1 --sample-every 0 \
        --save-every 1 --model huge.bin --max-skips 4 --out huge
    check "each update is skipped" [ "$(steps_of skip huge/log.jsonl)" = "1 2 3 4 " ]
    check_keys skip huge/log.jsonl '{"kind":V,"step":V,"reason":V,"where":V}'
    check "losses that are not numbers are null" [ "$(values train loss huge/log.jsonl | sort -u)" = null ]
    good "the weights" "${batch[@]}" --model huge/step_00000003 --steps 0 --eval-every 0 --samples 0 --export-llmc after.bin
    check "are those of before" cmp huge.bin after.bin
    train "${model[@]}" "${batch[@]}" --steps 40 --lr 10 --grad-clip 0 --eval-every 0 --sample-every 0 --export-llmc wild.bin
    if [ $status = 0 ]; then
        good "a model after wild updates is finite" "${batch[@]}" --model wild.bin --steps 0 --sample-every 0
    else
        check_error "wild updates" 1 "not finite"
    fi
}

# ---- going on ----

# The files of two checkpoints that hold the model and the optimizer are the same.
same_checkpoint() { cmp "$1/model.safetensors" "$2/model.safetensors" && cmp "$1/optimizer.1of1.safetensors" "$2/optimizer.1of1.safetensors"; }
# Prints the lines of the logs about updates, validations and samples, in order, each once.
story_of() { grep -vE '"kind":"(config|summary|save)"' "$1/log.jsonl" | sed -E 's/,"(norm|ms)".*//'; }
same_story() { diff <(story_of "$1") <(story_of "$2"); }

# A checkpoint from before parameters lay in groups, and its losses.
test_older_checkpoint() {
    bad 2 "--schedule is wsd, was cosine; --decay-steps is 2, was auto|--override" \
        --resume "$root/dev/ref/fixtures/checkpoint_1of1" --schedule wsd --decay-steps 2 --out older
    good "an older checkpoint" --resume "$root/dev/ref/fixtures/checkpoint_1of1" --out older
    while read -r kind step loss; do
        found=$(sed -n "s/^{\"kind\":\"$kind\",\"step\":$step,\"loss\":\([^,}]*\).*/\1/p" older/log.jsonl)
        check "$kind $step: loss $found, was $loss" awk -v a="$found" -v b="$loss" \
            'BEGIN { d = a > b ? a - b : b - a; exit !(a > 0 && d <= 1e-6 * a) }'
    done <"$root/dev/ref/fixtures/checkpoint_1of1_losses.txt"
}

# with_option CHECKPOINT COPY OPTIONS: copies it, with more options in its state. The message about a wrong
# checksum says the right one.
with_option() {
    cp -r "$1" "$2"
    sed -i "s/^\"options\":{/&$3/" "$2/state.json"
    train --resume "$2" --out none
    local sum
    sum=$(sed -n 's/.*damaged: its checksum is [0-9a-f]*, wanted \([0-9a-f]*\).*/\1/p' stderr)
    sed -i "s/^\"xxh64\":\"[0-9a-f]*/\"xxh64\":\"$sum/" "$2/state.json"
}

test_resume() {
    local run=("${model[@]}" "${batch[@]}" --steps 8 --eval-every 3 --eval-batches 1 --sample-every 2 --samples 1 --save-every 4)
    good "a run" "${run[@]}" --out straight
    good "a new run where one may continue" "${run[@]}" --out again --resume auto
    check "has the same numbers" same_numbers straight again
    rm -r again/step_00000008
    good "going on with no other options" --out again --resume on
    check "says from where" grep -q '^resume: from again/step_00000004, 4 of 8 steps done' stdout
    check "gives the same bits" same_checkpoint straight/step_00000008 again/step_00000008
    check "and the same log" same_story straight again
    check "with its checkpoints" [ "$(steps_of save again/log.jsonl)" = "4 8 " ]
    check "but for a line" [ "$(grep -c '"kind":"config"' again/log.jsonl)" = 2 ]
    good "a run that is done" --out again --resume on
    check "has nothing to do" same_story straight again
    good "the same command line, llm.c's way" "${run[@]}" -o again -y 1
    check "is the same run" same_story straight again
    check "says no rate that auto did not choose" [ "$(grep -c '^resume: --lr stays' stdout)" = 0 ]
    good "a short run" "${model[@]}" "${batch[@]}" --steps 4 --eval-every 0 --samples 0 --out brief
    good "for longer" --out brief --resume on --steps 700
    check "keeps the rate and says so" grep -q '^resume: --lr stays 0.00625, which auto chose for 4 steps; for 700 it chooses 0.00558: --lr auto --override$' stdout
    bad 2 "--lr is 0.0025455|was 0.00625|--override" --out brief --resume on --steps 9000 --lr auto
    good "a certain step" --out again --resume 4
    check "from there" grep -q 'from again/step_00000004' stdout
    good "a directory" --resume straight/step_00000004 --out elsewhere
    check "continues elsewhere" same_checkpoint straight/step_00000008 elsewhere/step_00000008
    good "other micro-batches" --resume straight/step_00000004 --batch 1 --out micro
    check "are said" grep -q '^resume: --batch is 1, was 2' stdout
    values train loss micro/log.jsonl >losses_1
    values train loss straight/log.jsonl | tail -n 4 >losses_2
    check "and read the same data" all_near losses_1 losses_2 1e-4
    good "llm.c's way to start anew" "${run[@]}" -o again -y 0
    check "says that checkpoints exist" grep -q 'note: .* checkpoints of an earlier run' stdout
    check "and starts anew" same_story straight again

    bad 2 "--lr is 0.1, was|--seed is 7, was 42|--override" --out again --resume on --lr 0.1 --seed 7 --batch 1
    bad 2 "--matmul is bf16, was fp32|--override" --out again --resume on --matmul bf16
    bad 2 "training tokens is 129, was 257|--steps is 4, was 8" --out again --resume 4 --steps 4
    with_option again/step_00000004 unused '"teacher-logits":"","detach":true,'
    good "a checkpoint with the defaults of removed options" --resume unused --out of_unused
    check "gives the same bits" same_checkpoint straight/step_00000008 of_unused/step_00000008
    with_option again/step_00000004 used '"teacher-logits":"books.kept",'
    bad 2 "--teacher-logits (use --teacher, |is removed, was books.kept; --override resumes anyway" --resume used --out of_used
    good "without what it used" --resume used --out of_used --override
    good "the stories do not end" --resume again/step_00000004 --out more_stories --steps 12
    bad 2 "--layers is 3|has 2" --out again --resume on --layers 3
    good "against the rules" --out again --resume 4 --lr 0.1 --override
    check "is another run" [ "$(story_of straight)" != "$(story_of again)" ]
    bad 2 "--optimizer is lion, was adamw|--override" --out again --resume 4 --optimizer lion
    good "with another optimizer" --out lion --resume again/step_00000004 --optimizer lion --override
    check "starts with zeros" grep -q '^resume: the state of --optimizer lion starts as zeros$' stdout
    bad 2 "--optimizer adamw8bit|multiple of 64|--optimizer adamw works" "${tiny[@]}" --optimizer adamw8bit
    bad 2 "--matrix-lr 0.1 needs --optimizer muon" "${tiny[@]}" --matrix-lr 0.1
    bad 2 "--muon-rows on needs --optimizer muon" "${tiny[@]}" --optimizer lion --muon-rows on
    bad 2 "--soap-every 5 needs --optimizer soap" "${tiny[@]}" --optimizer muon --soap-every 5
    bad 2 "--soap-every" "${tiny[@]}" --optimizer soap --soap-every 0
    bad 2 "--soap-max-side" "${tiny[@]}" --optimizer soap --soap-max-side -1
    bad 2 "--cautious-decay on does not work with --optimizer adafactor; wanted adamw" "${tiny[@]}" --optimizer adafactor --cautious-decay on
    bad 1 "never: no checkpoint to resume|--resume auto" --out never --resume on
    check "nothing is made" [ ! -e never ]
    bad 1 "step_00000005/state.json|No such file" --out again --resume 5
    bad 1 "nowhere/state.json|No such file" --resume nowhere --out none
    bad 2 "--resume on|--out" --resume on
}

# bf16 and fp8 learn what fp32 does. `auto` takes one of the first two, and continues with it.
test_matmul() {
    local run=("${model[@]}" "${batch[@]}" --steps 40 --eval-every 40 --eval-batches 20 --sample-every 0) kind
    for kind in fp32 bf16 auto fp8; do
        good "--matmul $kind" "${run[@]}" --matmul "$kind" --save-every 20 --out "matmul_$kind"
        values val loss "matmul_$kind/log.jsonl" | tail -n 1 >"loss_$kind"
    done
    check "the losses differ" [ "$(cat loss_fp32)" != "$(cat loss_bf16)" ]
    check "by less than half a percent" all_near loss_bf16 loss_fp32 0.005
    check "auto is one of them" grep -qxF -e "$(cat loss_fp32)" -e "$(cat loss_bf16)" loss_auto
    good "bf16 says by which instructions" "${run[@]}" --matmul bf16 --plan
    check "in the plan" grep -q 'matmuls in bf16 by ' stdout
    check "with the memory of packed matrices" grep -q '^memory: .* packed in bf16 [0-9]' stdout
    bad 2 "--matmul bf17|fp32|auto" "${run[@]}" --matmul bf17
    check "fp8 has losses of its own" [ "$(cat loss_fp8)" != "$(cat loss_fp32)" ]
    check "near those of fp32" all_near loss_fp8 loss_fp32 0.005
    good "resumed from the middle" --resume matmul_fp8/step_00000020 --out fp8_half
    check "as if it had not been" [ "$(values val loss fp8_half/log.jsonl | tail -n 1)" = "$(cat loss_fp8)" ]
    check "validations are in fp32" [ "$(values val loss matmul_fp8/log.jsonl | head -n 1)" = "$(values val loss matmul_fp32/log.jsonl | head -n 1)" ]
    bad 2 "--matmul fp8 is for training|wanted fp32, bf16 or auto" --model fp8_half --prompt x --matmul fp8
    bad 2 "--matmul fp8|experts|--matmul fp32 or bf16" "${run[@]}" --arch mixtral --matmul fp8
}

# A damaged checkpoint is named, and the one before it taken; with none left the run does not start
# anew by itself. The update during the backward pass: what works with it, and what does not, by
# name.
test_update_in_backward() {
    local on=("${model[@]}" --seq-len 16 --steps 2 --samples 0 --eval-batches 1 --update-in-backward on)
    good "an update of one micro-batch" "${on[@]}" --total-batch 80 --out in_backward
    check "--batch auto is all of it" grep -q '"batch":5,' in_backward/step_00000002/state.json
    check "the shares of a block and of the rest are saved" [ "$(grep -c '"clip":{"updates":2,"shares":\[0\.[0-9]*,0\.[0-9]*,0\.[0-9]*\]}' \
        in_backward/step_00000002/state.json)" = 1 ]
    bad 2 "one micro-batch|--total-batch 32|--batch of 5" "${on[@]}" --total-batch 80 --batch 2
    bad 2 "--skip-grad-z 3|--skip-loss-z works" "${on[@]}" --skip-grad-z 3
    bad 2 "--zero 2|wanted --zero 0" "${on[@]}" --zero 2
    bad 2 "2 processes|wanted one" "${on[@]}" --num-processes 2 --plan
}

test_damaged() {
    local step
    good "a run" "${model[@]}" "${batch[@]}" --steps 6 --save-every 2 --eval-every 0 --samples 0 --out damaged
    cp -r damaged whole
    printf x | patch damaged/step_00000006/optimizer.1of1.safetensors 3000
    train --out damaged --resume on
    check "damage: exit status $status" [ $status = 0 ]
    check "damage: $(cat stderr)" grep -q '^warning: damaged/step_00000006/optimizer.1of1.safetensors: damaged: .*; trying the checkpoint before' stderr
    check "it continues from the one before" grep -q '^resume: from damaged/step_00000004' stdout
    check "with the same bits" same_checkpoint whole/step_00000006 damaged/step_00000006
    for step in 2 4 6; do
        rm damaged/step_0000000$step/model.safetensors
    done
    train --out damaged --resume auto
    check "all damaged: exit status $status" [ $status = 1 ]
    check "all damaged: $(tail -n 2 stderr)" grep -q '^error: damaged: every checkpoint is damaged' stderr
}

# Starts a long run in the background: sets process.
start_long() {
    : >stdout # of an earlier run: a signal must not come before the trainer has started
    in_background "${model[@]}" "${batch[@]}" --steps 1000000 --train-data text.txt --eval-every 0 --sample-every 0 --keep 2 "$@"
    while kill -0 $process 2>/dev/null && ! grep -q '^step' stdout; do sleep 0.05; done
}

test_signals() {
    local signal
    for signal in TERM INT HUP XCPU; do
        start_long --out signal_$signal
        kill -$signal $process
        wait $process
        status=$?
        check "SIG$signal: exit status $status" [ $status = 75 ]
        check "SIG$signal is said" grep -q "^stopped by SIG$signal after step [0-9]*; continue: [^ ]*train_gpt2[a-z]* --out signal_$signal --resume on$" stdout
        check "SIG$signal: standard error: $(head -n 1 stderr)" [ ! -s stderr ]
        check "SIG$signal: a checkpoint" [ "$(echo signal_$signal/step_*/state.json | wc -w)" = 1 ]
        check "SIG$signal: no summary" [ "$(grep -c summary signal_$signal/log.jsonl)" = 0 ]
    done
    local step
    step=$(sed -n 's/^stopped by SIGXCPU after step \([0-9]*\);.*/\1/p' stdout)
    good "after a signal" --out signal_XCPU --resume on --steps $((step + 3)) --override
    check "the run continues" [ "$(steps_of train signal_XCPU/log.jsonl | wc -w)" = $((step + 3)) ]

    : >stdout # a step that takes very long, after which the first SIGINT would stop the run
    in_background "${model[@]}" "${batch[@]}" --total-batch 3200000000 --steps 1 --train-data text.txt --out signal_twice
    while kill -0 $process 2>/dev/null && ! grep -q '^step' stdout; do sleep 0.05; done
    kill -INT $process
    sleep 0.2
    check "one SIGINT waits for the step" kill -0 $process
    kill -INT $process
    wait $process
    status=$?
    check "a second SIGINT: exit status $status" [ $status = 130 ]

    start_long --out signal_USR1
    kill -USR1 $process
    for i in {1..100}; do
        [ -e signal_USR1/step_*/state.json ] && break
        sleep 0.05
    done
    check "SIGUSR1: a checkpoint" [ -e signal_USR1/step_*/state.json ]
    check "SIGUSR1: the run continues" kill -0 $process
    bad 1 "signal_USR1: another run is writing here" --out signal_USR1 --resume on
    bad 1 "signal_USR1: another run is writing here" "${tiny[@]}" --out signal_USR1
    check "which keeps its log" grep -q '"kind":"train"' signal_USR1/log.jsonl
    kill -KILL $process
    wait $process 2>/dev/null
    good "a limit of time" "${model[@]}" "${batch[@]}" --steps 2 --out limit --max-hours 1
    train "${model[@]}" "${batch[@]}" --steps 1000000 --train-data text.txt --eval-every 0 --sample-every 0 --out limit_2 --max-hours 0.0002
    check "a short limit: exit status $status" [ $status = 75 ]
    check "a short limit is said" grep -q '^stopped by --max-hours after step' stdout
    local starts=0
    status=75
    while [ $status = 75 ] && [ $((++starts)) -le 9 ]; do
        train "${model[@]}" "${batch[@]}" --train-data text.txt --steps 3 --out limit_3 --resume auto --max-hours 1e-9
    done
    check "a limit shorter than a step: exit status $status after $starts starts, wanted a step in each" [ "$status $starts" = "0 3" ]
    bad 2 "--max-hours 0.5|--out" "${tiny[@]}" --max-hours 0.5
    good "a limit for tasks alone" "${model[@]}" "${batch[@]}" --train-data text.txt --steps 0 --perplexity text.txt --out limit_4 --max-hours 1
}

# In the middle of the text is a part that nothing before prepares for: the loss leaps up there.
test_divergence() {
    local i
    for ((i = 0; i < 800; i++)); do printf 'abcdefgh'; done >leap.txt
    tr -dc '0-9A-Z' </dev/urandom | head -c 900 >>leap.txt
    for ((i = 0; i < 900; i++)); do printf 'abcdefgh'; done >>leap.txt
    local run=("${model[@]}" --seq-len 16 --batch 1 --train-data leap.txt --shuffle off --lr 0.01 --steps 600 "${quiet[@]:0:4}"
        --save-every 20 --keep 12 --max-loss-rise 0.8)
    bad 1 "the run has diverged|above its minimum|--max-loss-rise" "${run[@]}" --out leap_skip
    good "rollback" "${run[@]}" --out leap --on-divergence rollback
    check "it went back" grep -q '^{"kind":"rollback","step":[0-9]*,"from":[0-9]*,"reason":"the mean loss' leap/log.jsonl
    check "all steps are there, once, in order" [ "$(steps_of train leap/log.jsonl)" = "$(seq -s ' ' 1 600) " ]
    check "the loss is low in the end" below "$(values train loss leap/log.jsonl | tail -n 1)" 0.5
    good "rollback of updates in backward" "${run[@]}" --out leap_backward --on-divergence rollback --update-in-backward on
    check "it went back" grep -q '^{"kind":"rollback","step":[0-9]*,"from":[0-9]*,"reason":"the mean loss' leap_backward/log.jsonl
    check "all steps are there, once, in order" [ "$(steps_of train leap_backward/log.jsonl)" = "$(seq -s ' ' 1 600) " ]
    check "the loss is low in the end" below "$(values train loss leap_backward/log.jsonl | tail -n 1)" 0.5
    bad 2 "--on-divergence rollback|--out" "${tiny[@]}" --on-divergence rollback
    good "a model" "${tiny[@]}" --export-llmc huge2.bin
    printf '%b' "$(printf '\\x99\\x76\\x7e\\x7f%.0s' {1..16})" | patch huge2.bin $(($(stat -c %s huge2.bin) - 2 * 4 * 16))
    bad 1 "step 1: the run has diverged|not finite 1 times" "${batch[@]}" --steps 9 "${quiet[@]}" --model huge2.bin --on-divergence stop
    bad 1 "diverged|no checkpoint to roll back to" "${batch[@]}" --steps 99 --eval-every 0 --sample-every 0 --model huge2.bin \
        --on-divergence rollback --save-every 2 --out nothing_good
    # NaN in updates 31 to 33, as after a fault of the machine. Each has 160 logarithms: of 32
    # losses, and of the sums of probabilities of 32 tokens in 2 layers with 2 heads.
    local faulty=("${model[@]}" "${batch[@]}" --steps 60 "${quiet[@]:0:4}" --save-every 10 --max-skips 3 --on-divergence rollback)
    make_fault
    LD_PRELOAD=$PWD/fault.so ASAN_OPTIONS=verify_asan_link_order=0 FAULT_NAN_FROM=$((30 * 160 + 1)) FAULT_NAN_TO=$((33 * 160)) \
        good "NaN for a while" "${faulty[@]}" --threads 1 --out nan
    check "it went back to what was saved" \
        grep -q '^{"kind":"rollback","step":30,"from":[0-9]*,"reason":"[^"]*not finite 3 times' nan/log.jsonl
    check "all steps are there, once, in order" [ "$(steps_of train nan/log.jsonl)" = "$(seq -s ' ' 1 60) " ]
    check "the losses are numbers" [ "$(values train loss nan/log.jsonl | grep -c '^[0-9.]*$')" = 60 ]
}

# ---- samples ----

test_samples() {
    local run=("${model[@]}" "${batch[@]}" --steps 1 --eval-every 0 --save-every 0)
    local long=(--train-data train_0.bin --vocab-size 5000 --sample-tokens 100)
    good "a prompt" "${run[@]}" "${text[@]}" --prompt "12 bot" --samples 1 --out prompt
    check "starts the sample" grep -q '^12 bot.' <(samples_of prompt)
    good "a prompt of words" "${run[@]}" --prompt "One sunny day" --out words
    check "starts each sample" [ "$(samples_of words | grep -c '^ *One sunny day')" = 2 ]
    bad 2 "xyzzy" "${run[@]}" --prompt "One xyzzy"
    printf '#version: 0.2\nt h\nth e\n' >merges.txt
    good "a prompt of GPT-2's kind" "${run[@]}" --train-data train_0.bin --tokenizer merges.txt --prompt "the th" \
        --samples 1 --out bpe
    check "starts the sample" grep -q '^the th.' <(samples_of bpe)
    good "a long sample" "${run[@]}" "${long[@]}" --out long
    check "is longer than the context" [ "$(samples_of long | head -n 1 | wc -w)" -gt 16 ]
    check "and each has its own text" [ "$(samples_of long | wc -w)" -le 200 ]
    good "a long sample without keys and values" "${run[@]}" "${long[@]}" --recompute 3 --out long_3
    check "is the same" [ "$(samples_of long)" = "$(samples_of long_3)" ]
    good "the shortest context" "${model[@]}" --seq-len 1 --batch 2 --steps 1 --eval-batches 1 --sample-tokens 20
    good "temperature 0" "${run[@]}" --prompt Tom --temperature 0 --out greedy
    check "always says the same" [ "$(samples_of greedy | sort -u | wc -l)" = 1 ]
    good "top-k 1" "${run[@]}" --prompt Tom --top-k 1 --out top_1
    check "is the same as temperature 0" [ "$(samples_of top_1)" = "$(samples_of greedy)" ]
    good "more tokens than a document has" "${run[@]}" "${text[@]}" --sample-tokens 5000 --out document
    check "samples end with the document" [ "$(samples_of document | grep -c endoftext)" = 0 ]
    good "more tokens than the tokenizer has" "${run[@]}" "${text[@]}" --vocab-size 4000 --sample-tokens 50
}

make_files
train "${tiny[@]}"
if [ $status != 0 ]; then # then every other check would fail, too
    echo "test_cli: FAILED: the simplest run: exit status $status: $(head -n 1 stderr)"
    echo "test_cli: 1 checks, 1 failed"
    exit 1
fi
test_command_line
test_sizes
test_bad_data
test_bad_model
test_bad_output
test_full_disk
test_large_vocabulary
test_log
test_quiet
test_intervals
test_data
test_sources
test_validation
test_learning
test_same_numbers
test_bound_threads
test_accumulation
test_packing
test_repeat
test_short_validations
test_find_lr
test_models
test_freeze
test_tasks
test_not_finite
test_older_checkpoint
test_resume
test_matmul
test_update_in_backward
test_damaged
test_signals
test_divergence
test_samples
check_done
