"""Whether settings, data, network and method fit together, found out before a run starts."""
