#!/usr/bin/env bash
# Builds the documentation into build/site; a broken link is an error. Arguments go to mkdocs:
#
#   tools/docs.sh
#   tools/docs.sh serve      # shows it at a local address, and builds it anew when a page changes
set -euo pipefail
trap 'echo "Elapsed: $((SECONDS / 60)) min $((SECONDS % 60)) s"' EXIT

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# A text about versions to come.
export NO_MKDOCS_2_WARNING=1
[[ $# -gt 0 ]] || set -- build
mkdocs "$1" --strict "${@:2}"
