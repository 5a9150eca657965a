// fuzz_documents.c -- reads documents from random files: no crash, no read out of bounds, and the
// same documents or the same error for any block size (fuzz.sh). The first byte of the input
// selects the kind of file.
#define COMPRESSED_ZSTD_WINDOW 24 // 16 MiB: a file may choose its window
#define COMPRESSED_FILE_IMPLEMENTATION

#include "llmc/data/compressed_file.h"
#include "llmc/data/documents.h"

enum { MAX_BYTES = 1 << 20 }; // of text that are looked at: a small file may hold much

typedef struct {
    char* text; // each document, and an end
    size_t bytes;
    char error[ERROR_BYTES];
} ReadDocuments;

static void append(ReadDocuments* all, const TextBlock* block) {
    all->text = (char*)realloc(all->text, all->bytes + block->bytes + block->num_documents + 1);
    for (size_t i = 0, begin = 0; i <= block->num_documents; i++) {
        const size_t end = i < block->num_documents ? block->documents[i] : block->bytes;
        memcpy(all->text + all->bytes, block->text + begin, end - begin);
        all->bytes += end - begin;
        if (i < block->num_documents) {
            all->text[all->bytes++] = '\xFF';
        }
        begin = end;
    }
}

static void read_documents(const char* path, const char* separator, size_t block_bytes, ReadDocuments* all) {
    static Documents source;
    const TextOptions options = {TEXT_BY_NAME, "text", separator, block_bytes};
    TextBlock block;
    memset(all, 0, sizeof(*all));
    memset(&block, 0, sizeof(block));
    documents_open(&source, &options, &path, 1);
    int more = 1;
    while (all->bytes < MAX_BYTES && (more = documents_next(&source, &block)) > 0) {
        if (block.bytes == 0 ||
            (block.num_documents && block.documents[block.num_documents - 1] >= block.bytes)) {
            abort();
        }
        append(all, &block);
    }
    memcpy(all->error, more < 0 ? source.error : "", more < 0 ? sizeof(all->error) : 1);
    text_block_close(&block);
    documents_close(&source);
}

// Returns true if two errors are the same. If a file is damaged and also no text, the block size
// decides which error comes first.
static int is_same_error(const ReadDocuments* a, const ReadDocuments* b) {
    static const char no_text[] = "not text: byte ";
    return strcmp(a->error, b->error) == 0 ||
           (a->error[0] && b->error[0] && (strstr(a->error, no_text) || strstr(b->error, no_text)));
}

int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes);
int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes) {
    static const char* const endings[] = {"jsonl", "jsonl.gz", "jsonl.zst", "txt", "txt.gz", "txt.zst"};
    static char path[64];
    if (bytes == 0) {
        return 0;
    }
    snprintf(path, sizeof(path), "/tmp/llmc_fuzz_%d.%s", (int)getpid(), endings[data[0] % 6]);
    FILE* file = fopen(path, "wb");
    if (!file || fwrite(data + 1, 1, bytes - 1, file) != bytes - 1 || fclose(file) != 0) {
        perror(path);
        exit(EXIT_FAILURE);
    }
    const char* separator = data[0] & 64 ? "\n\n" : "";
    ReadDocuments small, large;
    read_documents(path, separator, 16, &small);
    read_documents(path, separator, TEXT_BLOCK_BYTES, &large);
    unlink(path);
    const size_t n = small.bytes < large.bytes ? small.bytes : large.bytes;
    const int is_whole = n < MAX_BYTES && !large.error[0];
    if ((n && memcmp(small.text, large.text, n) != 0) || (is_whole && small.bytes != large.bytes) ||
        (small.bytes < MAX_BYTES && large.bytes < MAX_BYTES && !is_same_error(&small, &large))) {
        abort();
    }
    free(small.text);
    free(large.text);
    return 0;
}
