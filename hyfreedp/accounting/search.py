"""Search for the smallest noise multiplier that meets a budget; the result never exceeds the budget."""

import math
from collections.abc import Callable

TOLERANCE = 2e-7  # by which the result may be larger than necessary, relatively
LARGEST_NOISE = 1e8  # a budget that needs more counts as infeasible
SMALLEST_NOISE = 0.05  # with less, the exponential of a step's privacy loss overflows in dp-accounting


def smallest_noise(cost: Callable[[float], float], budget: float, start: float, tolerance: float = TOLERANCE) -> float:
    """The smallest noise whose cost is at most the budget, up to a relative ``tolerance`` above it.

    ``cost`` must fall with the noise, roughly as a power of it. Then log(cost) is nearly linear in log(noise), and
    secant steps within a bracket need few evaluations, each of which can take a second. The returned noise was itself
    evaluated. It is ``SMALLEST_NOISE`` if that is enough, and infinity if ``LARGEST_NOISE`` is not.

    Args:
        cost: epsilon, or a part of it, as a function of the noise; may return 0 and infinity.
        budget, start, tolerance: positive; ``start`` is the first noise to try.
    """
    smallest, largest = math.log(SMALLEST_NOISE), math.log(LARGEST_NOISE)
    low, high = -math.inf, math.inf  # the largest log(noise) known to be too small, the smallest known to be enough
    x, slope = min(max(math.log(start), smallest), largest), -2.0
    previous = None
    while True:
        spent = cost(math.exp(x))  # below, 0 and infinity are clamped: they only say in which direction to go
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
