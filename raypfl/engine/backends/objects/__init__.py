"""What client actors return and keep in Ray's object store: answers, states and sums."""
