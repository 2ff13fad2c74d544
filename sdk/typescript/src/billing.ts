/** Client of the billing API: reports, months, usage, invoices, corrections, alerts, resale. */

import type { Writable } from "node:stream";
import { pipeline } from "node:stream/promises";
import type { CallOptionsOf } from "./connection.js";
import { invalid } from "./checks.js";
import { LABEL_PREFIX, numberOf, usageGroups } from "./conversion.js";
import { BillingService } from "./gen/weir/v1/billing_service_pb.js";
import { EndUserState as EndUserStates } from "./gen/weir/v1/end_users_pb.js";
import { ResaleStatementFormat as StatementFormats } from "./gen/weir/v1/resale_pb.js";
import {
  MonthExportFormat as ExportFormats,
} from "./gen/weir/v1/usage_reports_pb.js";
import { BillingCalls } from "./generated_calls.js";
import type {
  Adjustment,
  Alert,
  EndUser,
  EndUserState,
  Invoice,
  MonthExportFormat,
  ReplicaRental,
  ResalePrice,
  ResaleStatement,
  ResaleStatementFormat,
  UsageGrouping,
  UsagePage,
} from "./generated_values.js";
import * as wire from "./wire.js";

const EXPORT_MS = 1_800_000; // of an organization: some ten million rows

/** An exported file. */
export interface MonthFile {
  readonly fileName: string;
  readonly mediaType: string;
  readonly content: Uint8Array;
}

/** Options of `getInvoice`: a number, or organization and month. */
export interface GetInvoiceOptions extends CallOptionsOf {
  /** Number of the invoice. */
  readonly number?: string;
  /** Name or id of the organization. */
  readonly organization?: string;
  /** Month as `YYYY-MM`, in UTC. */
  readonly month?: string;
}

/** Options of `exportMonth`. */
export interface ExportOptions extends CallOptionsOf {
  /** Default: the key's own. */
  readonly organization?: string;
  /** `end_user` and labels such as `label:team`. Default: charges are not split, without tags. */
  readonly tags?: readonly string[];
}

/** Options of `listEndUsers`. */
export interface ListEndUsersOptions extends CallOptionsOf {
  /** Only names that begin with this. */
  readonly prefix?: string;
  /** Only end users in this state. */
  readonly state?: EndUserState;
  /** Reads the cost and requests of the current month, and the tightest limit of each. */
  readonly withUsage?: boolean;
  /** Number of end users per call to the server. Default: the server's. */
  readonly pageSize?: number;
}

/** Options of `getUsage`. */
export interface UsageOptions extends CallOptionsOf {
  /** Default: the key's own organization, or all with a key of the scope `admin`. */
  readonly organization?: string;
  /** Only this day, `YYYY-MM-DD`. */
  readonly day?: string;
  /** Instead of a month, which is then `""`: the first day of use, `YYYY-MM-DD` in UTC. */
  readonly firstDay?: string;
  /** Last day of use, `YYYY-MM-DD` in UTC; at most 92 days in all. Default: today. */
  readonly lastDay?: string;
  /** Only this project. */
  readonly project?: string;
  /** Only this key, given by id or prefix. */
  readonly apiKey?: string;
  /** Only this model. */
  readonly model?: string;
  /** Only this end user, by name or id. */
  readonly endUser?: string;
  /** Only requests with all these labels. */
  readonly labels?: Readonly<Record<string, string>>;
  /** The rows with the highest cost first. */
  readonly largestFirst?: boolean;
  /** The latest requests first, with `request`. */
  readonly latestFirst?: boolean;
  /** Number of rows per page. Default: the server's. */
  readonly pageSize?: number;
}

/**
 * Client of the billing API, which reads bills, and closes and corrects months.
 *
 * Reading and resale prices need a key with the scope `billing` (its own organization only) or
 * `admin`, everything else `admin`. Organizations are given by name or id, months as `YYYY-MM` in
 * UTC. Every call throws a WeirError: NotFound for an unknown object, InvalidRequest for a bad
 * value, FailedPrecondition if the current state does not allow the call.
 */
export class BillingClient extends BillingCalls {
  /** Returns one invoice with its credit notes. */
  async getInvoice(
    options: GetInvoiceOptions,
  ): Promise<Invoice & { readonly creditNotes: readonly Adjustment[] }> {
    const { number = "", organization = "", month = "" } = options;
    const init = { number, organization, month };
    const response = await this.connection.call(BillingService.method.getInvoice, init, options);
    const creditNotes = response.creditNotes.map((each) => wire.adjustment(each));
    return Object.assign(wire.invoice(response.invoice), { creditNotes });
  }

  /**
   * Yields pages of a month's charges, or of the usage of some days.
   *
   * @param month `YYYY-MM`, in UTC; `""` with `firstDay`.
   * @param groupBy columns of the rows, in this order; `label:KEY` for the values of one label.
   */
  async *getUsage(
    month: string,
    groupBy: readonly (UsageGrouping | `label:${string}`)[],
    options: UsageOptions = {},
  ): AsyncGenerator<UsagePage, void, void> {
    const { organization = "", day = "", project = "", apiKey = "", model = "" } = options;
    const { firstDay = "", lastDay = "", endUser = "", labels = {} } = options;
    const filters = { organization, month, day, firstDay, lastDay, project, apiKey, model };
    const { largestFirst = false, latestFirst = false } = options;
    const order = { largestFirst, latestFirst };
    const more = { endUser, labels, ...order, ...usageGroups("groupBy", groupBy) };
    for (let pageToken = ""; ; ) {
      const init = { ...filters, ...more, pageSize: options.pageSize ?? 0, pageToken };
      const page = await this.connection.call(BillingService.method.getUsage, init, options);
      yield wire.usagePage(page);
      pageToken = page.nextPageToken;
      if (!pageToken) return;
    }
  }

  /**
   * Exports a month (`YYYY-MM`, UTC) as a file. `tags` split the charges of a FOCUS file by
   * `end_user` and labels such as `label:team`, and name them in its column Tags.
   */
  async exportMonth(
    month: string,
    format: MonthExportFormat,
    options: ExportOptions = {},
  ): Promise<MonthFile> {
    const { organization = "", tags = [] } = options;
    const labels = tags.filter((each) => each.startsWith(LABEL_PREFIX));
    if (tags.some((each) => each !== "end_user" && !labels.includes(each)))
      throw invalid("tags", `must be end_user or ${LABEL_PREFIX}KEY, got ${tags.join(", ")}`);
    const init = {
      organization,
      month,
      format: numberOf("format", ExportFormats, format),
      tagLabelKeys: labels.map((each) => each.slice(LABEL_PREFIX.length)),
      tagEndUser: tags.includes("end_user"),
    };
    return await this.exported(init, options);
  }

  /** Exports an approved credit note, given by its number, as PDF. */
  async exportCreditNote(number: string, options: CallOptionsOf = {}): Promise<MonthFile> {
    return await this.exported({ creditNoteNumber: number }, options);
  }

  /**
   * Writes everything that an organization has to a stream, as a ZIP archive, and ends the stream.
   * `""` is the organization of the key. If it fails, the archive is incomplete: begin again.
   */
  async exportOrganization(
    organization: string,
    file: Writable,
    options: CallOptionsOf = {},
  ): Promise<void> {
    const pieces = this.connection.responses(
      BillingService.method.exportOrganization,
      { organization },
      { timeoutMs: EXPORT_MS, ...options },
    );
    await pipeline(async function* () {
      for await (const { chunk } of pieces) yield chunk;
    }, file);
  }

  /** Yields the end users of an organization by name; `""` is that of the key. */
  async *listEndUsers(
    organization = "",
    options: ListEndUsersOptions = {},
  ): AsyncGenerator<EndUser, void, void> {
    const { prefix = "", state = "", withUsage = false, pageSize = 0 } = options;
    const filters = { prefix, state: numberOf("state", EndUserStates, state || "unspecified") };
    for (let pageToken = ""; ; ) {
      const init = { organization, ...filters, withUsage, pageSize, pageToken };
      const page = await this.connection.call(BillingService.method.listEndUsers, init, options);
      for (const each of page.endUsers) yield wire.endUser(each);
      pageToken = page.nextPageToken;
      if (!pageToken) return;
    }
  }

  /** Yields alerts, latest first; with `endUser` those on the limits of one. */
  async *listAlerts(
    organization = "",
    options: CallOptionsOf & { readonly endUser?: string; readonly pageSize?: number } = {},
  ): AsyncGenerator<Alert, void, void> {
    const { endUser = "", pageSize = 0 } = options;
    for (let pageToken = ""; ; ) {
      const init = { organization, endUser, pageSize, pageToken };
      const page = await this.connection.call(BillingService.method.listAlerts, init, options);
      for (const each of page.alerts) yield wire.alert(each);
      pageToken = page.nextPageToken;
      if (!pageToken) return;
    }
  }

  /** Yields the resale prices in force by model, or with `history` all versions. */
  async *listResalePrices(
    organization = "",
    options: CallOptionsOf & { readonly history?: boolean; readonly pageSize?: number } = {},
  ): AsyncGenerator<ResalePrice, void, void> {
    const { history = false, pageSize = 0 } = options;
    for (let pageToken = ""; ; ) {
      const init = { organization, history, pageSize, pageToken };
      const method = BillingService.method.listResalePrices;
      const page = await this.connection.call(method, init, options);
      for (const each of page.prices) yield wire.resalePrice(each);
      pageToken = page.nextPageToken;
      if (!pageToken) return;
    }
  }

  /** Yields rentals of replicas, the latest recorded first: of an end user, or of all. */
  async *listReplicaRentals(
    endUser = "",
    options: CallOptionsOf & { readonly organization?: string; readonly pageSize?: number } = {},
  ): AsyncGenerator<ReplicaRental, void, void> {
    const { organization = "", pageSize = 0 } = options;
    const method = BillingService.method.listReplicaRentals;
    for (let pageToken = ""; ; ) {
      const init = { organization, endUser, pageSize, pageToken };
      const page = await this.connection.call(method, init, options);
      for (const each of page.rentals) yield wire.replicaRental(each);
      pageToken = page.nextPageToken;
      if (!pageToken) return;
    }
  }

  /** Yields the statements of a month, without lines: that of usage without an end user first. */
  async *listResaleStatements(
    month: string,
    options: CallOptionsOf & { readonly organization?: string; readonly pageSize?: number } = {},
  ): AsyncGenerator<ResaleStatement, void, void> {
    const { organization = "", pageSize = 0 } = options;
    const method = BillingService.method.listResaleStatements;
    for (let pageToken = ""; ; ) {
      const init = { organization, month, pageSize, pageToken };
      const page = await this.connection.call(method, init, options);
      for (const each of page.statements) yield wire.resaleStatement(each);
      pageToken = page.nextPageToken;
      if (!pageToken) return;
    }
  }

  /** Returns the statement of an end user, by name or id; `""`: of usage without one. */
  async getResaleStatement(
    endUser: string,
    month: string,
    options: CallOptionsOf & { readonly organization?: string } = {},
  ): Promise<ResaleStatement> {
    const init = { organization: options.organization ?? "", month, endUser };
    const method = BillingService.method.getResaleStatement;
    const response = await this.connection.call(method, init, options);
    return wire.resaleStatement(response.statement);
  }

  /** Exports a statement as a file. JSON and CSV have your costs, the PDF has not. */
  async exportResaleStatement(
    endUser: string,
    month: string,
    format: ResaleStatementFormat,
    options: CallOptionsOf & { readonly organization?: string } = {},
  ): Promise<Uint8Array> {
    const { organization = "" } = options;
    const init = {
      organization,
      month,
      endUser,
      format: numberOf("format", StatementFormats, format),
    };
    const method = BillingService.method.getResaleStatement;
    const response = await this.connection.call(method, init, options);
    return response.content;
  }

  private async exported(
    init: Parameters<typeof this.connection.collect<typeof BillingService.method.exportMonth>>[1],
    options: CallOptionsOf,
  ): Promise<MonthFile> {
    const pieces = await this.connection.collect(BillingService.method.exportMonth, init, options);
    const { fileName = "", mediaType = "" } = pieces[0] ?? {};
    return { fileName, mediaType, content: Buffer.concat(pieces.map(({ chunk }) => chunk)) };
  }
}
