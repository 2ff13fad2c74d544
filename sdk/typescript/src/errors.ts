/**
 * Errors of the client, one class per reaction of the caller.
 *
 * `WeirError` is the base class. `reason` is the server's machine-readable reason
 * (`QUOTA_EXCEEDED`, `CONTEXT_EXCEEDED`, …), `code` the canonical gRPC code. `partial` holds the
 * received output if a generation broke off.
 */

import type { QuotaDimension } from "./generated_values.js";
import type { Partial } from "./values.js";

/** One refused field of a request, and the reason. */
export interface FieldViolation {
  readonly field: string;
  readonly description: string;
}

/** One exceeded quota, as described by the server. */
export interface QuotaViolation {
  readonly subject: string;
  readonly description: string;
}

/** One unmet precondition of a call. `kind` is stable and machine-readable. */
export interface PreconditionViolation {
  readonly kind: string;
  readonly description: string;
}

/**
 * The quota that refused a request. Values are requests, tokens or picos by dimension; undefined if
 * not sent.
 */
export interface ExceededQuota {
  readonly quotaId: string;
  readonly subject: string;
  readonly subjectId: string;
  readonly model: string;
  readonly dimension: QuotaDimension;
  readonly limit: bigint | undefined;
  readonly used: bigint | undefined;
  readonly held: bigint | undefined;
  readonly remaining: bigint | undefined;
  readonly requested: bigint | undefined;
  readonly resetTime: Date | undefined;
  /** False: the request is larger than the limit, so waiting does not help. */
  readonly retryHelps: boolean;
  /** Name of the end user, or `KEY=VALUE` of the label. Empty for other subjects. */
  readonly subjectName: string;
  /** Length of a rolling window. 0 for every other dimension. */
  readonly windowMinutes: number;
  /** Group by which the key has the limit. Otherwise empty. */
  readonly group: string;
}

/** Decoded details of a `google.rpc.Status`. */
export interface ErrorDetails {
  readonly reason: string;
  readonly metadata: Readonly<Record<string, string>>;
  readonly fieldViolations: readonly FieldViolation[];
  readonly quotaViolations: readonly QuotaViolation[];
  readonly preconditions: readonly PreconditionViolation[];
  /** Milliseconds to wait before a retry; undefined if the server did not send it. */
  readonly retryAfterMs: number | undefined;
  readonly quota: ExceededQuota | undefined;
  /** Page that explains the reason; empty if the server sent none. */
  readonly docUrl: string;
}

/** Text of the error of a call after `close()`. */
export const CLOSED = "the client is closed: make a new one, or close it after its last use";

export const NO_DETAILS: ErrorDetails = {
  reason: "",
  metadata: {},
  fieldViolations: [],
  quotaViolations: [],
  preconditions: [],
  retryAfterMs: undefined,
  quota: undefined,
  docUrl: "",
};

/** Optional properties of an error. */
export interface ErrorOptions {
  readonly code?: string | undefined;
  readonly reason?: string | undefined;
  readonly requestId?: string | undefined;
  readonly details?: ErrorDetails | undefined;
  readonly partial?: Partial | undefined;
  readonly cause?: unknown;
}

/** Base of all errors. */
export class WeirError extends Error {
  /** The canonical gRPC code, for example `UNAVAILABLE`. */
  readonly code: string;
  readonly reason: string;
  readonly requestId: string;
  readonly details: ErrorDetails;
  /** Output received before, if the request had begun. */
  readonly partial: Partial | undefined;
  /** The server's message, without the request id. */
  readonly plainMessage: string;

  constructor(message: string, options: ErrorOptions = {}, defaultCode = "UNKNOWN") {
    const requestId = options.requestId ?? "";
    super(
      requestId ? `${message} (request ${requestId})` : message,
      options.cause === undefined ? {} : { cause: options.cause },
    );
    this.name = new.target.name;
    this.plainMessage = message;
    this.code = options.code ?? defaultCode;
    this.details = options.details ?? NO_DETAILS;
    this.reason = options.reason || this.details.reason || this.code;
    this.requestId = requestId;
    this.partial = options.partial;
  }

  /** Returns what `JSON.stringify` writes; without the stack. */
  toJSON(): Record<string, unknown> {
    const { name, code, reason, requestId, details, partial } = this;
    return { name, message: this.plainMessage, code, reason, requestId, details, partial };
  }

  /** `ErrorInfo.metadata` of the server; empty if absent. */
  get metadata(): Readonly<Record<string, string>> {
    return this.details.metadata;
  }

  /** Page that explains the reason of the error and its remedy; empty if none was sent. */
  get docUrl(): string {
    return this.details.docUrl;
  }

  /** Milliseconds to wait before a retry; undefined if the server did not send it. */
  get retryAfterMs(): number | undefined {
    return this.details.retryAfterMs;
  }
}

/** No API key, or one that is unknown, expired or revoked. */
export class Unauthenticated extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "UNAUTHENTICATED");
  }
}

/** The key is valid but lacks a scope or the permission to use a model. */
export class PermissionDenied extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "PERMISSION_DENIED");
  }
}

/** The request can never succeed unchanged. `fieldViolations` describes each wrong field. */
export class InvalidRequest extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "INVALID_ARGUMENT");
  }

  /** Refused fields. */
  get fieldViolations(): readonly FieldViolation[] {
    return this.details.fieldViolations;
  }
}

/** The model or request does not exist or is not visible to this key. */
export class NotFound extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "NOT_FOUND");
  }
}

/**
 * The request id was used before. `REQUEST_SETTLED`: it has already run, and `partial` has its
 * usage.
 */
export class AlreadyExists extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "ALREADY_EXISTS");
  }
}

/** The current state forbids the call, for example `INSUFFICIENT_CREDIT`. Waiting does not help. */
export class FailedPrecondition extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "FAILED_PRECONDITION");
  }
}

/**
 * The request collided with another one, or broke off after output was delivered. Start it again.
 */
export class Aborted extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "ABORTED");
  }
}

/** A limit other than a quota was exceeded, for example the size of a message. */
export class ResourceExhausted extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "RESOURCE_EXHAUSTED");
  }
}

/** A quota refused the request. `quota` has its remainder and reset time. */
export class QuotaExceeded extends ResourceExhausted {
  /** Quota that refused the request, with its values. */
  get quota(): ExceededQuota | undefined {
    return this.details.quota;
  }

  /** Quotas that refused the request, as described by the server. */
  get violations(): readonly QuotaViolation[] {
    return this.details.quotaViolations;
  }

  /** True if the same request can be admitted later. */
  get retryHelps(): boolean {
    return this.quota ? this.quota.retryHelps : this.retryAfterMs !== undefined;
  }
}

/** The server is unreachable, draining, or has no free engine. A later retry can succeed. */
export class Unavailable extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "UNAVAILABLE");
  }
}

/**
 * The time given with `timeoutMs` passed. `partial` holds the output so far, with usage if
 * received.
 */
export class DeadlineExceeded extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "DEADLINE_EXCEEDED");
  }
}

/** The request was cancelled before its admission; there is no result. */
export class Cancelled extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "CANCELLED");
  }
}

/**
 * The stream ended during the request, without its final frame. `partial` holds the received
 * output. Delivered output is billed; `getGeneration(requestId)` returns the settled usage.
 */
export class IncompleteGeneration extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "UNAVAILABLE");
  }
}

/** The server failed. Quote `incidentId` in a report. */
export class Internal extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "INTERNAL");
  }

  /** The server's id of this incident; empty if it sent none. */
  get incidentId(): string {
    return this.metadata["incident_id"] ?? "";
  }
}
