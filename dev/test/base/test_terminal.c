// test_terminal.c -- terminal.h: a file, mpirun's output and a dumb terminal do not count as a
// terminal.
#include "llmc/base/terminal.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "dev/test/lib/test.h"

// With one more variable in the environment.
static int rewrites_with(int fd, const char* name, const char* value) {
    setenv(name, value, 1);
    const int rewrites = terminal_rewrites(fd);
    unsetenv(name);
    return rewrites;
}

TEST(terminal) {
    const int file = open("/dev/null", O_WRONLY), master = posix_openpt(O_RDWR | O_NOCTTY);
    EXPECT(master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0, "a pseudo-terminal");
    const int fd = open(ptsname(master), O_RDWR | O_NOCTTY);
    const char* launchers[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_STEP_ID",
                               "SLURM_PTY_PORT"};
    for (int i = 0; i < 5; i++) {
        unsetenv(launchers[i]);
    }
    setenv("TERM", "xterm", 1);
    EXPECT(terminal_rewrites(fd) && !terminal_rewrites(file));
    for (int i = 0; i < 4; i++) {
        EXPECT(!rewrites_with(fd, launchers[i], "0"), "%s", launchers[i]);
    }
    EXPECT(!rewrites_with(fd, "TERM", "dumb"));
    setenv("SLURM_PTY_PORT", "4711", 1);
    EXPECT(rewrites_with(fd, "SLURM_STEP_ID", "0"), "srun --pty");
}
