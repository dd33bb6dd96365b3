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
# # Bias against variance: how to clip a loss
#
# **After this notebook you can**
#
# * say what clipping takes from a private mean loss and what noise adds, and see why the best threshold lies between,
# * derive the threshold $R_l$ of least error, and place the paper's $R_l = L$ beside it,
# * say what both errors do to a learning rate,
# * judge on real losses when Corollary 1's normal distribution is a good guess,
# * say why nearly every gradient may be clipped but losses may not (Tab. "diff priv"), and why the noise is Gaussian.
#
# **The paper's items.** Theorem 1 and Corollary 1 ("a large $R_l$ reduces the clipping bias but magnifies the noise, and vice
# versa"), Fig. "truncated normal", Tab. "diff priv", and the advice that follows from them: $R_l \approx L$, so that "the
# clipping bias is close to zero". ($L$ is the mean loss.) [Notebook 11](reports/11_parabolas.ipynb) has more on the learning rate.
# %% tags=["parameters"]
profile = "laptop"  # how large: smoke, laptop, gpu or paper
epsilon = 3.0  # of a run, at the task's delta
seeds = 3  # training runs whose losses are looked at
step = 10  # of the run, at which one batch is looked at closely
batch_sizes = [50, 500, 5000]  # B, of sections 3 and 4
loss_mean = 2.0  # of the normal losses (nats)
loss_std = 0.4  # of the normal losses (nats)

# %%
from hyfreedp.experiments.book.parameters import begin

begin(globals(), "01_bias_variance")

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from IPython.display import display
from scipy import stats
from scipy.stats import norm

from hyfreedp import clipping_bias, normal_clipping_bias, privatize_loss
from hyfreedp.experiments.accounting_of_the_paper import Counting, calibrate
from hyfreedp.experiments.book.answers import truth
from hyfreedp.experiments.book.exercises import check
from hyfreedp.experiments.book.sliders import sliders
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.paths import CELLS
from hyfreedp.experiments.store.verdicts import Verdict, by_proof, by_row, verdict
from hyfreedp.experiments.studies import bias_variance, landscape, noise_split
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.privatize import loss_noise_std

if profile == "smoke":  # a small budget is calibrated quickly
    epsilon, step = 0.2, 2
sizes = bias_variance.sizes_of(profile, step)
rng = np.random.default_rng(0)

# %% [markdown]
# ## Data: a run and its budget
#
# A run takes $T$ steps. Each step draws a random batch of about $B$ of the $N$ records, and sums their *gradients* (the direction in which each one's loss rises). It adds noise to the sum and moves the weights against
# it. How far it moves is the *learning rate* $\eta$. To find it the paper measures three noisy losses along the move: a *probe*. Notebook 02 does ten by hand.
#
# A classifier's loss is $-\log$ of the probability that it gives to the right answer. With the natural logarithm the unit is the **nat**: whoever
# guesses among ten classes pays $\ln 10 = 2.3$ nats.
#
# Two kinds of losses follow. Most sections draw *normal* ones, since theory knows them. Sections 3, 5 and 6 take *real* ones: of a small network that learns 1,500 handwritten digits by the paper's algorithm.
# Real losses are not private and a run never shows them; here they *teach*.
#
# The *noise multipliers* $\sigma_g$ and $\sigma_l$ are the standard deviations of the noise on a sum of gradients or of losses, in units of what one record can change. The budget $\varepsilon$ decides how large they are
# (notebook 03). Here they are, for a probe at every fifth step. (The network's own run probes at every step, so that we can look anywhere.)

# %%
task = TASKS["digits"]
budget = bias_variance.digits_budget(epsilon)
split = bias_variance.noise_of(CELLS, budget)
B, sigma_loss = task.batch_size, split.sigma_loss
probed, run_inputs = landscape.probed_runs(CELLS, epsilon=epsilon, seeds=seeds, stages=sizes["stages"])
print(
    f"N = {task.train_size:,}, B = {B}, T = {task.steps}, epsilon = {epsilon:g}, delta = {task.delta:g}: "
    f"sigma_g = {split.sigma_gradient_probe:.2f}, sigma_l = {sigma_loss:.1f}"
)

# %% [markdown]
# ## 1. Too low or too high: the U
#
# A run wants to know the mean loss $L$ of a batch of about $B$ records, and must not show any single loss $L_i$. So it cuts every loss at a threshold
# $R_l$: then one record moves the sum by $R_l$ at most. This is *clipping*. Normal noise in proportion to $R_l$ hides such a move:
#
# $$ \tilde L = \frac1B\Big[\sum_i \min(L_i, R_l) + \sigma_l R_l\, \mathcal N(0, 1)\Big]. $$
#
# **The target** is the mean loss *of the batch*, not of the population. A run without privacy sees that mean, too; that the batch was drawn at
# random is an error of both.
#
# Two errors remain. The **bias** is what clipping took away: the mean loss less the mean of $\min(L_i, R_l)$. It is the same
# however often one releases the batch. The **noise** is different every time; its variance is $(\sigma_l R_l / B)^2$. Since its mean is zero, the mean squared error of
# the release is
#
# $$ \text{MSE}(R_l) = \text{bias}(R_l)^2 + \left(\frac{\sigma_l R_l}{B}\right)^2. $$
#
# A higher threshold has less of the first and more of the second. Below they are computed for 50,000 normal losses with the mean and standard deviation of the
# parameters. At the default they scatter more than the early batches of section 5, so that the U can be seen.
#
# **Predict first:** at the bottom of the U, are the two parts equal?

# %% [markdown]
# ### Answer

# %%
losses = rng.normal(loss_mean, loss_std, 50_000)
R = np.geomspace(0.02, 5, 1000) * loss_mean
bias = np.array([losses.mean() - np.minimum(losses, threshold).mean() for threshold in R])
noise = sigma_loss * R / B
mse = bias**2 + noise**2
best = mse.argmin()
assert np.allclose(bias[::10], clipping_bias(losses, R[::10]), atol=1e-9)  # the library says the same
assert np.allclose(noise, loss_noise_std(R, sigma_loss, B))
findings = [
    f"B = {B}, sigma_l = {sigma_loss:.1f}: the mean squared error is least at R_l = {R[best]:.2f} nats, with {mse[best]:.3g} nats² "
    f"({mse[best] ** 0.5:.2f} nats as a root)",
    f"there the squared bias is {bias[best] ** 2 / mse[best]:.0%} of the sum: the two parts are not equal there; but a little more R_l "
    "adds to the one what it takes from the other",
]
print(*findings, sep="\n")

# %% figure="01_bias_variance" shows="Squared clipping bias, noise variance and their sum for the private mean of normal losses, against R_l." claim="§\"Bias-variance trade-off\": a large R_l reduces the clipping bias but magnifies the noise, and vice versa."
looks = {"squared bias": plots.STYLES["paper"], "variance": plots.STYLES["best"], "their sum": plots.SERIES[0]}
figure, axis = plt.subplots(figsize=(7, 4.2))
for (name, look), values in zip(looks.items(), (bias**2, noise**2, mse), strict=True):
    axis.plot(R, values, label=name, linewidth=2.5, **plots.line(look))
axis.plot(
    R[best], mse[best], "*", color="C1", markeredgecolor="black", markersize=18, label=f"least: $R_l$ = {R[best]:.2f}"
)
axis.text(0.04, 0.5, "clips too much", transform=axis.transAxes)
axis.text(0.96, 0.25, "needs much noise", ha="right", transform=axis.transAxes)
axis.set(xlim=(0.25 * R[best], 2.2 * R[best]), ylim=(0, 5 * mse[best]), xlabel="threshold $R_l$ (nats)")
axis.set_ylabel("squared error of the mean loss (nats²)")
axis.set_title(f"Bias falls and variance rises: their sum is least between (B = {B})")
plots.legend_below(axis, ncols=4)
plt.show()

# %% [markdown]
# ### Where is the bottom?
#
# In three steps:
#
# 1. Raise $R_l$ a little. Every loss above it gets just as much back, so the bias falls at the rate $\mathbb P(L_i > R_l)$, the share of losses that are clipped.
# 2. So the squared bias falls at the rate $2\,\text{bias}\cdot\mathbb P(L_i > R_l)$, and the variance rises at the rate $2\,(\sigma_l/B)^2 R_l$.
# 3. At the bottom the two rates cancel:
#
# $$ \text{bias}(R)\;\mathbb P(L_i > R) = \left(\frac{\sigma_l}{B}\right)^2 R . $$
#
# The left side falls to zero and the right side grows from zero. So they meet once, and there is one bottom.
#
# **Move it yourself.** The vertical axis follows the bottom of the U, so look at its numbers.
#
# **Predict first:** double $B$ and double $\sigma_l$. What happens to the U?

# %%
thresholds = np.linspace(0.1, 3, 59) * loss_mean
dials = {"batch size B": [50, 100, 250, 500, 1000, 2000, 4000], "noise multiplier σ_l": [6, 12, 23, 46]}
squared_bias = np.asarray(normal_clipping_bias(thresholds, loss_mean, loss_std)) ** 2
sizes_shown, noises_shown = (np.array(places, dtype=float) for places in dials.values())
variance = (noises_shown[:, None] * thresholds / sizes_shown[:, None, None]) ** 2
shown = zip(looks.items(), (squared_bias, variance, squared_bias + variance), strict=True)
sliders(
    "01_bias_variance",
    thresholds,
    {name: (look, values) for (name, look), values in shown},
    dials,
    x_label="threshold R_l (nats)",
    y_label="squared error (nats²)",
    least=2,
    zoom=6,
)

# %% [markdown]
# <details><summary>Answer</summary>
#
# Nothing: the variance depends on $\sigma_l/B$ alone, and the bias on neither. Less noise or a larger batch moves the bottom to the right, towards less clipping, and down.
#
# </details>

# %% [markdown]
# ## 2. What clipping takes: Fig. "truncated normal"
#
# How large is the bias? For losses $L_i \sim \mathcal N(\mu, \xi^2)$ it has a closed form. Let $\alpha = (R_l - \mu)/\xi$, the threshold in standard deviations above the
# mean, and let $\phi$ and $\Phi$ be the density and the distribution function of a standard normal. Then (Corollary 1)
#
# $$ \big[\mathbb E(L_i \mid L_i > R_l) - R_l\big]\, \mathbb P(L_i > R_l) = \xi\, \big[\phi(\alpha) - \alpha\,(1 - \Phi(\alpha))\big]. $$
#
# **Predict first:** at $R_l = \mu$, half of the losses are clipped. Is the bias then half a standard deviation, more, or less?

# %% [markdown]
# ### Answer


# %%
def corollary_1(alpha):
    """Clipping bias of normal losses in their standard deviations."""
    return norm.pdf(alpha) - alpha * norm.sf(alpha)


alphas = np.linspace(-3, 3, 61)
assert np.allclose(corollary_1(alphas), normal_clipping_bias(alphas, 0, 1))  # the library's
at = corollary_1(np.array([0.0, 1.0, 2.0]))
findings = [
    f"It always falls: {at[0]:.4f} = 1/sqrt(2 pi) at alpha = 0, {at[1]:.4f} at 1 and {at[2]:.4f} at 2 (in standard deviations of the "
    "loss)"
]
print(*findings)

# %% figure="01_bias_variance_normal" shows="Clipping bias of normal losses, in their standard deviations, against the standardised threshold alpha." claim="Fig. \"truncated normal\": phi(alpha) - alpha (1 - Phi(alpha)) is strictly decreasing, minimised at alpha = infinity."
figure, axis = plt.subplots(figsize=(5, 3.4))
axis.plot(alphas, corollary_1(alphas), color="#D55E00", linewidth=2.5)
axis.set(xlabel=r"$\alpha = (R_l - \mu)\,/\,\xi$", ylabel="clipping bias (sd of the loss)")
axis.set_title(f"Clipping at the mean takes {at[0]:.2f} sd, at two sd above it {at[2]:.3f}")
plt.show()

# %% [markdown]
# The curve never reaches zero but falls faster than any exponential: two standard deviations above the mean, hardly anything
# is lost, *if* losses are normal. Section 5 looks at real ones.

# %% [markdown]
# ## 3. Theorem 1 and Corollary 1 on trial
#
# Theorem 1 says for *any* losses, with $\mathrm{ReLU}(x) = \max(x, 0)$:
#
# $$ \text{bias} = \frac1B \sum_i \mathrm{ReLU}(L_i - R_l), \qquad
#    \text{noise (standard deviation)} = \frac{\sigma_l R_l}{B}. $$
#
# We test both without using them.
#
# * Left: many batches of normal losses are drawn. The bias of a batch is its mean loss, less its mean loss after every loss was cut to $R_l$. A dot is the mean of the biases of all batches; the curve is Corollary 1.
# * Right: *one* batch of real losses is released again and again. Its releases lie below its mean loss by the bias, on average. Their scatter is the noise.
#
# **Predict first:** the corollary is stated for $B \to \infty$. Will the dots of small batches lie above, on or below the curve?

# %% [markdown]
# ### Answer

# %%
batches, runs, small_batch = sizes["batches"], sizes["releases"], batch_sizes[0]
dots = np.linspace(-2.5, 2.5, 11)  # alpha
drawn = rng.normal(loss_mean, loss_std, (batches, small_batch))
cut = [np.minimum(drawn, loss_mean + loss_std * alpha).mean(axis=1) for alpha in dots]
biases = (drawn.mean(axis=1) - cut) / loss_std  # shape (11, batches)
errors = biases.std(axis=1, ddof=1) / batches**0.5

real = landscape.losses_of(probed[0], step, "batch")[1]
thresholds = real.mean() * np.geomspace(0.3, 6, 10)
cut = np.array([np.minimum(real, threshold).sum() for threshold in thresholds])[:, None]
releases = (cut + sigma_loss * thresholds[:, None] * rng.standard_normal((10, runs))) / real.size
bias_found, noise_found = real.mean() - releases.mean(axis=1), releases.std(axis=1, ddof=1)
bias_error, noise_error = noise_found / runs**0.5, noise_found / (2 * (runs - 1)) ** 0.5
theirs = [privatize_loss(torch.tensor(real), R_l, 0.0, expected_batch_size=real.size).item() for R_l in thresholds]
assert np.allclose(theirs, cut[:, 0] / real.size)  # the library's release, without its noise

# %%
theorem_bias = np.array([np.maximum(real - threshold, 0).mean() for threshold in thresholds])
theorem_noise = sigma_loss * thresholds / real.size
distances = [
    np.max(abs(biases.mean(axis=1) - corollary_1(dots)) / errors),
    np.max(abs(bias_found - theorem_bias) / bias_error),
    np.max(abs(noise_found - theorem_noise) / noise_error),
]
findings = [
    f"Corollary 1: the {len(dots)} simulated means lie within {distances[0]:.1f} standard errors of the closed form (they share "
    "their draws)",
    f"Theorem 1: the {len(thresholds)} simulated biases lie within {distances[1]:.1f}, the noises within {distances[2]:.1f} standard "
    "errors of it",
]
print(f"left: {batches} batches of {small_batch}; right: {runs} releases of a batch of {real.size}")
print(*findings, sep="\n")

# %% figure="01_bias_variance_theorem" shows="Clipping bias and noise as simulated (bars: two standard errors) on the closed forms of Corollary 1 and Theorem 1." claim="Theorem 1 and Corollary 1: closed forms of clipping bias and noise variance." inputs=["function landscape.probed_losses"]
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
bars = {"fmt": "o", "markersize": 4, "capsize": 2}
means, spread = biases.mean(axis=1), biases.std(axis=1, ddof=1)
left.plot(alphas, corollary_1(alphas), color="C0", label="Corollary 1")
left.fill_between(dots, means - spread, means + spread, color="0.85", label="one batch (1 sd)")
left.errorbar(dots, means, yerr=2 * errors, label="mean of batches", color="0.2", **bars)
left.set(xlabel=r"$\alpha = (R_l - \mu)\,/\,\xi$", ylabel="clipping bias (sd of the loss)")
left.set_title(f"Simulated means: within {distances[0]:.1f} standard errors")
for name, theory, found, error in (
    ("squared bias", theorem_bias, bias_found, bias_error),
    ("variance", theorem_noise, noise_found, noise_error),
):
    label = {"squared bias": "clipping bias", "variance": "noise (sd)"}[name]
    right.plot(thresholds, theory, label=f"{label}: Theorem 1", **plots.line(looks[name]))
    right.errorbar(thresholds, found, yerr=2 * error, label=f"{label}: simulated", color=looks[name]["color"], **bars)
right.set(xlabel="threshold $R_l$ (nats)", ylabel="error of the mean loss (nats)")
right.set_title(f"One batch, released again: within {max(distances[1:]):.1f}")
plots.legend_below(left, ncols=2)
plots.legend_below(right, ncols=2)
plt.show()

# %% [markdown]
# The mean over batches lies *on* the curve at every $B$: the expected bias of one loss does not depend on $B$, only its scatter
# does (grey band). The limit $B \to \infty$ in the corollary only makes that scatter vanish.

# %% [markdown]
# ## 4. The paper's $R_l = L$
#
# The paper sets the threshold to the loss that was released last, so that $R_l \approx L$. In practice it takes a "more conservative" one, the sum of the three losses that it measures: about $3L$.
# How good is that? Here are three U's. Only $B$ changes, as in Theorem 1. (In a run $\sigma_l$ would follow $B$, because the chance that a record is in a batch does.) The dots
# release simulated batches.
#
# **Predict first:** as $B$ grows tenfold, does the best $R_l$ rise or fall?

# %% [markdown]
# ### Answer


# %%
def u(R, B, sigma=sigma_loss):
    """Squared error of the private mean of B normal losses at the thresholds R: squared bias, variance, their sum."""
    bias = loss_std * corollary_1((R - loss_mean) / loss_std)
    noise = sigma * R / B
    return bias**2, noise**2, bias**2 + noise**2


def simulated(R, B):
    """The same from batches that are drawn and released: mean of the squared errors, and its standard error."""
    drawn = rng.normal(loss_mean, loss_std, (batches, B))
    released = np.minimum(drawn, R).mean(axis=1) + sigma_loss * R / B * rng.standard_normal(batches)
    squares = (released - drawn.mean(axis=1)) ** 2
    return squares.mean(), squares.std(ddof=1) / batches**0.5


fine = np.geomspace(0.005, 5, 4000) * loss_mean
rows = {}
for size in batch_sizes:
    total = u(fine, size)[2]
    at_mean, at_sum = (u(place, size)[2] / total.min() for place in (loss_mean, 3 * loss_mean))
    best = fine[total.argmin()]
    rows[size] = {"best R_l (nats)": best, "best R_l / L": best / loss_mean, "least error": total.min()}
    rows[size] |= {"at L / least": at_mean, "at the sum of three / least": at_sum}
trade_offs = pd.DataFrame.from_dict(rows, orient="index").rename_axis("B")
findings = [
    f"B = {size:,}: the best R_l is {row['best R_l / L']:.2f} L; at L the squared error is {row['at L / least']:.3g} times the least"
    for size, row in rows.items()
]
print(*findings, sep="\n")
display(trade_offs.round(3))

# %% figure="01_bias_variance_batches" shows="Squared bias, variance and their sum for the private mean of normal losses against R_l, for several batch sizes." claim="Theorem 1 and §\"Bias-variance trade-off\": R_l = L makes the clipping bias close to zero and the noise small."
figure, axes = plt.subplots(1, len(rows), figsize=(3.6 * len(rows), 4.1), squeeze=False)
for axis, (size, row) in zip(axes[0], rows.items(), strict=True):
    for values, (name, look) in zip(u(fine, size), looks.items(), strict=True):
        axis.plot(fine, values, label=name, **plots.line(look))
    places = np.geomspace(0.25, 4, 16) * loss_mean
    found, error = np.array([simulated(place, size) for place in places]).T
    axis.errorbar(places, found, yerr=2 * error, color="0.1", label="sum, simulated (± 2 standard errors)", **bars)
    least = row["best R_l (nats)"], row["least error"]
    axis.plot(*least, "*", markersize=16, color="C1", markeredgecolor="black", label="least")
    axis.axvline(loss_mean, color="0.4", linestyle=":", label="the paper's $R_l = L$")
    axis.axvline(3 * loss_mean, color="0.4", linestyle="--", label="sum of three losses")
    axis.set(xlim=(0, 4 * loss_mean), ylim=(0, 6 * least[1]), xlabel="threshold $R_l$ (nats)")
    axis.set_title(f"B = {size:,}: at L {row['at L / least']:.3g} times the least")
axes[0, 0].set_ylabel("squared error of the mean loss (nats²)")
plots.shared_legend(figure, axes[0], ncols=3)
plt.show()

# %% [markdown]
# The best threshold grows with $B$, since noise fades and bias does not. At the default it lies below the mean loss in the smallest batches, so that *most* losses are
# clipped there, and well above it in the largest. The paper's $R_l = L$ is not the bottom of any of the default's U's. At the mean the bias
# is $0.4\,\xi$ whatever $B$ is, so in large batches it is the whole error. The sum of three losses, which the paper uses in
# practice, errs to the side of noise.

# %% [markdown]
# ## 5. Are losses normal?
#
# Corollary 1 needs normal losses. Here are real ones: batches of the training run at several steps, with the normal distribution
# of the same mean and standard deviation, and below them the clipping bias that each implies (bands: lowest to highest of the
# seeds).
#
# **Predict first:** late in training most samples have a loss near zero and a few have a large one. Will the normal formula give
# too much or too little bias at $R_l = L$?

# %% [markdown]
# ### Answer

# %%
RATIOS = np.geomspace(0.2, 50, 200)  # thresholds in units of the mean loss
rows = []
for stage in sizes["stages"]:
    for run in probed:
        batch = landscape.losses_of(run, stage, "batch")[1]
        mean, std = batch.mean(), batch.std()
        row = {"step": stage, "mean": mean, "sd": std, "skewness": stats.skew(batch)}
        row |= {"normal_below_zero": stats.norm.cdf(-mean / std), "bias_at_L": clipping_bias(batch, mean) / mean}
        row["normal_bias_at_L"] = std * corollary_1(0) / mean
        enough = clipping_bias(batch, mean * RATIOS) < 0.01 * mean
        rows.append(row | {"keeps_99_percent": RATIOS[np.argmax(enough)]})
moments = pd.DataFrame(rows).groupby("step").mean()
findings = [
    f"Step {stage}: mean {row['mean']:.2f}, sd {row.sd:.2f}, skewness {row.skewness:.1f}; clipping at R_l = L takes "
    f"{row.bias_at_L:.1%} of the mean loss, a normal would say {row.normal_bias_at_L:.1%}. To keep 99 % of it, R_l must be "
    f"{row.keeps_99_percent:.1f} L"
    for stage, row in moments.iterrows()
]
print(*findings, sep="\n")
display(moments.style.format(precision=3))

# %% figure="01_bias_variance_losses" shows="Per-sample losses of a training run at several steps beside a normal, and the clipping bias that each implies." claim="Corollary 1 assumes normal losses \"to put this into perspective\"." inputs=["function landscape.probed_losses"]
figure, axes = plt.subplots(2, len(sizes["stages"]), figsize=(3.6 * len(sizes["stages"]), 5.6), squeeze=False)
for (top, bottom), stage in zip(axes.T, sizes["stages"], strict=True):
    batches = [landscape.losses_of(run, stage, "batch")[1] for run in probed]
    mean, std = batches[0].mean(), batches[0].std()
    around = np.linspace(mean - 3.5 * std, mean + 5 * std, 200)
    top.hist(batches[0], bins=around[::4].tolist(), density=True, color="0.7", label="losses of one batch")
    top.plot(around, stats.norm.pdf(around, mean, std), color="C1", label="normal, same mean and sd")
    top.set(title=f"step {stage}", xlabel="loss of a sample (nats)")
    actual = np.array([clipping_bias(batch, batch.mean() * RATIOS) / batch.mean() for batch in batches])
    normal = [one.std() * corollary_1((RATIOS - 1) * one.mean() / one.std()) / one.mean() for one in batches]
    for values, colour, label in ((actual, "C0", "actual"), (np.array(normal), "C1", "normal (Corollary 1)")):
        bottom.plot(RATIOS, values.mean(axis=0), color=colour, label=label)
        bottom.fill_between(RATIOS, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.2)
    cut, said = (moments[name][stage] for name in ("bias_at_L", "normal_bias_at_L"))
    bottom.set(title=f"at L {cut:.0%} is cut; a normal says {said:.0%}", xlabel="threshold $R_l$ / mean loss $L$")
    bottom.set(xscale="log", yscale="log", ylim=(1e-3, 3))
    bottom.axvline(1, color="0.4", linestyle=":")
    plots.log_ticks(bottom.xaxis, [0.2, 1, 5, 20])
axes[0, 0].set_ylabel("density (1/nat)")
axes[1, 0].set_ylabel("clipping bias / mean loss")
plots.shared_legend(figure, axes[:, 0], ncols=3)
plt.show()

# %% [markdown]
# Early on the normal gives nearly the right bias, whatever the shape of the histogram. Late in the default's run it fails twice: it says too much
# bias at $R_l = L$, and far too little at thresholds of several $L$. A normal is symmetric. So much of its weight lies below zero,
# where no loss of a classifier is, while it misses the few large losses that make up much of the mean. Then a threshold must be many times the mean loss, or
# follow from something other than the mean.
#
# In the table, `skewness` is 0 for a normal and above 0 where there is a long tail of large losses. `keeps_99_percent` is the threshold, in units of $L$, at which clipping leaves 99 % of the mean loss.

# %% [markdown]
# ## 6. What it does to the learning rate
#
# Nobody needs the loss for its own sake. The run is at $\mathbf w$ and is about to move along $-\mathbf G$, the noisy sum of gradients or what an optimizer makes of it. It measures the loss a step
# of length $h$ ahead ($L_-$, at $\mathbf w - h\mathbf G$) and as far behind ($L_+$, at $\mathbf w + h\mathbf G$), and takes the slope $b = (L_+ - L_-)/2h$ to find a rate ([notebook 04](04_curve_fit.ipynb)). So what counts is the error of a *difference*. Now the target is the slope on
# the raw losses of the batch. Its bias is what clipping takes from the difference; its noise is $\sigma_l R_l / (\sqrt2 B h)$, since two noises are
# subtracted and divided by $2h$.
#
# The losses are those of section 5, at the distance $h$ that the run probes: its own rate. Squared errors are drawn in units of the squared slope. **The line at 1 is a run that measures nothing and
# says "slope zero".**
#
# **Predict first:** at $R_l = L$, is the measured slope better than that?

# %% [markdown]
# ### Answer

# %%
ratios = np.linspace(0, 4, 81)


def slope_errors(losses):
    """Squared bias, variance and their sum of the slope, in units of its square; losses ahead, here and behind, shape (3, B)."""
    ahead, here, behind = losses
    cuts = ratios[:, None] * here.mean()
    slope = (behind - ahead).mean() / 2
    clipped = (np.minimum(behind, cuts) - np.minimum(ahead, cuts)).mean(axis=1) / 2
    noise = sigma_loss * cuts[:, 0] / here.size / 2**0.5
    return np.array([(slope - clipped) ** 2, noise**2, (slope - clipped) ** 2 + noise**2]) / slope**2


slopes = {
    stage: [slope_errors(landscape.losses_of(run, stage, "batch")) for run in probed] for stage in sizes["stages"]
}

# %% figure="01_bias_variance_slope" shows="Squared bias, variance and their sum for the slope that a probe measures, against R_l (bands: all seeds)." claim="Fig. \"lr loss curve\": sigma_l has negligible interference with the precision of estimating eta." inputs=["function landscape.probed_losses"]
figure, axes = plt.subplots(1, len(slopes), figsize=(max(5, 3.6 * len(slopes)), 3.8), sharey=True, squeeze=False)
for axis, (stage, found) in zip(axes[0], slopes.items(), strict=True):
    for (name, look), values in zip(looks.items(), np.swapaxes(found, 0, 1), strict=True):
        axis.plot(ratios, values.mean(axis=0), label=name, **plots.line(look))
        axis.fill_between(ratios, values.min(axis=0), values.max(axis=0), color=look["color"], alpha=0.15)
    at_mean = np.mean(found, axis=0)[2, ratios == 1].item()
    axis.axhline(1, color="0.4", linewidth=1.2, label='"slope zero"')
    axis.axvline(1, color="0.4", linestyle=":", linewidth=1.2, label="the paper's $R_l = L$")
    axis.set(ylim=(0, 6), xlabel="threshold $R_l$ / mean loss $L$")
    axis.set_title(f"step {stage}: at L {at_mean:.2g} times\nthe error of saying nothing")
axes[0, 0].set_ylabel("squared error / squared slope")
plots.shared_legend(figure, axes[0], ncols=5, fontsize="small")
findings = [
    f"step {stage}: at R_l = L the slope's squared error is {total[ratios == 1].item():.2g} times the slope's square; "
    + (
        f"at the best threshold, {ratios[total.argmin()]:.2g} L, {total.min():.2g} times"
        if total.min() < 1
        else "no threshold beats saying nothing"
    )
    for stage, found in slopes.items()
    for total in [np.mean(found, axis=0)[2]]
]
print(*findings, sep="\n")
plt.show()

# %% [markdown]
# Why the bump at the default's first steps? A threshold below the smallest loss cuts all three losses alike. The slope is then zero, and its error 1. The noise adds to that, until at $R_l$ near $L$ the bias falls.
#
# The mean loss is known well, and the slope is not. Noise that is small against a loss can be large against its *change* over one step. There are three ways out: look
# farther, take a larger batch, or ask another question. Notebook [04](04_curve_fit.ipynb) looks farther, and asks another question.

# %% [markdown]
# ## 7. Why gradients may be normalised and losses may not: Tab. "diff priv"
#
# A gradient is clipped, too: one that is longer than $R_g$ is shortened to $R_g$. The paper even *normalises* gradients: all get length 1, whatever their own was. So nearly
# everything is clipped, and the bias is large. Why does nobody mind?
#
# A loss is one number, a gradient has $d$, one for each weight of the model. If $z$ has $d$ independent standard normal entries, the noise is as long as
# $\mathbb E\|z\|\,\sigma R / B$ on average. That is $\sqrt{2/\pi}\,\sigma_l R_l/B$ for the loss and nearly $\sqrt d\,\sigma_g R_g/B$ for the
# gradient. The table has both for three models, in units of their own clip ($R_l$, $R_g$). The noise is what the budget
# above allows: for the digits network on its own task, for vision transformers on CIFAR-10 with $B = 1{,}000$ and 5 epochs
# (the paper states neither). Columns: `formula` as the paper prints it, `exact` with $\mathbb E\|z\|$ exact, and the length of one draw.
#
# **Predict first:** the mean of gradients normalised to length 1 has length 1 at most. How long is the noise on it, for a model
# of 86 million parameters and a batch of 1,000, if $\sigma_g$ is near 1?

# %% [markdown]
# ### Answer

# %% table="01_bias_variance_noise" shows="Expected noise of the private mean loss and gradient in units of their clips, by formula and simulated." claim="Tab. \"diff priv\": noise sqrt(2/pi) sigma_l R_l / B on the loss, sqrt(d) sigma_g R_g / B on the gradient."
on_images = bias_variance.noise_of(CELLS, noise_split.DATA_SETS[0].budget(epsilon))
weights = sum(parameter.numel() for parameter in task.model(seed=0).parameters())
models = [  # name, number of weights d, batch size B, noise; the ViTs with a head for ten classes (Dosovitskiy et al., 2021)
    ("digits network", weights, B, split),
    ("ViT-Small, CIFAR-10", 21_669_514, 1000, on_images),
    ("ViT-Base, CIFAR-10", 85_806_346, 1000, on_images),
]
magnitudes = []
for name, dimension, size, its in models:
    sigmas = {"loss": (1, its.sigma_loss), "gradient": (dimension, its.sigma_gradient_probe)}
    for quantity, (d, noise) in sigmas.items():
        formula = (np.sqrt(2 / np.pi) if quantity == "loss" else d**0.5) * noise / size
        drawn = np.linalg.norm(np.random.default_rng(0).standard_normal(d)) * noise / size
        exact = stats.chi(d).mean() * noise / size  # E||z|| of d independent normal numbers
        row = {"model": name, "quantity": quantity, "dimension": d, "noise_multiplier": noise, "B": size}
        magnitudes.append(row | {"formula": formula, "exact": exact, "one draw": drawn})
table = pd.DataFrame(magnitudes)
display(table.style.format(precision=4, thousands=",").hide(axis="index"))
exact = table.pivot(index="model", columns="quantity", values="exact")
ratio = exact.eval("gradient / loss")
findings = [
    f"on the mean gradient of {models[-1][0]} the noise is {exact.gradient[models[-1][0]]:.2g} times as long as the mean can be at most",
    f"gradient noise is {ratio.min():,.0f} to {ratio.max():,.0f} times the loss noise, each in units of its clip",
]
print(*findings, sep="\n")

# %% [markdown]
# Under so much noise the bias of clipping hardly shows. And the gradient survives: its noise spreads over all $d$ directions, of which few matter, and
# averages out over the steps. A loss has one direction. Its noise is small, so its bias shows, and it stays.

# %% [markdown]
# ## 8. Gaussian or Laplace noise?
#
# Noise need not be normal. A *Laplace* distribution of scale $s$ has the density $e^{-|x|/s}/2s$, and the standard deviation $\sqrt2\,s$. Its privacy loss (notebook 00) never
# exceeds $1/s$ per unit moved, so it needs no $\delta$. The paper's noise is "Gaussian by default". Both are calibrated
# here to the *same* budget, with three losses and the gradient on one batch; the Laplace scale is $\sigma_l R_l / B$. (RDP counts here, which can count both. It is a looser bound than PLD, which found the noise of the
# other sections. So it asks for a little more.)
#
# **Predict first:** for a single release with $\delta = 0$, Laplace is the usual choice. And for many releases beside a
# Gaussian gradient?

# %% [markdown]
# ### Answer

# %%
noises = {
    name: calibrate(**budget, interval=5, counting=Counting("rdp", "same_batch", name)).sigma_loss
    for name in ("gaussian", "laplace")
}
deviations = {"gaussian": noises["gaussian"], "laplace": np.sqrt(2) * noises["laplace"]}
least = {name: u(fine, B, sigma)[2].min() for name, sigma in deviations.items()}
more = (deviations["laplace"] / deviations["gaussian"]) ** 2 - 1
findings = [
    f"At epsilon = {epsilon:g} on the same batch, Laplace noise has {more:+.0%} variance (sigma_l = {noises['laplace']:.1f} "
    f"against {noises['gaussian']:.1f}); its least squared error is {least['laplace'] / least['gaussian']:.2f} times the Gaussian's"
]
print(*findings)

# %% figure="01_bias_variance_laplace" shows="Density of Gaussian and Laplace noise at equal privacy, and the total error of the mean loss under each." claim="§\"Privatized quadratic function\": Gaussian noise by default, or Laplace noise with clipping in L1 norm."
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.7))
grid = np.linspace(-4.5, 4.5, 401) * deviations["gaussian"] / B
for name, style in (("gaussian", "paper"), ("laplace", "reference")):
    look = plots.line(plots.STYLES[style]) | {"label": name}
    density = (stats.norm if name == "gaussian" else stats.laplace)(scale=noises[name] / B)
    left.plot(grid, density.pdf(grid), **look)
    right.plot(fine, u(fine, B, deviations[name])[2], **look)
left.set(xlabel="noise of the private mean loss (units of $R_l$)", ylabel="density", yscale="log", ylim=(1e-3, None))
right.set(xlim=(0, 3 * loss_mean), ylim=(0, 6 * least["laplace"]))
right.set(xlabel="threshold $R_l$ (nats)", ylabel="squared error of the mean loss (nats²)")
wider = deviations["laplace"] > deviations["gaussian"]
left.set_title(f"At equal privacy Laplace noise is {'wider' if wider else 'narrower'}")
right.set_title(f"so its U lies {'higher' if wider else 'lower'}")
plots.shared_legend(figure, [left], ncols=2)
plt.show()

# %% [markdown]
# Over many releases the worst case of the privacy loss counts little; its variance counts. By that measure a Laplace of
# scale $s$ costs about as much as a Gaussian of standard deviation $s$ (compare the two $\sigma_l$). But its own standard deviation
# is $\sqrt2\, s$. The paper's default is the right one.

# %% [markdown]
# ## Verdict

# %%
parameters = {"profile": profile, "epsilon": epsilon, "seeds": seeds, "step": step, "batch_sizes": batch_sizes}
parameters |= {"loss_mean": loss_mean, "loss_std": loss_std}
values, bias = len(dots) + 2 * len(thresholds), moments.bias_at_L
decided = [
    Verdict(
        "Theorem 1 and Corollary 1: clipping bias and noise of a private mean loss",
        by_proof(max(distances) < 4),
        f"{values} simulated values lie within {max(distances):.1f} standard errors of the formulas",
    ),
    Verdict(
        "R_l = L leaves a clipping bias close to zero",
        by_row(bias < 0.05),
        f"of the mean loss it is {', '.join(f'{share:.0%} at step {step}' for step, share in bias.items())}",
    ),
]
verdict("01_bias_variance", decided, parameters=parameters, inputs=run_inputs[:1])

# %% [markdown]
# ## Where this differs from the paper
#
# * Sections 2, 3 and 7 restate the paper's formulas; the numbers in Tab. "diff priv" are ours, since the paper prints formulas only.
# * The paper finds $R_l = L$, or the sum of three losses, without a computed optimum; section 4 looks for one on normal losses, section 6 on
#   the slope of real ones.
# * Real losses come from a small network trained from scratch (profile `laptop`), not from fine-tuning a vision transformer. There
#   $B$ is larger and $\sigma_l$ smaller, so noise matters less and bias more.
# * Noise is calibrated with gradient and losses on the same batch, as Algorithm 1 runs; the paper counts them apart.

# %% [markdown]
# ## Exercises
#
# Put your answer in place of `None` and run the cell; it says whether you are right.
#
# 1. Solve the equation of section 1 for normal losses with mean 2 and standard deviation 0.4, $B = 500$ and $\sigma_l = 200$. Which threshold is best, in nats?

# %%
best_threshold = None
check(best_threshold, lambda: truth("01.1"))

# %% [markdown] tags=["solution"]
# *Solution.* A root finder does it: bias and probability have closed forms. The noise is large, so the best threshold, 1.70 nats, lies below the mean and clips most losses: 77 %.

# %% tags=["solution"]
from scipy.optimize import brentq


def excess(R):
    return 0.4 * corollary_1((R - 2.0) / 0.4) * norm.sf(R, 2.0, 0.4) - (200 / 500) ** 2 * R


best_threshold = brentq(excess, 0.1, 10)
print(f"{best_threshold:.2f} nats, which clip {norm.sf(best_threshold, 2.0, 0.4):.0%} of the losses")
check(best_threshold, lambda: truth("01.1"))

# %% [markdown]
# 2. In section 4, $\sigma_l$ was held fixed while $B$ grew. At fixed N and number of steps, by which factor does $\sigma_l / B$ fall
#    as $B$ grows from 150 to 1,500? (Give the first divided by the second. `bias_variance.noise_of(CELLS, budget | {"sample_rate": B / task.train_size},
#    allocation="per_step").sigma_loss` finds the noise. `allocation="per_step"` gives more noise to the gradients of probe steps alone; notebook 03, section 7, says why.)

# %%
factor = None
check(factor, lambda: truth("01.2", CELLS, budget, task.train_size))

# %% tags=["solution"]
rates = {B: budget | {"sample_rate": B / task.train_size} for B in (150, 1500)}
noises = {B: bias_variance.noise_of(CELLS, at, allocation="per_step").sigma_loss for B, at in rates.items()}
factor = (noises[150] / 150) / (noises[1500] / 1500)
print(f"sigma_l is {noises[150]:.1f} at B = 150 and {noises[1500]:.1f} at 1,500: the factor is {factor:.2f}")
check(factor, lambda: truth("01.2", CELLS, budget, task.train_size))

# %% [markdown] tags=["solution"]
# *Solution.* Far less than tenfold. As long as the noise is large, $\sigma_l$ grows nearly in proportion to $q$, and the noise on the mean
# hardly falls: at a fixed number of steps, larger batches bring little. What the three U's of section 4 show needs a larger
# *data set*.

# %% [markdown]
# 3. Take the *population* mean as the target in section 1: a batch of 500 random records misses it even without clipping and noise. By how many nats (root mean square), if losses have a
#    standard deviation of 0.4?

# %%
population_error = None
check(population_error, lambda: truth("01.3"))

# %% [markdown] tags=["solution"]
# *Solution.* $0.4/\sqrt{500} = 0.018$ nats. Beside the 0.12 nats of the bottom of the U that is little, and clipping makes it smaller still. So the bottom hardly moves.

# %% tags=["solution"]
population_error = 0.4 / 500**0.5
check(population_error, lambda: truth("01.3"))
