"""Registry of runtime patches: what is changed upstream, why, and when it goes away again.

A record names one upstream symbol and the fingerprint of the source it was written against. If
that source changes, :func:`apply` stops the run and says which patch and what to do, in place of
patching code that nobody has read. Records are plain data: listing them imports neither torch nor
megatron.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import pkgutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any, Literal

from megatron_patch import _compat
from megatron_patch.util import UserError

#: Where the records of a group are defined: a package whose modules hold ``PATCHES``, or a module.
GROUPS = MappingProxyType(
    {
        "core": "megatron_patch.patches",
        "torch": "megatron_patch.platform.torch_backend",
        "cpu": "megatron_patch.platform.cpu",
    }
)

_SUPPORTED = f">={_compat.MEGATRON_CORE_MIN},<{_compat.MEGATRON_CORE_BELOW}"
_MISSING: Any = object()


class PatchError(UserError):
    """A patch cannot be applied: its target is gone, changed, or replaced by another one."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One change of one upstream symbol.

    Attributes:
        name: Short unique name, used in messages and by :func:`apply`.
        target: Dotted path of what is changed, ``package.module.Class.method`` or an item of
            ``sys.modules``.
        mode: ``wrap``: ``func(original)`` returns what takes the place; wraps stack.
            ``replace``: ``func`` itself does; one per target.
        func: The function, or ``"package.module:attribute"`` so that nothing heavy is imported
            before the patch is applied.
        why: The defect, in a sentence.
        upstream: Link to the upstream report or source.
        remove_when: Exit condition.
        fingerprint: Known values of :func:`fingerprint` for the target's source. Empty only in the
            ``cpu`` group, whose targets are mostly builtins.
        also: Other places that hold the same object through ``from x import y``.
        evidence: Symbol to fingerprint instead, where the target is a flag or an object without
            source of its own.
        absent: The target does not exist upstream; the patch provides it.
        needed: Tells why the patch is not needed on this machine, or None if it is.
        versions: Megatron-Core versions it was written for, as a PEP 440 specifier.
        group: ``core``, ``torch`` (this library's modules in place of Transformer Engine's) or
            ``cpu`` (the CPU platform).
    """

    name: str
    target: str
    mode: Literal["wrap", "replace"]
    func: str | Callable[..., Any]
    why: str
    upstream: str
    remove_when: str
    fingerprint: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    evidence: str | None = None
    absent: bool = False
    needed: Callable[[], str | None] | None = None
    versions: str = _SUPPORTED
    group: str = "core"

    def __post_init__(self) -> None:
        if not self.fingerprint and self.group != "cpu":
            raise ValueError(f"patch {self.name}: a fingerprint is required outside group cpu")
        if self.mode not in ("wrap", "replace"):
            raise ValueError(f"patch {self.name}: mode {self.mode!r} is neither wrap nor replace")
        if self.absent and self.mode == "wrap":
            raise ValueError(f"patch {self.name}: what is absent cannot be wrapped")


# --- places -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """An attribute of a module or class, or an item of a mapping, that can be set and put back."""

    owner: Any
    name: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and self.owner is other.owner and self.name == other.name

    def __hash__(self) -> int:
        return hash((id(self.owner), self.name))

    def get(self) -> Any:
        """The raw value, descriptors unbound, a class's inherited ones too; else ``_MISSING``."""
        if isinstance(self.owner, MutableMapping):
            return self.owner.get(self.name, _MISSING)
        if isinstance(self.owner, type):
            return inspect.getattr_static(self.owner, self.name, _MISSING)
        return vars(self.owner).get(self.name, _MISSING)

    def own(self) -> Any:
        """What :meth:`put` has to put back: like :meth:`get`, without what is inherited."""
        if isinstance(self.owner, type) and self.name not in vars(self.owner):
            return _MISSING
        return self.get()

    def put(self, value: Any) -> None:
        """Set the value, or delete it for ``_MISSING``."""
        if isinstance(self.owner, MutableMapping):
            if value is _MISSING:
                self.owner.pop(self.name, None)
            else:
                self.owner[self.name] = value
        elif value is not _MISSING:
            setattr(self.owner, self.name, value)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)


def _locate(dotted: str) -> _Place:
    """Import what leads to ``dotted`` and return the place, whether or not the last name exists.

    Raises:
        LookupError: A module or class on the way does not exist.
    """
    if dotted.startswith("sys.modules."):
        return _Place(sys.modules, dotted.removeprefix("sys.modules."))
    parts = dotted.split(".")
    owner: Any = None
    for depth in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:depth])
        try:
            owner = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Only "this prefix is no module" is the question here, not a failure inside it.
            if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                raise
            continue
        break
    if owner is None:
        raise LookupError(f"no module {parts[0]}")
    for part in parts[depth:-1]:
        owner = getattr(owner, part, _MISSING)
        if owner is _MISSING:
            raise LookupError(f"no {part} on the way to {dotted}")
    return _Place(owner, parts[-1])


def _unbound(value: Any) -> Any:
    """The function inside a static or class method; anything else as it is."""
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _load(func: str | Callable[..., Any]) -> Any:
    if not isinstance(func, str):
        return func
    module, _, attribute = func.partition(":")
    return getattr(importlib.import_module(module), attribute)


# --- fingerprints -----------------------------------------------------------------------------


def fingerprint(obj: Any) -> str:
    """Fingerprint of an object's source that comments, docstrings and formatting do not change.

    Args:
        obj: A function, method, class or module that has Python source.

    Returns:
        The first 16 hexadecimal digits of a SHA-256 over the syntax tree.

    Raises:
        TypeError, OSError: It has no source.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(_unbound(obj))))
    return hashlib.sha256(repr(_canonical(tree)).encode()).hexdigest()[:16]


def _canonical(node: Any) -> Any:
    """Syntax tree as nested tuples, without docstrings and without fields a Python version adds."""
    if isinstance(node, list):
        return [_canonical(item) for item in node]
    if not isinstance(node, ast.AST):
        return node
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        body = node.body
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            fields["body"] = body[1:]
    present = ((key, value) for key, value in fields.items() if value not in (None, []))
    return (type(node).__name__, *((key, _canonical(value)) for key, value in present))


# --- checking ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Site:
    """A patched target: every place that held the original, and the patches on it, in order."""

    places: tuple[_Place, ...]
    owned: tuple[Any, ...]
    original: Any
    current: Any
    stack: list[Patch] = field(default_factory=list)


_sites: dict[str, _Site] = {}


@dataclass(frozen=True, slots=True)
class Finding:
    """What checking one patch against the installed upstream gave.

    Attributes:
        patch: The record.
        problem: What is wrong, or None.
        skip: Why it is not needed here, or None.
        found: Fingerprint of the installed source, where it has one.
    """

    patch: Patch
    problem: str | None = None
    skip: str | None = None
    found: str | None = None


def _remedy(patch: Patch) -> str:
    return (
        f"Install megatron-core {patch.versions}, or read what became of it upstream "
        f"({patch.upstream}): {patch.remove_when}. `megatron-patch patches --verify` checks every "
        "patch without a GPU"
    )


def check(patch: Patch) -> Finding:
    """Check one patch against what is installed; imports its target, changes nothing."""
    version = _compat.installed_version("megatron-core")
    if not _compat.version_in(version, patch.versions):
        return Finding(patch, f"it is for megatron-core {patch.versions}, installed is {version}")
    reason = patch.needed() if patch.needed and patch.target not in _sites else None
    if reason:
        return Finding(patch, skip=reason)
    site = _sites.get(patch.target)
    try:
        place = _locate(patch.target)
        original = site.original if site else place.get()
        evidence = original if patch.evidence is None else _pristine(patch.evidence)
    except LookupError as error:
        return Finding(patch, f"its target {patch.target} is gone: {error}")
    if patch.absent and original is not _MISSING:
        return Finding(patch, f"{patch.target} exists upstream now")
    if not patch.absent and original is _MISSING:
        return Finding(patch, f"its target {patch.target} is gone")
    if patch.evidence is not None and evidence is _MISSING:
        return Finding(patch, f"{patch.evidence}, which it was written against, is gone")
    found = None
    if patch.fingerprint:
        try:
            found = fingerprint(evidence)
        except (TypeError, OSError):
            return Finding(patch, f"{patch.evidence or patch.target} has no Python source to check")
        if found not in patch.fingerprint:
            known = " or ".join(patch.fingerprint)
            return Finding(
                patch,
                f"the source of {patch.evidence or patch.target} changed: fingerprint {found}, "
                f"written against {known}",
                found=found,
            )
    if site is None:
        for other in patch.also:
            try:
                value = _locate(other).get()
            except LookupError:
                return Finding(patch, f"the copy it also has to change, {other}, is gone")
            if value is not original:
                return Finding(patch, f"{other} is no longer the same object as {patch.target}")
        stray = _unlisted_copies(patch, original)
        if stray:
            return Finding(
                patch,
                f"{', '.join(stray)} still hold the unpatched object; they belong in `also`",
            )
    return Finding(patch, found=found)


def _pristine(dotted: str) -> Any:
    """The value at ``dotted`` as upstream defined it, seen through patches applied already."""
    return _sites[dotted].original if dotted in _sites else _locate(dotted).get()


def _unlisted_copies(patch: Patch, original: Any) -> list[str]:
    """Loaded megatron modules that took a copy of the target by ``from x import y``.

    Only asked for the symbol's home: patching a re-export is meant to be local.
    """
    home = f"{getattr(original, '__module__', '')}.{getattr(original, '__qualname__', '')}"
    if home != patch.target or not isinstance(_locate(patch.target).owner, ModuleType):
        return []
    listed = {patch.target, *patch.also}
    return sorted(
        where
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.") and module is not None
        for attribute, value in list(vars(module).items())
        if value is original and (where := f"{name}.{attribute}") not in listed
    )


# --- applying ---------------------------------------------------------------------------------


@cache
def _group(group: str) -> tuple[Patch, ...]:
    if group not in GROUPS:
        raise UserError(f"no patch group {group!r}; there are {', '.join(GROUPS)}")
    home = GROUPS[group]
    try:
        spec = find_spec(home)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        return ()
    package = importlib.import_module(home)
    modules = [package]
    for info in pkgutil.iter_modules(getattr(package, "__path__", ())):
        if info.name != "registry":
            modules.append(importlib.import_module(f"{home}.{info.name}"))
    found = tuple(patch for module in modules for patch in getattr(module, "PATCHES", ()))
    names = [patch.name for patch in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"patch names used twice in group {group}: {', '.join(twice)}")
    strangers = [patch.name for patch in found if patch.group != group]
    if strangers:
        raise ValueError(f"{home} holds patches of another group: {', '.join(strangers)}")
    return found


def patches(group: str | None = None) -> tuple[Patch, ...]:
    """Every record of a group, or of all groups; imports no upstream package."""
    return tuple(patch for name in ([group] if group else GROUPS) for patch in _group(name))


def applied() -> tuple[str, ...]:
    """Names of the patches in force, in the order of their targets' first patch."""
    return tuple(patch.name for site in _sites.values() for patch in site.stack)


def _select(names: Iterable[str] | None, group: str | None) -> list[Patch]:
    known = patches(group)
    if names is None:
        return list(known)
    by_name = {patch.name: patch for patch in known}
    wanted = list(names)
    unknown = [name for name in wanted if name not in by_name]
    if unknown:
        raise PatchError(f"no patch {', '.join(unknown)}; there are {', '.join(by_name)}")
    return [by_name[name] for name in wanted]


def apply(names: Iterable[str] | None = None, *, group: str = "core") -> tuple[str, ...]:
    """Apply patches, all or none; those in force already are left alone.

    Args:
        names: Which of the group's patches; None for all of them.
        group: One of :data:`GROUPS`.

    Returns:
        Names of the patches that this call put in force (not those that are not needed here).

    Raises:
        PatchError: A target is missing, its source is unknown, or two patches replace the same
            target. Every such patch is named; nothing was changed.
    """
    return apply_records(_select(names, group))


def apply_records(records: Iterable[Patch]) -> tuple[str, ...]:
    """:func:`apply` for records at hand, listed in a group or not."""
    in_force = set(applied())
    new = [patch for patch in records if patch.name not in in_force]
    findings = [check(patch) for patch in new]
    troubles = [f for f in findings if f.problem]
    if troubles:
        lines = [f"patch {f.patch.name}: {f.problem}. {_remedy(f.patch)}." for f in troubles]
        raise PatchError("\n".join(lines))
    needed = [finding.patch for finding in findings if not finding.skip]
    replaced = {t: p.name for t, s in _sites.items() for p in s.stack if p.mode == "replace"}
    for patch in needed:
        if patch.mode == "replace" and patch.target in replaced:
            raise PatchError(
                f"patches {replaced[patch.target]} and {patch.name} both replace {patch.target}; "
                "make one of them a wrap, or apply only one"
            )
        if patch.mode == "replace":
            replaced[patch.target] = patch.name
    done: list[Patch] = []
    try:
        for patch in needed:
            done.append(patch)
            _put(patch)
    except BaseException:
        _take_away({patch.name for patch in done})
        raise
    return tuple(patch.name for patch in needed)


def _put(patch: Patch) -> None:
    site = _sites.get(patch.target)
    if site is None:
        places = tuple(_locate(dotted) for dotted in (patch.target, *patch.also))
        owned = tuple(place.own() for place in places)
        original = places[0].get()
        site = _sites[patch.target] = _Site(places, owned, original, original)
    elif {_locate(dotted) for dotted in patch.also} - set(site.places):
        raise PatchError(
            f"patches {site.stack[0].name} and {patch.name} change {patch.target} in different "
            "places; give them the same `also`"
        )
    site.stack.append(patch)
    _rebuild(site)


def _rebuild(site: _Site) -> None:
    """Recompute the value from the original and the stack, and set it everywhere.

    A replace goes under the wraps of the same target, whichever was applied first.
    """
    value = site.original
    for patch in sorted(site.stack, key=lambda patch: patch.mode != "replace"):
        function = _load(patch.func)
        inner = function(_unbound(value)) if patch.mode == "wrap" else function
        rewrap = type(value) if isinstance(value, staticmethod | classmethod) else None
        value = rewrap(inner) if rewrap and not isinstance(inner, rewrap) else inner
    for place, owned in zip(site.places, site.owned, strict=True):
        place.put(value if site.stack else owned)
    site.current = value


def revert(names: Iterable[str] | None = None) -> tuple[str, ...]:
    """Take patches away again, all of them or those named, and restore what was there.

    Raises:
        PatchError: Someone else changed a target since; restoring would drop that change silently.
    """
    going = set(applied() if names is None else names)
    for target, site in _sites.items():
        ours = any(patch.name in going for patch in site.stack)
        if ours and site.places[0].get() is not site.current:
            raise PatchError(
                f"{target} was changed by other code after it was patched; not reverted"
            )
    return _take_away(going)


def _take_away(going: set[str]) -> tuple[str, ...]:
    gone: list[str] = []
    for target, site in reversed(list(_sites.items())):
        leaving = [patch.name for patch in site.stack if patch.name in going]
        if not leaving:
            continue
        gone += leaving
        site.stack = [patch for patch in site.stack if patch.name not in going]
        _rebuild(site)
        if not site.stack:
            del _sites[target]
    return tuple(gone)


# --- command ----------------------------------------------------------------------------------


def verify(group: str | None = None) -> list[Finding]:
    """Check every record against the installed upstream; imports torch and megatron."""
    return [check(patch) for patch in patches(group)]


def _row(patch: Patch, finding: Finding | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        key: getattr(patch, key)
        for key in ("name", "group", "target", "mode", "versions", "fingerprint")
    }
    row |= {"why": patch.why, "upstream": patch.upstream, "remove_when": patch.remove_when}
    row["status"] = "not checked (--verify)"
    if finding:
        skipped = finding.skip and f"not needed: {finding.skip}"
        row["status"] = finding.problem or skipped or "ok"
    return row


def main(argv: list[str]) -> int:
    """``megatron-patch patches``: print the table, with ``--verify`` check it."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="megatron-patch patches",
        description="The runtime patches of Megatron-Core: what, why, until when.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="import Megatron and compare every target with the source the patch was written for; "
        "exit 1 on any difference",
    )
    parser.add_argument("--group", choices=list(GROUPS), help="only this group (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)

    findings: dict[str, Finding] = {}
    if options.verify:
        from megatron_patch import info

        broken = [problem for problem in info.diagnose() if problem.fatal]
        if broken:
            for problem in broken:
                print(f"error: {problem}", file=sys.stderr)
            return 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Megatron would like to have is `info`'s subject
            findings = {f.patch.name: f for f in verify(options.group)}
    rows = [_row(patch, findings.get(patch.name)) for patch in patches(options.group)]
    failed = [f for f in findings.values() if f.problem]
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        _print_table(rows)
    for finding in failed:
        print(
            f"error: patch {finding.patch.name}: {finding.problem}. {_remedy(finding.patch)}.",
            file=sys.stderr,
        )
    if options.verify and not failed:
        version = _compat.installed_version("megatron-core")
        print(f"{len(rows)} patches fit megatron-core {version}", file=sys.stderr)
    return 1 if failed else 0


def _print_table(rows: list[dict[str, Any]]) -> None:
    """One block per group, wide fields on lines of their own: a narrow terminal is enough."""
    for group in dict.fromkeys(row["group"] for row in rows):
        members = [row for row in rows if row["group"] == group]
        print(f"[{group}] {len(members)} patches")
        for row in members:
            print(f"  {row['name']}  ({row['mode']}, megatron-core {row['versions']})")
            print(f"    target       {row['target']}")
            if group == "cpu" and not row["fingerprint"]:
                print(f"    status       {row['status']} (no source to fingerprint)")
            else:
                print(f"    status       {row['status']}")
            print(f"    why          {row['why']}")
            print(f"    upstream     {row['upstream']}")
            print(f"    remove when  {row['remove_when']}")
