#!/usr/bin/env bash
# One host's part of a run over several hosts that see the same run folder; started by hand, or by launch/slurm.sbatch:
#
#   bash launch/node.sh prepare CONFIG [--section.key value ...] [--resume]      once, on any host; prints RUN_FOLDER last
#   bash launch/node.sh scheduler RUN_FOLDER                                     beside trainer rank 0
#   bash launch/node.sh trainer RUN_FOLDER --nodes 2 --node-rank 0 --rendezvous HOST:PORT       on each trainer host
#   bash launch/node.sh engines RUN_FOLDER --nodes 2 --node-rank 0 --rendezvous HOST:PORT       on each rollout host
#
# HOST is trainer host 0 as the other hosts reach it, PORT any free port there. Each command waits for the others, and
# ends when the run is over or has failed, with the cause as its last words; logs lie in RUN_FOLDER/logs. SIGTERM or
# Ctrl-C to any one of them: the run saves and ends. Started again, with --resume to prepare, it goes on.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
role=${1:-}
case $role in
    prepare | engines) command=(python -m "megatron_sao.cli.$role") ;;
    scheduler | trainer) command=(python -m megatron_sao.cli.node "$role") ;;
    *)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2
        exit 2
        ;;
esac
shift
source "$here/env.sh"
exec "${command[@]}" "$@"
