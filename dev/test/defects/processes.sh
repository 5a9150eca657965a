# processes.sh -- faults of launchers and containers, and of ranks that start or end unlike the
# others; for dev/test/defects.sh.
# shellcheck shell=bash disable=SC2154
tiny=(--layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 2 --samples 0 --eval-every 0)

# has_mpi: mpirun, and a trainer that was built with MPI.
has_mpi() {
    is_here mpirun || return 1
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 TMPDIR=$work
    grep -q MPI_Init_thread "$trainer" || { echo "skipped: $name: the trainer was built without MPI" && return 1; }
}

# ranks COMMAND...: under mpirun; sets `status` and the files stdout and stderr.
ranks() {
    timeout 120 mpirun --oversubscribe "$@" >stdout 2>stderr </dev/null
    status=$?
}

# in_group CONTROLLER FILE VALUE [FILE VALUE] -- COMMAND...: in a new control group of version 1;
# fails where none can be made.
in_group() {
    local group=/sys/fs/cgroup/$1/pretrain_test_$$
    shift
    mkdir "$group" 2>/dev/null || { echo "skipped: $name: no control group of version 1 can be made here" && return 1; }
    while [ "$1" != -- ]; do
        echo "$2" >"$group/$1"
        shift 2
    done
    shift
    bash -c 'echo $$ >"$1/cgroup.procs"; shift; exec "$@"' _ "$group" timeout 120 "$@" >stdout 2>stderr </dev/null
    status=$?
    rmdir "$group"
}

defect_cpu_quota_of_a_container_starts_threads_for_all_cores() {
    unset OMP_NUM_THREADS
    in_group cpu cpu.cfs_period_us 100000 cpu.cfs_quota_us 50000 -- "$trainer" "${tiny[@]}" || return
    check "half a core: exit status $status" [ $status = 0 ]
    check "half a core: one thread: $(grep 'thread' stdout)" grep -q '; 1 thread, ' stdout
    [ "$(nproc)" = 1 ] || check "and a note" grep -q '^note: a quota of 0.5 of' stdout
}

defect_memory_limit_of_a_container_is_not_seen() {
    local model=(--model d12 --vocab-size 50257 --batch 16 --seq-len 256 --steps 1 --samples 0)
    in_group memory memory.limit_in_bytes 3000M -- "$trainer" "${model[@]}" --fit auto --plan || return
    check "--fit auto: $(grep -m 1 '^fit: into' stdout)" awk '/^fit: into/ { exit !($3 > 2500 && $3 <= 3000) }' stdout
    in_group memory memory.limit_in_bytes 3000M -- "$trainer" "${model[@]}"
    check_error "more than the limit" 1 "the run takes|the limits of this job|--fit auto"
    (ulimit -v 3000000 && train "${model[@]}" --fit auto --plan)
    check "ulimit -v, --fit auto: $(grep -m 1 '^fit: into' stdout)" awk '/^fit: into/ { exit !($3 > 1000 && $3 <= 3000) }' stdout
}

defect_absurd_number_of_threads_in_the_environment() {
    local number
    for number in 100000 2147483648; do
        OMP_NUM_THREADS=$number bad 2 "OMP_NUM_THREADS=$number; wanted 1 to 4096 threads" "${tiny[@]}"
    done
}

defect_plan_of_more_processes_than_tokens() {
    good "--plan of 100 processes" "${tiny[@]}" --plan --num-processes 100
    good "--plan of a million" "${tiny[@]}" --plan --num-processes 1000000
}

defect_options_of_one_rank_mix_up_messages() {
    has_mpi || return
    local only
    for only in --plan "--fit 1" --print-config; do
        ranks --bind-to none -n 2 "$trainer" "${tiny[@]}" : -n 1 "$trainer" "${tiny[@]}" $only
        check "$only on one rank: exit status $status" [ $status = 1 ]
        check "$only on one rank: $(head -n 1 stderr)" grep -q "^error: the ranks disagree about ${only% *}: " stderr
    done
}

defect_rank_that_ends_before_joining_is_waited_for_in_silence() {
    has_mpi || return
    ranks --bind-to none -n 1 "$trainer" --version : -n 1 "$trainer" "${tiny[@]}" --timeout 2
    check "--version on one rank: exit status $status" [ $status = 1 ]
    check "it is said soon" grep -q '^note: rank 1 of 2 (.*) has waited 10 s for the others to join' stderr
}

defect_mpirun_binds_a_single_process_to_a_core_in_silence() {
    has_mpi || return
    unset OMP_NUM_THREADS
    [ "$(nproc)" -gt 1 ] || { echo "skipped: $name: one core" && return; }
    ranks --bind-to core -n 1 "$trainer" "${tiny[@]}"
    check "mpirun -n 1: $(grep '^note' stdout)" grep -q '^note: bound to 1 of .* cores by mpirun; mpirun --bind-to none' stdout
}

defect_newer_processors_program_dies_by_an_illegal_instruction() {
    local qemu program
    qemu=$(command -v qemu-x86_64 || command -v qemu-x86_64-static) || { is_here qemu-x86_64 || return; }
    if ! grep -qw avx2 /proc/cpuinfo; then
        echo "skipped: $name: this processor is an old one" && return
    fi
    for program in "$trainer" "$tokenize"; do
        GOMP_SPINCOUNT=1 "$qemu" -cpu Nehalem "$program" --version >stdout 2>stderr
        status=$?
        sed -i '/^qemu/d' stderr
        check_error "${program##*/} on a processor of 2008" 1 "was built for a newer processor, with avx|make MARCH=-march=x86-64-v2"
    done
}

defect_terminal_escapes_in_the_log_of_mpirun() {
    has_mpi || return
    ranks --bind-to none -n 2 "$trainer" --layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 300 --samples 0
    check "exit status $status" [ $status = 0 ]
    check "steps are there" grep -qa '^step *300/300' stdout
    check "escapes in the log" [ "$(grep -ca "$(printf '\033')" stdout)" = 0 ]
}

defect_number_of_threads_in_the_environment_is_not_that_of_encoders() {
    is_here strace || return
    local threads
    seq 20000 >numbers.txt
    printf '#version: 0.2\n1 2\n' >merges.txt
    for threads in 1 3; do
        OMP_NUM_THREADS=$threads strace -f -o calls -e trace=clone,clone3 \
            "$tokenize" --tokenizer merges.txt --val-tokens 0 --out tokens --restart numbers.txt >stdout 2>stderr
        check "$threads encoders and a reader: $(grep -c 'clone.*) = [0-9]' calls)" \
            [ "$(grep -c 'clone.*) = [0-9]' calls)" = $((threads + 1)) ]
    done
}
