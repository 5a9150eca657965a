/*
number_text.h -- numbers as people read and write them, and as short as a float can be written.
*/
#ifndef LLMC_NUMBER_TEXT_H
#define LLMC_NUMBER_TEXT_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NUMBER_BYTES = 48 }; // room for any text below

// Sets text to "1,234,567", rounded to a whole number; from 1e15 on "1.23e+15". Returns text.
static inline char* number_grouped(double value, char text[NUMBER_BYTES]) {
    char digits[NUMBER_BYTES];
    if (!(fabs(value) < 1e15)) {
        snprintf(text, NUMBER_BYTES, "%.3g", value);
        return text;
    }
    const int length = snprintf(digits, sizeof(digits), "%.0f", fabs(value));
    int used = value < -0.5 ? 1 : 0;
    text[0] = '-';
    for (int i = 0; i < length; i++) {
        if (i > 0 && (length - i) % 3 == 0) {
            text[used++] = ',';
        }
        text[used++] = digits[i];
    }
    text[used] = '\0';
    return text;
}

// Sets text to at most four digits, and a letter from 10,000 on: "9600", "12.5k", "1.5M", "2.4B",
// "3T". Returns text.
static inline char* number_short(double value, char text[NUMBER_BYTES]) {
    static const char letters[] = " kMBT";
    int thousands = 0;
    if (fabs(value) >= 1e4) {
        for (; fabs(value) >= 999.95 && letters[thousands + 1]; thousands++) {
            value /= 1000;
        }
    }
    const int length = snprintf(text, NUMBER_BYTES, "%.4g", value);
    if (thousands && length > 0 && length + 1 < NUMBER_BYTES) {
        text[length] = letters[thousands];
        text[length + 1] = '\0';
    }
    return text;
}

// Sets text to the fewest digits that are read back as the same float. Returns text.
static inline char* number_exact(float value, char text[NUMBER_BYTES]) {
    int digits = 1;
    do {
        snprintf(text, NUMBER_BYTES, "%.*g", digits, (double)value);
    } while (digits++ < FLT_DECIMAL_DIG && strtof(text, NULL) != value);
    return text;
}

// Reads a decimal, as "0.7", in millionths: `digits` digits before the point at most, six after it.
// Returns 0 if the text is anything else.
static inline int number_read_millionths(uint64_t* value, const char* text, size_t digits) {
    enum { AFTER = 6 };
    const size_t whole = strspn(text, "0123456789");
    const char* fraction = text[whole] == '.' ? text + whole + 1 : "";
    const size_t after = strspn(fraction, "0123456789");
    *value = 0;
    for (size_t i = 0; i < whole && whole <= digits; i++) {
        *value = 10 * *value + (uint64_t)(text[i] - '0');
    }
    for (size_t i = 0; i < AFTER; i++) {
        *value = 10 * *value + (i < after ? (uint64_t)(fraction[i] - '0') : 0);
    }
    return whole + after > 0 && whole <= digits && after <= AFTER && !fraction[after] &&
           (!text[whole] || text[whole] == '.');
}

#endif
