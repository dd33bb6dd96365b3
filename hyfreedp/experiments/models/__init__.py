"""Models: small networks, ViTs and language models, and their public weights."""
