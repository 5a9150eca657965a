#!/usr/bin/env bash
# run_until_done.sh COMMAND...: runs it, again and again while it ends with status 75: saved.
#
# A signal to stop (TERM, INT, HUP, XCPU, USR2) stops the command, which saves, and then this
# script, with the status of the command. The signal arrives as TERM, because commands that a shell
# starts in the background ignore INT. mpirun gets USR2, which it forwards to all processes of the
# run; after TERM it would kill them within two seconds. USR1, to save, is passed on.
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
    [ -z "$asked" ] || pass_on $signal # the signal came while nothing ran
    status=127
    while
        interrupted=
        wait $!
        code=$?
        [ $code = 127 ] || status=$code # a second wait for the same command
        [ -n "$interrupted" ]           # the signal ended the wait, perhaps not the command
    do :; done
    [ $status = 75 ] && [ -z "$asked" ] || exit $status
done
