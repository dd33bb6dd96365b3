"""Attacks on our own releases, and the lower bounds on epsilon that they prove."""
