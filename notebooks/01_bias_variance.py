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
# # Bias against variance: how to clip a loss, and what it does to the learning rate
#
# **After this notebook you can**
#
# * say what clipping takes from a private mean loss and what noise adds, and compute both in closed form,
# * find the threshold $R_l$ of least error, and place the paper's $R_l = L$ beside it,
# * say why gradients may be clipped to nothing but losses may not (Tab. "diff priv"), with numbers for real models,
# * judge when the normal assumption of Corollary 1 holds on real losses, and compare Gaussian with Laplace noise,
# * follow the threshold through to its consequence, a cloud of parabolas and the spread of $\eta = b/a$,
# * attack a learning rate, and say what protects it.
#
# **The paper's items.** Theorem 1 and Corollary 1 ("a large $R_l$ reduces the clipping bias but magnifies the noise, and vice
# versa"), Fig. "truncated normal", Tab. "diff priv", and the advice that follows from them: $R_l \approx L$, so that "the
# clipping bias is close to zero".
#
# There is also a page with one slider that moves the threshold and shows all of this at once:
# [`figures/01_bias_variance.html`](../figures/01_bias_variance.html). It needs no server; open it in any browser.

# %% tags=["parameters"]
profile = "laptop"
epsilon = 3.0
seeds = 3
step = 10
batch_sizes = [50, 500, 5000]
loss_mean = 2.0
loss_std = 0.4
brightness = 16.0

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
        "brightness": float,
    },
)

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import Markdown, display
from matplotlib.collections import LineCollection
from scipy import stats

from hyfreedp import clipping_bias, fit_quadratic, normal_clipping_bias
from hyfreedp.experiments.audits import attack
from hyfreedp.experiments.book import slider
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.cache import cached, key_of
from hyfreedp.experiments.store.files import write_text
from hyfreedp.experiments.store.paths import CELLS, FIGURES
from hyfreedp.experiments.studies import bias_variance, clouds
from hyfreedp.experiments.studies.noise_split import DATA_SETS, preset_split
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.privatize import loss_noise_std, optimal_threshold

plots.use_style()
laptop = {
    "batches": 400,  # simulated batches of normal losses
    "releases": 2000,  # repeated releases of one batch
    "stages": sorted({3, step, 40}),  # steps of the training run to look at
    "octaves": range(-8, 18),  # thresholds: twelve per factor of ten
    "parabolas": 200,  # per threshold
    "attacks": 400,  # with and without the outlier, each
}
sizes = {
    "smoke": {
        "batches": 50,
        "releases": 50,
        "stages": [2],
        "octaves": range(-8, 17, 8),
        "parabolas": 20,
        "attacks": 20,
    },
    "laptop": laptop,
    "gpu": laptop | {"releases": 10_000, "parabolas": 1000, "attacks": 2000},
    "paper": laptop | {"releases": 10_000, "parabolas": 1000, "attacks": 2000},
}[profile]
if profile == "smoke":  # a small budget is calibrated quickly
    epsilon, step = 0.2, 2
parameters = {
    name: globals()[name]
    for name in ("profile", "epsilon", "seeds", "step", "batch_sizes", "loss_mean", "loss_std", "brightness")
}
RED, BLUE, GREEN = (plots.STYLES[name] for name in ("paper", "line_search", "best"))
LINES = {"bias": RED, "noise": GREEN, "rmse": BLUE}
NAMES = {"bias": "clipping bias", "noise": "noise (sd)", "rmse": "total (root mean square)"}


def line(style):
    """A style without its marker."""
    return {name: style[name] for name in ("color", "linestyle")}


# %% [markdown]
# ## Data: a run and its budget
#
# Where real losses are needed, they are those of a network that learns 1,500 handwritten digits under the budget above
# (method "line_search"). The noise multipliers are those of preset "paper", which pays for its probes by a little more noise on the
# gradient. Raw losses are used here to *teach*. They are not private; a run never shows them.

# %%
task = TASKS["digits"]


def noise_of(budget, **choices):
    """The calibrated split of a budget in the paper's plan."""
    arguments = budget | preset_split("paper", budget["steps"]) | choices
    return bias_variance.split_of(cached(CELLS, bias_variance.calibrated, **arguments))


budget = {
    "target_epsilon": epsilon,
    "target_delta": task.delta,
    "sample_rate": task.batch_size / task.train_size,
    "steps": task.steps,
}
three_losses, contrasts = noise_of(budget), noise_of(budget, probe="contrasts")
sigmas = {"losses": three_losses.sigma_loss, "contrasts": contrasts.sigma_loss}
runs = [
    {
        "spec": {"method": "line_search", "epsilon": epsilon, "seed": seed},
        "stages": sizes["stages"],
        "brightness": brightness,
    }
    for seed in range(seeds)
]
probed = [cached(CELLS, clouds.probed_losses, **arguments) for arguments in runs]
run_inputs = [f"cell probed_losses-{key_of(arguments)}" for arguments in runs]
display(
    Markdown(
        f"N = {task.train_size:,}, B = {task.batch_size}, T = {task.steps}, epsilon = {epsilon:g}, delta = {task.delta:g}: "
        f"sigma_g = {three_losses.sigma_gradient_probe:.2f}, sigma_l = {sigmas['losses']:.1f} for three losses and "
        f"{sigmas['contrasts']:.1f} for two contrasts with their counts."
    )
)

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
alphas = np.linspace(-3, 3, 121)
figure, axis = plt.subplots(figsize=(5, 3.4))
axis.plot(alphas, normal_clipping_bias(alphas, mean=0.0, std=1.0), color=BLUE["color"])
marked = pd.DataFrame({"alpha": [-1.0, 0.0, 1.0, 2.0]})
marked["bias"] = normal_clipping_bias(marked.alpha, mean=0.0, std=1.0)
axis.plot(marked.alpha, marked.bias, linestyle="none", marker="o", color=BLUE["color"])
for _, row in marked.iterrows():
    axis.annotate(f"{row.bias:.3f}", (row.alpha, row.bias), textcoords="offset points", xytext=(6, 6))
axis.set(xlabel=r"$\alpha = (R_l - \mu)\,/\,\xi$", ylabel=r"$\phi(\alpha) - \alpha\,(1 - \Phi(\alpha))$")
plt.show()
at = dict(zip(marked.alpha, marked.bias, strict=True))
summary = [
    f"Strictly falling; {at[0.0]:.4f} = 1/sqrt(2 pi) at alpha = 0, {at[1.0]:.4f} at 1 and {at[2.0]:.4f} at 2 "
    "(in standard deviations of the loss)."
]
display(Markdown("**What to see.** " + summary[0]))
plots.save(
    figure,
    "01_bias_variance_normal",
    parameters=parameters,
    inputs=[],
    shows="Clipping bias of normal losses, in their standard deviations, against the standardised threshold alpha.",
    claim='Fig. "truncated normal": phi(alpha) - alpha (1 - Phi(alpha)) is strictly decreasing, minimised at alpha = infinity.',
    summary=summary,
)

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
small_batch = batch_sizes[0]
dots = bias_variance.normal_bias_dots(
    mean=loss_mean,
    std=loss_std,
    batch_size=small_batch,
    alphas=np.linspace(-2.5, 2.5, 11).tolist(),
    batches=sizes["batches"],
    seed=0,
)
real = clouds.losses_of(probed[0], step, "batch")[1]
thresholds = real.mean() * np.geomspace(0.3, 6, 60)
curves = bias_variance.batch_errors(real, thresholds, noise_multiplier=sigmas["losses"], expected_batch_size=real.size)
releases = bias_variance.release_dots(
    real,
    thresholds[::6],
    noise_multiplier=sigmas["losses"],
    expected_batch_size=real.size,
    runs=sizes["releases"],
    seed=1,
)
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
left.plot(alphas, normal_clipping_bias(alphas, mean=0.0, std=1.0), color=BLUE["color"], label="Corollary 1")
left.fill_between(dots.alpha, dots.bias - dots.spread, dots.bias + dots.spread, color="0.85", label="one batch (1 sd)")
left.errorbar(
    dots.alpha, dots.bias, yerr=2 * dots.error, fmt="o", color="0.2", markersize=4, capsize=2, label="mean of batches"
)
left.set(
    xlabel=r"$\alpha = (R_l - \mu)\,/\,\xi$",
    ylabel="clipping bias (sd of the loss)",
    title=f"{sizes['batches']} batches of {small_batch} normal losses",
)
left.legend()
for name in ("bias", "noise"):
    right.plot(curves.threshold, curves[name], label=f"{NAMES[name]}: Theorem 1", **line(LINES[name]))
    right.errorbar(
        releases.threshold,
        releases[name],
        yerr=2 * releases[f"{name}_error"],
        linestyle="none",
        marker=LINES[name]["marker"],
        color=LINES[name]["color"],
        markersize=5,
        capsize=2,
        label=f"{NAMES[name]}: simulated",
    )
right.set(
    xlabel="threshold $R_l$ (nats)",
    ylabel="error of the mean loss (nats)",
    title=f"one real batch of {real.size}, {sizes['releases']} releases",
)
right.legend()
plt.show()

z = (dots.bias - normal_clipping_bias(dots.alpha, mean=0.0, std=1.0)) / dots.error
# The releases at one threshold test both formulas; thresholds share no noise.
z_bias = (releases.bias - clipping_bias(real, releases.threshold)) / releases.bias_error
exact_noise = loss_noise_std(releases.threshold, sigmas["losses"], real.size)
z_noise = (releases.noise - exact_noise) / releases.noise_error
summary = [
    f"Corollary 1: the {len(dots)} simulated means lie within {z.abs().max():.1f} standard errors of the closed form "
    "(they share their draws).",
    f"Theorem 1: the {len(releases)} simulated biases lie within {z_bias.abs().max():.1f}, the noises within "
    f"{z_noise.abs().max():.1f} standard errors of it.",
]
display(Markdown("**What to see.** " + " ".join(summary)))
plots.save(
    figure,
    "01_bias_variance_theorem",
    parameters=parameters,
    inputs=run_inputs[:1],
    shows="Clipping bias and noise as simulated (bars: two standard errors) on the closed forms of Corollary 1 and Theorem 1.",
    claim="Theorem 1 and Corollary 1: closed forms of clipping bias and noise variance.",
    summary=summary,
)

# %% [markdown]
# The mean over batches lies *on* the curve at every $B$: the expected bias of one loss does not depend on $B$, only its scatter
# does (grey band). The limit $B \to \infty$ in the theorem is the law of large numbers for that scatter.
#
# ## 3. The trade-off, and its optimum
#
# Bias falls with $R_l$, noise grows with it, and their root mean square has one minimum, where
# $\text{bias}(R)\,\mathbb P(L > R) = (\sigma_l/B)^2 R$. Below: normal losses with the mean and standard deviation of the
# parameters, early training of a ten-class problem ($\ln 10 = 2.3$), at the $\sigma_l$ of the digits task. Only $B$ changes, as
# in Theorem 1. (In a run $\sigma_l$ would follow $B$, through the sample rate.) The dots release simulated batches.
#
# **Predict first:** as $B$ grows tenfold, does the best $R_l$ move towards the mean loss or away from it?

# %%
wide = np.geomspace(0.2, 5, 200) * loss_mean
closed, simulated, best = {}, {}, {}
rng = np.random.default_rng(2)
for size in batch_sizes:
    setting = {"noise_multiplier": sigmas["losses"], "expected_batch_size": size}
    closed[size] = bias_variance.normal_errors(wide, mean=loss_mean, std=loss_std, **setting)
    best[size] = optimal_threshold(loss_mean, loss_std, **setting)
    # A draw below zero, which no loss can be, counts as zero: rare enough to be invisible at these parameters.
    draws = np.maximum(rng.normal(loss_mean, loss_std, (sizes["batches"], size)), 0)
    simulated[size] = bias_variance.release_dots(draws, wide[10::30], runs=sizes["batches"], seed=size, **setting)

figure, axes = plt.subplots(1, len(batch_sizes), figsize=(3.6 * len(batch_sizes), 4.1), sharey=True, squeeze=False)
for axis, size in zip(axes[0], batch_sizes, strict=True):
    for name, style in LINES.items():
        axis.plot(closed[size].threshold, closed[size][name], label=NAMES[name], **line(style))
    axis.errorbar(
        simulated[size].threshold,
        simulated[size].rmse,
        yerr=2 * simulated[size].rmse_error,
        fmt="o",
        color=BLUE["color"],
        markersize=4,
        capsize=2,
        label="total, simulated",
    )
    lowest = np.interp(best[size], closed[size].threshold, closed[size].rmse)
    axis.plot(best[size], lowest, marker="*", markersize=14, linestyle="none", color="0.1", label="least error")
    axis.axvline(loss_mean, color="0.4", linewidth=1.2, linestyle=(0, (1, 1)), label="the paper's $R_l = L$")
    axis.axvline(3 * loss_mean, color="0.4", linewidth=1.2, linestyle=(0, (6, 2)), label="sum of three losses")
    axis.set(xscale="log", yscale="log", title=f"B = {size:,}", xlabel="threshold $R_l$ (nats)", ylim=(1e-3, 10))
    axis.set_xticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
    axis.minorticks_off()
axes[0, 0].set_ylabel("error of the mean loss (nats)")
figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
plt.show()

summary = []
for size in batch_sizes:
    at = {
        name: np.interp(value, wide, closed[size].rmse)
        for name, value in {"best": best[size], "mean": loss_mean, "sum": 3 * loss_mean}.items()
    }
    summary.append(
        f"B = {size:,}: least error {at['best']:.3g} nats at R_l = {best[size]:.2f} = {best[size] / loss_mean:.2f} L; "
        f"{at['mean'] / at['best']:.1f} times that at R_l = L and {at['sum'] / at['best']:.1f} times at the sum of three "
        "losses."
    )
display(Markdown("**What to see.**\n\n" + "\n".join(f"* {text}" for text in summary)))
plots.save(
    figure,
    "01_bias_variance",
    parameters=parameters,
    inputs=[],
    shows="Clipping bias, noise and total error of the private mean of normal losses against R_l, for several batch sizes.",
    claim='Theorem 1 and §"Bias-variance trade-off": R_l = L makes the clipping bias close to zero and the noise small.',
    summary=summary,
)

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
cifar = DATA_SETS[0]
network = sum(parameter.numel() for parameter in task.model(seed=0).parameters())
models = [
    {
        "model": "digits network",
        "dimension": network,
        "expected_batch_size": task.batch_size,
        "sigma_loss": three_losses.sigma_loss,
        "sigma_gradient": three_losses.sigma_gradient_probe,
    }
]
if profile != "smoke":
    cifar_noise = noise_of(cifar.budget(epsilon))
    models += [
        {
            "model": f"{name}, {cifar.title}",
            "dimension": bias_variance.transformer_size(**shape, classes=10),
            "expected_batch_size": cifar.batch_size,
            "sigma_loss": cifar_noise.sigma_loss,
            "sigma_gradient": cifar_noise.sigma_gradient_probe,
        }
        for name, shape in bias_variance.TRANSFORMERS.items()
    ]
magnitudes = cached(CELLS, bias_variance.noise_magnitudes, models=models, seeds=seeds)
display(magnitudes.style.format(precision=4, thousands=",").hide(axis="index"))
aspects = pd.DataFrame(
    {
        "aspect": [
            "dimension",
            "clipping norm",
            "noise, in units of the clip",
            "key to convergence",
            "per-sample operation",
        ],
        "loss": [
            "1",
            "absolute value",
            f"{magnitudes.exact[0]:.3g}",
            f"clipping bias: {clipping_bias(real, real.mean()) / real.mean():.0%} of the loss at R_l = L (step {step})",
            "clipping",
        ],
        "gradient": [
            f"{network:,}",
            "L2",
            f"{magnitudes.exact[1]:.3g}",
            f"noise: {magnitudes.exact[1]:.2g} times the longest signal possible",
            "normalisation",
        ],
    }
)
display(aspects.style.hide(axis="index"))
ratios = magnitudes[magnitudes.quantity == "gradient"].exact.to_numpy() / (
    magnitudes[magnitudes.quantity == "loss"].exact.to_numpy()
)
relative = (magnitudes.simulated / magnitudes.exact - 1).abs().max()
summary = [
    f"{row.model}, {row.quantity}: noise {row.exact:.3g} times its clip (d = {row.dimension:,}, simulated {row.simulated:.3g})"
    for row in magnitudes.itertuples()
] + [f"Gradient noise is {min(ratios):.3g} to {max(ratios):.3g} times the loss noise, each in units of its clip."]
display(
    Markdown(
        f"**What to see.** {summary[-1]} Simulation and formula agree to {relative:.2%}. The gradient survives because its noise "
        "spreads over all directions and averages out over steps; the loss has one direction, and bias in it stays."
    )
)
plots.save_table(
    magnitudes,
    "01_bias_variance_noise",
    parameters=parameters,
    inputs=[],
    shows="Expected noise of the private mean loss and gradient in units of their clips, by formula and simulated.",
    claim='Tab. "diff priv": noise sqrt(2/pi) sigma_l R_l / B on the loss, sqrt(d) sigma_g R_g / B on the gradient.',
    summary=summary,
)

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
stages = sizes["stages"]
figure, axes = plt.subplots(2, len(stages), figsize=(3.6 * len(stages), 5.6), squeeze=False)
rows = []
for (top, bottom), stage in zip(axes.T, stages, strict=True):
    batches = [clouds.losses_of(table, stage, "batch")[1] for table in probed]
    shown = batches[0]
    mean, std = shown.mean(), shown.std()
    grid = np.linspace(mean - 3.5 * std, mean + 5 * std, 200)
    top.hist(shown, bins=grid[::4], density=True, color="0.7", linewidth=0, label="losses of one batch")
    top.plot(grid, stats.norm.pdf(grid, mean, std), label="normal, same mean and sd", **line(RED))
    top.axvline(mean, color="0.4", linewidth=1.2, linestyle=(0, (1, 1)), label="$R_l = L$")
    top.set(title=f"step {stage}", xlabel="loss of a sample (nats)", xlim=(grid[0], grid[-1]))
    ratio = np.geomspace(0.2, 50, 200)
    actual = np.array([clipping_bias(batch, batch.mean() * ratio) / batch.mean() for batch in batches])
    normal = np.array(
        [normal_clipping_bias(batch.mean() * ratio, batch.mean(), batch.std()) / batch.mean() for batch in batches]
    )
    for values, style, label in ((actual, BLUE, "actual"), (normal, RED, "normal (Corollary 1)")):
        bottom.plot(ratio, values.mean(axis=0), label=label, **line(style))
        bottom.fill_between(ratio, values.min(axis=0), values.max(axis=0), color=style["color"], alpha=0.2, linewidth=0)
    bottom.axvline(1, color="0.4", linewidth=1.2, linestyle=(0, (1, 1)))
    bottom.set(xscale="log", yscale="log", ylim=(1e-3, 3), xlabel="threshold $R_l$ / mean loss $L$")
    bottom.set_xticks([0.2, 1, 5, 20], ["0.2", "1", "5", "20"])
    bottom.minorticks_off()
    for seed, batch in enumerate(batches):
        rows.append(
            {
                "step": stage,
                "seed": seed,
                "mean": batch.mean(),
                "sd": batch.std(),
                "skewness": stats.skew(batch),
                "normal_below_zero": stats.norm.cdf(-batch.mean() / batch.std()),
                "bias_at_L": clipping_bias(batch, batch.mean()) / batch.mean(),
                "normal_bias_at_L": normal_clipping_bias(batch.mean(), batch.mean(), batch.std()) / batch.mean(),
                "keeps_99_percent": ratio[np.argmax(actual[seed] < 0.01)],
            }
        )
axes[0, 0].set_ylabel("density (1/nat)")
axes[1, 0].set_ylabel("clipping bias / mean loss")
axes[1, 0].legend(fontsize="small")
figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize="small")
plt.show()
moments = pd.DataFrame(rows).groupby("step").mean().drop(columns="seed")
display(moments.style.format(precision=3))
summary = [
    f"Step {stage}: mean {row['mean']:.2f}, sd {row.sd:.2f}, skewness {row.skewness:.1f}; clipping at R_l = L takes "
    f"{row.bias_at_L:.1%} of the mean loss, a normal would say {row.normal_bias_at_L:.1%}. "
    f"To keep 99 % of it, R_l must be {row.keeps_99_percent:.1f} L (mean of {seeds} seed{'s' * (seeds > 1)})."
    for stage, row in moments.iterrows()
]
display(Markdown("**What to see.**\n\n" + "\n".join(f"* {text}" for text in summary)))
plots.save(
    figure,
    "01_bias_variance_losses",
    parameters=parameters,
    inputs=run_inputs,
    shows="Per-sample losses of a training run at several steps beside a normal, and the clipping bias that each implies.",
    claim='Corollary 1 assumes normal losses "to put this into perspective".',
    summary=summary,
)

# %% [markdown]
# Early on the normal gives nearly the right bias, whatever the shape of the histogram. Later it fails in both directions: too much
# bias at $R_l = L$ and far too little at generous thresholds. A normal with the same moments puts much of its mass below zero,
# where no cross-entropy is, and misses the long tail, which by then *is* the mean. A rule for $R_l$ must be generous then, or look
# at something other than the mean. (`keeps_99_percent` is the threshold, in units of $L$, that takes 1 % of the mean.)
#
# ## 6. Gaussian or Laplace noise?
#
# A scalar may be clipped in L1 norm and get Laplace noise instead ("Gaussian by default", says the paper). Both are calibrated
# here to the *same* budget, with three losses and the gradient on one batch. The Laplace scale is $\sigma_l R_l / B$, its standard
# deviation $\sqrt2$ times that.
#
# **Predict first:** for a single release of pure $\varepsilon$, Laplace is often the better choice. And for many releases composed
# with a Gaussian gradient?

# %%
laplace = noise_of(budget, loss_mechanism="laplace")
mechanisms = {"gaussian": (three_losses, BLUE), "laplace": (laplace, RED)}
level = float(real.mean())
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.7))
optima, deviations = {}, {}
for name, (split, style) in mechanisms.items():
    setting = {"noise_multiplier": split.sigma_loss, "expected_batch_size": task.batch_size, "mechanism": name}
    deviations[name] = loss_noise_std(1.0, **setting)
    scale = split.sigma_loss / task.batch_size
    density = stats.norm(scale=scale) if name == "gaussian" else stats.laplace(scale=scale)
    x = np.linspace(-4.5, 4.5, 401) * deviations["gaussian"]
    left.plot(x, density.pdf(x), label=f"{name}, sd {deviations[name]:.3f}", **line(style))
    errors = bias_variance.normal_errors(wide, mean=loss_mean, std=loss_std, **setting)
    threshold = optimal_threshold(loss_mean, loss_std, **setting)
    optima[name] = (threshold, float(np.interp(threshold, wide, errors.rmse)))
    right.plot(wide, errors.rmse, label=f"{name}: least {optima[name][1]:.3f} nats", **line(style))
    right.plot(*optima[name], marker="*", markersize=13, color=style["color"])
left.set(xlabel="noise of the private mean loss (units of $R_l$)", ylabel="density", yscale="log")
left.set_ylim(bottom=1e-3)
right.axvline(loss_mean, color="0.4", linewidth=1.2, linestyle=(0, (1, 1)), label="$R_l = L$")
right.set(xscale="log", yscale="log", xlabel="threshold $R_l$ (nats)", ylabel="total error of the mean loss (nats)")
right.set_xticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
right.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
right.minorticks_off()
for axis in (left, right):
    axis.legend(fontsize="small")
plt.show()
summary = [
    f"At epsilon = {epsilon:g} on the same batch, Laplace noise has {(deviations['laplace'] / deviations['gaussian']) ** 2 - 1:+.0%} "
    f"variance (sigma_l = {laplace.sigma_loss:.1f} against {three_losses.sigma_loss:.1f}); its least error is "
    f"{optima['laplace'][1] / optima['gaussian'][1]:.2f} times the Gaussian's, at a threshold of "
    f"{optima['laplace'][0]:.2f} instead of {optima['gaussian'][0]:.2f} nats."
]
display(Markdown("**What to see.** " + summary[0]))
plots.save(
    figure,
    "01_bias_variance_laplace",
    parameters=parameters,
    inputs=[],
    shows="Density of Gaussian and Laplace noise at equal privacy, and the total error of the mean loss under each.",
    claim='§"Privatized quadratic function": Gaussian noise by default, or Laplace noise with clipping in L1 norm.',
    summary=summary,
)

# %% [markdown]
# Over many releases it is not the worst case of the privacy loss that counts but its variance, and by that measure a Laplace of
# scale $s$ costs about as much as a Gaussian of standard deviation $s$ (compare the two $\sigma_l$), while its own standard deviation
# is $\sqrt2\, s$. The paper's default is the right one.
#
# ## 7. The consequence: parabolas and learning rates
#
# Nobody needs the mean loss itself. It serves to fit $L(\mathbf w - \eta \mathbf G) \approx L - b\eta + \tfrac a2\eta^2$ through
# $\eta \in \{-h, 0, h\}$, and the next rate is $\eta = b/a$. So take the real losses of one batch along the real update direction at
# one step of the run, release them again and again, and look at the parabolas.
#
# * **Three losses** (the paper): each clipped to $[0, R_l]$ and noised.
# * **Contrasts** (method "line_search"): per sample $d = L_+ - L_-$ and $c = L_+ + L_- - 2 L_0$, clipped at $R_d$ and $R_c$, at the same
#   price in privacy. The thresholds shown are multiples of where their rules aim: the mean loss $L$ for $R_l$, the 0.8
#   quantiles for $R_d$ and $R_c$.
#
# "Right" is the threshold with the least error of the three mean losses together (for contrasts, multiple 1), "too small" a
# quarter, "too large" ten times that. Also marked: the paper's $R_l = L$, and the sum of the three losses, its rule in practice. Columns of the table: quantiles `q5` to `q95` of $b/a$ in units of $h$, `near` the share within a factor of two of
# the exact $b/a$, `concave` and `uphill` the shares with $a < 0$ and $b < 0$, where $b/a$ is a maximum or points backwards.
#
# **Predict first:** which hurts the rate more, a threshold too small or one too large? Is the answer the same for contrasts?

# %%
multiples = [10 ** (k / 12) for k in sizes["octaves"]]
batches = [clouds.losses_of(table, step, "batch") for table in probed]
distances = [float(table.distance[table.step == step].iloc[0]) for table in probed]
fits, spreads, exact_fits, inputs = [], [], [], []
for seed, (batch, distance) in enumerate(zip(batches, distances, strict=True)):
    arguments = {
        "losses": batch.tolist(),
        "distance": distance,
        "sigmas": sigmas,
        "expected_batch_size": task.batch_size,
        "multiples": multiples,
        "runs": sizes["parabolas"],
        "seed": seed,
    }
    inputs.append(f"cell clouds-{key_of(arguments)}")
    fits.append(cached(CELLS, clouds.clouds, **arguments))
    exact_fits.append(fit_quadratic([distance, 0, -distance], batch.mean(axis=1)))
    spreads.append(clouds.eta_spread(fits[-1], exact_fits[-1].minimizer).assign(seed=seed))
batch, distance, exact = batches[0], distances[0], exact_fits[0]
usual = clouds.usual_thresholds(batch)
errors = bias_variance.batch_errors(
    batch, np.array(multiples) * usual[0], noise_multiplier=sigmas["losses"], expected_batch_size=task.batch_size
)
optimum = float(errors.threshold[errors.rmse.idxmin()])
sum_rule = float(batch.mean(axis=1).sum())
right_multiple = {"losses": optimum / usual[0], "contrasts": 1.0}
choices = {
    probe: {
        name: slider.nearest(multiples, factor * right)
        for name, factor in {"too small": 0.25, "right": 1.0, "too large": 10.0}.items()
    }
    for probe, right in right_multiple.items()
}

# %%
figure, axes = plt.subplots(2, 4, figsize=(13, 6), width_ratios=[1, 1, 1, 1.4])
u = np.linspace(-1.5, 1.5, 61)


def parabola(slope, curvature):
    """Change of the loss against the distance u along G in units of h."""
    return -slope * distance * u + curvature * (distance * u) ** 2 / 2


truth = parabola(exact.slope, exact.curvature)
margin = np.ptp(truth)
for row, (probe, chosen) in zip(axes, choices.items(), strict=True):
    for axis, (name, multiple) in zip(row[:3], chosen.items(), strict=True):
        some = fits[0][(fits[0].probe == probe) & np.isclose(fits[0].multiple, multiple)].head(60)
        lines = [np.column_stack([u, parabola(fit.slope, fit.curvature)]) for fit in some.itertuples()]
        axis.add_collection(LineCollection(lines, colors=BLUE["color"], alpha=0.25, linewidths=0.8))
        axis.plot(u, truth, color="0.1", linestyle="--", linewidth=2)
        symbol = f"$R_l$ = {multiple * usual[0]:.2g}" if probe == "losses" else f"$R_d$ = {multiple * usual[1]:.2g}"
        axis.set(title=f"{name}: {symbol}", ylim=(truth.min() - 0.6 * margin, truth.max() + 0.3 * margin))
        axis.set_xlabel("distance along $G$ (h)")
    row[0].set_ylabel(("three losses" if probe == "losses" else "contrasts") + "\nchange of the loss (nats)")
    spread = spreads[0][spreads[0].probe == probe]
    last = row[3]
    for low, high, alpha in (("q5", "q95", 0.2), ("q25", "q75", 0.4)):
        last.fill_between(
            spread.multiple,
            spread[low] / distance,
            spread[high] / distance,
            color=BLUE["color"],
            alpha=alpha,
            linewidth=0,
            label=f"{'nine tenths' if low == 'q5' else 'half'} of the rates",
        )
    last.plot(spread.multiple, spread.q50 / distance, color=BLUE["color"], label="median")
    last.axhline(exact.minimizer / distance, color="0.1", linestyle="--", label="exact")
    if probe == "losses":
        last.axvline(1, color="0.2", linewidth=1.2, linestyle=(0, (1, 1)))
        last.axvline(sum_rule / usual[0], color="0.2", linewidth=1.2, linestyle=(0, (6, 2)))
        for value, label in ((1, "$L$"), (sum_rule / usual[0], "sum")):
            last.annotate(
                label, (value, 0.03), xycoords=("data", "axes fraction"), xytext=(3, 0), textcoords="offset points"
            )
    last.axvline(right_multiple[probe], color=RED["color"], linewidth=1.5, linestyle="-.", label="right")
    reach = 4 * abs(exact.minimizer) / distance
    last.set(xscale="log", ylim=(-reach, reach), ylabel="$b/a$ (h)")
    last.set_xticks([0.3, 1, 3, 10], ["0.3", "1", "3", "10"])
    last.minorticks_off()
    last.set_xlabel("$R_l$ / mean loss" if probe == "losses" else "$R_d$ and $R_c$ / 0.8 quantile")
axes[1, 3].legend(fontsize="x-small", loc="lower left", ncols=2)
plt.show()

spread = pd.concat(spreads)
spread[["q5", "q25", "q50", "q75", "q95"]] = spread[["q5", "q25", "q50", "q75", "q95"]].div(
    spread.seed.map(dict(enumerate(distances))), axis=0
)
papers = {"R_l = L": 1.0, "sum of three losses": slider.nearest(multiples, sum_rule / usual[0])}
shown = {probe: papers | chosen if probe == "losses" else chosen for probe, chosen in choices.items()}
table = pd.DataFrame(
    [
        {"probe": probe, "threshold": name, "multiple": multiple}
        | rows[["q5", "q25", "q50", "q75", "q95", "near", "concave", "uphill"]].mean().to_dict()
        | {"near_low": rows.near.min(), "near_high": rows.near.max()}
        for probe, chosen in shown.items()
        for name, multiple in chosen.items()
        for rows in [spread[(spread.probe == probe) & np.isclose(spread.multiple, multiple)]]
    ]
)
display(table.style.format(precision=2).hide(axis="index"))
summary = [
    f"{row.probe}, {row.threshold} ({row.multiple:.2g} times): {row.near:.0%} of the rates within a factor of two of the exact "
    f"one ({row.near_low:.0%} to {row.near_high:.0%} over {seeds} seed{'s' * (seeds > 1)}), {row.concave:.0%} of the parabolas "
    "concave."
    for row in table.itertuples()
]
display(Markdown("**What to see** (means over the seeds).\n\n" + "\n".join(f"* {text}" for text in summary)))

# %% [markdown]
# A small $R_l$ does not shift the parabola, it *deforms* it: the highest of the three losses is cut most, and the height of the ends
# over the middle is what bends it. The cloud is tight and wrong, often concave. Clipping at the mean loss is already too small. A
# large $R_l$ leaves the middle right and scatters everything. In between is a window, and it lies well above $L$, near the sum of the
# three losses: here the paper's practice is better than its theory. The contrasts are clipped as *differences*: cutting both alike
# hardly moves their ratio, so at this step a threshold too small is nearly harmless and only one too large hurts.
#
# Is that so at other steps? The next table leaves the noise out: $b/a$ in units of $h$ from raw losses (`exact`), from three losses
# clipped at `mean_loss` or `sum_of_losses`, and from `contrasts` clipped where their rules aim.

# %%
rates = pd.DataFrame(
    [
        {"step": stage, "seed": seed}
        | clouds.clipped_rates(
            clouds.losses_of(table, stage, "batch"), float(table.distance[table.step == stage].iloc[0])
        )
        for stage in stages
        for seed, table in enumerate(probed)
    ]
)
display(rates.style.format(precision=2).hide(axis="index"))
off = rates[["mean_loss", "sum_of_losses", "contrasts"]].div(rates.exact, axis=0).groupby(rates.step)
lowest, highest = off.min(), off.max()
clipping_summary = [
    f"Step {stage}, clipping alone: contrasts give {lowest.contrasts[stage]:.2f} to {highest.contrasts[stage]:.2f} times the exact "
    f"rate, three losses {lowest.sum_of_losses[stage]:.2f} to {highest.sum_of_losses[stage]:.2f} times at their sum and "
    f"{lowest.mean_loss[stage]:.2f} to {highest.mean_loss[stage]:.2f} times at R_l = L ({seeds} seed{'s' * (seeds > 1)})."
    for stage in stages
]
display(Markdown("**What to see.**\n\n" + "\n".join(f"* {text}" for text in clipping_summary)))
plots.save(
    figure,
    "01_bias_variance_parabolas",
    parameters=parameters,
    inputs=run_inputs + inputs,
    shows="Parabolas through repeated private probes of one real batch, and the spread of b/a, for several thresholds.",
    claim="§4.1: R_l close to L, or the sum of three losses in practice, to avoid the clipping bias.",
    summary=summary + clipping_summary,
)

# %% [markdown]
# Late in training a few samples carry most of the mean loss and of its contrasts. Whatever is clipped then follows the many instead
# of the mean, contrasts too, and even the exact rate hangs on which few samples the batch drew. Clipping is robust statistics: it
# answers a slightly different question, with far less noise.
#
# ## 8. All at once: the slider
#
# The same numbers as one page. It stands alone, without server or network, so it can be mailed or projected.

# %%
page = slider.page(
    slider.page_data(
        errors,
        fits[0],
        spreads[0],
        usual=usual,
        marks={"R_l = L": usual[0], "least error": optimum, "sum of three": sum_rule},
        exact=exact,
        distance=distance,
        setting=(
            f"Digits ({task.train_size:,} images), step {step} of a training run at epsilon = {epsilon:g}: one batch "
            f"(B = {task.batch_size}), h = {distance:.3g}. Noise multipliers {sigmas['losses']:.1f} for three losses and "
            f"{sigmas['contrasts']:.1f} for contrasts, at the same price in privacy. Profile {profile}."
        ),
    )
)
write_text(FIGURES / "01_bias_variance.html", page)
display(Markdown(f"`figures/01_bias_variance.html`, {len(page.encode()) / 1024:.0f} KiB, {len(multiples)} thresholds."))

# %% [markdown]
# ## 9. Attack: what a learning rate tells about one record
#
# Suppose the gradient is private but the learning rate is fitted to *raw* losses. One number per probe, a mean over hundreds of
# records: can it hurt? We plant one outlier, an image whose pixels were not scaled (`brightness` times too large) under a wrong label, and
# play a game. The observer knows the weights, the direction $\mathbf G$ and the thresholds (all released before), sees
# $\eta = b/a$ and must say whether the outlier was in the batch. The score is the *membership advantage*, true less false positive
# rate, of the best threshold on $\eta$; it is chosen on one half of the games and judged on the other. Two observers:
#
# * **"sees a random batch"**: the other records are drawn by Poisson sampling, as in training, and make $\eta$ vary by themselves;
# * **"knows the others"**: the whole batch but the outlier is known. DP promises protection even then.
#
# For an $(\varepsilon, \delta)$-DP release no attack whatever has more than
#
# $$ \text{advantage} \le \frac{e^\varepsilon - 1 + 2\delta}{e^\varepsilon + 1}. $$
#
# The $\varepsilon$ is that of this one release on a batch that holds the outlier for sure, without amplification by sampling; it is
# found by the library's accountant. Beside the calibrated noise we also play with a quarter and a sixteenth of it, to see the bound
# where there is something to see.
#
# **Predict first:** how many of the raw rates can the observer tell apart? And does clipping alone, with little noise, help?

# %%
played = []
weakenings = [1.0, 0.25, 0.0625]
inputs = []
for seed, (table, distance) in enumerate(zip(probed, distances, strict=True)):
    for observer, part, rate in (
        ("sees a random batch", "train", task.batch_size / task.train_size),
        ("knows the others", "batch", 1.0),
    ):
        arguments = {
            "others": clouds.losses_of(table, step, part).tolist(),
            "outlier": clouds.losses_of(table, step, "outlier").ravel().tolist(),
            "distance": distance,
            "sample_rate": rate,
            "expected_batch_size": task.batch_size,
            "sigmas": sigmas,
            "weakenings": weakenings,
            "runs": sizes["attacks"],
            "seed": seed,
        }
        inputs.append(f"cell game-{key_of(arguments)}")
        played.append(cached(CELLS, attack.game, **arguments).assign(observer=observer, seed=seed))
games = pd.concat(played)
result = attack.advantages(games, sigmas, task.delta)
display(result.style.format(precision=3).hide(axis="index"))

# %%
figure, axes = plt.subplots(1, 3, figsize=(13, 4), width_ratios=[1.25, 1, 1])
first = games[(games.seed == 0) & (games.observer == "sees a random batch")]
cells = [("raw", 0.0, "raw"), ("losses", 1.0, "three losses"), ("contrasts", 1.0, "contrasts")]
jitter = np.random.default_rng(3)
limits = np.sort(exact_fits[0].minimizer * np.array([-0.25, 2.25]))
for position, (probe, weakening, _) in enumerate(cells):
    for planted, style, offset in ((False, BLUE, 0.18), (True, RED, -0.18)):
        rows = first[(first.probe == probe) & (first.weakening == weakening) & (first.planted == planted)].head(100)
        axes[0].plot(
            rows.eta.clip(*limits),
            position + offset + jitter.uniform(-0.12, 0.12, len(rows)),
            linestyle="none",
            marker=style["marker"],
            markersize=3,
            alpha=0.6,
            color=style["color"],
            label=None if position else f"outlier {'in' if planted else 'not in'} the batch",
        )
axes[0].set_yticks(range(3), [title for *_, title in cells])
axes[0].set(
    xlabel="learning rate $b/a$ (beyond the axis: at its end)", title="what the observer sees", ylim=(2.5, -0.9)
)
axes[0].legend(fontsize="small", loc="upper center", ncols=2)
budgets = np.geomspace(0.05, 12, 200)
for axis, (observer, rows) in zip(axes[1:], result.groupby("observer", sort=False), strict=True):
    axis.fill_between(budgets, attack.advantage_bound(budgets, task.delta), 1.1, color="0.9", linewidth=0)
    axis.plot(budgets, attack.advantage_bound(budgets, task.delta), color="0.3", label="bound of epsilon")
    for index, (probe, style) in enumerate((("losses", RED), ("contrasts", BLUE))):
        chosen = rows[rows.probe == probe]
        axis.errorbar(
            chosen.epsilon * 1.1 ** (index - 0.5),
            chosen.advantage,
            yerr=[chosen.advantage - chosen.low, chosen.high - chosen.advantage],
            linestyle="none",
            marker=style["marker"],
            color=style["color"],
            capsize=3,
            label="three losses" if probe == "losses" else "contrasts",
        )
    raw = rows[rows.probe == "raw"].iloc[0]
    axis.axhline(raw.advantage, label="raw rate: no epsilon", **line(plots.STYLES["reference"]))
    axis.axhspan(raw.low, raw.high, color=plots.STYLES["reference"]["color"], alpha=0.2, linewidth=0)
    axis.set(title=f"observer {observer}", xscale="log", xlabel=r"$\varepsilon$ of the release", ylim=(-0.2, 1.05))
    axis.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
axes[1].set_ylabel("membership advantage")
axes[2].legend(fontsize="small", loc="center left", bbox_to_anchor=(0, 0.62))
plt.show()

summary = []
for row in result[(result.probe == "raw") | (result.weakening == 1.0)].itertuples():
    release = "raw rate" if row.probe == "raw" else f"{row.probe}, epsilon {row.epsilon:.2f} (bound {row.bound:.2f})"
    summary.append(
        f"Observer {row.observer}, {release}: advantage {row.advantage:.2f}, 95 % interval [{row.low:.2f}, {row.high:.2f}]."
    )
private = result[result.probe != "raw"]
above = int((private.low > private.bound).sum())
summary.append(
    f"Of {len(private)} private settings, weakened ones included, {above} {'has' if above == 1 else 'have'} an interval wholly "
    "above the bound."
)
display(Markdown("**What to see.**\n\n" + "\n".join(f"* {text}" for text in summary)))
plots.save(
    figure,
    "01_bias_variance_attack",
    parameters=parameters,
    inputs=run_inputs + inputs,
    shows="Learning rates with and without one planted outlier, and the advantage of an observer against the bound of epsilon.",
    claim='§"Privatized quadratic function": fitting the rate to raw losses violates DP; the private fit is post-processing.',
    summary=summary,
)

# %% [markdown]
# A raw learning rate gives the outlier away: its losses are tens of times those of the others and bend the parabola. Clipping already
# takes most of that, noise covers the rest. Three losses hide this outlier even with a sixteenth of the noise, since all three of its
# losses are cut to the same $R_l$ and cancel in slope and curvature; among the contrasts the one who knows the others then finds it.
# The bound is far above what this attack reaches, because it holds for *every* attack and *every* record: a weak attack below it
# proves nothing, but one above it would disprove the accountant. In training the outlier enters a batch with probability $q$ only, which
# protects it further, while the observer sees many probes and all gradients: the accountant adds all of it up.
#
# ## Where this differs from the paper
#
# * Sections 1 to 4 restate the paper's formulas; the numbers in Tab. "diff priv" are ours, since the paper prints formulas only.
# * The paper finds $R_l = L$, or the sum of three losses, without a computed optimum; sections 3, 5 and 7 look for one, on normal
#   and on real losses.
# * Real losses come from a small network trained from scratch (profile `laptop`), not from fine-tuning a vision transformer. There
#   $B$ is larger and $\sigma_l$ smaller, so noise matters less and bias more.
# * Section 7 probes at the distance $h$ of method "line_search", several times its rate; Algorithm 1 probes at the rate itself, where the
#   differences between three losses are smaller still.
# * Noise is calibrated with gradient and losses on the same batch, as Algorithm 1 runs; the paper counts them apart.
# * Contrasts and the attack are ours.
#
# ## Exercises
#
# 1. Derive the equation of section 3 for the best threshold, and explain why it has exactly one solution.
# 2. Run with `papermill notebooks/01_bias_variance.ipynb out.ipynb -p step 40`. What happens to the parabolas late in training,
#    and which probe suffers more?
# 3. In section 3, $\sigma_l$ was held fixed while $B$ grew. At fixed N and number of steps, what does `calibrate_noise` do to
#    $\sigma_l / B$ as $B$ grows from 150 to 1,500?
# 4. Set `brightness` to 1: the planted record is now ordinary but for its label. What is left of the attack on the raw rate, and
#    why does that not make raw rates safe?

# %% [markdown] tags=["solution"]
# *Solutions.* (1) The squared error is $\text{bias}^2 + (\sigma_l/B)^2 R^2$, and the derivative of the bias is $-\mathbb P(L > R)$. Setting
# the derivative to zero gives the equation. Its left side, $\text{bias}(R)\,\mathbb P(L > R)$, is positive and falls to zero, its
# right side grows from zero, so they meet once. (2) The mean loss is small and its tail long, so $R_l = L$ cuts off most of the mean,
# while the differences between the three losses are far below the noise at any $R_l$: the rates from three losses are close to a ratio of
# two noises. The contrasts, with smaller thresholds of their own, still give a tight cloud, but clipping has moved it: compare the last
# table of section 7.

# %% tags=["solution"]
rows = []
for size in (150, 500, 1500):
    split = noise_of(budget | {"sample_rate": size / task.train_size}, allocation="per_step")
    rows.append({"B": size, "sigma_l": split.sigma_loss, "noise of one loss / R_l": split.sigma_loss / size})
pd.DataFrame(rows).style.format(precision=3).hide(axis="index")

# %% [markdown] tags=["solution"]
# (3) As long as the noise is large, $\sigma_l$ grows nearly in proportion to $q$, and the noise on the mean hardly falls: at a fixed
# number of steps, larger batches bring little. What the small multiples of section 3 show needs a larger *data set*. (4) An ordinary
# record moves a mean over hundreds by less than the sampling of the others does, so this observer sees little. The one who knows the
# others still tells the two raw rates apart every time. Protection must not depend on a record being ordinary.
