// Replicas of models: their states, and drains.

import type { ReplicaDrainJson, ReplicaJson } from "../gen/weir/v1/replicas_pb.js";
import { count, wait, secondsOf, words } from "../format.js";
import { Action } from "../parts/actions.js";
import { AsOf, Badge, Command, Note, Remark, Time } from "../parts/basics.js";
import type { Kind } from "../parts/basics.js";
import { Table, column } from "../parts/table.js";
import { text } from "../texts.js";
import { Show, useLoaded } from "../view.js";
import type { Page } from "../view.js";

const REPLICAS = "AdminService/ListReplicas";
const EVERY_MS = 5000;
const KINDS: Record<string, Kind> = {
  REPLICA_STATE_READY: "good",
  REPLICA_STATE_FAILED: "bad",
  REPLICA_STATE_RESTARTING: "warning",
  REPLICA_STATE_TRIPPED: "warning",
};
const t = text.fleet;

export const fleet: Page = { id: "fleet", title: text.pages.fleet, calls: [REPLICAS], Show: Fleet };

function Fleet() {
  const found = useLoaded((caller) => caller(REPLICAS), [], EVERY_MS);
  return (
    <Show of={found} everyMs={EVERY_MS}>
      {({ replicas = [], drains = [], unresponsiveProcessIds = [] }) => (
        <>
          {unresponsiveProcessIds.length > 0 && (
            <Remark kind="warning">
              {text.overview.unresponsive(unresponsiveProcessIds.join(", "))}
            </Remark>
          )}
          <Table
            caption={t.replicas}
            columns={columns(found.reload)}
            rows={replicas}
            empty={t.none}
            keyOf={(each) => `${each.model} ${each.replica} ${each.processId}`}
          />
          <h2>{t.drains}</h2>
          <Table
            caption={t.drains}
            columns={[
              column<ReplicaDrainJson>(text.model, (each) => each.model),
              column<ReplicaDrainJson>(t.replica, (each) => each.replica),
              column<ReplicaDrainJson>(t.since, (each) => <Time of={each.drainTime} />),
              column<ReplicaDrainJson>(
                t.moveAfter,
                (each) => (each.moveAfter ? wait(secondsOf(each.moveAfter)) : t.never),
                true,
              ),
              column<ReplicaDrainJson>(t.reason, (each) => each.reason),
            ]}
            rows={drains}
            empty={t.noDrains}
            keyOf={(each) => `${each.model} ${each.replica}`}
          />
          <AsOf />
          <Command>weir replicas list</Command>
        </>
      )}
    </Show>
  );
}

const columns = (reload: () => void) => [
  column<ReplicaJson>(text.model, (each) => each.model),
  column<ReplicaJson>(t.replica, (each) => each.replica),
  column<ReplicaJson>(t.region, (each) => each.region),
  column<ReplicaJson>(text.state, (each) => (
    <>
      <Badge kind={KINDS[each.state ?? ""] ?? ""}>{words(each.state, "REPLICA_STATE_")}</Badge>
      {each.drained && <Badge kind="warning">{t.drained}</Badge>}
      {each.reason && <Note>{each.reason}</Note>}
    </>
  )),
  column<ReplicaJson>(text.overview.requests, (each) => count(each.requestCount), true),
  column<ReplicaJson>(t.pending, (each) => count(each.outstandingTokenCount), true),
  column<ReplicaJson>(t.process, (each) => each.processName),
  column<ReplicaJson>(text.change, (each) =>
    each.drained ? <Undrain of={each} reload={reload} /> : <Drain of={each} reload={reload} />,
  ),
];

function Drain({
  of: { model = "", replica = "" },
  reload,
}: {
  of: ReplicaJson;
  reload: () => void;
}) {
  return (
    <Action
      call="AdminService/DrainReplica"
      label={t.drain}
      about={`${model} ${replica}`}
      title={t.drainTitle(model, replica)}
      explanation={t.drainExplanation}
      act={t.drain}
      fields={[
        {
          name: "move_after",
          label: t.moveAfterSeconds,
          type: "number",
          help: t.moveAfterHelp,
        },
        { name: "reason", label: t.reason },
      ]}
      request={({ move_after: seconds, reason = "" }) => ({
        model,
        replica,
        reason,
        ...(seconds ? { moveAfter: `${seconds}s` } : {}),
      })}
      done={() => t.isDrained(model, replica)}
      changed={reload}
    />
  );
}

function Undrain({
  of: { model = "", replica = "" },
  reload,
}: {
  of: ReplicaJson;
  reload: () => void;
}) {
  return (
    <Action
      call="AdminService/UndrainReplica"
      label={t.undrain}
      about={`${model} ${replica}`}
      title={t.undrainTitle(model, replica)}
      act={t.undrain}
      fields={[{ name: "reason", label: t.reason }]}
      request={({ reason = "" }) => ({ model, replica, reason })}
      done={() => t.isUndrained(model, replica)}
      changed={reload}
    />
  );
}
