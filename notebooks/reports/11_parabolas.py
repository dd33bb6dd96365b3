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
# # The consequence: parabolas, learning rates and an attack
#
# **After this notebook you can**
#
# * follow a clipping threshold through to its consequence: a cloud of parabolas, and the rates $\eta = b/a$ that they give,
# * say what the paper's advice for the threshold is right for, and why the rate needs more,
# * attack a learning rate, and say what protects it.
#
# **The paper's items.** § 4.1 (three losses, clipped at $R_l \approx L$ or at their sum, and the parabola through them), and the claim
# that a rate fitted to raw losses violates DP while one fitted to private losses is post-processing.

# %% tags=["parameters"]
profile = "laptop"  # how large: smoke, laptop, gpu or paper
epsilon = 3.0  # of a run, at the task's delta
seeds = 10  # training runs whose losses are looked at; the attack is played on the first three
step = 40  # of the run, at which parabolas are drawn and the attack is played
reach = 5.0  # how far a probe looks, in units of the rate; in Algorithm 1 it is 1
brightness = 16.0  # how many times too bright the planted outlier is

# %%
from hyfreedp.experiments.book.parameters import check_parameters

check_parameters(
    globals(),
    {
        "profile": ("smoke", "laptop", "gpu", "paper"),
        "epsilon": float,
        "seeds": int,
        "step": int,
        "reach": float,
        "brightness": float,
    },
)

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from IPython.display import Markdown, display

from hyfreedp import fit_quadratic
from hyfreedp.experiments.audits import attack
from hyfreedp.experiments.book.answers import truth
from hyfreedp.experiments.book.exercises import check
from hyfreedp.experiments.store import plots
from hyfreedp.experiments.store.paths import CELLS
from hyfreedp.experiments.store.verdicts import Verdict, by_attack, by_interval, mean_interval, verdict
from hyfreedp.experiments.studies import bias_variance, landscape
from hyfreedp.experiments.tasks.registry import TASKS

plots.use_style()

# %%
if profile == "smoke":  # a small budget is calibrated quickly
    epsilon, step, seeds = 0.2, 2, min(seeds, 2)
    print(f"profile smoke sets epsilon = {epsilon}, step = {step} and seeds = {seeds}")
sizes = bias_variance.sizes_of(profile, step)
parameters = {name: globals()[name] for name in ("profile", "epsilon", "seeds", "step", "reach", "brightness")}

# %% [markdown]
# ## Data: a run, probed again and again
#
# A network learns 1,500 handwritten digits under the budget above. It is trained by preset "paper" from a rate that suits (0.01). It probes at every step, so that we can look anywhere; the noise below is that of a probe every fifth step. A *probe* releases
# three noisy mean losses along the optimizer's direction $\mathbf G$: at $\mathbf w$ and at a distance $h$ ahead and behind. $h = \eta$ in Algorithm 1. On this task the loss is nearly
# a straight line so close by (notebook 04). We look `reach` times as far, to see a parabola at all.

# %%
task = TASKS["digits"]
sigma = bias_variance.noise_of(CELLS, bias_variance.digits_budget(epsilon), probe="losses").sigma_loss
looks = {"epsilon": epsilon, "seeds": seeds, "stages": sizes["stages"], "brightness": brightness}
probed, run_inputs = landscape.probed_runs(CELLS, reach=reach, **looks)
text = (
    f"N = {task.train_size:,}, B = {task.batch_size}, T = {task.steps}, epsilon = {epsilon:g}, delta = {task.delta:g}: "
    f"sigma_l = {sigma:.1f} for three losses."
)
display(Markdown(text))

# %% [markdown]
# ## 1. Parabolas and learning rates
#
# Nobody needs the mean loss itself. It serves to fit a parabola with slope $b$ and curvature $a$, $L(\mathbf w - x \mathbf G) \approx L - bx + \tfrac a2x^2$, through
# $x \in \{-h, 0, h\}$. The next rate is its lowest point, $\eta = b/a$. So we take the real losses of one batch at one step and release them again and again, each clipped to
# $[0, R_l]$ and noised. Which parabolas come out?
#
# The paper gives two thresholds: $R_l = L$, the mean loss, and "in practice" the sum of the three losses, "to avoid the clipping bias". A fifth of $L$, a quarter of that sum (0.8 $L$ here) and ten times it stand beside them.
#
# **Predict first:** which hurts the rate more, a threshold too small or one too large?

# %%
losses, h = landscape.losses_of(probed[0], step, "batch"), landscape.distance_of(probed[0], step)
mean, exact = losses[1].mean(), fit_quadratic([h, 0, -h], losses.mean(axis=1))
multiples = sizes["multiples"]
noise = {"noise_multiplier": sigma, "expected_batch_size": task.batch_size}
errors = bias_variance.errors(losses, np.array(multiples) * mean, **noise)
best = multiples[errors.rmse.idxmin()]
total = losses.mean(axis=1).sum() / mean
wanted = {
    "R_l = L": 1.0,
    "sum of three": total,
    "a fifth of L": 0.2,
    "a quarter of the sum": total / 4,
    "ten times the sum": 10 * total,
}
chosen = {name: min(multiples, key=lambda one: abs(np.log(one / value))) for name, value in wanted.items()}
advice = (
    f"the mean losses have the least error at {best:.2g} times the mean loss, the sum is {chosen['sum of three']:.2g}"
)


# %%
def cloud(table, seed):
    """Releases of a run's batch at the step, clipped and noised as a probe, and how far b/a strays: a row per threshold."""
    losses, h = landscape.losses_of(table, step, "batch"), landscape.distance_of(table, step)
    cuts = np.repeat(multiples, sizes["parabolas"]) * losses[1].mean()
    normal = np.random.default_rng(seed).standard_normal((len(cuts), 3))
    ahead, here, behind = (
        (np.minimum(losses, cuts[:, None, None]).sum(axis=2) + sigma * cuts[:, None] * normal) / task.batch_size
    ).T
    slope, curvature = (behind - ahead) / (2 * h), (ahead + behind - 2 * here) / h**2
    ratio = slope / curvature / fit_quadratic([h, 0, -h], losses.mean(axis=1)).minimizer
    fits = pd.DataFrame({"multiple": np.repeat(multiples, sizes["parabolas"]), "slope": slope, "curvature": curvature})
    fits = fits.assign(near=(ratio > 0.5) & (ratio < 2), concave=curvature < 0, uphill=slope < 0)
    return fits, fits.groupby("multiple")[["near", "concave", "uphill"]].mean()


released = [cloud(table, seed) for seed, table in enumerate(probed)]

# %%
fits, near = released[0][0], pd.concat([spread for _, spread in released]).groupby("multiple").near
places = np.linspace(-1.5, 1.5, 61)  # along -G, in units of h
figure, axes = plt.subplots(1, 3, figsize=(11, 3.8))
unspoiled = exact.curvature * (h * places) ** 2 / 2 - exact.slope * h * places
for axis, name in zip(axes, ("R_l = L", "sum of three"), strict=False):
    for fit in fits[np.isclose(fits.multiple, chosen[name])].head(60).itertuples():
        change = fit.curvature * (h * places) ** 2 / 2 - fit.slope * h * places
        axis.plot(places, change, color=plots.STYLES["paper"]["color"], alpha=0.25, lw=0.8)
    axis.plot(places, unspoiled, "k--", label="without clipping and noise")
    title = "$R_l = L$" if name == "R_l = L" else name
    share = released[0][1].near[chosen[name]]
    axis.set_title(f"{title} ({chosen[name] * mean:.2g} nats): {share:.0%} of rates near")
    axis.set_xlabel("distance along $-G$ (units of $h$)")
    axis.set_ylim(unspoiled.min() - 0.6 * np.ptp(unspoiled), unspoiled.max() + 0.3 * np.ptp(unspoiled))
axes[0].set_ylabel("change of the loss (nats)")
axes[0].legend(fontsize="small")
axes[2].plot(near.mean().index, 100 * near.mean(), **plots.STYLES["paper"])
axes[2].fill_between(near.min().index, 100 * near.min(), 100 * near.max(), color="C1", alpha=0.2, lw=0)
axes[2].axhline(50, color="0.3", lw=1)
for name in ("R_l = L", "sum of three"):
    axes[2].axvline(wanted[name], color="0.2", ls=":")
    axes[2].annotate(" $R_l = L$" if name == "R_l = L" else f" {name}", (wanted[name], 56), fontsize="small")
axes[2].set(xscale="log", xlabel="$R_l$ / mean loss", ylabel="rates within a factor of two (%)", ylim=(0, 62))
axes[2].set_title(f"The best threshold brings {near.mean().max():.0%} near")
plots.log_ticks(axes[2].xaxis, [0.3, 1, 3, 10])

# %%
tables = [table.loc[list(chosen.values())] for _, table in released]
table = pd.concat(tables).groupby(level=0).mean().loc[list(chosen.values())].reset_index()
table.insert(0, "threshold", list(chosen))
shown = table[["threshold", "multiple", "near", "concave", "uphill"]]
display(shown.style.format(precision=2, subset=shown.columns[1:]).hide(axis="index"))
print(advice)
plots.save(
    figure,
    "11_parabolas",
    parameters=parameters,
    inputs=run_inputs,
    shows="Parabolas through repeated private probes of one real batch, and the share of usable rates, by threshold.",
    claim="§4.1: R_l close to L, or the sum of three losses in practice, to avoid the clipping bias.",
)

# %% [markdown]
# In the table, `near` is the share of rates within a factor of two of the exact one, `concave` and `uphill` the shares with $a < 0$ and with $b < 0$. There $b/a$ is a maximum, or points backwards.
#
# **For the mean losses the paper's advice is right.** The sum of three is the threshold, of all that were tried, at which the three released means have the least error
# of clipping and noise together. (By default.) Notebook 01, section 4, found 1.2 $L$ for normal losses. At step 40 losses are not normal (its section 5): a few large ones make up much of the mean, so
# the best threshold is higher.
#
# **For the rate the first advice, $R_l = L$, is as good as any, and not enough**: three rates in ten come near. Around $L$ the curve is flat. Too large a threshold hurts a
# little more than one too small: 21 % come near at three times $L$, 23 % at a fifth of it. At ten times the sum it is 11 %. A small $R_l$ *deforms* the parabola. The highest of the three losses is
# cut most, and it is the height of the ends over the middle that bends a parabola. A large $R_l$ leaves the shape and *scatters* the parabolas. In between both happen. The fit
# needs small *differences* between three losses, and the noise is that of whole losses.

# %% [markdown]
# ## 2. Attack: what a learning rate tells about one record
#
# Suppose the gradient is private but the learning rate is fitted to *raw* losses. One number per probe, a mean over hundreds of
# records: can it hurt? We plant one outlier: an image whose pixels were not scaled (`brightness` times too large), under a wrong label. Then we play a game.
# The observer knows the weights, the direction $\mathbf G$ and the thresholds, all of which were released before. From $\eta = b/a$ it must say whether the outlier was in the batch.
#
# The score is the *membership advantage*: how often it says "in" when the outlier was in, less how often it says so when it was not. It says "in" beyond some $\eta$, which is
# chosen on one half of the games and judged on the other. There are two observers:
#
# * **"sees a random batch"**: the other records are drawn by Poisson sampling, as in training, and make $\eta$ vary by themselves;
# * **"knows the others"**: the whole batch but the outlier is known. Differential privacy promises protection even then.
#
# For an $(\varepsilon, \delta)$-DP release no attack whatever has more than
#
# $$ \text{advantage} \le \frac{e^\varepsilon - 1 + 2\delta}{e^\varepsilon + 1}. $$
#
# Why? Let it say "in" with probability $p$ if the outlier is in, and with $f$ if not. The promise bounds both worlds: $p \le e^\varepsilon f + \delta$, and $1 - f \le e^\varepsilon (1 - p) + \delta$. Add the two and solve for
# the advantage $p - f$. (Notebook 00 found the largest advantage on one known mechanism: its $\delta$ at $\varepsilon = 0$. It is never more than this bound, which knows of the mechanism only the promise.)
#
# The $\varepsilon$ here is that of this one release, on a batch that holds the outlier for sure. The library's accountant finds it. Besides the calibrated noise we play with a
# quarter and a sixteenth of it (`weakening`), to see the bound where there is something to see.
#
# **Predict first:** how many of the raw rates can the observer tell apart? And does clipping alone, with little noise, help?

# %%
sigmas = {"losses": sigma}
games, inputs = attack.games(
    CELLS, probed[:3], step, sigmas=sigmas, weakenings=[1.0, 0.25, 0.0625], runs=sizes["attacks"]
)
result = attack.advantages(games, sigmas, task.delta)
display(result.style.format(precision=3).hide(axis="index"))

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 4.2), width_ratios=[1.25, 1, 1])
first = games[(games.seed == 0) & (games.observer == "sees a random batch") & games.weakening.isin([0.0, 1.0])]
first = first.assign(eta=first.eta.clip(*np.sort(exact.minimizer * np.array([-0.25, 2.25]))))
first["outlier"] = first.planted.map({False: "outlier not in the batch", True: "outlier in the batch"})
look = {"split": True, "palette": ["0.75", "0.35"], "density_norm": "width"}
sns.violinplot(first, x="eta", y="probe", hue="outlier", ax=axes[0], **look)
axes[0].set(xlabel="learning rate $b/a$ (beyond the axis: at its end)", ylabel="", title="what the observer sees")
plots.legend_below(axes[0], ncols=2)
budgets = np.geomspace(0.05, 12, 200)
for axis, (observer, rows) in zip(axes[1:], result.groupby("observer", sort=False), strict=True):
    axis.plot(budgets, attack.advantage_bound(budgets, task.delta), color="0.3", label="bound of epsilon")
    private, raw = rows[rows.probe == "losses"], rows[rows.probe == "raw"].iloc[0]
    ends = [private.advantage - private.low, private.high - private.advantage]
    axis.errorbar(private.epsilon, private.advantage, yerr=ends, fmt="s", color="C1", label="three losses")
    axis.axhline(raw.advantage, color=plots.STYLES["reference"]["color"], label="raw rate: no epsilon")
    axis.set(xscale="log", xlabel=r"$\varepsilon$ of the release", ylim=(-0.2, 1.05), title=f"observer {observer}")
    plots.log_ticks(axis.xaxis, [0.1, 1, 10])
axes[1].set_ylabel("membership advantage")
figure.suptitle("A raw rate gives the outlier away, a private one does not")
plots.legend_below(axes[1], ncols=1)

# %%
plots.save(
    figure,
    "11_parabolas_attack",
    parameters=parameters,
    inputs=run_inputs + inputs,
    shows="Learning rates with and without one planted outlier, and the advantage of an observer against the bound of epsilon.",
    claim='§"Privatized quadratic function": fitting the rate to raw losses violates DP; the private fit is post-processing.',
)

# %% [markdown]
# A raw learning rate gives the outlier away every time. Its losses are tens of times those of the others and bend the parabola. Clipping alone takes most of that. All three of its
# losses are cut to the same $R_l$ and cancel in slope and curvature, so that it stays hidden even with a sixteenth of the noise.
#
# The bound is far above what this attack reaches, because it holds for *every* attack and *every* record. A weak attack below it
# proves nothing; one above it would disprove the accountant. In training the outlier enters a batch with probability $q$ only, which
# protects it further. But the observer then sees many probes and all gradients. The accountant adds all of it up.
#
# ## Verdict

# %%
share = table.set_index("threshold").near
by_seed = {name: [np.mean(one.near.loc[value]) for one in tables] for name, value in chosen.items()}
paper = Verdict(
    "Three losses clipped at R_l = L, or at their sum, give the rate",
    by_interval(*mean_interval(by_seed[share[["R_l = L", "sum of three"]].idxmax()]), least=0.5),
    f"within a factor of two in {share['R_l = L']:.0%} of the probes at R_l = L, {share['sum of three']:.0%} at the sum, "
    f"{share.max():.0%} at the best threshold",
)
raw = result[result.probe == "raw"].sort_values("advantage").iloc[-1]
private = result[result.probe != "raw"]
above = int((private.low > private.bound).sum())
decided = [
    paper,
    Verdict(
        "§ 4.1: a rate that is fitted to raw losses violates DP",
        by_interval(raw.low, raw.high, least=0.5),
        f"an outlier is found with advantage {raw.advantage:.2f}",
    ),
    Verdict(
        "§ 4.1: a rate that is fitted to private losses does not",
        by_attack(above),
        f"an advantage above the bound in {above} of {len(private)} private settings",
    ),
]
verdict("11_parabolas", decided, parameters=parameters, inputs=run_inputs + inputs)

# %% [markdown]
# ## Where this differs from the paper
#
# * Real losses come from a small network trained from scratch (profile `laptop`), not from fine-tuning a vision transformer. There
#   $B$ is larger and $\sigma_l$ smaller, so noise matters less and bias more.
# * Section 1 looks several times as far as the run steps. Algorithm 1 looks at the rate itself, where the differences between three losses are smaller still.
# * Noise is calibrated with gradient and losses on the same batch, as Algorithm 1 runs; the paper counts them apart.
# * The attack is ours.
#
# ## Exercises
#
# Put your answer in place of `None` and run the cell; it says whether you are right. Solutions are in
# [`solutions/`](solutions/11_parabolas.ipynb).
#
# 1. A record has losses 2, 2.1 and 2.6 at $-h$, 0 and $h$. Clip each at $R_l = 2.1$. What is left of its curvature
#    $L_+ + L_- - 2 L_0$, which was 0.4? And which sign has it then?

# %%
curvature = None
check(curvature, lambda: truth("11.1"))

# %% [markdown] tags=["solution"]
# *Solution.* Clipped, the losses are 2, 2.1 and 2.1: $2.1 + 2 - 4.2 = -0.1$. The highest loss was cut most, and the parabola is concave.

# %% tags=["solution"]
curvature = min(2.6, 2.1) + 2 - 2 * 2.1
check(curvature, lambda: truth("11.1"))

# %% [markdown]
# 2. Run with `papermill notebooks/reports/11_parabolas.ipynb out.ipynb -p reach 1.0`. What is left of the parabolas where Algorithm 1 looks?

# %% [markdown] tags=["solution"]
# *Solution.* The differences between the three losses are far below the noise at any $R_l$, so that the rates are close to a ratio of two noises: half of the parabolas are
# concave, and hardly a rate is near the exact one.

# %% [markdown]
# 3. Which advantage can an attack on a release of $\varepsilon = 1$, $\delta = 0$ have at most?

# %%
largest_advantage = None
check(largest_advantage, lambda: truth("11.3"))

# %% tags=["solution"]
from math import exp

largest_advantage = (exp(1) - 1) / (exp(1) + 1)
check(largest_advantage, lambda: truth("11.3"))

# %% [markdown]
# 4. Set `brightness` to 1: the planted record is now ordinary but for its label. What is left of the attack on the raw rate, and
#    why does that not make raw rates safe?

# %% [markdown] tags=["solution"]
# *Solution.* An ordinary record moves a mean over hundreds by less than the sampling of the others does, so the observer of a random
# batch sees little. The one who knows the others still tells the two raw rates apart every time. Protection must not depend on a
# record being ordinary.
