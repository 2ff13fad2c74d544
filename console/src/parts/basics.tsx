// Small parts of pages: messages, tiles, labels, times, and fields of the address.

import { useEffect, useId, useState } from "react";
import type { ReactNode } from "react";
import {
  Button as AriaButton,
  FieldError,
  Input,
  Label,
  Text,
  TextField,
} from "react-aria-components";
import type { ButtonProps } from "react-aria-components";
import { CallFailed, save } from "../client.js";
import type { File } from "../client.js";
import { localTime, secondsOf, utcTime, wait } from "../format.js";
import { text } from "../texts.js";
import { useView } from "../view.js";

export type Kind = "" | "good" | "warning" | "bad";

export function Empty({ children }: { children: ReactNode }) {
  return <p className="empty">{children}</p>;
}

export function Note({ children }: { children: ReactNode }) {
  return <p className="note">{children}</p>;
}

export function Remark({ kind = "", children }: { kind?: Kind; children: ReactNode }) {
  return (
    <p className={`remark ${kind}`} role={kind === "bad" ? "alert" : undefined}>
      {children}
    </p>
  );
}

// Error of a call as the server gives it: the invalid fields, when to retry, and the remedy's page.
export function Problem({ of: error }: { of: unknown }) {
  if (!(error instanceof CallFailed))
    return (
      <Remark kind="bad">
        {text.errors.fault(error instanceof Error ? error.message : String(error))}
      </Remark>
    );
  const violations = error.detail("BadRequest")?.fieldViolations ?? [];
  const retry = secondsOf(error.detail("RetryInfo")?.retryDelay);
  const reason = error.detail("ErrorInfo")?.reason;
  const shown = violations.map((each) => `${each.field}: ${each.description}`).join("; ");
  const obstacles = error.detail("PreconditionFailure")?.violations ?? [];
  return (
    <Remark kind="bad">
      {obstacles.length > 1
        ? obstacles.map((each, index) => (
            <span key={index} className="line">
              {each.description}
            </span>
          ))
        : shown || error.message}
      {retry !== null && ` ${text.errors.retry(wait(retry))}`}
      {reason && <span className="note reason">{reason}</span>}
    </Remark>
  );
}

export function Badge({ kind = "", children }: { kind?: Kind; children: ReactNode }) {
  return <span className={`badge ${kind}`}>{children}</span>;
}

export function Tiles({ children }: { children: ReactNode }) {
  return <dl className="tiles">{children}</dl>;
}

// A figure with its name and unit.
export function Tile({
  name,
  value,
  unit = "",
  note = "",
}: {
  name: string;
  value: ReactNode;
  unit?: string | undefined;
  note?: ReactNode;
}) {
  return (
    <div className="tile">
      <dt>{name}</dt>
      <dd>
        <span className="figure">{value}</span>
        {unit && ` ${unit}`}
      </dd>
      {note && <dd className="note">{note}</dd>}
    </div>
  );
}

// Time in the reader's zone, beside UTC where that differs.
export function Time({ of: time }: { of: string | undefined }) {
  if (!time) return "\u2014";
  const utc = utcTime(time);
  const isSame = utc === `${localTime(time)} UTC`;
  return (
    <time dateTime={time} title={utc}>
      {localTime(time)}
      {isSame ? " UTC" : <span className="utc">{utc.slice(11, 19)} UTC</span>}
    </time>
  );
}

// Time of the latest refresh.
export function AsOf() {
  return <Note>{text.asOf(localTime(new Date().toISOString()))}</Note>;
}

// Id, key prefix or digest.
export function Id({ of }: { of: string | undefined }) {
  return of ? <span className="id">{of}</span> : null;
}

// Name that a tenant or its user chose: its direction of writing is its own.
export function Name({ of }: { of: string | undefined }) {
  return <bdi className="name">{of}</bdi>;
}

// Equivalent command of the terminal.
export function Command({ what = text.command, children }: { what?: string; children: string }) {
  return (
    <p className="command">
      {what}: <code>{children}</code>
    </p>
  );
}

// While it is busy, a button does nothing and keeps the focus, which a disabled one would lose.
export function Button({
  kind = "",
  isBusy = false,
  onPress,
  ...props
}: ButtonProps & {
  kind?: "" | "primary" | "danger" | "small" | "danger small";
  isBusy?: boolean;
}) {
  return (
    <AriaButton
      {...props}
      {...(isBusy ? { type: "button" } : onPress ? { onPress } : {})}
      className={`button ${kind} ${isBusy ? "busy" : ""}`}
    />
  );
}

// Copies a text, and says so.
export function Copy({ of, label = text.copy }: { of: string; label?: string }) {
  const [isDone, setDone] = useState(false);
  const copied = () =>
    navigator.clipboard.writeText(of).then(
      () => setDone(true),
      () => setDone(false),
    );
  return (
    <Button kind="small" onPress={() => void copied()}>
      {isDone ? text.copied : label}
    </Button>
  );
}

// Downloads a file.
export function Download({
  children,
  fetched,
}: {
  children: ReactNode;
  fetched: () => Promise<File>;
}) {
  const view = useView();
  const [isBusy, setBusy] = useState(false);
  const download = async () => {
    setBusy(true);
    try {
      const found = await fetched();
      save(found);
      view.say(text.saved(found.name));
    } catch (error) {
      view.say(text.notSaved(error instanceof Error ? error.message : String(error)));
    }
    setBusy(false);
  };
  return (
    <Button isBusy={isBusy} onPress={() => void download()}>
      {children}
    </Button>
  );
}

// Labelled selection. options: [value, text] each.
export function Choice({
  name,
  options,
  value,
  onChange,
}: {
  name: string;
  options: [string, string][];
  value: string;
  onChange: (value: string) => void;
}) {
  const id = useId();
  return (
    <div className="field">
      <label htmlFor={id}>{name}</label>
      <select id={id} value={value} onChange={(event) => onChange(event.target.value)}>
        {options.map(([each, shown]) => (
          <option key={each} value={each}>
            {shown}
          </option>
        ))}
      </select>
    </div>
  );
}

// Labelled text input, with an explanation and its error.
export function Field({
  label,
  help,
  error,
  type = "text",
  placeholder,
  isRequired = false,
  value,
  onChange,
}: {
  label: string;
  help?: string | undefined;
  error?: string | undefined;
  type?: string;
  placeholder?: string | undefined;
  isRequired?: boolean;
  value: string;
  onChange: (value: string) => void;
}) {
  return (
    <TextField
      className="field"
      value={value}
      onChange={onChange}
      isRequired={isRequired}
      isInvalid={Boolean(error)}
      validationBehavior="aria"
      type={type as "text"}
      autoComplete="off"
      spellCheck="false"
    >
      <Label>{label}</Label>
      <Input placeholder={placeholder} />
      {help && (
        <Text slot="description" className="note">
          {help}
        </Text>
      )}
      <FieldError className="error">{error}</FieldError>
    </TextField>
  );
}

export interface Term {
  name: string; // parameter of the address
  label: string;
  type?: string;
  placeholder?: string;
}

// Form that opens this page with the entered parameters.
export function Search({ terms, act = text.show }: { terms: Term[]; act?: string }) {
  const view = useView();
  const initial = () => Object.fromEntries(terms.map(({ name }) => [name, view.asked(name)]));
  const [values, setValues] = useState<Record<string, string>>(initial);
  const key = view.params.toString();
  useEffect(() => setValues(initial()), [key]);
  return (
    <form
      className="controls"
      onSubmit={(event) => {
        event.preventDefault();
        view.go({
          before: "",
          page: "",
          ...Object.fromEntries(
            Object.entries(values).map(([name, value]) => [name, value.trim()]),
          ),
        });
      }}
    >
      {terms.map(({ name, ...each }) => (
        <Field
          key={name}
          {...each}
          value={values[name] ?? ""}
          onChange={(value) => setValues((before) => ({ ...before, [name]: value }))}
        />
      ))}
      <Button type="submit">{act}</Button>
    </form>
  );
}

// Buttons to the first and the next page of a list.
export function Pages({
  next,
  parameter = "page",
  first = text.firstPage,
  more = text.nextPage,
}: {
  next: string | undefined;
  parameter?: string;
  first?: string;
  more?: string;
}) {
  const view = useView();
  return (
    <div className="buttons">
      {view.asked(parameter) && (
        <Button onPress={() => view.go({ [parameter]: "" })}>{first}</Button>
      )}
      {next && <Button onPress={() => view.go({ [parameter]: next })}>{more}</Button>}
    </div>
  );
}
