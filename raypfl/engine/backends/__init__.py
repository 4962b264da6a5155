"""Where groups run on Ray: actors, their placement, the cluster."""
