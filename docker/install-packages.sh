#!/bin/sh
# The system packages that both images run with: the compiler of torch.compile, NUMA, an init.
#   docker/install-packages.sh [MORE...]
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet --quiet
apt-get install --yes --quiet --quiet --no-install-recommends g++ libnuma1 tini "$@"
