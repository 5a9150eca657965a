#!/usr/bin/env bash
# fresh.sh -- tests a new machine: Debian with only the packages that the README asks for, a clone
# of the last commit, and the README's commands. `make test` must pass there, and again after
# `scripts/install_deps.sh --test`, which must install the compiler for the simulated GPU.
#
#     dev/test/fresh.sh        as root, with debootstrap and the network; an hour
#
# One line for each command; the exit status is 1 if one failed. Environment: MIRROR and SUITE of
# Debian; KEEP=1 keeps the new system; CERTIFICATES is a file of certificate authorities for pip, in
# a network that has its own. debootstrap hands on how names are resolved.
set -eu
cd "$(dirname "$0")/../.."
mirror=${MIRROR:-http://deb.debian.org/debian}
suite=${SUITE:-$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)}
top=$(mktemp -d /tmp/llmc_fresh_XXXXXX)
[ -n "${KEEP:-}" ] || trap 'rm -rf --one-file-system "$top"' EXIT
failed=0

# in_root COMMAND: by a shell in the clone; what it mounts is gone at its end.
in_root() {
    # shellcheck disable=SC2016 # $1 and $2 are the inner shell's
    unshare --mount --pid --fork --kill-child bash -c 'mount -t proc proc "$1/proc" && mount --rbind /sys "$1/sys" && mount --rbind /dev "$1/dev" &&
        exec chroot "$1" env -i HOME=/tmp ${CERTIFICATES:+PIP_CERT=/certificates.pem} PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 bash -c "cd /clone && $2"' - "$top/debian" "$1"
}

# try COMMAND [WORDS...]: it must succeed, and its last line must have the words.
try() {
    local begin=$SECONDS status=0
    in_root "$1" >"$top/log" 2>&1 </dev/null || status=$?
    if [ $status != 0 ] || ! tail -n 1 "$top/log" | grep -q "${2:-}"; then
        failed=1
        tail -n 60 "$top/log"
        echo "fresh: FAILED: $1: exit status $status"
    fi
    echo "fresh: $1: $((SECONDS - begin)) s: $(tail -n 1 "$top/log" | tr -d '\r' | cut -c1-100)"
}

debootstrap --variant=minbase --include=gcc,libc6-dev,make,git "$suite" "$top/debian" "$mirror" >"$top/log" 2>&1 || {
    tail "$top/log"
    exit 1
}
[ -z "${CERTIFICATES:-}" ] || cp "$CERTIFICATES" "$top/debian/certificates.pem"
git clone --quiet . "$top/debian/clone"

try "make run"
try "make test" ' passed, 0 failed, '
try "scripts/install_deps.sh --test"
try "make test" ' passed, 0 failed, '
if grep -q '^skipped: sim' "$top/log"; then
    failed=1
    echo "fresh: FAILED: $(grep '^skipped: sim' "$top/log")"
fi
exit $failed
