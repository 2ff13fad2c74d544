// Screen for sign-in: with a provider, a link, an invitation, or an API key.

import { useEffect, useState } from "react";
import type { ReactNode } from "react";
import { Input, Label, Text, TextField } from "react-aria-components";
import { acceptInvitation, offerOf, sessionOfKey, useLink } from "./client.js";
import type { Offer, Provider, Session } from "./client.js";
import { remember } from "./credentials.js";
import { Button, Empty, Field, Name, Problem, Remark } from "./parts/basics.js";
import { text } from "./texts.js";

const ROUTE = "#/sign-in";
const NUMBER = /^[0-9a-f]{1,16}$/;
const SHOWN_MAX = 3; // organizations
const t = text.signIn;

// What the address asks of the screen: #/sign-in?link=SECRET, ?invitation=TOKEN, or ?failed=REASON.
export interface SignInAsked {
  link: string;
  invitation: string;
  failure: string;
}

// Read the address; null if it is that of a page.
export function signInAsked(fragment: string): SignInAsked | null {
  const [path, query = ""] = fragment.split("?");
  if (path !== ROUTE) return null;
  const params = new URLSearchParams(query);
  const [link, invitation] = [params.get("link") ?? "", params.get("invitation") ?? ""];
  const failure = params.has("failed") ? failed(params) : "";
  return link || invitation || failure ? { link, invitation, failure } : null;
}

// Text for the reason in the address. Only reasons of the catalogue and a number are shown, since
// anyone can write an address.
function failed(params: URLSearchParams): string {
  const reason = params.get("failed") ?? "";
  const number = params.get("number") ?? "";
  const why = Object.hasOwn(t.failed, reason) ? t.failed[reason] : t.failedOtherwise;
  return `${why} ${NUMBER.test(number) ? t.number(number) : ""}`;
}

// Address of a provider's sign-in, which leads back to the present page.
function startOf(provider: Provider): string {
  const route = location.hash.startsWith(ROUTE) ? "/" : location.hash.slice(1) || "/";
  return `sign-in/start/${provider.name}?${new URLSearchParams({ route }).toString()}`;
}

// Leave the address with a secret: neither the history nor the Back button has it then.
function clearAddress(): void {
  history.replaceState(null, "", "#/");
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}

interface Entering {
  entered: (found?: Session) => void | Promise<void>; // without a session: the cookie has it
}

interface Offered extends Entering {
  present: string; // who is signed in; empty for nobody
}

// `providers` is null if somebody is signed in already, who is `present`.
export function SignIn({
  asked,
  providers,
  problem,
  present,
  entered,
}: Offered & {
  asked: SignInAsked | null;
  providers: Provider[] | null;
  problem: unknown;
}) {
  useEffect(() => {
    document.title = text.titleOf(t.title);
  }, []);
  const offered = { present, entered };
  if (asked?.link) return <WithLink secret={asked.link} {...offered} />;
  if (asked?.invitation) return <WithInvitation token={asked.invitation} {...offered} />;
  if (providers === null)
    return (
      <Card title={t.title} problem={asked?.failure ?? problem}>
        <Button onPress={clearAddress}>{t.goOn}</Button>
      </Card>
    );
  return (
    <Card title={t.title} problem={asked?.failure || problem}>
      {providers.map((each) => (
        <a key={each.name} className="button primary provider" href={startOf(each)}>
          {t.with(each.title)}
        </a>
      ))}
      {providers.length > 0 && <p className="or">{t.orKey}</p>}
      <WithKey isOnly={providers.length === 0} entered={entered} />
    </Card>
  );
}

function Card({
  title,
  problem,
  children,
}: {
  title: ReactNode;
  problem: unknown;
  children: ReactNode;
}) {
  return (
    <main>
      <div className="signin">
        <h1>{title}</h1>
        {typeof problem === "string" ? (
          <Remark kind="bad">{problem}</Remark>
        ) : (
          problem !== null && <Problem of={problem} />
        )}
        {children}
      </div>
    </main>
  );
}

function WithKey({ isOnly, entered }: Entering & { isOnly: boolean }) {
  const [key, setKey] = useState("");
  const [error, setError] = useState<unknown>(null);
  const [isBusy, setBusy] = useState(false);
  const submit = async () => {
    setBusy(true);
    try {
      const found = await sessionOfKey(key.trim());
      remember(key.trim());
      await entered(found);
      if (location.hash.startsWith(ROUTE)) clearAddress();
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  };
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        void submit();
      }}
    >
      <TextField
        className="field wide"
        type="password"
        value={key}
        onChange={setKey}
        isRequired
        autoComplete="off"
        autoFocus={isOnly}
      >
        <Label>{text.apiKey}</Label>
        <Input spellCheck="false" />
        <Text slot="description" className="note">
          {t.help} <code>weir env</code> {t.helpEnd}
        </Text>
      </TextField>
      {error !== null && <Problem of={error} />}
      <Button type="submit" kind={isOnly ? "primary" : ""} isDisabled={isBusy || !key.trim()}>
        {isOnly ? t.title : t.withKey}
      </Button>
    </form>
  );
}

// Whom the secret of the address would sign in. The secret leaves the address at once.
function useOffer(by: { secret: string } | { token: string }): [Offer | null, unknown] {
  const [offer, setOffer] = useState<Offer | null>(null);
  const [error, setError] = useState<unknown>(null);
  useEffect(() => {
    history.replaceState(null, "", "#/");
    offerOf(by).then(setOffer).catch(setError);
  }, []);
  return [offer, error];
}

// Whose session begins, and whose it replaces: anyone can send a link that signs in as themselves.
function Whom({ offer, present }: { offer: Offer; present: string }) {
  const shown = offer.organizations.slice(0, SHOWN_MAX);
  const more = offer.organizations.length - shown.length;
  return (
    <>
      <p>
        <Name of={offer.email} /> {shown.length > 0 ? t.ofOrganizations(shown, more) : t.ofNone}
      </p>
      {present && present !== offer.email && <Remark kind="warning">{t.instead(present)}</Remark>}
      <p className="note">{t.onlyIfAsked}</p>
    </>
  );
}

// Nothing is used up before the person has agreed.
function WithLink({ secret, present, entered }: Offered & { secret: string }) {
  const [offer, unknown] = useOffer({ secret });
  const [error, setError] = useState<unknown>(null);
  const [isBusy, setBusy] = useState(false);
  const confirm = async () => {
    setBusy(true);
    try {
      await useLink(secret);
      await entered();
      clearAddress();
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  };
  if (offer === null && unknown === null) return <Empty>{t.reading}</Empty>;
  const title = offer && (
    <>
      {t.signInAs} <Name of={offer.displayName || offer.email} />?
    </>
  );
  return (
    <Card title={title ?? t.title} problem={error ?? unknown}>
      {offer && <Whom offer={offer} present={present} />}
      {offer && (
        <Button kind="primary" isDisabled={isBusy} onPress={() => void confirm()}>
          {t.yes}
        </Button>
      )}
      <Button onPress={clearAddress}>{present ? t.goOn : t.otherWay}</Button>
    </Card>
  );
}

function WithInvitation({ token, present, entered }: Offered & { token: string }) {
  const [offer, unknown] = useOffer({ token });
  const [name, setName] = useState("");
  const [error, setError] = useState<unknown>(null);
  const [isBusy, setBusy] = useState(false);
  const submit = async () => {
    setBusy(true);
    try {
      await acceptInvitation(token, name.trim());
      await entered();
      clearAddress();
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  };
  if (offer === null && unknown === null) return <Empty>{t.reading}</Empty>;
  return (
    <Card title={t.invited} problem={error ?? unknown}>
      {offer && (
        <form
          onSubmit={(event) => {
            event.preventDefault();
            void submit();
          }}
        >
          <p>{t.invitedHelp}</p>
          <Whom offer={offer} present={present} />
          <Field label={t.displayName} help={t.displayNameHelp} value={name} onChange={setName} />
          <Button type="submit" kind="primary" isDisabled={isBusy}>
            {t.accept}
          </Button>
        </form>
      )}
      <Button onPress={clearAddress}>{present ? t.goOn : t.otherWay}</Button>
    </Card>
  );
}
