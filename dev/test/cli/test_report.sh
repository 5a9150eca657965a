#!/usr/bin/env bash
# test_report.sh -- --report, --compare and --tensorboard from the outside: on finished, running,
# resumed, rolled-back and copied runs; the page in a browser; TensorBoard's own reader.
#
#     dev/test/cli/test_report.sh build/plain/train_gpt2
#
# Python checks the page, Chromium draws it, TensorBoard reads its file: each if it is installed
# (scripts/install_deps.sh --test). One line for each check that fails; the last line counts them.
set -u

root=$PWD
trainer=$(realpath "${1:?usage: test_report.sh TRAINER}")
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
trainer_begin test_report

tiny=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --eval-batches 2 --sample-tokens 8)
board=(--tensorboard on --eval-every 4 --sample-every 4 --save-every 4)
python=
is_here python3 "report: what the pages say" && python=yes
page() { [ ! $python ] || check "$1: the page" "$root/dev/test/lib/check_report.py" "$@"; }
has() { check "$1 has $2" grep -qF -- "$2" "$1"; }
has_not() { check "$1 has no $2" bash -c '! grep -qF -- "$2" "$1"' - "$1" "$2"; }

# A log of $2 updates in the directory $1, as of a long run: with spikes, nulls, skips, a rollback
# and samples of markup.
make_log() {
    mkdir -p "$1"
    awk -v n="$2" 'BEGIN {
        print "{\"kind\":\"config\",\"options\":{\"lr\":0." n ",\"steps\":" n ",\"shuffle\":true,\"prompt\":\"<&\\\"\",\"batch\":null},\"program\":\"p\",\"trainer\":\"t\",\"host\":\"h\",\"device\":\"d\",\"mem_mb\":{\"parameters\":12.5,\"state\":25},\"host_mem_mb\":{\"copies\":3},\"time\":1}"
        for (s = 1; s <= n; s++) {
            loss = s % 997 == 0 ? "null" : 3 + 8 * exp(-s / n * 9) + (s * 7919 % 100) / 1000
            printf "{\"kind\":\"train\",\"step\":%d,\"loss\":%s,\"norm\":%g,\"lr\":%g,\"ms\":100,\"data_ms\":%g,\"tok_per_s\":%d,\"mfu\":0.4,%s\"tokens\":%.0f,\"elapsed_s\":%g,\"time\":%d}\n", s, loss, s % 5000 == 1 ? 1e30 : 1 + s % 7 / 10, 1 - s / n, s % 3, 1000 + s % 11, s % 10 == 0 ? "\"power_w\":612.5,\"clock_mhz\":1755," : "", s * 1000, s / 10, s
            if (s * 20 % n == 0) { printf "{\"kind\":\"val\",\"step\":%d,\"loss\":%.6f,\"bpb\":%.6f}\n", s, 3 + 8 * exp(-s / n * 9), 1 + exp(-s / n * 9) }
            if (s * 4 % n == 0) { printf "{\"kind\":\"task\",\"step\":%d,\"name\":\"riddles\",\"acc\":0.25,\"acc_norm\":0.%d,\"acc_bytes\":0.27}\n{\"kind\":\"sample\",\"step\":%d,\"text\":\"<b>&\\u0001]]>\\ud83d\\ude00\"}\n{\"kind\":\"brand_new\",\"step\":[1]}\n", s, 30 + s * 10 / n, s }
            if (s * 4 % n == 0) { printf "{\"kind\":\"source\",\"step\":%d,\"name\":\"web\",\"share\":0.625,\"tokens\":%d,\"epochs\":%g}\n", s, s * 1e6 / n, s / n }
            if (s * 8 == n * 3) { printf "{\"kind\":\"skip\",\"step\":%d,\"reason\":\"loss\"}\n{\"kind\":\"rollback\",\"step\":%d,\"from\":%d,\"reason\":\"diverged\"}\n", s, s, s + 9 }
        }
    }' >"$1/log.jsonl"
}

test_real_runs() {
    good "a run" "${tiny[@]}" "${board[@]}" --steps 8 --out first
    good "another" "${tiny[@]}" --steps 6 --eval-every 3 --lr 0.01 --out second
    good "a report" --report first
    has stdout "first/report.html: "
    page first/report.html first
    good "a report of two" --report first,second --out-html both.html
    page both.html first second
    good "a comparison" --compare first,second
    has stdout "Best validation loss"
    has stdout "$(printf -- '--lr')"
    has_not stdout "--out "
    has_not stdout "--seed"
    local losses
    losses=$(for run in $(sed -n '1s/^Run, the best first//p' stdout); do
        printf ' +%.4f' "$(values train loss "$run/log.jsonl" | tail -n 1)"; done)
    check "the losses of both" grep -Eq "^Last training loss$losses\$" stdout
    cp -r first copy
    head -c -30 first/log.jsonl >copy/log.jsonl # in the middle of a line
    good "a copy of a running one" --report copy/ --compare copy,second/log.jsonl --out-html copy.html
    has stdout "running, or interrupted"
    good "a log alone" --report second/log.jsonl
    check "its page is beside it" [ -s second/report.html ]
}

leap_text() {
    local half
    half=$(printf 'abcdefgh%.0s' {1..800})
    { printf %s "$half" && tr -dc '0-9A-Z' </dev/urandom | head -c 900 && printf %s "$half"; } >leap.txt
}

# A run, $1, that goes back at least once: in the middle of its text the loss leaps up. Its samples
# are bytes that belong to no character, among others.
roll_back() {
    leap_text
    good "rolled back" --layers 1 --channels 16 --heads 2 --seq-len 16 --batch 1 --total-batch 16 --train-data leap.txt \
        --shuffle off --lr 0.01 --steps 600 --save-every 20 --max-loss-rise 0.8 --on-divergence rollback --tensorboard on \
        --eval-every 10 --eval-batches 2 --sample-every 10 --sample-tokens 8 --out "$1"
    check "it went back" grep -q '"kind":"rollback"' "$1/log.jsonl"
}

# Steps 5 to 8 are done again: TensorBoard drops the first ones.
test_tensorboard() {
    rm -r first/step_00000008
    good "resumed" --out first --resume on
    check "two files" [ "$(find first/tensorboard -name 'events.out.tfevents.*' | wc -l)" = 2 ]
    good "a report of it" --report first
    page first/report.html first
    has first/report.html "resumed after update 4"
    good "a new run there" "${tiny[@]}" "${board[@]}" --steps 4 --out first
    check "puts the old files aside" [ -d first/tensorboard.1 ]
    check "and has its own" [ "$(find first/tensorboard -name 'events.out.tfevents.*' | wc -l)" = 1 ]
    mkdir old && cp -r first/tensorboard.1 old/tensorboard && cp first/log.jsonl.1 old/log.jsonl
    bad 2 "--tensorboard on|--out" "${tiny[@]}" --steps 1 --tensorboard on
    roll_back leap
    local tensorboard=$root/build/venv-report/bin/python
    if [ -x "$tensorboard" ]; then
        check "the resumed run in TensorBoard" "$tensorboard" "$root/dev/test/lib/check_tensorboard.py" old
        check "the new one" "$tensorboard" "$root/dev/test/lib/check_tensorboard.py" first
        check "the one that was rolled back" "$tensorboard" "$root/dev/test/lib/check_tensorboard.py" leap
    else
        echo "skipped: TensorBoard's reader: build/venv-report is missing (scripts/install_deps.sh --test)"
    fi
}

test_long_runs() {
    local i runs=long_1
    make_log long_1 20000
    for i in 2 3 4 5; do
        make_log long_$i $((6000 * i))
        runs+=,long_$i
    done
    good "one" --report long_1 --out-html one.html
    good "five" --report "$runs" --out-html five.html
    page one.html long_1
    page five.html long_1 long_3 long_5
    check "one is small: $(stat -c %s one.html) bytes" [ "$(stat -c %s one.html)" -lt 256000 ]
    check "five are below 500 KiB: $(stat -c %s five.html) bytes" [ "$(stat -c %s five.html)" -lt 512000 ]
    has one.html "rolled back from update 7,509 to 7,500"
    has one.html "GPU power"
    has one.html "riddles"
    has one.html "Sources of the data"
    has one.html '<td>62.50 %</td><td>1</td><td>1</td>'
    has one.html "copies, on the host"
    has one.html "total, on the host"
    has one.html "&lt;b&gt;&amp;"
    # what was done again counts once, even where the log has both
    mkdir once twice
    sed '/"step":2[0-9][0-9][0-9],/,$d' long_1/log.jsonl >once/log.jsonl
    { cat once/log.jsonl && sed -n '/"step":1[0-9][0-9][0-9],/p' once/log.jsonl; } >twice/log.jsonl
    good "once" --report once
    good "twice" --report twice
    check "the same page" cmp once/report.html <(sed 's/twice/once/g' twice/report.html)
}

# Runs of a sweep: a pattern, the best first; other tokens are compared by bits per byte, if these
# are known.
test_sweep() {
    local i
    mkdir -p sweep/none
    for i in 1 2 3; do make_log sweep/lr_$i $((2000 * (4 - i))); done
    sed -i 's/"loss":3/"loss":2/' sweep/lr_2/log.jsonl
    good "a pattern" --compare 'sweep/*'
    check "the best first: $(head -n 1 stdout)" grep -Eq '^Run, the best first +lr_2 +lr_[13] +lr_[13]$' stdout
    has stdout "(best of lr_2)"
    has stdout "To val loss 2.0"
    check "no column is cut" bash -c '! grep -qF ... stdout'
    good "a page of a pattern" --report 'sweep/lr_[12]' --out-html sweep.html
    page sweep.html sweep/lr_1 sweep/lr_2
    check "each run's own half" [ "$(grep -c 'class="end c' <(sed -n '/id="plot-end"/,/<\/figure>/p' sweep.html))" -ge 2 ]
    bad 1 "sweep/x*: No such file" --report 'sweep/x*'
    bad 1 "--compare sweep/n*: it matches no run" --compare 'sweep/n*'
    bad 2 "--compare sweep/lr_2* is one run" --compare 'sweep/lr_2*'
    sed -i 's/"steps":/"vocab-size":512,"steps":/' sweep/lr_1/log.jsonl
    good "other tokens" --compare sweep/lr_1,sweep/lr_2
    has stdout "To 1.00"
    has stdout "bits per byte (best of lr_1)"
    has stdout "The runs have different tokenizers: bits per byte compare them, losses per token do not."
    good "on a page" --report sweep/lr_1,sweep/lr_2 --out-html sweep.html
    has sweep.html "The runs have different tokenizers"
    sed -i 's/,"bpb":[0-9.]*//' sweep/lr_1/log.jsonl
    good "without their bytes" --compare sweep/lr_1,sweep/lr_2
    has stdout "The runs have different vocabularies: their losses per token are not comparable."
    has_not stdout "best of"
}

# A run that never waits, with an axis from 0 % to 1 %, not to 1e-10 %.
test_zero() {
    make_log zero 400
    sed -i 's/"data_ms":[0-9.]*/"data_ms":0/' zero/log.jsonl
    good "a run that never waits" --report zero --out-html zero.html
    check "the axis of waiting" [ "$(sed -n '/id="plot-data"/,/<\/figure>/p' zero.html | grep -o '>[0-9.e-]*%<' | tr -d '\n')" = ">0%<>0.5%<>1%<" ]
}

# A loss of power leaves zeros in the middle of a log, and a torn line: the rest is shown, and what
# is missing is said.
test_damaged() {
    mkdir damaged torn
    { head -n 8 long_2/log.jsonl && head -c 300 /dev/zero && tail -n +9 long_2/log.jsonl; } >damaged/log.jsonl
    { head -n 8 long_2/log.jsonl && head -n 9 long_2/log.jsonl | tail -n 1 | head -c 50 && tail -n +10 long_2/log.jsonl; } >torn/log.jsonl
    runs "a report of a damaged log" --report damaged --out-html damaged.html
    check "its warning: $(cat stderr)" grep -Eq '^warning: damaged/log.jsonl: byte [0-9]+: found the byte 0x00, wanted .* \(line 9 of the log\); skipped 1 damaged line$' stderr
    check "all other updates" grep -q "12,000 of 12,000" damaged.html
    runs "a comparison of two" --compare damaged,torn
    check "one warning each" [ "$(grep -c '^warning: ' stderr)" = 2 ]
    check "in the comparison" grep -Eq '^Damaged lines of the log +1 +1$' stdout
    cp -r second hurt
    sed -i '3s/^/\x00\x00\x00/' hurt/log.jsonl
    runs "a run whose log is damaged continues" --out hurt --resume on --steps 7
    check "with a warning: $(cat stderr)" grep -qF "hurt/log.jsonl: 1 damaged line, the first is line 3;" stderr
    check "and keeps the rest" grep -q '"kind":"train","step":7,' hurt/log.jsonl
    printf '{"kind":"train","step":2,"loss":"high"}\n' >broken.jsonl
    bad 1 "broken.jsonl: byte 32|found '\"'|line 1" --report broken.jsonl
}

test_refused() {
    printf '{"kind":"config","options":{}}\n' >empty.jsonl
    bad 2 "--report cannot be combined with --steps" --report long_1 --steps 3
    bad 2 "--compare cannot be combined with --batch" --compare long_1,long_2 --batch 3
    bad 2 "--out-html page.html|--report" --out-html page.html
    bad 2 "--compare long_1 is one run|two" --compare long_1
    bad 2 "--report is 'long_1,,long_2'|comma" --report long_1,,long_2
    bad 2 "--compare is 'long_1,'" --compare long_1,
    bad 2 "--report names long_1 twice" --report long_1,long_1
    bad 2 "more than 8 runs" --report 1,2,3,4,5,6,7,8,9
    bad 1 "nowhere|No such file" --report nowhere
    bad 1 "first/step_00000004/log.jsonl" --report first/step_00000004
    bad 1 "empty.jsonl: no update" --report empty.jsonl
    bad 1 "nodir/page.html|No such file" --report long_1 --out-html nodir/page.html
    mkdir 'a,b' && cp long_2/log.jsonl 'a,b'
    good "a comma in a name" --report 'a\,b' --out-html comma.html
}

# shot PAGE WIDTH: what the browser shows, and the document that it made of the page.
shot() {
    timeout 100 "$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$work/profile" \
        --window-size="$2",1200 --screenshot="$work/$1.png" "file://$work/$1" >/dev/null 2>&1
    check "$1: a picture" [ "$(head -c 4 "$1.png" | tail -c 3)" = PNG ]
    check "$1: not blank: $(stat -c %s "$1.png") bytes" [ "$(stat -c %s "$1.png")" -gt 40000 ]
}

test_browser() {
    local browser
    browser=$(command -v chromium chromium-browser google-chrome | head -n 1)
    if [ -z "$browser" ]; then
        echo "skipped: the page in a browser: no chromium (scripts/install_deps.sh --test)"
        return
    fi
    shot one.html 1400
    # a page that asks the browser how wide the report is where it has 400 pixels, and what the
    # switch shows
    cat >probe.html <<'END'
<iframe id="f" src="five.html" style="width:400px;height:900px"></iframe><pre id="result"></pre>
<script>
f.onload = () => { const d = f.contentDocument, shown = c => [...d.querySelectorAll('svg.plot > .' + c)].filter(g => g.getBoundingClientRect().width > 0).length;
  const before = [shown('x0'), shown('x1')]; d.getElementById('a1').click(); const after = [shown('x0'), shown('x1')];
  const curve = d.querySelector('svg.plot > .x0 path');
  result.textContent = JSON.stringify({wide: d.documentElement.scrollWidth > 400, plots: d.querySelectorAll('svg.plot').length, before, after, fill: f.contentWindow.getComputedStyle(curve).fill}); };
</script>
END
    timeout 100 "$browser" --headless --no-sandbox --disable-gpu --allow-file-access-from-files --disable-web-security \
        --user-data-dir="$work/profile" --virtual-time-budget=5000 --dump-dom "file://$work/probe.html" >dom 2>/dev/null
    local n
    n=$(grep -o '<svg class="plot"' five.html | wc -l)
    check "what is shown: $(grep -o '{"wide.*}' dom)" grep -qF "{\"wide\":false,\"plots\":$n,\"before\":[$n,0],\"after\":[0,$n],\"fill\":\"none\"}" dom
}

# A model with experts on sources of which an update has 8 and 4 sequences, by micro-batches and by
# processes: their losses, the loads of experts, the command of each start, the plots.
test_parts() {
    local command how
    for i in {1..300}; do echo "$i bottles of beer on the wall"; done >"a b.txt"
    for i in {1..200}; do echo "the cat named $i"; done >c.txt
    local run=("${tiny[@]}" --arch mixtral --experts 4 --train-data 'beer=a b.txt:2,cat=c.txt:1' --total-batch 192 --samples 0
        --eval-every 2)
    good "a mixture" "${run[@]}" --steps 2 --out "p arts"
    good "it continues" "${run[@]}" --steps 4 --resume on --out "p arts"
    for how in "--batch 3 --total-batch 192" "--batch 12 --pack bestfit --total-batch 192"; do
        good "$how" "${run[@]}" --steps 2 --out parts $how
        check "losses of sources, $how" weighted parts/log.jsonl
    done
    check "losses of sources" weighted "p arts/log.jsonl"
    check "loads of 2 layers, each 1 on average" [ "$(values experts load "p arts/log.jsonl" | wc -l)" = 4 ]
    command=$(sed -n 's/^{"kind":"config".*"command":"\([^"]*\)".*/\1/p' "p arts/log.jsonl" | tail -n 1)
    eval "set -- $command"
    check "the command: $command" [ "$*" = "$trainer ${run[*]} --steps 4 --resume on --out p arts" -a $# = $((${#run[@]} + 7)) ]
    good "the report" --report "p arts"
    page "p arts/report.html" "p arts"
    has "p arts/report.html" 'id="plot-sources0"'
    has "p arts/report.html" 'id="loads0"'
    has "p arts/report.html" "beer=a b.txt:2,cat=c.txt:1"
    good "two reports" --report "p arts,parts" --out-html both_parts.html
    page both_parts.html "p arts" parts
}

# Every loss of the log $1 is the mean of beer's, twice, and cat's.
weighted() {
    sed -n 's/^{"kind":"train".*"loss":\([^,]*\),"norm.*"source_loss":{"beer":\([^,]*\),"cat":\([^}]*\)}.*/\1 \2 \3/p' "$1" |
        awk '{ n++; off = ($2 * 2 + $3) / 3 / $1 - 1; bad += !(off * off < 1e-14) } END { exit !(n > 1 && bad == 0) }'
}

# The data of an update that is skipped are named: the micro-batch whose loss is not finite, since
# the last norm has the largest numbers, or whose loss is the highest, where the text leaps.
test_where() {
    local run=("${tiny[@]:0:10}" --eval-every 0 --samples 0 --train-data c.txt) last="the loss is not finite in sequences 0-1: c.txt bytes "
    good "some weights" "${run[@]}" --steps 1 --out huge
    mkdir huge_model
    cp huge/step_00000001/{config.json,model.safetensors} huge_model
    for i in {1..8}; do printf '\xff\xff\x7f\x7f\xff\xff\x7f\xff'; done |
        dd of=huge_model/model.safetensors bs=1 seek=$(($(stat -c %s huge_model/model.safetensors) - 64)) conv=notrunc 2>/dev/null
    good "not finite" "${run[@]:6}" --model huge_model --total-batch 128 --steps 1 --out wild
    has stdout "update skipped: loss or gradient norm is not finite; $last"
    check "the log has it, too" grep -q "\"kind\":\"skip\",\"step\":1,.*\"where\":\"$last" wild/log.jsonl
    bad 1 "$last" "${run[@]:6}" --model huge_model --total-batch 128 --steps 1 --on-divergence stop
    leap_text
    good "a leap" "${tiny[@]}" --batch 1 --total-batch 16 --train-data leap.txt --shuffle off --lr 0.01 --steps 402 --skip-loss-z 6 --eval-every 0 \
        --samples 0
    has stdout "step 401/402 | update skipped: loss or gradient norm is an outlier; the highest loss is "
    has stdout ", in sequence 400: leap.txt bytes 6399-6414"
}

test_real_runs
test_parts
test_where
test_tensorboard
test_long_runs
test_sweep
test_zero
test_damaged
test_refused
test_browser
check_done
