#!/usr/bin/env python3
"""in_terminal.py COLUMNSxROWS[,COLUMNSxROWS...] WORDS KEY COMMAND...

Runs a command in a pseudo-terminal of this size, resizes it once WORDS are shown, sends KEY
(Python's escapes) once they are shown in the last size, and waits for the end. Prints the last
picture of each size that has the words, as lines "COLUMNSxROWS|text", and if a line is too wide,
"COLUMNSxROWS|is too wide"; then "after|" with the output after the last picture, and "keyboard|"
with "as before" or "changed". The exit status is the command's; 99 if the words do not appear
within 30 seconds.
"""
import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time

PICTURE = re.compile(rb"\033\[H(.*?)\033\[J", re.S)


def resize(terminal, size):
    columns, rows = map(int, size.split("x"))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def read_until(terminal, is_enough):
    """Returns the command's output until is_enough says so, its end, or 30 seconds have passed."""
    output, end = b"", time.time() + 30
    while not is_enough(output) and time.time() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                data = os.read(terminal, 65536)
            except OSError:  # the command has ended
                break
            output += data
    return output


def picture_with(words, output):
    """Returns the last picture in the output that has the words, None without one."""
    pictures = [p for p in PICTURE.findall(output) if words.encode() in p]
    return pictures[-1].replace(b"\033[K", b"").replace(b"\r", b"").decode() if pictures else None


def show(label, text):
    for line in text.split("\n"):
        print(f"{label}|{line}")


def main(sizes, words, key, *command):
    child, terminal = pty.fork()
    if child == 0:
        os.environ["TERM"] = "xterm"
        os.execvp(command[0], command)
    before = termios.tcgetattr(terminal)
    for size in sizes.split(","):
        resize(terminal, size)
        picture = picture_with(words, read_until(terminal, lambda output: picture_with(words, output)))
        if picture is None:
            os.kill(child, 9)
            return 99
        show(size, picture)
        if max(map(len, picture.split("\n"))) > int(size.split("x")[0]):
            show(size, "is too wide")
    os.write(terminal, key.encode().decode("unicode_escape").encode())
    rest = read_until(terminal, lambda output: b"\033[?1049l" in output)
    rest += read_until(terminal, lambda output: b"\n" in output)
    show("after", repr(rest.split(b"\033[J")[-1])[2:-1])
    print("keyboard|" + ("as before" if termios.tcgetattr(terminal) == before else "changed"))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


sys.exit(main(*sys.argv[1:]))
