"""What runs in the scheduler: admission, plans, blocks, counts."""
