# shellcheck shell=bash disable=SC2154,SC2034
# outputs.sh -- faults of files that are written; for dev/test/defects.sh.

outputs_model=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --eval-every 0 --samples 0)

# A text of 20 kB, and a run on it in the directory $1, of $2 steps (4) with two checkpoints.
outputs_run() {
    local i steps=${2:-4}
    for i in {1..400}; do echo "$i bottles of beer on the wall, $i bottles of beer."; done >s.txt
    good "a run" "${outputs_model[@]}" --train-data s.txt --steps "$steps" --save-every $((steps / 2)) --out "$1"
}

# outputs_strace STRACE_OPTIONS... -- OPTIONS...: the trainer, with failing calls; only what it says
# itself is in stderr.
outputs_strace() {
    local faults=()
    while [ "$1" != -- ]; do
        faults+=("$1")
        shift
    done
    shift
    strace -f -o trace "${faults[@]}" "$trainer" "$@" >stdout 2>said </dev/null
    status=$?
    grep -v '^strace: ' said >stderr
}

# For root, nothing else keeps a report from replacing a device.
defect_outputs_that_replace_devices() {
    outputs_run r
    if ! mknod null c 1 3 2>/dev/null; then
        echo "skipped: a device as output: only root can make one"
        return
    fi
    bad 1 "--out-html null: not a regular file" --report r --out-html null
    bad 1 "--export-gguf null: not a regular file" --model r --steps 0 --export-gguf null
    check "the device is there" [ -c null ]
}

# There is not enough memory for the texts, and what was written last night stays.
defect_texts_emptied_before_the_memory_is_taken() {
    outputs_run r
    echo '{"prompt": "bottles"}' >p.jsonl
    echo night >night.jsonl
    (ulimit -v 200000 && exec "$trainer" --model r --prompts p.jsonl --batch 1000000 --out-texts night.jsonl) >stdout 2>stderr </dev/null
    check "refused: exit status $?" [ $? != 0 ]
    check "what was there stays" grep -q night night.jsonl
}

# A log that cannot be read is not an empty one: nothing is cut.
defect_logs_cut_when_they_cannot_be_read() {
    local call log lines
    is_here strace || return
    outputs_run w 100
    rm -r w/step_00000100
    lines=$(wc -l <w/log.jsonl)
    for call in openat read; do
        for log in log.jsonl main.log; do
            outputs_strace -P "w/$log" -e trace=$call -e inject=$call:error=EIO:when=1 -- --out w --resume on
            check_error "$call of $log fails" 1 "w/$log: cannot |: Input/output error"
            check "nothing is cut" [ "$(wc -l <w/log.jsonl)" = "$lines" ]
        done
    done
    good "without faults" --out w --resume on
}

# A run directory of somebody else, or logs on another drive: what a link leads to is not cut.
defect_logs_that_are_links() {
    mkdir w
    echo precious >victim
    ln -s ../victim w/log.jsonl
    ln -s ../victim w/main.log
    outputs_run w
    check "the victim is whole" [ "$(cat victim)" = precious ]
    check "the links were put aside" [ -L w/log.jsonl.1 ]
    mv w/log.jsonl elsewhere
    ln -s ../elsewhere w/log.jsonl
    cp elsewhere before
    rm -r w/step_00000004
    runs "resumed" --out w --resume on
    check "the log elsewhere is whole" cmp before elsewhere
    check "the run has its own" [ ! -L w/log.jsonl ]
    check "with all of its updates" [ "$(values train step w/log.jsonl | tr '\n' ' ')" = "1 2 3 4 " ]
}

# One of two exports fails: the other leaves no file of the model's size on the full disk.
defect_exports_that_leave_halves() {
    local call
    is_here strace || return
    outputs_run w
    for call in 1 2 3; do
        outputs_strace -e trace=fsync -e inject=fsync:error=ENOSPC:when=$call -- --model w --steps 0 --samples 0 \
            --export-gguf x.gguf --export-llmc x.bin
        check_error "flush number $call" 1 "No space left on device"
        check "no halves: $(echo ./*.part)" [ "$(echo ./*.part)" = './*.part' ]
    done
}

# A library whose allocation number MEMORY_AT fails; MEMORY_AT=0 counts them on descriptor 3.
outputs_make_memory_fault() {
    cat >memory.c <<'C'
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
extern void *__libc_malloc(size_t), *__libc_realloc(void*, size_t);
static int calls = 0, at = -1;
__attribute__((constructor)) static void begin(void) { at = atoi(getenv("MEMORY_AT")); }
__attribute__((destructor)) static void end(void) { at == 0 ? dprintf(3, "%d\n", calls) : 0; }
static int fails(void) { return at >= 0 && __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) == at ? (errno = ENOMEM) : 0; }
void* malloc(size_t bytes) { return fails() ? NULL : __libc_malloc(bytes); }
void* realloc(void* memory, size_t bytes) { return fails() ? NULL : __libc_realloc(memory, bytes); }
C
    "${CC:-cc}" -shared -fPIC memory.c -o memory.so 2>compiler
}

# Memory that is missing for a moment ends a run with an error, or costs it nothing; it never
# crashes.
defect_no_memory_for_a_moment() {
    local i n
    local run=("${outputs_model[@]}" --train-data s.txt --steps 4 --save-every 2 --tokenizer bpe:280 --tensorboard on --resume auto --out w)
    is_here "${CC:-cc}" || return
    for i in {1..400}; do echo "$i bottles of beer on the wall, $i bottles of beer."; done >s.txt
    if ! outputs_make_memory_fault; then
        echo "skipped: failing allocations: no glibc"
        return
    fi
    n=$(LD_PRELOAD=$PWD/memory.so MEMORY_AT=0 "$trainer" "${run[@]}" 3>&1 >stdout 2>stderr </dev/null)
    check "allocations are counted: $n" [ "${n:-0}" -gt 100 ]
    for ((i = 1; i <= n; i += 1 + n / 150)); do
        rm -rf w
        LD_PRELOAD=$PWD/memory.so MEMORY_AT=$i "$trainer" "${run[@]}" >stdout 2>stderr </dev/null
        status=$?
        check "allocation $i of $n: exit status $status" [ $status -le 1 ]
        [ $status = 0 ] || check "allocation $i of $n has an error" grep -qE '^error: |[Oo]ut of memory' stderr
    done
}

# A file system without locks: two runs in a directory overwrote each other's checkpoints, and
# nobody said anything.
defect_two_runs_where_nothing_can_be_locked() {
    local error first
    is_here "${CC:-cc}" || return
    echo 'int flock(int fd, int op) { extern int* __errno_location(void); extern char* getenv(const char*); extern int atoi(const char*);
        (void)fd, (void)op; *__errno_location() = atoi(getenv("FLOCK_ERRNO")); return -1; }' >flock.c
    "${CC:-cc}" -shared -fPIC flock.c -o flock.so 2>compiler
    for error in 37 38 9 95; do
        rm -rf z
        LD_PRELOAD=$PWD/flock.so FLOCK_ERRNO=$error "$trainer" "${outputs_model[@]}" --steps 1000000 --out z >first 2>&1 </dev/null &
        first=$!
        for _ in {1..200}; do grep -qs '"kind":"train"' z/log.jsonl && break; sleep 0.05; done
        LD_PRELOAD=$PWD/flock.so FLOCK_ERRNO=$error bad 1 "z: another run is writing here (|, pid $first); if it is over, remove z/run.lock" \
            "${outputs_model[@]}" --steps 2 --seed 7 --out z
        check "says at once that it waits" grep -q "^z: another run is writing here (.*, pid $first): waiting 10 s" stdout
        check "the log of the first is its own" [ ! -e z/log.jsonl.1 ]
        kill -KILL $first
        wait $first 2>/dev/null
        LD_PRELOAD=$PWD/flock.so FLOCK_ERRNO=$error runs "after its end" "${outputs_model[@]}" --steps 2 --out z
        check "with a note" grep -q "^note: z: the file system has no locks" stderr
    done
}

# A weight that is finite, but not in f16 or q8_0: files had infinities, texts were empty, and the
# exit status was 0.
defect_weights_that_overflow_in_narrow_types() {
    outputs_run w
    good "an export" --model w --steps 0 --samples 0 --export-llmc x.bin
    printf '\x00\x50\xc3\x47' | dd of=x.bin bs=1 seek=1024 conv=notrunc 2>/dev/null # 100000, the first of wte
    bad 1 "x.gguf: tensor token_embd.weight, element 0 is 100000, wanted less than 65520; --export-gguf-dtype bf16 works" \
        --model x.bin --tokenizer w --steps 0 --samples 0 --export-gguf x.gguf
    check "no file: $(echo x.gguf*)" [ "$(echo x.gguf*)" = 'x.gguf*' ]
    good "bf16" --model x.bin --tokenizer w --steps 0 --samples 0 --export-gguf x.gguf --export-gguf-dtype bf16
    good "32 channels" --layers 1 --channels 32 --heads 2 --seq-len 16 --batch 2 --train-data s.txt --steps 1 --eval-every 0 --samples 0 --out y --export-llmc y.bin
    printf '\x00\x00\x00\x4b' | dd of=y.bin bs=1 seek=1024 conv=notrunc 2>/dev/null # 8388608
    train --model y.bin --tokenizer y --quantize q8_0 --prompt a
    check "8 bits in memory: exit status $status" [ "$status" = 1 ]
    check "8 bits in memory: $(tail -n 1 stderr)" grep -q '^error: --quantize q8_0: element 0 of wte, copy 0, is 8.38861e+06, .*--quantize off works' stderr
    bad 1 "y.gguf: tensor token_embd.weight|bf16 works" --model y.bin --tokenizer y --steps 0 --samples 0 \
        --export-gguf y.gguf --export-gguf-dtype q8_0
}
