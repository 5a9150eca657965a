#!/usr/bin/env bash
# reported.sh -- tries every fault of a list of reports again, one line for each number: "M1: cured",
# "M1: NOT CURED: what is seen", or "F2: gone" if the feature no longer exists.
#
#     dev/test/reported.sh [TRAINER [TOKENIZE [INPUTS]]]     ./train_gpt2, ./tokenize, ../shared/defects
#     REPORTED='E|F1' dev/test/reported.sh                    only numbers that match
#
# M: what counts in a sum. E: what a model says of itself in files. F: files that are read and written.
# U: what users met. A function try_NUMBER runs in an empty directory; it succeeds without output if
# the fault is cured, and else prints what it has seen. What needs inputs that are not here, or
# Python's packages, is skipped by name.
set -u
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 LC_ALL=C.UTF-8
root=$(cd "$(dirname "$0")/../.." && pwd)
trainer=$(realpath "${1:-$root/train_gpt2}")
tokenize=$(realpath "${2:-$root/tokenize}")
inputs=$(realpath -m "${3:-$root/../shared/defects}")
source "$root/dev/test/lib/check.sh"
tiny=(--layers 1 --channels 32 --heads 2 --seq-len 32 --batch 2 --samples 0 --eval-every 0)
failed=0

# ---- for the functions ----

quiet() { "$@" >out 2>&1; }
said() { grep -qE -- "$1" out || { echo "nothing says '$1': $(tail -n 1 out)" && return 1; }; }
# refuses WORDS COMMAND...: status 1 or 2, and the words
refuses() {
    local words=$1 status
    shift
    quiet "$@"
    status=$?
    [ $status = 1 ] || [ $status = 2 ] || { echo "status $status: $*" && return 1; }
    said "$words"
}
# value KEY LOG: the last one of updates
value() { sed -n "s/^{\"kind\":\"train\".*\"$1\":\([^,}]*\).*/\1/p" "$2" | tail -n 1; }
# near A B MOST: within this share
near() { awk -v a="$1" -v b="$2" -v most="$3" 'BEGIN { exit !(b != 0 && (a / b - 1) ^ 2 <= most ^ 2) }' || { echo "$1, wanted $2" && return 1; }; }
bottles() { for i in {1..300}; do echo "$i bottles of beer on the wall, $i bottles of beer."; done >text.txt; }
untouched() { md5sum "$1" >sum; shift; "$@" >out 2>&1; md5sum -c --quiet sum >/dev/null 2>&1 || { echo "overwritten: $*" && return 1; }; }

# ---- M ----

moe=(--arch olmoe --layers 1 --channels 32 --heads 2 --experts 4 --steps 1 --optimizer sgd --grad-clip 0 --samples 0 --eval-every 0)

try_M1() {
    local s key
    for s in 512 2048; do
        quiet "$trainer" "${moe[@]}" --context 2048 --train-data "$inputs/router-padding/chats.jsonl" --val-data "$inputs/router-padding/chats.jsonl" \
            --pack pad --seq-len $s --batch 4 --router-z 0 --router-balance 1 --out $s
    done
    for key in norm expert_load router_entropy; do near "$(value $key 2048/log.jsonl)" "$(value $key 512/log.jsonl)" 1e-5 || return 1; done
}

# Squared norms: with balance less without it, as a chat and as a text.
try_M2() {
    sed -n 2p "$inputs/router-prompts/chats.jsonl" >one.jsonl
    sed 's/.*"user", *"content": *"\([^"]*\)".*"assistant", *"content": *"\([^"]*\)".*/{"text": "<|im_start|>user\\n\1<|im_end|>\\n<|im_start|>assistant\\n\2<|im_end|>\\n"}/' \
        one.jsonl >text.jsonl
    local n b f
    n=$(($(wc -c <text.jsonl) - 13 - $(grep -o '\\n' text.jsonl | wc -l) - 1))
    for f in one text; do for b in 0 1; do
        quiet "$trainer" "${moe[@]}" --train-data $f.jsonl --val-data $f.jsonl --pack pad --doc-mask off --seq-len $((n + 8)) --context 1024 --batch 1 \
            --router-z 0 --router-balance $b --out $f$b || { echo "$(tail -n 1 out)" && return 1; }
    done; done
    local added
    added=$(for f in one text; do awk -v a="$(value norm ${f}0/log.jsonl)" -v b="$(value norm ${f}1/log.jsonl)" 'BEGIN { printf "%.6g ", sqrt(b * b - a * a) }'; done)
    near ${added} 0.35
}

try_M3() {
    local pack dir=$inputs/moe_router_losses_masked
    for pack in pad dynamic; do
        quiet "$trainer" "${moe[@]}" --arch mixtral --hidden 32 --seq-len 256 --context 256 --shuffle off --batch 8 --total-batch 2048 --warmup 0 \
            --train-data "$dir/short.jsonl" --val-data "$dir/short.jsonl" --pack $pack --router-balance 0 --router-z 1 --out $pack
    done
    near "$(value norm pad/log.jsonl)" "$(value norm dynamic/log.jsonl)" 1e-5 && near "$(value norm pad/log.jsonl)" 8.7017 1e-3
}

try_M4() { (cd "$root" && dev/test/cli/test_experts.sh "$trainer" counted) >out 2>&1 || tail -n 3 out; [ ! -s out ] || grep -q ' 0 failed' out; }
try_M5() { refuses 'experts-used 1' "$trainer" --arch mixtral --experts 4 --experts-used 1 "${tiny[@]}" --steps 1; }

try_M6() {
    local f
    for f in one two; do
        quiet "$trainer" "${tiny[@]}" --arch llama --train-data "$inputs/last_completion_end/$f.jsonl" --val-data "$inputs/last_completion_end/$f.jsonl" \
            --context 64 --batch 1 --total-batch 32 --steps 1
        said '60\.00 % of the tokens are answers' || return 1
    done
}

try_M7() {
    local test=$root/build/plain/test_optim
    [ -x "$test" ] || { echo "skipped: no build/plain/test_optim" && return 0; }
    (cd "$root" && "$test" vanished_gradient) >out 2>&1 || tail -n 3 out
    grep -q "[1-9][0-9]* tests, 0 failed" out
}

# ---- E ----

chats_run() { # MODEL OPTIONS... of a directory of inputs
    local dir=$1
    shift
    quiet "$trainer" "${tiny[@]}" --arch llama --tokenizer "$dir/tokenizer.json" --train-data "$dir/chats.jsonl" --val-data "$dir/chats.jsonl" --seq-len 64 \
        --context 64 --batch 4 --steps 2 --out o "$@" || { tail -n 1 out && return 1; }
}

try_E1() {
    chats_run "$inputs/eos_of_chat_marks" || return 1
    tr -d ' \n' <o/step_00000002/generation_config.json | grep -qF '"eos_token_id":[0,2]' || tr -d ' \n' <o/step_00000002/generation_config.json |
        grep -qF '"eos_token_id":[2,0]' || { grep eos o/step_00000002/generation_config.json && return 1; }
}

try_E2() {
    local key
    chats_run "$inputs/gguf_without_chat_template" --export-gguf o.gguf || return 1
    for key in tokenizer.chat_template tokenizer.ggml.eot_token_id; do grep -qaF $key o.gguf || { echo "no $key" && return 1; }; done
}

# The ends of config.json, where generation_config.json is missing.
try_E3() {
    chats_run "$inputs/eos_of_chat_marks" || return 1
    rm o/step_00000002/generation_config.json
    mv o/step_00000002 m
    sed -i 's/"eos_token_id": *\[[^]]*\]/"eos_token_id": [0, 1]/' m/config.json
    grep -q '\[0, 1\]' m/config.json || sed -i 's/"eos_token_id": *[0-9]*/"eos_token_id": [0, 1]/' m/config.json
    quiet "$trainer" --model m --steps 0 --samples 0 --out copy || { tail -n 1 out && return 1; }
    tr -d ' \n' <copy/step_00000000/generation_config.json | grep -q '"eos_token_id":\[0,1[],]' || { grep -h eos copy/step_*/*config.json | head -n 3 && return 1; }
}

try_E4() {
    local dir=$inputs/06_foreign_template_replaced
    local run=("${tiny[@]}" --train-data "$dir/chats.jsonl" --val-data "$dir/chats.jsonl" --pack pad --seq-len 64 --steps 1)
    mkdir tok && cp "$dir/tokenizer.json" tok
    quiet "$trainer" --arch qwen3 --tokenizer tok "${run[@]}" --out m || { tail -n 1 out && return 1; }
    mv m/step_* f
    echo '{% for m in messages %}<<{{ m.content }}>>{% endfor %}' >f/chat_template.jinja
    refuses 'chat_template' "$trainer" --model f "${run[@]}" --out o || return 1
    quiet "$trainer" --model f "${run[@]}" --chat chatml --out o || { tail -n 1 out && return 1; }
    said 'replaces the model'
}

try_E5() {
    chats_run "$inputs/eos_of_chat_marks" || return 1
    grep -q generation o/step_00000002/chat_template.jinja || { echo "no {% generation %}" && return 1; }
}

try_E6() {
    bottles
    refuses 'head-size' "$trainer" --arch qwen2 --layers 1 --channels 128 --heads 3 --head-size 32 --tokenizer bpe:300 --train-data text.txt --batch 2 \
        --seq-len 32 --steps 1 --eval-every 0 --samples 0 --out a --export-gguf a.gguf
}

try_E7() {
    local dir=$inputs/new_tokens_in_padded_rows
    local run=("${tiny[@]}" --train-data "$dir/text.txt" --val-data "$dir/text.txt" --seq-len 32 --steps 0)
    quiet "$trainer" --arch llama --vocab-size 448 --tokenizer "$dir/old.tokenizer.json" "${run[@]}" --context 64 --out m || { tail -n 1 out && return 1; }
    quiet "$trainer" --model m --tokenizer "$dir/new.tokenizer.json" "${run[@]}" --out n || { tail -n 1 out && return 1; }
    said 'start as the means'
}

try_E8() {
    refuses 'literal string' "$tokenize" --tokenizer "$inputs/split_string_pattern/tokenizer.json" --val-tokens 0 --out x "$inputs/split_string_pattern/text.txt" ||
        od -An -tu2 -j1024 x_train_000000.bin 2>/dev/null | grep -q '487 *441 *442 *221 *350 *221 *19'
}

try_E9() {
    local python
    for python in "$root/build/venv/bin/python" "$root/../venv/bin/python"; do
        if "$python" "$inputs/fused_experts/make.py" >out 2>&1; then
            bottles
            local d
            for d in split fused; do
                quiet "$trainer" --model $d --train-data text.txt --steps 0 --eval-every 1 --seq-len 32 --batch 2 --samples 0 ||
                    { echo "$d: $(tail -n 1 out)" && return 1; }
                sed -n 's/.*\(val loss [0-9.]*\).*/\1/p' out >$d.loss
            done
            cmp split.loss fused.loss
            return
        fi
    done
    echo "skipped: Python's transformers is missing"
}

try_E10() { echo "gone: ./tokenize no longer compares documents (--dedup, --decontaminate)"; }

try_E11() {
    bottles
    { printf '\xef\xbb\xbf' && printf '0 beer 1 cat 2\n10 beer 2 cat 1\n'; } >schedule.txt
    cp text.txt c.txt
    quiet "$trainer" "${tiny[@]}" --train-data 'beer=text.txt,cat=c.txt' --data-schedule schedule.txt --steps 2 || { tail -n 1 out && return 1; }
}

# ---- F ----

try_F1() {
    local i n
    for i in $(seq 100); do echo "{\"prompt\":\"the cat number $i\",\"completion\":\" sat on the old tree $i\"}"; done >c.jsonl
    bottles
    quiet "$tokenize" --train-bpe 270 --out v c.jsonl text.txt
    quiet "$tokenize" --tokenizer v.tokenizer.json --val-tokens 300 --out sh c.jsonl
    untouched sh_train_000001.bin.mask "$trainer" "${tiny[@]}" --steps 1 --tokenizer v.tokenizer.json --train-data sh_train_000001.bin \
        --val-data sh_val_000000.bin --export-gguf sh_train_000001.bin.mask || return 1
    quiet "$trainer" "${tiny[@]}" --train-data text.txt --steps 1 --out ta
}

try_F2() { echo "gone: kept logits (--teacher-logits) no longer exist"; }
try_F3() { try_F2; }
try_F4() { try_F2; }

try_F5() {
    bottles
    head -n 40 text.txt >val.txt
    local run=("${tiny[@]}" --eval-every 2 --train-data text.txt --val-data val.txt --out o)
    quiet "$trainer" "${run[@]}" --steps 4
    tail -n 40 text.txt >val.txt
    quiet "$trainer" "${run[@]}" --steps 6 --resume on
    said 'other validations than before'
}

try_F6() {
    bottles
    local peak
    for average in off ema:0.9; do
        quiet "$trainer" --layers 4 --channels 512 --heads 4 --seq-len 32 --batch 2 --train-data text.txt --steps 4 --samples 0 --eval-every 0 --save-every 2 \
            --average $average --out o$average
        peak=$(sed -n 's/.*peak memory \([0-9]*\) MiB, \([0-9]*\) of them planned.*/\1 \2/p' out)
        awk -v p="$peak" 'BEGIN { split(p, v); exit !(v[1] > 0 && v[1] - v[2] <= 24) }' || { echo "$average: peak and planned MiB: $peak" && return 1; }
    done
}

try_F7() {
    bottles
    : >empty.cfg
    refuses 'empty.cfg' "$trainer" --config empty.cfg || return 1
    refuses . "$trainer" "${tiny[@]}" --out refused --train-data missing.txt || return 1
    [ ! -e refused ] || { echo "a refused run leaves its directory" && return 1; }
    quiet "$trainer" "${tiny[@]}" --arch llama --train-data text.txt --steps 1 --out o
    cp -r o/step_00000001 m
    sed -i 's/"num_key_value_heads": *[0-9]*/"num_key_value_heads": 0/' m/config.json
    refuses num_key_value_heads "$trainer" --model m --steps 0 --samples 0
}

try_F8() {
    local line missing=
    bottles
    while read -r line; do
        # shellcheck disable=SC2086
        quiet "$trainer" --layers 1 --channels 32 --heads 2 --seq-len 32 --batch 2 --train-data text.txt --steps 2 $line
        grep -qE "note: |warning: |error: " out || missing+="[$line] "
    done <<'END'
--samples 0 --eval-every 0 --export-dtype f16
--samples 0 --eval-every 0 --keep 3
--samples 0 --eval-every 0 --save-minutes 5
--samples 0 --eval-every 0 --eval-batches 2
--samples 0 --eval-every 0 --top-k 5
--samples 0 --eval-every 0 --optimizer sgd --beta1 0.8
--samples 0 --eval-every 0 --cautious-decay on --weight-decay 0
--samples 0 --eval-every 0 --override
--samples 0 --eval-every 0 --text-field body
--samples 0 --eval-every 0 --warmup 10
END
    [ ! "$missing" ] || { echo "no word about $missing" && return 1; }
}

# What a command that ends prints can be pasted, with blanks and quotes in its paths; advice on a grid fits.
try_F9() {
    local use
    bottles
    quiet "$trainer" "${tiny[@]}" --train-data text.txt --tokenizer bpe:300 --steps 1 --out "it's out"
    use=$(sed -n 's/^generate text: //p' out)
    eval "quiet $use" || { echo "$use: $(tail -n 1 out)" && return 1; }
    quiet "$trainer" --plan --layers 2 --num-processes 3 --pipeline-parallel 2 "${tiny[@]:2}" --steps 1
    ! grep -q 'wanted 3$' out || { tail -n 1 out && return 1; }
}

# ---- U ----

lr_of() { "$trainer" --print-config --lr auto "$@" 2>/dev/null | sed -n 's/^lr *= *//p'; }
try_U1() {
    [ "$(lr_of --steps 300)" != "$(lr_of --steps 30000)" ] || { echo "--lr auto is $(lr_of --steps 300) for 300 and for 30000 updates" && return 1; }
    quiet "$trainer" --help && said find-lr
}

# A run of 20 updates of 256 tokens, of a text of 225,000.
try_U2() {
    for i in {1..5000}; do echo "$i bottles of beer on the wall, $i bottles."; done >text.txt
    quiet "$trainer" --layers 1 --channels 32 --heads 2 --seq-len 32 --batch 8 --total-batch 256 --train-data text.txt --val-data text.txt --steps 20 \
        --samples 0 --out o
    local tokens
    tokens=$(sed -n 's/^{"kind":"val".*"sequences":\([0-9]*\).*/\1/p' o/log.jsonl | awk '{ sum += 32 * $1 } END { print sum }')
    [ "${tokens:-0}" -le 20480 ] || { echo "validations of $tokens tokens for 5120 of training" && return 1; }
}

try_U3() {
    quiet "$trainer" --steps 2 --eval-every 0 --samples 0 --out m || { tail -n 1 out && return 1; }
    quiet "$trainer" --model m --prompt "Hello, who are you?"
    ! grep -q '^error' out || said 'for example|such as|knows|start'
}

try_U4() {
    timeout 20 make -C "$root" NVCC=no_such_nvcc GPU_BUILD="$PWD/build" train_gpt2cu >out 2>&1
    said 'nvcc' && said 'make sim'
}

try_U5() {
    ! grep -nE 'on CPUs runs for real|No report is here yet|not measured yet' "$root/README.md" "$root"/dev/doc/*.md >out || { head -n 2 out && return 1; }
}

try_U6() {
    local model
    for model in llama:3b llama:8b llama:70b qwen3:1.7b qwen3:4b qwen3:8b mistral:7b; do
        quiet timeout 60 "$trainer" --plan --model $model --batch 1 --seq-len 128 --steps 1
        ! grep -q 'neither a file nor' out || { echo "no $model" && return 1; }
    done
    refuses 'qwen3' "$trainer" --model llama:7b --plan
}

try_U7() {
    bottles
    quiet "$trainer" "${tiny[@]}" --train-data text.txt --arch llama --arch gpt2 --steps 1 || { tail -n 1 out && return 1; }
    said 'note: --arch is given several times'
}

try_U8() {
    bottles
    cp text.txt "c d.txt"
    quiet "$trainer" "${tiny[@]}" --arch mixtral --experts 4 --train-data 'beer=text.txt:1,cat=c d.txt:1' --total-batch 256 --steps 2 --out o || { tail -n 1 out && return 1; }
    for word in '"command":"' "'beer=text.txt:1,cat=c d.txt:1'" '"source_loss":{"' '"kind":"experts",'; do
        grep -qF -- "$word" o/log.jsonl || { echo "no $word in log.jsonl" && return 1; }
    done
    quiet "$trainer" --report o && grep -q plot-sources0 o/report.html && grep -q loads0 o/report.html
}

try_U9() {
    quiet timeout 100 "$trainer" --plan --model gpt2:1.5b --steps 600000
    ! grep -oE '[0-9]{4,}(\.[0-9]+)? (hours|GFLOP/s)|[0-9]{4,}\.[0-9]+M parameters' out >found || { head -n 1 found && return 1; }
}

try_U10() {
    local lines
    lines=$("$trainer" --help basic | wc -l)
    [ "$lines" -lt 80 ] && [ "$lines" -gt 5 ] || { echo "--help basic has $lines lines" && return 1; }
    [ -s "$root/dev/doc/tutorial.md" ] && [ -s "$root/dev/doc/troubleshooting.md" ] && ls "$root"/scripts/examples/*.sh >out 2>&1 ||
        { echo "tutorial.md, troubleshooting.md, scripts/examples: one is missing" && return 1; }
}

try_U11() { grep -qE 'Werror=switch|Wswitch-enum' "$root/Makefile" || { echo "switches need not be exhaustive" && return 1; }; }

try_U12() {
    quiet "$trainer" --steps 2 --eval-every 0 --samples 0 --out m
    bottles
    quiet "$trainer" "${tiny[@]}" --train-data text.txt --tokenizer bpe:300 --steps 1 --out o
    ! grep -q 'Once upon a time' out || { sed -n '/Once upon/p' out && return 1; }
}

try_U13() {
    local half
    half=$(printf 'abcdefgh%.0s' {1..800})
    { printf %s "$half" && head -c 900 /dev/urandom | base64 -w 0 && printf %s "$half"; } >leap.txt
    quiet "$trainer" --layers 1 --channels 16 --heads 2 --seq-len 16 --batch 1 --total-batch 16 --train-data leap.txt --shuffle off --lr 0.01 --steps 402 \
        --skip-loss-z 6 --eval-every 0 --samples 0
    said 'skipped: .*sequence 400: leap.txt bytes'
}

try_U14() {
    ! grep -nE 'tells you memory to the byte|transformers opens comes out|generates more text than|A save changes no bits|transformers.? own, to the digits|missing its value; wanted above 0' \
        "$root/README.md" "$root"/dev/doc/*.md "$root"/llmc/*/*.h >out || { head -n 2 out && return 1; }
}

try_U15() { [ ! -e "$root/.dockerignore" ] && [ -e "$root/scripts/container/cpu.Dockerfile.dockerignore" ] || { echo ".dockerignore" && return 1; }; }
try_U16() { local n; n=$(wc -w <"$root/README.md"); [ "$n" -le 1200 ] || { echo "README.md has $n words" && return 1; }; }

# ---- all ----

# try NUMBER: one line about it.
try() {
    local number=$1 said status
    mkdir "$top/$number" && cd "$top/$number" || exit 1
    said=$("try_$number" </dev/null 2>&1)
    status=$?
    case $said in
    skipped:* | gone:*) echo "$number: $said" && return ;;
    esac
    if [ $status = 0 ] && [ -z "$said" ]; then
        echo "$number: cured"
    else
        echo "$number: NOT CURED: $(head -n 1 <<<"${said:-status $status}")"
        failed=$((failed + 1))
    fi
}

[ -d "$inputs" ] || { echo "skipped: reported: $inputs is not here" && exit 0; }
for program in "$trainer" "$tokenize"; do
    [ -x "$program" ] || { echo "error: $program: no program; make train_gpt2 tokenize" >&2 && exit 2; }
done
top=$(mktemp -d /tmp/llmc_reported_XXXXXX)
trap 'rm -rf "$top"' EXIT
tried=0
while read -r number; do
    try "$number"
    tried=$((tried + 1))
done < <(grep -oE '^try_[MEFU][0-9]+' "$0" | cut -c5- | grep -E "${REPORTED:-.}")
echo "reported: $tried numbers, $failed not cured"
[ $failed = 0 ]
