// Opens every page of the console in Chromium, as tests/e2e/test_console_browser.py asks on stdin, and
// prints what it finds as JSON: its faults, and texts and buttons by page.

import { readFileSync } from "node:fs";
import { at, checkIn, found, launch, newPage, openIn } from "./chromium.mjs";

const asked = JSON.parse(readFileSync(0, "utf8"));
const { program, url, key = "", link = "", pages, views, pictures = "" } = asked;
const { journey = false, invites = "", start = "", closes = "", bills = "", prices = "" } = asked;
const DRAWN_MS = 50;
found.buttons = {};
found.texts = {};

const browser = await launch(program);
const page = await newPage(browser, url);
const context = page.context();
const open = (address) => openIn(page, address);
const check = () => checkIn(page);

if (start) await lookAtSignIn();
await page.goto(link ? `${url}#/sign-in?link=${link}` : url);
if (link) {
  await confirmLink();
} else {
  await page.getByLabel("API key").waitFor();
  await check();
  await page.getByLabel("API key").fill(key);
  await page.getByRole("button", { name: "Sign in" }).click();
}
await page.getByRole("button", { name: "Sign out" }).waitFor();
for (const [name, address] of Object.entries(pages)) {
  at(name);
  await open(address);
  for (const [width, height, colorScheme] of views) {
    at(`${name} ${colorScheme} ${width}`);
    await page.setViewportSize({ width, height });
    await page.emulateMedia({ colorScheme });
    await page.waitForTimeout(DRAWN_MS);
    await check();
    if (pictures) {
      const path = `${pictures}/${name}-${colorScheme}-${width}.png`;
      await page.screenshot({ path, fullPage: true });
    }
  }
  found.texts[name] = await page.evaluate(() => document.querySelector("main").innerText);
  found.buttons[name] = await page.evaluate(() =>
    [...document.querySelectorAll("main button")].map((each) => each.innerText),
  );
}
if (journey) await make();
if (invites) await invite();
if (closes) await lookAtClosing();
if (bills) await billMonth();
if (prices) await tryChanges();
await browser.close();
process.stdout.write(JSON.stringify(found));

// Create a key and end it, set a limit, and chat, with the keyboard where a dialog is open.
async function make() {
  const dialog = page.getByRole("dialog");
  at("create a key");
  await open(pages.keys);
  await page.getByRole("button", { name: "Create a key" }).press("Enter");
  await dialog.getByLabel("Name").fill("made in the browser");
  await dialog.getByLabel("Only from these networks").fill("nonsense");
  await check();
  await dialog.getByRole("button", { name: "Create a key" }).press("Enter");
  await dialog.locator(".error", { hasText: "nonsense" }).waitFor();
  await dialog.getByLabel("Only from these networks").fill("127.0.0.0/8");
  await dialog.getByLabel("Most output tokens").fill("1,000");
  await page.keyboard.press("Enter");
  await dialog.getByText("Copy the secret now").waitFor();
  await check();
  await dialog.getByRole("button", { name: "Copy", exact: true }).click();
  found.secret = await page.evaluate(() => navigator.clipboard.readText());
  await dialog.getByRole("button", { name: "I have stored it" }).press("Enter");
  await dialog.waitFor({ state: "detached" });
  found.keptSecret = (await page.content()).includes(found.secret);
  at("revoke a key");
  const row = page.getByRole("row", { name: "made in the browser" });
  await row.getByRole("button", { name: "Revoke" }).press("Enter");
  await dialog.getByRole("heading").waitFor();
  await page.keyboard.press("Escape");
  await dialog.waitFor({ state: "detached" });
  // The dialog gives the focus back a moment after it has closed.
  await page
    .waitForFunction(() => document.activeElement !== document.body, null, { timeout: 5000 })
    .catch(() => {});
  found.focused = await page.evaluate(() => document.activeElement.innerText);
  await row.getByRole("button", { name: "Revoke" }).press("Enter");
  await dialog.getByRole("button", { name: "Revoke" }).press("Enter");
  await row.waitFor({ state: "detached" });
  at("set a limit");
  await open(pages.limits);
  await page.getByRole("button", { name: "Set a limit" }).click();
  await dialog.getByLabel("Counts").selectOption("QUOTA_DIMENSION_COST_PICOS_PER_MONTH");
  await dialog.getByLabel("Limit", { exact: true }).fill("1e3");
  await dialog.getByRole("button", { name: "Set a limit" }).click();
  await dialog.locator(".error", { hasText: "1e3" }).waitFor();
  await dialog.getByLabel("Limit", { exact: true }).fill("9,007,199.254740993");
  await dialog.getByRole("button", { name: "Set a limit" }).click();
  await page.getByRole("cell", { name: "9,007,199.254740993", exact: true }).first().waitFor();
  await chat();
}

async function chat() {
  at("chat");
  await open(pages.playground);
  await page.getByLabel("Most output tokens").fill("20");
  await page.getByRole("button", { name: "Send" }).click();
  await page.getByText("exact, as billed").waitFor();
  found.chat = await page.evaluate(() => document.querySelector("main").innerText);
  await check();
}

// The screen that asks before it uses a link: somebody else may have made it. `found.link` has what
// it shows before, the address then, and what the history and the next request have of the secret.
async function confirmLink() {
  const yes = page.getByRole("button", { name: "Yes, sign in" });
  await yes.waitFor();
  const card = await page.evaluate(() => document.querySelector("main").innerText);
  const cookies = (await context.cookies()).filter(({ name }) => name.endsWith("weir-session"));
  for (const [width, height, colorScheme] of views) {
    await page.setViewportSize({ width, height });
    await page.emulateMedia({ colorScheme });
    await check();
    if (pictures) await page.screenshot({ path: `${pictures}/link-${colorScheme}-${width}.png` });
  }
  found.link = { card, cookies: cookies.length, address: page.url() };
  await yes.click();
  await page.getByRole("button", { name: "Sign out" }).waitFor();
  if (!asked.another) return;
  await page.evaluate((address) => location.assign(address), `#/sign-in?link=${asked.another}`);
  await page.getByRole("button", { name: "Stay signed in" }).waitFor();
  found.link.second = await page.evaluate(() => document.querySelector("main").innerText);
  await check();
  await page.getByRole("button", { name: "Stay signed in" }).click();
  await page.getByRole("button", { name: "Sign out" }).waitFor();
  await page.goBack().catch(() => undefined);
  found.link.back = page.url();
  await page.goto(url);
}

// The screen for sign-in after a failed one, with the button of a provider.
async function lookAtSignIn() {
  await page.goto(`${url}#/sign-in?failed=not-a-member&number=ab12cd34`);
  await page.getByRole("link", { name: start }).waitFor();
  for (const [width, height, colorScheme] of views) {
    await page.setViewportSize({ width, height });
    await page.emulateMedia({ colorScheme });
    await check();
    const path = `${pictures}/sign-in-${colorScheme}-${width}.png`;
    if (pictures) await page.screenshot({ path });
  }
  found.signIn = await page.evaluate(() => document.querySelector("main").innerText);
  const linked = async () =>
    (await page.getByRole("link", { name: start }).getAttribute("href")) ?? "";
  found.starts = [await linked()];
  await page.goto(`${url}#/usage?month=2026-11`);
  await page.waitForFunction(() => location.hash.startsWith("#/usage"));
  await page.reload();
  await page.getByRole("link", { name: start }).waitFor();
  found.starts.push(await linked());
}

// The dialog that closes an organization, which shows the effects and refuses another name.
async function lookAtClosing() {
  at("close");
  const dialog = page.getByRole("dialog");
  await open(pages.organizations);
  await page.getByRole("button", { name: `Close ${closes}`, exact: true }).click();
  await dialog.getByText("Keys that are revoked").waitFor();
  await dialog.getByLabel("Reason").fill("test");
  await dialog.getByLabel(`Enter ${closes} to confirm`).fill("other");
  await dialog.getByRole("button", { name: "Close", exact: true }).click();
  await dialog.locator(".error, .remark.bad").first().waitFor();
  await check();
  if (pictures) await page.screenshot({ path: `${pictures}/close.png` });
  found.closing = await dialog.innerText();
}

async function picture(name) {
  if (!pictures) return;
  for (const [width, height, colorScheme] of views) {
    await page.setViewportSize({ width, height });
    await page.emulateMedia({ colorScheme });
    await page.waitForTimeout(DRAWN_MS);
    await check();
    await page.screenshot({
      path: `${pictures}/${name}-${colorScheme}-${width}.png`,
      fullPage: true,
    });
  }
}

// Close the month `bills` with the keyboard, verify it, propose a correction, and approve that of
// another person, but not that of the same one.
async function billMonth() {
  at("close a month");
  const dialog = page.getByRole("dialog");
  const status = page.locator(".status");
  await open(`${pages.month}&month=${bills}`);
  await page.getByRole("button", { name: `Close the month ${bills}` }).press("Enter");
  await dialog.getByText("Nothing prevents the close").waitFor();
  await check();
  await picture("close-month");
  found.freeze = await dialog.innerText();
  await dialog.getByRole("button", { name: "Close the month" }).press("Enter");
  await dialog.waitFor({ state: "detached" });
  found.closed = await status.innerText();
  await page.getByRole("button", { name: "Verify" }).press("Enter");
  await page.getByText("The ledger reproduces the report").waitFor();
  await check();
  at("propose a correction");
  await page.getByRole("button", { name: "Propose an adjustment" }).press("Enter");
  await dialog.getByLabel("Amount").fill("a lot");
  await dialog.getByLabel("Reason").fill("overcharged");
  await page.keyboard.press("Enter");
  await dialog.locator(".error", { hasText: "a lot" }).waitFor();
  await check();
  await dialog.getByLabel("Amount").fill("\u22121,234.000000000001");
  await page.keyboard.press("Enter");
  await dialog.waitFor({ state: "detached" });
  const own = page.getByRole("row", { name: "overcharged" });
  await own.getByText("Another person approves it").waitFor();
  found.own = await own.innerText();
  at("approve a correction");
  const row = page.getByRole("row", { name: "by the same person" });
  await row.getByRole("button", { name: /^Approve/ }).press("Enter");
  await dialog.getByRole("button", { name: "Approve" }).press("Enter");
  await dialog.locator(".remark.bad").waitFor();
  found.refused = await dialog.locator(".remark.bad").innerText();
  await page.keyboard.press("Escape");
  await dialog.waitFor({ state: "detached" });
  const other = page.getByRole("row", { name: "by another person" });
  await other.getByRole("button", { name: /^Approve/ }).press("Enter");
  await dialog.getByRole("button", { name: "Approve" }).press("Enter");
  await dialog.waitFor({ state: "detached" });
  found.approved = await status.innerText();
  await check();
  await picture("closed-month");
}

// Simulate a price of the model `prices` on the last month and set it; preview a limit.
async function tryChanges() {
  const dialog = page.getByRole("dialog");
  at("simulate a price");
  await open(pages.prices);
  await page.getByRole("button", { name: "Set a price" }).press("Enter");
  await dialog.getByLabel("Model", { exact: true }).fill(prices);
  await dialog.getByLabel("For", { exact: true }).selectOption({ index: 1 });
  await dialog.getByLabel("Input, USD per million tokens").fill("1.0000001");
  await dialog.getByLabel("Cached, USD per million tokens").fill("0");
  await dialog.getByLabel("Output, USD per million tokens").fill("0");
  const simulate = dialog.getByRole("button", { name: "Simulate on a past month" });
  await simulate.press("Enter");
  await dialog.locator(".error", { hasText: "1.0000001" }).waitFor();
  await dialog.getByLabel("Input, USD per million tokens").fill("0.150001");
  await simulate.press("Enter");
  await dialog.getByText("would have paid another amount").waitFor();
  await check();
  await picture("simulated-price");
  found.simulated = await dialog.innerText();
  await dialog.getByRole("button", { name: "Set a price" }).press("Enter");
  await dialog.waitFor({ state: "detached" });
  const row = page.getByRole("row", { name: prices }).first();
  await row.getByText("own price").waitFor();
  found.price = await row.innerText();
  at("preview a limit");
  await open(pages.limits);
  await page.getByRole("button", { name: "Set a limit" }).press("Enter");
  await dialog.getByLabel("Counts").selectOption("QUOTA_DIMENSION_REQUESTS_PER_MONTH");
  await dialog.getByLabel("Limit", { exact: true }).fill("0");
  await dialog.getByLabel("Requests of").selectOption({ label: "the last 30 days" });
  await dialog.getByRole("button", { name: "Preview on past requests" }).press("Enter");
  await dialog.getByText("requests would have been refused").waitFor();
  await check();
  await picture("previewed-limit");
  found.previewed = await dialog.innerText();
}

// Chat, invite a person and sign out; then accept as that person, whose name is markup; see the
// pages of a viewer, and find the session ended by a sign-out elsewhere.
async function invite() {
  const dialog = page.getByRole("dialog");
  const signOut = page.getByRole("button", { name: "Sign out" });
  found.kept = await page.evaluate(() => JSON.stringify([location.href, { ...sessionStorage }]));
  at("switch");
  await open(pages.members);
  const button = page.getByRole("button", { name: "Invite a person" });
  await page.getByLabel("Organization").selectOption({ label: asked.organizations[1] });
  await page.waitForFunction(() => location.hash === "");
  await open(pages.members);
  await page.getByRole("cell", { name: "viewer" }).waitFor();
  found.elsewhere = await button.count();
  await page.getByLabel("Organization").selectOption({ label: asked.organizations[0] });
  await page.waitForFunction(() => location.hash === "");
  await open(pages.members);
  await button.waitFor();
  await chat();
  at("invite");
  await open(pages.members);
  await button.click();
  await dialog.getByLabel("E-mail address").fill("nonsense");
  await dialog.getByRole("button", { name: "Invite a person" }).click();
  await dialog.locator(".error", { hasText: "address" }).waitFor();
  await dialog.getByLabel("E-mail address").fill(invites);
  await dialog.getByRole("button", { name: "Invite a person" }).click();
  await dialog.getByText("Copy the link now").waitFor();
  await check();
  const address = await dialog.locator(".secret code").innerText();
  await dialog.getByRole("button", { name: "I have stored it" }).click();
  await page.getByRole("cell", { name: invites }).first().waitFor();
  await signOut.click();
  await page.getByLabel("API key").waitFor();
  at("accept");
  await page.goto(address);
  for (const [width, height, colorScheme] of views) {
    await page.setViewportSize({ width, height });
    await page.emulateMedia({ colorScheme });
    await page.getByLabel("Your name").waitFor();
    await check();
    if (pictures) await page.screenshot({ path: `${pictures}/accept-${colorScheme}-${width}.png` });
  }
  await page.getByLabel("Your name").fill(asked.name);
  await page.getByRole("button", { name: "Accept and sign in" }).click();
  await signOut.waitFor();
  at("as the invited");
  await open(pages.members);
  await page.getByRole("cell", { name: invites }).first().waitFor();
  await check();
  found.guest = await page.evaluate(() => [document.body.innerText, location.href]);
  found.guestButtons = await page.evaluate(() =>
    [...document.querySelectorAll("main button")].map((each) => each.innerText),
  );
  await context.clearCookies();
  await open(pages.keys).catch(() => undefined);
  await page.getByText("Your session has ended").waitFor();
  await check();
}
