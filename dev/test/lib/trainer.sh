# trainer.sh -- how the tests written in bash run the trainer; for `source`, after check.sh. They set `trainer`.
#
#     train OPTIONS...              runs it: `status`, and what it printed in the files stdout and stderr
#     runs WHAT OPTIONS...          it must succeed
#     good WHAT OPTIONS...          and have nothing to complain about
#     bad STATUS WORDS OPTIONS...   it must be refused: check_error
#     in_background OPTIONS...      sets `process`; SIGINT is as on a terminal, not ignored as in a script
# shellcheck shell=bash disable=SC2034,SC2154

train() {
    timeout 120 "$trainer" "$@" >stdout 2>stderr </dev/null
    status=$?
}

runs() {
    local what=$1
    shift
    train "$@"
    check "$what: exit status $status, $(head -n 1 stderr)" [ $status = 0 ]
}

good() {
    runs "$@"
    check "$1: standard error: $(head -n 1 stderr)" [ ! -s stderr ]
}

bad() {
    local wanted_status=$1 words=$2
    shift 2
    train "$@"
    check_error "$*" "$wanted_status" "$words"
}

in_background() {
    set -m
    (ulimit -t 60 && exec "$trainer" "$@") >stdout 2>stderr </dev/null & # at most a minute, whatever it does
    process=$!
    set +m
}

# The values of a key in the lines of one kind: values train loss out/log.jsonl
values() { sed -n "s/^{\"kind\":\"$1\".*\"$2\":\([^,}]*\).*/\1/p" "$3"; }
