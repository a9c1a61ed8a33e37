"""Raw numbers of every step: `metrics.jsonl` while training, `loss.png` from it afterwards.

Upstream's log line averages (the second line after every start is the mean of two steps); these
are the step's own values. Records are only ever appended: after a restart a step may stand twice,
and the last record of a step counts.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from megatron_patch.training.sinks import Sink, scalars
from megatron_patch.util import UserError, atomic_write

FILE = "metrics.jsonl"


#: A jump is told against the median of so many steps before it, once there are enough. So many of
#: them in a row are the new level.
_WINDOW, _ENOUGH, _LEVEL = 100, 20, 5
#: What is watched, its name in the event and how far above the median is a jump: so many (robust)
#: standard deviations and this share of the median. Gradient norms vary by much more than losses.
_WATCHED = {"lm loss": ("loss", 6.0, 0.1), "grad_norm": ("gradient norm", 12.0, 3.0)}


@dataclass(frozen=True)
class MicroBatch:
    """What to say of a micro-batch should the loss of its step be no number, or jump.

    Attributes:
        report: [sum, count] of its loss, on the device; read only then.
        name: the samples in it, in words.
    """

    report: Any
    name: Callable[[], str]


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
        evaluated: called on rank 0 with the step and its validation loss (the mean over the sets).
        jumped: called on rank 0 with the step at which the loss or the gradient norm jumped.
        sinks: where the figures go beside the file, on rank 0.
        peak_flops: of a device, for its share.
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
        evaluated: Callable[[int, float], None] | None = None,
        jumped: Callable[[int], None] | None = None,
        sinks: Sequence[Sink] = (),
        peak_flops: float | None = None,
    ) -> None:
        self._first_step, self._each_step = first_step, each_step
        self._describe, self._evaluated_at, self._jumped = describe, evaluated, jumped
        self._sinks, self._peak = list(sinks), peak_flops
        self.rank, self.world_size, self.pipeline, self.echo = rank, world_size, pipeline, echo
        #: Last step of this process, None before the first.
        self.iteration: int | None = None
        #: The micro-batches of this step and of the one before, as far as this rank has their loss.
        self.suspects: list[MicroBatch] = []
        self._before: list[MicroBatch] = []
        #: Seconds that this rank has waited for data, and for checkpoints, since the last step.
        self.data_wait = self.save_stall = 0.0
        #: On rank 0: the step that jumped, until all ranks have said what they know of it.
        self.jump: dict[str, Any] | None = None
        self._usual = {key: deque[float](maxlen=_WINDOW) for key in _WATCHED}
        self._row = dict.fromkeys(_WATCHED, 0)
        #: Evaluation -> step of its last record.
        self._evaluated: dict[str, int] = {}
        #: Step of the last validation and the losses of its sets.
        self._sets: tuple[int, list[float]] = (-1, [])
        self._file: io.FileIO | None = None
        #: Records that the disk has not taken yet, and why.
        self._unwritten = bytearray()
        self._trouble: str | None = None
        if path is not None and rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            _drop_torn_line(path)
            # Unbuffered: what could not be written is this object's to keep.
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run
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

    def step(
        self,
        iteration: int,
        losses: dict[str, Any],
        later: Callable[[], dict[str, Any]] | None = None,
        **extra: Any,
    ) -> None:
        """Record a training step.

        Args:
            iteration: steps done, this one included.
            losses: name -> loss of this step (scalar tensor or [sum, count]).
            later: further values, read after the losses, for which the device is waited for.
            **extra: further values, None is left out.

        Raises:
            UserError: the loss or the gradient norm is no number. Upstream saves after this.
        """
        now = time.perf_counter()
        seconds, self._last = max(now - self._last, 1e-9), now
        self.data_wait = self.save_stall = 0.0
        first, self.iteration = self.iteration is None, iteration
        values = self._to_rank_0(losses)
        if later is not None:
            extra = extra | later()
        self._write_step(iteration, values, seconds, first, extra)
        suspects, self.suspects = self.suspects, []
        self._before = suspects
        norm = extra.get("grad_norm")
        if not extra.get("skipped") and not all(
            map(math.isfinite, [*values.values(), 0.0 if norm is None else norm])
        ):
            found = [*(f"{name} is {value}" for name, value in values.items())]
            found += [f"the gradient norm is {norm}"] if norm is not None else []
            culprits = self._from_all(
                [(s.name(), x) for s, x in _read(suspects) if not math.isfinite(x)]
            )
            words = ", ".join(found + [_culprit(*one) for one in culprits])
            if not culprits and suspects:
                words += f"; every micro-batch's own loss is a number ({self._range(extra)})"
            raise UserError(
                f"step {iteration}: {words}. Nothing of this step was saved; the same command goes "
                "on from the last checkpoint"
            )

    def _from_all(self, mine: list[tuple[str, float]]) -> list[tuple[int, str, float]]:
        """Names of all ranks' micro-batches with their losses; each once, by its lowest rank."""
        everyone: list[Any] = [mine]
        if self.world_size > 1:
            import torch

            everyone = [None] * self.world_size
            torch.distributed.all_gather_object(everyone, mine)
        found: dict[str, tuple[int, str, float]] = {}
        for rank, items in enumerate(everyone):
            for name, loss in items:
                found.setdefault(name, (rank, name, loss))
        return list(found.values())[:8]

    def _range(self, extra: dict[str, Any]) -> str:
        done, batch = extra.get("consumed_samples"), extra.get("batch")
        if done is None or batch is None:
            return "the gradient overflowed"
        return f"sequences {done - batch} to {done - 1} of the run"

    def look_back(self, wanted: bool) -> None:
        """Say which micro-batch was the worst of the step before, a jump; all ranks take part.

        Args:
            wanted: what all ranks have agreed on.
        """
        if not wanted:
            return
        mine = sorted(
            ((x, s.name) for s, x in _read(self._before)), key=lambda p: p[0], reverse=True
        )
        found = self._from_all([(name(), loss) for loss, name in mine[:1]])
        jump, self.jump = self.jump, None
        if self.rank != 0 or jump is None:
            return
        if found:
            rank, name, loss = max(found, key=lambda one: one[2])
            jump |= {"rank": rank, "samples": name, "micro_batch_loss": loss}
        self._write(jump)
        what = next(name for name, *_ in _WATCHED.values() if name in jump)
        words = f"step {jump['iteration']}: the {what} jumped to {jump[what]:.4f} from "
        words += f"{jump['median']:.4f}, the median of the steps before"
        if found:
            words += f"; highest micro-batch: {_culprit(rank, name, loss)}"
        print(f"> {words}", flush=True)

    def _watch(self, record: dict[str, Any]) -> None:
        """Notice a jump of the loss or of the gradient norm."""
        for key, (name, deviations, share) in _WATCHED.items():
            value, usual = record.get(key), self._usual[key]
            if value is None or not math.isfinite(value):
                continue
            if len(usual) >= _ENOUGH:
                middle = statistics.median(usual)
                spread = 1.4826 * statistics.median(abs(x - middle) for x in usual)
                if value - middle > max(deviations * spread, share * middle):
                    if self.jump is None:
                        step = record["iteration"]
                        self.jump = {"iteration": step, "event": "jump"}
                        self.jump |= {name: value, "median": middle}
                        if self._jumped is not None:
                            self._jumped(step)
                    self._row[key] += 1
                    if self._row[key] < _LEVEL:
                        continue  # it is no measure for the next ones
                    usual.clear()
            self._row[key] = 0
            usual.append(value)

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
        tokens, flops = extra.get("tokens"), record.pop("flops", None)
        if tokens:
            record["tokens_per_second"] = round(tokens / seconds, 1)
            record["tokens_per_second_per_rank"] = round(tokens / seconds / self.world_size, 1)
        if flops:
            speed = flops / seconds / self.world_size
            record["model_tflops_per_rank"] = round(speed / 1e12, 6)
            if self._peak:
                record["share_of_peak"] = round(speed / self._peak, 5)
        self._write(record)
        self._send(iteration, dict(scalars(record)))
        self._watch(record)
        if self.echo:
            print(f" iteration {iteration} | {_text(values)} | {seconds * 1000:.1f} ms", flush=True)

    def _send(self, step: int, values: dict[str, float]) -> None:
        """To every sink; one that fails is left out from then on."""
        for sink in list(self._sinks):
            try:
                sink.write(step, values)
            except Exception as problem:  # of many kinds; none is worth the run
                self._sinks.remove(sink)
                print(f"> {type(sink).__name__} gets no more figures: {problem}", flush=True)

    def stood_still(self, step: int, seconds: float, values: dict[str, Any]) -> None:
        """Training waited for a checkpoint: no part of a step's own time.

        Args:
            step: of the checkpoint.
            seconds: of standing still.
            values: what `training/saves.py` knows of it; a record where there is `save`.
        """
        self._last += seconds
        self.save_stall += seconds
        if not values.pop("save", False) or self.rank != 0:
            return
        from megatron_patch.training import saves

        print(f"> {saves.words(step, seconds, values)}", flush=True)
        self._write({"iteration": step, "event": "save", "save_stall": round(seconds, 6), **values})

    def evaluation(self, iteration: int, name: str, losses: dict[str, Any]) -> None:
        """Record an evaluation."""
        values = self._to_rank_0(losses)
        # Upstream evaluates after the last step once more where that step has just been evaluated.
        again = self._evaluated.get(name) == iteration
        self._evaluated[name] = iteration
        if self.rank == 0 and not again:
            self._write({"iteration": iteration, "evaluation": name, **values})
            self._send(iteration, {f"{key} {name}": value for key, value in values.items()})
            self._validated(iteration, name, values)
            if "-" in name:  # upstream prints the mean of the sets
                print(f"> step {iteration}, {name}: {_text(values)}", flush=True)
            if self.echo:
                print(f" iteration {iteration} | {name} | {_text(values)}", flush=True)
        self.suspects.clear()
        self.data_wait = 0.0
        self._last = time.perf_counter()

    def _validated(self, iteration: int, name: str, values: dict[str, float]) -> None:
        """Pass a validation loss on; of several sets their mean so far."""
        if self._evaluated_at is None or not name.startswith("validation"):
            return
        loss = values.get("lm loss")
        if loss is None or not math.isfinite(loss):
            return
        step, sets = self._sets
        self._sets = (iteration, [*sets, loss] if step == iteration else [loss])
        self._evaluated_at(iteration, statistics.fmean(self._sets[1]))

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        clean = {
            k: (str(v) if isinstance(v, float) and not math.isfinite(v) else v)
            for k, v in record.items()
            if v is not None
        }
        self._unwritten += orjson.dumps(clean) + b"\n"
        self._flush()

    def _flush(self) -> None:
        """Write what is due; a disk that is full now may have room at a later step."""
        assert self._file is not None
        had, self._trouble = self._trouble, None
        try:
            while self._unwritten:
                count = self._file.write(self._unwritten)
                del self._unwritten[:count]
        except OSError as problem:
            self._trouble = problem.strerror
        if self._trouble is not None and had is None:
            print(
                f"> {self._file.name}: {self._trouble}; its records are kept and written as soon "
                "as that is possible. Training goes on",
                flush=True,
            )
        elif had is not None and self._trouble is None:
            print(f"> {self._file.name}: its records are written again, none is lost", flush=True)

    def close(self) -> None:
        """Close the file and what else the figures go to."""
        if self._file is not None:
            self._flush()
            if self._unwritten:
                lost = self._unwritten.count(b"\n")
                print(f"> {self._file.name}: {lost} records are lost: {self._trouble}", flush=True)
            self._file.close()
            self._file = None
        while self._sinks:
            with contextlib.suppress(Exception):  # of many kinds; the run is over
                self._sinks.pop().close()


def _read(batches: Sequence[MicroBatch]) -> list[tuple[MicroBatch, float]]:
    """Micro-batches with their mean losses."""
    return [(batch, _mean(batch.report)) for batch in batches]


def _culprit(rank: int, name: str, loss: float) -> str:
    return f"rank {rank}, {name} (loss {loss:.4f})"


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
    signature = inspect.signature(original)

    def training_log(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if RECORDER is not None:
            _record(RECORDER, bound.arguments)
        from megatron.training import get_args

        if not bound.arguments["iteration"] % get_args().log_interval:
            # Upstream keeps the first step's totals for the next line, also where its own line is
            # due, and the second line is then the mean of two steps.
            bound.arguments["is_first_iteration"] = False
        return original(*bound.args, **bound.kwargs)

    return training_log


def _record(recorder: Recorder, bound: dict[str, Any]) -> None:
    import torch
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.training import get_args
    from megatron.training.training import num_floating_point_operations

    from megatron_patch.training import figures, saves

    args = get_args()
    batch = get_current_global_batch_size()
    tokens = batch * args.seq_length
    grad_norm = bound["grad_norm"]
    step, clock, experts = bound["iteration"], saves.SAVES, figures.EXPERTS
    first = recorder.rank == 0
    together = figures.largest(
        [
            float(first and clock is not None and clock.due(step)),
            float(first and recorder.jump is not None),
            recorder.data_wait,
            recorder.save_stall,
            torch.cuda.max_memory_allocated(),
        ]
    )
    load = experts.collect() if experts is not None else dict

    def later() -> dict[str, Any]:
        save, jump, data_wait, stall, memory = together()
        if clock is not None:
            clock.agreed = bool(save)
        recorder.look_back(bool(jump))
        return {
            "data_wait": round(data_wait, 6),
            "save_stall": round(stall, 6),
            "peak_memory_bytes": int(memory) or None,
            **load(),
        }

    recorder.step(
        step,
        bound["loss_dict"] | (further_token_losses() if args.mtp_num_layers else {}),
        later,
        consumed_samples=args.consumed_train_samples,
        batch=batch,
        tokens=tokens,
        flops=num_floating_point_operations(
            args,
            batch,
            seqlen_squared_sum_in_batch=bound.get("seqlen_squared_sum_in_batch"),
            total_real_tokens_in_batch=bound.get("total_real_tokens_in_batch"),
        ),
        learning_rate=bound["learning_rate"],
        grad_norm=None if grad_norm is None else float(grad_norm),
        loss_scale=float(bound["loss_scale"]),
        skipped=int(bound["skipped_iter"]),
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
    """Wrap upstream's `evaluate` to record its losses, one for each set that has a name.

    Which set it is and after how many steps is known to the caller only,
    `evaluate_and_print_results`: read from its frame, and the patch's fingerprint is of its source.
    """
    signature = inspect.signature(original)

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        from megatron_patch.data import pretrain_dataset

        caller = sys._getframe(1).f_locals
        kind = "test" if caller["prefix"].endswith("test set") else "validation"
        sets = pretrain_dataset.VALIDATION if kind == "validation" else []
        if not sets:
            result = original(*args, **kwargs)
            if RECORDER is not None and result[0] is not None:
                RECORDER.evaluation(caller["iteration"], kind + caller["suffix"], result[0])
            return result
        losses: dict[str, list[Any]] = {}
        for name, steps in sets:
            bound = signature.bind(*args, **kwargs)
            bound.arguments["eval_iters"] = steps
            result = original(*bound.args, **bound.kwargs)
            if result[0] is None:
                return result  # out of time
            if RECORDER is not None:
                RECORDER.evaluation(caller["iteration"], f"{kind}-{name}", result[0])
            for key, value in result[0].items():
                losses.setdefault(key, []).append(value)
        return {key: sum(found) / len(found) for key, found in losses.items()}, *result[1:]

    return evaluate


# --- reading and drawing ------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    """Training records of a `metrics.jsonl`, one a step, in order of steps.

    Args:
        path: the file or the run directory that holds it.

    Raises:
        UserError: no such file, or a line that is not JSON (a torn last line is dropped).
    """
    steps = {r["iteration"]: r for r in _records(path) if not {"evaluation", "event"} & set(r)}
    return [steps[i] for i in sorted(steps)]


def evaluations(path: Path) -> dict[int, float]:
    """Validation loss after each step that was evaluated, the mean over sets where there are more.

    Args and errors are those of `read`.
    """
    found: dict[int, dict[str, float]] = {}
    for record in _records(path):
        name = str(record.get("evaluation", ""))
        if name.startswith("validation") and _number(record.get("lm loss")):
            found.setdefault(record["iteration"], {})[name] = float(record["lm loss"])
    return {step: statistics.fmean(losses.values()) for step, losses in found.items()}


def jumps(path: Path) -> list[int]:
    """Steps at which the loss or the gradient norm jumped. Args and errors are those of `read`."""
    return [r["iteration"] for r in _records(path) if r.get("event") == "jump"]


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


def _curves(path: Path) -> list[dict[str, Any]]:
    """Records of steps, and of evaluations with the names that sinks get."""
    found = [
        {"iteration": r["iteration"]}
        | {f"{key} {r['evaluation']}": x for key, x in r.items() if key.endswith("loss")}
        for r in _records(path)
        if "evaluation" in r
    ]
    return [*read(path), *sorted(found, key=lambda r: r["iteration"])]


def main(argv: list[str]) -> int:
    """`megatron-patch plot RUN...`: draw a value of one or several runs as PNG."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="megatron-patch plot", description="Draw the loss of runs over their steps."
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run directories or metrics.jsonl files")
    parser.add_argument(
        "--key",
        default="lm loss",
        help="value to draw (default: 'lm loss'); "
        "'lm loss validation' and the like for evaluations",
    )
    parser.add_argument("--output", type=Path, default=Path("loss.png"), help="PNG to write")
    options = parser.parse_args(argv)
    try:
        runs = [(run.resolve().name, _curves(run)) for run in options.runs]
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
