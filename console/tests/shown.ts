// Rows of the month page as it shows them: a report as JSON a line on stdin, its tables a line on
// stdout, with the addressee of the documents.

import { createInterface } from "node:readline";
import type { ReactElement } from "react";
import type { GetMonthReportResponseJson } from "../src/gen/weir/v1/billing_service_pb.js";
import { billedTo, chargeColumns, lineColumns, totalColumns, totals } from "../src/pages/month.js";
import type { Column } from "../src/parts/table.js";

function cells<Row>(columns: Column<Row>[], rows: Row[]): string[][] {
  const shown = columns.filter(({ head }) => /^(Item|Amount|Exact|Rounded)/.test(head));
  return rows.map((row) =>
    shown.map(({ cell }) => {
      const content = cell(row) as string | ReactElement | undefined;
      return typeof content === "string" ? content : "";
    }),
  );
}

for await (const line of createInterface({ input: process.stdin })) {
  const report = JSON.parse(line) as GetMonthReportResponseJson;
  const [lines, charges, sums] = [report.lines ?? [], report.charges ?? [], totals(report)];
  const shown = {
    lines: cells(lineColumns("", lines), lines),
    charges: cells(chargeColumns("", charges), charges),
    totals: cells(totalColumns("", sums), sums),
    billedTo: billedTo(report),
  };
  process.stdout.write(`${JSON.stringify(shown)}\n`);
}
