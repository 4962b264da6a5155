"""Plans: what runs will take on their clients' devices, before anything trains."""
