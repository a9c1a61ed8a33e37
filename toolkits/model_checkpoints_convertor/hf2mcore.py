#!/usr/bin/env python3
"""Hugging Face safetensors to a Megatron checkpoint; see the README beside this file."""

import sys
from pathlib import Path

# Runs from a checkout that was not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_patch.convert.commands import hf2mcore

if __name__ == "__main__":
    sys.exit(hf2mcore(sys.argv[1:]))
