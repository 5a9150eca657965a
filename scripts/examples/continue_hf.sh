#!/usr/bin/env bash
# continue_hf.sh -- trains a model of Hugging Face further on your text, and measures what that
# changed: the loss on a text that it did not train on, before and after.
#
#     git clone https://huggingface.co/HuggingFaceTB/SmolLM2-135M      # needs git-lfs
#     scripts/examples/continue_hf.sh SmolLM2-135M 'books/*.txt' unseen.txt out/more
#
# Options after the directory go to the trainer. TRAINER=./train_gpt2cu uses a GPU.
set -eu
usage="usage: continue_hf.sh DIRECTORY TEXT UNSEEN OUT [OPTION...]"
model=${1:?$usage} text=${2:?$usage} unseen=${3:?$usage} out=${4:?$usage}
shift 4
trainer=${TRAINER:-$(dirname "$0")/../../train_gpt2}

"$trainer" --model "$model" --steps 0 --perplexity "$unseen"
"$trainer" --model "$model" --train-data "$text" --epochs 1 --seq-len 512 --out "$out" "$@"
"$trainer" --model "$out" --steps 0 --perplexity "$unseen"
