"""A daemon answers what schemathesis makes of its OpenAPI document as the document says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from serve.conftest import Daemon, started

BundleFactory = Callable[[str], Path]

pytestmark = pytest.mark.slow

MODEL = "demo.null"
CASES = 300  # of each test that draws them
DRAWN = settings(
    max_examples=CASES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def null_daemon(demo_bundle: BundleFactory) -> Iterator[Daemon]:
    with started(demo_bundle(MODEL)) as daemon:
        yield daemon


class Api:
    """Sends cases to a daemon, checks its answers and counts them by status."""

    def __init__(self, daemon: Daemon, session: requests.Session) -> None:
        self.answers: Counter[int] = Counter()
        self._daemon, self._session = daemon, session

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = self._session.get(f"{self._daemon.url}/openapi.json").json()
        return found

    def schema(self, document: dict[str, Any], *accepted: str) -> Any:
        """`accepted` are the statuses that a valid request may get."""
        checks = {
            "positive_data_acceptance": {"expected-statuses": list(accepted)},
            "negative_data_rejection": {"expected-statuses": ["400", "404", "405", "422"]},
        }
        config = schemathesis.Config.from_dict({"checks": checks, "max-stream-events": 10_000})
        schema = schemathesis.openapi.from_dict(document, config=config)
        schema.config.update(base_url=self._daemon.url)
        return schema

    def send(self, case: schemathesis.Case) -> None:
        answer = case.call_and_validate(session=self._session, additional_checks=[streams_end])
        self.answers[answer.status_code] += 1


@pytest.fixture
def api(null_daemon: Daemon) -> Iterator[Api]:
    with requests.Session() as session:
        yield Api(null_daemon, session)


def streams_end(_context: Any, response: Any, _case: schemathesis.Case) -> None:
    if "text/event-stream" in response.headers.get("content-type", [""])[0]:
        assert response.content.count(b"data: [DONE]") == 1
        assert response.content.endswith(b"\n\ndata: [DONE]\n\n")


def whole(value: Any) -> Any:
    """As JSON's writers have it: to JSON Schema 2.0 is a whole number too, msgspec takes none."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def completions(schema: Any) -> Any:
    return schema["/v1/completions"]["POST"]


def draw(api: Api, schema: Any, mode: GenerationMode) -> None:
    if mode is GenerationMode.POSITIVE:
        schema.hook("map_body")(lambda _context, body: whole(body))

    @DRAWN
    @given(case=completions(schema).as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        api.send(case)

    check()
    assert sum(api.answers.values()) >= CASES


def servable(document: dict[str, Any]) -> dict[str, Any]:
    """The document narrowed to what this engine can serve: what fits it gets an answer."""
    narrow: dict[str, Any] = json.loads(json.dumps(document))
    fields = narrow["components"]["schemas"]["CompletionRequest"]["properties"]
    text = {"type": "string", "minLength": 1, "maxLength": 64}
    token = {"type": "integer", "minimum": 0, "maximum": 3071}
    tokens = {"type": "array", "items": token, "minItems": 1, "maxItems": 200}
    several = [{"type": "array", "items": x, "minItems": 1, "maxItems": 8} for x in (text, tokens)]
    fields["prompt"]["anyOf"] = [text, tokens, *several]
    fields["model"] = {"enum": [None, MODEL]}
    fields["max_tokens"] = {"type": "integer", "minimum": 1, "maximum": 100}
    fields["min_tokens"] = {"enum": [None, 0, 1]}
    fields["n"] = {"enum": [None, 1, 2, 3]}
    fields["echo"] = {"enum": [None, False]}  # for there may be logprobs
    fields["best_of"] = fields["suffix"] = {"enum": [None]}
    fields["stop_token_ids"] = {"type": "array", "items": token}
    fields["logit_bias"]["anyOf"][0]["propertyNames"] = {"pattern": "^(0|[1-9][0-9]{0,2})$"}
    return narrow


def test_what_can_be_served_is(api: Api) -> None:
    draw(api, api.schema(servable(api.document()), "200"), GenerationMode.POSITIVE)
    assert set(api.answers) == {200}


def test_what_fits_the_types_is_answered_or_refused(api: Api) -> None:
    draw(api, api.schema(api.document(), "200", "400", "404"), GenerationMode.POSITIVE)
    assert {200, 400} <= set(api.answers) <= {200, 400, 404}


def test_what_does_not_fit_is_refused(api: Api) -> None:
    draw(api, api.schema(api.document()), GenerationMode.NEGATIVE)
    assert 422 in api.answers


def test_bounds_and_methods_of_every_operation(api: Api) -> None:
    schema = api.schema(api.document(), "200", "400", "404")
    operations = [result.ok() for result in schema.get_all_operations()]
    for operation in operations:
        before = sum(api.answers.values())
        for case in schema.iter_coverage_cases(
            operation,
            generation_modes=list(GenerationMode),
            generation_config=schema.config.generation,
        ):
            api.send(case)
        assert sum(api.answers.values()) > before, operation.label
    assert sum(api.answers.values()) >= 100
    assert {200, 400, 405, 422} <= set(api.answers)
