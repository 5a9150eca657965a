#!/usr/bin/env bash
# run_until_done.sh COMMAND...: runs it, and again as long as it ends with status 75: stopped after saving, resume me.
# A signal to this script is passed on to the command and ends both, with the status of the command.
set -u
[ $# -gt 0 ] || { sed -n '2,3s/^# //p' "$0" >&2 && exit 2; }
asked=
trap 'asked=yes; kill -TERM "$child" 2>/dev/null' TERM
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
