// test_nvml.c -- nvml.h: the GPU's line from a stand-in for NVML (fake_nvml.c): the right card, its
// values, values that it does not report, and libraries that are missing or lack functions. If this
// machine has a toolkit's nvml.h, the compiler compares our declarations with it.
#include "llmc/gpu/nvml.h"
#include "dev/test/lib/test.h"

#ifdef __has_include
#if __has_include("/usr/local/cuda/include/nvml.h")
#include "/usr/local/cuda/include/nvml.h"
#define HAS_NVML_H
#elif __has_include(<nvml.h>)
#include <nvml.h>
#define HAS_NVML_H
#endif
#endif

#ifdef HAS_NVML_H
#define SAME_SIGNATURE(function, type)                                                                       \
    _Static_assert(__builtin_types_compatible_p(__typeof__(&function), type), #function)
#define SAME_FIELD(theirs, ours, field)                                                                      \
    _Static_assert(sizeof(theirs) == sizeof(ours) && offsetof(theirs, field) == offsetof(ours, field) &&     \
                       sizeof(((theirs*)0)->field) == sizeof(((ours*)0)->field),                             \
                   #theirs "." #field)
SAME_SIGNATURE(nvmlInit_v2, NvmlAction_);
SAME_SIGNATURE(nvmlShutdown, NvmlAction_);
SAME_SIGNATURE(nvmlErrorString, NvmlErrorText_);
SAME_SIGNATURE(nvmlDeviceGetHandleByPciBusId_v2, NvmlFind_);
SAME_SIGNATURE(nvmlDeviceGetTemperature, NvmlGetOf_);
SAME_SIGNATURE(nvmlDeviceGetClockInfo, NvmlGetOf_);
SAME_SIGNATURE(nvmlDeviceGetMaxClockInfo, NvmlGetOf_);
SAME_SIGNATURE(nvmlDeviceGetFanSpeed, NvmlGet_);
SAME_SIGNATURE(nvmlDeviceGetPowerUsage, NvmlGet_);
SAME_SIGNATURE(nvmlDeviceGetEnforcedPowerLimit, NvmlGet_);
SAME_SIGNATURE(nvmlDeviceGetCurrentClocksThrottleReasons, NvmlGetBits_);
SAME_FIELD(nvmlMemory_t, NvmlMemory_, total);
SAME_FIELD(nvmlMemory_t, NvmlMemory_, free);
SAME_FIELD(nvmlMemory_t, NvmlMemory_, used);
SAME_FIELD(nvmlUtilization_t, NvmlUtilization_, gpu);
SAME_FIELD(nvmlUtilization_t, NvmlUtilization_, memory);
_Static_assert(NVML_SUCCESS == 0 && (int)NVML_TEMPERATURE_GPU == NVML_GPU_SENSOR_ &&
                   (int)NVML_CLOCK_SM == NVML_SM_CLOCK_ && (int)NVML_CLOCK_MEM == NVML_MEMORY_CLOCK_,
               "constants");
_Static_assert(nvmlClocksThrottleReasonApplicationsClocksSetting == 0x002 &&
                   nvmlClocksThrottleReasonSwPowerCap == 0x004 &&
                   nvmlClocksThrottleReasonHwSlowdown == NVML_HARDWARE_ &&
                   nvmlClocksThrottleReasonSyncBoost == 0x010 &&
                   nvmlClocksThrottleReasonSwThermalSlowdown == 0x020 &&
                   nvmlClocksThrottleReasonHwThermalSlowdown == 0x040 &&
                   nvmlClocksThrottleReasonHwPowerBrakeSlowdown == 0x080 &&
                   nvmlClocksThrottleReasonDisplayClockSetting == 0x100,
               "reasons");
#endif

#define FAKE_SOURCE "dev/test/lib/fake_nvml.c"
#define SERVER "0000:CA:00.0"

// The library under test, opened a second time: it stays in memory, and its variables can be set
// and read.
typedef struct {
    void* handle;
    unsigned long long* throttle;
    unsigned int* init_result;
    int* users;
} Fake;

// Builds a variant of the library and lets nvml.h take it.
static Fake fake_open(const char* name, const char* flags) {
    Fake fake;
    char command[1024];
    const char* path = test_path(name);
    if (system("command -v cc >/dev/null 2>&1") != 0) {
        printf("skipped: a stand-in for NVML: no cc to compile it with\n");
        exit(test_failures_ > 0);
    }
    snprintf(command, sizeof(command), "cc -shared -fPIC -Wall -Wextra -Werror %s -o '%s' " FAKE_SOURCE,
             flags, path);
    if (system(command) != 0 || !(fake.handle = dlopen(path, RTLD_NOW | RTLD_LOCAL))) {
        printf("test_nvml: FAILED: %s\n", command);
        exit(EXIT_FAILURE);
    }
    fake.throttle = (unsigned long long*)dlsym(fake.handle, "fake_nvml_throttle");
    fake.init_result = (unsigned int*)dlsym(fake.handle, "fake_nvml_init_result");
    fake.users = (int*)dlsym(fake.handle, "fake_nvml_users");
    setenv("LLMC_NVML_LIBRARY", path, 1);
    return fake;
}

static void fake_close(Fake* fake) {
    EXPECT(*fake->users == 0, "%d starts without a stop", *fake->users);
    dlclose(fake->handle);
    unsetenv("LLMC_NVML_LIBRARY");
}

// The GPU's line is this one; "" means that there is nothing to print.
static void expect_line(const char* pci_bus_id, const char* wanted) {
    Nvml nvml;
    char text[256] = "not set";
    EXPECT(nvml_open(&nvml, pci_bus_id) == 1, "%s: %s", pci_bus_id, nvml.reason);
    const int printed = nvml_line(&nvml, text, sizeof(text));
    EXPECT(strcmp(text, wanted) == 0, "%s:\n   got \"%s\"\nwanted \"%s\"", pci_bus_id, text, wanted);
    EXPECT(printed == (wanted[0] != '\0'), "%s: %d", pci_bus_id, printed);
    nvml_close(&nvml);
}

// It does not open, for a reason of one line with all these words (separated by '|'), and is then
// silent.
static void expect_closed(const char* pci_bus_id, const char* words) {
    Nvml nvml;
    char text[64] = "not set", list[512];
    EXPECT(nvml_open(&nvml, pci_bus_id) == 0, "%s", words);
    snprintf(list, sizeof(list), "%s", words);
    for (char *save = NULL, *word = strtok_r(list, "|", &save); word; word = strtok_r(NULL, "|", &save)) {
        EXPECT(strstr(nvml.reason, word), "%s: wanted %s", nvml.reason, word);
    }
    EXPECT(nvml.reason[0] && !strchr(nvml.reason, '\n'), "%s", nvml.reason);
    EXPECT(nvml_line(&nvml, text, sizeof(text)) == 0 && !text[0], "%s", text);
    nvml_close(&nvml);
    EXPECT(!nvml.library && nvml.reason[0], "closed twice");
}

TEST(missing_library) {
    unsetenv("LLMC_NVML_LIBRARY");
    // no such GPU, whether this machine has the library or not
    expect_closed("ffff:ff:1f.7", "NVML: ");
    setenv("LLMC_NVML_LIBRARY", "/nonexistent/libnvidia-ml.so.1", 1);
    expect_closed(SERVER, "NVML: |/nonexistent/libnvidia-ml.so.1");
    setenv("LLMC_NVML_LIBRARY", test_write("text.so", "no library\n", 11), 1);
    expect_closed(SERVER, "NVML: |text.so");
    unsetenv("LLMC_NVML_LIBRARY");
}

TEST(devices) {
    Fake fake = fake_open("fake.so", "");
    *fake.throttle = 0x04;
    expect_line(SERVER, "GPU: 67 C, 612 of 700 W, SM 1755 of 1980 MHz, memory clock 3201 MHz, "
                        "71342 of 143771 MiB, utilization 99 %, throttled: power");
    expect_line("0000:17:00.0", "GPU: 31 C, 71 of 301 W, SM 210 of 1980 MHz, memory clock 2619 MHz, "
                                "5 of 81559 MiB, utilization 0 %, throttled: power");
    expect_line("0000:65:00.0",
                "GPU: 80 C, fan 45 %, 250 W, SM 1410 MHz, memory clock 405 MHz, 8000 of 24564 MiB");
    expect_line("0000:B3:00.0", ""); // a power limit and a clock's maximum alone say nothing

    expect_closed("0000:18:00.0", "NVML: |0000:18:00.0|Not Found|6");
    expect_closed("0001:CA:00.0", "NVML: |0001:CA:00.0|Not Found|6");
    expect_closed("", "NVML: |2");
    *fake.init_result = 9;
    expect_closed(SERVER, "NVML: |nvmlInit_v2|Driver Not Loaded|9");
    *fake.init_result = 0;
    fake_close(&fake);
}

// Two GPUs in one program: closing one leaves the other.
TEST(two_at_once) {
    Fake fake = fake_open("two.so", "");
    Nvml first, second;
    char text[256];
    EXPECT(nvml_open(&first, "0000:17:00.0"), "%s", first.reason);
    EXPECT(nvml_open(&second, SERVER), "%s", second.reason);
    EXPECT(*fake.users == 2, "%d", *fake.users);
    nvml_close(&first);
    EXPECT(nvml_line(&second, text, sizeof(text)) && strstr(text, "67 C"), "%s", text);
    nvml_close(&second);
    nvml_close(&second);
    fake_close(&fake);
}

// Power and clock alone, for the log.
TEST(sensors) {
    Fake fake = fake_open("sensors.so", "");
    Nvml nvml;
    double power_w = 0, clock_mhz = 0;
    EXPECT(nvml_open(&nvml, SERVER), "%s", nvml.reason);
    nvml_sensors(&nvml, &power_w, &clock_mhz);
    EXPECT(fabs(power_w - 611.5) < 1e-9 && clock_mhz == 1755, "%g W, %g MHz", power_w, clock_mhz);
    nvml_close(&nvml);
    nvml_sensors(&nvml, &power_w, &clock_mhz);
    EXPECT(isnan(power_w) && isnan(clock_mhz), "closed: %g W, %g MHz", power_w, clock_mhz);
    fake_close(&fake);
}

TEST(throttle) {
    static const struct {
        unsigned long long bits;
        const char* wanted;
    } cases[] = {
        {0x000, ""},
        {0x001, ""}, // idle
        {0x002, ", throttled: clock setting"},
        {0x008, ", throttled: hardware"},
        {0x010, ", throttled: sync boost"},
        {0x024, ", throttled: power, temperature"},
        {0x048, ", throttled: temperature (hardware)"},
        {0x088, ", throttled: power brake (hardware)"},
        {0x100, ", throttled: display clock setting"},
        {0x200, ", throttled: board limit"},
        {1ull << 63, ""}, // not known yet
        {~0ull, ", throttled: clock setting, power, sync boost, temperature, temperature (hardware), "
                "power brake (hardware), display clock setting, board limit"},
    };
    static const char* variants[] = {"", "-DFAKE_OLD"};
    for (int v = 0; v < 2; v++) {
        Fake fake = fake_open(v == 0 ? "throttle.so" : "throttle_old.so", variants[v]);
        Nvml nvml;
        char text[512]; // more reasons at once than any card has
        EXPECT(nvml_open(&nvml, SERVER), "%s", nvml.reason);
        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
            *fake.throttle = cases[i].bits;
            const int printed = nvml_line(&nvml, text, sizeof(text));
            const char* end = strstr(text, "99 %");
            EXPECT(printed && end && strcmp(end + 4, cases[i].wanted) == 0, "%s %llx: \"%s\"", variants[v],
                   cases[i].bits, text);
        }
        nvml_close(&nvml);
        fake_close(&fake);
    }
}

TEST(missing_functions) {
    Fake fake = fake_open("bare.so", "-DFAKE_BARE");
    expect_line(SERVER, "");
    expect_closed("0000:18:00.0", "NVML: |0000:18:00.0|6"); // there are no words for it
    fake_close(&fake);
    fake = fake_open("no_find.so", "-DFAKE_NO_FIND");
    expect_closed(SERVER, "NVML: |no_find.so|nvmlDeviceGetHandleByPciBusId_v2");
    fake_close(&fake);
}

// Room of every size: the beginning of the line, ended, and nothing written beyond.
TEST(room) {
    Fake fake = fake_open("room.so", "");
    Nvml nvml;
    char whole[256];
    *fake.throttle = 0x24;
    EXPECT(nvml_open(&nvml, SERVER) && nvml_line(&nvml, whole, sizeof(whole)), "%s", nvml.reason);
    const size_t length = strlen(whole);
    for (size_t bytes = 0; bytes <= length + 2; bytes++) {
        char text[256];
        memset(text, '#', sizeof(text));
        nvml_line(&nvml, text, bytes);
        const size_t kept = bytes == 0 ? 0 : bytes <= length ? bytes - 1 : length;
        EXPECT(memcmp(text, whole, kept) == 0 && (bytes == 0 || !text[kept]), "%zu bytes", bytes);
        EXPECT(text[bytes] == '#', "%zu bytes: written beyond", bytes);
    }
    nvml_close(&nvml);
    fake_close(&fake);
}
