"""Attacks on our own releases, and the lower bounds on epsilon that they prove.

Imports all rooms before it, up to ``studies``.
"""
