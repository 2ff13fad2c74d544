// Sign-in, navigation and routing by the URL's fragment: #/usage?org=demo&month=2026-11.

import { CallFailed, forget, remember, session, storedKey } from "./client.mjs";
import { h, remark, swap } from "./dom.mjs";
import { plain } from "./format.mjs";
import { View, problem } from "./view.mjs";
import { audit } from "./audit.mjs";
import { endUsers } from "./end-users.mjs";
import { limits } from "./limits.mjs";
import { month } from "./month.mjs";
import { overview } from "./overview.mjs";
import { reconciliation } from "./reconciliation.mjs";
import { requests } from "./requests.mjs";
import { usage } from "./usage.mjs";

const PAGES = [overview, limits, usage, endUsers, month, reconciliation, requests, audit];
const main = document.getElementById("main");
const nav = document.getElementById("nav");
const who = document.getElementById("who");

let signedIn = null; // permissions of the key
let view = null;

function allowed(page) {
  return page.calls.some((name) => signedIn.calls.includes(name));
}

function signOut(why = "") {
  view?.leave();
  forget();
  signedIn = null;
  nav.hidden = true;
  swap(who);
  showSignIn(why);
}

async function signIn(key) {
  signedIn = await session(key);
  remember(key);
  swap(who, h("span", { class: "key", title: `scopes: ${signedIn.scopes.join(", ")}` }, signedIn.keyPrefix),
    h("button", { type: "button", click: () => signOut() }, "Sign out"));
  route();
}

function showSignIn(why = "") {
  document.title = "Sign in \u00b7 Weir console";
  const notice = h("div", { "aria-live": "assertive" }, why && remark("bad", why));
  const key = h("input", { type: "password", autocomplete: "off", spellcheck: "false", required: true, "aria-describedby": "key-help" });
  const button = h("button", { class: "primary" }, "Sign in");
  const form = h("form", { class: "signin", submit: async (event) => {
    event.preventDefault();
    button.disabled = true;
    try {
      await signIn(key.value.trim());
    } catch (error) {
      swap(notice, problem(error));
      button.disabled = false;
    }
  } },
  h("h1", {}, "Sign in"),
  h("label", { class: "field wide" }, h("span", {}, "API key"), key),
  h("p", { id: "key-help", class: "note" }, "Your key stays in this tab until you sign out or close it. ",
    h("code", {}, "weir env"), " prints the keys that ", h("code", {}, "weir up"), " created: a developer key and an admin key."),
  notice, button);
  swap(main, form);
  key.focus();
}

function showNav(current) {
  const links = PAGES.filter(allowed).map((page) =>
    h("a", { href: `#/${page.id}`, "aria-current": page === current && "page" }, page.title));
  swap(nav, links);
  nav.hidden = false;
  nav.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function route() {
  if (!signedIn) return;
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const page = PAGES.find((each) => each.id === path) ?? PAGES.find(allowed) ?? overview;
  const isOther = view?.page !== page;
  view?.leave();
  view = new View(page, signedIn, new URLSearchParams(query), { signedOut: () => signOut("Your key is no longer valid. Sign in with another one.") });
  document.title = `${page.title} \u00b7 Weir console`;
  showNav(page);
  if (isOther) window.scrollTo(0, 0);
  if (!allowed(page)) {
    swap(main, h("h1", {}, page.title), remark("warning", `To see this page, sign in with a key that has the scope ${page.scopes}. Yours, ${plain(signedIn.keyPrefix)}, has: ${signedIn.scopes.join(", ")}.`));
    return;
  }
  view.show(main, isOther);
}

window.addEventListener("hashchange", route);
const key = storedKey();
if (key) {
  signIn(key).catch((error) => (error instanceof CallFailed && error.httpStatus === 401 ? signOut("Your key is no longer valid. Sign in with another one.") : showSignIn(error.message)));
} else {
  showSignIn();
}
