"""Methods whose clients train a part of the global model's units, for clients of unequal capacity."""
