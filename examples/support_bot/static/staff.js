import { byId, call, element, follow, update } from "./common.js";

const STATES = {
  idle: "Nothing to do.",
  working: "The bot is at work.",
  waiting: "Waits for you.",
  delayed: "The model's server fails; the bot tries again by itself.",
};
const TITLES = {
  customer: "Customer", bot: "Bot", thought: "Bot, to itself", result: "Result", held: "Held back",
};
const OUTCOMES = { approve: "Approved", deny: "Denied", reply: "Answered" };

// A link may carry the token after its #, which browsers do not send to servers.
let token = decodeURIComponent(location.hash.slice(1)) || sessionStorage.getItem("staff") || "";
if (location.hash) history.replaceState(null, "", location.pathname);
let stop = () => {};
let chosen = null;

const money = (cents) => `${Math.floor(cents / 100)}.${String(cents % 100).padStart(2, "0")} EUR`;

// ------------------------------------------------------------------ the conversation

function render(entry) {
  if (entry.kind === "advice") return element("li", { class: "advice" }, advice(entry.number));
  const title = entry.kind === "call" ? `Calls ${entry.name}` : TITLES[entry.kind];
  const head = title ? element("span", { class: "from" }, title) : null;
  return element("li", { class: entry.kind }, head, element("span", { class: "text" }, entry.text));
}

function advice(number) {
  const thread = chosen;
  const body = element("div", {});
  const details = element("details", {}, element("summary", {}, `Critic consulted (${number + 1}): show advice`), body);
  details.addEventListener("toggle", async () => {
    if (!details.open || body.childElementCount) return;
    try {
      const found = await call("GET", `/api/staff/threads/${encodeURIComponent(thread)}/advice/${number}`, token);
      body.replaceChildren(...adviceParts(found));
    } catch (error) {
      body.replaceChildren(element("p", { class: "error" }, error.message));
    }
  });
  return details;
}

function adviceParts(found) {
  const why = found.trigger === "guarded" ? "before an irreversible tool" : found.trigger;
  if (found.status !== "ok") {
    return [element("p", {}, `Asked ${why}. No advice: ${found.status}. ${found.detail} The bot went on without.`)];
  }
  return [
    element("p", { class: "muted" }, `Asked ${why}.`),
    element("h3", {}, "Analysis"), element("p", {}, found.analysis),
    element("h3", {}, "Advice"), element("p", {}, found.advice),
  ];
}

// ------------------------------------------------------------------ hand-overs

function handover(one) {
  const box = element("section", { class: one.decision ? "handover done" : "handover" },
    element("h3", {}, one.kind === "approval" ? `Approve a refund of ${money(one.amount_cents)}?` : "The bot asks"),
    element("p", {}, one.summary));
  if (one.decision) {
    box.append(element("p", { class: "muted" }, `${OUTCOMES[one.decision]}${one.message ? `: ${one.message}` : ""}`));
    return box;
  }
  const id = `message-${one.id}`;
  const message = element("textarea", { id, rows: "2", maxlength: "4000" });
  const error = element("p", { class: "error", role: "alert" });
  const button = (decision, text, kind) => element("button", {
    type: "button", class: kind, onclick: () => answer(one.id, decision, message.value, error, box),
  }, text);
  const buttons = one.kind === "approval"
    ? [button("approve", "Approve", ""), button("deny", "Deny", "quiet")] : [button("reply", "Send", "")];
  box.append(element("label", { for: id }, "Message (the customer sees it)"), message, error,
    element("div", { class: "actions" }, ...buttons));
  return box;
}

async function answer(id, decision, message, error, box) {
  const buttons = box.querySelectorAll("button");
  buttons.forEach((button) => { button.disabled = true; });
  try {
    await call("POST", `/api/staff/handovers/${id}`, token, { decision, message });
    await refresh();
    byId("thread-title").focus();
  } catch (problem) {
    error.textContent = problem.status ? problem.message : "Not sent: the server cannot be reached.";
    buttons.forEach((button) => { button.disabled = false; });
  }
}

// ------------------------------------------------------------------ the desk

async function refresh() {
  if (chosen === null) return;
  const thread = chosen;
  const found = await call("GET", `/api/staff/threads/${encodeURIComponent(thread)}`, token);
  if (thread !== chosen) return;
  byId("thread-state").textContent = STATES[found.state];
  update(byId("handovers"), found.handovers, handover);
  update(byId("log"), found.entries, render);
}

async function choose(thread, name) {
  chosen = thread;
  byId("thread-title").textContent = name;
  byId("log").replaceChildren();
  byId("handovers").replaceChildren();
  for (const button of document.querySelectorAll("#threads button")) {
    button.setAttribute("aria-current", button.dataset.thread === thread);
  }
  await refresh();
  byId("thread-title").focus();
}

async function news(found) {
  byId("no-threads").hidden = found.threads.length > 0;
  const focused = document.activeElement?.dataset?.thread;
  update(byId("threads"), found.threads, (one) => {
    const badge = one.waiting ? element("span", { class: "badge" }, `${one.waiting} waiting`) : null;
    return element("li", {}, element("button", {
      type: "button", "data-thread": one.thread, "aria-current": String(one.thread === chosen),
      onclick: () => choose(one.thread, one.name),
    }, element("span", {}, one.name), badge));
  });
  if (focused) document.querySelector(`#threads button[data-thread="${CSS.escape(focused)}"]`)?.focus();
  await refresh();
}

function open() {
  byId("sign-in").hidden = true;
  byId("desk").hidden = byId("who").hidden = false;
  sessionStorage.setItem("staff", token);
  stop = follow("/api/staff/threads", token, news, {
    offline: (lost) => { if (lost) byId("thread-state").textContent = "The connection is lost. Trying again…"; },
    refused: (error) => { leave(); byId("sign-in-error").textContent = error.message; },
  });
}

function leave() {
  stop();
  token = "";
  chosen = null;
  sessionStorage.removeItem("staff");
  byId("desk").hidden = byId("who").hidden = true;
  byId("sign-in").hidden = false;
  byId("token").focus();
}

byId("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("sign-in-error").textContent = "";
  token = byId("token").value.trim();
  byId("token").value = "";
  open();
});
byId("leave").addEventListener("click", leave);

if (token) open();
else leave();
