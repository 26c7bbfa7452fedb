#!/usr/bin/env bash
# Breaks one function of tfshard at a time, in a copy of the tree, and checks that the test that guards it fails.
# Passes its arguments to tests/mutate.py:
#
#   tests/mutate.sh                   # every mutation of tests/mutations.py
#   tests/mutate.sh --only=layouts    # mutations with this text in their area, function or behaviour
#   tests/mutate.sh --write           # also write the table of docs/testing.md
set -euo pipefail
trap 'echo "Elapsed: $((SECONDS / 60)) min $((SECONDS % 60)) s"' EXIT

source "$(dirname "${BASH_SOURCE[0]}")/../tools/env.sh"

python tests/mutate.py "$@"
