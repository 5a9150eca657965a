/*
documents.h -- the documents of many files, as a stream of blocks of text.

    Documents source;
    documents_open(&source, &options, paths, n);
    while ((more = documents_next(&source, &block)) > 0) { ... }
    CHECK(more == 0, "%s", source.error);

The name of a file decides its format, unless options.format sets one for all:

    plain      any other name         one document, or several between options.separator
    jsonl      .jsonl .ndjson         one document per line: the string options.field of an object,
                                      or the parts of an answered one
    parquet    .parquet               one document per row: the string column options.field

Text and JSON may be compressed, with .gz or .zst appended (compressed_file.h); "-" is standard
input. Documents without text are skipped, as are empty lines and fields that are null. With
TEXT_BY_NAME, names of tables, archives and the like are refused, and so is a plain file with a zero
byte in its first 64 KiB: text has none. UTF-8's byte-order mark at the start of a file is skipped,
with a note for the first; a file with UTF-16's is refused, except with TEXT_PLAIN.

A line without that string may have a prompt and its completion, or a chat (text_line.h). Such a
document has parts: the block has their texts in order, with a line feed between two, and a TextPart
for each. It is never cut.

A block has about options.block_bytes of text or, if it cannot be cut there, at most a few times
BPE_MAX_PIECE. `documents` are the offsets at which documents start, ascending; without one at 0,
the block continues the last document of the previous block. A document is cut only where
that changes no token (bpe_last_cut).

The start of a block is a TextPosition. A newly opened source can continue from it (documents_seek),
even with blocks of another size, and gives the same tokens.

Memory: two blocks, and with jsonl and separators the longest document (1 GiB at most).
*/
#ifndef LLMC_DOCUMENTS_H
#define LLMC_DOCUMENTS_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/base/byte_order_mark.h"
#include "llmc/base/check.h"
#include "llmc/base/enum_words.h"
#include "llmc/data/compressed_file.h"
#include "llmc/data/parquet.h"
#include "llmc/data/target_mask.h"
#include "llmc/data/text_line.h"
#include "llmc/tokenizer/bpe_split.h"
#include "llmc/tokenizer/chat_format.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    TEXT_BLOCK_BYTES = 1 << 20,
    TEXT_READ_BYTES_ = 1 << 18, // bytes of a file read at a time
    TEXT_MAX_RECORD_ = 1 << 30, // longest line, or text between two separators
    TEXT_LOOKED_AT_ = 1 << 16,  // first bytes of a plain file, which may not contain a zero
};

// --format of ./tokenize
// clang-format off
#define TEXT_FORMAT_WORDS(X) \
    X(TEXT_BY_NAME, "name") \
    X(TEXT_PLAIN, "text") \
    X(TEXT_JSONL, "jsonl") \
    X(TEXT_PARQUET, "parquet")
// clang-format on
typedef enum { TEXT_FORMAT_WORDS(WORDS_VALUE) } TextFormat;

typedef struct {
    TextFormat format;     // of all files
    const char* field;     // field of JSON objects; column of Parquet files
    const char* separator; // between documents of plain text; "": a file is one document
    size_t block_bytes;    // usually TEXT_BLOCK_BYTES
} TextOptions;

typedef struct {
    uint64_t file;     // index of the input
    uint64_t document; // line, row or part of the file, from 0
    uint64_t offset;   // bytes of this document before the position
} TextPosition;

// Text of a block that a message, a prompt or a completion is.
typedef struct {
    size_t begin, end;
    size_t document; // of the block, from 1: an empty part at its end belongs to no other
    ChatRole role;
} TextPart;

typedef struct {
    char* text; // (bytes) not terminated
    size_t bytes;
    size_t* documents; // (num_documents)
    size_t num_documents;
    TextPart* parts; // (num_parts) of the documents that have parts
    size_t num_parts;
    TextPosition start;
    uint64_t read_bytes; // bytes of all files, as stored on disk, up to the end of the block
    size_t text_room, documents_room, parts_room;
} TextBlock;

typedef struct {
    TextOptions options;
    const char* const* paths; // (num_files) borrowed, as are the strings of the options
    uint64_t num_files;
    uint64_t* file_bytes; // (num_files) size on disk; 0 for standard input
    // (num_files) 1 for standard input and whatever else can be read only once
    char* is_stream;
    uint64_t total_bytes;
    BpeRules rules;

    CompressedFile file; // paths[at.file], if is_open and not Parquet
    Parquet parquet;     // paths[at.file], if Parquet
    int is_open;
    TextFormat format; // of the open file
    // bytes of this file, decompressed, read so far; not for Parquet
    uint64_t text_bytes;
    char head[BYTE_ORDER_MARK_BYTES]; // first bytes, read ahead: the last head_bytes of them
    size_t head_bytes;                // are still to be taken
    int has_mark;                     // some file had a byte-order mark
    TextPosition at;                  // position of the next byte that goes into a block
    uint64_t records;                 // records of this file taken so far
    TextLine line;                    // last line of JSON
    char* record;                     // last line or part
    const char* document;             // rest of it
    size_t document_bytes;            // its length
    uint64_t read_before;             // bytes of the files before this one
    // window[begin .. end) of this file, from which records are cut
    char* window;
    size_t begin, end, window_room;
    char* carry; // start of the next block: the text after the last cut
    size_t carry_bytes, carry_room;
    char error[ERROR_BYTES];
} Documents;

// ---- memory ----

void text_block_close(TextBlock* block);

// ---- files ----

// True if the name of a file says that it is text in one of our formats; otherwise 0 with the
// error.
int documents_is_text(const char* path, char* error);

// True if the name of a file says that it is plain text, or text in fields (JSON lines, Parquet).
int documents_is_plain(const char* path);
int documents_has_fields(const char* path);

// Returns the answers in the first block of a file; ANSWERS_NONE if it is no JSON lines, or cannot
// be read.
Answers documents_answers(const char* path, const char* field);

// Returns the bytes of all files read or skipped so far, as stored on disk; for a Parquet file, its
// rows times their average.
uint64_t documents_read_bytes(const Documents* source);

// ---- blocks ----

// Sets the next block, which starts as zeroed memory and is reused. Returns 1, 0 if no text is
// left, -1 with source->error. text_block_close frees the block.
int documents_next(Documents* source, TextBlock* block);

// ---- the whole ----

// Opens the files. A missing one ends the program; later errors are returned.
void documents_open(Documents* source, const TextOptions* options, const char* const* paths,
                    uint64_t num_files);

// Lets documents be cut only where this pattern allows it; before, only where GPT-2's does.
void documents_set_pattern(Documents* source, BpePattern pattern);

// Opens each file that can be read twice and checks its start, so that unreadable or non-text files
// show before any work. Returns 0 with source->error if one is bad.
int documents_check(Documents* source);

// Moves to where a block of the same files started. Returns 0 with source->error if the file is
// shorter now.
int documents_seek(Documents* source, TextPosition position);

void documents_close(Documents* source);

#ifdef __cplusplus
}
#endif

#ifdef DOCUMENTS_IMPLEMENTATION

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/shell_word.h"

// ---- memory ----

void text_block_close(TextBlock* block) {
    free(block->text);
    free(block->documents);
    free(block->parts);
    memset(block, 0, sizeof(*block));
}

// ---- files ----

enum { TEXT_ENDING_BYTES_ = 16 };

// Sets `ending` to " .txt " for "a/B.TXT.gz", and to " " if the name has none.
static void text_ending_(const char* path, char ending[TEXT_ENDING_BYTES_]) {
    const size_t length = compressed_name_bytes(path);
    size_t at = length;
    while (at > 0 && path[at - 1] != '.' && path[at - 1] != '/') {
        at--;
    }
    const int is_one = at > 0 && path[at - 1] == '.' && length - at < TEXT_ENDING_BYTES_ - 4;
    snprintf(ending, TEXT_ENDING_BYTES_, is_one ? " .%.*s " : " ", (int)(length - at), path + at);
    for (char* c = ending; *c; c++) {
        *c = (char)tolower((unsigned char)*c);
    }
}

// Returns the format that a file's name implies; TEXT_BY_NAME with *advice if it is none of ours.
static TextFormat text_format_of_name_(const char* path, const char** advice) {
    static const struct {
        const char* endings;
        TextFormat format;
        const char* advice;
    } known[] = {
        {" .jsonl .ndjson ", TEXT_JSONL, NULL},
        {" .parquet ", TEXT_PARQUET, NULL},
        {" .json ", TEXT_BY_NAME,
         "name it .jsonl if each line is an object; `jq -c '.[]'` makes such lines of an array"},
        {" .csv .tsv .xls .xlsx .ods ", TEXT_BY_NAME, "a table; wanted .jsonl or .parquet, a document a row"},
        {" .gz .zst ", TEXT_BY_NAME, "compressed twice; wanted once"},
        {" .bz2 .xz .lz4 .br .zip .tar .tgz .7z .rar ", TEXT_BY_NAME, "an archive; unpack it first"},
        {" .pdf .ps .doc .docx .odt .rtf .epub ", TEXT_BY_NAME,
         "a document with layout; extract its text first (pdftotext, pandoc)"},
        {" .bin .npy .npz .pt .pth .pkl .h5 .hdf5 .arrow .feather .avro .orc .safetensors .gguf ",
         TEXT_BY_NAME, "binary data; wanted text, .jsonl or .parquet"},
    };
    char ending[TEXT_ENDING_BYTES_];
    text_ending_(path, ending);
    for (size_t i = 0; ending[1] && i < sizeof(known) / sizeof(known[0]); i++) {
        if (strstr(known[i].endings, ending)) {
            *advice = known[i].advice;
            return known[i].format;
        }
    }
    return TEXT_PLAIN;
}

int documents_is_text(const char* path, char* error) {
    const char* advice = "";
    return text_format_of_name_(path, &advice) != TEXT_BY_NAME ||
           error_set(error, path, "not text, by its name: %s", advice);
}

int documents_is_plain(const char* path) {
    const char* advice;
    return compressed_kind(path) == COMPRESSED_NOT && text_format_of_name_(path, &advice) == TEXT_PLAIN;
}

int documents_has_fields(const char* path) {
    const char* advice;
    const TextFormat format = text_format_of_name_(path, &advice);
    return format == TEXT_JSONL || format == TEXT_PARQUET;
}

// Sets the format of a file. Returns 0 with the error if its name is none of ours.
static int text_format_(Documents* source, const char* path, TextFormat* format) {
    const char* advice = "";
    *format =
        source->options.format == TEXT_BY_NAME ? text_format_of_name_(path, &advice) : source->options.format;
    return *format != TEXT_BY_NAME ||
           error_set(source->error, path, "not text, by its name: %s (./tokenize --format text takes all)",
                     advice);
}

// Reads the first bytes of a file that is not Parquet, to drop a byte-order mark.
static int text_read_head_(Documents* source) {
    CompressedFile* file = &source->file;
    size_t got, mark = 0;
    if (!compressed_read(file, source->head, sizeof(source->head), &got)) {
        return 0;
    }
    if (!byte_order_mark(file->path, source->head, got, &mark, source->error) &&
        source->options.format != TEXT_PLAIN) {
        return 0;
    }
    memmove(source->head + sizeof(source->head) - got, source->head, got);
    source->head_bytes = got - mark;
    source->text_bytes = mark;
    if (mark && !source->has_mark) {
        source->has_mark = 1;
        byte_order_mark_note(file->path);
    }
    return 1;
}

// Opens a file that is not Parquet.
static int text_open_packed_(Documents* source, const char* path) {
    const int is_open = compressed_open(&source->file, path, source->error);
    source->is_open = is_open && text_read_head_(source);
    if (is_open && !source->is_open) {
        compressed_close(&source->file);
    }
    return source->is_open;
}

static int text_open_file_(Documents* source) {
    const char* path = source->paths[source->at.file];
    source->records = source->text_bytes = source->head_bytes = 0;
    source->begin = source->end = 0;
    if (!text_format_(source, path, &source->format)) {
        return 0;
    }
    if (source->format != TEXT_PARQUET) {
        text_open_packed_(source, path);
    } else if (compressed_kind(path) != COMPRESSED_NOT) {
        error_set(source->error, path, "Parquet is already compressed inside, wanted the file unpacked");
    } else {
        source->is_open = parquet_open(&source->parquet, path, source->options.field);
        if (!source->is_open) {
            memcpy(source->error, source->parquet.error, sizeof(source->error));
        }
    }
    return source->is_open;
}

static void text_close_file_(Documents* source) {
    source->is_open = 0;
    if (source->format == TEXT_PARQUET) {
        parquet_close(&source->parquet);
    } else {
        compressed_close(&source->file);
    }
}

uint64_t documents_read_bytes(const Documents* source) {
    if (source->is_open && source->format == TEXT_PARQUET) {
        const double rows = (double)parquet_rows(&source->parquet);
        const double share = rows > 0 ? (double)source->records / rows : 0;
        return source->read_before + (uint64_t)(share * (double)source->file_bytes[source->at.file]);
    }
    return source->read_before + (source->is_open ? source->file.read_bytes : 0);
}

static void text_next_file_(Documents* source) {
    source->read_before +=
        source->is_stream[source->at.file] ? source->file.read_bytes : source->file_bytes[source->at.file];
    text_close_file_(source);
    source->at.file++;
    source->at.document = source->at.offset = 0;
}

// Takes bytes that were read when the file was opened.
static size_t text_take_head_(Documents* source, char* buffer, size_t bytes) {
    const size_t n = bytes < source->head_bytes ? bytes : source->head_bytes;
    memcpy(buffer, source->head + sizeof(source->head) - source->head_bytes, n);
    source->head_bytes -= n;
    return n;
}

// Reads from a file that is not Parquet. *got is 0 only at its end.
static int text_read_(Documents* source, char* buffer, size_t bytes, size_t* got) {
    const size_t head = text_take_head_(source, buffer, bytes);
    if (!compressed_read(&source->file, buffer + head, bytes - head, got)) {
        return 0;
    }
    *got += head;
    const uint64_t before = source->text_bytes;
    const size_t look = before + *got < TEXT_LOOKED_AT_ ? *got
                        : before < TEXT_LOOKED_AT_      ? (size_t)(TEXT_LOOKED_AT_ - before)
                                                        : 0;
    const char* zero = look ? (const char*)memchr(buffer, 0, look) : NULL;
    source->text_bytes += *got;
    return !zero || source->format != TEXT_PLAIN || source->options.format != TEXT_BY_NAME ||
           error_set(source->error, source->file.path,
                     "not text: byte %llu is zero; wanted UTF-8 (./tokenize --format text takes all)",
                     (unsigned long long)before + (unsigned long long)(zero - buffer));
}

// ---- records: lines, or the text between separators ----

static int text_has_records_(const Documents* source) {
    return source->format != TEXT_PLAIN || source->options.separator[0];
}

// Reads more of the file behind the window. Sets *got to 0 at the end of the file.
static int text_widen_(Documents* source, size_t* got) {
    if (source->begin > 0) {
        memmove(source->window, source->window + source->begin, source->end - source->begin);
        source->end -= source->begin;
        source->begin = 0;
    }
    source->window =
        (char*)check_reserve(source->window, &source->window_room, source->end + TEXT_READ_BYTES_, 1, "text");
    const size_t room = source->window_room - source->end;
    const int ok = text_read_(source, source->window + source->end, room, got);
    source->end += ok ? *got : 0;
    return ok;
}

// Takes the next row of a Parquet file, whose text may be null: 1, 0 at its end, -1 after an error.
static int text_row_(Documents* source) {
    const int more = parquet_next(&source->parquet, &source->document, &source->document_bytes);
    if (more < 0) {
        memcpy(source->error, source->parquet.error, sizeof(source->error));
    }
    source->records += more > 0;
    return more;
}

// Takes the next record off the window: 1, 0 at the end of the file, -1 after an error. The caller
// may change the record until the next one is taken.
static int text_cut_record_(Documents* source, char** record, size_t* bytes) {
    const char* delimiter = source->format == TEXT_PLAIN ? source->options.separator : "\n";
    const size_t delimiter_bytes = strlen(delimiter);
    source->window = (char*)check_reserve(source->window, &source->window_room, TEXT_READ_BYTES_, 1,
                                          "text"); // never NULL below
    for (size_t searched = 0, got;;) {
        const size_t there = source->end - source->begin, from = searched;
        char *first = source->window + source->begin, *found = NULL;
        if (there > from) {
            found = (char*)memmem(first + from, there - from, delimiter, delimiter_bytes);
        }
        if (!found && there > TEXT_MAX_RECORD_) {
            return error_set(source->error, source->file.path, "found no %s in %d bytes",
                             source->format == TEXT_PLAIN ? "separator" : "end of a line", TEXT_MAX_RECORD_) -
                   1;
        }
        searched = there < delimiter_bytes ? 0 : there - delimiter_bytes + 1;
        if (!found && !text_widen_(source, &got)) {
            return -1;
        }
        if (found || got == 0) {
            *record = source->window + source->begin;
            *bytes = found ? (size_t)(found - first) : there;
            source->begin += *bytes + (found ? delimiter_bytes : 0);
            source->records += found || there ? 1 : 0;
            return found || there;
        }
    }
}

// ---- documents ----

// Takes the document of a line, which may be without text. Returns -1 after an error.
static int text_json_document_(Documents* source, char* line, size_t bytes) {
    JsonReader reader = json_reader("", line, bytes, source->error);
    if (json_peek(&reader) < 0) {
        source->document_bytes = 0; // an empty line
        return 1;
    }
    source->line.field = source->options.field;
    if (!text_line_read(&source->line, &reader)) {
        char message[ERROR_BYTES];
        snprintf(message, sizeof(message), "%s", source->error);
        snprintf(source->error, sizeof(source->error), "%.*s:%llu%.1024s", PATH_MAX, source->file.path,
                 (unsigned long long)source->records, message);
        return -1;
    }
    source->document = source->line.text;
    source->document_bytes = source->line.bytes;
    return 1;
}

// Takes the next record of the open file, of any contents: 1, 0 at the end of the file, -1 after an
// error.
static int text_record_(Documents* source) {
    char* record = NULL;
    source->line.num_messages = 0;
    if (source->format == TEXT_PARQUET) {
        return text_row_(source);
    }
    const int more = text_cut_record_(source, &record, &source->document_bytes);
    source->document = source->record = record;
    return more;
}

// Takes the next record of the open file with its text.
static int text_parsed_(Documents* source) {
    const int more = text_record_(source);
    return more > 0 && source->format == TEXT_JSONL
               ? text_json_document_(source, source->record, source->document_bytes)
               : more;
}

// Takes the next document that has text: 1, 0 at the end of the file, -1 after an error.
static int text_document_(Documents* source) {
    int more;
    while ((more = text_parsed_(source)) > 0) {
        if (source->document_bytes > 0) {
            source->at.document = source->records - 1;
            source->at.offset = 0;
            return 1;
        }
    }
    source->document_bytes = 0;
    return more;
}

// Records that text of the document at source->at follows.
static void text_begin_(Documents* source, TextBlock* block) {
    const size_t n = block->num_documents;
    if (source->at.offset == 0) {
        block->documents =
            (size_t*)check_reserve(block->documents, &block->documents_room, n + 1, sizeof(size_t), "text");
        block->documents[block->num_documents++] = block->bytes;
    }
    if (block->bytes == 0) {
        block->start = source->at;
    }
}

// Appends up to `room` bytes of a file that is one document: 1, 0 at its end, -1 after an error.
static int text_append_plain_(Documents* source, TextBlock* block, size_t room) {
    size_t got;
    if (!text_read_(source, block->text + block->bytes, room, &got)) {
        return -1;
    }
    if (got > 0) {
        text_begin_(source, block);
        block->bytes += got;
        source->at.offset += got;
    }
    return got > 0;
}

// Appends a document that has parts.
static int text_append_parts_(Documents* source, TextBlock* block) {
    text_begin_(source, block);
    block->text = (char*)check_reserve(block->text, &block->text_room, block->bytes + source->document_bytes,
                                       1, "text");
    block->parts =
        (TextPart*)check_reserve(block->parts, &block->parts_room,
                                 block->num_parts + source->line.num_messages, sizeof(TextPart), "text");
    for (size_t i = 0; i < source->line.num_messages; i++) {
        const TextMessage* message = &source->line.messages[i];
        if (i > 0) {
            block->text[block->bytes++] = '\n';
        }
        block->parts[block->num_parts++] =
            (TextPart){block->bytes, block->bytes + message->bytes, block->num_documents, message->role};
        memcpy(block->text + block->bytes, message->text, message->bytes);
        block->bytes += message->bytes;
    }
    source->at.offset += source->document_bytes;
    source->document_bytes = 0;
    return 1;
}

// Appends up to `room` bytes of a file of records: 1, 0 at its end, -1 after an error.
static int text_append_record_(Documents* source, TextBlock* block, size_t room) {
    const int more = source->document_bytes > 0 ? 1 : text_document_(source);
    if (more <= 0) {
        return more;
    }
    if (source->line.num_messages > 0) {
        return text_append_parts_(source, block);
    }
    const size_t n = source->document_bytes < room ? source->document_bytes : room;
    text_begin_(source, block);
    memcpy(block->text + block->bytes, source->document, n);
    block->bytes += n;
    source->document += n;
    source->document_bytes -= n;
    source->at.offset += n;
    return 1;
}

// Appends up to `room` bytes of the next document: 1, 0 at the end of the last file, -1 after an
// error.
static int text_append_(Documents* source, TextBlock* block, size_t room) {
    block->text = (char*)check_reserve(block->text, &block->text_room, block->bytes + room, 1, "text");
    for (;;) {
        if (!source->is_open) {
            if (source->at.file == source->num_files) {
                return 0;
            }
            if (!text_open_file_(source)) {
                return -1;
            }
        }
        const int more = text_has_records_(source) ? text_append_record_(source, block, room)
                                                   : text_append_plain_(source, block, room);
        if (more != 0) {
            return more;
        }
        text_next_file_(source);
    }
}

// ---- blocks ----

// Starts a block with what the last cut left over.
static void text_begin_block_(Documents* source, TextBlock* block) {
    block->bytes = block->num_documents = block->num_parts = 0;
    if (source->carry_bytes > 0) {
        block->text = (char*)check_reserve(block->text, &block->text_room, source->carry_bytes, 1, "text");
        memcpy(block->text, source->carry, source->carry_bytes);
        block->bytes = source->carry_bytes;
        block->start = source->at;
        block->start.offset -= source->carry_bytes;
        source->carry_bytes = 0;
    }
}

// Cuts the last document of the block, if a cut is possible.
static int text_cut_block_(Documents* source, TextBlock* block) {
    const size_t begin = block->num_documents ? block->documents[block->num_documents - 1] : 0;
    const size_t n = bpe_last_cut(&source->rules, block->text + begin, block->bytes - begin);
    if (n > 0) {
        source->carry_bytes = block->bytes - (begin + n);
        source->carry =
            (char*)check_reserve(source->carry, &source->carry_room, source->carry_bytes, 1, "text");
        memcpy(source->carry, block->text + begin + n, source->carry_bytes);
        block->bytes = begin + n;
    }
    return n > 0;
}

// True if the text appended last may continue.
static int text_continues_(const Documents* source) {
    return source->is_open && (!text_has_records_(source) || source->document_bytes > 0);
}

int documents_next(Documents* source, TextBlock* block) {
    text_begin_block_(source, block);
    size_t wanted = source->options.block_bytes;
    for (int more = 1;;) {
        while (more > 0 && block->bytes < wanted) {
            more = text_append_(source, block, wanted - block->bytes);
        }
        block->read_bytes = documents_read_bytes(source);
        if (more < 0) {
            return -1;
        }
        if (more == 0) {
            return block->bytes > 0;
        }
        if (!text_continues_(source) || text_cut_block_(source, block)) {
            return 1;
        }
        wanted = 2 * block->bytes;
    }
}

// ---- the whole ----

// Returns the most common ending of text files in a directory, for a hint; "" if none is known to
// us.
static const char* text_usual_ending_(const char* directory) {
    static const char* const endings[] = {".txt",    ".md",        ".html",    ".tex",
                                          ".jsonl",  ".ndjson",    ".parquet", ".jsonl.gz",
                                          ".txt.gz", ".jsonl.zst", ".txt.zst"};
    enum { ENDINGS = sizeof(endings) / sizeof(endings[0]) };
    size_t counts[ENDINGS] = {0}, best = 0;
    struct dirent* entry;
    DIR* entries = opendir(directory);
    while (entries && (entry = readdir(entries))) {
        for (size_t i = 0; i < ENDINGS; i++) {
            counts[i] += file_ends_in(entry->d_name, endings[i]) ? 1 : 0;
            best = counts[i] > counts[best] ? i : best;
        }
    }
    if (entries) {
        closedir(entries);
    }
    return counts[best] ? endings[best] : "";
}

// Adds up the size of a file, which must exist before any work.
static void documents_measure_(Documents* source, uint64_t file) {
    const char* path = source->paths[file];
    struct stat info;
    TextFormat format;
    source->is_stream[file] = 1;
    if (strcmp(path, "-") == 0) {
        return;
    }
    CHECK(stat(path, &info) == 0, "%s: cannot open: %s", path, strerror(errno));
    CHECK(!S_ISDIR(info.st_mode), "%s: a directory, wanted files: %s/*%s", path, shell_word(path).text,
          text_usual_ending_(path));
    CHECK(text_format_(source, path, &format), "%s", source->error);
    CHECK(S_ISREG(info.st_mode) || format != TEXT_PARQUET, "%s: not a regular file, as Parquet has to be",
          path);
    source->is_stream[file] = !S_ISREG(info.st_mode);
    source->file_bytes[file] = S_ISREG(info.st_mode) ? (uint64_t)info.st_size : 0;
    source->total_bytes += source->file_bytes[file];
}

void documents_open(Documents* source, const TextOptions* options, const char* const* paths,
                    uint64_t num_files) {
    memset(source, 0, sizeof(*source));
    source->options = *options;
    source->paths = paths;
    source->num_files = num_files;
    source->file_bytes = (uint64_t*)check_alloc(num_files, sizeof(uint64_t), "sizes of files");
    source->is_stream = (char*)check_alloc(num_files, 1, "kinds of files");
    const BpePattern pattern = {BPE_GPT2, 0, 0, 0, 0};
    bpe_rules_open(&source->rules, pattern);
    for (uint64_t i = 0; i < num_files; i++) {
        documents_measure_(source, i);
    }
}

void documents_set_pattern(Documents* source, BpePattern pattern) {
    bpe_rules_close(&source->rules);
    bpe_rules_open(&source->rules, pattern);
}

int documents_check(Documents* source) {
    int ok = 1;
    for (uint64_t i = 0; ok && i < source->num_files; i++) {
        source->at.file = i;
        if (!source->is_stream[i] && (ok = text_open_file_(source))) {
            char beginning[4096];
            size_t got = 1;
            while (ok && got > 0 && source->format == TEXT_PLAIN && source->text_bytes < TEXT_LOOKED_AT_) {
                ok = text_read_(source, beginning, sizeof(beginning), &got);
            }
            text_close_file_(source);
        }
    }
    source->at.file = source->document_bytes = 0;
    return ok;
}

int documents_seek(Documents* source, TextPosition position) {
    for (uint64_t i = 0; i < position.file && i < source->num_files; i++) {
        source->read_before += source->file_bytes[i];
    }
    source->at = position;
    if (position.file >= source->num_files) {
        return 1;
    }
    if (!text_open_file_(source)) {
        return 0;
    }
    if (!text_has_records_(source)) {
        const size_t head =
            (size_t)(position.offset < source->head_bytes ? position.offset : source->head_bytes);
        source->head_bytes -= head;
        source->text_bytes += position.offset;
        return compressed_skip(&source->file, position.offset - head);
    }
    int more = 1;
    while (more > 0 && source->records < position.document) {
        more = text_record_(source);
    }
    more = more > 0 ? text_document_(source) : more;
    if (more == 0 || (more > 0 && source->document_bytes < position.offset)) {
        return error_set(source->error, source->paths[position.file], "document %llu has disappeared",
                         (unsigned long long)position.document);
    }
    if (more > 0) {
        source->document += position.offset;
        source->document_bytes -= position.offset;
        source->at = position;
    }
    return more > 0;
}

Answers documents_answers(const char* path, const char* field) {
    const TextOptions options = {TEXT_BY_NAME, field, "", TEXT_BLOCK_BYTES};
    const char* advice;
    struct stat info;
    Documents source;
    TextBlock block;
    Answers answers = ANSWERS_NONE;
    if (text_format_of_name_(path, &advice) != TEXT_JSONL || stat(path, &info) != 0 ||
        !S_ISREG(info.st_mode)) {
        return ANSWERS_NONE;
    }
    memset(&block, 0, sizeof(block));
    documents_open(&source, &options, &path, 1);
    source.has_mark = 1; // what there is to say is said when all is read
    documents_next(&source, &block);
    for (size_t i = 0; i < block.num_parts; i++) {
        const Answers one = block.parts[i].role < (int)CHAT_ROLES ? ANSWERS_CHATS : ANSWERS_PROMPTS;
        answers = one > answers ? one : answers;
    }
    documents_close(&source);
    text_block_close(&block);
    return answers;
}

void documents_close(Documents* source) {
    if (source->is_open) {
        text_close_file_(source);
    }
    bpe_rules_close(&source->rules);
    free(source->file_bytes);
    free(source->is_stream);
    text_line_close(&source->line);
    free(source->window);
    free(source->carry);
    memset(source, 0, sizeof(*source));
}

#endif // DOCUMENTS_IMPLEMENTATION

#endif
