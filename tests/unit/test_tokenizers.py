"""Offline tokenizers give the ids of transformers, sentencepiece, tiktoken and Megatron-Core."""

from __future__ import annotations

import base64
import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import text_fixtures as fixtures

from megatron_patch.data import tokenizers
from megatron_patch.data.tokenizers import TokenizerRequest, adversarial, load
from megatron_patch.util import UserError

HF = {
    "qwen": fixtures.qwen_like,
    "llama3": fixtures.llama3_like,
    "configured": fixtures.configured,
    "metaspace": fixtures.metaspace,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    makers = HF | {
        "gpt2": fixtures.gpt2_files,
        "sentencepiece": fixtures.sentencepiece_model,
        "kimi": fixtures.kimi_like,
    }

    def make(name: str) -> Path:
        path = folder / name
        return path if path.exists() else makers[name](path)

    return make


def full_ids(tokenizer: tokenizers.TextTokenizer, text: str) -> list[int]:
    inside = tokenizer.engine.encode_many([text])[0].tolist()
    return [*tokenizer.prefix, *inside, *tokenizer.suffix]


def hard_texts(tokenizer: tokenizers.TextTokenizer) -> list[str]:
    return [*adversarial(tokenizer.special_texts), *fixtures.corpus()[:10]]


@pytest.mark.parametrize("name", HF)
def test_ids_are_transformers(name: str, made):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(made(name))
    ours = load(TokenizerRequest("HuggingFaceTokenizer", str(made(name))))
    assert ours.vocab_size == len(theirs)
    assert ours.eod is not None
    assert ours.eod.id == theirs.eos_token_id
    assert (ours.bos.id if ours.bos else None) == theirs.bos_token_id
    for text in hard_texts(ours):
        assert full_ids(ours, text) == theirs(text).input_ids, text


@pytest.mark.parametrize("name", HF)
def test_pai_types_leave_bos_out(name: str, made):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(made(name))
    ours = load(TokenizerRequest("Qwen3Tokenizer", str(made(name))))
    for text in ("", "a b", fixtures.corpus()[0]):
        assert full_ids(ours, text) == theirs(text, add_special_tokens=False).input_ids
    kept = load(TokenizerRequest("Qwen3Tokenizer", str(made(name)), add_special_tokens=True))
    assert full_ids(kept, "a b") == theirs("a b").input_ids


@pytest.mark.parametrize("name", [*HF, "kimi"])
def test_gigatoken_is_used_where_equal(name: str, made):
    pytest.importorskip("gigatoken")
    tokenizer = load(TokenizerRequest("HuggingFaceTokenizer", str(made(name))))
    fast, proof = tokenizers.accelerate(tokenizer, fixtures.corpus())
    assert proof.equal, proof.reason
    assert fast.engine.name == "gigatoken"
    blocks = ["".join(map(chr, range(at, at + 64))) for at in range(0x80, 0x3200, 64)]
    texts = [*adversarial(tokenizer.special_texts, seed=4), *fixtures.corpus(200), *blocks]
    for text in texts:
        assert (
            fast.engine.encode_many([text])[0].tolist()
            == tokenizer.reference.encode_many([text])[0].tolist()
        )


class Wrong:
    """An engine that is right except where ``when`` says."""

    name = "wrong"

    def __init__(self, inner: tokenizers.Engine, when: Callable[[str], bool]) -> None:
        self.inner = inner
        self.when = when

    def encode_many(self, texts):
        return [
            np.append(ids, 0) if self.when(text) else ids
            for text, ids in zip(texts, self.inner.encode_many(texts), strict=True)
        ]


def test_a_character_the_engines_part_on_goes_to_the_reference(made):
    tokenizer = load(TokenizerRequest("HuggingFaceTokenizer", str(made("qwen"))))
    odd = "\u1df6"
    broken = replace(tokenizer, fast=lambda: Wrong(tokenizer.reference, lambda text: odd in text))
    chosen, proof = tokenizers.accelerate(broken, ["text", "né"])
    assert proof.equal
    texts = [f"with {odd} inside", "without", "né"]
    for got, want in zip(
        chosen.engine.encode_many(texts), tokenizer.reference.encode_many(texts), strict=True
    ):
        assert got.tolist() == want.tolist()
    assert chosen.engine.rerouted == 1
    assert odd in chosen.engine.seen()[1]


@pytest.mark.parametrize(
    "when",
    [
        lambda text: "e\u0301" in text,
        lambda text: "<|im_end|>" in text,
        lambda text: len(text) > 5000,
        lambda text: "'LL" in text.upper(),
        lambda text: "\r\n" in text,
        lambda text: "only in the corpus" in text,
    ],
)
def test_an_engine_that_is_nearly_right_is_not_used(when, made):
    tokenizer = load(TokenizerRequest("HuggingFaceTokenizer", str(made("qwen"))))
    broken = replace(tokenizer, fast=lambda: Wrong(tokenizer.reference, when))
    chosen, proof = tokenizers.accelerate(broken, ["text that is only in the corpus"])
    assert not proof.equal
    assert "differ" in proof.reason
    assert chosen.engine is tokenizer.reference


@pytest.mark.parametrize("scheme", ["gpt2", "gpt4", "o200k", "qwen35"])
def test_another_split_pattern_is_found_out(scheme: str, tmp_path: Path):
    gigatoken = pytest.importorskip("gigatoken")
    fixtures.write_ranks(tmp_path / "v.tiktoken", fixtures.ranks())
    request = TokenizerRequest(
        "TikTokenizer", str(tmp_path / "v.tiktoken"), tiktoken_pattern="qwen"
    )
    tokenizer = load(request)
    wrong = gigatoken.gigatoken_rs.BPETokenizer.from_tiktoken(tokenizer.source, scheme, {})
    engine = tokenizers.GigatokenEngine(wrong.encode, tokenizers._nfc)
    assert tokenizers.first_difference(engine, tokenizer.reference, adversarial()) is not None


def test_gpt2_from_vocab_and_merges(made):
    from transformers import GPT2Tokenizer

    folder = made("gpt2")
    ours = load(
        TokenizerRequest(
            "GPT2BPETokenizer",
            vocab_file=str(folder / "vocab.json"),
            merge_file=str(folder / "merges.txt"),
        )
    )
    theirs = GPT2Tokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    for text in hard_texts(ours):
        assert full_ids(ours, text) == theirs(text).input_ids, text
    assert ours.eod == tokenizers.Token(theirs.eos_token_id, "<|endoftext|>")
    assert ours.vocab_size == len(theirs)
    assert full_ids(load(TokenizerRequest("GPT2BPETokenizer", str(folder))), "a b") == full_ids(
        ours, "a b"
    )


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "Llama2Tokenizer", "SentencePieceTokenizer"])
def test_sentencepiece_is_megatrons(kind: str, made):
    from megatron.core.tokenizers.text.libraries.sentencepiece_tokenizer import (
        SentencePieceTokenizer,
    )

    file = made("sentencepiece") / "tokenizer.model"
    theirs = SentencePieceTokenizer(str(file))
    ours = load(TokenizerRequest(kind, str(file.parent)))
    for text in hard_texts(ours):
        assert full_ids(ours, text) == theirs.text_to_ids(text), text
    assert ours.vocab_size == theirs.vocab_size
    assert (ours.eod.id, ours.bos.id) == (theirs.eos_id, theirs.bos_id)
    assert ours.prefix == ()


def test_llama_tokenizer_takes_a_directory_with_tokenizer_json(made):
    ours = load(TokenizerRequest("LlamaTokenizer", str(made("metaspace"))))
    assert ours.kind == "huggingface"
    assert ours.prefix == ()


# ------------------------------------------------------------------------------------------- Kimi


@cache
def kimi_encoding(folder: Path) -> Any:
    """Kimi's vocabulary with its documented split pattern."""
    import tiktoken

    table = {
        base64.b64decode(a): int(b)
        for a, b in (line.split() for line in (folder / "tiktoken.model").open("rb"))
    }
    han = r"\p{Han}"
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^{han}]]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^{han}]]"
    tail = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    pattern = "|".join(
        [
            rf"[{han}]+",
            rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{tail}",
            rf"[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{tail}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    )
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = {int(k): v["content"] for k, v in config["added_tokens_decoder"].items()}
    specials = {
        named.get(i, f"<|reserved_token_{i}|>"): i for i in range(len(table), len(table) + 256)
    }
    return tiktoken.Encoding(
        "kimi", pat_str=pattern, mergeable_ranks=table, special_tokens=specials
    )


def kimi_reference(folder: Path, text: str) -> list[int]:
    """Kimi's documented behaviour, written down the slow way."""
    encoding, run, piece = kimi_encoding(folder), 25_000, 400_000
    ids: list[int] = []
    for start in range(0, len(text), piece):
        chunk = text[start : start + piece]
        begin = length = 0
        space = chunk[0].isspace()
        for i, char in enumerate(chunk):
            if char.isspace() != space:
                space, length = char.isspace(), 1
            else:
                length += 1
                if length > run:
                    ids += encoding.encode(chunk[begin:i], allowed_special="all")
                    begin, length = i, 1
        ids += encoding.encode(chunk[begin:], allowed_special="all")
    return ids


@pytest.mark.parametrize(
    "kind",
    [
        "TikTokenizer",
        pytest.param("HuggingFaceTokenizer", marks=pytest.mark.slow),
        pytest.param("SentencePieceTokenizer", marks=pytest.mark.slow),
    ],
)
def test_kimi_without_remote_code(kind: str, made):
    folder = made("kimi")
    ours = load(TokenizerRequest(kind, str(folder)))
    assert ours.kind == "tiktoken"
    assert ours.eod.text == "[EOS]"
    assert ours.bos.text == "[BOS]"
    assert ours.vocab_size == ours.eod.id - 1 + 256
    for text in hard_texts(ours):
        assert full_ids(ours, text) == kimi_reference(folder, text), text


@pytest.mark.parametrize("engine", ["tiktoken", "gigatoken", "pieces"])
@pytest.mark.parametrize(
    "text",
    [
        "x" * 25_000 + " end",
        "x-" * 25_000 + " end",
        "x" * 25_001 + " end",
        "ab" * 40_000 + " " * 60_000 + "y",
        "\n" * 25_003 + "word " * 10,
        "word and 中文 more " * 30_000,
        "a" * 399_999 + "bcd e",
    ],
    ids=["run", "broken-run", "run+1", "runs", "newlines", "pieces", "piece-and-run"],
)
def test_kimi_cuts_long_text_where_its_code_does(engine: str, text: str, made):
    tokenizer = load(TokenizerRequest("TikTokenizer", str(made("kimi"))))
    if engine == "gigatoken":
        tokenizer, proof = tokenizers.accelerate(tokenizer, [])
        assert proof.equal, proof.reason
    elif engine == "pieces":
        tokenizer = tokenizers.remember_pieces(tokenizer, [])
        assert isinstance(tokenizer.engine, tokenizers.PieceEngine)
    assert full_ids(tokenizer, text) == kimi_reference(made("kimi"), text)


def test_an_unknown_vocabulary_is_refused(tmp_path: Path, made):
    file = tmp_path / "mystery.tiktoken"
    fixtures.write_ranks(file, fixtures.ranks())
    with pytest.raises(UserError, match="--tiktoken-pattern"):
        load(TokenizerRequest("TikTokenizer", str(file)))
    known = load(TokenizerRequest("TikTokenizer", str(file), tiktoken_pattern="cl100k"))
    assert known.eod is None
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "TikTokenTokenizer",
                "auto_map": {"AutoTokenizer": ["another_org.TikTokenTokenizer", None]},
            }
        )
    )
    with pytest.raises(UserError, match="nothing is guessed"):
        load(TokenizerRequest("TikTokenizer", str(file)))


@pytest.mark.parametrize(
    ("name", "published"),
    [("gpt2", "r50k_base"), ("cl100k", "cl100k_base"), ("o200k", "o200k_base")],
)
def test_patterns_are_tiktokens(name: str, published: str, monkeypatch):
    import tiktoken
    from tiktoken_ext import openai_public

    table = fixtures.ranks()
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *rest, **more: table)
    patterns = (getattr(openai_public, published)()["pat_str"], tokenizers.PATTERNS[name].regex)
    theirs, ours = (
        tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=table, special_tokens={})
        for pattern in patterns
    )
    for text in [*adversarial(), *fixtures.corpus()]:
        assert ours.encode_ordinary(text) == theirs.encode_ordinary(text), text


@pytest.mark.parametrize("pattern", [None, "v1", "v2"])
def test_upstreams_json_vocabulary(pattern: str | None, tmp_path: Path):
    from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import TikTokenTokenizer

    table = fixtures.ranks()
    file = tmp_path / "vocab.json"
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in table.items()
    ]
    file.write_text(json.dumps(entries))
    size = len(table) + 100
    options = {} if pattern is None else {"pattern": pattern}
    theirs = TikTokenTokenizer(str(file), num_special_tokens=100, vocab_size=size, **options)
    ours = load(
        TokenizerRequest(
            "TikTokenizer",
            str(file),
            tiktoken_num_special_tokens=100,
            vocab_size=size,
            tiktoken_pattern=pattern,
        )
    )
    for text in hard_texts(ours):
        assert full_ids(ours, text) == theirs.text_to_ids(text), text
    assert (ours.vocab_size, ours.eod.id, ours.bos.id) == (size, theirs.eod, theirs.bos_id)
    with pytest.raises(UserError, match=f"--vocab-size {size}"):
        load(TokenizerRequest("TikTokenizer", str(file), tiktoken_num_special_tokens=100))


# ------------------------------------------------------------------------------------------ errors


def test_errors_name_the_remedy(tmp_path: Path, made):
    qwen = str(made("qwen"))
    cases = [
        (TokenizerRequest("qwen3tokenizer", qwen), "did you mean Qwen3Tokenizer"),
        (TokenizerRequest("Nonsense", qwen), "Known: HuggingFaceTokenizer"),
        (TokenizerRequest("HuggingFaceTokenizer"), "needs --tokenizer-model"),
        (TokenizerRequest("HuggingFaceTokenizer", "/no/such"), "does not exist"),
        (TokenizerRequest("HuggingFaceTokenizer", str(tmp_path)), "holds no tokenizer.json"),
        (TokenizerRequest("HuggingFaceTokenizer", qwen, merge_file="m"), "no effect"),
        (TokenizerRequest("HuggingFaceTokenizer", qwen, vocab_file="v"), "both given"),
        (TokenizerRequest("GPT2BPETokenizer", vocab_file="v"), "needs --vocab-file"),
        (TokenizerRequest("HuggingFaceTokenizer", qwen, eod_token="a b c d"), "not one"),
    ]
    for request, message in cases:
        with pytest.raises(UserError, match=message.replace(".", r"\.")):
            load(request)
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        load(TokenizerRequest("HuggingFaceTokenizer", str(tmp_path)))
    model = tmp_path / "sp" / "tokenizer.model"
    model.parent.mkdir()
    fixtures.write_ranks(model, {b"a": 0})
    with pytest.raises(UserError, match="tiktoken rank file"):
        load(TokenizerRequest("LlamaTokenizer", str(model)))
    model.write_bytes(b"YQ== 0\nnonsense\n")
    with pytest.raises(UserError, match="line 2 is not"):
        load(TokenizerRequest("TikTokenizer", str(model), tiktoken_pattern="gpt2"))


def test_eod_token_can_be_chosen(made):
    ours = load(TokenizerRequest("Qwen2Tokenizer", str(made("qwen")), eod_token="<|im_end|>"))
    assert ours.eod.text == "<|im_end|>"
    assert full_ids(ours, "<|im_end|>") == [ours.eod.id]


def test_adversarial_strings_are_the_same_everywhere_and_encodable():
    assert adversarial(["<|x|>"]) == adversarial(["<|x|>"])
    assert len("".join(adversarial()).encode()) > 40_000


# -------------------------------------------------------------------------------- remembered pieces


@pytest.mark.parametrize(
    "name",
    [
        "qwen",
        pytest.param("llama3", marks=pytest.mark.slow),
        pytest.param("configured", marks=pytest.mark.slow),
        "kimi",
    ],
)
def test_remembered_pieces_change_no_id(name: str, made):
    tokenizer = load(TokenizerRequest("HuggingFaceTokenizer", str(made(name))))
    fast = tokenizers.remember_pieces(tokenizer, [])
    assert isinstance(fast.engine, tokenizers.PieceEngine)
    for seed in range(2):
        texts = [*adversarial(tokenizer.special_texts, seed=seed), *fixtures.corpus()]
        texts += [a + b for a, b in zip(texts, texts[::-1], strict=True)]
        for _ in range(2):  # the second time from memory
            for got, want in zip(
                fast.engine.encode_many(texts), tokenizer.reference.encode_many(texts), strict=True
            ):
                assert got.tolist() == want.tolist()


def test_pieces_are_the_text():
    for text in [*adversarial(["<|x|>"]), *fixtures.corpus(200)]:
        assert "".join(tokenizers._PIECE.findall(text)) == text


DIGITS, IDEOGRAPHS = r"\p{N}{1,3}", tokenizers._IDEOGRAPHS
STEPS = {
    **{name: [pattern.regex] for name, pattern in tokenizers.PATTERNS.items()},
    "deepseek": [DIGITS, IDEOGRAPHS, tokenizers._DEEPSEEK_V3],
    "deepseek-alone": [tokenizers._DEEPSEEK_V3],
    "digits": [r"\p{N}", tokenizers.PATTERNS["gpt2"].regex],
    "others": [next(iter(tokenizers._PIECEWISE - {p.regex for p in tokenizers.PATTERNS.values()}))],
}


def ascii_texts(seed: int, count: int) -> list[str]:
    """Whatever is ASCII of the hard cases, and random ASCII, rich in white space and quotes."""
    rng = random.Random(seed)
    pool = [chr(i) for i in range(128)] + [
        *" \n\r\t'",
        "  ",
        "\n\n",
        "'s",
        "'LL",
        "12",
        "ab",
        "Ab",
    ] * 4
    texts = ["".join(rng.choices(pool, k=rng.randint(1, 24))) for _ in range(count)]
    return [*filter(str.isascii, adversarial(["<|x|>"], seed=seed)), *texts]


@pytest.mark.parametrize("name", STEPS)
def test_words_of_ascii_are_the_pre_tokenizers(name: str):
    from tokenizers import Regex, pre_tokenizers

    regexes = STEPS[name]
    # In `tokenizers` a `$` is the end of a line, too, and nothing is said of such a pattern.
    assert (tokenizers.ascii_words(regexes) is None) == (name == "cl100k")
    split = tokenizers.ascii_words(regexes, end=r"\Z")
    if name == "cl100k":
        regexes = [regexes[0].replace("$", r"\z")]
    steps = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in regexes]
    theirs = pre_tokenizers.Sequence(steps)
    for text in ascii_texts(3, 3000):
        want = [word for word, _ in theirs.pre_tokenize_str(text)]
        assert split(text) == want, text
        # Each on its own is one word again: that is how the reference gets it.
        assert all(split(word) == [word] for word in want), text


@pytest.mark.parametrize("name", ["qwen", "llama3", "kimi"])
def test_pieces_learned_by_words_and_alone(name: str, made):
    tokenizer = load(TokenizerRequest("HuggingFaceTokenizer", str(made(name))))
    texts = [*adversarial(tokenizer.special_texts), *fixtures.corpus(200)]
    by_words = tokenizer.remember(tokenizer.reference, tokenizer.special_texts)
    alone = tokenizers.PieceEngine(tokenizer.reference, tokenizer.special_texts)
    assert by_words._split is not None and alone._split is None
    for engine in (by_words, alone):
        engine.encode_many(texts)
    assert by_words._known == alone._known
    assert len(by_words._words) < len(by_words._known)


def test_memory_of_pieces_is_bounded(made, monkeypatch):
    monkeypatch.setattr(tokenizers, "_MOST_PIECES", 100)
    tokenizer = load(TokenizerRequest("HuggingFaceTokenizer", str(made("qwen"))))
    engine = tokenizers.PieceEngine(tokenizer.reference, tokenizer.special_texts)
    by_words = tokenizer.remember(tokenizer.reference, tokenizer.special_texts)
    for number in range(300):
        for each in (engine, by_words):
            each.encode_many([f"word{number} other{number:c} {'x' * 100}"])
    for known in (engine._known, by_words._known, by_words._words):
        assert len(known) < 120
        assert all(len(piece) <= 64 for piece in known)


def test_text_that_may_not_be_cut_is_not(tmp_path: Path, made):
    from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

    assert load(TokenizerRequest("LlamaTokenizer", str(made("metaspace")))).remember is None
    assert load(TokenizerRequest("LlamaTokenizer", str(made("sentencepiece")))).remember is None
    tokenizer = Tokenizer.from_file(str(made("qwen") / "tokenizer.json"))
    assert tokenizers._remember(tokenizer) is not None
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def splits(*regexes: str):
        steps = [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in regexes]
        return pre_tokenizers.Sequence([*steps, level])

    for refused in (
        level,
        splits(r"\p{N}{1,3}"),  # words and the space between them stay together
        splits(fixtures.QWEN, r"[^x]+x"),
        splits(r"\S+\s*"),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
    ):
        tokenizer.pre_tokenizer = refused
        assert tokenizers._remember(tokenizer) is None, refused
    tokenizer.pre_tokenizer = splits(fixtures.QWEN)
    tokenizer.normalizer = normalizers.Lowercase()
    assert tokenizers._remember(tokenizer) is None
