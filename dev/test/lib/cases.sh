# cases.sh -- the cases of a test written in bash, or a part of them; for `source`.
#
#     cases_begin ARGUMENTS...   reads a script's arguments, PROGRAM [--part K/N] [NAME...], in any order: sets
#                                `program`. Of N parts, part K has each case whose number is K modulo N; with names,
#                                only cases of functions with these names run
#     cases <<END                runs the cases that it reads, one a line, in order: `name WORD...` calls test_name WORD...
#                                With CASE_TIMES=1 it also prints the CPU time that all programs up to each case's end took
#     once COMMAND... OUT ...    runs a command whose third word is a directory unless that is there: what several cases
#                                need, none of which need come first
# shellcheck shell=bash disable=SC2034
cases_begin() {
    part=0 parts=1 program='' case_number=0
    only=()
    while [ $# -gt 0 ]; do
        case $1 in
        --part)
            if ! [[ ${2-} =~ ^([0-9]+)/([1-9][0-9]*)$ ]]; then
                echo "error: --part ${2-}; wanted K/N" >&2
                exit 2
            fi
            part=$((BASH_REMATCH[1] % BASH_REMATCH[2])) parts=${BASH_REMATCH[2]}
            shift
            ;;
        *) if [ "$program" ]; then only+=("$1"); else program=$1; fi ;;
        esac
        shift
    done
    if [ ! -x "$program" ]; then
        echo "usage: $0 PROGRAM [--part K/N] [NAME...]; PROGRAM is \"$program\"" >&2
        exit 2
    fi
    program=$(realpath "$program")
}

cases() {
    local lines line words
    mapfile -t lines
    for line in "${lines[@]}"; do
        read -ra words <<<"$line"
        if [ $((case_number++ % parts)) = "$part" ] && [[ ${#only[@]} = 0 || " ${only[*]} " = *" ${words[0]} "* ]]; then
            "test_${words[0]}" "${words[@]:1}"
            [ -z "${CASE_TIMES-}" ] || { times | sed -n "s|\$|: all CPU time up to the end of $line|;2p"; }
        fi
    done
}

once() { [ -d "$3" ] || "$@"; }
