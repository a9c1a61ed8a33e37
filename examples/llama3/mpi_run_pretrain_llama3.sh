#!/usr/bin/env bash
# Pretrain Llama 3 on several nodes through mpirun; see README.md here, and --help.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
HERE=$(dirname "$(readlink -f -- "$0")")
# shellcheck source=examples/_lib.sh
source "$HERE/../_lib.sh"

# mpirun starts this launcher once a node, and that starts the node's ranks.
launch_mpi "$HERE/run_mcore_llama3.sh" -- "$@"
