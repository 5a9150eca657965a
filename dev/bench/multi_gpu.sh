#!/usr/bin/env bash
# multi_gpu.sh -- gains of several GPUs in one machine: bandwidth between them, speed of training by
# their number and by --zero, speed of a model that is split (--tensor-parallel,
# --context-parallel, --pipeline-parallel), of grids of four GPUs in which layers and micro-batches
# are divided, and whether the bits are the same. After the build it needs 12 minutes at most.
#
#     dev/bench/multi_gpu.sh                    all GPUs of this machine, GPT-2 124M
#     GPUS=4 MODEL=d24 BATCH=32 dev/bench/multi_gpu.sh
#     TOY=1 dev/bench/multi_gpu.sh              two simulated GPUs, a tiny model: tests the script
#
# In a kit (`make gpu-kit`) it uses the programs that are there, and finds CUDA's libraries and NCCL,
# also in PyTorch's wheels. Ranks are started by mpirun, if there is one and the trainer was built
# with MPI; else by this script, as torchrun does. LAUNCH=mpirun|script chooses.
#
# Results: $OUT/multi_gpu.md (OUT: build/multi_gpu), tables that grow while it runs, beside the
# output of each run. MINUTES is the limit; what does not fit into it is left out and reported. The
# exit status is 1 if a run fails or bits differ.
set -u
cd "$(dirname "$0")/../.." || exit 1
unset MAKEFLAGS MFLAGS MAKELEVEL
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 # a container's only user may be root

toy=${TOY:+on}
toy=${toy:-off}
out=$(realpath -m "${OUT:-build/multi_gpu}")
gpus=${GPUS:-$([ $toy = on ] && echo 2 || nvidia-smi -L 2>/dev/null | wc -l)}
seconds=$((${MINUTES:-12} * 60))
die() {
    echo "error: $*" >&2
    exit 1
}
[ "$gpus" -ge 2 ] || die "$gpus GPUs; wanted 2 or more (TOY=1 tries the script on simulated ones)"

# programs FOLDER TRAINER BENCH: builds them, unless this is a kit; sets `trainer` and `bench`.
programs() {
    bin=bin/BF16-nccl
    if [ -e kit.txt ]; then
        trainer=$PWD/$bin/train_gpt2cu bench=$PWD/$bin/bench_group
        [ -x "$trainer" ] || die "$trainer: no such file; wanted a kit with BF16-nccl"
    else
        trainer=$PWD/$1 bench=$PWD/$2
        make -s "$1" "$2" || exit 1
    fi
}
if [ $toy = on ]; then
    programs build/sim/BF16/train_gpt2cu build/sim/bench_group
    sizes=(4096 16384) debug_bytes=4096 beside_bytes=16384
    speed_run=(--layers 2 --channels 32 --heads 2 --seq-len 16 --batch 2 --total-batch 64 --steps 2)
    tiny_run=(--layers 2 --channels 32 --heads 2 --seq-len 16 --batch 2 --total-batch 96 --steps 2)
    split_model=(--layers 4 --channels 128 --heads 8)
    split_batch=(--seq-len 16 --batch 2 --total-batch 96 --steps 2)
    context_batch=(--seq-len $((256 * gpus)) --batch 1 --total-batch $((768 * gpus)) --steps 1) # chunks of whole tiles
    experts_model=(--arch mixtral --layers 2 --channels 64 --heads 4 --hidden 64 --experts 4)
    skipped_steps=0 most_s=9999
else
    build=$([ -e kit.txt ] || make -s print-GPU_BUILD)
    programs "$build/train_gpt2" "$build/bench_group"
    sizes=() debug_bytes=1048576 beside_bytes=67108864
    speed_run=(--model "${MODEL:-d12}" --vocab-size 50257 --batch "${BATCH:-32}" --total-batch 524288 --steps 14)
    tiny_run=(--model d6 --vocab-size 50257 --seq-len 256 --batch 8 --total-batch 20480 --steps 4) # 10 micro-batches
    split_model=(--model "${SPLIT_MODEL:-d24}" --vocab-size 50257)
    split_batch=(--seq-len 2048 --batch 2 --total-batch 131072 --steps 8) # 32 micro-batches
    context_batch=("${split_batch[@]}")
    experts_model=(--model moe:8x124m --vocab-size 50257)
    skipped_steps=4 most_s=120 # of a run: one that hangs leaves time for the others
fi
launcher=${LAUNCH:-$(command -v mpirun >/dev/null && grep -q MPI_Init_thread "$trainer" && echo mpirun || echo script)}

mkdir -p "$out" || exit 1
rm -rf "$out"/*.log "$out"/nccl.* "$out"/run_* "$out/multi_gpu.md"
begin_s=$SECONDS
bad=0
say() { echo "$*" | tee -a "$out/multi_gpu.md"; }
left_s() { echo $((seconds - SECONDS + begin_s)); }

# start SECONDS N COMMAND...: starts N ranks, and waits for them. Returns the exit status of one that
# failed.
start() {
    local n=$2 rank status=0 started=() port=$((20000 + RANDOM % 10000))
    if [ "$launcher" = mpirun ]; then
        timeout -k 5 "$1" mpirun --oversubscribe --bind-to none -n "$n" "${@:3}"
        return
    fi
    for ((rank = 0; rank < n; rank++)); do
        RANK=$rank WORLD_SIZE=$n LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$n MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
            timeout -k 5 "$1" "${@:3}" &
        started+=($!)
    done
    for rank in "${started[@]}"; do
        wait "$rank" || status=$?
    done
    return $status
}

# ranks NAME N COMMAND...: runs it on N GPUs, with its output in NAME.log. If it does not end well,
# reports this and returns 1, with one of these in `ended`: no time, refused (the model or the run
# does not suit the options), failed.
ranks() {
    local name=$1 n=$2 left status
    ended="no time"
    left=$(left_s)
    [ "$left" -gt 0 ] || return 1
    [ "$left" -lt $most_s ] || left=$most_s
    start "$left" "$n" "${@:3}" </dev/null >"$out/$name.log" 2>&1 && return
    status=$?
    [ "$(left_s)" -gt 0 ] || return 1
    ended=failed
    [ $status != 2 ] || ended=refused
    [ $ended = refused ] || bad=$((bad + 1))
    echo "$ended: $name: $(grep -m 1 -a '^error' "$out/$name.log" || tail -n 1 "$out/$name.log")" >&2
    return 1
}

# Prints the median of tok/s, without the first steps.
speed() {
    sed -n 's/.*"kind":"train".*"tok_per_s":\([0-9.e+]*\).*/\1/p' "$1/log.jsonl" | tail -n +$((skipped_steps + 1)) | sort -n |
        awk '{ x[NR] = $1 } END { if (NR) printf "%.0f", x[int((NR + 1) / 2)] }'
}

counts=()
for n in 1 2 4 8 16; do [ "$n" -gt "$gpus" ] || counts+=("$n"); done
header() {
    say "| --zero |$(printf ' GPUs: %s |' "${counts[@]}")"
    say "|---|$(printf -- '---:|%.0s' "${counts[@]}")"
}

# first_loss RUN: prints the validation loss before the first step, with all digits.
first_loss() { sed -n 's/.*"kind":"val","step":0,"loss":\([0-9.]*\),.*/\1/p' "$1/log.jsonl"; }

# same_split OPTION RUN ONE: succeeds if a run that this option splits has the bits of one GPU.
same_split() {
    if [ "$1" = --tensor-parallel ]; then # bf16 rounds by 2^-9
        awk -v a="$(first_loss "$2")" -v b="$(first_loss "$3")" 'BEGIN { exit !(a > 0 && (a / b - 1) ^ 2 < 0.004 ^ 2) }'
    else
        [ -n "$(first_loss "$2")" ] && [ "$(first_loss "$2")" = "$(first_loss "$3")" ]
    fi
}

# split OPTION N OPTIONS...: a line of the table, for a run that this option splits among N GPUs.
split() {
    local option=$1 n=$2 name=split_${1#--}_$2 speed same='' settings=("${split_batch[@]}")
    [ "$option" != --context-parallel ] || settings=("${context_batch[@]}")
    shift 2
    if ranks "$name" "$n" "$trainer" "${split_model[@]}" "${settings[@]}" "$@" --eval-every 1000 --eval-batches 4 --samples 0 --out "$out/run_$name"; then
        speed=$(speed "$out/run_$name")
        one=${one:-$speed}
        speed+=$(awk -v a="$speed" -v b="$one" -v n="$n" 'BEGIN { printf " (%.0f %%)", 100 * a / b / n }')
        if [ "$n" -gt 1 ]; then
            same=yes
            same_split "$option" "$out/run_$name" "$out/run_split_${option#--}_1" || { same=NO; bad=$((bad + 1)); }
        fi
    else
        speed=$ended
    fi
    say "| $* | $n | $speed | $same |"
}

say "# $gpus GPUs, $(date +%Y-%m-%d), $([ -e kit.txt ] && head -n 1 kit.txt || echo "commit $(git describe --always --dirty 2>/dev/null || echo unknown)")"
say
say "## This machine"
say
if [ -e kit.txt ]; then
    python=$(command -v python3)
    source dev/bench/libraries.sh
    find_libraries
fi
say "- ranks are started by $launcher; /dev/shm: $(df -h --output=avail /dev/shm | tail -n 1 | tr -d ' ') free"
NCCL_DEBUG=INFO NCCL_DEBUG_FILE=$out/nccl.%p ranks connections "$gpus" "$bench" $debug_bytes $debug_bytes &&
    say "- channels of NCCL: $(cat "$out"/nccl.* 2>/dev/null | grep -o ' via [A-Z0-9]*' | sort | uniq -c | awk '{ print $1, $2, $3 }' | paste -s -d ',' | sed 's/,/, /g; s/^$/none are told/')"
[ $toy = on ] || { say && nvidia-smi topo -m 2>&1 | sed 's/^/    /' | tee -a "$out/multi_gpu.md"; }
say
say "## Between the GPUs"
say
ranks bandwidth "$gpus" "$bench" "${sizes[@]}" && sed -n '/^[0-9]* x /,$p' "$out/bandwidth.log" | tee -a "$out/multi_gpu.md"
# The rate of the largest array, of the slower one of the two operations that runs consist of.
rate=$(awk -F '|' '/all-to-all|all-gather/ { rate[$2] = $5 } END { for (o in rate) if (!least || rate[o] + 0 < least) least = rate[o] + 0; print least }' "$out/bandwidth.log")
[ "${rate:-0}" = 0 ] || say "
For \`--plan\` and \`--fit\`: \`--node-gbps $rate\`. Between machines, \`mpirun -n 2 --map-by node bench_group\` measures \`--net-gbps\`."
say
say "Beside matmuls on another stream, by the most channels of NCCL ($beside_bytes bytes):"
for channels in 8 16 32; do
    NCCL_MAX_P2P_NCHANNELS=$channels NCCL_MAX_CTAS=$channels ranks "beside_$channels" "$gpus" "$bench" $beside_bytes $beside_bytes beside &&
        { say && say "$channels channels" && sed -n '/^$/,$p' "$out/beside_$channels.log" | tee -a "$out/multi_gpu.md"; }
done
say
say "## Tokens per second"
say
say "${speed_run[*]}; in brackets the share of as many single GPUs at --zero 0"
say
header
one=
for zero in 0 1 2 3; do
    line="| $zero |"
    for n in "${counts[@]}"; do
        run=$out/run_speed_${zero}_$n
        if ranks "speed_${zero}_$n" "$n" "$trainer" "${speed_run[@]}" --zero $zero --eval-every 0 --samples 0 --save-every 0 --out "$run"; then
            cell=$(speed "$run")
            one=${one:-$cell}
            cell+=$(awk -v a="$cell" -v b="$one" -v n="$n" 'BEGIN { printf " (%.0f %%)", 100 * a / b / n }')
        else
            cell=$ended
        fi
        line+=" $cell |"
    done
    say "$line"
done
say
say "## The same bits"
say
say "${tiny_run[*]}; model.safetensors after the last step, against one GPU at --zero 2"
say
header
for zero in 2 3; do
    line="| $zero |"
    for n in "${counts[@]}"; do
        run=$out/run_bits_${zero}_$n
        if ranks "bits_${zero}_$n" "$n" "$trainer" "${tiny_run[@]}" --zero $zero --eval-every 0 --samples 0 --out "$run"; then
            cell=same
            cmp -s "$out"/run_bits_2_1/step_*/model.safetensors "$run"/step_*/model.safetensors || { cell=DIFFERENT; bad=$((bad + 1)); }
        else
            cell=$ended
        fi
        line+=" $cell |"
    done
    say "$line"
done
say
say "## A model that is split"
say
say "${split_model[*]} ${split_batch[*]} on as many GPUs as it is split into; in brackets the share of as many single GPUs without a split."
say "\"The same\": the validation loss before the first step; with --tensor-parallel within 0.4 %."
say
say "| split | GPUs | tok/s | the same |"
say "|---|---:|---:|---|"
# Options of runs on one GPU, and the option that then splits them among more.
splits=("--zero 1" --context-parallel
    "--zero 2" --tensor-parallel
    "--zero 1 --autotune off" --pipeline-parallel)
one=
for ((i = 0; i < ${#splits[@]}; i += 2)); do
    split ${splits[i + 1]} 1 ${splits[i]}
    for n in "${counts[@]:1}"; do
        [ "$n" -gt 8 ] || split ${splits[i + 1]} "$n" ${splits[i]} "${splits[i + 1]}" "$n"
    done
done
if [ "$gpus" -ge 4 ]; then
    say
    say "## Layers and micro-batches divided"
    say
    say "Four GPUs, two of them for each micro-batch. The order of exchanges is NCCL's or that of events (processes.md)."
    say
    say "| grid | order | graph | tok/s |"
    say "|---|---|---|---:|"
    # grid ORDER GRAPH OPTIONS...
    grid() {
        local name
        name=grid_$(printf '%s_' "$1" "$2" "${@:3:2}" | tr -d ' -')
        ended=''
        NCCL_LAUNCH_ORDER_IMPLICIT=$([ "$1" = events ] && echo 0 || echo 1) ranks "$name" 4 "$trainer" "${@:3}" --graph "$2" --eval-every 0 \
            --samples 0 --save-every 0 --out "$out/run_$name" && ended=$(speed "$out/run_$name")
        say "| ${*:3:2} | $1 | $2 | $ended |"
    }
    for way in "NCCL off" "NCCL on" "events off"; do
        # shellcheck disable=SC2086 # two words
        {
            grid $way --tensor-parallel 2 "${split_model[@]}" "${split_batch[@]}" --zero 2
            grid $way --context-parallel 2 "${split_model[@]}" "${context_batch[@]}" --zero 2
            [ "$way" = "NCCL on" ] || grid ${way/off/auto} --expert-parallel 2 "${experts_model[@]}" "${split_batch[@]}" --zero 2
        }
    done
fi
rm -rf "$out"/run_*/step_*
say
say "$((SECONDS - begin_s)) s; $bad failed"
[ $bad = 0 ]
