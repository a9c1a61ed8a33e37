"""Fine-tuning samples on disk: token ids, loss mask and boundaries as idxmap streams.

``PREFIX_ids`` holds the ids (two or four bytes by vocabulary), ``PREFIX_mask`` one byte a token, 1
where the token is a target with loss; a sequence of either is a sample, so boundaries are recorded
lengths. ``PREFIX.json`` says what they were made of and is written last: without it there is no
data set. Workers render, tokenize and write; memory does not depend on the size of the input.

Training from JSON lines goes through the same files, kept under a name that depends on everything
that shapes them (``cached``), so both ways give the same samples.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_patch.data import idxmap, sources, template, text, tokenizers
from megatron_patch.data.chat import (
    NOTES,
    Encoder,
    Options,
    Refused,
    Sample,
    without_nulls,
)
from megatron_patch.data.sources import Reading, Source, Task
from megatron_patch.data.text import Pool, Progress, Result, Totals
from megatron_patch.data.tokenizers import TokenizerRequest
from megatron_patch.training.flags import CHAT_FLAGS, OwnFlags
from megatron_patch.util import UserError, atomic_write, human_bytes, human_count

FORMAT = "megatron_patch sft samples"
VERSION = 1
#: Smaller than for text: a task's records, texts and offsets are all in memory at once.
_BLOCK = 1 << 20


# ------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class Samples:
    """A finished set, read on demand.

    Attributes:
        prefix: Path without suffix.
        ids: Index of the token ids.
        mask: Index of the loss mask.
        meta: What ``PREFIX.json`` says.
    """

    prefix: str
    ids: idxmap.Index
    mask: idxmap.Index
    meta: Mapping[str, Any]

    def __len__(self) -> int:
        return self.ids.sequences

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each sample, int32."""
        return self.ids.lengths()

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.cumsum(self.lengths, dtype=np.int64)

    @cached_property
    def _streams(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]:
        return (
            np.memmap(self.ids.bin_path, self.ids.dtype, "r"),
            np.memmap(self.mask.bin_path, np.uint8, "r"),
        )

    def __getitem__(self, number: int) -> Sample:
        """Sample ``number``, from 0; copies, safe to keep."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        end = int(self._ends[number])
        start = end - int(self.lengths[number])
        ids, mask = self._streams
        return Sample(ids[start:end].astype(np.int32), np.array(mask[start:end]))

    def trained(self) -> npt.NDArray[np.int64]:
        """Tokens with loss of each sample, int64; reads the whole mask, a block at a time."""
        counts = np.empty(len(self), np.int64)
        mask = self._streams[1]
        starts = self._ends - self.lengths
        for at in range(0, len(self), 1 << 16):
            stop = min(at + (1 << 16), len(self))
            block = mask[int(starts[at]) : int(self._ends[stop - 1])]
            counts[at:stop] = np.add.reduceat(block, starts[at:stop] - starts[at], dtype=np.int64)
        return counts

    def __getstate__(self) -> dict[str, Any]:
        """Without the open files: a loader's process opens its own."""
        return {key: self.__dict__[key] for key in ("prefix", "ids", "mask", "meta")}


def open_samples(prefix: str | os.PathLike[str]) -> Samples:
    """Open a set by its prefix.

    Raises:
        UserError: There is none, it is unfinished, or its parts do not belong together.
    """
    path = os.fspath(prefix).removesuffix(".json")
    try:
        meta = json.loads(Path(path + ".json").read_bytes())
    except FileNotFoundError as error:
        raise UserError(
            f"{path}.json does not exist: there is no finished sample set of that name. Make it "
            "with toolkits/sft_data_preprocessing/build_idxmap_sft_dataset.py."
        ) from error
    except ValueError as error:
        raise UserError(f"{path}.json is not valid JSON: {error}.") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT or meta.get("version") != VERSION:
        raise UserError(f"{path}.json does not describe a sample set of version {VERSION}.")
    ids, mask = idxmap.read_index(path + "_ids"), idxmap.read_index(path + "_mask")
    samples = Samples(path, ids, mask, meta)
    if mask.dtype != np.uint8 or not np.array_equal(samples.lengths, mask.lengths()):
        raise UserError(
            f"{ids.idx_path} and {mask.idx_path} do not belong together; make them again."
        )
    if (
        len(samples) != meta["samples"]
        or int(samples.lengths.sum(dtype=np.int64)) != meta["tokens"]
    ):
        raise UserError(
            f"{path}.json announces {meta['samples']} samples with {meta['tokens']} tokens, "
            f"{ids.idx_path} holds {len(samples)}; make them again."
        )
    return samples


# ----------------------------------------------------------------------------------------- building


@dataclass(frozen=True)
class Job:
    """A set to make.

    Attributes:
        inputs: Files, folders, patterns.
        output: Prefix.
        request: The tokenizer.
        chat_template: File that replaces the model's template, or None.
        options: How records become samples.
        workers: Processes; None takes one per usable core.
        skip_bad: Count unusable records instead of ending the run at the first.
        overwrite: Replace an existing set.
        padded_vocab_size: Rows of the model's embedding, if larger than the vocabulary.
    """

    inputs: tuple[str, ...]
    output: str
    request: TokenizerRequest
    chat_template: str | None = None
    options: Options = field(default_factory=Options)
    workers: int | None = None
    skip_bad: bool = False
    overwrite: bool = False
    padded_vocab_size: int | None = None


def whole_records() -> Reading:
    """A reading without keys: records are taken whole."""
    return Reading(keys=())


@dataclass(frozen=True)
class RecordEncoding:
    """What workers need; see :class:`megatron_patch.data.text.TaskEncoding`.

    Attributes:
        encoder: Makes samples of records.
        files: All input files.
        targets: The file of the ids, and that of the mask.
        dtype: Type of the ids on disk.
        reading: Whole records.
    """

    encoder: Encoder
    files: tuple[Source, ...]
    targets: tuple[str, ...]
    dtype: np.dtype[Any]
    reading: Reading = field(default_factory=whole_records)

    def encode(self, task: Task) -> tuple[Result, list[memoryview]]:
        """Read, render and tokenize a task."""
        source = self.files[task.source]
        batch, records = sources.read_records(task, source)
        if source.form == "parquet":
            records = [without_nulls(record) for record in records]
        outcomes, counts = self.encoder.encode(records)
        bad = list(batch.bad)
        kept: list[Sample] = []
        for number, outcome in zip(batch.numbers, outcomes, strict=True):
            if isinstance(outcome, Refused):
                bad.append((number, str(outcome)))
            elif outcome is not None:
                kept.append(outcome)
        lengths = np.array([sample.ids.size for sample in kept], np.int32)
        ids = np.concatenate([s.ids for s in kept]) if kept else np.empty(0, np.int32)
        mask = np.concatenate([s.mask for s in kept]) if kept else np.empty(0, np.uint8)
        streams = (ids.astype(self.dtype), mask)
        ones = np.ones(len(kept), np.int32)
        return (
            Result(
                batch.items,
                batch.blank,
                sorted(bad),
                sizes=[stream.nbytes for stream in streams],
                lengths=[lengths, lengths],
                per_document=[ones, ones],
                noted=counts,
            ),
            [memoryview(s).cast("B") if s.size else memoryview(b"") for s in streams],
        )


def encoder_of(job: Job) -> Encoder:
    """The encoder that the job's tokenizer, template and options make.

    Raises:
        UserError: One of them is missing or cannot be used.
    """
    tokenizer = tokenizers.load(job.request)
    chat = template.load(tokenizer.source, override=job.chat_template)
    return Encoder(tokenizer, chat, job.options)


def chat_files(job: Job) -> list[Source]:
    """The input files.

    Raises:
        UserError: Nothing there, or text.
    """
    files, skipped = sources.expand(job.inputs)
    if skipped:
        print(
            f"left out {len(skipped)} files with an unknown suffix, for one {skipped[0]}",
            file=sys.stderr,
        )
    for source in files:
        if source.form == "txt":
            raise UserError(f"{source.path} is text; chats come as .jsonl, .json or .parquet.")
    return files


def _prepare(job: Job) -> tuple[list[Source], Encoder, dict[str, Any]]:
    """Files, encoder, and what identifies the result."""
    files, encoder = chat_files(job), encoder_of(job)
    tokenizer, chat = encoder.tokenizer, encoder.template
    identity = {
        "format": FORMAT,
        "version": VERSION,
        "template": chat.digest() if chat is not None else None,
        "tokenizer": hashlib.sha256(
            tokenizer.reference.tokenizer.to_str().encode()  # type: ignore[attr-defined]
        ).hexdigest(),
        "eod": tokenizer.eod.id if tokenizer.eod is not None else None,
        "prefix": list(tokenizer.prefix),
        "options": {**asdict(job.options), "variables": dict(job.options.variables)},
        "skip_bad": job.skip_bad,
        "padded_vocab_size": job.padded_vocab_size,
    }
    return files, encoder, identity


def build(job: Job) -> Samples:
    """Make the set; prints its course and its counts.

    Raises:
        UserError: Anything the user can mend; nothing is left behind then.
    """
    return _build(job, *_prepare(job))


def cached(job: Job, folder: str | os.PathLike[str]) -> Samples:
    """The set of ``job`` kept in ``folder``, made if it is not there (``job.output`` is not used).

    Its name depends on the files (path, size, time of change), tokenizer, template and options.

    Raises:
        UserError: As ``build``.
    """
    files, encoder, identity = _prepare(job)
    identity["files"] = [
        (os.path.realpath(source.path), source.size, os.stat(source.path).st_mtime_ns)
        for source in files
    ]
    content = json.dumps(identity, sort_keys=True, default=str)
    name = hashlib.sha256(content.encode()).hexdigest()[:24]
    prefix = os.path.join(folder, f"sft-{name}")
    if os.path.exists(prefix + ".json"):
        return open_samples(prefix)
    # Without its .json a set is unfinished: whatever else is there may be replaced.
    again = Job(**{**job.__dict__, "output": prefix, "overwrite": True})
    return _build(again, files, encoder, identity)


def _build(
    job: Job, files: Sequence[Source], encoder: Encoder, identity: Mapping[str, Any]
) -> Samples:
    began = time.monotonic()
    meta_path = Path(job.output + ".json")
    if meta_path.exists() and not job.overwrite:
        raise UserError(
            f"{meta_path} exists already. Give another --output-path, or --overwrite to replace it."
        )
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = encoder.tokenizer
    dtype = idxmap.dtype_for(
        max(tokenizer.vocab_size, job.padded_vocab_size or 0), largest_id=tokenizer.largest_id
    )
    total = sum(source.size for source in files)
    workers = job.workers or len(os.sched_getaffinity(0))
    workers = max(1, min(workers, -(-total // _BLOCK) if total else 1))
    print(f"input      {len(files)} files, {human_bytes(total)}, {workers} workers")
    print(f"tokenizer  {tokenizer.source} ({tokenizer.vocab_size} ids)")
    chat = encoder.template
    if chat is None:
        print("template   none")
    else:
        how = "marks generations" if chat.marks_generation() else "turns proven by rendering"
        print(f"template   {chat.origin} ({how}; its date is {chat.now:%Y-%m-%d})")
    sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(idxmap.Writer(job.output + suffix, kind, overwrite=job.overwrite))
            for suffix, kind in (("_ids", dtype), ("_mask", np.dtype(np.uint8)))
        ]
        encoding = RecordEncoding(
            encoder, tuple(files), tuple(writer.partial_bin for writer in writers), dtype
        )
        progress = Progress(max(1, total), writers[:1])
        pool = Pool(encoding, writers, workers=workers, skip_bad=job.skip_bad, progress=progress)
        stack.callback(pool.close)
        totals = pool.run(sources.tasks(files, encoding.reading, block=_BLOCK))
        progress.finish()
        if not writers[0].sequences:
            _print_counts(totals)
            raise UserError(
                f"no sample is left of {totals.items} records in {len(files)} files; nothing was "
                "written."
            )
        meta_path.unlink(missing_ok=True)
        for writer in writers:
            writer.commit()
    counts = totals.noted
    meta = {
        **identity,
        "dtype": dtype.name,
        "samples": counts["samples"],
        "tokens": counts["tokens"],
        "trained_tokens": counts["trained_tokens"],
        "records": totals.items,
        "blank": totals.blank,
        "bad": totals.bad,
        "counts": dict(sorted(counts.items())),
        "template_date": f"{chat.now:%Y-%m-%d}" if chat is not None else None,
    }
    atomic_write(meta_path, json.dumps(meta, indent=1, default=str) + "\n")
    _print_counts(totals)
    seconds = time.monotonic() - began
    print(f"output     {job.output}_ids, {job.output}_mask (.bin and .idx), {meta_path}")
    print(f"time       {seconds:.1f} s, {total / max(seconds, 1e-9) / 1e6:.1f} MB/s of input")
    return open_samples(job.output)


def count_lines(counts: Mapping[str, int]) -> list[str]:
    """The counts of a run in words, those that are 0 left out."""
    schemas = {k.removeprefix("schema:"): v for k, v in counts.items() if k.startswith("schema:")}
    lines = []
    if schemas:
        named = ", ".join(f"{name} ({count})" for name, count in sorted(schemas.items()))
        lines.append(f"schema     {named}")
    tokens, trained = counts.get("tokens", 0), counts.get("trained_tokens", 0)
    lines.append(
        f"samples    {counts.get('samples', 0)} with {tokens} tokens ({human_count(tokens)}), "
        f"{trained} of them trained ({100 * trained / max(1, tokens):.1f} %)"
    )
    lines += [
        f"noted      {counts[name]} {said}" for name, said in NOTES.items() if counts.get(name)
    ]
    return lines


def _print_counts(totals: Totals) -> None:
    print("\n".join(count_lines(totals.noted)))
    if totals.blank:
        print(f"noted      {totals.blank} blank lines passed over")
    text.report_losses(totals)


# ------------------------------------------------------------------------------------ command line


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that say what is read and how it becomes samples; for every tool that does so."""
    group = parser.add_argument_group("data")
    group.add_argument(
        "--input-path", "--input", "--data-path", "--data", nargs="+", default=[], metavar="X",
        dest="input_path", help="files, folders or patterns: .jsonl .json .parquet, .gz and .zst",
    )  # fmt: skip
    group.add_argument(
        "--max-length", "--seq-length", "--seq-len", type=int, metavar="N",
        help="longest sample in tokens (default: no limit)",
    )  # fmt: skip
    group.add_argument(
        "--hf-model", "--model", "--model-name-or-path", "--load", "--tokenizer-model",
        metavar="DIR", dest="hf_model", help="the model's directory, or its tokenizer.json",
    )  # fmt: skip
    defaults = OwnFlags()
    for flag in CHAT_FLAGS:
        says = f" (default: {flag.default})" if flag.default else ""
        group.add_argument(
            flag.name, *flag.aliases, dest=flag.dest, choices=flag.choices,
            metavar=None if flag.choices else flag.metavar, default=getattr(defaults, flag.dest),
            help=flag.help + says,
        )  # fmt: skip
    group.add_argument(
        "--padded-vocab-size", type=int, metavar="N",
        help="rows of the model's embedding: decides two or four bytes a token if larger",
    )  # fmt: skip
    group.add_argument("--workers", type=int, metavar="N", help="processes (default: per core)")


def job_of(args: argparse.Namespace, output: str, *, overwrite: bool = False) -> Job:
    """The job that the flags of ``add_flags`` describe.

    Raises:
        UserError: A flag is missing or holds something else than it should.
    """
    if not args.input_path:
        raise UserError("--input-path is needed: files, folders or glob patterns.")
    if not args.hf_model:
        raise UserError("--hf-model is needed: the directory with the model's tokenizer.")
    for name in ("max_length", "workers"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: it must be 1 or more.")
    return chat_job(
        args,
        args.input_path,
        args.hf_model,
        output,
        max_length=args.max_length,
        workers=args.workers,
        overwrite=overwrite,
        padded_vocab_size=args.padded_vocab_size,
    )


def chat_job(
    chat: Any,
    inputs: Sequence[str],
    hf_model: str,
    output: str,
    *,
    max_length: int | None,
    **more: Any,
) -> Job:
    """The job that the values of ``training.flags.CHAT_FLAGS`` describe.

    Args:
        chat: Holds these values by their dest.
        inputs: Files, folders or patterns.
        hf_model: Directory of the tokenizer.
        output: Prefix of the result.
        max_length: Longest sample in tokens, or None.
        **more: Further fields of the job.

    Raises:
        UserError: A value cannot be read.
    """
    try:
        variables = json.loads(chat.chat_template_kwargs)
    except ValueError as error:
        raise UserError(f"--chat-template-kwargs is no JSON: {error}.") from error
    if not isinstance(variables, dict):
        raise UserError("--chat-template-kwargs must be a JSON object.")
    return Job(
        inputs=tuple(inputs),
        output=output,
        request=TokenizerRequest(
            type="HuggingFaceTokenizer", model=hf_model, eod_token=chat.eod_token
        ),
        chat_template=chat.chat_template,
        options=Options(
            max_length=max_length,
            on_overlong=chat.on_overlong,
            schema=chat.schema,
            plain_as=chat.prompt_completion_as,
            variables=variables,
        ),
        skip_bad=chat.on_bad_line == "skip",
        **more,
    )


def dashed(argv: Sequence[str]) -> list[str]:
    """``_`` as ``-`` in the names of flags."""
    parts = [(arg, *arg.partition("=")) for arg in argv]
    return [
        name.replace("_", "-") + sep + value if arg.startswith("--") else arg
        for arg, name, sep, value in parts
    ]


#: Flags of the older tool that change nothing here, and why.
_WITHOUT_EFFECT = {
    **{n: text.WITHOUT_EFFECT[n] for n in ("partitions", "dataset_impl")},
    "keep_sequential_samples": "samples always keep their order",
    "patch_tokenizer_type": "the tokenizer is the one in --hf-model",
    "extra_vocab_size": "ids are the tokenizer's; --padded-vocab-size N counts more",
}


def main(argv: list[str]) -> int:
    """Entry point of the offline tool; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="build_idxmap_sft_dataset.py",
        description="Turn chats into token ids, loss mask and boundaries for fine-tuning.",
        allow_abbrev=False,
    )
    add_flags(parser)
    parser.add_argument(
        "--output-path", "--output-prefix", "--output", dest="output_path", metavar="P",
        help="prefix: writes P_ids.bin/.idx, P_mask.bin/.idx and P.json",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace an existing set")
    for name in _WITHOUT_EFFECT:
        switch = {"action": "store_true"} if name == "keep_sequential_samples" else {}
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, help=argparse.SUPPRESS, **switch)  # type: ignore[arg-type]
    args = parser.parse_args(dashed(argv))
    for name, why in _WITHOUT_EFFECT.items():
        if getattr(args, name):
            print(f"note: --{name.replace('_', '-')} has no effect: {why}", file=sys.stderr)

    def run() -> None:
        if not args.output_path:
            raise UserError("--output-path is needed: the prefix of the result.")
        samples = build(job_of(args, args.output_path, overwrite=args.overwrite))
        print(f"\npaste into the training command:\n  --data-path {samples.prefix}")

    return text.guarded(run)
