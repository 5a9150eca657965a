# shellcheck shell=bash disable=SC2154,SC2034
# reports.sh -- faults of reports, comparisons and evaluations; for dev/test/defects.sh.

reports_model=(--layers 1 --channels 16 --heads 2 --seq-len 16 --samples 0)

reports_text() { for i in {1..600}; do echo "$i bottles of beer on the wall, $i bottles of beer."; done >s.txt; }

# A library whose malloc, calloc or realloc number FM_AT fails, counted together.
reports_failing_malloc() {
    is_here "${CC:-cc}" || return 1
    "${CC:-cc}" -shared -fPIC -O1 -o fm.so -xc - -ldl <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
static int fails(void) {
    static int calls = 0, at = -1;
    if (at < 0) { at = 0; const char* text = getenv("FM_AT"); at = text ? atoi(text) : 0; }
    if (++calls != at) { return 0; }
    errno = ENOMEM;
    return 1;
}
void* malloc(size_t n) { return fails() ? NULL : __libc_malloc(n); }
void* calloc(size_t a, size_t b) { return fails() ? NULL : __libc_calloc(a, b); }
void* realloc(void* p, size_t n) { return fails() ? NULL : __libc_realloc(p, n); }
END
}

# Whichever allocation fails, a page is whole or is not there.
defect_reports_that_memory_is_too_short_for() {
    local k bad=0 made=0 failed=0
    reports_text
    reports_failing_malloc || return
    good "a run" "${reports_model[@]}" --train-data s.txt --batch 2 --steps 12 --out r
    good "its report" --report r --out-html good.html
    for k in $(seq 1 400); do
        rm -f w.html
        LD_PRELOAD=$PWD/fm.so FM_AT=$k "$trainer" --report r --out-html w.html >stdout 2>stderr
        status=$?
        if [ $status = 0 ]; then
            made=$((made + 1))
            cmp -s w.html good.html || { bad=$((bad + 1)); echo "call $k: $(wc -c <w.html) bytes" >>pages; }
        else
            failed=$((failed + 1))
            [ ! -e w.html ] || bad=$((bad + 1))
        fi
    done
    check "no page is incomplete: $bad of 400; $(head -n 3 pages 2>/dev/null)" [ $bad = 0 ]
    check "some calls failed ($failed), some were beyond the last ($made)" [ $failed -gt 10 -a $made -gt 10 ]
}

# A line that memory is too short for is no end of the input.
defect_lines_that_memory_is_too_short_for() {
    reports_text
    good "a run" "${reports_model[@]}" --train-data s.txt --batch 2 --steps 2 --out r
    (ulimit -v 400000 && { head -c 600000000 /dev/zero | tr '\0' a; echo; } | "$trainer" --model r --interactive --tokens 2 >stdout 2>stderr
        echo "${PIPESTATUS[1]}" >status)
    check "a status: $(cat status)" [ "$(cat status)" = 1 ]
    check "a message: $(tail -n 1 stderr)" grep -q '^error: standard input: cannot read: Cannot allocate memory' stderr
}

# After a loss of power a log has zeros, or half a line, in its middle.
defect_logs_that_are_damaged() {
    reports_text
    good "a run" "${reports_model[@]}" --train-data s.txt --batch 2 --steps 20 --save-every 10 --out r
    cp -r r zeros
    { head -n 6 r/log.jsonl && head -c 300 /dev/zero && tail -n +7 r/log.jsonl; } >zeros/log.jsonl
    runs "a report" --report zeros
    check "a warning" grep -q '^warning: zeros/log.jsonl: .* skipped 1 damaged line$' stderr
    runs "a comparison" --compare r,zeros
    runs "a resume" --out zeros --resume on --steps 22
    check "its warning" grep -q '1 damaged line, the first is line 7' stderr
    check "it continues" grep -q '"kind":"train","step":22,' zeros/log.jsonl
}

# The validation loss of a checkpoint does not depend on the micro-batch.
defect_validations_that_depend_on_the_batch() {
    local batch losses=()
    reports_text
    good "a run" "${reports_model[@]}" --train-data s.txt --batch 4 --steps 20 --out r
    for batch in 1 4 16; do
        good "micro-batches of $batch" --model r/step_00000020 --seq-len 16 --train-data s.txt --steps 0 --samples 0 --batch $batch --out "v$batch"
        losses+=("$(values val loss "v$batch/log.jsonl" | cut -c1-7)")
        check "says what it covers" grep -Eq '\((all [0-9]+|[0-9]+ of [0-9]+) sequences\)$' <(grep 'val loss .*(' stdout)
    done
    check "one loss: ${losses[*]}" [ "$(printf '%s\n' "${losses[@]}" | sort -u | wc -l)" = 1 ]
}

# An engineer of evaluations looks at single examples.
defect_tasks_without_their_examples() {
    local tasks=$root/dev/ref/fixtures/tasks
    good "scores" --steps 0 --model "$tasks/model.bin" --tokenizer "$tasks/tokenizer.json" --seq-len 64 \
        --tasks "$tasks/hellaswag.jsonl" --out-scores s.jsonl
    check "a line each" [ "$(grep -cE '^\{"step":0,"task":"hellaswag","index":[0-9]+,"label":[0-3],"prediction":[0-3],' s.jsonl)" = 20 ]
}

# A pattern selects the runs of a sweep. The best run is listed first.
defect_sweeps_that_cannot_be_compared() {
    local lr
    reports_text
    for lr in 0.0001 0.01; do
        good "a run" "${reports_model[@]}" --train-data s.txt --batch 2 --steps 40 --lr $lr --out "out/lr$lr"
    done
    good "a pattern" --compare 'out/lr*'
    check "the best first" grep -Eq '^Run, the best first +lr0.01 +lr0.0001$' stdout
    check "targets say of what" grep -q '^To val loss [0-9.]* (best of lr0.01) ' stdout
}
