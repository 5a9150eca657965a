#!/usr/bin/env bash
# gpu_report.sh -- measures everything that only a GPU can show, unattended; from the top of the repository.
#
#     dev/bench/gpu_report.sh [--only ITEM,...] [--minutes N] [--full] [--toy] [--out DIR]
#
#     tests       native tests of the trainer in BF16, FP16, FP32 and of every module
#     speed       ms, tok/s, MFU, memory of the trainer at 124M to 1558M, each beside PyTorch in turn
#     kernels     every kernel and product against the ceilings (bench_gpu)
#     memory      each memory technique alone and combined: peak, tok/s, loss after 50 steps
#     sanitizer   compute-sanitizer: memcheck and racecheck on the whole-model test
#     curve       100 steps of 124M on the same text: BF16, FP32 and PyTorch
#
# Writes DIR (dev/bench/results/<gpu>-<date>): summary.md, summary.jsonl, and the raw log of every command. An item
# that fails is named in the summary and the rest goes on (exit status 1); what does not begin within the minutes (8) is left out.
# --full takes total batches of 524,288 tokens for all models; --toy tries the script itself, on the simulated GPU
# and with PyTorch on the CPU, at sizes that show nothing about speed. PYTHON names a Python with PyTorch.
set -u
cd "$(dirname "$0")/../.." || exit 1

only=tests,speed,kernels,memory,sanitizer,curve minutes=8 full=off toy=off out=
while [ $# -gt 0 ]; do
    case $1 in
    --only) only=$2 && shift 2 ;;
    --minutes) minutes=$2 && shift 2 ;;
    --out) out=$2 && shift 2 ;;
    --full) full=on && shift ;;
    --toy) toy=on && shift ;;
    *) sed -n '2,19s/^# \{0,1\}//p' "$0" && exit 2 ;;
    esac
done

python=${PYTHON:-$([ -x build/venv/bin/python ] && echo build/venv/bin/python || echo python3)}
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | tr ' ' '-')
[ $toy = on ] && gpu=toy
[ -n "$gpu" ] || { echo "error: no GPU found by nvidia-smi; --toy tries the script without one" >&2; exit 1; }
out=${out:-dev/bench/results/${gpu,,}-$(date +%Y-%m-%d)}
mkdir -p "$out" || exit 1
rm -f "$out"/*.log "$out"/summary.*
begin_s=$SECONDS
summary=$out/summary.md

say() { echo "$*" | tee -a "$summary"; }
left_s() { echo $((minutes * 60 - SECONDS + begin_s)); }

# trial NAME SECONDS COMMAND...: runs it with its output in NAME.log; says so if it fails or there is no time.
trial() {
    local name=$1 limit=$2 status
    shift 2
    [ "$(left_s)" -gt 0 ] || { say "- $name: left out, the time was over"; return 1; }
    { echo "\$ $*"; date; } >"$out/$name.log"
    timeout "$limit" "$@" >>"$out/$name.log" 2>&1
    status=$?
    [ $status = 0 ] && return 0
    say "- $name: FAILED (exit status $status): $(grep -a -m 1 -E 'error|Error|FAILED' "$out/$name.log" | cut -c 1-200)"
    return 1
}

# median of the numbers on standard input, and their 10th and 90th percentile
spread() { sort -n | awk '{ x[NR] = $1 } END { if (NR) print x[int((NR + 1) / 2)], x[int(NR * 0.1) + 1], x[int(NR * 0.9 + 0.999)] }'; }

# field NAME FILE: the values of a number in lines of training
field() { sed -n "/\"kind\":\"train\"/s/.*\"$1\":\([-0-9.e+]*\).*/\1/p" "$2"; }

# ---- programs and sizes ----

if [ $toy = on ]; then
    variants=(BF16) device=cpu
    trainer() { echo "build/sim/$1/train_gpt2cu"; }
    build() { make -s sim PRECISION=BF16 && make -s sim PRECISION=FP32; }
    # name, options of the trainer, batch, tokens of an update, steps
    models=("toy 2 64 4") seq_len=16 warm=1 memory_models=("toy 2") memory_steps=2 curve=(toy 2 2)
else
    variants=(BF16 FP16 FP32) device=cuda
    for precision in BF16 FP16 FP32; do mkdir -p "build/report/$precision"; done
    trainer() { echo "build/report/$1/train_gpt2cu"; }
    build() {
        local precision
        for precision in BF16 FP16 FP32; do
            make -s -j"$(nproc)" train_gpt2cu PRECISION="$precision" && mv train_gpt2cu "build/report/$precision/" || return 1
        done
    }
    models=("d12 64 524288 25" "d24 64 131072 25" "d36 32 65536 25" "d48 32 65536 25") seq_len=1024 warm=5
    [ $full = on ] && models=("d12 64 524288 25" "d24 64 524288 25" "d36 32 524288 25" "d48 32 524288 25")
    memory_models=("d24 16" "d48 8") memory_steps=50 curve=(d12 16 100)
fi

# Random tokens below 50116: every byte below 196, as uint16, behind the header of a shard.
random_shard() {
    local tokens=$1
    { printf '\x88\xd8\x34\x01\x01\0\0\0'
      printf %b "$(printf '\\x%02x\\x%02x\\x%02x\\x00' $((tokens & 255)) $((tokens >> 8 & 255)) $((tokens >> 16 & 255)))"
      head -c 1012 /dev/zero
      head -c $((2 * tokens)) /dev/urandom | LC_ALL=C tr '\304-\377' '\000-\073'; } >"$2"
}
shard=$out/random.bin
random_shard 2000000 "$shard"
trap 'rm -rf "$shard" "$out"/run' EXIT

# The options of the trainer for a model; toy has no name there.
model_options() { if [ "$1" = toy ]; then echo --layers 1 --channels 32 --heads 2 --context 1024; else echo --model "$1"; fi; }

# ours NAME PRECISION MODEL BATCH TOTAL STEPS [OPTION...]: trains, and leaves NAME.jsonl
ours() {
    local name=$1 precision=$2 model=$3 batch=$4 total=$5 steps=$6
    shift 6
    rm -rf "$out/run"
    # shellcheck disable=SC2046
    trial "$name" 300 "$(trainer "$precision")" $(model_options "$model") --train-data "$shard" --batch "$batch" \
        --seq-len $seq_len --total-batch "$total" --steps "$steps" --shuffle off --schedule constant --warmup 0 \
        --lr 6e-4 --beta2 0.95 --eval-every 0 --sample-every 0 --save-every 0 --out "$out/run" "$@" &&
        mv "$out/run/log.jsonl" "$out/$name.jsonl"
}

theirs() { # NAME DTYPE MODEL BATCH TOTAL STEPS [OPTION...]: the same in PyTorch, whose last line is NAME.jsonl
    local name=$1 dtype=$2 model=$3 batch=$4 total=$5 steps=$6
    shift 6
    trial "$name" 300 "$python" dev/bench/pytorch_gpt2.py --model "$model" --data "$shard" --batch "$batch" \
        --seq-len $seq_len --total-batch "$total" --steps "$steps" --dtype "$dtype" --device $device "$@" &&
        tail -n 1 "$out/$name.log" >"$out/$name.jsonl"
}
theirs_list() { sed "s/.*\"$1\": \[\([^]]*\)\].*/\1/" "$2" | tr ',' '\n'; }

# row SYSTEM MODEL TOTAL LOG-OF-MS PEAK: a row of the table of speed, and a line of summary.jsonl
row() {
    local system=$1 model=$2 total=$3 peak=$4 ms low high
    read -r ms low high
    [ -n "${ms:-}" ] || return
    awk -v s="$system" -v m="$model" -v t="$total" -v ms="$ms" -v lo="$low" -v hi="$high" -v p="$peak" 'BEGIN {
        printf "| %s | %s | %d | %.1f | %.1f to %.1f | %.0f | %s |\n", m, s, t, ms, lo, hi, t / ms * 1e3, p }' |
        tee -a "$summary"
    printf '{"item":"speed","system":"%s","model":"%s","total_batch":%s,"ms":%s,"p10":%s,"p90":%s,"peak_mb":"%s"}\n' \
        "$system" "$model" "$total" "$ms" "$low" "$high" "$peak" >>"$out/summary.jsonl"
}
peak_of() { sed -n 's/.*"peak_mb":[ ]*\([0-9]*\).*/\1/p' "$1" | tail -n 1; }

# ---- items ----

item_tests() {
    local precision program
    say "" && say "## Tests" && say ""
    if [ $toy = on ]; then
        make -s build/sim/BF16-plain/test_gpt2 && trial test_gpt2-BF16 300 build/sim/BF16-plain/test_gpt2 && say "- test_gpt2 BF16: ok"
        return
    fi
    for precision in "${variants[@]}"; do
        make -s -j"$(nproc)" "$(make -s print-gpu-build PRECISION="$precision")/test_gpt2" PRECISION="$precision" >"$out/build-$precision.log" 2>&1
        trial "test_gpt2-$precision" 120 "$(make -s print-gpu-build PRECISION="$precision")/test_gpt2" && say "- test_gpt2 $precision: ok"
    done
    make -s -k -j"$(nproc)" gpu-tests PRECISION=BF16 >"$out/build-modules.log" 2>&1
    for program in "$(make -s print-gpu-build PRECISION=BF16)"/test_*; do
        case $program in *.o | *.d | */test_gpt2) continue ;; esac
        trial "$(basename "$program")" 60 "$program" && say "- $(basename "$program"): ok"
    done
}

item_speed() {
    local model batch total steps name
    say "" && say "## Speed: T=$seq_len, random tokens, median of the steps after the first $warm" && say ""
    say "| model | system | tokens of an update | ms | p10 to p90 | tok/s | peak MB |"
    say "|---|---|---:|---:|---:|---:|---:|"
    for name in "${models[@]}"; do
        read -r model batch total steps <<<"$name"
        ours "speed-$model" BF16 "$model" "$batch" "$total" "$steps" &&
            field ms "$out/speed-$model.jsonl" | tail -n +$((warm + 1)) | spread |
            row "ours BF16" "$model" "$total" "$(peak_of "$out/speed-$model.jsonl")"
        theirs "speed-$model-pytorch" bf16 "$model" "$batch" "$total" "$steps" &&
            theirs_list ms "$out/speed-$model-pytorch.jsonl" | tail -n +$((warm + 1)) | spread |
            row "PyTorch compile" "$model" "$total" "$(peak_of "$out/speed-$model-pytorch.jsonl")"
    done
    read -r model batch total steps <<<"${models[0]}" # once more: the noise
    ours "speed-$model-again" BF16 "$model" "$batch" "$total" "$steps" &&
        field ms "$out/speed-$model-again.jsonl" | tail -n +$((warm + 1)) | spread |
        row "ours BF16, again" "$model" "$total" "$(peak_of "$out/speed-$model-again.jsonl")"
    if [ $toy = off ]; then # PyTorch at its best
        theirs "speed-$model-pytorch-best" bf16 "$model" "$batch" "$total" "$steps" --compile max-autotune-no-cudagraphs &&
            theirs_list ms "$out/speed-$model-pytorch-best.jsonl" | tail -n +$((warm + 1)) | spread |
            row "PyTorch max-autotune" "$model" "$total" "$(peak_of "$out/speed-$model-pytorch-best.jsonl")"
    fi
}

item_kernels() {
    local bench model
    say "" && say "## Kernels: share of the ceilings" && say ""
    if [ $toy = on ]; then
        mkdir -p build/report
        CUSIM_FLAGS=-DPRECISION_BF16 dev/cusim/build.sh dev/bench/bench_gpu.cu plain build/report/bench_gpu || return
        trial kernels-d6 300 build/report/bench_gpu --model d6 --batch 1 --seq-len 16 --seconds 0 --ceiling 64 --json "$out/kernels-d6.jsonl"
    else
        bench=$(make -s print-gpu-build PRECISION=BF16)/bench_gpu
        make -s "$bench" PRECISION=BF16 >"$out/build-bench.log" 2>&1
        for model in "d12 64" "d48 16"; do
            read -r model batch <<<"$model"
            trial "kernels-$model" 120 "$bench" --model "$model" --batch "$batch" --json "$out/kernels-$model.jsonl"
        done
    fi
    say '```'
    grep -h '%$' "$out"/kernels-*.log | tee -a "$summary"
    say '```'
}

item_memory() {
    local model batch entry name options technique
    local techniques=("vanilla:--recompute 0" "recompute 1:--recompute 1" "recompute 2:--recompute 2"
        "recompute 3:--recompute 3" "no master weights:--recompute 0 --master-weights off"
        "accumulation:--recompute 0 --batch 1" "all:--recompute 3 --master-weights off --batch 1")
    say "" && say "## Memory techniques, BF16, loss after $memory_steps steps" && say ""
    say "| model | technique | peak MB | tok/s | loss |"
    say "|---|---|---:|---:|---:|"
    for entry in "${memory_models[@]}"; do
        read -r model batch <<<"$entry"
        for technique in "${techniques[@]}"; do
            name=memory-$model-${technique%%:*} options=${technique#*:} name=${name// /-}
            local micro=$batch
            case $options in *--batch*) micro=${options##*--batch } options=${options%%--batch*} ;; esac
            # shellcheck disable=SC2086
            ours "$name" BF16 "$model" "$micro" $((batch * seq_len)) $memory_steps $options || continue
            say "| $model | ${technique%%:*} | $(peak_of "$out/$name.jsonl") | $(field tok_per_s "$out/$name.jsonl" | spread |
                cut -d ' ' -f 1) | $(field loss "$out/$name.jsonl" | tail -n 1) |"
        done
    done
}

item_sanitizer() {
    local tool test
    say "" && say "## compute-sanitizer on the whole-model test" && say ""
    [ $toy = off ] || { say "- not on the simulated GPU"; return; }
    test=$(make -s print-gpu-build PRECISION=BF16)/test_gpt2
    for tool in memcheck racecheck; do
        trial "sanitizer-$tool" 240 compute-sanitizer --tool $tool --error-exitcode 9 "$test" &&
            say "- $tool: $(grep -m 1 SUMMARY "$out/sanitizer-$tool.log")"
    done
}

item_curve() {
    local model=${curve[0]} batch=${curve[1]} steps=${curve[2]} total dtype text=${TINY_TEXT:-../shared/data/tinyshakespeare.txt}
    total=$((batch * seq_len))
    say "" && say "## The same first weights and data: loss of step 1, $steps, and the mean of the last tenth" && say ""
    if [ -x tokenize ] && [ -f "$text" ]; then
        ./tokenize --out "$out/text" --val-tokens 0 ${GPT2_VOCAB:+--tokenizer "$GPT2_VOCAB"} "$text" >"$out/tokenize.log" 2>&1 &&
            mv "$out/text_train_000001.bin" "$shard"
    else
        say "(random tokens: no ./tokenize or no text at TINY_TEXT)"
    fi
    # shellcheck disable=SC2046
    trial first-weights 120 "$(trainer FP32)" $(model_options "$model") --train-data "$shard" --batch 1 --seq-len $seq_len --steps 0 \
        --eval-every 0 --sample-every 0 --export-llmc "$out/first.bin" || return
    for dtype in BF16 FP32; do
        ours "curve-$dtype" $dtype "$out/first.bin" "$batch" "$total" "$steps" &&
            field loss "$out/curve-$dtype.jsonl" | curve_row "ours $dtype"
    done
    for dtype in bf16 fp32; do
        theirs "curve-pytorch-$dtype" $dtype "$model" "$batch" "$total" "$steps" --init "$out/first.bin" &&
            theirs_list losses "$out/curve-pytorch-$dtype.jsonl" | curve_row "PyTorch $dtype"
    done
    rm -f "$out/first.bin"
}
curve_row() {
    awk -v name="$1" '{ x[NR] = $1 } END { for (i = NR - int(NR / 10); i <= NR; i++) { s += x[i]; n++ }
        printf "- %s: %.5f, %.5f, %.5f\n", name, x[1], x[NR], s / n }' | tee -a "$summary"
}

# ---- the report ----

say "# ${gpu//-/ }, $(date +%Y-%m-%d)"
say ""
say "Commit $(git describe --always --dirty 2>/dev/null), $(nvcc --version 2>/dev/null | sed -n 's/.*release \([^,]*\).*/CUDA \1/p')," \
    "driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)," \
    "PyTorch $("$python" -c 'import torch; print(torch.__version__)' 2>/dev/null || echo missing)."
say "Command: dev/bench/gpu_report.sh $([ $full = on ] && echo --full) --only $only --minutes $minutes"
nvidia-smi -q -d CLOCK,POWER >"$out/nvidia-smi.log" 2>&1
build >"$out/build.log" 2>&1 || say "- the build FAILED: $(grep -m 1 error "$out/build.log")"
for item in tests speed kernels memory sanitizer curve; do
    case ,$only, in *,$item,*) "item_$item" ;; esac
done
say ""
say "$((SECONDS - begin_s)) seconds in all."
echo && cat "$summary"
! grep -q FAILED "$summary"
