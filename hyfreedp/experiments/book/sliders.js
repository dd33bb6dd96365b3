// Draws what sliders.py hands over into the box of that name: curves over an axis, a slider for each dial, and one that reads
// the curves off along the axis. A curve's values are flat, over its own shape (dials..., axis), which broadcasts as NumPy's does.
(data) => {
  const DASHES = { "-": "", "--": "9 5", ":": "2 3", "-.": "9 4 2 4" };
  const dash = (line) => (typeof line === "string" ? DASHES[line] : line[1].map((length) => 3 * length).join(" "));
  const [W, H, LEFT, RIGHT, TOP, BOTTOM] = [640, 330, 62, 12, 10, 44];
  const at = (curve, places) => {
    const index = curve.shape.reduce((sum, size, d) => sum * size + Math.min(places[d], size - 1), 0);
    return curve.values[index];
  };
  const all = data.curves.flatMap((curve) => curve.values);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const bottom = data.log_y ? low : Math.min(low, 0);
  const dials = [...data.dials, { label: data.x_label, values: data.x }];
  const tell = (value) => {
    const plain = value === 0 || (Math.abs(value) >= 1e-4 && Math.abs(value) < 1e6);
    return plain ? value.toLocaleString("en", { maximumSignificantDigits: 3 }) : value.toExponential(1);
  };
  const colour = (curve) => (curve.color === "#1A1A1A" ? "currentColor" : curve.color); // black shows on white alone
  const ticks = (low, high, log) => {
    const found = [];
    if (log) {
      for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++) found.push(...[1, 2, 5].map((m) => m * 10 ** e));
    } else {
      const unit = 10 ** Math.floor(Math.log10((high - low) / 3));
      const step = [1, 2, 5, 10].map((m) => m * unit).find((s) => (high - low) / s <= 7);
      for (let k = Math.ceil(low / step); k * step <= high; k++) found.push(k * step);
    }
    return found.filter((value) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9) + 1e-12);
  };
  const scale = (low, high, log, from, to) => {
    const f = log ? Math.log : (value) => value;
    return (value) => from + ((f(Math.max(value, log ? low : -Infinity)) - f(low)) / (f(high) - f(low))) * (to - from);
  };
  const text = (x, y, content, more = "") => `<text x="${x}" y="${y}" ${more}>${content}</text>`;

  const draw = (box, places) => {
    const cursor = places[places.length - 1];
    const along = data.curves.map((curve) => data.x.map((_, i) => at(curve, [...places.slice(0, -1), i])));
    const least = data.least === undefined ? null : along[data.least].indexOf(Math.min(...along[data.least]));
    const top = data.zoom ? data.zoom * along[data.least][least] : high;
    const [left, right] = [Math.min(...data.x), Math.max(...data.x)];
    const px = scale(left, right, data.log_x, LEFT, W - RIGHT);
    const py = scale(bottom, top, data.log_y, H - BOTTOM, TOP);
    let svg = `<defs><clipPath id="${box.id}-inside"><rect x="${LEFT}" y="${TOP}" width="${W - RIGHT - LEFT}" height="${H - BOTTOM - TOP}"/></clipPath></defs>`;
    for (const tick of ticks(left, right, data.log_x)) {
      svg += `<path d="M${px(tick)} ${TOP}V${H - BOTTOM}" stroke="currentColor" opacity="0.15"/>`;
      svg += text(px(tick), H - BOTTOM + 16, tell(tick), 'text-anchor="middle"');
    }
    for (const tick of ticks(bottom, top, data.log_y)) {
      svg += `<path d="M${LEFT} ${py(tick)}H${W - RIGHT}" stroke="currentColor" opacity="0.15"/>`;
      svg += text(LEFT - 6, py(tick) + 4, tell(tick), 'text-anchor="end"');
    }
    svg += text((LEFT + W - RIGHT) / 2, H - 8, data.x_label, 'text-anchor="middle"');
    svg += text(14, H / 2 - 15, data.y_label, `text-anchor="middle" transform="rotate(-90 14 ${H / 2 - 15})"`);
    svg += `<g clip-path="url(#${box.id}-inside)" fill="none">`;
    svg += `<path d="M${px(data.x[cursor])} ${TOP}V${H - BOTTOM}" stroke="currentColor" opacity="0.6"/>`;
    data.curves.forEach((curve, k) => {
      const path = along[k].map((value, i) => `${px(data.x[i]).toFixed(1)} ${py(value).toFixed(1)}`).join("L");
      svg += `<path class="curve" d="M${path}" stroke="${colour(curve)}" stroke-width="2.5" stroke-dasharray="${dash(curve.line)}"/>`;
      svg += `<circle cx="${px(data.x[cursor])}" cy="${py(along[k][cursor])}" r="4" fill="${colour(curve)}"/>`;
    });
    if (least !== null) svg += `<circle cx="${px(data.x[least])}" cy="${py(along[data.least][least])}" r="9" stroke="currentColor" stroke-width="2"/>`;
    box.querySelector("svg").innerHTML = `${svg}</g>`;
    box.querySelectorAll("output").forEach((output, d) => (output.textContent = tell(dials[d].values[places[d]])));
    const told = data.curves.map((curve, k) => `<span style="white-space:nowrap"><b style="color:${colour(curve)}">■</b> ${curve.label}: <b>${tell(along[k][cursor])}</b></span>`);
    if (least !== null) told.push(`<span style="white-space:nowrap">○ least at <b>${tell(data.x[least])}</b></span>`);
    box.querySelector("p").innerHTML = told.join(" &ensp; ");
  };

  for (const box of document.querySelectorAll(`[id="${data.name}"]:not([data-made])`)) {
    box.dataset.made = "yes";
    box.style.maxWidth = "44rem";
    const rows = dials.map((dial) => `<label style="display:flex;gap:0.6em;align-items:center"><span style="flex:0 0 17em">${dial.label}</span>
      <input type="range" min="0" max="${dial.values.length - 1}" value="${dial.values.length >> 1}" style="flex:1"><output style="flex:0 0 4em"></output></label>`);
    box.innerHTML = `<svg viewBox="0 0 ${W} ${H}" style="width:100%;font-size:12px;font-family:sans-serif" fill="currentColor" role="img" aria-label="${data.y_label}"></svg><p></p>${rows.join("")}`;
    const inputs = [...box.querySelectorAll("input")];
    const update = () => draw(box, inputs.map((input) => Number(input.value)));
    inputs.forEach((input) => input.addEventListener("input", update));
    update();
  }
}
