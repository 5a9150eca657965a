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
