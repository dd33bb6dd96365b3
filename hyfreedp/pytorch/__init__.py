"""What PyTorch asks of us: the optimizer's interface, the wrapped optimizer, layers, devices, files, step records."""
