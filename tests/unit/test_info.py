"""`megatron-patch info` and the diagnosis before Megatron is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_patch import _compat, info

ROOT = Path(__file__).resolve().parents[2]
TE_META = (
    "RuntimeError: Found empty `transformer-engine` meta package installed. Install "
    "`transformer-engine` with framework extensions"
)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Make a Transformer Engine installation whose import does what the test says."""
    site, cache = tmp_path / "site", tmp_path / "cache"
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ['PYTHONPATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def make(body: str, *distributions: str) -> None:
        package = site / "transformer_engine"
        (package / "pytorch").mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(body)
        (package / "pytorch" / "__init__.py").write_text("")
        (package / "pytorch" / "cpp_extensions.py").write_text("general_gemm = None\n")
        for name in distributions:
            folder = site / f"{name.replace('-', '_')}-2.20.2.dist-info"
            folder.mkdir(exist_ok=True)
            (folder / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.20.2\n"
            )

    return make


ALL = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")


def test_sound_engine_is_no_problem_and_is_asked_once(engine, tmp_path):
    tries = tmp_path / "tries"
    engine(f"open({str(tries)!r}, 'a').write('x')\n", *ALL)
    assert info.diagnose() == []
    assert info.diagnose() == []
    assert tries.read_text() == "x"
    assert info.te_problem(use_cache=False) is None
    assert tries.read_text() == "xx"
    (tmp_path / "site" / "transformer_engine" / "new.so").write_bytes(b"")  # it was rebuilt
    assert info.diagnose() == []
    assert tries.read_text() == "xxx"


def test_only_a_nodes_first_rank_pays_for_the_import(engine, monkeypatch):
    engine("raise RuntimeError('broken')", *ALL)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert info.diagnose() == []
    monkeypatch.setenv("LOCAL_RANK", "0")
    (problem,) = info.diagnose()
    assert problem.fatal and "broken" in str(problem)


def test_broken_engine_is_found_and_not_remembered_as_sound(engine, capsys):
    engine("raise OSError('libcublas.so.13: cannot open shared object file')", *ALL)
    for _ in range(2):
        (problem,) = info.diagnose()
        assert "libcublas.so.13 that it needs is not found" in problem.detail
    assert info.main([]) == 1
    printed = capsys.readouterr().out
    assert "BROKEN  Transformer Engine: the library libcublas.so.13" in printed
    assert "LD_LIBRARY_PATH" in printed


def test_engine_that_crashes_the_interpreter(engine):
    engine("import os; os.abort()", *ALL)
    (problem,) = info.diagnose()
    assert "killed by signal 6" in problem.detail


VERSIONS = dict.fromkeys(ALL, "2.20.2")
REBUILD = "--force-reinstall --no-deps transformer-engine-torch==2.20.2"


@pytest.mark.parametrize(
    ("error", "missing", "cuda", "detail", "remedy"),
    [
        (
            TE_META,
            ("transformer-engine-cu13",),
            "13.0",
            "core library (transformer-engine-cu13)",
            "",
        ),
        (
            "FileNotFoundError: Could not find shared object file for Transformer Engine torch lib",
            ("transformer-engine-torch",),
            "13.0",
            "torch library (transformer-engine-torch) is missing",
            "--no-build-isolation",
        ),
        (
            "ImportError: transformer_engine_torch.so: undefined symbol: _ZN3c104cuda9SetDeviceEa",
            (),
            "13.0",
            "built against another torch",
            REBUILD,
        ),
        (
            "OSError: libcuda.so.1: cannot open shared object file: No such file or directory",
            (),
            "13.0",
            "needs the NVIDIA driver",
            "machine with a GPU",
        ),
        (
            "ModuleNotFoundError: No module named 'onnxscript'",
            (),
            "13.0",
            "package that it needs, onnxscript, is not",
            "pip install onnxscript",
        ),
        (
            "OSError: libcublas.so.13: cannot open shared object file",
            (),
            "12.8",
            "built for CUDA 13, and the installed torch for CUDA 12.8",
            "transformer-engine-cu12==2.20.2",
        ),
        ("ValueError: odd", (), "13.0", "it does not import: ValueError: odd", "Reinstall it"),
    ],
)
def test_causes_and_remedies(error, missing, cuda, detail, remedy):
    versions = {name: value for name, value in VERSIONS.items() if name not in missing}
    problem = info.explain_te(error, versions, cuda)
    assert detail in problem.detail
    assert remedy in problem.remedy
    assert "pip uninstall " + " ".join(versions) in problem.remedy


def test_unsupported_megatron_core_is_named_before_anything_is_imported(monkeypatch):
    monkeypatch.setattr(_compat, "installed_version", lambda name: "0.21.0")
    problems = {problem.what: problem for problem in info.diagnose()}
    assert str(problems["Megatron-Core"]) == (
        "Megatron-Core: megatron-core >=0.19.2,<0.20 is needed, 0.21.0 is installed. "
        "Run pip install 'megatron-core>=0.19.2,<0.20'"
    )
    monkeypatch.setattr(_compat, "installed_version", lambda name: None)
    assert {problem.what for problem in info.diagnose()} == {"Megatron-Core", "PyTorch"}


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("0.19.2", True),
        ("0.19.2+nv", True),
        ("0.19.10", True),
        ("0.19.1", False),
        ("0.20.0rc1", False),
        ("0.20.0", False),
        (None, False),
    ],
)
def test_supported_range(version, fits, monkeypatch):
    monkeypatch.setattr(_compat, "installed_version", lambda name: version)
    assert (_compat.core_problem() is None) == fits


def test_containers_prerelease_of_torch_counts(monkeypatch):
    for version, fits in (("2.8.0a0+abc.nv25.05", True), ("2.7.1", False), ("2.11.0", True)):
        monkeypatch.setattr(_compat, "installed_version", lambda name, v=version: v)
        assert (_compat.torch_problem() is None) == fits


def gpu(**changes):
    return {"name": "X", "memory": 80 << 30, "capability": "9.0", "runs": True} | changes


def test_gpus_that_torch_cannot_use(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(info, "_shared_memory", lambda: 64 << 30)
    seen = [gpu()]
    none = {"cuda": "13.0", "gpus": [], "error": "The NVIDIA driver on your system is too old"}
    (problem,) = info._gpu_problems(seen, "535.1", none)
    assert "built for CUDA 13.0" in problem.detail and "too old" in problem.detail
    (problem,) = info._gpu_problems(seen, "535.1", none | {"cuda": None})
    assert "CPU-only build" in problem.detail
    assert info._gpu_problems(seen, "1", {"cuda": "13.0", "gpus": seen, "error": None}) == []
    (problem,) = info._gpu_problems(
        seen, "1", {"cuda": "13.0", "gpus": [gpu(runs=False)], "error": None}
    )
    assert "no kernels for X (compute capability 9.0)" in problem.detail
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert info._gpu_problems(seen, "535.1", none) == []
    monkeypatch.setattr(info, "_shared_memory", lambda: 64 << 20)
    (problem,) = info._gpu_problems(seen, "1", {"cuda": "13.0", "gpus": seen, "error": None})
    assert not problem.fatal and "--ipc=host" in problem.remedy


def test_report_of_this_machine(tmp_path):
    """The real thing, in a process of its own, which must not have imported torch."""
    code = (
        "import sys, json; from megatron_patch import info; status = info.main(['--json']); "
        "assert not {'torch', 'megatron.core', 'transformers'} & set(sys.modules); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["packages"]["megatron-core"] == _compat.installed_version("megatron-core")
    assert report["torch"]["version"] == _compat.installed_version("torch")
    assert report["torch"]["cuda"] == _compat.torch_cuda_version()
    assert report["cpu"]["usable_cores"] >= 1 and report["problems"] == []
    absent = {part["name"] for part in report["missing"]}
    assert not absent & {name for name, version in report["packages"].items() if version}


def test_a_run_on_the_cpu_asks_the_torch_that_it_has(monkeypatch):
    """Each start of a run asks: a child that imports torch once more takes seconds of two cores."""
    import torch

    from_child = info.gather()["torch"] if torch.cuda.is_available() else None
    if from_child is None:
        answer, _ = info._torch_in_child()
        monkeypatch.setattr(info, "_child", None)
        from_child = {"version": _compat.installed_version("torch"), **answer, "error": None}
    assert info.gather()["torch"] == from_child


def test_missing_parts_name_what_they_are_for(monkeypatch):
    real = info.find_spec
    monkeypatch.setattr(
        info, "find_spec", lambda name: None if name in ("fla", "gigatoken") else real(name)
    )
    installed = _compat.installed_version
    hidden = ("flash-linear-attention", "gigatoken")
    monkeypatch.setattr(
        _compat, "installed_version", lambda n: None if n in hidden else installed(n)
    )
    report = info.gather()
    missing = {part["name"]: part for part in report["missing"]}
    assert missing["gigatoken"]["remedy"] == f"pip install -e '{ROOT}[fast]'"
    assert "Qwen3-Next" in missing["flash-linear-attention"]["for"]
    assert f"pip install -e '{ROOT}[fla]'" in "\n".join(info._lines(report))
