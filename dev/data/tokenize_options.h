// tokenize_options.h -- the options of ./tokenize, for llmc/run/options.h (OPTION_TABLE_FILE): their struct, and in
// the implementation their table.

#ifndef OPTION_TABLE_ROWS_
// In the order of the table, which explains them.
struct Options {
    int format;
    const char *field, *separator;
    int64_t shard_tokens, val_tokens;
    const char *tokenizer, *out;
    int restart, train_bpe, threads, help, version;

    OptionsProgram program;
    char given[OPTION_ROWS_MAX]; // by row: was it on the command line?
};
#else

// clang-format off
const OptionRow OPTION_TABLE[] = {
    // group, name, alias, type and field, min, max, flags, default
    //     unit or words, help
    {"input",  "format",       "",  CHOICE_(format),      0,       0, 0,     "name",
        WORDS_CHOICE(TEXT_FORMAT_WORDS), "format of all inputs; name: chosen by each file's name"},
    {"input",  "field",        "",  STRING_(field),       0,       0, 0,     "text",
        "NAME", "field of JSON lines, or column of Parquet, that holds the document"},
    {"input",  "separator",    "",  STRING_(separator),   0,       0, 0,     "",
        "TEXT", "separates documents in a text file; empty: one document per file"},

    {"shards", "shard-tokens", "",  COUNT_(shard_tokens), 1, 2147483647, 0, "100000000",
        "tokens", "per shard"},
    {"shards", "val-tokens",   "",  COUNT_(val_tokens),   0,    1e15, AUTO_, "auto",
        "tokens", "for validation, from the start of the input; auto: one shard, at most 1 token per 100 bytes"},

    {"files",  "tokenizer",    "",  STRING_(tokenizer),   0,       0, 0,     "",
        "FILE", "vocabulary: tokenizer.json, merges.txt, .tiktoken, llm.c's .bin, or their directory"},
    {"files",  "out",          "o", STRING_(out),         0,       0, 0,     "tokens",
        "PREFIX", "prefix of all output file names"},
    {"files",  "restart",      "",  FLAG_(restart),       0,       0, 0,     "off",
        "off|on", "remove the shards of an earlier run and start over"},

    {"other",  "train-bpe",    "",  INT_(train_bpe),      0, 2097151, 0,     "0",
        "ids", "instead, train a vocabulary of this size on the inputs"},
    {"other",  "threads",      "",  INT_(threads),        0,    4096, 0,     "0",
        "threads", "for encoding, besides a reader and a writer; 0: one per core"},
    {"other",  "help",         "",  FLAG_(help),          0,       0, 0,     "off",
        "off|on", "print this help, and exit"},
    {"other",  "version",      "",  FLAG_(version),       0,       0, 0,     "off",
        "off|on", "print the version, and exit"},
};
// clang-format on

int option_counts(const Options* options, const OptionRow* row) { return (void)options, (void)row, 1; }
static void options_decide_(Options* options) { (void)options; }
#endif
