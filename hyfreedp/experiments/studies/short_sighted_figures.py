"""Figure and findings of notebook 04 on the noisy quadratic, see ``short_sighted``."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from hyfreedp.experiments.store import plots
from hyfreedp.experiments.studies.short_sighted import CONSTANT, GREEDY, LINEAR, turning_points

STYLES = {GREEDY: plots.STYLES["paper"], CONSTANT: plots.STYLES["best"], LINEAR: plots.STYLES["robust"]}
VOTES = [plots.STYLES[name] for name in ("reference", "worst", "line_search")]  # by batch size


def draw(paths: pd.DataFrame, final: pd.DataFrame, votes: pd.DataFrame, ahead: pd.DataFrame) -> Figure:
    """Loss and rate over the steps, loss at the end against the peak rate, and the vote.

    Args:
        paths: of ``short_sighted.runs``.
        final: of ``short_sighted.ends``.
        votes: of ``short_sighted.race`` between beginnings of the run.
        ahead: of ``short_sighted.race`` between looks ahead.
    """
    figure, ((loss, rate), (end, vote)) = plt.subplots(2, 2, figsize=(11, 7.8))
    for name, rows in paths.groupby("schedule", sort=False):
        style = STYLES[str(name)] | {"markevery": 0.1, "markersize": 5}
        rows = rows.droplevel("schedule")
        loss.plot(rows.loss, label=name, **style)
        rate.plot(rows.rate, **style)
    loss.set(title="1. Along the run", ylabel="expected loss (start: 1)", xlabel="step", yscale="log")
    rate.set(
        title="2. The rates of these runs", ylabel="learning rate $\\eta$ (1/$\\lambda_1$)", xlabel="step", yscale="log"
    )

    reached, last = paths.loss[GREEDY].iloc[-1], paths.rate[GREEDY].dropna().iloc[-1]
    end.axhline(reached, color=STYLES[GREEDY]["color"], linestyle=STYLES[GREEDY]["linestyle"])
    end.plot(last, reached, markersize=8, **STYLES[GREEDY])
    end.annotate("its last rate", (last, reached), (0, -18), textcoords="offset points", ha="center", fontsize="small")
    for name, column in final.items():
        end.plot(final.index, column, **STYLES[str(name)] | {"marker": ""})
        end.plot(column.idxmin(), column.min(), markersize=8, **STYLES[str(name)])
    raced = _of_hundred(votes)
    end.plot(raced.top, raced.reached, label="winner of a race, B = 100", **plots.line(VOTES[1]))
    end.set(title="3. Where each peak rate ends (marked: the best)", ylabel="expected loss at the end (start: 1)")
    end.set(xlabel="peak rate (1/$\\lambda_1$)", xscale="log", yscale="log", ylim=(0.8 * final.min().min(), 1.1))

    _draw_votes(vote, votes, ahead)
    for axis in (end, vote):
        axis.set_xlim(final.index.min(), final.index.max())
    for scale in (loss.yaxis, rate.yaxis, end.xaxis, end.yaxis, vote.xaxis):
        scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
        scale.set_major_formatter("{x:g}")
        scale.set_minor_locator(NullLocator())
    plots.shared_legend(figure, [loss, end], loc="outside upper center", ncols=4)
    return figure


def _of_hundred(votes: pd.DataFrame) -> pd.DataFrame:
    """The races that a batch of 100 decides: the smallest batch whose votes are clear."""
    return votes[votes.batch_size == 100]


def _draw_votes(axis: Axes, votes: pd.DataFrame, ahead: pd.DataFrame) -> None:
    """Probability that the faster branch wins, one line per batch size; shaded where that is a mistake."""
    for style, (size, rows) in zip(VOTES, votes.groupby("batch_size"), strict=False):
        axis.plot(rows.top, 100 * rows.kept, label=f"B = {size:,}", markevery=0.1, markersize=5, **style)
    size = ahead.batch_size.max()
    clear = ahead[ahead.batch_size == size]
    axis.plot(clear.top, 100 * clear.kept, color="black", label=f"B = {size:,}, branches decay first")
    axis.axvspan(turning_points(votes)[1], votes.top.max(), color="0.88", zorder=0, label="the slower one ends lower")
    axis.axhline(50, color="0.3", linestyle=":")
    axis.set(title="4. The private vote", ylabel="faster branch wins (% of races)", ylim=(-3, 103), xscale="log")
    axis.set_xlabel("peak rate of the faster branch (1/$\\lambda_1$)")
    plots.legend_below(axis, ncols=2)


def findings(paths: pd.DataFrame, final: pd.DataFrame, votes: pd.DataFrame, ahead: pd.DataFrame) -> list[str]:
    """What :func:`draw` shows; arguments as there. ``votes`` must have batches of 100 beside the largest."""
    one_step, peaks = paths.loc[GREEDY], final.index
    turns, right = turning_points(votes)
    end = one_step.loss.iloc[-1]
    raced = _of_hundred(votes)
    better = {name: peaks[column < end] for name, column in final.items()}
    return [
        f"one-step rate: from {one_step.rate.iloc[0]:.2f} down to {one_step.rate.iloc[-2]:.3f}, ends at "
        f"{end:.3f} of the loss",
        *(
            f"{name}: ends lower than that from peaks of {_range(better[name], peaks)}; best from "
            f"{column.idxmin():.2f}, at {column.min():.3f}"
            for name, column in final.items()
        ),
        f"vote at B = {votes.batch_size.max():,}: keeps the faster branch up to a rate of {turns:.2f}; after branches "
        f"that decay first up to {turning_points(ahead)[0]:.2f}; it does end lower up to {right:.2f}",
        f"race at B = 100: ends lower than the one-step rate from peaks of the faster branch of "
        f"{_range(raced.top[raced.reached < end], peaks)}",
    ]


def _range(found: pd.Index | pd.Series, peaks: pd.Index) -> str:
    highest = " (the highest looked at)" if found.max() == peaks[-1] else ""
    return f"{found.min():.2f} to {found.max():.2f}{highest}"


def lead(paths: pd.DataFrame, final: pd.DataFrame) -> str:
    """How long the one-step rate leads, and where it ends beside a linear decay; arguments as in :func:`draw`."""
    one_step, decay = paths.loc[GREEDY], final[LINEAR]
    leader = paths.loss.unstack("schedule").iloc[1:].idxmin(axis="columns")
    return (
        f"The one-step rate leads until step {leader[leader != GREEDY].index[0]} and ends last: at "
        f"{one_step.loss.iloc[-1] / decay.min():.1f} times the loss of a linear decay, with a last rate "
        f"{decay.idxmin() / one_step.rate.iloc[-2]:.0f} times below the peak of that decay"
    )
