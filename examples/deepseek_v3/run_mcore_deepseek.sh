#!/usr/bin/env bash
# The name that users of Pai-Megatron-Patch know; the launcher is run_mcore_deepseek_v3.sh.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
# shellcheck source=examples/deepseek_v3/run_mcore_deepseek_v3.sh
source "$(dirname "$(readlink -f -- "$0")")/run_mcore_deepseek_v3.sh"
