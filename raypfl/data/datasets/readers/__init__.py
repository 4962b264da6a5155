"""Readers of data sets, one file a format or data set."""
