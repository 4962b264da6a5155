"""raypfl beside a bare PyTorch loop and the simulators that researchers use; see `benchmarks.peers.__main__`."""
