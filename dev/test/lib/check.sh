# check.sh -- the checks of tests written in bash; for `source`. A test sets `name`, for its
# messages.
#
#     check WHAT COMMAND...             counts the check; prints WHAT if the command fails
#     check_error WHAT STATUS WORDS     `status` and the file `stderr` of a command must be one error with this exit
#                                       status, which contains all of the words (separated by |)
#     is_here TOOL [WHAT]               fails without the tool; prints that WHAT, or the test, is skipped
#     has_case NUMBER                   fails for the half of the cases of a long test that was not drawn
#     none_left PATTERN                 waits until no process has a command that starts so
#     check_done                        prints the number of checks; fails if one failed
# shellcheck shell=bash disable=SC2154
checks=0
failures=0

check() {
    local what=$1
    shift
    checks=$((checks + 1))
    if ! "$@" >check.out 2>&1; then
        failures=$((failures + 1))
        echo "$name: FAILED: $what: $(printf '%q ' "$@" | cut -c1-200)"
        head -n 5 check.out | sed 's/^/    /'
    fi
}

check_error() {
    local what=$1 wanted_status=$2 words=$3 word
    check "$what: exit status $status, wanted $wanted_status" [ "$status" = "$wanted_status" ]
    check "$what: first line \"$(head -n 1 stderr)\"" grep -q '^error: ' <(head -n 1 stderr)
    check "$what: $(wc -l <stderr) lines" [ "$(wc -l <stderr)" = 1 ]
    while IFS= read -r -d '|' word; do
        check "$what: \"$word\" is not in \"$(head -n 1 stderr)\"" grep -qF -- "$word" <(head -n 1 stderr)
    done <<<"$words|"
}

is_here() {
    command -v "$1" >/dev/null && return
    echo "skipped: ${2:-$name}: $1 is missing (scripts/install_deps.sh --test --soak)"
    return 1
}

check_done() {
    echo "$name: $checks checks, $failures failed"
    [ "$failures" = 0 ]
}

# has_case NUMBER: succeeds if this case of a long test is to run: all do, or with TEST_HALF=1 or 2
# (run.sh draws it) every second.
has_case() { [ -z "${TEST_HALF:-}" ] || [ $(($1 % 2)) = $((TEST_HALF % 2)) ]; }

# none_left PATTERN: succeeds as soon as no process has a command that starts so; fails after 10 s.
none_left() {
    local i
    for i in {1..100}; do
        pgrep -f "^$1" >/dev/null || return 0
        sleep 0.1
    done
    return 1
}
