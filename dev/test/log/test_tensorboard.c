// test_tensorboard.c -- tensorboard.h: the file is a sequence of records with correct checksums,
// and their events have the fields of TensorBoard's Event. (test_report.sh runs TensorBoard's
// reader, if installed.)
#define TENSORBOARD_IMPLEMENTATION

#include "llmc/log/tensorboard.h"
#include "dev/test/lib/test.h"

// The checksum of the Castagnoli polynomial's usual example, masked.
TEST(checksum) {
    const uint32_t crc = 0xE3069283;
    EXPECT(tensorboard_crc_((const unsigned char*)"123456789", 9) == (crc >> 15 | crc << 17) + 0xA282EAD8,
           "");
}

// The records of a file, each as its data. Returns how many.
static int records(const TestFile* file, const unsigned char** data, size_t* bytes, int max) {
    int n = 0;
    for (size_t at = 0; at < file->bytes && n < max; n++) {
        uint64_t length;
        uint32_t head_crc, crc;
        memcpy(&length, file->data + at, 8);
        memcpy(&head_crc, file->data + at + 8, 4);
        EXPECT(head_crc == tensorboard_crc_(file->data + at, 8), "record %d", n);
        EXPECT(at + 16 + length <= file->bytes, "record %d", n);
        data[n] = file->data + at + 12;
        bytes[n] = length;
        memcpy(&crc, data[n] + length, 4);
        EXPECT(crc == tensorboard_crc_(data[n], length), "record %d", n);
        at += 16 + length;
    }
    return n;
}

// Compares what follows the time, field 1, which takes nine bytes.
static void expect_event(const unsigned char* data, size_t bytes, const char* wanted, size_t wanted_bytes) {
    EXPECT(data[0] == 0x09 && bytes == 9 + wanted_bytes, "%zu bytes, wanted %zu", bytes, 9 + wanted_bytes);
    EXPECT(bytes == 9 + wanted_bytes && memcmp(data + 9, wanted, wanted_bytes) == 0, "event of %zu bytes",
           bytes);
}
#define EXPECT_EVENT(i, wanted) expect_event(data[i], bytes[i], wanted, sizeof(wanted) - 1)

TEST(events) {
    TensorBoard board;
    const unsigned char* data[8];
    size_t bytes[8];
    char path[PATH_MAX];
    tensorboard_open(&board, test_path("board"), 299);
    tensorboard_scalar(&board, "outside", 1); // of any event
    tensorboard_begin(&board, 300);
    tensorboard_scalar(&board, "a/b", 1);
    tensorboard_scalar(&board, "c", -2);
    tensorboard_end(&board);
    tensorboard_begin(&board, 301);
    tensorboard_end(&board); // empty
    tensorboard_end(&board);
    tensorboard_begin(&board, 2);
    // the first and the last byte are no characters
    tensorboard_text(&board, "t", "\x9e\0\xc3\xa9\xc3", 5);
    tensorboard_end(&board);
    strcpy(path, board.path);
    tensorboard_close(&board);
    TestFile file = test_read(path);
    EXPECT(records(&file, data, bytes, 8) == 4, "");
    EXPECT_EVENT(0, "\x10\x00\x1a\x0d"
                    "brain.Event:2");
    EXPECT_EVENT(1, "\x10\xac\x02\x3a\x02\x08\x01"); // session_log {status: START} at step 300
    EXPECT_EVENT(2, "\x10\xac\x02\x2a\x16"           // summary
                    "\x0a\x0a\x0a\x03"
                    "a/b"
                    "\x15\x00\x00\x80\x3f"
                    "\x0a\x08\x0a\x01"
                    "c"
                    "\x15\x00\x00\x00\xc0");
    EXPECT_EVENT(3, "\x10\x02\x2a\x20"
                    "\x0a\x1e\x0a\x01"
                    "t"
                    "\x42\x0f\x08\x07\x12\x00\x42\x09"
                    "\xef\xbf\xbd\0\xc3\xa9\xef\xbf\xbd"
                    "\x4a\x08\x0a\x06\x0a\x04"
                    "text");
    free(file.data);
}
