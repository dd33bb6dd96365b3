"""Tasks, methods, runs and figures of the reproduction. Not part of the core: needs the ``notebooks`` extra.

Its rooms, each importing those before it: ``store``, ``data``, ``models``, ``tasks``, ``baselines`` (the core only),
``runs``, ``tables``, ``studies``, ``audits``; and beside them ``book`` and ``benchmark``.
"""

import warnings

# transformers asks tqdm for a bar of widgets, which no notebook of ours needs and which is missed in every one.
warnings.filterwarnings("ignore", "IProgress not found")
