#!/usr/bin/env bash
# run_gpt2_350M.sh [OPTION...] -- GPT-2 350M on 10 billion tokens of FineWeb: see run_gpt2.sh.
exec "$(dirname "$0")/run_gpt2.sh" 350M "$@"
