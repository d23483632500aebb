"use strict";
// Shows the values under the pointer, a finger, or the arrow keys. The charts themselves need no script.
const tip = document.getElementById("tip");

function show(rows, x, y) {
  tip.replaceChildren(...rows.map(([name, value]) => {
    const row = document.createElement("div");
    const left = document.createElement("span");
    const right = document.createElement("b");
    left.textContent = name;
    right.textContent = value;
    row.append(left, right);
    return row;
  }));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, Math.min(y + 16, innerHeight - box.height - 4)) + "px";
}

function hide(cursor) {
  tip.hidden = true;
  if (cursor) cursor.hidden = true;
}

function nearest(xs, wanted) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low > 0 && wanted - xs[low - 1] < xs[low] - wanted ? low - 1 : low;
}

for (const plot of document.querySelectorAll(".plot")) {
  const data = JSON.parse(plot.querySelector("script").textContent);
  const [first, last] = data.x;
  const cursor = document.createElement("div");
  cursor.className = "cursor";
  cursor.hidden = true;
  plot.append(cursor);
  const longest = data.series.reduce((a, b) => (b.x.length > a.x.length ? b : a));
  let at = 0;
  const point = (index, y) => {
    at = Math.max(0, Math.min(index, longest.x.length - 1));
    const x = longest.x[at];
    const box = plot.getBoundingClientRect();
    const share = (x - first) / (last - first);
    const rows = [[data.label, x.toLocaleString("en")]];
    const seen = new Set();
    for (const series of data.series) {
      const i = nearest(series.x, x);
      const far = Math.abs(series.x[i] - x) > 0.02 * (last - first);
      if (far || seen.has(series.name)) continue;
      seen.add(series.name);
      const elsewhere = series.x[i] === x ? "" : " at " + series.x[i].toLocaleString("en");
      rows.push([series.name + elsewhere, series.y[i] === null ? "not finite" : String(series.y[i])]);
    }
    cursor.style.left = 100 * share + "%";
    cursor.hidden = false;
    show(rows, box.left + share * box.width, y ?? box.top);
  };
  const follow = (event) => {
    const box = plot.getBoundingClientRect();
    point(nearest(longest.x, first + (event.clientX - box.left) / box.width * (last - first)), event.clientY);
  };
  plot.addEventListener("pointermove", follow);
  plot.addEventListener("pointerdown", follow);
  plot.addEventListener("pointerleave", () => hide(cursor));
  plot.addEventListener("blur", () => hide(cursor));
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    point(at + move);
  });
}

for (const cells of document.querySelectorAll(".cells")) {
  const data = JSON.parse(cells.querySelector("script").textContent);
  let row = 0, column = 0;
  const point = (x, y) => {
    row = Math.max(0, Math.min(row, data.rows.length - 1));
    column = Math.max(0, Math.min(column, data.steps.length - 1));
    const percent = data.percent[row][column];
    const name = data.rows[row].startsWith(data.kind) ? data.rows[row] : data.kind + " " + data.rows[row];
    const load = percent < 0 ? "no value" : (percent / 100).toFixed(2) + " x mean";
    show([["step", data.steps[column].toLocaleString("en")], [name, load]], x, y);
  };
  const follow = (event) => {
    const box = cells.getBoundingClientRect();
    column = Math.floor((event.clientX - box.left) / box.width * data.steps.length);
    row = Math.floor((event.clientY - box.top) / box.height * data.rows.length);
    point(event.clientX, event.clientY);
  };
  cells.addEventListener("pointermove", follow);
  cells.addEventListener("pointerdown", follow);
  cells.addEventListener("pointerleave", () => hide());
  cells.addEventListener("blur", () => hide());
  cells.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    row += move[0];
    column += move[1];
    const box = cells.getBoundingClientRect();
    point(box.left + (column + 0.5) / data.steps.length * box.width, box.top);
  });
}

// A closed part would be missing on paper.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));
