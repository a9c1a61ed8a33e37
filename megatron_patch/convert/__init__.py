"""Weights between Hugging Face files and Megatron checkpoints."""
