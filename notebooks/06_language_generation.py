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
# **The paper's items.** Tab. "gpt2": on E2E with GPT-2 (full fine-tuning) HyFreeDP is as good as the grid search at
# $\varepsilon = 3$ and $8$, while D-Adaptation and Prodigy fail. Fig. "llama": LLaMA-2-7B with LoRA on PubMed abstracts; the learned
# rate first rises, then falls, and the model generalises better than the grid search.

# %% tags=["parameters"]
profile = "laptop"
dataset = "restaurants"  # or "e2e", from $HYFREEDP_DATA
epsilons = [3.0, 8.0]
documents = ""  # a .txt, .jsonl or .parquet file or a name for the package datasets; "": synthetic reports
documents_epsilon = 8.0
seeds = 2
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
import pandas as pd
from IPython.display import Markdown, display

from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.paths import CELLS
from hyfreedp.experiments.tables import language_generation, language_generation_figures
from hyfreedp.experiments.tasks.language import LANGUAGE_TASKS

plots.use_style()
pd.set_option("display.max_colwidth", None)
names = ("profile", "dataset", "epsilons", "documents", "documents_epsilon", "seeds", "jobs")
parameters = {name: globals()[name] for name in names}
if profile == "smoke":
    epsilons = epsilons[-1:]
    jobs = 1  # starting workers would take longer than the runs

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
start = task.model(seed=0, name=learner.model)
scores = task.evaluate(start, task.datasets("test", learner.model)[1], learner.model)
display(Markdown(language_generation_figures.start_text(task, learner, start, scores)))

# %% [markdown]
# ## 2. The table: every method, five metrics
#
# Each line is one way to get a model. "grid search" takes, of the paper's five rates, the one that predicted most tokens of held-out
# *training* records right; its epsilon does not cover that search. All other lines need no search, and their epsilon covers everything.
# D-Adaptation and Prodigy estimate a rate without knowing of the noise. "0.02, linear decay" is a constant that suits AdamW on
# normalised gradients on any task so far; it is our reference, not something learned.
#
# The metrics are those of the E2E challenge: **BLEU** and **NIST** count n-grams shared with the references (NIST weighs rare ones
# more), **METEOR** aligns words, stems and synonyms, **ROUGE-L** takes the longest common subsequence, **CIDEr** compares n-grams
# weighted by how rare they are in the corpus. **Perplexity** is $e^{\text{loss}}$ per test token; lower is better.
#
# **Predict first.** Which method will be worst, and will a metric disagree with the others about the best?

# %%
rows = language_generation.scored(scale, CELLS, jobs=jobs)
summary = language_generation.with_paper(language_generation.summarise(rows))
shown, differences = language_generation.printed(summary)
plots.shaded(shown, differences, limit=50.0).set_caption(
    f"paper | ours (mean ± standard deviation over {seeds} seeds); coloured by the difference to our grid search"
)

# %% [markdown]
# Columns of the table: first the paper's number (GPT-2 with its real weights on E2E), then ours at this profile. The two are not
# comparable in level when model or data differ; what can be compared is the order of the methods.

# %%
figure = language_generation_figures.draw_metrics(summary, methods, epsilons)

# %%
findings = language_generation_figures.metric_findings(summary, methods, epsilons, scores.loss)
made = {
    "parameters": parameters,
    "inputs": sorted(rows.key.dropna()),
    "claim": 'Tab. "gpt2": HyFreeDP is as good as the grid search, D-Adaptation and Prodigy fail.',
    "summary": findings,
}
shows = "Five metrics and perplexity of every method at each epsilon."
plots.save(figure, "06_language_generation", shows=shows, **made)
shows = "The same as a table, with the paper's numbers."
plots.save_table(summary, "06_language_generation_table", shows=shows, **made)
plots.what_to_see(findings)

# %% [markdown]
# ## 3. What the models write
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
    "06_language_generation_examples",
    parameters=parameters,
    inputs=made["inputs"],
    shows="Generated sentences side by side, for each method and epsilon, beside a reference.",
    claim="",
    summary=[f"{len(sentences)} sentences for {sentences.meaning.nunique()} meanings, seed 0"],
)

# %% [markdown]
# ## 4. Training dynamics of a LLaMA with LoRA
#
# Only low-rank updates of queries and values are trained; the paper starts them at ten times the usual rate, and so do we
# ($\eta_0 = 10^{-3}$ for the paper's preset; the robust one has no first rate). A record is a whole document. Four panels, as in the
# paper's figure: the learning rate; the clipping threshold $R_l$ of the paper's probe (a vote needs none); the loss, on test documents
# and as released with noise; the perplexity on test documents.
#
# **Predict first.** Will the rate rise and then fall, as the paper saw?

# %%
curves_scale = language_generation.documents_scale(profile, documents or None, documents_epsilon, seeds)
curves = language_generation.dynamics(curves_scale, CELLS, jobs=jobs)
figure = language_generation_figures.draw_dynamics(curves)

# %%
findings = language_generation_figures.dynamics_findings(curves)
learner = curves_scale.learners[0]
llama = LANGUAGE_TASKS[learner.task].architecture(learner.model)
plots.save(
    figure,
    "06_language_generation_dynamics",
    parameters=parameters,
    inputs=[f"runs of {llama.title} on {learner.task}, epsilon = {documents_epsilon:g}"],
    shows="Learning rate, clipping threshold of the paper's probe, loss and perplexity of LoRA training, mean and range over seeds.",
    claim='Fig. "llama": the learned rate rises, then falls, and generalises better than the grid search.',
    summary=findings,
)
plots.what_to_see(findings)

# %% [markdown]
# ## 5. Where this differs from the paper
#
# * At profiles smoke and laptop: a tiny GPT-2 and a tiny LLaMA that start from our own public weights in place of GPT-2 and
#   LLaMA-2-7B, synthetic sentences in place of E2E (`dataset="e2e"` takes the real ones) and PubMed (`documents=` takes any local
#   file), runs of 40 steps, and the grid's rates chosen with one seed.
# * At profile gpu: all of E2E, on GPT-2's architecture from public weights of our own, or from the real ones where
#   `HYFREEDP_WEIGHTS` names a folder that has them. Profile paper needs the real ones. Neither has been run for the committed output.
# * Gradients, probes and sampling are accounted on the same batch, see notebook 02.
#
# ## 6. Exercises
#
# 1. The loss of a record is a *mean* over its tokens. What would a *sum* change for the probe's clipping threshold $R_l$, and for whom
#    would it be unfair?
# 2. Compute from the table by which factor the metrics of the best and the worst method differ. Which metric separates them most?

# %% tags=["solution"]
display(
    Markdown(
        "With a sum, long texts have large losses and gradients: R_l would have to be as large as the longest text's loss, so the noise "
        "on all of them grows, or long texts would be clipped most, which biases the released loss towards short ones."
    )
)

# %% tags=["solution"]
spread = summary[summary.metric != "perplexity"].groupby(["epsilon", "metric"])["mean"].agg(["max", "min"])
spread["factor"] = spread["max"] / spread["min"]
spread.round(3)
