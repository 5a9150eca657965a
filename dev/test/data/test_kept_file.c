// test_kept_file.c -- predictions of a teacher in a file: rows are read back in any order; damaged
// files are refused.
#include "llmc/data/kept_file.h"
#include "llmc/base/check.h"
#include "dev/test/lib/test.h"

enum { T = 5, K = 3, ROWS = 4 };

static int id_of(int row, int i, int V) { return (row * 31 + i * 7) % V; }
static float log_prob_of(int row, int i) { return -0.125f * (float)(row + i); } // exact in fp16

// Writes rows of T tokens, of which the last has two.
static KeptHeader write_file(const char* path, int V) {
    KeptHeader header;
    FileWriter file;
    memset((void*)&header, 0, sizeof(header));
    header.k = K, header.V = (uint32_t)V, header.T = T, header.rows = ROWS, header.temperature = 2;
    header = kept_header(header);
    kept_file_create(&file, path, &header);
    for (int row = 0; row < ROWS; row++) {
        int ids[T * K];
        float log_probs[T * K];
        for (int i = 0; i < T * K; i++) {
            ids[i] = id_of(row, i, V), log_probs[i] = log_prob_of(row, i);
        }
        kept_file_put(&file, &header, ids, log_probs, row == ROWS - 1 ? 2 : T);
    }
    file_commit(&file);
    return header;
}

static void test_rows(int V) {
    const char* path = test_path("kept");
    char error[ERROR_BYTES];
    KeptFile file;
    const KeptHeader header = write_file(path, V);
    kept_file_open(&file, path);
    kept_file_check(&file, &header);
    for (int row = ROWS - 1; row >= 0; row--) {
        const int tokens = row == ROWS - 1 ? 2 : T - row % 2;
        int ids[T * K];
        float log_probs[T * K];
        EXPECT(kept_file_read(&file, (uint64_t)row, tokens, ids, log_probs, error), "%s", error);
        for (int i = 0; i < tokens * K; i++) {
            EXPECT(ids[i] == id_of(row, i, V) && log_probs[i] == log_prob_of(row, i),
                   "V %d, row %d, %d: %d, %g", V, row, i, ids[i], (double)log_probs[i]);
        }
    }
    kept_file_close(&file);
}

TEST(kept_rows) {
    test_rows(50);
    test_rows(100000);
}

// A token beyond the vocabulary is an error, not an index.
TEST(kept_damage) {
    const char* path = test_path("damaged");
    char error[ERROR_BYTES] = "";
    KeptFile file;
    int ids[T * K];
    float log_probs[T * K];
    write_file(path, 50);
    FILE* raw = fopen(path, "r+b");
    fseek(raw, sizeof(KeptHeader), SEEK_SET);
    fputc(0xFF, raw);
    fclose(raw);
    kept_file_open(&file, path);
    EXPECT(!kept_file_read(&file, 0, T, ids, log_probs, error) &&
               strstr(error, "token 255, wanted one below 50"),
           "%s", error);
    kept_file_close(&file);
}
