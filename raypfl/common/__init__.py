"""What every room uses and what knows nothing of federated learning: errors, files, keyed random draws, registries."""
