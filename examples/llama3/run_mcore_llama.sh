#!/usr/bin/env bash
# The family name without its version; the launcher is run_mcore_llama3.sh.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
# shellcheck source=examples/llama3/run_mcore_llama3.sh
source "$(dirname "$(readlink -f -- "$0")")/run_mcore_llama3.sh"
