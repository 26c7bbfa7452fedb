#!/usr/bin/env bash
# Keras's own tests of layers and training, with every `compile` under a ShardedStrategy and without it:
#
#   tools/keras_tests.sh                        # keras/src/layers and keras/src/trainers
#   tools/keras_tests.sh --tests=layers/rnn
#
#   TFSHARD_KERAS_TESTS_LIBRARIES   where what they import besides is; by default .keras-tests in the repository
#
# Not part of the tests: it needs the network the first time, and most of an hour.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

libraries="${TFSHARD_KERAS_TESTS_LIBRARIES:-$PWD/.keras-tests}"
requirements=tools/keras_tests/requirements.txt

if ! cmp -s "$requirements" "$libraries/tfshard-requirements.txt"; then
  echo "Installing what Keras's tests import in $libraries"
  rm -rf "$libraries"
  # With the versions that are installed already.
  python -m pip freeze --exclude-editable >"${TMPDIR:-/tmp}/tfshard-freeze.$$"
  python -m pip install --disable-pip-version-check -qq --target "$libraries" -r "$requirements" \
    -c "${TMPDIR:-/tmp}/tfshard-freeze.$$" || _fail "pip could not install what Keras's tests import"
  rm "${TMPDIR:-/tmp}/tfshard-freeze.$$"
  # Copied last: an install that was interrupted is done again.
  cp "$requirements" "$libraries/tfshard-requirements.txt"
fi

PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$libraries" exec python tools/keras_tests/run.py "$@"
