"""What a run has reached, and how it is kept: its tables, its clients' states and its checkpoints."""
