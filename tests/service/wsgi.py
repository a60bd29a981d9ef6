"""The tiny service for a preloading WSGI server."""

from __future__ import annotations

import json

import inferscope as scope

scope.configure(service="preload", slo=scope.SLO("score", p99_ms=40), tick_s=0.1, export_interval_s=0.3)


def app(environ, start_response):
    if environ["PATH_INFO"] == "/status":
        body = json.dumps(scope.status(), default=str).encode()
    else:
        with scope.request("score"):
            body = b"ok"
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
    return [body]
