"""Old positional calls, answered with the equivalent named command. Nothing is run.

The launchers that this project replaces took 22 to 27 positional values. Their order differs by
script, and several scripts share a name, so a call is recognised by its values as well: each known
order is scored by how many values fit their place. Facts about the order of arguments come from
``examples/*/run_*.sh`` of Pai-Megatron-Patch.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_BASE = "ENV SIZE MBS GBS LR MIN_LR SEQ PAD PR"
_OLD = "ENV PATCH SIZE MBS GBS LR MIN_LR SEQ PAD EXTRA_VOCAB PR TP PP AC DO FL SP TE"
_END = "AC OFFLOAD SAVE_INTERVAL DATA VALID INIT TOKENS WARMUP_TOKENS OUT"
_ITERS = "AC OFFLOAD SAVE_INTERVAL DATA VALID INIT ITERS WARMUP_ITERS OUT"


@dataclass(frozen=True, slots=True)
class Order:
    """One order of arguments.

    Attributes:
        scripts: ``folder/file`` of the scripts that use it, without ``.sh``.
        names: The arguments in order.
    """

    scripts: tuple[str, ...]
    names: tuple[str, ...]


def _order(names: str, *scripts: str) -> Order:
    return Order(scripts, tuple(names.split()))


ORDERS: tuple[Order, ...] = (
    _order(
        f"{_BASE} TP PP CP ETP EP SP DO FL SFT {_END}",
        "qwen3/run_mcore_qwen3",
        "qwen3_next/run_mcore_qwen3",
        "qwen2/run_mcore_qwen2_moe",
        "deepseek_v3/run_mcore_deepseek",
    ),
    _order(
        f"{_BASE} TP PP CP EP SP DO FL SFT {_END}",
        "qwen2/run_mcore_qwen",
        "deepseek_v2/run_mcore_deepseek",
        "mistral/run_mcore_mistral",
    ),
    _order(
        f"{_BASE} TP PP CP SP DO FL SFT {_END}",
        "qwen2_5/run_mcore_qwen",
        "llama3_1/run_mcore_llama3_1",
        "qwq/run_mcore_qwen",
        "llama2/run_mcore_llama2_70b",
    ),
    _order(f"{_BASE} TP PP CP ETP EP SP DO SFT {_END}", "moonlight/run_mcore_moonlight"),
    _order(f"{_BASE} TP PP CP ETP EP SP DO FL {_ITERS}", "qwen3_vl/run_mcore_qwen"),
    _order(
        f"{_BASE} TP PP CP SP DO FL {_ITERS}",
        "qwen2_5_vl/run_mcore_qwen",
        "qwen2_vl/run_mcore_qwen",
    ),
    _order(f"{_BASE} TP PP CP DO FL {_ITERS}", "llava_mcore/run_mcore_llava"),
    _order(
        f"{_OLD} MOE SAVE_INTERVAL DATA INIT TOKENS WARMUP_TOKENS OUT",
        "llama3/run_pretrain_mcore_llama",
        "llama2/run_pretrain_mcore_llama",
        "qwen1_5/run_pretrain_mcore_qwen",
    ),
    _order(
        f"{_OLD} SAVE_INTERVAL DATA INIT TOKENS WARMUP_TOKENS OUT",
        "llama3/run_pretrain_megatron_llama",
        "llama2/run_pretrain_megatron_llama",
        "qwen/run_pretrain_megatron_qwen",
        "qwen1_5/run_pretrain_megatron_qwen",
        "codellama/run_pretrain_megatron_llama",
    ),
    _order(
        "ENV SIZE MBS GBS LR MIN_LR SEQ PAD PR TP PP EP AC DO FL SP TE SAVE_INTERVAL DATA INIT "
        "TOKENS WARMUP_TOKENS OUT",
        "llama3/run_pretrain_llama_70b",
        "llama3/mpi_run_pretrain_llama3",
    ),
    _order(
        "ENV SIZE MBS GBS LR MIN_LR SEQ PAD EXTRA_VOCAB PR TP PP AC DO FL SP TE MOE "
        "SAVE_INTERVAL DATA VALID INIT ITERS WARMUP_ITERS OUT",
        "llama3/run_finetune_mcore_llama_withGA",
    ),
    _order(
        f"{_OLD} MOE SAVE_INTERVAL DATA VALID INIT ITERS WARMUP_ITERS OUT",
        "llama2/run_finetune_mcore_llama_withGA",
    ),
    _order(
        f"{_OLD} MOE EP SAVE_INTERVAL DATA VALID INIT ITERS WARMUP_ITERS OUT",
        "qwen1_5/run_finetune_mcore_qwen_withGA",
    ),
    _order(
        f"{_OLD} SAVE_INTERVAL DATA VALID INIT ITERS WARMUP_ITERS OUT",
        "llama3/run_finetune_megatron_llama_withGA",
        "llama2/run_finetune_megatron_llama_withGA",
        "qwen/run_finetune_megatron_qwen_withGA",
        "qwen1_5/run_finetune_megatron_qwen_withGA",
        "codellama/run_finetune_megatron_llama_withGA",
    ),
    _order(
        "ENV PATCH SIZE MBS LR MIN_LR SEQ PAD EXTRA_VOCAB PR TP PP AC DO FL SP TE DATA VALID INIT "
        "EPOCHS OUT",
        "llama2/run_finetune_megatron_llama",
        "qwen/run_finetune_megatron_qwen",
        "qwen1_5/run_finetune_megatron_qwen",
        "codellama/run_finetune_megatron_llama",
    ),
)

_WHOLE = r"\d+"
_NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"
_SWITCH = r"true|false"
_PATH = r"(?!(true|false|bf16|fp16|fp8)$)(?!\d+$).*\S.*"

#: What a value in a place looks like.
_LOOKS: dict[str, str] = {
    "ENV": r"dsw|dlc",
    "SIZE": r"A?\d+(\.\d+)?[BbMm].*|A\d+.*",
    "PR": r"bf16|fp16|fp8|fp32",
    "AC": r"full|sel|none|offload|false|true",
    "OFFLOAD": rf"{_SWITCH}|{_NUMBER}|auto",
    "LR": _NUMBER,
    "MIN_LR": _NUMBER,
    "EPOCHS": _NUMBER,
    "DATA": _PATH,
    "VALID": _PATH,
    "INIT": _PATH,
    "OUT": _PATH,
    "PATCH": _PATH,
    "MOE": rf"{_SWITCH}|\d+",
    **dict.fromkeys(("SP", "DO", "FL", "SFT", "TE"), _SWITCH),
}


def _fits(name: str, value: str) -> bool:
    return re.fullmatch(_LOOKS.get(name, _WHOLE), value) is not None


def _wanted(program: str | None) -> list[str]:
    """Parts of the path of a script, without ``.sh``."""
    return re.sub(r"\.sh$", "", program or "").split("/")


def _orders(program: str | None) -> tuple[str, tuple[Order, ...]]:
    """The family of a script and the orders that it may have been written in.

    Those of its folder; where that is not known those of its name; else all.
    """
    *above, name = _wanted(program)
    family = above[-1] if above else ""
    for fitting in (f"^{re.escape(family)}/", f"/{re.escape(name)}$"):
        found = tuple(o for o in ORDERS if any(re.search(fitting, s) for s in o.scripts))
        if found:
            return family, found
    return "", ORDERS


def _script(order: Order, program: str | None) -> str:
    """The script of an order that a call means: of the same family where there is one."""
    family, _ = _orders(program)
    return next((s for s in order.scripts if s.startswith(f"{family}/")), order.scripts[0])


def recognise(argv: Sequence[str], program: str | None = None) -> Order | None:
    """The order that ``argv`` was written for, or None where it is no old call.

    Args:
        argv: Positional values.
        program: Name of the script that was called, with or without folder and ``.sh``.
    """
    if not argv or argv[0] not in ("dsw", "dlc"):
        return None
    wanted = _wanted(program)

    def score(order: Order) -> tuple[float, bool, bool]:
        fitting = sum(_fits(n, v) for n, v in zip(order.names, argv, strict=False))
        surplus = max(0, len(argv) - len(order.names))
        tails = [s.split("/")[-1] for s in order.scripts]
        named = wanted[-1] in tails
        in_folder = "/".join(wanted[-2:]) in order.scripts
        complete = len(argv) == len(order.names)
        return (fitting - 2 * surplus + 1.5 * named + 1.5 * in_folder, complete, named)

    return max(_orders(program)[1], key=score)


@dataclass(frozen=True, slots=True)
class Translation:
    """Named flags of an old call.

    Attributes:
        flags: Tokens of the command, one list a flag.
        remarks: What has no counterpart, was computed or needs the user.
    """

    flags: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Call:
    """An old call being translated: its values and environment, and what came out so far."""

    given: Mapping[str, str]
    environ: Mapping[str, str]
    flags: list[tuple[str, ...]]
    remarks: list[str]


def translate(
    order: Order,
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    program: str | None = None,
) -> Translation:
    """Turn the values of an old call into named flags.

    Args:
        order: From :func:`recognise`.
        argv: Positional values; the last ones may be missing.
        environ: Environment, in which the old scripts took further switches.
        program: Name of the script that was called.
    """
    given = dict(zip(order.names, argv, strict=False))
    call = _Call(given, os.environ if environ is None else environ, [], [])
    flags, remarks = call.flags, call.remarks
    folder = _script(order, program).split("/")[0]
    flags.append(("--hf-model", f"/path/to/{folder}-{given.get('SIZE', 'SIZE')}"))
    remarks.append(
        "--hf-model: the Hugging Face directory of the model; its config.json gives every size "
        f"that {given.get('SIZE', 'the model size')} stood for"
    )
    for name, flag in (
        ("MBS", "--micro-batch-size"),
        ("GBS", "--global-batch-size"),
        ("LR", "--lr"),
        ("MIN_LR", "--min-lr"),
        ("SEQ", "--seq-length"),
        ("TP", "--tp"),
        ("PP", "--pp"),
        ("CP", "--cp"),
        ("EP", "--ep"),
        ("ETP", "--etp"),
        ("SAVE_INTERVAL", "--save-interval"),
        ("EPOCHS", "--epochs"),
        ("OUT", "--output-dir"),
    ):
        value = given.get(name)
        if value is None or (name in ("CP", "EP", "ETP") and value == "1"):
            continue
        flags.append((flag, value))
    if "SFT" not in order.names and "finetune" in order.scripts[0]:
        _fine_tuning("true", call)
    for name in order.names:
        reader = _READERS.get(name)
        if reader and name in given:
            reader(given[name], call)
    _environment(call)
    gone = [
        f"{name} {given[name]}" for name in ("PAD", "EXTRA_VOCAB", "PATCH", "TE") if name in given
    ]
    if gone:
        remarks.append(
            f"no longer needed: {', '.join(gone)} (padding, vocabulary and paths follow from the "
            "config and the installation)"
        )
    if given.get("SP") == "false" and given.get("TP", "1") != "1":
        flags.append(("--no-sequence-parallel",))
    for name, value in given.items():
        if not _fits(name, value):
            remarks.append(f"{value!r} stands where {name} was expected: check the command")
    missing = order.names[len(argv) :]
    if missing:
        remarks.append(f"the call ends before {', '.join(missing)}: add what you need of them")
    surplus = list(argv[len(order.names) :])
    if surplus:
        remarks.append(f"not understood: {' '.join(surplus)}")
    return Translation(tuple(flags), tuple(remarks))


_Reader = Callable[[str, _Call], None]


def _precision(value: str, call: _Call) -> None:
    if value == "fp8":
        call.flags.append(("--fp8", "blockwise"))
        call.remarks.append("fp8: blockwise is for H100/H200; use --fp8 mxfp8 on B200")
    else:
        call.flags.append(("--precision", value))


def _checkpointing(value: str, call: _Call) -> None:
    layers = call.environ.get("MP_AC_LAYERS", "1")
    if value == "full":
        call.flags.extend(
            [
                ("--recompute-granularity", "full"),
                ("--recompute-method", "uniform"),
                ("--recompute-num-layers", layers),
            ]
        )
    elif value == "sel":
        call.flags.append(("--recompute-granularity", "selective"))
    elif value == "offload":
        call.flags.append(("--cpu-offloading-num-layers", layers))


def _offload(value: str, call: _Call) -> None:
    if value in ("false", "0"):
        return
    call.flags.append(("--cpu-offloading-optimizer",))
    if re.fullmatch(_NUMBER, value) and float(value) != 1:
        call.flags.append(("--optimizer-offload-fraction", value))


def _data(value: str, call: _Call) -> None:
    call.flags.append(("--data-path", *value.split()))
    if call.environ.get("MP_DATASET_TYPE") == "raw" and call.given.get("SFT") != "true":
        call.remarks.append(
            "MP_DATASET_TYPE=raw tokenised while training; convert the data to .bin/.idx first "
            "(megatron-patch preprocess) and name its prefix"
        )


def _validation(value: str, call: _Call) -> None:
    if value == "none":
        return
    call.remarks.append(
        f"validation data {value}: the old script read it for raw data only; to evaluate, use "
        "--train-data-path and --valid-data-path instead of --data-path"
    )


def _initial(value: str, call: _Call) -> None:
    if value != "none":
        call.flags.append(("--init-from", value))


def _tokens(value: str, call: _Call) -> None:
    call.flags.append(
        ("--train-iters" if call.given.get("SFT") == "true" else "--train-tokens", value)
    )


def _warmup_tokens(value: str, call: _Call) -> None:
    if call.given.get("SFT") == "true":
        call.flags.append(("--warmup-steps", value))
        return
    try:
        batch = int(call.given["GBS"]) * int(call.given["SEQ"])
        steps = int(value) // batch
    except (KeyError, ValueError, ZeroDivisionError):
        call.remarks.append(
            f"warm-up of {value} tokens: divide by tokens a step for --warmup-steps"
        )
        return
    call.flags.append(("--warmup-steps", str(steps)))
    call.remarks.append(f"--warmup-steps {steps}: {value} tokens at {batch} a step")


def _flash(value: str, call: _Call) -> None:
    if value == "false":
        call.flags.append(("--attention-backend", "fused"))


def _distributed(value: str, call: _Call) -> None:
    if value == "false" and call.given.get("OFFLOAD", "false") == "false":
        call.flags.append(("--no-use-distributed-optimizer",))


def _fine_tuning(value: str, call: _Call) -> None:
    if value == "true":
        call.flags.append(("--sft",))
        call.remarks.append(
            "--sft: the call fine-tunes (SFT true), so its length and warm-up were iterations; "
            "--data-path takes the chats themselves (.jsonl, .json, .parquet), which the run packs"
        )


_READERS: dict[str, _Reader] = {
    "PR": _precision,
    "AC": _checkpointing,
    "OFFLOAD": _offload,
    "DATA": _data,
    "VALID": _validation,
    "INIT": _initial,
    "TOKENS": _tokens,
    "WARMUP_TOKENS": _warmup_tokens,
    "ITERS": lambda v, call: call.flags.append(("--train-iters", v)),
    "WARMUP_ITERS": lambda v, call: call.flags.append(("--warmup-steps", v)),
    "FL": _flash,
    "DO": _distributed,
    "SFT": _fine_tuning,
}


def _environment(call: _Call) -> None:
    """Switches that the old scripts read from exported variables."""
    for variable, flag in (
        ("MP_PP0_LAYERS", "--decoder-first-pipeline-num-layers"),
        ("MP_VP", "--num-layers-per-virtual-pipeline-stage"),
    ):
        if call.environ.get(variable):
            call.flags.append((flag, call.environ[variable]))
            call.remarks.append(
                f"{flag}: from {variable} in your environment, which is not read now"
            )


#: Variables that the old scripts read -> what to do instead.
_VARIABLES: dict[str, str] = {
    "MP_VP": "use --num-layers-per-virtual-pipeline-stage",
    "MP_PP0_LAYERS": "use --decoder-first-pipeline-num-layers",
    "MP_AC_LAYERS": "use --recompute-num-layers (or --cpu-offloading-num-layers)",
    "MP_SFT_PACKING": "--sft packs, and --no-packing ends that",
    "MP_DATASET_TYPE": "--sft reads chats as they are, pretraining reads .bin/.idx "
    "(megatron-patch preprocess)",
}


def unread(environ: Mapping[str, str]) -> list[str]:
    """A sentence for every variable of the old scripts that is set, and that nobody reads now."""
    return [
        f"{name}={environ[name]} in the environment is not read; {instead}"
        for name, instead in _VARIABLES.items()
        if environ.get(name)
    ]


def command(translation: Translation, program: str | None = None) -> str:
    """The named command as shell text, one flag a line."""
    script = re.sub(r"\.sh$", "", program) + ".sh" if program else None
    head = f"bash {shlex.quote(script)}" if script else "megatron-patch pretrain"
    lines = [" ".join(map(shlex.quote, tokens)) for tokens in translation.flags]
    return " \\\n  ".join([head, *lines])


def answer(
    argv: Sequence[str], program: str | None = None, environ: Mapping[str, str] | None = None
) -> str:
    """What to tell a user who gave positional values."""
    order = recognise(argv, program)
    if order is None:
        return f"{argv[0]!r} is not a flag: every setting is named, see --help"
    counts = sorted({len(o.names) for o in _orders(program)[1]})
    script = _script(order, program)
    if len(argv) not in counts and not all(map(_fits, order.names, argv)):
        # One too few somewhere in the middle: everything behind it stands in a wrong place.
        return (
            f"positional arguments are not taken any more, and {len(argv)} values fit no order of "
            f"the old scripts ({script}.sh and its like took {' or '.join(map(str, counts))}): "
            f"{' '.join(order.names)}. Nothing was started. Every setting is named now, see "
            "--help; give the complete old call to see it with named flags"
        )
    translation = translate(order, argv, environ, program)
    remarks = "".join(f"\n  - {remark}" for remark in translation.remarks)
    return (
        f"positional arguments are not taken any more ({len(argv)} given, read in the order of "
        f"{script}.sh). Nothing was started. The same run with named flags:\n\n"
        f"{command(translation, program)}\n\nPlease check:{remarks}"
    )


def main(argv: list[str]) -> int:
    """``python -m megatron_patch.training.legacy SCRIPT VALUE ...``: print the answer; always 2."""
    if len(argv) < 2:
        print("usage: python -m megatron_patch.training.legacy SCRIPT VALUE ...", file=sys.stderr)
        return 2
    print(f"error: {answer(argv[1:], argv[0])}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
