# shellcheck shell=bash disable=SC2154,SC2034
# outputs.sh -- faults of files that are written; for dev/test/defects.sh.

outputs_model=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --eval-every 0 --samples 0)

# A text of 20 kB, and a run on it in the directory $1 with the options behind.
outputs_run() {
    local out=$1 i
    shift
    for i in {1..400}; do echo "$i bottles of beer on the wall, $i bottles of beer."; done >s.txt
    good "a run" "${outputs_model[@]}" --train-data s.txt --steps 4 --save-every 2 --out "$out" "$@"
}

# As root nothing else keeps a report from taking a device's place.
defect_outputs_that_replace_devices() {
    outputs_run r
    if ! mknod null c 1 3 2>/dev/null; then
        echo "skipped: a device as output: only root can make one"
        return
    fi
    bad 1 "--out-html null: not a regular file" --report r --out-html null
    bad 1 "--export-gguf null: not a regular file" --model r --steps 0 --export-gguf null
    check "the device is there" [ -c null ]
}

# There is not enough memory for the texts, and what was written last night stays.
defect_texts_emptied_before_the_memory_is_taken() {
    outputs_run r
    echo '{"prompt": "bottles"}' >p.jsonl
    echo night >night.jsonl
    (ulimit -v 200000 && exec "$trainer" --model r --prompts p.jsonl --batch 1000000 --out-texts night.jsonl) >stdout 2>stderr </dev/null
    check "refused: exit status $?" [ $? != 0 ]
    check "what was there stays" grep -q night night.jsonl
}
