"""Gradient-accumulation fusion (on by default) is refused without Apex, for one kernel of it.

Upstream asks for Apex's ``fused_weight_gradient_mlp_cuda`` in ``ColumnParallelLinear`` (so: in
every output layer), while Transformer Engine's layers bring their own. The kernel is one matrix
product that adds into ``main_grad``, which Transformer Engine's GEMM and torch's ``addmm`` do as
well.

Shape legend: N tokens, I input features, O output features.
"""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from megatron_patch.patches.registry import Patch

if TYPE_CHECKING:
    from torch import Tensor

KERNEL = "fused_weight_gradient_mlp_cuda"
_LAYERS = "megatron.core.tensor_parallel.layers"
_UPSTREAM = (
    "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/tensor_parallel/layers.py"
)
_RETIRES = "ColumnParallelLinear accepts gradient_accumulation_fusion without Apex"

#: Stands at ``layers._grad_accum_fusion_available``.
AVAILABLE = True


def accumulate_weight_grad(input_NI: Tensor, grad_output_NO: Tensor, main_grad_OI: Tensor) -> None:
    """``main_grad += grad_output^T @ input`` in place, with products summed in fp32.

    Args:
        input_NI: ``[N, I]`` activations, fp32, bf16 or fp16.
        grad_output_NO: ``[N, O]`` in the same dtype.
        main_grad_OI: ``[O, I]`` gradient buffer, of that dtype or fp32.
    """
    import torch

    if input_NI.dtype == main_grad_OI.dtype:
        main_grad_OI.addmm_(grad_output_NO.t(), input_NI)
        return
    if not main_grad_OI.is_cuda:
        main_grad_OI.addmm_(
            grad_output_NO.t().to(main_grad_OI.dtype), input_NI.to(main_grad_OI.dtype)
        )
        return
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if HAVE_TE:
        # Upstream's own wrapper of this call has no `accumulate`.
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        general_gemm(
            input_NI,
            grad_output_NO,
            out_dtype=main_grad_OI.dtype,
            layout="NT",
            out=main_grad_OI,
            accumulate=True,
            grad=True,
        )
    else:
        torch.addmm(
            main_grad_OI,
            grad_output_NO.t(),
            input_NI,
            out_dtype=main_grad_OI.dtype,
            out=main_grad_OI,
        )


def _stand_in() -> ModuleType:
    """A module with the two names that upstream calls; it needs a spec to survive ``find_spec``."""
    module = ModuleType(KERNEL, "Stand-in by megatron_patch for Apex's kernel of this name.")
    module.__spec__ = ModuleSpec(KERNEL, None)
    for name in ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"):
        setattr(module, name, accumulate_weight_grad)
    return module


STAND_IN = _stand_in()


def not_needed() -> str | None:
    """Apex's own kernel, where it is installed, stays."""
    return f"Apex's {KERNEL} is installed" if find_spec(KERNEL) else None


PATCHES = (
    Patch(
        name="grad-accum-kernel",
        target=f"sys.modules.{KERNEL}",
        also=(f"{_LAYERS}.{KERNEL}",),
        mode="replace",
        absent=True,
        func="megatron_patch.patches.grad_accum_fusion:STAND_IN",
        evidence=f"{_LAYERS}.LinearWithGradAccumulationAndAsyncCommunication.backward",
        fingerprint=("25fbaa551c13a23a",),
        needed=not_needed,
        why="the output layer's fused weight gradient calls a kernel that only Apex ships",
        upstream=_UPSTREAM,
        remove_when=_RETIRES,
    ),
    Patch(
        name="grad-accum-gate",
        target=f"{_LAYERS}._grad_accum_fusion_available",
        mode="replace",
        func="megatron_patch.patches.grad_accum_fusion:AVAILABLE",
        evidence=f"{_LAYERS}.ColumnParallelLinear.__init__",
        fingerprint=("91d8374fc346be46",),
        needed=not_needed,
        why="ColumnParallelLinear refuses the default --gradient-accumulation-fusion without Apex, "
        "which turns it off for Transformer Engine's layers too",
        upstream=_UPSTREAM,
        remove_when=_RETIRES,
    ),
)
