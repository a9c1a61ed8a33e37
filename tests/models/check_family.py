"""The contract that every model family is held to, on a tiny config of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import megatron_model
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from megatron_patch._compat import import_model_code
from megatron_patch.convert import rules
from megatron_patch.convert.layout import checkpoint_key
from megatron_patch.models.family import ModelSpec
from megatron_patch.models.registry import get_family, load_config

#: fp32 on both sides, the same formulas in another order of summation.
TOLERANCE = 1e-5

#: Gated DeltaNet norms sums that nearly cancel: transformers' own float32 logits of the tiny model
#: are 3.5e-5 away from its float64 ones, ours 4.5e-5.
DELTA_TOLERANCE = 2e-4

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
    model = random_hf_model(directory, len(spec.mtp))
    model.save_pretrained(directory / "saved")
    saved = named_as_in_files(spec, load_saved(directory / "saved"))
    around = random_around_mtp(spec)
    saved |= around
    # What transformers itself writes for this model resolves to the same thing.
    again = get_family(name).resolve(load_config(directory / "saved"))
    pick = [(s.args | {"mtp_num_layers": len(spec.mtp)}, s.rope, s.layers) for s in (again, spec)]
    assert pick[0] == pick[1]
    check_names(spec, saved)
    check_round_trip(spec)
    # More than twice the original length of the scaled ropes in `configs`.
    length = min(160, spec.args["max_position_embeddings"])
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(spec.true_vocab_size, (2, length), generator=generator)
    with torch.no_grad():
        reference = model(tokens).logits
        further = mtp_logits(model, around, tokens, spec)
    with megatron_model.one_rank():
        ours = megatron_model.build(spec)
        check_logits(spec, ours, saved, tokens, reference)
        check_mtp(spec, ours, tokens, further)


def check_windows(
    config: Mapping[str, Any], layers: list[int] | None, directory: Path, window: int = 24
) -> None:
    """Logits of a model whose config turns sliding windows on.

    Args:
        config: A tiny ``config.json``.
        layers: 1 for each layer that has one; None: all have.
        directory: Empty directory for the HF model.
        window: Much shorter than the sequence.
    """
    spec = resolve({**config, "use_sliding_window": True, "sliding_window": window}, directory)
    assert spec.args["window_size"] == f"{window - 1},0"
    assert spec.args.get("window_attn_skip_freq") == layers
    model = random_hf_model(directory)
    model.save_pretrained(directory / "saved")
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(spec.true_vocab_size, (2, 4 * window), generator=generator)
    with torch.no_grad():
        reference = model(tokens).logits
    with megatron_model.one_rank():
        ours = megatron_model.build(spec)
        check_logits(spec, ours, load_saved(directory / "saved"), tokens, reference)


def load_saved(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of an HF directory."""
    saved: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        saved |= load_file(file)
    return saved


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
    kept = path.read_text() if path.exists() else ""
    assert found == kept, f"{path} differs from what the config resolves to:\n{found}"


def random_hf_model(directory: Path, more_layers: int = 0) -> Any:
    """A transformers model in fp32 in which no two weights are alike, norms and biases included.

    Args:
        directory: Holds ``config.json``.
        more_layers: Further layers after the model's, which its forward leaves out: decoder layers
            of MTP, under the names that they have in files.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    import_model_code(config.model_type.removesuffix("_text"))
    config = config.get_text_config()
    types, count = getattr(config, "layer_types", None), config.num_hidden_layers
    config.num_hidden_layers += more_layers
    if types is not None:
        config.layer_types = [*types, *["full_attention"] * more_layers]
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        kept = model.state_dict()
        buffers = [(name, b) for name, b in model.named_buffers() if name in kept]
        for name, parameter in [*model.named_parameters(), *buffers]:
            # Gain 1 in the linear layers: activations, and so attention patterns, stay lively.
            scale = 0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.normal_(0, scale, generator=generator)
            if "norm" in name:
                parameter.add_(1)
    model.config.num_hidden_layers = count
    if types is not None:
        model.config.layer_types = types
    return model


def named_as_in_files(
    spec: ModelSpec, saved: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tensors with the decoder layers of MTP under the names that files have."""
    found = dict(saved)
    for rule in rules.spec_rules(spec):
        norm = re.fullmatch(r"mtp\.(\d+)\.\w+\.norm\.weight", rule.name)
        if norm and rule.hf[0].endswith("input_layernorm.weight"):
            theirs = rule.hf[0].removesuffix("input_layernorm.weight")
            built = f"{spec.prefix}layers.{len(spec.layers) + int(norm[1])}."
            for name in [name for name in found if name.startswith(built)]:
                found[theirs + name.removeprefix(built)] = found.pop(name)
    return found


def random_around_mtp(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """What layers for MTP have around their decoder layers, which transformers has no name for."""
    generator = torch.Generator().manual_seed(4)
    found = {}
    for rule in rules.spec_rules(spec):
        if re.fullmatch(r"mtp\.\d+\.\w+\.weight", rule.name):
            (name,), (shape,) = rule.hf, rule.shapes
            noise = torch.randn(shape, generator=generator)
            found[name] = 1 + 0.2 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
    return found


def add_around_mtp(spec: ModelSpec, directory: Path) -> None:
    """Put `random_around_mtp` beside a model that transformers saved in several files."""
    tensors = random_around_mtp(spec)
    if tensors:
        index = directory / "model.safetensors.index.json"
        content, places = json.loads(index.read_text()), {}
        for file in sorted(directory.glob("*.safetensors")):
            held = named_as_in_files(spec, load_file(file))
            save_file(held, file, {"format": "pt"})
            places |= dict.fromkeys(held, file.name)
        save_file(tensors, directory / "mtp.safetensors", {"format": "pt"})
        content["weight_map"] = places | dict.fromkeys(tensors, "mtp.safetensors")
        index.write_text(json.dumps(content))


def mtp_logits(
    model: Any, around: Mapping[str, torch.Tensor], tokens: torch.Tensor, spec: ModelSpec
) -> list[torch.Tensor]:
    """Logits of every depth of MTP, as the DeepSeek-V3 report has it (arXiv 2412.19437, 2.2).

    Depth k combines the hidden state of depth k - 1 at position i with the embedding of token
    i + k. The last k positions of depth k have no such token.
    """
    body, found = model.model, []
    hidden = body(tokens).last_hidden_state
    length = tokens.shape[1]
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    rotary = body.rotary_emb(hidden, torch.arange(length)[None])
    ours = {rule.name: rule.hf[0] for rule in rules.spec_rules(spec)}
    one = 1 if spec.args.get("layernorm_zero_centered_gamma") else 0
    for depth in range(1, len(spec.mtp) + 1):
        number = model.config.num_hidden_layers + depth - 1

        def weight(name: str, depth: int = depth) -> torch.Tensor:
            return around[ours[f"mtp.{depth - 1}.{name}.weight"]]

        def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return F.rms_norm(x, (x.shape[-1],), weight + one, model.config.rms_norm_eps)

        embedded = norm(body.embed_tokens(tokens.roll(-depth, dims=1)), weight("embedding_norm"))
        both = torch.cat([embedded, norm(hidden, weight("hidden_norm"))], dim=-1)
        joined = F.linear(both, weight("join"))
        hidden = body.layers[number](joined, attention_mask=mask, position_embeddings=rotary)
        hidden = norm(hidden, weight("final_norm"))
        found.append(model.lm_head(hidden)[:, :-depth])
    return found


def check_names(spec: ModelSpec, saved: Mapping[str, torch.Tensor]) -> None:
    """Rules name every saved tensor once, with its shape, and nothing else."""
    found = rules.file_shapes(spec)
    assert found == {name: tuple(tensor.shape) for name, tensor in saved.items()}
    joined = [len(stack.parts) - 1 for stack in rules.stacks(spec) if stack.always]
    assert len(saved) == sum(len(rule.hf) for rule in rules.spec_rules(spec)) - sum(joined)


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
    assert list(back) == list(tensors) or (rules.stacks(spec) and set(back) == set(tensors))
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def _encoded(spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    first = 1
    for name, shape in rules.file_shapes(spec).items():
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
    assert worst < tolerance_of(spec), f"logits differ by {worst:.1e} of their spread"


def tolerance_of(spec: ModelSpec) -> float:
    """Largest difference of logits that counts as none."""
    delta = any(layer.attention == "delta" for layer in spec.layers)
    return DELTA_TOLERANCE if delta else TOLERANCE


def check_mtp(
    spec: ModelSpec, ours: Any, tokens: torch.Tensor, expected: list[torch.Tensor]
) -> None:
    """The same of every depth of multi-token prediction."""
    if not expected:
        return
    held: list[torch.Tensor] = []
    hook = ours.mtp.register_forward_hook(lambda module, given, output: held.append(output))
    device = next(ours.parameters()).device
    megatron_model.logits(ours, tokens.to(device))
    hook.remove()
    hidden = held[0].chunk(1 + len(expected))[1:]
    for depth, (states, reference) in enumerate(zip(hidden, expected, strict=True), start=1):
        with torch.no_grad():
            logits, _ = ours.output_layer(states, weight=_output_weight(ours))
        found = logits.float().transpose(0, 1).cpu()[:, :-depth, : spec.true_vocab_size]
        spread = float(reference.std())
        assert spread > 0.3
        worst = float((found - reference).abs().max()) / spread
        # Depth n stands on n blocks more, each with the rounding of its own.
        tolerance = tolerance_of(spec) * (1 + depth)
        assert worst < tolerance, f"MTP depth {depth}: logits differ by {worst:.1e} of their spread"


def _output_weight(ours: Any) -> Any:
    tied = ours.share_embeddings_and_output_weights
    return ours.shared_embedding_or_output_weight() if tied else None


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
