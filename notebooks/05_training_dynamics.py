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
# # Training dynamics: what the method does while it trains
#
# **After this notebook you can**
#
# * read the four curves that show whether a privately learned rate is healthy: threshold, rate, loss, accuracy,
# * say what probing at every step, every fifth or every tenth step changes, and what it cannot change,
# * explain why $\eta = b/a$ fails as soon as $b$ and $a$ are noisy, and what each step rule does about it,
# * explain the death spiral of a clipping threshold that follows what it clipped,
# * say which parts of the line search carry its result, from runs in which each is left out.
#
# **The paper's item.** Fig. "train curve": $R_l$, $\eta$, training loss and test accuracy over the iterations, on SVHN and
# GTSRB, for $K \in \{1, 5, 10\}$ and a manually tuned baseline. Its claims: the method "automatically finds optimal learning
# rate schedules, with clipping thresholds peaking early and decreasing gradually"; "while updating with $K=1$ yields optimal
# convergence", it "remains robust to less frequent updates (e.g., $K=5$)".

# %% tags=["parameters"]
profile = "laptop"
tasks = []  # names; empty for those of the profile
epsilon = 3.0
seeds = 3
jobs = 2  # worker processes

# %%
from hyfreedp.experiments.book.parameters import check_parameters

check_parameters(
    globals(),
    {"profile": ("smoke", "laptop", "gpu", "paper"), "tasks": list, "epsilon": float, "seeds": int, "jobs": int},
)

# %%
from dataclasses import replace

import pandas as pd
from IPython.display import display

from hyfreedp.experiments.runs.cells import Spec, run_cells, tabulate, with_seeds
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.paths import CELLS, RESULTS
from hyfreedp.experiments.store.verdicts import verdict
from hyfreedp.experiments.studies import dynamics, dynamics_figures, fine_tuning

# %%
plots.use_style()
smoke = profile == "smoke"
tasks = tasks or list(dynamics.PROFILE_TASKS[profile])
intervals = (5,) if smoke else dynamics.INTERVALS
parameters = {"profile": profile, "tasks": tasks, "epsilon": epsilon, "seeds": seeds}
bases = {task: Spec(task=task, epsilon=epsilon, steps=10 if smoke else None) for task in tasks}

# %% [markdown]
# ## 1. What is looked at
#
# In a probe step the optimizer's direction $\mathbf G$ is at hand, and the loss along it is nearly a parabola,
# $L(\mathbf w - \eta\mathbf G) \approx L - b\eta + \tfrac a2\eta^2$, lowest at $\eta = b/a$. What is released of it is clipped
# and noised, so the next clipping threshold is learned as well:
#
# * **Preset "paper"** (Alg. 1) releases three mean losses, each loss clipped to $[0, R_l]$. The next $R_l$ is the sum of the
#   three released values ("previous loss" in Alg. 1 as printed). Step rule "gen": $b/a$ if both are positive, never more
#   than twice or less than half the old rate; the next rate takes a tenth of it and nine tenths of the old one.
# * **"line_search"**, the package's former default, releases the mean of $d = L_+ - L_-$ clipped at $R_d$ and of $c = L_+ + L_- - 2L$ clipped at $R_c$.
#   Both thresholds follow a quantile of the contrasts. Step rule "posterior": what $b$ and $a$ are expected to be, given
#   the noise and that both are positive; the rate falls to zero over the second half of the run.
#
# Both start from $\eta = 10^{-4}$. (Preset "robust", the default, is no line search: its rate starts at a public number and is braked
# by votes, see notebooks 00 and 04.) **Tuned by hand** is the best of 16 rates (8 rates, constant or with linear decay), chosen
# by test accuracy: 16 runs that nobody paid for, as in the paper's NonDP-GS.

# %%
recorded = pd.concat(pd.read_csv(path) for path in sorted(RESULTS.glob("*/accuracy.csv")))
tuned = {task: dynamics.tuned_by_hand(base, recorded, CELLS) for task, base in bases.items()}
curves = [spec for task, base in bases.items() for spec in [*dynamics.curve_specs(base, intervals), tuned[task]]]
first = bases[tasks[0]]  # the task of the ablation
often = replace(first, interval=min(intervals))
ablation, thresholds = dynamics.ablation_specs(first), dynamics.threshold_specs(often)
runs = [one for spec in dict.fromkeys([*curves, *ablation, *thresholds]) for one in with_seeds(spec, seeds)]
records = run_cells(runs, CELLS, jobs=1 if smoke else jobs, description="training runs")
rows, results = dynamics.steps_of(runs, CELLS), tabulate(records)

# %% [markdown]
# One row per step of each run. On probe steps: `eta_probed` and `eta_next`, the rate before and after; `slope` $b$ and
# `curvature` $a$ with the standard deviations of their noise; the thresholds that clipped this probe; `private_loss` where
# losses were released; `accepted` and `reason`, what the rule decided. `eta` is the rate the step took, decay included.
# `test_loss` and `test_accuracy` are measured on test data, which nobody protects here, every few steps. All the rest is
# private. The mean loss of the training batch is *not* in these records, because it would not be private; the released one
# and the test loss stand in for the paper's training loss.

# %%
rows[rows.method == "line_search"].head(3).T

# %% [markdown]
# ## 2. Thresholds, rates, loss, accuracy
#
# **Predict first.** $K = 1$ probes 100 times, $K = 10$ ten times (and ten more in the warm-up of "line_search"), for the same budget.
# Which of them sees less noise in each probe? Which should train best?

# %%
curve_inputs = [f"cell {one.key}" for spec in curves for one in with_seeds(spec, seeds)]
figure = dynamics_figures.draw_curves(rows, tuned, intervals, "rate")

# %%
summary = dynamics_figures.curve_findings(rows, results, curves)
plots.save(
    figure,
    "05_training_dynamics",
    parameters=parameters,
    inputs=curve_inputs,
    shows="Clipping thresholds, released loss and learning rate over the steps, for both line searches at several K.",
    claim='Fig. "train curve": thresholds peak early and decrease gradually, the learned schedule approaches the manually tuned one.',
    summary=summary,
)
plots.what_to_see(summary, f"epsilon = {epsilon:g}; accuracy: mean and standard deviation of {seeds} seeds")

# %%
figure = dynamics_figures.draw_curves(rows, tuned, intervals, "result")
plots.save(
    figure,
    "05_training_dynamics_results",
    parameters=parameters,
    inputs=curve_inputs,
    shows="Test loss and accuracy over the steps, for both line searches at several K and for the best of a grid.",
    claim='Fig. "train curve": K = 1 is best and larger K hardly worse.',
    summary=summary,
)

# %% [markdown]
# On digits: the contrasts' thresholds do what the paper says of $R_l$. They rise with the rate, because a longer look along
# $\mathbf G$ sees larger differences, peak early, and fall by orders of magnitude as the loss flattens. The rate climbs
# from $10^{-4}$ within a few steps and then hardly depends on $K$: all probes share one budget, so fewer probes are clearer
# ones. That "$K = 1$ yields optimal convergence" we do not see: the three accuracies are within their spread. With preset
# "paper", $R_l$ jumps to three times the loss and stays there, because the loss does not fall: the rate shrinks, and at
# $K = 1$ fastest. The next two sections show why.
#
# ### On real images, from a pre-trained start
#
# The same curves where the paper draws them: all parameters of a pre-trained model, batches of hundreds (profile `desktop` of notebook 06: 20,000 images of
# CIFAR-10, a small ViT pre-trained on Tiny ImageNet; `data/results/desktop/fine_tuning.csv`, made by `python -m hyfreedp.experiments fine-tuning`). "Tuned by
# hand" is the best constant of eight, chosen on validation data.

# %%
real = fine_tuning.recorded()
if real.empty:
    print("no record yet: python -m hyfreedp.experiments fine-tuning makes it, from CIFAR-10")
else:
    figure = dynamics_figures.draw_real(real)
    summary = dynamics_figures.real_findings(real)
    shows = "Threshold, rate, losses and accuracy over the steps on CIFAR-10, preset paper at several K, preset robust and a constant."
    described = {"parameters": {}, "inputs": ["data/results/desktop/fine_tuning.csv"], "shows": shows}
    plots.save(figure, "05_training_dynamics_real", summary=summary, claim='Fig. "train curve".', **described)
    plots.what_to_see(summary, f"epsilon = {real.epsilon.iloc[0]:g}; {real.seed.nunique()} seeds")

# %% [markdown]
# ## 3. What each rule makes of a noisy parabola
#
# $b$ and $a$ carry noise of known size. A quotient of two noisy numbers has no mean: where $a$ may be near zero, $b/a$ may be
# anything, of either sign. The step rules differ in what they do about it:
#
# | rule | next $\eta$ |
# | --- | --- |
# | literal | $b/a$, whatever it is (Alg. 1, line 11) |
# | gen | $b/a$ within $[\eta/2, 2\eta]$, smoothed (weight 0.1, the rest stays with $\eta$), if $a, b > 0$; else $\eta$ as it is |
# | posterior | $\sqrt m\; \mathbb E[b \mid b > 0] \,/\, \mathbb E[a \mid a > 0]$ of precision-weighted averages, within $[\eta/2, 4\eta]$, or $[\eta/2, 2\eta]$ when it is held for several steps |
# | anchored | the same, pulled to 0.02: target$^{1/4}\; 0.02^{3/4}$. A prior about AdamW, not something learned |
#
# Alg. 1 prints $b/a$ and nothing else. What surrounds it in rule "gen" is taken from its authors' own package, `gen-optim`:
# without privacy, preset "paper" equals that package step by step (`tests/core/test_gen_optim.py`). In two things published versions
# differ. *Smoothing*: the authors' package keeps 0.9 of the old rate, an independent one 0.1. Preset "paper" follows the
# authors; so a rate grows by at most 10 % per probe, sevenfold in twenty probes. *Batch*: Alg. 1 looks along $\mathbf G_t$ by
# batch $t$, whose loss at $\mathbf w_t$ it has already; the package by batch $t+1$, which is not the one that $\mathbf G_t$ was fitted
# to. Preset "paper" follows Alg. 1. The other batch is no cheaper in $\varepsilon$: batch $t+1$ then bears the probe along
# $\mathbf G_t$ and its own gradient, again two releases on one batch. Only a batch that serves nothing but the probe would make
# the paper's accounting, probes as independent samplings, sound. Both smoothings and both batches are in the table below.
#
# The damping is $m = \sqrt{(1-\beta)/(1+\beta)}$ for momentum $\beta$. Each rule is run on both probes, everything else as in
# the method that the probe belongs to ("contrasts": line_search, "losses": paper); the third row leaves out one part of
# line_search at a time, the last has both smoothings on both batches. Without damping, the rule aims for $b/a$ itself and
# looks no farther than it steps.
#
# **Predict first.** Suppose a probe sees nothing but noise. In which direction does each rule move the rate in the long run?

# %%
figure = dynamics_figures.draw_rates(rows, first)

# %% [markdown]
# What the probes did, averaged over seeds: shares of the probes whose slope was `clear` (more than two standard deviations
# from zero), whose fit was `rejected`, whose result was `clamped` to the rule's range, after which the rate was `negative`;
# the smallest and the largest rate of all runs; the accuracy reached (%, mean), with its standard deviation in `spread`.

# %%
table = dynamics.behaviour_table(rows, results, first)
table

# %%
summary = dynamics_figures.rate_findings(table)
plots.save(
    figure,
    "05_training_dynamics_rates",
    parameters=parameters,
    inputs=[f"cell {one.key}" for spec in ablation for one in with_seeds(spec, seeds)],
    shows="Absolute learning rate of every run, for four step rules on both probes, for the line search less one part, and for "
    "rule gen with both smoothings on both batches.",
    claim="Alg. 1, line 11: the next rate is b/a. (The paper has no such ablation.)",
    summary=summary,
)
plots.what_to_see(summary)

# %% [markdown]
# With pure noise in $b$ and $a$, **literal** multiplies the rate by a random number of either sign whose typical size is
# below one: it shrinks geometrically, and as it shrinks the signal $\eta b$ shrinks with it. **Gen** accepts one probe in four
# (both signs right by chance) and then mostly $b/a$ is below its clamp: half of $\eta$, of which a tenth enters. It drifts down,
# slowly, and cannot climb; with 0.9 of the new rate it does the same about ten times as fast. **Posterior** barely moves under pure noise. **Anchored** goes to its prior with or without a signal; that it works
# on a probe that sees nothing says that 0.02 is a good rate here, not that anything was learned.
#
# ## 4. The death spiral of $R_l$
#
# One threshold clips the losses and sets their noise, $\sigma_l R_l / B$. Both published rules learn it from what it has
# clipped: the *previous* released loss, or the *sum* of the three. Write $L_R$ for the mean of $\min(L_i, R)$.
#
# * previous: $R \leftarrow L_R$ plus noise. As $L_R \le R$, the threshold can only fall, but for the noise.
# * sum: $R \leftarrow 3 L_R$ plus noise. It falls where $L_R < R/3$, which losses of many near-zero and a few large values
#   always reach: as $R$ shrinks, still fewer of the large ones are seen.
#
# Preset "paper" has a floor of 0.1 under both. The rate must fall for this to show, so we look at two step rules, one that
# does not learn on this task and one that does.
#
# **Predict first.** Where is $R_l$ at the end, compared with the true loss?

# %%
figure = dynamics_figures.draw_thresholds(rows, often)

# %%
summary = dynamics_figures.threshold_findings(rows, results, often)
plots.save(
    figure,
    "05_training_dynamics_thresholds",
    parameters=parameters,
    inputs=[f"cell {one.key}" for spec in thresholds for one in with_seeds(spec, seeds)],
    shows="R_l, the released loss that it clipped and the true test loss, for both rules for R_l under two step rules; "
    "median and range over seeds.",
    claim="Alg. 1, line 8 and section 4.1: R_l is the previous released loss, or more conservatively the sum of the three, "
    "to avoid the clipping bias.",
    summary=summary,
)
plots.what_to_see(summary, "means over seeds")

# %% [markdown]
# While nothing is learned, "previous" wanders down from its initial 1 and never finds the loss of $\ln 10 \approx 2.3$, whereas
# the sum finds it at the second probe. Once the loss falls, both end on the floor, and a mean of losses that are clipped at
# 0.1 cannot exceed 0.1, whatever the true one is: by then most samples are learned, and the loss that remains sits in few
# samples, which are clipped. (The loss to compare with is that of the training batch, which would not be private; the test
# loss stands in for it.) The contrasts' thresholds have no such trap, because they follow the released *share* of samples
# within them, which says when to grow again.
#
# ## 5. What each part contributes
#
# **Predict first.** Which part of the line search matters most: the probe, the rule, the damping or the warm-up?

# %%
figure = dynamics_figures.draw_ablation(results, first, tuned[first.task])

# %%
summary = dynamics_figures.ablation_findings(table)
plots.save(
    figure,
    "05_training_dynamics_ablation",
    parameters=parameters,
    inputs=[f"cell {one.key}" for spec in ablation for one in with_seeds(spec, seeds)],
    shows="Final test accuracy of four step rules on both probes, and of the line search less one part at a time; one point "
    "per seed, mean and standard deviation.",
    summary=summary,
)
plots.what_to_see(summary, f"epsilon = {epsilon:g}, {seeds} seeds")

# %% [markdown]
# ### At three budgets
#
# The same ablation at three values of $\varepsilon$ with five seeds, from `python -m hyfreedp.experiments ablation`
# (`data/results/laptop/ablation.csv`): test accuracy in percent, mean and standard deviation.

# %%
budgets = pd.read_csv(RESULTS / "laptop" / "ablation.csv")
display(dynamics.accuracy_table(budgets))
plots.what_to_see(dynamics.losses_by_budget(budgets), "against the line search as it is, at $\\varepsilon$ = 8, 3, 1")

# %% [markdown]
# ## Verdict

# %%
decided = dynamics_figures.verdicts(results, tuned)
verdict("05_training_dynamics", decided, parameters=parameters, inputs=[f"cell {one.key}" for one in runs])

# %% [markdown]
# ## Where this differs from the paper
#
# * Task, model and length: see `tasks`. On profile laptop a small network learns 1,500 digits from scratch in 100 steps;
#   the paper fine-tunes vision transformers on SVHN and GTSRB, where the losses of a batch of 1,000 are less noisy and the
#   curvature is benign. Profile paper runs these.
# * Accounting: gradient and probe of a step are one release on one batch. The paper counts them as separate samplings, which
#   gives its losses less noise than its $\varepsilon$ allows.
# * "line_search" is ours. Preset "paper" adds the guards and the smoothing of its authors' package and a floor and a cap of $R_l$ to what Alg. 1 prints; "Algorithm 1
#   as printed" in the tables is without the guards, and with the previous loss as $R_l$, but keeps floor and cap.
# * The paper plots the training loss. Here it is the test loss, because that of the training batch would not be private, and
#   beside it the private one where it is released.
# * The baseline is chosen by test accuracy from an extended grid, of 16 runs per setting that its $\varepsilon$ does not count.
#
# ## Exercises
#
# 1. Run the notebook at $\varepsilon = 1$ (`papermill notebooks/05_training_dynamics.ipynb out.ipynb -p epsilon 1.0`). Which
#    $K$ suffers most with line_search, and what do its thresholds do?
# 2. Take the rule $R \leftarrow 3\, L_R$ without noise. Where does it come to rest if the losses are exponentially distributed
#    with mean $\mu$? Where if a share $p$ of the samples has loss 1 and all others none?
# 3. In the table of section 3, what share of `clear` slopes would a probe have that sees nothing but noise? Which runs are
#    close to it?

# %% [markdown] tags=["solution"]
# *Solutions.* (1) See for yourself; the noise on gradients and probes grows about two and a half times, so compare the
# heights at which $R_d$ and $R_c$ flatten, and the width of the bands of $\eta$. (2) Exponential:
# $L_R = \mu(1 - e^{-R/\mu})$, so $x = R/\mu$ solves $x = 3(1 - e^{-x})$: $x \approx 2.82$, a healthy threshold. Two values:
# $L_R = p \min(1, R)$, so it rests at $R = 3p$ if $p \ge 1/3$; if $p < 1/3$ every update multiplies it by $3p < 1$ and it falls
# to the floor, while the true mean loss is still $p$. (3) Two standard deviations on either side: 5 %. All runs whose
# losses are released at a rate of $10^{-4}$ or below.
