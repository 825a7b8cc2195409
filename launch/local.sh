#!/usr/bin/env bash
# The whole system on this machine: bash launch/local.sh [CONFIG] [--section.key value ...] [--dry-run]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/env.sh"
config=$here/../configs/local.toml
if [ $# -gt 0 ] && [[ $1 != -* ]]; then
    config=$1
    shift
fi
exec python -m megatron_sao.cli.local "$config" "$@"
