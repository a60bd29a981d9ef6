"""Where signals go, by keyword and environment."""

from __future__ import annotations

import pytest

from inferscope.export.otlp.target import delta_preferred, parse_headers, resolve

BASE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


@pytest.mark.parametrize(
    ("environ", "keywords", "protocol", "endpoint"),
    [
        (BASE, {}, "http/protobuf", "http://collector:4318/v1/metrics"),
        ({**BASE, "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://m:1/own/path"}, {}, "http/protobuf", "http://m:1/own/path"),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://m:1"}, {}, "http/protobuf", "http://m:1/"),
        (BASE, {"endpoint": "https://mine/prefix/"}, "http/protobuf", "https://mine/prefix/v1/metrics"),
        (BASE, {"endpoint": "http://mine:9/v1/metrics"}, "http/protobuf", "http://mine:9/v1/metrics"),
        ({}, {"endpoint": "localhost:4318"}, "http/protobuf", "http://localhost:4318/v1/metrics"),
        ({}, {"endpoint": "http://collector:4317"}, "grpc", "collector:4317"),
        ({}, {"endpoint": "collector:4317"}, "grpc", "collector:4317"),
        ({}, {"endpoint": "unix:///run/otel.sock", "protocol": "grpc"}, "grpc", "unix:///run/otel.sock"),
        ({**BASE, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, {}, "grpc", "collector:4318"),
        (
            {**BASE, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf"},
            {},
            "http/protobuf",
            "http://collector:4318/v1/metrics",
        ),
        (
            {**BASE, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            {"protocol": "http/protobuf"},
            "http/protobuf",
            "http://collector:4318/v1/metrics",
        ),
        ({}, {"endpoint": "http://h:99999"}, "http/protobuf", "http://h:99999/v1/metrics"),
    ],
)
def test_endpoint_and_protocol(environ, keywords, protocol, endpoint):
    target = resolve("metrics", environ=environ, **keywords)
    assert (target.protocol, target.endpoint) == (protocol, endpoint)


@pytest.mark.parametrize(
    ("environ", "keywords"),
    [
        ({}, {}),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "  "}, {}),
        ({**BASE, "OTEL_SDK_DISABLED": "true"}, {}),
        ({"OTEL_SDK_DISABLED": "TRUE"}, {"endpoint": "http://mine"}),
        ({**BASE, "OTEL_METRICS_EXPORTER": "none"}, {}),
    ],
)
def test_no_endpoint_no_target(environ, keywords):
    assert resolve("metrics", environ=environ, **keywords) is None


def test_other_protocols_fall_back_with_one_line(lines):
    for _ in range(2):
        assert resolve("logs", environ={**BASE, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}).protocol == "http/protobuf"
    assert len(lines()) == 1
    assert "http/json" in lines()[0]


@pytest.mark.parametrize(
    ("given", "seconds", "said"),
    [("", 2, 0), ("1", 1, 0), ("0.5", 0.5, 0), ("10", 2, 0), ("10000", 2, 1), ("1500", 1.5, 1), ("soon", 2, 1), ("0", 2, 0)],
)
def test_timeout_is_bounded_and_the_unit_is_understood(given, seconds, said, lines):
    for _ in range(2):
        assert resolve("metrics", environ={**BASE, "OTEL_EXPORTER_OTLP_TIMEOUT": given}).timeout_s == seconds
    assert len(lines()) == said


def test_headers_merge_and_credentials_stay_out_of_sight():
    environ = {**BASE, "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20s3cret, X-Team = inference"}
    target = resolve("metrics", environ=environ, headers={"X-Team": "ours"})
    assert target.headers == {"authorization": "Bearer s3cret", "x-team": "ours"}
    assert "s3cret" not in repr(target)
    assert resolve("metrics", environ={**environ, "OTEL_EXPORTER_OTLP_METRICS_HEADERS": "a=1"}).headers == {"a": "1"}


def test_headers_that_would_inject_are_left_out(lines):
    assert parse_headers("a=1%0d%0aevil: 2,b=2,broken,=3") == {"b": "2"}
    assert len(lines()) == 1
    assert "evil" not in lines()[0]


def test_compression_security_and_certificates(lines):
    assert resolve("metrics", environ=BASE).compression == "gzip"
    assert resolve("metrics", environ={**BASE, "OTEL_EXPORTER_OTLP_COMPRESSION": "none"}).compression == "none"
    assert resolve("metrics", environ={**BASE, "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION": "zstd"}).compression == "none"
    assert len(lines()) == 1
    assert resolve("metrics", environ=BASE).insecure
    assert not resolve("metrics", endpoint="https://c:4317", environ={}).insecure
    assert not resolve("metrics", endpoint="c:4317", environ={}).insecure
    assert resolve("metrics", endpoint="c:4317", environ={"OTEL_EXPORTER_OTLP_INSECURE": "true"}).insecure
    secured = resolve(
        "metrics", environ={**BASE, "OTEL_EXPORTER_OTLP_CERTIFICATE": "ca.pem", "OTEL_EXPORTER_OTLP_METRICS_CLIENT_KEY": "k.pem"}
    )
    assert (secured.certificate, secured.client_key, secured.client_certificate) == ("ca.pem", "k.pem", None)


@pytest.mark.parametrize(("value", "delta"), [("", False), ("cumulative", False), ("Delta", True), ("lowmemory", True)])
def test_temporality_preference(value, delta):
    assert delta_preferred({"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": value}) is delta
