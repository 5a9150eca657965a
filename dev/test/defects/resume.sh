# resume.sh -- faults of saving and resuming, tried end to end; for dev/test/defects.sh.
# shellcheck shell=bash disable=SC2154

small=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --eval-every 0 --samples 0)

# inject FILE CALL WHAT OPTIONS...: the trainer, where a system call on a file fails
inject() {
    local file=$1 call=$2 what=$3
    shift 3
    timeout 120 strace -f -o trace -P "$file" -e trace="$call" -e inject="$what" "$trainer" "$@" >stdout 2>stderr </dev/null
    status=$?
}

defect_time_limit_without_directory() {
    bad 2 "--max-hours 100|--out" --max-hours 100 --layers 1 --channels 32 --heads 1
}

# A run killed before its first save, where an earlier run has left a checkpoint.
defect_resume_takes_another_run() {
    good "a run" "${small[@]}" --steps 30 --out k1
    in_background "${small[@]}" --steps 30000000 --lr 5e-3 --out k1
    for _ in {1..600}; do [ "$(grep -c '"train"' k1/log.jsonl)" -gt 100 ] 2>/dev/null && break; sleep 0.05; done
    kill -KILL $process
    wait $process 2>/dev/null
    cp k1/log.jsonl killed.jsonl
    bad 1 "the newest run here has no checkpoint|k1/step_00000030 belongs to an earlier run|--resume 30" --out k1 --resume on
    check "the log of the killed run is untouched" cmp killed.jsonl k1/log.jsonl
}

# The state of an older checkpoint cannot be read when the list is made.
defect_unreadable_once_counts_as_newest() {
    is_here strace || return 0
    good "a run" "${small[@]}" --steps 4 --save-every 2 --out ref
    inject ref/step_00000002/state.json openat openat:error=EIO:when=1 --out ref --resume on
    check "resume: exit status $status" [ $status = 0 ]
    check "from the newest: $(grep resume: stdout)" grep -q '^resume: from ref/step_00000004' stdout
    inject ref/step_00000002/state.json openat openat:error=EIO:when=1 --model ref --prompt a --tokens 2
    check "text: exit status $status, $(head -n 1 stderr)" [ $status = 0 ]
    inject ref/step_00000004/state.json openat openat:error=EIO --model ref --prompt a --tokens 2
    check "the newest is unreadable: exit status $status" [ $status = 1 ]
}

# Two machines whose local disks hold different models of the same size.
defect_ranks_start_from_different_weights() {
    is_here mpirun || return 0
    local rank how
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    for i in {1..300}; do echo "$i bottles of beer on the wall"; done >s.txt
    for rank in 0 1; do
        good "a model" "${small[@]}" --train-data s.txt --steps 2 --seed "$rank" --out "r$rank"
        mkdir "c$rank" && cp -r "r$rank/step_00000002" "c$rank/m" && rm "c$rank/m/state.json"
    done
    for how in "--train-data $PWD/s.txt --zero 2 --steps 3 --out $PWD/o3" "--steps 0 --perplexity $PWD/s.txt"; do
        timeout 60 mpirun --oversubscribe -n 2 bash -c "cd c\$OMPI_COMM_WORLD_RANK && exec '$trainer' --model m --samples 0 --eval-every 0 $how" \
            >stdout 2>stderr </dev/null
        status=$?
        check "$how: exit status $status" [ $status = 1 ]
        check "$how: $(grep -m 1 '^error' stderr)" grep -q '^error: the ranks disagree about the files of the weights' stderr
    done
    check "nothing is saved" [ ! -e o3/step_00000003 ]
}

# A directory that cannot be written is noticed before the training, on each machine.
defect_directory_is_read_only() {
    is_here setpriv && is_here mpirun || return 0
    [ "$(id -u)" = 0 ] || { echo "skipped: read-only directories: needs root"; return 0; }
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    local run
    chmod 755 "$work"
    good "a run" "${small[@]}" --steps 4 --out r
    chmod 666 r/log.jsonl r/main.log && chmod 555 r
    timeout 60 setpriv --reuid 65534 --regid 65534 --clear-groups "$trainer" --out r --resume on --steps 2000000 --override >stdout 2>stderr </dev/null
    status=$?
    check_error "resumed by another user" 1 "r: cannot save there"
    unshare -m true 2>check.out || { echo "skipped: a machine whose --out is read-only: unshare -m is not allowed"; return 0; }
    mkdir ro
    run="$(printf '%q ' "$trainer" "${small[@]}") --steps 2000000 --total-batch 64 --out $work/ro"
    # shellcheck disable=SC2086
    timeout 60 mpirun --oversubscribe -n 1 $run : -n 1 unshare -m bash -c \
        "mount --bind $work/ro $work/ro; mount -o remount,ro,bind $work/ro; exec $run" >stdout 2>stderr </dev/null
    status=$?
    check "a read-only rank: exit status $status" [ $status = 1 ]
    check "says so: $(grep -m 1 '^error' stderr)" grep -q '^error: .*/ro: cannot save there: Read-only file system' stderr
}

# a, then b: a run that continued behind the beginning of its new data saw b alone.
defect_other_data_are_skipped() {
    local run=(--layers 1 --channels 16 --heads 1 --context 64 --batch 1 --shuffle off --val-data c.txt --eval-every 0 --samples 0)
    for _ in {1..600}; do echo "cab bac "; done >c.txt
    { head -c 5000 /dev/zero | tr '\0' a; head -c 5000 /dev/zero | tr '\0' b; } >ab.txt
    good "a run" "${run[@]}" --train-data c.txt --steps 80 --out z
    good "continued with other data" --out z --resume on --train-data ab.txt --steps 120 --override
    printf 'a%.0s' {1..300} >a.txt
    printf 'b%.0s' {1..300} >b.txt
    for file in a b; do
        good "the loss on $file" --model z/step_00000120 --steps 0 --perplexity $file.txt --out loss_$file
    done
    check "it has seen a: $(values task loss loss_a/log.jsonl) on a, $(values task loss loss_b/log.jsonl) on b" \
        [ "$(echo "$(values task loss loss_a/log.jsonl) < $(values task loss loss_b/log.jsonl)" | tr -d ' ' | awk -F'<' '{print ($1 < $2)}')" = 1 ]
}

# A power cut, an hour into a run without --save-every, lost all of it.
defect_no_checkpoint_before_the_end() {
    in_background "${small[@]}" --steps 30000000 --save-minutes 0.02 --out night
    for _ in {1..600}; do compgen -G 'night/step_*/state.json' >check.out && break; sleep 0.1; done
    kill -KILL $process
    wait $process 2>/dev/null
    train --out night --resume on --max-hours 1e-9
    check "it continues: $(grep '^resume: from' stdout), exit status $status" grep -q '^resume: from night/step_' stdout
}

# --epochs 1 reads 7680 of 8512 tokens, or 16384, and said neither.
defect_epochs_are_not_told() {
    head -c 8960 /dev/zero | tr '\0' a >text.txt
    local run=(--layers 1 --channels 16 --heads 2 --seq-len 64 --train-data text.txt --epochs 1 --eval-every 0 --samples 0)
    good "updates that leave a part out" "${run[@]}" --total-batch 960
    check "are told: $(grep '^data:' stdout)" grep -qE '^data: .*; 0\.9[0-9]* epochs' stdout
    good "an update that is more" "${run[@]}" --total-batch 16384
    check "is told: $(grep '^data:' stdout)" grep -qE '^data: .*; 1\.9[0-9]* epochs' stdout
}

# --lr 9 ended with a validation loss of 212, status 0, and not a word.
defect_divergence_of_validation_is_silent() {
    local run=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --lr 9 --steps 30 --eval-every 5 --samples 0)
    good "a learning rate that is far too high" "${run[@]}"
    check "is told" grep -q '^warning: step [0-9]*: the run has diverged: the validation loss is' stdout
    bad 1 "the run has diverged: the validation loss is" "${run[@]}" --on-divergence stop
}

# The model that overfits was the only one that stayed.
defect_best_checkpoint_is_deleted() {
    { head -c 800 /dev/zero | tr '\0' b; head -c 4000 /dev/zero | tr '\0' a; } >turn.txt
    head -c 300 /dev/zero | tr '\0' b >turned.txt
    good "a run whose validation loss rises" --layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --samples 0 --train-data turn.txt \
        --val-data turned.txt --shuffle off --lr 0.01 --steps 1000 --eval-every 5 --patience 3 --keep 1 --keep-best on --out o
    local best
    best=$(printf 'o/step_%08d' "$(values summary best_step o/log.jsonl)")
    check "ended early: $(values summary steps o/log.jsonl)" [ "$(values summary steps o/log.jsonl)" -lt 200 ]
    good "its best checkpoint, $best," --model "$best" --steps 0 --train-data turn.txt --val-data turned.txt
}

# A full disk kept the half of a checkpoint.
defect_half_a_checkpoint_is_left() {
    good "a run" "${small[@]}" --steps 2 --out fills
    (ulimit -f 8 && train "${small[@]}" --steps 4 --out fills --resume on && exit "$status")
    status=$?
    check_error "a disk that fills" 1 "fills/step_00000004|File too large"
    check "nothing unfinished is left: $(cd fills && echo *)" [ -z "$(compgen -G 'fills/*.part')" ]
}
