"""One page with one slider: the threshold, its bias and noise, the parabolas behind it and the rates they give."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from hyfreedp import QuadraticFit


def page_data(
    errors: pd.DataFrame,
    fits: pd.DataFrame,
    spread: pd.DataFrame,
    *,
    usual: tuple[float, float, float],
    marks: dict[str, float],
    exact: QuadraticFit,
    distance: float,
    setting: str,
    drawn: int = 60,
) -> dict[str, Any]:
    """What the page shows, as plain numbers of six digits. Rates are in units of h, losses in nats.

    Args:
        errors: of :func:`~hyfreedp.experiments.studies.bias_variance.batch_errors`, one row per slider position.
        fits: of :func:`~hyfreedp.experiments.studies.clouds.clouds`, its multiples being the slider positions.
        spread: of :func:`~hyfreedp.experiments.studies.clouds.eta_spread`.
        usual: (R_l, R_d, R_c) at multiple 1.
        marks: names and values of R_l to mark; the first is labelled at the bottom, the others at the top.
        exact: parabola through the raw mean losses.
        distance: h.
        setting: one sentence on data, batch and noise.
        drawn: how many parabolas of each cloud the page holds.

    Raises:
        ValueError: the three tables are not of the same thresholds.
    """
    multiples = errors.threshold.to_numpy() / usual[0]
    positions = []
    for index, multiple in enumerate(multiples):
        row = errors.iloc[index]
        position: dict[str, Any] = {
            "multiple": _short(multiple),
            "thresholds": [_short(multiple * value) for value in usual],
            "bias": _short(row.bias),
            "noise": _short(row.noise),
            "total": _short(row.rmse),
        }
        for probe in ("losses", "contrasts"):
            cloud = fits[(fits.probe == probe) & np.isclose(fits.multiple, multiple)]
            of_eta = spread[(spread.probe == probe) & np.isclose(spread.multiple, multiple)]
            if cloud.empty or len(of_eta) != 1:
                raise ValueError(f"fits and spread must have every threshold of errors, {multiple:.6g} is missing")
            summary = of_eta.iloc[0]
            first = cloud.head(drawn)
            position[probe] = {
                "fits": [
                    [_short(slope * distance), _short(curvature * distance**2)]
                    for slope, curvature in zip(first.slope, first.curvature, strict=True)
                ],
                "quantiles": [_short(summary[name] / distance) for name in ("q5", "q25", "q50", "q75", "q95")],
                "near": _short(summary.near),
                "concave": _short(summary.concave),
                "uphill": _short(summary.uphill),
            }
        positions.append(position)
    return {
        "setting": setting,
        "usual": [_short(value) for value in usual],
        "marks": [[name, _short(value)] for name, value in marks.items()],
        "exact": [_short(exact.slope * distance), _short(exact.curvature * distance**2)],
        "positions": positions,
    }


def page(data: dict[str, Any]) -> str:
    """The page as text. It needs no server and no network, and works by keyboard."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    return _PAGE.replace("@STYLE@", _STYLE).replace("@SCRIPT@", _SCRIPT).replace("@DATA@", text)


def nearest(multiples: Sequence[float], value: float) -> float:
    """The slider position nearest to ``value``, by ratio."""
    return min(multiples, key=lambda multiple: abs(np.log(multiple / value)))


def _short(value: float) -> float:
    return float(f"{value:.6g}")


_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1b1b; --soft: #5c5c5c; --line: #d5d5d2;
  --blue: #0072b2; --red: #c04a00; --green: #00795a; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181a; --text: #e6e6e3; --soft: #a9a9a6; --line: #3c4046;
    --blue: #63b3e8; --red: #f0905a; --green: #3ecf9f; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem clamp(0.75rem, 3vw, 2rem) 2rem; max-width: 66rem; color: var(--text);
  background: var(--page); font: 1rem/1.5 system-ui, sans-serif; }
h1 { margin: 0 0 0.5rem; font-size: 1.3rem; line-height: 1.25; }
h2 { margin: 0 0 0.25rem; font-size: 1rem; }
p { margin: 0 0 0.75rem; max-width: 48rem; }
.control { position: sticky; top: 0; z-index: 1; padding: 0.6rem 0; background: var(--page);
  border-bottom: 1px solid var(--line); }
.control label { font-weight: 600; }
.control input { display: block; width: 100%; height: 2rem; margin: 0.2rem 0; accent-color: var(--blue); }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1.25rem 1.5rem;
  margin-top: 1rem; }
section { min-width: 0; }
section p { min-height: 3em; margin: 0.25rem 0 0; font-size: 0.9rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--text); }
svg .soft { fill: var(--soft); }
.grid { stroke: var(--line); stroke-width: 1; }
.axis, .mark { stroke: var(--soft); stroke-width: 1; }
.mark { stroke-dasharray: 2 3; }
.now { stroke: var(--text); stroke-width: 1.5; }
.curve { fill: none; stroke-width: 2; }
.bias { stroke: var(--red); stroke-dasharray: 7 4; } .noise { stroke: var(--green); stroke-dasharray: 2 3; }
.total { stroke: var(--blue); stroke-width: 2.5; }
.cloud { fill: none; stroke: var(--blue); stroke-width: 1; opacity: 0.3; }
.exact { fill: none; stroke: var(--text); stroke-width: 2.5; stroke-dasharray: 8 4; }
.dot { fill: var(--blue); opacity: 0.4; } .bar { stroke: var(--text); stroke-width: 1.5; }
.box { fill: none; stroke: var(--text); stroke-width: 1.5; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>The clipping threshold and the learning rate</title>
<style>@STYLE@</style>
</head>
<body>
<main>
<h1>From the clipping threshold to the learning rate</h1>
<p id="setting"></p>
<p>Losses are clipped at R<sub>l</sub>, averaged and noised in proportion to R<sub>l</sub>. A parabola through three
private losses has its bottom at the learning rate b/a. Move the threshold and watch what it does to both.</p>
<noscript><p>This page draws with JavaScript, which is switched off. The same is drawn, for three thresholds, in the
figures of notebook 01.</p></noscript>
<div class="control">
<label for="slider">Threshold</label>
<input id="slider" type="range" min="0" step="1" aria-describedby="now">
<output id="now" for="slider" aria-live="off"></output>
</div>
<div class="panels">
<section aria-labelledby="title-errors"><h2 id="title-errors">1. Error of the private mean losses</h2>
<svg id="errors" viewBox="0 0 360 250" role="img" aria-labelledby="title-errors" aria-describedby="text-errors"></svg>
<p id="text-errors"></p></section>
<section aria-labelledby="title-eta"><h2 id="title-eta">2. Learning rates b/a that follow</h2>
<svg id="eta" viewBox="0 0 360 250" role="img" aria-labelledby="title-eta" aria-describedby="text-eta"></svg>
<p id="text-eta"></p></section>
<section aria-labelledby="title-losses"><h2 id="title-losses">3. Parabolas from three private losses</h2>
<svg id="losses" viewBox="0 0 360 250" role="img" aria-labelledby="title-losses" aria-describedby="text-losses"></svg>
<p id="text-losses"></p></section>
<section aria-labelledby="title-contrasts"><h2 id="title-contrasts">4. Parabolas from private contrasts</h2>
<svg id="contrasts" viewBox="0 0 360 250" role="img" aria-labelledby="title-contrasts"
aria-describedby="text-contrasts"></svg>
<p id="text-contrasts"></p></section>
</div>
</main>
<script type="application/json" id="data">@DATA@</script>
<script>@SCRIPT@</script>
</body>
</html>
"""

_SCRIPT = """
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const positions = data.positions;
const get = id => document.getElementById(id);
const number = x => String(Number(x.toPrecision(3)));
const percent = x => Math.round(100 * x) + " %";
const left = 52, right = 350, top_ = 24, bottom = 205;

// Maps a range of values, in the log where asked, to a range of pixels.
function scale(low, high, from, to, log) {
  const f = log ? Math.log10 : x => x;
  return x => from + (f(x) - f(low)) / (f(high) - f(low)) * (to - from);
}
function axes(id, x, y, xticks, yticks, xname, yname) {
  let s = `<clipPath id="clip-${id}"><rect x="${left}" y="${top_}" width="${right - left}" ` +
    `height="${bottom - top_}"/></clipPath>`;
  for (const t of xticks) s += `<line class="grid" x1="${x(t)}" x2="${x(t)}" y1="${top_}" y2="${bottom}"/>` +
    `<text x="${x(t)}" y="${bottom + 16}" text-anchor="middle">${t}</text>`;
  for (const [t, name] of yticks) s += `<line class="grid" x1="${left}" x2="${right}" y1="${y(t)}" y2="${y(t)}"/>` +
    `<text x="${left - 6}" y="${y(t) + 4}" text-anchor="end">${name}</text>`;
  return s + `<text x="${(left + right) / 2}" y="${bottom + 36}" text-anchor="middle">${xname}</text>` +
    `<text transform="translate(12 ${(top_ + bottom) / 2}) rotate(-90)" text-anchor="middle">${yname}</text>`;
}
const same = ticks => ticks.map(t => [t, t]);
const path = points => "M" + points.map(p => p[0].toFixed(1) + " " + p[1].toFixed(1)).join("L");
function decades(low, high) {
  const ticks = [];
  for (let k = Math.ceil(Math.log10(low)); k <= Math.log10(high); k++) ticks.push(Number((10 ** k).toPrecision(1)));
  return ticks;
}

// Round numbers within a range, about five.
function round(low, high) {
  const unit = 10 ** Math.floor(Math.log10((high - low) / 2)), jump = (high - low) / unit > 5 ? unit : unit / 2;
  const ticks = [];
  for (let k = Math.ceil(low / jump); k * jump <= high; k++) ticks.push(Number((k * jump).toPrecision(3)));
  return ticks.length > 8 ? ticks.filter((_, k) => k % 2 === 0) : ticks;
}

// 1. Errors: the curves do not move, only the marker does.
const thresholds = positions.map(p => p.thresholds[0]);
const highest = 1.3 * Math.max(...positions.map(p => p.total));
const lowest = Math.min(...positions.map(p => p.noise)) / 1.3;
const ex = scale(thresholds[0], thresholds[thresholds.length - 1], left, right, true);
const ey = scale(lowest, highest, bottom, top_, true);
let errors = axes("errors", ex, ey, decades(thresholds[0], thresholds[thresholds.length - 1]),
  same(decades(lowest, highest)), "threshold R_l (nats)", "error (nats)");
data.marks.forEach(([name, value], k) => errors +=
  `<line class="mark" x1="${ex(value)}" x2="${ex(value)}" y1="${top_}" y2="${bottom}"/>` +
  `<text class="soft" x="${ex(value) + (k ? 4 : -4)}" y="${k ? top_ - 4 + 16 * k : bottom - 6}" ` +
  `text-anchor="${k ? "start" : "end"}">${name}</text>`);
errors += `<g clip-path="url(#clip-errors)">`;
for (const name of ["bias", "noise", "total"])
  errors += `<path class="curve ${name}" d="` +
    path(positions.map((p, k) => [ex(thresholds[k]), ey(Math.max(p[name], lowest / 10))])) + `"/>`;
errors += "</g>";
["bias", "noise", "total"].forEach((name, k) => errors +=
  `<line class="curve ${name}" x1="${left + 90 * k}" x2="${left + 90 * k + 28}" y1="10" y2="10"/>` +
  `<text x="${left + 90 * k + 34}" y="14">${name}</text>`);

// 3 and 4. Clouds: y = -b u + a u^2 / 2 with u the distance along G in units of h.
const steps = Array.from({length: 25}, (_, k) => -1.5 + k / 8);
const curve = (b, a) => steps.map(u => [u, -b * u + a * u * u / 2]);
const heights = curve(...data.exact).map(p => p[1]);
const reach = Math.max(...heights) - Math.min(...heights);
const low = Math.min(...heights) - 0.6 * reach, high = Math.max(...heights) + 0.3 * reach;
const cx = scale(-1.5, 1.5, left, right), cy = scale(low, high, bottom, top_);
const cticks = round(low, high).map(t => [t, number(t)]);
const line = (kind, b, a) => `<path class="${kind}" d="` + path(curve(b, a).map(p => [cx(p[0]), cy(p[1])])) + `"/>`;
function cloud(id, fits) {
  return axes(id, cx, cy, [-1, 0, 1], cticks, "distance along G (units of h)", "change of the loss (nats)") +
    `<g clip-path="url(#clip-${id})">` + fits.map(f => line("cloud", ...f)).join("") + line("exact", ...data.exact) +
    "</g>";
}

// 2. Rates: a dot per parabola, a box for the quartiles, a bar from 5 % to 95 %.
const truth = data.exact[0] / data.exact[1];
const span = 3 * Math.abs(truth);
const rx = scale(-span, span, left, right), hold = v => Math.max(-span, Math.min(span, v));
function rates(p) {
  let s = axes("eta", rx, y => y, round(-span, span), [], "learning rate b/a (units of h)", "");
  s += `<line class="exact" x1="${rx(truth)}" x2="${rx(truth)}" y1="${top_}" y2="${bottom}"/>`;
  ["losses", "contrasts"].forEach((probe, k) => {
    const y = 60 + 95 * k, q = p[probe].quantiles.map(v => rx(hold(v)));
    s += `<text x="${left + 4}" y="${y - 30}">${k ? "contrasts" : "three losses"}</text>`;
    p[probe].fits.forEach((f, n) => s +=
      `<circle class="dot" cx="${rx(hold(f[0] / f[1]))}" cy="${y + 15 + (n * 7) % 20}" r="2.5"/>`);
    s += `<line class="bar" x1="${q[0]}" x2="${q[4]}" y1="${y}" y2="${y}"/>` +
      `<rect class="box" x="${q[1]}" y="${y - 7}" width="${Math.max(1, q[3] - q[1])}" height="14"/>` +
      `<line class="now" x1="${q[2]}" x2="${q[2]}" y1="${y - 7}" y2="${y + 7}"/>`;
  });
  return s;
}
const share = c => `${percent(c.near)} of the rates lie within a factor of two of the exact one; ` +
  `${percent(c.concave)} of the parabolas are concave, ${percent(c.uphill)} point uphill.`;

function draw() {
  const p = positions[slider.value], t = p.thresholds;
  const words = `R_l = ${number(t[0])} nats, ${number(p.multiple)} times the mean loss; for contrasts, ` +
    `R_d = ${number(t[1])} and R_c = ${number(t[2])}, ${number(p.multiple)} times their quantiles`;
  get("now").textContent = words;
  slider.setAttribute("aria-valuetext", words);
  get("errors").innerHTML = errors +
    `<line class="now" x1="${ex(t[0])}" x2="${ex(t[0])}" y1="${top_}" y2="${bottom}"/>` +
    `<circle class="dot" style="opacity:1" cx="${ex(t[0])}" cy="${ey(p.total)}" r="5"/>`;
  get("text-errors").textContent =
    `Bias ${number(p.bias)}, noise ${number(p.noise)}, together ${number(p.total)} nats ` +
    "(root mean square over the three probes).";
  for (const probe of ["losses", "contrasts"]) {
    get(probe).innerHTML = cloud(probe, p[probe].fits);
    get("text-" + probe).textContent = share(p[probe]);
  }
  get("eta").innerHTML = rates(p);
  get("text-eta").textContent = `Dashed: the rate without clipping and noise, ${number(truth)} h. ` +
    `Median of three losses ${number(p.losses.quantiles[2])} h, of contrasts ${number(p.contrasts.quantiles[2])} h. ` +
    "Boxes hold half of the rates, bars nine tenths; rates beyond the axis are drawn at its ends.";
}
const slider = get("slider");
slider.max = positions.length - 1;
const apart = t => Math.abs(Math.log(t / data.usual[0]));
slider.value = thresholds.reduce((best, t, k) => apart(t) < apart(thresholds[best]) ? k : best, 0);
slider.addEventListener("input", draw);
get("setting").textContent = data.setting;
draw();
"""
