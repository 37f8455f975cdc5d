// The page of the lab. It asks the program on this machine, which simulates the rules.

const $ = (id) => document.getElementById(id);
const run = { version: 0, steps: 0, norms: new Float64Array(0), numbers: new Float64Array(0), bad: new Set(), marks: [] };
const MADE = ["limit", "left", "clipped"]; // the values of each row and rule
const cards = [];
const view = { from: 0, to: 0 };
let pixel = () => 0, drawing = false, drawn = 0, took = 0, serial = 0, loading = null;

// ---------------------------------------------------------------- requests

async function ask(name, question) {
  const answer = await fetch(name, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(question),
  });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

async function lines(name, question, signal, each) {
  const answer = await fetch(name, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(question),
    signal,
  });
  if (!answer.ok) throw new Error(await answer.text());
  const reader = answer.body.getReader(), decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    rest += decoder.decode(value, { stream: true });
    const whole = rest.split("\n");
    rest = whole.pop();
    whole.filter(Boolean).map(JSON.parse).forEach(each);
  }
  if (rest) each(JSON.parse(rest));
}

function complain(error, where = $("alert")) {
  if (error && error.name === "AbortError") return;
  where.textContent = error ? error.message || String(error) : "";
  where.hidden = !error;
}

// ---------------------------------------------------------------- the run

function load(version) {
  loading = (loading || Promise.resolve()).then(() => read(version)).catch(complain);
  return loading;
}

async function read(version) {
  const grown = version === run.version;
  const told = await ask("run", { from: grown ? run.steps : 0, version: run.version });
  $("title").textContent = told.title || "Lab";
  document.title = `${told.title} – lab`;
  $("note").textContent = told.notes.join(" ");
  $("note").hidden = !told.notes.length;
  options($("runs"), ["", ...told.runs], told.runs.includes(told.title) ? told.title : "");
  if (!told.steps) return;
  if (!$("alert").dataset.ended) complain(null);
  const all = view.to === run.steps && view.from === 0;
  const anew = told.version !== run.version;
  for (const [name, packed] of [["norms", told.norms], ["numbers", told.numbers]]) {
    const more = labNumbers(packed), joined = new Float64Array(told.from + more.length);
    joined.set(run[name].subarray(0, told.from));
    joined.set(more, told.from);
    run[name] = joined;
  }
  Object.assign(run, { version: told.version, steps: told.steps, stride: told.stride, units: told.units });
  run.marks = [...run.marks.filter(([i]) => i < told.from), ...told.marks];
  if (anew) run.bad = new Set(told.spikes);
  else told.spikes.filter((i) => i >= told.from).forEach((i) => run.bad.add(i));
  const row = told.stride > 1 ? ", one row for " + told.stride + " steps" : "";
  const follow = told.follows ? " so far" : "";
  $("facts").textContent =
    `${told.steps.toLocaleString("en")} rows${follow}${row}${told.units > 1 ? ` of ${told.units} tensors` : ""}. ` +
    `The median norm is ${labShort(told.median)}, 99 % are below ${labShort(told.high)}, ` +
    `the largest is ${labShort(told.largest)}.` +
    (told.broken ? ` ${told.broken.toLocaleString("en")} are infinite or NaN.` : "") +
    (told.lost ? ` Rounding lost ${labShort(100 * told.lost)} % of the updates, because weights are in half precision.` : "");
  $("columns-label").hidden = told.columns.length < 2;
  options($("columns"), told.columns, told.column);
  if (anew || all || view.to > run.steps) whole();
  if (told.catalogue.length) options($("catalogue"), told.catalogue, told.catalogue[0]);
  showBad();
  if (anew) {
    const texts = cards.length ? cards.map((card) => card.text) : told.catalogue.slice(0, 3);
    if (cards.length && cards[0].first) texts[0] = told.catalogue[0]; // its number was chosen for another run
    const first = !cards.length;
    while (cards.length) drop(cards[0]);
    for (const text of texts) await start(text).catch(complain);
    if (cards.length) cards[0].first = first || texts[0] === told.catalogue[0];
  } else goOn((card) => card.have);
  largest();
  draw();
}

function options(select, values, chosen) {
  select.replaceChildren(...values.map((value) => new Option(value || "–", value, false, value === chosen)));
}

function whole() {
  view.from = 0;
  view.to = run.steps;
  showView();
}

function showView() {
  $("from").value = run.numbers[view.from] ?? "";
  $("to").value = run.numbers[view.to - 1] ?? "";
}

function place(number) {
  let low = 0, high = run.steps - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (run.numbers[middle] < number) low = middle + 1;
    else high = middle;
  }
  return low;
}

// ---------------------------------------------------------------- bad steps

function showBad() {
  const sorted = [...run.bad].sort((a, b) => a - b), parts = [];
  for (let i = 0; i < sorted.length; ) {
    let j = i;
    while (j + 1 < sorted.length && sorted[j + 1] === sorted[j] + 1) j++;
    const [a, b] = [run.numbers[sorted[i]], run.numbers[sorted[j]]];
    parts.push(a === b ? `${a}` : `${a}-${b}`);
    i = j + 1;
  }
  $("bad").value = parts.join(", ");
}

function readBad() {
  const found = new Set();
  for (const part of $("bad").value.split(/[,;\s]+/).filter(Boolean)) {
    const match = /^(\d+)(?:-(\d+))?$/.exec(part);
    if (!match) return complain(new Error(`bad steps must be steps or ranges, such as 120, 340-350, got ${part}`));
    const [a, b] = [+match[1], +(match[2] ?? match[1])];
    for (let i = place(a); i < run.steps && run.numbers[i] <= b; i++) if (run.numbers[i] >= a) found.add(i);
  }
  complain(null);
  run.bad = found;
  judgeAgain();
}

function toggle(i) {
  if (!run.bad.delete(i)) run.bad.add(i);
  showBad();
  judgeAgain();
}

function judgeAgain() {
  largest();
  draw();
  goOn((card) => Math.max(card.have - 1, 0));
}

// Continue each card where it is. A card that was stopped stays stopped.
function goOn(from) {
  cards.filter((card) => !card.stopped).forEach((card) => simulate(card, from(card)));
  results();
}

// ---------------------------------------------------------------- rules

async function start(text) {
  if (cards.length >= 6) throw new Error("at most six rules can be compared: remove one first");
  const used = new Set(cards.map((card) => card.look));
  const look = [0, 1, 2, 3, 4, 5].find((i) => !used.has(i));
  const card = { id: ++serial, look, text, path: [], have: 0, waiting: null, busy: false };
  for (const name of MADE) card[name] = new Float64Array(0);
  Object.assign(card, await ask("rule", { text }));
  card.label = String(look + 1);
  cards.push(card);
  build(card);
  choose(card);
  simulate(card, 0);
  $("adding").hidden = cards.length >= 6;
}

function drop(card) {
  card.stop?.abort();
  card.element.remove();
  cards.splice(cards.indexOf(card), 1);
  if (card.chosen && cards.length) choose(cards[0]);
  $("adding").hidden = cards.length >= 6;
  results();
  largest();
  draw();
}

function choose(card) {
  cards.forEach((other) => (other.chosen = other === card));
  draw();
}

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function build(card) {
  const id = `card${card.id}`;
  card.input = element("input", { className: "text", id: `${id}-text`, value: card.text, spellcheck: false });
  card.sliding = element("div");
  card.shown = element("p", { className: "result" });
  card.halt = element("button", { type: "button", hidden: true });
  card.wrong = element("p", { className: "alert", hidden: true });
  card.wrong.setAttribute("role", "alert");
  card.hint = element("p", { className: "soft", hidden: true });
  card.code = element("pre", { className: "chain" });
  card.copied = element("span", { className: "soft" });
  card.copied.setAttribute("role", "status");
  const copy = element("button", { type: "button", className: "main", textContent: "Copy this chain" });
  copy.setAttribute("aria-describedby", `${id}-text`);
  const away = element("button", { type: "button", textContent: "Remove" });
  away.setAttribute("aria-label", `Remove rule ${card.label}`);
  card.element = element(
    "section",
    { className: `card frame rule${card.look}` },
    element("h3", {}, element("span", { textContent: `Rule ${card.label}` }), away),
    element("label", { htmlFor: card.input.id, textContent: "rule as Python code" }),
    card.input, card.wrong, card.sliding, card.shown, card.halt, card.hint, card.code,
    element("div", { className: "row" }, copy, card.copied),
  );
  card.element.setAttribute("aria-label", `Rule ${card.label}`);
  card.input.addEventListener("change", () => change(card, { text: card.input.value }));
  card.element.addEventListener("focusin", () => card.chosen || choose(card));
  card.halt.addEventListener("click", () => (card.stopped ? simulate(card, card.have) : halt(card)));
  away.addEventListener("click", () => { drop(card); $("catalogue").focus(); });
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(card.chain);
      card.copied.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(card.code);
      card.copied.textContent = "selected: copy it with Ctrl+C";
    }
    setTimeout(() => (card.copied.textContent = ""), 3000);
  });
  $("cards").append(card.element);
  fill(card);
}

// Show the sliders of a card. Existing sliders stay, because the user may be dragging one.
function fill(card) {
  card.input.value = card.text;
  card.code.textContent = card.chain;
  card.hint.textContent = card.note;
  card.hint.hidden = !card.note;
  const names = card.sliders.map((slider) => slider.name).join();
  if (card.names !== names) {
    card.names = names;
    card.controls = card.sliders.map((slider, k) => {
      const id = `card${card.id}-${k}`;
      const range = element("input", { type: "range", id, min: 0, step: 1 });
      const exact = element("input", { id: `${id}-exact`, autocomplete: "off" });
      exact.setAttribute("aria-label", `${slider.name} as a number`);
      range.addEventListener("input", () => move(card, k, card.sliders[k].positions[range.value]));
      exact.addEventListener("change", () => move(card, k, exact.value));
      return { range, exact, label: element("label", { htmlFor: id, textContent: slider.name }) };
    });
    card.sliding.replaceChildren(
      ...card.controls.map((one) => element("div", { className: "slider" }, one.label, one.range, one.exact)),
    );
  }
  card.sliders.forEach((slider, k) => {
    const { range, exact } = card.controls[k];
    range.max = slider.positions.length - 1;
    if (document.activeElement !== range || slider.positions[range.value] !== slider.value)
      range.value = Math.max(0, slider.positions.indexOf(slider.value));
    range.setAttribute("aria-valuetext", slider.value);
    exact.value = slider.value;
  });
}

function move(card, k, value) {
  card.controls[k].range.setAttribute("aria-valuetext", value);
  change(card, { text: card.text, path: card.sliders[k].path, value });
}

// Send only the last of many changes: a drag makes more changes than the program can answer.
async function change(card, question) {
  card.waiting = question;
  if (card.busy) return;
  card.busy = true;
  while (card.waiting) {
    const now = card.waiting;
    card.waiting = null;
    try {
      const told = await ask("rule", now);
      Object.assign(card, told, { path: now.path || [] });
      if (!card.waiting) fill(card);
      complain(null, card.wrong);
      await simulate(card, 0, true);
    } catch (error) {
      complain(error, card.wrong);
    }
  }
  card.busy = false;
}

// Resolve with the first steps or with a preview. The other steps follow as they arrive.
function simulate(card, from) {
  card.stop?.abort();
  const stop = (card.stop = new AbortController());
  const question = { text: card.text, path: card.path, from, version: run.version, bad: [...run.bad] };
  const made = { stopped: false, preview: from ? card.preview : null };
  for (const name of MADE) {
    made[name] = new Float64Array(run.steps).fill(NaN);
    if (from) made[name].set(card[name].subarray(0, run.steps));
  }
  card.stopped = false;
  return new Promise((first) => {
    const show = (changes) => {
      Object.assign(card, made, changes);
      results();
      draw();
      first();
    };
    const take = (told) => {
      if (stop.signal.aborted) return;
      if (told.error) return complain(new Error(told.error), card.wrong);
      if (told.every) {
        const rows = labNumbers(told.rows);
        for (const name of MADE) labNumbers(told[name]).forEach((x, at) => (made[name][rows[at]] = x));
        made.preview = { every: told.every, clipped: told.share };
        show({ have: 0, seconds: told.seconds });
      } else if (told.limit) {
        for (const name of MADE) made[name].set(labNumbers(told[name]).subarray(0, run.steps - told.from), told.from);
      } else if (told.summary) {
        const have = Math.min(run.steps, told.steps);
        if (have === run.steps) made.preview = null;
        show({ have, summary: told.summary, seconds: told.seconds });
      }
      if (told.end) { say(); largest(); }
    };
    lines("simulate", question, stop.signal, take)
      .catch((error) => complain(error, card.wrong))
      .finally(first);
    stop.signal.addEventListener("abort", first);
  });
}

function halt(card) {
  card.stop.abort();
  card.stopped = true;
  results();
  card.halt.focus();
}

// ---------------------------------------------------------------- pictures and texts

function results() {
  const rows = cards.map((card) => {
    const told = card.summary || {}, sure = !card.preview && !card.stopped, marked = run.bad.size > 0 && sure;
    showProgress(card);
    return element(
      "tr", {},
      element("th", { scope: "row" }, element("code", { textContent: `${card.label}: ${card.text}` })),
      element("td", { textContent: share(card) + (card.have < run.steps ? " …" : "") }),
      element("td", { textContent: sure ? labShort(told.largest) : "…" }),
      element("td", { textContent: marked ? labShare(told.false) : "–" }),
      element("td", { textContent: marked ? labShare(told.missed) : "–" }),
    );
  });
  $("results").tBodies[0].replaceChildren(...rows);
}

// For a simulation that is not complete: its progress, the remaining time, and a button to stop it.
function showProgress(card) {
  const ready = card.have >= run.steps, known = card.preview || card.summary, parts = [];
  const long = card.seconds > 2 || card.preview;
  if (card.preview) parts.push(`estimated from one row in ${card.preview.every.toLocaleString("en")}`);
  else if (!ready) parts.push(`only the first ${card.have.toLocaleString("en")}`);
  if (card.stopped) parts.push(`stopped after ${card.have.toLocaleString("en")}`);
  else if (!ready && long) parts.push(`complete in about ${labTime(card.seconds)}`);
  card.shown.textContent = known ? [`clips ${share(card)} of the steps`, ...parts].join(", ") : "";
  card.halt.hidden = ready || !(card.stopped || long);
  card.halt.textContent = card.stopped ? "Continue" : "Stop";
  card.halt.setAttribute("aria-label", `${card.halt.textContent} with rule ${card.label}`);
}

function share(card) {
  return (card.preview ? "about " : "") + labShare((card.preview || card.summary)?.clipped);
}

let saying = 0;
function say() {
  clearTimeout(saying);
  saying = setTimeout(() => {
    const told = cards.map((card) => `${card.text} clips ${share(card)} of the steps`);
    $("said").textContent = `The norms of ${run.steps} steps, and the threshold and the clipped steps of each rule. ${told.join(". ")}.`;
    const chosen = cards.findIndex((card) => card.chosen);
    if (chosen >= 0) $("status").textContent = told[chosen];
  }, 600);
}

function largest() {
  const order = [], before = (a, b) => run.norms[b] - run.norms[a] || a - b;
  run.norms.forEach((norm, i) => {
    if (!(norm >= 0) || (order.length === 10 && norm <= run.norms[order[9]])) return;
    order.push(i);
    order.sort(before).splice(10);
  });
  const head = ["step", "bad", "norm", ...cards.map((card) => `after ${card.label}`)];
  $("largest").tHead.replaceChildren(
    element("tr", {}, ...head.map((name) => element("th", { scope: "col", textContent: name }))),
  );
  const rows = order.map((i) => {
    const box = element("input", { type: "checkbox", checked: run.bad.has(i), id: `bad${i}` });
    box.setAttribute("aria-label", `step ${run.numbers[i]} is bad`);
    box.addEventListener("change", () => { toggle(i); $(`bad${i}`)?.focus(); });
    const left = cards.map((card) => element("td", { textContent: i < card.have ? labShort(card.left[i]) : "…" }));
    return element(
      "tr", {}, element("th", { scope: "row", textContent: run.numbers[i].toLocaleString("en") }),
      element("td", {}, box), element("td", { textContent: labShort(run.norms[i]) }), ...left,
    );
  });
  $("largest").tBodies[0].replaceChildren(...rows);
}

// Draw a long run less often, so that the program has time to simulate.
function draw() {
  if (drawing || !run.steps) return;
  drawing = true;
  setTimeout(() => requestAnimationFrame(() => {
    const since = performance.now();
    drawing = false;
    pixel = labPicture($("picture"), run, cards, view);
    const kept = getComputedStyle($("stage")).position === "sticky" ? $("stage").offsetHeight + 12 : 0;
    document.documentElement.style.scrollPaddingTop = `${kept}px`; // so that the picture does not cover the focused element
    drawn = performance.now();
    took = drawn - since;
  }), took < 30 ? 0 : Math.max(0, drawn + 4 * took - performance.now()));
}

function nearest(event) {
  const box = $("picture").getBoundingClientRect();
  const near = [-5, 5].map((d) => pixel(event.clientX - box.left + d));
  let best = near[0];
  for (let i = near[0]; i <= near[1]; i++) {
    if (run.bad.has(i)) return i;
    if (run.norms[i] > run.norms[best]) best = i;
  }
  return best;
}

// ---------------------------------------------------------------- events

$("picture").addEventListener("click", (event) => run.steps && toggle(nearest(event)));
$("picture").addEventListener("pointermove", (event) => {
  if (!run.steps) return;
  const i = nearest(event);
  const parts = cards.filter((card) => i < card.have).map((card) => {
    const limit = card.limit[i] < Infinity ? `, limit ${labShort(card.limit[i])}` : ", no limit";
    return `after ${card.label} ${labShort(card.left[i])}${limit}`;
  });
  const words = { skipped: () => "skipped", back: (n) => `after a rollback of ${n} steps`, left_out: (n) => `${n} batches skipped` };
  parts.unshift(...run.marks.filter(([k]) => k === i).map(([, what, n]) => words[what](n)));
  $("readout").textContent = [`Step ${run.numbers[i].toLocaleString("en")}: norm ${labShort(run.norms[i])}`, ...parts].join("; ");
});
for (const name of ["from", "to"])
  $(name).addEventListener("change", () => {
    const [a, b] = [place(+$("from").value || 0), place(+$("to").value || run.numbers[run.steps - 1])];
    view.from = Math.min(a, b);
    view.to = Math.max(a, b) + 1;
    showView();
    draw();
  });
$("all").addEventListener("click", () => { whole(); draw(); });
$("bad").addEventListener("change", readBad);
$("add").addEventListener("click", () => start($("catalogue").value).catch(complain));
$("runs").addEventListener("change", () => $("runs").value && pick({ run: $("runs").value }));
$("columns").addEventListener("change", () => pick({ column: $("columns").value }));
$("file").addEventListener("change", () => $("file").files[0] && send($("file").files[0]));

function pick(question) {
  ask("choose", question).then(() => load()).catch(complain);
}

async function send(file) {
  try {
    const answer = await fetch("file", {
      method: "POST",
      headers: { "Content-Type": "application/octet-stream", "X-Name": encodeURIComponent(file.name) },
      body: file,
    });
    if (!answer.ok) throw new Error(await answer.text());
    await load();
  } catch (error) {
    complain(error);
  }
}

for (const name of ["dragover", "dragleave", "drop"])
  document.addEventListener(name, (event) => {
    event.preventDefault();
    document.body.classList.toggle("dropping", name === "dragover");
    if (name === "drop" && event.dataTransfer.files[0]) send(event.dataTransfer.files[0]);
  });

new ResizeObserver(draw).observe($("picture").parentElement);
const events = new EventSource("events");
events.onmessage = (event) => {
  const told = JSON.parse(event.data);
  if (told.version !== run.version || told.steps !== run.steps) load(told.version);
};
events.onerror = () => {
  events.close();
  $("alert").dataset.ended = "1";
  complain(new Error("The program has stopped, so this page no longer updates."));
};
