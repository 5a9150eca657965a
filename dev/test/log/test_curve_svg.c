// test_curve_svg.c -- curve_svg.h: the picture is well-formed XML, and points and labels are in the
// right places. Curves of one point, of equal losses, of NaN or infinity are drawn without a number
// that is not finite.
#define CURVE_SVG_IMPLEMENTATION

#include "llmc/log/curve_svg.h"
#include "dev/test/lib/test.h"

enum { POINTS = 512, VALS = 16 };

static CurvePoint train[POINTS], val[VALS];

// A picture as text; static, for one caller at a time.
static const char* draw(int n_train, int n_val, double floor) {
    static char text[1 << 16];
    FILE* file = fopen(test_path("svg"), "w+");
    curve_svg(file, (Curve){train, val, n_train, n_val, floor});
    rewind(file);
    text[fread(text, 1, sizeof(text) - 1, file)] = '\0';
    fclose(file);
    return text;
}

// From `high` at step 1 down towards `low`.
static void fill(double high, double low) {
    for (int i = 0; i < POINTS; i++) {
        train[i].step = 4 * i + 1;
        train[i].loss = low + (high - low) * exp(-i / 60.0);
    }
    for (int i = 0; i < VALS; i++) {
        val[i].step = 128 * i;
        val[i].loss = low + (high - low) * exp(-32 * i / 60.0);
    }
}

static int count_of(const char* text, const char* word) {
    int n = 0;
    for (; (text = strstr(text, word)); text += strlen(word)) {
        n++;
    }
    return n;
}

// The end of the attributes of a tag, ">" or "/>"; NULL if one of them is not name="value".
static const char* attributes_end(const char* s) {
    while (*s == ' ') {
        s += strspn(s, " ");
        const size_t name = strspn(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-0123456789");
        if (name == 0 || s[name] != '=' || s[name + 1] != '"') {
            return NULL;
        }
        s += name + 2;
        s += strcspn(s, "\"<&");
        if (*s++ != '"') {
            return NULL;
        }
    }
    return *s == '>' || (*s == '/' && s[1] == '>') ? s : NULL;
}

// Is a text one element, with everything in it closed in order?
static int is_xml(const char* s) {
    char open[8][16];
    int depth = 0, roots = 0;
    for (; *s; s += strcspn(s, "<&")) {
        if (*s == '&' || (*s != '<' && depth == 0)) {
            return 0;
        }
        const int is_end = s[1] == '/';
        s += 1 + is_end;
        const size_t length = strcspn(s, " />");
        char name[16];
        snprintf(name, sizeof(name), "%.*s", (int)length, s);
        s = attributes_end(s + length);
        if (!s || length == 0 || length >= sizeof(name)) {
            return 0;
        }
        if (is_end) {
            if (depth == 0 || strcmp(open[--depth], name) != 0) {
                return 0;
            }
        } else if (*s != '/') {
            if (depth == 8) {
                return 0;
            }
            roots += depth == 0;
            strcpy(open[depth++], name);
        }
        s += *s == '/' ? 2 : 1;
        if (depth == 0) {
            return roots == 1 && strcmp(s, "\n") == 0;
        }
    }
    return 0;
}

static int is_picture(const char* text) {
    return is_xml(text) && !strstr(text, "nan") && !strstr(text, "inf") && strncmp(text, "<svg ", 5) == 0;
}

TEST(xml) {
    EXPECT(is_xml("<a b=\"c\"><d/>e</a>\n"), "the checker takes XML");
    const char* const bad[] = {"", "<a>", "<a></b>\n", "<a b=c></a>\n", "<a>&</a>\n", "<a></a><b></b>\n"};
    for (int i = 0; i < 6; i++) {
        EXPECT(!is_xml(bad[i]), "the checker refuses %s", bad[i]);
    }
}

TEST(a_run) {
    fill(6, 1.2);
    const char* text = draw(POINTS, VALS, 1.1);
    EXPECT(is_picture(text), "%s", text);
    EXPECT(strlen(text) < 30000, "%zu bytes", strlen(text));
    EXPECT(count_of(text, "<circle") == VALS + 1, "a dot for each validation, and one in the legend");
    EXPECT(count_of(strstr(text, "points=\""), ",") == POINTS, "a line through all points");
    const char* const labels[] = {">5<", ">2<", ">0<", ">500<", ">2000<", ">step<", "floor 1.1000"};
    for (int i = 0; i < 7; i++) {
        EXPECT(strstr(text, labels[i]), "no label %s in\n%s", labels[i], text);
    }
    EXPECT(!strstr(draw(POINTS, 0, NAN), "floor"), "no floor");
    EXPECT(!strstr(draw(POINTS, 0, NAN), "validation"), "no validation");
}

TEST(most_points) {
    static CurvePoint many[POINTS];
    for (int i = 0; i < POINTS; i++) {
        many[i].step = 1e9 * (i + 1);
        many[i].loss = 10 - i / 100.0;
    }
    FILE* file = fopen(test_path("many"), "w+");
    curve_svg(file, (Curve){many, many, POINTS, POINTS, 1});
    EXPECT(ftell(file) < 40000, "%ld bytes", ftell(file));
    fclose(file);
}

// Where a point is drawn: the first of the line.
static void first_point(const char* text, double* x, double* y) {
    const char* points = strstr(text, "points=\"");
    *x = *y = NAN;
    EXPECT(points && sscanf(points, "points=\"%lf,%lf", x, y) == 2, "no point in\n%s", text);
}

TEST(places) {
    const SvgRange_ range = {{0, 100, 0}, {1, 16, 1}};
    EXPECT_NEAR(svg_x_(&range, 0), SVG_LEFT_, 1e-9, "step 0");
    EXPECT_NEAR(svg_x_(&range, 100), SVG_RIGHT_, 1e-9, "the last step");
    EXPECT_NEAR(svg_y_(&range, 1), SVG_BOTTOM_, 1e-9, "the lowest loss");
    EXPECT_NEAR(svg_y_(&range, 16), SVG_TOP_, 1e-9, "the highest loss");
    EXPECT_NEAR(svg_y_(&range, 4), (SVG_TOP_ + SVG_BOTTOM_) / 2.0, 1e-9, "the axis is logarithmic");
    EXPECT_NEAR(svg_y_(&range, 0), SVG_BOTTOM_, 1e-9, "below the range");

    // a resumed run whose first steps are lost: the line starts at step 51 of 100
    for (int i = 0; i < 50; i++) {
        train[i].step = 51 + i;
        train[i].loss = 2;
    }
    double x, y;
    first_point(draw(50, 0, NAN), &x, &y);
    EXPECT_NEAR(x, SVG_LEFT_ + .51 * (SVG_RIGHT_ - SVG_LEFT_), 0.06, "step 51 of 100");
    EXPECT_NEAR(y, (SVG_TOP_ + SVG_BOTTOM_) / 2.0, 0.06, "equal losses are in the middle");
}

TEST(degenerate) {
    const double losses[] = {0, 1e-30, 3, 1e30, 1.7e308};
    EXPECT(!draw(0, VALS, 1.1)[0], "nothing to draw");
    for (int i = 0; i < 5; i++) {
        fill(losses[i], losses[i]);
        for (int n = 1; n <= 3; n++) {
            EXPECT(is_picture(draw(n, VALS, NAN)), "%d points of loss %g", n, losses[i]);
            EXPECT(is_picture(draw(n, 0, losses[i])), "%d points of loss %g", n, losses[i]);
        }
    }
    fill(3, 3);
    EXPECT(count_of(strstr(draw(1, 0, NAN), "points=\""), ",") == 2, "one point is a line to itself");
    fill(0.5, 0);
    EXPECT(is_picture(draw(POINTS, VALS, 0)), "down to 0");
    train[0].step = 0;
    EXPECT(is_picture(draw(1, 0, NAN)), "step 0 alone");
}

TEST(not_finite) {
    fill(6, 1.2);
    train[0].loss = train[7].loss = NAN;
    train[9].loss = INFINITY;
    val[0].loss = -INFINITY;
    val[3].loss = NAN;
    const char* text = draw(POINTS, VALS, INFINITY);
    EXPECT(is_picture(text), "%s", text);
    EXPECT(count_of(strstr(text, "points=\""), ",") == POINTS - 3, "the others are drawn");
    EXPECT(count_of(text, "<circle") == VALS - 2 + 1, "and the other validations");
    EXPECT(!draw(1, VALS, 1)[0], "a loss that is NaN is no curve");
}
