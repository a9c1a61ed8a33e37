"""Rotary position embeddings: what a config asks for, its frequencies, and handing them to a model.

Megatron-Core 0.19 cannot express every Hugging Face rope in its flags: the scaling factor of
llama3 rope is dropped on the way to the model, its low and high factors and original length are
constants, linear scaling takes integers only and an explicit YaRN attention factor has no flag. So
the flags ask for plain rope, and `apply_rope` writes the frequencies into the built model.

Formulas: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), position interpolation
(arXiv 2306.15595); conventions of ``transformers.modeling_rope_utils``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_patch.util import Range, UserError

if TYPE_CHECKING:
    from megatron_patch.models.hf_config import HFConfig

#: No length, factor or base is larger; beyond it powers of the base overflow.
_LARGEST = 1e18

#: Keys of a rope dictionary that each type reads, beside its name and base. Others are refused.
_KEYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("default", ()),
    ("linear", ("factor",)),
    (
        "llama3",
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    ),
    (
        "yarn",
        (
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
)


@dataclass(frozen=True)
class RopeSpec:
    """One rotary embedding, completely.

    Attributes:
        type: ``default``, ``linear``, ``llama3`` or ``yarn``.
        theta: Base of the frequencies.
        dim: Rotated size of a head; there are ``dim / 2`` frequencies.
        factor: By how much the context is stretched.
        original_max_position_embeddings: Context length before stretching (llama3, yarn).
        low_freq_factor: Wavelengths above original length / this are divided (llama3).
        high_freq_factor: Wavelengths below original length / this stay as they are (llama3).
        beta_fast: Rotations over the original length above which a frequency stays (yarn).
        beta_slow: Rotations below which it is divided by ``factor`` (yarn).
        truncate: Whether yarn's two bounds are rounded outwards to whole dimensions.
        attention_factor: What cos and sin are multiplied with; None: derived, see the function.
        mscale: Numerator's weight of the derived factor (yarn, used only with the next).
        mscale_all_dim: Denominator's weight of the derived factor (yarn).
    """

    type: str
    theta: float
    dim: int
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


def read_rope(
    hf: HFConfig,
    head_dim: int,
    max_position_embeddings: int,
    known_theta: float | None = None,
    *,
    partial: bool = False,
    inert: Collection[str] = (),
) -> RopeSpec:
    """The rope of a config in the spelling of transformers 4 or 5.

    Transformers 4 writes ``rope_theta`` and ``rope_scaling`` side by side, transformers 5 one
    ``rope_parameters``. A file may hold both as long as they agree. There is no default base.

    Args:
        hf: The configuration.
        head_dim: Size of an attention head.
        max_position_embeddings: Context length, the default of the original length.
        known_theta: Base of a file that predates the key; only where that is certain.
        partial: Whether the family rotates a part of a head where the config says so.
        inert: Fields that change nothing for this family.

    Raises:
        UserError: No base frequency, an unsupported type, a missing, unknown or malformed field,
            or two spellings that disagree.
    """
    scaling, parameters = hf.get("rope_scaling"), hf.get("rope_parameters")
    for key, value in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if value is not None and not isinstance(value, dict):
            raise UserError(f"{hf.path}: {key!r} is {value!r}; expected an object or null.")
    name = "rope_parameters" if parameters else "rope_scaling"
    found: dict[str, Any] = dict(parameters or {})
    for key, value in (scaling or {}).items():
        _agree(hf, found, key, value, f"rope_scaling.{key}", f"rope_parameters.{key}")
    if "type" in found:  # the spelling before transformers 4.43
        _agree(hf, found, "rope_type", found.pop("type"), f"{name}.type", f"{name}.rope_type")
    for key in ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor"):
        value = hf.get(key) if key in hf or key not in found else None
        if value is not None:
            _agree(hf, found, key, value, key, f"{name}.{key}")

    theta = found.pop("rope_theta", known_theta)
    if theta is None:
        raise UserError(
            f"{hf.path}: no rope base frequency: neither 'rope_theta' nor "
            f"'rope_parameters.rope_theta' is there, and a wrong one trains without any error. "
            f"Add the value that the model was trained with, e.g. "
            f'"rope_theta": 10000.0 for models of the Llama 1 and 2 generation.'
        )
    rope_type = found.pop("rope_type", None) or "default"
    table = dict(_KEYS)
    if not isinstance(rope_type, str) or rope_type not in table:
        raise UserError(
            f"{hf.path}: rope type {rope_type!r} in {name!r} is not supported; "
            f"there are {', '.join(table)}."
        )
    part = found.pop("partial_rotary_factor", 1.0)
    if part != 1.0 and not partial:
        raise UserError(
            f"{hf.path}: 'partial_rotary_factor' is {part!r}; only 1.0 is supported by "
            f"model_type {hf.model_type!r}."
        )
    if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
        raise UserError(f"{hf.path}: 'partial_rotary_factor' is {part!r}; expected 0 < it <= 1.")
    if rope_type == "default":
        # Scaled types read it; beside a plain rope it only documents the pretraining length.
        found.pop("original_max_position_embeddings", None)
    found = {key: value for key, value in found.items() if key not in inert}
    unknown = sorted(set(found) - set(table[rope_type]))
    if unknown:
        listing = ", ".join(f"{key}={found[key]!r}" for key in unknown)
        raise UserError(
            f"{hf.path}: {name!r} of type {rope_type!r} holds {listing}, which that type does not "
            f"read. Remove it, or correct 'rope_type'."
        )
    dim = int(head_dim * part)
    if dim % 2 or not dim:
        of = f" ('partial_rotary_factor' {part:g} of {head_dim})" if dim != head_dim else ""
        raise UserError(f"{hf.path}: rope needs an even 'head_dim', got {dim}{of}.")
    if _number(hf, "rope_theta", theta, 1.0) == 1.0:
        raise UserError(f"{hf.path}: 'rope_theta' is {theta!r}; with that, no position differs.")
    plain = RopeSpec(rope_type, float(theta), dim)
    return _scaled(hf, name, found, plain, max_position_embeddings)


def _agree(hf: HFConfig, found: dict[str, Any], key: str, value: Any, one: str, two: str) -> None:
    """Add ``key`` to ``found``; refuse when it is there already with another value."""
    if found.get(key) is not None and value is not None and found[key] != value:
        raise UserError(
            f"{hf.path}: {one!r} is {value!r} but {two!r} is {found[key]!r}. Keep the right one."
        )
    if value is not None:
        found[key] = value


def _number(hf: HFConfig, key: str, value: Any, minimum: float) -> float:
    if Range(minimum, _LARGEST).wanted(value):
        raise UserError(
            f"{hf.path}: {key!r} is {value!r:.60}; expected a number >= {minimum:g} and finite."
        )
    return float(value)


def _scaled(
    hf: HFConfig, name: str, found: dict[str, Any], plain: RopeSpec, max_position_embeddings: int
) -> RopeSpec:
    """Check the fields of a scaled type and fill in what transformers derives."""
    rope_type = plain.type

    def field(key: str, minimum: float, default: float | None = None) -> float:
        value = found.get(key)
        if value is None:
            if default is None:
                raise UserError(
                    f"{hf.path}: {name!r} of type {rope_type!r} lacks {key!r}. Add the value that "
                    f"the model was trained with."
                )
            return default
        return _number(hf, f"{name}.{key}", value, minimum)

    def optional(key: str) -> float | None:
        return None if found.get(key) is None else field(key, 0.0)

    if rope_type == "default":
        return plain
    if rope_type == "linear":
        return replace(plain, factor=field("factor", 1.0))
    if rope_type == "llama3":
        original = int(field("original_max_position_embeddings", 1))
        low, high = field("low_freq_factor", 1e-9), field("high_freq_factor", 1e-9)
        if high <= low:
            raise UserError(
                f"{hf.path}: {name!r} has high_freq_factor {high:g}, which must exceed "
                f"low_freq_factor {low:g}."
            )
        return replace(
            plain,
            factor=field("factor", 1.0),
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    original = int(field("original_max_position_embeddings", 1, float(max_position_embeddings)))
    truncate = found.get("truncate")
    if truncate is not None and not isinstance(truncate, bool):
        raise UserError(f"{hf.path}: '{name}.truncate' is {truncate!r}; expected true or false.")
    return replace(
        plain,
        factor=field("factor", 1.0, max_position_embeddings / original),
        original_max_position_embeddings=original,
        beta_fast=field("beta_fast", 0.0, 32.0) or 32.0,
        beta_slow=field("beta_slow", 0.0, 1.0) or 1.0,
        truncate=True if truncate is None else truncate,
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
    )


def scaling(rope: RopeSpec) -> list[float]:
    """What each plain frequency is multiplied with, ``dim / 2`` numbers in ``[1 / factor, 1]``."""
    plain = _plain_inv_freq(rope)
    if rope.type == "default":
        return [1.0] * len(plain)
    if rope.type == "linear":
        return [1.0 / rope.factor] * len(plain)
    if rope.type == "llama3":
        return [_llama3_ratio(rope, frequency) for frequency in plain]
    low, high = _yarn_bounds(rope)
    kept = [1.0 - min(max((i - low) / (high - low), 0.0), 1.0) for i in range(len(plain))]
    return [(1.0 - keep) / rope.factor + keep for keep in kept]


def inv_freq(rope: RopeSpec) -> list[float]:
    """The ``dim / 2`` inverse frequencies in radians per position, in double precision."""
    return [f * s for f, s in zip(_plain_inv_freq(rope), scaling(rope), strict=True)]


def attention_factor(rope: RopeSpec) -> float:
    """What cos and sin are multiplied with: 1 except for yarn."""
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _plain_inv_freq(rope: RopeSpec) -> list[float]:
    return [float(rope.theta ** (-i / rope.dim)) for i in range(0, rope.dim, 2)]


def _llama3_ratio(rope: RopeSpec, frequency: float) -> float:
    assert rope.original_max_position_embeddings is not None
    assert rope.low_freq_factor is not None and rope.high_freq_factor is not None
    turns = rope.original_max_position_embeddings * frequency / (2 * math.pi)
    if turns < rope.low_freq_factor:
        return 1.0 / rope.factor
    if turns > rope.high_freq_factor:
        return 1.0
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1.0 - keep) / rope.factor + keep


def _yarn_bounds(rope: RopeSpec) -> tuple[float, float]:
    """First and last dimension of yarn's ramp from "kept" to "divided by the factor"."""
    original = rope.original_max_position_embeddings
    assert original is not None

    def dimension(turns: float) -> float:
        length = original / (turns * 2 * math.pi)
        return rope.dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    return (low, high + 0.001) if low == high else (low, high)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def is_plain(rope: RopeSpec) -> bool:
    """Whether Megatron's own flags (an integer base) give exactly this rope."""
    return rope.type == "default" and rope.theta == int(rope.theta)


def apply_rope(model: Any, rope: RopeSpec) -> int:
    """Write ``rope`` into a model that was built with plain rope; call once after building.

    The frequencies of every `RotaryEmbedding` are replaced, its cached tables dropped, and the
    attention factor put where Megatron's attention multiplies cos and sin with it. Frequencies
    that scaling leaves alone stay bit-equal to transformers' float32 ones. Context parallelism is
    untouched: upstream slices the table that it computes from these frequencies. Calling it again
    changes nothing.

    Args:
        model: A built model, wrapped or not, or an iterable of them (virtual pipeline chunks).
        rope: What the config asks for.

    Returns:
        Number of rotary embeddings that were set; 0 where Megatron's flags say it all.

    Raises:
        UserError: The fused rope kernel is on together with an attention factor, which it ignores.
        RuntimeError: The model holds no rotary embedding or attention of the expected shape.
    """
    if is_plain(rope):
        return 0
    import torch

    chunks = list(model) if isinstance(model, Iterable) else [model]
    factor = attention_factor(rope)
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32, device="cpu") / rope.dim
    ratio = torch.tensor(scaling(rope), dtype=torch.float64, device="cpu")
    frequencies = ((1.0 / rope.theta**exponents).double() * ratio).float()
    set_count = 0
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "inv_freq") and hasattr(module, "get_freqs_non_repeated"):
                _set_frequencies(module, frequencies)
                set_count += 1
            if not hasattr(module, "core_attention") or hasattr(module, "kv_layernorm"):
                continue  # latent attention has a rope of its own, which knows the factor
            if not hasattr(module, "_yarn_concentration_factor"):
                raise RuntimeError(
                    f"{type(module).__name__} has no _yarn_concentration_factor; upstream moved it"
                )
            if factor != 1.0 and module.config.apply_rope_fusion:
                raise UserError(
                    f"the rope of this model multiplies cos and sin with {factor:g}, which the "
                    f"fused rope kernel ignores for packed sequences. Add --no-rope-fusion."
                )
            module._yarn_concentration_factor = factor
    if not set_count and not all(_without_attention(chunk) for chunk in chunks):
        raise RuntimeError("the model holds no rotary embedding to write the config's rope into")
    return set_count


def _without_attention(chunk: Any) -> bool:
    """Whether a pipeline stage has no layer of a model whose rope is in its layers."""
    latent = getattr(getattr(chunk, "config", None), "multi_latent_attention", False)
    return latent and not any(hasattr(module, "core_attention") for module in chunk.modules())


def _set_frequencies(module: Any, frequencies: Any) -> None:
    """Write frequencies into a rotary embedding; drop the tables it made of the old ones.

    YaRN's blends two sets of frequencies; with both the same, every blend is that set.
    """
    if module.inv_freq.numel() != frequencies.numel():
        raise RuntimeError(
            f"rotary embedding has {module.inv_freq.numel()} frequencies, "
            f"the config {frequencies.numel()}"
        )
    blended = hasattr(module, "inv_freq_extra")
    for name in ("inv_freq", "inv_freq_extra", "inv_freq_inter")[: 3 if blended else 1]:
        setattr(module, name, frequencies.to(getattr(module, name).device))
    type(module).forward.cache_clear()
    if blended:
        module._set_cos_sin_cache(module.max_seq_len_cached, 0, module.dtype_cached)
        type(module).forward.cache_clear()
