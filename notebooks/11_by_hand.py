# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # By hand: what privacy is, and one private step in NumPy
#
# **After this notebook you can**
#
# * say what a mechanism, its neighbours, $\varepsilon$ and $\delta$ are, and read them off a picture,
# * attack a released number, win without noise, and know how often you can win with it,
# * say what many releases cost together, and why a random batch helps,
# * do one step of private training with NumPy alone, and check it against the library, number by number.
#
# Nothing is hidden in a function of ours until you have written it yourself. It takes no training run and may be read first.

# %% tags=["parameters"]
profile = "laptop"  # how large: smoke, laptop, gpu or paper; all the same here
sigma = 1.0  # noise multiplier: standard deviation of the noise, over what one record can change
steps = 10  # releases that are added up in section 3

# %%
from hyfreedp.experiments.book.parameters import check_parameters

check_parameters(globals(), {"profile": ("smoke", "laptop", "gpu", "paper"), "sigma": float, "steps": int})

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.stats import norm

from hyfreedp import epsilon, fit_quadratic
from hyfreedp.accounting import calibrate_noise
from hyfreedp.accounting.accountants import composed_epsilon
from hyfreedp.accounting.composition import effective_noise
from hyfreedp.experiments.book.exercises import check
from hyfreedp.experiments.store import plots
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import privatize_gradient, privatize_loss

plots.use_style()
parameters = {"profile": profile, "sigma": sigma, "steps": steps}
rng = np.random.default_rng(0)

# %% [markdown]
# ## 1. A mechanism, its neighbours, and an attack
#
# A *mechanism* is a randomised program whose output is released. Ours counts: how many of the records say yes? One record changes the count by at most 1.
# Two data sets are *neighbours* if one has one record more than the other.
#
# An attacker knows all records but one, and asks: is that one in the data, saying yes? The count without noise answers at once. So we add
# normal noise of standard deviation $\sigma$ times what one record can change:

# %%
others = rng.random(500) < 0.3  # records that say yes; the attacker knows them
counts = {"out": others.sum(), "in": others.sum() + 1}
released = {name: count + sigma * rng.standard_normal(20_000) for name, count in counts.items()}

threshold = (counts["in"] + counts["out"]) / 2
caught = {name: np.mean(numbers > threshold) for name, numbers in released.items()}
advantage = caught["in"] - caught["out"]
print(
    f'says "in" of {caught["in"]:.0%} that are in, and of {caught["out"]:.0%} that are not: advantage {advantage:.2f}'
)

# %% [markdown]
# **Predict first:** is there a cleverer threshold, or a cleverer attack, with a larger advantage?
#
# ## 2. $\varepsilon$ and $\delta$, in a picture
#
# How much likelier is an output with the record than without it? The logarithm of that ratio is the *privacy loss* of the output. A mechanism is
# $(\varepsilon, \delta)$-private if its loss is at most $\varepsilon$, but for a part of weight $\delta$:
#
# $$ P(M(D) \in S) \le e^\varepsilon P(M(D') \in S) + \delta \quad\text{for all sets } S \text{ and all neighbours } D, D'. $$
#
# The worst set $S$ is where the loss exceeds $\varepsilon$. For two normals we can see it: the loss grows along a line.

# %%
outputs = np.linspace(-4 * sigma, 1 + 4 * sigma, 400)
with_it, without = norm.pdf(outputs, 1, sigma), norm.pdf(outputs, 0, sigma)
loss = np.log(with_it / without)


def delta_of(eps):
    """Of two normals a distance 1 apart: the weight of P above e^eps Q."""
    least = sigma**2 * eps + 0.5  # where the loss is eps
    return norm.sf(least, 1, sigma) - np.exp(eps) * norm.sf(least, 0, sigma)


figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
left.plot(outputs, with_it, color="C0", label="with the record")
left.plot(outputs, without, color="C1", linestyle="--", label="without it")
left.fill_between(
    outputs, with_it, np.e * without, where=loss > 1, color="C0", alpha=0.3, label=r"$\delta$ at $\varepsilon$ = 1"
)
left.set(xlabel="released count, less the attacker's", ylabel="density", title="What is above e times the other is δ")
left.legend(loc="upper left", fontsize="small")
epsilons = np.linspace(0, 6, 200)
right.plot(epsilons, delta_of(epsilons), color="C0")
right.set(
    yscale="log",
    ylim=(1e-8, 1),
    xlabel=r"$\varepsilon$",
    ylabel=r"$\delta$",
    title="One mechanism has many pairs (ε, δ)",
)

# %%
summary = [
    f"noise of {sigma:g}: delta is {delta_of(0.0):.2f} at epsilon 0, {delta_of(1.0):.3f} at 1 and {delta_of(4.0):.1e} at 4",
    f"the best attack has an advantage of {delta_of(0.0):.2f}, which is delta at epsilon 0; ours had {advantage:.2f}",
]
plots.save(
    figure,
    "11_by_hand",
    parameters=parameters,
    inputs=[],
    shows="Two normals and the part of one that is above e times the other; delta as a function of epsilon.",
    claim="§ 2: the definition of differential privacy.",
    summary=summary,
)
plots.what_to_see(summary)

# %% [markdown]
# So no attack is cleverer: its advantage is at most $\delta(0)$, and the threshold in the middle has it.
#
# ## 3. Many releases, and random batches
#
# Training releases a noisy sum at every step. The attacker adds up the evidence. For independent normal noise the evidence of $T$ releases is that of *one* with noise
# $\sigma/\sqrt T$: the losses add up, and sums of normals are normal. *Poisson sampling* helps: with probability $1 - q$ the record was not even in the batch.
#
# **Predict first:** if every record enters a batch with probability 1/10, by how much does $\varepsilon$ fall: a tenth?

# %%
at = {"delta": 1e-5, "accountant": "pld"}
cases = {
    "one release": composed_epsilon([(sigma, 1)], sample_rate=1.0, **at),
    f"{steps} releases": composed_epsilon([(sigma, steps)], sample_rate=1.0, **at),
    f"one with noise / sqrt({steps})": composed_epsilon([(sigma / steps**0.5, 1)], sample_rate=1.0, **at),
    f"{steps} releases, each on a tenth": composed_epsilon([(sigma, steps)], sample_rate=0.1, **at),
    "the same by RDP": composed_epsilon([(sigma, steps)], sample_rate=0.1, delta=1e-5, accountant="rdp"),
}
for name, value in cases.items():
    print(f"{name:32} epsilon = {value:.3f} at delta = 1e-5")

# %% [markdown]
# Ten releases cost more than $\sqrt{10}$ times one, and much less than ten times. Sampling a tenth takes more than a tenth off: what was seldom seen is hidden by its absence, too. *PLD* (privacy loss distributions) computes the sum of losses; *RDP* bounds it by its moments, which is
# simpler and a little looser.
#
# ## 4. One private step by hand
#
# Four records, two parameters, squared losses. Every record's gradient is divided by its own norm (plus 0.01), so that none can move the sum by more than 1. The sum gets
# noise, and is divided by the expected batch size. That is line 5 of Algorithm 1.

# %%
x = np.array([[1.0, 0.5], [0.2, -1.0], [-0.7, 0.3], [0.4, 0.9]])
y = np.array([1.0, -0.5, 0.0, 2.0])
w, B = np.array([0.3, -0.2]), 4


def losses_at(w):
    return 0.5 * (x @ w - y) ** 2


gradients = (x @ w - y)[:, None] * x  # one row per record
norms = np.linalg.norm(gradients, axis=1, keepdims=True)
clipped = gradients / (norms + 0.01)
total = clipped.sum(axis=0)

library = torch.tensor(total.copy())
privatize_gradient([library], sigma, sensitivity=1.0, expected_batch_size=B, generator=NoiseGenerator(7))
noise = library.numpy() * B - total  # what the library drew
private = (total + noise) / B
print(f"clipped sum {total}, noise {noise}, private gradient {private}")

# %% [markdown]
# Without noise the library has the same number, to the last bit but one:

# %%
bare = torch.tensor(total.copy())
privatize_gradient([bare], 0.0, sensitivity=1.0, expected_batch_size=B, generator=NoiseGenerator(7))
assert np.allclose(bare.numpy(), total / B, rtol=1e-15)
assert np.linalg.norm(clipped, axis=1).max() < 1  # the sensitivity

# %% [markdown]
# Now the rate. The paper looks at the loss a step ahead and a step behind, along the private gradient. Each record's loss is cut to $[0, R_l]$, the sum gets noise, and a parabola
# goes through the three points. Its bottom is at slope over curvature.
#
# **Predict first:** with $\sigma_l = 1$ and four records, will the noisy parabola have its bottom near the true one?

# %%
eta, R = 0.5, 1.0
raw = np.array([losses_at(w - s * eta * private) for s in (1.0, 0.0, -1.0)])  # ahead, here, behind
cut = np.minimum(raw, R).sum(axis=1) / B
ahead, here, behind = cut
slope, curvature = (behind - ahead) / (2 * eta), (ahead - 2 * here + behind) / eta**2

fit = fit_quadratic([eta, 0.0, -eta], cut)
assert np.allclose([fit.slope, fit.curvature], [slope, curvature])
assert np.allclose(privatize_loss(torch.tensor(raw), R, 0.0, expected_batch_size=B), cut)
noisy = [cut + R / B * rng.standard_normal(3) for _ in range(1000)]
bottoms = np.array([(b - a) / 2 * eta / (a - 2 * h + b) for a, h, b in noisy])
print(
    f"bottom without noise at {slope / curvature:.2f}; with it, half of the draws between {np.percentile(bottoms, [25, 75])}"
)
w_next = w - eta * private

# %% [markdown]
# On four records noise wins. With a large batch it is divided by a large $B$; that is what the next notebooks are about. Both numbers, gradient and losses, come from one batch. So the
# accountant must count them as *one* release, in which a record changes four numbers:

# %%
plan = {"target_epsilon": 3.0, "target_delta": 1e-5, "sample_rate": 0.1, "steps": 100}
split = calibrate_noise(**plan, interval=5)
print(
    f"sigma_g = {split.sigma_gradient:.3f}, on steps with a probe {split.sigma_gradient_probe:.3f}; sigma_l = {split.sigma_loss:.1f}"
)
assert epsilon(split) <= 3.0

# %% [markdown]
# ## Exercises
#
# Put your answer in place of `None` and run the cell; it says whether you are right. Solutions are in
# [`solutions/`](solutions/11_by_hand.ipynb).
#
# 1. How large is the largest advantage that any attack can have if $\sigma = 2$?


# %%
def advantage_of(noise):
    return 2 * norm.cdf(1 / (2 * noise)) - 1


largest = None
check(largest, lambda: advantage_of(2.0))

# %% [markdown] tags=["solution"]
# *Solution.* $\delta(0) = \Phi(1/2\sigma) - \Phi(-1/2\sigma) = 2\Phi(1/4) - 1 = 0.20$. Twice the noise does not halve it exactly: 0.38 at $\sigma = 1$.

# %% tags=["solution"]
largest = norm.cdf(0.25) - norm.cdf(-0.25)
check(largest, lambda: advantage_of(2.0))

# %% [markdown]
# 2. Gradient and three losses come from one batch, with $\sigma_g = 1.1$ and $\sigma_l = 12$. Together they are as revealing as one vector with which noise multiplier?

# %%
together = None
check(together, lambda: effective_noise(1.1, 12.0, "losses"))

# %% [markdown] tags=["solution"]
# *Solution.* The evidence adds up: $\sigma^{-2} = \sigma_g^{-2} + 3\sigma_l^{-2}$, since each of three losses can move by its whole clip. So $\sigma = 1.088$: the probe is nearly free.

# %% tags=["solution"]
together = (1.1**-2 + 3 * 12**-2) ** -0.5
check(together, lambda: effective_noise(1.1, 12.0, "losses"))
