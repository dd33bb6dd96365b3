// A private step as a moving picture, in every box of class private-step: records are sampled, gradients clipped, summed and
// noised, a parabola is fitted to three private losses, the weights move. A slider for each. The model is the line of
// notebook 02, y = w0 x + w1, with the loss (w0 x + w1 - y)^2 / 2. Orange is raw and never released; blue is private.
(() => {
  const [N, LOSS_NOISE] = [1000, 3]; // records; noise multiplier of a loss, over that of the gradient
  const [RAW, PRIVATE, W, H, PAD] = ["#D55E00", "#2C8ED6", 300, 250, 36];
  const STAGES = ["sample", "clip", "sum", "noise", "fit", "move"];
  const DIALS = {
    sample: { label: "q: probability of each record", values: [0.05, 1], start: 0.5, panel: 0 },
    clip: { label: "R: longest gradient allowed", values: [0.05, 20], log: true, start: 1, from: 20, panel: 1 },
    sum: { label: "part of the sum added up", values: [0, 1], start: 1, from: 0, panel: 1, percent: true },
    noise: { label: "σ: noise multiplier", values: [0, 30], start: 3, from: 0, panel: 1 },
    fit: { label: "R<sub>l</sub>: largest loss allowed", values: [1, 400], log: true, start: 20, from: 400, panel: 2 },
    move: { label: "part of the step taken", values: [0, 1], start: 1, from: 0, panel: 3, percent: true },
  };
  const TITLES = ["1. Sample", "2. Clip, sum, noise", "3. Fit three private losses", "4. Move"];

  const random = (seed) => () => { // mulberry32
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  const normal = (uniform) => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

  const uniform = random(3);
  const records = Array.from({ length: N }, () => {
    const [x, z, ...chi] = Array.from({ length: 5 }, () => normal(uniform));
    const tail = z / Math.sqrt(chi.reduce((sum, value) => sum + value * value, 0) / 3); // Student's t: a few records far off
    return { x, y: 2 * x + 1 + 0.5 * tail };
  });
  const lossAt = (w, { x, y }) => (w[0] * x + w[1] - y) ** 2 / 2;
  const meanLoss = (w, of = records) => mean(of.map((record) => lossAt(w, record)));
  const along = (w, direction, distance) => [w[0] - distance * direction[0], w[1] - distance * direction[1]];

  // All numbers of one step, from the weights, the rate before and the places of the sliders.
  const stepOf = ({ w, rate, seed }, at) => {
    const draw = random(seed);
    const B = at.sample * N; // expected size of the batch
    const batch = records.filter(() => draw() < at.sample);
    const z = Array.from({ length: 5 }, () => normal(draw));
    const raw = batch.map((record) => {
      const residual = w[0] * record.x + w[1] - record.y;
      return [(residual * record.x) / at.clip, residual / at.clip]; // in units of R
    });
    const clipped = raw.map((g) => g.map((value) => value / Math.max(1, Math.hypot(...g))));
    const walk = [[0, 0]];
    for (const g of clipped) walk.push(g.map((value, d) => walk[walk.length - 1][d] + value / B));
    const summed = walk.slice(0, 1 + Math.round(at.sum * clipped.length));
    const G = summed[summed.length - 1].map((value, d) => value + (at.noise * z[d]) / B);
    const places = [-rate, 0, rate];
    const cut = places.map((s) => batch.reduce((sum, r) => sum + Math.min(lossAt(along(w, G, s), r), at.fit), 0) / B);
    const noise = (LOSS_NOISE * at.noise * at.fit) / B;
    const losses = cut.map((value, k) => value + noise * z[2 + k]);
    const slope = (losses[0] - losses[2]) / (2 * rate); // downhill
    const curvature = (losses[0] - 2 * losses[1] + losses[2]) / rate ** 2;
    const works = slope > 0 && curvature > 0;
    const next = works ? Math.min(Math.max(slope / curvature, rate / 2), 2 * rate) : rate;
    const moved = along(w, G, at.move * next);
    const share = raw.filter((g) => Math.hypot(...g) > 1).length / Math.max(1, raw.length);
    return { w, rate, B, batch, raw, clipped, summed, G, places, cut, noise, losses, slope, curvature, works, next, moved, share };
  };

  const axes = ([left, right], [low, high]) => ({
    x: (value) => PAD + ((value - left) / (right - left)) * (W - PAD - 6),
    y: (value) => H - PAD - ((value - low) / (high - low)) * (H - PAD - 6),
  });
  const path = (points, to, more) => `<path fill="none" d="M${points.map(([x, y]) => `${to.x(x).toFixed(1)} ${to.y(y).toFixed(1)}`).join("L")}" ${more}/>`;
  const spokes = (ends, to, more) => `<path d="${ends.map(([x, y]) => `M${to.x(0)} ${to.y(0)}L${to.x(-x).toFixed(1)} ${to.y(-y).toFixed(1)}`).join("")}" ${more}/>`;
  const dot = ([x, y], to, r, more) => `<circle cx="${to.x(x).toFixed(1)}" cy="${to.y(y).toFixed(1)}" r="${r}" ${more}/>`;
  const text = (x, y, content, more = "") => `<text x="${x}" y="${y}" ${more}>${content}</text>`;
  const frame = (to, names, ticks) => {
    let svg = `<path d="M${PAD} 6V${H - PAD}H${W - 6}" fill="none" stroke="currentColor" opacity="0.5"/>`;
    for (const tick of ticks[0]) svg += text(to.x(tick), H - PAD + 13, tick, 'text-anchor="middle"');
    for (const tick of ticks[1]) svg += text(PAD - 4, to.y(tick) + 4, tick, 'text-anchor="end"');
    return svg + text((PAD + W) / 2, H - 3, names[0], 'text-anchor="middle"') + text(9, H / 2 - 12, names[1], `text-anchor="middle" transform="rotate(-90 9 ${H / 2 - 12})"`);
  };
  const short = (value) => value.toLocaleString("en", { maximumSignificantDigits: 2 });
  const percent = (value) => `${Math.round(100 * value)} %`;

  const PANELS = [
    (s, shown) => {
      const to = axes([-3.2, 3.2], [-8, 10]);
      let svg = frame(to, ["x", "y"], [[-2, 0, 2], [-5, 0, 5, 10]]);
      const dots = (of, more) => `<path d="${of.map((r) => `M${to.x(r.x).toFixed(1)} ${to.y(r.y).toFixed(1)}h0`).join("")}" stroke-linecap="round" clip-path="url(#inside)" ${more}/>`;
      svg += dots(records, 'stroke="currentColor" stroke-width="2.5" opacity="0.35"') + dots(s.batch, `stroke="${RAW}" stroke-width="4"`);
      const line = (w, more) => path([-3.2, 3.2].map((x) => [x, w[0] * x + w[1]]), to, `clip-path="url(#inside)" stroke="${PRIVATE}" stroke-width="2.5" ${more}`);
      svg += line(s.w, 'stroke-dasharray="6 4"') + (shown > 5 ? line(s.moved, "") : "");
      return [svg, `<b>${s.batch.length}</b> of ${N} records came. The line is the model: dashed before the step, solid after it.`];
    },
    (s, shown, at) => {
      const to = axes([-1.75, 1.75], [-1.4, 1.4]);
      let svg = `<circle cx="${to.x(0)}" cy="${to.y(0)}" r="${to.x(1) - to.x(0)}" fill="none" stroke="currentColor" opacity="0.6"/>${text(to.x(0.74), to.y(0.74), "R")}`;
      svg += `<g clip-path="url(#inside)">${spokes(s.raw, to, `stroke="${RAW}" opacity="${shown > 1 ? 0.12 : 0.45}"`)}</g>`;
      if (shown > 1) svg += spokes(s.clipped, to, `stroke="${RAW}" opacity="0.45"`);
      const back = (g) => g.map((value) => -value);
      if (shown > 2) svg += path(s.summed.map(back), to, 'stroke="currentColor" stroke-width="2.5"');
      if (shown > 3) svg += path([[0, 0], back(s.G)], to, `stroke="${PRIVATE}" stroke-width="3"`) + dot(back(s.G), to, 5, `fill="${PRIVATE}"`);
      if (shown > 3) svg += dot(back(s.summed[s.summed.length - 1]), to, ((2 * at.noise) / s.B) * (to.x(1) - to.x(0)), `fill="none" stroke="${PRIVATE}" stroke-width="1.5" stroke-dasharray="3 3"`);
      return [svg, `<b>${percent(s.share)}</b> are cut to R. The walk adds them up, over the expected batch; blue has noise, of ${short((100 * at.noise) / s.B)} % of R.`];
    },
    (s, shown) => {
      const far = Array.from({ length: 61 }, (_, i) => s.rate * (-1.3 + i * 0.065));
      const raw = far.map((d) => [d, s.batch.length ? s.batch.reduce((sum, r) => sum + lossAt(along(s.w, s.G, d), r), 0) / s.B : 0]);
      const top = 1.25 * Math.max(1, ...raw.filter(([d]) => Math.abs(d) <= 1.05 * s.rate).map(([, loss]) => loss));
      const to = axes([far[0], far[60]], [-0.15 * top, top]);
      const half = Number(short(top / 2));
      let svg = frame(to, ["distance along the private direction", "mean loss"], [[0, Number(short(s.rate))], [0, half]]);
      svg += '<g clip-path="url(#inside)">';
      if (shown > 4) {
        svg += path(raw, to, `stroke="${RAW}" stroke-width="2" stroke-dasharray="6 4"`);
        s.cut.forEach((loss, k) => (svg += dot([s.places[k], loss], to, 3.5, `fill="${RAW}"`)));
        const fitted = (d) => s.losses[1] - s.slope * d + (s.curvature * d * d) / 2;
        svg += path(far.map((d) => [d, fitted(d)]), to, `stroke="${PRIVATE}" stroke-width="2.5"`);
        s.losses.forEach((loss, k) => {
          svg += path([[s.places[k], loss - s.noise], [s.places[k], loss + s.noise]], to, `stroke="${PRIVATE}" stroke-width="2"`) + dot([s.places[k], loss], to, 4.5, `fill="${PRIVATE}"`);
        });
        svg += dot([s.next, fitted(s.next)], to, 8, 'fill="none" stroke="currentColor" stroke-width="2"');
      }
      const bottom = s.works ? `Bottom at <b>${short(s.slope / s.curvature)}</b>` : s.curvature > 0 ? "<b>Uphill</b>" : "<b>It bends the wrong way</b>";
      const goes = s.works ? `goes from ${short(s.rate)} to <b>${short(s.next)}</b> (half to twice)` : `stays at ${short(s.rate)}`;
      return [`${svg}</g>`, `${bottom}; the rate ${goes}. Bars: one standard deviation, ${short(s.noise)}. Dashed: no clip, no noise.`];
    },
    (s, shown, at, trail) => {
      const to = axes([-1.2, 4.2], [-1.3, 3.2]);
      const [xx, x1] = [mean(records.map((r) => r.x * r.x)), mean(records.map((r) => r.x))];
      let svg = frame(to, ["slope", "intercept"], [[0, 2, 4], [0, 2]]) + '<g clip-path="url(#inside)">';
      for (const level of [0.1, 0.4, 1, 2, 4, 7]) { // the loss is a quadratic form around BEST
        const ring = Array.from({ length: 61 }, (_, i) => [Math.cos((i * Math.PI) / 30), Math.sin((i * Math.PI) / 30)]).map(([c, d]) => {
          const size = Math.sqrt((2 * level) / (xx * c * c + 2 * x1 * c * d + d * d));
          return [BEST[0] + size * c, BEST[1] + size * d];
        });
        svg += path(ring, to, 'stroke="currentColor" opacity="0.3"');
      }
      svg += text(to.x(BEST[0]), to.y(BEST[1]) + 5, "★", 'text-anchor="middle" font-size="16"') + path([...trail, s.w], to, `stroke="${PRIVATE}" stroke-width="2" opacity="0.6"`);
      for (const w of trail) svg += dot(w, to, 3, `fill="${PRIVATE}" opacity="0.6"`);
      if (shown > 4) for (const d of s.places) svg += dot(along(s.w, s.G, d), to, 4, `fill="none" stroke="${PRIVATE}" stroke-width="1.5"`);
      if (shown > 5) svg += path([s.w, s.moved], to, `stroke="${PRIVATE}" stroke-width="3"`);
      svg += dot(shown > 5 ? s.moved : s.w, to, 6, `fill="${PRIVATE}"`) + "</g>";
      return [svg, `Step ${trail.length + 1}: the mean loss of all goes from ${short(meanLoss(s.w))} to <b>${short(meanLoss(s.moved))}</b> (raw, shown here only); ★ has ${short(meanLoss(BEST))}.`];
    },
  ];
  const BEST = (() => { // least squares
    const [mx, my] = [mean(records.map((r) => r.x)), mean(records.map((r) => r.y))];
    const slope = mean(records.map((r) => (r.x - mx) * (r.y - my))) / mean(records.map((r) => (r.x - mx) ** 2));
    return [slope, my - slope * mx];
  })();

  const STYLE = `.private-step .parts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(17rem, 100%), 1fr)); gap: 1rem 1.5rem; }
    .private-step .part p { margin: 0.2rem 0 0.4rem; font-size: 0.85rem; min-height: 3.9em; line-height: 1.3; }
    .private-step svg { width: 100%; font: 11px sans-serif; fill: currentColor; } .private-step h4 { margin: 0.3rem 0; font-size: 1rem; }
    .private-step label { display: block; font-size: 0.85rem; } .private-step input { width: 100%; margin: 0; }
    .private-step .now { outline: 2px solid ${PRIVATE}; outline-offset: 3px; } .private-step output { float: right; font-weight: bold; }
    .private-step button { font: inherit; color: inherit; background: none; border: 1px solid; border-radius: 4px; padding: 0.25rem 0.7rem; margin: 0 0.5rem 0.5rem 0; cursor: pointer; }`;

  const make = (box) => {
    box.dataset.made = "yes";
    const dial = (name) => `<label data-dial="${name}">${DIALS[name].label}<output></output><input type="range" min="0" max="200"></label>`;
    const part = (title, k) => `<div class="part"><h4>${title}</h4><svg viewBox="0 0 ${W} ${H}" role="img" aria-label="${title}"></svg><p></p>${STAGES.filter((name) => DIALS[name].panel === k).map(dial).join("")}</div>`;
    const buttons = { play: "▶ Play", next: "Next step", noise: "Draw again", again: "Start again" };
    box.innerHTML = `<style>${STYLE}</style><div>${Object.entries(buttons).map(([name, label]) => `<button type="button" data-do="${name}">${label}</button>`).join("")}</div><p>Orange is raw and never released; blue is private.</p><div class="parts">${TITLES.map(part).join("")}</div>`;
    const [inputs, labels] = [{}, {}];
    for (const name of STAGES) {
      labels[name] = box.querySelector(`[data-dial="${name}"]`);
      inputs[name] = labels[name].querySelector("input");
    }
    const span = (name) => DIALS[name].values.map((value) => (DIALS[name].log ? Math.log(value) : value));
    const place = (name, value) => { // of a slider, 0 to 200
      const [low, high] = span(name);
      return (200 * ((DIALS[name].log ? Math.log(value) : value) - low)) / (high - low);
    };
    const value = (name) => {
      const [low, high] = span(name);
      const found = low + (high - low) * (inputs[name].value / 200);
      return DIALS[name].log ? Math.exp(found) : found;
    };
    let run, shown, playing;
    const draw = () => {
      const at = Object.fromEntries(STAGES.map((name) => [name, value(name)]));
      const step = stepOf(run, at);
      box.querySelectorAll(".part").forEach((one, k) => {
        const [svg, told] = PANELS[k](step, shown, at, run.trail);
        const id = `inside-${[...document.querySelectorAll(".private-step")].indexOf(box)}-${k}`; // unique on a page
        const inside = `<defs><clipPath id="${id}"><rect x="${PAD}" y="0" width="${W - PAD}" height="${H - PAD}"/></clipPath></defs>`;
        one.querySelector("svg").innerHTML = inside + svg.replaceAll("#inside", `#${id}`);
        one.querySelector("p").innerHTML = shown > STAGES.findIndex((name) => DIALS[name].panel === k) ? told : "";
      });
      for (const name of STAGES) labels[name].querySelector("output").textContent = DIALS[name].percent ? percent(at[name]) : short(at[name]);
      return step;
    };
    const again = () => {
      run = { w: [0, 0], rate: 3, seed: 1, trail: [] };
      for (const name of STAGES) inputs[name].value = place(name, DIALS[name].start);
    };
    const next = () => {
      const step = draw();
      run = { w: step.moved, rate: step.next, seed: run.seed + 1000, trail: [...run.trail, run.w] };
    };
    const pause = () => {
      if (!playing) return;
      cancelAnimationFrame(playing.frame);
      for (const name of STAGES) [inputs[name].value, labels[name].className] = [playing.goals[name], ""];
      [playing, shown] = [null, STAGES.length];
      box.querySelector('[data-do="play"]').textContent = buttons.play;
    };
    const play = () => { // each slider moves to where it stands, one after the other; then the next step
      playing = { goals: Object.fromEntries(STAGES.map((name) => [name, inputs[name].value])), started: null };
      box.querySelector('[data-do="play"]').textContent = "❚❚ Pause";
      const frame = (now) => {
        playing.started ??= now;
        const passed = (now - playing.started) / 1300; // milliseconds of a part
        const stage = Math.floor(passed);
        if (stage >= STAGES.length) {
          shown = STAGES.length;
          next();
          playing.started = now;
        } else {
          shown = stage + 1;
          STAGES.forEach((name, k) => {
            const from = "from" in DIALS[name] ? place(name, DIALS[name].from) : 0;
            const part = k < stage ? 1 : k > stage ? 0 : Math.min(1, 1.25 * (passed - stage)); // then stands still
            inputs[name].value = from + (playing.goals[name] - from) * part;
            labels[name].className = k === stage ? "now" : "";
          });
          draw();
        }
        playing.frame = requestAnimationFrame(frame);
      };
      playing.frame = requestAnimationFrame(frame);
    };
    const actions = { play, next, noise: () => (run.seed += 1), again };
    box.addEventListener("click", (event) => {
      const name = event.target.dataset.do;
      if (!name) return;
      const goes = playing;
      pause();
      if (name !== "play" || !goes) actions[name]();
      if (!playing) draw();
    });
    box.addEventListener("input", () => {
      const [name, moved] = STAGES.map((one) => [one, inputs[one].value]).find(([one]) => inputs[one] === document.activeElement) ?? [];
      pause();
      if (name) inputs[name].value = moved;
      draw();
    });
    [shown, playing] = [STAGES.length, null];
    again();
    draw();
  };
  document.querySelectorAll(".private-step:not([data-made])").forEach(make);
})();
