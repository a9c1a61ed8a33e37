#!/usr/bin/env python3
"""Time the preprocessing of pretraining data against Megatron-LM's own tools, as whole processes.

    preprocess_speed.py --megatron-lm DIR --tokenizer-model DIR --size 70M
    preprocess_speed.py --megatron-lm DIR --tokenizer-model DIR --size 5G --peers ours fast --runs 1

``--megatron-lm`` is a checkout of NVIDIA/Megatron-LM with tools/preprocess_data.py ("classic") and
tools/preprocess_data_fast.py ("fast", gigatoken). The corpus is real text that any Python carries:
the standard library's and the installed packages' sources and documents. Where that is not enough,
it is gone through again with every line changed a little, so that caches do not shine.

Peers take turns, so that a busy machine is busy for all of them. Time is wall time from start to
exit; memory is the highest resident set of the process tree (PSS where the kernel tells: pages that
workers share count once). The files of all peers are compared, byte by byte.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "toolkits/pretrain_data_preprocessing/preprocess_data.py"
PEERS = ("ours", "pieces", "reference", "classic", "fast")
_SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".c", ".json", ".html")
_DOCUMENT = 20_000  # characters a document has at most: about 4,000 documents in 70 MB


def texts() -> Iterator[str]:
    """Real text in a fixed order: the standard library first, then installed packages."""
    folders = [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))]
    for folder in dict.fromkeys(folders):
        for base, names, files in os.walk(folder):
            names[:] = sorted(n for n in names if n not in ("__pycache__", "site-packages"))
            for name in sorted(files):
                if not name.endswith(_SUFFIXES):
                    continue
                try:
                    text = (Path(base) / name).read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError):
                    continue
                for start in range(0, len(text), _DOCUMENT):
                    yield text[start : start + _DOCUMENT]


def make_corpus(path: Path, size: int) -> None:
    """Write JSON lines of about ``size`` bytes; an existing file of that size is kept."""
    if path.exists() and path.stat().st_size >= size:
        return
    print(f"making {path} ...", flush=True)
    written = 0
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as out:
        for turn in range(1_000_000):
            before = written
            for text in texts():
                if turn:
                    lines = text.split("\n")
                    text = "\n".join(
                        f"{line} v{turn}x{number}" if number % 3 == 0 else line
                        for number, line in enumerate(lines)
                    )
                written += out.write(json.dumps({"text": text}) + "\n")
                if written >= size:
                    break
            if written >= size:
                break
            if written == before:
                raise SystemExit("error: no text found on this machine")
    partial.rename(path)


def command(peer: str, args: argparse.Namespace, corpus: Path, prefix: Path) -> list[str]:
    """The command line of a peer."""
    common = ["--input", str(corpus), "--output-prefix", str(prefix), "--append-eod"]
    model = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", args.tokenizer_model]
    if peer in ("ours", "pieces", "reference"):
        engine = "auto" if peer == "ours" else peer
        own = ["--workers", str(args.workers), "--engine", engine, "--overwrite"]
        return [sys.executable, str(TOOL), *common, *model, *own]
    name = {"classic": "preprocess_data.py", "fast": "preprocess_data_fast.py"}[peer]
    tool = Path(args.megatron_lm) / "tools" / name
    if not tool.is_file():
        raise SystemExit(f"error: {tool} does not exist; --megatron-lm names another checkout?")
    if peer == "classic":
        more = ["--workers", str(args.workers), "--log-interval", "100000"]
    else:
        more = ["--use-gigatoken"]
    return [sys.executable, str(tool), *common, *model, *more]


class Memory(threading.Thread):
    """Samples the memory of a process tree until it ends; the highest sum is in ``peak``."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.peak = 0

    def run(self) -> None:
        """Sample about ten times a second, and never for more than a twentieth of the time."""
        while Path(f"/proc/{self.pid}").exists():
            start = time.perf_counter()
            self.peak = max(self.peak, sum(map(_memory, _tree(self.pid))))
            time.sleep(max(0.1, 20 * (time.perf_counter() - start)))


def _tree(pid: int) -> list[int]:
    found = [pid]
    for current in found:
        try:
            for task in Path(f"/proc/{current}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def _memory(pid: int) -> int:
    for file, key in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
                if line.startswith(key):
                    return int(line.split()[1]) * 1024
        except OSError:
            continue
    return 0


def measure(line: list[str], env: dict[str, str]) -> tuple[float, float, int]:
    """Seconds of wall time, seconds of CPU time of all processes, peak bytes."""
    before = os.times()
    start = time.perf_counter()
    process = subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
    )
    memory = Memory(process.pid)
    memory.start()
    try:
        output, _ = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # its workers, too
        raise
    wall = time.perf_counter() - start
    after = os.times()
    if process.returncode:
        raise SystemExit(
            f"error: {' '.join(line)} ended with {process.returncode}:\n{output.decode()[-2000:]}"
        )
    cpu = after.children_user - before.children_user
    cpu += after.children_system - before.children_system
    return wall, cpu, memory.peak


def _size(text: str) -> int:
    units = {"K": 10**3, "M": 10**6, "G": 10**9}
    return int(float(text[:-1]) * units[text[-1]]) if text[-1] in units else int(text)


def main() -> int:
    """Run the peers in turn and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megatron-lm", metavar="DIR", help="needed for classic and fast")
    parser.add_argument("--tokenizer-model", metavar="DIR", required=True)
    parser.add_argument("--size", type=_size, default=70_000_000, help="70M (default), 1G, 5G, ...")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=["ours", "classic", "fast"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work-dir", metavar="DIR", default="/tmp/preprocess_speed", type=Path)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there, too")
    args = parser.parse_args()
    if {"classic", "fast"} & set(args.peers) and not args.megatron_lm:
        parser.error("--megatron-lm is needed for classic and fast")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    args.work_dir.mkdir(parents=True, exist_ok=True)
    corpus = args.work_dir / f"corpus-{args.size}.jsonl"
    make_corpus(corpus, args.size)
    env = dict(os.environ)
    paths = [str(args.megatron_lm)] if args.megatron_lm else []
    env["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [env.get("PYTHONPATH")])])
    with corpus.open("rb") as handle:  # into the page cache, for whoever comes first
        while handle.read(1 << 24):
            pass
    figures: dict[str, list[tuple[float, float, int]]] = {peer: [] for peer in args.peers}
    for turn in range(args.runs):
        for peer in args.peers:
            prefix = args.work_dir / f"{peer}"
            wall, cpu, peak = measure(command(peer, args, corpus, prefix), env)
            figures[peer].append((wall, cpu, peak))
            print(
                f"run {turn + 1} {peer:10s} {wall:8.2f} s, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
            first = args.work_dir / args.peers[0]
            for suffix in ("_text_document.bin", "_text_document.idx"):
                if not filecmp.cmp(f"{first}{suffix}", f"{prefix}{suffix}", shallow=False):
                    print(f"      {peer}{suffix} DIFFERS from {args.peers[0]}{suffix}")
    size = corpus.stat().st_size
    median = {
        peer: tuple(statistics.median(column) for column in zip(*rows, strict=True))
        for peer, rows in figures.items()
    }
    print(
        f"\n{size / 1e6:.0f} MB, {args.workers} workers, median of {args.runs}\n"
        f"{'peer':10s} {'wall s':>8s} {'min':>8s} {'MB/s':>7s} {'CPU s':>7s} {'peak MiB':>9s}"
        f" {'times ' + args.peers[0]:>12s}"
    )
    base = median[args.peers[0]][0]
    for peer, (wall, cpu, peak) in median.items():
        least = min(row[0] for row in figures[peer])
        print(
            f"{peer:10s} {wall:8.2f} {least:8.2f} {size / wall / 1e6:7.1f} {cpu:7.1f} "
            f"{peak / 2**20:9.0f} {wall / base:12.1f}"
        )
    if args.json:
        args.json.write_text(json.dumps({"bytes": size, "runs": figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
