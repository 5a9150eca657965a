#!/usr/bin/env bash
# test_smoke.sh -- the shortest test of the trainer from the outside, for `make check`: it trains,
# saves, resumes with the same bits, writes a sample, and refuses a wrong option.
#
#     dev/test/cli/test_smoke.sh build/plain/train_gpt2
set -u

trainer=$(realpath "${1:?usage: test_smoke.sh TRAINER}")
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
trainer_begin test_smoke

run=(--layers 2 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 6 --save-every 3 --eval-batches 2)
good training "${run[@]}" --out whole
check "a log of 6 updates: $(values train step whole/log.jsonl | tail -n 1)" [ "$(values train step whole/log.jsonl | tail -n 1)" = 6 ]
good "continuing" --resume whole/step_00000003 --out rest
check "a GPT-2's command has no options of other models" [ "$(grep -c -e --rope-base -e --hidden -e --softcap stdout)" = 0 ]
check "a resumed run ends with the same bits" cmp whole/step_00000006/model.safetensors rest/step_00000006/model.safetensors
runs "writing" --model whole/step_00000006 --prompt "Once" --tokens 5
check "a sample: $(head -c 80 stdout)" grep -q Once stdout
bad 2 "unknown option --bacth; did you mean --batch?" --bacth 3
check_done
