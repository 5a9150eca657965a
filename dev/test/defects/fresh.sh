# fresh.sh -- faults of scripts that end runs, download files or install packages; for
# dev/test/defects.sh.
# shellcheck shell=bash disable=SC2154

model=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2)

# A limit of time shorter than a step: no start made one, and it was started again for ever.
defect_run_until_done_makes_progress() {
    timeout 60 "$root/scripts/run_until_done.sh" "$trainer" "${model[@]}" --steps 3 --samples 0 --out out --resume auto \
        --max-hours 1e-9 >stdout 2>stderr
    status=$?
    check "exit status $status: $(tail -n 1 stdout)" [ $status = 0 ]
}

# A signal that ends the script left the command running.
defect_run_until_done_ends_its_command() {
    local signal i
    for i in {1..400}; do echo "$i bottles of beer on the wall, $i bottles of beer."; done >text.txt
    for signal in HUP INT; do
        set -m
        "$root/scripts/run_until_done.sh" "$trainer" "${model[@]}" --train-data text.txt --steps 1000000 --samples 0 --eval-every 0 \
            --out $signal >stdout 2>stderr &
        set +m
        for _ in {1..600}; do grep -qs '"kind":"train"' $signal/log.jsonl && break; sleep 0.05; done
        kill -$signal $!
        wait $!
        status=$?
        check "$signal: exit status $status" [ $status = 75 ]
        check "$signal: it has saved" [ -e $signal/step_*/state.json ]
        check "$signal: nobody writes there any more" flock -n $signal true
    done
}

# Packages from PyPI were identified by their version alone.
defect_wheels_are_known_by_their_contents() {
    is_here apt-get && is_here python3 || return 0
    mkdir -p top/scripts top/dev/ref top/dev/cusim
    cp "$root/scripts/install_deps.sh" top/scripts
    cp "$root"/dev/ref/requirements_*.txt top/dev/ref
    cp "$root/dev/cusim/cuda_home.sh" top/dev/cusim
    if ! top/scripts/install_deps.sh --cudnn --dry-run | grep -q 'packages: all installed'; then
        echo "skipped: $name: packages are missing (scripts/install_deps.sh --cudnn)"
        return
    fi
    local wheel
    wheel=$(sed -n 's/^\(nvidia[^=]*\)==\([^ ]*\) .*/\1-\2/p' top/dev/ref/requirements_cudnn.txt)
    wheel=${wheel//-/_}
    wheel=${wheel%_*}-${wheel##*_}
    python3 - "$wheel" <<'END_OF_PYTHON'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1] + "-cp311-cp311-manylinux_2_28_x86_64.whl", "w") as wheel:
    wheel.writestr("include/cudnn_frontend.h", "#error another one")
    name, version = sys.argv[1].split("-")
    wheel.writestr(sys.argv[1] + ".dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    wheel.writestr(sys.argv[1] + ".dist-info/WHEEL", "Wheel-Version: 1.0\nTag: cp311-cp311-manylinux_2_28_x86_64\n")
    wheel.writestr(sys.argv[1] + ".dist-info/RECORD", "")
END_OF_PYTHON
    PIP_NO_INDEX=1 PIP_FIND_LINKS=$work top/scripts/install_deps.sh --cudnn >stdout 2>stderr
    status=$?
    check "another wheel of this version: exit status $status" [ $status != 0 ]
    check "says so: $(tail -n 1 stderr)" grep -q "DO NOT MATCH THE HASHES" stderr
    check "nothing is installed" [ ! -e top/build/cudnn-frontend/include ]
}

# A directory of a run that was killed, and then resumed: its steps were sent twice, and the curve
# went back.
defect_wandb_steps_are_sent_once() {
    is_here python3 || return 0
    local run=("${model[@]}" --steps 9 --save-every 3 --samples 0 --eval-every 0 --out r)
    mkdir modules
    cat >modules/wandb.py <<'END_OF_WANDB'
class Run:
    config = {}
    def define_metric(self, *args, **kwargs): pass
    def log(self, numbers):
        if "train/loss" in numbers: print(numbers["step"], file=open("told", "a"))
    def finish(self): pass
def init(**kwargs): return Run()
END_OF_WANDB
    good "a run" "${run[@]}"
    grep -v summary r/log.jsonl >killed && cp killed r/log.jsonl
    PYTHONPATH=modules timeout -s INT 4 python3 "$root/scripts/wandb_follow.py" r >stdout 2>stderr
    rm -r r/step_00000009
    good "resumed" --out r --resume on
    PYTHONPATH=modules timeout 30 python3 "$root/scripts/wandb_follow.py" r >stdout 2>stderr
    check "steps that were sent: $(tr '\n' ' ' <told)" [ "$(tr '\n' ' ' <told)" = "1 2 3 4 5 6 7 8 9 " ]
}
