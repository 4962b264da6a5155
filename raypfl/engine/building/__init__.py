"""The parts of a prepared experiment: its network, the samples as the network sees them, and their devices."""
