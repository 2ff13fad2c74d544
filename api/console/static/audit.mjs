// Audit log, newest first, in pages.

import { column, command, h, id, swap, table, time } from "./dom.mjs";
import { plain, words } from "./format.mjs";

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
      table("Changes, newest first", auditColumns(), entries, { empty: asked("before") ? "No older changes." : "No matching changes.", key: (each) => each.entryId }),
      h("div", { class: "buttons" },
        asked("before") && h("button", { type: "button", click: () => view.go({ before: "" }) }, "Newest"),
        older && h("button", { type: "button", click: () => view.go({ before: older }) }, "Older")),
      command("Command", "weir audit --since 7d"));
  },
};

export function auditColumns() {
  return [
    column("When", (each) => time(each.createTime)),
    column("Actor", (each) => id(each.actor)),
    column("Action", (each) => each.action),
    column("Object", (each) => objectPart(each)),
    column("Change", (each) => change(each)),
  ];
}

// Name of the changed object, above its id: its own one, or what a limit counts and for whom.
function objectPart(entry) {
  const { subjectId = "", names = {} } = entry, fields = { ...parsed(entry.beforeJson), ...parsed(entry.afterJson) };
  const named = (each) => (Object.hasOwn(names, each) ? names[each] : "");
  const owner = named(fields.subject_id), within = named(fields.within_id);
  const limited = fields.dimension && [words(fields.dimension).replace(" picos", ""), owner && ` of ${owner}`, within && ` within ${within}`].filter(Boolean).join("");
  const shown = named(subjectId) || limited || fields.name || fields.model;
  return [shown && h("bdi", { class: "name" }, shown), h("div", { class: "note" }, id(subjectId))];
}

function change({ beforeJson = "", afterJson = "", names: known = {} }) {
  const [before, after] = [beforeJson, afterJson].map(parsed);
  const shown = (value) => plain(Object.hasOwn(known, value) ? `${known[value]} (${value})` : typeof value === "string" ? value : JSON.stringify(value));
  const names = [...new Set([...Object.keys(before), ...Object.keys(after)])].filter((name) => JSON.stringify(before[name]) !== JSON.stringify(after[name]));
  const lines = names.map((name) => h("div", {}, `${plain(name)}: ${name in before ? shown(before[name]) : "\u2014"} \u2192 ${name in after ? shown(after[name]) : "\u2014"}`));
  return h("details", {}, h("summary", {}, names.length === 1 ? "1 field" : `${names.length} fields`), h("pre", {}, lines));
}

function parsed(text = "") {
  try {
    const value = JSON.parse(text || "{}");
    return value && typeof value === "object" ? value : { value };
  } catch {
    return { text };
  }
}
