"""Methods in which each client's model is mixed from chosen other clients' models."""
