"""Every number and switch of a config changes what we build as it changes transformers' model.

One by one: a changed field changes the resolved model, or is refused by name, or stands among the
family's inert ones. Together: a config in which all that may change has changed gives
transformers' logits; a field that transformers follows and we do not would show there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import megatron_model
import pytest
import torch
from check_family import (
    check_logits,
    load_saved,
    named_as_in_files,
    random_around_mtp,
    random_hf_model,
    resolve,
)
from test_config import TINY

from megatron_patch.models.family import ModelSpec
from megatron_patch.models.registry import get_family
from megatron_patch.util import UserError

Path_ = tuple[str, ...]

#: Fields that only make sense when they change together.
COUPLED: tuple[tuple[Path_, Path_], ...] = ((("num_attention_heads",), ("num_key_value_heads",)),)


def fields(config: Mapping[str, Any], above: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from fields(value, (*above, key))
        elif isinstance(value, int | float):
            yield (*above, key), value


def others(value: Any) -> tuple[Any, ...]:
    """Values to try instead, the likeliest first."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return tuple(v for v in (value * 3 // 2, value * 2, value // 2, value + 1) if v != value)
    # An epsilon has to become large to be seen; a rate of nothing has to become something.
    return (value * 1000,) if 0 < value < 1e-4 else (value * 1.25 or 0.25, value / 2)


def changed(config: Mapping[str, Any], changes: Mapping[Path_, Any]) -> dict[str, Any]:
    new = dict(config)
    for path, value in changes.items():
        if len(path) == 1:
            new[path[0]] = value
        else:
            new[path[0]] = changed(new[path[0]], {path[1:]: value})
    return new


def same(one: ModelSpec, two: ModelSpec) -> bool:
    pick = [(s.args, s.rope, s.layers, s.mtp, s.true_vocab_size) for s in (one, two)]
    more = [(s.latent_norm_epsilon, s.groups_by_best) for s in (one, two)]
    return pick[0] == pick[1] and more[0] == more[1]


def accepted(
    config: Mapping[str, Any], base: ModelSpec, path: Path_, value: Any, folder: Path
) -> dict[Path_, Any]:
    """Changes that the field takes, alone or with what it is coupled to."""
    inert = {key for key, _ in get_family(base.family).inert}
    refusals = []
    for new in others(value):
        attempts: list[dict[Path_, Any]] = [{path: new}]
        attempts += [dict.fromkeys(pair, new) for pair in COUPLED if path in pair]
        for changes in attempts:
            try:
                spec = resolve(changed(config, changes), folder)
            except UserError as error:
                refusals.append(str(error))
                continue
            if same(base, spec) and path[-1] not in inert:
                pytest.fail(f"{path}: {value} -> {new} changes nothing that we build")
            return {} if path[-1] in inert else changes
    if not all(path[-1] in words for words in refusals):
        pytest.fail(f"{path}: {value} is refused without its name: {refusals}")
    return {}


@pytest.mark.parametrize("name", TINY)
def test_every_field_counts(name, tmp_path):
    config = TINY[name]
    base = resolve(config, tmp_path)
    together: dict[Path_, Any] = {}
    for path, value in fields(config):
        for candidate in (accepted(config, base, path, value, tmp_path),):
            try:
                resolve(changed(config, together | candidate), tmp_path)
            except UserError:
                continue  # not with the others; it was accepted alone
            together |= candidate
    spec = resolve(changed(config, together), tmp_path)
    assert len(together) > 8
    model = random_hf_model(tmp_path, len(spec.mtp))
    model.save_pretrained(tmp_path / "saved")
    saved = named_as_in_files(spec, load_saved(tmp_path / "saved")) | random_around_mtp(spec)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(spec.true_vocab_size, (2, 100), generator=generator)
    with torch.no_grad():
        reference = model(tokens).logits
    with megatron_model.one_rank():
        check_logits(spec, megatron_model.build(spec), saved, tokens, reference)
