/* Numbers, words and elements that every part of the page uses. Text is only ever set as text. */

export const $ = (id) => document.getElementById(id);
export const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const say = (element, text) => { if (element.textContent !== text) element.textContent = text; };
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
export const sum = (values) => values.reduce((a, b) => a + b, 0);
export const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

/** A number in as many digits as it deserves. */
export function number(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(size >= 1e7 ? 1 : 2)}M`;
  if (size >= 100) return whole.format(value);
  return value.toFixed(size >= 10 ? 1 : 2);
}

/** The same without zeros at the end, for axes. */
export function short(value) {
  if (known(value) && value && Math.abs(value) < 0.01) return String(+value.toPrecision(2));
  return number(value).includes(".") ? number(value).replace(/\.?0+(M?)$/, "$1") : number(value);
}

export const percent = (share) => (known(share) ? `${(100 * share).toFixed(share < 0.0995 && share > 0 ? 1 : 0)} %` : "–");

/** Milliseconds, or seconds where they are many. */
export function duration(ms) {
  if (!known(ms)) return "–";
  if (ms >= 10000) return `${(ms / 1e3).toFixed(1)} s`;
  return `${ms >= 100 ? whole.format(ms) : ms >= 1 ? ms.toFixed(1) : ms.toFixed(2)} ms`;
}

export function ago(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : `${(seconds / 3600).toFixed(1)} h ago`;
}
