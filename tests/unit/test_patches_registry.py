"""The registry's mechanics, on a module made for the purpose."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import replace

import pytest

from megatron_patch.patches import registry
from megatron_patch.patches.registry import Patch, PatchError, fingerprint

UPSTREAM = """
    def greet(name):
        return "hello " + name

    class Base:
        def inherited(self):
            return "base"

    class Thing(Base):
        def value(self):
            return 1

        @staticmethod
        def fixed(x):
            return x

        @classmethod
        def named(cls):
            return cls.__name__

    FLAG = False
"""


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    package = tmp_path / "megatron_like"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "home.py").write_text(textwrap.dedent(UPSTREAM))
    (package / "user.py").write_text("from megatron_like.home import greet\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import megatron_like.home
    import megatron_like.user

    yield megatron_like
    registry.revert()
    for name in [n for n in sys.modules if n.startswith("megatron_like")]:
        del sys.modules[name]


def record(name="shout", target="megatron_like.home.greet", **changes) -> Patch:
    def shout(original):
        return lambda who: original(who).upper()

    base = Patch(
        name=name,
        target=target,
        mode="wrap",
        func=shout,
        why="too quiet",
        upstream="https://example.org/1",
        remove_when="it is loud",
        group="cpu",
    )
    return replace(base, **changes)


def test_wrap_applies_once_and_reverts(upstream):
    original = upstream.home.greet
    one = record(also=("megatron_like.user.greet",))
    assert registry.apply_records([one]) == ("shout",)
    assert registry.apply_records([one]) == ()
    assert upstream.home.greet("you") == upstream.user.greet("you") == "HELLO YOU"
    assert registry.revert() == ("shout",)
    assert upstream.home.greet is original and upstream.user.greet is original


def test_target_gone_names_patch_and_remedy(upstream):
    gone = record(name="gone", target="megatron_like.home.nothing")
    deeper = record(name="deeper", target="megatron_like.home.Absent.method")
    no_module = record(name="no-module", target="megatron_like.away.greet")
    with pytest.raises(PatchError) as error:
        registry.apply_records([record(), gone, deeper, no_module])
    message = str(error.value)
    for name in ("gone", "deeper", "no-module"):
        assert f"patch {name}: its target" in message
    assert "it is loud" in message and "https://example.org/1" in message
    assert "megatron-core >=0.19.2" in message
    assert upstream.home.greet("you") == "hello you"  # the sound one was not applied either
    assert registry.applied() == ()


def test_changed_source_stops(upstream):
    known = fingerprint(upstream.home.greet)
    assert registry.apply_records([record(fingerprint=(known,))]) == ("shout",)
    registry.revert()
    with pytest.raises(PatchError, match=f"fingerprint {known}, written against 0123456789abcdef"):
        registry.apply_records([record(fingerprint=("0123456789abcdef",))])


def test_fingerprint_is_of_meaning_not_of_looks(tmp_path, monkeypatch):
    (tmp_path / "looks.py").write_text(
        "def a(x, y=1):\n    '''Doc.'''\n    return x + y\n\n"
        "class H:\n    def a(self_or_x, y = 1): # comment\n\n        return (x +\n            y)\n"
        "    def b(x, y=2):\n        return x + y\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import looks

    same = fingerprint(looks.a)
    source = (tmp_path / "looks.py").read_text().replace("self_or_x", "x")
    (tmp_path / "looks2.py").write_text(source)
    import looks2

    assert fingerprint(looks2.H.a) == fingerprint(looks2.a) == same
    assert fingerprint(looks2.H.b) != same


def test_second_replace_is_refused_wraps_stack(upstream):
    first = record(name="first", mode="replace", func=lambda who: "first " + who)
    second = record(name="second", mode="replace", func=lambda who: "second " + who)
    with pytest.raises(
        PatchError, match=r"first and second both replace megatron_like\.home\.greet"
    ):
        registry.apply_records([first, second])
    only = [first, record(also=())]
    registry.apply_records([replace(p, also=("megatron_like.user.greet",)) for p in only])
    assert upstream.home.greet("you") == "FIRST YOU"
    with pytest.raises(PatchError, match="both replace"):
        registry.apply_records([second])
    registry.revert(["first"])
    assert upstream.home.greet("you") == "HELLO YOU"
    registry.revert(["shout"])
    assert upstream.user.greet("you") == "hello you"


def test_same_target_needs_the_same_places(upstream):
    with pytest.raises(PatchError, match="in different places"):
        registry.apply_records([record(), record("two", also=("megatron_like.user.greet",))])
    assert registry.applied() == () and upstream.home.greet("you") == "hello you"


def test_also_must_be_the_same_object(upstream):
    upstream.user.greet = lambda who: "other"
    with pytest.raises(PatchError, match=r"user\.greet is no longer the same object"):
        registry.apply_records([record(also=("megatron_like.user.greet",))])


def test_unlisted_copy_in_megatron_is_found(upstream, monkeypatch):
    import types

    stray = types.ModuleType("megatron.stray")
    stray.hello = upstream.home.greet
    monkeypatch.setitem(sys.modules, "megatron.stray", stray)
    with pytest.raises(PatchError, match=r"megatron\.stray\.hello still hold"):
        registry.apply_records([record()])


def test_methods_keep_their_kind_and_inherited_ones_are_given_back(upstream):
    thing = upstream.home.Thing
    records = [
        record("fixed", "megatron_like.home.Thing.fixed", func=lambda f: lambda x: f(x) + 1),
        record("named", "megatron_like.home.Thing.named", func=lambda f: lambda c: f(c) + "!"),
        record("inherited", "megatron_like.home.Thing.inherited", func=lambda f: lambda s: "mine"),
    ]
    registry.apply_records(records)
    assert (thing.fixed(1), thing.named(), thing().inherited()) == (2, "Thing!", "mine")
    assert upstream.home.Base().inherited() == "base"
    registry.revert()
    assert (thing.fixed(1), thing.named(), thing().inherited()) == (1, "Thing", "base")
    assert "inherited" not in vars(thing)


def test_absent_target_is_added_and_removed(upstream):
    added = record(
        "added", "sys.modules.megatron_like_kernel", mode="replace", func="json:dumps", absent=True
    )
    added = replace(added, also=("megatron_like.home.kernel",))
    registry.apply_records([added])
    import megatron_like_kernel

    assert megatron_like_kernel is upstream.home.kernel
    registry.revert()
    assert "megatron_like_kernel" not in sys.modules and not hasattr(upstream.home, "kernel")
    upstream.home.kernel = 1
    with pytest.raises(PatchError, match="exists upstream now"):
        registry.apply_records([replace(added, target="megatron_like.home.kernel", also=())])


def test_failure_half_way_leaves_nothing(upstream):
    def breaks(original):
        raise RuntimeError("no")

    original = upstream.home.greet
    with pytest.raises(RuntimeError):
        registry.apply_records(
            [record(), record("bad", "megatron_like.home.Thing.value", func=breaks)]
        )
    assert upstream.home.greet is original and registry.applied() == ()


def test_not_needed_is_skipped(upstream):
    assert registry.apply_records([record(needed=lambda: "the machine is quiet")]) == ()
    assert upstream.home.greet("you") == "hello you"


def test_wrong_version_stops_before_the_target_is_touched(upstream):
    with pytest.raises(PatchError, match=r"it is for megatron-core >=99, installed is 0\.19"):
        registry.apply_records([record(versions=">=99", target="nowhere.at.all")])


def test_revert_does_not_drop_a_later_foreign_change(upstream):
    registry.apply_records([record()])
    mine, upstream.home.greet = upstream.home.greet, lambda who: "foreign"
    with pytest.raises(PatchError, match="changed by other code"):
        registry.revert()
    upstream.home.greet = mine
    registry.revert()


def test_core_records_need_a_fingerprint():
    with pytest.raises(ValueError, match="fingerprint is required"):
        record(group="core")


def test_unknown_names():
    with pytest.raises(PatchError, match="no patch nonsense"):
        registry.apply(["nonsense"])
    with pytest.raises(ValueError, match="no patch group"):
        registry.apply(group="gpu")
