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
# # What tuning costs: budget shares, and the map that everybody searches
#
# **After this notebook you can**
#
# * say what a hyperparameter search costs in privacy, however it is organised, in the same unit for all methods,
# * compute it: for a learned rate, a split budget, a random search, a counted grid and adaptive clipping,
# * read the $(R_g, \eta)$ map of DP-SGD: why it has a diagonal, and why automatic clipping removes one of its axes,
# * find the point of that map at which preset robust, our own rule, trains without having searched it.
#
# **The paper's items.** Tab. "hyperparam comparison" (appendix): the share of the budget that goes to hyperparameters is 0 %
# for vanilla DP-SGD and automatic clipping, about 20 % for adaptive clipping and for DP-hyper (both "estimated values"), below
# 1 % for HyFreeDP. And Fig. "heatmap", cited there from other papers: accuracy over the clipping threshold $R_g$ and the rate
# $\eta$ of DP training on E2E and ImageNet. We compute the first where it can be computed, and redraw the second on our own task.

# %% tags=["parameters"]
profile = "laptop"  # how large: smoke, laptop, gpu or paper
epsilon = 3.0  # of a run, at a delta of N^-1.1
records = 50_000  # N, in the training data of sections 1 and 2
batch_size = 1000  # B, expected
epochs = 5  # passes, so that a run has epochs * N / B steps
interval = 5  # K: steps between probes
seeds = 2  # training runs of each cell of the map
jobs = 2  # worker processes

# %%
from hyfreedp.experiments.book.parameters import check_parameters

check_parameters(
    globals(),
    {
        "profile": ("smoke", "laptop", "gpu", "paper"),
        "epsilon": float,
        "records": int,
        "batch_size": int,
        "epochs": int,
        "interval": int,
        "seeds": int,
        "jobs": int,
    },
)

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from scipy.stats import binom

from hyfreedp.experiments.book.exercises import check
from hyfreedp.experiments.store import archive, plots
from hyfreedp.experiments.store.paths import CELLS
from hyfreedp.experiments.store.verdicts import verdict
from hyfreedp.experiments.studies import noise_split
from hyfreedp.experiments.tables import rate_map, tuning_budget

# %%
plots.use_style()
archive.unpack_committed(profile)  # so that this notebook, opened alone, trains nothing that is known
smoke = profile == "smoke"
if smoke:  # starting workers would take longer than the runs
    jobs = 1
    print(f"profile smoke sets jobs = {jobs}")
parameters = {
    name: globals()[name]
    for name in ("profile", "epsilon", "records", "batch_size", "epochs", "interval", "seeds", "jobs")
}

# %% [markdown]
# ## 1. One unit for all methods
#
# Every method gets the same total budget $(\varepsilon, \delta)$, protocol ($N$, $B$, $T$) and accountant (RDP). Let $\sigma$ be the
# noise of vanilla DP-SGD whose tuning nobody counts, and $\sigma_g$ that of the run that is kept when tuning *is* counted. Then
#
# $$ \text{share} = 1 - \frac{\varepsilon(\sigma_g)}{\varepsilon}, \qquad \text{more noise} = \frac{\sigma_g}{\sigma} - 1, $$
#
# where $\varepsilon(\sigma_g)$ is what the gradients of that run cost by themselves. So the share is the part of the budget that training does not get.
#
# * **HyFreeDP** learns the rate in the run: $\sigma_g = \gamma\sigma$, and three losses per probe, on the batch of the gradient.
# * **Adaptive clipping** (Andrew et al., 2021) learns the clipping threshold $R_g$ from a noisy count of clipped gradients. With noise $\sigma_b$ on the
#   count, their Theorem 1 gives $\sigma_g = (\sigma^{-2} - (2\sigma_b)^{-2})^{-1/2}$; they recommend $\sigma_b = B/20$. It does not
#   learn $\eta$.
# * **DP-hyper as simulated** in the paper: "spending 85 % of the privacy budget for DP training".
# * **DP-hyper, accounted**, is a random search. It draws a random number $k$ of runs, with random candidates, and releases only the best.
#   Papernot and Steinke (2022) bound its cost by that of one run, plus a term that grows with $\log \mathbb E[k]$ and depends on how $k$ is drawn (logarithmic, geometric or Poisson).
# * **A counted grid**: train $m$ times, release everything, add up. That is what tuning by hand costs if it is counted.
#
# **Predict first.** The paper's table says about 20 % for adaptive clipping and for DP-hyper. Which of the two is nearer the truth?

# %%
targets = [epsilon] if smoke else sorted({1.0, 3.0, 8.0, epsilon})
runs = [5.0] if smoke else [2.0, 5.0]  # of a random search, on average
data = noise_split.DataSet("parameters", records, batch_size, epochs)
budgets = [data.budget(target) for target in targets]
costs = tuning_budget.costs(CELLS, budgets, batch_size=batch_size, interval=interval, runs=runs)

# %% [markdown]
# Each row of the table is a method at one budget. `share_percent` and `noise_percent` are defined above; `paper_percent` is the
# paper's entry (15 for its own simulation, in its Section "Experiments", although its table says 20). In the figure zero has a place, left of the logarithmic scale.

# %%
shown = tuning_budget.comparison(costs, targets, runs)
formats = {"epsilon": "{:g}", "share_percent": "{:.3f}", "noise_percent": "{:.3f}"}
plots.folded(f"All {len(shown)} rows", shown.style.hide(axis="index").format(formats))

# %%
figure, axis = plt.subplots(figsize=(10, 5))
methods = list(dict.fromkeys(shown.method))
for (target, rows), style, shift in zip(shown.groupby("epsilon"), plots.SERIES, (-0.2, 0, 0.2), strict=False):
    places = [methods.index(name) + shift for name in rows.method]
    axis.plot(rows.share_percent, places, label=rf"$\varepsilon$ = {target:g}", **plots.marks(style))
printed = shown.drop_duplicates("method").paper_percent.str.strip("<").astype(float)
axis.plot(printed, range(len(methods)), "x", color="0.3", markersize=10, markeredgewidth=2, label="the paper's")
axis.set_xscale("symlog", linthresh=0.01)
axis.set_xticks([0, 0.01, 0.1, 1, 10, 100], ["0", "0.01", "0.1", "1", "10", "100"])
axis.set(yticks=range(len(methods)), yticklabels=methods, xlabel="share of epsilon that is not left to training (%)")
axis.invert_yaxis()
plots.shared_legend(figure, [axis], ncols=4)
share = shown.groupby("method").share_percent.agg(["min", "max"])
counted = share[share.index.str.contains("runs on average|all counted")]
_ = axis.set_title(
    f"A rate learned inside the run takes up to {share['max'][methods[0]]:.1f} % of epsilon, "
    f"a search that is counted {counted['min'].min():.0f} to {counted['max'].max():.0f} %"
)

# %%
saved = {
    "parameters": parameters,
    "inputs": ["tables of calibrations, cells of data/cells"],
    "claim": 'Tab. "hyperparam comparison": hyperparameters take 0 % (vanilla, automatic clipping), about 20 % (adaptive '
    "clipping, DP-hyper) and below 1 % (HyFreeDP) of the budget.",
}
shows = "The share of the privacy budget that each way of choosing hyperparameters takes from training, beside the paper's entry."
plots.save(figure, "09_tuning_budget", shows=shows, **saved)
plots.save_table(
    shown, "09_tuning_budget_table", shows="The same as a table, and how much more noise the run gets.", **saved
)
for part in (0.2, 0.01):
    count_noise = tuning_budget.quantile_noise_for_share(part, budget=data.budget(epsilon))
    print(
        f"adaptive clipping would take {part:.0%} only with sigma_b = {count_noise:.2f}, B / {batch_size / count_noise:.0f}"
    )

# %% [markdown]
# **Adaptive clipping is nearly free** by its authors' own formula. A count over the whole batch changes little by one record, and it
# shares its batch with the gradient. (It leaves $\eta$ to be searched, which is the expensive part.)
#
# **Random search** pays for its runs. With two on average its share is about what the paper's table says, with five it is above; the paper does not say how many it means.
# And the paper's "0 %" for vanilla DP-SGD and automatic clipping means *not counted*: the last two rows have what their grids cost when they are counted.
#
# ## 2. HyFreeDP's share, over settings
#
# The gradient noise is $\gamma\sigma$ whatever $K$ is, so the share depends on $\gamma$ and, through $\sigma$, on the protocol and the
# budget.
#
# **Predict first.** The share grew with $\varepsilon$ above. Does it change with $K$, too?

# %%
data_sets = noise_split.DATA_SETS[2:3] if smoke else noise_split.DATA_SETS[1:]  # both CIFAR are of one size
gammas, intervals = ([1.01], [interval]) if smoke else ([1.002, 1.005, 1.01], [1, 5, 10])
plan = {"accountant": "rdp", "measured": True}
at = noise_split.settings("interval", **data.budget(epsilon), **plan, gamma=gammas, interval=intervals)
rows = [
    row | {"data": chosen.title}
    for chosen in data_sets
    for target in targets
    for row in noise_split.settings("data", **chosen.budget(target), **plan, gamma=1.01, interval=interval)
] + at
splits = noise_split.calibrations(rows, CELLS)

# %%
splits["percent"] = 100 * splits.probe_share
figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
sections = {"data": ("target_epsilon", "data"), "interval": ("interval", "gamma")}
for axis, (section, (column, group)) in zip(axes, sections.items(), strict=True):
    part = splits[splits.section == section]
    for (name, line), style in zip(part.groupby(group, sort=False), plots.SERIES, strict=False):
        label = name if group == "data" else rf"$\gamma$ = {name:g}"
        axis.plot(line[column], line.percent, label=label, markersize=5, **style)
    axis.axhline(1, color="0.3", linewidth=1)
    axis.set_xscale("log")
    plots.log_ticks(axis.xaxis, list(part[column].unique()))
    plots.legend_below(axis, ncols=3)
axes[0].set(xlabel=r"target $\varepsilon$", ylabel=r"HyFreeDP's share of $\varepsilon$ (%)", ylim=(0, None))
axes[0].set_title(rf"The share grows with the budget ($\gamma$ = 1.01, $K$ = {interval})")
axes[1].set_xlabel("probing interval $K$ (steps)")
_ = axes[1].set_title(rf"$\gamma$ matters, $K$ does not (N = {records:,}, $\varepsilon$ = {epsilon:g})")

# %%
plots.save(
    figure,
    "09_tuning_budget_grid",
    parameters=parameters,
    inputs=["calibrations, each a cell of data/cells"],
    shows="HyFreeDP's share of the budget against epsilon for the paper's data sets, and against K for several gammas.",
    claim='Tab. "hyperparam comparison": below 1 % of the budget.',
)

# %% [markdown]
# One percent more *noise* is not one percent of $\varepsilon$: $\varepsilon$ falls faster than the noise grows, the more so the
# smaller $\sigma$ is. At the paper's $\gamma = 1.01$ the share is above its 1 %; a smaller $\gamma$ brings it below, and puts more noise on the losses (notebook 03). Any search that is counted takes more.
#
# ## 3. The map: clipping threshold against learning rate
#
# Vanilla DP-SGD moves by
#
# $$ \mathbf w \leftarrow \mathbf w - \frac{\eta}{B}\Big(\sum_i \min\Big\{1, \frac{R_g}{\|\mathbf g_i\|}\Big\}\mathbf g_i
#    + \sigma R_g\,\mathcal N(0, I)\Big). $$
#
# If $R_g$ is below (nearly) all norms, every term is proportional to $R_g$, so only the product $\eta R_g$ matters: a diagonal
# of equal results. Automatic clipping is that limit, $R_g \to 0$ with $\eta$ rescaled by $1/R_g$: a single row, below the map.
# If $R_g$ is above all norms, the signal stops growing while the noise goes on. AdamW divides by the size of what it
# gets, so under it $R_g$ cancels altogether in the first regime, and the map has columns instead of a diagonal.
#
# Preset robust (ours, with automatic clipping) has no rate to choose. $\eta^*$ is the
# median of the rates that it took: the star. The dots mark the same on the map: $\eta R_g = \eta^*$ for SGD and $\eta = \eta^*$ for AdamW. A row has no dot where $R_g > 10$ (little is clipped) or where that rate is off the map.
# Every cell is the accuracy on *test* data, so the best of them
# is chosen by test data. Each is a run at the full $\varepsilon$, as in the literature; no run is charged for the others.
#
# **Predict first.** How many cells of the SGD map will be within two points of its best?

# %%
trained = rate_map.specs(profile, epsilon, seeds)
results = rate_map.train(trained, CELLS, jobs=jobs)
columns = ["base", "method", "clipping_threshold", "learning_rate"]
accuracies = results.groupby(columns, dropna=False).percent.mean()
figure, axes = plt.subplots(2, 2, figsize=(10, 5.6), width_ratios=(1.35, 1), height_ratios=(6, 1))
look = {"cmap": "cividis", "vmin": 10, "vmax": 100, "cbar": False, "linewidths": 0.5, "annot": True, "fmt": ".0f"}
for (above, below), (base, title) in zip(axes.T, rate_map.TITLES.items(), strict=True):
    vanilla = accuracies[base]["vanilla"].unstack().sort_index(ascending=False)
    automatic = accuracies[base]["constant"].droplevel("clipping_threshold").to_frame("automatic").T
    sns.heatmap(vanilla, ax=above, **look)
    sns.heatmap(automatic, ax=below, **look)
    for number in (*above.texts, *below.texts):
        number.set_color("black" if float(number.get_text()) > 60 else "white")
    found = results[(results.method == "robust") & (results.base == base)].eta.mean()  # of each run its median
    rates = np.log10(vanilla.columns)
    levels = vanilla.index[vanilla.index <= 10]  # above, little is clipped, and no rate is equivalent
    equivalent = np.log10([found / level if base == "sgd" else found for level in levels])
    places = np.interp(equivalent, rates, np.arange(len(rates)) + 0.5, left=np.nan, right=np.nan)
    above.plot(places, [vanilla.index.get_loc(level) + 0.7 for level in levels], "wo", markeredgecolor="black")
    star = np.interp(np.log10(found), rates, np.arange(len(rates)) + 0.5)
    below.plot(star, 0.75, "w*", markersize=13, markeredgecolor="black")
    unsearched = accuracies[base]["robust"].mean()
    above.set(
        title=f"{title}: best cell {vanilla.max().max():.0f}, preset robust {unsearched:.0f}", xlabel="", ylabel=""
    )
    below.set(xlabel=r"learning rate $\eta$", ylabel="")
axes[0, 0].set_ylabel("clipping threshold $R_g$")
_ = figure.suptitle(
    rf"Below the norms SGD knows only $\eta R_g$, AdamW only $\eta$: test accuracy (%), mean of {seeds} runs"
)

# %%
plots.save(
    figure,
    "09_tuning_budget_heatmap",
    parameters=parameters,
    inputs=[f"cell {spec.key}" for spec in trained],
    shows="Test accuracy of DP-SGD and DP-AdamW over clipping threshold and rate on digits, and where preset robust trains.",
    claim='Fig. "heatmap": DP training works only in a narrow region of (R_g, rate), which has to be searched.',
)
cells = accuracies.xs("vanilla", level="method").groupby("base")
found = pd.DataFrame({"cells": cells.size(), "best": cells.max(), "worst": cells.min()})
found["within 2 of the best"] = cells.agg(lambda values: (values > values.max() - 2).sum())
spread = results[results.method == "vanilla"].groupby(["base", "clipping_threshold", "learning_rate"]).percent
found["two runs differ by"] = (spread.max() - spread.min()).groupby("base").median()
found["automatic, best"] = accuracies.xs("constant", level="method").groupby("base").max()
found["preset robust"] = results[results.method == "robust"].groupby("base").percent.mean()
found["search's epsilon"] = [rate_map.counted(profile, epsilon, number) for number in found.cells]
found.round(1)

# %% [markdown]
# The table has accuracies in percent, by how much the runs of one cell differ (the median over cells), and what all cells of the map cost together.
#
# Read along the diagonals of the left map: for small $R_g$ the numbers repeat, as do those of the automatic row when shifted. Moving
# up, into thresholds above the norms, more noise is added for no more signal. The right map has columns: AdamW is free of the
# scale. So a method that fixes $R_g \to 0$ has lost nothing but one axis of the search; a learned rate saves the other.
#
# Preset robust is as near to the best cell as two runs of one cell are to each other. With AdamW the best automatic rate is above it by as little. It ends at an average of its weights, the cells at
# their last ones, which may help it.
#
# ## Verdict

# %%
smaller = splits[(splits.section == "interval") & (splits.interval == interval)].set_index("gamma").percent
decided = tuning_budget.judged(costs.share_percent, smaller, epsilon, runs)
verdict("09_tuning_budget", decided, parameters=parameters, inputs=saved["inputs"])

# %% [markdown]
# ## Where this differs from the paper
#
# * The heat maps that the paper cites show GPT-2 on E2E (BLEU, DP-Adam) and ResNet-18 on ImageNet (accuracy, DP-SGD). Ours is a small
#   network on 1,500 digits with a shortened run (profile `laptop`), so only the shape can be compared.
# * The paper's shares for other methods are its estimates; ours follow from each method's own analysis at one stated protocol, by RDP.
#   The bound of random search is not tight; with other accountants its share may be smaller.
# * Adaptive clipping is charged for learning $R_g$ only, DP-hyper for learning $\eta$ only, as in the paper's table.
# * The paper's 85 % for DP-hyper is a simulation, with candidates from "a narrow range around the optimal $\eta$", itself not private.
#
# ## Exercises
#
# Put your answer in place of `None` and run the cell; it says whether you are right. Solutions are in
# [`solutions/`](solutions/09_tuning_budget.ipynb).
#
# 1. Adaptive clipping adds noise $\sigma_b = B/20$ to a count, yet is nearly free. At $B = 50$, and with the vanilla noise `sigma` of the cell
#    below, by how many percent does it raise the gradient noise? Why is it free no longer?

# %%
more_noise = None
sigma = costs.sigma.xs(epsilon, level="target_epsilon").iloc[0]
print(f"sigma = {sigma:.4f}")
check(more_noise, lambda: tuning_budget.small_batches(sigma, [50]).more_noise_percent.item())

# %% [markdown] tags=["solution"]
# *Solution.* $\sigma_b = 2.5$, and the count's own multiplier is $2\sigma_b = 5$: no longer large against $\sigma$. By section 1 the gradient then
# needs $(\sigma^{-2} - 5^{-2})^{-1/2}$.

# %% tags=["solution"]
more_noise = 100 * ((sigma**-2 - 5**-2) ** -0.5 / sigma - 1)
check(more_noise, lambda: tuning_budget.small_batches(sigma, [50]).more_noise_percent.item())

# %% tags=["solution"]
tuning_budget.small_batches(sigma, [50, 100, 200, 1000]).round(3)

# %% [markdown]
# 2. A random search has three draws, and a candidate is good with probability 0.3. With which probability does it find a good one?

# %%
found = None
check(found, lambda: binom(3, 0.3).sf(0))

# %% [markdown] tags=["solution"]
# *Solution.* It fails if all three do: $1 - 0.7^3$. Two searches in three find one, and each is paid for.

# %% tags=["solution"]
found = 1 - 0.7**3
check(found, lambda: binom(3, 0.3).sf(0))

# %% [markdown]
# 3. Random search with 5 runs on average costs the same whether the candidates are good or bad. What would you need to know to make 5
#    enough, and where does that knowledge come from?
# 4. In the left map, take the best cell of the row with the smallest $R_g$. Which column of the automatic row should do equally well?

# %% [markdown] tags=["solution"]
# *Solutions.* (3) The range in which a good rate lies: five draws from three decades seldom hit. That knowledge comes from public tasks, or
# from earlier runs on the same data, which must be counted. (4) The column $\eta R_g$, since the automatic row has $R_g$ scaled
# out; up to the spread between seeds it does.
