"""Real open-weight models on pip-installed Megatron-Core, without touching a line of it.

Importing this package does nothing but name its version: no torch, no megatron, no patch.
"""

__version__ = "0.1.0"
