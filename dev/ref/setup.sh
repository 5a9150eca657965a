#!/usr/bin/env bash
# Makes build/venv, the Python environment of dev/ref and dev/bench, from the pinned versions in
# requirements.txt. Does nothing when it is already up to date. PYTHON=python3.12 chooses the
# interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3}
venv=build/venv
want=dev/ref/requirements.txt
have=$venv/installed-requirements.txt # written last, so an interrupted installation starts again

if ! cmp -s "$want" "$have"; then
    "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' || {
        echo "error: $python: wanted Python 3.11 or newer with venv (Debian: python3-venv)" >&2
        exit 1
    }
    "$python" -m venv --clear "$venv"
    "$venv/bin/pip" --quiet --disable-pip-version-check install --no-deps --requirement "$want"
    "$venv/bin/python" -c 'import torch, transformers, tiktoken, safetensors'
    cp "$want" "$have"
fi
echo "$venv: $("$venv/bin/python" --version), $(grep -c == "$want") packages, $(grep ^torch= "$want")"
