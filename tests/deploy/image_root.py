"""Run an image without a container engine: a root folder, entered in new namespaces.

The machine's /usr and Python replace the base image. Everything else is as in the image: the output
of the build steps, a read-only root file system, an unprivileged user, its own /tmp and its own
process 1. Needs root, or another user that can mount.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
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


# Folders that a build sees below /run: a `sitecustomize` that makes pip reuse bytecode of the test
# environment, and the packages of that environment.
COMPILED_ONCE = {
    "compiled_once": Path(__file__).with_name("compiled_once"),
    "compiled": Path(sysconfig.get_path("purelib")),
}


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

    def build(self, command: str) -> None:
        """Run a build step as root, with the folders that pip's configuration may name."""
        offline = [str(p) for p in Path("/opt").iterdir() if p.is_dir()]
        pip = Path.home() / ".config" / "pip"
        binds = [(p, p) for p in offline] + [(str(pip), str(pip))] * pip.is_dir()
        binds += [(str(folder), f"/run/{name}") for name, folder in COMPILED_ONCE.items()]
        keep = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_", "REQUESTS_"))}
        python = str(Path(sys.base_prefix, "bin"))
        keep |= {"PATH": f"{python}:/usr/sbin:/usr/bin", "HOME": str(Path.home())}
        keep |= {"PYTHONPATH": "/run/compiled_once", "COMPILED_ALREADY": "/run/compiled"}
        argv = self._argv("build", "0:0", binds, ["/bin/sh", "-euc", command])
        done = subprocess.run(argv, env=keep, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        user: str,
        binds: Sequence[tuple[str, str]],
        log: Path,
    ) -> subprocess.Popen[bytes]:
        """Start `argv` as process 1 of the finished image. Killing the returned process ends it.

        Args:
            user: ``uid:gid``.
            binds: more read-only folders, as source and target.
            log: file for stdout and stderr.
        """
        with log.open("ab") as out:
            return subprocess.Popen(
                self._argv("start", user, binds, argv), env=dict(env), stdout=out, stderr=out
            )

    def _argv(
        self, state: str, user: str, binds: Sequence[tuple[str, str]], argv: Sequence[str]
    ) -> list[str]:
        system = [("/usr", "/usr"), ("/sys", "/sys")]
        if not Path(sys.base_prefix).is_relative_to("/usr"):
            system.append((sys.base_prefix, sys.base_prefix))
        pairs = [part for pair in [*system, *binds] for part in pair]
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        command = ["/bin/bash", "-c", _ENTER, "enter", str(self.path), state, user]
        return [*namespaces, "--propagation", "private", *command, *pairs, "--", *argv]

    def remove(self) -> None:
        shutil.rmtree(self.path)


def first_process(started: subprocess.Popen[bytes]) -> int:
    """Return the pid on this machine of the image's process 1."""
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    assert len(children) == 1, children
    return int(children[0])
