// tokenize.c -- from text to shards of tokens, or to a vocabulary.
//
//     make tokenize
//     ./tokenize --tokenizer gpt2.tiktoken --out data/books books/*.txt
//     ./tokenize --tokenizer gpt2.tiktoken --out data/fineweb 10BT/*.parquet
//     ./tokenize --train-bpe 32768 --out data/books books/*.jsonl.gz
//
// An interrupted run goes on where its last finished shard ends, when it is started again with the same
// arguments: PREFIX.progress.json says what they were, how many shards are whole, and where in the inputs the
// next one begins. The shards are those of a run that was never interrupted, bit for bit.
#define OPTION_TABLE_FILE "dev/data/tokenize_options.h"
#define OPTION_ARGUMENTS                                                                                     \
    " INPUT...\nINPUT: text, .jsonl, .parquet; .gz or .zst behind it; - is standard input.\n"
#include "llmc/options.h"

#include "llmc/bpe_files.h"
#include "llmc/log.h"
#include "llmc/shard_writer.h"
#include "llmc/signals.h"
#include "llmc/tokenize.h"

#include <dirent.h>

typedef struct {
    double start_s, shown_s; // times of the clock
    uint64_t start_bytes;    // of the inputs, read by earlier runs
    uint64_t text_bytes, documents;
    uint64_t ids; // encoded by this run
    int is_terminal;
} Screen;

typedef struct {
    Options options;
    const char** inputs;
    uint64_t num_inputs;
    int threads;
    TextSource source;
    Bpe bpe;
    ShardWriter shards;
    char progress_path[PATH_MAX];
    TextPosition start; // from where the inputs are read
    uint64_t skip_ids;  // from there, that are in finished shards already
    int is_finished;
    Screen screen;
} Run;

// ---- what the screen says

static void screen_open(Screen* screen, uint64_t start_bytes) {
    memset(screen, 0, sizeof(*screen));
    screen->start_s = screen->shown_s = time_now_s();
    screen->start_bytes = start_bytes;
    screen->is_terminal = isatty(STDERR_FILENO);
}

// One line, now and then: on a terminal always the same.
static void screen_show(Screen* screen, const TextSource* source, uint64_t read_bytes) {
    const double now_s = time_now_s(), spent_s = now_s - screen->start_s;
    if (now_s - screen->shown_s < (screen->is_terminal ? 0.2 : 5)) {
        return;
    }
    screen->shown_s = now_s;
    const double read = (double)(read_bytes - screen->start_bytes);
    char of_all[64] = "", eta[64] = "?";
    if (0 < read && read_bytes <= source->total_bytes) { // not from standard input
        snprintf(of_all, sizeof(of_all), " of %.1f", 1e-6 * (double)source->total_bytes);
        log_duration_((double)(source->total_bytes - read_bytes) / read * spent_s, eta);
    }
    fprintf(stderr, "%s%.1f%s MB read | %.1f MB/s of text | %.2f M tokens | eta %s%s",
            screen->is_terminal ? "\r" : "", 1e-6 * (double)read_bytes, of_all,
            1e-6 * (double)screen->text_bytes / spent_s, 1e-6 * (double)screen->ids, eta,
            screen->is_terminal ? "\033[K" : "\n");
}

static void screen_add(Screen* screen, const TextSource* source, const TokenBlock* block) {
    screen->text_bytes += block->text->bytes;
    screen->documents += block->text->num_documents;
    screen->ids += block->count;
    screen_show(screen, source, block->text->read_bytes);
}

static void screen_close(Screen* screen) {
    if (screen->is_terminal) {
        fprintf(stderr, "\r\033[K");
    }
}

// ---- the file that an interrupted run leaves

// Whether the shards depend on this option.
static int is_kept(const OptionRow* row) {
    return strcmp(row->group, "input") == 0 || strcmp(row->group, "shards") == 0;
}

static void progress_put_inputs(const Run* run, FILE* file) {
    fputs("{\n\"inputs\":[", file);
    for (uint64_t i = 0; i < run->num_inputs; i++) {
        fputs(i ? ",\n{\"path\":" : "\n{\"path\":", file);
        json_print_string(file, run->inputs[i], strlen(run->inputs[i]));
        fprintf(file, ",\"bytes\":%" PRIu64 "}", run->source.file_bytes[i]);
    }
    fputs("],\n", file);
}

static void progress_put_options(const Run* run, FILE* file) {
    fprintf(file, "\"options\":{\"tokenizer\":\"%016" PRIx64 "\"", bpe_checksum(&run->bpe));
    for (int i = 0; i < OPTION_ROWS; i++) {
        char buffer[OPTION_TEXT_BYTES];
        if (is_kept(&OPTION_TABLE[i])) {
            const char* text = option_text_(&run->options, &OPTION_TABLE[i], buffer);
            fprintf(file, ",\"%s\":", OPTION_TABLE[i].name);
            json_print_string(file, text, strlen(text));
        }
    }
    fputs("},\n", file);
}

// All shards so far are whole, and the next begins `skip` ids behind the position.
static void progress_save(const Run* run, TextPosition at, uint64_t skip, int is_finished) {
    FileWriter file;
    file_open(&file, run->progress_path);
    progress_put_inputs(run, file.file); // first: what "auto" means depends on them
    progress_put_options(run, file.file);
    fprintf(file.file,
            "\"file\":%" PRIu64 ",\"document\":%" PRIu64 ",\"offset\":%" PRIu64 ",\"skip_ids\":%" PRIu64
            ",\n\"shards\":%" PRIu64 ",\"tokens\":%" PRIu64 ",\"finished\":%s\n}\n",
            at.file, at.document, at.offset, skip, run->shards.number, run->shards.tokens,
            is_finished ? "true" : "false");
    file_commit(&file);
}

__attribute__((noreturn)) static void progress_refuse(const Run* run, const char* what, const char* now,
                                                      const char* then) {
    die_usage("%s is %s, but %s says %s: with other arguments, --restart begins again", what, now,
              run->progress_path, then);
}

static int progress_read_options(const Run* run, JsonReader* reader) {
    const char *key, *value;
    int more = 0, ok = json_take(reader, '{');
    for (int n = 0; ok && (more = json_member(reader, n ? JSON_NEXT : JSON_FIRST, &key)) > 0; n++) {
        char name[OPTION_NAME_BYTES + 2], buffer[OPTION_TEXT_BYTES], sum[17];
        ok = json_string(reader, &value);
        snprintf(name, sizeof(name), "--%s", key);
        snprintf(sum, sizeof(sum), "%016" PRIx64, bpe_checksum(&run->bpe));
        const OptionRow* row = option_find_(name, strlen(name));
        if (ok && strcmp(key, "tokenizer") == 0 && strcmp(value, sum) != 0) {
            progress_refuse(run, "--tokenizer: the checksum of the vocabulary", sum, value);
        } else if (ok && row && is_kept(row)) {
            const char* now = option_text_(&run->options, row, buffer);
            if (strcmp(value, now) != 0) {
                progress_refuse(run, name, *now ? now : "''", *value ? value : "''");
            }
        }
    }
    return ok && more == 0;
}

static void progress_check_input(const Run* run, uint64_t i, const char* path, size_t bytes) {
    char now[64], then[64];
    if (i >= run->num_inputs || strcmp(path, run->inputs[i]) != 0) {
        snprintf(now, sizeof(now), "input %" PRIu64, i + 1);
        progress_refuse(run, now, i < run->num_inputs ? run->inputs[i] : "missing", path);
    }
    if (bytes != run->source.file_bytes[i]) {
        snprintf(now, sizeof(now), "%" PRIu64 " bytes long", run->source.file_bytes[i]);
        snprintf(then, sizeof(then), "%zu bytes", bytes);
        progress_refuse(run, path, now, then);
    }
}

static int progress_read_inputs(const Run* run, JsonReader* reader) {
    uint64_t n = 0;
    int more = 0, ok = json_take(reader, '[');
    for (; ok && (more = json_element(reader, n ? JSON_NEXT : JSON_FIRST)) > 0; n++) {
        const char *key, *path;
        size_t bytes = 0;
        ok = json_take(reader, '{') && json_member(reader, JSON_FIRST, &key) > 0 &&
             json_string(reader, &path) && json_member(reader, JSON_NEXT, &key) > 0 &&
             json_natural(reader, &bytes) && json_take(reader, '}');
        if (ok) {
            progress_check_input(run, n, path, bytes);
        }
    }
    if (ok && more == 0 && n < run->num_inputs) {
        progress_check_input(run, n, "nothing", 0);
    }
    return ok && more == 0;
}

// Takes over where the run that wrote the file stopped.
static int progress_read(Run* run, JsonReader* reader) {
    const char* key;
    size_t shards = 0, tokens, document = 0, offset = 0, file = 0, skip = 0;
    int more = 0, ok = json_take(reader, '{');
    for (int n = 0; ok && (more = json_member(reader, n ? JSON_NEXT : JSON_FIRST, &key)) > 0; n++) {
        ok = strcmp(key, "options") == 0    ? progress_read_options(run, reader)
             : strcmp(key, "inputs") == 0   ? progress_read_inputs(run, reader)
             : strcmp(key, "finished") == 0 ? json_truth(reader, &run->is_finished)
             : strcmp(key, "file") == 0     ? json_natural(reader, &file)
             : strcmp(key, "document") == 0 ? json_natural(reader, &document)
             : strcmp(key, "offset") == 0   ? json_natural(reader, &offset)
             : strcmp(key, "skip_ids") == 0 ? json_natural(reader, &skip)
             : strcmp(key, "shards") == 0   ? json_natural(reader, &shards)
             : strcmp(key, "tokens") == 0   ? json_natural(reader, &tokens)
                                            : json_skip(reader);
    }
    run->start.file = file;
    run->start.document = document;
    run->start.offset = offset;
    run->skip_ids = skip;
    if (!run->is_finished) {
        shard_writer_resume(&run->shards, shards);
    } else {
        run->shards.number = shards;
        run->shards.tokens = tokens;
    }
    return ok && more == 0 && json_end(reader);
}

static void progress_load(Run* run, FILE* file) {
    char error[ERROR_BYTES], *text = NULL;
    size_t bytes = 0, room = 0;
    const ssize_t got = getdelim(&text, &room, '\0', file);
    bytes = got > 0 ? (size_t)got : 0;
    JsonReader reader = json_reader(run->progress_path, text, bytes, error);
    CHECK(progress_read(run, &reader), "%s", error);
    free(text);
    fclose(file);
}

// ---- what is there already

static int has_file(const char* path) { return access(path, F_OK) == 0; }

// A run is gone on with only if all its shards are as it left them.
static void check_shards(const Run* run) {
    for (uint64_t i = 0; i < run->shards.number; i++) {
        char path[PATH_MAX];
        struct stat info;
        shard_writer_path(&run->shards, i, path);
        const uint64_t wanted = shard_writer_bytes(&run->shards, i);
        CHECK(stat(path, &info) == 0, "%s: %s, but %s says it is finished; --restart begins again", path,
              strerror(errno), run->progress_path);
        CHECK((uint64_t)info.st_size == wanted || run->is_finished,
              "%s: %lld bytes, wanted %" PRIu64 " of a finished shard; --restart begins again", path,
              (long long)info.st_size, wanted);
    }
    for (uint64_t i = 0; i < run->num_inputs && !run->is_finished; i++) {
        if (strcmp(run->inputs[i], "-") == 0 && run->shards.number > 0) {
            die_usage("a run from standard input cannot go on after shard %" PRIu64
                      "; --restart begins again",
                      run->shards.number);
        }
    }
}

// Whether a name in the prefix's directory is that of a shard; `base` is the prefix without the directory.
static int is_shard_of(const char* name, const char* base) {
    const size_t length = strlen(base);
    if (strncmp(name, base, length) != 0) {
        return 0;
    }
    const char* rest = name + length;
    rest += strncmp(rest, "_val_", 5) == 0 ? 5 : strncmp(rest, "_train_", 7) == 0 ? 7 : strlen(rest);
    const size_t digits = strspn(rest, "0123456789");
    return digits >= 6 && strcmp(rest + digits, ".bin") == 0;
}

// All of an earlier run, whatever their number: a pattern of names must find only those of this one.
static void remove_shards(const Run* run) {
    char directory[PATH_MAX], path[2 * PATH_MAX];
    const char *out = run->options.out, *base = strrchr(out, '/') ? strrchr(out, '/') + 1 : out;
    snprintf(directory, sizeof(directory), "%.*s%s", (int)(base - out), out, base == out ? "./" : "");
    DIR* entries = opendir(directory);
    CHECK(entries, "%s: cannot open: %s", directory, strerror(errno));
    for (struct dirent* entry; (entry = readdir(entries)) != NULL;) {
        if (is_shard_of(entry->d_name, base)) {
            snprintf(path, sizeof(path), "%s%s", directory, entry->d_name);
            CHECK(unlink(path) == 0, "%s: cannot remove: %s", path, strerror(errno));
        }
    }
    closedir(entries);
    unlink(run->progress_path);
}

static void resume(Run* run) {
    if (run->options.restart) {
        remove_shards(run);
    }
    FILE* file = fopen(run->progress_path, "rb");
    if (file) {
        progress_load(run, file);
        check_shards(run);
        return;
    }
    CHECK(errno == ENOENT, "%s: cannot open: %s", run->progress_path, strerror(errno));
    char path[PATH_MAX];
    shard_writer_path(&run->shards, 0, path);
    CHECK(!has_file(path), "%s: is there, but no %s; --restart writes over it", path, run->progress_path);
    progress_save(run, run->start, 0, 0); // what cannot be written shows before any work
}

// ---- shards

static int sink_shards(void* context, const TokenBlock* block) {
    Run* run = (Run*)context;
    const size_t skipped = block->count < run->skip_ids ? block->count : (size_t)run->skip_ids;
    run->skip_ids -= skipped;
    for (size_t at = skipped; at < block->count;) {
        const uint64_t number = run->shards.number;
        at += shard_writer_add(&run->shards, block->ids + at, block->count - at);
        if (run->shards.number > number) {
            progress_save(run, block->text->start, at, 0);
        }
    }
    screen_add(&run->screen, &run->source, block);
    return 1;
}

// As many as a shard, but for few inputs about 5 % of English text.
static int64_t auto_val_tokens(const Run* run) {
    const int64_t part = (int64_t)(run->source.total_bytes / 100);
    return run->source.total_bytes > 0 && part < run->options.shard_tokens ? part : run->options.shard_tokens;
}

static void print_summary(const Run* run) {
    const Screen* screen = &run->screen;
    const double spent_s = time_now_s() - screen->start_s;
    char first[PATH_MAX], last[PATH_MAX];
    const uint64_t n = run->shards.number;
    CHECK(n > 0, "the inputs have no text");
    shard_writer_path(&run->shards, 0, first);
    shard_writer_path(&run->shards, n - 1, last);
    printf("%" PRIu64 " tokens in %" PRIu64 " shard%s, %s%s%s\n", run->shards.tokens, n, n > 1 ? "s" : "",
           first, n > 1 ? " to " : "", n > 1 ? last : "");
    printf("%" PRIu64 " documents, %.1f MB of text, %.2f bytes a token, %.1f s, %.1f MB/s, %.2f M tokens/s\n",
           screen->documents, 1e-6 * (double)screen->text_bytes,
           (double)screen->text_bytes / (double)screen->ids, spent_s,
           1e-6 * (double)screen->text_bytes / spent_s, 1e-6 * (double)screen->ids / spent_s);
    if (run->shards.tokens <= (uint64_t)run->options.val_tokens) {
        fprintf(stderr, "warning: all tokens are for validation: --val-tokens says how many are\n");
    }
}

// Makes the directory that the files are to be in, before any work.
static void make_place(const char* out) {
    char directory[PATH_MAX];
    struct stat info;
    file_directory_of(directory, out);
    file_make_directory(directory);
    CHECK(stat(directory, &info) == 0 && S_ISDIR(info.st_mode), "%s: a file, wanted a directory", directory);
}

static void write_shards(Run* run) {
    bpe_open(&run->bpe, run->options.tokenizer);
    make_place(run->options.out);
    if (run->options.val_tokens == OPTION_AUTO) {
        run->options.val_tokens = auto_val_tokens(run);
    }
    shard_writer_open(&run->shards, run->options.out, run->bpe.vocab_size,
                      (uint64_t)run->options.shard_tokens, (uint64_t)run->options.val_tokens);
    resume(run);
    if (run->is_finished) {
        printf("finished before: %" PRIu64 " tokens in %" PRIu64 " shards; --restart begins again\n",
               run->shards.tokens, run->shards.number);
        return;
    }
    if (run->shards.number > 0) {
        printf("going on after %" PRIu64 " tokens in %" PRIu64 " shards\n", run->shards.tokens,
               run->shards.number);
        fflush(stdout);
        CHECK(text_source_seek(&run->source, run->start), "%s", run->source.error);
    }
    screen_open(&run->screen, text_source_read_bytes(&run->source));
    CHECK(tokenize_run(&run->source, &run->bpe, run->threads, sink_shards, run), "%s", run->source.error);
    shard_writer_close(&run->shards);
    const TextPosition end = {run->num_inputs, 0, 0};
    progress_save(run, end, 0, 1);
    screen_close(&run->screen);
    print_summary(run);
    bpe_close(&run->bpe);
}

// ---- vocabularies

static int sink_training(void* context, const TokenBlock* block) {
    Run* run = (Run*)context;
    screen_add(&run->screen, &run->source, block);
    return 1;
}

static void show_merges(void* context, int merges, int wanted) {
    Screen* screen = (Screen*)context;
    const double now_s = time_now_s();
    if (now_s - screen->shown_s >= (screen->is_terminal ? 0.2 : 5)) {
        screen->shown_s = now_s;
        fprintf(stderr, "%s%d of %d merges%s", screen->is_terminal ? "\r" : "", merges, wanted,
                screen->is_terminal ? "\033[K" : "\n");
    }
}

// llm.c's format holds tokens of up to 255 bytes.
static int fits_bin(const Bpe* bpe) {
    int fits = 1;
    for (int id = 0; id < bpe->vocab_size; id++) {
        fits = fits && bpe->tokens[id].length <= 255;
    }
    return fits;
}

static void write_vocabulary(const Run* run) {
    static const char* const endings[5] = {".tiktoken", ".merges.txt", ".vocab.json", ".tokenizer.json",
                                           ".bin"};
    for (int i = 0; i < 5; i++) {
        char path[PATH_MAX];
        const int length = snprintf(path, sizeof(path), "%s%s", run->options.out, endings[i]);
        CHECK(length < PATH_MAX, "%s: the name is too long", run->options.out);
        if (strcmp(endings[i], ".bin") == 0 && !fits_bin(&run->bpe)) {
            printf("%s: not written: a token has more than 255 bytes\n", path);
        } else {
            bpe_write(&run->bpe, path);
            printf("%s\n", path);
        }
    }
}

static void train_vocabulary(Run* run) {
    BpeTrainer trainer;
    make_place(run->options.out);
    bpe_trainer_open(&trainer, run->threads);
    screen_open(&run->screen, 0);
    CHECK(tokenize_train(&run->source, &trainer, sink_training, run), "%s", run->source.error);
    bpe_trainer_run(&trainer, run->options.train_bpe, show_merges, &run->screen, &run->bpe);
    bpe_trainer_close(&trainer);
    screen_close(&run->screen);
    printf("%d ids from %" PRIu64 " documents, %.1f MB of text, in %.1f s\n", run->bpe.vocab_size,
           run->screen.documents, 1e-6 * (double)run->screen.text_bytes, time_now_s() - run->screen.start_s);
    write_vocabulary(run);
    bpe_close(&run->bpe);
}

// ---- the whole

static void check_options(const Run* run) {
    const Options* options = &run->options;
    if (run->num_inputs == 0) {
        die_usage("no input; wanted files of text, or - for standard input (--help)");
    }
    if (options->train_bpe && options->train_bpe < 257) {
        die_usage("--train-bpe is %d; wanted at least 257: the bytes and end-of-text", options->train_bpe);
    }
    if (!options->train_bpe && !*options->tokenizer) {
        die_usage("--tokenizer is missing; wanted a vocabulary, gpt2.tiktoken for example, or --train-bpe");
    }
    if (options->train_bpe && *options->tokenizer) {
        die_usage("--tokenizer and --train-bpe: wanted one of them");
    }
    if (!*options->out) {
        die_usage("--out is empty; wanted the beginning of the names of files");
    }
}

int main(int argc, char** argv) {
    static Run run; // 30 KB of paths
    file_open_standard();
    signals_open_writes();
    run.inputs = (const char**)check_alloc((size_t)argc + 1, sizeof(char*), "inputs");
    run.num_inputs = (uint64_t)options_parse_arguments(&run.options, argc, argv, run.inputs);
    check_options(&run);
    run.threads = run.options.threads ? run.options.threads : tokenize_cores();
    const int length = snprintf(run.progress_path, PATH_MAX, "%s.progress.json", run.options.out);
    CHECK(length < PATH_MAX, "%s: the name is too long", run.options.out);
    const TextOptions text = {(TextFormat)run.options.format, run.options.field, run.options.separator,
                              TEXT_BLOCK_BYTES};
    text_source_open(&run.source, &text, run.inputs, run.num_inputs);
    if (run.options.train_bpe) {
        train_vocabulary(&run);
    } else {
        write_shards(&run);
    }
    text_source_close(&run.source);
    free(run.inputs);
    CHECK(fflush(stdout) == 0, "standard output: cannot write: %s", strerror(errno));
    return EXIT_SUCCESS;
}
