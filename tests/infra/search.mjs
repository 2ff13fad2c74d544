// The search of the site as a browser runs it: `node search.mjs SITE` reads a JSON list of queries
// from stdin and writes, for each, the pages that are found, best first.
import { readdirSync, readFileSync } from "node:fs";

const [site] = process.argv.slice(2);
const workers = `${site}/assets/javascripts/workers`;
const worker = readdirSync(workers).find((name) => /^search\..*\.js$/.test(name));
const answers = [];
let receive;
let answered;
Object.assign(globalThis, {
  self: globalThis,
  importScripts: () => undefined,
  addEventListener: (_, listener) => (receive = listener),
  postMessage: (message) => answered(message),
});
(0, eval)(readFileSync(`${workers}/${worker}`, "utf8"));

const ask = (type, data) =>
  new Promise((resolve) => {
    answered = resolve;
    receive({ data: { type, data } });
  });

const index = JSON.parse(readFileSync(`${site}/search/search_index.json`, "utf8"));
await ask(0, { ...index, options: { suggest: false } });
for (const query of JSON.parse(readFileSync(0, "utf8"))) {
  const { data } = await ask(2, query);
  answers.push(data.items.map((items) => items.at(-1).location.split("#")[0]).slice(0, 8));
}
console.log(JSON.stringify(answers));
