"""Methods whose clients share a part of the network and keep the rest."""
