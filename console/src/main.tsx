// Session, navigation and routing by the URL's fragment: #/usage?org=demo&month=2026-11.

import { Component, useCallback, useEffect, useMemo, useRef, useState } from "react";
import type { ReactNode } from "react";
import { createRoot } from "react-dom/client";
import { I18nProvider } from "react-aria-components";
import { CallFailed, endSession, sessionOfCookie, sessionOfKey } from "./client.js";
import type { Person, Session, SignedOut } from "./client.js";
import "./console.css";
import { choose, forget, storedKey } from "./credentials.js";
import { alerts } from "./pages/alerts.js";
import { audit } from "./pages/audit.js";
import { endUsers } from "./pages/end-users.js";
import { fleet } from "./pages/fleet.js";
import { keys } from "./pages/keys.js";
import { limits } from "./pages/limits.js";
import { live } from "./pages/live.js";
import { members } from "./pages/members.js";
import { month } from "./pages/month.js";
import { overview } from "./pages/overview.js";
import { persons } from "./pages/persons.js";
import { playground } from "./pages/playground.js";
import { prices } from "./pages/prices.js";
import { reconciliation } from "./pages/reconciliation.js";
import { requests } from "./pages/requests.js";
import { tenants } from "./pages/tenants.js";
import { usage } from "./pages/usage.js";
import { Button, Name, Problem, Remark } from "./parts/basics.js";
import { SignIn, signInAsked } from "./sign-in.js";
import { text } from "./texts.js";
import { ViewContext, addressOf } from "./view.js";
import type { Page, View } from "./view.js";

const GROUPS: [string, Page[]][] = [
  [text.groups.use, [overview, live, playground, requests, usage, endUsers]],
  [text.groups.access, [members, keys, limits, tenants, alerts, persons]],
  [text.groups.money, [month, reconciliation, prices]],
  [text.groups.operate, [fleet, audit]],
];
const PAGES = GROUPS.flatMap(([, pages]) => pages);

function isAllowed(page: Page, found: Session): boolean {
  return page.calls.some((name) => found.calls.includes(name));
}

// The fragment of the address.
function useFragment(): string {
  const [fragment, setFragment] = useState(location.hash);
  useEffect(() => {
    const change = () => setFragment(location.hash);
    window.addEventListener("hashchange", change);
    return () => window.removeEventListener("hashchange", change);
  }, []);
  return fragment;
}

type State = Session | Person | SignedOut | null; // null: not known yet

function Console() {
  const [state, setState] = useState<State>(null);
  const [problem, setProblem] = useState<unknown>(null);
  const fragment = useFragment();
  const asked = useMemo(() => signInAsked(fragment), [fragment]);
  // Find who is signed in; `why` they are not any more is shown on the screen for it.
  const enter = useCallback(async (why: unknown = null) => {
    setProblem(why);
    try {
      const key = storedKey();
      const found = key === null ? await sessionOfCookie() : await sessionOfKey(key);
      if ("isEnded" in found && found.isEnded && why === null) setProblem(text.sessionEnded);
      setState(found);
    } catch (error) {
      if (error instanceof CallFailed && error.httpStatus === 401 && storedKey() !== null) {
        forget();
        return enter(text.invalidKey);
      }
      setProblem(error);
      setState({ providers: [], isEnded: false });
    }
  }, []);
  const ended = useCallback(() => {
    const why = storedKey() === null ? text.sessionEnded : text.invalidKey;
    forget();
    void enter(why);
  }, [enter]);
  const signOut = useCallback(async () => {
    await endSession();
    location.hash = "";
    setState(null);
    await enter();
  }, [enter]);
  useEffect(() => void enter(), []);
  if (!state) return <p className="empty">{text.loading}</p>;
  if ("providers" in state || asked)
    return (
      <>
        <Brand />
        <SignIn
          key={fragment}
          asked={asked}
          providers={"providers" in state ? state.providers : null}
          problem={problem}
          present={presentOf(state)}
          entered={(found) => (found ? setState(found) : enter())}
        />
      </>
    );
  if (!("calls" in state)) return <NoOrganization of={state} signOut={signOut} />;
  return (
    <Shell
      key={state.organizationId}
      session={state}
      ended={ended}
      signOut={signOut}
      chosen={(organization) => {
        setState(null); // no page of the former organization makes a call in the other
        choose(organization);
        location.hash = "";
        void enter();
      }}
    />
  );
}

// Who is signed in: the address of a person, or the prefix of a key; empty for nobody.
function presentOf(state: Session | Person | SignedOut): string {
  if ("providers" in state) return "";
  if ("email" in state) return state.email;
  return state.person?.email ?? state.keyPrefix;
}

function NoOrganization({ of, signOut }: { of: Person; signOut: () => Promise<void> }) {
  return (
    <>
      <Brand>
        <div className="who">
          <SignOut signOut={signOut} />
        </div>
      </Brand>
      <main>
        <h1>{text.noPages}</h1>
        <Remark kind="warning">{text.noOrganization(of.email)}</Remark>
      </main>
    </>
  );
}

// Button that ends the session. If that fails, the session is still there, and the button says so.
function SignOut({ signOut }: { signOut: () => Promise<void> }) {
  const [error, setError] = useState("");
  const press = () =>
    signOut().catch((failure: unknown) =>
      setError(failure instanceof Error ? failure.message : String(failure)),
    );
  return (
    <>
      {error && (
        <span className="note" role="alert">
          {text.stillSignedIn(error)}
        </span>
      )}
      <Button kind="small" onPress={() => void press()}>
        {text.signOut}
      </Button>
    </>
  );
}

function Brand({ children }: { children?: ReactNode }) {
  return (
    <header className="top">
      <a className="brand" href="#/">
        <img src="./icon.svg" alt="" width="24" height="24" /> Weir
      </a>
      {children}
    </header>
  );
}

function Shell({
  session: found,
  ended,
  signOut,
  chosen,
}: {
  session: Session;
  ended: () => void;
  signOut: () => Promise<void>;
  chosen: (organization: string) => void;
}) {
  const fragment = useFragment();
  const [status, setStatus] = useState("");
  const [isOpen, setOpen] = useState(false);
  const heading = useRef<HTMLHeadingElement>(null);
  const view = useMemo((): View | null => {
    const [path = "", query = ""] = fragment.replace(/^#\/?/, "").split("?");
    const page =
      PAGES.find((each) => each.id === path) ?? PAGES.find((each) => isAllowed(each, found));
    if (!page) return null;
    const params = new URLSearchParams(query);
    const address = (changes: Record<string, string>) =>
      addressOf(page.id, { ...Object.fromEntries(params), ...changes });
    return {
      page,
      session: found,
      params,
      asked: (name) => params.get(name) ?? "",
      may: (name) => found.calls.includes(name),
      address,
      go: (changes) => {
        location.hash = address(changes);
      },
      say: setStatus,
      signedOut: ended,
    };
  }, [fragment, found, ended]);
  const id = view?.page.id;
  useEffect(() => {
    document.title = text.titleOf(view?.page.title ?? "");
    setOpen(false);
    setStatus("");
    window.scrollTo(0, 0);
    heading.current?.focus({ preventScroll: true });
  }, [id]);
  return (
    <>
      <a
        className="skip"
        href="#main"
        onClick={(event) => {
          event.preventDefault();
          heading.current?.focus();
        }}
      >
        {text.skip}
      </a>
      <Brand>
        <div className="who">
          <Who of={found} chosen={chosen} />
          <SignOut signOut={signOut} />
          <Button
            kind="small"
            aria-expanded={isOpen}
            aria-controls="nav"
            onPress={() => setOpen(!isOpen)}
            {...{ id: "menu" }}
          >
            {text.menu}
          </Button>
        </div>
      </Brand>
      <div className="frame">
        <Navigation
          current={id ?? ""}
          found={found}
          isOpen={isOpen}
          org={view?.asked("org") ?? ""}
        />
        <main id="main">
          <h1 ref={heading} tabIndex={-1}>
            {view?.page.title ?? text.noPages}
          </h1>
          {view && (
            <ViewContext.Provider value={view}>
              {isAllowed(view.page, found) ? (
                <Guarded key={id}>
                  <view.page.Show />
                </Guarded>
              ) : (
                <Remark kind="warning">
                  {found.person
                    ? text.notAllowedMember(roleIn(found), view.page.calls.join(", "))
                    : text.notAllowed(
                        found.keyPrefix,
                        found.scopes.join(", "),
                        view.page.calls.join(", "),
                      )}
                </Remark>
              )}
            </ViewContext.Provider>
          )}
          <p className="status" role="status">
            {status}
          </p>
        </main>
      </div>
      <footer className="foot">{text.foot}</footer>
    </>
  );
}

function roleIn({ person, organizationId }: Session): string {
  return person?.organizations.find(({ id }) => id === organizationId)?.role ?? "";
}

// Who is signed in: the prefix of a key, or a person with the organization in which it acts.
function Who({ of: found, chosen }: { of: Session; chosen: (organization: string) => void }) {
  const { person, keyPrefix, scopes, organizationId } = found;
  if (!person)
    return (
      <span className="key" title={scopes.join(", ")}>
        {keyPrefix}
      </span>
    );
  const [only] = person.organizations;
  return (
    <>
      <span className="person" title={person.email}>
        <Name of={person.displayName || person.email} />
      </span>
      {person.organizations.length > 1 ? (
        <select
          className="acting"
          aria-label={text.organization}
          value={organizationId}
          onChange={(event) => chosen(event.target.value)}
        >
          {person.organizations.map(({ id, name, role }) => (
            <option key={id} value={id}>
              {text.memberOf(name, role)}
            </option>
          ))}
        </select>
      ) : (
        only && <span className="key">{text.memberOf(only.name, only.role)}</span>
      )}
    </>
  );
}

// Shows the fault of a page in its place; the navigation stays.
class Guarded extends Component<{ children: ReactNode }, { fault: unknown }> {
  override state = { fault: null };

  static getDerivedStateFromError(fault: unknown): { fault: unknown } {
    return { fault };
  }

  override render(): ReactNode {
    return this.state.fault === null ? this.props.children : <Problem of={this.state.fault} />;
  }
}

function Navigation({
  current,
  found,
  isOpen,
  org,
}: {
  current: string;
  found: Session;
  isOpen: boolean;
  org: string;
}) {
  return (
    <nav id="nav" className={`nav ${isOpen ? "open" : ""}`} aria-label={text.pagesLabel}>
      {GROUPS.map(([name, pages]) => {
        const shown = pages.filter((page) => isAllowed(page, found));
        if (shown.length === 0) return null;
        return (
          <div key={name} className="group">
            <p className="groupname">{name}</p>
            <ul>
              {shown.map((page) => (
                <li key={page.id}>
                  <a
                    href={addressOf(page.id, { org })}
                    aria-current={page.id === current ? "page" : undefined}
                  >
                    {page.title}
                  </a>
                </li>
              ))}
            </ul>
          </div>
        );
      })}
    </nav>
  );
}

const root = document.getElementById("root");
if (root)
  createRoot(root).render(
    <I18nProvider locale={text.locale}>
      <Console />
    </I18nProvider>,
  );
