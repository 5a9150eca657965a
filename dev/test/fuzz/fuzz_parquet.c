// fuzz_parquet.c -- reads random Parquet files: no crash, no read out of bounds, errors that name
// the file, and never more texts than rows. Run by dev/test/fuzz/fuzz.sh.
#include <sys/mman.h>
#include <sys/types.h>

#include "llmc/data/parquet.h"

enum {
    MAX_ROWS = 1 << 16
}; // a few bytes may claim billions of nulls, which takes its time and shows nothing

static void read_rows(Parquet* p, const char* path) {
    const char* text;
    size_t bytes;
    uint64_t texts = 0, sum = 0;
    int more;
    while ((more = parquet_next(p, &text, &bytes)) > 0) {
        texts++;
        for (size_t i = 0; i < bytes; i++) {
            sum += (unsigned char)text[i];
        }
    }
    if (texts > parquet_rows(p) || sum > texts * UINT32_MAX ||
        (more < 0 && strncmp(p->error, path, strlen(path)) != 0)) {
        abort();
    }
}

int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes);
int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes) {
    static Parquet p;
    char path[64];
    const int fd = memfd_create("fuzz", 0);
    if (fd < 0 || write(fd, data, bytes) != (ssize_t)bytes) {
        abort();
    }
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (parquet_open(&p, path, "text")) {
        if (parquet_rows(&p) <= MAX_ROWS) {
            read_rows(&p, path);
        }
        parquet_close(&p);
    } else if (strncmp(p.error, path, strlen(path)) != 0) {
        abort();
    }
    close(fd);
    return 0;
}
