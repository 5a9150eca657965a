# data.sh -- faults of text, tokenizers, and models of other programs, tried end to end; for
# dev/test/defects.sh.
# shellcheck shell=bash disable=SC2154

# The mark of Windows in front of a text: packed, from standard input, to train, to tokenize and to
# evaluate.
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

# Reads the files that transformers writes after a padding token was added, with and without a row
# for it in the embedding.
defect_added_token() {
    local tiny=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 2 --eval-every 0 --samples 0)
    for i in {1..200}; do echo "$i bottles of beer on the wall"; done >text.txt
    good "a model" "${tiny[@]}" --train-data text.txt --tokenizer bpe:300 --out base
    sed -i 's/"special": true}\],$/"special": true}, {"id": 300, "content": "[PAD]", "special": true}],/' base/step_*/tokenizer.json
    good "a model whose tokenizer has a padding token" --model base/step_00000002 --train-data text.txt --steps 2 --eval-every 0 --samples 0 --out padded
    check "the token is saved" grep -qF '[PAD]' padded/step_00000002/tokenizer.json
    good "more rows" "${tiny[@]}" --train-data text.txt --tokenizer padded/step_00000002/tokenizer.json --vocab-size 301 --out resized
    good "text" --model resized --train-data text.txt --steps 1 --eval-every 0 --samples 0
}

# A frame of Zstandard whose window needs more memory than there is: not damage.
defect_zstd_window() {
    is_here zstd || return
    printf '#version: 0.2\nh i\n' >merges.txt
    for i in $(seq 200000); do echo "{\"text\":\"document number $i\"}"; done | zstd -q -f --long=31 -1 - -o wide.jsonl.zst
    (ulimit -v 1500000 && "$tokenize" --tokenizer merges.txt --threads 1 --out x wide.jsonl.zst >stdout 2>stderr)
    status=$?
    check_error "too little memory for the window" 1 "wide.jsonl.zst: needs a window of 2048 MiB"
}

# Headers that the safetensors library reads, and the classifier under its own name alone.
defect_safetensors_headers() {
    local tiny=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 1 --eval-every 0 --samples 0) file
    good "a model" "${tiny[@]}" --out base
    is_here python3 || return
    for kind in null blank key lm_head; do
        cp -r base/step_00000001 "$kind"
        python3 - "$kind/model.safetensors" $kind <<'END'
import json, struct, sys
path, kind = sys.argv[1:]
b = open(path, "rb").read()
n = struct.unpack("<Q", b[:8])[0]
h = json.loads(b[8:8 + n])
if kind == "null":
    h["__metadata__"] = None
if kind == "key":
    h["transformer.ln_f.bias"]["note"] = "x"
if kind == "lm_head":
    h["lm_head.weight"] = h.pop("transformer.wte.weight")
j = (b"  " if kind == "blank" else b"") + json.dumps(h).encode()
open(path, "wb").write(struct.pack("<Q", len(j)) + j + b[8 + n:])
END
        rm "$kind/state.json" "$kind"/optimizer*
        runs "$kind" --model "$kind" --prompt 'One day' --tokens 3
    done
}

# A file system that maps no files, as FUSE with direct_io.
defect_no_mmap() {
    is_here gcc || return
    cat >no_mmap.c <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/mman.h>
void* mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    if (fd >= 0 && !(protection & PROT_EXEC)) {
        errno = ENODEV;
        return MAP_FAILED;
    }
    return ((__typeof__(&mmap))dlsym(RTLD_NEXT, "mmap"))(at, bytes, protection, flags, fd, offset);
}
END
    gcc -shared -fPIC -o no_mmap.so no_mmap.c -ldl
    local tiny=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 3 --eval-batches 2 --samples 0)
    for i in {1..200}; do echo "$i bottles of beer on the wall"; done >text.txt
    good "mapped" "${tiny[@]}" --train-data text.txt --out mapped
    LD_PRELOAD=./no_mmap.so runs "read" "${tiny[@]}" --train-data text.txt --out read
    check "it is said" grep -q 'note: text.txt: its file system cannot map files (mmap: No such device)' stderr
    check "the same losses" [ "$(values train loss mapped/log.jsonl)" = "$(values train loss read/log.jsonl)" ]
    LD_PRELOAD=./no_mmap.so runs "a model" --model mapped --train-data text.txt --steps 1 --eval-batches 2 --samples 0
}

# The size of a shard cannot be asked for when its checksum is taken: an error, not the checksum of
# an empty file.
defect_size_of_a_shard() {
    is_here strace || return
    printf '#version: 0.2\nh i\n' >merges.txt
    for i in {1..300}; do echo "$i bottles of beer on the wall"; done >text.txt
    local run=("$tokenize" --tokenizer merges.txt --threads 1 --shard-tokens 3000 --val-tokens 0 --restart) n
    "${run[@]}" --out whole text.txt >/dev/null
    for n in 1 2 3 4 5 6; do
        strace -f -o trace -P x_train_000001.bin -e trace=newfstatat,fstat -e inject=newfstatat,fstat:error=EIO:when=$n \
            "${run[@]}" --out x text.txt >stdout 2>stderr
        status=$?
        sed -i '/^strace: /d' stderr
        [ $status != 0 ] || check "no wrong checksum where call $n fails" \
            cmp <(grep -o '"checksum":"[^"]*"' whole.progress.json) <(grep -o '"checksum":"[^"]*"' x.progress.json)
        [ $status = 0 ] || check_error "call $n" 1 "x_train_000001.bin"
    done
}

# End-of-text before prompts and texts is an option, and said to llama.cpp.
defect_start_token() {
    local tiny=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 2 --eval-every 0 --samples 0)
    for i in {1..200}; do echo "$i bottles of beer on the wall"; done >text.txt
    good "a model" "${tiny[@]}" --train-data text.txt --tokenizer bpe:300 --out base --export-gguf with.gguf
    good "the same without a start token" --model base/step_00000002 --train-data text.txt --steps 0 --samples 0 --eval-every 0 \
        --start-token off --export-gguf without.gguf
    check "true" cmp <(grep -aoP 'add_bos_token\x07\x00\x00\x00\K.' with.gguf) <(printf '\x01\n')
    check "false" [ "$(grep -aoP 'add_bos_token\x07\x00\x00\x00\K[\x00]' without.gguf | wc -c)" -ge 1 ]
    runs "a prompt" --model base --prompt '12' --tokens 2 --start-token off
}

# A model that is not GPT-2 is refused as such, whatever its tokenizer; one that is keeps what
# others read in its config.json.
defect_config_of_others() {
    local tiny=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 1 --eval-every 0 --samples 0)
    for i in {1..200}; do echo "$i bottles of beer on the wall"; done >text.txt
    good "a model" "${tiny[@]}" --train-data text.txt --out base
    cp -r base/step_00000001 relu && rm relu/state.json
    sed -i 's/gelu_new/relu/' relu/config.json
    bad 1 "relu/config.json: activation_function is relu" --model relu --train-data text.txt --tokenizer relu/none.json --steps 1
    sed -i 's/"model_type"/"initializer_range": 0.07,\n  "model_type"/; s/relu/gelu_new/' relu/config.json
    good "a model with a field for others" --model relu --train-data text.txt --steps 1 --eval-every 0 --samples 0 --out kept
    check "is saved with it" grep -q '"initializer_range": 0.07' kept/step_00000001/config.json
    check "and its type has both names" [ "$(grep -cE '"(torch_)?dtype": "float32"' kept/step_00000001/config.json)" = 2 ]
}
