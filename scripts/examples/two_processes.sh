#!/usr/bin/env bash
# two_processes.sh -- trains with two processes on this machine, then continues with one: any number
# of them continues a checkpoint, with the same bits.
#
#     scripts/install_deps.sh --mpi && make train_gpt2      # once: Open MPI
#     scripts/examples/two_processes.sh 'books/*.txt' out/two --steps 2000
#
# Options after the directory go to the trainer. On a machine with two sockets, one process for each
# is often faster than one for both; TRAINER=./train_gpt2cu uses two GPUs.
set -eu
usage="usage: two_processes.sh TEXT OUT [OPTION...]"
text=${1:?$usage} out=${2:?$usage}
shift 2
trainer=${TRAINER:-$(dirname "$0")/../../train_gpt2}

mpirun -n 2 --bind-to none "$trainer" --train-data "$text" --out "$out" --resume auto --zero 2 "$@"
steps=$(sed -n 's/^{"kind":"summary".*"steps":\([0-9]*\).*/\1/p' "$out/log.jsonl" | tail -n 1)
"$trainer" --out "$out" --resume on --steps $((steps + steps / 10 + 1))
