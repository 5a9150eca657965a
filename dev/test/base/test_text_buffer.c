// test_text_buffer.c -- text_buffer.h: text printed into memory is unchanged, and too little memory
// is an error.
#define TEXT_BUFFER_IMPLEMENTATION

#include <sys/resource.h>

#include "llmc/base/text_buffer.h"
#include "dev/test/lib/test.h"

static void print_lines(FILE* file, int count) {
    for (int i = 0; i < count; i++) {
        fprintf(file, "line %d of a text that is long enough to leave the buffer of its file\n", i);
    }
}

TEST(whole) {
    TextBuffer buffer;
    char line[128];
    size_t at = 0;
    text_buffer_open(&buffer, "a text");
    print_lines(buffer.file, 1000);
    EXPECT(fflush(buffer.file) == 0 && strlen(buffer.text) == buffer.bytes, "%zu bytes", buffer.bytes);
    fputc('\0', buffer.file);
    fputs("end", buffer.file);
    char* text = text_buffer_close(&buffer);
    for (int i = 0; i < 1000; i++) {
        at += (size_t)snprintf(line, sizeof(line),
                               "line %d of a text that is long enough to leave the buffer of its file\n", i);
        EXPECT(at < buffer.bytes && memcmp(text + at - strlen(line), line, strlen(line)) == 0, "line %d", i);
    }
    EXPECT(buffer.bytes == at + 4 && memcmp(text + at, "\0end", 5) == 0, "%zu bytes, wanted %zu",
           buffer.bytes, at + 4);
    free(text);
    text_buffer_open(&buffer, "nothing");
    text = text_buffer_close(&buffer);
    EXPECT(buffer.bytes == 0 && text[0] == '\0', "%zu bytes", buffer.bytes);
    free(text);
}

// Leaves a little of the address space, less than what is then printed.
static void body_too_long(const void* what) {
    const struct rlimit limit = {256 << 20, 256 << 20};
    TextBuffer buffer;
    text_buffer_open(&buffer, (const char*)what);
    setrlimit(RLIMIT_AS, &limit);
    print_lines(buffer.file, 5000000);
    free(text_buffer_close(&buffer));
}

#ifndef __SANITIZE_ADDRESS__ // whose shadow memory is larger than any such limit
TEST(too_long) {
    EXPECT(test_dies(body_too_long, "the page", 1, "error: the page: no memory for its text"), "");
}
#endif
