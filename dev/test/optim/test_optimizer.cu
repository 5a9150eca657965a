// test_optimizer.cu -- every update rule against the CPU's, with and without master weights, in one
// part and in shards; stochastic rounding.
#include "llmc/optim/optimizer.cuh"
#include "llmc/reference.h"
#include "dev/test/lib/map_ops.h"
#include "dev/test/lib/ops.h"

// ---- arrays on the device ----

// x (n), in host memory, as elements of T on the device; the caller frees it.
template <class T> static T* upload(const float* x, size_t n, const Gpu* gpu) {
    T* host = (T*)check_alloc(n, sizeof(T), "host");
    for (size_t i = 0; i < n; i++) {
        host[i] = from_float<T>(x[i]);
    }
    T* device = (T*)gpu_alloc(n, sizeof(T), "device");
    CUDA_CHECK(cudaMemcpyAsync(device, host, n * sizeof(T), cudaMemcpyHostToDevice, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    free(host);
    return device;
}

// Frees x and returns what was in it, as floats that live until ops_close.
template <class T> static float* download(T* x, size_t n, const Gpu* gpu) {
    T* host = (T*)check_alloc(n, sizeof(T), "host");
    float* result = ops_floats(n);
    CUDA_CHECK(cudaMemcpyAsync(host, x, n * sizeof(T), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    for (size_t i = 0; i < n; i++) {
        result[i] = to_float(host[i]);
    }
    free(host);
    gpu_free(x);
    return result;
}

template <class T> static float* rounded(float* x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        x[i] = to_float(from_float<T>(x[i]));
    }
    return x;
}

// ---- layouts ----

// Tensors of less than a row of decays and of several, padding behind most of them and behind the
// groups.
static const ModelConfig SMALL = {5, 60, 64, 2, 2, 14, SHARE_OFF};

// The parameters of SMALL, cut into `size` shards; in stage 0 each process updates all of them.
typedef struct {
    Optimizer optimizer;
    int stage, size;
    const Map* map;                       // of rank 0
    size_t n;                             // elements of full arrays
    TensorRow rows[MODEL_PARAMETER_ROWS]; // sizes
} Layout;

static Layout layout_of(OptimizerName name, int stage, int size) {
    Layout layout;
    layout.optimizer = optimizer_of(name, 1, MASTER_NONE);
    layout.stage = stage;
    layout.size = size;
    const MapOf of = map_ops_of(SMALL, layout.optimizer, stage, size, NULL);
    layout.map = map_ops(&of, 0);
    layout.n = layout.map->totals.elements[MAP_PARAMETERS];
    model_parameter_rows_of(layout.rows, SMALL, 1);
    return layout;
}

static Layout whole(void) { return layout_of(OPTIMIZER_ADAMW, 0, 1); }

// Returns the place of layer l of a parameter in full arrays.
static size_t place_of(const Map* map, int row, int l) {
    const MapRange all = map_range(map, row, l, MAP_PARAMETERS);
    return map_range_at(map, &all, MAP_PARAMETERS);
}

// The parameter that each element belongs to, -1 in padding.
static int* parameters_of(const Layout* layout) {
    int* of = (int*)ops_floats(layout->n);
    for (size_t i = 0; i < layout->n; i++) {
        of[i] = -1;
    }
    for (int r = 0; r < MODEL_PARAMETER_ROWS; r++) {
        for (int l = 0; l < layout->rows[r].layers; l++) {
            for (size_t i = 0; i < tensor_layer_elements(&layout->rows[r]); i++) {
                of[place_of(layout->map, r, l) + i] = r;
            }
        }
    }
    return of;
}

// Random elements, and padding of zeros.
static float* random_parameters(const Layout* layout, float sigma) {
    const int* of = parameters_of(layout);
    float* x = ops_normal(layout->n, sigma);
    for (size_t i = 0; i < layout->n; i++) {
        x[i] = of[i] < 0 ? 0 : x[i];
    }
    return x;
}

// The elements of a full array in another layout. Buckets differ only in the padding at their end.
static float* in_layout(const Layout* to, const float* x, const Layout* from) {
    float* moved = ops_floats(to->n);
    memset(moved, 0, to->n * sizeof(float));
    for (int i = 0; i < to->map->num_buckets; i++) {
        const MapSpan there = to->map->buckets[i].in[MAP_PARAMETERS],
                      here = from->map->buckets[i].in[MAP_PARAMETERS];
        memcpy(moved + there.begin, x + here.begin,
               (there.count < here.count ? there.count : here.count) * sizeof(float));
    }
    return moved;
}

// Copies the elements that a rank owns out of a full array, bucket after bucket, or back into it.
typedef enum { CUT, PASTE } Direction;
static void owned_copy(float* owned, float* full, const Map* map, Direction direction) {
    for (int i = 0; i < map->num_buckets; i++) {
        const MapSpan own = map->buckets[i].in[MAP_OWNED], all = map->buckets[i].in[MAP_PARAMETERS];
        float *inside = full + all.begin + own.from, *outside = owned + own.begin;
        memcpy(direction == CUT ? outside : inside, direction == CUT ? inside : outside,
               own.count * sizeof(float));
    }
}

// The array of one type on the device that a process owns of x.
template <class T> static T* upload_owned(const float* x, const Map* map, const Gpu* gpu) {
    const size_t n = map->totals.elements[MAP_OWNED];
    float* owned = ops_floats(n);
    owned_copy(owned, (float*)x, map, CUT);
    return upload<T>(owned, n, gpu);
}

// Frees `owned`, and puts what was in it into x.
static void download_owned(float* x, float* owned, const Map* map, const Gpu* gpu) {
    owned_copy(download(owned, map->totals.elements[MAP_OWNED], gpu), x, map, PASTE);
}

// ---- the update ----

static const Update defaults = {0.01f,     0.9f,  0.95f,           1e-8f, 0.1f, 0.37f,         1,
                                DECAY_ALL, 0.75f, ADAFACTOR_FIXED, 0,     0,    MUON_SPECTRAL, 2};

// The state of an optimizer in host memory, full arrays.
typedef struct {
    float *param, *master, *m, *v;
} State;

static State state_random(const Layout* layout) {
    State s = {random_parameters(layout, 1), random_parameters(layout, 1), random_parameters(layout, 0.1f),
               random_parameters(layout, 0.1f)};
    for (size_t i = 0; i < layout->n; i++) {
        s.v[i] = fabsf(s.v[i]);
    }
    return s;
}

static State state_in_layout(const Layout* to, State s, const Layout* from) {
    const State moved = {in_layout(to, s.param, from), in_layout(to, s.master, from),
                         in_layout(to, s.m, from), in_layout(to, s.v, from)};
    return moved;
}

// The array of a slot on the device, from x; NULL if nothing has it.
static float* upload_slot(const OptimizerState* state, int slot, const float* x, const Gpu* gpu) {
    const size_t bytes = state->slots[slot].bytes;
    EXPECT(bytes == 0 || bytes == state->map->totals.elements[MAP_OWNED] * sizeof(float),
           "a slot of all parameters has %zu bytes", bytes);
    return bytes ? upload_owned<float>(x, state->map, gpu) : NULL;
}

static void download_slot(float* x, float* slot, const Map* map, const Gpu* gpu) {
    if (slot) {
        download_owned(x, slot, map, gpu);
    }
}

// Makes one rank's update on the device, and stores its results in `s`. `param` is a full array on
// the device.
template <class T, class G>
static void update_of_rank(State s, T* param, const float* grad, const Map* map, Optimizer optimizer,
                           Update by, uint64_t seed, const Gpu* gpu) {
    OptimizerState state;
    OptimizerPlan plan;
    optimizer_state_open(&state, optimizer, map);
    Memory memory = memory_on_gpu();
    optimizer_open<T>(&plan, &memory, &state);
    float *m = upload_slot(&state, STATE_M, s.m, gpu), *v = upload_slot(&state, STATE_V, s.v, gpu),
          *master = upload_slot(&state, STATE_MASTER, s.master, gpu);
    G* device_grad = upload_owned<G>(grad, map, gpu);
    OptimizerUpdate<T> u = {param, {device_grad, DTYPE_OF(G)}, {NULL}, &plan, by, seed, NULL, NULL};
    u.slots[STATE_M] = m;
    u.slots[STATE_V] = v;
    u.slots[STATE_MASTER] = master;
    optimizer_update(u, gpu);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    gpu_free(device_grad);
    download_slot(s.m, m, map, gpu);
    download_slot(s.v, v, map, gpu);
    download_slot(s.master, master, map, gpu);
    memory_close(&memory);
}

// One update of a state by all processes, one after the other; the gradients are rounded to G.
template <class T, class G>
static State update(const Layout* layout, State s, const float* grad, Update by, uint64_t seed,
                    MasterWeights with, const Gpu* gpu) {
    State result = state_in_layout(layout, s, layout);
    Optimizer optimizer = layout->optimizer;
    optimizer.master = with;
    T* param = upload<T>(s.param, layout->n, gpu);
    for (int rank = 0; rank < (layout->stage == 0 ? 1 : layout->size); rank++) {
        const Map* map = rank == 0 ? layout->map : map_ops(&layout->map->of, rank);
        update_of_rank<T, G>(result, param, grad, map, optimizer, by, seed, gpu);
    }
    result.param = download(param, layout->n, gpu);
    return result;
}

typedef struct {
    double *weights, *m, *v;
} Wanted;

// Returns the results of the reference. `weights` are the parameters or the master weights.
static Wanted reference(const Layout* layout, State s, const float* weights, const float* grad, Update by) {
    const Wanted want = {ops_widen(weights, layout->n), ops_widen(s.m, layout->n), ops_widen(s.v, layout->n)};
    const double* wide = ops_widen(grad, layout->n);
    const int* of = parameters_of(layout);
    for (size_t i = 0; i < layout->n; i++) {
        AdamW of_tensor = update_adamw(by);
        of_tensor.weight_decay = of[i] >= 0 && layout->rows[of[i]].decay ? by.weight_decay : 0;
        ref_adamw(want.weights + i, wide + i, want.m + i, want.v + i, 1, of_tensor);
    }
    return want;
}

// The update is computed in fp32, with a handful of roundings of half an epsilon each in m, v and
// the step, and one in the sum; the step is at most a few lr.
static void expect_state(const char* what, const Layout* layout, State got, const float* weights,
                         Wanted want) {
    double* magnitude = ops_doubles(layout->n);
    for (size_t i = 0; i < layout->n; i++) {
        magnitude[i] = fabs(want.weights[i]) + 10 * defaults.lr;
    }
    EXPECT_NEAR(ops_error(weights, want.weights, magnitude, layout->n), 0, 2, "%s: weights", what);
    EXPECT_NEAR(ops_error(got.m, want.m, NULL, layout->n), 0, 2, "%s: m", what);
    EXPECT_NEAR(ops_error(got.v, want.v, NULL, layout->n), 0, 2, "%s: v", what);
}

// Padding is zero, and most else is not as it was.
static void expect_padding(const char* what, const Layout* layout, const float* got, const float* before) {
    const int* of = parameters_of(layout);
    size_t changed = 0, elements = 0;
    for (size_t i = 0; i < layout->n; i++) {
        EXPECT(of[i] >= 0 || float_bits(got[i]) == 0, "%s: padding at %zu: %g", what, i, got[i]);
        changed += of[i] >= 0 && got[i] != before[i];
        elements += of[i] >= 0;
    }
    EXPECT(changed > elements / 2, "%s: only %zu elements changed", what, changed);
}

template <class G> static float* random_gradient(const Layout* layout) {
    return rounded<G>(random_parameters(layout, 1), layout->n);
}

template <class T, class G> static void test_with_master(const Gpu* gpu) {
    const Layout layout = whole();
    const char* what = dtype_name(DTYPE_OF(T));
    const State s = state_random(&layout);
    rounded<T>(s.param, layout.n);
    Update opt = defaults;
    for (opt.t = 1; opt.t <= 1001; opt.t += 500) {
        float* grad = random_gradient<G>(&layout);
        const State got = update<T, G>(&layout, s, grad, opt, 1, MASTER_FP32, gpu);
        expect_state(what, &layout, got, got.master, reference(&layout, s, s.master, grad, opt));
        expect_padding("params", &layout, got.param, s.param);
        expect_padding("master", &layout, got.master, s.master);
        expect_padding("m", &layout, got.m, s.m);
        expect_padding("v", &layout, got.v, s.v);
        for (size_t i = 0; i < layout.n; i++) { // rounded to nearest
            const float want = to_float(from_float<T>(got.master[i]));
            EXPECT(got.param[i] == want, "%s: params at %zu: %g, wanted %g", what, i, got.param[i], want);
        }
        // the seed is not used
        const State again = update<T, G>(&layout, s, grad, opt, 2, MASTER_FP32, gpu);
        EXPECT(ops_same_bits(got.param, again.param, layout.n) &&
                   ops_same_bits(got.master, again.master, layout.n),
               "%s: two runs differ", what);
    }
    ops_close("with master weights");
}

// The word of stochastic rounding of element i of a layer of a tensor.
static uint32_t random_word(const TensorRow* row, int layer, size_t i, uint64_t seed, int64_t t) {
    const uint64_t word = ((uint64_t)layer << 40) + i;
    return rand_block(seed, rand_stream(row->name) + (uint64_t)t, word / 4).word[word % 4];
}

// Without master weights, T rounds what the update in fp32 gives, with the words of rand.h.
template <class T, class G> static void test_without_master(const Gpu* gpu) {
    const Layout layout = whole();
    const char* what = dtype_name(DTYPE_OF(T));
    const uint64_t seed = 0x123456789ABCDEF;
    State s = state_random(&layout);
    rounded<T>(s.param, layout.n);
    Update opt = defaults;
    opt.t = 7;
    float* grad = random_gradient<G>(&layout);
    const State exact = update<float, float>(&layout, s, grad, opt, seed, MASTER_NONE, gpu);
    const State got = update<T, G>(&layout, s, grad, opt, seed, MASTER_NONE, gpu);
    expect_state(what, &layout, exact, exact.param, reference(&layout, s, s.param, grad, opt));
    expect_padding("params", &layout, got.param, s.param);
    EXPECT(ops_same_bits(got.m, exact.m, layout.n) && ops_same_bits(got.v, exact.v, layout.n), "%s: moments",
           what);
    for (int r = 0; r < MODEL_PARAMETER_ROWS; r++) {
        const TensorRow* row = &layout.rows[r];
        for (size_t i = 0; i < tensor_elements(row); i++) {
            const size_t l = i / tensor_layer_elements(row), in_layer = i % tensor_layer_elements(row),
                         at = place_of(layout.map, r, (int)l) + in_layer;
            const uint32_t random = random_word(row, (int)l, in_layer, seed, opt.t);
            const float want = to_float(round_stochastic<T>(exact.param[at], random));
            EXPECT(got.param[at] == want, "%s: %s at %zu: %.9g, wanted %.9g", what, row->name, i,
                   got.param[at], want);
        }
    }
    ops_close("without master weights");
}

// ---- all rules, beside the CPU ----

static const ModelConfig WIDE = {5, 60, 64, 2, 2, 64, SHARE_OFF}; // blocks of 64

// A model's parameters and state on the host, laid out alike for both sides.
typedef struct {
    OptimizerState state;
    const Map* map;
    size_t n;
    float* params;
    int in_24; // after each update on the GPU, weights are rounded to what MASTER_24 has of them
} Both;

// Parameters in the list are frozen.
static Both both_open(Optimizer optimizer, ShareLayers share, const char* frozen) {
    ModelConfig cfg = WIDE;
    cfg.share = share;
    Both b;
    b.in_24 = 0;
    const Freeze freeze = freeze_of(cfg, frozen);
    optimizer.frozen = freeze.rows;
    const MapOf of = map_ops_of(cfg, optimizer, 0, 1, &freeze);
    b.map = map_ops(&of, 0);
    b.n = b.map->totals.elements[MAP_PARAMETERS];
    optimizer_state_open(&b.state, optimizer, b.map);
    b.params = ops_normal(b.n, 1);
    b.state.memory = ops_normal(b.state.bytes / sizeof(float) + 1, 0);
    return b;
}

// `grad` has all elements: also those of frozen blocks, which are not read.
static void both_on_cpu(Both* b, const float* grad, Update by) {
    MatmulScratch matmul;
    Memory memory = memory_on_host();
    matmul_open(&matmul, &memory);
    const MuonScratch scratch = {check_alloc(optimizer_scratch_bytes(&b->state) + 1, 1, "scratch"), &matmul};
    for (int i = 0; i < b->map->num_buckets; i++) {
        MapRange range = {};
        while (map_next_range(b->map, &b->map->buckets[i], MAP_OWNED, &range)) {
            const size_t at = map_range_at(b->map, &range, MAP_PARAMETERS);
            if (!(range.shard->flags & SHARD_FROZEN)) {
                optimizer_update_cpu(&b->state, &range, b->params + at, grad + at, by, &scratch);
            }
        }
    }
    free(scratch.memory);
    memory_close(&memory);
}

// The gradient of what has one, on the GPU.
static float* both_upload_gradient(const Both* b, const float* grad, const Gpu* gpu) {
    const size_t n = b->map->totals.elements[MAP_GRADIENTS];
    float* trained = ops_floats(n);
    for (int i = 0; i < b->map->num_buckets; i++) {
        const MapSpan *in = b->map->buckets[i].in, to = in[MAP_GRADIENTS];
        memcpy(trained + to.begin, grad + in[MAP_PARAMETERS].begin, to.count * sizeof(float));
    }
    return upload<float>(trained, n, gpu);
}

// An array of fp32 master weights, which lies as owned elements do, from full ones on the host; or,
// the other way, back.
static void both_copy_master(const Both* b, float* master, float* params, cudaMemcpyKind kind) {
    for (int i = 0; i < b->map->num_buckets; i++) {
        const MapSpan* in = b->map->buckets[i].in;
        float *on_gpu = master + in[MAP_OWNED].begin, *on_host = params + in[MAP_PARAMETERS].begin;
        const int to_gpu = kind == cudaMemcpyHostToDevice;
        CUDA_CHECK(cudaMemcpy(to_gpu ? on_gpu : on_host, to_gpu ? on_host : on_gpu,
                              in[MAP_OWNED].count * sizeof(float), kind));
    }
}

static void round_to_24(float* params, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const SplitFloat<int8_t> split = split_float<int8_t>(params[i]);
        params[i] = split_join(split.upper, split.lower);
    }
}

// Where the state has fp32 weights; NULL: it has none.
static float* both_master(const Both* b, char* memory) {
    const StateSlot* slot = &b->state.slots[STATE_MASTER];
    return slot->bytes ? (float*)(memory + slot->offset_bytes) : NULL;
}

// The weights after updates 1, 2, ... by these gradients, on the GPU.
template <class T>
static float* both_on_gpu(const Both* b, float* const* grads, int updates, Update by, const Gpu* gpu) {
    const MatmulSettings settings = {0, (GeluFusion)0, 0, 0, 0};
    MatmulGpu matmul;
    OptimizerPlan plan;
    Memory memory = memory_on_gpu();
    matmul_gpu_open(&matmul, &memory, gpu, settings);
    optimizer_open<T>(&plan, &memory, &b->state);
    char* on_gpu = (char*)gpu_alloc(b->state.bytes + 1, 1, "state");
    OptimizerUpdate<T> u = {upload<T>(b->params, b->n, gpu), {}, {NULL}, &plan, by, 3, &matmul, NULL};
    CUDA_CHECK(cudaMemset(on_gpu, 0, b->state.bytes + 1));
    float* master = both_master(b, on_gpu);
    if (master) {
        both_copy_master(b, master, b->params, cudaMemcpyHostToDevice);
    }
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        u.slots[slot] = b->state.slots[slot].bytes ? on_gpu + b->state.slots[slot].offset_bytes : NULL;
    }
    for (u.update.t = 1; u.update.t <= updates; u.update.t++) {
        float* grad = both_upload_gradient(b, grads[u.update.t - 1], gpu);
        u.grads = Gradient{grad, DTYPE_FP32};
        optimizer_update(u, gpu);
        CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
        gpu_free(grad);
        if (b->in_24) {
            float* rounded = download(u.params, b->n, gpu);
            round_to_24(rounded, b->n);
            u.params = upload<T>(rounded, b->n, gpu);
        }
    }
    float* params = download(u.params, b->n, gpu);
    if (master) {
        both_copy_master(b, master, params, cudaMemcpyDeviceToHost);
    }
    gpu_free(on_gpu);
    memory_close(&memory);
    matmul_gpu_close(&matmul);
    return params;
}

// Every tensor is updated as on the CPU: by its rule, its rate and its part of the state.
// `tolerance` is a share of the largest change: fp32 on both sides, but Muon's matmuls amplify it,
// and a code of 8 bits may be the next one. `has_options`: with parameters and a block that are
// frozen, and with momentum, means of rows and cautious decay, where the rule has them. Then two
// elements of Muon's in a layer may decay on one side only: rounding decides the sign of what is
// nearly 0. SOAP turns sides of WIDE.C alone: the MLP's hidden side has fewer gradients than
// directions, and rounding turns what no gradient has; in squares of noise it still turns the
// direction that has least.
static void test_like_cpu(OptimizerName name, int has_options, ShareLayers share, double tolerance,
                          const Gpu* gpu) {
    enum { UPDATES = 3 };
    const int may_differ = name == OPTIMIZER_MUON && has_options ? 2 : 0;
    Optimizer optimizer = optimizer_of(name, has_options, MASTER_NONE);
    optimizer.lr_scale[KIND_EMBEDDING] = 0.5f;
    optimizer.lr_scale[KIND_VECTOR] = 2;
    optimizer.lr_scale[KIND_MATRIX] = name == OPTIMIZER_MUON ? 1 : 0.75f; // or a rate of its own
    optimizer.soap_max_side = WIDE.C;
    optimizer.mup = has_options ? Mup{0, 0} : Mup{WIDE.C / 2, 1}; // factors of rate, decay and eps
    Update by = defaults;
    by.momentum = has_options ? 0.75f : 0;
    by.muon_lr = 0.02f;
    by.muon_weight_decay = 0.05f;
    by.decay = has_options ? DECAY_CAUTIOUS : DECAY_ALL;
    Both both = both_open(optimizer, share, has_options ? "wpe,ln1b,fcw,blocks[0]" : "");
    const float* start = ops_copy(both.params, both.n);
    float* grads[UPDATES];
    for (int t = 0; t < UPDATES; t++) {
        grads[t] = ops_normal(both.n, 1);
    }
    const float* got = both_on_gpu<float>(&both, grads, UPDATES, by, gpu);
    for (by.t = 1; by.t <= UPDATES; by.t++) {
        both_on_cpu(&both, grads[by.t - 1], by);
    }
    for (int r = 0; r < MODEL_PARAMETER_ROWS; r++) {
        const TensorRow* row = &both.state.rows[r];
        for (int l = 0; l < row->layers; l++) {
            const Shard* first = map_find(both.map, r, tensor_lowest_layer(row, l));
            const size_t at = place_of(both.map, r, tensor_lowest_layer(row, l)),
                         end = at + model_rows_in_files(row, WIDE) * row->cols;
            double change = 0;
            int differ = 0;
            for (size_t i = at; i < end; i++) {
                change = fmax(change, fabs((double)both.params[i] - start[i]));
            }
            for (size_t i = at; i < end; i++) {
                differ += !(fabs((double)both.params[i] - got[i]) <= tolerance * change);
            }
            EXPECT((change > 0) == !(first->flags & SHARD_FROZEN), "%s: %s changes by %g",
                   optimizer_word(name), row->name, change);
            EXPECT(differ <= may_differ, "%s, options %d: %s, layer %d: %d elements differ",
                   optimizer_word(name), has_options, row->name, l, differ);
        }
    }
    ops_close("like the CPU");
}

static const char FROZEN[] = "wte,ln1w,attprojw,blocks[0]";

// Split master weights are those of fp32 beside weights of 16 bits, bit by bit; with 24 bits,
// rounded after each update.
static void test_split(OptimizerName name, MasterWeights master, const Gpu* gpu) {
#ifdef SANITIZED
    enum { UPDATES = 2 };
#else
    enum { UPDATES = 20 };
#endif
    Both split = both_open(optimizer_of(name, 0, master), SHARE_OFF, FROZEN);
    float* grads[UPDATES];
    for (int t = 0; t < UPDATES; t++) {
        grads[t] = ops_normal(split.n, 1);
    }
    const float* start = rounded<bf16>(split.params, split.n); // the lower halves are zero
    const float* got = both_on_gpu<bf16>(&split, grads, UPDATES, defaults, gpu);
    Both wide = both_open(optimizer_of(name, 0, MASTER_NONE), SHARE_OFF, FROZEN);
    wide.in_24 = master == MASTER_24;
    memcpy(wide.params, start, split.n * sizeof(float));
    const float* want = both_on_gpu<float>(&wide, grads, UPDATES, defaults, gpu);
    for (size_t i = 0; i < split.n; i++) {
        if (got[i] != to_float(split_float<uint16_t>(want[i]).upper)) {
            EXPECT(0, "%s, master %d: weight %zu is %g, the fp32 one %g", optimizer_word(name), master, i,
                   got[i], want[i]);
            break;
        }
    }
    ops_close("split master weights");
}

// Without master weights, each rule rounds what it makes of them with the element's word.
static void test_rounding(OptimizerName name, const Gpu* gpu) {
    const Both none = both_open(optimizer_of(name, 0, MASTER_NONE), SHARE_OFF, FROZEN);
    Both master = both_open(optimizer_of(name, 0, MASTER_FP32), SHARE_OFF, FROZEN);
    float* const grad = ops_normal(none.n, 1);
    Update by = defaults;
    by.muon_lr = 0.02f;
    memcpy(master.params, rounded<bf16>(none.params, none.n), none.n * sizeof(float));
    const float *exact = both_on_gpu<bf16>(&master, &grad, 1, by, gpu),
                *got = both_on_gpu<bf16>(&none, &grad, 1, by, gpu);
    for (int r = 0; r < MODEL_PARAMETER_ROWS; r++) {
        const TensorRow* row = &none.state.rows[r];
        for (int l = 0; l < row->layers; l++) {
            const size_t begin = place_of(none.map, r, l);
            size_t differ = 0;
            for (size_t i = 0; i < tensor_layer_elements(row); i++) {
                const uint32_t random = random_word(row, l, i, 3, 1);
                const float rounded = to_float(round_stochastic<bf16>(exact[begin + i], random));
                differ += got[begin + i] != rounded;
            }
            EXPECT(differ == 0, "%s: %zu elements of %s, layer %d, are rounded otherwise",
                   optimizer_word(name), differ, row->name, l);
        }
    }
    ops_close("stochastic rounding");
}

// A 16-bit weight follows its master weight, whatever the rule.
template <class T, class G> static void test_rule_with_master(OptimizerName name, const Gpu* gpu) {
    const Layout layout = layout_of(name, 0, 1);
    const State s = state_random(&layout);
    const float* grad = random_gradient<G>(&layout);
    State in_fp32 = s;
    in_fp32.param = s.master;
    const State want = update<float, float>(&layout, in_fp32, grad, defaults, 1, MASTER_NONE, gpu);
    const State got = update<T, G>(&layout, s, grad, defaults, 1, MASTER_FP32, gpu);
    EXPECT(ops_same_bits(got.master, want.param, layout.n) && ops_same_bits(got.m, want.m, layout.n),
           "%s: master weights and fp32 differ", optimizer_word(name));
    EXPECT(ops_same_bits(got.param, rounded<T>(want.param, layout.n), layout.n), "%s: params",
           optimizer_word(name));
    ops_close("a rule with master weights");
}

// Each process updates its shards, or all of them its own copy: the same bits, whatever their
// number.
template <class T>
static void test_shards(OptimizerName name, int stage, int size, MasterWeights with, const Gpu* gpu) {
    const Layout one = layout_of(name, 0, 1), layout = layout_of(name, stage, size);
    const State s = state_random(&one);
    rounded<T>(s.param, one.n);
    const float* grad = random_gradient<T>(&one);
    const State want = update<T, T>(&one, s, grad, defaults, 3, with, gpu);
    const State got = update<T, T>(&layout, state_in_layout(&layout, s, &one), in_layout(&layout, grad, &one),
                                   defaults, 3, with, gpu);
    expect_padding("params", &layout, got.param, ops_floats(layout.n));
    const State back = state_in_layout(&one, got, &layout);
    EXPECT(ops_same_bits(back.param, want.param, one.n) && ops_same_bits(back.master, want.master, one.n) &&
               ops_same_bits(back.m, want.m, one.n) && ops_same_bits(back.v, want.v, one.n),
           "%s, %s, stage %d: %d shards make other bits", optimizer_word(name), dtype_name(DTYPE_OF(T)),
           stage, size);
    ops_close("shards");
}

// The seed and the number of the update matter.
template <class T> static void test_random_words(const Gpu* gpu) {
    const Layout layout = whole();
    State s = state_random(&layout);
    const float* grad = random_parameters(&layout, 1);
    Update opt = defaults;
    const State one = update<T, float>(&layout, s, grad, opt, 1, MASTER_NONE, gpu);
    const State other = update<T, float>(&layout, s, grad, opt, 2, MASTER_NONE, gpu);
    EXPECT(!ops_same_bits(one.param, other.param, layout.n), "the bits do not depend on the seed");
    opt.lr = 0; // parameters that T has do not change, whatever is added to the moments
    opt.t = 3;
    rounded<T>(s.param, layout.n);
    const State still = update<T, float>(&layout, s, grad, opt, 1, MASTER_NONE, gpu);
    EXPECT(ops_same_bits(still.param, s.param, layout.n), "an update of nothing changed parameters");
    ops_close("random words");
}

// Updates of a hundredth of the distance to the next number: rounded to nearest, none would ever
// happen. The mean over n elements of 20 updates has a standard deviation of sqrt(20 * 0.01 / n)
// distances.
template <class T> static void test_small_updates(const Gpu* gpu) {
    const double distance = DTYPE_OF(T) == DTYPE_BF16 ? 0x1p-7 : 0x1p-10; // from 1 upwards
    const Layout layout = whole();
    const size_t n = layout.n;
    State s = state_random(&layout);
    Update opt = defaults;
    opt.lr = (float)(distance / 100);
    opt.weight_decay = 0;
    opt.grad_scale = 1;
    float* grad = ops_floats(n);
    for (size_t i = 0; i < n; i++) {
        s.param[i] = 1, s.m[i] = 0, s.v[i] = 0, grad[i] = -1; // each update is lr upwards
    }
    for (opt.t = 1; opt.t <= 20; opt.t++) {
        s = update<T, float>(&layout, s, grad, opt, 5, MASTER_NONE, gpu);
    }
    double mean = 0;
    for (size_t i = 0; i < n; i++) {
        mean += (s.param[i] - 1) / distance / (double)n;
    }
    EXPECT_NEAR(mean, 20 * 0.01, 5 * sqrt(20 * 0.01 / (double)n), "%s: way made", dtype_name(DTYPE_OF(T)));
    ops_close("small updates");
}

// A NaN or infinity in a gradient reaches its own element only.
template <class T> static void test_nonfinite_gradient(const Gpu* gpu, MasterWeights with) {
    const Layout layout = whole();
    const State s = state_random(&layout);
    float* grad = random_parameters(&layout, 1);
    grad[33] = NAN;
    grad[77] = INFINITY;
    const State got = update<T, T>(&layout, s, grad, defaults, 1, with, gpu);
    for (size_t i = 0; i < layout.n; i++) {
        const int bad = i == 33 || i == 77;
        EXPECT((isnan(got.param[i]) != 0) == bad, "%s: params at %zu: %g", dtype_name(DTYPE_OF(T)), i,
               got.param[i]);
        EXPECT(isfinite(got.m[i]) == !bad && isfinite(got.v[i]) == !bad, "moments at %zu: %g %g", i, got.m[i],
               got.v[i]);
    }
    ops_close("not finite");
}

// ---- stochastic rounding ----

template <class T> static T from_bits(uint16_t bits) {
    T x;
    memcpy((void*)&x, &bits, sizeof(x));
    return x;
}

// Every number of T is kept, infinities and NaN too.
template <class T> static void test_representable(void) {
    const uint32_t random[] = {0, 1, 0x80000000u, 0xFFFF0000u, 0xFFFFFFFFu};
    for (int bits = 0; bits < 65536; bits++) {
        const float x = to_float(from_bits<T>((uint16_t)bits));
        for (int r = 0; r < 5; r++) {
            const float got = to_float(round_stochastic<T>(x, random[r]));
            EXPECT(isnan(x) ? isnan(got) : float_bits(got) == float_bits(x), "%s: %.9g became %.9g",
                   dtype_name(DTYPE_OF(T)), x, got);
        }
    }
}

// Between the neighbors number `bits` and `bits` + 1 of T, at nine fractions of the way: with the
// words 0, 2^16, ... the share of the upper one is the fraction, to 2^-16; with all smaller and
// larger words it is one of the two.
template <class T> static void test_unbiased(uint16_t bits) {
    const double lower = to_float(from_bits<T>(bits)), upper = to_float(from_bits<T>((uint16_t)(bits + 1)));
    for (int part = 1; part < 10; part++) {
        const float x = (float)(lower + (upper - lower) * part / 10);
        int ups = 0;
        for (uint32_t high = 0; high < 65536; high++) {
            const float got = to_float(round_stochastic<T>(x, high << 16));
            ups += got == (float)upper;
            if (got != (float)upper && got != (float)lower) {
                EXPECT(0, "%s: %.9g became %.9g, wanted %.9g or %.9g", dtype_name(DTYPE_OF(T)), x, got, lower,
                       upper);
                return;
            }
        }
        EXPECT_NEAR(ups / 65536.0, (x - lower) / (upper - lower), 1.01 / 65536,
                    "%s: share of %.9g between %.9g, %.9g", dtype_name(DTYPE_OF(T)), x, lower, upper);
    }
}

// Subnormals, the smallest normals, powers of two from both sides, the largest; both signs.
template <class T> static void test_unbiased_everywhere(void) {
    const uint16_t one = DTYPE_OF(T) == DTYPE_BF16 ? 0x3F80 : 0x3C00;
    const uint16_t normal = DTYPE_OF(T) == DTYPE_BF16 ? 0x0080 : 0x0400;
    const uint16_t infinite = DTYPE_OF(T) == DTYPE_BF16 ? 0x7F80 : 0x7C00;
    const uint16_t below[] = {0,
                              1,
                              2,
                              (uint16_t)(normal / 2),
                              (uint16_t)(normal - 1),
                              normal,
                              (uint16_t)(one - 1),
                              one,
                              0x1234,
                              (uint16_t)(infinite - 2)};
    for (int i = 0; i < 10; i++) {
        test_unbiased<T>(below[i]);
        test_unbiased<T>((uint16_t)(below[i] | 0x8000));
    }
    const float large[] = {65504.01f, 65519, 65520, 1e5f, 3.3895313e38f, 3.39e38f, FLT_MAX};
    for (int i = 0; i < 7; i++) {
        const float up = to_float(round_stochastic<T>(large[i], 0xFFFFFFFFu));
        const float down = to_float(round_stochastic<T>(-large[i], 0xFFFFFFFFu));
        EXPECT(isfinite(up) && up == -down, "%s: %g became %g, %g", dtype_name(DTYPE_OF(T)), large[i], up,
               down);
    }
    EXPECT(to_float(round_stochastic<T>(1e-30f, 0)) >= 0 && round_stochastic<float>(0.1f, 7) == 0.1f,
           "tiny; float");
}

// ---- limits ----

static void too_many_tiles(const void* map) {
    OptimizerPlan plan;
    OptimizerState state;
    memset(&state, 0, sizeof(state));
    state.map = (const Map*)map;
    Memory memory = memory_on_gpu();
    optimizer_open<float>(&plan, &memory, &state);
}

static void test_limits(void) {
    Map map;
    memset((void*)&map, 0, sizeof(map));
    map.totals.updated = ((size_t)INT_MAX + 1) * 1024;
    EXPECT(test_dies(too_many_tiles, &map, EXIT_FAILURE, "2147483648 tiles"), "2^31 tiles");
}

// Bytes of an update, of each parameter.
static double bytes_of(OptimizerName name, MasterWeights master, DType params, DType grads) {
    const Optimizer optimizer = optimizer_of(name, 0, master);
    const MapOf of = map_ops_of(SMALL, optimizer, 0, 1, NULL);
    OptimizerState state;
    optimizer_state_open(&state, optimizer, map_ops(&of, 0));
    return optimizer_bytes(&state, dtype_bytes(params), dtype_bytes(grads)) /
           (double)state.map->totals.elements[MAP_OWNED];
}

static void test_bytes(void) {
    EXPECT(bytes_of(OPTIMIZER_ADAMW, MASTER_NONE, DTYPE_FP32, DTYPE_FP32) == adamw_bytes(1), "as on the CPU");
    EXPECT(bytes_of(OPTIMIZER_LION, MASTER_NONE, DTYPE_FP32, DTYPE_FP32) == lion_bytes(1), "Lion");
    EXPECT(bytes_of(OPTIMIZER_SGD, MASTER_NONE, DTYPE_FP32, DTYPE_FP32) == sgd_bytes(1, 0), "SGD");
    EXPECT(bytes_of(OPTIMIZER_ADAMW, MASTER_FP32, DTYPE_BF16, DTYPE_BF16) == 28,
           "g 2, m 8, v 8, master 8, param 2");
    EXPECT(bytes_of(OPTIMIZER_ADAMW, MASTER_NONE, DTYPE_BF16, DTYPE_FP32) == 24, "g 4, m 8, v 8, param 4");
    ops_close("bytes");
}

template <class T> static void test_type(const Gpu* gpu) {
    test_with_master<T, float>(gpu);
    test_with_master<T, T>(gpu);
    test_without_master<T, float>(gpu);
    test_without_master<T, T>(gpu);
    test_nonfinite_gradient<T>(gpu, MASTER_NONE);
    test_nonfinite_gradient<T>(gpu, MASTER_FP32);
    for (int i = 0; i < 4; i++) {
        const int sizes[] = {1, 2, 3, 5};
        test_shards<T>(OPTIMIZER_ADAMW, 2, sizes[i], MASTER_NONE, gpu);
        test_shards<T>(OPTIMIZER_ADAMW, 1, sizes[i], MASTER_FP32, gpu);
    }
    test_shards<T>(OPTIMIZER_ADAMW, 0, 3, MASTER_NONE, gpu);
    test_shards<T>(OPTIMIZER_LION, 2, 3, MASTER_NONE, gpu);
    test_shards<T>(OPTIMIZER_SGD, 1, 2, MASTER_FP32, gpu);
}

template <class T> static void test_16_bit(const Gpu* gpu) {
    test_random_words<T>(gpu);
    test_small_updates<T>(gpu);
    test_representable<T>();
    test_unbiased_everywhere<T>();
    test_rule_with_master<T, T>(OPTIMIZER_LION, gpu);
    test_rule_with_master<T, T>(OPTIMIZER_SGD, gpu);
}

TEST(optimizer) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_type<float>(&gpu);
    test_type<bf16>(&gpu);
    test_16_bit<bf16>(&gpu);
    UNSANITIZED((test_type<fp16>(&gpu), test_16_bit<fp16>(&gpu)));
    test_like_cpu(OPTIMIZER_ADAMW, 0, SHARE_OFF, 1e-4, &gpu);
    test_like_cpu(OPTIMIZER_ADAMW, 1, SHARE_OFF, 1e-4, &gpu);
    test_like_cpu(OPTIMIZER_ADAMW8BIT, 0, SHARE_OFF, 0.05, &gpu);
    test_like_cpu(OPTIMIZER_ADAMW8BIT, 1, SHARE_OFF, 0.05, &gpu);
    test_like_cpu(OPTIMIZER_ADAFACTOR, 0, SHARE_OFF, 1e-4, &gpu);
    test_like_cpu(OPTIMIZER_ADAFACTOR, 1, SHARE_OFF, 1e-4, &gpu);
    test_like_cpu(OPTIMIZER_MUON, 0, SHARE_OFF, 1e-3, &gpu);
    test_like_cpu(OPTIMIZER_MUON, 1, SHARE_OFF, 1e-3, &gpu);
    test_like_cpu(OPTIMIZER_SOAP, 0, SHARE_OFF, 0.03, &gpu);
    test_like_cpu(OPTIMIZER_SOAP, 1, SHARE_PAIRS, 0.03, &gpu);
    test_like_cpu(OPTIMIZER_LION, 0, SHARE_OFF, 1e-4, &gpu);
    test_like_cpu(OPTIMIZER_LION, 1, SHARE_OFF, 1e-4, &gpu);
    test_like_cpu(OPTIMIZER_SGD, 1, SHARE_OFF, 1e-4, &gpu);
    test_like_cpu(OPTIMIZER_SGD, 0, SHARE_OFF, 1e-4, &gpu);
    test_like_cpu(OPTIMIZER_ADAMW, 0, SHARE_PAIRS, 1e-4, &gpu);
    test_like_cpu(OPTIMIZER_ADAMW8BIT, 0, SHARE_PAIRS, 0.05, &gpu);
    test_like_cpu(OPTIMIZER_ADAFACTOR, 1, SHARE_PAIRS, 1e-4, &gpu);
    test_like_cpu(OPTIMIZER_MUON, 0, SHARE_PAIRS, 1e-3, &gpu);
    test_split(OPTIMIZER_ADAMW, MASTER_SPLIT, &gpu);
    test_split(OPTIMIZER_ADAMW8BIT, MASTER_SPLIT, &gpu);
    test_split(OPTIMIZER_ADAMW8BIT, MASTER_24, &gpu);
    test_split(OPTIMIZER_LION, MASTER_24, &gpu);
    test_split(OPTIMIZER_ADAFACTOR, MASTER_24, &gpu);
    test_rounding(OPTIMIZER_ADAMW8BIT, &gpu);
    test_rounding(OPTIMIZER_ADAFACTOR, &gpu);
    test_rounding(OPTIMIZER_MUON, &gpu);
    test_rounding(OPTIMIZER_SOAP, &gpu);
    test_limits();
    test_bytes();
    gpu_close(&gpu);
}
