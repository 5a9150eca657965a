#!/usr/bin/env bash
# requeue.sh SCRIPT COMMAND... -- runs a command in a Slurm job; queues the job again if it saved.
#
# Slurm warns the job before its time is up, by `#SBATCH --signal=B:USR1@600`. Then the command gets
# SIGTERM, which srun passes on to all tasks. If it ends with 75, saved, the job is queued again. If
# a site forbids that, SCRIPT is submitted as a new job, with the options of its head. A run that
# ends otherwise is not queued again, nor is one that was asked to stop: scancel --signal=TERM JOB.
set -u
[ $# -gt 1 ] || { sed -n '2s/^# //p' "$0" >&2 && exit 2; }
script=$1
shift
is_late=
trap 'is_late=yes; kill -TERM $! 2>/dev/null' USR1
"$@" &
wait $!
status=$?
[ -z "$is_late" ] || { wait $! && status=0 || status=$?; } # the warning ended the first wait
[ $status = 75 ] && [ -n "$is_late" ] || exit $status
scontrol requeue "$SLURM_JOB_ID" && exit
echo "note: this site does not queue a job again: submitting $script" >&2
# shellcheck disable=SC2086 # several arguments
exec sbatch "$script" ${JOB_ARGUMENTS:-}
