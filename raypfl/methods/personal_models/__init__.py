"""Methods that train a model for every client."""
