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
