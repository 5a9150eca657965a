// cusim_config.cpp -- the environment, random numbers, the clock, and the end of a faulty program.
#include "cusim_internal.h"

#include <cstdarg>
#include <ctime>
#include <dlfcn.h>
#include <unistd.h>

static void environment_error(const char* name, const char* value, const char* wanted) {
    fprintf(stderr, "CUSIM ERROR: %s=%s; wanted %s\n", name, value, wanted);
    _exit(2);
}

// Returns the index of the variable's value among the choices, separated by blanks; 0 if it is not
// set.
static int environment_choice(const char* name, const char* choices) {
    const char* value = getenv(name);
    if (!value || !value[0]) {
        return 0;
    }
    int i = 0;
    for (const char* choice = choices; *choice; i++) {
        const size_t length = strcspn(choice, " ");
        if (strlen(value) == length && strncmp(choice, value, length) == 0) {
            return i;
        }
        choice += length + (choice[length] == ' ');
    }
    environment_error(name, value, choices);
    return 0;
}

unsigned long environment_number(const char* name, unsigned long otherwise, unsigned long min,
                                 unsigned long max) {
    const char* value = getenv(name);
    if (!value || !value[0]) {
        return otherwise;
    }
    char* end = nullptr;
    const unsigned long number = strtoul(value, &end, 10);
    if (*end || value[0] == '-' || number < min || number > max) {
        char wanted[64];
        snprintf(wanted, sizeof(wanted), "a number from %lu to %lu", min, max);
        environment_error(name, value, wanted);
    }
    return number;
}

static Config config_read() {
    Config c = {};
    c.order = (Order)environment_choice("CUSIM_ORDER", "up down random greedy");
    c.streams = (StreamOrder)environment_choice("CUSIM_STREAMS", "eager lazy random");
    c.seed = environment_number("CUSIM_SEED", 0, 0, ~0ul - 1) + 1;
    c.wave = (int)environment_number("CUSIM_WAVE", 1, 1, 1024);
    c.stats = environment_number("CUSIM_STATS", 0, 0, 1);
    // The sanitizers detect wild accesses in their own way, and do not support pages without access
    // rights.
    c.protect = environment_number("CUSIM_PROTECT", 0, 0, 1) && !sanitized();
    c.dry = environment_number("CUSIM_DRY", 0, 0, 1);
    return c;
}
const Config config = config_read();

// xorshift64 (Marsaglia, 2003)
uint32_t random_below(uint32_t n) {
    static uint64_t state = config.seed * 0x9E3779B97F4A7C15ull;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)((state >> 32) * n >> 32);
}

bool cusim_is_dry() { return config.dry; }

double now_s() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

// Needs -rdynamic for kernels of the program itself.
const char* kernel_name(const void* kernel) {
    Dl_info info;
    return dladdr(kernel, &info) && info.dli_sname ? info.dli_sname : "kernel";
}

static void print_place() {
    const DeviceThread* thread = engine.current;
    if (!thread || !engine.body) {
        return;
    }
    const uint3 block = thread->block->index, index = thread->index;
    fprintf(stderr, "\n  in kernel %s block (%u,%u,%u) thread (%u,%u,%u)", kernel_name(engine.kernel),
            block.x, block.y, block.z, index.x, index.y, index.z);
}

extern "C" void cusim_die(const char* format, ...) {
    fflush(stdout);
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "CUSIM ERROR: ");
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    print_place();
    fprintf(stderr, "\n");
    if (__sanitizer_print_stack_trace) {
        __sanitizer_print_stack_trace();
    }
    abort();
}
