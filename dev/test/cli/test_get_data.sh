#!/usr/bin/env bash
# test_get_data.sh -- scripts/get_data.sh against a server on this machine: complete files get their
# names, anything else is an error and never data. Uses curl and wget, if installed.
set -u
cd "$(dirname "$0")/../../.." || exit 1
export LC_ALL=C
unset HF_ENDPOINT GET_DATA_BASE http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY

name=get_data
source dev/test/lib/check.sh
is_here python3 || exit 0
tools=()
for tool in curl wget; do
    is_here $tool "get_data with $tool" && tools+=("$tool")
done
[ ${#tools[@]} -gt 0 ] || exit 0

script=$PWD/scripts/get_data.sh
work=$(mktemp -d /tmp/llmc_get_data_XXXXXX)
server=
trap '[ -z "$server" ] || kill $server; rm -rf "$work"' EXIT
cd "$work" || exit 1

# ---- the server: files of a directory, with ranges, and what goes wrong with servers

cat >server.py <<'END_OF_SERVER'
import http.server, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        mode = open("mode").read().strip()
        begin = self.headers.get("Range", "")
        with open("requests", "a") as file:
            file.write(f"{self.path} {begin}\n")
        begin = int(begin.split("=")[1].rstrip("-")) if begin and mode != "no-ranges" else 0
        if mode == "portal":
            return self.answer(200, b"<html>Please log in</html>")
        try:
            data = open("www" + self.path, "rb").read()
        except OSError:
            return self.answer(404, b"<html>no such page</html>")
        if begin > len(data) or (begin and begin == len(data)):
            return self.answer(416, b"")
        cut = len(data) // 2 if mode == "cut" and "/resolve/" in self.path else None
        self.answer(206 if begin else 200, data[begin:], begin, len(data), cut)

    def answer(self, status, body, begin=0, total=0, cut=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{total - 1}/{total}")
        self.end_headers()
        self.wfile.write(body if cut is None else body[:max(0, cut - begin)])
        self.close_connection = cut is not None

    def log_message(self, *args):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
with open("port.part", "w") as file:
    file.write(str(server.server_port))
os.rename("port.part", "port")
server.serve_forever()
END_OF_SERVER

echo good >mode
: >requests
python3 server.py >server.log 2>&1 &
server=$!
for ((i = 0; i < 100; i++)); do [ -e port ] || sleep 0.05; done
[ -e port ] || { echo "get_data: FAILED: no server: $(tail -n 1 server.log)" && exit 1; }
GET_DATA_BASE=http://127.0.0.1:$(<port)
export GET_DATA_BASE

# Hugging Face and GitHub identify large files by SHA-256, others by the SHA-1 of their git blob.
git_sum() { { printf 'blob %s\0' "$(wc -c <"$1")" && cat "$1"; } | sha1sum | cut -d ' ' -f 1; }
sha_sum() { sha256sum "$1" | cut -d ' ' -f 1; }
large() {
    printf '{"type":"file","oid":"%040d","size":%d,"lfs":{"oid":"%s","size":%d,"pointerSize":134},"xetHash":"%064d","path":"%s"}' 1 \
        "$(wc -c <"$1")" "$(sha_sum "$1")" "$(wc -c <"$1")" 2 "$2"
}
small() { printf '{"type":"file","oid":"%s","size":%d,"path":"%s"}' "$(git_sum "$1")" "$(wc -c <"$1")" "$2"; }

hf=www/huggingface.co
stories=$hf/datasets/roneneldan/TinyStories/resolve/main
tokens=$hf/datasets/kjj0/fineweb10B-gpt2/resolve/main
pages=$hf/datasets/HuggingFaceFW/fineweb-edu/resolve/main/sample/10BT
hella=www/raw.githubusercontent.com/rowanz/hellaswag/master/data
mkdir -p $stories $tokens $pages $hella $hf/api/datasets/{roneneldan/TinyStories,kjj0/fineweb10B-gpt2}/tree \
    $hf/api/datasets/HuggingFaceFW/fineweb-edu/tree/main/sample www/api.github.com/repos/rowanz/hellaswag/contents
seq 1 40000 >$stories/TinyStoriesV2-GPT4-train.txt
seq 1 500 >$stories/TinyStoriesV2-GPT4-valid.txt
for i in val_000000 train_000001 train_000002 train_000003; do echo "tokens $i" >$tokens/fineweb_$i.bin; done
seq 7 900 >$pages/000_00000.parquet
echo '{"ind": 24}' >$hella/hellaswag_val.jsonl
list_stories() {
    echo "[{\"type\":\"directory\",\"oid\":\"0\",\"size\":0,\"path\":\"data\"},$(large $stories/TinyStoriesV2-GPT4-train.txt \
        TinyStoriesV2-GPT4-train.txt),$(small $stories/TinyStoriesV2-GPT4-valid.txt TinyStoriesV2-GPT4-valid.txt)]" \
        >$hf/api/datasets/roneneldan/TinyStories/tree/main
}
list_stories
echo "[$(for i in train_000003 train_000001 val_000000 train_000002; do large $tokens/fineweb_$i.bin fineweb_$i.bin && echo ,; done)
    $(small $pages/000_00000.parquet .gitattributes)]" >$hf/api/datasets/kjj0/fineweb10B-gpt2/tree/main
echo "[$(large $pages/000_00000.parquet sample/10BT/000_00000.parquet)]" >$hf/api/datasets/HuggingFaceFW/fineweb-edu/tree/main/sample/10BT
echo "[{\"name\":\"hellaswag_val.jsonl\",\"path\":\"data/hellaswag_val.jsonl\",\"sha\":\"$(git_sum $hella/hellaswag_val.jsonl)\",\"size\":12,
    \"type\":\"file\",\"_links\":{\"self\":\"x\"}}]" >www/api.github.com/repos/rowanz/hellaswag/contents/data

# ---- checks

# get ARGUMENTS...: sets status; stdout and stderr are in files.
get() {
    : >requests
    timeout 60 env PATH="$path" "$script" "$@" >stdout 2>stderr
    status=$?
}
same() { cmp -s "$1" "$2"; }
good() { check "$1: exit status $status, $(head -n 1 stderr)" [ "$status" = 0 ]; }
bad() {
    check "$1: exit status $status, wanted 1" [ "$status" = 1 ]
    check "$1: says \"$2\"" grep -q -e "^error: .*$2" stderr
    check "$1: nothing under the name" [ ! -e "$3" ]
}
train=TinyStoriesV2-GPT4-train.txt

test_good() {
    get tinystories fineweb-edu hellaswag --out data
    good "three sets"
    check "a large file" same $stories/$train data/tinystories/$train
    check "a small file" same $stories/TinyStoriesV2-GPT4-valid.txt data/tinystories/TinyStoriesV2-GPT4-valid.txt
    check "a file in a directory" same $pages/000_00000.parquet data/fineweb-edu/000_00000.parquet
    check "a file on GitHub" same $hella/hellaswag_val.jsonl data/hellaswag/hellaswag_val.jsonl
    check "no parts are left" [ -z "$(find data -name '*.part')" ]
    get tinystories hellaswag --out data
    good "again"
    check "nothing is fetched again" [ "$(grep -c -e /resolve/ -e hellaswag_val requests)" = 0 ]
    get fineweb10B --limit 2 --out data
    good "the first two"
    check "in order, with the one to validate" [ "$(cd data/fineweb10B && echo *)" = \
        "fineweb_train_000001.bin fineweb_train_000002.bin fineweb_val_000000.bin" ]
    rm -r data
    get tinystories --dry-run --out data
    good "a dry run"
    check "names files" grep -q "$train: 228894 bytes from http" stdout
    check "and makes none" [ ! -e data ]
}

test_resume() {
    mkdir -p data/tinystories
    head -c 100000 $stories/$train >data/tinystories/$train.part
    get tinystories --out data
    good "a part"
    check "continues" grep -q "$train bytes=100000-" requests
    check "is whole" same $stories/$train data/tinystories/$train
    rm -r data && mkdir -p data/tinystories
    cp $stories/$train data/tinystories/$train.part
    get tinystories --out data
    good "a whole part"
    check "is not fetched" [ "$(grep -c "$train" requests)" = 0 ]
    check "is renamed" same $stories/$train data/tinystories/$train
    rm data/tinystories/$train
    head -c 300000 /dev/zero >data/tinystories/$train.part
    get tinystories --out data
    good "a part that is too long"
    check "is whole" same $stories/$train data/tinystories/$train
    rm data/tinystories/$train
    head -c 50000 /dev/zero >data/tinystories/$train.part
    get tinystories --out data
    good "a part of another version"
    check "starts over" same $stories/$train data/tinystories/$train
    rm data/tinystories/$train
    head -c 50000 $stories/$train >data/tinystories/$train.part
    echo no-ranges >mode
    get tinystories --out data
    good "a server without ranges"
    check "is whole all the same" same $stories/$train data/tinystories/$train
    echo good >mode
    rm -r data
}

test_bad_servers() {
    local file=data/tinystories/$train kept
    echo cut >mode
    get tinystories --out data
    bad "a connection that breaks" "not fetched" $file
    kept=$(wc -c <$file.part)
    check "what came is kept: $kept bytes" [ "$kept" -ge 100000 ]
    timeout 60 env PATH="$path" GET_DATA_BASE=http://127.0.0.1:1 "$script" tinystories --out data >stdout 2>stderr
    status=$?
    bad "no server" "cannot list" $file
    check "what came is still there" [ "$(wc -c <$file.part)" = "$kept" ]
    echo good >mode
    get tinystories --out data
    good "the next attempt"
    check "continues" grep -q "$train bytes=$kept-" requests
    check "is whole" same $stories/$train $file
    rm -r data
    mv $stories/$train there
    get tinystories --out data
    bad "a page that is not there" "$train: not fetched" $file
    check "is no part either" [ ! -e $file.part ]
    seq 2 40001 >$stories/$train
    get tinystories --out data
    bad "other bytes" "$train: .*, wanted .*not kept" $file
    check "no part of them" [ ! -e $file.part ]
    mv there $stories/$train
    echo portal >mode
    get tinystories --out data
    bad "a page to log in, as a list" "not a list of files" $file
    get tinyshakespeare --out data
    bad "a page to log in, as data" "input.txt: 26 bytes, wanted 1115394: not kept" data/tinyshakespeare/tinyshakespeare.txt
    get gpt2-vocab --out data
    bad "as a vocabulary" "26 bytes, wanted 835554" data/gpt2-vocab/gpt2.tiktoken
    echo good >mode
    get gpt2-xl --out data
    bad "no list" "cannot list its files" data/gpt2-xl/model.safetensors
}

test_bad_lists() {
    local list=$hf/api/datasets/roneneldan/TinyStories/tree/main
    head -c 300 $list >half && mv half $list
    get tinystories --out data
    bad "half a list" "not a list of files" data/tinystories/$train
    echo "[$(small $stories/$train other.txt)]" >$list
    get tinystories --out data
    bad "another list" "lists no file $train" data/tinystories/$train
    echo "[{\"type\":\"file\",\"path\":\"$train\",\"size\":12}]" >$list
    get tinystories --out data
    bad "no checksum" "no size or checksum of $train" data/tinystories/$train
    large $stories/$train $train | sed 's/"size":[0-9]*/"size":900000000000000/; s/^/[/; s/$/]/' >$list
    get tinystories --out data
    bad "more than the disk has" "free, wanted 900000.00 GB\|lists no file" data/tinystories/$train
    large $stories/$train $train | sed 's/"size":[0-9]*/"size":99999999999999999999/; s/^/[/; s/$/]/' >$list
    get tinystories --out data
    bad "more than a number holds" "no size or checksum of $train" data/tinystories/$train
    { sed 's/"size":\([0-9]*\)/"size":000\1/g' | tee $list; } <<<"[$(large $stories/$train $train),$(
        small $stories/TinyStoriesV2-GPT4-valid.txt TinyStoriesV2-GPT4-valid.txt)]" >/dev/null
    get tinystories --out data
    good "sizes with zeros in front"
    check "are decimal" same $stories/$train data/tinystories/$train
    rm -r data
    list_stories
}

# Files in the way, which are not ours.
test_in_the_way() {
    mkdir -p data/tinystories
    echo precious >victim
    ln -s ../../victim data/tinystories/$train.part
    get tinystories --out data
    good "a part that is a link"
    check "it points to what it did" [ "$(<victim)" = precious ]
    check "is whole" same $stories/$train data/tinystories/$train
    check "and no link" [ ! -L data/tinystories/$train ]
    rm -r data
    mkdir -p data/tinystories/$train
    get tinystories --out data
    check "a directory of the name: exit status $status" [ $status = 1 ]
    check "is named" grep -q "^error: data/tinystories/$train: not a file" stderr
    check "nothing is in it" [ -z "$(ls -A data/tinystories/$train)" ]
    rm -r data
}

# The one checksum that stands in the script and can be tried without the network.
test_shakespeare() {
    local plays=www/raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare
    mkdir -p $plays
    cp "$TINY_TEXT" $plays/input.txt
    get tinyshakespeare --out data
    good "plays"
    check "are whole" same "$TINY_TEXT" data/tinyshakespeare/tinyshakespeare.txt
    rm -r $plays
}

test_command_line() {
    get
    check "no name: exit status $status" [ "$status" = 2 ]
    get tinystorys
    check "an unknown name: exit status $status" [ "$status" = 2 ]
    check "is named" grep -q '^error: no data set "tinystorys"' stderr
    get --frobnicate
    check "an unknown option: exit status $status" [ "$status" = 2 ]
    get tinystories --limit 0
    check "a limit of 0: exit status $status" [ "$status" = 2 ]
    get tinystories --out ""
    check "no directory: exit status $status" [ "$status" = 2 ]
    check "is said" grep -q '^error: --out wants a value' stderr
    get tinystories --out --dry-run
    check "an option as a directory: exit status $status" [ "$status" = 2 ]
    check "is said" grep -q '^error: --out is --dry-run' stderr
    get --list
    good "the list"
    check "names all" [ "$(wc -l <stdout)" -ge 10 ]
}

# Nothing but the tool and what every system has.
for tool in "${tools[@]}"; do
    name="get_data with $tool"
    path=$work/bin-$tool
    mkdir "$path"
    for program in bash env awk sed grep sort cut cat wc tr head df mkdir mv rm sha1sum sha256sum "$tool"; do
        ln -s "$(command -v "$program")" "$path/$program"
    done
    test_good
    test_resume
    test_bad_servers
    test_bad_lists
    test_in_the_way
    test_command_line
    if [ -f "${TINY_TEXT:-}" ]; then test_shakespeare; fi
    rm -rf data
done
name=get_data
check_done
