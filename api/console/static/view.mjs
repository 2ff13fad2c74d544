// A shown page: its calls, which are aborted when it is left, its refreshes, and its errors.

import { CallFailed, call, save } from "./client.mjs";
import { choice, field, h, remark, swap } from "./dom.mjs";
import { backedOff, localTime, monthOf, secondsOf, wait } from "./format.mjs";

export class View {
  constructor(page, session, params, { signedOut }) {
    this.page = page;
    this.session = session;
    this.params = params;
    this.body = h("div", { class: "body" });
    this.status = h("p", { class: "status", role: "status" });
    this.signedOut = signedOut;
    this.left = new AbortController();
  }

  // Show the page in an element.
  async show(place, isOther) {
    swap(place, h("h1", {}, this.page.title), this.body, this.status);
    if (isOther) place.focus({ preventScroll: true });
    this.body.replaceChildren(h("p", { class: "empty" }, "Loading."));
    try {
      await this.page.show(this);
    } catch (error) {
      this.failed(error, () => swap(this.body, problem(error)));
    }
  }

  leave() {
    this.left.abort();
  }

  may(name) {
    return this.session.calls.includes(name);
  }

  // RPC of the contract, aborted when the page is left.
  call(name, request = {}) {
    return call(name, request, this.left.signal);
  }

  // Address of this page with other parameters; empty ones are left out.
  address(changes) {
    const next = new URLSearchParams(this.params);
    for (const [name, value] of Object.entries(changes)) {
      if (value) next.set(name, value);
      else next.delete(name);
    }
    const query = next.toString();
    return `#/${this.page.id}${query ? `?${query}` : ""}`;
  }

  go(changes) {
    location.hash = this.address(changes);
  }

  failed(error, show) {
    if (this.left.signal.aborted) return;
    if (error instanceof CallFailed && error.httpStatus === 401) this.signedOut();
    else show();
  }

  // Write to the status line, which screen readers announce; repeated text is not announced.
  say(text) {
    if (this.status.textContent !== text) this.status.textContent = text;
  }

  // Load repeatedly while the page is visible, less often after failures.
  async repeat(usualMs, load) {
    let failures = 0;
    while (!this.left.signal.aborted) {
      if (!document.hidden) {
        try {
          await load();
          if (failures) this.say("");
          failures = 0;
        } catch (error) {
          failures += 1;
          const next = wait(backedOff(usualMs, failures) / 1000);
          this.failed(error, () => this.say(`These figures are old: ${error.message}. The next try is in ${next}.`));
        }
      }
      await this.pause(backedOff(usualMs, failures));
    }
  }

  // Wait, or until the page becomes visible or is left.
  pause(ms) {
    return new Promise((resolve) => {
      const done = () => {
        clearTimeout(timer);
        document.removeEventListener("visibilitychange", done);
        resolve();
      };
      const timer = setTimeout(done, ms);
      document.addEventListener("visibilitychange", done);
      this.left.signal.addEventListener("abort", done, { once: true });
    });
  }

  // Button that downloads a file.
  download(text, fetched) {
    const button = h("button", { type: "button", click: async () => {
      button.disabled = true;
      try {
        const { name, content } = await fetched();
        save(name, content);
        this.say(`${name} is saved.`);
      } catch (error) {
        this.failed(error, () => this.say(`Not saved: ${error.message}`));
      }
      button.disabled = false;
    } }, text);
    return button;
  }

  // Selected organization: admins choose, other keys have their own.
  async organization() {
    const own = this.session.organizationId;
    if (!this.session.scopes.includes("admin")) return { ref: own, name: "", currency: this.session.currencyCode, weight: "", chooser: null };
    const { organizations = [] } = await this.call("AdminService/ListOrganizations");
    const asked = this.params.get("org") ?? "";
    const found = organizations.find((each) => each.name === asked || each.organizationId === asked)
      ?? organizations.find((each) => each.organizationId === own);
    const chooser = choice("Organization", organizations.map((each) => [each.name, each.name]), found?.name ?? "", (org) => this.go({ org, month: "", key: "" }));
    return { ref: found?.name ?? own, name: found?.name ?? "", currency: found?.currencyCode ?? "", weight: found?.queueWeightMilli ?? "", chooser };
  }

  // Selected month, and all months of an organization.
  async month(organization) {
    const { months = [] } = await this.call("BillingService/ListMonths", { organization });
    const names = months.map((each) => each.month);
    const present = monthOf(new Date());
    if (!names.includes(present)) names.unshift(present);
    const asked = this.params.get("month");
    const chosen = names.includes(asked) ? asked : names[0];
    const byName = new Map(months.map((each) => [each.month, each]));
    const options = names.map((name) => [name, byName.get(name)?.state === "MONTH_STATE_CLOSED" ? `${name}, closed` : name]);
    const chooser = choice("Month (UTC)", options, chosen, (month) => this.go({ month }));
    return { chosen, chooser, months, options };
  }

  // Form that opens this page with the entered parameters. names: labels by parameter.
  search(names, button = "Show") {
    const inputs = Object.entries(names).map(([name, [label, more = {}]]) =>
      [name, field(label, { type: "text", name, value: this.params.get(name) ?? "", autocomplete: "off", spellcheck: "false", ...more })]);
    return h("form", { class: "controls", submit: (event) => {
      event.preventDefault();
      this.go({ before: "", page: "", ...Object.fromEntries(inputs.map(([name, label]) => [name, label.querySelector("input").value.trim()])) });
    } }, inputs.map(([, label]) => label), h("button", {}, button));
  }
}

// Error message, with the invalid fields if the server lists them.
export function problem(error) {
  if (!(error instanceof CallFailed)) return remark("bad", `This page has a fault: ${error.message}`);
  const violations = error.detail("BadRequest")?.fieldViolations ?? [];
  const retry = secondsOf(error.detail("RetryInfo")?.retryDelay);
  return remark("bad", violations.length ? violations.map((each) => `${each.field}: ${each.description}`).join("; ") : error.message,
    retry !== null && ` Try again in ${wait(retry)}.`);
}

// Time of the latest refresh.
export function asOf() {
  return `As of ${localTime(new Date().toISOString())}.`;
}
