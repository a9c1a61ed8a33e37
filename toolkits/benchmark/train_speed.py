#!/usr/bin/env python3
r"""Training speed and memory of one model: this library, stock Megatron-Core, transformers + Liger.

All cases train the same shape on the same text, each in a process of its own, one after the other
on one machine. Warm-up steps are left out; the figure is the median of the rest. Model FLOPs are
counted by one formula for all (six for each weight of a matrix product and token, causal attention
by half its square) and compared with a matrix product that is measured in the same call.

    python toolkits/benchmark/train_speed.py --hf-model DIR --output-dir OUT \
        ours,mbs=8 ours,mbs=4,fp8=tensorwise stock,mbs=4 liger,mbs=4 liger-fp32,mbs=4

A case is NAME[,mbs=N][,FLAG=VALUE...], several values of a flag joined by `+`. NAME is

    ours        the defaults of the launchers; FLAG=VALUE are its flags (backend=torch, fp8=...)
    stock       what Megatron-Core does without this library's levers: no linear + cross-entropy
                fusion, its own kernels, its looks for NaN, and no gradient-accumulation fusion,
                which it refuses without Apex. A mixture of experts runs as in its MoE guide:
                alltoall dispatcher, grouped products, no fused permutation or routing
    liger       transformers + Liger kernels, weights and AdamW states in bf16
    liger-fp32  the same with fp32 weights and states under bf16 autocast: the like-for-like

Layers of a model that is too large, long sequences, and what offloading costs:

    train_speed.py --hf-model QWEN3_30B_A3B --layers 8 --output-dir OUT ours,mbs=2 stock,mbs=2
    train_speed.py --hf-model QWEN3_1.7B --seq-length 131072 --global-batch-size 2 --steps 4 \
        --warm-up 2 --output-dir OUT \
        ours,mbs=1,recompute-granularity=selective,recompute-modules=mlp
    train_speed.py --hf-model QWEN3_8B --global-batch-size 8 --steps 5 --warm-up 2 \
        --output-dir OUT ours,mbs=1 ours,mbs=1,cpu-offloading-optimizer
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]

import start  # noqa: E402

from megatron_patch.training import metrics  # noqa: E402
from megatron_patch.util import UserError, atomic_write, human_bytes  # noqa: E402

STOCK = (
    *("--linear-cross-entropy", "off", "--fused-kernels", "off"),
    *("--no-gradient-accumulation-fusion", "--rerun-mode", "disabled", "--bias-dropout-fusion"),
)
STOCK_MOE = ("--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm")
STOCK_MOE += ("--no-moe-permute-fusion", "--no-moe-router-fusion")
DEFAULT = ("ours,mbs=4", "ours,mbs=8", "stock,mbs=4", "liger,mbs=4", "liger-fp32,mbs=4")
VERSIONS = ("torch", "megatron-core", "transformer-engine", "transformers", "liger-kernel")


def flops_per_token(config: dict[str, Any], seq_length: int) -> float:
    """Model FLOPs of a training step a token, forward and backward, without recompute.

    Counts the weights of matrix products that a token passes (all of a dense layer, the chosen
    experts of a MoE layer, the output layer) and causal attention.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    attention = 2 * hidden * size * (heads + config["num_key_value_heads"])
    if config.get("num_experts"):
        mlp = 3 * hidden * config["moe_intermediate_size"] * config["num_experts_per_tok"]
        mlp += hidden * config["num_experts"]
    else:
        mlp = 3 * hidden * config["intermediate_size"]
    weights = layers * (attention + mlp) + hidden * config["vocab_size"]
    return 6.0 * weights + 6.0 * layers * heads * size * seq_length


def ceiling() -> float:
    """FLOP/s of a bf16 matrix product of 8192 on random numbers; median of 20."""
    import torch

    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for i in range(25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        end.record()
        end.synchronize()
        if i >= 5:
            times.append(start.elapsed_time(end) / 1e3)
    return 2 * n**3 / statistics.median(times)


def parse_case(text: str) -> tuple[str, int, list[str]]:
    """Name, micro batch and further flags of `ours,mbs=8,fp8=tensorwise`."""
    name, *settings = text.split(",")
    if name not in ("ours", "stock", "liger", "liger-fp32"):
        raise UserError(f"{text}: no case {name!r}; ours, stock, liger and liger-fp32 are")
    micro, flags = 4, []
    for setting in settings:
        key, equals, value = setting.partition("=")
        if key == "mbs":
            micro = int(value)
        else:
            flags += [f"--{key}", *(value.split("+") if equals else [])]
    if flags and name.startswith("liger"):
        raise UserError(f"{text}: a liger case takes mbs only")
    return name, micro, flags


def run_ours(options: argparse.Namespace, case: str, data: str, folder: Path) -> dict[str, Any]:
    """Train by the ordinary entry point."""
    name, micro, flags = parse_case(case)
    given = ["--hf-model", options.hf_model, "--data-path", data, "--output-dir", str(folder)]
    given += ["--seq-length", str(options.seq_length), "--micro-batch-size", str(micro)]
    given += ["--global-batch-size", str(options.global_batch_size)]
    given += ["--train-iters", str(options.steps), "--lr", "1e-5", "--warmup-steps", "2"]
    given += ["--seed", "1", "--save-interval", "100000", "--no-save-optim"]
    if options.profile:
        last = options.steps - 1
        given += ["--profile", "--use-pytorch-profiler", "--profile-ranks", "0"]
        given += ["--profile-step-start", str(last - 1), "--profile-step-end", str(last)]
    config = json.loads((Path(options.hf_model) / "config.json").read_text())
    if name == "stock":
        given += [*STOCK, *(STOCK_MOE if config.get("num_experts") else ())]
    if options.seq_length > config["max_position_embeddings"]:
        given += ["--max-position-embeddings", str(options.seq_length)]
    status = start.ranks("pretrain", options.gpus, [*given, *flags], folder.with_suffix(".log"))
    if status:
        raise RuntimeError(f"status {status}")
    records = metrics.read(folder)
    log = folder.with_suffix(".log").read_text(errors="replace")
    said = [line[2:] for line in log.splitlines() if line.startswith(("> start-up", "> attention"))]
    return {
        "said": said,
        "losses": [r["lm loss"] for r in records],
        "step_seconds": [
            options.global_batch_size * options.seq_length / r["tokens_per_second"] for r in records
        ],
        "peak_memory_bytes": max(r["peak_memory_bytes"] for r in records),
    }


def run_peer(options: argparse.Namespace, case: str, data: str, folder: Path) -> dict[str, Any]:
    """Train with transformers + Liger in a process of its own (`--peer`)."""
    result = folder.with_suffix(".json")
    command = [sys.executable, __file__, "--peer", case, "--result", str(result)]
    command += ["--hf-model", options.hf_model, "--data-path", data, "--output-dir", str(folder)]
    for name in ("steps", "seq_length", "global_batch_size"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    with (folder.with_suffix(".log")).open("wb") as sink:
        status = subprocess.run(
            command, stdout=sink, stderr=subprocess.STDOUT, check=False
        ).returncode
    if status:
        raise RuntimeError(f"status {status}")
    return dict(json.loads(result.read_text()))


def peer(options: argparse.Namespace) -> int:
    """One GPU, gradient accumulation, torch's fused AdamW, SDPA attention."""
    import numpy as np
    import torch
    from liger_kernel.transformers import AutoLigerKernelForCausalLM
    from transformers import AutoConfig

    from megatron_patch.data import idxmap

    name, micro, _ = parse_case(options.peer)
    config = AutoConfig.from_pretrained(options.hf_model)
    config.use_cache = False
    torch.manual_seed(1)
    master = name == "liger-fp32"
    dtype = torch.float32 if master else torch.bfloat16
    with torch.device("cuda"):
        model = AutoLigerKernelForCausalLM.from_config(
            config, torch_dtype=dtype, attn_implementation="sdpa"
        )
    model.to(dtype).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    index = idxmap.read_index(options.data_path)
    ids = np.memmap(index.bin_path, dtype=index.dtype, mode="r")
    length, micros = options.seq_length, options.global_batch_size // micro
    losses, seconds, at = [], [], 0
    for _ in range(options.steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        total = torch.zeros((), device="cuda")
        for _ in range(micros):
            need = micro * length
            if at + need > len(ids):
                at = 0
            batch = torch.from_numpy(ids[at : at + need].astype(np.int64)).view(micro, length)
            at += need
            batch = batch.cuda(non_blocking=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=master):
                loss = model(input_ids=batch, labels=batch).loss / micros
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total.item())
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated()
    record = {"losses": losses, "step_seconds": seconds, "peak_memory_bytes": peak}
    atomic_write(Path(options.result), json.dumps(record))
    return 0


def kernels(folder: Path, rows: int = 25) -> list[tuple[float, int, str]]:
    """Milliseconds, calls and name of the kernels that took longest in a profiled step."""
    trace = folder / "torch_profile" / "rank-0.json.gz"  # where Megatron-Core writes it
    with gzip.open(trace, "rt") as source:
        events = json.load(source)["traceEvents"]
    spent: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            spent[event["name"]].append(event["dur"] / 1e3)
    table = sorted(((sum(v), len(v), k) for k, v in spent.items()), reverse=True)
    return [(sum(t[0] for t in table), sum(t[1] for t in table), "all kernels"), *table[:rows]]


def main() -> int:
    """Run the cases, print the table, write `train_speed.json` after each of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--hf-model", required=True, help="directory with a config.json")
    parser.add_argument("--data-path", help="idxmap prefix; default: the demo's text")
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=4, help="steps left out")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--global-batch-size", type=int, default=16)
    parser.add_argument("--layers", type=int, help="so many layers of the model; default: all")
    parser.add_argument("--gpus", type=int, default=1, help="ranks of ours and stock")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one step")
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="JSON",
        help="an earlier train_speed.json (h200.json here): fail where a case's ratio to a peer "
        "that both calls ran fell by more than 5 %%",
    )
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        return peer(options)
    out: Path = options.output_dir
    out.mkdir(parents=True, exist_ok=True)
    try:
        cases = [(case, parse_case(case)) for case in options.cases or DEFAULT]
    except UserError as error:
        parser.error(str(error))
    data = options.data_path
    if data is None:
        data = start.demo_text(out)
    config = json.loads((Path(options.hf_model) / "config.json").read_text())
    if options.layers:
        config["num_hidden_layers"] = options.layers
        (out / "model").mkdir(exist_ok=True)
        atomic_write(out / "model" / "config.json", json.dumps(config))
        options.hf_model = str(out / "model")
    flops = flops_per_token(config, options.seq_length)
    import torch

    top = ceiling()
    torch.cuda.empty_cache()
    device = torch.cuda.get_device_name()
    tokens = options.global_batch_size * options.seq_length
    rows: list[dict[str, Any]] = []
    for case, (name, micro, flags) in cases:
        folder = out / case.replace(",", "-").replace("=", "")
        run = run_peer if name.startswith("liger") else run_ours
        row: dict[str, Any] = {"case": case, "name": name, "micro_batch_size": micro}
        started = time.perf_counter()
        try:
            row |= run(options, case, data, folder)
        except RuntimeError as error:
            lines = folder.with_suffix(".log").read_text(errors="replace").splitlines()
            words = [x for x in lines if "Error" in x or x.startswith("error")] or lines
            row["failed"] = f"{error}: {words[-1] if words else ''}"[:300]
            rows.append(row)
            _write(out, top, device, flops, rows)
            print(f"{case:<40} FAILED {row['failed']}", flush=True)
            continue
        step = statistics.median(row["step_seconds"][options.warm_up :])
        gpus = options.gpus if run is run_ours else 1
        row["gpus"], row["flags"] = gpus, flags
        row["tokens_per_second"] = tokens / step / gpus
        row["model_flops"] = tokens / step / gpus * flops
        row["share_of_ceiling"] = row["model_flops"] / top
        row["whole_process_seconds"] = round(time.perf_counter() - started, 1)
        rows.append(row)
        _write(out, top, device, flops, rows)
        print(
            f"{case:<40} {row['tokens_per_second']:>8,.0f} tokens/s a GPU  "
            f"{row['model_flops'] / 1e12:>4.0f} TFLOP/s ({row['share_of_ceiling']:.0%})  "
            f"{human_bytes(row['peak_memory_bytes']):>9}  "
            f"loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}",
            flush=True,
        )
        for line in row.get("said", ()):
            print(f"    {line}", flush=True)
        if options.profile and run is run_ours:
            for spent, calls, kernel in kernels(folder):
                print(f"    {spent:9.1f} ms {calls:>6} {kernel[:110]}")
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "failed" not in row and (
            row["name"] not in best
            or row["tokens_per_second"] > best[row["name"]]["tokens_per_second"]
        ):
            best[row["name"]] = row
    if "ours" in best:
        for name, other in best.items():
            if name != "ours":
                ratio = best["ours"]["tokens_per_second"] / other["tokens_per_second"]
                print(f"best of ours / best of {name}: {ratio:.2f}x")
    print(f"ceiling: {top / 1e12:.0f} TFLOP/s, a bf16 matrix product of 8192 on {device}")
    failed = int(any("failed" in row for row in rows))
    if options.compare:
        return compare(json.loads(options.compare.read_text())["rows"], rows) or failed
    return failed


def compare(before: list[dict[str, Any]], now: list[dict[str, Any]], allowed: float = 0.05) -> int:
    """Hold cases that both calls ran against a peer that both ran: machines differ, ratios less.

    Args:
        before: rows of an earlier `train_speed.json`.
        now: rows of this call.
        allowed: share by which a ratio may fall.

    Returns:
        1 where a ratio fell by more, or nothing could be compared.
    """
    old, new = (
        {r["case"]: r["tokens_per_second"] for r in rows if "failed" not in r}
        for rows in (before, now)
    )
    both = [case for case in old if case in new]
    peer = next((case for case in both if case.startswith(("liger", "stock"))), None)
    ours = [case for case in both if case.startswith("ours")]
    if peer is None or not ours:
        print(f"nothing to compare: a peer and a case of ours among {', '.join(old)} are needed")
        return 1
    status = 0
    for case in ours:
        was, is_now = old[case] / old[peer], new[case] / new[peer]
        fell = is_now < was * (1 - allowed)
        print(f"{case} / {peer}: {is_now:.3f}, {was:.3f} before{'  FELL' if fell else ''}")
        status |= fell
    return int(status)


def _write(out: Path, top: float, device: str, flops: float, rows: list[dict[str, Any]]) -> None:
    record = {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "versions": {n: _version(n) for n in VERSIONS},
        "command": sys.argv[1:],
        "flops_per_token": flops,
        "ceiling_flops": top,
        "rows": rows,
    }
    atomic_write(out / "train_speed.json", json.dumps(record, indent=1))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
