// tokenize_options.h -- the options of ./tokenize, for llmc/run/options.h (OPTION_TABLE_FILE): their struct, and in
// the implementation their table.

#ifndef OPTION_TABLE_ROWS_
// In the order of the table, which explains them.
typedef struct {
    int format;
    const char *field, *separator;
    int64_t shard_tokens, val_tokens;
    const char *tokenizer, *out;
    int restart, train_bpe, threads, help, version;

    OptionsProgram program;
    char given[OPTION_ROWS_MAX]; // by row: was it on the command line?
} Options;
#else

// clang-format off
const OptionRow OPTION_TABLE[] = {
    // group, name, alias, type and field, min, max, flags, default
    //     unit or words, help
    {"input",  "format",       "",  CHOICE_(format),      0,       0, 0,     "name",
        WORDS_CHOICE(TEXT_FORMAT_WORDS), "of all inputs, whatever they hold; name: each by the end of its name"},
    {"input",  "field",        "",  STRING_(field),       0,       0, 0,     "text",
        "", "the string of each JSON line, or column of Parquet, that is the document"},
    {"input",  "separator",    "",  STRING_(separator),   0,       0, 0,     "",
        "", "what stands between the documents of a text file; empty: a file is one document"},

    {"shards", "shard-tokens", "",  COUNT_(shard_tokens), 1, 2147483647, 0, "100000000",
        "tokens", "in a shard"},
    {"shards", "val-tokens",   "",  COUNT_(val_tokens),   0,    1e15, AUTO_, "auto",
        "tokens", "from the beginning, for validation; auto: a shard, at most 1 per 100 bytes of input"},

    {"files",  "tokenizer",    "",  STRING_(tokenizer),   0,       0, 0,     "",
        "", "the vocabulary: tokenizer.json, merges.txt, .tiktoken, llm.c's .bin, or their directory"},
    {"files",  "out",          "o", STRING_(out),         0,       0, 0,     "tokens",
        "", "beginning of the names of all files that are written"},
    {"files",  "restart",      "",  FLAG_(restart),       0,       0, 0,     "off",
        "off|on", "remove the shards of an earlier run and begin again"},

    {"other",  "train-bpe",    "",  INT_(train_bpe),      0, 2097151, 0,     "0",
        "ids", "instead, make a vocabulary of this size from the inputs"},
    {"other",  "threads",      "",  INT_(threads),        0,    4096, 0,     "0",
        "threads", "that encode, besides one that reads and one that writes; 0: one for each core"},
    {"other",  "help",         "",  FLAG_(help),          0,       0, 0,     "off",
        "off|on", "print this, and stop"},
    {"other",  "version",      "",  FLAG_(version),       0,       0, 0,     "off",
        "off|on", "print the version, and stop"},
};
// clang-format on
#endif
