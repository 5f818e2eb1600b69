"""Ways to start workers; each drives the same scheduler."""
