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
# # One private step by hand: clip, sum, noise, fit, update
#
# **After this notebook you can**
#
# * write one step of private training in NumPy, and say which line bounds what a record can do,
# * find a learning rate through three private losses, as the paper does, and see how noise spoils it,
# * run the whole of Algorithm 1 by hand, and check it against the library, number by number.
#
# **The paper's items.** Algorithm 1, on a problem of two parameters. Nothing is hidden in a function of ours: NumPy, SciPy and matplotlib are enough, and the library comes last. Here is the algorithm, with the paper's numbers of lines.
# At a step, the weights are $\mathbf w$ and the rate is $\eta$; records have the losses $L_i$ and gradients $\mathbf g_i$.
#
# | Line | What it does | Here |
# | ---: | --- | --- |
# | 1 | start with the rate $\eta = 10^{-4}$ and the threshold $R_l = 1$ | |
# | 2 | compute the loss of each record of a random batch, at $\mathbf w$ | section 1 |
# | 3 | their mean is the loss of the batch | |
# | 4 | differentiate; clip each gradient, sum, add noise, divide by $B$: the private gradient $\mathbf m$ | section 2 |
# | 5 | any optimizer makes a direction $\mathbf G$ of $\mathbf m$; here $\mathbf G = \mathbf m$ | section 4 |
# | 6 | at every $K$-th step: | section 3 |
# | 7 | compute the losses at $\mathbf w + \eta\mathbf G$ and $\mathbf w - \eta\mathbf G$ also | |
# | 8 | clip each of the three sets of losses at the loss released last ($R_l$), sum, add noise, divide by $B$ | |
# | 9 | lay a parabola through the three | |
# | 10 | take its slope and its curvature | |
# | 11 | set $\eta$ to slope over curvature, where the parabola has its bottom | |
# | 13 | move: $\mathbf w \leftarrow \mathbf w - \eta\mathbf G$ | section 4 |
#
# Section 5 puts them together. What stands under a heading *Answer* is folded away: say what you expect before you open it.

# %% tags=["parameters"]
profile = "laptop"  # how large: smoke, laptop, gpu or paper; all the same here
records = 400  # N
rate = 0.25  # q: probability with which a record enters a batch
sigma = 1.0  # noise multiplier of the gradient
sigma_loss = 3.0  # of each loss
steps = 60  # T
seed = 0  # of the problem and its noise; a real run has a secret one

# %%
from importlib.util import find_spec

if find_spec("hyfreedp"):  # it notices a mistyped parameter, and has our style of figures; not needed before section 5
    from hyfreedp.experiments.book.parameters import begin

    begin(globals(), "02_private_step")

# %%
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown, display

plt.rcParams["figure.constrained_layout.use"] = True

# %% [markdown]
# ## 1. The problem
#
# A straight line through noisy points. It has two parameters $\mathbf w$: slope and intercept. The loss of a record is half its squared error. A few records are far off the line, as real ones are.

# %%
rng = np.random.default_rng(seed)
x = np.stack([rng.standard_normal(records), np.ones(records)], axis=1)
y = x @ np.array([2.0, 1.0]) + 0.5 * rng.standard_t(3, records)
B = rate * records  # expected size of a batch


def losses_at(w, batch):
    """Of each record, shape (B,)."""
    return 0.5 * (x[batch] @ w - y[batch]) ** 2


def gradients_at(w, batch):
    """A row for each record, shape (B, 2)."""
    return (x[batch] @ w - y[batch])[:, None] * x[batch]


# %% [markdown]
# ## 2. Clip, sum, noise
#
# The sum of gradients shows every record that is in it, and one far-off record moves it as far as it likes. So each gradient is divided by its own length plus 0.01. This is *automatic clipping*. Then all are
# shorter than 1. The 0.01 matters for very short gradients alone: without it even a gradient of pure rounding error would get length 1, and a gradient of zero would be 0/0.
#
# Now one record more or less moves the sum by at most 1: that is its *sensitivity*. Noise with a standard deviation of $\sigma$ times the sensitivity hides it, as it hid one record of a count
# in notebook 00. Last, the sum is divided by the *expected* batch size $B = qN$; the true size would tell how many came. These are lines 2 to 4 of Algorithm 1.

# %%
w = np.array([0.0, 0.0])
batch = rng.random(records) < rate  # a Poisson sample: each record on its own
gradients = gradients_at(w, batch)
norms = np.linalg.norm(gradients, axis=1, keepdims=True)
clipped = gradients / (norms + 0.01)
total = clipped.sum(axis=0)
private = (total + sigma * rng.standard_normal(2)) / B

assert np.linalg.norm(clipped, axis=1).max() < 1  # the sensitivity
print(f"batch of {batch.sum()}; mean of clipped gradients {total / B}, the private one {private}")

# %% [markdown]
# **Predict first:** the longest gradient is many times as long as the median one. Which share of all the length is its own, before clipping and after?

# %% [markdown]
# ### Answer

# %% figure="02_private_step" shows="The per-record gradients of one batch as arrows, before and after they are normalised." claim="Alg. 1, lines 2 to 4: per-sample gradients are clipped, summed and noised."
share = norms.max() / norms.sum()
tenth = np.sort(norms.ravel())[-len(norms) // 10 :].sum() / norms.sum()
figure, axes = plt.subplots(1, 2, figsize=(9, 3.8))
titles = f"Raw: the longest tenth has {tenth:.0%} of all length", "Clipped: none is longer than 1"
for axis, arrows, title in zip(axes, (-gradients, -clipped), titles, strict=True):
    axis.quiver(*np.zeros((2, len(arrows))), *arrows.T, angles="xy", scale_units="xy", scale=1, width=0.004, alpha=0.4)
    limit = 1.1 * abs(arrows).max()
    axis.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")
    axis.set(xlabel="step of the slope (−gradient)", ylabel="step of the intercept")
    axis.set_title(title)
findings = [
    f"the longest of {len(norms)} gradients is {norms.max() / np.median(norms):.1f} times the median one: {share:.0%} of all length; the longest tenth has {tenth:.0%}",
    f"clipped, each has at most {1 / len(norms):.1%}",
]
print(*findings, sep="\n")
plt.show()

# %% [markdown]
# ## 3. Fit: a rate from three private losses
#
# How far should the step go? The paper *probes*: it measures the loss here, a step ahead and a step behind, along the private gradient. Each record's loss is cut to $[0, R_l]$, so that it moves a
# sum by $R_l$ at most. The sum gets noise of $\sigma_l R_l$. A parabola goes through the three points. With slope $b$ downhill and curvature $a$ its bottom is at the distance $\eta = b/a$ (lines 6
# to 11).
#
# Below are three thresholds: one that cuts hardly anything, one that cuts the largest losses, and one that cuts many.
#
# **Predict first:** will the noisy parabola still have its bottom near the true one?

# %% [markdown]
# ### Answer

# %%
eta = 2.0
places = (eta, 0.0, -eta)  # ahead, here, behind
raw = np.array([losses_at(w - s * private, batch) for s in places])


def fit(three, eta):
    """Slope b and curvature a of the parabola c - b x + a x^2 / 2 through losses at eta, 0 and -eta."""
    ahead, here, behind = three
    return (behind - ahead) / (2 * eta), (ahead - 2 * here + behind) / eta**2


slope, curvature = fit(raw.sum(axis=1) / B, eta)
print(f"raw losses: bottom at {slope / curvature:.1f}")
released, bent = {}, {}
for R in (60.0, 20.0, 4.0):
    cut = np.minimum(raw, R).sum(axis=1) / B
    released[R] = cut + sigma_loss * R / B * rng.standard_normal((1000, 3))
    slopes, curvatures = fit(released[R].T, eta)
    low, high = np.percentile(slopes / curvatures, [25, 75])
    bent[R] = np.mean(curvatures < 0)
    slope, curvature = fit(cut, eta)
    print(
        f"R_l = {R:2.0f}: bottom at {slope / curvature:5.1f}; with noise half of the draws lie from {low:5.1f} to {high:4.1f}"
    )

# %% figure="02_private_step_parabolas" shows="The parabola through three raw losses of one batch, and 30 through clipped and noised ones, at three thresholds." claim="Alg. 1, lines 7 to 11: three private losses give the rate."
far, exact = np.linspace(-2 * eta, 3 * eta, 60), raw.sum(axis=1) / B
figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True)
for axis, (R, draws) in zip(axes, released.items(), strict=True):
    for three in draws[:30]:
        axis.plot(far, np.polyval(np.polyfit(places, three, 2), far), color="C1", linewidth=0.7, alpha=0.5)
    axis.plot([], [], color="C1", label="30 noisy ones")
    axis.plot(far, np.polyval(np.polyfit(places, exact, 2), far), "k--", label="through raw losses")
    axis.plot(places, exact, "ko", label="raw losses")
    axis.plot(places, np.minimum(raw, R).sum(axis=1) / B, "C0s", label="clipped")
    axis.set(xlabel=r"distance along $-\mathbf{G}$", ylim=(-2, 3 * exact.max()))
    axis.set_title(f"$R_l$ = {R:.0f}: {bent[R]:.0%} bend the wrong way")
axes[0].set_ylabel("mean loss")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
findings = [f"R_l = {R:.0f}: {share:.0%} of the noisy parabolas bend the wrong way" for R, share in bent.items()]
plt.show()

# %% [markdown]
# At the default no threshold is right. A large $R_l$ cuts nothing, and its noise drowns the parabola: slope and curvature are *differences* of losses, and the noise is that of whole losses. A small $R_l$ has
# little noise. But it cuts the highest of the three losses most, until the parabola bends the wrong way and its bottom is a top. A distance below zero would be a step uphill. Notebook 01 is about
# this trade-off, notebook 04 about a way out.

# %% [markdown]
# ## 4. Update, and again
#
# Here is a whole private run, with a fixed rate. Each step moves against the private gradient. (What it costs, section 6 says.)
#
# **Predict first:** the gradients are all made equally long, and noise is added at every step. Where does the run end?

# %% [markdown]
# ### Answer

# %%
path, fixed_rate = [w], 2.0 / steps**0.5
for _ in range(steps):
    batch = rng.random(records) < rate
    gradients = gradients_at(path[-1], batch)
    clipped = gradients / (np.linalg.norm(gradients, axis=1, keepdims=True) + 0.01)
    released = (clipped.sum(axis=0) + sigma * rng.standard_normal(2)) / B
    path.append(path[-1] - fixed_rate * released)
path = np.array(path)
best = np.linalg.lstsq(x, y, rcond=None)[0]
away = np.linalg.norm(path - best, axis=1)
findings = [
    f"the run ends {away[-1]:.2f} from least squares; its last ten steps are on average {away[-10:].mean():.2f} away, {away[0]:.2f} at the start"
]
print(*findings)

# %% figure="02_private_step_path" shows="The weights of a private run of two parameters, over the contours of the loss, and their distance from the optimum." claim="Alg. 1, line 5: any optimizer takes the private gradient."
slopes, intercepts = np.meshgrid(np.linspace(-0.5, 3, 60), np.linspace(-0.5, 2, 60))
everyone = np.ones(records, dtype=bool)
heights = [losses_at(np.array(pair), everyone).mean() for pair in zip(slopes.flat, intercepts.flat, strict=True)]
figure, (axis, right) = plt.subplots(1, 2, figsize=(10, 4))
axis.contour(slopes, intercepts, np.reshape(heights, slopes.shape), levels=12, colors="0.7", linewidths=0.8)
axis.plot(*path.T, ".-", color="C0", label="the private run")
axis.plot(*best, "k*", markersize=12, label="least squares, not private")
axis.set(xlabel="slope", ylabel="intercept", title=f"The run ends {away[-1]:.2f} from the optimum")
axis.legend(fontsize="small")
right.plot(away, ".-", color="C0")
right.set(
    xlabel="step",
    ylabel="distance from least squares",
    ylim=(0, None),
    title="Noise never stops: the run stays near, not at it",
)
plt.show()

# %% [markdown]
# Noise never stops, so the run stays near the optimum and never at it.

# %% [markdown]
# ## 5. The whole of Algorithm 1
#
# Now a rate that finds itself: ten steps, each with a probe. Line by line it is what you have seen, but for the first rate: it is 2 here, since from $10^{-4}$ ten steps with guards would hardly move. Two lines have versions.
#
# * *Line 11* as printed sets $\eta = b/a$, whatever the signs. The authors' own code has guards: it takes $b/a$ from a valley ahead only, at most halves or doubles the rate, and goes a tenth of the way there.
# * *Line 8*, the next threshold: as printed the loss released last; "in practice" (§ 4.1) the sum of the three. (Either threshold is kept within 0.1 and 20, which is ours.)
#
# **Predict first:** which of the two runs comes closer to the optimum in ten steps, the printed one or the one with guards?

# %%
batches = rng.random((10, records)) < rate  # line 2, a row for each step
z = rng.standard_normal((10, 5))  # all noise: two numbers for the gradient, three for the losses


def printed(slope, curvature, eta):
    """Line 11."""
    return slope / curvature


def guarded(slope, curvature, eta):
    """The authors' code."""
    there = min(max(slope / curvature, eta / 2), 2 * eta) if slope > 0 and curvature > 0 else eta
    return 0.9 * eta + 0.1 * there


def algorithm_1(rule, next_threshold, eta=2.0, R=1.0):
    """Of each step: weights before it, private gradient, three private losses, R_l, old rate, slope, curvature, new rate."""
    w, rows = np.zeros(2), []
    for batch, noise in zip(batches, z, strict=True):
        gradients = gradients_at(w, batch)
        clipped = gradients / (np.linalg.norm(gradients, axis=1, keepdims=True) + 0.01)
        m = (clipped.sum(axis=0) + sigma * noise[:2]) / B  # line 4
        raw = np.array([losses_at(w - s * m, batch) for s in (eta, 0.0, -eta)])  # line 7
        three = (np.minimum(raw, R).sum(axis=1) + sigma_loss * R * noise[2:]) / B  # line 8
        slope, curvature = fit(three, eta)  # lines 9 and 10
        before, eta = eta, rule(slope, curvature, eta)  # line 11
        rows.append((w, m, three, R, before, slope, curvature, eta))
        R = np.clip(next_threshold(three), 0.1, 20)
        w = w - eta * m  # line 13
    return rows, w


# %% [markdown]
# ### Answer

# %%
runs = {
    "as printed": algorithm_1(printed, lambda three: three[1]),
    "with guards": algorithm_1(guarded, sum),
}
paths = {name: np.array([row[0] for row in rows] + [end]) for name, (rows, end) in runs.items()}
findings = [
    f"{name}: the rate goes from {rows[0][4]:g} to {rows[-1][7]:.2g}, and the run ends {np.linalg.norm(end - best):.2f} from the optimum"
    for name, (rows, end) in runs.items()
]
print(*findings, sep="\n")

# %% figure="02_private_step_algorithm" shows="Ten steps of Algorithm 1 over the contours of the loss, and of each step the three private losses, their parabola and the new rate." claim="Algorithm 1, whole."
figure = plt.figure(figsize=(12, 5))
axes = figure.subplot_mosaic([["path", "path", 0, 1, 2, 3, 4], ["path", "path", 5, 6, 7, 8, 9]])
axes["path"].contour(slopes, intercepts, np.reshape(heights, slopes.shape), levels=12, colors="0.8", linewidths=0.8)
for (name, way), mark in zip(paths.items(), ("s--", "o-"), strict=True):
    axes["path"].plot(*way.T, mark, markersize=4, label=name)
axes["path"].plot(*best, "k*", markersize=12, label="least squares, not private")
axes["path"].set(xlim=(-0.6, 3), ylim=(-0.6, 2), xlabel="slope", ylabel="intercept")
off = [f"{np.linalg.norm(way[-1] - best):,.2f}" for way in paths.values()]
axes["path"].set_title(f"Ends {off[0]} from the optimum\nas printed, {off[1]} with guards")
axes["path"].legend(fontsize="small", loc="upper left")
for t, (_, _, three, R, before, slope, curvature, after) in enumerate(runs["with guards"][0]):
    along = np.linspace(-1.2 * before, 1.5 * before, 50)
    axes[t].plot(along, three[1] - slope * along + curvature * along**2 / 2, color="C1")
    axes[t].errorbar((before, 0, -before), three, sigma_loss * R / B, fmt="ko", markersize=4, capsize=2)
    axes[t].axvline(after, color="C2", linestyle=":")
    axes[t].set_title(f"step {t}: η {before:.2f} → {after:.2f}", fontsize="small")
    axes[t].tick_params(labelsize="x-small")
figure.supxlabel(
    "the ten probes of the run with guards: private losses (± 1 sd) at η, 0 and −η along $-\\mathbf{G}$, their parabola, the new rate (dotted)",
    fontsize="small",
)
plt.show()

# %% [markdown]
# As printed the rate can change its sign, where the step goes uphill, and it can collapse: after that the probe compares losses at places so close together that it sees noise alone, and there is no way back. With guards it
# moves little, whatever the parabola says. So the first rate decides. Notebook 04 asks what can be learned from such a probe at all.

# %% [markdown]
# ## 6. The same from the library
#
# The code of this section is optional; exercise 2 needs the text at its end. [`reference.py`](../hyfreedp/reference.py) is Algorithm 1 for any model in PyTorch, one sample at a time. All else in the package makes the same numbers faster. It draws noise from a secret key; here it gets *our* noise, and must give our numbers.

# %%
if find_spec("hyfreedp"):
    from types import SimpleNamespace

    import torch

    from hyfreedp import reference

    def replayed(purpose, t):
        """Our noise in place of that of a secret key."""
        mine = torch.tensor(z[t, :2] if purpose == "gradient" else z[t, 2:])
        return SimpleNamespace(add_noise=lambda sums, std: sums[0].add_(std * mine))

    noise = SimpleNamespace(child=replayed)
    split = SimpleNamespace(
        probe="losses",
        steps=10,
        sigma_loss=sigma_loss,
        is_probe_step=lambda t: True,
        gradient_noise_multiplier=lambda t: sigma,
    )
    chosen = {"as printed": (reference.literal, lambda three: three[1]), "with guards": (reference.gen, sum)}

# %%
if find_spec("hyfreedp"):
    for name, (rule, next_threshold) in chosen.items():
        model = torch.nn.Linear(2, 1, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        theirs = reference.train(
            model,
            torch.optim.SGD(model.parameters()),
            lambda model, record: 0.5 * (model(record[0])[0, 0] - record[1][0]) ** 2,
            [[torch.tensor(x[batch]), torch.tensor(y[batch])] for batch in batches],
            split=split,
            B=B,
            noise=noise,
            eta=2.0,
            rule=rule,
            next_threshold=next_threshold,
        )
        for t, (row, released) in enumerate(zip(runs[name][0], theirs, strict=True)):
            mine = row[3], row[5], row[6], row[7]  # R_l, slope, curvature, the new rate
            library = [released[key] for key in ("loss_threshold", "slope", "curvature", "eta")]
            print(
                f"{name}, step {t}: by hand",
                *(f"{v:10.3g}" for v in mine),
                "  library",
                *(f"{v:10.3g}" for v in library),
            )
            assert np.allclose(mine, library, rtol=1e-6)
        assert np.allclose(model.weight.detach().numpy(), runs[name][1], rtol=1e-6)

# %% [markdown]
# How much noise does a budget of $\varepsilon = 3$ need? Gradient and losses come from one batch. So the accountant counts them as *one* release, in which a record changes the gradient and three
# losses. Evidence adds up as in notebook 00, section 4: noises $\sigma_1, \sigma_2, \dots$ that are seen together on one record are as revealing as one $\sigma$ with
# $\sigma^{-2} = \sigma_1^{-2} + \sigma_2^{-2} + \dots$ Each of the three losses counts, since all can move by their whole threshold. Notebook 03 is about that. Here every fifth step probes (`interval=5`), and has a little more noise on its gradient to pay for it.

# %%
if find_spec("hyfreedp"):
    from hyfreedp import calibrate_noise, epsilon
    from hyfreedp.accounting.accountants import composed_epsilon

    budget = {"target_epsilon": 3.0, "target_delta": 1e-4, "sample_rate": rate, "steps": steps}
    split = calibrate_noise(**budget, probe="losses", interval=5, gamma=1.02)
    print(
        f"sigma_g = {split.sigma_gradient:.2f}, on steps with a probe {split.sigma_gradient_probe:.2f}; sigma_l = {split.sigma_loss:.1f}"
    )
    assert epsilon(split) <= 3.0
    spent = composed_epsilon([(sigma, steps)], sample_rate=rate, delta=1e-4, accountant="pld")
    print(
        f"the run of section 4 had sigma_g = {sigma:g} and no probe: its epsilon is {spent:.1f}; at epsilon = 3 it would bear {split.sigma_gradient / sigma:.1f} times the noise"
    )

# %% [markdown]
# ## 7. A step to play with
#
# Records are drawn, their gradients clipped, summed and noised, a parabola is fitted, the weights move. Each part has a slider. Which of them turns the parabola over, and which scatters it?
#
# <details><summary>Answer</summary>
#
# A low $R_l$ turns it over: it cuts the highest loss most. The noise ($\sigma$) scatters it, and does so more where $R_l$ is high or $q$ small (section 3).
#
# </details>

# %%
if find_spec("hyfreedp"):
    from hyfreedp.experiments.book.sliders import private_step

    display(private_step())

# %% [markdown]
# ## Exercises
#
# Put your answer in place of `None` and run the cell; it says whether you are right.


# %%
def check(answer, code):
    """Say whether an answer is within 2 % of the right one, which is written so that nobody reads it by accident."""
    right = float(bytes.fromhex(code))
    wrong = "**Not yet.** It is too " + ("high." if answer and answer > right else "low.")
    said = "**Right.**" if answer and abs(answer / right - 1) < 0.02 else wrong
    display(Markdown(said if answer else "*No answer yet: put yours in place of None, and run this cell again.*"))


# %% [markdown]
# 1. A gradient has norm 0.02. How long is it after automatic clipping?

# %%
length = None
check(length, "302e36363637")

# %% [markdown] tags=["solution"]
# *Solution.* $0.02 / 0.03 = 2/3$: only gradients as short as the 0.01 are left short.

# %% tags=["solution"]
length = 0.02 / (0.02 + 0.01)
check(length, "302e36363637")

# %% [markdown]
# 2. Gradient and three losses come from one batch, with $\sigma_g = 1.1$ and $\sigma_l = 12$. Together they are as revealing as one release with which noise multiplier? (Section 6 has the rule.)

# %%
together = None
check(together, "312e303836")

# %% [markdown] tags=["solution"]
# *Solution.* The evidence adds up (section 6): $\sigma^{-2} = \sigma_g^{-2} + 3\sigma_l^{-2}$, since each of three losses can move by its whole threshold. So $\sigma = 1.086$: the probe is nearly free.

# %% tags=["solution"]
together = (1.1**-2 + 3 * 12**-2) ** -0.5
check(together, "312e303836")

# %% [markdown]
# 3. Suppose the sum in section 2 were divided by the true batch size in place of $B$. What could an attacker learn who knows all other records? Take nine clipped gradients of length 1 that point one way. A tenth joins
#    them, of length 1 too, that points the other way. How many times as far as with $B = 10$ does the mean move?

# %%
farther = None
check(farther, "32")

# %% [markdown] tags=["solution"]
# *Solution.* The mean goes from $9/9$ to $8/10$, a way of 0.2. With $B = 10$ it goes from $9/10$ to $8/10$, half as far. So an attacker learns more about whether the record was in the batch than the noise is meant to hide. The divisor changes by one, without noise, and the noise itself is divided by another number:
# over the many weights of a real model its scatter alone tells which.

# %% tags=["solution"]
farther = (9 / 9 - 8 / 10) / (9 / 10 - 8 / 10)
check(farther, "32")
