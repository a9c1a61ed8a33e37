"""Offline tokenizers for preprocessing: text in, the token ids that Megatron-LM's tool writes out.

Each tokenizer has a *reference* engine, the library that defines its ids (``tokenizers`` for a
``tokenizer.json``, ``sentencepiece`` for a ``.model``, ``tiktoken`` for a rank file), and may have
``gigatoken`` as a faster engine where ``accelerate`` finds its ids equal on a sample of the corpus
at hand and on the strings of ``adversarial``. Neither transformers nor torch is imported.

What counts as "the ids of Megatron-LM's tool" (``megatron/core/tokenizers/text/libraries``):

* HuggingFace: ``tokenizer(text).input_ids``, so whatever the post-processor puts before and after
  the text (Llama 3's BOS, say) is part of the document. ``tokenizer_config.json`` is read as
  transformers reads it, for added tokens and named special tokens.
* SentencePiece: ``encode_as_ids(text)``, no BOS; control symbols written in the text are text.
* tiktoken: ``encode(text, allowed_special="all")``.
"""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_patch.util import UserError

Ids = npt.NDArray[Any]


class Engine(Protocol):
    """Turns texts into ids, without what the tokenizer adds before and after a document."""

    name: str

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        """One integer array of ids per text; an empty text gives an empty array."""
        ...


@dataclass(frozen=True)
class Token:
    """A named token: its id and its text."""

    id: int
    text: str


@dataclass(frozen=True)
class TextTokenizer:
    """A loaded tokenizer.

    Attributes:
        kind: ``huggingface``, ``sentencepiece`` or ``tiktoken``.
        source: File it was read from.
        vocab_size: What upstream's tool takes as cardinality when it chooses the dtype.
        largest_id: Largest id that can come out.
        eod: Token that ends a document, or None: the tokenizer has none.
        bos: Token that begins a sequence, or None. Whether documents get it is ``prefix``'s matter.
        prefix: Ids put before every document by the tokenizer itself.
        suffix: Ids put after every document by the tokenizer itself.
        reference: The engine that defines the ids.
        engine: The engine that is used.
        special_texts: Texts of the added and special tokens.
        fast: Builds the gigatoken engine, or None: it has no counterpart for this tokenizer.
        remember: Builds the engine that remembers pieces, or None: its text may not be cut.
    """

    kind: str
    source: str
    vocab_size: int
    largest_id: int
    eod: Token | None
    bos: Token | None
    reference: Engine
    engine: Engine
    special_texts: tuple[str, ...] = ()
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    fast: Callable[[], Engine] | None = None
    remember: Callable[[Engine, Sequence[str]], Engine] | None = None


@dataclass(frozen=True)
class TokenizerRequest:
    """What the command line says about the tokenizer.

    Attributes:
        type: Megatron-LM's or Pai-Megatron-Patch's name of the type, see ``TYPES``.
        model: Directory or file (``--tokenizer-model``).
        vocab_file: ``--vocab-file``: GPT-2's ``vocab.json``; elsewhere another name for ``model``.
        merge_file: ``--merge-file``: GPT-2's ``merges.txt``.
        add_special_tokens: Override whether the tokenizer's own BOS/EOS go around each document;
            None takes what the type means.
        eod_token: Text of the token to end documents with, instead of the tokenizer's EOS.
        tiktoken_pattern: A name in ``PATTERNS``, or a regular expression.
        tiktoken_num_special_tokens: Special ids before the ranks in upstream's JSON vocabularies.
        tiktoken_special_tokens: Their leading names, upstream's default if empty.
        vocab_size: Size of upstream's JSON vocabularies, specials included.
    """

    type: str
    model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    add_special_tokens: bool | None = None
    eod_token: str | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = 1000
    tiktoken_special_tokens: tuple[str, ...] = ()
    vocab_size: int | None = None


_UPSTREAM_HF = ("HuggingFaceTokenizer",)
_UPSTREAM_SP = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "LlamaTokenizer",
)
# Pai-Megatron-Patch encodes with add_special_tokens=False and appends the EOS itself.
_PAI_HF = (
    "Qwen2Tokenizer",
    "Qwen3Tokenizer",
    "Qwen2VLTokenizer",
    "QwenTokenizer",
    "QwenVLTokenizer",
    "DeepSeekV2Tokenizer",
    "LLamaTokenizer",
    "LLama2Tokenizer",
    "LLama3Tokenizer",
    "MistralTokenizer",
    "MixtralTokenizer",
    "FalconTokenizer",
    "OPTTokenizer",
    "YiTokenizer",
    "BaichuanTokenizer",
    "StarcoderTokenizerFromHF",
    "BloomTokenizerFromHF",
    "BloomTokenizerFromCustom",
    "VicunaTokenizerFromHF",
)

#: Type name -> (kind, does the tokenizer's own BOS/EOS go around each document).
TYPES: dict[str, tuple[str, bool]] = {
    **{name: ("huggingface", True) for name in _UPSTREAM_HF},
    **{name: ("sentencepiece", False) for name in _UPSTREAM_SP},
    "TikTokenizer": ("tiktoken", False),
    "GPT2BPETokenizer": ("gpt2", True),
    **{name: ("huggingface", False) for name in _PAI_HF},
}


def load(request: TokenizerRequest) -> TextTokenizer:
    """Load the tokenizer with its reference engine.

    Raises:
        UserError: Unknown type, a file is missing or of another kind, a vocabulary whose split
            pattern is not known, or an ``--eod-token`` that the vocabulary does not hold.
    """
    if request.type not in TYPES:
        lower = {name.lower(): name for name in TYPES}
        hint = lower.get(request.type.lower())
        raise UserError(
            f"--tokenizer-type {request.type} is not known"
            + (f"; did you mean {hint}?" if hint else ".")
            + f" Known: {', '.join(TYPES)}."
        )
    kind, special = TYPES[request.type]
    if request.add_special_tokens is not None:
        special = request.add_special_tokens
    if kind == "gpt2":
        tokenizer = _load_gpt2(request)
    else:
        path = _model_path(request)
        tiktoken_dir = path.is_dir() and _rank_file(path) is not None
        if kind == "tiktoken" or (tiktoken_dir and not (path / "tokenizer.json").exists()):
            tokenizer = _load_tiktoken(path, request)
        elif kind == "sentencepiece":
            tokenizer = _load_llama(path, special)
        else:
            tokenizer = _load_huggingface(path, special)
    if request.eod_token is not None:
        tokenizer = replace(tokenizer, eod=_find_token(tokenizer, request.eod_token))
    return tokenizer


def _model_path(request: TokenizerRequest) -> Path:
    if request.model and request.vocab_file and request.model != request.vocab_file:
        raise UserError(
            f"--tokenizer-model {request.model} and --vocab-file {request.vocab_file} are both "
            f"given; {request.type} reads one of them. Leave --vocab-file out."
        )
    if request.merge_file:
        raise UserError(
            f"--merge-file has no effect with --tokenizer-type {request.type}: its merges are in "
            "the tokenizer's own file. Leave it out."
        )
    text = request.model or request.vocab_file
    if not text:
        raise UserError(
            f"--tokenizer-type {request.type} needs --tokenizer-model: the model's directory, or "
            "its tokenizer.json, tokenizer.model or tiktoken file."
        )
    path = Path(text).expanduser()
    if not path.exists():
        raise UserError(
            f"--tokenizer-model {path} does not exist. Nothing is downloaded here: give a local "
            "directory or file."
        )
    return path


def _find_token(tokenizer: TextTokenizer, text: str) -> Token:
    ids = tokenizer.reference.encode_many([text])[0]
    if ids.size != 1:
        raise UserError(
            f"--eod-token {text!r} is {ids.size} tokens in {tokenizer.source}, not one; name one "
            f"of its special tokens: {', '.join(tokenizer.special_texts[:12]) or 'it has none'}."
        )
    return Token(int(ids[0]), text)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no file; UserError where it is none."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds a {type(data).__name__}, not an object.")
    return data


# ------------------------------------------------------------------------------------- HuggingFace

#: Special tokens that ``tokenizer_config.json`` names.
NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TokenizersEngine:
    """The ``tokenizers`` library."""

    name = "tokenizers"

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text; parallel over threads unless ``TOKENIZERS_PARALLELISM`` is false."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def _load_huggingface(path: Path, special: bool) -> TextTokenizer:
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file() and (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        config = read_json(path / "tokenizer_config.json")
        name = str(config.get("tokenizer_class", "")).removesuffix("Fast")
        if name in ("GPT2Tokenizer", "Qwen2Tokenizer"):
            built = _byte_level(
                path / "vocab.json", path / "merges.txt", qwen2=name == "Qwen2Tokenizer"
            )
            return _finish_huggingface(built, str(path / "vocab.json"), config, special)
    if not file.is_file() and (path / "tokenizer.model").is_file():
        return _load_llama(path, special)
    if not file.is_file():
        raise UserError(
            f"{path} holds no tokenizer.json (nor a tokenizer.model, a tiktoken file, or "
            "vocab.json with merges.txt of a known class). Copy the tokenizer's files there, or "
            "save it once with transformers' save_pretrained."
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise UserError(f"{file} cannot be read by tokenizers: {error}.") from error
    config = read_json(file.parent / "tokenizer_config.json")
    for key, value in read_json(file.parent / "special_tokens_map.json").items():
        if key in NAMED_TOKENS:
            config.setdefault(key, value)
    return _finish_huggingface(tokenizer, str(file), config, special)


def _finish_huggingface(
    tokenizer: Any, source: str, config: dict[str, Any], special: bool
) -> TextTokenizer:
    """Apply ``tokenizer_config.json`` the way transformers' TokenizersBackend does."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_tokens(tokenizer, config)
    names = {name: content_of(config.get(name)) for name in NAMED_TOKENS}

    def token(name: str) -> Token | None:
        text = names[name]
        found = tokenizer.token_to_id(text) if text else None
        return None if text is None or found is None else Token(found, text)

    # Upstream lets SEP stand in for a missing EOS, and CLS for a missing BOS.
    eod = token("eos_token") or token("sep_token")
    bos = token("bos_token") or token("cls_token")
    # The flags add_bos_token and add_eos_token do not count where there is a tokenizer.json: its
    # post-processor does.
    prefix, suffix = _added_around(tokenizer, source)
    reference = TokenizersEngine(tokenizer)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    return TextTokenizer(
        kind="huggingface",
        source=source,
        vocab_size=len(vocab),
        largest_id=max(vocab.values()),
        eod=eod,
        bos=bos,
        reference=reference,
        engine=reference,
        special_texts=tuple(
            token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items())
        ),
        prefix=prefix if special else (),
        suffix=suffix if special else (),
        fast=lambda: _gigatoken_from_json(tokenizer.to_str()),
        remember=_remember(tokenizer),
    )


def content_of(value: object) -> str | None:
    """Text of a token as ``tokenizer_config.json`` gives it: a string, or an object with it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _added_token(value: str | dict[str, Any], *, special: bool | None = None) -> Any:
    from tokenizers import AddedToken

    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    chosen = {flag: bool(value[flag]) for flag in flags if flag in value}
    is_special = bool(value.get("special", False)) if special is None else special
    return AddedToken(value["content"], special=is_special, **chosen)


def _add_tokens(tokenizer: Any, config: dict[str, Any]) -> None:
    """Register what ``tokenizer_config.json`` knows and ``tokenizer.json`` does not."""
    known = {str(t.content): t for t in tokenizer.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder") or {}
    for _, value in sorted(declared.items(), key=lambda item: int(item[0])):
        token = _added_token(value)
        if repr(known.get(token.content)) != repr(token):
            tokenizer.add_tokens([token])
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    if isinstance(extra, dict):
        extra = list(extra.values())
    known = {str(t.content): t for t in tokenizer.get_added_tokens_decoder().values()}
    for value in [config.get(name) for name in NAMED_TOKENS] + list(extra):
        text = content_of(value)
        if not text:
            continue
        # A bare string says nothing about flags: an added token of that text keeps its own.
        if text not in known or isinstance(value, dict):
            tokenizer.add_special_tokens([_added_token(value, special=True)])  # type: ignore[arg-type]


def _added_around(tokenizer: Any, source: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a text."""
    around = tokenizer.encode("").ids
    for probe in ("a", "a b\n", "1"):
        inside = tokenizer.encode(probe, add_special_tokens=False).ids
        whole = tokenizer.encode(probe).ids
        extra = len(whole) - len(inside)
        cuts = [n for n in range(extra + 1) if whole[n : n + len(inside)] == inside]
        if extra != len(around) or not any(
            whole[:n] + whole[n + len(inside) :] == around for n in cuts
        ):
            raise UserError(
                f"the post-processor of {source} does more than put tokens before and after a text "
                f"({probe!r} becomes {whole}, without it {inside}). Pass --no-special-tokens."
            )
        before = cuts[0]
    return tuple(around[:before]), tuple(around[before:])


_GPT2_EOD = "<|endoftext|>"


def _byte_level(vocab: Path, merges: Path, *, qwen2: bool = False) -> Any:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    try:
        model = models.BPE.from_file(str(vocab), str(merges))
    except Exception as error:
        raise UserError(f"{vocab} and {merges} cannot be read as a BPE: {error}.") from error
    tokenizer = Tokenizer(model)
    if qwen2:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PATTERNS["qwen"].regex), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def _load_gpt2(request: TokenizerRequest) -> TextTokenizer:
    if request.model and not request.vocab_file:
        folder = Path(request.model).expanduser()
        vocab, merges = folder / "vocab.json", folder / "merges.txt"
        if not vocab.is_file() and folder.exists():
            return _load_huggingface(folder, True)
    else:
        vocab, merges = Path(request.vocab_file or ""), Path(request.merge_file or "")
    for flag, path in (("--vocab-file", vocab), ("--merge-file", merges)):
        if not path.is_file():
            raise UserError(
                f"GPT2BPETokenizer needs {flag} (a vocab.json and a merges.txt), or "
                f"--tokenizer-model DIR with both; {path} is no file."
            )
    return _finish_huggingface(
        _byte_level(vocab, merges),
        str(vocab),
        {"bos_token": _GPT2_EOD, "eos_token": _GPT2_EOD, "unk_token": _GPT2_EOD},
        True,
    )


# ----------------------------------------------------------------------------------- SentencePiece


class SentencePieceEngine:
    """The ``sentencepiece`` library."""

    name = "sentencepiece"

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text."""
        lists = self.processor.encode(list(texts), out_type=int, num_threads=1)
        return [np.array(ids, dtype=np.uint32) for ids in lists]


def _load_llama(path: Path, special: bool) -> TextTokenizer:
    import sentencepiece

    file = path / "tokenizer.model" if path.is_dir() else path
    if not file.is_file() and (path / "tokenizer.json").is_file():
        return _load_huggingface(path, special)
    if not file.is_file():
        raise UserError(f"{path} holds neither a tokenizer.model nor a tokenizer.json.")
    if file.suffix == ".json":
        return _load_huggingface(file, special)
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    except Exception as error:
        if _looks_like_ranks(file):
            raise UserError(
                f"{file} is a tiktoken rank file, not a SentencePiece model: use "
                "--tokenizer-type TikTokenizer, or HuggingFaceTokenizer with its directory."
            ) from error
        raise UserError(f"{file} is no SentencePiece model: {error}.") from error

    def token(number: int) -> Token | None:
        return None if number < 0 else Token(number, processor.id_to_piece(number))

    size = processor.get_piece_size()
    reference = SentencePieceEngine(processor)
    bos = token(processor.bos_id())
    return TextTokenizer(
        kind="sentencepiece",
        source=str(file),
        vocab_size=size,
        largest_id=size - 1,
        eod=token(processor.eos_id()),
        bos=bos,
        reference=reference,
        engine=reference,
        special_texts=tuple(
            processor.id_to_piece(i)
            for i in range(size)
            if processor.is_control(i) or processor.is_unknown(i)
        ),
        prefix=(bos.id,) if special and bos else (),
        fast=lambda: _gigatoken_from_sentencepiece(file),
    )


# ---------------------------------------------------------------------------------------- tiktoken


@dataclass(frozen=True)
class Pattern:
    """How a rank file's text is split, which the file itself does not say.

    Attributes:
        regex: Split pattern.
        scheme: Its name in gigatoken, or None.
        source: Where the pattern is published.
        nfc: The text is brought into Unicode NFC first.
    """

    regex: str
    scheme: str | None
    source: str
    nfc: bool = False


_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(upper: str, lower: str, contraction: str, slash: str) -> str:
    """Words that break where lower case turns into upper case, numbers, punctuation."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}[{upper}]*[{lower}]+{contraction}|{lead}[{upper}]+[{lower}]*{contraction}"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{slash}]*|"
    )


_NO_HAN = r"&&[^\p{Han}]"

PATTERNS: dict[str, Pattern] = {
    "gpt2": Pattern(
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        "gpt2",
        "tiktoken_ext/openai_public.py, r50k_base",
    ),
    "cl100k": Pattern(
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}{{1,3}}"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
        "gpt4",
        "tiktoken_ext/openai_public.py, cl100k_base",
    ),
    "o200k": Pattern(
        _cased(_UPPER, _LOWER, f"{_CONTRACTION}?", "/") + _SPACES,
        "o200k",
        "tiktoken_ext/openai_public.py, o200k_base",
    ),
    "llama3": Pattern(
        rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
        None,
        "meta-llama/llama-models, models/llama3/tokenizer.py",
    ),
    "qwen": Pattern(
        rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
        "qwen2",
        "Qwen/Qwen-7B, tokenization_qwen.py",
        nfc=True,
    ),
    "kimi": Pattern(
        r"[\p{Han}]+|"
        + _cased(_UPPER + _NO_HAN, _LOWER + _NO_HAN, f"{_CONTRACTION}?", "")
        + _SPACES,
        "kimi",
        "moonshotai/Kimi-K2-Instruct, tokenization_kimi.py",
    ),
    "v1": Pattern(
        r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        None,
        "Megatron-Core, tiktoken_tokenizer.py, v1",
    ),
    "v2": Pattern(
        _cased(_UPPER, _LOWER, "", "/").replace(r"\p{N}{1,3}", r"\p{N}") + _SPACES,
        None,
        "Megatron-Core, tiktoken_tokenizer.py, v2",
    ),
}

_RANK_FILES = ("tiktoken.model", "qwen.tiktoken")
_KIMI_MODULES = ("tokenization_kimi", "tokenization_moonshot")
_KIMI_RESERVED = 256
# Kimi's own code never hands tiktoken more than these at once, so a document longer than that is
# cut there; the ids around such a cut differ from those of the uncut text.
_KIMI_PIECE = 400_000
_KIMI_RUN = 25_000
_UPSTREAM_SPECIALS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_UPSTREAM_VOCAB = 2**17


class TiktokenEngine:
    """The ``tiktoken`` library."""

    name = "tiktoken"

    def __init__(self, encoding: Any, prepare: Callable[[str], Sequence[str]]) -> None:
        self.encoding = encoding
        self.prepare = prepare

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text."""
        # encode() falls back on a lossy round trip for lone surrogates; here they are an error.
        for text in texts:
            text.encode()
        return [_joined(self._encode, self.prepare(text)) for text in texts]

    def _encode(self, text: str) -> Ids:
        ids: Ids = self.encoding.encode_to_numpy(text, allowed_special="all")
        return ids


def _joined(encode: Callable[[str], Ids], parts: Sequence[str]) -> Ids:
    if len(parts) == 1:
        return encode(parts[0])
    if not parts:
        return np.empty(0, np.uint32)
    return np.concatenate([encode(part) for part in parts])


def _nfc(text: str) -> Sequence[str]:
    import unicodedata

    return (unicodedata.normalize("NFC", text),)


def _whole(text: str) -> Sequence[str]:
    return (text,)


class KimiPieces:
    """Cuts a long text where Kimi's own tokenizer code cuts it.

    Args:
        special_texts: Special tokens; the code encodes the text between them piece by piece.
    """

    def __init__(self, special_texts: Sequence[str]) -> None:
        ordered = sorted(special_texts, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, ordered)) + ")")
        self._run = re.compile(rf"\s{{{_KIMI_RUN + 1},}}|\S{{{_KIMI_RUN + 1},}}")

    def __call__(self, text: str) -> Sequence[str]:
        """The pieces, in order; together they are the text."""
        if len(text) <= _KIMI_RUN:
            return (text,)
        return [piece for part in self._special.split(text) if part for piece in self._cut(part)]

    def _cut(self, text: str) -> Iterator[str]:
        for start in range(0, len(text), _KIMI_PIECE):
            piece = text[start : start + _KIMI_PIECE]
            # A run that is too long is cut after every 25,000 characters, counted from its start.
            begin = 0
            for match in self._run.finditer(piece):
                for cut in range(match.start() + _KIMI_RUN, match.end(), _KIMI_RUN):
                    yield piece[begin:cut]
                    begin = cut
            yield piece[begin:]


def _rank_file(folder: Path) -> Path | None:
    for name in _RANK_FILES:
        if (folder / name).is_file():
            return folder / name
    found = sorted(folder.glob("*.tiktoken"))
    if len(found) == 1:
        return found[0]
    model = folder / "tokenizer.model"
    return model if model.is_file() and _looks_like_ranks(model) else None


def _looks_like_ranks(path: Path) -> bool:
    """Whether the file begins like ``BASE64 RANK`` lines."""
    with path.open("rb") as handle:
        line = handle.read(256).split(b"\n")[0]
    return re.fullmatch(rb"[A-Za-z0-9+/=]+ \d+\r?", line) is not None


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes -> rank of a ``.tiktoken`` file.

    Raises:
        UserError: A line is not ``BASE64 RANK``.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise UserError(
                f"{path} line {number} is not 'BASE64 RANK': {line[:60]!r}. Is it a tiktoken file?"
            ) from error
    if not ranks:
        raise UserError(f"{path} is empty.")
    return ranks


def _load_tiktoken(path: Path, request: TokenizerRequest) -> TextTokenizer:
    file: Path | None = path
    if path.is_dir():
        file = _rank_file(path)
        jsons = [p for p in sorted(path.glob("*.json")) if p.name.startswith("vocab")]
        if file is None and len(jsons) == 1:
            file = jsons[0]
        if file is None:
            raise UserError(
                f"{path} holds no tiktoken vocabulary (tiktoken.model, *.tiktoken, or upstream's "
                "JSON list). Name the file with --tokenizer-model."
            )
    assert file is not None
    if file.suffix == ".json":
        return _load_upstream_tiktoken(file, request)
    ranks = read_ranks(file)
    config = read_json(file.parent / "tokenizer_config.json")
    name, specials = _identify(file, ranks, config, request)
    pattern = PATTERNS.get(name) or Pattern(name, None, "--tiktoken-pattern")
    declared = {
        int(number): value["content"]
        for number, value in (config.get("added_tokens_decoder") or {}).items()
    }
    specials = {**specials, **{text: number for number, text in declared.items()}}
    if name == "kimi":
        base = len(ranks)
        specials = {
            declared.get(i, f"<|reserved_token_{i}|>"): i
            for i in range(base, base + _KIMI_RESERVED)
        }
    prepare: Callable[[str], Sequence[str]] = _nfc if pattern.nfc else _whole
    if name == "kimi":
        prepare = KimiPieces(tuple(specials))
    eod_text = content_of(config.get("eos_token")) or next(
        (t for t in (_GPT2_EOD, "<|end_of_text|>", "[EOS]", "</s>") if t in specials), None
    )
    bos_text = content_of(config.get("bos_token")) or next(
        (t for t in ("<|begin_of_text|>", "[BOS]", "<s>") if t in specials), None
    )
    return _finish_tiktoken(
        file, pattern, ranks, specials, prepare, eod_text, bos_text, fast=pattern.scheme is not None
    )


def _identify(
    file: Path, ranks: Mapping[bytes, int], config: dict[str, Any], request: TokenizerRequest
) -> tuple[str, dict[str, int]]:
    """Name of the split pattern and the special tokens that come with it."""
    size = len(ranks)
    auto = (config.get("auto_map") or {}).get("AutoTokenizer")
    entry = auto[0] if isinstance(auto, (list, tuple)) and auto else auto
    module = str(entry or "").split("--")[-1].split(".")[0]
    known: dict[str, tuple[str, dict[str, int]]] = {
        "r50k_base": ("gpt2", {_GPT2_EOD: 50256}),
        "cl100k_base": (
            "cl100k",
            {
                _GPT2_EOD: 100257,
                "<|fim_prefix|>": 100258,
                "<|fim_middle|>": 100259,
                "<|fim_suffix|>": 100260,
                "<|endofprompt|>": 100276,
            },
        ),
        "o200k_base": ("o200k", {_GPT2_EOD: 199999, "<|endofprompt|>": 200018}),
    }
    found: tuple[str, dict[str, int]] | None = None
    if config.get("tokenizer_class") == "TikTokenTokenizer" and (
        module in _KIMI_MODULES or not module
    ):
        found = ("kimi", {})
    elif file.stem in known and file.suffix == ".tiktoken":
        found = known[file.stem]
    elif size == 151643 and (
        file.name == "qwen.tiktoken" or config.get("tokenizer_class") == "QWenTokenizer"
    ):
        names = [_GPT2_EOD, "<|im_start|>", "<|im_end|>"] + [f"<|extra_{i}|>" for i in range(205)]
        found = ("qwen", {text: size + i for i, text in enumerate(names)})
    elif size == 128000 and file.name == "tokenizer.model":
        found = ("llama3", _llama3_specials(size))
    if request.tiktoken_pattern:
        return request.tiktoken_pattern, found[1] if found else {}
    if found is None:
        raise UserError(
            f"{file} ({size} ranks) does not say how text is split before the merges, and neither "
            "its name nor tokenizer_config.json beside it is one that is known here (Kimi, Qwen, "
            "Llama 3, r50k_base, cl100k_base, o200k_base). A wrong pattern gives wrong ids without "
            f"an error, so nothing is guessed: pass --tiktoken-pattern with one of "
            f"{', '.join(PATTERNS)}, or the regular expression itself."
        )
    return found


def _llama3_specials(base: int) -> dict[str, int]:
    names = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|reserved_special_token_0|>",
        "<|reserved_special_token_1|>",
        "<|finetune_right_pad_id|>",
        "<|step_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
    ]
    names += [f"<|reserved_special_token_{i + 2}|>" for i in range(256 - len(names))]
    return {text: base + i for i, text in enumerate(names)}


def _load_upstream_tiktoken(file: Path, request: TokenizerRequest) -> TextTokenizer:
    """Upstream's own JSON form: a list of {rank, token_bytes, token_str}, specials first."""
    try:
        vocab = json.loads(file.read_bytes())
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(vocab, list) or not vocab or "token_bytes" not in vocab[0]:
        raise UserError(
            f"{file} is no tiktoken vocabulary of Megatron-LM (a list of rank, token_bytes, "
            "token_str). For a HuggingFace tokenizer.json use --tokenizer-type "
            "HuggingFaceTokenizer."
        )
    count = request.tiktoken_num_special_tokens
    size = request.vocab_size or _UPSTREAM_VOCAB
    if size - count > len(vocab):
        raise UserError(
            f"{file} holds {len(vocab)} tokens; with {count} special tokens the vocabulary is "
            f"{len(vocab) + count}, less than {size}. Pass --vocab-size {len(vocab) + count}."
        )
    ranks = {
        base64.b64decode(entry["token_bytes"]): int(entry["rank"]) + count
        for entry in vocab[: size - count]
    }
    names = list(request.tiktoken_special_tokens or _UPSTREAM_SPECIALS)
    missing = set(_UPSTREAM_SPECIALS) - set(names)
    if missing or len(names) > count:
        raise UserError(
            f"the special tokens must include {', '.join(_UPSTREAM_SPECIALS)} and be at most "
            f"--tiktoken-num-special-tokens {count}; got {len(names)}."
        )
    names += [f"<SPECIAL_{i}>" for i in range(len(names), count)]
    chosen = request.tiktoken_pattern or "v2"
    pattern = PATTERNS.get(chosen) or Pattern(chosen, None, "--tiktoken-pattern")
    tokenizer = _finish_tiktoken(
        file,
        pattern,
        ranks,
        {text: i for i, text in enumerate(names)},
        _whole,
        "</s>",
        "<s>",
        fast=False,
    )
    return replace(tokenizer, vocab_size=size)


def _finish_tiktoken(
    file: Path,
    pattern: Pattern,
    ranks: dict[bytes, int],
    specials: dict[str, int],
    prepare: Callable[[str], Sequence[str]],
    eod_text: str | None,
    bos_text: str | None,
    *,
    fast: bool,
) -> TextTokenizer:
    try:
        import tiktoken
    except ImportError as error:
        raise UserError(f"{file} is a tiktoken vocabulary: pip install tiktoken.") from error
    try:
        encoding = tiktoken.Encoding(
            name=file.name, pat_str=pattern.regex, mergeable_ranks=ranks, special_tokens=specials
        )
    except Exception as error:
        raise UserError(f"{file} with pattern {pattern.regex!r} is refused: {error}.") from error
    reference = TiktokenEngine(encoding, prepare)

    def remember(engine: Engine, added: Sequence[str]) -> Engine:
        # Kimi counts the characters of a run from its start: pieces would begin to count anew.
        longest = _KIMI_RUN if isinstance(prepare, KimiPieces) else None
        split = ascii_words([pattern.regex], end=r"\Z")
        return PieceEngine(engine, added, split=split, longest=longest)

    def token(text: str | None) -> Token | None:
        return Token(specials[text], text) if text is not None and text in specials else None

    return TextTokenizer(
        kind="tiktoken",
        source=str(file),
        vocab_size=encoding.n_vocab,
        largest_id=encoding.max_token_value,
        eod=token(eod_text),
        bos=token(bos_text),
        reference=reference,
        engine=reference,
        special_texts=tuple(specials),
        fast=(lambda: _gigatoken_from_ranks(file, pattern, specials, prepare)) if fast else None,
        remember=remember if pattern.regex in _PIECEWISE else None,
    )


# -------------------------------------------------------------------------------- remembered pieces

# A piece ends after an ASCII letter that is followed by an ASCII character other than a letter or
# an apostrophe. In the split patterns below no match reaches over such a place: a run of letters is
# not continued by what may stand there ("'" may, in a contraction), and nothing looks back.
_PIECE = re.compile(r"[^a-zA-Z]*[a-zA-Z]+(?:['\x80-\U0010ffff][^a-zA-Z]*[a-zA-Z]*)*|[^a-zA-Z]+")
_LONGEST_PIECE = 64
_MOST_PIECES = 400_000


class PieceEngine:
    """Remembers the ids of short pieces of text, so that each is tokenized once.

    Only for split patterns in ``_PIECEWISE``, where a text's ids are those of its pieces, one after
    the other. A text in which an added token stands is not cut.

    Args:
        reference: The engine that defines the ids.
        added: Texts of the added tokens.
        split: See ``ascii_words``; a new piece of ASCII is then put together from its words, of
            which far fewer are new than of pieces. None: each new piece goes to the reference.
        longest: A text of more characters is not cut, or None.
    """

    def __init__(
        self,
        reference: Engine,
        added: Sequence[str],
        *,
        split: Callable[[str], list[str]] | None = None,
        longest: int | None = None,
    ) -> None:
        self.name = f"{reference.name} with remembered pieces"
        self.reference = reference
        self._heads = sorted({text[:2] for text in added if text})
        self._longest = longest
        longest_first = sorted(filter(None, added), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first))) if added else None
        self._split = split
        self._known: dict[str, bytes] = {}
        self._words: dict[str, bytes] = {}

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text."""
        cut = [_PIECE.findall(text) if self._may_cut(text) else None for text in texts]
        if len(self._known) > _MOST_PIECES:
            self._known.clear()
        known = self._known
        new = {piece for pieces in cut if pieces for piece in pieces if piece not in known}
        if new:
            self._learn(new)
        whole = iter(
            self.reference.encode_many(
                [text for text, pieces in zip(texts, cut, strict=True) if pieces is None]
            )
        )
        look_up = known.__getitem__
        result = [
            next(whole)
            if pieces is None
            else np.frombuffer(b"".join(map(look_up, pieces)), dtype=np.uint32)
            for pieces in cut
        ]
        _forget_long(known, new)
        return result

    def _learn(self, pieces: set[str]) -> None:
        if self._split is None:
            self._ask(pieces, self._known)
            return
        if len(self._words) > _MOST_PIECES:
            self._words.clear()
        known, words = self._known, self._words
        split = {piece: self._split(piece) for piece in pieces if piece.isascii()}
        new = {word for found in split.values() for word in found if word not in words}
        self._ask(new, words)
        look_up = words.__getitem__
        for piece, found in split.items():
            known[piece] = b"".join(map(look_up, found))
        _forget_long(words, new)
        self._ask(pieces.difference(split), known)

    def _ask(self, texts: set[str], known: dict[str, bytes]) -> None:
        """Have texts encoded by the reference, each on its own."""
        ordered = list(texts)
        for text, ids in zip(ordered, self.reference.encode_many(ordered), strict=True):
            known[text] = ids.astype(np.uint32).tobytes()

    def _may_cut(self, text: str) -> bool:
        if self._longest is not None and len(text) > self._longest:
            return False
        if self._added is None or not self._has_head(text):
            return True
        return self._added.search(text) is None

    def _has_head(self, text: str) -> bool:
        """Whether the first two characters of an added token occur: a quick look."""
        return any(head in text for head in self._heads)


def _forget_long(known: dict[str, bytes], texts: set[str]) -> None:
    """Drop texts that will hardly come again."""
    for text in texts:
        if len(text) > _LONGEST_PIECE:
            del known[text]


_DEEPSEEK_V3 = (  # the last of its three steps
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?"""
    "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
_PIECEWISE = frozenset(
    {
        PATTERNS["gpt2"].regex,
        PATTERNS["cl100k"].regex,
        PATTERNS["o200k"].regex,
        PATTERNS["llama3"].regex,
        PATTERNS["qwen"].regex,
        PATTERNS["kimi"].regex,
        PATTERNS["v1"].regex,
        PATTERNS["v2"].regex,
        # Qwen3.5
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        _DEEPSEEK_V3,
    }
)


def _remember(tokenizer: Any) -> Callable[[Engine, Sequence[str]], Engine] | None:
    """Builds the piece engine for a ``tokenizers`` tokenizer, or None where it may not be cut."""

    def state(part: Any) -> dict[str, Any]:
        return {} if part is None else dict(json.loads(part.__getstate__()))

    normalizer = state(tokenizer.normalizer)
    parts = normalizer.get("normalizers", [normalizer] if normalizer else [])
    if any(part.get("type") != "NFC" for part in parts):
        return None
    splitter = state(tokenizer.pre_tokenizer)
    steps = splitter.get("pretokenizers", [splitter])
    words = False  # whether some step keeps letters apart from what follows them
    regexes = []
    for step in steps:
        if step.get("type") == "Split":
            regex = _spelled(step.get("pattern", {}).get("Regex", ""))
            if step.get("behavior") != "Isolated" or step.get("invert") or regex not in _SPELLED:
                return None
            words = words or regex not in _WITHIN_WORDS
            regexes.append(regex)
        elif step.get("type") == "Digits":
            regexes.append(r"\p{N}" if step.get("individual_digits") else r"\p{N}+")
        elif step.get("type") != "ByteLevel" or step.get("add_prefix_space"):
            return None
        elif step.get("use_regex", True):
            words = True
            regexes.append(PATTERNS["gpt2"].regex)
    if not words or steps[-1].get("type") != "ByteLevel":
        return None
    split = ascii_words(regexes)
    return lambda engine, added: PieceEngine(engine, added, split=split)


#: General categories, and what of them is ASCII, as the inside of a class of characters.
_ASCII_OF = {
    "L": "A-Za-z",
    "Lu": "A-Z",
    "Ll": "a-z",
    "Lt": "",
    "Lm": "",
    "Lo": "",
    "M": "",
    "N": "0-9",
    "P": r"""!"#%&'()*,\-./:;?@\[\\\]_{}""",
    "S": "$+<=>^`|~",
}
_HAN = (r"[\p{Han}]+|", r"&&[^\p{Han}]")


def ascii_words(steps: Sequence[str], end: str | None = None) -> Callable[[str], list[str]] | None:
    """Cuts ASCII text where the steps of a pre-tokenizer cut it, by Python's own expressions.

    No step looks back, and what one looks ahead for is the end of white space, so that the ids of
    a text are those of its words, each on its own.

    Args:
        steps: Members of ``_PIECEWISE`` and ``_WITHIN_WORDS``, or of digits, each on the words of
            the one before; what a step does not match is a word, too.
        end: What ``$`` means in them: libraries differ. None: they have to do without it.

    Returns:
        The function, or None: a step has a ``$``, and ``end`` does not say what that is.
    """
    compiled = []
    for step in steps:
        pattern = _ascii_pattern(step, end)
        if pattern is None:
            return None
        if pattern:
            whole = f"(?:{pattern})|(?:(?!{pattern}).)+"
            compiled.append(re.compile(whole, re.ASCII | re.DOTALL).findall)

    def split(text: str) -> list[str]:
        words = [text]
        for find in compiled:
            words = [word for part in words for word in find(part)]
        return words

    return split


def _ascii_pattern(regex: str, end: str | None) -> str | None:
    """The expression for ASCII text; empty: it matches none."""
    if regex == _IDEOGRAPHS:
        return ""
    for part in _HAN:
        regex = regex.replace(part, "")
    out: list[str] = []
    inside = False
    for token in re.findall(r"\\p\{\w+\}|\\.|[^\\]", regex, re.DOTALL):
        if token.startswith(r"\p"):
            found = _ASCII_OF[token[3:-1]]
            out.append(found if inside else f"[{found}]")
            continue
        if token == "$" and not inside:
            if end is None:
                return None
            token = end
        inside = token == "[" or (inside and token != "]")
        out.append(token)
    return "".join(out)


def _spelled(regex: str) -> str:
    """The regex with line ends as escapes: a tokenizer.json holds either spelling."""
    return regex.replace("\r", r"\r").replace("\n", r"\n")


_IDEOGRAPHS = "[一-龥\u3040-ゟ゠-ヿ]+"
#: Steps that cut numbers and ideographs out, and leave the rest whole.
_WITHIN_WORDS = frozenset({r"\p{N}{1,3}", _IDEOGRAPHS})
_SPELLED = frozenset(map(_spelled, _PIECEWISE | _WITHIN_WORDS))


# --------------------------------------------------------------------------------------- gigatoken


class GigatokenEngine:
    """The ``gigatoken`` library; use it only after ``accelerate`` has compared its ids."""

    name = "gigatoken"

    def __init__(
        self, encode: Callable[[str], Ids], prepare: Callable[[str], Sequence[str]] | None = None
    ) -> None:
        self._encode = encode
        self._prepare = prepare

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, on the calling thread."""
        if self._prepare is None:
            return [self._encode(text) for text in texts]
        return [_joined(self._encode, self._prepare(text)) for text in texts]


class GuardedEngine:
    """A fast engine that is trusted one character at a time.

    Libraries carry tables of different Unicode versions, so they part on characters that one of
    them does not know yet (which are letters, which are marks, how marks are ordered). A character
    is compared in several surroundings when it first occurs; a text that holds one on which the two
    part goes to the reference. ASCII is what ``accelerate`` tries out.

    Args:
        fast: The engine to use.
        reference: The engine that defines the ids.
    """

    def __init__(self, fast: Engine, reference: Engine) -> None:
        self.name = fast.name
        self.fast = fast
        self.reference = reference
        self.rerouted = 0
        self._state = np.zeros(0x11_0000, dtype=np.uint8)  # 0 unknown, 1 equal, 2 different
        self._state[:0x80] = 1

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text; always the reference's, as far as that can be found out."""
        if all(map(str.isascii, texts)):
            return self.fast.encode_many(texts)
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> Ids:
        if not text.isascii():
            points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
            states = self._state[points]
            if not states.all():
                self._learn(np.unique(points[states == 0]))
                states = self._state[points]
            if states.max() > 1:
                self.rerouted += 1
                return self.reference.encode_many([text])[0]
        return self.fast.encode_many([text])[0]

    def _learn(self, points: npt.NDArray[np.uint32]) -> None:
        probes = [_probe(chr(point)) for point in points]
        expected = self.reference.encode_many(probes)
        for point, got, want in zip(points, self.fast.encode_many(probes), expected, strict=True):
            self._state[point] = 1 if np.array_equal(got, want) else 2

    def seen(self) -> tuple[int, list[str]]:
        """Number of characters beyond ASCII compared so far, and those that differ."""
        known = int((self._state[0x80:] > 0).sum())
        return known, [chr(point) for point in np.flatnonzero(self._state == 2)]


def _probe(char: str) -> str:
    """``char`` beside letters, itself, digits, line ends, punctuation, and marks above and below.

    The marks are of three combining classes, so that normalization puts a mark of any other class
    before or after one of them.
    """
    return f"a{char}b {char}{char} 1{char}\n{char}\u0301 {char}\u0323 x\u0345{char}\u0334 .{char}"


def _gigatoken_from_json(data: str) -> Engine:
    from gigatoken.gigatoken_rs import load_hf_json

    return GigatokenEngine(load_hf_json(data).encode)


def _gigatoken_from_sentencepiece(file: Path) -> Engine:
    import gigatoken

    return GigatokenEngine(gigatoken.Tokenizer.from_sentencepiece(file).encode)


def _gigatoken_from_ranks(
    file: Path,
    pattern: Pattern,
    specials: dict[str, int],
    prepare: Callable[[str], Sequence[str]],
) -> Engine:
    from gigatoken.gigatoken_rs import BPETokenizer

    assert pattern.scheme is not None
    return GigatokenEngine(
        BPETokenizer.from_tiktoken(str(file), pattern.scheme, specials).encode,
        None if prepare is _whole else prepare,
    )


@dataclass(frozen=True)
class Proof:
    """Outcome of the comparison of gigatoken's ids with the reference's.

    Attributes:
        equal: Whether all were equal.
        texts: Number of texts compared.
        characters: Their characters.
        reason: Why gigatoken is not used, or "".
    """

    equal: bool
    texts: int = 0
    characters: int = 0
    reason: str = ""


def accelerate(tokenizer: TextTokenizer, sample: Sequence[str]) -> tuple[TextTokenizer, Proof]:
    """Use gigatoken if it gives the reference's ids for ``sample`` and the adversarial strings.

    Args:
        tokenizer: As from ``load``.
        sample: Documents of the corpus that is about to be encoded.

    Returns:
        The tokenizer, with gigatoken (in a ``GuardedEngine``) as its engine where the ids were
        equal, and the comparison.
    """
    if tokenizer.fast is None:
        return tokenizer, Proof(False, reason="it has no counterpart of this vocabulary's pattern")
    try:
        engine = tokenizer.fast()
    except ImportError:
        return tokenizer, Proof(False, reason="it is not installed (pip install gigatoken)")
    except Exception as error:
        return tokenizer, Proof(False, reason=f"it cannot load this tokenizer ({error})")
    guarded = GuardedEngine(engine, tokenizer.reference)
    texts = [*adversarial(tokenizer.special_texts), *sample]
    characters = sum(map(len, texts))
    different = first_difference(guarded, tokenizer.reference, texts)
    if different is not None:
        return tokenizer, Proof(
            False, len(texts), characters, f"its ids differ, for one on {_shorten(different)}"
        )
    known, parted = guarded.seen()
    if len(parted) > max(8, known // 20):
        return tokenizer, Proof(
            False,
            len(texts),
            characters,
            f"its ids differ on {len(parted)} of {known} characters, as U+{ord(parted[0]):04X}",
        )
    guarded.rerouted = 0
    return replace(tokenizer, engine=guarded), Proof(True, len(texts), characters)


def remember_pieces(tokenizer: TextTokenizer, sample: Sequence[str]) -> TextTokenizer:
    """Let the reference remember pieces, where ids of sample and hard cases stay the same."""
    if tokenizer.remember is None:
        return tokenizer
    engine = tokenizer.remember(tokenizer.reference, tokenizer.special_texts)
    texts = [*adversarial(tokenizer.special_texts), *sample]
    if first_difference(engine, tokenizer.reference, texts) is not None:
        return tokenizer
    return replace(tokenizer, engine=engine)


def first_difference(engine: Engine, reference: Engine, texts: Sequence[str]) -> str | None:
    """The first text that the two encode differently, or None."""
    expected = reference.encode_many(texts)
    for text, want in zip(texts, expected, strict=True):
        try:
            got = engine.encode_many([text])[0]
        except Exception:
            return text
        if not np.array_equal(got, want):
            return text
    return None


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


#: Code points that split patterns, normalizers and byte fallbacks treat differently.
_AWKWARD = (
    "\x00\x01\x1b\x1c\x1f\x7f\x85\xa0\xad\u0300\u0301\u0345\u0378\u0600\u0660\u06dd\u0915\u093f"
    "\u0e33\u1100\u1161\u11a8\u1680\u180e\u1e9e\u2000\u200b\u200c\u200d\u2028\u2029\u202e\u202f"
    "\u2060\u20ac\u2126\u212b\u2160\u2581\u3000\u3040\u309f\u30a0\u30ff\u4e00\u9fa5\u9fa6\u9fff"
    "\ua9c0\uac00\ud7a3\ue000\ufb01\ufdfa\ufe0f\ufeff\uff10\uff21\uffa0\ufffd\uffff\U00010000"
    "\U00010400\U0001d54f\U0001f1e9\U0001f3fd\U0001f468\U0001f600\U00020000\U000e0001\U0010ffff"
    "²½Ⅷ٣ßſıİŉǅ’ʼ"
)
_WORDS = (
    "a", "The", "HTTPServer", "naïve", "cafe\u0301", "it's", "IT'S", "we'Ll", "x’s", "don't", "1",
    "1234567", "3.14", "中文分词", "かな", "カナ", "한국어", "हिन्दी", "العربية", "ไทย", "Ελλάδα",
    "👩‍👩‍👧", "_", "__init__", "->", "!!!", "://", "#include", "é", "ﬁ", "<", ">", "</s>", "<s>",
    "<unk>", "<|endoftext|>", "▁", "\\", "/", '"', "'", "'s", "'S", "٣٤", "Ⅷ",
)  # fmt: skip
_SEPARATORS = (
    "", " ", "  ", "   ", "\n", "\n\n", "\r\n", " \n", "\n ", "\t", "\t\n ", "\u00a0", "\u3000",
    "\u2028", " \n \n", "\r", "\x0b", "\x0c", "    ",
)  # fmt: skip


def adversarial(special_texts: Sequence[str] = (), *, seed: int = 20) -> list[str]:
    """Strings on which tokenizers are known to part: the same list on every machine.

    White space of every kind, contractions, digits, scripts, marks and joiners, unassigned and
    private code points, code points at the edges of blocks, long runs, special tokens inside text,
    and pseudo-random mixtures of all of these.

    Args:
        special_texts: The tokenizer's special tokens.
        seed: Of the mixtures.
    """
    rng = random.Random(seed)
    texts = ["", *_WORDS, *(s for s in _SEPARATORS if s), *_AWKWARD]
    texts += [f"{a}{b}{c}" for b in _SEPARATORS for a, c in zip(_WORDS, _WORDS[::-1], strict=True)]
    texts += [f"a{c}b {c} {c}{c}1\n{c}" for c in _AWKWARD]
    texts += [c * n for c in "a 1\n\t!é中'" for n in (2, 3, 4, 7, 15, 64, 257)]
    texts += ["ab" * 3000, " " * 3000 + "x", "\n" * 500 + " y", "x" + " " * 65, "9" * 1000]
    names = list(special_texts)
    picked = names if len(names) <= 64 else names[:32] + rng.sample(names[32:], 32)
    for name in picked:
        texts += [name, f"a{name}b", f" {name} ", f"\n{name}\n{name}", name[:-1], name[1:]]
    pool = [*_WORDS, *_SEPARATORS, *_SEPARATORS, *_AWKWARD, *picked]
    for _ in range(400):
        texts.append("".join(rng.choice(pool) for _ in range(rng.randint(2, 24))))
    for _ in range(40):
        points = (rng.randrange(1, 0x11_0000) for _ in range(rng.randint(1, 12)))
        texts.append("".join(chr(p) for p in points if not 0xD800 <= p < 0xE000))
    return texts
