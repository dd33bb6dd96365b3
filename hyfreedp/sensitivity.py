"""The kinds of probes and noises, and how much of a probe one record can change.

Accounting takes these sensitivities from here; what :mod:`hyfreedp.privatize` and other probes release keeps to them.
Adjacency is adding or removing one record.
"""

from __future__ import annotations

from typing import Literal

Probe = Literal["votes", "losses", "contrasts", "none"]
LossMechanism = Literal["gaussian", "laplace"]

VOTE_CLIP = 1.0  # each record adds -1, 0 or 1 to the sum of the votes

# Squared L2 sensitivity of the whole probe vector, in units of its clip.
#   votes: each record adds one vote.
#   losses: three losses, each clipped to [0, R_l], so each changes by at most 1.
#   contrasts: (d/R_d, c/R_c) clipped jointly to norm 1, and two indicators of +-1/2: 1 + 1/4 + 1/4.
SQUARED_L2_SENSITIVITY = {"votes": 1.0, "losses": 3.0, "contrasts": 1.5}

# Number of coordinates and the sensitivity of each, when every coordinate has its own Laplace noise.
#   contrasts: |d/R_d| and |c/R_c| are clipped to 1/2 each, like the two indicators.
LAPLACE_SENSITIVITY = {"votes": (1, 1.0), "losses": (3, 1.0), "contrasts": (4, 0.5)}
