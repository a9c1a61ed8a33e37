"""The launcher's own flags, and the training flags that go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_patch.training import args
from megatron_patch.training.flags import USER_FLAGS_MARK, parse
from megatron_patch.util import UserError, column

ENVIRONMENTS = ("single", "torchrun", "dlc", "slurm", "mpi")


@dataclass(frozen=True, slots=True)
class LauncherFlag:
    """A flag that the launcher keeps for itself; all others go on to training."""

    name: str
    aliases: tuple[str, ...]
    field: str  # of Options
    kind: str  # "text" | "number" | "switch"
    metavar: str
    help: str


LAUNCHER_FLAGS = (
    LauncherFlag("--env", (), "env", "text", "NAME", f"{'|'.join(ENVIRONMENTS)}, if not as found"),
    LauncherFlag("--nnodes", ("--num-nodes", "--nodes"), "nodes", "number", "N", "nodes"),
    LauncherFlag(
        "--nproc-per-node",
        ("--num-gpus-per-node", "--gpus-per-node"),
        "ranks_per_node",
        "number",
        "N",
        "ranks a node [its GPUs; 1 without]",
    ),
    LauncherFlag("--node-rank", (), "node_rank", "number", "K", "this node's place, from 0"),
    LauncherFlag("--master-addr", (), "master_addr", "text", "HOST", "node 0, alike on all nodes"),
    LauncherFlag("--master-port", (), "master_port", "number", "P", "its port [29500]"),
    LauncherFlag("--hostfile", (), "hostfile", "text", "F", "mpi launchers: one host a line"),
    LauncherFlag(
        "--dry-run", (), "dry_run", "switch", "", "show command and plan; start and write nothing"
    ),
    LauncherFlag(
        "--data-index", (), "data_index", "switch", "", "build the data's index off-GPU, then stop"
    ),
    LauncherFlag("--no-check", (), "no_check", "switch", "", "skip the check before the start"),
    LauncherFlag("--demo", (), "demo", "switch", "", "the embedded demo, changed by other flags"),
)
_BY_SPELLING = {text: flag for flag in LAUNCHER_FLAGS for text in (flag.name, *flag.aliases)}
#: They do not say what to train, so a call with nothing else still means the demo.
NEUTRAL = frozenset({"--env", "--dry-run", "--no-check"})


@dataclass(frozen=True)
class Options:
    """The launcher's own flags; None where not given."""

    env: str | None = None
    nodes: int | None = None
    node_rank: int | None = None
    ranks_per_node: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    hostfile: str | None = None
    dry_run: bool = False
    demo: bool = False
    no_check: bool = False
    data_index: bool = False
    #: Canonical names of the flags that were given.
    given: frozenset[str] = frozenset()


def _is_flag(token: str) -> bool:
    return token.startswith("--") and len(token) > 2


def split_flags(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Separate the launcher's own flags from those that go on to training, order kept.

    Raises:
        UserError: a launcher flag without a value, with one that is not a number where one is
            needed, or two spellings of one flag that disagree.
    """
    found: dict[str, object] = {}
    spelled: dict[str, str] = {}
    rest: list[str] = []
    given: set[str] = set()
    tokens = list(argv)
    i = 0
    while i < len(tokens):
        token = tokens[i]
        i += 1
        name, equals, value = token.partition("=")
        name = name.replace("_", "-") if _is_flag(token) else name
        flag = _BY_SPELLING.get(name)
        if flag is None:
            rest.append(token)
            continue
        given.add(flag.name)
        parsed: object = True
        if flag.kind == "switch":
            if equals:
                raise UserError(f"{name} takes no value, got {token!r}")
        else:
            if not equals:
                if i == len(tokens):
                    raise UserError(f"{name} needs a value")
                value = tokens[i]
                i += 1
            parsed = value
            if flag.kind == "number":
                if not value.isdecimal():
                    raise UserError(f"{name} needs a whole number, got {value!r}")
                parsed = int(value)
        earlier = found.get(flag.field, parsed)
        if earlier != parsed and spelled[flag.field] != name:
            raise UserError(
                f"{spelled[flag.field]} {earlier} and {name} {value} are the same setting with two "
                "values; keep one of them"
            )
        found[flag.field], spelled[flag.field] = parsed, name
    options = Options(**found, given=frozenset(given))  # type: ignore[arg-type]
    if options.env is not None and options.env not in ENVIRONMENTS:
        raise UserError(f"--env {options.env}: choose from {', '.join(ENVIRONMENTS)}")
    for name, number in (("--nnodes", options.nodes), ("--nproc-per-node", options.ranks_per_node)):
        if number == 0:
            raise UserError(f"{name} must be at least 1")
    return options, rest


@dataclass(frozen=True)
class Flags:
    """Training flags: a launcher's defaults and the user's, which win."""

    defaults: tuple[str, ...]
    user: tuple[str, ...]
    #: Given by the launcher itself and stronger than the user's, such as an extended run's length.
    final: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        """One command line; the mark tells the parser where the stronger flags begin."""
        argv = list(self.defaults)
        for stronger in (self.user, self.final):
            if stronger:
                argv += [USER_FLAGS_MARK, *stronger] if argv else stronger
        return argv

    def get(self, dest: str) -> Any:
        """The value that ``dest`` ends up with on this command line, None where it is not given.

        Raises:
            UserError: a flag that nobody knows, or one that cannot be read.
        """
        found = parse(self.argv()).get(dest)
        return found.value if found is not None else None


def help_text(script: str, *, everything: bool = False) -> str:
    """``--help`` of a launcher: its own flags, then those of training that are not among them."""
    lines = [
        f"{script} without any flag is the embedded demo: a tiny Qwen3 on real text, about two",
        "minutes on two cores. The same call again goes on, or extends a finished run.",
        "",
    ]
    if script.endswith(".py"):
        lines = [
            f"{script} fine-tunes on chats: --hf-model DIR --data-path CHATS --output-dir OUT.",
            "OUT/hf is the result. The same call again goes on where it was interrupted.",
            "",
        ]
    lines += [
        "Where to run, and how (the launcher keeps these):",
    ]
    for flag in LAUNCHER_FLAGS:
        lines.append(column(f"  {flag.name} {flag.metavar}", 34) + flag.help)
        if flag.aliases:
            lines.append(f"{'':<34}also {' '.join(flag.aliases)}")
    head, _, training = args.help_text(script, everything).partition("\n\n")
    repeated = False
    kept = []
    for line in training.splitlines():
        if line.startswith("  --"):
            repeated = line.split()[0] in _BY_SPELLING
        elif not line.startswith("    "):
            repeated = False
        if not repeated:
            kept.append(line)
    return "\n".join([head, "", *lines, "", *kept, ""])
