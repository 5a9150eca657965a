#!/usr/bin/env bash
# mpirun.sh SIZE [OPTION...] -- a run of run_gpt2.sh on several machines, which mpirun reaches by
# ssh. On one of them, from the top of the repository:
#
#     scripts/multi_node/mpirun.sh 124M
#
# Edit: the file `hosts` (or HOSTFILE), with a line for each machine, "node1 slots=8", where slots
# is the number of its GPUs. You need ssh without a password, the same Open MPI everywhere
# (scripts/install_deps.sh --mpi), and this directory at the same path, on a shared file system. If
# machines have several networks, choose one: export NCCL_SOCKET_IFNAME=eth0; for mpirun, in
# MPI_OPTIONS: "--mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0".
#
# To save and stop: kill -TERM this script. The same command resumes.
set -eu
hosts=${HOSTFILE:-hosts}
[ -r "$hosts" ] || { echo "error: $hosts: no such file; wanted lines like: node1 slots=8" >&2 && exit 2; }
options="--hostfile $(printf %q "$(realpath "$hosts")") --bind-to none -x PATH ${MPI_OPTIONS:-}"
for name in LD_LIBRARY_PATH NCCL_SOCKET_IFNAME NCCL_IB_HCA NCCL_DEBUG; do
    [ -z "${!name:-}" ] || options+=" -x $name"
done
export LAUNCHER="scripts/run_until_done.sh mpirun $options"
exec "$(dirname "$0")/../run_gpt2.sh" "$@"
