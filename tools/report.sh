#!/usr/bin/env bash
# tfshard beside its peers, each in a virtual environment of its own: see tools/report/__main__.py.
#
#   tools/report.sh --quick      # ten minutes, after the environments are made
#   tools/report.sh              # all of it: hours
#
#   TFSHARD_JAX_VENV, TFSHARD_TORCH_VENV   where those environments are; by default .venv-jax and .venv-torch
#
# Not part of the tests: it needs the network the first time, to install JAX and PyTorch.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# Makes an environment from a file of requirements, unless it is there.
_prepare_peer() {
  local venv="$1" requirements="$2"
  cmp -s "$requirements" "$venv/tfshard-requirements.txt" && return
  echo "Making a virtual environment in $venv"
  python -m venv "$venv"
  "$venv/bin/python" -m pip install --disable-pip-version-check -qq -r "$requirements" ||
    _fail "pip could not install what $requirements names"
  # Copied last: an install that was interrupted is done again.
  cp "$requirements" "$venv/tfshard-requirements.txt"
}

jax_venv="${TFSHARD_JAX_VENV:-$PWD/.venv-jax}"
torch_venv="${TFSHARD_TORCH_VENV:-$PWD/.venv-torch}"
_prepare_peer "$jax_venv" tools/jax_comparison/requirements.txt
_prepare_peer "$torch_venv" tools/report/torch_requirements.txt

exec python -m tools.report --jax_python="$jax_venv/bin/python" --torch_python="$torch_venv/bin/python" "$@"
