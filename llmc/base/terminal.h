/*
terminal.h -- may a line on this screen be written over, or is it a log?

mpirun and srun may give a process a pseudo-terminal and write what comes out of it into a file.
*/
#ifndef LLMC_TERMINAL_H
#define LLMC_TERMINAL_H

#ifdef __cplusplus
extern "C" {
#endif

// True if somebody sits at a terminal behind this file descriptor that knows how to go back in a
// line.
int terminal_rewrites(int fd);

#ifdef __cplusplus
}
#endif

#ifdef TERMINAL_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int terminal_rewrites(int fd) {
    static const char* const launchers[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_STEP_ID"};
    const char* kind = getenv("TERM");
    int is_launched = 0;
    for (int i = 0; i < (int)(sizeof(launchers) / sizeof(launchers[0])); i++) {
        is_launched = is_launched || getenv(launchers[i]);
    }
    const int is_shown = !is_launched || getenv("SLURM_PTY_PORT"); // srun --pty, of a person
    return isatty(fd) && is_shown && !(kind && strcmp(kind, "dumb") == 0);
}

#endif // TERMINAL_IMPLEMENTATION

#endif
