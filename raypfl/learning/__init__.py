"""Local training of a group of models: batches, losses, executors and augmentation."""
