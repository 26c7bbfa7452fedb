#!/usr/bin/env bash
# Breaks one function of tfshard at a time, in a copy of the tree, and checks that the test that guards it fails.
# Arguments go to tools/mutate.py:
#
#   tools/mutate.sh                   # all of tools/mutations.py
#   tools/mutate.sh --only=layouts    # those with this text in their area, function or behaviour
#   tools/mutate.sh --write           # and write the table of docs/testing.md
set -euo pipefail
trap 'echo "Elapsed: $((SECONDS / 60)) min $((SECONDS % 60)) s"' EXIT

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

python -m tools.mutate "$@"
