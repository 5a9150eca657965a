/*
cusim_stream.h -- streams and events, shared by cusim_stream.cpp and cusim_graph.cpp.
*/
#ifndef CUSIM_STREAM_H
#define CUSIM_STREAM_H

#include <deque>
#include <memory>

#include "cusim_internal.h"

struct CUstream_st {
    std::deque<Steps> queue;
    unsigned long pushed, done; // how many operations, since the stream was created
    bool nonblocking, busy, destroyed;
    Capture* capture;       // NULL, or the capture that takes this stream's work
    std::vector<int> after; // capturing: the nodes that the next one depends on
};

// Where an event was recorded; also held by what waits for it.
struct Point {
    CUstream_st* stream;
    bool is_reached;
    double time_s;
};

struct CUevent_st {
    std::shared_ptr<Point> point; // the last one; NULL: never recorded
    bool timing;
    unsigned long capture;  // recorded in the capture of this number; 0: not in one
    std::vector<int> after; // recorded in a capture: behind these nodes
};

std::vector<CUstream_st*>& all_streams();

void capture_add(CUstream_st* stream, Operation operation);
void capture_record(CUstream_st* stream, CUevent_st* event);
cudaError_t capture_wait(CUstream_st* stream, CUevent_st* event);
Operation event_record(CUevent_st* event); // at the place where this is queued
Operation event_wait(CUevent_st* event);   // for what was recorded last when this is queued
bool capture_spoil(
    CUstream_st* stream); // a call that a capture does not allow; false if the stream is not in one

#endif
