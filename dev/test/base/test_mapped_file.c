// test_mapped_file.c -- mapped_file.h: file systems that cannot map files. test_token_files.c has
// files that shrink.
#define MAPPED_FILE_IMPLEMENTATION
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

#include "dev/test/lib/test.h"

static int refusal; // errno of mmap; 0: it works

static void* mmap_or_not(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    if (refusal && fd >= 0) {
        errno = refusal;
        return MAP_FAILED;
    }
    return mmap(at, bytes, protection, flags, fd, offset);
}
#define mmap mmap_or_not
#include "llmc/base/mapped_file.h"
#undef mmap

TEST(mapped_file) {
    enum { BYTES = 70001 };
    static char text[BYTES];
    static const int refusals[] = {0, ENODEV, EINVAL};
    char error[ERROR_BYTES];
    memset(text, 'x', BYTES);
    const int fd = open(test_write("file", text, BYTES), O_RDONLY), screen = dup(STDERR_FILENO);
    EXPECT(freopen("/dev/null", "w", stderr) != NULL, "");
    for (int i = 0; i < 3; i++) {
        refusal = refusals[i];
        void* map = mapped_file(fd, BYTES, "file", error);
        EXPECT(map && memcmp(map, text, BYTES) == 0, "%s", error);
        madvise(map, BYTES, MADV_DONTNEED);
        EXPECT(map && memcmp(map, text, BYTES) == 0, "after MADV_DONTNEED");
        munmap(map, BYTES);
    }
    EXPECT(!mapped_file(fd, BYTES + 1, "file", error), "");
    EXPECT(strstr(error, "file: cannot read byte 70001 of 70002: the file ends"), "%s", error);
    refusal = ENOMEM;
    EXPECT(!mapped_file(fd, BYTES, "file", error), "");
    EXPECT(strstr(error, "file: cannot map 70001 bytes (mmap): Cannot allocate memory"), "%s", error);
    fflush(stderr);
    dup2(screen, STDERR_FILENO);
    close(screen);
    close(fd);
}
