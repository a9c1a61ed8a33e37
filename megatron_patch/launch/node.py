"""One call of a launcher on one node: check, announce, run or show; the embedded demo."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_patch import __version__
from megatron_patch.launch import meeting
from megatron_patch.launch.flags import NEUTRAL, Flags, Options, split_flags
from megatron_patch.launch.process import Command, build_command, interpreter, supervise
from megatron_patch.launch.reach import require_meeting_point
from megatron_patch.launch.world import Machine, World, detect, probe
from megatron_patch.training import args, resume
from megatron_patch.training.flags import OwnFlags, flag_name
from megatron_patch.util import UserError


def with_output_dir(flags: Flags) -> tuple[Path, Flags]:
    """The run directory, and the flags with its name in them.

    Without ``--output-dir`` it is ``runs/<model>``: the same on every node and for every repetition
    of the command, which is what going on after an interruption needs. A time stamp is neither.
    """
    given = flags.get("output_dir")
    if given is not None:
        return Path(given), flags
    folder = Path("runs", Path(flags.get("hf_model") or "run").absolute().name)
    return folder, replace(flags, defaults=(*flags.defaults, "--output-dir", str(folder)))


def link_logs(run: Path) -> str | None:
    """Point ``./logs/<run>`` at the run directory; returns a sentence when it could not."""
    link = Path("logs", run.absolute().name)
    if link.parent.absolute() == run.parent.absolute():
        return None  # the runs live there themselves
    target = os.path.relpath(run.absolute(), link.parent.absolute())
    try:
        if link.is_symlink() and os.readlink(link) == target:
            return None
        if link.exists() and not link.is_symlink():
            return f"{link} exists and is no link: left as it is"
        link.parent.mkdir(exist_ok=True)
        fresh = link.with_name(f".{link.name}.{os.getpid()}")
        fresh.symlink_to(target, target_is_directory=True)
        fresh.replace(link)
    except OSError as error:
        return f"no link {link}: {error.strerror}"
    return None


def clip_seq_length(flags: Flags) -> Flags:
    """A launcher's default sequence length, but no longer than the model's positions.

    The user's own ``--seq-length`` is left to the check, which says what a longer one needs.
    """
    default = Flags(flags.defaults, ()).get("seq_length")
    model = flags.get("hf_model")
    if default is None or model is None or Flags((), flags.user).get("seq_length") is not None:
        return flags
    from megatron_patch.models import registry

    longest = registry.load_config(model).get("max_position_embeddings")
    if not isinstance(longest, int) or longest >= default:
        return flags
    return replace(flags, defaults=(*flags.defaults, "--seq-length", str(longest)))


def preflight(world: World, flags: Flags) -> tuple[int, str]:
    """Run ``megatron-patch check`` on the flags: its status and what it prints."""
    from megatron_patch.training import parallel

    shown = io.StringIO()
    argv = [*flags.argv(), "--nnodes", str(world.nodes)]
    argv += ["--nproc-per-node", str(world.ranks_per_node)]
    with contextlib.redirect_stdout(shown):
        status = parallel.main(argv)
    return status, shown.getvalue()


def require_length_and_data(world: World, flags: Flags) -> None:
    """What a plan may leave open and a run may not.

    Raises:
        UserError: no run length, no data, or data that is not on this node.
    """
    for problem in _open_problems(world, flags):
        raise UserError(f"{problem}, node {world.node_rank}")


def _open_problems(world: World, flags: Flags) -> Iterator[str]:
    from megatron_patch.training import parallel

    plan = args.resolve(flags.argv(), world_size=world.size, device=world.device)
    yield from parallel.data_problems(plan)


def _would_not_start(world: World, flags: Flags) -> str:
    """What a start on this machine would be refused for, although the plan is sound."""
    try:
        problem = next(_open_problems(world, flags), None)
    except UserError as refusal:
        problem = str(refusal)
    return f"; as it is, a start here would be refused: {problem}" if problem else ""


@dataclass(frozen=True)
class Call:
    """What ``examples/_lib.sh`` hands over."""

    entry: str  # "pretrain" | "sft"
    script: str
    defaults: tuple[str, ...]
    user: tuple[str, ...]


def wants_demo(flags: Flags, options: Options) -> bool:
    """Whether this call is the embedded demo; refuses a call that trains nothing.

    Raises:
        UserError: flags were given but no model.
    """
    has_model = flags.get("hf_model") is not None
    if options.demo:
        if has_model:
            raise UserError("--demo brings its own model; leave out either --demo or --hf-model")
        return True
    if has_model:
        return False
    if flags.user == ("--sft",):
        raise UserError("--sft needs --hf-model DIR and --data-path CHATS; --help lists the rest")
    if flags.user or options.given - NEUTRAL:
        raise UserError(
            "no model given: add --hf-model DIR, a Hugging Face directory with config.json and "
            "tokenizer (or --demo for the embedded demo with these flags)"
        )
    return True


def run(call: Call) -> int:
    """One call of a launcher, from flags to exit status."""
    environ = dict(os.environ)
    options, rest = split_flags(call.user)
    if any(token.replace("_", "-") == "--sft" for token in rest):
        if options.demo:
            raise UserError("--demo is pretraining; --sft needs --hf-model and --data-path")
        call = replace(call, entry="sft")
    if options.hostfile is not None:
        raise UserError("--hostfile belongs to the mpi_run_... launchers")
    flags = Flags(call.defaults, tuple(rest))
    demo = wants_demo(flags, options)
    machine = probe(environ)
    device = flags.get("device")
    if device is not None:
        device = "cpu" if device == "cpu" else "cuda"
    world = detect(environ, options, machine, device)
    if demo:
        if options.ranks_per_node is None and world.rank is None:
            # The tiny model gains nothing from more ranks, and one rank runs on every machine.
            world = replace(world, ranks_per_node=1)
        return run_demo(call, options, flags.user, world, machine, environ)
    folder, flags = with_output_dir(clip_seq_length(flags))
    return start(call, options, world, machine, environ, flags, folder)


#: What usually stands behind a signal that ended a rank, by the status it makes.
_SIGNALS = {
    128
    + signal.SIGBUS: "a rank read a file that was cut off meanwhile, or its disk fails (SIGBUS)",
    128 + signal.SIGKILL: "a rank was killed: by hand, by the scheduler, or for want of memory",
}


def start(
    call: Call,
    options: Options,
    world: World,
    machine: Machine,
    environ: Mapping[str, str],
    flags: Flags,
    folder: Path,
    checked: Flags | None = None,
) -> int:
    """Check, announce and run (or show) the training command of this node.

    ``checked`` stands in for ``flags`` in the check, where what they name is not there yet.
    """
    device = ("--device", world.device)
    if flags.get("device") is None:
        flags = replace(flags, defaults=(*flags.defaults, *device))
        checked = checked and replace(checked, defaults=(*checked.defaults, *device))
    checked = checked or flags
    if options.data_index:
        return _index_data(call, world, machine, environ, checked)
    command = build_command(world, call.entry, flags, environ, machine)
    if world.leads or options.dry_run:
        print(f"megatron_patch {__version__}: {Path(call.script).name} -> {call.entry}")
        print(world.line())
        print(f"this is node {world.node_rank}" + (f", rank {world.rank[0]}" if world.rank else ""))
        for note in world.notes:
            print(f"note: {note}")
        if "MP_LATER_PYTHON" in environ:
            print("note: no Python environment with megatron-core yet; a real call makes one first")
        print(f"run directory: {folder}", flush=True)
    srun = _srun(call, world, environ) if world.needs_srun else None
    if srun is not None and (options.dry_run or shutil.which("srun")):
        if not options.dry_run:
            print(f"started once for {world.nodes} nodes, so srun starts it on each", flush=True)
            status, report = (0, "") if options.no_check else preflight(world, checked)
            if status:
                print(report, end="", flush=True)
                return status
            return supervise(srun, environ, None).status
        print(f"\nthis was started once, so it goes on through srun:\n{srun.shell()}")
    if options.dry_run:
        print(f"\n{command.shell()}\n", flush=True)
    party = None if options.dry_run else _party(world, flags, folder, environ)
    try:
        if not options.no_check:
            status, report = preflight(world, checked)
            if not status and not options.dry_run:
                require_length_and_data(world, checked)
            if status or world.leads or options.dry_run:
                print(report, end="", flush=True)
            if status:
                return status
        if options.dry_run:
            print(f"dry run: nothing was started or written{_would_not_start(world, checked)}")
            return 0
        resume.check_output(folder, start=True)
        if world.leads and (folder / ".lock").exists():
            resume.lock(folder).close()  # the ranks take it; here it is known a minute earlier
        if not options.no_check:
            require_meeting_point(world)
    except UserError as refusal:
        print(f"error: {refusal}", file=sys.stderr, flush=True)
        if party is not None:
            meeting.refuse(party, str(refusal))
        return 2
    link = meeting.meet(party) if party is not None else None
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if world.leads and (problem := link_logs(folder)):
        print(f"note: {problem}")
    log = logs / f"node{world.node_rank}.log"
    with log.open("a", encoding="utf-8") as out:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S %z")
        out.write(f"\n=== {stamp} {world.line()}\n=== {command.shell()}\n")
    if world.leads:
        print(f"text log: {log}", flush=True)
        print(
            "starting: imports, data index and model come before the first step, which may take a "
            "minute",
            flush=True,
        )
    outcome = supervise(command, environ, log, link)
    news = link.finish(outcome.status, outcome.error, _PATIENCE) if link is not None else None
    if outcome.interrupted:
        print(f"interrupted; the whole text is in {log}", flush=True)
    elif news is not None and outcome.status:
        print(
            f"error: {news.line()}; this node ended too. The same command goes on from the last "
            f"checkpoint\nthe whole text is in {log}",
            file=sys.stderr,
        )
        return news.status
    elif outcome.status:
        cause = outcome.error or _SIGNALS.get(outcome.status)
        cause = f": {cause}" if cause else ""
        print(
            f"error: node {world.node_rank} ended with status {outcome.status}{cause}\n"
            f"the whole text is in {log}",
            file=sys.stderr,
        )
    return outcome.status


def _index_data(
    call: Call, world: World, machine: Machine, environ: Mapping[str, str], flags: Flags
) -> int:
    """What every start would first do with its data, once and without a GPU."""
    command = build_command(world, call.entry, flags, environ, machine)
    argv = (interpreter(environ), "-m", "megatron_patch.cli", "data", "index", *flags.argv())
    argv += ("--nnodes", str(world.nodes), "--nproc-per-node", str(world.ranks_per_node))
    argv += ("--sft",) if call.entry == "sft" and "--sft" not in argv else ()
    return supervise(replace(command, argv=argv), environ, None).status


#: Seconds that a failed node waits for the news that another one failed before it.
_PATIENCE = 5.0


def _party(
    world: World, flags: Flags, folder: Path, environ: Mapping[str, str]
) -> meeting.Party | None:
    """Who has to be there before the start; None for one node, or where nobody shall look."""
    limit = flags.get("comm_check")
    limit = OwnFlags.comm_check if limit is None else limit
    if world.nodes < 2 or not limit:
        return None
    return meeting.Party(
        world,
        meeting.host_name(environ),
        limit,
        meeting.given(flags),
        folder,
        lambda line: print(line, flush=True),
    )


def _srun(call: Call, world: World, environ: Mapping[str, str]) -> Command:
    argv = ["srun", f"--nodes={world.nodes}", f"--ntasks={world.nodes}", "--ntasks-per-node=1"]
    # A step no longer inherits the job's cores and would bind its one task to a single one.
    if cores := environ.get("SLURM_CPUS_ON_NODE"):
        argv.append(f"--cpus-per-task={cores}")
    argv += ["--kill-on-bad-exit=1", "bash", call.script, *call.user]
    return Command(tuple(argv), {})


def run_demo(
    call: Call,
    options: Options,
    user: tuple[str, ...],
    world: World,
    machine: Machine,
    environ: Mapping[str, str],
) -> int:
    """Prepare (once), train, and say what to do next."""
    from megatron_patch.data import demo

    if world.nodes > 1 or world.rank is not None:
        where = f"{world.nodes} nodes" if world.nodes > 1 else "one process per rank"
        raise UserError(
            f"the embedded demo runs on one node, and this is a {world.env} environment with "
            f"{where}: add --hf-model DIR and your flags for a real run, or --env single for the "
            "demo on this node alone"
        )
    given = Flags((), user)
    folder = Path(given.get("output_dir") or demo.DEFAULT_OUTPUT)
    resume.check_output(folder, start=not options.dry_run)
    for dest in ("train_tokens", "train_samples", "epochs"):
        if given.get(dest) is not None:
            raise UserError(
                f"the demo's length is given in steps: --train-iters, not {flag_name(dest)}"
            )
    steps = given.get("train_iters") or demo.STEPS
    plan = demo.schedule(demo.saved_step(folder), steps)
    inputs = folder / "input"
    if plan.start and demo.read_prepared(inputs) is None:
        raise UserError(
            f"{folder} holds a checkpoint of step {plan.start}, but its text and tokenizer in "
            f"{inputs} are gone or of another version; use another --output-dir, or remove {folder}"
        )

    final = ["--train-iters", str(plan.end)]
    if plan.start:
        # Without it the checkpoint's schedule is kept, and a longer one refused.
        final.append("--override-opt-param-scheduler")
    defaults = [*demo.train_flags(inputs, world.size, steps), "--output-dir", str(folder)]
    flags = Flags(tuple(defaults), user, tuple(final))

    print("demo: a tiny Qwen3 on the text of Python's standard library", flush=True)
    print(plan.says, flush=True)
    if options.dry_run and demo.read_prepared(inputs) is None:
        print(f"demo: a real call first prepares text, tokenizer and model in {inputs}")
        with tempfile.TemporaryDirectory(prefix="megatron-patch-demo-") as scratch:
            demo.write_model(Path(scratch, "model"), None)
            stand_in = replace(flags, final=(*flags.final, "--hf-model", f"{scratch}/model"))
            return start(call, options, world, machine, environ, flags, folder, stand_in)
    if options.dry_run:
        return start(call, options, world, machine, environ, flags, folder)
    demo.prepare(inputs)
    status = start(call, options, world, machine, environ, flags, folder)
    if status == 0:
        print(demo.report(folder, plan, call.script), flush=True)
    return status
