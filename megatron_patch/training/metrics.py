"""Raw numbers of every step: `metrics.jsonl` while training, `loss.png` from it afterwards.

Upstream's log line averages (the second line after every start is the mean of two steps); these
are the step's own values. Records are only ever appended: after a restart a step may stand twice,
and the last record of a step counts.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import orjson

from megatron_patch.util import UserError, atomic_write

FILE = "metrics.jsonl"


class Recorder:
    """Appends one record a step on global rank 0; the other ranks take part in its collectives.

    Args:
        path: the file, or None to record nothing.
        rank: global rank.
        world_size: number of ranks.
        pipeline: pipeline-parallel size; with more than one stage the loss is on the last rank
            only and is sent to rank 0.
        echo: prints a line a step on rank 0, for runs whose last rank is on another node.
        first_step: called on rank 0 when the first step of this process is done.
        describe: further values of a step, which is counted from 0; they win.
        each_step: called on rank 0 after every step.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        rank: int,
        world_size: int,
        pipeline: int,
        echo: bool = False,
        first_step: Callable[[], None] | None = None,
        describe: Callable[[int], dict[str, Any]] | None = None,
        each_step: Callable[[], None] | None = None,
    ) -> None:
        self._first_step, self._each_step = first_step, each_step
        self._describe = describe
        self.rank, self.world_size, self.pipeline, self.echo = rank, world_size, pipeline, echo
        #: Last step of this process, None before the first.
        self.iteration: int | None = None
        #: What to say of this step's micro-batches should its loss be no number.
        self.suspects: list[Callable[[], str]] = []
        #: Evaluation -> step of its last record.
        self._evaluated: dict[str, int] = {}
        self._file: IO[bytes] | None = None
        if path is not None and rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            _drop_torn_line(path)
            self._file = open(path, "ab")  # noqa: SIM115 - lives as long as the run
        self._last = time.perf_counter()

    def _to_rank_0(self, losses: dict[str, Any]) -> dict[str, float]:
        """Values of the last stage, on rank 0 too."""
        values = {name: _mean(value) for name, value in losses.items()}
        if self.pipeline == 1:
            return values
        import torch

        box: list[Any] = [values]
        torch.distributed.broadcast_object_list(box, src=self.world_size - 1)
        return dict(box[0])

    def step(self, iteration: int, losses: dict[str, Any], **extra: Any) -> None:
        """Record a training step.

        Args:
            iteration: steps done, this one included.
            losses: name -> loss of this step (scalar tensor or [sum, count]).
            **extra: further values, None is left out.

        Raises:
            UserError: the loss or the gradient norm is no number. Upstream saves after this.
        """
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        first, self.iteration = self.iteration is None, iteration
        values = self._to_rank_0(losses)
        self._write_step(iteration, values, seconds, first, extra)
        suspects, self.suspects = self.suspects, []
        norm = extra.get("grad_norm")
        if not extra.get("skipped") and not all(
            map(math.isfinite, [*values.values(), 0.0 if norm is None else norm])
        ):
            found = [*(f"{name} is {value}" for name, value in values.items())]
            found += [f"the gradient norm is {norm}"] if norm is not None else []
            words = ", ".join(found + [text for text in (say() for say in suspects) if text])
            raise UserError(
                f"step {iteration}: {words}. Nothing of this step was saved; the same command goes "
                "on from the last checkpoint"
            )

    def _write_step(
        self,
        iteration: int,
        values: dict[str, float],
        seconds: float,
        first: bool,
        extra: dict[str, Any],
    ) -> None:
        if self.rank != 0:
            return
        if first and self._first_step is not None:
            self._first_step()
        if self._each_step is not None:
            self._each_step()
        if self._describe is not None:
            extra = extra | self._describe(iteration - 1)
        record = {"iteration": iteration, **values, "seconds": round(seconds, 6), **extra}
        tokens = extra.get("tokens")
        if tokens:
            record["tokens_per_second"] = round(tokens / seconds, 1)
            record["tokens_per_second_per_rank"] = round(tokens / seconds / self.world_size, 1)
        self._write(record)
        if self.echo:
            print(f" iteration {iteration} | {_text(values)} | {seconds * 1000:.1f} ms", flush=True)

    def evaluation(self, iteration: int, name: str, losses: dict[str, Any]) -> None:
        """Record an evaluation."""
        values = self._to_rank_0(losses)
        # Upstream evaluates after the last step once more where that step has just been evaluated.
        again = self._evaluated.get(name) == iteration
        self._evaluated[name] = iteration
        if self.rank == 0 and not again:
            self._write({"iteration": iteration, "evaluation": name, **values})
            if self.echo:
                print(f" iteration {iteration} | {name} | {_text(values)}", flush=True)
        self.suspects.clear()
        self._last = time.perf_counter()

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        clean = {
            k: (str(v) if isinstance(v, float) and not math.isfinite(v) else v)
            for k, v in record.items()
            if v is not None
        }
        self._file.write(orjson.dumps(clean) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _text(values: dict[str, float]) -> str:
    return " | ".join(f"{name}: {value:.6E}" for name, value in values.items())


def _drop_torn_line(path: Path) -> None:
    """Cut off what a killed writer left of its last record, so that the next one is not glued on.

    A line break is the last byte of a record, so nothing whole is lost.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return
    with open(path, "r+b") as file:
        file.seek(max(0, size - (1 << 20)))  # a record is far shorter
        end = file.tell() + file.read().rfind(b"\n") + 1
        if end < size:
            file.truncate(end)


def _mean(value: Any) -> float:
    if hasattr(value, "numel"):
        if value.numel() == 2:
            total, count = value.tolist()
            return float(total / max(count, 1))
        return float(value.item())
    return float(value)


#: The recorder of this process; set by the entry point, used by the patch in `patches/`.
RECORDER: Recorder | None = None


def log_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap upstream's `training_log`: record first, then let it log as ever."""
    import inspect

    signature = inspect.signature(original)

    def training_log(*args: Any, **kwargs: Any) -> Any:
        if RECORDER is not None:
            _record(RECORDER, signature.bind(*args, **kwargs).arguments)
        return original(*args, **kwargs)

    return training_log


def _record(recorder: Recorder, bound: dict[str, Any]) -> None:
    import torch
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.training import get_args

    args = get_args()
    batch = get_current_global_batch_size()
    tokens = batch * args.seq_length
    grad_norm = bound["grad_norm"]
    recorder.step(
        bound["iteration"],
        bound["loss_dict"] | (further_token_losses() if args.mtp_num_layers else {}),
        consumed_samples=args.consumed_train_samples,
        tokens=tokens,
        learning_rate=bound["learning_rate"],
        grad_norm=None if grad_norm is None else float(grad_norm),
        loss_scale=float(bound["loss_scale"]),
        skipped=int(bound["skipped_iter"]),
        peak_memory_bytes=torch.cuda.max_memory_allocated() or None,
    )


def further_token_losses() -> dict[str, Any]:
    """This step's losses of multi-token prediction, by depth; nothing on stages without a loss.

    Upstream keeps them in a tracker, which it reduces and clears when it logs: copies are reduced
    here, before that, by all ranks of the last stage.
    """
    import torch
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker = MTPLossLoggingHelper.tracker
    if tracker.get("avg_group") is None:
        return {}
    group = tracker["avg_group"]
    losses = tracker["loss_values"] / get_num_microbatches() / group.size()
    torch.distributed.all_reduce(losses, group=group)
    return {f"mtp_{depth} loss": loss for depth, loss in enumerate(losses, start=1)}


def log_evaluation(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap upstream's `evaluate` to record its losses.

    Which set it is and after how many steps is known to the caller only,
    `evaluate_and_print_results`: read from its frame, and the patch's fingerprint is of its source.
    """

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if RECORDER is not None and result[0] is not None:
            caller = sys._getframe(1).f_locals
            kind = "test" if caller["prefix"].endswith("test set") else "validation"
            RECORDER.evaluation(caller["iteration"], kind + caller["suffix"], result[0])
        return result

    return evaluate


# --- reading and drawing ------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    """Training records of a `metrics.jsonl`, one a step, in order of steps.

    Args:
        path: the file or the run directory that holds it.

    Raises:
        UserError: no such file, or a line that is not JSON (a torn last line is dropped).
    """
    steps = {r["iteration"]: r for r in _records(path) if "evaluation" not in r}
    return [steps[i] for i in sorted(steps)]


def evaluations(path: Path) -> dict[int, float]:
    """Loss of the validation set after each step that it was evaluated at.

    Args and errors are those of `read`.
    """
    found = [r for r in _records(path) if r.get("evaluation") == "validation"]
    return {r["iteration"]: float(r["lm loss"]) for r in found}


def _records(path: Path) -> Iterator[dict[str, Any]]:
    path = path / FILE if path.is_dir() else path
    if not path.exists():
        raise UserError(f"{path}: no such file; a run directory holds one after its first step")
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            if number == len(lines):
                break  # the writer was killed in the middle of a record
            raise UserError(f"{path}:{number}: not JSON ({error})") from error
        if not isinstance(record, dict) or not isinstance(record.get("iteration"), int):
            raise UserError(f"{path}:{number}: no record of a step (it has no 'iteration')")
        yield record


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def draw(runs: Sequence[tuple[str, list[dict[str, Any]]]], output: Path, key: str) -> None:
    """Write a PNG with one curve a run.

    Args:
        runs: (label, records) as `read` returns them.
        output: PNG file, replaced when complete.
        key: the value to draw over steps.
    """
    import io

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    for label, records in runs:
        points = [(r["iteration"], r[key]) for r in records if _number(r.get(key))]
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel(key)
    axes.grid(alpha=0.3)
    if len(runs) > 1:
        axes.legend()
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    pyplot.close(figure)
    atomic_write(output, buffer.getvalue())


def main(argv: list[str]) -> int:
    """`megatron-patch plot RUN...`: draw a value of one or several runs as PNG."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="megatron-patch plot", description="Draw the loss of runs over their steps."
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run directories or metrics.jsonl files")
    parser.add_argument("--key", default="lm loss", help="value to draw (default: 'lm loss')")
    parser.add_argument("--output", type=Path, default=Path("loss.png"), help="PNG to write")
    options = parser.parse_args(argv)
    try:
        runs = [(run.resolve().name, read(run)) for run in options.runs]
        known = sorted({k for _, rows in runs for r in rows for k in r if _number(r[k])})
        if options.key not in known:
            raise UserError(f"--key {options.key!r}: the runs hold {', '.join(known) or 'nothing'}")
        draw(runs, options.output, options.key)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(options.output)
    return 0


def summary(records: Iterable[dict[str, Any]], key: str = "lm loss") -> str:
    """First and last value and the mean speed, in a line."""
    rows = [r for r in records if isinstance(r.get(key), float)]
    if not rows:
        return "no step recorded"
    first, last = rows[0], rows[-1]
    text = (
        f"{key} {first[key]:.3f} (step {first['iteration']}) -> {last[key]:.3f} "
        f"(step {last['iteration']})"
    )
    speeds = sorted(r["tokens_per_second"] for r in rows if "tokens_per_second" in r)
    if speeds:
        text += f", {speeds[len(speeds) // 2]:,.0f} tokens/s (median)"
    return text


def to_json(value: Any) -> bytes:
    """Pretty JSON; what JSON lacks is written as text."""
    return json.dumps(value, indent=2, default=str).encode() + b"\n"
