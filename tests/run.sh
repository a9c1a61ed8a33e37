#!/usr/bin/env bash
# Sets up what is missing and runs the tests: bash tests/run.sh [pytest arguments]
# Long ones that others nearly cover are left out; all of them: bash tests/run.sh -m ''
# Each core runs whole files of its own; in one process, with what tests print: bash tests/run.sh -n 0 -s
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/examples/_setup.sh"
mp_setup test
cd "$root"
workers=$(nproc)
exec "$MP_PYTHON" -m pytest -m 'not slow' -n "$((workers < 8 ? workers : 8))" "$@"
