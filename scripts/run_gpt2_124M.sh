#!/usr/bin/env bash
# run_gpt2_124M.sh -- GPT-2 124M on 10 billion tokens of FineWeb, on one GPU. Goes on where it was when it is started again.
#
#     make train_gpt2cu && scripts/get_data.sh fineweb10B && scripts/run_gpt2_124M.sh
#
# Total batch and learning rate are those of GPT-3's table 2.1 (Brown et al., 2020) for this size. Environment: BATCH, a divisor of
# 512, for another card (--plan says what it takes), TRAINER (./train_gpt2cu), DATA (data/fineweb10B), OUT
# (out/gpt2_124M). Other options of the trainer follow the name of the script.
set -eu
cd "$(dirname "$0")/.."
data=${DATA:-data/fineweb10B}
exec scripts/run_until_done.sh "${TRAINER:-./train_gpt2cu}" \
    --train-data "$data/fineweb_train_*.bin" --val-data "$data/fineweb_val_*.bin" \
    --model d12 --seq-len 1024 --batch "${BATCH:-64}" --total-batch 524288 --steps 19073 \
    --lr 6e-4 --warmup 700 --weight-decay 0.1 --beta2 0.95 \
    --eval-every 250 --sample-every 5000 --save-every 1000 --keep 3 --keep-major 10000 \
    --out "${OUT:-out/gpt2_124M}" --resume auto "$@"
