#!/usr/bin/env bash
# Sets everything up, then runs the whole test suite: bash tests/run.sh [pytest arguments]
#
# Two processes share it (tests/conftest.py says how): whole runs wait for processes to start half of their time, and most
# other tests use one core. `-n 0` runs all tests in one process, one after another.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../launch/env.sh"
cd "$here/.."
echo "[tests] running the suite" >&2
exec python -m pytest -n 2 "$@"
