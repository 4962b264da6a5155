"""A run that is served over HTTP: the service, and its client."""
