"""Ready graphs, each one screen long; the same code that users write."""
