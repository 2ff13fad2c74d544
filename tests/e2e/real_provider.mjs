// OpenID provider of the package `oidc-provider`, for test_real_provider.py.
//
// Arguments: the path of `node_modules`, and a JSON object with the port, the client, and the claims
// of each account. Prints a line when it listens.

import { pathToFileURL } from "node:url";

const [, , modules, text] = process.argv;
const { default: Provider } = await import(
  pathToFileURL(`${modules}/oidc-provider/lib/index.js`).href
);
const { port, client, accounts } = JSON.parse(text);

const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: [client],
  claims: {
    openid: ["sub"],
    email: ["email", "email_verified"],
    profile: ["name"],
    groups: ["groups"],
  },
  features: { backchannelLogout: { enabled: true } },
  pkce: { required: () => true },
  // By default it calls no addresses of its own machine.
  fetch: (url, options) => fetch(url, { ...options, dispatcher: undefined }),
  findAccount: (_, id) =>
    accounts[id] && { accountId: id, claims: () => ({ sub: id, ...accounts[id] }) },
});
provider.on("backchannel.error", (_, error) => console.error("logout failed:", error));
provider.listen(port, "127.0.0.1", () => console.log("listening"));
