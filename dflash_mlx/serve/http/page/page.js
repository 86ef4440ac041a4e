// The page's behaviour: it talks to the same server's OpenAI routes and shows what comes back, as text only.
"use strict";

const $ = (id) => document.getElementById(id);
const SHOWN_ROUNDS = 80;
const state = { model: "default_model", messages: [], rounds: [], reader: null, template: true };

// Talking to the server --------------------------------------------------------------------------------------

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function request(path, body, signal) {
  const options = body ? { method: "POST", body: JSON.stringify(body), signal } : {};
  const response = await fetch(path, { headers: headers(), ...options });
  if (response.ok) return response;
  const text = await response.text();
  throw Object.assign(new Error(errorText(text) || response.statusText), { status: response.status });
}

function errorText(text) {
  try {
    const { error } = JSON.parse(text);
    return error.message ?? error;
  } catch {
    return text;
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data: ") && line.slice(6).trim();
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// Showing ------------------------------------------------------------------------------------------------------

function element(name, className, text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text; // never as HTML: a model may write anything
  return made;
}

function showMessage(role, text = "") {
  const article = element("article", role);
  const body = element("pre", "", text);
  article.append(element("h2", "", role === "user" ? "You" : "Model"), body);
  $("log").append(article);
  $("log").scrollTop = $("log").scrollHeight;
  return { article, body, thoughts: null };
}

function grow(message, kind, text) {
  const log = $("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  if (kind === "reasoning" && !message.thoughts) {
    const details = element("details");
    message.thoughts = element("pre");
    details.append(element("summary", "", "Reasoning"), message.thoughts);
    message.body.before(details);
  }
  (kind === "reasoning" ? message.thoughts : message.body).append(text);
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function say(id, text) {
  $(id).textContent = text;
  $(id).hidden = !text;
}

function showError(error) {
  const needsKey = error.status === 401;
  if (needsKey) say("error", $("key").value ? "This server does not take that API key." : "This server needs an API key.");
  else if (error instanceof TypeError) say("error", `The server can't be reached (${error.message}).`);
  else say("error", error.status ? `${error.status}: ${error.message}` : error.message);
  if (!needsKey) return;
  $("key-field").hidden = false;
  $("key").focus();
}

function showFigures(figures) {
  // `recent` holds the last rounds, [draft tokens kept, rows verified] each; they end at round number `rounds`
  const first = figures.rounds - (figures.recent ?? []).length;
  for (const [i, round] of (figures.recent ?? []).entries()) state.rounds[first + i] = round;
  $("speed").textContent = figures.tokens_per_second.toFixed(1);
  $("tau").textContent = figures.tau.toFixed(2);
  $("rounds").textContent = figures.rounds;
  $("kept").textContent = figures.accepted;
  if ("draft_used" in figures) showDraft(figures);
  drawChart(state.rounds.slice(-SHOWN_ROUNDS));
}

function drawChart(rounds) {
  const height = Math.max(1, ...rounds.map(([, rows]) => rows - 1));
  const bars = rounds.flatMap(([kept, rows], i) => [bar("offered", i, rows - 1), bar("accepted", i, kept)]);
  $("chart").setAttribute("viewBox", `0 0 ${Math.max(20, rounds.length)} ${height}`);
  $("chart").setAttribute("aria-label", `accepted of offered: ${rounds.map(([k, r]) => `${k}/${r - 1}`).join(", ")}`);
  $("chart").replaceChildren(...bars);

  function bar(className, i, size) {
    const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const place = { class: className, x: i + 0.1, y: height - size, width: 0.8, height: size };
    for (const [name, value] of Object.entries(place)) rect.setAttribute(name, value);
    return rect;
  }
}

function showDraft(figures) {
  const reason = figures.draft_off_reason ? ` (${figures.draft_off_reason})` : "";
  const block = figures.auto ? `blocks of up to ${figures.block_size}` : `block ${figures.block_size}`;
  $("draft").textContent = figures.draft_used ? `draft used, ${block}${reason}` : `no draft used${reason}`;
}

// The conversation -----------------------------------------------------------------------------------------------

async function connect() {
  try {
    const { data } = await (await request("v1/models")).json();
    const [{ id, dflash }] = data;
    state.model = id;
    $("model").textContent = id;
    state.template = dflash.chat_template;
    say("note", state.template ? "" : "This model has no chat template: it goes on with the raw text of the conversation.");
    $("draft").textContent = dflash.draft_model ? `draft ${dflash.draft_model}` : "no draft";
    say("error", "");
  } catch (error) {
    $("model").textContent = "not connected";
    showError(error);
  }
}

function busy(on) {
  $("send").disabled = on;
  $("stop").disabled = !on;
  $("log").setAttribute("aria-busy", on);
}

function body(messages) {
  const options = {
    model: state.model,
    temperature: Number($("temperature").value),
    max_tokens: Number($("max-tokens").value),
    stream: true,
    stream_options: { include_usage: true, include_dflash: true },
  };
  if (state.template) return { ...options, messages };
  return { ...options, prompt: messages.map(({ content }) => content).join("") };
}

async function answer(messages) {
  state.reader = new AbortController();
  const said = { role: "assistant", content: "" };
  const message = showMessage("assistant");
  state.rounds = [];
  try {
    const response = await request(state.template ? "v1/chat/completions" : "v1/completions", body(messages), state.reader.signal);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message ?? chunk.error);
      if (chunk.dflash) showFigures(chunk.dflash);
      for (const choice of chunk.choices) said.content += show(message, choice);
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    message.article.append(element("p", "stopped", "stopped"));
  } finally {
    if (said.content) messages.push(said);
    else if (!message.thoughts) message.article.remove();
  }
}

function show(message, choice) {
  const delta = choice.delta ?? { content: choice.text };
  if (delta.reasoning) grow(message, "reasoning", delta.reasoning);
  if (delta.content) grow(message, "text", delta.content);
  for (const call of delta.tool_calls ?? []) grow(message, "text", `${call.function.name}(${call.function.arguments})\n`);
  return delta.content ?? "";
}

async function send() {
  const text = $("prompt").value;
  if (!text.trim() || !$("stop").disabled) return;
  say("error", "");
  busy(true);
  const { messages } = state; // a new chat begins another list
  const asked = showMessage("user", text);
  messages.push({ role: "user", content: text });
  $("prompt").value = "";
  try {
    await answer(messages);
  } catch (error) {
    if (messages.at(-1).role === "user") {
      messages.pop(); // unanswered: give it back, to be sent again
      asked.article.remove();
      $("prompt").value = text;
    }
    showError(error);
  } finally {
    busy(false);
    if ($("key-field").hidden || $("error").hidden) $("prompt").focus();
  }
}

function startOver() {
  state.reader?.abort();
  state.messages = [];
  $("log").replaceChildren();
  say("error", "");
  $("prompt").focus();
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => state.reader.abort());
$("new").addEventListener("click", startOver);
$("key").addEventListener("change", () => { sessionStorage.setItem("key", $("key").value); connect(); });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") state.reader?.abort(); });
$("key").value = sessionStorage.getItem("key") ?? "";
connect();
