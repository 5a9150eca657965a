#!/usr/bin/env bash
# run_until_done.sh COMMAND...: runs it, again and again while it ends with status 75: saved.
#
# A signal to stop (TERM, INT, HUP, XCPU, USR2) stops the command, which saves, and then this
# script, with the status of the command. The signal arrives as TERM, because commands that a shell
# starts in the background ignore INT. mpirun gets USR2, which it forwards to all processes of the
# run; after TERM it would kill them within two seconds. USR1, to save, is passed on.
#
# If the command fails, a last line names the newest checkpoint in its --out: mpirun prints so much
# that the trainer's own line is lost.
set -u
[ $# -gt 0 ] || { sed -n '2s/^# //p' "$0" >&2 && exit 2; }
asked=
signal=TERM
case ${1##*/} in mpirun | mpiexec | orterun) signal=USR2 ;; esac
pass_on() {
    interrupted=yes
    [ -z "${!:-}" ] || kill -"$1" $! 2>/dev/null
}
# checkpoint_of COMMAND...: prints the newest checkpoint in the command's --out, if any.
checkpoint_of() {
    local out=
    while [ $# -gt 0 ]; do
        case $1 in
        --out | -o) out=${2:-} ;;
        --out=*) out=${1#--out=} ;;
        esac
        shift
    done
    local checkpoints=("$out"/step_*[0-9])
    [ ! -d "${checkpoints[-1]}" ] || echo "${checkpoints[-1]}"
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
    [ $status != 75 ] || [ -n "$asked" ] || continue
    case $status in 0 | 2 | 75 | 76) exit $status ;; esac
    newest=$(checkpoint_of "$@")
    [ -z "$newest" ] ||
        echo "${0##*/}: status $status; the newest checkpoint is $newest, which --resume on continues" >&2
    exit $status
done
