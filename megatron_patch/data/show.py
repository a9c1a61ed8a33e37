"""``megatron-patch data show``: what a model would be trained on, before anything is trained.

Samples with their trained tokens in colour, counts, length statistics, a histogram.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_patch.data import packing, sft_store, sources, text
from megatron_patch.data.chat import Encoder, Refused, Sample, schema_of, without_nulls
from megatron_patch.util import UserError, atomic_write

_TRAINED, _DIM, _END = "\x1b[30;42m", "\x1b[2m", "\x1b[0m"
#: Samples that are printed beyond those asked for, as the first of their file or schema.
_FIRSTS = 20


def colour(sample: Sample, decode: Callable[[Sequence[int]], str], *, coloured: bool = True) -> str:
    """The sample's text; trained tokens on green, or between ``⟦`` and ``⟧``.

    Runs of trained and other tokens are decoded in one piece each, so that a character of several
    tokens is shown whole.
    """
    edges = np.flatnonzero(np.diff(sample.mask)) + 1
    parts = []
    bounds = [0, *edges.tolist(), int(sample.ids.size)]
    for start, end in itertools.pairwise(bounds):
        piece = decode(sample.ids[start:end].tolist())
        if not sample.mask[start]:
            parts.append(piece)
        elif coloured:
            parts.append(f"{_TRAINED}{piece}{_END}")
        else:
            parts.append(f"⟦{piece}⟧")
    return "".join(parts)


def statistics(lengths: npt.NDArray[Any], trained: npt.NDArray[Any]) -> list[str]:
    """Lines of a table: smallest, mean, quantiles and largest, of tokens and trained tokens."""
    names = ("min", "mean", "50 %", "90 %", "99 %", "max")
    lines = [f"{'':10} " + " ".join(f"{name:>8}" for name in names)]
    for name, values in (("tokens", lengths), ("trained", trained)):
        quantiles = np.quantile(values, (0.5, 0.9, 0.99))
        numbers = (values.min(), values.mean(), *quantiles, values.max())
        lines.append(f"{name:10} " + " ".join(f"{number:8.0f}" for number in numbers))
    return lines


def plain_log_axis(axes: Any) -> None:
    """A logarithmic x axis with plain numbers: 100, 200, 500, 1000; not powers of ten."""
    from matplotlib import ticker

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:.0f}"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())


def histogram(
    path: str, lengths: npt.NDArray[Any], trained: npt.NDArray[Any], limit: int | None
) -> None:
    """Draw tokens and trained tokens per sample into a PNG."""
    import io

    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    top = max(2, int(lengths.max()))
    bins = np.unique(np.geomspace(max(1, int(trained.min())), top + 1, 50)).tolist()
    axes.hist(lengths, bins=bins, alpha=0.6, label="tokens of a sample")
    axes.hist(trained, bins=bins, alpha=0.6, label="of them trained")
    if limit is not None:
        axes.axvline(limit, color="black", linestyle="--", label=f"maximum {limit}")
    plain_log_axis(axes)
    axes.set_xlabel("tokens")
    axes.set_ylabel("samples")
    axes.set_title(f"{lengths.size} samples")
    axes.legend()
    sink = io.BytesIO()
    figure.savefig(sink, format="png", dpi=120, bbox_inches="tight")
    plt.close(figure)
    atomic_write(path, sink.getvalue())


def _encoded(
    job: sft_store.Job,
    encoder: Encoder,
    counts: Counter[str],
    refused: list[str],
    most: int | None,
) -> Iterator[tuple[str, str, str, Sample]]:
    """File, schema, place and the sample itself; ends with the block that reaches ``most``."""
    for source in sft_store.chat_files(job):
        noun, before = sources.NOUNS[source.form], 0
        for task in sources.tasks([source], sft_store.whole_records(), block=1 << 18):
            batch, records = sources.read_records(task, source)
            if source.form == "parquet":
                records = [without_nulls(record) for record in records]
            outcomes, noted = encoder.encode(records)
            counts.update(noted)
            refused += [f"{source.path} {noun} {before + n + 1} {why}" for n, why in batch.bad]
            for number, record, outcome in zip(batch.numbers, records, outcomes, strict=True):
                where = f"{source.path} {noun} {before + number + 1}"
                if isinstance(outcome, Refused):
                    refused.append(f"{where} {outcome}")
                elif outcome is not None:
                    yield source.path, job.options.schema or schema_of(record), where, outcome
            before += batch.items
            if most is not None and counts["samples"] >= most:
                return


def show(
    job: sft_store.Job,
    *,
    count: int = 3,
    png: str | None = None,
    coloured: bool = True,
    most: int | None = None,
    pack_length: int | None = None,
) -> int:
    """Print samples and statistics.

    Args:
        job: What to read and how; nothing is written but the PNG.
        count: Samples to print; of each file and each schema the first is printed anyway, unless
            this is 0.
        png: Where the histogram goes, or None.
        coloured: Colours, or brackets.
        most: Stop reading after so many samples, at the end of a block; None reads all.
        pack_length: Report how full packs of this length would be, or None.

    Returns:
        Records that were refused.

    Raises:
        UserError: Nothing to read, or no sample in it.
    """
    encoder = sft_store.encoder_of(job)
    engine: Any = encoder.tokenizer.reference
    decode = functools.partial(engine.tokenizer.decode, skip_special_tokens=False)
    counts: Counter[str] = Counter()
    refused: list[str] = []
    lengths: list[int] = []
    trained: list[int] = []
    seen: set[tuple[str, str]] = set()
    printed = 0
    for path, schema, where, sample in _encoded(job, encoder, counts, refused, most):
        of_this = {("file", path), ("schema", schema)}
        first = not of_this <= seen
        seen |= of_this
        if count and (printed < count or (first and printed < count + _FIRSTS)):
            printed += 1
            head = f"--- {where}: {sample.ids.size} tokens, {int(sample.mask.sum())} trained"
            print(f"{_DIM}{head}{_END}" if coloured else head)
            print(colour(sample, decode, coloured=coloured))
        lengths.append(int(sample.ids.size))
        trained.append(int(sample.mask.sum()))
    if most is not None and len(lengths) >= most:
        print(f"\nstopped after {len(lengths)} samples (--max-samples {most})")
    print()
    print("\n".join(sft_store.count_lines(counts)))
    for line in refused[:10]:
        print(f"refused    {line}", file=sys.stderr)
    if refused:
        ends = "training ends at them; --on-bad-line skip leaves them out"
        means = "left out" if job.skip_bad else ends
        print(f"refused    {len(refused)} records in all ({means})")
    if not lengths:
        raise UserError("there is no sample to train on in this data.")
    all_lengths, all_trained = np.array(lengths), np.array(trained)
    print("\n".join(statistics(all_lengths, all_trained)))
    if pack_length is not None and int(all_lengths.max()) <= pack_length:
        packs = packing.pack(all_lengths, pack_length)
        fill = all_lengths.sum() / (len(packs) * pack_length)
        print(f"packs      {len(packs)} of {pack_length} tokens, {100 * fill:.2f} % full")
    if png is not None:
        histogram(png, all_lengths, all_trained, job.options.max_length)
        print(f"histogram  {png}")
    return len(refused)


def main(argv: list[str]) -> int:
    """``megatron-patch data show`` and ``data index``: return the exit status."""
    if argv[:1] == ["index"]:
        from megatron_patch.data import index

        return index.main(argv[1:])
    parser = argparse.ArgumentParser(
        prog="megatron-patch data", description="Look at fine-tuning data.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("index", help="build the index of a run's data from the run's flags")
    shown = commands.add_parser(
        "show", help="samples with trained tokens in colour, counts, lengths", allow_abbrev=False,
        epilog="Exit status: 0; 1 where records were refused at which training would end "
        "(--on-bad-line error, the default); 2 for a mistake in the call.",
    )  # fmt: skip
    sft_store.add_flags(shown)
    shown.add_argument(
        "--samples", type=int, default=3, metavar="N",
        help="print so many, and the first of each further file and schema (default: 3; 0: none)",
    )  # fmt: skip
    shown.add_argument(
        "--max-samples", type=int, metavar="N", help="stop reading after so many (default: all)"
    )
    shown.add_argument(
        "--histogram", metavar="PNG", default="sft-lengths.png",
        help="where the histogram goes (default: sft-lengths.png in the folder where the command "
        "is called; '' draws none)",
    )  # fmt: skip
    shown.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto",
        help="auto: colours on a terminal, brackets elsewhere",
    )  # fmt: skip
    args = parser.parse_args(sft_store.dashed(argv))
    plain = args.color == "never" or "NO_COLOR" in os.environ or not sys.stdout.isatty()

    refused = 0

    def run() -> None:
        nonlocal refused
        if args.histogram and not Path(args.histogram).expanduser().absolute().parent.is_dir():
            raise UserError(f"--histogram {args.histogram}: its folder does not exist.")
        refused = show(
            sft_store.job_of(args, ""),
            count=args.samples,
            png=args.histogram or None,
            coloured=args.color == "always" or not plain,
            most=args.max_samples,
            pack_length=args.max_length,
        )

    status = text.guarded(run)
    return status or int(bool(refused) and args.on_bad_line == "error")
