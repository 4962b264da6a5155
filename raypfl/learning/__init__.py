"""Local training of a group of models: batches, executors, steps."""
