#!/usr/bin/env bash
# Launches a script on hosts that this machine pretends to be, with links of a rate. Arguments go to tools/hosts.py:
#
#   sudo tools/hosts.sh --rate=1gbit examples/train_lm.py --mesh=batch:4 --steps=20
#   sudo tools/hosts.sh --down=1@40 examples/train_lm.py --mesh=batch:4
#   sudo tools/hosts.sh --clean
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

exec python -m tools.hosts "$@"
