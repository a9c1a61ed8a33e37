#!/usr/bin/env bash
# Pretrain SmolLM3-3B; see README.md here, and --help.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
# shellcheck source=examples/_lib.sh
source "$(dirname "$(readlink -f -- "$0")")/../_lib.sh"

# Defaults of this launcher, one array per concern; the same flag on the command line wins.
# No sizes here: they come from config.json in --hf-model DIR.
BATCH=(--seq-length 4096 --micro-batch-size 1)
SCHEDULE=(--lr 1e-5)

launch pretrain "${BATCH[@]}" "${SCHEDULE[@]}" -- "$@"
