"""What client actors return and keep in Ray's object store: replies, states and sums."""
