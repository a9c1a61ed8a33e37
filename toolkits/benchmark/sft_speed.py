#!/usr/bin/env python3
r"""Fine-tuning speed on the same samples: packed, one sample a sequence, and padded to the longest.

Lengths are drawn like those of chats (log-normal: most are short, a few fill the sequence). Every
case trains the same samples by the ordinary entry point, about as many a step as --packs packs
hold, in a process of its own, one after the other. Compared are real tokens a second, padding left
out; the figure is the median over the steps after warm-up.

    python toolkits/benchmark/sft_speed.py --hf-model DIR --output-dir OUT
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]

import start  # noqa: E402

from megatron_patch.data import idxmap, packing  # noqa: E402
from megatron_patch.data.sft_store import FORMAT, VERSION  # noqa: E402
from megatron_patch.training import metrics  # noqa: E402
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
    rng = np.random.default_rng(1)
    lengths = lengths_like_chats(rng, 16 * packs, length)
    each = packs
    while len(packing.pack(lengths[: each + 1], length, multiple=room)) <= packs:
        each += 1
    batch = lengths[:each]
    dtype = idxmap.dtype_for(vocabulary)
    tokens = trained = 0
    with (
        idxmap.Writer(f"{prefix}_ids", dtype, overwrite=True) as ids,
        idxmap.Writer(f"{prefix}_mask", np.dtype(np.uint8), overwrite=True) as masks,
    ):
        # The same lengths in every step, other ids: whatever the order, steps are alike.
        for _ in range(steps):
            for size in batch.tolist():
                mask = np.zeros(size, np.uint8)
                mask[size // 2 :] = 1
                row = rng.integers(0, vocabulary, size)
                ids.write(row.astype(dtype), np.array([size]), np.array([1]))
                masks.write(mask, np.array([size]), np.array([1]))
                tokens, trained = tokens + size, trained + int(mask.sum())
        ids.commit()
        masks.commit()
    meta = {"format": FORMAT, "version": VERSION, "samples": each * steps, "tokens": tokens}
    atomic_write(f"{prefix}.json", json.dumps(meta | {"trained_tokens": trained}))
    return each


def train(options: argparse.Namespace, name: str, rows: int, more: list[str]) -> dict[str, Any]:
    """Run a case; returns its records' figures."""
    folder = options.output_dir / name
    flags = ["--hf-model", options.hf_model, "--data-path", str(options.output_dir / "chats")]
    flags += ["--output-dir", str(folder), "--seq-length", str(options.seq_length)]
    flags += ["--global-batch-size", str(rows), "--epochs", "1", "--lr", "1e-5", "--seed", "1"]
    flags += ["--save-hf", "none", "--no-save-optim", *CASES[name], *more]
    log = folder.with_suffix(".log")
    status = start.ranks("sft", options.gpus, flags, log)
    if status:
        words = f"{name} ended with status {status}; {log} ends"
        raise UserError(f"{words}:\n{start.end_of(log, 15)}")
    records = metrics.read(folder)
    steady = records[options.warm_up :]
    return {
        "case": name,
        "rows_a_step": rows,
        "tokens_per_second": statistics.median(r["tokens_per_second"] for r in steady),
        "tokens_a_step": statistics.mean(r["tokens"] for r in steady),
        "losses": [r["lm loss"] for r in records],
        "peak_memory_bytes": max(r.get("peak_memory_bytes") or 0 for r in records),
    }


def main() -> int:
    """Run the cases, print the table, write `sft_speed.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hf-model", required=True, help="directory with a config.json")
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=3, help="steps left out")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--packs", type=int, default=8, help="packs a step")
    parser.add_argument("--gpus", type=int, default=1)
    options, more = parser.parse_known_args()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    config = json.loads((Path(options.hf_model) / "config.json").read_text())
    each = write_samples(
        options.output_dir / "chats", config["vocab_size"], options.seq_length, options.packs,
        options.steps,
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    for name in options.cases:
        try:
            row = train(options, name, options.packs if name == "packed" else each, more)
        except UserError as error:
            print(f"{name}: FAILED\n{error}", flush=True)
            rows.append({"case": name, "failed": str(error)[:300]})
            continue
        rows.append(row)
        print(
            f"{name:<10} {row['tokens_per_second']:>9,.0f} real tokens/s  "
            f"{row['tokens_a_step']:>8,.0f} a step in {row['rows_a_step']} sequences  "
            f"{human_bytes(row['peak_memory_bytes']):>9}  "
            f"loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}",
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
