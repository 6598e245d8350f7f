"""OpenTelemetry: what a collector receives about exchanges, and the trace that is propagated to the provider."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.metered import Metered
from tests.support.served import SECONDS, Served, config_file, environment
from tests.support.stores import empty_store
from tests.support.waiting import until

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Receives OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.metrics: dict[tuple[str, str, tuple[tuple[str, Any], ...]], Any] = {}
        """The newest value of each metric, by name, process and attributes."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(self.path, body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                assert told(resource.resource.attributes)["service.name"] == "palimpsest"
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
            return
        assert path == "/v1/metrics"
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            process = told(resource.resource.attributes)["service.instance.id"]
            for metric in [metric for scope in resource.scope_metrics for metric in scope.metrics]:
                for point in metric.histogram.data_points:
                    self.metrics[metric.name, process, tuple(sorted(told(point.attributes).items()))] = point

    def total(self, name: str, **labels: str) -> tuple[int, float]:
        """Return count and sum of a metric over all processes."""
        wanted = {f"gen_ai.{key.replace('_', '.')}": value for key, value in labels.items()}
        found = [
            point
            for (metric, _, having), point in self.metrics.items()
            if metric == name and wanted.items() <= dict(having).items()
        ]
        return sum(point.count for point in found), sum(point.sum for point in found)


def told(attributes: Any) -> dict[str, Any]:
    """Return attributes as plain values."""
    found: dict[str, Any] = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def post(base: str, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(f"{base}{path}", json=body, headers=headers, trust_env=False, timeout=SECONDS)


def test_four_workers_send_spans_and_metrics_and_pass_the_trace_on(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    said = [{"role": "user", "content": "Where is the parcel? " * 900}]
    with Metered() as provider:
        sections: dict[str, Any] = {"telemetry": {"otlp_endpoint": collector.url}}
        sections["upstream"] = {"anthropic_base_url": provider.base_url}
        config = config_file(tmp_path, provider, empty_store(tmp_path / "palimpsest.db"), **sections)
        with Served(config, "--workers", "4").wait() as served:
            parent = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
            for number in range(8):
                body = {"model": "m", "messages": said, "stream": number % 2 == 1}
                answer = post(served.url, "/v1/chat/completions", body, **parent, **{"x-session-id": f"s{number}"})
                assert answer.status_code == 200
            for path, field in (("/v1/responses", "input"), ("/v1/messages", "messages")):
                body = (
                    {"model": "m", field: said, "max_tokens": 9} if field == "messages" else {"model": "m", field: said}
                )
                assert post(served.url, path, body, **parent).status_code == 200
            provider.refuses = b"something else"
            assert post(served.url, "/v1/chat/completions", {"model": "m", "messages": said}).status_code == 400
            assert post(served.url, "/v1/chat/completions", {"model": "m"}).status_code == 400  # it is never sent
            until(lambda: len(collector.spans) == 12, "all spans are sent")
            assert served.stop() == 0
        bills = [provider.bills[name] for name in ("chat", "responses", "messages")]
        sent = [headers["traceparent"].split("-") for headers in provider.headers]
        assert {headers.get("tracestate") for headers in provider.headers[:10]} == {"vendor=1"}
    spans = {span.span_id.hex(): told(span.attributes) | {"span": span} for span in collector.spans}
    for _, trace, span, flags in sent:  # the provider's spans are children of ours, and ours of the client's
        assert spans[span]["span"].trace_id.hex() == trace
        assert int(flags, 16) & 1  # it is sampled
    traced = [each for each in spans.values() if each["span"].trace_id.hex() == TRACE]
    assert len(traced) == 10
    for each in traced:
        assert each["span"].parent_span_id.hex() == SPAN
        assert each["span"].name == "chat m"
        assert each["gen_ai.operation.name"] == "chat"
        assert each["gen_ai.usage.input_tokens"] > each["gen_ai.usage.cache_read.input_tokens"] > 2000
        assert each["palimpsest.kind"] == "first"
        assert "error.type" not in each
    assert Counter(each["gen_ai.provider.name"] for each in traced) == {"openai": 9, "anthropic": 1}
    assert sum("gen_ai.response.time_to_first_chunk" in each for each in traced) == 4
    failed = sorted(each["error.type"] for each in spans.values() if each["span"].trace_id.hex() != TRACE)
    assert len(failed) == 2
    assert failed[0] == "400"
    assert collector.total("gen_ai.client.operation.duration")[0] == 11
    assert collector.total("gen_ai.client.operation.time_to_first_chunk")[0] == 4
    for name, tokens in (
        ("input", sum(bill.input for bill in bills)),
        ("output", sum(bill.output for bill in bills)),
        ("cache_read", sum(bill.cached for bill in bills)),
        ("cache_creation", sum(bill.written for bill in bills)),
    ):
        assert collector.total("gen_ai.client.token.usage", token_type=name) == (10, tokens)


def test_nobody_waits_for_a_collector_that_is_not_there(tmp_path: Path) -> None:
    with Metered() as provider:
        sections: dict[str, Any] = {"telemetry": {"otlp_endpoint": "http://127.0.0.1:9"}}
        config = config_file(tmp_path, provider, empty_store(tmp_path / "palimpsest.db"), **sections)
        with Served(config).wait() as served:
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            assert post(served.url, "/v1/chat/completions", body).status_code == 200
            assert served.stop() == 0


def test_a_trace_passes_untouched_and_nothing_is_imported_where_it_is_off(tmp_path: Path) -> None:
    header = f"00-{TRACE}-{SPAN}-01"
    with Metered() as provider:
        config = config_file(tmp_path, provider, empty_store(tmp_path / "palimpsest.db"))
        with Served(config).wait() as served:
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            assert post(served.url, "/v1/chat/completions", body, traceparent=header).status_code == 200
        assert provider.headers[0]["traceparent"] == header
    # FastAPI itself may import the OpenTelemetry API, but nothing may import its SDK.
    code = "import sys, proxy.cli.serving; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0  # noqa: S603 - our own


def test_without_the_extra_the_start_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['opentelemetry.sdk'] = None")
    with Metered() as provider:
        sections: dict[str, Any] = {"telemetry": {"otlp_endpoint": "http://127.0.0.1:9"}}
        config = config_file(tmp_path, provider, empty_store(tmp_path / "palimpsest.db"), **sections)
        command = [sys.executable, "-m", "proxy", "serve", "--config", str(config)]
        env = environment()
        env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
        ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=SECONDS)  # noqa: S603 - our own
    assert ended.returncode != 0
    assert "pip install 'palimpsest[otel]'" in ended.stderr
