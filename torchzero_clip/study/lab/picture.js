"use strict";
// The picture of a run: its norms, the limits of rules, and the steps that each rule clips.
// The lab and the documentation use the same picture. It does not simulate anything itself.

function labPicture(svg, run, rules, view) {
  const width = Math.max(svg.clientWidth || 800, 280), left = 46, right = 8, top = 12;
  const tall = Math.min(280, Math.max(170, Math.round(width * 0.3))), row = 15;
  const strips = top + tall + 8, bottom = strips + rules.length * row;
  const height = bottom + 34, wide = width - left - right;
  const from = view.from, to = Math.max(view.to, from + 1), count = to - from;
  const columns = Math.max(1, Math.min(count, Math.floor(wide)));
  const x = (i) => left + ((i - from + 0.5) / count) * wide;
  const short = (n) => n.toFixed(1);

  // --- the scale
  const seen = [run.norms, ...rules.map((rule) => rule.left)].map((values) => labExtremes(values, from, to, Number.MIN_VALUE));
  let low = Math.min(...seen.map(([least]) => least)), high = Math.max(...seen.map(([, most]) => most));
  if (!(high > 0)) { low = 0.1; high = 10; }
  low /= 1.25; high = Math.min(high * 1.25, Number.MAX_VALUE);
  const scale = tall / (Math.log(high) - Math.log(low));
  const y = (n) => top + Math.min(Math.max((Math.log(high) - Math.log(n)) * scale, 0), tall);

  const parts = [];
  const add = (name, attributes, text = "") => {
    const told = Object.entries(attributes).map(([key, value]) => ` ${key}="${value}"`).join("");
    parts.push(`<${name}${told}>${text}</${name}>`);
  };

  // --- the axes
  const decades = Math.log10(high) - Math.log10(low), ticks = [];
  const steps = decades > 2.5 ? [1] : decades > 1 ? [1, 2, 5] : [1, 1.5, 2, 3, 5, 7];
  const every = Math.max(1, Math.ceil(decades / 7));
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    if (power % every === 0) for (const n of steps) ticks.push(n * 10 ** power);
  for (const tick of ticks.filter((n) => n >= low && n <= high)) {
    add("path", { class: "grid", d: `M${left} ${short(y(tick))}h${wide}` });
    const label = tick >= 1e5 || tick < 1e-3 ? tick.toExponential(0) : String(+tick.toPrecision(2));
    add("text", { x: left - 6, y: short(y(tick) + 4), "text-anchor": "end" }, label);
  }
  const first = run.numbers[from], last = run.numbers[to - 1];
  const rough = Math.max((last - first) / Math.max(2, wide / 110), 1);
  const magnitude = 10 ** Math.floor(Math.log10(rough));
  const apart = [1, 2, 5, 10].map((n) => n * magnitude).find((n) => n >= rough) || 1;
  let place = from;
  for (let n = Math.ceil(first / apart) * apart; n <= last; n += apart) {
    while (place < to - 1 && run.numbers[place] < n) place++;
    const label = n.toLocaleString("en");
    const half = label.length * 3.5, at = Math.min(Math.max(x(place), left + half), width - half);
    add("path", { class: "grid", d: `M${short(x(place))} ${bottom + 1}v4` });
    add("text", { x: short(at), y: bottom + 17, "text-anchor": "middle" }, label);
  }
  add("text", { x: left + wide / 2, y: bottom + 31, "text-anchor": "middle" }, "step");

  // --- a line. If a pixel has many steps, it shows their least and largest value. Limits are joined
  // across steps without a limit, because rules such as ZClip have one only in steps that they clip
  const line = (values, joined = false) => {
    let path = "", open = false;
    for (let column = 0; column < columns; column++) {
      const start = from + Math.floor((column * count) / columns);
      const stop = from + Math.floor(((column + 1) * count) / columns);
      const [least, most] = labExtremes(values, start, stop, 0);
      if (least > most) { open = open && joined; continue; }
      const at = short(x((start + stop - 1) / 2));
      path += open ? `L${at} ${short(y(least))}` : `M${short(at - 1.5)} ${short(y(least))}h1.5`;
      if (most > least) path += `V${short(y(most))}`;
      open = true;
    }
    return path;
  };

  for (const i of run.bad) {
    if (i < from || i >= to) continue;
    add("path", { class: "bad", d: `M${short(x(i))} ${top}V${top + tall}` });
    add("path", { class: "mark", d: `M${short(x(i) - 4)} ${top - 9}h8l-4 7z` });
  }
  for (const [i, what, size] of run.marks || []) {
    if (i < from || i >= to) continue;
    const told = { skipped: "skipped", back: `back by ${size} steps`, left_out: `${size} batches left out` }[what];
    const d = { skipped: `M${short(x(i))} ${top + tall}v6`, back: `M${short(x(i))} ${top}V${top + tall}` }[what];
    add("path", { class: `went ${what}`, d: d || `M${short(x(i))} ${top + tall - 9}h8l-4 7z` }, `<title>${told}</title>`);
  }
  add("path", { class: "norm", d: line(run.norms) });
  rules.forEach((rule, k) => {
    const look = `rule${rule.look}`, under = strips + k * row;
    let cuts = "", marks = "";
    for (let column = 0; column < columns; column++) {
      const start = from + Math.floor((column * count) / columns);
      const stop = from + Math.floor(((column + 1) * count) / columns);
      let worst = -1;
      for (let i = start; i < stop; i++)
        if (rule.clipped[i] > 0 && (worst < 0 || run.norms[i] > run.norms[worst])) worst = i;
      if (worst < 0) continue;
      const at = short(x((start + stop - 1) / 2));
      cuts += `M${at} ${short(y(run.norms[worst]))}V${short(y(rule.left[worst]))}`;
      marks += `M${at} ${under}v${row - 4}`;
    }
    if (rule.chosen) add("path", { class: `cut ${look}`, d: cuts });
    add("path", { class: `limit ${look}`, d: line(rule.limit, true) });
    add("path", { class: "grid", d: `M${left} ${under + row - 3}h${wide}` });
    add("path", { class: `clipped ${look}`, d: marks, "stroke-width": short(Math.max(1.5, Math.min(5, wide / count))) });
    add("text", { x: left - 6, y: under + row - 5, "text-anchor": "end" }, rule.label);
  });

  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  svg.innerHTML = parts.join("");
  return (at) => Math.min(Math.max(Math.floor(from + ((at - left) / wide) * count), from), to - 1);
}

// Return the least and the largest of the finite numbers that are not below `floor`.
function labExtremes(values, start, stop, floor) {
  let least = Infinity, most = 0;
  for (let i = start; i < stop; i++) {
    const n = values[i];
    if (n >= floor && n < Infinity) {
      if (n < least) least = n;
      if (n > most) most = n;
    }
  }
  return [least, most];
}

// Return the numbers in a text that session.packed() has made: float64 in base64.
function labNumbers(text) {
  const letters = atob(text), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = letters.charCodeAt(i);
  return new Float64Array(bytes.buffer);
}

function labShort(n) {
  if (n === null || n === undefined || Number.isNaN(n)) return "–";
  if (!Number.isFinite(n)) return "infinite";
  const far = n !== 0 && (Math.abs(n) >= 1e5 || Math.abs(n) < 1e-3);
  return far ? n.toExponential(2).replace(/\.?0*e\+?/, "e") : String(+n.toPrecision(4));
}

function labTime(seconds) {
  const [n, unit] = seconds < 90 ? [seconds, "second"] : [seconds / 60, "minute"];
  return `${Math.ceil(n)} ${unit}${n > 1 ? "s" : ""}`;
}

function labShare(n) {
  return n === null || n === undefined ? "–" : `${+(100 * n).toPrecision(n < 0.1 ? 2 : 3)} %`;
}
