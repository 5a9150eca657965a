#!/usr/bin/env bash
# planted.sh -- does dev/test/crossings find a fault where two features meet? Plants faults of
# different kinds, one at a time, and draws until the relation that should notice it fails.
#
#     dev/test/crossings/planted.sh [NAME...]      all faults, or some
#
# Prints for each fault how it was found, and after how many seconds. The exit status is 1 if one is
# not found in LIMIT seconds (120), or all of them together take more than TOTAL (600). First, each
# relation has to hold for CALM seconds (10) without a fault: what it finds then, it finds anyway.
# The sources are copied; nothing here is changed.
set -u
cd "$(dirname "$0")/../../.." || exit 1
[ ! -d /usr/lib/ccache ] || PATH=/usr/lib/ccache:$PATH
limit=${LIMIT:-120}
calm=${CALM:-10}
settings=(UNITS=1 OPT=-O1 MODULES_OPT=-O0)

# NAME @ RELATION @ FILE @ command of sed
faults='unsaved @ config @ llmc/setup/options.h @ s/if (row->type != OPTION_FLAG && option_repeats_(options, row)) {/if (row->type != OPTION_FLAG \&\& row->type != OPTION_FLOAT \&\& option_repeats_(options, row)) {/
silent @ effect @ llmc/setup/conflicts.h @ s/if (words && ranks_rank(&s->ranks) == 0) {/if (words \&\& ranks_rank(\&s->ranks) < 0) {/
position @ cut @ llmc/run/run.h @ s/dataloader_seek(run->train, sequence);/dataloader_seek(run->train, 0 * sequence);/
sum @ ranks @ llmc/run/run.h @ s/wide_sum_merge(&square_sum, report->square_sum);/if (r == 0 || r < run->comm.size - 1) { wide_sum_merge(\&square_sum, report->square_sum); }/
unplanned @ plan @ llmc/checkpoint/checkpoint.h @ s/^    c->copies = .*/&\n    char* beyond = (char*)malloc(3 * c->params_bytes + 1);\n    memset(beyond, 1, 3 * c->params_bytes + 1);/
overwrites @ batch @ llmc/ops/matmul.h @ s/dbias\[o\] = mode == GRADIENT_ADD ? dbias\[o\] + sum : sum;/dbias[o] = mode == GRADIENT_ADD \&\& OC < 0 ? dbias[o] + sum : sum;/
stale @ no_effect @ train_gpt2.c @ s/    if (level >= RECOMPUTE_NORMS) {/    if (level > RECOMPUTE_NORMS) {/
theta @ back @ llmc/formats/hf_config.h @ s/\(rope_theta.*: %s.*\)base\.text/\1"10000"/
unchecked @ damaged @ llmc/data/target_mask.h @ s/^    if (xxh64(bits, bytes) != header.sum) {/    if (xxh64(bits, bytes) == 0) {/
narrow @ padding @ llmc/data/dataloader.h @ s/int width = (longest + DATALOADER_WIDTH - 1)/int width = (longest - 9 + DATALOADER_WIDTH - 1)/
reads @ inputs @ llmc/run/run_files.h @ /^void run_check_outputs/,/^}/s/run_list_files(&o.reads, run, options);/(void)run;/
router @ reference @ llmc/ops/router.h @ /^static void router_block_backward_/,/^}/s/if (!counted_is_token(&r->counted, b, t, r->T)) {/if (b < 0) {/'

build() { make -s -C "$copy" -j2 "${settings[@]}" build/planted/{crossings,train_gpt2,tokenize} BUILD=build/planted >"$copy/log" 2>&1; }

# crossed RELATION SECONDS: draws; prints the first failure, or nothing.
crossed() {
    (cd "$copy" && build/planted/crossings --trainer build/planted/train_gpt2 --tokenize build/planted/tokenize --only "$1" \
        --seconds "$2" --stop-at 1 --seed 7 2>&1) | grep -m 1 FAILED
}

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
tar cf - --exclude=./build --exclude=./.git . | tar xf - -C "$copy" # with the times: what is built stays built
build || { tail -n 5 "$copy/log" && exit 2; }

declare -A is_calm
count=0 all=0 seconds=0
while IFS=@ read -r name relation file change; do
    name=${name% } relation=${relation// /} file=${file// /}
    [ $# = 0 ] || [[ " $* " = *" $name "* ]] || continue
    all=$((all + 1))
    if [ ! "${is_calm[$relation]-}" ]; then
        is_calm[$relation]=1
        found=$(crossed "$relation" "$calm" </dev/null)
        [ -z "$found" ] || echo "$relation fails without a fault: $found"
    fi
    sed -i -e "${change# }" "$copy/$file"
    ! cmp -s "$file" "$copy/$file" || { echo "planted: $name: sed finds nothing to change in $file" >&2; exit 2; }
    if build </dev/null; then
        SECONDS=0
        found=$(crossed "$relation" "$limit" </dev/null)
        seconds=$((seconds + SECONDS))
        echo "$name: $file: ${found:-NOT FOUND} ($SECONDS s)"
        [ -z "$found" ] || count=$((count + 1))
    else
        echo "$name: $file: NOT FOUND, because it does not compile: $(grep -m 1 error "$copy/log")"
    fi
    cp -p "$file" "$copy/$file" && touch "$copy/$file"
done <<<"$faults"
echo "planted: $all faults, $count found, in $seconds s"
[ $count = $all ] && [ $seconds -le "${TOTAL:-600}" ]
