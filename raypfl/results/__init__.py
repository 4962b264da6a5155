"""Numbers, tables and pictures of finished and running experiments."""
