// tokenize_options.h -- the options of ./tokenize, for llmc/setup/options.h (OPTION_TABLE_FILE):
// their struct, and in the implementation their table.

#ifndef OPTION_TABLE_ROWS_
// Options in the order of the table, which explains them.
struct Options {
    int format;
    const char *field, *separator;
    int chat;
    const char* chat_date;
    int64_t shard_tokens, val_tokens;
    const char *tokenizer, *out;
    int restart, train_bpe;
    const char* extend_bpe;
    int fim_marks;
    int threads;
    const char *config, *help;
    int version;

    OptionsProgram program;
    char given[OPTION_ROWS_MAX];   // by row: given on the command line, or in the file of --config?
    char follows[OPTION_ROWS_MAX]; // by row: true if it is of OPTION_FOLLOWS and "auto"
    char* config_text;             // text of that file, which values point into; NULL: none
};
#else

#include "llmc/base/limits.h"

// clang-format off
const OptionRow OPTION_TABLE[] = {
    // group, name, alias, type and field, min, max, flags, default
    //     unit or words, help
    {"input",  "format",       "",  CHOICE_(format),      0,       0, 0,     "name",
        WORDS_CHOICE(TEXT_FORMAT_WORDS), "format of all inputs; name: chosen by each file's name"},
    {"input",  "field",        "",  STRING_(field),       0,       0, 0,     "text",
        "NAME", "field of JSON lines, or column of Parquet, that holds the document"},
    {"input",  "separator",    "",  STRING_(separator),   0,       0, 0,     "",
        "TEXT", "separates documents in a text file; without it: one document per file"},
    {"input",  "chat",         "",  CHOICE_(chat),        0,       0, AUTO_, "auto",
        WORDS_CHOICE(CHAT_WORDS), "format of chats; auto: follows the tokenizer's chat_template, or else its special "
        "tokens"},
    {"input",  "chat-date",    "",  STRING_(chat_date),   0,       0, 0,     "",
        "YYYY-MM-DD", "date in chats, if the tokenizer's chat_template prints today's"},

    {"shards", "shard-tokens", "",  COUNT_(shard_tokens), 1, 2147483647, 0, "100000000",
        "tokens", "per shard"},
    {"shards", "val-tokens",   "",  COUNT_(val_tokens),   0,    1e15, AUTO_, "auto",
        "tokens", "for validation, from the start of the input; auto: one shard, at most 1 token per 100 bytes"},

    {"files",  "tokenizer",    "",  STRING_(tokenizer),   0,       0, READS_(TOKENIZER), "",
        "FILE", "vocabulary: tokenizer.json, merges.txt, .tiktoken, or their directory"},
    {"files",  "out",          "o", STRING_(out),         0,       0, WRITES_(PREFIX), "tokens",
        "PREFIX", "prefix of all output file names"},
    {"files",  "restart",      "",  FLAG_(restart),       0,       0, 0,     "off",
        "off|on", "remove the shards of an earlier run and start over; with --train-bpe: replace the vocabulary"},

    {"other",  "train-bpe",    "",  INT_(train_bpe),      0, 2097151, 0,     "0",
        "ids", "instead, train a vocabulary of this size on the inputs"},
    {"other",  "extend-bpe",   "",  STRING_(extend_bpe),  0,       0, READS_(TOKENIZER), "",
        "FILE", "with --train-bpe: start from this vocabulary, keep its ids, and add what is most frequent in the "
        "inputs"},
    {"other",  "fim-marks",    "",  FLAG_(fim_marks),     0,       0, 0,     "off",
        "off|on", "with --train-bpe: the last three ids are <|fim_prefix|>, <|fim_suffix|> and <|fim_middle|>, for --fim-rate of "
        "the trainers"},
    {"other",  "threads",      "",  INT_(threads),        0, LIMITS_MAX_THREADS, 0,     "0",
        "threads", "for encoding, besides a reader and a writer; 0: OMP_NUM_THREADS, else one per core that this job has"},
    {"other",  "config",       "",  STRING_(config),      0,       0, LINE_ | READS_(ONE), "",
        "FILE", "read more options from a file of lines `name = value`; # starts a comment; the command line wins"},
    {"other",  "help",         "",  STRING_(help),        0,       0, LINE_, "",
        "[GROUP|OPTION]", "print this help, or the part about a group or an option, and exit"},
    {"other",  "version",      "",  FLAG_(version),       0,       0, LINE_, "off",
        "off|on", "print the version, and exit"},
};
// clang-format on

static const OptionSynonym OPTION_SYNONYMS[] = {
    {"text-field json-key json-keys column", "use --field"},
    {"eot-token document-separator delimiter", "use --separator, a text"},
    {"vocab-size vocabsize", "use --train-bpe, to train a vocabulary of this size"},
    {"output output-prefix output-dir out-dir", "use --out, the prefix of all output file names"},
    {"workers num-workers num-proc processes", "use --threads"},
    {"shard-size", "use --shard-tokens"},
    {"input file files", "names of input files stand without an option"},
    {NULL, NULL},
};

#define CLEAN_BEFORE                                                                                         \
    "clean the JSON lines or Parquet files before, with datatrove for example (dev/doc/data.md)"
static const RemovedOption OPTION_REMOVED[] = {
    {"dedup", "none", 0, CLEAN_BEFORE},
    {"dedup-memory", "auto", 0, CLEAN_BEFORE},
    {"decontaminate", "", 0, CLEAN_BEFORE},
    {"dropped", "", 0, CLEAN_BEFORE},
    {"filter", "", 0, "select the documents before, with DuckDB for example (dev/doc/data.md)"},
    {NULL, NULL, 0, NULL},
};

static const char* option_default_(const Options* options, const OptionRow* row) {
    return (void)options, row->fallback;
}
static int option_may_be_empty_(const Options* options, const OptionRow* row) {
    return (void)options, (void)row, 0;
}
int option_counts(const Options* options, const OptionRow* row) { return (void)options, (void)row, 1; }
static void options_decide_(Options* options) { (void)options; }
#endif
