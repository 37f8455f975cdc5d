// Tables inside class="sortable": a click on a heading sorts, the next one the other way round.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".sortable table")) {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const text = (row) => row.cells[column].textContent;
        const order = (a, b) => text(a).localeCompare(text(b), undefined, { numeric: true });
        body.append(...[...body.rows].sort((a, b) => (down ? order(b, a) : order(a, b))));
      });
    });
  }
});
