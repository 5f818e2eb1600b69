"""Execution: a pure scheduler, workers that fire nodes, queues between them, and the command line."""
