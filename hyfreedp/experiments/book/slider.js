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

// The state: a place among the thresholds, B and sigma_l as powers of ten of those of the run.
const usual = data.usual[0];
const lerp = (a, b, t) => a + (b - a) * t;
function at(place) {
  const k = Math.min(Math.floor(place), positions.length - 2), t = place - k, p = positions[k], q = positions[k + 1];
  const both = probe => p[probe].map((v, n) => lerp(v, q[probe][n], t));
  return {multiple: Math.exp(lerp(Math.log(p.multiple), Math.log(q.multiple), t)), bias: lerp(p.bias, q.bias, t),
    losses: both("losses"), contrasts: both("contrasts")};
}
function placeOf(threshold) {
  const x = Math.log(threshold / usual), logs = positions.map(p => Math.log(p.multiple));
  let k = 0;
  while (k < logs.length - 2 && logs[k + 1] < x) k++;
  return Math.max(0, Math.min(logs.length - 1, k + (x - logs[k]) / (logs[k + 1] - logs[k])));
}
const sizeOf = v => Math.round(data.batch_size * 10 ** v), sigmaOf = v => data.sigma * 10 ** v;
const noiseOf = (multiple, sigma, size) => sigma * multiple * usual / size;

// 1. Errors, of which the bias does not move.
const thresholds = positions.map(p => p.multiple * usual);
const plain = positions.map(p => noiseOf(p.multiple, data.sigma, data.batch_size));
const highest = 3 * Math.max(...plain, ...positions.map(p => p.bias)), lowest = Math.min(...plain) / 3;
const ex = scale(thresholds[0], thresholds[thresholds.length - 1], left, right, true);
const ey = scale(lowest, highest, bottom, top_, true);
let frame = axes("errors", ex, ey, decades(thresholds[0], thresholds[thresholds.length - 1]),
  same(decades(lowest, highest)), "threshold R_l (nats)", "error (nats)");
data.marks.forEach(([name, value], k) => frame +=
  `<line class="mark" x1="${ex(value)}" x2="${ex(value)}" y1="${top_}" y2="${bottom}"/>` +
  `<text class="soft" x="${ex(value) + (k ? 4 : -4)}" y="${k ? top_ - 4 + 16 * k : bottom - 6}" ` +
  `text-anchor="${k ? "start" : "end"}">${name}</text>`);
["bias", "noise", "total"].forEach((name, k) => frame +=
  `<line class="curve ${name}" x1="${left + 90 * k}" x2="${left + 90 * k + 28}" y1="10" y2="10"/>` +
  `<text x="${left + 90 * k + 34}" y="14">${name}</text>`);
const totals = (sigma, size) => positions.map(p => Math.hypot(p.bias, noiseOf(p.multiple, sigma, size)));
function errorsOf(sigma, size) {
  const values = {bias: positions.map(p => p.bias), total: totals(sigma, size),
    noise: positions.map(p => noiseOf(p.multiple, sigma, size))};
  return frame + `<g clip-path="url(#clip-errors)">` + Object.entries(values).map(([name, ys]) =>
    `<path class="curve ${name}" d="` + path(ys.map((y, k) => [ex(thresholds[k]), ey(Math.max(y, lowest / 10))])) +
    `"/>`).join("") + "</g>";
}
function best(sigma, size) {
  const all = totals(sigma, size);
  return all.indexOf(Math.min(...all));
}

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
const sorted = values => [...values].sort((a, b) => a - b);
const quantile = (values, q) => values[Math.round(q * (values.length - 1))];
function rates(clouds) {
  let s = axes("eta", rx, y => y, round(-span, span), [], "learning rate b/a (units of h)", "");
  s += `<line class="exact" x1="${rx(truth)}" x2="${rx(truth)}" y1="${top_}" y2="${bottom}"/>`;
  ["losses", "contrasts"].forEach((probe, k) => {
    const y = 60 + 95 * k, all = sorted(clouds[probe].map(f => f[0] / f[1]));
    const q = [0.05, 0.25, 0.5, 0.75, 0.95].map(share => rx(hold(quantile(all, share))));
    s += `<text x="${left + 4}" y="${y - 30}">${k ? "contrasts" : "three losses"}</text>`;
    clouds[probe].forEach((f, n) => s +=
      `<circle class="dot" cx="${rx(hold(f[0] / f[1]))}" cy="${y + 15 + (n * 7) % 20}" r="2.5"/>`);
    s += `<line class="bar" x1="${q[0]}" x2="${q[4]}" y1="${y}" y2="${y}"/>` +
      `<rect class="box" x="${q[1]}" y="${y - 7}" width="${Math.max(1, q[3] - q[1])}" height="14"/>` +
      `<line class="now" x1="${q[2]}" x2="${q[2]}" y1="${y - 7}" y2="${y + 7}"/>`;
  });
  return s;
}
function share(fits) {
  const of = test => percent(fits.filter(test).length / fits.length);
  const near = of(f => f[0] / f[1] / truth >= 0.5 && f[0] / f[1] / truth <= 2);
  return `${near} of the rates lie within a factor of two of the exact one; ` +
    `${of(f => f[1] < 0)} of the parabolas are concave, ${of(f => f[0] < 0)} point uphill.`;
}

const slider = get("slider"), size = get("size"), sigma = get("sigma");
function draw() {
  const p = at(Number(slider.value)), B = sizeOf(Number(size.value)), s = sigmaOf(Number(sigma.value));
  const R = p.multiple * usual, noise = noiseOf(p.multiple, s, B), total = Math.hypot(p.bias, noise);
  const factor = p.multiple * (s / data.sigma) * (data.batch_size / B);
  const clouds = {};
  for (const probe of ["losses", "contrasts"])
    clouds[probe] = data.noise[probe].map(d => d.map((v, n) => p[probe][n] + factor * v));
  const words = `R_l = ${number(R)} nats, ${number(p.multiple)} times the mean loss; B = ${B}, σ_l = ${number(s)}` +
    `: noise of the mean loss ${number(noise)} nats. For contrasts, R_d = ${number(p.multiple * data.usual[1])} and ` +
    `R_c = ${number(p.multiple * data.usual[2])}`;
  get("now").textContent = words;
  slider.setAttribute("aria-valuetext", `${number(R)} nats`);
  size.setAttribute("aria-valuetext", `${B} records`);
  sigma.setAttribute("aria-valuetext", number(s));
  get("errors").innerHTML = errorsOf(s, B) +
    `<line class="now" x1="${ex(R)}" x2="${ex(R)}" y1="${top_}" y2="${bottom}"/>` +
    `<circle class="dot" style="opacity:1" cx="${ex(R)}" cy="${Math.max(top_, Math.min(bottom, ey(total)))}" r="5"/>`;
  get("text-errors").textContent = `Bias ${number(p.bias)}, noise ${number(noise)}, together ${number(total)} nats ` +
    "(root of the sum of their squares; mean square over the three probes).";
  for (const probe of ["losses", "contrasts"]) {
    get(probe).innerHTML = cloud(probe, clouds[probe].slice(0, 60));
    get("text-" + probe).textContent = share(clouds[probe]);
  }
  get("eta").innerHTML = rates(clouds);
  const middle = probe => number(quantile(sorted(clouds[probe].map(f => f[0] / f[1])), 0.5));
  get("text-eta").textContent = `Dashed: the rate without clipping and noise, ${number(truth)} h. ` +
    `Median of three losses ${middle("losses")} h, of contrasts ${middle("contrasts")} h. ` +
    "Boxes hold half of the rates, bars nine tenths; rates beyond the axis are drawn at its ends.";
}
// The least error is of B and sigma_l at hand.
const jumps = data.marks.filter(([name]) => name !== "least error").map(([name, value]) => [name, () => placeOf(value)]);
jumps.splice(1, 0, ["least error", () => best(sigmaOf(Number(sigma.value)), sizeOf(Number(size.value)))]);
jumps.push(["B and σ_l of the run", () => { size.value = sigma.value = 0; return Number(slider.value); }]);
for (const [name, place] of jumps) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = name;
  button.addEventListener("click", () => { slider.value = place(); draw(); });
  get("jumps").append(button);
}
slider.max = positions.length - 1;
slider.value = placeOf(usual);
for (const input of [slider, size, sigma]) input.addEventListener("input", draw);
get("setting").textContent = data.setting;
draw();
