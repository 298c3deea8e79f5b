"""A server started, asked and measured over HTTP, as a client would."""
