# data.sh -- for dev/test/defects.sh: text, tokenizers, models of others, and what is made of them, end to end.
# shellcheck shell=bash disable=SC2154

# The mark of Windows in front of a text: packed, from standard input, to train, to tokenize and to evaluate.
defect_byte_order_mark() {
    printf '#version: 0.2\nh i\n' >merges.txt
    printf 'hi there\n' >plain.txt
    printf '\xEF\xBB\xBFhi there\n' >marked.txt
    printf '\xEF\xBB\xBF{"text":"hi there\\n"}\n' >marked.jsonl
    local file files=(marked.txt marked.jsonl)
    if is_here gzip; then
        gzip -c marked.jsonl >packed.jsonl.gz
        files+=(packed.jsonl.gz)
    fi
    check "plain" "$tokenize" --tokenizer merges.txt --val-tokens 0 --out plain plain.txt
    for file in "${files[@]}"; do
        check "$file" "$tokenize" --tokenizer merges.txt --val-tokens 0 --out tokens --restart "$file"
        check "the tokens of $file" cmp plain_train_000000.bin tokens_train_000000.bin
    done
    check "standard input" "$tokenize" --tokenizer merges.txt --val-tokens 0 --out tokens --restart --format jsonl - <marked.jsonl
    check "its tokens" cmp plain_train_000000.bin tokens_train_000000.bin
}

# What transformers writes after a padding token was added, with and without a row for it in the embedding.
defect_added_token() {
    local tiny=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 2 --eval-every 0 --samples 0)
    for i in {1..200}; do echo "$i bottles of beer on the wall"; done >text.txt
    good "a model" "${tiny[@]}" --train-data text.txt --tokenizer bpe:300 --out base
    sed -i 's/"special": true}\],$/"special": true}, {"id": 300, "content": "[PAD]", "special": true}],/' base/step_*/tokenizer.json
    good "a model whose tokenizer has a padding token" --model base --train-data text.txt --steps 2 --eval-every 0 --samples 0 --out padded
    check "the token is saved" grep -qF '[PAD]' padded/step_00000002/tokenizer.json
    good "more rows" "${tiny[@]}" --train-data text.txt --tokenizer padded/step_00000002/tokenizer.json --vocab-size 301 --out resized
    good "text" --model resized --train-data text.txt --steps 1 --eval-every 0 --samples 0
}
