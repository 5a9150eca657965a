// cusim_stream.cpp -- streams, events, and when queued work is done: at once (CUSIM_STREAMS=eager), only when
// somebody waits for it (lazy), or some time between (random). A program that forgets to wait is right with
// one and wrong with another.
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
    if (operation.on_device) {
        device_memory_open();
    }
    operation.run();
    if (operation.on_device) {
        device_memory_close();
    }
}

// Does the work of the stream up to number `until`. Called within itself for another stream where one waits
// for it.
static void run_until(CUstream_st* stream, unsigned long until) {
    while (stream->done < until) {
        if (stream->queue.empty() || stream->busy) {
            cusim_die("streams wait for each other in a circle");
        }
        const Operation operation = std::move(stream->queue.front());
        stream->queue.pop_front();
        stream->busy = true;
        operation_run(operation);
        stream->busy = false;
        stream->done++;
    }
}

static void run_all(CUstream_st* stream) { run_until(stream, stream->pushed); }
void stream_drain(cudaStream_t stream) { run_all(stream_of(stream)); }

static void push(CUstream_st* stream, Operation operation) {
    stream->queue.push_back(std::move(operation));
    stream->pushed++;
}

// Work on `stream` comes after what `other` has now.
static void push_wait(CUstream_st* stream, CUstream_st* other, unsigned long until) {
    push(stream, {[other, until] { run_until(other, until); }, false});
}

// Work on the legacy stream waits for all streams, and they wait for it, unless they are
// non-blocking.
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
            run_until(stream, stream->done + 1);
        }
    }
}

void cusim_enqueue(cudaStream_t handle, bool on_device, std::function<void()> work) {
    CUstream_st* stream = stream_of(handle);
    if (stream->capture) {
        capture_add(stream, {std::move(work), on_device});
        return;
    }
    push_legacy_waits(stream);
    push(stream, {std::move(work), on_device});
    if (config.streams == STREAMS_EAGER) {
        run_all(stream);
    } else if (config.streams == STREAMS_RANDOM) {
        run_some_at_random();
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

// Its events may still be asked, so the struct stays.
cudaError_t CUDARTAPI cudaStreamDestroy(cudaStream_t handle) {
    if (handle == nullptr || handle == cudaStreamLegacy) {
        return failed(cudaErrorInvalidResourceHandle);
    }
    static auto* destroyed = new std::vector<CUstream_st*>; // for leak checkers
    CUstream_st* stream = stream_of(handle);
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

// ---- events ----

cudaError_t CUDARTAPI cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
    *out = new CUevent_st();
    (*out)->timing = !(flags & cudaEventDisableTiming);
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }

// Queued work may still write its time.
cudaError_t CUDARTAPI cudaEventDestroy(cudaEvent_t event) {
    if (event->stream) {
        run_until(event->stream, event->number);
    }
    delete event;
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
    CUstream_st* stream = stream_of(handle);
    const cudaError_t error = stream_accepts(handle);
    if (error != cudaSuccess) {
        return error;
    }
    if (stream->capture) {
        capture_record(stream, event);
        return cudaSuccess;
    }
    event->capture = 0;
    event->stream = stream;
    cusim_enqueue(handle, false, [event] { event->time_s = now_s(); });
    event->number = stream->pushed;
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaEventSynchronize(cudaEvent_t event) {
    if (event->capture) {
        return failed(cudaErrorCapturedEvent);
    }
    if (event->stream) {
        run_until(event->stream, event->number);
    }
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaEventQuery(cudaEvent_t event) {
    if (event->capture) {
        return failed(cudaErrorCapturedEvent);
    }
    return !event->stream || event->stream->done >= event->number ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t CUDARTAPI cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
    if (!start->stream || !end->stream || !start->timing || !end->timing) {
        return failed(cudaErrorInvalidResourceHandle);
    }
    if (cudaEventQuery(start) != cudaSuccess || cudaEventQuery(end) != cudaSuccess) {
        return failed(cudaErrorNotReady);
    }
    *ms = (float)((end->time_s - start->time_s) * 1e3);
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
    CUstream_st* stream = stream_of(handle);
    if (event->capture || stream->capture) {
        return capture_wait(stream, event);
    }
    if (event->stream && event->stream != stream) {
        CUstream_st* other = event->stream;
        const unsigned long until = event->number;
        cusim_enqueue(handle, false, [other, until] { run_until(other, until); });
    }
    return cudaSuccess;
}
}
