// The lab without its program: sliders over results that were computed when this page was built.
for (const figure of document.querySelectorAll("figure.lab")) {
  const told = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector("svg"), steps = told.norms.length;
  const run = {
    steps, bad: new Set(told.bad), norms: told.norms, numbers: Array.from({ length: steps }, (_, i) => i + 1),
  };
  const rules = told.rules.map((rule, look) => ({ ...rule, look, label: String(look + 1) }));
  const inputs = [...figure.querySelectorAll("input")], outputs = [...figure.querySelectorAll("output")];
  const show = (k) => {
    const rule = rules[k], made = rule.made[inputs[k].value];
    Object.assign(rule, { clipped: new Uint8Array(steps), left: Float64Array.from(run.norms) });
    rule.limit = new Float64Array(steps).fill(made.limit ?? Infinity);
    made.cut.forEach((i, at) => {
      rule.clipped[i] = 1;
      rule.left[i] = made.left[at];
      if (made.limit === null) rule.limit[i] = made.limits[at];
    });
    rules.forEach((other) => (other.chosen = other === rule));
    inputs[k].setAttribute("aria-valuetext", made.text);
    outputs[k].textContent = `${made.text}: clips ${labShare(made.share)} of the steps, ` +
      `${labShare(made.false)} of the good ones, and misses ${labShare(made.missed)} of the bad ones`;
  };
  const draw = () => labPicture(svg, run, rules, { from: 0, to: steps });
  inputs.forEach((input, k) => input.addEventListener("input", () => { show(k); draw(); }));
  rules.forEach((_, k) => show(rules.length - 1 - k));
  new ResizeObserver(draw).observe(figure);
}
