"""HTTP servers on loopback whose responses a test controls."""

import http.server
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

Response = tuple[int, str] | tuple[int, str, Mapping[str, str]]
Respond = Callable[[str, bytes], Response]
"""Returns status, text and perhaps headers for a path and a body."""


@contextmanager
def server(respond: Respond) -> Iterator[str]:
    """Run an HTTP server on a free loopback port and yield its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            status, text, *headers = respond(self.path, self.rfile.read(length))
            self.send_response(status)
            for name, value in dict(*headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            """Log nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


def recording(requests: list[str], respond: Respond) -> Respond:
    """Return `respond`, which now also adds the path of each request to `requests`."""

    def recorded(path: str, body: bytes) -> Response:
        requests.append(path)
        return respond(path, body)

    return recorded


def redirecting(target: str, status: int = 307) -> Respond:
    """Return the responses of a server that redirects every request to `target` and its path."""
    return lambda path, _: (status, "", {"Location": f"{target}{path}"})


def exported(
    planned: Mapping[str, int],
    compressed: Mapping[str, int],
    *,
    freed: int = 0,
    running: int = 0,
    usage: float = 0.0,
) -> str:
    """Return a metrics page, without the plugin's metrics if `planned` and `compressed` are empty.

    Args:
        planned, compressed: planned and compressed prompts of each engine.
        freed: freed blocks.
        running: running requests.
        usage: used share of the KV cache.
    """
    lines = [
        "# HELP vllm:num_requests_running Number of requests.",
        f'vllm:num_requests_running{{engine="0",model_name="m"}} {running}.0',
        f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {usage}',
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1001"} 1.0',
    ]
    if planned or compressed:
        lines += [
            'vllm:kv_compress_info{budget="0.2",engine="0",method="cake",min_prompt="1024",'
            'model_name="a \\"b\\" } c",window="32"} 1.0',
            f'vllm:kv_compress_freed_blocks_total{{engine="0"}} {freed}.0',
        ]
        lines += [f'vllm:kv_compress_layer_tokens_total{{layer="{n}"}} 0.0' for n in range(4)]
    for name, counts in (("planned_requests", planned), ("requests", compressed)):
        for engine, count in counts.items():
            for method, part in (("cake", count), ("snapkv", 0)):
                labels = f'engine="{engine}",method="{method}"'
                lines.append(f"vllm:kv_compress_{name}_total{{{labels}}} {part}.0")
    return "\n".join(lines) + "\n"
