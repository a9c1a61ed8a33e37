"""The loss of multi-token prediction, the same whatever the layout, micro batch and packing.

Depth k's loss is the sum over its targets divided by the number of the main loss's targets, as the
DeepSeek-V3 report has it (arXiv 2412.19437, equation 24: both are divided by the sequence length).
Megatron-Core 0.19 divides by the targets of depth k on this rank, in this micro batch: ranks that
hold the ends of sequences, which have no further token, weigh their tokens more than the others do
(gradients of the MTP layers off by 4 % at CP 2), and so do short samples on their own against the
same samples in a pack.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def weigh_by_main_targets(stage: Any) -> None:
    """Divide the losses of multi-token prediction as the module's docstring says.

    Upstream multiplies each token's loss with (targets of the main loss / targets of this depth);
    what it gets from the stage's loss function is multiplied with the inverse here. Source:
    ``megatron/core/transformer/multi_token_prediction.py: process_mtp_loss``. Does nothing on
    stages without a loss, and where losses are averaged by micro batch
    (``--no-calculate-per-token-loss``), whose weights are rank by rank by definition.

    Args:
        stage: a `GPTModel` stage.
    """
    config = stage.config
    if not (config.mtp_num_layers and stage.post_process and config.calculate_per_token_loss):
        return
    postprocess, token_loss = stage._postprocess, stage.compute_language_model_loss

    def weighed(*args: Any, **kwargs: Any) -> Any:
        labels = kwargs["labels"]  # upstream gives them all by name
        if labels is None:
            return postprocess(*args, **kwargs)
        shares = _shares(stage, labels, kwargs["loss_mask"], kwargs["packed_seq_params"])

        def loss(targets: Tensor, logits: Tensor) -> Tensor:
            found: Tensor = token_loss(targets, logits)
            return found if targets is labels else found * next(shares)

        stage.compute_language_model_loss = loss
        try:
            return postprocess(*args, **kwargs)
        finally:
            stage.compute_language_model_loss = token_loss

    stage._postprocess = weighed


def _shares(stage: Any, labels: Tensor, mask: Tensor | None, packed: Any) -> Iterator[Tensor]:
    """For each depth, its targets on this rank over those of the main loss.

    A mask may hold weights, whose sum may be below 1; upstream counts at least one target.
    """
    import torch
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    mask = torch.ones_like(labels) if mask is None else mask
    targets = mask.sum()
    for _ in range(stage.config.mtp_num_layers):
        mask, left = roll_tensor(
            mask, shifts=-1, dims=-1, cp_group=stage.pg_collection.cp, packed_seq_params=packed
        )
        yield torch.where(targets > 0, left.clamp(min=1) / targets, 0)
