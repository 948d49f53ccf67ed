"use strict";
(() => {
  const choice = document.getElementById("choice");
  const table = document.getElementById("board");
  const body = table.tBodies[0];
  const said = document.getElementById("said");
  const show = () => {
    const wanted = choice.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of body.rows) {
      const of = row.dataset;
      const chosen = of.threat === choice.elements.threat.value && of.loss === choice.elements.loss.value;
      row.hidden = !(chosen && wanted.every((word) => of.words.includes(word)));
      shown += !row.hidden;
    }
    said.textContent = `${shown} shown`;
  };
  const value = (row, column) => row.cells[column].dataset.sort;
  const sort = (header, column) => {
    const descending = header.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const compare = (a, b) => {
      const [x, y] = [value(a, column), value(b, column)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return descending ? -order : order;
    };
    body.append(...[...body.rows].sort(compare));
  };
  [...table.tHead.rows[0].cells].forEach((header, column) => {
    const button = header.querySelector("button");
    button.disabled = false;
    button.addEventListener("click", () => sort(header, column));
  });
  choice.hidden = false;
  choice.addEventListener("input", show);
  choice.addEventListener("submit", (event) => event.preventDefault());
  show();
})();
