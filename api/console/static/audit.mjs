// Audit log, newest first, in pages.

import { column, command, h, id, swap, table, time } from "./dom.mjs";
import { plain } from "./format.mjs";

const LIST = "AdminService/ListAuditEntries";
const PAGE_SIZE = 50;

export const audit = {
  id: "audit",
  title: "Audit log",
  calls: [LIST],
  scopes: "admin",
  async show(view) {
    const asked = (name) => view.params.get(name) ?? "";
    const { entries = [] } = await view.call(LIST, {
      pageSize: PAGE_SIZE, beforeEntryId: asked("before") || "0", subject: asked("subject"), actor: asked("actor"), actionPrefix: asked("action"),
    });
    const older = entries.length === PAGE_SIZE ? entries.at(-1).entryId : "";
    swap(view.body,
      view.search({
        subject: ["Object (organization, organization/project, key, id)"], actor: ["Actor (key prefix, or system)"], action: ["Action prefix", { placeholder: "quota." }],
      }),
      table("Changes, newest first", [
        column("When", (each) => time(each.createTime)),
        column("Actor", (each) => id(each.actor)),
        column("Action", (each) => each.action),
        column("Object", (each) => id(each.subjectId)),
        column("Change", (each) => change(each)),
      ], entries, { empty: asked("before") ? "No older changes." : "No matching changes.", key: (each) => each.entryId }),
      h("div", { class: "buttons" },
        asked("before") && h("button", { type: "button", click: () => view.go({ before: "" }) }, "Newest"),
        older && h("button", { type: "button", click: () => view.go({ before: older }) }, "Older")),
      command("Command", "weir audit --since 7d"));
  },
};

function change({ beforeJson = "", afterJson = "" }) {
  const [before, after] = [beforeJson, afterJson].map(parsed);
  const names = [...new Set([...Object.keys(before), ...Object.keys(after)])].filter((name) => JSON.stringify(before[name]) !== JSON.stringify(after[name]));
  const lines = names.map((name) => h("div", {}, `${plain(name)}: ${name in before ? shown(before[name]) : "\u2014"} \u2192 ${name in after ? shown(after[name]) : "\u2014"}`));
  return h("details", {}, h("summary", {}, names.length === 1 ? "1 field" : `${names.length} fields`), h("pre", {}, lines));
}

function shown(value) {
  return plain(typeof value === "string" ? value : JSON.stringify(value));
}

function parsed(text) {
  try {
    const value = JSON.parse(text || "{}");
    return value && typeof value === "object" ? value : { value };
  } catch {
    return { text };
  }
}
