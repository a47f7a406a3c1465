// The map of a report that answers: a cell of (gamma, T) is chosen by pointer, keys, sliders or buttons, and its figures
// and its reliability diagram appear. Needs nothing but the element #explorer and the data in #explorer-data.
(() => {
  "use strict";
  const root = document.getElementById("explorer");
  const data = JSON.parse(document.getElementById("explorer-data").textContent);
  const find = (name) => document.getElementById(`explorer-${name}`);

  // ---- data ---------------------------------------------------------------------------------------------------------

  const unpack = (type, text) => {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    return new type(bytes.buffer);
  };
  const { gammas, temperatures, bins: nBins, samples, choices, maps } = data;
  const [rows, columns] = [gammas.length, temperatures.length];
  const counts = data.wide ? Uint32Array : Uint16Array;
  const count = unpack(counts, data.count);
  const correct = unpack(counts, data.correct);
  const within = unpack(Uint16Array, data.confidence); // where in its bin the mean confidence lies
  const figures = {};
  for (const name of ["nll", "brier", "ece"]) figures[name] = unpack(Float64Array, data[name]);
  for (const map of maps) map.values = map.table ? unpack(Float32Array, map.table) : figures[map.figure];

  const ofCell = (row, column) => {
    const cell = row * columns + column;
    const found = [];
    for (let b = 0; b < nBins; b++) {
      const n = count[cell * nBins + b];
      found.push({ n, right: correct[cell * nBins + b], confidence: (b + within[cell * nBins + b] / 65535) / nBins });
    }
    const values = { nll: figures.nll[cell], brier: figures.brier[cell], ece: figures.ece[cell] };
    return { gamma: gammas[row], temperature: temperatures[column], row, column, values, bins: found };
  };
  const ofChoice = (choice) => {
    if (choice.at) return ofCell(...choice.at);
    const infinite = (value) => (value === null ? Infinity : value);
    const values = Object.fromEntries(["nll", "brier", "ece"].map((name) => [name, infinite(choice[name])]));
    const { gamma, temperature } = choice;
    return { gamma, temperature, choice, values, bins: choice.bins.map(([n, right, confidence]) => ({ n, right, confidence })) };
  };

  // As the tables of this page print: four digits, a tie (a multiple of 1/32, there are no others) to the even one.
  const print = (value) => {
    if (!Number.isFinite(value)) return "inf";
    if (Math.abs(value) >= 1e6) return value.toPrecision(4);
    if (Number.isInteger(value * 32) && !Number.isInteger(value * 16)) {
      const below = Math.floor(value * 1e4);
      return ((below + (below & 1)) / 1e4).toFixed(4);
    }
    return value.toFixed(4);
  };
  const short = (value) => String(Number(value.toPrecision(6)));
  const nameOf = (cell) =>
    cell.gamma === null ? cell.choice.label : `gamma = ${short(cell.gamma)}, T = ${short(cell.temperature)}`;

  // ---- state --------------------------------------------------------------------------------------------------------

  let map = maps[0];
  let shown = ofChoice(choices.find((choice) => choice.chosen) ?? choices[0]);
  let announcing = 0;

  const nearest = (axis, value) =>
    axis.reduce((best, one, index) => (Math.abs(one - value) < Math.abs(axis[best] - value) ? index : best), 0);
  const place = () =>
    shown.row === undefined
      ? [nearest(gammas, shown.gamma ?? 0), nearest(temperatures, shown.temperature ?? 1)]
      : [shown.row, shown.column];
  const clamp = (value, size) => Math.min(size - 1, Math.max(0, value));
  const choose = (row, column) => show(ofCell(clamp(row, rows), clamp(column, columns)));

  function show(cell) {
    shown = cell;
    const [row, column] = place();
    find("gamma").value = row;
    find("temperature").value = column;
    find("gamma").setAttribute("aria-valuetext", `gamma = ${short(gammas[row])}`);
    find("temperature").setAttribute("aria-valuetext", `T = ${short(temperatures[column])}`);
    find("title").textContent = nameOf(cell);
    const same = choices.filter((choice) => isSame(choice, cell)).map((choice) => choice.label);
    const words = same.length ? same.join("; ") : "not one of the rows of the table";
    const off = cell.gamma === null ? "not given by gamma and T alone, so it has no place on the map" : isOnMap(cell) ? "" : "beyond the map";
    find("which").textContent = cell.gamma === null ? off : off ? `${words} (${off})` : words;
    for (const button of find("choices").children) {
      button.setAttribute("aria-pressed", String(isSame(choices[button.dataset.choice], cell)));
    }
    for (const name of ["nll", "brier", "ece"]) find(name).textContent = print(cell.values[name]);
    const right = cell.bins.reduce((sum, bin) => sum + bin.right, 0);
    find("accuracy").textContent = print(right / samples);
    find("confidence").textContent = print(cell.bins.reduce((sum, bin) => sum + bin.n * bin.confidence, 0) / samples);
    drawDiagram(cell);
    if (curve) drawCurve(cell);
    fillTable(cell);
    drawMap();
    clearTimeout(announcing);
    announcing = setTimeout(() => {
      const { nll, brier, ece } = cell.values;
      find("live").textContent = `${nameOf(cell)}: NLL ${print(nll)}, Brier ${print(brier)}, ECE ${print(ece)}`;
    }, 250);
  }

  const isOnMap = ({ gamma, temperature }) =>
    gamma !== null && gammas[0] <= gamma && gamma <= gammas[rows - 1] && edges[0] <= temperature && temperature <= edges[columns];
  const isSame = (choice, cell) =>
    cell.choice ? choice === cell.choice : !!choice.at && choice.at[0] === cell.row && choice.at[1] === cell.column;

  // ---- the map ------------------------------------------------------------------------------------------------------

  const canvas = find("map");
  const stops = [
    [0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115],
    [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56],
  ]; // cividis
  const colour = (value) => {
    if (!Number.isFinite(value)) return null;
    const share = Math.log(Math.max(value, map.low) / map.low) / Math.log(map.high / map.low);
    const at = (1 - Math.min(1, share || 0)) * (stops.length - 1); // light is low
    const first = Math.min(stops.length - 2, Math.floor(at));
    const part = at - first;
    return `rgb(${stops[first].map((from, k) => Math.round(from + part * (stops[first + 1][k] - from))).join(" ")})`;
  };
  const edges = [];
  for (let k = 0; k <= columns; k++) {
    if (columns === 1) edges.push(temperatures[0] * (k ? 1.1 : 0.9));
    else if (k === 0) edges.push(1.5 * temperatures[0] - 0.5 * temperatures[1]);
    else if (k === columns) edges.push(1.5 * temperatures[k - 1] - 0.5 * temperatures[k - 2]);
    else edges.push((temperatures[k - 1] + temperatures[k]) / 2);
  }
  const area = { left: 58, top: 6, right: 8, bottom: 40, width: 0, height: 0 };
  let painted = null; // the cells of this map at this size
  let paintedFor = "";
  const toX = (t) => area.left + ((t - edges[0]) / (edges[columns] - edges[0])) * area.width;
  const toY = (gamma) => {
    // The rows are not to scale: between two of them, the share of the way.
    let below = 0;
    while (below < rows - 2 && gammas[below + 1] < gamma) below++;
    const step = rows > 1 ? (gamma - gammas[below]) / (gammas[below + 1] - gammas[below]) : 0;
    const at = Math.min(rows - 0.5, Math.max(-0.5, below + step));
    return area.top + area.height * (1 - (at + 0.5) / rows);
  };

  function drawMap() {
    const width = canvas.parentElement.clientWidth;
    if (!width) return;
    const height = Math.min(560, Math.max(220, 32 * rows)) + area.top + area.bottom;
    const scale = window.devicePixelRatio || 1;
    area.width = width - area.left - area.right;
    area.height = height - area.top - area.bottom;
    canvas.style.height = `${height}px`;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    const style = getComputedStyle(root);
    const [ink, quiet] = [style.getPropertyValue("--ink"), style.getPropertyValue("--quiet")];
    const draw = canvas.getContext("2d");
    draw.setTransform(scale, 0, 0, scale, 0, 0);
    draw.clearRect(0, 0, width, height);
    const key = [maps.indexOf(map), canvas.width, canvas.height].join();
    if (key !== paintedFor) {
      painted = paint(scale, width, height);
      paintedFor = key;
    }
    draw.drawImage(painted, 0, 0, width, height);

    draw.fillStyle = quiet;
    draw.strokeStyle = quiet;
    draw.font = '12px system-ui, "DejaVu Sans", sans-serif';
    draw.textBaseline = "middle";
    draw.textAlign = "right";
    const every = Math.ceil((rows * 15) / area.height);
    for (let row = 0; row < rows; row += every) draw.fillText(short(gammas[row]), area.left - 6, toY(gammas[row]));
    draw.save();
    draw.translate(8, area.top + area.height / 2);
    draw.rotate(-Math.PI / 2);
    draw.textAlign = "center";
    draw.fillText("gamma", 0, 0);
    draw.restore();
    draw.textAlign = "center";
    for (const tick of ticks(edges[0], edges[columns], Math.max(2, Math.floor(area.width / 60)))) {
      draw.beginPath();
      draw.moveTo(toX(tick), area.top + area.height);
      draw.lineTo(toX(tick), area.top + area.height + 4);
      draw.stroke();
      draw.fillText(short(tick), toX(tick), area.top + area.height + 13);
    }
    draw.fillText("temperature T", area.left + area.width / 2, area.top + area.height + 31);

    for (const choice of choices.filter(isOnMap)) mark(draw, toX(choice.temperature), toY(choice.gamma), choice.chosen);
    find("star").hidden = !choices.some((choice) => choice.chosen && isOnMap(choice));
    if (isOnMap(shown)) {
      const [x, y] = [toX(shown.temperature), toY(shown.gamma)];
      for (const [line, dark] of [[3.5, true], [1.5, false]]) {
        draw.strokeStyle = dark ? "#000" : "#fff";
        draw.lineWidth = line;
        draw.beginPath();
        draw.moveTo(x, area.top);
        draw.lineTo(x, y - 10);
        draw.moveTo(x, y + 10);
        draw.lineTo(x, area.top + area.height);
        draw.moveTo(x + 10, y);
        draw.arc(x, y, 10, 0, 2 * Math.PI);
        draw.stroke();
      }
    }
    draw.lineWidth = 1;
    draw.strokeStyle = ink;
    draw.strokeRect(area.left, area.top, area.width, area.height);
  }

  function paint(scale, width, height) {
    const layer = document.createElement("canvas");
    layer.width = Math.round(width * scale);
    layer.height = Math.round(height * scale);
    const draw = layer.getContext("2d");
    draw.scale(scale, scale);
    for (let row = 0; row < rows; row++) {
      const top = area.top + (area.height * (rows - 1 - row)) / rows;
      for (let column = 0; column < columns; column++) {
        const fill = colour(map.values[row * columns + column]);
        if (fill === null) continue;
        draw.fillStyle = fill;
        const x = toX(edges[column]);
        // A little over the next cell, which paints over it: no seams.
        draw.fillRect(x, top + 0.5, Math.min(toX(edges[column + 1]) + 0.6, area.left + area.width) - x, area.height / rows - 1);
      }
    }
    return layer;
  }

  function mark(draw, x, y, chosen) {
    draw.beginPath();
    if (chosen) {
      for (let k = 0; k < 10; k++) {
        const [radius, angle] = [k % 2 ? 3.6 : 9, (k * Math.PI) / 5 - Math.PI / 2];
        draw.lineTo(x + radius * Math.cos(angle), y + radius * Math.sin(angle));
      }
      draw.closePath();
    } else draw.arc(x, y, 4.5, 0, 2 * Math.PI);
    draw.fillStyle = chosen ? "#d55e00" : "#fff";
    draw.strokeStyle = chosen ? "#fff" : "#000";
    draw.lineWidth = 1.2;
    draw.fill();
    draw.stroke();
  }

  function ticks(low, high, most) {
    const rough = (high - low) / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((times) => times * power).find((one) => one >= rough);
    const found = [];
    for (let k = Math.ceil(low / step); k * step <= high; k++) found.push(k * step);
    return found;
  }

  // ---- the reliability diagram --------------------------------------------------------------------------------------

  const few = 20; // bins with fewer samples are pale

  function drawDiagram(cell) {
    const [left, top, side, below, tall] = [40, 8, 250, 24, 56]; // one square, and the histogram under it
    const x = (value) => left + side * value;
    const y = (value) => top + side * (1 - value);
    const base = top + side + below + tall;
    const parts = [];
    const add = (name, attributes, text = "") => {
      const list = Object.entries(attributes).map(([key, value]) => `${key}="${typeof value === "number" ? value.toFixed(2) : value}"`);
      parts.push(`<${name} ${list.join(" ")}>${text}</${name}>`);
    };
    add("defs", {}, '<pattern id="explorer-hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect class="hatch" width="1.6" height="6"/></pattern>');
    for (const value of [0, 0.2, 0.4, 0.6, 0.8, 1]) {
      add("line", { class: "grid", x1: left, x2: left + side, y1: y(value), y2: y(value) });
      add("text", { class: "tick end", x: left - 6, y: y(value) + 4 }, value.toFixed(1));
      add("text", { class: "tick", x: x(value), y: base + 15 }, value.toFixed(1));
    }
    const tallest = Math.max(...cell.bins.map((bin) => bin.n), 1);
    cell.bins.forEach((bin, b) => {
      if (!bin.n) return;
      const [from, width] = [x(b / nBins), side / nBins - 0.8];
      const accuracy = bin.right / bin.n;
      const [low, high] = [Math.min(accuracy, bin.confidence), Math.max(accuracy, bin.confidence)];
      const words = `confidence ${(b / nBins).toFixed(3)} to ${((b + 1) / nBins).toFixed(3)}: ${bin.n} samples, accuracy ${print(accuracy)}, mean confidence ${print(bin.confidence)}`;
      parts.push(`<g class="${bin.n < few ? "bin few" : "bin"}"><title>${words}</title>`);
      add("rect", { class: "bar", x: from, y: y(accuracy), width, height: y(0) - y(accuracy) });
      add("rect", { class: "gap", x: from, y: y(high), width, height: y(low) - y(high), fill: "url(#explorer-hatch)" });
      add("line", { class: "top", x1: from, x2: from + width, y1: y(accuracy), y2: y(accuracy) });
      const share = (tall * bin.n) / tallest;
      add("rect", { class: "share", x: from, y: base - share, width, height: share });
      parts.push("</g>");
    });
    add("line", { class: "diagonal", x1: x(0), y1: y(0), x2: x(1), y2: y(1) });
    add("line", { class: "axis", x1: left, x2: left, y1: y(1), y2: y(0) });
    add("line", { class: "axis", x1: left, x2: left + side, y1: y(0), y2: y(0) });
    add("line", { class: "axis", x1: left, x2: left + side, y1: base, y2: base });
    add("text", { class: "tick", x: x(0.5), y: base + 31 }, "confidence");
    add("text", { class: "tick", transform: `translate(12 ${y(0.5)}) rotate(-90)` }, "accuracy");
    add("text", { class: "tick end", x: left - 6, y: base - tall + 8 }, String(tallest));
    const filled = cell.bins.map((bin) => ({ ...bin, gap: Math.abs(bin.right / bin.n - bin.confidence) })).filter((bin) => bin.n >= few);
    const worst = filled.reduce((most, bin) => (bin.gap > most.gap ? bin : most), { gap: -1 });
    const gap = worst.n ? `The largest gap of a bin with at least ${few} samples is ${print(worst.gap)}, of one with ${worst.n}.` : `No bin has ${few} samples.`;
    find("gap").textContent = `${gap} Bins with fewer are pale.`;
    const diagram = find("diagram");
    diagram.setAttribute("viewBox", `0 0 ${left + side + 12} ${base + 38}`);
    diagram.setAttribute("aria-label", `Reliability diagram at ${nameOf(cell)}. ${gap} Its numbers are in the table below.`);
    diagram.innerHTML = parts.join("");
  }

  const differences = maps.find((one) => one.differences); // of the learned curve
  const curve = data.curve && learnedCurve(data.curve, find("curve"), find("difference"));
  const drawCurve = (cell) => {
    const difference = cell.choice ? cell.choice.difference : differences.values[cell.row * columns + cell.column];
    curve(cell, `The focal map of ${nameOf(cell)} differs from the learned curve by at most ${print(difference ?? 0)}.`);
  };

  function fillTable(cell) {
    const heads = ["samples", "mean confidence", "accuracy", "gap"]; // again, for a narrow screen
    const lines = cell.bins.map((bin, b) => {
      const range = `<th scope="row" role="rowheader">${(b / nBins).toFixed(3)}\u00a0\u2013\u00a0${((b + 1) / nBins).toFixed(3)}</th>`;
      const accuracy = bin.right / bin.n;
      const values = bin.n ? [print(bin.confidence), print(accuracy), print(accuracy - bin.confidence)] : ["", "", ""];
      const one = (value, index) => `<td role="cell" data-name="${heads[index]}">${value}</td>`;
      return `<tr role="row">${range}${[bin.n, ...values].map(one).join("")}</tr>`;
    });
    find("bins").innerHTML = lines.join("");
  }

  // ---- hands --------------------------------------------------------------------------------------------------------

  choices.forEach((choice, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.choice = index;
    button.textContent = choice.chosen ? `${choice.label} (chosen)` : choice.label;
    button.addEventListener("click", () => show(ofChoice(choice)));
    find("choices").append(button);
  });
  maps.forEach((one, index) => {
    let group = [...find("which-map").children].find(({ label }) => label === one.rows);
    if (!group) {
      group = document.createElement("optgroup");
      group.label = one.rows;
      find("which-map").append(group);
    }
    group.append(new Option(one.name, index));
  });
  const pickMap = () => {
    map = maps[find("which-map").value];
    find("low").textContent = print(map.low);
    find("high").textContent = `${print(map.high)}${map.cut ? " and above" : ""}`;
    find("colours").textContent = `${map.name} ${map.rows}, logarithmic.`;
    drawMap();
  };
  find("which-map").addEventListener("change", pickMap);
  const goToLowest = (values) => {
    let best = -1;
    values.forEach((value, cell) => {
      if (Number.isFinite(value) && (best < 0 || value < values[best])) best = cell;
    });
    if (best >= 0) choose(Math.floor(best / columns), best % columns);
  };
  find("lowest").addEventListener("click", () => goToLowest(map.values));
  find("nearest")?.addEventListener("click", () => goToLowest(differences.values));
  [find("gamma").max, find("temperature").max] = [rows - 1, columns - 1];
  for (const name of ["gamma", "temperature"]) {
    find(name).addEventListener("input", () => choose(Number(find("gamma").value), Number(find("temperature").value)));
  }
  const steps = {
    ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0],
    PageDown: [0, -10], PageUp: [0, 10], Home: [0, -columns], End: [0, columns],
  };
  canvas.addEventListener("keydown", (event) => {
    const step = steps[event.key];
    if (!step || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const [row, column] = place();
    choose(row + step[0], column + step[1] * (event.shiftKey ? 10 : 1));
  });
  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const t = edges[0] + ((x - area.left) / area.width) * (edges[columns] - edges[0]);
    choose(Math.floor(rows * (1 - (y - area.top) / area.height)), nearest(temperatures, t));
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    canvas.setPointerCapture(event.pointerId);
    point(event);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (canvas.hasPointerCapture(event.pointerId)) point(event);
  });

  root.hidden = false;
  pickMap();
  show(shown);
  clearTimeout(announcing); // nobody has chosen yet
  new ResizeObserver(drawMap).observe(canvas.parentElement);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);
})();
