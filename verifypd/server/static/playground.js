/* The playground: streams an answer, colours each token by who wrote it, and races the same under plain decoding.
   Text of a model is only ever set as text. A link holds the prompt and the settings, never a key. */

import { $, duration, known, make, number, say } from "./basics.js";

const FIELDS = { prompt: "p-prompt", as: "p-as", max: "p-max", temperature: "p-temperature", top_p: "p-top", seed: "p-seed", schema: "p-schema" };
const SWITCHES = { race: "p-race", turns: "p-turns", rejected: "p-rejected" };
const MARK = "#play=";

/** An answer as it comes: its text, cut into tokens. */
class Written {
  constructor(name) {
    this.box = $(`w-${name}`);
    this.stats = $(`s-${name}`);
    this.clear();
  }

  clear() {
    this.letters = []; // code points: offsets count them
    this.starts = [];
    this.spans = [];
    this.open = 0; // the first token whose text may still grow
    this.first = this.last = null;
    this.box.replaceChildren();
    say(this.stats, "");
  }

  get text() { return this.letters.join(""); }
  get tokens() { return this.starts.length; }

  /** Tokens a second after the first. */
  get speed() { return this.last > this.first ? (1e3 * (this.tokens - 1)) / (this.last - this.first) : null; }

  add(text, origins, now) {
    if (origins.length) { this.first = this.first ?? now; this.last = now; }
    this.letters.push(...text);
    for (const { origin, text_offset: start, rejected } of origins) {
      if (rejected) this.box.append(make("del", rejected));
      const span = make("span");
      span.dataset.origin = String(origin);
      this.box.append(span);
      this.starts.push(start);
      this.spans.push(span);
    }
    for (let i = this.open; i < this.tokens; i++) {
      say(this.spans[i], this.letters.slice(this.starts[i], this.starts[i + 1]).join(""));
      if (i === this.open && this.starts[i + 1] <= this.letters.length) this.open += 1;
    }
  }

  tell(begun, spec) {
    const ms = this.first === null ? null : this.first - begun;
    const drafts = spec && spec.num_spec_steps ? `, ${spec.num_accepted_draft_tokens} of ${spec.num_draft_tokens} draft tokens stood` : "";
    say(this.stats, `${this.tokens} token${this.tokens === 1 ? "" : "s"}, first after ${duration(ms)}, then ${number(this.speed)} tokens/s${drafts}`);
  }
}

/** Set up the form. server: {headers, refused}: what requests carry, and what to do where the key is wrong. */
export function startPlayground(server) {
  const arms = [new Written("drafts"), new Written("plain")];
  let stop = null; // of what runs

  function settings() {
    const found = {};
    for (const [name, id] of Object.entries(FIELDS)) found[name] = $(id).value;
    for (const [name, id] of Object.entries(SWITCHES)) found[name] = $(id).checked;
    return found;
  }

  function restore() {
    if (!location.hash.startsWith(MARK)) return;
    let given;
    try {
      given = JSON.parse(decodeURIComponent(location.hash.slice(MARK.length)));
    } catch {
      return fail("This link is damaged: it holds no settings.");
    }
    if (given === null || typeof given !== "object") return;
    for (const [name, id] of Object.entries(FIELDS)) if (typeof given[name] === "string") $(id).value = given[name];
    for (const [name, id] of Object.entries(SWITCHES)) if (typeof given[name] === "boolean") $(id).checked = given[name];
    $("p-more").open = Boolean($("p-schema").value);
    $("play-box").open = true;
    show();
  }

  function show() {
    $("race").dataset.rejected = $("p-rejected").checked ? "1" : "0";
    $("plain-arm").hidden = !$("p-race").checked;
    $("p-turns").disabled = !$("p-race").checked;
  }

  function fail(text) {
    say($("play-error"), text);
    $("play-error").hidden = !text;
  }

  function share() {
    const link = `${location.origin}${location.pathname}${MARK}${encodeURIComponent(JSON.stringify(settings()))}`;
    history.replaceState(null, "", link);
    $("p-link").hidden = false;
    $("p-link").value = link;
    $("p-link").focus();
    $("p-link").select();
    if (navigator.clipboard) navigator.clipboard.writeText(link).catch(() => {}); // else it is selected
  }

  /** The body of a request; raises where a field is wrong. */
  function body(form, seed, speculation) {
    const made = {
      max_tokens: Number(form.max), temperature: Number(form.temperature), top_p: Number(form.top_p), seed, speculation,
      stream: true, stream_options: { include_usage: true }, return_token_origins: true,
    };
    if (form.schema.trim()) {
      let schema;
      try { schema = JSON.parse(form.schema); } catch (error) { throw new Error(`The schema is no JSON: ${error.message}`); }
      made.response_format = { type: "json_schema", json_schema: { name: "playground", schema } };
    }
    return form.as === "chat" ? { ...made, messages: [{ role: "user", content: form.prompt }] } : { ...made, prompt: form.prompt };
  }

  async function stream(arm, form, content) {
    const path = form.as === "chat" ? "v1/chat/completions" : "v1/completions";
    const begun = performance.now();
    const answer = await fetch(path, {
      method: "POST", headers: { "Content-Type": "application/json", ...server.headers() }, body: JSON.stringify(content),
      signal: stop.signal, cache: "no-store", credentials: "omit",
    });
    if (answer.status === 401) server.refused();
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "", spec = null;
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part === "data: [DONE]") continue;
        const event = JSON.parse(part.slice("data: ".length));
        if (event.error) throw new Error(event.error.message);
        for (const choice of event.choices) arm.add(choice.text ?? choice.delta?.content ?? "", choice.token_origins || [], performance.now());
        spec = event.metrics?.speculative_decoding ?? spec;
      }
      arm.tell(begun, spec);
    }
  }

  async function run() {
    if (stop) return;
    const form = settings();
    const seed = form.seed === "" ? Math.floor(2 ** 31 * Math.random()) : Number(form.seed);
    stop = new AbortController();
    fail("");
    say($("play-verdict"), "");
    arms.forEach((arm) => arm.clear());
    $("p-stop").disabled = false;
    if (document.activeElement === $("p-run")) $("p-stop").focus();
    $("p-run").disabled = true;
    try {
      const runs = form.race ? [true, false] : [true];
      const starts = runs.map((drafts, i) => () => stream(arms[i], form, body(form, seed, drafts)));
      if (form.turns) for (const start of starts) await start();
      else await Promise.all(starts.map((start) => start()));
      if (form.race) verdict(form, seed);
    } catch (error) {
      fail(error.name === "AbortError" ? "Stopped." : error.message);
      stop.abort(); // the other one too
    } finally {
      stop = null;
      $("p-run").disabled = false;
      if (document.activeElement === $("p-stop")) $("p-run").focus();
      $("p-stop").disabled = true;
    }
  }

  function verdict(form, seed) {
    const [drafts, plain] = arms, same = drafts.text === plain.text;
    const differ = drafts.letters.findIndex((letter, i) => letter !== plain.letters[i]);
    const at = differ < 0 ? Math.min(drafts.letters.length, plain.letters.length) : differ;
    const ratio = known(drafts.speed) && known(plain.speed) ? `×${(drafts.speed / plain.speed).toFixed(2)} the speed of plain decoding. ` : "";
    const how = form.turns ? "They took turns." : "They ran at the same time, in the same engine.";
    say($("play-verdict"), `${ratio}${same ? `The texts are the same (seed ${seed}).` : `The texts differ from character ${at + 1} on (seed ${seed}).`} ${how}`);
    $("play-verdict").dataset.same = String(same);
  }

  $("play-form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
  $("p-stop").addEventListener("click", () => stop?.abort());
  $("p-share").addEventListener("click", share);
  for (const id of Object.values(SWITCHES)) $(id).addEventListener("change", show);
  $("p-prompt").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(); });
  addEventListener("hashchange", restore);
  show();
  restore();
}
