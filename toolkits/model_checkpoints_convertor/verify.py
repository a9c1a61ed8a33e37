#!/usr/bin/env python3
"""Do a Hugging Face directory and a Megatron checkpoint hold the same model? See the README."""

import sys
from pathlib import Path

# Runs from a checkout that was not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_patch.convert.commands import verify

if __name__ == "__main__":
    sys.exit(verify(sys.argv[1:]))
