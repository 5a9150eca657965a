/*
terminal.h -- may a line on this screen be overwritten, or is the output a log?

mpirun and srun may give a process a pseudo-terminal and write its output into a file.
*/
#ifndef LLMC_TERMINAL_H
#define LLMC_TERMINAL_H

#ifdef __cplusplus
extern "C" {
#endif

// True if this file descriptor is a terminal that someone watches and that can overwrite a line.
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
    // srun --pty: an interactive session
    const int is_shown = !is_launched || getenv("SLURM_PTY_PORT");
    return isatty(fd) && is_shown && !(kind && strcmp(kind, "dumb") == 0);
}

#endif // TERMINAL_IMPLEMENTATION

#endif
