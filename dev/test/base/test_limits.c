// test_limits.c -- limits.h: cores and memory of a job, in control groups made here: versions 1 and
// 2, nested groups, containers that see only a part.
#include "llmc/base/limits.h"

#include <errno.h>
#include <math.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "dev/test/lib/test.h"
#include "llmc/base/check.h"
#include "llmc/base/file.h"

static char root[PATH_MAX];

// A file below the root, with its directories.
static void put(const char* name, const char* text) {
    char path[PATH_MAX], directory[PATH_MAX];
    file_path(path, "%s%s", root, name);
    file_directory_of(directory, path);
    file_make_directory(directory);
    file_write_text(path, text, strlen(text));
}

static void begin(const char* name, const char* groups, const char* mounts) {
    file_path(root, "%s", test_path(name));
    put("/proc/self/cgroup", groups);
    put("/proc/self/mountinfo", mounts);
    put("/proc/meminfo", "MemTotal: 64000 kB\nMemAvailable:   32000 kB\n");
}

static void expect_cores(double wanted) {
    EXPECT(limits_quota(root) == wanted, "%s: %g cores, wanted %g", root, limits_quota(root), wanted);
}

static void expect_mib(double wanted) {
    const double mib = (double)limits_group_bytes(root) / (1 << 20);
    EXPECT(mib == wanted, "%s: %g MiB, wanted %g", root, mib, wanted);
}

#define V2 "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
#define V1                                                                                                   \
    "31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755\n"                                             \
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"                            \
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"                                      \
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
#define GROUP "/sys/fs/cgroup/"

TEST(no_groups) {
    begin("none", "", "");
    expect_cores(INFINITY);
    EXPECT(limits_group_bytes(root) == SIZE_MAX);
    EXPECT(limits_free_bytes(1, root) == 32000 << 10 && limits_free_bytes(4, root) == 8000 << 10);
    file_path(root, "%s", test_path("nowhere"));
    expect_cores(INFINITY);
    EXPECT(limits_group_bytes(root) == SIZE_MAX && limits_free_bytes(1, root) == SIZE_MAX);
}

TEST(v2) {
    begin("v2", "0::/job/step/task\n", V2);
    put(GROUP "job/step/task/cpu.max", "max 100000\n");
    put(GROUP "job/step/task/memory.max", "max\n");
    expect_cores(INFINITY);
    EXPECT(limits_group_bytes(root) == SIZE_MAX);
    put(GROUP "job/step/cpu.max", "400000 100000\n");
    expect_cores(4);
    put(GROUP "job/cpu.max", "150000 100000\n"); // the least of all above
    expect_cores(1.5);
    put(GROUP "job/memory.max", "16777216\n");
    put(GROUP "job/memory.current", "8388608\n");
    expect_mib(8);
    put(GROUP "job/memory.stat", "anon 1048576\nfile 7340032\ninactive_file 4194304\nactive_file 2097152\n");
    expect_mib(14); // files in memory make room
    put(GROUP "job/step/memory.high", "6291456\n");
    put(GROUP "job/step/memory.current", "1048576\n");
    expect_mib(5);
    EXPECT(limits_free_bytes(1, root) == 5 << 20 && limits_free_bytes(5, root) == 1 << 20);
    put("/proc/meminfo", "MemAvailable: 1024 kB\n");
    EXPECT(limits_free_bytes(1, root) == 1 << 20, "the machine has less");
}

TEST(v1) {
    begin("v1", "9:name=systemd:/a\n4:memory:/slurm/job_7\n2:cpu,cpuacct:/slurm/job_7/step_0\n0::/other\n",
          V1);
    put(GROUP "cpu,cpuacct/slurm/job_7/step_0/cpu.cfs_quota_us", "-1\n");
    put(GROUP "cpu,cpuacct/slurm/job_7/step_0/cpu.cfs_period_us", "100000\n");
    put(GROUP "unified/other/cpu.max", "1 100000\n"); // version 1 has this controller
    expect_cores(INFINITY);
    put(GROUP "cpu,cpuacct/slurm/cpu.cfs_quota_us", "50000\n");
    put(GROUP "cpu,cpuacct/slurm/cpu.cfs_period_us", "100000\n");
    expect_cores(0.5);
    put(GROUP "memory/slurm/job_7/memory.limit_in_bytes", "9223372036854771712\n");
    put(GROUP "memory/slurm/job_7/memory.usage_in_bytes", "1\n");
    EXPECT(limits_group_bytes(root) == SIZE_MAX);
    put(GROUP "memory/slurm/memory.limit_in_bytes", "10485760\n");
    put(GROUP "memory/slurm/memory.usage_in_bytes", "9437184\n");
    put(GROUP "memory/slurm/memory.stat",
        "inactive_file 1\nactive_file 1\ntotal_inactive_file 2097152\ntotal_active_file 2097152\n");
    expect_mib(5);
    put(GROUP "memory/slurm/memory.usage_in_bytes", "99437184\n");
    expect_mib(0);
}

// A container sees its own group as the root, whatever path of the host it is told.
TEST(containers) {
    begin("host_path", "4:memory:/docker/4711\n2:cpu,cpuacct:/docker/4711\n", V1);
    put(GROUP "memory/memory.limit_in_bytes", "3145728\n");
    put(GROUP "cpu,cpuacct/cpu.cfs_quota_us", "200000\n");
    put(GROUP "cpu,cpuacct/cpu.cfs_period_us", "100000\n");
    expect_mib(3); // what is used is not known
    expect_cores(2);
    begin("mounted_part", "0::/docker/4711/init\n",
          "30 23 0:26 /docker/4711 /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n");
    put(GROUP "cpu.max", "300000 100000\n");
    put(GROUP "init/cpu.max", "100000 100000\n");
    expect_cores(1);
    begin("namespace", "0::/../../system.slice\n", V2);
    put(GROUP "cpu.max", "300000 100000\n");
    expect_cores(3);
}

static void omp_body(const void* value) {
    setenv("OMP_NUM_THREADS", (const char*)value, 1);
    limits_omp_threads();
}

TEST(threads) {
    begin("threads", "0::/\n", V2);
    put(GROUP "cpu.max", "50000 100000\n");
    unsetenv("OMP_NUM_THREADS");
    EXPECT(limits_threads(root) == 1, "half a core: %d", limits_threads(root));
    setenv("OMP_NUM_THREADS", "7", 1);
    EXPECT(limits_cores(root) == 1 && limits_first_core() >= 0, "half a core, 7 threads: %d",
           limits_cores(root));
    unsetenv("OMP_NUM_THREADS");
    put(GROUP "cpu.max", "100000000 100000\n");
    EXPECT(limits_threads(root) >= 1 && limits_threads(root) == limits_threads("/nowhere"),
           "more than there are");
    const struct {
        const char* text;
        int wanted;
    } good[] = {{"1", 1}, {"3", 3}, {" 7 ", 7}, {"4,2", 4}, {"4096", 4096}, {"", 0}};
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        setenv("OMP_NUM_THREADS", good[i].text, 1);
        EXPECT(limits_omp_threads() == good[i].wanted, "'%s': %d", good[i].text, limits_omp_threads());
    }
    const char* bad[] = {"0", "-1", "4097", "2147483648", "99999999999999999999", "two", "2x"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        EXPECT(test_dies(omp_body, bad[i], EXIT_USAGE, "OMP_NUM_THREADS=|wanted 1 to 4096 threads"), "%s",
               bad[i]);
    }
    unsetenv("OMP_NUM_THREADS");
}

// ulimit -v and -d, in a child.
static void limit_body(const void* resource) {
    const struct rlimit limit = {(rlim_t)1 << 36, RLIM_INFINITY};
    const size_t before = limits_own_bytes();
    CHECK(setrlimit(*(const int*)resource, &limit) == 0, "no limit: %s", strerror(errno));
    const size_t bytes = limits_own_bytes();
    CHECK(bytes < before && bytes < (size_t)1 << 36 && bytes > (size_t)1 << 35, "%zu bytes", bytes);
    CHECK(limits_free_bytes(1, "/nowhere") <= bytes, "its own limit counts");
    CHECK(0, "as it should be");
}

TEST(own) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return; // whose shadows are terabytes of addresses
#endif
    const int resources[] = {RLIMIT_AS, RLIMIT_DATA};
    for (int i = 0; i < 2; i++) {
        EXPECT(test_dies(limit_body, &resources[i], EXIT_FAILURE, "as it should be"), "resource %d", i);
    }
}
