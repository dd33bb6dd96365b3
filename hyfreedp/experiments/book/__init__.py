"""The notebooks as files: executing them, alone and in batch, their parameters, and the page made of them."""
