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
# * say what clipping takes from a private mean loss and what noise adds, and compute both in closed form,
# * find the threshold $R_l$ of least error, and place the paper's $R_l = L$ beside it,
# * say why gradients may be clipped to nothing but losses may not (Tab. "diff priv"), with numbers for real models,
# * judge when the normal assumption of Corollary 1 holds on real losses, and compare Gaussian with Laplace noise.
#
# **The paper's items.** Theorem 1 and Corollary 1 ("a large $R_l$ reduces the clipping bias but magnifies the noise, and vice
# versa"), Fig. "truncated normal", Tab. "diff priv", and the advice that follows from them: $R_l \approx L$, so that "the
# clipping bias is close to zero". What the threshold does to the learning rate is the next notebook. Both together are a lecture of
# ninety minutes, planned in [docs/teaching.md](../docs/teaching.md).

# %% tags=["parameters"]
profile = "laptop"  # how large: smoke, laptop, gpu or paper
epsilon = 3.0  # of a run, at the task's delta
seeds = 3  # training runs whose losses are looked at
step = 10  # of the run, at which one batch is looked at closely
batch_sizes = [50, 500, 5000]  # B, of sections 2 and 3
loss_mean = 2.0  # of the normal losses (nats)
loss_std = 0.4  # of the normal losses (nats)

# %%
from hyfreedp.experiments.book.parameters import check_parameters

check_parameters(
    globals(),
    {
        "profile": ("smoke", "laptop", "gpu", "paper"),
        "epsilon": float,
        "seeds": int,
        "step": int,
        "batch_sizes": list,
        "loss_mean": float,
        "loss_std": float,
    },
)

# %%
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown, display
from scipy import stats

from hyfreedp.experiments.accounting_of_the_paper import Counting, calibrate
from hyfreedp.experiments.book.exercises import check
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.cache import cached
from hyfreedp.experiments.store.paths import CELLS
from hyfreedp.experiments.store.verdicts import verdict
from hyfreedp.experiments.studies import bias_variance, bias_variance_figures, clouds, noise_magnitudes
from hyfreedp.experiments.tasks.registry import TASKS

plots.use_style()

# %%
if profile == "smoke":  # a small budget is calibrated quickly
    epsilon, step = 0.2, 2
    print(f"profile smoke sets epsilon = {epsilon} and step = {step}")
sizes = bias_variance.sizes_of(profile, step)
parameters = {
    name: globals()[name] for name in ("profile", "epsilon", "seeds", "step", "batch_sizes", "loss_mean", "loss_std")
}

# %% [markdown]
# ## Data: a run and its budget
#
# Where real losses are needed, they are those of a network that learns 1,500 handwritten digits under the budget above
# (preset "paper", which probes at every step here). The noise multipliers are those of preset "paper", which pays for its probes by a little more noise on the
# gradient. Raw losses are used here to *teach*. They are not private; a run never shows them.

# %%
task = TASKS["digits"]
budget = bias_variance.digits_budget(epsilon)
three_losses = bias_variance.noise_of(CELLS, budget)
sigma_loss = three_losses.sigma_loss
probed, run_inputs = clouds.probed_runs(CELLS, epsilon=epsilon, seeds=seeds, stages=sizes["stages"])
text = (
    f"N = {task.train_size:,}, B = {task.batch_size}, T = {task.steps}, epsilon = {epsilon:g}, delta = {task.delta:g}: "
    f"sigma_g = {three_losses.sigma_gradient_probe:.2f}, sigma_l = {sigma_loss:.1f}."
)
display(Markdown(text))

# %% [markdown]
# ## 1. What clipping takes: Fig. "truncated normal"
#
# A private mean loss clips every loss at $R_l$ before it adds them up. What is cut off is the *clipping bias*, the mean of
# $\mathrm{ReLU}(L_i - R_l)$. For losses $L_i \sim \mathcal N(\mu, \xi^2)$ it is, with $\alpha = (R_l - \mu)/\xi$ (Corollary 1),
#
# $$ \big[\mathbb E(L_i \mid L_i > R_l) - R_l\big]\, \mathbb P(L_i > R_l) = \xi\, \big[\phi(\alpha) - \alpha\,(1 - \Phi(\alpha))\big]. $$
#
# **Predict first:** at $R_l = \mu$, half of the losses are clipped. Is the bias then half a standard deviation, more, or less?

# %%
alphas = np.linspace(-3, 3, 61)
figure, axis = plt.subplots(figsize=(5, 3.4))
axis.plot(alphas, bias_variance_figures.normal_bias(alphas), **plots.line(plots.STYLES["alternative"]))
axis.set(xlabel=r"$\alpha = (R_l - \mu)\,/\,\xi$", ylabel=r"$\phi(\alpha) - \alpha\,(1 - \Phi(\alpha))$")

# %%
at = bias_variance_figures.normal_bias([0.0, 1.0, 2.0])
summary = [
    f"Strictly falling; {at[0]:.4f} = 1/sqrt(2 pi) at alpha = 0, {at[1]:.4f} at 1 and {at[2]:.4f} at 2 (in standard deviations of the "
    "loss)."
]
plots.save(
    figure,
    "01_bias_variance_normal",
    parameters=parameters,
    inputs=[],
    shows="Clipping bias of normal losses, in their standard deviations, against the standardised threshold alpha.",
    claim='Fig. "truncated normal": phi(alpha) - alpha (1 - Phi(alpha)) is strictly decreasing, minimised at alpha = infinity.',
    summary=summary,
)
plots.what_to_see(summary)

# %% [markdown]
# The curve never reaches zero but falls faster than any exponential: two standard deviations above the mean, hardly anything
# is lost, *if* losses are normal. Section 5 looks at real ones.
#
# ## 2. Theorem 1 and Corollary 1 on trial
#
# Theorem 1 states two facts about $\tilde L = \frac1B\big[\sum_i \min(L_i, R_l) + \sigma_l R_l\, \mathcal N(0, 1)\big]$:
#
# $$ \text{bias} = \frac1B \sum_i \mathrm{ReLU}(L_i - R_l), \qquad
#    \text{noise (sd)} = \frac{\sigma_l R_l}{B}. $$
#
# We test them without using them. Left: batches of normal losses are drawn, and their mean bias is compared with Corollary 1.
# Right: *one* batch of real losses is released again and again by `privatize_loss`; what the releases miss on average is the
# bias, their scatter is the noise.
#
# The tables behind the plot: `bias` and `noise` as simulated, `*_error` their standard errors, `spread` the standard deviation
# of the bias from batch to batch.
#
# **Predict first:** the corollary is about $B \to \infty$. Will the mean bias of batches of 50 lie above, on or below the curve?

# %%
batches, runs, small_batch = sizes["batches"], sizes["releases"], batch_sizes[0]
alphas = np.linspace(-2.5, 2.5, 11).tolist()
dots = bias_variance.normal_bias_dots(
    mean=loss_mean, std=loss_std, batch_size=small_batch, alphas=alphas, batches=batches, seed=0
)
real = clouds.losses_of(probed[0], step, "batch")[1]
curves, releases = bias_variance.one_batch(real, noise_multiplier=sigma_loss, runs=runs, seed=1)
print(f"left: {batches} batches of {small_batch}; right: {runs} releases of a batch of {real.size}")
figure = bias_variance_figures.draw_theorem(dots, curves, releases)

# %%
distances = [abs(z).max() for z in bias_variance_figures.standard_errors(dots, releases, real, sigma_loss)]
summary = [
    f"Corollary 1: the {len(dots)} simulated means lie within {distances[0]:.1f} standard errors of the closed form (they share "
    "their draws).",
    f"Theorem 1: the {len(releases)} simulated biases lie within {distances[1]:.1f}, the noises within {distances[2]:.1f} standard "
    "errors of it.",
]
plots.save(
    figure,
    "01_bias_variance_theorem",
    parameters=parameters,
    inputs=run_inputs[:1],
    shows="Clipping bias and noise as simulated (bars: two standard errors) on the closed forms of Corollary 1 and Theorem 1.",
    claim="Theorem 1 and Corollary 1: closed forms of clipping bias and noise variance.",
    summary=summary,
)
plots.what_to_see(summary)

# %% [markdown]
# The mean over batches lies *on* the curve at every $B$: the expected bias of one loss does not depend on $B$, only its scatter
# does (grey band). The limit $B \to \infty$ in the theorem is the law of large numbers for that scatter.
#
# ## 3. The trade-off, and its optimum
#
# Bias falls with $R_l$ and noise grows with it. The mean squared error of the released mean loss is the sum of their squares,
#
# $$ \text{MSE}(R_l) = \text{bias}(R_l)^2 + \Big(\frac{\sigma_l R_l}{B}\Big)^2, $$
#
# and its root, the *total*, has one minimum, where $\text{bias}(R)\,\mathbb P(L > R) = (\sigma_l/B)^2 R$. Below: normal losses with the mean and standard deviation of the
# parameters, early training of a ten-class problem ($\ln 10 = 2.3$), at the $\sigma_l$ of the digits task. Only $B$ changes, as
# in Theorem 1. (In a run $\sigma_l$ would follow $B$, through the sample rate.) The dots release simulated batches.
#
# **Predict first:** as $B$ grows tenfold, does the best $R_l$ move towards the mean loss or away from it?

# %%
normal = {"mean": loss_mean, "std": loss_std}
trade_offs = {
    size: bias_variance.trade_off(**normal, noise_multiplier=sigma_loss, batch_size=size, batches=sizes["batches"])
    for size in batch_sizes
}
figure = bias_variance_figures.draw_trade_offs(trade_offs, loss_mean)

# %%
summary = bias_variance_figures.trade_off_findings(trade_offs, loss_mean)
plots.save(
    figure,
    "01_bias_variance",
    parameters=parameters,
    inputs=[],
    shows="Clipping bias, noise and total error of the private mean of normal losses against R_l, for several batch sizes.",
    claim='Theorem 1 and §"Bias-variance trade-off": R_l = L makes the clipping bias close to zero and the noise small.',
    summary=summary,
)
plots.what_to_see(summary)

# %% [markdown]
# The best threshold grows with $B$, since noise fades and bias does not. In small batches it lies below the mean loss, where
# *most* losses are clipped; in large ones well above. The paper's $R_l = L$ is no optimum of anything: at $\alpha = 0$ the bias
# is $0.4\,\xi$ whatever $B$, so in large batches it is the whole error. The sum of three losses, which the paper uses in
# practice, errs to the side of noise.
#
# ## 4. Why gradients may be normalised and losses may not: Tab. "diff priv"
#
# A loss is one number, a gradient has $d$. With $z \sim \mathcal N(0, I_d)$, the expected noise is
# $\mathbb E\|z\|\,\sigma R / B$, which is $\sqrt{2/\pi}\,\sigma_l R_l/B$ for the loss and nearly $\sqrt d\,\sigma_g R_g/B$ for the
# gradient. The table computes both for three models, in units of their own clip ($R_l$, $R_g$), for the noise that the budget
# above allows: for the digits network on its own task, for vision transformers on CIFAR-10 with $B = 1{,}000$ and 5 epochs
# (the paper states neither). Columns: `formula` as the paper prints it, `exact` with $\mathbb E\|z\|$ exact, `simulated` through
# `privatize_loss` and `privatize_gradient` on nothing but noise, with its standard `error`.
#
# **Predict first:** the mean of gradients normalised to length 1 has length 1 at most. How long is the noise on it, for a model
# of 86 million parameters and a batch of 1,000?

# %%
models = noise_magnitudes.paper_models(CELLS, three_losses, epsilon, transformers=profile != "smoke")
magnitudes = cached(CELLS, noise_magnitudes.noise_magnitudes, models=models, seeds=seeds)
display(magnitudes.style.format(precision=4, thousands=",").hide(axis="index"))

# %%
ratio = magnitudes.pivot(index="model", columns="quantity", values="exact").eval("gradient / loss")
summary = [
    f"Gradient noise is {ratio.min():,.0f} to {ratio.max():,.0f} times the loss noise, each in units of its clip."
]
plots.save_table(
    magnitudes,
    "01_bias_variance_noise",
    parameters=parameters,
    inputs=[],
    shows="Expected noise of the private mean loss and gradient in units of their clips, by formula and simulated.",
    claim='Tab. "diff priv": noise sqrt(2/pi) sigma_l R_l / B on the loss, sqrt(d) sigma_g R_g / B on the gradient.',
    summary=summary,
)
plots.what_to_see(summary)

# %% [markdown]
# The gradient survives because its noise spreads over all directions and averages out over steps; the loss has one direction, and
# bias in it stays.

# %% [markdown]
# ## 5. Are losses normal?
#
# Corollary 1 needs normal losses. Here are real ones: batches of the training run at several steps, with the normal distribution
# of the same mean and standard deviation, and below them the clipping bias that each implies (bands: lowest to highest of the
# seeds).
#
# **Predict first:** late in training most samples have a loss near zero and a few have a large one. Will the normal formula give
# too much or too little bias at $R_l = L$?

# %%
moments = bias_variance.loss_moments(probed, sizes["stages"])
display(moments.style.format(precision=3))
figure = bias_variance_figures.draw_losses(probed, sizes["stages"])

# %%
summary = [
    f"Step {stage}: mean {row['mean']:.2f}, sd {row.sd:.2f}, skewness {row.skewness:.1f}; clipping at R_l = L takes "
    f"{row.bias_at_L:.1%} of the mean loss, a normal would say {row.normal_bias_at_L:.1%}. To keep 99 % of it, R_l must be "
    f"{row.keeps_99_percent:.1f} L."
    for stage, row in moments.iterrows()
]
plots.save(
    figure,
    "01_bias_variance_losses",
    parameters=parameters,
    inputs=run_inputs,
    shows="Per-sample losses of a training run at several steps beside a normal, and the clipping bias that each implies.",
    claim='Corollary 1 assumes normal losses "to put this into perspective".',
    summary=summary,
)
plots.what_to_see(summary)

# %% [markdown]
# Early on the normal gives nearly the right bias, whatever the shape of the histogram. Later it fails in both directions: too much
# bias at $R_l = L$ and far too little at generous thresholds. A normal with the same moments puts much of its mass below zero,
# where no cross-entropy is, and misses the few large losses that make up nearly all of the mean. A rule for $R_l$ must be generous then, or look
# at something other than the mean. (`keeps_99_percent` is the threshold, in units of $L$, that takes 1 % of the mean.)
#
# ## 6. Gaussian or Laplace noise?
#
# A scalar may be clipped in L1 norm and get Laplace noise instead ("Gaussian by default", says the paper). Both are calibrated
# here to the *same* budget by RDP, with three losses and the gradient on one batch. The Laplace scale is $\sigma_l R_l / B$, its standard
# deviation $\sqrt2$ times that.
#
# **Predict first:** for a single release of pure $\varepsilon$, Laplace is often the better choice. And for many releases composed
# with a Gaussian gradient?

# %%
plan = budget | {"interval": 5}
noises = {
    name: calibrate(**plan, counting=Counting("rdp", "same_batch", name)).sigma_loss for name in ("gaussian", "laplace")
}
deviations = {"gaussian": noises["gaussian"], "laplace": np.sqrt(2) * noises["laplace"]}
trades = {
    name: bias_variance.trade_off(**normal, noise_multiplier=noise, batch_size=task.batch_size)
    for name, noise in deviations.items()
}
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.7))
grid = np.linspace(-4.5, 4.5, 401) * deviations["gaussian"] / task.batch_size
for name, style in (("gaussian", "alternative"), ("laplace", "paper")):
    look = plots.line(plots.STYLES[style]) | {"label": name}
    density = (stats.norm if name == "gaussian" else stats.laplace)(scale=noises[name] / task.batch_size)
    left.plot(grid, density.pdf(grid), **look)
    right.plot(trades[name].curves.threshold, trades[name].curves.rmse, **look)
left.set(xlabel="noise of the private mean loss (units of $R_l$)", ylabel="density", yscale="log", ylim=(1e-3, None))
right.set(xscale="log", yscale="log", xlabel="threshold $R_l$ (nats)", ylabel="total error of the mean loss (nats)")
plots.shared_legend(figure, [left], ncols=2)

# %%
variance = (deviations["laplace"] / deviations["gaussian"]) ** 2 - 1
least = {name: trade.error_at(trade.best) for name, trade in trades.items()}
summary = [
    f"At epsilon = {epsilon:g} on the same batch, Laplace noise has {variance:+.0%} variance (sigma_l = {noises['laplace']:.1f} "
    f"against {noises['gaussian']:.1f}); its least error is {least['laplace'] / least['gaussian']:.2f} times the Gaussian's."
]
plots.save(
    figure,
    "01_bias_variance_laplace",
    parameters=parameters,
    inputs=[],
    shows="Density of Gaussian and Laplace noise at equal privacy, and the total error of the mean loss under each.",
    claim='§"Privatized quadratic function": Gaussian noise by default, or Laplace noise with clipping in L1 norm.',
    summary=summary,
)
plots.what_to_see(summary)

# %% [markdown]
# Over many releases it is not the worst case of the privacy loss that counts but its variance, and by that measure a Laplace of
# scale $s$ costs about as much as a Gaussian of standard deviation $s$ (compare the two $\sigma_l$), while its own standard deviation
# is $\sqrt2\, s$. The paper's default is the right one.
#
# ## Verdict

# %%
decided = bias_variance_figures.verdicts(max(distances), len(dots) + 2 * len(releases), moments)
verdict("01_bias_variance", decided, parameters=parameters, inputs=run_inputs[:1])

# %% [markdown]
# ## Where this differs from the paper
#
# * Sections 1 to 4 restate the paper's formulas; the numbers in Tab. "diff priv" are ours, since the paper prints formulas only.
# * The paper finds $R_l = L$, or the sum of three losses, without a computed optimum; sections 3 and 5 look for one, on normal and on
#   real losses.
# * Real losses come from a small network trained from scratch (profile `laptop`), not from fine-tuning a vision transformer. There
#   $B$ is larger and $\sigma_l$ smaller, so noise matters less and bias more.
# * Noise is calibrated with gradient and losses on the same batch, as Algorithm 1 runs; the paper counts them apart.
#
# ## Exercises
#
# Put your answer in place of `None` and run the cell; it says whether you are right. Solutions are in
# [`solutions/`](solutions/01_bias_variance.ipynb).
#
# 1. Derive the equation of section 3 for the best threshold, and explain why it has exactly one solution. Which threshold (in nats) is it
#    for losses with mean 2 and standard deviation 0.4, $B = 500$ and $\sigma_l = 100$?

# %%
best_threshold = None
check(best_threshold, lambda: bias_variance.optimal_threshold(2.0, 0.4, noise_multiplier=100, expected_batch_size=500))

# %% [markdown] tags=["solution"]
# *Solution.* The squared error is $\text{bias}^2 + (\sigma_l/B)^2 R^2$, and the derivative of the bias is $-\mathbb P(L > R)$. Setting
# the derivative to zero gives the equation. Its left side, $\text{bias}(R)\,\mathbb P(L > R)$, is positive and falls to zero, its
# right side grows from zero, so they meet once.

# %% tags=["solution"]
from scipy.optimize import brentq
from scipy.stats import norm

from hyfreedp import normal_clipping_bias


def excess(R):
    return normal_clipping_bias(R, 2.0, 0.4) * norm.sf(R, 2.0, 0.4) - (100 / 500) ** 2 * R


best_threshold = brentq(excess, 0.1, 10)
check(best_threshold, lambda: bias_variance.optimal_threshold(2.0, 0.4, noise_multiplier=100, expected_batch_size=500))

# %% [markdown]
# 2. In section 3, $\sigma_l$ was held fixed while $B$ grew. At fixed N and number of steps, by which factor does $\sigma_l / B$ fall
#    as $B$ grows from 150 to 1,500? (Give the first divided by the second; `bias_variance.noise_of(CELLS, budget | {"sample_rate": ...},
#    allocation="per_step").sigma_loss` calibrates.)

# %%
factor = None
check(factor, lambda: bias_variance.fall_of_noise(CELLS, budget, task.train_size, 150, 1500))

# %% tags=["solution"]
factor = bias_variance.fall_of_noise(CELLS, budget, task.train_size, 150, 1500)
print(f"{factor:.2f}")
check(factor, lambda: bias_variance.fall_of_noise(CELLS, budget, task.train_size, 150, 1500))

# %% [markdown] tags=["solution"]
# *Solution.* Far less than tenfold. As long as the noise is large, $\sigma_l$ grows nearly in proportion to $q$, and the noise on the mean
# hardly falls: at a fixed number of steps, larger batches bring little. What the small multiples of section 3 show needs a larger
# *data set*.
