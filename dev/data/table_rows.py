"""Rows of numbers as C text: without braces and blanks, because there are thousands."""

START = """\
// clang-format off
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-braces" // rows without braces take half of the lines
"""
END = "#pragma GCC diagnostic pop\n// clang-format on\n\n#endif\n"
COLUMNS = 116


def table(name, rows, count):
    """Returns the definition of `name`, whose number of rows is called `count`."""
    text = f"\n__attribute__((unused)) static const uint32_t {name}[{count}][{len(rows[0])}] = {{\n"
    line = "    "
    for number in (number for row in rows for number in row):
        if len(line) + len(f"{number},") > COLUMNS:
            text += line + "\n"
            line = "    "
        line += f"{number},"
    return text + line + "\n};\n"
