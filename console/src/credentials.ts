// Credentials of calls: an API key in this tab's sessionStorage until sign-out, or the cookie of a
// session. The page cannot read the cookie; a call with it needs a header that the server tells.

const KEY = "weir.key";
const ORGANIZATION = "weir.organization"; // in which a session acts, for each tab

let csrf = "";

export function storedKey(): string | null {
  return sessionStorage.getItem(KEY);
}

export function remember(key: string): void {
  sessionStorage.setItem(KEY, key);
}

export function forget(): void {
  csrf = "";
  sessionStorage.removeItem(KEY);
  sessionStorage.removeItem(ORGANIZATION);
}

// The organization in which calls with the session act; null until one is chosen.
export function chosenOrganization(): string | null {
  return sessionStorage.getItem(ORGANIZATION);
}

export function choose(organization: string): void {
  sessionStorage.setItem(ORGANIZATION, organization);
}

export function holdSession(token: string): void {
  csrf = token;
}

export interface Authentication {
  headers: Record<string, string>;
  credentials: RequestCredentials;
}

export const ANONYMOUS: Authentication = { headers: {}, credentials: "omit" };
// The session's cookie without an organization
export const BY_COOKIE: Authentication = { headers: {}, credentials: "same-origin" };

// Options of `fetch` that authenticate a call by a key.
export function byKey(key: string): Authentication {
  return { headers: { authorization: `Bearer ${key}` }, credentials: "omit" };
}

// Options of `fetch` that authenticate a call by the stored key, or else by the session.
export function authenticated(): Authentication {
  const key = storedKey();
  if (key !== null) return byKey(key);
  const organization = chosenOrganization();
  return {
    headers: {
      ...(csrf ? { "weir-csrf": csrf } : {}),
      ...(organization === null ? {} : { "weir-organization": organization }),
    },
    credentials: "same-origin",
  };
}
