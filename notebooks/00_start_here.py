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
# # Start here: private training without a learning rate
#
# **After this notebook you can**
#
# * say what differentially private (DP) training releases, and what $\varepsilon$ bounds,
# * explain why *trying* learning rates on private data costs privacy too, and how much,
# * train a model under a stated $(\varepsilon, \delta)$ with HyFreeDP, which learns the rate inside the budget,
# * read the curves that tell whether a privately learned rate can be trusted.
#
# It reproduces the idea of *Towards hyperparameter-free optimization with differential privacy* (HyFreeDP, ICLR 2025) on a
# task that ships with scikit-learn, so it needs no download. The paper fine-tunes vision transformers on 50,000 images and
# more; here a small network learns 1,500 images from scratch. That is a harder place to be private, and it shows. Profiles
# `gpu` and `paper` keep this small task, which needs no accelerator, and train three times as many seeds.

# %% tags=["parameters"]
profile = "laptop"
epsilon = 3.0
seeds = 3
interval = 5

# %%
from hyfreedp.experiments.parameters import check_parameters

check_parameters(
    globals(), {"profile": ("smoke", "laptop", "gpu", "paper"), "epsilon": float, "seeds": int, "interval": int}
)

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import Markdown, display

from hyfreedp import PRESETS, NoiseSplit, calibrate_noise
from hyfreedp import epsilon as epsilon_of
from hyfreedp.experiments import overview, plots, study
from hyfreedp.experiments.methods import EXTENDED_GRID
from hyfreedp.experiments.paths import CELLS, RESULTS
from hyfreedp.experiments.run import Spec, read_steps, run_cells, tabulate, with_seeds
from hyfreedp.experiments.tasks import TASKS

plots.use_style()
task = TASKS["digits"]
steps = 10 if profile == "smoke" else None  # None: the task's own
runs_each = seeds * (3 if profile in ("gpu", "paper") else 1)
parameters = {"profile": profile, "epsilon": epsilon, "seeds": seeds, "interval": interval}

# %% [markdown]
# ## 1. The private data
#
# 1,500 handwritten digits of 8 x 8 pixels, each from a person who may not want to be found in the model. Another 297 test
# it; they are not part of the training data and are not protected.

# %%
train, test = task.datasets("test")
figure, axes = plt.subplots(1, 10, figsize=(9, 1.2))
for axis, image, label in zip(axes, train.tensors[0], train.tensors[1], strict=False):
    axis.imshow(image.reshape(8, 8), cmap="gray_r")
    axis.set_title(int(label))
    axis.axis("off")
plt.show()

# %% [markdown]
# ## 2. What DP training is
#
# Two data sets are *neighbours* if one record is in one of them and not in the other. Training is
# $(\varepsilon, \delta)$-DP if for all neighbours and all sets $S$ of outcomes
#
# $$ P(\text{training on } D \in S) \le e^{\varepsilon}\, P(\text{training on } D' \in S) + \delta. $$
#
# Whoever sees the model, and all its intermediate states, then learns almost nothing about whether a given person took
# part. DP-SGD gets there in each step by drawing a random batch (every record with probability $q = B/N$), bounding what
# one record can do to the gradient, and drowning the rest in noise:
#
# $$ \mathbf m = \frac 1B\Big(\sum_{i\in\text{batch}} \frac{\mathbf g_i}{\|\mathbf g_i\| + 0.01}
#    + \sigma\, \mathcal N(0, I)\Big), \qquad \mathbf w \leftarrow \mathbf w - \eta\, \mathbf G(\mathbf m). $$
#
# $\mathbf G$ is any optimizer, here AdamW. An *accountant* finds the $\sigma$ that a budget needs.

# %%
protocol = {"target_delta": task.delta, "sample_rate": task.batch_size / task.train_size}
plain = calibrate_noise(target_epsilon=epsilon, steps=task.steps, probe="none", **protocol)
print(plain)

# %% [markdown]
# ## 3. Why tuning leaks
#
# The formula says nothing about $\eta$, so people try several and keep the best. But *which* rate did best depends on the
# private records, and each trial looked at all of them. Without further measures the budget of all trials adds up. The
# grid of this project has 8 rates, each constant or with linear decay: 16 runs.
#
# **Predict first:** if one run costs the $\varepsilon$ above, what do 16 runs on the same data cost?

# %%
trials = 2 * len(EXTENDED_GRID)
whole_grid = NoiseSplit.from_dict(plain.to_dict() | {"steps": trials * task.steps})
tuned_epsilon = epsilon_of(whole_grid, target_delta=task.delta)
display(
    Markdown(
        f"One run: epsilon = {plain.epsilon:.2f}. All {trials} runs together: **epsilon = {tuned_epsilon:.1f}**, computed by "
        f"composition at the same delta = {task.delta:g}. (Randomised searches with their own analysis do better, and still "
        "pay several times over.)"
    )
)

# %% [markdown]
# ## 4. HyFreeDP: learn the rate from a few private numbers
#
# Every few steps, look along the direction $\mathbf G$ in which the optimizer is about to go: the loss there is nearly a
# parabola, $L(\mathbf w - \eta \mathbf G) \approx L - b\eta + \tfrac a2 \eta^2$, whose bottom is at $\eta = b/a$. The loss
# values reveal something about the records, so they are clipped, averaged and noised as well; that takes 1-2 % more noise
# on the gradients, paid from the same budget.
#
# * **Preset "paper"** is the paper's algorithm: three noisy losses at $\mathbf w$ and $\mathbf w \pm \eta \mathbf G$, with
#   the guards around $b/a$ that public implementations use.
# * **Preset "robust"** (the default) releases what the parabola needs instead, the per-sample *contrasts*
#   $L_+ - L_-$ and $L_+ + L_- - 2L$. They are far smaller than the losses, so the same budget buys far less noise. It then
#   weighs each probe by its known noise.
#
# The next figure is one step of both, after the paper's overview figure. **Predict first:** of everything that happens in a
# step, what may be written to a log file that the world can read?

# %%
figure = overview.draw()
plt.show()
plots.save(
    figure,
    "00_start_here_overview",
    parameters=parameters,
    inputs=[],
    shows="The flow of one step from Poisson batch to new learning rate, with both presets' probes one below the other; raw "
    "values on dark ground at the left, private ones on light ground at the right; who sets each number is in its outline.",
    claim='Fig. "overview": HyFreeDP learns eta and R_l under DP and leaves all other hyperparameters at constants.',
    summary=[
        f"Preset {name}: probes {settings.probe} every {settings.interval} steps"
        f"{f' and in the first {settings.warmup:.0%} of the run' if settings.warmup else ''}, gamma = {settings.gamma:g}; "
        f"{learned} learned, eta from {settings.initial_learning_rate:g} on"
        for name, settings, learned in (
            ("paper", PRESETS["paper"], "eta and R_l"),
            ("robust", PRESETS["robust"], "eta, R_d and R_c"),
        )
    ],
)

# %% [markdown]
# **What to see.** Nothing crosses from the dark side to the light one but through a black box, which adds noise. All that is
# on the light side follows from released values, so by *post-processing* it may be logged and used again, also to look at
# the records once more: that is how $G$, $\eta$ and the thresholds return to the left. Three kinds of numbers run a step:
#
# * *DP-related* (black): noise, from the budget, and two constants, $\gamma$ and $K$;
# * *data-independent* (dotted): batch size, number of steps and the optimizer's own defaults, the same for all data;
# * *data-dependent* (thick): the rate and the probe's clipping thresholds. They are what one would otherwise tune.
#
# In your own code (the README has the complete ten lines):
#
# ```python
# model, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
#     module=model, optimizer=torch.optim.AdamW(model.parameters()), data_loader=loader,
#     target_epsilon=3.0, target_delta=1e-4, epochs=30)
# for batch in loader:
#     optimizer.step(per_sample_loss, batch)
# ```

# %%
learned = calibrate_noise(
    target_epsilon=epsilon, steps=task.steps, interval=interval, warmup_steps=task.steps // 10, **protocol
)
print(learned)

# %% [markdown]
# ## 5. Four ways to choose the rate
#
# Both presets start from 1e-4. Beside them stand the **best** and the **worst** of the 16 grid runs, known from a study of
# the whole grid (`python -m hyfreedp.experiments accuracy`, five seeds). "Best" is by test accuracy, which flatters the grid.

# %%
grid = study.summarise(pd.read_csv(RESULTS / "laptop" / "accuracy.csv"))
grid = grid[grid.method.isin(study.GRID_METHODS) & (grid.task == "digits")]
nearest = min(grid.epsilon.unique(), key=lambda value: abs(np.log(value / epsilon)))
grid = grid[grid.epsilon == nearest].sort_values("mean")
worst, best = grid.iloc[0], grid.iloc[-1]

specs = {
    "robust": Spec(method="robust", epsilon=epsilon, interval=interval, steps=steps),
    "paper": Spec(method="paper", epsilon=epsilon, interval=interval, steps=steps),
    "best": Spec(method=best.method, learning_rate=float(best.learning_rate), epsilon=epsilon, steps=steps),
    "worst": Spec(method=worst.method, learning_rate=float(worst.learning_rate), epsilon=epsilon, steps=steps),
}
titles = {
    "robust": "HyFreeDP, preset robust",
    "paper": "HyFreeDP, preset paper",
    "best": f"grid's best: {best.learning_rate:g}, {best.method}",
    "worst": f"grid's worst: {worst.learning_rate:g}, {worst.method}",
}
runs = [spec for choice in specs.values() for spec in with_seeds(choice, runs_each)]
records = run_cells(runs, CELLS, description="training runs")

# %% [markdown]
# Each row below is one step of one run: the rate it took, the accuracy on test data every few steps, and, on steps with a
# probe, what was released (`slope` b and `curvature` a with the standard deviation of their noise, the private loss) and
# decided.

# %%
history = pd.concat(
    read_steps(spec, CELLS).assign(choice=name, seed=spec.seed)
    for name, choice in specs.items()
    for spec in with_seeds(choice, runs_each)
)
history["probe_signal"] = history.slope.abs() / history.slope_std
history[history.choice == "robust"].head(3).T

# %%
figure, axes = plt.subplots(2, 2, figsize=(10, 7))
rate_axis, accuracy_axis, loss_axis, signal_axis = axes.flat


def curves(axis, column, choices, **kwargs):
    """Mean over seeds with the range from lowest to highest."""
    for name in choices:
        rows = history[(history.choice == name) & history[column].notna()]
        style = plots.STYLES[name]
        by_step = rows.groupby("step")[column]
        middle, low, high = by_step.mean(), by_step.min(), by_step.max()
        axis.plot(middle.index, middle, label=titles[name], markevery=0.2, markersize=5, **style, **kwargs)
        axis.fill_between(middle.index, low, high, color=style["color"], alpha=0.15, linewidth=0)


curves(rate_axis, "eta", specs)
rate_axis.set(yscale="log", title="The learning rate", ylabel="learning rate")
history["percent"] = 100 * history.test_accuracy
curves(accuracy_axis, "percent", specs)
accuracy_axis.set(title=f"What it brings (epsilon = {epsilon:g})", ylabel="test accuracy (%)", ylim=(0, 100))

first = history[(history.choice == "paper") & (history.seed == 0) & history.private_loss.notna()]
noise = first.loss_threshold * records[runs_each]["noise_split"]["sigma_loss"] / task.batch_size
loss_axis.errorbar(
    first.step, first.private_loss, yerr=noise, fmt="s", capsize=2, markersize=4, color=plots.STYLES["paper"]["color"]
)
loss_axis.set(title="Preset paper: private loss, seed 0, with its noise (1 sd)", ylabel="private mean loss (nats)")

curves(signal_axis, "probe_signal", ("robust", "paper"))
signal_axis.axhline(1, color="0.3", linewidth=1)
signal_axis.set_title("How clear is the slope that a probe sees? (below 1: noise)")
signal_axis.set(yscale="log", ylabel="|slope| / noise (sd)")

for axis in axes.flat:
    axis.set_xlabel("step")
accuracy_axis.legend(loc="center right", fontsize="small")
plt.show()

# %% [markdown]
# **What to see.** The rate of preset "robust" climbs from 1e-4 by orders of magnitude within the first steps, then hovers
# and falls to zero at the end. The paper's three losses carry noise that is large against the *differences* between them
# (lower left), so its slope is mostly noise (lower right) and its rate has nothing to go by. The paper reports that it works
# on its own tasks, where batches are larger and models are already trained; that is not tested here.
#
# ## 6. What each cost

# %%
results = tabulate(records)
results["choice"] = [name for name in specs for _ in range(runs_each)]
table = results.groupby("choice", sort=False).agg(
    accuracy=("accuracy", "mean"), sd=("accuracy", "std"), epsilon_of_the_run=("epsilon_spent", "max")
)
table[["accuracy", "sd"]] *= 100
table["epsilon_with_tuning"] = [
    tuned_epsilon if name in ("best", "worst") else table.epsilon_of_the_run[name] for name in table.index
]
table.index = [titles[name] for name in table.index]
table.round(2)

# %%
spread = {title: f" +- {row.sd:.1f}" if runs_each > 1 else "" for title, row in table.iterrows()}
summary = [
    f"{title}: accuracy {row.accuracy:.1f}{spread[title]} %, epsilon {row.epsilon_of_the_run:.2f} for the run, "
    f"{row.epsilon_with_tuning:.2f} with tuning"
    for title, row in table.iterrows()
]
plots.save(
    figure,
    "00_start_here",
    parameters=parameters,
    inputs=[f"cell {spec.key}" for spec in runs],
    shows="Learning rate, test accuracy, private loss and the clarity of each probe over the steps of four ways to train.",
    claim='Fig. "train curve": HyFreeDP learns a schedule whose accuracy approaches the manually tuned baseline.',
    summary=summary,
)

# %% [markdown]
# The run's own $\varepsilon$ never exceeds the target. The grid's best and worst were *found* by training 16 times on the
# private records, so their honest price is the last column; a learned rate has no such second bill.
#
# ## 7. Does it hold elsewhere?
#
# The study behind the grid: two tasks, three budgets, five seeds, one setting for all. Zero is the best of the 16 grid
# runs, chosen by test accuracy. Also shown: the single rate 0.02 with linear decay. AdamW on normalised gradients is nearly
# free of scale, so this one constant does well on both tasks; it is a prior about the optimizer that happens to fit, and
# worth knowing before believing any claim about tuning.

# %%
rows = pd.read_csv(RESULTS / "laptop" / "accuracy.csv")
compared = study.gaps(rows)
labels = {
    ("robust", 1e-4): ("robust, from 1e-4", plots.STYLES["robust"]),
    ("robust", 1e-3): ("robust, from 1e-3", plots.STYLES["robust"] | {"color": "#56B4E9", "marker": "P"}),
    ("paper", 1e-4): ("paper, from 1e-4", plots.STYLES["paper"]),
    ("linear", 0.02): ("0.02, linear decay", plots.STYLES["reference"]),
}
studied = [name for name in TASKS if name in set(rows.task)]
figure, axes = plt.subplots(1, len(studied), figsize=(10, 3.4), sharey=True)
for axis, name in zip(axes, studied, strict=True):
    chosen = compared[compared.task == name]
    for offset, ((method, rate), (label, style)) in enumerate(labels.items()):
        points = chosen[(chosen.method == method) & (chosen.learning_rate == rate)].sort_values("epsilon")
        axis.errorbar(
            np.arange(len(points)) + 0.12 * (offset - 1.5),
            points.gap,
            yerr=points["std"],
            label=label,
            linestyle="none",
            capsize=2,
            color=style["color"],
            marker=style["marker"],
        )
    axis.axhline(0, color="0.3", linewidth=1)
    axis.set_xticks(range(len(points)), [f"{value:g}" for value in points.epsilon])
    axis.set(title=TASKS[name].title, xlabel="target epsilon")
    axis.set_yscale("symlog", linthresh=5)
    axis.set_yticks([-50, -20, -10, -5, -2, 0, 2], ["-50", "-20", "-10", "-5", "-2", "0", "2"])
axes[0].set_ylabel("accuracy minus grid's best\n(points, mean and sd of 5 seeds)")
axes[1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

summary = [
    f"{row.task}, epsilon {row.epsilon:g}: {row.method} from {row.learning_rate:g} {row['mean']:.1f} %, "
    f"{row.gap:+.1f} points to the grid's best"
    for _, row in compared.sort_values(["task", "epsilon"], ascending=[True, False]).iterrows()
]
plots.save(
    figure,
    "00_start_here_gaps",
    parameters=parameters,
    inputs=["data/results/laptop/accuracy.csv"],
    shows="Accuracy of learned rates minus that of the best of 16 tuned runs, on two tasks at three budgets.",
    claim='Tab. "cv_main": HyFreeDP matches or surpasses NonDP-GS, the tuned upper bound, on most data sets.',
    summary=summary,
)

# %% [markdown]
# ## Where this differs from the paper
#
# * Task, model and batch size: 1,500 or 8,000 records and a three-layer network from scratch, instead of fine-tuned vision
#   transformers on 26,000 to 75,000 images. Profile `laptop`; $T = 100$ steps, $B = 500$, $\delta = 10^{-4}$.
# * Accounting: the gradient and the probes of a step use the same batch. We count them as one release; the paper counts
#   them as separate samplings, which understates $\varepsilon$.
# * Preset "robust" (contrasts, noise-aware rule, budget per step) is ours. Preset "paper" keeps the paper's probe but needs
#   GeN's guards around $b/a$, which the paper's Algorithm 1 does not print.
#
# ## Exercises
#
# 1. Run this notebook with another budget: `papermill notebooks/00_start_here.ipynb out.ipynb -p epsilon 1.0`. Which of the
#    four choices suffers most, and why?
# 2. Set `interval` to 1. What happens to the noise of the probes and to the noise of the gradient? (Compare the two printed
#    splits.)

# %% [markdown] tags=["solution"]
# *Solutions.* (1) The paper's preset has nothing left to lose; the grid's best loses some points, because the noise on the
# gradient grows about two and a half times; the robust preset loses more than that, because its probes grow as noisy and
# the rate it finds is then often too large. (2) Probing at every step spreads the same extra noise over more probes: the gradient's noise on probe steps falls to
# 1.02 times that of plain DP-SGD, and the noise of each probe grows.
