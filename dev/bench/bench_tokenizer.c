/*
bench_tokenizer.c -- speed of encoding text, and of training a vocabulary.

    make bench-tokenizer             128 MiB of generated text, a vocabulary trained on it
    bench_tokenizer [NAME VALUE]...  --text FILE, --text-mib N (of generated text), --threads N,
                                     --vocabulary FILE, --train V (0: no training), --passes N,
                                     --ids FILE

The text is in memory, in blocks of 1 MiB that can be encoded separately (bpe_last_cut); threads
share them. Ids are stored as uint16 (uint32 above 65,536 ids). The first pass is cold: fresh
encoders in a fresh process; later ones have seen the whole text. --ids writes the ids of the last
pass to a file, for comparison.

Each line is a name and a value, for dev/bench/tokenizers.py.
*/
#include <errno.h>
#include <sys/stat.h>
#include <time.h>

#include "llmc/base/rand.h"
#include "llmc/base/threads.h"
#include "llmc/bf16/machine_peak.h"
#include "llmc/tokenizer/bpe_encode.h"
#include "llmc/tokenizer/bpe_files.h"
#include "llmc/tokenizer/bpe_train.h"

enum { BLOCK_BYTES = 1 << 20, DISTINCT_WORDS = 1 << 20, LONGEST_WORD = 14 };

typedef struct {
    char* bytes;
    size_t length;
} Text;

static Text text_read(const char* path) {
    struct stat info;
    FILE* file = fopen(path, "rb");
    CHECK(file && fstat(fileno(file), &info) == 0, "%s: cannot open: %s", path, strerror(errno));
    const Text text = {(char*)check_alloc((size_t)info.st_size, 1, path), (size_t)info.st_size};
    CHECK(fread(text.bytes, 1, text.length, file) == text.length, "%s: cannot read", path);
    fclose(file);
    return text;
}

// Spells the word of a rank: letters with the frequencies of English, rarer words longer.
static int word_spell(uint32_t rank, char word[LONGEST_WORD + 1]) {
    static const char letters[] =
        "eeeeeeeeeeeetttttttttaaaaaaaaooooooooiiiiiiinnnnnnnsssssshhhhhhrrrrrrddddlllluuu"
        "cccmmmwwffggyyppbbvkjxqz";
    Rand rng = rand_open(rank, rand_stream("word"));
    int length = 1 + (int)rand_below(&rng, 4);
    for (uint32_t rest = rank; rest > 0 && length < LONGEST_WORD; rest /= 8) {
        length++;
    }
    for (int i = 0; i < length; i++) {
        word[i] = letters[rand_below(&rng, sizeof(letters) - 1)];
    }
    return length;
}

// Makes a text of words whose frequency is inversely proportional to their rank (Zipf), in
// sentences, lines and paragraphs.
static Text text_make(size_t length) {
    Text text = {(char*)check_alloc(length + 64, 1, "text"), 0};
    Rand rng = rand_open(1, rand_stream("text"));
    int capital = 1;
    while (text.length < length) {
        char word[LONGEST_WORD + 1];
        const uint32_t rank = (uint32_t)exp(rand_uniform(&rng) * log(DISTINCT_WORDS)),
                       kind = rand_below(&rng, 100);
        const int n = word_spell(rank, word);
        word[0] = (char)(capital ? word[0] - 'a' + 'A' : word[0]);
        memcpy(text.bytes + text.length, word, (size_t)n);
        text.length += (size_t)n;
        const char* after = kind < 80   ? " "
                            : kind < 86 ? ", "
                            : kind < 92 ? ". "
                            : kind < 97 ? "\n"
                            : kind < 98 ? "'s "
                            : kind < 99 ? " (1999) "
                                        : ".\n\n";
        capital = after[0] == '.';
        memcpy(text.bytes + text.length, after, strlen(after));
        text.length += strlen(after);
    }
    return text;
}

// Returns the CPU seconds of all threads of this process: other programs on the machine matter
// less.
static double cpu_now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// Results of encoding a whole text.
typedef struct {
    size_t num_blocks, *begins; // (num_blocks + 1)
    size_t* counts;             // ids of each block
    // (num_blocks) starts of the blocks' ids, in the memory of their threads
    char** ids;
    // (threads) ids of all blocks that a thread encodes, one after another
    char** memory;
    int threads, id_bytes;
} Run;

// Returns the starts of the blocks of a text, followed by its length.
static size_t* blocks_open(const BpeRules* rules, Text text, size_t* count) {
    size_t *begins = NULL, at = 0;
    for (*count = 0; at < text.length; ++*count) {
        begins = (size_t*)check_grow(begins, *count, sizeof(size_t), "blocks");
        begins[*count] = at;
        const size_t left = text.length - at;
        const size_t bytes = left > BLOCK_BYTES ? bpe_last_cut(rules, text.bytes + at, BLOCK_BYTES) : left;
        CHECK(bytes > 0, "no place to divide the text after byte %zu", at);
        at += bytes;
    }
    begins = (size_t*)check_grow(begins, *count, sizeof(size_t), "blocks");
    begins[*count] = text.length;
    return begins;
}

static Run run_open(const Bpe* bpe, Text text, int threads) {
    Run run = {0, NULL, NULL, NULL, NULL, threads, bpe->vocab_size > 65536 ? 4 : 2};
    run.begins = blocks_open(&bpe->rules, text, &run.num_blocks);
    run.counts = (size_t*)check_alloc(run.num_blocks, sizeof(size_t), "blocks");
    run.ids = (char**)check_alloc(run.num_blocks, sizeof(char*), "blocks");
    run.memory = (char**)check_alloc((size_t)threads, sizeof(char*), "threads");
    for (int thread = 0; thread < threads; thread++) { // a quarter of it is touched
        run.memory[thread] = (char*)check_alloc_unset(text.length + 1, (size_t)run.id_bytes, "ids");
    }
    return run;
}

static void run_close(Run* run) {
    free(run->begins);
    free(run->counts);
    free(run->ids);
    for (int thread = 0; thread < run->threads; thread++) {
        free(run->memory[thread]);
    }
    free(run->memory);
}

// Encodes a block into `out`; returns the end of its ids.
static char* encode_block(BpeEncoder* encoder, Text text, Run* run, size_t block, int* ids, char* out) {
    const size_t begin = run->begins[block];
    const size_t n = bpe_encode(encoder, text.bytes + begin, run->begins[block + 1] - begin, ids);
    for (size_t i = 0; i < n && run->id_bytes == 2; i++) {
        ((uint16_t*)out)[i] = (uint16_t)ids[i];
    }
    if (run->id_bytes == 4) {
        memcpy(out, ids, n * sizeof(int));
    }
    run->counts[block] = n;
    run->ids[block] = out;
    return out + n * (size_t)run->id_bytes;
}

static void encode_text(BpeEncoder* encoders, Text text, Run* run) {
    size_t longest = 0;
    for (size_t block = 0; block < run->num_blocks; block++) {
        const size_t bytes = run->begins[block + 1] - run->begins[block];
        longest = bytes > longest ? bytes : longest;
    }
#pragma omp parallel num_threads(run->threads)
    {
        int* ids = (int*)check_alloc(longest, sizeof(int), "ids of a block");
        char* out = run->memory[thread_index()];
#pragma omp for schedule(dynamic, 1)
        for (size_t block = 0; block < run->num_blocks; block++) {
            out = encode_block(&encoders[thread_index()], text, run, block, ids, out);
        }
        free(ids);
    }
}

static void write_ids(const Run* run, const char* path) {
    FILE* file = fopen(path, "wb");
    CHECK(file, "%s: cannot write: %s", path, strerror(errno));
    for (size_t block = 0; block < run->num_blocks; block++) {
        const size_t n = run->counts[block];
        CHECK(fwrite(run->ids[block], (size_t)run->id_bytes, n, file) == n, "%s: cannot write", path);
    }
    CHECK(fclose(file) == 0, "%s: cannot write: %s", path, strerror(errno));
}

static void bench_encode(const Bpe* bpe, Text text, int threads, int passes, const char* ids_path) {
    Run run = run_open(bpe, text, threads);
    const double mb = (double)text.length * 1e-6;
    double start_s = time_now_s(), start_cpu_s = cpu_now_s();
    BpeEncoder* encoders = (BpeEncoder*)check_alloc((size_t)threads, sizeof(BpeEncoder), "encoders");
    for (int pass = 0; pass < passes; pass++) {
        for (int thread = 0; pass == 0 && thread < threads; thread++) {
            bpe_encoder_open(&encoders[thread], bpe);
        }
        encode_text(encoders, text, &run);
        const char* name = pass == 0 ? "cold" : "warm";
        printf("%s_mb_per_s %.1f\n", name, mb / (time_now_s() - start_s));
        printf("%s_mb_per_cpu_s %.1f\n", name, mb / (cpu_now_s() - start_cpu_s));
        start_s = time_now_s();
        start_cpu_s = cpu_now_s();
    }
    size_t tokens = 0;
    for (size_t block = 0; block < run.num_blocks; block++) {
        tokens += run.counts[block];
    }
    printf("tokens %zu\n", tokens);
    if (ids_path) {
        write_ids(&run, ids_path);
    }
    for (int thread = 0; thread < threads; thread++) {
        bpe_encoder_close(&encoders[thread]);
    }
    free(encoders);
    run_close(&run);
}

// Measures a megabyte of one letter: a single piece.
static void bench_letter(const Bpe* bpe) {
    const size_t bytes = 1000000;
    char* text = (char*)check_alloc(bytes, 1, "text");
    int* ids = (int*)check_alloc(bytes, sizeof(int), "ids");
    memset(text, 'a', bytes);
    BpeEncoder encoder;
    const double start_s = time_now_s(), start_cpu_s = cpu_now_s();
    bpe_encoder_open(&encoder, bpe);
    bpe_encode(&encoder, text, bytes, ids);
    printf("letter_ms %.2f\n", (time_now_s() - start_s) * 1e3);
    printf("letter_cpu_ms %.2f\n", (cpu_now_s() - start_cpu_s) * 1e3);
    bpe_encoder_close(&encoder);
    free(ids);
    free(text);
}

static void bench_train(Text text, int threads, int vocab_size, Bpe* bpe) {
    BpeTrainer trainer;
    bpe_trainer_open(&trainer, threads);
    const double start_s = time_now_s();
    size_t num_blocks;
    size_t* begins = blocks_open(&trainer.rules, text, &num_blocks);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (size_t block = 0; block < num_blocks; block++) {
        bpe_trainer_add(&trainer, thread_index(), text.bytes + begins[block],
                        begins[block + 1] - begins[block]);
    }
    const double counted_s = time_now_s();
    bpe_trainer_run(&trainer, vocab_size, NULL, NULL, bpe);
    printf("train_count_s %.3f\ntrain_merge_s %.3f\n", counted_s - start_s, time_now_s() - counted_s);
    free(begins);
    bpe_trainer_close(&trainer);
}

typedef struct {
    const char *text, *vocabulary, *ids; // files, NULL if not given
    int threads, passes, train, text_mib;
} Options;

static Options parse_options(int argc, char** argv) {
    Options options = {NULL, NULL, NULL, threads_max(), 3, -1, 128};
    const struct {
        const char* name;
        const char** string; // or
        int *number, least;
    } rows[] = {
        {"--text", &options.text, NULL, 0},         {"--vocabulary", &options.vocabulary, NULL, 0},
        {"--ids", &options.ids, NULL, 0},           {"--threads", NULL, &options.threads, 1},
        {"--passes", NULL, &options.passes, 0},     {"--train", NULL, &options.train, 0},
        {"--text-mib", NULL, &options.text_mib, 1},
    };
    const int num_rows = (int)(sizeof(rows) / sizeof(rows[0]));
    for (int i = 1; i < argc; i += 2) {
        int row = 0;
        while (row < num_rows && strcmp(argv[i], rows[row].name) != 0) {
            row++;
        }
        if (row == num_rows || i + 1 == argc) {
            die_usage("%s: wanted --text, --text-mib, --vocabulary, --threads, --passes, --train or --ids, "
                      "and a value",
                      argv[i]);
        }
        if (rows[row].string) {
            *rows[row].string = argv[i + 1];
            continue;
        }
        char* end;
        const long number = strtol(argv[i + 1], &end, 10);
        if (*end || end == argv[i + 1] || number < rows[row].least || number > 1 << 24) {
            die_usage("%s %s: wanted a number from %d", argv[i], argv[i + 1], rows[row].least);
        }
        *rows[row].number = (int)number;
    }
    if (options.train < 0) {
        options.train = options.vocabulary ? 0 : 50257;
    }
    return options;
}

int main(int argc, char** argv) {
    threads_wait_briefly(argv);
    const Options options = parse_options(argc, argv);
    const Text text = options.text ? text_read(options.text) : text_make((size_t)options.text_mib << 20);
    Bpe read, trained;
    memset(&read, 0, sizeof(read));
    memset(&trained, 0, sizeof(trained));
    printf("text_bytes %zu\nthreads %d\n", text.length, options.threads);
    if (options.train > 0) {
        bench_train(text, options.threads, options.train, &trained);
    }
    if (options.vocabulary) {
        const double start_s = time_now_s();
        bpe_open(&read, options.vocabulary);
        printf("open_ms %.1f\n", (time_now_s() - start_s) * 1e3);
    }
    const Bpe* bpe = options.vocabulary ? &read : &trained;
    if (bpe->vocab_size > 0 && options.passes > 0) {
        bench_encode(bpe, text, options.threads, options.passes, options.ids);
        bench_letter(bpe);
    }
    bpe_close(&read); // closing one that was never opened does nothing
    bpe_close(&trained);
    free(text.bytes);
    return 0;
}
