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
# * compare learning rates found by a search that nobody counts with rates that are learned within the budget,
# * read the learned rate, the clipping threshold, the loss and the perplexity of a private run side by side.
#
# **The paper's items.** Tab. "gpt2", on E2E with GPT-2 (full fine-tuning) at $\varepsilon = 3$ and $8$: HyFreeDP "consistently obtains a
# comparable performance as the NonDP-GS baseline without extra tuning", and "even when the privacy budget is not small ... non-DP
# automatic learning rate scheduler does not perform well". Fig. "llama", LLaMA-2-7B with LoRA on PubMed abstracts: HyFreeDP "achieves
# better generalization performance compared to the early-stopped NonDP-GS", and its learned rate has "an increase-then-decrease
# trajectory". Section 2 judges the table on synthetic sentences, section 3 is for
# whole runs on the real E2E, as far as they are recorded, and section 6 has the verdicts.

# %% tags=["parameters"]
profile = "laptop"  # how large: smoke, laptop, gpu or paper
dataset = "restaurants"  # of section 2; or "e2e", from $HYFREEDP_DATA
epsilons = [3.0, 8.0]  # of the runs of section 2
documents = ""  # of section 5: a .txt or .jsonl file; "": synthetic reports
documents_epsilon = 8.0  # of the runs of section 5
seeds = 2  # training runs of each method and budget
jobs = 2  # worker processes

# %%
from hyfreedp.experiments.book.parameters import check_parameters

check_parameters(
    globals(),
    {
        "profile": ("smoke", "laptop", "gpu", "paper"),
        "dataset": ("restaurants", "e2e"),
        "epsilons": list,
        "documents": str,
        "documents_epsilon": float,
        "seeds": int,
        "jobs": int,
    },
)

# %%
import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from IPython.display import Markdown, display

from hyfreedp.experiments.book.exercises import check
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.paths import CELLS
from hyfreedp.experiments.store.verdicts import verdict
from hyfreedp.experiments.tables import language_generation
from hyfreedp.experiments.tasks.language_tasks import LANGUAGE_TASKS
from hyfreedp.experiments.tasks.nlg_metrics import bleu

# %%
plots.use_style()
pd.set_option("display.max_colwidth", None)
if profile == "smoke":  # starting workers would take longer than the runs
    epsilons, jobs = epsilons[-1:], 1
    print(f"profile smoke sets epsilons = {epsilons} and jobs = {jobs}")
names = ("profile", "dataset", "epsilons", "documents", "documents_epsilon", "seeds", "jobs")
parameters = {name: globals()[name] for name in names}

# %% [markdown]
# ## 1. What is private, and where training starts
#
# A **record** is one pair: a meaning representation and one sentence that says it. The prompt is the representation; the loss of
# the record is the mean cross-entropy over *its own* target tokens $y_1, \dots, y_n$,
#
# $$ L_i(\mathbf w) = -\frac1n \sum_{t=1}^{n} \log p_{\mathbf w}(y_t \mid \text{prompt}, y_1, \dots, y_{t-1}), $$
#
# so that a long sentence weighs no more than a short one, and padding nothing. Its gradient is normalised, summed over a Poisson
# batch and noised as for images. The losses that the probe clips are these $L_i$.
#
# Without an internet connection nobody has GPT-2's weights. The default therefore starts from a tiny GPT-2 of our own, trained
# without privacy on the *public* domain of a small grammar (hotels, museums, shops), with a tokenizer made from public text too, and
# fine-tunes it privately on the grammar's *private* domain (restaurants). Both are synthetic. The private domain has slots and words
# that the public one lacks.

# %%
scale = language_generation.sentences_scale(profile, dataset, epsilons, seeds)
learner, methods = scale.learners[0], list(scale.rows)
task = LANGUAGE_TASKS[learner.task]
start = language_generation.public_start(learner, CELLS)
display(Markdown(language_generation.start_text(task, learner, start)))

# %% [markdown]
# ## 2. The table: every method, five metrics
#
# Each line is one way to get a model. The first is no training at all: the public start, which costs no privacy ($\varepsilon = 0$), and
# which every private run has to beat. "grid search" takes, of the paper's five rates, the one that predicted most tokens of held-out
# *training* records right; its epsilon does not cover that search. All other lines need no search, and their epsilon covers everything.
# D-Adaptation and Prodigy estimate a rate without knowing of the noise. "0.02, linear decay" is one constant for every task: near the
# best on digits, 25 points behind where all of a ViT is trained on CIFAR-10 (notebook 06), too large for these sentences, and good
# with LoRA (section 5). No constant suits every task, which is why a rate is worth learning.
#
# The metrics are those of the E2E challenge: **BLEU** and **NIST** count n-grams shared with the references (NIST weighs rare ones
# more), **METEOR** aligns words, stems and synonyms, **ROUGE-L** takes the longest common subsequence, **CIDEr** compares n-grams
# weighted by how rare they are in the corpus. **Perplexity** is $e^{\text{loss}}$ per test token; lower is better.
#
# **Predict first.** Which method will be worst, and will a metric disagree with the others about the best?

# %%
rows = language_generation.scored(scale, profile, CELLS, jobs=jobs)
summary = language_generation.with_paper(language_generation.summarise(rows))
shown, differences = language_generation.printed(summary)
plots.shaded(shown, differences, limit=50.0).set_caption(
    f"paper | ours (mean ± standard deviation over {seeds} seeds); coloured by the difference to our grid search"
)

# %% [markdown]
# Columns of the table: first the paper's number (GPT-2 with its real weights on E2E), then ours at this profile. The two are not
# comparable in level when model or data differ; what can be compared is the order of the methods.


# %%
def draw_metrics(rows, methods, epsilons):
    """Every metric and the perplexity, mean and range over seeds; the public start is a line."""
    scores = [*language_generation.METRICS, "perplexity"]
    titled = rows.assign(method=rows.row.map(language_generation.TITLES))
    long = titled.melt(["row", "epsilon", "method"], scores, var_name="metric")
    figure, axes = plt.subplots(1, len(scores), figsize=(13, 3.4), sharey=True)
    look = {"errorbar": ("pi", 100), "linestyle": "none", "dodge": 0.3 * (len(epsilons) > 1), "palette": "dark:C0"}
    look["order"] = [language_generation.TITLES[name] for name in methods]
    for axis, metric in zip(axes, scores, strict=True):
        here = long[long.metric == metric].dropna(subset="value")  # METEOR needs Java
        of_runs = here[here.epsilon.isin(epsilons)]
        if len(of_runs):
            sns.pointplot(of_runs, x="value", y="method", hue="epsilon", ax=axis, legend=axis is axes[0], **look)
        for value in here.value[here.row == language_generation.START]:
            axis.axvline(value, linestyle=":", color="0.4")
        axis.set(title=metric, xlabel="per token" if metric == "perplexity" else "score", ylabel="")
    axes[-1].set_xscale("log")
    return figure


figure = draw_metrics(rows, methods, epsilons)

# %% [markdown]
# Points are means, the dotted line is the public start, bars reach from the lowest run to the highest: where one run of two collapses, as preset robust did at
# $\varepsilon = 8$ for the committed figure, the mean describes neither.

# %%
findings = language_generation.metric_findings(summary, methods, epsilons)
findings += language_generation.edge_findings(rows)
findings += language_generation.below_start_findings(rows)
made = {
    "parameters": parameters,
    "inputs": sorted(rows.key.dropna()),
    "claim": 'Tab. "gpt2": HyFreeDP is comparable to the grid search; D-Adaptation and Prodigy do not perform well.',
    "summary": findings,
}
shows = "Five metrics and perplexity of every method at each epsilon."
plots.save(figure, "07_language_generation", shows=shows, **made)
shows = "The same as a table, with the paper's numbers."
plots.save_table(summary, "07_language_generation_table", shows=shows, **made)
plots.what_to_see(findings)

# %% [markdown]
# ## 3. E2E in earnest
#
# The same model and start, but whole private runs on all 42,061 pairs of the E2E challenge, and its 630 test inputs with all their
# references: batches of 1,024 for 10 epochs, the usual protocol there (Li et al., 2022; the authors' public script has 1,000 for 10), at
# $\delta = N^{-1.1}$. A run takes some twenty minutes of one core, so these are **records**, read and not trained here; whatever line is
# missing has not been trained yet. The scores agree with the challenge's own scripts to four decimals.
#
# **Predict first.** Ten times as many steps, sixteen times the batch: does a constant of 0.02 still fail?

# %%
whole = language_generation.desktop_scale()
e2e = language_generation.scored(whole, "desktop", CELLS, train=False)
e2e_summary = language_generation.with_paper(language_generation.summarise(e2e))
shown, differences = language_generation.printed(e2e_summary)
plots.shaded(shown, differences, limit=50.0).set_caption(
    "paper (GPT-2) | ours (tiny GPT-2), E2E; mean, and where there are two seeds their deviation"
)

# %%
trained = e2e_summary[e2e_summary.row.isin(whole.rows)]["mean"].notna().any()
if trained:
    figure = draw_metrics(e2e, list(whole.rows), list(whole.epsilons))
else:
    print("no private run is recorded yet: python -m hyfreedp.experiments sentences makes them, in half a day")

# %%
e2e_findings = language_generation.metric_findings(e2e_summary, list(whole.rows), list(whole.epsilons))
e2e_findings += language_generation.edge_findings(e2e)
e2e_findings += language_generation.below_start_findings(e2e)
e2e_made = made | {"inputs": ["data/results/desktop/language_generation.csv"], "summary": e2e_findings}
if trained:
    plots.save(
        figure, "07_language_generation_e2e", shows="Five metrics and perplexity of whole runs on E2E.", **e2e_made
    )
shows = "Whole runs on E2E as a table, with the paper's numbers."
plots.save_table(e2e_summary, "07_language_generation_e2e_table", shows=shows, **e2e_made)
plots.what_to_see(e2e_findings)

# %% [markdown]
# ## 4. What the models write
#
# Scores are averages; here are the sentences. The first seed of every method, for the same meanings.
#
# **Predict first.** A model that has learned the *style* of the private domain but not to copy its slots: which metric would still be
# high?

# %%
sentences = language_generation.examples(scale, CELLS, [0, 1, 2])
for meaning, group in sentences.groupby("meaning", sort=False):
    shown = group.drop(columns="meaning").style.hide(axis="index").format({"epsilon": "{:g}"}, na_rep="")
    display(shown.set_properties(**{"text-align": "left"}).set_caption(meaning))

# %%
plots.save_table(
    sentences,
    "07_language_generation_examples",
    parameters=parameters,
    inputs=made["inputs"],
    shows="Generated sentences side by side, for each method and epsilon, beside a reference.",
    claim="",
    summary=[f"{len(sentences)} sentences for {sentences.meaning.nunique()} meanings, seed 0"],
)

# %% [markdown]
# ## 5. Training dynamics of a LLaMA with LoRA
#
# Only low-rank updates of queries and values are trained; the paper starts them at ten times the usual rate, and so do we
# ($\eta_0 = 10^{-3}$ for the paper's preset; the robust one has no first rate). A record is a whole document. Four panels, as in the
# paper's figure: the learning rate; the clipping threshold $R_l$ of the paper's probe (a look needs none); the loss, on test documents
# and as released with noise (dots); the perplexity on test documents.
#
# Much of a rise and fall is built in. Preset robust starts from a public rate and decays to zero,
# whatever it learns: only its level is learned, and that can only fall. Preset paper has no decay and starts
# far below the useful rates: a rise of its rate would be learned.
#
# **Predict first.** Will the rate rise and then fall, as the paper saw, and by how much more than the schedule makes it?

# %%
curves_scale = language_generation.documents_scale(profile, documents or None, documents_epsilon, seeds)
curves = language_generation.dynamics(curves_scale, CELLS, jobs=jobs)
panels = {
    "eta": r"learning rate $\eta$",
    "loss_threshold": r"clipping threshold $R_l$ (nats)",
    "test_loss": "loss (nats per token)",
    "test_perplexity": "test perplexity",
}
named = curves.assign(method=curves.row.map(language_generation.TITLES))
figure, axes = plt.subplots(1, len(panels), figsize=(13, 3.4))
for axis, (column, label) in zip(axes, panels.items(), strict=True):
    here, first = named.dropna(subset=column), axis is axes[0]
    sns.lineplot(here, x="step", y=column, hue="method", errorbar=("pi", 100), ax=axis, legend=first)
    axis.set(xlabel="step", ylabel=label, yscale="log" if column in ("eta", "loss_threshold") else "linear")
axes[2].scatter(curves.step, curves.private_loss, s=8, alpha=0.5, color=plots.STYLES["paper"]["color"])

# %%
findings = language_generation.dynamics_findings(curves)
learner = curves_scale.learners[0]
llama = LANGUAGE_TASKS[learner.task].architecture(learner.model)
plots.save(
    figure,
    "07_language_generation_dynamics",
    parameters=parameters,
    inputs=[f"runs of {llama.title} on {learner.task}, epsilon = {documents_epsilon:g}"],
    shows="Learning rate, clipping threshold of the paper's probe, loss and perplexity of LoRA training, mean and range over seeds.",
    claim='Fig. "llama": the learned rate increases, then decreases, and generalises better than an early-stopped grid search.',
    summary=findings,
)
plots.what_to_see(findings)

# %% [markdown]
# ## 6. Verdicts
#
# By section 3. "Comparable" is taken as at least 95 % of the grid search in every score (the paper's own scores are all above 97 %), "does
# not perform well" as at most half of it. *Reproduced*: all five scores, of every seed, are there; *fails here*: none is; *not shown*:
# some are. First against a grid search over the paper's five rates, then over eight that reach 0.05.

# %%
for name in ("grid", "grid_extended"):
    table = language_generation.judged(e2e, grid=name).round(2)
    display(Markdown(f"**{language_generation.TITLES[name]}**"), table.style.hide(axis="index"))
    shows = f"What Tab. gpt2 claims, judged by whole runs on E2E against the {language_generation.TITLES[name]}."
    found = {"summary": [f"{line.claim}: {line.verdict}" for line in table.itertuples()]}
    plots.save_table(table, f"07_language_generation_verdicts_{name}", shows=shows, **(e2e_made | found))

# %% [markdown]
# By BLEU alone, on E2E where it has runs of both, else on the synthetic sentences of section 2:

# %%
on_e2e = language_generation.verdicts(e2e_summary, whole.epsilons, "E2E")
on_sentences = language_generation.verdicts(summary, epsilons, "synthetic sentences")
inputs = (e2e_made if on_e2e else made)["inputs"]
verdict("07_language_generation", on_e2e or on_sentences, parameters=parameters, inputs=inputs)

# %% [markdown]
# ## Where this differs from the paper
#
# * The E2E data of section 3 are the official release; the model is not: 193,000 parameters where GPT-2 has 124 million, pre-trained on
#   synthetic sentences of hotels and museums, and a tokenizer made from these. The one test reference of more than 256 tokens is cut off
#   there for the perplexity.
# * The paper prints no batch size, no epochs for E2E, and of $\delta$ only that it is far below $N^{-1.1}$. Its grid search for LLaMA was stopped early; ours trains to the end.
# * At profiles smoke and laptop: a tiny GPT-2 and a tiny LLaMA that start from our own public weights in place of GPT-2 and
#   LLaMA-2-7B, synthetic sentences in place of E2E (`dataset="e2e"` takes the real ones) and PubMed (`documents=` takes any local
#   file), runs of 40 steps, and the grid's rates chosen with one seed.
# * At profile gpu: all of E2E, on GPT-2's architecture from public weights of our own, or from the real ones where
#   `HYFREEDP_WEIGHTS` names a folder that has them. Profile paper needs the real ones. Neither has been run for the committed output.
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
check(score, lambda: bleu([["The Vaults is a cheap pub near the river"]], ["The Vaults is a cheap pub"]))

# %% [markdown] tags=["solution"]
# *Solution.* All four precisions are 1, so that the brevity penalty alone is left: $e^{1 - 9/6} = e^{-1/2}$. What is there is right, and yet the place
# is missing: of the metrics here ROUGE-L and METEOR ask for what the reference has, too.

# %% tags=["solution"]
from math import exp

score = exp(1 - 9 / 6)
check(score, lambda: bleu([["The Vaults is a cheap pub near the river"]], ["The Vaults is a cheap pub"]))

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
