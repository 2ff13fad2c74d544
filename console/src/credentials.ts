// Credentials of calls. An API key is in this tab's sessionStorage, not in a cookie, until
// sign-out.

const KEY = "weir.key";

export function isSignedIn(): boolean {
  return sessionStorage.getItem(KEY) !== null;
}

export function remember(key: string): void {
  sessionStorage.setItem(KEY, key);
}

export function forget(): void {
  sessionStorage.removeItem(KEY);
}

// Options of `fetch` that authenticate a call, with the stored key or another one.
export function authenticated(key = sessionStorage.getItem(KEY) ?? ""): {
  headers: Record<string, string>;
  credentials: RequestCredentials;
} {
  return { headers: { authorization: `Bearer ${key}` }, credentials: "omit" };
}
