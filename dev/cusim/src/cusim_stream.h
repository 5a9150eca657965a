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
    unsigned long pushed, done; // operations since the stream was created
    bool nonblocking, busy, destroyed;
    Capture* capture;       // NULL, or the capture that takes this stream's work
    std::vector<int> after; // capturing: the nodes that the next one depends on
};

// Place where an event was recorded; work that waits for the event also holds it.
struct Point {
    CUstream_st* stream;
    bool is_reached;
    double time_s;
};

struct CUevent_st {
    std::shared_ptr<Point> point; // last recorded point; NULL: never recorded
    bool timing;
    unsigned long capture;  // number of the capture in which it was recorded; 0: none
    std::vector<int> after; // recorded in a capture: after these nodes
};

std::vector<CUstream_st*>& all_streams();

void capture_add(CUstream_st* stream, Operation operation);
void capture_record(CUstream_st* stream, CUevent_st* event);
cudaError_t capture_wait(CUstream_st* stream, CUevent_st* event);
Operation event_record(CUevent_st* event); // records at the place where this is queued
Operation event_wait(CUevent_st* event);   // waits for what was recorded last when this is queued
// Spoils the capture by a call that it does not allow; returns false if the stream is not in one.
bool capture_spoil(CUstream_st* stream);

#endif
