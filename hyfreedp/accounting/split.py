"""How the noise of a run is split between gradients and probes, and which steps probe."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from hyfreedp.accounting.accountants import Accountant
from hyfreedp.checks import check_choice, check_count, check_number, check_type

Allocation = Literal["per_step", "constant"]
Probe = Literal["look", "losses", "none"]

# Larger values would take minutes, or all memory, to account for.
MOST_STEPS, MOST_RECORDS_PER_PERSON = 10**7, 1000

# By how much one record can change a probe. Accounting and releases both take it from here.
VOTE_CLIP = 1.0  # each record adds a number in [-1, 1] to each sum of votes
VOTES = 10  # sums of votes in one look
# Squared L2 sensitivity of a probe as one vector, in units of its clip: ten sums of votes; three losses in [0, R_l].
SQUARED_L2_SENSITIVITY = {"look": float(VOTES), "losses": 3.0}


@dataclass(frozen=True)
class NoiseSplit:
    """How one privacy budget is split between gradients and probes (Alg. 2). Made by :func:`calibrate_noise`.

    Attributes:
        target_epsilon, target_delta, sample_rate, steps, interval, warmup_steps, vote_steps, probe, gamma, accountant,
            allocation, records_per_person: arguments of :func:`calibrate_noise`.
        sigma: noise multiplier of DP-SGD without probes at the same budget.
        sigma_gradient: noise multiplier of the gradient in steps without probe.
        sigma_gradient_probe: the same in steps with a probe.
        sigma_loss: sigma_l, standard deviation of the noise of each number of a probe, in units of its clip.
        epsilon: of the whole run at ``target_delta``, an upper bound by ``accountant``.
    """

    target_epsilon: float
    target_delta: float
    sample_rate: float
    steps: int
    interval: int
    warmup_steps: int
    vote_steps: tuple[int, ...]
    probe: Probe
    gamma: float
    accountant: Accountant
    allocation: Allocation
    sigma: float
    sigma_gradient: float
    sigma_gradient_probe: float
    sigma_loss: float
    epsilon: float
    records_per_person: int = 1

    def __post_init__(self) -> None:
        """ValueError or TypeError for a field out of range; sorts ``vote_steps``."""
        steps = check_count("steps", self.steps, 1, MOST_STEPS, "the most accounted for")
        for name, choices in (("probe", Probe), ("accountant", Accountant), ("allocation", Allocation)):
            check_choice(name, getattr(self, name), choices)
        check_type("vote_steps", self.vote_steps, Sequence, "the steps with a look, a list of integers")
        votes = tuple(sorted(check_count("vote_steps", step, 0, steps - 1, "steps - 1") for step in self.vote_steps))
        if len(set(votes)) < len(votes) or (votes and self.probe != "look"):
            raise ValueError(f"vote_steps must differ, and be left out unless probe='look', got {self.vote_steps!r}")
        counts: dict[str, Any] = {"steps": steps, "vote_steps": votes}
        if self.probe == "losses":
            counts["interval"] = check_count("interval", self.interval, 1, steps, "steps")
            counts["warmup_steps"] = check_count("warmup_steps", self.warmup_steps, 0, steps, "steps")
        counts["sample_rate"] = check_number("sample_rate", self.sample_rate, "(0, 1]")
        counts["target_delta"] = check_number("target_delta", self.target_delta, "(0, 1)")
        counts["records_per_person"] = check_count(
            "records_per_person", self.records_per_person, 1, MOST_RECORDS_PER_PERSON, "the most accounted for"
        )
        vars(self).update(counts)

    @property
    def probe_steps(self) -> int:
        """Number of steps with a probe among ``steps``."""
        return self.probe_steps_before(self.steps)

    @property
    def unit(self) -> str:
        """What neighbouring data sets differ in, as text."""
        return "one record" if self.records_per_person == 1 else f"one person's {self.records_per_person} records"

    @property
    def guarantee(self) -> bool:
        """Whether the run provably stays within a finite target, as with every split of :func:`calibrate_noise`."""
        return self.epsilon <= self.target_epsilon < math.inf

    def is_probe_step(self, t: int) -> bool:
        """Whether step t = 0, 1, ... has a look, or a line search (in the warm-up, then every ``interval`` steps)."""
        if self.probe != "losses":
            return t in self.vote_steps
        return t < self.warmup_steps or (t - self.warmup_steps) % self.interval == 0

    def probe_steps_before(self, t: int) -> int:
        """Number of steps with a probe among 0, ..., t - 1, see :meth:`is_probe_step`."""
        if self.probe != "losses":
            return sum(step < t for step in self.vote_steps)
        return min(t, self.warmup_steps) + math.ceil(max(t - self.warmup_steps, 0) / self.interval)

    def gradient_noise_multiplier(self, t: int) -> float:
        """Noise multiplier of the gradient at step t = 0, 1, ..."""
        return self.sigma_gradient_probe if self.is_probe_step(t) else self.sigma_gradient

    def to_dict(self) -> dict[str, Any]:
        """All fields and ``probe_steps``, as plain JSON values; ``records_per_person`` only if it is not 1."""
        fields = dataclasses.asdict(self) | {"vote_steps": list(self.vote_steps), "probe_steps": self.probe_steps}
        if self.records_per_person == 1:
            del fields["records_per_person"]
        return fields

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`; ``probe_steps`` is ignored. ValueError for missing, unknown or wrong fields."""
        try:
            return cls(**{name: value for name, value in values.items() if name != "probe_steps"})
        except TypeError as error:
            raise ValueError(f"the values must be those of NoiseSplit.to_dict(): {error}") from None

    def check_noise(self) -> None:
        """ValueError unless the noise of all releases is positive and finite."""
        check_number("split.sigma_gradient", self.sigma_gradient, "(0, inf)")
        check_number("split.sigma_gradient_probe", self.sigma_gradient_probe, "(0, inf)")
        if self.probe_steps:
            check_number("split.sigma_loss", self.sigma_loss, "(0, inf)")

    def __str__(self) -> str:
        if math.isinf(self.target_epsilon):
            return f"no noise (non-private), {self.probe_steps} of {self.steps} steps probe"
        privacy = f"epsilon {self.epsilon:.5g} at delta {self.target_delta:g}, of {self.unit}"
        if self.probe == "none":
            return f"sigma {self.sigma:.6g} on all {self.steps} steps: {privacy}"
        return (
            f"sigma_g {self.sigma_gradient:.6g} on {self.steps - self.probe_steps} steps, "
            f"{self.sigma_gradient_probe:.6g} on {self.probe_steps} steps with probe, "
            f"sigma_l {self.sigma_loss:.6g}, vanilla sigma {self.sigma:.6g}: {privacy}"
        )
