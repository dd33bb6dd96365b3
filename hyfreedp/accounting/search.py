"""Search for the smallest noise that meets a budget, ending on the private side."""

from __future__ import annotations

import math
from collections.abc import Callable

TOLERANCE = 2e-7  # relative distance of the result from the smallest noise that meets the budget
LARGEST_NOISE = 1e8  # a budget that needs more counts as infeasible
SMALLEST_NOISE = 0.05  # with less, the exponential of a step's privacy loss overflows in dp-accounting


def smallest_noise(cost: Callable[[float], float], budget: float, start: float, tolerance: float = TOLERANCE) -> float:
    """The smallest noise whose cost is at most the budget, or larger by a relative ``tolerance`` at most.

    ``cost`` must fall with the noise, roughly as a power of it. Then log(cost) is nearly linear in log(noise), and
    secant steps within the known bracket need few evaluations, which can take a second each. The returned noise was
    evaluated itself. It is ``SMALLEST_NOISE`` if that is enough, and infinity if ``LARGEST_NOISE`` is not.

    Args:
        cost: epsilon, or a part of it, as a function of the noise; 0 and infinity are allowed.
        budget, start, tolerance: positive; ``start`` is the first noise to try.
    """
    smallest, largest = math.log(SMALLEST_NOISE), math.log(LARGEST_NOISE)
    low, high = -math.inf, math.inf  # log(noise) that is known to be too little, and to be enough
    x, slope = min(max(math.log(start), smallest), largest), -2.0
    previous = None
    while True:
        spent = cost(math.exp(x))  # zero and infinity steer the search without breaking it
        excess = -20.0 if spent <= budget * math.exp(-20) else min(math.log(spent) - math.log(budget), 20.0)
        if previous is not None and (excess - previous[1]) * (x - previous[0]) < 0:
            slope = (excess - previous[1]) / (x - previous[0])
        previous = x, excess
        if excess > 0:
            low = x
        else:
            high = x
            if x == smallest:
                return SMALLEST_NOISE
            if excess >= slope * tolerance:
                return math.exp(x)
        if low == largest:
            return math.inf
        if high - low <= tolerance:
            return math.exp(high)
        step = (slope * tolerance / 2 - excess) / slope
        step = min(max(step, -math.log(4)), math.log(4))
        x = min(max(x + step, smallest), largest)
        if not low < x < high:
            x = (low + high) / 2
