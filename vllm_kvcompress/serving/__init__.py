"""Start a server, send it requests over HTTP, and read its metrics, as a client would."""
