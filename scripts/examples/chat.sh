#!/usr/bin/env bash
# chat.sh -- teaches a model to answer: chats or prompts with answers, one a line of JSON.
#
#     scripts/examples/chat.sh SmolLM2-135M chats.jsonl out/chat
#     scripts/examples/chat.sh out/books chats.jsonl out/chat --epochs 10
#
# Then it reads your messages, one a line; Ctrl-D ends. A line of chats.jsonl:
#
#     {"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5."}]}
#
# Options after the directory go to the trainer. TRAINER=./train_gpt2cu uses a GPU.
set -eu
usage="usage: chat.sh MODEL CHATS OUT [OPTION...]"
model=${1:?$usage} chats=${2:?$usage} out=${3:?$usage}
shift 3
trainer=${TRAINER:-$(dirname "$0")/../../train_gpt2}

"$trainer" --model "$model" --train-data "$chats" --epochs 3 --keep-best on --out "$out" "$@"
"$trainer" --model "$out" --interactive
