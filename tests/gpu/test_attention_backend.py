"""What Transformer Engine says of its own choice, with a real one."""

from __future__ import annotations

import re

import pytest
import torch

from megatron_patch.ops import attention_backend
from megatron_patch.util import UserError

te = pytest.importorskip("transformer_engine.pytorch")

SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@pytest.mark.parametrize(
    ("asked", "on", "expected"),
    [
        ("auto", (1, 1, 1), ["attention, 1 layers: (cuDNN .* fused|FlashAttention .*)"]),
        (
            "unfused",
            (0, 0, 1),
            ["attention, 1 layers: unfused attention of Transformer Engine"],
        ),
        ("auto", (0, 0, 1), ["attention, 1 layers: unfused", "warning: .*Disabling"]),
        ("auto", (0, 0, 0), UserError),
    ],
    ids=str,
)
def test_named_and_explained(
    asked: str, on: tuple[int, ...], expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    for name, value in zip(SWITCHES, on, strict=True):
        monkeypatch.setenv(name, str(value))
    attention_backend._decisions()["attention_params"] = None  # the last test's environment
    config = TransformerConfig(
        num_layers=1, hidden_size=256, num_attention_heads=4, attention_backend=AttnBackend[asked]
    )
    layer = te.DotProductAttention(4, 64, attention_dropout=0.0, attn_mask_type="causal")
    layer.config = config
    attending, stage = torch.nn.Module(), torch.nn.Module()
    attending.core_attention, attending.config, attending.layer_number = layer, config, 1
    stage.self_attention = attending
    said: list[str] = []
    attention_backend.watch([stage], said.append)
    q, k, v = (torch.randn(64, 2, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    if expected is UserError:
        with pytest.raises(UserError, match=r"no backend can run.*Disabling"):
            layer(q, k, v)
        return
    for _ in range(2):
        layer(q, k, v)
    assert len(said) == len(expected)  # type: ignore[arg-type]
    for line, pattern in zip(said, expected, strict=True):  # type: ignore[call-overload]
        assert re.match(pattern, line), line
