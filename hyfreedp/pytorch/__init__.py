"""What PyTorch asks of a private optimizer: its interface, the optimizer beneath, layers, devices, files, records."""
