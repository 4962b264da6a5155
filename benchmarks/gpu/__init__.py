"""The first hour on a GPU: what it computes, whether it is right, and how fast, the most valuable first.

    python -m benchmarks.gpu                                # about eight minutes on one GPU
    python -m benchmarks.gpu --steps methods copies         # go on with some steps, in the same file
    python -m benchmarks.gpu --device cpu --quick           # a rehearsal of every step, in two minutes

It needs torch and NumPy only: no Ray, no PyArrow. Every number is printed as soon as it is known, and appended to a
file of JSON lines, so that it may be cut off at any time. A step is a process of its own: one that crashes, hangs or
breaks CUDA costs the others nothing. Images are noise.
"""
