"""Times a spec's kernels and its baselines in one process, and says on what the figures rest."""
