#!/usr/bin/env bash
# tfshard next to Keras on JAX (keras.distribution.ModelParallel), which gets a virtual environment of its own:
#
#   tools/jax_comparison.sh    # losses agree; exit status 1 if they do not
#
#   TFSHARD_JAX_VENV   where that environment is; by default .venv-jax in the repository
#
# Step times are in the report (tools/report.sh). Not part of the tests: it needs the network the first time, to install
# JAX.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

jax_venv="${TFSHARD_JAX_VENV:-$PWD/.venv-jax}"
requirements=tools/jax_comparison/requirements.txt

if ! cmp -s "$requirements" "$jax_venv/tfshard-requirements.txt"; then
  echo "Making a virtual environment with JAX in $jax_venv"
  python -m venv "$jax_venv"
  "$jax_venv/bin/python" -m pip install --disable-pip-version-check -qq -r "$requirements" ||
    _fail "pip could not install JAX"
  # Copied last: an install that was interrupted is done again.
  cp "$requirements" "$jax_venv/tfshard-requirements.txt"
fi

python -m tools.jax_comparison.parity --jax_python="$jax_venv/bin/python" "$@"
# One script of keras.distribution, on both backends.
exec python -m tools.jax_comparison.distributions --jax_python="$jax_venv/bin/python"
