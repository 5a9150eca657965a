#!/usr/bin/env bash
# run_one.sh -- runs a test for dev/test.mk: run_one.sh BUILD/NAME.ok COMMAND...
#
# If it passes, its output becomes the file .ok, which ends with the CPU seconds it took, and its
# last line is shown. If it fails, its output is shown, and stays in the file .failed.
set -u
ok=$1
name=${ok#build/}
name=${name%.ok}
shift
unset MAKEFLAGS MFLAGS MAKELEVEL          # what the test builds is no part of this make
export OMP_WAIT_POLICY=passive            # threads that spin would starve each other
export ASAN_OPTIONS=detect_odr_violation=0 # second copies of modules (second_copy in the Makefile)
export UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=atexit_sleep_ms=0:exitcode=66
[[ $name != sim/* ]] || TSAN_OPTIONS+=":suppressions=$PWD/dev/test/lib/tsan_suppressions.txt"
mkdir -p "$(dirname "$ok")"
TIMEFORMAT='%U %S'
{ time timeout 900 "$@" >"$ok.out" 2>&1; } 2>"$ok.cpu"
status=$?
seconds=$(awk '{ printf "%.1f", $1 + $2 }' "$ok.cpu")
rm "$ok.cpu"
if [ $status = 0 ]; then
    { grep '^skipped: ' "$ok.out"; tail -n 1 "$ok.out"; } | awk '!seen[$0]++' | sed "s|^|$name: |;\$s|\$| ($seconds s)|"
    echo "cpu $seconds" >>"$ok.out"
    rm -f "${ok%.ok}.failed"
    mv "$ok.out" "$ok"
else
    mv "$ok.out" "${ok%.ok}.failed"
    sed "s|^|$name: |" "${ok%.ok}.failed"
    echo "$name: FAILED: $* (exit status $status, $seconds s)" | tee -a "${ok%.ok}.failed"
    exit 1
fi
