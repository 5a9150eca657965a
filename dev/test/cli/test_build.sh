#!/usr/bin/env bash
# test_build.sh -- tests the Makefile with a compiler that only records its calls: which programs a
# change of flags, libraries or commit builds again, and which it leaves; `make install`.
#
#     dev/test/cli/test_build.sh
#
# One line for each check that fails; the last line counts them.
set -u
export LC_ALL=C
unset MAKEFLAGS MFLAGS MAKELEVEL CC CFLAGS LDLIBS MARCH OPT OPENMP WERROR BUILD DESTDIR PREFIX

root=$PWD
name=test_build
source dev/test/lib/check.sh
work=$(mktemp -d /tmp/llmc_build_XXXXXX)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

mkdir -p dev/data dev/test/base dev/test/lib dev/bench llmc/base
echo "#ifdef X_IMPLEMENTATION" >llmc/base/x.h
cp "$root/Makefile" .
cp "$root"/dev/*.mk dev
touch train_gpt2.c dev/data/tokenize.c dev/test/base/test_x.c dev/test/lib/runner.c

# Preprocesses zstd.h only where `has_zstd` is; else makes the file behind -o.
cat >compiler <<'END'
#!/bin/sh
case " $* " in *" -E "*) grep -q zstd.h - && [ ! -e has_zstd ]; exit $((1 - $?)) ;; esac
echo "$*" >>calls
while [ "$1" != -o ]; do shift; done
echo built >"$2"
END
chmod +x compiler
build() { make CC=./compiler "$@"; }
# needs TARGET SETTINGS...: it would be built again; if so, it is. stays: it would not.
needs() { ! build -q "$@" && build -s "$@" && build -q "$@"; }
stays() { build -q "$@"; }

test_flags() {
    check "a first build" needs train_gpt2
    check "nothing has changed" stays train_gpt2
    check "warnings as errors change no code" stays train_gpt2 WERROR=-Werror
    local setting
    for setting in OPENMP= MARCH=-march=x86-64-v2 OPT=-O0 "CFLAGS=-DX='1, 2'" LDLIBS=-lx; do
        check "$setting" needs train_gpt2 "$setting"
        check "$setting, again" stays train_gpt2 "$setting"
        check "and without $setting" needs train_gpt2
    done
    check "an instruction set by its name" needs train_gpt2 MARCH=x86-64-v3
    check "is called as the compiler calls it" grep -q ' -march=x86-64-v3 ' <(tail -n 1 calls)
    check "which is the same" stays train_gpt2 MARCH=-march=x86-64-v3
    check "options beside it" needs train_gpt2 "MARCH=x86-64-v3 -mtune=native"
    check "stay as they are" grep -q ' -march=x86-64-v3 -mtune=native ' <(tail -n 1 calls)
    check "none" needs train_gpt2 MARCH=
    check "is none" [ "$(tail -n 1 calls | grep -c march)" = 0 ]
    check "and again that of this machine" needs train_gpt2
    check "another compiler" needs train_gpt2 CC="./compiler -x"
    check "and back" needs train_gpt2
    check "another directory" needs train_gpt2 BUILD=build/other OPT=-O0
    check "has its own flags" stays build/plain/train_gpt2
    check "a test" needs build/plain/test_base OPT=-O1
    touch has_zstd
    check "a library that was installed since" needs train_gpt2
    check "is used" grep -q 'HAVE_ZSTD.*-lzstd' <(tail -n 1 calls)
    rm has_zstd
    check "asking builds nothing" [ "$(wc -l <calls)" = "$(build -n train_gpt2 >/dev/null && wc -l <calls)" ]
}

# Flags of nvcc come beside the Makefile's own, from the command line and from the environment.
test_nvcc_flags() {
    local calls
    touch train_gpt2.cu
    calls=$(build -n train_gpt2cu NVCC=./compiler ARCH=sm_90a NVCCFLAGS='-ccbin g++-12' 2>&1)
    check "flags of nvcc: $(grep -c ccbin <<<"$calls")" grep -q '\./compiler -ccbin g++-12 -std=c++17 .* -gencode arch=compute_90a,code=sm_90a -DGPU_SM=90 -DPRECISION_BF16 ' <<<"$calls"
    calls=$(NVCCFLAGS='-ccbin g++-12' build -n train_gpt2cu NVCC=./compiler ARCH=sm_90a 2>&1)
    check "from the environment: $(grep -c ccbin <<<"$calls")" grep -q '\./compiler -ccbin g++-12 -std=c++17 .* -gencode arch=compute_90a,code=sm_90a ' <<<"$calls"
}

test_missing_nvcc() {
    local calls=$(wc -l <calls)
    check "the GPU trainer without nvcc ends" eval '! build train_gpt2cu NVCC=no_such_nvcc >stdout 2>stderr'
    check "says what to do: $(head -n 1 stderr)" grep -q 'no no_such_nvcc here; wanted the CUDA toolkit' stderr
    check "and without a GPU" grep -q 'make sim' stderr
    check "before it compiles anything" [ "$calls" = "$(wc -l <calls)" ]
}

test_commit() {
    command -v git >/dev/null || { echo "skipped: $name: git is missing"; return; }
    commit() { git -c user.name=x -c user.email=x@x.org commit -q --allow-empty -m "$1"; }
    build -s train_gpt2 build/plain/test_base
    git init -q . && commit one
    check "the first commit" needs train_gpt2
    check "is said" grep -q "GIT_COMMIT=\"$(git describe --always)" <(tail -n 1 calls)
    commit two
    check "another commit" needs train_gpt2
    check "is nothing to a test" stays build/plain/test_base
    mv .git away
    check "where git cannot be asked" stays train_gpt2
}

test_install() {
    local bin=root/usr/bin
    check "install" build -s install DESTDIR=root PREFIX=/usr
    check "installed: $(ls $bin)" [ "$(ls $bin | tr '\n' ' ')" = "tokenize train_gpt2 " ]
    touch train_gpt2cu $bin/mine
    check "with a GPU trainer" build -s install DESTDIR=root PREFIX=/usr
    check "is installed, too" [ -x $bin/train_gpt2cu ]
    check "uninstall" build -s uninstall DESTDIR=root PREFIX=/usr
    check "removes ours: $(ls $bin)" [ "$(ls $bin)" = mine ]
    local odd="a  b's \"c\" \$\$d"
    check "a directory of an odd name" build -s install DESTDIR="$work/" "PREFIX=$odd"
    odd=${odd/\$\$/\$}
    check "has the programs" [ -x "$odd/bin/train_gpt2" ]
    check "uninstall from it" build -s uninstall DESTDIR="$work/" "PREFIX=${odd/\$/\$\$}"
    check "removes them: $(ls "$odd/bin")" [ ! -e "$odd/bin/train_gpt2" ]
    check "no directory of a part of the name" [ ! -e a ]
}

test_run() {
    printf '#!/bin/sh\nprintf "%%s\\n" "$@" >ran\n' >train_gpt2
    chmod +x train_gpt2
    check "make run into a directory with blanks" build -s run -o train_gpt2 NVCC=none "OUT=my  first run"
    check "hands it on: $(tail -n 3 ran | head -n 1)" [ "$(tail -n 3 ran | head -n 1)" = "my  first run" ]
}

test_help() {
    local target
    build help >list
    for target in train_gpt2 train_gpt2cu tokenize run test install clean; do
        check "make help: $target" grep -q "^  make $target[[:space:]]" list
    done
}

test_flags
test_nvcc_flags
test_missing_nvcc
test_commit
test_install
test_run
test_help
check_done
