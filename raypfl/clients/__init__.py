"""A group of clients at work."""
