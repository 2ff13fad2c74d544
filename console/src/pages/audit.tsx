// Audit log, newest first, in pages.

import type { AuditEntryJson } from "../gen/weir/v1/admin_service_pb.js";
import { plain, words } from "../format.js";
import { Command, Id, Name, Note, Pages, Search, Time } from "../parts/basics.js";
import { Table, column } from "../parts/table.js";
import { text } from "../texts.js";
import { Show, useLoaded, useView } from "../view.js";
import type { Page } from "../view.js";

const LIST = "AdminService/ListAuditEntries";
const PAGE_SIZE = 50;
const t = text.audit;

export const audit: Page = { id: "audit", title: text.pages.audit, calls: [LIST], Show: Audit };

function Audit() {
  const view = useView();
  const found = useLoaded((caller) =>
    caller(LIST, {
      pageSize: PAGE_SIZE,
      beforeEntryId: view.asked("before") || "0",
      subject: view.asked("subject"),
      actor: view.asked("actor"),
      actionPrefix: view.asked("action"),
    }),
  );
  return (
    <>
      <Search
        terms={[
          { name: "subject", label: t.subject },
          { name: "actor", label: t.actorTerm },
          { name: "action", label: t.actionTerm, placeholder: "quota." },
        ]}
      />
      <Show of={found}>
        {({ entries = [] }) => (
          <>
            <Table
              caption={t.caption}
              columns={auditColumns()}
              rows={entries}
              empty={view.asked("before") ? t.noOlder : t.none}
              keyOf={(each) => each.entryId}
            />
            <Pages
              parameter="before"
              next={entries.length === PAGE_SIZE ? entries.at(-1)?.entryId : ""}
              first={t.newest}
              more={t.older}
            />
            <Command>weir audit --since 7d</Command>
          </>
        )}
      </Show>
    </>
  );
}

export function auditColumns() {
  return [
    column<AuditEntryJson>(t.when, (each) => <Time of={each.createTime} />),
    column<AuditEntryJson>(t.actor, (each) => (
      <>
        <Id of={each.actor} />
        {each.actorRole && <Note>{each.actorRole}</Note>}
      </>
    )),
    column<AuditEntryJson>(t.action, (each) => each.action),
    column<AuditEntryJson>(t.object, (each) => <Subject of={each} />),
    column<AuditEntryJson>(t.change, (each) => <Change of={each} />),
  ];
}

type Fields = Record<string, unknown>;

function parsed(json = ""): Fields {
  try {
    const value: unknown = JSON.parse(json || "{}");
    return value && typeof value === "object" ? (value as Fields) : { value };
  } catch {
    return { text: json };
  }
}

// Name of the changed object, above its id: its own one, or what a limit counts and for whom.
function Subject({
  of: { subjectId = "", names = {}, beforeJson, afterJson },
}: {
  of: AuditEntryJson;
}) {
  const fields = { ...parsed(beforeJson), ...parsed(afterJson) };
  const named = (each: unknown) =>
    typeof each === "string" && Object.hasOwn(names, each) ? names[each] : "";
  const owner = named(fields["subject_id"]);
  const within = named(fields["within_id"]);
  const dimension =
    typeof fields["dimension"] === "string" ? words(fields["dimension"]).replace(" picos", "") : "";
  const limited =
    dimension && [dimension, owner && ` ${t.of(owner)}`, within && ` ${t.within(within)}`].join("");
  const shown = named(subjectId) || limited || fields["name"] || fields["model"];
  return (
    <>
      {shown ? <Name of={String(shown)} /> : null}
      <Note>
        <Id of={subjectId} />
      </Note>
    </>
  );
}

function Change({ of: { beforeJson, afterJson, names: known = {} } }: { of: AuditEntryJson }) {
  const [before, after] = [parsed(beforeJson), parsed(afterJson)];
  const shown = (fields: Fields, name: string) => {
    if (!(name in fields)) return "\u2014";
    const value = fields[name];
    if (typeof value === "string")
      return plain(Object.hasOwn(known, value) ? `${known[value]} (${value})` : value);
    return plain(JSON.stringify(value));
  };
  const names = [...new Set([...Object.keys(before), ...Object.keys(after)])].filter(
    (name) => JSON.stringify(before[name]) !== JSON.stringify(after[name]),
  );
  return (
    <details>
      <summary>{t.fields(names.length)}</summary>
      <div className="code">
        {names.map((name) => (
          <div key={name}>
            {name}: {shown(before, name)} {"\u2192"} {shown(after, name)}
          </div>
        ))}
      </div>
    </details>
  );
}
