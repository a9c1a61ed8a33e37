# shellcheck shell=bash
# Finds or makes a Python environment that can run megatron_patch. Sourced, never executed:
#
#     source "$root/examples/_setup.sh"; mp_setup [EXTRAS]     (EXTRAS: test, dev, ... default none)
#
# Afterwards MP_ROOT is the checkout, MP_PYTHON the interpreter, and PYTHONPATH has the checkout first.
# Order: $MP_PYTHON if the caller set it; the active `python` if it holds what is needed (a container, a
# conda or virtual environment); the checkout's .venv; else a new .venv, which takes a minute or two.
#   MP_SETUP=never            make nothing: fail with one sentence instead
#   MP_CONSTRAINTS=FILE|none  versions to pin (default .ci/constraints.txt, what the tests ran with)

MP_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export MP_ROOT

_mp_die() { printf 'error: %s\n' "$*" >&2; return 2; }

# Is $1 an interpreter of at least 3.12 that finds every distribution needed for the extras in $2?
# Only looks modules up: a broken Transformer Engine is `megatron-patch info`'s to explain.
_mp_usable() {
  local python=$1 extras=$2 modules=(megatron.core torch transformers typer orjson)
  [[ ,$extras, == *,test,* || ,$extras, == *,dev,* ]] && modules+=(pytest hypothesis xdist)
  [[ ,$extras, == *,dev,* ]] && modules+=(ruff mypy)
  command -v "$python" >/dev/null 2>&1 || return 1
  "$python" - "${modules[@]}" >/dev/null 2>&1 <<'PY'
import sys
from importlib.util import find_spec

sys.exit(sys.version_info < (3, 12) or not all(map(find_spec, sys.argv[1:])))
PY
}

# Prints the path of a Python 3.12 or newer; fails with one sentence where there is none.
mp_find_python() {
  local candidate candidates=("${MP_BASE_PYTHON:-}" python3.12 python3.13 python3 python) root
  if command -v pyenv >/dev/null 2>&1; then
    root=$(pyenv root)
    while IFS= read -r candidate; do
      candidates+=("$root/versions/$candidate/bin/python")
    done < <(pyenv versions --bare 2>/dev/null | grep -E '^3\.1[2-9](\.|$)' | sort -V)
  fi
  if command -v uv >/dev/null 2>&1; then
    candidates+=("$(uv python find --no-python-downloads '>=3.12' 2>/dev/null || true)")
  fi
  for candidate in "${candidates[@]}"; do
    [[ -n $candidate ]] || continue
    if "$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 12))' \
      >/dev/null 2>&1; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return 0
    fi
  done
  _mp_die "Python 3.12 or newer (with its venv module) is needed, as Megatron-Core 0.19 needs it, and none" \
    "was found (python3 here is $(python3 -V 2>&1 || true)); install one or set MP_BASE_PYTHON=/path/to/python3.12"
}

# Makes or refreshes the checkout's .venv for the extras in $1.
_mp_make_venv() {
  local extras=$1 venv=$MP_ROOT/.venv base pins=${MP_CONSTRAINTS:-$MP_ROOT/.ci/constraints.txt}
  local target=$MP_ROOT constraint=() stamp
  [[ -n $extras ]] && target="${MP_ROOT}[${extras}]"
  [[ $pins != none ]] && constraint=(-c "$pins")
  stamp="$extras $(cat "$MP_ROOT/pyproject.toml" "${constraint[@]:1}" | cksum)"
  if grep -qxF -- "$stamp" "$venv/.megatron_patch" 2>/dev/null &&
    _mp_usable "$venv/bin/python" "$extras"; then
    return 0
  fi
  if ! _mp_usable "$venv/bin/python" "" && ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    base=$(mp_find_python) || return 2
    echo "megatron_patch: making $venv with $("$base" -V) (a minute or two, about 5 GB) ..." >&2
    "$base" -m venv --clear "$venv" || return 2
  else
    echo "megatron_patch: bringing $venv up to date ..." >&2
  fi
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${constraint[@]}" \
    -e "$target" || {
    _mp_die "pip could not install $target; see its message above (MP_CONSTRAINTS=none lets pip choose versions)"
    return 2
  }
  printf '%s\n' "$stamp" >>"$venv/.megatron_patch"
}

mp_setup() {
  local extras=${1:-}
  export PYTHONPATH=$MP_ROOT${PYTHONPATH:+:$PYTHONPATH}
  if [[ -n ${MP_PYTHON:-} ]]; then
    _mp_usable "$MP_PYTHON" "$extras" && return 0
    _mp_die "MP_PYTHON=$MP_PYTHON is no Python >= 3.12 with megatron-core and this package's requirements" \
      "(pip install -e '$MP_ROOT${extras:+[$extras]}' into it, or unset MP_PYTHON)"
    return 2
  fi
  if [[ ${MP_SETUP:-auto} != own ]] && _mp_usable python "$extras"; then
    MP_PYTHON=$(command -v python)
  elif [[ ${MP_SETUP:-auto} == never ]]; then
    MP_PYTHON=$MP_ROOT/.venv/bin/python
    if ! _mp_usable "$MP_PYTHON" "$extras"; then
      unset MP_PYTHON
      _mp_die "no Python environment with megatron-core is active and MP_SETUP=never:" \
        "pip install -e '$MP_ROOT${extras:+[$extras]}' under Python 3.12 or newer"
      return 2
    fi
  else
    # One maker at a time, should several shells of this machine start together.
    if command -v flock >/dev/null 2>&1; then
      exec 9<"$MP_ROOT/pyproject.toml" && flock 9
    fi
    _mp_make_venv "$extras" || { exec 9<&-; return 2; }
    exec 9<&-
    MP_PYTHON=$MP_ROOT/.venv/bin/python
  fi
  export MP_PYTHON
}
