"""Tasks, methods, runs and figures of the reproduction. Not part of the core: needs the ``notebooks`` extra.

Its folders, each of which may import from those before it: ``store``, ``data``, ``models``, ``tasks``, ``baselines``
(imports the core only), ``runs``, ``tables``, ``studies``, ``audits``; and beside them ``book`` and ``benchmark``.
"""

import warnings

# tqdm warns of this in every notebook when transformers is imported: widgets, which we do not use, are not installed.
warnings.filterwarnings("ignore", "IProgress not found")
