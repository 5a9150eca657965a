/*
date.h -- dates in chats: YYYY-MM-DD, and as templates print them.
*/
#ifndef LLMC_DATE_H
#define LLMC_DATE_H

#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "llmc/base/check.h"

enum { DATE_BYTES = 16 };

// Sets the parts of a date. Returns 0 if the text is none.
static inline int date_parts_(const char* text, struct tm* parts) {
    struct tm of;
    char again[DATE_BYTES];
    memset(&of, 0, sizeof(of));
    if (strlen(text) != 10 || sscanf(text, "%4d-%2d-%2d", &of.tm_year, &of.tm_mon, &of.tm_mday) != 3) {
        return 0;
    }
    of.tm_year -= 1900, of.tm_mon -= 1;
    const time_t seconds = timegm(&of); // another date if the month has no such day
    return gmtime_r(&seconds, parts) && strftime(again, sizeof(again), "%Y-%m-%d", parts) &&
           strcmp(again, text) == 0;
}

static inline int date_is(const char* text) {
    struct tm parts;
    return date_parts_(text, &parts);
}

// Sets `date` to today's, in the machine's time zone.
static inline void date_today(char date[DATE_BYTES]) {
    const time_t now = time(NULL);
    struct tm parts;
    CHECK(localtime_r(&now, &parts) && strftime(date, DATE_BYTES, "%Y-%m-%d", &parts), "no date of today");
}

// Returns 1 if a date has everything that a format of strftime asks for.
static inline int date_has_format(const char* format) {
    for (const char* at = strchr(format, '%'); at; at = strchr(at + 1, '%')) {
        at += at[1] == '-' ? 2 : 1; // without zeros in front
        if (!*at || !strchr("aAbBdejmuwyYDFGhUVW%", *at)) {
            return 0;
        }
    }
    return 1;
}

// Prints a date in such a format, in English; returns the bytes.
static inline size_t date_print(char* text, size_t room, const char* format, const char* date) {
    struct tm parts;
    return date_parts_(date, &parts) ? strftime(text, room, format, &parts) : 0;
}

#endif
