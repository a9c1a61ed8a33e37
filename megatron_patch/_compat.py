"""The one place that reads an upstream version or adapts a moved upstream call.

Nothing here imports torch or megatron at import time.
"""

from __future__ import annotations

import contextlib
import enum
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_patch.util import RankLost, UserError, atomic_write

#: Inclusive lower and exclusive upper bound of the Megatron-Core line that is tested.
MEGATRON_CORE_MIN = "0.19.2"
MEGATRON_CORE_BELOW = "0.20"
#: Oldest torch; containers ship pre-releases of a version, which count as it.
TORCH_MIN = "2.8"


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, or None; nothing is imported."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def version_in(version: str | None, specifier: str) -> bool:
    """Is ``version`` inside a PEP 440 specifier? A missing one is not; pre-releases count."""
    from packaging.specifiers import SpecifierSet

    return version is not None and SpecifierSet(specifier).contains(version, prereleases=True)


def core_problem() -> str | None:
    """Why the installed Megatron-Core cannot be used, with the remedy; None if it can."""
    wanted = f">={MEGATRON_CORE_MIN},<{MEGATRON_CORE_BELOW}"
    installed = installed_version("megatron-core")
    if version_in(installed, wanted):
        return None
    state = "is not installed" if installed is None else f"{installed} is installed"
    return f"megatron-core {wanted} is needed, {state}: pip install 'megatron-core{wanted}'"


def torch_problem() -> str | None:
    """Why the installed torch cannot be used, with the remedy; None if it can."""
    installed = installed_version("torch")
    if version_in(installed, f">={TORCH_MIN}.dev0"):
        return None
    state = "is not installed" if installed is None else f"{installed} is installed"
    return f"torch >= {TORCH_MIN} is needed, {state}: pip install 'torch>={TORCH_MIN}'"


def torch_cuda_version() -> str | None:
    """CUDA version torch was built for, such as ``13.0``, from its version file; no import."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", text, re.MULTILINE)
    return found.group(1) if found else None


# --- the flags of Megatron's own parser -----------------------------------------------------

#: Generated copy of the flag table, so that help, check and dry run need no Megatron import.
FLAG_SNAPSHOT = Path(__file__).parent / "training" / "megatron_flags.json"


@dataclass(frozen=True, slots=True)
class MegatronFlag:
    """One option of Megatron's argument parser, without its help text.

    Attributes:
        options: Option strings as upstream spells them, the first one canonical.
        dest: Attribute on the namespace.
        action: ``store``, ``store_true``, ``store_false`` or ``boolean_optional``.
        nargs: None, ``"+"``, ``"*"`` or a number.
        type: Name of the converter (``str``, ``int``, ``float``, ``bool``, ``enum`` or the name of
            an upstream function such as ``moe_freq_type``).
        choices: Allowed values; enum members by name.
        default: Default value; enum members by name.
    """

    options: tuple[str, ...]
    dest: str
    action: str
    nargs: int | str | None
    type: str
    choices: tuple[Any, ...] | None
    default: Any


def live_flag_table() -> tuple[MegatronFlag, ...]:
    """The flags of the installed Megatron's parser, read from the parser itself.

    Imports torch and megatron (seconds). Source: ``megatron/training/arguments.py:
    add_megatron_arguments``.
    """
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_megatron_arguments(parser)
    kinds = {
        "_StoreAction": "store",
        "_StoreTrueAction": "store_true",
        "_StoreFalseAction": "store_false",
        "BooleanOptionalAction": "boolean_optional",
    }

    def plain(value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return value.name
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    table = []
    for action in parser._actions:
        kind = kinds.get(type(action).__name__)
        if kind is None:
            raise RuntimeError(
                f"Megatron's {action.option_strings} uses argparse action "
                f"{type(action).__name__}, which _compat.live_flag_table does not know"
            )
        enumerated = action.choices and all(isinstance(c, enum.Enum) for c in action.choices)
        converter = "enum" if enumerated else getattr(action.type, "__name__", "str")
        table.append(
            MegatronFlag(
                options=tuple(action.option_strings),
                dest=action.dest,
                action=kind,
                nargs=action.nargs if kind == "store" else None,
                type=converter if kind == "store" else "bool",
                choices=tuple(plain(list(action.choices))) if action.choices else None,
                default=plain(action.default),
            )
        )
    return tuple(table)


@cache
def flag_table() -> tuple[MegatronFlag, ...]:
    """Megatron's flags: the snapshot where it is of the installed version, else the live parser.

    Without an installed Megatron (a laptop that only runs ``check``) the snapshot is used as is.
    """
    snapshot = json.loads(FLAG_SNAPSHOT.read_text(encoding="utf-8"))
    installed = installed_version("megatron-core")
    if installed is not None and installed != snapshot["megatron_core"]:
        return live_flag_table()
    return tuple(
        MegatronFlag(
            options=tuple(row["options"]),
            dest=row["dest"],
            action=row["action"],
            nargs=row.get("nargs"),
            type=row.get("type", "bool"),
            choices=tuple(row["choices"]) if row.get("choices") else None,
            default=row.get("default"),
        )
        for row in snapshot["flags"]
    )


def write_flag_snapshot() -> int:
    """Regenerate ``training/megatron_flags.json`` from the installed Megatron; return the count."""
    rows = []
    for flag in live_flag_table():
        row: dict[str, Any] = {"options": flag.options, "dest": flag.dest, "action": flag.action}
        if flag.nargs is not None:
            row["nargs"] = flag.nargs
        if flag.action == "store":
            row["type"] = flag.type
        if flag.choices is not None:
            row["choices"] = flag.choices
        if flag.default is not None:
            row["default"] = flag.default
        rows.append(json.dumps(row))
    version = json.dumps(installed_version("megatron-core"))
    body = ",\n".join(rows)
    atomic_write(FLAG_SNAPSHOT, f'{{"megatron_core": {version}, "flags": [\n{body}\n]}}\n')
    return len(rows)


# --- moved upstream calls -----------------------------------------------------------------------


#: Upstream's message -> ours, for errors whose own advice is wrong or comes as a traceback.
_EXPLAINED: tuple[tuple[str, str], ...] = (
    (
        r"\(TP, PP\) mismatch after resume \(\((\d+), (\d+)\) vs \((\d+), (\d+)\) from checkpoint\)"
        r".*sharding type (\w+)",
        r"--tp \1 --pp \2, but the checkpoint was saved at --tp \3 --pp \4 with optimizer states "
        r"in the format \5, which loads at that layout only. Go on at --tp \3 --pp \4 with "
        r"--dist-ckpt-optim-fully-reshardable (on by default here): the next checkpoint loads at "
        r"any layout. Or start from the weights alone, --init-from with a new --output-dir",
    ),
    (
        r"class input value (\S+) and checkpoint ?value (\S+) for (.+) do not match",
        r"the checkpoint's \3 is \2, this command line's is \1 (both in sequences): drop "
        r"--no-override-opt-param-scheduler to go on with this command line's schedule, or name "
        r"--use-checkpoint-opt-param-scheduler to keep the checkpoint's",
    ),
    (
        r"Rank (\d+), node (\S+), .*iteration (\d+): Unexpected result (\S+) \(message='(.+?)'\)",
        r"step \3 gave \4 on rank \1 (node \2: \5). Usual reasons are a learning rate that is too "
        r"high or damaged data; with --output-dir the step is saved and can be run again",
    ),
    (
        r"Global shape mismatch for loaded \((?:torch\.Size\()?(.+?)\)*\) and expected "
        r"\(\((.+?),?\)\) tensor for key (\S+)",
        r"the checkpoint is of another model: its \3 is \1, this model's is [\2]. Check --hf-model "
        r"and the directory the run starts from; nothing was loaded",
    ),
)


#: What a rank hears when another one has gone: gloo's, NCCL's and the store's words.
_GONE = re.compile(
    r"gloo/transport.*?((?:Connection (?:closed|reset) by peer|Broken pipe).{0,60})"
    r"|(remote process exited or there was a network error)|(ncclRemoteError)"
    r"|(failed to recv, got 0 bytes|recvValue failed|sendBytes failed)",
    re.DOTALL,
)


def rank_gone(message: str) -> str | None:
    """In which words a collective says that another rank has gone; None where it says not."""
    found = _GONE.search(message)
    if found is None:
        return None
    return next(group for group in found.groups() if group).partition("\n")[0]


def explain(message: str) -> str | None:
    """An upstream error in the user's words, or None where there is no need."""
    for pattern, words in _EXPLAINED:
        found = re.search(pattern, message, re.DOTALL)
        if found:
            return found.expand(words)
    return None


class CheckpointError(Exception):
    """Reading or writing a checkpoint failed somewhere; holds the first cause."""


@contextlib.contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Inside it these packages cannot be imported; those that are imported already stay.

    Megatron-Core imports optional packages where they are installed, needed or not:
    flash-linear-attention and transformers alone take as long as the rest of it.
    """
    held = [name for name in packages if name not in sys.modules]
    for name in held:
        sys.modules[name] = None  # type: ignore[assignment]  # Python's way to say: absent
    try:
        yield
    finally:
        for name in held:
            del sys.modules[name]


def compile_again() -> None:
    """Functions that were told to run as they stand by `pretrain` are compiled from here on."""
    import torch

    torch.compiler.set_stance("default")


def pretrain(
    args: Any,
    model_config: Any,
    datasets: Callable[..., Any],
    forward_step: Callable[..., Any],
    *,
    warm_up: bool = True,
) -> None:
    """Upstream's `pretrain`, whose positional order moved in the last minor versions.

    Args:
        args: validated Megatron arguments.
        model_config: what `training/model.py: model_config` returns.
        datasets: dataset provider.
        forward_step: forward step.
        warm_up: let upstream compile its fused functions beforehand. It does so for a bias and a
            dropout that few models have: seconds for code that never runs. False: nothing is
            compiled until `compile_again`.

    Raises:
        UserError: what `explain` has words for.
        CheckpointError: another failure of reading or writing a checkpoint, on every rank.
    """
    from megatron.core.enums import ModelType
    from megatron.training import pretrain as upstream
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from torch.distributed.checkpoint.api import CheckpointException

    if not warm_up:
        import torch

        torch.compiler.set_stance("force_eager")
    try:
        upstream(
            cfg_container=pretrain_cfg_container_from_args(args, model_config),
            train_valid_test_dataset_provider=datasets,
            model_type=ModelType.encoder_or_decoder,
            forward_step_func=forward_step,
        )
    except (RuntimeError, AssertionError, CheckpointException) as error:
        words = explain(str(error))
        if words is not None:
            raise UserError(words) from error
        if gone := rank_gone(str(error)):
            raise RankLost(f"this rank has lost its connection to another one ({gone})") from error
        if isinstance(error, CheckpointException):
            causes = [cause for cause, _ in error.failures.values()]
            for cause in causes:
                if isinstance(cause, UserError):
                    raise cause from error
            if not causes:  # another rank's failure, which only the coordinator has
                raise CheckpointError("a rank failed; its own line says why") from error
            raise CheckpointError(f"{type(causes[0]).__name__}: {causes[0]}") from error
        raise


def without_ranks(args: Any) -> list[int]:
    """Give upstream's data code its global arguments and tokenizer, in a process that is no rank.

    Args:
        args: what it reads of validated arguments.

    Returns:
        Samples that a run asks for of training, validation and test.
    """
    from megatron.training import global_vars, training

    global_vars.set_args(args)
    global_vars.rebuild_tokenizer(args)
    return list(training.get_train_valid_test_num_samples())


def main(argv: list[str]) -> int:
    """``python -m megatron_patch._compat --write-flags`` regenerates the flag snapshot."""
    if argv != ["--write-flags"]:
        print("usage: python -m megatron_patch._compat --write-flags", file=sys.stderr)
        return 2
    print(f"{FLAG_SNAPSHOT}: {write_flag_snapshot()} flags")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


def import_model_code(model_type: str) -> None:
    """Import transformers' code of a model such that it runs where there is no GPU.

    With flash-linear-attention installed, transformers 5 takes its kernels whatever the device,
    and decides so while the code is imported.
    """
    import importlib
    import sys

    import torch

    name = f"transformers.models.{model_type}.modeling_{model_type}"
    if torch.cuda.is_available() or name in sys.modules:
        return
    held = {key: module for key, module in sys.modules.items() if key == "fla"}
    sys.modules["fla"] = None  # type: ignore[assignment]  # Python's way to say: absent
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        pass  # transformers says itself what it does not know
    finally:
        del sys.modules["fla"]
        sys.modules.update(held)
