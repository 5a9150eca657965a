#!/usr/bin/env bash
# test_wandb.sh -- scripts/wandb_follow.py with a wandb that only records its calls.
#
# One line for each check that fails; the last line counts them.
set -u
export LC_ALL=C PYTHONDONTWRITEBYTECODE=1
script=$(cd "$(dirname "$0")/../../.." && pwd)/scripts/wandb_follow.py
name=test_wandb
source "${script%/scripts/*}/dev/test/lib/check.sh"
is_here python3 || exit 0
work=$(mktemp -d /tmp/llmc_wandb_XXXXXX)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

# One line for each number: run, step, key, value.
mkdir modules
cat >modules/wandb.py <<'END_OF_WANDB'
import os, pathlib
class Config(dict):
    def update(self, options, allow_val_change):
        say("config", *options.items())
class Run:
    config = Config()
    def define_metric(self, *args, **kwargs): pass
    def log(self, numbers, step):
        assert step == rows, (step, rows)
        move(step + 1)
        for key, value in numbers.items():
            if key != "step": say(numbers["step"], key, value)
    def finish(self): say("finish")
def say(*words):
    with open("told", "a") as file: print(board, *words, file=file)
# Rows of a run at Weights & Biases, for the next process too.
def move(to):
    global rows
    rows = to
    pathlib.Path("rows." + board).write_text(str(to))
def init(project, name, id=None, resume=None, resume_from=None):
    global board
    if resume_from and os.environ.get("NO_REWIND"): raise RuntimeError("no preview")
    board, to = resume_from.split("?_step=") if resume_from else (id, None)
    there = pathlib.Path("rows." + board)
    move(int(to) + 1 if to else int(there.read_text()) if there.exists() else 0)
    say("rewind" if to else "init", project, name, resume or rows)
    return Run()
END_OF_WANDB
# follow ARGUMENTS...: at most ten seconds, as long as a run is not at its end.
follow() {
    PYTHONPATH=$work/modules timeout -s INT 10 python3 "$script" "$@" >stdout 2>stderr
    status=$?
}
clock=1000 # time of a start; update i is i seconds later
config() { echo "{\"kind\":\"config\",\"run\":\"$1\",\"options\":{\"seed\":1},\"time\":$clock}"; }
rows() { for ((i = $1; i <= $2; i++)); do echo "{\"kind\":\"train\",\"step\":$i,\"loss\":4.$i,\"norm\":null,\"time\":$((clock + i))}" && [ $((i % 5)) != 0 ] || echo "{\"kind\":\"val\",\"step\":$i,\"loss\":3.$i}"; done; }
summary='{"kind":"summary","steps":12}'
told() { grep -c "$1" told; }
once() { [ -z "$(grep -v 'init\|rewind\|config\|finish' told | sort | uniq -d)" ]; }

# Killed after step 12, resumed from step 10, and followed beside both: the steps that are done
# again are told again, after a rewind.
test_resume() {
    mkdir r
    { config one && rows 1 12; } >r/log.jsonl
    timeout -s INT 3 env PYTHONPATH="$work/modules" python3 "$script" r >stdout 2>stderr
    check "a run without an end: $(told 'train/loss') rows" [ "$(told 'one [0-9]* train/loss')" = 12 ]
    check "what is null is no number" [ "$(told norm)" = 0 ]
    { config one && rows 1 10 && clock=2000 && config one && rows 11 15 && echo "$summary"; } >r/log.jsonl
    cp told before
    cp -r r r_kept && cp rows.one rows_kept
    follow r mine
    check "resumed: exit status $status: $(<stderr)" [ $status = 0 ]
    check "is rewound to step 10: 12 rows" grep -qx 'one rewind mine r 12' told
    check "has all: $(told 'train/loss'), $(told 'val/loss')" [ "$(told 'train/loss') $(told 'val/loss')" = "17 3" ]
    check "11 to 15 are after the rewind" [ "$(sed -n '/rewind/,$s/one \([0-9]*\) train.loss .*/\1/p' told | tr '\n' ' ')" = "11 12 13 14 15 " ]
    follow r
    check "again: $(told 'train/loss')" [ "$(told 'train/loss')" = 17 ]
    # continued after its summary
    { config one && rows 1 10 && clock=2000 && config one && rows 11 15 && echo "$summary" && clock=3000 && config one && rows 16 17 && echo "$summary"; } >r/log.jsonl
    follow r
    check "what came behind the summary, without a rewind" [ "$(told 'rewind') $(told 'train/loss')" = "1 19" ]
    # rolled back from 17 to 15: the rollback is a row of the second try
    { config one && rows 1 10 && clock=2000 && config one && rows 11 15 && echo '{"kind":"rollback","step":15,"from":17,"reason":"r"}' && clock=4000 && rows 16 17 && echo "$summary"; } >r/log.jsonl
    follow r
    check "a rollback: $(grep rewind told | tail -n 1)" [ "$(sed -n '/rewind.* 18$/,$p' told | grep -c 'train/loss\|rollback/from')" = 3 ]
    : >told
    { config two && rows 1 4 && echo "$summary"; } >r/log.jsonl
    follow r
    check "a new run there is a run of its own: $(tail -n 1 told)" [ "$(told 'two [0-9]* train/loss')" = 4 ]
    # no rewinding for this account: steps 11 and 12 keep their first values
    rm -r r && mv r_kept r && mv rows_kept rows.one && cp before told
    NO_REWIND=1 follow r
    check "without a rewind: exit status $status" [ $status = 0 ]
    check "a warning: $(<stderr)" grep -q '^warning: cannot rewind to row 12: no preview; steps' stderr
    check "has all: $(told 'train/loss'), $(told 'val/loss')" [ "$(told 'train/loss') $(told 'val/loss')" = "15 3" ]
    check "each once" once
}

# The log is cut, and then replaced, beside it.
test_beside() {
    local follower
    : >told
    { config three && rows 1 9; } >r/log.jsonl
    PYTHONPATH=$work/modules timeout 30 python3 "$script" r >stdout 2>stderr &
    follower=$!
    for i in {1..200}; do [ "$(told 'train/loss')" = 9 ] && break; sleep 0.05; done
    { config three && rows 1 5; } >r/log.jsonl
    sleep 1.5
    clock=2000
    { config three && rows 6 11; } >>r/log.jsonl
    for i in {1..200}; do [ "$(told 'train/loss')" = 15 ] && break; sleep 0.05; done
    check "rewound to step 5" grep -qx 'three rewind pretrain.c r 6' told
    check "cut and written again: $(told 'train/loss') rows" [ "$(told 'three [0-9]* train/loss')" = 15 ]
    { config four && rows 1 3 && echo "$summary"; } >r/new && mv r/new r/log.jsonl
    wait $follower
    status=$?
    check "replaced: exit status $status: $(<stderr)" [ $status = 0 ]
    check "is sent as another: $(tail -n 1 told)" [ "$(told 'four [0-9]* train/loss')" = 3 ]
}

test_refused() {
    follow nowhere
    check_error "no run" 1 "nowhere/log.jsonl|--out of a run"
    printf 'raise ImportError("none")\n' >modules/wandb.py
    follow r
    check_error "no wandb" 1 "pip install wandb"
    follow
    check "no argument: exit status $status" [ $status = 2 ]
    check "says how" grep -q '^usage: ' stderr
}

test_resume
test_beside
test_refused
check_done
