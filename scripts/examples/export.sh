#!/usr/bin/env bash
# export.sh -- writes a trained model for other programs: NAME.gguf for llama.cpp in 8 bits, and a
# directory NAME for Hugging Face's transformers.
#
#     scripts/examples/export.sh out/books books
#
#     llama-cli -m books.gguf -p "It was"
#     python -c 'import transformers as t; print(t.pipeline("text-generation", "books")("It was"))'
set -eu
usage="usage: export.sh MODEL NAME"
model=${1:?$usage} name=${2:?$usage}
trainer=${TRAINER:-$(dirname "$0")/../../train_gpt2}

"$trainer" --model "$model" --steps 0 --export-gguf "$name.gguf" --export-gguf-dtype q8_0
"$trainer" --model "$model" --steps 0 --out "$name.run"
mv "$name.run"/step_* "$name" # every checkpoint is a directory of Hugging Face
rm -r "$name.run"
