#!/usr/bin/env python3
"""Text to the .bin/.idx pair that Megatron-Core trains on; see the README beside this file."""

import sys
from pathlib import Path

# Runs from a checkout that was not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_patch.data.text import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
