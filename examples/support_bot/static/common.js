// What both pages share. Whatever people, models and records wrote goes in as text, never as markup.

export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// One request. Throws Refused with the server's words, or a TypeError where nobody answers.
export async function call(method, path, token, body, signal) {
  const headers = {};
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  const read = answer.status === 204 ? {} : await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, read.error || `The server answered ${answer.status}.`);
  return read;
}

export const pause = (seconds) => new Promise((resume) => setTimeout(resume, 1000 * seconds));

// Asks again and again for what has changed, until it is stopped; `offline` is told whether the server can be reached.
export function follow(path, token, show, { offline, refused }) {
  const stop = new AbortController();
  (async () => {
    let seen = "";
    while (!stop.signal.aborted) {
      try {
        const news = await call("GET", `${path}?seen=${encodeURIComponent(seen)}`, token, undefined, stop.signal);
        if (stop.signal.aborted) return;
        offline(false);
        if (news.mark !== seen) await show(news);
        seen = news.mark;
      } catch (error) {
        if (stop.signal.aborted) return;
        if (error instanceof Refused && error.status === 401) return refused(error);
        offline(true);
        await pause(1.5);
      }
    }
  })();
  return () => stop.abort();
}

// Makes a list show `entries`. An entry that is the same stays as it is: nothing is read out twice, and whoever types
// into one or has it open is not disturbed. Says whether there are more than before.
export function update(list, entries, render) {
  const before = [...list.children];
  entries.forEach((entry, at) => {
    const key = JSON.stringify(entry);
    if (before[at]?.key === key) return;
    const made = render(entry);
    made.key = key;
    if (at < before.length) before[at].replaceWith(made);
    else list.append(made);
  });
  for (const old of before.slice(entries.length)) old.remove();
  return entries.length > before.length;
}
