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
# # What privacy and a learned rate cost: time and memory of a step
#
# **After this notebook you can**
#
# * say where the time of a training step goes, and why per-sample gradients are expensive,
# * explain how ghost norms and book-keeping give the same private gradient at nearly the cost of a plain step,
# * predict the cost of learning the rate from one number, the share of a forward pass,
# * measure such costs so that the comparison is fair, on a laptop or a GPU.
#
# **The paper's items.** Section "Efficiency of algorithm" and Tab. "eff". The claims: a step takes $3 + 2/K$ units of time
# instead of 3, so the overhead is below 7 % for $K = 10$; measured, HyFreeDP takes 1.255 to 2.040 times as long as the same
# private training without it for $K = 1$, and 1.017 to 1.108 times for $K = 10$.

# %% tags=["parameters"]
profile = "laptop"  # how large: smoke, laptop, gpu or paper
rounds = 3  # of timing, in each of which all contenders take a turn
threads = 1  # of the CPU, for each contender

# %%
from hyfreedp.experiments.book.parameters import check_parameters

check_parameters(globals(), {"profile": ("smoke", "laptop", "gpu", "paper"), "rounds": int, "threads": int})

# %%
import pandas as pd
import torch
from IPython.display import Markdown, display

from hyfreedp.clipping.per_sample import prefers_factors
from hyfreedp.experiments.benchmark import figures, goals, learning, tables
from hyfreedp.experiments.book.exercises import check
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.cache import cached
from hyfreedp.experiments.store.paths import CELLS, RESULTS
from hyfreedp.experiments.store.verdicts import verdict
from hyfreedp.experiments.tables import paper

# %%
plots.use_style()
pd.set_option("display.max_rows", 100)
parameters = {"profile": profile, "rounds": rounds, "threads": threads}
smoke = profile == "smoke"
device = "accelerator" if profile in ("gpu", "paper") else "cpu"
folder = RESULTS / ("laptop" if device == "cpu" else "gpu")
can_measure = device == "cpu" or torch.accelerator.is_available()
settings = {"rounds": rounds, "threads": threads, "device": device}

# %% [markdown]
# ## 1. Where the time goes
#
# A linear layer with input $x_{it} \in \mathbb R^d$ for token $t = 1, \dots, T$ of sample $i = 1, \dots, B$ computes
# $y_{it} = W x_{it}$: a matrix product of $BTpd$ multiplications, one unit of time. The backward pass gets $g_{it} = \partial
# L_i / \partial y_{it}$ and takes two more products: $W^\top g_{it}$ for the layer below, and the weight gradient
# $\sum_{i,t} g_{it} x_{it}^\top$. **So a plain step is about 3 units, of which the forward pass is one.**
#
# A private step needs the norm of every *sample's* gradient $\mathbf g_i = \sum_t g_{it} x_{it}^\top$ before it may add them:
#
# $$ \mathbf G = \frac1B \Big( \sum_i c_i \, \mathbf g_i + \sigma_g R_g \cdot \mathcal N(0, \mathbf I) \Big), \qquad
#    c_i = \min(1, R_g / \lVert \mathbf g_i \rVert). $$
#
# * **Instantiating** all $\mathbf g_i$ (Opacus, hooks and functorch) costs $B$ times the memory of the weights, and all of it
#   is written and read again.
# * **Ghost norms** need only inner products, $\lVert \mathbf g_i \rVert^2 = \sum_{t,s} (g_{it} \cdot g_{is})(x_{it} \cdot
#   x_{is})$: $T^2 (p + d)$ multiplications instead of $Tpd$, and no memory. Opacus's *ghost clipping* then runs a second
#   backward pass on the reweighted loss $\sum_i c_i L_i$: 2 units more.
# * **Book-keeping** keeps $x$ and $g$ instead, and takes the clipped sum $\sum_{i,t} c_i\, g_{it} x_{it}^\top$ directly, once
#   $c_i$ is known. The weight gradient that autograd would have computed is never needed, so nothing is computed twice.
#   That is this package's engine.
#
# HyFreeDP adds two forward passes to every $K$-th step, to look at the loss ahead and behind. Training biases only, or
# low-rank updates, drops most weight gradients: a step is then 2 units, and a forward pass is half of it.
#
# **Predict**, before you look: how much longer does a private step take than a plain one with each of the three ideas? And
# is a learned rate *relatively* cheaper or dearer when only biases are trained?
#
# ## 2. What is measured
#
# One complete step: forward, backward, clipping, noise, AdamW. Weights and inputs are random, because time depends on shapes
# and not on values; nothing is downloaded. All contenders train the same weights on the same batch with the same number of
# threads, and a test shows that they take the same clipped step. They take turns in every round, so that whatever slows the
# machine slows all of them.

# %%
record = None if smoke else tables.load(folder / "efficiency.csv")
measured = None
if can_measure:
    measured = tables.measure_profile(CELLS, profile, recorded=record is not None, **settings)
rows = tables.first_known(folder / "efficiency.csv", record, measured)
origin = "measured by the notebook" if record is None else f"data/results/{folder.name}/efficiency.csv"
shapes = rows.drop_duplicates(["model", "tuning"]).set_index(["model", "tuning"])
shapes[["batch_size", "tokens", "width", "depth", "parameters", "trainable"]]

# %%
source = "measured by this notebook" if record is None else "of the committed record"
display(Markdown(figures.source_text(rows, source)))
times = figures.time_table(rows)
plots.folded(f"All {len(times)} times", times.style.format(precision=2))

# %%
display(Markdown(figures.failure_text(rows)))

# %% [markdown]
# ## 3. Contenders side by side
#
# Bars are ratios to the plain, non-private step of the same model (dotted line at 1). Whiskers are the quartiles over rounds.

# %%
figure = figures.draw_contenders(rows)

# %%
summary = figures.contender_findings(rows)
plots.save(
    figure,
    "08_efficiency",
    parameters=parameters,
    inputs=[origin],
    shows="Time and peak memory of one training step relative to a plain step, by contender, model and trainable parameters.",
    claim='Section "Efficiency of algorithm": with book-keeping, a private step is almost as efficient as a plain one.',
    summary=summary,
)
plots.what_to_see(summary, "ranges over the models")

# %% [markdown]
# Ghost clipping pays for its second backward pass whatever is trained; instantiation pays in memory, the more the more
# parameters are trained and the larger the batch. Book-keeping pays for norms and noise only, so with biases it is hardly
# distinguishable from a plain step. Its memory is that of a plain step plus the output gradients that it keeps.
#
# **fastDP**, the other book-keeping library, is on no package index and so not measured here. It was once, on the machine
# where this engine's prototype was written, as a ratio to a plain step:

# %%
prototype = pd.read_csv(RESULTS / "laptop" / "efficiency_prototype.csv")
prototype["model"] = prototype.model.fillna("all three")
prototype.set_index(["model", "tuning", "contender"])

# %% [markdown]
# ## 4. Tab. "eff": what the learned rate costs
#
# Only the two forward passes are added, once in $K$ steps. If a forward pass is a share $f$ of the private step, then
#
# $$ \frac{\text{step with HyFreeDP}}{\text{step without}} = 1 + \frac{2f}{K}, \qquad
#    f = \tfrac13 \text{ gives the paper's } \frac{3 + 2/K}{3}. $$
#
# The table has the paper's ratios (minutes of whole runs on other models and GPUs) beside ours. On the laptop profile a
# smaller model of the same family stands for each of the paper's.

# %%
sources = {"record": record, "this notebook": measured}
compared = figures.interval_table(paper.load("eff"), sources, device)
compared.set_index(["paper_model", "model", "tuning", "interval"]).round(3)

# %%
plots.save_table(
    compared.round(4),
    "08_efficiency_table",
    parameters=parameters,
    inputs=["data/paper/eff.csv", origin],
    shows="Time with HyFreeDP relative to the same private step without it: the paper's table beside ours.",
    claim='Tab. "eff": 1.255 to 2.040 times for K = 1, 1.017 to 1.108 times for K = 10.',
    summary=figures.interval_findings(compared, rows),
)

# %% [markdown]
# **Predict** the curve before you look: where do biases and low-rank updates lie, above or below full tuning?

# %%
figure = figures.draw_intervals(compared, rows, device)

# %%
summary = figures.share_findings(rows)
plots.save(
    figure,
    "08_efficiency_interval",
    parameters=parameters,
    inputs=["data/paper/eff.csv", origin],
    shows="Cost of HyFreeDP against the interval K: the paper's table, ours, and the model 1 + 2 f / K.",
    claim='Section "Efficiency of algorithm": 3 + 2/K units of time instead of 3.',
    summary=summary,
)
plots.what_to_see(summary, "the ratio for $K = 1$ tells $f$, and the other intervals follow without a free parameter")
display(Markdown(figures.interval_text(compared)))

# %% [markdown]
# ## 5. How the cost grows
#
# A vision transformer, full tuning; one of batch size $B$, depth, width and tokens $T$ at a time. **Predict** which contender
# suffers from larger batches in time, which in memory, and where $T^2$ of the ghost norms might show.

# %%
path = folder / "efficiency_growth.csv"
recorded = None if smoke else tables.load(path)
growth = recorded
if recorded is None and can_measure:
    growth = tables.measure_profile_growth(CELLS, profile, **settings)
growth = tables.first_known(path, growth)
figure = figures.draw_growth(growth)

# %%
summary = figures.growth_findings(growth)
plots.save(
    figure,
    "08_efficiency_growth",
    parameters=parameters,
    inputs=["measured by the notebook" if recorded is None else f"data/results/{folder.name}/{path.name}"],
    shows="Time and peak memory relative to a plain step against batch size, depth, width and tokens of a vision transformer.",
    summary=summary,
)
plots.what_to_see(summary, "over all sizes")

# %% [markdown]
# A small batch is dear for every private contender: the noise and AdamW's update touch each parameter once per step, however
# few samples share the cost. Instantiated gradients are as large as $B$ copies of the weights, so they weigh most where the
# activations are small: few tokens, wide layers. Book-keeping's surplus is a share of the activations, whatever the size.
#
# ## 6. What learning the rate costs, and what it buys
#
# Steps are not runs. Preset `robust` votes a few times in a run, keeps an average of the weights, and takes a gradient again where
# a vote is lost; a search trains once per candidate. Measured are whole runs of 30 steps whose first and last votes are lost on
# purpose. `ratio` is to the same run at a fixed rate, `copies` how many more copies of the trained weights are in memory at
# most (an average, the first weights until the last vote that may begin again, those at hand during a vote), `budget_percent` what gradients leave of $\varepsilon$.
#
# **Predict first.** What is dearer: to vote on a rate, or to search one?

# %%
path = folder / "efficiency_learning.csv"
recorded = None if smoke else tables.load(path)
whole_runs = recorded
if recorded is None:
    whole_runs = cached(CELLS, learning.measure_learning, models=["tiny"], steps=20, **settings)
costs = learning.costs(whole_runs, tables.load(RESULTS / "laptop" / "image_classification.csv"))
figure = learning.draw(costs)

# %%
origins = ["measured by the notebook" if recorded is None else f"data/results/{folder.name}/{path.name}"]
summary = learning.findings(costs, whole_runs)
plots.save(
    figure,
    "08_efficiency_learning",
    parameters=parameters,
    inputs=[*origins, "data/results/laptop/image_classification.csv"],
    shows="Points to the best grid search against the training time and the share of the budget that a rate takes. Filled: "
    "epsilon covers the choice.",
    claim='Section "Efficiency of algorithm": the learning rate is found with a minor overhead.',
    summary=summary,
)
plots.what_to_see(summary)
columns = ["seconds", "ratio_q1", "ratio", "ratio_q3", "copies", "budget_percent"]
whole_runs.set_index(["model", "method"])[columns].round(3)

# %% [markdown]
# ## 7. Goals, met and missed
#
# What this project promises on a CPU, and what was measured. A goal counts as met on a model only if the median is within
# the limit.

# %%
judged = goals.judge(rows)
goal_table = goals.summarise(judged)
plots.save_table(
    goal_table.round(4),
    "08_efficiency_goals",
    parameters=parameters,
    inputs=[origin],
    shows="The project's goals for time and memory, the ratio measured on each model, and on how many it is met.",
    claim='Tab. "eff" and section "Efficiency of algorithm", made precise for a CPU.',
    summary=[f"{int(judged.met.sum())} of {len(judged)} goals met, counted per model"],
)
goal_table.set_index(["goal", "tuning"]).round(2)

# %%
display(Markdown(f"Numbers {source}: {goals.missed_text(judged)}"))

# %% [markdown]
# ## Verdict

# %%
verdict("08_efficiency", figures.verdicts(compared), parameters=parameters, inputs=["data/paper/eff.csv", origin])

# %% [markdown]
# ## Where this differs from the paper
#
# * The paper measures minutes of whole training runs with fastDP-style clipping on a Titan RTX and an A100. Here single steps
#   are measured, on the hardware named above, so nothing but the step counts: no data loading, no evaluation.
# * Profile `laptop` has small models of the same families; profile `gpu` has the paper's shapes, with physical batch sizes of
#   our choice (the paper does not print its own).
# * So that Opacus can take part, all contenders train a variant that it supports: class token and position embedding frozen,
#   GPT-2's head untied, transformers' own layer types replaced by torch's. Our engine trains the originals too.
# * Clipping is Abadi's min(1, R/norm) for all, because Opacus has no automatic clipping. It costs the same.
#
# ## Exercises
#
# Put your answer in place of `None` and run the cell; it says whether you are right. Solutions are in
# [`solutions/`](solutions/08_efficiency.ipynb).
#
# 1. From which number of tokens $T$ on do ghost norms ($T^2(p+d)$ multiplications) cost more than instantiating ($Tpd$), for a layer
#    with $p = 1536$ outputs and $d = 384$ inputs? Does our engine ever pay more than the cheaper one?

# %%
tokens = None
check(tokens, lambda: next(T for T in range(1, 10_000) if not prefers_factors(T, p=1536, d=384)))

# %% [markdown] tags=["solution"]
# *Solution.* They break even at $T = pd/(p+d) = 307.2$. The engine compares the two for every layer and takes the cheaper, so it never
# pays more.

# %% tags=["solution"]
tokens = 1536 * 384 / (1536 + 384)
check(tokens, lambda: next(T for T in range(1, 10_000) if not prefers_factors(T, p=1536, d=384)))

# %% [markdown]
# 2. A colleague trains biases only and finds HyFreeDP with $K = 5$ too slow by 20 %. Which share $f$ of a private step is then a forward
#    pass? Which $K$ costs at most 5 %, and what does it cost in other respects?

# %%
share = None
check(share, lambda: tables.forward_share(1.2, interval=5))

# %% [markdown] tags=["solution"]
# *Solution.* $1 + 2f/5 = 1.2$ gives $f = 1/2$, as section 1 expects where weight gradients are dropped, and $2f/K \le 0.05$ needs $K \ge 20$. The
# rate is then learned from 4 times fewer probes, so it follows the loss more slowly; but each probe gets more of the budget.

# %% tags=["solution"]
share = 0.2 * 5 / 2
check(share, lambda: tables.forward_share(1.2, interval=5))

# %% [markdown]
# 3. Measure one model yourself: `python -m hyfreedp.experiments.benchmark --models vit_d192 --tunings full --rounds 15`. Then run
#    another program meanwhile. Which columns change, and which hardly?

# %% [markdown] tags=["solution"]
# *Solution.* The seconds change, and their maximum most. The ratios hardly do, because the contenders of a round are slowed
# together; their quartiles widen. Memory does not change at all: it is counted, not sampled.
