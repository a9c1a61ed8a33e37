"""From a command line to a training run: platform, patches, arguments, run directory, training.

The entry points (`pretrain.py`, `sft.py`) differ in their data and loss only; everything
around those is here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import importlib
import logging
import math
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from megatron_patch.util import (
    UserError,
    atomic_write,
    die_with,
    let_forks_die_with_this,
    write_problem,
)

if TYPE_CHECKING:
    from megatron_patch.training import keep
    from megatron_patch.training.args import Plan


#: It lists every parameter of every gradient bucket: hundreds of lines before the first step.
#: `--logging-level 20` brings them back.
_LISTS_PARAMETERS = "megatron.core.distributed.param_and_grad_buffer"


@dataclass(frozen=True)
class Recipe:
    """What tells one entry point from another.

    Attributes:
        name: program name in messages.
        datasets: upstream's dataset provider.
        forward_step: upstream's forward step.
        resolve: `training.args.resolve`, or what does more with the same arguments.
        adjust: changes the model's stages before they are wrapped; gets them and the plan.
        describe: further values of the record of a step, counted from 0.
        finish: what is left to do on rank 0 once the run is through.
    """

    name: str
    datasets: Callable[..., Any]
    forward_step: Callable[..., Any]
    resolve: Callable[..., Plan] | None = None
    adjust: Callable[[list[Any], Plan], None] | None = None
    describe: Callable[[int], dict[str, Any]] | None = None
    finish: Callable[[Plan], None] | None = None


def rank_and_world() -> tuple[int, int]:
    """Global rank and world size, as torchrun sets them; (0, 1) without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _single_process() -> None:
    """Without torchrun one process is the whole world.

    Raises:
        UserError: several processes were started, and nobody told them their ranks; or variables
            of a launcher that make no sense.
    """
    if "RANK" in os.environ:
        return _check_ranks()
    for name in ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        size = os.environ.get(name, "")
        if size.isdigit() and int(size) > 1:
            raise UserError(
                f"{name}={size} but RANK is not set: each of the {size} processes would train "
                "alone, into the same directory. Start with torchrun or a launcher of examples/"
            )
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )


def _check_ranks() -> None:
    """The numbers that a launcher hands to each process.

    Raises:
        UserError: one is missing, is no number, or is out of range.
    """
    limits = {"WORLD_SIZE": (1, None), "RANK": (0, "WORLD_SIZE"), "LOCAL_RANK": (0, "WORLD_SIZE")}
    found: dict[str, int] = {}
    for name, (low, below) in limits.items():
        text = os.environ.get(name, "0" if name == "LOCAL_RANK" else "")
        if not text.isdecimal() or int(text) < low or (below and int(text) >= found[below]):
            high = f" below WORLD_SIZE={found[below]}" if below else ""
            raise UserError(
                f"the environment has RANK={os.environ['RANK']} and {name}={text or '(not set)'}; "
                f"a number of at least {low}{high} is needed. Start with torchrun or a launcher of "
                "examples/, or unset RANK to train with one process"
            )
        found[name] = int(text)


def _check_meeting_point() -> None:
    """Where the ranks meet.

    Raises:
        UserError: it is not named, or the port is none.
    """
    port = os.environ.get("MASTER_PORT", "")
    if not os.environ.get("MASTER_ADDR") or not (port.isdecimal() and 0 < int(port) < 1 << 16):
        shown = ", ".join(
            f"{name}={os.environ.get(name) or '(not set)'}"
            for name in ("MASTER_ADDR", "MASTER_PORT")
        )
        raise UserError(
            f"the environment has RANK={os.environ['RANK']} and {shown}: ranks meet at an address "
            "and a port from 1 to 65535. Start with torchrun or a launcher of examples/, or unset "
            "RANK to train with one process"
        )


def set_up(argv: Sequence[str], resolve: Callable[..., Plan] | None = None) -> Plan:
    """Diagnose the machine, choose the platform, resolve the arguments and apply the patches.

    Nothing of Megatron is imported before the machine is known to be sound.

    Args:
        argv: the command line without the program.
        resolve: as in `Recipe`.

    Raises:
        UserError: with what is wrong and what to do.
    """
    from megatron_patch import _compat, info
    from megatron_patch.patches import registry
    from megatron_patch.platform import cpu, detect, torch_backend
    from megatron_patch.training import args as arguments
    from megatron_patch.training import flags, resume, startup
    from megatron_patch.training.parallel import check, end_warnings

    if problems := [str(p) for p in info.version_problems() if p.fatal]:
        raise UserError("; ".join(problems))
    asked = flags.parse(argv).get("device")
    device = detect.choose(asked.value if asked else None)
    if device == "cuda" and (broken := info.te_problem_here()) and broken.fatal:
        raise UserError(str(broken))
    startup.mark(
        "torch" if _compat.installed_version("transformer-engine") is None else "torch, TE"
    )
    rank, world_size = rank_and_world()
    here = arguments.Environment.detect()
    plan = (resolve or arguments.resolve)(
        argv,
        world_size=world_size,
        device=device,
        environment=here if device == "cuda" else None,
        multicast=_multicast if device == "cuda" else None,
    )
    if plan.own.output_dir:
        resume.check_output(plan.own.output_dir, start=True)
    report = check(plan, trust_memory=False, start=True)
    if not report.ok:
        raise UserError("\nerror: ".join(report.refusals))
    plan.notes.extend(f"warning: {text}" for text in report.warnings)
    if rank == 0:
        plan.notes.extend(f"{reading.prefix}: {reading}" for reading in plan.readings)
        plan.notes.extend(f"warning: {text}" for text in end_warnings(plan))
    if finished(plan) is not None:
        return plan  # nothing will be trained, so nothing needs to be imported
    if plan.own.verify_checkpoint and rank == 0:
        plan.notes.append(_verified(plan))
    startup.mark("data and checks" if plan.own.sft else "checks")
    without = [] if plan.values["linear_attention_freq"] else ["fla"]
    if plan.values["tokenizer_type"] == "NullTokenizer":
        without.append("transformers")  # for tokenizers
    with _compat.hidden(*without):
        if device == "cpu":
            cpu.enable()
        if device == "cpu" or not plan.environment.te:
            torch_backend.enable()
        registry.apply()
        importlib.import_module("megatron.training")
        importlib.import_module("megatron.core.tokenizers.text.libraries")
    startup.mark("Megatron-Core")
    return plan


def _verified(plan: Plan) -> str:
    """What ``--verify-checkpoint`` has found in order; one rank reads, the others wait for it.

    Raises:
        UserError: A byte of the checkpoint has changed since it was written.
    """
    from megatron_patch.training import resume
    from megatron_patch.util import human_bytes

    start, weights = plan.start, plan.values["pretrained_checkpoint"]
    if start is None and weights:
        start = resume.read(weights)
    if start is None:
        return "--verify-checkpoint: there is no checkpoint yet"
    begun = time.monotonic()
    compared, bare = resume.compare_checksums(start.folder)
    words = f"{start.folder}: {human_bytes(compared)} equal their checksums"
    if bare:
        words += f", {human_bytes(bare)} carry none"
    return f"{words} ({time.monotonic() - begun:.1f} s)"


def _multicast() -> bool:
    """Whether the hardware can do what TP communication overlap needs."""
    import transformer_engine_torch as tex

    return bool(tex.device_supports_multicast())


def parse(plan: Plan, logs: Path | None = None) -> Any:
    """Megatron's own parser and validation on a plan; sets its global state.

    Args:
        plan: the resolved run.
        logs: folder for the table of all arguments that Megatron prints; None: to nowhere.

    Returns:
        The validated namespace.
    """
    from megatron.training.arguments import parse_and_validate_args

    overlay = plan.overlay()

    def add(parser: Any) -> Any:
        known = {action.dest for action in parser._actions}
        unknown = sorted(set(overlay) - known)
        assert not unknown, f"not Megatron arguments: {unknown}"
        parser.set_defaults(**_enums(parser, overlay))
        return parser

    before = sys.argv
    sys.argv = [before[0], *plan.megatron_argv()]
    table = logs / "megatron_arguments.txt" if logs is not None else Path(os.devnull)
    try:
        with table.open("w") as sink, contextlib.redirect_stdout(sink):
            return parse_and_validate_args(extra_args_provider=add)
    finally:
        sys.argv = before


def _enums(parser: Any, overlay: dict[str, Any]) -> dict[str, Any]:
    """Enum members for the names that a plan keeps them by."""
    import enum

    out = dict(overlay)
    for action in parser._actions:
        if action.dest in out and isinstance(out[action.dest], str) and action.choices:
            members = [c for c in action.choices if isinstance(c, enum.Enum)]
            out[action.dest] = next(
                (m for m in members if m.name == out[action.dest]), out[action.dest]
            )
    return out


def train(recipe: Recipe, argv: Sequence[str]) -> int:
    """Run a recipe; the return value is the exit status."""
    from megatron_patch.training import flags, parallel, startup

    started = time.time()
    startup.begin()
    plan: Plan | None = None
    try:
        _single_process()
        if {"dry_run", "json"} & set(flags.parse(argv)):
            # The launcher prints the command line too; without it the plan is what there is.
            return parallel.main(list(argv)) if rank_and_world()[0] == 0 else 0
        _check_meeting_point()
        _leave_no_orphans()
        quiet()
        plan = set_up(argv, recipe.resolve)
        return _run(recipe, plan, started)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.status
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"> interrupted; {_way_on(plan)}", flush=True)
        return 130


def _announced(datasets: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    """Upstream's dataset provider, which is the first call after the weights are in place.

    Upstream says of a run directory without a checkpoint that the run starts from random weights.
    """
    if plan.start is not None or not plan.own.init_from:
        return datasets

    @functools.wraps(datasets)
    def call(*args: Any, **kwargs: Any) -> Any:
        if rank_and_world()[0] == 0:
            print(f"> step 0 has the weights of {plan.own.init_from}, nothing random", flush=True)
        return datasets(*args, **kwargs)

    return call


def _way_on(plan: Plan | None) -> str:
    """What the same command will do after Ctrl-C, which saves nothing."""
    from megatron_patch.training import metrics, resume

    if plan is None or not plan.own.output_dir:
        return "nothing was saved"
    try:
        last = resume.latest(os.path.join(plan.own.output_dir, "checkpoints"))
    except UserError as problem:
        return str(problem)
    done = metrics.RECORDER.iteration if metrics.RECORDER is not None else None
    if last is None:
        return (
            "no checkpoint was saved yet, so the same command begins anew (SIGTERM to the launcher "
            "saves one, then ends)"
        )
    step = 0 if last == "release" else int(last[5:])
    again = f", {done - step} steps are done again" if done is not None and done > step else ""
    return f"the same command goes on from the checkpoint of step {step}{again}"


def _leave_no_orphans() -> None:
    """A rank ends with the torchrun that started it, and what it forks ends with the rank.

    Without torchrun the parent may be a shell, which a run is meant to outlive.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())
    let_forks_die_with_this()


def quiet() -> None:
    """Drop upstream's import-time warnings about packages that a run does without on purpose."""
    import warnings

    for category in (UserWarning, FutureWarning, DeprecationWarning, SyntaxWarning):
        warnings.filterwarnings("ignore", category=category, module=r"(megatron|torch)\b")
    warnings.filterwarnings(
        "ignore",
        message=".*(Apex|Transformer Engine|CPU RNG state|Please use DTensor|Triton is not supp)",
    )


def _run(recipe: Recipe, plan: Plan, started: float) -> int:
    from megatron_patch import _compat
    from megatron_patch.training import figures, metrics, saves, sinks, startup
    from megatron_patch.training.model import model_config

    rank, world_size = rank_and_world()
    output = Path(plan.own.output_dir) if plan.own.output_dir else None
    done = finished(plan)
    if done is not None:
        if rank == 0:
            print(
                f"> {output} is finished at step {done}; a longer run (--train-iters, "
                "--train-tokens, ...) extends it",
                flush=True,
            )
            if recipe.finish is not None and output is not None and not (output / "hf").exists():
                recipe.finish(plan)
        return 0
    # On every rank: the record is rewritten after the first step, which no rank reaches alone.
    changes = _changes(output / "resolved_args.json", plan) if output is not None else []
    if rank == 0:
        for note in plan.notes:
            print(f"> {note}", flush=True)
        if output is not None:
            _prepare(output)
            _keep_model(plan, output)
        for line in changes:
            print(f"> {line}", flush=True)
    import torch

    if output is not None and plan.device != "cpu":
        for name, value in flight_recorder(output, plan.own.flight_recorder).items():
            os.environ.setdefault(name, value)
    if plan.own.comm_check and int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) < world_size:
        from megatron_patch.training import comm

        for line in comm.check(plan.own.comm_check, plan.device):
            print(f"> {line}", flush=True)
    with _in_words(output):
        logs = output / "logs" if output is not None and rank == 0 else None
        args = parse(_without_writers(plan), logs)
        args.tensorboard_dir = plan.values["tensorboard_dir"]  # upstream's profiler goes by it
        if plan.device == "cpu":
            args.use_persistent_ckpt_worker = False  # its process asks for a GPU
        # Not steps x batch where the batch has changed on the way: the data's order goes by it.
        args.planned_train_samples = plan.run.samples if plan.run else None
        # Kept in the checkpoint, for later starts.
        args.restart_schedule_at = plan.own.restart_schedule_at
        args.validation_sets = list(plan.validation_sets)
        args.validation_whole = plan.validation_whole
        config = model_config(
            args,
            plan.model,
            linear_cross_entropy=plan.linear_cross_entropy,
            fused_kernels=plan.device != "cpu" and plan.own.fused_kernels != "off",
            weights=plan.weights,
            adjust=functools.partial(recipe.adjust, plan=plan) if recipe.adjust else None,
            report=True,
        )
    if args.logging_level is None and "MEGATRON_LOGGING_LEVEL" not in os.environ:
        logging.getLogger(_LISTS_PARAMETERS).setLevel(logging.WARNING)
    startup.mark("arguments")
    keeper = _keeper(plan, output) if rank == 0 and output is not None else None
    if output is not None and int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) < world_size:
        # Runs on all ranks once they have met, before anything is loaded.
        together = functools.partial(_one_directory, output)
        config.pre_wrap_hooks = [together, *config.pre_wrap_hooks]
    metrics.RECORDER = metrics.Recorder(
        output / metrics.FILE if output is not None else None,
        rank=rank,
        world_size=world_size,
        pipeline=args.pipeline_model_parallel_size,
        echo=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) < world_size,
        first_step=functools.partial(_first_step, output, plan),
        describe=recipe.describe,
        each_step=keeper.look if keeper is not None else None,
        evaluated=keeper.evaluated if keeper is not None else None,
        jumped=keeper.jumped if keeper is not None else None,
        sinks=sinks.sinks(plan, output) if rank == 0 and output is not None else (),
        peak_flops=figures.peak_flops(torch.cuda.get_device_name())
        if rank == 0 and plan.device != "cpu"
        else None,
    )
    saves.SAVES = saves.Saves(
        plan.save_minutes,
        steps=args.train_iters or (plan.run.iters if plan.run else 0),
        every=plan.values["save_interval"],
        evaluation=plan.values["eval_interval"] if plan.values["eval_iters"] else None,
        report=metrics.RECORDER.stood_still,
    )
    figures.EXPERTS = figures.expert_load(args)
    status, word = 0, "finished"
    try:
        with _in_words(output):
            _compat.pretrain(
                args,
                config,
                startup.ends("weights and optimizer", _announced(recipe.datasets, plan)),
                startup.ends("data", recipe.forward_step),
                warm_up=plan.device == "cpu",
            )
    except SystemExit as leaving:
        # Upstream's way to stop early, and also its way to give up before the first step.
        status, step = _exit_status(leaving), metrics.RECORDER.iteration
        if step is None:
            raise UserError(
                f"Megatron-Core ended with status {status} before the first step; its last lines "
                "say why"
            ) from leaving
        word = f"stopped at step {step} of {args.train_iters}"
    except _compat.CheckpointError as problem:
        raise UserError(_checkpoint_words(plan, metrics.RECORDER.iteration, problem)) from problem
    finally:
        metrics.RECORDER.close()
        metrics.RECORDER = saves.SAVES = figures.EXPERTS = None
    if keeper is not None:
        keeper.finish()
    if rank == 0:
        print(f"> {word} after {time.time() - started:.0f} s", flush=True)
        if output is not None:
            _finish(output)
        if recipe.finish is not None and word == "finished":
            recipe.finish(plan)
    torch.distributed.destroy_process_group()
    return status


def _one_directory(output: Path, stages: list[Any]) -> list[Any]:
    """Every rank reads all shards of a checkpoint, so that all nodes need the same directory.

    Raises:
        UserError: it is another one on some node; on all ranks.
    """
    from megatron_patch.data.pretrain_dataset import who_sees

    sees = who_sees(str(output / "logs"))
    blind = [rank for rank, seen in enumerate(sees) if not seen]
    if blind:
        shown = ", ".join(map(str, blind[:8])) + (", ..." if len(blind) > 8 else "")
        raise UserError(
            f"--output-dir {output} of rank 0's node is not what {len(blind)} of {len(sees)} ranks "
            f"see ({shown}): checkpoints need storage that all nodes share; give a path on it. "
            "What may be a node's own is --data-cache-path"
        )
    return stages


def flight_recorder(output: Path, entries: int | None) -> dict[str, str]:
    """Variables that send PyTorch's dumps of collectives to the run directory.

    It reads them when the ranks meet; older versions have other names for two of them.

    Args:
        output: the run directory.
        entries: collectives that a rank keeps; None: PyTorch's own number.
    """
    dump = str(output.resolve() / "logs" / "nccl_trace_rank_")
    found = {
        "TORCH_FR_DUMP_TEMP_FILE": dump,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": dump,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    if entries is not None:
        found |= {"TORCH_FR_BUFFER_SIZE": str(entries)}
        found |= {"TORCH_NCCL_TRACE_BUFFER_SIZE": str(entries)}
    return found


#: Flags whose figures upstream alone has; with one of them it writes a board of its own.
BOARD_FLAGS = (
    "log_timers_to_tensorboard",
    "log_memory_to_tensorboard",
    "log_validation_ppl_to_tensorboard",
    "log_world_size_to_tensorboard",
    "log_loss_scale_to_tensorboard",
    "log_params_norm",
    "log_num_zeros_in_grad",
    "log_max_attention_logit",
    "log_energy",
)


def _without_writers(plan: Plan) -> Plan:
    """The plan for upstream's parser, which opens writers of its own: ours are in `sinks.py`."""
    values, source = dict(plan.values), dict(plan.source)
    folder = values["tensorboard_dir"]
    own = folder and any(plan.given(d) and values[d] for d in BOARD_FLAGS)
    for dest, value in (
        ("tensorboard_dir", os.path.join(folder, "megatron") if own else None),
        ("wandb_project", ""),
    ):
        values[dest], source[dest] = value, "sinks"
    return dataclasses.replace(plan, values=values, source=source)


def _keeper(plan: Plan, output: Path) -> keep.Keeper:
    """What tidies up among the checkpoints, with what earlier starts have found."""
    from megatron_patch.training import keep, metrics

    losses, jumps = {}, []
    if (output / metrics.FILE).exists() and plan.start is not None:
        done = plan.start.iteration
        losses = {s: x for s, x in metrics.evaluations(output).items() if s <= done}
        jumps = [step for step in metrics.jumps(output) if step <= done]
    own = plan.own
    return keep.Keeper(output / "checkpoints", own.keep_last, own.keep_every, losses, jumps)


def _checkpoint_words(plan: Plan, step: int | None, problem: Exception) -> str:
    """What failed about a checkpoint, and which file, where that can be told."""
    from megatron_patch.convert import dist_io
    from megatron_patch.training import resume

    cause = str(problem).strip().partition("\n")[0][:200]
    if step is not None:
        save = Path(plan.values["save"])
        unfinished = sorted(
            {p.name for p in save.glob("iter_*") if p.is_dir()} - set(resume.steps(save))
        )
        # The writer's threads pass on no more than that something failed.
        cause = write_problem(save) or cause
        rest = f"{', '.join(unfinished)} is unfinished and can be removed; " if unfinished else ""
        return (
            f"the checkpoint of step {step} could not be written to {save}: {cause}. {rest}the "
            "same command goes on from the last whole checkpoint"
        )
    start = plan.start or resume.read(plan.values["pretrained_checkpoint"])
    assert start is not None
    found = dist_io.damaged(dist_io.read_checkpoint(start.folder))
    return found or f"{start.folder} cannot be read ({cause}); copy the checkpoint again"


_GOES_ON = "the same command goes on from the last whole checkpoint"

#: What disks and file systems answer with, as opposed to networks and programs.
_STORAGE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV}
)

#: What gloo and NCCL say where the other end of a connection is gone.
_LOST = re.compile(
    r"Connection (closed|reset) by peer|Connection closed by remote|Broken pipe|"
    r"remote process exited or there was a network error"
)

#: What upstream refuses settings with. Other exceptions, and all of them once a step is done, are
#: defects, and keep their traceback.
_REFUSALS = (AssertionError, ValueError, NotImplementedError, ImportError, OSError)


@contextlib.contextmanager
def _in_words(output: Path | None) -> Iterator[None]:
    """Upstream's checks of settings are exceptions of many kinds: messages, not tracebacks.

    Args:
        output: the run directory; the traceback goes to its logs, else to the folder for temporary
            files.
    """
    from megatron_patch.training import metrics

    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # Where it cannot write its index, the dataset builder raises a bare Exception.
        known = isinstance(error, _REFUSALS) or type(error) is Exception
        started = metrics.RECORDER is not None and metrics.RECORDER.iteration is not None
        step = metrics.RECORDER.iteration if metrics.RECORDER is not None else None
        if isinstance(error, OSError) and error.errno in _STORAGE:
            place = error.filename if error.filename is not None else output
            where = f"{place}: " if place is not None else ""
            after = f"after step {step}: " if step is not None else ""
            raise UserError(f"{after}{where}{error.strerror}; {_GOES_ON}") from error
        if _LOST.search(str(error)):
            after = f"after step {step}" if step is not None else "before the first step"
            raise UserError(
                f"another rank ended {after}, and this one cannot go on without it; what that one "
                f"says is the reason. {_GOES_ON.capitalize()}"
            ) from error
        if started or not known:
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        words = str(error).strip().partition("\n")[0]
        if isinstance(error, OSError) and error.filename is not None:
            words = f"{error.filename}: {error.strerror}"
        elif not words:
            words = f"{last.line} ({last.filename}:{last.lineno})"
        folder = output / "logs" if output is not None else Path(tempfile.gettempdir())
        file = folder / f"traceback-rank{rank_and_world()[0]}.txt"
        with contextlib.suppress(OSError):
            file.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        raise UserError(f"Megatron-Core refuses these settings: {words} (where: {file})") from error


def _exit_status(leaving: SystemExit) -> int:
    """The status that Python itself would end with."""
    code = leaving.code
    return code if isinstance(code, int) else 0 if code is None else 1


def _prepare(output: Path) -> None:
    """The run directory, this process's lock on it, and where the run is."""
    from megatron_patch import info
    from megatron_patch.training import metrics, resume

    try:
        for name in resume.FOLDERS:
            (output / name).mkdir(parents=True, exist_ok=True)
        _LOCKS.append(resume.lock(output))
    except OSError as problem:
        raise UserError(f"--output-dir {output}: {problem.filename}: {problem.strerror}") from None
    # Asks nvidia-smi and imports packages in child processes: seconds that training need not wait.
    threading.Thread(
        target=lambda: atomic_write(output / "env.json", metrics.to_json(info.gather())),
        name="env.json",
        daemon=True,
    ).start()


def _keep_model(plan: Plan, output: Path) -> None:
    """Configuration and tokenizer beside the checkpoints, so that these can be exported alone."""
    import shutil

    from megatron_patch.convert import hf_io
    from megatron_patch.convert import plan as conversion

    kept = output / "checkpoints" / "hf"
    if plan.own.hf_model is None or plan.model is None or kept.exists():
        return
    source = Path(plan.own.hf_model)
    new = kept.with_name(".hf.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    hf_io.copy_companions(source, new, leave=(conversion.RECORD,))
    conversion.write_record(source, new, plan.model)
    os.replace(new, kept)


def _first_step(output: Path | None, plan: Plan) -> None:
    """What this start took, and resolved to: not before, so that a failed start changes nothing."""
    from megatron_patch.training import metrics, startup

    words = startup.end("first step")
    if words is not None:
        print(f"> {words}", flush=True)
    if output is None:
        return
    atomic_write(output / "resolved_args.json", metrics.to_json(plan.as_dict()))


#: Open for as long as the process lives; holds the lock of its run directory.
_LOCKS: list[IO[bytes]] = []


def finished(plan: Plan) -> int | None:
    """The step at which this run has already ended; None while there is something to train."""
    if plan.run is None or not plan.own.output_dir:
        return None
    checkpoints = Path(plan.own.output_dir) / "checkpoints"
    if plan.values["load"] != str(checkpoints):
        return None  # --load DIR goes on from elsewhere
    step = plan.start.iteration if plan.start else 0
    return step if step >= plan.run.iters else None


#: Values that may differ between starts without a word: layout, machine, files of the run itself.
_FREE = re.compile(
    r".*parallel.*|.*overlap.*|.*fusion.*|.*interval.*|tensorboard_dir|save|load|data_cache_path|"
    r"exit_.*|log_.*|num_workers|micro_batch_size|distributed_.*|manual_gc.*|recompute.*|"
    r"train_(iters|samples)|pretrained_checkpoint|moe_.*dispatcher.*|.*timeout.*|"
    r"moe_(grouped_gemm|permute_fusion)|.*offload.*|eval_iters|no_persist_layer_norm|ckpt_.*"
)


def _changes(previous: Path, plan: Plan) -> list[str]:
    """What the command line changes in a run that has been started before.

    Raises:
        UserError: the network itself is another one.
    """
    import json

    from megatron_patch.training import metrics
    from megatron_patch.training.flags import flag_name

    try:
        before = json.loads(previous.read_text())
    except (OSError, ValueError):
        return []
    lines = []
    if before.get("run") and plan.run and before["run"]["samples"] != plan.run.samples:
        word = "extended" if plan.run.samples > before["run"]["samples"] else "shortened"
        unit, lengths = "sequences", (before["run"]["samples"], plan.run.samples)
        if before["values"].get("global_batch_size") == plan.values["global_batch_size"]:
            unit, lengths = "steps", (before["run"]["iters"], plan.run.iters)
        lines.append(
            f"the run is {word} from {lengths[0]} to {lengths[1]} {unit}; its "
            "learning rate follows the schedule of the new length from the next step on"
        )
        passes = [math.ceil(x) if x else None for x in (before["run"]["epochs"], plan.run.epochs)]
        if passes[0] != passes[1] and None not in passes:
            lines.append(
                f"the data is now read {passes[1]} times in place of {passes[0]}, in an order "
                "drawn anew for all passes: sequences already trained on may come before others"
            )
    then, now = before.get("values", {}), json.loads(metrics.to_json(plan.as_dict()))
    network = set(plan.model.args) if plan.model else set()
    network -= {"attention_dropout", "hidden_dropout", "moe_aux_loss_coeff", "init_method_std"}
    other = {d: (then[d], v) for d, v in now["values"].items() if d in then and then[d] != v}
    if before.get("rope") and before["rope"] != now["rope"]:
        other["rope"] = (before["rope"], now["rope"])
        network.add("rope")
    if plan.values["exit_on_missing_checkpoint"] and network & set(other):
        words = ", ".join(
            f"{d} {other[d][0]} -> {other[d][1]}" for d in sorted(network & set(other))
        )
        raise UserError(
            f"the model is another one than at the last start of this run: {words}. Give the old "
            "config.json, or another --output-dir (with --init-from for these weights)"
        )
    for dest, (old, new) in other.items():
        derived = dest.startswith(("lr_warmup", "lr_decay_iters")) and not plan.given(dest)
        if dest in network or not (derived or _FREE.fullmatch(dest)):
            lines.append(f"changed since the last start: {flag_name(dest)} {old} -> {new}")
    return lines


def _finish(output: Path) -> None:
    from megatron_patch.training import metrics

    for thread in threading.enumerate():
        if thread.name == "env.json":
            thread.join(60)
    records = metrics.read(output)
    print(f"> {metrics.summary(records)}", flush=True)
    picture = output / "loss.png"
    try:
        metrics.draw([(output.name, records)], picture, "lm loss")
    except ImportError:
        print("> no loss.png: matplotlib is not installed", flush=True)
    except OSError as problem:
        print(f"> no loss.png: {problem.strerror}", flush=True)
    else:
        print(f"> {picture}", flush=True)
