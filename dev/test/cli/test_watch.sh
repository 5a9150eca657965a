#!/usr/bin/env bash
# test_watch.sh -- runs without a terminal, and watched from another process: nohup, --follow and
# --stop-run.
#
#     dev/test/cli/test_watch.sh build/plain/train_gpt2
#
# One line for each check that fails; the last line counts them.
set -u

root=$PWD
trainer=$(realpath "${1:?usage: test_watch.sh TRAINER}")
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
trainer_begin test_watch

tiny=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --sample-tokens 8)

# Starts a run in $1 that ends only if it is stopped.
start_run() {
    local out=$1
    shift
    in_background "${tiny[@]}" --steps 1000000 --out "$out" "$@"
    for _ in {1..400}; do grep -qs '"kind":"train"' "$out/log.jsonl" && return; sleep 0.05; done
}

test_stop() {
    start_run stop
    good "--stop-run" --stop-run stop
    check "who was asked" grep -q "^stop: asked the run (.*, pid $process) to save and end; waiting\$" stdout
    local step
    step=$(sed -n 's/.*"stop","step":\([0-9]*\),"reason":"--stop-run".*/\1/p' stop/log.jsonl)
    check "what was saved: $(tail -n 1 stdout)" grep -q "^stop: the run has stopped after step $step; the newest checkpoint is stop/step_0*$step\$" stdout
    wait "$process"
    check "exit status $?" [ $? = 76 ]
    check "no request is left" [ ! -e stop/run.stop ]
    bad 1 "--stop-run stop: no run is writing here" --stop-run stop
    bad 1 "--stop-run nowhere: no such directory; wanted the --out of a run" --stop-run nowhere
    bad 2 "--report cannot be combined with --stop-run; wanted one of them" --stop-run stop --report stop
    bad 2 "--stop-run cannot be combined with --steps: it does not train" --stop-run stop --steps 3
    bad 2 "--stop-run stops a run" --stop stop
    # of another machine that does not share its locks
    mkdir far && echo "elsewhere, pid 1" >far/run.lock
    bad 1 "--stop-run far: its run was elsewhere, pid 1|wanted --stop-run on that machine" --stop-run far
    # requests that are left over, for this process's name or another
    echo -n "elsewhere, pid 1" >stop/run.stop
    good "a leftover stops nothing" --out stop --resume on --steps $((step + 5)) --override
}

# In the middle of a validation that takes minutes.
test_stop_validation() {
    head -c 3000000 /dev/zero | tr '\0' a >long.txt
    in_background "${tiny[@]}" --steps 1000000 --eval-every 1 --eval-batches 0 --train-data long.txt --val-data long.txt --out val
    for _ in {1..400}; do grep -qs '"kind":"train"' val/log.jsonl && break; sleep 0.05; done
    good "--stop-run in a validation" --stop-run val
    check "it ended there: $(tail -n 1 stdout)" grep -q "stopped after step 1; the newest checkpoint is val/step_00000001\$" stdout
    wait "$process"
}

# On a terminal that changes its size, a picture that fits, until a key; elsewhere lines.
test_follow() {
    start_run follow --sample-every 5 --eval-every 5
    if is_here python3 "watch: --follow on a terminal"; then
        local size
        for key in q '\x03'; do
            LC_ALL=C.UTF-8 timeout 100 "$root/dev/test/lib/in_terminal.py" 80x24,120x50,40x12,30x4 'running' "$key" "$trainer" --follow follow >shown
            check "$key leaves: exit status $?" [ $? = 0 ]
        done
        for size in 80x24 120x50 40x12 30x4; do
            check "$size: lines that fit" bash -c '! grep -qx "$1|is too wide" shown' - "$size"
            check "$size: as many as fit" [ "$(grep -c "^$size|" shown)" -le "${size#*x}" ]
            check "$size: the last update" grep -Eq "^$size[|]step +[0-9]+/1000000 [|] loss" shown
        done
        check "a curve of dots" grep -aq $'^80x24|.*\xe2[\xa0-\xa3]' shown
        check "a sample" grep -q '^120x50|.*sample:$' shown
        check "the first screen comes back: $(grep '^after' shown)" grep -qF '\x1b[?1049lfollow: step ' shown
        check "the keyboard" grep -qx 'keyboard|as before' shown
    fi
    : >lines
    "$trainer" --follow follow >lines 2>&1 &
    local follower=$!
    for _ in {1..1200}; do [ "$(grep -c '^step.*eta ' lines)" -gt 3 ] && break; sleep 0.05; done
    good "stopped while it is followed" --stop-run follow
    wait "$follower"
    check "the follower ends with it: exit status $?" [ $? = 0 ]
    check "its last line" [ "$(tail -n 1 lines)" = "follow: stopped by --stop-run" ]
    check "it has lines of updates" grep -Eq '^step +[0-9]+/1000000 [|] loss [0-9.]+ [|] eta ' lines
    check "and of validations" grep -Eq '^step +[0-9]+/1000000 [|] val loss [0-9.]+ [|] [0-9.]+ bpb$' lines
    check "and of the save" grep -Eq '^step +[0-9]+/1000000 [|] saved$' lines
    check "no control characters" bash -c '! grep -q "[[:cntrl:]]" lines'
    good "--follow of a run that has ended" --follow follow/log.jsonl
    check "its end" [ "$(tail -n 1 stdout)" = "follow/log.jsonl: stopped by --stop-run" ]
    mkdir empty
    bad 1 "empty/log.jsonl" --follow empty
    bad 1 "nowhere: No such file" --follow nowhere
    bad 2 "--follow cannot be combined with --stop-run" --follow follow --stop-run follow
    bad 2 "--follow cannot be combined with --seed: it does not train" --follow follow --seed 1
}

# A run that nohup starts continues when its terminal closes, and is watched and stopped from another.
test_nohup() {
    nohup "$trainer" "${tiny[@]}" --steps 1000000 --out nohup >nohup.txt 2>&1 </dev/null &
    process=$!
    for _ in {1..400}; do grep -qs '"kind":"train"' nohup/log.jsonl && break; sleep 0.05; done
    kill -HUP "$process"
    local lines
    lines=$(wc -l <nohup/log.jsonl)
    for _ in {1..400}; do [ "$(wc -l <nohup/log.jsonl)" -gt "$lines" ] && break; sleep 0.05; done
    check "it continues" [ "$(wc -l <nohup/log.jsonl)" -gt "$lines" ]
    good "a page of it" --report nohup
    check "which says so" grep -q "running, or interrupted" nohup/report.html
    good "stopped" --stop-run nohup
    wait "$process"
    check "exit status $?" [ $? = 76 ]
    check "it says so" grep -q '^stopped by --stop-run' nohup.txt
    bad 2 "error: --detach was removed: start the run with nohup or in tmux" "${tiny[@]}" --out nohup --detach
    bad 2 "error: --report-every was removed: use --report, the --out of a run" "${tiny[@]}" --out nohup --report-every 5
}

test_stop
test_stop_validation
test_nohup
test_follow
check_done
