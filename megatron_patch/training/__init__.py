"""Arguments, preflight, batches, loss and the training step."""
