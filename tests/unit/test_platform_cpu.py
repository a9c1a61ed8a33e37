"""The CPU platform: a frozen list, never beside CUDA, and nothing left behind."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
import types

import pytest

from megatron_patch.platform import cpu, detect, torch_backend
from megatron_patch.util import UserError

TORCH_CUDA = """
    Event Stream current_device current_stream default_stream device_count device_memory_used
    empty_cache get_device_capability get_device_properties get_rng_state
    is_current_stream_capturing manual_seed manual_seed_all max_memory_allocated
    max_memory_reserved memory_allocated memory_reserved memory_stats nvtx.range_pop
    nvtx.range_push reset_peak_memory_stats set_device set_rng_state set_stream stream synchronize
"""
FROZEN = {f"torch.cuda.{name}" for name in TORCH_CUDA.split()} | {
    "torch.Tensor.cuda",
    "torch.Tensor.record_stream",
    "torch.Tensor.type",
    "torch.nn.Module.cuda",
    "torch.utils.data.DataLoader.__init__",
    "megatron.core.tensor_parallel.random._get_cuda_rng_state",
    "megatron.core.tensor_parallel.random._set_cuda_rng_state",
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
    "megatron.training.training.initialize_megatron",
}


def run(code: str) -> str:
    """Run code in an interpreter of its own; its standard output."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_list_is_frozen():
    """A new symbol is a decision: it goes here too, with its reason in the module."""
    targets = [patch.target for patch in cpu.PATCHES]
    assert isinstance(cpu.PATCHES, tuple)
    assert len(targets) == len(set(targets))
    assert set(targets) == FROZEN
    # What is there stays there: the truth about CUDA is never one of the answers.
    assert not any("is_available" in target for target in targets)


def test_every_symbol_has_a_function_of_its_own():
    replaced = [patch.func for patch in cpu.PATCHES if patch.mode == "replace"]
    assert len({id(func) for func in replaced}) == len(replaced)


def test_refuses_beside_cuda(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu, "_mode", None)
    before = torch.cuda.current_device
    with pytest.raises(RuntimeError, match="never used where CUDA is available"):
        cpu.enable()
    assert torch.cuda.current_device is before
    assert cpu._mode is None


def test_devices_land_on_the_cpu_and_everything_is_put_back():
    out = run(
        """
        import os, torch
        import megatron.training.training, megatron.core.transformer.moe.token_dispatcher
        from megatron_patch.patches import registry
        from megatron_patch.platform import cpu

        places = {p.target: registry._locate(p.target) for p in cpu.PATCHES}
        before = {target: place.own() for target, place in places.items()}
        os.environ.pop("TORCHDYNAMO_DISABLE", None)
        environment = dict(os.environ)
        cpu.enable()
        cpu.enable()  # idempotent
        assert not torch.cuda.is_available()
        for target, place in places.items():
            assert place.own() is not before[target], target

        x = torch.arange(3.0)
        here = [
            torch.zeros(2, device="cuda"),
            torch.full((2,), 1.0, device="cuda:0"),
            torch.empty(2, device=torch.device("cuda", 1), pin_memory=True),
            torch.tensor([1], device=torch.cuda.current_device()),
            torch.arange(3, device="cuda"),
            torch.randn(2, device="cuda"),
            torch.zeros_like(x, device="cuda"),
            x.new_zeros(2, device="cuda"),
            x.to("cuda"),
            x.to(torch.device("cuda")),
            x.to(device="cuda"),
            x.to("cuda", torch.float16),
            x.to("cuda", non_blocking=True),
            x.to("cuda", dtype=torch.float64, copy=True),
            x.cuda(),
            x.cuda(non_blocking=True),
            x.pin_memory(),
            *torch.nn.Linear(2, 2).to("cuda").parameters(),
            *torch.nn.Linear(2, 2, device="cuda").parameters(),
            *torch.nn.Linear(2, 2).cuda().parameters(),
        ]
        with torch.device("cuda"):
            here.append(torch.ones(2))
        assert {t.device.type for t in here} == {"cpu"}
        assert x.to("cuda", torch.float16).dtype is torch.float16
        assert x.to("cuda", dtype=torch.float64, copy=True).dtype is torch.float64
        assert x.to(torch.float64).dtype is torch.float64
        assert x.to(here[0]).device.type == "cpu"
        assert x.type() == "torch.cuda.FloatTensor"
        assert x.type(torch.int64).dtype is torch.int64
        torch.cuda.manual_seed(5)
        state, first = torch.cuda.get_rng_state(), torch.rand(2, device="cuda")
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(2), first)
        with torch.cuda.stream(torch.cuda.Stream()):
            event = torch.cuda.current_stream().record_event()
        assert event.query() and event.elapsed_time(event) == 0.0
        assert torch.cuda.memory_stats()["anything"] == 0
        batch, = torch.utils.data.DataLoader([torch.ones(1)], pin_memory=True)
        assert not batch.is_pinned()

        cpu.disable()
        cpu.disable()
        for target, place in places.items():
            assert place.own() is before[target], target
        assert dict(os.environ) == environment
        for attempt in (lambda: torch.zeros(1, device="cuda"), lambda: x.to("cuda"), x.cuda):
            try:
                attempt()
            except (RuntimeError, AssertionError):
                continue
            raise SystemExit("CUDA still answered for")
        assert x.type() == "torch.FloatTensor"
        print("done")
        """
    )
    assert out.endswith("done\n")


def test_compilation_survives_enabling_after_megatron():
    """Dynamo's rules are made anew by every `init_process_group`: one function, one symbol."""
    out = run(
        """
        import torch
        import megatron.core.transformer.moe.moe_layer  # decorated with torch.compile, like this:
        from megatron_patch.platform import cpu

        calls = []

        def backend(graph, inputs):
            calls.append(graph)
            return graph.forward

        compiled = torch.compile(lambda x: x.sin() + 1, backend=backend)
        cpu.enable()
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        print(compiled(torch.zeros(3)).tolist(), len(calls))
        """
    )
    assert out == "[1.0, 1.0, 1.0] 1\n"


# --- which platform ---------------------------------------------------------------------------


def _pci(root, name, vendor, kind):
    folder = root / "sys" / "bus" / "pci" / "devices" / name
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor + "\n")
    if kind is not None:
        (folder / "class").write_text(kind + "\n")


def test_no_device(tmp_path):
    assert detect.nvidia_device(tmp_path) is None
    _pci(tmp_path, "0000:00:02.0", "0x8086", "0x030000")  # another maker's display
    _pci(tmp_path, "0000:01:00.1", "0x10de", "0x040300")  # the sound of a graphics card
    _pci(tmp_path, "0000:02:00.0", "0x10de", None)  # unreadable
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert detect.nvidia_device(tmp_path) is None


@pytest.mark.parametrize("kind", ["0x030000", "0x030200"])
def test_device_without_a_driver(tmp_path, kind):
    _pci(tmp_path, "0000:65:00.0", "0x10de", kind)
    assert detect.nvidia_device(tmp_path) == "PCI device 0000:65:00.0"


def test_device_node_and_driver(tmp_path):
    (tmp_path / "proc/driver/nvidia/gpus/0000:65:00.0").mkdir(parents=True)
    assert detect.nvidia_device(tmp_path).endswith("gpus/0000:65:00.0")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia1").touch()
    (tmp_path / "dev" / "nvidia0").touch()
    assert detect.nvidia_device(tmp_path) == str(tmp_path / "dev" / "nvidia0")


@pytest.mark.parametrize(
    ("device", "environ", "asked"),
    [
        (None, {}, None),
        ("cpu", {}, None),
        ("cuda", {}, "--device cuda"),
        (None, {"CUDA_VISIBLE_DEVICES": ""}, None),
        (None, {"CUDA_VISIBLE_DEVICES": "-1"}, None),
        (None, {"CUDA_VISIBLE_DEVICES": "0"}, "CUDA_VISIBLE_DEVICES=0"),
        (None, {"CUDA_VISIBLE_DEVICES": " 2,3 "}, "CUDA_VISIBLE_DEVICES=2,3"),
        (None, {"KUBERNETES_CONTAINER_RESOURCE_GPU": "0"}, None),
        (None, {"KUBERNETES_CONTAINER_RESOURCE_GPU": "8"}, "KUBERNETES_CONTAINER_RESOURCE_GPU=8"),
    ],
)
def test_what_asks_for_a_gpu(device, environ, asked):
    assert detect.asked_for_gpu(device, environ) == asked


@pytest.fixture
def machine(monkeypatch):
    """A machine by what is seen of it."""
    import torch

    def set_up(*, cuda=False, evidence=None, asked=None, built_for="13.0", init=None):
        def fail():
            if init is not None:
                raise RuntimeError(init)

        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "init", fail)
        monkeypatch.setattr(detect, "nvidia_device", lambda: evidence)
        monkeypatch.setattr(detect, "asked_for_gpu", lambda device: asked)
        monkeypatch.setattr(detect._compat, "torch_cuda_version", lambda: built_for)

    return set_up


def test_choice_without_doubt(machine):
    machine(cuda=True)
    assert detect.choose() == "cuda"
    machine()
    assert detect.choose() == "cpu"
    machine(evidence="/dev/nvidia0", init="hidden")
    assert detect.choose("cpu") == "cpu"


@pytest.mark.parametrize(
    ("seen", "device", "message"),
    [
        ({"cuda": True}, "cpu", r"--device cpu, but this machine has a working GPU: drop the flag"),
        (
            {"evidence": "/dev/nvidia0", "built_for": None},
            None,
            r"has an NVIDIA device \(/dev/nvidia0\).*built without CUDA: install a CUDA build.*"
            r"does not fall back to CPU.*megatron-patch info",
        ),
        (
            {"evidence": "/dev/nvidia0", "init": "driver too old (found 11040)\nmore"},
            None,
            r"does not come up: driver too old \(found 11040\)\. Training",
        ),
        (
            {"asked": "--device cuda"},
            "cuda",
            r"^--device cuda asks for a GPU.*is_available\(\) is False; check CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_choice_refused(machine, seen, device, message):
    machine(**seen)
    with pytest.raises(UserError, match=message):
        detect.choose(device)


# --- the torch backend ------------------------------------------------------------------------


def test_torch_backend_is_applied_and_reverted():
    out = run(
        """
        from megatron_patch.patches import registry
        from megatron_patch.platform import torch_backend

        places = {p.target: registry._locate(p.target) for p in torch_backend.PATCHES}
        before = {target: place.own() for target, place in places.items()}
        torch_backend.enable()
        assert set(registry.applied()) == {p.name for p in torch_backend.PATCHES}
        torch_backend.enable()  # idempotent
        assert len(registry.applied()) == len(torch_backend.PATCHES)

        from megatron.core import optimizer
        from megatron.core.models.gpt import gpt_layer_specs
        from megatron_patch.ops.adam import GroupStepAdam
        from megatron_patch.ops.backend import TorchSpecProvider
        from megatron_patch.ops.linear import Norm

        assert gpt_layer_specs.TESpecProvider is TorchSpecProvider
        assert gpt_layer_specs.TENorm is Norm
        assert optimizer.Adam is optimizer.distrib_optimizer.Adam is GroupStepAdam
        assert optimizer.USING_PYTORCH_OPTIMIZER is False
        for name in ("USING_APEX_OPTIMIZER", "HAVE_APEX_OR_TE"):
            assert getattr(optimizer.distrib_optimizer, name) is True

        registry.revert([p.name for p in torch_backend.PATCHES])
        assert registry.applied() == ()
        for target, place in places.items():
            assert place.own() is before[target], target
        print("done")
        """
    )
    assert out.endswith("done\n")


def test_every_torch_record_has_a_fingerprint_and_a_way_out():
    for patch in torch_backend.PATCHES:
        assert patch.group == "torch"
        assert patch.fingerprint
        assert patch.why
        assert patch.remove_when


def test_packages_for_gpus_are_as_if_not_installed(monkeypatch):
    """Megatron-Core takes their kernels wherever they import, as on a GPU image without its GPU."""
    apex, inner = types.ModuleType("apex"), types.ModuleType("apex.optimizers")
    monkeypatch.setitem(sys.modules, "apex", apex)
    monkeypatch.setitem(sys.modules, "apex.optimizers", inner)
    cpu._hide_gpu_packages()
    try:
        for name in ("apex", "apex.optimizers", "transformer_engine.pytorch"):
            with pytest.raises(ImportError):
                importlib.import_module(name)
        assert importlib.util.find_spec("transformer_engine") is None
    finally:
        cpu._show_gpu_packages()
    assert importlib.import_module("apex.optimizers") is inner
    assert "transformer_engine" not in sys.modules
