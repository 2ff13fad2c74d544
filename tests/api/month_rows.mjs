// Rows of the console's month page as it shows them: a report as JSON a line on stdin, its tables a line on stdout.

import { createInterface } from "node:readline";
import { chargeColumns, lineColumns, totalColumns, totals } from "../../api/console/static/month.mjs";

const cells = (columns, rows) => rows.map((row) => columns.filter(({ head }) => /^(Item|Amount|Exact|Rounded)/.test(head)).map(({ cell }) => String(cell(row) ?? "")));

for await (const line of createInterface({ input: process.stdin })) {
  const report = JSON.parse(line);
  const [lines, charges, sums] = [report.lines ?? [], report.charges ?? [], totals(report)];
  const shown = { lines: cells(lineColumns("", lines), lines), charges: cells(chargeColumns("", charges), charges), totals: cells(totalColumns("", sums), sums) };
  process.stdout.write(`${JSON.stringify(shown)}\n`);
}
