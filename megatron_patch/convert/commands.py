"""The conversion commands: flags in, one plan, one result, one exit status.

``megatron-patch convert hf2mcore|mcore2hf|verify`` and the programs in
``toolkits/model_checkpoints_convertor`` are these functions.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patch.convert.rows import DTYPE_NAMES
from megatron_patch.util import Once, UserError, after_closed_pipe, human_bytes, human_count

if TYPE_CHECKING:
    from megatron_patch.convert.plan import ExportPlan, ImportPlan

#: Spellings of the same flag in other tools.
_INPUT = ("--input-dir", "--input", "--load-dir", "--load")
_OUTPUT = ("--output-dir", "--output", "--save-dir", "--save", "--output-path")
_HF = ("--hf-dir", "--hf-model", "--model", "--model-name-or-path", "--load-hf")


class _Parser(argparse.ArgumentParser):
    """Mistakes are one sentence."""

    def error(self, message: str) -> Any:
        raise UserError(f"{message} (see --help)")


def _parser(program: str, description: str) -> argparse.ArgumentParser:
    return _Parser(prog=program, description=description, allow_abbrev=False)


def _flag(parser: argparse.ArgumentParser, names: Sequence[str], **more: Any) -> None:
    parser.add_argument(*names, dest=names[0][2:].replace("-", "_"), action=Once, **more)


def _run_flags(parser: argparse.ArgumentParser, *more: str) -> None:
    _flag(
        parser,
        ["--dtype", "--torch-dtype", "--target-params-dtype"],
        choices=(*DTYPE_NAMES, *DTYPE_NAMES.values(), *more),
        metavar=f"{{{','.join((*DTYPE_NAMES, *more))}}}",
        help="number format of the result; default: the source's, bit for bit"
        + ("; fp8: linear layers in blocks of 128 x 128, as DeepSeek publishes" if more else ""),
    )
    _flag(parser, ["--workers"], type=int, default=1, metavar="N", help="processes; default: 1")
    parser.add_argument("--dry-run", action="store_true", help="print the plan; read no weights")
    _flag(
        parser,
        ["--part"],
        metavar="I/N",
        help="write only part I of N, with other machines writing the others on a shared disk",
    )
    parser.add_argument(
        "--merge", action="store_true", help="make a whole of parts written with --part"
    )


def hf2mcore(argv: Sequence[str]) -> int:
    """Hugging Face safetensors to a Megatron torch_dist checkpoint."""
    parser = _parser(
        "hf2mcore",
        "Hugging Face safetensors to a Megatron torch_dist checkpoint that loads at any "
        "parallel layout. Sizes, vocabulary and experts come from config.json.",
    )
    _flag(parser, [*_INPUT, *_HF], required=True, metavar="HF", help="model directory")
    _flag(parser, _OUTPUT, required=True, metavar="DIR", help="new directory for the checkpoint")
    _run_flags(parser)
    return _guarded(lambda: _hf2mcore(parser.parse_args(_dashes(argv))))


def _hf2mcore(args: argparse.Namespace) -> int:
    from megatron_patch.convert import stream
    from megatron_patch.convert.plan import plan_import

    output = Path(args.output_dir)
    part = _early(args, output)
    plan = plan_import(args.input_dir, DTYPE_NAMES.get(args.dtype, args.dtype))
    if args.dry_run:
        return _print(plan, output)
    _announce(plan, args.input_dir, output)
    stream.check_copies(plan)
    return _carry_out(stream.Import(plan), output, args, part)


def mcore2hf(argv: Sequence[str], *, model_type: bool = False) -> int:
    """A Megatron torch_dist checkpoint to Hugging Face safetensors."""
    parser = _parser(
        "convert_mcore_to_hf" if model_type else "mcore2hf",
        "A Megatron torch_dist checkpoint, converted or trained at any parallel layout, to "
        "Hugging Face safetensors. Optimizer states stay behind and are counted.",
    )
    _flag(
        parser,
        _INPUT,
        required=True,
        metavar="MCORE",
        help="iter_N, the directory above it, or a run directory",
    )
    _flag(parser, _OUTPUT, required=True, metavar="HF", help="new model directory")
    _flag(
        parser,
        _HF,
        metavar="ORIGINAL",
        help="configuration and tokenizer; default: hf/ beside the checkpoint",
    )
    _flag(
        parser,
        ["--max-shard-size"],
        default="5GB",
        metavar="SIZE",
        help="largest file; default: 5GB",
    )
    if model_type:
        _flag(parser, ["--model-type"], metavar="NAME", help="checked against config.json")
    _run_flags(parser, "fp8")
    return _guarded(lambda: _mcore2hf(parser.parse_args(_dashes(argv))))


def _mcore2hf(args: argparse.Namespace) -> int:
    from megatron_patch.convert import hf_io, stream
    from megatron_patch.convert.plan import plan_export

    output = Path(args.output_dir)
    part = _early(args, output)
    size = hf_io.parse_size(args.max_shard_size, "--max-shard-size")
    plan = plan_export(args.input_dir, args.hf_dir, DTYPE_NAMES.get(args.dtype, args.dtype), size)
    wanted = getattr(args, "model_type", None)
    if wanted is not None and wanted.replace("-", "_") != plan.spec.family:
        raise UserError(
            f"--model-type {wanted}: {plan.hf_dir / 'config.json'} says {plan.spec.family!r}. "
            f"Leave the flag out; the config decides."
        )
    if args.dry_run:
        return _print(plan, output)
    _announce(plan, args.input_dir, output)
    return _carry_out(stream.ExportJob(plan), output, args, part)


def _early(args: argparse.Namespace, output: Path) -> tuple[int, int] | None:
    """Check what needs no plan; returns the part to write, counted from 0."""
    from megatron_patch.convert import stream

    if args.workers < 1:
        raise UserError(f"--workers {args.workers}: at least 1 is needed")
    if not args.dry_run:
        stream.refuse_output(output)
    if args.part is None:
        return None
    if args.merge or args.workers > 1:
        raise UserError("--part writes one part in one process: no --merge or --workers with it")
    number, _, count = args.part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UserError(f"--part {args.part}: write I/N with I from 1 to N, for example 1/4")
    return int(number) - 1, int(count)


def _carry_out(
    job: Any, output: Path, args: argparse.Namespace, part: tuple[int, int] | None
) -> int:
    from megatron_patch.convert import stream

    if part is not None:
        stream.write_part(job, output, *part)
        print(f"part {part[0] + 1} of {part[1]} is written; --merge when all are")
        return 0
    notes = stream.merge_parts(job, output) if args.merge else None
    if notes is None:
        notes = stream.convert(job, output, args.workers)
    for note in notes:
        print(f"note: {note}")
    print(f"written: {output}")
    return 0


def _announce(plan: ImportPlan | ExportPlan, source: str, output: Path) -> None:
    from megatron_patch.convert import stream

    print(
        f"{source} -> {output}: {plan.spec.family}, {len(plan.steps)} Megatron tensors, "
        f"{human_count(_numbers(plan))} parameters, {human_bytes(plan.nbytes)}",
        flush=True,
    )
    for line in stream.describe(plan):
        print(line, flush=True)


def _numbers(plan: ImportPlan | ExportPlan) -> int:
    from math import prod

    return sum(prod(shape) for step in plan.steps for shape in step.rule.shapes)


def _print(plan: ImportPlan | ExportPlan, output: Path) -> int:
    from megatron_patch.convert import stream

    for line in (*plan.lines(), *stream.describe(plan)):
        print(line)
    print(
        f"dry run: {len(plan.steps)} Megatron tensors, {human_count(_numbers(plan))} parameters, "
        f"{human_bytes(plan.nbytes)} to {output}; nothing was written"
    )
    return 0


def verify(argv: Sequence[str]) -> int:
    """Whether a Megatron checkpoint and a Hugging Face directory hold the same model."""
    parser = _parser(
        "verify",
        "Compare every tensor of a Hugging Face directory with a Megatron checkpoint, both ways. "
        "Ends in PASS (exit status 0) or FAIL (1).",
    )
    _flag(parser, _HF, required=True, metavar="HF", help="model directory")
    _flag(
        parser,
        ["--mcore-dir", *_INPUT],
        required=True,
        metavar="MCORE",
        help="iter_N, the directory above it, or a run directory",
    )
    parser.add_argument(
        "--logits",
        action="store_true",
        help="also run both models in fp32 on the CPU and compare their logits",
    )
    _flag(
        parser,
        ["--report"],
        metavar="FILE",
        help="write the digest of every tensor of both sides as JSON",
    )
    return _guarded(lambda: _verify(parser.parse_args(_dashes(argv))))


def _verify(args: argparse.Namespace) -> int:
    from megatron_patch.convert import verify as verification

    started = time.monotonic()
    outcome = verification.verify(args.hf_dir, args.mcore_dir, report=args.report)
    lines = list(outcome.lines())
    passed = outcome.passed
    if args.logits and passed:
        logits = verification.compare_logits(Path(args.hf_dir), args.mcore_dir)
        lines += logits.lines()
        passed = logits.passed
    elif args.logits:
        lines.append("logits: not run, the tensors differ already")
    for line in lines:
        print(line)
    print(f"{'PASS' if passed else 'FAIL'} after {time.monotonic() - started:.1f} s")
    return 0 if passed else 1


def _dashes(argv: Sequence[str]) -> list[str]:
    """``_`` equals ``-`` in every flag."""
    found = []
    for word in argv:
        flag, equals, value = word.partition("=")
        name = flag.replace("_", "-") if flag.startswith("--") else flag
        found.append(name + equals + value)
    return found


def _guarded(work: Callable[[], int]) -> int:
    try:
        return work()
    except BrokenPipeError:
        return after_closed_pipe()
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; nothing is left that looks like a result", file=sys.stderr)
        return 130


COMMANDS = (("hf2mcore", hf2mcore), ("mcore2hf", mcore2hf), ("verify", verify))


def main(argv: list[str]) -> int:
    """``megatron-patch convert``: the first word says what."""
    for name, function in COMMANDS:
        if argv[:1] == [name]:
            return function(argv[1:])
    if argv[:1] in ([], ["--help"], ["-h"]):
        print("usage: megatron-patch convert {hf2mcore,mcore2hf,verify} [flags]\n")
        for name, function in COMMANDS:
            print(f"  {name:10} {(function.__doc__ or '').splitlines()[0]}")
        print("\nEach explains its flags: megatron-patch convert hf2mcore --help")
        return 0
    names = ", ".join(name for name, _ in COMMANDS)
    print(f"error: convert {argv[0]}: there is {names}", file=sys.stderr)
    return 2
