#!/usr/bin/env bash
# planted.sh -- does `make test` notice a fault, although it draws a part of its tests? Plants ten
# faults of different kinds, one at a time, and runs the tests that could notice each, if the draw
# of this commit, of the one before it, or of the one before that has them.
#
#     dev/test/planted.sh [NAME...]      all of them, or some
#     dev/test/planted.sh --list         the faults, and the tests that could notice them
#
# Prints a line for each: the file, the test that noticed it, and whose draw has this test. The exit
# status is 1 if one is not noticed, or less than eight by this commit's draw. DRAWS="HASH..." are
# the draws instead. The sources here are not touched: all of it happens in a copy, which takes what
# is built with it.
set -u
cd "$(dirname "$0")/../.." || exit 1

# NAME @ FILE @ what sed does to it @ tests
faults='sign @ llmc/ops/activation.h @ s/^\( *const Vec slope = \)\(name##_precise_.*derivative\);/\1-(\2);/ @ plain/test_ops
remainder @ llmc/bf16/tile_layout.h @ /^ALWAYS_INLINE Bf16Part bf16_inside_/,/^}/s/p < k; p++/p < k - 1; p++/ @ plain/test_bf16
wait @ llmc/gpu/batch_queue.cuh @ /cudaStreamWaitEvent(queue->gpu->stream, queue->arrived/d @ sim/plain/test_gpu.down sim/plain/test_gpu.random sim/plain/test_gpu.greedy
uninitialized @ llmc/ops/checksum.cuh @ /cudaMemsetAsync(sum, 0/d @ sim/plain/test_ops.down sim/plain/test_ops.random sim/plain/test_ops.greedy sim/asan/test_ops sim/tsan/test_ops sim/msan/test_ops
race @ llmc/data/encode_threads.h @ /run->work(&slot->text, &slot->results, worker->tool);/{n;N;s/\(.*\)\n\(.*\)/\2\n\1/} @ tsan/test_data
resume @ llmc/checkpoint/run_state.h @ s/^    \*state = \*saved;/&\n    state->updates = 0;/ @ plain/cli_kill asan/test_checkpoint tsan/test_checkpoint asan/cli_cli plain/cli_cli
sum @ llmc/comm/comm.h @ /^double comm_sum/,/^}/s/r < c->size;/r < c->size - (c->size == 3);/ @ asan/test_comm tsan/test_comm plain/cli_ranks.1of4 plain/cli_ranks.2of4 plain/cli_ranks.3of4 plain/cli_ranks.4of4
shift @ llmc/tokenizer/bpe.h @ s/const uint64_t bit = (uint64_t)1 << rank % 64;/const uint64_t bit = (uint64_t)1 << rank;/ @ asan/test_tokenizer
leak @ llmc/data/parquet.h @ /free(p->dictionary_plain.data);/d @ asan/test_data
default @ llmc/setup/options_table.h @ /"beta1", /s/"0.9"/"0.8"/ @ plain/test_setup asan/cli_cli plain/cli_cli'

list() { while IFS=@ read -r name file change tests; do echo "${name% }: $file:$tests"; done <<<"$faults"; }

# drawn_of DRAW TEST...: prints those of the tests that the draw has.
drawn_of() { grep -xF "$(printf 'build/%s\n' "${@:2}")" "$copy/goals.$1"; }

# noticed_by DRAW TEST...: runs these; prints the first one that failed.
noticed_by() {
    (cd "$copy" && DRAW=$1 ONLY="${*:2}" dev/test/run.sh test) >"$copy/log" 2>&1 && return
    if grep -q '^again: .*: it could not be built' "$copy/log"; then
        echo "nothing, because it does not compile: $(grep -m 1 error "$copy/log")"
    else
        sed -n 's/^again: \([^:]*\): .*/\1/p' "$copy/log" | head -n 1
    fi
}

# try NAME FILE CHANGE TEST...: plants the fault, and counts.
try() {
    local name=$1 file=$2 draw tests noticed='' place=0
    sed -i -e "$3" "$copy/$file"
    ! cmp -s "$file" "$copy/$file" || { echo "planted: $name: sed finds nothing to change in $file" >&2; exit 2; }
    for draw in "${draws[@]}"; do
        place=$((place + 1))
        mapfile -t tests < <(drawn_of "$draw" "${@:4}")
        [ ${#tests[@]} != 0 ] || continue
        noticed=$(noticed_by "$draw" "${tests[@]}")
        [ -z "$noticed" ] || break
    done
    cp -p "$file" "$copy/$file" && touch "$copy/$file"
    case $noticed in
    '' | nothing*) echo "$name: $file: NOT NOTICED${noticed:+ by }$noticed" ;;
    *)
        echo "$name: $file: noticed by $noticed, in draw $place ($draw)"
        count=$((count + 1))
        [ $place != 1 ] || at_once=$((at_once + 1))
        ;;
    esac
}

[ "${1:-}" != --list ] || { list && exit; }
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -a . "$copy" # with the times: what is built stays built
read -ra draws <<<"${DRAWS:-$(git --git-dir=.git log -3 --format=%h --abbrev=7 | tr '\n' ' ')}"
for draw in "${draws[@]}"; do
    DRAW=$draw dev/test/run.sh goals test >"$copy/goals.$draw"
done

count=0 at_once=0 all=0
while IFS=@ read -r name file change tests; do
    [ $# = 0 ] || [[ " $* " = *" ${name% } "* ]] || continue
    all=$((all + 1))
    # shellcheck disable=SC2086 # tests without blanks
    try "${name% }" $file "${change:1:-1}" $tests </dev/null
done <<<"$faults"
echo "planted: $all faults, $count noticed, $at_once of them by the draw of ${draws[0]}"
[ $count = $all ] && [ $((at_once * 10)) -ge $((all * 8)) ]
