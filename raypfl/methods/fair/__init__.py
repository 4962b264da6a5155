"""Methods whose model is to be good for every client, not only on average."""
