"""Padding is zero wherever FP8 takes a scale from: every input and output gradient of a product."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import configs
import pytest
import torch

from megatron_patch.convert import one_rank, plan

LENGTHS, ROOMS = (5, 9, 3), (6, 12, 14)

KINDS: dict[str, dict[str, Any]] = {
    "bias": configs.QWEN2,
    "latent": configs.DEEPSEEK_V3,
    "delta": configs.QWEN3_NEXT,
}


def products(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Layers that Transformer Engine would run in FP8, outside of experts."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if getattr(getattr(layer, "weight", None), "dim", lambda: 0)() == 2
        and not any(word in name for word in ("experts", "router", "embedding", "output_layer"))
    }


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "latent" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_padding_is_zero(kind: str, tmp_path: Path) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_patch.training import padding

    (tmp_path / "config.json").write_text(json.dumps(KINDS[kind]))
    size, generator = sum(ROOMS), torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 200, (1, size), generator=generator)
    pads = torch.cat([torch.arange(r) >= n for n, r in zip(LENGTHS, ROOMS, strict=True)])[None]
    edges = torch.tensor([0, *ROOMS]).cumsum(0).int()
    place = torch.cat([torch.arange(r) for r in ROOMS])[None]
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=edges, cu_seqlens_kv=edges, max_seqlen_q=max(ROOMS),
        max_seqlen_kv=max(ROOMS), pad_between_seqs=False,
    )  # fmt: skip
    params.padding = pads
    seen: dict[str, float] = {}
    with one_rank.one_rank(), torch.compiler.set_stance("force_eager"):
        model = one_rank.build(plan.resolve(tmp_path))
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases and norms that a missing zero would show through
                parameter.data.add_(0.1)

        def step() -> torch.Tensor:
            model.zero_grad()
            out = model(tokens, place, None, labels=tokens, loss_mask=(~pads).float(),
                        packed_seq_params=params)  # fmt: skip
            (out * ~pads).sum().backward()
            return torch.where(pads, 0, out.detach())

        before = step()
        padding.keep_out([model])
        rows = pads[0]
        for name, layer in products(model).items():

            def inputs(_layer: Any, given: Any, name: str = name) -> None:
                seen[name] = float(given[0][rows].abs().max())

            def gradients(_layer: Any, _given: Any, out: Any, name: str = name) -> None:
                seen[f"{name} gradient"] = float(out[0][rows].abs().max())

            layer.register_forward_pre_hook(inputs)
            layer.register_full_backward_hook(gradients)
        after = step()
    assert len(seen) >= 2 * 2 * 3 and set(seen.values()) == {0.0}, seen
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)
