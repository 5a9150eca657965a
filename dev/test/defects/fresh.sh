# fresh.sh -- the scripts: what ends a run, what is downloaded, and what is installed.
# shellcheck shell=bash disable=SC2154

model=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2)

# A limit of time shorter than a step: no start made one, and it was started again for ever.
defect_run_until_done_makes_progress() {
    timeout 60 "$root/scripts/run_until_done.sh" "$trainer" "${model[@]}" --steps 3 --samples 0 --out out --resume auto \
        --max-hours 1e-9 >stdout 2>stderr
    status=$?
    check "exit status $status: $(tail -n 1 stdout)" [ $status = 0 ]
}

# A signal that ends the script left the command running.
defect_run_until_done_ends_its_command() {
    local signal i
    for i in {1..400}; do echo "$i bottles of beer on the wall, $i bottles of beer."; done >text.txt
    for signal in HUP INT; do
        set -m
        "$root/scripts/run_until_done.sh" "$trainer" "${model[@]}" --train-data text.txt --steps 1000000 --samples 0 --eval-every 0 \
            --out $signal >stdout 2>stderr &
        set +m
        for _ in {1..600}; do grep -qs '"kind":"train"' $signal/log.jsonl && break; sleep 0.05; done
        kill -$signal $!
        wait $!
        status=$?
        check "$signal: exit status $status" [ $status = 75 ]
        check "$signal: it has saved" [ -e $signal/step_*/state.json ]
        check "$signal: nobody writes there any more" flock -n $signal true
    done
}
