#!/usr/bin/env python3
"""Fine-tune a Hugging Face directory on chats with whatever this machine has; see README.md.

python examples/qwen3/train_sft.py --model-name-or-path HF --data-path train.jsonl --output-dir OUT
"""

import os
import sys
from pathlib import Path

# Runs from a checkout that was not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_patch.launch.__main__ import main

#: The same flag on the command line wins.
DEFAULTS = ("--num-train-epochs", "3", "--lr", "1e-5")

if __name__ == "__main__":
    # So do the ranks that it starts.
    folders = [sys.path[0], os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    asked = [flag for flag in sys.argv[1:] if flag in ("--help", "-h", "--help-all")]
    if asked:
        sys.exit(main(["help-run", __file__, asked[0]]))
    count = str(len(DEFAULTS))
    sys.exit(main(["run", "sft", __file__, count, *DEFAULTS, "--sft", *sys.argv[1:]]))
