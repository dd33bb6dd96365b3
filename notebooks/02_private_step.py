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
# # One private step by hand: clip, sum, noise, fit, update
#
# **After this notebook you can**
#
# * write one step of private training in NumPy, and say which line bounds what a record can do,
# * find a learning rate through three private losses, as the paper does, and see how noise spoils it,
# * check all of it against the library, number by number.
#
# **The paper's items.** Algorithm 1, on a problem of two parameters. Nothing is hidden in a function of ours until you have written it yourself. Here it is, with the paper's numbers of lines.
# At a step, the weights are $\mathbf w$ and the rate is $\eta$; records have the losses $L_i$ and gradients $\mathbf g_i$.
#
# | Line | What it does | Here |
# | ---: | --- | --- |
# | 1 | start with the rate $\eta = 10^{-4}$ and the threshold $R_l = 1$ | |
# | 2 | compute the loss of each record of a random batch, at $\mathbf w$ | section 1 |
# | 3 | their mean is the loss of the batch | |
# | 4 | differentiate; clip each gradient, sum, add noise, divide by $B$: the private gradient $\mathbf m$ | section 2 |
# | 5 | any optimizer makes a direction $\mathbf G$ of $\mathbf m$; here $\mathbf G = \mathbf m$ | section 4 |
# | 6 | at every $K$-th step: | section 3 |
# | 7 | compute the losses at $\mathbf w + \eta\mathbf G$ and $\mathbf w - \eta\mathbf G$ also | |
# | 8 | clip each of the three sets of losses at the loss released last ($R_l$), sum, add noise, divide by $B$ | |
# | 9 | lay a parabola through the three | |
# | 10 | take its slope and its curvature | |
# | 11 | set $\eta$ to slope over curvature, where the parabola has its bottom | |
# | 13 | move: $\mathbf w \leftarrow \mathbf w - \eta\mathbf G$ | section 4 |

# %% tags=["parameters"]
profile = "laptop"  # how large: smoke, laptop, gpu or paper; all the same here
records = 400  # N
rate = 0.25  # q: probability with which a record enters a batch
sigma = 1.0  # noise multiplier of the gradient
sigma_loss = 3.0  # of each loss
steps = 60  # T
seed = 0  # of the problem and its noise; a real run has a secret one

# %%
from hyfreedp.experiments.book.parameters import check_parameters

check_parameters(
    globals(),
    {
        "profile": ("smoke", "laptop", "gpu", "paper"),
        "records": int,
        "rate": float,
        "sigma": float,
        "sigma_loss": float,
        "steps": int,
        "seed": int,
    },
)

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

from hyfreedp import epsilon, fit_quadratic
from hyfreedp.accounting import calibrate_noise
from hyfreedp.accounting.accountants import composed_epsilon
from hyfreedp.experiments.book.answers import truth
from hyfreedp.experiments.book.exercises import check
from hyfreedp.experiments.store import plots
from hyfreedp.noise import NoiseGenerator
from hyfreedp.privatize import privatize_gradient, privatize_loss

plots.use_style()
names = ("profile", "records", "rate", "sigma", "sigma_loss", "steps", "seed")
parameters = {name: globals()[name] for name in names}

# %% [markdown]
# ## 1. The problem
#
# A straight line through noisy points. It has two parameters $\mathbf w$: slope and intercept. The loss of a record is half its squared error. A few records are far off the line, as real ones are.

# %%
rng = np.random.default_rng(seed)
x = np.stack([rng.standard_normal(records), np.ones(records)], axis=1)
y = x @ np.array([2.0, 1.0]) + 0.5 * rng.standard_t(3, records)
B = rate * records  # expected size of a batch


def losses_at(w, batch):
    """Of each record, shape (B,)."""
    return 0.5 * (x[batch] @ w - y[batch]) ** 2


def gradients_at(w, batch):
    """A row for each record, shape (B, 2)."""
    return (x[batch] @ w - y[batch])[:, None] * x[batch]


# %% [markdown]
# ## 2. Clip, sum, noise
#
# The sum of gradients shows every record that is in it, and one far-off record moves it as far as it likes. So each gradient is divided by its own length plus 0.01. This is *automatic clipping*. Then all are
# shorter than 1. The 0.01 matters for very short gradients alone: without it even a gradient of pure rounding error would get length 1, and a gradient of zero would be 0/0.
#
# Now one record more or less moves the sum by at most 1: that is its *sensitivity*. Noise with a standard deviation of $\sigma$ times the sensitivity hides it, as it hid one record of a count
# in notebook 00. Last, the sum is divided by the *expected* batch size $B = qN$; the true size would tell how many came. These are lines 2 to 4 of Algorithm 1.

# %%
w = np.array([0.0, 0.0])
batch = rng.random(records) < rate  # a Poisson sample: each record on its own
gradients = gradients_at(w, batch)
norms = np.linalg.norm(gradients, axis=1, keepdims=True)
clipped = gradients / (norms + 0.01)
total = clipped.sum(axis=0)
private = (total + sigma * rng.standard_normal(2)) / B

assert np.linalg.norm(clipped, axis=1).max() < 1  # the sensitivity
print(f"batch of {batch.sum()}; mean of clipped gradients {total / B}, the private one {private}")

# %% [markdown]
# **Predict first:** the longest gradient is many times as long as the median one. Which share of the raw sum is its own, and which of the clipped sum?

# %%
tenth = np.sort(norms.ravel())[-len(norms) // 10 :].sum() / norms.sum()
figure, axes = plt.subplots(1, 2, figsize=(9, 3.8))
titles = f"Raw: the longest tenth has {tenth:.0%} of all length", "Clipped: none is longer than 1"
for axis, arrows, title in zip(axes, (-gradients, -clipped), titles, strict=True):
    axis.quiver(*np.zeros((2, len(arrows))), *arrows.T, angles="xy", scale_units="xy", scale=1, width=0.004, alpha=0.4)
    limit = 1.1 * abs(arrows).max()
    axis.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")
    axis.set(xlabel="step of the slope (−gradient)", ylabel="step of the intercept")
    axis.set_title(title)

# %%
share = norms.max() / norms.sum()
summary = [
    f"the longest of {len(norms)} gradients is {norms.max() / np.median(norms):.1f} times the median one: {share:.0%} of all length; the longest tenth has {tenth:.0%}",
    f"clipped, each has at most {1 / len(norms):.0%}",
]
plots.save(
    figure,
    "02_private_step",
    parameters=parameters,
    inputs=[],
    shows="The per-record gradients of one batch as arrows, before and after they are normalised.",
    claim="Alg. 1, lines 2 to 4: per-sample gradients are clipped, summed and noised.",
    summary=summary,
)
plots.what_to_see(summary)

# %% [markdown]
# ## 3. Fit: a rate from three private losses
#
# How far should the step go? The paper *probes*: it measures the loss here, a step ahead and a step behind, along the private gradient. Each record's loss is cut to $[0, R_l]$, so that it moves a
# sum by $R_l$ at most. The sum gets noise of $\sigma_l R_l$. A parabola goes through the three points. With slope $b$ downhill and curvature $a$ its bottom is at the distance $\eta = b/a$ (lines 6
# to 11).
#
# Below are three thresholds: one that cuts hardly anything, one that cuts the largest losses, and one that cuts many.
#
# **Predict first:** will the noisy parabola still have its bottom near the true one?

# %%
eta = 2.0
places = (eta, 0.0, -eta)  # ahead, here, behind
raw = np.array([losses_at(w - s * private, batch) for s in places])


def bottom(losses):
    """b / a of the parabola through losses at eta, 0 and -eta."""
    ahead, here, behind = losses
    slope, curvature = (behind - ahead) / (2 * eta), (ahead - 2 * here + behind) / eta**2
    return slope / curvature


print(f"raw losses: bottom at {bottom(raw.sum(axis=1) / B):.1f}")
released = {}
for R in (60.0, 20.0, 4.0):
    cut = np.minimum(raw, R).sum(axis=1) / B
    released[R] = cut + sigma_loss * R / B * rng.standard_normal((1000, 3))
    low, high = np.percentile([bottom(three) for three in released[R]], [25, 75])
    print(
        f"R_l = {R:2.0f}: bottom at {bottom(cut):5.1f}; with noise half of the draws lie from {low:5.1f} to {high:4.1f}"
    )

# %%
far, exact = np.linspace(-2 * eta, 3 * eta, 60), raw.sum(axis=1) / B
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
titles = "noise scatters the parabolas", "clipping turns them over"
for axis, R, title in zip(axes, (60.0, 4.0), titles, strict=True):
    for three in released[R][:30]:
        axis.plot(far, np.polyval(np.polyfit(places, three, 2), far), color="C1", linewidth=0.7, alpha=0.5)
    axis.plot([], [], color="C1", label="30 noisy ones")
    axis.plot(far, np.polyval(np.polyfit(places, exact, 2), far), "k--", label="through raw losses")
    axis.plot(places, exact, "ko", label="raw losses")
    axis.plot(places, np.minimum(raw, R).sum(axis=1) / B, "C0s", label="clipped")
    axis.set(xlabel=r"distance along $-\mathbf{G}$", ylim=(-2, 3 * exact.max()), title=f"$R_l$ = {R:.0f}: {title}")
axes[0].set_ylabel("mean loss")
plots.shared_legend(figure, axes[:1], ncols=4)

# %%
bent = {R: np.mean([np.polyfit(places, three, 2)[0] < 0 for three in released[R]]) for R in (60.0, 4.0)}
summary = [f"R_l = {R:.0f}: {share:.0%} of the noisy parabolas bend the wrong way" for R, share in bent.items()]
plots.save(
    figure,
    "02_private_step_parabolas",
    parameters=parameters,
    inputs=[],
    shows="The parabola through three raw losses of one batch, and 30 through clipped and noised ones, at two thresholds.",
    claim="Alg. 1, lines 7 to 11: three private losses give the rate.",
    summary=summary,
)
plots.what_to_see(summary)

# %% [markdown]
# <details><summary>Answer</summary>
#
# At no threshold here. A large $R_l$ cuts nothing, and its noise drowns the parabola: slope and curvature are *differences* of losses, and the noise is that of whole losses. A small $R_l$ has
# little noise. But it cuts the highest of the three losses most, until the parabola bends the wrong way and its bottom is a top. A distance below zero would be a step uphill. Notebook 01 is about
# this trade-off, notebook 04 about a way out.
#
# </details>
#
# ## 4. Update, and again
#
# Here is a whole private run, with a fixed rate. Each step moves against the private gradient. (What it costs, section 5 says.)
#
# **Predict first:** the gradients are all made equally long, and noise is added at every step. Where does the run end?

# %%
path, fixed_rate = [w], 2.0 / steps**0.5
for _ in range(steps):
    batch = rng.random(records) < rate
    gradients = gradients_at(path[-1], batch)
    clipped = gradients / (np.linalg.norm(gradients, axis=1, keepdims=True) + 0.01)
    released = (clipped.sum(axis=0) + sigma * rng.standard_normal(2)) / B
    path.append(path[-1] - fixed_rate * released)
path = np.array(path)
best = np.linalg.lstsq(x, y, rcond=None)[0]

# %%
slopes, intercepts = np.meshgrid(np.linspace(-0.5, 3, 60), np.linspace(-0.5, 2, 60))
everyone = np.ones(records, dtype=bool)
heights = [losses_at(np.array(pair), everyone).mean() for pair in zip(slopes.flat, intercepts.flat, strict=True)]
figure, (axis, right) = plt.subplots(1, 2, figsize=(10, 4))
axis.contour(slopes, intercepts, np.reshape(heights, slopes.shape), levels=12, colors="0.7", linewidths=0.8)
axis.plot(*path.T, ".-", color="C0", label="the private run")
axis.plot(*best, "k*", markersize=12, label="least squares, not private")
axis.set(xlabel="slope", ylabel="intercept", title="The run ends near the optimum")
axis.legend(fontsize="small")
right.plot(np.linalg.norm(path - best, axis=1), ".-", color="C0")
right.set(
    xlabel="step",
    ylabel="distance from least squares",
    ylim=(0, None),
    title="Noise never stops: the run stays near, not at it",
)

# %%
summary = [
    f"the run ends {np.linalg.norm(path[-1] - best):.2f} from least squares; its last ten steps are on average "
    f"{np.linalg.norm(path[-10:] - best, axis=1).mean():.2f} away, {np.linalg.norm(path[0] - best):.2f} at the start"
]
plots.save(
    figure,
    "02_private_step_path",
    parameters=parameters,
    inputs=[],
    shows="The weights of a private run of two parameters, over the contours of the loss, and their distance from the optimum.",
    claim="Alg. 1, line 5: any optimizer takes the private gradient.",
    summary=summary,
)
plots.what_to_see(summary)

# %% [markdown]
# ## 5. The same from the library
#
# Its functions take sums and losses, and draw the noise from a secret key. With a noise multiplier of zero the numbers are yours:

# %%
quiet = {"expected_batch_size": B, "generator": NoiseGenerator(7)}
bare = torch.tensor(total.copy())
privatize_gradient([bare], 0.0, sensitivity=1.0, **quiet)
assert np.allclose(bare.numpy(), total / B, rtol=1e-15)
assert np.allclose(privatize_loss(torch.tensor(raw), R, 0.0, expected_batch_size=B), cut)
fit = fit_quadratic(list(places), cut)
assert np.allclose(fit.minimizer, bottom(cut))

# %% [markdown]
# How much noise does a budget of $\varepsilon = 3$ need? Gradient and losses come from one batch. So the accountant counts them as *one* release, in which a record changes the gradient and three
# losses. Evidence adds up as in notebook 00, section 4: noises $\sigma_1, \sigma_2, \dots$ that are seen together on one record are as revealing as one $\sigma$ with
# $\sigma^{-2} = \sigma_1^{-2} + \sigma_2^{-2} + \dots$ Each of the three losses counts, since all can move by their whole threshold. Notebook 03 is about that. Here every fifth step probes (`interval=5`), and has a little more noise on its gradient to pay for it.

# %%
split = calibrate_noise(
    target_epsilon=3.0, target_delta=1e-4, sample_rate=rate, steps=steps, probe="losses", interval=5, gamma=1.02
)
print(
    f"sigma_g = {split.sigma_gradient:.2f}, on steps with a probe {split.sigma_gradient_probe:.2f}; sigma_l = {split.sigma_loss:.1f}"
)
assert epsilon(split) <= 3.0
spent = composed_epsilon([(sigma, steps)], sample_rate=rate, delta=1e-4, accountant="pld")
print(f"the run of section 4 had sigma_g = {sigma:g} and no probe: its epsilon is {spent:.1f}")

# %% [markdown]
# So the run of section 4 was private, but its promise is weak. At $\varepsilon = 3$ it would bear more than twice the noise.
#
# The real thing, for any model and one sample at a time, is [`reference.py`](../hyfreedp/reference.py), in the order of Algorithm 1. All else in the package makes the same numbers faster.
#
# ## Exercises
#
# Put your answer in place of `None` and run the cell; it says whether you are right. Solutions are in
# [`solutions/`](solutions/02_private_step.ipynb).
#
# 1. A gradient has norm 0.02. How long is it after automatic clipping?

# %%
length = None
check(length, lambda: truth("02.1"))

# %% [markdown] tags=["solution"]
# *Solution.* $0.02 / 0.03 = 2/3$: only gradients as short as the 0.01 are left short.

# %% tags=["solution"]
length = 0.02 / (0.02 + 0.01)
check(length, lambda: truth("02.1"))

# %% [markdown]
# 2. Gradient and three losses come from one batch, with $\sigma_g = 1.1$ and $\sigma_l = 12$. Together they are as revealing as one vector with which noise multiplier?

# %%
together = None
check(together, lambda: truth("02.2"))

# %% [markdown] tags=["solution"]
# *Solution.* The evidence adds up (section 5): $\sigma^{-2} = \sigma_g^{-2} + 3\sigma_l^{-2}$, since each of three losses can move by its whole threshold. So $\sigma = 1.086$: the probe is nearly free.

# %% tags=["solution"]
together = (1.1**-2 + 3 * 12**-2) ** -0.5
check(together, lambda: truth("02.2"))

# %% [markdown]
# 3. Suppose the sum in section 2 were divided by the true batch size in place of $B$. What could an attacker learn who knows all other records?

# %% [markdown] tags=["solution"]
# *Solution.* Whether the record was in the batch: the divisor changes by one, without noise, and with it every number of the result.
