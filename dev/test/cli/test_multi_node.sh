#!/usr/bin/env bash
# test_multi_node.sh -- scripts/multi_node with launchers that only record their calls: each starts
# the trainer of run_gpt2.sh, and continues a run that has saved and stopped. Run it from the top of
# the repository.
set -u
name=multi_node
source dev/test/lib/check.sh
top=$PWD
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir" || exit 1
cp -r "$top/scripts" .

# The launcher and everything else that is called says so in the file `calls`; the first time it has
# saved and stopped.
mkdir bin
cat >bin/launcher <<'END'
#!/usr/bin/env bash
echo "${0##*/} $*" >>calls
[ "${0##*/}" = scontrol ] || [ "$(wc -l <calls)" -gt 1 ] || exit 75
END
chmod +x bin/launcher
for launcher in mpirun srun torchrun scontrol; do ln -s launcher bin/$launcher; done
export PATH=$dir/bin:$PATH TRAINER=./trainer

# calls STATUS COMMAND...: its exit status.
calls() {
    local wanted=$1
    shift
    rm -f calls
    "$@" >stdout 2>stderr
    status=$?
    check "$1: exit status $status, wanted $wanted, $(cat stderr)" [ $status = "$wanted" ]
}

run="./trainer --train-data data/fineweb10B/fineweb_train_\*.bin .* --model d12 .* --resume auto --seed 7"

echo "node1 slots=8" >hosts
calls 0 env NCCL_SOCKET_IFNAME=eth0 scripts/multi_node/mpirun.sh 124M --seed 7
check "mpirun, and again: $(cat calls)" \
    [ "$(grep -c "^mpirun --hostfile $dir/hosts --bind-to none -x PATH.* -x NCCL_SOCKET_IFNAME $run\$" calls)" = 2 ]
calls 2 env HOSTFILE=none scripts/multi_node/mpirun.sh 124M
check "no hosts: $(cat stderr)" grep -q '^error: none: no such file; wanted lines like: node1 slots=8$' stderr

mkdir "two words" && cp hosts "two words/hosts"
calls 0 env HOSTFILE="two words/hosts" scripts/multi_node/mpirun.sh 124M --seed 7
check "a path with a blank: $(head -n 1 calls)" grep -q "^mpirun --hostfile $dir/two words/hosts --bind-to none" calls

# Slurm. srun: the time is up after a moment (LATE), or somebody else has it stop.
rm bin/srun
cat >bin/srun <<'END'
#!/usr/bin/env bash
echo "srun $*" >>calls
trap 'exit 75' TERM
[ -z "${LATE:-}" ] || kill -USR1 $PPID
[ -n "${LATE:-}" ] || exit 75
for i in {1..100}; do sleep 0.1; done
END
chmod +x bin/srun
ln -s launcher bin/sbatch
for job in slurm "cpu --layers 3"; do
    read -r kind options <<<"$job"
    [ $kind = cpu ] && wanted="srun --mpi=pmix --kill-on-bad-exit=0 ./trainer --threads 16 --train-data books/\* .* --resume auto --layers 3" ||
        wanted="srun --kill-on-bad-exit=0 $run" options="124M --seed 7"
    export SLURM_JOB_ID=4711 SLURM_CPUS_PER_TASK=16 DATA=$([ $kind = cpu ] && echo 'books/*')
    [ -n "$DATA" ] || unset DATA
    calls 75 bash scripts/multi_node/$kind.sbatch $options
    check "$kind.sbatch: $(head -n 1 calls)" grep -q "^$wanted\$" <(head -n 1 calls)
    check "$kind.sbatch: who was asked to stop is not queued again: $(tail -n 1 calls)" [ "$(wc -l <calls)" = 1 ]
    calls 0 env LATE=1 bash scripts/multi_node/$kind.sbatch $options
    check "$kind.sbatch: it is queued again: $(tail -n 1 calls)" [ "$(tail -n 1 calls)" = "scontrol requeue 4711" ]
    check "$kind.sbatch: once" [ "$(wc -l <calls)" = 2 ]
    printf '#!/bin/sh\nexit 1\n' >scontrol && chmod +x scontrol && mv bin/scontrol may && mv scontrol bin
    calls 0 env LATE=1 bash scripts/multi_node/$kind.sbatch $options
    check "$kind.sbatch: or submitted anew: $(tail -n 1 calls)" \
        [ "$(tail -n 1 calls)" = "sbatch scripts/multi_node/$kind.sbatch $options" ]
    mv may bin/scontrol
    unset DATA
done

calls 75 env FIRST=node1 NODES=2 GPUS=4 scripts/multi_node/torchrun.sh 124M --seed 7
check "torchrun: $(cat calls)" \
    grep -q "^torchrun --nnodes 2 --nproc-per-node 4 .* --rdzv-endpoint node1:29400 .* --no-python $run\$" calls

calls 0 env GPUS=4 scripts/run_gpt2.sh 124M --seed 7
check "GPUS: $(cat calls)" [ "$(grep -c "^mpirun -n 4 --bind-to none $run\$" calls)" = 2 ]

# The job of Kubernetes: it is YAML, and its numbers belong together.
job=scripts/multi_node/mpijob.yaml
if python3 -c 'import yaml' 2>/dev/null; then
    check "$job" python3 - $job <<'END'
import sys
import yaml
job = yaml.safe_load(open(sys.argv[1]))
spec = job["spec"]["mpiReplicaSpecs"]
assert job["apiVersion"] == "kubeflow.org/v2beta1" and job["kind"] == "MPIJob"
launcher, worker = (spec[name]["template"]["spec"]["containers"][0] for name in ("Launcher", "Worker"))
slots, gpus = job["spec"]["slotsPerWorker"], worker["resources"]["limits"]["nvidia.com/gpu"]
command = next(e["value"] for e in launcher["env"] if e["name"] == "LAUNCHER").split()
assert slots == gpus and int(command[command.index("-n") + 1]) == slots * spec["Worker"]["replicas"]
assert launcher["command"][0] == "scripts/run_gpt2.sh" and launcher["image"] == worker["image"]
for part in spec.values():
    volumes = {v["name"] for v in part["template"]["spec"]["volumes"]}
    assert volumes == {m["name"] for m in part["template"]["spec"]["containers"][0]["volumeMounts"]}
END
else
    echo "skipped: $job: python3 has no yaml"
fi
check_done
