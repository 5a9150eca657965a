#!/usr/bin/env bash
# sass.sh -- what ptxas made of kernels, for sm_90a. Attention by wgmma: no spilled registers, no
# wgmma that is serialized, and main loops that have not grown. Norms of rows and of heads, and
# kernels that make codes of E4M3: no spilled registers, they load and store 16 bytes at a time, and
# enough warps fit into the registers.
#
#     dev/test/sass.sh            needs nvcc, and cuobjdump beside it or in PATH (with nvdisasm)
#
# The main loop is the shortest one with matmuls and exponentials. Prints a line for each kernel.
set -u
cd "$(dirname "$0")/../.." || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
command -v nvcc >/dev/null || { echo "skipped: sass: nvcc is missing"; exit 0; }
command -v cuobjdump >/dev/null || { echo "skipped: sass: cuobjdump is missing"; exit 0; }

# compile KERNELS: makes KERNELS.sass of dev/test/lib/KERNELS.cu; what ptxas says is in KERNELS.log.
compile() {
    nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -DGPU_SM=90 -D_GNU_SOURCE -I. -Xptxas -v -cubin -o "$work/cubin" \
        "dev/test/lib/$1.cu" >"$work/$1.log" 2>&1 || { cat "$work/$1.log" && exit 1; }
    cuobjdump -sass "$work/cubin" >"$work/$1.sass" || exit 1
}
compile wgmma_kernels
compile row_kernels

# Kernel, width of heads, rows of a tile of the stream, warpgroups, overlap, mask (0: causal, 1:
# documents, 2: general, 3: capped); then the most instructions of the main loop, 5 % above those of CUDA 13.0,
# its matmuls, and accesses to local memory in the whole kernel: those of the warp that fills.
limits='forward 64 64 2 0 0     365 8 0
forward 64 64 2 0 1     453 8 0
forward 64 64 2 0 2     468 8 0
forward 64 128 3 1 0    614 12 0
forward 64 128 3 1 1    787 12 0
forward 64 128 2 1 2    817 12 0
forward 64 64 3 1 0     384 8 0
forward 128 128 2 1 0   659 16 0
forward 128 128 2 1 1   833 16 0
forward 128 128 2 1 2   864 16 0
forward 128 128 2 0 0   635 16 0
forward 64 64 2 0 3     638 8 0
forward 128 128 2 1 3   1203 16 0
forward 256 64 2 1 2    632 20 0
forward 256 64 2 1 3    802 20 0
queries 64 128 2 0 0    598 16 0
queries 64 128 2 0 1    773 16 0
queries 64 128 2 0 2    729 16 0
queries 128 64 2 0 0    317 20 0
queries 128 64 2 0 1    404 20 0
queries 128 64 2 0 2    418 20 0
queries 64 128 2 0 3    1348 16 2
queries 128 64 2 0 3    692 20 0
keys 64 64 2 1 0        363 16 0
keys 64 64 2 1 1        575 16 0
keys 64 64 2 1 2        626 16 0
keys 64 64 2 0 0        430 16 0
keys 128 64 2 0 0       419 24 0
keys 128 64 2 0 1       630 24 4
keys 128 64 2 0 2       676 24 4
keys 64 64 2 0 3        946 16 0
keys 128 64 2 0 3       964 24 4
'

# Prints the kernel, its instructions, matmuls, and accesses to local memory.
awk '
    function name(mangled,   i, n, at, kernel, number) {
        kernel = mangled ~ /forward/ ? "forward" : mangled ~ /query_grad/ ? "queries" : "keys"
        n = 0
        while (match(mangled, /Li[0-9]+E/)) {
            number[++n] = substr(mangled, RSTART + 2, RLENGTH - 3)
            mangled = substr(mangled, RSTART + RLENGTH)
        }
        match(mangled, /Mask[0-9]/)
        return kernel " " number[1] " " number[3] " " number[4] " " number[9] " " substr(mangled, RSTART + 4, 1)
    }
    function hex(text,   i, x) {
        x = 0
        for (i = 1; i <= length(text); i++) { x = 16 * x + index("0123456789abcdef", substr(text, i, 1)) - 1 }
        return x
    }
    function finish(   i, j, matmuls, exponentials, best, of_best) {
        best = 0
        for (i = 1; i <= count; i++) {
            if (!(target[i] in number_at) || target[i] == "" || number_at[target[i]] >= i) { continue }
            matmuls = exponentials = 0
            for (j = number_at[target[i]]; j <= i; j++) {
                matmuls += text[j] ~ /HGMMA/
                exponentials += text[j] ~ /MUFU.EX2/
            }
            if (matmuls && exponentials >= 8 && (!best || i - number_at[target[i]] + 1 < best)) {
                best = i - number_at[target[i]] + 1
                of_best = matmuls
            }
        }
        print kernel, best, of_best + 0, spills + 0
    }
    /Function :/ {
        if (count) { finish() }
        kernel = name($3)
        count = spills = 0
        delete text; delete target; delete number_at
        next
    }
    match($0, /\/\*[0-9a-f][0-9a-f][0-9a-f][0-9a-f]+\*\/ +[^ \/]/) {
        split($0, part, /\*\/|\/\*/)
        count++
        text[count] = part[3]
        number_at[hex(part[2])] = count
        target[count] = ""
        if (part[3] ~ /BRA/ && match(part[3], /0x[0-9a-f]+/)) {
            target[count] = hex(substr(part[3], RSTART + 2, RLENGTH - 2))
        }
        spills += part[3] ~ /(LDL|STL)/
    }
    END { if (count) { finish() } }' "$work/wgmma_kernels.sass" >"$work/found"

failures=0
fail() {
    echo "sass: FAILED: $*"
    failures=$((failures + 1))
}
grep -q 'wgmma.* serialized' "$work/wgmma_kernels.log" && fail "$(grep -m 1 'wgmma.* serialized' "$work/wgmma_kernels.log")"
while read -r kernel width rows groups overlap mask instructions matmuls local; do
    what="$kernel $width $rows $groups $overlap $mask"
    limit=$(grep "^$what " <<<"$limits") || fail "$what: no limits"
    read -r _ _ _ _ _ _ most_instructions want_matmuls most_local <<<"$limit"
    echo "$what: $instructions instructions, $matmuls matmuls, $local accesses to local memory"
    [ "$instructions" -gt 0 ] && [ "$instructions" -le "${most_instructions:-0}" ] ||
        fail "$what: $instructions instructions, wanted up to $most_instructions"
    [ "$matmuls" = "$want_matmuls" ] || fail "$what: $matmuls matmuls, wanted $want_matmuls"
    [ "$local" -le "${most_local:-0}" ] || fail "$what: $local accesses to local memory, wanted up to $most_local"
done <"$work/found"
[ "$(wc -l <"$work/found")" = "$(wc -l <<<"${limits%$'\n'}")" ] || fail "$(wc -l <"$work/found") kernels"

# Kernel (of heads: kind 0 plain, 1 norm, 3 without weights; of rows: 0 layer norm, 1 RMS, 2 RMS with
# an offset, and after the kind the warps of a block, 0 for any number; of activations: a word),
# +codes if it makes those of E4M3; most registers, loads of 16 bytes, loads of less: positions, r of
# the four heads, or mean and rstd of rows.
limits='norm_forward 0            64 16 0
norm_forward 1            64 12 0
norm_forward 2            64 16 0
norm_forward+codes 0      80 16 0
norm_forward+codes 1      80 12 0
norm_backward+codes 0.3   128 21 16
norm_backward+codes 0.7   128 21 16
norm_backward+codes 1.0   128 21 8
activation_forward+codes gelu     64 4 0
activation_backward+codes gelu    64 8 0
activation_forward+codes swiglu   64 8 0
activation_backward+codes swiglu  64 12 0
heads_forward 0     64 6 1
heads_forward 1     64 7 1
heads_forward 3     64 6 1
heads_backward 1    128 11 1
heads_backward 3    84 10 5
'

# Prints the kernel, its registers, loads of 16 bytes, other loads, stores of 16 bytes, and accesses
# to local memory.
awk '
    function name(mangled,   kernel, kind) {
        match(mangled, /(norm|heads|activation)_(rows_)?(forward|backward)/)
        mangled = substr(mangled, RSTART) # starts with the name
        kernel = substr(mangled, 1, index(mangled, "_kernel") - 1)
        if (sub(/_rows/, "", kernel) || mangled ~ /Lb1E/) { kernel = kernel "+codes" }
        if (match(mangled, /(gelu|swiglu)_/)) { return kernel " " substr(mangled, RSTART, RLENGTH - 1) }
        match(mangled, /Kind[0-9]/)
        kind = substr(mangled, RSTART + 4, 1)
        if (kernel ~ /norm_backward/ && match(mangled, /Li[0-9]+ELb/)) {
            kind = kind "." substr(mangled, RSTART + 2, RLENGTH - 5)
        }
        return kernel " " kind
    }
    /Compiling entry function/ { kernel = name($0) }
    /Used [0-9]+ registers/ { match($0, /Used [0-9]+/); registers[kernel] = substr($0, RSTART + 5, RLENGTH - 5) }
    /Function :/ { kernel = name($3) }
    /LDG\.E\.(EF\.)?128/ { wide[kernel]++ }
    /LDG/ && !/LDG\.E\.(EF\.)?128/ { narrow[kernel]++ }
    /STG\.E\.128/ { stores[kernel]++ }
    /(LDL|STL)/ { spills[kernel]++ }
    END { for (k in registers) { print k, registers[k], wide[k] + 0, narrow[k] + 0, stores[k] + 0, spills[k] + 0 } }' \
    "$work/row_kernels.log" "$work/row_kernels.sass" | sort >"$work/found"
while read -r kernel kind registers wide narrow stores local; do
    limit=$(grep -F "$kernel $kind " <<<"$limits") || fail "$kernel $kind: no limits"
    read -r _ _ most_registers want_wide want_narrow <<<"$limit"
    found="$kernel $kind: $registers registers, $wide loads of 16 bytes, $narrow of less, $stores stores of 16 bytes"
    echo "$found, $local accesses to local memory"
    [ "$registers" -le "${most_registers:-0}" ] || fail "$found; wanted up to $most_registers registers"
    [ "$wide $narrow" = "$want_wide $want_narrow" ] || fail "$found; wanted $want_wide loads of 16 bytes, $want_narrow of less"
    [ "$stores" -ge 2 ] || fail "$found; wanted 2 of them or more"
    [ "$local" = 0 ] || fail "$found; $local accesses to local memory"
done <"$work/found"
[ "$(wc -l <"$work/found")" = "$(wc -l <<<"${limits%$'\n'}")" ] || fail "$(wc -l <"$work/found") kernels"

[ $failures = 0 ] && echo "sass: attention by wgmma and norms: what they were made for"
exit $((failures > 0))
