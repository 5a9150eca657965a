#!/usr/bin/env bash
# Makes build/venv-report, where TensorBoard's own reader checks what --tensorboard writes
# (dev/test/cli/test_report.sh), from the pinned versions in requirements_report.txt. Does nothing
# when it is up to date. PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=build/venv-report
want=dev/ref/requirements_report.txt
have=$venv/installed-requirements.txt # written last, so an interrupted installation starts again

if ! cmp -s "$want" "$have"; then
    "${PYTHON:-python3}" -m venv --clear "$venv"
    "$venv/bin/pip" --quiet --disable-pip-version-check install --no-deps --requirement "$want"
    "$venv/bin/python" -c 'import tensorboard'
    cp "$want" "$have"
fi
echo "$venv: $("$venv/bin/python" --version), $(grep ^tensorboard== "$want")"
