// test_launcher.c -- launcher.h: this process's rank, for every row of the table, from environments
// made here; and refusals.
#define LAUNCHER_IMPLEMENTATION

#include "llmc/base/check.h"
#include "llmc/setup/launcher.h"
#include "llmc/setup/options.h"

#include "dev/test/lib/test.h"

enum { WORDS_MAX = 32 };

// Words separated by blanks, ended by NULL. Lives until the next call but three.
static char** words_of(const char* text) {
    static char texts[4][512], *words[4][WORDS_MAX + 1];
    static int next = 0;
    char** list = words[next];
    char* at = texts[next];
    next = (next + 1) % 4;
    snprintf(at, sizeof(texts[0]), "%s", text);
    int count = 0;
    for (char *save = NULL, *word = strtok_r(at, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
        CHECK(count < WORDS_MAX, "more than %d words: %s", WORDS_MAX, text);
        list[count++] = word;
    }
    list[count] = NULL;
    return list;
}

typedef struct {
    const char *command_line, *environment;
    int trainer;
} Start;

static Options options_of(const char* command_line, int trainer) {
    char line[512];
    Options options;
    snprintf(line, sizeof(line), "train_gpt2 %s", command_line);
    char** argv = words_of(line);
    int argc = 0;
    while (argv[argc]) {
        argc++;
    }
    options_parse(&options, argc, argv, options_program(trainer));
    return options;
}

static Launcher find(const char* command_line, const char* environment) {
    const Options options = options_of(command_line, OPTION_CPU);
    return launcher_find_in(&options, (const char* const*)words_of(environment));
}

static void refused_body(const void* context) {
    const Start* start = (const Start*)context;
    const Options options = options_of(start->command_line, start->trainer);
    launcher_find_in(&options, (const char* const*)words_of(start->environment));
    const Grid grid = grid_of_data(0, 1);
    launcher_zero(&options, &grid);
}

static int refused(const char* command_line, const char* environment, const char* wanted) {
    const Start start = {command_line, environment, OPTION_CPU};
    return test_dies(refused_body, &start, EXIT_USAGE, wanted);
}

// On a GPU, where processes need no MPI.
static Launcher find_gpu(const char* command_line, const char* environment) {
    const Options options = options_of(command_line, OPTION_GPU);
    return launcher_find_in(&options, (const char* const*)words_of(environment));
}

static int refused_gpu(const char* command_line, const char* environment, const char* wanted) {
    const Start start = {command_line, environment, OPTION_GPU};
    return test_dies(refused_body, &start, EXIT_USAGE, wanted);
}

// How and where they meet.
static int meets(Launcher launch, LaunchInit init, const char* host, int port, const char* file,
                 const char* job) {
    const CommMeeting* m = &launch.meeting;
    const int ok = launch.init == init && strcmp(m->host, host) == 0 && m->port == port &&
                   strcmp(m->file, file) == 0 && strcmp(m->job, job) == 0;
    if (!ok) {
        printf("init %d, %s:%d, file '%s', job '%s'\n", (int)launch.init, m->host, m->port, m->file, m->job);
    }
    return ok;
}

static int is(Launcher launch, const char* launcher, int rank, int size, int local_rank, int local_size) {
    const CommPlace place = launch.place;
    const int ok = strcmp(launch.launcher, launcher) == 0 && place.rank == rank && place.size == size &&
                   place.local_rank == local_rank && place.local_size == local_size &&
                   (launch.init == LAUNCHER_AUTO) == (size == 1);
    if (!ok) {
        printf("'%s': rank %d of %d, local %d of %d, init %d\n", launch.launcher, place.rank, place.size,
               place.local_rank, place.local_size, (int)launch.init);
    }
    return ok;
}

#define OMPI "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 "
#define OMPI_LOCAL "OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4 "
#define PMI "PMI_RANK=2 PMI_SIZE=3 "
#define SLURM "SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_LOCALID=1 "
#define TASK SLURM "SLURM_STEP_NUM_TASKS=4 "
#define STEP TASK "SLURM_JOB_ID=4711 SLURM_STEP_ID=2 SLURM_STEP_NODELIST=node[07-12,20],other "
#define TORCH "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=29400 "
#define ELASTIC TORCH "TORCHELASTIC_RUN_ID=books TORCHELASTIC_RESTART_COUNT=3 "

TEST(sources) {
    EXPECT(is(find("", "HOME=/ PATH=/bin"), "", 0, 1, 0, 1));
    EXPECT(is(find("", OMPI OMPI_LOCAL), "mpirun", 5, 8, 1, 4));
    EXPECT(is(find("", OMPI), "mpirun", 5, 8, -1, -1));
    EXPECT(is(find("", PMI "MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1"), "mpiexec", 2, 3, 0, 1));
    EXPECT(is(find("", PMI), "mpiexec", 2, 3, -1, -1));
    EXPECT(is(find("", TASK "SLURM_STEP_ID=0 PMIX_RANK=3"), "srun", 3, 4, 1, -1));
    EXPECT(is(find_gpu("", STEP), "srun", 3, 4, 1, -1));
    EXPECT(is(find_gpu("", TORCH), "torchrun", 1, 2, 1, 2));
    EXPECT(is(find_gpu("", ELASTIC STEP PMI), "torchrun", 1, 2, 1, 2),
           "srun starts torchrun on each machine");
    EXPECT(is(find("", SLURM), "", 0, 1, 0, 1), "a script of sbatch");
    EXPECT(is(find("", SLURM "SLURM_STEP_ID=4294967294"), "", 0, 1, 0, 1), "the step of a script of sbatch");
    EXPECT(is(find("", SLURM "SLURM_STEP_NUM_TASKS=1 SLURM_STEP_ID=0"), "", 0, 1, 0, 1),
           "a shell of salloc -n 8");
    EXPECT(is(find("", "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1"), "mpirun", 0, 1, 0, 1),
           "mpirun -n 1");
    EXPECT(is(find("", "PMI_RANKS=2 XPMI_RANK=2"), "", 0, 1, 0, 1), "other names");
    const Options gpu = options_of("", OPTION_GPU);
    EXPECT(is(launcher_find_in(&gpu, (const char* const*)words_of(OMPI)), "mpirun", 5, 8, -1, -1));
    EXPECT(is(find("", TORCH TASK "SLURM_STEP_ID=0 " PMI OMPI OMPI_LOCAL), "mpirun", 5, 8, 1, 4),
           "the first");
    EXPECT(meets(find("", OMPI), LAUNCHER_MPI, "", 0, "", ""));
    EXPECT(meets(find("", STEP "PMI_FD=3"), LAUNCHER_MPI, "", 0, "", ""));
    EXPECT(meets(find_gpu("", STEP "PMIX_RANK=3"), LAUNCHER_MPI, "", 0, "", ""));
    EXPECT(is(find("", TORCH TASK "SLURM_STEP_ID=0 " PMI), "mpiexec", 2, 3, -1, -1), "the second");
    EXPECT(is(find("--init mpi", TORCH TASK "SLURM_STEP_ID=0"), "srun", 3, 4, 1, -1), "the third");
}

static int forgets(const char* environment) {
    return launcher_forgets_srun((const char* const*)words_of(environment));
}

TEST(forgotten_srun) {
    EXPECT(forgets(SLURM) && forgets(SLURM "SLURM_STEP_ID=4294967294"), "a script of sbatch -n 8");
    EXPECT(!forgets(STEP), "a task");
    EXPECT(!forgets(SLURM "SLURM_STEP_NUM_TASKS=1 SLURM_STEP_ID=0"), "srun -n 1");
    EXPECT(!forgets(SLURM OMPI), "mpirun in a script");
    EXPECT(!forgets("SLURM_NTASKS=1") && !forgets(""));
}

TEST(options) {
    EXPECT(is(find("-pn 1", ""), "", 0, 1, 0, 1));
    EXPECT(is(find("-pn 1 -pr 0 -pg 8 -pi tcp -ps host:1 -pf /tmp", ""), "", 0, 1, 0, 1),
           "llm.c's, one process");
    EXPECT(is(find("-pn 1", OMPI OMPI_LOCAL), "mpirun", 0, 1, 0, 1),
           "runs that have nothing to do with each other");
    EXPECT(is(find("-pn 8 -pr 6", OMPI OMPI_LOCAL), "mpirun", 6, 8, -1, -1));
    EXPECT(is(find("-pn 8 -pr 6 -pg 4 -pi mpi", OMPI), "mpirun", 6, 8, 2, 4));
    EXPECT(is(find("-pn 7 -pr 6 -pg 4", OMPI), "mpirun", 6, 7, 2, 3), "the last machine has fewer");
    EXPECT(is(find("-pg 4", OMPI), "mpirun", 5, 8, 1, 4));
    EXPECT(is(find("-pg 2", OMPI OMPI_LOCAL), "mpirun", 5, 8, 1, 4), "the launcher knows better");
}

TEST(meetings) {
    const Launcher step = find_gpu("", STEP), next = find_gpu("", "SLURM_JOB_ID=4712 " STEP);
    EXPECT(step.meeting.port >= 20000 && step.meeting.port < 30000, "%d", step.meeting.port);
    EXPECT(meets(step, LAUNCHER_TCP, "node07", step.meeting.port, "", "srun 4711.2"));
    EXPECT(next.meeting.port != step.meeting.port && strcmp(next.meeting.job, "srun 4712.2") == 0);
    EXPECT(meets(find_gpu("", TORCH), LAUNCHER_TCP, "node1", 29401, "", ""));
    EXPECT(meets(find_gpu("", ELASTIC), LAUNCHER_TCP, "node1", 29401, "", "torchrun books.3"));
    EXPECT(meets(find_gpu("-ps h:7", ELASTIC), LAUNCHER_TCP, "h", 7, "", "torchrun books.3"));
    EXPECT(meets(find_gpu("-ps 10.0.0.1", TORCH), LAUNCHER_TCP, "10.0.0.1", 29500, "", ""));
    EXPECT(meets(find_gpu("-ps [fe80::1]:7", TORCH), LAUNCHER_TCP, "fe80::1", 7, "", ""));
    EXPECT(meets(find_gpu("-ps [fe80::1]", TORCH), LAUNCHER_TCP, "fe80::1", 29500, "", ""));
    EXPECT(meets(find_gpu("-ps fe80::1", TORCH), LAUNCHER_TCP, "fe80::1", 29500, "", ""));
    EXPECT(meets(find_gpu("-pi fs -o out/x", TORCH), LAUNCHER_FS, "", 0, "out/x/meeting.txt", ""));
    EXPECT(meets(find_gpu("-pi fs -pf /tmp", ELASTIC), LAUNCHER_FS, "", 0, "/tmp/meeting.txt",
                 "torchrun books.3"));
    EXPECT(meets(find_gpu("-pn 8 -pr 6 -pg 4 -pi tcp -ps h:1", ""), LAUNCHER_TCP, "h", 1, "", ""), "llm.c's");
    EXPECT(
        meets(find_gpu("-pn 8 -pr 6 -pg 4 -pi fs -pf /tmp", ""), LAUNCHER_FS, "", 0, "/tmp/meeting.txt", ""));
    EXPECT(meets(find_gpu("-pn 8 -pr 6 -ps h:1", ""), LAUNCHER_TCP, "h", 1, "", ""), "auto, with a server");
    EXPECT(meets(find_gpu("-pn 8 -pr 6 -o out", ""), LAUNCHER_FS, "", 0, "out/meeting.txt", ""),
           "auto, without");
    EXPECT(meets(find_gpu("-pi tcp -ps h:1", OMPI), LAUNCHER_TCP, "h", 1, "", ""), "mpirun may start them");
    const char* lists[][2] = {{"a", "a"},         {"a,b", "a"},       {"n[3]", "n3"},
                              {"n[3-5]x", "n3x"}, {"n[01,3]", "n01"}, {"r[1-2]n[7-9]", "r1n7"},
                              {"n[7", "n7"},      {"n[", "n"}};
    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        char environment[256];
        snprintf(environment, sizeof(environment), TASK "SLURM_STEP_ID=0 SLURM_STEP_NODELIST=%s",
                 lists[i][0]);
        const Launcher launch = find_gpu("", environment);
        EXPECT(strcmp(launch.meeting.host, lists[i][1]) == 0, "%s: %s", lists[i][0], launch.meeting.host);
    }
}

TEST(refused_meetings) {
    EXPECT(refused_gpu("-pn 4 -pr 1 -pi mpi", "", "4 processes|mpirun -n 4"));
    EXPECT(refused_gpu("-pi mpi", TORCH, "2 processes|mpirun -n 2"));
    EXPECT(refused_gpu("-pn 4 -pr 1 -pi tcp", "", "--init tcp wants --server HOST[:PORT]"));
    EXPECT(refused_gpu("-pn 4 -pr 1 -pi fs", "", "--init fs wants --fs-path DIR"));
    EXPECT(refused_gpu("-pn 4 -pr 1", "", "--init fs wants --fs-path DIR"), "auto");
    EXPECT(refused_gpu("-ps h:0", TORCH, "--server h:0; wanted HOST"));
    EXPECT(refused_gpu("-ps h:65536", TORCH, "--server h:65536; wanted HOST"));
    EXPECT(refused_gpu("-ps h:x", TORCH, "--server h:x; wanted HOST"));
    EXPECT(refused_gpu("-ps :7", TORCH, "--server :7; wanted HOST"));
    EXPECT(refused_gpu("", "RANK=1 WORLD_SIZE=2", "MASTER_ADDR= MASTER_PORT=; wanted"));
    EXPECT(refused_gpu("", "RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=x", "MASTER_PORT=x"));
    EXPECT(refused_gpu("", "RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=65535", "MASTER_PORT=65535"));
    EXPECT(refused_gpu("", TASK "SLURM_STEP_ID=0", "SLURM_STEP_NODELIST is not set"));
    EXPECT(refused("", STEP, "4 processes of srun|mpirun -n 4 ..., srun --mpi=pmix, or --num-processes 1"));
}

TEST(refused) {
    EXPECT(refused("--num-processes 4", "", "--num-processes 4 without --rank"));
    EXPECT(refused("--rank 2", "", "--rank 2 without --num-processes"));
    EXPECT(refused("-pn 4 -pr 4", "", "--rank 4, --num-processes 4; wanted a rank from 0 to 3"));
    EXPECT(refused("-pn 4 -pr 3", "", "4 processes: CPU runs|start them with mpirun -n 4"));
    EXPECT(refused("-pn 4 -pr 3", TORCH, "4 processes of torchrun: CPU runs|need MPI|mpirun -n 4"));
    EXPECT(refused("", TORCH, "2 processes of torchrun: CPU runs|need MPI|mpirun -n 2"));
    EXPECT(refused("--init tcp", OMPI, "8 processes of mpirun: CPU runs|need MPI"));
    EXPECT(refused("--init fs", OMPI, "8 processes of mpirun: CPU runs|need MPI"));
    EXPECT(refused("--init mpi", TORCH, "2 processes|wanted mpirun -n 2"));
    EXPECT(refused("", "OMPI_COMM_WORLD_RANK=5",
                   "mpirun|OMPI_COMM_WORLD_RANK=5|OMPI_COMM_WORLD_SIZE is not set"));
    EXPECT(refused("", "OMPI_COMM_WORLD_SIZE=5", "OMPI_COMM_WORLD_RANK is not set|OMPI_COMM_WORLD_SIZE=5"));
    EXPECT(refused("", "OMPI_COMM_WORLD_RANK=8 OMPI_COMM_WORLD_SIZE=8", "OMPI_COMM_WORLD_RANK=8|SIZE=8"));
    EXPECT(refused("", "PMI_RANK=two PMI_SIZE=3", "mpiexec|PMI_RANK=two PMI_SIZE=3"));
    EXPECT(refused("", "PMI_RANK= PMI_SIZE=3", "PMI_RANK="));
    EXPECT(refused("", "PMI_RANK=-1 PMI_SIZE=3", "PMI_RANK=-1"));
    EXPECT(refused("", "PMI_RANK=1 PMI_SIZE=99999999999", "PMI_SIZE=99999999999"));
    EXPECT(refused("", "PMI_RANK=0 PMI_SIZE=0", "PMI_SIZE=0"));
    EXPECT(refused("", PMI "MPI_LOCALRANKID=x", "MPI_LOCALRANKID=x"));
    EXPECT(refused("", PMI "MPI_LOCALRANKID=2 MPI_LOCALNRANKS=2", "MPI_LOCALRANKID=2 MPI_LOCALNRANKS=2"));
    EXPECT(refused("", PMI "MPI_LOCALRANKID=0 MPI_LOCALNRANKS=4", "MPI_LOCALNRANKS=4"));
    EXPECT(refused("", "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4", "srun|SLURM_PROCID is not set"));
    EXPECT(refused("", "RANK=1", "torchrun|RANK=1|WORLD_SIZE is not set"));
}

// The place is known before the options are parsed.
TEST(expect) {
    unsetenv("OMPI_COMM_WORLD_RANK");
    unsetenv("OMPI_COMM_WORLD_SIZE");
    EXPECT(launcher_expect().size == 1);
    setenv("OMPI_COMM_WORLD_SIZE", "8", 1);
    EXPECT(launcher_expect().size == 1, "half a source");
    setenv("OMPI_COMM_WORLD_RANK", "3", 1);
    EXPECT(launcher_expect().size == 8 && launcher_expect().rank == 3);
}

static int zero_of(const Options* options, int size) {
    const Grid grid = launcher_grid(options, 0, size);
    return launcher_zero(options, &grid);
}

TEST(zero) {
    Options options = options_of("", OPTION_CPU);
    EXPECT(zero_of(&options, 1) == 0 && zero_of(&options, 2) == 2);
    options = options_of("-z 1", OPTION_CPU);
    EXPECT(zero_of(&options, 1) == 1 && zero_of(&options, 4) == 1);
    EXPECT(refused("--zero 3", "", "--zero 3|wanted 0, 1 or 2"));
    options = options_of("-z 3", OPTION_GPU);
    EXPECT(zero_of(&options, 1) == 3 && zero_of(&options, 4) == 3);
    EXPECT(refused("--zero 3 --plan", "", "--zero 3|make sim, and build/sim/BF16/train_gpt2cu"));
    options = options_of("--pipeline-parallel 2", OPTION_GPU);
    EXPECT(zero_of(&options, 2) == 0 && zero_of(&options, 4) == 1, "in a pipeline");
    options = options_of("--tensor-parallel 2", OPTION_GPU);
    EXPECT(zero_of(&options, 2) == 0 && zero_of(&options, 4) == 2, "beside tensor groups");
    EXPECT(refused("--zero 4", "", "--zero 4: wanted 0 to 3"));
}

// The processes of a replica. A mere plan goes by --gpus-per-node.
static void expect_shards(const char* line, int trainer, int wanted) {
    Comm alone;
    const Options options = options_of(line, trainer);
    memset(&alone, 0, sizeof(alone));
    alone.size = 1;
    const Grid grid = launcher_grid(&options, 0, 16);
    const int shards = launcher_shards(&options, &grid, &alone);
    EXPECT(shards == wanted, "%s: %d", line, shards);
}

TEST(shards) {
    expect_shards("", OPTION_GPU, 16);
    expect_shards("--gpus-per-node 8", OPTION_GPU, 8);
    expect_shards("--gpus-per-node 5", OPTION_GPU, 16);
    expect_shards("--gpus-per-node 8 --shard-ranks 4", OPTION_GPU, 4);
    expect_shards("--gpus-per-node 8", OPTION_CPU, 16);
    expect_shards("--gpus-per-node 8 -tp 2", OPTION_GPU, 4);
    expect_shards("--gpus-per-node 8 -tp 2 -cp 2", OPTION_GPU, 4);
    expect_shards("--gpus-per-node 8 -pp 2", OPTION_GPU, 8);
    expect_shards("--gpus-per-node 8 -tp 2 -pp 2", OPTION_GPU, 4);
    expect_shards("--gpus-per-node 4 -tp 4 --zero 2", OPTION_GPU, 1);
    expect_shards("--gpus-per-node 4 -tp 4 --zero 3", OPTION_GPU, 4);
    expect_shards("--gpus-per-node 2 -tp 4", OPTION_GPU, 1);
    expect_shards("--gpus-per-node 8 -tp 2 -pp 4", OPTION_GPU, 2);
    expect_shards("-tp 2", OPTION_CPU, 8);
}
