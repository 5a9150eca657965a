// test_file.c -- file.h: unfinished files have their own names, special files are refused;
// checksums, locks, standard descriptors.
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"

#include <sys/wait.h>

#include "dev/test/lib/test.h"

// The call of fstat that fails, from 1; 0: none. The program's fstat comes before libc's.
static int fstat_fails_at;
int fstat(int fd, struct stat* info) {
    if (fstat_fails_at > 0 && --fstat_fails_at == 0) {
        errno = EIO;
        return -1;
    }
    return fstatat(fd, "", info, AT_EMPTY_PATH);
}

static void ask_for(const void* path) { file_exists((const char*)path); }

static int count_parts(const char* directory) {
    int count = 0;
    DIR* entries = opendir(directory);
    for (struct dirent* entry; entries && (entry = readdir(entries));) {
        count += strstr(entry->d_name, FILE_PART) != NULL;
    }
    closedir(entries);
    return count;
}

static void write_byte(const char* path, long at, char value) {
    FILE* file = fopen(path, "r+b");
    fseek(file, at, SEEK_SET);
    fputc(value, file);
    fclose(file);
}

// Two writers of one name at a time: neither meets the other, and the last to end has the name. A
// file of the user's that is called like an unfinished one stays.
TEST(two_writers) {
    FileWriter one, two;
    const char *path = test_path("file"), *own = test_write("file" FILE_PART, "mine", 4);
    char error[ERROR_BYTES], *text;
    size_t bytes;
    file_open(&one, path);
    file_open(&two, path);
    file_put(&one, "first", 5);
    file_put(&two, "second!", 7);
    file_commit(&two);
    file_commit(&one);
    EXPECT(file_try_read(path, 100, &text, &bytes, error) && strcmp(text, "first") == 0, "%s", text);
    free(text);
    EXPECT(file_try_read(own, 100, &text, &bytes, error) && strcmp(text, "mine") == 0, "%s", error);
    free(text);
    EXPECT(count_parts(test_path(".")) == 1, "%d unfinished files", count_parts(test_path(".")));
    unlink(own);
}

TEST(left_over) {
    test_write("left.bin.123" FILE_PART, "half", 4);
    test_write("left.bin.123-4" FILE_PART, "half", 4);
    test_write("left.bin" FILE_PART, "mine", 4);
    test_write("left.bin.old" FILE_PART, "mine", 4);
    test_write("other.bin.123" FILE_PART, "half", 4);
    file_remove_parts(test_path("."), "left.");
    EXPECT(count_parts(test_path(".")) == 3, "%d unfinished files", count_parts(test_path(".")));
    file_remove_parts(test_path("."), "");
    EXPECT(count_parts(test_path(".")) == 2, "%d unfinished files", count_parts(test_path(".")));
}

static void end_in_the_middle(const void* path) {
    FileWriter one, two, done;
    char other[PATH_MAX];
    file_open(&one, (const char*)path);
    file_path(other, "%s.other", (const char*)path);
    file_open(&two, other);
    file_open(&done, (const char*)path);
    file_put(&done, "whole", 5);
    file_commit(&done);
    CHECK(0, "something else is wrong");
}

// An end of the program leaves no unfinished file, whatever ends it.
TEST(end) {
    const int before = count_parts(test_path("."));
    EXPECT(test_dies(end_in_the_middle, test_path("ended"), EXIT_FAILURE, "something else is wrong"), "");
    EXPECT(count_parts(test_path(".")) == before, "%d unfinished files, %d before",
           count_parts(test_path(".")), before);
    EXPECT(access(test_path("ended"), F_OK) == 0, "the finished one is there");
}

static void end_with_directories(const void* path) {
    char inside[PATH_MAX];
    file_path(inside, "%s/empty/inside", (const char*)path);
    file_make_directory(inside);
    file_path(inside, "%s/used/file", (const char*)path);
    file_make_directory(test_path("there/used"));
    file_write_text(inside, "x", 1);
    CHECK(0, "something is wrong");
}

// So do directories that the program has made, unless something is in them.
TEST(made_directories) {
    const char* path = test_path("there");
    mkdir(path, 0700);
    mkdir(test_path("there/own"), 0700);
    EXPECT(test_dies(end_with_directories, path, EXIT_FAILURE, "something is wrong"), "");
    EXPECT(access(test_path("there/empty"), F_OK) != 0, "an empty one, and its parent");
    EXPECT(access(test_path("there/used/file"), F_OK) == 0, "one with a file");
    EXPECT(access(test_path("there/own"), F_OK) == 0, "one that was there before");
}

TEST(special_files) {
    char error[ERROR_BYTES], fifo[PATH_MAX];
    snprintf(fifo, sizeof(fifo), "%s", test_path("fifo"));
    EXPECT(mkfifo(fifo, 0600) == 0, "mkfifo");
    EXPECT(file_open_regular(fifo, error) < 0 && strstr(error, "not a regular file"), "%s", error);
    EXPECT(file_open_regular(test_path("."), error) < 0 && strstr(error, "a directory"), "%s", error);
    EXPECT(file_open_regular("/dev/zero", error) < 0 && strstr(error, "not a regular file"), "%s", error);
    EXPECT(file_open_regular(test_path("nowhere"), error) < 0 && strstr(error, "No such file"), "%s", error);
}

// Whatever git-lfs has not fetched is named as such, and a text about git-lfs is a text.
TEST(pointers) {
    static const char pointer[] =
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548118077\n";
    char error[ERROR_BYTES];
    const char* path = test_path("model.safetensors");
    file_write_text(path, pointer, strlen(pointer));
    EXPECT(file_open_regular(path, error) < 0 && strstr(error, "a pointer of git-lfs") &&
               strstr(error, "git lfs pull") && strstr(error, "model.safetensors: "),
           "%s", error);
    file_write_text(path, pointer + 1, strlen(pointer + 1));
    int fd = file_open_regular(path, error);
    EXPECT(fd >= 0 && close(fd) == 0, "%s", error);
    char longer[2048];
    snprintf(longer, sizeof(longer), "%s%1900s", pointer, "");
    file_write_text(path, longer, strlen(longer));
    fd = file_open_regular(path, error);
    EXPECT(fd >= 0 && close(fd) == 0, "%s", error);
}

// Any byte of a small file counts, also at its end; of a large one those at both ends. The name
// does not.
TEST(fingerprint) {
    enum { SMALL = 700001 };
    const long large = (long)100 << 20;
    char error[ERROR_BYTES], path[PATH_MAX], copy[PATH_MAX];
    uint64_t first, other;
    char* bytes = (char*)check_alloc(SMALL, 1, "file");
    snprintf(path, sizeof(path), "%s", test_path("data"));
    snprintf(copy, sizeof(copy), "%s", test_path("copy"));
    test_write("data", bytes, SMALL);
    test_write("copy", bytes, SMALL);
    EXPECT(file_fingerprint(path, &first, error) && file_fingerprint(copy, &other, error) && first == other,
           "a copy is the same");
    const long places[] = {0, 1, SMALL / 2, SMALL - 1};
    for (int i = 0; i < 4; i++) {
        write_byte(path, places[i], 1);
        EXPECT(file_fingerprint(path, &other, error) && other != first, "byte %ld", places[i]);
        write_byte(path, places[i], 0);
    }
    EXPECT(file_fingerprint(path, &other, error) && other == first, "as it was");
    EXPECT(truncate(path, SMALL - 1) == 0 && file_fingerprint(path, &other, error) && other != first,
           "shorter");
    EXPECT(truncate(path, large) == 0 && file_fingerprint(path, &first, error), "%s", error);
    const long far[] = {0, large - 1};
    for (int i = 0; i < 2; i++) {
        write_byte(path, far[i], 1);
        EXPECT(file_fingerprint(path, &other, error) && other != first, "byte %ld of a large file", far[i]);
        write_byte(path, far[i], 0);
    }
    free(bytes);
}

TEST(lock) {
    test_write("lock", "", 0);
    const int one = open(test_path("lock"), O_RDWR), two = open(test_path("lock"), O_RDWR);
    EXPECT(file_try_lock(one, 0) == FILE_LOCK_TAKEN, "free");
    EXPECT(file_try_lock(two, 0.1) == FILE_LOCK_HELD, "taken");
    close(one);
    EXPECT(file_try_lock(two, 0) == FILE_LOCK_TAKEN, "free again");
    const int unknown = open("/proc/self/status", O_RDONLY | O_PATH);
    EXPECT(file_try_lock(unknown, 0) == FILE_LOCK_UNKNOWN, "no lock is not a free one");
    close(unknown);
    close(two);
}

// Closed standard descriptors become /dev/null, and stay apart from files that are opened later.
TEST(standard_descriptors) {
    const pid_t child = fork();
    if (child == 0) {
        close(0);
        close(1);
        close(2);
        file_open_standard();
        _exit(open("/dev/null", O_RDONLY) == 3 ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    EXPECT(status == 0, "status %d", status);
}

// A size that cannot be asked for is an error, not an empty file.
TEST(no_size) {
    char error[ERROR_BYTES];
    uint64_t value;
    const char* path = test_write("sized", "abc", 3);
    EXPECT(file_fingerprint(path, &value, error), "%s", error);
    fstat_fails_at = 2; // the first one asks whether it is a regular file
    EXPECT(!file_fingerprint(path, &value, error) &&
               strstr(error, "sized: cannot read its size: Input/output error"),
           "%s", error);
    fstat_fails_at = 1;
    EXPECT(!file_fingerprint(path, &value, error) && strstr(error, "sized: cannot read: "), "%s", error);
    EXPECT(file_exists(path) && !file_exists(test_path("not there")) && !file_exists(test_path("sized/x")),
           "");
    const char* loop = test_path("loop");
    EXPECT(symlink("loop", loop) == 0, "");
    EXPECT(test_dies(ask_for, loop, EXIT_FAILURE, "loop: cannot read its attributes: Too many levels"), "");
}
