"""Run an image without a container engine: a root folder, entered in new namespaces.

The machine's /usr and Python replace the base image. Everything else is as in the image: the output
of the build steps, a read-only root file system, an unprivileged user, its own /tmp and its own
process 1. Needs root, or another user that can mount.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import cache_from_source
from pathlib import Path

_ENTER = r"""
set -eu
root=$1 state=$2 user=$3; shift 3
mount --bind "$root" "$root"
while [ "$1" != -- ]; do  # read-only folders of the machine: SOURCE TARGET
    mkdir -p "$root$2"
    mount --bind "$1" "$root$2"
    mount -o remount,bind,ro "$root$2"
    shift 2
done
shift
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
if [ "$state" = start ]; then
    mount --bind "$root/scratch" "$root/scratch"
    mount -o remount,bind,ro "$root"
fi
set -- --reuid "${user%:*}" --regid "${user#*:}" --clear-groups -- "$@"
if [ "$state" = start ]; then
    set -- --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
fi
exec /usr/sbin/chroot "$root" /usr/bin/setpriv "$@"
"""


class ImageRoot:
    """A root folder: `build` runs build steps in it, `start` starts processes of the image."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("dev", "proc", "sys", "tmp", "usr", "opt", "run", "scratch", "models", "src"):
            (path / name).mkdir(parents=True)
        path.chmod(0o755)
        for name in ("bin", "lib", "lib64", "sbin"):
            (path / name).symlink_to(f"usr/{name}")
        # A copy, because a build step adds a user.
        subprocess.run(["cp", "-a", "/etc", str(path / "etc")], check=True)

    def link_packages(self, lock: Path, prefix: str) -> None:
        """Link the packages of `lock` from the test environment into the environment `prefix`.

        Unpacking the same files would take pip a minute, and deleting them another. `make setup`
        has installed them from the same lock with the same options. pip finds them installed, and
        installs packages itself whose version differs from the lock.
        """
        for name, version in re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(), re.MULTILINE):
            for package in metadata.distributions(name=name):
                for file in package.files or () if package.version == version else ():
                    source = Path(os.path.normpath(file.locate()))
                    self._link(source, prefix)
                    if source.suffix == ".py":
                        self._link(Path(cache_from_source(str(source))), prefix)

    def _link(self, source: Path, prefix: str) -> None:
        target = Path(f"{self.path}{prefix}", source.relative_to(sys.prefix))
        if target.exists() or not source.exists():  # two packages have it, or it is not compiled
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(source, target)
        if target.parent.name == "bin" and (code := source.read_bytes()).startswith(b"#!"):
            target.unlink()
            target.write_bytes(code.replace(sys.prefix.encode(), prefix.encode()))
            shutil.copymode(source, target)

    def build(self, command: str) -> None:
        """Run a build step as root, with the folders that pip's configuration may name."""
        offline = [str(p) for p in Path("/opt").iterdir() if p.is_dir()]
        pip = Path.home() / ".config" / "pip"
        binds = [(p, p) for p in offline] + [(str(pip), str(pip))] * pip.is_dir()
        keep = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_", "REQUESTS_"))}
        python = str(Path(sys.base_prefix, "bin"))
        keep |= {"PATH": f"{python}:/usr/sbin:/usr/bin", "HOME": str(Path.home())}
        argv = self._argv("build", "0:0", binds, ["/bin/sh", "-euc", command])
        done = subprocess.run(argv, env=keep, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], user: str, log: Path
    ) -> subprocess.Popen[bytes]:
        """Start `argv` as process 1 of the finished image. Killing the returned process ends it.

        Args:
            user: ``uid:gid``.
            log: file for stdout and stderr.
        """
        with log.open("ab") as out:
            return subprocess.Popen(
                self._argv("start", user, [], argv), env=dict(env), stdout=out, stderr=out
            )

    def _argv(
        self, state: str, user: str, binds: Sequence[tuple[str, str]], argv: Sequence[str]
    ) -> list[str]:
        system = [("/usr", "/usr"), ("/sys", "/sys")]
        if not Path(sys.base_prefix).is_relative_to("/usr"):
            system.append((sys.base_prefix, sys.base_prefix))
        pairs = [part for pair in [*system, *binds] for part in pair]
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        namespaces += ["--propagation", "private"]
        enter = ["/bin/bash", "-c", _ENTER, "enter", str(self.path), state, user]
        return [*namespaces, *enter, *pairs, "--", *argv]


def first_process(started: subprocess.Popen[bytes]) -> int:
    """Return the pid on this machine of the image's process 1."""
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    assert len(children) == 1, children
    return int(children[0])
