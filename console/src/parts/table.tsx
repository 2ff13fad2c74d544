// Tables with heads, in pages. On narrow screens each row is a card whose cells carry their heads, or
// the table scrolls if it is a grid. Roles are named, since cards lose them.

import { useState } from "react";
import type { ReactNode } from "react";
import { count } from "../format.js";
import { text } from "../texts.js";
import { Button, Empty } from "./basics.js";

const PAGE_SIZE = 100;

export interface Column<Row> {
  head: string;
  cell: (row: Row) => ReactNode;
  isNumber: boolean;
}

export function column<Row>(
  head: string,
  cell: (row: Row) => ReactNode,
  isNumber = false,
): Column<Row> {
  return { head, cell, isNumber };
}

interface Shown<Row> {
  caption: string;
  columns: Column<Row>[];
  rows: Row[] | undefined;
  empty?: string;
  foot?: Row | null;
  keyOf?: (row: Row) => string | undefined;
  isGrid?: boolean;
}

export function Table<Row>({
  caption,
  columns,
  rows = [],
  empty = text.nothing,
  foot = null,
  keyOf,
  isGrid = false,
}: Shown<Row>) {
  const [page, setPage] = useState(0);
  const last = Math.max(0, Math.ceil(rows.length / PAGE_SIZE) - 1);
  const start = Math.min(page, last) * PAGE_SIZE;
  if (rows.length === 0 && !foot) return <Empty>{empty}</Empty>;
  return (
    <>
      <div className="scroll" tabIndex={0} role="region" aria-label={caption}>
        <table role="table" className={isGrid ? "grid" : "cards"}>
          <caption className="unseen">{caption}</caption>
          <thead role="rowgroup">
            <tr role="row">
              {columns.map(({ head, isNumber }) => (
                <th key={head} scope="col" role="columnheader" className={isNumber ? "number" : ""}>
                  {head}
                </th>
              ))}
            </tr>
          </thead>
          <tbody role="rowgroup">
            {rows.slice(start, start + PAGE_SIZE).map((row, index) => (
              <Row key={keyOf?.(row) ?? index} columns={columns} row={row} />
            ))}
          </tbody>
          {foot && (
            <tfoot role="rowgroup">
              <Row columns={columns} row={foot} />
            </tfoot>
          )}
        </table>
      </div>
      {last > 0 && (
        <nav className="buttons" aria-label={text.pagesOf(caption)}>
          <Button isDisabled={start === 0} onPress={() => setPage(Math.min(page, last) - 1)}>
            {text.previous}
          </Button>
          <span className="note">
            {text.rowsOf(
              count(start + 1),
              count(Math.min(start + PAGE_SIZE, rows.length)),
              count(rows.length),
            )}
          </span>
          <Button
            isDisabled={start + PAGE_SIZE >= rows.length}
            onPress={() => setPage(Math.min(page, last) + 1)}
          >
            {text.next}
          </Button>
        </nav>
      )}
    </>
  );
}

function Row<Data>({ columns, row }: { columns: Column<Data>[]; row: Data }) {
  return (
    <tr role="row">
      {columns.map(({ head, cell, isNumber }) => {
        const content = cell(row);
        const isEmpty = [content]
          .flat()
          .every((each) => each === "" || each == null || each === false);
        return (
          <td
            key={head}
            role="cell"
            data-head={head}
            className={`${isNumber ? "number" : ""} ${isEmpty ? "void" : ""}`}
          >
            <div className="value">{content}</div>
          </td>
        );
      })}
    </tr>
  );
}
