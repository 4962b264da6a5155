"""Sweeps without Ray Tune's own processes: trials that differ in numbers advance together, also under ASHA and PBT."""
