#!/bin/sh
# Create the user that runs the server, and the folders it can write. vLLM's image already has a user
# `vllm`, so the name differs. Group 0 can write the folders, so the image also runs with any other uid.
set -eu
useradd --uid 10001 --gid 0 --no-create-home --home-dir /scratch --shell /usr/sbin/nologin kvcompress
install --directory --owner=10001 --group=0 --mode=0775 /models /scratch
