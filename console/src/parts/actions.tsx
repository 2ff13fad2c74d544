// Changes: a button opens a dialog with the fields of one call. The server checks them; its errors
// stand beside the fields that they name.

import { useEffect, useId, useRef, useState } from "react";
import type { ReactNode } from "react";
import {
  Checkbox,
  Dialog,
  DialogTrigger,
  Heading,
  Modal,
  ModalOverlay,
} from "react-aria-components";
import { CallFailed, call, newRequestId } from "../client.js";
import type { Name, Request, Response } from "../client.js";
import type { MoneyJson } from "../gen/weir/v1/types_pb.js";
import { PICOS, scaled } from "../format.js";
import { text } from "../texts.js";
import { useView } from "../view.js";
import { Button, Choice, Copy, Field, Problem, Remark } from "./basics.js";

const MILLION_DIGITS = 6;

export interface Asked {
  name: string; // of the field in the call, as errors name it
  label: string;
  help?: string;
  type?: "text" | "number" | "datetime-local" | "url" | "check";
  options?: [string, string][];
  initial?: string;
  placeholder?: string;
  isRequired?: boolean;
}

export type Values = Record<string, string>;

export interface Change<Call extends Name> {
  call: Call;
  label: string; // of the button
  about?: string; // completes the label for screen readers, such as a name
  title: string;
  explanation?: ReactNode;
  act: string; // the button that makes the call
  fields?: Asked[];
  isDanger?: boolean;
  isPrimary?: boolean;
  request: (values: Values, requestId: string) => Request<Call>;
  done: (response: Response<Call>, values: Values) => string | Secret;
  changed: () => void;
  trial?: Trial;
}

// Second button of a dialog: shows what the change would do, and changes nothing.
export interface Trial {
  call: Name;
  label: string;
  fields?: Asked[];
  run: (values: Values) => Promise<Outcome>;
}

export interface Outcome {
  summary: string;
  detail: ReactNode;
}

// Secret that the server returns once.
export interface Secret {
  title?: string;
  message: string;
  secret: string;
}

// A button that changes something, if the session may make the call.
export function Action<Call extends Name>(change: Change<Call>) {
  const view = useView();
  if (!view.may(change.call)) return null;
  const kind = change.isDanger ? "danger small" : change.isPrimary ? "primary" : "small";
  return (
    <DialogTrigger>
      <Button
        kind={kind}
        {...(change.about ? { "aria-label": `${change.label} ${change.about}` } : {})}
      >
        {change.label}
      </Button>
      <ModalOverlay className="overlay" isDismissable={false}>
        <Modal className={change.trial ? "modal wide" : "modal"}>
          <Dialog className="dialog">
            {({ close }) => <Form change={change} close={close} />}
          </Dialog>
        </Modal>
      </ModalOverlay>
    </DialogTrigger>
  );
}

function Form<Call extends Name>({ change, close }: { change: Change<Call>; close: () => void }) {
  const view = useView();
  const trial = change.trial && view.may(change.trial.call) ? change.trial : null;
  const fields = change.fields ?? [];
  const allFields = [...fields, ...(trial?.fields ?? [])];
  const [values, setValues] = useState<Values>(() =>
    Object.fromEntries(
      allFields.map((each) => [each.name, each.initial ?? each.options?.[0]?.[0] ?? ""]),
    ),
  );
  const [error, setError] = useState<unknown>(null);
  const [isBusy, setBusy] = useState(false);
  const [secret, setSecret] = useState<Secret | null>(null);
  const [outcome, setOutcome] = useState<Outcome | null>(null);
  const shown = useRef<HTMLDivElement>(null);
  useEffect(() => {
    if (outcome) shown.current?.scrollIntoView({ block: "nearest" });
  }, [outcome]);
  const attempt = useRef({ values: "", id: newRequestId() });
  const violations = violationsOf(error);
  const errorOf = (name: string) =>
    violations.find((each) => each.field?.split(/[.[]/).includes(name))?.description;
  const isShownAtFields =
    violations.length > 0 &&
    violations.every((each) =>
      allFields.some(({ name }) => each.field?.split(/[.[]/).includes(name)),
    );
  const failed = (failure: unknown) => {
    if (failure instanceof CallFailed && failure.httpStatus === 401) view.signedOut();
    setError(failure);
  };
  const attemptTrial = async () => {
    if (isBusy || !trial) return;
    setBusy(true);
    setOutcome(null);
    try {
      setOutcome(await trial.run(values));
      setError(null);
    } catch (failure) {
      failed(failure);
    }
    setBusy(false);
  };
  const submit = async () => {
    // A repeated attempt has the same id, so that a lost answer does not make the change twice.
    const asked = JSON.stringify(values);
    if (attempt.current.values !== asked) attempt.current = { values: asked, id: newRequestId() };
    setBusy(true);
    try {
      const done = change.done(
        await call(change.call, change.request(values, attempt.current.id)),
        values,
      );
      change.changed();
      if (typeof done === "string") {
        view.say(done);
        close();
      } else setSecret(done);
    } catch (failure) {
      failed(failure);
    }
    setBusy(false);
  };
  const entry = (each: Asked) => (
    <Entry
      key={each.name}
      asked={each}
      error={errorOf(each.name)}
      value={values[each.name] ?? ""}
      onChange={(value) => {
        setValues((before) => ({ ...before, [each.name]: value }));
        setOutcome(null); // it was of other values
      }}
    />
  );
  if (secret) return <Once {...secret} close={close} />;
  return (
    <form
      noValidate
      onSubmit={(event) => {
        event.preventDefault();
        if (!isBusy) void submit();
      }}
    >
      <Heading slot="title">{change.title}</Heading>
      {typeof change.explanation === "string" ? <p>{change.explanation}</p> : change.explanation}
      {fields.map(entry)}
      {trial && (
        <fieldset className="trial">
          <legend>{trial.label}</legend>
          {trial.fields?.map(entry)}
          <div className="buttons">
            <Button isBusy={isBusy} onPress={() => void attemptTrial()}>
              {trial.label}
            </Button>
          </div>
          <p role="status">{outcome?.summary}</p>
          <div ref={shown}>{outcome?.detail}</div>
        </fieldset>
      )}
      {error !== null && !isShownAtFields && <Problem of={error} />}
      <div className="buttons">
        <Button onPress={close}>{text.keep}</Button>
        <Button type="submit" kind={change.isDanger ? "danger" : "primary"} isBusy={isBusy}>
          {change.act}
        </Button>
      </div>
    </form>
  );
}

function Entry({
  asked,
  error,
  value,
  onChange,
}: {
  asked: Asked;
  error: string | undefined;
  value: string;
  onChange: (value: string) => void;
}) {
  const help = useId();
  if (asked.type === "check") {
    return (
      <div className="field">
        <Checkbox
          className="check"
          isSelected={value === "true"}
          onChange={(isSelected) => onChange(isSelected ? "true" : "")}
          {...(asked.help ? { "aria-describedby": help } : {})}
        >
          <span className="box" aria-hidden="true" />
          {asked.label}
        </Checkbox>
        {asked.help && (
          <span id={help} className="note">
            {asked.help}
          </span>
        )}
        {error && <Remark kind="bad">{error}</Remark>}
      </div>
    );
  }
  if (asked.options) {
    return (
      <>
        <Choice name={asked.label} options={asked.options} value={value} onChange={onChange} />
        {asked.help && <p className="note">{asked.help}</p>}
        {error && <Remark kind="bad">{error}</Remark>}
      </>
    );
  }
  const { label, help: explained, type = "text", placeholder, isRequired = false } = asked;
  return (
    <Field
      label={label}
      help={explained}
      error={error}
      type={type === "number" ? "text" : type}
      placeholder={placeholder}
      isRequired={isRequired}
      value={value}
      onChange={onChange}
    />
  );
}

function violationsOf(error: unknown): { field?: string; description?: string }[] {
  if (error instanceof Unusable) return [{ field: error.field, description: error.message }];
  return error instanceof CallFailed ? (error.detail("BadRequest")?.fieldViolations ?? []) : [];
}

// A secret, which is shown until the dialog is closed.
function Once({
  title = text.secretTitle,
  message,
  secret,
  close,
}: Secret & { close: () => void }) {
  return (
    <>
      <Heading slot="title">{title}</Heading>
      <p>{message}</p>
      <p className="secret">
        <code>{secret}</code> <Copy of={secret} />
      </p>
      <Remark kind="warning">{text.secretOnce}</Remark>
      <div className="buttons">
        <Button kind="primary" onPress={close} autoFocus>
          {text.secretDone}
        </Button>
      </div>
    </>
  );
}

// Entries of a list, separated by commas, spaces or lines.
export function listed(value = ""): string[] {
  return value.split(/[\s,]+/).filter(Boolean);
}

// Number as the server reads it: digits grouped with commas or spaces, and the minus that the page
// shows, are accepted.
export function digits(value = ""): string {
  return value
    .replace(/(?<=\d)[, _](?=\d{3})/g, "")
    .replace("\u2212", "-")
    .trim();
}

// Value that the page cannot write into the call's field; the field says so.
export class Unusable extends Error {
  constructor(
    readonly field: string,
    message: string,
  ) {
    super(message);
  }
}

// Exact decimal number of a currency unit, in picos.
export function exactly(field: string, entered = ""): string {
  const picos = scaled(digits(entered), PICOS);
  if (picos === null) throw new Unusable(field, text.notAnAmount(entered));
  return picos;
}

// Price of a million tokens in a currency unit, in picos per token.
export function perToken(field: string, entered = ""): string {
  const picos = scaled(digits(entered), PICOS - MILLION_DIGITS);
  if (picos === null) throw new Unusable(field, text.notAPrice(entered));
  return picos;
}

// Entered amount as money of the contract.
export function moneyOf(field: string, entered = "", currencyCode = ""): MoneyJson {
  const picos = BigInt(exactly(field, entered));
  const unit = 10n ** BigInt(PICOS);
  return { currencyCode, units: String(picos / unit), picos: String(picos % unit) };
}

// Time of an input in the reader's zone, in UTC.
export function timeOf(field: string, entered = ""): string {
  const time = new Date(entered);
  if (Number.isNaN(time.getTime())) throw new Unusable(field, text.notATime);
  return time.toISOString();
}
