# shellcheck shell=bash
# What every launcher shares. Sourced by examples/<family>/*.sh; the logic is megatron_patch/launch.py.
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

launcher_usage() {
  local name=${LAUNCHER##*/}
  cat <<USAGE
Usage: $name --hf-model DIR --data-path PREFIX --output-dir OUT [flags]
       $name                     the embedded demo: a tiny Qwen3, about two minutes on two cores;
                                 the same call again goes on, or extends a finished run

What to train
  --hf-model DIR                 Hugging Face directory: config.json gives every size
  --data-path PREFIX             idxmap without .bin/.idx, or weights and prefixes (Megatron's grammar)
  --output-dir OUT               run directory; the same command again goes on from it
                                 (default runs/<model>)
  --init-from DIR                weights to start from: Hugging Face or Megatron
  --train-tokens N | --train-iters N | --train-samples N | --epochs N
  --seq-length N  --micro-batch-size N  --global-batch-size N
  --lr X  --min-lr X  --warmup-steps N  --precision bf16|fp16|fp32  --fp8 RECIPE
How to split it
  --tp N  --pp N  --vpp N  --cp N  --ep N  --etp N, or --parallel auto
Where to run
  --env single|torchrun|dlc|slurm|mpi    overrides what was detected
  --nnodes N  --node-rank K  --master-addr HOST  --master-port P  --nproc-per-node N
  --device cuda|cpu
What to do
  --dry-run                      show the exact command and the resolved plan; start and write nothing
  --no-check                     skip the check of the plan before the start
  --demo                         the embedded demo, with other flags to change it
  --help                         this text

Every flag of Megatron-Core passes through, and flags given here win over the launcher's defaults
(--tensor-model-parallel-size is --tp, --max-steps is --train-iters, _ equals -, ...).
USAGE
}

mpi_usage() {
  local name=${LAUNCHER##*/}
  cat <<USAGE
Usage: $name --num-nodes N --num-gpus-per-node G [--hostfile F] --hf-model DIR [flags]

Runs ${1##*/} on every node through mpirun, one launcher a node; G processes each.
  --num-nodes N            nodes (default: all that the host file or the Slurm job names)
  --num-gpus-per-node G    processes a node (default: the GPUs found there)
  --hostfile F             one host a line; needed from two nodes on, outside Slurm
  --master-addr HOST       default: the first host      --master-port P   default: 29500
  --dry-run                show the mpirun line, node 0's command and the resolved plan
All other flags are those of ${1##*/}; see its --help.
USAGE
}

# Answers --help, and a call in the positional form of the scripts that this project replaces.
_launcher_answers() {
  local usage=$1 argument
  shift 2
  for argument in "$@"; do
    if [[ $argument == --help || $argument == -h ]]; then
      "$usage" "${LAUNCH_INNER:-}"
      exit 0
    fi
  done
  if (($#)) && [[ $1 != -* ]]; then
    _launcher_python any
    "$MP_PYTHON" -m megatron_patch.training.legacy "${LAUNCHER##*/}" "$@" || true
    exit 2
  fi
}

# Sets MP_PYTHON. "any": an interpreter without Megatron will do, and nothing is installed.
_launcher_python() {
  if [[ $1 == any ]]; then
    if ! MP_SETUP=never mp_setup 2>/dev/null; then
      MP_PYTHON=$(mp_find_python) || exit 2
    fi
  else
    mp_setup || exit 2
  fi
  export PYTHONSAFEPATH=1 # a `data/` or `types.py` where the user stands must not be imported
}

_launcher_exec() {
  local what=$1 entry=$2 argument need=full defaults=()
  shift 2
  while [[ $1 != -- ]]; do
    defaults+=("$1")
    shift
  done
  shift
  for argument in "$@"; do
    [[ $argument == --dry-run || $argument == --dry_run ]] && need=any
  done
  _launcher_python "$need"
  exec "$MP_PYTHON" -m megatron_patch.launch "$what" "$entry" "$LAUNCHER" "${#defaults[@]}" \
    "${defaults[@]}" "$@"
}

launch() {
  local all=("$@")
  while [[ $1 != -- ]]; do shift; done
  _launcher_answers launcher_usage "$@"
  _launcher_exec run "${all[@]}"
}

launch_mpi() {
  local LAUNCH_INNER=$1
  _launcher_answers mpi_usage "${@:2}"
  _launcher_exec mpi "$@"
}
