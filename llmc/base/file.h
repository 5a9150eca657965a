/*
file.h -- files that are complete or do not exist: each is written under a temporary name, flushed
to the disk, then renamed.

A full disk, a missing directory or any other failure removes the unfinished files and ends the
program with one error that names the file; an older file of that name stays as it was. The same
happens however the program ends, unless a signal kills it. The unfinished file is called
NAME.<process id>.part and is opened exclusively: two programs never write the same one, and nobody
else's file is overwritten.

Small files are read whole. Only regular files are opened for reading: a FIFO would hang, a device
could do anything.
*/
#ifndef LLMC_FILE_H
#define LLMC_FILE_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FILE_PART ".part" // ending of the names of unfinished files

// Sets path as printf would; ends the program if it is too long.
__attribute__((format(printf, 2, 3))) void file_path(char path[PATH_MAX], const char* format, ...);

// Sets path to directory/name.
void file_join(char path[PATH_MAX], const char* directory, const char* name);

// True if the name has this ending, in any case, after at least one character.
int file_ends_in(const char* path, const char* ending);

typedef struct FileWriter {
    FILE* file;
    char path[PATH_MAX], temporary[PATH_MAX]; // final and temporary name
    struct FileWriter* next;                  // next unfinished file
} FileWriter;

// Removes the unfinished file.
void file_discard(FileWriter* writer);

// Removes the unfinished file and reports errno.
void file_fail(FileWriter* writer, const char* doing);

// Starts the file `path`. The writer must not move before file_commit or file_discard.
void file_open(FileWriter* writer, const char* path);

void file_put(FileWriter* writer, const void* data, size_t bytes);

// Registers a file that something else writes: it is removed when the program ends, or by
// file_discard.
void file_remove_at_exit(FileWriter* writer, const char* path);

// Moves to byte `at` of the file. Bytes that are never written are zero.
void file_seek(FileWriter* writer, size_t at);

// Split `path` into its directory and its name there.
void file_directory_of(char directory[PATH_MAX], const char* path);
const char* file_name_in(const char* path);

// True if the name exists, as anything. Ends the program if that cannot be determined.
int file_exists(const char* path);

// True if it is a directory.
int file_is_directory(const char* path);

// Flushes the directory that holds `path`: a rename lasts only after that.
void file_sync_directory(const char* path);

// Completes the file: flushes it to the disk and gives it its name.
void file_commit(FileWriter* writer);

// Makes a directory and its parents. Those that are still empty when the program ends are removed:
// a run that is refused leaves nothing.
void file_make_directory(const char* path);

// Writes a whole file of text.
void file_write_text(const char* path, const char* text, size_t bytes);

// Writes a file that the program can do without. Returns 0 with the reason in `error` if it cannot.
int file_try_write_text(const char* path, const char* text, size_t bytes, char* error);

// Checks that an open file is not a pointer of git-lfs, the few lines that git leaves until the
// file is fetched. Returns 0 with the reason in `error` if it is.
int file_is_fetched(int fd, const char* path, char* error);

// Opens a regular file for reading. Returns a descriptor, or -1 with the reason in `error`.
int file_open_regular(const char* path, char* error);

// Sets *text to the contents of the file and a zero, *bytes to their length; the caller frees the
// text. Returns 0 with the reason in `error` if it cannot be read or is longer than `max`.
int file_try_read(const char* path, size_t max, char** text, size_t* bytes, char* error);

// Reads the next line, with its end, into *line, which has `room` bytes and grows; the caller frees
// it. Returns its length, 0 at the end of the file. Ends the program if the file `name` cannot be
// read, or a line does not fit into memory.
size_t file_read_line(FILE* file, const char* name, char** line, size_t* room);

// ---- contents ----

// Sets *value to the checksum of a file (xxh64.h). Returns 0 with the reason in `error` if it
// cannot be read.
int file_checksum(const char* path, uint64_t* value, char* error);

// Sets *value to a checksum of the size and the contents of a file: all of it up to 64 MiB, else
// 256 blocks of 256 KiB spread over it, so that a shard of any size takes a few hundredths of a
// second. An edit in place between the blocks goes unnoticed. Returns 0 with the reason in `error`
// if it cannot be read.
int file_fingerprint(const char* path, uint64_t* value, char* error);

// ---- one writer at a time ----

typedef enum {
    FILE_LOCK_HELD,    // someone else has it
    FILE_LOCK_TAKEN,   // this process has it until the file is closed
    FILE_LOCK_UNKNOWN, // the file system has no locks; errno has the reason
} FileLock;

// Locks the open file fd. Waits up to `wait_s` if someone else holds it: a killed process keeps its
// locks until the system has reclaimed its memory. lock.h locks what only one program may write.
FileLock file_try_lock(int fd, double wait_s);

// True if the name ends as file_create_part_ makes it: .PID.part or .PID-N.part.
int file_is_part(const char* name);

// Removes the unfinished files of killed programs in a directory whose names start with
// `beginning`. The caller must hold the lock on them.
void file_remove_parts(const char* directory, const char* beginning);

// ---- standard input, output and error ----

// Opens whichever of the three is closed: otherwise the next file to be opened would take its place
// and receive the output. The first call in main.
void file_open_standard(void);

// Flushes standard output; ends the program if it cannot be written.
void file_flush_standard(void);

#ifdef __cplusplus
}
#endif

#ifdef FILE_IMPLEMENTATION

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/xxh64.h"

void file_path(char path[PATH_MAX], const char* format, ...) {
    va_list args;
    va_start(args, format);
    const int length = vsnprintf(path, PATH_MAX, format, args);
    va_end(args);
    CHECK(length < PATH_MAX, "%s: the name is too long", path);
}

void file_join(char path[PATH_MAX], const char* directory, const char* name) {
    file_path(path, "%s/%s", directory, name);
}

int file_ends_in(const char* path, const char* ending) {
    const size_t length = strlen(path), ending_length = strlen(ending);
    return length > ending_length && strcasecmp(path + length - ending_length, ending) == 0;
}

// ---- unfinished files ----

// Unfinished files of all threads. Global because functions called by exit() take no arguments.
static FileWriter* file_unfinished_ = NULL;
// process that they belong to: its children must not remove them
static pid_t file_unfinished_pid_ = 0;
static pthread_mutex_t file_unfinished_lock_ = PTHREAD_MUTEX_INITIALIZER;

// A directory that this process has made. Those made later come first.
typedef struct FileMade_ {
    struct FileMade_* next;
    char path[];
} FileMade_;
static FileMade_* file_made_ = NULL;

// Called by exit(). Closes no file, because other threads may still be writing. A directory with
// files cannot be removed.
static void file_remove_unfinished_(void) {
    pthread_mutex_lock(&file_unfinished_lock_);
    const int is_ours = file_unfinished_pid_ == getpid();
    for (FileWriter* w = is_ours ? file_unfinished_ : NULL; w; w = w->next) {
        unlink(w->temporary);
    }
    for (FileMade_* made = is_ours ? file_made_ : NULL; made; made = made->next) {
        rmdir(made->path);
    }
    pthread_mutex_unlock(&file_unfinished_lock_);
}

// Sees to it that exit() removes what this process lists from now on. The caller holds the lock.
static void file_begin_list_(void) {
    if (file_unfinished_pid_ != getpid()) { // first file of this process
        file_unfinished_pid_ = getpid();
        file_unfinished_ = NULL;
        file_made_ = NULL;
        atexit(file_remove_unfinished_);
    }
}

static void file_list_made_(const char* path) {
    FileMade_* made = (FileMade_*)check_alloc(1, sizeof(FileMade_) + strlen(path) + 1, path);
    strcpy(made->path, path);
    pthread_mutex_lock(&file_unfinished_lock_);
    file_begin_list_();
    made->next = file_made_;
    file_made_ = made;
    pthread_mutex_unlock(&file_unfinished_lock_);
}

static void file_is_unfinished_(FileWriter* writer) {
    pthread_mutex_lock(&file_unfinished_lock_);
    file_begin_list_();
    writer->next = file_unfinished_;
    file_unfinished_ = writer;
    pthread_mutex_unlock(&file_unfinished_lock_);
}

static void file_is_finished_(FileWriter* writer) {
    pthread_mutex_lock(&file_unfinished_lock_);
    FileWriter** at = &file_unfinished_;
    while (*at && *at != writer) {
        at = &(*at)->next;
    }
    if (*at) {
        *at = writer->next;
    }
    pthread_mutex_unlock(&file_unfinished_lock_);
}

void file_remove_at_exit(FileWriter* writer, const char* path) {
    writer->file = NULL;
    file_path(writer->path, "%s", path);
    file_path(writer->temporary, "%s", path);
    file_is_unfinished_(writer);
}

void file_discard(FileWriter* writer) {
    file_is_finished_(writer);
    if (writer->file) {
        fclose(writer->file);
    }
    unlink(writer->temporary);
    writer->file = NULL;
}

void file_fail(FileWriter* writer, const char* doing) {
    const int reason = errno;
    file_discard(writer);
    CHECK(0, "%s: cannot %s: %s", writer->path, doing, strerror(reason));
}

// Creates the temporary file under a name that is not in use. Returns a descriptor, or -1 with
// errno.
static int file_create_part_(FileWriter* writer) {
    enum { TRIES = 1000 }; // killed programs with this process id may have left some
    int fd = -1;
    for (int i = 0; fd < 0 && i < TRIES && (i == 0 || errno == EEXIST); i++) {
        char again[16] = "";
        if (i > 0) {
            snprintf(again, sizeof(again), "-%d", i);
        }
        const int length = snprintf(writer->temporary, sizeof(writer->temporary), "%s.%ld%s" FILE_PART,
                                    writer->path, (long)getpid(), again);
        CHECK(length < (int)sizeof(writer->temporary), "%s: the name is too long", writer->path);
        fd = open(writer->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    }
    if (fd >= 0) {
        file_is_unfinished_(writer);
    }
    return fd;
}

void file_open(FileWriter* writer, const char* path) {
    file_path(writer->path, "%s", path);
    writer->file = NULL;
    const int fd = file_create_part_(writer);
    CHECK(fd >= 0, "%s: cannot write: %s", path, strerror(errno)); // not this program's to remove
    writer->file = fdopen(fd, "wb");
    if (!writer->file) {
        close(fd);
        file_fail(writer, "write");
    }
}

void file_put(FileWriter* writer, const void* data, size_t bytes) {
    if (bytes && fwrite(data, 1, bytes, writer->file) != bytes) {
        file_fail(writer, "write");
    }
}

void file_seek(FileWriter* writer, size_t at) {
    if (fseeko(writer->file, (off_t)at, SEEK_SET) != 0) {
        file_fail(writer, "write");
    }
}

void file_directory_of(char directory[PATH_MAX], const char* path) {
    const char* slash = strrchr(path, '/');
    const int length = !slash ? 0 : slash == path ? 1 : (int)(slash - path);
    snprintf(directory, PATH_MAX, "%.*s", slash ? length : 1, slash ? path : ".");
}

const char* file_name_in(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

int file_exists(const char* path) {
    struct stat info;
    if (stat(path, &info) == 0) {
        return 1;
    }
    CHECK(errno == ENOENT || errno == ENOTDIR, "%s: cannot read its attributes: %s", path, strerror(errno));
    return 0;
}

int file_is_directory(const char* path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

// Flushes fd to the disk itself; macOS's fsync stops at the drive's cache. Returns 0, or -1 with
// errno.
static int file_flush_(int fd) {
#ifdef F_FULLFSYNC
    if (fcntl(fd, F_FULLFSYNC) == 0) { // some file systems cannot
        return 0;
    }
#endif
    return fsync(fd);
}

void file_sync_directory(const char* path) {
    char directory[PATH_MAX];
    file_directory_of(directory, path);
    const int fd = open(directory, O_RDONLY);
    CHECK(fd >= 0, "%s: cannot open: %s", directory, strerror(errno));
    const int failed =
        file_flush_(fd) != 0 && errno != EINVAL; // EINVAL: nothing to flush in this file system
    CHECK(!failed, "%s: cannot flush to disk: %s", directory, strerror(errno));
    close(fd);
}

void file_commit(FileWriter* writer) {
    // ferror catches earlier printfs whose results nobody checked
    if (fflush(writer->file) != 0 || ferror(writer->file) || file_flush_(fileno(writer->file)) != 0) {
        file_fail(writer, "write");
    }
    const int failed = fclose(writer->file) != 0;
    writer->file = NULL;
    if (failed || rename(writer->temporary, writer->path) != 0) {
        file_fail(writer, "write");
    }
    file_is_finished_(writer);
    file_sync_directory(writer->path);
}

void file_make_directory(const char* path) {
    char prefix[1024];
    const size_t length = strlen(path);
    CHECK(length < sizeof(prefix) - 32, "%s: the path is longer than %zu bytes", path, sizeof(prefix) - 32);
    for (size_t i = 1; i <= length; i++) {
        if (path[i] == '/' || path[i] == '\0') {
            memcpy(prefix, path, i);
            prefix[i] = '\0';
            const int is_new = mkdir(prefix, 0777) == 0;
            CHECK(is_new || errno == EEXIST, "%s: cannot make the directory: %s", prefix, strerror(errno));
            if (is_new) {
                file_list_made_(prefix);
            }
        }
    }
}

void file_write_text(const char* path, const char* text, size_t bytes) {
    FileWriter writer;
    file_open(&writer, path);
    file_put(&writer, text, bytes);
    file_commit(&writer);
}

int file_try_write_text(const char* path, const char* text, size_t bytes, char* error) {
    FileWriter writer;
    file_path(writer.path, "%s", path);
    const int fd = file_create_part_(&writer);
    if (fd < 0) {
        return error_set(error, path, "cannot write: %s", strerror(errno));
    }
    writer.file = fdopen(fd, "wb");
    if (!writer.file || fwrite(text, 1, bytes, writer.file) != bytes || fflush(writer.file) != 0 ||
        fsync(fd) != 0 || rename(writer.temporary, path) != 0) {
        error_set(error, path, "cannot write: %s", strerror(errno));
        if (!writer.file) {
            close(fd);
        }
        file_discard(&writer);
        return 0;
    }
    file_is_finished_(&writer);
    fclose(writer.file);
    return 1;
}

// The format: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
int file_is_fetched(int fd, const char* path, char* error) {
    static const char first[] = "version https://git-lfs.github.com/spec/";
    char start[1024]; // longer than a pointer
    const ssize_t bytes = pread(fd, start, sizeof(start), 0);
    return bytes < (ssize_t)strlen(first) || bytes == (ssize_t)sizeof(start) ||
           memcmp(start, first, strlen(first)) != 0 ||
           error_set(error, path, "a pointer of git-lfs, wanted the file itself; `git lfs pull` fetches it");
}

int file_open_regular(const char* path, char* error) {
    struct stat info;
    const int fd =
        open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // open() of a FIFO would wait for its writer
    if (fd < 0 || fstat(fd, &info) != 0) {
        error_set(error, path, "cannot read: %s", strerror(errno));
    } else if (!S_ISREG(info.st_mode)) {
        error_set(error, path, S_ISDIR(info.st_mode) ? "a directory, wanted a file" : "not a regular file");
    } else if (file_is_fetched(fd, path, error)) {
        return fd;
    }
    if (fd >= 0) {
        close(fd);
    }
    return -1;
}

// Reads up to `bytes` at offset `at`, in as many calls as it takes. Returns the number read, or -1
// with errno.
static ssize_t file_read_at_(int fd, void* buffer, size_t bytes, off_t at) {
    size_t got = 0;
    while (got < bytes) {
        const ssize_t n = pread(fd, (char*)buffer + got, bytes - got, at + (off_t)got);
        if (n == 0 || (n < 0 && errno != EINTR)) {
            return n < 0 ? -1 : (ssize_t)got;
        }
        got += n > 0 ? (size_t)n : 0;
    }
    return (ssize_t)got;
}

int file_try_read(const char* path, size_t max, char** text, size_t* bytes, char* error) {
    size_t room = 4096, used = 0;
    ssize_t got = 1;
    *text = NULL;
    *bytes = 0;
    const int fd = file_open_regular(path, error);
    if (fd < 0) {
        return 0;
    }
    char* buffer = (char*)check_alloc(room, 1, path);
    while (got > 0 && used <= max) {
        got = file_read_at_(fd, buffer + used, room - used - 1, (off_t)used);
        used += got > 0 ? (size_t)got : 0;
        if (used + 1 == room) {
            buffer = (char*)realloc(buffer, room *= 2);
            CHECK(buffer, "%s: no memory for %zu bytes", path, room);
        }
    }
    const int reason = got < 0 ? errno : used > max ? EFBIG : 0;
    close(fd);
    if (reason) {
        free(buffer);
        return error_set(error, path, "cannot read: %s", strerror(reason));
    }
    buffer[used] = '\0';
    *text = buffer;
    *bytes = used;
    return 1;
}

size_t file_read_line(FILE* file, const char* name, char** line, size_t* room) {
    errno = 0;
    const ssize_t length = getline(line, room, file);
    // without memory neither holds
    const int is_whole = !ferror(file) && (length > 0 || feof(file));
    CHECK(is_whole, "%s: cannot read: %s", name, strerror(errno));
    return length > 0 ? (size_t)length : 0;
}

// ---- contents ----

int file_checksum(const char* path, uint64_t* value, char* error) {
    // small enough to stay in the cache between reading and adding
    enum { BLOCK_BYTES = 256 << 10 };
    Xxh64 hash;
    const int fd = file_open_regular(path, error);
    if (fd < 0) {
        return 0;
    }
    char* block = (char*)check_alloc_unset(BLOCK_BYTES, 1, path);
    off_t at = 0;
    ssize_t got;
    xxh64_open(&hash);
    while ((got = file_read_at_(fd, block, BLOCK_BYTES, at)) > 0) {
        xxh64_add(&hash, block, (size_t)got);
        at += got;
    }
    const int reason = errno;
    free(block);
    close(fd);
    *value = xxh64_value(&hash);
    return got == 0 || error_set(error, path, "cannot read: %s", strerror(reason));
}

enum {
    // blocks of a large file, spread evenly, including the first and the last
    FILE_SAMPLES_ = 256,
    FILE_SAMPLE_BYTES_ = 256 << 10, // each
};

int file_fingerprint(const char* path, uint64_t* value, char* error) {
    struct stat info;
    Xxh64 hash;
    const int fd = file_open_regular(path, error);
    if (fd < 0) {
        return 0;
    }
    if (fstat(fd, &info) != 0) {
        error_set(error, path, "cannot read its size: %s", strerror(errno));
        close(fd);
        return 0;
    }
    const int64_t bytes = (int64_t)info.st_size;
    const int64_t last = bytes - FILE_SAMPLE_BYTES_, all = (int64_t)FILE_SAMPLES_ * FILE_SAMPLE_BYTES_;
    const int64_t blocks =
        bytes > all ? (int64_t)FILE_SAMPLES_ : (bytes + FILE_SAMPLE_BYTES_ - 1) / FILE_SAMPLE_BYTES_;
    char* block = (char*)check_alloc(FILE_SAMPLE_BYTES_, 1, path);
    ssize_t got = 0;
    xxh64_open(&hash);
    xxh64_add(&hash, &bytes, sizeof(bytes));
    for (int64_t i = 0; i < blocks && got >= 0; i++) {
        const int64_t at =
            bytes > all ? (int64_t)((double)last / (FILE_SAMPLES_ - 1) * (double)i) : i * FILE_SAMPLE_BYTES_;
        got = file_read_at_(fd, block, FILE_SAMPLE_BYTES_, (off_t)at);
        xxh64_add(&hash, block, got > 0 ? (size_t)got : 0);
    }
    const int reason = errno;
    free(block);
    close(fd);
    *value = xxh64_value(&hash);
    return got >= 0 || error_set(error, path, "cannot read: %s", strerror(reason));
}

// ---- one writer at a time ----

FileLock file_try_lock(int fd, double wait_s) {
    const struct timespec pause = {0, 50000000}; // 50 ms
    for (double waited_s = 0; flock(fd, LOCK_EX | LOCK_NB) != 0; waited_s += 0.05) {
        if (errno != EWOULDBLOCK && errno != EINTR) {
            return FILE_LOCK_UNKNOWN;
        }
        if (waited_s >= wait_s) {
            return FILE_LOCK_HELD;
        }
        nanosleep(&pause, NULL);
    }
    return FILE_LOCK_TAKEN;
}

int file_is_part(const char* name) {
    const size_t ending = strlen(FILE_PART), length = strlen(name);
    size_t at = length > ending ? length - ending : 0;
    if (!at || strcmp(name + at, FILE_PART) != 0) {
        return 0;
    }
    while (at > 0 && (isdigit((unsigned char)name[at - 1]) || name[at - 1] == '-')) {
        at--;
    }
    return at > 1 && name[at - 1] == '.' && isdigit((unsigned char)name[at]);
}

void file_remove_parts(const char* directory, const char* beginning) {
    struct dirent* entry;
    DIR* entries = opendir(directory);
    while (entries && (entry = readdir(entries))) {
        if (strncmp(entry->d_name, beginning, strlen(beginning)) == 0 && file_is_part(entry->d_name)) {
            unlinkat(dirfd(entries), entry->d_name, 0);
        }
    }
    if (entries) {
        closedir(entries);
    }
}

// ---- standard input, output and error ----

void file_open_standard(void) {
    for (int fd = 0; fd <= 2; fd++) {
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd ? O_WRONLY : O_RDONLY) != fd) {
            _exit(EXIT_FAILURE); // nowhere left to report it
        }
    }
}

void file_flush_standard(void) {
    CHECK(fflush(stdout) == 0, "standard output: cannot write: %s", strerror(errno));
    CHECK(!ferror(stdout), "standard output: a part could not be written");
}

#endif // FILE_IMPLEMENTATION

#endif
