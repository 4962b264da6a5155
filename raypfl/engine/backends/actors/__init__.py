"""The client actors of a run: how many there are, what is checked of them, and when they are replaced."""
