// Persons of the whole service, for its operators: deactivate, reactivate, and let in with a link.

import type { PersonJson } from "../gen/weir/v1/members_pb.js";
import { Action } from "../parts/actions.js";
import { Badge, Command, Name, Note, Pages, Search, Time } from "../parts/basics.js";
import { Table, column } from "../parts/table.js";
import { text } from "../texts.js";
import { Show, useLoaded, useView } from "../view.js";
import type { Page } from "../view.js";

const LIST = "AdminService/ListPersons";
const t = text.persons;

export const persons: Page = {
  id: "persons",
  title: text.pages.persons,
  calls: [LIST],
  Show: Persons,
};

function Persons() {
  const view = useView();
  const search = view.asked("search").toLowerCase();
  const found = useLoaded((caller) => caller(LIST, { search, pageToken: view.asked("page") }));
  return (
    <>
      <Search terms={[{ name: "search", label: t.search, placeholder: "ann@" }]} />
      <Show of={found}>
        {({ persons: shown, nextPageToken }) => (
          <>
            <Table
              caption={text.pages.persons}
              columns={[
                column<PersonJson>(t.email, (each) => <Name of={each.email} />),
                column<PersonJson>(t.name, (each) => <Name of={each.displayName} />),
                column<PersonJson>(t.since, (each) => <Time of={each.createTime} />),
                column<PersonJson>(text.state, (each) => <State of={each} />),
                column<PersonJson>(text.change, (each) => (
                  <Changes of={each} reload={found.reload} />
                )),
              ]}
              rows={shown}
              empty={search ? t.noMatch : t.none}
              keyOf={(each) => each.personId}
            />
            <Pages next={nextPageToken} />
            <Command>weir person list</Command>
          </>
        )}
      </Show>
    </>
  );
}

function State({ of: { deactivateTime } }: { of: PersonJson }) {
  if (!deactivateTime) return <Badge kind="good">{t.active}</Badge>;
  return (
    <>
      <Badge kind="bad">{t.deactivated}</Badge>
      <Note>
        <Time of={deactivateTime} />
      </Note>
    </>
  );
}

function Changes({
  of: { personId: person = "", email = "", deactivateTime },
  reload,
}: {
  of: PersonJson;
  reload: () => void;
}) {
  if (deactivateTime)
    return (
      <div className="buttons tight">
        <Action
          call="AdminService/ReactivatePerson"
          label={t.reactivate}
          about={email}
          title={t.reactivateTitle(email)}
          explanation={t.reactivateExplanation}
          act={t.reactivate}
          request={() => ({ person })}
          done={() => t.reactivated(email)}
          changed={reload}
        />
      </div>
    );
  return (
    <div className="buttons tight">
      <Action
        call="AdminService/CreateSignInLink"
        label={t.link}
        about={email}
        title={t.linkFor(email)}
        explanation={t.linkExplanation(email)}
        act={t.link}
        request={() => ({ person })}
        done={({ url = "" }) => ({ title: t.copyLink, message: t.linkMade(email), secret: url })}
        changed={reload}
      />
      <Action
        call="AdminService/DeactivatePerson"
        label={t.deactivate}
        about={email}
        title={t.deactivateTitle(email)}
        explanation={t.deactivateExplanation}
        act={t.deactivate}
        isDanger
        request={() => ({ person })}
        done={() => t.isDeactivated(email)}
        changed={reload}
      />
    </div>
  );
}
