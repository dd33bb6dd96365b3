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
# # Audit: can anybody refute the epsilon?
#
# **After this notebook you can**
#
# * explain how an experiment bounds $\varepsilon$ from below, with which confidence, and why no experiment bounds it from above,
# * audit one probe, whole runs, and a single training with a thousand canaries, with the library's own code,
# * show on a running mechanism why gradient and probes of one batch must be counted together,
# * say what an audit cannot see.
#
# **The paper's item.** Alg. 2 and Eq. "sigmas": the noise split, and the claim that a run with it is $(\varepsilon, \delta)$-DP. The
# paper has no audit. Here its claim, and ours, are put to the test.

# %% tags=["parameters"]
profile = "laptop"
epsilon = 3.0
records = 50_000
batch_size = 1000
steps = 250
interval = 5
confidence = 0.95
seeds = 2  # training runs per method and budget, each with canaries of its own

# %%
from hyfreedp.experiments.book.parameters import check_parameters

check_parameters(
    globals(),
    {
        "profile": ("smoke", "laptop", "gpu", "paper"),
        "epsilon": float,
        "records": int,
        "batch_size": int,
        "steps": int,
        "interval": int,
        "confidence": float,
        "seeds": int,
    },
)

# %%
import math
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import Markdown, display

from hyfreedp import calibrate_noise
from hyfreedp.accounting import UnsoundAccountingWarning
from hyfreedp.accounting.composition import spent
from hyfreedp.experiments.audits import attack, one_run, releases
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.cache import cached
from hyfreedp.experiments.store.paths import CELLS
from hyfreedp.experiments.studies.noise_split import COARSENESS, PAPER_SPLIT, delta_curve, gdp_epsilon
from hyfreedp.experiments.tasks.registry import TASKS
from hyfreedp.sensitivity import SQUARED_L2_SENSITIVITY

plots.use_style()
parameters = {
    name: globals()[name]
    for name in ("profile", "epsilon", "records", "batch_size", "steps", "interval", "confidence", "seeds")
}
laptop = {
    "losses": 1_000_000,  # probes in each world
    "votes": 40_000,  # these are released one by one
    "factors": [1.0, 0.7, 0.5, 0.35],
    "independent": 4_000_000,  # runs in each world
    "same_batch": 1_000_000,
    "accountant": "pld",
    "epsilons": [1.0, 3.0, 8.0, math.inf],
    "canaries": 1000,
    "training_steps": 50,
    "rates": [1e-3, 5e-3, 2e-2, 5e-2],
}
SIZES = {
    "smoke": laptop
    | {"losses": 20_000, "votes": 300, "factors": [1.0, 0.5], "independent": 4000, "same_batch": 4000}
    | {"accountant": "rdp", "epsilons": [1.0, math.inf], "canaries": 100, "training_steps": 10, "rates": [2e-2]},
    "laptop": laptop,
    "gpu": laptop | {"votes": 400_000, "independent": 20_000_000, "same_batch": 20_000_000, "training_steps": 100},
    "paper": laptop | {"votes": 400_000, "independent": 20_000_000, "same_batch": 20_000_000, "training_steps": 100},
}
sizes = SIZES[profile]
task = TASKS["digits"]
percent = f"{100 * confidence:g} %"


def what_to_see(lines):
    display(Markdown("**What to see.**\n\n" + "\n".join(f"* {line}." for line in lines)))


# %% [markdown]
# ## 1. The logic of an audit
#
# A mechanism is $(\varepsilon, \delta)$-DP if, for all data sets that differ by one record and for *every* event $E$,
#
# $$ P[E \mid \text{with}] \le e^{\varepsilon} P[E \mid \text{without}] + \delta, $$
#
# and the same with the two worlds exchanged. An auditor chooses one record and one event ("the statistic exceeds a threshold: I say
# the record was there"), and runs the mechanism many times in both worlds. Let $h$ be how often it is right with the record, and $a$ how
# often it raises a false alarm without it. Then
#
# $$ \varepsilon \ge \max\left\{ \log\frac{h - \delta}{a},\; \log\frac{1 - a - \delta}{1 - h} \right\}. $$
#
# $h$ and $a$ are counted, so they are uncertain: we take the lower Clopper-Pearson bound of $h$ and the upper one of $a$. The threshold is
# chosen on one half of the runs and judged on the other, since a threshold that was chosen on the runs that judge it would flatter itself.
#
# Note the direction. A *large* bound refutes a claim: there is an attack that the claim says cannot exist. A *small* bound proves nothing:
# the record, the event, or the number of runs may have been badly chosen. So a sound claim is one that good auditors fail to refute, and an
# auditor is good only if it does refute what is wrong. That is why every audit below is also run on something broken on purpose.
#
# ## 2. One probe, or one vote
#
# For the paper's probe the worst-case record sits at the clip: its three losses are all $R_l$, so that the released vector moves by
# $\sqrt 3$ clips. For a vote of preset robust it is a record that votes at all, which moves the sum by 1. There are no others. The
# statistic is the projection on that move. To give the auditor a chance, the noise $\sigma_l$ is as small as can be: this one release
# spends the whole budget. Then it is made smaller still by a factor, while the claim stays: a fault.
#
# **Predict first.** From which factor on will the auditor notice?

# %%
single = calibrate_noise(
    target_epsilon=epsilon, target_delta=task.delta, sample_rate=1.0, steps=1, probe="none", accountant="pld"
)
rows = []
for probe in ("losses", "votes"):
    sigma = single.sigma * math.sqrt(SQUARED_L2_SENSITIVITY[probe])
    for factor in sizes["factors"]:
        (found,) = cached(
            CELLS,
            releases.probe_bounds,
            probe=probe,
            sigma_loss=factor * sigma,
            deltas=[task.delta],
            runs=sizes[probe],
            seed=0,
            confidence=confidence,
        ).itertuples()
        true = attack.release_epsilon(probe, factor * sigma, task.delta)
        rows.append((probe, factor, attack.release_epsilon(probe, sigma, task.delta), true, found.lower_bound))
probes = pd.DataFrame(rows, columns=["probe", "factor", "claimed", "true_epsilon", "lower_bound"])
probes

# %% [markdown]
# `claimed` is the $\varepsilon$ of the release at the noise that was asked for, `true_epsilon` at the noise that is there, both by the
# accountant, and `lower_bound` what the audit found.

# %%
finely = np.geomspace(min(sizes["factors"]), 1, 50)
exact = [gdp_epsilon(1 / (factor * single.sigma), task.delta) for factor in finely]
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
for axis, (probe, part) in zip(axes, probes.groupby("probe", sort=False), strict=True):
    axis.plot(finely, exact, label="exact, noise that is there", **plots.STYLES["worst"] | {"marker": ""})
    axis.axhline(part.claimed.iloc[0], color="0.2", linewidth=1, label="claim, noise asked for")
    axis.plot(
        part.factor, part.lower_bound, label=f"audit, {percent}", **plots.STYLES["robust"] | {"linestyle": "none"}
    )
    axis.set(title=f"one probe, {probe}", xlabel=r"noise / noise asked for", xscale="log")
    axis.set_xticks(sizes["factors"], [f"{factor:g}" for factor in sizes["factors"]])
    axis.minorticks_off()
axes[0].set_ylabel(r"$\varepsilon$ of the release")
axes[0].legend(fontsize="small")
plt.show()

# %%
honest, faulty = probes[probes.factor == 1], probes[probes.factor < 1]
noticed = faulty[faulty.lower_bound > faulty.claimed]
summary = [
    *(
        f"One probe of {row.probe}: the bound is {row.lower_bound:.2f} where {row.claimed:.2f} is claimed, "
        f"{releases.verdict(row.claimed, row.lower_bound)}"
        for row in honest.itertuples()
    ),
    f"With the noise too small on purpose, {len(noticed)} of {len(faulty)} claims are refuted"
    + (f", from a factor of {noticed.factor.max():g} on" if len(noticed) else " by so few runs"),
    f"No bound exceeds the accountant's epsilon of the noise that is there: {(probes.lower_bound <= probes.true_epsilon).all()}",
]
saved = {"parameters": parameters, "inputs": ["tables of audits, cells of data/cells"]}
plots.save(
    figure,
    "09_audit_probe",
    shows="Lower bounds on the epsilon of one probe, at the noise that was asked for and with less.",
    claim="",
    summary=summary,
    **saved,
)
what_to_see(summary)

# %% [markdown]
# The bound stays below the truth because the best evidence lies in the tails, where even many runs leave few counts.
#
# ## 3. Gradient and probes of one batch
#
# At a step that probes, Algorithm 1 releases the gradient and three losses of *one* Poisson batch. Alg. 2 counts them as if each of the
# four had drawn a batch of its own (`composition="independent"`); then the chance that one record is in several of them is tiny, and
# subsampling protects each. In truth the record is in all four or in none, and four noisy numbers that move together add up to one with
# less noise,
#
# $$ \sigma_\text{eff} = \left(\sigma_g^{-2} + 3\,\sigma_l^{-2}\right)^{-1/2}, $$
#
# which is `composition="same_batch"`.
#
# The auditor needs no theory of composition. In each simulated run a Poisson sampler draws the record into batches; there it moves the
# gradient by its clip along one direction, and each loss by its own. What is released goes through `privatize_gradient` and
# `privatize_loss`. The statistic weighs the four numbers of a step by their precision (the best linear one), turns the result $x_t$ into
# a log likelihood ratio, and adds up over the run:
#
# $$ \ell = \sum_t \log\left(1 - q + q\, e^{(x_t - 1/2)/\sigma_{\text{eff},t}^2}\right). $$
#
# Noise is calibrated twice for the same target, once by each way of counting. Bounds are computed at four values of $\delta$, fixed
# beforehand, the first being the target's; the error is shared among the four, so they hold jointly.
#
# **Predict first.** Where, if anywhere, will the audit contradict the count of independent batches?

# %%
deltas = [records**-1.1, 1e-4, 1e-3, 1e-2]
protocol = {
    "target_epsilon": epsilon,
    "target_delta": deltas[0],
    "sample_rate": batch_size / records,
    "steps": steps,
    "interval": interval,
    "accountant": sizes["accountant"],
}
COUNTS = ("independent", "same_batch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UnsoundAccountingWarning)  # that is what this section is about
    splits = {count: calibrate_noise(**protocol, **PAPER_SPLIT, composition=count) for count in COUNTS}
joint = []
for noise, split in splits.items():
    found = cached(
        CELLS,
        releases.joint_bounds,
        split=split.to_dict(),
        deltas=deltas,
        runs=sizes[noise],
        seed=0,
        confidence=confidence,
    )
    for count in COUNTS:
        claimed = [
            spent(
                split,
                split.steps,
                split.probe_steps,
                target_delta=delta,
                accountant="pld",
                composition=count,
                coarseness=COARSENESS,
            )
            for delta in deltas
        ]
        joint.append(found.assign(noise=noise, counted=count, claimed=claimed))
joint = pd.concat(joint, ignore_index=True)
joint["verdict"] = [releases.verdict(*pair) for pair in zip(joint.claimed, joint.lower_bound, strict=True)]
joint[["noise", "counted", "delta", "hits", "alarms", "trials", "claimed", "lower_bound", "verdict"]]

# %% [markdown]
# `noise` tells which way of counting chose the noise, `counted` which one makes the claim, `hits` and `alarms` how often the threshold
# was exceeded with and without the record, in `trials` runs each.

# %%
grid = np.linspace(0.05, 1.75 * epsilon, 40)
TITLES = {"independent": "noise chosen by the independent count", "same_batch": "noise chosen by the same-batch count"}
CURVES = {"independent": ("counted as independent", "paper"), "same_batch": ("counted as same batch", "best")}
figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
for axis, (noise, split) in zip(axes, splits.items(), strict=True):
    for count, (label, style) in CURVES.items():
        axis.plot(delta_curve(split, count, grid), grid, label=label, **plots.STYLES[style] | {"marker": ""})
    part = joint[(joint.noise == noise) & (joint.counted == noise)]
    axis.plot(part.delta, part.lower_bound, label=f"audit, {percent}", **plots.STYLES["robust"] | {"linestyle": "none"})
    axis.plot(deltas[0], epsilon, marker="*", color="0.2", markersize=12, linestyle="none", label="target")
    axis.set(xscale="log", xlim=(1e-6, 0.1), xlabel=r"$\delta$", title=TITLES[noise])
axes[0].set_ylabel(r"$\varepsilon$")
axes[0].legend(fontsize="small")
plt.show()

# %%
by = joint.set_index(["noise", "counted"])
refuted = by.loc[("independent", "independent")]
refuted = refuted[refuted.verdict == "refuted"]
truths = by.xs("same_batch", level="counted")
summary = [
    f"Noise by the independent count: its own claim is refuted at {len(refuted)} of {len(deltas)} values of delta, jointly at {percent}"
    + "".join(
        f"; at delta = {row.delta:.2g} at least {row.lower_bound:.2f} where {row.claimed:.2f} is claimed"
        for row in refuted.itertuples()
    ),
    f"The same releases counted as one batch are claimed to cost {by.loc[('independent', 'same_batch')].claimed.iloc[0]:.2f} at the "
    f"target's delta; the audit finds at least {by.loc[('independent', 'same_batch')].lower_bound.iloc[0]:.2f}",
    f"Noise by the same-batch count: at most {by.loc[('same_batch', 'same_batch')].claimed.iloc[0]:.2f} is claimed, at least "
    f"{by.loc[('same_batch', 'same_batch')].lower_bound.iloc[0]:.2f} found",
    f"Claims of the same-batch count refuted: {(truths.verdict == 'refuted').sum()} of {len(truths)}",
]
plots.save(
    figure,
    "09_audit",
    shows="What whole runs with gradient and probes on one batch cost: as counted in two ways, and lower bounds from running them.",
    claim="Alg. 2 and Eq. sigmas: with gradients and 3T/K losses composed as separate releases, the run is (epsilon, delta)-DP.",
    summary=summary,
    **saved,
)
what_to_see(summary)

# %% [markdown]
# Points above the curve of independent batches cannot be explained by it: the mechanism that really runs leaks more than Alg. 2 says. The
# same points lie below the same-batch curve, which is the one that the library uses.
#
# ## 4. One training run, a thousand canaries
#
# Millions of runs are out of reach for a whole training. Steinke, Nasr and Jagielski (2023) need one. Each of $m$ canaries is put into
# the training data by a fair coin. Afterwards the auditor sees the model, scores every canary by how much training has lowered its loss,
# says "in" for the highest scores, "out" for the lowest, and abstains from the rest. If the run is $(\varepsilon, \delta)$-DP and $v$ of
# $r$ guesses are right, then
#
# $$ P[V \ge v] \le f(v) + 2 m \delta \max_i \frac{f(v - i) - f(v)}{i}, \qquad
#    f(v) = P\left[\mathrm{Bin}\left(r, \tfrac{e^\varepsilon}{1 + e^\varepsilon}\right) \ge v\right], $$
#
# and every $\varepsilon$ for which the right-hand side is below one minus the confidence is refuted. Our canaries are black images with one
# bright pixel each, a pixel that no other image has, under random labels; they replace part of the digits. Each run has canaries of its
# own. A canary takes part in one run only, so all runs together are one mechanism with the same $(\varepsilon, \delta)$, and their guesses
# are added up.
#
# Trained are both presets of HyFreeDP, and AdamW at a constant and at a linearly decaying rate of 0.02. "Tuned" is the constant rate again,
# but the best of a grid by the raw loss on the training data, canaries included, as so often done; what it claims is what *one* of its
# runs spends.
#
# **Predict first.** Which of these will stand out, and at which budgets?

# %%
LABELS = {
    "robust": "HyFreeDP, preset robust",
    "paper": "HyFreeDP, preset paper",
    "constant": "constant rate 0.02",
    "linear": "0.02, linear decay",
    "tuned": "constant rate, tuned without privacy",
}


def trained(method, target, rate, seed):
    return cached(
        CELLS,
        one_run.train_with_canaries,
        method=method,
        epsilon=target,
        learning_rate=rate,
        canaries=sizes["canaries"],
        steps=sizes["training_steps"],
        seed=seed,
    )


rows = []
for target in sizes["epsilons"]:
    searches = [[trained("constant", target, rate, seed) for rate in sizes["rates"]] for seed in range(seeds)]
    runs = {
        "robust": [trained("robust", target, 1e-4, seed) for seed in range(seeds)],
        "paper": [trained("paper", target, 1e-4, seed) for seed in range(seeds)],
        "constant": [search[sizes["rates"].index(2e-2)] for search in searches],
        "linear": [trained("linear", target, 2e-2, seed) for seed in range(seeds)],
        "tuned": [one_run.tuned(search) for search in searches],
    }
    for method, results in runs.items():
        found = one_run.pooled_bound(results, task.delta, confidence)
        accuracy = 100 * np.mean([result.accuracy.iloc[0] for result in results])
        rows.append(
            {"method": method, "target": target, "claimed": results[0].epsilon.iloc[0], "accuracy_percent": accuracy}
            | found
        )
canaries = pd.DataFrame(rows)
canaries["verdict"] = [releases.verdict(*pair) for pair in zip(canaries.claimed, canaries.lower_bound, strict=True)]
canaries

# %% [markdown]
# `right` of `guesses` about `canaries` coins were right, at the share of guesses that gave the best bound (three shares are tried, and
# share the error); `accuracy_percent` is that on the test digits.

# %%
figure, axis = plt.subplots(figsize=(7.5, 4))
positions = np.arange(len(sizes["epsilons"]))
for index, (method, label) in enumerate(LABELS.items()):
    part = canaries[canaries.method == method]
    style = plots.SERIES[index] | {"linestyle": "none"}
    axis.plot(positions + 0.14 * (index - 2), part.lower_bound, label=label, markersize=7, **style)
for position, target in zip(positions, sizes["epsilons"], strict=True):
    if math.isfinite(target):
        axis.hlines(target, position - 0.4, position + 0.4, color="0.2", label="claimed" if position == 0 else None)
axis.set_xticks(positions, ["without noise" if math.isinf(target) else f"{target:g}" for target in sizes["epsilons"]])
axis.set(xlabel=r"claimed $\varepsilon$", ylabel=rf"lower bound on $\varepsilon$, {percent}")
axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %%
private, bare = canaries[np.isfinite(canaries.claimed)], canaries[np.isinf(canaries.claimed)]
largest = private.loc[private.lower_bound.idxmax()]
at = canaries.set_index(["method", "target"]).lower_bound
summary = [
    f"Without noise {(bare.right / bare.guesses).min():.0%} or more of the guesses are right, which gives lower bounds of "
    f"{bare.lower_bound.min():.2f} to {bare.lower_bound.max():.2f}: the canaries are remembered",
    f"With noise {(private.verdict == 'refuted').sum()} of {len(private)} claims are refuted; the largest bound is {largest.lower_bound:.2f} where "
    f"{largest.claimed:.2f} is claimed ({LABELS[largest.method]})",
    "The rate tuned without privacy: "
    + ", ".join(
        f"{at['tuned', target]:.2f} (untuned {at['constant', target]:.2f}) where {target:g} is claimed"
        for target in sizes["epsilons"]
        if math.isfinite(target)
    )
    + f"; {(private[private.method == 'tuned'].verdict == 'refuted').sum()} of these claims are refuted by this audit",
]
plots.save(
    figure,
    "09_audit_one_run",
    shows="Lower bounds on epsilon from single training runs with canaries, beside what is claimed.",
    claim="HyFreeDP trains within the same (epsilon, delta) as a run at a fixed rate; a grid search without privacy does not count its runs.",
    summary=summary,
    **saved,
)
what_to_see(summary)

# %% [markdown]
# Even if no guess is wrong the bound is finite: so many guesses, less what $\delta$ concedes for so many canaries, allow no more (Exercise 1).
# That a search on private data costs privacy is certain: it uses the results of many runs, which nobody has counted. But its choice among
# a few rates tells little about any *one* canary, and this audit looks at canaries one by one; so it is no surprise if it sees nothing. An
# audit that fails to refute a claim is no argument that the claim is right.
#
# ## 5. All audits in one table

# %%
table = pd.concat(
    [
        pd.DataFrame(
            {
                "mechanism": [
                    f"one probe, {row.probe}" + ("" if row.factor == 1 else f", fault: noise x {row.factor:g}")
                    for row in probes.itertuples()
                ],
                "delta": task.delta,
                "claimed": probes.claimed,
                "lower_bound": probes.lower_bound,
            }
        ),
        joint.assign(
            mechanism="gradient and probes, noise " + joint.noise + ", counted " + joint.counted,
        )[["mechanism", "delta", "claimed", "lower_bound"]],
        canaries.assign(mechanism="training on digits, " + canaries.method.map(LABELS), delta=task.delta)[
            ["mechanism", "delta", "claimed", "lower_bound"]
        ],
    ],
    ignore_index=True,
)
table["confidence"] = confidence
table["verdict"] = [releases.verdict(*pair) for pair in zip(table.claimed, table.lower_bound, strict=True)]
wrong = table.mechanism.str.contains("fault|noise independent, counted independent")
summary = [
    f"{len(table)} audits: of {wrong.sum()} claims that we know to be far too small {(table[wrong].verdict == 'refuted').sum()} are "
    f"refuted, and of {(~wrong & np.isfinite(table.claimed)).sum()} others {(table[~wrong].verdict == 'refuted').sum()}"
]
plots.save_table(
    table,
    "09_audit_table",
    shows="Every audit: what was claimed, the lower bound on epsilon, its confidence and the verdict.",
    claim="",
    summary=summary,
    **saved,
)
what_to_see(summary)
table.style.hide(axis="index").format(
    {"delta": "{:.2g}", "claimed": "{:.2f}", "lower_bound": "{:.2f}", "confidence": "{:.0%}"}
)

# %% [markdown]
# Two notes on reading it. The four bounds of one noise hold jointly at the stated confidence, every other bound by itself; so among
# twenty true claims that are just met, one false alarm would be no surprise. And the independent count is not refuted where the other
# one chose the noise: it is too small there too, but with so much noise on the losses by so little that the audit cannot tell.
#
# ## What an audit cannot see
#
# * **Other records, other events.** It tries one record and one statistic. Another attack may do better; that none does is what a proof
#   says.
# * **Small probabilities.** $\delta = 10^{-5}$ is far beyond what a few thousand runs can count. The bounds above come from larger events.
# * **What is not released to the auditor.** Side channels, a logged raw loss, a seed in a repository, early stopping on private data.
# * **The past.** A search that was done before the audited run, as in Section 4; or other models trained on the same records.
# * **How tight a claim is.** A bound of 1.5 under a claim of 8 may mean a loose accountant or a weak auditor; it does not say which.
#
# ## Where this differs from the paper
#
# * The paper has no audit; $N$, $B$, $T$ and $K$ of Section 3 are our choice of its protocol (5 epochs of CIFAR-10).
# * In Section 3 the model is left out: the mechanism is run on the worst-case record alone, which is what the accountant assumes.
# * Section 4 trains fewer steps than the task's own protocol, and with canaries in place of most digits.
#
# ## Exercises
#
# 1. Suppose an auditor sees every canary right: $v = r = m$, with $\delta = 0$. Which bound can it reach at most with 100 canaries? With
#    1,000?
# 2. Why is the threshold judged on other runs than those that chose it? Which way would the bound err otherwise?
# 3. Section 3 uses one worst-case record and no others. Why does it lose nothing by that?

# %% [markdown] tags=["solution"]
# *Solutions.* (1) The bound solves $(e^\varepsilon/(1 + e^\varepsilon))^m = 0.05$, that is about $\log(m/3)$: the cell below. A one-run
# audit of 1,000 canaries can never refute a claim of 6. (2) The best of many thresholds is best partly by luck, and the luck is gone on
# fresh runs: the bound would come out too large, and could refute a true claim. (3) The sums are linear and the noise does not depend on
# them, so other records shift both worlds alike; an observer who knows them, which DP grants, subtracts them.

# %% tags=["solution"]
pd.DataFrame({"canaries": (counts := [10, 100, 1000, 10_000])}).assign(
    largest_bound=[one_run.epsilon_bound(count, count, count, 0.0) for count in counts]
).round(2)
