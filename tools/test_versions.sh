#!/usr/bin/env bash
# The quick tests with other versions of Python, TensorFlow and Keras; by default each of TRIED in
# tfshard/_private/versions.py. Ends with a table: passed, failed, or no such Python here.
#
#   tools/test_versions.sh
#   tools/test_versions.sh 3.12:2.20:3.12 3.13:2.21:3.14    # Python:TensorFlow:Keras
#
#   TFSHARD_VERSIONS_DIR   where the environments and their logs are; by default .venv-versions in the repository
#   TFSHARD_PYTHONS        folders to look for python3.10, python3.11, ... in before PATH, separated by colons
#   TFSHARD_VERSIONS_TESTS which tests, as arguments for pytest; by default tests -m quick
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

directory="${TFSHARD_VERSIONS_DIR:-$PWD/.venv-versions}"
read -ra tests <<<"${TFSHARD_VERSIONS_TESTS:-tests -m quick}"
mkdir -p "$directory"

_tried() {
  # Run as a file: nothing is imported that the Python at hand does not have.
  "$(PATH="${TFSHARD_PYTHONS:-}:$PATH" type -P python3)" -c '
import runpy
for row in runpy.run_path("tfshard/_private/versions.py")["TRIED"]:
    print(":".join(row))'
}

# Leaves its result in `result`.
_try() {
  local python="$1" tensorflow="$2" keras="$3" name="$1-$2-$3" venv log interpreter
  venv="$directory/$name" log="$directory/$name.log"
  if ! interpreter="$(PATH="${TFSHARD_PYTHONS:-}:$PATH" type -P "python$python")" ||
    [[ "$("$interpreter" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" != "$python" ]]; then
    result="not available: no python$python"
    return
  fi
  [[ -x "$venv/bin/python" ]] || "$interpreter" -m venv "$venv"
  if ! "$venv/bin/python" -m pip install --disable-pip-version-check -q -e '.[quick,calibrate]' \
    "tensorflow==$tensorflow.*" "keras==$keras.*" >"$log" 2>&1; then
    result="not available: pip could not install it ($log)"
    return
  fi
  # The package of this tree, also where another environment's editable install was made after this one's. Versions that
  # were not tried are what this is for.
  if PYTHONPATH="$PWD" KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 "$venv/bin/python" -m pytest -p no:cacheprovider \
    --numprocesses=2 -W "ignore:tfshard has not been tested:UserWarning" "${tests[@]}" >"$log" 2>&1; then
    result="passed"
  else
    result="failed ($log)"
  fi
  # pytest's closing line; TensorFlow may write after it.
  result+=": $(grep -E ' in [0-9.]+s' "$log" | tail -n 1 | tr -d = || true)"
}

combinations=("$@")
[[ $# -gt 0 ]] || mapfile -t combinations < <(_tried)
failed=0
table="Python  TensorFlow  Keras   quick tests"$'\n'
for combination in "${combinations[@]}"; do
  IFS=: read -r python tensorflow keras <<<"$combination"
  echo "Python $python, TensorFlow $tensorflow, Keras $keras" >&2
  _try "$python" "$tensorflow" "$keras"
  [[ "$result" != failed* ]] || failed=1
  table+="$(printf '%-7s %-11s %-7s %s' "$python" "$tensorflow" "$keras" "$result")"$'\n'
done
printf '%s' "$table"
exit "$failed"
