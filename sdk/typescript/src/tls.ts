/** TLS options: encryption, trusted certificates, client certificates. */

import { readFileSync } from "node:fs";
import { InvalidRequest } from "./errors.js";

/** TLS options of a client. Certificates and keys are PEM: bytes, or the path of a file. */
export interface TlsOptions {
  /**
   * On or off. Default: by the scheme of the address (`https://`, `grpcs://`, `http://`,
   * `grpc://`), then `WEIR_TLS` (1 or 0), then on if certificates are given here or the address is
   * not this machine (loopback, unix socket).
   */
  readonly tls?: boolean;
  /** Trusted instead of the usual authorities; default `WEIR_ROOT_CERTIFICATES`, a file. */
  readonly rootCertificates?: Buffer | string;
  /** For mutual TLS; default `WEIR_CLIENT_CERTIFICATE`, a file. Needs `clientKey`. */
  readonly clientCertificate?: Buffer | string;
  /** Private key of `clientCertificate`; default `WEIR_CLIENT_KEY`, a file. */
  readonly clientKey?: Buffer | string;
}

/** The loaded certificates of one connection. */
export interface Tls {
  readonly rootCertificates: Buffer | undefined;
  readonly clientCertificate: Buffer | undefined;
  readonly clientKey: Buffer | undefined;
}

/**
 * Returns the certificates to use; undefined for plaintext. `scheme`: the address's; `local`: on
 * this machine.
 *
 * @throws InvalidRequest for an unreadable file, or a certificate without a key or the reverse.
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
    rootCertificates: read(
      "rootCertificates",
      options.rootCertificates,
      "WEIR_ROOT_CERTIFICATES",
      environment,
    ),
    clientCertificate: read(
      "clientCertificate",
      options.clientCertificate,
      "WEIR_CLIENT_CERTIFICATE",
      environment,
    ),
    clientKey: read("clientKey", options.clientKey, "WEIR_CLIENT_KEY", environment),
  };
  if ((tls.clientCertificate === undefined) !== (tls.clientKey === undefined)) {
    const missing =
      tls.clientKey === undefined
        ? "clientKey (WEIR_CLIENT_KEY)"
        : "clientCertificate (WEIR_CLIENT_CERTIFICATE)";
    throw invalid(`${missing} is missing: a certificate and its key go together`);
  }
  return tls;
}

function read(
  name: string,
  given: Buffer | string | undefined,
  variable: string,
  environment: NodeJS.ProcessEnv,
): Buffer | undefined {
  if (Buffer.isBuffer(given)) return given.length > 0 ? given : undefined;
  const path = given || environment[variable];
  if (!path) return undefined;
  try {
    return readFileSync(path);
  } catch (error) {
    const reason = (error as NodeJS.ErrnoException).code ?? String(error);
    throw invalid(`${given ? name : variable}: ${path} cannot be read (${reason})`);
  }
}

function invalid(message: string): InvalidRequest {
  return new InvalidRequest(message, { reason: "FIELD_INVALID" });
}
