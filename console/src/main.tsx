// Sign-in, navigation and routing by the URL's fragment: #/usage?org=demo&month=2026-11.

import { Component, useCallback, useEffect, useMemo, useRef, useState } from "react";
import type { ReactNode } from "react";
import { createRoot } from "react-dom/client";
import { I18nProvider, Input, Label, Text, TextField } from "react-aria-components";
import { CallFailed, session } from "./client.js";
import type { Session } from "./client.js";
import "./console.css";
import { forget, isSignedIn, remember } from "./credentials.js";
import { alerts } from "./pages/alerts.js";
import { audit } from "./pages/audit.js";
import { endUsers } from "./pages/end-users.js";
import { fleet } from "./pages/fleet.js";
import { keys } from "./pages/keys.js";
import { limits } from "./pages/limits.js";
import { month } from "./pages/month.js";
import { overview } from "./pages/overview.js";
import { playground } from "./pages/playground.js";
import { prices } from "./pages/prices.js";
import { reconciliation } from "./pages/reconciliation.js";
import { requests } from "./pages/requests.js";
import { tenants } from "./pages/tenants.js";
import { usage } from "./pages/usage.js";
import { Button, Problem, Remark } from "./parts/basics.js";
import { text } from "./texts.js";
import { ViewContext, addressOf } from "./view.js";
import type { Page, View } from "./view.js";

const GROUPS: [string, Page[]][] = [
  [text.groups.use, [overview, playground, requests, usage, endUsers]],
  [text.groups.access, [keys, limits, tenants, alerts]],
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

function Console() {
  const [signedIn, setSignedIn] = useState<Session | null>(null);
  const [isStarting, setStarting] = useState(isSignedIn());
  const [problem, setProblem] = useState<unknown>(null);
  const signOut = useCallback((why: unknown = null) => {
    forget();
    setSignedIn(null);
    setProblem(why);
  }, []);
  useEffect(() => {
    if (!isStarting) return;
    session()
      .then(setSignedIn, (error: unknown) => {
        if (error instanceof CallFailed && error.httpStatus === 401) signOut(text.invalidKey);
        else setProblem(error);
      })
      .finally(() => setStarting(false));
  }, []);
  if (isStarting) return <p className="empty">{text.loading}</p>;
  if (!signedIn) return <SignIn problem={problem} signedIn={setSignedIn} />;
  return <Shell session={signedIn} signOut={signOut} />;
}

function SignIn({ problem, signedIn }: { problem: unknown; signedIn: (found: Session) => void }) {
  const [key, setKey] = useState("");
  const [error, setError] = useState<unknown>(problem);
  const [isBusy, setBusy] = useState(false);
  useEffect(() => {
    document.title = text.titleOf(text.signIn.title);
  }, []);
  const submit = async () => {
    setBusy(true);
    try {
      const found = await session(key.trim());
      remember(key.trim());
      signedIn(found);
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  };
  return (
    <>
      <Brand />
      <main>
        <form
          className="signin"
          onSubmit={(event) => {
            event.preventDefault();
            void submit();
          }}
        >
          <h1>{text.signIn.title}</h1>
          <TextField
            className="field wide"
            type="password"
            value={key}
            onChange={setKey}
            isRequired
            autoComplete="off"
            autoFocus
          >
            <Label>{text.apiKey}</Label>
            <Input spellCheck="false" />
            <Text slot="description" className="note">
              {text.signIn.help} <code>weir env</code> {text.signIn.helpEnd}
            </Text>
          </TextField>
          {typeof error === "string" ? (
            <Remark kind="bad">{error}</Remark>
          ) : (
            error !== null && <Problem of={error} />
          )}
          <Button type="submit" kind="primary" isDisabled={isBusy || !key.trim()}>
            {text.signIn.title}
          </Button>
        </form>
      </main>
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
  signOut,
}: {
  session: Session;
  signOut: (why?: unknown) => void;
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
      signedOut: () => signOut(text.invalidKey),
    };
  }, [fragment, found, signOut]);
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
          <span className="key" title={found.scopes.join(", ")}>
            {found.keyPrefix}
          </span>
          <Button kind="small" onPress={() => signOut()}>
            {text.signOut}
          </Button>
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
                  {text.notAllowed(
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
