"""Padding that is zero in every matrix product, so that FP8 scales are those of real tokens.

Transformer Engine takes a tensor's scale from all of its rows. Here rows of padding are zero from
the embedding on, and again behind attention (and Gated DeltaNet), the only places where tokens
before them reach them; norms, products without bias, gated activations and experts keep a zero. No
real token sees padding behind it, so its gradient is zero anyway.

Shape suffixes: s tokens of this context-parallel rank (t under sequence parallelism), b batch of 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_patch.util import UserError

if TYPE_CHECKING:
    from torch import Tensor


def keep_out(stages: Sequence[Any]) -> None:
    """Zero the rows of padding of packed batches.

    Args:
        stages: this rank's `GPTModel` chunks; batches come with ``packed_seq_params.padding``, bool
            [1, s], True where there is no real token.

    Raises:
        UserError: the model adds biases to padding behind attention.
    """
    for stage in stages:
        if stage.config.add_bias_linear:
            raise UserError(
                "--fp8 in fine-tuning: this model's biases would bring padding into the scales; "
                "train in bf16"
            )
        _stage(stage)


def _stage(stage: Any) -> None:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    from megatron_patch.training.batch import on_tp_rank

    masks: list[Tensor] = []

    def enter(_module: Any, _inputs: Any, given: dict[str, Any]) -> None:
        masks[:] = [given["packed_seq_params"].padding]

    def embedded(_module: Any, _inputs: Any, out_tbh: Tensor) -> Tensor:
        mask = masks[0]
        if stage.config.sequence_parallel:
            mask = on_tp_rank(mask)
        return _zero(out_tbh, mask)

    stage.register_forward_pre_hook(enter, with_kwargs=True)
    if hasattr(stage, "embedding"):
        stage.embedding.register_forward_hook(embedded)
    for module in stage.modules():
        if hasattr(module, "core_attention"):
            module.core_attention.register_forward_hook(_attended, with_kwargs=True)
        elif isinstance(module, GatedDeltaNet):
            _delta(module)


def _attended(_module: Any, _inputs: Any, given: dict[str, Any], out: Tensor) -> Tensor:
    return _zero(out, given["packed_seq_params"].padding)


def _delta(module: Any) -> None:
    masks: list[Tensor] = []

    def enter(_module: Any, _inputs: Any, given: dict[str, Any]) -> None:
        masks[:] = [given["packed_seq_params"].padding]

    def before(_module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_zero(inputs[0], masks[0]), *inputs[1:])

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.out_proj.register_forward_pre_hook(before)


def _zero(x: Tensor, padding: Tensor) -> Tensor:
    """Rows of padding as zeros; ``x`` is [s, ...]."""
    return x.masked_fill(padding.view(-1, *[1] * (x.dim() - 1)), 0)
