"""What outlives a process: clients' states, tables, checkpoints, and the lease on a run."""
