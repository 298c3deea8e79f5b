#!/bin/sh
# The Debian packages that the CPU image runs with: the compiler of torch.compile, NUMA, an init.
#   docker/install-packages.sh [MORE...]
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet --quiet
apt-get install --yes --quiet --quiet --no-install-recommends g++ libnuma1 tini "$@"
