/*
peak_kept.h -- the largest peak of this machine that a run has measured within some weeks.

While other programs use the cores, a measured peak is too low, and MFU too high. So each
measurement is compared with the cache's file (cache.h) for this processor, and the larger one
counts. A file that cannot be read or written is ignored.
*/
#ifndef LLMC_PEAK_KEPT_H
#define LLMC_PEAK_KEPT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { PEAK_KEPT_S = 30 * 24 * 3600 }; // then a peak is forgotten: clocks and machines change

// Returns the larger of a peak just measured, in FLOP/s, and the one kept for `machine`: its
// processor, and how the run uses it. Keeps the larger one. `now_s` is Unix time.
double peak_keep(double measured, const char* machine, int64_t now_s);

#ifdef __cplusplus
}
#endif

#ifdef PEAK_KEPT_IMPLEMENTATION

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <unistd.h>

#include "llmc/base/cache.h"
#include "llmc/base/check.h"
#include "llmc/base/file.h"

// Reads a kept peak; 0 if there is none, or if it is too old.
static double peak_kept_read_(const char* path, int64_t now_s) {
    double peak = 0;
    int64_t time_s = 0;
    FILE* file = fopen(path, "r");
    const int fields = file ? fscanf(file, "{\"peak\":%lf,\"time\":%" SCNd64 "}", &peak, &time_s) : 0;
    if (file) {
        fclose(file);
    }
    const int is_valid = fields == 2 && isfinite(peak) && time_s <= now_s && now_s - time_s < PEAK_KEPT_S;
    return is_valid ? peak : 0;
}

static void peak_kept_write_(const char* path, double peak, int64_t now_s) {
    char directory[PATH_MAX], text[96], ignored[ERROR_BYTES];
    const int fd = cache_open_directory(directory, path);
    const int length = snprintf(text, sizeof(text), "{\"peak\":%.6g,\"time\":%" PRId64 "}\n", peak, now_s);
    if (fd >= 0) {
        file_try_write_text(path, text, (size_t)length, ignored);
        close(fd);
    }
}

double peak_keep(double measured, const char* machine, int64_t now_s) {
    char path[PATH_MAX];
    if (!cache_path(path, "peak", machine)) {
        return measured;
    }
    const double kept = peak_kept_read_(path, now_s);
    if (measured > kept) {
        peak_kept_write_(path, measured, now_s);
    }
    return fmax(measured, kept);
}

#endif // PEAK_KEPT_IMPLEMENTATION

#endif
