#!/usr/bin/env bash
# container.sh -- tests the steps of scripts/container/cpu.Dockerfile without a container: runs each
# in a new Debian, with the files of the last commit, and then the README's commands, as root and as
# another user.
#
#     dev/test/container.sh    as root, with debootstrap and the network; ten minutes
#
# One line for each command; the exit status is 1 if one failed. Environment: that of
# lib/new_debian.sh.
set -eu
cd "$(dirname "$0")/../.."
source dev/test/lib/new_debian.sh
recipe=scripts/container/cpu.Dockerfile

# Prints the recipe, each instruction on a line.
instructions() { sed -e '/^ *#/d' -e '/^$/d' "$recipe" | sed -e ':a' -e '/\\$/{N;s/ *\\\n */ /;ta' -e '}'; }

# refuse WORDS: this test does not know an instruction.
refuse() {
    echo "container: FAILED: $recipe has $1, which this test does not know"
    exit 1
}

# Does what an instruction says.
follow() {
    case $1 in
    FROM) debian_begin container "${2#debian:}" "" ;;
    ARG | ENV) environment+=("$(env -i "${environment[@]}" bash -c "echo \"$2\"")") ;;
    WORKDIR) directory=$2 && mkdir -p "$top/debian$directory" ;;
    COPY)
        [ "$2" = ". $directory" ] || refuse "$1 $2"
        git archive HEAD | tar -x -C "$top/debian$directory"
        ;;
    RUN) try "$2" ;;
    CMD) ;;
    *) refuse "$1" ;;
    esac
}

while read -r instruction rest; do
    follow "$instruction" "$rest"
done < <(instructions)
[ $failed = 0 ] || exit 1

run="--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 2 --samples 0"
try "train_gpt2 --version" '^train_gpt2 '
try "make run OUT=/tmp/quickstart" 'generate text: '
try "mpirun -n 2 --oversubscribe ./train_gpt2 $run --out /tmp/ranks && grep -c '\"kind\":\"train\"' /tmp/ranks/log.jsonl" '^2$'
user=1000:1000
try "mkdir books && zstd -q -c README.md >books/a.txt.zst && gzip -c README.md >books/b.txt.gz"
try "./train_gpt2 --train-data books --tokenizer bpe:500 $run --out out/books && ls out/books/tokenizer.json" tokenizer.json
try "./train_gpt2 --model out/books --prompt One --tokens 4"
try "tokenize --tokenizer out/books/tokenizer.json --out books/tokens books/*.gz && ls books" tokens_val_000000.bin
exit $failed
