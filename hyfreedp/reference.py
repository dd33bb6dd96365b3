"""The method by brute force: one sample at a time, in the order of the paper. Read this file first.

:func:`train` is Algorithm 1 of the paper, with our own rule for the learning rate (preset "robust") in :class:`Looks`.
"Eq." and "line" refer to the paper and to its Algorithm 1. Everything else in this package makes the same numbers
faster, or says what they cost; ``tests/core/test_exactness.py`` compares the two.

A batch is a list of tensors with the records in dimension 0, as ``[inputs, labels]``. It is a Poisson sample: each of
the N records is in it with probability q, independently. Its expected size is B = q N, and B divides all sums below,
whatever size the batch has. ``loss(model, record)`` returns one number, and a record is a batch of one row. ``split``
says which steps probe, with how much noise (Alg. 2, :func:`hyfreedp.calibrate_noise`). So a run is::

    noise = NoiseGenerator()
    for released in train(model, optimizer, loss, batches, split=split, B=100, noise=noise):
        print(released)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hyfreedp.accounting import NoiseSplit
from hyfreedp.look import displacement_per_gradient
from hyfreedp.noise import NoiseGenerator

Batch = list[Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
Function = Callable[[float], float]


def records(batch: Batch) -> list[Batch]:
    """The batch as batches of one row each."""
    return [[tensor[i : i + 1] for tensor in batch] for i in range(len(batch[0]))]


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The weights w that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def losses_of(model: nn.Module, loss: Loss, batch: Batch) -> list[float]:
    """L(w, x_i) of each record."""
    with torch.no_grad():
        return [loss(model, record).item() for record in records(batch)]


# -- what is released: sums over the batch of what is bounded for each sample, with noise ------------------------------


def private(sums: list[Tensor], sigma: float, bound: float, B: float, noise: NoiseGenerator) -> list[Tensor]:
    """(sums + sigma bound z) / B, with z standard normal; no sample has added more than ``bound`` to any of them."""
    if sigma > 0:
        noise.add_noise(sums, sigma * bound)
    return [total / B for total in sums]


def automatic(norm: float) -> float:
    """c_i of automatic clipping: a gradient of norm below 1, whatever its norm was (§2.1; R_g is scaled out)."""
    return 1 / (norm + 0.01)


def clipped_gradients(model: nn.Module, loss: Loss, batch: Batch, factor: Function) -> list[Tensor]:
    """sum_i c_i g_i (Eq. "priv grad"; lines 2 and 3)."""
    weights = trained(model)
    sums = [torch.zeros_like(weight) for weight in weights]
    for record in records(batch):
        gradients = torch.autograd.grad(loss(model, record), weights)  # g_i
        norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
        if math.isfinite(norm):  # else this record counts as zero
            for total, gradient in zip(sums, gradients, strict=True):
                total += factor(norm) * gradient  # at most of norm R_g, which is why the noise hides it
    return sums


def clipped_losses(losses: list[list[float]], threshold: float) -> Tensor:
    """sum_i min(L_i, R_l) of each list of losses (Eq. "loss priv"; line 8)."""
    clipped = [[threshold if math.isnan(one) else min(max(one, 0.0), threshold) for one in row] for row in losses]
    return torch.tensor([math.fsum(row) for row in clipped], dtype=torch.float64)


def finite(losses: list[float]) -> list[float]:
    """Losses within 1e100; NaN counts as the largest."""
    return [1e100 if math.isnan(one) else min(max(one, -1e100), 1e100) for one in losses]


def votes(here: list[float], there: list[float], steepness: float) -> Tensor:
    """The sum of ``(b - a) / (|a| + |b|)`` over records with losses a here and b there, made steeper within [-1, 1]."""
    here, there = finite(here), finite(there)
    total = 0
    for a, b in zip(here, there, strict=True):
        if a or b:
            vote = steepness * ((b - a) / (abs(a) + abs(b)))
            total += round(min(max(vote, -1.0), 1.0) * 2**20)  # whole numbers, whose sums are exact
    bound = [sum(min(max(one, -1e6), 1e6) for one in row) for row in (here, there)]
    # The sums of losses are there so that the noise depends on the losses themselves; they are thrown away.
    return torch.tensor([total / 2**20, *bound], dtype=torch.float64)


# -- Algorithm 1 -------------------------------------------------------------------------------------------------------


def step(model: nn.Module, optimizer: torch.optim.Optimizer, gradient: list[Tensor], eta: float) -> None:
    """w - eta G, where any torch optimizer makes the direction G of the private gradient (Eq. "optimizer"; line 5)."""
    for group in optimizer.param_groups:  # groups keep the ratios of the rates that they were given
        group.setdefault("given", group["lr"])
        group["lr"] = eta * (group["given"] / optimizer.param_groups[0]["given"])
    for weight, its in zip(trained(model), gradient, strict=True):
        weight.grad = its.clone()
    optimizer.step()


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, gradient: list[Tensor], distance: float) -> nn.Module:
    """A copy of the model at w - distance G. The model itself and its optimizer stay as they are."""
    there, its_optimizer = copy.deepcopy((model, optimizer))
    step(there, its_optimizer, gradient, distance)
    return there


def literal(slope: float, curvature: float, eta: float) -> float:
    """eta = b / a as it is printed, negative where the parabola says so (line 11)."""
    return slope / curvature if slope and curvature else eta


def gen(slope: float, curvature: float, eta: float, smoothing: float = 0.1) -> float:
    """b / a as the authors' own code has it: only of a valley, at most halved or doubled, and averaged with eta."""
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
    """A run. Gives after each step its rate and what was released, and is then at the next weights.

    ``split.probe`` says how the rate is learned: from "losses" by Algorithm 1 of the paper, by "look"s of our own rule,
    or not at all. ``factor`` and ``sensitivity`` are c_i and R_g; the last three arguments are those of Algorithm 1.
    """
    looks = None
    if split.probe == "look":
        looks = Looks(model, optimizer, split.steps, split.sigma_gradient * sensitivity / B, eta, decay)
    eta = eta or 1e-4
    for t, batch in enumerate(batches):
        released: dict[str, Any] = {}
        if looks and split.is_probe_step(t):
            released = looks.look(t, model, loss, batch, split.sigma_loss, B, noise.child("look", t))
        sums = clipped_gradients(model, loss, batch, factor)  # lines 2 and 3
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
            if math.isfinite(threshold):  # else there is no noise
                threshold = min(max(next_threshold([ahead, here, behind]), 0.1), 20.0)  # R_l of the next probe (§4.1)
            eta = rule(slope, curvature, eta)  # line 11
        taken = eta * decay(t / split.steps)
        step(model, optimizer, m, taken)  # lines 5 and 13
        if looks:
            looks.average(t)
        yield {"eta": taken} | released


# -- our rule: a public start, and looks along the run -----------------------------------------------------------------


LADDER = [2.0**octave for octave in range(5, -6, -1)]  # the rates that a look compares, over the first one


class Looks:
    """Preset "robust": a public first rate, then before some steps a vote of the batch on rates, along the run so far.

    :mod:`hyfreedp.look` has the reasons. After the last step the weights are an average of those after each step.

    Args:
        model, optimizer: what is trained, and the base optimizer.
        T: steps of the run.
        std: of the noise of each coordinate of a private gradient.
        eta: the first rate; None for the public one.
        decay: what multiplies the rate at a share of the run.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, T: int, std: float, eta: float | None, decay: Function
    ):
        groups = optimizer.param_groups
        rates = [(w, group["lr"] / groups[0]["lr"]) for group in groups for w in group["params"] if w.requires_grad]
        self.weights, self.ratios = zip(*rates, strict=True)
        tables = (nn.Embedding, nn.EmbeddingBag)
        self.tables = {id(layer.weight) for layer in model.modules() if isinstance(layer, tables)}
        norms = [layer for layer in model.modules() if "Norm" in type(layer).__name__]
        scales = [w for layer in norms for name, w in layer.named_parameters(recurse=False) if name == "weight"]
        widths = [len(w) for w in scales if w.dim() == 1 and w.requires_grad and w.min() < w.max()]
        self.most = 0.55 / max(widths) ** 0.5 if widths else math.inf  # c_0 of a model that was trained before
        self.momentum = groups[0].get("momentum", 0.0)
        self.T, self.eta, self.factors = T, eta, [decay(s / T) for s in range(T)]
        self.reach, proportional = displacement_per_gradient(optimizer, T)
        self.unit = (std or math.nan) if proportional else 1.0  # size of a private gradient's coordinates
        self.start = self.mean = self.now()
        self.level = 1.0  # the rate in force, over the first one

    def now(self) -> list[Tensor]:
        """The present weights."""
        return [weight.detach().clone() for weight in self.weights]

    def move(self, share: float, way: list[Tensor]) -> None:
        """Set the weights to those of the start plus a share of the way."""
        for weight, begun, moved in zip(self.weights, self.start, way, strict=True):
            weight.data.copy_(begun + share * moved)

    def first(self) -> float:
        """The first rate; NaN while it is unknown how large gradients are."""
        if self.eta:
            return self.eta
        inputs = 0.0  # of all layers together; 1 for a vector
        for weight in self.weights:
            n: float = weight[0].numel() if weight.dim() > 1 and len(weight) > 1 else 1
            if id(weight) in self.tables:  # its rows are the inputs, of which a record has an unknown number
                n = max(n, len(weight) ** 0.5)
            inputs += n
        return min(6 / math.sqrt(inputs), self.most) / (math.sqrt(self.T) * self.reach * self.unit)

    def noise_to_come(self, t: int) -> float:
        """Standard deviation of a coordinate of the noise that a look before step t adds, at the first rate."""
        ahead = sum(factor**2 for factor in self.factors[t:])
        made = sum(factor * (1 - self.momentum ** (t - s)) for s, factor in enumerate(self.factors[:t]))
        share = made / sum(self.factors)  # of the schedule
        return math.sqrt(ahead * share**0.75) * self.first() * self.reach * self.unit

    def look(
        self, t: int, model: nn.Module, loss: Loss, batch: Batch, sigma: float, B: float, noise: NoiseGenerator
    ) -> dict[str, Any]:
        """Compare the losses of the batch at all rates of the ladder, and move half the way to where votes lead."""
        way = [here - begun for here, begun in zip(self.now(), self.start, strict=True)]
        ray, public = [], NoiseGenerator(0).child("look", t)
        std = self.noise_to_come(t)
        for i, (moved, ratio) in enumerate(zip(way, self.ratios, strict=True)):
            z = public.child("z", i).normal(*moved.shape).to(moved.dtype)
            ray.append(moved / self.level + std * ratio * z)
        losses = []
        for rung in LADDER:
            self.move(rung, ray)
            losses.append(losses_of(model, loss, batch))
        margins = dict[int, float]()
        clear = 2 * sigma / B  # two standard deviations of the noise of a margin
        steepness = max(1.0, clear / 0.05)

        def margin(j: int) -> float:
            """Of rate j over the next lower one; released when it is first asked for."""
            if j not in margins and sigma:
                margins[j] = private([votes(losses[j], losses[j + 1], steepness)], sigma, 1.0, B, noise)[0][0].item()
            elif j not in margins:  # without privacy, of mean losses
                margins[j] = (math.fsum(finite(losses[j + 1])) - math.fsum(finite(losses[j]))) / B
            return margins[j]

        before = self.level
        found = lead(margin, before, clear)
        self.level = before * (found / before) ** 0.5
        along = self.level / before
        if t > 1:
            along = min(1.0, along)  # after the first look weights only come back
        self.move(along, way)
        return {"margins": [margins.get(j) for j in range(len(LADDER) - 1)], "along": along}

    def rate(self, m: list[Tensor]) -> float:
        """The rate in force, once the private gradient is known."""
        if math.isnan(self.unit):  # plain SGD without noise: the size of the first gradient that is not zero
            self.unit = torch.cat([one.flatten() for one in m]).double().square().mean().sqrt().item() or math.nan
        return 0.0 if math.isnan(self.first()) else self.first() * self.level

    def average(self, t: int) -> None:
        """Take the weights into their mean, where those after t steps count as t^8; the run ends there."""
        share = 9 / (t + 9)
        self.mean = [mean + share * (now - mean) for mean, now in zip(self.mean, self.now(), strict=True)]
        if t == self.T - 1:
            self.move(1.0, [mean - begun for mean, begun in zip(self.mean, self.start, strict=True)])


def lead(margin: Callable[[int], float], level: float, needed: float) -> float:
    """From a rate go up while the margin exceeds ``needed``, or down while minus the margin does."""

    def between(place: int) -> float:
        """The margin at a rate, in 32nds of an octave over the first; that of j lies half-way between j and j + 1."""
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
