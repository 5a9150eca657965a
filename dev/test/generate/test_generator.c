// test_generator.c -- generator.h: several sequences generated together are the same as each alone;
// full contexts; how texts end. The model knows only its few examples.
#include "llmc/generate/generator.h"
#include "dev/test/lib/test.h"

enum { V = 31, VP = 32, T = 8, SLOTS = 3, EOT = 256 };

// The model remembers what each slot has read; its logits are a function of all of it, with
// positions.
struct Model {
    int seen[SLOTS][T], known[SLOTS];
    float logits[SLOTS * VP];
    int reads, bans_eot;
};

static void logits_of(Model* model, int slot, float* logits) {
    uint64_t hash = 7;
    for (int t = 0; t < model->known[slot]; t++) {
        hash = (hash ^ (uint64_t)(model->seen[slot][t] + 1000 * t)) * 1099511628211u;
    }
    for (int v = 0; v < VP; v++) {
        logits[v] = 2 * rand_normal(hash, 1, (uint64_t)v);
    }
}

static int rereads_at = 0; // position at which the model wants a sequence to be read again

static const float* prefill(Model* model, int slot, const int* ids, int count) {
    EXPECT(count >= 1 && count <= T, "%d tokens", count);
    memcpy(model->seen[slot], ids, (size_t)count * sizeof(int));
    model->known[slot] = count;
    model->reads++;
    logits_of(model, slot, model->logits);
    return model->logits;
}

static const float* decode(Model* model, const int* ids, const int* positions, int slots) {
    EXPECT(slots == SLOTS, "%d slots", slots);
    for (int s = 0; s < slots; s++) {
        EXPECT(positions[s] >= 0 && positions[s] < T, "position %d", positions[s]);
        EXPECT(rereads_at == 0 || positions[s] != rereads_at, "slot %d: position %d is decoded", s,
               rereads_at);
        EXPECT(positions[s] == 0 || positions[s] == model->known[s], "slot %d jumps to %d", s, positions[s]);
        model->seen[s][positions[s]] = ids[s];
        model->known[s] = positions[s] + 1;
        logits_of(model, s, model->logits + s * VP);
    }
    return model->logits;
}

typedef struct {
    char text[512];
    int made, reads;
    GeneratorEnd end;
} Written;

// Texts 0 ... count-1, each begun in the slot that is free first; alone: only one at a time.
static void write_texts(Written* written, int count, int is_alone, int limit, const Options* options) {
    static Model model;
    static RunData data; // no tokenizer: texts are ids
    const GeneratorModel functions = {&model, prefill, decode, V, VP, T, SLOTS, rereads_at};
    Generator g;
    Rand rng[16];
    int of_slot[SLOTS], next = 0, busy;
    memset(&model, 0, sizeof(model));
    generator_open(&g, functions, &data, options);
    do {
        busy = 0;
        for (int s = 0; s < (is_alone ? 1 : SLOTS); s++) {
            GeneratorSequence* sequence = &g.sequences[s];
            while (sequence->in_use ? sequence->end != STILL_GENERATING : next < count) {
                if (sequence->in_use) {
                    Written* w = &written[of_slot[s]];
                    snprintf(w->text, sizeof(w->text), "%.*s", (int)sequence->stream.count,
                             sequence->stream.bytes);
                    w->made = sequence->generated;
                    w->end = sequence->end;
                    sequence->in_use = 0;
                    continue;
                }
                const int prompt[4] = {V - 1, next % 5, 3, next % 3}, tokens = 1 + next % 4;
                of_slot[s] = next;
                rng[next] = rand_open(5, (uint64_t)next);
                text_stream_begin(&sequence->stream);
                generator_begin(&g, s, prompt, tokens, limit, &rng[next]);
                next++;
            }
            busy |= sequence->in_use;
        }
        if (busy) {
            generator_advance(&g);
        }
    } while (busy);
    written->reads = model.reads;
    generator_close(&g);
}

static Options options_of(float temperature) {
    Options o;
    memset(&o, 0, sizeof(o));
    o.samples.temperature = temperature;
    o.generates = 1;
    return o;
}

// A text does not depend on the others in its batch, nor on their number, even beyond the context.
static void test_batch_is_single(float temperature) {
    enum { COUNT = 11, LIMIT = 40 };
    static Written alone[COUNT], together[COUNT];
    const Options options = options_of(temperature);
    int ends[5] = {0}, longest = 0;
    write_texts(alone, COUNT, 1, LIMIT, &options);
    write_texts(together, COUNT, 0, LIMIT, &options);
    for (int i = 0; i < COUNT; i++) {
        EXPECT(strcmp(alone[i].text, together[i].text) == 0 && alone[i].end == together[i].end,
               "text %d: %s, alone %s", i, together[i].text, alone[i].text);
        ends[alone[i].end]++;
        longest = alone[i].made > longest ? alone[i].made : longest;
    }
    EXPECT(ends[GENERATOR_EOT] > 0 && ends[GENERATOR_TOKENS] > 0 && longest == LIMIT, "a test of nothing");
    EXPECT(alone->reads > COUNT && alone->reads == together->reads, "full contexts are read again");
}

TEST(stop_string) {
    Options options = options_of(1);
    static Written whole[4], cut[4];
    write_texts(whole, 4, 0, 12, &options);
    char stop[8];
    const char* second = strchr(whole[1].text, ' ') + 1;
    snprintf(stop, sizeof(stop), " %.*s", (int)strcspn(second, " "), second);
    options.texts.stop.count = 1;
    options.texts.stop.text[0] = stop;
    write_texts(cut, 4, 0, 12, &options);
    EXPECT(cut[1].end == GENERATOR_STRING && cut[1].made == 2, "made %d", cut[1].made);
    EXPECT(strncmp(whole[1].text, cut[1].text, strlen(cut[1].text)) == 0 && !strchr(cut[1].text, ' '),
           "%s of %s", cut[1].text, whole[1].text);
}

TEST(batch_is_single) {
    test_batch_is_single(1);
    test_batch_is_single(0.7f);
}

// A model that wants its sequences read again at a position reads them again there, and writes the
// same texts.
TEST(rereads) {
    enum { COUNT = 5, LIMIT = 20 };
    static Written usual[COUNT], again[COUNT];
    const Options options = options_of(1);
    write_texts(usual, COUNT, 0, LIMIT, &options);
    rereads_at = 6;
    write_texts(again, COUNT, 0, LIMIT, &options);
    rereads_at = 0;
    for (int i = 0; i < COUNT; i++) {
        EXPECT(strcmp(usual[i].text, again[i].text) == 0, "text %d: %s, wanted %s", i, again[i].text,
               usual[i].text);
    }
    EXPECT(again->reads > usual->reads, "%d reads, usually %d", again->reads, usual->reads);
}

static float sure[1024]; // logits that want one token

static const float* read_sure(Model* model, int slot, const int* ids, int count) {
    (void)model, (void)slot, (void)ids, (void)count;
    return sure;
}

// A text of SentencePiece's kind does not start with the blank that encoding puts there.
TEST(generator_sentence) {
    static RunData data;
    const Options options = options_of(0);
    data.has_tokenizer = 1;
    tokenizer_open_file(&data.tokenizer, "dev/ref/fixtures/sentencepiece/llama2.model");
    const GeneratorModel functions = {NULL, read_sure, NULL, data.tokenizer.vocab_size, 1024, T, SLOTS, 0};
    int ids[16] = {data.tokenizer.eot};
    CHECK(tokenizer_encode(&data.tokenizer, "the", 3, ids + 1) == 1, "the is a token");
    sure[ids[1]] = 1;
    for (int tokens = 1; tokens <= 2; tokens++) { // in the prompt
        Generator g;
        Rand rng = rand_open(1, 1);
        generator_open(&g, functions, &data, &options);
        text_stream_begin(&g.sequences[0].stream);
        generator_begin(&g, 0, ids, tokens, 1, &rng);
        const TextStream* stream = &g.sequences[0].stream;
        const char* wanted = tokens == 1 ? "the" : " the";
        EXPECT(stream->count == strlen(wanted) && memcmp(stream->bytes, wanted, stream->count) == 0,
               "\"%.*s\"", (int)stream->count, stream->bytes);
        generator_close(&g);
    }
    tokenizer_close(&data.tokenizer);
}
