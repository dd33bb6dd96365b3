"""What the tables compare with and the core does not hold: adaptive clipping, and the former default's line search.

Imports the core alone.
"""
