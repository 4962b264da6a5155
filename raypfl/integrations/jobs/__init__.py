"""Jobs: runs, studies and sweeps that a Ray cluster carries out without this machine."""
