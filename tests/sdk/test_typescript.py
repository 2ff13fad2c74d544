"""TypeScript client: it compiles under its strict rules, and keeps each promise of
`sdk/conformance.json`.

Its tests run in Node against a real server; each of them is one test here.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from weir_client import generated_values

from api.core.errors import FieldViolation, InvalidRequest
from api.core.statuses import status_of
from infra import typescript_sdk
from metering.core.models import QuotaDimension
from metering.core.money import MINOR_DIGITS, exact_text
from tests.sdk.conftest import ENCODER, TOOL_MODEL, alive
from tests.service import MODEL, Service

CONFORMANCE = json.loads((typescript_sdk.SDK.parent / "conformance.json").read_text())
RUN_MAX_S = 280  # below the limit of one test here
PROMISES = [each["id"] for each in CONFORMANCE]


def test_amounts_have_at_least_the_decimals_of_their_currency(built: Path) -> None:
    amounts = [(code, picos) for code in MINOR_DIGITS for picos in (5 * 10**12, 1, -(10**12))]
    script = f"""
        import {{ Money }} from "{built / "src" / "money.js"}";
        for (const [code, picos] of {json.dumps(amounts)})
          console.log(`${{new Money(code, BigInt(picos))}}`);
    """

    expected = [f"{exact_text(picos, code)} {code}" for code, picos in amounts]
    assert evaluated(script) == expected


def evaluated(script: str) -> list[str]:
    """Return the lines that a module in JavaScript prints."""
    done = subprocess.run(
        ["node", "--input-type=module", "--eval", script],
        cwd=typescript_sdk.SDK,
        capture_output=True,
        text=True,
        timeout=RUN_MAX_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_errors_use_the_names_of_the_options(built: Path) -> None:
    """The server names the fields of the contract; Python's client has the same rule."""
    violations = [
        FieldViolation("sampling.temperature", "must be between 0 and 2, got 5"),
        FieldViolation("max_output_tokens", "must be at least min_output_tokens, of my_model"),
        FieldViolation("labels['user_id']", "must not be empty"),
        FieldViolation("conversation.messages[0].tool_calls", "must be a list"),
    ]
    statuses = [status_of(InvalidRequest([each])).SerializeToString() for each in violations]
    script = f"""
        import {{ fromBinary }} from "@bufbuild/protobuf";
        import {{ StatusSchema }} from "{built / "src" / "gen/google/rpc/status_pb.js"}";
        import {{ errorFromStatus }} from "{built / "src" / "status.js"}";
        for (const bytes of {json.dumps([list(each) for each in statuses])}) {{
          const error = errorFromStatus(fromBinary(StatusSchema, new Uint8Array(bytes)));
          console.log(`${{error.fieldViolations[0].field}} | ${{error.plainMessage}}`);
        }}
    """

    assert evaluated(script) == [
        "temperature | temperature: must be between 0 and 2, got 5",
        "maxOutputTokens | maxOutputTokens: must be at least minOutputTokens, of my_model",
        "labels['user_id'] | labels['user_id']: must not be empty",
        "prompt[0].toolCalls | prompt[0].tool_calls: must be a list",
    ]


@pytest.mark.parametrize(
    ("table", "option", "hint"),
    [
        ("GENERATE", "max_tokens", "did you mean maxOutputTokens?"),
        ("GENERATE", "temprature", "did you mean temperature?"),
        ("GENERATE", "top_p", "did you mean topP?"),
        ("GENERATE", "response_format", "use jsonSchema"),
        ("GENERATE", "qqq", ""),
        ("EMBED", "truncation", "did you mean truncate?"),
        ("LIMITS", "qqq", "there are maxOutputTokens, maxCost"),
    ],
)
def test_an_unknown_option_has_a_short_hint(
    built: Path, table: str, option: str, hint: str
) -> None:
    script = f"""
        import * as checks from "{built / "src" / "checks.js"}";
        try {{ checks.checkOptions({{ "{option}": 1 }}, checks.{table}); }}
        catch (error) {{ console.log(error.message); }}
    """

    [message] = evaluated(script)

    assert message == f"{option}: no such option" + (f"; {hint}" if hint else "")


def test_a_timeout_and_a_closed_client_are_named_as_in_python(built: Path) -> None:
    script = f"""
        import {{ WeirClient }} from "{built / "src" / "index.js"}";
        import {{ Attempt }} from "{built / "src" / "attempt.js"}";
        const client = new WeirClient({{ address: "127.0.0.1:1", apiKey: "wk_x" }});
        client.close();
        await client.listModels().catch((error) => console.log(error.plainMessage));
        const attempt = new Attempt("id", "demo");
        console.log(attempt.deadlineError().plainMessage);
        attempt.expireIn(1, 200);
        console.log(attempt.deadlineError().plainMessage);
    """

    assert evaluated(script) == [
        "the client is closed: make a new one, or close it after its last use",
        "the request did not end within its deadline and was cancelled",
        "the request did not end within 200 ms (timeoutMs) and was cancelled",
    ]


def test_everything_that_a_client_returns_becomes_json(built: Path) -> None:
    """`JSON.stringify` throws on a `bigint`."""
    wire, gen = built / "src" / "wire.js", built / "src" / "gen" / "weir" / "v1"
    errors, status = built / "src" / "errors.js", built / "src" / "status.js"
    script = f"""
        import {{ create }} from "@bufbuild/protobuf";
        import * as wire from "{wire}";
        import * as pb from "{gen / "inference_service_pb.js"}";
        import * as types from "{gen / "types_pb.js"}";
        import {{ errorFromStatus }} from "{status}";
        import {{ QuotaExceeded }} from "{errors}";
        const quota = {{ limitValue: 5n, alertAt: [50n] }};
        const price = {{ inputPicosPerToken: 7n }};
        const exceeded = wire.quotaStatus(create(types.QuotaStatusSchema, quota));
        for (const value of [
          wire.quotaStatus(create(types.QuotaStatusSchema, quota)),
          wire.admitted(create(pb.AdmittedFrameSchema, {{ quotas: [quota] }})),
          wire.model(create(pb.ModelSchema, {{ price, tierPrices: [price] }})),
          wire.quote(create(pb.QuoteResponseSchema, {{ quotas: [quota] }})),
          wire.embedResult("id", "m", create(pb.EmbedResponseSchema, {{ quotas: [quota] }})),
          new QuotaExceeded("no", {{ details: {{ quota: exceeded }} }}),
        ]) console.log(JSON.stringify(value));
    """

    lines = [json.loads(line) for line in evaluated(script)]

    assert (lines[0]["limitValue"], lines[0]["alertAt"]) == ("5", ["50"])
    assert lines[2]["price"]["inputPicosPerToken"] == "7"
    assert lines[5]["details"]["quota"]["limitValue"] == "5"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ('{address: "https://weir.example.com/v1"}', "has a path"),
        ('{address: "localhost:99999"}', "a port from 1 to 65535"),
        ('{address: ":8443"}', "must be host:port"),
        ("{timeoutMs: 0}", "timeoutMs: must be a number of milliseconds above 0"),
        ("{timeout: 5}", "did you mean timeoutMs?"),
    ],
)
def test_an_impossible_option_is_refused_by_name(built: Path, options: str, words: str) -> None:
    script = f"""
        import {{ WeirClient }} from "{built / "src" / "index.js"}";
        try {{ new WeirClient({{ apiKey: "key", ...{options} }}); }}
        catch (error) {{ console.log(`${{error.name}} ${{error.message}}`); }}
    """

    [line] = evaluated(script)

    assert line.startswith("InvalidRequest ")
    assert words in line


def test_an_unreachable_server_is_named_with_what_was_tried(built: Path) -> None:
    script = f"""
        import {{ WeirClient }} from "{built / "src" / "index.js"}";
        const client = new WeirClient({{ address: "127.0.0.1:1", apiKey: "key", maxRetries: 0 }});
        for (const call of [client.listModels(), client.complete("m", {{ prompt: "Hi" }})])
          await call.catch((error) => console.log(error.message));
        await client.close();
    """

    lines = evaluated(script)

    assert len(lines) == 2
    assert all("the server at 127.0.0.1:1 without TLS cannot be reached" in line for line in lines)


def test_several_addresses_share_calls_and_a_lost_one_is_replaced(
    built: Path, service: Service
) -> None:
    """Two proxies lead to one service, and a third accepts connections and says nothing."""
    tenant = asyncio.run(service.tenant())
    host, _, port = service.address.rpartition(":")
    script = f"""
        import {{ createServer, connect }} from "node:net";
        import {{ once }} from "node:events";
        import {{ WeirClient }} from "{built / "src" / "index.js"}";
        const proxies = await Promise.all([true, true, false].map(async (isOpen) => {{
          const proxy = {{ isOpen, count: 0, sockets: new Set() }};
          proxy.server = createServer((socket) => {{
            proxy.count += 1;
            proxy.sockets.add(socket);
            socket.on("error", () => {{}});
            if (!proxy.isOpen) return;
            const behind = connect({port}, "{host}");
            proxy.sockets.add(behind);
            behind.on("error", () => {{}});
            socket.pipe(behind).pipe(socket);
          }}).listen(0, "127.0.0.1");
          await once(proxy.server, "listening");
          proxy.address = `127.0.0.1:${{proxy.server.address().port}}`;
          return proxy;
        }}));
        const client = new WeirClient({{
          address: proxies.map((each) => each.address).reverse(), apiKey: "{tenant.secret}",
        }});
        await client.listModels();
        while (proxies.some(({{ count }}) => !count)) await client.listModels();
        let tokenCount = 0;
        const generation = client.generate("{MODEL}", {{
          tokenIds: {list(range(7, 17))}, maxOutputTokens: 400, ignoreEos: true,
        }});
        for await (const delta of generation) {{
          if (tokenCount === 0) {{
            proxies[0].isOpen = false;
            for (const each of proxies) for (const socket of each.sockets) socket.destroy();
          }}
          tokenCount += delta.tokenIds.length;
        }}
        console.log(tokenCount, (await client.listModels()).length > 0);
        await client.close();
        for (const each of proxies) {{
          each.server.close();
          for (const socket of each.sockets) socket.destroy();
        }}
        for (const address of ["https://a:1,http://b:1", "a:1,", ["a:1", "b/v1"], [1]])
          try {{ new WeirClient({{ address, apiKey: "key" }}); }}
          catch (error) {{ console.log(error.plainMessage); }}
    """

    tokens, mixed, empty, path, number = evaluated(script)

    assert tokens == "400 true"
    assert "the same scheme" in mixed
    assert "must be host:port" in empty
    assert "has a path" in path
    assert "a list of strings" in number
    assert sum(service.database.delivered(tenant).values()) == 400


def test_administrators_have_their_calls(built: Path, service: Service) -> None:
    """From an organization to its bill; every value becomes JSON, every error names its field."""
    admin = asyncio.run(service.tenant(scopes=("admin",)))
    script = f"""
        import {{ AdminClient, BillingClient, Money, WeirClient }} from "{built}/src/index.js";
        const options = {{ address: "{service.address}", apiKey: "{admin.secret}" }};
        const admin = new AdminClient(options);
        const billing = new BillingClient(options);
        const month = new Date().toISOString().slice(0, 7);
        await admin.createOrganization("tsshop");
        await admin.createOrganization("tsshop", {{ allowExisting: true }});
        await admin.createProject("tsshop", "web");
        const {{ apiKey, secret }} = await admin.createApiKey("tsshop", "web", "ada", {{
          lifetimeMs: 3_600_000, maxOutputTokens: 50,
        }});
        const quota = await admin.setQuota(
          "api-key", apiKey.prefix, "cost-per-month", Money.of("5.00", "USD").picos,
          {{ alertAt: [50] }},
        );
        const own = {{ ...options, apiKey: secret, labels: {{ app: "shop", kind: "all" }} }};
        const client = new WeirClient(own);
        const answer = await client.complete("{MODEL}", {{
          prompt: "Hi", maxOutputTokens: 5, labels: {{ kind: "one" }},
        }});
        const all = async (listed) => {{
          const found = [];
          for await (const each of listed) found.push(each);
          return found;
        }};
        const entries = [];
        for await (const entry of admin.listAuditEntries({{ pageSize: 2 }})) {{
          entries.push(entry);
          if (entries.length === 5) break;
        }}
        const pages = [];
        for await (const page of billing.getUsage(month, ["model"], {{ organization: "tsshop" }}))
          pages.push(page);
        const file = await billing.exportMonth(month, "focus_csv", {{ organization: "tsshop" }});
        const values = [
          quota, answer, entries, pages, await all(admin.listProjects("tsshop")),
          await all(admin.listQuotas("tsshop", {{ pageSize: 1 }})),
          await admin.listKeyQuotas(apiKey.prefix),
          await all(admin.listApiKeys("tsshop", {{ pageSize: 1 }})),
          await admin.listPrices(), await admin.listPlans(),
          await admin.listLiveRequests(), await admin.listReplicas(),
          await admin.getRequest(answer.requestId), await admin.exportConfiguration("tsshop"),
          await billing.getMonthReport("tsshop", month), await billing.listMonths("tsshop"),
          await billing.getForecast({{ organization: "tsshop" }}), file.fileName,
          await admin.getCreditBalance("tsshop"),
        ];
        for (const value of values) console.log(JSON.stringify(value));
        for (const call of [
          () => admin.setQuota("api-key", apiKey.prefix, "cost-per-year", 1),
          () => admin.setQuota("api-key", apiKey.prefix, "requests-per-minute", 1.5),
          () => admin.createProject("nobody", "web"),
          () => admin.listOrganizations({{ signal: AbortSignal.abort() }}).next(),
          () => billing.exportMonth(month, "focus_csv", {{ signal: AbortSignal.abort() }}),
        ]) await call().catch((error) => console.log(`${{error.name}}: ${{error.message}}`));
        await Promise.all([admin.close(), billing.close(), client.close()]);
    """

    lines = evaluated(script)
    values, errors = list(map(json.loads, lines[:-5])), lines[-5:]
    [event] = service.database.rows(
        "SELECT labels FROM usage_events WHERE request_id = %s", values[1]["requestId"]
    )

    assert values[0]["subject"] == "api-key"
    assert values[0]["limitValue"] == str(5 * 10**12)
    assert values[0]["dimension"] == "cost-per-month"
    assert len(values[2]) == 5
    assert len({each["entryId"] for each in values[2]}) == 5
    assert event["labels"] == {"app": "shop", "kind": "one"}
    assert errors[0].startswith("InvalidRequest: dimension: must be one of concurrent-requests, ")
    assert errors[1].startswith("InvalidRequest: limitValue: must be a whole number")
    assert errors[2].startswith("NotFound: ")
    assert errors[3] == errors[4] == "AbortError: This operation was aborted"


def test_both_clients_spell_the_values_of_enumerations_alike() -> None:
    source = (typescript_sdk.SDK / "src/generated_values.ts").read_text()
    listed = r"export (?:type|const) (\w+) =( \[|)\n((?: +\|? ?\"[\w-]+\"[,;]?\n)+)"
    spelled = {
        "QuotaDimension" if name == "QUOTA_DIMENSIONS" else name: re.findall(r'"([\w-]+)"', words)
        for name, _, words in re.findall(listed, source)
    }

    assert {"QuotaSubject", "TokenKind", "FinishReason", "QuotaDimension"} <= spelled.keys()
    for name, words in spelled.items():
        if not hasattr(generated_values, name):  # of calls that one client has
            continue
        assert words == [each.value for each in getattr(generated_values, name)], name


@pytest.fixture(scope="module")
def output(built: Path, service: Service, tight_process: Service) -> str:
    """Return the output of Node's tests, which have their own timeouts."""
    tenant = asyncio.run(service.tenant())
    limited = asyncio.run(service.tenant({QuotaDimension.TOKENS_PER_MONTH: 40}))
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("WEIR_")
    }
    environment |= {
        "WEIR_ADDRESS": service.address,
        "WEIR_API_KEY": tenant.secret,
        "WEIR_TEST_LIMITED_KEY": limited.secret,
        "WEIR_TEST_TIGHT_ADDRESS": alive(tight_process).address,
        "WEIR_TEST_MODEL": MODEL,
        "WEIR_TEST_ENCODER": ENCODER,
        "WEIR_TEST_TOOL_MODEL": TOOL_MODEL,
    }
    tests = sorted(map(str, (built / "tests").glob("*.test.js")))
    command = ["node", "--test", "--test-reporter=tap", *tests]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=RUN_MAX_S
        )
    except subprocess.TimeoutExpired as late:
        message = late.output.decode() if isinstance(late.output, bytes) else late.output
        pytest.fail(f"Node was not done after {RUN_MAX_S} s:\n{message}", pytrace=False)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def report(output: str) -> dict[str, str]:
    """Return by test "ok", or the reason of its failure."""
    found = re.findall(
        r"^(?:    )*(ok|not ok) \d+ - (.+?)\n(.*?)(?=^(?:    )*(?:ok|not ok|#|1\.\.))",
        output,
        re.M | re.S,
    )
    return {name: "ok" if verdict == "ok" else message for verdict, name, message in found}


@pytest.mark.parametrize("promise", PROMISES)
def test_the_typescript_client_keeps(promise: str, report: dict[str, str]) -> None:
    message = report.get(promise, "no such test in sdk/typescript/tests")
    if message != "ok":
        pytest.fail(message, pytrace=False)


def test_every_test_of_the_typescript_client_is_a_promise(report: dict[str, str]) -> None:
    assert {name for name in report if not Path(name).suffix} == set(PROMISES)


def test_the_typescript_client_does_not_keep_its_program_alive(output: str) -> None:
    assert "STILL ALIVE" not in output
