#!/usr/bin/env bash
# test_smoke.sh -- the shortest test of the trainer from the outside, for `make check`: it trains,
# saves, resumes with the same bits, writes a sample, and refuses a wrong option.
#
#     dev/test/cli/test_smoke.sh build/plain/train_gpt2
set -u
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 LC_ALL=C

trainer=$(realpath "${1:?usage: test_smoke.sh TRAINER}")
name=test_smoke
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
work=$(mktemp -d /tmp/llmc_smoke_XXXXXX)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

run=(--layers 2 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 6 --save-every 3 --eval-batches 2)
good training "${run[@]}" --out whole
check "a log of 6 updates: $(values train step whole/log.jsonl | tail -n 1)" [ "$(values train step whole/log.jsonl | tail -n 1)" = 6 ]
good "continuing" --resume whole/step_00000003 --out rest
check "a resumed run ends with the same bits" cmp whole/step_00000006/model.safetensors rest/step_00000006/model.safetensors
runs "writing" --model whole/step_00000006 --prompt "Once" --tokens 5
check "a sample: $(head -c 80 stdout)" grep -q Once stdout
bad 2 "unknown option --bacth; did you mean --batch?" --bacth 3
check_done
