"""Address, API key, TLS and streams of a server (`serving.exposition.Host`)."""

import datetime
import http.server
import json
import socket
import ssl
import threading
from ipaddress import IPv4Address

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from loopback import recording, redirecting, server
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.serving import exposition
from vllm_kvcompress.serving.exposition import (
    Host,
    Metrics,
    Refused,
    Unreachable,
    error_message,
    printable,
)

INVALID_ADDRESSES = [
    "", "127.0.0.1:8000", "ftp://host", "http://", "http://:8000", "http://host:port",
    "http://host:70000", "http://host:0", "http://[::1", "http://host/v1", "http://a b",
    "http://host\n", "http://host?x", "http://host#x",
]  # fmt: skip


@pytest.mark.parametrize("url", INVALID_ADDRESSES)
def test_an_invalid_address_is_refused(url):
    with pytest.raises(ConfigError, match="--url must be a server's address without a path"):
        Host(url)


@pytest.mark.parametrize("url", ["http://host", "https://[::1]:8000/", "http://a-b.c:1"])
def test_a_valid_address_is_accepted(url):
    assert Host(url).url == url


def test_an_invalid_host_name_is_unreachable():
    with pytest.raises(Unreachable, match="does not answer"):
        Host("http://a..b").get("/health", 1.0)


@pytest.mark.parametrize("key", ["guess\n", "gu ess", " guess", "gu\u00e9ss", "guess\r\nX-A: 1"])
def test_an_invalid_api_key_is_refused_without_quoting_it(key):
    with pytest.raises(ConfigError, match="--api-key must be ASCII without spaces") as exc_info:
        Host("http://host", key)
    assert "ess" not in str(exc_info.value)


@pytest.mark.parametrize("text", ["", "data: {}\n\n", "data: {}\n\ndata: [DO"])
def test_a_stream_without_done_is_an_error(text):
    with (
        server(lambda *_: (200, text)) as url,
        pytest.raises(Unreachable, match="closed the connection before"),
    ):
        list(Host(url).stream("/", {}, 10.0))


def test_a_stream_yields_its_events():
    text = 'data: {"a": 1}\n\ndata: {"a": 2}\n\ndata: [DONE]'
    with server(lambda *_: (200, text)) as url:
        assert list(Host(url).stream("/", {}, 10.0)) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"error": {"message": "no\\n\\nsuch \\ud83d model"}}', "no such ? model"),
        ('{"error": "no"}', '{"error": "no"}'),
        ("[" * 100_000, "[" * 300),
        ('{"error": {"message": "\\u001b]0;t\\u0007 \\u009b31m \\u202e"}}', "?]0;t? ?31m ?"),
        ('{"error": {"message": "%s"}}' % ("x" * 10_000), "x" * 1997 + "..."),
        ("", ""),
    ],
)
def test_error_messages_are_one_short_line(text, message):
    assert error_message(text) == message


SENDERS = {
    "get": lambda host: host.get("/page", 10.0),
    "post": lambda host: host.post("/page", {}, 10.0),
    "stream": lambda host: list(host.stream("/page", {"max_tokens": 10}, 10.0)),
}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("method", SENDERS)
def test_a_redirect_is_refused_and_nothing_goes_to_its_target(status, method):
    requests = []
    with (
        server(recording(requests, lambda *_: (200, "data: [DONE]"))) as target,
        server(redirecting(target, status)) as url,
        pytest.raises(Refused, match=f"/page answered {status}: it redirects to") as exc_info,
    ):
        SENDERS[method](Host(url, "key", "--against"))
    assert requests == []
    assert f"'{target}/page'" in str(exc_info.value)
    assert "set --against to the final address" in str(exc_info.value)


def test_the_target_of_a_redirect_is_cut_and_quoted():
    target = "http://other/\x1b[31m" + "x" * 500
    with server(redirecting(target)) as url, pytest.raises(Refused) as exc_info:
        Host(url).get("/", 10.0)
    assert str(exc_info.value).isprintable()
    assert f"'http://other/?[31m{'x' * 99}...'" in str(exc_info.value)


@pytest.mark.parametrize("method", SENDERS)
@pytest.mark.parametrize("headers", [{}, {"Content-Length": "5000"}])
def test_a_response_that_is_too_long_is_an_error(monkeypatch, method, headers):
    monkeypatch.setattr(exposition, "_MAX_BYTES", 3000)
    monkeypatch.setattr(exposition, "_MAX_BYTES_PER_TOKEN", 100)
    text = {"get": "x" * 5000, "post": "x" * 5000, "stream": "data: {}\n" * 500}[method]
    with (
        server(lambda *_: (200, text.ljust(5000), headers)) as url,
        pytest.raises(Unreachable, match="sent more than 0 MiB, the most that this request may"),
    ):
        SENDERS[method](Host(url))


def test_a_line_without_an_end_is_too_long(monkeypatch):
    monkeypatch.setattr(exposition, "_MAX_BYTES", 3000)
    with (
        server(lambda *_: (200, "x" * 5000)) as url,
        pytest.raises(Unreachable, match="sent more than"),
    ):
        list(Host(url).stream("/", {}, 10.0))


def test_a_stream_may_be_longer_by_each_requested_token(monkeypatch):
    monkeypatch.setattr(exposition, "_MAX_BYTES", 3000)
    monkeypatch.setattr(exposition, "_MAX_BYTES_PER_TOKEN", 100)
    with server(lambda *_: (200, "data: {}\n" * 500 + "data: [DONE]\n")) as url:
        assert len(list(Host(url).stream("/", {"max_tokens": 100}, 10.0))) == 500


def test_a_response_that_ends_early_is_an_error():
    with (
        server(lambda *_: (200, "four", {"Content-Length": "9"})) as url,
        pytest.raises(Unreachable, match=r"was complete \(IncompleteRead\(4 bytes read, 5"),
    ):
        Host(url).get("/", 10.0)


def test_control_characters_of_a_broken_status_line_are_not_printed():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            connection, _ = listening.accept()
            connection.recv(1000)
            connection.sendall(b"\x1b]0;title\x07 200\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(Unreachable, match="title") as exc_info:
            Host(f"http://127.0.0.1:{listening.getsockname()[1]}").get("/", 10.0)
        thread.join()
    assert str(exc_info.value).isprintable()


def test_labels_of_metrics_have_no_control_characters():
    (sample,) = Metrics('m{a="\x1b[2J\\n\u202eb"} 1\n').of("m")
    assert sample.labels == {"a": "?[2J??b"}


@pytest.mark.parametrize("name", ["\x1b[2J", "a\u202eb", "x" * 2000])
def test_a_model_name_that_cannot_be_printed_is_refused(name):
    models = json.dumps({"data": [{"id": name}]})
    with (
        server(lambda *_: (200, models)) as url,
        pytest.raises(Unreachable, match="must list a model name of at most 1,000 printable") as e,
    ):
        Host(url).first_model(10.0)
    assert str(e.value).isprintable()
    assert len(str(e.value)) < 300
    assert e.value.args[0].endswith("start the server with another --served-model-name")


@given(st.text())
def test_printable_texts_are_short_lines_and_stay_as_they_are(text):
    line = printable(text, 20)
    assert line.isprintable()
    assert len(line) <= 20
    assert printable(line, 20) == line


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Return a file with a private key and a self-signed certificate for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    pem = serialization.Encoding.PEM
    pkcs8 = serialization.PrivateFormat.PKCS8
    private = key.private_bytes(pem, pkcs8, serialization.NoEncryption())
    path.write_bytes(private + signed.public_bytes(pem))
    return path


@pytest.fixture
def encrypted(certificate):
    """Yield the URL of a server that uses the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as running:
        running.socket = context.wrap_socket(running.socket, server_side=True)
        running.handle_error = lambda *_: None
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"https://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


def test_an_untrusted_certificate_is_an_error_with_a_fix(encrypted):
    untrusted = r"certificate that is not trusted here .*self"
    with pytest.raises(Unreachable, match=untrusted) as exc_info:
        Host(encrypted).get("/none", 10.0)
    assert "name the file of its authority in SSL_CERT_FILE" in str(exc_info.value)


def test_ssl_cert_file_makes_a_certificate_trusted(encrypted, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert Host(encrypted).get("/none", 10.0)[0] == 404
