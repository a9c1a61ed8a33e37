"""The loss of multi-token prediction: one weight a target, however targets are laid out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import process_mtp_loss

from megatron_patch.training.mtp import weigh_by_main_targets

DEPTHS, WIDTH, VOCAB = 2, 8, 11


class Stage:
    """As much of a `GPTModel` as its last steps need; the loss is upstream's own."""

    def __init__(self, per_token: bool = True) -> None:
        self.config = SimpleNamespace(
            mtp_num_layers=DEPTHS,
            mtp_loss_scaling_factor=0.3,
            mtp_detach_heads=False,
            calculate_per_token_loss=per_token,
        )
        self.post_process = True
        self.pg_collection = SimpleNamespace(cp=None)
        self.head = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(0))

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.T.flatten(), reduction="none"
        )
        return losses.view(labels.T.shape).T

    def _postprocess(self, hidden: torch.Tensor, **given: Any) -> torch.Tensor:
        def output_layer(x: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            return x @ self.head.T, None

        hidden = process_mtp_loss(
            hidden_states=hidden,
            output_layer=output_layer,
            output_weight=None,
            runtime_gather_output=None,
            is_training=False,
            compute_language_model_loss=self.compute_language_model_loss,
            config=self.config,  # type: ignore[arg-type]
            cp_group=None,
            **given,
        )
        main = self.compute_language_model_loss(given["labels"], output_layer(hidden)[0])
        return (main * given["loss_mask"]).sum()


def gradients(
    stage: Stage, hidden: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, *lengths: int
) -> list[torch.Tensor]:
    """Gradients by hidden state: the main one's, then each depth's. Shapes [s, width], [s], [s]."""
    leaves = [part.clone().requires_grad_() for part in hidden]
    packed = None
    if lengths:
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=None
        )
    stage._postprocess(
        torch.cat([leaf[:, None] for leaf in leaves]),
        labels=labels[None],
        loss_mask=mask[None],
        packed_seq_params=packed,
    ).backward()
    return [leaf.grad for leaf in leaves]


@pytest.fixture
def sample() -> Any:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1 + DEPTHS, 12, WIDTH, generator=generator)
    labels = torch.randint(VOCAB, (12,), generator=generator)
    mask = (torch.rand(12, generator=generator) < 0.7).float()
    mask[5:8] = 0.04  # weights of a fine-tuning row; this sample's sum is below 1
    return hidden, labels, mask


def test_a_pack_weighs_its_samples_as_they_weigh_alone(sample: Any) -> None:
    hidden, labels, mask = sample
    stage = Stage()
    weigh_by_main_targets(stage)
    packed = gradients(stage, hidden, labels, mask, 5, 3, 4)
    pieces = [slice(0, 5), slice(5, 8), slice(8, 12)]
    alone = [gradients(stage, hidden[:, p], labels[p], mask[p]) for p in pieces]
    for number, whole in enumerate(packed):
        assert whole.any()
        torch.testing.assert_close(whole, torch.cat([one[number] for one in alone]))


def test_every_target_has_the_weight_of_the_report(sample: Any) -> None:
    """0.3 / depths for each target of a depth; the last targets of a sequence have none."""
    hidden, labels, mask = sample
    stage = Stage()
    weigh_by_main_targets(stage)
    found = gradients(stage, hidden, labels, mask)
    for depth in range(1, DEPTHS + 1):
        leaf = hidden[depth].clone().requires_grad_()
        losses = torch.nn.functional.cross_entropy(
            leaf[:-depth] @ stage.head.T, labels[depth:], reduction="none"
        )
        (losses * mask[depth:]).sum().mul(0.3 / DEPTHS).backward()
        torch.testing.assert_close(found[depth], leaf.grad)


def test_without_targets_nothing_moves(sample: Any) -> None:
    hidden, labels, _ = sample
    stage = Stage()
    weigh_by_main_targets(stage)
    for gradient in gradients(stage, hidden, labels, torch.zeros(12)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_what_is_averaged_by_micro_batch_is_left_alone() -> None:
    stage = Stage(per_token=False)
    weigh_by_main_targets(stage)
    assert "_postprocess" not in vars(stage)
