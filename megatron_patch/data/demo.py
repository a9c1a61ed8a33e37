"""The embedded demo: real text found on any machine, a tokenizer, a tiny Qwen3, an idxmap.

``prepare`` fills a directory with everything that a training run needs and nothing that has to be
downloaded::

    DIR/model/                        config.json, tokenizer.json, tokenizer_config.json, ...
    DIR/corpus.jsonl                  one document a line, {"text": ..., "source": ...}
    DIR/demo_text_document.{bin,idx}  the same documents as token ids
    DIR/demo.json                     what was made, from what; written last

The text is the Python standard library's own source, so the same interpreter gives the same bytes.
Documents come in an order drawn from a digest of their path: the held-out part at the end of the
file (see ``SPLIT``) is then a fair sample, not the last letters of the alphabet.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_patch import _compat
from megatron_patch.util import UserError, after_closed_pipe, column

#: Raise when the content of a prepared directory changes: older ones are then made anew.
FORMAT = 3
VOCAB_SIZE = 1024
SEQ_LENGTH = 256
GLOBAL_BATCH_SIZE = 8
#: Optimizer steps of one call, about two minutes on two cores.
STEPS = 320
#: Train, validation and test share of the documents.
SPLIT = "95,5,0"
#: Bytes of text taken at most and needed at least.
MAX_BYTES = 8_000_000
MIN_BYTES = 500_000
END_OF_TEXT = "<|endoftext|>"
#: Run directory of a call without flags.
DEFAULT_OUTPUT = Path("runs/demo-qwen3")

# Table-like sources teach a model little; test trees are often stripped by distributors, so that
# the corpus would differ between machines with the same Python.
_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idle_test",
        "lib2to3",
        "site-packages",
        "test",
        "tests",
    }
)


@dataclass(frozen=True)
class Corpus:
    """What was read: documents in training order, and counts of what was left out."""

    documents: tuple[tuple[str, str], ...]  # (source, text)
    bytes: int
    unreadable: int
    over_the_cap: int


@dataclass(frozen=True)
class Prepared:
    """A filled demo directory, as recorded in its ``demo.json``."""

    format: int
    python: str
    documents: int
    bytes: int
    vocab_size: int
    corpus_sha256: str


def text_folders() -> tuple[Path, ...]:
    """Folders to take text from, best first: the standard library, then installed packages."""
    paths = sysconfig.get_paths()
    seen = dict.fromkeys(
        Path(paths[k]) for k in ("stdlib", "platstdlib", "purelib", "platlib") if k in paths
    )
    return tuple(seen)


def _files(folder: Path, skipped: frozenset[str]) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in skipped)
        for name in sorted(names):
            if name.endswith((".py", ".rst", ".md")):
                yield Path(root, name)


def collect(
    folders: Sequence[Path] | None = None, *, max_bytes: int = MAX_BYTES, min_bytes: int = MIN_BYTES
) -> Corpus:
    """Read documents from ``folders`` in a reproducible order, up to ``max_bytes``.

    A later folder is only read while the earlier ones gave less than ``min_bytes``.

    Raises:
        UserError: if all of them together hold less than ``min_bytes`` of text.
    """
    documents: list[tuple[str, str]] = []
    total = unreadable = over = 0
    tried = tuple(folders) if folders is not None else text_folders()
    for folder in tried:
        if total >= min_bytes:
            break
        named = sorted(
            (hashlib.sha256(p.relative_to(folder).as_posix().encode()).digest(), p)
            for p in _files(folder, _SKIPPED_FOLDERS)
        )
        for _, path in named:
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                unreadable += 1
                continue
            size = len(text.encode())
            if not text.strip():
                continue
            if over or total + size > max_bytes:  # no search for smaller ones: a fair sample
                over += 1
                continue
            documents.append((path.relative_to(folder).as_posix(), text))
            total += size
    if total < min_bytes:
        places = ", ".join(str(f) for f in tried)
        raise UserError(
            f"found only {total} bytes of text in {places}; the demo needs {min_bytes}. "
            "Use a Python whose standard library is installed as .py files, or train on your own "
            "text with --hf-model and --data-path."
        )
    return Corpus(tuple(documents), total, unreadable, over)


def model_config() -> dict[str, object]:
    """``config.json`` of the demo's Qwen3, the one place where its sizes stand."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


def write_model(folder: Path, texts: Sequence[str] | None) -> None:
    """Write a Hugging Face directory: the config, and a tokenizer when there are texts to learn.

    The tokenizer is a byte-level BPE of ``VOCAB_SIZE`` tokens; id 0 ends a document.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def put(name: str, value: object) -> None:
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

    put("config.json", model_config())
    put(
        "generation_config.json",
        {"eos_token_id": 0, "pad_token_id": 0, "do_sample": True, "temperature": 0.8},
    )
    if texts is None:
        return
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer, length=len(texts))
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise UserError(
            f"the text gave a vocabulary of {tokenizer.get_vocab_size()} tokens, "
            f"the model has {VOCAB_SIZE}: there is too little text"
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    put(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "model_max_length": model_config()["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    )


def read_prepared(folder: Path) -> Prepared | None:
    """The record of a complete directory of this format, else None."""
    try:
        data = json.loads((folder / "demo.json").read_text(encoding="utf-8"))
        prepared = Prepared(**data)
    except (OSError, ValueError, TypeError):
        return None
    needed = ("model/tokenizer.json", "demo_text_document.bin", "demo_text_document.idx")
    complete = all((folder / name).is_file() for name in needed)
    return prepared if complete and prepared.format == FORMAT else None


def prepare(folder: Path, *, folders: Sequence[Path] | None = None) -> Prepared:
    """Fill ``folder``, or return at once when it is complete already.

    The work is done beside it and moved into place by one rename, so a killed call leaves nothing
    half-made under the final name.
    """
    ready = read_prepared(folder)
    if ready is not None:
        return ready
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        prepared = _fill(work, folders)
        work.chmod(0o755)  # mkdtemp makes it private
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        # Two calls at once: whoever came second finds the first one's result.
        ready = read_prepared(folder)
        if ready is not None:
            return ready
        raise
    return prepared


def _fill(work: Path, folders: Sequence[Path] | None) -> Prepared:
    from megatron_patch.data import idxmap

    start = time.monotonic()
    corpus = collect(folders)
    print(
        f"demo: {len(corpus.documents)} documents, {corpus.bytes / 1e6:.1f} MB of text "
        f"(left out: {corpus.over_the_cap} over the {MAX_BYTES / 1e6:.0f} MB cap, "
        f"{corpus.unreadable} not readable as UTF-8)",
        flush=True,
    )
    digest = hashlib.sha256()
    with (work / "corpus.jsonl").open("w", encoding="utf-8") as out:
        for source, text in corpus.documents:
            line = json.dumps({"text": text, "source": source}) + "\n"
            digest.update(line.encode())
            out.write(line)
    write_model(work / "model", [text for _, text in corpus.documents])
    print(
        f"demo: tokenizer with {VOCAB_SIZE} tokens ({time.monotonic() - start:.1f} s)", flush=True
    )
    # A process of its own: it forks workers, which this one's tokenizer threads would not survive.
    # Its output names the place that is about to be renamed, so it is shown only where it failed.
    done = subprocess.run(
        [
            *(sys.executable, "-m", "megatron_patch.data.text"),
            *("--input", str(work / "corpus.jsonl")),
            *("--hf-model", str(work / "model")),
            *("--output-prefix", str(work / "demo")),
            "--append-eod",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise UserError(
            f"tokenizing the demo's text failed with status {done.returncode}:\n"
            f"{done.stdout}{done.stderr}"
        )
    tokens = idxmap.token_count(str(work / "demo_text_document"))
    print(f"demo: {tokens:,} tokens, {SPLIT} % of the documents for training, validation, test")
    prepared = Prepared(
        format=FORMAT,
        python=sys.version.split()[0],
        documents=len(corpus.documents),
        bytes=corpus.bytes,
        vocab_size=VOCAB_SIZE,
        corpus_sha256=digest.hexdigest(),
    )
    (work / "demo.json").write_text(json.dumps(asdict(prepared), indent=2) + "\n", encoding="utf-8")
    print(f"demo: prepared in {time.monotonic() - start:.1f} s", flush=True)
    return prepared


def train_flags(folder: Path, ranks: int = 1, steps: int = STEPS) -> list[str]:
    """Training flags for a prepared ``folder``, so many ranks, and calls of so many steps."""
    micro_batch_size = -(-GLOBAL_BATCH_SIZE // ranks)
    return [
        *("--hf-model", str(folder / "model")),
        *("--data-path", str(folder / "demo_text_document")),
        *("--split", SPLIT),
        *("--seq-length", str(SEQ_LENGTH)),
        *("--micro-batch-size", str(micro_batch_size)),
        *("--global-batch-size", str(micro_batch_size * ranks)),
        *("--lr", "2e-3"),
        *("--min-lr", "2e-4"),
        *("--adam-beta2", "0.95"),  # 0.999 looks back over more steps than there are
        *("--lr-decay-style", "cosine"),
        *("--warmup-steps", str(min(20, steps // 4))),
        *("--save-interval", "60"),
        *("--eval-interval", "120"),
        *("--eval-iters", "4"),
        *("--log-interval", "1"),
    ]


@dataclass(frozen=True)
class Schedule:
    """Where a call of the demo starts and ends, in optimizer steps."""

    start: int
    end: int
    #: End of the call after this one.
    then: int
    says: str


def schedule(done: int, steps: int = STEPS) -> Schedule:
    """The next call's schedule, given the last saved step and the length of one call.

    A call ends at a multiple of ``steps``. Being there means that the run had finished, so it is
    extended by as many; anywhere else it was stopped and goes on to where it was heading.
    """
    end = (done // steps + 1) * steps
    if done == 0:
        return Schedule(done, end, end + steps, f"demo: {end} steps from scratch")
    if done % steps == 0:
        return Schedule(
            done,
            end,
            end + steps,
            f"demo: the run had finished at step {done}; its schedule is extended by {steps} "
            f"steps, to {end}",
        )
    says = f"demo: the run stopped at step {done}; it goes on to step {end}"
    return Schedule(done, end, end + steps, says)


def saved_step(output_dir: Path) -> int:
    """Last step that ``output_dir`` holds a checkpoint of, 0 when there is none."""
    tracker = output_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    try:
        return int(tracker.read_text(encoding="utf-8").strip())
    except (OSError, ValueError):
        return 0


def report(output_dir: Path, plan: Schedule, script: str) -> str:
    """What a finished call says: the loss of the run and of this call, files, next steps."""
    from megatron_patch.training import metrics

    records = metrics.read(output_dir)
    lines = ["", f"demo: {metrics.summary(records)}"]
    recent = [r for r in records if r["iteration"] > plan.start]
    if plan.start and recent:
        lines.append(f"demo: this call: {metrics.summary(recent)}")
    produced = (
        ("checkpoint", "checkpoints"),
        ("loss curve", "loss.png"),
        ("every step's numbers", "metrics.jsonl"),
        ("TensorBoard", "tensorboard"),
        ("text log", "logs/node0.log"),
    )
    for what, name in produced:
        path = output_dir / name
        lines.append(
            f"  {column(what + ':', 22)}{path}" + ("" if path.exists() else "  (not written)")
        )
    python = [sys.executable]
    if _compat.installed_version("megatron-patch") is None:
        root = Path(__file__).resolve().parents[2]
        python = ["env", f"PYTHONPATH={root}", sys.executable]
    lines += [
        "",
        "Next:",
        f"  the same call again extends this run, to step {plan.then}",
        '  your own text (lines of {"text": ...}), tokenized for your model:',
        f"    {shlex.join([*python, '-m', 'megatron_patch.cli', 'preprocess'])} --input TEXT.jsonl "
        "--hf-model MODEL --output-prefix DATA --append-eod",
        "  your own model, checked before it starts; without --dry-run it trains:",
        f"    bash {shlex.quote(script)} --hf-model MODEL --data-path DATA_text_document "
        "--output-dir runs/mine --train-tokens 100M --dry-run",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """``demo prepare DIR`` fills a directory, ``demo flags DIR`` prints its training flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-patch demo",
        description="Text, tokenizer and tiny model for the embedded demo.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (
        ("prepare", "fill DIR; at once when it is complete already"),
        ("flags", "print the training flags for DIR, one a line"),
    ):
        commands.add_parser(name, help=what).add_argument("dir", type=Path)
    arguments = parser.parse_args(argv)
    folder = arguments.dir.absolute()
    if arguments.command == "flags":
        print("\n".join(train_flags(folder)))
        return 0
    try:
        prepared = prepare(folder)
    except BrokenPipeError:
        return after_closed_pipe()
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"error: {error}; examples/_setup.sh installs what is missing", file=sys.stderr)
        return 2
    print(
        f"demo: {prepared.documents} documents, {prepared.bytes / 1e6:.1f} MB, "
        f"{prepared.vocab_size} tokens in the vocabulary: {folder}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
