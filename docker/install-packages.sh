#!/bin/sh
# Install the system packages of both images: the compiler for torch.compile, NUMA, and an init.
#   docker/install-packages.sh [MORE...]
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet --quiet
apt-get install --yes --quiet --quiet --no-install-recommends g++ libnuma1 tini "$@"
