#!/usr/bin/env bash
# Weights of Hugging Face transformers in sharded models and back, checked with transformers and PyTorch, which get a
# virtual environment of their own (docs/weights.md):
#
#   tools/transformers_check.sh                  # a table; exit status 1 if a value differs
#   tools/transformers_check.sh --models=llama
#
#   TFSHARD_TRANSFORMERS_VENV   where that environment is; by default .venv-transformers in the repository
#
# Not part of the tests: it needs the network the first time, to install PyTorch. Models are small and random.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

peer_venv="${TFSHARD_TRANSFORMERS_VENV:-$PWD/.venv-transformers}"
requirements=tools/transformers_check/requirements.txt

if ! cmp -s "$requirements" "$peer_venv/tfshard-requirements.txt"; then
  echo "Making a virtual environment with transformers in $peer_venv"
  python -m venv "$peer_venv"
  "$peer_venv/bin/python" -m pip install --disable-pip-version-check -qq -r "$requirements" ||
    _fail "pip could not install transformers"
  # Copied last: an install that was interrupted is done again.
  cp "$requirements" "$peer_venv/tfshard-requirements.txt"
fi

exec python -m tools.transformers_check --transformers_python="$peer_venv/bin/python" "$@"
