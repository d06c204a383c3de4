"use strict";
document.documentElement.classList.add("scripted");

const SVG = "http://www.w3.org/2000/svg";

function make(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

/* Numbers of 1, 2 or 5 times a power of ten, at distances of at least `least`. */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => power * factor >= least * (1 - 1e-9));
}

/* Lanes: the picture becomes wider than its window, which scrolls by itself. */
function zoomable(figure) {
  const scroll = figure.querySelector(".scroll"), picture = scroll.querySelector("svg");
  const axis = picture.querySelector(".axis"), inspector = figure.querySelector(".inspector");
  const endMs = Number(picture.dataset.end) * 1e3, top = Number(picture.dataset.top);
  const stages = [...picture.querySelectorAll(".stage")], ready = [...picture.querySelectorAll(".ready")];
  const names = make("g", {});
  picture.append(names);
  const MOST = 200, LETTER = 6.2;
  let zoom = 1, drawn = 0, here = null;

  function draw() {
    const width = picture.clientWidth, visible = scroll.clientWidth;
    if (!width || !(endMs > 0)) return;
    drawn = visible;
    const step = roundStep((endMs / width) * 90), height = picture.getAttribute("height");
    axis.replaceChildren();
    names.replaceChildren();
    const first = Math.floor(((scroll.scrollLeft - visible) / width) * endMs / step) * step;
    const last = Math.min(endMs, ((scroll.scrollLeft + 2 * visible) / width) * endMs);
    for (let at = Math.max(first, 0); at <= last + step * 1e-6; at += step) {
      const x = (at / endMs) * width;
      axis.append(make("line", { x1: x, x2: x, y1: top - 6, y2: height, class: "grid" }));
      const anchor = at < step / 2 ? "start" : x > width - 40 ? "end" : "middle";
      axis.append(make("text", { x, y: top - 10, class: "tick", "text-anchor": anchor }, `${Number(at.toPrecision(6))} ms`));
    }
    for (const stage of stages) {
      const x = (parseFloat(stage.getAttribute("x")) / 100) * width;
      const wide = (parseFloat(stage.getAttribute("width")) / 100) * width;
      if (x + wide < scroll.scrollLeft - visible || x > scroll.scrollLeft + 2 * visible) continue;
      const name = stage.dataset.name;
      if (name.length * LETTER + 10 > wide) continue;
      const left = clamp(scroll.scrollLeft + 5, x + 5, x + wide - name.length * LETTER - 5);
      names.append(make("text", { x: left, y: Number(stage.getAttribute("y")) + 13, class: "name" }, name));
    }
  }

  function zoomTo(wanted, x) {
    const before = picture.clientWidth, at = (scroll.scrollLeft + x) / before;
    zoom = clamp(wanted, 1, MOST);
    picture.style.width = `${zoom * 100}%`;
    scroll.scrollLeft = at * picture.clientWidth - x;
    draw();
  }

  function pick(stage, bring) {
    here = stage;
    picture.classList.toggle("picked", stage !== null);
    for (const each of [...stages, ...ready]) each.classList.toggle("on", stage !== null && each.dataset.message === stage.dataset.message);
    for (const each of stages) each.classList.toggle("here", each === stage);
    if (stage === null) {
      inspector.textContent = "Select a stage to follow its message.";
      return;
    }
    const text = stage.querySelector("title").textContent, at = text.indexOf(":"), name = document.createElement("b");
    name.textContent = text.slice(0, at);
    inspector.replaceChildren(name, text.slice(at + 1).trimStart() === "" ? "" : ` ${text.slice(at + 1).trimStart()}`);
    if (!bring) return;
    const x = (parseFloat(stage.getAttribute("x")) / 100) * picture.clientWidth;
    if (x < scroll.scrollLeft || x > scroll.scrollLeft + scroll.clientWidth) scroll.scrollLeft = x - scroll.clientWidth / 3;
  }

  function along(direction) {
    if (here === null) return pick(stages[0] ?? null, true);
    const same = stages.filter((each) => each.dataset.message === here.dataset.message);
    pick(same[clamp(same.indexOf(here) + direction, 0, same.length - 1)], true);
  }

  function across(direction) {
    if (here === null) return pick(stages[0] ?? null, true);
    const messages = [...new Set(stages.map((each) => Number(each.dataset.message)))].sort((a, b) => a - b);
    const next = messages[clamp(messages.indexOf(Number(here.dataset.message)) + direction, 0, messages.length - 1)];
    pick(stages.find((each) => Number(each.dataset.message) === next), true);
  }

  figure.querySelector(".buttons").addEventListener("click", (event) => {
    const kind = event.target.closest("button")?.dataset.zoom;
    if (kind) zoomTo(kind === "fit" ? 1 : zoom * (kind === "in" ? 2 : 0.5), scroll.clientWidth / 2);
  });
  const keys = {
    "+": () => zoomTo(zoom * 2, scroll.clientWidth / 2), "=": () => zoomTo(zoom * 2, scroll.clientWidth / 2),
    "-": () => zoomTo(zoom / 2, scroll.clientWidth / 2), 0: () => zoomTo(1, 0), Escape: () => pick(null),
    ArrowRight: () => along(1), ArrowLeft: () => along(-1), ArrowDown: () => across(1), ArrowUp: () => across(-1),
  };
  scroll.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
  scroll.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoomTo(zoom * Math.exp(-event.deltaY / 300), event.clientX - scroll.getBoundingClientRect().left);
  }, { passive: false });

  /* two fingers zoom, a mouse drags */
  const fingers = new Map();
  let gap = 0, moved = 0;
  const spread = () => {
    const [a, b] = [...fingers.values()];
    return Math.max(Math.abs(a - b), 1);
  };
  scroll.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, event.clientX);
    moved = 0;
    if (fingers.size === 2) gap = spread() / zoom;
  });
  scroll.addEventListener("pointermove", (event) => {
    if (!fingers.has(event.pointerId)) return;
    const before = fingers.get(event.pointerId);
    fingers.set(event.pointerId, event.clientX);
    moved += Math.abs(event.clientX - before);
    if (fingers.size === 2) {
      const [a, b] = [...fingers.values()];
      zoomTo(spread() / gap, (a + b) / 2 - scroll.getBoundingClientRect().left);
    } else if (event.pointerType === "mouse") scroll.scrollLeft -= event.clientX - before;
  });
  for (const end of ["pointerup", "pointercancel", "pointerleave"]) {
    scroll.addEventListener(end, (event) => fingers.delete(event.pointerId));
  }
  picture.addEventListener("click", (event) => {
    if (moved < 5) pick(event.target.closest(".stage"));
  });
  let waiting = false;
  scroll.addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  });
  new ResizeObserver(() => { if (scroll.clientWidth !== drawn) draw(); }).observe(scroll);
}

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

for (const [selector, enliven] of [["#lanes", zoomable], ["#run", readable], [".units", searchable]]) {
  const element = document.querySelector(selector);
  if (element) enliven(element);
}
