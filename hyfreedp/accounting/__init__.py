"""End-to-end privacy accounting (Alg. 2): the noise that a budget needs, the epsilon of a run, and its ledger."""

from hyfreedp.accounting.calibrate import calibrate_noise
from hyfreedp.accounting.composition import epsilon
from hyfreedp.accounting.ledger import PrivacyLedger
from hyfreedp.accounting.split import NoiseSplit

__all__ = ["NoiseSplit", "PrivacyLedger", "calibrate_noise", "epsilon"]
