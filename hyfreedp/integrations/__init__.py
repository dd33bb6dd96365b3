"""Private training by other libraries' loops, each in a module of its own that imports the library.

Nothing here is imported by ``import hyfreedp``. Both loops save the state of the optimizer, which holds the key of all
noise, into their checkpoints: keep these as secret as the data, and publish the model alone.
"""
