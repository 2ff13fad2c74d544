/**
 * Values of the contract: plain data without gRPC.
 *
 * Generated from the contract by `infra/generate_sdk.py`: run `make proto` instead of editing it.
 */

import type { JsonValue } from "@bufbuild/protobuf";
import type { Money } from "./money.js";

/** Owner of a quota. unspecified: newer than this client. */
export type QuotaSubject =
  | "unspecified"
  | "organization"
  | "project"
  | "api-key"
  | "end-user"
  | "label";

/** Measure and window of a quota. "unspecified": newer than this client. */
export const QUOTA_DIMENSIONS = [
  "unspecified",
  "concurrent-requests",
  "requests-per-minute",
  "requests-per-hour",
  "requests-per-day",
  "requests-per-week",
  "requests-per-month",
  "requests-per-window",
  "requests-per-lifetime",
  "tokens-per-minute",
  "tokens-per-hour",
  "tokens-per-day",
  "tokens-per-week",
  "tokens-per-month",
  "tokens-per-window",
  "tokens-per-lifetime",
  "input-tokens-per-minute",
  "input-tokens-per-hour",
  "input-tokens-per-day",
  "input-tokens-per-week",
  "input-tokens-per-month",
  "input-tokens-per-window",
  "input-tokens-per-lifetime",
  "output-tokens-per-minute",
  "output-tokens-per-hour",
  "output-tokens-per-day",
  "output-tokens-per-week",
  "output-tokens-per-month",
  "output-tokens-per-window",
  "output-tokens-per-lifetime",
  "cost-per-hour",
  "cost-per-day",
  "cost-per-week",
  "cost-per-month",
  "cost-per-window",
  "cost-per-lifetime",
  "prepaid-credit",
] as const;

/** Measure and window of a quota. */
export type QuotaDimension = (typeof QUOTA_DIMENSIONS)[number];

/** State of an alert's delivery. unspecified: newer than this client. */
export type AlertDeliveryState =
  | "unspecified"
  | "pending"
  | "delivered"
  | "failed";

/** Delivery of an alert to a webhook. */
export interface AlertDelivery {
  /** State of the delivery. */
  readonly state: AlertDeliveryState;
  /** Number of attempts begun. */
  readonly attemptCount: number;
  /** Time of the latest attempt. Unset if there was none. */
  readonly attemptTime: Date | undefined;
  /** Time of delivery or abandonment. Unset while pending. */
  readonly endTime: Date | undefined;
  /** Error of the latest failed attempt. Empty if none failed. */
  readonly lastError: string;
}

/** A Stripe invoice at the time of an alert. */
export interface AlertInvoice {
  /** Id at Stripe. */
  readonly stripeInvoiceId: string;
  /** Number at Stripe. Empty if no event has contained it. */
  readonly stripeNumber: string;
  /** The billed month, as YYYY-MM in UTC. */
  readonly month: string;
  /** Amount due. */
  readonly amountDue: Money;
  /** Amount paid. */
  readonly amountPaid: Money;
  /** Stripe's payment page. Empty if no event has contained it. */
  readonly hostedUrl: string;
}

/** An API key that was rotated, or given more scopes, more networks or a longer life. */
export interface AlertKey {
  /** The first characters of the key. */
  readonly prefix: string;
  /** The key's name at that time. */
  readonly name: string;
  /** Prefix of the key that made the change, as in the audit log. */
  readonly changedBy: string;
  /** What changed: "secret", "scopes", "role", "allowed_networks", "expires_at". */
  readonly changed: readonly string[];
}

/**
 * A threshold of a limit was crossed, or Stripe reported a payment. There is one alert per limit,
 * threshold, window and limit value; and one per invoice and kind.
 */
export interface Alert {
  /** UUID of the alert, the same in all deliveries and lists. */
  readonly alertId: string;
  /** UUID of the organization. */
  readonly organizationId: string;
  /** The organization's name. */
  readonly organizationName: string;
  /** Time of detection, seconds after the crossing if a worker runs. */
  readonly fireTime: Date | undefined;
  /** The limit's id. Empty for tests and invoices, as are all fields up to the window. */
  readonly quotaId: string;
  /** Owner of the limit. */
  readonly subject: QuotaSubject;
  /** UUID of the organization, project, key, end user or value of a label. */
  readonly subjectId: string;
  /**
   * Display name: "organization", "organization/project", a key's prefix, the name of an end user
   * or "key=value" of a label. An erased end user has its id.
   */
  readonly subjectName: string;
  /** Limited model; empty: all models together. */
  readonly model: string;
  /** Measure and window of the limit. */
  readonly dimension: QuotaDimension;
  /** Percent of the limit used; for prepaid credit, remaining picos. */
  readonly threshold: number;
  /** The limit in force at that time, in requests, tokens or picos by dimension. */
  readonly limitValue: bigint;
  /** Usage at that time, without the holds of running requests. */
  readonly usedValue: bigint;
  /** Start of the limit's window. Unset for prepaid credit. */
  readonly windowStartTime: Date | undefined;
  /** ISO 4217 code of the organization's currency. */
  readonly currencyCode: string;
  /** Delivery to the organization's webhook. Unset if there was no webhook at that time. */
  readonly delivery: AlertDelivery | undefined;
  /**
   * "quota", "credit", "test", "invoice_payment_failed", "invoice_paid", "key_rotated" or
   * "key_widened".
   */
  readonly kind: string;
  /** The invoice at the time of the alert. Unset for other kinds. */
  readonly invoice: AlertInvoice | undefined;
  /** The key that got a new secret or more rights. Unset for other kinds. */
  readonly key: AlertKey | undefined;
  /**
   * UUID of the organization or project within which the limit of an end user or label counts.
   * Empty for other subjects.
   */
  readonly withinId: string;
  /** Display name of that: "organization" or "organization/project". */
  readonly withinName: string;
}

/** One change: its time and author, and the object before and after it. */
export interface AuditEntry {
  /** Increases with time, so that it orders entries and begins the next page. */
  readonly entryId: number;
  /** Time of the change. */
  readonly createTime: Date | undefined;
  /** Author: the prefix of the API key, or "system". */
  readonly actor: string;
  /** Action, for example "api_key.revoke". */
  readonly action: string;
  /** Id of the changed object: a UUID, or the number of a price version. */
  readonly subjectId: string;
  /** The object before, as JSON; empty if it did not exist. */
  readonly beforeJson: string;
  /** The object after, as JSON; empty if it was removed. */
  readonly afterJson: string;
  /**
   * Display names of the organizations, projects, keys, persons, service accounts, end users and
   * labels that the entry refers to, by id, as they are now. An erased end user has none.
   */
  readonly names: Readonly<Record<string, string>>;
  /**
   * Role of the key that made the change: "operator", "owner", "admin", "developer", "finance",
   * "viewer" or "billing". Empty: `actor` is not a key, or the entry is older than roles.
   */
  readonly actorRole: string;
  /** Id of the organization of that key. Empty with `actor_role`. */
  readonly actorOrganizationId: string;
  /**
   * Id of the person whom that key belongs to. `names` has the name of the person, unless it is the
   * operator's. Empty: no person.
   */
  readonly actorPersonId: string;
  /**
   * Network address that the change came from. Empty: it was not a call, or came by a local socket.
   */
  readonly actorAddress: string;
}

/** State of an end user. unspecified: newer than this client. */
export type EndUserState =
  | "unspecified"
  | "active"
  | "archived"
  | "erased";

/** One limit with its current remainder. */
export interface QuotaStatus {
  /**
   * Server-generated UUID of the quota. Empty for a limit that a selector gives with the first
   * request.
   */
  readonly quotaId: string;
  /** Owner of the limit. */
  readonly subject: QuotaSubject;
  /** UUID of the organization, project, key, end user or value of a label. */
  readonly subjectId: string;
  /** Limited model; empty: all models together. */
  readonly model: string;
  /** Measure and window. */
  readonly dimension: QuotaDimension;
  /** The limit in force now, in requests, tokens or picos by dimension. */
  readonly limitValue: bigint;
  /** Usage of this window; 9223372036854775807 for that or more. */
  readonly usedValue: bigint;
  /** Held by running requests. */
  readonly heldValue: bigint;
  /**
   * `limit_value` - `used_value` - `held_value`. Negative if the limit is not enforced or was
   * lowered below the usage.
   */
  readonly remainingValue: bigint;
  /**
   * Time when the window ends and `used_value` resets to zero. In a rolling window, it falls step
   * by step until then. Unset for concurrency, prepaid credit and the lifetime.
   */
  readonly resetTime: Date | undefined;
  /** Time from now to `reset_time`. Unset with it. */
  readonly resetDelayMs: number | undefined;
  /**
   * Display name: "organization", "organization/project", a key's prefix, the name of an end user,
   * or "key=value" of a label. In `admitted` and `finished` frames of end users and labels only.
   */
  readonly subjectName: string;
  /** False: shadow mode, counts and reports without refusing. */
  readonly enforced: boolean;
  /**
   * Admissions in this window that shadow mode would have refused. 0 in `admitted` and `finished`
   * frames.
   */
  readonly wouldRefuseCount: number;
  /**
   * Thousandths that an uncached input token counts. A request counts in whole tokens, rounded up
   * once. 0 if the limit does not count such tokens.
   */
  readonly inputWeightMilli: number;
  /** Thousandths that a cached input token counts. 0 if the limit does not count such tokens. */
  readonly cachedInputWeightMilli: number;
  /** Thousandths that an output token counts. 0 if the limit does not count such tokens. */
  readonly outputWeightMilli: number;
  /** The limit without the temporary override; `limit_value` if there is none. */
  readonly baseLimitValue: bigint;
  /** End of the temporary override. Unset if there is none. */
  readonly overrideEndTime: Date | undefined;
  /** Reason of the override. Empty if there is none, and in `admitted` and `finished` frames. */
  readonly overrideReason: string;
  /**
   * True if it has the smallest remainder of the enforced limits on its dimension that apply to the
   * same requests. Only in lists of all limits of one key: GetQuota, Quote, and ListQuotas for a
   * key.
   */
  readonly binding: boolean;
  /**
   * An inherited limit, or one on all models, that always runs out before or with this one, so that
   * this one has no effect. Empty if there is none. Only set where `binding` is.
   */
  readonly narrowedByQuotaId: string;
  /**
   * The limit is a default: each key created under its subject from then on gets a copy, and
   * nothing else is limited.
   */
  readonly forNewKeys: boolean;
  /**
   * Alert thresholds, ascending: percent of `limit_value` used; for prepaid credit, remaining
   * picos. Empty for a limit without alerts, and in `admitted` and `finished` frames.
   */
  readonly alertAt: readonly bigint[];
  /**
   * The limit is a selector: it limits nothing itself, and gives a limit to each end user
   * ("end_user"), to each value of a label ("label:team"), or to each key of a group ("key:free"),
   * within its subject. Otherwise empty.
   */
  readonly forEach: string;
  /**
   * UUID of the organization or project within which the limit of an end user or label counts.
   * Empty for other subjects.
   */
  readonly withinId: string;
  /**
   * Display name of that: "organization" or "organization/project". Empty in `admitted` and
   * `finished` frames.
   */
  readonly withinName: string;
  /** UUID of the selector that gives this limit its terms. Empty if it has terms of its own. */
  readonly selectorId: string;
  /** Length of a rolling window. 0 for every other dimension. */
  readonly windowMinutes: number;
  /**
   * Group of keys by which the key has this limit, from a selector "key:GROUP". Otherwise empty.
   */
  readonly group: string;
  /**
   * Set by a key of the organization. It counts beside the operator's limits, which such a key
   * cannot change. False: set by the operator.
   */
  readonly setByOrganization: boolean;
}

/** One user of a customer, as requests name it. */
export interface EndUser {
  /** Server-generated UUID. */
  readonly endUserId: string;
  /** The name that requests give it. Empty once it is erased. */
  readonly name: string;
  /** Time of its first request, or of its first limit if that came before. */
  readonly createTime: Date | undefined;
  /** Day of its latest request, UTC, such as "2026-11-28"; of `create_time` if there was none. */
  readonly lastUseDay: string;
  /** Whether it is in use. */
  readonly state: EndUserState;
  /**
   * Exact cost of its requests that were settled in the current month (UTC), posted or not. Unset
   * in lists without `with_usage`, as are the fields below.
   */
  readonly monthCost: Money | undefined;
  /** Number of these requests. */
  readonly monthRequestCount: number;
  /**
   * The enforced limit of which the largest share is used or held, among its own limits and those
   * that selectors give it. Unset if it has none.
   */
  readonly tightestQuota: QuotaStatus | undefined;
}

/** Reason why an admitted request ended. UNSPECIFIED: newer than this client. */
export type FinishReason =
  | "UNSPECIFIED"
  | "STOP"
  | "STOP_SEQUENCE"
  | "LENGTH"
  | "CANCELLED"
  | "DEADLINE"
  | "QUOTA_EXHAUSTED"
  | "COST_LIMIT"
  | "SLOW_CONSUMER"
  | "FILTERED"
  | "TOOL_CALLS";

/** State of a request. UNSPECIFIED: newer than this client. */
export type GenerationState =
  | "UNSPECIFIED"
  | "RUNNING"
  | "SETTLED"
  | "VOIDED"
  | "EXPIRED";

/** Token counts of one request. */
export interface Usage {
  /** Tokens of the prompt, cached ones included. */
  readonly inputTokenCount: number;
  /** Prompt tokens served from the prefix cache. Never more than `input_token_count`. */
  readonly cachedInputTokenCount: number;
  /** Output tokens produced by the engine. */
  readonly generatedTokenCount: number;
  /**
   * Output tokens that the transport has taken. With `keep_on_disconnect`, those that were kept.
   */
  readonly deliveredTokenCount: number;
  /**
   * Billed output tokens: the delivered ones. After a crash of the server never more than the
   * transport had taken.
   */
  readonly billedTokenCount: number;
  /** Embedded tokens, billed at their own price. An embedding request has no other tokens. */
  readonly embeddingTokenCount: number;
  /**
   * Output tokens that the server was about to send: at least the delivered ones. The others are
   * not billed. 0 while the request runs.
   */
  readonly journalledTokenCount: number;
  /**
   * Delivered output tokens of the model's thinking, part of `delivered_token_count`. 0 unless the
   * prompt is a conversation.
   */
  readonly reasoningTokenCount: number;
}

/**
 * Time spent in each stage of a request, in milliseconds. Stages are disjoint and sum to
 * `total_ms`, except `client_stall_ms`, which overlaps `decode_ms` up to the last token.
 */
export interface Timings {
  /** Authenticating the API key. */
  readonly authMs: number;
  /** Rendering the chat template and tokenizing. */
  readonly tokenizeMs: number;
  /** Taking the hold in the database. */
  readonly admissionMs: number;
  /** Waiting in the queue before the engine. */
  readonly queueMs: number;
  /** Waiting for an engine that was not running. */
  readonly coldStartMs: number;
  /** From the first prefill step to the first token. */
  readonly prefillMs: number;
  /** From the first token to the last. */
  readonly decodeMs: number;
  /**
   * Time in which tokens were ready and the client did not take them: it had granted too little
   * credit, or the transport could not send because it did not read. All such times of the request
   * are added up. The engine goes on meanwhile, so the gaps between tokens do not include them.
   */
  readonly clientStallMs: number;
  /**
   * Writing usage event and settlement. For an answer in one piece, also waiting for the other
   * prompts of the answer.
   */
  readonly settleMs: number;
  /** From the arrival of the start frame to the first token. */
  readonly ttftMs: number;
  /** From the arrival of the start frame to the last frame. */
  readonly totalMs: number;
  /**
   * Median of the gaps between two consecutive messages with tokens of one choice, as they are
   * handed on to the client; waiting for the client is not part of them. These three are 0 with
   * fewer than two messages, and for beam search.
   */
  readonly itlP50Ms: number;
  /** 99th percentile of these gaps. */
  readonly itlP99Ms: number;
  /** Longest of these gaps. */
  readonly itlMaxMs: number;
  /** Tokens after the first of each choice, by `decode_ms`. 0 without such tokens. */
  readonly tokensPerSecond: number;
}

/** The record of one request. */
export interface Generation {
  /** Id generated by the client. */
  readonly requestId: string;
  /** State of the request. */
  readonly state: GenerationState;
  /** Model of the request. */
  readonly model: string;
  /** Time of admission. */
  readonly admitTime: Date | undefined;
  /** Time of settlement. Unset while it runs. */
  readonly settleTime: Date | undefined;
  /** Final counts; while it runs, the counts so far. */
  readonly usage: Usage;
  /** Cost. Unset while it runs. */
  readonly cost: Money | undefined;
  /**
   * Time spent in each stage, without `settle_ms`. Unset while it runs and for a request recovered
   * after a crash.
   */
  readonly timings: Timings | undefined;
  /**
   * Reason of the end: the name of a FinishReason without its prefix, or FAILED. Empty while it
   * runs and if nothing was billed.
   */
  readonly outcome: string;
  /** The labels of the request. */
  readonly labels: Readonly<Record<string, string>>;
  /**
   * Number of moves to another engine after the first token, because one was lost or drained. 0
   * while it runs, and after a recovery from a crash.
   */
  readonly migrationCount: number;
  /** The end user of the request. Empty: none was given, or it was erased. */
  readonly endUser: string;
}

/** Estimated cost of a month at its prices, before plan discounts, credit and tax. */
export interface UsageForecast {
  /** The customer's name. */
  readonly organizationName: string;
  /** The month as YYYY-MM, in UTC. */
  readonly month: string;
  /** Time zone of days and the month: always UTC. */
  readonly timeZone: string;
  /** Time of the forecast. */
  readonly asOfTime: Date | undefined;
  /** Exact cost of the month's usage until then, posted or not. */
  readonly monthToDate: Money;
  /**
   * The estimate for the whole month, rounded to minor units. Unset without a complete day of
   * usage.
   */
  readonly expected: Money | undefined;
  /** Lower bound of the interval, rounded to minor units. Unset with too little history. */
  readonly low: Money | undefined;
  /** Upper bound of the interval, rounded to minor units. Unset with too little history. */
  readonly high: Money | undefined;
  /** Confidence of the interval in percent, assuming that days vary as before. */
  readonly confidencePercent: number;
  /** Complete days (UTC) in the estimate. */
  readonly completeDayCount: number;
  /** Method of the estimate, in a sentence. */
  readonly method: string;
  /** Caveats, a sentence each. */
  readonly warnings: readonly string[];
}

/** The part of a row with one outcome; included in the row's numbers. */
export interface UsageShare {
  /** Number of requests. */
  readonly requestCount: number;
  /** Billed tokens of all kinds. */
  readonly tokenCount: number;
  /** Exact cost, posted or not. */
  readonly amount: Money;
}

/** Usage of one group. Fields outside the grouping are empty. Never contains prompts or answers. */
export interface UsageRow {
  /** The customer's id. */
  readonly organizationId: string;
  /** The customer's name. */
  readonly organizationName: string;
  /** The day of settlement as YYYY-MM-DD, in UTC. */
  readonly day: string;
  /** The project's id. */
  readonly projectId: string;
  /** The project's name. */
  readonly projectName: string;
  /** The API key's id. */
  readonly apiKeyId: string;
  /** The API key's name. */
  readonly apiKeyName: string;
  /** The API key's prefix. */
  readonly apiKeyPrefix: string;
  /** The model. */
  readonly model: string;
  /** The request's id. */
  readonly requestId: string;
  /** Outcome of the request, as in Generation.outcome. */
  readonly outcome: string;
  /** Time of the request's settlement. */
  readonly settleTime: Date | undefined;
  /** True if it includes usage of a month closed before, which is billed as late usage. */
  readonly late: boolean;
  /** Number of requests. Usage found after a request's settlement adds tokens but no request. */
  readonly requestCount: number;
  /** Computed input tokens, without cached ones. */
  readonly inputTokenCount: number;
  /** Input tokens from the prefix cache. */
  readonly cachedInputTokenCount: number;
  /** Billed output tokens, without those of the model's thinking. */
  readonly outputTokenCount: number;
  /** The part of requests cancelled by the client or by a deadline. */
  readonly cancelled: UsageShare;
  /** The part of requests ended by a quota, a cost limit, a slow consumer or a filter. */
  readonly limited: UsageShare;
  /** The part of requests failed by the server. */
  readonly failed: UsageShare;
  /** Exact amount posted to the ledger. */
  readonly amount: Money;
  /** Exact amount recorded but not posted yet. Posting takes about a second. */
  readonly pendingAmount: Money;
  /** Embedded tokens. */
  readonly embeddingTokenCount: number;
  /**
   * Number of moves of requests to another engine after their first token, because an engine was
   * lost or drained.
   */
  readonly migrationCount: number;
  /** Billed output tokens of the model's thinking. */
  readonly reasoningTokenCount: number;
  /** Exact cost, posted or not: `amount` plus `pending_amount`. */
  readonly cost: Money;
  /** The hour of settlement, in UTC: 2026-11-28T14:00Z. */
  readonly hour: string;
  /** Id of the end user, also for single requests. Empty: none was given. */
  readonly endUserId: string;
  /** Name of the end user. Empty with an id: erased. */
  readonly endUser: string;
  /** Value of the label. Unset: the requests do not have it. */
  readonly labelValue: string | undefined;
}

/** Usage of a key or a project. */
export interface UsageReport {
  /** The rows, 10,000 at most: InvalidRequest for more. */
  readonly rows: readonly UsageRow[];
  /** Their sum. */
  readonly total: UsageRow;
  /** First day of the usage asked for, as YYYY-MM-DD in UTC. Late usage of a month may be older. */
  readonly firstDay: string;
  /** Last day of the usage asked for, as YYYY-MM-DD in UTC. */
  readonly lastDay: string;
  /** Time zone of the days: always UTC. */
  readonly timeZone: string;
}

/** A page of usage. */
export interface UsagePage {
  /** The rows. */
  readonly rows: readonly UsageRow[];
  /** Total of all pages as one row. On the first page of a single organization only. */
  readonly total: UsageRow | undefined;
  /** Time zone of days and months: always UTC. */
  readonly timeZone: string;
}

/** An invitation that is neither accepted nor revoked, without its token. */
export interface Invitation {
  /** Server-generated UUID. */
  readonly invitationId: string;
  /** UUID of the organization. */
  readonly organizationId: string;
  /** Name of the organization. */
  readonly organizationName: string;
  /** UUID of the project of the future member. */
  readonly projectId: string;
  /** Name of that project. */
  readonly projectName: string;
  /** E-mail address of the person, in lower case. */
  readonly email: string;
  /** Role of the future member: see `Member.role`. */
  readonly role: string;
  /** Time of the invitation. */
  readonly createTime: Date | undefined;
  /** The token is refused from then on. */
  readonly expireTime: Date | undefined;
}

/** A line of an invoice. */
export interface InvoiceLine {
  /**
   * Stable kind: `usage`, `late_usage`, a charge as in `ChargeKind` in lower case, or `rounding`,
   * which completes the other lines to the total.
   */
  readonly kind: string;
  /** Text of the line on the document, for people. */
  readonly description: string;
  /** Before rounding; 0 for the line of the rounding. */
  readonly exactAmount: Money;
  /** Billed amount, in whole minor units. */
  readonly amount: Money;
  /** The model; empty if not applicable. */
  readonly model: string;
  /** The price version; 0 if not applicable. */
  readonly priceVersion: number;
  /** Token kind, in lower case as in the report's documents; empty if not applicable. */
  readonly tokenKind: string;
  /** Number of tokens; 0 if not applicable. */
  readonly tokenCount: number;
  /** Picos per token; 0 if not applicable. */
  readonly unitPricePicos: bigint;
  /** The month of the usage as YYYY-MM, for usage lines. */
  readonly usageMonth: string;
  /** Id of the adjustment or the credit grant. */
  readonly sourceId: string;
}

/** Payment state of an invoice at Stripe. unspecified: newer than this client. */
export type PaymentState =
  | "unspecified"
  | "open"
  | "failed"
  | "overdue"
  | "paid"
  | "void"
  | "uncollectible";

/** One invoice at Stripe, from its events. */
export interface InvoicePayment {
  /** Id of the invoice at Stripe, such as "in_1Nx". */
  readonly stripeInvoiceId: string;
  /** Number at Stripe. Empty if no event has contained it. */
  readonly stripeNumber: string;
  /** State of the payment as Stripe last reported it. */
  readonly state: PaymentState;
  /** Amount due, including taxes and items added at Stripe. */
  readonly amountDue: Money;
  /** Amount paid so far, as Stripe last reported it. */
  readonly amountPaid: Money;
  /** Stripe's payment page. Empty if no event has contained it. */
  readonly hostedUrl: string;
  /** Time when Stripe finalized it. Unset if no event has contained it. */
  readonly finalizeTime: Date | undefined;
  /** Time of payment. Unset if unpaid. */
  readonly payTime: Date | undefined;
  /** Time of the latest failed charge. Unset if none failed. */
  readonly failureTime: Date | undefined;
}

/**
 * Invoice of a month. It never changes; mistakes are corrected by a credit note or an adjustment.
 */
export interface Invoice {
  /** Its number: `INV-` and digits, without gaps. */
  readonly number: string;
  /** The organization's id. */
  readonly organizationId: string;
  /** The organization's name at the close. */
  readonly organizationName: string;
  /** The month as YYYY-MM, in UTC. */
  readonly month: string;
  /** Time of issue. */
  readonly issueTime: Date | undefined;
  /** Author of the close: the prefix of a key. */
  readonly issuedBy: string;
  /** In the order of the report. Their amounts add up to `total`. */
  readonly lines: readonly InvoiceLine[];
  /** Sum of the lines before rounding. */
  readonly exactTotal: Money;
  /** Rounding remainder of previous months. */
  readonly carriedIn: Money;
  /** Rounding remainder for the next month: exact_total + carried_in - total. */
  readonly carriedOut: Money;
  /** Amount owed, in whole minor units. Negative: in favour of the customer. */
  readonly total: Money;
  /** Sum of its approved credit notes. */
  readonly credited: Money;
  /** Tax treatment of the amounts. */
  readonly taxNote: string;
  /** Stripe's invoices of the same month. See `Month.payments`. */
  readonly payments: readonly InvoicePayment[];
}

/** A change that gave an API key a new secret or more rights. */
export interface KeyChange {
  /** "rotated" or "widened": more scopes, another role, more networks, or a longer life. */
  readonly act: string;
  /** Prefix of the key that made the change, as in the audit log. */
  readonly actor: string;
  /** Time of the change. */
  readonly changeTime: Date | undefined;
}

/** Permissions of a key, as visible to itself. */
export interface KeyRestrictions {
  /** The first characters of the key. */
  readonly prefix: string;
  /** Scopes: "inference", "admin", "billing", "scim". */
  readonly scopes: readonly string[];
  /** Names of the allowed models. Empty: all models. */
  readonly models: readonly string[];
  /**
   * Limit of input tokens per request: its prompt, or all texts to embed. 0: the model's own limit.
   */
  readonly maxInputTokens: number | undefined;
  /** Limit of output tokens per request, all choices together. 0: the model's own limit. */
  readonly maxOutputTokens: number | undefined;
  /** Time of expiry of the secret in use. Unset: never. */
  readonly secretExpireTime: Date | undefined;
  /** Networks that may use the key. Empty: all. */
  readonly allowedNetworks: readonly string[];
  /** Refuses unknown parameters over HTTP. */
  readonly strictParameters: boolean;
  /** The latest rotation of the key or widening of its rights. Unset: there was none. */
  readonly latestChange: KeyChange | undefined;
  /** Group of the key within its organization. Empty: none. */
  readonly group: string;
  /** Role of the key in its organization. Empty: none. */
  readonly role: string;
}

/** One immutable version of a plan. */
export interface Plan {
  /** Rules of the plan. */
  readonly configuration: JsonValue | undefined;
  /** Its version: 1 for the first of its name, and one more for each change. */
  readonly version: number;
  /** Time of creation. */
  readonly createTime: Date | undefined;
}

/** The plan of an organization from a month on, until its next assignment. */
export interface PlanAssignment {
  /** UUID of the organization that has the plan. */
  readonly organizationId: string;
  /** Name of the organization that has the plan. */
  readonly organizationName: string;
  /** The first month as YYYY-MM, UTC. */
  readonly firstMonth: string;
  /** The name of the plan; empty for none. */
  readonly plan: string;
  /** Its version; 0 for no plan. */
  readonly version: number;
  /** Author of the assignment: the prefix of the API key. */
  readonly assignedBy: string;
}

/** Plans and their assignments. */
export interface PlanList {
  /** Sorted by name, the latest version first. */
  readonly plans: readonly Plan[];
  /** Sorted by organization, then month. */
  readonly assignments: readonly PlanAssignment[];
}

/** Price of a model. */
export interface Price {
  /** Price version. */
  readonly version: number;
  /** ISO 4217 code. */
  readonly currencyCode: string;
  /** Picos of the currency unit per uncached input token. */
  readonly inputPicosPerToken: bigint;
  /** Picos per cached input token. */
  readonly cachedInputPicosPerToken: bigint;
  /** Picos per output token. */
  readonly outputPicosPerToken: bigint;
  /** Start of validity. */
  readonly effectiveTime: Date | undefined;
  /** Picos per embedded token. */
  readonly embeddingPicosPerToken: bigint;
  /** Service tier of this price. */
  readonly tier: "interactive" | "batch";
  /** True for the caller's own price instead of the list price. */
  readonly own: boolean;
  /** Picos per output token of the model's thinking. */
  readonly reasoningPicosPerToken: bigint;
}

/** Task of a model. UNSPECIFIED: newer than this client. */
export type ModelTask =
  | "UNSPECIFIED"
  | "GENERATE"
  | "EMBED";

/** One version of a model. */
export interface ModelVersion {
  /** The part after the `@`. */
  readonly version: string;
  /** Its fraction of the requests without a version, between 0 and 1. */
  readonly share: number;
}

/** A field of `StartFrame` that a model's engine refuses. */
export interface RefusedField {
  /** Path of the field, for example "sampling.min_p". */
  readonly field: string;
  /**
   * The refused values, for example "with a temperature above 0". Empty: all that have an effect.
   */
  readonly values: string;
}

/** One available model. */
export interface Model {
  /** The name to send in requests. */
  readonly name: string;
  /** Architecture of the checkpoint, for example "LlamaForCausalLM". */
  readonly architecture: string;
  /** Context window, input and output together. */
  readonly contextWindowTokens: number;
  /** Size of the vocabulary. */
  readonly vocabularySize: number;
  /** Engine that runs it, for example "torch". */
  readonly engine: string;
  /**
   * The caller's current price of interactive requests. Unset: no price is set, and the model
   * cannot be used.
   */
  readonly price: Price | undefined;
  /** The caller's current price in each service tier. */
  readonly tierPrices: readonly Price[];
  /** Task of the model. */
  readonly task: ModelTask;
  /**
   * Number of floats in each vector. 0 for a generating model. For an embedding model,
   * `context_window_tokens` limits each text.
   */
  readonly embeddingDimension: number;
  /** Limit of texts in one `Embed` call. 0 for a generating model. */
  readonly embeddingInputCountMax: number;
  /** Other names for requests. Billing and limits use the model's canonical name. */
  readonly aliases: readonly string[];
  /**
   * Versions, requested as `name@version`; empty if there is only one. Billed and limited as the
   * model.
   */
  readonly versions: readonly ModelVersion[];
  /** Number of engines that accept requests. */
  readonly readyReplicaCount: number;
  /** Number of all its engines, in any state. */
  readonly replicaCount: number;
  /** Number of engines drained by an admin. */
  readonly drainedReplicaCount: number;
  /**
   * Kernels of its ready engines: the instruction set of the native ones, for example `amx`;
   * `torch`, which is several times slower; `cuda`; `simulated`. Empty for other engines.
   */
  readonly kernels: readonly string[];
  /**
   * Request fields that its engine would ignore. A request that uses one is refused with
   * InvalidRequest before a hold is made. With several versions: of the one with most requests.
   */
  readonly refusedFields: readonly RefusedField[];
  /**
   * An engine of the model reports no token ids. Its output tokens are counted from its usage, each
   * is 2147483647 in `token_ids`, and `update.max_output_tokens` cannot be raised.
   */
  readonly countsFromUsage: boolean;
}

/** File format of a month. */
export type MonthExportFormat =
  | "invoice_pdf"
  | "focus_csv";

/** Reason of a request's wait. UNSPECIFIED: newer than this client. */
export type Stage =
  | "UNSPECIFIED"
  | "QUEUED"
  | "ENGINE_LOADING"
  | "RUNNING";

/** Quote of a request, if it were started now. */
export interface Quote {
  /** Tokens of the rendered prompt, or of all texts to embed. */
  readonly inputTokenCount: number;
  /** Prompt tokens expected from the prefix cache. 0 if unknown. */
  readonly predictedCachedTokenCount: number;
  /** Limit of output tokens, all choices together. */
  readonly maxOutputTokenCount: number;
  /**
   * Expected output tokens: the mean of the project's latest requests to the model, at most
   * `max_output_token_count`; that limit if there were none.
   */
  readonly expectedOutputTokenCount: number;
  /** Upper bound of the cost: nothing cached, and `max_output_token_count` output tokens. */
  readonly worstCaseCost: Money;
  /** Cost with `predicted_cached_token_count` and `expected_output_token_count`. */
  readonly expectedCost: Money;
  /** Price version that it would be billed by. */
  readonly priceVersion: number;
  /** Whether the quotas would admit it. */
  readonly wouldAdmit: boolean;
  /**
   * Whether waiting can help if it would not be admitted: false for a request larger than a limit.
   */
  readonly retryHelps: boolean;
  /** Time to wait, if that helps. Unset otherwise. */
  readonly retryAfterMs: number | undefined;
  /** Quotas that would refuse it, sorted by their reset, the earliest first. */
  readonly failingQuotas: readonly QuotaStatus[];
  /**
   * Every quota that applies, without this request. Sorted by organization, project, key, then
   * dimension.
   */
  readonly quotas: readonly QuotaStatus[];
}

/**
 * One immutable version of what an organization charges its end users; corrections are later
 * versions. A request pays the version in force when it starts.
 */
export interface ResalePrice {
  /** Version number. */
  readonly version: number;
  /** The priced model; empty: all models without a version of their own. */
  readonly model: string;
  /**
   * What tokens without a price of their own are charged at, in thousandths of the organization's
   * cost: 1250 adds a quarter.
   */
  readonly markupMilli: number;
  /** Picos per uncached input token. Unset: the markup. */
  readonly inputPicosPerToken: bigint | undefined;
  /** Picos per cached input token. Unset: the markup. */
  readonly cachedInputPicosPerToken: bigint | undefined;
  /** Picos per output token that is not thinking. Unset: the markup. */
  readonly outputPicosPerToken: bigint | undefined;
  /** Picos per output token of the model's thinking. Unset: as output. */
  readonly reasoningPicosPerToken: bigint | undefined;
  /** Picos per embedded token. Unset: the markup. */
  readonly embeddingPicosPerToken: bigint | undefined;
  /** Picos per request, beside its tokens. */
  readonly requestPicos: bigint;
  /** True if it only ends the price: that of all models applies from then on, or else the cost. */
  readonly withdrawn: boolean;
  /** Start of validity. */
  readonly effectiveTime: Date | undefined;
  /** Picos per hour of each rented replica of the model. */
  readonly replicaHourPicos: bigint;
}

/**
 * Tokens of one kind and model, its requests, or seconds of its rented replicas, at one version of
 * the resale prices.
 */
export interface ResaleStatementLine {
  /** The model. */
  readonly model: string;
  /** "requests", "replica_seconds", or the kind of token in lower case, as in other documents. */
  readonly item: string;
  /** Number of requests, seconds or tokens. */
  readonly quantity: number;
  /**
   * Cost of this usage to the organization. 0 for rented replicas, for which Weir charges nothing.
   */
  readonly cost: Money;
  /** What the end user is charged, exact to the pico. */
  readonly amount: Money;
  /** The version of the resale prices; 0 without one: at cost. */
  readonly resalePriceVersion: number;
  /**
   * The month of the usage as YYYY-MM, if that was closed before the usage was posted; else empty.
   */
  readonly lateMonth: string;
}

/** Charges of an organization to one end user for a month. */
export interface ResaleStatement {
  /** Name of the end user. Empty for an erased one, and for usage without an end user. */
  readonly endUser: string;
  /** UUID of the end user. Empty for usage without an end user. */
  readonly endUserId: string;
  /** The month as YYYY-MM, in UTC. */
  readonly month: string;
  /** State of the month. While it is open, amounts may still change. */
  readonly state: string;
  /** Number of requests. */
  readonly requestCount: number;
  /** Number of tokens of all kinds. */
  readonly tokenCount: number;
  /**
   * What the organization pays for the usage, before its plan. The costs of all statements of a
   * month add up to the usage on its invoice.
   */
  readonly cost: Money;
  /** Exact sum of the lines. */
  readonly amount: Money;
  /** Rounding remainder of the end user's previous statements. */
  readonly carriedIn: Money;
  /** Amount to charge: amount + carried_in, rounded once to the currency's minor unit. */
  readonly totalRounded: Money;
  /** Lines by model and kind. Empty in lists. */
  readonly lines: readonly ResaleStatementLine[];
  /** Seconds of rented replicas, of each replica apart. */
  readonly replicaSecondCount: number;
}

/** Format of a statement as a file. */
export type ResaleStatementFormat =
  | "json"
  | "csv"
  | "pdf";

/**
 * Replicas of a model that an organization rents to one end user for some time. Each second of each
 * replica is on the end user's statement, at the resale price per hour in force when it starts.
 */
export interface ReplicaRental {
  /** Number of the rental. */
  readonly rentalId: number;
  /** Name of the end user. Empty for an erased one. */
  readonly endUser: string;
  /** UUID of the end user. */
  readonly endUserId: string;
  /** The model. */
  readonly model: string;
  /** Number of replicas. */
  readonly replicaCount: number;
  /** Start, a whole second. */
  readonly startTime: Date | undefined;
  /** End, a whole second, which is not charged. Unset: open. */
  readonly endTime: Date | undefined;
}

/** Part of the actual and simulated charges of one organization. */
export interface SimulatedModel {
  /** The model. Empty: lines of the plan that are for all models together. */
  readonly model: string;
  /** Tokens of all kinds. */
  readonly tokenCount: number;
  /** Actual charges: usage at its price, and the lines of the plan for this model. */
  readonly oldAmount: Money;
  /** Simulated charges. */
  readonly newAmount: Money;
  /** `new_amount` less `old_amount`. */
  readonly difference: Money;
}

/** Actual and simulated charges of a month for one organization. */
export interface SimulatedCustomer {
  /** The organization. */
  readonly organizationId: string;
  /** Its name. */
  readonly organizationName: string;
  /** Tokens of all kinds. */
  readonly tokenCount: number;
  /**
   * Actual charges: usage at its price, and the lines of the plan. Without adjustments, credit and
   * rounding.
   */
  readonly oldAmount: Money;
  /** Simulated charges. */
  readonly newAmount: Money;
  /** `new_amount` less `old_amount`. */
  readonly difference: Money;
  /** The actual plan; empty: none. */
  readonly oldPlan: string;
  /** The simulated plan. */
  readonly newPlan: string;
  /** The same by model, by its name; the amounts add up to those of the organization. */
  readonly models: readonly SimulatedModel[];
}

/** A token and its log-probability. */
export interface TokenLogprob {
  /** Id in the model's vocabulary. */
  readonly tokenId: number;
  /** Natural logarithm of its probability; 0 is certain. */
  readonly logprob: number;
}

/**
 * Log-probability of a token in the model's own distribution: before logit_bias, penalties,
 * response format and temperature.
 */
export interface TokenLogprobs {
  /** The token itself. */
  readonly chosen: TokenLogprob;
  /**
   * The likeliest tokens at its position, the likeliest first; their number is `top_logprobs` or
   * `prompt_logprobs`.
   */
  readonly top: readonly TokenLogprob[];
}

/** Grouping of usage rows. */
export type UsageGrouping =
  | "organization"
  | "day"
  | "project"
  | "api_key"
  | "model"
  | "request"
  | "end_user"
  | "label"
  | "hour";

/** Source of a price. unspecified: newer than this client. */
export type PriceSource =
  | "unspecified"
  | "list"
  | "organization";

/** Kind of a charge. unspecified: newer than this client. */
export type ChargeKind =
  | "unspecified"
  | "allowance"
  | "graduated"
  | "volume"
  | "commitment"
  | "adjustment"
  | "credit";

/**
 * Recipient of an organization's invoices. Unknown fields are empty. An address has at least
 * `address_line1` and `country`. No field may contain control characters or line breaks.
 */
export interface BillingProfile {
  /**
   * E-mail addresses, at most 10, distinct. Stripe sends invoices to the first; the others are for
   * the operator.
   */
  readonly emails: readonly string[];
  /**
   * Registered name, up to 256 characters. Empty: documents are addressed to the organization's
   * name.
   */
  readonly legalName: string;
  /** Street and number, up to 200 characters. */
  readonly addressLine1: string;
  /** Building, floor or department, up to 200 characters. */
  readonly addressLine2: string;
  /** City, up to 100 characters. */
  readonly city: string;
  /** Postal code, up to 20 characters. */
  readonly postalCode: string;
  /** State, province or region, up to 100 characters. */
  readonly state: string;
  /** ISO 3166-1 alpha-2 code, such as "DE". */
  readonly country: string;
  /** Tax id as printed on documents, up to 50 characters. It is not sent to Stripe. */
  readonly taxId: string;
  /** IETF language tag of Stripe's messages to the customer, such as "de" or "pt-BR". */
  readonly language: string;
}

/** Suspension of an organization or project. */
export interface Suspension {
  /** The reason that was given. */
  readonly reason: string;
  /** Time of the suspension. */
  readonly createTime: Date | undefined;
  /** False: the organization suspended its own project, and can resume it. */
  readonly byOperator: boolean;
}

/**
 * Choice for the prepaid credit that the final month of a closed organization leaves. unspecified:
 * newer than this client.
 */
export type RemainingCredit =
  | "unspecified"
  | "refund"
  | "expire"
  | "keep";

/** Closing of an organization or project: nothing opens it again. */
export interface Closure {
  /** The reason that was given. */
  readonly reason: string;
  /** Time of the closing. */
  readonly closeTime: Date | undefined;
  /** False: the organization closed its own project. */
  readonly byOperator: boolean;
  /**
   * What happens to the credit that the final month leaves; UNSPECIFIED for a project, and if none
   * remained.
   */
  readonly remainingCredit: RemainingCredit;
  /** The last month with requests, as YYYY-MM. */
  readonly finalMonth: string;
  /** Whether the final month of the organization is closed, with its invoice. */
  readonly isFinalMonthClosed: boolean;
}

/** A customer: it owns projects, keys and limits, and gets one bill a month. */
export interface Organization {
  /** Server-generated UUID. */
  readonly organizationId: string;
  /** Unique name: 1 to 63 of a-z, 0-9 and "-", starting with a letter. */
  readonly name: string;
  /** ISO 4217 code of its bills, such as "USD". It never changes. */
  readonly currencyCode: string;
  /** Time of creation. */
  readonly createTime: Date | undefined;
  /** Recipient of its invoices. Unset if never set. */
  readonly billingProfile: BillingProfile | undefined;
  /**
   * How much it counts in the fair queue, in thousandths: under load, twice the weight is twice the
   * service. 1000 if it was never set.
   */
  readonly queueWeightMilli: number;
  /** Why its requests are refused. Unset: they are not, or it is closed. */
  readonly suspension: Suspension | undefined;
  /** The region that its requests do not leave. Empty: it is bound to none. */
  readonly region: string;
  /** When and why it was closed for good. Unset: it is open. */
  readonly closure: Closure | undefined;
}

/** Objects that a closing changes, or that remain to be done, as they are at present. */
export interface ClosureEffects {
  /** Requests that run now: they end, and are billed what was delivered. */
  readonly runningRequestCount: number;
  /** Keys that work: they are revoked. */
  readonly activeKeyCount: number;
  /** Limits, which have nothing to limit any more. */
  readonly limitCount: number;
  /** Limits that are changed for a time. */
  readonly overriddenLimitCount: number;
  /** Projects of the organization that are not closed. */
  readonly openProjectCount: number;
  /**
   * Rentals of replicas that have not ended: they end, and are on the statement up to the second.
   */
  readonly openRentalCount: number;
  /** Whether a webhook stays for the alerts of the final invoice. */
  readonly hasWebhook: boolean;
  /** Months with content that are not closed yet, as YYYY-MM, with the present one. */
  readonly openMonths: readonly string[];
  /** Usage and other charges of open months. */
  readonly unbilled: Money | undefined;
  /** Prepaid credit that closed months have left. */
  readonly remainingCredit: Money | undefined;
}

/** The organization. */
export interface ClosedOrganization {
  /** With its closure, unless the request was `validate_only`. */
  readonly organization: Organization;
  /** What the closing changed, or would change. */
  readonly effects: ClosureEffects;
}

/** A subdivision of an organization, with its own keys. */
export interface Project {
  /** Server-generated UUID. */
  readonly projectId: string;
  /** The organization it belongs to. */
  readonly organizationId: string;
  /** Unique name inside the organization, formed like an organization's. */
  readonly name: string;
  /** Time of creation. */
  readonly createTime: Date | undefined;
  /**
   * Why the requests of its keys are refused. Unset: they are not, unless the organization is
   * suspended or one of both closed.
   */
  readonly suspension: Suspension | undefined;
  /** When and why it was closed for good. Unset: it is open, unless its organization is closed. */
  readonly closure: Closure | undefined;
}

/** The project. */
export interface ClosedProject {
  /** With its closure, unless the request was `validate_only`. */
  readonly project: Project;
  /**
   * What the closing changed, or would change. Of the organization, only the keys, requests and
   * limits of the project count.
   */
  readonly effects: ClosureEffects;
}

/** An API key without its secret. */
export interface ApiKey {
  /** Server-generated UUID. */
  readonly apiKeyId: string;
  /** UUID of the project whose usage the key counts as. */
  readonly projectId: string;
  /** Display name, such as that of the program that uses the key. Need not be unique. */
  readonly name: string;
  /** The first characters of the key, which identify it. */
  readonly prefix: string;
  /** Permissions: "inference", "admin", "billing", "scim". */
  readonly scopes: readonly string[];
  /** Time of creation. */
  readonly createTime: Date | undefined;
  /** Time of expiry. Unset: never. */
  readonly expireTime: Date | undefined;
  /** Time of revocation. Unset: not revoked. */
  readonly revokeTime: Date | undefined;
  /** The organization of its project. */
  readonly organizationId: string;
  /**
   * End of validity of the secret that the last rotation replaced. Unset: only one secret is valid.
   */
  readonly overlapEndTime: Date | undefined;
  /** Names of the allowed models; a name covers all versions of the model. Empty: all models. */
  readonly models: readonly string[];
  /**
   * Time of the last successful use, by a call or a message on an open stream, accurate to two
   * minutes. Unset: not used since `use_tracked_since_time`.
   */
  readonly lastUseTime: Date | undefined;
  /**
   * Time since when its uses are recorded: `create_time`, or later for keys older than this
   * feature.
   */
  readonly useTrackedSinceTime: Date | undefined;
  /**
   * Limit of input tokens per request: its prompt, or all texts to embed. 0: the model's own limit.
   * A larger request is InvalidRequest with the reason KEY_LIMIT_EXCEEDED.
   */
  readonly maxInputTokens: number | undefined;
  /**
   * Limit of output tokens per request, all choices together. 0: the model's own limit. A request
   * that asks for more is refused in the same way; one without a limit of its own ends there with
   * FINISH_REASON_LENGTH.
   */
  readonly maxOutputTokens: number | undefined;
  /**
   * Networks that may use the key, such as "203.0.113.0/24" or "2001:db8::/32". Empty: all. Calls
   * from other addresses get PermissionDenied with the reason ADDRESS_NOT_ALLOWED, and so do
   * running requests from there when the networks are narrowed.
   */
  readonly allowedNetworks: readonly string[];
  /** The name of the organization of its project. */
  readonly organizationName: string;
  /** Name of its project, unique within the organization. */
  readonly projectName: string;
  /**
   * Refuses unknown parameters over HTTP, as `?strict=1` does for one request; `?strict=0` does not
   * relax it. False: those that cannot change the answer are ignored and named in a header.
   */
  readonly strictParameters: boolean;
  /**
   * Group of the key within its organization, such as "free". Limits can be set for each key of a
   * group: `SetQuotaRequest.for_each`. Empty: none.
   */
  readonly group: string;
  /**
   * Role of the key in its organization: "owner", "admin", "developer", "finance" or "viewer". It
   * permits calls beside those of the scopes. Empty: none.
   */
  readonly role: string;
  /**
   * True for a key without a secret: it acts for a signed-in member, or for callers whose tokens
   * are trusted. No secret authenticates it, and it cannot be rotated.
   */
  readonly isBound: boolean;
  /** The person whom the key belongs to. It ends with the person's membership. Empty: none. */
  readonly personId: string;
  /** The service account that the key belongs to. Empty: none. */
  readonly serviceAccountId: string;
  /** The person who created the key. Empty: a key without a person, or the service itself. */
  readonly creatorId: string;
}

/** The key with its secret, which no later call returns. */
export interface CreatedApiKey {
  /** The new key, or with `allow_existing` the active one of this name. */
  readonly apiKey: ApiKey;
  /**
   * The secret to send as bearer token. It is returned only once: empty if the key existed before.
   * RotateApiKey creates a new one.
   */
  readonly secret: string;
  /** True if it existed before: by its name, or because the call was repeated. */
  readonly existed: boolean;
}

/** The rotated key. */
export interface RotatedApiKey {
  /** The key, with unchanged id, prefix and limits. */
  readonly apiKey: ApiKey;
  /** The new secret. It is returned only once: empty if this repeats a call. */
  readonly secret: string;
  /** End of validity of the replaced secret. */
  readonly overlapEndTime: Date | undefined;
}

/** State of a key. unspecified: newer than this client. */
export type ApiKeyState =
  | "unspecified"
  | "valid"
  | "ended";

/** Requests of one day. */
export interface PreviewedDay {
  /** Day as YYYY-MM-DD, in UTC. */
  readonly day: string;
  /** Requests that the limit concerns. */
  readonly requestCount: number;
  /** Those that it would have refused. */
  readonly refusedCount: number;
  /** Those whose output it would have ended early. */
  readonly shortenedCount: number;
}

/** Requests of an end user, of a label value, or of a key. */
export interface PreviewedMember {
  /**
   * Its name: of an end user or label value as requests gave it, of a key its prefix. Empty for an
   * erased end user.
   */
  readonly name: string;
  /** Requests that the limit concerns. */
  readonly requestCount: number;
  /** Those that it would have refused. */
  readonly refusedCount: number;
  /** Those whose output it would have ended early. */
  readonly shortenedCount: number;
}

/**
 * Effect of a limit on past requests. Three things are not recorded, so that they cannot be known:
 * requests that were refused, which another limit may have admitted; whether clients would have
 * repeated what this limit refuses; and when within a minute a running request asked for more
 * output.
 */
export interface QuotaPreview {
  /** First moment of the preview. */
  readonly startTime: Date | undefined;
  /** End of the preview. */
  readonly endTime: Date | undefined;
  /**
   * Requests that the limit concerns and that were admitted in this time. Without requests that
   * ended before any billable work.
   */
  readonly requestCount: number;
  /** Those of them that the limit would have refused. */
  readonly refusedCount: number;
  /** Admitted requests whose output the limit would have ended early. */
  readonly shortenedCount: number;
  /** Time of the first refusal; unset without one. */
  readonly firstRefusalTime: Date | undefined;
  /** The same by day (UTC), in order; only days with requests. */
  readonly days: readonly PreviewedDay[];
  /** With `for_each`: by end user, label value or key, the most refused first, at most 100. */
  readonly members: readonly PreviewedMember[];
  /** Number of end users, label values or keys with requests; 0 without `for_each`. */
  readonly memberCount: number;
  /** Those of them with a refusal. */
  readonly refusedMemberCount: number;
}

/** One immutable price version; corrections are later versions. */
export interface PriceVersion {
  /** Version number. */
  readonly version: number;
  /** The priced model. */
  readonly model: string;
  /** ISO 4217 code. */
  readonly currencyCode: string;
  /** The priced service tier. */
  readonly tier: "interactive" | "batch";
  /** The organization, for its own price; empty for the list price. */
  readonly organizationId: string;
  /** That organization's name; empty for the list price. */
  readonly organizationName: string;
  /** Picos per uncached input token. */
  readonly inputPicosPerToken: bigint;
  /** Picos per cached input token. */
  readonly cachedInputPicosPerToken: bigint;
  /** Picos per output token that is not thinking. */
  readonly outputPicosPerToken: bigint;
  /** Picos per embedded token. */
  readonly embeddingPicosPerToken: bigint;
  /**
   * Thousandths of the interactive prices that these were derived with. 1000 for the interactive
   * tier.
   */
  readonly multiplierMilli: number;
  /** Start of validity. */
  readonly effectiveTime: Date | undefined;
  /**
   * True if it only ends the organization's own price: the list price applies from then on. Its
   * prices are 0 and never charged.
   */
  readonly withdrawn: boolean;
  /** Picos per output token of the model's thinking. */
  readonly reasoningPicosPerToken: bigint;
}

/** Price that applies to a model in a service tier, with its source. */
export interface AppliedPrice {
  /** The model. */
  readonly model: string;
  /**
   * The requested service tier. `version.tier` differs if that tier has no price of its own and
   * uses the interactive one.
   */
  readonly tier: "interactive" | "batch";
  /** Source of the price. */
  readonly source: PriceSource;
  /** Price version of requests admitted at this time. */
  readonly version: PriceVersion;
}

/** Prices. */
export interface PriceList {
  /** Prices in force at that time, by model, currency and tier. */
  readonly prices: readonly AppliedPrice[];
  /**
   * With `history`: all versions of list prices and of the organization's own, the oldest of each
   * tier first.
   */
  readonly versions: readonly PriceVersion[];
}

/** Credit that an organization may use for the charges of some months. */
export interface CreditGrant {
  /** Server-generated UUID. */
  readonly grantId: string;
  /** The organization. */
  readonly organizationId: string;
  /** Its name. */
  readonly organizationName: string;
  /** Granted amount. */
  readonly amount: Money;
  /** Amount spent by closed months. */
  readonly spent: Money;
  /** Expired amount. */
  readonly expired: Money;
  /** Remaining amount, counting closed months. */
  readonly remaining: Money;
  /** First month that it covers, as YYYY-MM. */
  readonly firstMonth: string;
  /** Last month that it covers. The rest expires at its close. */
  readonly lastMonth: string;
  /** Reason. */
  readonly reason: string;
  /** Author of the grant: the prefix of the API key. */
  readonly grantedBy: string;
  /** Time of the grant. */
  readonly createTime: Date | undefined;
  /** Amount owed to the customer since its organization was closed. */
  readonly refunded: Money;
}

/** An organization's current credit. */
export interface CreditBalance {
  /** The organization. */
  readonly organizationId: string;
  /** Its name. */
  readonly organizationName: string;
  /** True if requests are admitted only within the credit. */
  readonly prepaid: boolean;
  /** Remainder of grants for this month and later ones, counting closed months. */
  readonly remaining: Money;
  /** Charges of open months so far. */
  readonly unbilled: Money;
  /** Held by running requests of a prepaid organization. */
  readonly held: Money;
  /**
   * Spendable this month: `remaining` less `unbilled` and `held`, as far as the grants' months
   * allow it.
   */
  readonly available: Money;
}

/** Audit entries, and the position after them. */
export interface AuditPage {
  /** Oldest first. May be empty before the end while a change is under way: ask again. */
  readonly entries: readonly AuditEntry[];
  /** Where the next call continues: no entry appears before it any more. */
  readonly position: number;
}

/** Phase of a request. unspecified: newer than this client. */
export type RequestPhase =
  | "unspecified"
  | "preparing"
  | "queued"
  | "loading"
  | "prefill"
  | "decode"
  | "ending";

/** A running or waiting request. Its content is never exposed. */
export interface LiveRequest {
  /** Id chosen by the client, unique in its project. */
  readonly requestId: string;
  /** The billed organization. */
  readonly organizationId: string;
  /** Its name. */
  readonly organizationName: string;
  /** The project of its key. */
  readonly projectId: string;
  /** Its name. */
  readonly projectName: string;
  /** The API key of the request. */
  readonly apiKeyId: string;
  /** The key's first characters. */
  readonly apiKeyPrefix: string;
  /** Model of the request. */
  readonly model: string;
  /** Phase of the request. */
  readonly phase: RequestPhase;
  /** Time since its arrival; since its admission if not reported by its process. */
  readonly ageMs: number | undefined;
  /** Tokens of the prompt. 0 while it is being prepared. */
  readonly inputTokenCount: number;
  /** Part of the input tokens from the prefix cache. */
  readonly cachedInputTokenCount: number;
  /** Output tokens handed to the transport. */
  readonly deliveredTokenCount: number;
  /** Output tokens per second since the first one. 0 before the second token. */
  readonly tokensPerSecond: number;
  /** Output tokens covered by its hold so far. 0 without a hold. */
  readonly leasedTokenCount: number;
  /** Time when its hold was taken. Unset: it waits for one, and counts against no quota yet. */
  readonly admitTime: Date | undefined;
  /** Time when its hold expires unless its process extends it. Unset without a hold. */
  readonly expireTime: Date | undefined;
  /** UUID of the api process that runs it. */
  readonly processId: string;
  /** Display name of that process: "host:pid". Empty if not reported. */
  readonly processName: string;
  /** The end user of the request. Empty: none was given. Unset without a hold. */
  readonly endUser: string;
  /** The labels of the request. Empty without a hold. */
  readonly labels: Readonly<Record<string, string>>;
}

/** Totals of one organization's live requests. */
export interface LiveOrganization {
  /** UUID of the organization. */
  readonly organizationId: string;
  /** Its name. */
  readonly name: string;
  /** Running and waiting requests. */
  readonly requestCount: number;
  /** Requests with a hold. */
  readonly holdCount: number;
  /** Tokens of these holds: input and leased output. */
  readonly heldTokenCount: number;
  /** Output tokens per second over all of them. */
  readonly tokensPerSecond: number;
}

/** Live requests. */
export interface LiveView {
  /** The oldest first. */
  readonly requests: readonly LiveRequest[];
  /** Sorted by name; only organizations with live requests. */
  readonly organizations: readonly LiveOrganization[];
  /** Number of all requests, including those beyond `page_size`. */
  readonly requestCount: number;
  /** Processes with holds that did not answer: data about their requests may be outdated. */
  readonly unresponsiveProcessIds: readonly string[];
}

/** The record of one request and its owner. Its content is never exposed. */
export interface RecordedRequest {
  /** The record. */
  readonly generation: Generation;
  /** Name of the billed organization. */
  readonly organizationName: string;
  /** Name of the project of its key. */
  readonly projectName: string;
  /** First characters of the request's API key. */
  readonly apiKeyPrefix: string;
}

/** Result of ending a request. unspecified: newer than this client. */
export type KillResult =
  | "unspecified"
  | "ended"
  | "already-ended"
  | "pending";

/** Result of ending a request. */
export interface KilledRequest {
  /** Whether it has ended. */
  readonly result: KillResult;
  /** Its record, with the final usage once it is settled. Unset if it waited without a hold. */
  readonly generation: Generation | undefined;
  /** Latest expiry of its hold. Set for RESULT_PENDING only. */
  readonly expireTime: Date | undefined;
}

/** State of an engine. unspecified: newer than this client. */
export type ReplicaState =
  | "unspecified"
  | "cold"
  | "loading"
  | "ready"
  | "restarting"
  | "failed"
  | "closed"
  | "draining"
  | "tripped";

/** One engine of one process. A remote server has one in each connected process. */
export interface Replica {
  /** The model, as `name` or, if it has versions, `name@version`. */
  readonly model: string;
  /**
   * Name of the replica: unique for the model, and the same in all processes with the same fleet
   * file.
   */
  readonly replica: string;
  /** Region. Empty: it serves every region. */
  readonly region: string;
  /** State of the engine. */
  readonly state: ReplicaState;
  /** Reason of the state; may be empty. */
  readonly reason: string;
  /** Whether this process has applied an admin's drain order, whatever the state. */
  readonly drained: boolean;
  /** Running requests of this process. */
  readonly requestCount: number;
  /** Estimated tokens still to compute for them. */
  readonly outstandingTokenCount: number;
  /** UUID of the api process. */
  readonly processId: string;
  /** Display name of the process: "host:pid". */
  readonly processName: string;
}

/**
 * An admin's order to drain a replica. It holds until it is ended, even for processes that start
 * later.
 */
export interface ReplicaDrain {
  /** The model, as `name` or `name@version`. */
  readonly model: string;
  /** The name of the replica. */
  readonly replica: string;
  /** Reason given with the order. May be empty. */
  readonly reason: string;
  /** Time of the order. */
  readonly drainTime: Date | undefined;
  /** Time after the order when running requests move to other replicas. Unset: never. */
  readonly moveAfterMs: number | undefined;
}

/** The engines. */
export interface ReplicaList {
  /**
   * Sorted by model, name and process. An adapter runs in the engines of its model, which are
   * listed here.
   */
  readonly replicas: readonly Replica[];
  /** Present drain orders. */
  readonly drains: readonly ReplicaDrain[];
  /** Processes with holds that did not answer; their replicas are unknown. */
  readonly unresponsiveProcessIds: readonly string[];
}

/** The order, and the processes that have applied it. */
export interface DrainedReplica {
  /** The order. */
  readonly drain: ReplicaDrain;
  /** This replica in each process that answered and has applied the order. */
  readonly replicas: readonly Replica[];
  /**
   * Processes with holds that did not answer. They apply the order within seconds, or when they are
   * back.
   */
  readonly unresponsiveProcessIds: readonly string[];
}

/** The processes with the replica back in service. */
export interface UndrainedReplica {
  /** True if there was an order; otherwise nothing was done. */
  readonly undrained: boolean;
  /** This replica in each process that answered. */
  readonly replicas: readonly Replica[];
  /**
   * Processes with holds that did not answer. They apply the change within seconds, or when they
   * are back.
   */
  readonly unresponsiveProcessIds: readonly string[];
}

/** Webhook for an organization's alerts, without the secret that signs them. */
export interface AlertWebhook {
  /** UUID of the organization. */
  readonly organizationId: string;
  /** The organization's name. */
  readonly organizationName: string;
  /** URL that alerts are posted to. */
  readonly url: string;
  /** Time when it was last set. */
  readonly createTime: Date | undefined;
  /** Number of alerts to deliver. */
  readonly pendingCount: number;
  /** Failed attempts since the last success. */
  readonly failureCount: number;
  /** No attempt is made before this time after failures. Unset if not paused. */
  readonly pauseEndTime: Date | undefined;
  /** Error of the latest failed attempt. Empty if none failed. */
  readonly lastError: string;
}

/** The webhook. */
export interface CreatedAlertWebhook {
  /** The webhook after the change. */
  readonly webhook: AlertWebhook;
  /** The new signing secret; returned only in this response. Empty in a repetition. */
  readonly secret: string;
}

/** Action on the object. unspecified: newer than this client. */
export type ChangeAction =
  | "unspecified"
  | "create"
  | "update"
  | "delete"
  | "keep";

/** One changed field. */
export interface FieldChange {
  /** Name in the configuration. */
  readonly field: string;
  /** Value before, as JSON; empty if absent. */
  readonly beforeJson: string | undefined;
  /** Value after, as JSON; empty if absent. */
  readonly afterJson: string | undefined;
}

/** One difference between the current and the desired state. */
export interface ConfigurationChange {
  /** Action. */
  readonly action: ChangeAction;
  /**
   * Kind of the object: "organization", "billing_profile", "project", "key", "quota", "price",
   * "resale_price", "member", "invitation" or "token_issuer".
   */
  readonly kind: string;
  /**
   * Path of the object: "acme", "acme/search", "acme/search/laptop"; for a price the model and its
   * customer. A quota has the path of its subject; a member that of its organization and address.
   */
  readonly path: string;
  /**
   * Identity of a quota: dimension, `window_minutes`, model, `for_new_keys`, `for_each`, `end_user`
   * and `label`.
   */
  readonly quota: JsonValue | undefined;
  /** Changed fields; all fields of a new object. */
  readonly fields: readonly FieldChange[];
  /** The first characters of a key. For a new key only after its creation. */
  readonly apiKeyPrefix: string;
  /** Secret of a new key, or token of a new invitation, returned only when it is created. */
  readonly secret: string;
}

/** One violation in a configuration. */
export interface ConfigurationViolation {
  /** Path in `Configuration`, for example "organizations[0].projects[2].quotas[1].limit_value". */
  readonly field: string;
  /** The violation and its remedy. */
  readonly description: string;
}

/** Applied or planned changes. */
export interface AppliedConfiguration {
  /** In the order of the configuration; empty if there are none. */
  readonly changes: readonly ConfigurationChange[];
  /**
   * Existing objects that the configuration does not name, inside objects that it names; with
   * ACTION_KEEP.
   */
  readonly kept: readonly ConfigurationChange[];
  /**
   * All violations in the configuration. If there are any, nothing is changed, and the other fields
   * are empty.
   */
  readonly violations: readonly ConfigurationViolation[];
}

/** One version of the fleet. Versions are only added; the newest one is in force. */
export interface FleetVersion {
  /** Number, from 1. 0: no version is stored, and each process serves the fleet of its settings. */
  readonly number: number;
  /**
   * The fleet in canonical form: YAML with the keys of a fleet file, without defaults, with
   * absolute paths on the machines of the servers. Empty in lists.
   */
  readonly document: string;
  /** SHA-256 of the document, in hexadecimal. */
  readonly digest: string;
  /** Author: the prefix of an API key, or "system" for the file of a server's settings. */
  readonly actor: string;
  /** Reason that the author gave. May be empty. */
  readonly reason: string;
  /** Time when it was added. Unset for number 0. */
  readonly createTime: Date | undefined;
}

/** Version that one api process serves. */
export interface FleetProcess {
  /** UUID of the api process. */
  readonly processId: string;
  /** Display name of the process: "host:pid". */
  readonly processName: string;
  /** Number of the version that it serves; 0: the fleet of its settings. */
  readonly number: number;
  /** Why it does not serve the newest version yet; empty if it does. */
  readonly fault: string;
}

/** The version, and what the processes serve. */
export interface ServedFleet {
  /** The version. With number 0, the fleet of the settings of the process that answers. */
  readonly version: FleetVersion;
  /** What each process serves now. Empty if `number` was set. */
  readonly processes: readonly FleetProcess[];
  /** Processes that did not answer. */
  readonly unresponsiveProcessIds: readonly string[];
}

/** Difference between two fleets at one place. */
export interface FleetChange {
  /** Place in the document, such as "models.chat.versions.v2.weight". */
  readonly path: string;
  /** Value before, as JSON; empty if there was none. */
  readonly beforeJson: string;
  /** Value after, as JSON; empty if there is none. */
  readonly afterJson: string;
}

/** Error in a document. */
export interface FleetViolation {
  /** Line, from 1; 0: the document as a whole. */
  readonly line: number;
  /** Place in the document, such as "models.chat.directory". May be empty. */
  readonly location: string;
  /** Description of the error, with the allowed values. */
  readonly message: string;
}

/** The new version, or why there is none. */
export interface AppliedFleet {
  /**
   * The version in force: the new one, or the present one if the document changes nothing, has
   * violations, or with `dry_run`. Without its document.
   */
  readonly version: FleetVersion;
  /** Changes from the version before. With `dry_run`, those that the call would make. */
  readonly changes: readonly FleetChange[];
  /** Errors of the document: nothing was changed. */
  readonly violations: readonly FleetViolation[];
}

/** Result of an erasure. */
export interface ErasedEndUser {
  /** True if anything had the name. */
  readonly erased: boolean;
  /** Number of limits that ended. */
  readonly limitCount: number;
  /** Number of requests from which labels with this value were removed. */
  readonly labelledRequestCount: number;
}

/** The invitation with its token, which no later call returns. */
export interface CreatedInvitation {
  /** The invitation. */
  readonly invitation: Invitation;
  /** The token to hand to the person. It is returned only once: empty if the call was repeated. */
  readonly token: string;
}

/** The invitation with its new token. */
export interface ResentInvitation {
  /** The invitation after the change. */
  readonly invitation: Invitation;
  /** The new token. The former one is refused from now on. */
  readonly token: string;
}

/** A member: a person with a role in an organization. */
export interface Member {
  /** Server-generated UUID of the membership. */
  readonly membershipId: string;
  /** UUID of the person. */
  readonly personId: string;
  /** E-mail address of the person. */
  readonly email: string;
  /** Name to show of the person. */
  readonly displayName: string;
  /** UUID of the organization. */
  readonly organizationId: string;
  /** Name of the organization. */
  readonly organizationName: string;
  /**
   * UUID of the project that the member's own usage counts as; a developer has access to no other.
   */
  readonly projectId: string;
  /** Name of that project. */
  readonly projectName: string;
  /** "owner", "admin", "developer", "finance" or "viewer"; or "operator", of the whole service. */
  readonly role: string;
  /** UUID of the bound key that acts for the member. */
  readonly apiKeyId: string;
  /** Prefix of that key, which the audit log names as the author of changes. */
  readonly keyPrefix: string;
  /** Time at which the invitation was accepted. */
  readonly createTime: Date | undefined;
  /**
   * Time since when all keys of the person in the organization are refused: the operator has
   * deactivated the person, or the organization's identity provider the member. Unset: active.
   */
  readonly deactivateTime: Date | undefined;
}

/** The new member. */
export interface AcceptedInvitation {
  /** The membership. */
  readonly member: Member;
  /** The secret of the new key, with `create_key`. No later call returns it. */
  readonly secret: string;
}

/** The member is removed. */
export interface RemovedMember {
  /** Prefixes of the keys that were revoked. */
  readonly revokedKeys: readonly string[];
  /** Prefixes of the keys that the person created and that stay. */
  readonly keptKeys: readonly string[];
}

/** A program of an organization that owns keys. */
export interface ServiceAccount {
  /** Server-generated UUID. */
  readonly serviceAccountId: string;
  /** UUID of the organization. */
  readonly organizationId: string;
  /** Name of the organization. */
  readonly organizationName: string;
  /** Name, unique among the organization's service accounts. */
  readonly name: string;
  /** Role of its keys: see `ApiKey.role`. Empty: its keys are for models. */
  readonly role: string;
  /** Time of creation. */
  readonly createTime: Date | undefined;
  /** Number of its keys that are not revoked. */
  readonly keyCount: number;
}

/** A person, whichever organizations it is a member of. */
export interface Person {
  /** Server-generated UUID. */
  readonly personId: string;
  /** E-mail address, in lower case. Unique in the service. */
  readonly email: string;
  /** Name to show. */
  readonly displayName: string;
  /** Time of the first invitation that the person accepted. */
  readonly createTime: Date | undefined;
  /** Time since when all keys of the person are refused. Unset: active. */
  readonly deactivateTime: Date | undefined;
}

/** A project whose bound key acts for tokens with a value of the project claim. */
export interface TokenProject {
  /** Value of the claim. Empty without a project claim. */
  readonly claimValue: string;
  /** Name of the project. */
  readonly projectName: string;
  /** Id of the bound key. Its terms are changed with UpdateApiKey. */
  readonly apiKeyId: string;
  /** Its prefix. */
  readonly prefix: string;
}

/**
 * An issuer whose tokens for one audience authenticate callers of one organization. A bound key
 * acts for them: its limits, usage and bills are theirs. Claims only narrow what the key may do; a
 * claim that is named here must be in each token.
 */
export interface TokenIssuer {
  /** Id, generated by the service. */
  readonly tokenIssuerId: string;
  /** The organization. */
  readonly organizationId: string;
  /** Its name. */
  readonly organizationName: string;
  /** URL of the issuer, exactly as in the claim `iss`. */
  readonly issuer: string;
  /** Audience that must be in the claim `aud`. */
  readonly audience: string;
  /** Accepted algorithms, such as "ES256". Empty: all asymmetric ones. */
  readonly algorithms: readonly string[];
  /** URL of the issuer's public keys. Empty, without `keys`: its discovery document has it. */
  readonly keysUrl: string;
  /** Public keys as a JSON Web Key Set. Empty: they are read from the issuer. */
  readonly keys: string;
  /** By how much the clocks of issuer and service may differ. */
  readonly leewayMs: number | undefined;
  /** Longest life of a token, from `iat` to `exp`. */
  readonly lifetimeMaxMs: number | undefined;
  /** Required header `typ`, such as "at+jwt". Empty: "JWT", "at+jwt" or none. */
  readonly tokenType: string;
  /** True if tokens without `jti` are refused. */
  readonly requiresId: boolean;
  /** Claim that chooses the project. Empty: there is one project. */
  readonly projectClaim: string;
  /** Claim that names the end user, such as "sub". Empty: requests name it. */
  readonly endUserClaim: string;
  /** Claim with the allowed models, a list or a text with blanks. Empty: those of the key. */
  readonly modelsClaim: string;
  /** Claim with the output tokens per request. Empty: the key's limit. */
  readonly maxOutputTokensClaim: string;
  /** Claims that become labels of each request. */
  readonly labelClaims: readonly string[];
  /** The projects with their bound keys. */
  readonly projects: readonly TokenProject[];
  /** When it was trusted. */
  readonly createTime: Date | undefined;
  /** True if each token is good for one call: the second one is refused, even on another server. */
  readonly singleUse: boolean;
}

/** Tokens of an issuer that are refused before they expire. */
export interface TokenRevocation {
  /** The claim that names the tokens: "jti", "sid" or "sub". */
  readonly claim: string;
  /** Its value. */
  readonly value: string;
  /** When the last of them would have expired, and the revocation is forgotten. */
  readonly expireTime: Date | undefined;
}

/** A group of an organization's identity provider, with the role that it gives. */
export interface ProvisionedGroup {
  /** UUID of the group. Empty: a role is set for its name, and it is not provisioned yet. */
  readonly groupId: string;
  /** Name of the group. Letter case does not matter. */
  readonly group: string;
  /** Number of its users. */
  readonly memberCount: number;
  /** Role of its members in the organization: see `ApiKey.role`. Empty: it gives none. */
  readonly role: string;
  /** UUID of the project of its members. Empty: the oldest one. */
  readonly projectId: string;
  /** Name of that project. */
  readonly projectName: string;
}

/** Result of an erasure, or of its dry run. */
export interface ErasedPerson {
  /** UUID of the person, which stays. */
  readonly personId: string;
  /** Names of the organizations whose membership ended. */
  readonly organizations: readonly string[];
  /** Number of keys that were revoked. */
  readonly keyCount: number;
  /** Number of sessions that were deleted. */
  readonly sessionCount: number;
  /** Number of invitations that lost the address. */
  readonly invitationCount: number;
  /** Number of users of identity providers that were deleted, with their names. */
  readonly provisionedUserCount: number;
  /** Number of entries of the audit log that lost a name or an address. */
  readonly auditEntryCount: number;
}

/** Percentiles of a duration, in milliseconds. 0 where nothing was measured. */
export interface Latency {
  /** Median in each step. */
  readonly p50Ms: readonly number[];
  /** 99th percentile in each step. */
  readonly p99Ms: readonly number[];
  /** Median of the whole period. */
  readonly periodP50Ms: number;
  /** 99th percentile of the whole period. */
  readonly periodP99Ms: number;
}

/** Refused and failed requests of one reason. */
export interface TrafficError {
  /** The reason, as in `ErrorInfo`. */
  readonly reason: string;
  /** Number of requests. */
  readonly count: number;
}

/**
 * Traffic of one model, step by step. Percentiles are of the sum of the histograms of all
 * processes, interpolated within a bucket, and never averages of percentiles.
 */
export interface ModelTraffic {
  /** Name of the model. */
  readonly model: string;
  /** Requests that ended, with refused and failed ones. */
  readonly requestCounts: readonly number[];
  /** The part of them that was refused or has failed. */
  readonly errorCounts: readonly number[];
  /** Computed input tokens, without cached ones. */
  readonly inputTokenCounts: readonly number[];
  /** Input tokens from the prefix cache. */
  readonly cachedInputTokenCounts: readonly number[];
  /** Output tokens. */
  readonly outputTokenCounts: readonly number[];
  /** Tokens of embedded texts. */
  readonly embeddingTokenCounts: readonly number[];
  /** Requests that ran, on average over the step. */
  readonly runningCounts: readonly number[];
  /** Requests that waited, on average over the step. */
  readonly waitingCounts: readonly number[];
  /** Time to the first token. */
  readonly firstToken: Latency;
  /** Time between two messages with tokens. */
  readonly interToken: Latency;
  /** Why requests were refused or have failed, the most frequent reason first. */
  readonly errors: readonly TrafficError[];
}

/**
 * Traffic of all api processes together. Requests and tokens are counted when their request ends.
 */
export interface Traffic {
  /**
   * Begin of the first step. The last step ends at most 20 s before the call: processes add their
   * counts every 15 s.
   */
  readonly startTime: Date | undefined;
  /** Length of a step. */
  readonly stepMs: number | undefined;
  /** Number of steps. Every list of a model has an element for each. */
  readonly stepCount: number;
  /** Sum over all models; its name is empty. */
  readonly total: ModelTraffic;
  /**
   * The models with requests in the period, those with most requests first. Requests for models
   * that do not exist have an empty name.
   */
  readonly models: readonly ModelTraffic[];
}

/** Period of a traffic report. unspecified: newer than this client. */
export type TrafficPeriod =
  | "unspecified"
  | "quarter-hour"
  | "hour"
  | "day";

/** Kind of a concern. unspecified: newer than this client. */
export type ConcernKind =
  | "unspecified"
  | "worker-missing"
  | "usage-unbilled"
  | "holds-overdue"
  | "export-late"
  | "webhook-failing"
  | "month-open"
  | "adjustment-waiting";

/** Something that an operator should look at. */
export interface Concern {
  /** Its kind. */
  readonly kind: ConcernKind;
  /** Name of the organization. Empty: it concerns all. */
  readonly organizationName: string;
  /** Object of the concern, by kind. */
  readonly subject: string;
  /** Number, by kind. */
  readonly count: number;
  /** How long it has lasted. Unset if unknown. */
  readonly ageMs: number | undefined;
  /** Error or reason, for people. May be empty. */
  readonly detail: string;
}

/** Kind of a token, each of which has its own price. unspecified: newer than this client. */
export type TokenKind =
  | "unspecified"
  | "input"
  | "cached-input"
  | "output"
  | "embedding"
  | "reasoning";

/** Usage of one model at one price version, for one kind of token. */
export interface MonthReportLine {
  /** Name of the model that ran the requests, without aliases. */
  readonly model: string;
  /** Kind of the tokens, each of which has its own price. */
  readonly tokenKind: TokenKind;
  /** The price version that applied. */
  readonly priceVersion: number;
  /** Requests with at least one token of this kind. */
  readonly requestCount: number;
  /** Number of tokens of this kind, those of cancelled requests included. */
  readonly tokenCount: number;
  /** Tokens of `token_count` that belong to cancelled requests. */
  readonly cancelledTokenCount: number;
  /** Price per token in picos: 1e-12 of the currency unit. */
  readonly unitPricePicos: bigint;
  /** `token_count` times `unit_price_picos`, exact. */
  readonly amount: Money;
  /**
   * The month of the usage as YYYY-MM, if that was closed before the usage was posted; else empty.
   */
  readonly lateMonth: string;
  /**
   * `amount` in whole minor units, rounded by itself. In months closed with report_format 2, the
   * line's part of `total_rounded`.
   */
  readonly roundedAmount: Money | undefined;
  /** The service tier of the price version: "interactive" or "batch". */
  readonly tier: string;
}

/** Number of requests by outcome. */
export interface RequestCounts {
  /** All requests. */
  readonly totalCount: number;
  /** Ended by the model, a stop sequence or a length limit. */
  readonly completedCount: number;
  /** Cancelled by the client, by its disconnection or by a deadline. */
  readonly cancelledCount: number;
  /** Ended by a quota, a cost limit, a slow consumer or a filter. */
  readonly limitedCount: number;
  /** Failed by the server; delivered output is settled. */
  readonly failedCount: number;
}

/** Comparison of usage and ledger. */
export interface Reconciliation {
  /** Tokens of all kinds in the usage events of the month. */
  readonly usageTokenCount: number;
  /** Tokens of all kinds in the ledger postings of the month. */
  readonly ledgerTokenCount: number;
  /** Tokens of all kinds in events that are not rated yet. */
  readonly unratedTokenCount: number;
  /** True if usage = ledger + unrated. */
  readonly balanced: boolean;
}

/** State of an organization's month. unspecified: newer than this client. */
export type MonthState =
  | "unspecified"
  | "open"
  | "closing"
  | "closed";

/** A line of the month besides usage: of the plan, of credit, or a correction. */
export interface MonthCharge {
  /** Which rule caused the charge. */
  readonly kind: ChargeKind;
  /** Text of the line on the documents, for people. */
  readonly description: string;
  /** Exact amount; negative for reductions. */
  readonly amount: Money;
  /** `amount` in whole minor units. See `MonthReportLine.rounded_amount`. */
  readonly roundedAmount: Money;
  /** The model whose tokens it concerns; empty for all models. */
  readonly model: string;
  /** Number of tokens; 0 if not applicable. */
  readonly tokenCount: number;
  /** Id of the adjustment or the credit grant; empty for lines of the plan. */
  readonly sourceId: string;
}

/** Changes of an organization's prepaid credit in a month. */
export interface PrepaidCredit {
  /** Credit that was granted in the month. */
  readonly granted: Money;
  /** Credit that expired unused at the end of the month. */
  readonly expired: Money;
  /** Credit left after the charges and the expiry of the month. */
  readonly remaining: Money;
  /** Credit that the final month of a closed organization left, to be paid back. */
  readonly refunded: Money;
}

/** A credit note in the report of its month. */
export interface CreditNoteSummary {
  /** Number of the credit note, as printed on it. */
  readonly number: string;
  /** Number of the invoice that it corrects. */
  readonly invoiceNumber: string;
  /** Refunded amount; above zero. */
  readonly amount: Money;
  /** Reason that its author gave, shown on the document. */
  readonly reason: string;
}

/** One month of one organization. */
export interface MonthReport {
  /** The organization's name. */
  readonly organizationName: string;
  /** The organization's id. */
  readonly organizationId: string;
  /** The month as YYYY-MM, in UTC. */
  readonly month: string;
  /** One line per model, price version and token kind, in that order. */
  readonly lines: readonly MonthReportLine[];
  /** Number of requests of the month, by outcome. */
  readonly requestCounts: RequestCounts;
  /** Sum of the lines and charges, exact to the pico and before rounding. */
  readonly total: Money;
  /** Amount owed: total + carried_in, rounded half up to the currency's minor unit. */
  readonly totalRounded: Money;
  /**
   * Usage events that are recorded but not yet rated into the ledger, and so not included in the
   * lines.
   */
  readonly unratedEventCount: number;
  /** Comparison of the lines with the usage events. */
  readonly reconciliation: Reconciliation;
  /** State of the month. For an open month, the report shows the invoice as of now. */
  readonly state: MonthState;
  /** Number of the invoice; empty before the close, and for a month with nothing to invoice. */
  readonly invoiceNumber: string;
  /** When the month was closed; unset while it is open. */
  readonly closeTime: Date | undefined;
  /** Author of the close: the prefix of a key. */
  readonly closedBy: string;
  /** Charges and deductions besides usage, in the order of the invoice. */
  readonly charges: readonly MonthCharge[];
  /** Rounding remainder of previous months; part of `total_rounded`, not of `total`. */
  readonly carriedIn: Money | undefined;
  /** Rounding remainder for the next month: total + carried_in - total_rounded. */
  readonly carriedOut: Money | undefined;
  /** Prepaid credit granted, expired and remaining. */
  readonly prepaidCredit: PrepaidCredit | undefined;
  /** Credit notes of the month. They are separate from the invoice and its total. */
  readonly creditNotes: readonly CreditNoteSummary[];
  /** Tax treatment of the amounts: "tax not included". */
  readonly taxNote: string;
  /** Version of the format of this month's documents. */
  readonly reportFormat: number;
  /** Root of the month's receipts, in hexadecimal; empty if there are none. */
  readonly receiptsRoot: string;
  /**
   * Recipient of the month's documents; for a closed month as it was at the close. Unset without a
   * profile.
   */
  readonly billingProfile: BillingProfile | undefined;
  /** Completes the rounded amounts of lines and charges: their sum + rounding = total_rounded. */
  readonly rounding: Money | undefined;
}

/** One end user. */
export interface EndUserLimits {
  /** The end user. */
  readonly endUser: EndUser;
  /**
   * Its limits within the organization and its projects with their remainders: its own, and those
   * that selectors give it. Without its requests, those of the first request to come.
   */
  readonly quotas: readonly QuotaStatus[];
}

/** File format of a report's document. */
export type DocumentFormat =
  | "json"
  | "csv";

/** One month of one organization. */
export interface Month {
  /** The organization's name; for a closed month that at the close. */
  readonly organizationName: string;
  /** The organization's id. */
  readonly organizationId: string;
  /** The month as YYYY-MM, in UTC. */
  readonly month: string;
  /** Whether usage may still be added, or the documents are final. */
  readonly state: MonthState;
  /** Time when the close began; unset before. */
  readonly closingTime: Date | undefined;
  /** Author of the close: the prefix of a key. */
  readonly closingBy: string;
  /** Time of the close; unset before. */
  readonly closeTime: Date | undefined;
  /** Prefix of the key that completed the close. */
  readonly closedBy: string;
  /** Number of the invoice; empty before the close, and for a month with nothing to invoice. */
  readonly invoiceNumber: string;
  /** Total of the invoice; unset if there is none. */
  readonly total: Money | undefined;
  /** SHA-256 of the report as JSON, in hexadecimal; empty before the close. */
  readonly jsonSha256: string;
  /** SHA-256 of the report as CSV, in hexadecimal; empty before the close. */
  readonly csvSha256: string;
  /** Version of the format of these documents; 0 before the close. */
  readonly reportFormat: number;
  /** Root of the month's receipts, in hexadecimal; empty if there are none. */
  readonly receiptsRoot: string;
  /** Stripe's invoices of the month from its events, one for each subscription. */
  readonly payments: readonly InvoicePayment[];
  /**
   * SHA-256 of the PDF as issued, in hexadecimal; empty before the close, and until the first
   * export of a month that was closed before PDFs were kept.
   */
  readonly pdfSha256: string;
}

/** A reason why a month cannot be closed. */
export interface Obstacle {
  /**
   * Stable kind: MONTH_NOT_OVER, EARLIER_MONTH_OPEN, LATER_MONTH_CLOSED, MONTH_BEFORE_FIRST,
   * USAGE_MISSTATED, USAGE_UNRATED, REQUESTS_RUNNING, ISSUER_INCOMPLETE or TEXT_NOT_SHOWN.
   */
  readonly kind: string;
  /** Description with the remedy. */
  readonly description: string;
}

/** Result of a close. */
export interface ClosedMonth {
  /** The month after the call; unchanged with `validate_only`. */
  readonly month: Month;
  /** Obstacles; with `validate_only` only. */
  readonly obstacles: readonly Obstacle[];
  /** True if it was closed before. */
  readonly alreadyClosed: boolean;
}

/** A closed month recomputed from the ledger. */
export interface MonthVerification {
  /** The month with the digests of its close. */
  readonly month: Month;
  /** SHA-256 of the report as JSON today. */
  readonly jsonSha256: string;
  /** SHA-256 of the report as CSV today. */
  readonly csvSha256: string;
  /** Whether the recomputed documents are equal. */
  readonly reproduced: boolean;
  /** Descriptions of the differences; empty if there are none. */
  readonly differences: readonly string[];
}

/** State of an adjustment. unspecified: newer than this client. */
export type AdjustmentState =
  | "unspecified"
  | "proposed"
  | "approved"
  | "rejected";

/**
 * A manual correction. With `invoice_number` it is a credit note, a separate document; otherwise a
 * line of the next invoice.
 */
export interface Adjustment {
  /** UUID of the adjustment, for its approval or rejection. */
  readonly adjustmentId: string;
  /** The organization's id. */
  readonly organizationId: string;
  /** Positive: charged to the customer; negative: credited. Always negative for a credit note. */
  readonly amount: Money;
  /** Reason, as shown on the invoice or the credit note. */
  readonly reason: string;
  /** The invoice of a credit note; empty for an adjustment. */
  readonly invoiceNumber: string;
  /** Whether it waits for a decision, and which was made. */
  readonly state: AdjustmentState;
  /** Author: the prefix of a key. */
  readonly author: string;
  /** Time of the proposal. */
  readonly createTime: Date | undefined;
  /** Prefix of the key that approved or rejected it; empty before. */
  readonly decidedBy: string;
  /** Time of the decision. */
  readonly decideTime: Date | undefined;
  /** The month as YYYY-MM that it was posted to. */
  readonly billingMonth: string;
  /** Number of an approved credit note: `CN-` and digits, without gaps. */
  readonly creditNoteNumber: string;
}
