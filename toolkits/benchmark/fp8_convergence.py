#!/usr/bin/env python3
r"""Loss curves of FP8 recipes beside bf16 and fp32, from one set of random weights on one text.

Every curve is a run of the ordinary entry point: the same weights (a Hugging Face directory written
here), the same batches in the same order. Runs share the GPU, since only losses are compared.
`torch` is bf16 once more by other kernels: how far two runs drift apart that differ in rounding
alone, which is what a recipe's gap has to be held against.

    python toolkits/benchmark/fp8_convergence.py --output-dir OUT
    python toolkits/benchmark/fp8_convergence.py --output-dir OUT --draw   # the picture again

Writes `fp8_convergence.json` and, where matplotlib is installed, `fp8_convergence.png`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]

import start  # noqa: E402

from megatron_patch.convert import hf_io  # noqa: E402
from megatron_patch.training import metrics  # noqa: E402
from megatron_patch.util import UserError, atomic_write  # noqa: E402

#: fp32: torch's attention, since fused kernels of Transformer Engine take 16 bits only.
CASES: dict[str, tuple[str, ...]] = {
    "fp32": ("--precision", "fp32", "--backend", "torch", "--no-gradient-accumulation-fusion"),
    "bf16": ("--precision", "bf16"),
    "torch": ("--backend", "torch"),
    "delayed": ("--fp8", "delayed"),
    "tensorwise": ("--fp8", "tensorwise"),
    "blockwise": ("--fp8", "blockwise"),
}
#: Steps whose mean is a curve's end.
TAIL = 20


def shape() -> dict[str, Any]:
    """The demo's model with 8 layers of a width that matrix units are made for: 126 M weights."""
    from megatron_patch.data import demo

    return demo.model_config() | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }


def write_weights(folder: Path, config: dict[str, Any]) -> None:
    """A Hugging Face directory: normal numbers in bf16, projections into the residual scaled down.

    Args:
        folder: gets `config.json` and `model.safetensors`.
        config: what the former says.
    """
    from megatron_patch.convert import plan, rules

    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "config.json", json.dumps(config, indent=1))
    tensors = [
        (name, shape, "bfloat16")
        for rule in rules.spec_rules(plan.resolve(folder))
        for name, shape in zip(rule.hf, rule.shapes, strict=True)
    ]
    (shard,), targets = hf_io.plan_shards(tensors, 1 << 40)
    rng = np.random.default_rng(1)
    deep = (2 * config["num_hidden_layers"]) ** -0.5
    with (folder / f".{shard.name}").open("wb") as file:
        file.write(shard.header)
        for target in targets:
            values = np.ones(target.shape, np.float32)
            if len(target.shape) > 1:
                scale = deep if "o_proj" in target.name or "down_proj" in target.name else 1.0
                values = rng.standard_normal(target.shape, np.float32) * np.float32(0.02 * scale)
            file.seek(target.offset)
            # The upper half of a float32, rounded up where the lower half is at least its half.
            file.write(((values.view(np.uint32) + 0x8000) >> 16).astype("<u2").tobytes())
    (folder / f".{shard.name}").rename(folder / shard.name)
    hf_io.write_index(folder, targets)


def train(options: argparse.Namespace, case: str, common: list[str]) -> dict[str, Any]:
    """Run one curve; its losses, or what its log ends with."""
    folder = options.output_dir / case
    began = time.perf_counter()
    flags = [*common, "--output-dir", str(folder), *CASES[case]]
    log = folder.with_suffix(".log")
    status = start.ranks("pretrain", 1, flags, log)
    seconds = round(time.perf_counter() - began, 1)
    if status:
        print(f"{case}: FAILED with status {status}\n{start.end_of(log, 12)}", flush=True)
        return {"case": case, "failed": start.end_of(log, 3)[-400:]}
    losses = [r["lm loss"] for r in metrics.read(folder)]
    print(f"{case:<12} {losses[0]:.4f} -> {losses[-1]:.4f} in {seconds} s", flush=True)
    return {"case": case, "flags": CASES[case], "losses": losses, "seconds": seconds}


def gaps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each curve its end, and how far it lies from bf16's and from fp32's.

    The end is the mean of the last :data:`TAIL` steps; the batches are the same ones in all curves,
    so that most of the noise of single steps goes out in a difference.
    """
    curves = {row["case"]: row["losses"] for row in rows if "failed" not in row}
    made = []
    for case, losses in curves.items():
        row: dict[str, Any] = {"case": case, "end": float(np.mean(losses[-TAIL:]))}
        for other in ("bf16", "fp32"):
            if other in curves and other != case:
                size = min(len(losses), len(curves[other]))
                apart = np.array(losses[:size]) - np.array(curves[other][:size])
                row[f"gap_to_{other}"] = float(np.mean(apart[-TAIL:]))
                row[f"largest_to_{other}"] = float(np.abs(apart).max())
        made.append(row)
    return made


def draw(rows: list[dict[str, Any]], output: Path) -> None:
    """Curves, and below them their distance from bf16, averaged over :data:`TAIL` steps."""
    import io

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves = {row["case"]: np.array(row["losses"]) for row in rows if "failed" not in row}
    if not curves:
        return
    reference = curves.get("bf16", next(iter(curves.values())))
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 7), dpi=120, sharex=True)
    for case, losses in curves.items():
        steps = np.arange(1, len(losses) + 1)
        above.plot(steps, losses, label=case, linewidth=1.0)
        size = min(len(losses), len(reference))
        window = min(TAIL, size)
        apart = np.convolve(losses[:size] - reference[:size], np.ones(window) / window, "valid")
        below.plot(steps[window - 1 : size], apart, label=case, linewidth=1.0)
    above.set_ylabel("training loss")
    below.set_ylabel(f"minus bf16, mean of {TAIL} steps")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    above.legend()
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    pyplot.close(figure)
    atomic_write(output, buffer.getvalue())


def show(rows: list[dict[str, Any]], out: Path) -> None:
    """Print the gaps and draw the picture."""
    for row in gaps(rows):
        apart = "".join(
            f"  {row[f'gap_to_{other}']:+.4f} from {other}"
            for other in ("bf16", "fp32")
            if f"gap_to_{other}" in row
        )
        print(f"{row['case']:<12} {row['end']:.4f} over the last {TAIL} steps{apart}")
    try:
        draw(rows, out / "fp8_convergence.png")
    except ImportError:
        print("no picture: matplotlib is not installed here; --draw makes it elsewhere")
    else:
        print(out / "fp8_convergence.png")


def main() -> int:
    """Run the curves side by side, print their ends, write JSON and PNG."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help=f"default: {' '.join(CASES)}")
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--config", type=Path, help="a config.json; default: 126 M weights")
    parser.add_argument("--data-path", help="idxmap prefix; default: the demo's text")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--global-batch-size", type=int, default=8)
    parser.add_argument("--lr", default="5e-4")
    parser.add_argument("--jobs", type=int, default=6, help="runs at a time on the GPU")
    parser.add_argument("--draw", action="store_true", help="only draw what the JSON holds")
    options, more = parser.parse_known_args()
    out: Path = options.output_dir
    record = out / "fp8_convergence.json"
    if options.draw:
        show(json.loads(record.read_text())["rows"], out)
        return 0
    unknown = [case for case in options.cases if case not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; {', '.join(CASES)} are")
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads(options.config.read_text()) if options.config else shape()
    data = options.data_path or start.demo_text(out)
    model, size = out / "weights", str(options.global_batch_size)
    write_weights(model, config)
    common = ["--hf-model", str(model), "--init-from", str(model), "--data-path", data]
    common += ["--seq-length", str(options.seq_length), "--train-iters", str(options.steps)]
    common += ["--global-batch-size", size, "--micro-batch-size", size, "--seed", "1"]
    common += ["--lr", options.lr, "--warmup-steps", str(max(1, options.steps // 10))]
    common += ["--save-interval", "100000", "--no-save-optim", *more]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda case: train(options, case, common), options.cases or CASES))
    tokens = options.seq_length * options.global_batch_size
    written = {"command": sys.argv[1:], "tokens_a_step": tokens, "config": config}
    atomic_write(record, json.dumps({**written, "rows": rows, "gaps": gaps(rows)}, indent=1))
    try:
        show(rows, out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
