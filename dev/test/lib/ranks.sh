# ranks.sh -- runs several ranks in tests written in bash; for `source`, after trainer.sh.
#
#     ranks_begin NAME           trainer_begin; sets `is_gpu`; without MPI the test ends as skipped
#     ranks N COMMAND...         N ranks, without mpirun (mpi_stand_in.c); `N COMMAND... : M COMMAND...`: N of one, M of
#                                another. Sets `status`, the files stdout and stderr, and `seconds`
#     by_mpi N COMMAND...        the same under mpirun
#     trains N OUT OPTIONS...    N ranks of the trainer, which must succeed and have nothing to complain about; what it
#                                prints is in stdout, and in OUT.txt
#     by_mpi_trains              the same under mpirun
#     in_any_order N OUT OPTIONS...    trains, three times, on GPUs that do one operation of NCCL at a
#                                time, whichever can start first: OUT_1 and OUT_2 while NCCL
#                                keeps an order for the program, OUT_3 while its events do
#     logged OUT                 prints the losses, norms and rates of all steps, and the samples
#     same_weights WHAT A B      A and B have the same weights in their last checkpoints
#     same WHAT A B              also the same log
# shellcheck shell=bash disable=SC2034,SC2154

ranks_begin() {
    is_gpu=
    case $trainer in */train_gpt2cu) is_gpu=1 ;; esac
    root=$PWD
    trainer_begin "$1"
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 TMPDIR=$work # mpirun's files
    if ! command -v mpirun >/dev/null || ! grep -q MPI_Init_thread "$trainer"; then
        echo "skipped: $1: mpirun is missing, or the build has no MPI (scripts/install_deps.sh --test)"
        check_done
        exit
    fi
    stand_in=$work/mpi_stand_in.so
    messages=$work/messages
    [ ! -w /dev/shm ] || messages=/dev/shm/${work##*/} # in memory
    mpicc -O1 -shared -fPIC "$root/dev/test/lib/mpi_stand_in.c" -o "$stand_in" || exit 1
}

ranks() {
    local begin=$SECONDS n=$1 size=$1 i words=("$@") command pids=()
    for ((i = 1; i < $#; i++)); do
        [ "${words[i]}" != : ] || size=$((size + words[i + 1]))
    done
    if [ "$size" = 1 ]; then
        "${@:2}" >stdout 2>stderr </dev/null
        status=$?
        seconds=$((SECONDS - begin))
        return
    fi
    export OMPI_COMM_WORLD_SIZE=$size OMPI_COMM_WORLD_LOCAL_SIZE=$size LLMC_RANKS_FILE=$messages
    : >stdout
    : >stderr
    while [ $# -gt 0 ]; do
        n=$1 command=()
        shift
        while [ $# -gt 0 ] && [ "$1" != : ]; do command+=("$1") && shift; done
        shift $(($# > 0))
        for ((; n > 0; n--)); do
            OMPI_COMM_WORLD_RANK=${#pids[@]} OMPI_COMM_WORLD_LOCAL_RANK=${#pids[@]} LD_PRELOAD=$stand_in \
                "${command[@]}" >>stdout 2>>stderr </dev/null &
            pids+=($!)
        done
    done
    ranks_end "${pids[@]}"
    rm -f "$messages"
    unset OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE LLMC_RANKS_FILE
    seconds=$((SECONDS - begin))
}

# ranks_end PID...: waits for them; if one fails, ends the others, as mpirun does. Sets `status`,
# which is the first that is not 0.
ranks_end() {
    local pid
    {
        # 143 may be that of a rank of an earlier call, which `kill` has ended
        while wait -n; status=$?; [ $status = 0 ] || [ $status = 143 ]; do :; done
        if [ $status = 127 ]; then # there is none left
            status=0
        else
            kill "$@"
            sleep 0.2
            kill -KILL "$@"
        fi
        for pid in "$@"; do
            wait "$pid"
            status=$((status == 0 ? $? : status))
        done
    } 2>/dev/null # without bash's lines on killed ones
}

by_mpi() {
    local begin=$SECONDS word words=(-n)
    for word in "$@"; do
        words+=("$word")
        [ "$word" != : ] || words+=(-n)
    done
    timeout 120 mpirun --oversubscribe --bind-to none "${words[@]}" >stdout 2>stderr </dev/null
    status=$?
    seconds=$((SECONDS - begin))
}

# trains_by LAUNCH N OUT OPTIONS...
trains_by() {
    local launch=$1 n=$2 out=$3
    shift 3
    rm -rf "$out"
    $launch "$n" "$trainer" --out "$out" "$@"
    check "$out: exit status $status, $(head -n 1 stderr)" [ $status = 0 ]
    check "$out: standard error: $(head -n 1 stderr)" [ ! -s stderr ]
    cp stdout "$out.txt"
}

trains() { trains_by ranks "$@"; }
by_mpi_trains() { trains_by by_mpi "$@"; }

in_any_order() {
    local n=$1 out=$2 run
    for run in 1 2 3; do
        [ $run != 3 ] || export CUSIM_NCCL_VERSION=22501
        CUSIM_STREAMS=random CUSIM_SEED=$run CUSIM_NCCL_SERIAL=2 CUSIM_NCCL_TIMEOUT=20 trains "$n" "${out}_$run" "${@:3}"
    done
    unset CUSIM_NCCL_VERSION
    check "${out}_3: events keep the order: $(grep '^NCCL' stdout)" grep -q '^NCCL 2.25.1: .*; it keeps no order of exchanges' stdout
}

logged() {
    local what='{"kind":"\(train\|val\|sample\)","step":\([0-9]*\),\("loss"\|"text"\):\([^,}]*\)'
    sed -n "s/^$what"'\(,"norm":[^,]*,"lr":[^,]*\)\?.*/\1 \2 \4 \5/p' "$1/log.jsonl"
}

same_weights() {
    local last
    last=$(basename "$(printf '%s\n' "$2"/step_* | tail -n 1)")
    check "$1: the same weights in $last" cmp -s "$2/$last/model.safetensors" "$3/$last/model.safetensors"
}

same() {
    same_weights "$@"
    check "$1: the same log" [ -n "$(logged "$2")" -a "$(logged "$2")" = "$(logged "$3")" ]
}
