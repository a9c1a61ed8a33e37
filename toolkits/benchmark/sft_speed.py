#!/usr/bin/env python3
r"""Fine-tuning speed on the same samples: packed, one sample a sequence, and padded to the longest.

Lengths are drawn like those of chats (log-normal: most are short, a few fill the sequence). Every
case trains the same samples by the ordinary entry point, about as many a step as --packs packs
hold, in a process of its own, one after the other. Compared are real tokens a second, padding left
out; the figure is the median over the steps after warm-up.

    python toolkits/benchmark/sft_speed.py --hf-model DIR --output-dir OUT

DIR needs a config.json only; weights are random. A model that is too large with its optimizer is
cut to the layers that fit (--layers N says how many). On one H200 a case of Qwen3-1.7B's shape is
planned for about 30 seconds by the defaults, one of Qwen3-8B's for as much with
`--layers 12 --packs 2`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]

import start  # noqa: E402

from megatron_patch.data import idxmap, packing  # noqa: E402
from megatron_patch.data.sft_store import FORMAT, VERSION  # noqa: E402
from megatron_patch.training import args, memory, metrics, parallel  # noqa: E402
from megatron_patch.util import UserError, atomic_write, human_bytes  # noqa: E402

CASES = {
    "packed": (),
    "unpadded": ("--no-packing",),
    "padded": ("--no-packing", "--pad-to-max-length"),
}


def lengths_like_chats(rng: np.random.Generator, count: int, longest: int) -> np.ndarray:
    """Tokens of chats: log-normal with a median of an eighth of the longest."""
    drawn = rng.lognormal(np.log(longest / 8), 0.9, count)
    return np.clip(drawn, 16, longest).astype(np.int64)


def write_set(prefix: Path, vocabulary: int, lengths: list[int]) -> None:
    """A prepared set of random ids, the second half of every sample trained.

    Args:
        prefix: Of the set.
        vocabulary: Ids are drawn below it.
        lengths: Tokens of each sample.
    """
    rng = np.random.default_rng(1)
    dtype = idxmap.dtype_for(vocabulary)
    trained = 0
    with (
        idxmap.Writer(f"{prefix}_ids", dtype, overwrite=True) as ids,
        idxmap.Writer(f"{prefix}_mask", np.dtype(np.uint8), overwrite=True) as masks,
    ):
        for size in lengths:
            mask = np.zeros(size, np.uint8)
            mask[size // 2 :] = 1
            row = rng.integers(0, vocabulary, size)
            ids.write(row.astype(dtype), np.array([size]), np.array([1]))
            masks.write(mask, np.array([size]), np.array([1]))
            trained += int(mask.sum())
        ids.commit()
        masks.commit()
    meta = {"format": FORMAT, "version": VERSION, "samples": len(lengths), "tokens": sum(lengths)}
    atomic_write(f"{prefix}.json", json.dumps(meta | {"trained_tokens": trained}))


def write_samples(
    prefix: Path, vocabulary: int, length: int, packs: int, steps: int, room: int = 1
) -> int:
    """A prepared set whose every step of samples fits ``packs`` packs.

    Args:
        prefix: Of the set.
        vocabulary: Ids are drawn below it.
        length: Tokens of a pack.
        packs: Of a step.
        steps: How many, with the same lengths each.
        room: Samples are padded to multiples of it.

    Returns:
        Samples of a step.
    """
    lengths = lengths_like_chats(np.random.default_rng(1), 16 * packs, length)
    each = packs
    while len(packing.pack(lengths[: each + 1], length, multiple=room)) <= packs:
        each += 1
    # The same lengths in every step, other ids: whatever the order, steps are alike.
    write_set(prefix, vocabulary, lengths[:each].tolist() * steps)
    return each


def with_layers(source: Path, folder: Path, layers: int) -> Path:
    """The model of ``source`` with its first ``layers`` layers, as a configuration."""
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] = layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:layers]
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "config.json", json.dumps(config))
    return folder


def fitting(options: argparse.Namespace, more: list[str]) -> Path:
    """The model, with as many of its layers as the device has memory for by the preflight.

    Raises:
        UserError: Not even one layer fits, or the flags cannot be used.
    """
    source = Path(options.hf_model)
    whole = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    if options.layers:
        return with_layers(source, options.output_dir / "model", options.layers)
    flags = ["--sft", "--output-dir", str(options.output_dir / "none")]
    flags += ["--seq-length", str(options.seq_length), "--train-iters", "1"]
    flags += ["--global-batch-size", str(options.gpus), *more]
    for layers in range(whole, 0, -1):
        model = source
        if layers < whole:
            model = with_layers(source, options.output_dir / "model", layers)
        plan = args.resolve(
            ["--hf-model", str(model), *flags], world_size=options.gpus, device=None
        )
        stages = memory.memory(
            plan.values, options.gpus, plan.device, linear_cross_entropy=plan.linear_cross_entropy
        )
        limit, need = parallel.device_memory(plan), max(stage.total for stage in stages)
        if limit is None or need <= 0.95 * limit:
            if layers < whole:
                print(f"{layers} of {whole} layers: more do not fit into {human_bytes(limit or 0)}")
            return model
    raise UserError(f"{source}: not even one layer fits into this device")


def train(
    options: argparse.Namespace, model: Path, name: str, rows: int, more: list[str]
) -> dict[str, Any]:
    """Run a case; returns its records' figures."""
    started = time.perf_counter()
    folder = options.output_dir / name
    flags = ["--hf-model", str(model), "--data-path", str(options.output_dir / "chats")]
    flags += ["--output-dir", str(folder), "--seq-length", str(options.seq_length)]
    flags += ["--global-batch-size", str(rows), "--epochs", "1", "--lr", "1e-5", "--seed", "1"]
    flags += ["--save-hf", "none", "--no-save-optim", "--save-interval", "100000"]
    flags += [*CASES[name], *more]
    log = folder.with_suffix(".log")
    status = start.ranks("sft", options.gpus, flags, log)
    if status:
        words = f"{name} ended with status {status}; {log} ends"
        raise UserError(f"{words}:\n{start.end_of(log, 15)}")
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # the last step's, gigabytes
    records = metrics.read(folder)
    steady = records[options.warm_up :]
    return {
        "case": name,
        "rows_a_step": rows,
        "tokens_per_second": statistics.median(r["tokens_per_second"] for r in steady),
        "tokens_a_step": statistics.mean(r["tokens"] for r in steady),
        "losses": [r["lm loss"] for r in records],
        "peak_memory_bytes": max(r.get("peak_memory_bytes") or 0 for r in records),
        "whole_process_seconds": round(time.perf_counter() - started, 1),
    }


def main() -> int:
    """Run the cases, print the table, write `sft_speed.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hf-model", required=True, help="directory with a config.json")
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=2, help="steps left out")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--packs", type=int, default=4, help="packs a step")
    parser.add_argument("--layers", type=int, metavar="N", help="default: those that fit")
    parser.add_argument("--gpus", type=int, default=1)
    options, more = parser.parse_known_args()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    config = json.loads((Path(options.hf_model) / "config.json").read_text())
    each = write_samples(
        options.output_dir / "chats", config["vocab_size"], options.seq_length, options.packs,
        options.steps,
    )  # fmt: skip
    try:
        model = fitting(options, more)
    except UserError as error:
        parser.error(str(error))
    rows: list[dict[str, Any]] = []
    for name in options.cases:
        try:
            row = train(options, model, name, options.packs if name == "packed" else each, more)
        except UserError as error:
            print(f"{name}: FAILED\n{error}", flush=True)
            rows.append({"case": name, "failed": str(error)[:300]})
            continue
        rows.append(row)
        print(
            f"{name:<10} {row['tokens_per_second']:>9,.0f} real tokens/s  "
            f"{row['tokens_a_step']:>8,.0f} a step in {row['rows_a_step']} sequences  "
            f"{human_bytes(row['peak_memory_bytes']):>9}  "
            f"loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}  "
            f"({row['whole_process_seconds']:.0f} s)",
            flush=True,
        )
    speeds = {row["case"]: row["tokens_per_second"] for row in rows if "failed" not in row}
    for name, speed in speeds.items():
        if name != "packed" and "packed" in speeds:
            print(f"packed / {name}: {speeds['packed'] / speed:.2f}x")
    atomic_write(options.output_dir / "sft_speed.json", json.dumps(rows, indent=1))
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
