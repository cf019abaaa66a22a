import { byId, call, element, follow, update } from "./common.js";

const FROM = { customer: "You", bot: "Assistant", staff: "Colleague" };
const STATES = {
  idle: "",
  waiting: "A colleague is looking at this. You can leave this page open or come back later.",
  delayed: "This takes longer than usual. Your message is kept and will be answered.",
};
const OFFLINE = "The connection is lost. Trying again";

let token = sessionStorage.getItem("customer") || "";
let stop = () => {};
let state = "";
let unsent = null; // kept with its mark until the server has it, so that sending again stores it once

function show(section) {
  for (const id of ["sign-in", "chat"]) byId(id).hidden = id !== section;
  byId("who").hidden = section !== "chat";
}

function render(entry) {
  const from = FROM[entry.from] ? element("span", { class: "from" }, FROM[entry.from]) : null;
  return element("li", { class: entry.from }, from, element("span", { class: "text" }, entry.text));
}

function tell(text, busy) {
  byId("state").textContent = text;
  byId("state").classList.toggle("busy", busy && text !== "");
}

function news(chat) {
  byId("name").textContent = chat.name;
  const log = byId("log");
  if (update(log, chat.messages, render)) log.scrollTop = log.scrollHeight;
  state = chat.state === "working" ? chat.doing : STATES[chat.state];
  tell(state, chat.state === "working");
}

function open() {
  show("chat");
  stop = follow("/api/chat", token, news, {
    offline: (lost) => lost && tell(OFFLINE, true),
    refused: leave,
  });
  byId("say").focus();
}

function leave() {
  stop();
  if (token) call("POST", "/api/sign-out", token).catch(() => {});
  token = "";
  sessionStorage.removeItem("customer");
  byId("log").replaceChildren();
  show("sign-in");
  samples();
}

async function signIn(event) {
  event.preventDefault();
  byId("sign-in-error").textContent = "";
  try {
    const body = { email: byId("email").value, postcode: byId("postcode").value };
    token = (await call("POST", "/api/sign-in", "", body)).token;
  } catch (error) {
    byId("sign-in-error").textContent = error.status ? error.message : "The server cannot be reached.";
    return;
  }
  sessionStorage.setItem("customer", token);
  open();
}

async function samples() {
  const { customers } = await call("GET", "/api/samples").catch(() => ({ customers: [] }));
  byId("samples").hidden = customers.length === 0;
  byId("sample-list").replaceChildren(...customers.map((one) => {
    const choose = () => {
      byId("email").value = one.email;
      byId("postcode").value = one.postcode;
      byId("sign-in-form").requestSubmit();
    };
    return element("li", {}, element("button", { type: "button", class: "quiet", onclick: choose }, one.name));
  }));
}

function newRef() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function say(event) {
  event.preventDefault();
  const box = byId("say");
  const text = box.value.trim();
  if (text === "") return;
  const button = event.target.querySelector("button");
  button.disabled = true;
  byId("say-error").textContent = "";
  if (unsent === null || unsent.text !== text) unsent = { ref: newRef(), text };
  try {
    await call("POST", "/api/chat", token, unsent);
    unsent = null;
    box.value = "";
  } catch (error) {
    byId("say-error").textContent = error.status ? error.message : "Not sent: the server cannot be reached. Try again.";
    if (error.status === 401) leave();
  }
  button.disabled = false;
  box.focus();
}

byId("sign-in-form").addEventListener("submit", signIn);
byId("say-form").addEventListener("submit", say);
byId("leave").addEventListener("click", leave);
byId("say").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("say-form").requestSubmit();
});

if (token) open();
else leave();
