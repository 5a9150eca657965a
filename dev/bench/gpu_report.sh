#!/usr/bin/env bash
# gpu_report.sh -- measures everything that only a GPU can show, unattended.
#
#     dev/bench/gpu_report.sh [--part A|B|C|D] [--only ITEM,...] [--minutes N] [--full] [--toy]
#                             [--kit] [--out DIR]
#
# A   first       the card, its libraries; tests of the instructions, the runtime and the matmuls
#     speed       124M in BF16 at --recompute 0 and 1, and with each --gelu-fusion:
#                 ms, tok/s, MFU, memory, the algorithms of cublasLt's matmuls,
#                 the ways of GELU that autotune found faster
#     tests       attention and the whole model in BF16
#     step        every kernel of one real step, by ncu
#     bench       every kernel and matmul against the ceilings (bench_gpu)
#     cudnn       the whole-model test and the speed with cuDNN's attention
# B   precisions  the whole model in FP16 and FP32
#     peer        124M beside PyTorch with all its kinds of attention and modes of torch.compile
#     models      350M, 774M and 1558M, each beside PyTorch at its best, in turn
#     families    llama:1b and qwen3:0.6b, each beside transformers with torch.compile
#     modules     the tests of the other modules
# C   memory      each memory technique alone and combined: peak, tok/s, loss after some steps
#     sanitizer   compute-sanitizer: memcheck and racecheck on the whole-model test
#     curve       100 steps of 124M on the same text: BF16, FP32 and PyTorch
#     answers     answers of cublasLt and of the instructions' tests on this card, for dev/cusim
#     fp8         124M and the larger models without --matmul fp8 and with it, in turn
# D   wgmma       tests of the wgmma kernels, norms, races and fp8; if they fail, only mma is measured
#     ways        124M with attention by mma and by wgmma, in turn; 124M, 1558M and models of other
#                 kinds by whichever autotune finds faster; some of them with --matmul fp8
#     tiles       attention by each of its instructions and tilings; norms, heads, experts and fp8
#     beside      124M beside PyTorch with flash attention and torch.compile
#     kernels     every kernel of a step, by ncu, and racecheck of attention's tests
#
# In a checkout it builds the programs first (`make gpu-kit`). With --kit it compiles nothing: it is
# the copy in a kit unpacked from build/gpu_kit.tar.xz. Without --part it runs all items of A, B and
# C. Items that do not fit into the minutes (8.5 per part, 7 for D) are skipped. A failing item is
# named, the others still run, and the exit status is 1.
#
# Writes DIR (dev/bench/results/<gpu>-<date>-<part>): summary.md, summary.jsonl, the log of every
# command; and after every item DIR.tar.gz, or the same archive in $OUT if that is set. --full uses
# total batches of 524,288 tokens; --toy tests the script itself, on the simulated GPU and with
# PyTorch on the CPU, at sizes that say nothing about speed. PYTHON names a Python with PyTorch.
set -u
cd "$(dirname "$0")/../.." || exit 1
export PATH=$PATH:/usr/local/bin:/usr/sbin:/sbin:/usr/local/nvidia/bin:${CUDA_HOME:-/usr/local/cuda}/bin

part='' only='' minutes='' full=off toy=off kit=off out=''
while [ $# -gt 0 ]; do
    case $1 in
    --part) part=${2:-} && shift ;;
    --only) only=${2//,/ } && shift ;;
    --minutes) minutes=${2:-} && shift ;;
    --out) out=${2:-} && shift ;;
    --full) full=on ;;
    --toy) toy=on ;;
    --kit) kit=on ;;
    *) sed -n '2,40s/^# \{0,1\}//p' "$0" && exit 2 ;;
    esac
    shift
done
case $part in
A) items="first speed tests step bench cudnn" ;;
B) items="precisions peer models families modules" ;;
C) items="memory sanitizer curve answers fp8" ;;
D) items="wgmma ways tiles beside kernels" ;;
"") items="first speed tests step bench cudnn precisions peer models families modules memory sanitizer curve answers fp8" ;;
*) echo "error: --part $part: wanted A, B, C or D" >&2 && exit 2 ;;
esac
case $part in D) usual=7 ;; '') usual=25.5 ;; *) usual=8.5 ;; esac
seconds=$(awk -v m="${minutes:-$usual}" 'BEGIN { printf "%d", m * 60 }')

gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | tr ' ' '-')
[ $toy = on ] && gpu=toy
if [ -z "$gpu" ]; then
    [ $kit = on ] || { echo "error: no GPU found by nvidia-smi; --toy tries the script without one" >&2; exit 1; }
    echo "warning: nvidia-smi names no GPU; everything is tried all the same" >&2
    gpu=unknown
fi
if [ $kit = off ]; then
    make -s gpu-kit TOY="$([ $toy = on ] && echo 1)" ARCH="${ARCH:-}" || exit 1
    kit_dir=$PWD/build/kit/tree$([ $toy = on ] && echo _toy)/gpu_kit
else
    kit_dir=$PWD
fi
bin=$kit_dir/bin
[ -f "$kit_dir/kit.txt" ] || { echo "error: --kit: $kit_dir/kit.txt: no such file; unpack build/gpu_kit.tar.xz" >&2; exit 1; }

name=${gpu,,}-$(date +%Y-%m-%d)${part:+-$part}
out=${out:-dev/bench/results/$name}
archive=${OUT:+$OUT/$name.tar.gz}
archive=${archive:-$out.tar.gz}
mkdir -p "$out" "$(dirname "$archive")" || exit 1
rm -f "$out"/*.log "$out"/summary.* "$out"/results.txt
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
begin_s=$SECONDS
summary=$out/summary.md
export XDG_CACHE_HOME=$out/cache # algorithms of matmuls, measured by the first run of a size
case $XDG_CACHE_HOME in /*) ;; *) XDG_CACHE_HOME=$PWD/$XDG_CACHE_HOME ;; esac

say() { echo "$*" | tee -a "$summary"; }
left_s() { echo $((seconds - SECONDS + begin_s)); }
pack() { tar -C "$(dirname "$out")" -czf "$archive.new" "$(basename "$out")" && mv "$archive.new" "$archive"; }

# record NAME passed|FAILED|skipped SECONDS [WHY]: prints the result, keeps it for the table at the
# end, and packs all results so far.
record() {
    echo "- $1: $2$([ "$3" = 0 ] || echo " ($3 s)")${4:+: $4}"
    printf '| %s | %s | %s | %s |\n' "$1" "$2" "$3" "${4:-}" >>"$out/results.txt"
    pack
}

# trial NAME SECONDS COMMAND...: runs it with its output in NAME.log. Skips it if less than a third
# of the time is left.
trial() {
    local name=$1 limit=$2 status left begin=$SECONDS why
    shift 2
    left=$(left_s)
    [ $toy = off ] || limit=$((left > 0 ? left : 0)) # no limit for the simulated GPU
    command -v "$1" >/dev/null || { record "$name" skipped 0 "no ${1##*/bin/} here"; return 1; }
    [ "$left" -gt $((limit / 3)) ] || { record "$name" skipped 0 "$left s are left"; return 1; }
    { echo "\$ $*"; date; } >"$out/$name.log"
    timeout -k 5 $((limit < left ? limit : left)) "$@" </dev/null >>"$out/$name.log" 2>&1
    status=$?
    [ $status = 0 ] && { record "$name" passed $((SECONDS - begin)); return 0; }
    why="exit status $status"
    [ $status = 124 ] && why="stopped, it took too long"
    record "$name" FAILED $((SECONDS - begin)) \
        "$why: $(grep -a -m 1 -E 'error|Error|FAILED' "$out/$name.log" | tr '|' ' ' | cut -c 1-200)"
    return 1
}

# Prints the median of the numbers on standard input, and their 10th and 90th percentile.
spread() { sort -n | awk '{ x[NR] = $1 } END { if (NR) print x[int((NR + 1) / 2)], x[int(NR * 0.1) + 1], x[int(NR * 0.9 + 0.999)] }'; }

# field NAME FILE: prints the values of a number in lines of training.
field() { sed -n "/\"kind\":\"train\"/s/.*\"$1\":\([-0-9.e+]*\).*/\1/p" "$2"; }

# ---- libraries and tools of this machine ----

source dev/bench/libraries.sh

# Prints the first Python with PyTorch; else any, or nothing.
find_python() {
    local candidate any=
    for candidate in ${PYTHON:-} build/venv/bin/python python3 python /usr/local/bin/python3 {/opt/*,~,~/*}{,/.venv}/bin/python3; do
        command -v "$candidate" >/dev/null || continue
        any=${any:-$candidate}
        timeout 20 "$candidate" -c 'import importlib.util as u; raise SystemExit(u.find_spec("torch") is None)' 2>/dev/null &&
            { echo "$candidate"; return; }
    done
    echo "$any"
}
has_torch() { [ -n "$python" ] && "$python" -c 'import importlib.util as u; raise SystemExit(u.find_spec("torch") is None)'; }

# find_tool NAME: prints its path in a toolkit or its profiler; only the name if nowhere.
find_tool() {
    local path
    for path in "$(command -v "$1")" /usr/local/cuda*/bin/"$1" /opt/nvidia/nsight-compute/*/"$1" "$1"; do
        [ ! -x "$path" ] || break
    done
    echo "$path"
}

# ---- sizes ----

trainer() { echo "$bin/$1/train_gpt2cu"; }
main=BF16 # the precision that is measured, of those in the kit
for precision in FP16 FP32; do [ -x "$(trainer $main)" ] || main=$precision; done
if [ $toy = on ]; then
    # model, batch, tokens of an update, steps
    speed=(toy 2 64 4) models=("toy 2 32 4") device=cpu seq_len=16 warm=1 memory_models=("toy 2") memory_steps=2 curve=(toy 2 2)
    # matmuls of experts take minutes on the simulated GPU
    bench=("d6 1 --seq-len 16 --seconds 0 --ceiling 64 --only layers,attention,rows,tokens,optimizer,heads,adamw8bit,adafactor,muon")
    tiles=("d6 1 --seq-len 16 --seconds 0 --ceiling 64 --only attention-tiles,rows,heads") ways=("toy 2 32 3 mma,race,fp8") families=("toy-llama 2 32 3")
else
    speed=(d12 64 65536 15) models=("d24 64 131072 15" "d36 32 65536 15" "d48 32 65536 15") device=cuda seq_len=1024 warm=5
    [ $full = on ] && speed=(d12 64 524288 15) models=("d24 64 524288 15" "d36 32 524288 15" "d48 32 524288 15")
    memory_models=("d24 16" "d48 8") memory_steps=30 curve=(d12 16 100)
    bench=("d12 64" "d48 16")
    tiles=("d12 64 --only attention-tiles,layers,rows,heads,experts" "d12 8 --seq-len 4096 --only attention-tiles")
    # and kinds of item_ways; two micro-steps where fp8 keeps the codes of weights
    ways=("d12 64 65536 40 mma,wgmma,mma,wgmma,race,fp8" "d48 16 32768 12 race,fp8" "llama:1b 8 16384 12 race,fp8"
        "qwen3:0.6b 16 16384 15 mma,race" "moe:8x124m 32 32768 15 race")
    families=("llama:1b 8 16384 15" "qwen3:0.6b 16 16384 15")
fi

# Writes random tokens below 50116: every byte below 196, as uint16, after the header of a shard.
random_shard() {
    local tokens=$1
    { printf '\x88\xd8\x34\x01\x01\0\0\0'
      printf %b "$(printf '\\x%02x\\x%02x\\x%02x\\x00' $((tokens & 255)) $((tokens >> 8 & 255)) $((tokens >> 16 & 255)))"
      head -c 1012 /dev/zero
      head -c $((2 * tokens)) /dev/urandom | LC_ALL=C tr '\304-\377' '\000-\073'; } >"$2"
}
shard=$work/random.bin
random_shard 2000000 "$shard"

# Prints the options of the trainer for a model; toy is no preset.
model_options() {
    case $1 in
    toy) echo --layers 1 --channels 32 --heads 2 --context 1024 ;;
    toy-llama) echo --arch llama --layers 1 --channels 32 --heads 2 --hidden 64 --context 1024 ;;
    *) echo --model "$1" ;;
    esac
}

# ours NAME PRECISION MODEL BATCH TOTAL STEPS [OPTION...]: trains, and writes NAME.jsonl.
ours() {
    local name=$1 precision=$2 model=$3 batch=$4 total=$5 steps=$6
    shift 6
    rm -rf "$work/run"
    # shellcheck disable=SC2046
    trial "$name" 90 "$(trainer "$precision")" $(model_options "$model") --train-data "$shard" --batch "$batch" \
        --seq-len $seq_len --total-batch "$total" --steps "$steps" --shuffle off --schedule constant --warmup 0 \
        --lr 6e-4 --beta2 0.95 --eval-every 0 --sample-every 0 --save-every 0 --out "$work/run" "$@" &&
        mv "$work/run/log.jsonl" "$out/$name.jsonl"
}

# theirs NAME SECONDS DTYPE MODEL BATCH TOTAL STEPS [OPTION...]: trains in PyTorch; NAME.jsonl has a
# line for each combination.
theirs() {
    local name=$1 limit=$2 dtype=$3 model=$4 batch=$5 total=$6 steps=$7
    shift 7
    has_torch || { record "$name" skipped 0 "no Python with PyTorch"; return 1; }
    trial "$name" "$limit" "$python" "$kit_dir/dev/bench/pytorch_gpt2.py" --model "$model" --data "$shard" --batch "$batch" \
        --seq-len $seq_len --total-batch "$total" --steps "$steps" --dtype "$dtype" --device $device "$@"
    grep -a '^{"system"' "$out/$name.log" >"$out/$name.jsonl" # even of a run that was stopped
}
theirs_list() { sed -n "s/.*\"$1\": \[\([^]]*\)\].*/\1/p" | tr ',' '\n'; }
theirs_word() { sed -n "s/.*\"$1\": \"\([^\"]*\)\".*/\1/p"; }

# Writes power and clock while a command runs, one line a second into FILE: watts, MHz.
watch_card() { nvidia-smi --query-gpu=power.draw,clocks.sm --format=csv,noheader,nounits -l 1 >"$1" 2>/dev/null & }
middle() { # COLUMN FILE: prints the median
    cut -d , -f "$1" "$2" 2>/dev/null | tr -d ' ' | spread | cut -d ' ' -f 1
}

# row NAME SYSTEM MODEL TOTAL PEAK: prints a row of a table of speed from the milliseconds on
# standard input, and a line of summary.jsonl.
row() {
    local name=$1 system=$2 model=$3 total=$4 peak=$5 ms low high watts clock
    read -r ms low high < <(spread)
    [ -n "${ms:-}" ] || return
    watts=$(middle 1 "$out/$name.smi") clock=$(middle 2 "$out/$name.smi")
    awk -v s="$system" -v m="$model" -v t="$total" -v ms="$ms" -v lo="$low" -v hi="$high" -v p="$peak" -v w="$watts" \
        -v c="$clock" -v flop="$flop_per_token" -v most="$most_flops" 'BEGIN { speed = t / ms * 1e3
        printf "| %s | %s | %d | %.1f | %.1f to %.1f | %.0f | %s | %s | %s | %s |\n", m, s, t, ms, lo, hi, speed,
            flop * most ? sprintf("%.1f %%", 100 * speed * flop / most) : "", p, w, c }' | tee -a "$summary"
    printf '{"item":"speed","system":"%s","model":"%s","total_batch":%s,"ms":%s,"p10":%s,"p90":%s,"peak_mb":"%s","watts":"%s","mhz":"%s"}\n' \
        "$system" "$model" "$total" "$ms" "$low" "$high" "$peak" "$watts" "$clock" >>"$out/summary.jsonl"
}

# Sets the terms of an MFU: FLOP per token, and the peak FLOP/s of the card, according to the
# trainer's plan.
set_ceiling() {
    local plan
    # shellcheck disable=SC2046
    plan=$("$(trainer $main)" $(model_options "$1") --train-data "$shard" --seq-len $seq_len --batch 1 --steps 1 --plan 2>/dev/null)
    flop_per_token=$(sed -n 's/^work: .* tokens x \([^ ]*\) FLOP .*/\1/p' <<<"$plan")
    most_flops=$(sed -n 's/^time: .* at the peak of \([^ ]*\) GFLOP.*/\1e9/p; s/^time: .* at the peak of \([^ ]*\) TFLOP.*/\1e12/p' <<<"$plan")
}
peak_of() { sed -n 's/.*"peak_mb":[ ]*\([0-9]*\).*/\1/p' "$1" | tail -n 1; }

# ---- items ----

speed_head() {
    say "" && say "## $1: T=$seq_len, random tokens, median of the steps after the first $warm" && say ""
    say "| model | system | tokens of an update | ms | p10 to p90 | tok/s | MFU | peak MiB | W | MHz |"
    say "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
}

# our_speed NAME VARIANT MODEL BATCH TOTAL STEPS [OPTION...]: prints a row; the algorithms of the
# matmuls are in the log.
our_speed() {
    local name=$1 variant=$2 model=$3 total=$5 steps=$6 watcher
    watch_card "$out/$name.smi"
    watcher=$!
    ours "$@" --gpu-report "$steps" &&
        field ms "$out/$name.jsonl" | tail -n +$((warm + 1)) |
        row "$name" "ours $variant ${*:7}" "$model" "$total" "$(peak_of "$out/$name.jsonl")"
    kill $watcher 2>/dev/null
    grep -a -E '^(matmul|attention) ' "$out/$name.log" >"$out/$name.matmuls"
}

# their_speed NAME SECONDS MODEL BATCH TOTAL STEPS OPTION...: prints a row for each combination.
# Sets best_sdpa, best_compile.
best_sdpa=flash best_compile=default
their_speed() {
    local name=$1 model=$3 total=$5 watcher line ms least=
    watch_card "$out/$name.smi"
    watcher=$!
    theirs "$name" "$2" bf16 "${@:3}"
    kill $watcher 2>/dev/null
    [ -f "$out/$name.jsonl" ] || return
    while read -r line; do
        local sdpa compile
        sdpa=$(theirs_word sdpa <<<"$line") compile=$(theirs_word compile <<<"$line")
        ms=$(theirs_list ms <<<"$line" | tail -n +$((warm + 1)) | spread | cut -d ' ' -f 1)
        [ -n "$ms" ] || { say "- PyTorch, $sdpa, $compile: $(theirs_word error <<<"$line")"; continue; }
        theirs_list ms <<<"$line" | tail -n +$((warm + 1)) |
            row "$name" "PyTorch $sdpa $compile" "$model" "$total" "$(sed -n 's/.*"peak_mb":[ ]*\([0-9]*\).*/\1/p' <<<"$line")"
        awk -v a="$ms" -v b="${least:-1e99}" 'BEGIN { exit !(a < b) }' && least=$ms best_sdpa=$sdpa best_compile=$compile
    done <"$out/$name.jsonl"
}

# Runs tests of the kit.
modules() { # SECONDS "PROGRAM [WORD...]"...: all tests of a program, or those whose names have a word
    local test words
    for test in "${@:2}"; do
        read -r -a words <<<"$test"
        trial "${test// /-}" "$1" "$bin/${words[0]}" "${words[@]:1}"
    done
}
whole_model() { trial "test_gpt2-$1" 90 "$bin/$1/test_gpt2"; }

item_first() {
    nvidia-smi -q -d CLOCK,POWER,MEMORY >"$out/nvidia-smi.log" 2>&1
    { uname -a; lscpu; free -m; ldd --version | head -n 1; find "$bin" -type f -exec ldd {} +; } >"$out/machine.log" 2>&1
    modules 25 test_gpu "test_ops matmul"
}

item_speed() {
    local level fusion
    speed_head "Speed"
    set_ceiling "${speed[0]}"
    for level in 0 1; do
        our_speed "speed-${speed[0]}-recompute-$level" $main "${speed[@]}" --recompute $level
    done
    for fusion in 0 1 2; do # by default autotune chooses one of them
        our_speed "speed-${speed[0]}-gelu-$fusion" $main "${speed[@]}" --recompute 0 --gelu-fusion $fusion
    done
    our_speed "speed-${speed[0]}-again" $main "${speed[@]}" --recompute 0 # the noise
}

item_tests() {
    modules 90 "test_ops attention"
    whole_model $main
}

# Without a graph, kernels have names. The algorithms come from item_speed, so autotune launches
# nothing.
item_step() {
    local metrics=gpu__time_duration.sum,dram__bytes.sum,sm__inst_executed.sum,sm__inst_executed_pipe_tensor.sum ncu
    ncu=$(find_tool ncu)
    # shellcheck disable=SC2046
    trial step-kernels 150 "$ncu" --clock-control none --print-units base --metrics $metrics --csv --log-file "$out/step-kernels.csv" \
        "$(trainer $main)" $(model_options "${speed[0]}") --train-data "$shard" --batch "${speed[1]}" --seq-len $seq_len \
        --total-batch $((speed[1] * seq_len)) --steps 2 --graph off --shuffle off --recompute 0 --eval-every 0 --sample-every 0 \
        --save-every 0 || return
    [ -n "$python" ] && "$python" "$kit_dir/dev/bench/ncu_table.py" "$out/step-kernels.csv" --steps 2 >"$out/step-kernels.md" || return
    say "" && say "## Kernels of one step" && say "" && tee -a "$summary" <"$out/step-kernels.md" && say ""
}

item_bench() {
    local entry
    for entry in "${bench[@]}"; do
        # shellcheck disable=SC2086
        set -- $entry
        trial "bench-$1" 90 "$bin/bench_gpu" --model "$1" --batch "$2" "${@:3}" --json "$out/bench-$1.jsonl" &&
            { say '```' && grep '%$' "$out/bench-$1.log" | tee -a "$summary" && say '```'; }
    done
}

item_cudnn() {
    [ -d "$bin/BF16-cudnn" ] || { record cudnn skipped 0 "not in the kit"; return; }
    whole_model BF16-cudnn
    speed_head "Speed with cuDNN's attention"
    set_ceiling "${speed[0]}"
    our_speed "speed-${speed[0]}-cudnn" BF16-cudnn "${speed[@]}" --recompute 0
}

item_precisions() {
    local precision
    for precision in FP16 FP32; do [ $precision = $main ] || whole_model $precision; done
}

item_peer() {
    speed_head "124M beside PyTorch"
    set_ceiling "${speed[0]}"
    our_speed "peer-${speed[0]}-ours" $main "${speed[@]}"
    their_speed "peer-${speed[0]}" 210 "${speed[@]}" --sdpa best --compile default
    our_speed "peer-${speed[0]}-ours-again" $main "${speed[@]}"
}

item_models() {
    local entry
    speed_head "Larger models"
    for entry in "${models[@]}"; do
        # shellcheck disable=SC2086
        set -- $entry
        set_ceiling "$1"
        our_speed "models-$1-ours" $main "$@"
        their_speed "models-$1" 120 "$@" --sdpa "$best_sdpa" --compile "$best_compile"
    done
    set_ceiling "${speed[0]}"
    their_speed "peer-${speed[0]}-tuned" 150 "${speed[@]}" --sdpa "$best_sdpa" --compile off,max-autotune
}

item_families() {
    local entry
    speed_head "Models of other families"
    for entry in "${families[@]}"; do
        # shellcheck disable=SC2086
        set -- $entry
        set_ceiling "$1"
        our_speed "families-${1//:/-}-ours" $main "$@" --attention race
        their_speed "families-${1//:/-}" 150 "$@" --sdpa auto --compile "$([ $toy = on ] && echo off || echo default)"
    done
}

item_modules() {
    local program
    for program in "$bin"/test_*; do
        [ "${program##*/}" = test_gpu ] || modules 120 "${program##*/}"
    done
}

item_memory() {
    local entry model batch
    for entry in "${memory_models[@]}"; do
        read -r model batch <<<"$entry"
        say "" && say "## Memory: $model" && say ""
        trial "memory-$model" 500 "$kit_dir/dev/bench/memory_table.sh" --on gpu --bin "$bin" --model "$model" --batch "$batch" \
            --seq-len $seq_len --steps $memory_steps --data "$shard"
        grep '^|' "$out/memory-$model.log" | tee -a "$summary"
    done
}

item_sanitizer() {
    local tool
    [ $toy = off ] || { record sanitizer skipped 0 "not on the simulated GPU"; return; }
    for tool in memcheck racecheck; do
        trial "sanitizer-$tool" 120 "$(find_tool compute-sanitizer)" --tool $tool --error-exitcode 9 "$bin/$main/test_gpt2" &&
            say "- $tool: $(grep -m 1 SUMMARY "$out/sanitizer-$tool.log")"
    done
}

item_curve() {
    local model=${curve[0]} batch=${curve[1]} steps=${curve[2]} total dtype text=$kit_dir/text.bin shard=$shard
    total=$((batch * seq_len))
    say "" && say "## The same first weights and data: loss of step 1, $steps, and the mean of the last tenth" && say ""
    if [ -f "$text" ]; then shard=$text; else say "(random tokens: the kit was made without KIT_TEXT)"; fi
    # shellcheck disable=SC2046
    trial first-weights 60 "$(trainer FP32)" $(model_options "$model") --train-data "$shard" --batch 1 --seq-len $seq_len --steps 0 \
        --eval-every 0 --sample-every 0 --export-llmc "$work/first.bin" || return
    for dtype in BF16 FP32; do
        ours "curve-$dtype" $dtype "$work/first.bin" "$batch" "$total" "$steps" &&
            field loss "$out/curve-$dtype.jsonl" | curve_row "ours $dtype"
    done
    for dtype in bf16 fp32; do
        theirs "curve-pytorch-$dtype" 100 $dtype "$model" "$batch" "$total" "$steps" --init "$work/first.bin" &&
            theirs_list losses <"$out/curve-pytorch-$dtype.jsonl" | curve_row "PyTorch $dtype"
    done
}
curve_row() {
    awk -v name="$1" '{ x[NR] = $1 } END { for (i = NR - int(NR / 10); i <= NR; i++) { s += x[i]; n++ }
        printf "- %s: %.5f, %.5f, %.5f\n", name, x[1], x[NR], s / n }' | tee -a "$summary"
}

# Tests with a limit on waits come first: kernels by wgmma that are wrong, or wait for ever, cost
# seconds.
attentions="mma"
item_wgmma() {
    nvidia-smi -q -d CLOCK,POWER,MEMORY >"$out/nvidia-smi.log" 2>&1
    modules 60 "test_ops attention expert_matmul" "test_ops heads norm matmul activation"
    if grep -q '^| test_ops-attention-expert_matmul | passed ' "$out/results.txt" && [ $main != FP32 ]; then
        attentions="mma wgmma"
    else
        say "- only mma is measured: the tests of wgmma have not passed"
    fi
}

item_tiles() {
    local entry n=0
    for entry in "${tiles[@]}"; do
        # shellcheck disable=SC2086
        set -- $entry
        n=$((n + 1))
        trial "tiles-$n" 60 "$bin/bench_gpu" --model "$1" --batch "$2" "${@:3}" --json "$out/tiles-$n.jsonl" &&
            { say '```' && grep '%$' "$out/tiles-$n.log" | tee -a "$summary" && say '```'; }
    done
}

# ways_options KIND: prints the options of a way to train; no wgmma unless its tests have passed.
ways_options() {
    local attention=race
    [ $toy = on ] || [ "$attentions" != mma ] || attention=mma # a race would try wgmma
    case $1 in
    race) echo "--attention $attention" ;;
    fp8) echo "--attention $attention --matmul fp8" ;;
    *) echo "--attention $1" ;;
    esac
}

# Power and clock of each run are in its row. Twice in turn: the noise is in the table.
item_ways() {
    local entry kind kinds number
    speed_head "Ways to train"
    for entry in "${ways[@]}"; do
        # shellcheck disable=SC2086
        set -- $entry
        set_ceiling "$1"
        number=0 kinds=${5//,/ }
        for kind in $kinds; do
            number=$((number + 1))
            [ "$kind" != wgmma ] || [ "$attentions" != mma ] || continue
            # shellcheck disable=SC2046
            our_speed "ways-${1//:/-}-$number-$kind" $main "${@:1:4}" --recompute 0 $(ways_options "$kind")
            grep -a -E '^attention |: done (in|without) fp8' "$out/ways-${1//:/-}-$number-$kind.log" 2>/dev/null | sed 's/^/- /' >>"$work/races"
        done
    done
    say "" && say "What autotune has found faster:" && say ""
    [ ! -f "$work/races" ] || sort -u "$work/races" | tee -a "$summary"
}

item_beside() {
    speed_head "124M beside PyTorch"
    set_ceiling "${speed[0]}"
    their_speed "beside-${speed[0]}" 120 "${speed[@]}" --sdpa flash --compile "$([ $toy = on ] && echo off || echo default)"
}

item_kernels() {
    item_step
    [ $toy = off ] || { record racecheck skipped 0 "not on the simulated GPU"; return; }
    trial racecheck 60 "$(find_tool compute-sanitizer)" --tool racecheck --error-exitcode 9 "$bin/test_ops" attention_race
}

# answers_of FILE: prints a line for each form of matmul: matmul|yes or no|reason, or error and
# whether it repeats.
answers_of() { sed -n 's/^\((.*\): \(yes\|no\) (\(.*\))$/\1|\2|\3/p' "$1"; }

item_answers() {
    local mine=$work/mine.txt simulated=$work/simulated.txt
    say "" && say "## What this card answers, and the simulator otherwise" && say ""
    modules 30 "test_gpu ptx"
    ! grep -q '^test_gpu: ' "$out/test_gpu-ptx.log" 2>/dev/null ||
        say "- instructions of llmc/gpu/ptx.cuh: $(grep -c FAILED: "$out/test_gpu-ptx.log") differences$(grep -m 3 FAILED: "$out/test_gpu-ptx.log" | sed 's/.*FAILED: /; /' | tr -d '\n')"
    trial answers 60 "$bin/gpu_answers"
    [ -f "$out/answers.log" ] || return
    answers_of "$out/answers.log" >"$mine"
    [ -s "$mine" ] || return # it ended before the first answer
    answers_of "$kit_dir/answers_simulated.txt" >"$simulated"
    say "- forms of matmul that cublasLt supports: $(grep -c '|yes|' "$mine") of $(wc -l <"$mine"); the simulator: $(grep -c '|yes|' "$simulated") of $(wc -l <"$simulated")"
    awk -F '|' 'NR == FNR { simulated[$1] = $2; next } simulated[$1] != $2 {
        printf "- %s: %s (%s); the simulator: %s\n", $1, $2, $3, simulated[$1] }' "$simulated" "$mine" | head -n 60 | tee -a "$summary"
    say "- forms that do not give the same bits twice: $(grep -c 'DOES NOT REPEAT' "$mine")"
    say "" && say "| types, and what follows the matmul | done | of | largest error, units in the last place | in the simulator |"
    say "|---|---:|---:|---:|---:|"
    awk -F '|' '{ form = $1; sub(/^.*\)(\^T)?, /, "", form); sub(/, aligned to [0-9]+/, "", form)
        error = $3; sub(/^off by /, "", error); sub(/,.*/, "", error); error += 0 }
        NR == FNR { if ($2 == "yes" && error > theirs[form]) theirs[form] = error; next }
        !all[form]++ { order[++n] = form }
        $2 == "yes" { yes[form]++; if (error > worst[form]) worst[form] = error }
        END { for (i = 1; i <= n; i++) { f = order[i]
            printf "| %s | %d | %d | %.2f | %.2f |\n", f, yes[f], all[f], worst[f], theirs[f] } }' "$simulated" "$mine" | tee -a "$summary"
}

item_fp8() {
    local entry
    speed_head "Matmuls in fp8"
    for entry in "${speed[*]}" "${models[@]}"; do
        # shellcheck disable=SC2086
        set -- $entry
        set_ceiling "$1"
        our_speed "fp8-$1-without" $main "$@"
        our_speed "fp8-$1" $main "$@" --matmul fp8
    done
}

# ---- the report ----

python=$(find_python)
say "# ${gpu//-/ }, $(date +%Y-%m-%d), part ${part:-A, B, C}"
say ""
say "$(paste -s -d ',' "$kit_dir/kit.txt" | sed 's/,\([^ ]\)/, \1/g'); driver" \
    "$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1); $(nproc) cores;" \
    "PyTorch: $(has_torch && echo "$python" || echo none)."
say ""
find_libraries
for item in $items; do
    case " ${only:-$items} " in *" $item "*) "item_$item" ;; esac
done
say "" && say "| item | result | s | |" && say "|---|---|---:|---|"
tee -a "$summary" <"$out/results.txt"
say ""
say "$(grep -c '| passed |' "$out/results.txt") passed, $(grep -c '| FAILED |' "$out/results.txt") failed," \
    "$(grep -c '| skipped |' "$out/results.txt") skipped; $((SECONDS - begin_s)) seconds in all; $archive"
pack
! grep -q '| FAILED |' "$out/results.txt"
