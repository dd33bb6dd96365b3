"""Tasks, methods, runs and figures of the reproduction. Not part of the core: needs the ``notebooks`` extra."""
