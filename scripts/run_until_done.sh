#!/usr/bin/env bash
# run_until_done.sh COMMAND...: runs it, and again as long as it ends with status 75: stopped after saving, resume me.
# A signal that stops (TERM, INT, HUP, XCPU, USR2) stops the command, which saves, and then this
# script, with the status of the command; it arrives as TERM, because a shell lets what it starts in
# the background ignore INT. mpirun gets USR2, which it forwards to all processes of the run; after
# TERM it would kill them within two seconds. USR1, to save, is passed on.
set -u
[ $# -gt 0 ] || { sed -n '2s/^# //p' "$0" >&2 && exit 2; }
asked=
signal=TERM
case ${1##*/} in mpirun | mpiexec | orterun) signal=USR2 ;; esac
pass_on() {
    interrupted=yes
    [ -z "${!:-}" ] || kill -"$1" $! 2>/dev/null
}
trap 'asked=yes; pass_on $signal' TERM INT HUP XCPU USR2
trap 'pass_on USR1' USR1
while :; do
    "$@" &
    [ -z "$asked" ] || pass_on $signal # it came while nothing ran
    status=127
    while
        interrupted=
        wait $!
        code=$?
        [ $code = 127 ] || status=$code # a second wait for the same command
        [ -n "$interrupted" ]           # the signal ended the waiting, maybe not the command
    do :; done
    [ $status = 75 ] && [ -z "$asked" ] || exit $status
done
