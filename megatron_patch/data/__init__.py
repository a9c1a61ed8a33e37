"""From documents and messages to what a training step reads."""
