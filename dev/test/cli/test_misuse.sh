#!/usr/bin/env bash
# test_misuse.sh -- the trainer under careless and hostile use and on broken machines: nothing is
# lost, no error is silent, nothing hangs. Also the first commands of a new user.
#
#     dev/test/cli/test_misuse.sh build/plain/train_gpt2
#
# One line for each check that fails; the last line counts them.
set -u

trainer=$(realpath "${1:?usage: test_misuse.sh TRAINER}")
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
trainer_begin test_misuse

model=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2)
brief=("${model[@]}" --eval-batches 2 --sample-tokens 4)
text=(--train-data text.txt)
printf '#version: 0.2\nt h\nth e\no r\n' >merges.txt
for i in {1..400}; do echo "$i bottles of beer on the wall, $i bottles of beer."; done >text.txt

lines() { wc -l <"$1"; }
numbers() { values train loss "$1/log.jsonl" && values val loss "$1/log.jsonl"; }

# ---- files that git-lfs has not fetched ----

pointer() { printf 'version https://git-lfs.github.com/spec/v1\noid sha256:%064d\nsize 548118077\n' 7 >"$1"; }

test_pointers() {
    local file words="a pointer of git-lfs, wanted the file itself; \`git lfs pull\` fetches it"
    for file in p.txt p.jsonl p.txt.gz p.bin p.parquet; do
        pointer "$file"
        bad 1 "$file: $words" "${brief[@]}" --steps 1 --train-data "$file"
    done
    bad 1 "p.txt: $words" "${brief[@]}" --steps 1 --train-data text.txt --val-data p.txt
    for file in tokenizer.json merges.txt gpt2.tiktoken p.bin; do
        mkdir -p lfs
        pointer "lfs/$file"
        bad 1 "lfs/$file: $words" "${brief[@]}" "${text[@]}" --steps 1 --tokenizer "lfs/$file"
    done
    bad 1 "p.bin: $words" --model p.bin --steps 1
    good "a model" "${brief[@]}" "${text[@]}" --tokenizer merges.txt --steps 1 --out fetched
    for file in model.safetensors config.json; do
        cp -r fetched/step_00000001 "lfs_$file"
        pointer "lfs_$file/$file"
        bad 1 "lfs_$file/$file: $words" "${text[@]}" --model "lfs_$file" --steps 1
    done
    pointer choices.jsonl
    bad 1 "choices.jsonl: $words" --model fetched --steps 0 --tasks choices.jsonl
    bad 1 "p.txt: $words" --model fetched --steps 0 --perplexity p.txt
    pointer prompts.jsonl
    bad 1 "prompts.jsonl: $words" --model fetched --prompts prompts.jsonl
}

# ---- names of others ----

# Whatever ends a line or moves on a terminal is a question mark there; the command that is repeated
# can be pasted.
test_names() {
    local escape=$'x\e[31m'
    cp text.txt "$escape.txt"
    good "data with an escape in its name" "${brief[@]}" --train-data "$escape.txt" --tokenizer merges.txt --steps 1 --out names
    check "none on the screen" [ "$(grep -c $'\e' stdout)" = 0 ]
    check "a command to paste" grep -qF -- "--train-data \$'x\033[31m.txt'" stdout
    good "resumed" --out names --resume on --steps 2
    check "none of state.json" [ "$(grep -c $'\e' stdout)" = 0 ]
    good "a task" --model names --steps 0 --perplexity "$escape.txt"
    check "has its name" grep -qF '| x?[31m.txt | loss' stdout
    check "without the escape" [ "$(grep -c $'\e' stdout)" = 0 ]
    bad 1 "x?[31m.jsonl: " "${brief[@]}" --steps 1 --train-data "$escape.jsonl"
    check "an error has none" [ "$(grep -c $'\e' stderr)" = 0 ]
}

# ---- two at a time ----

# Two starts with the same new directory: the second is refused before it writes anything.
test_two_starts() {
    local i
    for ((i = 0; i < 100; i++)); do cat text.txt; done >big.txt
    in_background "${brief[@]}" --steps 3 --train-data big.txt --tokenizer merges.txt --out two
    for i in {1..3000}; do [ -e two ] && break; sleep 0.01; done
    timeout 5 "$trainer" "${brief[@]}" --steps 3 --train-data big.txt --tokenizer merges.txt --out two >second 2>&1 </dev/null
    # the first may have ended within the ten seconds that the second waits: then it ran after it,
    # and that is fine, too
    wait $process
    status=$?
    check "the first: exit status $status, $(head -n 1 stderr)" [ $status = 0 ]
    good "alone" "${brief[@]}" --steps 3 --train-data big.txt --tokenizer merges.txt --out alone
    check "the tokens are the same" cmp two/tokens/*_train_000000.bin alone/tokens/*_train_000000.bin
    check "the losses are the same" [ "$(numbers two | head -n 6)" = "$(numbers alone | head -n 6)" ]
    exec 9<>two/run.lock
    flock -n 9
    bad 1 "two: another run is writing here" "${brief[@]}" --steps 3 --out two
    exec 9<&-
}

# ---- nothing is lost ----

test_links() {
    mkdir victim
    echo precious >victim/a
    good "a run" "${brief[@]}" --steps 2 --out run
    ln -s ../victim run/step_00000007.part
    ln -s ../victim run/step_00000002.old
    good "with links in its directory" --out run --resume on
    check "what they point to is there" [ -s victim/a ]
    check "they are not" [ ! -L run/step_00000007.part ]
    good "another run" "${brief[@]}" --steps 4 --save-every 2 --out other
    mkdir new
    ln -s ../other/step_00000002 new/
    good "a run from a linked checkpoint" "${brief[@]}" --steps 8 --save-every 2 --keep 1 --out new --resume on --override
    check "which is whole" [ -s other/step_00000002/model.safetensors ]
    good "and can be resumed" --out other --resume 2
}

test_logs() {
    good "a run" "${brief[@]}" "${text[@]}" --steps 6 --out logs
    cp logs/log.jsonl before
    bad 2 "--prompt: 37 tokens; wanted at most 15" "${brief[@]}" "${text[@]}" --steps 6 --out logs --prompt "longer than the context of this model"
    check "a refused start leaves the log" cmp before logs/log.jsonl
    bad 1 "step_00000004: a file" "${brief[@]}" "${text[@]}" --steps 4 --out "$(touch logs/step_00000004 && echo logs)"
    check "so does another one" cmp before logs/log.jsonl
    rm logs/step_00000004
    good "a new run there" "${brief[@]}" "${text[@]}" --steps 4 --out logs
    check "keeps it under another name" cmp before logs/log.jsonl.1
    check "and main.log" [ -s logs/main.log.1 ]
    good "a run that continues in another directory" --resume logs/step_00000004 --out logs_2 --steps 5 --override
    good "and again" --resume logs/step_00000004 --out logs_2 --steps 5 --override
    check "does not mix their lines" [ "$(values train step logs_2/log.jsonl)" = 5 ]
    check "has the time, the tokens, and the program" grep -q '"tokens":160,"elapsed_s":[0-9.]*,"time":[0-9.]*}' logs_2/log.jsonl
    check "of the start" grep -q '"program":"train_gpt2[^"]*","trainer":"CPU FP32","host":"[^"]*","device":"' logs_2/log.jsonl
}

# A run that was killed before its first save, in the directory of an earlier one: neither is taken
# for the other.
test_two_runs() {
    local newest
    good "a run" "${brief[@]}" --steps 3 --out runs
    good "that can be resumed" --out runs --resume on
    cp runs/log.jsonl first.jsonl
    in_background "${brief[@]}" --steps 30000000 --eval-every 0 --lr 5e-3 --out runs
    for i in {1..1200}; do [ "$(grep -c '"train"' runs/log.jsonl 2>/dev/null)" -gt 5 ] 2>/dev/null && break; sleep 0.05; done
    kill -KILL $process
    wait $process 2>/dev/null
    newest=$(values config run runs/log.jsonl)
    check "its log is that of another run" [ "$newest" != "$(values config run first.jsonl | head -n 1)" ]
    cp runs/log.jsonl killed.jsonl
    bad 1 "runs: the newest run here has no checkpoint; runs/step_00000003 belongs to an earlier run: --resume 3 continues" --out runs --resume on
    check "its log is untouched" cmp killed.jsonl runs/log.jsonl
    good "the earlier run by its step" --out runs --resume 3
    check "continues with its own log" cmp <(head -n 5 first.jsonl) <(head -n 5 runs/log.jsonl)
    check "beside the whole log of the killed run" cmp killed.jsonl runs/log.jsonl.2
    good "it is the newest run now" --out runs --resume on
    rm -rf runs/log.jsonl && cp killed.jsonl runs/log.jsonl
    good "auto" "${brief[@]}" "${text[@]}" --steps 2 --lr 5e-3 --out runs --resume auto
    check "starts a new run" grep -q 'checkpoints of an earlier run; starting a new run' stdout
    check "of its own" [ "$(values config run runs/log.jsonl)" != "$newest" ]
    good "the newest run has a checkpoint" --out runs --resume on
    check "which is taken" grep -q '^resume: from runs/step_00000002' stdout
    good "an evaluation into the directory" --model runs/step_00000002 --steps 0 --perplexity text.txt --out runs
    check "has a log of its own" [ "$(grep -c '"kind":"train"' runs/log.jsonl)" = 0 ]
    good "the run" --out runs --resume on
    check "has its log again" [ "$(grep -c '"kind":"train"' runs/log.jsonl)" = 2 ]
    sed -i 's/"run":"[0-9a-f]*",//' runs/log.jsonl
    good "a log that does not say whose it is" --out runs --resume on
    chmod 200 runs/log.jsonl
    [ "$(id -u)" = 0 ] || bad 1 "runs/log.jsonl: cannot read: Permission denied" --out runs --resume on
}

# A model is not taken from an older checkpoint in silence.
test_unreadable() {
    good "a run" "${brief[@]}" --steps 4 --save-every 2 --out unreadable
    mv unreadable/step_00000004/state.json kept.json
    train --model unreadable --prompt a --tokens 2
    check "a model whose newest checkpoint is unreadable: exit status $status" [ $status = 1 ]
    check "is refused: $(tail -n 1 stderr)" grep -q '^error: --model unreadable: .*--model unreadable/step_00000002' stderr
    mv kept.json unreadable/step_00000004/state.json
    runs "it is back" --model unreadable --prompt a --tokens 2
}

# A run that cannot be saved is refused before its first step. Root may write anywhere, so root
# tries as another user.
test_read_only() {
    local as_nobody=() trainer_path=$trainer
    if [ "$(id -u)" = 0 ]; then
        command -v setpriv >/dev/null || { echo "skipped: read-only directories: setpriv is missing"; return; }
        as_nobody=(setpriv --reuid 65534 --regid 65534 --clear-groups)
        chmod 755 "$work"
    fi
    good "a run" "${brief[@]}" --steps 4 --save-every 2 --out read_only
    chmod 666 read_only/log.jsonl read_only/main.log
    chmod 555 read_only
    printf '#!/bin/sh\nexec %s "%s" "$@"\n' "${as_nobody[*]}" "$trainer" >as_nobody && chmod 755 as_nobody
    trainer=$work/as_nobody
    cp read_only/log.jsonl before
    bad 1 "read_only: cannot save there: Permission denied" --out read_only --resume 2
    bad 1 "read_only: cannot save there: Permission denied" "${brief[@]}" --steps 4 --out read_only
    chmod 777 read_only
    chmod 444 read_only/main.log
    bad 1 "read_only/main.log: cannot write: Permission denied" --out read_only --resume 2
    trainer=$trainer_path
    check "the log is untouched" cmp before read_only/log.jsonl
}

# A run that is refused leaves no --out; names that it needs there may be taken.
test_refused() {
    local name
    for name in unborn unborn/deep/er; do
        bad 1 "nowhere.txt: cannot open the data" "${brief[@]}" --train-data nowhere.txt --out $name
        bad 2 "--total-batch is 33 tokens" "${brief[@]}" --total-batch 33 --out $name
        check "$name: nothing is left" [ ! -e unborn ]
    done
    mkdir mine
    bad 1 "nowhere.txt: cannot open the data" "${brief[@]}" --train-data nowhere.txt --out mine
    check "what was there stays" [ -d mine ]
    mkdir taken taken/run.stop full full/run.stop links && touch full/run.stop/x && ln -s ../text.txt links/run.lock
    good "a directory called run.stop" "${brief[@]}" --steps 1 --out taken
    check "is removed" [ ! -e taken/run.stop ]
    bad 1 "full/run.stop: cannot remove: Directory not empty" "${brief[@]}" --steps 1 --out full
    bad 1 "links/run.lock: a symbolic link, wanted a lock file or none" "${brief[@]}" --steps 1 --out links
    check "its target stays" grep -q '^400 bottles' text.txt
    : >empty.conf
    bad 2 "empty.conf: no settings; wanted lines of name = value" --config empty.conf
    good "a name for the shell" "${brief[@]}" --steps 1 --out "it's mine"
    check "is quoted: $(grep 'generate text' stdout)" grep -qF "generate text: $trainer --model 'it'\\''s mine' --prompt" stdout
}

# Of the checkpoints of stops two stay, as those of the clock.
test_short_starts() {
    local i
    for i in 1 2 3 4; do
        train "${brief[@]}" --steps 1000000 --eval-every 0 --sample-every 0 --max-hours 1e-7 --out starts --resume auto
        check "start $i: exit status $status, $(head -n 1 stderr)" [ $status = 75 ]
    done
    check "two are left: $(cd starts && echo step_*)" [ "$(cd starts && ls -d step_* | wc -l)" = 2 ]
}

test_exports() {
    bad 1 "--export-llmc nowhere/x.bin: cannot write into nowhere" "${brief[@]}" --steps 100000 --export-llmc nowhere/x.bin
    bad 1 "--export-gguf .: a directory" "${brief[@]}" --steps 100000 --export-gguf .
    bad 2 "--export-gguf x.bin: the same file as --export-llmc x.bin" "${brief[@]}" --steps 1 --export-llmc x.bin --export-gguf x.bin
    echo mine >x.bin.part
    good "an export" "${brief[@]}" --steps 1 --export-llmc x.bin
    check "beside a file of the user's" grep -q mine x.bin.part
    good "an export beside a run" "${brief[@]}" "${text[@]}" --steps 2 --out exported --export-llmc y.bin
    check "is announced" grep -q '^export: y.bin$' stdout
    good "and again" --model exported --steps 0 --export-llmc y.bin
    bad 2 "model.safetensors: a file of exported, which the run reads" --model exported --steps 0 --export-gguf exported/step_00000002/model.safetensors
    bad 2 "log.jsonl: the run writes this file itself" --out exported --resume on --export-gguf exported/log.jsonl
    local own
    for own in run.lock run.stop log.jsonl.3 main.log.1 tokenizer.json step_00000009; do
        bad 2 "$own: the run writes this file itself" --out exported --resume on --export-gguf exported/$own
    done
    good "the model is whole" --model exported --steps 0 --export-gguf exported/model.gguf
    good "a .gguf in its directory is replaced" --model exported --steps 0 --export-gguf exported/model.gguf
}

# The file for texts is opened last, and gets its name when it is complete.
test_out_texts() {
    good "a run" "${brief[@]}" "${text[@]}" --steps 2 --out texts --export-llmc texts.bin
    echo '{"prompt": "bottles"}' >prompts.jsonl
    echo night >night.jsonl
    local file
    for file in texts/step_00000002/model.safetensors texts/log.jsonl; do
        cp $file before
        bad 2 "--out-texts $file: a file of texts, which the run reads" --model texts --prompts prompts.jsonl --out-texts $file
        check "$file is there" cmp before $file
    done
    cp texts/step_00000002/tokenizer.json texts.json
    for file in texts.bin texts.json prompts.jsonl; do
        cp $file before
        bad 2 "--out-texts $file: the run reads this file" --model texts.bin --tokenizer texts.json --prompts prompts.jsonl --out-texts $file
        check "$file is there" cmp before $file
    done
    cp -r texts damaged
    truncate -s 100 damaged/step_00000002/model.safetensors
    train --model damaged/step_00000002 --prompts prompts.jsonl --out-texts night.jsonl
    check "a model that cannot be read: exit status $status" [ $status = 1 ]
    check "leaves what was there" grep -q night night.jsonl
    runs "texts" --model texts --prompts prompts.jsonl --out-texts night.jsonl --tokens 4
    check "take its place" grep -q '^{"prompt":"bottles"' night.jsonl
    check "no unfinished file is left" [ -z "$(ls night.jsonl.*part 2>/dev/null)" ]
}

test_out_html() {
    good "a run" "${brief[@]}" "${text[@]}" --steps 2 --out page
    mkfifo page_fifo
    ln -s /dev/null page_link
    cp page/log.jsonl before
    bad 2 "--out-html page/log.jsonl: " --report page --out-html page/log.jsonl
    bad 2 "--out-html page/step_00000002/state.json: a file of page, which the run reads" --report page --out-html page/step_00000002/state.json
    check "the log is there" cmp before page/log.jsonl
    bad 1 "--out-html page_fifo: not a regular file" --report page --out-html page_fifo
    bad 1 "--out-html /dev/null: not a regular file" --report page --out-html /dev/null
    bad 1 "--out-html page_link: a symbolic link" --report page --out-html page_link
    check "the link is there" [ -L page_link ]
    good "a page" --report page
    good "and again" --report page
}

# Standard descriptors that are closed do not become files of the run.
test_closed() {
    "$trainer" "${brief[@]}" --steps 20 --out closed <&- >&- 2>&-
    check "all closed: exit status $?" [ $? = 0 ]
    check "the log has lines of JSON alone" [ "$(grep -cv '^{.*}$' closed/log.jsonl)" = 0 ]
}

# The screen goes away: a run with files continues, one without says so.
test_pipe() {
    "$trainer" "${brief[@]}" --steps 300 --out pipe 2>stderr | head -n 1 >/dev/null
    check "a pipe that closes: exit status ${PIPESTATUS[0]}" [ "${PIPESTATUS[0]}" = 0 ]
    check "the run continued" grep -q '"kind":"summary"' pipe/log.jsonl
    "$trainer" "${brief[@]}" --steps 300000 2>stderr | head -n 1 >/dev/null
    status=${PIPESTATUS[0]}
    check_error "without files" 1 "standard output|Broken pipe"
}

# ---- signals ----

# stop_after SECONDS SIGNAL
stop_after() {
    sleep "$1"
    kill "-$2" $process
    wait $process
    status=$?
}

test_signals() {
    for i in {1..60}; do cat text.txt; done >long.txt
    in_background "${model[@]}" "${text[@]}" --val-data long.txt --steps 4 --eval-batches 0 --sample-every 0 --out stopped
    for i in {1..1500}; do grep -q '^data:' stdout && break; sleep 0.02; done
    stop_after 0.1 TERM
    check "SIGTERM in a validation: exit status $status" [ $status = 75 ]
    check "of step 0, which is saved" [ -s stopped/step_00000000/state.json ]
    check "and not logged" [ "$(grep -c '"val"' stopped/log.jsonl)" = 0 ]
    good "the rest" --out stopped --resume on
    good "the same without a signal" "${model[@]}" "${text[@]}" --val-data long.txt --steps 4 --eval-batches 0 --sample-every 0 --out whole
    check "has the same numbers" [ "$(numbers stopped)" = "$(numbers whole)" ]
    check "and weights" cmp stopped/step_00000004/model.safetensors whole/step_00000004/model.safetensors

    in_background "${model[@]}" "${text[@]}" --val-data long.txt --steps 2 --eval-every 2 --eval-batches 0 --sample-every 0 --log-every 1 --out last
    for i in {1..1500}; do grep -q '^step *2/2' stdout && break; sleep 0.02; done
    stop_after 0.1 TERM
    check "SIGTERM in the last validation: exit status $status" [ $status = 75 ]
    good "the rest" --out last --resume on
    local loss
    loss=$(values val loss last/log.jsonl | tail -n 1)
    check "saves its result, $loss" grep -qF "\"val_loss\":${loss:0:6}" last/step_00000002/state.json
    good "nothing is left" --out last --resume on
    check "and nothing is saved" [ "$(values save step last/log.jsonl | wc -l)" = 2 ]

    in_background "${model[@]}" --steps 1 --samples 100 --sample-tokens 3000 --eval-every 0 --out sampling
    for i in {1..3000}; do grep -q sample: stdout && break; sleep 0.01; done
    stop_after 0 TERM
    check "SIGTERM among samples: exit status $status" [ $status = 75 ]
    good "the rest" --out sampling --resume on
    good "the same without a signal" "${model[@]}" --steps 1 --samples 100 --sample-tokens 3000 --eval-every 0 --out all
    check "has the same samples, each once" cmp <(grep '"sample"' sampling/log.jsonl) <(grep '"sample"' all/log.jsonl)

    in_background "${model[@]}" "${text[@]}" --steps 1000000 --eval-every 0 --sample-every 0
    for i in {1..1500}; do grep -q '^step' stdout && break; sleep 0.02; done
    stop_after 0 TERM
    check "SIGTERM without --out: exit status $status" [ $status = 143 ]
    check "is said" grep -q '^stopped by SIGTERM after step [0-9]*; nothing was saved' stdout

    in_background "${model[@]}" --train-data big.txt --tokenizer bpe:600 --steps 100000 --eval-every 0 --sample-every 0 --out early
    for i in {1..1500}; do [ -e early ] && break; sleep 0.02; done
    kill -USR1 $process
    sleep 0.2
    check "SIGUSR1 before the first step is not the end" kill -0 $process
    for i in {1..1200}; do compgen -G 'early/step_*/state.json' >/dev/null && break; sleep 0.05; done
    check "but a checkpoint" compgen -G 'early/step_*/state.json'
    stop_after 0 HUP
    check "SIGHUP: exit status $status" [ $status = 75 ]

    : >stdout # the signal waits for a step of this run: bash itself would end by it, and remove the directory
    (trap '' INT HUP && exec "$trainer" "${model[@]}" --steps 2000 --eval-every 0 --sample-every 0) >stdout 2>stderr </dev/null &
    process=$!
    for i in {1..1500}; do grep -q '^step' stdout && break; sleep 0.02; done
    kill -HUP $process
    stop_after 0 INT
    check "signals that were ignored stay so: exit status $status" [ $status = 0 ]
}

# ---- nothing is wrong in silence ----

# A model that knows less than nothing is told, once, and --on-divergence stop ends its run.
test_validation_diverges() {
    local run=("${brief[@]}" --lr 9 --steps 30 --eval-every 5)
    good "a learning rate that is far too high" "${run[@]}" --quiet on --out high
    check "is told: $(grep -a warning stdout)" grep -qE '^warning: step [0-9]*: the run has diverged: the validation loss is [0-9.]*, above that of a model' stdout
    check "once" [ "$(grep -c '^warning' stdout)" = 1 ]
    check "and in the log" grep -qE '^{"kind":"warning","step":[0-9]*,"text":"the run has diverged: [^"]*; try a lower --lr, or --on-divergence rollback --max-loss-rise 1"}' high/log.jsonl
    bad 1 "the run has diverged: the validation loss is|a model that knows nothing, ln(|try a lower --lr" "${run[@]}" --on-divergence stop --save-every 5 --out stopped
    check "the checkpoints before are whole" [ -s stopped/step_00000005/state.json -o ! -e stopped/step_00000005 ]
    check "none is half" [ -z "$(compgen -G 'stopped/*.part')" ]
    good "a healthy run" "${brief[@]}" --steps 30 --eval-every 5 --on-divergence stop
    check "is not" [ "$(grep -c '^warning' stdout)" = 0 ]
}

# A sample while the logits are NaN is left out, and the run goes back as it should.
test_divergence() {
    local wild=(--steps 60 --lr 10 --weight-decay 10 --grad-clip 0 --warmup 0 --schedule constant --beta1 0 --beta2 0)
    good "a run" "${brief[@]}" "${text[@]}" --steps 20 --save-every 10 --out good
    for every in 0 1; do
        cp -r good "wild_$every"
        train --out "wild_$every" --resume on --override "${wild[@]}" --on-divergence rollback --sample-every $every
        check_error "wild updates, sampled every $every" 1 "the run has diverged|it was already rolled back here 3 times"
    done
    check "it went back as often" [ "$(grep -c '"rollback"' wild_0/log.jsonl)" = "$(grep -c '"rollback"' wild_1/log.jsonl)" ]
    check "three times" [ "$(grep -c '"rollback"' wild_1/log.jsonl)" = 3 ]
}

test_other_data() {
    cp text.txt data.txt
    good "a run" "${brief[@]}" --steps 4 --save-every 2 --train-data data.txt --out data
    tr a-z b-za <text.txt >data.txt
    bad 2 "the checksum of the training data is|--override" --out data --resume 2
    mv text.txt moved.txt && cp moved.txt data.txt && mv moved.txt text.txt
    good "the same data again" --out data --resume 2
    runs "others, on purpose" --resume data/step_00000002 --train-data text.txt --override --out data_2
}

# A model's tokens are those of its directory; others are refused.
# A run that is made longer, or continued with other data.
test_longer() {
    local run=("${model[@]}" --sample-every 0 --eval-every 0 --shuffle off)
    good "a run" "${run[@]}" "${text[@]}" --steps 20 --save-every 10 --out longer
    good "which is done" --out longer --resume on
    check "is told how to train more" grep -qx 'resume: nothing is left to do; for more: --steps 40' stdout
    good "more steps" --out longer --resume on --steps 24
    check "continue" [ "$(values train step longer/log.jsonl | tail -n 1)" = 24 ]
    check "with a rate that leaps: $(grep 'lr' stdout | head -n 1)" grep -qE '^resume: lr [0-9.e-]+ at step 20 -> [0-9.e-]+ at step 21: the schedule has changed$' stdout
    bad 2 "--steps 10: longer/step_00000024 has done 24 already" --out longer --resume on --steps 10 --override
    bad 2 "--steps is 15, was 20|--override" --out longer --resume 10 --steps 15
    printf 'a%.0s' {1..2000} >other.txt && printf 'b%.0s' {1..2000} >>other.txt
    good "other data" --out longer --resume on --train-data other.txt --val-data text.txt --steps 26 --override
    check "are said to start" grep -q '^resume: the training data are other sequences than before: they are read from their start' stdout
    good "from their start" --model longer/step_00000024 --train-data other.txt --val-data text.txt "${run[@]}" --steps 1 --out elsewhere
    check "are the same first batch" [ "$(values train loss longer/log.jsonl | sed -n 25p)" = "$(values train loss elsewhere/log.jsonl)" ]
    good "longer sequences" --resume longer/step_00000020 --out longer_2 --seq-len 8 --steps 21 --override
    check "continue at the same token" grep -q '^resume: the data continue at sequence 80 of 8 tokens, after 40 of 16' stdout
    cp text.txt $'bad\xff.txt'
    good "a name that is not UTF-8" "${run[@]}" --train-data $'bad\xff.txt' --steps 2 --out $'u\xfe'
    good "can be resumed" --out $'u\xfe' --resume on --steps 3
    good "by the same command" "${run[@]}" --train-data $'bad\xff.txt' --steps 3 --out $'u\xfe' --resume auto
    check "the log names it" grep -q '"train-data":"bad\\udcff.txt"' $'u\xfe/log.jsonl'
    check "and its checkpoint" grep -q '"path":"u\\udcfe/step_00000003"' $'u\xfe/log.jsonl'
}

# A decay starts from any checkpoint of a constant rate, and only from such a one.
test_decay() {
    local run=("${brief[@]}" "${text[@]}" --warmup 2 --eval-every 0 --sample-every 0)
    good "a run that decays after 6 of 8 steps" "${run[@]}" --steps 8 --schedule wsd --decay-steps 2 --save-every 2 --out wsd
    good "an earlier decay" --resume wsd/step_00000004 --steps 6 --decay-steps 2 --decay-shape linear --out decay
    check "is said" grep -qx 'resume: --steps is 6, was 8' stdout
    check "with its shape" grep -qx 'resume: --decay-shape is linear, was sqrt' stdout
    check "starts at the full rate" [ "$(values train lr decay/log.jsonl | head -n 1)" = "$(values train lr wsd/log.jsonl | sed -n 4p)" ]
    check "and falls" awk 'NR == 1 { first = $1 } END { exit !($1 < first && $1 > 0) }' <(values train lr decay/log.jsonl)
    good "a later one" --resume wsd/step_00000006 --steps 20 --decay-steps 4 --final-lr-frac 0.5 --out later
    check "stays at its rate" [ "$(values train lr later/log.jsonl | sed -n '1p;10p' | uniq | wc -l)" = 1 ]
    bad 2 "--decay-steps is 1, was 2; --override resumes anyway" --resume wsd/step_00000008 --steps 9 --decay-steps 1 --out again
    bad 2 "--decay-shape is linear, was sqrt|--override" --resume wsd/step_00000008 --steps 9 --decay-shape linear --out again
    bad 2 "--schedule is cosine, was wsd|--override" --resume wsd/step_00000004 --schedule cosine --out again
    runs "another schedule, on purpose" --resume wsd/step_00000004 --schedule cosine --override --out again
    check "has no decay of wsd" grep -q '"decay-steps":null,"decay-shape":"sqrt"' again/log.jsonl
    bad 2 "--decay-steps 2 needs --schedule wsd" "${run[@]}" --decay-steps 2
    bad 2 "--decay-shape linear needs --schedule wsd" "${run[@]}" --schedule linear --decay-shape linear
    good "values that are none" "${run[@]}" --steps 1 --decay-steps auto --decay-shape sqrt
}

# A batch that grows in stages.
test_batches() {
    local run=("${brief[@]}" "${text[@]}" --steps 6 --schedule constant --warmup 0 --lr 1e-3)
    good "a batch in stages" "${run[@]}" --batch-schedule 0:32,2:128 --out stages
    check "counts its tokens" [ "$(values train tokens stages/log.jsonl | tr '\n' ' ')" = "32 64 192 320 448 576 " ]
    check "has a rate for each size" [ "$(values train lr stages/log.jsonl | uniq -c | awk '{ printf "%s %.3g ", $1, $2 }')" = "2 0.0005 4 0.001 " ]
    bad 2 "--batch-schedule is 0:32,3:128, was 0:32,2:128; --override" --resume stages/step_00000006 --steps 8 --batch-schedule 0:32,3:128 --out other
    bad 2 "--batch-schedule 1:32: wanted at most 8 stages STEP:TOKENS" "${run[@]}" --batch-schedule 1:32
    bad 2 "--batch-schedule 0:24,2:48: 24 tokens; wanted a multiple of --seq-len 16" "${run[@]}" --batch-schedule 0:24,2:48
    bad 2 "--batch-schedule 0:32,2:64, --total-batch 32; wanted only one of them" "${run[@]}" --batch-schedule 0:32,2:64 --total-batch 32
    good "a plan" "${run[@]}" --batch-schedule 0:32,2:128 --plan
    check "counts them, too: $(grep '^work' stdout)" grep -q '^work: 576 tokens' stdout
    good "epochs" "${brief[@]}" "${text[@]}" --batch-schedule 0:32,2:128 --epochs 0.1 --out stages_2
    check "are whole updates" awk '{ last = $1 } END { exit !(last > 64 && (last - 64) % 128 == 0) }' <(values train tokens stages_2/log.jsonl)
}

# Windows that grow in stages.
test_windows() {
    local run=("${brief[@]}" "${text[@]}" --steps 6)
    good "windows in stages" "${run[@]}" --arch mistral --window-schedule 0:4,2:8 --out windows
    check "notes the larger ones" grep -q "^note: from step 3 on, windows have 8 tokens" stdout
    check "the last one is the model's" grep -q '"sliding_window": 8' windows/step_00000006/config.json
    bad 2 "--window-schedule is 0:2,2:8, was 0:4,2:8; --override" --resume windows/step_00000006 --steps 8 --window-schedule 0:2,2:8 --out other
    bad 2 "--window-schedule 0:0,2:8: wanted at most 8 stages STEP:TOKENS" "${run[@]}" --arch mistral --window-schedule 0:0,2:8
    bad 2 "--window-schedule has no meaning with --arch gpt2" "${run[@]}" --window-schedule 0:4,2:8
    bad 2 "--window-schedule 0:4,2:8, --window 4; wanted only one of them, or the last stage" "${run[@]}" --arch mistral --window-schedule 0:4,2:8 --window 4
    bad 2 "--window-schedule 0:4,2:99999, --context" "${run[@]}" --arch mistral --window-schedule 0:4,2:99999
    bad 2 "--window-schedule" --model windows --prompt a --window-schedule 0:4,2:8
}

# What no class of transformers has.
test_additions() {
    local run=("${brief[@]}" "${text[@]}" --steps 2 --arch nanochat --layers 3) both=(--residual-scales on --value-embeddings on)
    good "scales and value embeddings" "${run[@]}" "${both[@]}" --out added
    check "its type is our own" grep -q '"model_type": "llmc_nanochat"' added/step_00000002/config.json
    runs "is read again" --model added --prompt a --tokens 4
    good "goes on" --resume added/step_00000002 --steps 3 --override --out other
    good "with frozen layers" "${run[@]}" "${both[@]}" --freeze 'embeddings,blocks[0-1]' --out frozen
    bad 2 "--export-gguf: the model has --residual-scales" "${run[@]}" "${both[@]}" --export-gguf added.gguf
    bad 2 "--export-llmc: the model has --value-embeddings" "${run[@]}" --value-embeddings on --export-llmc added.bin
    bad 2 "--value-embeddings has no meaning with --arch qwen3; llama and nanochat have it" "${run[@]}" --arch qwen3 --value-embeddings on
    bad 2 "--residual-scales is 0, but the model in" --model added --residual-scales off "${text[@]}" --steps 1
    bad 2 "only layer 0 has a value embedding" "${run[@]}" "${both[@]}" --share-layers all
}

# Sequences that grow in stages.
test_lengths() {
    local run=("${brief[@]}" "${text[@]}" --steps 6)
    good "sequences in stages" "${run[@]}" --seq-len-schedule 0:4,2:16 --out lengths
    check "notes the longer ones" grep -q "^note: from step 3 on, sequences have 16 tokens" stdout
    bad 2 "--seq-len-schedule is 0:8,2:16, was 0:4,2:16; --override" --resume lengths/step_00000006 --steps 8 --seq-len-schedule 0:8,2:16 --out other
    bad 2 "--seq-len-schedule 0:16,2:8: wanted at most 8 stages STEP:TOKENS" "${run[@]}" --seq-len-schedule 0:16,2:8
    bad 2 "--seq-len-schedule 0:6,2:16: sequences of 6 tokens; wanted a divisor of the last stage, 16" "${run[@]}" --seq-len-schedule 0:6,2:16
    bad 2 "--seq-len-schedule 0:4,2:8, --seq-len 16; wanted only one of them, or the last stage" "${run[@]}" --seq-len-schedule 0:4,2:8
    bad 2 "--seq-len-schedule" --model lengths --prompt a --seq-len-schedule 0:4,2:8
}

# The settings of a small model with a head of 8 channels.
test_mup() {
    local run=("${brief[@]}" --steps 2)
    good "muP" "${run[@]}" --mup 8:1 --out mup
    check "is in the banner" grep -q -- "--mup 8:1" stdout
    bad 2 "--mup is 16:1, was 8:1; --override" --resume mup/step_00000002 --steps 3 --mup 16:1 --out other
    bad 2 "--mup 8: wanted the channels and the layers of a small model, as in 256:4" "${run[@]}" --mup 8
    bad 2 "--mup 0:1: wanted the channels" "${run[@]}" --mup 0:1
    bad 2 "--mup 12:1: 12 channels are no whole heads of 8" "${run[@]}" --mup 12:1
    bad 2 "--mup 8:1 does not work with --optimizer sgd" "${run[@]}" --mup 8:1 --optimizer sgd
    bad 2 "--mup 8:1, --muon-scale rms; wanted spectral" "${run[@]}" --mup 8:1 --optimizer muon --muon-scale rms
    bad 2 "--mup 8:1, --adafactor-scale on; wanted off" "${run[@]}" --mup 8:1 --optimizer adafactor --adafactor-scale on
    bad 2 "--mup 8:1, --own-head off: the last norm of nanochat has no weights" "${run[@]}" --mup 8:1 --arch nanochat --own-head off
}

# The average of a run's weights, in checkpoints, validations and models.
test_average() {
    local run=("${brief[@]}" --steps 4 --save-every 1 --eval-every 2) at=step_00000004 loss
    good "no average" "${run[@]}" --out plain
    good "an average" "${run[@]}" --average ema:0.5 --out average
    check "are not their average" bash -c "! cmp -s average/$at/model{,_average}.safetensors"
    check "a validation for each" [ "$(grep -c '"name":"average"' average/log.jsonl)" = 2 ]
    cp -r average resumed && rm -r resumed/step_0000000[34]
    good "resumed" --resume on --out resumed
    check "the average continues" cmp {average,resumed}/$at/model_average.safetensors
    check "with its state" cmp {average,resumed}/$at/optimizer.1of1.safetensors
    cp -r average changed_average && rm -r changed_average/step_0000000[34]
    good "another average" --resume on --out changed_average --average ema:0
    check "is named" grep -q "resume: --average is ema:0, was ema:0.5" stdout
    check "starts with the next update" cmp changed_average/$at/model{,_average}.safetensors
    loss=$(grep '"name":"average"' average/log.jsonl | tail -n 1 | grep -o '"loss":[0-9.]*')
    good "as a model" --model average --weights average --steps 0 --eval-every 1 --seq-len 16 --batch 2 --eval-batches 2 --out shown
    check "its loss, $loss" grep -q "\"kind\":\"val\".*$loss" shown/log.jsonl
    bad 2 "--average ema:1: wanted off, or ema:D with D below 1" "${brief[@]}" --steps 4 --average ema:1
    bad 2 "--average last:5:2: wanted off, or ema:D with D below 1; last:N is gone" "${brief[@]}" --steps 4 --average last:5:2
    bad 2 "--average ema:0.5, --update-in-backward on; wanted off" "${brief[@]}" --steps 4 --average ema:0.5 --update-in-backward on
    bad 1 "plain/$at: no model_average.safetensors" --model plain --weights average --steps 0 --eval-every 1
    bad 2 "--weights average needs a trained model" "${run[@]}" --weights average
    bad 2 "--weights average, --resume on, which continues" --resume on --out average --weights average
}

# Saves that the clock makes change nothing of a run, and two of them stay.
test_clock() {
    local run=("${brief[@]}" --steps 40 --eval-every 10 --sample-every 20 --samples 1)
    good "a run that saves at its end" "${run[@]}" --save-minutes 0 --out unclocked
    good "one that saves all the time" "${run[@]}" --save-minutes 1e-9 --out clocked
    check "saves without end: $(values save step clocked/log.jsonl | wc -l)" [ "$(values save step clocked/log.jsonl | wc -l)" -gt 20 ]
    check "keeps two of them, and the last: $(cd clocked && echo step_*)" [ "$(cd clocked && echo step_*)" = "step_00000038 step_00000039 step_00000040" ]
    check "which the clock has not made" grep -q '"by_clock":0' clocked/step_00000040/state.json
    good "a run that is killed would continue" --out clocked --resume 38
    check "with the same losses" [ "$(numbers clocked)" = "$(numbers unclocked)" ]
}

# The validation loss falls and rises again: the best checkpoint stays, and the run ends when it has
# waited long enough.
test_best() {
    { head -c 800 /dev/zero | tr '\0' b; head -c 4000 /dev/zero | tr '\0' a; } >turn.txt
    head -c 300 /dev/zero | tr '\0' b >turned.txt
    local best run=("${brief[@]}" --train-data turn.txt --val-data turned.txt --shuffle off --lr 0.01 --steps 100 --eval-every 5)
    good "a run to its end" "${run[@]}" --out whole
    best=$(values summary best_step whole/log.jsonl)
    check "the best is in the middle: step $best" [ "$best" -gt 5 -a "$best" -lt 60 ]
    check "the summary names it" grep -qE "^100 steps .*val loss [0-9.]* \| best [0-9.]* at step $best \|" stdout
    good "the same, keeping the best" "${run[@]}" --keep 1 --save-every 10 --keep-best on --out best
    check "has the same losses" [ "$(numbers best)" = "$(numbers whole)" ]
    check "and weights" cmp {best,whole}/step_00000100/model.safetensors
    check "and state" cmp {best,whole}/step_00000100/optimizer.1of1.safetensors
    check "and two checkpoints: $(cd best && echo step_*)" [ "$(cd best && echo step_*)" = "$(printf 'step_%08d step_00000100' "$best")" ]
    check "it says where the best is" grep -qE "^best validation loss [0-9.]*: best/step_0*$best\$" stdout
    good "saves of the last step, and of the best" "${run[@]}" --keep-best on --out auto
    check "with two that were the best before: $(cd auto && echo step_*)" [ "$(cd auto && ls -d step_* | wc -l)" = 4 ]
    good "patience" "${run[@]}" --patience 3 --save-every 1 --keep-best on --out early
    check "ends early" [ "$(values summary steps early/log.jsonl)" = $((best + 15)) ]
    check "says so" grep -qE "^stopped by --patience 3 after step $((best + 15)): the validation loss has not fallen for 3 validations; best [0-9.]* at step $best\$" stdout
    check "with the same losses until then" [ "$(numbers early)" = "$(values train loss whole/log.jsonl | head -n $((best + 15)); values val loss whole/log.jsonl | head -n $((best / 5 + 4)))" ]
    check "and its samples" [ "$(values sample step early/log.jsonl | tail -n 1)" = $((best + 15)) ]
    cp -r early killed
    good "a run that was killed" --out killed --resume $((best + 7))
    check "ends there, too" [ "$(values summary steps killed/log.jsonl)" = $((best + 15)) ]
    check "with the same losses" [ "$(numbers killed)" = "$(numbers early)" ]
    check "and weights" cmp {early,killed}/step_"$(printf %08d $((best + 15)))"/model.safetensors
    good "a run that has ended" --out early --resume on
    check "says so" grep -qE "^resume: stopped early at step $((best + 15)): the validation loss has not fallen for 3 validations; best [0-9.]* at step $best; for more: --patience 6, or 0\$" stdout
    cp -r early other_val && cp turned.txt kept.txt && head -c 300 /dev/zero | tr '\0' c >turned.txt
    good "other validation data" --out other_val --resume on
    check "are named" grep -qxE 'resume: the checksum of the validation data is [0-9a-f]{16}, was [0-9a-f]{16}' stdout
    check "the best starts again" grep -qx 'resume: these are other validations than before: the best one, and --patience, start again' stdout
    check "patience, too: step $(values summary best_step other_val/log.jsonl | tail -n 1)" [ "$(values summary best_step other_val/log.jsonl | tail -n 1)" -gt $((best + 15)) ]
    mv kept.txt turned.txt
    good "continues with more patience" --out early --resume on --patience 4
    check "by one validation" [ "$(values summary steps early/log.jsonl)" = $((best + 20)) ]
    bad 2 "--patience 3 needs validations: --eval-every" "${brief[@]}" --patience 3 --eval-every 0
    bad 2 "--keep-best on needs validations" "${brief[@]}" --keep-best on --eval-every 0 --out nothing
    bad 2 "--keep-best on needs a directory: --out" "${run[@]}" --keep-best on
}

# A disk that is too small for all checkpoints.
test_small_disk() {
    local run=(--layers 2 --channels 64 --heads 2 --seq-len 16 --batch 2 --sample-every 0 --eval-every 0 "${text[@]}" --steps 40 --save-every 5 --out disk/run)
    [ "$(id -u)" = 0 ] && mkdir disk && mount -t tmpfs -o size=8m none disk 2>check.out || { echo "skipped: a small disk: mount is not allowed"; return; }
    train "${run[@]}"
    check_error "a disk that fills" 1 "step_0000|a checkpoint takes|the disk has|is whole: --resume on --keep 2 continues"
    check "was foreseen" grep -q '^note: up to 8 checkpoints of .* MiB, .* MiB, the disk has .* MiB free' stdout
    check "nothing unfinished is left" [ -z "$(compgen -G 'disk/run/*.part')" ]
    good "as it says" --resume on --keep 2 --out disk/run
    check "the run is done, and has two" [ "$(cd disk/run && echo step_*)" = "step_00000035 step_00000040" ]
    umount disk
}

test_vocabularies() {
    good "a model" "${brief[@]}" "${text[@]}" --tokenizer merges.txt --steps 2 --out bpe
    local own=bpe/step_00000002
    good "its own text" "${text[@]}" --model $own --batch 2 --steps 1 --out own
    check "by its own tokenizer" grep -q '"tokenizer":"bpe/step_00000002"' own/log.jsonl
    bad 2 "$own uses its own tokenizer|--train-data|--steps 0" --model $own --steps 1
    printf '#version: 0.2\nt h\n' >fewer.txt
    bad 2 "--tokenizer fewer.txt has other tokens|in $own|--vocab-size 260" "${text[@]}" --model $own --tokenizer fewer.txt --steps 1
    good "insisting" "${text[@]}" --model $own --tokenizer fewer.txt --vocab-size 260 --batch 2 --steps 1
    good "a model of bytes" "${brief[@]}" "${text[@]}" --steps 2 --out bytes --export-llmc bytes.bin
    good "more bytes" "${text[@]}" --model bytes/step_00000002 --batch 2 --steps 1
    good "more bytes, from a file without a tokenizer" "${text[@]}" --model bytes.bin --batch 2 --steps 1
    bad 2 "the vocabulary is 257|383 tokens|(words)" --model bytes.bin --steps 1
    good "a model of stories" "${brief[@]}" --steps 2 --out words
    good "more stories" --model words/step_00000002 --batch 2 --steps 1
}

# The memory of the plan on standard output.
planned_mib() { sed -n 's/^memory: \([0-9.]*\) MiB.*/\1/p' stdout; }

# Neither a run directory nor anything to evaluate: only the files are written, without the memory
# of training.
conversion_alone() {
    local own=$1 training
    mkdir -p alone beside
    good "a plan of training" --model "$own" --steps 0 --plan
    training=$(planned_mib)
    good "a plan of a conversion" --model "$own" --steps 0 --export-gguf alone/x.gguf --plan
    check "takes less: $(planned_mib) of $training MiB" awk "BEGIN { exit !($(planned_mib) < $training) }"
    check "without gradients and moments: $(grep ^memory: stdout)" [ -z "$(grep -E '^memory: .*(gradients| m | v )' stdout)" ]
    good "a conversion alone" --model "$own" --steps 0 --export-gguf alone/x.gguf --export-llmc alone/x.bin
    check "says what it wrote" grep -qxE 'wrote alone/x.gguf \([0-9.]+ MiB\)' stdout
    check "of both" grep -qxE 'wrote alone/x.bin \([0-9.]+ MiB\)' stdout
    check "neither validates nor samples" [ -z "$(grep -E 'val loss [0-9]|sample:' stdout)" ]
    good "a conversion of a run" --model "$own" --steps 0 --sample-every 0 --out beside/x --export-gguf beside/x.gguf --export-llmc beside/x.bin
    check "the same file for llm.c" cmp alone/x.bin beside/x.bin
    check "the same for llama.cpp" cmp alone/x.gguf beside/x.gguf
    good "with a validation and a sample" --model "$own" --steps 0 "${text[@]}" --batch 2 --eval-batches 2 --prompt "the" --export-llmc alone/y.bin
    check "validates" grep -q 'val loss [0-9]' stdout
    check "samples" grep -q 'sample:' stdout
    good "beside an evaluation" --model "$own" --steps 0 --perplexity text.txt --export-llmc alone/z.bin
    check "evaluates" grep -q 'perplexity' stdout
    check "the same file, each time" cmp alone/x.bin alone/y.bin
    check "and again" cmp alone/x.bin alone/z.bin
}

# --steps 0: look at a model, convert it.
test_look() {
    local own=bpe/step_00000002
    good "a sample of a checkpoint" --model $own --steps 0 --prompt "the bottles" --samples 1 --out look
    check "starts with the prompt" grep -q '"kind":"sample","step":0,"text":"the bottles' look/log.jsonl
    good "its loss, too" --model $own --steps 0 "${text[@]}" --batch 2 --eval-batches 2 --prompt "the" --out look_2
    check "the loss equals the one that the run logged" [ "$(values val loss look_2/log.jsonl | cut -c1-4)" = "$(values val loss bpe/log.jsonl | tail -n 1 | cut -c1-4)" ]
    good "a finished run, asked again" --out bpe --resume on --prompt "the wall" --samples 1
    check "says a sample" grep -q 'the wall' <(grep -A 1 sample: stdout)
    good "a conversion" --model bytes.bin --steps 0 --eval-every 0 --sample-every 0 --vocab-size 257 "${text[@]}" --out converted
    check "writes a checkpoint" [ -s converted/step_00000000/model.safetensors ]
    check "of the same weights" cmp converted/step_00000000/model.safetensors bytes/step_00000002/model.safetensors
    good "a conversion without data" --model $own --steps 0 --sample-every 0 --out converted_2 --export-gguf x.gguf
    check "keeps the tokenizer" cmp $own/tokenizer.json converted_2/step_00000000/tokenizer.json
    conversion_alone $own
}

# Layers that share parameters: what has no meaning, and what cannot be continued or combined.
test_share() {
    local four=(--layers 4 "${brief[@]:2}")
    bad 2 "--share-layers: 'frog'; wanted off, all, pairs or loop:K" "${four[@]}" --share-layers frog
    bad 2 "--share-layers: 'mlp'; wanted off, all, pairs|all shares attention and MLP" "${four[@]}" --share-layers mlp
    bad 2 "loop:3 with 4 layers; wanted a multiple of 3" "${four[@]}" --share-layers loop:3
    bad 2 "pairs with 1 layers; wanted a multiple of 2" "${brief[@]}" --share-layers pairs
    bad 2 "--share-layers loop:2, --zero 2; wanted --zero 1, or --share-layers all or pairs" "${four[@]}" --share-layers loop:2 --zero 2
    bad 2 "--share-layers loop:2, --update-in-backward on; wanted off, or" "${four[@]}" --share-layers loop:2 --update-in-backward on
    bad 2 "ln1w of blocks 0 and 1 is the same one (--share-layers)" "${four[@]}" --share-layers all --freeze 'blocks[0]'
    good "shared layers" "${four[@]}" --steps 2 --share-layers pairs --out shared
    check "say so: $(grep ^model stdout)" grep -q '^model: 4 layers.*0.02M parameters, 0.01M in memory (--share-layers pairs)$' stdout
    good "their checkpoint" --model shared --batch 2 --eval-batches 2 --steps 0 --sample-tokens 4 --out shared_eval
    check "is a model like any other" [ "$(values val loss shared_eval/log.jsonl)" = "$(values val loss shared/log.jsonl | tail -n 1)" ]
    bad 2 "--share-layers is off, was pairs; wanted the same|--model shared/step_00000002" --resume shared/step_00000002 --share-layers off --steps 3 --out other --override
    good "its layers" --model shared --batch 2 --steps 1 --sample-tokens 4 --share-layers pairs
    bad 1 "tensor transformer.h.2.ln_1.weight differs from transformer.h.0.ln_1.weight" --model shared --batch 2 --steps 1 --share-layers all
}

# ---- what users meet first ----

test_first_steps() {
    good "-h" -h
    check "is --help" grep -q '^usage: train_gpt2' stdout
    check "with examples" grep -q -- '--resume on --steps 9000  ' stdout
    good "llm.c's switches" "${brief[@]}" -x 1 -h 0 -z 1 -pn 1 -pr 0
    bad 1 "--hellaswag on|data/hellaswag/hellaswag_val.jsonl|scripts/get_data.sh hellaswag" "${brief[@]}" -x 1 -h 1
    bad 2 "--zero 4: wanted 0 to 3" -z 4
    bad 2 "unexpected argument 'text.txt'|quote a pattern" --train-data text.txt text.txt
    good "a name of Hugging Face's" --model gpt2-xl --plan
    check "is that size" grep -q '^model: 48 layers, 1600 channels, 25 heads, context 1024' stdout
    good "a plan" "${brief[@]}" --steps 100 --save-every 10 --keep 2 --out planned --plan
    check "speaks of the disk" grep -q '^disk: 2 checkpoints of at most' stdout
    check "and comes to the point" grep -q '^memory:' <(head -n 12 stdout)
    good "a control character" "${brief[@]}" "${text[@]}" --steps 1 --samples 1 --prompt $'A\xc2\x9b31mRED\x1b[0m'
    check "does not reach the screen" [ "$(tail -n +10 stdout | grep -c $'\xc2\x9b')" = 0 ]
    (ulimit -s 128 && train "${brief[@]}" --steps 1 && exit "$status")
    status=$?
    check_error "a small stack" 1 "the stack is limited to 128 KiB"
}

# A FIFO where a file should be is an error and no wait.
test_fifos() {
    good "a run" "${brief[@]}" --steps 2 --out fifo
    local file
    for file in state.json config.json model.safetensors; do
        cp -r fifo "fifo_$file"
        rm "fifo_$file/step_00000002/$file"
        mkfifo "fifo_$file/step_00000002/$file"
    done
    timeout 20 "$trainer" --resume fifo_state.json/step_00000002 >stdout 2>stderr </dev/null
    status=$?
    check_error "state.json" 1 "state.json|not a regular file"
    for file in config.json model.safetensors; do
        timeout 20 "$trainer" --model "fifo_$file/step_00000002" --steps 0 >stdout 2>stderr </dev/null
        status=$?
        check_error "$file" 1 "$file|not a regular file"
    done
    mkdir fifo_log && mkfifo fifo_log/log.jsonl
    timeout 20 "$trainer" "${brief[@]}" --steps 1 --out fifo_log >stdout 2>stderr </dev/null
    status=$?
    check_error "log.jsonl" 1 "log.jsonl: not a regular file"
}

test_pointers
test_names
test_two_starts
test_links
test_logs
test_two_runs
test_unreadable
test_read_only
test_refused
test_short_starts
test_exports
test_out_texts
test_out_html
test_closed
test_pipe
test_signals
test_validation_diverges
test_divergence
test_other_data
test_longer
test_decay
test_batches
test_windows
test_additions
test_lengths
test_mup
test_average
test_clock
test_best
test_small_disk
test_vocabularies
test_look
test_share
test_first_steps
test_fifos
check_done
