"""The whole method by brute force, one sample at a time, in the order of the paper. Read this file first.

:func:`train` is Algorithm 1 of the paper; :class:`Looks` is our own rule for the learning rate (preset "robust").
"Eq." and "line" refer to the paper and to its Algorithm 1. The rest of this package computes the same numbers faster,
or accounts for their privacy; ``tests/core/test_exactness.py`` compares the two.

A batch is a list of tensors with the records in dimension 0, such as ``[inputs, labels]``. It is a Poisson sample: each
of the N records is in it with probability q, independently. All sums below are divided by its expected size B = q N,
whatever its actual size. ``loss(model, record)`` returns one number for a record, a batch of one row. ``split`` says
which steps probe, and with how much noise (Alg. 2, :func:`hyfreedp.calibrate_noise`). A run is::

    noise = NoiseGenerator()
    for released in train(model, optimizer, loss, batches, split=split, B=100, noise=noise):
        print(released)
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hyfreedp.accounting import NoiseSplit
from hyfreedp.noise import NoiseGenerator

Batch = list[Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
Function = Callable[[float], float]


def records(batch: Batch) -> list[Batch]:
    """The batch as batches of one row each."""
    return [[tensor[i : i + 1] for tensor in batch] for i in range(len(batch[0]))]


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The trainable weights w."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def losses_of(model: nn.Module, loss: Loss, batch: Batch) -> list[float]:
    """L(w, x_i) of each record."""
    with torch.no_grad():
        return [loss(model, record).item() for record in records(batch)]


# -- releases: noisy sums over the batch, in which each sample's term is bounded ---------------------------------------


def private(sums: list[Tensor], sigma: float, bound: float, B: float, noise: NoiseGenerator) -> list[Tensor]:
    """(sums + sigma bound z) / B, with z standard normal; ``bound`` is the most that one sample adds to any sum."""
    if sigma > 0:
        noise.add_noise(sums, sigma * bound)
    return [total / B for total in sums]


def automatic(norm: float) -> float:
    """c_i of automatic clipping: scales a gradient of any norm to a norm below 1 (§2.1; R_g is scaled out)."""
    return 1 / (norm + 0.01)


def clipped_gradients(model: nn.Module, loss: Loss, batch: Batch, factor: Function) -> list[Tensor]:
    """sum_i c_i g_i (Eq. "priv grad"; lines 2 to 4 without the noise)."""
    weights = trained(model)
    sums = [torch.zeros_like(weight) for weight in weights]
    for record in records(batch):
        gradients = torch.autograd.grad(loss(model, record), weights)  # g_i
        norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
        if math.isfinite(norm):  # else this record counts as zero
            for total, gradient in zip(sums, gradients, strict=True):
                total += factor(norm) * gradient  # of norm at most R_g, to which the noise is scaled
    return sums


def clipped_losses(losses: list[list[float]], threshold: float) -> Tensor:
    """sum_i min(L_i, R_l) of each list of losses (Eq. "loss priv"; line 8)."""
    clipped = [[threshold if math.isnan(x) else min(max(x, 0.0), threshold) for x in row] for row in losses]
    return torch.tensor([math.fsum(row) for row in clipped], dtype=torch.float64)


def finite(losses: list[float]) -> list[float]:
    """Losses clamped to +-1e100; NaN counts as 1e100."""
    return [1e100 if math.isnan(x) else min(max(x, -1e100), 1e100) for x in losses]


def votes(here: list[float], there: list[float], floors: list[float], steepness: float) -> Tensor:
    """Sum of the votes ``steepness * (b - a) / (|a| + |b| + f)``, each clipped to [-1, 1]; then two sums of losses."""
    here, there, total = finite(here), finite(there), 0
    for a, b, f in zip(here, there, finite(floors), strict=True):
        if a or b:
            vote = steepness * ((b - a) / (abs(a) + abs(b) + f))
            total += round(min(max(vote, -1.0), 1.0) * 2**20)  # whole numbers, whose sums are exact
    sums = [sum(min(max(x, -1e6), 1e6) for x in row) for row in (here, there)]
    # The noise is a function of what it is added to. The sums of losses make it depend on them; they are not used.
    return torch.tensor([total / 2**20, *sums], dtype=torch.float64)


# -- Algorithm 1 -------------------------------------------------------------------------------------------------------


def step(model: nn.Module, optimizer: torch.optim.Optimizer, gradient: list[Tensor], eta: float) -> None:
    """Move to w - eta G, where a torch optimizer turns the private gradient into G (Eq. "optimizer"; line 5)."""
    for group in optimizer.param_groups:  # groups keep the ratios of their initial rates
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = eta * (group["initial_lr"] / optimizer.param_groups[0]["initial_lr"])
    for weight, grad in zip(trained(model), gradient, strict=True):
        weight.grad = grad.clone()
    optimizer.step()


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, gradient: list[Tensor], distance: float) -> nn.Module:
    """A copy of the model at w - distance G; the model and its optimizer are not changed."""
    model, optimizer = copy.deepcopy((model, optimizer))
    step(model, optimizer, gradient, distance)
    return model


def literal(slope: float, curvature: float, eta: float) -> float:
    """eta = b / a as printed in the paper (line 11), which may be negative."""
    return slope / curvature if slope and curvature else eta


def gen(slope: float, curvature: float, eta: float, smoothing: float = 0.1) -> float:
    """b / a as in the authors' own code: only if a, b > 0, clamped to [eta / 2, 2 eta], and averaged with eta."""
    if not (slope > 0 and curvature > 0):
        return eta
    return smoothing * min(max(slope / curvature, eta / 2), 2 * eta) + (1 - smoothing) * eta


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batches: Iterable[Batch],
    *,
    split: NoiseSplit,
    B: float,
    noise: NoiseGenerator,
    eta: float | None = None,
    decay: Function = lambda progress: 1.0,
    factor: Function = automatic,
    sensitivity: float = 1.0,
    rule: Callable[[float, float, float], float] = gen,
    threshold: float = 1.0,
    next_threshold: Callable[[list[float]], float] = sum,
) -> Iterator[dict[str, Any]]:
    """Train the model in place; yields after each step its rate ``"eta"`` and the values that were released.

    ``split.probe`` says how the rate is learned: by Algorithm 1 ("losses"), by our own rule ("look"), or not at all
    ("none"). ``factor`` gives c_i and ``sensitivity`` is R_g; the last three arguments are for Algorithm 1 only.
    """
    looks = None
    if split.probe == "look":
        looks = Looks(model, optimizer, split.steps, split.sigma_gradient * sensitivity / B, eta, decay)
    eta = eta or 1e-4
    for t, batch in enumerate(batches):
        released: dict[str, Any] = {}
        if looks and split.is_probe_step(t):
            released = looks.look(t, model, loss, batch, split.sigma_loss, B, noise.child("look", t))
        sums = clipped_gradients(model, loss, batch, factor)  # lines 2 to 4
        m = private(sums, split.gradient_noise_multiplier(t), sensitivity, B, noise.child("gradient", t))  # line 4
        if looks:
            eta = looks.rate(m)
        elif split.is_probe_step(t):  # line 6
            points = [stepped(model, optimizer, m, x) for x in (eta, 0.0, -eta)]  # line 7
            losses = clipped_losses([losses_of(point, loss, batch) for point in points], threshold)
            ahead, here, behind = private([losses], split.sigma_loss, threshold, B, noise.child("probe", t))[0].tolist()
            # b and a of L(w - x G) = L(w) - b x + a x^2 / 2 through the points x = eta, 0, -eta (Eq. "curve fit")
            slope, curvature = (behind - ahead) / (2 * eta), (ahead - 2 * here + behind) / eta**2  # lines 9 and 10
            released = {"private_loss": here, "loss_threshold": threshold, "slope": slope, "curvature": curvature}
            if math.isfinite(threshold):  # infinite in runs without noise
                threshold = min(max(next_threshold([ahead, here, behind]), 0.1), 20.0)  # R_l of the next probe (§4.1)
            eta = rule(slope, curvature, eta)  # line 11
        taken = eta * decay(t / split.steps)
        step(model, optimizer, m, taken)  # lines 5 and 13
        if looks:
            looks.average(t)
        yield {"eta": taken} | released


# -- our rule: a public start, and looks along the run -----------------------------------------------------------------

LADDER = [2.0**octave for octave in range(5, -6, -1)]  # the rates that a look compares, as multiples of the first


class Looks:
    """Preset "robust": a public first rate; before some steps, the records of the batch vote on the rate of the run.

    :mod:`hyfreedp.look` explains it. After the last step the weights are an average of those after each step.

    Args:
        model, optimizer: the model, and the torch optimizer over its weights.
        T: number of steps of the run.
        std: standard deviation of the noise in each entry of a private gradient.
        eta: the first rate; None for the public one.
        decay: the factor on the rate as a function of the share of the run that is done.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, T: int, std: float, eta: float | None, decay: Function
    ):
        self.ratios: dict[nn.Parameter, float] = {}  # of each weight's rate to that of the first group
        for group in optimizer.param_groups:
            for w in group["params"]:
                if w.requires_grad:
                    self.ratios[w] = group["lr"] / optimizer.param_groups[0]["lr"]
        self.weights = list(self.ratios)
        self.tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
        of_norms = [getattr(m, "weight", None) for m in model.modules() if "Norm" in type(m).__name__]
        scales = [w for w in of_norms if w in self.ratios and w.dim() == 1]
        pretrained = [w for w in scales if w.min() < w.max()]  # not as they are initialised
        self.largest = min([0.55 / (self.ratios[w] * len(w) ** 0.5) for w in pretrained], default=math.inf)  # of c_0
        self.fresh = {len(w) for w in scales} - {len(w) for w in pretrained}  # widths of a transformer not pre-trained
        self.momentum = optimizer.param_groups[0].get("momentum", 0.0)
        self.T, self.eta, self.factors = T, eta, [decay(s / T) for s in range(T)]
        self.reach, proportional = reach_of(optimizer, T)
        self.unit = (std or math.nan) if proportional else 1.0  # size of the gradient's entries, if it matters
        self.start = self.mean = self.now()
        self.level = 1.0  # the current rate, as a multiple of the first

    def now(self) -> list[Tensor]:
        """A copy of the current weights."""
        return [weight.detach().clone() for weight in self.weights]

    def move(self, share: float, displacement: list[Tensor]) -> None:
        """Set the weights to the initial ones plus ``share * displacement``."""
        for weight, initial, d in zip(self.weights, self.start, displacement, strict=True):
            weight.data.copy_(initial + share * d)

    def first(self) -> float:
        """The first rate; NaN while the size of gradients is unknown."""
        if self.eta:
            return self.eta
        inputs = 0.0  # of all layers together; a vector counts as 1
        for weight, ratio in self.ratios.items():
            n: float = weight[0].numel() if weight.dim() > 1 and len(weight) > 1 else 1
            if weight in self.tables:  # a record uses between 1 and all of its rows
                n = max(n, len(weight) / 2 if n in self.fresh else len(weight) ** 0.5)
            inputs += ratio**2 * n
        return min(6 / math.sqrt(inputs), self.largest) / (math.sqrt(self.T) * self.reach * self.unit)

    def noise_to_come(self, t: int) -> float:
        """Standard deviation of the noise that a look before step t adds to each weight, at the first rate."""
        ahead = sum(factor**2 for factor in self.factors[t:])
        made = sum(factor * (1 - self.momentum ** (t - s)) for s, factor in enumerate(self.factors[:t]))
        share = made / sum(self.factors)  # of the schedule
        return math.sqrt(ahead * share**0.75) * self.first() * self.reach * self.unit

    def look(
        self, t: int, model: nn.Module, loss: Loss, batch: Batch, sigma: float, B: float, noise: NoiseGenerator
    ) -> dict[str, Any]:
        """Vote by the losses of the batch at all rates of the ladder, and move half of the way that the votes lead."""
        displacement = [now - initial for now, initial in zip(self.now(), self.start, strict=True)]
        ray, public, std = [], NoiseGenerator(0).child("look", t), self.noise_to_come(t)
        for i, (d, ratio) in enumerate(zip(displacement, self.ratios.values(), strict=True)):
            z = public.child("z", i).normal(*d.shape).to(d.dtype)
            ray.append(d / self.level + std * ratio * z)
        losses = []
        for rung in LADDER:
            self.move(rung, ray)
            losses.append(losses_of(model, loss, batch))
        self.move(0.0, ray)
        floors = [0.003 * abs(initial) for initial in losses_of(model, loss, batch)]
        margins = dict[int, float]()
        clear = 2 * sigma / B  # two standard deviations of the noise of a margin
        steepness = max(1.0, clear / 0.05)

        def margin(j: int) -> float:
            """The private margin of rate j over rate j + 1, the next lower; released when first needed."""
            if j not in margins and sigma:
                voted = votes(losses[j], losses[j + 1], floors, steepness)
                margins[j] = private([voted], sigma, 1.0, B, noise)[0][0].item()
            elif j not in margins:  # without privacy, the difference of the mean losses
                margins[j] = (math.fsum(finite(losses[j + 1])) - math.fsum(finite(losses[j]))) / B
            return margins[j]

        before = self.level
        chosen = lead(margin, before, clear)
        self.level = before * (chosen / before) ** 0.5
        along = self.level / before
        if t > 1:
            along = min(1.0, along)  # after the first look, weights move only towards the initial ones
        self.move(along, displacement)
        return {"margins": [margins.get(j) for j in range(len(LADDER) - 1)], "along": along}

    def rate(self, m: list[Tensor]) -> float:
        """The rate of this step, whose private gradient is m; 0 while the size of gradients is unknown."""
        if math.isnan(self.unit):  # SGD without noise: take the size of the first gradient that is not zero
            self.unit = torch.cat([g.flatten() for g in m]).double().square().mean().sqrt().item() or math.nan
        return 0.0 if math.isnan(self.first()) else self.first() * self.level

    def average(self, t: int) -> None:
        """Add the weights to their average, in which those after t steps count about as t^8; the run ends at it."""
        share = 9 / (t + 9)
        self.mean = [mean + share * (now - mean) for mean, now in zip(self.mean, self.now(), strict=True)]
        if t == self.T - 1:
            self.move(1.0, [mean - initial for mean, initial in zip(self.mean, self.start, strict=True)])


def reach_of(optimizer: torch.optim.Optimizer, T: int) -> tuple[float, bool]:
    """How far a gradient of entries of size 1 moves each weight in all, at rate 1; whether size 2 moves twice as far.

    RMSprop moves them farther by earlier gradients than by later ones: then the root mean square over T steps.
    """
    group = optimizer.param_groups[0]
    if "betas" in group:  # Adam and its variants scale each entry of a gradient to size 1
        return 1.0, False
    repeated = sum(group["momentum"] ** s for s in range(10**4))  # over the steps that momentum keeps a gradient
    if "alpha" in group:  # RMSprop divides by the root of an average of squares, which starts at 0: too small at first
        return repeated * math.sqrt(sum(1 / (1 - group["alpha"] ** t) for t in range(1, T + 1)) / T), False
    return repeated * (1 - group["dampening"]), True  # SGD


def lead(margin: Callable[[int], float], level: float, needed: float) -> float:
    """From rate ``level`` go up while the margin is above ``needed``, or down while it is below ``-needed``."""

    def between(place: int) -> float:
        """The margin at 2^(place / 32) times the first rate; margin(j) lies half-way between rates j and j + 1."""
        j = min(max(4.5 - place / 32, 0.0), 9.0)
        left = math.floor(j)
        if j == left:
            return margin(left)
        return (1 - (j - left)) * margin(left) + (j - left) * margin(left + 1)

    begin = place = min(max(round(32 * math.log2(level)), -160), 160)
    while place < 160 and between(place) > needed:
        place += 1
    while place > -160 and between(place) < -needed:
        place -= 1
    return level if place == begin else 2 ** (place / 32)
