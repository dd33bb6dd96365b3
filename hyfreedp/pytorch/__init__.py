"""The side towards PyTorch: the optimizer's interface, the wrapped optimizer, layers, devices, files, step records."""
