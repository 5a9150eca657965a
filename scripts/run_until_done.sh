#!/usr/bin/env bash
# run_until_done.sh COMMAND...: runs it, and again as long as it ends with status 75: stopped after saving, resume me.
# A signal to this script is passed on to the command and ends both, with the status of the command. mpirun gets SIGUSR2,
# which it forwards to all processes of the run; after SIGTERM it would kill them within two seconds.
set -u
[ $# -gt 0 ] || { sed -n '2,3s/^# //p' "$0" >&2 && exit 2; }
asked=
signal=TERM
case ${1##*/} in mpirun | mpiexec | orterun) signal=USR2 ;; esac
trap 'asked=yes; kill -$signal "$child" 2>/dev/null' TERM
trap 'asked=yes' INT # the terminal sends it to the command, too
while :; do
    "$@" &
    child=$!
    wait "$child"
    status=$?
    while kill -0 "$child" 2>/dev/null; do # a signal ended the waiting, not the command
        wait "$child"
        status=$?
    done
    [ $status = 75 ] && [ -z "$asked" ] || exit $status
done
