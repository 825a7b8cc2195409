#!/usr/bin/env bash
# Sets everything up, then runs the whole test suite: bash tests/run.sh [pytest arguments]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../launch/env.sh"
cd "$here/.."
echo "[tests] running the suite" >&2
exec python -m pytest "$@"
