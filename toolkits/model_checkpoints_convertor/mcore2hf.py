#!/usr/bin/env python3
"""A Megatron checkpoint to Hugging Face safetensors; see the README beside this file."""

import sys
from pathlib import Path

# Runs from a checkout that was not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_patch.convert.commands import mcore2hf

if __name__ == "__main__":
    sys.exit(mcore2hf(sys.argv[1:]))
