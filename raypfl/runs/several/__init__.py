"""Several runs at a time: which go together, in which processes, and how they end."""
