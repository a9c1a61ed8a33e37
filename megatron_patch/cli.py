"""``megatron-patch <command>``: a table of commands, each loaded when it is called.

The program knows names and one-line descriptions; a command's own ``main(argv)`` owns its flags and
help. So ``--help`` imports neither torch nor megatron, and a command costs only what it needs.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import MappingProxyType

from megatron_patch import __version__
from megatron_patch.util import UserError, after_closed_pipe


def _lacking(package: str | None) -> int:
    """Say that a package of the plain installation is not there; the exit status."""
    from megatron_patch.info import install_line

    line = f"error: the Python package {package} is not installed: {install_line()}"
    print(line, file=sys.stderr)
    return 2


try:
    import typer
    from typer.core import TyperCommand, TyperGroup
except ModuleNotFoundError as lacking:  # not installed, of which `info` must not be silent
    sys.exit(_lacking(lacking.name))

#: Command -> ("package.module:function", one line). ``function(argv) -> exit status``.
COMMANDS = MappingProxyType(
    {
        "info": ("megatron_patch.info:main", "Versions, what is broken, what is missing for what."),
        "check": (
            "megatron_patch.training.parallel:main",
            "Will this run fit and start? Answers in a second, without a GPU.",
        ),
        "demo": ("megatron_patch.data.demo:main", "Make the embedded demo's data and model."),
        "preprocess": (
            "megatron_patch.data.text:main",
            "Turn documents into .bin/.idx files for pretraining.",
        ),
        "data": (
            "megatron_patch.data.show:main",
            "`data show` prints what of chats is trained, `data index` builds its index.",
        ),
        "convert": (
            "megatron_patch.convert.commands:main",
            "Hugging Face files to a Megatron checkpoint and back, and the proof: verify.",
        ),
        "ckpt": (
            "megatron_patch.convert.inspect:main",
            "What a checkpoint holds (show), and whether its bytes have changed (verify).",
        ),
        "pretrain": ("megatron_patch.pretrain:main", "Train (under torchrun: one process a GPU)."),
        "sft": (
            "megatron_patch.sft:main",
            "Fine-tune on chats, packed (under torchrun: one process a GPU).",
        ),
        "generate": (
            "megatron_patch.generate:main",
            "Continue prompts with a Megatron checkpoint or a Hugging Face directory.",
        ),
        "plot": ("megatron_patch.training.metrics:main", "Draw the loss curve of a run directory."),
        "patches": (
            "megatron_patch.patches.registry:main",
            "The runtime patches of Megatron-Core: what, why, until when; --verify checks them.",
        ),
    }
)


def available() -> tuple[str, ...]:
    """Commands whose module is part of this installation, in the order of the help text."""
    return tuple(name for name, (where, _) in COMMANDS.items() if _exists(where))


def _exists(where: str) -> bool:
    """Is there such a module? Packages on the way are imported, and import nothing themselves."""
    try:
        return find_spec(where.partition(":")[0]) is not None
    except ModuleNotFoundError:
        return False


def call(name: str, argv: Sequence[str]) -> int:
    """Run one command.

    Args:
        name: A name of :data:`COMMANDS`.
        argv: Its arguments, untouched.

    Returns:
        Exit status: the command's, or 2 after a mistake of the user's, which is printed in one
        sentence.
    """
    module, _, function = COMMANDS[name][0].partition(":")
    try:
        return int(getattr(importlib.import_module(module), function)(list(argv)) or 0)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return after_closed_pipe()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", __package__):
            raise
        return _lacking(package)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


class _Group(TyperGroup):
    """Unknown commands are answered with the nearest one."""

    def resolve_command(self, ctx, args):  # type: ignore[no-untyped-def]  # click's own signature
        name = args[0] if args else ""
        if self.get_command(ctx, name) is None:
            near = difflib.get_close_matches(name, available(), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(available())}"
            print(f"error: no command {name!r}; {hint}", file=sys.stderr)
            raise typer.Exit(2)
        return super().resolve_command(ctx, args)


class _Command(TyperCommand):
    """A command whose arguments reach its function as they were typed, ``--`` included."""

    def parse_args(self, ctx, args):  # type: ignore[no-untyped-def]  # click's own signature
        ctx.args = list(args)
        return []


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


def build() -> typer.Typer:
    """The program, with one pass-through command per available entry of the table."""
    app = typer.Typer(
        cls=_Group,
        name="megatron-patch",
        help="Train real open-weight models on pip-installed Megatron-Core.",
        epilog="Each command explains its own flags: megatron-patch COMMAND --help",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def top(
        version: bool = typer.Option(
            False, "--version", help="Print the version.", callback=_version, is_eager=True
        ),
    ) -> None:
        pass

    for name in available():
        app.command(name, cls=_Command, help=COMMANDS[name][1], add_help_option=False)(
            _passing_through(name)
        )
    return app


def _passing_through(name: str):  # type: ignore[no-untyped-def]  # typer reads the annotations
    def command(ctx: typer.Context) -> None:
        raise typer.Exit(call(name, ctx.args))

    # Typer resolves annotations of this module's globals; the context is all it passes.
    command.__annotations__["ctx"] = typer.Context
    return command


def run() -> None:
    """Console script."""
    build()(prog_name="megatron-patch")


if __name__ == "__main__":
    run()
