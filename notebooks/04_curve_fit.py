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
# # The parabola behind the learning rate, and what noise makes of it
#
# **After this notebook you can**
#
# * say why the loss along an update direction is nearly a parabola, where it is not, and read slope and curvature off it,
# * tell what clipping does to that parabola (late in a run it takes nearly all of the slope) from what noise does (another parabola),
# * judge from the *known* noise of a probe how far its learning rate can be trusted,
# * explain why releasing contrasts beats releasing losses, and what a probe of five points would cost,
# * show on a quadratic why even a perfect parabola ends with rates that are too small, and what a private vote sees instead.
#
# **In the paper:** Eq. "curve fit dp" and Fig. "lr loss curve": along different iterations of fine-tuning ViT-Small on
# CIFAR-100, the clipped and perturbed losses give nearly the same parabola as the raw ones, so that "$\sigma_l$ has
# negligible interference with the precision of estimating $\eta$". The figure uses five points, the algorithm three.
#
# **All curves of raw losses here are diagnostics, NOT private.** A run never shows them; a teacher may.

# %% tags=["parameters"]
profile = "laptop"  # how large: smoke, laptop, gpu or paper
task = "digits"  # what is trained on, or "classification"
epsilon = 3.0  # of a run, at the task's delta
interval = 5  # K: steps between probes
seeds = 3  # runs of each probe in section 4
stages = [0.05, 0.3, 0.5, 0.9]  # where to look at one run, as shares of it

# %%
from hyfreedp.experiments.book.parameters import check_parameters

check_parameters(
    globals(),
    {
        "profile": ("smoke", "laptop", "gpu", "paper"),
        "task": str,
        "epsilon": float,
        "interval": int,
        "seeds": int,
        "stages": list,
    },
)

# %%
import numpy as np
from IPython.display import Markdown, display

from hyfreedp import fit_quadratic
from hyfreedp.experiments.book.exercises import check
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.cache import cached
from hyfreedp.experiments.store.paths import CELLS
from hyfreedp.experiments.store.verdicts import verdict
from hyfreedp.experiments.studies import band_figures, landscape, landscape_figures, short_sighted
from hyfreedp.experiments.studies import short_sighted_figures as sight_figures
from hyfreedp.experiments.tasks.registry import TASKS

plots.use_style()

# %%
smoke = profile == "smoke"
if smoke:
    interval = 1
    print("profile smoke sets interval = 1 and trains for 12 steps")
names = ("profile", "task", "epsilon", "interval", "seeds", "stages")
parameters = {name: globals()[name] for name in names}
run = {"task": task, "epsilon": epsilon, "interval": interval, "steps": 12 if smoke else None}
batch_size = TASKS[task].batch_size

# %% [markdown]
# ## 1. Why a parabola, and two runs to look at
#
# The optimizer is about to go from $\mathbf w$ along $-\mathbf G$. By Taylor's theorem the loss at distance $\eta$ is
#
# $$ L(\mathbf w - \eta\mathbf G) = L(\mathbf w) - b\,\eta + \tfrac a2\,\eta^2 - \tfrac t6\,\eta^3 + \dots, \qquad
# b = \mathbf G\cdot\nabla L, \quad a = \mathbf G^\top\nabla^2L\,\mathbf G, $$
#
# with $t$ the third derivative along $\mathbf G$. Without its last term it is a parabola with its bottom at $\eta = b/a$. That term is
# small against the one before as long as $|t|\,\eta \ll 3a$: *near* $\mathbf w$. So it matters how far one looks.
#
# A probe looks at $\mathbf w$ and at $L_\pm = L(\mathbf w \pm h\mathbf G)$. The distance $h$ is the rate itself in Algorithm 1. In both runs
# below it is $4.36\,\eta$, because their step rules allow for momentum (notebook 05, section 3). Figures have $x$ in units of $h$ along
# $-\mathbf G$: $L_-$ lies at $x = 1$, the run's own next step at $x = 0.23$. Slopes and curvatures are in nats per $h$ and $h^2$.
#
# Both runs train the same network on the same data at the same $\varepsilon$, and are stopped at some probe steps:
#
# * **Three losses**, the paper's probe: $L(\mathbf w)$ and $L_\pm$, clipped at $R_l$, the sum of the three released before. On data this small the
#   paper's step rule never leaves the start, so this run has rule "anchored", which is mostly a *prior*: on a logarithmic scale its rate is
#   three quarters 0.02, known to suit AdamW on normalised gradients, and one quarter what the probe says. Preset "paper" itself
#   would look at $h = \eta$, where the losses differ less and noise matters more.
# * **Contrasts**, method "line_search": the means of $L_+-L_-$ and $L_++L_--2L(\mathbf w)$, each sample clipped at $R_d$ and $R_c$. It was
#   the default of this package before preset "robust", which has no parabola (section 7).

# %%
methods = landscape_figures.METHODS
drawn = {"grid": np.linspace(-1.25, 1.25, 7 if smoke else 41).tolist(), "repeats": 20 if smoke else 60, "seed": 0}
curves = {
    kind: cached(CELLS, landscape.loss_curves, spec=run | {"method": method}, stages=stages, **drawn)
    for kind, method in methods.items()
}
fits = {kind: landscape_figures.fit_table(table) for kind, table in curves.items()}

# %% [markdown]
# ## 2. Three losses: clipping moves the parabola, noise replaces it
#
# **Predict first:** clipping at $R_l$ caps every sample's loss. Does that change where the parabola's bottom is? And the noise
# of each mean loss has standard deviation $\sigma_l R_l / B$: is that small against the loss, or against the *change* of the
# loss along $\mathbf G$?

# %%
figure = landscape_figures.draw_losses(curves["losses"])

# %% [markdown]
# The table: of the raw losses, of the clipped ones, and the noise (standard deviation) of slope `b` and curvature `a`; `b/a` in units of
# $h$. All fits are through the five points of the figure. **Right signs** is the share of noisy fits whose slope *and* curvature have the
# signs of the raw ones. It asks whether noise changes the answer, not whether the answer is a good one; coin flips reach 0.25.

# %%
display(fits["losses"].style.format(precision=3).hide(axis="index"))
claim = (
    'Fig. "lr loss curve": the fit from clipped and perturbed losses is close to that from raw losses, so the loss noise '
    "has negligible interference with the learning rate."
)
plots.save(
    figure,
    "04_curve_fit",
    parameters=parameters,
    inputs=["function landscape.loss_curves"],
    shows="Loss along the update direction at several steps: raw, clipped, clipped and noised, five points with parabolas.",
    claim=claim,
    summary=landscape_figures.fit_findings(fits["losses"]),
)

# %%
display(Markdown(landscape_figures.losses_text(fits["losses"], batch_size)))

# %% [markdown]
# So clipping does move the bottom. At step 50 of the default run it takes 0.05 nats at $x = -1$ and at 0 but 0.10 at $x = 1$, where a few samples are already
# too far gone: what is left falls longer, and its bottom lies at 0.91 instead of 0.61. At step 90 $R_l$ has fallen to its floor of 0.1 nats, nearly all of the loss
# sits in samples above it, and the slope that is left has the other sign. And the noise is that of the *loss*: at step 5 it is 0.14 nats, 6 % of the
# loss and 45 times its change over $h$. In the lower row the dotted line is the $b/a$ of one draw. At steps 5 and 90 that is a *maximum*, since the parabola opens
# downwards, and at step 30 it lies off the axis. The paper's claim needs a loss that changes much over the probed distance, and a large batch.
#
# ## 3. Contrasts: a flatter parabola, seen clearly
#
# Slope and curvature need only the means $D$ of $L_+-L_-$ and $C$ of $L_++L_--2L(\mathbf w)$ over the samples:
#
# $$ b = \frac{D}{2h}, \qquad a = \frac{C}{h^2}. $$
#
# (A positive $D$ says that the loss is higher behind than ahead, so that $\mathbf G$ leads down.) Per sample they are orders of magnitude smaller
# than the losses, so are their thresholds, and so is their noise. The height of the curve is not released, so the panels show the change from
# $L(\mathbf w)$.
#
# **Predict first:** the price is the same. How much narrower is the bundle?

# %%
figure = landscape_figures.draw_contrasts(curves["contrasts"])

# %%
display(fits["contrasts"].style.format(precision=4).hide(axis="index"))
plots.save(
    figure,
    "04_curve_fit_contrasts",
    parameters=parameters,
    inputs=["function landscape.loss_curves"],
    shows="Loss along the update direction of the former default, and the parabolas that its noisy contrasts give.",
    summary=landscape_figures.fit_findings(fits["contrasts"]),
)
display(Markdown(landscape_figures.contrasts_text(fits["contrasts"], fits["losses"])))

# %% [markdown]
# Step 5 of the default run shows where a parabola ends. The rate has just climbed to 0.1, so $h$ is 0.45, and there the curve is a flat valley between two walls. Its
# lowest point lies *ahead*, at $x = 0.2$, about where the run would step; the parabola through the walls has its bottom behind, at $-0.3$ for the raw
# losses. Noise has no part in it, and all draws have the "right" signs: they agree on a wrong answer. The rule takes it for "less", and halves the rate.
#
# (These are two runs, with other weights and other distances. The next section puts both probes on the same ones.)
#
# ## 4. How far can the rate be trusted, over a whole run?
#
# The noise of a probe is known exactly, only the data are not. So we repeat the release of the same probe many times, with three points as in a run, and
# look at the spread of $b/a$, in units of the rate that the run had. Medians over the runs of the quantiles; the dots are $b/a$
# of the raw losses. Vertical axes are linear between $-1$ and $1$ and logarithmic beyond. Purple: at the very same weights, batches and distances as the
# contrasts, and at the same price, three losses clipped at their sum.

# %%
moments = [0.0, 0.3, 0.6] if smoke else np.linspace(0, 0.95, 20).round(2).tolist()
bands = landscape.all_bands(CELLS, run, methods, stages=moments, repeats=20 if smoke else 300, seeds=seeds)
figure = band_figures.draw_bands(bands)

# %%
plots.save(
    figure,
    "04_curve_fit_bands",
    parameters=parameters,
    inputs=["function landscape.rate_bands"],
    shows="Spread of b/a over the noise of one probe along a whole run, for three losses and for contrasts.",
    claim=claim,
    summary=band_figures.band_findings(bands),
)
display(Markdown(band_figures.bands_text(bands)))

# %% [markdown]
# Late in the contrasts' run most dots lie above 1, and that is no short sight: for the sake of momentum its rule aims at half of $b/a$, and the $b/a$ it sees
# is the clipped one (section 3).
#
# ## 5. A bias that noise does not explain
#
# The probe looks at the same batch that made the gradient. $\mathbf G$ descends on *that* batch more than on the rest of the
# data, so the slope is too large. Fresh data would cure it, at the cost of another sampling. (Raw slopes, not private.)

# %%
figure = band_figures.draw_same_batch(bands)

# %%
plots.save(
    figure,
    "04_curve_fit_same_batch",
    parameters=parameters,
    inputs=["function landscape.rate_bands"],
    shows="Slope along the update direction, on the batch that made it and on the other training records (not private).",
    summary=band_figures.same_batch_findings(bands),
)
display(Markdown(band_figures.same_batch_text(bands)))

# %% [markdown]
# Too large by the measure of *one* step on all records. Section 7 has another measure, the end of the run, by which even the best rate for
# one step is too small. The two errors have opposite signs, and nothing makes them cancel.
#
# ## 6. What would five points cost?
#
# Suppose the probe had $n$ points, evenly spaced from $-h$ to $h$. The loss at $\mathbf w$ comes free with the gradient, each other point is a forward
# pass. Each loss of a record adds its own $R_l^2$ to the squared sensitivity of the probe, which is $n$ in units of $R_l^2$. Gradient and probe of a step are one
# release with the effective multiplier $(\sigma_g^{-2} + n\,\sigma_l^{-2})^{-1/2}$ (notebook 03), which stays as it is if $\sigma_l$ grows by $\sqrt{n/3}$.
#
# **Predict first:** more points average more noise away, and each has more of it. Does the slope get better or worse?

# %%
price = landscape.price_of_points(1.0, [3, 5, 9])
plots.save_table(
    price.round(3),
    "04_curve_fit_points",
    parameters=parameters,
    inputs=["function landscape.price_of_points"],
    shows="Probes of three, five and nine losses at equal privacy: forward passes, loss noise, noise of slope and curvature.",
    claim="More points may stabilise the algorithm, at the cost of more forward passes and more privacy budget (footnote).",
    summary=landscape_figures.price_findings(price),
)
display(price.round(3))
display(Markdown(landscape_figures.price_text(price)))

# %% [markdown]
# ## 7. Why a parabola is short-sighted
#
# Suppose the probe were perfect: no clipping, no noise, all the data. Would $b/a$ be the right rate? Here is the smallest
# model that can answer: a quadratic loss with several curvatures $\lambda_j$, and SGD whose gradients carry DP noise.
#
# $$ L(\mathbf w) = \tfrac12\sum_j \lambda_j w_j^2, \qquad w_j \leftarrow w_j - \eta\,(\lambda_j w_j + \nu z_j), \qquad z_j\sim N(0, 1),
# \quad \nu = \sigma_g R_g/B, $$
#
# where $R_g$ is the norm to which gradients are clipped. With $u_j = \mathbb E w_j^2$ a step is $u_j \leftarrow (1-\eta\lambda_j)^2 u_j +
# \eta^2\nu^2$, whatever the rates: every expected loss below is exact, without a single run. One step ahead
#
# $$ \mathbb E L(\mathbf w - \eta\mathbf g) = \mathbb E L(\mathbf w) - b\eta + \tfrac a2\eta^2, \qquad
# b = \sum_j \lambda_j^2 u_j, \qquad a = \sum_j \lambda_j\,(\lambda_j^2 u_j + \nu^2), $$
#
# so the *one-step rate* $b/a$ is the best there is, for one step. In `short_sighted.EXAMPLE` ten curvatures fall evenly on a
# logarithmic scale from $\lambda_1 = 1$ to $0.01$, each direction starts with a tenth of the loss, $\nu = 0.3$, and a run has 100 steps.
# Beside it: a constant rate and a linear decay, each from the peak that ends lowest. They know that peak in hindsight; panel 3 shows all others.
#
# **Predict first.** The one-step rate makes the loss after each step as low as that step can. Is it also the lowest after 100?
#
# **A vote instead** (panels 3 and 4). Two branches start from the same weights, at rates a factor of four apart, and train for five steps. Then
# every record of one Poisson batch votes for the branch where its own loss is lower: $v = \frac1B\left(\sum_i \pm 1 +
# N(0, \sigma_l^2)\right)$. A record changes the sum by at most 1 whatever its losses: no threshold, no scale, no parabola. Here
# record $i$ has the loss $L_i(\mathbf w) = \frac12\sum_j \lambda_j (w_j - c_{ij})^2$ with its own optimum $\mathbf c_i\sim N(0, 1.5^2\,\mathbf I)$.
# What it loses by branch B rather than A is linear in $\mathbf c_i$, so over the records it is normal: with mean $m = L(\mathbf w_B) -
# L(\mathbf w_A)$ and standard deviation $\tau = 1.5\,\bigl(\sum_j \lambda_j^2 (w_{A,j}-w_{B,j})^2\bigr)^{1/2}$. The share that prefers A is
# $\Phi(m/\tau)$; $\sigma_l = 10$. The winner goes on, with a linear decay. Black: both branches *finish* a decay of their own before the vote.

# %%
quadratic, peaks = short_sighted.EXAMPLE, short_sighted.PEAKS
paths = short_sighted.runs(quadratic, peaks, steps=100)
final = short_sighted.ends(quadratic, peaks, steps=100)
race = {
    "steps": 100, "raced": 5, "factor": 4, "spread": 1.5, "batch_sizes": [10, 100, 1000], "noise_multiplier": 10.0,
    "draws": 2000, "seed": 0,
}  # fmt: skip
votes = short_sighted.race(quadratic, peaks, decay_over=100, **race)
ahead = short_sighted.race(quadratic, peaks, decay_over=5, **race)
figure = sight_figures.draw(paths, final, votes, ahead)

# %%
summary = sight_figures.findings(paths, final, votes, ahead)
plots.save(
    figure,
    "04_curve_fit_short_sighted",
    parameters=parameters,
    inputs=["function short_sighted.runs", "function short_sighted.race"],
    shows="A noisy quadratic: expected loss and rate over the steps, expected loss at the end against the peak rate, and how "
    "often a private vote keeps the faster of two branches. Exact but for the average over the branches' weights.",
    claim="Alg. 1, line 11: the next rate is b/a, where the parabola along the update is lowest.",
    summary=summary,
)
plots.what_to_see([sight_figures.lead(paths, final), *summary])

# %% [markdown]
# It is not. A step costs noise $\eta^2\nu^2$ in every direction, and steep directions show it at once. The parabola weighs it
# against the progress of *this* step, which is small in flat directions, and turns the rate down. But the noise does not last:
# later steps at smaller rates shrink it by $(1-\eta\lambda_j)^2$ each, so a decay removes it for nothing, whereas a flat direction that
# was not walked stays where it is. Noise looks worse one step ahead than it is. This is the short-horizon bias of Wu et
# al. (2018). It hits every rule that follows $b/a$, and no budget for the probe removes it. A badly chosen constant or decay ends
# higher all the same; but the window of those that end lower is wide.
#
# The batch decides how *surely* the vote is taken (at $B = 10$ it is half a coin flip, at 100 nearly as clear as at 1,000), the horizon decides *what* is taken.
# Five steps are short as well: the plain vote turns where the faster rate is about half as high as it may be. Smaller rates at the end help: let the
# branches decay before the vote, and five steps judge nearly as a hundred do. A race holds up even without, since it asks once, early, where progress
# outweighs noise, and leaves the rest to the decay; a rule that follows $b/a$ asks again at every step and answers worse the later it is.
#
# **From the race to preset "robust".** A race pays for steps of a branch that is thrown away. What a finished decay does to the noise, an *average* of the
# weights of past steps does as well: independent errors cancel in it, and it costs no step. So in its one run, at a public rate with linear decay,
# preset "robust" lets the records vote on the weights at hand against such an average (notebook 00, section 4). Wherever the average wins, noise has outgrown progress,
# and the rate is too high. This is the idea, not a proof: when it votes, and what a lost vote does, was chosen by measurement
# ([docs/step_rule.md](../docs/step_rule.md)).
#
# ## Verdict

# %%
verdict(
    "04_curve_fit",
    band_figures.verdicts(bands, batch_size),
    parameters=parameters,
    inputs=["function landscape.rate_bands"],
)

# %% [markdown]
# The share is the mean over all steps looked at and all runs of three losses (orange squares in section 4).
#
# ## Where this differs from the paper
#
# * Task, model, batch: a three-layer network on 1,500 digits instead of ViT-Small on CIFAR-100; $B = 500$.
# * The run with three losses is driven by rule "anchored" and looks 4.36 times as far as it steps; the paper's rule does not train here.
# * $R_l$ is the sum of the last released losses (the paper's "more conservative" choice), with a floor of 0.1. That clips little early in a run and, once a
#   few hard samples carry the loss, nearly all that still changes: see step 90 in section 2.
# * Five losses have the noise that keeps the price of three; the paper does not say what noise its figure has.
# * Section 7 is ours: a model, not a run, and nothing in sections 2 to 5 shows short sight. Its gradients are those of the whole population, with DP
#   noise but without that of sampling, its rates are SGD's, and the second branch's steps, which cost a run a few percent of noise, are free.
#
# ## Exercises
#
# Put your answer in place of `None` and run the cell; it says whether you are right. Solutions are in
# [`solutions/`](solutions/04_curve_fit.ipynb).
#
# 1. Two points, $\mathbf w$ and $\mathbf w - h\mathbf G$, give a slope alone. How large is its noise, relative to that from three points at equal
#    privacy? And why is it not used?

# %%
relative_noise = None
three = fit_quadratic([1, 0, -1], [0, 0, 0], noise_std=1.0)
check(relative_noise, lambda: np.hypot(*[landscape.noise_for_points(1.0, 2)] * 2) / three.slope_std)

# %% [markdown] tags=["solution"]
# *Solution.* With two losses the noise of each falls by $\sqrt{2/3}$. The slope is their difference over $h$, with standard deviation
# $\sqrt2\,\sqrt{2/3}\,\sigma_l R_l/(Bh)$, against $\sigma_l R_l/(\sqrt2 Bh)$ from three points, which look twice as far. And without a
# curvature there is no bottom to go to.

# %% tags=["solution"]
relative_noise = (2 * 2 / 3) ** 0.5 * 2**0.5
check(relative_noise, lambda: np.hypot(*[landscape.noise_for_points(1.0, 2)] * 2) / three.slope_std)

# %% [markdown]
# 2. Short sight needs two curvatures. With one, $\lambda$, find the one-step rate $\eta_t$ of section 7 in closed form. How large is it at
#    step $t = 9$ (the first is 0) if $\lambda = \nu = 1$ and the run starts at $u_0 = 1$? Then show that *no* schedule ends lower, however long the
#    run. Which step of your proof fails with two?

# %%
tenth_rate = None
alone = short_sighted.NoisyQuadratic(np.ones(1), np.ones(1), noise=1.0)
check(tenth_rate, lambda: short_sighted.greedy(alone, steps=10)[-1])

# %% [markdown] tags=["solution"]
# *Solution.* Write $x = \lambda^2u/\nu^2$. Then $b/a = x/(\lambda(1+x))$, and a step at that rate leaves $u/(1+x)$, so $1/x_{t+1} = 1/x_t + 1$,
# $1/x_t = t + 1/x_0$ and $\eta_t = 1\,/\,\bigl(\lambda\,(t + 1 + \nu^2/(\lambda^2u_0))\bigr)$. A step $u \leftarrow (1-\eta\lambda)^2u + \eta^2\nu^2$
# never decreases with $u$, whatever $\eta$: who has the lowest $u$ now can copy all later rates of anybody else and stay lowest, so the lowest
# next $u$ is always the best choice. With two curvatures the state is two numbers. The one-step rate makes $\sum_j \lambda_ju_j$ lowest, but not
# each $u_j$: it buys the steep one, which later steps would shrink anyway, with the flat one, which they hardly shrink.

# %% tags=["solution"]
tenth_rate = 1 / (9 + 1 + 1)
check(tenth_rate, lambda: short_sighted.greedy(alone, steps=10)[-1])

# %% [markdown]
# 3. `papermill notebooks/04_curve_fit.ipynb out.ipynb -p epsilon 50.0`. From which $\varepsilon$ on does the paper's claim hold here?

# %% [markdown] tags=["solution"]
# *Solution.* Watch the share of right signs of three losses come near that of contrasts. Even at $\varepsilon=50$ the
# noise stays comparable with the slope in the early steps, where $h$ is tiny and the loss hardly changes over it.
