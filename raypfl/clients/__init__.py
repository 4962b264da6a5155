"""The clients' side of a round: groups of clients, their state and their local training."""
