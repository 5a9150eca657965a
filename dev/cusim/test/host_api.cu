// host_api.cu -- memory, copies, streams, events, graphs, queries and cublasLt of the CPU device
// behave as the CUDA documentation says. Passes with every CUSIM_STREAMS.
#include "llmc/gpu/gpu.cuh"
#include "dev/test/lib/test.h"
#include <cublasLt.h>

#define EXPECT_ERROR(call, want)                                                                             \
    do {                                                                                                     \
        const cudaError_t got_ = (call);                                                                     \
        EXPECT(got_ == want, "%s, wanted %s", cudaGetErrorName(got_), cudaGetErrorName(want));               \
    } while (0)

__global__ void add_kernel(int* x, int value) { x[threadIdx.x] += value; }
__global__ void times_kernel(int* x, int value) { x[threadIdx.x] *= value; }

static Gpu gpu_with_stream(const Gpu* gpu) {
    Gpu other = *gpu;
    CUDA_CHECK(cudaStreamCreateWithFlags(&other.stream, cudaStreamNonBlocking));
    return other;
}

static int fetch(const Gpu* gpu, const int* x) {
    int got;
    CUDA_CHECK(cudaMemcpyAsync(&got, x, sizeof(int), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    return got;
}

// ---- memory and copies ----

static void test_memory(void) {
    void *a = NULL, *b = NULL, *c = NULL, *pinned = NULL;
    size_t free_bytes, total_bytes;
    char buffer[64];
    cudaPointerAttributes attributes;
    setenv("CUSIM_MEMORY_MIB", "16", 1);
    CUDA_CHECK(cudaMalloc(&a, (9 << 20) + 1)); // takes 10 MiB
    EXPECT_ERROR(cudaMalloc(&b, (6 << 20) + 1), cudaErrorMemoryAllocation);
    CUDA_CHECK(cudaMalloc(&b, 1000)); // these two share 2 MiB
    CUDA_CHECK(cudaMalloc(&c, 1000));
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    EXPECT(free_bytes == 4 << 20 && total_bytes == 16 << 20, "%zu of %zu", free_bytes, total_bytes);
    const int has_pages = getenv("CUSIM_PROTECT") != NULL; // each allocation has its own
    EXPECT((uintptr_t)a % 256 == 0 && (has_pages || (uintptr_t)a % 512 != 0),
           "%p: wanted a multiple of 256, and of no more", a);
    gpu_free(a);
    gpu_free(b);
    gpu_free(c);
    CUDA_CHECK(cudaMalloc(&b, 14 << 20)); // 2 MiB have memory of the open Gpu
    EXPECT_ERROR(cudaFree((char*)b + 512), cudaErrorInvalidValue);
    gpu_free(b);
    EXPECT_ERROR(cudaFree(b), cudaErrorInvalidValue);
    CUDA_CHECK(cudaFree(NULL));
    unsetenv("CUSIM_MEMORY_MIB");
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    EXPECT(total_bytes == 4096ul << 20, "%zu", total_bytes);

    CUDA_CHECK(cudaMallocHost(&pinned, 100));
    CUDA_CHECK(cudaPointerGetAttributes(&attributes, (char*)pinned + 99));
    EXPECT(attributes.type == cudaMemoryTypeHost, "%d", attributes.type);
    EXPECT((uintptr_t)pinned % 256 == 0 && (uintptr_t)pinned % 512 != 0, "%p", pinned);
    CUDA_CHECK(cudaFreeHost(pinned));
    CUDA_CHECK(cudaHostRegister(buffer, sizeof(buffer), 0));
    EXPECT_ERROR(cudaHostRegister(buffer, sizeof(buffer), 0), cudaErrorHostMemoryAlreadyRegistered);
    CUDA_CHECK(cudaHostUnregister(buffer));
    CUDA_CHECK(cudaPointerGetAttributes(&attributes, buffer));
    EXPECT(attributes.type == cudaMemoryTypeUnregistered, "%d", attributes.type);
}

// Copies four rows of 3 ints, out of rows of 5, into rows of 4, and back.
static void test_copy_2d(const Gpu* gpu) {
    int host[20], back[20] = {0};
    int* x = (int*)gpu_alloc(16, sizeof(int), "x");
    for (int i = 0; i < 20; i++) {
        host[i] = i;
    }
    CUDA_CHECK(cudaMemcpy2DAsync(x, 16, host, 20, 12, 4, cudaMemcpyHostToDevice, gpu->stream));
    CUDA_CHECK(cudaMemcpy2DAsync(back, 20, x, 16, 12, 4, cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    for (int i = 0; i < 20; i++) {
        EXPECT(back[i] == (i % 5 < 3 ? i : 0), "element %d is %d", i, back[i]);
    }
    EXPECT_ERROR(cudaMemcpy2DAsync(x, 8, host, 20, 12, 4, cudaMemcpyHostToDevice, gpu->stream),
                 cudaErrorInvalidPitchValue);
    gpu_free(x);
}

// ---- streams and events ----

static void count_call(void* calls) { ++*(int*)calls; }

static void test_streams(const Gpu* gpu) {
    int* x = (int*)gpu_alloc(1, sizeof(int), "x");
    int calls = 0;
    const Gpu other = gpu_with_stream(gpu);
    cudaEvent_t start, end;
    float ms = -1;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&end));
    EXPECT_ERROR(cudaEventElapsedTime(&ms, start, end), cudaErrorInvalidResourceHandle);
    CUDA_CHECK(cudaEventQuery(end)); // never recorded: done
    CUDA_CHECK(cudaEventRecord(start, gpu->stream));
    launch(add_kernel, 1, 1, 0, gpu, x, 2);
    CUDA_CHECK(cudaLaunchHostFunc(gpu->stream, count_call, &calls));
    CUDA_CHECK(cudaEventRecord(end, gpu->stream));
    CUDA_CHECK(cudaStreamWaitEvent(other.stream, end, 0));
    launch(times_kernel, 1, 1, 0, &other, x, 5);
    EXPECT(fetch(&other, x) == 10 && calls == 1, "%d after %d calls", fetch(&other, x), calls);
    CUDA_CHECK(cudaEventSynchronize(end));
    CUDA_CHECK(cudaEventElapsedTime(&ms, start, end));
    EXPECT(ms >= 0 && ms < 60000, "%g ms", ms);
    CUDA_CHECK(cudaStreamDestroy(other.stream));
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(end));
    gpu_free(x);
}

// A stream that was created without cudaStreamNonBlocking, and the legacy stream, wait for each
// other.
static void test_legacy_stream(const Gpu* gpu) {
    int* x = (int*)gpu_alloc(1, sizeof(int), "x");
    Gpu blocking = *gpu, legacy = *gpu;
    CUDA_CHECK(cudaStreamCreate(&blocking.stream));
    legacy.stream = NULL;
    launch(add_kernel, 1, 1, 0, &blocking, x, 1);
    launch(times_kernel, 1, 1, 0, &legacy, x, 10);
    launch(add_kernel, 1, 1, 0, &blocking, x, 3);
    EXPECT(fetch(&legacy, x) == 13, "%d", fetch(&legacy, x));
    CUDA_CHECK(cudaStreamDestroy(blocking.stream));
    gpu_free(x);
}

// ---- capture and graphs ----

typedef struct {
    const Gpu *main, *side;
    cudaEvent_t fork, join;
    int *x, *y;
} Fork;

static Fork fork_open(const Gpu* main, const Gpu* side) {
    Fork f = {main, side, NULL, NULL, NULL, NULL};
    f.x = (int*)gpu_alloc(1, sizeof(int), "x");
    f.y = (int*)gpu_alloc(1, sizeof(int), "y");
    CUDA_CHECK(cudaEventCreateWithFlags(&f.fork, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&f.join, cudaEventDisableTiming));
    return f;
}
static void fork_close(Fork* f) {
    CUDA_CHECK(cudaEventDestroy(f->fork));
    CUDA_CHECK(cudaEventDestroy(f->join));
    gpu_free(f->x);
    gpu_free(f->y);
}

// Captures x += 1; then side by side x *= 2 and y += 7; and after both y += 1.
static void capture_fork(Fork* f, bool join) {
    CUDA_CHECK(cudaStreamBeginCapture(f->main->stream, cudaStreamCaptureModeThreadLocal));
    launch(add_kernel, 1, 1, 0, f->main, f->x, 1);
    CUDA_CHECK(cudaEventRecord(f->fork, f->main->stream));
    CUDA_CHECK(cudaStreamWaitEvent(f->side->stream, f->fork, 0));
    launch(add_kernel, 1, 1, 0, f->side, f->y, 7);
    launch(times_kernel, 1, 1, 0, f->main, f->x, 2);
    CUDA_CHECK(cudaEventRecord(f->join, f->side->stream));
    if (join) {
        CUDA_CHECK(cudaStreamWaitEvent(f->main->stream, f->join, 0));
        launch(add_kernel, 1, 1, 0, f->main, f->y, 1);
    }
}

static cudaStreamCaptureStatus capture_status(const Gpu* gpu) {
    cudaStreamCaptureStatus status;
    CUDA_CHECK(cudaStreamIsCapturing(gpu->stream, &status));
    return status;
}

static void test_fork_and_join(const Gpu* gpu) {
    const Gpu side = gpu_with_stream(gpu);
    Fork f = fork_open(gpu, &side);
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    size_t nodes = 0;
    capture_fork(&f, true);
    EXPECT(capture_status(gpu) == cudaStreamCaptureStatusActive, "main");
    EXPECT(capture_status(&side) == cudaStreamCaptureStatusActive, "side");
    EXPECT_ERROR(cudaEventQuery(f.fork), cudaErrorCapturedEvent);
    CUDA_CHECK(cudaStreamEndCapture(gpu->stream, &graph));
    EXPECT(capture_status(&side) == cudaStreamCaptureStatusNone, "side");
    CUDA_CHECK(cudaGraphGetNodes(graph, NULL, &nodes));
    EXPECT(nodes == 4, "%zu nodes", nodes);
    EXPECT(fetch(gpu, f.x) == 0, "capture has run something");
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    for (int i = 0; i < 3; i++) {
        CUDA_CHECK(cudaGraphLaunch(executable, gpu->stream));
    }
    // launches that have not run yet keep what they need
    CUDA_CHECK(cudaGraphExecDestroy(executable));
    EXPECT(fetch(gpu, f.x) == 14 && fetch(gpu, f.y) == 24, "%d %d", fetch(gpu, f.x), fetch(gpu, f.y));
    fork_close(&f);
    CUDA_CHECK(cudaStreamDestroy(side.stream));
}

// Tests that a capture refuses some calls, and that the streams can be used again afterwards.
static void test_bad_captures(const Gpu* gpu) {
    const Gpu side = gpu_with_stream(gpu);
    Fork f = fork_open(gpu, &side);
    cudaGraph_t graph;
    void* memory;

    capture_fork(&f, false);
    EXPECT_ERROR(cudaStreamEndCapture(gpu->stream, &graph), cudaErrorStreamCaptureUnjoined);
    EXPECT(graph == NULL && capture_status(&side) == cudaStreamCaptureStatusNone, "unjoined");
    EXPECT_ERROR(cudaStreamWaitEvent(gpu->stream, f.fork, 0), cudaErrorCapturedEvent);

    EXPECT_ERROR(cudaStreamEndCapture(gpu->stream, &graph), cudaErrorIllegalState);
    EXPECT_ERROR(cudaStreamBeginCapture(NULL, cudaStreamCaptureModeGlobal),
                 cudaErrorStreamCaptureUnsupported);
    CUDA_CHECK(cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeGlobal));
    EXPECT_ERROR(cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeGlobal), cudaErrorIllegalState);
    EXPECT_ERROR(cudaStreamSynchronize(gpu->stream), cudaErrorStreamCaptureUnsupported);
    EXPECT_ERROR(cudaStreamEndCapture(gpu->stream, &graph), cudaErrorStreamCaptureInvalidated);

    CUDA_CHECK(cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeGlobal));
    EXPECT_ERROR(cudaMalloc(&memory, 8), cudaErrorStreamCaptureUnsupported);
    EXPECT_ERROR(cudaMemsetAsync(f.x, 0, 4, gpu->stream), cudaErrorStreamCaptureInvalidated);
    EXPECT_ERROR(cudaStreamEndCapture(gpu->stream, &graph), cudaErrorStreamCaptureInvalidated);

    CUDA_CHECK(cudaEventRecord(f.fork, side.stream)); // outside
    CUDA_CHECK(cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeGlobal));
    EXPECT_ERROR(cudaStreamWaitEvent(gpu->stream, f.fork, 0), cudaErrorStreamCaptureIsolation);
    EXPECT_ERROR(cudaStreamEndCapture(gpu->stream, &graph), cudaErrorStreamCaptureInvalidated);

    CUDA_CHECK(cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeGlobal));
    CUDA_CHECK(cudaStreamBeginCapture(side.stream, cudaStreamCaptureModeGlobal));
    CUDA_CHECK(cudaEventRecord(f.fork, side.stream));
    EXPECT_ERROR(cudaStreamWaitEvent(gpu->stream, f.fork, 0), cudaErrorStreamCaptureMerge);
    EXPECT_ERROR(cudaStreamEndCapture(gpu->stream, &graph), cudaErrorStreamCaptureInvalidated);
    EXPECT_ERROR(cudaStreamEndCapture(side.stream, &graph), cudaErrorStreamCaptureInvalidated);

    CUDA_CHECK(cudaMemsetAsync(f.x, 0, 4, gpu->stream));
    EXPECT(fetch(gpu, f.x) == 0 && fetch(&side, f.x) == 0, "after bad captures");
    fork_close(&f);
    CUDA_CHECK(cudaStreamDestroy(side.stream));
}

// Outside of the graph: x = 5, then y = x when the graph has recorded `out`. The graph waits for
// `in`: x += 1, records `out`, x *= 2. Work of the graph after `out` is not waited for.
static void test_external_events(const Gpu* gpu) {
    const Gpu side = gpu_with_stream(gpu);
    Fork f = fork_open(gpu, &side);
    cudaEvent_t in = f.fork, out = f.join;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    const char* streams = getenv("CUSIM_STREAMS");
    const bool is_lazy =
        streams && strcmp(streams, "lazy") == 0; // nothing is done before something waits for it
    int y = 0;
    EXPECT_ERROR(cudaEventRecordWithFlags(out, gpu->stream, cudaEventRecordExternal), cudaErrorInvalidValue);
    EXPECT_ERROR(cudaStreamWaitEvent(gpu->stream, out, cudaEventWaitExternal), cudaErrorInvalidValue);
    CUDA_CHECK(cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeThreadLocal));
    CUDA_CHECK(cudaStreamWaitEvent(gpu->stream, in, cudaEventWaitExternal));
    launch(add_kernel, 1, 1, 0, gpu, f.x, 1);
    CUDA_CHECK(cudaEventRecordWithFlags(out, gpu->stream, cudaEventRecordExternal));
    launch(times_kernel, 1, 1, 0, gpu, f.x, 2);
    CUDA_CHECK(cudaStreamEndCapture(gpu->stream, &graph));
    CUDA_CHECK(cudaEventQuery(out)); // nothing was recorded
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int i = 0; i < 3; i++) {
        CUDA_CHECK(cudaMemsetAsync(f.x, 0, sizeof(int), side.stream));
        launch(add_kernel, 1, 1, 0, &side, f.x, 5 + i);
        CUDA_CHECK(cudaEventRecord(in, side.stream));
        CUDA_CHECK(cudaGraphLaunch(executable, gpu->stream));
        CUDA_CHECK(cudaStreamWaitEvent(side.stream, out, 0));
        CUDA_CHECK(cudaMemcpyAsync(f.y, f.x, sizeof(int), cudaMemcpyDeviceToDevice, side.stream));
        CUDA_CHECK(cudaEventSynchronize(out));
        y = fetch(&side, f.y);
        EXPECT(y == 6 + i || (y == 2 * (6 + i) && !is_lazy), "%d", y);
        EXPECT(fetch(gpu, f.x) == 2 * (6 + i), "%d", fetch(gpu, f.x));
    }
    CUDA_CHECK(cudaGraphExecDestroy(executable));
    CUDA_CHECK(cudaGraphDestroy(graph));

    CUDA_CHECK(cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeThreadLocal));
    CUDA_CHECK(
        // within the capture, so the graph cannot wait for it outside
        cudaEventRecord(out, gpu->stream));
    EXPECT_ERROR(cudaStreamWaitEvent(gpu->stream, out, cudaEventWaitExternal), cudaErrorCapturedEvent);
    EXPECT_ERROR(cudaStreamEndCapture(gpu->stream, &graph), cudaErrorStreamCaptureInvalidated);
    fork_close(&f);
    CUDA_CHECK(cudaStreamDestroy(side.stream));
}

// ---- queries ----

static void test_queries(void) {
    cudaFuncAttributes attributes;
    cudaDeviceProp properties;
    char bus[32];
    int value = 0, device = -1;
    setenv("CUSIM_DEVICES", "2", 1);
    CUDA_CHECK(cudaGetDeviceCount(&value));
    EXPECT(value == 2, "%d devices", value);
    EXPECT_ERROR(cudaSetDevice(2), cudaErrorInvalidDevice);
    EXPECT_ERROR(cudaPeekAtLastError(), cudaErrorInvalidDevice);
    EXPECT_ERROR(cudaGetLastError(), cudaErrorInvalidDevice);
    EXPECT_ERROR(cudaGetLastError(), cudaSuccess);
    CUDA_CHECK(cudaSetDevice(1));
    CUDA_CHECK(cudaGetDevice(&device));
    EXPECT(device == 1, "%d", device);
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus, sizeof(bus), 1));
    EXPECT(strcmp(bus, "0000:02:00.0") == 0, "%s", bus);
    CUDA_CHECK(cudaSetDevice(0));
    unsetenv("CUSIM_DEVICES");

    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    CUDA_CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
    EXPECT(value == properties.multiProcessorCount && value > 0, "%d", value);
    EXPECT_ERROR(cudaFuncSetAttribute(add_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 228 << 10),
                 cudaErrorInvalidValue);
    CUDA_CHECK(cudaFuncSetAttribute(add_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10));
    CUDA_CHECK(cudaFuncGetAttributes(&attributes, add_kernel));
    EXPECT(attributes.maxDynamicSharedSizeBytes == 100 << 10, "%d", attributes.maxDynamicSharedSizeBytes);
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&value, add_kernel, 256, 100 << 10));
    EXPECT(value == 2, "%d blocks", value);
    EXPECT(strcmp(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory") == 0, "error text");
}

// A launch must fit: shared memory needs permission beyond 48 KiB, blocks have 1024 threads at
// most.
static void test_launch_limits(const Gpu* gpu) {
    int* x = (int*)gpu_alloc(1, sizeof(int), "x");
    cudaLaunchConfig_t config = {};
    config.gridDim = 1;
    config.blockDim = 1;
    config.stream = gpu->stream;
    config.dynamicSmemBytes = (48 << 10) + 1;
    EXPECT_ERROR(cudaLaunchKernelEx(&config, times_kernel, x, 1), cudaErrorInvalidValue);
    config.dynamicSmemBytes = 0;
    config.blockDim = dim3(32, 33);
    EXPECT_ERROR(cudaLaunchKernelEx(&config, times_kernel, x, 1), cudaErrorInvalidConfiguration);
    config.blockDim = 1;
    config.gridDim = dim3(1, 65536);
    EXPECT_ERROR(cudaLaunchKernelEx(&config, times_kernel, x, 1), cudaErrorInvalidConfiguration);
    gpu_free(x);
}

// ---- cublasLt: (2, 3) times (3, 2), column-major ----

#define LT_OK(call) EXPECT((call) == CUBLAS_STATUS_SUCCESS, "%s", #call)

// Tests two matmuls (1, 1) times (1, 1), and what is not allowed.
static void test_cublaslt_batch(cublasLtHandle_t handle, cublasLtMatmulDesc_t product, float* x,
                                const Gpu* gpu) {
    const float factors[6] = {2, 3, 0, 0, 5, 7}, two = 2, one = 1;
    float c[4] = {1, 10, 1, 100};
    const int32_t count = 2;
    const int64_t far = 4, near = 1, every_other = 2;
    cublasLtMatrixLayout_t a, b, out, single;
    CUDA_CHECK(cudaMemcpyAsync(x, factors, sizeof(factors), cudaMemcpyHostToDevice, gpu->stream));
    CUDA_CHECK(cudaMemcpyAsync(x + 8, c, sizeof(c), cudaMemcpyHostToDevice, gpu->stream));
    cublasLtMatrixLayout_t* const layouts[] = {&a, &b, &out, &single};
    const int64_t* const strides[] = {&far, &near, &every_other};
    for (int i = 0; i < 4; i++) {
        LT_OK(cublasLtMatrixLayoutCreate(layouts[i], CUDA_R_32F, 1, 1, 1));
    }
    for (int i = 0; i < 3; i++) {
        LT_OK(cublasLtMatrixLayoutSetAttribute(*layouts[i], CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                               sizeof(count)));
        LT_OK(cublasLtMatrixLayoutSetAttribute(*layouts[i], CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                               strides[i], sizeof(*strides[i])));
    }
    EXPECT(cublasLtMatrixLayoutSetAttribute(a, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &far, sizeof(far)) !=
               CUBLAS_STATUS_SUCCESS,
           "a count of 8 bytes");
    LT_OK(cublasLtMatmul(handle, product, &two, x, a, x, b, &one, x + 8, out, x + 8, out, NULL, NULL, 0,
                         gpu->stream));
    EXPECT(cublasLtMatmul(handle, product, &two, x, a, x, single, &one, x + 8, out, x + 8, out, NULL, NULL, 0,
                          gpu->stream) != CUBLAS_STATUS_SUCCESS,
           "two matrices times one");
    CUDA_CHECK(cudaMemcpyAsync(c, x + 8, sizeof(c), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    EXPECT(c[0] == 9 && c[1] == 10 && c[2] == 31 && c[3] == 100, "%g %g %g %g", c[0], c[1], c[2], c[3]);
    for (int i = 0; i < 4; i++) {
        LT_OK(cublasLtMatrixLayoutDestroy(*layouts[i]));
    }
}

static void test_cublaslt(const Gpu* gpu) {
    const float a[6] = {1, 2, 3, 4, 5, 6}, b[6] = {1, 0, 1, 0, 1, 1}, one = 1, zero = 0;
    float c[4];
    float* x = (float*)gpu_alloc(16, sizeof(float), "x");
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t layout_a, layout_b, layout_c;
    CUDA_CHECK(cudaMemcpyAsync(x, a, sizeof(a), cudaMemcpyHostToDevice, gpu->stream));
    CUDA_CHECK(cudaMemcpyAsync(x + 6, b, sizeof(b), cudaMemcpyHostToDevice, gpu->stream));
    LT_OK(cublasLtCreate(&handle));
    LT_OK(cublasLtMatmulDescCreate(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    LT_OK(cublasLtMatrixLayoutCreate(&layout_a, CUDA_R_32F, 2, 3, 2));
    LT_OK(cublasLtMatrixLayoutCreate(&layout_b, CUDA_R_32F, 3, 2, 3));
    LT_OK(cublasLtMatrixLayoutCreate(&layout_c, CUDA_R_32F, 2, 2, 2));
    LT_OK(cublasLtMatmul(handle, product, &one, x, layout_a, x + 6, layout_b, &zero, x + 12, layout_c, x + 12,
                         layout_c, NULL, NULL, 0, gpu->stream));
    EXPECT(cublasLtMatmul(handle, product, &one, x, layout_a, x + 6, layout_a, &zero, x + 12, layout_c,
                          x + 12, layout_c, NULL, NULL, 0, gpu->stream) != CUBLAS_STATUS_SUCCESS,
           "(2, 3) times (2, 3)");
    CUDA_CHECK(cudaMemcpyAsync(c, x + 12, sizeof(c), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    EXPECT(c[0] == 6 && c[1] == 8 && c[2] == 8 && c[3] == 10, "%g %g %g %g", c[0], c[1], c[2], c[3]);
    test_cublaslt_batch(handle, product, x, gpu);
    LT_OK(cublasLtMatrixLayoutDestroy(layout_a));
    LT_OK(cublasLtMatrixLayoutDestroy(layout_b));
    LT_OK(cublasLtMatrixLayoutDestroy(layout_c));
    LT_OK(cublasLtMatmulDescDestroy(product));
    LT_OK(cublasLtDestroy(handle));
    gpu_free(x);
}

int main(void) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_memory();
    test_copy_2d(&gpu);
    test_streams(&gpu);
    test_legacy_stream(&gpu);
    test_fork_and_join(&gpu);
    test_bad_captures(&gpu);
    test_external_events(&gpu);
    test_queries();
    test_launch_limits(&gpu);
    test_cublaslt(&gpu);
    gpu_close(&gpu);
    return test_done("host_api");
}
