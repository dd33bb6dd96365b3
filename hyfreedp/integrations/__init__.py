"""Private training with the trainers of other libraries, one module each; ``import hyfreedp`` imports neither.

Checkpoints of both trainers may be published: the key of all noise is in a separate file.
"""
