/** Base of the clients whose calls all have one response. */

import { type ClientOptions, Connection, resolveSettings } from "./connection.js";

const ADMIN_KEYS = ["WEIR_ADMIN_KEY", "WEIR_API_KEY"];

/** Connection with an administrator's key. `close` it at the end, or use `await using`. */
export class UnaryClient implements AsyncDisposable {
  protected readonly connection: Connection;

  /**
   * Resolves the settings; the connection is made on first use. The key defaults to
   * `WEIR_ADMIN_KEY`, then `WEIR_API_KEY`.
   *
   * @throws Unauthenticated if there is no key.
   */
  constructor(options: ClientOptions = {}) {
    this.connection = new Connection(resolveSettings(options, process.env, ADMIN_KEYS));
  }

  /** Address that this client connects to. */
  get address(): string {
    return this.connection.settings.address;
  }

  /** Closes the connection; running calls reject with `Cancelled`. */
  async close(): Promise<void> {
    this.connection.close();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }
}
