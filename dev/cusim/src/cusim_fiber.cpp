// cusim_fiber.cpp -- stacks for device threads, the switch between them, and the report when all of
// them wait.
#include "cusim_internal.h"

#include <pthread.h>
#include <sys/mman.h>

Engine& engine = *new Engine();
uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// ---- the switch, for x86-64 ----

// Registers that a call preserves go onto the old stack and come from the new one. The
// floating-point control words are not switched: device code does not change them.

__asm__(R"(
.text
.globl cusim_swap_stacks
.type cusim_swap_stacks,@function
cusim_swap_stacks:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp,(%rdi)
    movq %rsi,%rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size cusim_swap_stacks,.-cusim_swap_stacks

.globl cusim_fiber_start
.type cusim_fiber_start,@function
cusim_fiber_start:
    movq %rbx,%rdi
    call cusim_fiber_main
    ud2
.size cusim_fiber_start,.-cusim_fiber_start
)");
extern "C" void cusim_fiber_start();

enum { GUARD_BYTES = 4096 };

static char* map_stack(size_t bytes) {
    void* memory = mmap(nullptr, bytes + GUARD_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        cusim_die("no memory for the stacks of device threads");
    }
    mprotect(memory, GUARD_BYTES, PROT_NONE); // an overflow faults
    return (char*)memory + GUARD_BYTES;
}

// Returns a stack that starts in cusim_fiber_start with the fiber in rbx.
Fiber* fiber_new() {
    HostScope as_host;
    Fiber* fiber = new Fiber();
    fiber->stack_bytes = (size_t)(sanitized() ? 512 : 128) << 10;
    fiber->stack = map_stack(fiber->stack_bytes);

    // Tops at the same offset of every page would all map to the same cache sets: shift them by up
    // to 60 lines.
    const size_t color = engine.fibers * 5 % 61 * 64;
    void** top = (void**)(fiber->stack + fiber->stack_bytes - 64 - color);
    *--top = nullptr;
    *--top =
        // two words: after `ret` rsp is a multiple of 16, as the call in cusim_fiber_start needs it
        nullptr;
    *--top = (void*)cusim_fiber_start;
    *--top = nullptr; // rbp
    *--top = fiber;   // rbx
    for (int i = 0; i < 4; i++) {
        *--top = nullptr; // r12 to r15
    }
    fiber->stack_pointer = top;
    engine.fibers++;
    return fiber;
}

// Learns the bounds of the host's stack: AddressSanitizer must be told those of every stack that is
// switched to.
void fiber_learn_host_stack() {
    if (!__sanitizer_start_switch_fiber || engine.host.stack) {
        return;
    }
    pthread_attr_t attributes;
    void* bottom;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &bottom, &engine.host.stack_bytes);
    pthread_attr_destroy(&attributes);
    engine.host.stack = (char*)bottom;
}

// ---- the life of device threads ----

static void run_current_thread() {
    DeviceThread* thread = engine.current;
    tsan_acquire(engine.kernel_start);
    (*engine.body)();
    if (!thread->copies.empty() || wgmma_is_in_flight()) {
        cusim_die("thread exits with asynchronous copies or wgmma it never waited for");
    }
    tsan_release(engine.kernel_end);
    thread->state = THREAD_DONE;
    thread->warp->exited |= 1u << thread->lane;
    engine.alive--;
    engine.spins = 0;
}

// Leaves the stack of a thread that has ended, with no other starting on it.
static void leave_fiber(Fiber* self) {
    if (!engine.current->own_fiber) {
        engine.idle_fibers.push_back(self);
    }
    if (engine.current->own_fiber && engine.started < engine.count) {
        DeviceThread* thread = thread_take_new();
        thread_begin(thread, thread->own_fiber);
        fiber_switch(self, thread->own_fiber, thread);
    } else if (!engine.ready.empty()) {
        DeviceThread* thread = thread_take_ready();
        fiber_switch(self, thread->fiber, thread);
    } else if (engine.alive == 0) {
        fiber_switch(self, &engine.host, nullptr);
    } else {
        die_of_deadlock();
    }
}

// Threads that never wait run one after the other on one stack, without a switch.
extern "C" void cusim_fiber_main(Fiber* self) {
    if (__sanitizer_finish_switch_fiber) {
        __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
    }
    for (;;) {
        run_current_thread();
        if (engine.current->own_fiber || engine.started >= engine.count ||
            (config.order == ORDER_RANDOM && !engine.ready.empty() && random_below(2))) {
            leave_fiber(self);
        } else {
            thread_begin(thread_take_new(), self);
        }
    }
}

// ---- deadlock ----

static bool waits_at_same_place(const DeviceThread& a, const DeviceThread& b) {
    return a.state != THREAD_DONE && b.state != THREAD_DONE && a.why == b.why && a.line == b.line &&
           a.block == b.block;
}

// Prints one line for all threads of a block that wait at the same place, for the first of them.
static void print_waiting(unsigned i) {
    const DeviceThread& thread = engine.threads[i];
    unsigned same = 1;
    for (unsigned j = i + 1; j < engine.count; j++) {
        DeviceThread& other = engine.threads[j];
        if (waits_at_same_place(thread, other)) {
            same++;
            other.why = nullptr;
        }
    }
    const uint3 block = thread.block->index;
    fprintf(stderr, "\n  %u thread(s) of block (%u,%u,%u) wait in %s at %s:%d", same, block.x, block.y,
            block.z, thread.why, thread.file ? thread.file : "?", thread.line);
}

void die_of_deadlock() {
    unsigned done = 0;
    for (unsigned i = 0; i < engine.count; i++) {
        done += engine.threads[i].state == THREAD_DONE;
    }
    fflush(stdout);
    fprintf(stderr, "CUSIM ERROR: deadlock in kernel %s: %u thread(s) exited", kernel_name(engine.kernel),
            done);
    for (unsigned i = 0; i < engine.count; i++) {
        if (engine.threads[i].state != THREAD_DONE && engine.threads[i].why) {
            print_waiting(i);
        }
    }
    fprintf(stderr, "\n");
    abort();
}
