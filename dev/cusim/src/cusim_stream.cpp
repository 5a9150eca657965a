// cusim_stream.cpp -- streams, events, and the time when queued work is done: at once
// (CUSIM_STREAMS=eager), only when something waits for it (lazy), or some time in between (random).
// A program that forgets to wait is right with one and wrong with another.
#include "cusim_stream.h"

#include <algorithm>

static CUstream_st* legacy_stream() {
    static auto* stream = new CUstream_st();
    return stream;
}
std::vector<CUstream_st*>& all_streams() {
    static auto* streams = new std::vector<CUstream_st*>{legacy_stream()};
    return *streams;
}

CUstream_st* stream_of(cudaStream_t stream) {
    if (stream == nullptr || stream == cudaStreamLegacy) {
        return legacy_stream();
    }
    if (stream == cudaStreamPerThread) {
        cusim_die("cudaStreamPerThread is not supported");
    }
    if (stream->destroyed) {
        cusim_die("a stream is used after cudaStreamDestroy");
    }
    return stream;
}

// ---- the queue ----

void operation_run(const Operation& operation) {
    process_waits(false);
    if (operation.on_device) {
        device_memory_open();
    }
    operation.run();
    if (operation.on_device) {
        device_memory_close();
        cusim_pass_time(OPERATION_S);
    }
}

// Does a step, possibly of another stream that this one waits for.
Step stream_advance(CUstream_st* stream) {
    if (stream->queue.empty() || stream->busy) {
        cusim_die("streams wait for each other in a circle");
    }
    stream->busy = true;
    const Step step = stream->queue.front()();
    stream->busy = false;
    if (step != STEP_DONE) {
        return step;
    }
    stream->queue.pop_front();
    stream->done++;
    return STEP_MOVED;
}

bool streams_advance_any(const CUstream_st* but) {
    for (size_t i = 0; i < all_streams().size(); i++) {
        CUstream_st* stream = all_streams()[i];
        if (stream != but && !stream->busy && !stream->queue.empty() &&
            stream_advance(stream) == STEP_MOVED) {
            return true;
        }
    }
    return false;
}

// Does the work of the stream until is_reached(). Other streams progress only if their work is
// waited for, in this process or another.
template <class F> static void run_until(CUstream_st* stream, F is_reached) {
    while (!is_reached()) {
        if (stream_advance(stream) == STEP_STUCK) {
            streams_advance_any(stream);
        }
    }
    process_waits(false);
}

static void run_all(CUstream_st* stream) {
    const unsigned long until = stream->pushed;
    run_until(stream, [=] { return stream->done >= until; });
}
void stream_drain(cudaStream_t stream) { run_all(stream_of(stream)); }

void expect_idle(const char* call, const CUstream_st* only) {
    for (const CUstream_st* stream : all_streams()) {
        if (config.streams != STREAMS_EAGER && (!only || stream == only) && stream->done < stream->pushed) {
            cusim_die("%s while work is queued: nothing promises that it waits; synchronize before", call);
        }
    }
}

// Does all that can be done now. The host need not wait for other processes; but they may be late
// because they compute, and nothing is done here while the host waits for one of them itself, in
// MPI.
static void run_eagerly(CUstream_st* stream) {
    const double start = now_s();
    while (stream->done < stream->pushed) {
        const Step step = stream_advance(stream);
        if (step == STEP_STUCK || (step == STEP_WAITING && now_s() > start + 10)) {
            break;
        }
    }
    process_waits(false);
}

static void push(CUstream_st* stream, Steps steps) {
    stream->queue.push_back(std::move(steps));
    stream->pushed++;
}

static void push_operation(CUstream_st* stream, const Operation& operation) {
    if (operation.begin) {
        push(stream, operation.begin(stream));
    } else {
        push(stream, [operation] {
            operation_run(operation);
            return STEP_DONE;
        });
    }
}

// Orders work on `stream` after what `other` has now.
static void push_wait(CUstream_st* stream, CUstream_st* other, unsigned long until) {
    push(stream, [other, until] { return other->done >= until ? STEP_DONE : stream_advance(other); });
}

// Orders work with the legacy stream: it waits for all streams, and they wait for it, unless they
// are non-blocking.
static void push_legacy_waits(CUstream_st* stream) {
    CUstream_st* legacy = legacy_stream();
    if (stream != legacy && !stream->nonblocking && legacy->done < legacy->pushed) {
        push_wait(stream, legacy, legacy->pushed);
    }
    for (CUstream_st* other : all_streams()) {
        if (stream == legacy && other != legacy && !other->nonblocking && other->done < other->pushed) {
            push_wait(legacy, other, other->pushed);
        }
    }
}

static void run_some_at_random() {
    while (random_below(2)) {
        CUstream_st* stream = all_streams()[random_below((uint32_t)all_streams().size())];
        if (stream->done < stream->pushed && !stream->busy) {
            stream_advance(stream);
        }
    }
    process_waits(false);
}

static void enqueue(cudaStream_t handle, Operation operation) {
    CUstream_st* stream = stream_of(handle);
    if (stream->capture) {
        capture_add(stream, std::move(operation));
        return;
    }
    push_legacy_waits(stream);
    push_operation(stream, operation);
    if (config.streams == STREAMS_EAGER) {
        run_eagerly(stream);
    } else if (config.streams == STREAMS_RANDOM) {
        run_some_at_random();
    }
}

void cusim_enqueue(cudaStream_t stream, bool on_device, std::function<void()> work) {
    enqueue(stream, {std::move(work), on_device, nullptr});
}

void enqueue_steps(cudaStream_t stream, std::function<Steps(CUstream_st*)> begin) {
    enqueue(stream, {nullptr, false, std::move(begin)});
}

// ---- what other processes see ----

std::vector<std::atomic<unsigned>*>& waiting_flags() {
    static auto* flags = new std::vector<std::atomic<unsigned>*>;
    return *flags;
}

void process_waits(bool waits) {
    static bool is_waiting = false;
    if (waits != is_waiting) {
        for (std::atomic<unsigned>* flag : waiting_flags()) {
            flag->fetch_add(1);
        }
        is_waiting = waits;
    }
}

// ---- streams ----

extern "C" {

cudaError_t CUDARTAPI cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
    CUstream_st* stream = new CUstream_st();
    stream->nonblocking = flags & cudaStreamNonBlocking;
    all_streams().push_back(stream);
    *out = stream;
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int) {
    return cudaStreamCreateWithFlags(out, flags);
}
cudaError_t CUDARTAPI cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithFlags(out, 0); }

// Destroys a stream. The struct remains, because its events may still be queried.
cudaError_t CUDARTAPI cudaStreamDestroy(cudaStream_t handle) {
    if (handle == nullptr || handle == cudaStreamLegacy) {
        return failed(cudaErrorInvalidResourceHandle);
    }
    static auto* destroyed = new std::vector<CUstream_st*>; // for leak checkers
    CUstream_st* stream = stream_of(handle);
    expect_idle("cudaStreamDestroy", stream);
    run_all(stream);
    capture_spoil(stream);
    std::vector<CUstream_st*>& streams = all_streams();
    streams.erase(std::find(streams.begin(), streams.end(), stream));
    destroyed->push_back(stream);
    stream->destroyed = true;
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaStreamSynchronize(cudaStream_t stream) {
    if (capture_spoil(stream_of(stream))) {
        return failed(cudaErrorStreamCaptureUnsupported);
    }
    stream_drain(stream);
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaStreamQuery(cudaStream_t handle) {
    const CUstream_st* stream = stream_of(handle);
    if (capture_spoil(stream_of(handle))) {
        return failed(cudaErrorStreamCaptureUnsupported);
    }
    return stream->done == stream->pushed ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t CUDARTAPI cudaDeviceSynchronize(void) {
    const cudaError_t error = synchronizing_call();
    if (error != cudaSuccess) {
        return error;
    }
    for (size_t i = 0; i < all_streams().size(); i++) { // host functions may create streams
        run_all(all_streams()[i]);
    }
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    const cudaError_t error = stream_accepts(stream);
    if (error == cudaSuccess) {
        cusim_enqueue(stream, false, [=] { function(data); });
    }
    return error;
}

cudaError_t CUDARTAPI cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
}

// ---- events ----

// The device's clock only counts the nominal time of work, so what is timed does not depend on how
// busy this machine is.
static double passed_s = 0;
void cusim_pass_time(double seconds) { passed_s += seconds; }

Operation event_record(CUevent_st* event) {
    return {nullptr, false, [event](CUstream_st* stream) {
                const auto point = std::make_shared<Point>(Point{stream, false, 0});
                event->point = point;
                return [point] {
                    point->time_s = passed_s;
                    point->is_reached = true;
                    return STEP_DONE;
                };
            }};
}

Operation event_wait(CUevent_st* event) {
    return {nullptr, false, [event](CUstream_st* stream) {
                const std::shared_ptr<Point> point = event->point;
                return [point, stream] {
                    return !point || point->is_reached || point->stream == stream
                               ? STEP_DONE
                               : stream_advance(point->stream);
                };
            }};
}

extern "C" {

cudaError_t CUDARTAPI cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
    *out = new CUevent_st();
    (*out)->timing = !(flags & cudaEventDisableTiming);
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }

cudaError_t CUDARTAPI cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}

// Records an event. In a capture, an external record is a node: work outside of the graph can wait
// for it.
cudaError_t CUDARTAPI cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned flags) {
    CUstream_st* stream = stream_of(handle);
    const cudaError_t error = stream_accepts(handle);
    if (error != cudaSuccess) {
        return error;
    }
    const bool is_external = flags & cudaEventRecordExternal;
    if (is_external && !stream->capture) {
        return failed(cudaErrorInvalidValue);
    }
    if (stream->capture && !is_external) {
        capture_record(stream, event);
        return cudaSuccess;
    }
    event->capture = 0;
    enqueue(handle, event_record(event));
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
    return cudaEventRecordWithFlags(event, handle, cudaEventRecordDefault);
}

cudaError_t CUDARTAPI cudaEventSynchronize(cudaEvent_t event) {
    if (event->capture) {
        return failed(cudaErrorCapturedEvent);
    }
    if (event->point) {
        const std::shared_ptr<Point> point = event->point;
        run_until(point->stream, [&] { return point->is_reached; });
    }
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaEventQuery(cudaEvent_t event) {
    if (event->capture) {
        return failed(cudaErrorCapturedEvent);
    }
    return !event->point || event->point->is_reached ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t CUDARTAPI cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
    if (!start->point || !end->point || !start->timing || !end->timing) {
        return failed(cudaErrorInvalidResourceHandle);
    }
    if (cudaEventQuery(start) != cudaSuccess || cudaEventQuery(end) != cudaSuccess) {
        return failed(cudaErrorNotReady);
    }
    *ms = (float)((end->point->time_s - start->point->time_s) * 1e3);
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
    CUstream_st* stream = stream_of(handle);
    if (flags & cudaEventWaitExternal) {
        if (!stream->capture || event->capture) {
            capture_spoil(stream);
            return failed(event->capture ? cudaErrorCapturedEvent : cudaErrorInvalidValue);
        }
        enqueue(handle, event_wait(event)); // a node
        return stream_accepts(handle);
    }
    if (event->capture || stream->capture) {
        return capture_wait(stream, event);
    }
    if (event->point && event->point->stream != stream) {
        enqueue(handle, event_wait(event));
    }
    return cudaSuccess;
}
}
