"""What the settings of a run leave open, settled before it starts: its executor, the actors that share a GPU."""
