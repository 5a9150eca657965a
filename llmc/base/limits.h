/*
limits.h -- how much of the machine this job may use: cores and memory, as containers, batch systems
and shells limit them.

A quota of a control group (cgroup v1 or v2) covers all its processes, so the quotas of every group
from this process's own up to the root apply. A container may see only its own group, as the root.
Functions that read the system's files take a directory to prepend to their paths, "" outside tests.

    cpu.max, or cpu.cfs_quota_us and cpu.cfs_period_us         time of all cores in a period
    memory.max and memory.high, or memory.limit_in_bytes       bytes, including reclaimable cache
*/
#ifndef LLMC_LIMITS_H
#define LLMC_LIMITS_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { LIMITS_MAX_THREADS = 4096 }; // per process

// Returns the average number of cores that the quota allows; INFINITY without one.
double limits_quota(const char* root);

// Returns OMP_NUM_THREADS, or 0 if it is not set. Ends the program if it is malformed.
int limits_omp_threads(void);

// Returns the threads for a process that runs alone: OMP_NUM_THREADS, else its cores, or fewer
// under a quota.
int limits_threads(const char* root);

// Returns the cores of this process, without those that a quota does not allow; others may share
// them.
int limits_cores(const char* root);

// Returns the first core that this process may use; 0 if unknown.
int limits_first_core(void);

// Returns the memory left to the groups of this process, for all their processes; SIZE_MAX if
// unlimited.
size_t limits_group_bytes(const char* root);

// Returns the memory left to this process alone (ulimit -v, ulimit -d); SIZE_MAX if unlimited.
size_t limits_own_bytes(void);

// Returns the memory for each of `processes` on this machine, without swapping: the least that the
// machine, the groups and the process have left; SIZE_MAX if unknown.
size_t limits_free_bytes(int processes, const char* root);

#ifdef __cplusplus
}
#endif

#ifdef LIMITS_IMPLEMENTATION

#include <limits.h>
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "llmc/base/check.h"

// ---- the groups of this process ----

// Group of this process. limits_rise_ cuts the path to the group above, up to the root.
typedef struct {
    char path[PATH_MAX];
    size_t top; // length of the root's path
    int is_v2;
} LimitsGroup_;

// True if the comma-separated list contains the word.
static int limits_lists_(const char* list, const char* word) {
    const size_t length = strlen(word);
    for (; *list; list += strcspn(list, ","), list += *list == ',') {
        if (strncmp(list, word, length) == 0 && (list[length] == '\0' || list[length] == ',')) {
            return 1;
        }
    }
    return 0;
}

static FILE* limits_open_(const char* root, const char* path) {
    char whole[PATH_MAX];
    const int length = snprintf(whole, sizeof(whole), "%s%s", root, path);
    return length < PATH_MAX ? fopen(whole, "r") : NULL;
}

// Reads the group of this process in the hierarchy of a controller: the line "4:memory:/job/step",
// or "0::/job/step" of version 2 for controllers without a version 1 hierarchy. Returns 0 if
// unknown.
static int limits_read_own_(const char* root, const char* controller, char own[PATH_MAX], int* is_v2) {
    char line[PATH_MAX + 256];
    int found = 0;
    FILE* file = limits_open_(root, "/proc/self/cgroup");
    while (file && fgets(line, sizeof(line), file)) {
        char* controllers = strchr(line, ':');
        char* path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path) {
            continue;
        }
        *path++ = '\0';
        path[strcspn(path, "\n")] = '\0';
        const int is_of_v1 = limits_lists_(controllers + 1, controller);
        if (is_of_v1 || (controllers[1] == '\0' && !found)) {
            snprintf(own, PATH_MAX, "%s", path);
            *is_v2 = !is_of_v1;
            found = 1;
        }
        if (is_of_v1) {
            break;
        }
    }
    if (file) {
        fclose(file);
    }
    return found;
}

// Reads where a hierarchy is mounted, and which group is the root of the mount: the line "33 31
// 0:30 /docker/4711 /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu". Returns 0 if it is not
// mounted.
static int limits_read_mount_(const char* root, const char* controller, int is_v2, char top[PATH_MAX],
                              char mount[PATH_MAX]) {
    char line[2 * PATH_MAX + 512], type[64], super[512];
    int found = 0;
    FILE* file = limits_open_(root, "/proc/self/mountinfo");
    while (file && !found && fgets(line, sizeof(line), file)) {
        const char* rest = strstr(line, " - ");
        found = rest && sscanf(line, "%*d %*d %*s %4095s %4095s", top, mount) == 2 &&
                sscanf(rest, " - %63s %*s %511s", type, super) == 2 &&
                (is_v2 ? strcmp(type, "cgroup2") == 0
                       : strcmp(type, "cgroup") == 0 && limits_lists_(super, controller));
    }
    if (file) {
        fclose(file);
    }
    return found;
}

// Finds this process's group. A path outside the mounted root belongs to the host: only the root is
// visible then.
static int limits_find_(LimitsGroup_* g, const char* root, const char* controller) {
    char own[PATH_MAX], top[PATH_MAX], mount[PATH_MAX];
    if (!limits_read_own_(root, controller, own, &g->is_v2) ||
        !limits_read_mount_(root, controller, g->is_v2, top, mount)) {
        return 0;
    }
    const size_t above = strcmp(top, "/") == 0 ? 0 : strlen(top);
    const int is_below = strncmp(own, top, above) == 0 && own[above] == '/' && !strstr(own, "/..");
    const int length = snprintf(g->path, sizeof(g->path), "%s%s%s", root, mount, is_below ? own + above : "");
    g->top = strlen(root) + strlen(mount);
    return length < PATH_MAX;
}

// Cuts the path to the group above. Returns 0 at the root.
static int limits_rise_(LimitsGroup_* g) {
    size_t length = strlen(g->path);
    while (length > g->top && g->path[length] != '/') {
        length--;
    }
    const int rises = strlen(g->path) > g->top;
    g->path[length] = '\0';
    return rises;
}

// Reads the numbers at the start of a file of the group. Returns how many: 0 if the file does not
// exist, or has "max" or -1.
static int limits_read_(const LimitsGroup_* g, const char* name, double* values, int count) {
    int n = 0;
    FILE* file = NULL;
    char path[PATH_MAX + 64];
    snprintf(path, sizeof(path), "%s/%s", g->path, name);
    file = fopen(path, "r");
    while (file && n < count && fscanf(file, "%lf", &values[n]) == 1 && values[n] >= 0) {
        n++;
    }
    if (file) {
        fclose(file);
    }
    return n;
}

// Returns the least value of all groups from this process's own up to the root; INFINITY without
// limits.
static double limits_least_(const char* root, const char* controller, double (*of)(const LimitsGroup_* g)) {
    double least = INFINITY;
    LimitsGroup_ g;
    if (limits_find_(&g, root, controller)) {
        do {
            least = fmin(least, of(&g));
        } while (limits_rise_(&g));
    }
    return least;
}

// ---- cores ----

// Returns the quota of one group in cores; INFINITY without one.
static double limits_quota_of_(const LimitsGroup_* g) {
    double v[2] = {0, 0};
    const int n = g->is_v2 ? limits_read_(g, "cpu.max", v, 2)
                           : limits_read_(g, "cpu.cfs_quota_us", &v[0], 1) +
                                 limits_read_(g, "cpu.cfs_period_us", &v[1], 1);
    return n == 2 && v[0] > 0 && v[1] > 0 ? v[0] / v[1] : INFINITY;
}

double limits_quota(const char* root) { return limits_least_(root, "cpu", limits_quota_of_); }

int limits_omp_threads(void) {
    const char* text = getenv("OMP_NUM_THREADS");
    char end = '\0';
    long threads = 0;
    if (!text || !*text) {
        return 0;
    }
    const int n = sscanf(text, " %ld %c", &threads, &end); // "4,2": also of nested regions
    if (n < 1 || (n == 2 && end != ',') || threads < 1 || threads > LIMITS_MAX_THREADS) {
        die_usage("OMP_NUM_THREADS=%s; wanted 1 to %d threads", text, LIMITS_MAX_THREADS);
    }
    return (int)threads;
}

static int limits_own_cores_(void) {
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) {
        return CPU_COUNT(&set);
    }
#endif
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    return cores > 0 ? (int)cores : 1;
}

int limits_first_core(void) {
    int core = 0;
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) {
        while (core < CPU_SETSIZE - 1 && !CPU_ISSET(core, &set)) {
            core++;
        }
    }
#endif
    return core;
}

int limits_cores(const char* root) { return (int)fmin(limits_own_cores_(), ceil(limits_quota(root))); }

int limits_threads(const char* root) {
    const int wanted = limits_omp_threads();
    return wanted ? wanted : limits_cores(root);
}

// ---- memory ----

// Adds up the two values of memory.stat that count file pages.
static double limits_cache_(const LimitsGroup_* g) {
    char path[PATH_MAX + 64], name[64];
    double value, cache = 0;
    snprintf(path, sizeof(path), "%s/memory.stat", g->path);
    FILE* file = fopen(path, "r");
    while (file && fscanf(file, "%63s %lf", name, &value) == 2) {
        const char* key = strncmp(name, "total_", 6) == 0 ? name + 6 : g->is_v2 ? name : "";
        cache += strcmp(key, "inactive_file") == 0 || strcmp(key, "active_file") == 0 ? value : 0;
    }
    if (file) {
        fclose(file);
    }
    return cache;
}

// Returns the bytes that one group has left. Version 1 writes 2^63 - 4096 for no limit.
static double limits_bytes_of_(const LimitsGroup_* g) {
    double limit = INFINITY, high, used;
    if (!limits_read_(g, g->is_v2 ? "memory.max" : "memory.limit_in_bytes", &limit, 1)) {
        limit = INFINITY;
    }
    if (g->is_v2 && limits_read_(g, "memory.high", &high, 1)) {
        limit = fmin(limit, high);
    }
    if (limit > 0x1p62 || !limits_read_(g, g->is_v2 ? "memory.current" : "memory.usage_in_bytes", &used, 1)) {
        return limit > 0x1p62 ? INFINITY : limit;
    }
    return fmax(0, limit - fmax(0, used - limits_cache_(g)));
}

static size_t limits_size_(double bytes) { return bytes < 0x1p62 ? (size_t)bytes : SIZE_MAX; }

size_t limits_group_bytes(const char* root) {
    return limits_size_(limits_least_(root, "memory", limits_bytes_of_));
}

// Returns the unused part of a limit.
static double limits_left_(int resource, double used) {
    struct rlimit limit;
    return getrlimit(resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY
               ? fmax(0, (double)limit.rlim_cur - used)
               : INFINITY;
}

size_t limits_own_bytes(void) {
    double pages[6] = {0, 0, 0, 0, 0, 0};
    FILE* file = fopen("/proc/self/statm", "r"); // size, resident, shared, text, 0, data and stack
    for (int i = 0; file && i < 6 && fscanf(file, "%lf", &pages[i]) == 1; i++) {
    }
    if (file) {
        fclose(file);
    }
    const double page = (double)sysconf(_SC_PAGESIZE);
    return limits_size_(
        fmin(limits_left_(RLIMIT_AS, page * pages[0]), limits_left_(RLIMIT_DATA, page * pages[5])));
}

static size_t limits_machine_bytes_(const char* root) {
    char line[256];
    unsigned long long kib = 0;
    FILE* file = limits_open_(root, "/proc/meminfo");
    while (file && kib == 0 && fgets(line, sizeof(line), file)) {
        sscanf(line, "MemAvailable: %llu kB", &kib);
    }
    if (file) {
        fclose(file);
    }
    return kib ? (size_t)kib << 10 : SIZE_MAX;
}

size_t limits_free_bytes(int processes, const char* root) {
    const size_t machine = limits_machine_bytes_(root), group = limits_group_bytes(root),
                 own = limits_own_bytes(), shared = machine < group ? machine : group;
    const size_t each = shared == SIZE_MAX ? SIZE_MAX : shared / (size_t)(processes > 0 ? processes : 1);
    return each < own ? each : own;
}

#endif // LIMITS_IMPLEMENTATION

#endif
