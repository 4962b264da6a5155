"""A round as the server sees it: the method, the cohort, the ledger."""
