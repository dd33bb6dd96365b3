"""Private training by other libraries' loops, each in a module of its own that imports the library.

Nothing here is imported by ``import hyfreedp``. Checkpoints that both loops save can be published: the key of all noise
lies beside them, in a file of its own.
"""
