// Requests of a day, and the timings of one request.

import type { UsageRowJson } from "../gen/weir/v1/usage_reports_pb.js";
import type { GenerationJson } from "../gen/weir/v1/inference_service_pb.js";
import type { TimingsJson } from "../gen/weir/v1/types_pb.js";
import { amount, amountPlaces, count, milliseconds, whole, words } from "../format.js";
import {
  Badge,
  Command,
  Field,
  Id,
  Note,
  Pages,
  Remark,
  Search,
  Tile,
  Tiles,
  Time,
} from "../parts/basics.js";
import { Span } from "../parts/charts.js";
import { OrganizationChoice, organizationOf } from "../parts/choices.js";
import { Table, column } from "../parts/table.js";
import type { Column } from "../parts/table.js";
import { text } from "../texts.js";
import { Show, addressOf, useLoaded, useView } from "../view.js";
import type { Page, View } from "../view.js";
import { thinkingColumn } from "./usage.js";

const ANY = "AdminService/GetRequest";
const OWN = "InferenceService/GetGeneration";
const USAGE = "BillingService/GetUsage";
const PAGE_SIZE = 100;
const t = text.requests;
type Stage = { name: string; part: keyof TimingsJson; meaning: string };
const STAGES: Stage[] = [
  { name: "auth", part: "authMs", meaning: t.stages.auth },
  { name: "tokenize", part: "tokenizeMs", meaning: t.stages.tokenize },
  { name: "admission", part: "admissionMs", meaning: t.stages.admission },
  { name: "cold start", part: "coldStartMs", meaning: t.stages.coldStart },
  { name: "queue", part: "queueMs", meaning: t.stages.queue },
  { name: "prefill", part: "prefillMs", meaning: t.stages.prefill },
  { name: "decode", part: "decodeMs", meaning: t.stages.decode },
  { name: "client stall", part: "clientStallMs", meaning: t.stages.clientStall },
  { name: "settle", part: "settleMs", meaning: t.stages.settle },
];
const WITHOUT_TIMINGS: Record<string, string> = {
  STATE_RUNNING: t.running,
  STATE_VOIDED: t.voided,
  STATE_EXPIRED: t.expired,
};

export const requests: Page = {
  id: "requests",
  title: text.pages.requests,
  calls: [ANY, OWN, USAGE],
  Show: Requests,
};

function Requests() {
  const view = useView();
  const id = view.asked("id");
  const mayLookUp = view.may(ANY) || view.may(OWN);
  const project = view.may(ANY)
    ? [{ name: "project", label: t.project, placeholder: t.projectForm }]
    : [];
  return (
    <>
      {mayLookUp ? (
        <Search terms={[{ name: "id", label: t.id }, ...project]} act={t.lookUp} />
      ) : (
        <Note>{t.noLookUp}</Note>
      )}
      {mayLookUp && id && <One />}
      {mayLookUp && <Command>{`weir trace ${id || "REQUEST"}`}</Command>}
      {view.may(USAGE) && <OfDay />}
    </>
  );
}

function One() {
  const view = useView();
  const requestId = view.asked("id");
  const found = useLoaded(async (caller) =>
    view.may(ANY)
      ? caller(ANY, { requestId, project: view.asked("project") })
      : {
          organizationName: "",
          projectName: "",
          apiKeyPrefix: "",
          ...(await caller(OWN, { requestId })),
        },
  );
  return (
    <Show of={found}>
      {({ generation = {}, organizationName, projectName, apiKeyPrefix }) => (
        <section aria-label={t.one}>
          <h2>
            <Id of={generation.requestId} /> <Badge>{words(generation.state, "STATE_")}</Badge>{" "}
            {generation.outcome && (
              <Badge kind={/FAILED$/.test(generation.outcome) ? "bad" : ""}>
                {words(generation.outcome, "OUTCOME_")}
              </Badge>
            )}
          </h2>
          <p>
            {t.admitted(generation.model ?? "")} <Time of={generation.admitTime} />
            {organizationName && t.of(organizationName, projectName ?? "", apiKeyPrefix ?? "")}
          </p>
          <Figures of={generation} />
          {generation.migrationCount && <Remark>{t.moved(generation.migrationCount)}</Remark>}
          {generation.timings ? (
            <Waterfall timings={generation.timings} />
          ) : (
            <Remark kind="warning">{WITHOUT_TIMINGS[generation.state ?? ""] ?? t.noTimings}</Remark>
          )}
          <Labels of={generation.labels ?? {}} />
        </section>
      )}
    </Show>
  );
}

function Labels({ of: labels }: { of: Record<string, string> }) {
  const all = Object.entries(labels).map(([name, value]) => `${name}=${value}`);
  return all.length > 0 ? <Note>{t.labels(all.join(", "))}</Note> : null;
}

function Figures({ of: { usage = {}, cost, timings } }: { of: GenerationJson }) {
  const thinking = usage.reasoningTokenCount
    ? t.ofThemThinking(count(usage.reasoningTokenCount))
    : "";
  return (
    <Tiles>
      {whole(usage.embeddingTokenCount) > 0n ? (
        <Tile
          name={text.tokens.embedded}
          value={count(usage.embeddingTokenCount)}
          unit={text.tokens.unit}
        />
      ) : (
        <>
          <Tile
            name={text.tokens.input}
            value={count(usage.inputTokenCount)}
            unit={text.tokens.unit}
            note={
              usage.cachedInputTokenCount ? t.ofThemCached(count(usage.cachedInputTokenCount)) : ""
            }
          />
          <Tile
            name={text.tokens.output}
            value={count(usage.billedTokenCount)}
            unit={text.tokens.unit}
            note={`${thinking}${t.generated(count(usage.generatedTokenCount), count(usage.deliveredTokenCount))}`}
          />
        </>
      )}
      <Tile name={text.cost} value={cost ? amount(cost) : "\u2014"} unit={cost?.currencyCode} />
      {timings?.ttftMs ? <Tile name={t.ttft} value={milliseconds(timings.ttftMs)} /> : null}
      {timings?.itlMaxMs ? (
        <Tile
          name={t.gap}
          value={milliseconds(timings.itlMaxMs)}
          note={t.gaps(milliseconds(timings.itlP50Ms), milliseconds(timings.itlP99Ms))}
        />
      ) : null}
      {timings && <Tile name={t.total} value={milliseconds(timings.totalMs)} />}
    </Tiles>
  );
}

interface Shown extends Stage {
  start: number;
  length: number;
  all: number;
}

// Stages one after the other. A stall of the client may overlap decode; it ends where the settlement
// begins.
export function stagesOf(timings: TimingsJson): Shown[] {
  const ms = (part: keyof TimingsJson) => Number(timings[part] ?? 0);
  const stall = ms("clientStallMs");
  const sum = STAGES.reduce((total, { part }) => total + ms(part), -stall);
  const all = Math.max(ms("totalMs"), sum, stall) || 1;
  let end = 0;
  return STAGES.map((stage) => {
    const start = stage.part === "clientStallMs" ? Math.max(all - ms("settleMs") - stall, 0) : end;
    end = start + ms(stage.part);
    return { ...stage, start, length: ms(stage.part), all };
  });
}

function Waterfall({ timings }: { timings: TimingsJson }) {
  return (
    <Table
      caption={t.timings}
      columns={[
        column<Shown>(t.stage, (each) => each.name),
        column<Shown>(t.duration, (each) => milliseconds(each.length), true),
        column<Shown>(t.axis, (each) => <Span {...each} />),
        column<Shown>(t.meaning, (each) =>
          each.part === "settleMs" && !each.length ? t.notRecorded : each.meaning,
        ),
      ]}
      rows={stagesOf(timings)}
      keyOf={(each) => each.name}
      isGrid
    />
  );
}

function OfDay() {
  const view = useView();
  const asked = view.asked("day");
  const day = /^\d{4}-\d{2}-\d{2}$/.test(asked) ? asked : new Date().toISOString().slice(0, 10);
  const found = useLoaded(async (caller) => {
    const chosen = await organizationOf(caller, view);
    const usage = await caller(USAGE, {
      organization: chosen.ref,
      month: day.slice(0, 7),
      day,
      groupBy: ["USAGE_GROUPING_REQUEST"],
      pageSize: PAGE_SIZE,
      pageToken: view.asked("page"),
    });
    return { chosen, usage };
  });
  return (
    <section aria-label={t.ofDay}>
      <h2>{t.ofDay}</h2>
      <Show of={found}>
        {({ chosen, usage: { rows = [], nextPageToken } }) => (
          <>
            <div className="controls">
              <OrganizationChoice of={chosen} />
              <Field
                label={t.day}
                type="date"
                value={day}
                onChange={(next) => next && view.go({ day: next, page: "" })}
              />
            </div>
            <RequestTable
              caption={t.requestsOf(day)}
              rows={rows}
              currency={chosen.currency}
              empty={t.noneOn(day)}
            />
            <Pages next={nextPageToken} />
            <Command>{`weir month show ${day.slice(0, 7)} --org ${chosen.name || "ORG"} --by request --day ${day}`}</Command>
          </>
        )}
      </Show>
    </section>
  );
}

// Table of requests, each with a link to its stages if the session may see them.
export function RequestTable({
  caption,
  rows,
  currency,
  empty,
}: {
  caption: string;
  rows: UsageRowJson[];
  currency: string;
  empty: string;
}) {
  const view = useView();
  return (
    <Table
      caption={caption}
      columns={requestColumns(view, rows, currency)}
      rows={rows}
      empty={empty}
      keyOf={(each) => each.requestId}
    />
  );
}

function requestColumns(
  view: View,
  rows: UsageRowJson[],
  currency: string,
): Column<UsageRowJson>[] {
  const least = amountPlaces(rows.map(costOf));
  const link = (each: UsageRowJson) => (
    <a className="id" href={addressOf("requests", { id: each.requestId, project: each.projectId })}>
      {each.requestId}
    </a>
  );
  return [
    column(t.settled, (each) => <Time of={each.settleTime} />),
    column(text.request, (each) => (view.may(ANY) ? link(each) : <Id of={each.requestId} />)),
    column(t.projectAndKey, (each) => (
      <>
        {each.projectName}
        <Note>
          {each.apiKeyName}, {each.apiKeyPrefix}
        </Note>
      </>
    )),
    column(text.model, (each) => each.model),
    column(t.outcome, (each) => words(each.outcome, "OUTCOME_")),
    column(text.tokens.input, (each) => count(each.inputTokenCount), true),
    column(text.tokens.cached, (each) => count(each.cachedInputTokenCount), true),
    column(text.tokens.output, (each) => count(each.outputTokenCount), true),
    ...thinkingColumn(rows),
    column(text.tokens.embedded, (each) => count(each.embeddingTokenCount), true),
    column(text.costIn(currency), (each) => amount(costOf(each), least), true),
  ];
}

// Cost of a request: posted to the ledger, or in the first second only recorded.
function costOf({ amount: posted, pendingAmount }: UsageRowJson) {
  return whole(pendingAmount?.picos) || whole(pendingAmount?.units) ? pendingAmount : posted;
}
