// The table of the atlas: a click on a heading sorts, three lists choose.
document.addEventListener("DOMContentLoaded", () => {
  const table = document.querySelector("table.atlas");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const text = (row, column) => row.cells[column].textContent;
  const value = (row, column) => {
    const cell = text(row, column);
    return cell === "∞" ? Infinity : parseFloat(cell);
  };

  const bar = document.createElement("p");
  const lists = ["place", "rule", "problem"].map((name, column) => {
    const list = document.createElement("select");
    const kinds = new Set(rows.map((row) => text(row, column)));
    for (const kind of [`every ${name}`, ...kinds]) list.add(new Option(kind));
    list.setAttribute("aria-label", name);
    list.addEventListener("change", show);
    bar.append(list, " ");
    return list;
  });
  table.parentElement.before(bar);
  lists[0].value = table.dataset.place;
  lists[2].value = table.dataset.trouble;

  function show() {
    for (const row of rows)
      row.hidden = lists.some((list, i) => list.selectedIndex && text(row, i) !== list.value);
  }

  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const order = (a, b) => {
        const [x, y] = [value(a, column), value(b, column)];
        if (column < 3) return text(a, column).localeCompare(text(b, column));
        if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y);
        return x < y ? -1 : x > y ? 1 : 0;
      };
      const sorted = [...rows].sort((a, b) => (down ? order(b, a) : order(a, b)));
      body.append(...sorted);
    });
  });
  show();
});
