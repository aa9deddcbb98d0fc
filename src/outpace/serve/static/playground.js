// The playground: what a request asks for, what each step of its decoding brought, and who drafted it.
import { html, svg, render, nothing } from "./vendor/lit-html.js";
import { stratify, tree as treeLayout } from "./vendor/d3-hierarchy.js";
import { createParser } from "./vendor/eventsource-parser.js";

const TINTS = 3; // backgrounds that steps take in turn
const STROKES = 4; // underlines that drafters take in turn
const BATCH = 8; // sequences decoded together, to see them in the slots
const REFERENCE = "reference"; // the drafter that reads a prediction
const EXAMPLE =
  "A farmer has 48 eggs in a basket. She sells 20 eggs at the markte and givs 8 eggs to her neighbor.";
const CHANGE = "Correct the two mistakes; repeat the rest.";
const TABS = [
  ["generate", "Generate"],
  ["race", "Race"],
  ["edit", "Edit"],
  ["server", "Server"],
];

const state = {
  tab: "generate",
  model: null,
  models: [], // those of the server; several are loaded when they are first asked for
  problem: "", // why the server does not answer
  locked: false, // it wants a key
  form: {
    mode: "chat",
    prompt: { chat: "What is lookahead decoding?", completion: "Question: Anna has 12 apples. She buys 5 more each day for 4 days. How many apples does she have?\nAnswer:" },
    system: "",
    max_tokens: 128,
    temperature: 0,
    seed: 1,
    drafter: "",
    key: "",
    together: true,
    text: EXAMPLE,
    change: CHANGE,
  },
  turns: [], // of the conversation, before the message that is written
  runs: {}, // by name: generate, plain, drafted, edit, batch
  chosen: {}, // name of a run -> index of the step that is looked at
  server: { now: null, rates: [] },
  lane: "drafted", // the run of the race whose tree is shown
  copied: false,
};

// -- requests ------------------------------------------------------------------------------------------

const headers = () => ({
  "Content-Type": "application/json",
  ...(state.form.key ? { Authorization: `Bearer ${state.form.key}` } : {}),
});

async function get(path) {
  const response = await fetch(path, { headers: headers() });
  state.locked = response.status === 401;
  if (!response.ok) throw new Error(await reason(response));
  return response;
}

async function reason(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

// One request, and all that has come of it.
class Run {
  constructor(path, body) {
    this.path = path;
    this.body = body;
    this.steps = [];
    this.ids = [];
    this.text = "";
    this.usage = null;
    this.error = "";
    this.finish = null;
    this.ended = false;
    this.began = this.latest = performance.now();
    this.stopper = new AbortController();
  }

  async start() {
    try {
      const response = await fetch(this.path, {
        method: "POST",
        headers: headers(),
        body: JSON.stringify({ ...this.body, ...TRACED }),
        signal: this.stopper.signal,
      });
      if (!response.ok) throw new Error(await reason(response));
      const parser = createParser({ onEvent: ({ data }) => data !== "[DONE]" && this.take(JSON.parse(data)) });
      const decoder = new TextDecoder();
      for (const reader = response.body.getReader(); ; ) {
        const { done, value } = await reader.read();
        if (done) break;
        parser.feed(decoder.decode(value, { stream: true }));
      }
      if (!this.finish) throw new Error("the stream ended early");
    } catch (error) {
      this.error ||= error.name === "AbortError" ? "stopped" : error.message;
    }
    this.ended = true;
    draw();
  }

  take(chunk) {
    if (chunk.error) {
      this.error = chunk.error.message;
      return;
    }
    this.usage = chunk.usage ?? this.usage;
    for (const choice of chunk.choices) {
      for (const step of choice.trace ?? []) {
        this.steps.push(step);
        this.ids.push(...step.tokens);
        this.latest = performance.now();
      }
      this.text += choice.delta?.content ?? "";
      this.finish = choice.finish_reason ?? this.finish;
    }
    draw();
  }

  get cut() {
    return this.finish === "length";
  }

  get seconds() {
    return (this.latest - this.began) / 1000;
  }

  get tau() {
    return this.ids.length / this.steps.length;
  }

  get rate() {
    return this.ids.length / this.seconds;
  }

  get drafters() {
    const found = new Map();
    for (const step of this.steps) {
      for (const [name, { drafted, accepted }] of Object.entries(step.drafters)) {
        const sum = found.get(name) ?? { drafted: 0, accepted: 0 };
        found.set(name, { drafted: sum.drafted + drafted, accepted: sum.accepted + accepted });
      }
    }
    return found;
  }
}

// What the page needs beyond the text; left out of the lines of Python.
const TRACED = { stream: true, stream_options: { include_usage: true }, trace: true };

function request(speculation) {
  const { mode, prompt, max_tokens, temperature, seed } = state.form;
  const [path, asked] =
    mode === "chat"
      ? ["v1/chat/completions", { messages: [...told(), ...state.turns, { role: "user", content: prompt.chat }] }]
      : ["v1/completions", { prompt: prompt.completion }];
  return [path, { model: state.model.id, ...asked, max_tokens, temperature, seed, ...speculated(speculation) }];
}

const told = () => (state.form.system.trim() ? [{ role: "system", content: state.form.system }] : []);

// Keep the answer as a turn, and write the next message.
function reply() {
  const { body, text } = state.runs.generate;
  state.turns = [...body.messages.filter(({ role }) => role !== "system"), { role: "assistant", content: text }];
  state.form.prompt.chat = "";
  delete state.runs.generate;
  draw();
  document.getElementById("message").focus();
}

function anew() {
  state.turns = [];
  draw();
}

// As choices of one request: a browser opens only so many connections.
function batchRequest() {
  const [path, body] = request(state.form.drafter);
  return [path, { ...body, n: BATCH }];
}

function editRequest() {
  const { text, change, max_tokens, temperature, seed } = state.form;
  const body = {
    model: state.model.id,
    messages: [{ role: "user", content: `${change}\n\nText: ${text}\nCorrected:` }],
    prediction: { type: "content", content: text },
    max_tokens,
    temperature,
    seed,
  };
  return ["v1/chat/completions", body];
}

const speculated = (name) => (name ? { speculation: name } : {});
const running = () => Object.values(state.runs).some((run) => !run.ended);

function begin(name, [path, body]) {
  delete state.chosen[name];
  state.runs[name] = new Run(path, body);
  return state.runs[name].start();
}

async function submit(event) {
  event.preventDefault();
  if (running()) return;
  sought = true;
  draw();
  const { drafter, together } = state.form;
  if (state.tab === "generate") await begin("generate", request(drafter));
  if (state.tab === "edit") await begin("edit", editRequest());
  if (state.tab === "server") await begin("batch", batchRequest());
  if (state.tab === "race") {
    state.lane = "drafted";
    delete state.runs.plain;
    delete state.runs.drafted;
    const plain = begin("plain", request("off"));
    if (!together) await plain;
    if (!state.runs.plain.error) await Promise.all([plain, begin("drafted", request(drafter === "off" ? "" : drafter))]);
  }
  if (state.model.status) await connect(); // it is loaded now, so its drafters are known
}

let sought = false; // the answer has just been asked for

// Where the answer is below the form, as on a telephone, go to it.
function showAnswer() {
  const answer = document.querySelector(".answer");
  if (answer.getBoundingClientRect().top > window.innerHeight / 2) answer.scrollIntoView();
}

function stop() {
  for (const run of Object.values(state.runs)) if (!run.ended) run.stopper.abort();
}

// -- the model and the server --------------------------------------------------------------------------

async function connect() {
  try {
    state.models = (await (await get("v1/models")).json()).data;
    const model = state.models.find(({ id }) => id === state.model?.id) ?? state.models[0];
    if (!state.model && model.chat === false) state.form.mode = "completion";
    state.model = model;
    state.problem = "";
  } catch (error) {
    state.problem = state.locked && !state.form.key ? "" : error.message; // without a key there is nothing wrong
    if (!state.locked) setTimeout(connect, 2000); // the model is being loaded, or the server started again
  }
  draw();
}

async function poll() {
  if (state.locked) return;
  try {
    const sums = sumsOf(await (await get("metrics")).text());
    const before = state.server.now;
    const now = { at: performance.now(), sums };
    if (before) {
      const tokens = (sums) => sums.time_to_first_token_seconds_count + sums.inter_token_latency_seconds_count;
      state.server.rates.push((1000 * (tokens(sums) - tokens(before.sums))) / (now.at - before.at));
      state.server.rates.splice(0, state.server.rates.length - 60);
    }
    state.server.now = now;
    state.problem = "";
  } catch (error) {
    state.problem = error.message;
  }
  draw();
}

// Name of a metric, without its prefix -> the sum over its labels.
function sumsOf(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^outpace:([a-z_]+)(?:\{.*\})? (\S+)$/.exec(line);
    if (match) found[match[1]] = (found[match[1]] ?? 0) + Number(match[2]);
  }
  return found;
}

// -- the request's form --------------------------------------------------------------------------------

const update = (name) => (event) => {
  const input = event.target;
  state.form[name] = input.type === "number" ? input.valueAsNumber : input.value;
  draw();
};

function form() {
  const { form, tab } = state;
  return html`<form @submit=${submit} aria-label="Request">
    ${state.models[0]?.status ? modelField() : nothing}
    ${tab === "edit" ? editFields() : promptFields()}
    <div class="row">
      ${number("max_tokens", "Tokens", 1, 100000, 1)} ${number("temperature", "Temperature", 0, 2, "any")}
      ${number("seed", "Seed", 0, Number.MAX_SAFE_INTEGER, 1)}
    </div>
    ${tab === "edit" ? nothing : drafterField()}
    ${tab === "race" ? raceFields() : nothing}
    ${state.locked
      ? html`<label class="field">
          <span>API key</span>
          <input type="password" autocomplete="off" .value=${form.key} @input=${update("key")} @change=${connect} />
        </label>`
      : nothing}
    <div class="actions">
      <button type="submit" class="primary" ?disabled=${!state.model || running()}>
        ${{ generate: "Generate", race: "Race", edit: "Edit", server: `Decode ${BATCH} at once` }[tab]}
      </button>
      <button type="button" @click=${stop} ?disabled=${!running()}>Stop</button>
    </div>
  </form>`;
}

// One of several models, and whether it is loaded.
function modelField() {
  const choose = (event) => {
    state.model = state.models.find(({ id }) => id === event.target.value);
    state.form.drafter = "";
    draw();
  };
  return html`<label class="field">
    <span>Model</span>
    <select @change=${choose} ?disabled=${running()}>
      ${state.models.map(
        ({ id, status }) => html`<option value=${id} ?selected=${id === state.model.id}>${id}${status.value === "loaded" ? "" : ` (${status.value})`}</option>`,
      )}
    </select>
  </label>`;
}

function drafterField() {
  const { form, tab, model } = state;
  const [own, ...others] = model?.drafters ?? [];
  return html`<label class="field">
    <span>Drafter</span>
    <select @change=${update("drafter")}>
      <option value="" ?selected=${!form.drafter}>the server's own${own ? `: ${own}` : ""}</option>
      ${others.map(
        (name) => html`<option value=${name} ?selected=${form.drafter === name} ?hidden=${tab === "race" && name === "off"}>${name}</option>`,
      )}
    </select>
  </label>`;
}

function number(name, label, min, max, step) {
  return html`<label class="field">
    <span>${label}</span>
    <input type="number" required min=${min} max=${max} step=${step} .valueAsNumber=${state.form[name]} @input=${update(name)} />
  </label>`;
}

function radios(name, label, options) {
  return html`<fieldset class="radios">
    <legend>${label}</legend>
    ${options.map(
      ([value, text]) => html`<label>
        <input
          type="radio"
          name=${name}
          .checked=${state.form[name] === value}
          @change=${() => {
            state.form[name] = value;
            draw();
          }}
        />
        <span>${text}</span>
      </label>`,
    )}
  </fieldset>`;
}

function promptFields() {
  const { mode, prompt } = state.form;
  const write = (event) => {
    prompt[mode] = event.target.value;
    draw();
  };
  return html`
    ${radios("mode", "API", [
      ["chat", "Chat"],
      ["completion", "Completion"],
    ])}
    ${mode === "chat" ? conversation() : nothing}
    <label class="field">
      <span>${mode === "chat" ? "Message" : "Text to continue"}</span>
      <textarea id="message" rows="6" required .value=${prompt[mode]} @input=${write}></textarea>
    </label>
  `;
}

// What the message comes after.
const conversation = () => html`
  <label class="field">
    <span>System prompt</span>
    <textarea rows="1" .value=${state.form.system} @input=${update("system")}></textarea>
  </label>
  ${state.turns.length
    ? html`<section class="turns" aria-label="Turns">
        <ol>${state.turns.map(({ role, content }) => html`<li><b>${role}</b> ${content}</li>`)}</ol>
        <button type="button" @click=${anew}>New conversation</button>
      </section>`
    : nothing}
`;

function editFields() {
  return html`
    <label class="field">
      <span>Text</span>
      <textarea rows="8" required .value=${state.form.text} @input=${update("text")}></textarea>
    </label>
    <label class="field">
      <span>What to change</span>
      <textarea rows="2" required .value=${state.form.change} @input=${update("change")}></textarea>
    </label>
  `;
}

const raceFields = () => html`
  ${radios("together", "Run", [
    [true, "together"],
    [false, "one after the other"],
  ])}
  <p class="hint">Together, both share the batch, so each step takes one time for both. One after the other, each has the server to itself.</p>
`;

// -- a run ---------------------------------------------------------------------------------------------

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const figure = (value, digits = 1) => (Number.isFinite(value) ? value.toFixed(digits) : "–");

function figures(run) {
  const pairs = [
    ["tokens", run ? run.ids.length : "–"],
    ["steps", run ? run.steps.length : "–"],
    ["τ", figure(run?.tau, 2)],
    ["tokens/s", figure(run?.rate, 0)],
  ];
  return html`<dl class="figures">
    ${pairs.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}

const tau = () => html`<p class="hint">τ is the number of tokens per step of the model; plain decoding has 1.</p>`;

function status(run) {
  if (!run) return "";
  if (run.error) return run.error;
  if (!run.ended) return run.steps.length ? "decoding" : "waiting";
  const end = run.cut ? "cut at the limit" : "done";
  return `${end}: ${plural(run.ids.length, "token")} in ${plural(run.steps.length, "step")}, ${figure(run.seconds, 2)} s`;
}

// The index of the step that is looked at: the one chosen, else the latest; at the end the last of the longest.
function chosenStep(name) {
  const { steps, ended } = state.runs[name] ?? { steps: [], ended: false };
  if (state.chosen[name] !== undefined) return state.chosen[name];
  if (!ended) return steps.length - 1;
  const lengths = steps.map((step) => step.tokens.length);
  return lengths.lastIndexOf(Math.max(...lengths));
}

function choose(name, index) {
  const last = (state.runs[name]?.steps.length ?? 0) - 1;
  state.chosen[name] = Math.max(0, Math.min(index, last));
  state.lane = name;
  draw();
}

const pointed = (name) => (event) => {
  const step = event.target.closest("[data-index]");
  if (step) choose(name, Number(step.dataset.index));
};

const keyed = (name) => (event) => {
  const last = (state.runs[name]?.steps.length ?? 0) - 1;
  const now = chosenStep(name);
  const target = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last };
  if (!(event.key in target) || last < 0) return;
  event.preventDefault();
  choose(name, target[event.key]);
};

// Who proposed the token at this place of a step: what a drafter has accepted is the beginning of the path.
const draftersOf = (step, place) =>
  Object.keys(step.drafters).filter((name) => step.drafters[name].accepted > place);

function tokens(name, label, differs) {
  const run = state.runs[name];
  const names = [...(run?.drafters.keys() ?? [])];
  let place = 0;
  const chosen = chosenStep(name);
  return html`<div
    class=${run?.cut ? "tokens cut" : "tokens"}
    id=${`tokens-${name}`}
    tabindex="0"
    role="group"
    aria-label=${`${label}; arrow keys choose a step`}
    aria-busy=${run && !run.ended ? "true" : "false"}
    @pointerover=${pointed(name)}
    @keydown=${keyed(name)}
  >${(run?.steps ?? []).map((step, index) => {
    const first = place;
    place += step.tokens.length;
    const kind = `step tint${step.step % TINTS}${index === chosen ? " chosen" : ""}`;
    return html`<span class=${kind} data-index=${index} data-step=${step.step}>${pieces(step, names, first, differs)}</span>`;
  })}${run && !run.ended ? html`<span class="caret" aria-hidden="true"></span>` : nothing}</div>`;
}

// A step's tokens one by one, as far as their texts add up to the step's, which the end of a text is no part of.
// Where characters lie across tokens they do not, and the text is one piece.
function pieces(step, names, first, differs) {
  const sums = step.texts.map((_, place) => step.texts.slice(0, place + 1).join(""));
  const shown = step.texts.slice(0, sums.lastIndexOf(step.text) + 1);
  if (!shown.length) return step.text;
  return shown.map((text, place) => {
    const drafters = place < step.path.length ? draftersOf(step, place) : [];
    const kinds = ["token"];
    if (drafters.length) kinds.push("drafted", `stroke${names.indexOf(drafters[0]) % STROKES}`);
    if (drafters.includes(REFERENCE)) kinds.push("reused");
    if (first + place === differs) kinds.push("differs");
    return html`<span class=${kinds.join(" ")}>${text}</span>`;
  });
}

function legend(run) {
  const drafters = [...(run?.drafters ?? [])];
  return html`<ul class="legend">
    ${drafters.map(
      ([name, { drafted, accepted }], place) => html`<li>
        <span class=${`drafted stroke${place % STROKES}`}>${name}</span> ${accepted} of ${drafted} accepted
      </li>`,
    )}
    ${run?.ended && !run.error && !drafters.length
      ? html`<li>nothing drafted${run.body.speculation === "off" ? "" : ": the server expects no gain from it"}</li>`
      : html`<li>not underlined: the model's own</li>`}
  </ul>`;
}

const BAR = 8;
const UNIT = 9;

// One bar per step, as high as it emitted tokens: below the model's own, above it the accepted drafts.
function bars(name) {
  const steps = state.runs[name]?.steps ?? [];
  const most = Math.max(4, ...steps.map((step) => step.tokens.length));
  const height = Math.min(most * UNIT, 108);
  const unit = height / most;
  const chosen = chosenStep(name);
  return html`<div class="bars" id=${`bars-${name}`} @pointerover=${pointed(name)}>
    <svg width=${Math.max(steps.length * BAR, 1)} height=${height + 2} role="img" aria-label="Tokens of each step">
      ${steps.map((step, index) => {
        const own = step.tokens.length - step.path.length;
        const x = index * BAR;
        return svg`<g data-index=${index} class=${index === chosen ? "bar chosen" : "bar"}>
          <rect class="hit" x=${x} y="0" width=${BAR} height=${height + 2}></rect>
          <rect class="own" x=${x + 1} y=${height - unit * own} width=${BAR - 2} height=${unit * own}></rect>
          <rect class="accepted" x=${x + 1} y=${height - unit * step.tokens.length} width=${BAR - 2}
            height=${unit * step.path.length}></rect>
          <rect class="mark" x=${x} y=${height} width=${BAR} height="2"></rect>
        </g>`;
      })}
    </svg>
  </div>`;
}

// -- the tree of a step --------------------------------------------------------------------------------

const ROW = 20;
const GAP = 18;
const CHARACTER = 7.3; // width in the tree's font
const shown = (text) => (text ? text.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥") : "∅").slice(0, 16);

function layout(step, root) {
  const { texts, parents } = step.tree;
  const accepted = new Set(step.path);
  const nodes = [{ id: -1, parent: null, text: root, kind: "accepted" }];
  texts.forEach((text, id) => nodes.push({ id, parent: parents[id], text, kind: accepted.has(id) ? "accepted" : "rejected" }));
  if (step.tokens.length > step.path.length) {
    const last = step.path.at(-1) ?? -1;
    nodes.push({ id: texts.length, parent: last, text: step.texts.at(-1), kind: "own" });
  }
  const made = stratify()
    .id((node) => String(node.id))
    .parentId((node) => (node.parent === null ? null : String(node.parent)))(nodes);
  // The path goes on top, where it is read first.
  made.sort((a, b) => (a.data.kind === "rejected") - (b.data.kind === "rejected"));
  treeLayout().nodeSize([ROW, 1]).separation(() => 1)(made);
  const widths = [];
  made.each((node) => {
    node.label = shown(node.data.text);
    node.width = node.label.length * CHARACTER + 12;
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  });
  const lefts = widths.map((_, depth) => widths.slice(0, depth).reduce((sum, width) => sum + width + GAP, 0));
  const rows = made.descendants().map((node) => node.x);
  const top = Math.min(...rows) - ROW / 2 - 2;
  made.each((node) => {
    node.left = lefts[node.depth] + 1;
    node.y = node.x - top;
  });
  return { made, width: lefts.at(-1) + widths.at(-1) + 2, height: Math.max(...rows) - top + ROW / 2 + 2 };
}

function drawing(step, root) {
  const { made, width, height } = layout(step, root);
  const order = (a, b) => (a.data.kind === "rejected" ? 0 : 1) - (b.data.kind === "rejected" ? 0 : 1);
  const curve = (node) => {
    const from = node.parent.left + node.parent.width;
    const middle = (from + node.left) / 2;
    return `M${from},${node.parent.y}C${middle},${node.parent.y} ${middle},${node.y} ${node.left},${node.y}`;
  };
  const nodes = made.descendants().sort(order);
  return html`<svg width=${width} height=${height} role="img" aria-label="Tree of the step's draft">
    ${nodes.filter((node) => node.parent).map((node) => svg`<path class=${`link ${node.data.kind}`} d=${curve(node)}></path>`)}
    ${nodes.map(
      (node) => svg`<g class=${`node ${node.data.kind}${node.parent ? "" : " root"}`}>
        <rect x=${node.left} y=${node.y - 8.5} width=${node.width} height="17" rx="3"></rect>
        <text x=${node.left + 6} y=${node.y + 4}>${node.label}</text>
      </g>`,
    )}
  </svg>`;
}

function tree(name) {
  const steps = state.runs[name]?.steps ?? [];
  const index = chosenStep(name);
  const step = steps[index];
  if (!step) return nothing;
  const root = index ? steps[index - 1].texts.at(-1) : "prompt";
  const words = Object.entries(step.drafters).map(([who, { drafted, accepted }]) => `${who}: ${accepted} of ${drafted}`);
  return html`<section class="panel" aria-label="Draft tree">
    <header>
      <h2>Step ${step.step}</h2>
      <p aria-live=${state.runs[name].ended ? "polite" : "off"}>${words.length ? `${words.join(", ")} accepted` : "nothing drafted"}; ${plural(step.tokens.length, "token")} emitted</p>
      <div class="stepper">
        <button type="button" aria-label="Previous step" ?disabled=${index === 0} @click=${() => choose(name, index - 1)}>←</button>
        <button type="button" aria-label="Next step" ?disabled=${index === steps.length - 1} @click=${() => choose(name, index + 1)}>→</button>
      </div>
    </header>
    <div class="tree" tabindex="0" role="group" aria-label="Tree; arrow keys choose a step" @keydown=${keyed(name)}>${drawing(step, root)}</div>
    <p class="hint">Bold: accepted. Outlined: the model's own token. Grey: rejected.</p>
  </section>`;
}

// -- the tabs ------------------------------------------------------------------------------------------

function output(name, label) {
  const run = state.runs[name];
  return html`<section class="panel" aria-label=${label}>
    <header>
      <h2>${label}</h2>
      <p class=${run?.error ? "error" : ""} role="status">${status(run)}</p>
    </header>
    ${run ? html`${figures(run)} ${tau()} ${tokens(name, label)} ${legend(run)} ${bars(name)}` : html`<p>${INVITATIONS[name]}</p>`}
  </section>`;
}

const INVITATIONS = {
  generate: "Press Generate: the answer appears here, each step of the model in its own colour.",
  race: "Press Race: the same request is decoded twice side by side, plainly and with a drafter.",
  edit: "Press Edit: the text is sent in the message and as the prediction, so that what stays the same is verified, not written.",
};

const generate = () => html`${output("generate", "Output")} ${replying()} ${tree("generate")}`;

const replying = () => {
  const run = state.runs.generate;
  return run?.ended && !run.error && run.body.messages
    ? html`<div class="actions"><button type="button" @click=${reply}>Reply</button></div>`
    : nothing;
};

// The place of the first token that differs; -1 for none, so far.
function difference(a, b) {
  const common = Math.min(a.length, b.length);
  for (let place = 0; place < common; place++) if (a[place] !== b[place]) return place;
  return -1;
}

function verdict() {
  const { plain, drafted } = state.runs;
  if (!plain || !drafted) return { text: "", kind: "", place: -1 };
  const place = difference(plain.ids, drafted.ids);
  if (place >= 0) return { text: `they differ from token ${place + 1} on`, kind: "error", place };
  if (!plain.ended || !drafted.ended) return { text: "the same so far", kind: "", place };
  if (plain.error || drafted.error) return { text: "not finished", kind: "error", place };
  if (plain.ids.length !== drafted.ids.length) {
    const shorter = Math.min(plain.ids.length, drafted.ids.length);
    return { text: `they differ from token ${shorter + 1} on`, kind: "error", place: shorter };
  }
  const steps = `${drafted.steps.length} steps instead of ${plain.steps.length}`;
  return { text: `identical: ${plural(plain.ids.length, "token")}, ${steps}, ${figure(plain.seconds / drafted.seconds, 2)} × as fast`, kind: "good", place };
}

function race() {
  const { text, kind, place } = verdict();
  const lane = (name, label) => {
    const run = state.runs[name];
    const done = run?.finish ? run.body.max_tokens : (run?.ids.length ?? 0);
    return html`<section class="panel" aria-label=${label}>
      <header>
        <h2>${label}</h2>
        <p class=${run?.error ? "error" : ""}>${run?.finish ? `${run.cut ? "cut at the limit, " : ""}${figure(run.seconds, 2)} s` : status(run)}</p>
      </header>
      ${run ? figures(run) : nothing}
      <progress max=${run?.body.max_tokens ?? 1} .value=${done} aria-label="Tokens"></progress>
      ${tokens(name, label, place)} ${legend(run)} ${bars(name)}
    </section>`;
  };
  if (!state.runs.plain) return html`<section class="panel" aria-label="Race"><p>${INVITATIONS.race}</p></section>`;
  return html`
    <p class=${`verdict ${kind}`} id="verdict" role="status">${text || INVITATIONS.race}</p>
    ${tau()}
    <div class="lanes">${lane("plain", "Plain")} ${lane("drafted", "Drafted")}</div>
    ${tree(state.lane)}
  `;
}

function edit() {
  const run = state.runs.edit;
  const details = run?.usage?.completion_tokens_details;
  const reused = (run?.steps ?? []).reduce((sum, step) => sum + (step.drafters[REFERENCE]?.accepted ?? 0), 0);
  const words = run ? `${reused} of ${plural(run.ids.length, "token")} reused from the text` : "";
  return html`
    <p class="verdict" role="status" ?hidden=${!run}>${words}${details ? `; ${details.rejected_prediction_tokens} of the prediction rejected` : ""}</p>
    <div class="marked">${output("edit", "Edited text")}</div>
    ${tree("edit")}
  `;
}

function server() {
  const sums = state.server.now?.sums;
  const waits = state.locked ? "give the API key" : "asking the server";
  if (!sums || !state.model) return html`<p class="hint" role="status">${state.problem || waits}</p>`;
  const slots = state.model.max_running;
  const busy = sums.num_requests_running;
  const waiting = sums.num_requests_waiting;
  const queries = sums.prefix_cache_queries_total;
  const share = (value) => `${figure(100 * value, 0)} %`;
  return html`<div class="cards">
    <section class="panel" aria-label="Slots">
      <h2>Slots</h2>
      <p class="big">${busy} <small>of ${slots} in use</small></p>
      <div class="squares" aria-hidden="true">${squares(slots, (place) => place < busy)}</div>
    </section>
    <section class="panel" aria-label="Queue">
      <h2>Queue</h2>
      <p class="big">${waiting} <small>waiting</small></p>
      <div class="squares" aria-hidden="true">${squares(Math.min(waiting, 256), () => false)}</div>
    </section>
    <section class="panel" aria-label="Cache">
      <h2>Cache</h2>
      <p class="big">${share(sums.kv_cache_usage_perc)} <small>of the memory for keys and values reserved</small></p>
      <progress max="1" .value=${sums.kv_cache_usage_perc} aria-label="Memory reserved"></progress>
      <p>${queries ? `${share(sums.prefix_cache_hits_total / queries)} of prompt tokens were in the prefix cache` : "no prompt yet"}</p>
    </section>
    <section class="panel" aria-label="Speed">
      <h2>Tokens/s</h2>
      <p class="big">${figure(state.server.rates.at(-1) ?? 0, 0)} <small>in the last second</small></p>
      ${rates()}
    </section>
  </div>`;
}

const squares = (count, filled) =>
  Array.from({ length: count }, (_, place) => html`<span class=${filled(place) ? "square filled" : "square"}></span>`);

function rates() {
  const found = state.server.rates;
  const most = Math.max(1, ...found);
  return html`<svg class="rates" viewBox="0 0 240 40" preserveAspectRatio="none" role="img" aria-label="Tokens per second, the last minute">
    ${found.map((rate, place) => svg`<rect x=${place * 4} y=${40 - (40 * rate) / most} width="3" height=${(40 * rate) / most}></rect>`)}
  </svg>`;
}

// -- the lines of Python -------------------------------------------------------------------------------

function python(value, indent = 1) {
  const pad = "    ".repeat(indent);
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map((one) => python(one, indent)).join(", ")}]`;
  if (typeof value === "object") {
    const inside = Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one, indent)}`);
    const line = `{${inside.join(", ")}}`;
    return line.length < 90 ? line : `{\n${inside.map((one) => `${pad}    ${one},\n`).join("")}${pad}}`;
  }
  return JSON.stringify(value);
}

function lines() {
  if (!state.model) return "";
  const asked = { generate: () => request(state.form.drafter), race: () => request(""), edit: editRequest, server: batchRequest };
  const [path, body] = asked[state.tab]();
  const chat = path.endsWith("chat/completions");
  const { speculation, ...known } = body;
  const call = (own, extra) => {
    const given = Object.entries(own).map(([name, value]) => `    ${name}=${python(value)},`);
    if (extra) given.push(`    extra_body=${python(extra)},`);
    return [`client.${chat ? "chat.completions" : "completions"}.create(`, ...given, `)`].join("\n");
  };
  const start = [
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(new URL("v1", document.baseURI).href)}, api_key="${state.form.key ? "YOUR KEY" : "none"}")`,
  ];
  if (state.tab === "race") {
    const drafter = state.form.drafter === "off" ? "" : state.form.drafter;
    const ask = [`ask = dict(`, ...Object.entries(known).map(([name, value]) => `    ${name}=${python(value)},`), ")"];
    const create = `client.${chat ? "chat.completions" : "completions"}.create`;
    const text = chat ? ".choices[0].message.content" : ".choices[0].text";
    return [
      ...start,
      ...ask,
      `plain = ${create}(**ask, extra_body={"speculation": "off"})`,
      `drafted = ${create}(**ask${drafter ? `, extra_body={"speculation": ${JSON.stringify(drafter)}}` : ""})`,
      `assert plain${text} == drafted${text}`,
    ].join("\n");
  }
  if (body.n > 1) {
    return [
      ...start,
      `answers = ${call(known, speculation && { speculation })}`,
      "for answer in answers.choices:",
      `    print(answer.index, ${chat ? "answer.message.content" : "answer.text"})`,
    ].join("\n");
  }
  return [
    ...start,
    `stream = ${call({ ...known, stream: true }, speculation && { speculation })}`,
    "for chunk in stream:",
    chat ? `    print(chunk.choices[0].delta.content or "", end="")` : `    print(chunk.choices[0].text, end="")`,
  ].join("\n");
}

async function copy() {
  await navigator.clipboard.writeText(lines());
  state.copied = true;
  draw();
  setTimeout(() => {
    state.copied = false;
    draw();
  }, 2000);
}

function code() {
  return html`<details class="panel" open>
    <summary>Python</summary>
    <pre tabindex="0" aria-label="The same with openai-python"><code>${lines()}</code></pre>
    ${navigator.clipboard ? html`<button type="button" @click=${copy}>${state.copied ? "Copied" : "Copy"}</button>` : nothing}
  </details>`;
}

// -- the page ------------------------------------------------------------------------------------------

function open(tab) {
  state.tab = tab;
  if (tab === "server") poll();
  draw();
}

function tabKeys(event) {
  const names = TABS.map(([name]) => name);
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!move) return;
  event.preventDefault();
  open(names[(names.indexOf(state.tab) + move + names.length) % names.length]);
  document.getElementById(`tab-${state.tab}`).focus();
}

function page() {
  const views = { generate, race, edit, server };
  const { tab } = state;
  return html`
    <header class="top">
      <p class="mark">outpace</p>
      <p class=${state.problem ? "error" : "about"} role="status">
        ${state.problem || (state.model ? state.model.id : state.locked ? "this server takes an API key" : "connecting")}
      </p>
      <nav role="tablist" aria-label="Views" @keydown=${tabKeys}>
        ${TABS.map(
          ([name, label]) => html`<button
            type="button"
            role="tab"
            id=${`tab-${name}`}
            aria-selected=${tab === name ? "true" : "false"}
            aria-controls="view"
            tabindex=${tab === name ? 0 : -1}
            @click=${() => open(name)}
          >${label}</button>`,
        )}
      </nav>
    </header>
    <main>
      <div id="view" role="tabpanel" aria-labelledby=${`tab-${tab}`}>
        <div class="ask">${form()}</div>
        <div class="answer">${views[tab]()} ${code()}</div>
      </div>
    </main>
  `;
}

// Keep the end of what is being written in sight.
function follow(name) {
  const [text, chart] = ["tokens", "bars"].map((part) => document.getElementById(`${part}-${name}`));
  if (!text) return;
  text.scrollTop = text.scrollHeight;
  chart.scrollLeft = chart.scrollWidth;
}

let frame = 0;

function draw() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    render(page(), document.body);
    if (sought) showAnswer();
    sought = false;
    for (const [name, run] of Object.entries(state.runs)) if (!run.ended) follow(name);
  });
}

setInterval(() => state.tab === "server" && !document.hidden && poll(), 1000);
draw();
connect();
