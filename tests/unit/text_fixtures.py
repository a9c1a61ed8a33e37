"""Small real tokenizers and text for the preprocessing tests, made from the standard library."""

from __future__ import annotations

import base64
import functools
import json
import os
from pathlib import Path
from typing import Any

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def corpus(count: int = 60) -> tuple[str, ...]:
    """Real text: modules of the standard library, each cut to a few kilobytes."""
    folder = Path(os.__file__).parent
    texts = []
    for path in sorted(folder.glob("*.py"))[:count]:
        texts.append(path.read_text(encoding="utf-8")[:6000])
    return (
        *texts,
        "中文分词与かな、한국어。Ελλάδα naïve café 😀👩‍👩‍👧",
        "it's WE'LL 1234567\r\n\t x",
    )


def _train(pre_tokenizer: Any, normalizer: Any, specials: list[str], size: int = 1500) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def _save(tokenizer: Any, folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def qwen_like(folder: Path) -> Path:
    """NFC, split regex, byte level; EOS without BOS."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return _save(
        _train(split, normalizers.NFC(), specials),
        folder,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|endoftext|>",
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        },
    )


def llama3_like(folder: Path) -> Path:
    """The post-processor puts a BOS before each text."""
    from tokenizers import pre_tokenizers, processors

    tokenizer = _train(
        pre_tokenizers.ByteLevel(add_prefix_space=False), None, ["<|begin|>", "<|end|>"]
    )
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin|> $A",
                pair="<|begin|> $A <|begin|> $B",
                special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))],
            ),
        ]
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
    }
    return _save(tokenizer, folder, config)


def configured(folder: Path) -> Path:
    """Added tokens that only tokenizer_config.json knows, and flags that have no effect."""
    from tokenizers import pre_tokenizers

    tokenizer = _train(pre_tokenizers.ByteLevel(add_prefix_space=False), None, ["<s>", "</s>"])
    size = tokenizer.get_vocab_size()
    token = {"lstrip": False, "rstrip": False, "single_word": False, "special": True}
    return _save(
        tokenizer,
        folder,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": {"__type": "AddedToken", "content": "<s>", "normalized": True, **token},
            "eos_token": "</s>",
            "pad_token": "<pad-that-is-new>",
            "added_tokens_decoder": {
                str(size): {"content": "<|tool|>", "normalized": False, **token}
            },
        },
    )


def metaspace(folder: Path) -> Path:
    """Llama-2 style: metaspace, byte fallback."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=specials, show_progress=False)
    words = (word for text in corpus() for word in text.split(" "))
    tokenizer.train_from_iterator(words, trainer)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = data["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(data))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    return _save(tokenizer, folder, config)


def gpt2_files(folder: Path) -> Path:
    """vocab.json and merges.txt, as GPT2BPETokenizer takes them."""
    from tokenizers import pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _train(pre_tokenizers.ByteLevel(add_prefix_space=False), None, ["<|endoftext|>"])
    tokenizer.model.save(str(folder))
    return folder


def sentencepiece_model(folder: Path) -> Path:
    """A small BPE ``tokenizer.model`` with byte fallback."""
    import io

    import sentencepiece

    folder.mkdir(parents=True, exist_ok=True)
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in corpus() for line in text.splitlines()]),
        model_writer=out,
        vocab_size=900,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        minloglevel=2,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        max_sentence_length=20000,
    )
    (folder / "tokenizer.model").write_bytes(out.getvalue())
    return folder


def ranks(size: int = 1500) -> dict[bytes, int]:
    """Tiktoken ranks; numbers of several digits among them, so that their splitting shows."""
    from tokenizers import pre_tokenizers

    tokenizer = _train(pre_tokenizers.ByteLevel(add_prefix_space=False), None, [], size)
    alphabet = _byte_alphabet()
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(alphabet[char] for char in text) for text, _ in vocab]
    single = [bytes([i]) for i in range(256)]
    merged = [token for token in tokens if len(token) > 1]
    return {token: rank for rank, token in enumerate(single + merged)}


def _byte_alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in printable)
    return table | {chr(256 + i): byte for i, byte in enumerate(rest)}


def kimi_like(folder: Path) -> Path:
    """``tiktoken.model`` beside the configuration that Kimi's repositories ship."""
    folder.mkdir(parents=True, exist_ok=True)
    table = ranks()
    write_ranks(folder / "tiktoken.model", table)
    base = len(table)
    named = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 254: "[UNK]", 255: "[PAD]"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "TikTokenTokenizer",
                "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
                "bos_token": "[BOS]",
                "eos_token": "[EOS]",
                "added_tokens_decoder": {
                    str(base + i): {"content": text, "special": True} for i, text in named.items()
                },
            }
        )
    )
    return folder


def write_ranks(path: Path, table: dict[bytes, int]) -> None:
    """A ``.tiktoken`` file."""
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in table.items())
    path.write_bytes(b"".join(lines))
