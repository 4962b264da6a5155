"""raypfl's methods beside fluke's: the same accuracy? See `benchmarks.parity.__main__`."""
