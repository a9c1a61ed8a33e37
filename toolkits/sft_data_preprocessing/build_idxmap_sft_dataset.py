#!/usr/bin/env python3
"""Chats to the token ids, loss mask and boundaries that fine-tuning reads; see the README."""

import sys
from pathlib import Path

# Runs from a checkout that was not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_patch.data.sft_store import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
