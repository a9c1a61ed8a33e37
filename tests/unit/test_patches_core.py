"""The core patches, against the installed Megatron-Core: each defect is shown, then its cure."""

from __future__ import annotations

import importlib
import os
import queue
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_patch.patches import registry
from megatron_patch.util import UserError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def patched():
    """Apply patches by name for one test."""

    def apply(*names: str) -> None:
        assert set(registry.apply(names)) == set(names)

    registry.revert()
    yield apply
    registry.revert()


def test_every_core_patch_fits_the_installed_wheel_and_can_be_taken_away():
    registry.revert()
    findings = registry.verify("core")
    assert [f"{f.patch.name}: {f.problem}" for f in findings if f.problem] == []
    originals = {p.target: registry._locate(p.target).get() for p in registry.patches("core")}
    applied = registry.apply()
    assert set(applied) == {f.patch.name for f in findings if not f.skip}
    assert registry.apply() == ()
    for patch in registry.patches("core"):
        assert (registry._locate(patch.target).get() is not originals[patch.target]) == (
            patch.name in applied
        )
    registry.revert()
    for target, original in originals.items():
        assert registry._locate(target).get() is original


# --- dataset-helpers --------------------------------------------------------------------------


def test_stock_helper_build_exits_and_patched_one_returns(patched, capfd):
    from megatron.core.datasets import utils

    with pytest.raises(SystemExit):
        utils.compile_helpers()
    patched("dataset-helpers")
    capfd.readouterr()
    utils.compile_helpers()
    assert capfd.readouterr().out == ""


def test_missing_helper_is_explained(patched, monkeypatch):
    from megatron.core.datasets import utils

    patched("dataset-helpers")
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", None)
    with pytest.raises(UserError, match=r"no Makefile.*reinstall the wheel"):
        utils.compile_helpers()


# --- gradient-accumulation fusion -------------------------------------------------------------


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A gloo world of one, with Megatron's groups."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as tp_random

    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    tracker = tp_random.get_cuda_rng_tracker()
    yield parallel_state
    tracker.reset()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def column_linear(fusion: bool, dtype: torch.dtype):
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    config = ModelParallelConfig(
        gradient_accumulation_fusion=fusion,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=dtype,
    )
    torch.manual_seed(1)
    layer = ColumnParallelLinear(
        12, 10, config=config, init_method=torch.nn.init.normal_, bias=False, skip_bias_add=False
    )
    torch.nn.init.normal_(layer.weight)
    return layer


@pytest.mark.skipif(
    "fused_weight_gradient_mlp_cuda" in sys.modules
    or importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
    reason="Apex is installed",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_weight_gradient_equals_autograd(one_rank, patched, monkeypatch, dtype):
    with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
        column_linear(True, dtype)
    patched("grad-accum-kernel", "grad-accum-gate")
    # Upstream asks CUDA for a device for its dummy gradient; here it is the CPU.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    plain, fused = column_linear(False, dtype), column_linear(True, dtype)
    assert torch.equal(plain.weight, fused.weight)
    fused.weight.main_grad = torch.zeros(fused.weight.shape, dtype=torch.float32)
    fused.weight.grad_added_to_main_grad = False
    wanted = torch.zeros_like(fused.weight.main_grad)
    for seed in range(2):  # two micro-batches add up
        torch.manual_seed(seed)
        inputs = torch.randn(3, 4, 12, dtype=dtype)
        out_grad = torch.randn(3, 4, 10, dtype=dtype)
        plain(inputs)[0].backward(out_grad)
        fused(inputs)[0].backward(out_grad)
        wanted += out_grad.flatten(0, 1).float().t() @ inputs.flatten(0, 1).float()
    assert fused.weight.grad_added_to_main_grad
    torch.testing.assert_close(fused.weight.main_grad, wanted, rtol=1e-5, atol=1e-5)
    if dtype == torch.float32:
        torch.testing.assert_close(plain.weight.grad, fused.weight.main_grad)


def test_stand_in_survives_a_look_up(patched):
    patched("grad-accum-kernel", "grad-accum-gate")
    import fused_weight_gradient_mlp_cuda as kernel

    assert importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is kernel.__spec__
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    assert layers.fused_weight_gradient_mlp_cuda is kernel and layers._grad_accum_fusion_available
    registry.revert()
    assert not hasattr(layers, "fused_weight_gradient_mlp_cuda")
    assert "fused_weight_gradient_mlp_cuda" not in sys.modules


# --- fully reshardable optimizer state with padded buckets ------------------------------------


def reshardable_state(params: dict[str, torch.nn.Parameter], dp: int, bucket_size: int):
    """What upstream's method makes of known states, on the layout it lays out for ``dp`` ranks.

    The gathering runs over a world of one, whose shard is the whole padded bucket: the same
    tensors that ``dp`` ranks would put together.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range

    layout = DistributedOptimizer._compute_per_buffer_param_layout(
        list(params.values()), bucket_size, dp, DistributedDataParallelConfig()
    )
    padding = [
        end - start - numel
        for (start, end), numel in zip(
            layout.bucket_indices, layout.per_bucket_numel_unpadded, strict=True
        )
    ]
    assert len(padding) > 2 and sum(padding) > 0, "the layout does not show the defect"
    buffer = SimpleNamespace(
        param_index_map=layout.param_index_map,
        numel_unpadded=sum(layout.per_bucket_numel_unpadded),
        buckets=[
            SimpleNamespace(grad_data=torch.empty(end - start), numel_unpadded=numel)
            for (start, end), numel in zip(
                layout.bucket_indices, layout.per_bucket_numel_unpadded, strict=True
            )
        ],
    )
    ranges: list[dict] = [{"param_map": {}} for _ in buffer.buckets]
    for param, (start, end, bucket) in layout.param_index_map.items():
        first = layout.bucket_indices[bucket][0]
        ranges[bucket]["param_map"][param] = {"gbuf_local": Range(start - first, end - first)}

    class KnownStates(DistributedOptimizer):
        def __init__(self) -> None:
            self.config = SimpleNamespace(optimizer="adam", muon_scalar_optimizer="adam")
            self.data_parallel_group_gloo = torch.distributed.group.WORLD
            self.buffers, self.gbuf_ranges = [buffer], [{torch.float32: ranges}]

        def _get_main_param_and_optimizer_states(self, model_param):
            flat = model_param.detach().flatten()
            return {"param": flat, "exp_avg": flat + 1000, "exp_avg_sq": flat + 2000}

    model_state = {
        name: ShardedTensor.from_rank_offsets(name, param) for name, param in params.items()
    }
    state = KnownStates().sharded_param_state_fully_reshardable(
        model_state, metadata={"distrib_optim_fully_reshardable_mem_efficient": True}
    )
    assert buffer.param_index_map is layout.param_index_map
    return {
        tensor.key.removeprefix("optimizer.state."): tensor.data
        for tensors in state.values()
        for tensor in tensors.values()
    }


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_fully_reshardable_state_is_right_behind_padded_buckets(one_rank, patched, dp):
    sizes = [(7, 9), (33,), (5, 5, 3), (130,), (11, 12), (1,)]
    counter = iter(range(10**6))
    params = {
        f"layer{i}.weight": torch.nn.Parameter(
            torch.tensor([float(next(counter)) for _ in range(torch.Size(size).numel())]).view(size)
        )
        for i, size in enumerate(sizes)
    }

    def wrong() -> list[str]:
        state = reshardable_state(params, dp, bucket_size=100)
        assert len(state) == 3 * len(params)
        offset = {"param": 0, "exp_avg": 1000, "exp_avg_sq": 2000}
        return [
            f"{kind}.{name}"
            for name, param in params.items()
            for kind, plus in offset.items()
            if not torch.equal(state[f"{kind}.{name}"], param.detach() + plus)
        ]

    assert wrong(), "upstream does it right now: the patch can go"
    patched("fully-reshardable-padding")
    assert wrong() == []


def test_positions_are_given_back_after_an_error(patched):
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    patched("fully-reshardable-padding")
    buffer = SimpleNamespace(param_index_map={"a": (0, 1, 0)}, buckets=[])
    optimizer = SimpleNamespace(buffers=[buffer])
    kept = buffer.param_index_map
    with pytest.raises(AttributeError):
        DistributedOptimizer.sharded_param_state_fully_reshardable(optimizer, {}, metadata={})
    assert buffer.param_index_map is kept


# --- tracker file -----------------------------------------------------------------------------


def test_tracker_file_is_never_seen_half_written(patched, tmp_path):
    from megatron.training import checkpointing

    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("10")
    with checkpointing.maybe_msc.open(tracker, "w") as handle:
        assert tracker.read_text() == ""  # the defect
        handle.write("20")
    patched("tracker-file")
    with checkpointing.maybe_msc.open(str(tracker), "w") as handle:
        assert tracker.read_text() == "20"
        handle.write("30")
    assert tracker.read_text() == "30"
    with pytest.raises(KeyError), checkpointing.maybe_msc.open(tracker, "w") as handle:
        handle.write("4")
        raise KeyError
    assert tracker.read_text() == "30"
    assert [p.name for p in tmp_path.iterdir()] == [tracker.name]
    with checkpointing.maybe_msc.open(tracker, "r") as handle:
        assert int(handle.read().strip()) == 30
    other = tmp_path / "progress.txt"
    with checkpointing.maybe_msc.open(other, "w") as handle:
        handle.write("x")
    assert other.read_text() == "x"
    assert checkpointing.maybe_msc.os is os


def test_empty_tracker_is_an_error_with_a_remedy(patched, tmp_path):
    from megatron.training import checkpointing

    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("")
    for step in (100, 200):
        (tmp_path / f"iter_{step:07d}").mkdir()
    with pytest.raises(SystemExit) as stop:
        checkpointing.read_metadata(str(tracker))
    assert not stop.value.code  # the defect: status 0
    patched("tracker-file")
    with pytest.raises(UserError, match=r"iter_0000100, iter_0000200.*write the number"):
        checkpointing.read_metadata(str(tracker))


def test_good_tracker_still_reads(one_rank, patched, tmp_path, monkeypatch):
    from megatron.training import checkpointing

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    patched("tracker-file")
    tracker.write_text("200\n")
    assert checkpointing.read_metadata(str(tracker)) == (200, False)
    tracker.write_text("release")
    assert checkpointing.read_metadata(str(tracker)) == (0, True)


# --- write queue ------------------------------------------------------------------------------

SAVE = """
import sys, torch, multiprocessing
import torch.distributed as dist
from megatron_patch.patches import registry
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor

if __name__ == "__main__":
    folder, patch = sys.argv[1:]
    if patch == "yes":
        registry.apply(["write-queue"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.cuda.synchronize = lambda *a: None
    torch.cuda.current_device = lambda: "cpu"
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0))}
    dist_checkpointing.save(state, f"{folder}/ckpt", async_strategy="mcore")
    print("children", len(multiprocessing.active_children()))
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(6))}
    print("loaded", dist_checkpointing.load(state, f"{folder}/ckpt")["w"].tolist())
"""


@pytest.mark.slow
@pytest.mark.parametrize("patch, children", [("no", 1), ("yes", 0)])
def test_synchronous_save_spawns_no_process(tmp_path, patch, children):
    script = tmp_path / "save.py"
    script.write_text(SAVE)
    (tmp_path / "ckpt").mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path), patch],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"children {children}" in done.stdout
    assert "loaded [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]" in done.stdout


def test_write_queue_refuses_other_processes_and_leaves_async_saves_alone(patched, monkeypatch):
    import pickle

    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import global_vars

    patched("write-queue")
    made = filesystem_async.get_write_results_queue()
    assert isinstance(made, queue.Queue) and made is filesystem_async.get_write_results_queue()
    with pytest.raises(RuntimeError, match="--async-save"):
        pickle.dumps(made)
    child = os.fork()
    if child == 0:
        try:
            made.put(1)
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", SimpleNamespace(async_save=True))
    monkeypatch.setattr(filesystem_async, "_results_queue", "upstream's own")
    assert filesystem_async.get_write_results_queue() == "upstream's own"
