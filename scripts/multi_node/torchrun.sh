#!/usr/bin/env bash
# torchrun.sh SIZE [OPTION...] -- a run of run_gpt2.sh on several machines that have torchrun but no
# MPI. On each of them, from the top of the repository, which all see at the same path:
#
#     FIRST=node1 NODES=2 scripts/multi_node/torchrun.sh 124M
#
# Edit, or set: FIRST, the machine where torchrun's ranks meet; NODES, the number of machines; GPUS,
# the GPUs of each (8). torchrun starts the processes; the program is the same, and needs no Python
# itself. After a failure torchrun restarts all of them, up to 100 times, and they resume.
#
# To save and stop: kill -TERM torchrun on any machine. It kills its processes 30 seconds later, so
# saves must be faster than that; the last complete checkpoint remains. The same command resumes.
set -eu
options="--nnodes ${NODES:-1} --nproc-per-node ${GPUS:-8} --max-restarts 100"
options+=" --rdzv-backend c10d --rdzv-endpoint ${FIRST:-localhost}:${PORT:-29400} --rdzv-id gpt2"
export LAUNCHER="torchrun $options --no-python" GPUS=1
exec "$(dirname "$0")/../run_gpt2.sh" "$@"
