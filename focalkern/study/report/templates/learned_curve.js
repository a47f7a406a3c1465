// The learned curve of a spline scaling and the focal map of one (gamma, T), as the parts of an SVG picture.
const learnedCurve = (curve, picture, words) => {
  "use strict";
  const [left, top, side] = [52, 8, 250];
  const lowest = Math.max(0, Math.floor(10 * Math.min(0.5, ...curve.lower) + 0.01) / 10);
  const x = (value) => left + (side * (value - 0.5)) / 0.5;
  const y = (value) => top + (side * (1 - Math.max(lowest, value))) / (1 - lowest);

  // The focal map of two classes in log-odds; -q log q / (1 - q) of q = sigmoid(s).
  const phi = (s) => Math.exp(s) * Math.log1p(Math.exp(-s));
  const focalMap = (confidence, gamma, temperature) => {
    const logit = Math.log(confidence / (1 - confidence));
    const s = Math.min(500, (logit * curve.temperature) / temperature);
    const odds = (1 + gamma) * s - Math.log1p(gamma * phi(s)) + Math.log1p(gamma * phi(-s));
    return 1 / (1 + Math.exp(-odds));
  };
  const path = (values) => "M" + values.map((value, k) => `${x(curve.confidence[k]).toFixed(2)} ${y(value).toFixed(2)}`).join("L");

  return (cell, said) => {
    const parts = [];
    const back = curve.lower.map((value, k) => [curve.confidence[k], value]).reverse();
    const under = back.map(([q, value]) => `L${x(q).toFixed(2)} ${y(value).toFixed(2)}`).join("");
    parts.push(`<path class="band" d="${path(curve.upper)}${under}Z"/>`);
    for (let k = 0; k <= 5; k++) {
      const [across, up] = [0.5 + k / 10, lowest + (k * (1 - lowest)) / 5];
      parts.push(`<line class="grid" x1="${left}" x2="${left + side}" y1="${y(up)}" y2="${y(up)}"/>`);
      parts.push(`<text class="end" x="${left - 6}" y="${y(up) + 4}">${Number(up.toFixed(2))}</text>`);
      parts.push(`<text x="${x(across)}" y="${top + side + 15}">${across.toFixed(1)}</text>`);
    }
    parts.push(`<line class="diagonal" x1="${x(0.5)}" y1="${y(0.5)}" x2="${x(1)}" y2="${y(1)}"/>`);
    parts.push(`<path class="learned" d="${path(curve.calibrated)}"/>`);
    if (cell.gamma !== null) {
      const values = curve.confidence.map((q) => focalMap(q, cell.gamma, cell.temperature));
      parts.push(`<path class="focal" d="${path(values)}"/>`);
    }
    parts.push(`<line class="axis" x1="${left}" x2="${left}" y1="${y(1)}" y2="${top + side}"/>`);
    parts.push(`<line class="axis" x1="${left}" x2="${left + side}" y1="${top + side}" y2="${top + side}"/>`);
    parts.push(`<text x="${x(0.75)}" y="${top + side + 31}">confidence after temperature scaling</text>`);
    parts.push(`<text transform="translate(12 ${top + side / 2}) rotate(-90)">calibrated confidence</text>`);
    words.textContent = cell.gamma === null ? "The row shown has no focal map: choose a cell of the map." : said;
    picture.setAttribute("viewBox", `0 0 ${left + side + 14} ${top + side + 38}`);
    picture.setAttribute("aria-label", words.textContent);
    picture.innerHTML = parts.join("");
  };
};
