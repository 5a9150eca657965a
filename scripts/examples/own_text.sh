#!/usr/bin/env bash
# own_text.sh -- trains a vocabulary and a small Llama on your text, then generates some more.
#
#     scripts/examples/own_text.sh 'books/*.txt' out/books
#     scripts/examples/own_text.sh 'books/*.txt' out/books --steps 10000 --channels 256
#
# Options after the directory go to the trainer, and win over those in this script. Interrupted? The
# same command continues. TRAINER=./train_gpt2cu uses a GPU.
set -eu
usage="usage: own_text.sh TEXT OUT [OPTION...]"
text=${1:?$usage} out=${2:?$usage}
shift 2
trainer=${TRAINER:-$(dirname "$0")/../../train_gpt2}

"$trainer" --arch llama --train-data "$text" --tokenizer bpe:4096 --seq-len 256 --steps 2000 \
    --out "$out" --resume auto "$@"
"$trainer" --model "$out" --prompt "" --tokens 100
