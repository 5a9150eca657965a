#!/usr/bin/env bash
# run_gpt2_1558M.sh [OPTION...] -- GPT-2 1558M on 10 billion tokens of FineWeb: see run_gpt2.sh.
exec "$(dirname "$0")/run_gpt2.sh" 1558M "$@"
