/*
screen.h -- a terminal as a screen that is drawn again and again, until a key ends it.

It uses the terminal's second screen, so that the first one, with the commands and their output,
comes back. Only what has changed is sent: the terminal may be far away.
*/
#ifndef LLMC_SCREEN_H
#define LLMC_SCREEN_H

#include <termios.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    struct termios before; // settings of the keyboard, to be restored
    int has_keys;          // true: standard input is a terminal
    int columns, rows;     // size that screen_draw uses
    char* shown;           // text on the screen; NULL: unknown
} Screen;

// Opens standard output, which must be a terminal. Standard input gives keys, if it is one.
void screen_open(Screen* screen);

// Restores the terminal.
void screen_close(Screen* screen);

// Measures the terminal; returns true if its size has changed.
int screen_measure(Screen* screen);

// Draws lines of printable text, each cut to the width of the screen, as many as fit.
void screen_draw(Screen* screen, const char* text);

// Forgets what is on the screen: the next screen_draw sends everything.
void screen_forget(Screen* screen);

// Waits for a key, at most wait_s seconds and until a signal. Returns it, or 0.
int screen_key(Screen* screen, double wait_s);

#ifdef __cplusplus
}
#endif

#ifdef SCREEN_IMPLEMENTATION

#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "llmc/base/check.h"

// The terminal's second screen; no cursor; a long line is not continued on the next one.
#define SCREEN_BEGIN_ "\033[?1049h\033[?25l\033[?7l"
#define SCREEN_END_ "\033[?7h\033[?25h\033[?1049l"

// Keys come one by one, unseen. Ctrl-C stays a signal; Ctrl-Z would leave the screen as it is.
static void screen_open_keys_(Screen* screen) {
    screen->has_keys = tcgetattr(STDIN_FILENO, &screen->before) == 0;
    struct termios keys = screen->before;
    keys.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
    keys.c_cc[VMIN] = 1;
    keys.c_cc[VTIME] = 0;
    keys.c_cc[VSUSP] = _POSIX_VDISABLE;
    if (screen->has_keys) {
        tcsetattr(STDIN_FILENO, TCSANOW, &keys);
    }
}

void screen_open(Screen* screen) {
    memset((void*)screen, 0, sizeof(*screen));
    screen_open_keys_(screen);
    screen_measure(screen);
    fputs(SCREEN_BEGIN_, stdout);
    fflush(stdout);
}

void screen_close(Screen* screen) {
    fputs(SCREEN_END_, stdout);
    fflush(stdout);
    if (screen->has_keys) {
        tcsetattr(STDIN_FILENO, TCSANOW, &screen->before);
    }
    free(screen->shown);
}

void screen_forget(Screen* screen) {
    free(screen->shown);
    screen->shown = NULL;
}

// A terminal that does not say its size has the usual one.
int screen_measure(Screen* screen) {
    struct winsize size;
    const int is_known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 && size.ws_row > 0;
    const int columns = is_known ? size.ws_col : 80, rows = is_known ? size.ws_row : 24;
    if (columns == screen->columns && rows == screen->rows) {
        return 0;
    }
    screen->columns = columns;
    screen->rows = rows;
    screen_forget(screen);
    return 1;
}

// Returns the bytes of the first `columns` characters of a line.
static size_t screen_cut_(const char* line, size_t length, int columns) {
    size_t at = 0;
    while (at < length) {
        const int continues = ((unsigned char)line[at] & 0xC0) == 0x80;
        if (!continues && columns-- == 0) {
            break;
        }
        at++;
    }
    return at;
}

void screen_draw(Screen* screen, const char* text) {
    if (screen->shown && strcmp(screen->shown, text) == 0) {
        return;
    }
    screen_forget(screen);
    screen->shown = strdup(text);
    CHECK(screen->shown, "screen: no memory");
    fputs("\033[H", stdout);
    for (int row = 0; row < screen->rows && *text; row++) {
        const size_t length = strcspn(text, "\n");
        fputs(row ? "\n" : "", stdout);
        fwrite(text, 1, screen_cut_(text, length, screen->columns), stdout);
        fputs("\033[K", stdout); // clears the rest of the line
        text += length + (text[length] == '\n');
    }
    fputs("\033[J", stdout); // and the lines below
    fflush(stdout);
}

int screen_key(Screen* screen, double wait_s) {
    struct pollfd keys = {screen->has_keys ? STDIN_FILENO : -1, POLLIN, 0};
    unsigned char key = 0;
    if (poll(&keys, 1, (int)(1e3 * wait_s)) <= 0 || read(STDIN_FILENO, &key, 1) == 1) {
        return key;
    }
    screen->has_keys = 0; // the terminal is gone
    return 0;
}

#endif // SCREEN_IMPLEMENTATION

#endif
