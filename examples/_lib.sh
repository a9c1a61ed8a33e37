# shellcheck shell=bash
# What every launcher shares. Sourced by examples/<family>/*.sh; the logic is megatron_patch/launch/.
#
#   launch ENTRY DEFAULT... -- "$@"     ENTRY is a module of megatron_patch: pretrain, sft
#   launch_mpi LAUNCHER -- "$@"         LAUNCHER is the script that mpirun starts on every node
#
# Arrays only: no user input ever becomes shell text.

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  echo "error: bash 4.4 or newer is needed, this is $BASH_VERSION" >&2
  exit 2
fi

LAUNCHER=$(readlink -f -- "$0")
# shellcheck source=examples/_setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

# Answers --help, and a call in the positional form of the scripts that this project replaces.
_launcher_answers() {
  local kind=$1 argument
  shift 2
  for argument in "$@"; do
    case $argument in
      --help | -h | --help-all | --help_all)
        _launcher_python text
        exec "$MP_PYTHON" -m megatron_patch.launch "help-$kind" "$LAUNCHER" "$argument"
        ;;
    esac
  done
  if (($#)) && [[ $1 != -* ]]; then
    _launcher_python text
    "$MP_PYTHON" -m megatron_patch.training.legacy "$LAUNCHER" "$@" || true
    exit 2
  fi
}

# Sets MP_PYTHON. For "text" any Python of the right age will do; "plan" takes the one that would
# train if it is there; both install nothing. "train" makes an environment where there is none.
_launcher_python() {
  local candidate
  export PYTHONSAFEPATH=1 # a `data/` or `types.py` where the user stands must not be imported
  if [[ $1 == text ]]; then
    for candidate in "${MP_PYTHON:-}" "$MP_ROOT/.venv/bin/python" python3.12 python3 python; do
      # Its own path, since a shim costs more than Python's start.
      if candidate=$("${candidate:-false}" -c 'import sys
sys.version_info >= (3, 12) and print(sys.executable) or sys.exit(1)' 2>/dev/null); then
        MP_PYTHON=$candidate
        export PYTHONPATH=$MP_ROOT${PYTHONPATH:+:$PYTHONPATH}
        return
      fi
    done
  fi
  if [[ $1 == train ]]; then
    mp_setup || exit 2
  elif ! MP_SETUP=never mp_setup 2>/dev/null; then
    MP_PYTHON=$(mp_find_python) || exit 2
    export MP_LATER_PYTHON=$MP_ROOT/.venv/bin/python # what a real call would make and use
  fi
}

_launcher_exec() {
  local what=$1 entry=$2 argument need=train defaults=()
  shift 2
  while [[ $1 != -- ]]; do
    defaults+=("$1")
    shift
  done
  shift
  for argument in "$@"; do
    [[ $argument == --dry-run || $argument == --dry_run ]] && need=plan
  done
  _launcher_python "$need"
  exec "$MP_PYTHON" -m megatron_patch.launch "$what" "$entry" "$LAUNCHER" "${#defaults[@]}" \
    "${defaults[@]}" "$@"
}

launch() {
  local all=("$@")
  while [[ $1 != -- ]]; do shift; done
  _launcher_answers run "$@"
  _launcher_exec run "${all[@]}"
}

launch_mpi() {
  _launcher_answers mpi "${@:2}"
  _launcher_exec mpi "$@"
}
