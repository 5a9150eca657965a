#!/usr/bin/env bash
# test_ranks.sh -- runs of several processes under mpirun: messages between them, and one end for all.
#
#     dev/test/test_ranks.sh build/plain/train_gpt2
#
# One line for each check that fails; the last line counts them. Uses test_comm and the library of the same build.
set -u
export OMP_WAIT_POLICY=passive LC_ALL=C
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

trainer=$(realpath "${1:?usage: test_ranks.sh TRAINER}")
build=$(dirname "$trainer")
test_comm=$build/test_comm
name=ranks
source dev/test/check.sh
source dev/test/trainer.sh
root=$PWD
work=$(mktemp -d /tmp/llmc_ranks_XXXXXX)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
export TMPDIR=$work # mpirun's files, and those of tests

if ! command -v mpirun >/dev/null || ! grep -q MPI_Init_thread "$test_comm"; then
    echo "skipped: $name: mpirun is missing, or the build has no MPI (scripts/install_deps.sh --mpi)"
    check_done
    exit
fi

# ranks N COMMAND...: sets `status`, the files stdout and stderr, and `seconds`.
ranks() {
    local begin=$SECONDS
    timeout 120 mpirun --oversubscribe --bind-to none -n "$@" >stdout 2>stderr </dev/null
    status=$?
    seconds=$((SECONDS - begin))
}

# ends_all WHAT STATUS LINE ON COMMAND...: 3 ranks end soon, with one error, whose lines are LINE and "    on ON" (empty: no
# such line).
ends_all() {
    local what=$1 wanted=$2 line=$3 on=$4
    shift 4
    ranks 3 "$@"
    check "$what: exit status $status, wanted $wanted" [ $status = "$wanted" ]
    check "$what: took $seconds s" [ $seconds -le 15 ]
    check "$what: said $(grep -c '^error: ' stderr) times" [ "$(grep -c '^error: ' stderr)" = 1 ]
    check "$what: $(grep -m 1 '^error: ' stderr)" grep -q "^error: $line\$" stderr
    if [ -n "$on" ]; then
        check "$what: $(grep -m 1 '^    on ' stderr)" grep -q "^    on $on" stderr
    else
        check "$what: $(grep -m 1 '^    on ' stderr)" [ "$(grep -c '^    on ' stderr)" = 0 ]
    fi
    check "$what: processes are left" [ -z "$(pgrep -f "^$test_comm")" ]
}

test_messages() {
    local n
    for n in 1 2 3 4; do
        ranks $n "$test_comm"
        check "$n ranks: exit status $status, $(head -n 1 stderr)" [ $status = 0 ]
        check "$n ranks: $(cat stdout)" [ "$(cat stdout)" = "test_comm: ok" ]
    done
    export LLMC_NODES=2
    for n in 3 4; do
        ranks $n "$test_comm"
        check "$n ranks on two machines that are one: exit status $status, $(cat stdout)" [ $status = 0 ]
    done
    export LLMC_NODES=5
    ends_all "too many machines" 2 "LLMC_NODES=5; wanted 1 to 3, the number of processes" "rank 0 of 3" "$test_comm"
    unset LLMC_NODES
}

test_errors() {
    ends_all "an error of one rank" 1 "disk full" "rank 2 of 3 ($(uname -n), pid [0-9]*)" "$test_comm" fail
    ends_all "an error of rank 0" 1 "disk full" "rank 0 of 3" "$test_comm" first
    ends_all "an error of all ranks" 1 "disk full" "rank 0 of 3" "$test_comm" all
    ends_all "an error in a thread" 1 "disk full" "rank 2 of 3" "$test_comm" thread
    ends_all "a wrong option" 2 "unknown option --bacth; did you mean --batch?.*" "" "$test_comm" fail --bacth 3
    ends_all "ranks that disagree" 1 "the ranks disagree about --seed: 42 on ranks 0 2, 43 on rank 1" "" "$test_comm" agree
    ends_all "the wrong number of processes" 2 "rank 0 of 4 by .*, rank 0 of 3 by MPI; wanted the mpirun of .*" "" \
        bash -c 'exec "$0" fail -pn 4 -pr $OMPI_COMM_WORLD_RANK' "$test_comm"
    ends_all "an error with files" 1 ".*llmc_test_.*: is lost" "rank 2 of 3" "$test_comm" files
    check "which are removed" [ -z "$(compgen -G "$work/llmc_test_*")" ]
    ranks 3 "$test_comm" exit
    check "exit() of one rank: exit status $status" [ $status = 1 ]
    ranks 3 "$test_comm" kill
    check "kill -9 of one rank: exit status $status" [ $status = 137 ]
}

# Who waits says where; who is stopped says nothing.
test_watchdog() {
    local line="has waited [0-9]* s in step 12"
    ranks 3 "$test_comm" stuck --timeout 2
    check "a stopped rank: exit status $status, after $seconds s" [ $status = 1 -a $seconds -le 15 ]
    check "a stopped rank: the others" [ "$(grep -c "^error: rank [01] of 3 (.*) $line, reduce of block 7" stderr)" = 2 ]
    check "a stopped rank: itself" [ "$(grep -c '^error: ' stderr)" = 2 ]
    check "a stopped rank: processes are left" [ -z "$(pgrep -f "^$test_comm")" ]
    ranks 3 "$test_comm" slow --timeout 2
    check "a slow rank: exit status $status, after $seconds s" [ $status = 1 -a $seconds -le 15 ]
    check "a slow rank: itself" grep -q "^error: rank 2 of 3 (.*) $line, loading data" stderr
}

test_signal() {
    ranks 3 "$test_comm" signal
    check "SIGUSR2 to mpirun: exit status $status" [ $status = 75 ]
}

# The same program without MPI: one process runs, several say what is missing.
test_without_mpi() {
    check "without MPI it compiles" "${CC:-cc}" -std=gnu11 -D_GNU_SOURCE -fopenmp -I"$root" -DCOMM_MPI_IMPLEMENTATION \
        -include "$root/llmc/comm_mpi.h" "$root/dev/test/test_comm.c" "$build/libllmc.a" -o without_mpi -lm -lpthread
    ranks 1 ./without_mpi
    check "without MPI, one process: $(cat stdout)" [ "$(cat stdout)" = "test_comm: ok" ]
    ends_all "without MPI" 2 "3 processes, but this program was built without MPI: scripts/install_deps.sh --mpi.*" "" \
        ./without_mpi
}

test_messages
test_errors
test_watchdog
test_signal
test_without_mpi
check_done
