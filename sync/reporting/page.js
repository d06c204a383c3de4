"use strict";
document.documentElement.classList.add("scripted");

/* The run: the values of the sample that is nearest to the pointer. */
function readable(figure) {
  const samples = JSON.parse(figure.dataset.samples), last = Number(figure.dataset.last);
  const plots = [...figure.querySelectorAll(".plot > svg:last-child")], crosses = [...figure.querySelectorAll(".cross")];
  const titles = [...figure.querySelectorAll("h3")].map((each) => each.textContent.split(",")[0].toLowerCase());
  const readout = figure.querySelector(".readout");

  function show(sample) {
    const x = `${(100 * sample[0]) / last}%`;
    for (const cross of crosses) {
      cross.setAttribute("x1", x);
      cross.setAttribute("x2", x);
      cross.style.visibility = "visible";
    }
    const step = document.createElement("b");
    step.textContent = `Step ${sample[0].toLocaleString("en")}`;
    const values = titles.map((title, at) => [title, sample[at + 1]]).filter(([, value]) => value !== "");
    readout.replaceChildren(step, ...values.map(([title, value]) => ` · ${title} ${value}`));
  }

  function hide() {
    for (const cross of crosses) cross.style.visibility = "hidden";
    readout.textContent = "Point at a picture to read its values.";
  }

  for (const plot of plots) {
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect(), wanted = ((event.clientX - box.left) / box.width) * last;
      show(samples.reduce((best, each) => (Math.abs(each[0] - wanted) < Math.abs(best[0] - wanted) ? each : best)));
    });
    plot.addEventListener("pointerleave", hide);
  }
  hide();
}

/* The table of units: sorted by a column, filtered by words, and at first only its beginning. */
function searchable(table) {
  const body = table.tBodies[0], rows = [...body.rows], few = Number(table.dataset.few);
  const more = table.parentElement.querySelector(".more"), search = table.parentElement.querySelector(".filter input");
  const heads = [...table.tHead.rows[0].cells];
  let all = rows.length <= few * 1.5;

  function draw() {
    const words = (search?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    const found = [...body.rows].filter((row) => words.every((word) => row.textContent.toLowerCase().includes(word)));
    const shown = new Set(all || words.length ? found : found.slice(0, few));
    for (const row of rows) row.hidden = !shown.has(row);
    more.hidden = all || words.length > 0;
    more.textContent = `Show all ${rows.length.toLocaleString("en")} units`;
  }

  function sort(head, column) {
    const down = head.getAttribute("aria-sort") !== "descending";
    for (const each of heads) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent;
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      return x !== "" && y !== "" && !isNaN(x) && !isNaN(y) ? x - y : x.localeCompare(y, "en", { numeric: true });
    };
    body.append(...[...body.rows].sort((a, b) => (down ? compare(b, a) : compare(a, b))));
    draw();
  }

  heads.forEach((head, column) => {
    if (head.textContent === "") return;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sorts";
    button.textContent = head.textContent;
    button.addEventListener("click", () => sort(head, column));
    head.replaceChildren(button);
  });
  more.addEventListener("click", () => { all = true; draw(); });
  search?.addEventListener("input", draw);
  draw();
}

for (const [selector, enliven] of [["#run", readable], [".units", searchable]]) {
  const element = document.querySelector(selector);
  if (element) enliven(element);
}
