#!/usr/bin/env bash
# fuzz.sh -- runs every dev/test/fuzz/fuzz_*.c on inputs that libFuzzer makes, with clang's address
# and undefined-behavior sanitizers, for a given time each. Exit status 0: no crash, no error of a
# sanitizer, no input slower than 10 s.
#
#     dev/test/fuzz/fuzz.sh [SECONDS [NAME...]]     5 seconds each; all targets, or these: parquet token_files ...
#
# An input that fails is kept as build/fuzz/NAME-crash-...; build/fuzz/fuzz_NAME FILE runs it again.
# A target starts with the files of dev/test/fuzz/corpus/NAME and those that seeds() makes below.
# Two targets run at a time.
set -u
cd "$(dirname "$0")/../../.." || exit 1
unset MAKEFLAGS MFLAGS MAKELEVEL

seconds=${1:-5}
[[ $seconds =~ ^[1-9][0-9]{0,5}$ ]] || { echo "error: $seconds: wanted whole seconds; usage: fuzz.sh [SECONDS [NAME...]]" >&2; exit 2; }
names=("${@:2}")
if [ ${#names[@]} = 0 ]; then
    names=(dev/test/fuzz/fuzz_*.c)
    names=("${names[@]#dev/test/fuzz/fuzz_}")
    names=("${names[@]%.c}")
fi
for name in "${names[@]}"; do
    [ -f "dev/test/fuzz/fuzz_$name.c" ] || { echo "error: no dev/test/fuzz/fuzz_$name.c" >&2; exit 2; }
done

options="-O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all"
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT

# shellcheck disable=SC2086
if ! clang $options -x c -o "$work/probe" - 2>/dev/null <<<'#include <stddef.h>
int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes) { return data == NULL && bytes; }'; then
    echo "skipped: fuzz: clang or its libFuzzer is missing (scripts/install_deps.sh)"
    exit 0
fi

zeros() { head -c "$1" /dev/zero; }

# seeds NAME DIRECTORY: some good inputs to begin with.
seeds() {
    local name=$1 to=$2 file json='{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    for file in dev/test/fuzz/corpus/"$name"/*; do
        [ ! -f "$file" ] || cp "$file" "$to"
    done
    case $name in
    bpe) cp dev/ref/fixtures/tokenizers/*.json "$to" ;;
    gguf) cp dev/ref/fixtures/gguf/small.gguf "$to" ;;
    parquet) cp dev/ref/fixtures/parquet/*.parquet "$to" ;;
    safetensors) # a file, and an index of several
        { printf '\0' && printf "\\x$(printf %x ${#json})" && zeros 7 && printf %s "$json" && zeros 8; } >"$to/file"
        printf '\1{"metadata":{},"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}}' >"$to/index"
        ;;
    token_files) # three tokens of 16 bits, two of 32
        { printf '\x88\xd8\x34\x01\1\0\0\0\3\0\0\0' && zeros 1018; } >"$to/u16"
        { printf '\xa1\xd9\x34\x01\7\0\0\0\2\0\0\0' && zeros 1020; } >"$to/u32"
        ;;
    esac
}

# Runs a target; says how many inputs it took, or leaves what happened in $work/NAME.log.
fuzz() {
    local name=$1
    mkdir -p "$work/$name/seeds" "$work/$name/found"
    seeds "$name" "$work/$name/seeds"
    # the target's own messages go nowhere: most inputs are errors
    if "build/fuzz/fuzz_$name" -max_total_time="$seconds" -max_len=20000 -timeout=10 -rss_limit_mb=1500 -close_fd_mask=3 \
        -artifact_prefix="build/fuzz/$name-" -print_final_stats=1 "$work/$name/found" "$work/$name/seeds" \
        >"$work/$name.log" 2>&1; then
        echo "fuzz_$name: $(sed -n 's/^stat::number_of_executed_units: *//p' "$work/$name.log") inputs in $seconds s"
        touch "$work/$name.ok"
    fi
}

if ! make -s -k -j2 BUILD=build/fuzz CC=clang OPENMP= WERROR=-Werror OPT="$options" "${names[@]/#/build/fuzz/fuzz_}"; then
    echo "fuzz: FAILED: the build"
    exit 1
fi
for name in "${names[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge 2 ]; do wait -n; done
    fuzz "$name" &
done
wait

failures=0
for name in "${names[@]}"; do
    if [ ! -e "$work/$name.ok" ]; then
        failures=$((failures + 1))
        echo "fuzz: FAILED: fuzz_$name"
        if grep -q 'ERROR: ' "$work/$name.log"; then # of a sanitizer or of libFuzzer
            sed -n '/ERROR: /,$p' "$work/$name.log" | head -n 30
        fi
        tail -n 10 "$work/$name.log"
    fi
done
[ $failures = 0 ] && echo "fuzz: ${#names[@]} targets, $seconds s each: ok"
exit $((failures > 0))
