#!/usr/bin/env bash
# Trains a small language model at ZeRO stage 3 on four logical CPU devices. Arguments go to examples/train_lm.py.
set -euo pipefail
trap 'echo "Elapsed: $((SECONDS / 60)) min $((SECONDS % 60)) s"' EXIT

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

python examples/train_lm.py --mesh=batch:4 --zero_stage=3 "$@"
