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
class Config(dict):
    def update(self, options, allow_val_change):
        say("config", *options.items())
class Run:
    config = Config()
    def define_metric(self, *args, **kwargs): pass
    def log(self, numbers):
        for key, value in numbers.items():
            if key != "step": say(numbers["step"], key, value)
    def finish(self): say("finish")
def say(*words):
    with open("told", "a") as file: print(board, *words, file=file)
def init(project, name, id, resume):
    global board
    board = id
    say("init", project, name, resume)
    return Run()
END_OF_WANDB
# follow ARGUMENTS...: at most ten seconds, as long as a run is not at its end.
follow() {
    PYTHONPATH=$work/modules timeout -s INT 10 python3 "$script" "$@" >stdout 2>stderr
    status=$?
}
config() { echo "{\"kind\":\"config\",\"run\":\"$1\",\"options\":{\"seed\":1}}"; }
rows() { for ((i = $1; i <= $2; i++)); do echo "{\"kind\":\"train\",\"step\":$i,\"loss\":4.$i,\"norm\":null}" && [ $((i % 5)) != 0 ] || echo "{\"kind\":\"val\",\"step\":$i,\"loss\":3.$i}"; done; }
summary='{"kind":"summary","steps":12}'
told() { grep -c "$1" told; }
once() { [ -z "$(grep -v 'init\|config\|finish' told | sort | uniq -d)" ]; }

# Killed after step 12, resumed from step 10, and followed beside both.
test_resume() {
    mkdir r
    { config one && rows 1 12; } >r/log.jsonl
    timeout -s INT 3 env PYTHONPATH="$work/modules" python3 "$script" r >stdout 2>stderr
    check "a run without an end: $(told 'train/loss') rows" [ "$(told 'one [0-9]* train/loss')" = 12 ]
    check "what is null is no number" [ "$(told norm)" = 0 ]
    { config one && rows 1 10 && config one && rows 11 15 && echo "$summary"; } >r/log.jsonl
    follow r mine
    check "resumed: exit status $status: $(<stderr)" [ $status = 0 ]
    check "has all: $(told 'train/loss'), $(told 'val/loss')" [ "$(told 'train/loss') $(told 'val/loss')" = "15 3" ]
    check "each once: $(sort told | uniq -d | head -n 3)" once
    check "into the project that is named" grep -q '^one init mine r allow' told
    follow r
    check "again: $(told 'train/loss')" [ "$(told 'train/loss')" = 15 ]
    # stopped between two rows of a step; and continued after its summary
    echo '{"run":"one","step":15,"rows":1}' >r/wandb.json
    { config one && rows 1 15 && echo "$summary" && config one && rows 16 17 && echo "$summary"; } >r/log.jsonl
    follow r
    check "the second row of step 15, and what came behind the summary" [ "$(told 'val/loss') $(told 'train/loss')" = "4 17" ]
    : >told
    { config two && rows 1 4 && echo "$summary"; } >r/log.jsonl
    follow r
    check "a new run there is a run of its own: $(tail -n 1 told)" [ "$(told 'two [0-9]* train/loss')" = 4 ]
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
    { rows 6 11; } >>r/log.jsonl
    for i in {1..200}; do [ "$(told 'train/loss')" = 11 ] && break; sleep 0.05; done
    check "cut and written again: $(told 'train/loss') rows" [ "$(told 'three [0-9]* train/loss')" = 11 ]
    check "each once" once
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
