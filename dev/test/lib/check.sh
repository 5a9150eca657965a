# check.sh -- the checks of tests written in bash; for `source`. A test sets `name`, for its
# messages.
#
#     check WHAT COMMAND...             counts the check; prints WHAT if the command fails
#     check_error WHAT STATUS WORDS     `status` and the file `stderr` of a command must be one error with this exit
#                                       status, which contains all of the words (separated by |)
#     is_here TOOL [WHAT]               fails without the tool; prints that WHAT, or the test, is skipped
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
