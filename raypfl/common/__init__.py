"""General tools, independent of federated learning: errors, files, keyed random draws, registries."""
