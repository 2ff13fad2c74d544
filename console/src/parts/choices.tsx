// The selected organization and month of a page.

import { useEffect, useState } from "react";
import type { OrganizationJson } from "../gen/weir/v1/admin_service_pb.js";
import type { MonthJson } from "../gen/weir/v1/months_pb.js";
import { monthOf } from "../format.js";
import { text } from "../texts.js";
import type { Caller, View } from "../view.js";
import { addressOf, useView } from "../view.js";
import { Button, Choice, Field } from "./basics.js";

export interface Chosen {
  ref: string; // name or id for calls
  name: string; // empty if the session may not read it
  currency: string;
  organization: OrganizationJson | undefined;
  all: OrganizationJson[];
  isMore?: boolean; // `all` has the first ones only
}

const LIST = "AdminService/ListOrganizations";
// Parameters of an address that name something of one organization.
const OF_ANOTHER = { month: "", key: "", page: "", user: "" };
const CHOICES_MAX = 100; // of a list to choose from; others are named

// The organization in the address, or the key's own one.
export async function organizationOf(caller: Caller, view: View): Promise<Chosen> {
  const own = view.session.organizationId;
  const alone = {
    ref: own,
    name: "",
    currency: view.session.currencyCode,
    organization: undefined,
    all: [],
  };
  if (!view.may(LIST)) return alone;
  const { organizations: all = [], nextPageToken } = await caller(LIST, { pageSize: CHOICES_MAX });
  const isMore = Boolean(nextPageToken);
  const asked = view.asked("org") || own;
  let organization = all.find((each) => each.name === asked || each.organizationId === asked);
  if (!organization && isMore)
    [organization] = (await caller(LIST, { organization: asked })).organizations ?? [];
  organization ??= all.find((each) => each.organizationId === own) ?? all[0];
  const name = organization?.name ?? "";
  return {
    ref: name || own,
    name,
    currency: organization?.currencyCode ?? "",
    organization,
    all,
    isMore,
  };
}

export function OrganizationChoice({ of }: { of: Chosen }) {
  const view = useView();
  if (of.all.length < 2) return null;
  if (of.isMore) return <OrganizationName of={of} />;
  const options = of.all.map((each): [string, string] => [each.name ?? "", each.name ?? ""]);
  return (
    <Choice
      name={text.organization}
      options={options}
      value={of.name}
      onChange={(org) => view.go({ org, ...OF_ANOTHER })}
    />
  );
}

// There are too many to choose from a list, so one is named.
function OrganizationName({ of }: { of: Chosen }) {
  const view = useView();
  const [name, setName] = useState(of.name);
  useEffect(() => setName(of.name), [of.name]);
  return (
    <form
      className="controls"
      onSubmit={(event) => {
        event.preventDefault();
        view.go({ org: name.trim(), ...OF_ANOTHER });
      }}
    >
      <Field label={text.organization} value={name} onChange={setName} />
      <Button type="submit">{text.show}</Button>
      <a href={addressOf("organizations", {})}>{text.findOrganization}</a>
    </form>
  );
}

export interface ChosenMonth {
  month: string;
  months: MonthJson[];
  options: [string, string][];
}

// The month in the address, or the present one, and all months of an organization.
export async function monthChosen(
  caller: Caller,
  view: View,
  organization: string,
): Promise<ChosenMonth> {
  const { months = [] } = await caller("BillingService/ListMonths", { organization });
  const names = months.map((each) => each.month ?? "");
  const present = monthOf(new Date());
  if (!names.includes(present)) names.unshift(present);
  const asked = view.asked("month");
  const closed = new Set(
    months.filter((each) => each.state === "MONTH_STATE_CLOSED").map((each) => each.month),
  );
  return {
    month: names.includes(asked) ? asked : present,
    months,
    options: names.map((name) => [name, closed.has(name) ? text.closedMonth(name) : name]),
  };
}

export function MonthChoice({ of }: { of: ChosenMonth }) {
  const view = useView();
  return (
    <Choice
      name={text.month}
      options={of.options}
      value={of.month}
      onChange={(month) => view.go({ month })}
    />
  );
}
