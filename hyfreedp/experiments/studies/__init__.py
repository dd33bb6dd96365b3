"""What notebooks compute and draw beside the tables: one module per question.

Imports all rooms before it, up to ``tables``.
"""
