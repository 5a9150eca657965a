# trainer.sh -- runs the trainer in tests written in bash; for `source`, after check.sh. A test sets
# `trainer`.
#
#     trainer_begin NAME            starts a test: sets `name`, and `work`, a directory of its own,
#                                   which is removed at the end; goes there
#     train OPTIONS...              runs it; sets `status`; writes the files stdout and stderr
#     runs WHAT OPTIONS...          runs it: it must succeed
#     good WHAT OPTIONS...          runs it: it must succeed, and print nothing to stderr
#     bad STATUS WORDS OPTIONS...   runs it: it must be refused (check_error)
#     in_background OPTIONS...      starts it; sets `process`; SIGINT works as on a terminal
#     values KIND KEY LOG           prints the values of a key in the lines of one kind:
#                                   values train loss out/log.jsonl
# shellcheck shell=bash disable=SC2034,SC2154

trainer_begin() {
    name=$1
    export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 LC_ALL=C # models so small are fastest on one thread
    work=$(mktemp -d "/tmp/llmc_${name#test_}_XXXXXX")
    trap 'rm -rf "$work"' EXIT
    cd "$work" || exit 1
}

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
    : >stdout # who waits for words in it must not find those of an earlier command
    set -m
    (ulimit -t 60 && exec "$trainer" "$@") >stdout 2>stderr </dev/null & # at most a minute, whatever it does
    process=$!
    set +m
}

values() { sed -n "s/^{\"kind\":\"$1\".*\"$2\":\([^,}]*\).*/\1/p" "$3"; }

# near_updates FILE COUNT KEY LOSS FIRST_NORM NORM: has out/log.jsonl the numbers of the COUNT lines
# "KEY update loss norm" of the file? It prints those that differ by more than the relative
# tolerances.
near_updates() {
    paste -d ' ' <(grep "^$3 " "$1") <(values train loss out/log.jsonl) <(values train norm out/log.jsonl) |
        awk -v count="$2" -v loss="$4" -v first="$5" -v norm="$6" -v fields=$(($(wc -w <<<"$3") + 5)) '
            function near(found, wanted, e) { return found > wanted * (1 - e) && found < wanted * (1 + e) }
            NF == fields && near($(NF - 1), $(NF - 3), loss) && near($NF, $(NF - 2), NR == 1 ? first : norm) { right++; next }
            { print "wanted, found: " $0 }
            END { exit right != count }'
}
