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
# # A primer: what differential privacy is
#
# **After this notebook you can**
#
# * say who is protected: a record is not a person,
# * say what a mechanism, its neighbours, $\varepsilon$ and $\delta$ are, and read them off a picture,
# * attack a released number, win without noise, and know how often you can win with it,
# * say what many releases cost together, how two accountants find out, and why a random batch helps,
# * protect a person who has many records, in two ways, and say what each costs.
#
# Every mechanism is a few lines of NumPy that you can change. NumPy, SciPy and matplotlib are enough. The library comes last, is not needed, and must agree.
#
# *The paper*, in this course, is *Towards hyperparameter-free optimization with differential privacy* (HyFreeDP, ICLR 2025). Words are in the [glossary](../docs/glossary.md).
# What stands under a heading *Answer* is folded away. Say what you expect before you open it.

# %% tags=["parameters"]
profile = "laptop"  # how large: smoke, laptop, gpu or paper; all the same here
sigma = 1.0  # noise multiplier: standard deviation of the noise, over what one record can change
steps = 10  # releases that are added up in section 4
rate = 0.1  # probability with which a record enters a batch in section 5

# %%
from importlib.util import find_spec

if find_spec("hyfreedp"):  # it notices a mistyped parameter, and has our style of figures; nothing else here needs it
    from hyfreedp.experiments.book.parameters import begin

    begin(globals(), "00_primer")

# %%
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown, display
from scipy.stats import norm

plt.rcParams["figure.constrained_layout.use"] = True
rng = np.random.default_rng(0)

# %% [markdown]
# ## 1. Who is protected
#
# Here are ten of the 1,797 digits that come with scikit-learn. **Thirteen people** wrote them, so each wrote about 138.

# %%
if find_spec("sklearn"):  # which has the pictures
    from sklearn.datasets import load_digits

    digits = load_digits()
    figure, axes = plt.subplots(1, 10, figsize=(9, 1.2))
    for axis, image, label in zip(axes, digits.images, digits.target, strict=False):
        axis.imshow(image, cmap="gray_r")
        axis.set_title(int(label))
        axis.axis("off")
    plt.show()

# %% [markdown]
# Differential privacy hides one *unit*. If the unit is a *record*, here one image, then one image more or less must hardly show. A person with 138 images is another matter: all of
# them together can move a result 138 times as far as one. The noise that hides an image does not hide the hand that wrote it.
#
# So the first question about any promise of privacy is: of what unit? In this course it is one record, unless it says otherwise. Section 6 protects a person who has many.

# %% [markdown]
# ## 2. A mechanism, its neighbours, and an attack
#
# A *mechanism* is a randomised program whose output is released. Ours counts: how many of the records say yes? One record changes the count by at most 1.
# Two data sets are *neighbours* if one has one record more than the other.
#
# An attacker knows all records but one, and asks: is that one in the data, saying yes? The count without noise answers at once. So we add
# normal noise. Its standard deviation is $\sigma$ times what one record can change. This $\sigma$ is the *noise multiplier*.
#
# The attacker says "in" if the released count lies above a threshold. Below we play the game 20,000 times with the record and as often without. The *advantage* is the share of right "in"
# less the share of false "in": 0 for a coin, 1 for certainty.

# %%
others = rng.random(500) < 0.3  # records that say yes; the attacker knows them
counts = {"out": others.sum(), "in": others.sum() + 1}
released = {name: count + sigma * rng.standard_normal(20_000) for name, count in counts.items()}

threshold = (counts["in"] + counts["out"]) / 2
caught = {name: np.mean(numbers > threshold) for name, numbers in released.items()}
advantage = caught["in"] - caught["out"]
print(
    f'says "in" of {caught["in"]:.0%} that are in, and of {caught["out"]:.0%} that are not: advantage {advantage:.2f}'
)

# %% [markdown]
# **Predict first:** is there a cleverer threshold, or a cleverer attack, with a larger advantage?
#
# <details><summary>Answer</summary>
#
# No. Section 3 computes the largest advantage that any attack can have. The threshold in the middle has it already.
#
# </details>

# %% [markdown]
# ## 3. $\varepsilon$ and $\delta$, in a picture
#
# How much likelier is an output with the record than without it? The logarithm of that ratio is the *privacy loss* of the output. Its unit is the *nat*, as always with the natural logarithm: a
# loss of 1 nat means $e = 2.7$ times as likely.
#
# It would be good if the loss never exceeded some $\varepsilon$. Normal noise cannot promise that: far out in the tail, an output can be any number of times likelier in one world than in the other.
# So a small probability $\delta$ is conceded. It must be far below one over the number of records; else publishing one record at random would pass. A
# mechanism $M$ is $(\varepsilon, \delta)$-private if
#
# $$ P(M(D) \in S) \le e^\varepsilon P(M(D') \in S) + \delta \quad\text{for all sets of outputs } S \text{ and all neighbours } D, D'. $$
#
# The worst set $S$ is where the loss exceeds $\varepsilon$. For our count it is all outputs above some value, since the loss of an output $x$ (less the attacker's own count) grows along a straight line: it is $(x - 1/2)/\sigma^2$. Then $\delta$ is an area: what lies under the
# curve "with the record" and above $e^\varepsilon$ times the curve "without". At $\varepsilon = 0$ it is the largest difference of the two probabilities of $S$. So it is the largest advantage that any attack can have.
#
# **Predict first:** will the area at $\varepsilon = 1$ be nearer to a half, a tenth or a hundredth?

# %% [markdown]
# ### Answer


# %%
def delta_of(eps, noise=sigma):
    """Of two normals a distance 1 apart: the weight of P above e^eps Q."""
    least = noise**2 * eps + 0.5  # where the loss is eps
    return norm.sf(least, 1, noise) - np.exp(eps) * norm.sf(least, 0, noise)


outputs = np.linspace(-4 * sigma, 1 + 4 * sigma, 400)
with_it, without = norm.pdf(outputs, 1, sigma), norm.pdf(outputs, 0, sigma)
loss = np.log(with_it / without)
findings = [
    f"noise of {sigma:g}: delta is {delta_of(0.0):.2f} at epsilon 0, {delta_of(1.0):.3f} at 1 and {delta_of(4.0):.1e} at 4",
    f"the best attack has an advantage of {delta_of(0.0):.2f}, which is delta at epsilon 0; ours had {advantage:.2f}",
]
print(*findings, sep="\n")

# %% figure="00_primer" shows="Two normals, e times one of them and the part of the other above it; delta as a function of epsilon." claim="§ 2: the definition of differential privacy."
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
left.plot(outputs, with_it, color="C0", label="with the record")
left.plot(outputs, without, color="C1", linestyle="--", label="without it")
left.plot(outputs, np.e * without, color="C1", linestyle=":", linewidth=1.2, label="e times the dashed one")
left.fill_between(
    outputs, with_it, np.e * without, where=loss > 1, color="C0", alpha=0.3, label=r"$\delta$ at $\varepsilon$ = 1"
)
left.set(xlabel="released count minus the attacker's own", ylabel="density", ylim=(0, 2.8 * with_it.max()))
left.set_title("δ at ε = 1: where 'with' rises above e times 'without'")
left.legend(loc="upper right", fontsize="small")
epsilons = np.linspace(0, 6, 200)
right.plot(epsilons, delta_of(epsilons), color="C0")
right.set(yscale="log", ylim=(1e-8, 1), xlabel=r"$\varepsilon$ (nats)", ylabel=r"$\delta$")
right.set_title("One mechanism keeps many promises (ε, δ)")
plt.show()

# %% [markdown]
# ## 4. Many releases
#
# Training releases a noisy sum at every step. The attacker adds up the evidence. Probabilities of independent releases multiply, so their losses add up.
#
# With the record in the data the loss of one release is itself normal, with mean $1/2\sigma^2$ and standard deviation $1/\sigma$. So the loss of $T$ releases is normal with mean $T/2\sigma^2$
# and standard deviation $\sqrt T/\sigma$. That is the loss of *one* release with noise $\sigma/\sqrt T$.
#
# Who computes $\varepsilon$ from many releases is called an *accountant*. There are two kinds here.
#
# * **PLD** (privacy loss distribution) adds up the losses themselves. It reads off the $\varepsilon$ beyond which only $\delta$ is left.
# * **RDP** (Rényi differential privacy) keeps one number in place of the whole distribution: an average of the loss in which large losses weigh more. The average is over releases made *with* the record:
#   $\log\mathbb E\,e^{(\alpha - 1)\,\text{loss}}/(\alpha - 1)$. The larger the *order* $\alpha > 1$, the more large losses weigh. Here it is $T\alpha/2\sigma^2$.
#   These averages simply add up, so RDP is easy. And each bounds how often the loss is large, by Markov's inequality: $P(\text{loss} > \varepsilon) \le e^{-(\alpha - 1)\varepsilon}\;\mathbb E\,e^{(\alpha - 1)\,\text{loss}}$.
#   Set the right side to $\delta$ and solve for $\varepsilon$: $T\alpha/2\sigma^2 + \log(1/\delta)/(\alpha - 1)$. Every order gives such a bound, and the lowest one counts.
#
# **Predict first:** do ten releases cost ten times the $\varepsilon$ of one?

# %% [markdown]
# ### Answer

# %%
from scipy.optimize import brentq


def epsilon_by_hand(times):
    """PLD for normal noise on all records: the releases are one with noise sigma / sqrt(times)."""
    return brentq(lambda eps: delta_of(eps, sigma / times**0.5) - delta, 0, 700)


delta = 1e-5
one, many = epsilon_by_hand(1), epsilon_by_hand(steps)
losses = np.linspace(-5, 25, 600) / sigma
orders = np.linspace(1.5, 20, 200)
rdp = steps * orders / (2 * sigma**2) + np.log(1 / delta) / (orders - 1)
findings = [
    f"one release costs {one:.2f} at delta = {delta:g}, {steps} cost {many:.2f}: {many / one:.1f} times as much",
    f"RDP's best order says {rdp.min():.2f}",
]
print(*findings, sep="\n")

# %% figure="00_primer_composition" shows="The distribution of the privacy loss of one and of many releases; the bounds of RDP over its orders." claim="§ 2: composition of mechanisms."
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
for count, look in ((1, {"color": "C1", "linestyle": "--"}), (steps, {"color": "C0"})):
    density = norm.pdf(losses, count / (2 * sigma**2), count**0.5 / sigma)
    left.plot(losses, density, label=f"{count} release{'s' * (count > 1)}", **look)
left.axvline(many, color="0.2", linestyle=":", label=rf"$\varepsilon$ = {many:.1f} at $\delta$ = {delta:g}")
left.set(xlabel="privacy loss (nats)", ylabel="density")
left.set_title(f"PLD: {steps} releases cost {many / one:.1f} times one")
left.legend(fontsize="small")
right.plot(orders, rdp, color="C2", label="bound by one order")
right.axhline(many, color="0.2", linestyle=":", label="PLD")
right.set(xlabel=r"order $\alpha$", ylabel=r"$\varepsilon$ (nats)", ylim=(0, 4 * many))
right.set_title(f"RDP: its lowest bound, {rdp.min():.1f}, is never below PLD")
right.legend(fontsize="small")
plt.show()

# %% [markdown]
# The mean of the loss grows with $T$, its spread with $\sqrt T$ alone. With much noise the spread is most of $\varepsilon$, so ten releases cost little more than
# $\sqrt{10}$ times one. With very little noise ($\sigma$ far below 0.1) the mean is most of it, and they cost nearly ten times.

# %% [markdown]
# ## 5. Random batches
#
# *Poisson sampling* throws a coin for each record: it enters the batch with probability $q$, whatever the others do. With probability $1 - q$ it is not even there. So the world with the record
# is a mixture, $(1 - q)\,N(0, \sigma^2) + q\,N(1, \sigma^2)$, against $N(0, \sigma^2)$ without it. Where an output $x$ was released, its loss is $\ell = \log\big(1 - q + q\,e^{(x - 1/2)/\sigma^2}\big)$.
#
# This loss is not normal, but its distribution is easy to write down: it grows with $x$, so $P(\text{loss} \le \ell) = P(x \le x(\ell))$. The losses of many releases add up. The distribution of a sum is a convolution, and
# the fast Fourier transform makes that a product. So here is a whole PLD accountant. (It compares "with" to "without". The other way round costs less here.)
# It reads $\delta$ off the losses: an output with the loss $\ell$ is $e^\ell$ times as likely with the record, so the area of section 3 is the mean of $\max(0, 1 - e^{\varepsilon - \ell})$ over outputs with the record.


# %%
def loss_distribution(releases, q, top):
    """Privacy losses of all releases together, as values, their weights, and the weight of what lies beyond ``top``.

    Of ``releases`` each is (noise, how many times). Losses are rounded up to a grid, by 0.01 in all at most.
    """
    step = 0.01 / sum(times for _, times in releases)
    losses = step * np.arange(-round(top / step), round(top / step))
    outputs = np.log(np.maximum((np.exp(losses) - (1 - q)) / q, 1e-300))  # (x - 1/2) / noise^2 where a loss is reached
    spectrum, beyond = 1.0, 0.0
    for noise, times in releases:
        x = noise**2 * outputs + 0.5
        below = (1 - q) * norm.cdf(x, 0, noise) + q * norm.cdf(x, 1, noise)
        spectrum = spectrum * np.fft.rfft(np.fft.ifftshift(np.diff(below, prepend=0.0))) ** times
        beyond += times * (1 - below[-1])
    return losses, np.fft.fftshift(np.fft.irfft(spectrum, len(losses))), beyond


def epsilon_of(releases, q, delta, top=60.0):
    """The least epsilon with E max(0, 1 - e^(epsilon - loss)) <= delta, which is the area of section 3 as a mean."""
    losses, weights, beyond = loss_distribution(releases, q, top)
    above = np.cumsum(weights[::-1])[::-1]
    curve = above - np.exp(losses) * np.cumsum((weights * np.exp(-losses))[::-1])[::-1] + beyond
    return losses[(curve <= delta) & (losses >= 0)][0]


# %% [markdown]
# **Predict first:** if every record enters a batch with probability 1/10, by how much does $\varepsilon$ fall: to a tenth?

# %% [markdown]
# ### Answer

# %%
top = min(20 + 4 * many, 700)
found = {
    "one release of all records": one,
    "one on a random batch": epsilon_of([(sigma, 1)], rate, delta, top),
    f"{steps} of all records": many,
    f"{steps} on random batches": epsilon_of([(sigma, steps)], rate, delta, top),
}
for name, value in found.items():
    print(f"{name:28} epsilon = {value:.3f} at delta = {delta:g}")
all_once, once, all_many, often = found.values()
print(
    f"a batch of a share {rate:g}: one release costs {once / all_once:.2f} of it, {steps} cost {often / all_many:.2f}"
)
assert abs(epsilon_of([(sigma, steps)], 1.0, delta, top) - many) < 0.02  # section 4 had it in closed form

# %% [markdown]
# Not to a tenth in general. Sampling takes most of the *typical* loss away, because the record is usually not there. But $\varepsilon$ at a small $\delta$ is about rare outputs, and a rare output can
# still give the record away. So the $\varepsilon$ of one release stays well above that share. Over many releases the losses average out, and sampling helps more.

# %% [markdown]
# ## 6. A person with many records
#
# Sections 2 to 5 hid one *record*. Let somebody have 30. Each of them is drawn by a coin of its own, so a batch holds none of them, or some, or rarely many. Training limits what one record adds to a sum: to one *clip* (notebook 02). So a sum moves by at most one clip
# for each of the 30 that the batch holds.

# %%
held = rng.binomial(30, rate, 20_000)  # how many of the 30 are in a batch
print(f"none in {np.mean(held == 0):.1%} of the batches, {held.mean():.1f} in the mean, {held.max()} at most")

# %% [markdown]
# There are two ways to hide all 30.
#
# * **Group privacy** goes on drawing records, and adds more noise. The library finds how much from how many of the 30 a batch holds, as counted above (`records_per_person=30`). Textbooks take a shorter way: a person's $\varepsilon$ is at most 30 times a record's, at a larger $\delta$.
#   Either way nobody may have more than 30, and whoever has most sets the noise for all.
# * **Owners** are drawn in place of records: `owners=` takes the id of a person for each record. All that a drawn person has, or at most `records_per_owner` of it, is one sample. Its loss is the mean of its records' losses, and its gradient is clipped
#   once. So a person moves a sum by at most one clip, however many records there are, and sections 2 to 5 hold word for word with "person" in place of "record".
#
# An example: GTSRB has 39,209 photographs of German traffic signs, taken from moving cars, about 30 of each of 1,307 signs. Let each sign be a person. A linear model learned which of 43 kinds of sign a photograph shows, from the records of 1,046 of these persons,
# in 60 steps, each on a quarter of the persons or records. (`python -m hyfreedp.experiments.studies.persons` made the record, which this cell reads if the library is there.)
#
# **Predict first:** a run is private at $\varepsilon = 3$ for a record. What is its $\varepsilon$ for a person with 30, at the same $\delta$: less than 90, 90, or more?

# %% [markdown]
# ### Answer

# %%
if find_spec("hyfreedp"):
    import pandas as pd

    from hyfreedp.experiments.store.paths import RESULTS
    from hyfreedp.experiments.studies import persons

    of_ways = persons.shares(pd.read_csv(RESULTS / "laptop" / "persons.csv"))
    record, owners, group = (of_ways.loc[(3.0, way)] for way in ("record", "owners", "records_per_person=30"))
    print(f"a record's epsilon of 3 is {record.epsilon_person:.0f} for a person with 30")
    equal, unequal = "accuracy, equal", "accuracy, unequal"
    print(
        f"where all have 30: accuracy {record[equal]:.0f} % at 3 for a record, {owners[equal]:.0f} % for a person (owners)"
    )
    print(f"where few have 30: {owners[unequal]:.0f} % by owners, {group[unequal]:.0f} % by group privacy")
    display(of_ways.round(1))

# %% [markdown]
# Far more. Textbooks do say 90, but at a $\delta$ of $10^{-5}(e^{90} - 1)/(e^3 - 1)$. That is far above 1, so it promises nothing.
#
# In the table, *noise* is the standard deviation of what is added to each coordinate of the mean gradient, in thousandths of a clip. *Equal*: everyone has 30 records. *Unequal*: one person in ten has 30, the others have 3. Accuracy is in percent. The lines: `owners, 4` takes at most four records of a drawn person (`records_per_owner=4`); `epsilon / 30` is the textbooks' way, with a record's $\varepsilon$ so small
# that 30 times it is the person's; `record` protects a record alone.
#
# * **A person is dear.** There are only 1,046 persons, and each weighs 30 times as much as a record. So a person's promise costs much accuracy (compare the lines `record` and `owners`).
# * **Where everyone has 30, all ways are alike.** Group privacy even needs a little less noise. With a coin for each, the 30 are rarely in a batch together.
# * **Where persons differ, owners win.** They lose little by it. Group privacy adds the noise for 30 to everyone, and most people have only three records to set against it.
#
# So: if you know whose each record is, say so.

# %% [markdown]
# ## 7. The library says the same
#
# This cell is optional. It asks `hyfreedp` for what was computed by hand above.

# %%
if find_spec("hyfreedp"):
    from hyfreedp.accounting.accountants import composed_epsilon

    for (name, by_hand), (times, q) in zip(
        found.items(), [(1, 1.0), (1, rate), (steps, 1.0), (steps, rate)], strict=True
    ):
        theirs = composed_epsilon([(sigma, times)], sample_rate=q, delta=delta, accountant="pld")
        print(f"{name:28} by hand {by_hand:7.3f}   library {theirs:7.3f}")
        assert abs(by_hand - theirs) < 0.02
    by_rdp = composed_epsilon([(sigma, steps)], sample_rate=rate, delta=delta, accountant="rdp")
    print(f"{steps} on random batches, by RDP: {by_rdp:.3f}")

# %% [markdown]
# The next notebooks release more than a count: a clipped loss (01), a gradient and a rate (02), all from one budget (03).

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
# 1. How large is the largest advantage that any attack can have if $\sigma = 2$?

# %%
largest = None
check(largest, "302e31393734")

# %% [markdown] tags=["solution"]
# *Solution.* $\delta(0) = \Phi(1/2\sigma) - \Phi(-1/2\sigma) = 2\Phi(1/4) - 1 = 0.20$. Twice the noise does not halve it exactly: 0.38 at $\sigma = 1$.

# %% tags=["solution"]
largest = norm.cdf(0.25) - norm.cdf(-0.25)
check(largest, "302e31393734")

# %% [markdown]
# 2. A hundred releases of all records shall reveal no more than one with $\sigma = 1$. Which $\sigma$ does each need?

# %%
each = None
check(each, "3130")

# %% [markdown] tags=["solution"]
# *Solution.* The evidence of $T$ releases is that of one with noise $\sigma/\sqrt T$, so $\sigma = \sqrt{100} = 10$.

# %% tags=["solution"]
each = 100**0.5
check(each, "3130")

# %% [markdown]
# 3. How many times as much as one release of all records do ten cost at $\sigma = 0.5$? (Set `sigma` and run the notebook again.) Section 4 says why it is more than at $\sigma = 1$.

# %%
times_one = None
check(times_one, "342e363232")

# %% [markdown] tags=["solution"]
# *Solution.* With less noise the mean of the loss, which grows with $T$, is more of $\varepsilon$. The limit of ten is far.

# %% tags=["solution"]
half = [brentq(lambda eps, noise=0.5 / times**0.5: delta_of(eps, noise) - delta, 0, 700) for times in (1, 10)]
times_one = half[1] / half[0]
print(f"{half[1]:.1f} against {half[0]:.1f}: {times_one:.1f} times")
check(times_one, "342e363232")
