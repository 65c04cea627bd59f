// Ask a base and its adapters side by side. Talks to the server that it came from, over its public routes alone.

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens"];
const COLUMNS = [...document.querySelectorAll("#adapters th")].map((head) => head.textContent);
let base = "";
let forms = new Map(); // adapter -> how its rows were written in training: { raw, system }
let refreshes = 0;
let canChange = null; // whether the server has the routes that load and unload; null: not known yet
let running = null; // the AbortController of the question under way

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text; // never HTML, because names and answers are other people's texts
  if (className) made.className = className;
  return made;
}

async function call(path, { key = $("key").value, body, signal } = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const reply = await connected(fetch(path, {
    method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal,
  }));
  if (reply.ok) return reply;
  const text = await reply.text();
  let message = text || reply.statusText;
  try { message = JSON.parse(text).error.message ?? message; } catch { /* not JSON */ }
  throw new Error(message);
}

// A browser says "Failed to fetch" or "network error", or other words for the same.
async function connected(work) {
  try {
    return await work;
  } catch (problem) {
    throw problem instanceof TypeError ? new Error("the connection failed; does the server still run?") : problem;
  }
}

// --- models and adapters ---------------------------------------------------------------------------------------------

async function refresh() {
  const number = ++refreshes;
  try {
    const replies = await Promise.all([call("v1/models"), call("v1/adapters")]);
    const [models, adapters] = (await Promise.all(replies.map((reply) => reply.json()))).map((list) => list.data);
    // who has the admin key alone may not read the document, and there is such a key
    canChange ??= await call("openapi.json").then((reply) => reply.json())
      .then((document) => "/v1/load_lora_adapter" in document.paths, () => true);
    if (number !== refreshes) return; // a later one shows what is newer
    $("load").hidden = !canChange;
    $("no-admin").hidden = canChange;
    base = models[0].id;
    $("base").textContent = base;
    showChoices(models.map((model) => model.id));
    forms = new Map(adapters.map((adapter) => [adapter.name, adapter.prompting ?? {}]));
    showAdapters(adapters);
    say($("status"), `${models.length - 1} adapter${models.length === 2 ? "" : "s"}`);
  } catch (problem) {
    say($("status"), problem.message, true);
    if (/key/i.test(problem.message)) $("keys").open = true;
  }
}

function showChoices(names) {
  const boxes = new Map([...$("choices").querySelectorAll("input")].map((box) => [box.value, box.checked]));
  if (names.join("\n") === [...boxes.keys()].join("\n")) return; // so that the focus stays
  const wanted = new URLSearchParams(location.hash.slice(1)).get("models")?.split(",");
  $("choices").replaceChildren(...names.map((name, index) => {
    const label = element("label");
    const box = element("input");
    box.type = "checkbox";
    box.value = name;
    box.checked = boxes.get(name) ?? (wanted ? wanted.includes(name) : index < 4);
    label.append(box, name === base ? `${name} (the base)` : name);
    return label;
  }));
}

function showAdapters(adapters) {
  $("rows").replaceChildren(...adapters.map((adapter) => {
    const row = element("tr");
    const size = adapter.bytes === undefined ? "" : `${(adapter.bytes / 1e6).toFixed(1)} MB`;
    const why = adapter.error ? `${adapter.state}: ${adapter.error}` : adapter.state;
    const state = element("td", why, adapter.error ? "bad" : "");
    row.append(element("td", adapter.name), state);
    for (const text of [adapter.rank ?? "", size, adapter.requests ?? ""]) row.append(element("td", String(text)));
    row.append(element("td", (adapter.digest ?? "").slice(0, 12)));
    // for narrow windows, where a row is a card without the head of the table
    [...row.children].forEach((cell, column) => { cell.dataset.label = COLUMNS[column]; });
    const cell = element("td");
    const button = element("button", "Unload");
    button.type = "button";
    button.setAttribute("aria-label", `Unload ${adapter.name}`);
    button.addEventListener("click", () => {
      if (!confirm(`Unload ${adapter.name}? Requests for it are refused until it is loaded again.`)) return;
      change("v1/unload_lora_adapter", { lora_name: adapter.name });
    });
    if (canChange && adapter.state !== "failed") cell.append(button);
    row.append(cell);
    return row;
  }));
}

async function change(path, body) {
  try {
    await call(path, { key: $("admin").value, body });
    say($("admin-status"), `${body.lora_name} is ${body.lora_path ? "loaded" : "unloaded"}`);
  } catch (problem) {
    const missing = !$("admin").value && /key is required/.test(problem.message);
    say($("admin-status"), missing ? "enter the admin key: it alone loads and unloads adapters" : problem.message, true);
    if (missing) $("admin").focus();
  }
  await refresh();
}

function say(place, text, bad = false) {
  place.textContent = text;
  place.classList.toggle("bad", bad);
}

// --- questions and answers -------------------------------------------------------------------------------------------

async function ask() {
  const names = [...$("choices").querySelectorAll("input:checked")].map((box) => box.value);
  if (!names.length) return say($("status"), "choose who answers", true);
  running?.abort();
  const control = running = new AbortController();
  $("stop").disabled = false;
  remember(names);
  const cards = names.map(card);
  $("answers").replaceChildren(...cards.map((one) => one.node));
  $("answers").scrollIntoView({ block: "nearest" });
  await Promise.all(names.map((name, index) => answer(name, cards[index], control.signal)));
  if (running === control) {
    running = null;
    $("stop").disabled = true;
  }
  await refresh();
}

function card(name) {
  const node = element("article", "", "answer");
  const thought = element("pre", "", "thought");
  const text = element("pre");
  const facts = element("p", "waiting", "facts");
  const { raw, system } = forms.get(name) ?? {};
  node.append(element("h2", name));
  if (raw) node.append(element("p", "asked in plain text, as it was trained", "facts"));
  else if (system) node.append(element("p", `asked after its system prompt: ${system}`, "facts"));
  node.append(thought, text, facts);
  node.dataset.model = name;
  facts.classList.add("result");
  return { node, thought, text, facts };
}

function request(name) {
  const body = { model: name, stream: true, stream_options: { include_usage: true } };
  for (const key of NUMBERS) if ($(key).value !== "") body[key] = Number($(key).value);
  if ($("seed").value !== "") body.seed = Number($("seed").value);
  const { raw, system: trained } = forms.get(name) ?? {};
  if ($("plain").checked || raw) return ["v1/completions", { ...body, prompt: $("prompt").value }];
  const texts = [trained, $("system").value].filter(Boolean);
  const system = texts.length ? [{ role: "system", content: texts.join("\n\n") }] : [];
  return ["v1/chat/completions", { ...body, messages: [...system, { role: "user", content: $("prompt").value }] }];
}

async function answer(name, { thought, text, facts }, signal) {
  const began = performance.now();
  let first = null, reason = "", tokens = 0;
  try {
    const [path, body] = request(name);
    for await (const chunk of events(await call(path, { body, signal }))) {
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices?.[0];
      const pieces = [[thought, choice?.delta?.reasoning_content], [text, choice?.delta?.content ?? choice?.text]];
      for (const [place, piece] of pieces.filter(([, piece]) => piece)) {
        first ??= performance.now();
        place.append(piece);
      }
      reason = choice?.finish_reason ?? reason;
      tokens = chunk.usage?.completion_tokens ?? tokens;
    }
    const ended = performance.now();
    const rate = first !== null && tokens > 1 ? `, ${((tokens - 1) / ((ended - first) / 1000)).toFixed(1)} tokens/s` : "";
    const wait = first === null ? "" : `, first after ${((first - began) / 1000).toFixed(2)} s`;
    facts.textContent = `${tokens} tokens${wait}${rate}, ${reason === "length" ? "cut at the longest answer" : reason}`;
  } catch (problem) {
    const stopped = problem.name === "AbortError";
    facts.textContent = stopped ? "stopped" : problem.message;
    facts.classList.toggle("bad", !stopped);
  }
}

// The JSON of each server-sent event, until [DONE].
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await connected(reader.read());
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: ?/, "");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // of a connection that broke
  }
}

// The question is in the address, so that it can be sent to somebody; keys are not.
function remember(names) {
  const values = new URLSearchParams({ prompt: $("prompt").value, models: names.join(",") });
  for (const key of ["system", ...NUMBERS, "seed"]) if ($(key).value !== $(key).defaultValue) values.set(key, $(key).value);
  if ($("plain").checked) values.set("plain", "1");
  history.replaceState(null, "", `#${values}`);
}

function recall() {
  const values = new URLSearchParams(location.hash.slice(1));
  for (const key of ["prompt", "system", ...NUMBERS, "seed"]) if (values.has(key)) $(key).value = values.get(key);
  $("plain").checked = values.has("plain");
  for (const key of ["key", "admin"]) {
    $(key).value = sessionStorage.getItem(key) ?? "";
    $(key).addEventListener("change", () => { sessionStorage.setItem(key, $(key).value); refresh(); });
  }
}

$("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
  if (event.key === "Escape") running?.abort();
});
for (const [id, checked] of [["all", true], ["none", false]]) {
  $(id).addEventListener("click", () => $("choices").querySelectorAll("input").forEach((box) => { box.checked = checked; }));
}
$("load").addEventListener("submit", (event) => {
  event.preventDefault();
  change("v1/load_lora_adapter", { lora_name: $("lora_name").value, lora_path: $("lora_path").value, load_inplace: true });
});

recall();
refresh();
