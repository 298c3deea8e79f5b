"""Address, API key, TLS and streams of a server (`serving.exposition.Host`)."""

import datetime
import http.server
import ssl
import threading
from ipaddress import IPv4Address

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from loopback import server
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.serving.exposition import Host, Unreachable, error_message


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "ftp://host",
        "http://",
        "http://:8000",
        "http://host:port",
        "http://host:70000",
        "http://host:0",
        "http://[::1",
        "http://host/v1",
        "http://a b",
        "http://host\n",
        "http://host?x",
        "http://host#x",
    ],
)
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
        ("", ""),
    ],
)
def test_error_messages_are_one_short_line(text, message):
    assert error_message(text) == message


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
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
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
    with pytest.raises(
        Unreachable, match=r"certificate that is not trusted here .*self"
    ) as exc_info:
        Host(encrypted).get("/none", 10.0)
    assert "name the file of its authority in SSL_CERT_FILE" in str(exc_info.value)


def test_ssl_cert_file_makes_a_certificate_trusted(encrypted, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert Host(encrypted).get("/none", 10.0)[0] == 404
