"""Where things are kept: paths, files written whole, caches, checkpoints, what a result was made with, figures."""
