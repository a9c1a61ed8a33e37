"""Fine-tuning's part of a plan: its data, what follows from it, and what is frozen.

Nothing here imports torch or megatron before the stages exist.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patch.convert import adapter, commands, dist_io
from megatron_patch.data import packing, sft_dataset, sft_store
from megatron_patch.data.sft_dataset import Rows, Shape
from megatron_patch.training import lora, metrics
from megatron_patch.training.args import LAUNCH_DEFAULT, has_checkpoint
from megatron_patch.util import UserError

if TYPE_CHECKING:
    from megatron_patch.training.args import Plan


def rows(plan: Plan) -> tuple[Rows, Rows | None]:
    """Train and validation rows of a run; chats are tokenized into the run's cache.

    Raises:
        UserError: no data, no model, data that cannot be used, or that does not fit the run.
    """
    own, values = plan.own, plan.values
    if plan.model is None or not own.hf_model:
        raise UserError("--hf-model is needed: the directory with config.json and the tokenizer")
    if not own.output_dir:
        raise UserError("--output-dir is needed: checkpoints and the tokenized data go there")
    if own.lora_rank is not None:
        wanted = own.lora_target_modules or [lora.ALL]
        lora.targets(plan.model, wanted)
        if own.lora_dropout and lora.EXPERTS in wanted:
            raise UserError(
                f"--lora-dropout {own.lora_dropout:g}: PEFT has none for {lora.EXPERTS}; leave one "
                "of both out"
            )
    blend = plan.data.training
    if not blend:
        raise UserError("--data-path is needed: chats (.jsonl, .json, .parquet) or a prepared set")
    length, padded = values["seq_length"], plan.model.padded_vocab_size
    folder = values["data_cache_path"] or os.path.join(own.output_dir, "cache")

    def make(path: str) -> sft_store.Job:
        return sft_store.chat_job(
            own,
            [path],
            own.hf_model or "",
            "",
            # Other lengths are cut by the pool, so that the cache serves any of them.
            max_length=length if own.on_overlong == "error" else None,
            padded_vocab_size=padded,
        )

    def pool(named: Sequence[tuple[float | None, str]]) -> tuple[Any, tuple[float, ...]]:
        sets, weights = sft_dataset.open_sets(named, make, folder)
        for name, samples in sets:
            _check_vocabulary(plan, name, samples)
        return sft_dataset.pool(sets, length, on_overlong=own.on_overlong), weights

    train, weights = pool(blend)
    valid = None
    shares = plan.data.shares
    share = shares[1] / sum(shares) if shares else 0.0
    if values["valid_data_path"]:
        valid, _ = pool(plan.data.blends[1] or [])
    elif share:
        if shares and shares[2]:
            raise UserError(
                f"--split {values['split']}: fine-tuning has no test part; end it with a 0"
            )
        train, valid = sft_dataset.split(train, share, values["seed"])
    shape = _as_before(plan, _shape(plan))
    evaluated = dataclasses.replace(
        shape, ranks=plan.data_parallel_size, micro_batches=_micro_batches(plan)
    )
    return (
        Rows(train, weights, shape, folder),
        Rows(valid, (1.0,) * len(valid.sets), evaluated, folder) if valid is not None else None,
    )


def with_weights(plan: Plan, argv: Sequence[str]) -> list[str]:
    """The command line with the model's own weights to start from, where nothing else is named."""
    own, words = plan.own, list(argv)
    checkpoints = os.path.join(own.output_dir or "", "checkpoints")
    if own.init_from or not own.hf_model or not own.output_dir or has_checkpoint(checkpoints):
        return words
    if plan.values["load"] != checkpoints:
        return words  # --load DIR
    if not any(Path(own.hf_model).glob("*.safetensors")):
        return words
    return [*words, "--init-from", own.hf_model]


def export(plan: Plan) -> None:
    """Hugging Face directories of a run: `hf/`, its last checkpoint, and what `--save-hf` adds.

    The best is that of the checkpoint after which the validation loss was the lowest, in
    `hf-best/`; it is left out where that is the last one.

    Raises:
        UserError: one cannot be written.
    """
    run = Path(plan.own.output_dir or "")
    checkpoints = run / "checkpoints"
    which = plan.own.save_hf or ("best" if plan.own.sft else "none")
    if which == "none" or not has_checkpoint(checkpoints):
        return
    if not plan.own.hf_model:
        raise UserError("--save-hf needs --hf-model: configuration and tokenizer come from there")
    last = dist_io.find_checkpoint(checkpoints)
    _export_step(plan, last, "")
    if plan.own.sft:
        place = shlex.quote(str(run))
        print(f"> next: megatron-patch generate --load {place} --chat --prompt '...'", flush=True)
    shutil.rmtree(run / "hf-best", ignore_errors=True)
    if which == "every":
        for step in sorted(checkpoints.glob("iter_*")):
            if not (run / f"hf-{step.name}").exists():
                _export_step(plan, step, f"-{step.name}")
    if which != "best":
        return
    losses = {
        checkpoints / f"iter_{step:07d}": loss for step, loss in metrics.evaluations(run).items()
    }
    saved = [step for step in losses if step.is_dir()]
    if saved:
        best = min(saved, key=lambda step: losses[step])
        print(f"> lowest validation loss {losses[best]:.4f} at {best.name}")
        if best != last:
            _export_step(plan, best, "-best")


def _export_step(plan: Plan, step: Path, suffix: str) -> None:
    """One checkpoint; `suffix` tells its directories from another one's.

    An earlier export stands until the new one is whole.
    """
    output = Path(plan.own.output_dir or "", f"hf{suffix}")
    new = output.with_name(f".{output.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    where = ["--input-dir", str(step), "--output-dir", str(new)]
    if commands.mcore2hf([*where, "--hf-dir", plan.own.hf_model or ""]):
        raise UserError(f"{step} was not exported; see above")
    if plan.own.lora_rank is not None:
        _export_adapters(plan, step, new, suffix)
    shutil.rmtree(output, ignore_errors=True)
    os.replace(new, output)
    print(f"> {output}: {step.name} for transformers", flush=True)


def _export_adapters(plan: Plan, checkpoints: Path, merged: Path, suffix: str) -> None:
    own = plan.own
    assert own.lora_rank is not None and own.hf_model and plan.model is not None
    wanted = own.lora_target_modules or [lora.ALL]
    places = list(lora.places(plan.model, wanted))
    found = adapter.read(checkpoints, places)
    size, alpha = own.lora_rank, lora.alpha(plan)
    folder = merged.with_name(f"adapter{suffix}")
    adapter.write_peft(
        folder, found, places, rank=size, alpha=alpha, dropout=own.lora_dropout, base=own.hf_model
    )
    count = adapter.merge(merged, found, rank=size, alpha=alpha)
    print(f"> {folder}: {count} adapters in PEFT's format; hf{suffix} holds the merged weights")


def _check_vocabulary(plan: Plan, name: str, samples: sft_store.Samples) -> None:
    """Prepared ids of another tokenizer are found here only where they are too large."""
    assert plan.model is not None
    largest = samples.meta.get("padded_vocab_size")
    if largest is not None and largest > plan.model.padded_vocab_size:
        raise UserError(
            f"{name} was made for a vocabulary of {largest} rows, the model has "
            f"{plan.model.padded_vocab_size}: prepare it with this model's tokenizer"
        )


def _micro_batches(plan: Plan) -> int:
    batch, ranks = plan.values["global_batch_size"], plan.data_parallel_size
    if batch is None:
        return 1
    if batch % ranks:
        raise UserError(
            f"--global-batch-size {batch} does not divide over {ranks} data-parallel replicas: "
            f"choose a multiple of {ranks}"
        )
    return int(batch // ranks)


def _shape(plan: Plan) -> Shape:
    own, values = plan.own, plan.values
    align = packing.alignment(
        tp=values["tensor_model_parallel_size"],
        cp=values["context_parallel_size"],
        sequence_parallel=bool(values["sequence_parallel"]),
        recipe=own.fp8,
    )
    if values["seq_length"] % align.pack:
        raise UserError(
            f"--seq-length {values['seq_length']} must be a multiple of {align.pack} at this "
            "layout (TP with sequence parallelism, CP and FP8 cut it)"
        )
    return Shape(
        length=values["seq_length"],
        alignment=align,
        ranks=plan.data_parallel_size,
        micro_batches=_micro_batches(plan),
        seed=values["seed"],
        packed=not own.no_packing,
        unit=own.sft_loss_unit,
        # Stages of a pipeline agree on one shape beforehand.
        varying=values["pipeline_model_parallel_size"] == 1 and not own.pad_to_max_length,
    )


#: What decides the order of rows, as kept in `resolved_args.json`.
_KEPT = ("length", "ranks", "micro_batches", "seed", "packed")


def _as_before(plan: Plan, shape: Shape) -> Shape:
    """The shape that an earlier start of the run had, so that no sample comes twice or never.

    Another number of replicas takes the same rows in the same steps.

    Raises:
        UserError: the run was started with rows that this start cannot make.
    """
    if not plan.own.output_dir or not plan.values["exit_on_missing_checkpoint"]:
        return shape
    try:
        saved = json.loads(Path(plan.own.output_dir, "resolved_args.json").read_text())["order"]
        before = {name: saved[name] for name in (*_KEPT, "multiple", "adapters")}
    except (OSError, ValueError, KeyError, TypeError):
        return shape
    remedy = "; keep it, or start anew from the weights (--init-from, another --output-dir)"
    now = {"length": "--seq-length", "seed": "--seed", "packed": "--no-packing"}
    for name, flag in now.items():
        if getattr(shape, name) != before[name]:
            raise UserError(
                f"{flag} is another one than at this run's start ({before[name]} then, "
                f"{getattr(shape, name)} now), and decides which samples are still to come{remedy}"
            )
    if before["adapters"] != _adapters(plan):
        raise UserError(
            f"--lora-rank, --lora-alpha and --lora-target-modules say {_adapters(plan)}, and this "
            f"run was started with {before['adapters']}{remedy}"
        )
    rows_before = before["ranks"] * before["micro_batches"]
    if rows_before != shape.rows:
        raise UserError(
            f"a step of this run takes {rows_before} sequences, now {shape.rows} "
            f"(--global-batch-size){remedy}"
        )
    if before["multiple"] % shape.alignment.sample:
        raise UserError(
            f"this run's samples are padded to multiples of {before['multiple']}, and this layout "
            f"asks for {shape.alignment.sample} (2 x CP): keep CP{remedy}"
        )
    return dataclasses.replace(
        shape,
        ranks=before["ranks"],
        micro_batches=before["micro_batches"],
        alignment=dataclasses.replace(shape.alignment, sample=before["multiple"]),
    )


def _adapters(plan: Plan) -> list[Any]:
    """What kind of adapters a run has, if any."""
    if plan.own.lora_rank is None:
        return []
    return [plan.own.lora_rank, lora.alpha(plan), *(plan.own.lora_target_modules or [lora.ALL])]


def complete(plan: Plan, train: Rows, valid: Rows | None) -> None:
    """What follows from the data: evaluation, the record for the next start, the log.

    Args:
        plan: resolved with `train` as its data; changed in place.
        train: rows of the run.
        valid: rows of the evaluation, or None.
    """
    values = plan.values

    def put(dest: str, value: Any) -> None:
        values[dest], plan.source[dest] = value, LAUNCH_DEFAULT

    assert plan.run is not None
    if plan.own.init_from is None and plan.values["load"] == os.path.join(
        plan.own.output_dir or "", "checkpoints"
    ):
        plan.notes.append(
            f"{plan.own.hf_model} holds no weights and no --init-from is given: without a "
            "checkpoint of its own the run starts from random ones"
        )
    if valid is None:
        put("eval_iters", 0)
    else:
        most = values["eval_iters"] if plan.given("eval_iters") else math.inf
        put("eval_iters", min(most, valid.epoch(0).steps))
        if not plan.given("eval_interval"):
            put("eval_interval", min(500, train.epoch(0).steps))
        if not plan.given("save_interval"):
            # What is evaluated is saved, so that the best is there in the end.
            put("save_interval", values["eval_interval"])
    shape = train.shape
    plan.order = {name: getattr(shape, name) for name in _KEPT}
    plan.order |= {"multiple": shape.alignment.sample, "rows": train.digest}
    plan.order["adapters"] = _adapters(plan)
    lines = [f"data       {', '.join(train.pool.names)}", *train.lines()]
    if valid is not None:
        report = valid.epoch(0).schedule.report
        lines.append(
            f"evaluation {len(valid.pool)} samples with {report.tokens} tokens, in "
            f"{report.packs} rows, every {values['eval_interval']} steps and at the end"
        )
    warmup = values["lr_warmup_iters"]
    if not warmup and values["lr_warmup_fraction"]:
        warmup = round(values["lr_warmup_fraction"] * plan.run.iters, 1)
    tp, pp, cp = (
        values[f"{name}_parallel_size"] for name in ("tensor_model", "pipeline_model", "context")
    )
    lines.append(
        f"run        {plan.run.iters} steps of {shape.rows} rows, {plan.run.epochs or 0:.2f} "
        f"epochs, warm-up {warmup} steps; {plan.data_parallel_size} data-parallel replicas = "
        f"{plan.world_size} ranks / (TP {tp} x PP {pp} x CP {cp})"
    )
    plan.notes += lines


def freeze(stages: Sequence[Any], patterns: Sequence[str]) -> None:
    """Keep parameters whose name a pattern matches as they are.

    Args:
        stages: this rank's model chunks.
        patterns: regular expressions, searched for in the names, layers counted over all stages.

    Raises:
        UserError: a pattern is none, or matches nothing on any rank.
    """
    if not patterns:
        return
    import torch

    found = dict.fromkeys(patterns, 0)
    try:
        compiled = {pattern: re.compile(pattern) for pattern in patterns}
    except re.error as problem:
        raise UserError(
            f"--freeze: {problem.pattern!r} is no regular expression: {problem}"
        ) from None
    for stage in stages:
        for name, parameter in named(stage):
            for pattern, expression in compiled.items():
                if expression.search(name):
                    parameter.requires_grad_(False)
                    found[pattern] += parameter.numel()
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, found)
    for pattern in patterns:
        if not any(part[pattern] for part in everywhere):
            raise UserError(f"--freeze {pattern}: no parameter's name has it")


def layer_numbers(stage: Any) -> dict[int, int]:
    """Place of each decoder layer in this stage -> its number in the whole model, from 0."""
    layers = getattr(getattr(stage, "decoder", None), "layers", ())
    return {index: layer.layer_number - 1 for index, layer in enumerate(layers)}


def named(stage: Any) -> Any:
    """Parameters of a stage by name, with the numbers that layers have in the whole model.

    Args:
        stage: a `GPTModel` chunk.

    Yields:
        Name and parameter.
    """
    number = layer_numbers(stage)
    for name, parameter in stage.named_parameters():
        place = re.match(r"decoder\.layers\.(\d+)\.", name)
        if place is not None:
            name = f"decoder.layers.{number[int(place[1])]}.{name[place.end() :]}"
        yield name, parameter
