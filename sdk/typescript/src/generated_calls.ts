/**
 * Unary calls of the administrators' clients.
 *
 * Generated from the contract by `infra/generate_sdk.py`: run `make proto` instead of editing it.
 */

import { randomUUID } from "node:crypto";
import { fromJson, type JsonObject } from "@bufbuild/protobuf";
import { timestampFromDate } from "@bufbuild/protobuf/wkt";
import type { CallOptionsOf } from "./connection.js";
import { defined, duration, numberOf, whole } from "./conversion.js";
import {
  AdminService,
  ApiKeyState as ApiKeyStateMessage,
} from "./gen/weir/v1/admin_service_pb.js";
import {
  BillingService,
} from "./gen/weir/v1/billing_service_pb.js";
import {
  RemainingCredit as RemainingCreditMessage,
} from "./gen/weir/v1/closures_pb.js";
import {
  ConfigurationSchema,
} from "./gen/weir/v1/configuration_pb.js";
import {
  MonthDocumentFormat as MonthDocumentFormatMessage,
} from "./gen/weir/v1/months_pb.js";
import {
  TrafficPeriod as TrafficPeriodMessage,
} from "./gen/weir/v1/operation_pb.js";
import {
  QuotaDimension as QuotaDimensionMessage,
  QuotaSubject as QuotaSubjectMessage,
} from "./gen/weir/v1/types_pb.js";
import {
  type AcceptedInvitation,
  type Adjustment,
  type Alert,
  type AlertWebhook,
  type ApiKey,
  type ApiKeyState,
  type AppliedConfiguration,
  type AppliedFleet,
  type AuditPage,
  type BillingProfile,
  type ClosedMonth,
  type ClosedOrganization,
  type ClosedProject,
  type Concern,
  type CreatedAlertWebhook,
  type CreatedApiKey,
  type CreatedInvitation,
  type CreditBalance,
  type CreditGrant,
  type DocumentFormat,
  type DrainedReplica,
  type EndUserLimits,
  type ErasedEndUser,
  type ErasedPerson,
  type FleetVersion,
  type Invitation,
  type KilledRequest,
  type LiveView,
  type Member,
  type Month,
  type MonthReport,
  type MonthVerification,
  type Organization,
  type Person,
  type PriceList,
  type PriceVersion,
  type Project,
  type ProvisionedGroup,
  type QuotaDimension,
  type QuotaPreview,
  type QuotaStatus,
  type QuotaSubject,
  type RecordedRequest,
  type RemainingCredit,
  type RemovedMember,
  type ReplicaList,
  type ReplicaRental,
  type ResalePrice,
  type ResentInvitation,
  type RotatedApiKey,
  type ServedFleet,
  type ServiceAccount,
  type TokenIssuer,
  type TokenRevocation,
  type Traffic,
  type TrafficPeriod,
  type UndrainedReplica,
  type UsageForecast,
} from "./generated_values.js";
import type { Money } from "./money.js";
import { UnaryClient } from "./unary.js";
import * as wire from "./wire.js";
import { moneyInit } from "./wire.js";

/** Options of `createOrganization`. */
export interface CreateOrganizationOptions extends CallOptionsOf {
  /** ISO 4217 code. Default "USD". */
  readonly currencyCode?: string | undefined;
  /** Idempotency key: see the service. Not a UUID: InvalidRequest. */
  readonly requestId?: string | undefined;
  /** Returns an existing organization of this name and currency instead of AlreadyExists. */
  readonly allowExisting?: boolean | undefined;
}

/** Options of `closeOrganization`. */
export interface CloseOrganizationOptions extends CallOptionsOf {
  /**
   * The name of the organization again, because nothing undoes a closing. Not needed with
   * `validate_only`.
   */
  readonly confirmName?: string | undefined;
  /** Why: 1 to 200 printable characters. Its callers read it in each refusal. */
  readonly reason?: string | undefined;
  /** What happens to the credit that the final month leaves. Required if credit remains. */
  readonly remainingCredit?: RemainingCredit | undefined;
  /** Changes nothing, and returns the effects. */
  readonly validateOnly?: boolean | undefined;
}

/** Options of `listOrganizations`. */
export interface ListOrganizationsOptions extends CallOptionsOf {
  /** Number of items per call to the server, 1 to 1000. */
  readonly pageSize?: number | undefined;
  /** Only names that begin with this. Empty: all. */
  readonly search?: string | undefined;
  /** Name or id of an organization: only this one. Empty: all. Unknown: NotFound. */
  readonly organization?: string | undefined;
}

/** Options of `createProject`. */
export interface CreateProjectOptions extends CallOptionsOf {
  /** Idempotency key: see the service. Not a UUID: InvalidRequest. */
  readonly requestId?: string | undefined;
  /** Returns an existing project of this name instead of AlreadyExists. */
  readonly allowExisting?: boolean | undefined;
}

/** Options of `closeProject`. */
export interface CloseProjectOptions extends CallOptionsOf {
  /**
   * The name of the project again, because nothing undoes a closing. Not needed with
   * `validate_only`.
   */
  readonly confirmName?: string | undefined;
  /** Why: 1 to 200 printable characters. Its callers read it in each refusal. */
  readonly reason?: string | undefined;
  /** Changes nothing, and returns the effects. */
  readonly validateOnly?: boolean | undefined;
}

/** Options of `exportAuditEntries`. */
export interface ExportAuditEntriesOptions extends CallOptionsOf {
  /**
   * The position of an earlier response; 0: from the beginning. Above the newest one:
   * InvalidRequest.
   */
  readonly afterEntryId?: number | bigint | undefined;
  /** Largest number of entries, 1 to 1000. Default 1000. */
  readonly pageSize?: number | undefined;
}

/** Options of `listProjects`. */
export interface ListProjectsOptions extends CallOptionsOf {
  /** Number of items per call to the server, 1 to 1000. */
  readonly pageSize?: number | undefined;
  /** Only names that begin with this. Empty: all. */
  readonly search?: string | undefined;
}

/** Options of `createApiKey`. */
export interface CreateApiKeyOptions extends CallOptionsOf {
  /**
   * Any of "inference", "admin", "billing", "scim". Empty: "inference", or no scope with a `role`.
   */
  readonly scopes?: readonly string[] | undefined;
  /** Lifetime. Unset: unlimited. Zero or negative: InvalidRequest. */
  readonly lifetimeMs?: number | undefined;
  /** Idempotency key: see the service. Not a UUID: InvalidRequest. */
  readonly requestId?: string | undefined;
  /**
   * Returns the project's active key of this name and scopes, if there is one; names need not be
   * unique otherwise.
   */
  readonly allowExisting?: boolean | undefined;
  /**
   * Names of the allowed models; a name covers all versions of the model. Empty: all models.
   * Unknown: NotFound. Calls for other models get PermissionDenied.
   */
  readonly models?: readonly string[] | undefined;
  /**
   * Limit of input tokens per request: its prompt, or all texts to embed. 0: the model's own limit.
   * A larger request is InvalidRequest with the reason KEY_LIMIT_EXCEEDED. 1 to 1,000,000,000, or 0
   * for no limit.
   */
  readonly maxInputTokens?: number | bigint | undefined;
  /**
   * Limit of output tokens per request, all choices together. 0: the model's own limit. A request
   * that asks for more is refused in the same way; one without a limit of its own ends there with
   * FINISH_REASON_LENGTH. 1 to 1,000,000,000, or 0 for no limit.
   */
  readonly maxOutputTokens?: number | bigint | undefined;
  /**
   * Networks that may use the key, such as "203.0.113.0/24" or "2001:db8::/32". Empty: all. Calls
   * from other addresses get PermissionDenied with the reason ADDRESS_NOT_ALLOWED, and so do
   * running requests from there when the networks are narrowed. At most 100 networks or addresses.
   */
  readonly allowedNetworks?: readonly string[] | undefined;
  /**
   * Refuses unknown parameters over HTTP, as `?strict=1` does for one request; `?strict=0` does not
   * relax it. False: those that cannot change the answer are ignored and named in a header.
   */
  readonly strictParameters?: boolean | undefined;
  /**
   * Group of the key within its organization, such as "free". Limits can be set for each key of a
   * group: `SetQuotaRequest.for_each`. Empty: none. At most 100 printable characters, without a
   * space at either end.
   */
  readonly group?: string | undefined;
  /**
   * Role of the key in its organization: "owner", "admin", "developer", "finance" or "viewer". It
   * permits calls beside those of the scopes. Empty: none. With the scopes "admin" or "billing":
   * InvalidRequest. A role or a right that the calling key does not have: PermissionDenied with the
   * reason ROLE_EXCEEDED.
   */
  readonly role?: string | undefined;
  /**
   * Name or id of the service account that the key belongs to; it has that role. Unknown: NotFound.
   */
  readonly serviceAccount?: string | undefined;
  /**
   * The key belongs to the person who makes this call; it has no role, or that of the person. A
   * caller without a person: InvalidRequest.
   */
  readonly own?: boolean | undefined;
}

/** Options of `rotateApiKey`. */
export interface RotateApiKeyOptions extends CallOptionsOf {
  /** Remaining validity of the present secret, 0 to 30 days. Unset: 24 hours. */
  readonly overlapMs?: number | undefined;
  /** Idempotency key: see the service. Not a UUID: InvalidRequest. */
  readonly requestId?: string | undefined;
}

/** Options of `updateApiKey`. */
export interface UpdateApiKeyOptions extends CallOptionsOf {
  /** New name, 1 to 100 characters. */
  readonly name?: string | undefined;
  /** New scopes. Empty: unchanged. */
  readonly scopes?: readonly string[] | undefined;
  /** New time of expiry; a time in the past ends the key now. */
  readonly expireTime?: Date | undefined;
  /** Removes the expiry. With `expire_time`: InvalidRequest. */
  readonly neverExpires?: boolean | undefined;
  /** New models. Empty: unchanged. See `CreateApiKeyRequest.models`. */
  readonly models?: readonly string[] | undefined;
  /** Allows all models. With `models`: InvalidRequest. */
  readonly allModels?: boolean | undefined;
  /**
   * New limit, see `CreateApiKeyRequest.max_input_tokens`; 0: none. Running requests keep their
   * limit.
   */
  readonly maxInputTokens?: number | bigint | undefined;
  /**
   * New limit, see `CreateApiKeyRequest.max_output_tokens`; 0: none. Running requests keep their
   * limit.
   */
  readonly maxOutputTokens?: number | bigint | undefined;
  /**
   * New networks. Empty: unchanged. Running requests from other networks end in every process as
   * `failed` with the reason ADDRESS_NOT_ALLOWED and their final usage. InvalidRequest if this call
   * is made with the key from outside of them.
   */
  readonly allowedNetworks?: readonly string[] | undefined;
  /** Allows all networks. With `allowed_networks`: InvalidRequest. */
  readonly allNetworks?: boolean | undefined;
  /** New value, see `ApiKey.strict_parameters`. Unset: unchanged. */
  readonly strictParameters?: boolean | undefined;
  /**
   * New group, see `CreateApiKeyRequest.group`; empty: none. Unset: unchanged. The limits of the
   * new group count what the key has used in the current windows.
   */
  readonly group?: string | undefined;
  /** New role, see `CreateApiKeyRequest.role`; empty: none. Unset: unchanged. */
  readonly role?: string | undefined;
}

/** Options of `listApiKeys`. */
export interface ListApiKeysOptions extends CallOptionsOf {
  /** Name or id of an organization; empty: all. */
  readonly organization?: string | undefined;
  /** Id or prefix of a key: only this one. Unknown: NotFound. */
  readonly apiKey?: string | undefined;
  /**
   * Only keys that are not revoked and were not used for this long; keys whose uses are recorded
   * for less time are left out. Zero or negative: InvalidRequest.
   */
  readonly unusedForMs?: number | undefined;
  /** Number of items per call to the server, 1 to 1000. */
  readonly pageSize?: number | undefined;
  /** Only keys whose name or prefix begins with this, in upper or lower case. Empty: all. */
  readonly search?: string | undefined;
  /** Only keys in this state. Unset: all. */
  readonly state?: ApiKeyState | undefined;
}

/** Options of `setQuota`. */
export interface SetQuotaOptions extends CallOptionsOf {
  /** Limited model; empty: all models together. Unknown: NotFound. */
  readonly model?: string | undefined;
  /**
   * The limit is a default: each key created under its subject from then on gets a copy, and
   * nothing else is limited. Part of the limit's identity. InvalidRequest for a key.
   */
  readonly forNewKeys?: boolean | undefined;
  /**
   * False: shadow mode, counts and reports without refusing. Unset: unchanged; true for a new
   * limit.
   */
  readonly enforced?: boolean | undefined;
  /**
   * Thousandths that an uncached input token counts, 0 to 1,000,000. Unset: unchanged; 1000 for a
   * new limit. InvalidRequest for another value if the dimension does not count such tokens. The
   * usage of the current window is recounted.
   */
  readonly inputWeightMilli?: number | bigint | undefined;
  /**
   * Thousandths that a cached input token counts. Until the engine has reported the cached tokens,
   * the larger of both weights is held.
   */
  readonly cachedInputWeightMilli?: number | bigint | undefined;
  /** Thousandths that an output token counts. */
  readonly outputWeightMilli?: number | bigint | undefined;
  /**
   * Percentages that trigger an alert. Unset: unchanged; for a new limit per day, week, month or
   * lifetime 50, 80 and 100, none for any other. InvalidRequest for limits per minute or hour, on
   * rolling windows and on concurrency.
   */
  readonly alertAt?: readonly number[] | undefined;
  /**
   * The limit is a selector, "end_user", "label:KEY" or "key:GROUP": each end user, each value of
   * this label, or each key of this group within the organization or project gets a limit with
   * these terms, from its first request on. Part of the limit's identity. InvalidRequest for a key,
   * or with `for_new_keys`, `end_user` or `label`.
   */
  readonly forEach?: string | undefined;
  /**
   * Limits this end user within the organization or project, known or not. This limit replaces the
   * one of a selector and keeps its usage. Part of the limit's identity. Bad names, a key as
   * subject, or another of these fields: InvalidRequest.
   */
  readonly endUser?: string | undefined;
  /**
   * Limits the requests with this label, "KEY=VALUE", within the organization or project. Like
   * `end_user` in all else.
   */
  readonly label?: string | undefined;
  /**
   * Length of a rolling window, 1 to 44,640 (31 days), in whole sixtieths of full minutes: any
   * number up to 60, an even one up to 120. Part of the limit's identity. Required for dimensions
   * of a window; InvalidRequest for any other.
   */
  readonly windowMinutes?: number | undefined;
}

/** Options of `previewQuota`. */
export interface PreviewQuotaOptions extends CallOptionsOf {
  /** Limited model; empty: all models together. Unknown: NotFound. */
  readonly model?: string | undefined;
  /** Thousandths that an uncached input token counts. Unset: 1000. */
  readonly inputWeightMilli?: number | bigint | undefined;
  /** Thousandths that a cached input token counts. Unset: 1000. */
  readonly cachedInputWeightMilli?: number | bigint | undefined;
  /** Thousandths that an output token counts. Unset: 1000. */
  readonly outputWeightMilli?: number | bigint | undefined;
  /**
   * The limit is a selector, "end_user", "label:KEY" or "key:GROUP": each end user, each value of
   * this label, or each key of this group within the organization or project gets a limit with
   * these terms, from its first request on. Part of the limit's identity. InvalidRequest for a key,
   * or with `for_new_keys`, `end_user` or `label`. For "key:GROUP", the keys that are in the group
   * now.
   */
  readonly forEach?: string | undefined;
  /** Only this end user. */
  readonly endUser?: string | undefined;
  /** Only the requests with this label, "KEY=VALUE". */
  readonly label?: string | undefined;
  /** Length of a rolling window in minutes. See `SetQuotaRequest.window_minutes`. */
  readonly windowMinutes?: number | undefined;
  /**
   * First moment of the preview. Unset: seven days before `end_time`. More than 31 days before it:
   * InvalidRequest.
   */
  readonly startTime?: Date | undefined;
  /** End of the preview. Unset, or in the future: now. */
  readonly endTime?: Date | undefined;
}

/** Options of `setPrice`. */
export interface SetPriceOptions extends CallOptionsOf {
  /**
   * ISO 4217 code. Default: the organization's, or "USD". InvalidRequest for another one than the
   * organization's.
   */
  readonly currencyCode?: string | undefined;
  /** Picos per uncached input token, 0 or more. */
  readonly inputPicosPerToken: number | bigint;
  /** Picos per cached input token, 0 or more. */
  readonly cachedInputPicosPerToken: number | bigint;
  /** Picos per output token, 0 or more. */
  readonly outputPicosPerToken: number | bigint;
  /** Start of validity. Unset: now. */
  readonly effectiveTime?: Date | undefined;
  /** Idempotency key: see the service. Not a UUID: InvalidRequest. */
  readonly requestId?: string | undefined;
  /** Name or id of the organization for its own price; empty: the list price. Unknown: NotFound. */
  readonly organization?: string | undefined;
  /** Picos per embedded token, 0 or more. Unset: unchanged; at first 0. */
  readonly embeddingPicosPerToken?: number | bigint | undefined;
  /**
   * The batch tier's price in thousandths of these prices, 0 to 1,000,000, set as a second version.
   * Unset: unchanged; at first the same price. InvalidRequest, with the nearest valid values, if a
   * price would be a fraction of a pico.
   */
  readonly batchMultiplierMilli?: number | bigint | undefined;
  /**
   * Picos per output token of the model's thinking, 0 or more. Unset: as `output_picos_per_token`.
   */
  readonly reasoningPicosPerToken?: number | bigint | undefined;
}

/** Options of `withdrawPrice`. */
export interface WithdrawPriceOptions extends CallOptionsOf {
  /** Time from which the list price applies. Unset: now. In the past: InvalidRequest. */
  readonly effectiveTime?: Date | undefined;
  /** Idempotency key, as in `CreateOrganizationRequest`. Not a UUID: InvalidRequest. */
  readonly requestId?: string | undefined;
}

/** Options of `listPrices`. */
export interface ListPricesOptions extends CallOptionsOf {
  /** Name or id of an organization for its prices. Empty: list prices. Unknown: NotFound. */
  readonly organization?: string | undefined;
  /** Only this model; empty: all. */
  readonly model?: string | undefined;
  /** Only in this currency. Empty: the organization's; without an organization all. */
  readonly currencyCode?: string | undefined;
  /** At this time. Unset: now. */
  readonly time?: Date | undefined;
  /** Returns also all past and future versions. */
  readonly history?: boolean | undefined;
}

/** Options of `grantCredit`. */
export interface GrantCreditOptions extends CallOptionsOf {
  /** First month that it covers, as YYYY-MM. Empty: this one. */
  readonly firstMonth?: string | undefined;
  /** Last month that it covers. A past month: InvalidRequest. */
  readonly lastMonth: string;
  /** Reason, 1 to 500 characters; recorded in the ledger. */
  readonly reason: string;
  /** Idempotency key: see the service. Not a UUID: InvalidRequest. */
  readonly requestId?: string | undefined;
}

/** Options of `listCreditGrants`. */
export interface ListCreditGrantsOptions extends CallOptionsOf {
  /** Name or id of an organization; empty: all. Unknown: NotFound. */
  readonly organization?: string | undefined;
  /** Number of items per call to the server, 1 to 1000. */
  readonly pageSize?: number | undefined;
}

/** Options of `setPrepaid`. */
export interface SetPrepaidOptions extends CallOptionsOf {
  /**
   * Remaining picos of credit that trigger an alert. Unset: unchanged; at first none.
   * InvalidRequest if `prepaid` is false.
   */
  readonly alertAt?: readonly number[] | undefined;
}

/** Options of `listLiveRequests`. */
export interface ListLiveRequestsOptions extends CallOptionsOf {
  /** Name or id of an organization; empty: all. Unknown: NotFound. */
  readonly organization?: string | undefined;
  /** Largest number of requests, 1 to 1000. Default 200. Sums cover all requests. */
  readonly pageSize?: number | undefined;
  /** Only holds that are overdue by more than 30 s. Always none while a worker runs. */
  readonly stuckOnly?: boolean | undefined;
}

/** Options of `getRequest`. */
export interface GetRequestOptions extends CallOptionsOf {
  /**
   * Its project, as "organization/project" or id. Required if several projects have a request of
   * this id: InvalidRequest otherwise.
   */
  readonly project?: string | undefined;
}

/** Options of `killRequest`. */
export interface KillRequestOptions extends CallOptionsOf {
  /**
   * Its project, as "organization/project" or id. Required if several projects run a request of
   * this id: InvalidRequest otherwise.
   */
  readonly project?: string | undefined;
  /** Reason, for its client and for the audit log; up to 200 printable characters. May be empty. */
  readonly reason?: string | undefined;
}

/** Options of `applyConfiguration`. */
export interface ApplyConfigurationOptions extends CallOptionsOf {
  /** Returns the changes without applying them. */
  readonly dryRun?: boolean | undefined;
}

/** Options of `listReplicas`. */
export interface ListReplicasOptions extends CallOptionsOf {
  /** Name of a model, or `name@version`; empty: all. Unknown: NotFound. */
  readonly model?: string | undefined;
}

/** Options of `drainReplica`. */
export interface DrainReplicaOptions extends CallOptionsOf {
  /** Reason, for the audit log and lists of replicas; up to 200 printable characters. */
  readonly reason?: string | undefined;
  /**
   * Time after the order, 0 to 30 days, when running requests move to other replicas: each as soon
   * as one has room, and only those that can continue elsewhere. The others run to their end.
   * Unset: all run to their end.
   */
  readonly moveAfterMs?: number | undefined;
}

/** Options of `undrainReplica`. */
export interface UndrainReplicaOptions extends CallOptionsOf {
  /** Reason, for the audit log; up to 200 printable characters. */
  readonly reason?: string | undefined;
}

/** Options of `setAlertWebhook`. */
export interface SetAlertWebhookOptions extends CallOptionsOf {
  /** Idempotency key: see the service. Not a UUID: InvalidRequest. */
  readonly requestId?: string | undefined;
}

/** Options of `listAlertWebhooks`. */
export interface ListAlertWebhooksOptions extends CallOptionsOf {
  /** Name or id of an organization; empty: all. Unknown: NotFound. */
  readonly organization?: string | undefined;
  /** Number of items per call to the server, 1 to 1000. */
  readonly pageSize?: number | undefined;
}

/** Options of `deleteAlertWebhook`. */
export interface DeleteAlertWebhookOptions extends CallOptionsOf {
  /** Succeeds instead of NotFound if the organization has no webhook. */
  readonly allowMissing?: boolean | undefined;
}

/** Options of `testAlertWebhook`. */
export interface TestAlertWebhookOptions extends CallOptionsOf {
  /** Idempotency key: see the service. Not a UUID: InvalidRequest. */
  readonly requestId?: string | undefined;
}

/** Options of `eraseEndUser`. */
export interface EraseEndUserOptions extends CallOptionsOf {
  /** Succeeds instead of NotFound if nothing has the name. */
  readonly allowMissing?: boolean | undefined;
}

/** Options of `createTokenIssuer`. */
export interface CreateTokenIssuerOptions extends CallOptionsOf {
  /**
   * Accepted algorithms, such as "ES256". Empty: all asymmetric ones. Unknown or symmetric:
   * InvalidRequest.
   */
  readonly algorithms?: readonly string[] | undefined;
  /** URL of the issuer's public keys. Empty, without `keys`: its discovery document has it. */
  readonly keysUrl?: string | undefined;
  /**
   * Public keys as a JSON Web Key Set. Empty: they are read from the issuer. Up to 65,536
   * characters. With `keys_url`: InvalidRequest.
   */
  readonly keys?: string | undefined;
  /** By how much the clocks of issuer and service may differ. 0 to 300 s. Unset: 30 s. */
  readonly leewayMs?: number | undefined;
  /** Longest life of a token, from `iat` to `exp`. 1 s to 24 hours. Unset: 1 hour. */
  readonly lifetimeMaxMs?: number | undefined;
  /** Required header `typ`, such as "at+jwt". Empty: "JWT", "at+jwt" or none. */
  readonly tokenType?: string | undefined;
  /** True if tokens without `jti` are refused. */
  readonly requiresId?: boolean | undefined;
  /** Claim that chooses the project. Empty: there is one project. */
  readonly projectClaim?: string | undefined;
  /** Claim that names the end user, such as "sub". Empty: requests name it. */
  readonly endUserClaim?: string | undefined;
  /** Claim with the allowed models, a list or a text with blanks. Empty: those of the key. */
  readonly modelsClaim?: string | undefined;
  /** Claim with the output tokens per request. Empty: the key's limit. */
  readonly maxOutputTokensClaim?: string | undefined;
  /** Claims that become labels of each request. At most 8. */
  readonly labelClaims?: readonly string[] | undefined;
  /** Models of the bound keys. Empty: all. */
  readonly models?: readonly string[] | undefined;
  /** Input tokens per request of the bound keys; 0: no limit. */
  readonly maxInputTokens?: number | bigint | undefined;
  /** Output tokens per request of the bound keys; 0: no limit. */
  readonly maxOutputTokens?: number | bigint | undefined;
  /** Networks that the tokens may be used from. Empty: all. */
  readonly allowedNetworks?: readonly string[] | undefined;
  /** Group of the bound keys. Empty: none. */
  readonly group?: string | undefined;
  /** Idempotency key: see the service. Not a UUID: InvalidRequest. */
  readonly requestId?: string | undefined;
  /**
   * True if each token is good for one call: the second one is refused, even on another server.
   * True implies `requires_id`.
   */
  readonly singleUse?: boolean | undefined;
}

/** Options of `deleteTokenIssuer`. */
export interface DeleteTokenIssuerOptions extends CallOptionsOf {
  /** Succeeds instead of NotFound. */
  readonly allowMissing?: boolean | undefined;
}

/** Options of `listTokenIssuers`. */
export interface ListTokenIssuersOptions extends CallOptionsOf {
  /** Name or id of an organization; empty: all. Unknown: NotFound. */
  readonly organization?: string | undefined;
  /** Number of items per call to the server, 1 to 1000. */
  readonly pageSize?: number | undefined;
}

/** Options of `getFleet`. */
export interface GetFleetOptions extends CallOptionsOf {
  /** Number; 0: the version in force. Unknown: NotFound. */
  readonly number?: number | bigint | undefined;
}

/** Options of `applyFleet`. */
export interface ApplyFleetOptions extends CallOptionsOf {
  /**
   * The whole fleet, as YAML with the keys of a fleet file. `engine_config` cannot name a file
   * here.
   */
  readonly document?: string | undefined;
  /**
   * Absolute path, on the machines of the servers, at which relative paths of the document start.
   * Empty: the document has absolute paths only. InvalidRequest for a relative one.
   */
  readonly baseDirectory?: string | undefined;
  /**
   * Uses the fleet of the settings of the process that answers instead of `document`, which must be
   * empty then: InvalidRequest otherwise.
   */
  readonly fromSettings?: boolean | undefined;
  /**
   * Number of the version that this one is to follow; 0: none is stored. InvalidRequest if another
   * one is in force by now. Unset: whichever is in force.
   */
  readonly expectedNumber?: number | bigint | undefined;
  /** Checks the document and returns the changes, but makes none. */
  readonly dryRun?: boolean | undefined;
  /** Reason, for the audit log and lists of versions; up to 200 printable characters. */
  readonly reason?: string | undefined;
  /** Idempotency key: see the service. Not a UUID: InvalidRequest. */
  readonly requestId?: string | undefined;
}

/** Options of `listFleetVersions`. */
export interface ListFleetVersionsOptions extends CallOptionsOf {
  /** Largest number of versions, 1 to 1000. Default 100. */
  readonly pageSize?: number | undefined;
  /** Only versions with a smaller number; 0: from the newest. */
  readonly beforeNumber?: number | bigint | undefined;
}

/** Options of `listMembers`. */
export interface ListMembersOptions extends CallOptionsOf {
  /** Only addresses that begin with this. */
  readonly search?: string | undefined;
  /** Number of items per call to the server, 1 to 1000. */
  readonly pageSize?: number | undefined;
}

/** Options of `listInvitations`. */
export interface ListInvitationsOptions extends CallOptionsOf {
  /** Number of items per call to the server, 1 to 1000. */
  readonly pageSize?: number | undefined;
}

/** Options of `listServiceAccounts`. */
export interface ListServiceAccountsOptions extends CallOptionsOf {
  /** Number of items per call to the server, 1 to 1000. */
  readonly pageSize?: number | undefined;
}

/** Options of `listProvisionedGroups`. */
export interface ListProvisionedGroupsOptions extends CallOptionsOf {
  /** Number of items per call to the server, 1 to 1000. */
  readonly pageSize?: number | undefined;
}

/** Options of `listPersons`. */
export interface ListPersonsOptions extends CallOptionsOf {
  /** Only addresses that begin with this. */
  readonly search?: string | undefined;
  /** Number of items per call to the server, 1 to 1000. */
  readonly pageSize?: number | undefined;
}

/** Options of `inviteMember`. */
export interface InviteMemberOptions extends CallOptionsOf {
  /** Name or id of the project of the member. Empty: the oldest project. */
  readonly project?: string | undefined;
  /** Lifetime of the token, at most 30 days. Unset: 7 days. */
  readonly lifetimeMs?: number | undefined;
  /** Idempotency key: see the service. Not a UUID: InvalidRequest. */
  readonly requestId?: string | undefined;
}

/** Options of `resendInvitation`. */
export interface ResendInvitationOptions extends CallOptionsOf {
  /** Lifetime of the new token, at most 30 days. Unset: 7 days. */
  readonly lifetimeMs?: number | undefined;
}

/** Options of `revokeInvitation`. */
export interface RevokeInvitationOptions extends CallOptionsOf {
  /** Succeeds instead of NotFound if there is no such invitation. */
  readonly allowMissing?: boolean | undefined;
}

/** Options of `acceptInvitation`. */
export interface AcceptInvitationOptions extends CallOptionsOf {
  /**
   * Name of the person, at most 100 characters. Empty: the part of the address before the "@". The
   * name of a member of another organization stays.
   */
  readonly displayName?: string | undefined;
  /** Also creates a key with a secret, of the same role, which belongs to the person. */
  readonly createKey?: boolean | undefined;
}

/** Options of `removeMember`. */
export interface RemoveMemberOptions extends CallOptionsOf {
  /**
   * Whether to revoke the active keys that the person created for others than itself. Unset while
   * there are any: InvalidRequest, which lists them. The person's own keys are always revoked.
   */
  readonly revokeKeys?: boolean | undefined;
}

/** Options of `createServiceAccount`. */
export interface CreateServiceAccountOptions extends CallOptionsOf {
  /**
   * Role of its keys: see `ApiKey.role`. Empty: its keys are for models. More than the caller has:
   * PermissionDenied, ROLE_EXCEEDED.
   */
  readonly role?: string | undefined;
  /** Idempotency key: see the service. Not a UUID: InvalidRequest. */
  readonly requestId?: string | undefined;
}

/** Options of `deleteServiceAccount`. */
export interface DeleteServiceAccountOptions extends CallOptionsOf {
  /** Succeeds instead of NotFound if there is no such service account. */
  readonly allowMissing?: boolean | undefined;
}

/** Options of `createSignInLink`. */
export interface CreateSignInLinkOptions extends CallOptionsOf {
  /** How long the link works: more than zero, at most a day. Default: 15 minutes. */
  readonly lifetimeMs?: number | undefined;
}

/** Options of `erasePerson`. */
export interface ErasePersonOptions extends CallOptionsOf {
  /** Erases nothing, and returns what would be erased. */
  readonly dryRun?: boolean | undefined;
}

/** Options of `setGroupRole`. */
export interface SetGroupRoleOptions extends CallOptionsOf {
  /**
   * Name or id of the project of the members; a developer has access to no other. Empty: the oldest
   * project.
   */
  readonly project?: string | undefined;
}

/** Options of `getTraffic`. */
export interface GetTrafficOptions extends CallOptionsOf {
  /** The period. Not listed: InvalidRequest. */
  readonly period?: TrafficPeriod | undefined;
}

/** Options of `closeMonth`. */
export interface CloseMonthOptions extends CallOptionsOf {
  /**
   * Closes even while requests admitted in the month still run; they are billed in the month of
   * their end.
   */
  readonly leaveRunning?: boolean | undefined;
  /** Only returns the obstacles, and changes nothing. */
  readonly validateOnly?: boolean | undefined;
  /**
   * Closes even before the customer's first month: months are closed in order, so the empty months
   * between must then be closed as well. Otherwise such a month is refused as MONTH_BEFORE_FIRST.
   */
  readonly beforeFirst?: boolean | undefined;
  /**
   * Id of an approved adjustment of exactly the cost of the usage reported as USAGE_MISSTATED: that
   * usage is billed by the adjustment, and never rated. With an adjustment that does not match, the
   * obstacle remains and has the reason.
   */
  readonly correctedBy?: string | undefined;
}

/** Options of `createAdjustment`. */
export interface CreateAdjustmentOptions extends CallOptionsOf {
  /**
   * Idempotency key, a UUID: repeating the call returns the same adjustment. Empty: each call
   * proposes another one.
   */
  readonly requestId?: string | undefined;
}

/** Options of `createCreditNote`. */
export interface CreateCreditNoteOptions extends CallOptionsOf {
  /** As in `CreateAdjustmentRequest`. */
  readonly requestId?: string | undefined;
}

/** Options of `listAdjustments`. */
export interface ListAdjustmentsOptions extends CallOptionsOf {
  /** Only pending ones. */
  readonly undecidedOnly?: boolean | undefined;
  /** Number of items per call to the server, 1 to 1000. */
  readonly pageSize?: number | undefined;
}

/** Options of `getEndUser`. */
export interface GetEndUserOptions extends CallOptionsOf {
  /** Name or id of the organization; empty: the key's own. Unknown: NotFound. */
  readonly organization?: string | undefined;
}

/** Options of `getForecast`. */
export interface GetForecastOptions extends CallOptionsOf {
  /** Name or id of the organization; unknown: NotFound. Empty: the key's own. */
  readonly organization?: string | undefined;
  /**
   * The month as YYYY-MM, in UTC: the current one or an earlier one. Empty: the current one. Later:
   * InvalidRequest.
   */
  readonly month?: string | undefined;
}

/** Options of `setResalePrice`. */
export interface SetResalePriceOptions extends CallOptionsOf {
  /** Name or id of the organization; empty: the key's own. Unknown: NotFound. */
  readonly organization?: string | undefined;
  /** The model; empty: all models without a version of their own. */
  readonly model?: string | undefined;
  /**
   * Thousandths of the organization's cost, 0 to 1000000. Unset: 1000, the cost itself. Required
   * unless a price is given.
   */
  readonly markupMilli?: number | bigint | undefined;
  /** Picos per uncached input token. Unset: the markup. */
  readonly inputPicosPerToken?: number | bigint | undefined;
  /** Picos per cached input token. Unset: the markup. */
  readonly cachedInputPicosPerToken?: number | bigint | undefined;
  /** Picos per output token that is not thinking. Unset: the markup. */
  readonly outputPicosPerToken?: number | bigint | undefined;
  /** Picos per output token of the model's thinking. Unset: as output. */
  readonly reasoningPicosPerToken?: number | bigint | undefined;
  /** Picos per embedded token. Unset: the markup. */
  readonly embeddingPicosPerToken?: number | bigint | undefined;
  /** Picos per request, beside its tokens. Unset: 0. */
  readonly requestPicos?: number | bigint | undefined;
  /** Ends the price instead. NotFound if there is none at that time. */
  readonly withdrawn?: boolean | undefined;
  /**
   * Start of validity. Unset: now. In the past: InvalidRequest. As another version of the model:
   * AlreadyExists.
   */
  readonly effectiveTime?: Date | undefined;
  /** Idempotency key: a UUID. A repetition returns the version of the first call. */
  readonly requestId?: string | undefined;
  /** Picos per hour of each rented replica of the model. Unset: 0. */
  readonly replicaHourPicos?: number | bigint | undefined;
}

/** Options of `rentReplicas`. */
export interface RentReplicasOptions extends CallOptionsOf {
  /** Number of replicas, 1 to 1000. */
  readonly replicaCount?: number | bigint | undefined;
  /** Name or id of the organization; empty: the key's own. Unknown: NotFound. */
  readonly organization?: string | undefined;
  /** Start, a whole second. Unset: now. InvalidRequest in a closed month. */
  readonly startTime?: Date | undefined;
  /** End, a whole second after the start. Unset: open, until EndReplicaRental. */
  readonly endTime?: Date | undefined;
  /** Idempotency key: a UUID. A repetition returns the rental of the first call. */
  readonly requestId?: string | undefined;
}

/** Options of `endReplicaRental`. */
export interface EndReplicaRentalOptions extends CallOptionsOf {
  /**
   * End, a whole second. Unset: now, and no change if it has ended. The start itself cancels the
   * rental. InvalidRequest before the start and in a closed month; AlreadyExists if it then
   * overlaps with another rental.
   */
  readonly endTime?: Date | undefined;
  /** Name or id of the organization; empty: the key's own. Unknown: NotFound. */
  readonly organization?: string | undefined;
}

/** Calls of `AdminService` that need no code of their own. */
export class AdminCalls extends UnaryClient {
  /**
   * Creates an organization. AlreadyExists if the name is taken.
   *
   * @param name Unique name: 1 to 63 of a-z, 0-9 and "-", starting with a letter.
   */
  async createOrganization(
    name: string,
    options: CreateOrganizationOptions = {},
  ): Promise<Organization> {
    const init = defined({
      name: name,
      currencyCode: options.currencyCode,
      requestId: options.requestId ?? randomUUID(),
      allowExisting: options.allowExisting,
    });
    const method = AdminService.method.createOrganization;
    const response = await this.connection.call(method, init, options);
    return wire.organization(response.organization);
  }

  /**
   * Renames an organization. Its id, keys, limits and bills stay; documents of closed months keep
   * the former name. AlreadyExists if the name is taken.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param name The new name: see `Organization.name`.
   */
  async updateOrganization(
    organization: string,
    name: string,
    options: CallOptionsOf = {},
  ): Promise<Organization> {
    const init = defined({
      organization: organization,
      name: name,
    });
    const method = AdminService.method.updateOrganization;
    const response = await this.connection.call(method, init, options);
    return wire.organization(response.organization);
  }

  /**
   * Suspends an organization: calls of `InferenceService` with its keys are refused, and its
   * running requests end in every process as `failed`, with the reason ORGANIZATION_SUSPENDED and
   * their final usage. Other calls work. Idempotent.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param reason Why: 1 to 200 printable characters. Its callers read it in each refusal.
   */
  async suspendOrganization(
    organization: string,
    reason: string,
    options: CallOptionsOf = {},
  ): Promise<Organization> {
    const init = defined({
      organization: organization,
      reason: reason,
    });
    const method = AdminService.method.suspendOrganization;
    const response = await this.connection.call(method, init, options);
    return wire.organization(response.organization);
  }

  /**
   * Ends the suspension of an organization. Idempotent.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   */
  async resumeOrganization(
    organization: string,
    options: CallOptionsOf = {},
  ): Promise<Organization> {
    const init = defined({
      organization: organization,
    });
    const method = AdminService.method.resumeOrganization;
    const response = await this.connection.call(method, init, options);
    return wire.organization(response.organization);
  }

  /**
   * Closes an organization for good: all of its keys are revoked, its running requests end in every
   * process as `failed` with the reason ORGANIZATION_CLOSED, its rentals end, and nothing opens it
   * again. Its months close as always, and all records stay. Idempotent.
   *
   * @param organization Name or id of the organization. Unknown: NotFound. One with keys of the
   * operator cannot be closed.
   */
  async closeOrganization(
    organization: string,
    options: CloseOrganizationOptions = {},
  ): Promise<ClosedOrganization> {
    const init = defined({
      organization: organization,
      confirmName: options.confirmName,
      reason: options.reason,
      remainingCredit:
        options.remainingCredit &&
        numberOf("remainingCredit", RemainingCreditMessage, options.remainingCredit),
      validateOnly: options.validateOnly,
    });
    const method = AdminService.method.closeOrganization;
    const response = await this.connection.call(method, init, options);
    return wire.closedOrganization(response);
  }

  /**
   * Binds an organization to a region of the fleet, or to none. Servers elsewhere refuse the calls
   * of its keys as PermissionDenied with the reason BOUND_TO_REGION, and its requests run only on
   * engines that are known to be there. Its running requests end in every process with that reason
   * and their final usage; after an unbinding they go on. Idempotent.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param region A region of the fleet; others: InvalidRequest. Empty: bound to none.
   */
  async bindOrganization(
    organization: string,
    region: string,
    options: CallOptionsOf = {},
  ): Promise<Organization> {
    const init = defined({
      organization: organization,
      region: region,
    });
    const method = AdminService.method.bindOrganization;
    const response = await this.connection.call(method, init, options);
    return wire.organization(response.organization);
  }

  /**
   * Lists organizations by name.
   */
  async *listOrganizations(
    options: ListOrganizationsOptions = {},
  ): AsyncGenerator<Organization, void, void> {
    const method = AdminService.method.listOrganizations;
    for (let pageToken = ""; ; ) {
      const init = defined({
        pageSize: options.pageSize ?? 100,
        search: options.search,
        organization: options.organization,
        pageToken,
      });
      const page = await this.connection.call(method, init, options);
      for (const each of page.organizations) yield wire.organization(each);
      if (page.nextPageToken === "") return;
      pageToken = page.nextPageToken;
    }
  }

  /**
   * Replaces the billing profile of an organization. Closed months keep the profile of their close.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param profile The whole profile: empty fields are cleared. Unset: all fields are cleared.
   */
  async setBillingProfile(
    organization: string,
    profile: Partial<BillingProfile>,
    options: CallOptionsOf = {},
  ): Promise<Organization> {
    const init = defined({
      organization: organization,
      billingProfile: { ...profile, emails: [...(profile.emails ?? [])] },
    });
    const method = AdminService.method.setBillingProfile;
    const response = await this.connection.call(method, init, options);
    return wire.organization(response.organization);
  }

  /**
   * Sets how much an organization counts in the fair queue. All api processes apply it within a
   * second, to waiting requests too. Idempotent.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param queueWeightMilli The weight in thousandths, 10 to 100,000: see
   * `Organization.queue_weight_milli`. Other values: InvalidRequest.
   */
  async setQueueWeight(
    organization: string,
    queueWeightMilli: number | bigint,
    options: CallOptionsOf = {},
  ): Promise<Organization> {
    const init = defined({
      organization: organization,
      queueWeightMilli: whole("queueWeightMilli", queueWeightMilli),
    });
    const method = AdminService.method.setQueueWeight;
    const response = await this.connection.call(method, init, options);
    return wire.organization(response.organization);
  }

  /**
   * Creates a project. AlreadyExists if the organization has a project of that name.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param name Unique name inside the organization, formed like an organization's.
   */
  async createProject(
    organization: string,
    name: string,
    options: CreateProjectOptions = {},
  ): Promise<Project> {
    const init = defined({
      organization: organization,
      name: name,
      requestId: options.requestId ?? randomUUID(),
      allowExisting: options.allowExisting,
    });
    const method = AdminService.method.createProject;
    const response = await this.connection.call(method, init, options);
    return wire.project(response.project);
  }

  /**
   * Renames a project. AlreadyExists if its organization has a project of that name.
   *
   * @param project "ORGANIZATION/NAME" or id of the project. Unknown: NotFound.
   * @param name The new name: see `Project.name`.
   */
  async updateProject(
    project: string,
    name: string,
    options: CallOptionsOf = {},
  ): Promise<Project> {
    const init = defined({
      project: project,
      name: name,
    });
    const method = AdminService.method.updateProject;
    const response = await this.connection.call(method, init, options);
    return wire.project(response.project);
  }

  /**
   * Suspends a project, as SuspendOrganization does; the reason is PROJECT_SUSPENDED. Idempotent.
   * What the operator suspended, others can neither change nor resume: InvalidRequest.
   *
   * @param project "ORGANIZATION/NAME" or id of the project. Unknown: NotFound.
   * @param reason Why: 1 to 200 printable characters. Its callers read it in each refusal.
   */
  async suspendProject(
    project: string,
    reason: string,
    options: CallOptionsOf = {},
  ): Promise<Project> {
    const init = defined({
      project: project,
      reason: reason,
    });
    const method = AdminService.method.suspendProject;
    const response = await this.connection.call(method, init, options);
    return wire.project(response.project);
  }

  /**
   * Ends the suspension of a project. Idempotent.
   *
   * @param project "ORGANIZATION/NAME" or id of the project. Unknown: NotFound.
   */
  async resumeProject(
    project: string,
    options: CallOptionsOf = {},
  ): Promise<Project> {
    const init = defined({
      project: project,
    });
    const method = AdminService.method.resumeProject;
    const response = await this.connection.call(method, init, options);
    return wire.project(response.project);
  }

  /**
   * Closes a project for good, as CloseOrganization does; the reason is PROJECT_CLOSED. Its usage
   * stays in the months of its organization. Idempotent.
   *
   * @param project "ORGANIZATION/NAME" or id of the project. Unknown: NotFound. One with keys of
   * the operator cannot be closed.
   */
  async closeProject(
    project: string,
    options: CloseProjectOptions = {},
  ): Promise<ClosedProject> {
    const init = defined({
      project: project,
      confirmName: options.confirmName,
      reason: options.reason,
      validateOnly: options.validateOnly,
    });
    const method = AdminService.method.closeProject;
    const response = await this.connection.call(method, init, options);
    return wire.closedProject(response);
  }

  /**
   * Reads the audit log after a position, oldest first, for another system. A reader that continues
   * with the returned position gets every entry exactly once, even if a change commits late.
   */
  async exportAuditEntries(
    options: ExportAuditEntriesOptions = {},
  ): Promise<AuditPage> {
    const init = defined({
      afterEntryId: whole("afterEntryId", options.afterEntryId),
      pageSize: options.pageSize,
    });
    const method = AdminService.method.exportAuditEntries;
    const response = await this.connection.call(method, init, options);
    return wire.auditPage(response);
  }

  /**
   * Lists the projects of an organization by name.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   */
  async *listProjects(
    organization: string,
    options: ListProjectsOptions = {},
  ): AsyncGenerator<Project, void, void> {
    const method = AdminService.method.listProjects;
    for (let pageToken = ""; ; ) {
      const init = defined({
        organization: organization,
        pageSize: options.pageSize ?? 100,
        search: options.search,
        pageToken,
      });
      const page = await this.connection.call(method, init, options);
      for (const each of page.projects) yield wire.project(each);
      if (page.nextPageToken === "") return;
      pageToken = page.nextPageToken;
    }
  }

  /**
   * Creates an API key. Its secret is returned only in this response.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param project Name or id of the project in it. Unknown: NotFound.
   * @param name Display name, 1 to 100 characters.
   */
  async createApiKey(
    organization: string,
    project: string,
    name: string,
    options: CreateApiKeyOptions = {},
  ): Promise<CreatedApiKey> {
    const init = defined({
      organization: organization,
      project: project,
      name: name,
      scopes: options.scopes && [...options.scopes],
      lifetime: duration("lifetimeMs", options.lifetimeMs),
      requestId: options.requestId,
      allowExisting: options.allowExisting,
      models: options.models && [...options.models],
      maxInputTokens: whole("maxInputTokens", options.maxInputTokens),
      maxOutputTokens: whole("maxOutputTokens", options.maxOutputTokens),
      allowedNetworks: options.allowedNetworks && [...options.allowedNetworks],
      strictParameters: options.strictParameters,
      group: options.group,
      role: options.role,
      serviceAccount: options.serviceAccount,
      own: options.own,
    });
    const method = AdminService.method.createApiKey;
    const response = await this.connection.call(method, init, options, false);
    return wire.createdApiKey(response);
  }

  /**
   * Replaces the secret of an API key; the new one is returned only in this response. The old
   * secret works for an overlap. Id, prefix, limits and counters stay. FailedPrecondition for a
   * revoked key.
   *
   * @param apiKey Id or prefix of the key. Unknown: NotFound.
   */
  async rotateApiKey(
    apiKey: string,
    options: RotateApiKeyOptions = {},
  ): Promise<RotatedApiKey> {
    const init = defined({
      apiKey: apiKey,
      overlap: duration("overlapMs", options.overlapMs),
      requestId: options.requestId,
    });
    const method = AdminService.method.rotateApiKey;
    const response = await this.connection.call(method, init, options, false);
    return wire.rotatedApiKey(response);
  }

  /**
   * Changes the name, expiry or permissions of an API key. FailedPrecondition for a revoked key.
   *
   * @param apiKey Id or prefix of the key. Unknown: NotFound.
   */
  async updateApiKey(
    apiKey: string,
    options: UpdateApiKeyOptions = {},
  ): Promise<ApiKey> {
    const init = defined({
      apiKey: apiKey,
      name: options.name,
      scopes: options.scopes && [...options.scopes],
      expireTime: options.expireTime && timestampFromDate(options.expireTime),
      neverExpires: options.neverExpires,
      models: options.models && [...options.models],
      allModels: options.allModels,
      maxInputTokens: whole("maxInputTokens", options.maxInputTokens),
      maxOutputTokens: whole("maxOutputTokens", options.maxOutputTokens),
      allowedNetworks: options.allowedNetworks && [...options.allowedNetworks],
      allNetworks: options.allNetworks,
      strictParameters: options.strictParameters,
      group: options.group,
      role: options.role,
    });
    const method = AdminService.method.updateApiKey;
    const response = await this.connection.call(method, init, options);
    return wire.apiKey(response.apiKey);
  }

  /**
   * Revokes an API key permanently: new calls with it are refused at once, and its running requests
   * end in every process as `failed` with the reason KEY_REVOKED and their final usage. Idempotent.
   *
   * @param apiKey Id or prefix of the key. Unknown: NotFound.
   */
  async revokeApiKey(
    apiKey: string,
    options: CallOptionsOf = {},
  ): Promise<ApiKey> {
    const init = defined({
      apiKey: apiKey,
    });
    const method = AdminService.method.revokeApiKey;
    const response = await this.connection.call(method, init, options);
    return wire.apiKey(response.apiKey);
  }

  /**
   * Lists API keys, newest first, without their secrets.
   */
  async *listApiKeys(
    options: ListApiKeysOptions = {},
  ): AsyncGenerator<ApiKey, void, void> {
    const method = AdminService.method.listApiKeys;
    for (let pageToken = ""; ; ) {
      const init = defined({
        organization: options.organization,
        apiKey: options.apiKey,
        unusedFor: duration("unusedForMs", options.unusedForMs),
        pageSize: options.pageSize ?? 100,
        search: options.search,
        state: options.state && numberOf("state", ApiKeyStateMessage, options.state),
        pageToken,
      });
      const page = await this.connection.call(method, init, options);
      for (const each of page.apiKeys) yield wire.apiKey(each);
      if (page.nextPageToken === "") return;
      pageToken = page.nextPageToken;
    }
  }

  /**
   * Sets one limit; it replaces a limit of the same subject, model and dimension. Past usage
   * counts.
   *
   * @param subject Kind of the object that the limit applies to; `subject_ref` names it.
   * @param subjectRef Organization: its name or id. Project: "organization/project" or its id. Key:
   * its id or prefix. Unknown: NotFound.
   * @param dimension What the limit counts, and over which window of time.
   * @param limitValue The limit, 0 or more. 0 admits nothing. A limit above an inherited one is
   * allowed but has no effect: see `narrowed_by_quota_id`.
   */
  async setQuota(
    subject: QuotaSubject,
    subjectRef: string,
    dimension: QuotaDimension,
    limitValue: number | bigint,
    options: SetQuotaOptions = {},
  ): Promise<QuotaStatus> {
    const init = defined({
      subject: numberOf("subject", QuotaSubjectMessage, subject),
      subjectRef: subjectRef,
      dimension: numberOf("dimension", QuotaDimensionMessage, dimension),
      limitValue: whole("limitValue", limitValue),
      model: options.model,
      forNewKeys: options.forNewKeys,
      enforced: options.enforced,
      inputWeightMilli: whole("inputWeightMilli", options.inputWeightMilli),
      cachedInputWeightMilli: whole("cachedInputWeightMilli", options.cachedInputWeightMilli),
      outputWeightMilli: whole("outputWeightMilli", options.outputWeightMilli),
      alertAt: options.alertAt && { values: options.alertAt.map(BigInt) },
      forEach: options.forEach,
      endUser: options.endUser,
      label: options.label,
      windowMinutes: options.windowMinutes,
    });
    const method = AdminService.method.setQuota;
    const response = await this.connection.call(method, init, options);
    return wire.quotaStatus(response.quota);
  }

  /**
   * Returns what a limit would have refused in the past, if it had been set then: the recorded
   * requests are admitted again, by the rules of admissions. Changes nothing.
   *
   * @param subject Kind of the object that the limit applies to; `subject_ref` names it.
   * @param subjectRef Organization: its name or id. Project: "organization/project" or its id. Key:
   * its id or prefix. Unknown: NotFound.
   * @param dimension What the limit counts, and over which window of time.
   * @param limitValue The limit, 0 or more.
   */
  async previewQuota(
    subject: QuotaSubject,
    subjectRef: string,
    dimension: QuotaDimension,
    limitValue: number | bigint,
    options: PreviewQuotaOptions = {},
  ): Promise<QuotaPreview> {
    const init = defined({
      subject: numberOf("subject", QuotaSubjectMessage, subject),
      subjectRef: subjectRef,
      dimension: numberOf("dimension", QuotaDimensionMessage, dimension),
      limitValue: whole("limitValue", limitValue),
      model: options.model,
      inputWeightMilli: whole("inputWeightMilli", options.inputWeightMilli),
      cachedInputWeightMilli: whole("cachedInputWeightMilli", options.cachedInputWeightMilli),
      outputWeightMilli: whole("outputWeightMilli", options.outputWeightMilli),
      forEach: options.forEach,
      endUser: options.endUser,
      label: options.label,
      windowMinutes: options.windowMinutes,
      startTime: options.startTime && timestampFromDate(options.startTime),
      endTime: options.endTime && timestampFromDate(options.endTime),
    });
    const method = AdminService.method.previewQuota;
    const response = await this.connection.call(method, init, options);
    return wire.quotaPreview(response);
  }

  /**
   * Overrides a limit with a higher one until a time, or ends the override. Idempotent.
   *
   * @param quotaId Id of the limit. Unknown: NotFound. InvalidRequest for one that a selector
   * gives: override the selector, or set a limit of this end user or label.
   * @param limitValue The temporary limit, above the regular one: InvalidRequest otherwise.
   * @param expireTime End of the override, within 366 days, by the database's clock. Unset: ends
   * the present override.
   * @param reason Reason, 1 to 500 characters; shown with the limit and recorded in the audit log.
   */
  async overrideQuota(
    quotaId: string,
    limitValue: number | bigint,
    expireTime: Date,
    reason: string,
    options: CallOptionsOf = {},
  ): Promise<QuotaStatus> {
    const init = defined({
      quotaId: quotaId,
      limitValue: whole("limitValue", limitValue),
      expireTime: timestampFromDate(expireTime),
      reason: reason,
    });
    const method = AdminService.method.overrideQuota;
    const response = await this.connection.call(method, init, options);
    return wire.quotaStatus(response.quota);
  }

  /**
   * Adds a price version. Past prices never change: InvalidRequest for an effective time in the
   * past.
   *
   * @param model The model. Unknown models are allowed, so that a price can be set before a model
   * appears.
   */
  async setPrice(
    model: string,
    options: SetPriceOptions,
  ): Promise<PriceVersion[]> {
    const init = defined({
      model: model,
      currencyCode: options.currencyCode,
      inputPicosPerToken: whole("inputPicosPerToken", options.inputPicosPerToken),
      cachedInputPicosPerToken: whole("cachedInputPicosPerToken", options.cachedInputPicosPerToken),
      outputPicosPerToken: whole("outputPicosPerToken", options.outputPicosPerToken),
      effectiveTime: options.effectiveTime && timestampFromDate(options.effectiveTime),
      requestId: options.requestId ?? randomUUID(),
      organization: options.organization,
      embeddingPicosPerToken: whole("embeddingPicosPerToken", options.embeddingPicosPerToken),
      batchMultiplierMilli: whole("batchMultiplierMilli", options.batchMultiplierMilli),
      reasoningPicosPerToken: whole("reasoningPicosPerToken", options.reasoningPicosPerToken),
    });
    const method = AdminService.method.setPrice;
    const response = await this.connection.call(method, init, options);
    return response.versions.map((each) => wire.priceVersion(each));
  }

  /**
   * Ends an organization's own price of a model: the list price applies from then on.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param model The model. NotFound if the organization has no own price of it at that time.
   */
  async withdrawPrice(
    organization: string,
    model: string,
    options: WithdrawPriceOptions = {},
  ): Promise<PriceVersion[]> {
    const init = defined({
      organization: organization,
      model: model,
      effectiveTime: options.effectiveTime && timestampFromDate(options.effectiveTime),
      requestId: options.requestId ?? randomUUID(),
    });
    const method = AdminService.method.withdrawPrice;
    const response = await this.connection.call(method, init, options);
    return response.versions.map((each) => wire.priceVersion(each));
  }

  /**
   * Lists the prices of an organization, or the list prices, by model and tier, with source and
   * start.
   */
  async listPrices(
    options: ListPricesOptions = {},
  ): Promise<PriceList> {
    const init = defined({
      organization: options.organization,
      model: options.model,
      currencyCode: options.currencyCode,
      time: options.time && timestampFromDate(options.time),
      history: options.history,
    });
    const method = AdminService.method.listPrices;
    const response = await this.connection.call(method, init, options);
    return wire.priceList(response);
  }

  /**
   * Grants an organization credit.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param amountPicos Amount in picos of the organization's currency, more than 0.
   */
  async grantCredit(
    organization: string,
    amountPicos: number | bigint,
    options: GrantCreditOptions,
  ): Promise<CreditGrant> {
    const init = defined({
      organization: organization,
      amountPicos: whole("amountPicos", amountPicos),
      firstMonth: options.firstMonth,
      lastMonth: options.lastMonth,
      reason: options.reason,
      requestId: options.requestId ?? randomUUID(),
    });
    const method = AdminService.method.grantCredit;
    const response = await this.connection.call(method, init, options);
    return wire.creditGrant(response.grant);
  }

  /**
   * Lists credit grants with their spent and remaining amounts.
   */
  async *listCreditGrants(
    options: ListCreditGrantsOptions = {},
  ): AsyncGenerator<CreditGrant, void, void> {
    const method = AdminService.method.listCreditGrants;
    for (let pageToken = ""; ; ) {
      const init = defined({
        organization: options.organization,
        pageSize: options.pageSize ?? 100,
        pageToken,
      });
      const page = await this.connection.call(method, init, options);
      for (const each of page.grants) yield wire.creditGrant(each);
      if (page.nextPageToken === "") return;
      pageToken = page.nextPageToken;
    }
  }

  /**
   * Returns an organization's current credit.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   */
  async getCreditBalance(
    organization: string,
    options: CallOptionsOf = {},
  ): Promise<CreditBalance> {
    const init = defined({
      organization: organization,
    });
    const method = AdminService.method.getCreditBalance;
    const response = await this.connection.call(method, init, options);
    return wire.creditBalance(response);
  }

  /**
   * Switches an organization to prepaid, limited to its credit, or back.
   *
   * @param organization Name or id of the organization. Unknown: NotFound. With a plan that has
   * rules: InvalidRequest.
   * @param prepaid True: requests are admitted only within the credit; beyond it
   * FailedPrecondition, reason INSUFFICIENT_CREDIT.
   */
  async setPrepaid(
    organization: string,
    prepaid: boolean,
    options: SetPrepaidOptions = {},
  ): Promise<boolean> {
    const init = defined({
      organization: organization,
      prepaid: prepaid,
      alertAt: options.alertAt && { values: options.alertAt.map(BigInt) },
    });
    const method = AdminService.method.setPrepaid;
    const response = await this.connection.call(method, init, options);
    return response.existed;
  }

  /**
   * Lists the live requests of all processes: owner, phase and usage, never content.
   */
  async listLiveRequests(
    options: ListLiveRequestsOptions = {},
  ): Promise<LiveView> {
    const init = defined({
      organization: options.organization,
      pageSize: options.pageSize,
      stuckOnly: options.stuckOnly,
    });
    const method = AdminService.method.listLiveRequests;
    const response = await this.connection.call(method, init, options);
    return wire.liveView(response);
  }

  /**
   * Returns one request of any project by its id: state, usage, cost and timings. NotFound if no
   * project has such a request, and for one that ended before any billable work.
   *
   * @param requestId Id chosen by the client. Not a UUID: InvalidRequest.
   */
  async getRequest(
    requestId: string,
    options: GetRequestOptions = {},
  ): Promise<RecordedRequest> {
    const init = defined({
      requestId: requestId,
      project: options.project,
    });
    const method = AdminService.method.getRequest;
    const response = await this.connection.call(method, init, options);
    return wire.recordedRequest(response);
  }

  /**
   * Ends a running request in any process. Its client gets `failed` with the reason
   * CANCELLED_BY_ADMIN and its final usage.
   *
   * @param requestId Id chosen by the client. Not a UUID: InvalidRequest. Unknown: NotFound.
   */
  async killRequest(
    requestId: string,
    options: KillRequestOptions = {},
  ): Promise<KilledRequest> {
    const init = defined({
      requestId: requestId,
      project: options.project,
      reason: options.reason,
    });
    const method = AdminService.method.killRequest;
    const response = await this.connection.call(method, init, options);
    return wire.killedRequest(response);
  }

  /**
   * Expires overdue holds, as the worker does every ten seconds.
   */
  async expireOverdueHolds(
    options: CallOptionsOf = {},
  ): Promise<number> {
    const init = defined({
    });
    const method = AdminService.method.expireOverdueHolds;
    const response = await this.connection.call(method, init, options);
    return wire.count(response.expiredCount);
  }

  /**
   * Applies a configuration of organizations, projects, keys, limits and prices, all or nothing.
   * Idempotent.
   *
   * @param configuration Desired state.
   */
  async applyConfiguration(
    configuration: JsonObject,
    options: ApplyConfigurationOptions = {},
  ): Promise<AppliedConfiguration> {
    const init = defined({
      configuration: fromJson(ConfigurationSchema, configuration),
      dryRun: options.dryRun,
    });
    const method = AdminService.method.applyConfiguration;
    const response = await this.connection.call(method, init, options, false);
    return wire.appliedConfiguration(response);
  }

  /**
   * Lists the engines of all models, in all processes, and the drain orders.
   */
  async listReplicas(
    options: ListReplicasOptions = {},
  ): Promise<ReplicaList> {
    const init = defined({
      model: options.model,
    });
    const method = AdminService.method.listReplicas;
    const response = await this.connection.call(method, init, options);
    return wire.replicaList(response);
  }

  /**
   * Drains a replica in all processes: running requests finish, new ones go elsewhere. Idempotent.
   *
   * @param model The model, as `name` or `name@version`. Unknown: NotFound. Several versions have a
   * replica of this name: InvalidRequest.
   * @param name Name of the replica, as in `ListReplicas`. No process has it: NotFound.
   */
  async drainReplica(
    model: string,
    name: string,
    options: DrainReplicaOptions = {},
  ): Promise<DrainedReplica> {
    const init = defined({
      model: model,
      replica: name,
      reason: options.reason,
      moveAfter: duration("moveAfterMs", options.moveAfterMs),
    });
    const method = AdminService.method.drainReplica;
    const response = await this.connection.call(method, init, options);
    return wire.drainedReplica(response);
  }

  /**
   * Returns a drained replica to service. Idempotent.
   *
   * @param model The model, as `name` or `name@version`. Unknown: NotFound. Several versions have a
   * replica of this name: InvalidRequest.
   * @param name Name of the replica. No process and no order has it: NotFound.
   */
  async undrainReplica(
    model: string,
    name: string,
    options: UndrainReplicaOptions = {},
  ): Promise<UndrainedReplica> {
    const init = defined({
      model: model,
      replica: name,
      reason: options.reason,
    });
    const method = AdminService.method.undrainReplica;
    const response = await this.connection.call(method, init, options);
    return wire.undrainedReplica(response);
  }

  /**
   * Posts an organization's alerts to a URL from now on, signed. The secret is returned only in
   * this response; setting the same URL again creates a new one.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param url URL to post alerts to: https, on a public address, up to 2000 characters;
   * InvalidRequest otherwise, unless the operator allows others. Host names are resolved and
   * checked at each attempt.
   */
  async setAlertWebhook(
    organization: string,
    url: string,
    options: SetAlertWebhookOptions = {},
  ): Promise<CreatedAlertWebhook> {
    const init = defined({
      organization: organization,
      url: url,
      requestId: options.requestId ?? randomUUID(),
    });
    const method = AdminService.method.setAlertWebhook;
    const response = await this.connection.call(method, init, options);
    return wire.createdAlertWebhook(response);
  }

  /**
   * Lists webhooks with their pending and failed deliveries.
   */
  async *listAlertWebhooks(
    options: ListAlertWebhooksOptions = {},
  ): AsyncGenerator<AlertWebhook, void, void> {
    const method = AdminService.method.listAlertWebhooks;
    for (let pageToken = ""; ; ) {
      const init = defined({
        organization: options.organization,
        pageSize: options.pageSize ?? 100,
        pageToken,
      });
      const page = await this.connection.call(method, init, options);
      for (const each of page.webhooks) yield wire.alertWebhook(each);
      if (page.nextPageToken === "") return;
      pageToken = page.nextPageToken;
    }
  }

  /**
   * Removes an organization's webhook. NotFound if it has none.
   *
   * @param organization Name or id of the organization. Unknown, or without a webhook: NotFound.
   */
  async deleteAlertWebhook(
    organization: string,
    options: DeleteAlertWebhookOptions = {},
  ): Promise<boolean> {
    const init = defined({
      organization: organization,
      allowMissing: options.allowMissing,
    });
    const method = AdminService.method.deleteAlertWebhook;
    const response = await this.connection.call(method, init, options);
    return response.deleted;
  }

  /**
   * Sends a test to an organization's webhook, and ends its pause after failures.
   *
   * @param organization Name or id of the organization. Unknown, or without a webhook: NotFound.
   */
  async testAlertWebhook(
    organization: string,
    options: TestAlertWebhookOptions = {},
  ): Promise<Alert> {
    const init = defined({
      organization: organization,
      requestId: options.requestId ?? randomUUID(),
    });
    const method = AdminService.method.testAlertWebhook;
    const response = await this.connection.call(method, init, options);
    return wire.alert(response.alert);
  }

  /**
   * Erases the name of an end user: its limits end, and labels with this value are removed from all
   * requests of the organization. Its usage stays in every sum, without a name. Running requests
   * continue. A later request with the name is one of a new end user. NotFound if nothing has the
   * name. After an interruption, the same call continues.
   *
   * @param organization Organization, by name or id.
   * @param endUser Its name, as requests gave it in `end_user`.
   */
  async eraseEndUser(
    organization: string,
    endUser: string,
    options: EraseEndUserOptions = {},
  ): Promise<ErasedEndUser> {
    const init = defined({
      organization: organization,
      endUser: endUser,
      allowMissing: options.allowMissing,
    });
    const method = AdminService.method.eraseEndUser;
    const response = await this.connection.call(method, init, options);
    return wire.erasedEndUser(response);
  }

  /**
   * Trusts an issuer: its tokens authenticate callers of an organization from now on.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param issuer URL of the issuer, exactly as in the claim `iss`. Https, on a public address,
   * unless the operator allows others. AlreadyExists if an issuer is trusted for the audience.
   * @param audience Audience that must be in the claim `aud`. 1 to 255 characters.
   * @param projects The project of the organization, by name or id. With a `project_claim`: up to
   * 50, each after the value of the claim, such as "team-7=search".
   */
  async createTokenIssuer(
    organization: string,
    issuer: string,
    audience: string,
    projects: readonly string[],
    options: CreateTokenIssuerOptions = {},
  ): Promise<TokenIssuer> {
    const init = defined({
      organization: organization,
      issuer: issuer,
      audience: audience,
      projects: [...projects],
      algorithms: options.algorithms && [...options.algorithms],
      keysUrl: options.keysUrl,
      keys: options.keys,
      leeway: duration("leewayMs", options.leewayMs),
      lifetimeMax: duration("lifetimeMaxMs", options.lifetimeMaxMs),
      tokenType: options.tokenType,
      requiresId: options.requiresId,
      projectClaim: options.projectClaim,
      endUserClaim: options.endUserClaim,
      modelsClaim: options.modelsClaim,
      maxOutputTokensClaim: options.maxOutputTokensClaim,
      labelClaims: options.labelClaims && [...options.labelClaims],
      models: options.models && [...options.models],
      maxInputTokens: whole("maxInputTokens", options.maxInputTokens),
      maxOutputTokens: whole("maxOutputTokens", options.maxOutputTokens),
      allowedNetworks: options.allowedNetworks && [...options.allowedNetworks],
      group: options.group,
      requestId: options.requestId ?? randomUUID(),
      singleUse: options.singleUse,
    });
    const method = AdminService.method.createTokenIssuer;
    const response = await this.connection.call(method, init, options);
    return wire.tokenIssuer(response.tokenIssuer);
  }

  /**
   * Trusts an issuer no more; requests with its tokens end in every process.
   *
   * @param tokenIssuer Id of the issuer. Unknown: NotFound.
   */
  async deleteTokenIssuer(
    tokenIssuer: string,
    options: DeleteTokenIssuerOptions = {},
  ): Promise<boolean> {
    const init = defined({
      tokenIssuerId: tokenIssuer,
      allowMissing: options.allowMissing,
    });
    const method = AdminService.method.deleteTokenIssuer;
    const response = await this.connection.call(method, init, options);
    return response.deleted;
  }

  /**
   * Lists trusted issuers.
   */
  async *listTokenIssuers(
    options: ListTokenIssuersOptions = {},
  ): AsyncGenerator<TokenIssuer, void, void> {
    const method = AdminService.method.listTokenIssuers;
    for (let pageToken = ""; ; ) {
      const init = defined({
        organization: options.organization,
        pageSize: options.pageSize ?? 100,
        pageToken,
      });
      const page = await this.connection.call(method, init, options);
      for (const each of page.tokenIssuers) yield wire.tokenIssuer(each);
      if (page.nextPageToken === "") return;
      pageToken = page.nextPageToken;
    }
  }

  /**
   * Revokes a token, or all of a session or subject; their requests end in every process.
   * Idempotent.
   *
   * @param tokenIssuer Id of the issuer. Unknown: NotFound.
   * @param claim The claim that names the tokens: "jti" for one token, "sid" for those of a
   * session, "sub" for those of a subject that were issued until now.
   * @param value Its value: 1 to 255 characters.
   */
  async revokeTokens(
    tokenIssuer: string,
    claim: string,
    value: string,
    options: CallOptionsOf = {},
  ): Promise<TokenRevocation> {
    const init = defined({
      tokenIssuerId: tokenIssuer,
      claim: claim,
      value: value,
    });
    const method = AdminService.method.revokeTokens;
    const response = await this.connection.call(method, init, options);
    return wire.tokenRevocation(response.revocation);
  }

  /**
   * Returns a version of the fleet, and the version that each process serves.
   */
  async getFleet(
    options: GetFleetOptions = {},
  ): Promise<ServedFleet> {
    const init = defined({
      number: whole("number", options.number),
    });
    const method = AdminService.method.getFleet;
    const response = await this.connection.call(method, init, options);
    return wire.servedFleet(response);
  }

  /**
   * Replaces the fleet as a whole, while everything runs: models, versions, weights, targets,
   * aliases and regions. A document with errors changes nothing and is answered with them.
   */
  async applyFleet(
    options: ApplyFleetOptions = {},
  ): Promise<AppliedFleet> {
    const init = defined({
      document: options.document,
      baseDirectory: options.baseDirectory,
      fromSettings: options.fromSettings,
      expectedNumber: whole("expectedNumber", options.expectedNumber),
      dryRun: options.dryRun,
      reason: options.reason,
      requestId: options.requestId ?? randomUUID(),
    });
    const method = AdminService.method.applyFleet;
    const response = await this.connection.call(method, init, options);
    return wire.appliedFleet(response);
  }

  /**
   * Lists the versions of the fleet, newest first.
   */
  async listFleetVersions(
    options: ListFleetVersionsOptions = {},
  ): Promise<FleetVersion[]> {
    const init = defined({
      pageSize: options.pageSize,
      beforeNumber: whole("beforeNumber", options.beforeNumber),
    });
    const method = AdminService.method.listFleetVersions;
    const response = await this.connection.call(method, init, options);
    return response.versions.map((each) => wire.fleetVersion(each));
  }

  /**
   * Lists the members of an organization.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   */
  async *listMembers(
    organization: string,
    options: ListMembersOptions = {},
  ): AsyncGenerator<Member, void, void> {
    const method = AdminService.method.listMembers;
    for (let pageToken = ""; ; ) {
      const init = defined({
        organization: organization,
        search: options.search,
        pageSize: options.pageSize ?? 100,
        pageToken,
      });
      const page = await this.connection.call(method, init, options);
      for (const each of page.members) yield wire.member(each);
      if (page.nextPageToken === "") return;
      pageToken = page.nextPageToken;
    }
  }

  /**
   * Lists the invitations of an organization that are neither accepted nor revoked.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   */
  async *listInvitations(
    organization: string,
    options: ListInvitationsOptions = {},
  ): AsyncGenerator<Invitation, void, void> {
    const method = AdminService.method.listInvitations;
    for (let pageToken = ""; ; ) {
      const init = defined({
        organization: organization,
        pageSize: options.pageSize ?? 100,
        pageToken,
      });
      const page = await this.connection.call(method, init, options);
      for (const each of page.invitations) yield wire.invitation(each);
      if (page.nextPageToken === "") return;
      pageToken = page.nextPageToken;
    }
  }

  /**
   * Lists the service accounts of an organization by name.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   */
  async *listServiceAccounts(
    organization: string,
    options: ListServiceAccountsOptions = {},
  ): AsyncGenerator<ServiceAccount, void, void> {
    const method = AdminService.method.listServiceAccounts;
    for (let pageToken = ""; ; ) {
      const init = defined({
        organization: organization,
        pageSize: options.pageSize ?? 100,
        pageToken,
      });
      const page = await this.connection.call(method, init, options);
      for (const each of page.serviceAccounts) yield wire.serviceAccount(each);
      if (page.nextPageToken === "") return;
      pageToken = page.nextPageToken;
    }
  }

  /**
   * Lists the groups that the identity provider of an organization provisions, and the roles that
   * are set for groups that do not exist yet.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   */
  async *listProvisionedGroups(
    organization: string,
    options: ListProvisionedGroupsOptions = {},
  ): AsyncGenerator<ProvisionedGroup, void, void> {
    const method = AdminService.method.listProvisionedGroups;
    for (let pageToken = ""; ; ) {
      const init = defined({
        organization: organization,
        pageSize: options.pageSize ?? 100,
        pageToken,
      });
      const page = await this.connection.call(method, init, options);
      for (const each of page.groups) yield wire.provisionedGroup(each);
      if (page.nextPageToken === "") return;
      pageToken = page.nextPageToken;
    }
  }

  /**
   * Lists the persons of all organizations by e-mail address.
   */
  async *listPersons(
    options: ListPersonsOptions = {},
  ): AsyncGenerator<Person, void, void> {
    const method = AdminService.method.listPersons;
    for (let pageToken = ""; ; ) {
      const init = defined({
        search: options.search,
        pageSize: options.pageSize ?? 100,
        pageToken,
      });
      const page = await this.connection.call(method, init, options);
      for (const each of page.persons) yield wire.person(each);
      if (page.nextPageToken === "") return;
      pageToken = page.nextPageToken;
    }
  }

  /**
   * Invites a person to an organization, with a token that works once. The token is returned only
   * in this response; nothing is sent.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param email E-mail address. A member, or an address with a pending invitation: AlreadyExists.
   * @param role "owner", "admin", "developer", "finance" or "viewer"; or "operator", of the whole
   * service. A role that the caller does not have: PermissionDenied with the reason ROLE_EXCEEDED.
   */
  async inviteMember(
    organization: string,
    email: string,
    role: string,
    options: InviteMemberOptions = {},
  ): Promise<CreatedInvitation> {
    const init = defined({
      organization: organization,
      email: email,
      role: role,
      project: options.project,
      lifetime: duration("lifetimeMs", options.lifetimeMs),
      requestId: options.requestId,
    });
    const method = AdminService.method.inviteMember;
    const response = await this.connection.call(method, init, options, false);
    return wire.createdInvitation(response);
  }

  /**
   * Gives an invitation a new token and a new end. The former token is refused from now on.
   *
   * @param invitationId Id of the invitation. Unknown, accepted or revoked: NotFound.
   */
  async resendInvitation(
    invitationId: string,
    options: ResendInvitationOptions = {},
  ): Promise<ResentInvitation> {
    const init = defined({
      invitationId: invitationId,
      lifetime: duration("lifetimeMs", options.lifetimeMs),
    });
    const method = AdminService.method.resendInvitation;
    const response = await this.connection.call(method, init, options, false);
    return wire.resentInvitation(response);
  }

  /**
   * Revokes an invitation: its token is refused from now on. NotFound if there is none.
   *
   * @param invitationId Id of the invitation. Unknown, accepted or revoked: NotFound.
   */
  async revokeInvitation(
    invitationId: string,
    options: RevokeInvitationOptions = {},
  ): Promise<boolean> {
    const init = defined({
      invitationId: invitationId,
      allowMissing: options.allowMissing,
    });
    const method = AdminService.method.revokeInvitation;
    const response = await this.connection.call(method, init, options);
    return response.revoked;
  }

  /**
   * Makes the caller a member. The bearer token of the call is that of the invitation: unknown,
   * used, revoked or expired, UNAUTHENTICATED with the reason INVITATION_INVALID.
   */
  async acceptInvitation(
    options: AcceptInvitationOptions = {},
  ): Promise<AcceptedInvitation> {
    const init = defined({
      displayName: options.displayName,
      createKey: options.createKey,
    });
    const method = AdminService.method.acceptInvitation;
    const response = await this.connection.call(method, init, options, false);
    return wire.acceptedInvitation(response);
  }

  /**
   * Gives a member another role, at once on every server. Idempotent.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param member The member, by e-mail address or id of the person. Unknown: NotFound.
   * @param role The new role: see `Member.role`. More than the caller has: PermissionDenied with
   * the reason ROLE_EXCEEDED. Another one than owner for the last owner: FailedPrecondition,
   * LAST_OWNER.
   */
  async updateMember(
    organization: string,
    member: string,
    role: string,
    options: CallOptionsOf = {},
  ): Promise<Member> {
    const init = defined({
      organization: organization,
      member: member,
      role: role,
    });
    const method = AdminService.method.updateMember;
    const response = await this.connection.call(method, init, options);
    return wire.member(response.member);
  }

  /**
   * Removes a member, and revokes the keys that belong to the person. NotFound if there is none.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param member The member, by e-mail address or id of the person. Unknown: NotFound. The last
   * owner: FailedPrecondition, LAST_OWNER.
   */
  async removeMember(
    organization: string,
    member: string,
    options: RemoveMemberOptions = {},
  ): Promise<RemovedMember> {
    const init = defined({
      organization: organization,
      member: member,
      revokeKeys: options.revokeKeys,
    });
    const method = AdminService.method.removeMember;
    const response = await this.connection.call(method, init, options);
    return wire.removedMember(response);
  }

  /**
   * Creates a service account: an owner of keys that no person's leave ends.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param name Name, 1 to 100 characters. Taken: AlreadyExists.
   */
  async createServiceAccount(
    organization: string,
    name: string,
    options: CreateServiceAccountOptions = {},
  ): Promise<ServiceAccount> {
    const init = defined({
      organization: organization,
      name: name,
      role: options.role,
      requestId: options.requestId ?? randomUUID(),
    });
    const method = AdminService.method.createServiceAccount;
    const response = await this.connection.call(method, init, options);
    return wire.serviceAccount(response.serviceAccount);
  }

  /**
   * Gives a service account, and its keys, another role. Idempotent.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param serviceAccount The service account, by name or id. Unknown: NotFound.
   * @param role The new role: see `ServiceAccount.role`.
   */
  async updateServiceAccount(
    organization: string,
    serviceAccount: string,
    role: string,
    options: CallOptionsOf = {},
  ): Promise<ServiceAccount> {
    const init = defined({
      organization: organization,
      serviceAccount: serviceAccount,
      role: role,
    });
    const method = AdminService.method.updateServiceAccount;
    const response = await this.connection.call(method, init, options);
    return wire.serviceAccount(response.serviceAccount);
  }

  /**
   * Deletes a service account and revokes its keys. NotFound if there is none.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param serviceAccount The service account, by name or id. Unknown: NotFound.
   */
  async deleteServiceAccount(
    organization: string,
    serviceAccount: string,
    options: DeleteServiceAccountOptions = {},
  ): Promise<boolean> {
    const init = defined({
      organization: organization,
      serviceAccount: serviceAccount,
      allowMissing: options.allowMissing,
    });
    const method = AdminService.method.deleteServiceAccount;
    const response = await this.connection.call(method, init, options);
    return response.deleted;
  }

  /**
   * Changes the name of a person. Idempotent.
   *
   * @param person The person, by e-mail address or id. Unknown: NotFound.
   * @param displayName New name, 1 to 100 characters.
   */
  async updatePerson(
    person: string,
    displayName: string,
    options: CallOptionsOf = {},
  ): Promise<Person> {
    const init = defined({
      person: person,
      displayName: displayName,
    });
    const method = AdminService.method.updatePerson;
    const response = await this.connection.call(method, init, options);
    return wire.person(response.person);
  }

  /**
   * Refuses all keys of a person in every organization from now on, and ends its running requests.
   * Keys of service accounts go on. Idempotent.
   *
   * @param person The person, by e-mail address or id. Unknown: NotFound. The last owner of an
   * organization: FailedPrecondition, LAST_OWNER.
   */
  async deactivatePerson(
    person: string,
    options: CallOptionsOf = {},
  ): Promise<Person> {
    const init = defined({
      person: person,
    });
    const method = AdminService.method.deactivatePerson;
    const response = await this.connection.call(method, init, options);
    return wire.person(response.person);
  }

  /**
   * Accepts the keys of a deactivated person again, as they were. Idempotent.
   *
   * @param person The person, by e-mail address or id. Unknown: NotFound.
   */
  async reactivatePerson(
    person: string,
    options: CallOptionsOf = {},
  ): Promise<Person> {
    const init = defined({
      person: person,
    });
    const method = AdminService.method.reactivatePerson;
    const response = await this.connection.call(method, init, options);
    return wire.person(response.person);
  }

  /**
   * Creates a link with which a person signs in to the console, once. Its opener is the person for
   * this server: send it by a safe way. The link is returned only in this response.
   *
   * @param person The person, by e-mail address or id. Unknown: NotFound. Deactivated:
   * InvalidRequest.
   */
  async createSignInLink(
    person: string,
    options: CreateSignInLinkOptions = {},
  ): Promise<string> {
    const init = defined({
      person: person,
      lifetime: duration("lifetimeMs", options.lifetimeMs),
    });
    const method = AdminService.method.createSignInLink;
    const response = await this.connection.call(method, init, options, false);
    return response.url;
  }

  /**
   * Erases a person: name, address, identity and sessions, in all organizations. Its memberships
   * and keys end; keys that it made for programs stay. Usage, bills and audit log keep its acts,
   * under its id. An erasure cannot be undone. Idempotent.
   *
   * @param person The person, by e-mail address or id. Unknown: NotFound. The last owner of an
   * organization: FailedPrecondition, LAST_OWNER.
   */
  async erasePerson(
    person: string,
    options: ErasePersonOptions = {},
  ): Promise<ErasedPerson> {
    const init = defined({
      person: person,
      dryRun: options.dryRun,
    });
    const method = AdminService.method.erasePerson;
    const response = await this.connection.call(method, init, options);
    return wire.erasedPerson(response);
  }

  /**
   * Lets the group with a name give its members a role in the organization, or none. It applies at
   * once, and to the members that the identity provider adds and removes later.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param group Name of the group, 1 to 255 characters. It need not be provisioned yet.
   * @param role "owner", "admin", "developer", "finance" or "viewer". Empty: none. If a person is
   * in several groups, the first of them in this order counts. A change that leaves no owner:
   * FailedPrecondition, LAST_OWNER.
   */
  async setGroupRole(
    organization: string,
    group: string,
    role: string,
    options: SetGroupRoleOptions = {},
  ): Promise<ProvisionedGroup> {
    const init = defined({
      organization: organization,
      group: group,
      role: role,
      project: options.project,
    });
    const method = AdminService.method.setGroupRole;
    const response = await this.connection.call(method, init, options);
    return wire.provisionedGroup(response.group);
  }

  /**
   * Returns requests, tokens, latencies and queues of all models over time, for charts. All api
   * processes are in it. Readers of one process share a report, so that many open pages cost one.
   */
  async getTraffic(
    options: GetTrafficOptions = {},
  ): Promise<Traffic> {
    const init = defined({
      period: options.period && numberOf("period", TrafficPeriodMessage, options.period),
    });
    const method = AdminService.method.getTraffic;
    const response = await this.connection.call(method, init, options);
    return wire.traffic(response);
  }

  /**
   * Lists what an operator should look at: usage that is not billed, months to close, and more.
   */
  async listConcerns(
    options: CallOptionsOf = {},
  ): Promise<Concern[]> {
    const init = defined({
    });
    const method = AdminService.method.listConcerns;
    const response = await this.connection.call(method, init, options);
    return response.concerns.map((each) => wire.concern(each));
  }

}

/** Calls of `BillingService` that need no code of their own. */
export class BillingCalls extends UnaryClient {
  /**
   * Returns the report of one calendar month (UTC) of one organization from the ledger.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param month The month as YYYY-MM. Malformed: InvalidRequest.
   */
  async getMonthReport(
    organization: string,
    month: string,
    options: CallOptionsOf = {},
  ): Promise<MonthReport> {
    const init = defined({
      organization: organization,
      month: month,
    });
    const method = BillingService.method.getMonthReport;
    const response = await this.connection.call(method, init, options);
    return wire.monthReport(response);
  }

  /**
   * Returns the report of a month as a document. For a closed month the bytes never change.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param month The month as YYYY-MM. Malformed: InvalidRequest.
   * @param documentFormat File format.
   */
  async getMonthDocument(
    organization: string,
    month: string,
    documentFormat: DocumentFormat,
    options: CallOptionsOf = {},
  ): Promise<Uint8Array> {
    const init = defined({
      organization: organization,
      month: month,
      format: numberOf("documentFormat", MonthDocumentFormatMessage, documentFormat),
    });
    const method = BillingService.method.getMonthDocument;
    const response = await this.connection.call(method, init, options);
    return response.content;
  }

  /**
   * Lists the months of an organization, the latest first, with state, author and invoice.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   */
  async listMonths(
    organization: string,
    options: CallOptionsOf = {},
  ): Promise<Month[]> {
    const init = defined({
      organization: organization,
    });
    const method = BillingService.method.listMonths;
    const response = await this.connection.call(method, init, options);
    return response.months.map((each) => wire.month(each));
  }

  /**
   * Closes a month permanently and issues its invoice. Obstacles: FailedPrecondition with a
   * PreconditionFailure, one violation each. Idempotent. Scope `admin`.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param month The month as YYYY-MM. Malformed: InvalidRequest.
   */
  async closeMonth(
    organization: string,
    month: string,
    options: CloseMonthOptions = {},
  ): Promise<ClosedMonth> {
    const init = defined({
      organization: organization,
      month: month,
      leaveRunning: options.leaveRunning,
      validateOnly: options.validateOnly,
      beforeFirst: options.beforeFirst,
      correctingAdjustmentId: options.correctedBy,
    });
    const method = BillingService.method.closeMonth;
    const response = await this.connection.call(method, init, options);
    return wire.closedMonth(response);
  }

  /**
   * Recomputes the report of a closed month from the ledger, and compares it with the digests of
   * its close.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param month The month as YYYY-MM. Not closed: FailedPrecondition.
   */
  async verifyMonth(
    organization: string,
    month: string,
    options: CallOptionsOf = {},
  ): Promise<MonthVerification> {
    const init = defined({
      organization: organization,
      month: month,
    });
    const method = BillingService.method.verifyMonth;
    const response = await this.connection.call(method, init, options);
    return wire.monthVerification(response);
  }

  /**
   * Proposes an amount for the next invoice; a person with another key must approve it. Scope
   * `admin`.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   * @param amount Positive: charged to the customer; negative: credited. The currency may be
   * omitted; another currency than the organization's is InvalidRequest. Zero is InvalidRequest
   * unless the customer has misstated usage, whose tokens may cost nothing
   * (CloseMonthRequest.correcting_adjustment_id).
   * @param reason Reason, 1 to 200 characters, shown to the customer. Empty: InvalidRequest.
   */
  async createAdjustment(
    organization: string,
    amount: Money,
    reason: string,
    options: CreateAdjustmentOptions = {},
  ): Promise<Adjustment> {
    const init = defined({
      organization: organization,
      amount: moneyInit(amount),
      reason: reason,
      requestId: options.requestId ?? randomUUID(),
    });
    const method = BillingService.method.createAdjustment;
    const response = await this.connection.call(method, init, options);
    return wire.adjustment(response.adjustment);
  }

  /**
   * Proposes a partial refund of an invoice; a person with another key must approve it. Scope
   * `admin`.
   *
   * @param invoiceNumber Number of the invoice. Unknown: NotFound.
   * @param amount Refunded amount: above zero, in whole minor units, together with earlier credit
   * notes at most the invoice. The currency may be omitted. InvalidRequest otherwise.
   * @param reason Reason, 1 to 200 characters, shown to the customer. Empty: InvalidRequest.
   */
  async createCreditNote(
    invoiceNumber: string,
    amount: Money,
    reason: string,
    options: CreateCreditNoteOptions = {},
  ): Promise<Adjustment> {
    const init = defined({
      invoiceNumber: invoiceNumber,
      amount: moneyInit(amount),
      reason: reason,
      requestId: options.requestId ?? randomUUID(),
    });
    const method = BillingService.method.createCreditNote;
    const response = await this.connection.call(method, init, options);
    return wire.adjustment(response.creditNote);
  }

  /**
   * Approves an adjustment or a credit note, and posts it to the first month that is not closed. By
   * its author: FailedPrecondition. Scope `admin`.
   *
   * @param adjustmentId Id of the adjustment. Unknown: NotFound. Already rejected:
   * FailedPrecondition. Already approved by the same key: same response.
   */
  async approveAdjustment(
    adjustmentId: string,
    options: CallOptionsOf = {},
  ): Promise<Adjustment> {
    const init = defined({
      adjustmentId: adjustmentId,
    });
    const method = BillingService.method.approveAdjustment;
    const response = await this.connection.call(method, init, options);
    return wire.adjustment(response.adjustment);
  }

  /**
   * Rejects an adjustment or a credit note; its author may do so too. Scope `admin`.
   *
   * @param adjustmentId Id of the adjustment. Unknown: NotFound. Already approved:
   * FailedPrecondition.
   */
  async rejectAdjustment(
    adjustmentId: string,
    options: CallOptionsOf = {},
  ): Promise<Adjustment> {
    const init = defined({
      adjustmentId: adjustmentId,
    });
    const method = BillingService.method.rejectAdjustment;
    const response = await this.connection.call(method, init, options);
    return wire.adjustment(response.adjustment);
  }

  /**
   * Lists adjustments and credit notes, the latest first.
   *
   * @param organization Name or id of the organization. Unknown: NotFound.
   */
  async *listAdjustments(
    organization: string,
    options: ListAdjustmentsOptions = {},
  ): AsyncGenerator<Adjustment, void, void> {
    const method = BillingService.method.listAdjustments;
    for (let pageToken = ""; ; ) {
      const init = defined({
        organization: organization,
        undecidedOnly: options.undecidedOnly,
        pageSize: options.pageSize ?? 100,
        pageToken,
      });
      const page = await this.connection.call(method, init, options);
      for (const each of page.adjustments) yield wire.adjustment(each);
      if (page.nextPageToken === "") return;
      pageToken = page.nextPageToken;
    }
  }

  /**
   * Returns one end user with its usage of the month and its limits.
   *
   * @param endUser Name or id of the end user. Unknown: NotFound.
   */
  async getEndUser(
    endUser: string,
    options: GetEndUserOptions = {},
  ): Promise<EndUserLimits> {
    const init = defined({
      endUser: endUser,
      organization: options.organization,
    });
    const method = BillingService.method.getEndUser;
    const response = await this.connection.call(method, init, options);
    return wire.endUserLimits(response);
  }

  /**
   * Returns the cost of the current month so far, and its forecast.
   */
  async getForecast(
    options: GetForecastOptions = {},
  ): Promise<UsageForecast> {
    const init = defined({
      organization: options.organization,
      month: options.month,
    });
    const method = BillingService.method.getForecast;
    const response = await this.connection.call(method, init, options);
    return wire.usageForecast(response);
  }

  /**
   * Sets what an organization charges its end users for a model, or for all models, from a time on.
   * It changes statements only, never the organization's own bill: the scope `billing` is enough.
   */
  async setResalePrice(
    options: SetResalePriceOptions = {},
  ): Promise<ResalePrice> {
    const init = defined({
      organization: options.organization,
      model: options.model,
      markupMilli: whole("markupMilli", options.markupMilli),
      inputPicosPerToken: whole("inputPicosPerToken", options.inputPicosPerToken),
      cachedInputPicosPerToken: whole("cachedInputPicosPerToken", options.cachedInputPicosPerToken),
      outputPicosPerToken: whole("outputPicosPerToken", options.outputPicosPerToken),
      reasoningPicosPerToken: whole("reasoningPicosPerToken", options.reasoningPicosPerToken),
      embeddingPicosPerToken: whole("embeddingPicosPerToken", options.embeddingPicosPerToken),
      requestPicos: whole("requestPicos", options.requestPicos),
      withdrawn: options.withdrawn,
      effectiveTime: options.effectiveTime && timestampFromDate(options.effectiveTime),
      requestId: options.requestId ?? randomUUID(),
      replicaHourPicos: whole("replicaHourPicos", options.replicaHourPicos),
    });
    const method = BillingService.method.setResalePrice;
    const response = await this.connection.call(method, init, options);
    return wire.resalePrice(response.price);
  }

  /**
   * Records that an organization rents replicas of a model to an end user, at its resale price per
   * hour. It changes statements only: the scope `billing` is enough, and no replica is started.
   *
   * @param endUser Name of the end user, known or not. Empty or malformed: InvalidRequest.
   * @param model The model. InvalidRequest if it has no resale price per hour at the start.
   */
  async rentReplicas(
    endUser: string,
    model: string,
    options: RentReplicasOptions = {},
  ): Promise<ReplicaRental> {
    const init = defined({
      endUser: endUser,
      model: model,
      replicaCount: whole("replicaCount", options.replicaCount),
      organization: options.organization,
      startTime: options.startTime && timestampFromDate(options.startTime),
      endTime: options.endTime && timestampFromDate(options.endTime),
      requestId: options.requestId ?? randomUUID(),
    });
    const method = BillingService.method.rentReplicas;
    const response = await this.connection.call(method, init, options);
    return wire.replicaRental(response.rental);
  }

  /**
   * Sets the end of a rental, now or at another time of a month that is not closed.
   *
   * @param rentalId Number of the rental. Unknown: NotFound.
   */
  async endReplicaRental(
    rentalId: number | bigint,
    options: EndReplicaRentalOptions = {},
  ): Promise<ReplicaRental> {
    const init = defined({
      rentalId: whole("rentalId", rentalId),
      endTime: options.endTime && timestampFromDate(options.endTime),
      organization: options.organization,
    });
    const method = BillingService.method.endReplicaRental;
    const response = await this.connection.call(method, init, options);
    return wire.replicaRental(response.rental);
  }

}
