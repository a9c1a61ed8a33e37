"""A Hugging Face ``config.json`` as a read-only record that knows which of its keys were used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_patch.util import Range, UserError

#: Whatever a number means, it is finite and fits 64 bits.
_NUMBER = Range(-(1 << 63), (1 << 63) - 1)


@dataclass(frozen=True)
class HFConfig:
    """View of one ``config.json``.

    `get`, `typed` and `require` note every key that is asked for, so that a family can tell what
    it has mapped from what it has never looked at. The data itself cannot be changed.

    Attributes:
        data: The parsed JSON object, read-only.
        path: The file it came from; named in every message.
        defaults: Pairs ``(key, value)`` that hold where the file lacks the key.
        nested: Whether the file keeps the language model's keys in ``text_config``; `data` has them
            beside the others.
        conflicts: Keys that stand in both places with two values: key, outer and inner value.
    """

    data: Mapping[str, Any]
    path: Path
    defaults: tuple[tuple[str, Any], ...] = ()
    nested: bool = False
    conflicts: tuple[tuple[str, Any, Any], ...] = ()
    _read: set[str] = field(default_factory=set, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Freeze the data."""
        object.__setattr__(self, "data", MappingProxyType(dict(self.data)))

    def view(
        self, aliases: tuple[tuple[str, str], ...], defaults: tuple[tuple[str, Any], ...]
    ) -> HFConfig:
        """The same file in one spelling, with defaults and nothing read yet.

        Args:
            aliases: Pairs ``(other spelling, ours)`` of keys that mean the same thing.
            defaults: What the HF configuration class takes for keys that a file may omit.

        Raises:
            UserError: The file holds both spellings with different values.
        """
        merged = dict(self.data)
        for other, ours in aliases:
            if other not in merged:
                continue
            value = merged.pop(other)
            if ours in merged and merged[ours] != value:
                raise UserError(
                    f"{self.path}: {other!r} is {value!r} and {ours!r} is {merged[ours]!r}, "
                    f"but both mean the same thing. Keep one of them."
                )
            merged[ours] = value
        return HFConfig(merged, self.path, defaults, self.nested, self.conflicts)

    @property
    def model_type(self) -> str:
        """The family name that the file gives.

        Raises:
            UserError: There is none.
        """
        value = self.data.get("model_type")
        if not isinstance(value, str) or not value:
            raise UserError(
                f"{self.path}: no 'model_type', so the model family is unknown. "
                f'Add it, for example "model_type": "qwen3".'
            )
        self._read.add("model_type")
        return value

    @property
    def keys_read(self) -> frozenset[str]:
        """Every key that was asked for so far, whether the file has it or not."""
        return frozenset(self._read)

    @property
    def defaulted(self) -> tuple[tuple[str, Any], ...]:
        """The defaults that were asked for because the file lacks their keys."""
        return tuple(
            (key, value)
            for key, value in self.defaults
            if key in self._read and key not in self.data
        )

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``key``; where it is absent its entry in `defaults`; else ``default``.

        A ``null`` in the file counts as a statement, so it gives ``default``.
        """
        self._read.add(key)
        value = self.data[key] if key in self.data else dict(self.defaults).get(key)
        return default if value is None else value

    def require(self, key: str, kind: type | tuple[type, ...] = int) -> Any:
        """The value of ``key``, which must be there and of type ``kind``.

        Raises:
            UserError: It is absent, ``null`` or of another type (a bool is never a number).
        """
        value = self.get(key)
        if value is None:
            raise UserError(
                f"{self.path}: {key!r} is missing. Every size comes from this file: add it."
            )
        return self._typed(key, value, kind)

    def typed(self, key: str, default: Any, kind: type | tuple[type, ...]) -> Any:
        """`get` with a check of the type, as `require` does."""
        value = self.get(key)
        return default if value is None else self._typed(key, value, kind)

    def _typed(self, key: str, value: Any, kind: type | tuple[type, ...]) -> Any:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(k.__name__ for k in kinds)
            raise UserError(f"{self.path}: {key!r} is {_short(value)}; expected {expected}.")
        if not isinstance(value, bool) and isinstance(value, int | float):
            self._within(key, value, _NUMBER)
        return value

    def number(self, key: str, within: Range, default: float | None = None) -> float:
        """A number in a range, as `require` (without a default) or `typed` (with one) find it.

        Raises:
            UserError: It is absent without a default, no number, not finite, or out of range.
        """
        kinds = (int, float)
        value = self.require(key, kinds) if default is None else self.typed(key, default, kinds)
        self._within(key, value, within)
        return float(value)

    def _within(self, key: str, value: float, within: Range) -> None:
        if needed := within.wanted(value):
            raise UserError(f"{self.path}: {key!r} is {_short(value)}; expected {needed}.")


def _short(value: object) -> str:
    """A value for a message, which thousands of digits would drown."""
    if isinstance(value, int) and abs(value) >= 1 << 200:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key that stands twice is a mistake, of which JSON readers keep the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key in found if sum(key == k for k, _ in pairs) > 1)
        values = " and ".join(_short(v) for k, v in pairs if k == twice)
        raise ValueError(f"{twice!r} stands more than once, as {values}; keep one")
    return found


def load_config(hf_dir: str | Path) -> HFConfig:
    """Read ``config.json`` of a Hugging Face model directory (or the file itself).

    Raises:
        UserError: No such directory or file, or the file is not a JSON object.
    """
    path = Path(hf_dir)
    if path.is_dir():
        path = path / "config.json"
    elif not path.exists():
        raise UserError(
            f"--hf-model {hf_dir}: no such directory. Give a local directory that holds "
            f"config.json; a model of a hub has to be downloaded first."
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except FileNotFoundError:
        raise UserError(
            f"{path.parent}: no config.json in it. Point --hf-model to a directory that has one."
        ) from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply. Restore the original file.") from None
    except ValueError as error:
        # Not UTF-8, not JSON, or an integer of more digits than Python reads.
        raise UserError(f"{path}: not valid JSON ({error}). Restore the original file.") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds a JSON {type(data).__name__}, not an object.")
    return flattened(data, path)


#: Where multimodal models keep the configuration of their language model.
_TEXT = "text_config"


def flattened(data: dict[str, Any], path: Path) -> HFConfig:
    """A configuration with the keys of its language model beside the others; the outer ones win."""
    inner = data.get(_TEXT)
    if not isinstance(inner, dict):
        return HFConfig(data, path)
    outer = {key: value for key, value in data.items() if key != _TEXT}
    both = [key for key in outer if key in inner and outer[key] != inner[key]]
    conflicts = tuple((key, outer[key], inner[key]) for key in both if key != "model_type")
    return HFConfig(inner | outer, path, nested=True, conflicts=conflicts)


def largest_token(hf_dir: str | Path) -> int | None:
    """The largest id of the ``tokenizer.json`` in a directory; None without a readable one."""
    import orjson

    try:
        data = orjson.loads((Path(hf_dir) / "tokenizer.json").read_bytes())
        vocabulary = data["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return max(
            int(i) for i in [*ids, *(token["id"] for token in data.get("added_tokens") or [])]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the tools that use a tokenizer say what is wrong with it
