#!/usr/bin/env bash
# test_adapter.sh -- low-rank adapters: PyTorch's and peft's numbers, resumed and killed runs,
# adapters merged into what is exported and generated, bases in 8 bits, ranks, and what is refused.
#
#     dev/test/cli/test_adapter.sh build/plain/train_gpt2
set -u
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

trainer=$(realpath "${1:?usage: test_adapter.sh TRAINER}")
fixtures=$(realpath dev/ref/fixtures)
root=$PWD
source dev/test/lib/check.sh
source dev/test/lib/trainer.sh
trainer_begin test_adapter

# near WHAT FOUND WANTED TOLERANCE
near() {
    check "$1 is $2, wanted $3" awk -v a="$2" -v b="$3" -v e="$4" 'BEGIN { d = a - b; exit !(a != "" && d < e && d > -e) }'
}

# The numbers of each update that do not depend on the time.
numbers() { grep -oE '"(loss|norm)":[^,}]*' "$1/log.jsonl"; }

same() {
    check "$1 and $2: numbers" cmp <(numbers "$1") <(numbers "$2")
    check "$1 and $2: weights" cmp "$1"/step_*8/adapter_model.safetensors "$2"/step_*8/adapter_model.safetensors
}

# ---- PyTorch's numbers: twelve updates from an adapter of peft's ----

data=(--train-data "$fixtures/models/tokens.bin" --val-data "$fixtures/models/tokens.bin" --seq-len 13)
update=(--lr 0.01 --warmup 0 --schedule constant --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --eps 1e-8 --grad-clip 0)

# fp32 has 24 bits. bf16 has 8 in every input of the base's matmuls, and a rate so high soon turns
# their rounding into other weights: only the first updates are compared.
while read -r adapter base losses; do
    for how in "12 2e-5 --matmul fp32" "12 2e-5 --matmul fp32 --batch 1 --recompute 3" "3 4e-2 --matmul bf16"; do
        read -r updates tolerance words <<<"$how"
        rm -rf out
        # shellcheck disable=SC2086
        runs "$adapter $words" --model "$fixtures/models/$base" --adapter "$fixtures/adapters/$adapter" "${data[@]}" \
            "${update[@]}" --total-batch 26 --steps 12 --samples 0 --eval-every 0 --log-every 1 --out out $words
        found=($(values train loss out/log.jsonl))
        check "$adapter $words: twelve updates" [ ${#found[@]} = 12 ]
        step=0
        for wanted in $(cut -d ' ' -f "1-$updates" <<<"$losses"); do
            near "$adapter $words: loss of update $step" "${found[$step]:-}" "$wanted" "$tolerance"
            step=$((step + 1))
        done
    done
    runs "$adapter merged" --model "$fixtures/models/$base" --adapter "$fixtures/adapters/$adapter" "${data[@]}" \
        --perplexity "$fixtures/models/tokens.bin" --steps 0 --eval-every 1
    near "$adapter merged" "$(sed -n 's/.*val loss \([0-9.]*\).*/\1/p' stdout | head -n 1)" "${losses%% *}" 1e-4
done < <(grep -v '^#' "$fixtures/adapters/losses.txt")

# ---- a run of our own ----

sizes=(--arch llama --layers 2 --channels 64 --heads 4 --kv-heads 2 --hidden 128 --context 64)
good "a base" "${sizes[@]}" --seq-len 32 --batch 4 --steps 40 --samples 0 --eval-every 0 --out base
small=(--model base --lora-rank 4 --seq-len 32 --batch 4 --steps 8 --eval-every 4 --eval-batches 2 --samples 0 --lr 0.02)
good "an adapter" "${small[@]}" --out plain
check "its files" [ "$(cd plain/step_00000008 && echo adapter*)" = "adapter_config.json adapter_model.safetensors" ]
check "no model beside it" [ ! -e plain/step_00000008/model.safetensors ]
check "the plan on the screen" grep -q '^adapter: rank 4 of qkvw, rank 4 of attprojw, rank 4 of fcw, rank 4 of fcprojw: 0.01M parameters' stdout
check "the base in the plan" grep -q ' + base [0-9.]* ' <(tr '\n' ' ' <stdout)
check "how to use it" grep -q 'generate text: .* --model base --adapter plain --prompt' stdout
good "recomputation" "${small[@]}" --recompute 3 --out recomputed
same plain recomputed
good "smaller micro-batches" "${small[@]}" --batch 2 --total-batch 128 --eval-batches 4 --out accumulated
near "smaller micro-batches" "$(values train loss accumulated/log.jsonl | tail -n 1)" "$(values train loss plain/log.jsonl | tail -n 1)" 2e-5
good "the first half" "${small[@]}" --save-every 4 --out whole
cp -r whole resumed && rm -r resumed/step_00000008
good "the other half" --out resumed --resume on
same plain resumed
cp -r whole killed && rm -r killed/step_00000008
in_background --out killed --resume on --steps 100000 --override --save-every 10
for _ in {1..100}; do
    [ -e killed/step_00000020 ] && break
    sleep 0.1
done
kill -9 "$process" 2>/dev/null
wait "$process" 2>/dev/null
train --model base --adapter killed --prompt 'A' --tokens 4 --temperature 0
check "a killed run leaves an adapter" [ "$status" = 0 ]
good "no effect before the first update" --model base --lora-rank 4 --steps 0 --seq-len 32 --batch 4 --samples 0 --eval-every 1 --out start
grep -o 'val loss [0-9.]*' stdout | head -n 1 >start.loss
good "the base alone" --model base --perplexity "$fixtures/models/tokens.bin" --steps 0 --seq-len 32 --batch 4 --eval-every 1
check "B starts as zeros" cmp start.loss <(grep -o 'val loss [0-9.]*' stdout | head -n 1)

if command -v mpirun >/dev/null; then
    for zero in 0 2; do
        # one of the ranks has no row of the text
        timeout 120 mpirun -np 2 --oversubscribe "$trainer" "${small[@]}" --batch 2 --total-batch 128 --eval-batches 4 \
            --perplexity "$fixtures/models/tokens.bin" --zero $zero --out "ranks$zero" >stdout 2>stderr </dev/null
        check "two ranks, --zero $zero: $(head -n 1 stderr)" [ -e "ranks$zero/step_00000008/adapter_model.safetensors" ]
        near "two ranks, --zero $zero" "$(values train loss "ranks$zero/log.jsonl" | tail -n 1)" \
            "$(values train loss plain/log.jsonl | tail -n 1)" 2e-5
    done
fi

# Other weights in the place of the base make another run; the weights tell, not only the path.
cp -r whole moved && rm -r moved/step_00000008 && cp -r base kept
good "more training of the base" --out base --resume on --steps 41 --override
bad 2 "the checksum of the adapter's base is |--override resumes anyway" --out moved --resume on
rm -r base && mv kept base

# ---- what uses the model merges the adapter ----

ask=(--prompt 'On a windy day' --tokens 20 --temperature 0)
runs "generated" --model base --adapter plain "${ask[@]}"
cp stdout generated
runs "exported" --model base --adapter plain --steps 0 --export-gguf merged.gguf --export-gguf-dtype f32
runs "generated from the export" --model merged.gguf --tokenizer base/step_00000040 "${ask[@]}"
check "the export has the adapter" cmp stdout generated
good "saved merged" --model base --adapter plain --steps 0 --samples 0 --out merged
check "a whole model" [ -e merged/step_00000000/model.safetensors ] && [ ! -e merged/step_00000000/adapter_config.json ]
runs "generated from the saved one" --model merged "${ask[@]}"
check "the saved one has the adapter" cmp stdout generated
good "the saved one trains" --out merged --resume on --steps 1 --override
check "all of it" [ -e merged/step_00000001/model.safetensors ]
runs "generated by the base" --model base "${ask[@]}"
check "the adapter changes the model" bash -c "! cmp -s stdout generated"
runs "generated in 8 bits" --model base --adapter plain --quantize q8_0 "${ask[@]}"

# ---- an adapter brings the format of its chats ----

for i in {1..40}; do
    echo "{\"messages\":[{\"role\":\"user\",\"content\":\"add $i\"},{\"role\":\"assistant\",\"content\":\"$((i + 1))\"}]}"
done >chats.jsonl
chats=(--train-data chats.jsonl --val-data chats.jsonl --seq-len 32 --batch 2 --eval-every 1 --eval-batches 2 --samples 0)
good "a base of chats" "${sizes[@]}" "${chats[@]}" --tokenizer bpe:300 --chat chatml --steps 2 --out talks
good "an adapter with another format" --model talks "${chats[@]}" --chat llama2 --lora-rank 4 --steps 2 --out answers
runs "it is read with that" --model talks --adapter answers "${chats[@]}" --steps 0 --out answering
near "the format of its chats" "$(values val loss answering/log.jsonl | head -n 1)" \
    "$(values val loss answers/log.jsonl | tail -n 1)" 2e-5

# ---- a base in 8 bits ----

good "in 8 bits" "${small[@]}" --quantize q8_0 --out q8
check "the base in the plan" grep -q ' + base in 8 bits [0-9.]* ' <(tr '\n' ' ' <stdout)
near "in 8 bits" "$(values train loss q8/log.jsonl | tail -n 1)" "$(values train loss plain/log.jsonl | tail -n 1)" 2e-2
good "in 8 bits, the first half" "${small[@]}" --quantize q8_0 --save-every 4 --out q8whole
cp -r q8whole q8resumed && rm -r q8resumed/step_00000008
good "in 8 bits, the other half" --out q8resumed --resume on
same q8 q8resumed
runs "evaluated in 8 bits" --model base --adapter q8 --quantize q8_0 --perplexity "$fixtures/models/tokens.bin" \
    --steps 0 --seq-len 32 --batch 4 --eval-every 1 --eval-batches 2
near "evaluation is training's forward pass" "$(sed -n 's/.*val loss \([0-9.]*\).*/\1/p' stdout | head -n 1)" \
    "$(values val loss q8/log.jsonl | tail -n 1)" 1e-4

# ---- peft opens what we write ----

python=$root/build/venv/bin/python
if [ -x "$python" ] && "$python" -c 'import peft' 2>/dev/null; then
    runs "peft" --model "$fixtures/models/qwen3" --lora-rank 5 --lora-targets q_proj,o_proj,down_proj "${data[@]}" \
        "${update[@]}" --total-batch 26 --batch 2 --steps 12 --samples 0 --eval-every 12 --out forpeft
    near "peft's loss" "$("$python" "$root/dev/ref/make_adapter_fixtures.py" loss "$fixtures/models/qwen3" forpeft/step_00000012 2>/dev/null)" \
        "$(values val loss forpeft/log.jsonl | tail -n 1)" 2e-5
else
    echo "skipped: peft: build/venv is missing (dev/ref/setup.sh)"
fi

# ---- refused ----

bad 2 '--lora-rank needs the trained model|--model' --lora-rank 4 --layers 1 --channels 16 --heads 2 --steps 1
bad 2 '--adapter plain' --model base --adapter plain --lora-rank 4 --steps 1
bad 2 '--model plain/step_00000008 is an adapter|--adapter plain/step_00000008' --model plain/step_00000008 --steps 1
bad 2 "no layer called 'x_proj'|q_proj, k_proj, v_proj" "${small[@]}" --lora-targets q_proj,x_proj
bad 2 "no layer called 'lm_head'" "${small[@]}" --lora-targets lm_head
bad 2 'v_proj, self_attn.out_proj, w1' --arch lfm2 --layers 4 --channels 64 --heads 4 --lora-rank 2 --lora-targets x --plan
bad 2 'needs --lora-rank' --model base --lora-targets q_proj --steps 1
bad 2 '--freeze wte' "${small[@]}" --freeze wte
bad 2 '--average' "${small[@]}" --average ema:0.9
bad 2 '--matmul fp8' "${small[@]}" --matmul fp8
bad 2 '--export-gguf|--steps 0' "${small[@]}" --export-gguf x.gguf
bad 2 '--optimizer adamw8bit|rank 4' "${small[@]}" --optimizer adamw8bit
bad 2 'experts' --model "$fixtures/models/mixtral" --lora-rank 2 "${data[@]}" --steps 1
bad 2 'the frozen base of an adapter' --model base --quantize q8_0 --steps 1

# refuse WORDS EDIT...: an adapter_config.json that sed has changed
refuse() {
    local words=$1
    shift
    rm -rf changed && cp -r "$fixtures/adapters/llama" changed
    sed -i "$@" changed/adapter_config.json
    bad 1 "changed/adapter_config.json|$words" --model "$fixtures/models/llama" --adapter changed "${data[@]}" --steps 1
}
refuse 'lora_dropout is 0.1' 's/"lora_dropout": 0.0/"lora_dropout": 0.1/'
refuse 'use_dora is true' 's/"use_dora": false/"use_dora": true/'
refuse 'bias is all' 's/"bias": "none"/"bias": "all"/'
refuse 'modules_to_save is set' 's/"modules_to_save": null/"modules_to_save": ["lm_head"]/'
refuse 'layers_to_transform is set' 's/"layers_to_transform": null/"layers_to_transform": [1]/'
refuse 'init_lora_weights is pissa' 's/"init_lora_weights": false/"init_lora_weights": "pissa"/'
refuse 'peft_type is another' 's/"LORA"/"IA3"/'
refuse 'one rank and alpha' 's/"rank_pattern": {/"rank_pattern": {"q_proj": 2,/'
refuse 'targets in 1 blocks, wanted all 2' 's/"target_modules": \[/"target_modules": ["model.layers.0.self_attn.o_proj",/'
refuse "no layer called 'embed_tokens'" 's/"target_modules": \[/"target_modules": ["embed_tokens",/'
rm -rf changed && cp -r "$fixtures/adapters/llama" changed && sed -i 's/"r": 4/"r": 5/' changed/adapter_config.json
bad 1 'lora_A.weight is (4, 24), wanted (5, 24)' --model "$fixtures/models/llama" --adapter changed "${data[@]}" --steps 1

check_done
