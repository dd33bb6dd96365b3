"""Attacks on our own releases, and lower bounds on epsilon from them."""
