#!/usr/bin/env bash
# test_run_until_done.sh -- scripts/run_until_done.sh with commands that only report how they were
# called.
#
# One line for each check that fails; the last line counts them.
set -u
export LC_ALL=C
script=$(cd "$(dirname "$0")/../../.." && pwd)/scripts/run_until_done.sh
name=test_run_until_done
source "${script%/scripts/*}/dev/test/lib/check.sh"
work=$(mktemp -d /tmp/llmc_until_XXXXXX)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

# A trainer: ends with the status that the next word of `statuses` says, after what a signal asks of
# it. `mpirun` is the same.
cat >trainer <<'END_OF_TRAINER'
#!/usr/bin/env bash
echo start >>calls
trap 'echo save >>calls' USR1
trap 'echo "stop by TERM" >>calls; exit 75' TERM
trap 'echo "stop by USR2" >>calls; exit 75' USR2
read -r status rest <statuses
echo "$rest" >statuses
[ "$status" != wait ] || for ((i = 0; i < 600; i++)); do sleep 0.05; done
exit "$status"
END_OF_TRAINER
chmod +x trainer
cp trainer mpirun

# runs STATUSES: to its end.
runs() {
    echo "$1" >statuses
    : >calls
    timeout 60 "$script" ./trainer >stdout 2>stderr
    status=$?
}

# stops COMMAND SIGNALS: sends each signal when the one before has shown in `calls`; signals are not
# ignored as in a script.
stops() {
    local signal lines=1
    echo "wait 0" >statuses
    : >calls
    set -m
    "$script" "$1" >stdout 2>stderr &
    set +m
    for signal in $2; do
        for ((i = 0; i < 400; i++)); do [ "$(wc -l <calls)" -ge $lines ] && break; sleep 0.05; done
        sleep 0.1 # its traps are set after its first line
        kill -"$signal" $!
        lines=$((lines + 1))
    done
    wait $! 2>/dev/null
    status=$?
}

called() { [ "$(tr '\n' ';' <calls)" = "$1" ]; }

test_last_line() {
    mkdir -p out/step_00000005 out/step_00000010 out/step_00000020.part
    echo 137 >statuses
    "$script" ./mpirun -n 2 ./trainer --out out >stdout 2>stderr
    check "a rank was killed: $(tail -n 1 stderr)" grep -q 'status 137; the newest checkpoint is out/step_00000010,' stderr
    echo 1 >statuses
    "$script" ./trainer --out=nowhere >stdout 2>stderr
    check "no checkpoint: no line" [ ! -s stderr ]
    echo 2 >statuses
    "$script" ./trainer --out out >stdout 2>stderr
    check "a wrong option: no line" [ ! -s stderr ]
}

test_repeats() {
    runs "75 75 0"
    check "stopped twice, then done: exit status $status" [ $status = 0 ]
    check "is run three times" called "start;start;start;"
    runs "75 1"
    check "a failure ends it: exit status $status" [ $status = 1 ]
    check "and is not tried again" called "start;start;"
    timeout 10 "$script" ./missing >stdout 2>stderr
    status=$?
    check "a command that is not there: exit status $status" [ $status = 127 ]
    timeout 10 "$script" >stdout 2>stderr
    status=$?
    check "no command: exit status $status" [ $status = 2 ]
    check "says how to call it: $(<stderr)" grep -q '^run_until_done.sh COMMAND' stderr
}

test_signals() {
    local signal
    for signal in TERM INT HUP XCPU USR2; do
        stops ./trainer $signal
        check "$signal: exit status $status, wanted 75" [ $status = 75 ]
        check "$signal: the command saves and is not started again: $(<calls)" called "start;stop by TERM;"
    done
    stops ./mpirun HUP
    check "mpirun: exit status $status" [ $status = 75 ]
    check "mpirun gets USR2: $(<calls)" called "start;stop by USR2;"
    stops ./trainer "USR1 TERM"
    check "USR1: exit status $status" [ $status = 75 ]
    check "USR1 saves, and does not stop: $(<calls)" called "start;save;stop by TERM;"
}

test_last_line
test_repeats
test_signals
check_done
