// Three journeys through the console in Chromium, as tests/e2e/test_console_journeys.py asks on stdin;
// prints what a person saw, and the faults of every stop. With `pictures`, each stop is also kept as a
// picture in that folder.

import { readFileSync, writeFileSync } from "node:fs";
import { at, checkIn, found, launch, newPage, openIn } from "./chromium.mjs";

const asked = JSON.parse(readFileSync(0, "utf8"));
const { program, url, journey, pictures = "" } = asked;
const [WIDTH, HEIGHT] = [1100, 760];
const QUALITY = 62; // of pictures, in percent: text stays sharp
const browser = await launch(program);
await { customer, incident, month }[journey]();
await browser.close();
process.stdout.write(JSON.stringify(found));

// Sign in with a key, or with the address of a link.
async function signedIn({ key = "", link = "" }) {
  const page = await newPage(browser, url);
  await page.setViewportSize({ width: WIDTH, height: HEIGHT });
  await page.goto(link ? `${url}#/sign-in?link=${link}` : url);
  if (link) await page.getByRole("button", { name: "Yes, sign in" }).click();
  if (key) {
    await page.getByLabel("API key").fill(key);
    await page.getByRole("button", { name: "Sign in" }).click();
  }
  await page.getByRole("button", { name: "Sign out" }).waitFor();
  return page;
}

function mainOf(page) {
  return page.evaluate(() => document.querySelector("main").innerText);
}

// Wait until a dialog is closed; one that shows an error is a fault.
async function closed(dialog) {
  const fault = dialog.locator(".remark.bad");
  await Promise.race([dialog.waitFor({ state: "detached" }), fault.first().waitFor()]);
  if (await dialog.count()) throw new Error(await dialog.innerText());
}

// Check what is shown, and keep a picture of it.
async function stop(page, name, colorScheme = "light") {
  at(name);
  await page.emulateMedia({ colorScheme });
  await page.waitForTimeout(50);
  await checkIn(page);
  if (!pictures) return;
  const session = await page.context().newCDPSession(page);
  const taken = { format: "webp", quality: QUALITY };
  const { data } = await session.send("Page.captureScreenshot", taken);
  writeFileSync(`${pictures}/${name}.webp`, Buffer.from(data, "base64"));
}

// A new customer: invited by the operator, who then makes a key, gets a first token and a first bill.
async function customer() {
  const { organization, email } = asked;
  const operator = await signedIn(asked);
  const dialog = operator.getByRole("dialog");
  at("create an organization");
  await openIn(operator, "#/organizations");
  await operator.getByRole("button", { name: "Create an organization" }).click();
  await dialog.getByLabel("Name").fill(organization);
  await dialog.getByRole("button", { name: "Create" }).click();
  await closed(dialog);
  await openIn(operator, `#/organizations?org=${organization}`);
  await operator.getByRole("button", { name: /^Create a project/ }).click();
  await dialog.getByLabel("Name").fill("search");
  await dialog.getByRole("button", { name: /^Create/ }).click();
  await closed(dialog);
  at("invite the owner");
  await openIn(operator, `#/members?org=${organization}`);
  await operator.getByRole("button", { name: "Invite a person" }).click();
  await dialog.getByLabel("E-mail address").fill(email);
  await dialog.getByLabel("Role").selectOption("owner");
  await dialog.getByRole("button", { name: "Invite a person" }).click();
  await dialog.getByText("Copy the link now").waitFor();
  const address = await dialog.locator(".secret code").innerText();
  await operator.context().close();

  at("accept the invitation");
  const page = await newPage(browser, url);
  await page.setViewportSize({ width: WIDTH, height: HEIGHT });
  await page.goto(address);
  await page.getByLabel("Your name").fill("Mia Berg");
  await page.getByRole("button", { name: "Accept and sign in" }).click();
  await page.getByRole("heading", { name: "First steps" }).waitFor();
  found.steps = await mainOf(page);
  await stop(page, "first-steps");

  at("create a key");
  await page.getByRole("link", { name: "Create an API key." }).click();
  await page.getByRole("button", { name: "Create a key" }).click();
  const own = page.getByRole("dialog");
  await own.getByLabel("Name").fill("production");
  await own.getByRole("button", { name: "Create a key" }).click();
  await own.getByText("Copy the secret now").waitFor();
  found.secret = await own.locator(".secret code").innerText();
  await own.getByRole("button", { name: "I have stored it" }).click();
  await closed(own);

  at("chat");
  await openIn(page, "#/playground");
  await page.getByLabel("Most output tokens").fill("40");
  await page.getByRole("button", { name: "Send" }).click();
  await page.locator(".answer").waitFor(); // the first token
  await page.getByText("exact, as billed").waitFor();
  found.chat = await mainOf(page);
  await checkIn(page);
  found.code = {};
  for (const language of ["Python", "curl"]) {
    await page.getByRole("tab", { name: language }).click();
    found.code[language] = await page.getByRole("tabpanel").locator("pre").innerText();
  }

  at("the first page with usage");
  await openIn(page, "#/overview");
  await page.getByText("Requests this month").waitFor();
  found.spent = await mainOf(page);

  at("the first invoice");
  await invoiceOf(page);
  found.invoice = await mainOf(page);
  await stop(page, "first-invoice");
}

// Open the last month until its invoice is there: another process closes it meanwhile.
async function invoiceOf(page) {
  for (let turn = 0; turn < 10; turn += 1) {
    await openIn(page, `#/month?month=${asked.month}`);
    if (/INV-/.test(await mainOf(page))) return;
    await openIn(page, "#/overview");
    await page.waitForTimeout(500);
  }
  throw new Error(`no invoice: ${await mainOf(page)}`);
}

// One tenant floods: the operator finds it, limits it, and tells it why.
async function incident() {
  const page = await signedIn(asked);
  const dialog = page.getByRole("dialog");
  at("find");
  const row = page.getByRole("row", { name: asked.organization });
  await row.waitFor();
  found.busiest = await page.getByRole("table", { name: "By organization" }).innerText();
  await stop(page, "incident-find", "dark");
  at("limit");
  await row.getByRole("link", { name: asked.organization }).click();
  await page.getByRole("button", { name: "Set a limit" }).click();
  await dialog.getByLabel("Counts").selectOption("QUOTA_DIMENSION_CONCURRENT_REQUESTS");
  await dialog.getByLabel("Limit", { exact: true }).fill("1");
  await stop(page, "incident-limit", "dark");
  await dialog.getByRole("button", { name: "Set a limit" }).click();
  await closed(dialog);
  found.limit = await page.locator(".status").innerText();
  at("tell");
  await openIn(page, "#/live");
  const running = page.getByRole("row", { name: `${asked.organization}/main` }).first();
  await running.getByRole("button", { name: /^End/ }).click();
  await dialog.getByLabel("Reason").fill(asked.reason);
  await stop(page, "incident-tell", "dark");
  await dialog.getByRole("button", { name: "End the request" }).click();
  await closed(dialog);
  found.ended = await page.locator(".status").innerText();
  await page.context().close();
  at("the customer");
  const theirs = await signedIn({ key: asked.customer });
  await theirs.getByRole("heading", { name: "Tightest limits" }).waitFor();
  found.theirs = await mainOf(theirs);
  await checkIn(theirs);
}

// Finance closes a month and refunds a part of its invoice, which another person has to approve.
async function month() {
  const { organization, links } = asked;
  const address = `#/month?org=${organization}&month=${asked.month}`;
  const first = await signedIn({ link: links[0] });
  const dialog = first.getByRole("dialog");
  const open = first.getByRole("link", { name: `The month ${asked.month}` }).first();
  await open.waitFor();
  found.concern = await open.innerText();
  await openIn(first, address);
  await first.getByRole("button", { name: `Close the month ${asked.month}` }).click();
  await dialog.getByText("Nothing prevents the close").waitFor();
  await stop(first, "month-close");
  await dialog.getByRole("button", { name: "Close the month" }).click();
  await closed(dialog);
  found.closed = await first.locator(".status").innerText();
  at("refund");
  await first.getByRole("button", { name: /^Propose a credit note/ }).click();
  await dialog.getByLabel("Amount").fill("0.05");
  await dialog.getByLabel("Reason").fill(asked.reason);
  await dialog.getByRole("button", { name: "Propose a credit note" }).click();
  await closed(dialog);
  const own = first.getByRole("row", { name: asked.reason });
  await own.getByText("Another person approves it").waitFor();
  found.own = await own.innerText();
  await first.context().close();

  at("approve");
  const second = await signedIn({ link: links[1] });
  const waiting = second.getByRole("link", { name: `A correction for ${organization}` });
  await waiting.click();
  await openIn(second, address);
  const row = second.getByRole("row", { name: asked.reason });
  await row.getByRole("button", { name: /^Approve/ }).click();
  await stop(second, "month-approve");
  const other = second.getByRole("dialog");
  await other.getByRole("button", { name: "Approve" }).click();
  await closed(other);
  found.approved = await second.locator(".status").innerText();
  await row.getByText("CN-").waitFor();
  found.row = await row.innerText();
  await checkIn(second);
}
