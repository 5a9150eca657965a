# new_debian.sh -- a new Debian in a directory of its own, and commands in it; for `source`. Needs
# root, debootstrap, unshare and the network.
#
#     debian_begin NAME SUITE PACKAGES   makes it in $top/debian, which is removed at the end
#     in_debian COMMAND                  by a shell in $directory of it, as $user, with the variables
#                                        in `environment`; its mounts are gone at its end
#     try COMMAND [WORDS...]             in it: must succeed, and its last line must have the words
#
# Prints a line for each command; `failed` is 1 if one failed. Environment: MIRROR of Debian; KEEP=1
# keeps the new system; CERTIFICATES is a file of certificate authorities for pip, in a network that
# has its own. debootstrap hands on how names are resolved.
# shellcheck shell=bash disable=SC2034
directory=/
user=0:0
environment=(HOME=/tmp PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8)
failed=0

debian_begin() {
    test_name=$1
    top=$(mktemp -d "/tmp/llmc_$1_XXXXXX")
    [ -n "${KEEP:-}" ] || trap 'rm -rf --one-file-system "$top"' EXIT
    debootstrap --variant=minbase ${3:+--include="$3"} "$2" "$top/debian" "${MIRROR:-http://deb.debian.org/debian}" >"$top/log" 2>&1 || {
        tail "$top/log"
        exit 1
    }
    [ -z "${CERTIFICATES:-}" ] || cp "$CERTIFICATES" "$top/debian/certificates.pem"
    [ -z "${CERTIFICATES:-}" ] || environment+=(PIP_CERT=/certificates.pem)
}

in_debian() {
    # shellcheck disable=SC2016 # the parameters are the inner shells'
    unshare --mount --pid --fork --kill-child bash -c 'mount -t proc proc "$1/proc" && mount --rbind /sys "$1/sys" && mount --rbind /dev "$1/dev" &&
        exec chroot --userspec="$2" "$1" env -i "${@:5}" bash -c "cd \"\$1\" && eval \"\$2\"" - "$3" "$4"' \
        - "$top/debian" "$user" "$directory" "$1" "${environment[@]}"
}

try() {
    local begin=$SECONDS status=0
    in_debian "$1" >"$top/log" 2>&1 </dev/null || status=$?
    if [ $status != 0 ] || { [ -n "${2:-}" ] && ! tail -n 1 "$top/log" | grep -q -- "$2"; }; then
        failed=1
        tail -n 60 "$top/log"
        echo "$test_name: FAILED: $1: exit status $status"
    fi
    echo "$test_name: $(printf %s "$1" | cut -c1-100): $((SECONDS - begin)) s: $(tail -n 1 "$top/log" | tr -d '\r' | cut -c1-100)"
}
