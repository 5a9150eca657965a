#!/usr/bin/env bash
# fresh.sh -- tests a new machine: Debian with only the packages that the README asks for, a clone
# of the last commit, and the README's commands. `make test` must pass there, and again after
# `scripts/install_deps.sh --test`, which must install the compiler for the simulated GPU.
#
#     dev/test/fresh.sh        as root, with debootstrap and the network; an hour
#
# One line for each command; the exit status is 1 if one failed. Environment: SUITE of Debian, and
# that of lib/new_debian.sh.
set -eu
cd "$(dirname "$0")/../.."
source dev/test/lib/new_debian.sh

debian_begin fresh "${SUITE:-$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)}" gcc,libc6-dev,make,git
git clone --quiet . "$top/debian/clone"
directory=/clone

try "make run"
try "make test" ' passed, 0 failed, '
try "scripts/install_deps.sh --test"
try "make test" ' passed, 0 failed, '
if grep -q '^skipped: sim' "$top/log"; then
    failed=1
    echo "fresh: FAILED: $(grep '^skipped: sim' "$top/log")"
fi
exit $failed
