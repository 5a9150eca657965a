# ranks.sh -- runs the trainer as several ranks under mpirun, in tests written in bash; for
# `source`, after trainer.sh.
#
#     ranks_begin NAME           trainer_begin; sets `is_gpu`; without MPI the test ends as skipped
#     trains N OUT OPTIONS...    N ranks, which must succeed and have nothing to complain about
#     logged OUT                 prints the losses, norms and rates of all steps, and the samples
#     same_weights WHAT A B      A and B have the same weights in their last checkpoints
#     same WHAT A B              also the same log
# shellcheck shell=bash disable=SC2034,SC2154

ranks_begin() {
    is_gpu=
    case $trainer in */train_gpt2cu) is_gpu=1 ;; esac
    trainer_begin "$1"
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 TMPDIR=$work # mpirun's files
    if ! command -v mpirun >/dev/null || ! grep -q MPI_Init_thread "$trainer"; then
        echo "skipped: $1: mpirun is missing, or the build has no MPI (scripts/install_deps.sh --test)"
        check_done
        exit
    fi
}

trains() {
    local n=$1 out=$2
    shift 2
    rm -rf "$out"
    timeout 120 mpirun --oversubscribe --bind-to none -n "$n" "$trainer" --out "$out" "$@" >stdout 2>stderr </dev/null
    status=$?
    check "$out: exit status $status, $(head -n 1 stderr)" [ $status = 0 ]
    check "$out: standard error: $(head -n 1 stderr)" [ ! -s stderr ]
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
