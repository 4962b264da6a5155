"""A job, as each system runs it: every module's ``run(order)`` goes on until it is stopped."""
