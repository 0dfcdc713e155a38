// The page of the text generation server. It uses the same OpenAI-style endpoints as any client.

const ALTERNATIVES = 5; // number of most likely tokens to show for each chosen token
const KEPT = ["temperature", "top_p", "top_k", "max_tokens", "repetition_penalty", "seed", "stops", "system"];
const SLIDERS = ["temperature", "top_p", "repetition_penalty"];
// The page's labels for the fields of a request, for error messages.
const LABELS = {
  model: "Model",
  prompt: "Prompt",
  max_tokens: "Max new tokens",
  temperature: "Temperature",
  top_p: "Top-p",
  top_k: "Top-k",
  repetition_penalty: "Repetition penalty",
  seed: "Seed",
  stop: "Stop sequences",
};
const UNREACHABLE = "The server cannot be reached. Check that it is running (start it again if it has stopped)";

const $ = (id) => document.getElementById(id);
const state = {
  mode: "complete",
  models: [], // the model and its adapters, as /v1/models describes them
  model: null, // the chosen one of these
  messages: [], // the chat so far: {role, content}
  prompt: "", // the text that the last answer continues
  running: null, // AbortController
  answer: null, // the element with the last answer
};

// ---- The server ---------------------------------------------------------------------------------

function headers() {
  const token = $("token").value.trim();
  return { "Content-Type": "application/json", ...(token && { Authorization: `Bearer ${token}` }) };
}

async function failure(response) {
  try {
    const { error } = await response.json();
    return new Error(explain(error));
  } catch {
    return new Error(`The server answered with status ${response.status} ${response.statusText}.`);
  }
}

// The message of an API error, with this page's labels in place of the API's field names.
function explain({ message, param }) {
  const tooMany = /^Too many tokens\.\s+(\d+) is greater than (\d+)$/.exec(message);
  if (tooMany) {
    const [, asked, most] = tooMany;
    return `The prompt and Max new tokens come to ${asked} tokens, but this server accepts at most ${most}. Shorten the prompt or lower Max new tokens.`;
  }
  const label = LABELS[param];
  const text = label ? message.replaceAll(new RegExp(`\\b${param}\\b`, "g"), label) : message;
  return text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

// Call fetch, and if the server cannot be reached, throw an error that says what to do.
async function request(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(UNREACHABLE);
  }
}

async function* serverEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) throw new Error("The connection to the server was lost before the answer ended. Check that the server is running, then try again.");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const object = JSON.parse(data);
      if (object.error) throw new Error(explain(object.error));
      yield object;
    }
  }
}

// The content of a streamed chunk: {text, tokens: [{text, logprob, top: [[text, logprob], ...]}], finish,
// passages: [{chunk, corpus, document, text}]}.
function readChunk({ choices: [choice] }) {
  const scores = choice.logprobs;
  const passages = choice.passages ?? []; // only of a model that retrieves
  const finish = choice.finish_reason;
  if (choice.delta) {
    const tokens = (scores?.content ?? []).map((each) => ({
      text: each.token,
      logprob: each.logprob,
      top: each.top_logprobs.map((other) => [other.token, other.logprob]),
    }));
    return { text: choice.delta.content ?? "", tokens, finish, passages };
  }
  const tokens = (scores?.tokens ?? []).map((text, i) => ({
    text,
    logprob: scores.token_logprobs[i],
    top: Object.entries(scores.top_logprobs[i] ?? {}),
  }));
  return { text: choice.text, tokens, finish, passages };
}

async function* generate(signal) {
  const chat = state.mode === "chat";
  const system = $("system").value.trim();
  const body = chat
    ? {
        messages: [...(system ? [{ role: "system", content: system }] : []), ...state.messages],
        logprobs: true,
        top_logprobs: ALTERNATIVES,
      }
    : { prompt: state.prompt, logprobs: ALTERNATIVES };
  const path = chat ? "v1/chat/completions" : "v1/completions";
  const response = await request(path, {
    method: "POST",
    headers: headers(),
    signal,
    body: JSON.stringify({ model: state.model?.id, ...body, ...sampling(), stream: true }),
  });
  if (!response.ok) throw await failure(response);
  for await (const chunk of serverEvents(response)) yield readChunk(chunk);
}

function sampling() {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const stop = $("stops").value.split("\n").filter((line) => line !== "");
  return {
    temperature: number("temperature"),
    top_p: number("top_p"),
    top_k: number("top_k"),
    max_tokens: number("max_tokens"),
    repetition_penalty: number("repetition_penalty"),
    seed: number("seed"),
    ...(stop.length && { stop }),
  };
}

async function connect() {
  try {
    const response = await request("v1/models", { headers: headers() });
    if (response.status === 401) {
      $("settings").open = true;
      return notify("This server requires an access token: enter it under Settings.");
    }
    if (!response.ok) throw await failure(response);
    state.models = (await response.json()).data;
  } catch (error) {
    return notify(error.message === UNREACHABLE ? `${UNREACHABLE}, then reload this page.` : error.message);
  }
  notify("");
  $("served").replaceChildren(...state.models.map(({ id }) => new Option(id)));
  $("served-control").hidden = state.models.length === 1;
  chooseModel();
}

// Use the model that is chosen in the settings, which is the first until the user chooses.
function chooseModel() {
  state.model = state.models.find(({ id }) => id === $("served").value);
  $("model").textContent = state.model.id;
  document.title = `${state.model.id}: text generation`;
  $("max_tokens").max = state.model.max_model_len;
  const chat = document.querySelector("[name=mode][value=chat]");
  chat.disabled = !state.model.chat;
  $("no-chat").hidden = state.model.chat;
  if (!state.model.chat && state.mode === "chat") setMode("complete");
}

// ---- The output ---------------------------------------------------------------------------------

function notify(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function say(text, bad = false) {
  $("status").textContent = text;
  $("status").classList.toggle("bad", bad);
}

function setMode(mode) {
  state.mode = mode;
  const chat = mode === "chat";
  document.querySelector(`[name=mode][value=${mode}]`).checked = true;
  $("output").classList.toggle("plain", !chat);
  $("output").dataset.empty = chat ? "The conversation appears here." : "Generated text appears here.";
  $("input-label").textContent = chat ? "Your message" : "Prompt";
  $("input").placeholder = chat ? "Write a message…" : "Write the beginning of a text…";
  $("send").textContent = chat ? "Send" : "Generate";
  clear();
}

function clear() {
  state.running?.abort();
  state.messages = [];
  state.prompt = "";
  state.answer = null;
  $("output").replaceChildren();
  $("output-help").hidden = true;
  showPassages([]);
  hideTip();
  say("");
  showButtons();
}

function showButtons() {
  const running = state.running !== null;
  $("send").hidden = running;
  $("stop").hidden = !running;
  $("continue").hidden = state.mode === "chat";
  $("continue").disabled = running || !state.answer;
  $("again").disabled = running || !state.answer;
  $("copy").disabled = !state.answer;
  $("clear").disabled = running || !$("output").hasChildNodes();
}

function addTurn(role, text) {
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  turn.textContent = text;
  $("output").append(turn);
  return turn;
}

function beginAnswer() {
  const answer = document.createElement("span");
  answer.className = "answer writing";
  if (state.mode === "chat") {
    addTurn("assistant", "").append(answer);
  } else if ($("output").textContent === state.prompt && state.prompt !== "") {
    $("output").append(answer); // continue the text so far, and keep the spans of its tokens
  } else {
    $("output").replaceChildren(document.createTextNode(state.prompt), answer);
  }
  state.answer = answer;
}

// Show the passages that the model has read for the last answer.
function showPassages(passages) {
  $("passages").hidden = !passages.length;
  const count = passages.length === 1 ? "1 passage" : `${passages.length} passages`;
  $("passages").querySelector("summary").textContent = `The model has read ${count}`;
  const items = passages.map(({ chunk, corpus, document: number, text }) => {
    const item = document.createElement("li");
    const source = document.createElement("b");
    source.textContent = `For chunk ${chunk + 1}, from document ${number} of corpus ${corpus}`;
    const quote = document.createElement("blockquote");
    quote.textContent = text;
    item.append(source, quote);
    return item;
  });
  $("passages").querySelector("ol").replaceChildren(...items);
}

// Add a span for each token, or a single one for all tokens of a character.
function append({ text, tokens }) {
  const box = $("output");
  const follow = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  const whole = tokens.map((token) => token.text).join("") === text;
  for (const token of whole ? tokens : [{ ...tokens.at(-1), text }]) {
    if (token.text === "") continue;
    const span = document.createElement("span");
    span.textContent = token.text;
    if (token.logprob !== undefined) {
      span.token = token;
      span.style.setProperty("--p", Math.exp(token.logprob).toFixed(3));
    }
    state.answer.append(span);
  }
  if (follow) box.scrollTop = box.scrollHeight;
}

// ---- Answering ----------------------------------------------------------------------------------

async function answer() {
  const clock = { start: performance.now(), first: 0, tokens: 0 };
  const controller = new AbortController();
  state.running = controller;
  beginAnswer();
  const mine = state.answer;
  const passages = [];
  showPassages(passages);
  showButtons();
  say("Waiting for the first token…");
  let end = "stopped";
  try {
    for await (const chunk of generate(controller.signal)) {
      if (state.answer !== mine) return;
      if (chunk.text) append(chunk);
      if (chunk.passages.length) {
        passages.push(...chunk.passages);
        showPassages(passages);
      }
      clock.first ||= chunk.tokens.length ? performance.now() : 0;
      clock.tokens += chunk.tokens.length;
      if (chunk.finish) end = chunk.finish === "length" ? "token limit reached" : "complete";
      say(speed(clock));
    }
    say(`${speed(clock)} · ${end}`);
  } catch (error) {
    if (state.answer !== mine) return;
    if (controller.signal.aborted) say(`${speed(clock)} · stopped`);
    else say(error.message === UNREACHABLE ? `${UNREACHABLE}, then try again.` : error.message, true);
  } finally {
    mine.classList.remove("writing");
    if (state.running === controller) finish(mine);
  }
}

function finish(mine) {
  state.running = null;
  if (state.mode === "chat") state.messages.push({ role: "assistant", content: mine.textContent });
  $("output-help").hidden = !mine.hasChildNodes();
  showButtons();
  $("input").focus({ preventScroll: true });
}

function speed({ start, first, tokens }) {
  if (!first) return "";
  const seconds = (performance.now() - first) / 1000;
  const rate = tokens > 1 && seconds > 0 ? ` · ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  return `${tokens} token${tokens === 1 ? "" : "s"}${rate} · first after ${((first - start) / 1000).toFixed(2)} s`;
}

function send() {
  const text = $("input").value;
  if (state.running || text === "") return;
  if (state.mode === "chat") {
    state.messages.push({ role: "user", content: text });
    addTurn("user", text);
    $("input").value = "";
  } else {
    state.prompt = text;
    $("output").replaceChildren();
  }
  answer();
}

// Continue the text so far: the prompt and everything generated after it.
function continueText() {
  if (state.running || !state.answer) return;
  state.prompt = $("output").textContent;
  answer();
}

// Replace the last answer with a new one.
function again() {
  if (state.running || !state.answer) return;
  if (state.mode === "chat") {
    state.messages.pop();
    state.answer.parentElement.remove();
  } else {
    state.answer.remove();
  }
  answer();
}

async function copy() {
  const text = state.mode === "chat" ? state.answer.textContent : $("output").textContent;
  try {
    await navigator.clipboard.writeText(text);
    say("Copied.");
  } catch {
    // Without https or localhost there is no clipboard: select the text, so that Ctrl+C copies it.
    getSelection().selectAllChildren(state.mode === "chat" ? state.answer : $("output"));
    say("Selected. Press Ctrl+C to copy.");
  }
}

// ---- Token probabilities ------------------------------------------------------------------------

function percent(logprob) {
  const value = Math.exp(logprob) * 100;
  return `${value.toFixed(value < 10 ? 1 : 0)}%`;
}

function visible(text) {
  const known = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
  // Show other control characters as their Unicode pictures.
  return known.replace(/[\x00-\x1f\x7f]/g, (c) => String.fromCharCode(c === "\x7f" ? 0x2421 : 0x2400 + c.charCodeAt(0)));
}

function row(text, logprob, taken) {
  const line = document.createElement("tr");
  line.className = taken ? "taken" : "";
  const meter = document.createElement("meter");
  meter.value = Math.exp(logprob);
  for (const content of [visible(text), meter, percent(logprob)]) {
    const cell = document.createElement("td");
    cell.append(content);
    line.append(cell);
  }
  return line;
}

function showTip(span) {
  hideTip();
  const { text, logprob, top = [] } = span.token;
  const rows = top.map(([other, value]) => row(other, value, other === text));
  if (!top.some(([other]) => other === text)) rows.unshift(row(text, logprob, true));
  const table = document.createElement("table");
  table.append(...rows);
  $("tip").replaceChildren(table);
  $("tip").hidden = false;
  span.classList.add("chosen");
  place($("tip"), span.getBoundingClientRect());
}

function place(tip, where) {
  const { width, height } = tip.getBoundingClientRect();
  const below = where.bottom + 6 + height < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(where.left, innerWidth - width - 8))}px`;
  tip.style.top = `${Math.max(8, below ? where.bottom + 6 : where.top - height - 6)}px`;
}

function hideTip() {
  $("tip").hidden = true;
  document.querySelector(".chosen")?.classList.remove("chosen");
}

// Move between tokens with the left and right arrow keys, for users without a mouse.
function moveTip(step) {
  const spans = [...document.querySelectorAll(".answer span")].filter((span) => span.token);
  if (!spans.length) return;
  const now = spans.findIndex((span) => span.classList.contains("chosen"));
  const next = now < 0 ? (step > 0 ? 0 : spans.length - 1) : now + step;
  const span = spans[Math.max(0, Math.min(next, spans.length - 1))];
  span.scrollIntoView({ block: "nearest" });
  showTip(span);
}

// ---- Settings: kept for later visits, except the access token, which is kept for this visit only ---

function restore() {
  for (const id of KEPT) $(id).value = localStorage.getItem(id) ?? $(id).value;
  $("shade").checked = localStorage.getItem("shade") === "true";
  $("token").value = sessionStorage.getItem("token") ?? "";
  $("settings").open = matchMedia("(min-width: 52rem)").matches;
  showSettings();
}

function showSettings() {
  for (const id of SLIDERS) $(`${id}-value`).textContent = Number($(id).value).toFixed(2);
  $("output").classList.toggle("shaded", $("shade").checked);
}

function keep() {
  for (const id of KEPT) localStorage.setItem(id, $(id).value);
  localStorage.setItem("shade", $("shade").checked);
  sessionStorage.setItem("token", $("token").value.trim());
  showSettings();
}

// ---- Start --------------------------------------------------------------------------------------

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("input").addEventListener("keydown", (event) => {
  const sends = event.ctrlKey || event.metaKey || (state.mode === "chat" && !event.shiftKey);
  if (event.key === "Enter" && sends && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", () => state.running?.abort());
$("continue").addEventListener("click", continueText);
$("again").addEventListener("click", again);
$("copy").addEventListener("click", copy);
$("clear").addEventListener("click", () => {
  clear();
  $("input").focus();
});
$("controls").addEventListener("input", keep);
$("controls").addEventListener("submit", (event) => event.preventDefault());
$("token").addEventListener("change", connect);
$("served").addEventListener("change", chooseModel);
for (const radio of document.querySelectorAll("[name=mode]")) {
  radio.addEventListener("change", () => setMode(radio.value));
}
$("output").addEventListener("mouseover", ({ target }) => (target.token ? showTip(target) : hideTip()));
$("output").addEventListener("mouseleave", hideTip);
$("output").addEventListener("click", ({ target }) => target.token && showTip(target));
$("output").addEventListener("blur", hideTip);
// The tip is placed beside its token, so hide it when anything scrolls (on a phone the whole page).
for (const move of ["wheel", "touchmove"]) document.addEventListener(move, hideTip, { passive: true });
$("output").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  moveTip(step);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  hideTip();
  state.running?.abort();
});

restore();
setMode("complete");
connect();
