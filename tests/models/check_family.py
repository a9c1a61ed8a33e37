"""The contract that every model family is held to, on a tiny config of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import megatron_model
import torch
from safetensors.torch import load_file

from megatron_patch.convert import rules
from megatron_patch.convert.layout import checkpoint_key
from megatron_patch.models.family import ModelSpec
from megatron_patch.models.registry import get_family, load_config

#: fp32 on both sides, the same formulas in another order of summation.
TOLERANCE = 2e-5

GOLDEN = Path(__file__).parent / "golden"


def check_family(name: str, config: Mapping[str, Any], golden: str, directory: Path) -> None:
    """Hold family ``name`` to the contract on one config.

    Args:
        name: The HF ``model_type``.
        config: A tiny ``config.json``.
        golden: Name of the file in ``golden/`` with the arguments that it must resolve to.
        directory: Empty directory for the HF model.
    """
    spec = resolve(config, directory)
    assert spec.family == name
    check_golden(spec, golden)
    model = random_hf_model(directory)
    model.save_pretrained(directory / "saved")
    saved: dict[str, torch.Tensor] = {}
    for file in sorted((directory / "saved").glob("*.safetensors")):
        saved |= load_file(file)
    # What transformers itself writes for this model resolves to the same thing.
    again = get_family(name).resolve(load_config(directory / "saved"))
    assert (again.args, again.rope, again.layers) == (spec.args, spec.rope, spec.layers)
    check_names(spec, saved)
    check_round_trip(spec)
    # More than twice the original length of the scaled ropes in `configs`.
    length = min(160, spec.args["max_position_embeddings"])
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(spec.true_vocab_size, (2, length), generator=generator)
    with torch.no_grad():
        reference = model(tokens).logits
    with megatron_model.one_rank():
        ours = megatron_model.build(spec)
        check_logits(spec, ours, saved, tokens, reference)


def resolve(config: Mapping[str, Any], directory: Path) -> ModelSpec:
    """Write ``config`` as ``config.json`` and resolve it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    hf = load_config(directory)
    return get_family(hf.model_type).resolve(hf)


def check_golden(spec: ModelSpec, golden: str) -> None:
    """The resolved arguments, value by value and type by type."""
    path = GOLDEN / f"{golden}.json"
    found = json.dumps(spec.args, indent=2, sort_keys=True) + "\n"
    assert found == path.read_text(), f"{path} differs from what the config resolves to:\n{found}"


def random_hf_model(directory: Path) -> Any:
    """A transformers model in fp32 in which no two weights are alike, norms and biases included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Gain 1 in the linear layers: activations, and so attention patterns, stay lively.
            scale = 0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.normal_(0, scale, generator=generator)
            if "norm" in name:
                parameter.add_(1)
    return model


def check_names(spec: ModelSpec, saved: Mapping[str, torch.Tensor]) -> None:
    """Rules name every saved tensor once, with its shape, and nothing else."""
    found = {
        name: shape
        for rule in rules.spec_rules(spec)
        for name, shape in zip(rule.hf, rule.shapes, strict=True)
    }
    assert found == {name: tuple(tensor.shape) for name, tensor in saved.items()}
    assert len(saved) == sum(len(rule.hf) for rule in rules.spec_rules(spec))


def check_round_trip(spec: ModelSpec) -> None:
    """There and back, with integers that encode (tensor, position): no slice may move or repeat."""
    tensors = dict(_encoded(spec))
    there = dict(rules.to_megatron(tensors, spec))
    assert len(there) == len(rules.spec_rules(spec))
    held = torch.cat([tensor.flatten() for tensor in there.values()])
    padding = sum(t.numel() for t in there.values()) - sum(t.numel() for t in tensors.values())
    assert int((held == 0).sum()) == padding  # rows of the vocabulary only; values start at 1
    assert held.unique().numel() == held.numel() - max(padding - 1, 0)
    back = dict(rules.to_hf(there, spec))
    assert list(back) == list(tensors)
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def _encoded(spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    first = 1
    for rule in rules.spec_rules(spec):
        for name, shape in zip(rule.hf, rule.shapes, strict=True):
            count = torch.Size(shape).numel()
            yield name, torch.arange(first, first + count).reshape(shape)
            first += count


def check_logits(
    spec: ModelSpec,
    ours: Any,
    saved: Mapping[str, torch.Tensor],
    tokens: torch.Tensor,
    reference: torch.Tensor,
) -> None:
    """fp32 logits equal to transformers', to `TOLERANCE` of their spread, at every position."""
    load(ours, saved, spec)
    assert (ours.output_layer.weight is None) == spec.tied
    device = next(ours.parameters()).device
    found = megatron_model.logits(ours, tokens.to(device)).cpu()
    true = spec.true_vocab_size
    assert (found[..., true:] < -1e30).all()
    spread = float(reference.std())
    assert spread > 0.3  # the comparison says nothing about a model that says nothing
    worst = float((found[..., :true] - reference).abs().max()) / spread
    assert worst < TOLERANCE, f"logits differ by {worst:.1e} of their spread"


def load(ours: Any, saved: Mapping[str, torch.Tensor], spec: ModelSpec) -> None:
    """Fill a Megatron model from saved HF tensors; names and shapes must be the same set."""
    converted = dict(rules.to_megatron(saved, spec))
    state = ours.state_dict()
    held = {n: t for n, t in state.items() if not n.endswith("_extra_state")}
    assert {n: tuple(t.shape) for n, t in held.items()} == {
        n: tuple(t.shape) for n, t in converted.items()
    }
    assert set(converted) == {checkpoint_key(rule.name) for rule in rules.spec_rules(spec)}
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(converted[name])
