"""Rope of a config against transformers' own functions, in double and in single precision."""

from __future__ import annotations

import ast
import inspect
import json
import math
from dataclasses import replace

import pytest
import torch

from megatron_patch.models import rope
from megatron_patch.models.hf_config import load_config
from megatron_patch.models.rope import RopeSpec, attention_factor, inv_freq, read_rope
from megatron_patch.util import UserError

HEAD_DIM, LENGTH = 128, 131072

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

#: Name -> (base, scaling), everything that a family here can meet.
ROPES: dict[str, tuple[float, dict | None]] = {
    "default": (1000000.0, None),
    "default-odd-base": (12345.678, None),
    "linear": (10000.0, {"rope_type": "linear", "factor": 8.0}),
    "linear-fraction": (10000.0, {"rope_type": "linear", "factor": 2.5}),
    "llama3-32": (500000.0, LLAMA3),
    "llama3-other-bands": (
        500000.0,
        LLAMA3 | {"factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 16.0},
    ),
    "yarn-minimal": (1000000.0, YARN),
    "yarn-full": (
        1000000.0,
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25, "truncate": False},
    ),
    "yarn-mscale": (10000.0, YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7}),
    "yarn-one-mscale": (10000.0, YARN | {"mscale": 0.5}),
    "yarn-nulls": (10000.0, YARN | {"beta_fast": None, "attention_factor": None}),
    "yarn-step": (1e6, YARN | {"beta_fast": 8.0, "beta_slow": 8.0, "truncate": False}),
    "yarn-original-length-absent": (10000.0, {"rope_type": "yarn", "factor": 2.0}),
}


def read(tmp_path, **keys) -> RopeSpec:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **keys}))
    return read_rope(load_config(tmp_path), HEAD_DIM, LENGTH)


def hf_rope(theta: float, scaling: dict | None, dtype: torch.dtype, monkeypatch):
    """Frequencies and attention factor of transformers, in ``dtype`` instead of its float32."""
    from transformers import LlamaConfig, modeling_rope_utils
    from transformers.models.llama import modeling_llama

    config = LlamaConfig(
        head_dim=HEAD_DIM,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": theta, **(scaling or {"rope_type": "default"})},
    )
    monkeypatch.setattr(torch, "float", dtype)
    monkeypatch.setattr(torch, "float32", dtype)
    function = modeling_rope_utils.ROPE_INIT_FUNCTIONS.get(
        config.rope_parameters["rope_type"],
        modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters,
    )
    frequencies, factor = function(config)
    monkeypatch.undo()
    assert frequencies.dtype == dtype
    return frequencies, factor


@pytest.mark.parametrize("name", ROPES)
def test_equals_transformers_in_double_precision(tmp_path, name, monkeypatch):
    theta, scaling = ROPES[name]
    spec = read(tmp_path, rope_theta=theta, rope_scaling=scaling)
    expected, factor = hf_rope(theta, scaling, torch.float64, monkeypatch)
    found = torch.tensor(inv_freq(spec), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert attention_factor(spec) == pytest.approx(factor, rel=1e-15)
    original = spec.original_max_position_embeddings or LENGTH
    for position in (0, original, 2 * original):
        for function in (torch.cos, torch.sin):
            torch.testing.assert_close(
                function(found * position) * attention_factor(spec),
                function(expected * position) * factor,
                rtol=0,
                atol=1e-6,
            )


@pytest.mark.parametrize("name", ROPES)
def test_what_a_model_gets_is_transformers_in_single_precision(tmp_path, name, monkeypatch):
    theta, scaling = ROPES[name]
    spec = read(tmp_path, rope_theta=theta, rope_scaling=scaling)
    expected, factor = hf_rope(theta, scaling, torch.float32, monkeypatch)
    model = Stage()
    count = rope.apply_rope(model, spec)
    if name == "default":
        assert count == 0 and model.rotary.inv_freq is model.rotary.built
        return
    assert count == 1
    unscaled = torch.tensor([ratio == 1.0 for ratio in rope.scaling(spec)])
    assert torch.equal(model.rotary.inv_freq[unscaled], expected[unscaled])
    torch.testing.assert_close(model.rotary.inv_freq, expected, rtol=1e-6, atol=0)
    assert model.attention._yarn_concentration_factor == pytest.approx(factor, rel=1e-15)
    assert Rotary.forward.cleared == 1
    before = model.rotary.inv_freq
    rope.apply_rope([model], spec)
    assert torch.equal(model.rotary.inv_freq, before)


class Cached:
    """Stands where upstream's ``lru_cache`` does."""

    cleared = 0

    def cache_clear(self) -> None:
        self.cleared += 1


class Rotary(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.built = self.inv_freq = torch.ones(HEAD_DIM // 2)
        type(self).forward = Cached()

    def get_freqs_non_repeated(self) -> None: ...


class Config:
    apply_rope_fusion = False


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core_attention = torch.nn.Identity()
        self._yarn_concentration_factor = 1.0
        self.config = Config()


class Stage(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.attention = Rotary(), Attention()


def test_fused_kernel_with_attention_factor_is_refused(tmp_path):
    model = Stage()
    model.attention.config.apply_rope_fusion = True
    try:
        with pytest.raises(UserError, match="--no-rope-fusion"):
            rope.apply_rope(model, read(tmp_path, rope_theta=1e6, rope_scaling=YARN))
        rope.apply_rope(model, read(tmp_path, rope_theta=1e6, rope_scaling=LLAMA3))
    finally:
        model.attention.config.apply_rope_fusion = False


def test_a_model_without_rotary_embedding_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="no rotary embedding"):
        rope.apply_rope(torch.nn.Linear(1, 1), read(tmp_path, rope_theta=1e6, rope_scaling=LLAMA3))


@pytest.mark.parametrize("name", ROPES)
def test_both_spellings_give_the_same(tmp_path, name):
    theta, scaling = ROPES[name]
    four = read(tmp_path, rope_theta=theta, rope_scaling=scaling)
    five = read(tmp_path, rope_parameters={"rope_theta": theta, **(scaling or {})})
    both = read(
        tmp_path,
        rope_theta=theta,
        rope_scaling=scaling,
        rope_parameters={"rope_theta": theta, **(scaling or {})},
    )
    assert four == five == both
    if scaling:
        old = {("type" if k == "rope_type" else k): v for k, v in scaling.items()}
        assert read(tmp_path, rope_theta=theta, rope_scaling=old) == four


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, r'neither.*"rope_theta": 10000\.0'),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "neither"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, r"10000\.0.*500000\.0"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear"}}, "lacks 'factor'"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "0.5"),
        ({"rope_theta": 1e4, "rope_scaling": {**YARN, "finetuned": True}}, "finetuned=True"),
        ({"rope_theta": 1e4, "rope_scaling": {"mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "rope_type": "linear"}}, "type"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_theta": 1.0}, "'rope_theta' is 1.0"),
        ({"rope_theta": "1e4"}, "'rope_theta' is '1e4'"),
        ({"rope_theta": 1e4, "rope_scaling": "yarn"}, "expected an object"),
        ({"rope_theta": 1e4, "rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "must exceed"),
        ({"rope_theta": 1e4, "original_max_position_embeddings": 9, "rope_scaling": YARN}, "32768"),
    ],
)  # fmt: skip
def test_refusals_name_key_and_value(tmp_path, keys, words):
    with pytest.raises(UserError, match=words) as caught:
        read(tmp_path, **keys)
    assert "config.json" in str(caught.value)


def test_scaling_stays_between_full_and_none():
    spec = RopeSpec("llama3", 5e5, 64, 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    ratios = rope.scaling(spec)
    assert ratios[0] == 1.0 and ratios[-1] == 1 / 32 and ratios == sorted(ratios, reverse=True)
    assert any(1 / 32 < ratio < 1 for ratio in ratios)
    assert rope.scaling(replace(spec, type="default")) == [1.0] * 32
    assert math.isclose(inv_freq(spec)[-1], 5e5 ** (-62 / 64) / 32)


def test_every_field_that_transformers_reads_is_known():
    """A key that a new transformers reads from the rope dictionary must be read here too."""
    from transformers import modeling_rope_utils

    known = {key for _, keys in rope._KEYS for key in keys}
    known |= {"rope_theta", "partial_rotary_factor"}
    for name in ("linear", "llama3", "yarn"):
        tree = ast.parse(inspect.getsource(modeling_rope_utils.ROPE_INIT_FUNCTIONS[name]))
        read_keys = set()
        for node in ast.walk(tree):
            match node:
                case ast.Subscript(
                    value=ast.Name(id="rope_parameters_dict"), slice=ast.Constant(value=key)
                ):
                    read_keys.add(key)
                case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=key), *_]):
                    read_keys.add(key)
        assert {"factor", "rope_theta"} <= read_keys <= known
