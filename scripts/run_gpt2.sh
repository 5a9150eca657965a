#!/usr/bin/env bash
# run_gpt2.sh SIZE [OPTION...] -- trains GPT-2 124M, 350M, 774M or 1558M on 10 billion tokens of
# FineWeb. If it is interrupted, run the same command again: it resumes. Further options go to the
# trainer.
#
#     make train_gpt2cu && scripts/get_data.sh fineweb10B && scripts/run_gpt2.sh 124M
#
# Total batch and learning rate are those of GPT-3's table 2.1 (Brown et al., 2020) for the size.
# Environment: BATCH, the micro-batch, for another card (a divisor of the sequences of an update;
# --plan shows what fits); TRAINER (./train_gpt2cu); DATA (data/fineweb10B); OUT (out/gpt2_SIZE);
# GPUS, the number of GPUs of this machine (1): mpirun starts a process for each. LAUNCHER is the
# command that starts the trainer, scripts/run_until_done.sh unless set; for several machines
# scripts/multi_node sets it.
set -eu
cd "$(dirname "$0")/.."
size=${1:?usage: run_gpt2.sh 124M|350M|774M|1558M [OPTION...]}
case $size in
    #     model batch total-batch steps lr
    124M)  set -- d12 64  524288 19073 6e-4   "${@:2}" ;;
    350M)  set -- d24 32  524288 19073 3e-4   "${@:2}" ;;
    774M)  set -- d36 16  524288 19073 2.5e-4 "${@:2}" ;;
    1558M) set -- d48  8 1048576  9537 2e-4   "${@:2}" ;;
    *) echo "error: size $size: wanted 124M, 350M, 774M or 1558M" >&2; exit 2 ;;
esac
data=${DATA:-data/fineweb10B}
mapfile -t launcher < <(xargs printf '%s\n' <<<"${LAUNCHER:-scripts/run_until_done.sh}") # words, possibly quoted
[ "${GPUS:-1}" = 1 ] || launcher+=(mpirun -n "$GPUS" --bind-to none)
exec "${launcher[@]}" "${TRAINER:-./train_gpt2cu}" \
    --train-data "$data/fineweb_train_*.bin" --val-data "$data/fineweb_val_*.bin" \
    --model "$1" --seq-len 1024 --batch "${BATCH:-$2}" --total-batch "$3" --steps "$4" \
    --lr "$5" --warmup 700 --weight-decay 0.1 --beta2 0.95 \
    --eval-every 250 --sample-every 5000 --save-every 1000 --keep 3 --keep-major 10000 \
    --out "${OUT:-out/gpt2_$size}" --resume auto "${@:6}"
