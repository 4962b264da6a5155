"""Whether the parts of a sweep fit together."""
