/* Play, pause, speed and a slider over the time of something recorded. Knows seconds; nothing of what is shown. */

import { $, say } from "./basics.js";

const TICK = 100; // ms between two moves

/** Set the player up for `end` seconds; `move` is told the moment to show, s. It begins at the end, standing still. */
export function startPlayer(end, move) {
  const slider = $("moment");
  let playing = null;
  $("player").hidden = false;
  slider.max = String(end);
  slider.step = String(end > 20 ? 0.1 : 0.01);

  const over = () => Number(slider.value) > end - Number(slider.step); // its steps may not reach the end

  function show() {
    const at = over() ? end : Number(slider.value);
    say($("moment-text"), `${at.toFixed(1)} of ${end.toFixed(1)} s`);
    slider.setAttribute("aria-valuetext", `${at.toFixed(1)} seconds`);
    move(at);
  }

  function play(wanted) {
    clearInterval(playing);
    playing = wanted ? setInterval(step, TICK) : null;
    say($("play"), wanted ? "Stop" : "Play");
  }

  function step() {
    slider.value = String(Math.min(end, Number(slider.value) + (TICK / 1e3) * Number($("speed").value)));
    show();
    if (over()) play(false);
  }

  $("play").addEventListener("click", () => {
    if (playing === null && over()) slider.value = "0";
    play(playing === null);
  });
  slider.addEventListener("input", () => { play(false); show(); });
  slider.value = String(end);
  show();
}
