/*
parquet_footer.h -- the footer of a Parquet file (parquet.h): finds the column in the schema, and
its pages in the row groups. Both are checked before anything is read.
*/
#ifndef LLMC_PARQUET_FOOTER_H
#define LLMC_PARQUET_FOOTER_H

#include <stdint.h>

#include "llmc/data/parquet.h"
#include "llmc/data/thrift.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { // parquet.thrift
    PARQUET_BYTE_ARRAY_ = 6,
    PARQUET_REQUIRED_ = 0,
    PARQUET_OPTIONAL_ = 1,
    PARQUET_PAGE_V1_ = 0,
    PARQUET_PAGE_DICTIONARY_ = 2,
    PARQUET_PAGE_V2_ = 3,
    PARQUET_NO_PAGE_ = -1,
    PARQUET_PLAIN_ = 0,
    PARQUET_PLAIN_DICTIONARY_ = 2,
    PARQUET_RLE_ = 3,
    PARQUET_DELTA_LENGTH_ = 6,
    PARQUET_DELTA_BYTES_ = 7,
    PARQUET_RLE_DICTIONARY_ = 8,
    PARQUET_UNCOMPRESSED_ = 0,
    PARQUET_SNAPPY_ = 1,
    PARQUET_GZIP_ = 2,
    PARQUET_ZSTD_ = 6,
};

const char* parquet_codec_name(int codec);

// Returns the Debian package that the program lacked when it was built and needs to read a codec,
// or NULL.
const char* parquet_codec_package(int codec);

// Sets the column chunks of p from a footer; `footer_at` is the end of the pages. Returns 0 with
// the reason in p->error.
int parquet_footer(Parquet* p, ThriftReader in, uint64_t footer_at);

#ifdef __cplusplus
}
#endif

#ifdef PARQUET_FOOTER_IMPLEMENTATION

#include <stdio.h>
#include <string.h>

#include "llmc/base/check.h"

// ---- codecs ----

const char* parquet_codec_name(int codec) {
    static const char* const names[] = {"UNCOMPRESSED", "SNAPPY", "GZIP", "LZO",
                                        "BROTLI",       "LZ4",    "ZSTD", "LZ4_RAW"};
    return 0 <= codec && codec < 8 ? names[codec] : "an unknown codec";
}

const char* parquet_codec_package(int codec) {
#ifndef HAVE_ZLIB
    if (codec == PARQUET_GZIP_) {
        return "zlib1g-dev";
    }
#endif
#ifndef HAVE_ZSTD
    if (codec == PARQUET_ZSTD_) {
        return "libzstd-dev";
    }
#endif
#ifndef HAVE_SNAPPY
    if (codec == PARQUET_SNAPPY_) {
        return "libsnappy-dev";
    }
#endif
    (void)codec;
    return NULL;
}

// ---- the footer ----

// Element of the schema; -1: absent.
typedef struct {
    ThriftReader name;
    int64_t type, repetition, children, converted;
    int logical;
} ParquetElement_;

static ParquetElement_ parquet_element_(ThriftReader* in) {
    ParquetElement_ element = {thrift_reader(in->at, 0), -1, -1, 0, -1, -1};
    int64_t* const numbers[] = {
        [1] = &element.type, [3] = &element.repetition, [5] = &element.children, &element.converted};
    ThriftField field = {0, 0};
    while (thrift_field(in, &field)) {
        if (field.id == 4) {
            element.name = thrift_string(in, field.type);
        } else if (field.id == 10 && field.type == THRIFT_STRUCT) {
            ThriftField logical = {0, 0}; // a union: the number of its field is the type
            while (thrift_field(in, &logical)) {
                element.logical = logical.id;
                thrift_skip(in, logical);
            }
        } else if (0 < field.id && field.id < 7 && numbers[field.id]) {
            *numbers[field.id] = thrift_number(in, field);
        } else {
            thrift_skip(in, field);
        }
    }
    if (element.children < 0 || element.children > INT32_MAX) {
        thrift_wrong(in, "a group in the schema has an impossible number of children");
    }
    return element;
}

// Returns the name of the type that prevents reading a column; NULL: it has strings. Byte arrays
// without a logical type come from old programs that meant strings.
static const char* parquet_other_type_(const ParquetElement_* element) {
    static const char* const names[] = {"BOOLEAN", "INT32",  "INT64",           "INT96",
                                        "FLOAT",   "DOUBLE", "annotated bytes", "FIXED_LEN_BYTE_ARRAY"};
    static const char* const logicals[] = {[5] = "DECIMAL", "DATE", "TIME", "TIMESTAMP", [15] = "FLOAT16"};
    const int64_t type = element->type, converted = element->converted; // 0 UTF8, 4 ENUM, 19 JSON
    const int logical = element->logical;                               // 1 STRING, 4 ENUM, 12 JSON
    return element->children > 0                                                                  ? "nested"
           : element->repetition != PARQUET_REQUIRED_ && element->repetition != PARQUET_OPTIONAL_ ? "repeated"
           : type == PARQUET_BYTE_ARRAY_ &&
                   (converted == -1 || converted == 0 || converted == 4 || converted == 19) &&
                   (logical == -1 || logical == 1 || logical == 4 || logical == 12)
               ? NULL
           : 0 <= logical && logical <= 15 && logicals[logical] ? logicals[logical]
           : 0 <= type && type < 8                              ? names[type]
                                                                : "of an unknown type";
}

typedef struct {
    int found;
    ParquetElement_ column; // the wanted one
    size_t leaf;            // its index among the columns of a row group
    char names[512];        // names of the readable columns, for errors
} ParquetSchema_;

static void parquet_column_(const Parquet* p, ParquetSchema_* schema, const ParquetElement_* element,
                            size_t leaf) {
    const size_t bytes = thrift_left(&element->name), used = strlen(schema->names);
    if (!schema->found && bytes == strlen(p->column) && memcmp(element->name.at, p->column, bytes) == 0) {
        schema->found = 1;
        schema->column = *element;
        schema->leaf = leaf;
    }
    if (!parquet_other_type_(element)) {
        snprintf(schema->names + used, sizeof(schema->names) - used, "%s%.*s", used ? ", " : "",
                 (int)(bytes < 64 ? bytes : 64), (const char*)element->name.at);
    }
}

// Reads the elements, depth first, each with the number of its children; the first is the root.
static void parquet_schema_(const Parquet* p, ThriftReader* in, ThriftField field, ParquetSchema_* schema) {
    const size_t count = thrift_list(in, field, THRIFT_STRUCT);
    uint64_t inside = 0; // elements left of a group at the top
    size_t leaves = 0;
    parquet_element_(in);
    for (size_t i = 1; i < count && !in->wrong; i++) {
        const ParquetElement_ element = parquet_element_(in);
        if (inside == 0) {
            parquet_column_(p, schema, &element, leaves);
        }
        inside += (uint64_t)element.children - (inside > 0);
        leaves += element.children == 0;
    }
    if (inside > 0) {
        thrift_wrong(in, "the schema ends inside of a group");
    }
}

static int parquet_check_column_(Parquet* p, const ParquetSchema_* schema) {
    const char* names = schema->names[0] ? schema->names : "none";
    const char* other = schema->found ? parquet_other_type_(&schema->column) : NULL;
    if (!schema->found || other) {
        return error_set(p->error, p->path, "%scolumn \"%.200s\"%s%s%s; its columns of text: %s",
                         schema->found ? "" : "no ", p->column, other ? " is " : "", other ? other : "",
                         other ? ", wanted text" : "", names);
    }
    p->may_be_null = schema->column.repetition == PARQUET_OPTIONAL_;
    return 1;
}

// Metadata of a column of a row group; -1: absent.
typedef struct {
    int64_t type, codec, values, bytes, data_at, dictionary_at;
    int elsewhere;  // in another file
    int other_name; // its name differs from the wanted column's
} ParquetMeta_;

// True if the names from the top to the column are only the wanted column.
static int parquet_is_path_(const Parquet* p, ThriftReader* in, ThriftField field) {
    const size_t count = thrift_list(in, field, THRIFT_STRING), length = strlen(p->column);
    int same = count == 1;
    for (size_t i = 0; i < count && !in->wrong; i++) {
        const ThriftReader name = thrift_string(in, THRIFT_STRING);
        same = same && thrift_left(&name) == length && memcmp(name.at, p->column, length) == 0;
    }
    return same;
}

static void parquet_meta_(const Parquet* p, ThriftReader* in, ParquetMeta_* meta) {
    int64_t* const numbers[12] = {[1] = &meta->type,  [4] = &meta->codec,   &meta->values,
                                  [7] = &meta->bytes, [9] = &meta->data_at, [11] = &meta->dictionary_at};
    ThriftField field = {0, 0};
    while (thrift_field(in, &field)) {
        if (field.id == 3) {
            meta->other_name = !parquet_is_path_(p, in, field);
        } else if (0 < field.id && field.id < 12 && numbers[field.id]) {
            *numbers[field.id] = thrift_number(in, field);
        } else {
            thrift_skip(in, field);
        }
    }
}

// Reads the columns of a row group.
static void parquet_metas_(const Parquet* p, ThriftReader* in, ThriftField field, size_t leaf,
                           ParquetMeta_* meta) {
    const size_t count = thrift_list(in, field, THRIFT_STRUCT);
    for (size_t i = 0; i < count && !in->wrong; i++) {
        ThriftField inner = {0, 0};
        while (thrift_field(in, &inner)) {
            if (i == leaf && inner.id == 3 && inner.type == THRIFT_STRUCT) {
                parquet_meta_(p, in, meta);
            } else {
                meta->elsewhere |= i == leaf && inner.id == 1;
                thrift_skip(in, inner);
            }
        }
    }
}

// Adds the column chunk of a row group, after checking it; `footer_at` is the end of the pages.
static int parquet_chunk_(Parquet* p, const ParquetMeta_* meta, uint64_t rows, uint64_t footer_at) {
    const size_t group = p->num_chunks;
    const uint64_t data_at = (uint64_t)meta->data_at, dictionary_at = (uint64_t)meta->dictionary_at;
    const uint64_t begin = meta->dictionary_at > 0 && dictionary_at < data_at ? dictionary_at : data_at;
    const char* package = parquet_codec_package((int)meta->codec);
    if (meta->elsewhere || meta->other_name || meta->type != PARQUET_BYTE_ARRAY_) {
        return error_set(p->error, p->path, "row group %zu: column \"%.200s\" %s", group, p->column,
                         meta->elsewhere    ? "is in another file"
                         : meta->other_name ? "has another name than in the schema"
                         : meta->type == -1 ? "has no metadata: encrypted or damaged"
                                            : "has another type than in the schema");
    }
    if (package) {
        return error_set(p->error, p->path,
                         "column \"%.200s\" is compressed by %s, and this program was built without it: "
                         "install %s and rebuild",
                         p->column, parquet_codec_name((int)meta->codec), package);
    }
    if (meta->codec != PARQUET_UNCOMPRESSED_ && meta->codec != PARQUET_SNAPPY_ &&
        meta->codec != PARQUET_GZIP_ && meta->codec != PARQUET_ZSTD_) {
        return error_set(
            p->error, p->path,
            "column \"%.200s\" is compressed by %s (%lld), wanted UNCOMPRESSED, SNAPPY, GZIP or ZSTD",
            p->column, parquet_codec_name((int)meta->codec), (long long)meta->codec);
    }
    if (meta->values < 0 || (uint64_t)meta->values != rows) {
        return error_set(p->error, p->path,
                         "row group %zu: %lld values, wanted one for each of its %llu rows", group,
                         (long long)meta->values, (unsigned long long)rows);
    }
    if (begin < 4 || begin > footer_at || meta->bytes < 0 || (uint64_t)meta->bytes > footer_at - begin) {
        return error_set(p->error, p->path,
                         "row group %zu: %lld bytes of pages at byte %llu, in a file of %llu: damaged", group,
                         (long long)meta->bytes, (unsigned long long)begin, (unsigned long long)p->bytes);
    }
    const ParquetChunk_ chunk = {rows, begin, begin + (uint64_t)meta->bytes, (int)meta->codec};
    p->chunks[p->num_chunks++] = chunk;
    p->rows += rows;
    return 1;
}

static int parquet_groups_(Parquet* p, ThriftReader* in, ThriftField field, size_t leaf, uint64_t footer_at) {
    const size_t count = thrift_list(in, field, THRIFT_STRUCT);
    p->chunks = (ParquetChunk_*)check_alloc(count, sizeof(ParquetChunk_), p->path);
    for (size_t i = 0; i < count && !in->wrong; i++) {
        ParquetMeta_ meta = {-1, -1, -1, -1, -1, -1, 0, 0};
        ThriftField inner = {0, 0};
        int64_t rows = -1;
        while (thrift_field(in, &inner)) {
            if (inner.id == 1) {
                parquet_metas_(p, in, inner, leaf, &meta);
            } else if (inner.id == 3) {
                rows = thrift_number(in, inner);
            } else {
                thrift_skip(in, inner);
            }
        }
        if (rows < 0 || rows > INT64_MAX / 2 - (int64_t)p->rows) {
            thrift_wrong(in, "a row group has an impossible number of rows");
        }
        if (!in->wrong && rows > 0 && !parquet_chunk_(p, &meta, (uint64_t)rows, footer_at)) {
            return 0;
        }
    }
    return 1;
}

int parquet_footer(Parquet* p, ThriftReader in, uint64_t footer_at) {
    ParquetSchema_ schema;
    ThriftField field = {0, 0};
    int64_t rows = -1;
    int seen_schema = 0;
    memset(&schema, 0, sizeof(schema));
    while (thrift_field(&in, &field)) {
        if (field.id == 2 && !seen_schema++) {
            parquet_schema_(p, &in, field, &schema);
            if (!in.wrong && !parquet_check_column_(p, &schema)) {
                return 0;
            }
        } else if (field.id == 3) {
            rows = thrift_number(&in, field);
        } else if (field.id == 4 && seen_schema && !p->chunks) {
            if (!parquet_groups_(p, &in, field, schema.leaf, footer_at)) {
                return 0;
            }
        } else {
            thrift_skip(&in, field);
        }
    }
    if (!in.wrong && (!seen_schema || !p->chunks)) {
        thrift_wrong(&in, "schema or row groups are missing");
    }
    if (in.wrong) {
        return error_set(p->error, p->path, "damaged footer: %s", in.wrong);
    }
    if (rows < 0 || (uint64_t)rows != p->rows) {
        return error_set(p->error, p->path, "damaged footer: %lld rows, but its row groups have %llu",
                         (long long)rows, (unsigned long long)p->rows);
    }
    return 1;
}

#endif // PARQUET_FOOTER_IMPLEMENTATION

#endif
