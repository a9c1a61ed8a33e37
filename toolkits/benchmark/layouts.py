#!/usr/bin/env python3
"""Train one model from one checkpoint at several parallel layouts and compare what comes out.

Every layout runs the same steps on the same tokens by the ordinary entry point. The table shows,
for each, the largest difference of its losses from the reference's (the first layout), tokens/s and
peak memory.

    python toolkits/benchmark/layouts.py --hf-model DIR --output-dir OUT dp1:te dp1:torch tp2:te

With `--sft` it is packed fine-tuning: every step trains one and the same set of samples, so that
losses can be compared whatever the number of replicas.

A layout is DEGREES[:te|torch]: dp1, dp2, tp2, pp2, cp2, ep2, joined by `+` (`tp2+pp2`).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]

import start  # noqa: E402

from megatron_patch.training import metrics  # noqa: E402
from megatron_patch.util import UserError, human_bytes  # noqa: E402


def ranks_and_flags(layout: str) -> tuple[int, list[str]]:
    """World size and flags of `tp2+pp2:te`."""
    degrees, _, backend = layout.partition(":")
    world, flags = 1, []
    for part in degrees.split("+"):
        match = re.fullmatch(r"(dp|tp|pp|cp|ep)(\d+)", part)
        if match is None:
            raise UserError(f"{layout}: {part!r} is no degree; dp2, tp2, pp2, cp2 and ep2 are")
        name, size = match[1], int(match[2])
        world *= 1 if name == "ep" else size
        if name == "ep":
            world = max(world, size)
        if name != "dp" and size > 1:
            flags += [f"--{name}", str(size)]
    return world, flags + (["--backend", backend] if backend else [])


def train(world: int, flags: list[str], log: Path, entry: str = "pretrain") -> float:
    """Run the entry point under torchrun; returns the seconds it took."""
    started = time.perf_counter()
    status = start.ranks(entry, world, flags, log)
    if status:
        words = f"{' '.join(flags)} ended with status {status}; {log} ends"
        raise UserError(f"{words}:\n{start.end_of(log, 30)}")
    return time.perf_counter() - started


def main() -> int:
    """Run, compare, print, write `layouts.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("layouts", nargs="+", help="for instance dp1:te tp2:torch tp2+pp2")
    parser.add_argument("--hf-model", required=True, help="directory with a config.json")
    parser.add_argument("--data-path", help="idxmap prefix; default: the demo's text")
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-length", default="4096")
    parser.add_argument("--micro-batch-size", default="2")
    parser.add_argument("--global-batch-size", default="16")
    parser.add_argument("--sft", action="store_true", help="packed fine-tuning")
    options, more = parser.parse_known_args()
    out: Path = options.output_dir
    out.mkdir(parents=True, exist_ok=True)
    data, entry = options.data_path, "sft" if options.sft else "pretrain"
    if data is None and options.sft:
        import sft_speed

        data = str(out / "chats")
        vocabulary = json.loads((Path(options.hf_model) / "config.json").read_text())["vocab_size"]
        length, packs = int(options.seq_length), int(options.global_batch_size)
        sft_speed.write_samples(Path(data), vocabulary, length, packs, 1, room=4)
    elif data is None:
        data = start.demo_text(out)
    common = [
        *("--hf-model", options.hf_model, "--data-path", data),
        *("--seq-length", options.seq_length, "--micro-batch-size"),
        "1" if options.sft else options.micro_batch_size,
        *("--global-batch-size", options.global_batch_size, "--lr", "1e-5", "--warmup-steps", "2"),
        *("--seed", "1"),
        *(["--save-hf", "none"] if options.sft else []),
        *more,
    ]
    rows = []
    try:
        first = out / "start"
        if not (first / "checkpoints" / "latest_checkpointed_iteration.txt").exists():
            train(
                1,
                [*common, "--train-iters", "3", "--no-save-optim", "--output-dir", str(first)],
                out / "start.log",
                entry,
            )
        reference: list[float] = []
        for layout in options.layouts:
            world, flags = ranks_and_flags(layout)
            run = out / layout.replace(":", "-")
            # A run of its own: the same command again would go on from its checkpoint.
            run_flags = [*common, *flags, "--init-from", str(first), "--output-dir", str(run)]
            run_flags += ["--train-iters", str(options.steps), "--save-interval", "100000"]
            run_flags += ["--no-save-optim"]
            try:
                seconds = train(world, run_flags, out / f"{run.name}.log", entry)
            except UserError as error:
                print(f"{layout}: FAILED\n{error}", flush=True)
                rows.append({"layout": layout, "failed": True})
                continue
            records = metrics.read(run)
            losses = [r["lm loss"] for r in records]
            reference = reference or losses
            speeds = [r["tokens_per_second"] for r in records[3:]]
            rows.append(
                {
                    "layout": layout,
                    "gpus": world,
                    "losses": losses,
                    "largest_difference": max(
                        abs(a - b) for a, b in zip(losses, reference, strict=True)
                    ),
                    "tokens_per_second": statistics.median(speeds),
                    "peak_memory_bytes": max(r.get("peak_memory_bytes", 0) for r in records),
                    "grad_norm": [r["grad_norm"] for r in records],
                    "whole_process_seconds": round(seconds, 1),
                }
            )
            row = rows[-1]
            print(
                f"{layout:<16} loss {losses[0]:.4f} -> {losses[-1]:.4f}  "
                f"largest difference {row['largest_difference']:.4f}  "
                f"{row['tokens_per_second']:>9,.0f} tokens/s  "
                f"{human_bytes(row['peak_memory_bytes'])}  {seconds:.0f} s in all",
                flush=True,
            )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    (out / "layouts.json").write_text(json.dumps(rows, indent=2))
    return 0 if all("failed" not in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
