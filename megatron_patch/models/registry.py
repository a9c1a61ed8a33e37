"""Finding the family of a model by the ``model_type`` of its ``config.json``."""

from __future__ import annotations

from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules

from megatron_patch.models.family import ALIASES, ModelFamily
from megatron_patch.models.hf_config import HFConfig, load_config
from megatron_patch.util import UserError

__all__ = ["HFConfig", "families", "get_family", "load_config"]

#: Entry-point group of families outside this package: name = HF model_type, value = the family.
ENTRY_POINTS = "megatron_patch.families"

#: Modules of this package that are no families.
_SHARED = frozenset({"blocks", "experts", "family", "hf_config", "modules", "registry", "rope"})


def families() -> tuple[str, ...]:
    """Every supported ``model_type``, sorted; imports no family."""
    package = import_module("megatron_patch.models")
    own = {module.name for module in iter_modules(package.__path__)} - _SHARED
    outside = {entry.name for entry in metadata.entry_points(group=ENTRY_POINTS)}
    return tuple(sorted(own | outside | {alias for alias, _ in ALIASES}))


def sources(model_type: str) -> tuple[Path, ...]:
    """The files of a family that is not in this package: its module, or its whole package."""
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        if entry.name == model_type:
            found = find_spec(entry.module)
            if found is None or found.origin is None:
                return ()
            file = Path(found.origin)
            own = not (file.parent / "__init__.py").exists()
            return (file,) if own else tuple(sorted(file.parent.rglob("*.py")))
    return ()


def get_family(model_type: str) -> ModelFamily:
    """The family of a ``model_type``; imports only that one.

    Raises:
        UserError: There is none; the message lists what there is.
    """
    if model_type not in families():
        raise UserError(
            f"model_type {model_type!r} is not supported. There are: {', '.join(families())}. "
            f"A family is one file in megatron_patch/models, or an entry point in the group "
            f"{ENTRY_POINTS!r}."
        )
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        if entry.name == model_type:
            family = entry.load()
            break
    else:
        family = import_module(
            f"megatron_patch.models.{dict(ALIASES).get(model_type, model_type)}"
        ).FAMILY
    if not isinstance(family, ModelFamily):
        raise UserError(
            f"the family for model_type {model_type!r} is a {type(family).__name__}, "
            f"not a ModelFamily."
        )
    return family
