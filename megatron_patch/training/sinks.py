"""Where a step's figures go beside `metrics.jsonl`: TensorBoard, and W&B or SwanLab if asked.

Rank 0 writes them, whichever rank has the loss. A tracker that fails in the middle of a run (no
network, say) is left out from then on, and said so: training goes on.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_patch.util import UserError, atomic_write

if TYPE_CHECKING:
    from megatron_patch.training.args import Plan

#: Flag -> package and extra of this library that brings it.
PACKAGES = {"--wandb-project": "wandb", "--swanlab-project": "swanlab"}


def missing(plan: Plan) -> list[str]:
    """Refusals about trackers whose package is not installed."""
    from importlib.util import find_spec

    asked = {
        "--wandb-project": plan.values["wandb_project"],
        "--swanlab-project": plan.own.swanlab_project,
    }
    return [
        f"{flag} {asked[flag]} needs the package {package}: pip install "
        f"'megatron-patch[{package}]' (or {package}), or leave the flag out"
        for flag, package in PACKAGES.items()
        if asked[flag] and find_spec(package) is None
    ]


class Sink(Protocol):
    """Takes the figures of steps."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers by name, after a step."""

    def close(self) -> None:
        """The run ends."""


class Board:
    """TensorBoard events; after a restart the steps that come again replace the old ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers by name, after a step."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """The run ends."""
        if self._writer is not None:
            self._writer.close()


class Tracker:
    """A W&B or SwanLab run, which later starts of the same run directory go on with.

    Args:
        start: begins it.
        log: takes values and the step.
        finish: ends it.
    """

    def __init__(
        self,
        start: Callable[[], Any],
        log: Callable[[dict[str, float], int], Any],
        finish: Callable[[], Any],
    ) -> None:
        start()
        self._log, self._finish = log, finish

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers by name, after a step."""
        self._log(dict(values), step)

    def close(self) -> None:
        """The run ends."""
        self._finish()


def _id(file: Path) -> str:
    """The tracker's name for this run directory, made at the first start."""
    if file.exists():
        return file.read_text(encoding="utf-8").strip()
    new = secrets.token_hex(11)[:21]  # as long as SwanLab's
    atomic_write(file, new)
    return new


def _wandb(plan: Plan, output: Path, config: dict[str, Any]) -> Sink:
    import wandb

    values = plan.values
    folder = Path(values["wandb_save_dir"] or output)
    folder.mkdir(parents=True, exist_ok=True)
    start = functools.partial(
        wandb.init,
        project=values["wandb_project"],
        name=values["wandb_exp_name"] or output.resolve().name,
        entity=values["wandb_entity"] or None,
        dir=str(folder),
        id=_id(output / "logs" / "wandb_run"),
        resume="allow",
        config=config,
    )
    return Tracker(start, lambda found, step: wandb.log(found, step=step), wandb.finish)


def _swanlab(plan: Plan, output: Path, config: dict[str, Any]) -> Sink:
    import swanlab

    start = functools.partial(
        swanlab.init,
        project=plan.own.swanlab_project,
        experiment_name=plan.own.swanlab_exp_name or output.resolve().name,
        logdir=str(output / "swanlab"),
        id=_id(output / "logs" / "swanlab_run"),
        resume="allow",
        config=config,
    )
    return Tracker(start, lambda found, step: swanlab.log(found, step=step), swanlab.finish)


def sinks(plan: Plan, output: Path) -> list[Sink]:
    """Everything that the figures of a run go to, on rank 0.

    Raises:
        UserError: a tracker cannot begin (no login, no network and not offline).
    """
    found: list[Sink] = []
    if plan.values["tensorboard_dir"]:
        found.append(Board(Path(plan.values["tensorboard_dir"])))
    config = plan.as_dict()["values"]
    for flag, asked, begin in (
        ("--wandb-project", plan.values["wandb_project"], _wandb),
        ("--swanlab-project", plan.own.swanlab_project, _swanlab),
    ):
        if not asked:
            continue
        try:
            found.append(begin(plan, output, config))
        except Exception as problem:  # of many kinds, the package's own
            words = str(problem).strip().partition("\n")[0] or type(problem).__name__
            raise UserError(
                f"{flag} {asked}: {PACKAGES[flag]} cannot begin: {words}. Log in, use its offline "
                f"mode ({'WANDB_MODE' if flag == '--wandb-project' else 'SWANLAB_MODE'}=offline), "
                "or leave the flag out"
            ) from problem
    return found


def scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a record; those of layers one by one.

    Args:
        record: as it stands in `metrics.jsonl`.
    """
    for name, value in record.items():
        if name in ("iteration", "moe_layers"):
            continue
        if isinstance(value, list):
            layers = record.get("moe_layers", range(1, len(value) + 1))
            for layer, item in zip(layers, value, strict=False):
                if isinstance(item, list):
                    yield f"{name}/layer {layer} low", item[0]
                    yield f"{name}/layer {layer} high", item[1]
                else:
                    yield f"{name}/layer {layer}", item
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value
