"""Use this library's modules where Megatron-Core would use Transformer Engine's.

For CPU ranks, for GPUs without Transformer Engine, and on request (`--backend torch`).
Megatron-Core picks its backend by class name inside the functions that build layer specs; these
records change what those names mean. The checkpoint keys stay Transformer Engine's, see
`ops/backend.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from megatron_patch.patches import registry
from megatron_patch.patches.registry import Patch

_CORE = "megatron.core"
_SPECS = f"{_CORE}.models.gpt.gpt_layer_specs"
_PROVIDER = "megatron_patch.ops.backend:TorchSpecProvider"


def _patch(
    name: str,
    target: str,
    func: str,
    evidence: str,
    fingerprint: str,
    mode: Literal["wrap", "replace"] = "replace",
    why: str = "layer specs name Transformer Engine's classes and take no backend",
) -> Patch:
    return Patch(
        name=f"torch-backend-{name}",
        target=f"{_CORE}.{target}",
        mode=mode,
        func=func,
        group="torch",
        evidence=f"{_CORE}.{evidence}",
        fingerprint=(fingerprint,),
        why=why,
        upstream="https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/models/backends.py",
        remove_when="a caller can choose the backend of a layer spec or the class of the optimizer",
    )


_TE_SPEC = "models.gpt.gpt_layer_specs.get_gpt_layer_with_transformer_engine_submodules"
_OPTIMIZER = "optimizer._get_megatron_optimizer_based_on_param_groups"
_OPTIMIZER_WHY = (
    "torch's Adam keeps a step per parameter, which the distributed optimizer cannot load"
)
_ADAM = "megatron_patch.ops.adam:GroupStepAdam"

PATCHES: tuple[Patch, ...] = (
    _patch(
        "spec", "models.gpt.gpt_layer_specs.TESpecProvider", _PROVIDER, _TE_SPEC, "6b04c52775f0202d"
    ),
    _patch(
        "block-norm",
        "models.gpt.gpt_layer_specs.TENorm",
        "megatron_patch.ops.linear:Norm",
        "models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec",
        "570ef09b3981bc65",
    ),
    _patch(
        "final-norm",
        "transformer.transformer_block.LayerNormImpl",
        "megatron_patch.ops.linear:Norm",
        "transformer.transformer_block._get_block_submodules",
        "d25d020e7e595939",
        why="the norm after the last layer refuses sequence parallelism",
    ),
    _patch(
        "moe",
        "models.gpt.moe_module_specs.TESpecProvider",
        _PROVIDER,
        "models.gpt.moe_module_specs.get_moe_module_spec",
        "05bb9d819df24f02",
    ),
    _patch(
        "variants",
        "models.gpt.experimental_attention_variant_module_specs._get_backend_spec_provider",
        "megatron_patch.ops.backend:backend_for_config",
        "models.gpt.experimental_attention_variant_module_specs._get_backend_spec_provider",
        "dccb142fdbe84c17",
    ),
    _patch(
        "mla-norm",
        "transformer.mla_qk_norm_config.get_backend",
        "megatron_patch.ops.backend:torch_backend",
        "models.backends.get_backend",
        "619c84b92a1902cb",
    ),
    _patch(
        "mla-linear",
        "transformer.multi_latent_attention.TELinear",
        "megatron_patch.ops.linear:ReplicatedLinear",
        "transformer.multi_latent_attention.MLASelfAttention.__init__",
        "ccc80bdf125b6b7f",
        why="latent attention knows its down projections by their class",
    ),
    _patch("adam", "optimizer.Adam", _ADAM, _OPTIMIZER, "52053bddb67c8851", why=_OPTIMIZER_WHY),
    _patch(
        "adam-arguments",
        "optimizer.USING_PYTORCH_OPTIMIZER",
        "megatron_patch.platform.torch_backend:_NO",
        _OPTIMIZER,
        "52053bddb67c8851",
        why=_OPTIMIZER_WHY,
    ),
    _patch(
        "adam-distributed",
        "optimizer.distrib_optimizer.Adam",
        _ADAM,
        "optimizer.distrib_optimizer.DistributedOptimizer.__init__",
        "df2d2abb2377f5cd",
        why=_OPTIMIZER_WHY,
    ),
    _patch(
        "adam-step-saved",
        "optimizer.distrib_optimizer.USING_APEX_OPTIMIZER",
        "megatron_patch.platform.torch_backend:_YES",
        "optimizer.distrib_optimizer.DistributedOptimizer.state_dict",
        "e5e20c8941d94102",
        why=_OPTIMIZER_WHY,
    ),
    _patch(
        "adam-step-loaded",
        "optimizer.distrib_optimizer.HAVE_APEX_OR_TE",
        "megatron_patch.platform.torch_backend:_YES",
        "optimizer.distrib_optimizer.DistributedOptimizer.load_state_dict",
        "cea9cabbbbcc7a61",
        why=_OPTIMIZER_WHY,
    ),
    _patch(
        "no-grad-copy",
        "optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states",
        "megatron_patch.platform.torch_backend:_without_grad",
        "optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states",
        "1f43e83757ab412e",
        mode="wrap",
        why="loading copies into leaf parameters that require gradients, which torch refuses",
    ),
)

_YES, _NO = True, False


def _without_grad(original: Any) -> Any:
    import torch

    return torch.no_grad()(original)


def enable() -> None:
    """Put the records in force; idempotent."""
    registry.apply(group="torch")
