/* Charts with a key above them, drawn by uPlot. Knows columns of numbers; nothing of what they mean. */

import { colour, known, make, number, say, short } from "./basics.js";

const DASHES = { solid: [], dash: [7, 4], dot: [2, 3], thin: [] };

const sinceNow = (v) => (v === 0 ? "now" : `−${-v} s`);

/** A chart with its key above it. series: [{name, hue, dash, bars, fill, format}]. options.over: its span of time, [first, last]. */
export class Chart {
  constructor(box, series, options) {
    this.box = box;
    this.series = series;
    this.options = options;
    this.keys = make("ul", undefined, "keys");
    this.plot = make("div");
    this.plot.setAttribute("role", "img");
    this.empty = make("p", options.empty || "nothing yet", "empty");
    this.box.append(this.keys, this.plot, this.empty);
    this.values = series.map((each) => {
      const item = make("li"), value = make("b");
      item.append(this.swatch(each), `${each.name} `, value);
      this.keys.append(item);
      return value;
    });
    this.data = [[], ...series.map(() => [])];
    this.hover = null;
    this.told = 0;
    this.build();
    new ResizeObserver(() => this.resize()).observe(this.box);
  }

  swatch({ hue, dash, bars, dots: dotted }) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const kind = bars ? "rect" : dotted ? "circle" : "line";
    const mark = document.createElementNS("http://www.w3.org/2000/svg", kind);
    const shape = {
      rect: { x: 4, y: 1, width: 12, height: 12, rx: 2 },
      circle: { cx: 11, cy: 7, r: 4, "stroke-width": 2, fill: "none" },
      line: { x1: 0, y1: 7, x2: 22, y2: 7, "stroke-width": 2.5 },
    }[kind];
    for (const [name, value] of Object.entries({ ...shape, [bars ? "fill" : "stroke"]: `var(--${hue})` })) mark.setAttribute(name, value);
    if (!bars && dash) mark.setAttribute("stroke-dasharray", DASHES[dash].join(" "));
    svg.setAttribute("width", bars ? 18 : 22);
    svg.setAttribute("height", 14);
    svg.setAttribute("aria-hidden", "true");
    svg.append(mark);
    return svg;
  }

  build() {
    if (this.u) this.u.destroy();
    const { unit, xUnit, splits, xLabels, range, height = 190, tick = short } = this.options;
    const axis = { stroke: colour("quiet"), grid: { stroke: colour("grid"), width: 1 }, ticks: { stroke: colour("line"), width: 1, size: 4 }, font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif", labelSize: 16, labelGap: 2 };
    const time = !splits, { timeTick = sinceNow } = this.options;
    this.u = new uPlot({
      width: Math.max(200, this.box.clientWidth), height,
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false, setScale: false }, points: { size: 7 } },
      scales: {
        x: { time: false, range: () => (time ? this.options.over() : [-0.6, Math.max(1, this.data[0].length) - 0.4]) },
        y: { range: (u, low, high) => (range ? range(low, high) : [0, high > 0 ? high * 1.12 : 1]) },
      },
      axes: [
        { ...axis, label: time ? undefined : xUnit, size: 26, space: time ? 60 : 34, incrs: time ? [5, 10, 15, 30, 60] : [1, 2, 4, 8, 16],
          values: time ? (u, at) => at.map(timeTick) : (u, at) => at.map((v) => (Number.isInteger(v) && xLabels()[v]) || "") },
        { ...axis, label: unit, size: 50, space: 34, values: (u, at) => at.map((v) => (v === 0 ? "0" : tick(v))) },
      ],
      series: [{}, ...this.series.map(({ hue, dash, bars, width, dots, fill, spans }) => ({
        stroke: colour(hue), width: bars ? 0 : width || 2, dash: DASHES[dash || "solid"], spanGaps: Boolean(spans),
        fill: bars ? colour(hue) : fill ? `${colour(hue)}22` : undefined,
        paths: bars ? uPlot.paths.bars({ size: [bars, 64] }) : dots ? () => null : undefined,
        points: dots ? { show: true, size: 9, width: 2, stroke: colour(hue), fill: colour("card") } : { show: false },
      }))],
      hooks: { setCursor: [(u) => { this.hover = u.cursor.idx ?? null; this.label(); }] },
    }, this.data, this.plot);
  }

  resize() {
    const width = this.box.clientWidth;
    if (width > 0 && Math.abs(width - this.u.width) > 1) this.u.setSize({ width, height: this.options.height || 190 });
  }

  /** Draw columns: x, then one per series. `shown`: what the key says, where it is not the columns' own. */
  draw(data, shown) {
    this.data = data;
    this.shown = shown || data.slice(1);
    this.u.setData(data);
    if (this.options.splits) this.u.redraw(false, true); // the same places may have other names now
    const some = data.slice(1).some((column) => column.some(known));
    this.empty.hidden = some;
    this.box.dataset.points = data.slice(1).reduce((n, column) => n + column.filter(known).length, 0);
    this.label();
    if (Date.now() - this.told > 5000) { // for readers of the screen; seldom, and never announced
      this.told = Date.now();
      this.plot.setAttribute("aria-label", `${this.options.title}: ${some ? this.words() : "nothing yet"}`);
    }
  }

  at(column) {
    if (this.hover !== null && this.hover < column.length) return column[this.hover];
    return column[column.length - 1];
  }

  label() {
    if (!this.shown) return;
    this.series.forEach((each, i) => {
      if (each.quiet) return;
      const value = this.options.total && this.hover === null ? this.options.total(this.shown[i]) : this.at(this.shown[i]);
      say(this.values[i], (each.format || this.options.format || number)(value));
    });
  }

  words() {
    return this.series.filter((each) => !each.quiet).map((each, i) => `${each.name} ${this.values[i].textContent}`).join(", ");
  }
}
