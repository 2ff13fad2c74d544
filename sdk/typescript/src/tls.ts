/** Whether a connection is encrypted, whom it trusts, and how the client shows who it is. */

import { readFileSync } from "node:fs";
import { InvalidRequest } from "./errors.js";

/** What a client takes about TLS. Certificates and keys are PEM: bytes, or the path of a file. */
export interface TlsOptions {
  /**
   * On or off. Else as the address says (`https://`, `grpcs://`, `http://`, `grpc://`), else `WEIR_TLS` (1 or 0), else on where
   * certificates are given here or the address is not this machine (loopback, unix socket).
   */
  readonly tls?: boolean;
  /** Whom to trust instead of the usual authorities; else `WEIR_ROOT_CERTIFICATES`, a file. */
  readonly rootCertificates?: Buffer | string;
  /** For servers that want to see one; else `WEIR_CLIENT_CERTIFICATE`, a file. Needs `clientKey`. */
  readonly clientCertificate?: Buffer | string;
  /** The private key of `clientCertificate`; else `WEIR_CLIENT_KEY`, a file. */
  readonly clientKey?: Buffer | string;
}

/** The certificates of one connection, read. */
export interface Tls {
  readonly rootCertificates: Buffer | undefined;
  readonly clientCertificate: Buffer | undefined;
  readonly clientKey: Buffer | undefined;
}

/**
 * The certificates to use; undefined for plaintext. `scheme`: what the address says; `local`: whether it is on this machine.
 *
 * @throws InvalidRequest for a file that cannot be read, and for a half of certificate and key.
 */
export function resolveTls(
  options: TlsOptions,
  scheme: boolean | undefined,
  local: boolean,
  environment: NodeJS.ProcessEnv,
): Tls | undefined {
  let wanted = options.tls ?? scheme;
  const said = environment["WEIR_TLS"];
  if (wanted === undefined && said) {
    if (said !== "0" && said !== "1") throw invalid(`WEIR_TLS=${said}: must be 1 or 0`);
    wanted = said === "1";
  }
  const given = options.rootCertificates !== undefined || options.clientCertificate !== undefined;
  if (!(wanted ?? (given || !local))) return undefined;
  const tls = {
    rootCertificates: read("rootCertificates", options.rootCertificates, "WEIR_ROOT_CERTIFICATES", environment),
    clientCertificate: read("clientCertificate", options.clientCertificate, "WEIR_CLIENT_CERTIFICATE", environment),
    clientKey: read("clientKey", options.clientKey, "WEIR_CLIENT_KEY", environment),
  };
  if ((tls.clientCertificate === undefined) !== (tls.clientKey === undefined)) {
    const missing = tls.clientKey === undefined ? "clientKey (WEIR_CLIENT_KEY)" : "clientCertificate (WEIR_CLIENT_CERTIFICATE)";
    throw invalid(`${missing} is missing: a certificate and its key go together`);
  }
  return tls;
}

function read(name: string, given: Buffer | string | undefined, variable: string, environment: NodeJS.ProcessEnv): Buffer | undefined {
  if (Buffer.isBuffer(given)) return given.length > 0 ? given : undefined;
  const path = given || environment[variable];
  if (!path) return undefined;
  try {
    return readFileSync(path);
  } catch (error) {
    throw invalid(`${given ? name : variable}: ${path} cannot be read (${(error as NodeJS.ErrnoException).code ?? String(error)})`);
  }
}

function invalid(message: string): InvalidRequest {
  return new InvalidRequest(message, { reason: "FIELD_INVALID" });
}
