"""Megatron-Core on CPU ranks over gloo: for development, tests and the demo.

Never active where CUDA is: `enable()` refuses. `torch.cuda.is_available()` keeps telling the truth.
Device questions are answered for a CPU (`current_device()` is `cpu`), streams and events do
nothing, and a function mode turns `device="cuda"` of tensor factories into `cpu`. The list of
replaced symbols is frozen in `PATCHES`; the same registry as for GPU patches applies it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal

from megatron_patch.patches import registry
from megatron_patch.patches.registry import Patch

_WHY = "there is no CUDA device on a CPU rank"


def _answer(value: Callable[[], Any]) -> Callable[..., Any]:
    """A replacement that ignores its arguments and returns `value()`."""

    def answer(*_args: Any, **_kwargs: Any) -> Any:
        return value()

    return answer


class _Stream:
    """A stream on which everything has already happened."""

    cuda_stream = 0
    device = None

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_exc: object) -> None:
        return None

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Event()

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def wait_stream(self, _other: Any) -> None:
        return None

    def wait_event(self, _event: Any) -> None:
        return None

    def synchronize(self) -> None:
        return None


class _Event:
    """An event that has already been reached."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def record(self, *_args: Any) -> None:
        return None

    def wait(self, *_args: Any) -> None:
        return None

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, _other: Any) -> float:
        return 0.0


def _cpu() -> Any:
    import torch

    return torch.device("cpu")


def _device_properties() -> Any:
    # Megatron asks for the architecture to choose communication settings; 10 means "no special
    # demands on CUDA_DEVICE_MAX_CONNECTIONS".
    return types.SimpleNamespace(
        name="cpu", major=10, minor=0, multi_processor_count=1, total_memory=0
    )


def _to_self(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    """`x.cuda()` on a CPU rank is x."""
    return self


def _tensor_type(original: Any) -> Callable[..., Any]:
    """The optimizers tell parameters apart by the string of their CUDA tensor type."""

    def tensor_type(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            if isinstance(dtype, str):
                dtype = dtype.replace("torch.cuda.", "torch.")
            return original(self, dtype, *args, **kwargs)
        name = original(self)
        # Under the function mode the C method comes back through this wrapper.
        return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)

    return tensor_type


def _own_generator(original: Any) -> Callable[..., Any]:
    """Data loaders in ordinary memory that draw their workers' seed from a generator of their own.

    A new iterator draws that seed even without workers. From the default generator, which is also
    the "device's" here, the draw at a restart would shift every dropout mask that follows.
    """

    def loader(*args: Any, **kwargs: Any) -> None:
        import torch

        kwargs["pin_memory"] = False
        if kwargs.get("generator") is None:
            kwargs["generator"] = torch.Generator()
        original(*args, **kwargs)

    return loader


def _rng_get(*_args: Any, **_kwargs: Any) -> Any:
    import torch

    return torch.get_rng_state()


def _rng_set(new_state: Any, *_args: Any, **_kwargs: Any) -> None:
    import torch

    torch.set_rng_state(new_state)


def _seed(seed: int) -> None:
    import torch

    torch.default_generator.manual_seed(seed)


def _allow_no_cuda(original: Any) -> Callable[..., Any]:
    def initialize(*args: Any, **kwargs: Any) -> Any:
        kwargs["allow_no_cuda"] = True
        return original(*args, **kwargs)

    return initialize


def _splits_on_cpu(original: Any) -> Callable[..., Any]:
    """Expert dispatcher: its split sizes are lists of numbers after this call.

    Upstream converts them only when a device-to-host copy is due; on a CPU rank the tensors are on
    the host already and would reach the all-to-all as tensors.
    """

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        import torch

        if as_numpy and isinstance(tensor, torch.Tensor):
            return tensor.numpy()
        return original(tensor, as_numpy, record_stream)

    return move


def _own(func: Any) -> Any:
    """A function object of its own for every replaced symbol.

    TorchDynamo keys its tracing rules by object and refuses two symbols of different rules
    ("Duplicate torch object") that are one function.
    """
    if not isinstance(func, types.FunctionType):
        return func
    return types.FunctionType(
        func.__code__, func.__globals__, func.__name__, func.__defaults__, func.__closure__
    )


def _patch(
    target: str,
    func: Any,
    mode: Literal["wrap", "replace"] = "replace",
    also: tuple[str, ...] = (),
) -> Patch:
    return Patch(
        name=f"cpu:{target}",
        target=target,
        mode=mode,
        func=_own(func) if mode == "replace" else func,
        also=also,
        group="cpu",
        why=_WHY,
        upstream="https://github.com/NVIDIA/Megatron-LM",
        remove_when="Megatron-Core runs on a machine without CUDA",
    )


_NOTHING = _answer(lambda: None)

#: Frozen: a test counts and names them.
PATCHES: tuple[Patch, ...] = (
    _patch("torch.cuda.current_device", _answer(_cpu)),
    _patch("torch.cuda.device_count", _answer(lambda: 1)),
    _patch("torch.cuda.set_device", _NOTHING),
    _patch("torch.cuda.synchronize", _NOTHING),
    _patch("torch.cuda.empty_cache", _NOTHING),
    _patch("torch.cuda.reset_peak_memory_stats", _NOTHING),
    _patch("torch.cuda.memory_allocated", _answer(lambda: 0)),
    _patch("torch.cuda.memory_reserved", _answer(lambda: 0)),
    _patch("torch.cuda.max_memory_allocated", _answer(lambda: 0)),
    _patch("torch.cuda.max_memory_reserved", _answer(lambda: 0)),
    _patch("torch.cuda.memory_stats", _answer(lambda: defaultdict(int))),
    _patch("torch.cuda.device_memory_used", _answer(lambda: 0)),
    _patch("torch.cuda.get_device_properties", _answer(_device_properties)),
    _patch("torch.cuda.get_device_capability", _answer(lambda: (10, 0))),
    _patch("torch.cuda.Stream", _Stream),
    _patch("torch.cuda.Event", _Event),
    _patch("torch.cuda.current_stream", _answer(_Stream)),
    _patch("torch.cuda.default_stream", _answer(_Stream)),
    _patch("torch.cuda.stream", _answer(contextlib.nullcontext)),
    _patch("torch.cuda.set_stream", _NOTHING),
    _patch("torch.cuda.is_current_stream_capturing", _answer(lambda: False)),
    _patch("torch.cuda.nvtx.range_push", _NOTHING),
    _patch("torch.cuda.nvtx.range_pop", _NOTHING),
    _patch("torch.cuda.manual_seed", _seed),
    _patch("torch.cuda.manual_seed_all", _seed),
    _patch("torch.cuda.get_rng_state", _rng_get),
    _patch("torch.cuda.set_rng_state", _rng_set),
    _patch("torch.Tensor.cuda", _to_self),
    _patch("torch.nn.Module.cuda", _to_self),
    _patch("torch.Tensor.type", _tensor_type, mode="wrap"),
    _patch("torch.Tensor.record_stream", _NOTHING),
    _patch("torch.utils.data.DataLoader.__init__", _own_generator, mode="wrap"),
    _patch("megatron.core.tensor_parallel.random._get_cuda_rng_state", _rng_get),
    _patch("megatron.core.tensor_parallel.random._set_cuda_rng_state", _rng_set),
    _patch("megatron.training.training.initialize_megatron", _allow_no_cuda, mode="wrap"),
    _patch(
        "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        _splits_on_cpu,
        mode="wrap",
    ),
)

_mode: Any = None
_dynamo_before: str | None = None


def _one_generator(record: logging.LogRecord) -> bool:
    """Drop the complaint of every dropout: the CPU's generator is the device's here."""
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


_RNG_LOGGER = "megatron.core.tensor_parallel.random"


def _device_mode() -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    cpu = torch.device("cpu")
    to, pin_memory = torch.Tensor.to, torch.Tensor.pin_memory

    def _is_cuda(device: Any) -> bool:
        return isinstance(device, str | torch.device) and str(device).startswith("cuda")

    class CpuForCuda(TorchFunctionMode):
        """`device="cuda"` of tensor factories and `.to()` lands on the CPU."""

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is pin_memory:
                return args[0]
            if kwargs:
                if _is_cuda(kwargs.get("device")):
                    kwargs = {**kwargs, "device": cpu}
                if kwargs.get("pin_memory"):
                    kwargs = {**kwargs, "pin_memory": False}
            if func is to and len(args) > 1 and _is_cuda(args[1]):
                args = (args[0], cpu, *args[2:])
            return func(*args, **(kwargs or {}))

    return CpuForCuda()


#: Packages that Megatron-Core takes whenever they can be imported; their kernels need a GPU.
_GPU_PACKAGES = ("transformer_engine", "transformer_engine_torch", "apex", "amp_C")
_hidden: dict[str, Any] = {}


def _hide_gpu_packages() -> None:
    """Importing one fails as if it were not installed: Megatron-Core has a way without each."""
    for name in [*_GPU_PACKAGES, *sys.modules]:
        if name.partition(".")[0] in _GPU_PACKAGES and name not in _hidden:
            _hidden[name] = sys.modules.get(name, _hidden)  # itself: was not there
            sys.modules[name] = None  # type: ignore[assignment]


def _show_gpu_packages() -> None:
    for name, module in _hidden.items():
        if module is _hidden:
            del sys.modules[name]
        else:
            sys.modules[name] = module
    _hidden.clear()


def enable() -> None:
    """Answer for CUDA on this process; idempotent.

    Raises:
        RuntimeError: a CUDA device is there.
    """
    global _mode, _dynamo_before
    if _mode is not None:
        return
    import torch

    if torch.cuda.is_available():
        raise RuntimeError("the CPU platform is never used where CUDA is available")
    # TorchDynamo compiles small fused functions for a GPU; on CPU the compile costs more than it
    # gives and needs a C++ compiler. Read when megatron.core decorates them, so set before.
    _hide_gpu_packages()
    _dynamo_before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    registry.apply(group="cpu")
    logging.getLogger(_RNG_LOGGER).addFilter(_one_generator)
    _mode = _device_mode()
    _mode.__enter__()


def disable() -> None:
    """Undo `enable()` (tests)."""
    global _mode
    if _mode is None:
        return
    _mode.__exit__(None, None, None)
    _mode = None
    _show_gpu_packages()
    logging.getLogger(_RNG_LOGGER).removeFilter(_one_generator)
    # Those of modules that few models have are put in force by these, under the same prefix.
    registry.revert([name for name in registry.applied() if name.startswith("cpu:")])
    if _dynamo_before is None:
        os.environ.pop("TORCHDYNAMO_DISABLE", None)
    else:
        os.environ["TORCHDYNAMO_DISABLE"] = _dynamo_before
