#!/usr/bin/env bash
# run_gpt2_774M.sh [OPTION...] -- GPT-2 774M on 10 billion tokens of FineWeb: see run_gpt2.sh.
exec "$(dirname "$0")/run_gpt2.sh" 774M "$@"
