/**
 * Every error of the client, one class per thing that the caller can do about it.
 *
 * `WeirError` is the base. `reason` is the server's machine-readable word (`QUOTA_EXCEEDED`, `CONTEXT_EXCEEDED`, …), `code` the
 * canonical gRPC code. `partial` holds what had arrived where a generation broke in the middle.
 */

import type { Partial } from "./values.js";

/** One field of a request that was refused, and why. */
export interface FieldViolation {
  readonly field: string;
  readonly description: string;
}

/** One quota that a request ran into, in the server's words. */
export interface QuotaViolation {
  readonly subject: string;
  readonly description: string;
}

/** One thing that stands in the way of a call. `kind` is stable and machine-readable. */
export interface PreconditionViolation {
  readonly kind: string;
  readonly description: string;
}

/** The quota that refused a request. Values are requests, tokens or picos by dimension; absent where not told. */
export interface ExceededQuota {
  readonly quotaId: string;
  readonly subject: string;
  readonly subjectId: string;
  readonly model: string;
  readonly dimension: string;
  readonly limit: bigint | undefined;
  readonly used: bigint | undefined;
  readonly held: bigint | undefined;
  readonly remaining: bigint | undefined;
  readonly requested: bigint | undefined;
  readonly resetTime: Date | undefined;
  /** False: the request is larger than the limit, so that waiting does not help. */
  readonly retryHelps: boolean;
}

/** The details of a `google.rpc.Status`, decoded. */
export interface ErrorDetails {
  readonly reason: string;
  readonly metadata: Readonly<Record<string, string>>;
  readonly fieldViolations: readonly FieldViolation[];
  readonly quotaViolations: readonly QuotaViolation[];
  readonly preconditions: readonly PreconditionViolation[];
  /** Milliseconds after which to try again; absent if the server did not say. */
  readonly retryAfterMs: number | undefined;
  readonly quota: ExceededQuota | undefined;
}

export const NO_DETAILS: ErrorDetails = {
  reason: "",
  metadata: {},
  fieldViolations: [],
  quotaViolations: [],
  preconditions: [],
  retryAfterMs: undefined,
  quota: undefined,
};

/** What an error may be made with beside its message. */
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
  /** What had arrived before, if the request had begun. */
  readonly partial: Partial | undefined;
  /** The server's sentence, without the request id. */
  readonly plainMessage: string;

  constructor(message: string, options: ErrorOptions = {}, defaultCode = "UNKNOWN") {
    const requestId = options.requestId ?? "";
    super(requestId ? `${message} (request ${requestId})` : message, options.cause === undefined ? {} : { cause: options.cause });
    this.name = new.target.name;
    this.plainMessage = message;
    this.code = options.code ?? defaultCode;
    this.details = options.details ?? NO_DETAILS;
    this.reason = options.reason || this.details.reason || this.code;
    this.requestId = requestId;
    this.partial = options.partial;
  }

  /** `ErrorInfo.metadata` of the server; empty if it sent none. */
  get metadata(): Readonly<Record<string, string>> {
    return this.details.metadata;
  }

  /** Milliseconds to wait before trying again; absent if the server did not say. */
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

/** The key is good but may not do this: a missing scope, or a model that it may not use. */
export class PermissionDenied extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "PERMISSION_DENIED");
  }
}

/** The request can never succeed as it is. `fieldViolations` names each field and what is wrong with it. */
export class InvalidRequest extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "INVALID_ARGUMENT");
  }

  /** The refused fields. */
  get fieldViolations(): readonly FieldViolation[] {
    return this.details.fieldViolations;
  }
}

/** A model or request of that name does not exist, as far as this key can see. */
export class NotFound extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "NOT_FOUND");
  }
}

/** The request id was used before. `REQUEST_SETTLED`: it ran already, and `partial` has its usage. */
export class AlreadyExists extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "ALREADY_EXISTS");
  }
}

/** Something else must happen first, for example paying (`INSUFFICIENT_CREDIT`). Waiting alone does not help. */
export class FailedPrecondition extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "FAILED_PRECONDITION");
  }
}

/** The request collided with another one, or broke after tokens were delivered. Start over. */
export class Aborted extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "ABORTED");
  }
}

/** Something is too large or too much, other than a quota: a message over the size limit, for example. */
export class ResourceExhausted extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "RESOURCE_EXHAUSTED");
  }
}

/** A quota refused the request. `quota` says which one, what is left of it and when it resets. */
export class QuotaExceeded extends ResourceExhausted {
  /** The quota that refused, with its numbers. */
  get quota(): ExceededQuota | undefined {
    return this.details.quota;
  }

  /** The quotas that refused, in the server's words. */
  get violations(): readonly QuotaViolation[] {
    return this.details.quotaViolations;
  }

  /** Whether the same request can be let in later. */
  get retryHelps(): boolean {
    return this.quota ? this.quota.retryHelps : this.retryAfterMs !== undefined;
  }
}

/** The server cannot be reached, drains, or has no engine free. Trying again later helps. */
export class Unavailable extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "UNAVAILABLE");
  }
}

/** The time given with `timeoutMs` was over. `partial` holds the text so far, and its usage if the server told it in time. */
export class DeadlineExceeded extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "DEADLINE_EXCEEDED");
  }
}

/** The request was cancelled before it was let in, so that there is no result. */
export class Cancelled extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "CANCELLED");
  }
}

/**
 * The stream ended in the middle of the request, without its final frame. `partial` holds what arrived; what was delivered is
 * billed all the same, and `getGeneration(requestId)` tells the settled usage.
 */
export class IncompleteGeneration extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "UNAVAILABLE");
  }
}

/** The server broke. Quote `incidentId` when reporting it. */
export class Internal extends WeirError {
  constructor(message: string, options: ErrorOptions = {}) {
    super(message, options, "INTERNAL");
  }

  /** The server's id of this incident; empty if it gave none. */
  get incidentId(): string {
    return this.metadata["incident_id"] ?? "";
  }
}
