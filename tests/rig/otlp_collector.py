"""An OpenTelemetry collector for tests: takes spans over real connections, by gRPC and by HTTP, and keeps them.

Both are what exporters speak to in production: the OTLP service of opentelemetry-proto on a free port of the loopback.
"""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


@dataclass(frozen=True, kw_only=True)
class ReceivedSpan:
    """One span as it came. Ids in hexadecimal digits, empty where there is none; times in Unix nanoseconds."""

    trace_id: str
    span_id: str
    parent_span_id: str
    name: str
    start_ns: int
    end_ns: int
    status: int
    attributes: dict[str, Any]
    service_instance: str | None
    resource: dict[str, Any]

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class _Collector:
    """`spans`: everything that has arrived, in that order."""

    protocol: ClassVar[str]
    """For OTEL_EXPORTER_OTLP_TRACES_PROTOCOL."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []

    @property
    def endpoint(self) -> str:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def take(self, request: Any) -> None:
        for of_resource in request.resource_spans:
            resource = _values(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                for span in of_scope.spans:
                    self.spans.append(
                        ReceivedSpan(
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_span_id=span.parent_span_id.hex(),
                            name=span.name,
                            start_ns=span.start_time_unix_nano,
                            end_ns=span.end_time_unix_nano,
                            status=span.status.code,
                            attributes=_values(span.attributes),
                            service_instance=resource.get("service.instance.id"),
                            resource=resource,
                        )
                    )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GrpcCollector(_Collector):
    protocol = "grpc"

    def __init__(self) -> None:
        super().__init__()
        collector = self

        class Service(service_grpc.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
                collector.take(request)
                return service.ExportTraceServiceResponse()

        self._server = grpc.server(ThreadPoolExecutor(2))
        service_grpc.add_TraceServiceServicer_to_server(Service(), self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def close(self) -> None:
        self._server.stop(grace=None).wait()


class HttpCollector(_Collector):
    protocol = "http/protobuf"

    def __init__(self) -> None:
        super().__init__()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(service.ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def refused_endpoint() -> str:
    """Where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    return f"http://127.0.0.1:{port}/v1/traces"


def _values(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
