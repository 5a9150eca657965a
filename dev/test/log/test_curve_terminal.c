// test_curve_terminal.c -- curve_terminal.h: size, axes, line, marks and floor of the drawing, in
// UTF-8 and ASCII, and degenerate curves.
#define CURVE_TERMINAL_IMPLEMENTATION

#include "llmc/log/curve_terminal.h"
#include "dev/test/lib/test.h"

enum { COLUMNS = 79, ROWS = 20, STEPS = 1000 };

static CurvePoint train[STEPS], val[5];

// A drawing as text; static, for one caller at a time.
static char* draw(int n_train, int n_val, double floor) {
    static char text[1 << 16];
    FILE* file = fopen(test_path("curve"), "w+");
    curve_draw(file, (Curve){train, val, n_train, n_val, floor}, COLUMNS, ROWS);
    rewind(file);
    text[fread(text, 1, sizeof(text) - 1, file)] = '\0';
    fclose(file);
    return text;
}

// From `high` at step 1 down towards `low`.
static void fill(double high, double low) {
    for (int i = 0; i < STEPS; i++) {
        train[i].step = i + 1;
        train[i].loss = low + (high - low) * exp(-i / 150.0);
    }
    for (int i = 0; i < 5; i++) {
        val[i].step = 250 * i;
        val[i].loss = low + (high - low) * exp(-val[i].step / 150);
    }
}

// The cells of a drawing as code points, row by row, 0 beyond the end of a line. Returns the number
// of rows.
static int decode(const char* text, int cells[ROWS + 2][COLUMNS + 1]) {
    int row = 0, column = 0;
    memset(cells, 0, sizeof(int) * (ROWS + 2) * (COLUMNS + 1));
    for (const unsigned char* s = (const unsigned char*)text; *s; s++) {
        int code = *s;
        if (code >= 0x80) {
            EXPECT((s[0] & 0xF0) == 0xE0 && (s[1] & 0xC0) == 0x80 && (s[2] & 0xC0) == 0x80, "invalid UTF-8");
            code = (s[0] & 15) << 12 | (s[1] & 63) << 6 | (s[2] & 63);
            s += 2;
        }
        if (code == '\n') {
            row++;
            column = 0;
        } else if (row < ROWS + 2 && column <= COLUMNS) {
            cells[row][column++] = code;
        }
    }
    return row;
}

static int count_lines(const char* text) {
    int n = 0;
    for (; *text; text++) {
        n += *text == '\n';
    }
    return n;
}

// Returns true if a cell has a part of the curve.
static int is_drawn(int code) { return code == 'o' || code > 0x2800 || (code && strchr("'.:", code)); }

static void test_shape(const char* locale, int is_utf8) {
    int cells[ROWS + 2][COLUMNS + 1];
    setenv("LC_ALL", locale, 1);
    fill(6, 1.2);
    const char* text = draw(STEPS, 5, 1.1);
    const int rows = decode(text, cells);
    EXPECT(rows == ROWS, "%s: %d rows, wanted %d", locale, rows, ROWS);
    int marks = 0, beyond = 0, top[2] = {0}, column[2] = {10, 70};
    for (int row = 0; row < rows; row++) {
        beyond |= cells[row][COLUMNS];
        for (int c = 9; row > 0 && c < COLUMNS && row < ROWS - 2; c++) {
            // not those of "floor"
            marks += cells[row][c] == 'o' && (c == 9 || cells[row][c - 1] != 'l');
            EXPECT(is_utf8 || cells[row][c] < 128, "%s: U+%04X is not ASCII", locale, cells[row][c]);
        }
        for (int side = 0; side < 2; side++) {
            top[side] = !top[side] && is_drawn(cells[row][column[side]]) ? row : top[side];
        }
    }
    EXPECT(!beyond, "%s: wider than %d columns", locale, COLUMNS);
    EXPECT(marks - 1 == 5, "%s: %d marks, wanted 5", locale, marks - 1); // "floor" has one more o
    EXPECT(top[0] == 1 || top[0] == 2, "%s: the curve starts in row %d", locale, top[0]);
    EXPECT(top[1] >= ROWS - 6 && top[1] < ROWS - 3, "%s: the curve ends in row %d", locale, top[1]);
    EXPECT(strstr(text, " floor 1.1000 "), "%s: the floor has its value", locale);
    EXPECT((cells[1][8] == '|' || cells[1][8] == '+') == !is_utf8, "%s: the axis", locale);
    const char* const labels[] = {"\n      5 ", "\n      2 ", " 0 ", " 200 ", " 1000\n", "validation"};
    for (int i = 0; i < 6; i++) {
        EXPECT(strstr(text, labels[i]), "%s: no label \"%s\" in\n%s", locale, labels[i], text);
    }
}

// Each loss lands in its row: between the labels above and below it.
TEST(scale) {
    CurvePlot plot;
    memset(&plot, 0, sizeof(plot));
    plot.rows = 16;
    plot.columns = 50;
    plot.loss = (Axis){1, 16, 1};
    plot.step = (Axis){0, 100, 0};
    EXPECT(curve_y_(&plot, 16) == 0 && curve_y_(&plot, 1) == 63, "the ends");
    EXPECT(curve_y_(&plot, 4) == 32 && curve_y_(&plot, 2) == 47, "the axis is logarithmic");
    EXPECT(curve_y_(&plot, 0) == 63 && curve_y_(&plot, 100) == 0, "outside of the range");
    EXPECT(curve_x_(&plot, 0) == 0 && curve_x_(&plot, 100) == 99 && curve_x_(&plot, 50) == 50, "steps");
    plot.step = (Axis){1e-4, 1e-1, 1};
    EXPECT(curve_x_(&plot, 1e-4) == 0 && curve_x_(&plot, 1e-3) == 33 && curve_x_(&plot, 1e-1) == 99, "rates");
}

// The labels of an axis, from the top.
static const char* labels_of(double high, double low) {
    static char text[256];
    double labels[17];
    CurvePlot plot;
    memset(&plot, 0, sizeof(plot));
    plot.rows = 17;
    plot.loss = (Axis){low, high, 1};
    plot.labels = labels;
    curve_labels_(&plot);
    size_t used = 0;
    text[0] = '\0';
    for (int row = 0; row < plot.rows; row++) {
        used +=
            isnan(labels[row]) ? 0 : (size_t)snprintf(text + used, sizeof(text) - used, "%.4g ", labels[row]);
    }
    return text;
}

// Round numbers that somebody would choose, at even distances.
TEST(labels) {
    static const struct {
        double high, low;
        const char* wanted;
    } cases[] = {{7.1, 5.15, "7 6.5 6 5.5 "},  {10.9, 3.1, "10 8 7 6 5 4 "},
                 {6.05, 0.9, "5 4 3 2 1 "},    {3.46, 3.26, "3.45 3.4 3.35 3.3 "},
                 {250, 0.3, "200 100 50 20 "}, {1.1, 0.02, "1 0.5 0.3 0.2 0.1 0.05 0.03 0.02 "}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char* text = labels_of(cases[i].high, cases[i].low);
        EXPECT(strncmp(text, cases[i].wanted, strlen(cases[i].wanted)) == 0, "from %g to %g: %s",
               cases[i].high, cases[i].low, text);
    }
}

// The dots of one cell as the character printed.
static const char* cell(int dots) {
    static char text[8];
    unsigned char byte = (unsigned char)dots;
    char mark = 0;
    CurvePlot plot;
    memset(&plot, 0, sizeof(plot));
    plot.rows = plot.columns = plot.is_utf8 = 1;
    plot.floor = NAN;
    plot.dots = &byte;
    plot.marks = &mark;
    FILE* file = fopen(test_path("cell"), "w+");
    curve_print_cell_(file, &plot, 0, 0);
    rewind(file);
    text[fread(text, 1, sizeof(text) - 1, file)] = '\0';
    fclose(file);
    return text;
}

// Every dot goes where Unicode has it: U+2801 is the upper left one.
TEST(braille) {
    const char* const dots[8] = {"⠁", "⠂", "⠄", "⡀", "⠈", "⠐", "⠠", "⢀"};
    unsigned char bits[1] = {0};
    CurvePlot plot;
    memset(&plot, 0, sizeof(plot));
    plot.rows = plot.columns = 1;
    plot.dots = bits;
    for (int i = 0; i < 8; i++) {
        bits[0] = 0;
        curve_line_(&plot, i / 4, i % 4, i / 4, i % 4);
        EXPECT(strcmp(cell(bits[0]), dots[i]) == 0, "dot (%d, %d) is %s", i / 4, i % 4, cell(bits[0]));
    }
    EXPECT(strcmp(cell(0xFF), "⣿") == 0 && strcmp(cell(0), " ") == 0, "all dots, no dots");
    bits[0] = 0;
    curve_line_(&plot, 0, 3, 1, 0);
    EXPECT((bits[0] & 0x18) == 0x18, "a line has its ends: %02x", bits[0]);
}

TEST(average) {
    setenv("LC_ALL", "C", 1);
    // noise that averages to 3, and two far points that fix the range
    for (int i = 0; i < STEPS; i++) {
        train[i].step = i + 1;
        train[i].loss = i == 0 ? 9 : i == STEPS - 1 ? 1 : i % 2 ? 3.5 : 2.5;
    }
    int cells[ROWS + 2][COLUMNS + 1], rows_drawn = 0;
    decode(draw(STEPS, 0, NAN), cells);
    for (int row = 1; row < ROWS - 2; row++) {
        int drawn = 0;
        for (int c = 12; c < 68; c++) {
            drawn |= is_drawn(cells[row][c]);
        }
        rows_drawn += drawn;
    }
    EXPECT(rows_drawn <= 2, "noise is averaged: %d rows, wanted 1 or 2", rows_drawn);
}

TEST(degenerate) {
    const double losses[] = {0, 1e-30, 3, 1e30};
    EXPECT(draw(0, 5, 1.1)[0] == '\0', "nothing to draw");
    for (int i = 0; i < 4; i++) {
        for (int n = 1; n <= 3; n++) {
            fill(losses[i], losses[i]);
            EXPECT(count_lines(draw(n, 5, NAN)) == ROWS, "%d points of loss %g", n, losses[i]);
            EXPECT(count_lines(draw(n, 0, losses[i])) == ROWS, "%d points of loss %g", n, losses[i]);
        }
    }
    fill(0.5, 0);
    EXPECT(count_lines(draw(STEPS, 5, 0)) == ROWS, "down to 0");
    EXPECT(!strstr(draw(STEPS, 5, NAN), "floor"), "no floor");
}

TEST(locale) {
    const char *const utf8[] = {"en_US.UTF-8", "C.utf8", "de_DE.UTF-8@euro"}, *const other[] = {
                                                                                  "C", "en_US.ISO-8859-1"};
    for (int i = 0; i < 3; i++) {
        setenv("LC_ALL", utf8[i], 1);
        EXPECT(curve_is_utf8_(), "%s", utf8[i]);
    }
    for (int i = 0; i < 2; i++) {
        setenv("LC_ALL", other[i], 1);
        EXPECT(!curve_is_utf8_(), "%s", other[i]);
    }
    setenv("LC_ALL", "", 1);
    unsetenv("LC_CTYPE");
    setenv("LANG", "C.UTF-8", 1);
    EXPECT(curve_is_utf8_(), "an empty variable is passed over");
    unsetenv("LANG");
    EXPECT(!curve_is_utf8_(), "nothing is set");
}

TEST(shape) {
    test_shape("C", 0);
    test_shape("C.UTF-8", 1);
}
