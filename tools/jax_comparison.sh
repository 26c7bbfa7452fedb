#!/usr/bin/env bash
# tfshard next to Keras on JAX (keras.distribution.ModelParallel), which gets a virtual environment of its own:
#
#   tools/jax_comparison.sh parity               # one model's losses agree; exit status 1 if they do not
#   tools/jax_comparison.sh timing --rounds=5    # step times and their ratios
#
#   TFSHARD_JAX_VENV     where that environment is; by default .venv-jax in the repository
#
# Not part of the tests: it needs the network the first time, to install JAX.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

jax_venv="${TFSHARD_JAX_VENV:-$PWD/.venv-jax}"
requirements=tools/jax_comparison/requirements.txt

case "${1:-}" in
  parity | timing) ;;
  *) _fail "say what to do: parity or timing. Received: ${1:-nothing}" ;;
esac

if ! cmp -s "$requirements" "$jax_venv/tfshard-requirements.txt"; then
  echo "Making a virtual environment with JAX in $jax_venv"
  python -m venv "$jax_venv"
  "$jax_venv/bin/python" -m pip install --disable-pip-version-check -qq -r "$requirements" ||
    _fail "pip could not install JAX"
  # Copied last: an install that was interrupted is done again.
  cp "$requirements" "$jax_venv/tfshard-requirements.txt"
fi

exec python "tools/jax_comparison/$1.py" --jax_python="$jax_venv/bin/python" "${@:2}"
