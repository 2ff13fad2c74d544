// Chromium for tests of the console: a page whose faults are collected in `found`. These are violations
// of accessibility and of the policy, errors, requests to other origins, pages that scroll sideways,
// and text that was executed.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];
const LATE_MS = 60_000;

export const found = { axe: [], errors: [], foreign: [], wide: [], executed: [] };
let place = "sign-in"; // named with each fault

export function at(name) {
  place = name;
}

export async function launch(program) {
  return chromium.launch({ executablePath: program, args: ["--no-sandbox", "--disable-gpu"] });
}

// A page of a browser without cookies, for the console at `url`.
export async function newPage(browser, url) {
  const context = await browser.newContext({ timezoneId: "Europe/Berlin" });
  context.setDefaultTimeout(LATE_MS);
  await context.grantPermissions(["clipboard-read", "clipboard-write"]);
  await context.addInitScript(() => {
    window.violations = [];
    document.addEventListener("securitypolicyviolation", (event) =>
      window.violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`),
    );
  });
  const page = await context.newPage();
  page.on("pageerror", (error) => found.errors.push(`${place}: ${error.message}`));
  page.on("console", (message) => {
    // Refusals that a test asks for
    const isRefusal = /^Failed to load resource: .* 40[01]/.test(message.text());
    if (message.type() === "error" && !isRefusal) found.errors.push(`${place}: ${message.text()}`);
  });
  page.on("request", (request) => {
    const isOwn = new URL(request.url()).origin === new URL(url).origin;
    if (!isOwn && !/^(data|blob):/.test(request.url())) {
      found.foreign.push(`${place}: ${request.url()}`);
    }
  });
  return page;
}

// Open an address of the console and wait until its data is shown.
export async function openIn(page, address) {
  await page.evaluate((hash) => (location.hash = hash), address);
  await page.waitForFunction(
    (hash) =>
      location.hash === hash &&
      !/^Loading\.$/m.test(document.querySelector("main")?.innerText ?? "Loading."),
    address,
  );
}

// Find the faults of what is shown.
export async function checkIn(page) {
  const violations = await page.evaluate(() => window.violations.splice(0));
  found.errors.push(...violations.map((each) => `${place}: ${each}`));
  if (!(await page.evaluate(() => Boolean(window.axe)))) await page.evaluate(axe);
  const result = await page.evaluate((runOnly) => window.axe.run(document, { runOnly }), RULES);
  await page.evaluate(() => window.violations.splice(0)); // of axe itself
  for (const { id, nodes } of result.violations) {
    found.axe.push(`${place}: ${id}: ${nodes.map((each) => each.html.slice(0, 160)).join(" | ")}`);
  }
  const over = await page.evaluate(() => {
    const { scrollWidth, clientWidth } = document.documentElement;
    return scrollWidth - clientWidth;
  });
  if (over > 0) found.wide.push(`${place}: ${over} px`);
  if (await page.evaluate(() => Boolean(window.executed))) found.executed.push(place);
}
