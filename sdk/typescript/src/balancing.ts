/**
 * Channels to the addresses of a client, used in turn.
 *
 * A channel without a connection gets no calls while another one has one. So a call goes to the
 * next server when one is lost, and the first call to the server that answers first.
 */

import { type Client, connectivityState as State } from "@grpc/grpc-js";

/** gRPC uses all addresses of a name in turn, too, and connects to each at once. */
export const ROUND_ROBIN = '{"loadBalancingConfig": [{"round_robin": {}}]}';
const hasFailed = (state: State): boolean =>
  state === State.TRANSIENT_FAILURE || state === State.SHUTDOWN;

/** The channels of a client. */
export class BalancedClients {
  private last = -1;

  constructor(private readonly clients: readonly Client[]) {}

  /** Closes all channels. */
  close(): void {
    for (const client of this.clients) client.close();
  }

  /** Chooses the next channel that is connected; without one, the next that has not failed. */
  next(): Client {
    const order = this.clients.map((_, step) => (this.last + 1 + step) % this.clients.length);
    const states = order.map((index) => this.state(index));
    const at = [
      states.indexOf(State.READY),
      states.findIndex((state) => !hasFailed(state)),
      0,
    ].find((index) => index >= 0)!;
    this.last = order[at]!;
    return this.clients[this.last]!;
  }

  /**
   * Resolves when a call can be made: one channel is connected, or none can connect. Returns
   * undefined if that is so now.
   */
  connected(): Promise<void> | undefined {
    if (this.clients.length === 1) return undefined; // gRPC waits itself
    const states = this.clients.map((_, index) => this.state(index));
    if (states.includes(State.READY) || states.every(hasFailed)) return undefined;
    const changes = this.clients.map(
      (client, index) =>
        new Promise<void>((resolve) => {
          client.getChannel().watchConnectivityState(states[index]!, Infinity, () => resolve());
        }),
    );
    return Promise.race(changes).then(() => this.connected());
  }

  private state(index: number): State {
    return this.clients[index]!.getChannel().getConnectivityState(true);
  }
}
