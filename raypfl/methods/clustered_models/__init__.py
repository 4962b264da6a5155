"""Methods that train one model for each of a few clusters of clients."""
