#!/usr/bin/env bash
# setup.sh -- makes a Python environment from pinned versions. Does nothing when it is up to date.
# PYTHON=python3.12 chooses the interpreter.
#
#     dev/ref/setup.sh           build/venv: PyTorch, for dev/ref and dev/bench (requirements.txt)
#     dev/ref/setup.sh report    build/venv-report: TensorBoard's own reader of what --tensorboard
#                                writes, for dev/test/cli/test_report.sh
#     dev/ref/setup.sh llama     build/llama: llama.cpp, for dev/ref/llama_cpp.py
set -euo pipefail
cd "$(dirname "$0")/../.."

case ${1:-} in
'') venv=build/venv want=requirements.txt modules='torch, transformers, tiktoken, safetensors' ;;
report) venv=build/venv-report want=requirements_report.txt modules=tensorboard ;;
llama) venv=build/llama want=requirements_llama.txt modules=xllamacpp ;;
*) echo "error: $1; wanted report, llama or nothing" >&2 && exit 2 ;;
esac
python=${PYTHON:-python3}
want=dev/ref/$want
have=$venv/installed-requirements.txt # written last, so an interrupted installation starts again

if ! cmp -s "$want" "$have"; then
    "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' || {
        echo "error: $python: wanted Python 3.11 or newer with venv (Debian: python3-venv)" >&2
        exit 1
    }
    "$python" -m venv --clear "$venv"
    "$venv/bin/pip" --quiet --disable-pip-version-check install --no-deps --requirement "$want"
    "$venv/bin/python" -c "import $modules"
    cp "$want" "$have"
fi
echo "$venv: $("$venv/bin/python" --version), $(grep -c == "$want") packages, $(grep "^${modules%%,*}==" "$want")"
