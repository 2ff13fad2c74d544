/**
 * Conversion of `google.rpc.Status` and failed RPCs to typed errors.
 *
 * The status of a whole RPC is in the trailing metadata `grpc-status-details-bin`, that of one
 * request in its `failed` frame.
 */

import { fromBinary } from "@bufbuild/protobuf";
import { anyUnpack } from "@bufbuild/protobuf/wkt";
import { type ServiceError, status as grpcStatus } from "@grpc/grpc-js";
import * as errors from "./errors.js";
import {
  BadRequestSchema,
  ErrorInfoSchema,
  HelpSchema,
  PreconditionFailureSchema,
  QuotaFailureSchema,
  RetryInfoSchema,
} from "./gen/google/rpc/error_details_pb.js";
import { type Status, StatusSchema } from "./gen/google/rpc/status_pb.js";
import type { Partial } from "./values.js";
import { jsonable } from "./money.js";
import { isOption } from "./checks.js";
import { dimensionNamed, durationMs } from "./wire.js";

const NOT_TLS = /wrong version number/; // OpenSSL's error for a plaintext response
const NOT_REACHED = /No connection established|Name resolution failed|ECONNREFUSED|ENOTFOUND/;
const RESET = /Received RST_STREAM/; // of grpc-js, if a stream was reset, by a proxy for example
const STATUS_DETAILS_KEY = "grpc-status-details-bin";

// Patterns of the contract's names in the server's texts, and the names of the options.
const NAMES: readonly (readonly [RegExp, string])[] = [
  [/\b(start|sampling|response_format)\.(?=\w)/g, ""],
  [/\bconversation\.messages/g, "prompt"],
  [/\bconversation\.(?=\w)/g, ""],
  [/\btoken_ids\.ids/g, "token_ids"],
  [/\bbeam_search(\.width)?(?!\.)/g, "beam_width"],
  [/\bbeam_search\./g, ""],
  [/\bstop_sequences/g, "stop"],
  [/\binitial_credit_tokens/g, "prefetch_tokens"],
  [/\bparameters_json_schema\b/g, "parameters"],
  [/\btool_choice\.\w+/g, "tool_choice"],
  [/\bmax_cost\.\w+/g, "max_cost"],
  [/\bkeep_on_disconnect\b/g, "keep_on_disconnect_ms"],
  [/\bListModels\b/g, "listModels()"],
];

const SNAKE_CASE = /\b[a-z]+(?:_[a-z0-9]+)+\b/g;

type ErrorClass = new (message: string, options?: errors.ErrorOptions) => errors.WeirError;

const CLASSES: Readonly<Record<string, ErrorClass>> = {
  UNAUTHENTICATED: errors.Unauthenticated,
  PERMISSION_DENIED: errors.PermissionDenied,
  INVALID_ARGUMENT: errors.InvalidRequest,
  OUT_OF_RANGE: errors.InvalidRequest,
  NOT_FOUND: errors.NotFound,
  ALREADY_EXISTS: errors.AlreadyExists,
  FAILED_PRECONDITION: errors.FailedPrecondition,
  ABORTED: errors.Aborted,
  RESOURCE_EXHAUSTED: errors.ResourceExhausted,
  UNAVAILABLE: errors.Unavailable,
  DEADLINE_EXCEEDED: errors.DeadlineExceeded,
  CANCELLED: errors.Cancelled,
  INTERNAL: errors.Internal,
  DATA_LOSS: errors.Internal,
};

/**
 * Returns the typed error of a status with its details; a plain `WeirError` for an unknown code.
 */
export function errorFromStatus(
  status: Status,
  requestId = "",
  partial?: Partial,
): errors.WeirError {
  const details = decodeDetails(status);
  return typedError(
    grpcStatus[status.code] ?? "UNKNOWN",
    inOptions(status.message),
    details,
    requestId,
    partial,
  );
}

/**
 * Returns the typed error of a failed RPC, from its status details if the server sent them.
 *
 * @param isCancelledHere This client cancelled the call; otherwise a stopping gRPC server did,
 * which drops new calls.
 * @param tried Address of the server, named if it could not be reached.
 */
export function errorFromRpc(
  error: ServiceError,
  isCancelledHere: boolean,
  requestId = "",
  tried = "",
): errors.WeirError {
  for (const value of error.metadata?.get(STATUS_DETAILS_KEY) ?? []) {
    if (typeof value === "string") continue;
    try {
      const status = fromBinary(StatusSchema, value);
      if (status.code) return errorFromStatus(status, requestId);
    } catch {
      break; // mangled by a proxy: use the plain status below
    }
  }
  if (error.code === grpcStatus.CANCELLED && !isCancelledHere) {
    return new errors.Unavailable("the server cancelled the call: it is stopping", {
      requestId,
      cause: error,
    });
  }
  const said = (error.details || error.message).trim();
  if (error.code === grpcStatus.INTERNAL && RESET.test(said)) {
    return new errors.Unavailable(
      "the stream was reset before its end, by the server or by a proxy",
      { requestId, cause: error },
    );
  }
  const hint = NOT_TLS.test(said)
    ? "; the server does not use TLS: prefix its address with http://, or pass tls: false"
    : "";
  const isMissed = tried !== "" && NOT_REACHED.test(said);
  const missed = isMissed ? `the server at ${tried} cannot be reached: ` : "";
  const code = grpcStatus[error.code] ?? "UNKNOWN";
  return typedError(code, missed + said + hint, errors.NO_DETAILS, requestId);
}

/** Returns a separate error for each request, so that stack traces do not mix. */
export function copyError(error: errors.WeirError, requestId: string): errors.WeirError {
  const { code, reason, details, cause } = error;
  const kind = error.constructor as ErrorClass;
  return new kind(error.plainMessage, { code, reason, details, requestId, cause });
}

/** Replaces the contract's names in a text by those of the options. Other words stay. */
function inOptions(text: string): string {
  const named = NAMES.reduce((said, [pattern, name]) => said.replace(pattern, name), text);
  return named.replace(SNAKE_CASE, (word) => (isOption(camelCase(word)) ? camelCase(word) : word));
}

/** Returns the path of a field in the options. Keys in quotes stay. */
function fieldInOptions(field: string): string {
  const quoted = /('[^']*'|"[^"]*")/;
  return inOptions(field)
    .split(quoted)
    .map((part) => (quoted.test(part) ? part : part.replace(SNAKE_CASE, camelCase)))
    .join("");
}

function camelCase(word: string): string {
  return word.replace(/_(.)/g, (_, letter: string) => letter.toUpperCase());
}

function typedError(
  code: string,
  message: string,
  details: errors.ErrorDetails,
  requestId: string,
  partial?: Partial,
): errors.WeirError {
  const isQuota = details.quota !== undefined || details.quotaViolations.length > 0;
  const kind =
    code === "RESOURCE_EXHAUSTED" && isQuota
      ? errors.QuotaExceeded
      : (CLASSES[code] ?? errors.WeirError);
  const text = message || code.toLowerCase().replaceAll("_", " ");
  return new kind(text, {
    code,
    details,
    partial,
    requestId: requestId || details.metadata["request_id"],
  });
}

function decodeDetails(status: Status): errors.ErrorDetails {
  const found = { ...errors.NO_DETAILS };
  for (const detail of status.details) {
    const info = anyUnpack(detail, ErrorInfoSchema);
    if (info) Object.assign(found, { reason: info.reason, metadata: info.metadata });
    const bad = anyUnpack(detail, BadRequestSchema);
    if (bad) {
      const fieldViolations = bad.fieldViolations.map(({ field, description }) => ({
        field: fieldInOptions(field),
        description: inOptions(description),
      }));
      Object.assign(found, { fieldViolations });
    }
    const failure = anyUnpack(detail, QuotaFailureSchema);
    if (failure) {
      const quotaViolations = failure.violations.map(({ subject, description }) => ({
        subject,
        description,
      }));
      Object.assign(found, { quotaViolations });
    }
    const precondition = anyUnpack(detail, PreconditionFailureSchema);
    if (precondition) {
      const preconditions = precondition.violations.map(({ type, description }) => ({
        kind: type,
        description,
      }));
      Object.assign(found, { preconditions });
    }
    const page = anyUnpack(detail, HelpSchema);
    if (page?.links[0]) Object.assign(found, { docUrl: page.links[0].url });
    const retry = anyUnpack(detail, RetryInfoSchema);
    if (retry) Object.assign(found, { retryAfterMs: durationMs(retry.retryDelay) });
  }
  if (found.reason !== "QUOTA_EXCEEDED") return found;
  return { ...found, quota: exceededQuota(found.metadata, found.retryAfterMs) };
}

function exceededQuota(
  metadata: Readonly<Record<string, string>>,
  retryAfterMs: number | undefined,
): errors.ExceededQuota {
  const whole = (key: string): bigint | undefined =>
    /^-?\d+$/.test(metadata[key] ?? "") ? BigInt(metadata[key]!) : undefined;
  const reset = new Date(metadata["reset_time"] ?? Number.NaN);
  return jsonable({
    quotaId: metadata["quota_id"] ?? "",
    subject: metadata["subject"] ?? "",
    subjectId: metadata["subject_id"] ?? "",
    model: metadata["model"] ?? "",
    dimension: dimensionNamed(metadata["dimension"] ?? ""),
    limit: whole("limit"),
    used: whole("used"),
    held: whole("held"),
    remaining: whole("remaining"),
    requested: whole("requested"),
    resetTime: Number.isNaN(reset.getTime()) ? undefined : reset,
    retryHelps:
      (metadata["retry_helps"] ?? String(retryAfterMs !== undefined)).toLowerCase() === "true",
    subjectName: metadata["subject_name"] ?? "",
    windowMinutes: Number(whole("window_minutes") ?? 0),
    group: metadata["group"] ?? "",
  });
}
