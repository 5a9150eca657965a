// test_gpu_report.cu -- gpu_report.cuh: the peak and the bandwidth of GPUs, by name, else by
// architecture.
#include "llmc/plan/gpu_report.cuh"
#include "dev/test/lib/test.h"

static Gpu card(const char* name, int major, int minor) {
    Gpu gpu;
    memset((void*)&gpu, 0, sizeof(gpu));
    snprintf(gpu.name, sizeof(gpu.name), "%s", name);
    gpu.major = major;
    gpu.minor = minor;
    gpu.multiprocessors = 100;
    return gpu;
}

static void expect_peak(const char* name, int major, int minor, double tflops) {
    const Gpu gpu = card(name, major, minor);
    const double got = gpu_peak_flops_per_s(&gpu, DTYPE_BF16, 0) * 1e-12;
    EXPECT(fabs(got - tflops) < 1e-3 * tflops, "%s: %.1f TFLOP/s, wanted %.1f", name, got, tflops);
}

// The longest name whose words all occur in the card's name wins: an H200 is not an H20, an A100
// not A10.
TEST(names) {
    expect_peak("NVIDIA H200", 9, 0, 989.4);
    expect_peak("NVIDIA H200 NVL", 9, 0, 835.5);
    expect_peak("NVIDIA H20", 9, 0, 148);
    expect_peak("NVIDIA A100-SXM4-80GB", 8, 0, 312);
    expect_peak("NVIDIA A10", 8, 6, 125);
    expect_peak("NVIDIA A10G", 8, 6, 70);
    expect_peak("NVIDIA GeForce RTX 5090", 12, 0, 209.5);
    const Gpu small = card("NVIDIA A100-SXM4-40GB", 8, 0), large = card("NVIDIA A100-SXM4-80GB", 8, 0);
    EXPECT(fabs(gpu_bandwidth_per_s(&small) - 1.555e12) < 1e6 &&
               fabs(gpu_bandwidth_per_s(&large) - 2.039e12) < 1e6,
           "%g and %g bytes/s", gpu_bandwidth_per_s(&small), gpu_bandwidth_per_s(&large));
}

// By clock and multiprocessors: GeForce cards do half of what others with the same chip do.
TEST(architectures) {
    Gpu gpu = card("a card", 8, 9);
    const double clocks = 2e-9 * gpu_attribute_(&gpu, cudaDevAttrClockRate) * gpu.multiprocessors;
    for (int major = 8; major <= 12; major += 4) {
        expect_peak("NVIDIA RTX 2000", major, major == 8 ? 9 : 0, clocks * 512);
        expect_peak("NVIDIA GeForce RTX 4060", major, major == 8 ? 9 : 0, clocks * 256);
    }
    expect_peak("NVIDIA RTX A4000", 8, 6, clocks * 512);
    expect_peak("NVIDIA GeForce RTX 3060", 8, 6, clocks * 256);
    expect_peak("a card", 9, 0, clocks * 2048);
    expect_peak("a card", 10, 0, clocks * 4096);
}

// A plan for a card that is not in the machine.
TEST(planned_card) {
    Options o;
    const char* line[] = {"test", "--plan", "--plan-gpu", "RTX 4090"};
    options_parse(&o, 4, (char**)line, OptionsProgram{OPTION_GPU, "test"});
    o.memory.device = 0;
    char words[256];
    const Gpu gpu = gpu_of_plan(words, sizeof(words), &o);
    EXPECT(strcmp(words, "RTX 4090") == 0 && gpu_peak_flops_per_s(&gpu, DTYPE_BF16, 0) == 165.2e12, "%s",
           words);
    EXPECT(gpu_planned_memory(&o) == ((size_t)24 << 30) - ((size_t)512 << 20), "%zu bytes",
           gpu_planned_memory(&o));
    o.plan_gpu = "";
    EXPECT(gpu_planned_memory(&o) == 0, "this machine's own is asked");
}
