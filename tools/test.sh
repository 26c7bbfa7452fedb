#!/usr/bin/env bash
# Lint, format, types, tests. Arguments go to pytest:
#
#   tools/test.sh
#   tools/test.sh tests/storage/test_optimizers.py -k adam
#   tools/test.sh --quick                            # the tests of tests/quick.py: a few of each wing
set -euo pipefail
trap 'echo "Elapsed: $((SECONDS / 60)) min $((SECONDS % 60)) s"' EXIT

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

if [[ "${1:-}" == --quick ]]; then
  set -- tests -m quick "${@:2}"
fi

ruff check .
ruff format --check .
mypy
# Two processes of four logical devices each. One process runs all tests of a file, which share fixtures. The longest
# files go first (tests/conftest.py).
pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder "$@"
