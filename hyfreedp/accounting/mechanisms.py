"""What one Poisson batch releases, and how much of one record each release can show.

Adjacency is adding or removing one record; every record enters a batch independently with the sample rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hyfreedp.sensitivity import LAPLACE_SENSITIVITY, SQUARED_L2_SENSITIVITY, LossMechanism, Probe


@dataclass(frozen=True)
class Mechanism:
    """A Gaussian vector and independent Laplace coordinates, released together on one batch.

    A Gaussian vector is dominated by a one-dimensional Gaussian pair at the distance of its L2 sensitivity, a Laplace
    coordinate by a Laplace pair at its own, and the joint release, adaptive or not, by the product of these pairs (Zhu,
    Dong and Wang, AISTATS 2022, Theorem 10). So these three numbers are all that an accountant needs.

    Attributes:
        gaussian: noise multiplier, the standard deviation over the L2 sensitivity; infinite if there is no such part.
        laplace: Laplace scale over the sensitivity of one coordinate; infinite if there is no such part.
        coordinates: number of Laplace coordinates.
    """

    gaussian: float = math.inf
    laplace: float = math.inf
    coordinates: int = 0

    def with_gaussian(self, noise_multiplier: float) -> Mechanism:
        """This release and one more Gaussian on the same batch: sigma_eff^-2 is the sum of the sigma_i^-2."""
        return Mechanism(1 / math.hypot(1 / self.gaussian, 1 / noise_multiplier), self.laplace, self.coordinates)


# A mechanism and the number of batches, each sampled afresh, that it is applied to.
Release = tuple[Mechanism, int]


def probe_mechanism(probe: Probe, sigma_loss: float, loss_mechanism: LossMechanism) -> Mechanism:
    """The release of all numbers of one probe.

    Args:
        probe: "votes", "losses" or "contrasts".
        sigma_loss: sigma_l, the noise of each coordinate in units of its clip: standard deviation for Gaussian noise,
            scale b (standard deviation sqrt(2) b) for Laplace noise.
        loss_mechanism: "gaussian" or "laplace".
    """
    if loss_mechanism == "gaussian":
        return Mechanism(gaussian=sigma_loss / math.sqrt(SQUARED_L2_SENSITIVITY[probe]))
    coordinates, sensitivity = LAPLACE_SENSITIVITY[probe]
    return Mechanism(laplace=sigma_loss / sensitivity, coordinates=coordinates)


def separate_probe_releases(
    probe: Probe, sigma_loss: float, loss_mechanism: LossMechanism, count: int
) -> tuple[Release, ...]:
    """``count`` probes counted as if none shared a batch with anything else (Alg. 2, line 8).

    The three losses are then three scalar releases of sensitivity 1, hence the paper's 3T/K; votes are one number,
    and contrasts are clipped jointly and stay one vector.
    """
    if probe != "losses":
        return ((probe_mechanism(probe, sigma_loss, loss_mechanism), count),)
    scalar = Mechanism(sigma_loss) if loss_mechanism == "gaussian" else Mechanism(laplace=sigma_loss, coordinates=1)
    return ((scalar, 3 * count),)


def merge(releases: Iterable[Release]) -> tuple[Release, ...]:
    """Join releases of the same mechanism; Gaussian multipliers equal to 1e-12 count as the smaller of them."""
    merged: list[Release] = []
    for mechanism, count in sorted(releases, key=lambda r: (r[0].laplace, r[0].coordinates, r[0].gaussian)):
        if count == 0:
            continue
        last, last_count = merged[-1] if merged else (None, 0)
        if last and (last.laplace, last.coordinates) == (mechanism.laplace, mechanism.coordinates):
            if math.isclose(last.gaussian, mechanism.gaussian, rel_tol=1e-12):
                merged[-1] = (last, last_count + count)
                continue
        merged.append((mechanism, count))
    return tuple(merged)
