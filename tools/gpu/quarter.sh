#!/usr/bin/env bash
# A quarter of an hour on one H100 or H200 (benchmarks/GPU.md).
#
#   tools/gpu/quarter.sh receive FOLDER...   unpacks pieces that tools/gpu/pack.py made; again does nothing
#   tools/gpu/quarter.sh probe               says which libraries TensorFlow finds, and multiplies on the GPU
#   tools/gpu/quarter.sh run [--only=a,b]    runs the checks; results go to $OUT
#   tools/gpu/quarter.sh dry [--only=a,b]    runs the checks with tiny sizes on CPU devices, in the current environment
#   tools/gpu/quarter.sh list                lists the checks and their time limits
#
#   TFSHARD_QUARTER   where the pieces are unpacked; by default /tmp/quarter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

site="${TFSHARD_QUARTER:-/tmp/quarter}"
python="$(command -v python3 || command -v python)"

# TensorFlow comes from the pieces, and the CUDA libraries from the pieces or else from the machine.
_use_site() {
  export QUARTER_LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}"
  LD_LIBRARY_PATH="$("$python" tools/gpu/quarter/libraries.py "$site/lib" "$site")"
  export LD_LIBRARY_PATH PYTHONPATH="$PWD:$site"
  export XLA_FLAGS="--xla_gpu_cuda_data_dir=$site/nvidia/cuda_nvcc"
}

mode="${1:-}"
shift || true
case "$mode" in
receive)
  for piece in "$@"; do
    PYTHONPATH=tools/gpu/quarter "$python" -c \
      'import pathlib, pieces, sys; print(pieces.receive(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])))' \
      "$piece" "$site"
  done
  ;;
probe)
  _use_site
  nvidia-smi || true
  "$python" tools/gpu/quarter/probe.py
  ;;
run)
  _use_site
  exec "$python" tools/gpu/quarter/checks.py run "$@"
  ;;
dry | list)
  exec "$python" tools/gpu/quarter/checks.py "$mode" "$@"
  ;;
*)
  sed -n '2,11s/^# \?//p' "${BASH_SOURCE[0]}" >&2
  exit 2
  ;;
esac
