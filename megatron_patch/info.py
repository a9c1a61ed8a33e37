"""``megatron-patch info``: what is installed, what is broken, what is missing for what.

Nothing here imports torch, megatron or Transformer Engine into this process: a broken one is looked
at in a child process, so that its failure is an answer and not the end. :func:`diagnose` is the
part that entry points call before they import Megatron, which a broken Transformer Engine kills.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_patch import __version__, _compat
from megatron_patch.platform.detect import nvidia_device
from megatron_patch.util import atomic_write, die_with, human_bytes

#: Seconds a child may take to import a package before it counts as hanging.
_PATIENCE = 300


@dataclass(frozen=True, slots=True)
class Problem:
    """Something installed that cannot work.

    Attributes:
        what: The package or part, as the user knows it.
        detail: What is wrong with it.
        remedy: What to do.
        fatal: Megatron cannot be imported or used at all.
    """

    what: str
    detail: str
    remedy: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.what}: {self.detail}. {self.remedy}"


@dataclass(frozen=True, slots=True)
class Part:
    """A package that matters.

    Attributes:
        name: As printed.
        distribution: Name on the package index.
        module: Name to import.
        purpose: What it is for; shown where it is missing.
        remedy: How to get it; empty where it is part of the plain installation.
        required: Nothing runs without it.
    """

    name: str
    distribution: str
    module: str
    purpose: str
    remedy: str = ""
    required: bool = False


def install_line(extra: str = "", *options: str) -> str:
    """The pip line for this project, which is installed from its checkout and on no index."""
    root = Path(__file__).resolve().parents[1]
    here = (root / "pyproject.toml").is_file()
    place = shlex.quote((str(root) if here else ".") + (f"[{extra}]" if extra else ""))
    return " ".join(["pip install", *options, "-e", place]) + ("" if here else " in the checkout")


_PLAIN = install_line()

PARTS: tuple[Part, ...] = (
    Part("megatron-core", "megatron-core", "megatron.core", "everything", _PLAIN, True),
    Part("torch", "torch", "torch", "everything", _PLAIN, True),
    Part("transformers", "transformers", "transformers", "loading exports", _PLAIN, True),
    Part("tokenizers", "tokenizers", "tokenizers", "tokenizing", _PLAIN, True),
    Part("safetensors", "safetensors", "safetensors", "Hugging Face weights", _PLAIN, True),
    Part("sentencepiece", "sentencepiece", "sentencepiece", "*.model tokenizers", _PLAIN, True),
    Part("numpy", "numpy", "numpy", "everything", _PLAIN, True),
    Part("triton", "triton", "triton", "fused GPU kernels of torch and fla", "comes with torch"),
    Part("gigatoken", "gigatoken", "gigatoken", "the fastest preprocessing", install_line("fast")),
    Part(
        "flash-linear-attention",
        "flash-linear-attention",
        "fla",
        "Gated DeltaNet layers (Qwen3-Next, Qwen3.5)",
        install_line("fla"),
    ),
    Part("tiktoken", "tiktoken", "tiktoken", "tiktoken vocabularies", "pip install tiktoken"),
    Part("zstandard", "zstandard", "zstandard", "reading *.zst text", "pip install zstandard"),
    Part("pyarrow", "pyarrow", "pyarrow", "reading parquet text", "pip install pyarrow"),
    Part("matplotlib", "matplotlib", "matplotlib", "OUT/loss.png", _PLAIN),
    Part("tensorboard", "tensorboard", "tensorboard", "OUT/tensorboard", _PLAIN),
    Part("wandb", "wandb", "wandb", "--wandb-project", "pip install wandb"),
    Part(
        "nvidia-resiliency-ext",
        "nvidia-resiliency-ext",
        "nvidia_resiliency_ext",
        "--async-save with --async-strategy nvrx (mcore works without)",
        "pip install nvidia-resiliency-ext",
    ),
)

#: Of use only where there is a GPU.
GPU_PARTS: tuple[Part, ...] = (
    Part(
        "transformer-engine",
        "transformer-engine",
        "transformer_engine",
        "FP8, fused attention and layers at full speed (without: this library's torch modules)",
        # Its torch part is compiled against the torch that is installed.
        install_line("te-{cuda}", "--no-build-isolation"),
    ),
    Part(
        "flash-attn",
        "flash-attn",
        "flash_attn",
        "an alternative to cuDNN attention inside Transformer Engine",
        "pip install --no-build-isolation flash-attn",
    ),
    Part(
        "deep_ep",
        "deep-ep",
        "deep_ep",
        "the DeepEP token dispatcher (--moe-token-dispatcher-type flex)",
        "see github.com/deepseek-ai/DeepEP",
    ),
    Part(
        "apex",
        "apex",
        "apex",
        "nothing: gradient-accumulation fusion works without it here",
    ),
)

# Runs in a child, after `_torch_build`. Prints one JSON line; a failing import ends it with a
# traceback instead.
_TORCH_PROBE = """
import json, torch, warnings
found = _torch_build(torch, torch.version.cuda)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    available = torch.cuda.is_available()
if available:
    arches = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        runs = any(a in arches for a in (f"sm_{p.major}{p.minor}", f"sm_{p.major}{p.minor}a"))
        runs = runs or any(a.split("_")[1].startswith(str(p.major)) for a in arches)
        found["gpus"].append({"name": p.name, "memory": p.total_memory,
                              "capability": f"{p.major}.{p.minor}", "runs": runs})
elif torch.version.cuda:
    try:
        torch.cuda.init()
    except Exception as error:
        found["error"] = str(error).strip().splitlines()[0]
print(json.dumps(found))
"""

_TE_PROBE = """
import json, torch
import transformer_engine.pytorch
from transformer_engine.pytorch.cpp_extensions import general_gemm
print(json.dumps({"cuda": torch.version.cuda}))
"""


def _child(code: str) -> tuple[dict[str, Any] | None, str]:
    """Run Python code that prints one JSON line; (its answer or None, what went wrong)."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            preexec_fn=functools.partial(die_with, os.getpid()),  # a killed run's would go on
        )
    except subprocess.TimeoutExpired:
        return None, f"the import did not end within {_PATIENCE} s"
    if done.returncode == 0:
        return json.loads(done.stdout.strip().splitlines()[-1]), ""
    if done.returncode < 0:
        return None, f"the import was killed by signal {-done.returncode}"
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    return None, lines[-1].strip() if lines else f"the import ended with status {done.returncode}"


def _torch() -> tuple[dict[str, Any] | None, str]:
    """What torch has and can use; (its answer or None, what went wrong).

    Where it is imported already and there is no GPU to wake, without a child.
    """
    torch = sys.modules.get("torch")
    if torch is None or nvidia_device() is not None or torch.cuda.is_available():
        return _torch_in_child()
    return _torch_build(torch, _compat.torch_cuda_version()), ""


def _torch_in_child() -> tuple[dict[str, Any] | None, str]:
    return _child("from typing import Any\n\n\n" + inspect.getsource(_torch_build) + _TORCH_PROBE)


def _torch_build(torch: Any, cuda: str | None) -> dict[str, Any]:
    """What torch was built with."""
    found: dict[str, Any] = {"cuda": cuda, "cudnn": None, "nccl": None, "gpus": []}
    found["error"] = None
    try:
        found["cudnn"] = torch.backends.cudnn.version()
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:
        found["error"] = str(error)
    return found


def _cuda_extra(cuda: str | None) -> str:
    """Which Transformer Engine extra fits torch's CUDA: ``cu12`` or ``cu13``."""
    return f"cu{(cuda or '13').split('.')[0]}"


# --- Transformer Engine ------------------------------------------------------------------------


def _te_versions() -> dict[str, str]:
    names = ("transformer-engine", "transformer-engine-torch")
    cores = ("transformer-engine-cu12", "transformer-engine-cu13")
    versions = {name: _compat.installed_version(name) for name in (*names, *cores)}
    return {name: version for name, version in versions.items() if version}


def explain_te(error: str, versions: dict[str, str], cuda: str | None) -> Problem:
    """The cause and remedy of a Transformer Engine that does not import.

    Args:
        error: Last line of what the import said.
        versions: Installed versions of its distributions.
        cuda: CUDA version of the installed torch, such as ``13.0``.
    """
    error = error.rstrip(". ") if len(error) < 240 else error[:240] + " ..."
    fitting = _cuda_extra(cuda)
    release = versions.get("transformer-engine", "")
    pin = f"=={release}" if release else ""
    install = (
        "pip install --no-build-isolation --force-reinstall --no-deps "
        f"transformer-engine{pin} transformer-engine-{fitting}{pin} transformer-engine-torch{pin}"
    )
    escape = "; or remove it to run on this library's torch modules: pip uninstall " + " ".join(
        versions or ["transformer-engine"]
    )
    low = error.lower()
    library = re.search(r"(lib[\w+-]+\.so[.\d]*): cannot open shared object", error)
    if library and library.group(1).startswith("libcuda.so"):
        detail = "it needs the NVIDIA driver (libcuda.so.1), and this machine has none"
        return Problem("Transformer Engine", detail, f"Run on a machine with a GPU{escape}")
    needs = re.search(r"No module named '([\w.]+)'", error)
    if needs and not needs.group(1).startswith("transformer_engine"):
        detail = f"a package that it needs, {needs.group(1)}, is not installed"
        return Problem(
            "Transformer Engine", detail, f"pip install {needs.group(1).split('.')[0]}{escape}"
        )
    cores = [name.rpartition("-")[2] for name in versions if name[-4:-2] == "cu"]
    if cores and fitting not in cores:
        detail = f"it is built for CUDA {cores[0][2:]}, and the installed torch for CUDA {cuda}"
        return Problem("Transformer Engine", detail, f"Install the fitting one: {install}{escape}")
    if not cores and "meta package" in low:
        detail = f"its core library (transformer-engine-{fitting}) is not"
        return Problem(
            "Transformer Engine", f"{detail} installed", f"Install it: {install}{escape}"
        )
    torch_part = "transformer-engine-torch" in versions and "transformer_engine_torch" not in low
    if not torch_part and "undefined symbol" not in low:
        detail = f"its torch library (transformer-engine-torch) is missing ({error})"
        return Problem(
            "Transformer Engine", detail, f"Build it against this torch: {install}{escape}"
        )
    if "undefined symbol" in low or "glibcxx" in low or "abi" in low.split():
        torch = _compat.installed_version("torch")
        detail = f"it was built against another torch than the installed {torch} ({error})"
        rebuild = (
            "pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps "
            f"transformer-engine-torch{pin}"
        )
        return Problem("Transformer Engine", detail, f"Build it anew: {rebuild}{escape}")
    if library:
        detail = f"the library {library.group(1)} that it needs is not found"
        return Problem(
            "Transformer Engine",
            detail,
            f"Install that CUDA library or put its folder on LD_LIBRARY_PATH{escape}",
        )
    return Problem(
        "Transformer Engine", f"it does not import: {error}", f"Reinstall it: {install}{escape}"
    )


def _te_key(versions: dict[str, str]) -> str:
    """What a successful import depends on: when any of it changes, it is tried again."""
    spec = find_spec("transformer_engine")
    folder = Path(spec.origin).parent if spec and spec.origin else Path(sys.prefix)
    stamps = sorted(f"{path}:{path.stat().st_mtime_ns}" for path in folder.rglob("*.so"))
    facts = [
        sys.prefix,
        socket.gethostname(),
        json.dumps(versions),
        str(_compat.installed_version("torch")),
        os.environ.get("LD_LIBRARY_PATH", ""),
        *stamps,
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def te_problem(*, use_cache: bool = True) -> Problem | None:
    """Import Transformer Engine in a child process if it is installed, and explain a failure.

    A success is remembered in the user's cache directory, so that a training start pays for the
    child once per installation, not once per run.
    """
    if find_spec("transformer_engine") is None:
        return None
    versions = _te_versions()
    key = _te_key(versions)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = Path(home) / "megatron_patch" / "transformer_engine_ok"
    try:
        if use_cache and cache.read_text() == key:
            return None
    except OSError:
        pass
    answer, error = _child(_TE_PROBE)
    if answer is None:
        return explain_te(error, versions, _compat.torch_cuda_version())
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(cache, key)
    except OSError:
        pass  # a read-only home: the next start asks again
    return None


def diagnose() -> list[Problem]:
    """What would kill or spoil ``import megatron.core``; empty if nothing is known to.

    Transformer Engine is tried by a child process, once per installation, by a node's first rank.
    """
    if problems := version_problems():
        return problems
    broken = te_problem() if os.environ.get("LOCAL_RANK", "0") == "0" else None
    return [broken] if broken else []


def te_problem_here() -> Problem | None:
    """Import Transformer Engine, if it is installed, in this process and explain a failure."""
    if find_spec("transformer_engine") is None:
        return None
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a broken binary raises OSError, RuntimeError, AttributeError, ...
        return explain_te(str(error), _te_versions(), _compat.torch_cuda_version())
    return None


def version_problems() -> list[Problem]:
    """Packages without which nothing runs: absent or of a version that is not supported."""
    problems = []
    for what, text in (
        ("Megatron-Core", _compat.core_problem()),
        ("PyTorch", _compat.torch_problem()),
    ):
        if text:
            detail, _, remedy = text.partition(": ")
            problems.append(Problem(what, detail, f"Run {remedy}"))
    return problems


# --- the machine -------------------------------------------------------------------------------


def _nvidia_smi() -> tuple[list[dict[str, Any]], str | None, str | None]:
    """GPUs the driver lists, its version, and what is wrong with it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [], None, None
    query = "name,memory.total,compute_cap,driver_version"
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={query}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], None, str(error)
    if done.returncode != 0:
        return [], None, (done.stdout + done.stderr).strip().splitlines()[0]
    gpus, driver = [], None
    for line in done.stdout.strip().splitlines():
        name, memory, capability, driver = (cell.strip() for cell in line.split(","))
        mebibytes = int(memory) if memory.isdigit() else 0
        gpus.append({"name": name, "memory": mebibytes << 20, "capability": capability})
    return gpus, driver, None


def _memory() -> int:
    """Bytes of memory this process may use: the machine's, or the container's limit if smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def _shared_memory() -> int | None:
    """Bytes of /dev/shm, which data workers and NCCL inside a container live on."""
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


_ENVIRONMENT = re.compile(r"^(CUDA_|NCCL_|NVTE_|GLOO_|UCX_|TORCH_|PYTORCH_|OMP_NUM|NVSHMEM_)")


def gather() -> dict[str, Any]:
    """Everything that ``megatron-patch info`` prints, JSON-able."""
    problems = version_problems()
    gpus, driver, smi_error = _nvidia_smi()
    torch: dict[str, Any] = {}
    if find_spec("torch"):
        answer, error = _torch()
        if answer is None:
            problems.append(
                Problem(
                    "PyTorch",
                    f"it does not import: {error}",
                    f"Reinstall it: pip install --force-reinstall 'torch>={_compat.TORCH_MIN}'",
                )
            )
        else:
            torch = answer
    if smi_error:
        problems.append(
            Problem("NVIDIA driver", smi_error, "Repair or reload the driver", fatal=False)
        )
    problems += _gpu_problems(gpus, driver, torch)
    te = te_problem(use_cache=False) if torch else None
    if te:
        problems.append(te)

    parts = (*PARTS, *GPU_PARTS)
    installed = {part.name: _compat.installed_version(part.distribution) for part in parts}
    on_gpu = bool(gpus or torch.get("gpus"))
    missing = [
        {
            "name": part.name,
            "for": part.purpose,
            "remedy": part.remedy.format(cuda=_cuda_extra(torch.get("cuda"))),
        }
        for part in (*PARTS, *(GPU_PARTS if on_gpu else ()))
        if part.remedy and not installed[part.name] and find_spec(part.module.split(".")[0]) is None
    ]
    return {
        "megatron_patch": __version__,
        "supported_megatron_core": f">={_compat.MEGATRON_CORE_MIN},<{_compat.MEGATRON_CORE_BELOW}",
        "python": platform.python_version(),
        "executable": sys.executable,
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": {
            "name": _cpu_name(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "memory": _memory(),
            "shared_memory": _shared_memory(),
        },
        "driver": driver,
        "gpus": torch.get("gpus") or gpus,
        "torch": {"version": installed["torch"], **torch},
        "transformer_engine": _te_versions(),
        "packages": installed,
        "environment": {k: v for k, v in sorted(os.environ.items()) if _ENVIRONMENT.match(k)},
        "missing": missing,
        "problems": [asdict(problem) for problem in problems],
    }


def _cpu_name() -> str:
    """Model name of the processor, where Linux tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()


def _gpu_problems(
    gpus: Sequence[dict[str, Any]], driver: str | None, torch: dict[str, Any]
) -> list[Problem]:
    """Contradictions between the driver's GPUs and what torch can use of them."""
    problems = []
    if gpus and torch and not torch["gpus"]:
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            return []  # hidden on purpose
        if torch["cuda"] is None:
            remedy = "Install torch's CUDA build: pip install --force-reinstall torch"
            detail = f"{len(gpus)} GPUs, but the installed torch is a CPU-only build"
        else:
            detail = (
                f"{len(gpus)} GPUs and driver {driver}, but torch, built for CUDA {torch['cuda']}, "
                f"cannot use them: {torch['error'] or 'no reason given'}"
            )
            remedy = (
                f"Update the driver to one for CUDA {torch['cuda']}, or install a torch build for "
                "the CUDA version that `nvidia-smi` shows"
            )
        problems.append(Problem("CUDA", detail, remedy))
    for name, capability in sorted(
        {(gpu["name"], gpu["capability"]) for gpu in torch.get("gpus", ()) if not gpu["runs"]}
    ):
        problems.append(
            Problem(
                "CUDA",
                f"the installed torch has no kernels for {name} (compute capability {capability})",
                "Install a torch release and CUDA build that supports this GPU",
            )
        )
    shared = _shared_memory()
    if gpus and shared is not None and shared < 1 << 30:
        problems.append(
            Problem(
                "/dev/shm",
                f"{human_bytes(shared)} only: NCCL and data workers fail with bus errors",
                "Start the container with --ipc=host or --shm-size=64g",
                fatal=False,
            )
        )
    return problems


def _lines(report: dict[str, Any]) -> list[str]:
    """The report as text, one fact a line."""
    cpu, torch = report["cpu"], report["torch"]
    cudnn, nccl = torch.get("cudnn"), torch.get("nccl")
    shm = cpu["shared_memory"]
    lines = [
        f"megatron_patch          {report['megatron_patch']} (for megatron-core "
        f"{report['supported_megatron_core']})",
        f"python                  {report['python']} ({report['executable']})",
        f"os                      {report['os']}",
        f"cpu                     {cpu['name']}, {cpu['usable_cores']} usable cores, "
        f"{human_bytes(cpu['memory'])}" + (f", /dev/shm {human_bytes(shm)}" if shm else ""),
        f"driver                  {report['driver'] or 'none found'}",
        f"torch's CUDA            {torch.get('cuda') or 'none'}"
        + (f", cuDNN {cudnn}" if cudnn else "")
        + (f", NCCL {nccl}" if nccl else ""),
    ]
    for index, gpu in enumerate(report["gpus"]):
        lines.append(
            f"gpu {index:<19} {gpu['name']}, {human_bytes(gpu['memory'])}, compute capability "
            f"{gpu['capability']}"
        )
    if not report["gpus"]:
        lines.append("gpus                    none: runs use the CPU platform (--device cpu)")
    versions = report["packages"] | report["transformer_engine"]
    lines += [f"{name:<23} {version or '-'}" for name, version in versions.items()]
    lines += [f"${name}={value}" for name, value in report["environment"].items()]
    if report["missing"]:
        lines += ["", "Not installed, and what it would be for:"]
        for part in report["missing"]:
            lines.append(f"  {part['name']:<23} {part['for']}: {part['remedy']}")
    for problem in report["problems"]:
        lines += ["", f"BROKEN  {problem['what']}: {problem['detail']}.", f"  {problem['remedy']}"]
    return lines


def main(argv: list[str]) -> int:
    """``megatron-patch info``: print the report; exit 1 if something installed is broken."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="megatron-patch info",
        description="Versions of everything that matters, what is broken, what is missing for "
        "what. Put its output into bug reports.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    report = gather()
    print(json.dumps(report, indent=2) if options.json else "\n".join(_lines(report)))
    return 1 if report["problems"] else 0
