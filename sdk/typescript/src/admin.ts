/** Client of the admin API: tenants, keys, limits, prices, live requests, replicas, webhooks. */

import { create, fromJson, type JsonObject, type JsonValue, toJson } from "@bufbuild/protobuf";
import { timestampFromDate } from "@bufbuild/protobuf/wkt";
import type { CallOptionsOf } from "./connection.js";
import { AdminService } from "./gen/weir/v1/admin_service_pb.js";
import { ConfigurationSchema } from "./gen/weir/v1/configuration_pb.js";
import {
  ListPlansResponseSchema,
  PlanConfigurationSchema,
  SimulatePricesRequestSchema,
} from "./gen/weir/v1/plans_pb.js";
import { AdminCalls } from "./generated_calls.js";
import type {
  AuditEntry,
  Plan,
  PlanAssignment,
  PlanList,
  QuotaStatus,
  SimulatedCustomer,
} from "./generated_values.js";
import * as wire from "./wire.js";

const ASSIGNMENTS_PER_PAGE = 1000;

/** Options of `listAuditEntries`. */
export interface AuditOptions extends CallOptionsOf {
  /** Number of entries per call to the server. Default 100. */
  readonly pageSize?: number;
  /** Selects older entries than this one; 0 begins with the newest. */
  readonly beforeEntryId?: number;
  /** About an organization, an "organization/project", the prefix of a key, or any id. */
  readonly subject?: string;
  /** Changes made with this key, given by its prefix, or by the person of this address. */
  readonly actor?: string;
  /** Actions that begin with it. */
  readonly actionPrefix?: string;
  /** Entries from this time on. */
  readonly startTime?: Date;
  /** Entries before this time. */
  readonly endTime?: Date;
}

/** Options of lists that are read page by page. */
export interface PageOptions extends CallOptionsOf {
  /** Number of items per call to the server. Default 100. */
  readonly pageSize?: number;
}

/** Options of `assignPlan`. */
export interface AssignPlanOptions extends CallOptionsOf {
  /** Version of the plan. Default: the latest. */
  readonly version?: number;
  /** First month of the plan, as `YYYY-MM`. Default: this month. */
  readonly firstMonth?: string;
}

/**
 * Client of the admin API, which manages access and limits. Needs a key with the scope `admin`.
 *
 * You can name an organization, project or key by its name or id, as `organization/project`, or by
 * the prefix of a key. Every call throws a WeirError: NotFound for an unknown name, AlreadyExists
 * for a taken one, InvalidRequest for a bad value.
 */
export class AdminClient extends AdminCalls {
  /** Ends a temporary override before its time; the limit itself applies again. */
  async endQuotaOverride(quotaId: string, options: CallOptionsOf = {}): Promise<QuotaStatus> {
    const { overrideQuota } = AdminService.method;
    const response = await this.connection.call(overrideQuota, { quotaId }, options);
    return wire.quotaStatus(response.quota);
  }

  /**
   * Removes a limit, and returns whether it existed.
   *
   * @param options.allowMissing returns false instead of throwing NotFound if there is none.
   */
  async deleteQuota(
    quotaId: string,
    options: CallOptionsOf & { readonly allowMissing?: boolean } = {},
  ): Promise<boolean> {
    const { allowMissing = false } = options;
    const init = { quotaId, allowMissing };
    const { deleteQuota } = AdminService.method;
    const response = await this.connection.call(deleteQuota, init, options, allowMissing);
    return response.deleted || !allowMissing;
  }

  /**
   * Yields the limits of one organization, its projects and keys, or all, with remainders.
   *
   * @param options.endUser selects the limits of this end user of the organization instead.
   * @param options.label selects the limits of this label, "KEY=VALUE", instead.
   * @param options.quotaId selects the limit with this id only.
   */
  async *listQuotas(
    organization = "",
    options: PageOptions & {
      readonly endUser?: string;
      readonly label?: string;
      readonly quotaId?: string;
    } = {},
  ): AsyncGenerator<QuotaStatus, void, void> {
    const { endUser = "", label = "", quotaId = "", pageSize = 100 } = options;
    const { listQuotas } = AdminService.method;
    for (let pageToken = ""; ; ) {
      const init = { organization, endUser, label, quotaId, pageSize, pageToken };
      const page = await this.connection.call(listQuotas, init, options);
      for (const each of page.quotas) yield wire.quotaStatus(each);
      if (page.nextPageToken === "") return;
      pageToken = page.nextPageToken;
    }
  }

  /**
   * Returns every limit that applies to a key, even those of its project and organization.
   *
   * @param model selects the limits that apply to this model.
   */
  async listKeyQuotas(
    apiKey: string,
    model = "",
    options: CallOptionsOf = {},
  ): Promise<QuotaStatus[]> {
    const { listQuotas } = AdminService.method;
    const response = await this.connection.call(listQuotas, { apiKey, model }, options);
    return response.quotas.map((each) => wire.quotaStatus(each));
  }

  /** Yields entries of the audit log, newest first. */
  async *listAuditEntries(options: AuditOptions = {}): AsyncGenerator<AuditEntry, void, void> {
    const { subject = "", actor = "", actionPrefix = "", pageSize = 100 } = options;
    const { startTime, endTime } = options;
    const beforeEntryId = BigInt(options.beforeEntryId ?? 0);
    for (let pageToken = ""; ; ) {
      const init = {
        ...{ subject, actor, actionPrefix, pageSize, pageToken, beforeEntryId },
        ...(startTime && { startTime: timestampFromDate(startTime) }),
        ...(endTime && { endTime: timestampFromDate(endTime) }),
      };
      const { listAuditEntries } = AdminService.method;
      const page = await this.connection.call(listAuditEntries, init, options);
      for (const each of page.entries) yield wire.auditEntry(each);
      if (page.nextPageToken === "") return;
      pageToken = page.nextPageToken;
    }
  }

  /**
   * Computes the bills of a past month with other prices or plans. Changes nothing.
   *
   * @param month `YYYY-MM`, in UTC.
   * @param proposal may have the keys `prices` and `plans`: lists of the JSON of
   * `weir.v1.PriceConfiguration` and `weir.v1.PlanConfiguration`.
   */
  async simulatePrices(
    month: string,
    proposal: JsonObject,
    options: CallOptionsOf & { readonly organization?: string } = {},
  ): Promise<SimulatedCustomer[]> {
    const request = fromJson(SimulatePricesRequestSchema, proposal);
    Object.assign(request, { month, organization: options.organization ?? "" });
    const { simulatePrices } = AdminService.method;
    const response = await this.connection.call(simulatePrices, request, options);
    return response.customers.map((each) => wire.simulatedCustomer(each));
  }

  /**
   * Returns plans, or the versions of one, and to which organizations they are assigned.
   *
   * @param options.organization selects assignments, by name or id.
   */
  async listPlans(
    name = "",
    options: CallOptionsOf & { readonly organization?: string } = {},
  ): Promise<PlanList> {
    const { organization = "" } = options;
    const { listPlans } = AdminService.method;
    const found = create(ListPlansResponseSchema);
    for (let pageToken = ""; ; ) {
      const init = { name, organization, pageSize: ASSIGNMENTS_PER_PAGE, pageToken };
      const page = await this.connection.call(listPlans, init, options);
      found.plans.push(...page.plans);
      found.assignments.push(...page.assignments);
      if (page.nextPageToken === "") return wire.planList(found);
      pageToken = page.nextPageToken;
    }
  }

  /**
   * Creates a plan or its next version; returns the latest version if that is identical.
   *
   * @param plan the JSON of `weir.v1.PlanConfiguration`.
   */
  async createPlan(
    plan: JsonValue,
    options: CallOptionsOf = {},
  ): Promise<Plan & { readonly existed: boolean }> {
    const init = { plan: fromJson(PlanConfigurationSchema, plan) };
    const response = await this.connection.call(AdminService.method.createPlan, init, options);
    return Object.assign(wire.plan(response.plan), { existed: response.existed });
  }

  /**
   * Assigns a plan to an organization: by default its latest version, from this month on. An empty
   * `plan` removes the plan from that month on. Idempotent.
   */
  async assignPlan(
    organization: string,
    plan: string,
    options: AssignPlanOptions = {},
  ): Promise<PlanAssignment & { readonly existed: boolean }> {
    const { version = 0, firstMonth = "" } = options;
    const init = { organization, plan, version: BigInt(version), firstMonth };
    const response = await this.connection.call(AdminService.method.assignPlan, init, options);
    return Object.assign(wire.planAssignment(response.assignment), { existed: response.existed });
  }

  /** Returns the current state of one organization, or of all, as the JSON of a configuration. */
  async exportConfiguration(organization = "", options: CallOptionsOf = {}): Promise<JsonValue> {
    const { exportConfiguration } = AdminService.method;
    const response = await this.connection.call(exportConfiguration, { organization }, options);
    const { configuration } = response;
    if (configuration === undefined) return {};
    return toJson(ConfigurationSchema, configuration, { useProtoFieldName: true });
  }
}
