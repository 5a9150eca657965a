// test_encode_threads.c -- encode_threads.h: the ids are those of documents encoded one by one, for
// any number of threads and any block size; stopping and errors; the same vocabulary from any
// number of threads.
#define BPE_MAX_PIECE 5000 // some documents have longer ones
#define BPE_ENCODE_IMPLEMENTATION
#define BPE_TRAIN_IMPLEMENTATION
#define ENCODE_THREADS_IMPLEMENTATION
#define DOCUMENTS_IMPLEMENTATION
#include "llmc/data/encode_threads.h"
#include "llmc/tokenizer/bpe_files.h"
#include "dev/test/lib/texts.h"

enum { NUM_DOCUMENTS = 60, MAX_BYTES = 12000 };

typedef struct {
    int* ids; // (count)
    size_t count, capacity, num_blocks, documents;
    size_t stop_after; // blocks
} Sunk;

static int sink(void* context, const TokenBlock* block) {
    Sunk* sunk = (Sunk*)context;
    // twice as much: asan's realloc always copies
    if (sunk->count + block->count > sunk->capacity) {
        sunk->capacity = 2 * (sunk->count + block->count);
        sunk->ids = (int*)realloc(sunk->ids, sunk->capacity * sizeof(int));
    }
    memcpy(sunk->ids + sunk->count, block->ids, block->count * sizeof(int));
    sunk->count += block->count;
    sunk->documents += block->text->num_documents;
    return ++sunk->num_blocks != sunk->stop_after;
}

static int sink_nothing(void* context, const TokenBlock* block) {
    *(size_t*)context += block->text->bytes;
    return block->count == 0;
}

typedef struct {
    char text[NUM_DOCUMENTS][MAX_BYTES];
    size_t bytes[NUM_DOCUMENTS];
    char paths[NUM_DOCUMENTS][64];
    const char* names[NUM_DOCUMENTS];
} Corpus;

// Documents of many sizes, some empty, in a file each.
static void make_corpus(Corpus* corpus) {
    uint64_t state = 11;
    for (int i = 0; i < NUM_DOCUMENTS; i++) {
        const size_t room = i % 5 == 0 ? 0
                            : i % 3    ? random_below(&state, 200)
                                       : random_below(&state, MAX_BYTES);
        char name[32];
        corpus->bytes[i] = random_text(&state, corpus->text[i], room, i % 2);
        if (i % 9 == 4) {
            memset(corpus->text[i] + corpus->bytes[i], "a \n1'\xC3"[i % 6], MAX_BYTES - corpus->bytes[i]);
            corpus->bytes[i] = MAX_BYTES;
        }
        snprintf(name, sizeof(name), "%d.txt", i);
        strcpy(corpus->paths[i], test_write(name, corpus->text[i], corpus->bytes[i]));
        corpus->names[i] = corpus->paths[i];
    }
}

static Sunk encode_whole(const Corpus* corpus, const Bpe* bpe) {
    Sunk all;
    BpeEncoder encoder;
    memset(&all, 0, sizeof(all));
    bpe_encoder_open(&encoder, bpe);
    all.ids = (int*)malloc(NUM_DOCUMENTS * (MAX_BYTES + 1) * sizeof(int));
    for (int i = 0; i < NUM_DOCUMENTS; i++) {
        if (corpus->bytes[i] > 0) {
            all.ids[all.count++] = bpe->eot;
            all.count += bpe_encode(&encoder, corpus->text[i], corpus->bytes[i], all.ids + all.count);
            all.documents++;
        }
    }
    bpe_encoder_close(&encoder);
    return all;
}

static void open_source(Documents* source, const char* const* names, uint64_t n, size_t block_bytes) {
    const TextOptions options = {TEXT_BY_NAME, "text", "", block_bytes};
    documents_open(source, &options, names, n);
}

static void test_threads(const Corpus* corpus, const Bpe* bpe) {
    static Documents source;
    Sunk want = encode_whole(corpus, bpe);
    static const size_t sizes[] = {1, 100, 5000, TEXT_BLOCK_BYTES};
    for (int threads = 1; threads <= 8; threads++) {
        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
            Sunk got;
            memset(&got, 0, sizeof(got));
            open_source(&source, corpus->names, NUM_DOCUMENTS, sizes[i]);
            EXPECT(pipeline_run(&source, bpe, threads, sink, &got), "%s", source.error);
            EXPECT(got.count == want.count && got.documents == want.documents &&
                       memcmp(got.ids, want.ids, want.count * sizeof(int)) == 0,
                   "%d threads, blocks of %zu: %zu ids, wanted %zu", threads, sizes[i], got.count,
                   want.count);
            documents_close(&source);
            free(got.ids);
        }
    }
    free(want.ids);
}

static void test_stops(const Corpus* corpus, const Bpe* bpe) {
    static Documents source;
    for (size_t blocks = 1; blocks < 5; blocks++) {
        Sunk got;
        memset(&got, 0, sizeof(got));
        got.stop_after = blocks;
        open_source(&source, corpus->names, NUM_DOCUMENTS, 10);
        EXPECT(pipeline_run(&source, bpe, 3, sink, &got) && got.num_blocks == blocks, "%zu", got.num_blocks);
        documents_close(&source);
        free(got.ids);
    }
}

// All that comes before the bad line arrives.
static void test_error(const Bpe* bpe) {
    static Documents source;
    char lines[4000] = "";
    for (int i = 0; i < 100; i++) {
        strcat(lines, "{\"text\":\"a 1!\"}\n");
    }
    strcat(lines, "{\"text\":\"a 1!\"\n");
    const char* path = test_write("bad.jsonl", lines, strlen(lines));
    Sunk got;
    memset(&got, 0, sizeof(got));
    open_source(&source, &path, 1, 4);
    EXPECT(!pipeline_run(&source, bpe, 2, sink, &got) && strstr(source.error, "bad.jsonl:101: "), "%s",
           source.error);
    EXPECT(got.documents == 100, "%zu documents", got.documents);
    documents_close(&source);
    free(got.ids);
}

static void test_nothing(const Bpe* bpe) {
    static Documents source;
    const char* path = test_write("empty.txt", "", 0);
    Sunk got;
    memset(&got, 0, sizeof(got));
    open_source(&source, &path, 1, TEXT_BLOCK_BYTES);
    EXPECT(pipeline_run(&source, bpe, 2, sink, &got) && got.num_blocks == 0, "");
    documents_close(&source);
}

static void test_train(const Corpus* corpus) {
    enum { V = 257 + 40 };
    static Documents source;
    Bpe first;
    for (int threads = 1; threads <= 4; threads++) {
        BpeTrainer trainer;
        Bpe bpe;
        size_t bytes = 0, wanted = 0;
        bpe_trainer_open(&trainer, threads);
        open_source(&source, corpus->names, NUM_DOCUMENTS, threads * (size_t)100);
        EXPECT(pipeline_train(&source, &trainer, sink_nothing, &bytes), "%s", source.error);
        for (int i = 0; i < NUM_DOCUMENTS; i++) {
            wanted += corpus->bytes[i];
        }
        EXPECT(bytes == wanted, "%zu bytes, wanted %zu", bytes, wanted);
        documents_close(&source);
        bpe_trainer_run(&trainer, V, NULL, NULL, threads == 1 ? &first : &bpe);
        bpe_trainer_close(&trainer);
        for (int id = 0; threads > 1 && id < V; id++) {
            int length, first_length;
            const char *token = bpe_token(&bpe, id, &length), *other = bpe_token(&first, id, &first_length);
            EXPECT(length == first_length && memcmp(token, other, (size_t)length) == 0, "token %d", id);
        }
        if (threads > 1) {
            bpe_close(&bpe);
        }
    }
    bpe_close(&first);
}

TEST(encode_threads) {
    static Corpus corpus;
    Bpe bpe = open_pairs();
    make_corpus(&corpus);
    test_threads(&corpus, &bpe);
    test_stops(&corpus, &bpe);
    test_error(&bpe);
    test_nothing(&bpe);
    test_train(&corpus);
    bpe_close(&bpe);
}

// Blocks that continue a document get no blank before them, those that start one do.
TEST(encode_threads_sentence) {
    static const char* const paths[] = {"dev/ref/fixtures/sentencepiece/llama2.model",
                                        "dev/ref/fixtures/sentencepiece/mistral.json"};
    static Corpus corpus;
    make_corpus(&corpus);
    for (int i = 0; i < 2; i++) {
        Bpe bpe;
        bpe_open(&bpe, paths[i]);
        test_threads(&corpus, &bpe);
        bpe_close(&bpe);
    }
}
