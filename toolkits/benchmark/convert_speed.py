#!/usr/bin/env python3
"""Conversion speed and memory beside copying the same bytes on the same disk, in one run.

python toolkits/benchmark/convert_speed.py --size 4GB --kind moe --workers 2 --dir SCRATCH

Makes a synthetic checkpoint of random bits, then times, each ended by a sync and repeated:
`cp -r` of the files with as many processes as workers, HF -> Megatron, and Megatron -> HF. The page
cache is warm, or with --cold is dropped (needs root) before each. The plan's time (starting
Megatron-Core once, the same for every size) is counted in the total and shown apart. Peak memory is
that of the largest process and of all processes together.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_patch.convert import hf_io  # noqa: E402
from megatron_patch.util import human_bytes  # noqa: E402


def config(kind: str, size: int) -> dict[str, object]:
    """A config.json whose bf16 weights have about ``size`` bytes."""
    hidden = 2048
    base: dict[str, object] = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128,
        "hidden_act": "silu", "hidden_size": hidden, "initializer_range": 0.02,
        "intermediate_size": 6144, "max_position_embeddings": 4096, "num_attention_heads": 16,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "tie_word_embeddings": False, "vocab_size": 100000, "torch_dtype": "bfloat16",
    }  # fmt: skip
    attention = hidden * 128 * (16 + 8 + 8 + 16)
    layer = attention + 3 * hidden * 6144
    if kind == "moe":
        base |= {
            "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
        layer = attention + 64 * 3 * hidden * 768
    fixed = 2 * 100000 * hidden
    base["num_hidden_layers"] = max(1, round((size / 2 - fixed) / layer))
    return base


def make(folder: Path, kind: str, size: int, shard: int = 5 * 10**9) -> int:
    """Write the checkpoint; returns its bytes."""
    from megatron_patch.convert import plan, rules

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(kind, size)))
    tensors = [
        (name, shape, "bfloat16")
        for rule in rules.spec_rules(plan.resolve(folder))
        for name, shape in zip(rule.hf, rule.shapes, strict=True)
    ]
    shards, targets = hf_io.plan_shards(tensors, shard)
    hf_io.create_shards(folder, shards)
    noise = os.urandom(64 << 20)
    for shard in shards:
        with (folder / shard.name).open("r+b") as handle:
            handle.seek(len(shard.header))
            left = shard.size - len(shard.header)
            while left:
                left -= handle.write(noise[: min(left, len(noise))])
    hf_io.write_index(folder, targets)
    return sum(shard.size for shard in shards)


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for one in found:
        try:
            for task in Path(f"/proc/{one}/task").iterdir():
                found += [int(p) for p in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


class Memory(threading.Thread):
    """Samples the resident memory of a process tree; file-backed pages count, too.

    ``one`` is the largest resident set of any process, ``all`` the largest sum of proportional sets
    (pages that processes share count once).
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.one, self.all = pid, 0, 0
        self.ended = threading.Event()

    def run(self) -> None:
        """Until `ended`."""
        while not self.ended.wait(0.1):
            total = 0
            for pid in tree(self.pid):
                try:
                    status = Path(f"/proc/{pid}/status").read_text()
                    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                except OSError:
                    continue
                peak = re.search(r"VmHWM:\s+(\d+)", status)
                share = re.search(r"^Pss:\s+(\d+)", rollup, re.MULTILINE)
                self.one = max(self.one, int(peak[1]) << 10 if peak else 0)
                total += int(share[1]) << 10 if share else 0
            self.all = max(self.all, total)


@dataclass(frozen=True)
class Round:
    """One measurement: seconds to the end of a sync, of moving data, of CPU; bytes of memory."""

    total: float
    moving: float
    cpu: float
    one: int
    all: int


def timed(command: list[str], cold: bool) -> Round:
    """Run a command from a clean disk to a synced one."""
    os.sync()
    if cold:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    before = os.times()
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    memory = Memory(process.pid)
    memory.start()
    _, errors = process.communicate()
    memory.ended.set()
    if process.returncode:
        raise SystemExit(errors)
    os.sync()
    seconds = time.perf_counter() - start
    after = os.times()
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    memory.join()
    moving = re.findall(r"in ([\d.]+) s", errors)
    return Round(seconds, float(moving[-1]) if moving else seconds, cpu, memory.one, memory.all)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="4GB")
    parser.add_argument("--kind", choices=("dense", "moe"), default="dense")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--scale", type=int, metavar="N", help="only HF -> Megatron, with 1 and with N workers"
    )
    parser.add_argument("--cold", action="store_true")
    parser.add_argument(
        "--dir", type=Path, required=True, help="scratch folder on the disk to test"
    )
    args = parser.parse_args()
    scratch = args.dir / "convert_speed"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        (scale if args.scale else run)(args, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def scale(args: argparse.Namespace, scratch: Path) -> None:
    """One worker against many, and `cp` with both numbers of processes: what the disk allows."""
    hf, out = scratch / "hf", scratch / "out"
    size = make(hf, args.kind, hf_io.parse_size(args.size, "--size"), 256 << 20)
    print(f"{args.kind}, {human_bytes(size)}, {os.cpu_count()} cores")
    convert = [sys.executable, "-m", "megatron_patch", "convert", "hf2mcore"]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    found: dict[str, list[float]] = {"convert": [], "copy": []}
    for workers in (1, args.scale):
        plain = f"mkdir {out} && find {hf} -type f -print0 | xargs -0 -n1 -P{workers} cp -t {out}"
        where = ["--input-dir", str(hf), "--output-dir", str(out), "--workers", str(workers)]
        for side, command in (("copy", ["sh", "-c", plain]), ("convert", [*convert, *where])):
            times = []
            for _ in range(args.repeat):
                shutil.rmtree(out, ignore_errors=True)
                times.append(timed(command, args.cold).moving)
            found[side].append(statistics.median(times))
            print(f"{side:8} {workers} workers: {found[side][-1]:.2f} s", flush=True)
    for side, (one, many) in found.items():
        print(f"{side:8} x{one / many:.2f} with {args.scale} workers")


def run(args: argparse.Namespace, scratch: Path) -> None:
    """The rounds; copying and both directions alternate, so that other load meets all alike."""
    hf, mcore, back, copy = (scratch / name for name in ("hf", "mcore", "back", "copy"))
    size = make(hf, args.kind, hf_io.parse_size(args.size, "--size"))
    print(f"{args.kind}, {human_bytes(size)}, {args.workers} workers, cache "
          f"{'cold' if args.cold else 'warm'}, {os.cpu_count()} cores")  # fmt: skip
    convert = [sys.executable, "-m", "megatron_patch", "convert"]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    workers = ["--workers", str(args.workers)]
    plain = (
        f"mkdir {copy} && find {hf} -type f -print0 | xargs -0 -n1 -P{args.workers} cp -t {copy}"
    )
    sides = {
        "copy": ["sh", "-c", plain],
        "hf2mcore": [*convert, "hf2mcore", "--input-dir", str(hf), "--output-dir", str(mcore),
                     *workers],
        "mcore2hf": [*convert, "mcore2hf", "--input-dir", str(mcore), "--output-dir", str(back),
                     *workers],
    }  # fmt: skip
    results: dict[str, list[Round]] = {side: [] for side in sides}
    for _ in range(args.repeat):
        for folder in (mcore, back, copy):
            shutil.rmtree(folder, ignore_errors=True)
        for side, command in sides.items():
            results[side].append(timed(command, args.cold))
    for shard in hf.glob("*.safetensors"):
        subprocess.run(["cmp", shard, back / shard.name], check=True)
    reference = statistics.median(r.total for r in results["copy"])
    for side, rounds in results.items():
        totals = [r.total for r in rounds]
        total, moving = statistics.median(totals), statistics.median(r.moving for r in rounds)
        print(
            f"{side:9} {total:6.1f} s ({min(totals):.1f}-{max(totals):.1f}), "
            f"x{total / reference:.2f} of copying; data {moving:.1f} s, "
            f"x{moving / reference:.2f}; CPU {statistics.median(r.cpu for r in rounds):.1f} s; "
            f"peak memory {human_bytes(max(r.one for r in rounds))} in one process, "
            f"{human_bytes(max(r.all for r in rounds))} in all"
        )


if __name__ == "__main__":
    main()
