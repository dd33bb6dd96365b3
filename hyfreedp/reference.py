"""The method by brute force: one sample at a time, in the order of the paper. Read this file first.

:func:`train` is Algorithm 1 of the paper, :func:`train_by_looks` our own rule for the learning rate (preset "robust").
"Eq." and "line" refer to the paper and to its Algorithm 1. Everything else in this package makes the same numbers
faster, or says what they cost; ``tests/core/test_exactness.py`` compares the two.

A batch is a list of tensors with the samples in dimension 0, as ``[inputs, labels]``. It is a Poisson sample: each of
the N records is in it with probability q, independently. Its expected size is B = q N, and B divides all sums below,
whatever size the batch has. ``loss(model, batch)`` returns one loss for each sample. ``split`` says which steps probe,
and how much noise each release gets (Alg. 2, :func:`hyfreedp.calibrate_noise`). ``noise`` draws it. So a run is::

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

from hyfreedp import look
from hyfreedp.accounting import NoiseSplit
from hyfreedp.noise import NoiseGenerator

Batch = list[Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


def samples(batch: Batch) -> list[Batch]:
    """The batch as batches of one sample each."""
    return [[tensor[i : i + 1] for tensor in batch] for i in range(len(batch[0]))]


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The weights w that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def automatic(norm: float) -> float:
    """c_i of automatic clipping: a gradient of norm below 1, whatever its norm was (§2.1; R_g is scaled out)."""
    return 1 / (norm + 0.01)


# -- what is released: two sums over the batch, with noise -------------------------------------------------------------


def private_gradient(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    sigma: float,
    B: float,
    noise: NoiseGenerator,
    factor: Callable[[float], float] = automatic,
    sensitivity: float = 1.0,
) -> list[Tensor]:
    """m = (sum_i c_i g_i + sigma_g R_g z) / B, with z standard normal (Eq. "priv grad"; lines 2 to 4)."""
    weights = trained(model)
    sums = [torch.zeros_like(weight) for weight in weights]
    for sample in samples(batch):
        gradients = torch.autograd.grad(loss(model, sample).sum(), weights)  # g_i
        norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
        if math.isfinite(norm):  # else this sample counts as zero
            for total, gradient in zip(sums, gradients, strict=True):
                total += factor(norm) * gradient  # at most of norm R_g, which is why this noise hides it
    if sigma > 0:
        noise.add_noise(sums, sigma * sensitivity)
    return [total / B for total in sums]


def losses_of(model: nn.Module, loss: Loss, batch: Batch) -> list[float]:
    """L(w, x_i) of each sample."""
    with torch.no_grad():
        return [loss(model, sample).item() for sample in samples(batch)]


def private_losses(
    losses: list[list[float]], threshold: float, sigma: float, B: float, noise: NoiseGenerator
) -> list[float]:
    """(sum_i min(L_i, R_l) + sigma_l R_l z) / B for each list of losses (Eq. "loss priv"; line 8)."""
    clipped = [[min(max(one, 0.0), threshold) if math.isfinite(one) else threshold for one in row] for row in losses]
    sums = torch.tensor([math.fsum(row) for row in clipped], dtype=torch.float64)
    if sigma > 0:
        noise.add_noise([sums], sigma * threshold)
    return (sums / B).tolist()


# -- Algorithm 1 -------------------------------------------------------------------------------------------------------


def step(model: nn.Module, optimizer: torch.optim.Optimizer, gradient: list[Tensor], eta: float) -> None:
    """w - eta G, where any torch optimizer makes the direction G of the private gradient (Eq. "optimizer"; line 5)."""
    for group in optimizer.param_groups:  # groups keep the ratios of the rates that they were given
        group.setdefault("given", group["lr"])
        group["lr"] = eta * (group["given"] / optimizer.param_groups[0]["given"])
    for weight, private in zip(trained(model), gradient, strict=True):
        weight.grad = private.clone()
    optimizer.step()


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, gradient: list[Tensor], distance: float) -> nn.Module:
    """A copy of the model at w - distance G. The model itself and its optimizer stay as they are."""
    there, its_optimizer = copy.deepcopy((model, optimizer))
    step(there, its_optimizer, gradient, distance)
    return there


def fit(ahead: float, here: float, behind: float, eta: float) -> tuple[float, float]:
    """b and a of L(w - x G) = L(w) - b x + a x^2 / 2 through the points x = eta, 0, -eta (Eq. "curve fit"; line 9)."""
    return (behind - ahead) / (2 * eta), (ahead - 2 * here + behind) / eta**2


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
    rule: Callable[[float, float, float], float] = gen,
    eta: float = 1e-4,
    threshold: float = 1.0,
    next_threshold: Callable[[list[float]], float] = sum,
    limits: tuple[float, float] = (0.1, 20.0),
    decay: Callable[[float], float] = lambda progress: 1.0,
    **clipping: Any,
) -> Iterator[dict[str, float]]:
    """Algorithm 1 of the paper. Gives after each step its rate and what was released, and is then at the next weights.

    Where ``split`` has no probes, this is plain DP training at the rate ``eta``.
    """
    for t, batch in enumerate(batches):
        released = {}
        m = private_gradient(
            model, loss, batch, split.gradient_noise_multiplier(t), B, noise.child("gradient", t), **clipping
        )  # lines 2 to 4
        if split.is_probe_step(t):  # line 6
            points = [stepped(model, optimizer, m, x) for x in (eta, 0.0, -eta)]  # line 7
            losses = [losses_of(point, loss, batch) for point in points]
            private = private_losses(losses, threshold, split.sigma_loss, B, noise.child("probe", t))  # line 8
            released = {"private_loss": private[1], "loss_threshold": threshold}
            threshold = min(max(next_threshold(private), limits[0]), limits[1])  # R_l of the next probe (§4.1)
            ahead, here, behind = private
            slope, curvature = fit(ahead, here, behind, eta)  # lines 9 and 10
            released |= {"slope": slope, "curvature": curvature}
            eta = rule(slope, curvature, eta)  # line 11
        taken = eta * decay(t / split.steps)
        step(model, optimizer, m, taken)  # lines 5 and 13
        yield {"eta": taken} | released


# -- our rule: a public start, and looks along the run -----------------------------------------------------------------


def private_votes(here: list[float], there: list[float], sigma: float, B: float, noise: NoiseGenerator) -> float:
    """(votes for some weights - votes for others + sigma_l z) / B, from the losses of each sample at both."""
    here, there = ([math.inf if math.isnan(one) else one for one in row] for row in (here, there))
    margin = sum((b > a) - (b < a) for a, b in zip(here, there, strict=True))
    bound = [sum(min(max(one, -1e6), 1e6) for one in row) for row in (here, there)]  # ties the noise to the losses
    sums = torch.tensor([margin, *bound], dtype=torch.float64)
    if sigma > 0:
        noise.add_noise([sums], sigma)
    return (sums / B)[0].item()  # the others are thrown away


class Margins:
    """Between the losses at neighbouring rates, drawn one by one where a look asks, and each of them once."""

    def __init__(self, losses: list[list[float]], *noise: Any) -> None:
        self.losses, self.noise = losses, noise
        self.asked: list[float | None] = [None] * (len(losses) - 1)

    def __call__(self, j: int) -> float:
        margin = self.asked[j]
        if margin is None:
            margin = self.asked[j] = private_votes(self.losses[j], self.losses[j + 1], *self.noise)
        return margin


def train_by_looks(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batches: Iterable[Batch],
    *,
    split: NoiseSplit,
    B: float,
    noise: NoiseGenerator,
    sensitivity: float = 1.0,
    eta: float | None = None,
    decay: Callable[[float], float] = lambda progress: 1.0,
    **clipping: Any,
) -> Iterator[dict[str, Any]]:
    """Preset "robust", see :mod:`hyfreedp.look`. Before some steps the batch compares rates, along the run so far.

    After the last step the weights are an average of those after each.
    """
    T, groups = split.steps, optimizer.param_groups
    ratio = {id(w): group["lr"] / groups[0]["lr"] for group in groups for w in group["params"]}
    order = {id(w): i for i, w in enumerate(w for group in groups for w in group["params"])}
    reach, proportional = look.displacement_per_gradient(optimizer, T)
    unit = split.sigma_gradient * sensitivity / B if proportional else 1.0  # size of a private gradient's coordinates
    start = [weight.detach().clone() for weight in trained(model)]
    c0 = look.public_start(start)
    found: list[float] = []  # by looks, in units of the first rate
    level = 1.0  # of the rate in force
    average = start
    for t, batch in enumerate(batches):
        released: dict[str, Any] = {}
        first = eta or (c0 / (math.sqrt(T) * reach * unit) if unit else math.nan)
        rate = first * level
        if split.is_probe_step(t):
            factors = [decay(s / T) for s in range(T)]
            way = sum(f * (1 - groups[0].get("momentum", 0.0) ** (t - s)) for s, f in enumerate(factors[:t]))
            spread = math.sqrt(sum(f * f for f in factors[t:]) * look.NOISE * way / sum(factors))
            spread *= reach * unit  # of the noise to come, per unit of rate
            present, losses = [weight.detach().clone() for weight in trained(model)], []
            for rung in look.LADDER:
                for weight, begun, here in zip(trained(model), start, present, strict=True):
                    public = NoiseGenerator(look.PUBLIC_SEED).child("look", t).child("z", order[id(weight)])
                    z = public.normal(*weight.shape).to(weight.dtype)
                    way = first / rate * (here - begun) + first * spread * ratio[id(weight)] * z
                    weight.data.copy_(begun + rung * way if unit else here)  # nothing but zeros so far: all are alike
                losses.append(losses_of(model, loss, batch))
            margin = Margins(losses, split.sigma_loss, B, noise.child("look", t))
            found.append(look.choose(margin, level, look.CLEAR))
            mean = math.prod(found) ** (1 / (1 + len(found)))  # of the start and the looks, the geometric one
            before, level = level, look.choose(margin, mean, look.SURE)
            rate = first * level
            along = level / before if unit else 1.0
            along = along if t == look.FIRST else min(1.0, along)  # later only back
            for weight, begun, here in zip(trained(model), start, present, strict=True):
                weight.data.copy_(begun + along * (here - begun))
            released = {"margins": margin.asked, "along": along}
        m = private_gradient(
            model,
            loss,
            batch,
            split.gradient_noise_multiplier(t),
            B,
            noise.child("gradient", t),
            sensitivity=sensitivity,
            **clipping,
        )
        if not unit:  # plain SGD without noise: the size of the first gradient
            unit = torch.cat([one.flatten() for one in m]).double().square().mean().sqrt().item()
            first = eta or (c0 / (math.sqrt(T) * reach * unit) if unit else math.nan)
            rate = first * level
        taken = rate * decay(t / T) if unit else 0.0
        step(model, optimizer, m, taken)
        share = (1 + look.POWER) / (t + 1 + look.POWER)
        average = [a + share * (w.detach() - a) for a, w in zip(average, trained(model), strict=True)]
        if t == T - 1:
            for weight, value in zip(trained(model), average, strict=True):
                weight.data.copy_(value)
        yield {"eta": taken} | released
