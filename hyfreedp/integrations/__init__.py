"""Private training with the trainers of other libraries, one module each, not imported by ``import hyfreedp``.

Checkpoints of both trainers can be published: the key of all noise is in a separate file.
"""
