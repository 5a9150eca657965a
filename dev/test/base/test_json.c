// test_json.c -- reading JSON: values of every kind, the limits of strings and numbers, and
// refusals.
#include "llmc/base/check.h"
#include "llmc/base/json.h"
#include "dev/test/lib/test.h"

static char memory[1024], error[ERROR_BYTES];

// A reader of a copy of the text, which ends where its memory ends.
static JsonReader read_text(const char* text) {
    const size_t bytes = strlen(text);
    error[0] = '\0';
    return json_reader("x", memcpy(memory + sizeof(memory) - bytes, text, bytes), bytes, error);
}

// Reads {"name":[numbers],...} to its end.
static int read_object(const char* text, double* sum) {
    JsonReader r = read_text(text);
    const char* key;
    double value;
    int more, item;
    *sum = 0;
    if (!json_take(&r, '{')) {
        return 0;
    }
    for (int n = 0; (more = json_member(&r, n ? JSON_NEXT : JSON_FIRST, &key)) > 0; n++) {
        if (!json_take(&r, '[')) {
            return 0;
        }
        for (int i = 0; (item = json_element(&r, i ? JSON_NEXT : JSON_FIRST)) > 0; i++) {
            if (!json_number(&r, &value)) {
                return 0;
            }
            *sum += value;
        }
        if (item < 0) {
            return 0;
        }
    }
    return more == 0 && json_end(&r);
}

TEST(containers) {
    double sum;
    EXPECT(read_object(" {\"a\" : [1, -2.5e1 ,0.125], \"b\":[]}\n", &sum), "%s", error);
    EXPECT(sum == -23.875, "sum %g", sum);
    EXPECT(read_object("{}", &sum), "%s", error);
    static const char* const bad[] = {"",
                                      "{",
                                      "{\"a\"}",
                                      "{\"a\":[}",
                                      "{\"a\":[1,]}",
                                      "{\"a\":[1 2]}",
                                      "{\"a\":[1],}",
                                      "{} {",
                                      "{\"a\":[01]}",
                                      "{\"a\":[1.]}",
                                      "{\"a\":[.5]}",
                                      "{\"a\":[+1]}",
                                      "{\"a\":[1e]}",
                                      "{a:[1]}",
                                      "{\"\":[1]}",
                                      "[]"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        EXPECT(!read_object(bad[i], &sum) && strncmp(error, "x: byte ", 8) == 0, "%s: taken, or \"%s\"",
               bad[i], error);
    }
}

TEST(strings) {
    static const struct {
        const char *text, *value;
        size_t length; // 0: refused
    } cases[] = {
        {"\"a\\n\\\"\\u00e9\\ud83d\\ude00\"", "a\n\"\xC3\xA9\xF0\x9F\x98\x80", 9},
        {"\"x\\u0000y\"", "x\0y", 3},
        {"\"\\ud83dz\"", "\xEF\xBF\xBDz", 4},
        {"\"\\ude00\\ud83d\"", "\xEF\xBF\xBD\xEF\xBF\xBD", 6},
        {"\"open", "", 0},
        {"\"\\q\"", "", 0},
        {"\"\\u12g4\"", "", 0},
        {"\"\\u12", "", 0},
        {"\"tab\there\"", "", 0},
        {"\"\xFF\"", "", 0},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char* value = "";
        size_t length = 0;
        JsonReader r = read_text(cases[i].text);
        const int ok = json_text(&r, &value, &length);
        EXPECT(ok == (cases[i].length > 0) && length == cases[i].length &&
                   memcmp(value, cases[i].value, length) == 0,
               "%s: ok %d, %zu bytes (%s)", cases[i].text, ok, length, error);
    }
    const char* value;
    JsonReader r = read_text("\"x\\u0000y\"");
    EXPECT(!json_string(&r, &value), "a C string with a zero");
    r = read_text("\"\\ud83d\"");
    EXPECT(!json_string(&r, &value), "a C string with half of a pair");
    r = read_text("\"\\udcff\"");
    EXPECT(!json_string(&r, &value), "a C string with a byte that is no character");
    r = read_text("\"\\udc41\"");
    EXPECT(!json_bytes(&r, &value), "a character is not written as a byte");
}

// Any bytes come back, in a text that is JSON.
TEST(bytes) {
    const char name[] = "a\xff/b\xc3\xa9\xed\xb3\xbf\xf0\"\\\n.txt";
    char *text = NULL, error_text[ERROR_BYTES];
    const char* value = "";
    size_t bytes = 0;
    FILE* file = open_memstream(&text, &bytes);
    json_print_bytes(file, name, strlen(name));
    fclose(file);
    EXPECT(strstr(text, "a\\udcff/b\xc3\xa9\\udced\\udcb3\\udcbf\\udcf0"), "%s", text);
    JsonReader r = json_reader("text", text, bytes, error_text);
    EXPECT(json_bytes(&r, &value) && json_end(&r) && strcmp(value, name) == 0, "%s", value);
    free(text);
}

TEST(scalars) {
    size_t natural;
    double number;
    int truth;
    JsonReader r = read_text("18446744073709551615");
    EXPECT(json_natural(&r, &natural) && natural == SIZE_MAX, "%s", error);
    r = read_text("18446744073709551616");
    EXPECT(!json_natural(&r, &natural), "a number above 64 bits");
    r = read_text("-1");
    EXPECT(!json_natural(&r, &natural), "a negative natural number");
    r = read_text("1234567890123456789012345678901234567890123456789012345678901234567890");
    EXPECT(!json_number(&r, &number), "a number of 70 digits");
    r = read_text(" true");
    EXPECT(json_bool(&r, &truth) && truth == 1, "%s", error);
    r = read_text("false");
    EXPECT(json_bool(&r, &truth) && truth == 0, "%s", error);
    r = read_text("tru");
    EXPECT(!json_bool(&r, &truth), "half a word");
}

TEST(skip) {
    JsonReader r = read_text("{\"a\":[1,{\"b\":null}],\"c\":\"\\u00e9\"} 7");
    double number;
    EXPECT(json_skip(&r) && json_number(&r, &number) && number == 7, "%s", error);
    enum { MOST = 1 << 18 };
    char* deep = (char*)malloc(MOST + 2);
    memset(deep, '[', JSON_MAX_DEPTH);
    memset(deep + JSON_MAX_DEPTH, ']', JSON_MAX_DEPTH);
    r = json_reader("deep", deep, 2 * JSON_MAX_DEPTH, error);
    EXPECT(json_skip(&r) && json_end(&r), "%s", error);
    memset(deep, '[', MOST);
    r = json_reader("deep", deep, MOST, error);
    EXPECT(!json_skip(&r) && strstr(error, "less deep"), "%s", error);
    free(deep);
    static const char* const wrong[] = {"[1,]",         "{\"a\":1,}", "[1 2]", "[}",        "{]", "[[]",
                                        "[{\"a\":[}]]", "{1:2}",      "[,1]",  "{\"a\" 1}", "",   "]"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        r = read_text(wrong[i]);
        EXPECT(!json_skip(&r), "%s", wrong[i]);
    }
    r = read_text("[ ] [{\"a\":[{}, [[ ]],{\"\":{\"b\":[]}} ]} , 1] x");
    EXPECT(json_skip(&r) && json_skip(&r) && json_peek(&r) == 'x', "%s", error);
}
