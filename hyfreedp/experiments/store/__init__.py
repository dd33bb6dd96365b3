"""Where results are kept: paths, atomic file writes, caches, checkpoints, versions, figures, verdicts."""
