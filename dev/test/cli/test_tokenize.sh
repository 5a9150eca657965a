#!/usr/bin/env bash
# test_tokenize.sh -- ./tokenize as its users and their scripts see it: the same shards from all
# kinds of files and after any interruption, and one clear error with the right exit status for
# every bad input.
#
#     dev/test/cli/test_tokenize.sh build/plain/tokenize
#
# GPT2_VOCAB and TINY_TEXT name files for the checks that need them. One line for each check that
# fails; the last line counts them.
set -u
export LC_ALL=C

tokenize=$(realpath "${1:?usage: test_tokenize.sh TOKENIZE}")
GPT2_VOCAB=${GPT2_VOCAB:+$(realpath "$GPT2_VOCAB")}
TINY_TEXT=${TINY_TEXT:+$(realpath "$TINY_TEXT")}
parquet=$(realpath dev/ref/fixtures/parquet/pyarrow_plain.parquet)
name=test_tokenize
source dev/test/lib/check.sh
# In memory if there is such a place: every shard is flushed to the disk, and hundreds of them take
# a while.
work=$(mktemp -d /dev/shm/llmc_tokenize_XXXXXX 2>/dev/null || mktemp -d /tmp/llmc_tokenize_XXXXXX)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

# good WHAT ARGUMENTS...: the run must succeed; what it says is in stdout and stderr.
good() {
    local what=$1
    shift
    timeout 120 "$tokenize" "$@" >stdout 2>stderr
    status=$? # $(...) below has a status, too
    check "$what: exit status $status, $(head -n 1 stderr)" [ $status = 0 ]
}

# bad STATUS WORDS ARGUMENTS...: the run must be refused with one error that contains all of the
# words (separated by |).
bad() {
    local wanted_status=$1 words=$2
    shift 2
    timeout 120 "$tokenize" "$@" >stdout 2>stderr </dev/null
    status=$?
    check_error "$*" "$wanted_status" "$words"
}

# Headers and tokens of all shards of a prefix, in order.
shards() { cat "$1"_val_*.bin "$1"_train_*.bin 2>/dev/null; }
same_shards() { [ -n "$(shards "$1" | head -c 1 | od -c)" ] && cmp <(shards "$1") <(shards "$2"); }
# Tokens of one shard as numbers, on a line.
tokens() { tail -c +1025 "$1" | od -An -v -tu2 -w2 | tr -s ' \n' ' '; }
header() { head -c 12 "$1" | od -An -td4 | tr -s ' ' | sed 's/^ //'; }

# Merges of "the", " the" and " of"; ids 256 to 261, end-of-text 262. U+0120 spells the blank.
make_files() {
    local i
    printf '#version: 0.2\nt h\nth e\n\304\240 the\no f\n\304\240 of\n\304\240 \304\240\n' >merges.txt
    for i in {1..400}; do
        echo "$i bottles of the beer   on the wall, $((i * i)) of 'em; don't drop the bottle no. $i"
    done >lines.txt
    printf 'the one\0the other' >zero.txt
    split -l 100 lines.txt part_
    awk '{ printf "{\"id\": %d, \"text\": \"%s\"}\n", NR, $0 }' lines.txt >lines.jsonl
}
vocab=(--tokenizer merges.txt)

# ---- shards ----

test_ids() {
    printf 'the of the' >a.txt
    : >empty.txt
    printf ' of' >b
    good "three files" "${vocab[@]}" --val-tokens 2 --out ids a.txt empty.txt b
    check "the first tokens validate" [ "$(tokens ids_val_000000.bin)" = ' 262 257 ' ]
    check "the others train" [ "$(tokens ids_train_000001.bin)" = ' 260 258 262 260 ' ]
    check "the header: $(header ids_train_000001.bin)" [ "$(header ids_train_000001.bin)" = "20240520 1 4" ]
    check "no other shards" [ "$(echo ids_*)" = "ids_train_000001.bin ids_val_000000.bin" ]
    check "it says how many" grep -q '^6 tokens in 2 shards, ids_val_000000.bin to ids_train_000001.bin$' stdout
    good "no validation" "${vocab[@]}" --val-tokens 0 --out ids_0 a.txt
    check "one shard" [ "$(echo ids_0_*)" = ids_0_train_000000.bin ]
    bad 1 "zero.txt: not text: byte 7 is zero|--format text" "${vocab[@]}" --out zero_refused zero.txt
    check "nothing is written" [ "$(echo zero_*)" = 'zero_*' ]
    good "a zero" "${vocab[@]}" --val-tokens 0 --format text --out zero zero.txt
    check "a zero is a byte" [ "$(tokens zero_train_000000.bin | wc -w)" = 12 ]
}

test_kinds() {
    local cut=(--shard-tokens 1000 --val-tokens 500)
    # every line is a document, without its newline
    good "JSON" "${vocab[@]}" "${cut[@]}" --out json lines.jsonl
    check "400 documents" grep -q '^400 documents' stdout
    good "a separator" "${vocab[@]}" "${cut[@]}" --separator $'\n' --out separator lines.txt
    check "the same documents" same_shards json separator
    good "standard input" "${vocab[@]}" "${cut[@]}" --format jsonl --out stdin - <lines.jsonl
    check "the same documents" same_shards json stdin
    good "another field" "${vocab[@]}" "${cut[@]}" --field body --out field <(sed 's/"text"/"body"/' lines.jsonl) \
        --format jsonl
    check "the same documents" same_shards json field
    for threads in 1 2 3 8; do
        good "$threads threads" "${vocab[@]}" "${cut[@]}" --threads $threads --out threads_$threads lines.jsonl
        check "the same shards" same_shards json threads_$threads
    done
    good "Parquet" "${vocab[@]}" --out parquet "$parquet"
    check "its documents" grep -Eq '^[0-9]{3} documents' stdout
}

# packed ENDING LIBRARY COMMAND...: the tool reads what the command packs, or says what it was built
# without.
packed() {
    local ending=$1 library=$2
    shift 2
    command -v "$1" >/dev/null || { echo "skipped: tokenize: $1 is missing (scripts/install_deps.sh --test)"; return; }
    "$@" <lines.jsonl >"lines.jsonl.$ending"
    if ! "$tokenize" "${vocab[@]}" --restart --out "$ending" "lines.jsonl.$ending" >stdout 2>stderr; then
        check "built without $library" grep -q "lines.jsonl.$ending: built without $library: install" stderr
        check "before any work" [ "$(echo "$ending"*)" = "$ending*" ]
        return
    fi
    good "$ending" "${vocab[@]}" --shard-tokens 1000 --val-tokens 500 --restart --out "$ending" "lines.jsonl.$ending"
    check "the same documents" same_shards json "$ending"
    head -c 1000 "lines.jsonl.$ending" >"short.jsonl.$ending"
    bad 1 "short.jsonl.$ending: truncated" "${vocab[@]}" --out "short_$ending" "short.jsonl.$ending"
}

# What earlier versions could drop is refused, in arguments and in an interrupted run.
test_removed() {
    bad 2 "--dedup was removed: clean the" "${vocab[@]}" --dedup exact --out never lines.txt
    bad 2 "--filter was removed: select" "${vocab[@]}" --filter 'id > 3' --out never lines.jsonl
    mkdir old_train_000001.bin
    bad 1 "old_train_000001.bin: cannot write" "${vocab[@]}" --val-tokens 100 --out old lines.txt
    rmdir old_train_000001.bin
    sed -i 's/"separator":/"dedup":"near",&/' old.progress.json
    bad 2 "--dedup is removed, but old.progress.json says near|--restart" "${vocab[@]}" --val-tokens 100 --out old lines.txt
    sed -i 's/"dedup":"near"/"dedup":"none"/' old.progress.json
    good "a run of an earlier version" "${vocab[@]}" --val-tokens 100 --out old lines.txt
}

# ---- interruptions ----

# The run stops at shard n, which cannot be written, and continues when it can.
test_resume() {
    local run=("${vocab[@]}" --shard-tokens 700 --val-tokens 900) n next
    good "a whole run" "${run[@]}" --out whole part_a? lines.jsonl
    check "finished" grep -q '"finished":true' whole.progress.json
    good "again" "${run[@]}" --out whole part_a? lines.jsonl
    check "has nothing to do" grep -q '^already finished: ' stdout
    for n in 1 2 7 20; do
        next=$(printf 'broken_%s_%06d.bin' "$([ $n -lt 2 ] && echo val || echo train)" $n)
        mkdir "$next"
        bad 1 "$next: cannot write: Is a directory" "${run[@]}" --out broken part_a? lines.jsonl
        rmdir "$next"
        check "stopped" grep -q '"finished":false' broken.progress.json
        check "after $n shards" grep -q "\"shards\":$n," broken.progress.json
        good "going on" "${run[@]}" --out broken part_a? lines.jsonl
        check "behind them" [ -n "$(grep "^continuing after .* in $n shards$" stdout)" ]
        check "nothing else is left" [ -z "$(find . -name 'broken*.part' -o -name 'broken.lock')" ]
        check "the same shards as without the stop, after $n" same_shards whole broken
        rm broken*
    done
}

# A run that is killed at any moment, and whose inputs are one long document each.
test_kill() {
    local run=("${vocab[@]}" --shard-tokens 200000 --val-tokens 100000 --threads 1) i
    for i in {1..100}; do cat lines.txt; done >long.txt
    cp long.txt longer.txt
    cat lines.txt >>longer.txt
    good "a whole run" "${run[@]}" --out long long.txt longer.txt
    for i in 1 4 9; do
        rm -f killed*
        : >killed_train_000000.bin.77.part
        : >killed_too_train_000000.bin.77.part
        "$tokenize" "${run[@]}" --out killed long.txt longer.txt >/dev/null 2>&1 &
        while [ ! -e "killed_train_00000$i.bin" ] && kill -0 $! 2>/dev/null; do sleep 0.01; done
        kill -9 $! 2>/dev/null
        wait $! 2>/dev/null
        good "after kill -9" "${run[@]}" --out killed long.txt longer.txt
        check "the same shards as without the kill, $i" same_shards long killed
    done
    check "only another prefix's half-written file is left" [ "$(echo killed*.part)" = killed_too_train_000000.bin.77.part ]
    check "the lock is gone" [ ! -e killed.lock ]
}

test_other_arguments() {
    local run=("${vocab[@]}" --shard-tokens 700)
    good "a run" "${run[@]}" --out other lines.txt
    bad 2 "--shard-tokens is 800|other.progress.json says 700|--restart" "${vocab[@]}" --shard-tokens 800 --out other lines.txt
    bad 2 "--val-tokens is 5|--restart" "${run[@]}" --val-tokens 5 --out other lines.txt
    bad 2 "--field is body" "${run[@]}" --field body --out other lines.txt
    bad 2 "input 1 is lines.jsonl|says lines.txt" "${run[@]}" --out other lines.jsonl
    bad 2 "input 1 is part_aa" "${run[@]}" --out other part_aa lines.txt
    bad 2 "input 2 is part_aa|says nothing" "${run[@]}" --out other lines.txt part_aa
    printf '#version: 0.2\nt h\n' >few.txt
    bad 2 "--tokenizer|checksum" --tokenizer few.txt --shard-tokens 700 --out other lines.txt
    cp lines.txt changed.txt
    good "a run" "${run[@]}" --out changed changed.txt
    echo >>changed.txt
    bad 2 "changed.txt is $(stat -c %s changed.txt) bytes long" "${run[@]}" --out changed changed.txt
    good "from the beginning" "${run[@]}" --restart --out changed changed.txt
    cp -p changed.txt same_size.txt
    tr a-y b-z <same_size.txt >changed.txt
    bad 2 "changed.txt is another file, with the checksum|--restart" "${run[@]}" --out changed changed.txt
    cp -p same_size.txt changed.txt
    good "as it was" "${run[@]}" --out changed changed.txt
    cp changed_train_000002.bin shard
    printf x | dd of=changed_train_000002.bin bs=1 seek=1500 conv=notrunc 2>/dev/null
    bad 1 "changed_train_000002.bin: its checksum is|changed.progress.json says|--restart" "${run[@]}" --out changed changed.txt
    head -c -2 shard >changed_train_000002.bin
    bad 1 "changed_train_000002.bin: $(($(stat -c %s shard) - 2)) bytes, wanted $(stat -c %s shard)" "${run[@]}" --out changed changed.txt
    sed -i 's/"checksum"/"sum"/' changed.progress.json
    bad 1 "changed.progress.json: byte|wanted checksum|--restart" "${run[@]}" --out changed changed.txt
    rm other_train_000002.bin
    bad 1 "other_train_000002.bin: No such file|--restart" "${run[@]}" --out other lines.txt
    rm other.progress.json
    bad 1 "other_val_000000.bin: exists, but no other.progress.json" "${run[@]}" --out other lines.txt
    good "fewer shards" "${vocab[@]}" --restart --out other lines.txt
    check "remove the others" [ "$(echo other_*)" = "other_train_000001.bin other_val_000000.bin" ]
}

# Text from a pipe is gone once read: a second run can neither continue nor be known to be the
# same.
test_streams() {
    local run=("${vocab[@]}" --val-tokens 0)
    timeout 20 "$tokenize" "${run[@]}" --out pipe - <lines.txt >stdout 2>stderr
    check "standard input" [ $? = 0 ]
    timeout 20 "$tokenize" "${run[@]}" --out pipe - <part_aa >stdout 2>stderr
    status=$?
    check_error "standard input again" 2 "standard input: cannot be read again|pipe.progress.json has 1 shards|--restart"
    timeout 20 "$tokenize" "${run[@]}" --restart --out pipe - <lines.txt >stdout 2>stderr
    check "standard input, from the beginning" [ $? = 0 ]
    mkfifo fifo
    cat lines.txt >fifo &
    good "a FIFO" "${run[@]}" --out named fifo
    check "the same tokens" same_shards pipe named
    bad 2 "fifo: cannot be read again" "${run[@]}" --out named fifo
    mkfifo fifo.parquet kept.progress.json kept_2.lock
    bad 1 "fifo.parquet: not a regular file" "${run[@]}" --out never fifo.parquet
    bad 1 "kept.progress.json: not a regular file" "${run[@]}" --out kept lines.txt
    bad 1 "kept_2.lock: not a regular file" "${run[@]}" --out kept_2 lines.txt
    bad 1 "fifo: not a regular file, wanted a tokenizer" --tokenizer fifo --out never lines.txt
}

# Nothing that is printed gets into a file of ours.
test_closed_descriptors() {
    "$tokenize" "${vocab[@]}" --val-tokens 0 --out closed lines.txt <&- >&- 2>&-
    check "without standard descriptors" [ $? = 0 ]
    good "with them" "${vocab[@]}" --val-tokens 0 --out open lines.txt
    check "the same shards" same_shards open closed
}

# A window of 2 GiB without the memory for it is no damage of the file.
test_little_memory() {
    printf '\x28\xB5\x2F\xFD\x00\xA8\x21\x00\x00a b\n' >window.txt.zst
    if ldd "$tokenize" | grep -q -e libasan -e libtsan; then
        echo "skipped: a window of Zstandard without memory: a sanitizer maps terabytes"
        return
    fi
    (ulimit -v 1500000 && timeout 20 "$tokenize" "${vocab[@]}" --threads 1 --out never window.txt.zst >stdout 2>stderr)
    status=$?
    if grep -q 'built without zstd' stderr; then
        echo "skipped: a window of Zstandard without memory: built without zstd"
    else
        check_error "a window of 2 GiB" 1 "window.txt.zst: needs a window of 2048 MiB to be unpacked, and there is no memory for it"
    fi
}

# Text from Windows has the same tokens as without its byte-order mark, which is said once, however
# many files have one.
test_byte_order_marks() {
    local run=("${vocab[@]}" --val-tokens 0)
    mkdir marked plain
    for file in lines.txt lines.jsonl part_aa; do
        cp $file plain/
        { printf '\xEF\xBB\xBF' && cat $file; } >marked/$file
    done
    good "without marks" "${run[@]}" --out unmarked plain/lines.txt plain/lines.jsonl plain/part_aa
    timeout 20 "$tokenize" "${run[@]}" --out marked_out marked/lines.txt marked/lines.jsonl marked/part_aa >stdout 2>stderr
    status=$?
    check "with marks: $(tail -n 1 stderr)" [ $status = 0 ]
    check "the same tokens" same_shards unmarked marked_out
    check "one note, of the first file" [ "$(cat stderr)" = "note: marked/lines.txt starts with a byte-order mark, which is skipped" ]
    timeout 20 "$tokenize" "${run[@]}" --out marked_pipe --format jsonl - <marked/lines.jsonl >stdout 2>stderr
    status=$?
    check "standard input: $(tail -n 1 stderr)" [ $status = 0 ]
    good "the same without a mark" "${run[@]}" --out unmarked_line lines.jsonl
    check "the same tokens from standard input" same_shards unmarked_line marked_pipe
    printf '\xFF\xFE{\0"\0' >utf16.jsonl
    bad 1 "utf16.jsonl: UTF-16, by its byte-order mark; wanted UTF-8: iconv" "${vocab[@]}" --out never utf16.jsonl
}

# Two at a time: the first is held up by its input until the second has been refused (test_two_end).
test_two_begin() {
    mkfifo held
    "$tokenize" "${vocab[@]}" --val-tokens 0 --out two held lines.txt >first.stdout 2>first.stderr &
    first=$!
    exec 7<>held
    while [ ! -e two.progress.json ] && kill -0 $first 2>/dev/null; do sleep 0.01; done
    "$tokenize" "${vocab[@]}" --val-tokens 0 --out two lines.txt >second.stdout 2>second.stderr &
    second=$!
    "$tokenize" --train-bpe 300 --out two lines.txt >third.stdout 2>third.stderr &
    third=$!
}
test_two_end() {
    wait $second
    status=$?
    cp second.stderr stderr
    check_error "two at a time" 1 "two.lock: another ./tokenize is writing here"
    wait $third
    status=$?
    cp third.stderr stderr
    check_error "a vocabulary there, too" 1 "two.lock: another ./tokenize is writing here"
    cat part_aa >&7
    exec 7>&-
    wait $first
    status=$?
    check "the first is not disturbed: $(head -n 1 first.stderr)" [ $status = 0 ]
    good "the same alone" "${vocab[@]}" --val-tokens 0 --out alone part_aa lines.txt
    check "its shards" same_shards alone two
    check "the lock is gone" [ ! -e two.lock ]
}

# Text without blanks: little memory, and the same ids from anywhere.
test_no_blanks() {
    local run=("${vocab[@]}" --val-tokens 0 --shard-tokens 3000000)
    head -c 30000000 /dev/zero | tr '\0' e >no_blanks.txt
    { printf '{"text":"' && cat no_blanks.txt && printf '"}'; } >no_blanks.jsonl
    # not with the address sanitizer, which maps terabytes
    (ldd "$tokenize" | grep -q libasan || ulimit -v 400000 && timeout 120 "$tokenize" "${run[@]}" --threads 1 --out blanks no_blanks.txt >stdout 2>stderr)
    status=$?
    check "text without blanks: $(head -n 1 stderr)" [ $status = 0 ]
    check "all of it" grep -q '^30000001 tokens in 11 shards' stdout
    good "the same line" "${run[@]}" --threads 2 --out blanks_line no_blanks.jsonl
    check "the same ids" same_shards blanks blanks_line
    rm blanks* no_blanks*
}

# ---- errors ----

test_errors() {
    bad 2 "no input" "${vocab[@]}"
    bad 2 "--tokenizer is missing" lines.txt
    bad 2 "--tokenizer and --train-bpe" "${vocab[@]}" --train-bpe 300 lines.txt
    bad 2 "--train-bpe is 256" --train-bpe 256 lines.txt
    bad 2 "--shard-token|--shard-tokens" "${vocab[@]}" --shard-token 5 lines.txt
    bad 2 "--shard-tokens 0" "${vocab[@]}" --shard-tokens 0 lines.txt
    bad 1 "none.txt: cannot open" "${vocab[@]}" lines.txt none.txt
    bad 1 "none.json" --tokenizer none.json lines.txt
    bad 1 "gpt2: cannot open the tokenizer|scripts/get_data.sh gpt2-vocab" --tokenizer gpt2 lines.txt
    : >merges.bin
    bad 1 "merges.bin: not text, by its name" "${vocab[@]}" merges.bin
    good "a directory that is not there yet" "${vocab[@]}" --out new/place/a lines.txt
    check "is made" [ -f new/place/a.progress.json ]
    good "a vocabulary in one" --train-bpe 300 --out new/other/a lines.txt
    cp new/other/a.tokenizer.json before
    bad 1 "new/other/a.tokenizer.json: exists; --restart replaces the vocabulary" --train-bpe 290 --out new/other/a lines.txt
    good "the same again" --train-bpe 300 --restart --out new/other/a lines.txt
    check "gives the same" cmp before new/other/a.tokenizer.json
    bad 2 "--out new/other/a.tokenizer.json: the run reads this file" --format text --train-bpe 290 --restart --out new/other/a new/other/a.tokenizer.json
    check "which is there" cmp before new/other/a.tokenizer.json
    ln -s lines.txt linked.tokenizer.json
    bad 1 "--out linked.tokenizer.json: a symbolic link" --train-bpe 290 --restart --out linked lines.txt
    cp lines.txt own_train_000000.bin
    bad 2 "--out ./own_train_000000.bin: the run reads this file" "${vocab[@]}" --format text --restart --out own own_train_000000.bin
    check "which is there" cmp lines.txt own_train_000000.bin
    cp lines.txt own.lock
    bad 2 "--out own.lock: the run reads this file" "${vocab[@]}" --format text --out own own.lock
    check "is made, too" [ -f new/other/a.tokenizer.json ]
    bad 1 "lines.txt: a file, wanted a directory" "${vocab[@]}" --out lines.txt/a lines.txt
    bad 1 "lines.txt: a file, wanted a directory" --train-bpe 300 --out lines.txt/a lines.txt
    check "bad arguments leave nothing behind" [ ! -e tokens.progress.json ]
    { head -n 7 lines.jsonl && echo '{"text": 8}' && tail -n 1 lines.jsonl; } >bad.jsonl
    bad 1 "bad.jsonl:8: byte 9: found '8'" "${vocab[@]}" --out bad bad.jsonl
    bad 1 'lines.jsonl:1: no field "body", found "id", "text"' "${vocab[@]}" --out bad_field --field body lines.jsonl
    : >empty.txt
    bad 1 "no text" "${vocab[@]}" --out empty empty.txt
    bad 1 "no text" "${vocab[@]}" --out empty empty.txt # and again
    head -c 300 /bin/sh >program
    bad 1 "program: not text: byte" "${vocab[@]}" --out kinds lines.txt program
    echo '[{"text": "a"}]' >array.json
    bad 1 "array.json: not text, by its name: name it .jsonl|jq" "${vocab[@]}" --out kinds lines.txt array.json
    cp array.json table.csv
    bad 1 "table.csv: not text, by its name: a table" "${vocab[@]}" --out kinds lines.txt table.csv
    good "whatever its name" "${vocab[@]}" --format text --out kinds lines.txt table.csv
    mkdir directory
    cp lines.jsonl directory
    bad 1 "directory: a directory, wanted files: directory/*.jsonl" "${vocab[@]}" --out never directory
    cp lines.txt ./--dashes
    good "a name that starts with a dash" "${vocab[@]}" --out dashes -- --dashes
    bad 2 "unknown option --dashes" "${vocab[@]}" --out dashes --dashes
    check "bad input leaves nothing behind" [ "$(echo never*)" = 'never*' ]
    "$tokenize" "${vocab[@]}" --out full lines.txt >/dev/full 2>stderr
    check "a full standard output" grep -q '^error: standard output: cannot write: No space left' stderr
}

# A limit on the size of files is a disk that fills up.
test_full_disk() {
    (ulimit -f 8 && timeout 120 "$tokenize" "${vocab[@]}" --out disk --val-tokens 100 lines.txt >/dev/null 2>stderr)
    check "a full disk: $(head -n 1 stderr)" grep -q '^error: disk_train_000001.bin: cannot write: File too large' stderr
    check "a full disk: nothing half-written is left" [ "$(echo disk*)" = "disk.progress.json disk_val_000000.bin" ]
    good "when there is room" "${vocab[@]}" --out disk --val-tokens 100 lines.txt
    check "the run continues" grep -q "^continuing after 100 tokens in 1 shards" stdout
}

# ---- vocabularies ----

test_train() {
    good "training" --train-bpe 300 --threads 2 --out trained lines.txt part_aa
    check "one file" [ "$(echo trained.*)" = trained.tokenizer.json ]
    good "one thread" --train-bpe 300 --threads 1 --out trained_1 lines.txt part_aa
    check "the same merges" cmp trained.tokenizer.json trained_1.tokenizer.json
    bad 1 "allows only" --train-bpe 100000 --out too_many part_aa
    most=$(sed -n 's/.*wanted --train-bpe \([0-9]*\).*/\1/p' stderr)
    good "the most that it allows" --train-bpe "$most" --out most part_aa
    bad 1 "allows only" --train-bpe $((most + 1)) --out too_many part_aa
    check "nothing is left" [ "$(echo too_many*)" = 'too_many*' ]
    good "with marks" --train-bpe 303 --fim-marks --out fim lines.txt part_aa
    check "one file" [ "$(echo fim*)" = fim.tokenizer.json ]
    good "its shards" --tokenizer fim.tokenizer.json --out fim lines.txt
    good "the shards without marks" --tokenizer trained.tokenizer.json --restart --out "with" lines.txt
    check "are the same" cmp fim_train_000001.bin with_train_000001.bin
    bad 2 "--fim-marks is given without --train-bpe" --fim-marks "${vocab[@]}" lines.txt
    bad 2 "--train-bpe is 259; wanted at least 260" --train-bpe 259 --fim-marks lines.txt
}

# tiktoken's ids of this text: 338025, and the end-of-text before it.
test_gpt2() {
    if [ -z "${GPT2_VOCAB:-}" ] || [ -z "${TINY_TEXT:-}" ]; then
        echo "skipped: tokenize with GPT-2's vocabulary: GPT2_VOCAB and TINY_TEXT are not set"
        return
    fi
    good "GPT-2's vocabulary" --tokenizer "$GPT2_VOCAB" --val-tokens 0 --out gpt2 "$TINY_TEXT"
    check "as many tokens as tiktoken finds" [ "$(header gpt2_train_000000.bin)" = "20240520 1 338026" ]
    check "the first of them" [ "$(head -c 1036 gpt2_train_000000.bin | tail -c 12 | od -An -tu2 | tr -s ' ')" = \
        " 50256 5962 22307 25 198 8421" ]
}

make_files
test_two_begin
test_ids
test_kinds
packed gz zlib gzip -c
packed zst zstd zstd -qc
test_removed
test_resume
test_kill
test_other_arguments
test_streams
test_byte_order_marks
test_little_memory
test_closed_descriptors
test_no_blanks
test_errors
test_full_disk
test_train
test_gpt2
test_two_end
good "--help" --help
check "--help names the options" grep -q -e '--shard-tokens' stdout
good "--version" --version
check "--version is one line with the name" grep -q '^tokenize [0-9]' stdout
check_done
