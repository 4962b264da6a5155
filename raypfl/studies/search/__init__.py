"""Searches of studies: equally many trials for every method, of which validation data choose the best."""
