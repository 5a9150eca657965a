#!/usr/bin/env bash
# get_data.sh -- downloads data sets, vocabularies and weights, and keeps only complete files.
#
#     scripts/get_data.sh --list
#     scripts/get_data.sh tinystories fineweb10B --limit 10
#
# A file is written as NAME.part, resumed after an interruption, compared in size and checksum with
# the server's list (Hugging Face, GitHub) or with a checksum in this script, and then renamed. An
# existing file of the listed size is not downloaded again. Needs bash, curl or wget, and awk.
#
# Environment: HF_ENDPOINT, a mirror of https://huggingface.co; GET_DATA_BASE, a server that has
# https://HOST/PATH as GET_DATA_BASE/HOST/PATH, for all hosts.
set -u -o pipefail
export LC_ALL=C

# name | server | repository | directory in it | files | description. A file with a * counts for
# --limit.
sets() {
    cat <<'END_OF_SETS'
fineweb10B|dataset|kjj0/fineweb10B-gpt2||fineweb_val_000000.bin fineweb_train_*.bin|10 billion GPT-2 tokens of FineWeb in llm.c's shards: one to validate, 103 to train
fineweb-edu|dataset|HuggingFaceFW/fineweb-edu|sample/10BT|*.parquet|educational web pages, a sample of 10 billion tokens, as text (Parquet)
tinystories|dataset|roneneldan/TinyStories||TinyStoriesV2-GPT4-train.txt TinyStoriesV2-GPT4-valid.txt|stories in the words of small children, as text
tinyshakespeare|fixed||||1.1 MB of Shakespeare's plays
hellaswag|github|rowanz/hellaswag|data|hellaswag_val.jsonl|endings of sentences to choose from: an evaluation
gpt2-vocab|fixed||||the tokens of GPT-2
gpt2|model|openai-community/gpt2||config.json merges.txt vocab.json model.safetensors|GPT-2 124M: weights and tokens
gpt2-medium|model|openai-community/gpt2-medium||config.json merges.txt vocab.json model.safetensors|GPT-2 355M
gpt2-large|model|openai-community/gpt2-large||config.json merges.txt vocab.json model.safetensors|GPT-2 774M
gpt2-xl|model|openai-community/gpt2-xl||config.json merges.txt vocab.json model.safetensors|GPT-2 1558M
END_OF_SETS
}

# set | file | bytes or - | sha256 | address. The checksums of the vocabularies are those in
# tiktoken.
fixed() {
    cat <<'END_OF_FIXED'
tinyshakespeare|tinyshakespeare.txt|1115394|86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed|https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
gpt2-vocab|gpt2.tiktoken|835554|306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930|https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken
gpt2-vocab|vocab.bpe|-|1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5|https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe
gpt2-vocab|encoder.json|-|196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783|https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json
END_OF_FIXED
}

usage() {
    cat <<'END_OF_USAGE'
usage: scripts/get_data.sh NAME... [--out DIR] [--limit N] [--dry-run]
       scripts/get_data.sh --list
    --out DIR    directory of the results, each NAME in one of its own (data)
    --limit N    of sets in many files, the first N training files (all)
    --dry-run    only say which files and bytes would be fetched
    --list       the names
END_OF_USAGE
}

error() {
    echo "error: $*" >&2
    return 1
}

die_usage() {
    error "$*"
    usage >&2
    exit 2
}

# ---- the network

# place URL: prints the address on the server for all hosts, if that is set.
place() { if [ -n "${GET_DATA_BASE:-}" ]; then echo "${GET_DATA_BASE%/}/${1#*://}"; else echo "$1"; fi; }

# fetch_text URL: writes it to standard output.
fetch_text() {
    if [ "$tool" = curl ]; then
        curl --fail --silent --show-error --location --retry 3 --connect-timeout 30 -- "$1"
    else
        wget --quiet --tries 3 --timeout 60 --output-document - -- "$1"
    fi
}

# fetch_file URL FILE: continues where the file ends. A server's error page is not written. A
# transfer that stalls for a minute is given up.
fetch_file() {
    local progress=(--silent --show-error)
    [ ! -t 2 ] || progress=(--progress-bar)
    if [ "$tool" = curl ]; then
        curl --fail --location --retry 3 --connect-timeout 30 --speed-limit 1 --speed-time 60 "${progress[@]}" --continue-at - \
            --output "$2" -- "$1"
    else
        wget --quiet --tries 3 --timeout 60 --continue --output-document "$2" -- "$1"
    fi
}

# ---- lists of the servers

# Reads a JSON array of objects; prints, for each: path, size, checksum with its kind, separated by
# tabs. The checksum of a large file is lfs.oid, a SHA-256; for other files it is oid (Hugging Face)
# or sha (GitHub), the SHA-1 of a git blob.
listing_of_json() {
    awk '
        function token(   c, start) { # reads the next one: sets kind and value
            while (at <= length(text) && index(" \t\r\n,:", substr(text, at, 1))) at++
            if (at > length(text)) { kind = ""; return 0 }
            c = substr(text, at, 1)
            start = ++at
            if (c == "\"") {
                while (at <= length(text) && (c = substr(text, at, 1)) != "\"") at += c == "\\" ? 2 : 1
                kind = "string"; value = substr(text, start, at++ - start)
            } else if (index("[]{}", c)) {
                kind = c
            } else {
                while (at <= length(text) && !index("[]{},: \t\r\n", substr(text, at, 1))) at++
                kind = "word"; value = substr(text, start - 1, at - start + 1)
            }
            return 1
        }
        function is_key() { # true for a string before a colon
            while (at <= length(text) && index(" \t\r\n", substr(text, at, 1))) at++
            return substr(text, at, 1) == ":"
        }
        function print_file() {
            sha256 = field[".lfs.oid"]; sub(/^sha256:/, "", sha256)
            sha1 = field[".oid"] field[".sha"]
            if (field[".type"] == "file" && field[".path"] != "")
                print field[".path"] "\t" (field[".size"] == "" ? "-" : field[".size"]) "\t" \
                    (sha256 != "" ? "sha256:" sha256 : sha1 != "" ? "git:" sha1 : "-")
            split("", field)
        }
        { text = text $0 "\n" }
        END {
            at = 1
            if (!token() || kind != "[") exit 1
            depth = 0
            while (token()) {
                if (kind == "{" || kind == "[") {
                    name[++depth] = key; key = ""
                } else if (kind == "]" && depth == 0) {
                    exit 0
                } else if (kind == "}" || kind == "]") {
                    depth--
                    if (depth == 0) print_file()
                } else if (kind == "string" && is_key()) {
                    key = value
                } else {
                    path = ""
                    for (i = 2; i <= depth; i++) path = path "." name[i]
                    field[path "." key] = value
                }
            }
            exit 1 # the array does not end
        }'
}

# list_set NAME: prints file, bytes, checksum, address for each of its files, tab-separated and in
# order.
list_set() {
    local name where repository directory files listing url get pattern path bytes checksum found
    local hf=${HF_ENDPOINT:-https://huggingface.co}
    IFS='|' read -r name where repository directory files _ < <(sets | grep "^$1|")
    case $where in
    fixed)
        fixed | awk -F '|' -v name="$name" '$1 == name { print $2 "\t" $3 "\tsha256:" $4 "\t" $5 }'
        return
        ;;
    dataset) url=$hf/api/datasets/$repository/tree/main get=$hf/datasets/$repository/resolve/main ;;
    model) url=$hf/api/models/$repository/tree/main get=$hf/$repository/resolve/main ;;
    github) url=https://api.github.com/repos/$repository/contents get=https://raw.githubusercontent.com/$repository/master ;;
    esac
    url=$(place "${url%/}${directory:+/$directory}")
    listing=$(fetch_text "$url") || { error "$name: cannot list its files: $url"; return 1; }
    listing=$(listing_of_json <<<"$listing" | sort) || { error "$name: $url: not a list of files"; return 1; }
    for pattern in $files; do
        found=0
        while IFS=$'\t' read -r path bytes checksum; do
            # shellcheck disable=SC2254
            case ${path##*/} in
            $pattern) ;;
            *) continue ;;
            esac
            [[ $pattern != *\** || $found -lt $limit ]] || break
            found=$((found + 1))
            [[ $bytes =~ ^[0-9]{1,18}$ && $checksum != - ]] || { error "$name: $url: no size or checksum of $path"; return 1; }
            printf '%s\t%s\t%s\t%s\n' "${path##*/}" "$((10#$bytes))" "$checksum" "$get/$path"
        done <<<"$listing"
        [ $found -gt 0 ] || { error "$name: $url: lists no file $pattern"; return 1; }
    done
}

# ---- files

size_of() { if [ -f "$1" ]; then wc -c <"$1" | tr -d ' '; else echo 0; fi; }

# checksum_of FILE KIND: prints the checksum of the kind sha256 or git.
checksum_of() {
    if [ "$2" = git ]; then
        { printf 'blob %s\0' "$(size_of "$1")" && cat "$1"; } | { sha1sum 2>/dev/null || shasum -a 1; } | cut -d ' ' -f 1
    else
        { sha256sum "$1" 2>/dev/null || shasum -a 256 "$1"; } | cut -d ' ' -f 1
    fi
}

# is_whole FILE BYTES CHECKSUM: succeeds if the file is complete; else sets `found` to the reason.
is_whole() {
    local bytes sum
    bytes=$(size_of "$1")
    if [ "$2" != - ] && [ "$bytes" != "$2" ]; then
        found="$bytes bytes, wanted $2"
        return 1
    fi
    sum=$(checksum_of "$1" "${3%%:*}")
    found="checksum $sum, wanted ${3#*:}"
    [ "$sum" = "${3#*:}" ]
}

# Succeeds if the last fetch may have failed because the server cannot continue in the middle of a
# file, judging by the exit status.
cannot_resume() {
    case $tool:$1 in
    curl:33) return 0 ;;               # no ranges
    curl:* | wget:0 | wget:[48]) return 1 ;; # network, server
    *) return 0 ;;                     # wget has no separate status for it
    esac
}

is_file_or_new() { [ -f "$1" ] || [ ! -e "$1" ] || error "$1: not a file; wanted one, or none"; }

# get_file FILE BYTES CHECKSUM URL. A part from an earlier attempt may belong to another version of
# the file, and not every server can continue in the middle: then it starts over. A network failure
# never discards anything.
get_file() {
    local file=$1 bytes=$2 checksum=$3 url=$4 part=$1.part status=0 had found="nothing came"
    [ ! -L "$part" ] || rm -f "$part" || return 1 # its target is not ours to write
    is_file_or_new "$part" && is_file_or_new "$file" || return 1
    had=$(size_of "$part")
    if [ "$bytes" = - ] || [ "$had" -gt "$bytes" ]; then
        rm -f "$part"
        had=0
    fi
    if [ "$had" != "$bytes" ]; then
        fetch_file "$url" "$part"
        status=$?
    fi
    if [ -s "$part" ] && is_whole "$part" "$bytes" "$checksum"; then
        mv "$part" "$file"
        return
    fi
    if [ $status != 0 ] && ! cannot_resume $status; then
        [ -s "$part" ] || rm -f "$part"
        error "$url: not fetched: exit status $status of $tool$([ ! -s "$part" ] ||
            echo "; $(size_of "$part") bytes are kept, the next attempt continues there")"
        return 1
    fi
    rm -f "$part"
    if [ "$had" -gt 0 ]; then
        echo "$file: starts over: $found"
        get_file "$file" "$bytes" "$checksum" "$url"
        return
    fi
    error "$url: $found: not kept"
}

human() { awk -v bytes="$1" 'BEGIN { if (bytes < 1e6) printf "%.1f kB", bytes / 1e3; else if (bytes < 1e9) printf "%.1f MB", bytes / 1e6; else printf "%.2f GB", bytes / 1e9 }'; }

# get_set NAME
get_set() {
    local name=$1 to=$out/$1 files=() file bytes checksum url line missing=0 free count=0
    line=$(list_set "$name") || return 1
    mapfile -t files <<<"$line"
    for line in "${files[@]}"; do
        IFS=$'\t' read -r file bytes checksum url <<<"$line"
        if ! is_there "$to/$file" "$bytes"; then
            count=$((count + 1))
            [ "$bytes" = - ] || missing=$((missing + bytes - $(size_of "$to/$file.part")))
            [ $dry_run = no ] || echo "$to/$file: $bytes bytes from $(place "$url")"
        fi
    done
    local noun=files
    [ ${#files[@]} != 1 ] || noun=file
    echo "$name: ${#files[@]} $noun, $count to fetch, $(human $missing)"
    [ $dry_run = no ] || return 0
    mkdir -p "$to" || return 1
    free=$(df -Pk "$to" | awk 'NR == 2 { printf "%.0f", $4 * 1024 }')
    [ "$missing" -le "$free" ] || { error "$to: $(human "$free") free, wanted $(human $missing)"; return 1; }
    for line in "${files[@]}"; do
        IFS=$'\t' read -r file bytes checksum url <<<"$line"
        is_there "$to/$file" "$bytes" && continue
        get_file "$to/$file" "$bytes" "$checksum" "$(place "$url")" || return 1
        echo "$to/$file: $(human "$(size_of "$to/$file")")"
    done
}

# is_there FILE BYTES: succeeds if the file exists. It was complete when it was renamed; another
# size is another version.
is_there() { [ -s "$1" ] && { [ "$2" = - ] || [ "$(size_of "$1")" = "$2" ]; }; }

# ---- the command line

out=data limit=1000000 dry_run=no list=no names=()
while [ $# -gt 0 ]; do
    case $1 in
    --out | --limit)
        [ $# -gt 1 ] && [ -n "$2" ] || die_usage "$1 wants a value"
        [[ $2 != -* ]] || die_usage "$1 is $2: wanted a value (./$2 for a directory of this name)"
        [ "$1" = --out ] && out=$2 || limit=$2
        shift
        ;;
    --dry-run) dry_run=yes ;;
    --list) list=yes ;;
    --help | -h) usage && exit 0 ;;
    -*) die_usage "unknown option $1" ;;
    *) names+=("$1") ;;
    esac
    shift
done
[[ $limit =~ ^[1-9][0-9]{0,8}$ ]] || die_usage "--limit $limit: wanted a whole number from 1"
if [ $list = yes ]; then
    sets | awk -F '|' '{ printf "%-16s %s\n", $1, $6 }'
    exit 0
fi
[ ${#names[@]} -gt 0 ] || die_usage "no name of a data set (--list shows them)"
for name in "${names[@]}"; do
    sets | cut -d '|' -f 1 | grep -qxF -- "$name" || die_usage "no data set \"$name\" (--list shows them)"
done
tool=$(command -v curl || command -v wget) || { error "neither curl nor wget is here: install one"; exit 1; }
tool=${tool##*/}
got=0 # counted, because an error of the shell itself would end the loop
for name in "${names[@]}"; do
    get_set "$name" && got=$((got + 1))
done
[ $got = ${#names[@]} ]
