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
# # Language: sentences from tables, and a language model with LoRA
#
# **After this notebook you can**
#
# * say what a *record* is when the data are texts, and what its loss is,
# * read BLEU, NIST, METEOR, ROUGE-L and CIDEr, and say which of them a fluent but wrong sentence deceives,
# * compare learning rates found by a search that no epsilon covers with rates that are learned within the budget,
# * read the learned rate, the clipping threshold and the perplexity of a private run side by side.
#
# **The paper's items.** Tab. "gpt2", on E2E with GPT-2 (full fine-tuning) at $\varepsilon = 3$ and $8$: HyFreeDP "consistently obtains a
# comparable performance as the NonDP-GS baseline without extra tuning", and "even when the privacy budget is not small ... non-DP
# automatic learning rate scheduler does not perform well". Fig. "llama", LLaMA-2-7B with LoRA on PubMed abstracts: HyFreeDP "achieves
# better generalization performance compared to the early-stopped NonDP-GS", and its learned rate has "an increase-then-decrease
# trajectory".

# %% tags=["parameters"]
profile = "laptop"  # how large: smoke, laptop, gpu or paper
documents = ""  # of section 4: a .txt or .jsonl file (an hour; one of its runs has no privacy); "": at laptop the record, else synthetic reports
documents_epsilon = 8.0  # of the runs of section 4; the record is at 8
seeds = 2  # training runs of each method and budget (the record of section 4 has three)
jobs = 2  # worker processes

# %%
from hyfreedp.experiments.book.parameters import check_parameters

check_parameters(
    globals(),
    {
        "profile": ("smoke", "laptop", "gpu", "paper"),
        "documents": str,
        "documents_epsilon": float,
        "seeds": int,
        "jobs": int,
    },
)

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import Markdown

from hyfreedp.experiments.book.exercises import check
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.paths import CELLS, RESULTS
from hyfreedp.experiments.store.provenance import made_by
from hyfreedp.experiments.store.verdicts import span, verdict
from hyfreedp.experiments.studies import document_runs
from hyfreedp.experiments.tables import language_generation
from hyfreedp.experiments.tasks import nlg_metrics

# %%
plots.use_style()
pd.set_option("display.max_colwidth", None)
if profile == "smoke":  # starting workers would take longer than the runs
    jobs = 1
    print(f"profile smoke sets jobs = {jobs}")
parameters = {name: globals()[name] for name in ("profile", "documents", "documents_epsilon", "seeds", "jobs")}

# %% [markdown]
# ## 1. What is private, and where training starts
#
# E2E has 42,061 pairs of a meaning and a sentence that says it, as `name[Blue Spice], eatType[coffee shop], area[city centre]` and "Blue Spice is a coffee shop in city
# centre." A **record** is one such pair. The prompt is the meaning. The loss of the record is the mean cross-entropy over *its own* target tokens $y_1, \dots, y_n$,
#
# $$ L_i(\mathbf w) = -\frac1n \sum_{t=1}^{n} \log p_{\mathbf w}(y_t \mid \text{prompt}, y_1, \dots, y_{t-1}), $$
#
# so that a long sentence weighs no more than a short one. Its gradient is normalised, summed over a Poisson
# batch and noised as for images. The losses that the probe of the paper's method clips are these $L_i$.
#
# Nobody downloads weights here, so this is not GPT-2. It is a tiny GPT-2 of our own with 193,000 parameters. It was trained
# without privacy on *public* sentences of a small grammar about hotels, museums and shops. Restaurants, of which E2E speaks, it has never seen.
#
# ## 2. The table: every method, five scores
#
# Whole private runs: batches of 1,024 for 10 epochs, the usual protocol there (Li et al., 2022), at $\delta = N^{-1.1}$, tested on all 630 test inputs. A run takes
# twenty minutes of one core. So on profiles smoke and laptop they are **records**: of one or two runs each, as the table says. Profiles gpu and paper train theirs.
#
# * The **public start** is no training at all ($\varepsilon = 0$). Every private run has to beat it.
# * **Grid search** tries the paper's five rates. It takes the one that predicted most tokens of held-out training records right. Its $\varepsilon$ does not cover that search.
# * All others need no search, and their $\varepsilon$ covers everything. **D-Adaptation** and **Prodigy** estimate a rate without knowing of the noise. **0.02 with linear decay** is one constant
#   for every task.
#
# The scores are those of the E2E challenge. **BLEU** and **NIST** count word sequences shared with the references (NIST weighs rare ones
# more). **METEOR** aligns words, stems and synonyms. **ROUGE-L** takes the longest common subsequence. **CIDEr** weighs word sequences by how rare they are. **Perplexity** is
# $e^{\text{loss}}$ per test token: among how many equally likely tokens the model hesitates. Here lower is better. Our scores agree with the challenge's own scripts to four decimals.
#
# **Predict first.** Which method will be worst, and will a score disagree with the others about the best?

# %%
scale = language_generation.e2e_scale(profile, seeds)
trains = profile in ("gpu", "paper")
where = profile if trains else "desktop"
rows = language_generation.scored(scale, where, CELLS, train=trains, jobs=jobs).dropna(subset="accuracy")
summary = language_generation.with_paper(language_generation.summarise(rows))
metrics = [*language_generation.METRICS, "perplexity"]
summary["method"] = summary.row.map(language_generation.TITLES)
lines = {"index": ["epsilon", "method"], "columns": "metric"}
means, theirs, runs = (summary.pivot(values=value, **lines)[metrics] for value in ("mean", "paper", "count"))
order = [line for line in summary.set_index(["epsilon", "method"]).index.unique()]
share = means / means.xs("grid search", level="method").reindex(means.index, level="epsilon") - 1
share["perplexity"] *= -1
told = [f"{method}, {epsilon:g} ({runs.BLEU[epsilon, method]:.0f})" for epsilon, method in order]
names = pd.Index(told, name="method, epsilon (runs)")
gmap = share.loc[order].fillna(0).set_axis(names)
look = {"cmap": "BrBG", "gmap": gmap, "axis": None, "vmin": -1, "vmax": 1, "subset": metrics}
shown = means.loc[order].assign(**{"paper BLEU": theirs.BLEU}).set_axis(names)
shown = shown.style.background_gradient(**look).format(precision=3, na_rep="–")
shown.set_caption("coloured by the difference to the grid search of the same epsilon; paper BLEU: Tab. gpt2, of GPT-2")

# %%
made = {
    "parameters": parameters,
    "inputs": sorted(rows.key.dropna()) if trains else ["data/results/desktop/language_generation.csv"],
    "claim": 'Tab. "gpt2": HyFreeDP is comparable to the grid search; D-Adaptation and Prodigy do not perform well.',
}
shows = "Whole runs on E2E by method and epsilon, mean, deviation and range over runs, with the paper's numbers."
plots.save_table(summary.drop(columns="method"), "07_language_generation_table", shows=shows, **made)

# %%
bleu = language_generation.shares(rows)
printed = (theirs.BLEU / theirs.BLEU.xs("grid search", level="method").reindex(theirs.index, level="epsilon")).dropna()
rows_of = {
    row: language_generation.TITLES[row] for row in ("hyfreedp_paper", "dadaptation", "prodigy", "hyfreedp_robust")
}
shares = []
for row, title in rows_of.items():
    beside = (
        f" ({span(100 * printed.xs(title, level='method'))} in the paper)"
        if title in printed.index.get_level_values(1)
        else ""
    )
    shares.append(f"{title} {span(100 * bleu.loc[row].dropna())} %{beside}")
dates = "; ".join(
    f"{kind} of {made_by(part)}"
    for kind, part in rows.groupby(np.where(rows.row == "hyfreedp_robust", "preset robust", "all others"))
)
Markdown(f"Of the grid search's BLEU, by the seeds that both have: {', '.join(shares)}. Runs: {dates}.")

# %% [markdown]
# So the paper's order is turned round: D-Adaptation and Prodigy, which collapse there, write as well as the search here, and HyFreeDP, from its first rate of $10^{-4}$, does not. Two cautions. The noise
# has 193,000 directions here and 124 million in GPT-2, and the estimates of the two suffer with that number (notebook 06). And other first rates of HyFreeDP, which help on images, were not tried on E2E.
#
# ## 3. What the models write
#
# Scores are averages; here are the sentences for the first test input, `name[Blue Spice], eatType[coffee shop], area[city centre]`, of the runs whose texts are kept.
#
# **Predict first.** A model has learned the *style* of the private sentences, but not to copy their facts. Which score would still be high?

# %%
sentences = language_generation.written(rows, CELLS, 0)
look = sentences.style.hide(axis="index").format({"epsilon": "{:g}", "BLEU": "{:.2f}"})
plots.folded("What each run wrote", look.set_properties(**{"text-align": "left"}))

# %% [markdown]
# Most name the place and the area, but call it a restaurant, as most places in E2E are: fluent and wrong. Of one wrong word among many right ones ROUGE-L and METEOR take little notice.
# CIDEr, which weighs rare words, takes more.
#
# ## 4. Fig. "llama": a LLaMA with LoRA
#
# Only low-rank updates of queries and values are trained. The paper starts them at ten times the usual rate, and so do we
# ($\eta_0 = 10^{-3}$ for HyFreeDP; preset robust has its own). A record is a document.
#
# Here the documents are real: 22,590 sentences of 5 to 20 words from 233 speeches of American presidents to Congress, 1790 to 2017, in the public domain. Each is a document, so $\varepsilon$ protects one
# sentence, not a speech, and a tenth of them, of the same speeches, is for the test. The model is a tiny LLaMA of our own that has read
# synthetic reports only. Batches of 200, three epochs as in the paper's timings, $\varepsilon = 8$: 306 steps, three runs of each method. At profile laptop they are a **record**; profile smoke has six steps on synthetic reports.
#
# HyFreeDP runs in four ways:
#
# * **preset paper**, with a sound accounting,
# * **as the paper accounts it**, which gives its losses less noise and really spends more than 8 (notebook 03),
# * **losses without noise**: all of the noise on gradients, a millionth of it on losses. That is not private. It shows what the rule would do if it saw its losses almost exactly,
# * **without privacy** (one run): no noise at all, and nothing is clipped.
#
# The grid searches take the constant rate that predicts most tokens of held-out training records right: of the paper's five, and of eight up to 0.05.
#
# **Predict first.** In which of the four will the rate rise and then fall, as the paper saw?

# %%
recorded = profile == "laptop" and not documents and documents_epsilon == document_runs.EPSILON
if recorded:
    curves = pd.read_csv(RESULTS / document_runs.TABLE)
else:
    documents_scale = document_runs.documents_scale(profile, documents or None, documents_epsilon, seeds)
    curves = document_runs.dynamics(documents_scale, CELLS, jobs=jobs)
curves["perplexity"] = np.exp(curves.test_loss)

# %%
styles = {name: plots.STYLES[style] for name, style in [("grid", "best"), ("hyfreedp_paper", "paper")]}
styles |= {"hyfreedp_robust": plots.STYLES["robust"], "hyfreedp_claimed": plots.STYLES["reference"]}
styles |= {"reference": plots.STYLES["alternative"], document_runs.NO_NOISE: plots.STYLES["worst"]}
styles |= {"grid_extended": plots.SERIES[0], document_runs.NOISELESS_LOSSES: plots.NOISELESS_LOSSES}
titles = language_generation.TITLES | {document_runs.NO_NOISE: "HyFreeDP, without privacy"}
titles |= {document_runs.NOISELESS_LOSSES: "HyFreeDP, losses without noise"}
panels = {"eta": "learning rate", "loss_threshold": "threshold $R_l$ (nats)", "perplexity": "test perplexity"}
figure, axes = plt.subplots(1, len(panels), figsize=(11, 3.8))
for axis, (column, label) in zip(axes, panels.items(), strict=True):
    for row, runs in curves[np.isfinite(curves[column])].groupby("row", sort=False):
        band, style = runs.groupby("step")[column].agg(["median", "min", "max"]), styles[row]
        axis.plot(band.index, band["median"], label=titles[row], markevery=0.25, markersize=5, **style)
        axis.fill_between(band.index, band["min"], band["max"], color=style["color"], alpha=0.15, linewidth=0)
    axis.set(xlabel="step", title=label, yscale="log")
    plots.plain_log_ticks(axis.yaxis)
rates = document_runs.rates(curves)
rise = (rates.largest / rates["first"]).groupby(rates.row).max()
noisy, bare = rise[["hyfreedp_claimed", "hyfreedp_paper"]].max(), rise[document_runs.NOISELESS_LOSSES]
figure.suptitle(f"With noise on its losses HyFreeDP's rate rises {noisy:.2g}-fold at most, without it {bare:.2g}-fold")
plots.shared_legend(figure, [axes[0]], ncols=3)

# %%
made_here = {
    "parameters": parameters | {"seeds": int(curves.seed.nunique())},
    "inputs": [f"data/results/{document_runs.TABLE}"] if recorded else [f"runs on {documents or 'synthetic reports'}"],
}
plots.save(
    figure,
    "07_language_generation_dynamics",
    shows="Learning rate, clipping threshold of the paper's probe and perplexity of LoRA training, median and range over seeds.",
    claim='Fig. "llama": the learned rate increases, then decreases, and generalises better than an early-stopped grid search.',
    **made_here,
)

# %%
runs = rates.groupby("row", sort=False)
ranges = runs[["first", "largest", "last"]].agg(lambda some: span(some, ".2g")).add_suffix(" rate")
ranges["perplexity"], ranges["epsilon"], ranges["runs"] = (
    runs.perplexity.agg(span),
    runs.epsilon_run.mean(),
    runs.size(),
)
print("Runs:", made_by(curves) if recorded else "made now")
ranges.rename(titles).style.format({"epsilon": "{:.3g}"})

# %% [markdown]
# (The first rate is that after the first probe or look.) **The rise is there where the losses have no noise.** Without privacy HyFreeDP's rate rises and does not fall. At the target of 8 it hardly leaves its first rate, and ends below it.
#
# **It is the noise on the losses.** The control has all of the noise on its gradients. Its rate rises all the same, and its perplexity is below that of the search over the paper's five rates.
# So the gradients' noise does not hold HyFreeDP back here; that on the losses does. A probe uses only the differences of three losses, which are far smaller than the noise (notebook 04).
#
# $R_l$ follows the sum of three losses, and is capped at 20. The noise on the losses is proportional to it. (Without privacy nothing is clipped.)
#
# Preset robust is led up by its first look and back soon. One run that learns its rate is level with the nine that search it over eight rates and then train. (It ends at an average of its weights, a search does not.) Perplexities are per token of our own small tokenizer.
#
# ## Verdict
#
# "Comparable" is at least 95 % of the grid search's BLEU, "does not perform well" at most half of it. A rate "increases, then decreases" if
# its largest value is at least 1.1 times that after its first probe, and its last at most 0.9 times that. E2E is one data set, and so are the speeches: by [the rule](../../docs/verdicts.md) neither decides, whatever the numbers.

# %%
data = "sentences of speeches" if recorded else documents or "synthetic reports"
decided = language_generation.judged(rows) + document_runs.judged(rates, data)
inputs = [*made["inputs"], *made_here["inputs"]]
verdict("07_language_generation", decided, parameters=parameters, inputs=inputs)

# %% [markdown]
# ## Where this differs from the paper
#
# * The E2E data are the official release; the model is not, nor is its tokenizer, which was made from the public sentences. The one test reference of more than 256 tokens is cut off for the perplexity.
# * The paper prints no batch size, no epochs for E2E and Fig. "llama", and of $\delta$ only that it is far below $N^{-1.1}$. Its rate for LLaMA was searched on 4,000 samples and the run stopped early; ours is searched on all and trains to the end. The search's best
#   rate on E2E is the largest of the paper's five; larger ones have fewer tokens of held-out pairs right.
# * Profile gpu trains GPT-2's architecture on all of E2E, from public weights of our own, or from the real ones where
#   `HYFREEDP_WEIGHTS` names a folder that has them. Profile paper needs the real ones, and both need LLaMA-2-7B's for section 4. Neither has been run for the committed output.
# * Gradients, probes and sampling are accounted on the same batch, see notebook 03.

# %% [markdown]
# ## Exercises
#
# Put your answer in place of `None` and run the cell; it says whether you are right. Solutions are in
# [`solutions/`](solutions/07_language_generation.ipynb).
#
# 1. A meaning has one reference, "The Vaults is a cheap pub near the river", and a model writes "The Vaults is a cheap pub". Every n-gram of
#    the output is in the reference. Which BLEU (from 0 to 1) does it get, with $\exp(1 - r/c)$ for an output of $c$ words where the
#    reference has $r$?

# %%
score = None
check(score, lambda: nlg_metrics.bleu([["The Vaults is a cheap pub near the river"]], ["The Vaults is a cheap pub"]))

# %% [markdown] tags=["solution"]
# *Solution.* All four precisions are 1, so that the brevity penalty alone is left: $e^{1 - 9/6} = e^{-1/2}$. What is there is right, and yet the area
# is missing: ROUGE-L and METEOR notice, as they ask how much of the reference is there.

# %% tags=["solution"]
from math import exp

score = exp(1 - 9 / 6)
check(score, lambda: nlg_metrics.bleu([["The Vaults is a cheap pub near the river"]], ["The Vaults is a cheap pub"]))

# %% [markdown]
# 2. The loss of a record is a *mean* over its tokens. What would a *sum* change for the probe's clipping threshold $R_l$, and for whom
#    would it be unfair?
# 3. Compute from the table by which factor the metrics of the best and the worst method differ. Which metric separates them most?

# %% [markdown] tags=["solution"]
# *Solutions.* (2) With a sum, long texts have large losses and gradients: $R_l$ would have to be as large as the longest text's loss, so that the
# noise on all of them grows, or long texts would be clipped most, which biases the released loss towards short ones. (3) The column
# `factor` below.

# %% tags=["solution"]
spread = (
    summary[(summary.metric != "perplexity") & (summary.row != language_generation.START)]
    .groupby(["epsilon", "metric"])["mean"]
    .agg(["max", "min"])
)
spread["factor"] = spread["max"] / spread["min"]
spread.round(3)
