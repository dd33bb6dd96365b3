"""Which runs fill the tables of accuracies, what they are compared with, and the tables themselves.

Imports all rooms before it, up to ``runs``.
"""
