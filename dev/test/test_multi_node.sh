#!/usr/bin/env bash
# test_multi_node.sh -- scripts/multi_node with launchers that only write down how they were called: each starts the trainer
# of run_gpt2.sh, and continues a run that has saved and stopped. From the top of the repository.
set -u
name=multi_node
source dev/test/check.sh
top=$PWD
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir" || exit 1
cp -r "$top/scripts" .

# The launcher and everything else that is called says so in the file `calls`; the first time it has saved and stopped.
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

calls 0 env SLURM_JOB_ID=4711 bash scripts/multi_node/slurm.sbatch 124M --seed 7
check "srun: $(head -n 1 calls)" grep -q "^srun --kill-on-bad-exit=0 $run\$" <(head -n 1 calls)
check "and it is queued again: $(tail -n 1 calls)" [ "$(tail -n 1 calls)" = "scontrol requeue 4711" ]
check "twice" [ "$(wc -l <calls)" = 2 ]

calls 75 env FIRST=node1 NODES=2 GPUS=4 scripts/multi_node/torchrun.sh 124M --seed 7
check "torchrun: $(cat calls)" \
    grep -q "^torchrun --nnodes 2 --nproc-per-node 4 .* --rdzv-endpoint node1:29400 .* --no-python $run\$" calls

calls 0 env GPUS=4 scripts/run_gpt2.sh 124M --seed 7
check "GPUS: $(cat calls)" [ "$(grep -c "^mpirun -n 4 $run\$" calls)" = 2 ]

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
