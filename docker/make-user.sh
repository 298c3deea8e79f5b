#!/bin/sh
# The user that serves, not named vllm as vLLM's own image has one, and the folders it may write. Group 0 may write them too, so that the image
# also runs under any other user number.
set -eu
useradd --uid 10001 --gid 0 --no-create-home --home-dir /scratch --shell /usr/sbin/nologin kvcompress
install --directory --owner=10001 --group=0 --mode=0775 /models /scratch
